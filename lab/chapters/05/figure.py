"""The figure of chapter 05: what is cut along the sequence, and what hides behind what."""

from lab.chapters import chapter
from lab.drawing import BLUE, above_overlap, config_of, runs_of

OF = "05_sequence_parallel"
BESIDE = "04_tensor_parallel"


def draw(runs):
    """What rank 0 has of each tensor of a block. Below, of each run, what hides behind what."""
    shown = [*runs_of(runs, BESIDE, "megatron").values(), *runs_of(runs, OF).values()]
    figure, upper = above_overlap(10, 1.6 * len(shown),
                                  runs_of(runs, OF, *chapter("05").VARIANTS))
    draw_cuts(upper.subplots(), shown)
    return figure


def name_of(run):
    return f"{run['chapter'][:2]} {run['variant']}"


def draw_cuts(axes, runs):
    """A row for each run: each tensor of a block in full, and rank 0's part of it."""
    from matplotlib.patches import Rectangle

    for row, run in enumerate(runs):
        cfg = config_of(run)
        axes.text(0, 1.5 * row - 0.2, name_of(run), fontsize=9, va="bottom")
        x = 0.0
        for name, (rows, columns) in run["recorded"]["shapes_of_a_block"].items():
            full = 4 * cfg.dim if name == "hidden units" else cfg.dim
            width = 2 * full / (4 * cfg.dim)
            part = rows / cfg.seq, width * columns / full
            for (tall, wide), color in (((1, width), "#dddddd"), (part, BLUE)):
                axes.add_patch(Rectangle((x, 1.5 * row), wide, tall, facecolor=color,
                                         edgecolor="white"))
            axes.text(x + width / 2, 1.5 * row - 0.03, name, fontsize=7, ha="center", va="bottom")
            x += width + 0.25
    axes.set_xlim(-0.05, x)
    axes.set_ylim(1.5 * len(runs) - 0.4, -0.5)
    axes.axis("off")
    axes.set_title("what rank 0 has of each tensor: down the sequence, across the features")
