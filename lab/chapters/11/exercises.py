"""The exercises of chapter 11: Newton-Schulz, Muon's step, matrices that are cut, and owners."""

import math
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from common import Cut, part
from lab.classroom.exercise import Exercise, Run, Same, alone, random

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
    found = {}
    for shape in shapes:
        with FlopCounterMode(display=False) as counter:
            chapter.orthogonalize(random(*shape))
        found[f"of a {shape}"] = counter.get_total_flops()
    return found


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


def work_of_three_steps(chapter):
    return chapter.work((4, 6), steps=3)


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
    unit, rank, found = unit_of_shards(chapter, sizes, stage), dist.get_rank(), {}
    for i in range(2):
        for p in unit.parameters:
            p.grad = random(3, *p.shape)[rank]
        unit.parameters[1].grad = None if i else unit.parameters[1].grad
        unit.reduce()
        found[f"shard.grad after {i}"] = unit.shard.grad.clone()
        found[f"gradients of its own after {i}"] = sum(p.grad is not None for p in unit.parameters)
    return found


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


EXERCISES = [
    Exercise(
        "11.1", "orthogonalize", 1,
        "Give U V^T of a matrix, by so many steps of Newton-Schulz, and with as few FLOPs as the "
        "lesson counts. It may be wide or tall, large or zero.",
        ("Which of X·X^T and X^T·X is the smaller one? What does a transposed X become, and how "
         "do you get U V^T from that? And what is 0 / 0?",
         "Transpose what is tall, and the result again. Divide by the norm of all numbers, "
         "x.norm(), but by something tiny at least. A step is gram = X·X^T, P = b·gram + "
         "c·gram·gram, X = a·X + P·X: three matmuls, of which torch.addmm adds two to something."),
        (Same(orthogonalized, "a (3, 5), steps=1", ((3, 5), 1, 1)),
         Same(orthogonalized, "a (3, 5)", ((3, 5),)),
         Same(orthogonalized, "a (6, 4) of numbers about 1,000", ((6, 4), 1000)),
         Same(orthogonalized, "a (3, 5) of zeros", ((3, 5), 0)),
         Same(flops, "FLOPs", ((3, 5), (5, 3), (4, 4)))),
    ),
    Exercise(
        "11.2", "Muon.step", 2,
        "Take a step. A momentum, self.state[p][\"momentum_buffer\"], begins as zeros and goes 1 - "
        "mu of the way to the gradient; Nesterov's update goes mu of the way from the gradient to "
        "that, and `narrow` rounds it. self.orthogonal(matrices, updates) gives U V^T of all, "
        "which change W as the lesson says.",
        ("self.param_groups has the matrices first, and then all else. Who updates that? And of "
         "which shape are m and n, if a rank has a part of a matrix?",
         "self.adamw.step() updates all else. torch.lerp_(end, weight) goes so much of the way. "
         "Decay comes before the update, so it is not of that; whole_shape(p) gives m and n. Call "
         "self.orthogonal once, for all matrices: under ZeRO that sends."),
        (Same(after_steps, "a step from parameters of zeros, without decay", (0, 0, 1)),
         Same(after_steps, "the second step, with a decay of 0.5", (1, 0.5, 2)),
         Same(given_of_a_master, "what self.orthogonal is given, of a master of bf16 weights"),
         Run(2, MUON)),
    ),
    Exercise(
        "11.3", "whole orthogonal_part", 2,
        "`whole` gives all of a tensor of which this rank has part(x, cuts). `orthogonal_part` "
        "gives this rank's part of U V^T, from its part of an update. Experts are cut as well, but "
        "each of their matrices is whole: for them nothing is sent.",
        ("part() has made the cuts in their order. In which order must they be undone? And which "
         "ranks of a group have the same part, if there are fewer parts than ranks?",
         "For each cut, from the last to the first: common.all_gather(out, x, group=group) wants x "
         "contiguous, and out with that of all ranks below each other. Of group.size() / parts "
         "neighbours that hold the same, take one, and concatenate along the cut's dim. Of a p "
         "with p.ndim dimensions, the matrix is the last two: whole, orthogonal, and part by those "
         "cuts alone."),
        (Same(whole, "whole, of rows over 3 ranks", ((6, 2), 0), 3),
         Same(whole, "whole, of columns over 2 ranks", ((3, 8), 1), 2),
         Same(whole, "whole, of rows in 2 parts over 4 ranks", ((6, 2), 0, 2), 4),
         Same(cut_twice, "whole, of rows that are cut twice, over 2 · 2 ranks", (), 4),
         Same(orthogonal_parts, "orthogonal_part, of rows over 2 ranks", (0,), 2),
         Same(orthogonal_parts, "orthogonal_part, of columns over 2 ranks", (1,), 2),
         Same(orthogonal_experts, "orthogonal_part, of 2 of 8 experts")),
    ),
    Exercise(
        "11.4", "work share_out", 1,
        "`work` counts the FLOPs of Newton-Schulz on an (m, n), or on one expert's. `share_out` "
        "gives the owner of each matrix, by their FLOPs: the one with the most comes first, and "
        "each goes to the rank that has least so far, of equals to the first.",
        ("Which of m and n does the lesson's formula want as the smaller one? In which order do "
         "matrices find their owners, and in which order are owners returned?",
         "5 · (4·m²·n + 2·m³) with m <= n, of the last two dimensions, and of `steps` in place of "
         "5. Sort the numbers of the matrices by their work, with reverse=True, which leaves "
         "equals in their order; keep what each rank has so far, and index(min(...)) finds whom."),
        (Same(works, "[work(shape) for shape in ((4, 6), (6, 4), (5, 5), (8, 2, 3))]",
              ((4, 6), (6, 4), (5, 5), (8, 2, 3))),
         Same(work_of_three_steps, "work((4, 6), steps=3)"),
         Same(owners, "share_out([2, 3, 7, 5, 4, 4], 3)", ((2, 3, 7, 5, 4, 4), 3)),
         Same(owners, "share_out([1, 1, 1, 1, 1], 2)", ((1, 1, 1, 1, 1), 2)),
         Same(owners, "share_out([1, 9], 4)", ((1, 9), 4)),
         Same(owners, "share_out([], 2)", ((), 2))),
        "FLOPs, and owners",
    ),
    Exercise(
        "11.5", "deal", 3,
        "Bring each matrix of these shards to its owner, orthogonalize it there, and bring its "
        "parts back into the updates, in place. Owners are share_out's, by the work of whole "
        "shapes. One all_to_all there and one back carry all matrices together, and nothing else.",
        ("matrices_of lists the matrices, in the same order on every rank. Which runs of numbers "
         "do you send to each rank, and how many numbers will come from each? What differs on the "
         "way back?",
         "x.run_on(rank) is where x lies in a rank's part of its unit, x.length(rank) how long "
         "that is, whole_shape(x.p) what share_out is told the work of. Sort your runs by owner, "
         "then by matrix. dist.all_to_all_single(output, input, "
         "output_split_sizes, input_split_sizes, group=group) wants what comes from and goes to "
         "each rank, in numbers. A matrix of yours is its runs from rank 0, 1, ..., concatenated, "
         "and orthogonal_part takes it in its shape. On the way back the two splits change places; "
         "then copy each run into its place. Who owns nothing sends a tensor of no numbers."),
        (Same(dealt, "updates of two units on 2 ranks", (), 2),
         Same(dealt, "updates of two units on 3 ranks", (), 3),
         Run(4, f"{MUON} --zero=3"),
         Run(3, f"{MUON} --layers=1 --dtype=float32 --precision=bf16"),
         Run(7, f"{FEW} --variant=deal")),
    ),
    Exercise(
        "11.6", "Unit.gather Unit.reduce", 2,
        "`gather` fills self.full with what all ranks have updated, each its shard; stage 3 has "
        "freed its memory. `reduce` sums the ranks' gradients, lets go of the parameters' own, and "
        "adds this rank's numbers of the sum to shard.grad. Shards are equal, or by owner: as many "
        "numbers as sizes says, which may be none.",
        ("Which two collectives need equal parts, and which two have one rank at an end? Where in "
         "self.full do another rank's numbers lie?",
         "In stage 3, full.untyped_storage() is resized to full.nbytes. Equal sizes: "
         "common.all_gather and common.reduce_scatter. Else one dist.broadcast(..., "
         "group_src=rank) or dist.reduce(..., group_dst=rank) for each rank that owns something, "
         "of full.split(sizes): a view, in which the shard must stand before. self.flatten makes "
         "one tensor of gradients, zeros in p.grad_dtype for those that are None. shard.grad is "
         "None, or of earlier micro-batches."),
        (Same(gathered, "gather, of equal shards on 3 ranks, stage 2", ([4, 4, 4], 2), 3),
         Same(gathered, "gather, by owner on 3 ranks, of which one has none, stage 3",
              ([6, 0, 4], 3), 3),
         Same(reduced, "reduce, of equal shards on 3 ranks, stage 3", ([4, 4, 4], 3), 3),
         Same(reduced, "reduce, by owner on 3 ranks, of which one has none", ([6, 0, 4], 2), 3),
         Same(dtype_of_no_gradient, "shard.grad of bf16 weights without a gradient"),
         Run(4, f"{MUON} --variant=owner --zero=2"),
         Run(3, f"{MUON} --variant=owner --zero=3 --layers=1 --dtype=float32 --precision=bf16"),
         Run(3, f"{MUON} --zero=3"),
         Run(7, f"{FEW} --variant=owner")),
        "Unit: to owners, and from them",
    ),
    Exercise(
        "11.7", "step_costs", 1,
        "For each way, how many numbers does a rank send more than under AdamW, and how many FLOPs "
        "has the busiest rank? For matrices of these shapes, on n ranks of ZeRO; what is dealt is "
        "the mean over the ranks.",
        ("The lesson has a table. Where it says \"F/N or more\", who says how much more?",
         "share_out gives the owners, by the work of each. The busiest rank has the largest sum of "
         "work; who gathers has all of it. Numbers are products of the two sizes."),
        (Same(step_costs, f"step_costs({SHAPES}, 2)", (SHAPES, 2)),
         Same(step_costs, f"step_costs({SHAPES}, 8)", (SHAPES, 8)),
         Same(step_costs, f"step_costs({SHAPES}, 1)", (SHAPES, 1))),
    ),
]
