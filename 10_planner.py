r"""10 · The planner: which layout, how much memory, how fast, before anything runs.

Chapters 02 to 09 each share out one thing, and say in formulas what that saves and what it sends.
Here the formulas stand in one place, for any model and any machine. The planner needs no GPU and
imports no torch: it counts bytes and FLOPs, and divides them by the rates of the machine.

    1. What fits?   A GPU holds model states (a parameter has 2 bytes of weights, 4 of gradients, 12
                    of AdamW: ZeRO-1 shards the last, ZeRO-2 the last two, ZeRO-3 all), and the
                    activations of all micro-batches that are on their way.
    2. The batch.   dp · pp · cp · tp is the number of GPUs. A step's batch is dp · b · m: m
                    micro-batches of b sequences, one after the other.
    3. How fast?    Of all layouts that fit, the one that takes the fewest seconds a step.

Where the seconds of a micro-batch of b sequences of s tokens go, on a stage of L/pp layers:

    matmul        2·m·k·n FLOPs, and 2·(mk + kn + mn) bytes through HBM, one after the other: the
                  thinner tp cuts the matrices, the more bytes there are for a FLOP.
    attention     4·b·s²·h FLOPs forward. Unfused, each of its a·b·s² scores goes through HBM in 9
                  bytes forward (softmax 4, dropout 5) and in 11 backward. A flash kernel has them
                  in SRAM, and leaves out the half that the causal mask forbids.
    elementwise   norms and residuals of the whole width, GELU or SwiGLU of its tp-th part: bytes.
    weights       the gradient of a micro-batch is written, and added to the sum: 8 bytes a weight,
                  unless the matmul itself adds to the sum (fused).
    tp, cp        4 all_reduces of b·s·h a layer; keys and values. Compute waits for what the
                  software does not hide.
    pp            a message of b·s·h/tp to the next stage, and one back.
    bubble        (p-1)/v times a stage's time for a micro-batch: until the first has arrived, and
                  until the last has returned (v: slices of the model on each stage; chapter 07).
    dp            gradients once a step, or what of that does not hide behind the last backward.
                  With ZeRO-3 the weights twice, and the gradients, in *every* micro-batch.
    optimizer     60 bytes a weight: gradients to fp32, unscaled, checked, their norm, clipped (32);
                  weight and moments in and out (28).

FLOP/s mean nothing without their convention. All count 6 FLOPs a weight and token. Megatron adds
all scores of attention (12·s·h a token and layer), Llama 3 their causal half, and the paper of 2021
also counts what is computed twice under recomputation (8, not 6): FLOPs of the hardware (HFU), not
of the model (MFU).

How right is it? Two numbers are fitted, on ten rows of a table of 2021: the shares of their makers'
bandwidth that an A100's HBM and NVLink reach. Two more, on six rows, are about ZeRO-3. What they
say of other tables, `--published` prints. No table has experts in it: do not trust the time of ep.

Run it:
    python 10_planner.py --model 70b --cluster h100 --gpus 512 --batch 1024
    python 10_planner.py --model 405b --gpus 8192 --batch 2048 --tp 8 --pp 16 --zero 1 --explain
    python 10_planner.py --published                (or --problems: the scaling book's)

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021);
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022); Qi et al.,
Zero Bubble Pipeline Parallelism (2023); Dao, FlashAttention-2 (2023); Llama Team, The Llama 3 Herd
of Models (2024); Ultra-Scale Playbook, "Finding the Best Training Configuration" and A3; How To
Scale Your Model, 5.
"""

import argparse
import itertools
import json
import math
import signal
import sys
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace

# ------------------------------------------------------------------------------ models and machines

