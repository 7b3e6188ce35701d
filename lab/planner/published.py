"""What was published, beside what chapter 10 predicts.

    python 10_planner.py --published

Rows: layers, dim, heads, tp, pp, v, GPUs, batch, micro-batch; then what was measured: TFLOP/s of a
GPU, or seconds of a step. All models have sequences of 2,048 tokens, a vocabulary of 51,200 and
dropout; all ran on A100s. Micro-batches and v of table 1 are those of the run scripts that were
published with it. ten: chapter 10's module, whichever is held to them.
"""

import functools
import itertools
from dataclasses import replace

from lab.planner import mixtures

CONSTANT = 146          # TFLOP/s: what fits table 1 best, if it were the same for all

TABLE_1 = """
    24 2304 24 1 1 1 32 512 16 137
    30 3072 32 2 1 1 64 512 16 138
    36 4096 32 4 1 1 128 512 16 142
    40 6144 48 8 1 1 256 1024 8 135
    48 8192 64 8 2 1 512 1536 4 138
    60 10240 80 8 4 3 1024 1792 2 140
    80 12288 96 8 8 2 1536 2304 2 148
    96 16384 128 8 16 2 1920 2160 1 155
    105 20480 128 8 35 3 2520 2520 1 163
    128 25600 160 8 64 1 3072 3072 1 163"""
TABLE_2_PTD = """
    96 12288 96 8 12 1 384 1536 1 153
    96 12288 96 8 12 1 768 1536 1 149
    96 12288 96 8 12 1 1536 1536 1 141
    105 20480 128 8 35 1 560 2240 1 171
    105 20480 128 8 35 1 1120 2240 1 167
    105 20480 128 8 35 1 2240 2240 1 159"""
TABLE_2_ZERO_3 = """
    96 12288 96 1 1 1 384 1536 4 144
    96 12288 96 1 1 1 768 1536 2 88
    96 12288 96 1 1 1 1536 1536 1 44
    105 20480 128 1 1 1 640 2560 4 138
    105 20480 128 1 1 1 1120 2240 2 98
    105 20480 128 1 1 1 2240 2240 1 48"""
TABLE_5_FULL = """
    48 6144 64 8 1 1 8 4 4 1.42
    96 12288 96 8 8 3 64 64 1 18.13
    105 20480 128 8 35 3 280 280 1 49.05
    128 25600 160 8 64 1 512 512 1 94.42"""
TABLE_5_SELECTIVE = """
    48 6144 64 8 1 1 8 4 4 1.10
    96 12288 96 8 8 3 64 64 1 13.75
    105 20480 128 8 35 3 280 280 1 37.83
    128 25600 160 8 64 1 512 512 1 71.49"""

# GPUs, batch, sequence, cp: then TFLOP/s of a GPU, with the causal half of attention's scores. All
# have tp 8, pp 16, FSDP that shards gradients, no recomputation, and must fit on 80 GB. Not
# published: v (here a slice is a layer, as its first is the embedding alone), which tensors are
# freed, and how often gradients are sent. These are sums of several micro-batches in float32, as
# 3.3.2 says, and its schedule has runs of micro-batches for a slice: here each run sends its sum
# (`sums_runs`).
LLAMA_3 = """
    8192 2048 8192 1 430
    16384 2048 8192 1 400
    16384 128 131072 16 380"""
ASSUMED = [("SwiGLU's product is freed", "swiglu_kept", 3),
           ("gradients of a run of micro-batches are sent as one sum", "sums_runs", False)]

# Where they are from, what of the planner was fitted on them, the software, the rest of the layout.
# And how far off the planner may be, in the mean and at most.
GOALS = {"table 1": (0.02, 0.05), "table 2, PTD": (0.04, 0.10), "table 2, ZeRO-3": (0.07, 0.15),
         "table 5, full": (0.04, 0.10), "table 5, selective": (0.04, 0.10),
         "Llama 3": (0.02, 0.04)}
