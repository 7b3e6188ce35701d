"""What the values of a student's functions are compared with, in a process that runs none of them.

The values of a check are compared with the solution's. Of a run, each rank has told its loss,
its norm, and its parts of gradients and parameters in each step that is compared: they must be
those of one GPU, which is trained here, and together they must be all of the model. Of chapter 00's
run each rank has told its rounds, which must be those of the formulas.

So a student's process can forge no verdict, whatever it makes of `==` or of the report. What it
can: know the right numbers otherwise, and hand them in. And what a run sends, keeps and computes
was measured in the student's process, too: only that it equals the formulas is looked at here.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import common
from common import part
from lab.bench import collectives, oracle, report, verify
from lab.bench.one_gpu import BesideOneGpu
from lab.bench.rounding import Rounding
from lab.classroom import checks
from lab.classroom.compare import compare, neighbours
from lab.classroom.plain import unpack
from lab.classroom.words import named


def of_values(told, words, answers):
    """How the values of a Same differ from the solution's, on each rank: a sentence, or none.
    answers: what each rank of the solution has told, packed."""
    ranks = {}                                          # {what is wrong: where}
    values = [unpack(answer)["value"] for answer in answers]
    for rank, (messages, value) in enumerate(zip(told, values, strict=True)):
        finding = compare(messages[-1]["value"], value, neighbours(values, rank))
        if finding:
            ranks.setdefault(finding, []).append(rank)
    for finding, those in ranks.items():                # the first says enough
        where = f"on {named(those)}, " if len(those) < len(told) else ""
        return [f"{words}: {where}{finding}"]
    return []


def of_a_run(told, stem, solution, argv):
    """What is wrong with what the ranks have told, in sentences. stem: of the chapter's file."""
    world = len(told)
    checks.launched_as(0, world, argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{stem}.py")
        path.write_text(solution, encoding="utf-8")
        module = checks.load(path, path.stem)
    args, _ = report.accepted(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                              getattr(module, "flags", None), argv)
    if not hasattr(args, "model"):
        return of_collectives(module, args, told)
    run, steps = OneGpu(args, module, world), [{}] * world
    for rank, messages in enumerate(told):
        steps[rank] = {message["step"]: message["held"] for message in messages
                       if "step" in message}
    return list(wrong_steps(run, steps))[:2]


# ----------------------------------------------------------------------------- beside one GPU's run

class Begun(Exception):
    """A run has come to its first batch."""


class OneGpu(BesideOneGpu):
    """One GPU's training, of the model that the chapter's own run names at its first batch. Until
    there it runs as rank 0 of ranks that are not there."""

    def __init__(self, args, module, world):
        self.args, self.text, self.dtype = args, common.Text(args), common.DTYPES[args.dtype]
        self.rank, self.world, self.device = 0, world, torch.device("cpu")
        self.first_step, self.has_begun = 0, False
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        train = module.VARIANTS[args.variant]
        try:
            (train[0] if isinstance(train, tuple) else train)(self)
        except Begun:
            self.has_begun = True

    def draw(self, model):
        return oracle.take_place(super().draw(model)) if self.has_begun else model

    def batches(self, share=0, build=common.gpt, after_step=None):
        self.build, self.after_step = build, after_step and oracle.move_biases
        raise Begun

    def tensors(self, step):
        """{(kind, name): tensor} of all that is compared after this step, which is taken now."""
        batch = common.Batch(step, *self.text.batch(step), [], self.text.starts(step))
        self.again.batches.append(batch)
        found = verify.tensors_of(*self.one_gpu_step(batch), self.one_gpu)
        return {key: tensor.double() for key, tensor in found.items()}


def wrong_steps(run, ranks):
    """Yield what does not match one GPU. ranks: of each one {step: what it holds}, which is
    [kind, name, tensor, cuts]."""
    args = run.args
    rounding, most = verify.rounding_of(args)
    tolerance = verify.tolerances(rounding, args.optimizer, args.batch * args.model.seq,
                                  getattr(args.model, "experts", 0))
    tensor_steps = 1 if rounding in verify.LOSSY else most
    run.again = Rounding(run, rounding, verify.tensors_of)
    steps, every = sorted(ranks[0]), list(range(min(args.steps, most)))
    may_skip = getattr(args, "precision", None) == "fp16"   # then no step is compared
    if any(sorted(rank) != steps for rank in ranks) or steps != every and not (may_skip and steps):
        yield f"of {len(every)} steps, {len(steps)} were handed in to be compared with one GPU"
        return

    largest = {}
    for count, step in enumerate(steps):
        there = run.tensors(step)
        for key, full in there.items():
            largest[key] = max(largest.get(key, 0), full.abs().max())
        scale = verify.scales(largest)
        held = [{(kind, name): rest for kind, name, *rest in rank[step]} for rank in ranks]
        for key, full in there.items():
            kind, where = key[0], f"{' '.join(key).strip()} in step {step + 1}"
            allowed = tolerance[kind] if kind == "loss" or count < tensor_steps else None
            if allowed is None:
                continue
            mine = [rank[key] for rank in held if key in rank]
            off = max((difference(*one, full, scale[key]) for one in mine), default=torch.inf)
            if not off <= allowed:                      # unless rounding alone explains it
                wider = verify.widened(scale, run.again.effects(there), tolerance)
                off *= float(scale[key] / wider[key])
            if not off <= allowed:
                yield f"{where} is off by {off:.1e}, tolerance {allowed:.0e}"
            elif not is_whole(full, [cuts for _, cuts in mine]):
                yield f"{where} is not there: the ranks have parts of it alone"


def difference(tensor, cuts, full, scale):
    """Of what a rank holds to its part of one GPU's tensor."""
    return float(verify.difference(tensor, part(full, as_cuts(cuts)), scale))


def as_cuts(cuts):
    """For common.part, if there can be such."""
    if not all(0 <= index < parts <= dist.get_world_size() for _, index, parts in cuts):
        raise ValueError(f"there are no such cuts: {cuts}")
    return [(dim, index, parts, None) for dim, index, parts in cuts]


def is_whole(full, every):
    """Whether parts that are cut in these ways are together all of a tensor."""
    number = torch.arange(1, full.numel() + 1).view(full.shape)     # 0: what fills it up
    held = torch.cat([part(number, as_cuts(cuts)).flatten() for cuts in every])
    return len(held.unique()) - bool((held == 0).any()) == full.numel()


# ---------------------------------------------------------------------------- beside the formulas

def of_collectives(module, args, told):
    """What is wrong with the rounds of chapter 00's collectives, in sentences."""
    ranks = [message["found"] for messages in told for message in messages if "found" in message]
    answer = module.formulas(args, 0, len(told), None)
    if len(ranks) != len(told) or any(rank.keys() != answer["by_hand"].keys() for rank in ranks):
        return ["not all ranks have handed in their rounds"]
    run = object.__new__(collectives.Run)
    run.rank, run.world, run.checks, run.problems, run.recorded = 1, len(told), [], [], {}
    for name, by_hand in answer["by_hand"].items():
        rounds, equal = zip(*(rank[name] for rank in ranks))
        run.line(by_hand, answer["collectives"][name], rounds, equal, (), None)
    return run.problems[:2]
