"""The grader's command line, and what it writes: for a teacher, a spreadsheet, Gradescope, a CI."""

import csv
import datetime
import io
import json
import os
import re
import xml.etree.ElementTree as xml

import pytest

from lab.classroom import checks, exercises, grade, gradebook, grading, holes, sheets
from lab.classroom.gradebook import Student
from lab.classroom.grading import OPEN, RIGHT, WRONG, Result
from tests.lab.classroom.test_grade import SOLUTION, no_runs, warm  # noqa: F401  (fixtures)
from tests.lab.classroom.test_grade_broken_files import short_table, written  # noqa: F401
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM

TWO = {CHAPTER: [SUM, PAYS]}


@pytest.fixture(autouse=True)
def afresh(monkeypatch):
    """Nothing is known from another test, of which some run nothing."""
    monkeypatch.setattr(checks, "OUTCOMES", {})


def of_ada(*results):
    return Student("ada", [*results])


def result(number, mark, words="", points=1, share=None, what="?", exercises=1):
    share = mark == RIGHT if share is None else share
    return Result(number, what, mark, words, points, 0.5, exercises, share)


# -------------------------------------------------------------------------------- the command line

def test_a_class_is_graded_in_one_command(tmp_path, short_table, no_runs, capsys):
    written(tmp_path / "class" / "ada")
    text = SOLUTION.replace("1 + 8 * dim", "8 * dim")
    written(tmp_path / "class" / '=bob & "<co>"', holes.cut(text, "SumOut.backward", "?", "?"))
    (tmp_path / "class" / ".git").mkdir()
    (tmp_path / "class" / "cy").mkdir()
    (tmp_path / "class" / "notes.txt").touch()
    os.utime(tmp_path / "class" / "ada" / f"{CHAPTER}.py", (10**9, 10**9))
    files = [tmp_path / "new" / f"results.{suffix}" for suffix in ("csv", "json", "xml")]
    predicted = tmp_path / "predicted.json"
    predicted.write_text(json.dumps([{"student": "Ada", "chapter": "04", "seed": seed, "right": 4,
                                      "of": 5} for seed in (1, 2)]))
    status = grade.main([str(tmp_path / "class"), *(f"--{file.suffix[1:]}={file}" for file in
                         files[:2]), f"--junit={files[2]}", "--due=2001-09-06T22:00+00:00",
                         f"--predictions={predicted}"])
    output, errors = capsys.readouterr()
    assert (status, errors) == (1, "")
    output = re.sub(r"late by \d{4} d( \d+ h)?", "late by N d", output)
    assert re.sub(r"\d+ s\n", "N s\n", output) == '''\
=bob & "<co>"
04.2  SumOut.backward    ·  not begun
04.7  who pays           ✗  it is not the solution
04    the whole chapter  ·  not begun: 04.2
0 of 2 right, 1 wrong, 1 not begun; 0 of 4 points; late by N d; N s

ada
04.2  SumOut.backward    ✓
04.7  who pays           ✓
04    the whole chapter  ✓
2 of 2 right, 0 wrong, 0 not begun; 4 of 4 points; late by 2 d 3 h; N s

cy
04    all of it          ·  not submitted
0 of 2 right, 0 wrong, 2 not begun; 0 of 4 points; N s

'''


    head, *lines = csv.reader(io.StringIO(files[0].read_text()))
    assert head == ["student", "04.2 SumOut.backward", "04.7 who pays", "04 the whole chapter",
                    "total", "of", "late by", "04 predicted"]
    assert [line[:6] for line in lines] == [
        ['\'=bob & "<co>"', "0", "0", "0", "0", "4"], ["ada", "1", "2", "1", "4", "4"],
        ["cy", *["not submitted"] * 3, "0", "4"]]
    assert [line[6:] for line in lines[1:]] == [["2 d 3 h", "0.8"], ["", ""]]
    bob, ada, cy = json.loads(files[1].read_text())["students"]
    assert (ada["student"], ada["total"], ada["of"], ada["late by"]) == ("ada", 4, 4, "2 d 3 h")
    assert bob["exercises"][1] == {"number": "04.7", "what": "who pays", "score": 0, "of": 2,
                                   "status": "wrong", "words": "it is not the solution"}
    assert [one["status"] for one in cy["exercises"]] == ["not submitted"]
    bob, ada, cy = xml.parse(files[2]).getroot()
    assert (bob.attrib["tests"], bob.attrib["failures"], bob.attrib["skipped"]) == ("3", "1", "2")
    case = bob.findall("testcase")[1]
    assert case.attrib["classname"] == '=bob & "<co>"'
    assert case.find("failure").attrib["message"] == "it is not the solution"
    points = [{one.attrib["name"]: one.attrib["value"] for one in element.find("properties")}
              for element in (ada, ada.findall("testcase")[1], case)]
    assert points == [{"points": "4", "of": "4"}, {"points": "2", "of": "2"},
                      {"points": "0", "of": "2"}]
    assert case.find("system-out").text == "0 of 2 points"


