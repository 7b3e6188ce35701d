r"""06 · Context parallelism: one sequence on several ranks, in attention too.

Chapter 05 cuts the sequence between the sub-layers and puts it together again inside of them. So
every rank still holds whole sequences there, and no sequence can be longer than what fits on one.
Here it stays cut everywhere. Each of N ranks holds s/N of its tokens, and all parameters. Norms,
linears and the loss treat token by token and do not notice. Attention does: a query must meet the
keys and values of all tokens before it, wherever they live.

Ring attention. The keys and values travel around the ring; the queries stay. At each hop a rank
computes the block of attention between its queries and the keys that have arrived, while the next
ones are on their way. Each block gives an output, and for each row lse, the logarithm of its sum of
exp(scores). Blocks are merged by the online softmax: each output counts with its share of the sum.

    lse = log(exp(lse 1) + exp(lse 2))        out = exp(lse 1 - lse) out 1 + exp(lse 2 - lse) out 2

The merge is in fp32 or better, whatever the dtype: in bf16, N merges would be N roundings. Backward
sends keys and values around again. With the lse of the whole row, a block's gradients can be
computed by themselves. Those of the keys and values follow them one hop behind: each rank adds its
part, and the sum comes home.

Who has to compute? A block of later keys is masked, so nobody computes it. With contiguous parts
(`--variant ring`) rank 0 meets one block, its own, and the last rank meets all N. All wait for the
last. With a zig-zag (the default) the sequence is cut into 2N chunks, and rank r holds chunk r from
the front and chunk r from the back. Then every rank computes its own block, and half a block at
each hop. For 4 ranks, who computes what, and at which hop:

    ring        keys of                     zigzag      keys of chunk
    queries     r0   r1   r2   r3           queries      0   1   2   3   4   5   6   7
         r0     0                            r0    0     0
         r1     1    0                       r1    1     1   0
         r2     2    1    0                  r2    2     2   1   0
         r3     3    2    1    0             r3    3     3   2   1   0
                                             r3    4     3   2   1   0   0
                                             r2    5     2   1   0   3   3   0
                                             r1    6     1   0   3   2   2   3   0
                                             r0    7     0   3   2   1   1   2   3   0

A plain core computes the masked half of a diagonal block too. Then the last rank of a ring takes N
blocks, and every rank of a zig-zag takes (N+1)/2: the ring is 2N/(N+1) times as long. With a core
that skips the masked half it is 2 - 1/N. The same can be had without a ring:

    gather      all_gather keys and values, and mask by position. Nothing hides behind compute, but
                kv heads are few (GQA), any mask is a line, and it is simple. Llama 3 does this.
                (Ours computes the masked scores too: all blocks, on all ranks alike.)
    ulysses     all_to_all from tokens to heads: each rank gets whole sequences of heads/N heads,
                takes any core, and sends them back. Limited to as many ranks as there are heads.

What a rank sends in a layer, in numbers (b sequences; d and kv: the widths of q and of k)

                forward                               backward
    ring        (N-1)/N · 2·b·s·kv                    the same, and again for gradients in fp32
    gather      (N-1)/N · 2·b·s·kv                    the same
    ulysses     (N-1)/N · 2·b·(s/N)·(d + kv)          the same

So Ulysses sends least if d + kv < N·kv. (With fewer kv heads than ranks, it repeats them until
there are N, and its kv grows with them.) Besides, once a step the gradients of all parameters are
summed over the ranks, as in chapter 02: they have seen other tokens.

When it pays: a hop hides behind its block if 2·b·(s/N)·kv·e / B <= 4·b·(s/N)²·d / F, with F FLOP/s,
B bytes/s and e bytes a number: from s/N = kv/d · e/2 · F/B tokens on, whatever s is. Zig-zag has
half a block a hop and needs twice as many. (Backward sends three times the bytes in bf16, for 2.5
times the FLOPs.) For shorter sequences see chapters 02 to 05 first: context parallelism is for what
does not fit, since all activations become 1/N (but for gather's, which keeps all keys and values).

Run it:
    torchrun --nproc_per_node=4 06_context_parallel.py
    torchrun --nproc_per_node=4 06_context_parallel.py --variant ring --seq 512 --batch 2
    torchrun --nproc_per_node=4 06_context_parallel.py --variant ulysses --attention sdpa

Sources: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3; Brandon et al.,
Striped Attention (2023), section 3 (the imbalance, and another cure); Jacobs et al., DeepSpeed
Ulysses (2023), section 3; Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2 (2N chunks);
Ultra-Scale Playbook, "Context Parallelism".
"""

