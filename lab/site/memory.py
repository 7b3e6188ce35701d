"""What chapter 03's `held` says of each stage of ZeRO: the bytes that a rank keeps between steps.

    /api/memory?billions=7&ranks=8&precision=fp32
"""

import bisect
import itertools

from lab.chapters import chapter
from lab.site.parameters import known, one_of, real, whole

STAGES = "02", "zero1", "zero2", "zero3"
PRECISIONS = "fp32", "bf16"
RANKS = 4096
BILLIONS = 1, 3, 7, 8, 13, 30, 70, 175, 405, 671, 1000      # of parameters, as the slider has them


def memory(asked):
    """Of data parallelism and of each stage: `kept`, [parameters, gradients, optimizer states] in
    bytes, and `least`, {cluster: the ranks from which on they fit its GPU; null: never}."""
    known(asked, "billions", "ranks", "precision")
    numbers = 1e9 * real(asked, "billions", 7, 0.001, 10_000)
    n = whole(asked, "ranks", 8, 1, RANKS)
    precision = one_of(asked, "precision", "fp32", PRECISIONS)
    rooms = {name: cluster.memory for name, cluster in chapter("10").CLUSTERS.items()}
    return {"whole": kept(numbers, "02", n, precision), "rooms": rooms, "stages": [
        {"name": stage, "kept": kept(numbers, stage, n, precision),
         "least": {name: least(numbers, stage, precision, room) for name, room in rooms.items()}}
        for stage in STAGES]}


def kept(numbers, stage, n, precision):
    """Without ZeRO a rank keeps what it would keep alone."""
    if stage == "02":
        return chapter("03").held(numbers, 1, 1, precision)
    return chapter("03").held(numbers, chapter("03").STAGES[stage], n, precision)


def least(numbers, stage, precision, room):
    """The fewest ranks on which that fits. With more ranks, each keeps less, or as much."""
    n = 1 + bisect.bisect_left(range(1, RANKS + 1), -room,
                               key=lambda n: -sum(kept(numbers, stage, n, precision)))
    return n if n <= RANKS else None


def examples():
    """What the sliders ask for, as files/tools/memory.js has them."""
    ranks = [2**power for power in range(RANKS.bit_length())]
    for billions, n, precision in itertools.product(BILLIONS, ranks, PRECISIONS):
        yield "memory", {"billions": str(billions), "ranks": str(n), "precision": precision}
