"""Checks of chapter 05: what is gathered along the sequence, and what is kept."""

from unittest import mock

import torch
import torch.distributed as dist

from common import Config, draw_weights
from lab.chapters.checking import TINY, how_it_is_cut, random_of_rank
from lab.run.meters import ActivationMeter, CommMeter


def gradients_of(chapter, name, length, *widths):
    """Of x, and of weights of these widths; and what backward sends."""
    x = random_of_rank(2, length, 4).requires_grad_()
    weights = [random_of_rank(width, 4).requires_grad_() for width in widths]
    outs = getattr(chapter, name).apply(x, dist.group.WORLD, *weights)
    outs = outs if widths else (outs,)
    meter = CommMeter()
    with meter:
        torch.autograd.backward(outs, [random_of_rank(*out.shape) for out in outs])
    return {"the gradient of x": x.grad, "those of the weights": [w.grad for w in weights],
            "what backward sends": {op: counts["calls"] for op, counts in meter.total.items()}}


def around(chapter):
    """Whose chunk comes, and how many sends have begun by then."""
    meter, facts = CommMeter(), []
    with meter:
        for owner, chunk in chapter.ring_gather(random_of_rank(2, 3), dist.group.WORLD):
            begun = meter.total.get("send", {"calls": 0})["calls"]
            facts.append((owner, chunk.clone(), begun))
    return facts


def sum_around(chapter):
    """Of parts that come from a table, which stays as it is; and which are asked for, when."""
    ranks, asked, meter = dist.get_world_size(), [], CommMeter()
    table = random_of_rank(ranks, 2, 3)
    before = table.clone()

    def part_of(owner):
        asked.append((owner, meter.total.get("send", {"calls": 0})["calls"]))
        return table[owner].clone()

    with meter:
        total = chapter.ring_sum(part_of, dist.group.WORLD)
    return {"the sum": total, "parts, and how many sends had begun": asked,
            "whether the parts stay": torch.equal(table, before)}


def everyones(x, group):
    """In place of a ring: the chunk of each rank, this rank's first, then those before it."""
    every = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(every, x.contiguous(), group=group)
    for back in range(group.size()):
        yield (group.rank() - back) % group.size(), every[group.rank() - back]


def sum_of_all(part_of, group):
    """In place of a ring: every rank's parts are summed on all of them."""
    parts = torch.stack([part_of(owner) for owner in range(group.size())])
    dist.all_reduce(parts, group=group)
    return parts[group.rank()]


def columns_of_a_ring(chapter):
    """Outputs, gradients, and the bytes that are kept."""
    x = random_of_rank(2, 2, 4).requires_grad_()
    weights = [random_of_rank(5, 4).requires_grad_() for _ in "ab"]
    meter = ActivationMeter([x, *weights])
    with mock.patch.multiple(chapter, ring_gather=everyones, ring_sum=sum_of_all):
        with meter:
            outs = chapter.RingColumns.apply(x, dist.group.WORLD, *weights)
        kept = meter.bytes
        torch.autograd.backward(outs, [random_of_rank(*out.shape) for out in outs])
    return {"outputs": list(outs), "bytes kept beside x and the weights": kept,
            "the gradient of x": x.grad, "those of the weights": [w.grad for w in weights]}


def how_a_model_is_cut(chapter, variant, kv_heads):
    """Each parameter's shape, cuts, and the ranks that sum its gradient; and what it computes."""
    cfg = Config(1, 16, 4, kv_heads, 4, 10)
    model = chapter.parallelize(chapter.gpt(cfg, seed=None), cfg, dist.group.WORLD, variant)
    draw_weights(model, 0, dtype=torch.float64)
    tokens = chapter.my_tokens(torch.tensor([[9, 1, 5, 0]]), dist.group.WORLD)
    meter, facts = ActivationMeter([tokens]), {}
    with meter:
        facts["logits"] = model(tokens)
    facts["bytes kept for backward"] = meter.bytes
    return facts | {p.global_name: how_it_is_cut(p) for p in model.parameters()}


def kept(chapter, *how):
    return chapter.kept(TINY, *how)
