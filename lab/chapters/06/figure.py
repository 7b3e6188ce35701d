"""The figure of chapter 06: who computes which block, of one document or of several, and what hides
behind what."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import torch

from common import PRESETS, Text
from lab.chapters import chapter, held
from lab.drawing import (
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
from lab.run import anatomy

OF = "06_context_parallel"
LONGEST = 2**13         # tokens of a sequence whose documents are drawn
MOST = 16               # ranks around a ring that are drawn, and hops


def draw(runs):
    """Which rank computes which block of attention, and at which hop, with what that costs each
    rank. Then the same of a sequence with several documents, or of a window; and of each run, what
    hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    several = [run for run in runs if is_several(run)][-1:]
    one = runs_of([run for run in runs if not is_several(run)], OF, *chapter("06").VARIANTS)
    names = one | {f"{run['variant']}, documents {run['config']['documents'] or 1}": run
                   for run in several}
    heights = [10] * bool(one) + [7.5] * len(several)
    figure, upper = above_overlap(11, sum(heights), names)
    parts = [*upper.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat]
    if one:
        draw_one(parts[0], one)
    for run in several:
        draw_several(parts[-1], run)
    return figure


def is_several(run):
    """PyTorch's runs have no such flags."""
    return run["variant"] != "torch" and bool(run["config"]["documents"] or run["config"]["window"])


# ------------------------------------------------------------------------------ of a laid out step

def layout_of(variant, cut, parts, starts, window=None, inner=1):
    """Chapter 06's Layout, as the first of `parts` has it."""
    args = SimpleNamespace(variant=variant, cut=cut, window=window, inner=inner)
    return chapter("06").Layout(args, 0, parts, starts)


def shapes_by_hop(layout):
    """Of each hop, and each part of the sequence, the shapes that it computes: see shapes_of. No
    more hops than anybody needs."""
    return [[shapes_of_part(layout, part, hop) for part in range(len(layout.runs))]
            for hop in range(len(layout.blocks))]


def shapes_of_part(layout, part, hop):
    """The shapes that a part of the sequence computes at a hop."""
    queries, keys, shapes = layout.positions[part], layout.positions[part - hop], []
    for block in chapter("06").meeting(layout.runs[part], keys, layout.first):
        shapes += shapes_of(block, queries, keys)
    return shapes


def shapes_of(block, queries, keys):
    """What a block computes, in the matrix of queries (down) and keys (across): for each piece of
    neighbouring keys (corners [(x, y), ...], pairs of a query and a key, where its middle is).
    queries, keys: the places of all that are there. A diagonal is a straight line."""
    queries, keys, shapes, at = queries[block.rows].tolist(), keys[block.keys].tolist(), [], 0
    begin = [0] * len(queries) if block.low is None else block.low.tolist()
    seen = [len(keys) - i * block.causal for i in reversed(range(len(queries)))]
    for piece in neighbours(keys):
        end = at + len(piece)
        rows = [(row, piece[0] + max(left, at) - at, piece[0] + min(right, end) - at)
                for row, left, right in zip(queries, begin, seen) if left < end and right > at]
        if rows:
            shapes.append(shape(rows))
        at = end
    return shapes


def shape(lines):
    """Of neighbouring rows, each with where it begins and ends."""
    wide = [b - a for _, a, b in lines]
    pairs = sum(wide)
    middle = (sum((a + b) / 2 * (b - a) for _, a, b in lines) / pairs,
              sum((row + 0.5) * many for (row, *_), many in zip(lines, wide)) / pairs)
    down, up = [], []
    for top, bottom, a, b, a_step, b_step in bands(lines):
        down += [(b - b_step, top), (b - b_step + b_step * (bottom - top), bottom)]
        up += [(a - a_step, top), (a - a_step + a_step * (bottom - top), bottom)]
    return down + up[::-1], pairs, middle


def bands(lines):
    """Neighbouring rows whose ends move alike: [top, bottom, left and right of the first row, and
    by how much these move from row to row, 0 or 1]."""
    groups = []
    for row, left, right in lines:
        if groups:
            top, bottom, a, b, *step = groups[-1]
            rows = bottom - top
            moved = [left - a - step[0] * (rows - 1), right - b - step[1] * (rows - 1)]
            if rows == 1 or moved == step:
                groups[-1] = [top, bottom + 1, a, b, *moved]
                continue
        groups.append([row, row + 1, left, right, 0, 0])
    return groups


