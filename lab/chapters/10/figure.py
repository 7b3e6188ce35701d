"""The figure of chapter 10, of no run: which layouts are best, and how right that is."""

import functools

from lab.chapters import chapter
from lab.drawing import blank
from lab.planner import planning, published, tables

OF = None               # no run's
COLORS = ["#355070", "#6d597a", "#b56576", "#e56b6f", "#eaac8b", "#8d99ae", "#457b9d", "#2a9d8f",
          "#cccccc", "#f4d35e", "#999999"]
MODELS = ["1b", "8b", "70b", "405b"]
GPUS = [8, 64, 512, 4096, 16384]
CAUSES = ["matmul", "attention", "elementwise", "weights", "tp", "cp", "pp", "ep", "bubble", "dp",
          "optimizer"]
TOKENS = 16 * 2**20     # of a step, as Llama 3's


@functools.cache
def best(model, gpus, cluster="h100", software="megatron-2024"):
    """The plans of a model that fit, fastest first."""
    ten = chapter("10")
    shape = ten.MODELS[model]
    fit, _ = ten.search(shape, ten.CLUSTERS[cluster], ten.SOFTWARE[software], gpus,
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


def draw_memory(axes):
    """Bytes of a GPU for the 70b on 512 H100s, as more and more is shared out."""
    ten, model = chapter("10"), chapter("10").MODELS["70b"]
    steps = {"dp alone": ten.Layout(512, sp=False), "tp 8": ten.Layout(64, 8, sp=False),
             "+ sp": ten.Layout(64, 8), "+ pp 4": ten.Layout(16, 8, pp=4),
             "+ ZeRO-1": ten.Layout(16, 8, pp=4, zero=1),
             "ZeRO-3": ten.Layout(512, zero=3, sp=False),
             "ZeRO-3,\nrecomputed": ten.Layout(512, zero=3, sp=False, recompute="full"),
             "ZeRO-3,\ntp 8": ten.Layout(64, 8, zero=3)}
    below = [0] * len(steps)
    parts = [ten.memory(model, layout, ten.SOFTWARE["megatron-2024"], 1024 // layout.dp)
             for layout in steps.values()]
    for cause, color in zip(parts[0], COLORS):
        heights = [part[cause] / 1e9 for part in parts]
        axes.bar(list(steps), heights, bottom=below, color=color, label=cause)
        below = [a + b for a, b in zip(below, heights)]
    axes.axhline(80, color="black", linestyle="--", linewidth=1)
    axes.text(len(steps) - 0.5, 84, "80 GB", ha="right", fontsize=8)
    axes.set_ylim(0, 250)
    for x, height in enumerate(below):
        if height > 250:
            axes.text(x, 252, f"{height:,.0f}", ha="center", fontsize=8)
    axes.set_ylabel("GB of a GPU")
    axes.tick_params(axis="x", labelsize=7.5)
    axes.set_title("70b on 512 H100s, micro-batches of one sequence",
                   pad=14)
    axes.legend(fontsize=8)


def draw_seconds(axes):
    """Where the seconds of the ten best plans of the 405b go."""
    plans = best("405b", 4096, software="llama3")[:10]
    ten, left = chapter("10"), [0] * len(plans)
    names = [planning.in_words(ten, plan.layout) for plan in plans]
    for cause, color in zip(CAUSES, COLORS):
        widths = [plan.seconds.get(cause, 0) for plan in plans]
        if any(widths):
            axes.barh(range(len(plans)), widths, left=left, color=color, label=cause)
            left = [a + b for a, b in zip(left, widths)]
    for y, name in enumerate(names):
        axes.text(0.2, y, name, va="center", fontsize=7.5, color="white")
    axes.invert_yaxis()
    axes.set_yticks([])
    axes.set_xlabel("seconds of a step of 16 M tokens")
    axes.set_title("The ten best layouts of the 405b on 4,096 H100s")
    axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.13))


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
    """Four pictures of what the planner computes, in a minute."""
    figure = blank(14, 10)
    for axes, part in zip(figure.subplots(2, 2).flat,
                          (draw_best, draw_memory, draw_seconds, draw_published)):
        part(axes)
    return figure