LEFT_OUT = 0.025        # the mean of table 1, each row left out of the fit
PUBLISHED = {
    "table 1": ("Narayanan et al. 2021, table 1: HBM and NVLINK are fitted on it", TABLE_1,
                "megatron-2021", {}),
    "table 2, PTD": ("the same, table 2, PTD: nothing is fitted", TABLE_2_PTD, "megatron-2021", {}),
    "table 2, ZeRO-3": ("the same, ZeRO-3: NIC is fitted on it, and what hides", TABLE_2_ZERO_3,
                        "deepspeed-2021", {"zero": 3}),
    "table 5, full": ("Korthikanti et al. 2022, table 5, seconds, full recomputation: nothing is "
                      "fitted", TABLE_5_FULL, "megatron-2022", {}),
    "table 5, selective": ("the same, selective recomputation, sequence parallelism",
                           TABLE_5_SELECTIVE, "megatron-2022",
                           {"sp": True, "recompute": "selective"}),
}


def rows(ten, name, hbm=None, nvlink=None):
    """Yield (row, published, predicted, predicted by a constant rate), all in the table's unit.
    hbm, nvlink: in place of the planner's constants."""
    _, table, stack, more = PUBLISHED[name]
    for line in table.strip().splitlines():
        *row, told = line.split()
        layers, dim, heads, tp, pp, v, gpus, batch, micro_batch = map(int, row)
        model, software = ten.gpt(layers, dim, heads), ten.SOFTWARE[stack]
        if name == "table 1" and pp == 1:               # torch's own dp, which overlaps
            software = replace(software, dp_hidden=0.9)
        layout = ten.Layout(gpus // (tp * pp), tp, 1, pp, v, **{
            "sp": False, "recompute": "full", "micro_batch": micro_batch} | more)
        cluster = ten.CLUSTERS["a100"]
        cluster = replace(cluster, hbm=cluster.hbm * (hbm or ten.HBM) / ten.HBM,
                          nvlink=cluster.nvlink * (nvlink or ten.NVLINK) / ten.NVLINK)
        seconds = sum(ten.step_seconds(model, layout, cluster, software, batch).values())
        tflop = ten.step_flops(model, batch, recompute=layout.recompute) / gpus / 1e12
        if name.startswith("table 5"):
            yield " ".join(row), float(told), seconds, tflop / CONSTANT
        else:
            yield " ".join(row), float(told), tflop / seconds, CONSTANT


