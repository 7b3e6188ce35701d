r"""09 · 5D: data, tensor (with sequence), context, expert and pipeline parallelism in one run.

Each of the chapters before shares out one thing, and has one limit. Tensor parallelism stops at the
fast links of a machine, a pipeline at its bubble, data parallelism at the size of the batch. So a
large run multiplies them. This chapter trains one model with all of them, and switches each by its
degree:

    torchrun --nproc_per_node=8 09_5d.py --dp 2 --pp 2 --tp 2

    --dp    other sequences (chapter 02); --zero 1, 2 or 3 shards what all of them hold (chapter 03)
    --pp    other layers (chapter 07), by one of four schedules
    --cp    other parts of each sequence, in attention too (chapter 06, with gathered keys)
    --tp    other heads and hidden units (chapter 04); outside of the sub-layers, other tokens
            (sequence parallelism, chapter 05)
    --ep    of the ranks of dp, those that share the experts of a mixture (chapter 08)

The number of ranks is pp · dp · cp · tp; ep divides dp. What the earlier chapters built stands here
once more in its plainest form. What is new is how it fits together.

The mesh. Every rank has a place on each axis. With 8 ranks, --order pp,dp,cp,tp, and cp of 1:

                    tp 0      tp 1
    pp 0    dp 0    rank 0    rank 1
            dp 1    rank 2    rank 3
    pp 1    dp 0    rank 4    rank 5
            dp 1    rank 6    rank 7

The axis that is named last has neighbours. A machine of 4 ranks would hold one pp here, and only
what pp sends would leave it. A rank with T = b·s/cp tokens of a micro-batch sends on each axis, in
numbers (h: the model's dim, L: layers, M: micro-batches, Ψ: parameters, k: the width of the keys
that it holds; the other letters are the degrees)

    tp      M · L/pp · 8 · (tp-1)/tp · T·h     all_gathers and reduce_scatters around sub-layers
    cp      M · L/pp · 4 · (cp-1) · T·k        keys and values, and their gradients
    ep      M · L/pp · 4 · (ep-1)/ep · K·T·h   rows to K experts and back, if all are chosen alike
    pp      M · T·h/tp                         an activation or a gradient, to each neighbour stage
    dp      2 · (n-1)/n · Ψ                    once a step; of what n ranks hold

tp sends most, and compute waits for it in every layer: so it comes last, inside a machine. cp and
ep send in every layer too, but less (DeepSeek-V3 lets its experts lie on 8 machines). pp usually
sends least. dp sends once a step, and can do it while others compute. So these two are the outer
axes: Megatron puts pp outermost, and Llama 3 dp.

The report has the bytes of each axis, whether the axis leaves a machine of --node-size ranks, and
how long sending would take on known machines. Try `--order tp,cp,dp,pp`: it trains the same, and tp
goes between machines.

One rule for gradients. Every rank divides its loss by the valid targets of the whole batch. Then
a gradient is summed over all ranks that hold the same part of the parameter, since each of them has
seen other tokens. Nothing is divided after that. How a parameter is cut says which ranks those are:

                                   pp        tp         ep       held by, and summed over
    embedding, head                a stage   whole      whole    dp · cp · tp ranks
    LayerNorms, router             a stage   whole      whole    dp · cp · tp
    q, o, up, down                 a stage   cut        whole    dp · cp
    k, v                           a stage   kv heads   whole    dp · cp · (ranks of a kv head)
    experts                        a stage   cut        cut      dp/ep · cp
    embedding = head (tied)        2 stages  whole      whole    2 · dp · cp · tp

So the ranks of a sum are no axis of the mesh. What tp leaves whole is summed over tp as well: under
sequence parallelism, each rank of tp has seen other tokens of the sequence. (Tied tables lie on one
rank, not two, where that rank has the first and the last stage, as in dualpipe-v.)

One record, the cuts of each parameter, gives these groups. It also gives the norm: a parameter that
n ranks hold adds 1/n of its square on each of them, and the sum over all ranks counts it once. It
gives ZeRO its shards: those who hold the same part share it out. And it tells what to compare with
one GPU, or to save: each rank's part of the whole.

ZeRO and the pipeline. Gradients are reduced once a step, after the last micro-batch: until then
they add up in full, which leaves little to gain by stage 2. Stage 3 must gather parameters before
they are used. It keeps them until the step ends. With --regather it gathers them for every forward
and backward of each micro-batch, one module at a time: 2·M gathers of a parameter instead of one.

Where axes meet, prototypes have gone wrong:

    tp and experts   The router is whole on each rank of tp, and sees that rank's tokens alone.
                     Tokens, choices and gates are gathered after it. Then every rank of tp has a
                     slice of each expert.
    cp and balance   The balance loss is about a sequence, which lies on cp · tp ranks. So they sum
                     how often each expert was picked, before that is multiplied by the scores.
    pp and tp        Each rank of tp sends its own tokens to the next stage, 1/tp of the activation.
                     Megatron scatters it for that and gathers it again; under sequence parallelism
                     it is scattered already.
    pp and ties      The first and the last stage hold one matrix. Both are in its sum.
    NCCL             Every rank makes all groups, in the same order.

How to choose. First make it fit, then make it fast. Take tp up to the size of a machine, or until
the heads run out. If the model still does not fit, take pp, or ZeRO-3 over dp. If sequences are
long, take cp. If there are experts, take ep. All other ranks go to dp, until the batch is as large
as it may be. Published runs did about this:

                    GPUs     tp   cp   pp   dp    ep
    llama3-8k       8,192    8    1    16   64    -     parameters stay gathered after forward
    llama3-128k     16,384   8    16   16   8     -     keys are gathered, as here
    deepseek-v3     2,048    1    1    16   128   64    ZeRO-1, DualPipe
    megatron-1t     3,072    8    1    64   6     -     interleaved

`--like` runs their axes on 8 or 16 ranks (llama3-128k on 8 is without dp). It is not their models:
DeepSeek-V3 routes by sigmoids, with a shared expert and a bias, and its pipeline is no V;
Megatron's run had no sequence parallelism yet.

Run it:
    torchrun --nproc_per_node=8 09_5d.py --dp 2 --pp 2 --tp 2
    torchrun --nproc_per_node=8 09_5d.py --pp 2 --cp 2 --tp 2 --schedule zb-h1
    torchrun --nproc_per_node=8 09_5d.py --dp 4 --ep 4 --pp 2 --experts 8
    torchrun --nproc_per_node=8 09_5d.py --dp 4 --tp 2 --zero 3
    torchrun --nproc_per_node=8 09_5d.py --like llama3-128k
    torchrun --nproc_per_node=8 09_5d.py --dp 2 --pp 2 --tp 2 --variant torch

Sources: Ultra-Scale Playbook, "5D Parallelism in a Nutshell" and "Finding the Best Training
Configuration"; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
(PTD-P, 2021), sections 3 and 4.1; Llama Team, The Llama 3 Herd of Models (2024), section 3.3 and
table 4; DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.
"""

import argparse
import contextlib
import functools
import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

import common
from common import (
    Config,
    clip_grads,
    draw_weights,
    gpt,
    grad_norm,
    keep_shard,
    loss_sum,
    sum_partial_grads,
)

# ----------------------------------------------------------------------------------------- the mesh

