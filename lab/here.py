"""How long a step of chapters 01 to 09 takes on this machine: measured, and as chapter 10 predicts.

    python -m lab.here [--ranks 4] [--json F]

First it calibrates: on as many ranks as will run, all at the same time, since they share processors
and memory, it measures a matmul, an addition, and all_reduces of several sizes, to which α and B of
chapter 00's model are fitted. These rates are the planner's cluster. Then each chapter runs bare of
the bench's comparisons, and its median step stands beside the predicted one.

The planner counts 2 bytes a number, and here they have 4: so all rates in bytes are halved. It
knows nothing of what Python and an operator's start take, nor of caches; and a rank that waits
leaves its processor to others, which on a GPU it does not. With a GPU, chapter 01 alone runs.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import common
from common import environment
from lab import speed
from lab.bench import anatomy, ranks
from lab.bench.anatomy import planner
from lab.bench.formulas import WATCHED_STEPS
from lab.cli import commands, refusals
from lab.cli.words import count


class Task(NamedTuple):
    """What chapters train: flags of the model, the sequences of a step and, at the most, of a
    micro-batch; chapter 08's experts."""

    model: dict
    batch: int
    micro_batch: int
    experts: int


TASK = Task({"layers": 8, "dim": 384, "heads": 8, "kv-heads": 4, "seq": 128, "vocab": 1024},
            batch=8, micro_batch=2, experts=4)
STEPS = WATCHED_STEPS + 3
SIZES = [4**k for k in range(1, 12)]                    # bytes of an all_reduce: 4 B to 4 MB
BYTES = 4 / 2                                           # of a number here, over the planner's

