"""Rooflines: closed forms are where the two lines cross, and the two lines are the planner's."""

import pytest

from lab.planner import rooflines
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)


def test_a_roof_is_the_planner_without_latency_and_memory(ten):
    """Except for (n-1)/n and attention's scores; and no plan is above its roof."""
    model, tokens, dp, tp = ten.MODELS["70b"], 2**20, 64, 8
    for name, axes in (("h100", (1, 1)), ("tpu-v5p", (2, 3))):
        sheet = rooflines.by_data_sheet(ten, ten.CLUSTERS[name])
        machine = ten.Machine(sheet, ten.SOFTWARE["megatron-2024"])
        layout = ten.Layout(dp, tp, micro_batch=tokens / dp / model.seq, zero=3)
        forward, backward = ten.layer_seconds(model, layout, machine)
        above = rooflines.Roof(ten, model, ten.CLUSTERS[name], axes).seconds(tokens, dp, tp)
        below = rooflines.Roof(ten, model, sheet, axes).planned(tokens, dp, tp)
        assert forward["matmul"] == pytest.approx(above["compute"])
        assert backward["matmul"] == pytest.approx(2 * above["compute"])
        assert below["compute"] == pytest.approx(forward["matmul"] + forward["attention"])
        assert below["tp"] == pytest.approx((tp - 1) / tp * above["tp"])
        assert below["zero-3"] == pytest.approx((dp - 1) / dp * above["zero-3"])

        roof = rooflines.Roof(ten, model, ten.CLUSTERS[name], axes)
        for split in rooflines.splits(64):
            planned, at_most = roof.planned(tokens, *split), roof.seconds(tokens, *split)
            assert planned["compute"] > at_most["compute"]
            for axis, n in zip(("zero-3", "tp"), split):
                assert planned[axis] >= (n - 1) / n * at_most[axis]
    assert roof.planned(2**20, 1, 128) is None          # 64 heads


@pytest.mark.parametrize(("name", "chips", "axes"), [
    ("tpu-v5p", 4096, (2, 1)), ("h100", 512, (1, 1))])
def test_from_the_least_tokens_on_compute_is_longer(ten, name, chips, axes):
    roof = rooflines.Roof(ten, ten.MODELS["8b"], ten.CLUSTERS[name], axes)
    for dp, tp in rooflines.splits(chips):
        least = roof.least_tokens(dp, tp)
        found = rooflines.crossing(
            lambda tokens, dp=dp, tp=tp: roof.seconds(tokens * chips, dp, tp))
        assert found == pytest.approx(least if least > 1 else 0, rel=1e-5)
    least, split = roof.best("both", chips)
    assert least == min(roof.least_tokens(*one) for one in rooflines.splits(chips))
    for tokens in (0.999 * least * chips, 1.001 * least * chips) if least else ():
        times = roof.seconds(tokens, *roof.split("both", chips, tokens))
        assert (times["compute"] > rooflines.messages(times)) == (tokens > least * chips)
