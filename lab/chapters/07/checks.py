"""Checks of chapter 07: schedules as lists of actions, their messages, and the executor."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lab import schedules
from lab.chapters.checking import alone, random


def needs(chapter, kinds, rank_of_stage, ranks, micro_batch, of):
    """What each action has to wait for. of: the pipeline, in words."""
    schedule = chapter.Schedule([], rank_of_stage, ranks)
    return {f"{kind} in stage {stage}{of}":
            sorted(schedule.needs(chapter.Action(kind, stage, micro_batch)))
            for kind, stage in itertools.product(kinds, range(4))}


def in_letters(actions):
    return " ".join(f"{action.kind}{action.micro_batch}" for action in actions)


def actions_of_1f1b(chapter):
    return {f"rank {rank}": in_letters(
        chapter.one_forward_one_backward(rank, 4, 6, 1, 3 - rank, 4)) for rank in range(4)}


def actions_with_stages(chapter, *schedule):
    return [f"{action.kind} {action.micro_batch} in stage {action.stage}"
            for action in chapter.one_forward_one_backward(*schedule)]


def actions_of_zero_bubble(chapter, ranks, micro_batches, ahead):
    return {f"rank {rank}": in_letters(chapter.zero_bubble(rank, ranks, micro_batches, ahead))
            for rank in range(ranks)}


def in_words(chapter, programs, in_stages):
    """Each rank's actions and messages, where messages that stand side by side are sorted: they may
    be in any order."""

    def word(step):
        if isinstance(step, chapter.Message):
            return f"{step.output} from {step.sender} to {step.receiver}"
        return f"{step.kind} {step.micro_batch}" + in_stages * f" in stage {step.stage}"

    log = {}
    for rank, program in enumerate(programs):
        log[f"rank {rank}"] = words = []
        for kind, steps in itertools.groupby(program, type):
            these = [word(step) for step in steps]
            words += sorted(these) if kind is chapter.Message else these
    return log


def programs(chapter, name, ranks, in_stages):
    made = chapter.make_programs(chapter.make_schedule(name, ranks, 4))
    return in_words(chapter, made, in_stages)


def actions_of(chapter, stage, letters):
    """Of F0 BW0 and the like."""
    return [chapter.Action(word[:-1], stage, int(word[-1])) for word in letters.split()]


def schedule_of_two(chapter, *letters):
    """Of two ranks with a stage each, by hand."""
    needed = {"F0": [], "F1": ["F0"], "B0": ["F0", "B1"], "B1": ["F1"], "W0": ["B0"],
              "W1": ["B1"], "BW0": ["F0", "B1"], "BW1": ["F1"]}     # a kind and a stage

    def needs(action):
        return [(kind, int(stage), action.micro_batch)
                for kind, stage in needed[f"{action.kind}{action.stage}"]]

    actions = [actions_of(chapter, *of_stage) for of_stage in enumerate(letters)]
    return SimpleNamespace(actions=actions, ranks=[0, 1], depth=2, needs=needs)


def programs_of_two(chapter, letters, *times):
    made = chapter.make_programs(schedule_of_two(chapter, *letters), *times)
    return in_words(chapter, made, False)


def rendezvous(chapter):
    """On a network that stores nothing."""
    made = [chapter.make_schedule(name, 4, 8, 2)
            for name in ("1f1b", "interleaved", "zb-h1", "dualpipe")]
    return [schedules.check_rendezvous(chapter.make_programs(schedule), schedule.needs)
            for schedule in made]


def backward_before_its_forward(chapter):
    """What comes of a schedule in which no rank can go on."""
    try:
        chapter.make_programs(schedule_of_two(chapter, "F0 BW0", "BW0 F0"))
    except ValueError:
        return "ValueError is raised"
    return "no error is raised"


def stage_of_two_linears(chapter, in_halves):
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6, bias=False), nn.Tanh(),
                           nn.Linear(6, 3, bias=False)).double()
    for p in module.parameters():
        p.data.copy_(random(*p.shape))
    return chapter.Stage(module, in_halves)


def halves(chapter, in_halves):
    """Of three micro-batches: F of each, then B of each, then W in another order."""
    stage, facts = stage_of_two_linears(chapter, in_halves), {}
    weights = {"first": stage.module[1].weight, "second": stage.module[3].weight}
    for i in range(3):
        stage.forward(i, random(2, 5, 4), None, None)
    for i in (0, 2, 1):
        facts[f"gradient of input {i}"] = stage.backward(i, random(2, 5, 3))
    for i in (None, 1, 0, 2):
        when = "before W" if i is None else f"after W of {i}"
        if i is not None:
            stage.weight_gradients(i)
        facts |= {f"{name} weight's gradient, {when}": None if w.grad is None else w.grad.clone()
                  for name, w in weights.items()}
    return facts | {"norm's gradient": stage.module[0].weight.grad, "micro-batches still kept":
                    [*stage.kept_for_backward, *stage.kept_for_weights, *stage.later]}


def numbers_between(chapter):
    """How many numbers a stage keeps from B to W, but for its weights; none may have a graph."""
    stage = stage_of_two_linears(chapter, True)
    stage.forward(0, random(2, 5, 4), None, None)
    stage.backward(0, random(3, 5, 2).T)                # not contiguous
    weights, kept, left = {*stage.module.parameters()}, {}, [*stage.kept_for_weights.values()]
    while left:
        each = left.pop()
        if isinstance(each, (tuple, list)):
            left += each
        elif isinstance(each, torch.Tensor) and each not in weights:
            kept[each.untyped_storage().data_ptr()] = each
    return {"numbers": sum(x.untyped_storage().nbytes() // 8 for x in kept.values()),
            "with a graph": sum(x.grad_fn is not None for x in kept.values())}


def step_of_stages(chapter, clip):
    """Two ranks with a stage each, and a table that both have. The program is the check's own."""
    rank, group = dist.get_rank(), dist.group.WORLD
    model = nn.ParameterDict({name: nn.Parameter(random(3)) for name in ("own", "table")})
    model["table"].partial, model["table"].copies, model["own"].copies = group, 2, 1
    given = []

    def run_program(micro_batches, valid):
        given.extend([len(micro_batches), valid])
        for p, gradient in zip(model.values(), random(2, 2, 3)[rank]):
            p.grad = gradient + (0 if p.grad is None else p.grad)
        return torch.tensor(rank + 0.5, dtype=torch.float64)

    for p in model.values():
        p.grad = torch.ones(3, dtype=torch.float64)     # of the step before
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss, norm = chapter.train_step(run_program, model, optimizer, group, [(), ()], 7, clip)
    return {"loss": loss, "norm": norm, "what run_program is given": given} \
        | {f"{name}, updated": p.detach() for name, p in model.items()}