def test_of_one_student_the_json_is_what_gradescope_reads(tmp_path, short_table, no_runs):
    written(tmp_path, SOLUTION.replace("1 + 8 * dim", "8 * dim"))
    file = tmp_path / "results.json"
    assert grade.main([str(tmp_path), f"--json={file}"]) == 1
    found = json.loads(file.read_text())
    assert found["output"].startswith("1 of 2 right, 1 wrong, 0 not begun; 1 of 4 points; ")
    assert found["tests"][:2] == [
        {"name": "04.2 SumOut.backward", "score": 1, "max_score": 1, "status": "passed",
         "output": "right", "visibility": "visible"},
        {"name": "04.7 who pays", "score": 0, "max_score": 2, "status": "failed",
         "output": "it is not the solution", "visibility": "visible"}]


def test_one_student_exercise_and_level(tmp_path, short_table, no_runs, capsys):
    written(tmp_path, holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    for words, status, marks in [(["04.7"], 0, "✓"), (["04.2"], 1, "·"), (["--level=2"], 0, "✓"),
                                 (["04", "04.7"], 1, "·✓·"), ([], 1, "·✓·")]:
        assert grade.main([str(tmp_path), *words]) == status
        output = capsys.readouterr().out
        assert "".join(re.findall(r"  ([✓✗·])", output)) == marks
    file = tmp_path / "results.json"
    grade.main([str(tmp_path), "04.7", f"--json={file}"])
    assert [test["name"] for test in json.loads(file.read_text())["tests"]] == ["04.7 who pays"]


def test_in_a_copy_of_the_course_its_own_chapters_are_not_what_is_graded(
        tmp_path, short_table, no_runs, monkeypatch, capsys):
    for student in ("ada", "bob"):
        written(tmp_path / student)                     # the solution
        (tmp_path / student / "lab").mkdir()
        (tmp_path / student / "lab" / "exercises.py").touch()
    written(tmp_path / "ada" / "exercises", holes.cut(SOLUTION, "SumOut.backward", "?", "?"))
    assert grade.main([str(tmp_path), "04.2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["ada", "04.2  SumOut.backward    ·  not begun"]
    assert "04.2  SumOut.backward    ·  not submitted" in lines
    monkeypatch.chdir(tmp_path / "ada")
    assert grade.main([".", "04.7"]) == 0
    monkeypatch.chdir(tmp_path / "bob")
    with pytest.raises(SystemExit):
        grade.main(["."])
    assert "FOLDER '.' has no exercise" in capsys.readouterr().err


def test_long_words_go_on_below():
    result = grading.Result("04.2", "SumOut", grading.WRONG, "a reason " * 20, 1, 0.0)
    first, *more = gradebook.lines_of(result, (6, 10))
    assert first.startswith("04.2    SumOut      ✗  a reason") and len(more) == 2
    assert all(line.startswith(" " * 23) and len(line) <= 100 for line in more)


@pytest.mark.parametrize(("words", "line"), [
    (["nowhere"], "FOLDER 'nowhere' is not there; `python -m lab.exercises --write nowhere` writes "
                  "them there"),
    ([""], "FOLDER '' is no name; `make exercises` writes exercises/, which would work"),
    (["empty"], "FOLDER 'empty' has no exercise such as 04_tensor_parallel.py, nor has a folder "
                "in it; `python -m lab.exercises --write empty` writes them there"),
    (["ours", "04.99"], "there is no EXERCISE '04.99'; `python -m lab.exercises` lists all; 04.7 "
                        "in place of 04.99 would work"),
    (["ours", "--limit=0"], "--limit: 0 is no whole number in [1, 101); --limit 5 would work"),
    (["ours", "04.7", "--level=1"], "--level 1: none of these exercises is of that level; without "
                                     "--level would work"),
    (["ours", "--json=x.xml"], "--json: cannot write 'x.xml'; --json results.json would work"),
    ([f"ours/{CHAPTER}.py"], f"FOLDER 'ours/{CHAPTER}.py': Not a directory; ours would "
                             "work"),
])
def test_what_is_refused(words, line, tmp_path, short_table, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    written(tmp_path / "ours")
    with pytest.raises(SystemExit) as leaving:
        grade.main(words)
    assert leaving.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(("words", "line"), [
    (["--due=soon"], "--due: 'soon' is no date such as 2026-11-30T23:59; --due 2026-11-30T23:59 "
                     "would work"),
    (["--due=0001-01-01T00:00"], "--due: '0001-01-01T00:00' is no date such as 2026-11-30T23:59; "
                                 "--due 2026-11-30T23:59 would work"),
    (["--jobs=0"], "--jobs: 0 is no whole number in [1, 1001); --jobs 2 would work"),
    (["--csv=grades.txt"], "--csv: cannot write 'grades.txt'; --csv grades.csv would work"),
    (["--predictions=none.json", "--csv=a.csv"],
     "--predictions: 'none.json' is no JSON of marked predictions; without --predictions would "
     "work"),
    (["--predictions=marked.json"], "--predictions means nothing without --csv; --csv grades.csv "
                                    "would work"),
])
def test_what_is_refused_of_a_gradebook(words, line, tmp_path, short_table, monkeypatch, capsys):
    written(tmp_path / "ours")
    (tmp_path / "marked.json").write_text(
        '[{"student": "ada", "chapter": "04", "right": 4, "of": 5}]')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as leaving:
        grade.main(["ours", *words])
    assert leaving.value.code == 2 and capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize("text", [
    "", "null", "5", "{}", "[]", '{"student": "ada"}', '[{"student": "ada", "chapter": "04"}]',
    '[{"student": "ada", "chapter": "04", "right": 6, "of": 5}]',
    '[{"student": "ada", "chapter": "04", "right": "4", "of": 5}]',
    '[{"student": 7, "chapter": "04", "right": 4, "of": 5}]',
    '[{"student": "ada", "chapter": ["04"], "right": 4, "of": 5}]', "[" * 10**5])
def test_predictions_that_nobody_has_marked_are_refused(text, tmp_path):
    (tmp_path / "marked.json").write_text(text)
    with pytest.raises(exercises.Refused, match="is no JSON of marked predictions"):
        gradebook.predictions(tmp_path / "marked.json")


def test_what_lab_predict_has_marked_is_understood(tmp_path, monkeypatch):
    monkeypatch.setattr(sheets, "read", lambda path: sheets.Sheet("04", 3, None, {}))
    monkeypatch.setattr(sheets, "right_in", lambda sheet: (4, 5))
    sheets.mark([("Ada", tmp_path / "sheet.md")], None, None, tmp_path / "marks.json")
    assert gradebook.predictions(tmp_path / "marks.json") == {("ada", "04"): (4, 5)}


# ----------------------------------------------------------------------------------------- reports

def csv_of(students, chosen, **more):
    return list(csv.reader(io.StringIO(gradebook.as_csv(students, chosen, **more))))


def test_points_in_part_are_shown_wherever_points_are(monkeypatch):
    monkeypatch.setattr(exercises, "EXERCISES", TWO)
    student = of_ada(result("04.2", WRONG, "no sum", points=3, share=0.5),
                     result("04.7", RIGHT, points=2))
    first = gradebook.lines_of(student.results[0], (4, 1))
    assert first == ["04.2  ?  ✗  1.5 of 3 points; no sum"]
    assert gradebook.summary(student) == ("1 of 2 right, 1 wrong, 0 not begun; 3.5 of 5 points; "
                                          "1 s")
    assert csv_of([student], {CHAPTER: [SUM, PAYS]})[1] == ["ada", "1.5", "2", "0", "3.5", "5"]
    [test, _] = json.loads(gradebook.as_json([student]))["tests"]
    assert (test["score"], test["max_score"], test["status"]) == (1.5, 3, "failed")
    assert json.loads(gradebook.as_json([student] * 2))["students"][1]["total"] == 3.5
    case = xml.fromstring(gradebook.as_junit([student])).find("testsuite").find("testcase")
    assert case.find("system-out").text == "1.5 of 3 points"


def test_a_file_that_cannot_be_graded_costs_a_student_each_of_its_exercises(monkeypatch):
    """And a chapter of which only a part was graded has no column for the whole."""
    monkeypatch.setattr(exercises, "EXERCISES", TWO)
    broken = Student("bob", [result("04", WRONG, "is no text", 4, what="all of it", exercises=2)])
    alone = Student("cy", [result("04.7", OPEN, "not submitted", 2)])
    assert csv_of([broken], TWO)[1] == ["bob", "0", "0", "0", "0", "4"]
    assert csv_of([alone], {CHAPTER: [PAYS]}) == [
        ["student", "04.7 who pays", "total", "of"], ["cy", "not submitted", "0", "2"]]
    monkeypatch.setattr(exercises, "EXERCISES", {CHAPTER: [PAYS]})
    assert csv_of([alone], {CHAPTER: [PAYS]})[1] == ["cy", *["not submitted"] * 2, "0", "2"]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", " =1+1", "＝1"])
def test_no_name_is_a_formula(name):
    assert gradebook.safe(name) == f"'{name}"


@pytest.mark.parametrize("name", ["ada", "a=b", "o'neil", "é-1", ""])
def test_names_that_are_no_formulas_stay_as_they_are(name):
    assert gradebook.safe(name) == name


def test_in_a_csv_names_may_have_commas_quotes_and_letters_of_any_kind(monkeypatch):
    monkeypatch.setattr(exercises, "EXERCISES", TWO)
    names = ['a,b', 'the "first"', "Åsa", "李"]
    students = [Student(name, [result("04.7", RIGHT, points=2)]) for name in names]
    text = gradebook.as_csv(students, {CHAPTER: [PAYS]})
    assert [line[0] for line in csv.reader(io.StringIO(text))] == ["student", *names]
    assert text.count("\n") == 5 and "\r" not in text


@pytest.mark.parametrize(("seconds", "words"), [
    (1, "1 s"), (60, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (3661, "1 h 1 min"),
    (86400, "1 d"), (86400 + 59, "1 d"), (2 * 86400 + 3 * 3600 + 59, "2 d 3 h")])
def test_how_late_is_said_in_two_units(seconds, words):
    assert gradebook.in_units(seconds) == words


def test_the_newest_of_the_graded_files_is_late(tmp_path):
    due = datetime.datetime(2026, 11, 30, 12, tzinfo=datetime.UTC)
    for chapter, seconds in (("04", 0), ("05", 0.2), ("06", 7200)):
        (tmp_path / f"{chapter}.py").touch()
        os.utime(tmp_path / f"{chapter}.py", (due.timestamp() + seconds,) * 2)
    late = lambda *chapters: gradebook.lateness(tmp_path, chapters, due)
    assert late("04") == "" and late("04", "05") == "1 s" and late("06", "04", "07") == "2 h"
    assert late("07") == "" and gradebook.lateness(tmp_path, ["06"], None) == ""