from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import common
from common import clip_grads, gpt, grad_norm, loss_sum, sum_partial_grads

aten = torch.ops.aten               # PyTorch's operators, one below its functions

# --------------------------------------------------------------------------- who holds which tokens

ZIGZAG = ("zigzag", "gather")       # the variants in which a rank holds two chunks; others hold one


def positions_of(rank, ranks, seq, zigzag):
    """The positions of a rank's tokens, int64 (seq/N,), in ascending order: a contiguous part, or
    the rank-th chunk of 2N from the front and from the back."""
    if ranks == 1 or not zigzag:
        return torch.arange(seq).chunk(ranks)[rank]
    chunks = torch.arange(seq).chunk(2 * ranks)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def meeting(rank, other, length, zigzag):
    """Which queries of `rank` see which keys of `other`, and whether only those up to their own
    position: (rows, keys, causal), or None. length: tokens of a rank."""
    everything, front, back = slice(None), slice(length // 2), slice(length // 2, None)
    if other == rank:
        return everything, everything, True             # both in ascending order of position
    if not zigzag:
        return (everything, everything, False) if other < rank else None
    if other < rank:
        return everything, front, False                 # its back chunk comes after all of ours
    return back, everything, False                      # our back chunk comes after all of its


# -------------------------------------------------------------------- a block of attention: cores

class Core(NamedTuple):
    """A block of attention as two functions.

    forward(q, k, v, causal) -> out, lse. backward(dout, q, k, v, out, lse, causal) -> dq, dk, dv,
    with the out and lse of the whole row, not of the block. q (batch, heads, rows, head_dim);
    k, v (batch, kv_heads, keys, head_dim); lse (batch, heads, rows) in float32 or better.
    """

    forward: Callable
    backward: Callable


def wide(x):
    """x in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def stacked(x, like):
    """(batch, heads, rows, n) to (batch, kv_heads, group·rows, n): the heads that share a key, one
    below the other."""
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])


def scores_of(q, k, causal=False):
    """(batch, heads, rows, keys); if causal, with -inf where a key comes after its query."""
    scores = (stacked(q * q.shape[-1] ** -0.5, k) @ k.transpose(2, 3)).view(*q.shape[:3], -1)
    if not causal:
        return scores
    return scores + scores.new_full(scores.shape[2:], -torch.inf).triu(1)


def plain_forward(q, k, v, causal):
    """With its scores in sight."""
    q, k, v = wide(q), wide(k), wide(v)
    scores = scores_of(q, k, causal)
    lse = scores.logsumexp(-1)                          # (batch, heads, rows)
    weights = (scores - lse[..., None]).exp()
    return (stacked(weights, k) @ v).view(q.shape), lse


def plain_backward(dout, q, k, v, out, lse, causal):
    """The softmax's gradient needs, of the rest of the row, only lse and the sum of out · dout."""
    dout, q, k, v, out = (wide(x) for x in (dout, q, k, v, out))
    weights = (scores_of(q, k, causal) - lse[..., None]).exp()
    dv = stacked(weights, k).transpose(2, 3) @ stacked(dout, k)
    dweights = (stacked(dout, k) @ v.transpose(2, 3)).view(weights.shape)
    dscores = weights * (dweights - (out * dout).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = (stacked(dscores, k) @ k).view(q.shape)
    dk = stacked(dscores, k).transpose(2, 3) @ stacked(q, k)
    return dq, dk, dv


def flash_forward(q, k, v, causal):
    """With PyTorch's own flash kernels, which never write the scores."""
    if q.is_cuda:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def flash_backward(dout, q, k, v, out, lse, causal):
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)      # of a dropout that is not there
    return aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        seed, seed)


