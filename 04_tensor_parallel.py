r"""04 · Tensor parallelism: every matrix is cut, and all ranks work on the same tokens.

ZeRO (chapter 03) cuts what a rank stores, but a rank still computes with whole matrices, and keeps
the activations of whole layers. Tensor parallelism cuts the matrix multiplication itself, and there
are two ways to cut a product of activations and weights, A·B, into t parts:

    B by columns    A · [B1 | B2]             =  [A·B1 | A·B2]        concatenate the outputs
    A by columns    [A1 | A2] · | B1 |        =  A1·B1 + A2·B2        sum the outputs
    and B by rows               | B2 |

The first needs all of A on every rank and leaves the output cut. The second takes an input that is
cut, and needs a sum at the end. So do the second after the first, and send nothing in between: the
output of the first may stay cut, since GELU works on each hidden unit by itself (so does SwiGLU, if
gate and up are cut alike), and attention on each head. (In the other order a sum lies in between:
the GELU of a sum is not the sum of the GELUs.) A block has this pair of Megatron's twice:

                  by columns                       by rows
    attention     q, k, v: some heads each         o
    MLP           up, gate: hidden units each      down

                   +-----------------------------------------+
    x, the same    |  rank 0:  q0 k0 v0 -> heads 0, 1 -> o0  |      sum, the same
    on all ranks -f-  rank 1:  q1 k1 v1 -> heads 2, 3 -> o1  -g-->  on all ranks
                   +-----------------------------------------+
                   forward                       backward
    f, before it   hands x on                    all_reduce of the gradient
    g, behind it   all_reduce of the output      hands the gradient on

f and g are conjugates: each sends in the pass in which the other does not. x goes into t parts, so
its gradient is the sum of t gradients; each partial output goes into a sum, so its gradient is that
of the sum. A wrapper puts both around a sub-layer, which does not know that it was cut: our
attention reads its number of heads off the width of its projections.

Heads. t must divide the heads. With fewer kv heads than ranks (GQA), neighbouring ranks hold the
same kv head. Each sees the gradient of its own query heads alone, so these ranks sum it up.

Vocabulary. The embedding's table is cut by rows, so a rank holds the vectors of some tokens: it
looks up those, has zeros for the others, and g adds the ranks up. (It needs no f: tokens have no
gradient.) The head has an f and is cut by columns: a rank computes the logits of some tokens of the
vocabulary. The loss of a target is log(sum of exp(logit - m)) - (its own logit - m), where m is the
largest logit, so that no exponential overflows. No rank knows these three numbers alone: one
all_reduce finds m, the maximum, and another one the sum and the target's own logit. Then backward
has all it needs, and the full logits never exist. If t does not divide the vocabulary, it is padded
with rows of zeros, whose logits are set to -inf, so that they get no probability.

Norms. Their weights are on all ranks, and nothing is sent to keep them equal: with the same x
(after g) and the same gradient (after f), every rank computes the same update. The gradient norm
must count them once, and a cut matrix in all its parts.

What a rank stores and sends (b sequences of s tokens in a micro-batch, h = dim, e bytes a number)

    parameters       1/t of every matrix, but never less than one kv head; norms in full
    activations      A_in / t + A_out. Of chapter 01's classes, A_in is `inside`, `core`, `keys and
                     values` and `logits`; A_out is `outside` and `inputs`, which is all that
                     norms read and write. Chapter 05 cuts A_out, too
    all_reduces      4 L + 2 a micro-batch, of b·s·h·e bytes: two forward and two backward in every
                     block, one for the embedding, one for the head; and the two small ones of the
                     loss. Once a step the norm, and the gradients of kv heads that ranks share.
                     With --recompute full L more: attention's sums (backward reads no MLP's)

When it stops paying: what comes after an all_reduce needs the sum, so sending does not hide behind
compute. (There is one exception: in backward, the weights' gradients can be computed while the
input's gradient is summed. That is the `overlap` variant.) How many ranks pay? Take an MLP's
forward, on ranks that compute C FLOP/s and send W bytes/s:

    1.  It computes two matrices of h x 4h / t:      16 h² / t FLOPs a token, in 16 h² / (t·C) s
    2.  It sends one all_reduce of h numbers:        2 (t-1)/t · h·e bytes a token, over W
    3.  Sending takes no longer than computing if    t  <=  1 + 8 h / e · W / C

(SwiGLU has three matrices, so 3 · ffn takes the place of 8 h.) Batch and sequence are not in it. An
H100 has C = 989e12, and W = 450e9 over NVLink, 50e9 over InfiniBand. With h = 8192 in bf16 (e = 2),
the limit is 15 ranks over NVLink and 2 over InfiniBand. At the limit, sending takes as long as
computing; on a machine's 8 ranks over NVLink, 0.47 times as long. Hence the rule: tensor
parallelism inside a machine, and something else (chapters 02, 03 and 07) between machines.

Going further: f and g as types. The library spmd_types gives x a type along the axis tp: I or R if
all ranks hold the same, P for partial sums. An I has a whole gradient (I), an R a partial one (P):

    f    x = spmd_types.convert(x, tp, src=I, dst=R)        backward: P to I, an all_reduce
    g    x = spmd_types.all_reduce(x, tp, src=P, dst=I)     backward: I to R, nothing to send

Run it:
    torchrun --nproc_per_node=4 04_tensor_parallel.py
    torchrun --nproc_per_node=8 04_tensor_parallel.py --kv-heads 2 --vocab 1000 --clip 1
    torchrun --nproc_per_node=4 04_tensor_parallel.py --variant overlap           (or torch)

Sources: Shoeybi et al., Megatron-LM (2019), section 3; Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters (2021), sections 2.3 and 3; How To Scale Your Model, part 5,
"Tensor Parallelism" (its condition, t < F·W/C with F = 4 h, has t for our t-1); Ultra-Scale
Playbook, "Tensor Parallelism" and A3 (which counts a number as one byte).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, keep_shard

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

    columns: the linears of `inner` that read its input. row: the linear that ends it. (A linear
    keeps its matrix transposed, as (out, in), so to cut that by columns is to cut dim 0.)
    Communication: an all_reduce of the output in forward, of the input's gradient in backward.
    """

    def __init__(self, inner, columns, row, group):
        super().__init__()
        self.inner, self.group = inner, group
        for linear in columns:                          # split the outputs: some heads each
            keep_shard(linear, "weight", dim=0, group=group)     # (k and v have been cut already)
        keep_shard(row, "weight", dim=1, group=group)    # split the inputs: a partial sum each

    def forward(self, x):                               # (batch, seq, dim), the same on every rank
        x = CopyIn.apply(x, self.group)
        x = self.inner(x)                               # now a partial sum
        return SumOut.apply(x, self.group)


