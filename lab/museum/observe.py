"""Plays an exhibit, and names the observables that see it.

A run of 20 steps is compared with the same run without the bug, in its loss, and by its own report
with one GPU and with the formulas. An observable is what a team could look at: the first loss, the
loss after 20 steps, gradients, their norm, parameters, what is sent, what is kept. Each check of
the report belongs to one, by its kind. A run that goes on from a checkpoint is also compared,
in all its losses, with one that hasn't stopped. A bug that shows only at full size is also
rehearsed there.
"""

import functools
import importlib
import json
import math
import shlex
import sys
import tempfile
from array import array
from pathlib import Path
from typing import NamedTuple

from lab import ROOT
from lab.classroom import checks, inside, values
from lab.classroom.words import in_words
from lab.museum.exhibit import OBSERVABLES

STEPS = 20
CLOSE = 1e-5            # relatively: losses of a run that went on, on another number of ranks
VISIBLE = 1e-3          # a relative difference of the loss that a curve could show
MODEL = f"--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps={STEPS}"


class Seen(NamedTuple):
    """What was seen of a run."""
    status: int             # 0: nothing was found; 1: something; None: it did not end by itself
    caught: tuple           # the observables that saw something
    loss: list              # of each step
    said: tuple             # the run's own words

    def with_problems(self, observable, problems):
        """What was seen, and what one more observable has found, if anything."""
        if not problems:
            return self
        return self._replace(status=1, caught=(*self.caught, observable),
                             said=(*self.said, *problems))


# ----------------------------------------------------------------------------- an exhibit's run

def sources(exhibit):
    """The file as it is, and with the bug."""
    right = (ROOT / exhibit.file).read_text(encoding="utf-8")
    return right, exhibit.plant(right)


def trains(exhibit):
    """Whether its run trains a model."""
    return exhibit.ranks > 0 and not exhibit.file.startswith("00")


def flags_of(exhibit, optimizer):
    """With this optimizer, if the exhibit needs no other."""
    if trains(exhibit) and "--optimizer" not in exhibit.flags:
        return f"{exhibit.flags} --optimizer={optimizer}"
    return exhibit.flags


# ---------------------------------------------------------------------------------- playing it

def play_both(exhibit, flags):
    """What was Seen without the bug, and with it."""
    return tuple(play(exhibit.file, source, exhibit.ranks, flags, exhibit.chapter, exhibit.before,
                      exhibit.rehearsal)
                 for source in sources(exhibit))


@functools.cache
def play(file, source, ranks, flags, chapter="", before=(), rehearsal=""):
    """Run a chapter in a copy of the course whose `file` has this source: what was Seen. It ends,
    whatever the source does. chapter, before, rehearsal: as of an Exhibit."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        planted = copy / file
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text(source, encoding="utf-8")
        if ranks == 0:
            return compare_published_tables(planted)
        seen = train_in_parts(copy, chapter or file, before, ranks, flags)
    if seen.status is None:
        return seen
    if before:
        never_stopped = play(file, source, ranks, flags, chapter).loss
        same_ranks = {ranks_before for ranks_before, _ in before} == {ranks}
        if not agree(seen.loss, never_stopped, same_ranks):
            seen = seen.with_problems(
                "resume", ["the losses are not those of a run that has not stopped"])
    if rehearsal:
        outcome = rehearse(file, source, rehearsal)
        if outcome.record is None:
            return did_not_end(outcome)
        seen = seen.with_problems("rehearsal", outcome.record["problems"])
    return seen


def train_in_parts(copy, chapter, before, ranks, flags):
    """What was Seen of a run that goes on from those before, (ranks, steps), with all losses."""
    losses, resume = [], ""
    for ranks_before, steps in before:
        seen = train(copy, chapter, ranks_before, f"{flags} --steps={steps} --save={copy}/saved "
                                                  f"--save-every=5 {resume}")
        if seen.status is None:
            return seen
        losses, resume = losses + seen.loss, f"--resume={copy}/saved"
    seen = train(copy, chapter, ranks, f"{flags} {resume}")
    return seen._replace(loss=losses + seen.loss)


def train(copy, chapter, ranks, flags):
    """One run of a chapter: what was Seen. copy: a folder whose files take the place of others."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        path = copy / chapter if (copy / chapter).exists() else ROOT / chapter
        text = scratch / "text.bin"         # no letters: chapter 01 would write some in the end
        text.write_bytes(array("H", [*Path(checks.TEXT).read_bytes()]).tobytes())
        model = "" if chapter.startswith("00") else f"--data={text} {MODEL}"
        argv = shlex.split(f"--device=cpu {model} {flags}")
        calls = [(be_a_rank_with, (copy, path, rank, ranks, argv)) for rank in range(ranks)]
        outcome = checks.play(scratch, path, calls, limit=20, more_paths=[str(copy)])
        run = outcome.record
        if run is None:
            words = in_words(outcome, path.read_text(encoding="utf-8"), lambda line: line)
            return Seen(None, (), [], tuple(words))
        said = tuple(run["diagnosis"] or run["problems"])
        return Seen(int(bool(run["problems"])), caught_in(run), run.get("loss", []), said)


