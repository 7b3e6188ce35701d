"""The scaling book's part 5, in its order: each of its numbers, formulas, plots and answers.

Its layer is two matrices, of D·F weights each, and its chip a TPU v5p. A row whose unit is a
product, as "x DF", tells the factor before it. Sections have the names of its own table: DP, FSDP,
TP, FSDP + TP.
"""

import functools
from dataclasses import replace

from common import Config
from lab.chapters import chapter
from lab.planner import problems, rooflines
from lab.sources.row import Row

D, F, B = 8192, 30_000, 2_000_000       # LLaMA-3 70B as the text has it, and its batch
AXES = 2, 1                             # of the torus: for FSDP, and for tensor parallelism
CHIPS_OF_HOST = 4


@functools.cache
def ten():
    return chapter("10")


@functools.cache
def tpu():
    return ten().CLUSTERS["tpu-v5p"]


@functools.cache
def llama_2():
    return problems.llama_2(ten())


def per_chip(axes=1):
    """Tokens from which on data parallelism computes longer, over so many axes."""
    return rooflines.tokens_of_data_parallel(tpu().peak, axes * tpu().nvlink)


def widest(ffn, axes=1):
    return rooflines.largest_tensor_parallel(ffn, tpu().peak, axes * tpu().nvlink)


def least(ffn):
    return rooflines.tokens_of_both(ffn, tpu().peak, tpu().nvlink, AXES)


def pod():
    """Tokens of a pod from which on data parallelism between pods computes longer."""
    return rooflines.tokens_of_data_parallel(tpu().peak, tpu().nic)


# ----------------------------------------------------------------------- the table of the takeaways

def computed(of_pass, dp=1, tp=1):
    """FLOPs of a chip in forward (0) or backward (1), over B·D·F/(X·Y)."""
    flops = rooflines.flops(rooflines.mlp(D, F), B, dp, tp)[of_pass]
    return flops / (B * D * F / (dp * tp))


def of_weights(strategy, of_pass):
    """Bytes that are sent, over D·F."""
    return rooflines.bytes_sent(strategy, rooflines.mlp(D, F), B)[of_pass] / (D * F)


def of_tokens(of_pass):
    """Bytes that tensor parallelism sends, over B·D."""
    return rooflines.bytes_sent("tp", rooflines.mlp(D, F), B)[of_pass] / (B * D)


def of_both(of_pass, dp=512, tp=8):
    """Bytes of FSDP with tensor parallelism, less FSDP's, over B·D/X."""
    both, weights = (rooflines.bytes_sent(strategy, rooflines.mlp(D, F), B, dp, tp)[of_pass]
                     for strategy in ("both", "zero-3"))
    return (both - weights) / (B * D / dp)


def of_chapter_01():
    """FLOPs of the MLP's six matmuls in a step, over B·D·F: what F more columns add to a step."""
    few, more = (Config(2, 64, 4, 4, seq=32, vocab=64, ffn=ffn) for ffn in (128, 256))
    added = chapter("01").model_flops(more, 1) - chapter("01").model_flops(few, 1)
    return added / few.layers / (few.seq * few.dim * few.ffn)


def of_chapter_03():
    """Bytes of a weight that ZeRO-3 gathers twice and scatters in a step, in 16 bits: what another
    layer adds to the payload."""
    sizes, payloads = [], []
    for layers in (2, 3):
        cfg = Config(layers, 64, 4, 4, seq=32, vocab=64)
        sent = chapter("03").traffic(cfg, 3, 4, 1, (2, 2))
        payloads.append(sum(sent[op][1] for op in ("all_gather", "reduce_scatter")))
        sizes.append(cfg.parameters())
    return (payloads[1] - payloads[0]) / (sizes[1] - sizes[0])


def of_chapter_05():
    """Bytes of the MLP's gathers and scatters in backward, over B·D: of all that chapter 05 sends
    for a block, half is the MLP's, less what forward sends."""
    cfg = Config(2, 64, 4, 4, seq=32, vocab=64)
    sent = chapter("05").traffic(cfg, 1, 1, 4, 2)
    payload = sum(sent[op][1] for op in ("all_gather", "reduce_scatter"))
    return payload / (2 * cfg.layers) / (cfg.seq * cfg.dim) - of_tokens(0)


# ---------------------------------------------------------------------- what is tried, and plotted

