r"""05 · Sequence parallelism: what tensor parallelism left whole is cut too, along the sequence.

In chapter 04 every rank holds the residual stream and computes every LayerNorm in full: t ranks do
and keep the same thing t times. But outside the sub-layers a token needs no other token. So let a
rank have 1/t of the sequence there; and inside all of the sequence, but 1/t of the heads:

    04   x ----------- LayerNorm -- f -- [ 1/t of the heads ] -- g -- + -- LayerNorm -- f -- [ ...
         (b, s, h)                           (b, s, h/t)           (b, s, h)

    05   x ----------- LayerNorm -- f -- [ 1/t of the heads ] -- g -- + -- LayerNorm -- f -- [ ...
         (b, s/t, h)                         (b, s, h/t)           (b, s/t, h)

               forward                              backward
         04  f nothing                              all_reduce
             g all_reduce                           nothing
         05  f all_gather along the sequence        reduce_scatter
             g reduce_scatter                       all_gather

An all_reduce IS a reduce_scatter and an all_gather (chapter 03). Chapter 04 does both at the one
door; here g does the first half and the next f the second, and what lies between is cut. The bytes
are the same. The swap of the pair is almost all there is; the rest follows from it:

    LayerNorm    Each rank sees its own tokens alone, so the gradients of its weights, the same on
                 all ranks in chapter 04, are partial sums now: they are added up over the ranks,
                 all in one bucket, before the norm of the gradient is taken.
    embedding    its g scatters: every rank goes on with its part of the sequence. The head's f
                 gathers, and the loss is chapter 04's.
    positions    RoPE happens inside attention, where the sequence is whole: nothing changes.
    gathering    The linears behind f need their whole input in backward, for their weights'
                 gradients. Keeping it would bring back a full (b, s, h) for every sub-layer. So it
                 is thrown away, and gathered again in backward, while the input's gradient is
                 computed: half a pass more to send. --no-regather keeps it.

What a rank keeps and sends (x = b·s·h·e bytes, L blocks, a micro-batch)

    activations      (A_in + A_out) / t: all of it is cut, where chapter 04 has A_in / t + A_out.
                     (Not cut: which tokens and targets are this rank's, 19 bytes a token; RoPE's
                     tables; k and v of a whole kv head.) --no-regather: x in place of x/t, for
                     2 L + 1 inputs of sub-layers and head.
    reduce_scatter   4 L + 2 of x: forward and backward of each sub-layer, embedding, head
    all_gather       4 L + 2 of x, and 2 L + 1 again
    all_reduce       the small ones: two of the loss; once a step the LayerNorms' gradients, those
                     of kv heads that ranks share, and the norm

Collective matmul (--variant ring). Still, f must end before the matmul begins. But the matmul on a
chunk of the sequence needs no other chunk. So pass the chunks around a ring: while a rank works on
the one it has, the next arrives; after t-1 hops it has seen all. And backwards for g: a partial sum
travels the ring, each rank adds its own to it, and the next matmul runs while it travels. The bytes
are the same again, in t-1 messages. One, of b·s/t·h·e bytes, hides behind the matmul of a chunk, of
2·b·s/t·h·h/t FLOPs, if e·t/(2h) · FLOP/s / bandwidth <= 1. PyTorch calls it async TP.

When it pays: where chapter 04 does, with as many bytes, less memory, and every LayerNorm computed
once and not t times. It cannot cut attention's own sequence: the s x s scores, k and v of a head
stay whole (chapter 06 cuts those).

Run it:
    torchrun --nproc_per_node=4 05_sequence_parallel.py
    torchrun --nproc_per_node=4 05_sequence_parallel.py --no-regather
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant ring
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant torch
    torchrun --nproc_per_node=8 05_sequence_parallel.py --kv-heads 2 --vocab 1000 --clip 1

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
section 4; Wang et al., Overlap Communication with Dependent Computation via Decomposition (2023),
for the ring; Ultra-Scale Playbook, "Sequence Parallelism" and A3; How To Scale Your Model, part 5,
"Tensor Parallelism".
"""

import argparse
import functools
import math
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import common
from common import DTYPES, ActivationMeter, gpt, grad_norm, keep_shard, keep_whole, nbytes, quantity

# ------------------------------------------------------------- the collectives, along the sequence


