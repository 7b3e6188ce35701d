"""The folder that students get: the course with holes, and what grades them, without a solution.

    python -m lab.bundle                        write bundle/
    python -m lab.bundle --out handout          another folder

Chapters, kernels and two lessons beside chapter 04 come with holes; so do functions that repeat
what an earlier chapter asks for, and say where students have written that. Of lab/ comes what the
grader, the exercises and a chapter's run import, found by their imports: so not the museum, whose
exhibits quote solutions, nor predictions, whose derivations are answers. The values of each check
on the solution are in lab/classroom/answers.json; a run compares itself with one GPU. `make grade`
works in the folder as it does here, but that a function is tried where it is.
"""

import ast
import base64
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lab import ROOT, chapters
from lab.classroom import checks, holes
from lab.run import commands, refusals

ROOTS = ("lab.exercises", "lab.grade", "lab.launch", "lab.pictures",
         "lab.planner.planning")
OF_ROOMS = ("about.py", "*checks.py", "figure.py", "held.py", "simulate.py", "oracle.py",
            "automatic.py")
AS_THEY_ARE = "common.py", "LICENSE", "lab/setup.mk", "lab/setup.sh"
HANDOUT = Path(__file__).with_name("handout")           # a README and a Makefile of its own
REQUIRED = "requirements.txt", "lab/requirements/kernels.txt"
COMMENT = re.compile(r"(^|\s)#.*$")
REPEATS = 0.75          # so much of a function's lines are in an earlier solution: it repeats that


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


def closure(waiting):
    """These files, and all that they import."""
    found = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += imported(path)
    return found


def texts():
    """{path in the folder: its text}."""
    from lab.classroom.exercises import EXERCISES, with_holes

    roots = [path for name in ROOTS for path in files_of(name)]
    roots += [path for room in chapters.ROOMS for pattern in OF_ROOMS
              for path in (chapters.HERE / room).glob(pattern)]
    files = {*closure(roots), *ROOT.glob("kernels/*.py"), *ROOT.glob("lab/planner/*.toml"),
             *chapters.HERE.glob("*/*exercises.toml"), *(ROOT / name for name in AS_THEY_ARE),
             *(ROOT / f"{name}.py" for name in chapters.NAMES)}
    found = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}
    found |= {f"{chapter}.py": with_holes(chapter) for chapter in EXERCISES}
    found["requirements.txt"] = "".join((ROOT / name).read_text() for name in REQUIRED)
    found |= without_repeats({name: text for name, text in found.items()
                              if re.match(r"kernels/\w+\.py|\d\d_", name)})
    return found | {path.name: path.read_text(encoding="utf-8") for path in HANDOUT.iterdir()}


def code_of(source, node):
    """The lines of code of a function's body, without indents and comments."""
    body = node.body[ast.get_docstring(node) is not None :]
    lines = source.split("\n")[body[0].lineno - 1 : node.end_lineno] if body else []
    lines = [COMMENT.sub("", line).strip() for line in lines]
    return [line for line in lines if line]


def functions(tree):
    """(name, node) of a module's functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{method.name}", method) for method in node.body
                        if isinstance(method, ast.FunctionDef))


def without_repeats(sources):
    """{file: its text}, with a hole in each function that repeats what an exercise of an earlier
    file asks for. (Of kernels none is earlier.)"""
    from lab.classroom.exercises import EXERCISES, solution

    asked = [(chapter, f"{exercise.number}: {name}",
              {*code_of(solution(chapter), holes.find(holes.parsed(solution(chapter)), name))})
             for chapter, exercises in EXERCISES.items() for exercise in exercises
             for name in exercise.functions]
    found = {}
    for file, text in sorted(sources.items()):
        for name, node in functions(ast.parse(text)):
            code = code_of(text, node)
            for chapter, hole, lines in asked if sum(map(len, code)) > 25 else ():
                is_earlier = f"{chapter}.py" != file and (chapter < file or "/" in file)
                if is_earlier and sum(line in lines for line in code) >= REPEATS * len(code):
                    words = f"{hole}, as you have it in {chapter}.py, or nearly so."
                    found[file] = holes.cut(found.get(file, text), name, words, hole)
                    break
    return found


def answers(numbers=None, say=lambda words: None):
    """{key of a Same: what it gives of the solution on each rank, packed, in base64}. numbers: of
    the exercises; None: of all."""
    from lab.classroom.exercises import EXERCISES, solution

    every = {check.key: (chapter, solution(chapter), check)
             for chapter, exercises in EXERCISES.items() for exercise in exercises
             for check in exercise.checks
             if not checks.is_run(check) and (numbers is None or exercise.number in numbers)}
    found = {}
    with ThreadPoolExecutor(os.cpu_count()) as threads:     # each waits for processes
        answered = threads.map(lambda one: checks.answers(*one), every.values())
        for key, packed in zip(every, answered):
            found[key] = [base64.b64encode(data).decode() for data in packed]
            if len(found) % 50 == 0 or len(found) == len(every):
                say(f"{len(found)} of {len(every)} answers")
    return found


def write(folder, numbers=None, say=lambda words: None):
    """Write the folder. numbers: of the exercises that can be graded there; None: all."""
    stored = json.dumps(answers(numbers, say), indent=0)
    answers_file = checks.STORED.relative_to(ROOT).as_posix()
    for name, text in (texts() | {answers_file: stored}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.bundle", description=__doc__)
    parser.add_argument("--out", type=commands.output("bundle"), default=Path("bundle"),
                        metavar="FOLDER", help="default: bundle")
    parser.add_argument("--force", action="store_true", help="also over a bundle that is there")
    args = parser.parse_args(argv)
    if args.out.resolve() == ROOT:
        raise refusals.refusal()(f"--out {args.out} is the course itself", "--out bundle")
    if (args.out / "common.py").exists() and not args.force:
        raise refusals.refusal()(f"--out {args.out} has been written before", "--force")
    return args


def main(argv=None):
    checks.warm_up()
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if checks.stored() is not None:
        refusals.fail("this is a bundle, which has no solutions; a copy of the course writes one")
    write(args.out, say=lambda words: print(words, flush=True))
    print(f"{args.out} has chapters with holes, and what grades them; try: "
          f'cd {args.out}; make grade ONLY="00.2"')
    return 0