def times(ffn, tokens, axes=AXES):
    """{what: seconds} of a layer's forward, as a function of (dp, tp)."""
    layer, links = rooflines.mlp(D, ffn), [count * tpu().nvlink for count in axes]
    return lambda dp, tp: rooflines.seconds(layer, tokens, dp, tp, tpu().peak, links)


def split(ffn, tokens, chips):
    return rooflines.fastest_split(times(ffn, tokens), chips)


def slack(ffn, tokens, chips):
    """Compute over messages, of the best split in numbers that divide."""
    at = times(ffn, tokens)(*split(ffn, tokens, chips))
    return at["compute"] / rooflines.messages(at)


def least_batch(ffn, chips):
    """The smallest batch that some split in numbers that divide computes longer than it sends."""
    return min(chips * per_chip(AXES[0]) / tp for _, tp in rooflines.splits(chips)
               if tp <= widest(ffn, AXES[1]))


def alone(axis, tokens_per_chip, chips=64):
    """Compute over messages, of FSDP or tensor parallelism over all chips and all three axes."""
    split = (chips, 1) if axis == "zero-3" else (1, chips)
    at = times(F, tokens_per_chip * chips, (3, 3))(*split)
    return at["compute"] / at[axis]


def together(tokens_per_chip, chips=64):
    """The same of both, where X is not whole."""
    tokens = tokens_per_chip * chips
    shards = rooflines.best_data_parallel(tokens, chips, F, AXES)
    at = times(F, tokens)(shards, chips / shards)
    return at["compute"] / rooflines.messages(at)


def days(chips):
    """Of LLaMA-3 70B's training at half of the peak."""
    model = ten().MODELS["70b"]
    return rooflines.training_seconds(15e12, model.parameters(), chips, tpu().peak, 0.5) / 86400


def bubble(micro_batches, schedule="1f1b", ranks=8):
    """The share of the time in which a rank of a pipeline waits."""
    waits = chapter("07").bubble(schedule, ranks, micro_batches, 1)
    return waits / (1 + waits)


def largest_of_chapter_10():
    """Parameters that fit on a TPU v5p, by the planner's bytes of each."""
    model = ten().gpt(1, 1024, 8)
    states = ten().memory(model, ten().Layout(sp=False), ten().Software(), 1)
    of_all = sum(states[cause] for cause in ("weights", "gradients", "optimizer"))
    return tpu().memory / of_all * model.parameters()


def share_of_scores(tokens=2**15):
    """Of the FLOPs of a step of LLaMA-3 70B: the causal half of attention's scores."""
    model = replace(ten().MODELS["70b"], seq=tokens)
    half, twice = (ten().step_flops(model, 1, scores) for scores in ("causal", "all"))
    return (twice - half) / half


def pods(count, chips, tokens=B):
    """(compute, messages) in seconds of a layer's backward on so many pods."""
    return rooflines.across_pods(rooflines.mlp(D, F), tokens, count * chips, chips, tpu().peak,
                                 tpu().nic)


def of_layers(*kinds):
    """Parameters of LLaMA-2 13B's matrices of these kinds."""
    model = llama_2()["model"]
    return model.layers * sum(model.matrices(1)[kind] for kind in kinds)


# ----------------------------------------------------------------------------------------- the rows

BOTH_BACKWARD = (
    "the text's table has 8, as if each of two gathers and two scatters were sent; its own list of "
    "backward gathers dOut and In and scatters dIn, 6, or 4 if In is kept, as in its row of tensor "
    "parallelism")
