"""The exercises of chapter 07: schedules as lists of actions, their messages, and the executor."""

import contextlib
import itertools
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lab import schedules
from lab.classroom.exercise import Exercise, Run, Same, alone, random


def needs(chapter, kinds, rank_of_stage, ranks, micro_batch, of):
    """What each action has to wait for. of: the pipeline, in words."""
    schedule = chapter.Schedule([], rank_of_stage, ranks)
    return {f"{kind} in stage {stage}{of}":
            sorted(schedule.needs(chapter.Action(kind, stage, micro_batch)))
            for kind in kinds for stage in range(4)}


def in_letters(actions):
    return " ".join(f"{action.kind}{action.micro_batch}" for action in actions)


def actions_of_1f1b(chapter):
    actions = lambda rank: chapter.one_forward_one_backward(rank, 4, 6, 1, 3 - rank, 4)
    return {f"rank {rank}": in_letters(actions(rank)) for rank in range(4)}


def actions_with_stages(chapter, *schedule):
    return [f"{action.kind} {action.micro_batch} in stage {action.stage}"
            for action in chapter.one_forward_one_backward(*schedule)]


def actions_of_zero_bubble(chapter, ranks, micro_batches, ahead):
    return {f"rank {rank}": in_letters(chapter.zero_bubble(rank, ranks, micro_batches, ahead))
            for rank in range(ranks)}


def actions_of_one_rank(chapter):
    return in_letters(chapter.zero_bubble(1, 4, 2, 2))


