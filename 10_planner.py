r"""10 · The planner: which layout, how much memory, how fast, before anything runs.

Chapters 02 to 09 each share out one thing, and say in formulas what that saves and what it sends.
Here the formulas stand in one place, for any model and any machine. The planner needs no GPU and
imports no torch: it counts bytes and FLOPs, and divides them by the rates of the machine. What it
counts has been held to real ranks: the reports of chapters 01 to 09 compare what they have measured
with these tables, to the byte.

    1. What fits?   A GPU holds model states (a parameter has 2 bytes of weights, 4 of gradients, 12
                    of AdamW: ZeRO-1 shards the last, ZeRO-2 the last two, ZeRO-3 all), and the
                    activations of all micro-batches that are on their way.
    2. The batch.   dp · pp · cp · tp is the number of GPUs. A step's batch is dp · b · m: m
                    micro-batches of b sequences, one after the other.
    3. How fast?    Of all layouts that fit, the one that takes the fewest seconds a step.

Where the seconds of a micro-batch of b sequences of s tokens go, on a stage of L/pp layers:

    matmul        2·m·k·n FLOPs, and 2·(mk + kn + mn) bytes through HBM, one after the other: the
                  thinner tp cuts the matrices, the more bytes there are for a FLOP. FP8 has more
                  FLOP/s and fewer bytes, and casts (which count as elementwise).
    attention     4·b·s²·h FLOPs forward. Unfused, each of its a·b·s² scores goes through HBM in 9
                  bytes forward (softmax 4, dropout 5) and in 11 backward. A flash kernel has them
                  in SRAM, and leaves out the half that the causal mask forbids.
    elementwise   norms and residuals of the whole width, GELU or SwiGLU of its tp-th part: bytes.
    weights       the gradient of a micro-batch is written, and added to the sum: 8 bytes a weight,
                  unless the matmul itself adds to the sum (fused).
    tp            4 all_reduces of b·s·h a layer. Compute waits for what the software does not hide,
                  or for more, where compute is shorter. (Each hop of any message takes time, too.)
    cp            Keys and values, gathered before attention, or in a ring that hides behind it.
    pp            a message of b·s·h/tp to the next stage, and one back.
    bubble        (p-1)/v times a stage's time for a micro-batch, without a head: until the first
                  has arrived, and the last has returned (v: slices of each stage; chapter 07).
    dp            gradients once a step, or what of that does not hide behind the last backward.
                  With ZeRO-2 in *every* micro-batch, and with ZeRO-3 the weights twice as well.
    optimizer     60 bytes a weight: gradients to fp32, unscaled, checked, their norm, clipped (32);
                  weight and moments in and out (28).

FLOP/s mean nothing without their convention. All count 6 FLOPs a weight and token. Megatron adds
all scores of attention (12·s·h a token and layer), Llama 3 their causal half, and the paper of 2021
also counts what is computed twice under recomputation (8, not 6): FLOPs of the hardware (HFU), not
of the model (MFU).

How right is it? Two numbers are fitted, on ten rows of a table of 2021: the shares of their makers'
bandwidth that an A100's HBM and NVLink reach. Two more, on six rows, are about ZeRO-3. What they
say of other tables, `--published` prints. No table has experts in it: do not trust the time of ep,
which some software hides. The search takes any ZeRO, whether the software has it or not.

Run it:
    python 10_planner.py --model 70b --cluster h100 --gpus 512 --batch 1024
    python 10_planner.py --model 405b --gpus 8192 --batch 2048 --tp 8 --pp 16 --zero 1 --explain
    python 10_planner.py --published                (or --problems: the scaling book's)

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021);
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022); Qi et al.,
Zero Bubble Pipeline Parallelism (2023); Dao, FlashAttention-2 (2023); Llama Team, The Llama 3 Herd
of Models (2024); Ultra-Scale Playbook, "Finding the Best Training Configuration" and A3 (where a
number of ZeRO-3, tp and pp is one byte; here it is two); How To Scale Your Model, 5.
"""

