"""The midterm, on weeks 1 to 5: questions, answers that the chapters' functions give, and for what
there are points."""

import textwrap
from collections.abc import Callable
from typing import NamedTuple

from lab import museum
from lab.chapters import chapter
from lab.sources.texts import shown

MINUTES = 90
H100, NVLINK, NETWORK = 989e12, 450e9, 50e9     # FLOP/s in bf16; bytes/s inside, between machines


class Task(NamedTuple):
    title: str
    asks: tuple             # the first says what there is
    marks: tuple            # (points, for what); {} takes an answer
    answers: Callable[[], tuple] = tuple    # the numbers, in words
    code: str = ""          # below the first of what it asks

    @property
    def points(self):
        return sum(points for points, _ in self.marks)

    @property
    def rubric(self):
        """[(points, for what)], with the numbers."""
        numbers = iter(self.answers())
        return [(points, "".join(next(numbers) if part == "{}" else part
                                 for part in words.replace("{}", "\0{}\0").split("\0")))
                for points, words in self.marks]


def ring_and_tree():
    of, machine = chapter("00"), (12, 600e6, 5e-6, NETWORK)
    messages = of.round_bytes("all_reduce_ring", *machine[:2])
    small = (12, 1000, *machine[2:])
    return (str(len(messages)), shown(sum(messages), "B"),
            shown(sum(of.round_bytes("all_reduce_ring", 6, 600e6)), "B"),
            *(shown(of.seconds(f"all_reduce_{name}", *sizes), "s")
              for sizes in (machine, small) for name in ("ring", "tree")))


def states():
    held = chapter("03").held
    return tuple(shown(sum(bytes_of), "B") for bytes_of in (
        held(13e9, 1, 1, "bf16"), *(held(13e9, stage, 64, "bf16") for stage in (1, 2, 3))))


def means():
    sums, valid = (300.0, 75.0), (100, 50)
    return (f"{sum(sums) / sum(valid):g}",
            f"{sum(s / v for s, v in zip(sums, valid)) / len(sums):g}")


def hidden():
    hides = chapter("02").tokens_to_hide
    return tuple(f"{hides(4, 8, H100, bandwidth):,.0f} tokens" for bandwidth in (NVLINK, NETWORK))


def paying():
    pays = chapter("04").ranks_that_pay
    return tuple(f"{pays(5120, 2, H100, bandwidth):.1f}" for bandwidth in (NVLINK, NETWORK))


def recomputed():
    of, layers = chapter("01"), (48, 1, 17)
    k = of.best_k(*layers)
    return (str(48 * 17), str(of.most_again(48, 1, 1, 17)), str(k),
            str(of.most_again(48, k, 1, 17)))


def a_bug():
    """The exhibit of the last task."""
    [found] = [one for one in museum.exhibits()["02"]
               if one.title == "the first micro-batch is summed, and the last one is not"]
    return found


