"""The figure of chapter 00: the collectives, round by round, and how long they take."""

import torch

from lab.bench.drawing import BLUE, ORANGE, PURPLE, RED, blank, few, runs_of
from lab.chapters import chapter
from lab.classroom import simulate
from lab.cli.words import quantity

OF = "00_collectives"


def draw(runs):
    """Above, who has what after each round, if the default variant was run; below, how long each
    all_reduce takes, if lab.speed was."""
    found = runs_of(runs, OF)
    parts = [part for variant, part in (("collectives", rounds), ("speed", times))
             if variant in found]
    if not parts:
        raise KeyError("messages")                      # of hello, say
    figure = blank(13, 5.5 * len(parts))
    for part, own in zip(parts, [figure] if len(parts) == 1 else figure.subfigures(2, 1)):
        part(own, found)
    return figure


def rounds(figure, found):
    """How many ranks' numbers each part is the sum of, in a ring all_reduce; who has rank 0's x, in
    a broadcast. What is in between was sent by the run: the same functions are called again, on
    lab/classroom/simulate.py's network, which must pass the same messages."""
    run = found["collectives"]
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
    *_, nets, _ = simulate.play(zero.BY_HAND[name], starts,
                                lambda xs: states.append(torch.stack(xs).numpy()))
    sent = sorted((rank, to) for rank, net in enumerate(nets) for to, _, _ in net.rounds
                  if to is not None)
    if sent != sorted((sender, receiver) for passed in messages for sender, receiver, _ in passed):
        raise ValueError(f"{name} has sent other messages than the chapter's")
    return states


def times(figure, found):
    """Seconds over bytes of each all_reduce, as measured; a panel for each model that is fitted."""
    run = found["speed"]
    measured, models = run["recorded"]["speed"], run["recorded"]["models"]
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, (how, fitted) in zip(panels, models.items()):
        for kind, color in zip(("naive", "tree", "ring", "doubling"), (ORANGE, RED, BLUE, PURPLE)):
            x, y = zip(*measured["by hand"][f"all_reduce_{kind}"])
            axes.loglog(x, [1e3 * t for t in y], "o-", color=color, label=kind, markersize=4)
            x, y = zip(*fitted["curves"][f"all_reduce_{kind}"])
            axes.loglog(x, [1e3 * t for t in y], color=color, linewidth=1, linestyle="--")
        x, y = zip(*measured["PyTorch"]["all_reduce"])
        axes.loglog(x, [1e3 * t for t in y], "s-", color="black", label="PyTorch's", markersize=4)
        heights = iter((0.98, 0.93, 0.88, 0.83, 0.78, 0.73))
        for words, crossovers in (("", run["recorded"]["crossovers"]),
                                  (" by the model", fitted["crossovers"])):
            for one, other, size in crossovers:
                if size:
                    axes.axvline(size, color="gray", linewidth=0.8, linestyle=":")
                    height = next(heights)              # clear of the curves, and of each other
                    axes.text(size, height, f" {one} beats {other}{words}", fontsize=8, va="top",
                              color="gray", transform=axes.get_xaxis_transform(), ha="right")
        beta = fitted["beta"]
        rate = f", B = {quantity(1 / beta)}/s" if beta else ""
        axes.set(xlabel="bytes")
        axes.set_title(f"dashed: {how}, α = {1e6 * fitted['alpha']:.0f} µs{rate}", loc="center",
                       fontsize=9)
    panels[0].set_ylabel("ms")
    panels[0].legend(fontsize=9)
    figure.suptitle(f"all_reduce on {run['world_size']} ranks", fontsize=11)