import functools
import itertools
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace

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

    def matrices(self, experts):
        """The weights of a layer, of which so many experts count, by how they are cut."""
        return {"queries": 2 * self.dim**2, "keys": 2 * self.dim * self.kv_dim,     # and o; and v
                "mlp": experts * (3 if self.gated else 2) * self.dim * self.ffn}

    def weights(self, experts):
        return sum(self.matrices(experts).values())

    @property
    def norm(self):
        """RMSNorm has a weight; LayerNorm, a bias too."""
        return (1 if self.gated else 2) * self.dim

    @property
    def norms(self):
        """Of a layer: two norms, and the router."""
        return 2 * self.norm + (self.experts * self.dim if self.experts > 1 else 0)

    def parameters(self):
        layers = self.layers * (self.weights(self.experts) + self.norms)
        return layers + self.norm + (1 if self.tie else 2) * self.vocab * self.dim


def gpt(layers, dim, heads, **more):
    return Model(layers, dim, heads, heads, 4 * dim, **more)


def llama(layers, dim, heads, kv_heads, ffn, vocab=128256, seq=8192, tie=False, **more):
    return Model(layers, dim, heads, kv_heads, ffn, True, vocab, seq, tie, **more)


MODELS = {
    "1b": llama(16, 2048, 32, 8, 8192, tie=True),
    "7b": llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "8b": llama(32, 4096, 32, 8, 14336), "70b": llama(80, 8192, 64, 8, 28672),
    "405b": llama(126, 16384, 128, 8, 53248), "gpt3": gpt(96, 12288, 96),
    "22b": gpt(48, 6144, 64), "175b": gpt(96, 12288, 96), "530b": gpt(105, 20480, 128),
    "1t": gpt(128, 25600, 160), "mixtral": llama(32, 4096, 32, 8, 14336, 32000, experts=8, top_k=2),
    # Without its latent attention, its shared expert (top_k is 9 for it) and its dense layers.
    "deepseek-v3": llama(61, 7168, 128, 128, 2048, 129280, 4096, experts=256, top_k=9),
}


@dataclass(frozen=True)
class Cluster:
    peak: float                 # dense bf16 FLOP/s of a GPU
    matmul: float               # the share of it that a large matmul reaches
    attention: float            # the share that a flash attention kernel reaches
    hbm: float                  # bytes/s
    memory: float               # bytes
    nvlink: float               # bytes/s of a GPU to others of its node, in each direction
    nic: float                  # bytes/s of its network card
    per_node: int = 8
    alpha: float = 3.4e-6       # seconds of a message beside its bytes, to a GPU of the node
    nic_alpha: float = 14e-6    # and to another node
    has_fp8: bool = False       # matmuls of numbers of a byte


# Rates: data sheets. matmul: the best measured (stas00/ml-engineering, "MAMF"), on Hopper by 0.75,
# which mixes power and software. attention: FlashAttention-2; on Hopper -3, or cuDNN. B200: as it.
# alpha: NCCL's own table (tuning.cc), of large messages; TPU: a guess.
CLUSTERS = {
    "a100": Cluster(312e12, 0.869, 0.60, 2.039e12, 80e9, 300e9, 25e9),
    "h100": Cluster(989e12, 0.803 * 0.75, 0.55, 3.35e12, 80e9, 450e9, 50e9, has_fp8=True),
    "h200": Cluster(989e12, 0.803 * 0.75, 0.55, 4.8e12, 141e9, 450e9, 50e9, has_fp8=True),
    "b200": Cluster(2250e12, 0.803 * 0.75, 0.55, 8e12, 180e9, 900e9, 50e9, has_fp8=True),
    "tpu-v5p": Cluster(459e12, 0.803, 0.55, 2.765e12, 95e9, 180e9, 6.25e9, 8960, 1e-6),
}
HBM, NVLINK = 0.684, 0.595      # shares of those rates: fitted on table 1 (lab.planner.published)
NIC = 0.78                      # fitted on table 2's ZeRO-3 rows, as is the 0.5 below
FP8 = 2 * 0.709 / 0.803         # times bf16's FLOP/s: the best measured of each (again MAMF)


