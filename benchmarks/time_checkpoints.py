"""Times checkpoints while training goes on, and torch.save of the whole model on one rank.

A chapter saves after every EVERY steps: training waits for a copy, and a thread writes it during
the next steps. torch.save, in one process, writes as much: parameters and two states of each. A
training that saved so would wait until rank 0 has gathered the whole, too, which isn't timed. Both
are on the disk when it has confirmed that (fsync), in the same folder.

The first table is about steps: quiet ones, just before a save; the first one with a save in flight;
their ratio (the median over all saves); and all that a save costs: for how long training waits, and
what the steps up to the next quiet one took above quiet ones. The second table is about saves: how
long training waits, and after how long the checkpoint is on the disk.

    python benchmarks/time_checkpoints.py [--saves N] [--only 03] [--record] [-- flags for runs]

--record writes the tables, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import functools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from benchmarks import results  # noqa: E402
from benchmarks.time_chapters import on_ranks, refuse_run  # noqa: E402
from lab.checkpoints import storage  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

EVERY, QUIET = 9, 3     # steps from one save to the next, of which the last ones are quiet
SHAPE = "--layers=8 --heads=8 --kv-heads=8 --seq=128"
RUNS = [                # chapter, ranks, flags
    ("03_zero", 2, f"--dim=256 --batch=16 {SHAPE} --variant=zero3"),
    ("04_tensor_parallel", 2, f"--dim=256 --batch=16 {SHAPE} --variant=megatron"),
    ("09_5d", 2, f"--dim=256 --batch=16 {SHAPE} --pp=2 --micro-batch=4"),
    ("03_zero", 2, f"--dim=512 --batch=8 {SHAPE} --variant=zero3"),
]


def measure(chapter, ranks, saves, flags):
    """The record of a run that saves so often, and the seconds of as many torch.saves."""
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
        file = Path(folder, "run.json")
        on_ranks(ranks, ROOT / f"{chapter}.py", *flags, f"--steps={(saves + 1) * EVERY}",
                 f"--save={folder}/checkpoints", f"--save-every={EVERY}", "--keep=1",
                 "--no-verify", f"--json={file}")
        run = json.loads(file.read_text())
        cfg = common.Config(*(run["config"][name] for name in common.Config.__dataclass_fields__))
        return run, cfg, [seconds_of_torch_save(cfg, Path(folder)) for _ in range(saves)]


def seconds_of_torch_save(cfg, folder):
    """To write parameters, and as many numbers twice, with torch.save, until they are on the disk;
    in float32."""
    whole = {f"{copy} {name}": torch.zeros(p.shape) for copy in ("p", "exp_avg", "exp_avg_sq")
             for name, p in common.gpt(cfg, seed=None).named_parameters()}
    start = time.perf_counter()
    torch.save(whole, folder / "whole.pt")
    storage.synced(folder / "whole.pt")
    return time.perf_counter() - start


def costs_of(seconds, waits):
    """Of the steps of a run: the milliseconds of quiet ones, of the first ones after a save, the
    median ratio of the two, and what each save costs."""
    quiet, first, ratios, costs = [], [], [], []
    for wait, at in zip(waits, range(EVERY, len(seconds), EVERY)):
        before, after = seconds[at - QUIET:at], seconds[at:at + EVERY - QUIET]
        usual = statistics.median(before)
        quiet += [1e3 * step for step in before]
        first.append(1e3 * after[0])
        ratios.append(after[0] / usual)
        costs.append(1e3 * (wait + sum(after) - len(after) * usual))
    return quiet, first, statistics.median(ratios), costs


def tables(runs, saves, flags):
    """Make the runs; yields the lines of both tables, in Markdown."""
    yield (f"{results.machine()}, {saves} saves of each way, flags: {' '.join(flags) or 'none'}. "
           "Medians, in milliseconds, with the range of the middle half.\n")
    yield results.header("chapter", "ranks", "flags", "a step", "with a save in flight", "ratio",
                         "all that a save costs")
    middle, rows = functools.partial(results.middle, digits=0), []
    for chapter, ranks, own in runs:
        run, cfg, whole = measure(chapter, ranks, saves, [*own.split(), *flags])
        saved = run["recorded"]["checkpoints"]
        waits, writes = saved["waits"][:saves], saved["writes"][:saves]
        quiet, first, ratio, costs = costs_of(run["step_seconds"], waits)
        yield results.row(chapter, ranks, own, middle(quiet), middle(first), f"{ratio:.2f}",
                          middle(costs))
        waits, writes, whole = ([1e3 * s for s in times] for times in (waits, writes, whole))
        on_disk = [wait + write for wait, write in zip(waits, writes)]
        [size] = [check for check in run["checks"] if check["name"] == "a checkpoint"]
        ours, theirs = statistics.median(waits), statistics.median(whole)
        rows.append(results.row(
            chapter, own.split()[0], f"{cfg.parameters():,}", f"{size['measured']:,}",
            f"{size['expected']:,}", middle(waits), middle(whole), f"{ours / theirs:.2f}",
            middle(on_disk), f"{statistics.median(on_disk) / theirs:.2f}",
            f"{size['measured'] / 1e3 / statistics.median(writes):.0f}"))
    yield "\nThe same runs. torch.save lets training wait until the whole is on the disk.\n"
    yield results.header("chapter", "", "parameters", "bytes on the disk", "formula",
                         "training waits", "torch.save of the whole", "ratio", "on the disk after",
                         "ratio", "MB/s")
    yield from rows


def accept(argv):
    """The arguments and the runs that they choose; raises Refused where one of those would."""
    parser = commands.Parser("benchmarks/time_checkpoints.py", description=__doc__)
    parser.add_argument("--saves", type=commands.number(int, 2, 2**31, 6), default=6,
                        help="of each way")
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    args = parser.parse_args(argv)
    args.runs = [run for run in RUNS if run[0].startswith(args.only)]
    if not args.runs:
        raise common.Refused(f"--only {args.only} begins the name of no chapter here", "--only 03")
    if args.record:
        results.refuse_record()
    for chapter, ranks, own in args.runs:
        refuse_run(chapter, ranks, [*own.split(), *args.flags])
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    section = f"checkpoints of {args.only}" if args.only else "checkpoints"
    results.tell(tables(args.runs, args.saves, args.flags), section, args.record)


if __name__ == "__main__":
    commands.program(main)
