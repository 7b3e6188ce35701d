"""Checks of chapter 11: Newton-Schulz, Muon's step, matrices that are cut, and owners."""

import math
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common import Cut, part
from lab.chapters.checking import alone, random

MUON = "--optimizer=muon --batch=12 --micro-batch=1 --ignore=0.3"
FEW = "--optimizer=muon --batch=7 --layers=1 --steps=1"     # six matrices
SHAPES = (4, 4), (2, 9), (8, 2), (4, 4), (3, 3)         # of matrices
MATRICES = {"block1.a": (6, 4), "block1.b": (3, 4), "block1.experts": (2, 4, 6)}


def cut_by(group, dim, parts=None):
    """As common.keep_shard cuts."""
    parts = parts or group.size()
    return Cut(dim, group.rank() * parts // group.size(), parts, group)


class Apart:
    """In place of the group that experts are cut by."""

    def size(self):
        raise RuntimeError("an expert's matrix is whole on its rank, so nothing is to be sent")

    rank = size


def orthogonalized(chapter, shape, scale=1, *steps):
    """In float32, since what keeps a norm from zero may be added to it."""
    return chapter.orthogonalize(scale * random(*shape).float(), *steps)


def flops(chapter, *shapes):
    facts = {}
    for shape in shapes:
        with FlopCounterMode(display=False) as counter:
            chapter.orthogonalize(random(*shape))
        facts[f"of a {shape}"] = counter.get_total_flops()
    return facts


def normalized(x, steps=5):
    """In place of orthogonalize, which is another exercise: it, too, reads all of a matrix."""
    return x / x.norm()


def after_steps(chapter, scale, decay, steps):
    """What a step changes in parameters that begin as random numbers times scale, and momentum."""
    shapes = MATRICES | {"block1.norm1.weight": (5,), "embedding.weight": (4, 3)}
    parameters = {name: nn.Parameter(scale * random(*shape)) for name, shape in shapes.items()}
    for name, p in parameters.items():
        p.global_name = name
    parameters["block1.b"].full_shape = torch.Size((12, 4))     # of which it is a part
    optimizer = chapter.Muon(parameters.values(), 0.1, weight_decay=decay)
    for _ in range(steps):
        before = {name: p.detach().clone() for name, p in parameters.items()}
        for p in parameters.values():
            p.grad = random(*p.shape)
        with mock.patch.object(chapter, "orthogonalize", normalized):
            optimizer.step()
    changes = {f"what is added to {name}": p.detach() - before[name]
               for name, p in parameters.items()}
    return changes | {f"the momentum of {name}": optimizer.state[p].get("momentum_buffer")
                      for name, p in parameters.items() if name in MATRICES}


def given_of_a_master(chapter):
    """What a step hands to `orthogonal`, for the master of bf16 weights."""
    given = []

    class Noting(chapter.Muon):
        def orthogonal(self, matrices, updates):
            updates = list(updates)
            given.extend(str(update.dtype) for update in updates)
            return updates

    p = nn.Parameter(torch.ones(2, 3))
    p.global_name, p.rounded, p.grad = "block1.a", torch.bfloat16, torch.ones(2, 3)
    Noting([p]).step()
    return given


def whole(chapter, shape, dim, parts=None):
    cuts = [cut_by(dist.group.WORLD, dim, parts)]
    return chapter.whole(part(random(*shape), cuts), cuts)


def cut_twice(chapter):
    """By ranks 0 and 2, or 1 and 3; and what these have by ranks 0 and 1, or 2 and 3."""
    cuts = [cut_by(dist.new_subgroups_by_enumeration(ranks)[0], 0)
            for ranks in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])]
    return chapter.whole(part(random(8, 3), cuts), cuts)


def orthogonal_parts(chapter, dim):
    p, cuts = nn.Parameter(torch.zeros(4, 6)), [cut_by(dist.group.WORLD, dim)]
    p.data, p.cuts = part(p.data, cuts), cuts
    with mock.patch.object(chapter, "orthogonalize", normalized):
        return chapter.orthogonal_part(p, part(random(4, 6), cuts))


