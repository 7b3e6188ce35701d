"""000: the Ultra-Scale Playbook (Tazi et al., 2025), in its order.

The points of its plots, and its runs, are in `playbook_plots`. A row that says "see contradictions"
is one of lab/sources/contradictions.py, with the derivation.
"""

import math
from functools import partial

import torch

from lab import formats
from lab.chapters import chapter, kernel
from lab.classroom import simulate
from lab.planner import playbook, rooflines
from lab.sources import contradictions, playbook_plots, worked
from lab.sources.contradictions import GLU, GPT_3, NVLINK
from lab.sources.playbook_plots import ten
from lab.sources.row import Row

SEE = "see contradictions"
H, LAYERS, SEQ = 4096, 32, 4096         # of the examples that the text leaves to the reader
FLOPS, BANDWIDTH = NVLINK
N_OF_GPT_3 = 12288 * 50257 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288


# -------------------------------------------------------------------------------- one GPU's memory

def bytes_of_parameter(recipe):
    return formats.bytes_of(formats.RECIPES[recipe])


def in_fp32(numbers):
    """Bytes of weights, gradients and moments, by chapter 03 on one rank."""
    return sum(chapter("03").held(numbers, 1, 1, "fp32"))


def kept_by_layers():
    """Of GPT-3 and one sequence, all layers, nothing recomputed."""
    return GPT_3.layers * chapter("01").textbook_activation_bytes(GPT_3, 1)


FIRST_STEPS = [
    Row("batch", "tokens of a batch, bs·seq: DeepSeek-V3, 15,360 sequences of 4,096: ~60 M",
        60e6, lambda: 15360 * ten().MODELS["deepseek-v3"].seq, "tokens", 5e6),
    Row("memory", "N = h·v + L·(12·h² + 13·h) + 2·h, of GPT-3", N_OF_GPT_3,
        partial(playbook.parameters, 96, 12288, 50257), "", by="playbook.parameters"),
    Row("memory", "N of GPT-3, as our models are built", N_OF_GPT_3,
        GPT_3.parameters, by="common.Config.parameters",
        why="our linears have no biases, 9·h a layer, and embedding and head are two matrices"),
    *[Row("memory", f"fp32: bytes of {what}", told,
          lambda i=i: chapter("03").held(1, 1, 1, "fp32")[i], "B", by="03_zero.held")
      for i, (what, told) in enumerate((("a parameter", 4), ("its gradient", 4), ("Adam", 8)))],
    Row("memory", "bf16 with masters: 2 + 2 + 4 + 8 bytes of a parameter", 16,
        partial(bytes_of_parameter, "bf16"), "B", by="lab/formats.py"),
    Row("memory", "and with gradients in fp32 as well", 20,
        partial(bytes_of_parameter, "bf16, fp32 sums"), "B", by="lab/formats.py"),
    *[Row("memory", f"table: {size}B in fp32, or in bf16 with masters", told * 1e9,
          partial(in_fp32, size * 1e9), "B", by="03_zero.held")
      for size, told in ((1, 16), (7, 112), (70, 1120), (405, 6480))],
    *[Row("memory", f"table: {size}B in bf16, gradients in fp32", told * 1e9,
          lambda size=size: size * 1e9 * bytes_of_parameter("bf16, fp32 sums"), "B",
          by="lab/formats.py")
      for size, told in ((1, 20), (7, 140), (70, 1400), (405, 8100))],
    Row("memory", "what CUDA itself takes, which its formulas leave out", 1e9,
        lambda: ten().CLUSTERS["h100"].memory * (1 - ten().ROOM), "B", by="10_planner.ROOM", to=2e9,
        why="the planner leaves room for NCCL's buffers and for fragments as well"),
    Row("memory", "of an H100", 80e9, lambda: ten().CLUSTERS["h100"].memory, "B",
        by="10_planner.CLUSTERS"),
    Row("memory", "L·s·b·h·(34 + 5·a·s/h), of GPT-3 and one sequence",
        96 * 2048 * 12288 * 114, kept_by_layers, "B", by="01_single_gpu.textbook_activation_bytes"),
]

