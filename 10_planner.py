r"""10 · The planner: which layout, how much memory, how fast, before anything runs.

Chapters 02 to 09 each share out one thing, and say in formulas what that saves and what it sends.
Here the formulas stand in one place, for any model and any machine. The planner needs no GPU and
imports no torch: it counts bytes and FLOPs, and divides them by the rates of the machine. What it
counts has been held to real ranks: the reports of chapters 01 to 09 compare what they have measured
with these tables, to the byte.

    1. What fits?   A GPU holds model states (a parameter has 2 bytes of weights, 4 of gradients, 12
                    of AdamW: ZeRO-1 shards the last, ZeRO-2 the last two, ZeRO-3 all; recipes with
                    FP8 have 9 bytes), and activations of micro-batches that are on their way.
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
    weights       8 bytes each: a gradient is added to their sum, unless the matmul does so (fused);
                  12, if the sum is in fp32.
    tp            4 all_reduces of b·s·h a layer, 2 if it has experts. Compute waits for what the
                  software does not hide, or for more, where it is shorter. (Each hop takes time.)
    cp            Keys and values, gathered before attention, or in a ring that hides behind it.
    ep            2·K·b·s·h/tp: the rows of a rank's own tokens, to K experts each and back. In two
                  hops a row goes to a machine once: DeepSeek-V3's 8 experts, on 8 machines, make 7
                  journeys to others, or 4.6; or 3.2, if a token may go to 4 machines. What hides
                  behind another micro-batch takes a part of the GPU's multiprocessors.
    pp            a message of b·s·h/tp to the next stage, and one back.
    bubble        (p-1)/v times a stage's time for a micro-batch, without a head (chapter 07).
    dp            gradients once a step, or what of that does not hide behind the last backward.
                  ZeRO-2: in *every* micro-batch, or every pp (sums_runs). ZeRO-3: weights twice.
    optimizer     60 bytes a weight: a gradient of 4 to fp32, unscaled, checked, its norm, clipped
                  (32); it, weight and moments in, and out (28). Muon's: lab/planner/muon.py.

FLOP/s mean nothing without their convention. All count 6 FLOPs a weight and token. Megatron adds
all scores of attention (12·s·h a token and layer), Llama 3 their causal half, and the paper of 2021
what is recomputed as well (8, not 6): FLOPs of the hardware (HFU), not of the model (MFU).

How right is it? Two numbers are fitted, on ten rows of a table of 2021: the shares of their makers'
bandwidth that an A100's HBM and NVLink reach. Two more, on six rows, are about ZeRO-3. What they
say of other tables, `--published` prints. Of 29 rows with experts, on which no number is fitted, 22
are within 20%. Six others ran slower, up to 3 times, where matrices are small: kernels take time to
start. The search takes any ZeRO, whether the software has it or not.

Run it:
    python 10_planner.py --model 70b --cluster h100 --gpus 512 --batch 1024
    python 10_planner.py --model 405b --gpus 8192 --batch 2048 --tp 8 --pp 16 --zero 1 --explain
    python 10_planner.py --model deepseek-v3 --cluster h800 --gpus 2048 --batch 15360 --ep 64
    python 10_planner.py --published                (or --problems, or --contexts: long ones)

Sources: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021);
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022); Qi et al.,
Zero Bubble Pipeline Parallelism (2023); Dao, FlashAttention-2 (2023); Llama Team, The Llama 3 Herd
of Models (2024); DeepSeek-AI, DeepSeek-V3 Technical Report (2024), 3; Yan et al., Scalable Training
of Mixture-of-Experts Models with Megatron Core (2026).
"""

import functools
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass, replace

from lab.planner import muon
from lab.planner.misfits import misfit

# ------------------------------------------------------------------------------ models and machines

