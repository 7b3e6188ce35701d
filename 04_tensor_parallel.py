r"""04 · Tensor parallelism: every matrix is cut, and all ranks work on the same tokens.

ZeRO (chapter 03) cuts what a rank stores, but a rank still computes with whole matrices, and keeps
the activations of whole layers. Tensor parallelism cuts the matrix multiplication itself, and there
are two ways to cut A·B into t parts:

    B by columns    A · [B1 | B2]             =  [A·B1 | A·B2]        concatenate the outputs
    A by columns    [A1 | A2] · | B1 |        =  A1·B1 + A2·B2        sum the outputs
    and B by rows               | B2 |

The first needs all of A on every rank and leaves the output cut; the second takes a cut input, and
needs a sum at the end. So do one after the other, and the output of the first is the input of the
second: nothing is sent in between. That is Megatron's pair, and a transformer has it twice a block:

                  by columns                       by rows
    attention     q, k, v: some heads each         o
    MLP           up: some hidden units each       down

                   +-----------------------------------------+
    x, the same    |  rank 0:  q0 k0 v0 -> heads 0, 1 -> o0  |      sum, the same
    on all ranks -f-  rank 1:  q1 k1 v1 -> heads 2, 3 -> o1  -g-->  on all ranks
                   +-----------------------------------------+
                       forward             backward
    f  at the door in  nothing             all_reduce of the gradient: every rank has a part of it
    g  at the door out all_reduce          nothing

f and g are each other's conjugate: one sends in the pass in which the other does not. An autograd
Function of four lines makes each, and a wrapper puts them around a sub-layer that does not know it
was cut: our attention reads its number of heads off the width of its projections.

    heads        t may not exceed the heads. With fewer kv heads than ranks (GQA), neighbours hold
                 the same kv head; each sees the gradient of its own query heads alone, so the
                 gradients of a kv head are summed over the ranks that have it.
    vocabulary   The embedding's table is cut by rows of tokens: a rank looks up the tokens it has,
                 the others are zero, and g adds up. The head is cut by columns: a rank has the
                 logits of some tokens of the vocabulary. Cross-entropy needs of the others only the
                 largest logit (subtracted before anything is exponentiated), the sum of the
                 exponentials, and the target's logit: three numbers a token, in two all_reduces.
                 The full logits never exist. A vocabulary that t does not divide is padded with
                 rows of zeros, and those logits are left out: no probability for them.
    LayerNorm    has its weights on all ranks and sends nothing to keep them equal: with the same x
                 (after g) and the same gradient (after f) every rank computes the same update.
                 The gradient norm must count them once, and a cut matrix in all its parts.

What a rank stores and sends (b sequences of s tokens in a micro-batch, h = dim, e bytes a number)

    parameters       1/t of every matrix, but never less than one kv head; LayerNorms in full
    activations      inside the sub-layers 1/t (but k and v of a whole kv head, and RoPE's tables);
                     the residual stream and the LayerNorms' inputs and outputs in full:
                     A_in / t + A_out (chapter 05 cuts A_out too)
    all_reduces      4 L + 2 a micro-batch, of b·s·h·e bytes: two forward and two backward in every
                     block, one for the embedding, one for the head; and the two small ones of the
                     loss. Once a step the norm, and the gradients of kv heads that ranks share

When it stops paying: these all_reduces cannot hide, since what comes next needs the sum. (Except in
backward: while the input's gradient is summed, the weights' gradients can be computed. That is the
`overlap` variant.) Take an all_reduce as a reduce_scatter and an all_gather. A gather moves h·e
bytes a token, times (t-1)/t; a matrix of h x h takes 2·h²/t FLOPs a token. So the gather takes no
longer than the matmul behind it if

    e · (t-1) / (2h) · FLOP/s / bandwidth  <=  1

(the playbook's A3, which counts a byte a number). The scaling book sets both sends of an MLP beside
both its matrices, two bytes a number: ranks pay while t < F · bandwidth / (FLOP/s), F = 4h, the
hidden width. Neither depends on batch or sequence. With h = 8192 and e = 2 they give 4 and 14 ranks
on an H100's NVLink, and 1 on its InfiniBand. Hence the rule: tensor parallelism inside a machine,
and something else (chapters 02, 03 and 07) between machines.

Run it:
    torchrun --nproc_per_node=4 04_tensor_parallel.py
    torchrun --nproc_per_node=8 04_tensor_parallel.py --kv-heads 2 --vocab 1000 --clip 1
    torchrun --nproc_per_node=4 04_tensor_parallel.py --variant overlap
    torchrun --nproc_per_node=4 04_tensor_parallel.py --variant torch
    torchrun --nproc_per_node=8 04_tensor_parallel.py --preset gpt2 --heads 16 --kv-heads 16

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters (PTD-P, 2021), sections 2.3 and 3; Ultra-Scale Playbook,
"Tensor Parallelism" and A3; How To Scale Your Model, part 5, "Tensor Parallelism".
"""

