"""`make PY=...`: an interpreter that cannot be used costs one line, in every target."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT


@pytest.fixture
def make(tmp_path):
    """make("lint", "PY=..."): status, stdout and stderr, in a folder with the Makefile, with
    commands that only say what they are called with, and with a torch to import."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ("lab/tour.py", "lab/exercises.py", "lab/grade.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("import sys; print(*sys.argv[1:], file=sys.stderr)")
    (tmp_path / "torch.py").touch()
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
    "setup", "tour", "quick", "test", "test-all", "lint", "bench", "faults", "scaling", "figures",
    "exercises", "grade", "page", "site", "slides"])
def test_no_target_goes_on_without_the_python_it_was_given(make, tmp_path, target):
    bare = interpreter(tmp_path, f"{sys.executable} -I -S")  # sees neither our torch nor another
    for python, fault in (("/nope", "does not start a Python 3.11 or newer; PY=python3 may"),
                          (bare, "has no torch; make without PY installs it into .venv")):
        status, output, errors = make(target, f"PY={python}")
        ours, makes = errors.split("\n", 1)
        assert (status, output, ours) == (2, "", f"make: PY={python} {fault}")
        assert makes.count("***") == makes.count("\n") == 1  # make's own word


@pytest.mark.parametrize(("words", "said"), [
    (["tour"], ""), (["tour", "ONLY=02 06"], "02 06"), (["quick"], "02 --first"),
    (["figures"], "--figures"), (["figures", "ONLY=09"], "--figures 09")])
def test_the_path_of_python_may_have_a_space(make, tmp_path, words, said):
    python = interpreter(tmp_path / "a folder", sys.executable)
    assert make(*words, f"PY={python}") == (0, "", f"{said}\n")


def test_bare_make_says_what_each_target_does_and_how_long_it_takes(make):
    status, output, errors = make()
    lines = {line.split()[1]: line for line in output.splitlines() if line.startswith("  make ")}
    assert (status, errors) == (0, "") and max(map(len, lines.values())) <= 100
    for target in ("tour", "quick", "test", "scaling", "figures", "museum"):
        assert re.search(r"minute|second", lines[target]), lines[target]


def test_exercises_are_written_and_graded(make, tmp_path):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    for words, said in [(["exercises"], "--write exercises"),
                        (["exercises", "LEVEL=1", "FORCE=1"],
                         "--write exercises --level=1 --force"),
                        (["grade"], "exercises"),
                        (["grade", "FOLDER=a class", "ONLY=04 05.2", "LEVEL=3"],
                         "a class 04 05.2 --level=3")]:
        assert make(*words, python) == (0, "", f"{said}\n")


def test_three_files_are_tested_at_once_where_a_plugin_can(make, tmp_path):
    python = f"PY={interpreter(tmp_path, sys.executable)}"
    (tmp_path / "ruff.py").touch()
    (tmp_path / "pytest.py").write_text("import sys; sys.exit(' '.join(sys.argv[1:]))")
    for xdist, words in (("", " -n 3 --dist loadfile"), ("raise ImportError", "")):
        (tmp_path / "xdist.py").write_text(xdist)
        status, _, errors = make("test", python)
        assert (status, errors.splitlines()[0]) == (2, f"-q{words} --durations=25 tests")
