r"""06 · Context parallelism: one sequence on several ranks, in attention too.

Chapter 05 puts the sequence together again inside of the sub-layers, so that none can be longer
than what fits on one rank. Here it stays cut: each of N ranks holds s/N of its s tokens, and all
parameters. Norms, linears and the loss treat each token by itself, RoPE must know its position. But
in attention, which is causal, a query meets the keys of all tokens up to its own.

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
and chunk r from the back. Then at hop 0 every rank has three quarters of a block to compute, and
half a block at each later hop. For 2 ranks, who computes what, and at which hop:

    ring        keys of           zigzag      keys of chunk
    queries     r0   r1           queries      0   1   2   3
         r0     0                      r0 0    0
         r1     1    0                 r1 1    1   0
                                       r1 2    1   0   0
                                       r0 3    0   1   1   0

A plain core computes the masked half of what is on the diagonal, too: N blocks on the last rank of
a ring, (2N+1)/4 on all of a zig-zag: the ring is 4N/(2N+1) times as long. With a core that skips
that half it is 2 - 1/N. The same can be had without a ring:

    gather      all_gather keys and values, in the order of the sequence. Each of a rank's chunks
                meets all up to its own end. So does Llama 3, whose kv heads are few (GQA). But
                nothing hides, and all keys are kept.
    ulysses     all_to_all from tokens to heads: each rank gets whole sequences of heads/N heads,
                and sends back what they give. Limited to as many ranks as there are heads.

What a rank sends in a layer's forward, in numbers (b sequences; h and kv: the widths of q and k),
and again in backward, where a ring also sends the gradients of keys and values, in fp32:

    rings, gather   (N-1)/N · 2·b·s·kv
    ulysses         (N-1)/N · 2·b·(s/N)·(h + kv)        least if h + kv < N·kv

Where kv heads are fewer than ranks, Ulysses repeats them: its kv is that of N heads. Once a step,
gradients of all parameters are summed. With --recompute, backward sends forward's messages again.

Documents. A sequence that is trained on is packed from many texts, and no token may see another
text (`--documents`, their mean length; here all sequences of a step have the same borders, in flash
attention's words one `cu_seqlens`). The mask is block-diagonal, a document's last token has no
target, and positions begin anew (though RoPE tells distances alone). A rank cuts its queries into
runs: neighbours in one document. A run meets an interval of the keys. So a block is skipped if no
document reaches into it, and a hop if that is so on all ranks. Of the pairs that are seen, D equal
documents leave 1/D. Of unequal ones, the rank with most of the longest has most to do. `--cut
document` makes a zig-zag of each: then all have as much to do. But each is padded to a multiple of
2N tokens, which pays if documents are much longer than that.

A window (`--window W`) lets a query see the last W keys. While W is no more than s/N, contiguous
parts are nearly fair, and keys go ceil((W-1)/(s/N)) of N-1 hops, from where one message brings
their gradients home. A zig-zag's neighbours lie on both sides: it needs all hops.

Two levels (`--inner U`). U neighbours, a machine, exchange heads: (U-1)/U · 2·b·(s/N)·(h + kv). And
N/U of them are a ring for 1/U of the heads: N/U-1 hops of as many numbers, each behind U times the
FLOPs. By chapter 10 (`--contexts`), a layer of Llama 3 8B with 128k tokens on 64 H100 takes 62 ms
with a ring, whose hops outlast their blocks, and 21 with U = 8; for Ulysses its 32 heads are too
few. (Latent attention could send the 576 numbers that DeepSeek-V3 keeps of a token, in place of the
40,960 of its keys and values; but each rank would have to make these anew.)

When it pays: for what does not fit, since all activations become 1/N (but for keys and values that
are gathered or repeated). With F FLOP/s, B bytes/s and e bytes a number, a hop's bytes over B hide
behind its block's FLOPs over F if 2·b·(s/N)·kv·e / B <= 4·b·(s/N)²·h / F: from s/N = kv/h · e/2 ·
F/B tokens on. A zig-zag's hop sends as much for half a block: it needs twice as many. Documents
make blocks smaller, and no message: D of them need D times as many.

Run it:
    torchrun --nproc_per_node=4 06_context_parallel.py --variant ring --window 40
    torchrun --nproc_per_node=4 06_context_parallel.py --documents 32 --cut document
    torchrun --nproc_per_node=4 06_context_parallel.py --inner 2 --attention sdpa

Sources: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3; Brandon et al.,
Striped Attention (2023), section 3 (the imbalance); Jacobs et al., DeepSpeed Ulysses (2023),
section 3; Llama Team, The Llama 3 Herd of Models (2024), section 3.3.2; Fang and Zhao, USP (2024);
TransformerEngine (a zig-zag of each document).
"""