import functools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import common
from common import DTYPES, ActivationMeter, gpt, grad_norm, keep_shard, nbytes, quantity

# ---------------------------------------------------------------------------- two matrix identities


def matmul_by_columns(a, b, t):
    """a (m, k) times b (k, n), with b cut by columns: t outputs side by side."""
    return torch.cat([a @ b_part for b_part in b.chunk(t, dim=1)], dim=1)


def matmul_by_rows(a, b, t):
    """a (m, k) times b (k, n), with a cut by columns and b by rows: a sum of t outputs."""
    parts = zip(a.chunk(t, dim=1), b.chunk(t, dim=0))
    return sum(a_part @ b_part for a_part, b_part in parts)


# ------------------------------------------------------------------------------------------ f and g


def all_reduce(x, group):
    """The sum of x over the ranks of `group`, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class CopyIn(torch.autograd.Function):
    """f: hands on what every rank has; its gradient, of which every rank has a part, is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        return all_reduce(gradient, ctx.group), None


class SumOut(torch.autograd.Function):
    """g: sums what every rank has a part of; its gradient is handed on."""

    @staticmethod
    def forward(ctx, x, group):
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# ----------------------------------------------------------------------------------- the sub-layers


class TensorParallel(nn.Module):
    """Megatron's pair around one sub-layer: copy the input in, sum the partial outputs out.

    inner: any module. columns: its linears that read its input, by name. row: its last linear, by
    name, which reads what they gave. Communication: an all_reduce of the output in forward, and one
    of the input's gradient in backward. ValueError: ranks that do not divide what `row` reads.
    """

    def __init__(self, inner, columns, row, group):
        super().__init__()
        self.inner, self.group = inner, group
        for name in columns:                            # split the outputs: some heads each
            cut_outputs(inner.get_submodule(name), group)
        inner.set_submodule(row, RowLinear(inner.get_submodule(row), group))    # with g behind it

    def forward(self, x):                               # (batch, seq, dim), the same on every rank
        return self.inner(CopyIn.apply(x, self.group))


def cut_outputs(linear, group, parts=None):
    """Keep 1/t of a linear's outputs, or one of `parts`: rows of weight (out, in), and of bias."""
    for name, _ in linear.named_parameters():
        keep_shard(linear, name, 0, group, parts)


class RowLinear(nn.Module):
    """A linear with 1/t of its inputs, and g: a partial sum each, their sum, and the bias."""

    def __init__(self, linear, group):
        super().__init__()
        if linear.in_features % group.size():
            raise ValueError(f"{group.size()} ranks do not divide {linear.in_features} inputs")
        self.weight, self.bias, self.group = linear.weight, linear.bias, group
        keep_shard(self, "weight", 1, group)

    def forward(self, x):
        out = SumOut.apply(F.linear(x, self.weight), self.group)
        return out if self.bias is None else out + self.bias


