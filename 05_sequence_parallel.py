r"""05 · Sequence parallelism: what tensor parallelism left whole is cut too, along the sequence.

In chapter 04 every rank holds the residual stream and computes every LayerNorm in full: t ranks
keep and compute the same thing t times. But outside of the sub-layers a token needs no other token.
That holds for the embedding, the LayerNorms, the residual sums, the head and the loss. So let a
rank have 1/t of the sequence there; and inside a sub-layer, as before, all of the sequence and 1/t
of the heads:

            +--------------------------------------------------------------+
         x -+- LayerNorm -- f ----- [ q k v, 1/t of the heads, o ] -- g -- + -- LayerNorm -- f ...

    04   (b, s, h)          (b, s, h)    (b, s, h/t)                  (b, s, h)
    05   (b, s/t, h)        (b, s, h)    (b, s, h/t)                  (b, s/t, h)

               forward                              backward
         04  f nothing                              all_reduce
             g all_reduce                           nothing
         05  f all_gather along the sequence        reduce_scatter
             g reduce_scatter                       all_gather

An all_reduce IS a reduce_scatter and an all_gather (chapter 03). Chapter 04 does both in one place;
here g does the first half, the next f does the second half, and what lies between is cut, for the
same bytes. Three things follow.

    Partial       LayerNorms, embedding and head are on every rank in full, and each rank computes
    gradients.    their gradients from its own tokens. So they are partial sums, and are added up
                  over the ranks, all in one bucket, before the gradient's norm is taken.

    Gathering.    The linears behind f need their whole input in backward, for their weights'
                  gradients. If it is kept (`kept`), there is a full (b, s, h) for every sub-layer
                  again. So `megatron` and `ring` throw it away, and gather it again in backward
                  while the input's gradient is computed: half as many all_gathers more.

    Positions.    RoPE is applied inside attention, where the sequence is whole: nothing changes.

What a rank keeps and sends (x = b·s·h·e bytes, L blocks, a micro-batch)

    parameters       1/t of the blocks' matrices; embedding, head and LayerNorms in full
    activations      (A_in + A_out) / t: all of it is cut, inside of sub-layers and outside, where
                     chapter 04 has A_in / t + A_out. (Not cut: RoPE's tables; k and v of a kv head
                     that ranks share.) In `kept`, x in place of x/t for 2 L inputs of sub-layers
    reduce_scatter   4 L of x: forward and backward of each sub-layer
    all_gather       4 L of x, and 2 L again where it is not kept
    all_reduce       once a step: the partial gradients, those of kv heads that ranks share, and the
                     norm

Production code combines this with chapter 04's cut vocabulary, as chapter 09 will: g behind the
embedding scatters, f before the head gathers, and the loss is the vocabulary-parallel one. It saves
all but 1/t of the tables' 2·V·h parameters, and their all_reduce, for two gathers and two scatters
of x more. The variant `torch` does that, and keeps the gathered inputs.

Collective matmul (`ring`). In the picture above, f must end before the first matmul begins. But
the matmul of one chunk of the sequence needs no other chunk. So the chunks travel around a ring:
while a rank multiplies the one it has, the next arrives, and after t-1 hops it has seen all. For g
the same backwards: a sum travels around the ring, each rank adds its part, and computes the next
part while it travels. PyTorch calls it async TP. The bytes are those of `megatron`, in t-1 messages
a gather. A message hides behind the matmul of a chunk with a matrix of h x n/t if

    (b·s/t · h·e) / bandwidth  <=  (2 · b·s/t · h · n/t) / FLOP/s,  which is

    e·t / (2 n) · FLOP/s / bandwidth  <=  1

For h = 8192 in bf16 on 8 H100s (989 TFLOP/s, and 450 GB/s over NVLink) the left side is 0.5 for an
MLP's matrices (n = 4 h), 0.7 for q, k and v together (n = 3 h), and 2.1 for o (n = h): all but the
last hide.

When it pays: where chapter 04 does, for less memory, and with every LayerNorm computed once and not
t times. It sends up to a quarter more for what it gathers twice, and once a step the gradients of
the tables. It cannot cut attention's own sequence: the s x s scores, and k and v of a head, stay
whole (chapter 06 cuts those).

Run it:
    torchrun --nproc_per_node=4 05_sequence_parallel.py
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant kept
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant ring
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant torch
    torchrun --nproc_per_node=8 05_sequence_parallel.py --kv-heads 2 --clip 1

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
section 4; Wang et al., Overlap Communication with Dependent Computation via Decomposition (2023),
for the ring; Ultra-Scale Playbook, "Sequence Parallelism" and A3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import common
from common import clip_grads, gpt, grad_norm, keep_shard, loss_sum, mark_partial, sum_partial_grads

# -------------------------------------------------------------- the collectives, along the sequence

class InFlight:
    """What is being received, and what is being sent, which must stay alive until it has left."""

    def __init__(self, handles, sent, received):
        self.handles, self.sent, self.received = handles, sent, received

    def wait(self):
        for handle in self.handles:
            handle.wait()
        return self.received


def start_all_gather(x, group):
    """Start to gather x (batch, seq/t, ...) of all ranks: (t, batch, seq/t, ...)."""
    x = x.contiguous()
    parts = x.new_empty(group.size(), *x.shape)
    in_rows = parts.flatten(0, 1)                       # a view, through which `parts` is filled
    handle = common.all_gather(in_rows, x, group=group, async_op=True)
    return InFlight([handle], sent=x, received=parts)


def start_reduce_scatter(x, group):
    """Start to sum x (batch, seq, ...) over the ranks: this rank's part of it, (batch, seq/t, ...).
    Its parts are laid out one behind the other: a copy of all of x, unless the batch is 1."""
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    handle = common.reduce_scatter(mine, parts.flatten(0, 1), group=group, async_op=True)
    return InFlight([handle], sent=parts, received=mine)


def whole_sequence(parts):
    """(t, batch, seq/t, ...) to (batch, seq, ...): a copy of all of it, unless the batch is 1."""
    return parts.transpose(0, 1).contiguous().flatten(1, 2)


def all_gather(x, group):
    return whole_sequence(start_all_gather(x, group).wait())


def reduce_scatter(x, group):
    return start_reduce_scatter(x, group).wait()


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


class SequenceParallel(nn.Module):
    """A sub-layer between f and g: gather the sequence, compute with 1/t of the heads, scatter.

    columns: the linears of `inner` that read its input. row: the linear that ends it.
    Communication: an all_gather and a reduce_scatter, in forward and in backward.
    """

    def __init__(self, inner, columns, row, group):
        super().__init__()
        self.inner, self.group = inner, group
        for linear in columns:                          # split the outputs: some heads each
            keep_shard(linear, "weight", dim=0, axis=group)     # (k and v have been cut already)
        keep_shard(row, "weight", dim=1, axis=group)    # split the inputs: a partial sum each

    def forward(self, x):                               # (batch, seq/t, dim)
        x = GatherIn.apply(x, self.group)               # (batch, seq, dim)
        partial = self.inner(x)
        return ScatterOut.apply(partial, self.group)    # (batch, seq/t, dim)


# ----------------------------------------------------------------- gathered again, in place of kept

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
        gathering = start_all_gather(x, ctx.group)
        dx = gradients[0] @ weights[0]
        for gradient, weight in zip(gradients[1:], weights[1:]):
            dx += gradient @ weight
        scattering = start_reduce_scatter(dx, ctx.group)

        rows = whole_sequence(gathering.wait()).flatten(0, 1)           # (batch·seq, in)
        dw = [gradient.flatten(0, 1).T @ rows for gradient in gradients]
        return scattering.wait(), None, *dw


def fused_projection(function, linears, group):
    """What takes the place of the method `inner.project`: f and these linears, as one function."""

    def project(x):
        outputs = function.apply(x, group, *[linear.weight for linear in linears])
        return outputs if len(outputs) > 1 else outputs[0]

    return project


class RegatherSequenceParallel(SequenceParallel):
    """The same, where f moves from `forward` into `inner.project`, to the matmuls behind it."""

    def __init__(self, inner, columns, row, group):
        super().__init__(inner, columns, row, group)
        inner.project = fused_projection(GatherInColumns, columns, group)

    def forward(self, x):                               # no f here: it is in project
        partial = self.inner(x)
        return ScatterOut.apply(partial, self.group)


# ------------------------------------------------------------------------------ the same, in a ring

def send_on(x, group):
    """Start to send x to the next rank, and to receive one like it from the one before."""
    x, rank, t = x.contiguous(), group.rank(), group.size()
    received = torch.empty_like(x)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % t),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % t),
    ])
    return InFlight(handles, sent=x, received=received)


def ring_gather(chunk, group):
    """Yield (rank, its chunk) for all ranks; the next one arrives while the caller works.

    What each of three ranks works on:      rank 0     rank 1     rank 2
                                   hop 0    chunk 0    chunk 1    chunk 2
                                   hop 1    chunk 2    chunk 0    chunk 1
                                   hop 2    chunk 1    chunk 2    chunk 0
    """
    rank, t = group.rank(), group.size()
    for hop in range(t - 1):
        arriving = send_on(chunk, group)
        yield (rank - hop) % t, chunk
        chunk = arriving.wait()
    yield (rank + 1) % t, chunk                         # the last one goes nowhere


def ring_sum(partial, group):
    """Every rank computes a partial result for the chunk of each rank, partial(owner). Returns the
    sum of all of them for this rank's own chunk.

    At hop h, rank r adds its partial result for the chunk of rank r-1-h to the sum that has come
    from rank r-1, and sends it on. With three ranks, the sum for chunk 0 starts at rank 1:

              rank 0             rank 1             rank 2
    hop 0     starts chunk 2     starts chunk 0     starts chunk 1
    hop 1     adds to chunk 1    adds to chunk 2    adds to chunk 0
    hop 2     adds to chunk 0    adds to chunk 1    adds to chunk 2
    """
    rank, t = group.rank(), group.size()
    total = partial((rank - 1) % t)
    for hop in range(1, t):
        arriving = send_on(total, group)
        total = partial((rank - 1 - hop) % t)           # computed while the sum travels
        total += arriving.wait()
    return total


class RingColumns(torch.autograd.Function):
    """GatherInColumns, chunk by chunk: each is multiplied while the next one arrives."""

    @staticmethod
    def forward(ctx, x, group, *weights):
        ctx.group = group
        ctx.save_for_backward(x, *weights)
        outputs = [[None] * group.size() for _ in weights]
        for owner, chunk in ring_gather(x, group):
            for output, weight in zip(outputs, weights):
                output[owner] = F.linear(chunk, weight)
        return tuple(torch.cat(output, dim=1) for output in outputs)

    @staticmethod
    def backward(ctx, *gradients):
        x, *weights = ctx.saved_tensors
        chunks = [gradient.chunk(ctx.group.size(), dim=1) for gradient in gradients]

        def dx_of(owner):
            total = chunks[0][owner] @ weights[0]
            for of_weight, weight in zip(chunks[1:], weights[1:]):
                total += of_weight[owner] @ weight
            return total

        dx = ring_sum(dx_of, ctx.group)
        dw = [torch.zeros_like(weight) for weight in weights]
        for owner, chunk in ring_gather(x, ctx.group):
            for total, of_weight in zip(dw, chunks):
                total += of_weight[owner].flatten(0, 1).T @ chunk.flatten(0, 1)
        return dx, None, *dw


class RingRow(torch.autograd.Function):
    """The last linear and g in one: a chunk is multiplied while the sum of the others travels.

    x (batch, seq, in), weight (out, in); returns (batch, seq/t, out).
    """

    @staticmethod
    def forward(ctx, x, group, weight):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        chunks = x.chunk(group.size(), dim=1)

        def output_of(owner):
            return F.linear(chunks[owner], weight)

        return ring_sum(output_of, group)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        chunks = x.chunk(ctx.group.size(), dim=1)
        dx, dw = [None] * len(chunks), torch.zeros_like(weight)
        for owner, arrived in ring_gather(gradient, ctx.group):
            dx[owner] = arrived @ weight
            dw += arrived.flatten(0, 1).T @ chunks[owner].flatten(0, 1)
        return torch.cat(dx, dim=1), None, dw


class RingSequenceParallel(SequenceParallel):
    """The same, where f is one with the first matmuls, and g with the last."""

    def __init__(self, inner, columns, row, group):
        super().__init__(inner, columns, row, group)
        inner.project = fused_projection(RingColumns, columns, group)
        def multiply_and_scatter(x):
            return RingRow.apply(x, group, row.weight)
        row.forward = multiply_and_scatter              # of this linear alone: it is g as well

    def forward(self, x):                               # f is in inner.project, g in row
        return self.inner(x)


# ------------------------------------------------------------------------------------ the whole GPT

def parallelize(model, cfg, group, copies, variant):
    """Cut common.gpt(cfg, seed=None) over `group`, before its weights are drawn.

    copies: the ranks that hold the same kv head as this one.
    """
    sub_layer = {"kept": SequenceParallel, "megatron": RegatherSequenceParallel,
                 "ring": RingSequenceParallel}[variant]
    in_full = [model.embedding, model.head.norm, model.head.out]
    for block in model[1:-1]:
        attn, mlp = block.attn, block.mlp
        share_kv_heads(attn, cfg.kv_heads, group, copies)
        block.attn = sub_layer(attn, [attn.q, attn.k, attn.v], attn.o, group)
        block.mlp = sub_layer(mlp, [mlp.up], mlp.down, group)
        in_full += block.norm1, block.norm2
    for module in in_full:                              # a rank has seen its own tokens alone
        for name, _ in module.named_parameters():
            mark_partial(module, name, group)
    return model


def share_kv_heads(attn, kv_heads, group, copies):
    """As in chapter 04: with fewer kv heads than ranks, the ranks of `copies` hold the same one,
    and each has the gradient of its own query heads alone."""
    for linear in (attn.k, attn.v):
        keep_shard(linear, "weight", dim=0, axis=group, parts=min(kv_heads, group.size()))
        if copies.size() > 1:
            mark_partial(linear, "weight", copies)


# ----------------------------------------------------------------------------------------- the step

def my_tokens(x, group):
    """A copy of this rank's part of the sequence: (batch, seq) to (batch, seq/t)."""
    return x.chunk(group.size(), dim=1)[group.rank()].clone()