import math
from collections import namedtuple
from dataclasses import replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, loss_sum, rounded

# --------------------------------------------------------------------------- who holds which tokens

def by_document(places, starts):
    """Ascending places, cut where another document begins: at starts[place], int64 (seq,)."""
    return places.tensor_split(starts[places].diff().nonzero().flatten() + 1)


def with_room(starts, multiple):
    """Pad documents, so that the length of each is a multiple. Returns for each place which token
    it holds, or -1 for none; and where documents begin now."""
    source, now = [], []
    for document in by_document(torch.arange(len(starts)), starts):
        source.append(F.pad(document, (0, -len(document) % multiple), value=-1))
        now += [len(now)] * len(source[-1])
    return torch.cat(source), torch.tensor(now)


def runs_of(part, parts, starts, zigzag, each_document=False, window=None):
    """The places of one of `parts`, int64, ascending, as runs: neighbours in one document, no more
    than a window. It is a contiguous part of the sequence; or in a zig-zag the part-th chunk of 2N
    from the front and from the back, of the sequence or each document."""
    places = torch.arange(len(starts))
    chunks = [places.chunk(parts)[part]]
    if zigzag:
        whole = by_document(places, starts) if each_document else [places]
        chunks = [x.chunk(2 * parts)[i] for x in whole for i in (part, -1 - part)]
    texts = [text for chunk in chunks for text in by_document(chunk, starts)]
    return [run for text in texts for run in text.split(window or len(text))]


# Of a block: the rows of its queries and of its keys, as slices. causal: a run meets itself, and
# none of it sees a later one. low: the first key that each query sees; None: they see them all.
Block = namedtuple("Block", "rows keys causal low")


def meeting(runs, keys, first, device="cpu"):
    """The blocks in which queries meet the keys that they see. runs: of the queries; keys: their
    places, ascending. first: of every place, the first that it sees."""
    blocks, row = [], 0
    for run in runs:
        bounds = torch.stack([first[run[0]], run[0], run[-1] + 1])
        begin, own, end = torch.searchsorted(keys, bounds).tolist()
        if begin < own:                                 # keys before the run, at any distance
            low = torch.searchsorted(keys[begin:own], first[run], out_int32=True)
            seeing = int((low < own - begin).sum())     # the last queries may see none of them
            low = low[:seeing].to(device) if low[seeing - 1] else None
            blocks.append(Block(slice(row, row + seeing), slice(begin, own), False, low))
        if own < end:
            blocks.append(Block(slice(row, row + len(run)), slice(own, end), True, None))
        row += len(run)
    return blocks


class Layout:
    """Who holds and meets what in a step's sequences, all alike. part: this rank's, of `parts`.
    source: of each place the token that it holds, -1 for padding. positions: the places of each
    part. blocks[hop]: in which this part's queries meet keys. On the CPU, but for a Block's low."""

    def __init__(self, args, part, parts, starts, device="cpu"):
        self.source, window = torch.arange(len(starts)), args.window
        if args.cut == "document":                      # two chunks for each part, of all its ranks
            self.source, starts = with_room(starts, 2 * parts * args.inner)
        zigzag, places = args.variant in ("zigzag", "gather"), torch.arange(len(starts))
        self.starts, self.first = starts, starts.maximum(places - (window or len(starts)) + 1)
        self.runs = [runs_of(other, parts, starts, zigzag, args.cut == "document", window)
                     for other in range(parts)]
        self.positions = [torch.cat(runs) for runs in self.runs]
        here = self.positions if args.variant in ("zigzag", "ring") else [places]   # all the keys
        at = lambda part, hop: meeting(
            self.runs[part], here[(part - hop) % len(here)], self.first, device)
        hops = next(hop for hop in reversed(range(len(here)))
                    if any(at(other, hop) for other in range(parts)))
        self.blocks = [at(part, hop) for hop in range(hops + 1)]    # no part needs more of them