def share_kv_heads(attn, kv_heads, group, copies):
    """Cut k and v by heads. With fewer heads than ranks, those of `copies` hold the same one, and
    each has the gradient of its own query heads: note that it is to be summed over them."""
    for linear in (attn.k, attn.v):
        cut_outputs(linear, group, parts=min(kv_heads, group.size()))
        for name, _ in linear.named_parameters():
            if copies.size() > 1:
                common.keep_whole(linear, name, copies)


# --------------------------------------------------------------- the vocabulary: embedding and head


class VocabParallelEmbedding(nn.Module):
    """A table of which each rank holds the rows of some tokens. Looks those up; g adds the others.

    Communication: an all_reduce of the output in forward. ValueError: a table with padding_idx or
    max_norm, which concern rows by their number.
    """

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        if inner.padding_idx is not None or inner.max_norm is not None:
            raise ValueError("an embedding with padding_idx or max_norm cannot be cut")
        keep_shard(inner, "weight", dim=0, axis=group)

    def forward(self, tokens):                          # (batch, seq)
        rows = self.inner.weight.shape[0]
        here = tokens - self.group.rank() * rows        # the row in this rank's part
        elsewhere = (here < 0) | (here >= rows)
        x = self.inner(here.masked_fill(elsewhere, 0))
        return SumOut.apply(x.masked_fill(elsewhere[..., None], 0), self.group)


class VocabParallelHead(nn.Module):
    """The linear that ends the model: each rank makes the logits (batch, seq, vocab/t) of its part
    of the vocabulary. Communication: an all_reduce of the input's gradient in backward."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        cut_outputs(inner, group)

    def forward(self, x):
        return self.inner(CopyIn.apply(x, self.group))


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


# ------------------------------------------------------------------------------------------ overlap


class CopyInColumns(torch.autograd.Function):
    """f and the linears behind it in one, so that backward can send while it computes.

    x (..., in), weights (out, in) each; returns x times each. In backward the input's gradient is
    on its way while the weights' gradients are computed.
    """

    @staticmethod
    def forward(ctx, x, group, *weights):
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight) for weight in weights)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        dx = functools.reduce(torch.add, map(torch.matmul, gradients, weights))
        handle = dist.all_reduce(dx, group=ctx.group, async_op=True)
        rows = x.flatten(0, -2)                         # (tokens, in)
        dw = [gradient.flatten(0, -2).T @ rows for gradient in gradients]
        handle.wait()
        return dx, None, *dw


class Computed(nn.Module):
    """Stands where a linear stood, and hands out the output that was computed for it."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias, self.output = linear.weight, linear.bias, None

    def forward(self, x):
        return self.output if self.bias is None else self.output + self.bias


class OverlapTensorParallel(TensorParallel):
    """The same, with the linears that read the input computed together, at the door in."""

    def __init__(self, inner, columns, row, group):
        super().__init__(inner, columns, row, group)
        self.columns = [Computed(inner.get_submodule(name)) for name in columns]
        for name, stand_in in zip(columns, self.columns):
            inner.set_submodule(name, stand_in)

    def forward(self, x):
        weights = [column.weight for column in self.columns]
        for column, output in zip(self.columns, CopyInColumns.apply(x, self.group, *weights)):
            column.output = output
        out = self.inner(x)
        for column in self.columns:
            column.output = None                        # autograd keeps what backward needs
        return out


class OverlapHead(VocabParallelHead):
    def forward(self, x):
        [logits] = CopyInColumns.apply(x, self.group, self.inner.weight)
        return logits if self.inner.bias is None else logits + self.inner.bias


# ------------------------------------------------------------------------------------ the whole GPT


def parallelize(model, cfg, group, copies, overlap=False):
    """Cut common.gpt(cfg, seed=None) over `group`, before its weights are drawn.

    copies: the ranks that hold the same kv head as this one.
    """
    sub_layer, head = (OverlapTensorParallel, OverlapHead) if overlap else (TensorParallel,
                                                                           VocabParallelHead)
    model.embedding = VocabParallelEmbedding(model.embedding, group)
    for block in model[1:-1]:
        share_kv_heads(block.attn, cfg.kv_heads, group, copies)
        block.attn = sub_layer(block.attn, ("q", "k", "v"), "o", group)
        block.mlp = sub_layer(block.mlp, ("up",), "down", group)
    model.head.out = head(model.head.out, group)
    return model


