"""The folder that students get: the course with holes, and what grades them, without a solution.

Chapters, kernels and two lessons beside chapter 04 come with holes; so do functions that repeat
what an earlier chapter asks for, and say where students have written that. Of lab/ comes what the
grader, the exercises and a chapter's run import: so not the museum, whose exhibits quote solutions,
nor predictions, whose derivations are answers. The values of each check on the solution are in
lab/classroom/answers.json; a run compares itself with one GPU.
"""

import ast
import base64
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import ROOT, chapters
from lab.classroom import checks, exercises, holes

PROGRAMS = "lab.exercises", "lab.grade", "lab.pictures"
OF_ROOMS = ("about.py", "*checks.py", "figure.py", "held.py", "simulate.py", "oracle.py")
AS_THEY_ARE = "LICENSE", "lab/setup.mk", "lab/setup.sh"
HANDOUT = Path(__file__).with_name("handout")           # a README and a Makefile of its own
REQUIRED = "requirements.txt", "lab/requirements/kernels.txt"
REPEATS = {             # {file: {a function: the exercise of an earlier file that it repeats}}
    "05_sequence_parallel.py": {"train_step": "04.5: train_step"},
    "09_5d.py": {"AllToAll.backward": "08.1: AllToAll.backward",
                 "one_forward_one_backward": "07.2: one_forward_one_backward"},
    "11_muon.py": {"Unit.views": "03.1: Unit.views"},
    "kernels/rmsnorm.py": {"forward_kernel": "layernorm.2: forward_kernel",
                           "backward_kernel": "layernorm.3: backward_kernel"},
}


# --------------------------------------------------------------------------------- what comes along

def imported(path):
    """The files of the project that a file of it imports, also inside functions, and the packages
    around them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {file for name in names for file in files_of(name)}


def files_of(name):
    """The file of a module "lab.run.words", and those of the packages around it."""
    parts = name.split(".")
    if parts[0] not in ("lab", "kernels"):
        return []
    packages = [ROOT.joinpath(*parts[:n], "__init__.py") for n in range(1, len(parts) + 1)]
    return [path for path in (*packages, ROOT.joinpath(*parts).with_suffix(".py"))
            if path.exists()]


def files_of_students():
    """The files of the course that students' programs are, and all that these import."""
    waiting = [ROOT / "common.py", *(ROOT / f"{name}.py" for name in chapters.NAMES)]
    waiting += [path for name in PROGRAMS for path in files_of(name)]
    for pattern in OF_ROOMS:
        waiting += chapters.HERE.glob(f"*/{pattern}")
    files = set()
    while waiting:
        path = waiting.pop()
        if path not in files:
            files.add(path)
            waiting += imported(path)
    return files


def texts():
    """{path in the folder: its text}."""
    files = {*files_of_students(), *ROOT.glob("kernels/*.py"), *ROOT.glob("lab/planner/*.toml"),
             *ROOT.glob("lab/run/*.toml"),
             *chapters.HERE.glob("*/*exercises.toml"), *(ROOT / name for name in AS_THEY_ARE)}
    folder = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    folder |= {f"{chapter}.py": exercises.with_holes(chapter) for chapter in exercises.EXERCISES}
    folder["requirements.txt"] = "".join((ROOT / name).read_text() for name in REQUIRED)
    for file, functions in REPEATS.items():
        for name, hole in functions.items():
            words = f"{hole}, as you have written it there, or nearly so."
            folder[file] = holes.cut(folder[file], name, words, hole)
    return folder | {path.name: path.read_text(encoding="utf-8") for path in HANDOUT.iterdir()}


def answers(numbers=None, say=lambda words: None):
    """{key of a Same: what it gives of the solution on each rank, packed, in base64}. numbers: of
    the exercises; None: of all."""
    every = {check.key: (chapter, exercises.solution(chapter), check)
             for chapter, check in checks_of_values(numbers)}
    stored = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:     # each waits for processes
        answered = threads.map(lambda one: checks.answers(*one), every.values())
        for key, packed in zip(every, answered):
            stored[key] = [base64.b64encode(data).decode() for data in packed]
            if len(stored) % 50 == 0 or len(stored) == len(every):
                say(f"{len(stored)} of {len(every)} answers")
    return stored


def checks_of_values(numbers):
    """(chapter, check) of each Same of these exercises."""
    for chapter, these in exercises.EXERCISES.items():
        for exercise in these:
            if numbers is None or exercise.number in numbers:
                yield from ((chapter, check) for check in exercise.checks
                            if not checks.is_run(check))


def write(folder, numbers=None, say=lambda words: None):
    """Write the folder. numbers: of the exercises that can be graded there; None: all."""
    stored = json.dumps(answers(numbers, say), indent=0)
    answers_file = checks.STORED.relative_to(ROOT).as_posix()
    for name, text in (texts() | {answers_file: stored}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