def start_all_gather(x, group):
    """Start to gather x (batch, seq/t, ...). Returns a function: wait, get (batch, seq, ...)."""
    x, t = x.contiguous(), group.size()
    parts = x.new_empty(t * x.shape[0], *x.shape[1:])                   # (t·batch, seq/t, ...)
    handle = common.all_gather(parts, x, group=group, async_op=True)

    def finish(sent=x):                                 # which must live until it has been sent
        handle.wait()
        return torch.cat(parts.chunk(t), dim=1)

    return finish


def start_reduce_scatter(x, group):
    """Start to sum x (batch, seq, ...) over the ranks. Returns a function: wait, and get this
    rank's part of the sum, (batch, seq/t, ...)."""
    parts = torch.cat(x.chunk(group.size(), dim=1))                     # (t·batch, seq/t, ...)
    mine = parts.new_empty(len(x), x.shape[1] // group.size(), *x.shape[2:])
    handle = common.reduce_scatter(mine, parts, group=group, async_op=True)

    def finish(sent=parts):
        handle.wait()
        return mine

    return finish


def all_gather(x, group):
    return start_all_gather(x, group)()


def reduce_scatter(x, group):
    return start_reduce_scatter(x, group)()


# ------------------------------------------------------------------------------------------ f and g


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


class GatherInColumns(torch.autograd.Function):
    """f and the linears behind it in one, to keep this rank's part of the input and not all of it.

    x (batch, seq/t, in), weights (out, in) each; returns the gathered x times each of them. In
    backward x is gathered again while the input's gradient is computed, and that is on its way
    while the weights' gradients are computed.
    """

    @staticmethod
    def forward(ctx, x, group, *weights):
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        whole = all_gather(x, group)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        gathered = start_all_gather(x, ctx.group)
        dx = functools.reduce(torch.add, map(torch.matmul, gradients, weights))
        scattered = start_reduce_scatter(dx, ctx.group)
        rows = gathered().flatten(0, 1)                                 # (batch·seq, in)
        dw = [gradient.flatten(0, 1).T @ rows for gradient in gradients]
        return scattered(), None, *dw


# ----------------------------------------------------------------------------- the same, in a ring


def send_on(sent, group):
    """Start to send a tensor to the next rank, and to receive one like it from the one before.
    Returns a function: wait, and get what came."""
    sent, rank, t = sent.contiguous(), group.rank(), group.size()
    received = torch.empty_like(sent)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % t),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % t),
    ])

    def finish(sent=sent):
        for handle in handles:
            handle.wait()
        return received

    return finish


def ring_gather(x, group):
    """Yield (rank, its x) for all ranks, this one first: the next arrives while a caller works."""
    rank, t = group.rank(), group.size()
    for hop in range(t):
        last = hop == t - 1
        arriving = None if last else send_on(x, group)
        yield (rank - hop) % t, x
        x = None if last else arriving()


def ring_sum(part, group):
    """The sum over the ranks of their part(this rank), each computed while the sum so far travels.

    It starts at the next rank, goes round, and ends where it belongs.
    """
    rank, t = group.rank(), group.size()
    total = part((rank - 1) % t)
    for hop in range(1, t):
        arriving = send_on(total, group)
        total = part((rank - 1 - hop) % t)
        total += arriving()
    return total


class RingColumns(torch.autograd.Function):
    """GatherInColumns, chunk by chunk: each is multiplied while the next one arrives."""

    @staticmethod
    def forward(ctx, x, group, *weights):
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        parts = {rank: [F.linear(chunk, weight) for weight in weights]
                 for rank, chunk in ring_gather(x, group)}
        in_order = (parts[rank] for rank in range(group.size()))
        return tuple(torch.cat(of_weight, dim=1) for of_weight in zip(*in_order))

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        chunks = [gradient.chunk(ctx.group.size(), dim=1) for gradient in gradients]
        part = lambda rank: map(torch.matmul, (chunk[rank] for chunk in chunks), weights)
        dx = ring_sum(lambda rank: functools.reduce(torch.add, part(rank)), ctx.group)
        dw = [torch.zeros_like(weight) for weight in weights]
        for rank, arrived in ring_gather(x, ctx.group):
            for total, chunk in zip(dw, chunks):
                total += chunk[rank].flatten(0, 1).T @ arrived.flatten(0, 1)
        return dx, None, *dw


