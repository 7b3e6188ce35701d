"""The figure of chapter 06: who computes which block, of one document or of several, and what hides
behind what."""

from types import SimpleNamespace

import torch

from lab.chapters import chapter
from lab.drawing import BLUE, RED, above_overlap, few, runs_of

OF = "06_context_parallel"


def draw(runs):
    """Of a plain ring and of a zig-zag: which rank computes which block, and the FLOPs that each
    has measured. Then the matrix of the last run with several documents, or a window. Below, of
    each run, what hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    several = [run for run in runs if is_several(run)][-1:]
    one = runs_of([run for run in runs if not is_several(run)], OF, *chapter("06").VARIANTS)
    names = one | {f"{run['variant']}, documents {run['config']['documents'] or 1}": run
                   for run in several}
    heights = {"ring zigzag": 6, "flops flops": 3} if one else {}
    heights |= {"documents pairs": 5.5} if several else {}
    figure, upper = above_overlap(11, sum(heights.values()), names)
    panels = upper.subplot_mosaic([row.split() for row in heights],
                                  height_ratios=list(heights.values()))
    if one:
        shown = {name: one[name] for name in ("ring", "zigzag") if name in one} or one
        ranks = min(few(max(run["world_size"] for run in shown.values()), "ranks"), 8)
        draw_blocks(panels["ring"], ranks, "ring")
        draw_blocks(panels["zigzag"], ranks, "zigzag")
        draw_bars(panels["flops"], {
            name: [of_rank["attention"] / 1e6 for of_rank in run["recorded"]["flops"]]
            for name, run in shown.items()})
        panels["flops"].set_title("MFLOP of a step's attention on each rank, measured")
    for run in several:
        draw_documents(panels["documents"], run)
        draw_bars(panels["pairs"], {run["variant"]: run["recorded"]["documents"]["work"]})
        panels["pairs"].set_title("pairs of a query and a key on each rank")
    return figure


def is_several(run):
    """PyTorch's runs have no such flags."""
    return run["variant"] != "torch" and bool(run["config"]["documents"] or run["config"]["window"])


def draw_bars(axes, heights):
    """heights: {name: [height of each rank's bar]}."""
    for i, (name, of_ranks) in enumerate(heights.items()):
        places = [rank + 0.4 * i for rank in range(len(of_ranks))]
        axes.bar(places, of_ranks, 0.4, color=(RED, BLUE)[i % 2], label=name)
    axes.set_xticks([rank + 0.2 * (len(heights) - 1) for rank in range(len(of_ranks))],
                    range(len(of_ranks)))
    axes.set_xlabel("rank")
    if len(heights) > 1:
        axes.legend(fontsize=8, loc="upper left")


def draw_blocks(axes, n, variant):
    """The causal matrix of 2n chunks, each block numbered by the hop at which it's computed."""
    args = SimpleNamespace(variant=variant, cut="sequence", window=None, inner=1)
    layout = chapter("06").Layout(args, 0, n, torch.zeros(2 * n, dtype=torch.int64))
    draw_matrix(axes, layout.positions, layout.first.tolist())
    for rank, queries in enumerate(layout.positions):
        for row in queries.tolist():
            axes.text(-0.7, row, f"rank {rank}", ha="right", va="center", fontsize=7)
            for hop in range(n):
                for column in layout.positions[rank - hop].tolist():
                    if column <= row:
                        axes.text(column, row, hop, ha="center", va="center", color="white",
                                  fontsize=8)
    name = "zig-zag" if variant == "zigzag" else "ring"
    axes.set_title(f"{name}: which rank computes a block of queries (down)\n"
                   "and keys (across), and at which hop")


def draw_documents(axes, run):
    """The matrix of the metered step, padding included."""
    documents = run["recorded"]["documents"]
    first = documents["first"]
    draw_matrix(axes, documents["positions"], first)
    axes.set_title(f"{run['variant']}, cut: {run['config']['cut']}: which rank computes\n"
                   f"which of {len(first)} queries (down) and keys (across)")


def draw_matrix(axes, positions, first):
    """Queries down, keys across, coloured by the rank that computes them. positions: of each part
    of the sequence, its places; first: of each place, the first key that it sees."""
    import matplotlib

    tokens = few(len(first), "tokens of documents")
    places = torch.arange(tokens)
    seen = (places <= places[:, None]) & (places >= torch.tensor(first)[:, None])
    image = torch.ones(tokens, tokens, 3)
    for rank, queries in enumerate(positions):
        image[queries] = torch.tensor(matplotlib.colormaps["tab10"].colors[rank % 10])
    axes.imshow(image.where(seen[:, :, None], torch.ones(3)), interpolation="none")
    axes.axis("off")
