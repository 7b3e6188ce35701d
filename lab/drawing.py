"""What the figures of several rooms share: colours, sizes, and what they read of a run's JSON."""

import io
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import common
from lab.run.overlap import both, hidden_share, names_of, under_way, union, without

BLUE, PURPLE, RED, ORANGE = "#355070", "#6d597a", "#e56b6f", "#eaac8b"
GRAY = "#777777"
MOST = 4096             # ranks, layers or experts that a figure shows
OPERATORS = {"all_reduce": RED, "all_gather": "#4f8a5b", "reduce_scatter": PURPLE,
             "all_to_all": "#a05fb4", "send": "#d9822b"}
COLORS = 256            # of a PNG
SEPARATE = 40           # collectives of an operator that are drawn one by one; more are merged
STYLE = Path(__file__).parent / "figures.mplstyle"


def new_figure(width: float, height: float, *shape: int, **more) -> tuple:
    """A figure of so many inches, and its axes, of which there are (rows, columns)."""
    figure = blank(width, height)
    return figure, figure.subplots(*shape, **more)


def blank(width: float, height: float):
    """A figure of so many inches, without axes, in the style of all figures."""
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(STYLE)
    return Figure(figsize=(width, height))


def save(figure: object, path: Path, dpi: float | None = None):
    """Write a figure as a PNG with a palette: a third of the bytes, and it looks the same."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=dpi)
    with Image.open(drawn) as image:
        few_colors = image.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, kmeans=1,
                                                   dither=Image.Dither.NONE)
        few_colors.save(path, optimize=True)


def legend(figure: object, colors: dict[str, object], columns: int, where: str = "upper right"):
    """What each color means, outside of all axes."""
    from matplotlib.patches import Patch

    boxes = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=boxes, loc=f"outside {where}", ncols=columns, fontsize=8)


def runs_of(runs: list[dict], chapter: str, *variants: str) -> dict[str, dict]:
    """The last run of each of these variants (or of all) of a chapter, by variant."""
    last = {run["variant"]: run for run in runs if run["chapter"] == chapter}
    return {variant: last[variant] for variant in variants or last if variant in last}


def few(number: int, what: str, most: int = MOST) -> int:
    """The number. Raises ValueError where it is larger than a figure has room for, or takes too
    long to draw."""
    if not 0 < number <= most:
        raise ValueError(f"a figure shows 1 to {most} {what}, not {number}")
    return number


def config_of(run: dict) -> common.Config:
    """The shape of a run's model. Raises ValueError where it has more layers than are drawn."""
    few(run["config"]["layers"], "layers")              # formulas of activations list them all
    return common.Config(**{field.name: run["config"][field.name]
                            for field in fields(common.Config)})


def width_of(run: dict) -> int:
    """Bytes of a number."""
    return common.DTYPES[run["dtype"]].itemsize


def draw_losses(run: dict) -> object:
    """A figure of a run that has recorded nothing else: PyTorch's own."""
    figure, axes = new_figure(6, 3)
    axes.plot(range(1, 1 + len(run["loss"])), run["loss"], "o-", color=BLUE)
    axes.set_xlabel("step")
    axes.set_title("training loss")
    return figure


# --------------------------------------------------------------------------- what hides behind what

def above_overlap(width: float, height: float, runs: dict[str, dict]) -> tuple:
    """A figure, and a part of it of so many inches that is to be filled: below it, each run has a
    row by its name, which shows what hides behind what in the step that was metered."""
    rows = [0.55 + 0.32 * len(run["recorded"]["overlap"]) for run in runs.values()]
    below = 0.8 + sum(rows)
    figure = blank(width, height + below)
    upper, lower = figure.subfigures(2, 1, height_ratios=(height, below))
    panels = lower.subplots(len(runs), squeeze=False, sharex=True, height_ratios=rows)
    for [axes], (name, run) in zip(panels, runs.items()):
        draw_overlap(axes, run, name)
    explain_overlap(lower, axes, runs.values())
    return figure, upper


def draw_overlap(axes: object, run: dict, name: str, tall: float = 1,
                 separate: float = SEPARATE):
    """Rank 0's metered step: above, when it computed; below, a row for each operator, from the
    start to the end of each collective, paler where the rank waited, and its hidden share. ratio:
    of the chapter's condition. tall: a row of an operator, in rows; separate: see SEPARATE."""
    timeline, overlap = run["recorded"]["timeline"], run["recorded"]["overlap"]
    step, waits = [[0, timeline["seconds"]]], union(timeline["waits"])
    backward = union(timeline["backward"])
    draw_moments(axes, step, 0, 0.8, "#f2f2f2")
    draw_moments(axes, without(without(step, backward), waits), 0, 0.8, paler(BLUE))
    draw_moments(axes, without(backward, waits), 0, 0.8, BLUE)
    words = ["compute"]
    for row, (op, of_op) in enumerate(overlap.items()):
        color = OPERATORS.get(op.split(": ")[-1], GRAY)
        spans = [[start, end] for name, _, start, end, axis in timeline["collectives"]
                 if op in names_of(name, axis)]
        spans = sorted(spans) if len(spans) <= separate else under_way(timeline, op)
        lane = lanes(spans)
        height = 0.8 * tall / (1 + max(lane, default=0))
        for span, of_span in zip(spans, lane):
            y = 1 + tall * row + height * of_span
            draw_moments(axes, both([span], waits), y, 0.9 * height, paler(color))
            draw_moments(axes, without([span], waits), y, 0.9 * height, color)
        ratio = "" if of_op["ratio"] is None else f", ratio {of_op['ratio']:.2f}"
        words.append(f"{op}\n{of_op['hidden']:.0%} hidden{ratio}")
    axes.set_title(f"{name}: {hidden_share(timeline):.0%} of the time in which something is sent "
                   "is hidden behind compute")
    middles = [0.4, *(1 + tall * (row + 0.4) for row in range(len(overlap)))]
    axes.set_yticks(middles, words, fontsize=7)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0)
    axes.set_ylim(1.1 + tall * (len(overlap) - 0.2), -0.1)


def draw_moments(axes, intervals, y, height, color):
    """In seconds, on an axis of ms."""
    axes.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in intervals],
                     (y, height), facecolor=color, linewidth=0)


def paler(color):
    from matplotlib.colors import to_rgb

    return [(part + 2) / 3 for part in to_rgb(color)]


def explain_overlap(figure: object, axes: object, runs: Iterable[dict]):
    """The legend of a figure, and what lies along its lowest axes."""
    legend(figure, {"backward": BLUE, "forward, update": paler(BLUE), "sent, hidden": GRAY,
                    "sent, and waited for": paler(GRAY)}, 4)
    label = "ms since the step began, on rank 0"
    ratios = {of_op["ratio"] for run in runs for of_op in run["recorded"]["overlap"].values()}
    if ratios - {None}:
        label += ("\nratio: time to send over time to compute, at this run's rates; at most 1 can "
                  "hide")
    axes.set_xlabel(label)


def lanes(spans: list) -> list[int]:
    """A lane for each span (start, end), such that spans of one lane do not overlap."""
    free_from, chosen = [], []
    for start, end in spans:
        lane = next((i for i, t in enumerate(free_from) if t <= start), len(free_from))
        free_from[lane:lane + 1] = [end]
        chosen.append(lane)
    return chosen
