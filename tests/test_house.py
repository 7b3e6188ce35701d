"""The house: who imports whom, and what a chapter may say to its run."""

import ast
import functools
import graphlib
import inspect
import re
import subprocess
import sys

from lab.run import commands, formulas
from tests.conftest import (
    CHAPTERS,
    ROOT,
    SMALL,
    TEXT,
    chapter,
    chapter_names,
    training_chapters,
)

CONTRACT = {"args", "rank", "world", "device", "dtype", "mesh", "draw", "optimizer", "mixed",
            "batches", "measure", "span", "log"}  # what a chapter may say to its run
WITHOUT_MODEL = {"args", "rank", "world", "device", "dtype"}  # if it trains none
LAB = sorted((ROOT / "lab").rglob("*.py"))
LOADERS = {  # they load what has no name to import, or what a student wrote
    "chapters/__init__.py", "classroom/checks.py", "classroom/exercise.py", "classroom/inside.py",
    "museum/observe.py", "run/ranks.py", "site/without_torch.py"}
ROOM = re.compile(r"lab\.chapters\.(\d\d|kernels|checkpoints)\.")
MODULES = 30  # of ours that a run of chapter 02 imports, at the most


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def imports(tree, inside_functions=True):
    """The names of all modules that are imported; of `from a import b` both a and a.b."""
    names, waiting = set(), [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        if inside_functions or not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)
    return names


@functools.cache
def imported(path, inside_functions=True):
    return imports(parsed(path), inside_functions)


def packages(names):
    return {name.split(".")[0] for name in names}


def ours(names):
    """The top-level names of this project."""
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    return packages(names) & ({path.stem for path in ROOT.glob("*.py")} | folders)


def within_lab(path):
    return path.relative_to(ROOT / "lab").as_posix()


def test_a_chapter_imports_common_and_nothing_else_of_ours():
    """And kernels, behind a flag; common imports lab/ where that lies beside it."""
    for name in chapter_names():
        path = CHAPTERS / f"{name}.py"
        allowed = {"common", "kernels"} if name[:2] in ("01", "05", "06", "08") else {"common"}
        assert ours(imported(path)) <= allowed, name
        assert ours(imported(path, False)) <= {"common"}, name
        assert not {"matplotlib", "importlib"} & packages(imported(path)), name
    assert ours(imported(ROOT / "common.py")) == {"lab"}
    assert not ours(imported(ROOT / "common.py", False))
    planner = CHAPTERS / "10_planner.py"
    if planner.exists():  # it needs no torch
        names = imported(planner) | imported(ROOT / "lab/planner/planning.py")
        assert ours(names) == {"lab"} and "torch" not in names


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room_of(name):
    """The room of a module: lab.run, lab.tour; each of lab.chapters.NN is one beside the registry,
    and nobody imports it."""
    return ".".join(name.split(".")[: 3 if name.startswith("lab.chapters.") else 2])


def imports_of_files():
    """{module of lab/: the modules of lab/ that it imports, inside functions, too}."""
    files = {name_of(path): path for path in LAB}
    graph = {}
    for name, path in files.items():
        found = imported(path) & files.keys()
        graph[name] = {other for other in found if not f"{name}.".startswith(f"{other}.")}
        parents = {other for other in found if any(more.startswith(f"{other}.") for more in found)}
        graph[name] -= parents  # of `from lab.run import x`, lab.run is no file of its own
    return graph


def test_no_file_and_no_room_leads_back_to_itself():
    """Only common.launch looks up, to lab.launch."""
    files, rooms = imports_of_files(), {}
    for name, others in files.items():
        above = rooms.setdefault(room_of(name), set())
        above |= {room_of(other) for other in others} - {room_of(name)}
    for graph in (files, rooms):
        graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_nobody_imports_the_room_of_a_chapter():
    """Nor loads a module by its name, but the registry of chapters."""
    for path in LAB:
        names = imported(path)
        assert ours(names) <= {"common", "lab"}, path
        assert within_lab(path) in LOADERS or not {"importlib", "runpy"} & packages(names), path
        rooms = {room_of(name) for name in names if ROOM.match(name)}
        assert rooms <= {room_of(name_of(path))}, path


RUN_AND_COUNT = """
import os, runpy, sys
def leave(status):
    print("modules:", *(name for name in sys.modules if name.split(".")[0] in ("lab", "common")))
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
os._exit = leave
sys.argv = ["02_data_parallel.py", *sys.argv[1:]]
sys.path.insert(0, os.getcwd())
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_run_imports_few_of_our_modules():
    flags = [*SMALL, "--steps=1", f"--data={TEXT}"]
    ran = subprocess.run([sys.executable, "-c", RUN_AND_COUNT, *flags], cwd=ROOT,
                         capture_output=True, text=True)
    *_, modules = ran.stdout.splitlines()
    assert modules.startswith("modules: ") and "✗" not in ran.stdout, ran.stdout + ran.stderr
    assert len(modules.split()) - 1 <= MODULES, modules


def test_matplotlib_is_imported_where_something_is_drawn():
    for path in LAB:
        assert "matplotlib" not in packages(imported(path, False)), path
        assert "matplotlib" not in packages(imported(path)) or path.name in (
            "drawing.py", "figure.py"), path
    for path in (ROOT / "common.py", *LAB, *CHAPTERS.glob("*.py"), *ROOT.glob("kernels/*.py")):
        if "lab.pictures" in imported(path):
            is_launch = within_lab(path) == "launch.py"
            assert is_launch or path.parent.name == "site", path
            assert not is_launch or "lab.pictures" not in imported(path, False), path


def test_a_chapter_says_nothing_to_its_run_but_the_contract():
    for name in chapter_names():
        functions = [node for node in ast.walk(parsed(CHAPTERS / f"{name}.py"))
                     if isinstance(node, ast.FunctionDef)
                     and "run" in [argument.arg for argument in node.args.args]]
        said = {node.attr for function in functions for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                and node.value.id == "run"}
        assert said and said <= (CONTRACT if name in training_chapters() else WITHOUT_MODEL), name


def test_the_bottom_of_a_chapter():
    """Every variant is a function of the run, and a flag that it knows is one of the chapter's."""
    for name in chapter_names():
        module, flags = chapter(name), commands.Parser()
        if hasattr(module, "flags"):
            module.flags(flags)
        trains = name in training_chapters()
        assert ("torch" in module.VARIANTS) == trains
        more = {} if trains else {"--dtype", "--seed", "--plot"}  # which no step needs there
        for train in module.VARIANTS.values():
            train, *known = train if isinstance(train, tuple) else (train,)
            assert list(inspect.signature(train).parameters) == ["run"], name
            assert set(known) <= {*flags._option_string_actions, *more}, name
        assert list(inspect.signature(module.requires).parameters) == ["args", "ranks"], name
        asked = list(inspect.signature(module.formulas).parameters)
        assert asked == ["args", "rank", "ranks", "model"], name


def test_chapter_01_compiles_nothing_while_lab_watches():
    assert chapter("01_single_gpu").WATCHED == formulas.WATCHED_STEPS
