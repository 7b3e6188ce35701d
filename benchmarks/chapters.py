"""Times pairs of runs of a chapter: by hand against PyTorch's own, one technique against another.

The two sides of a pair run in turn, several rounds, so that a noisy machine is noisy for both. A
round's time is the median of its steps; the table gives the median and the range of the rounds, and
the ratio of the medians: at 1.00 or less, the first side is no slower. The share in the last column
is what the collectives of the first side's step take when nothing else runs (as many calls, of the
mean size, one after the other), over its step: how much there is to hide.

    python benchmarks/chapters.py [--rounds N] [--only 01] [--record] [-- flags for every run]

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)

# glibc hands freed memory back to the system beyond a threshold that grows with the largest block
# freed so far: whichever side happens to free a large one early would be some 6% faster.
ALIKE = {"OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "500000000",
         "MALLOC_MMAP_THRESHOLD_": "30000000"}
SETUP_STEPS = 3         # the first steps allocate, are metered and drawn
# A sequence per rank, and enough parameters for communication to be a third of the step or more.
DATA_PARALLEL = "--dim=256 --seq=16 --batch=4 --bucket-mb=4"
SMALL = "--dim=256 --seq=64 --batch=4"
PAIRS = [               # chapter, ranks, flags of both sides, one side, the other
    ("01_single_gpu", 1, "--attention=sdpa", "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "--attention=sdpa --precision=bf16", "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "", "--attention=sdpa", "--attention=plain"),
    ("01_single_gpu", 1, "", "--recompute=full", "--recompute=none"),
    ("02_data_parallel", 4, DATA_PARALLEL, "--variant=bucket", "--variant=torch"),
    ("02_data_parallel", 4, DATA_PARALLEL, "--variant=overlap", "--variant=torch"),
    ("02_data_parallel", 4, DATA_PARALLEL, "--variant=naive", "--variant=torch"),
    ("03_zero", 4, SMALL, "--variant=zero1", "--variant=torch --stage=1"),
    ("03_zero", 4, SMALL, "--variant=zero2", "--variant=torch --stage=2"),
    ("03_zero", 4, SMALL, "--variant=zero3", "--variant=torch --stage=3"),
    ("04_tensor_parallel", 4, SMALL, "--variant=megatron", "--variant=torch"),
    ("04_tensor_parallel", 4, SMALL, "--variant=overlap", "--variant=torch"),
    ("04_tensor_parallel", 4, SMALL, "--variant=overlap", "--variant=megatron"),
    ("05_sequence_parallel", 4, SMALL, "--variant=megatron", "--variant=torch"),
    ("05_sequence_parallel", 4, SMALL, "--no-regather", "--variant=torch"),
    ("05_sequence_parallel", 4, SMALL, "--variant=ring", "--variant=torch"),
]


def launch(ranks, script, *flags):
    """Run a script on so many ranks, in processes of its own. Returns what it printed."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command += [script, *flags]
    environment = os.environ | (ALIKE if ranks > 1 else {})
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def measure(chapter, ranks, flags, alone=False):
    """A run of a chapter: the median milliseconds of a step; and of what it sends, alone."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "run.json")
        launch(ranks, ROOT / f"{chapter}.py", "--steps=30", "--no-verify", *flags,
               f"--json={record}", f"--plot={folder}/figure.png")
        run = json.loads(record.read_text())
        sending = alone and run["comm"] and float(launch(ranks, __file__, f"--send={record}"))
    return 1e3 * statistics.median(run["step_seconds"][SETUP_STEPS:]), sending or 0.0


def send(record):
    """On each rank: the collectives of a recorded run's step and nothing else. Returns the median
    milliseconds."""
    run = json.loads(Path(record).read_text())
    device = torch.device(run["device"].split(":")[0], int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(run["backend"])
    n, collectives = dist.get_world_size(), []
    for op, sent in run["comm"].items():
        full = torch.zeros(max(1, sent["bytes"] // sent["calls"] // 4 // n) * n, device=device)
        part = full.chunk(n)[dist.get_rank()].clone()
        collective = {
            "all_reduce": functools.partial(dist.all_reduce, full),
            "all_gather": functools.partial(common.all_gather, full, part),
            "reduce_scatter": functools.partial(common.reduce_scatter, part, full),
            "send": functools.partial(hop, full, full.clone()),
        }[op]
        collectives += [collective] * sent["calls"]
    seconds = []
    for _ in range(15):
        dist.barrier()
        start = time.perf_counter()
        for collective in collectives:
            collective()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return 1e3 * statistics.median(seconds[SETUP_STEPS:])


def hop(sent, received):
    """To the next rank, from the one before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for handle in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, (rank + 1) % n),
                                          dist.P2POp(dist.irecv, received, (rank - 1) % n)]):
        handle.wait()


def table(pairs, rounds, flags):
    """Run the pairs; yields the lines of the table, in Markdown."""
    machine = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    yield (f"{datetime.date.today()}, {machine}, torch {torch.__version__}, Python "
           f"{platform.python_version()}, {rounds} rounds, flags: {' '.join(flags) or 'none'}\n")
    yield ("| chapter | ranks | both sides | one side | ms | other side | ms | ratio "
           "| communication alone |")
    yield "|" + " --- |" * 9
    for chapter, ranks, both, *sides in pairs:
        times, shares = {side: [] for side in sides}, []
        for _, side in [(i, side) for i in range(rounds) for side in sides]:
            every = [*both.split(), *side.split(), *flags]
            step, alone = measure(chapter, ranks, every, alone=side == sides[0])
            times[side].append(step)
            shares += [alone / step] * (side == sides[0])
        one, other = (statistics.median(ms) for ms in times.values())
        cells = " | ".join(f"{side} | {statistics.median(ms):.1f} ({min(ms):.1f} to {max(ms):.1f})"
                           for side, ms in times.items())
        yield (f"| {chapter} | {ranks} | {both} | {cells} | {one / other:.2f} | "
               f"{statistics.median(shares):.0%} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    parser.add_argument("--send", help=argparse.SUPPRESS)      # for the ranks that `measure` starts
    args = parser.parse_args()
    if args.send:
        alone = send(args.send)
        print(alone) if int(os.environ["RANK"]) == 0 else None
        return
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} is not positive; 3 would work")

    pairs = [pair for pair in PAIRS if pair[0].startswith(args.only)]
    lines = ["# Measured", "", "Written by `python benchmarks/chapters.py --record`. Machines are "
             "noisy: trust the ratios, within the ranges, and not the milliseconds.", ""]
    for line in table(pairs, args.rounds, args.flags):
        print(line, flush=True)
        lines.append(line)
    if args.record:
        (ROOT / "benchmarks/RESULTS.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
