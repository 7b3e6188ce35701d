"""lab/drawing.py: what hides behind what is drawn as it was recorded."""

import pytest

from lab import drawing
from lab.run.overlap import union


def drawn(axes, row, color):
    """The moments, in ms, that are drawn in this colour in a row."""
    from matplotlib.colors import to_rgba

    found = []
    for bars in axes.collections:
        if tuple(bars.get_facecolor()[0]) == to_rgba(color):
            for path in bars.get_paths():
                (left, bottom), (right, _) = path.get_extents().get_points()
                found += [[left, right]] if row <= bottom < row + 1 else []
    return union(found)


def of_runs(timeline, **found):
    overlap = {op: {"hidden": share, "ratio": ratio} for op, (share, ratio) in found.items()}
    return {"recorded": {"timeline": timeline, "overlap": overlap}, "variant": "ring"}


def test_a_step_is_drawn_with_its_waits_cut_out():
    spans = [["send", 4, 0.001, 0.003, "cp"], ["receive", 4, 0.002, 0.005, "cp"],
             ["all_reduce", 4, 0.007, 0.009, "world"]]
    run = of_runs({"seconds": 0.01, "backward": [[0.004, 0.008]], "gradients": [],
                   "collectives": spans, "waits": [[0.002, 0.003], [0.0075, 0.009]]},
                  send=(3 / 4, 0.5), all_reduce=(1 / 4, None))
    figure, upper = drawing.above_overlap(8, 1, {"a ring": run})
    [axes] = figure.subfigs[1].axes
    at = lambda *moments: [list(pair) for pair in zip(moments[::2], moments[1::2])]
    pale = drawing.paler(drawing.BLUE)
    assert drawn(axes, 0, drawing.BLUE) == at(4, 7.5)
    assert drawn(axes, 0, pale) == [pytest.approx(x) for x in at(0, 2, 3, 4, 9, 10)]
    for row, op, hidden, waited in ((1, "send", (1, 2, 3, 5), (2, 3)),
                                    (2, "all_reduce", (7, 7.5), (7.5, 9))):
        color = drawing.OPERATORS[op]
        assert drawn(axes, row, color) == [pytest.approx(x) for x in at(*hidden)]
        assert drawn(axes, row, drawing.paler(color)) == [pytest.approx(x) for x in at(*waited)]
    words = [tick.get_text() for tick in axes.get_yticklabels()]
    assert "75%" in words[1] and "0.50" in words[1] and "25%" in words[2]
    assert " 58% " in axes.get_title(loc="left")  # 3.5 of 6 ms