@dataclass(frozen=True)
class Model:
    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int                    # hidden width of an MLP
    gated: bool = False         # SwiGLU, of three matrices; else GELU, of two
    vocab: int = 51200
    seq: int = 2048
    tie: bool = True            # embedding and head are one matrix
    experts: int = 1            # of each layer
    top_k: int = 1              # experts of a token

    @property
    def kv_dim(self):
        return self.dim * self.kv_heads // self.heads

    def weights(self, experts):
        """The weights of a layer's matrices, of which so many experts count."""
        attention = 2 * self.dim * (self.dim + self.kv_dim)
        return attention + experts * (3 if self.gated else 2) * self.dim * self.ffn

    def parameters(self, active=False):
        """All, or those that a token meets."""
        table = self.vocab * self.dim
        experts = self.top_k if active else self.experts
        return self.layers * self.weights(experts) + (1 if self.tie else 2) * table


def gpt(layers, dim, heads, **more):
    return Model(layers, dim, heads, heads, 4 * dim, **more)


def llama(layers, dim, heads, kv_heads, ffn, **more):
    return Model(layers, dim, heads, kv_heads, ffn, True, 128256, 8192, False, **more)


MODELS = {
    "1b": llama(16, 2048, 32, 8, 8192), "7b": llama(32, 4096, 32, 32, 11008),
    "8b": llama(32, 4096, 32, 8, 14336), "70b": llama(80, 8192, 64, 8, 28672),
    "405b": llama(126, 16384, 128, 8, 53248), "gpt3": gpt(96, 12288, 96),
    "22b": gpt(48, 6144, 64), "175b": gpt(96, 12288, 96), "530b": gpt(105, 20480, 128),
    "1t": gpt(128, 25600, 160), "mixtral": llama(32, 4096, 32, 8, 14336, experts=8, top_k=2),
    # Without its latent attention, its shared expert and its three dense layers.
    "deepseek-v3": llama(61, 7168, 128, 128, 2048, experts=256, top_k=9),
}


@dataclass(frozen=True)
class Cluster:
    peak: float                 # dense bf16 FLOP/s of a GPU
    matmul: float               # the share of it that a large matmul reaches
    flash: float                # the share that a flash attention kernel reaches
    hbm: float                  # bytes/s
    memory: float               # bytes
    nvlink: float               # bytes/s of a GPU to others of its node, in each direction
    nic: float                  # bytes/s of its network card
    per_node: int = 8


# Rates: data sheets. matmul: the best measured (stas00/ml-engineering, "MAMF"), on Hopper by 0.75,
# which mixes power and software. flash: FlashAttention-2; on Hopper -3, or cuDNN. B200: as Hopper.
CLUSTERS = {
    "a100": Cluster(312e12, 0.869, 0.60, 2.039e12, 80e9, 300e9, 25e9),
    "h100": Cluster(989e12, 0.803 * 0.75, 0.55, 3.35e12, 80e9, 450e9, 50e9),
    "h200": Cluster(989e12, 0.803 * 0.75, 0.55, 4.8e12, 141e9, 450e9, 50e9),
    "b200": Cluster(2250e12, 0.803 * 0.75, 0.55, 8e12, 180e9, 900e9, 50e9),
    "tpu-v5p": Cluster(459e12, 0.803, 0.55, 2.765e12, 95e9, 180e9, 6.25e9, per_node=8960),
}
HBM, NVLINK = 0.686, 0.574      # shares of those rates: fitted on table 1 (lab/published.py)
NIC = 0.76                      # fitted on table 2's ZeRO-3 rows, as is the 0.5 below


@dataclass(frozen=True)
class Software:
    flash: bool = True          # attention is one kernel
    dropout: bool = False
    fused_gradients: bool = True        # a matmul adds its weight gradient to the sum
    tp_hidden: tuple = (0, 0)   # the share of tp's messages behind compute: forward, backward
    dp_hidden: float = 0.9      # the share of a backward that dp's messages can hide behind
    gradient_bytes: int = 4     # of what dp sends
    one_card: bool = False      # a ring uses one network card of a node


SOFTWARE = {
    "megatron-2021": Software(False, True, False, (0, 0), 0, 2),
    # Gathers hide behind forward and behind its repetition: half of the computing.
    "deepspeed-2021": Software(False, True, False, (0, 0), 0.5, 2, one_card=True),
    # Backward's messages of column-parallel layers run beside the weight gradient's matmul.
    "megatron-2022": Software(False, True, True, (0, 1), 0, 2),
    "megatron-2024": Software(tp_hidden=(0.9, 0.9)),
    "torchtitan": Software(fused_gradients=False),
    "llama3": Software(tp_hidden=(0, 0.5)),
    "ours": Software(flash=False, fused_gradients=False, dp_hidden=0),
}


