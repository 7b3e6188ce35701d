r"""06 · Context parallelism: one sequence on several ranks, in attention too.

Chapter 05 puts the sequence together again inside of the sub-layers, so that none can be longer
than what fits on one rank. Here it stays cut: each of N ranks holds s/N of its s tokens, and all
parameters. Norms, linears and the loss treat each token by itself; RoPE must know its position in
the whole sequence. And attention is causal: a query meets the keys of all tokens up to its own.

Ring attention. The queries stay, and keys and values travel around a ring of ranks. At each hop a
rank computes a block of attention, of its queries to the keys that have arrived, while the next
ones are on their way. But a softmax is over the scores of all blocks. So a block also gives lse for
each query, the logarithm of its sum of exp(score). The block's output times exp(lse) is a plain sum
of exp(score)·v, and plain sums add up. This is the online softmax:

    exp(lse)      =  exp(lse₁)      + exp(lse₂)             for each query; this gives lse.
    exp(lse)·out  =  exp(lse₁)·out₁ + exp(lse₂)·out₂        Divided by exp(lse):
             out  =  exp(lse₁ - lse)·out₁ + exp(lse₂ - lse)·out₂

Backward sends keys and values around again. From the scores S of a block it computes the weights
P = exp(S - lse), with the lse of all keys. From the gradient of the output, dout, come those of the
weights, dP = dout @ vᵀ, and of the scores (∘ multiplies element by element):

    dS  =  P∘(dP - Σ P∘dP)  =  P∘(dP - Σ out∘dout)

The first form is the softmax's usual one, with a sum over all keys; the second sums over head_dim.
They are equal, since P @ v over all keys is out, which is at home. So a block's gradients can be
computed by themselves. Those of the queries, dS @ k, stay (scaled by head_dim^-½, as q is). Those
of keys and values, dSᵀ @ q and Pᵀ @ dout, follow these one hop behind: each rank adds its part, and
the sum comes home. On three ranks, with keys a, b and c, and a₁ for rank 1's part of a's gradient:

    hop    rank 0               rank 1               rank 2
     0     a₀ stays             b₁ stays             c₂ stays
     1     c₀ ──►               a₁ ──►               b₂ ──►               to the next rank (from
     2     b₂ + b₀ ──►          c₀ + c₁ ──►          a₁ + a₂ ──►          rank 2 to rank 0)
    home   a₁ + a₂ + a₀         b₂ + b₀ + b₁         c₀ + c₁ + c₂

Who has to compute? A block of later keys is masked, so nobody computes it. With contiguous parts
(`--variant ring`) rank 0 computes one block, its own, and the last rank all N, which all wait for.
So a zig-zag (the default) cuts the sequence into 2N chunks, and rank r holds chunk r from the front
and chunk r from the back. Then every rank computes its own block at hop 0, and half a block at each
later hop. For 4 ranks, who computes what, and at which hop:

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

A plain core computes the masked half of a rank's own block too. Then the last rank of a ring takes
N blocks, and every rank of a zig-zag takes (N+1)/2: the ring is 2N/(N+1) times as long. With a core
that skips the masked half it is 2 - 1/N. The same can be had without a ring:

    gather      all_gather keys and values, and put them into the order of the sequence. Each of a
                rank's two chunks meets all keys up to its own end. Llama 3 does this: kv heads are
                few (GQA), and another mask is a line. But nothing hides.
    ulysses     all_to_all from tokens to heads: each rank gets whole sequences of heads/N heads,
                takes any core, and sends them back. Limited to as many ranks as there are heads.

What a rank sends in a layer's forward, in numbers (b sequences; h and kv: the widths of q and k),
and again in backward, where a ring also sends the gradients of keys and values, in fp32:

    rings, gather   (N-1)/N · 2·b·s·kv
    ulysses         (N-1)/N · 2·b·(s/N)·(h + kv)        least if h + kv < N·kv

Where kv heads are fewer than ranks, Ulysses repeats them: its kv is that of N heads. And once a
step, as in chapter 02, the gradients of all parameters are summed over the ranks.

With --recompute, to compute attention again in backward is to send its forward again: a ring has
gone round twice before it starts on the gradients. Then no variant keeps more of keys and values
than its own 1/N. (Ulysses sends q, k and v again, and with `full` its output, which the gradient of
o's weight reads. With `selective`, nothing in backward reads what comes out of the core.)

When it pays: for what does not fit, since all activations become 1/N (but for keys and values that
are gathered or repeated). With F FLOP/s, B bytes/s and e bytes a number, a hop's bytes over B hide
behind its block's FLOPs over F if 2·b·(s/N)·kv·e / B <= 4·b·(s/N)²·h / F: from s/N = kv/h · e/2 ·
F/B tokens on. A zig-zag's hop sends as much for half a block: it needs twice as many. (Backward
sends three times the bytes, in bf16, for 2.5 times the FLOPs: 1.2 times as many.)

Run it:
    torchrun --nproc_per_node=4 06_context_parallel.py
    torchrun --nproc_per_node=4 06_context_parallel.py --variant ring --seq 512 --batch 2
    torchrun --nproc_per_node=4 06_context_parallel.py --variant ulysses --attention sdpa

Sources: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3; Brandon et al.,
Striped Attention (2023), section 3 (the imbalance); Jacobs et al., DeepSpeed Ulysses (2023),
section 3; Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2 (2N chunks, gathered keys);
Ultra-Scale Playbook, "Context Parallelism".
"""

