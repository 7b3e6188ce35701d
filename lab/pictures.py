"""Draws the chapters' figures from the JSON of their runs.

    python -m lab.pictures runs/*.json [--out FOLDER]       one PNG for each chapter that is there

What a figure compares comes from several runs: the variants of a chapter, or chapter 04 beside 05.

Exit status: 0: all is drawn. 1: not all, since a run stopped before it was measured, or there is no
figure of it, or no room for one. 2: a file holds no run, or what none of our runs has recorded. A
line says which; the other figures are drawn, unless a file cannot be read at all.
"""

import argparse
import importlib
import math
import warnings
from dataclasses import fields, replace

import torch

import common
from common import PRESETS, Config
from lab import schedules
from lab.bench import anatomy
from lab.bench.meters import hidden_share
from lab.bench.runs import (
    LAST,
    alike_but_for_balance,
    arguments,
    files_of,
    in_words,
    largest_load,
    read_runs,
    was_measured,
)
from lab.classroom import simulate
from lab.cli import commands
from lab.cli.refusals import one_line, say
from lab.cli.words import quantity

BLUE, PURPLE, RED, ORANGE = "#355070", "#6d597a", "#e56b6f", "#eaac8b"
MOST = 4096             # ranks, layers or experts that a figure shows


def draw(runs, chapter, path):
    """Draw the figure of a chapter from JSON objects, of which it takes those that it compares."""
    FIGURES[chapter](runs).savefig(path, dpi=130)


def new_figure(width, height, *shape, **more):
    figure = blank(width, height)
    return figure, figure.subplots(*shape, **more)


def blank(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def runs_of(runs, chapter, *variants):
    """The last run of each of these variants (or of all) of a chapter, by variant."""
    found = {run["variant"]: run for run in runs if run["chapter"] == chapter}
    return {v: found[v] for v in variants or found if v in found}


def few(number, what, most=MOST):
    """The number, where it is no larger than a figure has room for, or takes too long to draw."""
    if not 0 < number <= most:
        raise ValueError(f"a figure shows 1 to {most} {what}, not {number}")
    return number


def config_of(run):
    few(run["config"]["layers"], "layers")              # formulas of activations list them all
    return Config(**{field.name: run["config"][field.name] for field in fields(Config)})


def width_of(run):
    return common.DTYPES[run["dtype"]].itemsize


# ------------------------------------------------------------------------------ 00: the collectives

def collectives(runs):
    """Above, who has what after each round, if the default variant was run; below, how long each
    all_reduce takes, if lab.speed was."""
    found = runs_of(runs, "00_collectives")
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
    lab/simulate's network, which must pass the same messages."""
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
            axes.set_title(f"round {i}" if i else "before", fontsize=9)
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
    zero, states = importlib.import_module("00_collectives"), []
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
        axes.set_title(f"dashed: {how}, α = {1e6 * fitted['alpha']:.0f} µs{rate}", fontsize=9)
    panels[0].set_ylabel("ms")
    panels[0].legend(frameon=False, fontsize=9)
    figure.suptitle(f"all_reduce on {run['world_size']} ranks", fontsize=11)


# ----------------------------------------------------------------------------------- 01: the memory

def memory(runs):
    """Bytes of each kind over the first steps, stacked."""
    *_, run = runs_of(runs, "01_single_gpu").values()
    seconds, parameters, gradients, states, activations = run["recorded"]["memory"]
    figure, axes = new_figure(10, 4.5)
    kinds = {"parameters": (parameters, BLUE), "optimizer states": (states, PURPLE),
             "gradients": (gradients, RED),
             "activations, and what an operator needs for a moment": (activations, ORANGE)}
    heights = [[b / 1e6 for b in y] for y, _ in kinds.values()]
    axes.stackplot([1e3 * t for t in seconds], heights,
                   labels=list(kinds), colors=[color for _, color in kinds.values()])
    config = run["config"]
    precision = config["dtype"] if config["precision"] == "fp32" else config["precision"]
    how = f"{precision}, attention {config['attention']}, recompute {config['recompute']}"
    on_cuda = run["device"].startswith("cuda")          # where the host does not wait for them
    axes.set(xlabel=f"time {'to launch' if on_cuda else 'in'} operators (ms)", ylabel="MB",
             title=f"The first steps ({how}): optimizer states come with the first")
    axes.margins(x=0)
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=4, frameon=False)
    return figure


# ---------------------------------------------------------------------------------- 02: the overlap

def overlap(runs):
    """One row per variant: backward with a tick per gradient; below it its all_reduces, from start
    to end, with the time for which they queued behind each other."""
    shown = runs_of(runs, "02_data_parallel", "naive", "overlap", "bucket") or runs_of(
        runs, "02_data_parallel")
    figure, rows = new_figure(10, 1.6 * len(shown) + 1, len(shown), sharex=True, squeeze=False)
    for [axes], (variant, run) in zip(rows, shown.items()):
        timeline = run["recorded"]["timeline"]
        begin, end = timeline["backward"][-1]
        since = lambda t, begin=begin: 1e3 * (t - begin)
        ready = [since(t) for t in timeline["gradients"] if t >= begin]
        sent = [(since(a), since(b)) for _, _, a, b in timeline["collectives"]]
        axes.barh(0.5, since(end), height=0.8, left=0, color=BLUE, label="backward")
        axes.vlines(ready, 0.1, 0.9, color=ORANGE, linewidth=0.8, label="a gradient is ready")
        lane = lanes(sent)
        height = 2 / (1 + max(lane, default=0))                     # all lanes share two units
        for i, (start, stop) in enumerate(sent):
            axes.barh(1.1 + height * (lane[i] + 0.5), stop - start, left=start,
                      height=0.9 * min(height, 1), color=RED, edgecolor="white",
                      linewidth=0.5 * (height > 0.2), label="an all_reduce" if i == 0 else None)
        axes.set_title(f"{variant}: {len(sent)} all_reduces, {hidden_share(timeline):.0%} of their "
                       "time hidden", loc="left", fontsize=10)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.margins(x=0)
    rows[-1][0].set_xlabel("ms since backward began")
    figure.legend(*rows[0][0].get_legend_handles_labels(), loc="outside upper right", ncols=3,
                  frameon=False)
    figure.suptitle(f"Rank 0 of {run['world_size']}, {run['device']}", x=0.01, ha="left")
    return figure


