"""Times pairs of runs of a chapter: by hand against PyTorch's own, one technique against another.

Both runs of a pair go on in the same processes, a step of one in turn with a step of the other, so
that a noisy machine is noisy for both. The table gives the median step of each, the range of its
middle half, and the ratio of the medians: at 1.00 or less, the first side is no slower. The share
that follows is what the collectives of the first side's step take when nothing else runs (as many
calls, of the mean size, one after the other), over its step: how much there is to hide. The last
column is the processor time of a step on the rank that takes most, for each side.

    python benchmarks/chapters.py [--steps N] [--only 01] [--record] [-- flags for every run]

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import datetime
import functools
import importlib
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import results  # noqa: E402  (after the path to it)

import common  # noqa: E402
from lab import report  # noqa: E402

SETUP_STEPS = 3         # the first steps allocate, and are metered
# Shapes on a CPU (data parallel: a sequence per rank, and enough parameters for communication to be
# a third of the step or more), and where every rank has a GPU.
ON_GPUS = "--layers=12 --dim=1024 --heads=16 --kv-heads=16 --seq=1024 --vocab=50304 --batch=16"
SHAPES = {
    "cpu": {"one": "", "data_parallel": "--dim=256 --seq=16 --batch=4", "buckets": "--bucket-mb=4",
            "cut": "--dim=256 --seq=64 --batch=4",
            "long": "--layers=1 --dim=64 --seq=1024 --batch=1"},    # attention is most of the step
    "cuda": {"one": ON_GPUS, "data_parallel": ON_GPUS, "buckets": "--bucket-mb=25", "cut": ON_GPUS,
             "long": f"{ON_GPUS} --seq=32768 --batch=1 --dtype=bfloat16 --attention=sdpa"},
}
PAIRS = [               # chapter, ranks, flags of both sides, one side, the other
    ("01_single_gpu", 1, "{one} --attention=sdpa", "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "{one} --attention=sdpa --precision=bf16",
     "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "{one}", "--attention=sdpa", "--attention=plain"),
    ("01_single_gpu", 1, "{one}", "--recompute=full", "--recompute=none"),
    ("02_data_parallel", 4, "{data_parallel} {buckets}", "--variant=bucket", "--variant=torch"),
    ("02_data_parallel", 4, "{data_parallel}", "--variant=overlap", "--variant=torch {buckets}"),
    ("02_data_parallel", 4, "{data_parallel}", "--variant=naive", "--variant=torch {buckets}"),
    ("03_zero", 4, "{cut}", "--variant=zero1", "--variant=torch --stage=1"),
    ("03_zero", 4, "{cut}", "--variant=zero2", "--variant=torch --stage=2"),
    ("03_zero", 4, "{cut}", "--variant=zero3", "--variant=torch --stage=3"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=megatron", "--variant=torch"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=overlap", "--variant=torch"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=overlap", "--variant=megatron"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=megatron", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=kept", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=ring", "--variant=torch"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=ring"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=gather"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=ulysses"),
    ("06_context_parallel", 1, "{long}", "--variant=zigzag", "--variant=gather"),
]

# ------------------------------------------------------------------------------ on every rank


def alternate(chapter, sides):
    """Run a chapter with the flags of each side, a thread for each, of which one at a time goes on:
    until its next step begins. Returns the lab.report.Run of each side, and the processor seconds
    of each one's steps."""
    module, runs, finished = importlib.import_module(chapter), {}, set()
    processor = [], []
    own = getattr(module, "flags", lambda parser: None)
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    class TakesTurns(report.Run):
        @contextlib.contextmanager
        def measure(self):
            me = int(threading.current_thread().name)
            runs[me] = self
            if 1 - me not in finished:
                turns[1 - me].release()
                turns[me].acquire()
            start = time.thread_time()                  # what waits takes none
            with super().measure():
                yield
            processor[me].append(time.thread_time() - start)

    def play(me):
        turns[me].acquire()
        try:
            common.main(module.__file__, module.__doc__, module.VARIANTS, module.requires, own,
                        sides[me])
        except BaseException:
            traceback.print_exc()
            os._exit(1)                                 # the other side would wait for ever
        finished.add(me)
        turns[1 - me].release()

    with contextlib.redirect_stdout(io.StringIO()):
        report.Run = TakesTurns
        threads = [threading.Thread(target=play, args=(i,), name=str(i)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return (runs[0], runs[1]), processor


def communication_alone(run):
    """The median milliseconds of the collectives of a step, with nothing else going on."""
    device, n, collectives = run.device, run.world, []
    if device.type == "cuda":
        torch.cuda.set_device(device)                   # the runs' threads have set only their own
    for op, sent in run.comm.total.items():
        full = torch.zeros(max(1, sent["bytes"] // sent["calls"] // 4 // n) * n, device=device)
        part = full.chunk(n)[run.rank].clone()
        collective = {
            "all_reduce": functools.partial(dist.all_reduce, full),
            "all_gather": functools.partial(common.all_gather, full, part),
            "reduce_scatter": functools.partial(common.reduce_scatter, part, full),
            "send": functools.partial(hop, full, full.clone()),
            "all_to_all": functools.partial(dist.all_to_all_single, full.clone(), full),
        }[op]
        collectives += [collective] * sent["calls"]
    seconds = []
    for _ in range(15):
        dist.barrier()
        start = run.now()
        for collective in collectives:
            collective()
        seconds.append(run.now() - start)
    return 1e3 * statistics.median(seconds[SETUP_STEPS:])


def hop(sent, received):
    """To the next rank, from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for handle in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (rank + 1) % n),
                                          dist.P2POp(dist.irecv, received, (rank - 1) % n)]):
        handle.wait()


def play_pair(pair):
    """For a rank: {ms: the steps of each side, alone: milliseconds of the first side's sending,
    longest: for each side the processor milliseconds of a step on the rank that takes most}."""
    runs, processor = alternate(pair["chapter"], pair["sides"])
    milliseconds = [[1e3 * s for s in run.seconds[SETUP_STEPS:]] for run in runs]
    mine = [1e3 * statistics.median(seconds[SETUP_STEPS:]) for seconds in processor]
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    longest = [max(of_side) for of_side in zip(*everyones)]
    return {"ms": milliseconds, "alone": communication_alone(runs[0]), "longest": longest}


# ------------------------------------------------------------------------------ the table


def measure(chapter, ranks, sides):
    """`play_pair` on so many ranks, in processes of their own: rank 0's answer."""
    pair = {"chapter": chapter, "sides": [[*side, "--no-verify"] for side in sides]}
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [__file__, f"--pair={json.dumps(pair)}"]
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{run.stdout}{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def filled_in(chapter, ranks, *flags):
    """A pair with the shapes of the device that its ranks will take."""
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    return chapter, ranks, *(flag.format(**SHAPES[device]) for flag in flags)


def table(pairs, steps, flags):
    """Run the pairs; yields the lines of the table, in Markdown."""
    machine = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    yield (f"{datetime.date.today()}, {machine}, torch {torch.__version__}, Python "
           f"{platform.python_version()}, {steps} steps of each side in turn, flags: "
           f"{' '.join(flags) or 'none'}\n")
    yield ("| chapter | ranks | both sides | one side | ms | other side | ms | ratio "
           "| communication alone | longest rank's processor ms |")
    yield "|" + " --- |" * 10
    for chapter, ranks, both, *sides in (filled_in(*pair) for pair in pairs):
        every = [f"--steps={steps}", *both.split(), *flags]
        measured = measure(chapter, ranks, [[*every, *side.split()] for side in sides])
        medians, cells = [], ""
        for side, ms in zip(sides, measured["ms"]):
            low, median, high = statistics.quantiles(ms, n=4)
            medians.append(median)
            cells += f"{side} | {median:.1f} ({low:.1f} to {high:.1f}) | "
        yield (f"| {chapter} | {ranks} | {both} | {cells}{medians[0] / medians[1]:.2f} | "
               f"{measured['alone'] / medians[0]:.0%} | "
               f"{' and '.join(f'{ms:.1f}' for ms in measured['longest'])} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each side")
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    parser.add_argument("--pair", help=argparse.SUPPRESS)       # for the ranks of `measure`
    args = parser.parse_args()
    if args.pair:
        answer = play_pair(json.loads(args.pair))
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
        dist.barrier()
        os._exit(0)                                     # as common.launch does, and why
    if args.steps < SETUP_STEPS + 4:
        parser.error(f"--steps {args.steps} are too few; {SETUP_STEPS + 4} would work")

    lines = []
    pairs = [pair for pair in PAIRS if pair[0].startswith(args.only)]
    for line in table(pairs, args.steps, args.flags):
        print(line, flush=True)
        lines.append(line)
    if args.record:
        results.record(f"chapter {args.only}" if args.only else "chapters", lines)


if __name__ == "__main__":
    main()
