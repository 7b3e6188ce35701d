"""Times checkpoints beside training: ours, and torch.save of what rank 0 has gathered.

A run saves in both ways, in turn, with quiet steps between. Ours is lab/checkpoints: training waits
for a copy, and a thread writes it while training goes on. The other way, the ranks send rank 0 what
it does not hold, and all wait until torch.save has written the whole. Both are on the disk when it
has confirmed that (fsync), and write to the same folder.

The first table is about steps: those before a save, the first one with it in flight, and the ratio
(of that step to the median of those before it; the median of all saves). A write may end within
that step or several later. So the last column has all that a save costs: for how long training
waits, and what the steps that began with a save in flight took above those before. It does not
depend on how long a step is, as the ratio does. The second table is about saves: for how long each
way lets training wait, and after how long the checkpoint is on the disk.

    python benchmarks/time_checkpoints.py [--saves N] [--only 03] [--record] [-- flags for runs]

--record writes the tables, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import datetime
import io
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import results  # noqa: E402  (after the path to it)
from benchmarks.time_chapters import on_ranks, refuse_run  # noqa: E402
from common import Refused  # noqa: E402
from lab import chapters as rooms  # noqa: E402
from lab.bench import report  # noqa: E402
from lab.checkpoints import checkpoint, saving, storage  # noqa: E402
from lab.cli import commands, refusals  # noqa: E402

SETUP_STEPS = 3         # the first steps allocate, and are metered
QUIET = 3               # steps that are timed before every save, after one that is not
SHAPE = "--layers=8 --heads=8 --kv-heads=8 --seq=128"
RUNS = [                # chapter, ranks, flags
    ("03_zero", 2, f"--dim=256 --batch=16 {SHAPE} --variant=zero3"),
    ("04_tensor_parallel", 2, f"--dim=256 --batch=16 {SHAPE} --variant=megatron"),
    ("09_5d", 2, f"--dim=256 --batch=16 {SHAPE} --pp=2 --micro-batch=4"),
    ("03_zero", 2, f"--dim=512 --batch=8 {SHAPE} --variant=zero3"),
]

# ------------------------------------------------------------------------------ on every rank


def held(optimizers):
    """{(name, offsets): (full shape, view)}: what this rank holds of the parameters and of their
    states, as checkpoint.state_of, without a copy."""
    return {(f"{name}/{key}".rstrip("/"), tuple(at)): (shape, view)
            for optimizer in optimizers for p in checkpoint.trained(optimizer)
            for key, tensor in {"": p.detach(), **optimizer.state[p]}.items()
            for name, shape, at, view in checkpoint.rectangles_of(p, tensor)}


def who_sends(parts):
    """{(name, offsets): (rank, full shape, shape, dtype)} of every rectangle: the first rank that
    holds it sends it to rank 0. Communication: all_gather_object, once in a run."""
    mine = {key: (dist.get_rank(), tuple(full_shape), view.shape, view.dtype)
            for key, (full_shape, view) in parts.items()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {key: what for of_rank in reversed(everyones) for key, what in of_rank.items()}


def gathered(parts, senders, group):
    """{name: full tensor} on rank 0, on the CPU; {} on the others. Communication, over `group`: of
    each rectangle that rank 0 does not hold, a send to it."""
    rank, here, whole, handles = dist.get_rank(), {}, {}, []
    for key, (sender, _, shape, dtype) in senders.items():
        if sender == rank:
            here[key] = parts[key][1].cpu().contiguous()
        elif rank == 0:
            here[key] = torch.empty(shape, dtype=dtype)
        if sender == rank != 0:
            handles.append(dist.isend(here[key], 0, group=group))
        elif sender != rank == 0:
            handles.append(dist.irecv(here[key], sender, group=group))
    for handle in handles:
        handle.wait()
    if rank > 0:
        return {}
    for (name, at), (_, full_shape, shape, dtype) in senders.items():
        if name not in whole:
            whole[name] = torch.empty(full_shape, dtype=dtype)
        whole[name][tuple(slice(a, a + size) for a, size in zip(at, shape))] = here[name, at]
    return whole


class InTurn(saving.Saver):
    """Saves in both ways, `times` each, whenever there have been enough quiet steps. `ours` has for
    each save the seconds of the steps before and of those that began with it in flight, for how
    long training waited, and after how long it was on the disk; `theirs` how long the other way
    took, all of which training waits."""

    times = 0

    def __init__(self, run):
        super().__init__(run)
        self.group = dist.new_group(backend="gloo")
        self.ours, self.theirs, self.quiet = [], [], []
        self.landed, self.flies, self.senders = 0, False, None

    def after_step(self, step, loss, model):
        if self.stop:                                   # SIGTERM, which would let a Saver save
            os._exit(128 + signal.SIGTERM)
        if step <= SETUP_STEPS:
            return
        steps = self.ours[-1]["during"] if self.flies else self.quiet
        steps.append(self.run.seconds[-1])
        if self.flies:
            self.flies = self.on_any_rank(self.landed < len(self.ours))
            if not self.flies:
                self.ours[-1]["on disk"] = self.waits[-1] + self.writes[-1]
        elif len(self.quiet) == 1 + QUIET and not self.done:
            dist.barrier(self.group)
            if (len(self.ours) + len(self.theirs)) % 4 in (0, 3):   # each comes first as often
                self.save(step, saving.saved_buffers(model))
                self.ours.append({"before": self.quiet[1:], "during": [],
                                  "waits": self.waits[-1]})
                self.flies = True
            else:
                self.save_gathered()
            self.quiet = []

    @property
    def done(self):
        return len(self.ours) == len(self.theirs) == self.times and not self.flies

    def write(self, *what):                             # in its thread
        try:
            super().write(*what)
        except BaseException as error:
            print(f"a checkpoint is not written: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
        self.landed += 1

    def on_any_rank(self, here):
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag)

    def save_gathered(self):
        parts = held(self.run.optimizers)
        self.senders = self.senders or who_sends(parts)
        path = self.args.save / "whole.pt"
        dist.barrier(self.group)
        start = time.perf_counter()
        whole = gathered(parts, self.senders, self.group)
        if whole:
            torch.save(whole, path)
            storage.synced(path)
        dist.barrier(self.group)
        self.theirs.append(time.perf_counter() - start)
        if whole:
            path.unlink()


class SavesInTurn(report.Run):
    """Ends when all saves are made."""

    def batches(self, *share, **more):
        for batch in super().batches(*share, **more):
            yield batch
            if self.saver.done:
                InTurn.last = self.saver
                return


def play(chapter, times, flags):
    """For a rank: what `InTurn` has noted, in seconds, and of a checkpoint the bytes that are on
    the disk, and those of the formula."""
    saving.Saver, report.Run, InTurn.times = InTurn, SavesInTurn, times
    module = rooms.chapter(chapter[:2])
    own = getattr(module, "flags", lambda parser: None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = report.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                             own, module.formulas,
                             [*flags, f"--steps={10**6}", "--keep=1", "--no-verify"])
    if status:
        sys.exit(printed.getvalue())
    saver = InTurn.last
    sizes = {check["name"]: (check["measured"], check["expected"]) for check in saver.run.checks}
    return {"ours": saver.ours, "theirs": saver.theirs, "bytes": sizes.get("a checkpoint"),
            "parameters": saver.args.model.parameters()}


# ------------------------------------------------------------------------------ the tables


def measure(chapter, ranks, times, flags):
    """`play` on so many ranks: rank 0's answer."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        told = json.dumps([chapter, times, [*flags, f"--save={folder}/checkpoints"]])
        return json.loads(on_ranks(ranks, __file__, f"--play={told}").splitlines()[-1])