def lanes(spans):
    """A lane for each span (start, end), such that spans of one lane do not overlap."""
    free_from, chosen = [], []
    for start, end in spans:
        lane = next((i for i, t in enumerate(free_from) if t <= start), len(free_from))
        free_from[lane:lane + 1] = [end]
        chosen.append(lane)
    return chosen


# ------------------------------------------------------------------------------- 03: bytes per rank

LARGE = {"7B": common.PRESETS["7b"],
         "70B": Config(layers=86, dim=8192, heads=64, kv_heads=64, seq=4096, vocab=50304)}
KINDS = {"parameters": BLUE, "gradients": RED, "optimizer states": PURPLE}


def bytes_per_rank(runs):
    """By formula, for two shapes and up to 1024 ranks; with what runs of zero1, zero2 and zero3
    held per parameter, at the size of each shape."""
    measured = runs_of(runs, "03_zero", "zero1", "zero2", "zero3")
    run = next(iter(runs_of(runs, "03_zero").values()))
    config = run["config"]
    precision = "bf16" if config["precision"] == "bf16" else config["dtype"]
    figure, rows = new_figure(11, 7, 2, sharex=True)
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
        axes.set_title(f"{what}; from left: data parallel, zero1, zero2, zero3", loc="left",
                       fontsize=9)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set_xlabel("ranks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4,
                  frameon=False)
    return figure


def held_bytes(run):
    """{kind: bytes} of the model states that a run has measured."""
    return {kind: check["measured"] for check in run["checks"] for kind in KINDS
            if check["name"] in (kind, f"{kind}, on the CPU")}


# ------------------------------------------------------------------------- 04: who holds which part

def parts_of_matrices(runs):
    """Left: which rank holds which part of each matrix. Right: bytes sent, against the ranks."""
    *_, run = runs_of(runs, "04_tensor_parallel").values()
    figure, (left, right) = new_figure(12, 3.6, 1, 2, width_ratios=(5, 2))
    draw_parts(left, run["recorded"]["shards"])

    tensor = importlib.import_module("04_tensor_parallel")
    cfg, ranks = config_of(run), run["world_size"]
    micro_batches = run["config"]["batch"] // run["config"]["micro_batch"]
    worlds = [n for n in range(1, 2 * few(ranks, "ranks") + 1)
              if tensor.fits(cfg, n, can_share=True)]
    sent = []
    for n in worlds:
        formula = tensor.traffic(cfg, micro_batches, run["config"]["micro_batch"], n, width_of(run))
        sent.append(sum(wire for _, _, wire in formula.values()) / 1e6)
    measured = sum(op["wire_bytes"] for op in run["comm"].values()) / 1e6
    right.plot(worlds, sent, "o-", color=BLUE, markersize=3, label="formula for megatron")
    right.plot(ranks, measured, "kx", label=f"measured for {run['variant']}")
    right.set_xscale("log", base=2)
    right.set_xticks(worlds, worlds)
    right.set_ylim(bottom=0)
    right.set_xlabel("tensor-parallel ranks")
    right.set_title("MB that a rank sends in a step", loc="left", fontsize=10)
    right.legend(frameon=False)
    return figure


def draw_parts(axes, shards):
    """shards: for each rank {name: [full shape, [[dim, index, parts], ...]]}; equal parts of
    several ranks bear all their numbers."""
    from matplotlib.patches import Rectangle

    scale, x, tallest = 1 / max(max(shape) for shape, _ in shards[0].values()), 0.0, 0.0
    for name, (shape, _) in shards[0].items():
        height, width = (scale * size for size in shape)
        for rank, held in enumerate(shards):
            cuts = held[name][1]
            low, size = [0.0, 0.0], [height, width]
            for dim, index, count in cuts:
                size[dim] /= count
                low[dim] = index * size[dim]
            axes.add_patch(Rectangle((x + low[1], low[0]), size[1], size[0], edgecolor="white",
                                     facecolor=f"C{rank % 10}", linewidth=0.5))
            holders = [r for r, other in enumerate(shards) if other[name][1] == cuts]
            if rank == holders[0]:
                axes.text(x + low[1] + size[1] / 2, low[0] + size[0] / 2,
                          ",".join(map(str, holders)), ha="center", va="center", fontsize=5,
                          color="white", rotation=90 if size[1] < 0.06 else 0)
        axes.text(x + width / 2, -0.02, name, ha="center", va="bottom", fontsize=8)
        x, tallest = x + width + 0.08, max(tallest, height)
    axes.set_xlim(-0.02, x)
    axes.set_ylim(tallest + 0.02, -0.08)
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("weights (out, in) and the ranks that hold each part", loc="left", fontsize=10)


# ----------------------------------------------------------------------- 05: cut along the sequence

SHAPES = {"7B": common.PRESETS["7b"],
          "Llama 70B's": Config(80, 8192, heads=64, kv_heads=8, seq=4096, vocab=128256,
                                attention="sdpa")}