# -------------------------------------------------------------------------- a block of attention

# forward(q, k, v, causal, low) gives out, and lse (batch, heads, rows) in float32 or better;
# backward(dout, q, k, v, out, lse, causal, low), with out and lse of all keys, dq, dk and dv.
BlockCore = namedtuple("BlockCore", ("forward", "backward"))


def wide(x):
    """x in float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def stacked(x, like):
    """(batch, heads, rows, n) to (batch, kv_heads, group·rows, n): query heads below each other."""
    return x.reshape(x.shape[0], like.shape[1], -1, x.shape[-1])


def mask_of(q, k, causal, low):
    """(rows, keys), to be added to scores: -inf where a query does not see a key. Or None."""
    if low is None and not causal:
        return None
    key = torch.arange(k.shape[2], device=q.device)
    hidden = key > key[:, None] if causal else key < low[:, None]
    return q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def scores_of(q, k, causal=False, low=None):
    """(batch, heads, rows, keys), -inf where a query does not see a key."""
    scores = (stacked(q * q.shape[-1] ** -0.5, k) @ k.transpose(2, 3)).view(*q.shape[:3], -1)
    mask = mask_of(q, k, causal, low)
    return scores if mask is None else scores + mask


def plain_forward(q, k, v, causal, low):
    """With its scores in sight."""
    q, k, v = wide(q), wide(k), wide(v)
    scores = scores_of(q, k, causal, low)
    lse = scores.logsumexp(-1)                          # (batch, heads, rows)
    weights = (scores - lse[..., None]).exp()
    return (stacked(weights, k) @ v).view(q.shape), lse


def plain_backward(dout, q, k, v, out, lse, causal, low):
    """The lesson's dS, scaled as q is, from lse and out of all keys; then dq, dk, dv of a block."""
    dout, q, k, v, out = (wide(x) for x in (dout, q, k, v, out))
    weights = (scores_of(q, k, causal, low) - lse[..., None]).exp()
    dv = stacked(weights, k).transpose(2, 3) @ stacked(dout, k)
    dweights = (stacked(dout, k) @ v.transpose(2, 3)).view(weights.shape)
    dscores = weights * (dweights - (out * dout).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = (stacked(dscores, k) @ k).view(q.shape)
    dk = stacked(dscores, k).transpose(2, 3) @ stacked(q, k)
    return dq, dk, dv


def flash_forward(q, k, v, causal, low):
    """With PyTorch's own flash kernels, which never write the scores. (`low` on a CPU alone.)"""
    if q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask_of(q, k, False, low))


def flash_backward(dout, q, k, v, out, lse, causal, low):
    if not q.is_cuda:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, attn_mask=mask_of(q, k, False, low))
    seed = torch.empty(2, dtype=torch.uint64, device=q.device)      # of a dropout that is not there
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal,
        seed, seed)


def merge(out, lse, block_out, block_lse):
    """Add a block to what queries have met, in place, in float32: else N merges are N roundings."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)


# ---------------------------------------------------------------------------------- around the ring

def send_on(x, group, by=1):
    """Start to send x to the rank that is `by` ahead, the next one, and to receive one like it from
    as far behind. Returns a function that waits for both, and gives what has come."""
    rank, n, received = group.rank(), group.size(), torch.empty_like(x)
    handles = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % n),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - by) % n),
    ])

    def receive(sent=x):                                # which must live until it has left
        for handle in handles:
            handle.wait()
        return received

    return receive


def around_the_ring(kv, group, hops):
    """Yield each hop and the kv that is here: this rank's, then those of ranks before it."""
    for hop in range(hops):
        receive = send_on(kv, group)
        yield hop, kv
        kv = receive()
    yield hops, kv                                      # these go nowhere