RECOMPUTATION = [
    Row("recompute", "what full adds to compute", 0.3, contradictions.full_of_a_step, "%",
        by="01_single_gpu.step_flops", to=0.4),
    Row("recompute", "what selective takes off GPT-3's activations", 0.7,
        lambda: 1 - (contradictions.kept_of_gpt_3("selective")
                     / contradictions.kept_of_gpt_3("none")), "%", 0.005,
        "10_planner.kept_by_layer"),
    Row("recompute", "what selective adds to GPT-3's compute", 0.027,
        contradictions.selective_of_a_step, "%", 0.0005, "01_single_gpu.step_flops", why=SEE),
    Row("recompute", "HFU over MFU with full recomputation, GPT-3", None,
        lambda: (ten().step_flops(ten().MODELS["gpt3"], 1, recompute="full")
                 / ten().step_flops(ten().MODELS["gpt3"], 1)), by="10_planner.step_flops"),
]


# --------------------------------------------------------------------------- data parallelism, ZeRO

def micro_batches(tokens, seq, micro_batch, dp):
    """gbs / (mbs · dp), of the power of 2 of sequences that is closest to so many tokens."""
    sequences = 2 ** round(math.log2(tokens / seq))
    return sequences / (micro_batch * dp)


def reduce_scatter_is_faster():
    seconds = partial(chapter("00").seconds, n=64, size=1e9, latency=3.4e-6, bandwidth=BANDWIDTH)
    return seconds("all_reduce_ring") / seconds("reduce_scatter")


def gathers(stage):
    """Of a step of ZeRO: calls, for the 34 units of a model with 32 layers."""
    return chapter("03").traffic(worked.LLAMA_7B, stage, 8, 1, (2, 2))["all_gather"][0]


DATA = [
    Row("batch", "sequences of 4 M tokens at 4k: 1,024", 1024,
        partial(micro_batches, 4e6, 4096, 1, 1), "sequences"),
    *[Row("batch", f"example: grad_acc on {dp} GPUs with mbs 2", told,
          partial(micro_batches, 4e6, 4096, 2, dp), "micro-batches")
      for dp, told in ((128, 4), (512, 1))],
    *[Row("batch", f"latencies in an all_reduce of 25 MB over InfiniBand: {n} GPUs", None,
          lambda n=n: 1 - worked.share_of_bytes(n, 25e6, "H100, InfiniBand NDR"), "%",
          by="00_collectives.seconds") for n in (64, 512)],
    Row("batch", "70B parameters in bf16", 140e9, lambda: 2 * 70e9, "B"),
    Row("batch", "and in GiB", 133, lambda: 2 * 70e9 / playbook.GIB, "GiB", 0.5,
        why=SEE),
]
ZERO = [
    *[Row("ZeRO", f"{name}: bytes of a parameter on 8 ranks", told,
          partial(worked.states, stage, 8), "B", by="03_zero.held")
      for stage, name, told in ((0, "dp, 2 + 2 + k", 16), (1, "ZeRO-1, 2 + 2 + k/N", 5.5),
                                (2, "ZeRO-2, 2 + (2 + k)/N", 3.75),
                                (3, "ZeRO-3, (2 + 2 + k)/N", 2))],
    Row("ZeRO", "with gradients in fp32: 2 + 6 + 12", 20,
        partial(bytes_of_parameter, "bf16, fp32 sums"), "B", by="lab/formats.py"),
    Row("ZeRO-1", "a reduce_scatter is so many times as fast as an all_reduce", 2,
        reduce_scatter_is_faster, by="00_collectives.seconds"),
    Row("ZeRO-2", "on many ranks, it needs so many times less memory than dp", 8,
        lambda: worked.states(0, 1) / worked.states(2, 1e9), "", 1e-6, "03_zero.held"),
    *[Row(f"ZeRO-{stage}", f"it sends {told}Ψ, on 64 ranks", told,
          partial(worked.sent_in_zero, stage, 64), "Ψ", 0.08, "03_zero.traffic")
      for stage, told in ((1, 2), (2, 2), (3, 3))],
    Row("ZeRO-2", "it sends 2Ψ: with 8 micro-batches", 2, partial(contradictions.sent_by_zero_2, 8),
        "Ψ", 0.05, "03_zero.traffic", why=SEE),
    Row("ZeRO-3", "gathers of a step, 2·n - 1 of n = 34 units", 67, partial(gathers, 3), "calls",
        by="03_zero.traffic"),
    Row("ZeRO-3", "of these more than in ZeRO-2: 2·n - 1", 67, lambda: gathers(3) - gathers(2),
        "calls", by="03_zero.traffic",
        why="those are all; ZeRO-2 gathers each unit as well, once, after the update"),
]


