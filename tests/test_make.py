"""`make PY=...`: an interpreter that cannot be used costs one line, in every target."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.conftest import ROOT


@pytest.fixture
def make(tmp_path):
    """make("lint", "PY=..."): status, stdout and stderr, in a folder with the Makefile, and with a
    chapter and a torch that only say what they are called with."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ("01_chapter.py", "10_planner.py", "torch/distributed/run.py", "lab/report.py",
                 "lab/pictures.py", "lab/exercises.py", "lab/grade.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("import sys; print(*sys.argv[1:], file=sys.stderr)")
    for package in ("torch", "torch/distributed"):
        (tmp_path / package / "__init__.py").touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    environment |= {"PYTHONPATH": str(tmp_path)}

    def run(*words):
        done = subprocess.run(["make", "--no-print-directory", *words], cwd=tmp_path,
                              env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    return run


def interpreter(folder, command):
    """A shell script that is called as Python is."""
    path = folder / "python"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("target", [
    "setup", "tour", "test", "test-all", "lint", "bench", "faults", "figures", "exercises",
    "grade", "page"])
def test_no_target_goes_on_without_the_python_it_was_given(make, tmp_path, target):
    bare = interpreter(tmp_path, f"{sys.executable} -I -S")  # sees neither our torch nor another
    for python, fault in (("/nope", "does not start a Python 3.11 or newer; PY=python3 may"),
                          (bare, "has no torch; make without PY installs it into .venv")):
        status, output, errors = make(target, f"PY={python}")
        ours, makes = errors.split("\n", 1)
        assert (status, output, ours) == (2, "", f"make: PY={python} {fault}")
        assert makes.count("***") == makes.count("\n") == 1  # make's own word


def test_the_path_of_python_may_have_a_space(make, tmp_path):
    python = interpreter(tmp_path / "a folder", sys.executable)
    status, output, errors = make("tour", f"PY={python}", "RUNS=01_chapter 02_chapter:naive")
    assert status == 0 and f"$ {python} 01_chapter.py --device=cpu" in output
    drawn = "runs/01_chapter.json runs/02_chapter-naive.json"
    lines = errors.splitlines()
    plans = [line for line in lines if line.startswith("--model ")]
    assert len(plans) == 4 and all(line.endswith("--micro-batch 1") for line in plans)
    assert [line for line in lines if line not in plans] == [
        "--device=cpu --json=runs/01_chapter.json",
        "--standalone --nproc_per_node=8 02_chapter.py --device=cpu --variant=naive --steps=5 "
        "--json=runs/02_chapter-naive.json",
        "--standalone --nproc_per_node=8 -m lab.speed --device=cpu --largest=1048576 --repeats=2 "
        "--json=runs/00_speed.json",
        "--standalone --nproc_per_node=8 -m lab.schedules 1f1b --micro-batches=8 --sleep=10 "
        "--json=runs/07_asleep.json",
        "--standalone --nproc_per_node=8 03_zero.py --device=cpu --steps=10 --save=runs/tour-saved "
        "--json=runs/03_zero-again.json",
        "--standalone --nproc_per_node=8 09_5d.py --device=cpu --pp=2 --tp=2 --dp=2 --steps=15 "
        "--resume=runs/tour-saved --json=runs/09_5d-again.json",
        f"{drawn} runs/03_zero-again.json runs/09_5d-again.json",  # the table
        f"{drawn} runs/00_speed.json runs/07_asleep.json"]  # the figures


def test_exercises_are_written_and_graded(make, tmp_path):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    for words, said in [(["exercises"], "--write exercises"),
                        (["exercises", "LEVEL=1", "FORCE=1"],
                         "--write exercises --level=1 --force"),
                        (["grade"], "exercises"),
                        (["grade", "FOLDER=a class", "ONLY=04 05.2", "LEVEL=3"],
                         "a class 04 05.2 --level=3")]:
        assert make(*words, python) == (0, "", f"{said}\n")


@pytest.mark.parametrize("half", [0, 1])
def test_two_files_are_tested_at_once_with_a_plugin_or_without(make, tmp_path, half):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    (tmp_path / "ruff.py").touch()
    (tmp_path / "pytest.py").write_text(
        f"import sys; print(*sys.argv[1:]); sys.exit('--half={half}' in sys.argv)")
    (tmp_path / "xdist.py").touch()
    status, output, _ = make("test", python)
    assert (status, output.splitlines()[1:]) == (0, ["-q -n 2 --dist loadfile tests"])
    (tmp_path / "xdist.py").write_text("raise ImportError")
    status, output, _ = make("test", python)
    assert (status, output.splitlines()[1:]) == (2, ["-q --half=0 tests", "-q --half=1 tests"])


def test_every_file_is_in_one_half():
    of_file = lambda number: SimpleNamespace(path=number, get_closest_marker=lambda name: None)
    halves = []
    for half in (0, 1):
        items, others = [of_file(number) for number in range(9) for _ in range(3)], []
        hook = SimpleNamespace(pytest_deselected=lambda items, to=others: to.extend(items))
        config = SimpleNamespace(getoption={"half": half}.get, hook=hook)
        conftest.pytest_collection_modifyitems(config, items)
        assert len(items) + len(others) == 27
        halves.append([item.path for item in items])
    assert sorted(sum(halves, [])) == sorted([*range(9)] * 3) and abs(
        len(halves[0]) - len(halves[1])) <= 3
