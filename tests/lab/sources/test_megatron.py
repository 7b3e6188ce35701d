"""Megatron's paper: its equations are ours, and scatter/gather saves what it says."""

import pytest

from lab import schedules
from lab.planner import megatron, problems, published
from tests.conftest import chapter


@pytest.fixture
def ten():
    return chapter("10_planner")


def test_equations_1_2_and_3_are_ours(ten):
    """A schedule in simulated time; parameters with biases and positions; and FLOPs."""
    for p, m in [(1, 3), (4, 8), (8, 5)]:
        span = schedules.simulate(chapter("07_pipeline_parallel").make_schedule("1f1b", p, m))
        assert max(end for _, end in span.values()) == megatron.equation_1(4 * m, 4, p, 3)
    for row, *_ in published.rows(ten, "table 1"):
        layers, h, heads, *_, batch, _ = map(int, row.split())
        model = ten.gpt(layers, h, heads)
        told = 12 * layers * h**2 * (1 + 13 / (12 * h) + (model.vocab + model.seq)
                                     / (12 * layers * h))
        assert megatron.parameters(model) == pytest.approx(told, rel=1e-12)
        ours = ten.step_flops(model, batch, recompute="full")
        assert megatron.equation_3(batch, model) == pytest.approx(ours, rel=1e-12)
        assert ours > 1.01 * ten.step_flops(model, batch)


def test_figure_16s_micro_batch_is_two(ten):
    seconds = {b: sum(megatron.seconds(ten, *megatron.run_of_16(ten, b), 128).values())
               for b in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2


def test_no_other_number_of_checkpoints_keeps_less():
    sizes = 64, 3, 48                                   # layers, bytes of an input, of a layer
    best = problems.best_checkpoints(*sizes)
    kept = [megatron.activations(c, *sizes) for c in range(1, 65)]
    assert kept.index(min(kept)) + 1 == best == 32


@pytest.mark.parametrize("dp, v", [(1, 1), (2, 4)])
def test_a_message_without_scatter_gather_is_a_whole_one(ten, dp, v):
    model, batch = ten.MODELS["gpt3"], 48
    layout = megatron.layout(ten, dp, tp=8, pp=12, v=v)
    part, whole = (megatron.seconds(ten, model, layout, batch, scattered)
                   for scattered in (True, False))
    m = batch // dp
    size, card = 2 * 2048 * 12288, 25e9 * ten.NIC
    assert whole["pp"] == pytest.approx(m * 2 * v * size / card)
    assert part["pp"] < whole["pp"] / 4
    more = {cause: whole[cause] - part[cause] for cause in part}
    assert more["bubble"] == pytest.approx(more["pp"] / m * 11 / v)
    assert {cause for cause in more if more[cause]} == {"pp", "bubble"}