def along_the_sequence(runs):
    """Left: what rank 0 has of each tensor of a block. Right: activation bytes against ranks."""
    tensor = importlib.import_module("04_tensor_parallel")
    sequence = importlib.import_module("05_sequence_parallel")
    shown = [*runs_of(runs, "04_tensor_parallel", "megatron").values(),
             *runs_of(runs, "05_sequence_parallel").values()]
    figure, (left, right) = new_figure(14, 4.5, 1, 2, width_ratios=(3, 2))
    draw_cuts(left, shown)

    run = shown[-1]
    worlds = [1, 2, 4, 8, 16]
    lines = [(f"{name} shape", cfg, 1, 2, worlds) for name, cfg in SHAPES.items()]
    fitting = [n for n in worlds if tensor.fits(config_of(run), n, can_share=True)
               and config_of(run).seq % n == 0]
    lines.append(("this run", config_of(run), run["config"]["micro_batch"], width_of(run), fitting))
    for (name, cfg, batch, e, over), color in zip(lines, (BLUE, RED, PURPLE)):
        for what, chapter, style in (("TP", tensor, "--"), ("TP and SP", sequence, "-")):
            kept = [anatomy.activation_bytes(cfg, batch, e, chapter.kept(cfg, n)) for n in over]
            right.plot(over, kept, style, color=color, label=f"{name}, {what}")
    for run, mark in zip(shown, "x+1234"):
        right.plot(run["world_size"], run["recorded"]["activation_bytes"], f"k{mark}",
                   label=f"measured: {name_of(run)}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(worlds, worlds)
    right.set_xlabel("ranks")
    right.set_title("bytes of activations per rank (a sequence with fused attention, or this run)",
                    loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
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
    axes.set_title("what rank 0 has of each tensor: down the sequence, across the features",
                   loc="left", fontsize=10)


def who_computes(runs):
    """Above: the causal matrix of a ring and of a zig-zag, each block with the rank that computes
    it and the hop. Below: FLOPs of each rank as measured, and activation bytes by formula."""
    context = importlib.import_module("06_context_parallel")
    shown = runs_of(runs, "06_context_parallel", "ring", "zigzag")
    shown = shown or runs_of(runs, "06_context_parallel")
    *_, run = shown.values()
    n = few(run["world_size"], "ranks")

    figure, ((left, right), (flops, lines)) = new_figure(11, 10, 2, 2, height_ratios=(5, 3))
    for axes, zigzag in ((left, False), (right, True)):
        draw_blocks(axes, context, min(n, 8), zigzag)
    for i, (variant, measured) in enumerate(shown.items()):
        ranks = [rank + 0.4 * i for rank in range(n)]
        attention = [sum(of_rank.values()) / 1e6 for of_rank in measured["recorded"]["flops"]]
        flops.bar(ranks, attention, 0.4, color=(RED, BLUE)[i % 2], label=variant)
    flops.set_title("MFLOP of a step's attention on each rank, measured", loc="left", fontsize=10)
    flops.set_xticks([rank + 0.2 * (len(shown) - 1) for rank in range(n)], range(n))
    flops.set_xlabel("rank")
    flops.legend(frameon=False, fontsize=8, loc="upper left")

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
    lines.set_title("bytes of activations per rank", loc="left", fontsize=10)
    lines.legend(frameon=False, fontsize=8)
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
                   "and keys (across), and at which hop", loc="left", fontsize=10)


# ------------------------------------------------------------------------- 07: who works, who waits

GREEN, IDLE = "#81a88d", "#e9e9e9"
ACTIONS = {"F": (BLUE, "F: forward"), "B": (ORANGE, "B: backward, input"),
           "W": (GREEN, "W: backward, weights"), "BW": (RED, "BW: backward, input and weights")}
BUBBLES = {"afab": (ORANGE, "-", 5), "1f1b": (BLUE, "-", 1.5), "interleaved": (RED, "o-", 1.5),
           "zb-h1": ("#c9bfd3", "-", 5), "zb-h2": (PURPLE, "-", 1.5),
           "dualpipe": ("black", "-", 1), "dualpipe-v": ("black", ":", 1.5)}


def schedule(runs):
    """Rank by rank, the schedule of the last run: as simulated, as slept through, as computed; and
    the bytes that each rank keeps. At the bottom: the bubbles of all schedules, simulated."""
    pipeline = importlib.import_module("07_pipeline_parallel")
    known = [run for run in runs if run["chapter"] == "07_pipeline_parallel"
             and "simulated" in run["recorded"]]
    known.sort(key=lambda run: "executed" in run["recorded"])       # rather one that has computed
    run = known[-1] if known else {"recorded": {}}
    for other in known:                                 # lab.schedules has slept through the same
        same = other["recorded"]["simulated"] == run["recorded"]["simulated"]
        if "asleep" in other["recorded"] and same:
            asleep = {"asleep": other["recorded"]["asleep"]}
            run = run | {"recorded": run["recorded"] | asleep, "sleep": other["config"]["sleep"]}
    shown = [of for of in ("simulated", "asleep", "executed") if of in run["recorded"]]
    p = len(run["recorded"].get("simulated", []))
    inches = {of: 0.7 + 0.3 * p for of in shown}
    inches |= {"kept": 2.4} if "executed" in shown else {}
    inches["bubbles"] = 3.2
    figure = blank(12, 0.3 + sum(inches.values()))
    panels = figure.subplot_mosaic([[name] for name in inches],
                                   height_ratios=list(inches.values()))

    for of in shown:
        actions = timeline(run, of)
        draw_actions(panels[of], actions)
        panels[of].set_title(title_of(run, of, actions), loc="left", fontsize=10)
        if of == "executed":
            draw_kept(panels["kept"], actions)
            panels["kept"].sharex(panels[of])
    if shown:
        draw_legend(figure, run["recorded"]["simulated"])
    draw_bubbles(panels["bubbles"], pipeline)
    return figure


def timeline(run, of):
    """The actions of each rank; of a real step in ms."""
    unit = 1 if of == "simulated" else 1e3
    return [[[kind, stage, i, unit * start, unit * end, *kept]
             for kind, stage, i, start, end, *kept in of_rank] for of_rank in run["recorded"][of]]


def title_of(run, of, actions):
    m = len({action[2] for of_rank in actions for action in of_rank})
    end = max(action[4] for of_rank in actions for action in of_rank)
    work = sum(action[4] - action[3] for of_rank in actions for action in of_rank)
    turns = ", where ranks take turns if cores are fewer" if run["device"] == "cpu" else ""
    what = {"simulated": f"{run['variant']}, p = {len(actions)}, m = {m}, as simulated, F = B = W",
            "asleep": f"the same in ms, if each F, B and W sleeps for {run.get('sleep')} ms",
            "executed": f"the same in ms, as computed on {run['device']}{turns}"}
    return f"{what[of]}: idle over work {len(actions) * end / work - 1:.2f}"


def draw_actions(axes, actions):
    """A row for each rank: grey, and on it a box for each action."""
    end = max(action[4] for of_rank in actions for action in of_rank)
    points = 72 * 11.3 / end                            # of paper, for a unit of time
    for rank, of_rank in enumerate(actions):
        axes.barh(rank, end, height=0.86, color=IDLE)
        for kind, stage, i, start, stop, *_ in of_rank:
            color, width = shade(kind, stage == rank), points * (stop - start)
            axes.barh(rank, stop - start, left=start, height=0.86, color=color, edgecolor="white",
                      linewidth=min(0.6, 0.1 * width))
            size = min(7, 1.4 * width / len(str(i)))    # of a number that fits into the box
            if size > 4.5:
                is_dark = kind in ("F", "BW") and stage == rank
                axes.text((start + stop) / 2, rank, i, ha="center", va="center_baseline",
                          fontsize=size, color="white" if is_dark else "black")
    axes.set_yticks(range(len(actions)), [f"rank {rank}" for rank in range(len(actions))])
    axes.set_ylim(len(actions) - 0.5, -0.5)
    axes.set_xlim(0, 1.003 * end)
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)


