r"""04 · Tensor parallelism: every matrix is cut, and all ranks work on the same tokens.

ZeRO (chapter 03) cuts what a rank stores, but a rank still computes with whole matrices, and keeps
the activations of whole layers. Tensor parallelism cuts the matrix multiplication itself, and there
are two ways to cut A·B into t parts:

    B by columns    A · [B1 | B2]             =  [A·B1 | A·B2]        concatenate the outputs
    A by columns    [A1 | A2] · | B1 |        =  A1·B1 + A2·B2        sum the outputs
    and B by rows               | B2 |

The first needs all of A on every rank and leaves the output cut; the second takes a cut input, and
needs a sum at the end. So do one after the other, and send nothing in between. The output of the
first may stay cut, since GELU works on each hidden unit by itself, and attention on each head. (The
other way round it could not: the GELU of a sum is not the sum of the GELUs.) That is Megatron's
pair, and a transformer has it twice in every block, once in each sub-layer:

                  by columns                       by rows
    attention     q, k, v: some heads each         o
    MLP           up: some hidden units each       down

                   +-----------------------------------------+
    x, the same    |  rank 0:  q0 k0 v0 -> heads 0, 1 -> o0  |      sum, the same
    on all ranks -f-  rank 1:  q1 k1 v1 -> heads 2, 3 -> o1  -g-->  on all ranks
                   +-----------------------------------------+
                   forward                       backward
    f, before it   hands x on                    all_reduce of the gradient
    g, behind it   all_reduce of the output      hands the gradient on

f and g are conjugates: each sends in the pass in which the other does not. x goes into t parts, so
its gradient is the sum of t gradients; each partial output goes into a sum, so its gradient is that
of the sum. Both are autograd Functions of a few lines, and a wrapper puts them around a sub-layer.
The sub-layer does not know that it was cut: our attention reads its number of heads off the width
of its projections.

    Heads.        t must divide the heads. With fewer kv heads than ranks (GQA), neighbouring ranks
                  hold the same kv head. Each sees the gradient of its own query heads alone, so the
                  gradients of a kv head are summed over the ranks that hold it.

    Vocabulary.   The embedding's table is cut by rows, so a rank holds the vectors of some tokens:
                  it looks up those, has zeros for the others, and g adds the ranks up. (It needs no
                  f: tokens have no gradient.) The head has an f and is cut by columns: a rank
                  computes the logits of some tokens of the vocabulary.
                  Cross-entropy needs of the other ranks only three numbers for each target: the
                  largest logit (subtracted before anything is exponentiated), the sum of the
                  exponentials, and the target's own logit. Two all_reduces bring them, backward has
                  all it needs then, and the full logits never exist. If t does not divide the
                  vocabulary, it is padded with rows of zeros; their logits are set to -inf, so they
                  get no probability.

    LayerNorm.    Its weights are on all ranks, and nothing is sent to keep them equal: with the
                  same x (after g) and the same gradient (after f), every rank computes the same
                  update. The gradient norm must count them once, and a cut matrix in all its parts.

What a rank stores and sends (b sequences of s tokens in a micro-batch, h = dim, e bytes a number)

    parameters       1/t of every matrix, but never less than one kv head; LayerNorms in full
    activations      A_in / t + A_out. Inside the sub-layers 1/t (but k and v of a whole kv head,
                     and RoPE's tables), and of the logits; outside of them, in full, the residual
                     stream and what LayerNorms read and write (chapter 05 cuts A_out too)
    all_reduces      4 L + 2 a micro-batch, of b·s·h·e bytes: two forward and two backward in every
                     block, one for the embedding, one for the head; and the two small ones of the
                     loss. Once a step the norm, and the gradients of kv heads that ranks share

When it stops paying: what comes after an all_reduce needs the sum, so sending does not hide behind
compute. (There is one exception: in backward, the weights' gradients can be computed while the
input's gradient is summed. That is the `overlap` variant.) How many ranks pay? Take an MLP's
forward, on ranks that compute C FLOP/s and send W bytes/s:

    1.  It computes two matrices of h x 4h / t:      16 h² / t FLOPs a token, in 16 h² / (t·C) s
    2.  It sends one all_reduce of h numbers:        2 (t-1)/t · h·e bytes a token, over W
    3.  Sending takes no longer than computing if    (t-1) · e / (8 h) · C / W  <=  1

Batch and sequence are not in it, only h, t and the machine. An H100 has C = 989e12, and W = 450e9
over NVLink, 50e9 over InfiniBand. With h = 8192 in bf16 (e = 2), that gives 15 ranks over NVLink
and 2 over InfiniBand; at the limit, an MLP's forward takes twice its compute. (Attention's
projections compute half as much for their all_reduce, and a backward twice as much for its own;
over a whole block it is 17 and 2.) Hence the rule: tensor parallelism inside a machine, and
something else (chapters 02, 03 and 07) between machines.

Run it:
    torchrun --nproc_per_node=4 04_tensor_parallel.py
    torchrun --nproc_per_node=8 04_tensor_parallel.py --kv-heads 2 --vocab 1000 --clip 1
    torchrun --nproc_per_node=4 04_tensor_parallel.py --variant overlap
    torchrun --nproc_per_node=4 04_tensor_parallel.py --variant torch
    torchrun --nproc_per_node=8 04_tensor_parallel.py --preset gpt2 --heads 16 --kv-heads 16
                                                            (8 ranks do not divide its 12 heads)

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters (PTD-P, 2021), sections 2.3 and 3; How To Scale Your Model,
part 5, "Tensor Parallelism" (the condition is its t < F·W/C, F = 4 h, with t for t-1); Ultra-Scale
Playbook, "Tensor Parallelism" and A3 (which compares one gather with one h x h matrix, at a byte a
number).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import common
from common import clip_grads, gpt, grad_norm, keep_shard, mark_partial, sum_partial_grads

# ---------------------------------------------------------------------------- two matrix identities

def matmul_by_columns(a, b, t):
    """a (m, k) times b (k, n), with b cut by columns: t outputs side by side."""
    return torch.cat([a @ b_part for b_part in b.chunk(t, dim=1)], dim=1)


def matmul_by_rows(a, b, t):
    """a (m, k) times b (k, n), with a cut by columns and b by rows: a sum of t outputs."""
    parts = zip(a.chunk(t, dim=1), b.chunk(t, dim=0))
    return sum(a_part @ b_part for a_part, b_part in parts)


# ------------------------------------------------------------------------------------------ f and g

def summed(x, group):
    """The sum of x over the ranks of `group`, as a new tensor."""
    total = x.clone(memory_format=torch.contiguous_format)      # a gradient may not be contiguous
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
        return summed(gradient, ctx.group), None


class SumOut(torch.autograd.Function):
    """g: sums what every rank has a part of; its gradient is handed on."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


