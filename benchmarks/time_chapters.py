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
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import tomllib
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
TABLE = tomllib.loads(Path(__file__).with_name("pairs.toml").read_text(encoding="utf-8"))


def pair_of(line):
    """(chapter, ranks, flags of both sides, of one side, of the other) of a line of pairs.toml."""
    both, one, other = line.split(" | ")
    number, ranks, *flags = both.split()
    return rooms.name_of(number), int(ranks), " ".join(flags), one, other


PAIRS = [pair_of(line) for line in TABLE["pairs"]["lines"].splitlines()]

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
    shapes = TABLE["shapes"][device]
    base = shapes["base"]
    return chapter, ranks, *(flag.format(**shapes).format(base=base) for flag in flags)


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
