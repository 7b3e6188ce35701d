"""The grader's command line, and what it writes: for a teacher, a spreadsheet, Gradescope."""

import csv
import io
import json
import re

import pytest

from lab import grade
from lab.classroom import exercises, gradebook, holes
from lab.classroom.gradebook import Student
from lab.classroom.grading import OPEN, WRONG, Result
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SOLUTION, SUM, instead, written

TWO = {CHAPTER: [SUM, PAYS]}


def result(number, mark, words="", points=1, what="?", exercises=1):
    return Result(number, what, mark, words, points, 0.5, exercises)


# -------------------------------------------------------------------------------- the command line

def test_a_class_is_graded_in_one_command(tmp_path, short_table, no_runs, capsys):
    odd = '=bob & "<co>"'
    written(tmp_path / "class" / "ada")
    written(tmp_path / "class" / odd, holes.cut(instead("1 + 8 * dim", "8 * dim"),
                                                "SumOut.backward", "?", "?"))
    for folder in (".git", "cy"):
        (tmp_path / "class" / folder).mkdir()
    files = [tmp_path / "new" / f"results.{suffix}" for suffix in ("csv", "json")]
    status = grade.main([str(tmp_path / "class"), f"--csv={files[0]}", f"--json={files[1]}"])
    output, errors = capsys.readouterr()
    assert (status, errors) == (1, "")
    parts = output.strip().split("\n\n")
    assert [re.findall("  ([✓✗·])", part) for part in parts] == [
        ["·", "✗", "·"], ["✓", "✓", "✓"], ["·"]]
    assert all(words in parts[0] for words in (odd, "not begun: 04.2", "0 of 4 points"))
    assert "4 of 4 points" in parts[1] and "not submitted" in parts[2]

    head, *lines = csv.reader(io.StringIO(files[0].read_text()))
    assert head == ["student", "04.2 SumOut.backward", "04.7 who pays", "04 the whole chapter",
                    "total", "of"]
    assert lines[0][:6] == [f"'{odd}", "0", "0", "0", "0", "4"]
    assert lines[1:] == [["ada", "1", "2", "1", "4", "4"],
                         ["cy", *["not submitted"] * 3, "0", "4"]]
    by_name = json.loads(files[1].read_text())
    assert [*by_name] == [odd, "ada", "cy"] and "4 of 4 points" in by_name["ada"]["output"]
    assert by_name[odd]["tests"][1] == {
        "name": "04.7 who pays", "score": 0, "max_score": 2, "status": "failed",
        "output": "it is not the solution", "visibility": "visible"}


def test_one_student_exercise_and_level(tmp_path, short_table, no_runs, capsys):
    written(tmp_path, holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    results = tmp_path / "results.json"
    for words, status, marks in [(["04.7"], 0, "✓"), (["--level=1"], 1, "·"),
                                 (["04", "04.7", f"--json={results}"], 1, "·✓·")]:
        assert grade.main([str(tmp_path), *words]) == status
        output = capsys.readouterr().out
        assert "".join(re.findall(r"  ([✓✗·])", output)) == marks
    of_gradescope = json.loads(results.read_text())  # one student
    assert "2 of 4 points" in of_gradescope["output"] and len(of_gradescope["tests"]) == 3


def test_in_a_copy_of_the_course_its_own_chapters_are_not_what_is_graded(
        tmp_path, short_table, no_runs, monkeypatch, capsys):
    for student in ("ada", "bob"):
        written(tmp_path / student)  # the solution
        (tmp_path / student / "lab").mkdir()
        (tmp_path / student / "lab" / "exercises.py").touch()
    written(tmp_path / "ada" / "exercises", holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    assert grade.main([str(tmp_path), "04.2"]) == 1
    ada, bob = capsys.readouterr().out.strip().split("\n\n")
    assert ada.startswith("ada") and "not begun" in ada and "not submitted" in bob
    monkeypatch.chdir(tmp_path / "ada")
    assert grade.main([".", "04.7"]) == 0
    monkeypatch.chdir(tmp_path / "bob")
    with pytest.raises(SystemExit):
        grade.main(["."])


@pytest.mark.parametrize(("words", "named", "works"), [
    (["empty"], "FOLDER 'empty'", "--write empty"),
    ([f"ours/{CHAPTER}.py"], f"FOLDER 'ours/{CHAPTER}.py'", "exercises/"),
    (["ours", "04.99"], "EXERCISE '04.99'", "04.7 in place of 04.99"),
    (["ours", "04.7", "--level=1"], "--level 1", "without --level")])
def test_what_is_refused(words, named, works, tmp_path, short_table, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "ours")
    with pytest.raises(SystemExit) as leaving:
        grade.main(words)
    [line] = capsys.readouterr().err.splitlines()
    assert leaving.value.code == 2 and line.startswith("error: ")
    assert named in line and works in line


# ----------------------------------------------------------------------------------------- reports

def csv_of(students, chosen):
    return list(csv.reader(io.StringIO(gradebook.as_csv(students, chosen))))


def test_a_file_that_cannot_be_graded_costs_a_student_each_of_its_exercises(monkeypatch):
    """A chapter of which only a part was graded has no column for the whole."""
    monkeypatch.setattr(exercises, "EXERCISES", TWO)
    broken = Student("bob", [result("04", WRONG, "is no text", 4, what="all of it", exercises=2)])
    alone = Student("cy", [result("04.7", OPEN, "not submitted", 2)])
    assert csv_of([broken], TWO)[1] == ["bob", "0", "0", "0", "0", "4"]
    assert csv_of([alone], {CHAPTER: [PAYS]}) == [
        ["student", "04.7 who pays", "total", "of"], ["cy", "not submitted", "0", "2"]]


def test_no_name_is_a_formula_and_all_others_stay_as_they_are():
    for name in ("=1+1", "-1", "@SUM(A1)", " =1+1", "＝1"):
        assert gradebook.safe(name) == f"'{name}"
    for name in ("ada", "a=b", "é-1", ""):
        assert gradebook.safe(name) == name
