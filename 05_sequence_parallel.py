r"""05 · Sequence parallelism: what tensor parallelism left whole is cut too, along the sequence.

In chapter 04 every rank holds the residual stream and computes every norm in full: t ranks keep
and compute the same thing t times. But outside of the sub-layers (in the embedding, the norms, the
residual sums, the head and the loss) a token needs no other token. So let a rank have 1/t of
the sequence there; and inside a sub-layer, as before, all of the sequence and 1/t of the heads:

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
same bytes. Two things follow.

Partial gradients. Every rank has the norms, embedding and head in full, and their gradients from
its own tokens alone: partial sums, added up in the last backward (at its end, if they are few).

Gathering again. For their weights' gradients, the linears behind f need their whole input in
backward. If it is kept (`kept`), that is a full (b, s, h) for every sub-layer again. So `megatron`
and `ring` gather it again, while its gradient is computed: half as many all_gathers more. (On a
GPU the gather's kernel must begin first: a matmul that has begun leaves no room for it. Megatron
sets CUDA_DEVICE_MAX_CONNECTIONS=1, by which kernels of all streams begin in the order of launch.)
That trades bytes sent for bytes kept, as recomputation does. A micro-batch sends 10 L of x, `kept`
8 L. With --recompute full it is 3 L more: of a block both gathers again, and attention's scatter.
(Backward does not read the MLP's, which a ring sends with a matmul, so there it is 4 L.) Megatron
advises --recompute selective: attention's core lies between f and g, so nothing is sent again.

What a rank keeps and sends (x = b·s·h·e bytes, L blocks, a micro-batch)

    parameters       1/t of the blocks' matrices; embedding, head and norms in full
    activations      (A_in + A_out) / t, where chapter 04 has A_in / t + A_out. (In `kept` the 2 L
                     inputs of sub-layers are whole, x each. RoPE's tables are whole in all)
    reduce_scatter   4 L of x: forward and backward of each sub-layer
    all_gather       4 L of x, and 2 L again where it is not kept
    all_reduce       once a step the partial gradients, those of kv heads that ranks share, the norm

Production code cuts the vocabulary too, as in chapter 04, and so does the variant `torch`. Each
rank has 1/t of the tables, with complete gradients, for two gathers and two scatters of x more.

Collective matmul (`ring`). In the picture above, f must end before the first matmul begins. But
the matmul of one chunk of the sequence needs no other chunk. So the chunks travel around a ring:
while a rank multiplies the one it has, the next arrives, and after t-1 hops it has seen all. For g
the same backwards: a sum travels around the ring, each rank adds its part, and computes the next
part while it travels. The bytes are those of `megatron`, in t-1 messages a gather. (In PyTorch's
async TP each rank pulls chunks from their owners' memory instead.) With chapter 04's C and W, a
message of b·s/t · h · e bytes hides behind the matmul of a chunk with a matrix of h x n/t, which
takes 2 · b·s/t · h · n/t FLOPs, if e·t/(2n) · C/W <= 1. For h = 8192 in bf16 on 8 H100s over NVLink
the left side is 0.5 for a GPT's MLP (n = 4 h), 0.3 for Llama's up and gate together (n = 7 h), 2.1
for o (n = h), and for q, k and v together, where n = (1 + 2 · kv/heads) · h, 0.7 if each of 64
heads has its own keys, 1.7 with 8 kv heads (GQA). What is more than 1 does not hide as a whole.

When it pays: where chapter 04 does, for less memory, and with every norm computed once. It
sends up to a quarter more, since it gathers twice, and the gradients of the tables once a step. It
cannot cut the s x s scores, nor a head's k and v: chapter 06 cuts attention's own sequence.

Run it:
    torchrun --nproc_per_node=4 05_sequence_parallel.py
    torchrun --nproc_per_node=4 05_sequence_parallel.py --variant ring          (or kept, torch)
    torchrun --nproc_per_node=4 05_sequence_parallel.py --precision fp8   (see kernels/fp8.py)

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
sections 4 and 5; Wang et al., Overlap Communication with Dependent Computation via Decomposition
(2023), for the ring; Ultra-Scale Playbook, "Sequence Parallelism" and A3 (a number as one byte).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, keep_shard, loss_sum

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
    handle = common.all_gather(parts.flatten(0, 1), x, group=group, async_op=True)      # a view
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


def gather_columns(x, group, *weights):
    """f, and the linears behind it, which keep all of the gathered input."""
    whole = GatherIn.apply(x, group)                    # (batch, seq, dim)
    return tuple(F.linear(whole, weight) for weight in weights)


def row_scatter(x, group, weight):
    """The linear that ends a sub-layer, and g: (batch, seq, in) to (batch, seq/t, out)."""
    return ScatterOut.apply(F.linear(x, weight), group)


class GatherInColumns(torch.autograd.Function):
    """f and the linears behind it in one, to keep this rank's part of the input and not all of it:
    x (batch, seq/t, in), gathered, times each of the weights, (out, in). In backward x is gathered
    again while its gradient is computed, and that is on its way while the weights' are."""

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
    """Yield (rank, its chunk) for all ranks: at hop h, rank r has that of rank r-h. The next one
    arrives while the caller works."""
    rank, t = group.rank(), group.size()
    for hop in range(t - 1):
        arriving = send_on(chunk, group)
        yield (rank - hop) % t, chunk
        chunk = arriving.wait()
    yield (rank + 1) % t, chunk                         # the last one goes nowhere