CORES = {"plain": Core(plain_forward, plain_backward), "sdpa": Core(flash_forward, flash_backward)}


def merge(out, lse, block_out, block_lse):
    """Add a block to what the rows have seen so far, in place and in float32 or better."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)


# ---------------------------------------------------------------------------------- around the ring

class InFlight:
    """What is being received, and what is being sent, which must stay alive until it has left."""

    def __init__(self, handles, sent, received):
        self.handles, self.sent, self.received = handles, sent, received

    def wait(self):
        for handle in self.handles:
            handle.wait()
        return self.received


def send_on(x, group):
    """Start to send x to the next rank, and to receive one like it from the one before."""
    rank, n, received = group.rank(), group.size(), torch.empty_like(x)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n),
    ])
    return InFlight(handles, sent=x, received=received)


def around_the_ring(kv, group):
    """Yield (rank, its kv) for all ranks, this one's first; the next one's arrive meanwhile."""
    rank, n = group.rank(), group.size()
    for hop in range(n - 1):
        arriving = send_on(kv, group)
        yield (rank - hop) % n, kv
        kv = arriving.wait()
    yield (rank + 1) % n, kv                            # these go nowhere


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries to the keys of all ranks.

    q (batch, heads, s/N, head_dim), k and v (batch, kv_heads, s/N, head_dim); returns q's shape.
    Communication: N-1 sends of k and v, in forward and in backward; in backward N-1 of their
    gradients, in float32 or better (what a rank adds for its own keys waits for them at home).
    """

    @staticmethod
    def forward(ctx, q, k, v, group, core, zigzag):
        out = torch.zeros_like(wide(q))
        lse = out.new_full(q.shape[:3], -torch.inf)     # nothing seen so far

        for other, (k_there, v_there) in around_the_ring(torch.stack([k, v]), group):
            met = meeting(group.rank(), other, q.shape[2], zigzag)
            if met:
                rows, keys, causal = met
                block = core.forward(
                    q[:, :, rows], k_there[:, :, keys], v_there[:, :, keys], causal)
                merge(out[:, :, rows], lse[:, :, rows], *block)

        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.core, ctx.zigzag = group, core, zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        dq, arriving = torch.zeros_like(wide(q)), None

        for other, (k_there, v_there) in around_the_ring(torch.stack([k, v]), group):
            dkv = dq.new_zeros(2, *k.shape)             # of the keys that are here
            met = meeting(group.rank(), other, q.shape[2], ctx.zigzag)
            if met:
                rows, keys, causal = met
                dq_block, *dkv_block = ctx.core.backward(
                    dout[:, :, rows], q[:, :, rows], k_there[:, :, keys], v_there[:, :, keys],
                    out[:, :, rows], lse[:, :, rows], causal)
                dq[:, :, rows] += dq_block
                dkv[:, :, :, keys] += torch.stack(dkv_block)
            if other == group.rank():
                at_home = dkv                           # the first: it waits here for the others
            else:
                if arriving:                            # the sum of the ranks where they have been
                    dkv += arriving.wait()
                arriving = send_on(dkv, group)          # one hop behind their keys
        if arriving:
            at_home += arriving.wait()
        dk, dv = at_home.to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None, None


# -------------------------------------------------------------------------------- without a ring

