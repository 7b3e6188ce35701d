"""When each action of a pipeline starts and ends: chapter 07's schedules, as the page plays them.

    /api/schedule?schedule=1f1b&ranks=4&micro_batches=8
"""

import itertools

from common import Refused
from lab import schedules
from lab.chapters import chapter
from lab.site.parameters import known, one_of, real, whole

RANKS = 64                      # of a pipeline
ACTIONS = 6000                  # of a schedule
SHOWN = {"ranks": 16, "micro_batches": 64}      # of the sliders


def seven():
    return chapter("07")


def by_hand():
    """The schedules that chapter 07 makes itself."""
    return [name for name in seven().VARIANTS if name != "torch"]


def schedule(asked):
    """Its actions, each [kind, stage, micro-batch, start, end], for each rank; how many
    micro-batches are alive after each; the bubble, simulated and by the closed form. takes: of how
    many ranks it can be and, on this many, of how many micro-batches."""
    known(asked, "schedule", "ranks", "micro_batches", "chunks", "breadth_first", "F", "B", "W")
    name = one_of(asked, "schedule", "1f1b", by_hand())
    p, m = whole(asked, "ranks", 4, 1, RANKS), whole(asked, "micro_batches", 8, 1, 1024)
    v = whole(asked, "chunks", 2, 1, 16) if name == "interleaved" else 1
    breadth_first = one_of(asked, "breadth_first", "false", ("true", "false")) == "true"
    breadth_first = breadth_first and name == "interleaved"
    times = [real(asked, kind, 1, 0.01, 100) for kind in "FBW"]
    must_be_taken(name, p, m, v, breadth_first)
    made = seven().make_schedule(name, p, m, v, breadth_first)
    span = schedules.simulate(made, *times, as_one=name.startswith("dualpipe"))
    takes = {"ranks": [n for n in range(1, SHOWN["ranks"] + 1) if name != "dualpipe" or n % 2 == 0],
             "micro_batches": taken(name, p, v, breadth_first, SHOWN["micro_batches"])}
    v = len(made.ranks) // p                            # dualpipe's are two, too
    most = [seven().most_alive(name, rank, p, m, v, breadth_first) for rank in range(p)]
    return {
        "actions": [[[*action, *span[action]] for action in actions] for actions in made.actions],
        "alive": [seven().alive_over_time(actions) for actions in made.actions],
        "most_alive": most, "stages": made.ranks, "slices": v,
        "end": max(end for _, end in span.values()), "takes": takes,
        "bubble": schedules.simulated_bubble(made, name, *times),
        "formula": seven().bubble(name, p, m, v, *times),
        "lists": [" ".join(f"{kind}{i}" if v == 1 else f"{kind}{stage}.{i}"
                           for kind, stage, i in actions) for actions in made.actions],
        "drawing": schedules.drawing(made), "command": "python -m lab.schedules "
        f"{name} --ranks {p} --micro-batches {m}" + f" --chunks {v}" * (name == "interleaved")
        + " --breadth-first" * breadth_first}


def must_be_taken(name, p, m, v, breadth_first):
    if name == "dualpipe" and p % 2:
        raise Refused(f"dualpipe pairs ranks, and {p} is an odd number; ranks={p + 1} would work")
    fits = seven().fitting(name, p, m, breadth_first)
    if p * fits * v * 3 > ACTIONS:
        fewer = taken(name, p, v, breadth_first, m)
        works = f"micro_batches={fewer[-1]}" if fewer else f"fewer ranks than {p}"
        raise Refused(f"{p} ranks, {fits} micro-batches and {v} slices are more than {ACTIONS:,} "
                      f"actions; {works} would work")
    if fits != m:
        raise Refused(f"{name} on {p} rank{'s' * (p > 1)} does not take {m} micro-batch"
                      f"{'es' * (m > 1)}; micro_batches={fits} would work")


def taken(name, p, v, breadth_first, most):
    """The numbers of micro-batches, up to most, that it takes, and that are not too many."""
    most = min(most, ACTIONS // (3 * p * v))
    return [m for m in range(1, most + 1) if seven().fitting(name, p, m, breadth_first) == m]


def examples():
    for name, (p, m) in itertools.product(by_hand(), ((2, 4), (4, 8), (4, 16), (8, 16))):
        yield "schedule", {"schedule": name, "ranks": str(p), "micro_batches": str(m),
                           "chunks": "2", "breadth_first": "false", "F": "1", "B": "1", "W": "1"}