def ring_sum(part_of, group):
    """Every rank computes part_of(owner) for the chunk of each rank. Returns the sum for this
    rank's own chunk, which has travelled around the ring to it. With three ranks:

                  rank 0             rank 1             rank 2
        hop 0     starts chunk 2     starts chunk 0     starts chunk 1
        hop 1     adds to chunk 1    adds to chunk 2    adds to chunk 0
        hop 2     adds to chunk 0    adds to chunk 1    adds to chunk 2
    """
    rank, t = group.rank(), group.size()
    total = part_of((rank - 1) % t)
    for hop in range(1, t):
        arriving = send_on(total, group)
        total = part_of((rank - 1 - hop) % t)           # computed while the sum travels
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
                total.addmm_(of_weight[owner].flatten(0, 1).T, chunk.flatten(0, 1))
        return dx, None, *dw


class RingRow(torch.autograd.Function):
    """The last linear and g in one: a chunk is multiplied while the sum of the others travels.
    x (batch, seq, in), weight (out, in); returns (batch, seq/t, out)."""

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
            dw.addmm_(arrived.flatten(0, 1).T, chunks[owner].flatten(0, 1))
        return torch.cat(dx, dim=1), None, dw


# ------------------------------------------------------------------ the sub-layers of the whole GPT

SUB_LAYERS = {  # f with the linears behind it, and g with the one before it
    "megatron": (GatherInColumns.apply, row_scatter),
    "kept": (gather_columns, row_scatter),
    "ring": (RingColumns.apply, RingRow.apply),
}


def sequence_parallel(inner, columns, row, group, f, g):
    """Put a sub-layer between f and g: gather the sequence, compute with 1/t of the heads, scatter.
    f(x, group, *weights) takes the place of `columns`, the linears of `inner` that read its input,
    and g(x, group, weight) that of `row`, the linear that ends it. Communication: an all_gather and
    a reduce_scatter, in forward and in backward."""
    for linear in columns:                              # split the outputs: some heads each
        keep_shard(linear, "weight", dim=0, group=group)         # (k and v have been cut already)
    keep_shard(row, "weight", dim=1, group=group)        # split the inputs: a partial sum each

    def project(x):                                     # (batch, seq/t, dim)
        return f(x, group, *[linear.weight for linear in columns])

    def multiply_and_scatter(x):                        # (batch, seq, width/t)
        return g(x, group, row.weight)

    inner.project = project                             # in place of the method of that name
    row.forward = multiply_and_scatter                  # of this linear alone


def share_kv_heads(attn, kv_heads, group, holders):
    """Cut k and v by heads. holders: where there are fewer heads than ranks, those that hold the
    same one. Each has the gradient of its own query heads alone: note that it must be summed."""
    for linear in (attn.k, attn.v):
        keep_shard(linear, "weight", dim=0, group=group, parts=min(kv_heads, group.size()))
        if holders:
            linear.weight.partial = holders