class GatherKeys(torch.autograd.Function):
    """all_gather along the sequence, in the order of the ranks: kv (2, batch, kv_heads, s/N,
    head_dim) to (2, ..., s, head_dim). The gradient is reduce_scattered."""

    @staticmethod
    def forward(ctx, kv, group):
        ctx.group = group
        parts = kv.new_empty(group.size(), *kv.shape)
        common.all_gather(parts.flatten(0, 1), kv.contiguous(), group=group)
        return parts.movedim(0, 3).flatten(3, 4)

    @staticmethod
    def backward(ctx, gradient):
        parts = gradient.unflatten(3, (ctx.group.size(), -1)).movedim(3, 0).contiguous()
        mine = torch.empty_like(parts[0])
        common.reduce_scatter(mine, parts.flatten(0, 1), group=ctx.group)
        return mine, None


def gathered_attention(q, k, v, group, mask, attention):
    """Attention to the gathered keys. mask (s/N, s): 0, or -inf where a key comes after its query;
    any other mask would do as well."""
    k, v = GatherKeys.apply(torch.stack([k, v]), group)
    if attention == "sdpa":
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    weights = (scores_of(q, k) + mask).softmax(-1)      # (batch, heads, s/N, s)
    return (stacked(weights, k) @ v).view(q.shape)


class Exchange(torch.autograd.Function):
    """all_to_all: cuts x into N parts along dimension `split`, one for each rank, and joins what
    has come from all ranks along `join`. The gradient goes the other way."""

    @staticmethod
    def forward(ctx, x, split, join, group):
        ctx.split, ctx.join, ctx.group = split, join, group
        sent = x.unflatten(split, (group.size(), -1)).movedim(split, 0).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        return received.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.join, ctx.split, ctx.group), None, None, None


def ulysses_attention(q, k, v, group, core):
    """Causal attention of heads/N heads over the whole sequence, by any core of chapter 01.

    q (batch, heads, s/N, head_dim), k and v likewise; returns q's shape.
    """
    copies = max(group.size() // k.shape[1], 1)         # a kv head for every rank, at least
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))   # (batch, heads/N, s, head_dim)
    return Exchange.apply(core(q, k, v), 2, 1, group)


# ------------------------------------------------------------------------------------ the whole GPT

def context_parallel(model, cfg, group, variant, positions, core):
    """Put the attention of a variant into common.gpt(cfg), whose other modules stay as they are.
    positions: of this rank's tokens. core: of a ring's blocks."""
    zigzag = variant in ZIGZAG
    if variant == "gather":
        everyones = [positions_of(r, group.size(), cfg.seq, zigzag) for r in range(group.size())]
        comes_after = torch.cat(everyones).to(positions) > positions[:, None]       # (s/N, s)
        mask = torch.where(comes_after, -torch.inf, 0.0).to(model.embedding.weight.dtype)

    def attention(q, k, v):
        if variant == "gather":
            return gathered_attention(q, k, v, group, mask, cfg.attention)
        if variant == "ulysses":
            return ulysses_attention(q, k, v, group, common.CORES[cfg.attention])
        return RingAttention.apply(q, k, v, group, core, zigzag)

    for block in model[1:-1]:
        block.attn.core = attention
    model.block1.attn.rope.positions = positions        # all blocks share this one
    for p in model.parameters():
        p.partial = group                               # ranks with other tokens: gradients add up
    return model


def train_step(model, optimizer, micro_batches, valid, clip):
    """One step on this rank's tokens. Returns its part of the loss, and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, s/N) each. valid: the valid targets of
    the whole batch. Communication: that of attention; then one all_reduce of all gradients.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    sum_partial_grads(model.parameters())

    norm = grad_norm(model.parameters())                # every rank has all of it: nothing to send
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas

def kv_width(cfg, heads):
    return cfg.dim // cfg.heads * heads


def traffic(cfg, variant, micro_batches, batch, n, e):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}."""
    share, layers = (n - 1) / n, micro_batches * cfg.layers
    tokens = batch * cfg.seq // n
    kv = 2 * tokens * kv_width(cfg, cfg.kv_heads)                   # numbers of a rank's k and v
    gradients = cfg.parameters() * e
    sent = {"all_reduce": (1, gradients, 2 * share * gradients)}
    if variant == "gather":
        both = layers, layers * n * kv * e, layers * share * n * kv * e
        return sent | {"all_gather": both, "reduce_scatter": both}
    if variant == "ulysses":
        numbers = 2 * tokens * (cfg.dim + kv_width(cfg, max(cfg.kv_heads, n)))      # q, k, v, out
        payload = 2 * layers * numbers * e              # forward and backward
        return sent | {"all_to_all": (8 * layers, payload, share * payload)}
    hops = layers * (n - 1)                             # of kv twice, of its gradients once
    payload = hops * kv * (2 * e + max(e, 4))
    return sent | ({"send": (3 * hops, payload, payload)} if hops else {})


