"""A class, graded in one command: each student gets what he deserves, the second time as well."""

import csv
import json
import re

import pytest

from lab.classroom import checks, exercises, grade, gradebook, kept
from lab.cli.refusals import one_line
from tests.lab.classroom.two_exercises import ANSWER, CHAPTER, PAYS, SUM, all_end, instead
from tests.support import class_of_thirty
from tests.support.class_of_thirty import NUMBERS, ODD, Student, fits

pytestmark = pytest.mark.usefixtures("warm")
WAITS = "        if dist.get_rank() == 1:\n            dist.barrier()\n"


@pytest.fixture
def graded(tmp_path, monkeypatch, capsys):
    """Grades a class as a new process would: {student: its line of the CSV}, {student: {exercise:
    what is said}}, and the last line that is printed."""
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")

    def grade_anew(*words):
        monkeypatch.setattr(checks, "OUTCOMES", {})
        files = tmp_path / "grades.csv", tmp_path / "results.json"
        assert grade.main([str(tmp_path / "class"), *words, f"--csv={files[0]}",
                           f"--json={files[1]}", "--secret=of a test"]) == 1
        output, errors = capsys.readouterr()
        assert errors == "" and output.replace("\n", "").isprintable()
        with files[0].open(encoding="utf-8", newline="") as lines:
            found = {line["student"]: line for line in csv.DictReader(lines)}
        said = {student["student"]: {one["number"]: one["words"] for one in student["exercises"]}
                for student in json.loads(files[1].read_text())["students"]}
        return found, said, output.split("\n")[-2]

    return grade_anew


def assert_fair(students, numbers, found, said):
    assert found.keys() == {gradebook.safe(one_line(name)) for name in students}
    for name, student in students.items():
        line = found[gradebook.safe(one_line(name))]
        points = [student.points[number] for number in numbers]
        cells = [f"{one:g}" for one in points] if student.text is not None else \
            [gradebook.NOT_SUBMITTED] * len(points)
        columns = [next(key for key in line if key.startswith(f"{number} ")) for number in numbers]
        words = said[one_line(name)]
        given = [line[column] for column in (*columns, "total")]
        assert given == [*cells, f"{sum(points):g}"], (name, words)
        if student.says:
            number, expected = student.says
            assert expected in words[number], (name, words)


def test_a_class_gets_what_it_deserves_and_is_known_the_second_time(tmp_path, graded, monkeypatch):
    """Two exercises; one answer waits for ever, and one is right only on the two ranks of its run.
    Five students attack the grader."""
    table = {CHAPTER: [SUM, PAYS, PAYS._replace(number="04.9")]}
    monkeypatch.setattr(exercises, "EXERCISES", table)
    points = {"04.2": 1, "04.7": 2}
    every = class_of_thirty.thirty(tmp_path / "pids")
    students = {name: every[name]._replace(points=points)
                for name in ("=cmd|' (ours)", ODD, "two times", "daemon")}
    for name in "believed", "patched", "thief":
        students[name] = every[name]._replace(points={"04.2": 1, "04.7": 0})
    broken = instead(ANSWER, "        return gradient,, None\n")
    none = {"04.2": 0, "04.7": 2}
    students |= {"judge": every["judge"]._replace(points=none),
                 "fits 2 ranks": Student(fits(2), none, says=("04.2", "not in general")),
                 "broken": Student(broken, none, says=("04.2", "invalid syntax")),
                 "waits": Student(instead(ANSWER, WAITS + ANSWER), none,
                                  says=("04.2", "rank 1 waits in barrier")),
                 "no file": every["no file"], "rot13": every["rot13"],
                 "two of five": every["two of five"]}
    class_of_thirty.write(students, tmp_path / "class")
    found, said, _ = graded("04.2", "04.7")
    assert_fair(students, points, found, said)
    assert all_end(tmp_path / "pids")
    again, _, last = graded("04.2", "04.7")
    assert again == found
    assert int(re.match(r"(\d+) checks were played; ", last)[1]) == 2  # not kept: ended and waiting


@pytest.mark.full
def test_thirty_get_what_they_deserve(tmp_path, graded):
    """Nothing is played again but what a machine may have caused."""
    students = class_of_thirty.thirty(tmp_path / "pids")
    assert len(students) == 30
    class_of_thirty.write(students, tmp_path / "class")
    found, said, _ = graded(*NUMBERS)
    assert_fair(students, NUMBERS, found, said)
    assert all_end(tmp_path / "pids")
    again, _, last = graded(*NUMBERS)
    assert again == found
    assert int(re.match(r"(\d+) checks were played; ", last)[1]) <= 2  # of who ends his process
