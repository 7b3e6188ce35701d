"""Predictions about chapter 00: rounds and bytes of its collectives."""

from lab.chapters.question import Case, Question
from lab.run.machines import MACHINES


def predictions(pick):
    n, numbers = pick(4, 5, 6, 8), pick(5, 10, 100, 1000, 10000)
    case = Case("00_collectives", n, "N", numbers=numbers, dtype=pick("float32", "float64"))
    chapter, size = case.chapter, n * numbers * case.e
    latency, (_, bandwidth) = pick(2e-6, 5e-6, 1e-5), MACHINES["H100, InfiniBand NDR"]
    case.sizes |= {"S": size, "D": (n - 1).bit_length(), "α": latency, "W": bandwidth}
    moved, formula, why = pick(
        ("scatter", "(N-1)/N * S", "rank 0 sends all but its own part"),
        ("all_gather", "(N-1) * S", "S/N of each of N ranks, in each of N-1 rounds"),
        ("all_reduce_ring", "2 * (N-1) * S", "S/N of each of N ranks, in each of 2 (N-1) rounds"))

    def seconds(name, size, latency):
        return chapter.seconds(f"all_reduce_{name}", n, size, latency, bandwidth)

    tiny = seconds("ring", 0, latency) / seconds("doubling", 0, latency)
    rounds = seconds("ring", 0, latency) - seconds("tree", 0, latency)      # that the ring has more
    of_a_byte = seconds("tree", 1, 0) - seconds("ring", 1, 0)
    return case, [
        Question(
            "How many rounds does all_reduce_naive take?", "N-1 + D",
            len(chapter.round_bytes("all_reduce_naive", n, size)), "rounds",
            "rank 0 receives everyone's, one after the other; a broadcast doubles in every round "
            "the ranks that have the sum", "all_reduce_naive, rounds", also="S"),
        Question(
            f"How many bytes do all ranks together send in {moved}?", formula,
            chapter.sent(moved, n, size), "B", why, f"{moved}, bytes sent by all ranks"),
        Question(
            "How long does all_reduce_ring take, if a message of m bytes takes α + m/W seconds?",
            "2 * (N-1) * (α + S/N / W)", seconds("ring", size, latency), "s",
            "2 (N-1) rounds, and in each of them a part"),
        Question(
            "How many times as long as all_reduce_doubling does all_reduce_ring take, for tensors "
            "so small that their bytes take no time?", "2 * (N-1) / (2 * D)", tiny, "times",
            "then only rounds count: 2 (N-1), and 2 D, two of which are for the ranks beyond, if N "
            "is no power of 2"),
        Question(
            "From how many bytes of each rank's tensor on is all_reduce_ring faster than "
            "all_reduce_tree?", "(N-1 - D) * α * W / (D - (N-1)/N)", rounds / of_a_byte, "B",
            "it has 2 (N-1) - 2 D rounds more, and 2 S D - 2 S (N-1)/N bytes in a row less",
            also="S"),
    ]  # fmt: skip