def of_steps(measured):
    """Of one run, for the first table: the milliseconds of the steps before saves, of the first
    ones with one in flight, the ratio, and what a save costs."""
    ours = measured["ours"]
    quiet = [1e3 * statistics.median(save["before"]) for save in ours]
    first = [1e3 * save["during"][0] for save in ours]
    costs = [1e3 * (save["waits"] + sum(save["during"])) - len(save["during"]) * before
             for save, before in zip(ours, quiet)]
    ratio = statistics.median(one / before for one, before in zip(first, quiet))
    return [1e3 * s for save in ours for s in save["before"]], first, ratio, costs


def middle(values):
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{median:.0f} ({low:.0f} to {high:.0f})"


def tables(runs, times, flags):
    """Make the runs; yields the lines of both tables, in Markdown."""
    machine = f"{os.cpu_count()} CPU cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    yield (f"{datetime.date.today()}, {machine}, torch {torch.__version__}, Python "
           f"{platform.python_version()}, {times} saves of each way in turn, flags: "
           f"{' '.join(flags) or 'none'}. Medians, in milliseconds, with the range of the middle "
           "half.\n")
    yield ("| chapter | ranks | flags | a step | with a save in flight | ratio "
           "| all that a save costs |")
    yield "|" + " --- |" * 7
    rows = []
    for chapter, ranks, own in runs:
        measured = measure(chapter, ranks, times, [*own.split(), *flags])
        quiet, first, ratio, costs = of_steps(measured)
        yield (f"| {chapter} | {ranks} | {own} | {middle(quiet)} | {middle(first)} | {ratio:.2f} "
               f"| {middle(costs)} |")
        waits, on_disk = ([1e3 * save[key] for save in measured["ours"]]
                          for key in ("waits", "on disk"))
        theirs = [1e3 * seconds for seconds in measured["theirs"]]
        size, formula = measured["bytes"]
        waiting, writing, whole = map(statistics.median, (waits, on_disk, theirs))
        rows.append(f"| {chapter} | {own.split()[0]} | {measured['parameters']:,} | {size:,} "
                    f"| {formula:,} | {middle(waits)} | {middle(theirs)} | {waiting / whole:.2f} "
                    f"| {middle(on_disk)} | {writing / whole:.2f} "
                    f"| {size / 1e3 / (writing - waiting):.0f} |")
    yield ("\nThe same runs. torch.save of the whole lets training wait until it is on the disk, "
           "so one column has both.\n")
    yield ("| chapter | | parameters | bytes on the disk | formula | training waits "
           "| torch.save of the whole | ratio | on the disk after | ratio | MB/s |")
    yield "|" + " --- |" * 11
    yield from rows


def accept(argv):
    """The arguments and the runs that they choose; raises Refused where one of those would."""
    parser = commands.Parser("benchmarks/time_checkpoints.py", description=__doc__)
    parser.add_argument("--saves", type=commands.number(int, 2, 2**31, 6), default=6,
                        help="of each way")
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    parser.add_argument("--play", help=argparse.SUPPRESS)       # for the ranks of `measure`
    args = parser.parse_args(argv)
    if args.play:
        return args
    args.runs = [run for run in RUNS if run[0].startswith(args.only)]
    if not args.runs:
        raise Refused(f"--only {args.only} begins the name of no chapter here", "--only 03")
    if args.record:
        results.refuse_record()
    for chapter, ranks, own in args.runs:
        refuse_run(chapter, ranks, [*own.split(), *args.flags])
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    if args.play:
        answer = play(*json.loads(args.play))
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
        dist.barrier()
        os._exit(0)                                     # as lab.bench.report.launch does, and why

    results.tell(tables(args.runs, args.saves, args.flags),
                 "checkpoints" + f" of {args.only}" * bool(args.only), args.record)


if __name__ == "__main__":
    commands.program(main)
