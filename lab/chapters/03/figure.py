"""The figure of chapter 03: bytes per rank, and what hides behind what."""

import argparse
import math

from common import PRESETS, Config
from lab.chapters import chapter
from lab.drawing import BLUE, PURPLE, RED, above_overlap, config_of, runs_of, width_of
from lab.run import anatomy

OF = "03_zero"
LARGE = {"7B": PRESETS["7b"],
         "70B": Config(layers=86, dim=8192, heads=64, kv_heads=64, seq=4096, vocab=50304)}
KINDS = {"parameters": BLUE, "gradients": RED, "optimizer states": PURPLE}


def draw(runs):
    """By formula, for two shapes and up to 1024 ranks; with what runs of zero1, zero2 and zero3
    held per parameter, at the size of each shape. Below, of each run, what hides behind what."""
    measured = runs_of(runs, OF, "zero1", "zero2", "zero3")
    run = next(iter(runs_of(runs, OF).values()))
    config = run["config"]
    precision = "bf16" if config["precision"] == "bf16" else config["dtype"]
    figure, upper = above_overlap(11, 7, runs_of(runs, OF, *chapter("03").VARIANTS))
    rows = upper.subplots(2, sharex=True)
    worlds = [2**i for i in range(11)]
    for axes, (name, cfg) in zip(rows, LARGE.items()):
        for stage in range(4):
            places = [x + 0.2 * (stage - 1.5) for x in range(len(worlds))]
            args = argparse.Namespace(**config | {"model": cfg})
            answers = [{"zero": stage, "holders": n} if stage else {"zero": 1, "holders": 1}
                       for n in worlds]                 # data parallel: nobody to share with
            held = [dict(zip(KINDS, anatomy.state_bytes(args, answer, width_of(run)).values()))
                    for answer in answers]
            bottom = [0.0] * len(worlds)
            for kind, color in KINDS.items():
                heights = [h[kind] / 1e9 for h in held]
                axes.bar(places, heights, 0.17, bottom, color=color, edgecolor="white",
                         linewidth=0.3, label=kind if stage == 0 else None)
                bottom = [b + h for b, h in zip(bottom, heights)]
        for i, (variant, run) in enumerate(measured.items()):
            x = math.log2(run["world_size"]) + 0.2 * (int(variant[-1]) - 1.5)
            share = sum(held_bytes(run).values()) / config_of(run).parameters()
            axes.plot(x, share * cfg.parameters() / 1e9, "kx", markersize=5,
                      label="measured, at this size" if i == 0 else None)
        axes.axhline(80, color="gray", linestyle=":", linewidth=1)
        axes.text(len(worlds) - 0.4, 80, "80 GB", va="bottom", ha="right", color="gray", fontsize=8)
        axes.set_ylabel("GB per rank")
        what = (f"{name}: {cfg.parameters() / 1e9:.1f} B parameters, {precision}, "
                f"{config['optimizer']}")
        axes.set_title(f"{what}; from left: data parallel, zero1, zero2, zero3", fontsize=9)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set_xlabel("ranks")
    upper.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4)
    return figure


def held_bytes(run):
    """{kind: bytes} of the model states that a run has measured."""
    return {check["what"]: check["measured"] for check in run["checks"]
            if check["what"] in KINDS and check["amount"] in ("", "on the CPU")}