from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, loss_sum, rounded

# --------------------------------------------------------------------------- who holds which tokens

def positions_of(rank, ranks, seq, zigzag):
    """The positions of a rank's tokens, int64 (seq/N,), in ascending order: a contiguous part, or
    the rank-th chunk of 2N from the front and from the back."""
    parts = torch.arange(seq).chunk(2 * ranks if zigzag else ranks)
    return torch.cat([parts[rank], parts[-1 - rank]]) if zigzag else parts[rank]


def meeting(rank, other, length, zigzag):
    """Which queries of `rank` meet which keys of `other`, and whether only those up to their own
    position: (rows, keys, causal), or None. length: tokens of a rank."""
    everything, front, back = slice(None), slice(length // 2), slice(length // 2, None)
    if other == rank:
        return everything, everything, True             # both in ascending order of position
    if zigzag and other < rank:
        return everything, front, False                 # its back chunk comes after all of ours
    if zigzag:
        return back, everything, False                  # our back chunk comes after all of its
    return (everything, everything, False) if other < rank else None


# -------------------------------------------------------------------------- a block of attention

# A block of attention is two functions: forward(q, k, v, causal) gives out and lse; backward(dout,
# q, k, v, out, lse, causal), with out and lse of all keys, gives dq, dk, dv. q (batch, heads, rows,
# head_dim); k, v (batch, kv_heads, keys, head_dim); lse (batch, heads, rows), float32 or better.
BlockCore = namedtuple("BlockCore", ("forward", "backward"))


def wide(x):
    """x in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def stacked(x, like):
    """(batch, heads, rows, n) to (batch, kv_heads, group·rows, n): query heads below each other."""
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])


def scores_of(q, k, causal=False):
    """(batch, heads, rows, keys); if causal, with -inf where a key comes after its query."""
    scores = (stacked(q * q.shape[-1] ** -0.5, k) @ k.transpose(2, 3)).view(*q.shape[:3], -1)
    if causal:
        scores = scores + scores.new_full(scores.shape[2:], -torch.inf).triu(1)
    return scores


def plain_forward(q, k, v, causal):
    """With its scores in sight."""
    q, k, v = wide(q), wide(k), wide(v)
    scores = scores_of(q, k, causal)
    lse = scores.logsumexp(-1)                          # (batch, heads, rows)
    weights = (scores - lse[..., None]).exp()
    return (stacked(weights, k) @ v).view(q.shape), lse


def plain_backward(dout, q, k, v, out, lse, causal):
    """The lesson's dS, scaled as q is, from lse and out of all keys; then dq, dk, dv of a block."""
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
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


def flash_backward(dout, q, k, v, out, lse, causal):
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal)
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)      # of a dropout that is not there
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        seed, seed)


