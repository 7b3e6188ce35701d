"""002: Megatron's paper (Narayanan et al., 2021), in its order, by the numbers of its sections.

No copy of figures 7, 8 and 11 to 18 that could be read has numbers at its points. So what is
predicted is held to what the text says of a figure: where a curve is highest, whether it falls, by
how much one is above another. Sizes and batches are those of the published scripts
(lab/planner/megatron.py).

A rate of table 1 or 2 may be off as `--published` says. A ratio of two rates may be off by a tenth,
and a gain, which is such a ratio less 1, by a fifth. Bandwidth and bytes of section 5 may be off by
a tenth.
"""

import functools

from common import Config
from lab import schedules
from lab.chapters import chapter
from lab.planner import megatron, problems, published
from lab.sources import worked
from lab.sources.row import Row

GPT_3 = Config(layers=96, dim=12288, heads=96, kv_heads=96, seq=2048, vocab=51200, tie=True)
TRILLION = 1008e9       # parameters
RATIO, GAIN = 0.1, 0.2
HERE = "lab.planner.megatron."
PUBLISHED = "10_planner.py --published"

# Of table 1, beside TFLOP/s of a GPU: G parameters, % of the peak, PFLOP/s of all GPUs. Of table 2:
# days for 300 G tokens.
TABLE_1 = ((1.7, 44, 4.4), (3.6, 44, 8.8), (7.5, 46, 18.2), (18.4, 43, 34.6), (39.1, 44, 70.8),
           (76.1, 45, 143.8), (145.6, 47, 227.1), (310.1, 50, 297.4), (529.6, 52, 410.2),
           (1008.0, 52, 502.0))
TABLE_2 = {"table 2, PTD": (84, 43, 23, 156, 80, 42),
           "table 2, ZeRO-3": (90, 74, 74, 169, 137, 140)}


def ten():
    return chapter("10")


@functools.cache
def figure(number):
    return getattr(megatron, f"figure_{number}")(ten())


# ---------------------------------------------------------------------------------- sections 1 to 4

def bubble(variant, p, m, v=1):
    return chapter("07").bubble(variant, p, m, v)


def alive(variant):
    """Micro-batches of the first of 4 stages, of 8."""
    return chapter("07").most_alive(variant, 0, 4, 8, 1)


def simulated(variant, v):
    """The bubble of 4 stages and 8 micro-batches, backward twice as long as forward, from a list of
    actions."""
    schedule = chapter("07").make_schedule(variant, 4, 8, v)
    return schedules.simulated_bubble(schedule, variant)


def next_batch():
    """After 4, how many micro-batches 4 stages of 2 slices take."""
    layout = megatron.layout(ten(), pp=4, v=2)
    return next(m for m in range(5, 13) if not ten().misfit(ten().gpt(8, 64, 4), layout, 4, m))


def messages(variant, v):
    """Of a stage in the middle of four, for 8 micro-batches."""
    return chapter("07").traffic(variant, 1, 4, 8, v, 1, 0, 4)["send"][0]


def of_a_layer(t, index):
    """Calls (0) or bytes on the wire (2) of a layer's all_reduces over tp, of a micro-batch in 16
    bits, by chapter 04: of 96 layers, less those of 95."""
    four = chapter("04")
    fewer = Config(**{**vars(GPT_3), "layers": GPT_3.layers - 1})
    more, less = (four.traffic(cfg, 1, 1, t, 2)["all_reduce"][index] for cfg in (GPT_3, fewer))
    return more - less


def highest(number, curve, what, told, why=""):
    """A row: where a curve is highest."""
    return Row(f"figure {number}", f"the best {what}, {curve}", told,
               lambda: megatron.best(figure(number)[curve]), "", by=f"{HERE}figure_{number}",
               why=why)


def faster_with_micro_batches(number, curve, most):
    """How many times as fast the best of them is as 1, or the largest as 1."""
    of = figure(number)[curve]
    return (of[most] if most else max(of.values())) / of[1]


def layers_of_a_checkpoint():
    """Between two, if a stage of figure 17 keeps least; a layer at the least."""
    kept = {again: ten().kept_by_layer(*megatron.run_of_17(ten(), again),
                                       megatron.machine(ten()).software)
            for again in ("none", "full")}
    layers = 80 // 16
    return max(1, layers / problems.best_checkpoints(layers, kept["full"], kept["none"]))