class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's queries, q (batch, heads, s/N, head_dim), to the keys of all
    ranks, k and v (batch, kv_heads, s/N, head_dim) on each; of q's shape. blocks: a Layout's, of H
    hops. Communication: H sends of k and v, in backward too, and of their float32 gradients."""

    @staticmethod
    def forward(ctx, q, k, v, group, core, blocks):
        out = torch.zeros_like(wide(q))
        lse = out.new_full(q.shape[:3], -torch.inf)     # nothing seen so far

        for hop, (k_here, v_here) in around_the_ring(torch.stack([k, v]), group, len(blocks) - 1):
            for rows, keys, *mask in blocks[hop]:
                block = core.forward(q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys], *mask)
                merge(out[:, :, rows], lse[:, :, rows], *block)

        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.core, ctx.blocks = group, core, blocks
        return out

    @staticmethod
    def backward(ctx, dout):
        (q, k, v, out, lse), group, hops = ctx.saved_tensors, ctx.group, len(ctx.blocks) - 1
        dq, receive = torch.zeros_like(wide(q)), lambda: 0       # nothing has been sent yet

        for hop, (k_here, v_here) in around_the_ring(torch.stack([k, v]), group, hops):
            dkv = dq.new_zeros(2, *k.shape)             # of the keys that are here
            for rows, keys, *mask in ctx.blocks[hop]:
                dq_block, *dkv_block = ctx.core.backward(
                    dout[:, :, rows], q[:, :, rows], k_here[:, :, keys], v_here[:, :, keys],
                    out[:, :, rows], lse[:, :, rows], *mask)
                dq[:, :, rows] += dq_block
                dkv[:, :, :, keys] += torch.stack(dkv_block)
            if hop == 0:
                at_home = dkv                           # it waits here for the others
            else:
                dkv += receive()                        # the sum of the ranks where they have been
                receive = send_on(dkv, group, 1 if hop < hops else -hop)    # on; in the end, home
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


def in_order(x, runs, dim):
    """What the parts of a sequence hold, side by side, in the order of the sequence."""
    runs = [run for of_part in runs for run in of_part]
    pieces = x.split([len(run) for run in runs], dim)
    return torch.cat([pieces[i] for i in sorted(range(len(runs)), key=lambda i: runs[i][0])], dim)


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


def exchanged_attention(q, k, v, group, core):
    """By core(q, k, v) of heads/N heads, over the tokens of all ranks of the group. q, k, v (batch,
    heads, s/N, head_dim); returns q's shape."""
    copies = max(group.size() // k.shape[1], 1)         # a kv head for every rank, at least
    k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))   # (batch, heads/N, s, head_dim)
    return Exchange.apply(core(q, k, v), 2, 1, group)


# ------------------------------------------------------------------------------------ the whole GPT

def core_of(args, like):
    """As --attention says; or our Triton flash attention, on a GPU or under TRITON_INTERPRET=1."""
    if args.kernels:
        from kernels import flash_attention as ours

        if ours.runs_here(like):
            return BlockCore(ours.flash_forward, ours.flash_backward)
    fused = flash_forward, flash_backward
    return BlockCore(*fused if args.attention == "sdpa" else (plain_forward, plain_backward))


def context_parallel(model, args, mesh):
    """Put a variant's attention into common.gpt(args.model). mesh: axes "ring" and "heads". Returns
    lay_out(starts), which begins a step: it gives this rank's tokens, int64, -1 for padding."""
    ring, heads = mesh["ring"].get_group(), mesh["heads"].get_group()
    weight, rope = model.embedding.weight, model.block1.attn.rope       # all blocks share this one
    core = core_of(args, weight)

    def attention(q, k, v):
        if args.variant == "gather":
            k, v = in_order(GatherKeys.apply(torch.stack([k, v]), ring), model.layout.runs, dim=3)
        return RingAttention.apply(q, k, v, ring, core, model.layout.blocks)

    def lay_out(starts):
        layout = model.layout = Layout(args, ring.rank(), ring.size(), starts, weight.device)
        mine = layout.positions[ring.rank()].chunk(heads.size())[heads.rank()]
        rope.positions = (mine - layout.starts[mine]).to(weight.device)
        return layout.source[mine].to(weight.device)

    for block in model[1:-1]:
        block.attn.core = attention
        if heads.size() > 1:
            block.attn.core = lambda q, k, v: exchanged_attention(q, k, v, heads, attention)
    for p in model.parameters():
        p.partial = dist.group.WORLD    # ranks with other tokens; not `ring`: hops would queue
    return lay_out


