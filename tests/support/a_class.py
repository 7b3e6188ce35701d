"""A class: what students hand in of chapter 04, the points that each deserves for two exercises,
and what the grader must say. Half of them attack it, or break what it reads."""

import os
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from lab.classroom import holes
from tests.lab.classroom.two_exercises import (
    ANSWER,
    CHAPTER,
    LINES,
    PAYS,
    RIGHT,
    SOLUTION,
    SUM,
    instead,
)

ALL = {"04.2": 1, "04.7": 2}  # what each is worth
NOTHING = dict.fromkeys(ALL, 0)
# A name with an escape sequence, and a byte that isn't UTF-8 where names may have one.
ODD = os.fsdecode(b"\x1b[2J \xff") if sys.platform == "linux" else "\x1b[2J \xff"


class Student(NamedTuple):
    text: str | None  # of the chapter; None: not submitted
    points: dict = ALL  # {number of an exercise: what it deserves}
    beside: dict = {}  # {another file: its text}
    says: tuple = ()  # (number, words that the grader must say)


TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
ANSWERS = TEXTS["answers"]


def written_differently():
    by_hand = instead("        return summed(gradient, ctx.group), None\n", ANSWERS["by_hand"])
    module = instead("import common\n", "import common\nfrom my_numbers import EIGHT\n").replace(
        "    return 1 + 8 * dim", "    return 1 + EIGHT * dim")
    two_times = instead(RIGHT + "\n", ANSWERS["two_times"])
    return {"by hand": Student(by_hand), "two times": Student(two_times),
            "a module beside": Student(module, beside={"my_numbers.py": "EIGHT = 8\n"})}


def unfinished():
    nothing = SOLUTION
    for exercise in SUM, PAYS:
        nothing = holes.cut(nothing, exercise.functions[0], "?", "?")
    return {"nothing": Student(nothing, NOTHING),
            "one of two": Student(holes.cut(SOLUTION, "ranks_that_pay", "?", "?"),
                                  ALL | {"04.7": 0}),
            "an empty file": Student("", NOTHING),
            "no file": Student(None, NOTHING, {"README.md": "I was ill.\n"})}


def wrong():
    """One isn't Python, which costs the whole file, and one waits forever."""
    none = ALL | {"04.2": 0}
    return {"broken": Student(instead(ANSWER, "        return gradient,, None\n"), NOTHING,
                              says=("04", "invalid syntax")),
            "waits": Student(instead(ANSWER, ANSWERS["waits"] + ANSWER), none,
                             says=("04.2", "rank 1 waiting in barrier"))}


def hostile(pids):
    """An attack costs its own exercise, and not even that if the answer next to it is right."""
    found = {}
    for name, attack in TEXTS["hostile"].items():
        body = attack["body"].replace("{pids}", str(pids)).replace("{right}", RIGHT)
        text, says = instead(LINES[PAYS], body), attack.get("says")
        if says:
            found[name] = Student(text, ALL | {PAYS.number: 0}, says=(PAYS.number, says))
        else:
            found[name] = Student(text)
    return found | {"rot13": Student(f"# coding: rot13\n{SOLUTION}", NOTHING)}


def students(pids):
    """{name: Student}. pids: a file in which they note the processes that they start."""
    return {"=cmd|' (ours)": Student(SOLUTION), ODD: Student(SOLUTION), **written_differently(),
            **unfinished(), **wrong(), **hostile(pids)}


def write(these, folder):
    for name, student in these.items():
        own = Path(folder, name)
        own.mkdir(parents=True)
        files = student.beside | ({f"{CHAPTER}.py": student.text} if student.text is not None
                                  else {})
        for file, text in files.items():
            (own / file).write_text(text, encoding="utf-8")