def share_kv_heads(attn, kv_heads, group, holders):
    """Cut k and v by heads. holders: where there are fewer heads than ranks, those that hold the
    same one. Each has the gradient of its own query heads alone: note that it must be summed."""
    for linear in (attn.k, attn.v):
        keep_shard(linear, "weight", dim=0, group=group, parts=min(kv_heads, group.size()))
        if holders:
            linear.weight.partial = holders


# --------------------------------------------------------------- the vocabulary: embedding and head

class VocabParallelEmbedding(nn.Module):
    """A table of which each rank holds the rows of some tokens: (batch, seq) to (batch, seq, dim).
    Communication: an all_reduce of the output in forward."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group
        keep_shard(inner, "weight", dim=0, group=group)

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
        keep_shard(inner, "weight", dim=0, group=group)

    def forward(self, x):
        return self.inner(CopyIn.apply(x, self.group))


class VocabParallelLoss(torch.autograd.Function):
    """Cross-entropy, summed over the valid targets, of logits that are cut by vocabulary.

    logits (batch, seq, ceil(vocab/t)), targets (batch, seq) with -100 where not valid; the same sum
    on every rank. Communication: all_reduces of (batch, seq) and (2, batch, seq) in forward. With a
    vocabulary of 4 on two ranks, a target that is token 1 goes this way:

                                   rank 0                 rank 1               all_reduce
        logits                      1.00   2.00            3.00   0.00          largest: 3.00
        less the largest           -2.00  -1.00            0.00  -3.00
        sum of exponentials         0.14 + 0.37 = 0.50     1.00 + 0.05 = 1.05   sum: 1.55
        the target's, if here      -1.00                   0.00                 sum: -1.00
        loss                        log 1.55 - (-1.00) = 1.44, on both
        exponentials / 1.55         0.09   0.24            0.64   0.03
        gradient                    0.09  -0.76            0.64   0.03
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
        logits -= largest[..., None]                    # in place: the largest tensor of the step

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
    """f and the linears behind it in one: x (..., in) times each of the weights, (out, in). In
    backward the input's gradient is on its way while the weights' gradients are computed."""

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
            return CopyInColumns.apply(x, group, *[linear.weight for linear in columns])

        inner.project = project                         # in place of the method of that name

    def forward(self, x):
        return SumOut.apply(self.inner(x), self.group)  # no f here: it is in project