def be_a_rank_with(hand_in, copy, path, *args):
    """In a process of its own: a rank of a chapter, which imports the course's modules from this
    folder, where it has them."""
    if not path.is_relative_to(copy):
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("common", "kernels", "lab"):
                del sys.modules[name]
        sys.path[:0] = [str(copy)]
        import lab

        lab.__path__[:0] = [str(copy / "lab")]
        for room in filter(Path.is_dir, (copy / "lab").glob("*")):
            importlib.import_module(f"lab.{room.name}").__path__[:0] = [str(room)]
    return inside.be_a_rank(hand_in, path, *args)


def caught_in(run):
    """The observables that saw something, of a run's JSON."""
    caught = [check["kind"] for check in run["checks"] if check["ok"] is False]
    if "tolerance" in run:
        pairs, allowed = zip(run["loss"], run["reference_loss"]), run["tolerance"]["loss"]
        differs = [abs(a - b) > allowed * abs(b) for a, b in pairs if None not in (a, b)]
        caught += ["first loss"] * (differs[:1] == [True]) + ["loss"] * any(differs)
        caught += [kind for kind in run["unlike"] if kind != "loss"]
    return tuple(name for name in OBSERVABLES if name in caught)


def agree(losses, others, bitwise):
    """Whether these are the losses of one run: on other ranks, of one that rounds otherwise."""
    tolerance = 0 if bitwise else CLOSE
    return len(losses) == len(others) and all(
        math.isclose(a, b, rel_tol=tolerance) for a, b in zip(losses, others))


@functools.cache
def rehearse(file, source, flags):
    """The Outcome of a rehearsal of a chapter with this source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, file)
        path.write_text(source, encoding="utf-8")
        call = be_rehearsed, (path, [file, *shlex.split(flags)])
        return checks.play(folder, path, [call], limit=60)


def be_rehearsed(hand_in, path, argv):
    """In a process of its own: hand in what a rehearsal finds."""
    from lab import rehearse

    return hand_in_problems(hand_in, rehearse.problems_of(inside.load(path, path.stem), argv))


def compare_published_tables(path):
    """What is Seen of chapter 10 in this file: the published tables that it misses."""
    outcome = checks.play(path.parent, path, [(be_compared, (path,))], limit=60)
    if outcome.record is None:
        return did_not_end(outcome)
    wrong = tuple(outcome.record["problems"])
    return Seen(int(bool(wrong)), wrong, [], wrong)


def be_compared(hand_in, path):
    """In a process of its own: hand in which published tables this chapter 10 misses."""
    from lab.planner import published

    return hand_in_problems(hand_in, published.tables_missed(inside.load(path, path.stem)))


def hand_in_problems(hand_in, problems):
    """Hand in problems as a run hands in its own."""
    record = {"problems": problems, "diagnosis": [], "config": {}}
    status = int(bool(problems))
    hand_in(values.pack({"status": status, "record": json.dumps(record)}))
    return status


def did_not_end(outcome):
    """What is Seen of processes that have handed in nothing."""
    return Seen(None, (), [], tuple(error for error, _ in outcome.errors.values()))


# --------------------------------------------------------------------------- how silent it is

def relative_differences(clean, planted):
    """Of the loss with the bug from that without, at the first step and at the last; None: one of
    them isn't known."""
    if not clean.loss or len(planted.loss) < len(clean.loss) or None in planted.loss:
        return None, None
    return tuple(abs(planted.loss[i] / clean.loss[i] - 1) for i in (0, -1))


def first_step(clean, planted):
    """The first step whose loss is not that of the run without the bug; None: there is none."""
    for step, (a, b) in enumerate(zip(clean.loss, planted.loss), start=1):
        if b is None or abs(b - a) > 1e-5 * abs(a):
            return step
    return None
