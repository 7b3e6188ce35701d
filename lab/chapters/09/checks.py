"""Checks of chapter 09: places in the mesh, groups, who holds what, and whole steps."""

import itertools
from argparse import Namespace
from collections import OrderedDict
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.chapters.checking import TINY, alone, random


def places(chapter, pp, dp, cp, tp, order):
    args = Namespace(pp=pp, dp=dp, cp=cp, tp=tp, order=order)
    return [str(place) for place in chapter.places_of_ranks(args)]


def ranks_by_pp_and_tp(chapter):
    every = [chapter.Place(pp, dp, 0, tp)
             for pp, dp, tp in itertools.product(range(2), repeat=3)]
    return sorted(map(sorted, chapter.sort_ranks(every, lambda at: (at.pp, at.tp))))


def groups_of_rank_5(chapter, pp, dp, cp, tp, ep, order):
    as_rank_5()
    args = Namespace(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order=order, model=TINY,
                     experts=8 if ep > 1 else 0)
    axes, holders = chapter.make_groups(args, True)
    ranks = dist.get_process_group_ranks
    return {"axes": {axis: ranks(group) for axis, group in axes.items()},
            "holders": {kind: ranks(group) for kind, group in holders.items()},
            "groups_of_holders": len(set(holders.values()))}


def as_rank_5():
    """Of 16, of which the others are not there."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=16)


def stage_of_rank_5(chapter, experts, gated, documents=None, **ranks):
    """How two blocks and a head are cut. ranks: of this rank's group along each axis."""
    as_rank_5()
    axes = {axis: dist.new_group(members) for axis, members in ranks.items()}
    sizes = vars(TINY) | {"layers": 2, "dim": 16, "heads": 4, "kv_heads": 2, "gated": gated}
    cfg = chapter.Mixture(**sizes, experts=experts, shared_expert=bool(experts))
    args = Namespace(model=cfg, documents=documents, micro_batches=3)
    stage, core = chapter.build(cfg)[1:], lambda q, k, v: v
    chapter.cut_stage(stage, args, axes, core)
    facts = {p.global_name: {"shape": tuple(p.shape), "cuts": [
        [cut.dim, cut.index, cut.parts, dist.get_process_group_ranks(cut.group)]
        for cut in getattr(p, "cuts", ())]} for p in stage.parameters()}
    for name, block in (("block1", stage[0]), ("block2", stage[1])):
        for part in ("attn", "mlp"):
            inner, around = getattr(block, part), "nothing"
            if isinstance(inner, chapter.SequenceParallel):
                around = f"SequenceParallel over {dist.get_process_group_ranks(inner.group)}"
                inner = inner.inner
            facts[f"around {name}.{part}"] = around
            if part == "attn":
                facts[f"the core of {name}"] = "given" if inner.core is core else "its own"
            elif experts:
                for axis in ("ep", "sequence"):
                    group = getattr(inner, axis)
                    facts[f"{name}.mlp.{axis}"] = group and dist.get_process_group_ranks(group)
                inner.seen.extend(range(5))             # of exchanges
                facts[f"what {name}.mlp.seen keeps of five"] = [*inner.seen]
    return facts


def mixtures_of_rank_5(chapter):
    axes = {"tp": [4, 5], "ep": [4, 5, 6, 7], "cp and tp": [4, 5]}
    return stage_of_rank_5(chapter, 8, False, **axes)


class Group:
    """Of so many ranks, which are not there."""

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


def notes_of_holders(chapter):
    sizes = {"tables": 8, "norms": 8, "queries": 4, "keys": 6, "mlp": 1, "tied": 16}
    holders = {kind: Group(ranks) for kind, ranks in sizes.items()}
    mixture = chapter.Mixture(**vars(TINY) | {"layers": 1, "tie": True}, experts=4)
    parameters = list(chapter.build(mixture).parameters())
    chapter.note_holders(parameters, holders)
    return {p.global_name: {"kind": p.kind, "copies": p.copies,
                            "holders": p.holders is holders[p.kind]}
            for p in parameters}


def units(chapter, stage, tie=False, bucket=2**22):
    """Of two blocks, by their parameters. Who holds the same is told by the check: vectors are held
    by eight ranks, keys and values by four, and all else by one."""
    sizes = vars(TINY) | {"layers": 2, "dim": 16, "tie": tie}
    model = chapter.build(chapter.Mixture(**sizes))
    groups = {ranks: Group(ranks) for ranks in (8, 4, 1)}
    for p in model.parameters():
        is_key = ".k." in p.global_name or ".v." in p.global_name
        ranks = 4 if is_key else 1
        if p.ndim == 1:
            ranks = 8
        p.holders, p.copies = groups[ranks], ranks

    def unit(parameters, stage, keep_gathered=False):
        """In place of Unit."""
        return Namespace(log=[f"{p.global_name}, on {p.holders.size()}" for p in parameters]
                         + [f"stage {stage}, kept {keep_gathered}"])

    with (mock.patch.object(chapter, "Unit", unit),
          mock.patch.object(chapter.common, "ONE_BUCKET", bucket)):
        facts = chapter.make_units(nn.ModuleList([model[:2], model[2:]]), stage, stage == 3)
    of_modules = {f"module {i}": sorted(unit.log for unit in module.units)
                  for i, module in enumerate(model)}
    return of_modules | {"in all": sorted(unit.log for unit in facts)}