class OverlapHead(VocabParallelHead):
    def forward(self, x):
        [logits] = CopyInColumns.apply(x, self.group, self.inner.weight)
        return logits


# ------------------------------------------------------------------------------------ the whole GPT

def parallelize(model, cfg, group, variant):
    """Cut common.gpt(cfg, seed=None) over `group`, all ranks, before its weights are drawn."""
    sub_layer, head, holders = TensorParallel, VocabParallelHead, None
    if variant == "overlap":
        sub_layer, head = OverlapTensorParallel, OverlapHead
    if group.size() > cfg.kv_heads:
        holders, _ = dist.new_subgroups(group.size() // cfg.kv_heads)   # of the same kv head

    model.embedding = VocabParallelEmbedding(model.embedding, group)
    for block in model[1:-1]:
        attn, mlp = block.attn, block.mlp
        share_kv_heads(attn, cfg.kv_heads, group, holders)
        block.attn = sub_layer(attn, [attn.q, attn.k, attn.v], attn.o, group)
        block.mlp = sub_layer(mlp, mlp.columns, mlp.down, group)
    model.head.out = head(model.head.out, group)
    return model


# ----------------------------------------------------------------------------------------- the step

def train_step(model, optimizer, micro_batches, valid, clip, vocab, group):
    """One step, in which every rank sees every sequence. Returns the loss and the norm. valid: the
    valid targets of the whole batch. micro_batches: pairs of tokens and targets, (micro_batch, seq)
    each. Communication: 4 L + 4 all_reduces for each; in the last backward those of the gradients
    of kv heads that ranks share, if there are any; then one of the norm."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        loss = VocabParallelLoss.apply(model(tokens), targets, vocab, group) / valid
        if i == len(micro_batches):
            sums = PartialSums(model.parameters())      # they start in this backward
        loss.backward()
        total += loss.detach()
    sums.finish()

    norm = grad_norm(model.parameters(), group)
    if clip:
        clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return total, norm


def torch_step(model, optimizer, micro_batches, valid, clip):
    """The same with DTensors, and PyTorch's loss of logits that are cut by vocabulary. optimizer:
    of two groups, the DTensors and the other parameters, since no operator takes both at once."""
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
        clip_grads_with_norm_(cut, clip, norm)
        clip_grads_with_norm_(whole, clip, norm)
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------- the formulas

def parameters_per_rank(cfg, t):
    """Numbers on a rank: 1/t of every matrix, but one kv head at least, and all of a norm."""
    kv_dim = cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)
    matrices = (2 * cfg.dim**2 + cfg.mlp()) // t + 2 * cfg.dim * kv_dim     # q, o; MLP; k and v
    norms = (2 * cfg.layers + 1) * (1 if cfg.gated else 2) * cfg.dim        # RMSNorm has no bias
    table = -(-cfg.vocab // t) * cfg.dim                            # with its padding
    return cfg.layers * matrices + norms + (1 if cfg.tie else 2) * table


def kept(cfg, t):
    """The share of each of chapter 01's classes of activations that a rank keeps, A_in / t + A_out.
    A vocabulary that is cut adds masks (lab/run/anatomy.py), and makes ids of its own."""
    a_in = {"inside": 1 / t, "core": 1 / t, "keys and values": max(1 / t, 1 / cfg.kv_heads)}
    a_out = {"outside": 1, "inputs": 1, "positions": 1, "ids": 1}
    return a_in | a_out | {"logits": 1 / t, "vocabulary": "cut"}


def traffic(cfg, micro_batches, batch, t, e, recompute="none", sums=None):
    """What is sent in a step: {op: (calls, bytes of payload, bytes on the wire)}. e: bytes of a
    number; sums: of a gradient that is summed, if those are wider."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    again = cfg.layers if recompute == "full" else 0
    of_x = micro_batches * (4 * cfg.layers + 2 + again)       # all_reduces of (batch, seq, dim)
    norms = 1 if t > 1 else 0                           # alone, nobody needs to be asked
    calls = of_x + micro_batches * 2 + norms            # the loss has two: 3 numbers a token
    payload = of_x * tokens * cfg.dim * e + (micro_batches * 3 * tokens + norms) * wide
    wire = 2 * (t - 1) / t * payload
    if t > cfg.kv_heads:                                # k and v of a head that ranks share
        shared = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads)
        calls += cfg.layers if shared > common.ONE_BUCKET else 1
        payload += shared * (sums or e)                 # among t / kv_heads of them
        wire += 2 * (1 - cfg.kv_heads / t) * shared * (sums or e)
    return {"all_reduce": (calls, payload, wire)}


