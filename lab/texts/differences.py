"""Numbers of the five texts that aren't ours, each with a reason.

    python -m lab.texts 002

Rows of the texts that agreed with the course are left out, and so are those that repeat one of
lab/texts/contradictions.py.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from lab import formats
from lab.chapters import chapter
from lab.planner import megatron, playbook, rooflines
from lab.texts import computed as ours
from lab.texts.computed import GPT_3, INFINIBAND, LLAMA_7B, NVLINK, SEVEN_B, F, ten, tpu


class Row(NamedTuple):
    """One number of a text, a point of a plot, or what a formula gives."""

    where: str              # of the text: "5.1", "table 2", "figure 6"
    what: str
    claimed: float          # by the text; of a range its beginning
    ours: Callable[[], float]
    unit: str               # as that of a Contradiction
    by: str                 # the function that gives ours: "10_planner.bubble"
    why: str                # they differ
    to: float | None = None     # the end of a range

    def nearest(self, value: float) -> float:
        """The text's number, or the one of its range that is nearest to a value."""
        return self.claimed if self.to is None else min(max(value, self.claimed), self.to)


NETWORK = ("its network is slower than the data sheet says, and the more so the more nodes there "
           "are; with the bandwidths that it has measured, see the plot over dp")
FULLER = ("its GPUs were fuller than is planned, and why is not told; so a smaller micro-batch is "
          "the largest that fits")
UNTOLD = "which micro-batches it ran is not told: here, the largest that fit"
FULL = "its memory was nearly full: by the text that takes time, and here it does not"
FEW = "the formula needs m to be a multiple of p: with fewer a rank waits between its slices too"
TWO_BYTES = "a number has 2 bytes, and the text counts one"
SPEED, RING, KEPT = "tokens/s", "10_planner.Machine.ring", "10_planner.kept_by_layer"
MEGATRON, ROOF = "lab.planner.megatron.figure_", "lab.planner.rooflines."


def lost(axis: str, low: int, high: int) -> float:
    """The share of the 3B's speed that a larger tp loses."""
    return playbook.drop(partial(playbook.speed_over, ten(), axis), low, high)


def run(name: str, nodes: int, at: int = 0) -> object:
    """The layout of one of the playbook's runs, the fastest first."""
    return [layout for of, on, layout, *_ in playbook.runs(ten()) if (of, on) == (name, nodes)][at]


def weights_on_tp_16() -> float:
    """GiB of the 70B's weights on a rank."""
    held = ten().parameters_of_gpu(ten().MODELS["70b"], ten().Layout(tp=16), ten().Software())
    return 2 / 2**30 * sum(size for size, _ in held.values())


def gathers(stage: int) -> int:
    """all_gathers in a step of ZeRO, for the 34 units of a model with 32 layers."""
    return chapter("03").traffic(LLAMA_7B, stage, 8, 1, (2, 2))["all_gather"][0]


def sending_over_computing(axis: str) -> float:
    """On 8 H100s over NVLink, with 10 layers in the next stage."""
    return rooflines.sending_over_computing(8192, 8, 8192, 10, *NVLINK)[axis]