class RingRow(torch.autograd.Function):
    """The last linear and g in one: what is multiplied next overlaps with the sum so far.

    x (batch, seq, in), weight (out, in); returns (batch, seq/t, out).
    """

    @staticmethod
    def forward(ctx, x, group, weight):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        chunks = x.chunk(group.size(), dim=1)
        return ring_sum(lambda rank: F.linear(chunks[rank], weight), group)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        chunks = x.chunk(ctx.group.size(), dim=1)
        dx, dw = [None] * len(chunks), torch.zeros_like(weight)
        for rank, arrived in ring_gather(gradient, ctx.group):
            dx[rank] = arrived @ weight
            dw += arrived.flatten(0, 1).T @ chunks[rank].flatten(0, 1)
        return torch.cat(dx, dim=1), None, dw


# ------------------------------------------------------------------ chapter 04's f and g, beside it


class CopyIn(torch.autograd.Function):
    """f without sequence parallelism: nothing, and an all_reduce of the gradient."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOut(torch.autograd.Function):
    """g without sequence parallelism: an all_reduce, and nothing."""

    @staticmethod
    def forward(ctx, x, group):
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# ----------------------------------------------------------------------------------- the sub-layers


class Doors(NamedTuple):
    """How to get into a sub-layer and out of it.

    columns(x, group, *weights): f, and x times each weight. row(x, group, weight): x times the
    weight, and g. g: alone, for the embedding. by_sequence: whether the sequence is cut outside.
    """

    columns: Callable
    row: Callable
    g: type
    by_sequence: bool = True


def f_then_columns(f, x, group, *weights):
    x = f.apply(x, group)
    return [F.linear(x, weight) for weight in weights]


def row_then_g(g, x, group, weight):
    return g.apply(F.linear(x, weight), group)


bind = functools.partial
DOORS = {       # the swap: chapter 04's pair, and three ways to do this chapter's
    "tensor": Doors(bind(f_then_columns, CopyIn), bind(row_then_g, SumOut), SumOut, False),
    "kept": Doors(bind(f_then_columns, GatherIn), bind(row_then_g, ScatterOut), ScatterOut),
    "megatron": Doors(GatherInColumns.apply, bind(row_then_g, ScatterOut), ScatterOut),
    "ring": Doors(RingColumns.apply, RingRow.apply, ScatterOut),
}


class Column(nn.Module):
    """Stands where a linear stood, and hands out the output that the door has computed for it."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.output = linear.weight, linear.bias, None

    def forward(self, x):
        return self.output if self.bias is None else self.output + self.bias


class Row(nn.Module):
    """Stands where the last linear stood, with 1/t of its inputs, and is the door out."""

    def __init__(self, linear, group, doors):
        super().__init__()
        if linear.in_features % group.size():
            raise ValueError(f"{group.size()} ranks do not divide {linear.in_features} inputs")
        self.weight, self.bias, self.group = linear.weight, linear.bias, group
        self.row = doors.row
        keep_shard(self, "weight", 1, group)            # a partial sum each
        if doors.by_sequence and self.bias is not None:
            keep_whole(self, "bias", group)             # it is added to this rank's tokens alone

    def forward(self, x):
        out = self.row(x, self.group, self.weight)
        return out if self.bias is None else out + self.bias


class SubLayer(nn.Module):
    """A sub-layer with its matrices cut, between its doors.

    inner: any module of (batch, seq, ...). columns: its linears that read its input, by name. row:
    its last linear, by name, which reads what they gave. Communication: that of the doors.
    ValueError: ranks that do not divide what `row` reads.
    """

    def __init__(self, inner, columns, row, group, doors):
        super().__init__()
        self.inner, self.group, self.doors, self.columns = inner, group, doors, []
        for name in columns:
            linear = inner.get_submodule(name)
            cut_outputs(linear, group)                  # some heads each
            self.columns.append(Column(linear))
            inner.set_submodule(name, self.columns[-1])
        inner.set_submodule(row, Row(inner.get_submodule(row), group, doors))

    def forward(self, x):                               # (batch, seq/t, dim)
        weights = [column.weight for column in self.columns]
        for column, output in zip(self.columns, self.doors.columns(x, self.group, *weights)):
            column.output = output                      # (batch, seq, .../t)
        out = self.inner(x)                             # (batch, seq/t, dim)
        for column in self.columns:
            column.output = None                        # autograd keeps what backward needs
        return out


def cut_outputs(linear, group, parts=None):
    """Keep 1/t of a linear's outputs, or one of `parts`: rows of weight (out, in), and of bias."""
    for name, _ in linear.named_parameters():
        keep_shard(linear, name, 0, group, parts)


