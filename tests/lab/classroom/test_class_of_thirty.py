"""A class, graded in one command: each student gets what they deserve."""

import csv
import json

import pytest

from lab.classroom import exercises, grade, gradebook
from lab.run.refusals import one_line
from tests.conftest import FULL
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM, all_end
from tests.support import class_of_thirty
from tests.support.class_of_thirty import ALL, ODD

pytestmark = pytest.mark.usefixtures("warm")
DAILY = ("=cmd|' (ours)", ODD, "two times", "one of two", "no file", "broken", "waits", "noisy",
         "daemon", "believed", "patched", "thief", "rot13")


def assert_fair(students, found, said):
    assert found.keys() == {gradebook.safe(one_line(name)) for name in students}
    for name, student in students.items():
        line = found[gradebook.safe(one_line(name))]
        points = [*student.points.values()]
        cells = [f"{one:g}" for one in points] if student.text is not None else \
            [gradebook.NOT_SUBMITTED] * len(points)
        columns = [next(key for key in line if key.startswith(f"{number} ")) for number in ALL]
        words = said[one_line(name)]
        given = [line[column] for column in (*columns, "total")]
        assert given == [*cells, f"{sum(points):g}"], (name, words)
        if student.says:
            number, expected = student.says
            assert expected in words[number], (name, words)


def test_a_class_gets_what_it_deserves(tmp_path, monkeypatch, capfd):
    table = {CHAPTER: [SUM, PAYS, PAYS._replace(number="04.9")]}  # so the whole isn't graded
    monkeypatch.setattr(exercises, "EXERCISES", table)
    students = class_of_thirty.students(tmp_path / "pids")
    if not FULL:
        students = {name: students[name] for name in DAILY}
    class_of_thirty.write(students, tmp_path / "class")
    files = tmp_path / "grades.csv", tmp_path / "results.json"
    assert grade.main([str(tmp_path / "class"), *ALL, f"--csv={files[0]}",
                       f"--json={files[1]}"]) == 1
    output, errors = capfd.readouterr()
    assert errors == "" and "noise" not in output and output.replace("\n", "").isprintable()
    with files[0].open(encoding="utf-8", newline="") as lines:
        points = {line["student"]: line for line in csv.DictReader(lines)}
    words = {student["student"]: {one["number"]: one["words"] for one in student["exercises"]}
             for student in json.loads(files[1].read_text())["students"]}
    assert_fair(students, points, words)
    assert all_end(tmp_path / "pids")