# --------------------------------------------------------------------- tensor, sequence and context

def share(number, name):
    return chapter(number).kept(GPT_3, 8)[name]


def on_the_wire(variant):
    """What a block of chapter 05 sends over what one of chapter 04 does."""
    return (worked.sent_in_layer("05", 2, variant=variant)
            / worked.sent_in_layer("04", 2))


def ranks_with_a_kv_head(tp):
    plan, model = ten(), ten().MODELS["8b"]
    return tp / plan.Layout(tp=tp).cuts(model, plan.Software())["keys"]


def work_of_parts(variant):
    """Pairs of the busiest of 4 ranks over those of the idlest, in causal attention."""
    pairs = [chapter("06").pairs(variant, part, 4, 16, 0.5) for part in range(4)]
    return max(pairs) / min(pairs)


TENSOR = [
    Row("TP", "A·B by columns of B: the difference", 0,
        partial(worked.off_by, "matmul_by_columns"), "", 1e-12,
        "04_tensor_parallel.matmul_by_columns"),
    Row("TP", "A·B by rows of B: the difference", 0,
        partial(worked.off_by, "matmul_by_rows"), "", 1e-12, "04_tensor_parallel.matmul_by_rows"),
    Row("TP", "heads of Llama 3 8B, the most that tp can be", 32,
        lambda: ten().MODELS["8b"].heads, "", by="10_planner.misfit"),
    Row("TP", "its kv heads", 8, lambda: ten().MODELS["8b"].kv_heads),
    Row("TP", "with tp 32, ranks that hold the same one", None,
        partial(ranks_with_a_kv_head, 32), "ranks", by="10_planner.Layout.cuts"),
    Row("TP", "all_reduces of a block in forward", 2,
        lambda: worked.sent_in_layer("04", 0) / 2, "calls", by="04_tensor_parallel.traffic"),
]
SEQUENCE = [
    *[Row("SP", f"table: {region}, {name}: its share of a rank of 8", told,
          partial(share, number, what), by=f"{number}'s kept")
      for region, what, of in (("SP region", "outside", (1, 1 / 8)),
                               ("TP region", "inside", (1 / 8, 1 / 8)))
      for (name, number), told in zip((("TP", "04"), ("TP with SP", "05")), of)],
    Row("SP", "gathers and scatters of a block in forward, 2 + 2", 4,
        lambda: worked.sent_in_layer("05", 0, variant="kept") / 2, "calls",
        by="05_sequence_parallel.traffic"),
    Row("SP", "it has so many times as many collectives as TP", 2,
        lambda: worked.sent_in_layer("05", 0, variant="kept") / worked.sent_in_layer("04", 0), "",
        by="05_sequence_parallel.traffic"),
    Row("SP", "and sends as much", 1, partial(on_the_wire, "kept"), "",
        by="05_sequence_parallel.traffic"),
    Row("SP", "and sends as much, if the inputs are not kept", 1,
        partial(on_the_wire, "megatron"), "", by="05_sequence_parallel.traffic",
        why="Megatron gathers them again in backward, half as many gathers more"),
]
CONTEXT = [
    Row("CP", "what full recomputation adds", 0.3, contradictions.full_of_a_step,
        "%", 0.05, "01_single_gpu.step_flops"),
    Row("CP", "steps on 4 GPUs: one more than hops", 4,
        lambda: 1 + chapter("06").hops_needed("ring", 4, 16), "",
        by="06_context_parallel.hops_needed"),
    Row("CP", "the busiest of 4 GPUs computes so many times what the idlest does", None,
        partial(work_of_parts, "ring"), by="06_context_parallel.pairs"),
    Row("CP", "and in a zig-zag, where work is balanced", 1, partial(work_of_parts, "zigzag"),
        by="06_context_parallel.pairs"),
    Row("CP", "keys of a rank with an all_gather, over those in a ring of 8", None,
        lambda: (chapter("06").kept("gather", GPT_3, 8)["keys and values"]
                 / chapter("06").kept("zigzag", GPT_3, 8)["keys and values"]),
        by="06_context_parallel.kept"),
]