def shade(kind, is_first):
    """The color of an action, which is lighter in a stage that is not its rank's first."""
    from matplotlib.colors import to_hex, to_rgb

    color, _ = ACTIONS[kind]
    return color if is_first else to_hex([1 - 0.5 * (1 - part) for part in to_rgb(color)])


def draw_legend(figure, simulated):
    from matplotlib.patches import Patch

    there = {(action[0], action[1] == rank) for rank, of_rank in enumerate(simulated)
             for action in of_rank}
    boxes = [Patch(color=color, label=label) for kind, (color, label) in ACTIONS.items()
             if kind in {kind for kind, _ in there}]
    if not all(is_first for _, is_first in there):
        boxes.append(Patch(color=shade("F", False), label="lighter: the rank's further stages"))
    boxes.append(Patch(color=IDLE, label="idle"))
    figure.legend(handles=boxes, loc="outside upper right", ncols=6, frameon=False, fontsize=9)


def draw_kept(axes, actions):
    """Over the same time: MB after each action."""
    import matplotlib

    colors = matplotlib.colormaps["plasma"]
    for rank, of_rank in enumerate(actions):
        axes.step([action[4] for action in of_rank], [action[5] / 1e6 for action in of_rank],
                  where="post", color=colors(0.9 * rank / len(actions)), linewidth=1.4,
                  label=f"rank {rank}")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.set_title("activations in MB that each rank keeps for backward, after each of its actions",
                   loc="left", fontsize=10)
    axes.set_xlabel("ms since the step began", fontsize=9)
    axes.legend(loc="upper center", ncols=8, frameon=False, fontsize=8)


def draw_bubbles(axes, pipeline, p=8, v=2):
    """Of each schedule, against the micro-batches with which it can be."""
    for variant, (color, style, width) in BUBBLES.items():
        first = 2 * p if variant.startswith("dualpipe") else p
        counts = range(first, 8 * p + 1, p if variant == "interleaved" else 2)
        ratios = [schedules.simulated_bubble(pipeline.make_schedule(variant, p, m, v), variant)
                  for m in counts]
        label = {"interleaved": f"interleaved, {v} slices each",
                 "zb-h2": "zb-h2, between a rank's first and last action"}.get(variant, variant)
        axes.plot(counts, ratios, style, color=color, linewidth=width, markersize=3, label=label)
    naive = schedules.simulated_bubble(pipeline.make_schedule("naive", p, p), "naive")
    axes.plot([], [], " ", label=f"naive: {naive:g}, however many micro-batches")
    axes.set_xscale("log", base=2)
    axes.set_xticks([p, 2 * p, 4 * p, 8 * p], [p, 2 * p, 4 * p, 8 * p])
    axes.set_ylim(bottom=-0.02)
    axes.margins(x=0.01)
    axes.set_xlabel("micro-batches")
    axes.set_title(f"the bubble over work of all schedules, simulated: {p} ranks, F = B = W",
                   loc="left", fontsize=10)
    axes.legend(loc="upper right", frameon=False, fontsize=8)


# ------------------------------------------------------------------------------- 08: who is chosen

BALANCES = {"none": (ORANGE, 5), "loss": (BLUE, 2.2), "bias": (RED, 1)}


def who_is_chosen(runs):
    """Left: how many rows each rank sends to each, if possible without balance. Right, of the last
    run of each balance: every expert's share of the picks over the steps; and below, the training
    losses, or what they differ by from the one without balance."""
    runs = [run for run in runs if run["chapter"] == "08_expert_parallel"]
    runs.sort(key=lambda run: "loads" in run["recorded"])           # rather one that has loads
    last = {run["config"]["balance"]: run for run in runs}
    shown = {balance: last[balance] for balance in BALANCES if balance in last}
    columns = [balance for balance in shown if "loads" in shown[balance]["recorded"]] or ["losses"]
    with_rows = [run for run in runs if run["recorded"].get("rows")]
    with_rows.sort(key=lambda run: (run["world_size"], run["config"]["balance"] == "none"))

    left = ["rows"] if with_rows else []
    widths = [5.0] * len(left) + [10 / max(len(columns), 2)] * len(columns)
    figure = blank(sum(widths), 3 if columns == ["losses"] else 6.4)
    panels = figure.subplot_mosaic([left + columns, left + ["losses"] * len(columns)],
                                   width_ratios=widths, height_ratios=(3, 2))
    for run in with_rows[-1:]:
        draw_rows(panels["rows"], run)
    for balance in columns:
        if balance != "losses":
            draw_shares(panels[balance], shown[balance])
            panels[balance].set_yticks([])
    if columns != ["losses"]:
        panels[columns[0]].set_ylabel("each expert's share of the picks in the first layer\n"
                                      "(dotted: if all were chosen alike)", fontsize=9)
    draw_losses(panels["losses"], shown)
    return figure


def draw_rows(axes, run):
    """From each rank (down) to each (across): darker where more rows go."""
    from matplotlib.colors import LinearSegmentedColormap

    rows, n = run["recorded"]["rows"], few(run["world_size"], "ranks")
    most = max(map(max, rows))
    axes.imshow(rows, cmap=LinearSegmentedColormap.from_list("", ["white", BLUE]), vmin=0)
    size = min(9, 120 / n)                              # of a number that fits into its cell
    for sender, sent in enumerate(rows):
        for receiver, count in enumerate(sent):
            axes.text(receiver, sender, f"{count:.0f}", ha="center", va="center", fontsize=size,
                      color="white" if count > 0.7 * most else "black")
    received = [f"{rank}\n{sum(column):.0f}" for rank, column in enumerate(zip(*rows))]
    axes.set_xticks(range(n), received, fontsize=size)
    axes.set_yticks(range(n), range(n), fontsize=size)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#cccccc")
    axes.set_ylabel("from rank", fontsize=9)
    axes.set_xlabel("to rank; below: the rows that it receives from all", fontsize=9)
    axes.set_title("how many rows go from rank to rank in the step that is metered\n"
                   f"(first layer, first micro-batch, balance: {run['config']['balance']})",
                   loc="left", fontsize=10)