class Place(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


def places_of_ranks(args):
    """The Place of every rank. args.order: of the axes; along the last, ranks are neighbours."""
    order = args.order.split(",")
    every = itertools.product(*(range(getattr(args, axis)) for axis in order))
    return [Place(**dict(zip(order, indices))) for indices in every]


def group_by(places, key):
    """The process group of all ranks whose place has the same key(place) as this one's. Every rank
    makes all of the groups, in the same order: NCCL would hang otherwise."""
    members = defaultdict(list)
    for rank, place in enumerate(places):
        members[key(place)].append(rank)
    return dist.new_subgroups_by_enumeration(list(members.values()))[0]


def make_groups(args, tied_stages):
    """The group along each axis, and of those that hold the same: {(tp, ep) parts: the ranks with
    the same part of what is cut into so many}. tied_stages: the first and the
    last one, on two ranks of pp, hold one matrix."""
    places, t, ep, holders = places_of_ranks(args), args.tp, args.ep, {}
    axes = {
        "tp": group_by(places, lambda at: (at.pp, at.dp, at.cp)),
        "cp": group_by(places, lambda at: (at.pp, at.dp, at.tp)),
        "ep": group_by(places, lambda at: (at.pp, at.dp // ep, at.cp, at.tp)),
        "pp": group_by(places, lambda at: (at.dp, at.cp, at.tp)),
        "cp and tp": group_by(places, lambda at: (at.pp, at.dp)),   # with the same sequences
    }
    for of_tp, of_ep in sorted({(1, 1), (t, 1), (min(t, args.model.kv_heads), 1), (t, ep)}):
        holders[of_tp, of_ep] = group_by(places, lambda at, of_tp=of_tp, of_ep=of_ep: (
            at.pp, at.tp * of_tp // t, at.dp % of_ep))
    if tied_stages:
        holders["tied"] = group_by(places, lambda at: min(at.pp, args.pp - 1 - at.pp))
    return axes, holders


# ------------------------------------------------------------ sequence parallelism, from chapter 05

def all_gather(x, group):
    """x (batch, seq/t, ...) of all ranks: (batch, seq, ...)."""
    parts = x.new_empty(group.size(), *x.shape)
    common.all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
    return parts.transpose(0, 1).flatten(1, 2).contiguous()


def reduce_scatter(x, group):
    """The sum of x (batch, seq, ...) over the ranks: this rank's part, (batch, seq/t, ...)."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    common.reduce_scatter(mine, parts.flatten(0, 1), group=group)
    return mine


class GatherIn(torch.autograd.Function):
    """f: all_gather along the sequence; the gradient is reduce_scattered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return reduce_scatter(gradient, ctx.group), None


class ScatterOut(torch.autograd.Function):
    """g: reduce_scatter along the sequence; the gradient is all_gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return all_gather(gradient, ctx.group), None


class SequenceParallel(nn.Module):
    """A sub-layer between f and g: gather the sequence, compute with 1/t of the heads, scatter."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x):                               # (batch, seq/t, dim)
        partial = self.inner(GatherIn.apply(x, self.group))
        return ScatterOut.apply(partial, self.group)


# ------------------------------------------------------------- context parallelism, from chapter 06

def positions_of(rank, ranks, seq):
    """Of 2N chunks of the sequence, a rank has one from the front and one from the back: then all
    ranks have as many pairs of a query and a key that it may see. Ascending, int64 (seq/N,)."""
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]]) if ranks > 1 else torch.arange(seq)


class GatheredAttention(nn.Module):
    """Causal attention of this rank's queries to the keys and values of all ranks, which are
    gathered (as Llama 3 does it): it is no ring, but it takes any mask.

    q (batch, heads, s/N, head_dim), k and v (batch, kv_heads, s/N, head_dim); returns q's shape.
    """

    def __init__(self, cfg, group, dtype):
        super().__init__()
        self.group, self.fused = group, cfg.attention == "sdpa"
        of_ranks = [positions_of(rank, group.size(), cfg.seq) for rank in range(group.size())]
        comes_after = torch.cat(of_ranks) > of_ranks[group.rank()][:, None]         # (s/N, s)
        mask = torch.where(comes_after, -torch.inf, 0.0).to(dtype)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, q, k, v):
        both = torch.cat([k, v], dim=1).transpose(1, 2)             # (batch, s/N, ...)
        k, v = GatherIn.apply(both, self.group).transpose(1, 2).chunk(2, dim=1)
        if self.fused:
            gqa = q.shape[1] != k.shape[1]
            return F.scaled_dot_product_attention(q, k, v, self.mask, enable_gqa=gqa)
        by_key = (*k.shape[:2], -1)                     # the heads that share a key, stacked
        scores = (q * q.shape[-1] ** -0.5).reshape(*by_key, q.shape[-1]) @ k.transpose(2, 3)
        weights = (scores.view(*q.shape[:3], -1) + self.mask).softmax(-1)           # (..., s/N, s)
        return (weights.view(*by_key, weights.shape[-1]) @ v).view(q.shape)


# -------------------------------------------------------------- expert parallelism, from chapter 08

@dataclass(frozen=True)
class Mixture(Config):
    """The shape of a model whose MLPs may be mixtures of experts: where `experts` is not 0."""

    experts: int = 0
    top_k: int = 2
    balance_weight: float = 0.01
    sequences: int = 1              # of the whole batch: the balance loss is a mean over them

    def parameters(self):
        """In place of the MLP, a router and all experts, each as large as the MLP."""
        more = self.experts * (8 * self.dim + 1) * self.dim - 8 * self.dim**2
        return super().parameters() + (self.layers * more if self.experts else 0)

    def tensors(self):
        return super().tensors() + (self.layers if self.experts else 0)


class AddLoss(torch.autograd.Function):
    """Gives x back, and in backward a gradient of 1 to `loss`: as if it were added to the loss."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.like)


class AllToAll(torch.autograd.Function):
    """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, and so on; received: how
    many come from each. The gradient goes the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class MoE(nn.Module):
    """A mixture of experts in place of the MLP: (batch, seq, dim) to the same shape.

    tp, ep, sequence: process groups, or None for one GPU. The router sees this rank's tokens; under
    tp they are gathered behind it, for experts of which each rank has a part. seen: a list for how
    many rows were sent and received.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.tp, self.ep, self.sequence, self.seen = cfg, None, None, None, []
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.dim, 4 * cfg.dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, 4 * cfg.dim, cfg.dim))

    def forward(self, x):                               # (batch, seq/(cp·tp), dim)
        chosen, gates = self.route(x)
        if self.tp:
            x, gates = GatherIn.apply(x, self.tp), GatherIn.apply(gates, self.tp)
            chosen = all_gather(chosen, self.tp)
        out = self.through_experts(x, chosen, gates)
        return ScatterOut.apply(out, self.tp) if self.tp else out

    def route(self, x):
        """The experts of each token and their gates, (batch, seq, k) each; in float32 or better."""
        cfg, precise = self.cfg, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))    # (batch, seq, experts)
        scores = logits.softmax(-1)
        in_order = scores.detach().sort(dim=-1, descending=True, stable=True).indices
        chosen = in_order[..., :cfg.top_k].clone()      # the rest can go
        gates = scores.gather(-1, chosen)
        if cfg.top_k > 1:                               # over their sum
            gates = logits.gather(-1, chosen).softmax(-1)

        picks = scores.new_zeros(len(x), cfg.experts)   # how often, in each sequence
        picks.scatter_add_(1, chosen.flatten(1), torch.ones_like(gates.detach()).flatten(1))
        if self.sequence:                               # of all of it, which lies on several ranks
            dist.all_reduce(picks, group=self.sequence)
        share = picks / (cfg.seq * cfg.top_k)
        balance = cfg.experts / cfg.seq * (share * scores.sum(1)).sum()
        return chosen, AddLoss.apply(gates, cfg.balance_weight / cfg.sequences * balance)

    def through_experts(self, x, chosen, gates):
        """Sort the rows by expert, send them through it, and add up what comes, by gate."""
        expert = chosen.flatten()                       # of each pick
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.cfg.experts, dtype=torch.int64, device=x.device)
        counts.index_add_(0, expert, torch.ones_like(expert))
        rows = x.flatten(0, 1)[order // self.cfg.top_k]
        out = self.exchange(rows, counts)[order.argsort()]          # by token again
        out = out.view(*chosen.shape, -1) * gates[..., None]        # (batch, seq, k, dim)
        return out.sum(2).to(x.dtype)

    def compute(self, rows, counts):
        """rows, sorted by expert; counts: how many are for each of this rank's experts, a list."""
        parts = zip(rows.split(counts), self.up, self.down, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])

    def take_seen(self):
        """For each micro-batch since it was last asked: how many rows were sent, and received."""
        seen, self.seen = self.seen, []
        return seen

    def exchange(self, rows, counts):
        """Rows travel to their experts, and what these give travels back: all_to_alls of counts,
        of rows, and of what comes back."""
        if self.ep is None:
            self.seen.append((len(rows), len(rows)))
            return self.compute(rows, counts.tolist())
        n = self.ep.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.ep)
        arriving = arriving.view(n, -1)                 # from each rank, for each expert here
        sizes = torch.cat([counts.view(n, -1).sum(1), arriving.sum(1), arriving.sum(0)])
        sizes = sizes.tolist()                          # here the host waits for the device
        sent, received, own = sizes[:n], sizes[n:2 * n], sizes[2 * n:]
        self.seen.append((sum(sent), sum(received)))

        rows = AllToAll.apply(rows, sent, received, self.ep)
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(n)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order = expert.argsort(stable=True)
        out = self.compute(rows[order], own)[order.argsort()]       # by rank again
        return AllToAll.apply(out, received, sent, self.ep)