def versions(chapter, stage, ahead, batches, m):
    """Whose tokens and weights each action of a stage finds, of two. m: micro-batches of a batch.
    The one weight counts its updates."""
    alone()
    p, log = nn.Parameter(torch.zeros(1)), []
    order = actions_of(chapter, stage, " ".join(f"F{i}" for i in range(ahead)))
    for i in range(batches * m):
        order += actions_of(chapter, stage, f"F{i + ahead} BW{i}" if i + ahead < batches * m
                            else f"BW{i}")
    text = SimpleNamespace(batch=lambda step: (torch.full((m, 3), step),) * 2 + (3 * m,))
    run = SimpleNamespace(args=SimpleNamespace(batch=m, micro_batch=1), world=2, device="cpu",
                          span=lambda *what: contextlib.nullcontext())

    def execute(program, stages, group, empty, span, micro_batches, valid, outputs):
        facts = []
        for action in program:
            tokens, _ = micro_batches[action.micro_batch % len(micro_batches)]
            with span(action, {}, {}):
                facts.append(f"{action.kind}{action.micro_batch}: tokens of batch "
                             f"{tokens[0, 0]}, weights after {p.item():g} updates")
        log.append({"actions": facts, "left by earlier steps": sorted(outputs), "valid": valid,
                    "where": [stages, group, empty]})
        outputs[f"step {len(log)}"] = "on its way"
        return torch.tensor(len(log) / 2)

    with (mock.patch.object(chapter, "execute", execute),
          mock.patch.object(chapter.common, "Text", lambda args: text)):
        run_program = chapter.without_flush(run, order, nn.ParameterList([p]), "here", "all", "new")
        for step in range(batches):
            tokens, targets, valid = text.batch(step)
            loss = run_program([*zip(tokens.split(1), targets.split(1))], valid)
            log[-1] |= {"loss": loss, "weights that the optimizer finds": p.item()}
            p.data += 1
    return log


def times_and_bubble(chapter, recompute):
    times = chapter.times(recompute)
    return {**times, "bubble of zb-h1": chapter.bubble("zb-h1", 4, 8, 1, **times)}
