"""002: Megatron's paper (Narayanan et al., 2021), in its order.

No copy of figures 7, 8 and 11 to 18 that could be read has numbers at its points. So what is
predicted is held to what the text says of a figure: where a curve is highest, whether it falls, by
how much one is above another. Sizes and batches are those of the published scripts
(lab/planner/megatron.py).

A rate of table 1 or 2 may be off as `--published` says. A ratio of two rates may be off by a tenth,
and a gain, which is such a ratio less 1, by a fifth.
"""

import functools

from common import Config
from lab import schedules
from lab.chapters import chapter
from lab.planner import megatron, problems, published
from lab.sources.row import Row

GPT_3 = Config(layers=96, dim=12288, heads=96, kv_heads=96, seq=2048, vocab=51200, tie=True)

# Of table 1, beside TFLOP/s of a GPU: parameters, the share of the peak, PFLOP/s of all GPUs. Of
# table 2: days for 300 G tokens.
TABLE_1 = [(1.7, 44, 4.4), (3.6, 44, 8.8), (7.5, 46, 18.2), (18.4, 43, 34.6), (39.1, 44, 70.8),
           (76.1, 45, 143.8), (145.6, 47, 227.1), (310.1, 50, 297.4), (529.6, 52, 410.2),
           (1008.0, 52, 502.0)]
RATIO, GAIN = 0.1, 0.2
TABLE_2 = {"table 2, PTD": (84, 43, 23, 156, 80, 42),
           "table 2, ZeRO-3": (90, 74, 74, 169, 137, 140)}


def ten():
    return chapter("10")


@functools.cache
def predicted(name):
    """[(the row's numbers, TFLOP/s of a GPU that were published, and that are predicted)]."""
    return [([*map(int, row.split())], told, ours)
            for row, told, ours, _ in published.rows(ten(), name)]


@functools.cache
def figure(number):
    return getattr(megatron, f"figure_{number}")(ten())


def model_of(numbers):
    layers, dim, heads, *_ = numbers
    return ten().gpt(layers, dim, heads)


# ------------------------------------------------------------------------------ sections 2 and 3

def of_a_layer(t, index):
    """Calls (0) or bytes on the wire (2) of a layer's all_reduces over tp, of a micro-batch in 16
    bits, by chapter 04: of 96 layers, less those of 95."""
    four = chapter("04")
    fewer = Config(**{**vars(GPT_3), "layers": GPT_3.layers - 1})
    more, less = (four.traffic(cfg, 1, 1, t, 2)["all_reduce"][index] for cfg in (GPT_3, fewer))
    return more - less


def simulated(variant, v):
    """The bubble of 4 stages and 8 micro-batches, backward twice as long as forward, from a list of
    actions."""
    schedule = chapter("07").make_schedule(variant, 4, 8, v)
    return schedules.simulated_bubble(schedule, variant)


def bubble(variant, p, m, v=1):
    return chapter("07").bubble(variant, p, m, v)


def messages(variant, v):
    """Of a stage in the middle of four, for 8 micro-batches."""
    return chapter("07").traffic(variant, 1, 4, 8, v, 1, 0, 4)["send"][0]


def layers_of_a_checkpoint():
    """Between two, if a stage of figure 17 keeps least; a layer at the least."""
    kept = {again: ten().kept_by_layer(*megatron.run_of_17(ten(), again),
                                       megatron.machine(ten()).software)
            for again in ("none", "full")}
    layers = 80 // 16
    return max(1, layers / problems.best_checkpoints(layers, kept["full"], kept["none"]))


