"""Plays an exhibit, and says which observables see it.

A run of 20 steps is compared with the same run without the bug, in its loss, and by its own report
with one GPU and with the formulas. An observable is what a team could look at: the first loss, the
loss after 20 steps, gradients, their norm, parameters, what is sent, what is kept. A check of the
report belongs to one of them by its name.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab import checks

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 20
VISIBLE = 1e-3          # a relative difference of the loss that a curve could show
OBSERVABLES = ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept",
               "states", "FLOPs", "values")
MODEL = f"--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps={STEPS}"
WORDS = {               # in the name of a check: what it is about; the first that is found
    "PyTorch's gives": "values", "backward": "values", "heard of all": "values",
    "all_": "sent", "reduce": "sent", "send": "sent", "other groups": "sent",
    "activations": "kept", "kept": "kept", "FLOPs": "FLOPs", "computed": "FLOPs",
    "parameters": "states", "gradients": "states", "optimizer states": "states",
}                       # and all others: "sent"


class Seen(NamedTuple):
    """What was seen of a run."""
    status: int             # 0: nothing was found; 1: something; None: it did not end by itself
    caught: tuple           # the observables that saw something
    loss: list              # of each step
    said: tuple             # the run's own words


def observable_of(name):
    """Of a check of the report."""
    return next((what for words, what in WORDS.items() if words in name), "sent")


def of_record(run):
    """The observables that saw something, of a run's JSON."""
    caught = [observable_of(check["name"]) for check in run["checks"] if check["ok"] is False]
    if "tolerance" in run:
        losses, there, allowed = run["loss"], run["reference_loss"], run["tolerance"]["loss"]
        off = [abs(a - b) > allowed * abs(b) for a, b in zip(losses, there) if None not in (a, b)]
        caught += ["first loss"] * (off[:1] == [True]) + ["loss"] * any(off)
        kinds = "gradient norm", "gradients", "parameters"
        caught += [next(kind for kind in kinds if problem.startswith(kind))
                   for problem in run["problems"] if problem.startswith(kinds) and " is off by "
                   in problem]
    return tuple(name for name in OBSERVABLES if name in caught)


@functools.lru_cache(maxsize=None)
def play(name, source, ranks, flags):
    """Run a chapter with this source: what was Seen. It ends, whatever the source does."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        path = scratch / name
        path.write_text(source, encoding="utf-8")
        if ranks == 0:
            return published(path, flags)
        model = "" if name.startswith("00") else f"--data={checks.TEXT} {MODEL}"
        argv = shlex.split(f"--device=cpu {model} {flags} --json={scratch}/run.json")
        calls = [(checks.be_a_rank, (scratch, path, rank, ranks, argv, []))
                 for rank in range(ranks)]
        outcome = checks.play(scratch, path, calls, limit=20)
        record = scratch / "run.json"
        if not record.exists():
            words = checks.in_words(outcome, source, lambda line: line)
            return Seen(None, (), [], tuple(words))
        run = json.loads(record.read_text())
        said = tuple(run["diagnosis"] or run["problems"])
        return Seen(int(bool(run["problems"])), of_record(run), run.get("loss", []), said)


def published(path, flags):
    """Chapter 10's own check, in a program of its own: the tables that it does not meet."""
    ran = subprocess.run([sys.executable, path, *shlex.split(flags)], capture_output=True,
                         text=True, timeout=60, env=os.environ | {"PYTHONPATH": str(ROOT)})
    *_, last = ran.stdout.splitlines() or [""]
    wrong = last.rpartition(": ")[2].split("; ") if last.startswith("✗") else []
    return Seen(ran.returncode, tuple(wrong), [], (last,))


def sources(exhibit):
    """The file as it is, and with the bug."""
    right = (ROOT / exhibit.file).read_text(encoding="utf-8")
    return right, exhibit.plant(right)


def flags_of(exhibit, optimizer):
    trains = exhibit.ranks and not exhibit.file.startswith("00")
    return f"{exhibit.flags} --optimizer={optimizer}" if trains else exhibit.flags


def silence(clean, planted):
    """How silent it is: the relative differences of the loss at the first step and at the last."""
    if not clean.loss or len(planted.loss) < len(clean.loss) or None in planted.loss:
        return None, None
    return tuple(abs(planted.loss[i] / clean.loss[i] - 1) for i in (0, -1))


def first_step(clean, planted):
    """The first step whose loss is not that of the run without the bug; None: there is none."""
    off = (i for i, (a, b) in enumerate(zip(clean.loss, planted.loss), start=1)
           if b is None or abs(b - a) > 1e-5 * abs(a))
    return next(off, None)
