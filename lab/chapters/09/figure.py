"""The figure of chapter 09: who is where, and has what; and what hides behind what."""

import math

import torch

from lab.chapters import chapter
from lab.drawing import BLUE, RED, above_overlap, few, new_figure
from lab.run.words import quantity

OF = "09_5d"
AXES = {"pp": "#4f8a5b", "dp": BLUE, "ep": "#a05fb4", "cp": "#d9822b", "tp": RED}
ALIKE = "#dddddd"                                       # what all ranks of a stage hold
CELL, GAP, BETWEEN = (1.0, 0.62), (0.42, 0.75), 0.3     # of the mesh; between blocks of it


def draw(runs):
    """Of the last dense run, and of the last mixture: the mesh and what is sent on it; who has
    which layers, which tokens, and which part of a block's matrices; what hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    last = {run["config"]["experts"] > 0: run for run in runs if "places" in run["recorded"]}
    if not last:                                        # of PyTorch's run alone no more is known
        figure, axes = new_figure(6, 3)
        axes.plot(range(1, 1 + len(runs[-1]["loss"])), runs[-1]["loss"], "o-", color=BLUE)
        axes.set_xlabel("step")
        axes.set_title("training loss")
        return figure

    shown, width = [last[is_mixture] for is_mixture in sorted(last)], 7.5
    most_sent = max(len(sent_on(run)) for run in shown)
    heights = [0.4 + max(tall * min(1.1, width / wide) for wide, tall in map(size_of_mesh, shown)),
               0.4 + 0.19 * most_sent, 0.75, 3.3]
    names = {"mixture" if run["config"]["experts"] else "dense": run for run in shown}
    figure, upper = above_overlap(width * len(shown), sum(heights), names)
    rows = [[f"{name}{i}" for i in range(len(shown)) for name in row] for row in (
        ("mesh", "mesh"), ("sent", "sent"), ("layers", "layers"), ("tokens", "block"))]
    panels = upper.subplot_mosaic(rows, height_ratios=heights, width_ratios=(2, 3) * len(shown))
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
        draw_link(axes, axis, slot_of(run, one, other), corners[one], corners[other],
                  one // node != other // node)
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
    axes.set_title(f"the mesh: {degrees or 'one rank'}{f', and of a stage: ep {ep}' * (ep > 1)}\n"
                   "(a link: neighbours along an axis; dashed: it leaves the machine)")


def boxes_around(corners, first, last):
    """The corners of a machine's ranks: all together if their bounding box has no other rank in it,
    otherwise row by row."""
    machine = corners[first:last]
    (left, top), (right, bottom) = (map(f, zip(*machine)) for f in (min, max))
    inside = [(x, y) for x, y in corners if left <= x <= right and top <= y <= bottom]
    if len(inside) == len(machine):
        return [machine]
    rows = {y for _, y in machine}
    return [[corner for corner in machine if corner[1] == row] for row in rows]


def neighbours(run):
    """[(axis, rank, rank)]: whose places differ by one on one axis; those on ep as well."""
    links, places = [], places_of(run)
    for one, at in enumerate(places):
        for axis in at:
            after = at | {axis: at[axis] + 1}
            if after in places:
                links.append((axis, one, places.index(after)))
    for group in groups_of_experts(run):
        links += [("ep", *pair) for pair in zip(group, group[1:])]
    return links


def slot_of(run, one, other):
    """Which axis these ranks differ on, counted from the last; of several, the outermost."""
    here, there = (places_of(run)[rank] for rank in (one, other))
    return max(slot for slot, axis in enumerate(reversed(here)) if here[axis] != there[axis])


def draw_link(axes, axis, slot, start, end, leaves):
    """Straight between cells beside each other; in a bow over those between."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Line

    (width, height), aside = CELL, {"ep": 0.1}.get(axis, 0)
    (x, y), (x1, y1) = start, end
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
    places, rows = places_of(run), []
    for name, axis in run["recorded"]["axes"].items():
        [first, *_] = groups = axis["groups"]
        along = ["ep"] if name == "ep" else [
            each for each in places[0] if len({places[rank][each] for rank in first}) > 1]
        if axis["total"]:
            mean = axis["total"] / sum(map(len, groups))
            rows.append((name, along, mean, len(first), axis["leaves"]))
    return rows


def draw_sent(axes, run, most):
    axes.set_title("what a rank sends in a step (on the wire, mean of all ranks), and to whom")
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
    axes.set_title("layers: whose stage has them")


def draw_tokens(axes, run):
    """The sequences of a batch, down, and their positions: which ranks have them."""
    five, config, holders = chapter("09"), run["config"], {}
    count, places = {axis: config[axis] for axis in ("dp", "cp", "tp")}, places_of(run)
    few(config["seq"], "positions", 2**22)
    for rank, (_, dp, cp, tp) in enumerate(run["recorded"]["places"]):
        runs = five.runs_of(cp, count["cp"], torch.zeros(config["seq"], dtype=torch.int64))
        positions = torch.cat(runs).chunk(count["tp"])[tp]
        gaps = (positions.diff() > 1).nonzero().flatten() + 1
        for span in positions.tensor_split(gaps):
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
    axes.set_title("tokens: which ranks have them")


def listed(ranks):
    return " ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"


COLUMNS = ("attn.q", "attn.o"), ("attn.k", "attn.v", "mlp.router"), ("mlp.up",), ("mlp.down",)


def draw_block(axes, run):
    """The matrices of block 1 in the parts that were recorded, and who has each. Of experts there
    is one matrix beside the other."""
    held = {rank: shards for rank, shards in enumerate(run["recorded"]["shards"])
            if "attn.q" in shards}
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
                axis = "ep" if len(shape) > 2 else "tp"     # of experts: matrices one by one
                place, text = who_has(run, ranks, list(held), axis)
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
    axes.set_title(f"block 1, on ranks {listed(list(held))}: who has which part")


def who_has(run, ranks, everyone, axis):
    """Which of all ranks that have something have this, as {axis: index} and in words."""
    places = with_experts(run)
    indices, all_indices = ({places[rank].get(axis, 0) for rank in some}
                            for some in (ranks, everyone))
    if indices == all_indices:
        return {}, "all"
    return {axis: min(indices)}, f"{axis} {listed(sorted(indices))}"


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
    boxes = []
    for expert in range(low[0], low[0] + few(size[0], "experts")):
        if rows < columns:
            step = columns / experts
            boxes.append((left, expert * step + top / rows * step, wide, tall / rows * step))
        else:
            step = rows / experts
            boxes.append((expert * step + left / columns * step, top, wide / columns * step, tall))
    return [[number / unit for number in one] for one in boxes]