# ---------------------------------------------------------------------------------------- the step


def train_step(model, optimizer, micro_batches, valid, clip, vocab, group):
    """One step, in which every rank sees every sequence. Returns the loss and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets of
    the whole batch. Communication: 4 L + 4 all_reduces a micro-batch; then one of the gradients of
    shared kv heads, if there are any, and one of the norm.
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
    """The same through PyTorch, linear by linear: the matrices become DTensors."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"embedding": RowwiseParallel(input_layouts=Replicate()),
            "head.out": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(1, cfg.layers + 1):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"block{i}.{name}"] = ColwiseParallel()
        for name in ("attn.o", "mlp.down"):
            plan[f"block{i}.{name}"] = RowwiseParallel()
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
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        with loss_parallel():
            loss = common.loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach().full_tensor()

    cut = [p for p in model.parameters() if isinstance(p, DTensor)]         # they do not mix
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    norms = [nn.utils.get_total_norm([p.grad for p in kind]) for kind in (cut, whole)]
    norm = torch.stack([norms[0].full_tensor(), norms[1]]).square().sum().sqrt()
    if clip:
        for kind in (cut, whole):
            nn.utils.clip_grads_with_norm_(kind, clip, norm)
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


def activation_bytes(cfg, batch, t, e):
    """Bytes that a rank keeps for backward, on a CPU: A_in / t + A_out. e: bytes of a number."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    x = tokens * cfg.dim * e                            # one (batch, seq, dim)
    norm = x + 2 * tokens * e + x                       # input, mean and 1/std, output
    outside = cfg.layers * 2 * norm + norm              # and the head's

    kv = x * max(cfg.kv_heads // t, 1) // cfg.heads
    rope = 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * e
    scores = batch * cfg.heads * cfg.seq**2 * e
    inside = cfg.layers * (rope + 2 * kv + (x + scores + x + 8 * x) // t)

    logits = tokens * -(-cfg.vocab // t) * wide
    masks = tokens * (8 + 1) + tokens * (8 + 1 + 1)     # which tokens and targets are on this rank
    return inside + outside + logits + masks


def traffic(cfg, micro_batches, batch, t, e):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    norms = 1 if t > 1 else 0                           # alone, nobody needs to be asked
    calls = micro_batches * (4 * cfg.layers + 2 + 2) + norms
    activations = micro_batches * (4 * cfg.layers + 2) * tokens * cfg.dim * e
    payload = activations + micro_batches * 3 * tokens * wide + norms * wide
    wire = 2 * (t - 1) / t * payload
    if t > cfg.kv_heads:                                # k and v of a head that ranks share
        shared = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads) * e
        ranks = t // cfg.kv_heads
        calls, payload = calls + 1, payload + shared
        wire += 2 * (ranks - 1) / ranks * shared
    return {"all_reduce": (calls, payload, wire)}


def gather_over_matmul(dim, t, width, flops, bandwidth):
    """How long it takes to gather the input of a (dim, dim) matrix, in times of its matmul.

    flops: FLOP/s of a rank. bandwidth: bytes/s that it sends. It could be hidden at 1 or less.
    """
    return width * (t - 1) / (2 * dim) * flops / bandwidth


def ranks_that_pay(hidden, flops, bandwidth):
    """F·W/C: with fewer ranks, an MLP's matmuls take longer than its sends, in 2 bytes a number."""
    return hidden * bandwidth / flops


