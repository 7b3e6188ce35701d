"""The exercises of chapter 03: units that are gathered and freed, int8 weights, and the traffic."""

import dataclasses
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from common import Cut
from lab.classroom.exercise import TINY, Exercise, Run, Same, alone, random


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
    found = {"padding": unit.padding, "views": [x.clone() for x in unit.views(flat)]}
    unit.views(flat)[1][2] = 7
    return found | {"the flat tensor, once 7 is in place 2 of the second view": flat}


def room_of_a_unit(chapter, grad_dtype):
    """The first parameter has a gradient already."""
    unit = unit_of(chapter, FOUR, (2, 3), (5,), grad_dtype=grad_dtype)
    unit.parameters[0].grad = random(2, 3).to(grad_dtype)
    stand_in = lambda self, flat: [flat[:6].view(2, 3), flat[6:11]]
    found = {}
    with mock.patch.object(chapter.Unit, "views", stand_in):
        for time in ("once", "twice"):
            unit.make_room_for_gradients()
            for p in unit.parameters:
                p.grad += 1
            found |= {f"p.grad, {time}": [p.grad.clone() for p in unit.parameters],
                      f"gradients, {time}": unit.gradients.clone()}
    return found


def reductions_of_a_unit(chapter, in_place):
    """Of two micro-batches, on two ranks, beside a third one."""
    rank, two, one = dist.get_rank(), dist.new_group([0, 1]), dist.new_group([2])
    unit, found = unit_of(chapter, two if rank < 2 else one, (2, 3), (3,)), {}
    for micro_batch in (1, 2):
        unit.gradients = (rank + 1) * random(len(unit.full))
        for p, start, stop in zip(unit.parameters, (0, 6), (6, 9)):
            p.grad = unit.gradients[start:stop].view(p.shape)
        lie_in = unit.gradients.untyped_storage().data_ptr()
        unit.start_reduce(*[True] * in_place)
        found[f"p.grad once it has started, {micro_batch}"] = [p.grad is not None
                                                               for p in unit.parameters]
        unit.finish_reduce()
        found |= {f"shard.grad, micro-batch {micro_batch}": unit.shard.grad.clone(),
                  f"gradients that are kept, {micro_batch}": unit.gradients}
        if micro_batch == 1:
            found["whether the sum is among the gradients"] = (
                unit.shard.grad.untyped_storage().data_ptr() == lie_in)
    return found


def optimizer_of_units(chapter, offload, precision):
    """What make_optimizer asks of a run, and what it tells its units."""
    said = []

    class Held(SimpleNamespace):
        def hold(self, full):
            self.full = full
            said.append("hold")

    units = [Held(full=random(6).float(), shard=nn.Parameter(random(3).float())) for _ in "ab"]

    def mixed(parameters, device=None):
        parameters = list(parameters)
        said.extend([len(parameters), [str(p.dtype) for p in parameters], str(device)])
        for p in parameters:
            p.data = p.data.to(precision)
        return "the optimizer"

    run = SimpleNamespace(args=SimpleNamespace(offload=offload), mixed=mixed)
    return {"what it gives": chapter.make_optimizer(run, units), "what is asked for": said,
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
    units, said = [TinyUnit(module, group) for module in model], []

    def note(*words):
        there = "".join("ng"[unit.is_gathered] for unit in units)
        said.append(" ".join([*words, there, *(unit.state for unit in units)]))

    for i, module in enumerate(model):
        module.register_forward_pre_hook(lambda *about, i=i: note(f"forward of {i}"))
        module.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: note(f"backward of {i}"))

    def gather(these, ahead):
        for unit in these[:ahead + 1]:
            unit.is_gathered = True

    optimizer, found = torch.optim.SGD([unit.shard for unit in units], 0.5), {}
    rank = dist.get_rank() if has_replicas else 0
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, rank, 3, 0], [-100, -100, 3, -100])]
    with mock.patch.object(chapter, "gather", gather):
        for step in (1, 2):
            loss, norm = getattr(chapter, name)(model, units, optimizer, batches, 8, clip, **more)
            found |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                      f"gradients of step {step}": [unit.shard.grad.clone() for unit in units],
                      f"shards after step {step}": [unit.shard.detach().clone() for unit in units],
                      "loss.requires_grad": loss.requires_grad}
    return found | {"the units, whenever one is computed": said}


def step_of_replicas(chapter):
    return step_of_units(chapter, "zero3_step", ahead=1, replicas=dist.group.WORLD)


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

    def __init__(self, number, is_gathered, said):
        self.number, self.said = number, said
        self.full = torch.zeros(int(is_gathered))

    def start_gather(self):
        self.said.append(f"start {self.number}")

    def finish_gather(self):
        self.said.append(f"wait {self.number}")


