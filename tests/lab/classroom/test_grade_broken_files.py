"""What the grader says of a file that is broken."""

import os
import re

import pytest

from lab.classroom import exercises, grading, holes, students
from tests.lab.classroom.test_grade import (  # noqa: F401  (fixtures)
    ANSWER,
    LINE,
    SOLUTION,
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