# ---------------------------------------------------------------------------- pipeline, experts, 5D

def bubble(variant, p, m, v=1, **times):
    return chapter("07").bubble(variant, p, m, v, **times)


def interleaved(m, v):
    """Of 8 ranks; where m is no multiple of them, by the list of actions."""
    if v == 1:
        return bubble("1f1b" if m > 1 else "naive", 8, m)
    return bubble("interleaved", 8, m, v) or worked.bubble_in_time("interleaved", 8, m, v)


BARS = [(32, 8), (16, 8), (32, 4), (32, 2), (16, 4), (8, 8), (32, 1), (16, 2), (8, 4), (4, 8),
        (4, 4), (8, 2), (2, 8), (16, 1), (8, 1), (2, 4), (1, 8), (4, 2), (4, 1), (2, 2), (1, 4),
        (2, 1), (1, 2), (1, 1)]
PIPELINE = [
    Row("AFAB", "bubble of one micro-batch on 4 stages, p - 1", 3,
        partial(bubble, "naive", 4, 1), by="07_pipeline_parallel.bubble"),
    Row("AFAB", "bubble of 8 on 4, (p - 1)/m; backward twice forward", 3 / 8,
        partial(bubble, "afab", 4, 8), by="07_pipeline_parallel.bubble"),
    Row("1F1B", "the same", 3 / 8, partial(bubble, "1f1b", 4, 8),
        by="07_pipeline_parallel.bubble"),
    Row("AFAB", "micro-batches alive, m of 8", 8,
        partial(worked.alive, "afab", 4, 8), by="07_pipeline_parallel.most_alive"),
    Row("1F1B", "micro-batches alive, p of 4", 4, partial(worked.alive, "1f1b", 4, 8),
        by="07_pipeline_parallel.most_alive"),
    Row("PP", "messages over 1F1B's, v = 4, on a rank between two others", 4,
        lambda: (chapter("07").traffic("interleaved", 1, 4, 8, 4, 1, 0, 4)["send"][0]
                 / chapter("07").traffic("1f1b", 1, 4, 8, 1, 1, 0, 4)["send"][0]),
        by="07_pipeline_parallel.traffic"),
    *[Row("PP", f"plot: bubble of 8 stages, m = {m}, v = {v}", 7 / (v * m),
          partial(interleaved, m, v), "", 1e-9, "07_pipeline_parallel.bubble",
          why=SEE if m < 8 and v > 1 else "") for m, v in BARS],
    Row("PP", "ZB-H2's, where F, B and W take equally long", 0,
        partial(bubble, "zb-h2", 4, 16), by="07_pipeline_parallel.bubble"),
    Row("PP", "DualPipe's, of 8 ranks and 16 micro-batches: near zero", 0,
        partial(bubble, "dualpipe", 8, 16), "", 0.01, "07_pipeline_parallel.bubble", why=SEE),
]


