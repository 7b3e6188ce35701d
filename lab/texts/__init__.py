"""The five texts that the course grew from, and where they and the course disagree.

    contradictions.toml     claims that don't hold, with what does and why
    differences.toml        their numbers that aren't ours, each with a reason
    claims                  both, read
    computed                the functions that compute our numbers
    figure                  the playbook's measurements, beside what the planner says
"""

import tomllib
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    number: str
    name: str
    title: str
    address: str


SOURCES = [Source(**source) for source in
           tomllib.loads(Path(__file__).with_name("sources.toml").read_text("utf-8"))["source"]]
SMALLEST = {"B": 1, "FLOP": 1, "FLOP/s": 1, "B/s": 1, "s": 1e-9}     # units that have prefixes
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"),
            (1e-6, "µ"), (1e-9, "n"))


def shown(value: float, unit: str) -> str:
    """A value with its unit, in four digits: 3154944 and "B" to "3.155 MB"; a share in %."""
    if unit == "%":
        return f"{100 * value:.3g}%"
    if abs(value) >= 1e18 or unit not in SMALLEST and abs(value) >= 1e9:
        return f"{value:.4g} {unit}".replace("e+0", "e").replace("e+", "e").rstrip()
    if unit in SMALLEST:
        size, prefix = next(((size, prefix) for size, prefix in PREFIXES
                             if SMALLEST[unit] <= size <= abs(value)), (1, ""))
        return f"{value / size:.4g} {prefix}{unit}"
    digits = f"{value:,.0f}" if value % 1 == 0 or abs(value) >= 1e4 else f"{value:,.4g}"
    return f"{digits} {unit}".rstrip()


def shown_range(first: float, last: float | None, unit: str) -> str:
    """The number of a text: "8 ranks", or "8 to 16 ranks" if it gives a range."""
    if last is None:
        return shown(first, unit)
    end = shown(last, unit)
    return f"{shown(first, unit).removesuffix(end.lstrip('0123456789.,'))} to {end}"


def shown_ratio(ours: float, nearest: float) -> str:
    """How far ours is from a text's number: in percent, in times from ten on, or as a difference
    if the text has 0."""
    if not nearest:
        return f"{ours:+.2g}"
    times = ours / nearest
    percent = 100 * (times - 1)
    if times >= 10:
        return f"×{times:.0f}"
    digits = 0 if abs(percent) >= 1 else 1
    return f"{percent:+.{digits}f}%"
