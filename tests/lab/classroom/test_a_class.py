"""A class, graded in one command: each student gets what they deserve."""

import csv
import json

import pytest

from lab import grade
from lab.classroom import exercises, gradebook
from lab.run.refusals import one_line
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM, all_end
from tests.support import a_class
from tests.support.a_class import ALL

pytestmark = pytest.mark.usefixtures("warm")


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
    students = a_class.students(tmp_path / "pids")
    a_class.write(students, tmp_path / "class")
    files = tmp_path / "grades.csv", tmp_path / "results.json"
    assert grade.main([str(tmp_path / "class"), *ALL, f"--csv={files[0]}",
                       f"--json={files[1]}"]) == 1
    output, errors = capfd.readouterr()
    assert errors == "" and "noise" not in output and output.replace("\n", "").isprintable()
    with files[0].open(encoding="utf-8", newline="") as lines:
        points = {line["student"]: line for line in csv.DictReader(lines)}
    words = {name: {one["name"].split()[0]: one["output"] for one in student["tests"]}
             for name, student in json.loads(files[1].read_text()).items()}
    assert_fair(students, points, words)
    assert all_end(tmp_path / "pids")
