"""What the grader says of a file that is broken."""

import os

from lab.classroom import exercises, grading, holes
from tests.lab.classroom.two_exercises import CHAPTER, SOLUTION, SUM, file_of, written


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
                        (b"def f():\n    pass\n\nx = (\n", "line 4: "),
                        (b"def f():\n    return '\x00'\n", "null bytes"),
                        (b"x = " + b"(" * 5000, "line 1: too many nested parentheses"),
                        (b"\x1b[2J", "line 1: invalid non-printable character")]:
        path.write_bytes(data)
        assert f"{CHAPTER}.py " in line() and words in line()


def test_functions_that_are_missing_or_not_begun_are_named(tmp_path, short_table, no_runs):
    written(tmp_path, "def ranks_that_pay(dim, width, flops, bandwidth):\n    pass\n")
    assert [(r.mark, r.words) for r in grading.grade(tmp_path, exercises.EXERCISES)] == [
        ("✗", f"there is no SumOut.backward in {CHAPTER}.py"), ("·", "not begun"),
        ("·", "not begun: 04.7")]
    both = SUM._replace(names="SumOut.forward SumOut.backward")
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "?")
    assert grading.grade_exercise(both, file_of(text)) == (
        grading.OPEN, "not begun: SumOut.backward")
