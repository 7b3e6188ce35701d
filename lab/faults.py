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

This program trains quietly, then again in three layouts, one after the other: replicas, tensor
parallelism on half of the ranks, pipeline and tensor parallelism on all. There, ranks are killed at
random moments, every other one while a save is under way. Losses and the last checkpoint are
compared with those of the quiet run: sums have another order in another layout, so to 1e-10.

    goodput     the seconds of steps that counted, over all seconds from start to end. A step counts
                if it was not computed again. Its seconds are those since the step before; of the
                first one after a start nobody knows them, so they do not count
    restart     from a kill to the end of the first step after it

Sources: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.4; Young, A First Order
Approximation to the Optimum Checkpoint Interval (1974); Daly, A Higher Order Estimate of the
Optimum Checkpoint Interval for Restart Dumps (2006).
"""

import contextlib
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

MODEL = ("--layers=2", "--dim=64", "--heads=4", "--kv-heads=2", "--seq=64", "--lr=0.002",
         "--dtype=float64", "--device=cpu", "--no-verify", "--batch=64")  # fmt: skip
STEPS, EVERY = 120, 10              # in all layouts together; a save after so many
LAYOUTS = (("02_data_parallel", 4), ("04_tensor_parallel", 2),
           ("09_5d", 4, "--pp=2", "--tp=2", "--micro-batch=16"))  # fmt: skip
TOLERANCE = 1e-10                   # of another layout, whose sums have another order
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


def plan(kills, ranks, seed):
    """Random faults, each within two saves of a start."""
    draw = random.Random(seed)
    return [Fault(draw.randrange(ranks), draw.randint(EVERY // 2, 3 * EVERY // 2), bool(i % 2),
                  draw.uniform(0, 0.03)) for i in range(kills)]  # fmt: skip


def wait_until(condition, what, ended=lambda: False):
    """Wait until condition(); raises Failed if the run has ended before, or if it takes too long.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if ended():
            raise Failed(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise Failed(f"there was no time left for {what}")
        time.sleep(0.001)


def log_of(folder):
    """What a run has said of its steps, those of all starts."""
    path = folder / LOG
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def lines_of(folder):
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


def strike(fault, folder, ranks, ended):
    """Kill one of the processes ranks(), which are about to start, when the fault says so. Returns
    when that was, and those processes. ended(): whether there is nobody to kill any more."""
    since, before = time.time(), lines_of(folder)
    wait_until(lambda: lines_of(folder) >= before + fault.steps, "a kill", ended)
    pids = ranks()                                      # now all of them are there
    if fault.in_save:
        wait_until(lambda: is_saving(folder, since), "a kill in a save", ended)
    time.sleep(fault.seconds)
    os.kill(pids[fault.rank], signal.SIGKILL)
    return time.time(), set(pids)


def children(pid):
    """Of torchrun: its ranks, in order."""
    try:
        return sorted(child.pid for child in psutil.Process(pid).children())
    except psutil.NoSuchProcess:
        return []


def train(layout, folder, faults, *flags):
    """Run a chapter, and kill ranks of it. Returns for each fault when it was, how many steps were
    logged before the next start, and whether an incomplete checkpoint was left."""
    name, world, *own = layout
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={world}", f"--max-restarts={len(faults)}", ROOT / f"{name}.py",
               *MODEL, *own, f"--save={folder}", f"--resume={folder}", *flags]
    since, kills, output = time.time(), [], folder.with_suffix(".txt")
    with output.open("a") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file,
                                   env=os.environ | {"OMP_NUM_THREADS": "1"})

    def ended():
        return process.poll() is not None

    def ranks():
        return children(process.pid)

    try:
        for fault in faults:
            at, pids = strike(fault, folder, ranks, ended)
            wait_until(lambda pids=pids: not pids & set(ranks()), "the others' end", ended)
            kills.append((at, lines_of(folder), is_saving(folder, since)))
            since = time.time()
        wait_until(ended, "the last step")
    finally:
        kill_with_children(process)
    if process.returncode:
        raise Failed(f"torchrun ended with status {process.returncode}; see {output}")
    return kills


def kill_with_children(process):
    """End torchrun and its ranks, if they still run."""
    if process.poll() is None:
        pids = children(process.pid)
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


# -------------------------------------------------------------------------------- what it comes to

def tensors_of(folder):
    """{name: full tensor} of a checkpoint."""
    saved = checkpoint.Checkpoint(folder, storage.read_index(folder))
    shapes = {name: tensor["shape"] for name, tensor in saved.index["tensors"].items()}
    return {name: saved.value(name, torch.empty(shape)) for name, shape in shapes.items()}


def difference(these, those):
    """The largest between numbers or tensors of the same names, relative to each; 0: they are equal
    bit for bit. Raises Failed where a name is missing."""
    if these.keys() != those.keys():
        raise Failed(f"only one run has {sorted(these.keys() ^ those.keys())}")
    off = 0.0
    for name, x in these.items():
        x, y = (torch.as_tensor(value, dtype=torch.float64) for value in (x, those[name]))
        if not torch.equal(x, y):
            off = max(off, float((x - y).abs().max() / y.abs().max()))
    return off


def compare(folder, quiet, steps):
    """The largest differences from a quiet run: of all losses, and of the last checkpoint's
    tensors. Raises Failed where a step or the checkpoint is missing."""
    losses = [{line["step"]: line["loss"] for line in log_of(path)} for path in (folder, quiet)]
    for path, of_path in zip((folder, quiet), losses):
        if sorted(of_path) != list(range(1, steps + 1)):
            raise Failed(f"{path / LOG} has {len(of_path)} of {steps} steps")
    name = f"step-{steps:06}"
    return difference(*losses), difference(tensors_of(folder / name), tensors_of(quiet / name))


