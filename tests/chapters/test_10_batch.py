"""Chapter 10: which batch, and how many GPUs, shorten the way to the same loss."""

import pytest

from lab.planner import batch, planning
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)


def test_steps_and_tokens_are_mccandlishs():
    """(S / S_min - 1) · (E / E_min - 1) = 1, and E = S · B with E_min = N · S_min."""
    noise_scale = 4e6
    for size, steps, tokens in [(1e6, 5, 1.25), (4e6, 2, 2), (16e6, 1.25, 5)]:
        assert batch.steps(size, noise_scale) == steps and batch.tokens(size, noise_scale) == tokens
        assert (steps - 1) * (tokens - 1) == 1 and steps * size == tokens * noise_scale


def test_the_batch_that_reaches_the_loss_first_is_taken(ten):
    noise_scale = 1e6
    _, asked = planning.question(ten, ["--model=1b", "--micro-batch=2"])
    [plan, *_], _ = asked.find()
    found = batch.best_ways(asked, plan, noise_scale)
    assert len(found) > 2
    for way in found:
        layout, model = way.layout, asked.model
        assert way.batch == layout.micro_batch * way.accumulated * layout.dp
        assert way.gpus == layout.dp * layout.tp * layout.cp * layout.pp
        assert layout.micro_batch == 2
        seconds = sum(ten.step_seconds(model, layout, asked.cluster, asked.software,
                                       way.batch).values())
        assert way.seconds == pytest.approx(seconds)
        assert way.time == pytest.approx((1 + noise_scale / (way.batch * model.seq)) * seconds)
        every = list(batch.ways(asked, plan, way.gpus, noise_scale))
        assert way.time == min(other.time for other in every) < max(
            other.time for other in every) / 2
    spared = [1 - after.time / before.time for before, after in zip(found, found[1:])]
    assert min(spared[:-1]) >= 0.1 > spared[-1]         # what twice the GPUs have to spare