def activation_bytes(cfg, variant, batch, n, e):
    """Bytes that a rank keeps for backward, on a CPU: 1/N of the whole, but for gathered keys and
    their mask. e: bytes of a number."""
    tokens, accurate = batch * cfg.seq // n, max(e, 4)
    x, kv = tokens * cfg.dim * e, tokens * kv_width(cfg, cfg.kv_heads) * e
    norm = x + 2 * tokens * e + x                       # input, mean and 1/std, output
    rope = cfg.seq // n * cfg.dim // cfg.heads * e      # cos and sin, which all blocks share
    loss = tokens * cfg.vocab * accurate + accurate     # log-probabilities, and a scalar
    mine = 2 * 8 * tokens                               # the tokens and targets themselves, int64

    is_o_input = variant != "ulysses" and cfg.heads == 1            # else that is a copy
    core, mask = (0 if is_o_input else x) + tokens * cfg.heads * accurate, 0    # output and lse
    if variant == "gather":
        kv, mask = n * kv, cfg.seq // n * cfg.seq * e   # the mask is the same in all blocks
    if variant == "ulysses":                            # at least one head for a rank
        kv = tokens * kv_width(cfg, max(cfg.kv_heads, n)) * e
    if cfg.attention == "plain" and variant in ("gather", "ulysses"):
        core, mask = tokens * cfg.heads * cfg.seq * e, 0            # the weights
    attn = x + 2 * kv + core + x                        # q, k and v, the core, o's input
    mlp = 4 * x + 4 * x                                 # GELU's input and output
    return cfg.layers * (2 * norm + attn + mlp) + norm + rope + mask + loss + mine


def pairs(variant, rank, n, seq, diagonal=1):
    """How many pairs of a query and a key a rank computes. diagonal: the share of a rank's own
    block that its core computes: all, or one half where it skips what is masked."""
    length = seq // n
    if variant == "gather":
        return length * seq
    if variant == "ulysses":                            # of heads/N heads
        return diagonal * seq * seq // n
    total = 0
    for other in range(n):
        met = meeting(rank, other, length, variant in ZIGZAG)
        if met:
            rows, keys = (len(range(length)[part]) for part in met[:2])
            total += rows * keys * (diagonal if other == rank else 1)
    return total


def forward_numbers(cfg, variant, n):
    """What a rank sends forward in a layer, in numbers per sequence: the lesson's table."""
    if variant == "ulysses":
        return (n - 1) / n * 2 * cfg.seq / n * (cfg.dim + kv_width(cfg, max(cfg.kv_heads, n)))
    return (n - 1) / n * 2 * cfg.seq * kv_width(cfg, cfg.kv_heads)


def attention_flops(cfg, variant, batch, rank, n):
    """FLOPs of a layer's attention on a rank, forward and backward, as PyTorch counts them: all of
    a diagonal block, whatever the core. Backward takes 4 matmuls for 2, and one more that computes
    scores again where they were not kept."""
    matmul = 2 * batch * cfg.dim * pairs(variant, rank, n, cfg.seq)
    kept = variant in ("gather", "ulysses") and cfg.attention == "plain"
    return (6 if kept else 7) * matmul