def share_kv_heads(attn, kv_heads, group, copies):
    """Cut k and v by heads. With fewer heads than ranks, those of `copies` hold the same one, and
    each has the gradient of its own query heads: note that it is to be summed over them."""
    for linear in (attn.k, attn.v):
        cut_outputs(linear, group, parts=min(kv_heads, group.size()))
        for name, _ in linear.named_parameters():
            if copies.size() > 1:
                keep_whole(linear, name, copies)


# --------------------------------------------------------------- the vocabulary: embedding and head


class VocabParallelEmbedding(nn.Module):
    """A table of which each rank holds the rows of some tokens. Looks those up; g adds the others.

    tokens (batch, seq); returns (batch, seq/t, dim). ValueError: a table with padding_idx or
    max_norm, which concern rows by their number.
    """

    def __init__(self, inner, group, g):
        super().__init__()
        self.inner, self.group, self.g = inner, group, g
        if inner.padding_idx is not None or inner.max_norm is not None:
            raise ValueError("an embedding with padding_idx or max_norm cannot be cut")
        keep_shard(inner, "weight", dim=0, axis=group)

    def forward(self, tokens):
        rows = self.inner.weight.shape[0]
        here = tokens - self.group.rank() * rows        # the row in this rank's part
        elsewhere = (here < 0) | (here >= rows)
        x = self.inner(here.masked_fill(elsewhere, 0))
        return self.g.apply(x.masked_fill(elsewhere[..., None], 0), self.group)


class VocabParallelHead(nn.Module):
    """The linear that ends the model, behind f: x (batch, seq/t, dim) to the logits (batch, seq,
    vocab/t) of this rank's part of the vocabulary."""

    def __init__(self, inner, group, columns):
        super().__init__()
        self.inner, self.group, self.columns = inner, group, columns
        cut_outputs(inner, group)

    def forward(self, x):
        [logits] = self.columns(x, self.group, self.inner.weight)
        return logits if self.inner.bias is None else logits + self.inner.bias


class VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy, summed over the valid targets, of logits that are cut by vocabulary.

    logits (batch, seq, ceil(vocab/t)), targets (batch, seq) with -100 where not valid; returns the
    same scalar on every rank, in float32 or better. Communication: all_reduces of (batch, seq) and
    (2, batch, seq) in forward.
    """

    @staticmethod
    def forward(ctx, logits, targets, vocab, group):
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        size = logits.shape[-1]
        first = group.rank() * size
        real = min(max(vocab - first, 0), size)         # what is left of them is padding
        if real < size:
            logits = F.pad(logits[..., :real], (0, size - real), value=-math.inf)
        largest = logits.amax(-1)                       # (batch, seq)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits = logits - largest[..., None]            # at most 0: no exponential overflows

        here = targets - first
        mine = (here >= 0) & (here < size)
        here = here.clamp(0, size - 1)[..., None]
        target = logits.gather(-1, here)[..., 0].masked_fill(~mine, 0)
        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(-1), target])              # (2, batch, seq)
        dist.all_reduce(sums, group=group)

        valid = targets != -100
        probabilities = exponentials.div_(sums[0, ..., None])
        ctx.save_for_backward(probabilities, here, mine, valid)
        return ((sums[0].log() - sums[1]) * valid).sum()

    @staticmethod
    def backward(ctx, gradient):                        # probabilities - 1 at the target
        probabilities, here, mine, valid = ctx.saved_tensors
        scale = (gradient * valid)[..., None]           # (batch, seq, 1)
        logits = probabilities * scale
        return logits.scatter_add_(-1, here, -scale * mine[..., None]), None, None, None


# ------------------------------------------------------------------------------------ the whole GPT


def parallelize(model, cfg, group, copies, doors):
    """Cut common.gpt(cfg, seed=None) over `group`, before its weights are drawn.

    copies: the ranks that hold the same kv head as this one.
    """
    model.embedding = VocabParallelEmbedding(model.embedding, group, doors.g)
    norms = [model.head.norm]
    for block in model[1:-1]:
        share_kv_heads(block.attn, cfg.kv_heads, group, copies)
        block.attn = SubLayer(block.attn, ("q", "k", "v"), "o", group, doors)
        block.mlp = SubLayer(block.mlp, ("up",), "down", group, doors)
        norms += block.norm1, block.norm2
    model.head.out = VocabParallelHead(model.head.out, group, doors.columns)
    for norm in norms if doors.by_sequence else ():     # each rank sees its own tokens alone
        keep_whole(norm, "weight", group)
        keep_whole(norm, "bias", group)
    return model


# ---------------------------------------------------------------------------------------- the step


def train_step(model, optimizer, micro_batches, valid, clip, vocab, group):
    """One step, in which every rank has every sequence. Returns the loss and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets of
    the whole batch. Communication: that of the model; then an all_reduce of the LayerNorms'
    gradients, one of those of shared kv heads (the same, if all ranks share one), one of the norm.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = VocabParallelLoss.apply(model(tokens), targets, vocab, group) / valid
        loss.backward()
        total += loss.detach()
    common.sum_partial_grads(model.parameters())

    norm = grad_norm(model.parameters(), group)
    if clip:
        common.clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


