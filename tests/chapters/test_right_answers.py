"""Right answers that don't look like ours pass: no check asks for more than its question does."""

import tomllib

import pytest

from lab.classroom import checks, grading
from tests.conftest import ROOT, needs_triton, sample
from tests.support.right_answers import graded

PATH = ROOT / "tests/chapters/right_answers.toml"
ANSWERS = tomllib.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", sample(sorted(ANSWERS, reverse=True)))
def test_a_right_answer_passes(number):
    if not number[0].isdigit():
        needs_triton()
    checks.warm_up()
    assert graded(number, ANSWERS[number]["answer"]) == (grading.RIGHT, "")
