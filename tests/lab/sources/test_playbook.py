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


def test_flops_of_a_token_are_those_of_its_mfu(ten):
    for name, told, mfu in [("1B", 40150, 0.392), ("3B", 13312, 0.345), ("80B", 285, 0.148)]:
        assert playbook.mfu(ten, name, told) == pytest.approx(mfu, rel=0.02)


def test_the_best_configuration_fits_and_beats_the_layouts_that_were_tried(ten):
    plan = playbook.best(ten, "8B", 16)
    assert plan.layout.dp * plan.layout.tp * plan.layout.pp == 128 and plan.layout.zero == 1
    assert plan.bytes <= ten.ROOM * 80e9 and plan.layout.recompute == "none"
    assert playbook.best(ten, "80B", 2) is None
    tried = [playbook.speed(ten, "8B", layout)
             for name, nodes, layout, *_ in playbook.runs(ten) if (name, nodes) == ("8B", 16)]
    assert playbook.BATCH * 4096 / plan.total / 128 >= max(tried)
