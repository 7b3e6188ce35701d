"""The figure of lab.scaling: tokens/s of each axis, what chapters 02 and 03 hide, and chapter 00's
all_reduces. Dots are measured, lines predicted."""

import math

from lab.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, few, new_figure, runs_of

OF = "scaling"
RANKS = 4               # whose all_reduces are shown, and over whose links layers sleep


def draw(runs: list[dict]):
    """The figure of the last runs of lab.scaling, with the parts that they have."""
    rows = [row for run in runs_of(runs, OF).values() for row in run["recorded"]["rows"]]
    panels = {}
    for what, unit, ranks, *point in rows:
        part = what if unit == "tokens/s" else what.split()[0]
        if unit == "tokens/s" or ranks == RANKS:
            panels.setdefault((part, unit), {}).setdefault(what, []).append(point)
    columns = 4
    lines = math.ceil(few(len(panels), "panels", 20) / columns)
    figure, grid = new_figure(14, 3.2 * lines, lines, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, ((part, unit), curves) in zip(grid.flat, panels.items()):
        draw_panel(axes, part, unit, curves)
    return figure


def draw_panel(axes, part, unit, curves):
    """curves: {name: [(x, measured, predicted, note)]}."""
    axes.set_axis_on()
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE, PURPLE, RED, GRAY)):
        x, measured, predicted, _ = zip(*points)
        axes.plot(x, measured, "o", color=color, markersize=4, label=name.removeprefix(part))
        axes.plot(x, predicted, "--", color=color, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_ylabel(unit)
    if part == "all_reduce":
        axes.set_yscale("log")
        axes.set(xlabel="bytes", title=f"all_reduce on {RANKS} ranks")
    elif unit == "tokens/s":
        axes.set_xticks(x, x)
        axes.set(xlabel="ranks", title=part, ylim=(0, None))
    else:
        axes.set_xticks(x, x)
        axes.set(xlabel="all_reduce over backward", title=f"{part}: a step", ylim=(0, None))
    if len(curves) > 1:
        axes.legend(fontsize=8)