@dataclass(frozen=True)
class Layout:
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    v: int = 1                  # slices of the model on each stage
    ep: int = 1                 # of the dp ranks, those that share the experts
    zero: int = 0
    sp: bool = True             # sequence parallelism, where tp > 1
    micro_batch: int = 1
    recompute: str = "none"     # selective: attention's core, where it is unfused; full: layers
    schedule: str = "1f1b"      # which v > 1 interleaves; or zero-bubble, dualpipe-v

    @property
    def sharers(self):
        return self.dp * self.cp                        # who hold the same, but for experts

    def tokens(self, model):
        return self.micro_batch * model.seq / self.cp   # of a micro-batch, on a rank


# --------------------------------------------------------------------------------------- the memory

def kept_by_layer(model, layout, software):
    """Bytes of a layer's activations for a micro-batch, in 16 bits. Of a GPT with dropout, unfused,
    s·b·h·(10 + 24/t + 5·a·s/(h·t)); sequence parallelism divides the 10 by t as well."""
    tokens, t, outside = layout.tokens(model), layout.tp, 1 / layout.tp if layout.sp else 1
    x, kv, hidden = tokens * model.dim, tokens * model.kv_dim, tokens * model.ffn * model.top_k
    if layout.recompute == "full":
        return 2 * x * outside

    whole = 2 * 2 * x + 2 * 2 * x                       # norms; their outputs, inputs of matrices
    whole += 2 * x if software.dropout else 0           # two masks, a byte each
    heads = 2 * (x + 2 * kv) + 2 * x                    # q, k and v; the input of o
    mlp = 2 * hidden * (3 if model.gated else 2)        # in and out of a fused SwiGLU, or of GELU
    scores = 4 * tokens * model.heads                   # log-sum-exp of each row
    if not software.flash:
        scores = tokens * model.heads * model.seq * (5 if software.dropout else 2)
        scores *= layout.recompute == "none"
    return whole * outside + (heads + mlp + scores) / t


def micro_batches_alive(layout, m):
    """How many micro-batches the first stage keeps at once, counted as whole ones (chapter 07)."""
    p, v = layout.pp, layout.v
    alive = {"1f1b": (2 * (p - 1) + (v - 1) * p + 1) / v if v > 1 else p, "zero-bubble": p,
             "dualpipe-v": p + 0.5}
    return min(m, alive[layout.schedule])


def parameters_of_gpu(model, layout):
    """(of experts, others) on the fullest GPU: the first or the last stage has a table."""
    layers = math.ceil(model.layers / layout.pp)
    experts = model.weights(model.experts) - model.weights(0) if model.experts > 1 else 0
    others = model.weights(model.experts) - experts
    tables = 1 if layout.pp > 1 or model.tie else 2
    return (layers * experts / (layout.tp * layout.ep),
            (layers * others + tables * model.vocab * model.dim) / layout.tp)


def memory(model, layout, software, m):
    """{cause: bytes} on the fullest GPU. m: micro-batches of a step."""
    experts, others = parameters_of_gpu(model, layout)
    sharded = experts / (layout.sharers / layout.ep) + others / layout.sharers
    widths = {"weights": (2, 3), "gradients": (4, 2), "optimizer": (12, 1)}
    states = {cause: width * (sharded if layout.zero >= stage else experts + others)
              for cause, (width, stage) in widths.items()}
    if layout.zero == 3:                                # two layers are whole at a time
        states["weights"] += 2 * 2 * model.weights(model.experts / layout.ep) / layout.tp

    layers = math.ceil(model.layers / layout.pp)
    kept = kept_by_layer(model, layout, software) * layers * micro_batches_alive(layout, m)
    if layout.recompute == "full":                      # and one layer, computed again
        kept += kept_by_layer(model, replace(layout, recompute="none"), software)
    logits = 8 * layout.tokens(model) * model.vocab / layout.tp     # in float32; their gradient
    return states | {"activations": kept + logits}


