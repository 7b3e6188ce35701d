"""Megatron's paper: its equations are ours, and a message without scatter/gather is a whole one."""

import pytest

from lab import schedules
from lab.planner import megatron, problems, published
from tests.conftest import chapter

TEN, SEVEN = chapter("10_planner"), chapter("07_pipeline_parallel")


def models():
    """Of tables 1 and 2, with their batches."""
    for name in ("table 1", "table 2, PTD"):
        for row, *_ in published.rows(TEN, name):
            layers, dim, heads, *_, batch, _ = map(int, row.split())
            yield TEN.gpt(layers, dim, heads), batch


def test_equation_3_is_what_the_planner_counts():
    for model, batch in models():
        ours = TEN.step_flops(model, batch, recompute="full")
        assert megatron.equation_3(batch, model) == pytest.approx(ours, rel=1e-12)
        assert ours > 1.01 * TEN.step_flops(model, batch)


def test_equation_2_is_ours_with_biases_and_positions():
    for model, _ in models():
        layers, h = model.layers, model.dim
        told = 12 * layers * h**2 * (1 + 13 / (12 * h) + (model.vocab + model.seq)
                                     / (12 * layers * h))
        assert megatron.parameters(model) == pytest.approx(told, rel=1e-12)


@pytest.mark.parametrize("p, m", [(1, 3), (4, 8), (8, 5)])
def test_equation_1_is_a_schedule_in_simulated_time(p, m):
    span = schedules.simulate(SEVEN.make_schedule("1f1b", p, m))
    assert max(end for _, end in span.values()) == megatron.equation_1(4 * m, 4, p, 3)


@pytest.mark.parametrize("n, sequences", [(32, 32), (32, 128), (128, 512)])
def test_the_bubble_over_dp_is_figure_6s(n, sequences):
    for d in (1, 2, 8, 32):
        assert SEVEN.bubble("1f1b", n // d, sequences // d, 1) == (n - d) / sequences


def test_no_other_number_of_checkpoints_keeps_less():
    sizes = 64, 3, 48                                   # layers, bytes of an input, of a layer
    best = problems.best_checkpoints(*sizes)
    kept = [megatron.activations(c, *sizes) for c in range(1, 65)]
    assert kept.index(min(kept)) + 1 == best == 32


@pytest.mark.parametrize("dp, v", [(1, 1), (2, 4)])
def test_a_message_without_scatter_gather_is_a_whole_one(dp, v):
    model, batch = TEN.MODELS["gpt3"], 48
    layout = megatron.layout(TEN, dp, tp=8, pp=12, v=v)
    part, whole = (megatron.seconds(TEN, model, layout, batch, scattered)
                   for scattered in (True, False))
    m = batch // dp
    size, card = 2 * 2048 * 12288, 25e9 * TEN.NIC
    assert whole["pp"] == pytest.approx(m * 2 * v * size / card)
    assert part["pp"] < whole["pp"] / 4
    more = {cause: whole[cause] - part[cause] for cause in part}
    assert more["bubble"] == pytest.approx(more["pp"] / m * 11 / v)
    assert {cause for cause in more if more[cause]} == {"pp", "bubble"}


def test_alone_a_rank_has_nothing_to_scatter():
    model, layout = TEN.gpt(24, 4096, 32), megatron.layout(TEN, pp=4)
    one, other = (megatron.seconds(TEN, model, layout, 8, scattered) for scattered in (True, False))
    assert one == pytest.approx(other)


def test_where_a_curve_is_highest_and_how_often_it_falls():
    curve = {1: 5, 2: 7, 4: 7, 8: 3, 16: 1}
    assert (megatron.best(curve), megatron.falls(curve)) == (2, 2)