# ----------------------------------------------------------------------------------- the sub-layers

class TensorParallel(nn.Module):
    """Megatron's pair around one sub-layer: copy the input in, sum the partial outputs out.

    columns: the linears of `inner` that read its input, cut by columns of the product. row: the
    linear that ends it. Communication: an all_reduce of the output in forward, and one of the
    input's gradient in backward.
    """

    def __init__(self, inner, columns, row, group):
        super().__init__()
        self.inner, self.group = inner, group
        for linear in columns:                          # split the outputs: some heads each
            keep_shard(linear, "weight", dim=0, axis=group)     # (k and v have been cut already)
        keep_shard(row, "weight", dim=1, axis=group)    # split the inputs: a partial sum each

    def forward(self, x):                               # (batch, seq, dim), the same on every rank
        x = CopyIn.apply(x, self.group)
        partial = self.inner(x)
        return SumOut.apply(partial, self.group)


def share_kv_heads(attn, kv_heads, group, copies):
    """Cut k and v by heads. With fewer heads than ranks, the ranks of `copies` hold the same one,
    and each has the gradient of its own query heads alone: note that it must be summed."""
    for linear in (attn.k, attn.v):
        keep_shard(linear, "weight", dim=0, axis=group, parts=min(kv_heads, group.size()))
        if copies.size() > 1:
            mark_partial(linear, "weight", copies)


# --------------------------------------------------------------- the vocabulary: embedding and head