def left_by(method):
    """Of what a method is said to share out over 8 GPUs: the share that a GPU has."""
    plan = ten()
    model = plan.gpt(32, H, 32, seq=SEQ, vocab=0) if method != "ep" else plan.MODELS["mixtral"]
    cause, changed = {
        "dp": ("activations", {"micro_batch": 1}), "pp": ("weights", {"pp": 8}),
        "tp": ("weights", {"tp": 8}), "sp": ("activations", {"tp": 8}),
        "cp": ("activations", {"cp": 8}), "ep": ("experts", {"ep": 8, "dp": 8}),
        "ZeRO-1": ("optimizer", {"dp": 8, "zero": 1}),
        "ZeRO-2": ("gradients", {"dp": 8, "zero": 2})}[method]
    software, before = plan.Software(ring=True), {"micro_batch": 8} if method == "dp" else {}

    def has(layout):
        held = plan.parameters_of_gpu(model, layout, software)
        return plan.memory(model, layout, software, 1) | {kind: held[kind][0] for kind in held}

    return has(plan.Layout(**changed))[cause] / has(plan.Layout(**before))[cause]


FIVE = [
    Row("EP", "experts of DeepSeek-V3", 256,
        lambda: ten().MODELS["deepseek-v3"].experts, by="10_planner.MODELS"),
    Row("EP", "nodes that a token goes to, at most", 4,
        lambda: ten().MODELS["deepseek-v3"].node_limit, by="10_planner.MODELS"),
    *[Row("5D", f"table: {method} over 8 GPUs: a GPU's share of {what}", 1 / 8,
          partial(left_by, method), "", 2e-3, "10_planner.memory")
      for method, what in (("dp", "activations of a batch"), ("pp", "weights"),
                           ("tp", "weights"), ("sp", "activations"), ("cp", "activations"),
                           ("ep", "experts"), ("ZeRO-1", "optimizer states"),
                           ("ZeRO-2", "gradients"))],
    Row("step 1", "8B with ZeRO-3 and full recomputation on 8 GPUs, which has room", None,
        lambda: sum(ten().memory(ten().MODELS["8b"], ten().Layout(8, zero=3, recompute="full"),
                                 ten().Software(), 1).values()), "B", by="10_planner.memory"),
    Row("step 1", "70B in the same way: needs more than 8 GPUs", None,
        lambda: sum(ten().memory(ten().MODELS["70b"], ten().Layout(8, zero=3, recompute="full"),
                                 ten().Software(), 1).values()), "B", by="10_planner.memory"),
]


# -------------------------------------------------------------------------------- diving into GPUs

def bits(name, part):
    return formats.about(name)[part]


def orders_of_magnitude(name):
    told = formats.about(name)
    return math.log10(told["largest"] / told["smallest"])


def between_one_and_two(name):
    every = formats.numbers(name)
    return int(((every >= 1) & (every <= 2)).sum())


def saved_by(recipe):
    return 1 - bytes_of_parameter(recipe) / bytes_of_parameter("bf16, fp32 sums")


def segments_of_naive():
    """Of a step over k, a warp's threads down a column of C over threads along a row, in fp32."""
    segments, row = kernel("matmul").segments, 4 * H
    down = segments(0, row) + segments(0, 0)            # of A, and of B
    return down / (segments(0, 0) + segments(0, 4))


RECIPES = {"bf16, fp32 sums": (20, 0), "bf16": (16, 0.2), "Transformer Engine": (16, 0.2),
           "FP8-LM, O3": (9, 0.55), "DeepSeek-V3": (15, 0.25), "Nanotron": (10, 0.5)}