@dataclass(frozen=True)
class Model:
    layers: int                 # blocks, of attention and an MLP or experts each
    dim: int                    # width, of a token between layers
    heads: int                  # of queries
    kv_heads: int               # of keys and values, which heads share evenly
    ffn: int                    # hidden width of an MLP, or of an expert
    gated: bool = False         # SwiGLU, of three matrices; else GELU, of two
    vocab: int = 51200          # rows of the embedding
    seq: int = 2048             # tokens of a sequence
    tie: bool = True            # embedding and head are one matrix
    experts: int = 1            # of each layer
    top_k: int = 1              # experts of a token
    shared: int = 0             # experts of every token, beside those
    node_limit: int = 0         # machines that a token's experts may lie on; 0: all
    dense_layers: int = 0       # the first layers, which have an MLP in place of experts
    dense_ffn: int = 0          # hidden width of that MLP
    head_dim: int = 0           # of a head; 0: dim / heads
    rope_dim: int = 0           # by which queries and keys are wider than values
    q_latent: int = 0           # width of what queries are made from; 0: dim
    kv_latent: int = 0          # and of what keys and values are made from (latent attention)

    @property
    def head(self):
        return self.head_dim or self.dim // self.heads

    @property
    def queries(self):
        """Numbers of a token: its queries; below keys and values; what o reads; the latents."""
        return self.heads * (self.head + self.rope_dim)

    @property
    def keys(self):
        return self.kv_heads * (2 * self.head + self.rope_dim)

    @property
    def values(self):
        return self.heads * self.head

    @property
    def latents(self):          # the keys' rope_dim is one for all heads
        return self.q_latent + (self.kv_latent and self.kv_latent + self.rope_dim)

    @property
    def projections(self):
        """(rows, columns) of the matrices that make queries, and keys and values."""
        keys = self.keys - (self.kv_heads * self.rope_dim if self.kv_latent else 0)
        return (self.q_latent or self.dim, self.queries), (self.kv_latent or self.dim, keys)

    @property
    def dense(self):
        """The model, if all of its layers were dense ones."""
        return replace(self, experts=1, top_k=1, shared=0, ffn=self.dense_ffn or self.ffn)

    def matrices(self, experts):
        """The weights of a layer, of which so many experts count, by how they are cut."""
        (q, queries), (kv, keys) = self.projections
        mlp, mixture = (3 if self.gated else 2) * self.dim * self.ffn, self.experts > 1
        kinds = {"queries": q * queries + self.values * self.dim,       # and o
                 "keys": kv * keys, "latents": self.dim * self.latents,
                 "mlp": 0 if mixture else mlp * experts, "shared": mlp * self.shared,
                 "experts": mlp * experts if mixture else 0}
        return {kind: size for kind, size in kinds.items() if size}

    def weights(self, experts):
        return sum(self.matrices(experts).values())

    def weights_of_layers(self, experts):
        return (self.layers - self.dense_layers) * self.weights(experts) + (
            self.dense_layers * self.dense.weights(1))

    @property
    def norm(self):
        """RMSNorm has a weight; LayerNorm, a bias too."""
        return (1 if self.gated else 2) * self.dim

    @property
    def norms(self):
        """Of a layer: two norms, those of latents, and the router."""
        router = self.experts * self.dim if self.experts > 1 else 0
        return 2 * self.norm + self.q_latent + self.kv_latent + router

    def parameters(self, experts=None):
        """Of which so many experts of a layer count: all of them, or the top_k that a token has."""
        mixtures = self.layers - self.dense_layers
        layers = self.weights_of_layers(experts or self.experts)
        layers += mixtures * self.norms + self.dense_layers * self.dense.norms
        return layers + self.norm + (1 if self.tie else 2) * self.vocab * self.dim


def gpt(layers, dim, heads, **more):
    return Model(layers, dim, heads, heads, 4 * dim, **more)


def llama(layers, dim, heads, kv_heads, ffn, vocab=128256, seq=8192, tie=False, **more):
    return Model(layers, dim, heads, kv_heads, ffn, True, vocab, seq, tie, **more)