def orthogonal_experts(chapter):
    p = nn.Parameter(torch.zeros(2, 4, 6))
    p.cuts = [Cut(0, 1, 4, Apart())]
    with mock.patch.object(chapter, "orthogonalize", normalized):
        return chapter.orthogonal_part(p, random(2, 4, 6))


def works(chapter, *shapes):
    return [chapter.work(shape) for shape in shapes]


def owners(chapter, work, n):
    return chapter.share_out([*work], n)


UNITS = ({"block1.norm1.weight": (5,), "block1.a": (4, 4), "block1.b": (2, 9)},
         {"block2.experts": (2, 3, 3), "block2.c": (8, 2), "block2.norm2.weight": (4,)})


def dealt(chapter):
    """The updates of two units' shards, after they were dealt, and what was computed here. Who owns
    a matrix and what becomes of it there is the check's own, since these are other exercises."""
    group, shards, updates, here = dist.group.WORLD, [], [], []
    for shapes in UNITS:
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes.values()]
        for p, name in zip(parameters, shapes):
            p.global_name = name
        size = math.ceil(sum(p.numel() for p in parameters) / group.size())
        updates.append(random(group.size(), size)[group.rank()])
        shards.append(nn.Parameter(torch.zeros_like(updates[-1])))
        shards[-1].flat = parameters, group.rank() * size, group

    def orthogonal_part(p, x):
        here.append(f"{p.global_name}, {tuple(x.shape)}")
        return x / x.norm()

    others = {"work": math.prod, "share_out": lambda work, n: [each % n for each in work],
              "orthogonal_part": orthogonal_part}
    with mock.patch.multiple(chapter, **others):
        chapter.deal(shards, updates)
    return dict(zip(("unit 0", "unit 1"), updates)) | {"orthogonalized here": here}


def unit_of_shards(chapter, sizes, stage):
    """As after an update: each rank's shard has numbers of its own, and `full` not yet."""
    group = dist.group.WORLD
    unit = chapter.Unit([nn.Parameter(random(2, 3)), nn.Parameter(random(4))], sizes, group, stage)
    full = unit.full.clone() if stage == 3 else unit.full
    unit.hold(full)
    unit.shard.data.copy_(random(group.size(), len(unit.shard))[group.rank()])
    return unit


def gathered(chapter, sizes, stage):
    unit = unit_of_shards(chapter, sizes, stage)
    unit.gather()
    return unit.full[:10]                               # what is behind them fills up


def reduced(chapter, sizes, stage):
    """Of two micro-batches; in the second, the second parameter has no gradient."""
    unit, rank, facts = unit_of_shards(chapter, sizes, stage), dist.get_rank(), {}
    for i in range(2):
        for p in unit.parameters:
            p.grad = random(3, *p.shape)[rank]
        unit.parameters[1].grad = None if i else unit.parameters[1].grad
        unit.reduce()
        facts[f"shard.grad after {i}"] = unit.shard.grad.clone()
        facts[f"gradients of its own after {i}"] = sum(p.grad is not None for p in unit.parameters)
    return facts


def dtype_of_no_gradient(chapter):
    """Of bf16 weights with a master, none of which has a gradient."""
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    unit = chapter.Unit([p], [6], alone(), 2)
    unit.shard.grad_dtype = torch.float32
    unit.hold(unit.full)
    unit.reduce()
    return f"{unit.shard.grad.dtype}"


def step_costs(chapter, *sizes):
    """By owners of the check's own: work and share_out are another exercise."""
    others = {"work": lambda shape: 3 * shape[0] + 7 * shape[1],
              "share_out": lambda work, n: [int(each) % n for each in work]}
    with mock.patch.multiple(chapter, **others):
        return chapter.step_costs(*sizes)
