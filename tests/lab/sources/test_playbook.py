"""lab/planner/playbook.py: what its docstring says of the playbook's runs, and the picture."""

import statistics

import pytest

from lab.chapters import chapter
from lab.planner import playbook


@pytest.fixture
def ten():
    return chapter("10")


def errors(ten, name, nodes):
    """[(its layout, by what share the planner is too fast)] of a model's runs on so many nodes."""
    return [(layout, playbook.speed(ten, name, layout) / told - 1)
            for of, on, layout, told, _ in playbook.runs(ten) if (of, on) == (name, nodes)]


def test_of_74_runs_42_are_within_20_percent(ten):
    every = [abs(error) for name, nodes in playbook.RUNS for _, error in errors(ten, name, nodes)]
    assert len(every) == 74 and sum(size < 0.2 for size in every) == 42
    assert statistics.median(every) == pytest.approx(0.15, abs=0.01)
    of_8b = sorted(abs(error) for _, error in errors(ten, "8B", 1))
    assert len(of_8b) == 13 and of_8b[9] < 0.11 < of_8b[10]


def test_flops_of_a_token_are_those_of_its_mfu(ten):
    """8B's with an embedding that is a matrix of its own."""
    for name, told, mfu in [("1B", 40150, 0.392), ("3B", 13312, 0.345), ("80B", 285, 0.148)]:
        assert playbook.mfu(ten, name, told) == pytest.approx(mfu, rel=0.02)
    model = playbook.model_of(ten, "8B")
    embedding = 6 * model.vocab * model.dim * 7503 / ten.CLUSTERS["h100"].peak
    assert playbook.mfu(ten, "8B", 7503) == pytest.approx(0.428, abs=1e-3)
    assert playbook.mfu(ten, "8B", 7503) + embedding == pytest.approx(0.452, abs=1e-3)


def test_the_best_configuration_fits_and_beats_the_layouts_that_were_tried(ten):
    plan = playbook.best(ten, "8B", 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 128 and plan.layout.zero == 1
    assert plan.bytes <= ten.ROOM * 80e9 and plan.layout.recompute == "none"
    assert playbook.best(ten, "80B", 2) is None
    tried = [playbook.speed(ten, "8B", layout)
             for name, nodes, layout, *_ in playbook.runs(ten) if (name, nodes) == ("8B", 16)]
    assert playbook.BATCH * 4096 / plan.total / 128 >= max(tried)


@pytest.mark.full
def test_panels_show_what_is_planned_beside_what_was_measured(ten, monkeypatch):
    from lab.sources import playbook_figure

    monkeypatch.setattr(playbook_figure, "NODES", (1, 4))           # of seven
    panels = {axes.get_title("left").split(":")[0]: axes for axes in playbook_figure.draw().axes}
    assert len(panels) == 10
    sheet, network, measured = panels["The 1B over dp"].get_lines()
    assert [*measured.get_ydata()] == [*playbook.THROUGHPUT["dp"].values()]
    assert sheet.get_ydata()[-1] == playbook.speed_over(ten, "dp", 256) > network.get_ydata()[-1]
    bars = panels["70B, by what is recomputed (as in its plot)"].patches
    tallest = max(bar.get_y() + bar.get_height() for bar in bars)
    assert tallest == pytest.approx(4 * 244.19586 + 1770.0625)      # GiB: none, 8,192 tokens