class NotedUnit:
    """In place of Unit: it notes when it is freed."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def free(self, last=False):
        self.log.append(f"free {self.name}" + ", last" * last)


def through_a_stage(chapter, first, last):
    """Two micro-batches forward, and back. What is called when, and what comes out of it."""
    log, names = [], [*first, "middle", *last]
    layers = {"embedding": nn.Embedding(6, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 6)}
    slice_of_model = nn.Sequential(OrderedDict((name, layers[name]) for name in names)).double()
    for p in slice_of_model.parameters():
        p.data.copy_(random(*p.shape))
    for name, module in slice_of_model.named_children():
        module.units = [NotedUnit(name, log)]
    positions = torch.tensor([0, 3, 4])
    stage = chapter.Stage(slice_of_model, positions)

    def reduce(units, last):
        log.append(f"reduce {units[0].name}" + ", last" * last)

    def gather(modules):
        """It looks at two modules, the first and the next."""
        log.append("gather " + ", ".join(module.units[0].name for module in [*modules][:2]))

    stage.reduce, facts = reduce, {"calls": log}
    with mock.patch.object(chapter, "gather", gather):
        targets = torch.tensor([[1, 0, 0, 5, -100, 2]] * 2)
        for i in (0, 1):
            x = torch.randint(6, (2, 6)) if first else random(2, 3, 4)
            out = facts[f"output {i}"] = stage.forward(i, x, targets, 7)
        facts["output has a graph"] = out.requires_grad
        for i in (0, 1):
            gradient = None if last else random(*out.shape)
            facts[f"gradient {i}"] = stage.backward(i, gradient, i == 1)
    return facts | {name: p.grad for name, p in slice_of_model.named_parameters()} \
        | {"micro-batches still kept": [*stage.kept_for_backward]}


def summed(chapter, stage):
    """Of two micro-batches on two ranks; of the second, one parameter has no gradient."""
    rank, parameters = dist.get_rank(), [nn.Parameter(random(*shape)) for shape in ((2, 3), (3,))]
    for p in parameters:
        p.holders = dist.group.WORLD
    unit, facts = chapter.Unit(parameters, stage, False), {}
    for i, gradients in enumerate(zip(random(2, 2, 2, 3)[rank], random(2, 2, 3)[rank])):
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient.clone()
        if i:
            parameters[1].grad = None
        unit.start_reduce()
        unit.finish_reduce()
        unit.finish_reduce()                            # nothing is under way any more
        facts |= {f"p{k}.grad after {i}": None if p.grad is None else p.grad.clone()
                  for k, p in enumerate(parameters)}
        if stage:
            facts[f"shard.grad after {i}"] = unit.shard.grad.clone()
    return facts


def dtype_of_no_gradient(chapter):
    """Of bf16 weights with a master, none of which has a gradient."""
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    p.holders = alone()
    unit = chapter.Unit([p], 1, False)
    unit.shard.grad_dtype = torch.float32
    unit.hold(unit.full)
    unit.start_reduce()
    unit.finish_reduce()
    return f"{unit.shard.grad.dtype}"


class Unit:
    """In place of chapter 09's: it notes what is called. freed: it has no memory for numbers."""

    def __init__(self, number, stage, freed, log):
        self.number, self.stage, self.log, self.gathering = number, stage, log, None
        self.full = torch.zeros(0 if freed else 1)

    def start_gather(self):
        self.log.append(f"start {self.number}")
        self.gathering = self

    def wait(self):
        self.log.append(f"wait {self.number}")


def gathers_of_three_modules(chapter, stage, freed):
    """The second module has two units; of what is there already, the first is under way."""
    log = []
    units = [Unit(number, stage, number in freed, log) for number in range(4)]
    if 0 not in freed:
        units[0].gathering = units[0]
    modules = [Namespace(units=part) for part in (units[:1], units[1:3], units[3:])]
    chapter.gather(modules)
    return ", ".join(log)


def traffic(chapter, experts, recompute, cp, tp, ep, pp):
    """Of a rank of 8, two blocks and three micro-batches, whose rows come from all alike."""
    args = Namespace(cp=cp, tp=tp, ep=ep, pp=pp, micro_batch=2, top_k=2, recompute=recompute,
                     model=chapter.Mixture(**vars(TINY) | {"experts": experts}))
    rows = 6 * 2 * TINY.seq * 2 * 2 // (args.cp * args.tp) if experts else 0
    return chapter.traffic(args, 8, 6, rows, 3, 4)