def ring_over_zigzag(n, diagonal):
    """How much longer the last rank of a ring computes than a rank of a zig-zag."""
    longest = max(pairs("ring", rank, n, 2 * n, diagonal) for rank in range(n))
    return longest / pairs("zigzag", 0, n, 2 * n, diagonal)


def tokens_to_hide(cfg, width, zigzag, flops, bandwidth):
    """Tokens of a rank from which on a hop hides behind its block. width: bytes of a number. flops:
    FLOP/s. bandwidth: bytes/s."""
    per_token = 2 * kv_width(cfg, cfg.kv_heads) * width / bandwidth
    return per_token / ((2 if zigzag else 4) * cfg.dim / flops)


# ----------------------------------------------------------------------------------------- the run

def core_of(run):
    """The core that --attention names, or with --kernels our Triton flash attention, where it can
    run: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    if run.args.kernels:
        from kernels import flash_attention as ours

        if ours.runs_here(torch.empty(0, dtype=run.dtype, device=run.device)):
            return Core(ours.flash_forward, ours.flash_backward)
        run.note("--kernels: no GPU, or no Triton, for them here; attention is PyTorch's")
    return CORES[run.args.attention]


def train(run):
    args, cfg, n = run.args, run.args.model, run.world
    group = run.mesh(cp=n)["cp"].get_group()
    positions = positions_of(run.rank, n, cfg.seq, args.variant in ZIGZAG).to(run.device)
    model = gpt(cfg, args.seed, run.device, run.dtype)
    context_parallel(model, cfg, group, args.variant, positions, core_of(run))
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches():                         # of each sequence this rank's tokens
        mine = [(tokens[:, positions], targets[:, positions])
                for tokens, targets in batch.micro_batches]
        with run.measure():
            loss, norm = train_step(model, optimizer, mine, batch.valid, args.clip)
        dist.all_reduce(loss, group=group)              # for the report, which shows the whole loss
        run.log(batch, loss, norm, model)

    def forward(tokens, targets):
        return loss_sum(model(tokens[:, positions]), targets[:, positions])

    def attention(tokens, targets):                     # one layer's, forward and backward
        like = {"device": run.device, "dtype": run.dtype, "requires_grad": True}
        q, k, v = (torch.randn(b, heads, len(positions), cfg.dim // cfg.heads, **like)
                   for heads in (cfg.heads, cfg.kv_heads, cfg.kv_heads))
        model.block1.attn.core(q, k, v).sum().backward()

    width, b = run.dtype.itemsize, args.micro_batch
    run.check_states(model, optimizer, cfg.parameters())
    run.check_activations(model, forward, activation_bytes(cfg, args.variant, b, n, width))
    if not args.kernels:                                # PyTorch's counter does not see Triton's
        run.check_flops("attention of a layer", attention,
                        attention_flops(cfg, args.variant, b, run.rank, n))
    run.check_traffic(traffic(cfg, args.variant, len(mine), b, n, width))
    say_what_it_costs(run, cfg, n)


def say_what_it_costs(run, cfg, n):
    """The conditions of the lesson, for this model and for the machines that lab/ knows."""
    run.note(f"a ring takes {ring_over_zigzag(n, 1):.2f} times as long as a zig-zag, or "
             f"{ring_over_zigzag(n, 0.5):.2f} with a core that skips what is masked")
    sent = ", ".join(f"{variant} {forward_numbers(cfg, variant, n):,.0f}"
                     for variant in ("ring", "gather", "ulysses"))
    run.note(f"numbers sent forward, per sequence and layer: {sent}")
    run.on_machines({
        "tokens of a rank from which on a ring's hop hides in forward, in bf16":
            lambda *rates: tokens_to_hide(cfg, 2, False, *rates),
        "and a zig-zag's": lambda *rates: tokens_to_hide(cfg, 2, True, *rates)})


def torch_step(model, optimizer, micro_batches, valid, clip, mesh):
    """The same through PyTorch, which puts a ring into F.scaled_dot_product_attention, and cuts
    what depends on the sequence, in place and in a zig-zag."""
    from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

    optimizer.zero_grad()
    total, rope = 0, model.block1.attn.rope
    for tokens, targets in micro_batches:
        buffers = tokens.clone(), targets.clone(), torch.arange(tokens.shape[1]).to(tokens)
        with torch_context_parallel(mesh, buffers=list(buffers), buffer_seq_dims=[1, 1, 0]):
            tokens, targets, positions = buffers        # this rank's
            rope.positions = positions.clone()          # another tensor, so that its tables follow
            loss = loss_sum(model(tokens), targets) / valid
            loss.backward()
        total += loss.detach()
    sum_partial_grads(model.parameters())

    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))   # inf: no clipping
    optimizer.step()
    return total, norm


def train_torch(run):
    args, cfg, mesh = run.args, run.args.model, run.mesh(cp=run.world)
    model = gpt(cfg, args.seed, run.device, run.dtype)
    for p in model.parameters():
        p.partial = mesh.get_group()
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches():
        with run.measure():
            loss, norm = torch_step(model, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    mesh)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)

    run.check_states(model, optimizer, cfg.parameters())
    run.check_traffic()


def requires(args, ranks):
    common.split_batch(args, 1)
    cfg, variant = args.model, args.variant
    on_gpus = args.device != "cpu" and torch.cuda.device_count() >= ranks
    if variant == "torch" and not on_gpus:
        common.refuse("--variant torch is made of CUDA's kernels, and there is no GPU for each "
                      "rank; --variant zigzag would work")
    if variant == "torch" and args.attention == "plain":
        common.refuse("--variant torch is PyTorch's fused attention; --attention sdpa would work")
    is_flash = variant == "torch" or (
        variant in ("zigzag", "ring") and args.attention == "sdpa" and not args.kernels)
    if on_gpus and is_flash and (args.dtype != "bfloat16" or cfg.dim // cfg.heads % 8):
        common.refuse("--attention sdpa over ranks is flash attention, which on a GPU takes 16 "
                      f"bits in heads of 8, 16, 24, ..., not {args.dtype} in heads of "
                      f"{cfg.dim // cfg.heads}; --dtype bfloat16 --dim {64 * cfg.heads} would work")
    if ranks > 1:
        in_chunks = variant in (*ZIGZAG, "torch")
        parts, what = (2 * ranks, "chunks") if in_chunks else (ranks, "ranks")
        common.divides("--seq", cfg.seq, what, parts)
    if variant in ("zigzag", "ring") and cfg.seq < 2 * ranks:
        common.refuse(f"--seq {cfg.seq} is less than two tokens for each of {ranks} ranks; "
                      f"{2 * ranks} would work")
    if args.kernels and (args.dtype == "float64" or not 16 <= cfg.dim // cfg.heads <= 256):
        common.refuse(f"--kernels take float32 or bfloat16 in heads of 16 to 256, not {args.dtype} "
                      f"in heads of {cfg.dim // cfg.heads}; --dtype float32 --dim {64 * cfg.heads} "
                      "would work")
    fits = [t for t in range(1, ranks + 1) if cfg.heads % t == 0
            and (cfg.kv_heads % t == 0 or t % cfg.kv_heads == 0)]
    if variant == "ulysses" and ranks not in fits:
        common.refuse(f"--heads {cfg.heads} and --kv-heads {cfg.kv_heads} cannot be shared by "
                      f"{ranks} ranks; --nproc_per_node={fits[-1]} would work")


def flags(parser):
    parser.add_argument("--kernels", action="store_true",
                        help="on a GPU: kernels/flash_attention.py in place of --attention")


VARIANTS = {
    "zigzag": (train, "--kernels"),
    "ring": (train, "--kernels"),
    "gather": train,
    "ulysses": train,
    "torch": train_torch,
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