def draw_shares(axes, run):
    """Stacked: expert 0 is at the bottom."""
    from matplotlib.colors import LinearSegmentedColormap

    loads = [layers[0] for layers in run["recorded"]["loads"]]
    shares = zip(*[[load / sum(step) for load in step] for step in loads])
    shares = [smooth(of_expert) for of_expert in shares]
    steps, n = len(loads), len(shares)
    thin = min(0.8, 8 / n)
    colors = LinearSegmentedColormap.from_list("", [BLUE, PURPLE, RED, ORANGE], N=n)
    edges = [step + 0.5 for step in range(steps + 1)]               # between steps
    axes.stackplot(edges, [[*share, share[-1]] for share in shares], step="post",
                   edgecolor="white", linewidth=thin, colors=[colors(i) for i in range(n)])
    bottom = 0
    for i, share in enumerate(shares):
        if share[-1] > 0.035:                           # where its number fits
            axes.text(edges[-1], bottom + share[-1] / 2, f" {i}", va="center", fontsize=8)
        bottom += share[-1]
    axes.hlines([i / n for i in range(1, n)], edges[0], edges[-1], color="black", linestyle=":",
                linewidth=thin)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(0, 1)
    axes.spines[:].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step", fontsize=9)
    axes.set_title(f"balance: {run['config']['balance']}; largest over mean load\n"
                   f"(all layers, last {min(steps, LAST)} steps): {largest_load(run):.2f}",
                   loc="left", fontsize=10)


def smooth(values):
    """Of many, each becomes the mean of itself and its neighbours."""
    reach = len(values) // 40
    near = [values[max(0, i - reach):i + reach + 1] for i in range(len(values))]
    return [sum(some) / len(some) for some in near]


def draw_losses(axes, shown):
    """If there are others like the run without balance, what their losses differ by from its."""
    without, kinds = shown.get("none"), {alike_but_for_balance(run) for run in shown.values()}
    compared = without and len(shown) > 1 and len(kinds) == 1
    for balance, run in shown.items():
        (color, width), last = BALANCES[balance], run["loss"][-LAST:]
        heights = run["loss"]
        if compared:
            heights = [loss - other for loss, other in zip(heights, without["loss"])]
        axes.plot(range(1, len(heights) + 1), smooth(heights), color=color,
                  linewidth=width, marker="o", markersize=4 if len(heights) < LAST else 0,
                  label=f"{balance}: {sum(last) / len(last):.4f} "
                        f"(mean of the last {len(last)} steps)")
    axes.set_xlim(0.5, max(len(run["loss"]) for run in shown.values()) + 0.5)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step", fontsize=9)
    what = "training loss, minus that of balance: none" if compared else "training loss, by balance"
    axes.set_title(what, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=9, title="the loss itself" if compared else None)


# ------------------------------------------------------------------- 09: who is where, and has what

AXES = {"pp": "#4f8a5b", "dp": BLUE, "ep": "#a05fb4", "cp": "#d9822b", "tp": RED}
ALIKE = "#dddddd"                                       # what all ranks of a stage hold
CELL, GAP, BETWEEN = (1.0, 0.62), (0.42, 0.75), 0.3     # of the mesh; between blocks of it


def five_axes(runs):
    """Of the last dense run, and of the last mixture: the mesh and what is sent on it; who has
    which layers, which tokens, and which part of a block's matrices."""
    runs = [run for run in runs if run["chapter"] == "09_5d"]
    last = {run["config"]["experts"] > 0: run for run in runs if "places" in run["recorded"]}
    if not last:                                        # of PyTorch's run alone no more is known
        figure, axes = new_figure(6, 3)
        axes.plot(range(1, 1 + len(runs[-1]["loss"])), runs[-1]["loss"], "o-", color=BLUE)
        axes.set_xlabel("step")
        axes.set_title("training loss", loc="left", fontsize=10)
        return figure

    shown, width = [last[is_mixture] for is_mixture in sorted(last)], 7.5
    most_sent = max(len(sent_on(run)) for run in shown)
    heights = [0.4 + max(tall * min(1.1, width / wide) for wide, tall in map(size_of_mesh, shown)),
               0.4 + 0.19 * most_sent, 0.75, 3.3]
    figure = blank(width * len(shown), sum(heights))
    rows = [[f"{name}{i}" for i in range(len(shown)) for name in row] for row in (
        ("mesh", "mesh"), ("sent", "sent"), ("layers", "layers"), ("tokens", "block"))]
    panels = figure.subplot_mosaic(rows, height_ratios=heights, width_ratios=(2, 3) * len(shown))
    for i, run in enumerate(shown):
        draw_mesh(panels[f"mesh{i}"], run)
        draw_sent(panels[f"sent{i}"], run, most_sent)
        draw_layers(panels[f"layers{i}"], run)
        draw_tokens(panels[f"tokens{i}"], run)
        draw_block(panels[f"block{i}"], run)
    for axes in panels.values():
        axes.axis("off")
    return figure


def places_of(run):
    """For each rank {axis: index}, of the axes that the mesh has, the outermost first."""
    recorded = run["recorded"]
    places = [dict(zip(("pp", "dp", "cp", "tp"), place)) for place in recorded["places"]]
    axes = [axis for axis in recorded["order"] if len({place[axis] for place in places}) > 1]
    return [{axis: place[axis] for axis in axes} for place in places]


def degrees_of(places):
    return {axis: 1 + max(place[axis] for place in places) for axis in places[0]}


def groups_of_experts(run):
    """The groups of ep, if there are any: each a list of ranks."""
    return run["recorded"]["axes"].get("ep", {"groups": []})["groups"]


def with_experts(run):
    """places_of, and a rank's index on ep: its place in its group."""
    places = places_of(run)
    for group in groups_of_experts(run):
        for index, rank in enumerate(group):
            places[rank]["ep"] = index
    return places


def tint(axis, index, count):
    """Of the colour of an axis, for one index of it."""
    from matplotlib.colors import to_rgb

    paler = 0.1 + 0.55 * index / max(count - 1, 1)
    return [(1 - paler) * part + paler for part in to_rgb(AXES[axis])]


def tint_of(place, degrees):
    """The mean of the shades of several axes."""
    shades = [tint(axis, index, degrees[axis]) for axis, index in place.items()]
    return [sum(parts) / len(parts) for parts in zip(*shades)] or ALIKE


def box(axes, x, y, width, height, text, size, color, **more):
    """A part of something, with what is written in it."""
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor="white",
                             linewidth=0.7))
    is_dark = color != ALIKE and sum(color) < 1.9
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size,
              color="white" if is_dark else "black", **more)


