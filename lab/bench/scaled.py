"""Draws what lab.scaling has measured, of no one chapter, for lab.pictures.

Weak and strong scaling of each axis, beside what was predicted. With stages and layers that sleep:
1f1b's bubble, the best size of a micro-batch, and what chapters 02 and 03 hide.
"""

from lab.bench.drawing import BLUE, ORANGE, PURPLE, RED, blank, few, runs_of

OF = "scaling"
GREY, SHARED = "#8a8a8a", "#f1f1f1"
NAMES = {"dp": "dp (02)", "zero3": "zero3 (03)", "tp": "tp (04)", "sp": "tp with sp (05)",
         "cp": "cp (06)", "ep": "ep (08)", "pp": "pp (07), asleep"}
COLORS = {"02 naive": GREY, "02 overlap": BLUE, "02 bucket": ORANGE, "03 zero1": BLUE,
          "03 zero2": ORANGE, "03 zero3 --prefetch 0": GREY, "03 zero3 --prefetch 1": PURPLE}
SCALING = {"weak": "weak scaling:\nthe batch grows\nwith the ranks",
           "strong": "strong scaling:\nthe same batch"}


def draw(runs: list[dict]):
    """The figure of the last run of lab.scaling, with the parts that it has."""
    [recorded] = [run["recorded"] for run in runs_of(runs, OF).values()]
    asleep = {"bubbles": draw_bubbles, "sizes": draw_sizes}
    panels = [(part, paint) for part, paint in asleep.items() if part in recorded]
    if "overlap" in recorded:
        panels += [("overlap", lambda axes, part, of=of: draw_overlap(axes, part, of))
                   for of in ("02", "03")]
    points = recorded.get("axes", [])
    names = list(dict.fromkeys(point["axis"] for point in points))
    few(len(names) + len(panels), "panels", 20)

    figure = blank(14, 5.2 * bool(names) + 3.6 * bool(panels))
    heights = [5.2] * bool(names) + [3.6] * bool(panels)
    rows = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
    if names:
        draw_axes(rows[0], names, points, recorded["nproc"])
    if panels:
        for axes, (part, paint) in zip(rows[-1].subplots(1, len(panels), squeeze=False)[0], panels):
            paint(axes, recorded[part])
    return figure


def draw_axes(figure, names, points, cores):
    """A column for each axis: weak above strong scaling. All share a scale, so that a factor is as
    long everywhere."""
    grid = figure.subplots(2, len(names), squeeze=False, sharex=True, sharey=True)
    for (scaling, title), of_scaling in zip(SCALING.items(), grid):
        for name, axes in zip(names, of_scaling):
            mine = [point for point in points
                    if (point["axis"], point["scaling"]) == (name, scaling)]
            draw_axis(axes, mine, cores)
            if scaling == "weak":
                axes.set_title(NAMES[name])
            else:
                axes.set_xlabel("ranks", fontsize=9)
        of_scaling[0].set_ylabel(f"{title}\n\ntokens/s a rank", fontsize=9)
    low, high = grid[0][0].get_ylim()
    grid[0][0].set_yticks([number for k in range(-1, 12) for number in (10**k, 2 * 10**k, 5 * 10**k)
                           if low < number < high])
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=4, fontsize=9)


def draw_axis(axes, points, cores):
    """Measured and predicted tokens/s a rank over the number of ranks."""
    worlds = [point["ranks"] for point in points]
    rates = [point["tokens"] / point["ranks"] / point["seconds"] for point in points]
    predicted = [point["tokens"] / point["ranks"] / sum(point["predicted"].values())
                 for point in points]
    is_asleep = any(point["asleep"] for point in points)
    axes.plot(worlds, rates, "o-", color=PURPLE if is_asleep else BLUE, markersize=4,
              label="measured (violet: asleep, which needs no cores)")
    axes.plot(worlds, predicted, "--", color=RED, label="predicted")
    axes.axvline(cores, color=GREY, linewidth=1, linestyle=":", label=f"nproc = {cores}")
    if worlds[-1] > cores and not is_asleep:
        axes.axvspan(cores, worlds[-1], color=SHARED, label="ranks share cores", zorder=-1)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter("")
    powers_of_two(axes, worlds)


def powers_of_two(axes, numbers):
    """An axis of these numbers, that are as far from each other."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, numbers)
    axes.tick_params(axis="x", which="minor", bottom=False)


def draw_bubbles(axes, bubbles):
    """1f1b's efficiency over the number of stages, with few and with many micro-batches."""
    groups = {"m = p - 1": [], "many": []}
    for bubble in bubbles:
        few_ones = bubble["micro_batches"] == bubble["ranks"] - 1
        groups["m = p - 1" if few_ones else "many"].append(bubble)
    for (name, group), color in zip(groups.items(), (ORANGE, PURPLE)):
        label = name if name != "many" else f"m = {group[0]['micro_batches']}"
        worlds = [bubble["ranks"] for bubble in group]
        axes.plot(worlds, [100 * bubble["measured"] for bubble in group], "o", color=color,
                  label=f"{label}: measured")
        axes.plot(worlds, [100 * bubble["predicted"] for bubble in group], "--", color=color,
                  label=f"{label}: m / (m + p - 1)")
    powers_of_two(axes, worlds)
    axes.set_ylim(0, 105)
    axes.set_xlabel("stages p", fontsize=9)
    axes.set_title("1f1b, asleep: % of a step that is work")
    axes.legend(fontsize=8, loc="lower left")


def draw_sizes(axes, sizes):
    """A step's time over the size of a micro-batch."""
    points = sizes["points"]
    b = [point["b"] for point in points]
    for key, style, color, label in (
            ("seconds", "o", PURPLE, "asleep, for the measured times"),
            ("predicted", "--", RED, "(B/b + p - 1) (t_f(b) + t_b(b))")):
        axes.plot(b, [1e3 * point[key] for point in points], style, color=color, label=label)
    powers_of_two(axes, b)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("sequences b of a micro-batch", fontsize=9)
    axes.set_title(f"1f1b, p = {sizes['stages']}, B = {sizes['sequences']}: ms of a step")
    axes.legend(fontsize=8, loc="lower left")


def draw_overlap(axes, overlap, chapter):
    """The chapter's steps over how long communication takes: measured, on formulas' curves."""
    curves = {variant: curve for variant, curve in overlap["curves"].items()
              if variant.startswith(chapter)}
    for variant, curve in curves.items():
        ratios, seconds = zip(*curve)
        axes.plot(ratios, [1e3 * one for one in seconds], "--", color=COLORS[variant], linewidth=1)
        rows = [row for row in overlap["overlap"] if row["variant"] == variant]
        axes.plot([row["ratio"] for row in rows], [1e3 * row["measured"] for row in rows], "o",
                  color=COLORS[variant], label=variant[3:])
    axes.plot([], [], "--", color="black", linewidth=1, label="by the formula")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("all_reduce over backward", fontsize=9)
    axes.set_title(f"what {chapter} hides: ms of a step, asleep")
    axes.legend(fontsize=8, loc="upper left" if chapter == "03" else "lower right")
