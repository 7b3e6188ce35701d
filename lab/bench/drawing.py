"""What the figures of several rooms share: colours, sizes, and what they read of a run's JSON."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import common

BLUE, PURPLE, RED, ORANGE = "#355070", "#6d597a", "#e56b6f", "#eaac8b"
MOST = 4096             # ranks, layers or experts that a figure shows
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


def runs_of(runs: list[dict], chapter: str, *variants: str) -> dict[str, dict]:
    """The last run of each of these variants (or of all) of a chapter, by variant."""
    found = {run["variant"]: run for run in runs if run["chapter"] == chapter}
    return {v: found[v] for v in variants or found if v in found}


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


def widths_of(run: dict) -> tuple[int, int]:
    """Bytes of a number that computes, and of a gradient."""
    args = SimpleNamespace(dtype=run["dtype"], precision=run["config"].get("precision", "fp32"))
    return common.rounded(args).itemsize, width_of(run)
