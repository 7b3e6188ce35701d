"""A class, graded in one command: each student gets what he deserves, the second time as well."""

import csv
import re

import pytest

from lab.classroom import checks, exercises, grade, gradebook, kept
from tests.lab.classroom.test_grade import warm  # noqa: F401  (a fixture)
from tests.lab.classroom.test_hostile import ended
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM
from tests.support import class_of_thirty
from tests.support.class_of_thirty import ALL, FITTED, NUMBERS, Student, instead


@pytest.fixture
def graded(tmp_path, monkeypatch, capsys):
    """Grades a class as a new process would: {student: points, as the CSV has them}, and the last
    line that is printed."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")

    def grade_anew(*words):
        monkeypatch.setattr(checks, "OUTCOMES", {})
        file = tmp_path / "grades.csv"
        assert grade.main([str(tmp_path / "class"), *words, f"--csv={file}",
                           "--secret=of a test"]) == 1
        output, errors = capsys.readouterr()
        assert errors == ""
        with file.open(encoding="utf-8", newline="") as lines:
            return {line["student"]: line for line in csv.DictReader(lines)}, output.split("\n")[-2]

    return grade_anew


def deserved(student, numbers):
    points = [student.points[number] for number in numbers]
    cells = [f"{one:g}" for one in points] if student.text is not None else \
        [gradebook.NOT_SUBMITTED] * len(points)
    return [*cells, f"{sum(points):g}"]


def assert_fair(found, students, numbers):
    assert found.keys() == {gradebook.safe(name) for name in students}
    wrong = {}
    for name, student in students.items():
        line = found[gradebook.safe(name)]
        columns = [next(key for key in line if key.startswith(f"{number} ")) for number in numbers]
        given = [line[column] for column in (*columns, "total")]
        if given != deserved(student, numbers):
            wrong[name] = given
    assert not wrong


def test_a_class_gets_what_it_deserves_and_is_known_the_second_time(tmp_path, graded, monkeypatch):
    """A small one, of two exercises: some that are right, an unfinished one, one that fits two
    ranks alone, and one that is not there. test_hostile.py has those who attack."""
    table = {CHAPTER: [SUM, PAYS, PAYS._replace(number="04.9")]}
    monkeypatch.setattr(exercises, "EXERCISES", table)
    every, points = class_of_thirty.thirty(tmp_path / "pids"), {"04.2": 1, "04.7": 2}
    names = "=cmd|' (ours)", "a clone", "two times", "a copy of two times"
    students = {name: every[name]._replace(points=points) for name in names}
    students |= {"no file": every["no file"], "two of five": every["two of five"],
                 "fits 2 ranks": Student(instead("return gradient, None", FITTED.format(ranks=2)),
                                         points | {"04.2": 0})}
    class_of_thirty.write(students, tmp_path / "class")
    found, _ = graded("04.2", "04.7")
    assert_fair(found, students, points)
    again, last = graded("04.2", "04.7")
    assert again == found and last.startswith("0 checks were played; ")


@pytest.mark.full
def test_thirty_get_what_they_deserve(tmp_path, graded):
    """And nothing is played again but what a machine may have caused."""
    students = class_of_thirty.thirty(tmp_path / "pids")
    assert len(students) == 30
    class_of_thirty.write(students, tmp_path / "class")
    found, _ = graded(*NUMBERS)
    assert_fair(found, students, NUMBERS)
    assert {line["of"] for line in found.values()} == {str(sum(ALL.values()))}
    assert ended(tmp_path / "pids")
    again, last = graded(*NUMBERS)
    assert again == found
    assert int(re.match(r"(\d+) checks were played; ", last)[1]) <= 2     # of who ends his process
