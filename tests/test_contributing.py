"""CONTRIBUTING.md: its examples are added to a copy, as it says, and hold there."""

import re
import shutil
import subprocess
import sys

import pytest

from lab.classroom import exercises
from tests.conftest import ROOT

NEXT = f"02.{len(exercises.EXERCISES['02_data_parallel']) + 1}"  # 02.10 stands for it
APPENDED = re.compile(r"```toml\n# (\S+), at its end\n(.*?)```", re.DOTALL)
GRADES = f"""
from lab.classroom import checks, exercises, grading, students
from tests.faults import EXERCISES, wrong_answers

checks.warm_up()
[fault] = wrong_answers("{NEXT}")
for source in exercises.solution("02_data_parallel"), fault.planted():
    file = students.File("02_data_parallel", None, source, students.parse(source))
    print(grading.grade_exercise(EXERCISES["{NEXT}"][1], file)[0])
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The course with the examples."""
    folder = tmp_path_factory.mktemp("copy") / "course"
    ignored = shutil.ignore_patterns(".*", "runs", "figures", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=ignored)
    appended = APPENDED.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(appended) == 3
    for file, lines in appended:
        path = folder / file
        path.write_text(f"{path.read_text()}\n{lines.replace('02.10', NEXT)}")
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run(folder, *words):
    """What a program prints; its status is 0."""
    ran = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_the_exercise_is_asked(copy):
    assert NEXT in run(copy, "-m", "lab.exercises", NEXT, "--hint=2")


@pytest.mark.full
def test_answers_are_graded(copy):
    assert run(copy, "-c", GRADES) == "✓\n✗\n"


@pytest.mark.full
def test_the_exhibit_is_caught(copy):
    assert "1 of 1 caught" in run(copy, "-m", "lab.museum", "torchtitan#2206")
