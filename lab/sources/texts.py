"""The rows of the five texts, computed, and in words: for lab.questions and for the page."""

import functools

from common import Refused
from lab.sources import SOURCES, Source, lecture, megatron, playbook, scaling_book, tutorial
from lab.sources.row import Row

MODULES = {"000": playbook, "001": scaling_book, "002": megatron, "003": lecture, "004": tutorial}
SMALLEST = {"B": 1, "FLOP": 1, "FLOP/s": 1, "B/s": 1, "s": 1e-9}     # units that have prefixes
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"),
            (1e-6, "µ"), (1e-9, "n"))


def source_of(text: str) -> Source:
    """An argparse type: a text by its number or by its name. Raises Refused."""
    for source in SOURCES:
        if text.lower() in (source.number, source.number.lstrip("0") or "0", source.name):
            return source
    raise Refused(f"there is no text {text!r}; there are "
                  + ", ".join(f"{source.number} ({source.name})" for source in SOURCES),
                  *(source.number for source in SOURCES))


@functools.cache
def values_of(number: str) -> tuple[tuple[Row, float], ...]:
    """Each row of a text, "002", in its order, with the value that the course gives it."""
    return tuple((row, row.ours()) for row in MODULES[number].ROWS)


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


def told(row: Row) -> str:
    """What the text tells, in words: "8 ranks", or "8 to 16 ranks" if it is a range."""
    if row.told is None:
        return "-"
    first = shown(row.told, row.unit)
    if row.to is None:
        return first
    last = shown(row.to, row.unit)
    return f"{first.removesuffix(last.lstrip('0123456789.,'))} to {last}"


def verdict(row: Row, value: float) -> str:
    """✓; by how much of what is told ours is off, or how many times as much it is if that is ten or
    more; or nothing, where nothing is told."""
    if row.told is None:
        return ""
    if row.agrees(value):
        return "✓"
    nearest = row.nearest(value)
    if not nearest:
        return f"{value:+.2g}"
    times = value / nearest
    percent = 100 * (times - 1)
    return f"×{times:.0f}" if times >= 10 else f"{percent:+.{0 if abs(percent) >= 1 else 1}f}%"


def unexplained(row: Row, value: float) -> bool:
    """Whether it differs from what is told, and does not say why."""
    return not (row.agrees(value) or row.why)


def has_words(words: list[str], *texts: str) -> bool:
    """Whether all of the words are in one of the texts or another, in upper or lower case."""
    return all(any(word.lower() in text.lower() for text in texts) for word in words)
