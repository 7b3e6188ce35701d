"""Each number of the five texts is ours, or its row says why not."""

import pytest

from lab.sources import lecture, megatron, playbook, scaling_book, tutorial

MODULES = {"000": playbook, "001": scaling_book, "002": megatron, "003": lecture, "004": tutorial}

# Ours where the text has no number, or a different one. Counted once with formulas of their own.
LECTURE = [
    2.754e11, 0.01754, 7e3, 7e3, 1.4e4, 875, 7e3, 875, 7e3, 7e3, 24, 1, 1.2e11, 3.141e10, 1.664e10,
    1.875e9, 1.25, 7, 0.02381]
QUESTIONS = [
    0.3321, 0.6642, 0.003604, 1.268, 10.14, 578.1, 1, 1.017, 1923, 19780, 1923, 19760, 15.91, 4.727,
    1.75, 1, 0.875, 0.05469, 0.2917, 28670, 0.07364, 0.6628, 16, 1.678e7, 16]
TUTORIAL = [
    3, 20, 4.5e11, 9, 0.6713, 0.07553, 4.995, 9.75e9, 1.6e13, 4.048e8, 1.037, 0.0833, 0.252, 17,
    2.957, 1.678e7, 2.147e9, 0.008351, 1.25, 0.2941, 0.2488, 0.2177, 0.8578, 17, 1.678e7, 3.175, 7,
    0.0466, 14.12, 32, 0.09091, 23, 9, 512, 5.71, 34.81, 18, 1.037, 9, 15.91, 2.657, 1, 1.998,
    5.961, 0.5825, 1.25, 458800, 0.0833, 2.957, 3.2e9, 3.462, 0.09375, 0.07675, 0.6731, 0.09091,
    1.125, 128]
PLANS = "lab.planner.published.llama_3", "10_planner.Plan", "10_planner.memory"


@pytest.mark.parametrize("number", MODULES)
def test_a_row_agrees_or_says_why_not(number):
    wrong = []
    for row in MODULES[number].ROWS:
        value = row.ours()
        if row.agrees(value) == bool(row.why):          # an unneeded reason is wrong, too
            wrong.append(f"{row.where}, {row.what}: told {row.told}, ours {value}")
    assert not wrong


def test_numbers_that_no_text_confirms():
    def untold(rows):
        return [row.ours() for row in rows if (row.told is None or row.why)
                and row.by not in PLANS]

    asked = [row for question in lecture.QUESTIONS for row in question.rows]
    assert untold(lecture.ROWS) == pytest.approx(LECTURE, rel=1e-3)
    assert untold(asked) == pytest.approx(QUESTIONS, rel=1e-3)
    assert untold(tutorial.ROWS) == pytest.approx(TUTORIAL, rel=1e-3)
    assert lecture.loss(words=16) == pytest.approx(2.772588722)
    assert lecture.change_of_earlier_tokens() == 0
