"""What the lecture gives no number for is held to a second way of counting."""

import pytest

from lab.sources import lecture
from lab.sources.lecture import change_of_earlier_tokens, loss

BLOCK = 34 * 2048 * 12288 + 5 * 96 * 2048**2        # bytes of a layer of GPT-3, as by Korthikanti
GPT3 = 51200 * 12288 + 96 * 12 * 12288**2           # parameters, but for norms
FLOPS, NVLINK, CARD = 989e12, 450e9, 50e9           # an H100
UNTOLD = [
    96 * BLOCK, 2 / (34 + 5 * 96 / 6), 7000, 7000, 14000, 875, 7000, 875, 7000, 7000, 8 * 3, 1,
    *(7.5e9 * size for size in (16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)), 5 / 4,
    7, 1 / (12 * 4 * 7 / 8)]
COMPUTING = 2 * (4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * 3 * 4096 * 14336) + 4 * 4096 * 4096
ROWS = 2 * 2 * 4096 * 2 * 7 / 8                     # bytes of a token of Mixtral, there and back
ANSWERS = [
    96 * 4 * 12288**2 / GPT3, 96 * 8 * 12288**2 / GPT3, 51200 * 12288 / GPT3,
    2 * GPT3 / (96 * BLOCK), 16 * GPT3 / (96 * BLOCK), 16 * GPT3 / (96 * 2 * 2048 * 12288),
    1, 7 / 8 * FLOPS / NVLINK, FLOPS / CARD, 7 / 8 * FLOPS / NVLINK,
    1023 / 1024 * FLOPS / CARD, 1 + 4 * 8192 * NVLINK / FLOPS, 1 + 4 * 2048 * NVLINK / FLOPS,
    7 / 4, 1, 7 / 8, 7 / 128, 7 / 8 / 3, ROWS, ROWS / NVLINK / (COMPUTING / FLOPS),
    ROWS / CARD / (COMPUTING / FLOPS), 2048 / 128, 2048 * 8192, 128 / 8]


def test_rows_without_a_number_of_the_text_and_those_that_differ():
    ours = [row.ours() for row in lecture.ROWS if row.told is None or row.why]
    assert ours == pytest.approx(UNTOLD, rel=2e-3)


def test_answers_to_what_it_claims():
    rows = [row for question in lecture.QUESTIONS for row in question.rows]
    [planned] = [row for row in rows if row.by == "10_planner.step_seconds"]
    ours = [row.ours() for row in rows if row != planned]
    assert ours == pytest.approx(ANSWERS, rel=2e-3)
    assert 1 < planned.ours() < 1.1                     # thinner matrices, and nothing else


def test_small_computations():
    assert loss(words=16) == pytest.approx(2.772588722)
    assert change_of_earlier_tokens() == 0
