"""The figure of chapter 06: who computes which block, and what hides behind what."""

from dataclasses import replace

from common import PRESETS
from lab.bench import anatomy
from lab.bench.drawing import (
    BLUE,
    ORANGE,
    PURPLE,
    RED,
    above_overlap,
    config_of,
    few,
    runs_of,
    width_of,
)
from lab.chapters import chapter

OF = "06_context_parallel"


def draw(runs):
    """Above: the causal matrix of a ring and of a zig-zag, each block with the rank that computes
    it and the hop. Below: FLOPs of each rank as measured, and activation bytes by formula; and of
    each run, what hides behind what."""
    context = chapter("06")
    shown = runs_of(runs, OF, "ring", "zigzag")
    shown = shown or runs_of(runs, OF)
    *_, run = shown.values()
    n = few(run["world_size"], "ranks")

    figure, upper = above_overlap(11, 10, runs_of(runs, OF, *context.VARIANTS))
    (left, right), (flops, lines) = upper.subplots(2, 2, height_ratios=(5, 3))
    for axes, zigzag in ((left, False), (right, True)):
        draw_blocks(axes, context, min(n, 8), zigzag)
    for i, (variant, measured) in enumerate(shown.items()):
        ranks = [rank + 0.4 * i for rank in range(n)]
        attention = [sum(of_rank.values()) / 1e6 for of_rank in measured["recorded"]["flops"]]
        flops.bar(ranks, attention, 0.4, color=(RED, BLUE)[i % 2], label=variant)
    flops.set_title("MFLOP of a step's attention on each rank, measured")
    flops.set_xticks([rank + 0.2 * (len(shown) - 1) for rank in range(n)], range(n))
    flops.set_xlabel("rank")
    flops.legend(fontsize=8, loc="upper left")

    sequences = [2**k for k in range(12, 21)]
    for ranks, color in zip((1, 4, 16), (BLUE, RED, PURPLE)):
        shapes = [replace(PRESETS["7b"], seq=seq) for seq in sequences]
        kept = [anatomy.activation_bytes(cfg, 1, 2, context.kept("zigzag", cfg, ranks))
                for cfg in shapes]
        lines.plot(sequences, kept, color=color, label=f"7B shape, ranks: {ranks}")
    cfg, batch = config_of(run), run["config"]["micro_batch"]
    around = [2 * n * k for k in (1, 4, 16, 64, 256, 1024)]
    kept = [anatomy.activation_bytes(replace(cfg, seq=seq), batch, width_of(run),
                                     context.kept(run["variant"], cfg, n)) for seq in around]
    lines.plot(around, kept,
               color=ORANGE, label=f"this run's shape, ranks: {n}")
    lines.plot(cfg.seq, run["recorded"]["activation_bytes"], "k+", label="measured")
    lines.set_xscale("log", base=2)
    lines.set_yscale("log")
    lines.set_xlabel("tokens of a sequence")
    lines.set_title("bytes of activations per rank")
    lines.legend(fontsize=8)
    return figure


def draw_blocks(axes, context, n, zigzag):
    """Rows: queries, columns: keys, in 2n chunks each; coloured by rank, numbered by hop."""
    import matplotlib
    from matplotlib.patches import Rectangle

    colors = matplotlib.colormaps["tab10"].colors
    for rank in range(n):
        queries = context.positions_of(rank, n, 2 * n, zigzag).tolist()
        for hop in range(n):
            other = (rank - hop) % n
            keys = context.positions_of(other, n, 2 * n, zigzag).tolist()
            rows, columns, causal = context.meeting(rank, other, 2, zigzag) or ((), (), False)
            if not rows:
                continue
            for row in queries[rows]:
                for column in keys[columns]:
                    if not causal or column <= row:
                        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=colors[rank],
                                                 edgecolor="white"))
                        axes.text(column + 0.5, row + 0.5, hop, ha="center", va="center",
                                  color="white", fontsize=8)
        for row in queries:
            axes.text(-0.2, row + 0.5, f"rank {rank}", ha="right", va="center", fontsize=7)
    axes.set_xlim(-2, 2 * n)
    axes.set_ylim(2 * n, 0)
    axes.set_aspect("equal")
    axes.axis("off")
    name = "zig-zag" if zigzag else "ring"
    axes.set_title(f"{name}: which rank computes a block of queries (down)\n"
                   "and keys (across), and at which hop")
