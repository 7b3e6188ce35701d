"""What an exercise is, and how a room's exercises.toml is read.

    file = "02_data_parallel"           # whose functions students write

    [[exercises]]
    number = "02.6"
    names = "wire_bytes"                # title: what it is called, if the names are not one
    level = 1
    question = 'How many bytes does one of N ranks send?'
    hints = ["The first", "The second"]
    [[exercises.checks]]                # the chapter's run matches its formulas and one GPU
    run = "--variant naive"
    ranks = 4
    [[exercises.checks]]                # an expression has the value that it has for our solution
    value = "chapter.wire_bytes(1000, 4)"
    words = "1,000 bytes on 4 ranks"

An expression knows the student's module as `chapter`, and the names of lab/chapters/checking.py and
of the checks.py beside the file.
"""

import ast
import importlib
import tomllib
from typing import NamedTuple

from lab import ROOT
from lab.chapters import checking
from lab.classroom import holes

SMALL = ("--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps=3 --dtype=float64 "
         "--optimizer=sgd")                             # what a Run's flags leave open


class Run(NamedTuple):
    """A check: the chapter runs on so many ranks with these flags, and must match its formulas and
    one GPU (00: PyTorch) in all that is compared. What a model's flags leave open is in SMALL."""
    ranks: int
    flags: str = ""


class Same(NamedTuple):
    """A check: what an expression gives of a student's module is what it gives of the solution's.
    words: what is compared, as a student is told. module: which names it knows beside `chapter`.
    ranks: where it is evaluated; those of several are gloo's, all in dist.group.WORLD, and each
    one's value is compared."""
    expression: str
    words: str
    module: str
    ranks: int = 1

    @property
    def key(self):
        """What tells it from the other checks of all exercises."""
        return f"{self.module}: {self.expression} on {self.ranks}"

    def value(self, chapter):
        """Of a chapter's module."""
        names = vars(checking) | vars(importlib.import_module(self.module))
        checking.seed()
        return eval(self.expression, names | {"chapter": chapter})


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


def read(path):
    """(file without .py, its exercises) of an exercises.toml. Raises ValueError with one line: the
    file, the exercise, and what is wrong with it."""
    module = checking.__name__
    beside = path.with_name(path.name.replace("exercises.toml", "checks.py"))
    if beside.exists():
        module = f"lab.chapters.{path.parent.name}.{beside.stem}"
    importlib.import_module(module)                     # before the grader forks
    number = "the file"
    try:
        room, exercises = tomllib.loads(path.read_text(encoding="utf-8")), []
        functions = functions_of(room["file"])
        for entry in room["exercises"]:
            number = entry.get("number", "an exercise")
            exercise = exercise_of(entry, module)
            check_names(exercise, exercises, functions)
            exercises.append(exercise)
        return room["file"], exercises
    except KeyError as error:
        raise ValueError(f"{path}: {number}: {error} is missing") from None
    except (TypeError, ValueError, SyntaxError) as error:       # a key that isn't ours; no TOML
        raise ValueError(f"{path}: {number}: {error}") from None


def functions_of(file):
    """The names of a chapter's functions and methods."""
    tree = ast.parse((ROOT / f"{file}.py").read_text(encoding="utf-8"))
    return {name for name, _ in holes.functions(tree)}


def check_names(exercise, others, functions):
    """Raise ValueError if another exercise has its number, or if one of its functions isn't there
    or is another's."""
    if exercise.number in [other.number for other in others]:
        raise ValueError("another exercise has this number")
    for name in exercise.functions:
        if name not in functions:
            raise ValueError(f"the chapter has no function {name}")
        if any(name in other.functions for other in others):
            raise ValueError(f"another exercise asks for {name}")


def exercise_of(entry, module):
    """The Exercise of an entry of the file."""
    texts = {"question": flowing(entry["question"]), "hints": tuple(map(flowing, entry["hints"]))}
    checks = tuple(check_of(check, module) for check in entry["checks"])
    return Exercise(**entry | texts | {"checks": checks})


def check_of(entry, module):
    """The Run or Same of an entry of the file."""
    if "run" in entry:
        return Run(entry["ranks"], flowing(entry["run"]))
    expression = entry["value"].strip()
    compile(expression, "value", "eval")
    return Same(expression, entry["words"], module, entry.get("ranks", 1))


def flowing(text):
    """A text in one line."""
    return " ".join(text.split())