GPU = [
    Row("GPUs", "cores of an H100, 132 · 128: instructions of a tick", 16896,
        lambda: kernel("elu").instruction_budget(1, clock=1, bandwidth=2),
        by="elu.instruction_budget"),
    Row("GPUs", "a warp's loads of A and B, down a column over along a row: about 10 in speed", 10,
        segments_of_naive, "", 1, "matmul.segments",
        why="so many more segments of 128 bytes; the rest of a segment may still lie in a cache"),
    Row("GPUs", "loads that tiles of 32 x 32 leave, of the naive kernel's", None,
        lambda: (kernel("matmul").loads(H, H, H, 32, 32) / kernel("matmul").loads(H, H, H)), "%",
        by="matmul.loads"),
    Row("GPUs", "bytes of plain attention over a flash kernel's, 4,096 keys of 128", None,
        lambda: (kernel("flash_attention").plain_bytes(SEQ, SEQ, 128, 2)
                 / kernel("flash_attention").flash_bytes(SEQ, SEQ, 128, 2)),
        by="flash_attention.plain_bytes"),
    *[Row("formats", f"table: {name}: bits of the {part}", told, partial(bits, name, part),
          by="lab/formats.py")
      for name, *numbers in (("float32", 8, 23), ("float16", 5, 10), ("bfloat16", 8, 7),
                             ("E4M3", 4, 3), ("E5M2", 5, 2))
      for part, told in zip(("exponent", "mantissa"), numbers)],
    Row("formats", "orders of magnitude that float32 spans", 80,
        partial(orders_of_magnitude, "float32"), "", 5, "lab/formats.py"),
    Row("formats", "epsilon of float32, 1.19e-7 (in print: 1.19^-7)", 1.19e-7,
        partial(bits, "float32", "epsilon"), "", 5e-10, "lab/formats.py"),
    Row("formats", "epsilon of float16, about 1e-3", 1e-3,
        partial(bits, "float16", "epsilon"), "", 5e-5, "lab/formats.py"),
    Row("formats", "epsilon of bfloat16 over float16's, about 10", 10,
        lambda: bits("bfloat16", "epsilon") / bits("float16", "epsilon"), "", 0.5, "lab/formats.py",
        why="3 bits less of mantissa are 2³"),
    *[Row("formats", f"numbers of {name} in [1, 2]", told,
          partial(between_one_and_two, name), "", by="lab/formats.py",
          why="1 and 2 themselves are two more") for name, told in (("E4M3", 7), ("E5M2", 3))],
    Row("FP8", "FLOP/s of an H100 over those in bf16", 2, lambda: ten().FP8, "", 0.05,
        "10_planner.FP8", why="by the data sheet it is 2; these are the best measured of each"),
    Row("FP8", "numbers that share a scale in DeepSeek-V3's tiles", 128,
        lambda: formats.TILE, by="lab/formats.py"),
    *[Row("FP8", f"table: {name}: bytes of a parameter", told,
          partial(bytes_of_parameter, name), "B", by="lab/formats.py")
      for name, (told, _) in RECIPES.items()],
    *[Row("FP8", f"table: {name}: less than the baseline", told,
          partial(saved_by, name), "%", 1e-9, "lab/formats.py")
      for name, (_, told) in RECIPES.items()],
]


# --------------------------------------------------------------------------------- A0, A2 and A3

def sum_on(collective, rank):
    """What rank has of the sum of three ranks' tensors, of which rank r has r + 1 five times."""
    tensors = [torch.full((5,), float(r + 1)) for r in range(3)]
    xs, *_ = simulate.play(getattr(chapter("00"), collective), tensors)
    return xs[rank][0].item()


def scattered(rank, place):
    """The example of reduce_scatter: rank r has (r + 1)·(1, 2), to the powers 1, 2 and 3."""
    tensors = [torch.cat([(torch.tensor([1.0, 2.0]) * (r + 1)) ** power for power in (1, 2, 3)])
               for r in range(3)]
    xs, *_ = simulate.play(chapter("00").reduce_scatter, tensors)
    return xs[rank].tensor_split(3)[rank][place].item()


