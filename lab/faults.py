"""Faults on purpose: kill ranks of a training, and see what it costs, and that nothing is lost.

    python -m lab.faults --kills 5 --json runs/faults.json

One rank that dies ends all others, since they wait for it in the next collective. `torchrun
--max-restarts` starts them again, and they go on from the last checkpoint. So a fault costs

    the steps since the last save, which are computed again: half an interval on average
    the restart: to notice, start Python, read the checkpoint, connect. No step is taken meanwhile

and saving costs something too, faults or none. To save often makes the first cheap and the second
dear. With `save` seconds that training waits for a save, one each `interval` seconds, and a fault
each `between` seconds, the share of time that goes into both is

    save / interval  +  interval / 2 / between

which is least where both are equal: interval = sqrt(2 · save · between) (Young 1974, Daly 2006).
Llama 3's training was interrupted 466 times in 54 days on 16,384 GPUs, once in 2.8 hours. If it had
waited a minute for each save, it should save every 18 minutes, and lose 11% to both. If a save goes
on beside training, which waits a second for it: every 2.4 minutes, and 1.4%.

This program trains a model quietly, then again with ranks that are killed at random moments, every
other one while a save is under way. Losses and the last checkpoint are those of the quiet run, bit
for bit. It prints the formulas with what was measured.

    goodput     the seconds of steps that counted, over all seconds from start to end. A step counts
                if it was not computed again. Its seconds are those since the step before; of the
                first one after a start nobody knows them, so they do not count
    restart     from a kill to the end of the first step after it

Sources: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.4; Young, A First Order
Approximation to the Optimum Checkpoint Interval (1974); Daly, A Higher Order Estimate of the
Optimum Checkpoint Interval for Restart Dumps (2006).
"""

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from lab import ROOT
from lab.checkpoints import checkpoint, storage
from lab.checkpoints.saving import LOG
from lab.run import commands, refusals
from lab.run.about import as_check

CHAPTER, RANKS = "02_data_parallel", 4
MODEL = ("--layers=2", "--dim=64", "--heads=4", "--kv-heads=2", "--seq=64", "--lr=0.002",
         "--dtype=float64", "--device=cpu", "--no-verify", "--batch=64")  # fmt: skip
STEPS, EVERY = 120, 10              # a save after so many
PATIENCE = 300                      # seconds for the next kill, or the end
LLAMA = 54 * 24 * 3600 / 466        # seconds between faults


# ------------------------------------------------------------------------------------- the formulas

def best_interval(save, between):
    """Young's and Daly's, in seconds."""
    return math.sqrt(2 * save * between)


def expected_goodput(interval, save, restart, between):
    """To first order; all are seconds, those between faults on the clock."""
    return (1 - (interval / 2 + restart) / between) / (1 + save / interval)


def goodput(attempts, seconds):
    """attempts: of each start, its steps and when they ended, [(step, time)]. Returns the share,
    and how many steps were lost: computed again later."""
    last = {step: i for i, steps in enumerate(attempts) for step, _ in steps}
    counted = sum(end - start for i, steps in enumerate(attempts)
                  for (_, start), (step, end) in pairwise(steps) if last[step] == i)
    return counted / seconds, sum(map(len, attempts)) - len(last)


# --------------------------------------------------------------------------------------- the faults

class Fault(NamedTuple):
    """Kill a rank after so many steps since the start, then in the next save if so wished, then
    after so many seconds."""

    rank: int
    steps: int
    in_save: bool
    seconds: float


class Failed(Exception):
    """What went on for too long, or ended too early."""