SECTIONS_1_TO_4 = (
    Row("1", "as much as half of the time is the bubble: p 8, m 7", 0.5,
        lambda: bubble("1f1b", 8, 7) / (1 + bubble("1f1b", 8, 7)), "%",
        by="07_pipeline_parallel.bubble"),
    Row("2.2.1", "GPipe's bubble over work, (p-1)/m: p 4, m 8", 3 / 8,
        lambda: bubble("afab", 4, 8), "%", by="07_pipeline_parallel.bubble"),
    Row("2.2.1", "1f1b's is as long", 3 / 8, lambda: bubble("1f1b", 4, 8), "%",
        by="07_pipeline_parallel.bubble"),
    Row("2.2.1", "GPipe keeps all m micro-batches", 8, lambda: alive("afab"),
        by="07_pipeline_parallel.most_alive"),
    Row("2.2.1", "1f1b keeps p at the most", 4, lambda: alive("1f1b"),
        by="07_pipeline_parallel.most_alive"),
    Row("figure 3", "GPipe's picture: idle over work", 3 / 8, lambda: simulated("afab", 1), "%",
        by="python -m lab.schedules afab"),
    Row("figure 4", "1f1b's picture, above", 3 / 8, lambda: simulated("1f1b", 1), "%",
        by="python -m lab.schedules 1f1b"),
    Row("figure 4", "interleaved, below: v 2", 3 / 16, lambda: simulated("interleaved", 2), "%",
        by="python -m lab.schedules interleaved"),
    Row("2.2.2", "m is a multiple of p: after 4 micro-batches on 4 stages", 8, next_batch,
        by="10_planner.misfit"),
    Row("2.2.2", "interleaved: (p-1)/(v·m), p 8, m 64, v 4", 7 / 256,
        lambda: bubble("interleaved", 8, 64, 4), "%", by="07_pipeline_parallel.bubble"),
    Row("2.2.2", "and v times the messages: v 4", 4,
        lambda: messages("interleaved", 4) / messages("1f1b", 1), "times",
        by="07_pipeline_parallel.traffic"),
    Row("figure 5", "all_reduces of tp in a layer: 2 forward, 2 backward", 4,
        lambda: of_a_layer(8, 0), by="04_tensor_parallel.traffic"),
    Row("3.1", "n = p · t · d: p 64, t 8, d 6", 3072,
        lambda: 64 * megatron.layout(ten(), dp=6, tp=8, pp=64).stage, "GPUs",
        by="10_planner.Layout"),
    Row("3.2", "bubble with tp, (n/t - 1)/m: n 64, t 8, m 32", 7 / 32,
        lambda: bubble("1f1b", 64 // 8, 32), "%", by="07_pipeline_parallel.bubble"),
    Row("3.2", "pp sends b·s·h numbers to the next stage: GPT-3", 2048 * 12288,
        lambda: worked.message(GPT_3.seq, GPT_3.dim) / 2, by="09_5d.traffic"),
    Row("3.2", "tp sends 8·b·s·h·(t-1)/t in a layer: t 8", 8 * 2048 * 12288 * 7 / 8,
        lambda: of_a_layer(8, 2) / 2, by="04_tensor_parallel.traffic"),
    Row("3.3.1", "bubble with dp, (n-d)/b': n 128, d 16, b' 512", 112 / 512,
        lambda: bubble("1f1b", 128 // 16, 512 // 16), "%", by="07_pipeline_parallel.bubble"),
    Row("figure 6", "its end, d = n: no bubble", 0, lambda: bubble("1f1b", 32 // 32, 128 // 32),
        "%", by="python -m lab.plans megatron"),
    Row("3.3.1", "a ring's all_reduce takes (d-1)/d of its longest: d 8", 7 / 8,
        lambda: chapter("02").wire_bytes(1, 8) / 2, "%", by="02_data_parallel.wire_bytes"),
    Row("figure 7", "parameters of its model: a billion", 1,
        lambda: megatron.parameters(ten().gpt(4, 4096, 128)) / 1e9, "G", 0.05, HERE + "parameters"),
    Row("figure 7", "a GPU is up to so much faster with a larger micro-batch", 1.3,
        lambda: faster_with_micro_batches(7, "one GPU", 16), "times", 0.05, HERE + "figure_7",
        RATIO),
    Row("3.4", "equation 1, (b'/b + p - 1)·(t_f + t_b): b' 128, b 4, p 8, 1 s", 39,
        lambda: megatron.equation_1(128, 4, 8, 1), "s", by=HERE + "equation_1"),
    highest(8, "batch 128", "micro-batch", 4,
            "With the times of our figure 7, 2 and 4 are within 2% of each other."),
    highest(8, "batch 512", "micro-batch", 4),
    Row("3.5", "c·A_in + l/c·A_all is least at c = √(l·A_all/A_in): l 8, 1 B, 2 B", 4,
        lambda: problems.best_checkpoints(8, 1, 2), by="lab.planner.problems.best_checkpoints"),
    Row("3.5", "layers between checkpoints, 1 or 2: figure 17's", 1, layers_of_a_checkpoint,
        by="lab.planner.problems.best_checkpoints", to=2),
    Row("4.1", "scatter/gather sends b·s·h/t numbers: t 8", 2048 * 12288 / 8,
        lambda: worked.message(GPT_3.seq, GPT_3.dim, 8) / 2, by="09_5d.traffic"),
    Row("figure 9", "without it the same tensor is sent t times: t 8", 8,
        lambda: (worked.message(GPT_3.seq, GPT_3.dim) / worked.message(GPT_3.seq, GPT_3.dim, 8)),
        "times", by="09_5d.traffic"),
)


# ------------------------------------------------------------------- tables 1 and 2, and equations

@functools.cache
def predicted(name):
    """[(the model, GPUs, TFLOP/s of one that were published, and that are predicted)]."""
    found = []
    for row, told, ours, _ in published.rows(ten(), name):
        layers, dim, heads, *_, gpus, _, _ = map(int, row.split())
        found.append((ten().gpt(layers, dim, heads), gpus, told, ours))
    return found


def speed(name, i):
    """FLOP/s of a GPU, predicted."""
    return 1e12 * predicted(name)[i][-1]


def of_table_1():
    """Yield its rows."""
    within = published.GOALS["table 1"][1]
    for i, (size, share, aggregate) in enumerate(TABLE_1):
        model, gpus, told, _ = predicted("table 1")[i]
        ours = functools.partial(speed, "table 1", i)
        what = f"{size} G on {gpus:,}"
        yield Row("table 1", f"{what}: parameters, by equation 2", size,
                  lambda model=model: megatron.parameters(model) / 1e9, "G", 0.05,
                  HERE + "parameters")
        yield Row("table 1", f"{what}: of a GPU", 1e12 * told, ours, "FLOP/s", 0.5e12, PUBLISHED,
                  within)
        yield Row("table 1", f"{what}: of the peak", share / 100,
                  lambda ours=ours: ours() / ten().CLUSTERS["a100"].peak, "%", 0.005, PUBLISHED,
                  within)
        yield Row("table 1", f"{what}: of all", 1e15 * aggregate,
                  lambda ours=ours, gpus=gpus: gpus * ours(), "FLOP/s", 0.05e15, PUBLISHED, within)


def days_of_table_2(name, i):
    """From the rate that was published, and all FLOPs of equation 3."""
    model, gpus, told, _ = predicted(name)[i]
    return megatron.days(megatron.flops_of_training(ten(), model, 300e9), gpus, 1e12 * told)


def of_table_2():
    """Yield its rows. Days may be off by what the rounding of rates and of days hides."""
    for name, all_days in TABLE_2.items():
        for i, days in enumerate(all_days):
            model, gpus, told, _ = predicted(name)[i]
            what = f"{name[9:]}, {'175' if model.layers == 96 else '530'} G on {gpus:,}"
            yield Row("table 2", f"{what}: of a GPU", 1e12 * told,
                      functools.partial(speed, name, i), "FLOP/s", 0.5e12, PUBLISHED,
                      published.GOALS[name][1])
            yield Row("table 2", f"{what}: days for 300 G tokens", days,
                      functools.partial(days_of_table_2, name, i), "days",
                      0.5 + 0.5 * days / told, HERE + "days")


def over_zero_3(i, what, told, error, why=""):
    """A row: the speed of PTD's row over that of ZeRO-3's."""
    return Row("5.2", f"PTD over ZeRO-3, {what}", told,
               lambda: speed("table 2, PTD", i) / speed("table 2, ZeRO-3", i), "times", error,
               PUBLISHED, RATIO, why)


def zero_3_fits(gpus, micro_batch, told, why=""):
    """A row: whether the 530 G fit with ZeRO-3 alone."""
    def ours():
        layout = ten().Layout(gpus, zero=3, sp=False, micro_batch=micro_batch, recompute="full")
        return megatron.fits(ten(), ten().MODELS["530b"], layout, gpus * micro_batch)

    return Row("5.2", f"530 G with ZeRO-3 on {gpus:,}, micro-batch {micro_batch}: it fits (1), or "
               "not (0)", told, ours, by="10_planner.memory", why=why)


def short_of_equation_3():
    """The share of GPT-3's FLOPs that equation 4 leaves out."""
    model = ten().MODELS["gpt3"]
    return 1 - 8 * megatron.parameters(model) / megatron.flops_of_training(ten(), model, 1)


THROUGHPUT = (
    Row("5", "the 200 Gb/s of a network card", 25e9, lambda: ten().CLUSTERS["a100"].nic, "B/s",
        by="10_planner.CLUSTERS"),
    Row("5.1", "equation 3, 96·B·s·l·h²·(1 + s/6h + V/16lh): GPT-3, B 1536",
        96 * 1536 * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288)),
        lambda: ten().step_flops(ten().MODELS["gpt3"], 1536, recompute="full"), "FLOP", 1e9,
        "10_planner.step_flops"),
    *of_table_1(),
    Row("5.1", "equation 4, 8·T·P/(n·X): 175 G, 300 G tokens, 1,024 GPUs at 140 TFLOP/s", 34,
        lambda: megatron.equation_4(175e9, 300e9, 1024, 140e12), "days", 0.5,
        HERE + "equation_4"),
    Row("5.1", "the trillion, 450 G tokens, 3,072 GPUs at 163 TFLOP/s", 84,
        lambda: megatron.equation_4(TRILLION, 450e9, 3072, 163e12), "days", 0.5,
        HERE + "equation_4"),
    *(Row("1", f"years of {what} on a single such GPU (in words: hundreds)", None,
          lambda size=size, tokens=tokens, rate=rate: megatron.equation_4(
              size, tokens, 1, rate) / 365, "years", by=HERE + "equation_4")
      for what, size, tokens, rate in (("GPT-3", 175e9, 300e9, 140e12),
                                       ("the trillion", TRILLION, 450e9, 163e12))),
    Row("5.1", "what equation 4 leaves out of equation 3: GPT-3", None, short_of_equation_3, "%",
        by=HERE + "equation_4"),
    *of_table_2(),
    Row("figure 10", "speed that a GPU loses with four times the GPUs: PTD, 175 G", 1 - 141 / 153,
        lambda: slower_with_four_times("PTD"), "%", by=PUBLISHED, within=GAIN),
    Row("figure 10", "the same: ZeRO-3", 1 - 44 / 144, lambda: slower_with_four_times("ZeRO-3"),
        "%", by=PUBLISHED, within=GAIN),
    over_zero_3(0, "its micro-batch is 4: 175 G", 1.06, 0.005),
    over_zero_3(3, "its micro-batch is 4: 530 G", 1.24, 0.005),
    over_zero_3(1, "twice the GPUs: 175 G", 1.7, 0.05),
    over_zero_3(4, "twice the GPUs: 530 G", 1.7, 0.05,
                "This row of ZeRO-3's is 11% slower here than it was."),
    over_zero_3(2, "four times the GPUs, by table 2: 175 G", 141 / 44, 0),
    over_zero_3(5, "four times the GPUs, by table 2: 530 G", 159 / 48, 0),
    zero_3_fits(560, 4, 0),
    zero_3_fits(640, 4, 1,
                "80 more GPUs save less than 3% of its bytes, and the planner knows them within a "
                "factor of 1.25."),
    zero_3_fits(1120, 2, 1),
)


# --------------------------------------------------------------------------------- figures 11 to 18

def falling(number, curve, what, told, why=""):
    """A row: from how many of its points a curve falls to the next."""
    return Row(f"figure {number}", f"falls with each larger {what}, {curve}", told,
               lambda: megatron.falls(figure(number)[curve]), "times",
               by=f"{HERE}figure_{number}", why=why)


def gain(number, what, told, upper, lower, at, why=""):
    """A row: by which share one curve is above another."""
    def ours():
        curves = figure(number)
        return curves[upper][at] / curves[lower][at] - 1

    return Row(f"figure {number}", what, told, ours, "%", 0.005, f"{HERE}figure_{number}", GAIN,
               why)


def lost_by_stages(batch):
    """The share of a GPU's speed that 8 stages lose."""
    curve = figure(11)[f"batch {batch}"]
    return 1 - curve[8] / curve[1]


def fits_on_two(axis):
    """Whether figures 14 and 15 have room, where dp has 32."""
    layout = megatron.layout(ten(), dp=32, **{axis: 2})
    return megatron.fits(ten(), ten().gpt(32, 3840, 32), layout, 32)


def of_figure(number, size, error, layers, dim, heads):
    """A row: the parameters of its model, G."""
    return Row(f"figure {number}", "parameters of its model, by equation 2", size,
               lambda: megatron.parameters(ten().gpt(layers, dim, heads)) / 1e9, "G", error,
               HERE + "parameters")


def slower_with_four_times(name):
    """The share of a GPU's speed that GPT-3 loses from 384 GPUs to 1,536."""
    return 1 - speed(f"table 2, {name}", 2) / speed(f"table 2, {name}", 0)


def best_over_worst(curve):
    values = figure(13)[curve].values()
    return max(values) / min(values)


def most_of_dp_alone():
    """GPUs, of those that are tried, with a sequence each, of GPT-3's batch."""
    tried = [2**k for k in range(8, 14)] + [1536, 10_000]
    return max(n for n in tried
               if not ten().misfit(ten().MODELS["gpt3"], ten().Layout(dp=n), n, 1536))


FIGURES = (
    Row("5.3.1", "figure 11: its smallest model, of 3 layers", 15,
        lambda: ten().gpt(3, 20480, 128).weights_of_layers(1) / 1e9, "G", 0.5, "10_planner.Model"),
    Row("5.3.1", "figure 11: its largest, of 24", 121,
        lambda: ten().gpt(24, 20480, 128).weights_of_layers(1) / 1e9, "G", 0.5,
        "10_planner.Model"),
    falling(11, "batch 8", "pp", 3),
    falling(11, "batch 128", "pp", 3),
    Row("figure 11", "speed that 8 stages lose, batch 8", None, lambda: lost_by_stages(8), "%",
        by=HERE + "figure_11"),
    Row("figure 11", "batch 128 scales better", None, lambda: lost_by_stages(128), "%",
        by=HERE + "figure_11"),
    gain(12, "interleaving gains 10% and more: largest batch, 60", 0.1, "interleaved", "1f1b", 60),
    gain(12, "as much as 10%: smallest batch, 12", 0.1, "interleaved", "1f1b", 12,
         "12 micro-batches on 12 stages have bubbles of 11/12 and 11/48 of the work, which alone "
         "make 56%. The text's 10% can only be that of large batches."),
    Row("figure 12", "the gap closes: from this batch on 1f1b is faster", None,
        lambda: megatron.batch_of_1f1b(ten(), True), by=HERE + "batch_of_1f1b"),
    Row("5.3.2", "without scatter/gather, of a larger batch (not shown)", None,
        lambda: megatron.batch_of_1f1b(ten(), False), by=HERE + "batch_of_1f1b"),
    of_figure(13, 162.2, 0.05, 32, 20480, 128),
    highest(13, "batch 32", "tp", 8),
    highest(13, "batch 128", "tp", 8),
    Row("figure 13", "the best over the worst: up to 2", 2, lambda: best_over_worst("batch 128"),
        "times", 0.05, HERE + "figure_13", RATIO,
        "Here a ring of 32 ranks leaves each of 4 nodes through all of its cards. Whether theirs "
        "did is not told."),
    of_figure(14, 5.9, 0.05, 32, 3840, 32),
    Row("5.4.2", "5.9 G on two GPUs by pp: it fits (1)", 1, lambda: fits_on_two("pp"),
        by="10_planner.memory"),
    falling(14, "batch 32", "pp", 4),
    falling(14, "batch 128", "pp", 4),
    falling(14, "batch 512", "pp", 4),
    Row("5.4.3", "5.9 G on two GPUs by tp: it fits (1)", 1, lambda: fits_on_two("tp"),
        by="10_planner.memory"),
    falling(15, "batch 32", "tp", 4,
            "With a sequence for each replica the optimizer is a fifth of the step, and tp 4 "
            "halves it. The text speaks of larger batches."),
    falling(15, "batch 128", "tp", 4),
    falling(15, "batch 512", "tp", 4),
    Row("5.4.3", "dp alone has no more GPUs than sequences: GPT-3's batch", 1536, most_of_dp_alone,
        "GPUs", by="10_planner.misfit"),
    of_figure(16, 91, 0.5, 32, 15360, 128),
    highest(16, "batch 128", "micro-batch", 2),
    highest(16, "batch 512", "micro-batch", 2,
            "Here 4 is faster than 2 by less than 2%, and so near no planner knows."),
    Row("1", "the right micro-batch gains up to 15%: figure 16, batch 512", 0.15,
        lambda: faster_with_micro_batches(16, "batch 512", None) - 1, "%", 0.005,
        HERE + "figure_16", GAIN,
        "The planner counts neither the start of a kernel nor what small matmuls lose beside their "
        "FLOPs and bytes. How much these took is not told."),
    of_figure(17, 145, 1, 80, 12288, 96),
    gain(17, "recomputation: up to 33% less speed, batch 1", -0.33, "recomputed", "nothing again",
         1, "A forward more takes a third more time, and that is a quarter less speed."),
    Row("figure 17", "without it, batch 16 and more do not fit (0)", 0,
        lambda: megatron.fits(ten(), *megatron.run_of_17(ten(), "none"), 16),
        by="10_planner.memory",
        why="1f1b keeps 16 micro-batches of any larger batch: the planner finds room for them, and "
            "it knows bytes within a factor of 1.25, which would be too many."),
    Row("figure 17", "batch 256 over the best without it, if that is 8: up to 2", 2,
        lambda: figure(17)["recomputed"][256] / figure(17)["nothing again"][8], "times", 0.05,
        HERE + "figure_17", RATIO),
    gain(18, "scatter/gather gains up to 11%: largest batch, 60", 0.11, "scatter/gather",
         "whole messages", 60,
         "A whole message leaves a card at 19.5 GB/s here, as fitted on ZeRO-3's gathers; at 14 it "
         "would be 11%."),
)


# ----------------------------------------------------------------- bandwidth, checkpoints, appendix

def bytes_of_trillion():
    return megatron.bytes_of_checkpoint(ten(), ten().MODELS["1t"])


def forward_flops():
    """Of a layer of GPT-3 and a sequence: a quarter of what a layer more adds to a step."""
    model = ten().MODELS["gpt3"]
    more, less = (ten().step_flops(ten().gpt(layers, model.dim, model.heads), 1, recompute="full")
                  for layers in (97, 96))
    return (more - less) / 4


OTHERS = (
    Row("5.9", "bisection of pipelines, the trillion on 3,072", 892e9,
        lambda: megatron.bandwidth_of_pipelines(ten(), 6, 8, 64), "B/s", 0.5e9,
        HERE + "bandwidth_of_pipelines", RATIO),
    Row("5.9", "bisection of all_reduces among its replicas", 12.9e12,
        lambda: megatron.bandwidth_of_replicas(ten(), 6, 8, 64), "B/s", 0.05e12,
        HERE + "bandwidth_of_replicas", RATIO,
        "The text does not say how it counts. In one direction 512 rings would need 25.2 GB/s of "
        "each card, which has 25; in both, 12.6, and the planner has 19.5."),
    Row("5.10", "a checkpoint of the trillion: 2 + 12 bytes each", 13.8e12, bytes_of_trillion, "B",
        0.05e12, HERE + "bytes_of_checkpoint", RATIO),
    Row("5.10", "to load it at 1 TB/s", None, lambda: bytes_of_trillion() / 1e12, "s",
        by=HERE + "bytes_of_checkpoint"),
    Row("5.10", "to save it at 273 GB/s", None, lambda: bytes_of_trillion() / 273e9, "s",
        by=HERE + "bytes_of_checkpoint"),
    Row("7", "months of its training: around 3", 3,
        lambda: megatron.equation_4(TRILLION, 450e9, 3072, 163e12) / 365 * 12, "months", 0.5,
        HERE + "equation_4"),
    Row("appendix", "forward of a layer, 24·B·s·h² + 4·B·s²·h: GPT-3, B 1",
        24 * 2048 * 12288**2 + 4 * 2048**2 * 12288, forward_flops, "FLOP", 1e6,
        "10_planner.step_flops"),
)

ROWS = (*SECTIONS_1_TO_4, *THROUGHPUT, *FIGURES, *OTHERS)
LEFT_OUT = (
    "figures 1 and 2, and 36% of the peak for another system's trillion: sizes of others' models "
    "over the years, a drawing, and a run of which nothing else is told",
    "5.8: fused kernels gain 19% and 11%, but neither batch nor number of GPUs is told, nor which "
    "kernels ran before",
)