def starts_of(folder, begin, cuts):
    """What the log says, start by start: cuts are the lines at which one ended. Seconds count from
    `begin`."""
    lines, starts = log_of(folder), []
    for first, last in pairwise([0, *cuts, None]):
        own = lines[first:last]
        chapter, ranks = own[0]["chapter"].replace("_", " "), own[0]["ranks"]
        starts.append({"layout": f"{chapter}, {ranks} ranks",
                       "seconds": [line["time"] - begin for line in own],
                       "steps": [line["step"] for line in own],
                       "losses": [line["loss"] for line in own]})  # fmt: skip
    return starts


def run(layouts, folder, kills, seed, *flags):
    """Train in one layout after the other, with the faults shared out. Returns what pictures and
    formulas want to know."""
    begin, struck, cuts = time.time(), [], []
    faults = plan(kills, min(ranks for _, ranks, *_ in layouts), seed)
    for i, layout in enumerate(layouts):
        steps = STEPS * (i + 1) // len(layouts)
        of_layout = train(layout, folder, faults[i::len(layouts)], f"--steps={steps}",
                          f"--save-every={EVERY}", f"--seed={seed}", *flags)
        struck += of_layout
        cuts += [count for _, count, _ in of_layout] + [lines_of(folder)]
    starts = starts_of(folder, begin, cuts[:-1])
    struck = [(at - begin, is_unfinished) for at, _, is_unfinished in struck]
    return {"seconds": time.time() - begin, "starts": starts, "kills": struck, "every": EVERY,
            "folder": str(folder)}


def attempts_of(faulty):
    """Of each start, its steps and when they ended: [(step, seconds)]."""
    return [list(zip(start["steps"], start["seconds"])) for start in faulty["starts"]]


def report(faulty, quiet):
    """Print what the faults cost, and compare. Returns the checks."""
    of_losses, of_tensors = compare(Path(faulty["folder"]), Path(quiet["folder"]), STEPS)
    attempts = attempts_of(faulty)
    share, lost = goodput(attempts, faulty["seconds"])
    kills = len(faulty["kills"])
    unfinished = sum(is_unfinished for _, is_unfinished in faulty["kills"])
    print(f"{STEPS} steps in {len(LAYOUTS)} layouts, a save every {EVERY}")
    print(f"  {kills} kills, {unfinished} of which left a save unfinished; "
          f"{len(attempts)} starts; {lost} steps lost, {lost / kills:.1f} to a fault")
    print(f"  {faulty['seconds']:.1f} s, quietly {quiet['seconds']:.1f} s; goodput {share:.1%}")
    checks = []
    for name, off in (("losses of all steps", of_losses), ("the last checkpoint", of_tensors)):
        about = "values", name, "", "in three layouts"
        checks.append(as_check(about, off, TOLERANCE, off <= TOLERANCE))
        words = "bit for bit" if off == 0 else f"to {off:.0e}"
        mark = "✓" if off <= TOLERANCE else "✗"
        print(f"  {name}: {words} those of the quiet run   {mark}")
    return checks


def explain(faulty, waits):
    """Print the formulas with what was measured. waits: seconds that training waited for each save.
    """
    steps = [end - start for attempt in attempts_of(faulty)
             for (_, start), (_, end) in pairwise(attempt)]
    begins = [start["seconds"][0] for start in faulty["starts"]]
    restarts = [min(begin for begin in begins if begin > at) - at for at, _ in faulty["kills"]]
    save, restart = statistics.mean(waits), statistics.mean(restarts)
    interval = EVERY * statistics.median(steps)
    here = faulty["seconds"] / len(faulty["kills"])
    best = best_interval(save, LLAMA)
    print(f"  training waits {1e3 * save:.1f} ms for a save, and a restart takes {restart:.1f} s")
    print(f"  one fault in {here:.1f} s, saved every {interval:.2f} s; best by formula: every "
          f"{best_interval(save, here):.2f} s")
    print(f"  with Llama 3's faults, one in {LLAMA:,.0f} s: {best:.0f} s, and goodput "
          f"{expected_goodput(best, save, restart, LLAMA):.1%}")


def with_and_without(folder, args):
    """Train quietly, and with faults. Returns the checks, and what pictures show."""
    times = folder / "quiet.json"
    quiet = run(LAYOUTS[:1], folder / "quiet", 0, args.seed, f"--json={times}")
    faulty = run(LAYOUTS, folder / "faulty", args.kills, args.seed)
    checks = report(faulty, quiet)
    explain(faulty, json.loads(times.read_text())["recorded"]["checkpoints"]["waits"])
    return checks, {"quiet": quiet, "faulty": faulty}


def as_json(args, checks, recorded):
    """As a run writes it, so that lab.report has a line for it, and lab.pictures a figure."""
    of_losses, of_tensors = (check["measured"] for check in checks)
    problems = [f"{check['name']}: {check['measured']} off" for check in checks if not check["ok"]]
    return json.dumps({
        "chapter": "faults", "variant": "three layouts", "config": {"seed": args.seed},
        "world_size": LAYOUTS[0][1], "backend": "gloo", "recorded": recorded,
        "loss": recorded["faulty"]["starts"][-1]["losses"], "checks": checks,
        "seconds": recorded["faulty"]["seconds"], "problems": problems,
        "max_loss_diff": of_losses, "max_param_diff": of_tensors, "max_grad_diff": None,
    }, indent=1) + "\n"


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
                print(f"{output.name} ends with", *output.read_text().splitlines()[-15:],
                      sep="\n  ")
            return 1
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_json(args, checks, recorded))
    return 0 if all(check["ok"] for check in checks) else 1


if __name__ == "__main__":
    commands.program(main)