MODELS = {
    "1b": llama(16, 2048, 32, 8, 8192, tie=True),
    "7b": llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "8b": llama(32, 4096, 32, 8, 14336), "70b": llama(80, 8192, 64, 8, 28672),
    "405b": llama(126, 16384, 128, 8, 53248), "gpt3": gpt(96, 12288, 96), "22b": gpt(48, 6144, 64),
    "175b": gpt(96, 12288, 96), "530b": gpt(105, 20480, 128), "1t": gpt(128, 25600, 160),
    "mixtral": llama(32, 4096, 32, 8, 14336, 32000, 4096, experts=8, top_k=2),
    "qwen3-235b": llama(94, 4096, 64, 4, 1536, 151936, 4096, experts=128, top_k=8, head_dim=128),
    "deepseek-v3": llama(61, 7168, 128, 128, 2048, 129280, 4096, experts=256, top_k=8, shared=1,
                         node_limit=4, dense_layers=3, dense_ffn=18432, head_dim=128, rope_dim=64,
                         q_latent=1536, kv_latent=512),
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
    per_node: int = 8           # GPUs of a node
    alpha: float = 3.4e-6       # seconds of a message beside its bytes, to a GPU of the node
    nic_alpha: float = 14e-6    # and to another node
    has_fp8: bool = False       # matmuls of numbers of a byte


# Rates: data sheets. matmul: the best measured (stas00/ml-engineering, "MAMF"), on Hopper by 0.75,
# which mixes power and software. attention: FlashAttention-2; on Hopper -3, or cuDNN. B200: as it.
# alpha: NCCL's own table (tuning.cc), of large messages; TPU: a guess. A rack of 72 is one node.
CLUSTERS = {
    "a100": Cluster(312e12, 0.869, 0.60, 2.039e12, 80e9, 300e9, 25e9),
    "h100": Cluster(989e12, 0.803 * 0.75, 0.55, 3.35e12, 80e9, 450e9, 50e9, has_fp8=True),
    "h200": Cluster(989e12, 0.803 * 0.75, 0.55, 4.8e12, 141e9, 450e9, 50e9, has_fp8=True),
    "h800": Cluster(989e12, 0.803 * 0.75, 0.55, 3.35e12, 80e9, 200e9, 50e9, has_fp8=True),
    "b200": Cluster(2250e12, 0.803 * 0.75, 0.55, 8e12, 180e9, 900e9, 50e9, has_fp8=True),
    "gb200": Cluster(2500e12, 0.803 * 0.75, 0.55, 8e12, 186e9, 900e9, 50e9, 72, has_fp8=True),
    "gb300": Cluster(2500e12, 0.803 * 0.75, 0.55, 8e12, 279e9, 900e9, 100e9, 72, has_fp8=True),
    "tpu-v5p": Cluster(459e12, 0.803, 0.55, 2.765e12, 95e9, 180e9, 6.25e9, 8960, 1e-6),
}
HBM, NVLINK = 0.684, 0.595      # shares of those rates: fitted on table 1 (lab.planner.published)
NIC = 0.78                      # fitted on table 2's ZeRO-3 rows, as is the 0.5 below
FP8 = 2 * 0.709 / 0.803         # times bf16's FLOP/s: the best measured of each (again MAMF)


@dataclass(frozen=True)
class Software:
    flash: bool = True          # attention is one kernel
    dropout: bool = False       # behind attention, its scores and the MLP
    fp8: bool = False           # a layer's matmuls
    fused_gradients: bool = True        # a matmul adds its weight gradient to the sum
    swiglu_kept: int = 3        # of a feature: gate, up, product; 4: silu(gate), too; 2: no product
    keeps_gathered: bool = False        # what sp gathers; else it is gathered again in backward
    whole_tables: bool = False          # tp does not cut embedding and head
    ring: bool = False          # cp's keys go round behind attention; else they are gathered
    tp_hidden: float = 0        # the share of tp's messages behind compute: forward,
    tp_hidden_backward: float = 0       # and backward
    ep_hidden: float = 0        # of ep's, behind another micro-batch, which goes the other way
    ep_units: float = 20 / 132  # of a GPU's multiprocessors, those that this takes, if any hides
    two_hops: bool = False      # a row goes to a machine once, and is copied there to its experts
    dp_hidden: float = 0.9      # the share of a backward that dp's messages can hide behind
    sums_runs: bool = False     # ZeRO-2 sends a slice's gradients of pp micro-batches as one sum
    weight_bytes: int = 2       # of a parameter's weight, as it is held
    gradient_bytes: int = 4     # of its gradient as it is held, with a sum in another format
    master_bytes: int = 4       # of its weight that is updated; 0: the one above is
    moment_bytes: int = 8       # of both of its moments in AdamW
    sent_bytes: int = 4         # of its gradient that dp sends, and that updates it
    one_card: bool = False      # a ring uses one network card of a node
    optimizer: str = "adamw"    # muon updates the matrices of blocks, and AdamW all else

    @property
    def gathered_bytes(self):
        return min(2, self.weight_bytes)                # ZeRO sends no weight in fp32

    @property
    def updated_bytes(self):
        """Of a parameter, through HBM in the update."""
        master = self.master_bytes or self.weight_bytes
        return self.sent_bytes + 28 + 4 + 2 * (master + self.moment_bytes)


# In fp16: gradients, which are sent, and their copies in fp32 (20 bytes, by Megatron's manual).
PAPER = Software(flash=False, dropout=True, fused_gradients=False, dp_hidden=0, gradient_bytes=6,
                 sent_bytes=2)
SOFTWARE = {
    "megatron-2021": PAPER,
    # Gathers hide behind forward and behind its repetition: half of the computing.
    "deepspeed-2021": replace(PAPER, dp_hidden=0.5, one_card=True),
    # Backward's messages of column-parallel layers run beside the weight gradient's matmul, which
    # adds to a sum in fp32.
    "megatron-2022": replace(PAPER, fused_gradients=True, tp_hidden_backward=1, gradient_bytes=4,
                             sent_bytes=4),
    "megatron-2024": Software(ring=True, tp_hidden=0.9, tp_hidden_backward=0.9),
    # 93% is what the report on it measures; DeepSeek calls what is left "near zero".
    "megatron-moe": Software(ring=True, tp_hidden=0.9, tp_hidden_backward=0.9, ep_hidden=0.93,
                             two_hops=True),
    "deepseek-v3": Software(fp8=True, ep_hidden=1, two_hops=True, moment_bytes=4),  # in bf16
    "torchtitan": Software(fused_gradients=False, keeps_gathered=True, weight_bytes=4,
                           master_bytes=0),             # FSDP gathers weights in bf16
    # Its report frees tensors, and does not say which: here the product, as xFormers' SwiGLU does.
    "llama3": Software(tp_hidden_backward=0.5, swiglu_kept=2, sums_runs=True),
    "ours": Software(flash=False, fused_gradients=False, swiglu_kept=4, keeps_gathered=True,
                     whole_tables=True),
}


@dataclass(frozen=True)
class Layout:
    dp: int = 1                 # data parallelism: ranks that share the batch
    tp: int = 1                 # tensor parallelism: that share each matrix
    cp: int = 1                 # context parallelism: that share each sequence
    pp: int = 1                 # pipeline parallelism: stages, that share the layers
    v: int = 1                  # slices of the model on each stage
    ep: int = 1                 # of a stage's dp x cp x tp ranks, those that share the experts
    zero: int = 0               # dp shares, 1: optimizer states, 2: and gradients, 3: and weights
    sp: bool = True             # sequence parallelism, where tp > 1
    micro_batch: int = 1        # sequences that a rank computes at once
    recompute: str = "none"     # selective: attention's core, where it is unfused; full: layers
    schedule: str = "1f1b"      # which v > 1 interleaves; or zero-bubble, dualpipe-v

    @property
    def stage(self):
        return self.dp * self.cp * self.tp              # ranks of a stage

    def tokens(self, model):
        return self.micro_batch * model.seq / self.cp   # of a micro-batch, on a rank

    def shares(self, model, software):
        """Of each class of activations, the share that a GPU keeps (chapters 04 to 06)."""
        cut, keys = 1 / (self.tp * self.cp), max(1 / self.tp, 1 / model.kv_heads)
        outside = cut if self.sp else 1 / self.cp
        return {"outside": outside, "inputs": 1 / self.cp if software.keeps_gathered else outside,
                "inside": cut, "keys and values": keys / self.cp if software.ring else keys,
                "core": cut}

    def cuts(self, model, software):
        """In how many parts each kind of parameter is. (Each expert is whole on a GPU.)"""
        return {"queries": self.tp, "keys": min(self.tp, model.kv_heads), "latents": 1,
                "mlp": self.tp, "shared": 1, "experts": self.ep, "norms": 1,
                "tables": 1 if software.whole_tables else self.tp}


# --------------------------------------------------------------------------------------- the memory

def numbers_kept(model, tokens, software):
    """{class: numbers} of 16 bits that a layer keeps of so many tokens (chapter 01)."""
    x, hidden = tokens * model.dim, tokens * model.ffn * (model.top_k + model.shared)
    rows = x * model.top_k if model.experts > 1 else 0          # that experts read
    scores = tokens * model.heads * model.seq
    core = scores * 5 / 2 if software.dropout else scores       # weights, dropped, a mask of a byte
    of_mlp = software.swiglu_kept if model.gated else 2             # of its hidden features
    return {"outside": 2 * x + (x if software.dropout else 0),  # of norms; two masks of a byte
            "inputs": 2 * (x + tokens * (model.q_latent + model.kv_latent)),    # norms' outputs
            "inside": tokens * (model.queries + model.values) + of_mlp * hidden + rows,
            "keys and values": tokens * model.keys,
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


def layers_of_stage(model, layers, first=False):
    """[(model, how many)] of the layers on the last stage, or the first: dense ones come first."""
    dense = min(layers, model.dense_layers) if first else layers + model.dense_layers - model.layers
    return [(model, layers - max(0, dense))] + [(model.dense, dense)] * (dense > 0)


def layer_of_gpu(model, layout, software):
    """Weights of a layer's matrices that a GPU has."""
    cuts, matrices = layout.cuts(model, software), model.matrices(model.experts)
    return sum(size / cuts[kind] for kind, size in matrices.items())


def parameters_of_gpu(model, layout, software):
    """{kind: (numbers, GPUs that hold the same)} on the fullest GPU, of the last stage or of the
    first: it has a table, or both."""
    layers, cuts = math.ceil(model.layers / layout.pp), layout.cuts(model, software)
    tables = 1 if model.tie or layout.pp > 1 and layout.schedule != "dualpipe-v" else 2
    stages = [add(*[(kind.matrices(kind.experts) | {"norms": kind.norms}, count)
                    for kind, count in layers_of_stage(model, layers, first)])
              for first in (False, True)]
    numbers = max(stages, key=lambda stage: sum(stage[kind] / cuts[kind] for kind in stage))
    numbers.update(norms=model.norm, tables=tables * model.vocab * model.dim)
    return {kind: (size / cuts[kind], layout.stage // cuts[kind]) for kind, size in numbers.items()}


def memory(model, layout, software, m):
    """{cause: bytes} on the fullest GPU. m: micro-batches of a step."""
    held, g = parameters_of_gpu(model, layout, software), software.gradient_bytes
    widths = {"weights": (software.weight_bytes, 3), "gradients": (g, 2),
              "optimizer": (software.master_bytes + software.moment_bytes, 1)}
    states = {cause: width * sum(size / (n if layout.zero >= stage else 1)
                                 for size, n in held.values())
              for cause, (width, stage) in widths.items()}
    of_muon = muon.numbers(model, layout, software, held)
    states["optimizer"] -= software.moment_bytes / 2 * of_muon      # it has one moment
    layer = layer_of_gpu(model, layout, software)
    if layout.zero == 3:                                # two layers are whole at a time, or a table
        whole = max(2 * layer, model.vocab * model.dim / layout.tp)
        states["weights"] += software.gathered_bytes * whole
    if layout.zero == 2 and layout.v > 1 and software.sums_runs:    # those of a slice are whole
        states["gradients"] += g * layer * math.ceil(model.layers / layout.pp) / layout.v

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
        """bytes/s of a GPU to one of so many ranks, by its network card if they leave a node."""
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
    layer's forward, of a micro-batch; over ep, where each sends to all, rows of its own tokens go
    to their experts and back. In backward it is as much. tp gathers latents where there are some,
    and sends nothing around experts: they, and shared ones, take each rank's own tokens."""
    t, cp, tokens, h = layout.tp, layout.cp, layout.tokens(model), model.dim
    keys = tokens * cp * model.keys * max(1 / t, 1 / model.kv_heads)
    ep, mlp = (layout.ep, 0) if model.experts > 1 else (1, 2)
    return {"tp": (tokens * ((model.latents or h) + h + mlp * h), t, 1, 2 + mlp),
            "cp": (keys, cp, t, 1), "ep": (2 * tokens / t * model.top_k * h, ep, 1, 2)}


def machines_of_token(model, machines):
    """On how many of so many machines the top_k experts of a token lie, if all choices are equally
    likely: of n experts, k are none of a machine's m in C(n - m, k) of C(n, k) choices."""
    m, k = math.ceil(model.experts / machines), model.top_k
    allowed = max(min(model.node_limit or machines, machines), math.ceil(k / m))
    return allowed * (1 - math.comb(allowed * m - m, k) / math.comb(allowed * m, k))


def seconds_of_rows(model, layout, machine):
    """Over ep, forward. What leaves a machine goes beside what stays on NVLink."""
    cluster, k = machine.cluster, model.top_k
    numbers, ep, _, calls = messages(model, layout)["ep"]
    machines = math.ceil(ep / cluster.per_node)
    far, near = k * (1 - 1 / machines), k * (1 / machines - 1 / ep)     # rows of a token
    if machine.software.two_hops:
        far, near = machines_of_token(model, machines) * (1 - 1 / machines), k * (1 - machines / ep)
    seconds = max(far / (cluster.nic * NIC), near / (cluster.nvlink * NVLINK)) * 2 * numbers / k
    return seconds + (calls * (cluster.nic_alpha if far else cluster.alpha) if ep > 1 else 0)


def layer_seconds(model, layout, machine):
    """{cause: seconds} of a layer for a micro-batch: forward, backward."""
    software, t, tokens = machine.software, layout.tp, layout.tokens(model)
    h, f, fp8, gates = model.dim, model.ffn, software.fp8, 2 if model.gated else 1
    (q, queries), (kv, keys) = model.projections
    keys *= max(1 / t, 1 / model.kv_heads)              # no head of keys is cut
    matrices = [(tokens, h, queries / t + keys, 1), (tokens, model.values / t, h, 1)]
    if model.latents:                                   # each rank makes those of its own tokens
        matrices[:1] = [(tokens / t, h, model.latents, 1), (tokens, q, queries / t, 1),
                        (tokens, kv, keys, 1)]
    routed, mine, wide = 0, tokens, f / t       # rows of experts; of an MLP, and how wide that is
    if model.experts > 1:
        routed, mine, wide = tokens / t * model.top_k, tokens / t, f * model.shared
        own = model.experts / layout.ep
        matrices += [(routed / own, h, gates * f, own), (routed / own, f, h, own)]
    matrices += [(mine, h, gates * wide, 1), (mine, wide, h, 1)] if wide else []
    forward = {"matmul": sum(machine.matmul(*shape, fp8) for shape in matrices)}
    backward = {"matmul": sum(machine.matmul(m, n, k, times, fp8)
                              + machine.matmul(k, m, n, times, fp8) for m, k, n, times in matrices)}

    # Two products forward. Backward four, and in a flash kernel the scores once more.
    heads, rows, d = layout.micro_batch * model.heads / t, model.seq / layout.cp, model.head
    products = (machine.matmul(rows, d + model.rope_dim, model.seq, heads)
                + machine.matmul(rows, model.seq, d, heads))
    score = heads * rows * model.seq / machine.bandwidth        # a byte of each
    dropout = 5 if software.dropout else 0
    forward["attention"] = products + (4 + dropout) * score
    backward["attention"] = 2 * products + (6 + dropout) * score
    if software.flash:                                  # half of a product's FLOPs
        rate = machine.cluster.peak * machine.cluster.attention / (heads * rows * model.seq)
        forward["attention"] = (2 * d + model.rope_dim) / rate
        backward["attention"] = (5 * d + 3 * model.rope_dim) / rate

    # Bytes of a number. Of the width: a norm 4 and 6, a residual 6 and 6, with dropout 7 and 11. A
    # row is sorted by its expert, and back, before it travels, too: 4 each time.
    width, hidden = tokens * h / t if layout.sp else tokens * h, routed * f + mine * wide
    rope = 4 * tokens * (model.queries + model.keys / 2) / t if model.gated else 0
    sorting = (8 if layout.ep == 1 else 16) * routed * h
    of_mlp = (6, 12 if software.swiglu_kept == 2 else 10) if model.gated else (4, 6)    # 2 again
    passes = (11, 17) if software.dropout else (10, 12)
    for part, of_width, of_hidden in zip((forward, backward), passes, of_mlp):
        moved = 2 * of_width * width + of_hidden * hidden + rope + sorting
        part["elementwise"] = moved / machine.bandwidth
    if fp8:                                             # casts: read 2, write 1 in each direction
        inputs, outputs = zip(*((m * k * times, m * n * times) for m, k, n, times in matrices))
        forward["elementwise"] += 4 * sum(inputs) / machine.bandwidth
        backward["elementwise"] += 4 * sum(outputs) / machine.bandwidth
    if not software.fused_gradients:
        moved = 4 + 2 * software.sent_bytes             # write and read one; its sum in and out
        backward["weights"] = moved * layer_of_gpu(model, layout, software) / machine.bandwidth

    rings, rows = messages(model, layout), seconds_of_rows(model, layout, machine)
    for part in (forward, backward) if rows and software.ep_hidden else ():
        for cause in ("matmul", "attention"):
            part[cause] /= 1 - software.ep_units
    other = (sum(forward.values()) + sum(backward.values())) / 2        # of another micro-batch
    sent = {axis: machine.ring(2 * rings[axis][0], *rings[axis][1:]) for axis in ("tp", "cp")}
    sent["ep"] = rows - min(software.ep_hidden * rows, other)
    hidden = software.tp_hidden_backward                # with sp all_gathers are left, half of all
    hidden = min(hidden, 0.5) if layout.sp and not software.tp_hidden else hidden
    for part, share in ((forward, software.tp_hidden), (backward, hidden)):
        part |= sent | {"tp": sent["tp"] - min(share * sent["tp"], part["matmul"])}
    if software.ring:                                   # backward: keys, values, their gradients
        forward["cp"] = max(0, sent["cp"] - forward["attention"])
        backward["cp"] = max(0, 2 * sent["cp"] - backward["attention"])
    return forward, backward


def bubble(layout, F, B, W):
    """The longest wait of a stage whose F, B and W of a micro-batch take so long (chapter 07)."""
    p, v = layout.pp, layout.v
    return {"1f1b": (p - 1) / v * (F + B + W), "zero-bubble": (p - 1) * (F + B - W),
            "dualpipe-v": (p - 1) / 2 * (F + 2 * B - W)}[layout.schedule]


def step_seconds(model, layout, cluster, software, batch):
    """{cause: seconds} of a step. batch: its sequences. The slowest stage sets the pace of all: the
    last one, which has the head, unless layers do not divide and it has one less than others."""
    machine, t, p = Machine(cluster, software), layout.tp, layout.pp
    m, layers = batch // (layout.dp * layout.micro_batch), math.ceil(model.layers / p)
    kinds, counts = zip(*layers_of_stage(model, layers))            # dense ones, and mixtures
    parts = zip(*[layer_seconds(kind, layout, machine) for kind in kinds])
    forward, backward = (add(*zip(part, counts)) for part in parts)
    tokens, columns = layout.tokens(model), model.vocab / t
    head = {"matmul": 3 * machine.matmul(tokens, model.dim, columns),
            "elementwise": 20 * tokens * columns / machine.bandwidth}   # loss, in float32
    if not software.fused_gradients:
        moved = 4 + 2 * software.sent_bytes
        head["weights"] = moved * model.dim * columns / machine.bandwidth
    again = {"none": {}, "full": forward,               # computed once more, in backward
             "selective": {} if software.flash else {"attention": forward["attention"]}}
    usual = add((forward, 1), (backward, 1), (again[layout.recompute], 1))
    last = add((usual, model.layers // p / layers), (head, 1))
    stage = max(last, usual, key=lambda part: sum(part.values()))
    if p > 1:
        size = 2 * tokens * model.dim
        message = size / t / machine.link(p * layout.stage)
        message += 0 if layout.sp else machine.ring(size, t, 1)     # scattered over tp, gathered
        stage["pp"] = usual["pp"] = 2 * layout.v * message

    # Bytes of a parameter, in every micro-batch and once a step: gradients g, weights w.
    held = parameters_of_gpu(model, layout, software).values()
    g, w = software.sent_bytes, software.gathered_bytes
    calls, there = layers / len(held), sum(forward.values())
    back = sum(usual.values()) - there

    def waits(compute, *widths):
        """For rings of so many bytes of each parameter, if this compute does not hide them."""
        sent = sum(machine.ring(width * size, n, layout.stage // n, calls)
                   for size, n in held for width in widths)
        return max(0, sent - software.dp_hidden * compute)

    run = p if layout.v > 1 and software.sums_runs else 1   # of micro-batches, which send one sum
    stage["dp"] = usual["dp"] = {2: waits(run * back, g) / run,
                                 3: waits(there, w) + waits(back, w, g)}.get(layout.zero, 0)
    seconds = add((stage, m))
    W = backward["matmul"] / 2
    seconds["bubble"] = bubble(layout, there, sum(usual.values()) - there - W, W)   # no head
    once = [(g, g), (g, w), (w,), ()][layout.zero]
    seconds["dp"] += waits(sum(backward.values()), *once)
    updated = sum(size / (n if layout.zero else 1) for size, n in held)
    seconds["optimizer"] = software.updated_bytes * updated / machine.bandwidth
    seconds["optimizer"] += muon.seconds([*zip(kinds, counts)], layout, machine)
    return seconds


def step_flops(model, batch, scores="all", recompute="none"):
    """FLOPs of a step by a convention. scores: "all" of attention, or the "causal" half."""
    weights, passes = model.weights_of_layers(model.top_k), 4 if recompute == "full" else 3
    columns = model.queries + model.values              # of both products
    attention = 2 * model.seq * columns * model.layers * (0.5 if scores == "causal" else 1)
    head = 2 * model.vocab * model.dim                  # never recomputed
    return batch * model.seq * (passes * (2 * weights + attention) + 3 * head)


# --------------------------------------------------------------------------------------- the search

CHOICES = {"recompute": ("none", "selective", "full"), "zero": range(4), "swiglu_kept": (2, 3, 4),
           "schedule": ("1f1b", "zero-bubble", "dualpipe-v"), "optimizer": ("adamw", "muon")}
ROOM = 0.92                     # of the memory: the rest is CUDA's, NCCL's, and fragments
ERROR = 1.25                    # the bytes are known within such a factor


def largest(part, count=4):
    """The largest causes, as shares of all."""
    first = sorted(part, key=part.get, reverse=True)[:count]
    return ", ".join(f"{cause} {part[cause] / sum(part.values()):.0%}" for cause in first)


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


def powers(limit):
    return [2**k for k in range(int(limit).bit_length())]


def degrees(model, cluster, software, gpus, fixed, most):
    """{degree: all that are tried}: powers of 2 (but pp's and v's), tp in a node; or `fixed`."""
    stages = [pp for pp in range(1, model.layers + 1) if gpus % pp == 0]
    slices = [v for v in range(1, 9) if any(-(-model.layers // pp) % v == 0 for pp in stages)]
    again = ("none", "full") if software.flash else ("none", "selective", "full")
    tried = {"tp": powers(min(8, cluster.per_node)), "cp": powers(max(1, model.seq // 4096)),
             "pp": stages, "v": slices, "ep": powers(min(model.experts, gpus)), "zero": range(4),
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


if __name__ == "__main__":
    from lab.planner import planning

    planning.program(sys.modules[__name__])
