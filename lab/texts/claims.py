"""What the five texts say that isn't so, and their numbers that aren't ours, with a reason each.

    python -m lab.texts

The claims are in contradictions.toml and differences.toml, whose first lines describe the fields.
Each number of ours is an expression there of what computed.py has.
"""

import functools
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.texts import SOURCES, computed


@dataclass(frozen=True)
class Contradiction:
    """One claim of a text that doesn't hold."""

    source: str             # the text's number: "000"
    where: str              # of the text
    says: str
    holds: str
    derivation: str         # of what holds
    claimed: float
    ours: Callable[[], float]
    value: float            # that ours gives
    by: str                 # the functions that give it
    unit: str = ""
    error: float = 0        # of `claimed`
    assumed: Callable[[], float] | None = None      # gives what is claimed


@dataclass(frozen=True)
class Difference:
    """One number of a text, a point of a plot, or what a formula gives."""

    source: str
    where: str
    what: str
    claimed: float          # of a range its beginning
    ours: Callable[[], float]
    value: float            # that ours gives
    by: str
    why: str                # they differ
    unit: str = ""
    to: float | None = None     # the end of a range

    def nearest(self, value: float) -> float:
        """The text's number, or the one of its range that is nearest to a value."""
        return self.claimed if self.to is None else min(max(value, self.claimed), self.to)


def load(file):
    """The contents of a TOML file of this folder."""
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def evaluate(expression):
    """The value of an expression of what computed.py has."""
    return eval(f"({expression})", vars(computed))


def value_of(field, value):
    """Of a claim's field: a function that evaluates an expression, and text as one line."""
    if field in ("ours", "assumed"):
        return functools.partial(evaluate, value)
    return " ".join(value.split()) if isinstance(value, str) else value


def claim_of(kind, entry):
    return kind(**{field: value_of(field, value) for field, value in entry.items()})


def differences_of(text):
    """The rows of a text. A reason that several rows share is written once."""
    contents = load("differences.toml")
    reasons = contents["reasons"]
    rows = [entry | {"why": reasons.get(entry["why"], entry["why"])}
            for entry in contents["row"] if entry["source"] == text]
    return [claim_of(Difference, entry) for entry in rows]


CONTRADICTIONS = [claim_of(Contradiction, entry)
                  for entry in load("contradictions.toml")["contradiction"]]
# {the text's number: its rows}. Those of the lecture, 003, repeat others.
DIFFERENCES = {source.number: differences_of(source.number) for source in SOURCES}