def torch_parallelize(model, cfg, mesh):
    """The same through PyTorch: all weights become DTensors, and LayerNorms take sequences in
    parts."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = RowwiseParallel(output_layouts=Shard(1))
    logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                             use_local_output=False)
    plan = {"embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "head.norm": SequenceParallel(), "head.out": logits}
    for i in range(1, cfg.layers + 1):
        for name in ("norm1", "norm2"):
            plan[f"block{i}.{name}"] = SequenceParallel()
        for name in ("attn", "mlp"):
            plan[f"block{i}.{name}"] = gather
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"block{i}.{name}"] = ColwiseParallel()
        for name in ("attn.o", "mlp.down"):
            plan[f"block{i}.{name}"] = scatter
    parallelize_module(model, mesh, plan)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    return model


def torch_loss(logits, targets):
    """PyTorch's loss of logits that are cut by vocabulary; its backward must run in it too."""
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        return common.loss_sum(logits, targets)


def torch_step(model, optimizer, micro_batches, valid, clip):
    """The same with DTensors, and PyTorch's loss of logits that are cut by vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        with loss_parallel():
            loss = common.loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach().full_tensor()

    for p in model.parameters():                        # a LayerNorm's is a partial sum so far
        p.grad = p.grad.redistribute(placements=p.placements)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).full_tensor()
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas


def parameters_per_rank(cfg, t):
    """Numbers on a rank: 1/t of every matrix, but one kv head at least, and all of a LayerNorm."""
    kv_dim = cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)
    block = 10 * cfg.dim**2 // t + 2 * cfg.dim * kv_dim + 4 * cfg.dim
    table = -(-cfg.vocab // t) * cfg.dim                # with its padding
    return cfg.layers * block + 2 * cfg.dim + (1 if cfg.tie else 2) * table


def model_state_bytes(cfg, optimizer, t, width):
    """Bytes of parameters, gradients and optimizer states per rank. width: bytes of a number."""
    size = width * parameters_per_rank(cfg, t)
    tensors = 10 * cfg.layers + (3 if cfg.tie else 4)
    states = {"adamw": 2 * size + 4 * tensors, "momentum": size, "sgd": 0}[optimizer]
    return {"parameters": size, "gradients": size, "optimizer states": states}


def activation_bytes(cfg, batch, t, e, doors="megatron"):
    """Bytes that a rank keeps for backward, on a CPU: (A_in + A_out) / t. e: bytes of a number.

    doors: "tensor" is chapter 04's A_in / t + A_out; "kept" is --no-regather.
    """
    tokens, wide = batch * cfg.seq, max(e, 4)
    x = tokens * cfg.dim * e                            # one (batch, seq, dim)
    norm_in = x + 2 * tokens * e                        # a LayerNorm's input, mean and 1/std
    norm_out = x                                        # which the linears behind f read
    by = {"tensor": (1, 1), "kept": (t, 1)}.get(doors, (t, t))
    outside = (2 * cfg.layers + 1) * (norm_in // by[0] + norm_out // by[1])

    kv = x * max(cfg.kv_heads // t, 1) // cfg.heads
    scores = batch * cfg.heads * cfg.seq**2 * e
    inside = cfg.layers * (2 * kv + (x + scores + x + 8 * x) // t)
    logits = tokens * -(-cfg.vocab // t) * wide

    rope = cfg.layers * 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * e
    masks = tokens * (8 + 1) + tokens * (8 + 1 + 1)     # which tokens and targets are on this rank
    return outside + inside + logits + rope + masks


def traffic(cfg, micro_batches, batch, t, e, doors="megatron"):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}."""
    tokens, wide, share = batch * cfg.seq, max(e, 4), (t - 1) / t
    x = tokens * cfg.dim * e
    pairs = 2 * (2 * cfg.layers + 1)                    # f and g, forward and backward
    regathers = 0 if doors == "kept" else 2 * cfg.layers + 1
    scatters, gathers = micro_batches * pairs, micro_batches * (pairs + regathers)
    sent = {}
    if doors == "ring":                                 # all but the embedding's
        hops = (scatters + gathers - 2 * micro_batches) * (t - 1)
        scatters = gathers = micro_batches
        sent["send"] = (hops, hops * x // t, hops * x // t)
    sent["reduce_scatter"] = (scatters, scatters * x, share * scatters * x)
    sent["all_gather"] = (gathers, gathers * x, share * gathers * x)

    norms = (4 * cfg.layers + 2) * cfg.dim * e          # gradients of the LayerNorms
    loss, norm = micro_batches * 3 * tokens * wide, wide * (t > 1)
    payload = loss + norms + norm
    calls, wire = 2 * micro_batches + 1 + (t > 1), 2 * share * payload
    if t > cfg.kv_heads:                                # k and v of a head that ranks share
        shared = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads) * e
        ranks = t // cfg.kv_heads
        payload, wire = payload + shared, wire + 2 * (ranks - 1) / ranks * shared
        calls += cfg.kv_heads > 1                       # one head, on all ranks: in one bucket
    return sent | {"all_reduce": (calls, payload, wire)}


