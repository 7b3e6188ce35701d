"""What expressions in contradictions.toml and differences.toml call: ours, and a text's assumption.

They put functions of the chapters and of the planner together. None has a formula of its own, but
for those of the texts.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace

import torch

import common
from lab import formats, schedules  # noqa: F401 (expressions read them)
from lab.chapters import chapter, kernel
from lab.planner import megatron, playbook, rooflines, tables
from lab.run.machines import LATENCY, MACHINES

GPT_3 = common.Config(96, 12288, 96, 96, 2048, 50257)
GLU = common.Config(2, 8192, 64, 64, 4096, 1024, gated=True, ffn=4 * 8192)     # 16·h² a block
SEVEN_B = common.PRESETS["7b"]
LLAMA_7B = common.Config(32, 4096, 32, 32, 4096, 32000, gated=True, ffn=11008)
NVLINK, INFINIBAND = MACHINES["H100, NVLink 4"], MACHINES["H100, InfiniBand NDR"]  # FLOP/s, bytes/s
D, F, B = 8192, 30_000, 2_000_000       # LLaMA-3 70B as the scaling book has it, and its batch
AXES = 2, 1                             # of the torus: for FSDP, and for tensor parallelism


def ten():
    return chapter("10")


def tpu():
    return ten().CLUSTERS["tpu-v5p"]


# ----------------------------------------------------------------------------- FLOPs and parameters


def recomputed(how):
    """FLOPs that recomputation adds to a step of GPT-3 over one sequence, over those without."""
    flops = functools.partial(chapter("01").step_flops, GPT_3, 1, "plain")
    return flops(how) / flops("none") - 1


def flops_of_batch(micro_batches, sequences):
    """FLOPs of micro-batches of so many sequences, over those of one sequence."""
    flops = [chapter("01").step_flops(LLAMA_7B, n, "plain", "none") for n in (sequences, 1)]
    return micro_batches * flops[0] / flops[1]


def attention_as_weights(dim=4096, seq=4096):
    """The sequence at which attention's scores take as many FLOPs as the weights of blocks."""
    model = ten().gpt(1, dim, 32, seq=seq, vocab=0)
    weights = 6 * model.weights_of_layers(1) * seq
    return seq * weights / (ten().step_flops(model, 1) - weights)


def weights_of_layer(ffn):
    """Weights of a layer of Llama 2 7B with this ffn, over dim²."""
    model = replace(ten().MODELS["7b"], ffn=ffn)
    return model.weights(1) / model.dim**2


def off_by_function(f):
    """The largest difference between f of a product, and the sum of f of its 4 parts by rows."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.rand(shape, generator=generator, dtype=torch.float64)
            for shape in ((8, 16), (16, 12)))
    parts = [x @ w for x, w in zip(a.chunk(4, dim=1), b.chunk(4, dim=0))]
    return (f(a @ b) - sum(map(f, parts))).abs().max().item()


# --------------------------------------------------------------------------------------- the memory

def kept_of_gpt_3(recompute, seq=2048):
    """Bytes of a block's activations for each number of a (batch, seq, dim)."""
    model = replace(ten().MODELS["gpt3"], seq=seq)
    software = ten().Software(flash=False, dropout=True)
    kept = ten().kept_by_layer(model, ten().Layout(recompute=recompute), software)
    return kept / (model.seq * model.dim)


def scores_over_rest(seq):
    """Bytes that a block of GPT-3 keeps for attention's scores, over all else that it keeps."""
    return kept_of_gpt_3("none", seq) / kept_of_gpt_3("selective", seq) - 1


def saved_by_sequence(model, software, recompute="none", t=8):
    """Share of one GPU's activations of a layer that sequence parallelism saves on t ranks."""
    def kept(**layout):
        layout = ten().Layout(recompute=recompute, **layout)
        return ten().kept_by_layer(ten().MODELS[model], layout, ten().SOFTWARE[software])

    return (kept(tp=t, sp=False) - kept(tp=t)) / kept()


def weights_on_tp(ranks):
    """GiB of the 70B's weights on a rank."""
    layout = ten().Layout(tp=ranks)
    held = ten().parameters_of_gpu(ten().MODELS["70b"], layout, ten().Software())
    return 2 / 2**30 * sum(size for size, _ in held.values())


def largest_on_a_tpu():
    """Parameters that fit on a TPU v5p, by the planner's bytes of each."""
    model = ten().gpt(1, 1024, 8)
    states = ten().memory(model, ten().Layout(sp=False), ten().Software(), 1)
    of_all = sum(states[cause] for cause in ("weights", "gradients", "optimizer"))
    return tpu().memory / of_all * model.parameters()