class VocabParallelEmbedding(nn.Module):
    """A table of which each rank holds the rows of some tokens. Looks those up; g adds the others.

    tokens (batch, seq) to (batch, seq, dim). Communication: an all_reduce of the output in forward.
    """

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        keep_shard(inner, "weight", dim=0, axis=group)

    def forward(self, tokens):
        rows = self.inner.weight.shape[0]
        local_token = tokens - self.group.rank() * rows         # its row in this rank's part
        not_mine = (local_token < 0) | (local_token >= rows)
        x = self.inner(local_token.masked_fill(not_mine, 0))    # any row will do for the others:
        x = x.masked_fill(not_mine[..., None], 0)               # they become zeros
        return SumOut.apply(x, self.group)


class VocabParallelHead(nn.Module):
    """The linear that ends the model: each rank makes the logits (batch, seq, vocab/t) of its part
    of the vocabulary. Communication: an all_reduce of the input's gradient in backward."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        keep_shard(inner, "weight", dim=0, axis=group)

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
        columns = logits.shape[-1]
        first = group.rank() * columns                  # the token of this rank's first column
        is_padding = torch.arange(first, first + columns, device=logits.device) >= vocab
        logits = logits.masked_fill(is_padding, -torch.inf)

        largest = logits.amax(-1)                       # (batch, seq)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        logits -= largest[..., None]                    # at most 0: no exponential overflows.
                                                        # From here on in place, in one buffer

        local_target = targets - first
        is_mine = (local_target >= 0) & (local_target < columns)
        local_target = local_target.clamp(0, columns - 1)[..., None]
        target_logit = logits.gather(-1, local_target)[..., 0].masked_fill(~is_mine, 0)

        exponentials = logits.exp_()
        sums = torch.stack([exponentials.sum(-1), target_logit])        # (2, batch, seq)
        dist.all_reduce(sums, group=group)
        sum_of_exponentials, target_logit = sums

        is_valid = targets != -100                      # log of the sum, less the target's logit
        probabilities = exponentials.div_(sum_of_exponentials[..., None])
        ctx.save_for_backward(probabilities, local_target, is_mine, is_valid)
        return ((sum_of_exponentials.log() - target_logit) * is_valid).sum()

    @staticmethod
    def backward(ctx, gradient):                        # probabilities, less 1 at the target
        probabilities, local_target, is_mine, is_valid = ctx.saved_tensors
        scale = (gradient * is_valid)[..., None]        # (batch, seq, 1)
        dlogits = probabilities * scale
        dlogits.scatter_add_(-1, local_target, -scale * is_mine[..., None])
        return dlogits, None, None, None


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
        dx = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:]):
            dx += gradient @ weight
        handle = dist.all_reduce(dx, group=ctx.group, async_op=True)

        rows = x.flatten(0, -2)                         # (tokens, in)
        dw = [gradient.flatten(0, -2).T @ rows for gradient in gradients]
        handle.wait()
        return dx, None, *dw


class OverlapTensorParallel(TensorParallel):
    """The same, where f moves from `forward` into `inner.project`, to the matmuls behind it."""

    def __init__(self, inner, columns, row, group):
        super().__init__(inner, columns, row, group)

        def project(x):
            outputs = CopyInColumns.apply(x, group, *[linear.weight for linear in columns])
            return outputs if len(columns) > 1 else outputs[0]

        inner.project = project                         # in place of the method of that name

    def forward(self, x):                               # no f here: it is in project
        partial = self.inner(x)
        return SumOut.apply(partial, self.group)


class OverlapHead(VocabParallelHead):
    def forward(self, x):
        [logits] = CopyInColumns.apply(x, self.group, self.inner.weight)
        return logits


# ------------------------------------------------------------------------------------ the whole GPT

def parallelize(model, cfg, group, copies, variant="megatron"):
    """Cut common.gpt(cfg, seed=None) over `group`, before its weights are drawn.

    copies: the ranks that hold the same kv head as this one.
    """
    overlap = variant == "overlap"
    sub_layer = OverlapTensorParallel if overlap else TensorParallel
    head = OverlapHead if overlap else VocabParallelHead

    model.embedding = VocabParallelEmbedding(model.embedding, group)
    for block in model[1:-1]:
        attn, mlp = block.attn, block.mlp
        share_kv_heads(attn, cfg.kv_heads, group, copies)
        block.attn = sub_layer(attn, [attn.q, attn.k, attn.v], attn.o, group)
        block.mlp = sub_layer(mlp, [mlp.up], mlp.down, group)
    model.head.out = head(model.head.out, group)
    return model


# ----------------------------------------------------------------------------------------- the step

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
    sum_partial_grads(model.parameters())

    norm = grad_norm(model.parameters(), group)
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


def torch_parallelize(model, cfg, mesh):
    """The same through PyTorch: the matrices become DTensors, and every linear has an f or a g of
    its own. So q, k and v each sum the gradient of their input, where ours sum it once."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {"embedding": parallel.RowwiseParallel(input_layouts=Replicate()),
            "head.out": parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for i in range(1, cfg.layers + 1):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"block{i}.{name}"] = columns
        for name in ("attn.o", "mlp.down"):
            plan[f"block{i}.{name}"] = rows
    parallel.parallelize_module(model, mesh, plan)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    return model