SECTION_2 = [
    Row("2.2.1", "1f1b's bubble over work, (p-1)/m: p 4, m 8", 3 / 8,
        lambda: bubble("1f1b", 4, 8), "of work", by="07_pipeline_parallel.bubble"),
    Row("2.2.1", "GPipe's is as long", 3 / 8, lambda: bubble("afab", 4, 8), "of work",
        by="07_pipeline_parallel.bubble"),
    Row("2.2.1", "GPipe keeps all m micro-batches: 8", 8,
        lambda: chapter("07").most_alive("afab", 0, 4, 8, 1), "micro-batches",
        by="07_pipeline_parallel.most_alive"),
    Row("2.2.1", "1f1b keeps p at the most: 4", 4,
        lambda: chapter("07").most_alive("1f1b", 0, 4, 8, 1), "micro-batches",
        by="07_pipeline_parallel.most_alive"),
    Row("figure 3", "GPipe's picture: idle over work", 3 / 8, lambda: simulated("afab", 1),
        "of work", by="python -m lab.schedules afab"),
    Row("figure 4", "1f1b's picture, above", 3 / 8, lambda: simulated("1f1b", 1), "of work",
        by="python -m lab.schedules 1f1b"),
    Row("figure 4", "interleaved, below: v 2", 3 / 16, lambda: simulated("interleaved", 2),
        "of work", by="python -m lab.schedules interleaved"),
    Row("2.2.2", "interleaved: (p-1)/(v·m), p 8, m 64, v 4", 7 / 256,
        lambda: bubble("interleaved", 8, 64, 4), "of work", by="07_pipeline_parallel.bubble"),
    Row("2.2.2", "and v times the messages: v 4", 4,
        lambda: messages("interleaved", 4) / messages("1f1b", 1), "times",
        by="07_pipeline_parallel.traffic"),
    Row("figure 5", "tp's all_reduces in a layer: 2 forward, 2 backward", 4,
        lambda: of_a_layer(8, 0), "calls", by="04_tensor_parallel.traffic"),
]