def llama_3(ten, software=None, zero=2):
    """Yield (row, published, predicted, GB of a GPU), of a Llama of 405 G parameters."""
    h100, software = ten.CLUSTERS["h100"], software or ten.SOFTWARE["llama3"]
    for line in LLAMA_3.strip().splitlines():
        gpus, batch, seq, cp, told = map(int, line.split())
        model = replace(ten.MODELS["405b"], seq=seq)
        layout = ten.Layout(gpus // (8 * 16 * cp), 8, cp, 16, 8, zero=zero)
        plan = ten.Plan(model, layout, h100, software, gpus, batch)
        rate = ten.step_flops(model, batch, "causal") / plan.total / gpus
        yield line.rpartition(" ")[0].strip(), told, rate / 1e12, plan.bytes / 1e9


def errors(rows):
    """Of the predictions, and of the constant rate, as shares of what was published."""
    rows = list(rows)
    return ([ours / told - 1 for _, told, ours, _ in rows],
            [constant / told - 1 for _, told, _, constant in rows])


def mean_and_largest(errors):
    sizes = [abs(error) for error in errors]
    return sum(sizes) / len(sizes), max(sizes)


def in_words(errors):
    mean, largest = mean_and_largest(errors)
    return f"mean {mean:.1%}, largest {largest:.1%}"


def beyond(ten):
    """The tables of which the planner is further off than it may be."""
    found = {name: mean_and_largest(errors(rows(ten, name))[0]) for name in PUBLISHED}
    found |= {name: mean_and_largest(mixtures.errors(ten, name)) for name in mixtures.PUBLISHED}
    llamas = [*llama_3(ten)]
    found["Llama 3"] = mean_and_largest([ours / told - 1 for _, told, ours, _ in llamas])
    goals = GOALS | mixtures.GOALS
    wrong = [name for name, (mean, largest) in found.items()
             if mean > goals[name][0] or largest > goals[name][1]]
    wrong += ["Llama 3, bytes"] * any(size > 80 * ten.ROOM for *_, size in llamas)
    left_out, _ = mean_and_largest(leave_one_out(ten))
    return wrong + ["table 1, left out"] * (left_out > LEFT_OUT)


def tables(ten):
    """Yield the lines of all tables."""
    for name, (source, *_) in PUBLISHED.items():
        found = list(rows(ten, name))
        yield source
        yield f"  {'layers dim heads tp pp v GPUs batch micro':<42}{'published':>10}{'planner':>9}"
        for row, told, ours, _ in found:
            yield f"  {row:<42}{told:10.4g}{ours:9.4g}{ours / told - 1:+8.1%}"
        ours, constant = errors(found)
        mean, largest = GOALS[name]
        yield (f"  errors: {in_words(ours)} (a constant rate: {in_words(constant)}); to be at most "
               f"{mean:.0%} and {largest:.0%}")
    yield (f"table 1, each row predicted by constants fitted on the other nine: "
           f"{in_words(leave_one_out(ten))}")
    yield "Llama Team 2024, table 4: nothing is fitted, but two things are assumed"
    yield f"  {'GPUs batch sequence cp':<42}{'published':>10}{'planner':>9}"
    for row, told, ours, size in llama_3(ten):
        yield f"  {row:<42}{told:10.4g}{ours:9.4g}{ours / told - 1:+8.1%}{size:7.0f} GB of 80"
    mean, largest = GOALS["Llama 3"]
    yield f"  errors: to be at most {mean:.0%} and {largest:.0%}"
    for what, field, value in ASSUMED:
        found = [*llama_3(ten, replace(ten.SOFTWARE["llama3"], **{field: value}))]
        rates, sizes = (", ".join(f"{row[i]:.0f}" for row in found) for i in (2, 3))
        yield f"  {what}: else {rates} TFLOP/s and {sizes} GB"
    yield "\nmixtures of experts: nothing is fitted on these"
    for name, (source, *_) in mixtures.PUBLISHED.items():
        yield source
        yield f"  {mixtures.HEAD:<58}{'published':>10}{'planner':>9}"
        for row, told, ours in mixtures.rows(ten, name):
            yield f"  {row:<58}{told:10.4g}{ours:9.4g}{ours / told - 1:+8.1%}"
        mean, largest = mixtures.GOALS[name]
        yield (f"  errors: {in_words(mixtures.errors(ten, name))}; to be at most {mean:.0%} and "
               f"{largest:.0%}")
    every = [error for name in mixtures.PUBLISHED for error in mixtures.errors(ten, name)]
    yield f"{sum(abs(error) <= 0.2 for error in every)} of {len(every)} rows are within 20%"
    wrong = beyond(ten)
    yield f"✗ further off than may be: {'; '.join(wrong)}" if wrong else "✓ as near as it must be"


def fit(ten, without=None, start=(0.685, 0.584)):
    """HBM and NVLINK with the least squares of table 1's errors, but for a row: by small steps.
    They are shares, from 0.1 to 1."""
    def squares(constants):
        ours, _ = errors(rows(ten, "table 1", *constants))
        return sum(error**2 for i, error in enumerate(ours) if i != without)

    best, step = list(start), 0.02
    while step > 1e-3:
        near = [[min(1, max(0.1, x + move)) for x, move in zip(best, moves)]
                for moves in itertools.product((-step, 0, step), repeat=2)]
        better = min(near, key=squares)
        if better == best:
            step /= 2
        best = better
    return best


@functools.cache
def leave_one_out(ten):
    """The error of each row of table 1, if it had not been there for the fit."""
    return [errors(rows(ten, "table 1", *fit(ten, without=i)))[0][i] for i in range(10)]