def corners_of_mesh(run):
    """Where each rank's cell is: along the last axis to the right, along the one before it down;
    along those before them, blocks of such cells to the right, and down."""
    places, steps, pitch = places_of(run), {}, [size + gap for size, gap in zip(CELL, GAP)]
    for i, (axis, count) in enumerate(reversed(degrees_of(places).items())):
        steps[axis] = [pitch[0], 0] if i % 2 == 0 else [0, pitch[1]]
        pitch[i % 2] = pitch[i % 2] * count + BETWEEN
    return [[sum(index * steps[axis][way] for axis, index in place.items()) for way in (0, 1)]
            for place in places]


def size_of_mesh(run):
    return [0.6 + size + max(along) for size, along in zip(CELL, zip(*corners_of_mesh(run)))]


def draw_mesh(axes, run):
    """Ranks as cells, in boxes that are machines; a link for each two neighbours along an axis,
    dashed where it leaves the machine."""
    from matplotlib.patches import FancyBboxPatch

    def rounded(x, y, width, height, fill, edge, zorder):
        axes.add_patch(FancyBboxPatch((x, y), width, height, facecolor=fill, edgecolor=edge,
                                      boxstyle="round,pad=0,rounding_size=0.07", zorder=zorder))

    corners, node = corners_of_mesh(run), run["config"]["node_size"]
    (width, height), (wide, tall) = CELL, size_of_mesh(run)
    small = min(7.5, 50 / wide)
    for first in range(0, len(corners), node):
        for part in boxes_around(corners, first, first + node):
            (left, top), (right, bottom) = (map(f, zip(*part)) for f in (min, max))
            rounded(left - 0.14, top - 0.34, right - left + width + 0.28,
                    bottom - top + height + 0.6, "#f2f2f2", "#bbbbbb", 0)
            axes.text(left - 0.08, bottom + height + 0.06, f"machine {first // node}", va="top",
                      fontsize=0.85 * small, color="gray")
    for axis, one, other in neighbours(run):
        draw_link(axes, run, axis, corners[one], corners[other], one // node != other // node)
    for rank, ((x, y), place) in enumerate(zip(corners, with_experts(run))):
        rounded(x, y, width, height, "white", "black", 3)
        axes.text(x + 0.17, y + height / 2, rank, ha="center", va="center", fontsize=1.6 * small,
                  zorder=4)
        lines = math.ceil(len(place) / 2)
        for i, (axis, index) in enumerate(place.items()):
            axes.text(x + 0.34 + 0.33 * (i % 2), y + height * (0.15 + 0.7 * (i // 2 + 0.5) / lines),
                      f"{axis} {index}", va="center", fontsize=small, color=AXES[axis], zorder=4)
    axes.set_xlim(-0.5 if len(degrees_of(places_of(run))) > 3 else -0.2, wide - 0.2)
    axes.set_ylim(tall - 0.2, -0.4)
    axes.set_aspect("equal", anchor="NW")
    degrees = " × ".join(f"{axis} {count}" for axis, count in degrees_of(places_of(run)).items())
    ep = run["config"]["ep"]
    axes.set_title(f"the mesh: {degrees or 'one rank'}{f', and in dp: ep {ep}' * (ep > 1)}\n"
                   "(a link: neighbours along an axis; dashed: it leaves the machine)",
                   loc="left", fontsize=10)


def boxes_around(corners, first, last):
    """The corners of a machine's ranks: all together if their bounding box has no other rank in it,
    otherwise row by row."""
    mine = corners[first:last]
    (left, top), (right, bottom) = (map(f, zip(*mine)) for f in (min, max))
    inside = [(x, y) for x, y in corners if left <= x <= right and top <= y <= bottom]
    if len(inside) == len(mine):
        return [mine]
    return [[corner for corner in mine if corner[1] == row] for row in {y for _, y in mine}]


def neighbours(run):
    """[(axis, rank, rank)]: whose places differ by one on one axis; those on ep as well."""
    found, places = [], places_of(run)
    for one, at in enumerate(places):
        for axis in at:
            after = at | {axis: at[axis] + 1}
            found += [(axis, one, places.index(after))] if after in places else []
    return found + [("ep", *pair) for group in groups_of_experts(run)
                    for pair in zip(group, group[1:])]


def draw_link(axes, run, axis, start, end, leaves):
    """Straight between cells beside each other; in a bow over those between."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Line

    (width, height), aside = CELL, {"ep": 0.1}.get(axis, 0)
    (x, y), (x1, y1) = start, end
    slot = [*places_of(run)[0]][::-1].index("dp" if axis == "ep" else axis)
    if slot == 0:
        line = [(x + width, y + height / 2 + aside), (x1, y + height / 2 + aside)]
    elif slot == 1:
        line = [(x + width / 2 + aside, y + height), (x1 + width / 2 + aside, y1)]
    elif slot == 2:
        x, x1, up = x + 0.7 * width - aside, x1 + 0.3 * width + aside, y - 0.4 + aside
        line = [(x, y), (x, up), (x1, up), (x1, y)]
    else:
        y, y1 = y + 0.7 * height - aside, y1 + 0.3 * height + aside
        out = x - (0.5 if start[1] else 0.3) + aside
        line = [(x, y), (out, y), (out, y1), (x, y1)]
    codes = [Line.MOVETO] + [Line.LINETO if slot < 2 else Line.CURVE4] * (len(line) - 1)
    axes.add_patch(PathPatch(Line(line, codes), facecolor="none", edgecolor=AXES[axis],
                             linewidth=2, linestyle=(0, (2, 1)) if leaves else "-", zorder=2))


def sent_on(run):
    """What is sent: [(name, axes that its groups lie along, bytes of a rank in the mean, ranks of a
    group, whether any group leaves a machine)]."""
    places, found = places_of(run), []
    for name, axis in run["recorded"]["axes"].items():
        [first, *_] = groups = axis["groups"]
        along = ["ep"] if name == "ep" else [
            each for each in places[0] if len({places[rank][each] for rank in first}) > 1]
        if axis["total"]:
            mean = axis["total"] / sum(map(len, groups))
            found.append((name, along, mean, len(first), axis["leaves"]))
    return found


def draw_sent(axes, run, most):
    axes.set_title("what a rank sends in a step (on the wire, mean of all ranks), and to whom",
                   loc="left", fontsize=10)
    for row, (name, along, size, ranks, leaves) in enumerate(sent_on(run)):
        for i, axis in enumerate(along):
            axes.plot([0.035 * i, 0.035 * i + 0.025], [row, row], color=AXES[axis], linewidth=3,
                      linestyle=(0, (1.2, 0.6)) if leaves else "-", solid_capstyle="butt")
        where = "between machines" if leaves else "inside a machine"
        for x, text, side in ((0.16, name, "left"), (0.57, quantity(round(size)), "right"),
                              (0.61, f"{ranks} ranks, {where}", "left")):
            axes.text(x, row, text, ha=side, va="center", fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(max(most, 1) - 0.5, -0.5)


def draw_layers(axes, run):
    """The list of modules, and who has which slice of it."""
    recorded = run["recorded"]
    stages, ranks = recorded["stages"], 1 + max(recorded["stages"])
    end = few(recorded["slices"][-1][1], "modules")
    names = ["embedding", *range(1, end - 1), "head"]
    ends = [0, *range(2, end + 1), end + 2]              # the first and the last one are wider
    for (first, last), rank in zip(recorded["slices"], stages):
        color = tint("pp", rank, ranks) if ranks > 1 else ALIKE
        for i in range(first, last):
            box(axes, ends[i], 0, ends[i + 1] - ends[i], 1, names[i], min(7, 120 / end), color)
        if ranks > 1:
            axes.text((ends[first] + ends[last]) / 2, 1.15, f"pp {rank}", ha="center", va="top",
                      fontsize=min(8, 120 / len(stages)), color=AXES["pp"])
    axes.set_xlim(0, end + 2)
    axes.set_ylim(1.8, 0)
    axes.set_title("layers: whose stage has them", loc="left", fontsize=10)


def draw_tokens(axes, run):
    """The sequences of a batch, down, and their positions: which ranks have them."""
    five, config, holders = importlib.import_module("09_5d"), run["config"], {}
    count, places = {axis: config[axis] for axis in ("dp", "cp", "tp")}, places_of(run)
    few(config["seq"], "positions", 2**22)
    for rank, (_, dp, cp, tp) in enumerate(run["recorded"]["places"]):
        mine = five.positions_of(cp, count["cp"], config["seq"]).chunk(count["tp"])[tp]
        gaps = (mine.diff() > 1).nonzero().flatten() + 1
        for span in mine.tensor_split(gaps):
            start, end = span[0].item(), span[-1].item() + 1
            holders.setdefault((dp, start, end), []).append(rank)
    size = min(7, 60 * count["dp"] / len(holders))
    for (dp, start, end), ranks in holders.items():
        place, height = places[ranks[0]], 1 / count["dp"]
        x, width = start / config["seq"], (end - start) / config["seq"]
        box(axes, x, dp * height, width, height, listed(ranks), size, ALIKE)
        for i, axis in enumerate(axis for axis in ("tp", "cp") if axis in place and dp == 0):
            box(axes, x, -0.08 * (i + 1), width, 0.07, f"{axis} {place[axis]}", size,
                tint(axis, place[axis], count[axis]))
        if start == 0 and "dp" in place:
            box(axes, -0.08, dp * height, 0.07, height, f"dp {dp}", min(7, 90 / count["dp"]),
                tint("dp", dp, count["dp"]), rotation=90)
    axes.text(0, 1.02, "across: positions, down: sequences" + (
        "\n(cut by tp outside of the sub-layers)" if count["tp"] > 1 else ""), va="top", fontsize=7)
    axes.set_xlim(-0.09, 1.03)
    axes.set_ylim(1.15, -0.17)
    axes.set_title("tokens: which ranks have them", loc="left", fontsize=10)


def listed(ranks):
    return " ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"


COLUMNS = ("attn.q", "attn.o"), ("attn.k", "attn.v", "mlp.router"), ("mlp.up",), ("mlp.down",)


def draw_block(axes, run):
    """The matrices of block 1 in the parts that were recorded, and who has each. Of experts there
    is one matrix beside the other."""
    everyones = enumerate(run["recorded"]["shards"])
    held = {rank: shards for rank, shards in everyones if "attn.q" in shards}
    shapes = {name: shape for name, (shape, _) in next(iter(held.values())).items()}
    unit = shapes["attn.q"][1]                          # the model's dim
    columns = [[name for name in column if name in shapes] for column in COLUMNS]
    sides = {name: max(shape[1:]) if len(shape) > 2 else shape[1] for name, shape in shapes.items()}
    widths = [max(sides[name] for name in column) / unit for column in columns]
    across, x, lowest = sum(widths) + 0.4 * 3, 0.0, 0.0
    points = 290 / across                               # of one unit, in the figure
    for column, width in zip(columns, widths):
        y = 0.0
        for name in column:
            shape = shapes[name]
            several = f", {shape[0]} experts" if len(shape) > 2 else ""
            axes.text(x, y - 0.06, name.split(".")[1] + several, va="bottom", fontsize=7)
            parts = {str(shards[name][1]): shards[name][1] for shards in held.values()}
            for cuts in parts.values():
                ranks = [rank for rank, shards in held.items() if shards[name][1] == cuts]
                place, text = who_has(run, ranks, list(held))
                color = tint_of(place, degrees_of(with_experts(run)))
                for left, top, wide, tall in boxes_of(shape, cuts, unit):
                    upright = tall > wide and wide * points < 4 * len(text)
                    length, height = (tall, wide) if upright else (wide, tall)
                    fits = points * min(0.8 * height, 1.6 * length / len(text))
                    thick = max(tall, 3 / points)       # a router is flat
                    box(axes, x + left, y + top, wide, thick, text if fits > 3.5 else "",
                        min(7, fits), color, rotation=90 * upright)
            y += (sides[name] if len(shape) > 2 else shape[0]) / unit + 18 / points
        x, lowest = x + width + 0.4, max(lowest, y)
    axes.set_xlim(-0.05, across)
    axes.set_ylim(max(lowest, 200 / points), -12 / points)
    axes.set_aspect("equal", anchor="NW")
    of_zero = ("", "optimizer states", "optimizer states, gradients", "all of it")
    zero = run["config"]["zero"]
    if zero:
        axes.text(0, 190 / points, "who has the same part shares out "
                  f"{of_zero[zero]}: zero {zero}", va="bottom", fontsize=7)
    axes.set_title(f"block 1, on ranks {listed(list(held))}: who has which part", loc="left",
                   fontsize=10)


def who_has(run, ranks, everyone):
    """Which of all ranks that have something have this, as {axis: index} and in words."""
    places, place, words = with_experts(run), {}, []
    for axis in ("ep", "tp"):
        theirs, all_of_them = ({places[rank].get(axis, 0) for rank in some}
                               for some in (ranks, everyone))
        if theirs != all_of_them:
            place[axis] = min(theirs)
            words.append(f"{axis} {listed(sorted(theirs))}")
    return place, ", ".join(words) or "all"


def boxes_of(shape, cuts, unit):
    """Where a part of a matrix lies in it, as [(left, top, width, height)] in units; of matrices of
    experts, (experts, rows, columns), in each, which lie side by side along their shorter side."""
    low, size = [0] * len(shape), list(shape)
    for dim, index, count in cuts:
        size[dim] //= count
        low[dim] = index * size[dim]
    (top, left), (tall, wide) = low[-2:], size[-2:]
    if len(shape) == 2:
        return [(left / unit, top / unit, wide / unit, tall / unit)]
    experts, rows, columns = shape
    found, mine = [], range(low[0], low[0] + few(size[0], "experts"))
    for expert in mine:
        if rows < columns:
            step = columns / experts
            found.append((left, expert * step + top / rows * step, wide, tall / rows * step))
        else:
            step = rows / experts
            found.append((expert * step + left / columns * step, top, wide / columns * step, tall))
    return [[number / unit for number in one] for one in found]


# -------------------------------------------------------------------- lab/faults.py: what they cost

def loss_over_faults(runs):
    """Loss over the seconds of a run that was killed and went on in other layouts, above that of a
    quiet one; and over the steps, where both are the same."""
    [recorded] = [run["recorded"] for run in runs_of(runs, "faults").values()]
    quiet, faulty = recorded["quiet"], recorded["faulty"]
    figure = blank(11, 5)
    over_time, over_steps = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    [one] = quiet["starts"]
    for axes, x in ((over_time, one["seconds"]), (over_steps, one["steps"])):
        axes.plot(x, one["losses"], color="darkgray", linewidth=4,
                  label=f"the quiet run ({one['layout']})")

    starts = faulty["starts"]
    layouts = dict.fromkeys(start["layout"] for start in starts)
    color = dict(zip(layouts, (BLUE, PURPLE, ORANGE)))
    counts = {step: i for i, start in enumerate(starts) for step in start["steps"]}
    ended = 0
    for i, start in enumerate(starts):
        layout, seconds = start["layout"], start["seconds"]
        steps, losses = start["steps"], start["losses"]
        kept = sum(counts[step] == i for step in steps)     # the first ones
        over_time.axvspan(ended, seconds[0], color="#ebebeb", label=once(over_time, "ranks start"))
        over_time.plot(seconds[:kept], losses[:kept], color=color[layout],
                       label=once(over_time, layout))
        lost = slice(max(0, kept - 1), None)
        over_time.plot(seconds[lost], losses[lost], ":", color=RED,
                       label=once(over_time, "steps that were lost, and computed again"))
        over_steps.plot(steps[:kept], losses[:kept], color=color[layout])
        ended = seconds[-1]
    for at, _ in faulty["kills"]:
        _, loss = max((t, loss) for start in starts
                      for t, loss in zip(start["seconds"], start["losses"]) if t <= at)
        over_time.plot(at, loss, "x", color=RED, markersize=10, markeredgewidth=2.5, linewidth=0,
                       label=once(over_time, "a rank is killed"))

    over_time.set(xlabel="seconds", ylabel="loss")
    over_time.set_title(f"{len(faulty['kills'])} faults and {len(color)} layouts, a save after "
                        f"every {faulty['every']} steps", loc="left", fontsize=10)
    over_steps.set(xlabel="step")
    over_steps.set_title("over steps, both are the same", loc="left", fontsize=10)
    for axes in (over_time, over_steps):
        axes.margins(x=0.01)
    over_time.legend(loc="upper right", framealpha=1, edgecolor="white", fontsize=9)
    return figure


def once(axes, label):
    """`label`, but for the second thing that would bear it."""
    return label if label not in axes.get_legend_handles_labels()[1] else None


FIGURES = {"00_collectives": collectives, "01_single_gpu": memory,
           "02_data_parallel": overlap, "03_zero": bytes_per_rank,
           "04_tensor_parallel": parts_of_matrices, "05_sequence_parallel": along_the_sequence,
           "06_context_parallel": who_computes, "07_pipeline_parallel": schedule,
           "08_expert_parallel": who_is_chosen, "09_5d": five_axes,
           "faults": loss_over_faults}


READS_TOO = {"05_sequence_parallel": "04_tensor_parallel"}      # what it compares itself with


def draw_all(runs, folder):
    """The figure of each chapter that there are runs of. Returns the exit status."""
    drawn, status = [], 0
    for run in runs:
        if run["chapter"] not in FIGURES:
            status = tell(f"{run['file']}: there is no figure of {run['chapter']}", 1)
        elif not was_measured(run):
            stopped = ["the run stopped before it was measured", *run["problems"][:1]]
            status = tell(f"{run['file']} is not drawn: {': '.join(stopped)}", 1)
        else:
            drawn.append(run)
    for chapter in FIGURES:
        if runs_of(drawn, chapter):
            status = max(status, draw_one(drawn, chapter, folder / f"{chapter}.png"))
    return status


def draw_one(runs, chapter, path):
    """One figure, and its name; or a line that says why not. Returns the exit status."""
    try:
        with warnings.catch_warnings(action="ignore"):
            draw(runs, chapter, path)
    except (OSError, ImportError) as error:             # a full disk, no matplotlib
        return tell(f"{path} is not written: {error}", 1)
    except Exception as error:
        read = [run for run in runs if run["chapter"] in (chapter, READS_TOO.get(chapter))]
        return tell(f"{files_of(read)} cannot be drawn: {in_words(error)}", 2)
    print(one_line(str(path)), flush=True)
    return 0


def tell(why, status):
    say(why)
    return status


def main(argv=None):
    args = arguments("-m lab.pictures", __doc__, argv, lambda parser: parser.add_argument(
        "--out", type=commands.output("pictures"), default="runs", metavar="FOLDER",
        help="for the PNGs; default: runs"))
    runs = read_runs(args.runs)
    args.out.mkdir(parents=True, exist_ok=True)
    return draw_all(runs, args.out)


if __name__ == "__main__":
    commands.program(main)
