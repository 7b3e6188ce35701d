"""Checks of chapter 03: units that are gathered and freed, int8 weights, and the traffic."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from common import Cut
from lab.chapters.checking import TINY, alone, random


def unit_of(chapter, group, *shapes, grad_dtype=torch.float64):
    """A Unit whose __init__ has not run, with parameters of these shapes, and no gradients."""
    unit = object.__new__(chapter.Unit)
    unit.parameters, unit.group = [nn.Parameter(random(*shape)) for shape in shapes], group
    count = sum(p.numel() for p in unit.parameters)
    unit.padding = -count % group.size()
    unit.full, k = random(count + unit.padding), (count + unit.padding) // group.size()
    unit.shard = nn.Parameter(unit.full[group.rank() * k:][:k])
    unit.shard.cuts = (Cut(0, group.rank(), group.size(), group),)
    for p in (unit.shard, *unit.parameters):
        p.grad_dtype = grad_dtype
    unit.gathering = unit.gradients = None
    return unit


FOUR = SimpleNamespace(size=lambda: 4, rank=lambda: 1)          # a group that sends nothing


def views_of_a_unit(chapter):
    """With one number of padding, and where it is written."""
    unit, flat = unit_of(chapter, FOUR, (2, 3), (5,)), random(12)
    facts = {"padding": unit.padding, "views": [x.clone() for x in unit.views(flat)]}
    unit.views(flat)[1][2] = 7
    return facts | {"the flat tensor, once 7 is in place 2 of the second view": flat}


def room_of_a_unit(chapter, grad_dtype):
    """The first parameter has a gradient already."""
    unit = unit_of(chapter, FOUR, (2, 3), (5,), grad_dtype=grad_dtype)
    unit.parameters[0].grad = random(2, 3).to(grad_dtype)
    facts = {}

    def views(self, flat):
        return [flat[:6].view(2, 3), flat[6:11]]

    with mock.patch.object(chapter.Unit, "views", views):
        for time in ("once", "twice"):
            unit.make_room_for_gradients()
            for p in unit.parameters:
                p.grad += 1
            facts |= {f"p.grad, {time}": [p.grad.clone() for p in unit.parameters],
                      f"gradients, {time}": unit.gradients.clone()}
    return facts


def reductions_of_a_unit(chapter, in_place):
    """Of two micro-batches, on two ranks, beside a third one."""
    rank, two, one = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([2])
    unit, facts = unit_of(chapter, two if rank < 2 else one, (2, 3), (3,)), {}
    for micro_batch in (1, 2):
        unit.gradients = (rank + 1) * random(len(unit.full))
        for p, start, stop in zip(unit.parameters, (0, 6), (6, 9)):
            p.grad = unit.gradients[start:stop].view(p.shape)
        lie_in = unit.gradients.untyped_storage().data_ptr()
        unit.start_reduce(*[True] * in_place)
        facts[f"p.grad once it has started, {micro_batch}"] = [p.grad is not None
                                                               for p in unit.parameters]
        unit.finish_reduce()
        facts |= {f"shard.grad, micro-batch {micro_batch}": unit.shard.grad.clone(),
                  f"gradients that are kept, {micro_batch}": unit.gradients}
        if micro_batch == 1:
            facts["whether the sum is among the gradients"] = (
                unit.shard.grad.untyped_storage().data_ptr() == lie_in)
    return facts


def optimizer_of_units(chapter, offload, precision):
    """What make_optimizer asks of a run, and what it tells its units."""
    log = []

    class Held(SimpleNamespace):
        def hold(self, full):
            self.full = full
            log.append("hold")

    units = [Held(full=random(6).float(), shard=nn.Parameter(random(3).float())) for _ in "ab"]

    def mixed(parameters, device=None):
        parameters = list(parameters)
        log.extend([len(parameters), [str(p.dtype) for p in parameters], str(device)])
        for p in parameters:
            p.data = p.data.to(precision)
        return "the optimizer"

    run = SimpleNamespace(args=SimpleNamespace(offload=offload), mixed=mixed)
    return {"what it gives": chapter.make_optimizer(run, units), "what is asked for": log,
            "full": [unit.full for unit in units]}


class TinyUnit:
    """In place of chapter 03's: it has no parts, and says when it is gathered or reduced."""

    def __init__(self, module, group):
        self.parameters, self.group = list(module.parameters()), group
        self.shard = nn.Parameter(torch.cat([p.detach().flatten() for p in self.parameters]))
        self.is_gathered, self.state = False, "no gradients"
        self.full = self.shard.detach().clone()

    def start_gather(self):
        self.is_gathered = True

    def finish_gather(self):
        pass

    def free(self, until_backward=False):
        self.is_gathered = False

    def make_room_for_gradients(self):
        if self.state == "no gradients":
            self.state = "has room"

    def start_reduce(self, in_place=False):
        grads = [p.grad for p in self.parameters]
        self.sum = torch.cat([grad.flatten() for grad in grads])
        self.state = "is reduced in place" if in_place else "is reduced"
        if not in_place:
            for p in self.parameters:
                p.grad = None

    def finish_reduce(self):
        self.shard.grad = self.sum + (0 if self.shard.grad is None else self.shard.grad)
        self.state = "no gradients"


