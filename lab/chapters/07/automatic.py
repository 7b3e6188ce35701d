"""Automatic zero bubble: the order of F, B and W on each rank that leaves the least idle time.

Chapter 07's zb-h1 and zb-h2 are good orders if F, B and W take equally long, and each needs as many
micro-batches alive as it needs. Other times and other memory have other best orders, which a search
finds: of all orders where there are few, or else of those that a rule builds with many settings (Qi
et al., Zero Bubble Pipeline Parallelism, 2023, section 3.1).

The order of a rank is a string, such as FFBWBW: of each kind its micro-batches take turns, since
they are all alike. Times are whole numbers. A micro-batch is alive in a stage from its F to its W.
What counts is (the longest time of a rank from its first action to its last, the time of a step):
the first as in the paper, where no rank waits for the others when it updates.
"""

import functools
import itertools
import math

MOST = 100_000          # so many combinations of orders are all tried
SETTINGS = tuple(itertools.product((1, 1.5, 2, math.inf), (0, 0.5, 1, 1.5, 2, math.inf),
                                   (0, 0.5, 1), ("BF", "FB")))


def cost(orders: list[str], times: dict[str, int]) -> tuple[int, int] | None:
    """(The longest time of a rank between its own ends, of the step), if each action starts once
    its rank is free and what it needs is there. None: ranks wait for each other."""
    p, longest = len(orders), 0
    ends = {kind: [[] for _ in orders] for kind in "FBW"}       # of each micro-batch, by rank
    free, at, firsts = [0] * p, [0] * p, [None] * p
    moved = True
    while moved:
        moved = False                                   # one more round after each change
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                kind = order[at[rank]]
                ready = input_ready(ends, rank, kind)
                if ready is None:
                    break
                start = max(free[rank], ready)
                firsts[rank] = start if firsts[rank] is None else firsts[rank]
                free[rank] = start + times[kind]
                ends[kind][rank].append(free[rank])
                at[rank] += 1
                moved = True
    if any(place < len(order) for place, order in zip(at, orders)):
        return None
    longest = max(end - first for end, first in zip(free, firsts))
    return longest, max(free)


def input_ready(ends, rank, kind):
    """When the next action of this kind has all that it needs from other ranks; None: not yet
    known. ends[kind][rank]: of those that have been placed."""
    i, p = len(ends[kind][rank]), len(ends[kind])
    own = {"F": None, "B": "F", "W": "B"}[kind]
    if own and len(ends[own][rank]) <= i:
        return None
    other = {"F": rank - 1, "B": rank + 1, "W": -1}[kind]
    if not 0 <= other < p:
        return 0
    return ends[kind][other][i] if len(ends[kind][other]) > i else None


@functools.cache
def every_order(m: int, memory: int) -> tuple[str, ...]:
    """All orders of m F, B and W in which a B follows its F, a W its B, and no more than `memory`
    micro-batches are alive."""
    found, begun = [], [("", 0, 0, 0)]
    while begun:
        order, f, b, w = begun.pop()
        if w == m:
            found.append(order)
        if f < m and f - w < memory:
            begun.append((order + "F", f + 1, b, w))
        if b < f:
            begun.append((order + "B", f, b + 1, w))
        if w < b:
            begun.append((order + "W", f, b, w + 1))
    return tuple(found)


def best_of_all(p: int, m: int, memory: int, times: dict[str, int]) -> list[str]:
    """An order for each rank, of the least cost that there is."""
    return min((list(orders) for orders in itertools.product(every_order(m, memory), repeat=p)),
               key=lambda orders: cost(orders, times) or (math.inf, math.inf))


def build(p: int, m: int, memory: int, times: dict[str, int], ahead: float, behind: float,
          patience: float, prefer: str) -> list[str]:
    """An order for each rank, by a rule. Whenever a rank is free, it takes a W if more of them wait
    than are put off there; else a B or an F, whichever comes first in `prefer`; else any W, unless
    something else comes within `patience` times of what a W takes.

    ahead, behind: rank r is at most ahead·(p-1-r) + 1 forwards ahead, and puts off behind·r W's.
    """
    orders, free, now = [""] * p, [0] * p, 0
    ends = {kind: [[] for _ in range(p)] for kind in "FBW"}

    def ready(rank, kind):
        when = input_ready(ends, rank, kind)
        f, b, w = (len(ends[of][rank]) for of in "FBW")
        is_full = kind == "F" and (f == m or f - w == memory or f - b > ahead * (p - 1 - rank))
        return math.inf if when is None or is_full else when

    while any(len(order) < 3 * m for order in orders):
        for rank in (rank for rank in range(p) if free[rank] <= now):
            waiting = len(ends["B"][rank]) - len(ends["W"][rank])
            is_late = waiting > behind * rank
            kinds = ["W"] * is_late + [kind for kind in prefer if ready(rank, kind) <= now]
            coming = min(ready(rank, kind) for kind in "FB")
            if waiting and coming - now >= patience * times["W"]:
                kinds.append("W")
            if kinds:
                orders[rank] += kinds[0]
                free[rank] = now + times[kinds[0]]
                ends[kinds[0]][rank].append(free[rank])
        later = [end for of_rank in ends.values() for of in of_rank for end in of[-1:] if end > now]
        now = min(later)
    return orders


def best_built(p: int, m: int, memory: int, times: dict[str, int]) -> list[str]:
    """The best of what `build` makes with all SETTINGS."""
    built = [build(p, m, memory, times, *setting) for setting in SETTINGS]
    return min(built, key=lambda orders: cost(orders, times))


def search(p: int, m: int, memory: int, times: dict[str, int]) -> tuple[list[str], int]:
    """The best order for each rank that was found, and among how many combinations, if these are
    all that there are; else 0."""
    if m <= 4 and len(every_order(m, memory)) ** p <= MOST:
        return best_of_all(p, m, memory, times), len(every_order(m, memory)) ** p
    return best_built(p, m, memory, times), 0
