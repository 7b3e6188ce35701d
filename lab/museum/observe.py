"""Plays an exhibit, and says which observables see it.

A run of 20 steps is compared with the same run without the bug, in its loss, and by its own report
with one GPU and with the formulas. An observable is what a team could look at: the first loss, the
loss after 20 steps, gradients, their norm, parameters, what is sent, what is kept. Each check of
the report belongs to one, by its kind. A run that goes on from a checkpoint is also compared,
in all its losses, with one that has not stopped. What shows at full size alone is rehearsed there,
behind its run.
"""

import functools
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import NamedTuple

from lab import ROOT
from lab.classroom import checks, plain
from lab.classroom.words import in_words

STEPS = 20
CLOSE = 1e-5            # relatively: losses of a run that went on, on another number of ranks
VISIBLE = 1e-3          # a relative difference of the loss that a curve could show
OBSERVABLES = ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept",
               "states", "FLOPs", "values", "time", "resume", "rehearsal")
MODEL = f"--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps={STEPS}"


class Seen(NamedTuple):
    """What was seen of a run."""
    status: int             # 0: nothing was found; 1: something; None: it did not end by itself
    caught: tuple           # the observables that saw something
    loss: list              # of each step
    said: tuple             # the run's own words


def of_record(run):
    """The observables that saw something, of a run's JSON."""
    caught = [check["kind"] for check in run["checks"] if check["ok"] is False]
    if "tolerance" in run:
        losses, there, allowed = run["loss"], run["reference_loss"], run["tolerance"]["loss"]
        off = [abs(a - b) > allowed * abs(b) for a, b in zip(losses, there) if None not in (a, b)]
        caught += ["first loss"] * (off[:1] == [True]) + ["loss"] * any(off)
        caught += [kind for kind in run["unlike"] if kind != "loss"]
    return tuple(name for name in OBSERVABLES if name in caught)


@functools.lru_cache(maxsize=None)
def play(file, source, ranks, flags, chapter="", before=(), rehearsal=""):
    """Run a chapter in a copy of the course whose `file` has this source: what was Seen. It ends,
    whatever the source does. chapter, before, rehearsal: as of an Exhibit."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        planted = copy / file
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(source, encoding="utf-8")
        if ranks == 0:
            return published(planted, flags)
        losses, goes_on = [], ""
        for ranks_before, steps in before:
            stops = f"{flags} --steps={steps} --save={copy}/saved --save-every=5 {goes_on}"
            seen = train(copy, chapter or file, ranks_before, stops)
            if seen.status is None:
                return seen
            losses, goes_on = losses + seen.loss, f"--resume={copy}/saved"
        seen = train(copy, chapter or file, ranks, f"{flags} {goes_on}")
    if rehearsal and seen.status is not None:
        seen = seen_at_full_size(seen, rehearse(file, source, rehearsal))
    if not before or seen.status is None:
        return seen
    never_stopped = play(file, source, ranks, flags, chapter).loss
    is_same = agree(losses + seen.loss, never_stopped, {ranks for ranks, _ in before} == {ranks})
    said = () if is_same else ("the losses are not those of a run that has not stopped",)
    return Seen(max(seen.status, int(not is_same)), seen.caught + ("resume",) * (not is_same),
                losses + seen.loss, seen.said + said)


def train(copy, chapter, ranks, flags):
    """One run of a chapter: what was Seen. copy: a folder whose files take the place of others."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        path = copy / chapter if (copy / chapter).exists() else ROOT / chapter
        text = scratch / "text.bin"         # no letters: chapter 01 would write some in the end
        text.write_bytes(array("H", [*Path(checks.TEXT).read_bytes()]).tobytes())
        model = "" if chapter.startswith("00") else f"--data={text} {MODEL}"
        argv = shlex.split(f"--device=cpu {model} {flags}")
        preferred = None if path.is_relative_to(copy) else copy
        calls = [(checks.be_a_rank, (path, rank, ranks, argv, preferred)) for rank in range(ranks)]
        outcome = checks.play(scratch, path, calls, limit=20, more_paths=[str(copy)])
        run = outcome.record
        if run is None:
            words = in_words(outcome, path.read_text(encoding="utf-8"), lambda line: line)
            return Seen(None, (), [], tuple(words))
        said = tuple(run["diagnosis"] or run["problems"])
        return Seen(int(bool(run["problems"])), of_record(run), run.get("loss", []), said)


@functools.lru_cache(maxsize=None)
def rehearse(file, source, flags):
    """The Outcome of a rehearsal of a chapter with this source."""
    with tempfile.TemporaryDirectory() as folder:
        path, argv = Path(folder, file), [file, *shlex.split(flags)]
        path.write_text(source, encoding="utf-8")
        return checks.play(path.parent, path, [(be_rehearsed, (path, argv))], limit=60)


def seen_at_full_size(seen, outcome):
    """What was Seen of a run, and of its rehearsal."""
    if outcome.record is None:
        return seen._replace(status=None, said=tuple(error for error, _ in outcome.errors.values()))
    found = tuple(outcome.record["problems"])
    return Seen(max(seen.status, int(bool(found))), seen.caught + ("rehearsal",) * bool(found),
                seen.loss, seen.said + found)


def be_rehearsed(tell, path, argv):
    """In a process of its own: tell what a rehearsal finds."""
    from lab import rehearse

    problems = rehearse.problems_of(checks.load(path, path.stem), argv)
    record = {"problems": problems, "diagnosis": [], "config": {}}
    tell(plain.pack({"status": int(bool(problems)), "record": json.dumps(record)}))
    return int(bool(problems))


def agree(losses, others, bitwise):
    """Whether these are the losses of one run: on other ranks, of one that rounds otherwise."""
    close = lambda a, b: a == b if bitwise else math.isclose(a, b, rel_tol=CLOSE)
    return len(losses) == len(others) and all(map(close, losses, others))


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


def trains(exhibit):
    return exhibit.ranks > 0 and not exhibit.file.startswith("00")


def flags_of(exhibit, optimizer, dtype=None):
    """With this optimizer, and in this precision, if the exhibit needs no other."""
    flags = exhibit.flags
    if trains(exhibit) and "--optimizer" not in flags:
        flags += f" --optimizer={optimizer}"
    if dtype and trains(exhibit) and "--dtype" not in flags and "--precision" not in flags:
        flags += f" --dtype={dtype}"
    return flags


def play_both(exhibit, flags):
    """What was Seen without the bug, and with it."""
    return tuple(play(exhibit.file, source, exhibit.ranks, flags, exhibit.chapter, exhibit.before,
                      exhibit.rehearsal)
                 for source in sources(exhibit))


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