MACHINES = {  # dense bf16 FLOP/s of a chip, and bytes/s that it can send, as its makers give them
    "A100, NVLink 3": (312e12, 300e9),
    "A100, InfiniBand HDR": (312e12, 25e9),
    "H100, NVLink 4": (989e12, 450e9),
    "H100, InfiniBand NDR": (989e12, 50e9),
    "TPU v5p, one axis of ICI": (459e12, 180e9),
}


# -------------------------------------------------------------------------------------- the picture


def draw(held, sent, path):
    """Left: which rank holds which part of each matrix. Right: bytes sent, against the ranks.

    held: for each rank {name: (full shape, cuts)}. sent: (bytes by formula {ranks: bytes}, ranks,
    what this run measured, its variant).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(5, 2))
    scale, x, tallest = 1 / max(max(shape) for shape, _ in held[0].values()), 0.0, 0.0
    for name, (shape, cuts) in held[0].items():
        height, width = (scale * size for size in shape)
        for rank, parts in enumerate(held):
            cuts = parts[name][1]
            low, size = [0.0, 0.0], [height, width]
            for dim, index, count in cuts:
                size[dim] /= count
                low[dim] = index * size[dim]
            left.add_patch(Rectangle((x + low[1], low[0]), size[1], size[0], edgecolor="white",
                                     facecolor=f"C{rank % 10}", linewidth=0.5))
            shared = [r for r, other in enumerate(held) if other[name][1] == cuts]
            if rank == shared[0]:
                left.text(x + low[1] + size[1] / 2, low[0] + size[0] / 2,
                          ",".join(map(str, shared)), ha="center", va="center", fontsize=5,
                          color="white", rotation=90 if size[1] < 0.06 else 0)
        left.text(x + width / 2, -0.02, name, ha="center", va="bottom", fontsize=8)
        x, tallest = x + width + 0.08, max(tallest, height)
    left.set_xlim(-0.02, x)
    left.set_ylim(tallest + 0.02, -0.08)
    left.set_aspect("equal")
    left.axis("off")
    left.set_title("weights (out, in) and the ranks that hold each part", loc="left", fontsize=10)

    formula, ranks, measured, variant = sent
    right.plot(list(formula), [b / 1e6 for b in formula.values()], "o-", color="#355070",
               markersize=3, label="formula for megatron")
    right.plot(ranks, measured / 1e6, "kx", label=f"measured for {variant}")
    right.set_xscale("log", base=2)
    right.set_xticks(list(formula), list(formula))
    right.set_ylim(bottom=0)
    right.set_xlabel("tensor-parallel ranks")
    right.set_title("MB that a rank sends in a step", loc="left", fontsize=10)
    right.legend(frameon=False)
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run


def train(args, ranks, mesh, copies, text, run):
    """Train for --steps steps; check model states, activations and traffic against the formulas."""
    cfg, t, hand, dtype = args.model, ranks.world, args.variant != "torch", DTYPES[args.dtype]
    width, group = dtype.itemsize, mesh.get_group("tp")
    if hand:
        model = parallelize(gpt(cfg, seed=None), cfg, group, copies, args.variant == "overlap")
        common.draw_weights(model, args.seed, ranks.device, dtype)
        step = functools.partial(train_step, vocab=cfg.vocab, group=group)
    else:
        model = torch_parallelize(gpt(cfg, args.seed, ranks.device, dtype), cfg, mesh)
        step = torch_step
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
    meter = ActivationMeter([*parameters, *model.buffers(), tokens, targets])
    with meter:
        if hand:
            VocabParallelLoss.apply(model(tokens), targets, cfg.vocab, group)
        else:
            torch_loss(model(tokens), targets)
    run.check("activations of a micro-batch", meter.bytes,
              activation_bytes(cfg, args.micro_batch, t, width) if hand else None,
              exact=ranks.device.type == "cpu")

    sent = traffic(cfg, len(pairs), args.micro_batch, t, width)
    run.check_comm(sent if hand else {op: (None, None, None) for op in run.comm.total})
    if not hand:
        measured = sum(op["wire_bytes"] for op in run.comm.total.values())
        _, _, least = sent["all_reduce"]
        run.note(f"on the wire {quantity(round(measured))} in a step, and megatron sends "
                 f"{quantity(round(least))}")
    return model


def report(args, ranks, run, model):
    """Say how many ranks pay, and draw who holds what."""
    cfg, t = args.model, ranks.world
    run.note("left: an all_gather, in times of the matmul behind it (8 ranks, dim 8192, bf16)")
    run.note("right: up to how many ranks an MLP of that dim takes longer to compute than to send")
    for machine, rates in MACHINES.items():
        ratio, most = gather_over_matmul(8192, 8, 2, *rates), ranks_that_pay(4 * 8192, *rates)
        run.note(f"  {machine:<26}{ratio:8.2f}{most:10.1f} ranks")

    shown = [(name, p) for name, p in common.named_parameters(model)
             if name.startswith(("embedding", "block1.", "head.out")) and p.ndim > 1]
    held = [None] * t
    dist.all_gather_object(held, {name.removesuffix(".weight").removeprefix("block1."):
                                  shape_and_cuts(p) for name, p in shown})
    if ranks.rank == 0:
        measured = sum(op["wire_bytes"] for op in run.comm.total.values())
        m, width = args.batch // args.micro_batch, DTYPES[args.dtype].itemsize
        formula = {n: traffic(cfg, m, args.micro_batch, n, width)["all_reduce"][2]
                   for n in range(1, 2 * t + 1) if fits(cfg, n)}
        draw(held, (formula, t, measured, args.variant), args.plot)
    run.note(f"picture: {args.plot}")


def shape_and_cuts(p):
    """The full shape of a parameter, and this rank's cuts of it: (dim, index, parts) each."""
    if hasattr(p, "placements"):                        # a DTensor's
        ranks = p.device_mesh.get_local_rank(), p.device_mesh.size()
        return tuple(p.shape), [(cut.dim, *ranks) for cut in p.placements if cut.is_shard()]
    return tuple(p.full_shape), [tuple(cut[:3]) for cut in p.cuts]


