"""What a rank keeps between steps in each stage of ZeRO, by `held` of chapter 03."""

import bisect
import itertools

from lab.chapters import chapter

STAGES = "02", "zero1", "zero2", "zero3"                # 02: data parallelism, without ZeRO
RANKS = 4096                                            # at the most
VALUES = {"billions": [1, 3, 7, 8, 13, 30, 70, 175, 405, 671, 1000],    # of parameters
          "ranks": [2**power for power in range(RANKS.bit_length())],
          "precision": ["fp32", "bf16"]}


def memory(billions, ranks, precision):
    """For each stage: `kept`, the bytes of [parameters, gradients, optimizer states]; and `least`,
    {cluster: the fewest ranks on which they fit its GPU, or None}. rooms: a GPU's bytes."""
    numbers = 1e9 * billions
    rooms = {name: cluster.memory for name, cluster in chapter("10").CLUSTERS.items()}
    stages = [{"name": stage, "kept": kept(numbers, stage, ranks, precision),
               "least": {name: fewest_ranks(numbers, stage, precision, room)
                         for name, room in rooms.items()}}
              for stage in STAGES]
    return {"whole": kept(numbers, "02", ranks, precision), "rooms": rooms, "stages": stages}


def kept(numbers, stage, ranks, precision):
    three = chapter("03")
    if stage == "02":                                   # as much as it would keep alone
        return three.held(numbers, 1, 1, precision)
    return three.held(numbers, three.STAGES[stage], ranks, precision)


def fewest_ranks(numbers, stage, precision, room):
    """With more ranks, each keeps less, or as much."""
    ranks = range(1, RANKS + 1)
    at = bisect.bisect_left(ranks, -room, key=lambda n: -sum(kept(numbers, stage, n, precision)))
    return ranks[at] if at < RANKS else None


def examples():
    """All that can be asked."""
    for values in itertools.product(*VALUES.values()):
        yield "memory", dict(zip(VALUES, values))
