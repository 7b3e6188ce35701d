"""The figure of lab.scaling: tokens/s of each axis, and chapter 00's all_reduces. Dots are
measured, lines predicted."""

from lab.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, new_figure, runs_of

OF = "scaling"
RANKS = 4               # whose all_reduces are shown


def draw(runs: list[dict]):
    """The figure of the last runs of lab.scaling, with the parts that they have."""
    rows = [row for run in runs_of(runs, OF).values() for row in run["recorded"]["rows"]]
    panels = {}
    for what, unit, ranks, *point in rows:
        if unit == "tokens/s":
            panels.setdefault(what, {}).setdefault(what, []).append(point)
        elif ranks == RANKS:
            panels.setdefault("all_reduce", {}).setdefault(what, []).append(point)
    figure, grid = new_figure(10.5, 6.4, 2, 3)          # five axes, and the all_reduces
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (part, curves) in zip(grid.flat, panels.items()):
        draw_panel(axes, part, curves)
    return figure


def draw_panel(axes, part, curves):
    """curves: {name: [(x, measured, predicted, note)]}."""
    axes.set_axis_on()
    for (name, points), color in zip(curves.items(), (BLUE, ORANGE, PURPLE, RED, GRAY)):
        x, measured, predicted, _ = zip(*points)
        axes.plot(x, measured, "o", color=color, markersize=4, label=name.removeprefix(part))
        axes.plot(x, predicted, "--", color=color, linewidth=1)
    axes.set_xscale("log", base=2)
    if part == "all_reduce":
        axes.set_yscale("log")
        axes.set(xlabel="bytes", ylabel="ms", title=f"all_reduce on {RANKS} ranks")
        axes.legend(fontsize=8)
    else:
        axes.set_xticks(x, x)
        axes.set(xlabel="ranks", ylabel="tokens/s", title=part, ylim=(0, None))
