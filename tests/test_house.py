"""The house: who imports whom, what a chapter may say to its run, and how long a file is."""

import ast
import functools
import inspect

import pytest

import common
from lab.bench import collectives, formulas, report
from lab.cli import commands
from tests.conftest import CHAPTERS, ROOT, chapter, chapter_names, training_chapters

EVERY = pytest.mark.parametrize("name", chapter_names())
LONGEST = {"common": 532, "00_collectives": 430, "01_single_gpu": 580, "02_data_parallel": 400,
           "03_zero": 580, "04_tensor_parallel": 510, "05_sequence_parallel": 550,
           "06_context_parallel": 620, "07_pipeline_parallel": 730, "08_expert_parallel": 770,
           "09_5d": 1060, "10_planner": 700, "11_muon": 580}  # never more
CONTRACT = {"args", "rank", "world", "device", "dtype", "mesh", "draw", "optimizer", "mixed",
            "batches", "measure", "span", "log"}  # what a chapter may say to its run
WITHOUT_MODEL = {"args", "rank", "world", "device", "dtype"}  # what one that trains none may say
LAB = sorted((ROOT / "lab").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
IMPORTS = {  # {room of lab/, or its commands: what it imports of the rest of lab/}
    "cli": "bench.anatomy chapters",
    "bench": "cli chapters checkpoints classroom.simulate pictures planner schedules",
    "chapters": "bench classroom cli museum.exhibit planner schedules typecheck warps",
    "checkpoints": "bench cli",
    "classroom": "bench chapters cli museum",
    "course": "chapters classroom cli museum page.glossary page.markdown page.typeset planner "
              "sources",
    "museum": "bench.drawing chapters classroom cli rehearse",
    "page": "bench chapters classroom cli museum pictures planner schedules sources",
    "planner": "chapters cli",
    "sources": "bench chapters classroom cli formats planner schedules",
    "typecheck": "bench.fakes bench.lines chapters cli museum",
    "commands": "bench chapters checkpoints classroom cli course here schedules sources speed "
                "typecheck",
}


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


def ours(names):
    """Those of this project, without what is below a package."""
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    own = {path.stem for path in ROOT.glob("*.py")} | folders
    return {name.split(".")[0] for name in names} & own


def test_imports_are_found_wherever_they_are():
    tree = ast.parse("import a.b\nif 1:\n    from c import d as e\ndef f():\n    import g\n")
    assert imports(tree) == {"a.b", "c", "c.d", "g"}
    assert imports(tree, inside_functions=False) == {"a.b", "c", "c.d"}
    assert ours({"lab.report", "torch", "common", "kernels.elu"}) == {"lab", "common", "kernels"}


@EVERY
def test_a_chapter_imports_common_and_nothing_else_of_ours(name):
    tree = parsed(CHAPTERS / f"{name}.py")
    allowed = {"common", "kernels"} if name[:2] in ("01", "05", "06", "08") else {"common"}
    assert ours(imports(tree)) <= allowed
    assert ours(imports(tree, inside_functions=False)) <= {"common"}  # kernels: behind a flag
    assert not {"matplotlib", "importlib"} & {name.split(".")[0] for name in imports(tree)}


def test_common_imports_lab_in_a_function_alone():
    tree = parsed(ROOT / "common.py")
    assert ours(imports(tree)) == {"lab"} and not ours(imports(tree, inside_functions=False))


def within_lab(path):
    return path.relative_to(ROOT / "lab").as_posix()


def room_of(path):
    """Of a file of lab/."""
    first, *others = within_lab(path).split("/")
    return first if others else "commands"


@pytest.mark.parametrize("path", LAB, ids=within_lab)
def test_lab_takes_chapters_from_their_registry(path):
    """Their names begin with digits, so that nobody else can import them without importlib; what a
    student has written is loaded by the classroom, programs are run on ranks, and a browser finds
    names in place of torch."""
    names = imports(parsed(path))
    assert ours(names) <= {"common", "lab"}
    if within_lab(path) not in ("chapters/__init__.py", "classroom/checks.py", "bench/ranks.py",
                                "page/without_torch.py"):
        assert not {"importlib", "runpy"} & {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", LAB, ids=within_lab)
def test_a_room_imports_the_rooms_below_it(path):
    names, room = imports(parsed(path)), room_of(path)
    allowed = tuple(f"lab.{other}." for other in ["ROOT", room, *IMPORTS[room].split()])
    for name in names:
        is_parent = any(other.startswith(f"{name}.") for other in names)
        if name.startswith("lab.") and not is_parent:
            assert f"{name}.".startswith(allowed), f"{within_lab(path)} imports {name}"


def offered():
    """What lab/bench and lab/cli offer to the other rooms: each (module, name) that one uses."""
    found = set()
    for path in (*LAB, *ROOT.glob("benchmarks/*.py")):
        room, modules = room_of(path) if path.is_relative_to(ROOT / "lab") else None, {}
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ImportFrom) and node.module in ("lab.bench", "lab.cli"):
                modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}"
                            for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module.startswith(
                    ("lab.bench.", "lab.cli.")):
                found |= {(node.module, alias.name, room) for alias in node.names}
        found |= {(modules[node.value.id], node.attr, room) for node in ast.walk(parsed(path))
                  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                  and node.value.id in modules}
    return {(module, name) for module, name, room in found if module.split(".")[1] != room}