DATA = (
    Row("DP", "tokens of a TPU v5e from which on matmuls outlast HBM", 240,
        lambda: rooflines.tokens_of_data_parallel(197e12, 819e9), "tokens", error=5,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("DP", "the same, of a TPU v5p", 240,
        lambda: rooflines.tokens_of_data_parallel(tpu().peak, tpu().hbm), "tokens", error=5,
        by="lab.planner.rooflines.tokens_of_data_parallel",
        why="240 is a TPU v5e's; a v5p has 2.3 times its FLOP/s, and 3.4 times its HBM's B/s"),
    Row("DP", "bytes of a parameter, its weights and AdamW's moments", 10,
        lambda: rooflines.STATES, "B", by="lab.planner.rooflines.STATES"),
    Row("DP", "largest model that fits on a TPU v5p", 9e9,
        lambda: rooflines.largest_model(tpu().memory), "", error=0.5e9,
        by="lab.planner.rooflines.largest_model"),
    Row("DP", "the same with gradients and masters in float32", 9e9,
        largest_of_chapter_10, "", error=0.5e9,
        by="10_planner.memory", why="the text keeps neither gradients nor masters: 10 bytes of 18"),
    Row("DP", "an all_reduce, over the bytes of its array", 2,
        lambda: chapter("02").wire_bytes(1, 10**9), "x", error=1e-6,
        by="02_data_parallel.wire_bytes"),
    Row("DP", "T_comms of a layer, times W", 8, lambda: of_weights("dp", 1), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("DP", "T_math of a layer's backward, times X C", 8,
        lambda: computed(1, dp=64), "x BDF", by="lab.planner.rooflines.flops"),
    Row("DP", "T: the longer of the two, 2,000 tokens of a chip, D 8,192, F 30,000",
        None, lambda: max(rooflines.flops(rooflines.mlp(D, F), 2000)[1] / tpu().peak,
                          rooflines.bytes_sent("dp", rooflines.mlp(D, F), 1)[1] / tpu().nvlink),
        "s", by="lab.planner.rooflines.bytes_sent"),
    Row("DP", "B/X from which on it is compute-bound, one axis", 2550,
        per_chip, "tokens", error=5, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("DP", "the same, three axes", 850, lambda: per_chip(3), "tokens", error=5,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("DP", "tokens of a pod of 8,960 chips", 7.6e6, lambda: 8960 * per_chip(3),
        "tokens", error=0.05e6, by="lab.planner.rooflines.tokens_of_data_parallel"),
)
SHARDED = (
    Row("FSDP", "T_comms of a layer's forward, times W", 4, lambda: of_weights("zero-3", 0), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("FSDP", "T_math of a layer's forward, times X C", 4, lambda: computed(0, dp=64), "x BDF",
        by="lab.planner.rooflines.flops"),
    Row("FSDP", "bytes of ZeRO-3, over those of an all_reduce", 1.5,
        lambda: sum(rooflines.bytes_sent("zero-3", rooflines.mlp(D, F), B))
        / sum(rooflines.bytes_sent("dp", rooflines.mlp(D, F), B)), "x",
        by="lab.planner.rooflines.bytes_sent"),
    Row("FSDP", "C / W of a TPU v5p", 2550, per_chip, "FLOP/B", error=5,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("FSDP", "chips for DeepSeek-V2's batch of 40 M tokens", 47_000,
        lambda: 40e6 / per_chip(3), "chips", error=500,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("FSDP", "the same in pods", 5, lambda: 40e6 / per_chip(3) / tpu().per_node, "pods",
        error=0.5, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("FSDP", "FLOPs of LLaMA-3 70B's training", 6.3e24,
        lambda: rooflines.training_seconds(15e12, ten().MODELS["70b"].parameters(), 1, 1, 1),
        "FLOP", error=0.05e24, by="lab.planner.rooflines.training_seconds"),
    Row("FSDP", "chips for its batch of 16 M tokens", 18_823, lambda: 16e6 / per_chip(3), "chips",
        error=1, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("FSDP", "the same in pods", 2, lambda: 16e6 / per_chip(3) / tpu().per_node, "pods",
        error=0.5, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("FSDP", "days of its training on them, at 50% of the peak", 17,
        lambda: days(16e6 / per_chip(3)), "days", error=0.5,
        by="lab.planner.rooflines.training_seconds"),
)
TENSOR = (
    Row("TP", "T_math of a layer's forward, times Y C", 4,
        lambda: computed(0, tp=8), "x BDF", by="lab.planner.rooflines.flops"),
    Row("TP", "T_comms of a layer's forward, times W", 4, lambda: of_tokens(0),
        "x BD", by="lab.planner.rooflines.bytes_sent"),
    Row("TP", "C / W of int8", 5100,
        lambda: rooflines.tokens_of_data_parallel(2 * tpu().peak, tpu().nvlink), "FLOP/B", error=50,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("TP", "bytes of int8 messages, over those of bf16: the two cancel", 0.5,
        lambda: rooflines.bytes_sent("tp", rooflines.mlp(D, F), B, width=1)[0]
        / rooflines.bytes_sent("tp", rooflines.mlp(D, F), B)[0], "x",
        by="lab.planner.rooflines.bytes_sent"),
    Row("TP", "F of LLaMA-3 70B", 30_000, lambda: ten().MODELS["70b"].ffn, "",
        error=1500, by="10_planner.MODELS"),
    Row("TP", "F / 2550 of LLaMA-3 70B: 8 are fine, and 16 are not", 8,
        lambda: widest(ten().MODELS["70b"].ffn), "ranks",
        by="lab.planner.rooflines.largest_tensor_parallel", to=16),
    Row("TP", "the same of its whole layer, attention and three matrices", 8,
        lambda: widest(ten().MODELS["70b"].weights(1)
                       / rooflines.layer_of(ten(), ten().MODELS["70b"]).sent), "ranks",
        by="lab.planner.rooflines.layer_of", to=16),
    Row("TP", "F that 8 ranks require", 20_000, lambda: 8 * per_chip(), "",
        error=500, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("TP", "F / 2550 of Gemma 7B, whose gate and up have 49,152 columns", 19,
        lambda: widest(49_152), "ranks", error=0.5,
        by="lab.planner.rooflines.largest_tensor_parallel"),
)
MIXED = (
    Row("FSDP + TP", "T_FSDP comms, times Y W M_X", 4,
        lambda: times(F, B)(512, 8)["zero-3"] * 8 * AXES[0] * tpu().nvlink / (D * F), "x DF",
        error=1e-9, by="lab.planner.rooflines.seconds"),
    Row("FSDP + TP", "T_TP comms, times X W M_Y", 4,
        lambda: times(F, B)(512, 8)["tp"] * 512 * AXES[1] * tpu().nvlink / (B * D), "x BD",
        error=1e-9, by="lab.planner.rooflines.seconds"),
    Row("FSDP + TP", "T_math, times N C", 4,
        lambda: times(F, B)(512, 8)["compute"] * 4096 * tpu().peak / (B * D * F), "x BDF",
        error=1e-9, by="lab.planner.rooflines.seconds"),
    Row("FSDP + TP", "X_opt of N 64, B 48,000, F 32,768", 13.9,
        lambda: rooflines.best_data_parallel(48_000, 64, 32_768, AXES), "ranks", error=0.05,
        by="lab.planner.rooflines.best_data_parallel",
        why="13.9 is of F = 32,000, and the text says 32,768"),
    Row("FSDP + TP", "X_opt of N 64, B 48,000, F 32,000", 13.9,
        lambda: rooflines.best_data_parallel(48_000, 64, 32_000, AXES), "ranks", error=0.05,
        by="lab.planner.rooflines.best_data_parallel"),
    Row("FSDP + TP", "X of the best split, all tried", 16,
        lambda: split(32_768, 48_000, 64)[0], "ranks", by="lab.planner.rooflines.fastest_split"),
    Row("FSDP + TP", "Y of the best split, all tried", 4,
        lambda: split(32_768, 48_000, 64)[1], "ranks", by="lab.planner.rooflines.fastest_split"),
    Row("FSDP + TP", "T_math / T_comms at X_opt, B 48,000: sqrt(B F M_X M_Y / N) / 2550", None,
        lambda: together(48_000 / 64), "x", by="lab.planner.rooflines.seconds"),
    Row("FSDP + TP", "B/N from which on it is compute-bound, F 32,768", 99,
        lambda: least(32_768), "tokens", error=0.5, by="lab.planner.rooflines.tokens_of_both"),
    Row("FSDP + TP", "how many times fewer than FSDP alone, three axes", 8,
        lambda: per_chip(3) / least(32_768), "x", error=0.5,
        by="lab.planner.rooflines.tokens_of_both",
        why="850 / 99 are 8.6; the text says roughly"),
    Row("FSDP + TP", "first plot, 4x4x4, F 30,000: both cross 1 at", 100, lambda: least(F),
        "tokens", error=10, by="figures/rooflines.png"),
    Row("FSDP + TP", "first plot: FLOPs over messages there", 1,
        lambda: together(least(F)), "x", error=1e-9, by="figures/rooflines.png"),
    Row("FSDP + TP", "first plot: both, at 4 times the batch (as its root)", 2,
        lambda: together(4 * least(F)), "x", error=1e-9, by="figures/rooflines.png"),
    Row("FSDP + TP", "first plot: FSDP, over three axes, crosses 1 at 850 tokens", 1,
        lambda: alone("zero-3", 850), "x", error=1e-9, by="figures/rooflines.png"),
    Row("FSDP + TP", "first plot: FSDP, at twice the batch", 2, lambda: alone("zero-3", 1700),
        "x", error=1e-9, by="figures/rooflines.png"),
    Row("FSDP + TP", "first plot: tensor parallelism over all chips, at every batch", None,
        lambda: alone("tp", 850), "x", by="figures/rooflines.png"),
    Row("FSDP + TP", "second plot, 16x16x16, F 32,768: both become compute-bound at", 4e5,
        lambda: 4096 * least(4 * D), "tokens", error=0.5e5, by="figures/rooflines.png"),
    Row("FSDP + TP", "second plot: all splits are comms-bound below", 6e5,
        lambda: least_batch(4 * D, 4096), "tokens", error=1e5, by="figures/rooflines.png"),
    Row("FSDP + TP", "the plot to play with, 4e5 tokens: X where messages are shortest", 256,
        lambda: split(4 * D, 4e5, 4096)[0], "ranks", by="lab.planner.rooflines.fastest_split"),
    Row("FSDP + TP", "the same: Y", 16, lambda: split(4 * D, 4e5, 4096)[1], "ranks",
        by="lab.planner.rooflines.fastest_split"),
)
PIPELINE = (
    Row("pipeline", "layers that a message to the next stage hides behind, D 8,192, one axis",
        None, lambda: chapter("07").blocks_to_hide(
            Config(8, D, 64, 8, seq=8192, vocab=128_256), 2, tpu().peak, tpu().nvlink),
        "layers", by="07_pipeline_parallel.blocks_to_hide"),
    Row("pipeline", "time in which one of 8 stages waits, of one batch", None, lambda: bubble(1),
        "%", by="07_pipeline_parallel.bubble"),
    Row("pipeline", "the same of 32 micro-batches", None, lambda: bubble(32), "%",
        by="07_pipeline_parallel.bubble"),
    Row("pipeline", "the same of DeepSeek-V3's schedule, 8 stages and 20 micro-batches", None,
        lambda: bubble(20, "dualpipe"), "%", by="07_pipeline_parallel.bubble"),
)
PODS = (
    Row("pods", "hosts of a pod of 8,960 chips", 2240,
        lambda: tpu().per_node / CHIPS_OF_HOST, "hosts", by="10_planner.CLUSTERS"),
    Row("pods", "B/s of a host to others", 25e9, lambda: CHIPS_OF_HOST * tpu().nic, "B/s",
        by="10_planner.CLUSTERS"),
    Row("pods", "B/s of a chip of it", 6.25e9, lambda: tpu().nic, "B/s",
        by="10_planner.CLUSTERS"),
    Row("pods", "T_math of a layer's backward, times N C", 8,
        lambda: pods(2, 8960)[0] * 2 * 8960 * tpu().peak / (B * D * F), "x BDF", error=1e-9,
        by="lab.planner.rooflines.across_pods"),
    Row("pods", "T_comms, times M W", 8,
        lambda: pods(2, 8960)[1] * 8960 * tpu().nic / (D * F), "x DF", error=1e-9,
        by="lab.planner.rooflines.across_pods"),
    Row("pods", "tokens of a pod, 4.46e14 / 6.25e9", 71_360,
        lambda: rooflines.tokens_of_data_parallel(4.46e14, tpu().nic), "tokens",
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("pods", "the same with the FLOP/s of the other sections", 71_360, pod, "tokens",
        error=500, by="lab.planner.rooflines.tokens_of_data_parallel",
        why="elsewhere the text has 4.59e14 FLOP/s, as the data sheet; 4.46e14 turns two digits"),
    Row("pods", "LLaMA-3 70B: tensor parallelism, for each axis", 11,
        lambda: widest(ten().MODELS["70b"].ffn), "ranks", error=0.5,
        by="lab.planner.rooflines.largest_tensor_parallel"),
    Row("pods", "chips for FSDP with 2 M tokens, three axes", 2400, lambda: B / per_chip(3),
        "chips", error=50, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("pods", "the same, of a pod", 0.25, lambda: B / per_chip(3) / tpu().per_node, "%",
        error=0.02, by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("pods", "B/N from which on both are compute-bound", 108, lambda: least(F), "tokens",
        error=0.5, by="lab.planner.rooflines.tokens_of_both"),
    Row("pods", "chips for both", 18_000, lambda: B / least(F), "chips", error=500,
        by="lab.planner.rooflines.tokens_of_both"),
    Row("pods", "1 M tokens on 8,192 chips: X of the best split, all tried", 1024,
        lambda: split(F, 1e6, 8192)[0], "ranks", by="lab.planner.rooflines.fastest_split"),
    Row("pods", "the same: Y", 8, lambda: split(F, 1e6, 8192)[1], "ranks",
        by="lab.planner.rooflines.fastest_split"),
    Row("pods", "compute over messages of that split, which is to be compute-bound", 1,
        lambda: slack(F, 1e6, 8192), "x", error=0.05, by="lab.planner.rooflines.seconds",
        why="at X_opt = 739 it would be 1.06; of the splits that divide, none reaches 1"),
    Row("pods", "the same of X_opt, which does not divide", None,
        lambda: together(1e6 / 8192, 8192), "x", by="lab.planner.rooflines.seconds"),
    Row("pods", "tokens of a chip, 1 M in each of 2 pods", 111, lambda: B / 2 / 8960,
        "tokens", error=1),
    Row("pods", "how many times a pod's 1 M is what it needs", None,
        lambda: B / 2 / pod(), "x", by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("pods", "compute over messages between 2 pods", None,
        lambda: pods(2, 8960)[0] / pods(2, 8960)[1], "x", by="lab.planner.rooflines.across_pods"),
)
TAKEAWAYS = (
    Row("takeaways", "FLOPs of attention's scores at 32k tokens, of LLaMA-3 70B's", None,
        share_of_scores, "%", by="10_planner.step_flops"),
    *(Row("takeaways", f"{name}: FLOPs of a layer's {'backward' if of_pass else 'forward'}", told,
          functools.partial(computed, of_pass, dp, tp), f"x BDF/{over}",
        by="lab.planner.rooflines.flops")
      for name, over, dp, tp in (("DP", "X", 64, 1), ("FSDP", "X", 64, 1), ("TP", "Y", 1, 8),
                                 ("FSDP + TP", "XY", 64, 8))
      for of_pass, told in enumerate((4, 8))),
    Row("takeaways", "DP: bytes of forward", 0, lambda: of_weights("dp", 0), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "DP: bytes of backward", 8, lambda: of_weights("dp", 1), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "FSDP: bytes of forward", 4, lambda: of_weights("zero-3", 0), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "FSDP: bytes of backward", 8, lambda: of_weights("zero-3", 1), "x DF",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "FSDP: bytes of a weight in a step, 12 DF of 2 DF weights, as it runs", 6,
        of_chapter_03, "B", by="03_zero.traffic"),
    Row("takeaways", "TP: bytes of forward", 4, lambda: of_tokens(0), "x BD",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "TP: bytes of backward", 4, lambda: of_tokens(1), "x BD",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "TP: bytes of backward, if In is gathered again (chapter 05)", 4,
        of_chapter_05, "x BD", by="05_sequence_parallel.traffic",
        why="the text keeps what is gathered; Megatron gathers it again, and keeps 1/Y of it"),
    Row("takeaways", "FSDP + TP: bytes of forward, of activations", 4, lambda: of_both(0), "x BD/X",
        by="lab.planner.rooflines.bytes_sent"),
    Row("takeaways", "FSDP + TP: bytes of backward, of activations", 8, lambda: of_both(1),
        "x BD/X", by="lab.planner.rooflines.bytes_sent", why=BOTH_BACKWARD),
    Row("takeaways", "B/N of DP and FSDP: C / W", 2550, per_chip, "tokens", error=5,
        by="lab.planner.rooflines.tokens_of_data_parallel"),
    Row("takeaways", "the same between pods", 71_000, pod, "tokens", error=500,
        by="lab.planner.rooflines.tokens_of_data_parallel",
        why="71,000 has 4.46e14 FLOP/s, as above"),
    Row("takeaways", "Y of TP, of most models", 8,
        lambda: widest(ten().MODELS["70b"].ffn), "ranks",
        by="lab.planner.rooflines.largest_tensor_parallel", to=16),
    Row("takeaways", "the same of LLaMA-3 8B, F 14,336", 8, lambda: widest(14_336), "ranks",
        by="lab.planner.rooflines.largest_tensor_parallel", to=16,
        why="F / 2550 is below 8 for small models: two axes would double it"),
    Row("takeaways", "the same of LLaMA-3 405B, F 53,248", 8, lambda: widest(53_248), "ranks",
        by="lab.planner.rooflines.largest_tensor_parallel", to=16,
        why="and above 16 for the largest"),
    Row("takeaways", "B/N of FSDP + TP", 100, lambda: least(4 * D), "tokens", error=1,
        by="lab.planner.rooflines.tokens_of_both"),
)
QUESTIONS = (
    Row("problem 1", "parameters of LLaMA-2 13B's MLPs", 8.5e9, lambda: of_layers("mlp"), "",
        error=0.05e9, by="10_planner.Model"),
    Row("problem 1", "of its attention", 4.2e9, lambda: of_layers("queries", "keys"), "",
        error=0.05e9, by="10_planner.Model"),
    Row("problem 1", "of its vocabulary", 0.33e9,
        lambda: 2 * llama_2()["model"].vocab * llama_2()["model"].dim, "", error=0.005e9,
        by="10_planner.Model"),
    Row("problem 1", "of all", 13.0e9, lambda: llama_2()["parameters"], "", error=0.05e9,
        by="10_planner.Model.parameters"),
    Row("problem 2", "its states", 130e9, lambda: llama_2()["states"], "B", error=0.5e9,
        by="lab.planner.problems.llama_2"),
    Row("problem 2", "activations of 16 M tokens, three of a layer", 42e12,
        lambda: 16e6 * llama_2()["kept"], "B", error=0.5e12, by="lab.planner.problems.llama_2"),
    Row("problem 3", "sequences of 32k of 3 M tokens", 96, lambda: 3 * 2**20 / (32 * 2**10),
        "sequences"),
    Row("problem 3", "chips of a 16x16x16 slice", 4096, lambda: llama_2()["chips"], "chips",
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "their HBM", 393e12, lambda: llama_2()["all hbm"], "B", error=0.5e12,
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "the same by the data sheet's 95 GB", 393e12,
        lambda: llama_2()["chips"] * tpu().memory, "B", error=0.5e12, by="10_planner.CLUSTERS",
        why="a v5p has 95 GB; the text has 96"),
    Row("problem 3", "states, over the HBM of a chip: more than 1", None,
        lambda: llama_2()["states"] / llama_2()["hbm"], "x", by="lab.planner.problems.llama_2"),
    Row("problem 3", "activations of 3 M tokens", 7.86e12,
        lambda: llama_2()["tokens"] * llama_2()["kept"], "B", error=0.005e12,
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "with states", 8e12,
        lambda: llama_2()["tokens"] * llama_2()["kept"] + llama_2()["states"], "B", error=0.05e12,
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "the same of a chip", None, lambda: (
        llama_2()["tokens"] * llama_2()["kept"] + llama_2()["states"]) / llama_2()["chips"], "B",
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "the least batch of FSDP, three axes", 3.48e6,
        lambda: llama_2()["chips"] * llama_2()["axes"], "tokens", error=0.005e6,
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "tokens of a chip that both need", 235, lambda: llama_2()["both"], "tokens",
        error=0.5, by="lab.planner.problems.llama_2"),
    Row("problem 3", "X_opt", 1333, lambda: llama_2()["shards"], "ranks", error=0.5,
        by="lab.planner.problems.llama_2"),
    Row("problem 3", "X of the best split, all tried", 1024, lambda: llama_2()["split"][0],
        "ranks", by="lab.planner.rooflines.fastest_split"),
    Row("problem 3", "Y", 4, lambda: llama_2()["split"][1], "ranks",
        by="lab.planner.rooflines.fastest_split"),
    Row("problem 3", "compute over messages of that split: more than 1", None,
        lambda: slack(13_824, llama_2()["tokens"], llama_2()["chips"]), "x",
        by="lab.planner.rooflines.seconds"),
    Row("problem 3", "a step at 40% of the peak", 0.3, lambda: llama_2()["seconds"], "s",
        error=0.02, by="lab.planner.problems.llama_2"),
)
APPENDIX = (
    Row("appendix", "FLOPs of two matmuls of forward and four of backward, as they run", 12,
        of_chapter_01, "x BDF", by="01_single_gpu.model_flops"),
)

ROWS = DATA + SHARDED + TENSOR + MIXED + PIPELINE + PODS + TAKEAWAYS + QUESTIONS + APPENDIX
LEFT_OUT = (
    "the code of a pipeline in JAX, which passes activations on: chapter 07 trains one",
    "drawings of who holds what, and lists of what is sent when: chapters 02 to 05 run them",
)