def build(cfg, seed=0, device="cpu", dtype=torch.float32):
    """common.gpt, where cfg says so with mixtures of experts."""
    model = gpt(cfg, seed=None)
    for block in model[1:-1] if cfg.experts else []:
        block.mlp = MoE(cfg)
    common.name_parameters(model)
    return model if seed is None else draw_weights(model, seed, device, dtype)


# --------------------------------------------------------------------- one rule: who sums with whom

def cut_model(model, cfg, axes, dtype):
    """Cut the modules of a pipeline stage over tp and ep, and put in what cp, tp and ep need."""
    tp, cp, ep = axes["tp"], axes["cp"], axes["ep"]
    t, core = tp.size(), GatheredAttention(cfg, cp, dtype)
    positions = positions_of(cp.rank(), cp.size(), cfg.seq)
    for name, block in model.named_children():
        if not name.startswith("block"):
            continue                                    # embedding and head are whole everywhere
        attn, mlp = block.attn, block.mlp
        if cp.size() > 1:
            attn.core, attn.rope.positions = core, positions
        if cfg.experts:
            keep_shard(mlp, "up", 0, ep), keep_shard(mlp, "down", 0, ep)
            mlp.ep = ep if ep.size() > 1 else None
            mlp.sequence = axes["cp and tp"] if axes["cp and tp"].size() > 1 else None
        if t > 1:
            for linear in (attn.k, attn.v):
                keep_shard(linear, "weight", 0, tp, parts=min(t, cfg.kv_heads))
            keep_shard(attn.q, "weight", 0, tp), keep_shard(attn.o, "weight", 1, tp)
            block.attn = SequenceParallel(attn, tp)
            if cfg.experts:                             # of each expert a part; the router is whole
                keep_shard(mlp, "up", 2, tp), keep_shard(mlp, "down", 1, tp)
                mlp.tp = tp
            else:
                keep_shard(mlp.up, "weight", 0, tp), keep_shard(mlp.down, "weight", 1, tp)
                block.mlp = SequenceParallel(mlp, tp)


def note_holders(parameters, axes, holders):
    """Note on each parameter whose gradients are summed: those of all ranks that hold the same part
    of it, since each has seen other tokens. For the norm, they are also its copies."""
    for p in parameters:
        parts = {cut.axis: cut.parts for cut in getattr(p, "cuts", ())}
        p.holders = holders[parts.get(axes["tp"], 1), parts.get(axes["ep"], 1)]
        if "tied" in holders and p.global_name == "embedding.weight":
            p.holders = holders["tied"]
        p.copies = p.holders.size()
        if p.copies > 1:
            p.partial = p.holders


# ---------------------------------------------------------------------------- ZeRO, from chapter 03

class Unit:
    """Parameters that the same ranks hold, as one flat tensor, of which each of these ranks updates
    one shard. full: (N·k,), of which every parameter is a view. shard: (k,). grad: (k,), this
    rank's part of the summed gradient. stage: 1 shards optimizer states, 2 gradients too, 3 all."""

    def __init__(self, parameters, stage):
        self.parameters, self.stage = parameters, stage
        self.group, self.copies = parameters[0].holders, 1      # each number is in one shard
        self.padding = -sum(p.numel() for p in parameters) % self.group.size()
        self.full = self.flatten([p.detach() for p in parameters])
        for p, view in zip(parameters, self.views(self.full)):
            p.data = view
        self.shard = nn.Parameter(self.part_of(self.full))
        self.shard.flat = parameters, self.group.rank() * len(self.shard)   # for a checkpoint
        if stage == 3:
            self.shard.data = self.shard.data.clone()
            self.free()

    def part_of(self, flat):
        return flat.chunk(self.group.size())[self.group.rank()]

    def flatten(self, tensors):
        """A new tensor, (N·k,), of tensors in the shapes of the parameters."""
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(self.padding)])

    def views(self, flat):
        """The reverse: views into a flat tensor in the shapes of the parameters."""
        flats = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [flat.view(p.shape) for flat, p in zip(flats, self.parameters)]

    def gather(self):
        """An all_gather of what was freed: what autograd has saved of it shows it again."""
        if not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self.full.nbytes)
            common.all_gather(self.full, self.shard.data, group=self.group)

    def free(self):
        self.full.untyped_storage().resize_(0)

    def reduce(self):
        """After the last backward: a reduce_scatter of the gradients, in place."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat = self.flatten(grads)
        self.grad = self.part_of(flat)
        common.reduce_scatter(self.grad, flat, group=self.group)
        for p, view in zip(self.parameters, self.views(flat)):
            p.grad = view if self.stage == 1 else None
        if self.stage > 1:
            self.grad = self.grad.clone()               # so that all else can go

    def spread(self):
        """After the update: an all_gather of the shards, unless parameters are sharded as well."""
        if self.stage == 3:
            self.free()
        else:
            common.all_gather(self.full, self.shard.data, group=self.group)


def make_units(model, stage):
    """{module of the list: its parameters as units, one for each group of holders}. What two
    modules share belongs to the first."""
    units, seen = {}, set()
    for module in itertools.chain(*model):
        by_group = defaultdict(list)
        for p in module.parameters():
            if p not in seen:
                by_group[p.holders].append(p)
                seen.add(p)
        units[module] = [Unit(parameters, stage) for parameters in by_group.values()]
    return units


# ------------------------------------------------------------ pipeline parallelism, from chapter 07

class Action(NamedTuple):
    """F: forward of a micro-batch through a stage. B: backward to its input; W: to its weights; BW:
    both at once."""

    kind: str
    stage: int
    micro_batch: int


def one_forward_one_backward(rank, p, m, v):
    """1f1b, and interleaved, whose ranks have v slices: some forwards first, then in turn."""
    def order(kind, slices):
        return [Action(kind, slice * p + rank, i) for first in range(0, m, p)
                for slice in slices for i in range(first, min(first + p, m))]

    forwards, backwards = order("F", range(v)), order("BW", range(v)[::-1])
    ahead = p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + (v - 1) * p
    actions = forwards[:ahead]
    for i, backward in enumerate(backwards):
        actions += [*forwards[ahead + i:ahead + i + 1], backward]
    return actions


def zero_bubble(rank, p, m):
    """zb-h1: F is p-1-r micro-batches ahead of B on rank r, and W is r behind it."""
    f, b, w = ([Action(kind, rank, i) for i in range(m)] for kind in "FBW")
    ahead, behind = p - 1 - rank, rank
    actions = f[:ahead]
    for i in range(m + behind):
        actions += f[ahead + i:ahead + i + 1] + b[i:i + 1]
        actions += w[i - behind:i - behind + 1] if i >= behind else []
    return actions


def dual_pipe_v(rank, p, m):
    """dualpipe-v: rank r has stage `near`, the r-th from the front, and `far`, from the back."""
    near, far, after = rank, 2 * p - 1 - rank, p - 1 - rank
    actions, late, count = [], [], Counter()

    def add(kind, stage):
        actions.append(Action(kind, stage, count[kind[0], stage]))
        count[kind[0], stage] += 1
        if kind == "B":
            late.append(actions[-1]._replace(kind="W"))

    for _ in range(2 * after):                          # 1: the way to the turn fills
        add("F", near)
    for _ in range(rank + 1):                           # 2: the first ones come back
        add("F", near), add("F", far)
    for _ in range(after):                              # 3: and so do gradients; W fills a hole
        add("B", far), actions.append(late.pop(0)), add("F", far)
    for _ in range(m - 2 * p + rank + 1):               # 4: one way and the other
        add("F", near), add("BW", far), add("F", far), add("BW", near)
    for _ in range(after):                              # 5: no more come in
        add("BW", far), add("F", far), add("BW", near)
    for i in range(2 * rank + 2):                       # 6: backward alone; the last half without W
        add("BW" if i <= rank else "B", near if i % 2 else far)
    for _ in range(after):                              # 7: the last gradients
        actions.append(late.pop(0)), add("B", near)
    return actions + late                               # 8: all W that are left


class Schedule(NamedTuple):
    """actions: a list for each rank. ranks: of each stage, the rank that holds it."""

    actions: list
    ranks: list

    def needs(self, action):
        """The outputs without which an action cannot start: names (F or B, stage, micro-batch)."""
        kind, stage, i = action
        if kind == "F":
            return [("F", stage - 1, i)] if stage else []
        if kind == "W":
            return [("B", stage, i)]
        is_last = stage + 1 == len(self.ranks)
        return [("F", stage, i)] if is_last else [("F", stage, i), ("B", stage + 1, i)]

    def receiver(self, action):
        """The rank that needs what this action computes, if there is one."""
        to = action.stage + {"F": 1, "B": -1}.get(action.kind[0], len(self.ranks))
        return self.ranks[to] if 0 <= to < len(self.ranks) else None


SCHEDULES = "1f1b", "interleaved", "zb-h1", "dualpipe-v"


def make_schedule(name, p, m):
    ranks = list(range(p))
    if name == "dualpipe-v":
        return Schedule([dual_pipe_v(rank, p, m) for rank in ranks], ranks + ranks[::-1])
    if name == "zb-h1":
        return Schedule([zero_bubble(rank, p, m) for rank in ranks], ranks)
    v = 2 if name == "interleaved" else 1
    return Schedule([one_forward_one_backward(rank, p, m, v) for rank in ranks], v * ranks)


class Message(NamedTuple):
    """An output on its way to the rank that needs it."""

    output: tuple
    sender: int
    receiver: int


def make_programs(schedule):
    """A program for each rank: its actions, and between them lists of messages to post at once.

    Simulates the schedule, where a BW takes two units of time and the others one. An action stands
    where it ends, and a message where its output is there, on both of its ranks: so one that comes
    while the receiver works is posted before that work. Raises ValueError if ranks wait for each
    other.
    """
    left = [list(actions) for actions in schedule.actions]
    programs, done, running, time = [[] for _ in left], set(), {}, 0
    while any(left):
        for rank, actions in enumerate(left):
            if actions and rank not in running and done.issuperset(schedule.needs(actions[0])):
                running[rank] = time + len(actions[0].kind)
        if not running:
            raise ValueError("ranks wait for each other")
        time += 1
        ended = [rank for rank, end in running.items() if end == time]
        for rank in ended:
            programs[rank].append(left[rank].pop(0))
            done.add(output_of(programs[rank][-1]))
            del running[rank]
        for sender, action in [(rank, programs[rank][-1]) for rank in ended]:
            receiver = schedule.receiver(action)
            for rank in (sender, receiver) if receiver not in (None, sender) else ():
                if not programs[rank] or isinstance(programs[rank][-1], Action):
                    programs[rank].append([])
                programs[rank][-1].append(Message(output_of(action), sender, receiver))
    return programs


def output_of(action):
    """The name of what it computes; a gradient's is the same, be it from a B or a BW."""
    return action.kind[0], action.stage, action.micro_batch


