"""Times pairs of runs of a chapter: by hand against PyTorch's own, one technique against another.

Both runs of a pair go on in the same processes, a step of one in turn with a step of the other, so
that a noisy machine is noisy for both. The table gives the median step of each, the range of its
middle half, and the ratio of the medians: at 1.00 or less, the first side is no slower.

The last pair of chapter 08 is a mixture and a dense model with the same FLOPs for a token. Chapter
09's axes are each timed alone too, against the chapter that they come from.

    python benchmarks/time_chapters.py [--steps N] [--only 01] [--record] [-- flags for every run]

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402  (after the path to it)
from common import Refused  # noqa: E402
from lab import chapters as rooms  # noqa: E402
from lab import launch  # noqa: E402
from lab.run import commands, refusals, report  # noqa: E402

SETUP_STEPS = 3         # the first steps allocate, and are metered
# Shapes on a CPU (data parallel: a sequence per rank, and enough parameters for communication to be
# a third of the step or more), and where every rank has a GPU.
ON_GPUS = "--layers=12 --dim=1024 --heads=16 --kv-heads=16 --seq=1024 --vocab=50304 --batch=16"
SHAPES = {
    "cpu": {"one": "", "matmuls": "--dim=512 --batch=4 --attention=sdpa",
            "data_parallel": "--dim=256 --seq=16 --batch=4", "buckets": "--bucket-mb=4",
            "cut": "--dim=256 --seq=64 --batch=4",
            "long": "--layers=1 --dim=64 --seq=1024 --batch=1",     # attention is most of the step
            "pipeline": "--layers=8 --batch=8",         # two slices and two micro-batches for each
            "experts": "--layers=2 --dim=128 --seq=128 --batch=8",
            "dense": "--layers=2 --dim=512 --seq=128 --batch=32",
            "three_axes": "--dim=256 --seq=64 --batch=8"},
    "cuda": {"one": ON_GPUS, "matmuls": f"{ON_GPUS} --attention=sdpa", "data_parallel": ON_GPUS,
             "buckets": "--bucket-mb=25", "cut": ON_GPUS,
             "long": f"{ON_GPUS} --seq=32768 --batch=1 --dtype=bfloat16 --attention=sdpa",
             "pipeline": f"{ON_GPUS} --layers=16",
             "experts": f"{ON_GPUS} --dtype=bfloat16 --attention=sdpa",
             "dense": f"{ON_GPUS} --dtype=bfloat16 --attention=sdpa",
             "three_axes": f"{ON_GPUS} --dtype=bfloat16 --attention=sdpa"},
}
PAIRS = [               # chapter, ranks, flags of both sides, one side, [another chapter] the other
    ("01_single_gpu", 1, "{one} --attention=sdpa", "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "{one} --attention=sdpa --precision=bf16",
     "--variant=hand", "--variant=torch"),
    ("01_single_gpu", 1, "{one}", "--attention=sdpa", "--attention=plain"),
    ("01_single_gpu", 1, "{one}", "--recompute=full", "--recompute=none"),
    ("01_single_gpu", 1, "{matmuls}", "--recompute=full", "--recompute=none"),
    ("02_data_parallel", 4, "{data_parallel} {buckets}", "--variant=bucket", "--variant=torch"),
    ("02_data_parallel", 4, "{data_parallel}", "--variant=overlap", "--variant=torch {buckets}"),
    ("02_data_parallel", 4, "{data_parallel}", "--variant=naive", "--variant=torch {buckets}"),
    ("03_zero", 4, "{cut}", "--variant=zero1", "--variant=torch --stage=1"),
    ("03_zero", 4, "{cut}", "--variant=zero2", "--variant=torch --stage=2"),
    ("03_zero", 4, "{cut}", "--variant=zero3", "--variant=torch --stage=3"),
    ("03_zero", 4, "{cut} --precision=bf16", "--variant=zero3", "--variant=torch --stage=3"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=megatron", "--variant=torch"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=overlap", "--variant=torch"),
    ("04_tensor_parallel", 4, "{cut}", "--variant=overlap", "--variant=megatron"),
    ("04_tensor_parallel", 4, "{cut} --precision=bf16", "--variant=megatron", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=megatron", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=kept", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut}", "--variant=ring", "--variant=torch"),
    ("05_sequence_parallel", 4, "{cut} --precision=bf16", "--variant=megatron", "--variant=torch"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=ring"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=gather"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=ulysses"),
    ("06_context_parallel", 4, "{long}", "--variant=zigzag", "--variant=zigzag --inner=2"),
    ("06_context_parallel", 4, "{long} --seq=4096", "--documents=512", "--cut=sequence"),
    ("06_context_parallel", 4, "{long} --seq=4096 --documents=512", "--cut=document", "--inner=1"),
    ("07_pipeline_parallel", 4, "{pipeline}", "--variant=1f1b", "--variant=torch --schedule=1F1B"),
    ("07_pipeline_parallel", 4, "{pipeline}", "--variant=afab", "--variant=torch --schedule=GPipe"),
    ("07_pipeline_parallel", 4, "{pipeline}",
     "--variant=interleaved", "--variant=torch --schedule=Interleaved1F1B"),
    ("07_pipeline_parallel", 4, "{pipeline}",
     "--variant=interleaved --breadth-first", "--variant=torch --schedule=LoopedBFS"),
    ("07_pipeline_parallel", 4, "{pipeline}",           # with one slice for each rank, the same
     "--variant=zb-h1", "--variant=torch --schedule=InterleavedZeroBubble --chunks=1"),
    ("07_pipeline_parallel", 4, "{pipeline}",
     "--variant=dualpipe-v", "--variant=torch --schedule=DualPipeV"),
    ("07_pipeline_parallel", 4, "{pipeline}", "--variant=zb-h2", "--variant=1f1b"),
    ("07_pipeline_parallel", 4, "{pipeline}", "--variant=dualpipe", "--variant=1f1b"),
    *(("08_expert_parallel", 4, f"{{experts}} --experts={experts}", *sides)     # in either order
      for experts in (4, 16, 64) for other in ("--variant=dropless", "--variant=torch")
      for sides in itertools.permutations(("--variant=dropless --matmul=grouped", other))),
    ("08_expert_parallel", 4, "{experts}", "--variant=dropless", "--variant=capacity"),
    ("08_expert_parallel", 4, "{experts} --nodes=2", "--variant=two-hops", "--variant=dropless"),
    ("08_expert_parallel", 4, "{experts} --experts=8 --micro-batch=1",
     "--variant=overlapped", "--variant=dropless"),
    ("08_expert_parallel", 4, "{dense}", "--variant=dropless --experts=8 --top-k=1",
     "02_data_parallel --variant=bucket {buckets}"),    # as many FLOPs, but for the router
    ("09_5d", 8, "{three_axes} --dp=2 --pp=2 --tp=2 --zero=2",
     "--variant=hand", "--variant=torch"),
    ("09_5d", 4, "{data_parallel}", "--dp=4", "02_data_parallel --variant=bucket {buckets}"),
    ("09_5d", 4, "{cut}", "--dp=4 --zero=1", "03_zero --variant=zero1"),
    ("09_5d", 4, "{cut}", "--dp=4 --zero=2", "03_zero --variant=zero2"),
    ("09_5d", 4, "{cut}", "--dp=4 --zero=3", "03_zero --variant=zero3"),
    ("09_5d", 4, "{cut}", "--tp=4", "05_sequence_parallel --variant=kept"),
    ("09_5d", 4, "{long}", "--cp=4", "06_context_parallel --variant=gather"),
    ("09_5d", 4, "{pipeline}", "--pp=4", "07_pipeline_parallel --variant=1f1b"),
    ("09_5d", 4, "{experts} --experts=8", "--dp=4 --ep=4", "08_expert_parallel --variant=dropless"),
]

# ------------------------------------------------------------------------------ on every rank


class TakesTurns(report.Run):
    """A run in a thread, which takes a step when it is its turn. turns: a semaphore of its own, and
    that of the other run."""

    def __init__(self, turns, *args, **more):
        super().__init__(*args, **more)
        self.turn, self.turn_of_other = turns

    @contextlib.contextmanager
    def measure(self):
        self.turn_of_other.release()
        self.turn.acquire()
        with super().measure():
            yield


def alternate(sides):
    """Run the chapter of each side with its flags, a thread for each, of which one at a time goes
    on: until its next step begins. Returns the Run of each side."""
    turns, runs = [threading.Semaphore(1), threading.Semaphore(0)], [None, None]

    def play(me):
        turns[me].acquire()
        try:
            runs[me] = run_chapter([turns[me], turns[1 - me]], *sides[me])
        except BaseException:
            traceback.print_exc()
            os._exit(1)                                 # the other side would wait for ever
        turns[1 - me].release(runs[me].args.steps)      # it need not wait any more

    with contextlib.redirect_stdout(io.StringIO()):
        threads = [threading.Thread(target=play, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return runs


def run_chapter(turns, chapter, flags):
    """Train as the chapter does, in turns. Returns the Run."""
    module, runs = rooms.chapter(chapter[:2]), []

    def make_run(*args, **more):
        runs.append(TakesTurns(turns, *args, **more))
        return runs[0]

    launch.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                getattr(module, "flags", None), module.formulas, flags, make_run=make_run)
    return runs[0]


def play_pair(sides):
    """For a rank: the milliseconds of each side's steps."""
    return [[1e3 * s for s in run.seconds[SETUP_STEPS:]] for run in alternate(sides)]


