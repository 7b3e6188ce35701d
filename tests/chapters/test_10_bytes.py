"""Chapter 10: bytes per parameter are fields. Memory, messages and the update follow them."""

from dataclasses import replace

import pytest

from lab import formats
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)

PARTS = "weights", "gradients", "optimizer"


def of_recipe(ten, recipe):
    """The fields of one of lab.formats: a gradient, and the sum of several."""
    masters, sums, weights, gradients, first, second = (formats.WIDTHS[name] for name in recipe)
    return ten.Software(weight_bytes=weights, gradient_bytes=sums + gradients,
                        master_bytes=masters, moment_bytes=first + second,
                        sent_bytes=sums or gradients)


def states(ten, model, layout, software):
    """Bytes of a parameter of the model, of each part."""
    found = ten.memory(model, layout, software, 1)
    return [found[part] / model.parameters() for part in PARTS]


def test_zero_shares_the_bytes_of_each_recipe_as_in_chapter_03(ten):
    """The default's 2 + 4 + 12 bytes; and the playbook's 20, 16, 16, 9, 15 and 10."""
    model, n = ten.gpt(4, 64, 4, vocab=256), 4
    assert states(ten, model, ten.Layout(), ten.Software()) == [2, 4, 12]
    whole = 2 * model.weights(1) / model.parameters()   # ZeRO-3 has two layers at a time, in bf16
    for name, recipe in formats.RECIPES.items():
        software = of_recipe(ten, recipe)
        of = lambda software=software, **more: states(ten, model, ten.Layout(**more), software)
        weights, gradients, optimizer = of()
        assert weights + gradients + optimizer == formats.bytes_of(recipe), name
        assert of(dp=n, zero=1) == [weights, gradients, optimizer / n], name
        assert of(dp=n, zero=2) == [weights, gradients / n, optimizer / n], name
        assert of(dp=n, zero=3) == pytest.approx([
            weights / n + min(2, weights) * whole, gradients / n, optimizer / n]), name


def test_messages_and_seconds_follow_the_bytes(ten):
    model, h100 = ten.MODELS["1b"], replace(ten.CLUSTERS["h100"], alpha=0)
    seconds = lambda zero, **bytes_of: ten.step_seconds(
        model, ten.Layout(8, zero=zero), h100,
        ten.Software(dp_hidden=0, fused_gradients=False, **bytes_of), 8)

    # Sent once a step: gradients twice, or gradients and weights.
    assert seconds(0, sent_bytes=2)["dp"] == pytest.approx(seconds(0)["dp"] / 2)
    assert seconds(1, sent_bytes=2)["dp"] == pytest.approx(seconds(1)["dp"] * 4 / 6)
    assert seconds(3, weight_bytes=1)["dp"] == pytest.approx(seconds(3)["dp"] * 6 / 8)
    assert seconds(3, weight_bytes=4) == pytest.approx(seconds(3))      # is gathered in bf16
    assert seconds(0, gradient_bytes=2) == seconds(0)                   # what is held moves nothing

    # Through HBM in the update, and where a gradient is added to the sum.
    moved = lambda **bytes_of: seconds(0, **bytes_of)["optimizer"] / seconds(0)["optimizer"] * 60
    assert moved() == 60 and moved(sent_bytes=2) == pytest.approx(58)
    assert moved(moment_bytes=2) == pytest.approx(48)
    assert moved(master_bytes=0, weight_bytes=4) == pytest.approx(60)
    assert moved(master_bytes=0) == pytest.approx(56)
    assert seconds(0, sent_bytes=2)["weights"] == pytest.approx(seconds(0)["weights"] * 8 / 12)