class LinearInHalves(torch.autograd.Function):
    """y = x Wᵀ. Backward gives x's gradient now, and leaves (W, x, dy) in the list `later`."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x)
        ctx.weight, ctx.later = weight, later
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        ctx.later.append((ctx.weight, x.detach(), dy.contiguous()))     # no view of more than dy
        return dy @ ctx.weight, None, None


class Stage:
    """A slice of the model, and what it keeps of each micro-batch from one action to the next.

    Every module of the slice reads a detached input, so that its backward is ours to call: under
    ZeRO-3, between a gather and, with `regather`, a free. in_halves: B and W come apart; what is no
    linear (LayerNorms, the embedding, experts) is computed in B.
    """

    def __init__(self, modules, units, is_last, in_halves, regather):
        self.modules, self.units, self.is_last, self.regather = modules, units, is_last, regather
        self.for_b, self.for_w, self.later = {}, {}, []
        for linear in modules.modules() if in_halves else []:
            if isinstance(linear, nn.Linear):
                linear.forward = functools.partial(self.linear, linear)

    def linear(self, linear, x):
        return LinearInHalves.apply(x, linear.weight, self.later)

    @contextlib.contextmanager
    def gathered(self, module):
        """Around the forward or backward of a module: all of its parameters."""
        for unit in self.units.get(module, []):
            unit.gather()
        yield
        for unit in self.units.get(module, []) if self.regather else []:
            unit.free()

    def forward(self, i, x, targets, valid):
        """x: tokens (b, s), or activations (b, s, h). Returns activations, or in the last stage
        this rank's part of the micro-batch's loss."""
        graphs = []
        for module in self.modules:
            x = x.detach().requires_grad_(x.is_floating_point())
            with self.gathered(module):
                out = module(x)
            if self.is_last and module is self.modules[-1]:
                out = loss_sum(out, targets) / valid
            graphs.append((x, get_gradient_edge(out)))  # where backward begins: out can be freed
            x = out
        self.for_b[i] = graphs
        return x.detach()

    def backward(self, i, gradient):
        """gradient: of the output, or None for the loss. Returns that of the input."""
        graphs = self.for_b.pop(i)
        for module in reversed(self.modules):
            x, edge = graphs.pop()
            with self.gathered(module):
                torch.autograd.backward(edge, gradient)
            gradient = x.grad
        self.for_w[i] = self.later.copy()
        self.later.clear()
        return gradient

    def weights(self, i):
        for weight, x, dy in self.for_w.pop(i):
            gradient = dy.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


class Output(NamedTuple):
    """An activation or a gradient: computed here, or on its way from another rank or to it (then it
    must stay alive until it has left)."""

    tensor: torch.Tensor
    handle: dist.Work | None = None                     # None: computed here

    def wait(self):
        if self.handle:
            self.handle.wait()
        return self.tensor


class Pipeline(NamedTuple):
    """What a rank needs for a step. stages: {number: Stage}, its own. empty(): room for a message.
    positions: of this rank's tokens in a sequence. timed(action, kept): around each action."""

    schedule: Schedule
    program: list
    stages: dict
    group: dist.ProcessGroup
    empty: Callable
    positions: torch.Tensor
    timed: Callable


def post(batch, pipeline, outputs, leaving):
    """Start all messages of a batch at once. outputs: {name: Output}, from which what is sent is
    taken. leaving: what is being sent."""
    group, operations = pipeline.group, []
    for message in batch:
        if message.sender == group.rank():
            how, tensor, peer = dist.isend, outputs.pop(message.output).tensor, message.receiver
        else:
            how, tensor, peer = dist.irecv, pipeline.empty(), message.sender
        operations.append(dist.P2POp(how, tensor, group=group, group_peer=peer))

    handles = dist.batch_isend_irecv(operations)
    if len(handles) < len(batch):                       # NCCL has one for all, gloo one for each,
        handles *= len(batch)                           # which must not be waited for twice
    for message, operation, handle in zip(batch, operations, handles):
        under_way = Output(operation.tensor, handle)
        if message.sender == group.rank():
            leaving.append(under_way)
        else:
            outputs[message.output] = under_way