@dataclass(frozen=True)
class Software:
    flash: bool = True          # attention is one kernel
    dropout: bool = False
    fp8: bool = False           # a layer's matmuls
    fused_gradients: bool = True        # a matmul adds its weight gradient to the sum
    fused_swiglu: bool = True   # keeps gate and up alone; else silu(gate), too
    keeps_gathered: bool = False        # what sp gathers; else it is gathered again in backward
    whole_tables: bool = False          # tp does not cut embedding and head
    ring: bool = False          # cp's keys go round behind attention; else they are gathered
    tp_hidden: float = 0        # the share of tp's messages behind compute: forward,
    tp_hidden_backward: float = 0       # and backward
    dp_hidden: float = 0.9      # the share of a backward that dp's messages can hide behind
    gradient_bytes: int = 4     # of what dp sends
    one_card: bool = False      # a ring uses one network card of a node


PAPER = Software(flash=False, dropout=True, fused_gradients=False, dp_hidden=0, gradient_bytes=2)
SOFTWARE = {
    "megatron-2021": PAPER,
    # Gathers hide behind forward and behind its repetition: half of the computing.
    "deepspeed-2021": replace(PAPER, dp_hidden=0.5, one_card=True),
    # Backward's messages of column-parallel layers run beside the weight gradient's matmul.
    "megatron-2022": replace(PAPER, fused_gradients=True, tp_hidden_backward=1),
    "megatron-2024": Software(ring=True, tp_hidden=0.9, tp_hidden_backward=0.9),
    "torchtitan": Software(fused_gradients=False, keeps_gathered=True),
    "llama3": Software(tp_hidden_backward=0.5),
    "ours": Software(flash=False, fused_gradients=False, fused_swiglu=False, keeps_gathered=True,
                     whole_tables=True),
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

    def shares(self, model, software):
        """Of each class of activations, the share that a GPU keeps (chapters 04 to 06)."""
        cut, keys = 1 / (self.tp * self.cp), max(1 / self.tp, 1 / model.kv_heads)
        outside = cut if self.sp else 1 / self.cp
        return {"outside": outside, "inputs": 1 / self.cp if software.keeps_gathered else outside,
                "inside": cut, "keys and values": keys / self.cp if software.ring else keys,
                "core": cut}


# --------------------------------------------------------------------------------------- the memory

def numbers_kept(model, tokens, software):
    """{class: numbers} of 16 bits that a layer keeps of so many tokens (chapter 01)."""
    x, kv, hidden = tokens * model.dim, tokens * model.kv_dim, tokens * model.ffn * model.top_k
    scores = tokens * model.heads * model.seq
    core = scores * 5 / 2 if software.dropout else scores       # weights, dropped, a mask of a byte
    of_mlp = (3 if software.fused_swiglu else 4) if model.gated else 2      # of its hidden features
    return {"outside": 2 * x + (x if software.dropout else 0),  # of norms; two masks of a byte
            "inputs": 2 * x,                            # the norms' outputs, which matrices read
            "inside": 2 * x + of_mlp * hidden,          # q, o's input; the MLP's
            "keys and values": 2 * kv,
            "core": 2 * tokens * model.heads if software.flash else core}   # log-sum-exps


def kept_by_layer(model, layout, software):
    """Bytes of a layer's activations for a micro-batch, in 16 bits. Of a GPT with dropout, unfused,
    s·b·h·(10 + 24/t + 5·a·s/(h·t)); sequence parallelism divides the 10 by t as well."""
    tokens, shares = layout.micro_batch * model.seq, layout.shares(model, software)
    if layout.recompute == "full":
        return 2 * tokens * model.dim * shares["outside"]
    numbers = numbers_kept(model, tokens, software)
    if layout.recompute == "selective" and not software.flash:
        del numbers["core"]
    return 2 * sum(shares[name] * numbers[name] for name in numbers)


def micro_batches_alive(layout, m, stage=0):
    """How many micro-batches a stage keeps at once, counted as whole ones (chapter 07)."""
    p, v = layout.pp, layout.v
    alive = {"1f1b": (2 * (p - 1 - stage) + (v - 1) * p + 1) / v if v > 1 else p - stage,
             "zero-bubble": p, "dualpipe-v": p + 0.5}
    return min(m, alive[layout.schedule])


def parameters_of_gpu(model, layout, software):
    """{kind: (numbers, GPUs that hold the same)} on the fullest GPU, which is the last stage's: it
    has a table, or both."""
    t, layers, whole = layout.tp, math.ceil(model.layers / layout.pp), layout.dp * layout.cp
    tables = 1 if model.tie or layout.pp > 1 and layout.schedule != "dualpipe-v" else 2
    cuts = {"queries": t, "keys": min(t, model.kv_heads), "mlp": t * layout.ep, "norms": 1,
            "tables": 1 if software.whole_tables else t}
    numbers = {kind: layers * size for kind, size in model.matrices(model.experts).items()}
    numbers |= {"norms": layers * model.norms + model.norm,
                "tables": tables * model.vocab * model.dim}
    return {kind: (size / cuts[kind], whole * t // cuts[kind]) for kind, size in numbers.items()}


def memory(model, layout, software, m):
    """{cause: bytes} on the fullest GPU. m: micro-batches of a step."""
    held = parameters_of_gpu(model, layout, software).values()
    widths = {"weights": (2, 3), "gradients": (4, 2), "optimizer": (12, 1)}
    states = {cause: width * sum(size / (n if layout.zero >= stage else 1) for size, n in held)
              for cause, (width, stage) in widths.items()}
    if layout.zero == 3:                                # two layers are whole at a time, or a table
        layer = model.weights(model.experts / layout.ep)
        states["weights"] += 2 * max(2 * layer, model.vocab * model.dim) / layout.tp

    alive = [micro_batches_alive(layout, m, stage) for stage in (0, layout.pp - 1)]
    kept = kept_by_layer(model, layout, software)
    first, last = (count * math.ceil(model.layers / layout.pp) * kept for count in alive)
    logits = 8 * layout.tokens(model) * model.vocab / layout.tp     # in float32; their gradient
    kept = max(first, last + logits)
    if layout.recompute == "full":                      # and one layer, computed again
        kept += kept_by_layer(model, replace(layout, recompute="none"), software)
    return states | {"activations": kept}


# ----------------------------------------------------------------------------------------- the time

class Machine:
    """How long a GPU of a cluster takes, in seconds."""

    def __init__(self, cluster, software):
        self.cluster, self.software = cluster, software
        self.flops, self.bandwidth = cluster.peak * cluster.matmul, cluster.hbm * HBM

    def matmul(self, m, k, n, times=1, fp8=False):
        """(m, k) @ (k, n): arithmetic, and what goes through HBM."""
        flops, width = (FP8 * self.flops, 1) if fp8 else (self.flops, 2)
        moved = width * (m * k + k * n) + 2 * m * n
        return times * (2 * m * k * n / flops + moved / self.bandwidth)

    def links(self, n, stride):
        """bytes/s of a ring over n ranks that lie `stride` apart. It leaves a node through the
        network cards of all its members there; the last node may have fewer of them."""
        cluster, within = self.cluster, self.cluster.nvlink * NVLINK
        if n * stride <= cluster.per_node:
            return within
        most = max(1, cluster.per_node // stride)
        members = 1 if self.software.one_card else n % most or most
        return min(within, members * cluster.nic * NIC)

    def link(self, ranks):
        """bytes/s of a GPU to one of others that are so many together: by its own network card, if
        that leaves the node."""
        within = ranks <= self.cluster.per_node
        return self.cluster.nvlink * NVLINK if within else self.cluster.nic * NIC

    def ring(self, size, n, stride, calls=1):
        """An all_gather or a reduce_scatter of `size` bytes, or some of as many bytes together. An
        all_reduce is both. Each call takes the time of its hops, too."""
        cluster, hops = self.cluster, n - 1
        nodes = math.ceil(n * stride / cluster.per_node)
        far = min(hops, nodes) if nodes > 1 else 0      # between nodes
        waits = calls * (far * cluster.nic_alpha + (hops - far) * cluster.alpha)
        return waits + (hops / n * size / self.links(n, stride) if hops else 0)


def add(*parts):
    """[{cause: seconds} and how often], added up."""
    total = Counter()
    for part, times in parts:
        total.update({cause: times * seconds for cause, seconds in part.items()})
    return total


def messages(model, layout):
    """{axis: (numbers, ranks, stride, calls)}: what rings over an axis gather and scatter in a
    layer's forward, of a micro-batch. In backward it is as much."""
    t, cp, tokens = layout.tp, layout.cp, layout.tokens(model)
    keys = 2 * tokens * cp * model.kv_dim * max(1 / t, 1 / model.kv_heads)
    return {"tp": (4 * tokens * model.dim, t, 1, 4), "cp": (keys, cp, t, 1),
            "ep": (2 * tokens * model.top_k * model.dim, layout.ep, t * cp, 2)}


def layer_seconds(model, layout, machine):
    """{cause: seconds} of a layer for a micro-batch: forward, backward."""
    software, t, tokens = machine.software, layout.tp, layout.tokens(model)
    h, kv, f, x = model.dim, model.kv_dim, model.ffn, tokens * model.dim
    routed, fp8 = tokens * model.top_k, software.fp8    # rows that go through experts
    own = model.experts / layout.ep                     # each has as many of the rows
    keys = 2 * kv * max(1 / t, 1 / model.kv_heads)      # no head of keys is cut
    matrices = [(tokens, h, h / t + keys, 1), (tokens, h / t, h, 1),
                (routed / own, h, f * (2 if model.gated else 1) / t, own),
                (routed / own, f / t, h, own)]
    forward = {"matmul": sum(machine.matmul(*shape, fp8) for shape in matrices)}
    backward = {"matmul": sum(machine.matmul(m, n, k, times, fp8)
                              + machine.matmul(k, m, n, times, fp8) for m, k, n, times in matrices)}

    # Two products forward. Backward four, and in a flash kernel the scores once more.
    heads, rows, d = layout.micro_batch * model.heads / t, model.seq / layout.cp, h / model.heads
    products = (machine.matmul(rows, d, model.seq, heads)
                + machine.matmul(rows, model.seq, d, heads))
    score = heads * rows * model.seq / machine.bandwidth        # a byte of each
    dropout = 5 if software.dropout else 0
    forward["attention"] = products + (4 + dropout) * score
    backward["attention"] = 2 * products + (6 + dropout) * score
    if software.flash:                                  # half of a product's FLOPs
        product = heads * rows * model.seq * d / (machine.cluster.peak * machine.cluster.attention)
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
    if fp8:                                             # casts: read 2, write 1 in each direction
        inputs, outputs = zip(*((m * k * times, m * n * times) for m, k, n, times in matrices))
        forward["elementwise"] += 4 * sum(inputs) / machine.bandwidth
        backward["elementwise"] += 4 * sum(outputs) / machine.bandwidth
    if not software.fused_gradients:
        weights = model.weights(model.experts / layout.ep) / t
        backward["weights"] = 8 * weights / machine.bandwidth

    sent = {axis: machine.ring(2 * numbers, *ring)
            for axis, (numbers, *ring) in messages(model, layout).items()}
    if layout.ep > 1:                                   # no ring: each GPU sends to all others
        spread = layout.ep * t * layout.cp
        sent["ep"] *= machine.links(layout.ep, t * layout.cp) / machine.link(spread)
    hidden = software.tp_hidden_backward                # with sp all_gathers are left, half of all
    hidden = min(hidden, 0.5) if layout.sp and not software.tp_hidden else hidden
    for part, share in ((forward, software.tp_hidden), (backward, hidden)):
        part |= sent | {"tp": sent["tp"] - min(share * sent["tp"], part["matmul"])}
    if software.ring:                                   # backward: keys, values, their gradients
        forward["cp"] = max(0, sent["cp"] - forward["attention"])
        backward["cp"] = max(0, 2 * sent["cp"] - backward["attention"])
    return forward, backward


def bubble(layout, F, B, W):
    """The longest wait of a stage whose micro-batch takes so long: forward, and backward for inputs
    and for weights (chapter 07)."""
    p, v = layout.pp, layout.v
    return {"1f1b": (p - 1) / v * (F + B + W), "zero-bubble": (p - 1) * (F + B - W),
            "dualpipe-v": (p - 1) / 2 * (F + 2 * B - W)}[layout.schedule]


def step_seconds(model, layout, cluster, software, batch):
    """{cause: seconds} of a step. batch: its sequences. The slowest stage sets the pace of all: the
    last one, which has the head, unless layers do not divide and it has one less than others."""
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
    layer = add((forward, 1), (backward, 1), (again[layout.recompute], 1))
    last, usual = add((layer, model.layers // p), (head, 1)), add((layer, layers))
    stage = max(last, usual, key=lambda part: sum(part.values()))
    if p > 1:
        size = 2 * tokens * model.dim
        message = size / t / machine.link(p * t * layout.sharers)
        message += 0 if layout.sp else machine.ring(size, t, 1)     # scattered over tp, gathered
        stage["pp"] = usual["pp"] = 2 * layout.v * message

    # Bytes of a parameter, in every micro-batch and once a step: gradients g, weights 2.
    held, g = parameters_of_gpu(model, layout, software).values(), software.gradient_bytes
    calls, there = layers / len(held), layers * sum(forward.values())
    back = sum(usual.values()) - there

    def waits(compute, *widths):
        """For rings of so many bytes of each parameter, if this compute does not hide them."""
        sent = sum(machine.ring(width * size, n, layout.sharers * t // n, calls)
                   for size, n in held for width in widths)
        return max(0, sent - software.dp_hidden * compute)

    stage["dp"] = usual["dp"] = {2: waits(back, g), 3: waits(there, 2) + waits(back, 2, g)}.get(
        layout.zero, 0)
    seconds = add((stage, m))
    W = layers * backward["matmul"] / 2
    seconds["bubble"] = bubble(layout, there, sum(usual.values()) - there - W, W)   # no head
    once = [(g, g), (g, 2), (2,), ()][layout.zero]
    seconds["dp"] += waits(layers * sum(backward.values()), *once)
    updated = sum(size / (n if layout.zero else 1) for size, n in held)
    seconds["optimizer"] = 60 * updated / machine.bandwidth
    return seconds


def step_flops(model, batch, scores="all", recompute="none"):
    """FLOPs of a step by a convention. scores: "all" of attention, or the "causal" half."""
    weights, passes = model.layers * model.weights(model.top_k), 4 if recompute == "full" else 3
    attention = 4 * model.seq * model.dim * model.layers * (0.5 if scores == "causal" else 1)
    head = 2 * model.vocab * model.dim                  # never recomputed
    return batch * model.seq * (passes * (2 * weights + attention) + 3 * head)


# --------------------------------------------- rooflines: the scaling book's, and the playbook's A3

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


def sending_over_computing(tokens, n, dim, layers, flops, bandwidth):
    """The playbook's A3, of layers with 16·dim² weights: {axis of n ranks: seconds of its messages
    over those of the compute that could hide them}. tokens: of a rank. layers: of a stage."""
    ratio = flops / bandwidth           # of numbers of 2 bytes; of 1 in A3, but for dp's: half
    return {"dp": (n - 1) / n * ratio / tokens,         # gradients, behind backward
            "zero-3": (n - 1) / n * ratio / tokens,     # a layer's weights, behind forward
            "tp": (n - 1) / dim * ratio,                # a gather, behind the next matrix
            "pp": ratio / (16 * dim * layers)}          # a message, behind the next stage


def best_checkpoints(layers, kept_by_input, kept_by_layer):
    """Megatron's trade: with c checkpoints, a stage keeps c inputs, and the layers of one part
    while they are computed again. This c keeps least; if it is above layers, each is its own."""
    return math.sqrt(layers * kept_by_layer / kept_by_input)


# --------------------------------------------------------------------------------------- the search

CHOICES = {"recompute": ("none", "selective", "full"), "zero": range(4),
           "schedule": ("1f1b", "zero-bubble", "dualpipe-v")}


class Plan:
    """A layout, its bytes and its seconds by cause; or why it does not divide, and no bytes."""

    def __init__(self, model, layout, cluster, software, gpus, batch):
        self.layout, self.why, self.memory = layout, misfit(model, layout, gpus, batch), None
        self.asked = model, layout, cluster, software, batch
        if self.why:
            return
        m = batch // (layout.dp * layout.micro_batch)
        self.memory = memory(model, layout, software, m)
        self.bytes = sum(self.memory.values())
        if self.bytes > ROOM * cluster.memory:
            self.why = f"needs {self.bytes / 1e9:.0f} GB of a GPU ({largest(self.memory, 2)})"

    @functools.cached_property
    def seconds(self):                                  # of most layouts nobody asks
        return step_seconds(*self.asked)

    @functools.cached_property
    def total(self):
        return sum(self.seconds.values())


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
    m = batch // (layout.dp * layout.micro_batch)
    least = {"zero-bubble": layout.pp, "dualpipe-v": 2 * layout.pp}.get(layout.schedule, 1)
    if m < least or layout.v > 1 and m % layout.pp:
        return (f"{m} micro-batches for pp = {layout.pp}, v = {layout.v}, {layout.schedule}, which "
                f"takes {least} or more, and with v > 1 a multiple of pp")
    if layout.schedule != "1f1b" and (layout.v > 1 or layout.pp == 1):
        return f"{layout.schedule} needs pp of 2 or more, and v = 1"
    return None


def powers(limit):
    return [2**k for k in range(int(limit).bit_length())]


def degrees(model, cluster, software, gpus, fixed, most):
    """{degree: all that are tried}: powers of 2 (but pp's and v's), tp in a node; or `fixed`."""
    stages = [pp for pp in range(1, model.layers + 1) if gpus % pp == 0]
    slices = [v for v in range(1, 9) if any(-(-model.layers // pp) % v == 0 for pp in stages)]
    again = ("none", "full") if software.flash else ("none", "selective", "full")
    tried = {"tp": powers(min(8, cluster.per_node)), "cp": powers(max(1, model.seq // 4096)),
             "pp": stages, "v": slices, "ep": powers(model.experts), "zero": range(4),
             "micro_batch": powers(most), "recompute": again}
    return tried | {name: [value] for name, value in fixed.items()}


def search(model, cluster, software, gpus, batch, fixed, most=16):
    """Plans for all layouts, with the degrees of `fixed` as they are: those that fit, or else that
    may fit, fastest first; and the others. most: sequences of a micro-batch. Unless they are fixed,
    the schedule is 1f1b, ZeRO-3, which would gather a stage for each micro-batch, has no pp, and cp
    no micro-batches of several."""
    tried = degrees(model, cluster, software, gpus, fixed, most)
    fit, others = [], []
    for values in itertools.product(*tried.values()):
        degree = dict(zip(tried, values))
        degree = {"dp": gpus // (degree["tp"] * degree["cp"] * degree["pp"]) or 1,
                  "sp": degree["tp"] > 1} | degree
        alone = degree["dp"] * degree["cp"] == 1 and degree["zero"] and "zero" not in fixed
        twice = degree["cp"] > 1 < degree["micro_batch"] and not {"cp", "micro_batch"} & {*fixed}
        gathers = degree["zero"] == 3 and degree["pp"] > 1 and "zero" not in fixed
        if not (alone or twice or gathers):
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


def neighbours(layout, software):
    """Yield what could be otherwise: ("tp 4", the layout with dp as it was), and so on."""
    for axis in ("tp", "cp", "pp", "v", "micro_batch") if layout.pp > 1 else (
            "tp", "cp", "pp", "micro_batch"):
        now = getattr(layout, axis)
        for degree in [now // 2] * (now > 1) + [now * 2]:
            other = replace(layout, **{axis: degree})
            if axis == "pp":                            # a slice has as many layers as it had
                other = replace(other, v=max(1, layout.v * now // degree) if degree > 1 else 1)
            yield f"{axis.replace('_', '-')} {degree}", other
    for name in ("zero", "recompute"):
        for choice in CHOICES[name]:
            if choice != getattr(layout, name) and not (choice == "selective" and software.flash):
                yield f"{name} {choice}", replace(layout, **{name: choice})


def explain(model, cluster, software, gpus, batch, plan):
    """Yield what limits a plan, and what the next degrees of each axis would change."""
    yield f"{in_words(plan.layout)}: its {plan.total:.3g} s are {largest(plan.seconds)}."
    yield f"Its {plan.bytes / 1e9:.0f} GB of a GPU are {largest(plan.memory)}."
    for name, layout in neighbours(plan.layout, software):
        layout = replace(layout, dp=gpus // (layout.tp * layout.cp * layout.pp) or 1,
                         sp=layout.tp > 1 and (layout.sp or plan.layout.tp == 1))
        other = Plan(model, layout, cluster, software, gpus, batch)
        if not other.memory:
            yield f"  with {name}: {other.why}"
            continue
        change = other.total / plan.total - 1
        time = f"{abs(change):.0%} {'more' if change > 0 else 'less'} time"
        room = f"but it {other.why}" if other.why else f"and {other.bytes / 1e9:.0f} GB"
        yield f"  with {name} it would take {time} (mostly {difference(other, plan)}), {room}"


if __name__ == "__main__":
    from lab.planner import planning

    planning.program(sys.modules[__name__])