TASKS = (
    Task("A ring, counted", (
        "12 ranks sum up a tensor of 600 MB by a ring all_reduce. A message takes 5 µs and its "
        "bytes over 50 GB/s.",
        "How many rounds are there, and how many bytes does a rank send? What if there are 6 "
        "ranks?",
        "How long does it take, and how long by a tree (reduce, then broadcast)? And for 1 kB?"), (
        (1, "{} rounds: 2 (N-1)"), (1, "{}: 2 (N-1)/N · S"),
        (1, "with 6 ranks {}, hardly less: a rank's bytes do not grow with the ranks"),
        (1, "the ring takes {}, the tree {}"),
        (1, "for 1 kB the ring takes {}, the tree {}: few rounds decide, and no longer bytes")),
        ring_and_tree),
    Task("Who has what", (
        "Three ranks have tensors a, b and c, of three parts each.",
        "What does each have after a reduce_scatter? And after an all_gather of that?",
        "y = all_gather(x) is a step of a model. Which collective is its backward, and why?"), (
        (1, "rank 0 has a0+b0+c0, rank 1 a1+b1+c1, rank 2 a2+b2+c2"),
        (1, "then all have all three sums: it was an all_reduce"),
        (1, "a reduce_scatter"),
        (1, "for a rank's x is in the y of all, so that its gradient is the sum of what all have "
         "for it"))),
    Task("Model states", (
        "A model of 13 billion parameters is trained with --precision bf16 on 64 GPUs of 80 GB.",
        "How many bytes of model states has a GPU under data parallelism, ZeRO-1, 2 and 3?",
        "Which of them fit, and what else must find room there?"), (
        (1, "2 + 4 + 12 bytes a parameter: weights; gradients, summed in fp32; masters and both "
         "moments"),
        (3, "{}; then {}; {}; {}, a point for each stage"),
        (1, "ZeRO-2 and 3 fit; ZeRO-1 misses by half a GB"),
        (1, "activations (and two units' gradients, and gathered units)")), states),
    Task("A mean of means", (
        "Rank 0 has 100 valid targets whose losses add up to 300, rank 1 has 50 that add up to 75.",
        "What is the loss of the batch? What is it if each rank takes its mean, and these are "
        "averaged?",
        "What does each rank divide by, so that it is right? Does Adam hide the mistake?"), (
        (1, "the batch has {}"), (1, "a mean of the two means is {}"),
        (1, "by the valid targets of the whole batch, 150; then sums are summed"),
        (2, "no. Adam divides out a factor that is the same for all gradients. Here the targets of "
         "rank 1 count twice as much as those of rank 0, so the direction changes")),
         means),
    Task("Hiding", (
        "8 H100s (989 TFLOP/s in bf16) train by data parallelism. Gradients have 4 bytes.",
        "From how many tokens of a rank's last micro-batch on can the all_reduce hide, over NVLink "
        "(450 GB/s) and over a network of 50 GB/s? Derive it.",
        "A colleague gets there by more micro-batches. Does it help?"), (
        (1, "the all_reduce sends 2 (N-1)/N · g bytes a parameter"),
        (1, "the backward that hides it computes 4 FLOPs a parameter and token"),
        (1, "{} over NVLink, and {} over the network"),
        (1, "no: only the last micro-batch's backward hides it. But the all_reduce is a smaller "
         "share of the step")), hidden),
    Task("f and g", (
        "A pair of matrices is cut over tensor-parallel ranks: the first by columns, the second "
        "by rows.",
        "What do f (before the pair) and g (behind it) send, forward and backward?",
        "Why not the first by rows, and the second by columns?",
        "In the words of types: x is replicated over tp, and each rank uses it in its own way. Of "
        "which type is its gradient, and why?"), (
        (2, "f: nothing forward, an all_reduce of the gradient in backward; g: an all_reduce "
         "forward, nothing in backward"),
        (2, "there a sum lies in between, and the GELU of a sum is not the sum of the GELUs"),
        (2, "partial: each rank has the part that comes from its own use, and the sum is the "
         "gradient"))),
    Task("How many ranks pay?", (
        "A model has h = 5120, and numbers of 2 bytes. Up to how many tensor-parallel H100s does "
        "the all_reduce of an MLP's forward take no longer than its matmuls, over NVLink (450 "
        "GB/s) and over 50 GB/s?",
        "Is it more with a larger batch?"), (
        (2, "{} over NVLink: t ≤ 1 + 8 h/e · W/C"),
        (1, "{} over the network: so it stays in a machine"),
        (1, "no: both grow with the tokens")), paying),
    Task("Recomputation", (
        "A model has 48 layers. A layer keeps 17 units for backward, of which its input is one.",
        "How many units are kept without recomputation, and at the most if every layer is computed "
        "again by itself?",
        "Which k (layers that are computed again together) keeps least, and how much is that?"), (
        (1, "all layers keep {}"), (1, "{}: all inputs, and one layer"),
        (2, "k = {}, which keeps {}")),
         recomputed),
    Task("A silent bug", (
        "This is from chapter 02's step, which every rank runs. `i` counts its micro-batches from "
        "1, and a backward sums gradients over the ranks if `sends` is true. The loss falls, and "
        "no run ends with an error.",
        "What is wrong? What would you measure to see it, and what would not show it?"), (
        (2, "the first micro-batch's gradients are summed, and what the others add is not: the sum "
         "belongs to the last one, i == len(micro_batches)"),
        (2, "gradients or their norm beside one GPU's, or the parameters of two ranks, with "
         "several micro-batches"),
        (1, "the first loss, what is sent and what is kept are the same; and all is right with "
         "one micro-batch")),
         code=textwrap.dedent(a_bug().new).strip()),
)