def ranks_that_pay(dim, width, flops, bandwidth):
    """Up to how many ranks an MLP's all_reduce takes no longer than its matmuls.
    width: bytes of a number. flops: FLOP/s of a rank. bandwidth: bytes/s that it sends."""
    return 1 + 8 * dim / width * bandwidth / flops


def sending_over_computing(t, dim, width, flops, bandwidth):
    """The time of that all_reduce over that of the matmuls: it is 1 at the limit above."""
    return (t - 1) * width / (8 * dim) * flops / bandwidth


# ------------------------------------------------------------------------------------------ the run

def train(run):
    args, cfg, group = run.args, run.args.model, run.mesh(tp=run.world)["tp"].get_group()
    model = run.draw(parallelize(gpt(cfg, seed=None), cfg, group, args.variant))
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    for batch in run.batches():                         # every rank takes all of it
        with run.measure():
            loss, norm = train_step(model, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    cfg.vocab, group)
        run.log(batch, loss, norm, model)


def train_torch(run):
    """The same through PyTorch: the matrices become DTensors, and every linear has an f or a g of
    its own. So q, k and v each sum the gradient of their input, where ours sum it once."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, parallel

    args, cfg = run.args, run.args.model
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan = {"embedding": parallel.RowwiseParallel(input_layouts=Replicate()),
            "head.out": parallel.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
            "block*.attn.[qkv]": columns, "block*.mlp.[ug]*": columns,      # up, gate
            "block*.attn.o": rows, "block*.mlp.down": rows}
    model = run.draw(gpt(cfg, seed=None))
    parallel.parallelize_module(model, run.mesh(tp=run.world), plan)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    common.name_parameters(model)                       # DTensors by now
    common.recompute(model, args.recompute)
    rounded = common.rounded(args)                      # parameters stay in run.dtype
    autocast = torch.autocast(run.device.type, rounded, enabled=rounded != run.dtype)
    model.forward = autocast(model.forward)

    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = run.optimizer([{"params": cut}, {"params": whole}])
    for batch in run.batches():
        with run.measure():
            loss, norm = torch_step(model, optimizer, batch.micro_batches, batch.valid, args.clip)
        run.log(batch, loss, norm, model)


def formulas(args, rank, ranks, model):
    cfg, e, sums = args.model, common.rounded(args).itemsize, common.DTYPES[args.dtype].itemsize
    sent = traffic(cfg, args.batch // args.micro_batch, args.micro_batch, ranks, e,
                   args.recompute, sums)
    if args.variant == "torch":
        return {"kept": None, "beside": ("megatron", sent)}

    seeded = torch.Generator().manual_seed(0)           # small whole numbers: nothing is rounded
    a, b = torch.randint(-9, 10, (2, 4 * ranks, 4 * ranks), generator=seeded).double()
    by_columns = matmul_by_columns(a, b, ranks) - a @ b
    by_rows = matmul_by_rows(a, b, ranks) - a @ b
    return {
        "parameters": parameters_per_rank(cfg, ranks), "kept": kept(cfg, ranks), "sent": sent,
        "checks": {("values", "matmul_by_columns", "off by"): (by_columns.abs().max().item(), 0.0),
                   ("values", "matmul_by_rows", "off by"): (by_rows.abs().max().item(), 0.0)},
        "machines": {"ranks up to which an MLP's all_reduce pays (dim 8192, bf16)":
                     lambda *rates: ranks_that_pay(8192, 2, *rates),
                     "the time of that all_reduce on 8 ranks, over the time of the matmuls":
                     lambda *rates: sending_over_computing(8, 8192, 2, *rates)}}


def fits(cfg, t, can_share):
    """Whether t ranks get whole heads each. can_share: a kv head may be on several ranks."""
    has_heads = cfg.kv_heads % t == 0 or can_share and t % cfg.kv_heads == 0
    return cfg.heads % t == 0 and cfg.hidden % t == 0 and has_heads


def requires(args, ranks):
    """Heads, and with them dim, and the MLP's features must be a multiple of the ranks."""
    common.split_batch(args, 1)
    cfg, can_share = args.model, args.variant != "torch"
    works = max(n for n in range(1, ranks + 1) if fits(cfg, n, can_share))
    if works < ranks:
        why = "" if can_share else " (torch cannot share a kv head)"
        raise Refused(f"--heads {cfg.heads}, --kv-heads {cfg.kv_heads} and --ffn {cfg.hidden} do "
                      f"not fit {ranks} tensor-parallel ranks{why}", f"--nproc_per_node {works}")


VARIANTS = {"megatron": train, "overlap": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, formulas=formulas)