def hop_over_matmul(dim, t, width, flops, bandwidth):
    """How long a hop of the ring takes, in times of the matmul that it hides behind: a chunk of
    1/t of the tokens by 1/t of a (dim, dim) matrix. flops: FLOP/s. bandwidth: bytes/s."""
    return width * t / (2 * dim) * flops / bandwidth


MACHINES = {  # dense bf16 FLOP/s of a chip, and bytes/s that it can send, as its makers give them
    "A100, NVLink 3": (312e12, 300e9),
    "H100, NVLink 4": (989e12, 450e9),
    "H100, InfiniBand NDR": (989e12, 50e9),
}


# -------------------------------------------------------------------------------------- the picture

SHAPES = {"7B": common.PRESETS["7b"],
          "Llama 70B's": common.Config(80, 8192, heads=64, kv_heads=8, seq=4096, vocab=128256)}
IN_A_BLOCK = "norm1", "attn.q", "heads", "attn.o", "norm2", "mlp.up", "mlp.down"


def shapes_in_a_block(model, tokens):
    """{name: (rows, columns)} of what this rank has in the first block, sequence by features: the
    outputs of modules, and `heads`, the input of attn.o."""
    seen, modules = {}, dict(model.block1.named_modules())

    def note(name, module, inputs, output):
        if name == "attn.o":
            seen["heads"] = tuple(common.local(inputs[0]).shape[1:])
        seen[name] = tuple(common.local(output).shape[1:])

    hooks = [module.register_forward_hook(functools.partial(note, name.replace("inner.", "")))
             for name, module in modules.items() if name.replace("inner.", "") in IN_A_BLOCK]
    model(tokens)
    for hook in hooks:
        hook.remove()
    return {name: seen[name] for name in IN_A_BLOCK}


NAMES = {"tensor": "chapter 04", "kept": "megatron --no-regather"}