def merge(out, lse, block_out, block_lse):
    """Add a block to what the queries have met so far, in place, and in float32 or better: in bf16
    N merges would be N roundings."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)


# ---------------------------------------------------------------------------------- around the ring

def send_on(x, group):
    """Start to send x to the next rank, and to receive one like it from the rank before. Returns a
    function that waits for both, and gives what has come."""
    rank, n, received = group.rank(), group.size(), torch.empty_like(x)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n),
    ])

    def receive(sent=x):                                # which must live until it has left
        for handle in handles:
            handle.wait()
        return received

    return receive


def around_the_ring(kv, group):
    """Yield (rank, its kv): this rank's, then those of ranks before it, which come meanwhile."""
    rank, n = group.rank(), group.size()
    for hop in range(n - 1):
        receive = send_on(kv, group)
        yield (rank - hop) % n, kv
        kv = receive()
    yield (rank + 1) % n, kv                            # these go nowhere


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries, q (batch, heads, s/N, head_dim), to the keys of all
    ranks, k and v (batch, kv_heads, s/N, head_dim) on each. Returns q's shape. Communication: N-1
    sends of k and v in forward, and in backward, and there N-1 of their gradients in float32."""

    @staticmethod
    def forward(ctx, q, k, v, group, core, zigzag):
        out = torch.zeros_like(wide(q))
        lse = out.new_full(q.shape[:3], -torch.inf)     # nothing seen so far

        for other, (k_here, v_here) in around_the_ring(torch.stack([k, v]), group):
            if met := meeting(group.rank(), other, q.shape[2], zigzag):
                rows, keys, causal = met
                block = core.forward(q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], causal)
                merge(out[:, :, rows], lse[:, :, rows], *block)

        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.core, ctx.zigzag = group, core, zigzag
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, out, lse), group = ctx.saved_tensors, ctx.group
        dq, receive = torch.zeros_like(wide(q)), lambda: 0       # nothing has been sent yet

        for other, (k_here, v_here) in around_the_ring(torch.stack([k, v]), group):
            dkv = dq.new_zeros(2, *k.shape)             # of the keys that are here
            if met := meeting(group.rank(), other, q.shape[2], ctx.zigzag):
                rows, keys, causal = met
                dq_block, *dkv_block = ctx.core.backward(
                    dout[:, :, rows], q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys],
                    out[:, :, rows], lse[:, :, rows], causal)
                dq[:, :, rows] += dq_block
                dkv[:, :, :, keys] += torch.stack(dkv_block)
            if other == group.rank():
                at_home = dkv                           # the first: it waits here for the others
            else:
                dkv += receive()                        # the sum of the ranks where they have been
                receive = send_on(dkv, group)           # one hop behind their keys
        at_home += receive()
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


def in_order(x, ranks, dim):
    """What the ranks of a zig-zag hold, side by side, in the order of the sequence."""
    chunks = x.chunk(2 * ranks, dim)                    # rank 0's front and back, rank 1's, ...
    return torch.cat([*chunks[0::2], *chunks[::-2]], dim)


def lower_right_attention(q, k, v, attention):
    """Causal attention of the last tokens of a sequence, q (batch, heads, rows, head_dim), to all
    of it, k and v (batch, kv_heads, keys, head_dim): the mask ends in the lower right corner of the
    scores. Returns q's shape."""
    rows, keys = q.shape[2], k.shape[2]
    if attention == "sdpa" and q.is_cuda and q.itemsize == 2 and q.shape[3] in range(8, 257, 8):
        # Flash attention's own mask ends there. (PyTorch's causal_lower_right calls it, too.)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]

    mask = q.new_full((rows, keys), -torch.inf).triu(1 + keys - rows)
    if attention == "sdpa":                             # its is_causal begins in the upper left
        gqa = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    weights = (scores_of(q, k) + mask).softmax(-1)      # (batch, heads, rows, keys)
    return (stacked(weights, k) @ v).view(q.shape)