def neighbours(places):
    """Ascending places, in pieces without a gap."""
    cuts = [i for i, (one, other) in enumerate(pairwise(places), 1) if other - one > 1]
    return [places[begin:end] for begin, end in pairwise([0, *cuts, len(places)])]


def documents_of(layout):
    """[[begin, end], ...] of each document, its padding included."""
    begins = layout.starts.unique_consecutive().tolist()
    return [[*pair] for pair in zip(begins, [*begins[1:], len(layout.starts)])]


def padding_of(layout):
    """The same of what holds no token."""
    return ends((layout.source < 0).nonzero().flatten().tolist())


def holds_of(layout):
    """The same of what each part holds."""
    return [ends(positions.tolist()) for positions in layout.positions]


def ends(places):
    return [[piece[0], piece[-1] + 1] for piece in neighbours(places) if piece]


# ---------------------------------------------------------------------------------- one document

def draw_one(figure, runs):
    """Above: the causal matrix of a ring and of a zig-zag, each block with the rank that computes
    it and the hop. Below: FLOPs of each rank as measured, and activation bytes by formula."""
    context = chapter("06")
    shown = {name: runs[name] for name in ("ring", "zigzag") if name in runs} or runs
    *_, run = shown.values()
    n = few(run["world_size"], "ranks")

    (left, right), (flops, lines) = figure.subplots(2, 2, height_ratios=(5, 3))
    draw_blocks(left, min(n, 8), "ring")
    draw_blocks(right, min(n, 8), "zigzag")
    for i, (variant, measured) in enumerate(shown.items()):
        ranks = [rank + 0.4 * i for rank in range(n)]
        attention = [of_rank["attention"] / 1e6 for of_rank in measured["recorded"]["flops"]]
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
    share = context.kept(run["variant"], cfg, n, run["config"]["inner"])
    kept = [anatomy.activation_bytes(replace(cfg, seq=seq), batch, width_of(run), share)
            for seq in around]
    lines.plot(around, kept, color=ORANGE, label=f"this run's shape, ranks: {n}")
    lines.plot(cfg.seq, run["recorded"]["activation_bytes"], "k+", label="measured")
    lines.set_xscale("log", base=2)
    lines.set_yscale("log")
    lines.set_xlabel("tokens of a sequence")
    lines.set_title("bytes of activations per rank")
    lines.legend(fontsize=8)


def color_of(rank):
    import matplotlib

    return matplotlib.colormaps["tab10"].colors[rank % 10]


def draw_blocks(axes, n, variant):
    """Rows: queries, columns: keys, in 2n chunks each; coloured by rank, numbered by hop."""
    from matplotlib.patches import Rectangle

    layout = layout_of(variant, "sequence", n, torch.zeros(2 * n, dtype=torch.int64))
    for rank, queries in enumerate(layout.positions):
        for row in queries.tolist():
            axes.text(-0.2, row + 0.5, f"rank {rank}", ha="right", va="center", fontsize=7)
            for hop in range(len(layout.blocks)):
                for column in layout.positions[rank - hop].tolist():
                    if column <= row:
                        axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color_of(rank),
                                                 edgecolor="white"))
                        axes.text(column + 0.5, row + 0.5, hop, ha="center", va="center",
                                  color="white", fontsize=8)
    axes.set_xlim(-2, 2 * n)
    axes.set_ylim(2 * n, 0)
    axes.set_aspect("equal")
    axes.axis("off")
    name = "zig-zag" if variant == "zigzag" else "ring"
    axes.set_title(f"{name}: which rank computes a block of queries (down)\n"
                   "and keys (across), and at which hop")


# ------------------------------------------------------------------------------ several documents

