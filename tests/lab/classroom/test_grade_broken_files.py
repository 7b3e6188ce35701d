"""What the grader says of a file that is broken."""

import os
import re

import pytest

from lab.classroom import exercises, grading, holes, students
from tests.lab.classroom.two_exercises import (
    CHAPTER,
    SOLUTION,
    SUM,
    file_of,
    written,
)

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


@pytest.mark.parametrize(("wrong", "name", "line"), [
    ("x +", "Two.three", 13), ("'''x", "Two.three", 13), ("x\n      y", "Two.three", 14),
    ("x\n\n    def more(self):", "Two.more", 17), ("x\n\n    nonlocal x", "Two", 15),
], ids=["end", "text", "indent", "def", "class"])
def test_a_function_that_is_no_python_does_not_sink_the_others(wrong, name, line):
    source = BROKEN.format(wrong)
    text, tree, faults = students.without_faults(source)
    assert list(faults) == [name] and re.match(f"line {line}: ", faults[name]), faults
    assert holes.find(tree, "one") and holes.find(tree, "five")
    assert bool(holes.find(tree, "Two.four")) == (name != "Two")
    assert text.count("\n") == source.count("\n")  # so that lines keep their numbers


def test_what_is_wrong_outside_of_functions_is_wrong_with_the_file():
    for text, words in {"return 1\n": "line 1: ", "x = = 1\n": "line 1: ",
                        "def f():\n    pass\n\nx = (\n": "line 4: ",
                        BROKEN.format("x\x00"): "null bytes"}.items():
        with pytest.raises(students.Unreadable, match=words):
            students.without_faults(text)


def test_files_that_are_missing_or_no_text_cost_a_line(tmp_path, short_table, no_runs):
    path = tmp_path / f"{CHAPTER}.py"

    def line(*numbers):
        chosen = exercises.chosen(numbers)
        [result] = grading.grade(tmp_path, chosen)
        assert result.mark == ("✗" if path.exists() else "·") and result.score == 0
        assert result.exercises == len(chosen[CHAPTER]) and result.words.isprintable()
        return f"{result.number}: {result.words}"

    assert line() == "04: not submitted" and line("04.7") == "04.7: not submitted"
    os.mkfifo(path)
    assert line() == f"04: {CHAPTER}.py is no file"
    path.unlink()
    for data, words in [(b"x = '\xff'", "is no text in UTF-8"),
                        (b"#" * 2_000_000, "is larger than 1,000,000 bytes"),
                        (b"x = " + b"(" * 5000, "line 1: too many nested parentheses"),
                        (b"\x1b[2J", "line 1: invalid non-printable character")]:
        path.write_bytes(data)
        assert f"{CHAPTER}.py {words}" in line()


def test_functions_that_are_missing_or_not_begun_are_named(tmp_path, short_table, no_runs):
    written(tmp_path, "def ranks_that_pay(dim, width, flops, bandwidth):\n    pass\n")
    assert [(r.mark, r.words) for r in grading.grade(tmp_path, exercises.EXERCISES)] == [
        ("✗", f"there is no SumOut.backward in {CHAPTER}.py"), ("·", "not begun"),
        ("·", "not begun: 04.7")]
    both = SUM._replace(names="SumOut.forward SumOut.backward")
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "?")
    said = grading.grade_exercise(both, file_of(text))
    assert said == (grading.OPEN, "not begun: SumOut.backward")
