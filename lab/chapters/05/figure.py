"""The figure of chapter 05: what is cut along the sequence, and what hides behind what."""

from common import PRESETS, Config
from lab.chapters import chapter
from lab.drawing import BLUE, PURPLE, RED, above_overlap, config_of, runs_of, width_of
from lab.run import anatomy

OF = "05_sequence_parallel"
BESIDE = "04_tensor_parallel"
SHAPES = {"7B": PRESETS["7b"],
          "Llama 70B's": Config(80, 8192, heads=64, kv_heads=8, seq=4096, vocab=128256,
                                attention="sdpa")}


def draw(runs):
    """Left: what rank 0 has of each tensor of a block. Right: activation bytes against ranks.
    Below, of each run, what hides behind what."""
    tensor = chapter("04")
    sequence = chapter("05")
    shown = [*runs_of(runs, BESIDE, "megatron").values(),
             *runs_of(runs, OF).values()]
    figure, upper = above_overlap(14, 4.5, runs_of(runs, OF, *sequence.VARIANTS))
    left, right = upper.subplots(1, 2, width_ratios=(3, 2))
    draw_cuts(left, shown)

    run = shown[-1]
    worlds = [1, 2, 4, 8, 16]
    lines = [(f"{name} shape", cfg, 1, 2, worlds) for name, cfg in SHAPES.items()]
    fitting = [n for n in worlds if tensor.fits(config_of(run), n, can_share=True)
               and config_of(run).seq % n == 0]
    lines.append(("this run", config_of(run), run["config"]["micro_batch"], width_of(run), fitting))
    for (name, cfg, batch, e, over), color in zip(lines, (BLUE, RED, PURPLE)):
        for what, module, style in (("TP", tensor, "--"), ("TP and SP", sequence, "-")):
            kept = [anatomy.activation_bytes(cfg, batch, e, module.kept(cfg, n)) for n in over]
            right.plot(over, kept, style, color=color, label=f"{name}, {what}")
    for run, mark in zip(shown, "x+1234"):
        right.plot(run["world_size"], run["recorded"]["activation_bytes"], f"k{mark}",
                   label=f"measured: {name_of(run)}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(worlds, worlds)
    right.set_xlabel("ranks")
    right.set_title("bytes of activations per rank (a sequence with fused attention, or this run)")
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
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