def train_step(model, optimizer, micro_batches, mine, valid, clip):
    """One step on this rank's tokens, `mine`; -1: padding. valid: the valid targets of the whole
    batch. Returns this rank's part of the loss, and the norm. Communication: that of attention; in
    the last backward all_reduces of all gradients."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        tokens = F.pad(tokens, (0, 1))[:, mine]         # (micro_batch, s/N); the last one is -1's
        targets = F.pad(targets, (0, 1), value=-100)[:, mine]
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

def hops_needed(variant, n, seq, window=None):
    """How far keys and values travel around a ring, of one document in each sequence. (In a zig-zag
    the chunk before a rank's own is on one neighbour in front, and on the other at the back.)"""
    reaches = math.ceil(((window or seq) - 1) / (seq // n))     # so many parts back
    return min(n - 1, reaches) if variant == "ring" else (n - 1) * (window != 1)


def traffic(cfg, variant, micro_batches, batch, n, e, recompute="none", sums=None, inner=1,
            hops=None):
    """What a rank sends in a step: {op: (calls, payload, wire)}. batch: of a micro-batch. e: bytes
    of a number; sums: of a gradient that is summed, if wider. inner: ranks that exchange heads."""
    inner = n if variant == "ulysses" else inner
    parts, layers, share = n // inner, micro_batches * cfg.layers, lambda ranks: (ranks - 1) / ranks
    forwards, gradients = 1 if recompute == "none" else 2, cfg.parameters() * (sums or e)
    calls = cfg.layers + 2 if cfg.parameters() > common.ONE_BUCKET else 1
    sent = {"all_reduce": (calls, gradients, 2 * share(n) * gradients)}
    queries = layers * batch * cfg.seq // n * cfg.dim               # of this rank; or out
    keys = 2 * queries // cfg.heads * max(cfg.kv_heads, inner)      # and values, a head for each
    if inner > 1:
        outs = 2 if recompute == "selective" else 1 + forwards      # of out, and of its gradient
        payload = e * ((1 + forwards) * (queries + keys) + outs * queries)
        sent["all_to_all"] = (3 * (1 + forwards) + outs) * layers, payload, share(inner) * payload
    if variant == "gather":
        whole = parts * keys * e
        sent["reduce_scatter"] = layers, whole, share(parts) * whole
        sent["all_gather"] = forwards * layers, forwards * whole, share(parts) * forwards * whole
    hops = parts - 1 if hops is None else hops
    if hops and variant in ("zigzag", "ring"):          # k and v once more, and their gradients
        payload = hops * keys * ((1 + forwards) * e + max(e, 4))
        sent["send"] = (2 + forwards) * hops * layers, payload, payload
    return sent


def kept(variant, cfg, n, inner=1, room=1):
    """The share of each class of activations that a rank keeps for backward: 1/N, but for keys and
    values that are gathered, or repeated until each rank has a head. room: padding's factor."""
    classes = "outside", "inputs", "inside", "core", "logits", "ids", "positions", "own keys"
    keys = room / (inner if variant == "gather" else n) * max(cfg.kv_heads, inner) / cfg.kv_heads
    how = "blocks" if inner == 1 else "apart"
    return dict.fromkeys(classes, room / n) | {"keys and values": keys, "how": how}


def pairs(variant, part, parts, seq, diagonal=1, documents=1):
    """How many pairs of a query and a key a part of the sequence computes, of equal documents.
    Ulysses has one part. diagonal: the share that a core computes of a run and itself: all, or one
    half where it skips what is masked."""
    chunks = 2 if variant in ("zigzag", "gather") else 1        # of a part
    span = chunks * parts / documents                           # so many of them a document has
    met = part % span + diagonal if chunks == 1 else span - 1 + 2 * diagonal
    return (met if span >= 1 else chunks * diagonal * span) * (seq / (chunks * parts)) ** 2


def formulas(args, rank, ranks, model):
    cfg, variant, inner = args.model, args.variant, args.inner
    if variant == "torch":
        return {"parameters": cfg.parameters()}
    layout, parts, weight = model.layout, ranks // inner, model.embedding.weight
    padded = replace(cfg, seq=len(layout.starts))
    hops = len(layout.blocks) - 1 if args.documents else hops_needed(   # they have any lengths
        variant, parts, cfg.seq, args.window)
    return {"parameters": cfg.parameters(),
            "kept": kept(variant, cfg, ranks, inner, padded.seq / cfg.seq),
            "sent": traffic(padded, variant, args.batch // args.micro_batch, args.micro_batch,
                            ranks, weight.itemsize, args.recompute,
                            common.DTYPES[args.dtype].itemsize, inner, hops),
            "contexts": {"layout": layout, "parts": parts, "inner": inner, "make": Layout,
                         "core": core_of(args, weight)}}


# ----------------------------------------------------------------------------------------- the run

def train(run):
    args, mine = run.args, None
    model = run.draw(gpt(args.model, seed=None))
    mesh = run.mesh(ring=run.world // args.inner, heads=args.inner)
    lay_out = context_parallel(model, args, mesh)
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    for batch in run.batches():                         # every rank gets all of it
        if args.documents or mine is None:
            mine = lay_out(batch.starts)
        with run.measure():
            loss, norm = train_step(
                model, optimizer, batch.micro_batches, mine, batch.valid, args.clip)
        dist.all_reduce(loss)                           # for the report, which shows the whole loss
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
            all_here = torch.arange(cfg.seq // run.world, device=run.device)
            loss, norm = train_step(model, optimizer, mine, all_here, batch.valid, args.clip)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)


def requires(args, ranks):
    common.split_batch(args, 1)
    cfg, variant, on_cuda = args.model, args.variant, common.on_cuda(args)
    head_dim = cfg.dim // cfg.heads
    inner = args.inner = ranks if variant == "ulysses" else args.inner      # a level alone

    if variant == "torch" and (args.attention == "plain" or not on_cuda):
        raise Refused("--variant torch needs --attention sdpa and a GPU for each rank",
                      "--variant zigzag")
    fits = rounded(args) == torch.bfloat16 and head_dim % 8 == 0 and not args.window
    if on_cuda and args.attention == "sdpa" and not args.kernels and not fits:
        raise Refused("--attention sdpa is flash attention here, which on a GPU takes 16 bits in "
                      "heads of 8, 16, 24, ... and no --window", "--attention plain")
    if args.kernels and (args.dtype == "float64" or not 16 <= head_dim <= 256):
        raise Refused(f"--kernels take float32 or bfloat16 in heads of 16 to 256, not {args.dtype}"
                      f" in heads of {head_dim}", f"--dtype float32 --dim {64 * cfg.heads}")

    if args.cut == "document" and not args.documents:
        raise Refused("--cut document means nothing without --documents", f"--documents {cfg.seq}")
    if args.documents and args.documents > cfg.seq:
        raise Refused(f"--documents {args.documents} are longer than --seq = {cfg.seq}",
                      f"--documents {cfg.seq}")
    common.divides("--seq", cfg.seq, "two chunks for each rank", 2 * ranks)
    if ranks % inner:
        raise Refused(f"--inner {inner} does not divide {ranks} ranks",
                      f"--inner {math.gcd(inner, ranks)}")
    if cfg.heads % inner or (cfg.kv_heads % inner and inner % cfg.kv_heads):
        raise Refused(f"--heads {cfg.heads} and --kv-heads {cfg.kv_heads} cannot be shared by "
                      f"{inner} ranks", "--variant zigzag --inner 1")


def flags(parser):
    add = parser.add_argument
    add("--documents", type=int, metavar="MEAN", help="tokens of a packed document, in the mean")
    add("--cut", choices=("sequence", "document"), default="sequence", help="by a zig-zag")
    add("--window", type=int, help="tokens that a token sees, itself among them; default: all")
    add("--inner", type=int, default=1, help="neighbours that exchange heads")
    add("--kernels", action="store_true", help="our own flash attention, on a GPU")


OWN = "--documents", "--window", "--kernels"
ZIGZAG = train, "--cut", "--inner", *OWN
VARIANTS = {"zigzag": ZIGZAG, "ring": (train, "--inner", *OWN), "gather": ZIGZAG,
            "ulysses": (train, *OWN), "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