def step_of_units(chapter, name, clip=None, **more):
    """Of three modules on one rank: two steps of two micro-batches, and how the units are, whenever
    a module is computed and whenever its gradient comes."""
    has_replicas = "replicas" in more
    group = dist.new_subgroups(1)[0] if has_replicas else alone()
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5)).double()
    for p in model.parameters():
        p.data = random(*p.shape)
    units, log = [TinyUnit(module, group) for module in model], []

    def note(*words):
        there = "".join("ng"[unit.is_gathered] for unit in units)
        log.append(" ".join([*words, there, *(unit.state for unit in units)]))

    for i, module in enumerate(model):
        module.register_forward_pre_hook(lambda *about, i=i: note(f"forward of {i}"))
        module.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: note(f"backward of {i}"))

    def gather(these, ahead):
        for unit in these[:ahead + 1]:
            unit.is_gathered = True

    optimizer, facts = torch.optim.SGD([unit.shard for unit in units], 0.5), {}
    rank = dist.get_rank() if has_replicas else 0
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, rank, 3, 0], [-100, -100, 3, -100])]
    with mock.patch.object(chapter, "gather", gather):
        for step in (1, 2):
            loss, norm = getattr(chapter, name)(model, units, optimizer, batches, 8, clip, **more)
            facts |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                      f"gradients of step {step}": [unit.shard.grad.clone() for unit in units],
                      f"shards after step {step}": [unit.shard.detach().clone() for unit in units],
                      "loss.requires_grad": loss.requires_grad}
    return facts | {"the units, whenever one is computed": log}


def zero3(chapter, ahead, keep_gathered=False, clip=None):
    return step_of_units(chapter, "zero3_step", clip=clip, ahead=ahead, keep_gathered=keep_gathered)


def zero1(chapter, stage, clip=None):
    return step_of_units(chapter, "zero1_step", clip=clip, stage=stage)


def grouped(chapter, blocks, k):
    """The list, with the numbers of its blocks."""
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(blocks + 2)))
    number = {module: i for i, module in enumerate(model)}
    return [number.get(item) if item in number else [number[block] for block in item]
            for item in chapter.group_blocks(model, k)]


class Unit:
    """In place of chapter 03's: it notes what is called."""

    def __init__(self, number, is_gathered, log):
        self.number, self.log = number, log
        self.full = torch.zeros(int(is_gathered))

    def start_gather(self):
        self.log.append(f"start {self.number}")

    def finish_gather(self):
        self.log.append(f"wait {self.number}")


def gathers_of_four_units(chapter, ahead, *gathered):
    log = []
    chapter.gather([Unit(i, i in gathered, log) for i in range(4)], ahead)
    return ", ".join(log)


def quantized_zeros(chapter):
    numbers, scales = chapter.quantize(torch.zeros(2, 256))
    return {"numbers": numbers, "that all scales are above zero": bool((scales > 0).all())}


def error_of_int8(chapter):
    x = 1000 * random(2, 2, 300)
    return chapter.dequantize(*chapter.quantize(x)) - x


def of_given_sizes(chapter, *sizes, **more):
    """The traffic, where padded_sizes is one that gives units of 1, 2, 2 and 3 times 7200."""
    given = {1: [7200, 14400, 14400, 21600], 2: [7200, 28800, 21600]}
    with mock.patch.object(chapter, "padded_sizes", lambda cfg, n, k=1: given[k]):
        return chapter.traffic(TINY, *sizes, **more)


def traffic_of_replicas(chapter, stage, ranks, widths, replicas):
    return of_given_sizes(chapter, stage, ranks, 1, widths, replicas=replicas)


def held_bytes(chapter, *table):
    return dict(zip("PGO", chapter.held(*table)))


def sizes_of_a_tied_head(chapter):
    return chapter.padded_sizes(dataclasses.replace(TINY, layers=2, tie=True, gated=True), 8)


def sizes(chapter):
    return chapter.padded_sizes(dataclasses.replace(TINY, layers=3), 7, 2)
