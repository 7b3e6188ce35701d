"""The exercises: which functions of the chapters students write, and what checks them.

    python -m lab.exercises                     all of them, a line each
    python -m lab.exercises 04.2                one question
    python -m lab.exercises 04.2 --hint 1       and its first hint; --hint 2: both
    python -m lab.exercises --write exercises   the chapters, with holes in place of the functions
                                                (--level 1: of that level alone; --force: also
                                                over files that somebody has changed)

This table is the only place where an exercise is defined. What belongs into a hole stands in the
chapter itself. Levels: 1 is a line or two, 2 a page that one has to think about, 3 an evening.
"""

import argparse
import hashlib
import json
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab import cli, holes, refusals

ROOT = Path(__file__).resolve().parent.parent


class Run(NamedTuple):
    """A check: the chapter runs on so many ranks with these flags, and must match one GPU and its
    formulas in all that is compared. What the flags leave open is in SMALL."""
    ranks: int
    flags: str = ""


class Same(NamedTuple):
    """A check: an expression of the chapter's functions gives what the solution's functions give.
    It may use the names of the chapter, `tiny` (a Config) and `random(*shape)` (in float64, the
    same numbers for both)."""
    expression: str


class Exercise(NamedTuple):
    number: str             # "04.2"
    names: str              # functions or methods of the chapter: "SumOut.forward SumOut.backward"
    level: int
    question: str           # one to three plain sentences
    hints: tuple            # two, which open one after the other
    checks: tuple           # Run and Same
    title: str = ""         # if the names are not one

    @property
    def functions(self):
        return self.names.split()

    @property
    def what(self):
        return self.title or self.names


SMALL = ("--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps=3 --dtype=float64 "
         "--optimizer=sgd --device=cpu")

EXERCISES = {
    "01_single_gpu": [
    ],
    "02_data_parallel": [
    ],
    "03_zero": [
    ],
    "04_tensor_parallel": [
        Exercise(
            "04.2", "SumOut.backward", 1,
            "Every rank has put a partial output into the sum. Which gradient does a rank's part "
            "of a sum have, if the gradient of the sum is on every rank?",
            ("If z = x + y, what are dz/dx and dz/dy?",
             "The gradient of the sum is already on every rank: what is left to send?"),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
    ],
    "05_sequence_parallel": [
    ],
    "06_context_parallel": [
    ],
    "07_pipeline_parallel": [
    ],
    "08_expert_parallel": [
    ],
    "09_5d": [
    ],
    "kernels/elu": [
    ],
    "kernels/layernorm": [
    ],
    "kernels/flash_attention": [
    ],
}


def solution(chapter):
    return (ROOT / f"{chapter}.py").read_text()


def short(chapter):
    """What the numbers of a chapter's exercises begin with: "04", "layernorm"."""
    name = chapter.split("/")[-1]
    return name[:2] if name[0].isdigit() else name


def chosen(words):
    """{chapter: its exercises} that words such as "04", "04.2" and "layernorm" name; no words: all.
    """
    found = {}
    for word in words:
        these = {chapter: [e for e in exercises if word in (e.number, short(chapter))]
                 for chapter, exercises in EXERCISES.items()}
        these = {chapter: exercises for chapter, exercises in these.items() if exercises}
        if not these:
            raise Refused(f"there is no exercise {word}", "without EXERCISE")
        for chapter, exercises in these.items():
            found.setdefault(chapter, []).extend(exercises)
    return found if words else EXERCISES


# ------------------------------------------------------------------------------------ to write them

def with_holes(chapter, level=None):
    """The source of a chapter with a hole for every exercise, or for those of a level."""
    source = solution(chapter)
    for exercise in EXERCISES[chapter]:
        if level in (None, exercise.level):
            for name in exercise.functions:
                question = f"{exercise.number}, level {exercise.level}: {exercise.question}"
                source = holes.cut(source, name, question, f"{exercise.number}: {name}")
    return source


def write(folder, level=None, force=False):
    """Write the chapters with holes, but not over a file that somebody has changed: those are
    returned. What was written is noted in the folder, so that a change can be seen."""
    note = folder / ".written.json"
    written = json.loads(note.read_text()) if note.exists() else {}
    changed = []
    for chapter in EXERCISES:
        path = folder / f"{chapter}.py"
        if path.exists() and not force and digest(path.read_bytes()) != written.get(chapter):
            changed.append(path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_holes(chapter, level))
        written[chapter] = digest(path.read_bytes())
    note.write_text(json.dumps(written, indent=1) + "\n")
    return changed


def digest(data):
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = cli.Parser("python -m lab.exercises", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    parser.add_argument("--hint", type=int, choices=(1, 2), help="open so many hints")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the chapters with holes")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), help="holes of this level alone")
    parser.add_argument("--force", action="store_true", help="also over files that were changed")
    args = parser.parse_args(argv)
    args.chosen = chosen(args.exercise)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.write:
        changed = write(args.write, args.level, args.force)
        print(f"{len(EXERCISES) - len(changed)} files with holes are in {args.write}")
        for path in changed:
            print(f"{path} was changed, and stays as it is (FORCE=1 make exercises, or --force)")
        return 0
    for exercises in args.chosen.values():
        for exercise in exercises:
            print(f"{exercise.number:20}level {exercise.level}   {exercise.what}")
            if args.exercise:
                for words in (exercise.question, *exercise.hints[: args.hint or 0]):
                    print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))
    return 0


if __name__ == "__main__":
    cli.program(main)