def part_on(collective, rank, part):
    """Of three ranks' tensors in three parts, of which rank r has r + 1 in each, and rank 0 of a
    scatter 1, 2 and 3: what rank has in a part afterwards."""
    tensors = [torch.full((15,), float(r + 1)) for r in range(3)]
    if collective == "scatter":
        tensors[0] = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(5)
    xs, *_ = simulate.play(getattr(chapter("00"), collective), tensors)
    return xs[rank].tensor_split(3)[part][0].item()


def sent_in_a_ring(n, numbers):
    """Of each rank: what goes in all rounds of an all_reduce."""
    return sum(chapter("00").round_bytes("all_reduce_ring", n, numbers))


A0 = [
    Row("A0", "reduce on rank 0: 1 + 2 + 3", 6, partial(sum_on, "reduce", 0),
        by="00_collectives.reduce"),
    *[Row("A0", f"{collective} on rank 2", 6, partial(sum_on, collective, 2),
          by=f"00_collectives.{collective}")
      for collective in ("all_reduce_ring", "all_reduce_tree")],
    Row("A0", "broadcast from rank 0, on rank 2", 1, partial(sum_on, "broadcast", 2),
        by="00_collectives.broadcast"),
    *[Row("A0", f"{collective}: rank 2's part, on rank {rank}", 3,
          partial(part_on, collective, rank, 2), by=f"00_collectives.{collective}")
      for collective, rank in (("gather", 0), ("all_gather", 0), ("all_gather", 1),
                               ("scatter", 2))],
    *[Row("A0", f"reduce_scatter, rank {rank}, number {place}", told,
          partial(scattered, rank, place), by="00_collectives.reduce_scatter")
      for rank, numbers in enumerate(((6, 12), (14, 56), (36, 288)))
      for place, told in enumerate(numbers)],
    Row("A0", "ring: 2·(N-1)·K/N numbers of each GPU, N = K = 5", 8, partial(sent_in_a_ring, 5, 5),
        by="00_collectives.round_bytes"),
    Row("A0", "ring: about 2·K, of many GPUs", 2, partial(sent_in_a_ring, 1000, 1), "K", 0.01,
        by="00_collectives.round_bytes"),
]


def flops_of(part):
    """FLOPs of a weight and token, of forward: what its recomputation adds; and of backward: the
    rest of a step."""
    model = ten().gpt(1, H, 32, seq=1, vocab=0)
    whole, again = (ten().step_flops(model, 1, "causal", how) for how in ("none", "full"))
    flops = {"forward": again - whole, "backward": 2 * whole - again}
    return flops[part] / model.weights_of_layers(1)


A2 = [
    Row("A2", "a block's weights, GPT: 12·h²", 12,
        lambda: ten().gpt(1, H, 32).weights(1) / H**2, "h²", by="10_planner.Model.weights"),
    Row("A2", "with a GLU of ffn = 4·h: 16·h²", 16,
        partial(contradictions.weights_of_layer, ffn=4 * H), "h²", by="10_planner.Model.weights"),
    Row("A2", "with a GLU, of Llama 2 7B", 16, contradictions.weights_of_layer, "h²", 0.5,
        "10_planner.Model.weights", why=SEE),
    Row("A2", "optimizer states of a weight: 6 numbers of 2 bytes", 12,
        lambda: chapter("03").held(1, 1, 1, "bf16")[2], "B", by="03_zero.held"),
    *[Row("A2", f"FLOPs of {part}, of a weight and token", told, partial(flops_of, part), "FLOP",
          0.01, "10_planner.step_flops") for part, told in (("forward", 2), ("backward", 4))],
    Row("A2", "6·s·N + 12·L·h·s², L 32, h = s = 4,096",
        6 * SEQ * 12 * LAYERS * H**2 + 12 * LAYERS * H * SEQ**2,
        lambda: ten().step_flops(ten().gpt(LAYERS, H, 32, seq=SEQ, vocab=0), 1), "FLOP",
        by="10_planner.step_flops"),
    Row("A2", "tokens at which attention takes as much as weights, h 4,096: s² << h", 64,
        contradictions.attention_as_weights, "tokens", by="10_planner.step_flops", why=SEE),
]


