"""Megatron's tables and figures, predicted: lines. Circles are published numbers, and a dashed line
stands where the text says that a curve is highest. No point of figures 7, 8 and 11 to 18 could be
read, so none is drawn.
"""

from lab.bench.drawing import BLUE, GRAY, ORANGE, PURPLE, RED, blank
from lab.chapters import chapter
from lab.planner import megatron, published

COLORS = BLUE, RED, ORANGE, PURPLE
RATE = "TFLOP/s of a GPU"


def draw_curves(axes, curves, xlabel, ylabel=RATE, told=None, linear=False):
    """Lines over an axis whose values double from one to the next. told: where the text says that
    they are highest."""
    for color, (name, curve) in zip(COLORS, curves.items()):
        axes.plot(list(curve), list(curve.values()), "-", color=color, label=name, marker=".")
    values = [*curve]
    if not linear:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(values, values)
    axes.set(xlabel=xlabel, ylabel=ylabel)
    if told:
        axes.axvline(told, color=GRAY, linestyle="--", linewidth=1, label=f"the text: {told}")
    axes.legend(fontsize=8)


def draw_figure_6(axes):
    degrees = [2**k for k in range(8)]
    curves = {f"n {n}, b' {sequences}": {
        d: chapter("07").bubble("1f1b", n // d, sequences // d, 1)
        for d in degrees if d <= min(n, sequences)}
        for n, sequences in ((32, 32), (32, 128), (128, 512), (128, 128))}
    draw_curves(axes, curves, "dp", "bubble over work")
    axes.set_title("Figure 6: more dp, less bubble\n(n GPUs, b' micro-batches in all)")


def draw_figure_7(axes):
    curves = megatron.figure_7(chapter("10"))
    draw_curves(axes, curves, "micro-batch")
    slowest, *_, fastest = curves["one GPU"].values()
    axes.legend().remove()
    axes.text(0.95, 0.1, f"{fastest / slowest:.2f} times as fast;\nthe text: up to 1.3",
              transform=axes.transAxes, ha="right", fontsize=8)
    axes.set_title("Figure 7: one GPU, 1 G parameters,\nwith its optimizer")


def draw_figure_8(axes):
    draw_curves(axes, megatron.figure_8(chapter("10")), "micro-batch", "speed over the best", 4)
    axes.set_title("Figure 8: with p = 8 the bubble\nwants small micro-batches")


def draw_tables(axes, rows, ylabel=RATE):
    """rows: {name: [(x, published, predicted)]}."""
    for color, (name, points) in zip(COLORS, rows.items()):
        x, told, ours = zip(*points)
        axes.plot(x, ours, "-", color=color, label=name)
        axes.plot(x, told, "o", color=color, markerfacecolor="none")
    axes.set_ylabel(ylabel)


def draw_table_1(axes):
    ten = chapter("10")
    points = []
    for row, told, ours, _ in published.rows(ten, "table 1"):
        layers, dim, heads, *_ = map(int, row.split())
        size = megatron.parameters(ten.gpt(layers, dim, heads)) / 1e9
        points.append((size, told, ours))
    draw_tables(axes, {"predicted": points})
    axes.plot([], [], "o", color=COLORS[0], markerfacecolor="none", label="published")
    axes.set_xscale("log")
    axes.set_xticks([2, 10, 100, 1000], ["2", "10", "100", "1,000"])
    axes.set(xlabel="G parameters, on 32 to 3,072 GPUs", ylim=(100, 180))
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title("Table 1: large models are faster\n(two constants are fitted on it)")


def draw_table_2(axes):
    rows = {}
    for name, size in ((96, "175 G"), (105, "530 G")):
        for scheme in ("PTD", "ZeRO-3"):
            rows[f"{scheme}, {size}"] = [
                (int(row.split()[6]), told, ours)
                for row, told, ours, _ in published.rows(chapter("10"), f"table 2, {scheme}")
                if row.startswith(f"{name} ")]
    draw_tables(axes, rows)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    ticks = [384, 768, 1536, 2240]
    axes.set_xticks(ticks, ticks)
    axes.set(xlabel="GPUs, one batch", ylim=(0, 190))
    axes.legend(fontsize=8, loc="lower left")
    axes.set_title("Figure 10 and table 2: ZeRO-3 alone\nwaits for the network")


def draw_figure_11(axes):
    draw_curves(axes, megatron.figure_11(chapter("10")), "pp, with 3 layers on each stage")
    axes.set_ylim(0, 200)
    axes.set_title("Figure 11: a large batch\nhides the bubble")


def draw_figures_12_and_18(axes):
    ten = chapter("10")
    interleaved, whole = megatron.figure_18(ten).values()
    draw_curves(axes, {"interleaved": interleaved, "without scatter/gather": whole,
                       "1f1b": megatron.figure_12(ten)["1f1b"]}, "batch", linear=True)
    axes.legend(fontsize=8, loc="lower right")
    axes.set_title("Figures 12 and 18: interleaving pays\nwith small batches (175 G)")


def draw_figure_13(axes):
    draw_curves(axes, megatron.figure_13(chapter("10")), "tp, and pp has 64 / tp", told=8)
    axes.set_ylim(0, 200)
    axes.set_title("Figure 13: tp within a node,\npp beyond (162 G)")


def draw_figure_14(axes):
    draw_curves(axes, megatron.figure_14(chapter("10")), "pp, and dp has 64 / pp")
    axes.set_ylim(0, 160)
    axes.set_title("Figure 14: no more pp than\nmemory wants (5.9 G)")


def draw_figure_15(axes):
    draw_curves(axes, megatron.figure_15(chapter("10")), "tp, and dp has 64 / tp")
    axes.set_ylim(0, 160)
    axes.set_title("Figure 15: no more tp than\nmemory wants (5.9 G)")


def draw_figure_16(axes):
    draw_curves(axes, megatron.figure_16(chapter("10")), "micro-batch", told=2)
    axes.set_ylim(100, 180)
    axes.set_title("Figure 16: thin matmuls\nor a long bubble (91 G)")


def draw_figure_17(axes):
    draw_curves(axes, megatron.figure_17(chapter("10")), "batch", "sequences a second")
    axes.set_title("Figure 17: recomputation costs\na quarter (145 G)")


def draw():
    """Twelve panels."""
    figure = blank(15, 10.5)
    parts = (draw_figure_6, draw_figure_7, draw_figure_8, draw_table_1, draw_table_2,
             draw_figure_11, draw_figures_12_and_18, draw_figure_13, draw_figure_14,
             draw_figure_15, draw_figure_16, draw_figure_17)
    for axes, part in zip(figure.subplots(3, 4).flat, parts):
        part(axes)
    figure.suptitle("Megatron's tables and figures of 2021. Lines: predicted. Circles: published. "
                    "Dashed: where the text says that a curve is highest.", fontsize=11)
    return figure