# ------------------------------------------------------------------------------------- the messages


def sent_of_a_block(number, which, *ops, cfg=GLU, **more):
    """Calls (0), payload (1) or bytes on the wire (2) that a block adds to a step of chapter 03, 04
    or 05 with one sequence on 8 ranks, summed over these operators, or over all of them."""
    def sent(layers):
        settings = (3, 8, 1, (2, 2)) if number == "03" else (1, 1, 8, 2)
        return chapter(number).traffic(replace(cfg, layers=layers), *settings, **more)

    larger, smaller = sent(2), sent(1)
    return sum(larger[op][which] - smaller[op][which] for op in ops or larger)


def sent_by_zero_2(micro_batches):
    """Bytes over those of a model of 16 bits, on 8 ranks; without (N-1)/N and the norm."""
    sent = chapter("03").traffic(GPT_3, 2, 8, micro_batches, (2, 2))
    return (sent["reduce_scatter"][1] + sent["all_gather"][1]) / (2 * GPT_3.parameters())


def gathers_more():
    """all_gathers in a step of ZeRO-3 over those of ZeRO-2, for 34 units of 32 layers."""
    three, two = (chapter("03").traffic(LLAMA_7B, stage, 8, 1, (2, 2))["all_gather"][0]
                  for stage in (3, 2))
    return three - two


def head_gathered_again():
    """Bytes of ZeRO-3's all_gathers if the head is gathered in backward as well, over chapter
    03's, which keep it: 4 layers on 8 ranks."""
    three, cfg = chapter("03"), common.Config(4, 64, 4, 4, 16, 256)
    gathered = three.traffic(cfg, 3, 8, 1)["all_gather"][1]
    return 1 + 4 * three.padded_sizes(cfg, 8)[-1] / gathered


def less_between_nodes(gradient_bytes, ranks=384):
    """How many times less ZeRO++ sends between nodes than ZeRO-3: forward gathers weights in 8
    bits, backward gathers them inside a node. (Few of 384 ranks are in a rank's own node.)"""
    three, size = chapter("03"), LLAMA_7B.parameters()
    zero_3 = sum(wire for *_, wire in three.traffic(LLAMA_7B, 3, ranks, 1, (2, 2)).values())
    gathered = three.zeropp_traffic(LLAMA_7B, ranks, 1, (2, 2), 1, True)["all_gather"][2]
    return zero_3 / (gathered + size * gradient_bytes * (ranks - 1) / ranks)


def message_between_stages():
    """Bytes that the first of two stages sends for 2,048 tokens of dim 4,096, in 16 bits."""
    cfg = SimpleNamespace(experts=0, seq=2048, dim=4096, heads=1, kv_heads=1)
    args = SimpleNamespace(model=cfg, micro_batch=1, cp=1, tp=1, pp=2, ep=1, recompute="none")
    [(_, size)] = chapter("09").traffic(args, 2, 1, 0, 1, 2)["pp"].values()
    return size


def all_reduce_seconds(name, n, size, machine="H100, NVLink 4"):
    """Of an all_reduce of so many bytes on n ranks, by chapter 00's model."""
    return chapter("00").seconds(name, n, size, LATENCY[machine], MACHINES[machine][1])


def share_of_bytes(n, size, machine):
    """The share of a ring all_reduce's time that its bytes take; latencies take the rest."""
    sent = sum(chapter("00").round_bytes("all_reduce_ring", n, size))
    return sent / MACHINES[machine][1] / all_reduce_seconds("all_reduce_ring", n, size, machine)


# ------------------------------------------------------------------------------------- the pipeline


def bubble_in_time(name, p, m, v=1):
    """The bubble over the work, counted: a schedule's actions start as soon as they can."""
    return schedules.simulated_bubble(chapter("07").make_schedule(name, p, m, v), name)


def idle_in_time(name, p, m, v=1):
    """The share of a step in which a rank waits, counted in the same way."""
    wait = bubble_in_time(name, p, m, v)
    return wait / (1 + wait)


def alive(name, p, m, v=1):
    """The most micro-batches that any rank keeps of its v slices."""
    return max(chapter("07").most_alive(name, rank, p, m, v) for rank in range(p))


def share_of_parameters(variant, p):
    """The share of all stages that a rank holds."""
    schedule = chapter("07").make_schedule(variant, p, 2 * p)
    return schedule.ranks.count(0) / schedule.depth


# --------------------------------------------------------------------------------- the scaling book