def over_computing(axis):
    """On 8 H100s over NVLink, h 8,192, 8,192 tokens, 10 layers in the next stage."""
    return rooflines.sending_over_computing(8192, 8, 8192, 10, FLOPS, BANDWIDTH)[axis]


def message_of_stage():
    """What a stage between two others sends for a micro-batch of one sequence, 2 bytes a number."""
    x = 2 * GLU.seq * GLU.dim
    return chapter("07").traffic("1f1b", 1, 4, 1, 1, x, 0, 4)["send"][2]


A3 = [
    Row("A3", "dp: seconds of a bucket of 25 MB on 8 H100s over NVLink",
        25e6 * 2 * 7 / (8 * 450e9), lambda: chapter("02").wire_bytes(25e6, 8) / BANDWIDTH, "s",
        1e-12, "02_data_parallel.wire_bytes"),
    Row("A3", "dp: sending over computing, for num_params = 1e9 and 4,096 tokens", 2.35e8,
        partial(contradictions.sum_over_backward, 4e9), "", 5e5,
        "02_data_parallel.communication_over_backward", why=SEE),
    *[Row("A3", f"{axis}: sending over computing, h = 8,192 and as many tokens", told,
          partial(over_computing, axis), "", told / 1e6, "rooflines.sending_over_computing",
          why=SEE)
      for axis, told in (("zero-3", 7 / 8 / (2 * 8192) * FLOPS / BANDWIDTH),
                         ("tp", 7 / (2 * 8192) * FLOPS / BANDWIDTH),
                         ("pp", FLOPS / BANDWIDTH / (32 * 8192 * 10)))],
    Row("A3", "zero-3: bytes of a block with 16·h², 3·16·h²/DP", 3 * 16 * 8192**2 / 8,
        partial(contradictions.sent_of_a_block, "03", 2), "B", by="03_zero.traffic", why=SEE),
    Row("A3", "tp: bytes of a block, 8·s·b·h/TP", 8 * 4096 * 8192 / 8,
        lambda: contradictions.sent_of_a_block("05", 2, "all_gather", "reduce_scatter"), "B",
        by="05_sequence_parallel.traffic", why=SEE),
    Row("A3", "pp: bytes of a micro-batch: 4·s·b·h, half of it received, a byte a number",
        4 * 4096 * 8192, message_of_stage, "B", by="07_pipeline_parallel.traffic"),
]

ROWS = (*FIRST_STEPS, *playbook_plots.MEMORY, *RECOMPUTATION, *DATA, *playbook_plots.DP,
        *playbook_plots.MODELS, *ZERO, *playbook_plots.ZERO, *TENSOR, *playbook_plots.TP,
        *playbook_plots.WHOLE_NORMS, *SEQUENCE, *playbook_plots.TP_MEMORY, *playbook_plots.TP_SP,
        *CONTEXT, *playbook_plots.CP_MEMORY, *playbook_plots.BANDWIDTH, *playbook_plots.PP_MEMORY,
        *PIPELINE, *playbook_plots.STAGES, *FIVE, *playbook_plots.RUNS, *GPU, *A0, *A2, *A3)
LEFT_OUT = (
    "plots whose points cannot be read off: memory of each strategy at once (ours is in "
    "figures/10_planner.png), a profile over time, losses in FP8",
    "times on its H100s (kernels by torch.compile, in Triton, with tiles; a barrier): ours are in "
    "benchmarks/RESULTS.md",
    "widgets and tables of words alone",
)