def gathered_attention(q, k, v, group, attention):
    """Attention to the gathered keys, of a rank's front chunk and of its back chunk. Without flash
    attention a layer keeps the masks of both: 1.1 GB in bf16, for 128k tokens on 16 ranks."""
    rank, n, outputs = group.rank(), group.size(), []
    k, v = in_order(GatherKeys.apply(torch.stack([k, v]), group), n, dim=3)
    for queries, chunk in zip(q.chunk(2, dim=2), (rank, 2 * n - 1 - rank)):
        end = (chunk + 1) * queries.shape[2]            # where the keys end that it may see
        outputs.append(lower_right_attention(queries, k[:, :, :end], v[:, :, :end], attention))
    return torch.cat(outputs, dim=2)


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
    """Causal attention of heads/N heads over the whole sequence, by one of common.CORES. q, k, v
    (batch, heads, s/N, head_dim); returns q's shape."""
    copies = max(group.size() // k.shape[1], 1)         # a kv head for every rank, at least
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))   # (batch, heads/N, s, head_dim)
    return Exchange.apply(core(q, k, v), 2, 1, group)


# ------------------------------------------------------------------------------------ the whole GPT

def core_of(args, like):
    """The core that --attention names, or with --kernels our Triton flash attention, where it can
    work on such tensors: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    if args.kernels:
        from kernels import flash_attention as ours

        if ours.runs_here(like):
            return BlockCore(ours.flash_forward, ours.flash_backward)
    if args.attention == "sdpa":
        return BlockCore(flash_forward, flash_backward)
    return BlockCore(plain_forward, plain_backward)


def context_parallel(model, args, group):
    """Put a variant's attention into common.gpt(args.model). Returns this rank's positions."""
    n, variant, weight = group.size(), args.variant, model.embedding.weight
    zigzag, core = variant in ("zigzag", "gather"), core_of(args, weight)   # gather: Llama 3's
    positions = positions_of(group.rank(), n, args.model.seq, zigzag).to(weight.device)
    if variant == "gather":
        attention = lambda q, k, v: gathered_attention(q, k, v, group, args.attention)
    elif variant == "ulysses":
        attention = lambda q, k, v: ulysses_attention(q, k, v, group, common.CORES[args.attention])
    else:
        attention = lambda q, k, v: RingAttention.apply(q, k, v, group, core, zigzag)

    for block in model[1:-1]:
        block.attn.core = attention
    model.block1.attn.rope.positions = positions        # all blocks share this one
    for p in model.parameters():
        p.partial = dist.group.WORLD    # ranks with other tokens; not `group`: hops would queue
    return positions


def train_step(model, optimizer, micro_batches, positions, valid, clip):
    """One step on the tokens at this rank's positions. valid: the valid targets of the whole batch.
    Returns this rank's part of the loss, and the norm. Communication: that of attention; in the
    last backward all_reduces of all gradients."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        tokens, targets = tokens[:, positions], targets[:, positions]   # (micro_batch, s/N)
        loss = loss_sum(model(tokens), targets) / valid
        if i == len(micro_batches):
            sums = PartialSums(model.parameters())      # they start in this backward
        loss.backward()
        total += loss.detach()
    sums.finish()

    norm = grad_norm(model.parameters())                # every rank has all of it: nothing to send
    if clip:
        clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas

def traffic(cfg, variant, micro_batches, batch, n, e, recompute="none", sums=None):
    """What a rank sends in a step: {op: (calls, payload, wire)}. batch: of a micro-batch. e: bytes
    of a number; sums: of a gradient that is summed over the ranks, if those are wider."""
    share, layers = (n - 1) / n, micro_batches * cfg.layers
    forwards = 1 if recompute == "none" else 2
    gradients = cfg.parameters() * (sums or e)
    calls = cfg.layers + 2 if cfg.parameters() > common.ONE_BUCKET else 1
    sent = {"all_reduce": (calls, gradients, 2 * share * gradients)}
    of_a_head = batch * cfg.seq * cfg.dim // cfg.heads  # of q, k, v or out
    if variant == "gather":
        payload = layers * 2 * of_a_head * cfg.kv_heads * e
        sent["reduce_scatter"] = layers, payload, share * payload
        sent["all_gather"] = forwards * layers, forwards * payload, share * forwards * payload
    elif variant == "ulysses":
        outs = 2 if recompute == "selective" else 1 + forwards      # of out, and of its gradient
        heads = (1 + forwards + outs) * cfg.heads               # of q; of out
        heads += (1 + forwards) * 2 * max(cfg.kv_heads, n)      # of k and v
        payload = layers * of_a_head // n * heads * e
        sent["all_to_all"] = (3 * (1 + forwards) + outs) * layers, payload, share * payload
    elif n > 1:                                         # k and v once more, and their gradients
        hops = layers * (n - 1)
        payload = hops * 2 * of_a_head // n * cfg.kv_heads * ((1 + forwards) * e + max(e, 4))
        sent["send"] = (2 + forwards) * hops, payload, payload
    return sent