SECTION_3 = [
    Row("3.1", "n = p · t · d: 64 · 8 · 6", 3072,
        lambda: 64 * megatron.layout(ten(), dp=6, tp=8, pp=64).stage, "GPUs",
        by="10_planner.Layout"),
    Row("3.2", "bubble with tp, (n/t - 1)/m: n 64, t 8, m 32", (64 / 8 - 1) / 32,
        lambda: bubble("1f1b", 64 // 8, 32), "of work", by="07_pipeline_parallel.bubble"),
    Row("3.2", "tp sends 8·b·s·h·(t-1)/t numbers in a layer: GPT-3, t 8", 8 * 2048 * 12288 * 7 / 8,
        lambda: of_a_layer(8, 2) / 2, "numbers", by="04_tensor_parallel.traffic"),
    Row("3.3.1", "bubble with dp, (n-d)/b': n 128, d 16, b' 512", (128 - 16) / 512,
        lambda: bubble("1f1b", 128 // 16, 512 // 16), "of work", by="07_pipeline_parallel.bubble"),
    Row("figure 6", "no bubble where d = n: 32", 0, lambda: bubble("1f1b", 32 // 32, 128 // 32),
        "of work", by="python -m lab.plans megatron"),
    Row("3.3.1", "a ring's all_reduce takes (d-1)/d: d 8", 7 / 8,
        lambda: chapter("02").wire_bytes(1, 8) / 2, "of the longest", by="02.wire_bytes"),
    Row("figure 7", "one GPU is up to so much faster with a larger micro-batch", 1.3,
        lambda: figure(7)["one GPU"][16] / figure(7)["one GPU"][1], "times", 0.05,
        "megatron.figure_7", RATIO),
    Row("equation 1", "seconds of a step, (b'/b + p - 1)·(t_f + t_b): 128, b 4, p 8, 1 s", 39,
        lambda: megatron.equation_1(128, 4, 8, 1), "s", by="megatron.equation_1"),
    Row("figure 8", "the best micro-batch, batch 128", 4,
        lambda: megatron.best(figure(8)["batch 128"]), "sequences", by="megatron.figure_8",
        why="Equation 1 with our figure 7 has 2 and 4 within a hundredth of each other."),
    Row("figure 8", "the best micro-batch, batch 512", 4,
        lambda: megatron.best(figure(8)["batch 512"]), "sequences", by="megatron.figure_8"),
    Row("3.5", "c·A_in + l/c·A_all is least at c = √(l·A_all/A_in): l 8, 1 and 2 bytes", 4,
        lambda: problems.best_checkpoints(8, 1, 2), "checkpoints", by="problems.best_checkpoints"),
    Row("3.5", "layers of a checkpoint: 1 or 2", 1.5, layers_of_a_checkpoint, "layers", 0.5,
        "problems.best_checkpoints"),
    Row("4.1", "scatter/gather sends b·s·h/t numbers: GPT-3, t 8", 2048 * 12288 / 8,
        lambda: megatron.message(GPT_3.seq, GPT_3.dim, 8), "numbers", by="megatron.message"),
    Row("figure 9", "without it a message is sent so many times: t 8", 8,
        lambda: 8 * megatron.message(GPT_3.seq, GPT_3.dim, 1) / (2048 * 12288), "times",
        by="megatron.message"),
]


# --------------------------------------------------------------------------------- tables 1 and 2

def of_table_1():
    """Yield the rows of table 1, and of equation 3."""
    for i, (size, share, aggregate) in enumerate(TABLE_1):
        numbers, told, _ = predicted("table 1")[i]
        gpus, within = numbers[6], published.GOALS["table 1"][1]
        what = f"{size} G on {gpus}"
        yield Row("table 1", f"{what}: parameters, by equation 2", size,
                  lambda numbers=numbers: megatron.parameters(model_of(numbers)) / 1e9,
                  "G parameters", 0.05, "megatron.parameters")
        yield Row("table 1", f"{what}: FLOP/s of a GPU", told * 1e12,
                  lambda i=i: predicted("table 1")[i][2] * 1e12, "FLOP/s", 0.5e12,
                  "10_planner.py --published", within)
        yield Row("table 1", f"{what}: share of the peak", share / 100,
                  lambda i=i: predicted("table 1")[i][2] * 1e12 / ten().CLUSTERS["a100"].peak, "%",
                  0.005, "10_planner.py --published", within)
        yield Row("table 1", f"{what}: FLOP/s of all", aggregate * 1e15,
                  lambda i=i, gpus=gpus: gpus * predicted("table 1")[i][2] * 1e12, "FLOP/s",
                  0.05e15, "10_planner.py --published", within)


def of_table_2():
    """Yield its rows. Days come from the rate that is published: they are off by what rounding it
    to TFLOP/s, and days to whole ones, may hide."""
    for name, all_days in TABLE_2.items():
        for i, told_days in enumerate(all_days):
            numbers, told, _ = predicted(name)[i]
            what = f"{name[9:]}, {'175' if numbers[0] == 96 else '530'} G on {numbers[6]}"
            yield Row("table 2", f"{what}: FLOP/s of a GPU", told * 1e12,
                      lambda name=name, i=i: predicted(name)[i][2] * 1e12, "FLOP/s", 0.5e12,
                      "10_planner.py --published", published.GOALS[name][1])
            yield Row("table 2", f"{what}: days for 300 G tokens", told_days,
                      lambda name=name, i=i: days_of_table_2(name, i), "days",
                      0.5 + told_days * 0.5 / told, "megatron.days")


def days_of_table_2(name, i):
    numbers, told, _ = predicted(name)[i]
    flops = megatron.flops_of_training(ten(), model_of(numbers), 300e9)
    return megatron.days(flops, numbers[6], told * 1e12)


def over_zero_3(i, j):
    """Speed of PTD's row over that of ZeRO-3's."""
    return predicted("table 2, PTD")[i][2] / predicted("table 2, ZeRO-3")[j][2]


def fits_zero_3(gpus, micro_batch):
    layout = ten().Layout(gpus, zero=3, sp=False, micro_batch=micro_batch, recompute="full")
    return megatron.fits(ten(), ten().MODELS["530b"], layout, gpus * micro_batch)


THROUGHPUT = [
    Row("equation 3", "F = 96·B·s·l·h²·(1 + s/6h + V/16lh): GPT-3, B 1536",
        96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)),
        lambda: ten().step_flops(ten().MODELS["gpt3"], 1536, recompute="full"), "FLOP", 1e9,
        "10_planner.step_flops"),
    *of_table_1(),
    Row("equation 4", "8·T·P/(n·X): GPT-3, 300 G tokens, 1,024 GPUs at 140 TFLOP/s", 34,
        lambda: megatron.equation_4(175e9, 300e9, 1024, 140e12), "days", 0.5,
        "megatron.equation_4"),
    Row("equation 4", "1 T parameters, 450 G tokens, 3,072 GPUs at 163 TFLOP/s", 84,
        lambda: megatron.equation_4(1008e9, 450e9, 3072, 163e12), "days", 0.5,
        "megatron.equation_4"),
    *of_table_2(),
    Row("5.2", "PTD over ZeRO-3 where ZeRO-3's micro-batch is 4: 175 G", 1.06,
        lambda: over_zero_3(0, 0), "times", 0.005, "10_planner.py --published", RATIO),
    Row("5.2", "the same: 530 G", 1.24, lambda: over_zero_3(3, 3), "times", 0.005,
        "10_planner.py --published", RATIO),
    Row("5.2", "with twice the GPUs: 175 G", 1.7, lambda: over_zero_3(1, 1), "times", 0.05,
        "10_planner.py --published", RATIO),
    Row("5.2", "with twice the GPUs: 530 G", 1.7, lambda: over_zero_3(4, 4), "times", 0.05,
        "10_planner.py --published", RATIO,
        "ZeRO-3's row, on which NIC is fitted with others, is 11% slower here than it was."),
    Row("5.2", "ZeRO-3 does not fit (0): 530 G on 560, micro-batch 4", 0,
        lambda: fits_zero_3(560, 4), "", by="10_planner.memory"),
    Row("5.2", "it fits (1): 530 G on 1,120, micro-batch 2", 1, lambda: fits_zero_3(1120, 2), "",
        by="10_planner.memory"),
    Row("5.2", "it fits (1): 530 G on 640, micro-batch 4", 1, lambda: fits_zero_3(640, 4), "",
        by="10_planner.memory",
        why="80 GPUs more save 2 GB of 90: the planner knows bytes within a factor of 1.25."),
]


# --------------------------------------------------------------------------------- figures 11 to 18

def highest(number, what, batch, told, why=""):
    """A row: where a curve is highest."""
    return Row(f"figure {number}", f"the best {what}, batch {batch}", told,
               lambda: megatron.best(figure(number)[f"batch {batch}"]), "",
               by=f"megatron.figure_{number}", why=why)


def falling(number, what, batch, told, why=""):
    """A row: from how many of its points a curve falls to the next."""
    return Row(f"figure {number}", f"falls with each larger {what}, batch {batch}", told,
               lambda: megatron.falls(figure(number)[f"batch {batch}"]), "times",
               by=f"megatron.figure_{number}", why=why)


def over_worst(number, batch):
    curve = figure(number)[f"batch {batch}"]
    return max(curve.values()) / min(curve.values())


def gain(number, upper, lower, at):
    curves = figure(number)
    return curves[upper][at] / curves[lower][at] - 1


def gain_of_micro_batch(batch):
    """The best one over 1."""
    curve = figure(16)[f"batch {batch}"]
    return max(curve.values()) / curve[1] - 1


def lost_by_stages(batch):
    """The share of a GPU's speed that 8 stages lose."""
    curve = figure(11)[f"batch {batch}"]
    return 1 - curve[8] / curve[1]


def fits_on_two(axis):
    """Figure 14's and 15's model, of which dp has 32."""
    layout = megatron.layout(ten(), dp=32, **{axis: 2})
    return megatron.fits(ten(), ten().gpt(32, 3840, 32), layout, 32)


FIGURES = [
    Row("5.3.1", "parameters of figure 11's smallest model, 3 layers", 15,
        lambda: ten().gpt(3, 20480, 128).weights_of_layers(1) / 1e9, "G parameters", 0.5,
        "10_planner.Model"),
    Row("5.3.1", "parameters of its largest, 24 layers", 121,
        lambda: ten().gpt(24, 20480, 128).weights_of_layers(1) / 1e9, "G parameters", 0.5,
        "10_planner.Model"),
    falling(11, "pp", 8, 3),
    falling(11, "pp", 128, 3),
    Row("figure 11", "speed that 8 stages lose, batch 8", None, lambda: lost_by_stages(8), "%",
        by="megatron.figure_11"),
    Row("figure 11", "batch 128 loses less", None, lambda: lost_by_stages(128), "%",
        by="megatron.figure_11"),
    Row("figure 12", "interleaving gains 10% and more: at the largest batch, 60", 0.1,
        lambda: gain(12, "interleaved", "1f1b", 60), "%", 0.005, "megatron.figure_12", GAIN),
    Row("figure 12", "as much as 10%: at the smallest batch, 12", 0.1,
        lambda: gain(12, "interleaved", "1f1b", 12), "%", 0.005, "megatron.figure_12", GAIN,
        "12 micro-batches on 12 stages have bubbles of 11/12 and 11/48 of the work, which alone "
        "make 56%. The text's 10% is that of the largest batches."),
    Row("figure 12", "the gap closes with the batch: at this one, 1f1b is faster", None,
        lambda: megatron.batch_of_1f1b(ten(), True), "sequences", by="megatron.batch_of_1f1b"),
    Row("5.3.2", "without scatter/gather it is faster at this one, which is not shown", None,
        lambda: megatron.batch_of_1f1b(ten(), False), "sequences", by="megatron.batch_of_1f1b"),
    highest(13, "tp", 32, 8),
    highest(13, "tp", 128, 8),
    Row("figure 13", "the best over the worst: up to 2", 2, lambda: over_worst(13, 128), "times",
        0.05, "megatron.figure_13", RATIO,
        "A ring of 32 ranks on 4 nodes has all of their network cards here; theirs had less."),
    Row("5.4.2", "it fits (1): 5.9 G parameters on two GPUs, pp", 1, lambda: fits_on_two("pp"),
        by="10_planner.memory"),
    Row("5.4.3", "it fits (1): 5.9 G parameters on two GPUs, tp", 1, lambda: fits_on_two("tp"),
        by="10_planner.memory"),
    falling(14, "pp", 32, 4),
    falling(14, "pp", 128, 4),
    falling(14, "pp", 512, 4),
    falling(15, "tp", 32, 4, "With a sequence for each replica the optimizer is a fifth of the "
            "step, and tp 4 halves it. The text speaks of larger batches."),
    falling(15, "tp", 128, 4),
    falling(15, "tp", 512, 4),
    highest(16, "micro-batch", 128, 2),
    highest(16, "micro-batch", 512, 2, "4 is faster than 2 by less than a hundredth here, and so "
            "near no planner knows."),
    Row("1", "the right micro-batch gains up to 15%: figure 16, batch 512, over 1", 0.15,
        lambda: gain_of_micro_batch(512), "%", 0.005, "megatron.figure_16", GAIN,
        "Small matmuls are slower than their FLOPs and bytes say, and starting a kernel takes "
        "time, which the planner does not count."),
    Row("figure 17", "recomputation loses up to 33% of the speed: batch 1", 0.33,
        lambda: -gain(17, "recomputed", "nothing again", 1), "%", 0.005, "megatron.figure_17", GAIN,
        "A forward more takes a third more time, and that is a quarter less speed."),
    Row("figure 17", "without it, batch 16 and more do not fit (0)", 0,
        lambda: megatron.fits(ten(), *megatron.run_of_17(ten(), "none"), 16), "",
        by="10_planner.memory",
        why="1f1b keeps 16 micro-batches of any larger batch: the planner finds room for them, and "
            "it knows bytes within a factor of 1.25, which would be too many."),
    Row("figure 17", "batch 256 is up to 2 times as fast as the best without it: if that is 8", 2,
        lambda: figure(17)["recomputed"][256] / figure(17)["nothing again"][8], "times", 0.05,
        "megatron.figure_17", RATIO),
    Row("figure 18", "scatter/gather gains up to 11%: batch 60", 0.11,
        lambda: gain(18, "scatter/gather", "whole messages", 60), "%", 0.005,
        "megatron.figure_18", GAIN,
        "A whole message leaves a card at 19.5 GB/s here, as fitted on ZeRO-3's gathers; at 14 it "
        "would be 11%."),
]

SECTION_5 = [
    Row("5.9", "bisection of pipelines: 1 T on 3,072 GPUs", 892e9,
        lambda: megatron.bandwidth_of_pipelines(ten(), 6, 8, 64), "B/s", 0.5e9,
        "megatron.bandwidth_of_pipelines", RATIO),
    Row("5.9", "bisection of replicas' all_reduces", 12.9e12,
        lambda: megatron.bandwidth_of_replicas(ten(), 6, 8, 64), "B/s", 0.05e12,
        "megatron.bandwidth_of_replicas", RATIO,
        "The text does not say how it counts. In one direction 512 rings would need 25.2 GB/s of "
        "each card, which has 25; in both, 12.6, and the planner has 19.5."),
    Row("5.10", "a checkpoint of 1 T parameters: 2 + 12 bytes each", 13.8e12,
        lambda: megatron.bytes_of_checkpoint(ten(), ten().MODELS["1t"]), "B", 0.05e12,
        "megatron.bytes_of_checkpoint", 0.03),
    Row("5.10", "seconds to load it, at 1 TB/s", None,
        lambda: megatron.bytes_of_checkpoint(ten(), ten().MODELS["1t"]) / 1e12, "s",
        by="megatron.bytes_of_checkpoint"),
    Row("5.10", "seconds to save it, at 273 GB/s", None,
        lambda: megatron.bytes_of_checkpoint(ten(), ten().MODELS["1t"]) / 273e9, "s",
        by="megatron.bytes_of_checkpoint"),
    Row("7", "months of its training: about 3", 3,
        lambda: megatron.equation_4(1008e9, 450e9, 3072, 163e12) / 30.4, "months", 0.5,
        "megatron.equation_4"),
]


def forward_flops(model):
    """Of a layer and a sequence: a quarter of what a layer more adds to a step."""
    more = ten().gpt(model.layers + 1, model.dim, model.heads)
    steps = [ten().step_flops(of, 1, recompute="full") for of in (more, model)]
    return (steps[0] - steps[1]) / 4


APPENDIX = [
    Row("appendix", "forward FLOPs of a layer, 24·B·s·h² + 4·B·s²·h: GPT-3, B 1",
        24 * 2048 * 12288**2 + 4 * 2048**2 * 12288,
        lambda: forward_flops(ten().MODELS["gpt3"]), "FLOP", 1e6, "10_planner.step_flops"),
]

ROWS = (*SECTION_2, *SECTION_3, *THROUGHPUT, *FIGURES, *SECTION_5, *APPENDIX)
LEFT_OUT = (
    "figure 1: the sizes of others' models over the years, of which nothing is computed",
    "5.8: what fused kernels gain (19% and 11%), as no batch or number of GPUs is given, and not "
    "which kernels ran before",
)