# Of each chapter: its flags, and the degrees of its layout on n ranks.
RUNS = {
    "01_single_gpu": ("", lambda n: {}),
    "02_data_parallel": ("--variant bucket", lambda n: {"dp": n}),
    "03_zero": ("--variant zero3", lambda n: {"dp": n, "zero": 3}),
    "04_tensor_parallel": ("", lambda n: {"tp": n, "sp": False}),
    "05_sequence_parallel": ("--variant kept", lambda n: {"tp": n}),
    "06_context_parallel": ("--variant gather", lambda n: {"cp": n}),
    "07_pipeline_parallel": ("--variant 1f1b", lambda n: {"pp": n}),
    "08_expert_parallel": ("--experts {experts} --top-k 2", lambda n: {"dp": n, "ep": n}),
    "09_5d": ("--dp 2 --tp 2 --pp {rest}", lambda n: {"dp": 2, "tp": 2, "pp": n // 4}),
}


# ------------------------------------------------------------------------------------- calibration

def seconds_of(function, device, calls):
    """Of a call, on the slowest rank: the median of five times so many in a row, since ranks that
    share a processor have it in turns. All begin at the same time."""
    many = lambda: [function() for _ in range(calls)]
    return statistics.median(speed.slowest(many, device) for _ in range(5)) / calls


def measure_rates(device, dtype):
    """On a rank: {"flops": of a large matmul, "hbm": bytes/s of an addition, "all_reduce": {bytes:
    seconds}}. Communication: the all_reduces, and some of one number."""
    side = 4096 if device.type == "cuda" else 768
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    x, y = (torch.randn(2**22 if device.type == "cpu" else 2**28, device=device) for _ in range(2))
    flops = 2 * side**3 / seconds_of(lambda: a @ b, device, 20)
    hbm = 3 * x.nbytes / seconds_of(lambda: torch.add(x, y, out=y), device, 20)
    times = {}
    for size in SIZES if dist.get_world_size() > 1 else []:
        numbers = torch.zeros(size // 4, device=device)
        times[size] = seconds_of(lambda: dist.all_reduce(numbers), device, 10)  # noqa: B023
    return {"flops": flops, "hbm": hbm, "all_reduce": times}


def cluster_of(rates, n):
    """The planner's Cluster with these rates, and α and B of a ring's rounds, fitted."""
    ten = planner()
    alpha, beta = 0.0, 0.0
    if n > 1:
        times = {int(size): seconds for size, seconds in rates["all_reduce"].items()}
        rounds = lambda name, size: (2 * (n - 1), 2 * (n - 1) / n * size)
        alpha, beta = speed.fit({"all_reduce": times}, rounds)
    link = 1 / beta if beta else 1e30                       # no size made a difference
    return ten.Cluster(
        peak=rates["flops"], matmul=1, attention=1, hbm=rates["hbm"] / BYTES / ten.HBM,
        memory=1e30, nvlink=link / BYTES / ten.NVLINK, nic=1, per_node=n, alpha=alpha)


def calibrated(n):
    """The cluster of n ranks that calibrate at the same time."""
    return cluster_of(json.loads(on_ranks(n, "-m", "lab.here").splitlines()[-1]), n)


def calibrate():
    """The program of a calibrating rank: rank 0 prints the rates as JSON."""
    torch.set_num_threads(1)
    args = argparse.Namespace(device="auto", dtype="float32", timeout=None)
    device = common.join_ranks(args, environment("RANK", 0))
    rates = measure_rates(device, torch.float32)
    if dist.get_rank() == 0:
        print(json.dumps(rates))
    dist.destroy_process_group()
    return 0


# ------------------------------------------------------------------------------------- the chapters

def on_ranks(n, *command):
    """Run it on n ranks: what it has printed. Leaves with status 1 where it fails."""
    statuses, printed, errors = ranks.run(*command, world=n, timeout=None)
    if any(statuses):
        refusals.fail(f"{' '.join(command)} has failed: {errors.strip()[-500:]}", status=1)
    return printed


def flags_of(chapter, n, device, task=TASK):
    """What the chapter runs with, on n ranks."""
    flags = RUNS[chapter][0].format(rest=n // 4, experts=task.experts).split()
    model = [f"--{name}={value}" for name, value in task.model.items()]
    sequences = [f"--batch={task.batch}", f"--micro-batch={micro_batch(chapter, n, task)}"]
    return [*flags, *model, *sequences, f"--steps={STEPS}", "--no-verify", f"--device={device}"]


def recorded(chapter, n, device, task=TASK):
    """The JSON of a run of the chapter on n ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        on_ranks(n, f"{chapter}.py", *flags_of(chapter, n, device, task), f"--json={file}")
        return json.loads(file.read_text())


def seconds_of_a_step(run):
    """The median of a run's steps, without those that are watched."""
    return statistics.median(run["step_seconds"][WATCHED_STEPS:])


def layout_of(chapter, n, task=TASK):
    """The degrees of the planner's layout. No rank has less than an expert."""
    layout = RUNS[chapter][1](n)
    return layout | {"ep": math.gcd(n, task.experts)} if "ep" in layout else layout


def micro_batch(chapter, n, task=TASK):
    """Sequences of a micro-batch: one where a pipeline is to be full, or where ranks share them."""
    layout = layout_of(chapter, n, task)
    return 1 if "pp" in layout else max(1, min(task.micro_batch, task.batch // layout.get("dp", 1)))


def planned(chapter, n, task=TASK):
    """The model, the layout and the software of that run, as the planner knows them."""
    ten = planner()
    shape = {name.replace("-", "_"): value for name, value in task.model.items()}
    model = anatomy.as_planned(common.Config(**shape, tie=False, attention="plain"))
    if chapter.startswith("08"):
        model = replace(model, experts=task.experts, top_k=2)
    layout = ten.Layout(micro_batch=micro_batch(chapter, n, task), **layout_of(chapter, n, task))
    # A gradient is one number, as here; and what is sent hides behind nothing, since ranks send by
    # the processors that they compute with.
    return model, layout, replace(ten.SOFTWARE["ours"], gradient_bytes=2, sent_bytes=2,
                                 dp_hidden=0)


def predicted_seconds(chapter, n, cluster, task=TASK):
    """{cause: seconds} of a step."""
    model, layout, software = planned(chapter, n, task)
    return planner().step_seconds(model, layout, cluster, software, task.batch)


def compare(n, device):
    """Yield (chapter, ranks, layout in words, measured seconds, predicted {cause: seconds})."""
    clusters = {}
    for chapter in RUNS if device == "cpu" else ["01_single_gpu"]:
        world = 1 if chapter.startswith("01") else n
        if world not in clusters:
            clusters[world] = calibrated(world)
            yield clusters[world]
        degrees = layout_of(chapter, world) | {"micro-batch": micro_batch(chapter, world)}
        layout = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items()
                           if axis != "sp" and degree > 1)
        measured = seconds_of_a_step(recorded(chapter, world, device))
        yield (chapter, world, layout, measured,
               predicted_seconds(chapter, world, clusters[world]))


# --------------------------------------------------------------------------------- the command line

def in_words(cluster):
    """A calibrated cluster's rates, as they are here."""
    ten = planner()
    line = (f"{count(cluster.per_node, 'rank')} at a time: {cluster.peak / 1e9:.3g} GFLOP/s a rank,"
            f" memory {cluster.hbm * ten.HBM * BYTES / 1e9:.3g} GB/s")
    if cluster.per_node > 1:
        line += (f", all_reduce α {speed.in_time(cluster.alpha)}, "
                 f"B {cluster.nvlink * ten.NVLINK * BYTES / 1e9:.3g} GB/s")
    return line


def row(chapter, ranks, layout, measured, predicted):
    total = sum(predicted.values())
    times = f"{1e3 * measured:>7.0f} ms{1e3 * total:>7.0f} ms{total / measured - 1:>+6.0%}"
    return f"{chapter:<21}{ranks:>3}  {layout:<27}{times}  {planner().largest(predicted, 3)}"


def parse(argv):
    parser = commands.Parser("-m lab.here", description=__doc__)
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4)
    parser.add_argument("--json", type=commands.output("here.json"), help="write the table")
    return parser.parse_args(argv)


def main(argv=None):
    if "RANK" in os.environ:
        return calibrate()
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    device, rows = "cuda" if torch.cuda.is_available() else "cpu", []
    shape = ", ".join(f"{name} {value}" for name, value in TASK.model.items())
    print(f"{shape}, batch {TASK.batch}, float32, AdamW, on {device}")
    for found in compare(args.ranks, device):
        if isinstance(found, tuple):
            rows.append(found)
            print(row(*found), flush=True)
        else:
            print(in_words(found), flush=True)
    errors = [abs(sum(predicted.values()) / measured - 1) for *_, measured, predicted in rows]
    print(f"mean error {statistics.mean(errors):.0%}, largest {max(errors):.0%}")
    if args.json:
        keys = "chapter", "ranks", "layout", "measured", "predicted"
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([dict(zip(keys, found)) for found in rows], indent=1))
    return 0


if __name__ == "__main__":
    commands.program(main)