def gathers_of_four_units(chapter, ahead, *gathered):
    said = []
    chapter.gather([Unit(i, i in gathered, said) for i in range(4)], ahead)
    return ", ".join(said)


def quantized_rows(chapter):
    return dict(zip(("numbers", "scales"), chapter.quantize(random(3, 600))))


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


def traffic_kept_gathered(chapter):
    return of_given_sizes(chapter, 3, 3, 5, (2, 4), keep_gathered=True)


def traffic_of_larger_units(chapter):
    return of_given_sizes(chapter, 3, 3, 5, (2, 2), k=2)


def traffic_of_replicas(chapter, stage, ranks, widths, replicas):
    return of_given_sizes(chapter, stage, ranks, 1, widths, replicas=replicas)


def held_bytes(chapter, *table):
    return dict(zip("PGO", chapter.held(*table)))


def sizes_of_a_tied_head(chapter):
    return chapter.padded_sizes(dataclasses.replace(TINY, layers=2, tie=True, gated=True), 8)


def sizes(chapter):
    return chapter.padded_sizes(dataclasses.replace(TINY, layers=3), 7, 2)


def tokens(chapter, *rates):
    return chapter.tokens_to_hide(*rates)


EXERCISES = [
    Exercise(
        "03.1", "Unit.views Unit.make_room_for_gradients", 1,
        "`views` gives views into a flat tensor, in the shapes of self.parameters; the last "
        "self.padding numbers belong to none. `make_room_for_gradients` makes every p.grad so "
        "a view into self.gradients, a new flat tensor in shard.grad_dtype: of zeros, or of the "
        "gradient that a parameter has already (a tied table).",
        ("What is written into a parameter must be seen in the flat tensor, and the other way "
         "round. Which operations of a tensor give a view, and which a copy?",
         "views: split the tensor into the numbers of each parameter and the padding, leave "
         "that one out, and view each piece in its shape. Room: as many zeros as self.full has "
         "numbers; a gradient that is there is copied in. It may be called in each micro-batch."),
        (Run(3, "--layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
         Run(2, "--variant zero2 --preset gpt2 --layers 1 --dim 32 --heads 4 --kv-heads 2 "
                "--seq 16 --vocab 256 --attention plain --batch 4 --verify"),
         Same(views_of_a_unit, "views into 12 numbers, of which 11 are parameters"),
         Same(room_of_a_unit, "room, where one parameter has a gradient", (torch.float64,)),
         Same(room_of_a_unit, "room in float32", (torch.float32,))),
        "views and room",
    ),
    Exercise(
        "03.2", "Unit.start_reduce Unit.finish_reduce", 2,
        "Start to sum self.gradients over the ranks, so that each rank gets its shard of the "
        "sum, and let go of the parameters' own (in_place: keep them, and put the sum where this "
        "rank's part of them is). `finish_reduce` waits, lets go of the rest, and "
        "adds what has come to the sum of the micro-batches before, in shard.grad.",
        ("What is sent, and what is received into, must live until the transfer has ended. "
         "Where do you keep them meanwhile? And what is in shard.grad before a step's first "
         "micro-batch?",
         "common.reduce_scatter takes where the sum goes, a new tensor in the shard's shape, "
         "what is sent, group= and async_op=True, and gives a handle to wait for. shard.grad "
         "is None, or a sum that is added to. Afterwards nothing needs to be kept."),
        (Run(4, "--variant zero2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(4, "--variant zero1 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(3, "--variant zero2 --layers 1 --batch 15 --micro-batch 1 --dtype float32 "
                "--precision bf16 --offload"),
         Same(reductions_of_a_unit, "two micro-batches", (False,), 3),
         Same(reductions_of_a_unit, "two micro-batches, in place", (True,), 3)),
        "Unit: the reduction",
    ),
    Exercise(
        "03.3", "gather", 1,
        "Start the gathers of the first of these units and of the next `ahead` ones, but not "
        "of those that are gathered already or on their way. Then wait for the first unit's.",
        ("What tells a unit that is gathered, or about to be, from one that was freed?",
         "free() leaves `full` no memory, and start_gather gives it all of it at once: ask "
         "its untyped_storage() for its nbytes(). Of the first unit, finish_gather waits, if "
         "there is something to wait for."),
        (Same(gathers_of_four_units, "what is called with ahead 2, if of units 0, 1, 2 and 3 "
              "unit 1 is gathered", (2, 1)),
         Same(gathers_of_four_units, "with ahead 1, if none is gathered", (1,)),
         Same(gathers_of_four_units, "with ahead 0, if unit 0 is gathered", (0, 0)),
         Same(gathers_of_four_units, "with ahead 9, if units 0 and 3 are", (9, 0, 3)),
         Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --prefetch 2")),
    ),
    Exercise(
        "03.4", "make_optimizer", 2,
        "Give run.mixed's optimizer of the units' shards: with --precision bf16 of their fp32 "
        "masters, and with --offload of masters on the CPU (device=). run.mixed makes masters of "
        "the shards as they are, and then rounds these: afterwards `hold` must give each unit all "
        "its numbers, rounded as its shard is.",
        ("run.mixed gives masters to the parameters it is given, and rounds these. Which numbers "
         "of a unit has it not seen?",
         "run.mixed takes the shards as they were drawn, and device=, which is None for masters "
         "beside the shards. After it, `hold` gives a unit another flat tensor: its old one, in "
         "the dtype that the shard has by now."),
        (Run(4, "--variant zero1 --batch 12 --micro-batch 1 --ignore 0.3 --offload"),
         Run(3, "--variant zero2 --layers 1 --batch 15 --micro-batch 1 --dtype float32 "
                "--precision bf16 --offload"),
         Run(3, "--layers 1 --batch 15 --micro-batch 1 --dtype float32 --precision bf16"),
         Same(optimizer_of_units, "with --precision bf16", (False, torch.bfloat16)),
         Same(optimizer_of_units, "with --offload", (True, torch.float32)),
         Same(optimizer_of_units, "with both", (True, torch.bfloat16))),
    ),
    Exercise(
        "03.5", "zero3_step", 3,
        "Take a step of stage 3: each unit is gathered for its forward and for its backward, "
        "with the next ones under way, is freed in between (unless keep_gathered, and but for the "
        "last one, whose backward comes at once), and is reduced after its backward. "
        "Give this rank's part of the loss, and the norm of the whole gradient.",
        ("Each module computes from a detached input, so each has a graph of its own. What do "
         "you keep of every module in forward, and where does the gradient come from with "
         "which its backward begins? zero1_step does the same without freeing anything.",
         "Keep each module's input and output; the tokens alone have no gradient. From the "
         "loss to the logits, then down the list: make room for the unit's gradients, and the "
         "output's backward gives the input's gradient, which is the next output's. Free a "
         "unit before you start to reduce it, and finish that after the next unit's backward. "
         "Once a step the replicas sum shard.grad; then `update`."),
        (Run(3, "--layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
         Run(4, "--variant hsdp --shard-size 2 --batch 12 --micro-batch 1 --ignore 0.3 "
                "--keep-gathered --clip 0.1"),
         Same(zero3, "three units, one ahead", (1,)),
         Same(zero3, "three units, none ahead, clip 0.1", (0, False, 0.1)),
         Same(zero3, "three units, kept gathered", (1, True)),
         Same(step_of_replicas, "three units, on two replicas", (), 2)),
    ),
    Exercise(
        "03.6", "quantize dequantize", 2,
        "`quantize` gives x as int8, and for every BLOCK numbers of a row a float32 scale, so "
        "that the largest magnitude of a block is 127; a scale is never zero. A row may end "
        "within a block. `dequantize` is the way back.",
        ("How far apart are the numbers that a block can represent, if its largest is to be "
         "127 of them away from zero? And what is 0 / 0?",
         "The scale is the largest magnitude over 127, and at least something tiny. Pad the "
         "rows with zeros to whole blocks, divide each block by its scale, round (int8 alone "
         "would cut off), and take the padding away. Back: each number times the scale of its "
         "block."),
        (Same(quantized_rows, "3 rows of 600 numbers"),
         Same(quantized_zeros, "256 zeros"),
         Same(error_of_int8, "there and back, the error")),
        "int8 and scales",
    ),
    Exercise(
        "03.7", "traffic", 2,
        "Count what a rank sends in a step of each stage, from padded_sizes(cfg, n). Beside "
        "the units it is one number for the norm, in float32 or better, unless a rank is "
        "alone, and with replicas an all_reduce of each unit's shard of gradients.",
        ("How often in a step does each stage reduce a unit, and how often does it gather one? "
         "The lesson's table has the sums.",
         "Stage 1 reduces once, the others after every backward. Stages 1 and 2 gather once; "
         "stage 3 twice in each micro-batch, or once what it keeps: the last unit, the head, and "
         "with keep_gathered all. Gathers send parameters, of widths[0] bytes, reductions "
         "gradients, of widths[1]. On the wire it is (n-1)/n of the payload, twice that for an "
         "all_reduce."),
        (Same(of_given_sizes, "stage 1, 4 ranks, 3 micro-batches", (1, 4, 3)),
         Same(of_given_sizes, "stage 2, 4 ranks, 3 micro-batches", (2, 4, 3)),
         Same(of_given_sizes, "stage 3, 4 ranks, 3 micro-batches", (3, 4, 3)),
         Same(traffic_of_larger_units, "stage 3, 3 ranks, 5 micro-batches, 2 blocks a unit"),
         Same(traffic_kept_gathered,
              "stage 3, 3 ranks, 5 micro-batches, widths (2, 4), kept gathered"),
         Same(traffic_of_replicas,
              "stage 2, 2 groups of 8 ranks, 1 micro-batch, widths (2, 2)", (2, 8, (2, 2), 2)),
         Same(traffic_of_replicas,
              "stage 3, 4 groups of 1 rank, 1 micro-batch, widths (8, 8)", (3, 1, (8, 8), 4))),
    ),
    Exercise(
        "03.8", "held", 1,
        "How many bytes of parameters, gradients and optimizer states does a rank keep between "
        "two steps, under AdamW, in each stage of ZeRO? numbers: of the whole model; n: ranks that "
        "share it; precision: fp32, or bf16 with fp32 masters and gradients.",
        ("What has 4 bytes a number in either precision? And which of the three does each stage "
         "divide by n?",
         "In fp32 it is 4, 4 and 8 bytes, in bf16 2, 4 and 12: the masters are a state of the "
         "optimizer. Every stage divides the states, the second gradients too, and the third all."),
        (Same(held_bytes, "held(1200, 1, 4, 'fp32')", (1200, 1, 4, "fp32")),
         Same(held_bytes, "held(1200, 2, 4, 'bf16')", (1200, 2, 4, "bf16")),
         Same(held_bytes, "held(1200, 3, 6, 'bf16')", (1200, 3, 6, "bf16"))),
    ),
    Exercise(
        "03.9", "zero1_step", 3,
        "Take a step of stage 1 or 2. What the last update has changed is gathered first, and "
        "hides behind forward; gradients are reduced, unit by unit, in the last backward (stage "
        "1, in place) or in each one (stage 2), and hide behind the backward of the next unit. "
        "Give this rank's part of the loss, and the norm of the whole gradient.",
        ("Forward needs the first unit first. When do you wait for which gather? And how long "
         "may a unit's reduction be under way, if at most two units' gradients are to be alive?",
         "Start all gathers, in the order of the list, and before each module wait for its own. "
         "Each module reads a detached input, as in zero3_step. Make room for a unit's gradients "
         "before its backward. If they are to be sent, finish the reduction of the unit before "
         "this one (its index is one higher), then start this one's. The first unit's is finished "
         "last; then `update`."),
        (Run(3, "--variant zero1 --layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
         Run(4, "--variant zero2 --batch 12 --micro-batch 1 --ignore 0.3 --clip 0.1"),
         Same(zero1, "three units, stage 1, clip 0.1", (1, 0.1)),
         Same(zero1, "three units, stage 2", (2,))),
    ),
    Exercise(
        "03.10", "tokens_to_hide", 1,
        "From how many tokens of a micro-batch on do bytes_sent bytes of each parameter hide "
        "behind its matmuls, 1 in forward and 2 in backward, if n ranks of so many FLOP/s send so "
        "many bytes/s?",
        ("How many FLOPs is one matmul with one parameter and one token? Which share of what is "
         "sent goes over the wire?",
         "A parameter takes (n-1)/n · bytes_sent / bandwidth seconds to send, and 2 · matmuls / "
         "flops to compute with, for each token."),
        (Same(tokens, "tokens_to_hide(2, 1, 8, 1e15, 5e11)", (2, 1, 8, 1e15, 5e11)),
         Same(tokens, "tokens_to_hide(6, 2, 4, 1e15, 5e10)", (6, 2, 4, 1e15, 5e10))),
    ),
    Exercise(
        "03.11", "group_blocks padded_sizes", 1,
        "Fewer, larger units: `group_blocks` gives the model's list with every k neighbouring "
        "blocks as one module, the last of which may have fewer (k = 1: the list as it is), and "
        "`padded_sizes` the numbers of each unit, each padded until n divides it.",
        ("A unit is an item of the list, and a step does not ask what is in it. Which module of "
         "PyTorch computes several others in turn? Is padding for each block or for each unit?",
         "Embedding and head stay items; between them stand nn.Sequential of blocks[i:i + k], "
         "for every k-th i. A unit of g blocks has g times a block's numbers, and is rounded up "
         "to the next multiple of n once."),
        (Same(grouped, "the list of 5 blocks, 2 in a unit", (5, 2)),
         Same(grouped, "the list of 3 blocks, 1 in a unit", (3, 1)),
         Same(sizes, "padded_sizes of 3 blocks for 7 ranks, 2 in a unit"),
         Same(sizes_of_a_tied_head, "padded_sizes of 2 gated blocks and a tied head for 8 ranks"),
         Run(3, "--layers 3 --blocks-per-unit 2 --batch 6 --micro-batch 1 --ignore 0.3")),
        "blocks in units",
    ),
]