def parallelize(model, cfg, group, variant):
    """Cut common.gpt(cfg, seed=None) over `group`, all ranks, before its weights are drawn."""
    holders = None
    if group.size() > cfg.kv_heads:
        holders, _ = dist.new_subgroups(group.size() // cfg.kv_heads)   # of the same kv head
    in_full = [model.embedding, model.head.norm, model.head.out]
    for block in model[1:-1]:
        attn, mlp = block.attn, block.mlp
        share_kv_heads(attn, cfg.kv_heads, group, holders)
        sequence_parallel(attn, [attn.q, attn.k, attn.v], attn.o, group, *SUB_LAYERS[variant])
        sequence_parallel(mlp, mlp.columns, mlp.down, group, *SUB_LAYERS[variant])
        in_full += block.norm1, block.norm2
    for module in in_full:
        for p in module.parameters():
            p.partial = dist.group.WORLD                # not `group`: its gathers would queue
    return model


# ----------------------------------------------------------------------------------------- the step

def my_tokens(x, group):
    """A copy of this rank's part of the sequence: (batch, seq) to (batch, seq/t)."""
    return x.chunk(group.size(), dim=1)[group.rank()].clone()


def train_step(model, optimizer, micro_batches, valid, clip, group):
    """One step; every rank gets the same whole sequences, as in chapter 04. Returns this rank's
    part of the loss, and the norm. Communication: the sub-layers', partial gradients, the norm."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        tokens, targets = my_tokens(tokens, group), my_tokens(targets, group)   # (b, seq/t)
        loss = loss_sum(model(tokens), targets) / valid
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
    """The same with DTensors, and PyTorch's loss of logits that are cut by vocabulary."""
    from torch.distributed.tensor.parallel import loss_parallel

    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        with loss_parallel():                           # backward must run in it too
            loss = loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach().full_tensor()

    for p in model.parameters():                        # a norm's is a partial sum so far
        p.grad = p.grad.redistribute(placements=p.placements)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).full_tensor()
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------- the formulas

def parameters_per_rank(cfg, t):
    """Numbers on a rank: 1/t of the blocks' matrices, but one kv head at least, and the rest."""
    kv_dim = cfg.dim // cfg.heads * max(cfg.kv_heads // t, 1)
    matrices = (2 * cfg.dim**2 + cfg.mlp()) // t + 2 * cfg.dim * kv_dim     # q, o; MLP; k and v
    return cfg.layers * matrices + numbers_in_full(cfg)


def numbers_in_full(cfg):
    """Those that every rank holds: of the norms, the embedding and the head."""
    norms = (2 * cfg.layers + 1) * (1 if cfg.gated else 2)                  # RMSNorm has no bias
    return (norms + (1 if cfg.tie else 2) * cfg.vocab) * cfg.dim


def kept(cfg, t, variant="megatron"):
    """The share of each of chapter 01's classes that a rank keeps: (A_in + A_out) / t."""
    cut = dict.fromkeys(("inside", "core", "logits", "outside", "ids"), 1 / t)
    return cut | {"inputs": 1 if variant == "kept" else 1 / t, "positions": 1,
                  "keys and values": max(1 / t, 1 / cfg.kv_heads)}