def in_words(chapter, programs, in_stages):
    """Each rank's actions and messages, where messages that stand side by side are sorted: they may
    be in any order."""

    def word(step):
        if isinstance(step, chapter.Message):
            return f"{step.output} from {step.sender} to {step.receiver}"
        return f"{step.kind} {step.micro_batch}" + in_stages * f" in stage {step.stage}"

    said = {}
    for rank, program in enumerate(programs):
        said[f"rank {rank}"] = words = []
        for kind, steps in itertools.groupby(program, type):
            these = [word(step) for step in steps]
            words += sorted(these) if kind is chapter.Message else these
    return said


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
    needs = lambda action: [(output[0], int(output[1]), action.micro_batch)
                            for output in needed[f"{action.kind}{action.stage}"]]
    actions = [actions_of(chapter, stage, those) for stage, those in enumerate(letters)]
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
    stage, found = stage_of_two_linears(chapter, in_halves), {}
    weights = {"first": stage.module[1].weight, "second": stage.module[3].weight}
    for i in range(3):
        stage.forward(i, random(2, 5, 4), None, None)
    for i in (0, 2, 1):
        found[f"gradient of input {i}"] = stage.backward(i, random(2, 5, 3))
    for i in (None, 1, 0, 2):
        when = "before W" if i is None else f"after W of {i}"
        if i is not None:
            stage.weight_gradients(i)
        found |= {f"{name} weight's gradient, {when}": None if w.grad is None else w.grad.clone()
                  for name, w in weights.items()}
    return found | {"norm's gradient": stage.module[0].weight.grad, "micro-batches still kept":
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
    p, said = nn.Parameter(torch.zeros(1)), []
    order = actions_of(chapter, stage, " ".join(f"F{i}" for i in range(ahead)))
    for i in range(batches * m):
        order += actions_of(chapter, stage, f"F{i + ahead} BW{i}" if i + ahead < batches * m
                            else f"BW{i}")
    text = SimpleNamespace(batch=lambda step: (torch.full((m, 3), step),) * 2 + (3 * m,))
    run = SimpleNamespace(args=SimpleNamespace(batch=m, micro_batch=1), world=2, device="cpu",
                          span=lambda *what: contextlib.nullcontext())

    def execute(program, stages, group, empty, span, micro_batches, valid, outputs):
        found = []
        for action in program:
            tokens, _ = micro_batches[action.micro_batch % len(micro_batches)]
            with span(action, {}, {}):
                found.append(f"{action.kind}{action.micro_batch}: tokens of batch "
                             f"{tokens[0, 0]}, weights after {p.item():g} updates")
        said.append({"actions": found, "left by earlier steps": sorted(outputs), "valid": valid,
                     "where": [stages, group, empty]})
        outputs[f"step {len(said)}"] = "on its way"
        return torch.tensor(len(said) / 2)

    with (mock.patch.object(chapter, "execute", execute),
          mock.patch.object(chapter.common, "Text", lambda args: text)):
        run_program = chapter.without_flush(run, order, nn.ParameterList([p]), "here", "all", "new")
        for step in range(batches):
            tokens, targets, valid = text.batch(step)
            loss = run_program([*zip(tokens.split(1), targets.split(1))], valid)
            said[-1] |= {"loss": loss, "weights that the optimizer finds": p.item()}
            p.data += 1
    return said


def alive(chapter, letters):
    return chapter.alive_over_time(actions_of(chapter, 0, letters))


def times_and_bubble(chapter, recompute):
    times = chapter.times(recompute)
    return {**times, "bubble of zb-h1": chapter.bubble("zb-h1", 4, 8, 1, **times)}


EXERCISES = [
    Exercise(
        "07.1", "Schedule.needs", 1,
        "What must have been computed before an action can start? Give the names of these "
        "outputs, as Action.output has them: those of its own stage, and those that come from "
        "another.",
        ("A forward needs what the stage before has computed. What does a backward need "
         "besides the gradient that comes from the stage after it?",
         "F: the F of the stage before, unless the stage is the first of its pipeline. B and "
         "BW: the F of the stage itself and, unless it is the last, the \"B\" of the stage "
         "after it. W: the \"B\" of the stage itself. In dualpipe the second pipeline begins "
         "at stage `depth`, so a remainder tells the first and the last."),
        (Same(needs, "needs(action)", (("F", "B", "W", "BW"), [0, 1, 2, 3], 4, 5, " of 4")),
         Same(needs, "needs(action) of two pipelines with 2 stages each",
              (("F", "B", "BW"), [0, 1, 1, 0], 2, 3, ""))),
    ),
    Exercise(
        "07.2", "one_forward_one_backward", 3,
        "List a rank's actions, F and BW: `ahead` forwards, then a forward and a backward in "
        "turn, as long as there are any. Forwards take the rank's slices from the first to the "
        "last, backwards from the last to the first. Each slice takes `group` micro-batches, "
        "and after all slices have done so, the next `group` of them begins.",
        ("Write down all forwards of rank 1, for two ranks with two slices each, four "
         "micro-batches and a group of 2: which stage, which micro-batch? Then all backwards. "
         "How do the two lists become one?",
         "Slice s of a rank is stage s · p + rank. Three loops give the order of one kind: "
         "over the first micro-batch of each group, over the slices, over the micro-batches of "
         "the group, of which the last one may be smaller. Then come forwards[:ahead] and, "
         "with each backward, the next forward, if there is one."),
        (Same(actions_of_1f1b, "1f1b, 4 ranks, 6 micro-batches"),
         Same(actions_with_stages, "interleaved, rank 1 of 3, 6 micro-batches, 2 slices",
              (1, 3, 6, 2, 5, 3)),
         Same(actions_with_stages, "breadth first, rank 0 of 2, 3 micro-batches, 2 slices",
              (0, 2, 3, 2, 6, 3)),
         Run(2, "--variant interleaved --layers 4 --batch 4")),
        "1f1b, interleaved or not",
    ),
    Exercise(
        "07.3", "zero_bubble", 2,
        "List a rank's actions, F, B and W, of each kind in the order of the micro-batches. "
        "First come the forwards by which F is ahead. Then an F, a B and a W follow each "
        "other, as long as there are any, but W begins only after as many rounds as it is "
        "behind.",
        ("Take the last of four ranks, with k = 1: how far is F ahead of B there, and how far "
         "is W behind it? Compare with zb-h1 in the lesson.",
         "There are m rounds with a B, and as many more as W is behind: m + k · rank. In round "
         "i stand F number ahead + i, B number i and W number i - behind, each of them if "
         "there is one."),
        (Same(actions_of_zero_bubble, "zb-h1, 4 ranks, 6 micro-batches", (4, 6, 1)),
         Same(actions_of_zero_bubble, "zb-h2, 3 ranks, 5 micro-batches", (3, 5, 2)),
         Same(actions_of_one_rank, "zb-h2, rank 1 of 4, 2 micro-batches"),
         Run(2, "--variant zb-h1 --batch 4")),
    ),
    Exercise(
        "07.4", "make_programs", 3,
        "Let time run over a schedule, in which an action takes F, B or W (a BW: B + W), and give "
        "each rank's program: its actions where they end, and each message, on both of its ranks, "
        "behind all actions that end when its output is there. Only what another rank needs is "
        "sent. Raise ValueError if actions are left and no rank can begin one.",
        ("What has to be known at a moment, to decide whether a rank can begin its next "
         "action? And who needs an output of another rank: can that be read off the schedule "
         "before time begins to run?",
         "First {output: the rank that needs it}, from schedule.needs of every action, if "
         "schedule.ranks of the output's stage is another rank. Keep what is done, and for "
         "each busy rank its action and when that ends: now and its time. Each round: "
         "begin what can begin, let one unit pass, end what ends. Only after all of these come "
         "the messages."),
        (Same(programs_of_two, "1f1b of 2 ranks and 2 micro-batches, written by hand",
              (("F0 F1 BW0 BW1", "F0 BW0 F1 BW1"),)),
         Same(programs_of_two, "B and W apart, where a B takes 2",
              (("F0 F1 B0 F2 B1 W0 B2 W1 W2", "F0 B0 W0 F1 B1 F2 W1 B2 W2"), 1, 2, 1)),
         Same(backward_before_its_forward, "a BW that comes before its F"),
         Same(programs, "1f1b, 3 ranks, 4 micro-batches, messages side by side in any order",
              ("1f1b", 3, False)),
         Same(programs,
              "dualpipe-v, 2 ranks, 4 micro-batches, messages side by side in any order",
              ("dualpipe-v", 2, True)),
         Same(rendezvous, "on the strictest network"),
         Run(2, "--variant zb-h1 --batch 4")),
    ),
    Exercise(
        "07.5", "LinearInHalves.backward Stage.backward Stage.weight_gradients", 2,
        "B gives the gradient of the stage's input, and leaves those of its linears' weights "
        "for W, which computes them for one micro-batch and adds them up in weight.grad. "
        "Between B and W, no more may be kept than the inputs of the linears and the gradients "
        "of their outputs (bytes are counted).",
        ("Which tensors does the gradient of a weight need, and what hangs on them? And "
         "`later` is one list for all linears of a stage: which micro-batch's is in it when a "
         "B ends?",
         "LinearInHalves.backward appends (weight, x, dy), detached from the graph, and "
         "returns dy @ weight; Nones for the other two. Stage.backward takes out what forward "
         "kept, calls autograd.backward, moves what is in `later` to kept_for_weights[i] and "
         "empties it. For W: dyᵀ @ x over all tokens, added to what weight.grad has."),
        (Same(halves, "B of 0, 2 and 1, and then W of 1, 0 and 2", (True,)),
         Same(halves, "the same, not in halves", (False,)),
         Same(numbers_between, "what is kept between B and W"),
         Run(3, "--variant zb-h1 --layers 3 --batch 10 --micro-batch 2 --ignore 0.3"),
         Run(2, "--batch 6 --micro-batch 2 --ignore 0.3")),
        "B and W apart",
    ),
    Exercise(
        "07.6", "train_step", 2,
        "Take one step: forward and backward of all micro-batches, which is what run_program "
        "does, the norm of the whole model's gradient, clipping, the update. Give this rank's "
        "part of the loss, and the norm before clipping.",
        ("A rank has the gradients of its own stages. Which of them are still partial sums, "
         "and who has the rest of the norm?",
         "common.py has PartialSums, for what lies on two ranks (tied tables, the copies "
         "of dualpipe), and grad_norm, which needs the group of all stages; PyTorch has "
         "clip_grads_with_norm_. They follow in this order, and gradients begin as zero."),
        (Same(step_of_stages, "a step of two ranks, without clipping", (0,), 2),
         Same(step_of_stages, "a step of two ranks, clipped to a norm of 0.1", (0.1,), 2),
         Run(3, "--layers 3 --batch 4 --ignore 0.3 --clip 0.1"),
         Run(2, "--variant dualpipe --batch 6 --ignore 0.3")),
    ),
    Exercise(
        "07.7", "alive_over_time", 1,
        "How many micro-batches are alive in a rank's stages, after each of its actions?",
        ("A micro-batch is alive from its F until backward needs nothing more of it. Which "
         "kinds of action add one, which take one away, which leave the number as it is?",
         "F adds one. BW and W take one away; B takes none, since W still needs what it "
         "leaves. itertools.accumulate adds up as it goes."),
        (Same(alive, "F0 F1 F2 BW0 F3 BW1 BW2 BW3", ("F0 F1 F2 BW0 F3 BW1 BW2 BW3",)),
         Same(alive, "F0 F1 B0 F2 B1 W0 B2 W1 W2", ("F0 F1 B0 F2 B1 W0 B2 W1 W2",)),
         Same(alive, "F0 F1 BW0 B1 F2 W1 BW2", ("F0 F1 BW0 B1 F2 W1 BW2",)),
         Same(alive, "of no action", ("",))),
    ),
    Exercise(
        "07.8", "times", 1,
        'How long do F, B and W take, as {"F": ..., "B": ..., "W": ...}, if one is a third of what '
        "a micro-batch takes in a stage that keeps everything? And with --recompute full? (Of "
        "selective, what it repeats is small, and does not count.)",
        ("Who waits for what is computed again, B or W?",
         "B does: it begins with the F of the same micro-batch. What W needs has been computed "
         "again by then."),
        (Same(times_and_bubble, "nothing is recomputed", ("none",)),
         Same(times_and_bubble, "every block is recomputed", ("full",)),
         Same(times_and_bubble, "attention is recomputed", ("selective",))),
    ),
    Exercise(
        "07.9", "without_flush", 3,
        "Make run_program(micro_batches, valid) for 2bw: each call takes a step of a program with "
        "the micro-batches of all steps, in which stage s is p-1-s forwards ahead, and reads the "
        "next batch for that. Of each parameter's two `versions`, a micro-batch uses its batch's. "
        "After a step's backwards, parameters become a copy of the newest weights, which the "
        "optimizer updates, where no batch under way reads.",
        ("Batch t computes with W(t-1). Which version is that, if each update goes where the "
         "weights were that nobody needs any more? And in which step is the forward of "
         "micro-batch i in stage s?",
         "The program's steps: micro-batch i (i - p+1 + s, of a forward) over m, or the first. "
         "`execute` asks span(action, *kept) for a context before each action: give every p.data "
         "the version of action.micro_batch // m % 2. It finds micro-batch i at i modulo how many "
         "there are: a batch with an even number first, an odd one behind it. `outputs` stays "
         "from step to step. After it, p.data = the old version, with the newest copied into it."),
        (Same(versions, "stage 0 of 2, one forward ahead, 4 batches of 2 micro-batches",
              (0, 1, 4, 2)),
         Same(versions, "stage 1 of 2, 3 batches of 3 micro-batches", (1, 0, 3, 3)),
         Run(2, "--variant 2bw --batch 4 --ignore 0.3"),
         Run(3, "--variant 2bw --layers 3 --batch 4 --micro-batch 2 --ignore 0.3 --clip 0.1")),
    ),
]