def train_step(model, optimizer, micro_batches, valid, clip, group):
    """One step. Returns this rank's part of the loss, and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each, the same on every rank.
    valid: the valid targets of the whole batch. Communication: that of the sub-layers; then the
    all_reduces of the partial gradients, and one of the norm.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        logits = model(my_tokens(tokens, group))        # (micro_batch, seq/t, vocab)
        loss = loss_sum(logits, my_tokens(targets, group)) / valid
        loss.backward()
        total += loss.detach()
    sum_partial_grads(model.parameters())

    norm = grad_norm(model.parameters(), group)
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


def torch_parallelize(model, cfg, mesh):
    """The same through PyTorch, with the vocabulary cut as in chapter 04: all weights become
    DTensors, and the LayerNorms take sequences in parts."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    norm, columns = parallel.SequenceParallel(), parallel.ColwiseParallel()
    gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = parallel.RowwiseParallel(output_layouts=Shard(1))
    logits = parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                                      use_local_output=False)
    look_up = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"embedding": look_up, "head.norm": norm, "head.out": logits,
            "block*.norm[12]": norm, "block*.attn": gather, "block*.mlp": gather,
            "block*.attn.[qkv]": columns, "block*.mlp.up": columns,
            "block*.attn.o": scatter, "block*.mlp.down": scatter}
    parallel.parallelize_module(model, mesh, plan)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    return model


