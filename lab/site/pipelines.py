"""When each action of a pipeline starts and ends: chapter 07's schedules, played."""

import itertools

from common import Refused
from lab import schedules
from lab.chapters import chapter

RANKS = 64                      # of a pipeline
ACTIONS = 6000                  # of a schedule


def names():
    """The schedules that chapter 07 makes itself."""
    return [name for name in chapter("07").VARIANTS if name != "torch"]


def schedule(schedule, ranks, micro_batches, chunks, breadth_first, F, B, W):
    """The actions of each rank, as [kind, stage, micro-batch, start, end]; how many micro-batches
    are alive after each; and the bubble, simulated and by the closed form. A schedule doesn't take
    any number of ranks and micro-batches: the answer has those that it is about."""
    seven = chapter("07")
    counts, times = (ranks, micro_batches, chunks), (F, B, W)
    are_whole = all(isinstance(count, int) and count >= 1 for count in counts)
    are_times = all(isinstance(time, (int, float)) and 0.01 <= time <= 100 for time in times)
    if schedule not in names() or not are_whole or not are_times or ranks > RANKS:
        raise Refused(f"schedule = {schedule}, ranks = {ranks}, micro_batches = {micro_batches}, "
                      f"chunks = {chunks}, F = {F}, B = {B}, W = {W}: a schedule is one of "
                      f"{', '.join(names())}, on 1 to {RANKS} ranks, with times from 0.01 to 100")
    is_interleaved = schedule == "interleaved"
    is_breadth_first = is_interleaved and breadth_first == "true"
    chunks = chunks if is_interleaved else 1
    if schedule == "dualpipe":                          # it pairs ranks
        ranks += ranks % 2
    micro_batches = fitting(schedule, ranks, micro_batches, chunks, is_breadth_first)
    made = seven.make_schedule(schedule, ranks, micro_batches, chunks, is_breadth_first)
    span = schedules.simulate(made, F, B, W, as_one=schedule.startswith("dualpipe"))
    slices = len(made.ranks) // ranks                   # of a rank; dualpipe has two
    return {
        "ranks": ranks, "micro_batches": micro_batches,
        "actions": [[[*action, *span[action]] for action in actions] for actions in made.actions],
        "alive": [seven.alive_over_time(actions) for actions in made.actions],
        "most_alive": [seven.most_alive(schedule, rank, ranks, micro_batches, slices,
                                        is_breadth_first) for rank in range(ranks)],
        "stages": made.ranks, "slices": slices, "end": max(end for _, end in span.values()),
        "bubble": schedules.simulated_bubble(made, schedule, F, B, W),
        "formula": seven.bubble(schedule, ranks, micro_batches, slices, F, B, W),
        "lists": [in_a_line(actions, slices) for actions in made.actions],
        "drawing": schedules.drawing(made),
        "command": command(schedule, ranks, micro_batches, chunks, is_breadth_first)}


def fitting(schedule, ranks, micro_batches, chunks, is_breadth_first):
    """How many micro-batches a schedule takes in place of these, with not too many actions."""
    most = ACTIONS // (3 * ranks * chunks)
    for fewer in range(min(micro_batches, most), 0, -1):
        fits = chapter("07").fitting(schedule, ranks, fewer, is_breadth_first)
        if fits <= most:
            return fits
    raise Refused(f"ranks = {ranks}, chunks = {chunks}: these are more than {ACTIONS:,} actions")


def in_a_line(actions, slices):
    """"F0 F1 B0", or "F0.0 F1.0" with the stage where a rank has several."""
    if slices == 1:
        return " ".join(f"{kind}{i}" for kind, _, i in actions)
    return " ".join(f"{kind}{stage}.{i}" for kind, stage, i in actions)


def command(schedule, ranks, micro_batches, chunks, is_breadth_first):
    """What shows the same in a terminal."""
    flags = f"--ranks {ranks} --micro-batches {micro_batches}"
    if schedule == "interleaved":
        flags += f" --chunks {chunks}"
    if is_breadth_first:
        flags += " --breadth-first"
    return f"python -m lab.schedules {schedule} {flags}"


def examples():
    """A choice, for all schedules."""
    for name, ranks, times in itertools.product(names(), (2, 4, 8), (1, 2, 4)):
        yield "schedule", {"schedule": name, "ranks": ranks, "micro_batches": times * ranks,
                           "chunks": 2, "breadth_first": "false", "F": 1, "B": 1, "W": 1}
