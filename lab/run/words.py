"""Numbers and texts, as a report says them."""

import argparse
import platform
from collections.abc import Iterable


def name_of_text(args: argparse.Namespace) -> str:
    """What a run is trained on."""
    return args.data or f"Python {platform.python_version()} standard library"


def count(number: int, what: str) -> str:
    """2 and "rank" to "2 ranks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def joined(words: Iterable[str]) -> str:
    """"a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def on_ranks(ranks: Iterable[int], world: int) -> str:
    """" on ranks 0 and 2", and nothing for all of them."""
    ranks = sorted(ranks)
    if len(ranks) == world:
        return ""
    if len(ranks) == world - 1 > 1:
        [other] = set(range(world)) - set(ranks)
        return f" on all ranks but {other}"
    return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {joined(map(str, ranks))}"


def printable(tokens: Iterable[int]) -> str:
    """Byte tokens as text, in which whatever a terminal could stumble over is a dot."""
    text = bytes(min(token, 255) for token in tokens).decode("latin-1")
    return "".join(c if c == "\n" or c.isascii() and c.isprintable() else "·" for c in text)


def quantity(value: float | None, unit: str = "B") -> str:
    """A number for a person: 3154944 and "B" to "3.15 MB"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value is not None and unit not in ("", "ms") and abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return "-" if value is None else f"{value} {unit}".rstrip()