def torch_step(model, optimizer, micro_batches, valid, clip):
    """The same with DTensors, and PyTorch's loss of logits that are cut by vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        with loss_parallel():                           # backward must run in it too
            loss = loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach().full_tensor()

    for p in model.parameters():                        # a LayerNorm's is a partial sum so far
        p.grad = p.grad.redistribute(placements=p.placements)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))   # inf: no clipping
    norm = norm.full_tensor()
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------- the formulas

def parameters_per_rank(cfg, t):
    """Numbers on a rank: 1/t of the blocks' matrices, but one kv head at least, and the rest."""
    kv_dim = cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)
    matrices = 10 * cfg.dim**2 // t + 2 * cfg.dim * kv_dim          # q, o, up, down; k and v
    return cfg.layers * matrices + numbers_in_full(cfg)


def numbers_in_full(cfg):
    """Those that every rank holds: of the LayerNorms, the embedding and the head."""
    return (4 * cfg.layers + 2) * cfg.dim + (1 if cfg.tie else 2) * cfg.vocab * cfg.dim


def activation_bytes(cfg, batch, t, e, variant="megatron"):
    """Bytes that a rank keeps for backward, on a CPU: (A_in + A_out) / t. e: bytes of a number."""
    tokens, wide = batch * cfg.seq, max(e, 4)
    x = tokens * cfg.dim * e                            # one (batch, seq, dim)
    norm = x + 2 * tokens * e + x                       # input, mean and 1/std, output
    outside = (2 * cfg.layers + 1) * norm // t
    if variant == "kept":                               # the outputs, gathered
        outside += 2 * cfg.layers * (x - x // t)

    kv = x * max(cfg.kv_heads // t, 1) // cfg.heads
    rope = cfg.seq * cfg.dim // cfg.heads * e           # cos and sin, which all blocks share
    core = common.core_bytes(cfg.attention, cfg, batch, e, t)
    cut = x + x + 4 * x + 4 * x                         # q; o's input; GELU's input and output
    inside = rope + cfg.layers * (2 * kv + core + cut // t)

    loss = tokens // t * cfg.vocab * wide + wide        # log-probabilities, and a scalar
    mine = 2 * 8 * tokens // t                          # the tokens and targets themselves, int64
    return outside + inside + loss + mine


def traffic(cfg, micro_batches, batch, t, e, variant="megatron"):
    """What is sent in a step: {op: (calls, bytes of payload, bytes on the wire)}."""
    x, wide, share = batch * cfg.seq * cfg.dim * e, max(e, 4), (t - 1) / t
    scatters = micro_batches * 4 * cfg.layers           # forward and backward of each sub-layer
    gathers = scatters if variant == "kept" else scatters + micro_batches * 2 * cfg.layers
    sent = {"reduce_scatter": (scatters, scatters * x, share * scatters * x),
            "all_gather": (gathers, gathers * x, share * gathers * x)}
    if variant == "ring":
        hops = (scatters + gathers) * (t - 1)
        sent = {"send": (hops, hops * x // t, hops * x // t)}

    norms = 1 if t > 1 else 0                           # alone, nobody needs to be asked
    calls = 1 + norms
    payload = numbers_in_full(cfg) * e + norms * wide
    wire = 2 * share * payload
    if t > cfg.kv_heads:                                # k and v of a head that ranks share
        shared = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads) * e
        copies = t // cfg.kv_heads
        calls += 1
        payload += shared
        wire += 2 * (copies - 1) / copies * shared
    return sent | {"all_reduce": (calls, payload, wire)}


def hop_over_matmul(columns, t, width, flops, bandwidth):
    """How long a hop of the ring takes, in times of the matmul that it hides behind: a chunk of
    1/t of the tokens by 1/t of a matrix of so many columns. flops: FLOP/s. bandwidth: bytes/s."""
    return width * t / (2 * columns) * flops / bandwidth


# ------------------------------------------------------------------------------------------ the run

def train(run):
    args, cfg, t = run.args, run.args.model, run.world
    group = run.mesh(tp=t)["tp"].get_group()
    model = parallelize(gpt(cfg, seed=None), cfg, group, run.kv_copies(t), args.variant)
    common.draw_weights(model, args.seed, run.device, run.dtype)
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches():                         # every rank knows all of it
        with run.measure():
            loss, norm = train_step(model, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    group)
        dist.all_reduce(loss, group=group)              # for the report, which shows the whole loss
        run.log(batch, loss, norm, model)

    def forward(tokens, targets):
        return loss_sum(model(my_tokens(tokens, group)), my_tokens(targets, group))

    shape = cfg, args.micro_batch, t, run.dtype.itemsize
    run.check_states(model, optimizer, parameters_per_rank(cfg, t))
    run.check_activations(model, forward, activation_bytes(*shape, args.variant))
    run.check_traffic(traffic(cfg, len(batch.micro_batches), *shape[1:], args.variant))
    run.on_machines({
        "a hop of the ring, in times of the matmul with o (8 ranks, dim 8192, bf16)":
            lambda *rates: hop_over_matmul(8192, 8, 2, *rates),
        "and with a matrix of an MLP":
            lambda *rates: hop_over_matmul(4 * 8192, 8, 2, *rates)})


def train_torch(run):
    args, cfg = run.args, run.args.model
    model = gpt(cfg, args.seed, run.device, run.dtype)
    torch_parallelize(model, cfg, run.mesh(tp=run.world))
    common.name_parameters(model)                       # DTensors by now
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches():
        with run.measure():
            loss, norm = torch_step(model, optimizer, batch.micro_batches, batch.valid, args.clip)
        run.log(batch, loss, norm, model)

    def forward(tokens, targets):
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            return loss_sum(model(tokens), targets)

    run.check_states(model, optimizer)
    run.check_activations(model, forward)
    run.check_traffic()
    run.compare_traffic("kept", traffic(cfg, len(batch.micro_batches), args.micro_batch, run.world,
                                        run.dtype.itemsize, "kept"))


def fits(cfg, t, shares):
    """Whether t ranks get equally many tokens, and whole heads: q's, and some kv heads each, or (if
    it `shares`) one that several ranks have."""
    kv_heads_fit = cfg.kv_heads % t == 0 or shares and t % cfg.kv_heads == 0
    return cfg.heads % t == 0 and kv_heads_fit and cfg.seq % t == 0


def requires(args, ranks):
    """Heads, and with them dim and 4·dim, and the sequence must be a multiple of the ranks."""
    common.split_batch(args, 1)
    cfg, shares = args.model, args.variant != "torch"
    works = max(n for n in range(1, ranks + 1) if fits(cfg, n, shares))
    if works < ranks:
        why = "" if shares else " (torch cannot share a kv head)"
        common.refuse(f"--heads {cfg.heads}, --kv-heads {cfg.kv_heads} and --seq {cfg.seq} do not "
                      f"fit {ranks} tensor-parallel ranks{why}; --nproc_per_node={works} would "
                      "work")


VARIANTS = {"megatron": train, "kept": train, "ring": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires)
