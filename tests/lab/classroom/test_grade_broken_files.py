"""What the grader says of a file that is broken, and its report."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml

import pytest

from lab.classroom import exercises, grade, gradebook, grading, holes, students
from tests.conftest import ROOT
from tests.lab.classroom.test_grade import (  # noqa: F401  (fixtures)
    ANSWER,
    LINE,
    SOLUTION,
    assert_ended,
    file_of,
    no_runs,
    warm,
)
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM


def written(folder, text=SOLUTION, chapter=CHAPTER):
    """A student's folder with a chapter in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chapter}.py").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def short_table(monkeypatch):
    """Two exercises of one chapter."""
    monkeypatch.setattr(exercises, "EXERCISES", {CHAPTER: [SUM, PAYS]})


# ---------------------------------------------------------------------------------- a broken file

BROKEN = '''import math


def one(x):
    return x


class Two:
    """Of three."""

    @staticmethod
    def three(x):
        return {}

    def four(self):
        return 4


def five():
    return 5
'''


@pytest.mark.parametrize(("wrong", "name", "words"), [
    ("x +", "Two.three", "line 13: invalid syntax"),
    ("(x", "Two.three", r"line 13: '\(' was never closed"),
    ("'x", "Two.three", "line 13: unterminated string literal .*"),
    ("'''x", "Two.three", "line 13: unterminated triple-quoted string literal .*"),
    ("[x)", "Two.three", r"line 13: closing parenthesis '\)' does not match .*"),
    ("x\n      y", "Two.three", "line 14: unindent does not match any outer indentation level"),
    ("x\n        if x:", "Two.three",
     "line 16: expected an indented block after 'if' statement on line 14"),
    ("x\n\n    def more(self):", "Two.more",
     r"line 17: expected an indented block after function definition on line 15"),
    ("x\n\n    nonlocal x", "Two", "line 15: no binding for nonlocal 'x' found"),
    ("x\x00", "", "source code string cannot contain null bytes|.*null bytes"),
], ids=["end", "bracket", "string", "text", "brackets", "indent", "if", "def", "class", "null"])
def test_a_function_that_is_no_python_does_not_sink_the_others(wrong, name, words):
    source = BROKEN.format(wrong)
    if not name:
        with pytest.raises(students.Unreadable, match=words):
            students.without_faults(source)
        return
    text, tree, faults = students.without_faults(source)
    assert list(faults) == [name] and re.fullmatch(words, faults[name]), faults
    assert holes.find(tree, "one") and holes.find(tree, "five")
    assert bool(holes.find(tree, "Two.four")) == (name != "Two")
    assert text.count("\n") == source.count("\n")       # so that lines keep their numbers


@pytest.mark.parametrize(("text", "words"), [
    ("return 1\n", "line 1: 'return' outside function"), ("x = = 1\n", "line 1: invalid syntax"),
    ("def f():\n    pass\n\nx = (\n", r"line 4: '\(' was never closed")])
def test_what_is_wrong_outside_of_functions_is_wrong_with_the_file(text, words):
    with pytest.raises(students.Unreadable, match=words):
        students.without_faults(text)


def test_of_a_broken_function_the_exercise_says_so_and_the_others_are_graded(tmp_path, short_table,
                                                                             no_runs):
    folder = written(tmp_path, SOLUTION.replace(ANSWER, "        return gradient,, None\n"))
    results = list(grading.grade(folder, exercises.EXERCISES))
    fault = f"line {LINE}: invalid syntax"
    assert [(r.number, r.mark, r.words) for r in results] == [
        ("04.2", "✗", fault), ("04.7", "✓", ""), ("04", "✗", "as 04.2")]


