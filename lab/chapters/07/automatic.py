"""Automatic zero bubble: orders of F, B and W on each rank that leave little idle time.

Chapter 07's zb-h1 and zb-h2 are good orders if F, B and W take equally long, and each needs as many
micro-batches alive as it needs. Other times and other memory have other best orders. A rule builds
them with many settings, of which the best is taken (Qi et al., Zero Bubble Pipeline Parallelism,
2023, section 3.1).

The order of a rank is a string, such as FFBWBW: of each kind its micro-batches take turns, since
they are all alike. Times are whole numbers. A micro-batch is alive in a stage from its F to its W.
"""

import itertools
import math

SETTINGS = tuple(itertools.product((1, 1.5, 2, math.inf), (0, 0.5, 1, 1.5, 2, math.inf),
                                   (0, 0.5, 1), ("BF", "FB")))


class Builder:
    """Builds an order for each rank, by a rule. Whenever a rank is free, it takes a W if more of
    them wait than are put off there; else a B or an F, whichever comes first in `prefer`; else any
    W, unless something else comes within `patience` times of what a W takes.

    ahead, behind: rank r is at most ahead·(p-1-r) + 1 forwards ahead, and puts off behind·r W's.
    """

    def __init__(self, p: int, m: int, memory: int, times: dict[str, int], ahead: float,
                 behind: float, patience: float, prefer: str):
        self.p, self.m, self.memory, self.times = p, m, memory, times
        self.ahead, self.behind, self.patience, self.prefer = ahead, behind, patience, prefer
        self.ends = {kind: [[] for _ in range(p)] for kind in "FBW"}    # by rank, of each so far

    def build(self) -> list[str]:
        """The orders."""
        orders, now = [""] * self.p, 0
        free = [0] * self.p
        while any(len(order) < 3 * self.m for order in orders):
            for rank in range(self.p):
                kind = self.choose(rank, now) if free[rank] <= now else None
                if kind:
                    orders[rank] += kind
                    free[rank] = now + self.times[kind]
                    self.ends[kind][rank].append(free[rank])
            now = min(end for end in free if end > now)
        return orders

    def choose(self, rank, now):
        """What a free rank begins now, or None."""
        waiting = len(self.ends["B"][rank]) - len(self.ends["W"][rank])
        if waiting > self.behind * rank:
            return "W"
        for kind in self.prefer:
            if self.ready(rank, kind) <= now:
                return kind
        coming = min(self.ready(rank, kind) for kind in "FB")
        if waiting and coming - now >= self.patience * self.times["W"]:
            return "W"
        return None

    def ready(self, rank, kind):
        """When the next F or B has all that it needs; infinity if that is not known yet, or if an F
        would be too many."""
        f, b, w = (len(self.ends[one][rank]) for one in "FBW")
        if kind == "F" and (f == self.m or f - w == self.memory
                            or f - b > self.ahead * (self.p - 1 - rank)):
            return math.inf
        if kind == "B" and b == f:
            return math.inf
        other, i = (rank - 1, f) if kind == "F" else (rank + 1, b)
        if not 0 <= other < self.p:
            return 0
        ends = self.ends[kind][other]
        return ends[i] if i < len(ends) else math.inf


def build_all(p: int, m: int, memory: int, times: dict[str, int]) -> list[tuple[str, ...]]:
    """The different orders, one for each rank, that all SETTINGS build."""
    built = [tuple(Builder(p, m, memory, times, *setting).build()) for setting in SETTINGS]
    return list(dict.fromkeys(built))