def per_chip(axes=1):
    """Tokens of a chip from which on data parallelism computes longer, over so many axes."""
    return rooflines.tokens_of_data_parallel(tpu().peak, axes * tpu().nvlink)


def least(ffn):
    """Tokens of a chip from which on FSDP and tensor parallelism, at their best, compute longer."""
    return rooflines.tokens_of_both(ffn, tpu().peak, tpu().nvlink, AXES)


def activations_of_both(of_pass, dp=512, tp=8):
    """Bytes of FSDP with tensor parallelism in forward (0) or backward (1), less FSDP's, over
    B·D/X."""
    both, weights = (rooflines.bytes_sent(strategy, rooflines.mlp(D, F), B, dp, tp)[of_pass]
                     for strategy in ("both", "zero-3"))
    return (both - weights) / (B * D / dp)


def backward_of_tp():
    """Bytes of chapter 05's gathers and scatters in an MLP's backward, over B·D: half of what it
    sends for a block in a step, less what forward sends."""
    cfg = common.Config(2, 64, 4, 4, seq=32, vocab=64)
    sent = chapter("05").traffic(cfg, 1, 1, 4, 2)
    payload = sum(sent[op][1] for op in ("all_gather", "reduce_scatter"))
    forward, _ = rooflines.bytes_sent("tp", rooflines.mlp(D, F), B)
    return payload / (2 * cfg.layers) / (cfg.seq * cfg.dim) - forward / (B * D)


def compute_over_messages(ffn, tokens, chips):
    """Of the best split in numbers that divide."""
    links = [axes * tpu().nvlink for axes in AXES]
    seconds = functools.partial(rooflines.seconds, rooflines.mlp(D, ffn), tokens, peak=tpu().peak,
                                links=links)
    best = seconds(*rooflines.fastest_split(seconds, chips))
    return best["compute"] / rooflines.messages(best)


# ---------------------------------------------------------------------- Megatron's paper, and Llama

@functools.cache
def figure(number):
    return megatron.figure(ten(), number)


def gain(number, upper, lower, at, lower_at=None):
    """By what share one curve of a figure is above another, or above another point of its own."""
    return figure(number)[upper][at] / figure(number)[lower][lower_at or at] - 1


def over_zero_3(row, which):
    """By what share PTD-P is faster than ZeRO-3 in a row of table 2: as `published` or as
    `predicted`."""
    ptd, zero_3 = (tables.runs(ten(), f"table 2, {name}")[row] for name in ("PTD", "ZeRO-3"))
    return getattr(ptd, which) / getattr(zero_3, which) - 1


def zero_3_fits(gpus, micro_batch):
    """Whether the 530 G of table 2 fit: 1, or 0."""
    *_, run = tables.runs(ten(), "table 2, ZeRO-3", gpus=gpus, micro_batch=micro_batch,
                          batch=gpus * micro_batch)
    return int(run.fits)


def fits_without_recomputing(batch):
    """Whether figure 17's model fits with a batch: 1, or 0."""
    run, *_ = tables.runs(ten(), "figure 17", recompute="none", batch=batch)
    return int(run.fits)


def days_of_llama(tokens=15.6e12):
    """Days that Llama 3 405B takes on 16,384 GPUs, as fast as chapter 10 plans it with 8K."""
    run = tables.runs(ten(), "Llama 3")[1]
    flops = ten().step_flops(run.model, 1, "causal") / run.model.seq * tokens
    return flops / (run.gpus * run.predicted * 1e12) / 86400


# ------------------------------------------------------------------------------------- the playbook

def speed_over(axis, degree):
    """Tokens/s of a GPU as planned."""
    return playbook.runs_over(ten(), axis)[degree].predicted


def speed_lost(axis, low, high):
    """The share of the 3B's speed that a larger tp loses."""
    return playbook.share_lost(speed_over(axis, low), speed_over(axis, high))


def speed_lost_over_stages(few, many):
    """The share of the 8B's speed that more stages lose, with m = p - 1."""
    before, after = (playbook.speed_over_stages(ten(), p, p - 1) for p in (few, many))
    return playbook.share_lost(before, after)


def largest_that_fits(axis, degree):
    return playbook.largest_that_fits(playbook.runs_over(ten(), axis)[degree])


def ring_bandwidth(nodes):
    return playbook.ring_bandwidth(ten(), nodes)


def segments_of_naive(row=4 * 4096):
    """Memory segments that a warp loads in a step over k: threads down a column of C, over threads
    along a row, in fp32."""
    segments = kernel("matmul").segments
    down = segments(0, row) + segments(0, 0)            # of A, and of B
    return down / (segments(0, 0) + segments(0, 4))
