"""A row: what a text says in one place, and what the course says of it."""

from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """One formula, one number of a table, or one point of a plot.

    A number of the text agrees if ours is within `error` of it; one that is a prediction, if it is
    off by a share of `within` at most. Of a range, "8 to 16", `told` is its beginning and `to` its
    end. A row that does not agree says why, and no other row does.
    """

    where: str              # of the text: "5.1", "table 2", "figure 6"
    what: str
    told: float | None      # by the text; None: a formula, for which `ours` is an example
    ours: Callable[[], float]
    unit: str = ""          # "B", "FLOP", "s", "%" (of shares), or what is counted
    error: float = 0        # half of the last digit that is told, or what cannot be read off a plot
    by: str = ""            # the function, command or figure that gives it: "10_planner.bubble"
    within: float = 0       # of a prediction: the share by which it may be off
    why: str = ""           # they differ
    to: float | None = None     # the end of a range

    def nearest(self, value: float) -> float:
        """The number that is told; of a range, the one that is nearest to a value."""
        return self.told if self.to is None else min(max(value, self.told), self.to)

    def agrees(self, value: float) -> bool:
        """Whether a value of ours is what is told."""
        if self.told is None:
            return True
        return abs(value - self.nearest(value)) <= max(self.error, self.within * abs(self.told))