def draw_several(figure, run):
    """The matrix of a step's queries and keys with its documents, as the sequence is cut, and as
    each document is; below, how much each rank computes, hop by hop."""
    starts, config = starts_of(run), run["config"]
    parts = few(len(run["recorded"]["documents"]["positions"]), "ranks around a ring", MOST)
    variant = "ring" if run["variant"] == "ring" else "zigzag"
    cuts = {f"{variant.replace('zag', '-zag')} of the sequence": (variant, "sequence"),
            "zig-zag of each document": ("zigzag", "document")}
    matrices, works = figure.subplots(2, 2, height_ratios=(5, 1.1), sharex="row",
                                      sharey="row")
    for matrix, work, (name, cut) in zip(matrices, works, cuts.items()):
        layout = layout_of(*cut, parts, starts, config["window"], config["inner"])
        hops = shapes_by_hop(layout)
        draw_matrix(matrix, layout, hops)
        tokens = len(layout.starts)
        padded = f", {tokens / len(starts) - 1:.0%} of it padding (pale)" * (tokens > len(starts))
        matrix.set_title(f"{name}: {tokens} tokens{padded}\nqueries down, keys across; coloured by "
                         "rank, numbered by hop")
        imbalance = held("06").imbalance(layout)
        draw_work(work, hops, imbalance)
        work.set_title(f"pairs of a query and a key: the busiest rank has {imbalance:.2f} "
                       "times the mean", fontsize=9)


def starts_of(run):
    """Where each token's document begins in the step that was metered, before any padding. Raises
    ValueError if no step of this run's has the documents that it recorded."""
    config, recorded = run["config"], run["recorded"]["documents"]
    few(len(recorded["starts"]), "tokens of documents", LONGEST)
    shape = SimpleNamespace(seq=few(config["seq"], "tokens of documents", LONGEST))
    text = SimpleNamespace(args=SimpleNamespace(
        model=shape, documents=config["documents"], seed=config["seed"]))
    multiple = 2 * few(len(recorded["positions"]), "ranks around a ring", MOST) * config["inner"]
    for step in range(few(config["steps"], "steps")):
        starts, now = Text.starts(text, step), recorded["starts"]
        padded = chapter("06").with_room(starts, multiple)[1]
        if now == (padded if config["cut"] == "document" else starts).tolist():
            return starts
    raise ValueError("no step of this run's has such documents")


def draw_matrix(axes, layout, hops):
    """A strip of who holds which queries, what each rank computes at which hop, and a frame around
    each document."""
    from matplotlib.patches import Polygon, Rectangle

    seq = len(layout.starts)
    points, strip = 330 / seq, 0.025 * seq              # of a token; of the tokens, as wide
    for rank, ranges in enumerate(holds_of(layout)):
        for top, bottom in ranges:
            axes.add_patch(Rectangle((-1.4 * strip, top), strip, bottom - top, linewidth=0,
                                     facecolor=color_of(rank)))
    for hop, of_hop in enumerate(hops):
        for rank, shapes in enumerate(of_hop):
            for corners, pairs, middle in shapes:
                axes.add_patch(Polygon(corners, facecolor=color_of(rank), edgecolor="white",
                                       linewidth=min(0.7, points / 4)))
                tall, wide = (max(of) - min(of) for of in zip(*corners))
                size = min(7, 0.6 * points * min(tall, wide, 1.4 * pairs / max(tall, wide)))
                if size >= 5:
                    axes.text(*middle, hop, ha="center", va="center", color="white", fontsize=size)
    for top, bottom in padding_of(layout):
        axes.add_patch(Rectangle((0, top), bottom, bottom - top, facecolor="white", alpha=0.6))
    for begin, end in documents_of(layout):
        axes.add_patch(Rectangle((begin, begin), end - begin, end - begin, facecolor="none",
                                 edgecolor="black", linewidth=0.8))
    axes.set_xlim(-1.5 * strip, seq + 0.5)              # the later one of two is the longer one
    axes.set_ylim(seq + 0.5, -0.5)
    axes.set_aspect("equal")
    axes.axis("off")


def draw_work(axes, hops, busiest):
    """A bar for each rank, of the pairs that it computes at each hop; and the mean without those of
    padding, of which the busiest rank has so many times as many."""
    parts = len(hops[0])
    done = [[sum(pairs for _, pairs, _ in of_hop[rank]) for of_hop in hops]
            for rank in range(parts)]
    colors = [color_of(rank) for rank in range(parts)]
    for hop in range(len(hops)):
        begins = [sum(of_rank[:hop]) for of_rank in done]
        axes.barh(range(parts), [of_rank[hop] for of_rank in done], 0.8, begins, color=colors,
                  edgecolor="white")
    axes.axvline(max(map(sum, done)) / busiest, color="black", linestyle=":", linewidth=1)
    axes.set_yticks(range(parts), [f"rank {rank}" for rank in range(parts)],
                    fontsize=min(7, 45 / parts))
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(parts - 0.5, -0.5)
    axes.set_xlabel("pairs, hop by hop from the left (dotted: the mean of what is not padding)",
                    fontsize=8)