def torch_step(model, optimizer, micro_batches, valid, clip):
    """The same with DTensors, and PyTorch's loss of logits that are cut by vocabulary.

    optimizer: of two groups, the DTensors and the others, which no operator takes together."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        with loss_parallel():                           # backward must run in it too
            loss = common.loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach().full_tensor()

    cut, whole = (group["params"] for group in optimizer.param_groups)
    cut_norm = nn.utils.get_total_norm([p.grad for p in cut]).full_tensor()
    whole_norm = nn.utils.get_total_norm([p.grad for p in whole])
    norm = (cut_norm**2 + whole_norm**2).sqrt()
    if clip:
        nn.utils.clip_grads_with_norm_(cut, clip, norm)
        nn.utils.clip_grads_with_norm_(whole, clip, norm)
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------- the formulas

def parameters_per_rank(cfg, t):
    """Numbers on a rank: 1/t of every matrix, but one kv head at least, and all of a LayerNorm."""
    kv_dim = cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)
    matrices = 10 * cfg.dim**2 // t + 2 * cfg.dim * kv_dim          # q, o, up, down; k and v
    block = matrices + 4 * cfg.dim                                  # two LayerNorms
    table = -(-cfg.vocab // t) * cfg.dim                            # with its padding
    return cfg.layers * block + 2 * cfg.dim + (1 if cfg.tie else 2) * table


def activation_bytes(cfg, batch, t, e):
    """Bytes that a rank keeps for backward, on a CPU: A_in / t + A_out. e: bytes of a number."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    x = tokens * cfg.dim * e                            # one (batch, seq, dim)
    norm = x + 2 * tokens * e + x                       # input, mean and 1/std, output
    outside = cfg.layers * 2 * norm + norm              # and the head's

    kv = x * max(cfg.kv_heads // t, 1) // cfg.heads
    rope = cfg.seq * cfg.dim // cfg.heads * e           # cos and sin, which all blocks share
    core = common.core_bytes(cfg.attention, cfg, batch, e, t)
    cut = x + x + 4 * x + 4 * x                         # q; o's input; GELU's input and output
    inside = rope + cfg.layers * (2 * kv + core + cut // t)

    logits = tokens * -(-cfg.vocab // t) * wide
    masks = tokens * (8 + 1) + tokens * (8 + 1 + 1)     # local_token and not_mine; local_target,
                                                        # is_mine and is_valid
    return inside + outside + logits + masks


def traffic(cfg, micro_batches, batch, t, e):
    """What is sent in a step: {op: (calls, bytes of payload, bytes on the wire)}."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    norms = 1 if t > 1 else 0                           # alone, nobody needs to be asked
    calls = micro_batches * (4 * cfg.layers + 2 + 2) + norms
    activations = micro_batches * (4 * cfg.layers + 2) * tokens * cfg.dim * e
    payload = activations + micro_batches * 3 * tokens * wide + norms * wide
    wire = 2 * (t - 1) / t * payload
    if t > cfg.kv_heads:                                # k and v of a head that ranks share
        shared = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads) * e
        copies = t // cfg.kv_heads
        calls += 1
        payload += shared
        wire += 2 * (copies - 1) / copies * shared
    return {"all_reduce": (calls, payload, wire)}


def send_over_compute(dim, t, width, flops, bandwidth):
    """How long an MLP's all_reduce takes, in times of its two matmuls: the lesson's condition.

    width: bytes of a number. flops: FLOP/s of a rank. bandwidth: bytes/s that it sends.
    """
    return (t - 1) * width / (8 * dim) * flops / bandwidth


def ranks_that_pay(dim, width, flops, bandwidth):
    """Up to how many ranks an MLP sends no longer than it computes: where the ratio above is 1."""
    return 1 + 8 * dim / width * bandwidth / flops


# ------------------------------------------------------------------------------------------ the run

def train(run):
    args, cfg, t = run.args, run.args.model, run.world
    group = run.mesh(tp=t)["tp"].get_group()
    check_identities(run, t)
    model = parallelize(gpt(cfg, seed=None), cfg, group, run.kv_copies(t), args.variant)
    common.draw_weights(model, args.seed, run.device, run.dtype)
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches():                         # every rank takes all of it
        with run.measure():
            loss, norm = train_step(model, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    cfg.vocab, group)
        run.log(batch, loss, norm, model)

    def forward(tokens, targets):
        return VocabParallelLoss.apply(model(tokens), targets, cfg.vocab, group)

    width = run.dtype.itemsize
    run.check_states(model, optimizer, parameters_per_rank(cfg, t))
    run.check_activations(model, forward, activation_bytes(cfg, args.micro_batch, t, width))
    run.check_traffic(traffic(cfg, len(batch.micro_batches), args.micro_batch, t, width))
    run.on_machines({
        "an MLP's all_reduce, in times of its matmuls (8 ranks, dim 8192, bf16)":
            lambda *rates: send_over_compute(8192, 8, 2, *rates),
        "up to how many ranks it sends no longer than it computes":
            lambda *rates: ranks_that_pay(8192, 2, *rates)})


def check_identities(run, t):
    """Both ways to cut a product, on matrices of small whole numbers: nothing is rounded."""
    a, b = torch.randint(-9, 10, (2, 4 * t, 4 * t)).double()
    for matmul in (matmul_by_columns, matmul_by_rows):
        off = (matmul(a, b, t) - a @ b).abs().max().item()
        run.check(f"{matmul.__name__}, off by", off, 0.0, unit="")


def train_torch(run):
    from torch.distributed.tensor import DTensor

    args, cfg = run.args, run.args.model
    model = gpt(cfg, args.seed, run.device, run.dtype)
    torch_parallelize(model, cfg, run.mesh(tp=run.world))
    common.name_parameters(model)                       # DTensors by now
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[isinstance(p, DTensor)].append(p)
    optimizer = run.optimizer([{"params": groups[True]}, {"params": groups[False]}])

    for batch in run.batches():
        with run.measure():
            loss, norm = torch_step(model, optimizer, batch.micro_batches, batch.valid, args.clip)
        run.log(batch, loss, norm, model)

    def forward(tokens, targets):
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return common.loss_sum(model(tokens), targets)

    run.check_states(model, optimizer)
    run.check_activations(model, forward)
    run.check_traffic()
    run.compare_traffic("megatron", traffic(cfg, len(batch.micro_batches), args.micro_batch,
                                            run.world, run.dtype.itemsize))


def fits(cfg, t, shares):
    """Whether t ranks get whole heads: q's, and some kv heads each, or (if it `shares`) one that
    several ranks have."""
    return cfg.heads % t == 0 and (cfg.kv_heads % t == 0 or shares and t % cfg.kv_heads == 0)


def requires(args, ranks):
    """Heads, and with them dim and 4·dim, must be a multiple of the ranks."""
    common.split_batch(args, 1)
    cfg, shares = args.model, args.variant != "torch"
    works = max(n for n in range(1, ranks + 1) if fits(cfg, n, shares))
    if works < ranks:
        why = "" if shares else " (torch cannot share a kv head)"
        common.refuse(f"--heads {cfg.heads} and --kv-heads {cfg.kv_heads} do not fit {ranks} "
                      f"tensor-parallel ranks{why}; --nproc_per_node={works} would work")


VARIANTS = {"megatron": train, "overlap": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires)
