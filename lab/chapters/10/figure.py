"""The figure of chapter 10, of no run: which layouts are best, and how right that is."""

from lab.chapters import chapter
from lab.drawing import blank
from lab.planner import published, tables

OF = None               # no run's
COLORS = ["#355070", "#6d597a", "#b56576", "#e56b6f", "#eaac8b"]
MODELS = ["1b", "8b", "70b", "405b"]
GPUS = [8, 64, 512, 4096, 16384]
TOKENS = 16 * 2**20     # of a step, as Llama 3's


def best(model, gpus):
    """The plans of a model that fit, fastest first."""
    ten = chapter("10")
    shape = ten.MODELS[model]
    fit, _ = ten.search(shape, ten.CLUSTERS["h100"], ten.SOFTWARE["megatron-2024"], gpus,
                        TOKENS // shape.seq, {}, most=4)
    return [plan for plan in fit if not plan.why]


def degrees(layout):
    parts = [f"{axis} {getattr(layout, axis)}" for axis in ("tp", "cp", "pp")
             if getattr(layout, axis) > 1]
    again = [] if layout.recompute == "none" else ["recomputed"]
    return "\n".join([*parts, f"ZeRO-{layout.zero}" if layout.zero else "dp", *again])


def draw_best(axes):
    """The MFU and the layout of the fastest plan, over model and GPUs."""
    ten, h100 = chapter("10"), chapter("10").CLUSTERS["h100"]
    mfu = []
    for y, model in enumerate(MODELS):
        row = []
        for x, gpus in enumerate(GPUS):
            plans = best(model, gpus)
            if not plans:
                row.append(float("nan"))
                axes.text(x, y, "does\nnot fit", ha="center", va="center", fontsize=8, color="gray")
                continue
            flops = ten.step_flops(ten.MODELS[model], TOKENS // ten.MODELS[model].seq)
            row.append(flops / plans[0].total / gpus / h100.peak)
            axes.text(x, y, f"{row[-1]:.0%}\n{degrees(plans[0].layout)}", ha="center", va="center",
                      fontsize=7.5, color="white" if row[-1] < 0.42 else "black")
        mfu.append(row)
    axes.imshow(mfu, aspect="auto", cmap="viridis", vmin=0.2, vmax=0.6)
    axes.set_xticks(range(len(GPUS)), [f"{gpus:,}" for gpus in GPUS])
    axes.set_yticks(range(len(MODELS)), MODELS)
    axes.set(xlabel="H100s", ylabel="model")
    axes.set_title("The fastest layout for 16 M tokens a step: MFU")


def tflops(run, value):
    """TFLOP/s of a GPU, of what was published or predicted of a run in its unit."""
    return run.flops / value / 1e12 if run.unit == "s" else value


def draw_published(axes):
    """TFLOP/s of a GPU, published over predicted."""
    for name, color in zip(published.DENSE, COLORS):
        runs = tables.runs(chapter("10"), name)
        x = [tflops(run, run.predicted) for run in runs]
        y = [tflops(run, run.published) for run in runs]
        paper = "Narayanan" if "table 5" not in name else "Korthikanti"
        axes.plot(x, y, "o", color=color, label=f"{paper}, {name}", markersize=5)
    ends = [35, 200]
    axes.plot(ends, ends, color="gray", linewidth=1)
    axes.fill_between(ends, [0.95 * end for end in ends], [1.05 * end for end in ends],
                      color="lightgray", alpha=0.5, label="within 5%")
    axes.set(xlabel="predicted TFLOP/s of an A100", ylabel="published")
    axes.set_title("What was published, over what is predicted")
    axes.legend(fontsize=8)


def draw():
    """What the planner computes, in a minute, and how right it has been."""
    figure = blank(14, 5)
    best_layouts, published_runs = figure.subplots(1, 2)
    draw_best(best_layouts)
    draw_published(published_runs)
    return figure