def traffic(cfg, micro_batches, batch, t, e, variant="megatron", recompute="none", sums=None):
    """What is sent in a step: {op: (calls, bytes of payload, bytes on the wire)}. e: bytes of a
    number; sums: of a gradient that is summed, if those are wider."""
    x, wide, share = batch * cfg.seq * cfg.dim * e, max(e, 4), (t - 1) / t
    blocks = micro_batches * cfg.layers
    scatters = gathers = 4 * blocks                     # forward and backward of each sub-layer
    if variant in ("megatron", "ring"):
        gathers += 2 * blocks
    if recompute == "full":
        scatters += 2 * blocks if variant == "ring" else blocks
        gathers += 2 * blocks
    sent = {"reduce_scatter": (scatters, scatters * x, share * scatters * x),
            "all_gather": (gathers, gathers * x, share * gathers * x)}
    if variant == "ring":
        hops = (scatters + gathers) * (t - 1)
        sent = {"send": (hops, hops * x // t, hops * x // t)}

    of_kv = cfg.layers * 2 * cfg.dim * (cfg.dim // cfg.heads) * (t > cfg.kv_heads)
    each = numbers_in_full(cfg) + of_kv > common.ONE_BUCKET         # module's gradients are sent
    calls = (cfg.layers + 2 if each else 1) + (t > 1)               # and the norm
    payload = numbers_in_full(cfg) * (sums or e) + (t > 1) * wide
    wire = 2 * share * payload
    if of_kv:                                           # of a head that t / kv_heads ranks share
        calls += cfg.layers if each else 1
        payload += of_kv * (sums or e)
        wire += 2 * (1 - cfg.kv_heads / t) * of_kv * (sums or e)
    return sent | {"all_reduce": (calls, payload, wire)}


def columns_of_qkv(cfg, t):
    """Of q, k and v on all t ranks together; each has one kv head at least."""
    return (1 + 2 * max(cfg.kv_heads, t) / cfg.heads) * cfg.dim


def hop_over_matmul(columns, t, width, flops, bandwidth):
    """How long a hop of the ring takes, in times of the matmul that it hides behind: a chunk of
    1/t of the tokens by 1/t of a matrix of so many columns. flops: FLOP/s. bandwidth: bytes/s."""
    return width * t / (2 * columns) * flops / bandwidth


# ------------------------------------------------------------------------------------------ the run

def train(run):
    args, cfg, group = run.args, run.args.model, run.mesh(tp=run.world)["tp"].get_group()
    way, build = args.variant if args.precision != "fp8" else "fp8", gpt
    if way == "fp8":
        from kernels.fp8 import in_chapter_05
        SUB_LAYERS[way], build = in_chapter_05(args, run.world, all_gather, reduce_scatter)
    model = run.draw(parallelize(gpt(cfg, seed=None), cfg, group, way))
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    for batch in run.batches(build=build):              # every rank knows all of it
        with run.measure():
            loss, norm = train_step(model, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    group)
        dist.all_reduce(loss, group=group)              # for the report, which shows the whole loss
        run.log(batch, loss, norm, model)


def train_torch(run):
    """The same through PyTorch, with the vocabulary cut as in chapter 04: all weights become
    DTensors, and the norms take sequences in parts."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    args, cfg = run.args, run.args.model
    norm, columns = parallel.SequenceParallel(), parallel.ColwiseParallel()
    gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = parallel.RowwiseParallel(output_layouts=Shard(1))
    logits = parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1),
                                      use_local_output=False)
    look_up = parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {"embedding": look_up, "head.norm": norm, "head.out": logits,
            "block*.norm[12]": norm, "block*.attn": gather, "block*.mlp": gather,
            "block*.attn.[qkv]": columns, "block*.mlp.[ug]*": columns,      # up, gate
            "block*.attn.o": scatter, "block*.mlp.down": scatter}
    model = run.draw(gpt(cfg, seed=None))
    parallel.parallelize_module(model, run.mesh(tp=run.world), plan)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    common.name_parameters(model)                       # DTensors by now
    common.recompute(model, args.recompute)

    rounded = common.rounded(args)                      # parameters stay in run.dtype
    autocast = torch.autocast(run.device.type, rounded, enabled=rounded != run.dtype)
    model.forward = autocast(model.forward)
    optimizer = run.optimizer(model.parameters())
    for batch in run.batches():
        with run.measure():
            loss, norm = torch_step(model, optimizer, batch.micro_batches, batch.valid, args.clip)
        run.log(batch, loss, norm, model)


def formulas(args, rank, ranks, model):
    cfg, e, sums = args.model, common.rounded(args).itemsize, common.DTYPES[args.dtype].itemsize
    variant, micro_batches = args.variant, args.batch // args.micro_batch
    sent = traffic(cfg, micro_batches, args.micro_batch, ranks, e, variant, args.recompute, sums)
    if variant == "torch":
        return {"kept": None, "beside": ("kept", sent)}
    answer = {"parameters": parameters_per_rank(cfg, ranks), "kept": kept(cfg, ranks, variant)}
    if args.precision == "fp8":
        from kernels.fp8 import sent_in_fp8
        sent = sent_in_fp8(sent, cfg, micro_batches, args.micro_batch, ranks)
        answer["kept"]["fp8"] = "tile"
    hop = lambda *matmul: lambda *rates: hop_over_matmul(*matmul, *rates)       # with o
    here = dict.fromkeys(("send", "all_gather", "reduce_scatter"), hop(cfg.dim, ranks, e))
    return answer | {"sent": sent, "overlap": here, "machines": {
        "a hop of the ring over the matmul with o (8 ranks, dim 8192, bf16)": hop(8192, 8, 2)}}


def requires(args, ranks):
    """Heads, the MLP's features and the sequence must be a multiple of the ranks."""
    common.split_batch(args, 1)
    cfg, way = args.model, "fp8" if args.precision == "fp8" else args.variant
    alone = way in ("torch", "fp8")                     # a kv head is one rank's
    fits = lambda t: not (cfg.heads % t or cfg.seq % t or cfg.hidden % t
                          or cfg.kv_heads % t and (alone or t % cfg.kv_heads))
    works = max(t for t in range(1, ranks + 1) if fits(t))
    if works < ranks:
        why = f" ({way} cannot share a kv head)" if alone else ""
        raise Refused(f"--heads {cfg.heads}, --kv-heads {cfg.kv_heads}, --ffn {cfg.hidden} and "
                      f"--seq {cfg.seq} do not fit {ranks} tensor-parallel ranks{why}",
                      f"--nproc_per_node {works}")
    if args.precision == "fp8" and (args.variant, args.recompute) != ("megatron", "none"):
        raise Refused(f"--precision fp8 is not of --variant {args.variant} --recompute "
                      f"{args.recompute}", "--variant megatron --recompute none")


VARIANTS = {"megatron": train, "kept": train, "ring": train, "torch": train_torch}
flags = lambda parser: parser.add_argument(
    "--precision", choices=("fp32", "bf16", "fp8"), default="fp32", help="fp8: of all gathers")

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