def fits(cfg, t, shares=True):
    """Whether t ranks get whole heads: q's, and some kv heads each, or (if it `shares`) one that
    several have."""
    return cfg.heads % t == 0 and (cfg.kv_heads % t == 0 or shares and t % cfg.kv_heads == 0)


def refuse_what_does_not_fit(args, t):
    """Heads, and with them dim and 4·dim, must be a multiple of the ranks."""
    cfg, shares = args.model, args.variant != "torch"
    works = max(n for n in range(1, t + 1) if fits(cfg, n, shares))
    instead = f"{t} tensor-parallel ranks; --nproc_per_node={works} would work"
    if cfg.heads % t:
        why = "fewer than" if t > cfg.heads else "not a multiple of"
        common.refuse(f"--heads {cfg.heads} is {why} {instead}")
    if not fits(cfg, t, shares):
        why = "is neither a multiple nor a divisor of" if shares else \
            "(which --variant torch cannot share) is not a multiple of"
        common.refuse(f"--kv-heads {cfg.kv_heads} {why} {instead}")


def check_identities(run, t):
    """Both ways to cut a product, on matrices of small whole numbers: nothing is rounded."""
    a, b = torch.randint(-9, 10, (2, 4 * t, 4 * t)).double()
    for matmul in (matmul_by_columns, matmul_by_rows):
        off = (matmul(a, b, t) - a @ b).abs().max().item()
        run.check(f"{matmul.__name__}, off by", off, 0.0, unit="")


def main(argv=None):
    parser = common.parser(__file__, __doc__, ("megatron", "overlap", "torch"), default="megatron",
                           steps=20)
    parser.set_defaults(plot="runs/04_tensor_parallel.png")
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
    run = common.Run(args, ranks, text, build)
    check_identities(run, t)
    model = train(args, ranks, mesh, copies, text, run)
    report(args, ranks, run, model)
    return run.finish()


if __name__ == "__main__":
    common.launch(main)