def execute(pipeline, micro_batches, valid):
    """Walk through this rank's program. Returns its part of the loss, a scalar."""
    outputs, leaving = {}, []
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)
    for step in pipeline.program:
        if not isinstance(step, Action):
            leaving = [sent for sent in leaving if not sent.handle.is_completed()]  # gloo: never
            post(step, pipeline, outputs, leaving)
            continue
        kind, number, i = step
        stage, mine = pipeline.stages[number], (slice(None), pipeline.positions)
        given = [outputs.pop(need).wait() for need in pipeline.schedule.needs(step)
                 if need[1] != number]                  # of another stage: one, or none
        with pipeline.timed(step, (stage.for_b, stage.for_w)):
            if kind == "F":
                tokens, targets = micro_batches[i]      # (b, s), of which this rank takes its part
                out = stage.forward(i, *(given or [tokens[mine]]), targets[mine], valid)
            if "B" in kind:
                out = stage.backward(i, *(given or [None]))
            if "W" in kind:
                stage.weights(i)
        if kind == "F" and stage.is_last:
            total += out
        elif kind != "W":
            outputs[output_of(step)] = Output(out)
    for sent in leaving:
        sent.wait()
    return total


# ------------------------------------------------------------------------------------------- a step

def train_step(pipeline, model, units, optimizer, micro_batches, valid, clip):
    """One step. Returns this rank's part of the loss, and the norm over all ranks.

    model: all that this rank holds. units: its ZeRO units, or none. micro_batches: pairs of tokens
    and targets, (b, s) each, of this rank's dp. valid: the valid targets of the whole batch.
    Communication: that of the modules and between stages; the sums of gradients over those who hold
    them; one number for the norm; under ZeRO, the updated parameters.
    """
    for p in (*model.parameters(), *units):
        p.grad = None
    loss = execute(pipeline, micro_batches, valid)

    for unit in units:
        unit.reduce()
    if not units:
        sum_partial_grads(model.parameters())
    held = units or list(model.parameters())
    norm = grad_norm(held, dist.group.WORLD)            # of all ranks, each number once
    if clip:
        clip_grads(held, norm, clip)

    for unit in units:
        unit.shard.grad = unit.grad
    optimizer.step()
    for unit in units:
        unit.spread()
    return loss, norm


# ------------------------------------------------------------------------------------ the formulas
# The model is a list of modules, and so is what they cost on a rank. A stage is a slice of it.

def balanced(layers, depth):
    """The slices (start, end) of the model's list, one for each stage: as many blocks in each, and
    one more in the first ones; the embedding in the first, and the head in the last."""
    blocks = [layers // depth + (stage < layers % depth) for stage in range(depth)]
    ends = [1 + sum(blocks[:stage]) for stage in range(1, depth)]
    return list(zip([0, *ends], [*ends, layers + 2]))


def kv_width(cfg, t):
    """Of keys, or of values, on a rank: one head at least."""
    return cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)