def test_what_is_offered_to_other_rooms_says_what_it_takes_and_gives():
    """Each function has a docstring, and a type for each of its arguments."""
    seen = 0
    for module, name in sorted(offered()):
        path = ROOT / f"{module.replace('.', '/')}.py"
        for node in parsed(path).body if path.exists() else ():
            if isinstance(node, ast.FunctionDef) and node.name == name:
                seen += 1
                arguments = [*node.args.args, *node.args.kwonlyargs]
                assert ast.get_docstring(node), f"{module}.{name}"
                assert all(one.annotation for one in arguments), f"{module}.{name}"
    assert seen > 50


def test_a_room_of_a_chapter_is_imported_by_itself_alone():
    for path in LAB:
        for name in imports(parsed(path)):
            if name.startswith("lab.chapters.") and name.count(".") > 2:
                assert path.parent.name == name.split(".")[2], path


@pytest.mark.parametrize("path", LAB, ids=within_lab)
def test_matplotlib_is_imported_where_something_is_drawn(path):
    tree = parsed(path)
    libraries = {name.split(".")[0] for name in imports(tree)}
    assert "matplotlib" not in {name.split(".")[0] for name in imports(tree, False)}
    assert "matplotlib" not in libraries or path.name in ("drawing.py", "figure.py")


def test_pictures_are_imported_by_the_page_and_where_a_run_is_drawn():
    for path in (ROOT / "common.py", *LAB, *CHAPTERS.glob("*.py"), *ROOT.glob("kernels/*.py")):
        if "lab.pictures" in imports(tree := parsed(path)):
            assert path.parent.name in ("bench", "page"), path
            assert path.parent.name == "page" or "lab.pictures" not in imports(tree, False), path


def test_lab_itself_has_commands_alone():
    """And a room is one if it has a __main__.py; the page's search is a process of its own."""
    for path in set(LAB) - {ROOT / "lab/page/search.py"}:
        is_command = 'if __name__ == "__main__":' in path.read_text()
        flat = path.parent == ROOT / "lab" and path.stem != "__init__"
        assert is_command == (flat or path.stem == "__main__"), path


@EVERY
def test_a_chapter_says_nothing_to_its_run_but_the_contract(name):
    functions = [node for node in ast.walk(parsed(CHAPTERS / f"{name}.py"))
                 if isinstance(node, ast.FunctionDef)
                 and "run" in [argument.arg for argument in node.args.args]]
    said = {node.attr for function in functions for node in ast.walk(function)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            and node.value.id == "run"}
    assert said and said <= CONTRACT
    assert name in training_chapters() or said <= WITHOUT_MODEL


@pytest.mark.parametrize("run", [common.Run, report.Run])
def test_every_run_knows_the_contract(run):
    """Its methods; and common.Run, which lab's extends, assigns the others."""
    assert assigned(common.Run) | set(dir(run)) >= CONTRACT
    assert assigned(collectives.Run) >= WITHOUT_MODEL
    for name in sorted(CONTRACT & set(dir(run))):
        assert name in common.Run.__doc__, name


def assigned(run):
    return {node.attr for node in ast.walk(ast.parse(inspect.getsource(run)))
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}  # fmt: skip


def test_the_planner_needs_no_torch_and_of_ours_its_command_line_alone():
    path = CHAPTERS / "10_planner.py"
    if not path.exists():
        pytest.skip("there is no 10_planner.py")
    names = imports(parsed(path)) | imports(parsed(ROOT / "lab/planner/planning.py"))
    assert ours(names) == {"lab"} and "torch" not in names


def test_chapter_01_compiles_nothing_while_lab_watches():
    assert chapter("01_single_gpu").WATCHED == formulas.WATCHED_STEPS


@EVERY
def test_the_bottom_of_a_chapter(name):
    """Every variant is a function of the run, and a flag that it knows is one of the chapter's."""
    module, flags = chapter(name), commands.Parser()
    if hasattr(module, "flags"):
        module.flags(flags)
    trains = name in training_chapters()
    assert ("torch" in module.VARIANTS) == trains
    more = {} if trains else {"--dtype", "--seed", "--plot"}  # which no step needs there
    for train in module.VARIANTS.values():
        train, *known = train if isinstance(train, tuple) else (train,)
        assert list(inspect.signature(train).parameters) == ["run"]
        assert set(known) <= {*flags._option_string_actions, *more}
    assert list(inspect.signature(module.requires).parameters) == ["args", "ranks"]
    asked = list(inspect.signature(module.formulas).parameters)
    assert asked == ["args", "rank", "ranks", "model"]


def test_what_lab_teaches_is_short():
    assert (ROOT / "lab/checkpoints/checkpoint.py").read_text().count("\n") <= 200


@pytest.mark.parametrize("path", sorted(ROOT.glob("*.py")), ids=lambda path: path.stem)
def test_no_file_is_longer_than_a_sitting(path):
    assert path.read_text().count("\n") <= LONGEST[path.stem]


def test_no_file_of_lab_or_of_the_tests_is_longer_than_500_lines():
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text().count("\n")
               for path in (*LAB, *TESTS)}
    assert {path: length for path, length in lengths.items() if length > 500} == {}