def plan(kills, seed):
    """Random faults, each within two saves of a start."""
    draw = random.Random(seed)
    return [Fault(draw.randrange(RANKS), draw.randint(EVERY // 2, 3 * EVERY // 2), bool(i % 2),
                  draw.uniform(0, 0.03)) for i in range(kills)]  # fmt: skip


def wait_until(condition, what, has_ended):
    """Wait until condition(); raises Failed if the run ends before, or if it takes too long."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if has_ended():
            raise Failed(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise Failed(f"there was no time left for {what}")
        time.sleep(0.001)


def read_log(folder):
    """A line for each step that a run has taken, in all its starts."""
    path = folder / LOG
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def count_lines(folder):
    """The lines of the log so far."""
    path = folder / LOG
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_saving(folder, since):
    """Whether a folder of an incomplete checkpoint has changed since then; older ones were left."""
    for path in folder.glob(".step-*"):
        try:
            if path.stat().st_mtime > since:
                return True
        except FileNotFoundError:                       # it is complete by now
            pass
    return False


def strike(fault, folder, ranks, has_ended):
    """Kill one of the processes ranks(), which are about to start, when the fault says so. Returns
    when that was, and those processes."""
    since, before = time.time(), count_lines(folder)
    wait_until(lambda: count_lines(folder) >= before + fault.steps, "a kill", has_ended)
    pids = ranks()                                      # now all of them are there
    if fault.in_save:
        wait_until(lambda: is_saving(folder, since), "a kill in a save", has_ended)
    time.sleep(fault.seconds)
    os.kill(pids[fault.rank], signal.SIGKILL)
    return time.time(), set(pids)


def children(pid):
    """Of torchrun: its ranks, in order."""
    try:
        return sorted(child.pid for child in psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def train(folder, faults, *flags):
    """Run the chapter, and kill ranks of it. Returns what the figure shows: seconds since the
    begin, of each start its steps with their losses, and when each kill was."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={RANKS}", f"--max-restarts={len(faults)}",
               ROOT / f"{CHAPTER}.py", *MODEL, f"--save={folder}", f"--resume={folder}", *flags]
    begin, kills, ends, output = time.time(), [], [], folder.with_suffix(".txt")
    with output.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})

    def has_ended():
        return process.poll() is not None

    def ranks():
        return children(process.pid)

    try:
        for fault in faults:
            at, pids = strike(fault, folder, ranks, has_ended)
            wait_until(lambda pids=pids: not pids & set(ranks()), "the others' end", has_ended)
            kills.append(at - begin)
            ends.append(count_lines(folder))            # of the log, where this start ended
        wait_until(has_ended, "the last step", lambda: False)
    finally:
        end_with_ranks(process)
    if process.returncode:
        raise Failed(f"torchrun ended with status {process.returncode}")
    lines, starts = read_log(folder), []
    for first, last in pairwise([0, *ends, None]):
        starts.append({"steps": [line["step"] for line in lines[first:last]],
                       "losses": [line["loss"] for line in lines[first:last]],
                       "seconds": [line["time"] - begin for line in lines[first:last]]})
    return {"seconds": time.time() - begin, "starts": starts, "kills": kills, "every": EVERY}


def end_with_ranks(process):
    """End torchrun and its ranks, if they still run."""
    if process.poll() is None:
        ranks = psutil.Process(process.pid).children()
        process.kill()
        for rank in ranks:
            if rank.is_running():
                rank.kill()
        process.wait()


# -------------------------------------------------------------------------------- what it comes to

def tensors_of(folder):
    """{name: full tensor} of a checkpoint."""
    saved = checkpoint.Checkpoint(folder, storage.read_index(folder))
    shapes = {name: tensor["shape"] for name, tensor in saved.index["tensors"].items()}
    return {name: saved.value(name, torch.empty(shape)) for name, shape in shapes.items()}


def unequal(these, those):
    """Names that only one side has, or whose numbers or tensors are not equal bit for bit."""
    return [name for name in {**these, **those} if name not in these or name not in those
            or not torch.equal(torch.as_tensor(these[name]), torch.as_tensor(those[name]))]


