"""The house: who imports whom, and what a chapter may say to its run."""

import ast
import functools
import inspect

from lab.run import commands, formulas
from tests.conftest import CHAPTERS, ROOT, chapter, chapter_names, training_chapters

CONTRACT = {"args", "rank", "world", "device", "dtype", "mesh", "draw", "optimizer", "mixed",
            "batches", "measure", "span", "log"}  # what a chapter may say to its run
WITHOUT_MODEL = {"args", "rank", "world", "device", "dtype"}  # if it trains none
LAB = sorted((ROOT / "lab").rglob("*.py"))
IMPORTS = {  # {room of lab/, or its commands: what it imports from the rest of lab/}
    "run": "chapters checkpoints diagnose pictures planner schedules",
    "diagnose": "run chapters",
    "rehearsal": "run diagnose chapters planner schedules checkpoints drawing",
    "chapters": "run diagnose drawing classroom museum.exhibit planner schedules",
    "checkpoints": "run",
    "classroom": "run diagnose chapters museum",
    "museum": "run diagnose drawing chapters classroom rehearse",
    "site": "run chapters classroom museum pictures planner schedules texts",
    "planner": "chapters run",
    "texts": "run rehearsal drawing chapters formats planner schedules",
    "commands": "run diagnose rehearsal chapters checkpoints classroom schedules "
                "drawing scaled pictures",
}
LOADERS = {  # they load what has no name to import, or what a student wrote
    "chapters/__init__.py", "classroom/checks.py", "run/ranks.py", "site/without_torch.py"}


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


def test_a_room_imports_the_rooms_below_it():
    """It imports a room of a chapter by no means, and chapters from their registry."""
    for path in LAB:
        file = within_lab(path)
        room = file.split("/")[0] if "/" in file else "commands"
        allowed = tuple(f"lab.{other}." for other in ["ROOT", room, *IMPORTS[room].split()])
        names = imported(path)
        assert ours(names) <= {"common", "lab"}, file
        assert file in LOADERS or not {"importlib", "runpy"} & packages(names), file
        for name in names:
            is_parent = any(other.startswith(f"{name}.") for other in names)
            if name.startswith("lab.") and not is_parent:
                assert f"{name}.".startswith(allowed), f"{file} imports {name}"
            if name.startswith("lab.chapters.") and name.count(".") > 2:
                assert path.parent.name == name.split(".")[2], f"{file} imports {name}"


def test_what_is_imported_at_the_top_goes_in_no_circle():
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
             for path in LAB}
    known = set()  # of these, nothing leads back

    def visit(name, above):
        assert name not in above, f"{' imports '.join([*above, name])}"
        if name not in known:
            for other in sorted(imported(files[name], False) & files.keys() - {"lab", name}):
                if not name.startswith(f"{other}."):  # what is in a package may import it
                    visit(other, [*above, name])
            known.add(name)

    for name in files:
        visit(name, [])


def test_matplotlib_is_imported_where_something_is_drawn():
    for path in LAB:
        assert "matplotlib" not in packages(imported(path, False)), path
        assert "matplotlib" not in packages(imported(path)) or path.name in (
            "drawing.py", "figure.py"), path
    for path in (ROOT / "common.py", *LAB, *CHAPTERS.glob("*.py"), *ROOT.glob("kernels/*.py")):
        if "lab.pictures" in imported(path):
            assert path.parent.name in ("run", "site"), path
            assert path.parent.name == "site" or "lab.pictures" not in imported(path, False), path


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