PLAYBOOK = (
    Row("memory", "N of GPT-3, as our models are built",
        12288 * 50257 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288, GPT_3.parameters, "",
        "common.Config.parameters", "our linears have no biases, 9·h a layer, and embedding and "
        "head are two matrices"),
    Row("memory", "what CUDA itself takes, which its formulas leave out", 1e9,
        lambda: ten().CLUSTERS["h100"].memory * (1 - ten().ROOM), "B", "10_planner.ROOM",
        "the planner leaves room for NCCL's buffers and for fragments as well", 2e9),
    Row("DP", "plot: 1B on dp 256, with the data sheet's bandwidths",
        playbook.THROUGHPUT["dp"][256], lambda: playbook.speed_over(ten(), "dp", 256), SPEED,
        "playbook.speed_over", NETWORK),
    Row("ZeRO-3", "gathers of a step that ZeRO-2 does not have: 2·n - 1 of n = 34 units", 67,
        lambda: gathers(3) - gathers(2), "calls", "03_zero.traffic", "those are all; ZeRO-2 "
        "gathers each unit as well, once, after the update"),
    Row("TP", "plot: 3B on tp 32", playbook.THROUGHPUT["tp"][32],
        lambda: playbook.speed_over(ten(), "tp", 32), SPEED, "playbook.speed_over", NETWORK),
    *(Row("TP" if axis == "tp" else "SP", f"plot: speed that is lost from tp {low} to {high}",
          claimed, partial(lost, axis, low, high), "%", "playbook.drop", why)
      for axis, low, high, claimed, why in (
          ("tp", 2, 4, 0.108, UNTOLD), ("tp", 4, 8, 0.122, UNTOLD), ("tp", 16, 32, 0.656, NETWORK),
          ("tp + sp", 2, 4, 0.05, UNTOLD), ("tp + sp", 4, 8, 0.191, UNTOLD),
          ("tp + sp", 8, 16, 0.434, NETWORK))),
    *(Row("TP" if axis == "tp" else "SP", f"plot: largest micro-batch of the 3B on tp {tp}",
          playbook.LARGEST[axis][tp],
          lambda axis=axis, tp=tp: playbook.largest_that_fits(ten(), axis, tp), "sequences",
          "playbook.largest_that_fits", FULLER)
      for axis, tp in (("tp", 2), *(("tp + sp", tp) for tp in (4, 8, 16, 32)))),
    Row("SP (and 003: 32, 004: 8.2)", "it sends as much as TP, if the inputs are not kept", 1,
        lambda: ours.sent_of_a_block("05", 2, "all_gather", "reduce_scatter", cfg=SEVEN_B)
        / ours.sent_of_a_block("04", 2, cfg=SEVEN_B), "times", "05_sequence_parallel.traffic",
        "Megatron gathers them again in backward, half as many gathers more: 5 halves of an "
        "all_reduce for 4"),
    Row("SP", "plot: 70B, weights on tp 16", 8.21875, weights_on_tp_16, "GiB",
        "10_planner.parameters_of_gpu", "with 8 kv heads, two ranks hold the same one"),
    *(Row("PP", f"plot: all_gather of 256 MB over {8 * nodes} GPUs", 1e9 * claimed,
          lambda nodes=nodes: playbook.ring_bandwidth(ten(), nodes), "B/s", RING, NETWORK)
      for nodes, claimed in playbook.BANDWIDTH["all_gather"].items() if nodes > 1),
    Row("PP", "plot: all_reduce of 256 MB on a node", 1e9 * playbook.BANDWIDTH["all_reduce"][1],
        lambda: playbook.ring_bandwidth(ten(), 1), "B/s", RING, "a ring is no faster in it than in "
        "an all_gather; NVLink's switches can add (NVLS)"),
    *(Row("PP", f"plot: bubble of 8 stages, m = {m}, v = {v}", 7 / (v * m),
          partial(ours.bubble_in_time, "interleaved", 8, m, v), "",
          "lab.schedules.simulated_bubble", FEW)
      for m, v in ((4, 8), (4, 4), (2, 8), (2, 4), (1, 8), (4, 2), (1, 4), (1, 2))),
    Row("1F1B", "plot: speed that is lost from 8 stages to 16, with m = p - 1", 0.14,
        lambda: playbook.drop(lambda p: playbook.speed_over_stages(ten(), p, p - 1), 8, 16), "%",
        "playbook.speed_over_stages", "its model is not told; of the 8B, the head makes the last "
        "of many stages slow"),
    *(Row("runs", f"heat map: best of the {name} on {8 * nodes} GPUs", claimed,
          lambda name=name, nodes=nodes: playbook.best_speed(ten(), name, nodes), SPEED,
          "playbook.best", why)
      for name, nodes, claimed, why in (("3B", 8, 13312, NETWORK), ("8B", 16, 6028, NETWORK),
                                        ("80B", 4, 285, FULL))),
    *(Row("runs", f"8B on a node: {layout}", claimed,
          lambda at=at: playbook.speed(ten(), "8B", run("8B", 1, at)), SPEED, "playbook.speed", why)
      for at, layout, claimed, why in (
          (11, "dp 1 tp 8 pp 1, micro-batch 1, ZeRO-0", 3616,
           "the planner counts no time to start a kernel, and thin matrices are done soon"),
          (12, "dp 4 tp 1 pp 2, micro-batch 1, ZeRO-1", 2752, "at 71.5 GiB " + FULL))),
    *(Row("runs", f"heat map: memory of that of the {name} on {8 * nodes} GPUs", claimed,
          lambda name=name, nodes=nodes: playbook.gib_of_gpu(ten(), name, run(name, nodes)),
          "GiB", "playbook.gib_of_gpu", FULLER)
      for name, nodes, claimed in (("3B", 8, 47.7), ("8B", 1, 63.1))),
    Row("GPUs", "a warp's loads of A and B, down a column over along a row: about 10 in speed", 10,
        ours.segments_of_naive, "times", "matmul.segments", "so many more segments of 128 bytes; "
        "the rest of a segment may still lie in a cache"),
    Row("formats", "epsilon of bfloat16 over float16's, about 10", 10,
        lambda: formats.about("bfloat16")["epsilon"] / formats.about("float16")["epsilon"], "times",
        "lab/formats.py", "3 bits less of mantissa are 2³"),
    *(Row("formats", f"numbers of {name} in [1, 2]", claimed,
          lambda name=name: sum(1 <= x <= 2 for x in formats.numbers(name).tolist()), "",
          "lab/formats.py", "1 and 2 themselves are two more")
      for name, claimed in (("E4M3", 7), ("E5M2", 3))),
    Row("FP8", "FLOP/s of an H100 over those in bf16", 2, lambda: ten().FP8, "times",
        "10_planner.FP8", "by the data sheet it is 2; these are the best measured of each"),
    *(Row("A3", f"{axis}: sending over computing, h = 8,192 and as many tokens",
          claimed * NVLINK[0] / NVLINK[1], partial(sending_over_computing, axis), "",
          "rooflines.sending_over_computing", TWO_BYTES)
      for axis, claimed in (("zero-3", 7 / 8 / (2 * 8192)), ("tp", 7 / (2 * 8192)),
                            ("pp", 1 / (32 * 8192 * 10)))),
    Row("A3", "tp: bytes of a block, 8·s·b·h/TP", 8 * 4096 * 8192 / 8,
        lambda: ours.sent_of_a_block("05", 2, "all_gather", "reduce_scatter"), "B",
        "05_sequence_parallel.traffic", "a rank sends N-1 shards of 2 bytes a number, not one of "
        "1, and Megatron gathers its inputs again in backward"),
)
SCALING_BOOK = (
    Row("DP", "tokens of a TPU v5p from which on matmuls outlast HBM", 240,
        lambda: rooflines.tokens_of_data_parallel(tpu().peak, tpu().hbm), "tokens",
        ROOF + "tokens_of_data_parallel", "240 is a TPU v5e's; a v5p has 2.3 times its FLOP/s, and "
        "3.4 times its HBM's B/s"),
    Row("DP", "largest model that fits on a TPU v5p with gradients and masters in float32", 9e9,
        ours.largest_on_a_tpu, "", "10_planner.memory", "the text keeps neither gradients nor "
        "masters: 10 bytes of 18"),
    Row("FSDP + TP", "how many times fewer than FSDP alone, three axes", 8,
        lambda: ours.per_chip(3) / ours.least(32_768), "x", ROOF + "tokens_of_both",
        "850 / 99 are 8.6; the text says roughly"),
    Row("pods", "compute over messages of X 1,024 and Y 8, which is to be compute-bound", 1,
        lambda: ours.compute_over_messages(F, 1e6, 8192), "x", ROOF + "seconds",
        "at X_opt = 739 it would be 1.06; of the splits that divide, none reaches 1"),
    Row("takeaways", "TP: bytes of backward, if In is gathered again (chapter 05)", 4,
        ours.backward_of_tp, "x BD", "05_sequence_parallel.traffic", "the text keeps what is "
        "gathered; Megatron gathers it again, and keeps 1/Y of it"),
    Row("takeaways", "Y of TP, of LLaMA-3 8B, F 14,336", 8, lambda: ours.widest(14_336), "ranks",
        ROOF + "largest_tensor_parallel", "F / 2550 is below 8 for small models: two axes would "
        "double it", 16),
    Row("takeaways", "the same of LLaMA-3 405B, F 53,248", 8, lambda: ours.widest(53_248), "ranks",
        ROOF + "largest_tensor_parallel", "and above 16 for the largest", 16),
    Row("problem 3", "HBM of 4,096 chips, by the data sheet's 95 GB", 393e12,
        lambda: 4096 * tpu().memory, "B", "10_planner.CLUSTERS","a v5p has 95 GB; the text has 96"),
)
MEGATRON_2021 = (
    Row("figure 8", "the best micro-batch, batch 128", 4,
        lambda: megatron.best(ours.figure(8)["batch 128"]), "", MEGATRON + "8",
        "With the times of our figure 7, 2 and 4 are within 2% of each other."),
    Row("5.2", "PTD over ZeRO-3, twice the GPUs: 530 G", 1.7, lambda: 1 + ours.over_zero_3(4, 2),
        "times", "10_planner.py --published", "This row of ZeRO-3's is 11% slower here than it "
        "was."),
    Row("5.2", "530 G with ZeRO-3 on 640, micro-batch 4: it fits (1), or not (0)", 1,
        lambda: ours.zero_3_fits(640, 4), "", "10_planner.memory", "80 more GPUs save less than 3% "
        "of its bytes, and the planner knows them within a factor of 1.25."),
    Row("figure 12", "interleaving gains as much as 10%: smallest batch, 12", 0.1,
        lambda: ours.gain(12, "interleaved", "1f1b", 12), "%", MEGATRON + "12",
        "12 micro-batches on 12 stages have bubbles of 11/12 and 11/48 of the work, which alone "
        "make 56%. The text's 10% can only be that of large batches."),
    Row("figure 13", "the best over the worst: up to 2", 2,
        lambda: ours.gain(13, "batch 128", "batch 128", 8, 32) + 1, "times", MEGATRON + "13",
        "Here a ring of 32 ranks leaves each of 4 nodes through all of its cards. Whether theirs "
        "did is not told."),
    Row("figure 15", "falls with each larger tp, batch 32", 4,
        lambda: megatron.falls(ours.figure(15)["batch 32"]), "times", MEGATRON + "15",
        "With a sequence for each replica the optimizer is a fifth of the step, and tp 4 halves "
        "it. The text speaks of larger batches."),
    Row("figure 16", "the best micro-batch, batch 512", 2,
        lambda: megatron.best(ours.figure(16)["batch 512"]), "", MEGATRON + "16",
        "Here 4 is faster than 2 by less than 2%, and so near no planner knows."),
    Row("1", "the right micro-batch gains up to 15%: figure 16, batch 512", 0.15,
        lambda: ours.gain(16, "batch 512", "batch 512", 4, 1), "%", MEGATRON + "16",
        "The planner counts neither the start of a kernel nor what small matmuls lose beside their "
        "FLOPs and bytes. How much these took is not told."),
    Row("figure 17", "recomputation: up to 33% less speed, batch 1", -0.33,
        lambda: ours.gain(17, "recomputed", "nothing again", 1), "%", MEGATRON + "17",
        "A forward more takes a third more time, and that is a quarter less speed."),
    Row("figure 17", "without it, batch 16 and more do not fit (0)", 0,
        lambda: megatron.fits(ten(), *megatron.run_of_17(ten(), "none"), 16), "",
        "10_planner.memory", "1f1b keeps 16 micro-batches of any larger batch: the planner finds "
        "room for them, and it knows bytes within a factor of 1.25, which would be too many."),
    Row("figure 18", "scatter/gather gains up to 11%: largest batch, 60", 0.11,
        lambda: ours.gain(18, "scatter/gather", "whole messages", 60), "%", MEGATRON + "18",
        "A whole message leaves a card at 19.5 GB/s here, as fitted on ZeRO-3's gathers; at 14 it "
        "would be 11%."),
    Row("5.9", "bisection of all_reduces among its replicas", 12.9e12,
        lambda: 8 * 64 * megatron.machine(ten()).links(6, 8), "B/s", "10_planner.Machine.links",
        "The text does not say how it counts. In one direction 512 rings would need 25.2 GB/s of "
        "each card, which has 25; in both, 12.6, and the planner has 19.5."),
)
TUTORIAL = (
    Row("2.1", "a broadcast sends, as a tree", 1,
        lambda: sum(chapter("00").round_bytes("broadcast", 8, 1)), "S",
        "00_collectives.round_bytes", "S is what a rank receives. The root of a tree sends it once "
        "in each of log2(8) = 3 rounds."),
    Row("2.2, Q7", "NVLink over InfiniBand", 10, lambda: NVLINK[1] / INFINIBAND[1], "times",
        "lab.run.machines.MACHINES", "With one direction of NVLink it is 9.", 20),
    Row("5.4, Q5", "FSDP2's all_gathers over those of ZeRO-3", 1, ours.head_gathered_again, "times",
        "03_zero.traffic", "PyTorch gathers the head again in backward, which begins with it: ours "
        "keeps it."),
    Row("6.2", "states and weights of a node with hpZ, over those without: 8 times", 8,
        lambda: 1 + chapter("03").held(1, 3, 8, "bf16")[0] / (16 / 1024), "times", "03_zero.held",
        "Of 1,024 GPUs each has 0.0156 bytes of states, and now 0.25 of weights besides: a node "
        "has a whole copy more."),
    Row("7.5", "what all_reduces of 32 layers carry in a step", 4e9,
        lambda: 32 * ours.sent_of_a_block("04", 1, cfg=SEVEN_B), "B", "04_tensor_parallel.traffic",
        "128 times 16.8 MB. But a ring of 8 sends 1.75 times that, 3.8 GB."),
    Row("7.5", "they take, over NVLink", 4.4e-3,
        lambda: 32 * ours.sent_of_a_block("04", 2, cfg=SEVEN_B) / NVLINK[1], "s",
        "04_tensor_parallel.traffic", "NVLink sends 450 GB/s in one direction, not 900."),
    Row("8.3", "share of activations outside of tp, GPT-3, scores recomputed", 0.3,
        lambda: 8 / 7 * ours.saved_by_sequence("gpt3", "megatron-2021", "selective"), "%", KEPT,
        "10 of its 34 bytes are a little less.", 0.5),
    Row("8.3", "the same, Llama 7B with flash attention", 0.3,
        lambda: 8 / 7 * ours.saved_by_sequence("7b", "megatron-2024"), "%", KEPT,
        "Without dropout there are no masks outside, and SwiGLU keeps more inside.", 0.5),
    Row("8.3", "SP saves with tp 8, of a layer's activations, Llama 7B with flash attention", 0.25,
        lambda: ours.saved_by_sequence("7b", "megatron-2024"), "%", KEPT,
        "Less of it lies outside: 7/8 of a quarter.", 0.4),
    Row("9.6", "a message of 2,048 tokens of dim 4,096 to the next stage: B/M · L · D bytes",
        2048 * 4096, ours.message_between_stages, "B", "09_5d.traffic",
        "That is how many numbers; each has 2 bytes."),
    Row("12.4", "activations that grow with L² over the others, if L = D: less than 1", 1,
        lambda: ours.scores_over_rest(12288), "times", KEPT, "Its factor is 5 H L / 34 D, and "
        "GPT-3 has 96 heads: the others are more below L = 34 D / 5 H, 870 tokens."),
    Row("13.1", "days of Llama 3's 15.6 T tokens on 16,384 GPUs, as chapter 10 plans it", 54,
        ours.days_of_llama, "days", "lab.planner.published.llama_3", "The 54 days are a part of "
        "the run, in which interruptions were counted."),
    Row("Q1", "an all_reduce by one main rank over one by a ring, 8 ranks, 14 GB of gradients", 1.5,
        lambda: ours.all_reduce_seconds("all_reduce_naive", 8, 14e9)
        / ours.all_reduce_seconds("all_reduce_ring", 8, 14e9), "times", "00_collectives.seconds",
        "1.5 to 3 are of a whole step, and computing takes as long either way. Messages alone take "
        "so many times as long.", 3),
    Row("Q13", "bandwidth that is used, as N grows: 1 GB on 1,024 GPUs over InfiniBand", 1,
        lambda: ours.share_of_bytes(1024, 1e9, "H100, InfiniBand NDR"), "%",
        "00_collectives.seconds", "It falls: 2S bytes do not grow with N, and the latencies of "
        "2(N-1) steps do. On 8 GPUs it is 99%."),
    Row("Q21", "1F1B's share of waiting over that with 4 slices: V", 4,
        lambda: ours.idle_in_time("1f1b", 8, 32) / ours.idle_in_time("interleaved", 8, 32, 4),
        "times", "lab.schedules.simulated_bubble", "The time that is lost is V times less. As a "
        "share of a step, which becomes shorter, it is not."),
    Row("Q23", "SP saves with tp 8, of a layer's activations, GPT-3, scores kept", 0.25,
        lambda: ours.saved_by_sequence("gpt3", "megatron-2021"), "%", KEPT,
        "Scores are 70% of what a layer of GPT-3 keeps, and tp has cut them already.", 0.4),
)

# {the text's number: its rows}. Those of the lecture, 003, repeat rows or contradictions above.
DIFFERENCES = {"000": PLAYBOOK, "001": SCALING_BOOK, "002": MEGATRON_2021, "004": TUTORIAL}
