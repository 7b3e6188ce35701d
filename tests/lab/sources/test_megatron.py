"""Megatron's paper: its equations are ours, and scatter/gather saves what it says."""

import pytest

from lab import schedules
from lab.planner import megatron, problems, published
from tests.conftest import chapter


@pytest.fixture
def ten():
    return chapter("10_planner")


@pytest.fixture
def seven():
    return chapter("07_pipeline_parallel")


def test_equations_1_2_and_3_are_ours(ten, seven):
    """A schedule in simulated time; parameters with biases and positions; and FLOPs."""
    for p, m in [(1, 3), (4, 8), (8, 5)]:
        span = schedules.simulate(seven.make_schedule("1f1b", p, m))
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


def test_the_bubble_over_dp_is_figure_6s(seven):
    for n, sequences in [(32, 32), (32, 128), (128, 512)]:
        for d in (1, 2, 8, 32):
            assert seven.bubble("1f1b", n // d, sequences // d, 1) == (n - d) / sequences


def test_figure_16s_micro_batch_is_two(ten):
    seconds = {b: sum(megatron.seconds(ten, *megatron.run_of_16(ten, b), 128).values())
               for b in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == 2
    curve = {1: 5, 2: 7, 4: 7, 8: 3, 16: 1}
    assert (megatron.best(curve), megatron.falls(curve)) == (2, 2)


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
    for axes in ({"pp": 4}, {"tp": 8}):                 # nothing to scatter, or no message
        alone = ten.gpt(24, 4096, 32), megatron.layout(ten, **axes), 8
        assert megatron.seconds(ten, *alone, True) == pytest.approx(
            megatron.seconds(ten, *alone, False))


@pytest.mark.full
def test_panels_show_what_is_predicted_and_what_was_published(ten):
    from lab.sources import megatron_figure

    panels = {axes.get_title("left").split(":")[0]: axes for axes in megatron_figure.draw().axes}
    assert len(panels) == 12
    small, large, dashed = panels["Figure 13"].get_lines()
    assert dict(zip(*large.get_data())) == megatron.figure_13(ten)["batch 128"]
    assert set(dashed.get_xdata()) == {8} and small.get_label() == "batch 32"
    table = panels["Figure 10 and table 2"].get_lines()
    assert [*table[-1].get_ydata()] == [138, 98, 48]    # published, of ZeRO-3 with 530 G
    assert table[-2].get_ydata() == pytest.approx([138, 98, 48], rel=0.15)
