"""CONTRIBUTING.md: its examples are added to a copy, as it says, and hold there."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

BLOCK = re.compile(r"```python\n# (\S+), (above|last in) (\w+)\n(.*?)```", re.DOTALL)
GRADES = """
from lab.classroom import checks, exercises, grading, students
from tests.faults import EXERCISES, wrong_answers

checks.warm_up()
[fault] = wrong_answers("02.10")
for source in exercises.solution("02_data_parallel"), fault.planted():
    file = students.File("02_data_parallel", None, *students.without_faults(source))
    print(grading.grade_exercise(EXERCISES["02.10"][1], file)[0])
"""


def added(source, where, name, lines):
    """The source with lines above the statement that begins with `name = `, or last in its list or
    dictionary."""
    begin = source.index(f"\n{name} = ") + 1
    at = begin if where == "above" else re.compile(r"^[\])}]", re.MULTILINE).search(
        source, begin).start()
    return source[:at] + lines + ("\n\n" if where == "above" else "") + source[at:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The course with the examples."""
    folder = tmp_path_factory.mktemp("copy") / "course"
    ignored = shutil.ignore_patterns(".*", "runs", "figures", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored)
    blocks = BLOCK.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(blocks) >= 4
    for file, where, name, lines in blocks:
        path = folder / file
        path.write_text(added(path.read_text(), where, name, lines))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder, *words):
    """What a program prints; its status is 0."""
    ran = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_exercise_is_asked_and_the_examples_have_our_style(copy):
    assert "02.10" in run(copy, "-m", "lab.exercises", "02.10", "--hint=2")
    if shutil.which("ruff", path=os.path.dirname(sys.executable)):
        run(copy, "-m", "ruff", "check", "lab/chapters/02", "tests/faults")


@pytest.mark.full
def test_answers_are_graded(copy):
    assert run(copy, "-c", GRADES) == "✓\n✗\n"


@pytest.mark.full
def test_the_exhibit_is_caught(copy):
    assert "1 of 1 caught" in run(copy, "-m", "lab.museum", "torchtitan#2206")