def test_files_that_are_missing_or_no_text_cost_a_line(tmp_path, short_table, no_runs):
    path = tmp_path / f"{CHAPTER}.py"

    def line(*numbers):
        chosen = exercises.chosen(numbers)
        [result] = grading.grade(tmp_path, chosen)
        assert result.mark == ("✗" if path.exists() else "·") and result.score == 0
        assert result.exercises == len(chosen[CHAPTER])
        return f"{result.number} {result.what}: {result.words}"

    assert line() == "04 all of it: not submitted"
    assert line("04.7") == "04.7 who pays: not submitted"
    path.mkdir()
    assert line() == "04 all of it: 04_tensor_parallel.py is no file"
    path.rmdir()
    os.mkfifo(path)
    assert line() == "04 all of it: 04_tensor_parallel.py is no file"
    path.unlink()
    path.symlink_to("nowhere")
    assert line() == "04 all of it: not submitted"
    path.unlink()
    for data, words in [(b"x = '\xff'", "is no text in UTF-8"),
                        (b"# coding: no-such\n", "is no text in UTF-8"),
                        (b"#" * 2_000_000, "is larger than 1,000,000 bytes"),
                        (b"x = " + b"(" * 5000, "line 1: too many nested parentheses"),
                        (b"\x1b[2J", r"line 1: invalid non-printable character.*")]:
        path.write_bytes(data)
        assert re.fullmatch(f"04 all of it: 04_tensor_parallel.py .*({words})", line())
        assert line().isprintable()
    path.write_text("def ranks_that_pay(dim, width, flops, bandwidth):\n    pass\n")
    assert [(r.mark, r.words) for r in grading.grade(tmp_path, exercises.EXERCISES)] == [
        ("✗", f"there is no SumOut.backward in {CHAPTER}.py"), ("·", "not begun"),
        ("·", "not begun: 04.7")]


def test_an_exercise_of_two_functions_names_the_one_that_is_not_begun(no_runs):
    both = SUM._replace(names="SumOut.forward SumOut.backward")
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "?")
    said = grading.grade_exercise(both, file_of(text))
    assert said == (grading.OPEN, "not begun: SumOut.backward")


# --------------------------------------------------------------------------------------- the report


def test_two_students_are_graded_in_one_command(tmp_path, short_table, no_runs, capsys):
    """And the report is written as Gradescope and JUnit want it."""
    written(tmp_path / "class" / "ada")
    text = SOLUTION.replace("1 + 8 * dim", "8 * dim")
    written(tmp_path / "class" / 'bob & "<co>"', holes.cut(text, "SumOut.backward", "?", "?"))
    (tmp_path / "class" / ".git").mkdir()
    (tmp_path / "class" / "notes.txt").touch()
    files = [tmp_path / "new" / f"results.{suffix}" for suffix in ("json", "xml")]
    status = grade.main([str(tmp_path / "class"), f"--json={files[0]}", f"--junit={files[1]}"])
    output, errors = capsys.readouterr()
    assert (status, errors) == (1, "")
    assert re.sub(r"\d+ s\n", "N s\n", output) == '''ada
04.2  SumOut.backward    ✓
04.7  who pays           ✓
04    the whole chapter  ✓
2 of 2 right, 0 wrong, 0 not begun; 4 of 4 points; N s

bob & "<co>"
04.2  SumOut.backward    ·  not begun
04.7  who pays           ✗  it is not the solution
04    the whole chapter  ·  not begun: 04.2
0 of 2 right, 1 wrong, 1 not begun; 0 of 4 points; N s

'''
    results = json.loads(files[0].read_text())
    assert len(results["tests"]) == 6 and "2 of 4 right" in results["output"]
    assert results["tests"][1] == {
        "name": "ada: 04.7 who pays", "score": 2, "max_score": 2, "status": "passed",
        "output": "right", "visibility": "visible"}
    assert results["tests"][4] == {
        "name": 'bob & "<co>": 04.7 who pays', "score": 0, "max_score": 2, "status": "failed",
        "output": "it is not the solution", "visibility": "visible"}
    ada, bob = xml.parse(files[1]).getroot()
    assert ada.attrib["name"] == "ada" and ada.attrib["failures"] == "0"
    assert (bob.attrib["tests"], bob.attrib["failures"], bob.attrib["skipped"]) == ("3", "1", "2")
    assert bob[1].attrib["classname"] == 'bob & "<co>"'
    assert bob[1].find("failure").attrib["message"] == "it is not the solution"


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


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_grader_is_ended_with_all_that_it_has_started(number, tmp_path):
    pids = tmp_path / "pids"
    answer = f'''        import os
        open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        while True:
            pass
'''
    written(tmp_path, SOLUTION.replace(ANSWER, answer))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-m", "lab.grade", tmp_path, "04.2", "--limit=99"],
                               cwd=ROOT, **pipes)
    end = time.monotonic() + 60
    while not pids.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(number)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number and output == ""
    assert errors == ("error: interrupted\n" if number == signal.SIGINT else "")
    assert_ended(pids)