def draw(cuts, measured, path):
    """Left: what rank 0 has of each tensor of a block. Right: activation bytes against ranks.

    cuts: {title: (full shapes, rank 0's shapes)}. measured: {doors: (config, batch, bytes of a
    number, ranks, bytes)}.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for row, (title, (full, mine)) in enumerate(cuts.items()):
        x, widest = 0.0, max(columns for _, columns in full.values())
        left.text(0, 1.5 * row - 0.2, title, fontsize=9, va="bottom")
        for name, (rows, columns) in full.items():
            width = 2 * columns / widest
            part = mine[name][0] / rows, width * mine[name][1] / columns
            for size, color in (((1, width), "#dddddd"), (part, "#355070")):
                left.add_patch(Rectangle((x, 1.5 * row), size[1], size[0], facecolor=color,
                                         edgecolor="white"))
            left.text(x + width / 2, 1.5 * row - 0.03, name, fontsize=7, ha="center", va="bottom")
            x += width + 0.25
    left.set_xlim(-0.05, x)
    left.set_ylim(1.5 * len(cuts) - 0.4, -0.5)
    left.axis("off")
    left.set_title("what rank 0 has of each tensor: down the sequence, across the features",
                   loc="left", fontsize=10)

    worlds, styles = (1, 2, 4, 8, 16), {"tensor": "--", "megatron": "-"}
    lines = [(f"{name} shape", cfg, 1, 2, worlds) for name, cfg in SHAPES.items()]
    cfg, batch, e, *_ = next(iter(measured.values()))
    lines.append(("this run", cfg, batch, e, [n for n in worlds if fits(cfg, n)]))
    for (name, cfg, batch, e, over), color in zip(lines, ("#355070", "#e56b6f", "#6d597a")):
        for doors, style in styles.items():
            what = "TP" if doors == "tensor" else "TP and SP"
            right.plot(over, [activation_bytes(cfg, batch, n, e, doors) for n in over], style,
                       color=color, label=f"{name}, {what}")
    for (doors, (_, _, _, n, size)), mark in zip(measured.items(), "x+"):
        right.plot(n, size, f"k{mark}", label=f"measured: {NAMES.get(doors, doors)}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xticks(worlds, worlds)
    right.set_xlabel("ranks")
    right.set_title("bytes of activations per rank (a sequence, or this run's batch)",
                    loc="left", fontsize=10)
    right.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run


def by_hand(args, device, group, copies, doors):
    model = parallelize(gpt(args.model, seed=None), args.model, group, copies, DOORS[doors])
    return common.draw_weights(model, args.seed, device, DTYPES[args.dtype])


def kept_bytes(model, tokens, loss):
    """What autograd keeps for the loss(logits) of one micro-batch on this rank, in bytes."""
    meter = ActivationMeter([*model.parameters(), *model.buffers(), tokens])
    with meter:
        loss(model(tokens))
    return meter.bytes


def train(args, ranks, mesh, copies, text, run):
    """Train for --steps steps; check model states, activations and traffic against the formulas."""
    cfg, t, hand, doors = args.model, ranks.world, args.variant != "torch", doors_of(args)
    width, cpu = DTYPES[args.dtype].itemsize, ranks.device.type == "cpu"
    group = mesh.get_group("tp")
    if hand:
        model = by_hand(args, ranks.device, group, copies, doors)
        step = functools.partial(train_step, vocab=cfg.vocab, group=group)
    else:
        full = gpt(cfg, args.seed, ranks.device, DTYPES[args.dtype])
        model, step = torch_parallelize(full, cfg, mesh), torch_step
    optimizer = common.OPTIMIZERS[args.optimizer](model.parameters(), args.lr)

    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)      # all of it on every rank
        pairs = list(zip(*(x.to(ranks.device).split(args.micro_batch) for x in (tokens, targets))))
        with run.measure(i):
            loss, norm = step(model, optimizer, pairs, valid, args.clip)
        run.log(i, batch, loss, norm, common.named_parameters(model))

    parameters = list(model.parameters())
    held = parameters, [p.grad for p in parameters], list(optimizer.state.values())
    formula = model_state_bytes(cfg, args.optimizer, t, width)
    for (kind, expected), tensors in zip(formula.items(), held):
        run.check(kind, nbytes(tensors), expected if hand else None)
    tokens, targets = pairs[0]
    by_vocabulary = lambda logits: VocabParallelLoss.apply(logits, targets, cfg.vocab, group)
    kept = kept_bytes(model, tokens, by_vocabulary if hand else
                      functools.partial(torch_loss, targets=targets))
    expected = activation_bytes(cfg, args.micro_batch, t, width, doors) if hand else None
    run.check("activations of a micro-batch", kept, expected, exact=cpu)

    sent = traffic(cfg, len(pairs), args.micro_batch, t, width, doors)
    run.check_comm(sent if hand else {op: (None, None, None) for op in run.comm.total})
    measured = sum(op["wire_bytes"] for op in run.comm.total.values())
    once = traffic(cfg, len(pairs), args.micro_batch, t, width, "kept").values()
    run.note(f"on the wire {quantity(round(measured))} in a step; if nothing is gathered twice, "
             f"{quantity(round(sum(wire for _, _, wire in once)))}")
    return model, by_vocabulary, tokens, kept


def report(args, ranks, group, copies, run, model, loss, tokens, kept):
    """Measure the same under chapter 04's doors, and draw what is cut and what is kept."""
    cfg, width, t = args.model, DTYPES[args.dtype].itemsize, ranks.world
    full = dict.fromkeys(IN_A_BLOCK, (cfg.seq, cfg.dim)) | {"mlp.up": (cfg.seq, 4 * cfg.dim)}
    shape = cfg, args.micro_batch, width, t
    cuts = {}
    measured = {doors_of(args): (*shape, kept)}
    if args.preset == "tiny":                           # or there would be two large models
        plain = by_hand(args, ranks.device, group, copies, "tensor")
        size = kept_bytes(plain, tokens, loss)
        run.check("activations under chapter 04's f and g", size,
                  activation_bytes(cfg, args.micro_batch, t, width, "tensor"),
                  exact=ranks.device.type == "cpu")
        cuts["chapter 04"] = full, shapes_in_a_block(plain, tokens)
        measured["tensor"] = *shape, size
    cuts[NAMES.get(doors_of(args), args.variant)] = full, shapes_in_a_block(model, tokens)
    run.note("a hop of the ring, in times of the matmul that hides it (8 ranks, dim 8192, bf16):")
    for machine, rates in MACHINES.items():
        run.note(f"  {machine:<26}{hop_over_matmul(8192, 8, 2, *rates):8.2f}")
    if ranks.rank == 0:
        draw(cuts, measured, args.plot)
    run.note(f"picture: {args.plot}")


