"""The exercises of chapter 03: units that are gathered and freed, int8 weights, and the traffic."""

import dataclasses

import torch

from lab.classroom.exercise import TINY, Exercise, Run, Same, random


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


def gathers_of_four_units(chapter):
    said = []
    chapter.gather([Unit(i, i == 1, said) for i in range(4)], 2)
    return ", ".join(said)


def quantized_rows(chapter):
    return dict(zip(("numbers", "scales"), chapter.quantize(random(3, 600))))


def quantized_zeros(chapter):
    numbers, scales = chapter.quantize(torch.zeros(2, 256))
    return {"numbers": numbers, "that all scales are above zero": bool((scales > 0).all())}


def error_of_int8(chapter):
    x = 1000 * random(2, 2, 300)
    return chapter.dequantize(*chapter.quantize(x)) - x


def traffic(chapter, stage, ranks, micro_batches):
    return chapter.traffic(TINY, stage, ranks, micro_batches)


def traffic_kept_gathered(chapter):
    return chapter.traffic(TINY, 3, 3, 5, (2, 4), keep_gathered=True)


def traffic_of_replicas(chapter, stage, ranks, widths, replicas):
    return chapter.traffic(TINY, stage, ranks, 1, widths, replicas=replicas)


def held_bytes(chapter, *table):
    return dict(zip("PGO", chapter.held(*table)))


def sizes(chapter):
    return chapter.padded_sizes(dataclasses.replace(TINY, layers=3), 7, 2)


def tokens(chapter, *rates):
    return chapter.tokens_to_hide(*rates)


EXERCISES = [
    Exercise(
        "03.1", "Unit.views Unit.make_room_for_gradients", 1,
        "`views` gives views into a flat tensor, in the shapes of self.parameters; the last "
        "self.padding numbers belong to none. `make_room_for_gradients` makes every p.grad so "
        "a view into self.gradients, a new flat tensor of zeros in shard.grad_dtype.",
        ("What is written into a parameter must be seen in the flat tensor, and the other way "
         "round. Which operations of a tensor give a view, and which a copy?",
         "views: split the tensor into the numbers of each parameter and the padding, leave "
         "that one out, and view each piece in its shape. Room: as many zeros as self.full has "
         "numbers. A parameter that has a gradient already (a tied table) keeps its numbers."),
        (Run(3, "--layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
         Run(2, "--variant zero2 --preset gpt2 --layers 1 --dim 32 --heads 4 --kv-heads 2 "
                "--seq 16 --vocab 256 --attention plain --batch 4 --verify")),
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
                "--precision bf16 --offload")),
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
              "unit 1 is gathered"),
         Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --prefetch 2")),
    ),
    Exercise(
        "03.4", "make_optimizer", 2,
        "Give an optimizer of the units' shards: with --precision bf16 of their fp32 masters, and "
        "with --offload of masters on the CPU. Afterwards all numbers of a unit are rounded as "
        "its shard is.",
        ("run.mixed gives masters to the parameters it is given, and rounds these. Which numbers "
         "of a unit has it not seen? And of what must a master be made?",
         "run.mixed takes the shards as they were drawn, and device=, which is None for masters "
         "beside the shards. After it, `hold` gives a unit another flat tensor: its old one, in "
         "the dtype that the shard has by now."),
        (Run(4, "--variant zero1 --batch 12 --micro-batch 1 --ignore 0.3 --offload"),
         Run(3, "--variant zero2 --layers 1 --batch 15 --micro-batch 1 --dtype float32 "
                "--precision bf16 --offload"),
         Run(3, "--layers 1 --batch 15 --micro-batch 1 --dtype float32 --precision bf16")),
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
                "--keep-gathered --clip 0.1")),
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
        (Same(traffic, "stage 1, 4 ranks, 3 micro-batches", (1, 4, 3)),
         Same(traffic, "stage 2, 4 ranks, 3 micro-batches", (2, 4, 3)),
         Same(traffic, "stage 3, 4 ranks, 3 micro-batches", (3, 4, 3)),
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
         Run(4, "--variant zero2 --batch 12 --micro-batch 1 --ignore 0.3 --clip 0.1")),
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
         Run(3, "--layers 3 --blocks-per-unit 2 --batch 6 --micro-batch 1 --ignore 0.3")),
        "blocks in units",
    ),
]