# ----------------------------------------------------------------------------------------- the time

class Machine:
    """How long a GPU of a cluster takes, in seconds."""

    def __init__(self, cluster, software):
        self.cluster, self.software = cluster, software
        self.flops, self.bandwidth = cluster.peak * cluster.matmul, cluster.hbm * HBM

    def matmul(self, m, k, n, times=1):
        """(m, k) @ (k, n): arithmetic, and what goes through HBM."""
        moved = 2 * (m * k + k * n + m * n)
        return times * (2 * m * k * n / self.flops + moved / self.bandwidth)

    def links(self, n, stride):
        """bytes/s of a ring over n ranks that lie `stride` apart. It leaves a node through the
        network cards of all its members there."""
        cluster, within = self.cluster, self.cluster.nvlink * NVLINK
        if n * stride <= cluster.per_node:
            return within
        members = 1 if self.software.one_card else max(1, min(n, cluster.per_node // stride))
        return min(within, members * cluster.nic * NIC)

    def ring(self, size, n, stride):
        """An all_gather or a reduce_scatter of `size` bytes; an all_reduce is both."""
        return (n - 1) / n * size / self.links(n, stride) if n > 1 else 0


def add(*parts):
    """{cause: seconds}, added up."""
    total = Counter()
    for part in parts:
        total.update(part)
    return total


def layer_seconds(model, layout, machine):
    """{cause: seconds} of a layer for a micro-batch: forward, backward."""
    software, t, tokens = machine.software, layout.tp, layout.tokens(model)
    h, kv, f, x = model.dim, model.kv_dim, model.ffn, tokens * model.dim
    routed = tokens * model.top_k                       # rows that go through experts
    matrices = [(tokens, h, (h + 2 * kv) / t), (tokens, h / t, h),
                (routed, h, f * (2 if model.gated else 1) / t), (routed, f / t, h)]
    forward = {"matmul": sum(machine.matmul(*shape) for shape in matrices)}
    backward = {"matmul": sum(machine.matmul(m, n, k) + machine.matmul(k, m, n)
                              for m, k, n in matrices)}

    # Two products forward. Backward four, and in a flash kernel the scores once more.
    heads, rows, d = layout.micro_batch * model.heads / t, model.seq / layout.cp, h / model.heads
    products = (machine.matmul(rows, d, model.seq, heads)
                + machine.matmul(rows, model.seq, d, heads))
    score = heads * rows * model.seq / machine.bandwidth        # a byte of each
    dropout = 5 if software.dropout else 0
    forward["attention"] = products + (4 + dropout) * score
    backward["attention"] = 2 * products + (6 + dropout) * score
    if software.flash:                                  # half of a product's FLOPs
        product = heads * rows * model.seq * d / (machine.cluster.peak * machine.cluster.flash)
        forward["attention"], backward["attention"] = 2 * product, 5 * product

    # Bytes of a number. Of the width: a norm 4 and 6, a residual 6 and 6, with dropout 7 and 11.
    width, hidden = x / t if layout.sp else x, routed * f / t
    rope = 4 * (x + tokens * kv) / t if model.gated else 0
    passes = [(10, 6 if model.gated else 4), (12, 10 if model.gated else 6)]
    if software.dropout:
        passes = [(11, passes[0][1]), (17, passes[1][1])]
    for part, (of_width, of_hidden) in zip((forward, backward), passes):
        moved = 2 * of_width * width + of_hidden * hidden + rope
        part["elementwise"] = moved / machine.bandwidth
    if not software.fused_gradients:
        weights = model.weights(model.experts / layout.ep) / t
        backward["weights"] = 8 * weights / machine.bandwidth

    all_reduce = 2 * machine.ring(2 * x, t, 1)
    shown = [1 - share for share in software.tp_hidden]
    if layout.sp and software.tp_hidden == (0, 1):      # its all_gathers cannot hide
        shown[1] = 0.5
    forward["tp"], backward["tp"] = (2 * all_reduce * share for share in shown)
    gather = machine.ring(2 * 2 * tokens * layout.cp * kv / t, layout.cp, t)    # of k and v
    forward["cp"], backward["cp"] = gather, gather
    if layout.ep > 1:
        exchange = machine.ring(2 * routed * h, layout.ep, t * layout.cp)
        forward["ep"], backward["ep"] = 2 * exchange, 2 * exchange
    return forward, backward


def bubble(layout, F, B, W):
    """The longest wait of a stage whose micro-batch takes so long: forward, and backward for inputs
    and for weights (chapter 07)."""
    p, v = layout.pp, layout.v
    return {"1f1b": (p - 1) / v * (F + B + W), "zero-bubble": (p - 1) * (F + B - W),
            "dualpipe-v": (p - 1) / 2 * (F + 2 * B - W)}[layout.schedule]


def step_seconds(model, layout, cluster, software, batch):
    """{cause: seconds} of a step. batch: its sequences. The slowest stage sets the pace of all: the
    last one, which has the head."""
    machine, t, p = Machine(cluster, software), layout.tp, layout.pp
    m, layers = batch // (layout.dp * layout.micro_batch), math.ceil(model.layers / p)
    forward, backward = layer_seconds(model, layout, machine)
    tokens, columns = layout.tokens(model), model.vocab / t
    head = {"matmul": 3 * machine.matmul(tokens, model.dim, columns),
            "elementwise": 20 * tokens * columns / machine.bandwidth}   # loss, in float32
    if not software.fused_gradients:
        head["weights"] = 8 * model.dim * columns / machine.bandwidth
    again = {"none": {}, "full": forward,               # computed once more, in backward
             "selective": {} if software.flash else {"attention": forward["attention"]}}
    stage = add(*layers * [forward, backward, again[layout.recompute]], head)
    if p > 1:
        size = 2 * tokens * model.dim
        message = size / t / machine.links(p, t * layout.sharers)
        message += 0 if layout.sp else machine.ring(size, t, 1)     # scattered over tp, gathered
        stage["pp"] = 2 * layout.v * message

    experts, others = parameters_of_gpu(model, layout)
    sent = lambda width: machine.ring(width * others, layout.sharers, t) + machine.ring(
        width * experts, layout.sharers // layout.ep, t * layout.ep)
    if layout.zero == 3:                                # weights twice, gradients once
        hidden = software.dp_hidden * sum(stage.values())
        stage["dp"] = max(0, sent(2 * 2 + software.gradient_bytes) - hidden)
    seconds = add(*m * [stage])
    F, W = layers * sum(forward.values()), layers * backward["matmul"] / 2
    seconds["bubble"] = bubble(layout, F, sum(stage.values()) - F - W, W)
    if layout.zero < 3:
        hidden = software.dp_hidden * layers * sum(backward.values())
        seconds["dp"] = max(0, sent(2 * software.gradient_bytes) - hidden)
    updated = (experts + others) / (layout.sharers if layout.zero else 1)
    seconds["optimizer"] = 60 * updated / machine.bandwidth
    return seconds


def step_flops(model, batch, scores="all", recompute="none"):
    """FLOPs of a step by a convention. scores: "all" of attention, or the "causal" half."""
    tokens, h = batch * model.seq, model.dim
    per_token = 2 * (model.parameters(active=True) - (0 if model.tie else model.vocab * h))
    attention = 4 * model.seq * h * model.layers * (0.5 if scores == "causal" else 1)
    head = 2 * model.vocab * h
    passes = 4 if recompute == "full" else 3
    return tokens * (passes * (per_token - head + attention) + 3 * head)


# ------------------------------------------------------------------ the scaling book's rooflines

def tokens_of_data_parallel(flops, bandwidth):
    """Tokens of a chip below which dp or ZeRO-3 wait: 8·D·F bytes of a layer's messages take longer
    than the 8·D·F·tokens FLOPs of its backward."""
    return flops / bandwidth


def largest_tensor_parallel(ffn, flops, bandwidth):
    """The degree from which on tp waits: messages of 4·B·D bytes for 4·B·D·F/tp FLOPs."""
    return ffn * bandwidth / flops


def best_data_parallel(tokens, chips, ffn, axes=(2, 1)):
    """How many of the chips ZeRO-3 should have, and tp the others: both send equally long then.
    axes: of the torus, that each of the two has."""
    return math.sqrt(tokens / ffn * axes[0] / axes[1] * chips)


def tokens_of_both(ffn, flops, bandwidth):
    """Tokens of a chip below which ZeRO-3 and tp, at their best, wait together."""
    return (flops / bandwidth) ** 2 / (2 * ffn)


# --------------------------------------------------------------------------------------- the search

class Plan:
    """A layout, its seconds and its bytes by cause. They are None where it does not divide: why."""

    def __init__(self, model, layout, cluster, software, gpus, batch):
        self.layout, self.why, self.memory = layout, misfit(model, layout, gpus, batch), None
        if self.why:
            return
        m = batch // (layout.dp * layout.micro_batch)
        self.memory = memory(model, layout, software, m)
        self.bytes = sum(self.memory.values())
        if self.bytes > ROOM * cluster.memory:
            self.why = f"needs {self.bytes / 1e9:.0f} GB of a GPU ({largest(self.memory, 2)})"
        self.seconds = step_seconds(model, layout, cluster, software, batch)
        self.total = sum(self.seconds.values())


ROOM = 0.92                     # of the memory: the rest is CUDA's, NCCL's, and fragments
ERROR = 1.25                    # the bytes are known within such a factor


def misfit(model, layout, gpus, batch):
    """Why a layout does not divide; None: it does."""
    ranks, layers = layout.tp * layout.cp * layout.pp, math.ceil(model.layers / layout.pp)
    divides = [("gpus", gpus, "tp x cp x pp", ranks), ("heads", model.heads, "tp", layout.tp),
               ("ffn", model.ffn, "tp", layout.tp), ("seq", model.seq, "cp", layout.cp),
               ("batch", batch, "dp x micro-batch", layout.dp * layout.micro_batch),
               ("dim", model.dim, "heads", model.heads), ("dp", layout.dp, "ep", layout.ep),
               ("heads", model.heads, "kv-heads", model.kv_heads),
               ("experts", model.experts, "ep", layout.ep), ("a stage", layers, "v", layout.v)]
    for what, size, by, degree in divides:
        if size % degree:
            return f"{what} = {size} is not a multiple of {by} = {degree}"
    if layout.dp * ranks != gpus:
        return f"dp x tp x cp x pp = {layout.dp * ranks}, and gpus = {gpus}"
    if layout.pp > model.layers or layout.pp == 1 < layout.v:
        return f"layers = {model.layers} are not enough for pp = {layout.pp}, v = {layout.v}"
    if model.top_k > model.experts:
        return f"top-k = {model.top_k} is more than experts = {model.experts}"
    if layout.zero == 3 and layout.pp > 1:
        return "zero = 3 with pp would gather a stage for each micro-batch; zero = 1 would work"
    return None


def powers(limit):
    return [2**k for k in range(int(limit).bit_length())]


def search(model, cluster, software, gpus, batch, fixed, most=16):
    """Plans for all layouts, with the degrees of `fixed` as they are: those that fit, or else that
    may fit, fastest first; and the others. most: sequences of a micro-batch."""
    stages = [pp for pp in range(1, model.layers + 1) if gpus % pp == 0]
    again = ("none", "full") if software.flash else ("none", "selective", "full")
    degrees = {"tp": powers(min(8, cluster.per_node)), "cp": powers(max(1, model.seq // 4096)),
               "pp": stages, "v": range(1, 9), "ep": powers(model.experts), "zero": (0, 1, 3),
               "micro_batch": powers(most), "recompute": again}
    degrees |= {name: [value] for name, value in fixed.items()}
    fit, others = [], []
    for values in itertools.product(*degrees.values()):
        degree = dict(zip(degrees, values))
        degree = {"dp": gpus // (degree["tp"] * degree["cp"] * degree["pp"]),
                  "sp": degree["tp"] > 1} | degree
        if degree["dp"] and (degree["dp"] > 1 or not degree["zero"] or "zero" in fixed):
            found = Plan(model, Layout(**degree), cluster, software, gpus, batch)
            (others if found.why else fit).append(found)
    may = [found for found in others if found.memory and found.bytes < ERROR * cluster.memory]
    return sorted(fit or may, key=lambda found: (found.total, found.bytes)), others


# ----------------------------------------------------------------------------------------- in words

def in_words(layout):
    """The degrees that are not 1, and what else differs from a Layout()."""
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in asdict(layout).items()
                     if value != getattr(Layout(), name) and name != "sp") or "nothing is shared"


def largest(part, count=4):
    """The largest causes, as shares of all."""
    first = sorted(part, key=part.get, reverse=True)[:count]
    return ", ".join(f"{cause} {part[cause] / sum(part.values()):.0%}" for cause in first)


def difference(plan, other):
    """In which cause a plan differs most from another one, in seconds."""
    seconds = {cause: plan.seconds.get(cause, 0) - other.seconds.get(cause, 0)
               for cause in plan.seconds | other.seconds}
    cause = max(seconds, key=lambda cause: abs(seconds[cause]))
    return f"{cause} {seconds[cause]:+.2g} s"


def explain(model, cluster, software, gpus, batch, plan):
    """Yield what limits a plan, and what the next degrees of each axis would change."""
    yield f"{in_words(plan.layout)}: {largest(plan.seconds)}; {largest(plan.memory)} of the memory"
    for axis in ("tp", "cp", "pp", "v", "micro_batch"):
        now = getattr(plan.layout, axis)
        for degree in [now // 2] * (now > 1) + [now * 2]:
            layout = replace(plan.layout, **{axis: degree})
            layout = replace(layout, dp=gpus // (layout.tp * layout.cp * layout.pp) or 1)
            other = Plan(model, layout, cluster, software, gpus, batch)
            what = other.why
            if not misfit(model, layout, gpus, batch):
                room = f"but it {other.why}" if other.why else f"{other.bytes / 1e9:.0f} GB"
                what = (f"{other.total / plan.total - 1:+.0%} of the time "
                        f"({difference(other, plan)}), {room}")
            yield f"  {axis.replace('_', '-')} {degree}: {what}"


# -------------------------------------------------------------------------------- the command line

class Parser(argparse.ArgumentParser):
    def error(self, message):
        refuse(f"{message}; python 10_planner.py --help lists what would work")


def refuse(why):
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


CHOICES = {"recompute": ("none", "selective", "full"), "zero": range(4),
           "schedule": ("1f1b", "zero-bubble", "dualpipe-v")}


def above_zero(kind):
    """An argparse type: an int or a float above 0."""
    def number(text):
        if not 0 < kind(text) < 1e30:
            raise ValueError
        return kind(text)
    return number


def writable(path):
    """An argparse type: a file to write."""
    try:
        open(path, "a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path}: {error.strerror}") from None
    return path


def arguments(argv):
    parser = Parser("10_planner.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODELS, help="default: 8b, or a GPT of the sizes that are given")
    add("--cluster", choices=CLUSTERS, default="h100")
    add("--gpus", type=above_zero(int), default=8)
    add("--batch", type=above_zero(int), default=64, help="sequences of a step")
    add("--software", choices=SOFTWARE, default="megatron-2024")
    for kind, title in ((Model, "in place of the model's"), (Layout, "else what is fastest"),
                        (Cluster, "in place of the cluster's: FLOP/s, bytes, bytes/s, shares")):
        group = parser.add_argument_group(title)
        for field in fields(kind):
            options = {"type": above_zero(field.type)}
            if field.type is bool:
                options = {"action": argparse.BooleanOptionalAction}
            elif field.name in CHOICES:
                options = {"choices": CHOICES[field.name], "type": field.type}
            group.add_argument(f"--{field.name.replace('_', '-')}", **options)
    add("--untie", dest="tie", action="store_false", default=None, help="as --no-tie")
    add("--no-pp", dest="pp", action="store_const", const=1, help="as --pp 1")
    add("--max-micro-batch", type=above_zero(int), default=16)
    add("--explain", action="store_true", help="what limits the best, and what would change it")
    add("--published", action="store_true", help="published tables, beside what is predicted")
    add("--problems", action="store_true", help="the scaling book's worked problems")
    add("--json", type=writable, help="write the best plan, and all that fit")
    return parser.parse_args(argv)


def given(args, kind):
    """What the flags put in place of its fields."""
    values = {field.name: getattr(args, field.name) for field in fields(kind)}
    return {name: value for name, value in values.items() if value is not None}


def advice(find, args, fixed, others):
    """Why there is no plan, and what would work."""
    nearest = min(others, key=lambda plan: plan.bytes if plan.memory else math.inf)
    why = f"{in_words(nearest.layout)}: {nearest.why}"
    for name in fixed:
        fit, _ = find(args.gpus, {other: fixed[other] for other in fixed if other != name})
        if fit:
            return f"{why}; --{name.replace('_', '-')} {getattr(fit[0].layout, name)} would work"
    for gpus in (args.gpus * 2**k for k in range(1, 12)):
        if find(gpus, fixed)[0]:
            return f"{why}; --gpus {gpus} would work"
    return f"{why}; fewer flags may work"


def as_json(model, cluster, gpus, batch, fit):
    best = fit[0]
    rate = 1 / best.total / gpus
    flops = {scores: step_flops(model, batch, scores) * rate for scores in ("all", "causal")}
    return {"seconds": best.total, "tokens_per_second_per_gpu": batch * model.seq * rate,
            "tflops": flops["all"] / 1e12, "tflops_causal": flops["causal"] / 1e12,
            "tflops_hfu": step_flops(model, batch, recompute=best.layout.recompute) * rate / 1e12,
            "mfu": flops["all"] / cluster.peak, "time": best.seconds,
            "memory": best.memory | {"total": best.bytes}, "layout": asdict(best.layout),
            "found": [{"seconds": plan.total, "layout": asdict(plan.layout)} for plan in fit]}


def main(argv=None):
    args = arguments(argv)
    if args.published or args.problems:
        from lab import published  # noqa: TID251

        print(*published.tables() if args.published else published.problems(), sep="\n")
        return
    gpus, batch, software = args.gpus, args.batch, SOFTWARE[args.software]
    fixed = given(args, Layout)
    model = MODELS[args.model or "8b"]
    if args.layers and args.dim and args.heads and not args.model:
        model = gpt(args.layers, args.dim, args.heads)
    model = replace(model, **given(args, Model))
    cluster = replace(CLUSTERS[args.cluster], **given(args, Cluster))
    find = lambda gpus, fixed: search(model, cluster, software, gpus, batch, fixed,
                                      args.max_micro_batch)
    fit, others = find(gpus, fixed)
    if not fit:
        refuse(advice(find, args, fixed, others))
    print(f"{model.parameters() / 1e9:.1f} G parameters on {gpus} x {args.cluster}, "
          f"{args.software}: {batch} sequences of {model.seq:,} a step; {len(fit)} layouts fit")
    for plan in fit[:10]:
        told = as_json(model, cluster, gpus, batch, [plan])
        print(f"{plan.total:9.3f} s {told['tokens_per_second_per_gpu']:7.0f} tokens/s "
              f"{told['tflops']:4.0f} TFLOP/s {told['mfu']:4.0%} {plan.bytes / 1e9:4.0f} GB  "
              f"{in_words(plan.layout)}: {largest(plan.seconds, 3)}"
              + (f"; {difference(plan, fit[0])}" if plan.total > fit[0].total else "")
              + (f"; {plan.why}: may not fit" if plan.why else ""))
    if model.experts > 1:
        print("(the time of expert parallelism has been held to nothing: do not rely on it)")
    if args.explain:
        print(*explain(model, cluster, software, gpus, batch, fit[0]), sep="\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(as_json(model, cluster, gpus, batch, fit), file, indent=1)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)       # as of `| head`
    main()