def doors_of(args):
    return "kept" if args.variant == "megatron" and not args.regather else args.variant


def fits(cfg, t, shares=True):
    """Whether t ranks get as many tokens, and whole heads: q's, and some kv heads each, or (if it
    `shares`) one that several have."""
    kv_heads_fit = cfg.kv_heads % t == 0 or shares and t % cfg.kv_heads == 0
    return cfg.heads % t == 0 and kv_heads_fit and cfg.seq % t == 0


def refuse_what_does_not_fit(args, t):
    """Heads, and with them dim and 4·dim, and the sequence must be a multiple of the ranks."""
    cfg, shares = args.model, args.variant != "torch"
    works = max(n for n in range(1, t + 1) if fits(cfg, n, shares))
    instead = f"{t} tensor-parallel ranks; --nproc_per_node={works} would work"
    if cfg.heads % t:
        why = "fewer than" if t > cfg.heads else "not a multiple of"
        common.refuse(f"--heads {cfg.heads} is {why} {instead}")
    if cfg.seq % t:
        common.refuse(f"--seq {cfg.seq} is not a multiple of {instead}")
    if not fits(cfg, t, shares):
        why = "is neither a multiple nor a divisor of" if shares else \
            "(which --variant torch cannot share) is not a multiple of"
        common.refuse(f"--kv-heads {cfg.kv_heads} {why} {instead}")
    if not args.regather and args.variant != "megatron":
        common.refuse(f"--no-regather means nothing to --variant {args.variant}; megatron would "
                      "work")


def main(argv=None):
    parser = common.parser(__file__, __doc__, ("megatron", "ring", "torch"), default="megatron",
                           steps=20)
    parser.add_argument("--regather", action=argparse.BooleanOptionalAction, default=True,
                        help="gather a sub-layer's input again in backward, in place of keeping it")
    parser.set_defaults(plot="runs/05_sequence_parallel.png")
    args = common.parse(parser, argv)
    common.split_batch(args, 1)
    t = common.environment("WORLD_SIZE", 1)
    refuse_what_does_not_fit(args, t)
    text = common.Text(args)
    ranks = common.start(args)

    mesh = init_device_mesh(ranks.device.type, (t,), mesh_dim_names=("tp",))
    kv_heads = min(args.model.kv_heads, t)
    copies = mesh.get_group("tp")                       # the ranks that share a kv head: all,
    if kv_heads > 1:                                    # or neighbours
        copies = init_device_mesh(ranks.device.type, (kv_heads, t // kv_heads),
                                  mesh_dim_names=("kv_head", "copy")).get_group("copy")
    build = functools.partial(gpt, args.model, args.seed, ranks.device, DTYPES[args.dtype])
    run = common.Run(args, ranks, text, build, "inputs kept" * (not args.regather))
    trained = train(args, ranks, mesh, copies, text, run)
    report(args, ranks, mesh.get_group("tp"), copies, run, *trained)
    return run.finish()


if __name__ == "__main__":
    common.launch(main)
