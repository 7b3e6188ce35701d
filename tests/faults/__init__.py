"""Faults that students make and frameworks had, planted into our own files: a table per chapter.

    [[faults]]                          # chapter_04.toml
    right = 'summed(gradient, ctx.group)'
    wrong = 'gradient'
    graded."04.1" = "differ between ranks that hold the same"

A fault is one edit, and what each instrument must say about it: the grader, a run that is verified
(`[[faults.verified]]`), and a run on pretended CUDA (`[[faults.on_cuda]]`). An edit appears once:
what a bug of the museum plants (lab/chapters/NN/exhibits.toml) isn't planted here for the verifier
again.
"""

import ast
import tomllib
from pathlib import Path
from typing import NamedTuple

from lab.classroom import exercises, holes


class Verified(NamedTuple):
    """A run that is checked against one GPU ends with status 1."""

    ranks: int
    flags: str
    named: str = ""  # part of a line that begins with ✗
    diagnosis: list = ()  # all lines that begin with →


class Graded(NamedTuple):
    """The grader marks the exercise as wrong."""

    exercise: str
    says: str


class OnCuda(NamedTuple):
    """A run on pretended CUDA breaks one of CUDA's or NCCL's rules on every rank."""

    flags: str
    rule: str


class Fault(NamedTuple):
    """An edit of the file NAME.py, and what sees it.

    right: text that the file contains once, or the functions of the exercise in `seen_by` do.
    """

    file: str
    right: str
    wrong: str
    seen_by: list

    def by(self, kind):
        return [seen for seen in self.seen_by if isinstance(seen, kind)]

    def planted(self):
        """The source of the file with the fault. Raises ValueError if `right` isn't there once."""
        source = exercises.solution(self.file)
        if source.count(self.right) == 1:
            return source.replace(self.right, self.wrong)
        changed = []
        for graded in self.by(Graded):
            for name in EXERCISES[graded.exercise][1].functions:
                first, last = holes.lines_of(holes.find(ast.parse(source), name))
                text = "\n".join(source.split("\n")[first - 1 : last])
                if text.count(self.right) == 1:
                    changed.append(source.replace(text, text.replace(self.right, self.wrong)))
        if len(changed) != 1:
            raise ValueError(f"{self.file}.py contains {source.count(self.right)} times, and the "
                             f"exercise {len(changed)} times: {self.right}")
        return changed[0]


EXERCISES = {exercise.number: (file, exercise)
             for file, those in exercises.EXERCISES.items() for exercise in those}
FILES = {f"chapter_{exercises.short(file)}": file for file in exercises.EXERCISES}
FILES |= {"duality": "lab/chapters/04/duality", "sharding": "lab/chapters/04/sharding"}


def read(path):
    """The faults of a table. Kernels share one: their exercise names the file."""
    faults = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["faults"]:
        graded = [Graded(exercise, says) for exercise, says in entry.pop("graded", {}).items()]
        verified = [verified_of(run) for run in entry.pop("verified", [])]
        on_cuda = [OnCuda(**run) for run in entry.pop("on_cuda", [])]
        file = FILES.get(path.stem) or EXERCISES[graded[0].exercise][0]
        faults.append(Fault(file, **entry, seen_by=[*graded, *verified, *on_cuda]))
    return faults


def verified_of(run):
    """A run's entry. A line of its diagnosis may go over several lines of the file."""
    diagnosis = [" ".join(line.split()) for line in run.get("diagnosis", [])]
    return Verified(**run | {"diagnosis": diagnosis})


TABLES = {path.stem: read(path) for path in sorted(Path(__file__).parent.glob("*.toml"))}
FAULTS = [fault for table in TABLES.values() for fault in table]


def wrong_answers(number):
    """The faults that the grader must see in an exercise, "04.1"."""
    return [fault for fault in FAULTS
            if number in [graded.exercise for graded in fault.by(Graded)]]
