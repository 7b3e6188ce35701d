"""Checks of chapter 06: who has which tokens, who meets whom, and sums that are merged."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lab.chapters.checking import random

LENGTHS = 5, 1, 10                                      # of three documents in a sequence of 16


def starts_of(lengths):
    """Where the document of each token begins."""
    lengths = torch.tensor(lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def runs(chapter, part, parts, lengths, *how):
    return [run.tolist() for run in chapter.runs_of(part, parts, starts_of(lengths), *how)]


def meeting(chapter, runs, keys, lengths, window=None):
    """Each block, by its rows and keys. runs and keys: pairs of a first place and an end."""
    starts = starts_of(lengths)
    whole = torch.arange(len(starts))
    first = starts.maximum(whole - (window or len(starts)) + 1)
    facts = []
    for rows, columns, causal, low in chapter.meeting(
            [torch.arange(*run) for run in runs], torch.cat([torch.arange(*run) for run in keys]),
            first):
        rows = whole[rows].tolist()
        facts.append({"rows": rows, "keys": whole[columns].tolist(), "causal": bool(causal),
                      "low": [0] * len(rows) if low is None else low.tolist()})
    return facts


def gradients_of_block(chapter, heads, kv_heads, rows, keys, causal):
    """mask_of is another exercise: here it hides all keys to the right of the diagonal, or none."""
    dout, q, out = random(3, 2, heads, rows, 8)
    k, v = random(2, 2, kv_heads, keys, 8)
    hidden = torch.full((rows, keys), -torch.inf, dtype=q.dtype).triu(1) if causal else None
    with mock.patch.object(chapter, "mask_of", lambda *args: hidden):
        gradients = chapter.plain_backward(dout, q, k, v, out, random(2, heads, rows) + 2, causal,
                                           None)
    return dict(zip(("dq", "dk", "dv"), gradients))


def backward_of_a_block(dout, q, k, v, out, lse, causal, low):
    """No attention, but numbers that depend on all there is."""
    dout, q, k, v, out = (x.double() for x in (dout, q, k, v, out))
    scores = (q @ k.mT + lse[..., None]).sin() * (2 if causal else 1)
    return scores @ v + out, scores.mT @ dout, scores.mT @ q + v


def ring_gradients(chapter, *hops, dtype=torch.float64):
    """By blocks of the check's own. hops: of each, its blocks, as ends of their rows and keys."""
    group = dist.group.WORLD
    q, k, v, out, dout = random(group.size(), 5, 2, 2, 6, 4).to(dtype)[group.rank()]
    blocks = [[(slice(*rows), slice(*keys), not hop, None) for rows, keys in of_hop]
              for hop, of_hop in enumerate(hops)]
    ctx = SimpleNamespace(saved_tensors=(q, k, v, out, out.sum(-1)), group=group, blocks=blocks,
                          core=SimpleNamespace(backward=backward_of_a_block),
                          needs_input_grad=(True, True, True, False, False, False))
    return dict(zip(("dq", "dk", "dv"), chapter.RingAttention.backward(ctx, dout)))


def bytes_around(chapter, *hops):
    """That this rank sends in backward, of bfloat16."""
    sent, send = [], dist.batch_isend_irecv

    def noted(operations):
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", noted):
        ring_gradients(chapter, *hops, dtype=torch.bfloat16)
    return sum(sent)


def around(chapter, hops):
    """What is here at each hop, by whose it was."""
    rank, group = dist.get_rank(), dist.group.WORLD
    kv_of_rank = torch.full((2, 3), rank, dtype=torch.float64)
    return [(hop, kv.clone()) for hop, kv in chapter.around_the_ring(kv_of_rank, group, hops)]


def exchanged_gradient(chapter, *dims):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = random(ranks, 2, 4, 8, 3)[rank].requires_grad_()
    out = chapter.Exchange.apply(x, *dims, dist.group.WORLD)
    out.backward(random(ranks, *out.shape)[rank])
    return x.grad


def attention_of_heads(chapter, heads, kv_heads):
    """By PyTorch's attention, of tokens that see each other all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q = random(ranks, 2, heads, 3, 8)[rank]
    k, v = random(ranks, 2, 2, kv_heads, 3, 8)[rank]
    core = partial(F.scaled_dot_product_attention, enable_gqa=True)
    with torch.no_grad():
        return chapter.exchanged_attention(q, k, v, dist.group.WORLD, core)


def step_on_parts(chapter, clip):
    """Of a model that is an embedding and a linear layer, by two ranks; the second has padding."""
    rank, model = dist.get_rank(), nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    for p in model.double().parameters():
        p.data.copy_(random(*p.shape))
        p.partial = dist.group.WORLD
    tokens, targets = torch.randint(6, (2, 2, 3, 7)).unbind()   # of two micro-batches
    targets[0, :, 2:4] = -100
    positions = torch.tensor([[0, 1, 5, 6], [2, 3, 4, -1]][rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss, norm = chapter.train_step(model, optimizer, [*zip(tokens, targets)], positions,
                                    int((targets >= 0).sum()), clip)
    return {"loss": loss, "norm": norm, "embedding": model[0].weight, "linear": model[1].weight}


def merged(chapter, above=0, block_above=0):
    """Of two blocks, whose log-sum-exps are about as large as `above` and `block_above`."""
    out, lse = random(2, 3, 4), random(2, 3) + above
    chapter.merge(out, lse, random(2, 3, 4), random(2, 3) + block_above)
    return {"out": out, "lse": lse}


def merged_with_nothing(chapter):
    """One of the three rows has met keys, and the two others none so far."""
    lse = torch.tensor([[0.5, -torch.inf, -torch.inf]], dtype=torch.float64)
    out = random(1, 3, 4).where(lse.isfinite()[..., None], 0)
    chapter.merge(out, lse, random(1, 3, 4), random(1, 3))
    return {"out": out, "lse": lse}


def pairs_of_each_part(chapter, variant, parts=4, *more):
    return [chapter.pairs(variant, part, parts, 8 * parts, *more) for part in range(parts)]


def hops(chapter, variant, *windows):
    return [chapter.hops_needed(variant, 4, 32, window) for window in windows]


def with_room(chapter, lengths, multiple):
    source, starts = chapter.with_room(starts_of(lengths), multiple)
    return {"source": source.tolist(), "starts": starts.tolist()}


def weights(chapter, rows, keys, causal, low=None):
    """What a mask leaves of equal scores: 1 or 0."""
    low = None if low is None else torch.tensor(low)
    return chapter.mask_of(random(1, 2, rows, 4), random(1, 1, keys, 4), causal, low).exp().tolist()


def ordered(chapter, *of_parts):
    """Positions that were gathered, in order. of_parts: of each its runs, (first, end)."""
    of_parts = [[torch.arange(*run) for run in runs] for runs in of_parts]
    gathered = torch.cat([torch.cat(runs) for runs in of_parts])
    return chapter.in_order(gathered[None, :, None], of_parts, 1).flatten().tolist()
