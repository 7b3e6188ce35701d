"""The playbook's measurements on H100s, beside what the planner says: figures/playbook.png."""

from lab.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, new_figure
from lab.planner import playbook, tables
from lab.texts.computed import ten

COLORS = {"1B": BLUE, "3B": PURPLE, "8B": RED, "80B": ORANGE}
SPEED = "tokens/s of a GPU"


def draw_curves(axes, curves, title, **more):
    """Lines that are planned, and circles that were measured. curves: {label: (colour, style,
    {what doubles along the axis: value})}."""
    for label, (color, style, points) in curves.items():
        axes.plot(list(points), list(points.values()), style, color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(points), list(points))
    axes.minorticks_off()
    axes.set(**more)
    axes.legend(fontsize=8)
    axes.set_title(title)


def draw_speeds(axes, axis, title):
    runs = playbook.runs_over(ten(), axis)
    sheet = {degree: run.predicted for degree, run in runs.items()}
    network = {degree: playbook.with_its_network(run).predicted for degree, run in runs.items()}
    measured = {degree: run.published for degree, run in runs.items()}
    draw_curves(axes, {"planned, data sheet's network": (BLUE, "-", sheet),
                       "planned, network as it measured": (BLUE, "--", network),
                       "measured": (RED, "o", measured)},
                title, xlabel=axis, ylabel=SPEED, ylim=(0, None))


def draw_bandwidths(axes):
    measured = playbook.BANDWIDTH
    planned = {nodes: playbook.ring_bandwidth(ten(), nodes) / 1e9
               for nodes in measured["all_reduce"]}
    draw_curves(axes, {"planned, a ring": (BLUE, "-", planned),
                       "all_reduce, measured": (RED, "o", measured["all_reduce"]),
                       "all_gather, measured": (ORANGE, "o", measured["all_gather"])},
                "Collectives of 256 MB: its network\nis slower, the more nodes there are",
                xlabel="nodes", ylabel="GB/s (busbw)", ylim=(0, 480))


def draw_largest(axes):
    curves = {}
    for axis, color in (("tp", BLUE), ("tp + sp", RED)):
        runs = playbook.runs_over(ten(), axis)
        planned = {tp: playbook.largest_that_fits(run) for tp, run in runs.items()}
        measured = {tp: run.layout.micro_batch for tp, run in runs.items()}
        curves[f"{axis}, planned"] = color, "-", planned
        curves[f"{axis}, measured"] = color, "o", measured
    draw_curves(axes, curves, "Memory: the largest micro-batch of\nthe 3B that fits", xlabel="tp",
                ylabel="sequences", yscale="log")


def draw_runs(axes):
    models = tables.models(ten())
    for name, color in COLORS.items():
        runs = [run for run in playbook.all_runs(ten()) if run.model == models[name]]
        planned = [playbook.mfu(run, run.predicted) for run in runs]
        measured = [playbook.mfu(run, run.published) for run in runs]
        axes.plot(planned, measured, "o", color=color, label=name, markersize=5)
    ends = [0, 0.55]
    axes.plot(ends, ends, color=GRAY, linewidth=1)
    axes.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends],
                      color="lightgray", alpha=0.5, label="within 20%", linewidth=0)
    axes.set(xlabel="MFU, planned", ylabel="MFU, measured", xlim=ends, ylim=ends)
    axes.legend(fontsize=8)
    axes.set_title("74 of its runs: what lies below ran slower\n(small kernels, full memory, the "
                   "network)")


def draw():
    """Six of the playbook's plots, planned and measured."""
    figure, [upper, lower] = new_figure(15, 9, 2, 3)
    draw_speeds(upper[0], "dp", "The 1B over dp: the batch is fixed,\nso each GPU has ever less to "
                "hide messages behind")
    draw_speeds(upper[1], "tp", "The 3B over tp")
    draw_speeds(upper[2], "tp + sp", "The 3B over tp with sp")
    draw_bandwidths(lower[0])
    draw_largest(lower[1])
    draw_runs(lower[2])
    return figure
