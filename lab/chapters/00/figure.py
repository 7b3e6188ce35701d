"""The figure of chapter 00: the collectives, round by round."""

import torch

from lab.chapters import chapter, room
from lab.drawing import BLUE, RED, blank, few, runs_of

OF = "00_collectives"


def draw(runs):
    """How many ranks' numbers each part is the sum of, in a ring all_reduce; who has rank 0's x, in
    a broadcast. What is in between was sent by the run: the same functions are called again, on
    simulate.py's network, which must pass the same messages."""
    run = runs_of(runs, OF)["collectives"]
    figure = blank(13, 5.5)
    n, messages = few(run["world_size"], "ranks", 16), run["recorded"]["messages"]
    states = {name: states_of(name, n, messages[name])
              for name in ("all_reduce_ring", "broadcast")}
    above, below = figure.subfigures(2, 1, height_ratios=(1.7, 1))
    above.suptitle(f"A ring all_reduce on {n} ranks (down), whose tensors have {n} parts (across): "
                   "of how many ranks a part is the sum; red: has just come, from the rank above",
                   fontsize=11)
    ring, passed = states["all_reduce_ring"], [[], *messages["all_reduce_ring"]]
    panels = above.subplots(2, -(-len(ring) // 2), squeeze=False).flat
    for i, axes in enumerate(panels):
        axes.set_axis_off()
        if i < len(ring):                               # there is a panel more than rounds
            draw_parts_of_ranks(axes, ring[i], ring[max(i - 1, 0)], passed[i], labelled=i == 0)
            axes.set_title(f"round {i}" if i else "before", loc="center", fontsize=9)
    axes = below.subplots()
    below.suptitle("A broadcast by a tree: who has it", fontsize=11)
    for i, (state, passed) in enumerate(zip(states["broadcast"], [*messages["broadcast"], []])):
        for rank in range(n):
            has_it = bool(state[rank].any())
            axes.plot(rank, -i, "o", markersize=14, color=BLUE if has_it else "#e0e0e0")
            axes.text(rank, -i, rank, ha="center", va="center", fontsize=8,
                      color="white" if has_it else "gray")
        for sender, receiver, _ in passed:
            axes.annotate("", (receiver, -i - 0.85), (sender, -i - 0.15),
                          arrowprops={"arrowstyle": "->", "color": RED})
    axes.set_yticks([-i for i in range(len(states["broadcast"]))],
                    ["before", *(f"round {i + 1}" for i in range(len(messages["broadcast"])))])
    axes.set_xticks([])
    axes.margins(x=0.05, y=0.2)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def draw_parts_of_ranks(axes, state, before, passed, labelled):
    """state, before: (ranks, parts), of how many ranks each is the sum; an arrow for each message
    of `passed`, to the part that it has changed."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle

    n = len(state)
    axes.imshow(state, cmap=LinearSegmentedColormap.from_list("", ["#eef1f6", BLUE]), vmin=1,
                vmax=max(n, 2))
    legible = n <= 8
    for rank in range(n) if legible else ():
        for part in range(n):
            axes.text(part, rank, f"{state[rank, part]:.0f}", ha="center", va="center", fontsize=7,
                      color="white" if state[rank, part] > n / 2 else BLUE)
    for rank in (range(n) if legible else (0, n - 1)) if labelled else ():
        axes.text(-0.8, rank, f"rank {rank}" if rank == 0 else rank, ha="right", va="center",
                  fontsize=8)
    for sender, receiver, _ in passed:
        for part in (state[receiver] != before[receiver]).nonzero()[0]:
            axes.add_patch(Rectangle((part - 0.5, receiver - 0.5), 1, 1, facecolor="none",
                                     edgecolor=RED, linewidth=12 / max(n, 8)))
            start = sender if sender < receiver else -1     # from the last rank to the first
            axes.annotate("", (part, receiver - 0.25), (part, start + 0.25), annotation_clip=False,
                          arrowprops={"arrowstyle": "->", "color": RED, "shrinkA": 0, "shrinkB": 0,
                                      "mutation_scale": 64 / max(n, 8)})


def states_of(name, n, messages):
    """x of all ranks before a collective and after each of its rounds: ones, whose sums count."""
    zero, states = chapter("00"), []
    starts = [torch.ones(n) if name != "broadcast" or rank == 0 else torch.zeros(n)
              for rank in range(n)]
    *_, nets, _ = room("00", "simulate").play(zero.BY_HAND[name], starts,
                                lambda xs: states.append(torch.stack(xs).numpy()))
    sent = sorted((rank, to) for rank, net in enumerate(nets) for to, _, _ in net.rounds
                  if to is not None)
    if sent != sorted((sender, receiver) for passed in messages for sender, receiver, _ in passed):
        raise ValueError(f"{name} has sent other messages than the chapter's")
    return states
