"""The figure of chapter 11: what Newton-Schulz does, and what the three ways send and compute."""

import math
from dataclasses import replace

from common import PRESETS, gpt
from lab.chapters import chapter
from lab.drawing import BLUE, ORANGE, PURPLE, RED, config_of, new_figure, runs_of

OF = "11_muon"
COLORS = {"gather": RED, "owner": PURPLE, "deal": BLUE}
RANKS = [2**i for i in range(11)]
LARGE = "llama-8b"
STEPS = 5


def draw(runs):
    """Left: a singular value after each step. Then, of the matrices of a large model on up to 1,024
    ranks, what each way sends beside AdamW, and how much the busiest rank computes; crosses are
    what runs have measured, as shares of their own model's."""
    measured = runs_of(runs, OF, *COLORS)
    figure, (left, middle, right) = new_figure(13, 4.2, 1, 3)
    draw_steps(left)
    shapes = shapes_of(PRESETS[LARGE])
    numbers, flops = sum(map(math.prod, shapes)), sum(map(chapter("11").work, shapes))
    costs = [chapter("11").step_costs(shapes, n) for n in RANKS]
    for way, color in COLORS.items():
        sent, computed = zip(*(cost[way] for cost in costs))
        if any(sent):
            middle.plot(RANKS, [x / numbers or math.nan for x in sent], "o-", color=color,
                        markersize=3, label=way)
        right.plot(RANKS, [x / flops for x in computed], "o-", color=color, markersize=3,
                   label=way, linestyle="--" if way == "owner" else "-")
    for way, run in measured.items():
        draw_measured(middle, right, way, run)
    ideal = [1 / n for n in RANKS]
    right.plot(RANKS, ideal, ":", color="gray", linewidth=1, label="1/N")
    middle.set_title("sent beside AdamW's, over all numbers of matrices\n(owner: nothing)")
    right.set_title("FLOPs of the busiest rank, over those of all matrices")
    for axes in (middle, right):
        axes.set(xscale="log", yscale="log", xlabel=f"ranks, of the matrices of {LARGE}")
        axes.set_xticks(RANKS[::2], RANKS[::2])
        axes.legend(fontsize=8)
    return figure


def shapes_of(cfg):
    """Of all matrices of blocks; a model of one block has the same in each."""
    block = gpt(replace(cfg, layers=1, vocab=1), seed=None).block1
    return cfg.layers * [p.shape for p in block.parameters() if p.ndim > 1]


def draw_steps(axes):
    """A singular value after 1 to 5 steps, over what it was."""
    a, b, c = 3.4445, -4.7750, 2.0315
    start = [10 ** (-3 + 3 * i / 400) for i in range(401)]
    values = start
    for step in range(1, STEPS + 1):
        values = [a * s + b * s**3 + c * s**5 for s in values]
        style = {"color": ORANGE, "linewidth": 1, "alpha": 0.3 + 0.15 * step}
        if step == STEPS:
            style = {"color": BLUE, "linewidth": 2}
        axes.plot(start, values, label=f"after {step}", **style)
    axes.axhline(1, color="gray", linestyle=":", linewidth=1)
    axes.set(xscale="log", xlabel="singular value of the momentum, over its norm", ylim=(0, 1.3))
    axes.set_title("what steps of Newton-Schulz make of it")
    axes.legend(fontsize=8)


def draw_measured(middle, right, way, run):
    """Crosses. What gather sends cannot be told from what ZeRO gathers."""
    shapes, n = shapes_of(config_of(run)), run["world_size"]
    flops = max(of_rank["Newton-Schulz"] for of_rank in run["recorded"]["flops"])
    all_flops = sum(map(chapter("11").work, shapes))
    right.plot(n, flops / all_flops, "x", color=COLORS[way], markersize=9, markeredgewidth=2)
    if way == "deal" and "all_to_all" in run["comm"]:
        width = 8 if run["dtype"] == "float64" else 4
        if run["config"]["precision"] == "bf16":
            width = 2
        share = run["comm"]["all_to_all"]["wire_bytes"] / width / sum(map(math.prod, shapes))
        middle.plot(n, share, "x", color=COLORS[way], markersize=9, markeredgewidth=2)
