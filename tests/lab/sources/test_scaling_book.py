"""The scaling book's plots: lines cross where they are marked."""

import math

import pytest

from lab.planner import rooflines
from lab.sources import scaling_book as book


def test_the_least_batch_is_where_the_best_split_stops_waiting():
    least = book.least_batch(4 * book.D, 4096)
    assert book.slack(4 * book.D, 0.999 * least, 4096) < 1 < book.slack(4 * book.D, 1.001 * least,
                                                                        4096)
    for split in rooflines.splits(4096):                # and every other split waits longer
        at = book.times(4 * book.D, 0.999 * least)(*split)
        assert at["compute"] < rooflines.messages(at)


def test_lines_of_the_first_plot_cross_where_they_are_marked():
    both, alone = book.least(book.F), book.per_chip(3)
    assert book.together(both) == pytest.approx(1) == book.alone("zero-3", alone)
    assert book.alone("tp", both) == pytest.approx(book.alone("tp", alone)) and (
        book.alone("tp", alone) < 1)
    assert math.isclose(book.together(9 * both), 3) and math.isclose(
        book.alone("zero-3", 9 * alone), 9)