def numbers(cfg, t, ep, tied_stages=False):
    """Parameters of each module on a rank: {(tp, ep) parts that they are cut into: how many}."""
    h, table, block = cfg.dim, cfg.vocab * cfg.dim, Counter()
    block[1, 1] += 4 * h + cfg.experts * h              # LayerNorms; the router
    block[t, 1] += 2 * h * h // t                       # q and o
    block[min(t, cfg.kv_heads), 1] += 2 * h * kv_width(cfg, t)
    block[t, ep if cfg.experts else 1] += 8 * h * h * max(cfg.experts // ep, 1) // t
    first, last = Counter({(1, 1): table}), Counter({(1, 1): 2 * h + table})
    if cfg.tie:                                         # one matrix at both ends
        last = Counter({(1, 1): 2 * h})
    if tied_stages:
        first, last = Counter(tied=table), last + Counter(tied=table)
    return [first, *[block] * cfg.layers, last]


def tensors(cfg, tied_stages=False):
    """How many there are in each module."""
    return [1, *[11 if cfg.experts else 10] * cfg.layers, 2 if cfg.tie and not tied_stages else 3]


def state_bytes(modules, count, holders, zero, optimizer, e):
    """Bytes of parameters, gradients and optimizer states on a rank, after a step. modules: its
    `numbers`. count: of its tensors. holders: {parts: how many ranks hold the same}."""
    units = [(size, holders[parts]) for module in modules for parts, size in module.items()]
    if zero == 0:
        size = sum(size for size, _ in units)
        return [size * e, size * e, common.optimizer_state_bytes(optimizer, size, count, e)]
    shards = sum(-(-size // n) for size, n in units)
    whole = sum(-(-size // n) * n for size, n in units)
    return [(shards if zero == 3 else whole) * e, (whole if zero == 1 else shards) * e,
            common.optimizer_state_bytes(optimizer, shards, len(units), e)]


def gradient_traffic(modules, holders, zero, gathers, e):
    """What a rank sends in a step for gradients and parameters, to those who hold the same parts:
    {parts: {op: (calls, bytes of payload, bytes on the wire)}}. gathers: of a unit, by zero 3."""
    sent = {}
    for parts, n in holders.items():
        sizes = [module[parts] for module in modules if module[parts]]
        calls, share = len(sizes), (n - 1) / n
        if zero == 0:
            size = sum(sizes) * e
            sent[parts] = {"all_reduce": (1, size, 2 * share * size)} if calls and n > 1 else {}
        else:
            size, times = sum(-(-size // n) * n for size in sizes) * e, gathers if zero == 3 else 1
            sent[parts] = {"reduce_scatter": (calls, size, share * size),
                           "all_gather": (times * calls, times * size, times * share * size)}
    return sent


def axis_traffic(cfg, b, cp, t, ep, e, passes, rows):
    """What a rank sends in its blocks, forward and backward: {axis: {op: (calls, payload, wire)}}.
    passes: of a micro-batch of b sequences through a block. rows: sent to experts and received from
    others, in all of them."""
    tokens, accurate = b * cfg.seq // cp, max(e, 4)
    picks = tokens * cfg.top_k if cfg.experts else 0    # who is chosen, by which gates
    around = 4 * tokens * cfg.dim * e                   # two sub-layers, forward and backward
    kv = 2 * b * cfg.seq * kv_width(cfg, t) * e
    loads, counts = b * cfg.experts * accurate, 8 * cfg.experts
    sent = {"tp": (t, {"all_gather": (6 if picks else 4, around + (8 + accurate) * picks),
                       "reduce_scatter": (5 if picks else 4, around + accurate * picks)}),
            "cp": (cp, {"all_gather": (1, kv), "reduce_scatter": (1, kv)}),
            "cp and tp": (cp * t, {"all_reduce": (1, loads)} if picks else {}),
            "ep": (ep, {"all_to_all": (5, counts)})}
    traffic = defaultdict(dict)
    for axis, (n, ops) in sent.items():
        for op, (calls, size) in ops.items() if n > 1 else ():
            size = passes * size + (2 * rows * cfg.dim * e if axis == "ep" else 0)
            wire = (2 if op == "all_reduce" else 1) * (n - 1) / n * size
            traffic[axis][op] = passes * calls, size, wire
    return traffic


def messages(schedule, rank, p, m):
    """How many activations and gradients a rank sends to other stages in a step."""
    if p == 1:
        return 0
    neighbours = (rank > 0) + (rank < p - 1)            # an F goes to one, a B to the other
    of_two_stages = {"interleaved": 2 + neighbours, "dualpipe-v": 2 * neighbours}
    return m * of_two_stages.get(schedule, neighbours)


def activation_bytes(cfg, b, cp, t, e):
    """What autograd keeps in each module for a micro-batch, between F and B, on a CPU; of mixtures,
    see the next one."""
    tokens, accurate = b * cfg.seq // cp, max(e, 4)     # of the ranks that share a sub-layer
    x, kv = tokens * cfg.dim * e, tokens * kv_width(cfg, t) * e
    norm = x // t + 2 * tokens // t * e + x             # input, mean and 1/std, output (gathered)
    core = common.core_bytes(cfg.attention, cfg, b, e, t) // cp
    attn = x // t + 2 * cp * kv + core + x // t         # q, gathered k and v, the core, o's input
    mlp = 0 if cfg.experts else norm + 8 * x // t       # norm2; GELU's input and output
    ids = 8 * tokens // t                               # int64
    loss = tokens // t * cfg.vocab * accurate + accurate + ids      # log-probabilities; a scalar
    return [ids, *[norm + attn + mlp] * cfg.layers, (2 * x + 2 * tokens * e) // t + loss]


def mixture_bytes(cfg, b, cp, t, ep, e, rows):
    """The same of a mixture and the norm before it. rows: that go through this rank's experts."""
    tokens, accurate = b * cfg.seq // cp, max(e, 4)
    mine, picks = tokens // t, tokens * cfg.top_k
    norm = mine * (cfg.dim * e + 2 * e + cfg.dim * accurate)    # the output is the router's input
    weight = cfg.experts * cfg.dim * 4 if e < 4 else 0          # of the router, in float32
    scores = cfg.experts * accurate + 8 * cfg.top_k     # of each expert; who is chosen
    if cfg.top_k > 1:
        scores += (cfg.experts + cfg.top_k) * accurate  # the same as logits; gates
    route = mine * scores + b * cfg.experts * accurate
    sent = picks * (2 * 8 + cfg.dim * e)                # orders; what comes back
    if t > 1 or cfg.top_k == 1:
        sent += picks * accurate                        # gates, gathered or not yet counted
    orders = 2 * 8 if ep > 1 else 0
    experts = rows * (cfg.dim * e + 2 * (4 * cfg.dim // t) * e + orders)
    return norm + weight + route + sent + experts


def waiting_bytes(cfg, b, cp, t, e):
    """The same between B and W: inputs of linears, and gradients of their outputs."""
    tokens = b * cfg.seq // cp
    x, kv = tokens * cfg.dim * e, tokens * kv_width(cfg, t) * e
    inputs = x + x // t + (0 if cfg.experts else x + 4 * x // t)        # of q, k and v; o; up; down
    gradients = x // t + 2 * kv + x + (0 if cfg.experts else 4 * x // t + x)
    return [0, *[inputs + gradients] * cfg.layers, x // t + tokens // t * cfg.vocab * e]


def alive_over_time(actions, alive, waiting):
    """Bytes after each action of a rank. alive(stage, i), waiting(stage, i): of a micro-batch
    between F and B; and what of it is still waiting between B and W."""
    now, over_time = 0, []
    for kind, stage, i in actions:
        rest = waiting(stage, i) if kind != "BW" else 0
        now += {"F": alive(stage, i), "W": -rest}.get(kind, rest - alive(stage, i))
        over_time.append(now)
    return over_time


def step_flops(cfg, batch):
    """Of the whole model for the whole batch, forward and backward: see chapter 01."""
    h, kv = cfg.dim, cfg.dim * cfg.kv_heads // cfg.heads
    mlps = cfg.top_k if cfg.experts else 1
    block = 2 * (2 * h * h + 2 * h * kv + mlps * 8 * h * h + cfg.experts * h) + 4 * cfg.seq * h
    return 3 * batch * cfg.seq * (cfg.layers * block + 2 * cfg.vocab * h)


# ------------------------------------------------------------------------------------------ the run

def micro_batches(args):
    """How many of them a rank works on in a step."""
    return args.batch // args.dp // args.micro_batch


def train(run):
    args, cfg = run.args, run.args.model
    me, m = places_of_ranks(args)[run.rank], micro_batches(args)
    schedule = make_schedule(args.schedule, args.pp, m)
    programs = make_programs(schedule)
    run.check_rendezvous(schedule, programs)            # raises if anything could block

    # The mesh, and what this rank holds of the model.
    tied_stages = cfg.tie and schedule.ranks[0] != schedule.ranks[-1]
    axes, holders = make_groups(args, tied_stages)
    dist.barrier(axes["pp"])                            # NCCL: the first use of a group is by all
    full, cuts = build(cfg, seed=None), balanced(cfg.layers, len(schedule.ranks))
    slices = {stage: full[slice(*cuts[stage])] for stage, rank in enumerate(schedule.ranks)
              if rank == me.pp}
    del full                                            # and with it the other stages
    model = nn.ModuleList(slices.values())
    for of_stage in model:
        cut_model(of_stage, cfg, axes, run.dtype)
    note_holders(model.parameters(), axes, holders)
    draw_weights(model, args.seed, run.device, run.dtype)
    units = make_units(model, args.zero) if args.zero else {}
    all_units = [unit for of_module in units.values() for unit in of_module]

    # What a step needs.
    in_halves, last = args.schedule in ("zb-h1", "dualpipe-v"), len(schedule.ranks) - 1
    stages = {stage: Stage(of_stage, units, stage == last, in_halves, args.regather)
              for stage, of_stage in slices.items()}
    positions = positions_of(me.cp, args.cp, cfg.seq).chunk(args.tp)[me.tp].to(run.device)
    empty = functools.partial(torch.empty, args.micro_batch, len(positions), cfg.dim,
                              dtype=run.dtype, device=run.device)
    pipeline = Pipeline(schedule, programs[me.pp], stages, axes["pp"], empty, positions, run.timed)
    optimizer = run.optimizer([unit.shard for unit in all_units] or model.parameters())
    run.build, rows = build, []
    run.watch_actions(model)

    for batch in run.batches(share=me.dp):              # 1/dp of the sequences
        with run.measure():
            loss, norm = train_step(pipeline, model, all_units, optimizer, batch.micro_batches,
                                    batch.valid, args.clip)
        dist.all_reduce(loss)                           # for the report
        run.log(batch, loss, norm, run.gathered(all_units) if all_units else model)
        rows.append({stage: take_rows(of_stage, m) for stage, of_stage in slices.items()})

    check(run, model, all_units, optimizer, pipeline, cuts, me, axes, holders,
          run.of_metered_step(rows))


def take_rows(of_stage, m):
    """For each block of a stage, and each of m micro-batches: how many rows were sent to experts
    and received; nothing if there are none."""
    return [block.mlp.take_seen() if isinstance(block.mlp, MoE) else m * [()]
            for name, block in of_stage.named_children() if name.startswith("block")]


def check(run, model, units, optimizer, pipeline, cuts, me, axes, holders, rows):
    """Hold what was measured to the formulas. rows: see `take_rows`."""
    args, cfg, e, t = run.args, run.args.model, run.dtype.itemsize, run.args.tp
    shape, schedule = (cfg, args.micro_batch, args.cp, t), pipeline.schedule
    in_stage = lambda costs, stage: costs[slice(*cuts[stage])]
    of_rank = lambda costs: [cost for stage in pipeline.stages for cost in in_stage(costs, stage)]

    # Model states.
    copies = {parts: group.size() for parts, group in holders.items()}
    modules = of_rank(numbers(cfg, t, args.ep, "tied" in holders))
    count = sum(of_rank(tensors(cfg, "tied" in holders)))
    states = state_bytes(modules, count, copies, args.zero, args.optimizer, e)
    if units:
        run.check_shards(units, optimizer,
                         dict(zip(("parameters", "gradients", "optimizer states"), states)))
    else:
        run.check_states(model, optimizer, states[0] // e, count)

    # Activations, after each action of the schedule.
    alive, waiting = activation_bytes(*shape, e), waiting_bytes(*shape, e)

    def alive_in(stage, i):
        mixtures = [mixture_bytes(*shape, args.ep, e, of_block[i][1])
                    for of_block in rows[stage] if cfg.experts]
        return sum(in_stage(alive, stage)) + sum(mixtures)

    def waiting_in(stage, i):
        return sum(in_stage(waiting, stage))

    tables = cfg.seq // args.cp * cfg.dim // cfg.heads * e      # RoPE's cos and sin
    over_time = alive_over_time(schedule.actions[me.pp], alive_in, waiting_in)
    run.check_alive([tables + now for now in over_time])

    # What is sent, on each axis.
    of_blocks = [of_micro_batch for of_stage in rows.values() for of_block in of_stage
                 for of_micro_batch in of_block]
    sent = axis_traffic(*shape, args.ep, e, len(of_blocks), sum(map(sum, of_blocks)))
    m = micro_batches(args)
    sends, size = messages(args.schedule, me.pp, args.pp, m), pipeline.empty().nbytes
    if sends:
        sent["pp"] = {"send": (sends, sends * size, sends * size)}
    on_axes = {axis: (group, sent[axis]) for axis, group in axes.items() if axis in sent}
    on_holders = gradient_traffic(modules, copies, args.zero, 2 * m if args.regather else 1, e)
    on_axes |= {f"gradients, {what_is_held(parts, args)}": (holders[parts], ops)
                for parts, ops in on_holders.items() if ops}
    norm = 2 * (run.world - 1) / run.world * max(e, 4)
    if run.world > 1:
        on_axes["norm"] = dist.group.WORLD, {"all_reduce": (1, max(e, 4), norm)}
    run.check_axes(on_axes, args.node_size)
    say_what_it_costs(run, {axis: sum(wire for _, _, wire in ops.values())
                            for axis, (_, ops) in on_axes.items()}, modules)
    run.record(order=args.order.split(","), places=places_of_ranks(args), slices=cuts,
               stages=schedule.ranks)


def what_is_held(parts, args):
    """A name for what is cut into so many parts."""
    names = {(min(args.tp, args.model.kv_heads), 1): "kv heads", (args.tp, 1): "cut by tp",
             (args.tp, args.ep): "experts" if args.ep > 1 else "cut by tp", (1, 1): "whole",
             "tied": "tied"}
    return names[parts]


def say_what_it_costs(run, wire, modules):
    """On which machines what is sent is worth it, and what ZeRO-3 would send. wire: bytes on each
    axis."""
    args, cfg, e = run.args, run.args.model, run.dtype.itemsize
    flops = step_flops(cfg, args.batch) / run.world

    def over_compute(size, rate, bandwidth):
        return size / bandwidth / (flops / rate)

    axes = {axis: size for axis, size in wire.items() if axis in Place._fields}
    axes["dp"] = sum(size for axis, size in wire.items() if axis.startswith("gradients"))
    run.on_machines({f"what goes on {axis}: time to send it, over time to compute":
                     functools.partial(over_compute, size) for axis, size in axes.items() if size})
    run.note_speed(mfu=lambda seconds, peak: flops / (seconds * peak))
    if args.zero == 3:
        size, m = sum(sum(module.values()) for module in modules) * e, micro_batches(args)
        run.note(f"parameters gathered in a step (payload): {size / 1e6:.2f} MB if they are kept, "
                 f"{2 * m * size / 1e6:.2f} MB with --regather, which keeps one module's at a time")
    if args.like:
        like = LIKE[args.like]
        there = ", ".join(f"{axis} {degree}" for axis, degree in like.degrees.items())
        here = ", ".join(f"{axis} {getattr(args, axis)}" for axis in like.degrees)
        gpus = math.prod(degree for axis, degree in like.degrees.items() if axis != "ep")
        run.note(f"{like.what}: {there}, on {gpus // 8:,} machines of 8 GPUs; here: {here}, on "
                 f"{run.world} ranks")


def torch_parallelize(stage, mesh, zero):
    """Chapter 05's plan over `tp`, then chapter 03's units over `dp`: every parameter becomes a
    DTensor of both. stage: a slice of the model; (batch, seq/tp, dim) goes in and comes out."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, parallel

    norm, columns = parallel.SequenceParallel(), parallel.ColwiseParallel()
    gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = parallel.RowwiseParallel(output_layouts=Shard(1))
    plan = {"block*.norm[12]": norm, "block*.attn": gather, "block*.mlp": gather,
            "block*.attn.[qkv]": columns, "block*.mlp.up": columns,
            "block*.attn.o": scatter, "block*.mlp.down": scatter}
    if hasattr(stage, "embedding"):                     # PyTorch warns of a name that is not there
        plan["embedding"] = parallel.RowwiseParallel(input_layouts=Replicate(),
                                                     output_layouts=Shard(1))
    if hasattr(stage, "head"):
        plan |= {"head.norm": norm, "head.out": parallel.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)}
    parallel.parallelize_module(stage, mesh["tp"], plan)

    # The embedding is in the stage's own unit: its output is a view, of which fully_shard warns.
    for unit in (*(unit for unit in stage if not isinstance(unit, nn.Embedding)), stage):
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=zero == 3)
        unit.set_force_sum_reduction_for_comms(True)    # gloo has no average,
        unit.set_gradient_divide_factor(1)              # and the loss is divided already
    common.name_parameters(stage)                       # DTensors by now
    return stage


def torch_step(pipeline, model, optimizer, tokens, targets, clip, group):
    """group: the ranks of a pipeline. Returns what this rank knows of the loss, and the norm."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    losses = []
    with loss_parallel():                               # of logits that are cut by vocabulary
        pipeline.step(*tokens, target=targets, losses=losses, return_outputs=False)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    square = norm.square()                              # of this stage, over its dp and tp
    dist.all_reduce(square, group=group)
    nn.utils.clip_grads_with_norm_(model.parameters(), clip or math.inf, square.sqrt())
    optimizer.step()
    no_loss = torch.zeros((), dtype=torch.float64, device=targets.device)
    return sum((loss.detach().full_tensor() for loss in losses), no_loss), square.sqrt()


def train_torch(run):
    """The same through PyTorch, whose three APIs compose: a pipeline of DTensors of two axes."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    args, cfg = run.args, run.args.model
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")   # of its speed
    mesh = run.mesh(pp=args.pp, dp=args.dp, tp=args.tp)
    rank, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    depth = args.pp * (2 if args.schedule == "interleaved" else 1)
    mine, full, cuts = range(rank, depth, args.pp), gpt(cfg, seed=None), balanced(cfg.layers, depth)
    model = nn.ModuleList(full[slice(*cuts[stage])] for stage in mine)
    for part in model:
        torch_parallelize(draw_weights(part, args.seed, run.device, run.dtype), mesh, args.zero)
    optimizer = run.optimizer(model.parameters())
    stages = [PipelineStage(part, stage, depth, run.device, group=group)
              for part, stage in zip(model, mine)]
    kind, given = (ScheduleInterleaved1F1B, stages) if len(mine) > 1 else (Schedule1F1B, stages[0])
    pipeline = kind(given, micro_batches(args), scale_grads=False,
                    loss_fn=lambda logits, targets: loss_sum(logits, targets) / batch.valid)

    for batch in run.batches(mesh["dp"].get_local_rank()):
        tokens, targets = (torch.cat(parts) for parts in zip(*batch.micro_batches))
        tokens = [tokens] if rank == 0 else []          # for the first stage alone
        with run.measure():
            loss, norm = torch_step(pipeline, model, optimizer, tokens, targets, args.clip, group)
        dist.all_reduce(loss)
        loss /= args.tp                                 # tp ranks have the same, and all have added
        run.log(batch, loss, norm, [pair for part in model for pair in part.named_parameters()])

    run.check_states(model, optimizer)
    run.check_traffic()


# ---------------------------------------------------------------------------- the command line

class Published(NamedTuple):
    """A run that was published: of what, with which degrees, on machines of 8 GPUs; and with which
    flags it runs here, by the number of ranks."""

    what: str
    degrees: dict
    here: dict


LIKE = {
    "llama3-8k": Published(
        "Llama 3 405B, sequences of 8,192 tokens", {"tp": 8, "pp": 16, "dp": 64},
        {8: {"tp": 2, "pp": 2, "dp": 2, "zero": 2, "schedule": "interleaved"},
         16: {"tp": 2, "pp": 2, "dp": 4, "zero": 2, "schedule": "interleaved"}}),
    "llama3-128k": Published(
        "Llama 3 405B, sequences of 131,072 tokens", {"tp": 8, "cp": 16, "pp": 16, "dp": 8},
        {8: {"tp": 2, "cp": 2, "pp": 2, "dp": 1, "zero": 2, "schedule": "interleaved"},
         16: {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "zero": 2, "schedule": "interleaved"}}),
    "deepseek-v3": Published(
        "DeepSeek-V3, 8 of 256 experts for a token", {"pp": 16, "dp": 128, "ep": 64},
        {n: {"pp": 2, "dp": n // 2, "ep": n // 2, "experts": 8, "zero": 1,
             "schedule": "dualpipe-v", "batch": 2 * n} for n in (8, 16)}),
    "megatron-1t": Published(
        "Megatron's GPT of a trillion parameters", {"tp": 8, "pp": 64, "dp": 6},
        {8: {"tp": 2, "pp": 2, "dp": 2, "schedule": "interleaved"},
         16: {"tp": 2, "pp": 4, "dp": 2, "schedule": "interleaved", "layers": 8}}),
}


def requires(args, ranks):
    fill_in(args, ranks)
    pp, dp, cp, tp, ep, cfg = args.pp, args.dp, args.cp, args.tp, args.ep, args.model
    if pp * dp * cp * tp != ranks:
        others = pp * cp * tp
        fits = f"--dp {ranks // others}"
        if ranks % others:
            fits = f"torchrun --nproc_per_node={others}"
        common.refuse(f"--pp {pp} x --dp {dp} x --cp {cp} x --tp {tp} is {others * dp} ranks, not "
                      f"{ranks}; {fits} would work")
    common.split_batch(args, dp)
    common.divides("--heads", cfg.heads, "--tp", tp)
    if max(cfg.kv_heads, tp) % min(cfg.kv_heads, tp):
        common.refuse(f"--kv-heads {cfg.kv_heads} neither divides --tp {tp} nor is a multiple of "
                      f"it; {tp} would work")
    common.divides("--seq", cfg.seq, "what --cp and --tp cut it into",
                   tp if cp == 1 else cp * math.lcm(2, tp))     # two chunks for each rank of cp
    if args.experts == 0 and (ep > 1 or args.top_k != 2):
        common.refuse("--ep and --top-k are about experts, of which there are none; "
                      f"--experts {2 * ep} would work")
    common.divides("--experts", args.experts, "--ep", ep)
    common.divides("--dp", dp, "--ep", ep)
    if args.experts and args.top_k > args.experts:
        common.refuse(f"--top-k {args.top_k} is more than --experts = {args.experts}; "
                      f"{args.experts} would work")
    refuse_schedules(args)
    if args.zero == 3 and cfg.tie:
        common.refuse("--zero 3 gathers modules one by one, and tied ones share a matrix; --zero 2 "
                      "would work")
    if args.regather and args.zero < 3:
        common.refuse(f"--regather means nothing to --zero {args.zero}; --zero 3 would work")
    if args.variant == "torch":
        refuse_for_torch(args)


def fill_in(args, ranks):
    """What was not given, and what --like sets. --dp takes what is left of the ranks."""
    plain = {"pp": 1, "dp": None, "cp": 1, "tp": 1, "ep": 1, "experts": 0, "zero": 0,
             "schedule": "1f1b"}
    if args.like:
        here = LIKE[args.like].here
        if ranks not in here:
            common.refuse(f"--like {args.like} is for {' or '.join(map(str, here))} ranks, not "
                          f"{ranks}; torchrun --nproc_per_node=8 would work")
        for flag, value in plain.items():
            if getattr(args, flag) != value:
                common.refuse(f"--like {args.like} sets the axes, and --{flag} does so too; "
                              f"--like {args.like} alone would work")
            setattr(args, flag, here[ranks].get(flag, value))
        args.batch = max(args.batch, here[ranks].get("batch", 0))
        layers = max(args.model.layers, here[ranks].get("layers", 0))
        args.model = replace(args.model, layers=layers)
    if min(args.pp, args.cp, args.tp, args.ep, args.batch) < 1 or 0 in (args.dp, args.micro_batch):
        common.refuse("--pp, --dp, --cp, --tp, --ep, --batch and --micro-batch are 1 or more; 1 "
                      "would work")
    args.dp = args.dp or max(1, ranks // (args.pp * args.cp * args.tp))
    if args.variant == "torch":
        args.zero = args.zero or 2
    if args.pp > 1:
        args.micro_batch = args.micro_batch or 1        # as many micro-batches as there can be
    local = common.environment("LOCAL_WORLD_SIZE", ranks)
    args.node_size = args.node_size or (local if local < ranks else 8)
    args.model = Mixture(**asdict(args.model), experts=args.experts, top_k=args.top_k,
                         sequences=args.batch)


def refuse_schedules(args):
    p, m, name = args.pp, micro_batches(args), args.schedule
    least = {"dualpipe-v": 2 * p, "1f1b": p if args.variant == "torch" else 1}.get(name, 1)
    multiple = p if name == "interleaved" else 1
    fits = -(-max(m, least) // multiple) * multiple
    if fits != m:
        takes = f"{least} or more" if least > m else f"a multiple of {multiple}"
        common.refuse(f"{name} on --pp {p} takes {takes} micro-batches, not {m}; "
                      f"--batch {fits * args.micro_batch * args.dp} would work")
    depth = len(make_schedule(name, p, m).ranks)
    if args.model.layers < depth:
        common.refuse(f"--layers {args.model.layers} is less than one for each of {depth} stages; "
                      f"--layers {depth} would work")


def refuse_for_torch(args):
    """What PyTorch does not compose."""
    if args.zero not in (2, 3):
        common.refuse(f"--variant torch has no --zero {args.zero}; 2 would work")
    if args.schedule not in ("1f1b", "interleaved"):
        common.refuse(f"--variant torch has no --schedule {args.schedule} that takes DTensors; "
                      "1f1b would work")
    common.divides("--kv-heads", args.model.kv_heads, "--variant torch's --tp", args.tp)
    if args.model.tie:
        common.refuse(f"--variant torch does not know tied tables, as --preset {args.preset} has; "
                      "hand would work")


def order_of_axes(text):
    """An argparse type: pp,dp,cp,tp in any order."""
    if sorted(text.split(",")) != sorted(Place._fields):
        raise argparse.ArgumentTypeError(f"{text} does not name each axis once; pp,dp,cp,tp would")
    return text


def flags(parser):
    add = parser.add_argument
    add("--dp", type=int, help="ranks with other sequences; default: what is left of the ranks")
    add("--pp", type=int, default=1, help="ranks that share the layers")
    add("--cp", type=int, default=1, help="ranks that share a sequence in attention")
    add("--tp", type=int, default=1,
        help="ranks that share each matrix, and the sequence outside of sub-layers (SP)")
    add("--ep", type=int, default=1, help="ranks, of those of dp, that share the experts")
    add("--zero", type=int, choices=range(4), default=0, help="those who hold the same share out "
        "optimizer states (1), gradients (2), parameters (3); torch: 2 or 3")
    add("--regather", action="store_true", help="zero 3 gathers parameters in each F and B anew")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline")
    add("--experts", type=int, default=0, help="of a mixture in place of each MLP")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--order", type=order_of_axes, default="pp,dp,cp,tp", metavar="PP,DP,CP,TP",
        help="the axes; along the last one, ranks are neighbours")
    add("--node-size", type=int,
        help="ranks of a machine, for the report; default: as it is, and 8 on one machine")
    add("--like", choices=LIKE, help="the axes of a published run, on 8 or 16 ranks, and the least "
        "--batch and --layers for them")


BY_HAND = "--cp", "--ep", "--regather", "--experts", "--top-k", "--order", "--node-size", "--like"
VARIANTS = {"hand": (train, *BY_HAND), "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