def compare(folder, quiet, steps):
    """Checks that the losses of all steps and the last checkpoint are those of the quiet run.
    Raises Failed where the run has not taken all steps."""
    losses = [{line["step"]: line["loss"] for line in read_log(path)} for path in (folder, quiet)]
    if sorted(losses[0]) != list(range(1, steps + 1)):
        raise Failed(f"the log has {len(losses[0])} of {steps} steps")
    saved = [tensors_of(path / f"step-{steps:06}") for path in (folder, quiet)]
    checks = []
    for name, pair in (("losses", losses), ("tensors of the last checkpoint", saved)):
        off = len(unequal(*pair))
        checks.append(as_check(("values", f"{name} that differ"), off, 0, off == 0))
    return checks


def explain(faulty, waits):
    """Print what the faults cost, beside the formulas. waits: seconds that training waited for each
    save."""
    starts, kills = faulty["starts"], faulty["kills"]
    attempts = [list(zip(start["steps"], start["seconds"])) for start in starts]
    share, lost = goodput(attempts, faulty["seconds"])
    steps = [end - start for attempt in attempts for (_, start), (_, end) in pairwise(attempt)]
    begins = [start["seconds"][0] for start in starts]
    restarts = [min(begin for begin in begins if begin > at) - at for at in kills]
    save, restart = statistics.mean(waits), statistics.mean(restarts)
    between, best = faulty["seconds"] / len(kills), best_interval(save, LLAMA)
    print(f"{STEPS} steps, a save every {EVERY}, {len(kills)} kills")
    print(f"  {lost} steps lost; {faulty['seconds']:.1f} s in all; goodput {share:.1%}")
    print(f"  training waits {1e3 * save:.1f} ms for a save, and a restart takes {restart:.1f} s")
    print(f"  one fault in {between:.1f} s, saved every {EVERY * statistics.median(steps):.2f} s; "
          f"best by formula: every {best_interval(save, between):.2f} s")
    print(f"  with Llama 3's faults, one in {LLAMA:,.0f} s: {best:.0f} s, and goodput "
          f"{expected_goodput(best, save, restart, LLAMA):.1%}")


def with_and_without(folder, args):
    """Train quietly, and with faults. Returns the checks, and what the figure shows."""
    times = folder / "quiet.json"
    flags = f"--steps={STEPS}", f"--save-every={EVERY}", f"--seed={args.seed}"
    quiet = train(folder / "quiet", [], *flags, f"--json={times}")
    faulty = train(folder / "faulty", plan(args.kills, args.seed), *flags)
    explain(faulty, json.loads(times.read_text())["recorded"]["checkpoints"]["waits"])
    checks = compare(folder / "faulty", folder / "quiet", STEPS)
    for check in checks:
        print(f"  {check['name']}: {check['measured']}   {'✓' if check['ok'] else '✗'}")
    return checks, {"quiet": quiet, "faulty": faulty}


def record_of(args, checks, recorded):
    """As a run writes it, so that lab.report has a line for it, and lab.pictures a figure."""
    faulty = recorded["faulty"]
    return {"chapter": "faults", "variant": f"{args.kills} kills", "config": {"seed": args.seed},
            "world_size": RANKS, "backend": "gloo", "recorded": recorded,
            "loss": faulty["starts"][-1]["losses"], "seconds": faulty["seconds"],
            "checks": checks, "problems": []}


def parse(argv):
    parser = commands.Parser("-m lab.faults", description=__doc__)
    add = parser.add_argument
    add("--kills", type=commands.number(int, 1, 7, 5), default=5, help="of ranks, in all")
    add("--seed", type=commands.number(int, 0, 2**31, 1), default=0,
        help="of training, and of faults")
    add("--json", type=commands.output("faults.json"), help="for a figure by lab/pictures.py")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            checks, recorded = with_and_without(Path(folder), args)
        except Failed as why:
            print(f"✗ {why}")
            for output in sorted(Path(folder).glob("*.txt")):
                print(f"{output.name} ends with\n{output.read_text()[-2000:]}")
            return 1
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record_of(args, checks, recorded), indent=1) + "\n")
    return 0 if all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    commands.program(main)