# ------------------------------------------------------------------------------ the tables


def output_of(command, ranks):
    """What a program prints that runs on so many ranks, in processes of their own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as run:
        try:
            output, errors = run.communicate()
        except BaseException:                           # torchrun ends its ranks, if asked to
            run.terminate()
            run.wait()
            raise
    if run.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{output}{errors}")
    return output


def measure(ranks, *sides):
    """The milliseconds of the steps of two sides, each a chapter and its flags, on rank 0."""
    pair = [(chapter, [*flags, "--no-verify"]) for chapter, flags in sides]
    command = results.on_ranks(ranks, __file__, f"--pair={json.dumps(pair)}")
    return json.loads(output_of(command, ranks).splitlines()[-1])


def filled_in(chapter, ranks, *flags):
    """A pair with the shapes of the device that its ranks will take."""
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    return chapter, ranks, *(flag.format(**SHAPES[device]) for flag in flags)


def of_chapter(chapter, side):
    """The chapter and the flags of a side, which may begin with the name of another chapter."""
    first, *rest = side.split()
    return (chapter, side.split()) if first.startswith("--") else (first, rest)


def table(pairs, steps, flags):
    """Run the pairs; yields the lines of the table, in Markdown."""
    yield (f"{results.machine()}, {steps} steps of each side in turn, flags: "
           f"{' '.join(flags) or 'none'}\n")
    yield results.header("chapter", "ranks", "both sides", "one side", "ms", "other side", "ms",
                         "ratio")
    for chapter, ranks, both, *sides in (filled_in(*pair) for pair in pairs):
        every = [f"--steps={steps}", *both.split(), *flags]
        named = [of_chapter(chapter, side) for side in sides]
        measured = measure(ranks, *((name, [*every, *own]) for name, own in named))
        one, other = map(statistics.median, measured)
        yield results.row(chapter, ranks, both, sides[0], results.middle(measured[0]),
                          sides[1], results.middle(measured[1]), f"{one / other:.2f}")


def accept(argv):
    """The arguments and the pairs that they choose; raises Refused where one of the runs would."""
    parser = commands.Parser("benchmarks/time_chapters.py", description=__doc__)
    parser.add_argument("--steps", type=commands.number(int, SETUP_STEPS + 4, 2**31, 60),
                        default=60, help="of each side")
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    parser.add_argument("--pair", help=argparse.SUPPRESS)       # for the ranks of `measure`
    args = parser.parse_args(argv)
    if args.pair:
        return args
    args.pairs = [pair for pair in PAIRS if pair[0].startswith(args.only)]
    if not args.pairs:
        raise Refused(f"--only {args.only} begins the name of no chapter", "--only 01")
    if args.record:
        results.refuse_record()
    for chapter, ranks, both, *sides in (filled_in(*pair) for pair in args.pairs):
        for name, own in (of_chapter(chapter, side) for side in sides):
            refuse_run(name, ranks, [*both.split(), *args.flags, *own])
    return args


def refuse_run(chapter, ranks, flags):
    """Raise Refused where the chapter on so many ranks would."""
    module = rooms.chapter(chapter[:2])
    args = launch.parse(module, ["--no-verify", *flags])
    module.requires(args, ranks)


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    if args.pair:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)   # or it would end when all threads have
        answer = play_pair(json.loads(args.pair))
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
        dist.barrier()
        os._exit(0)                                     # as lab.launch.launch does, and why

    results.tell(table(args.pairs, args.steps, args.flags),
                 f"chapter {args.only}" if args.only else "chapters", args.record)


if __name__ == "__main__":
    commands.program(main)