def kept(variant, cfg, n):
    """The share of each class of activations that a rank keeps for backward: 1/N, but for keys and
    values that are gathered, or repeated until each rank has a head. how: what attention keeps."""
    classes = "outside", "inputs", "inside", "core", "logits", "ids", "positions"
    keys = {"gather": 1, "ulysses": max(cfg.kv_heads, n) / cfg.kv_heads / n}.get(variant, 1 / n)
    how = {"gather": "gathered", "ulysses": "exchanged"}.get(variant, "blocks")
    return dict.fromkeys(classes, 1 / n) | {"keys and values": keys, "how": how}


def pairs(variant, rank, n, seq, diagonal=1):
    """How many pairs of a query and a key a rank computes. diagonal: the share of its own block
    that its core computes: all, or one half where it skips what is masked."""
    blocks = {"zigzag": (n - 1) / 2 + diagonal, "ring": rank + diagonal, "ulysses": diagonal * n,
              "gather": (n - 1 / 2) / 2 + diagonal / 2}     # two chunks' own are half a block
    return blocks[variant] * (seq // n) ** 2


def attention_flops(cfg, variant, batch, rank, n, recompute="none"):
    """FLOPs of a layer's attention on a rank, as PyTorch counts them, all of its own block: 2
    matmuls, 4 in backward, and one that computes scores again where they were not kept. And with
    `recompute` the 2 again; of a plain core alone not its last one, whose output nobody reads."""
    matmul = 2 * batch * cfg.dim * pairs(variant, rank, n, cfg.seq)
    scores_kept = variant in ("gather", "ulysses") and cfg.attention == "plain"
    flops = (6 if scores_kept else 7) * matmul + (0 if recompute == "none" else 2 * matmul)
    if scores_kept and recompute == "selective":        # gather's last one is of its back chunk
        flops -= matmul * (2 * n - rank) // (2 * n + 1) if variant == "gather" else matmul
    return flops


def tokens_to_hide(cfg, e, flops, bandwidth):
    """Tokens of a rank from which on a ring's hop hides behind its block. e: bytes of a number.
    flops: FLOP/s. bandwidth: bytes/s."""
    return cfg.kv_heads / cfg.heads * e / 2 * flops / bandwidth


def hop_over_block(cfg, variant, n, e, flops, bandwidth):
    """How long a ring's hop takes, in times of the block that it hides behind in forward."""
    blocks = 1 / 2 if variant == "zigzag" else 1        # that a rank computes in a hop
    return tokens_to_hide(cfg, e, flops, bandwidth) / (cfg.seq / n * blocks)


def formulas(args, rank, ranks, model):
    cfg, variant, b, n = args.model, args.variant, args.micro_batch, ranks
    if variant == "torch":
        return {"parameters": cfg.parameters()}
    micro_batches, weight = args.batch // b, model.embedding.weight
    name = "tokens of a rank from which on a hop hides in forward, in bf16 (a zig-zag's: twice)"
    answer = {"parameters": cfg.parameters(),
              "kept": kept(variant, cfg, n),
              "sent": traffic(cfg, variant, micro_batches, b, n, weight.itemsize,
                              args.recompute, common.DTYPES[args.dtype].itemsize),
              "machines": {name: lambda *rates: tokens_to_hide(cfg, 2, *rates)}}
    if not args.kernels:                                # PyTorch's counter does not see Triton's
        of_a_layer = attention_flops(cfg, variant, b, rank, n, args.recompute)
        attention = micro_batches * cfg.layers * of_a_layer
        answer["flops"] = {"attention": attention}
        op = {"gather": "all_gather", "ulysses": "all_to_all"}.get(variant, "send")

        def sending_over_attention(flops, bandwidth):   # of a hop; without a ring, of all of it
            if op == "send":
                return hop_over_block(cfg, variant, n, weight.itemsize, flops, bandwidth)
            _, _, wire = answer["sent"][op]
            return wire / bandwidth / (attention / flops)

        answer["overlap"] = {(op, "attention"): sending_over_attention}
    elif core_of(args, weight).forward in (plain_forward, flash_forward):
        answer["notes"] = ["--kernels: no GPU, or no Triton, for them here; attention is PyTorch's"]
    return answer


# ----------------------------------------------------------------------------------------- the run

def train(run):
    args, group = run.args, run.mesh(cp=run.world)["cp"].get_group()
    model = run.draw(gpt(args.model, seed=None))
    positions = context_parallel(model, args, group)
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    for batch in run.batches():                         # every rank gets all of it
        with run.measure():
            loss, norm = train_step(
                model, optimizer, batch.micro_batches, positions, batch.valid, args.clip)
        dist.all_reduce(loss, group=group)              # for the report, which shows the whole loss
        run.log(batch, loss, norm, model)


def train_torch(run):
    """PyTorch puts a ring into F.scaled_dot_product_attention, and cuts buffers in a zig-zag."""
    from torch.distributed.tensor.experimental import context_parallel as theirs

    args, cfg, mesh = run.args, run.args.model, run.mesh(cp=run.world)
    model = run.draw(gpt(cfg, seed=None))
    for p in model.parameters():
        p.partial = mesh.get_group()
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    for batch in run.batches():
        buffers = [x.clone() for pair in batch.micro_batches for x in pair]
        buffers.append(torch.arange(cfg.seq, device=run.device)[None])
        with run.measure(), theirs(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            mine = list(zip(buffers[0:-1:2], buffers[1:-1:2]))
            model.block1.attn.rope.positions = buffers[-1][0].clone()   # another tensor: new tables
            loss, norm = train_step(model, optimizer, mine, slice(None), batch.valid, args.clip)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)


def requires(args, ranks):
    common.split_batch(args, 1)
    cfg, variant, on_cuda = args.model, args.variant, common.on_cuda(args)
    head_dim, in_blocks = cfg.dim // cfg.heads, variant in ("zigzag", "ring", "torch")

    if variant == "torch" and (args.attention == "plain" or not on_cuda):
        raise Refused("--variant torch needs --attention sdpa and a GPU for each rank",
                      "--variant zigzag")
    is_flash, dtype = in_blocks and args.attention == "sdpa" and not args.kernels, rounded(args)
    if on_cuda and is_flash and (dtype != torch.bfloat16 or head_dim % 8):
        raise Refused("--attention sdpa over ranks is flash attention, which on a GPU takes 16 "
                      f"bits in heads of 8, 16, 24, ..., not {str(dtype)[6:]} in heads of "
                      f"{head_dim}", f"--dtype float32 --precision bf16 --dim {64 * cfg.heads}")
    if args.kernels and (args.dtype == "float64" or not 16 <= head_dim <= 256):
        raise Refused(f"--kernels take float32 or bfloat16 in heads of 16 to 256, not {args.dtype}"
                      f" in heads of {head_dim}", f"--dtype float32 --dim {64 * cfg.heads}")

    common.divides("--seq", cfg.seq, "two chunks for each rank", 2 * ranks)
    shared = cfg.heads % ranks == 0 and (cfg.kv_heads % ranks == 0 or ranks % cfg.kv_heads == 0)
    if variant == "ulysses" and not shared:
        raise Refused(f"--heads {cfg.heads} and --kv-heads {cfg.kv_heads} cannot be shared "
                      f"by {ranks} ranks", "--variant zigzag")


def flags(parser):
    parser.add_argument("--kernels", action="store_true", help="our own flash attention, on a GPU")


VARIANTS = {"zigzag": (train, "--kernels"), "ring": (train, "--kernels"),
            "gather": train, "ulysses": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
