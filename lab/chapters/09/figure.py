"""The figure of chapter 09: the mesh, what is sent on it, and what hides behind what."""

from lab.drawing import BLUE, RED, above_overlap, draw_losses
from lab.run.words import quantity

OF = "09_5d"
AXES = {"pp": "#4f8a5b", "dp": BLUE, "ep": "#a05fb4", "cp": "#d9822b", "tp": RED}
CELL, GAP, BETWEEN = (1.0, 0.72), (0.42, 0.75), 0.3     # of the mesh; between blocks of it


def draw(runs):
    """Of the last dense run, and of the last mixture: the mesh, and what is sent on it. Below, what
    hides behind what."""
    runs = [run for run in runs if run["chapter"] == OF]
    last = {run["config"]["experts"] > 0: run for run in runs if "places" in run["recorded"]}
    if not last:                                        # PyTorch's run records no mesh
        return draw_losses(runs[-1])

    shown, width = [last[is_mixture] for is_mixture in sorted(last)], 7.5
    most_sent = max(len(sent_on(run)) for run in shown)
    tallest = max(tall * min(1.1, width / wide) for wide, tall in map(size_of_mesh, shown))
    heights = [0.4 + tallest, 0.4 + 0.19 * most_sent]
    names = {"mixture" if run["config"]["experts"] else "dense": run for run in shown}
    figure, upper = above_overlap(width * len(shown), sum(heights), names)
    panels = upper.subplots(2, len(shown), squeeze=False, height_ratios=heights)
    for run, mesh, table in zip(shown, *panels):
        draw_mesh(mesh, run)
        draw_sent(table, run, most_sent)
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
    """Ranks as cells; a link for each two neighbours along an axis, dashed where it leaves the
    machine."""
    corners, node = corners_of_mesh(run), run["config"]["node_size"]
    for axis, one, other in neighbours(run):
        leaves = one // node != other // node
        draw_link(axes, axis, slot_of(run, one, other), corners[one], corners[other], leaves)
    wide, tall = size_of_mesh(run)
    size = min(7.5, 50 / wide)
    for rank, (corner, place) in enumerate(zip(corners, with_experts(run))):
        draw_cell(axes, rank, rank // node, corner, place, size)
    axes.set_xlim(-0.2, wide - 0.2)
    axes.set_ylim(tall - 0.2, -0.4)
    axes.set_aspect("equal", anchor="NW")
    axes.axis("off")
    degrees = " × ".join(f"{axis} {count}" for axis, count in degrees_of(places_of(run)).items())
    ep = run["config"]["ep"]
    axes.set_title(f"the mesh: {degrees or 'one rank'}{f', and of a stage: ep {ep}' * (ep > 1)}\n"
                   "(a link: neighbours along an axis; dashed: it leaves the machine)")


def draw_cell(axes, rank, machine, corner, place, size):
    """A rank, its index on each axis, and its machine."""
    from matplotlib.patches import FancyBboxPatch

    (x, y), (width, height) = corner, CELL
    axes.add_patch(FancyBboxPatch(corner, width, height, facecolor="white", edgecolor="black",
                                  boxstyle="round,pad=0,rounding_size=0.07", zorder=3))
    axes.text(x + 0.17, y + 0.4 * height, rank, ha="center", va="center", fontsize=1.6 * size,
              zorder=4)
    for i, (axis, index) in enumerate(place.items()):
        axes.text(x + 0.34 + 0.33 * (i % 2), y + height * (0.2 + 0.25 * (i // 2)),
                  f"{axis} {index}", va="center", fontsize=size, color=AXES[axis], zorder=4)
    axes.text(x + width / 2, y + height, f"machine {machine}", ha="center", va="bottom",
              fontsize=0.85 * size, color="gray", zorder=4)


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
    """Straight between cells next to each other; in a bow over those between."""
    from matplotlib.patches import FancyArrowPatch

    aside = 0.1 if axis == "ep" else 0                  # of cp's link, which may lie there
    middles = [(x + CELL[0] / 2 + aside, y + CELL[1] / 2 + aside) for x, y in (start, end)]
    bow = 0.0 if slot < 2 else -0.35
    axes.add_patch(FancyArrowPatch(
        *middles, arrowstyle="-", connectionstyle=f"arc3,rad={bow}", edgecolor=AXES[axis],
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
    axes.axis("off")
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
