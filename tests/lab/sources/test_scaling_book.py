"""The scaling book's plots: what is marked on them is where their lines cross."""

import math

import pytest

from lab.planner import rooflines
from lab.sources import scaling_book as book
from lab.sources import scaling_book_figure as figure


def test_the_least_batch_is_where_the_best_split_stops_waiting():
    least = book.least_batch(4 * book.D, 4096)
    assert book.slack(4 * book.D, 0.999 * least, 4096) < 1 < book.slack(4 * book.D, 1.001 * least,
                                                                        4096)
    for split in rooflines.splits(4096):                # and no other split does so with less
        at = book.times(4 * book.D, 0.999 * least)(*split)
        assert at["compute"] < rooflines.messages(at)


def test_lines_of_the_first_plot_cross_where_they_are_marked():
    both, alone = book.least(book.F), book.per_chip(3)
    assert book.together(both) == pytest.approx(1) == book.alone("zero-3", alone)
    assert book.alone("tp", both) == pytest.approx(book.alone("tp", alone)) and (
        book.alone("tp", alone) < 1)
    assert math.isclose(book.together(9 * both), 3) and math.isclose(
        book.alone("zero-3", 9 * alone), 9)


@pytest.mark.full
def test_every_mark_of_the_figure_lies_on_its_lines():
    drawn = figure.draw()
    for axes in drawn.axes[:7]:
        lines = [line for line in axes.lines if len(line.get_xdata()) > 9]
        marks = [line for line in axes.lines if len(line.get_xdata()) == 1]
        assert lines and marks
        for mark in marks:
            [x], [y] = mark.get_data()
            on = [line for line in lines if on_line(line, x, y)]
            assert on, (axes.get_title(), x, y)


def on_line(line, x, y):
    """Whether a point lies on a line of logarithmic axes."""
    points = [(math.log(a), math.log(b)) for a, b in zip(*line.get_data())]
    for (a, b), (c, d) in zip(points, points[1:]):
        if a <= math.log(x) <= c:
            return abs(b + (d - b) * (math.log(x) - a) / (c - a) - math.log(y)) < 0.02
    return False
