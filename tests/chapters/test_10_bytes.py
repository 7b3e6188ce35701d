"""Chapter 10: bytes of a parameter are fields, and memory, messages and the update follow them."""

from dataclasses import replace

import pytest

from lab import formats
from lab.planner import planning
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


@pytest.mark.parametrize("name", formats.RECIPES)
def test_a_recipe_has_its_bytes_and_zero_shares_them(ten, name):
    """20, 16, 16, 9, 15 and 10 of them, as the playbook's table has it."""
    software, model, n = of_recipe(ten, formats.RECIPES[name]), ten.gpt(4, 64, 4, vocab=256), 4
    alone = states(ten, model, ten.Layout(), software)
    assert sum(alone) == formats.bytes_of(formats.RECIPES[name])
    weights, gradients, optimizer = alone
    assert states(ten, model, ten.Layout(n, zero=1), software) == [
        weights, gradients, optimizer / n]
    assert states(ten, model, ten.Layout(n, zero=2), software) == [
        weights, gradients / n, optimizer / n]
    whole = 2 * model.weights(1) / model.parameters()       # two layers at a time, at most in bf16
    assert states(ten, model, ten.Layout(n, zero=3), software) == pytest.approx([
        weights / n + min(2, weights) * whole, gradients / n, optimizer / n])


@pytest.mark.parametrize(("flags", "told"), [
    ("--weight-bytes=2 --gradient-bytes=0 --master-bytes=0", 10),       # the scaling book's
    ("--gradient-bytes=2", 16), ("", 18), ("--gradient-bytes=6", 20),
    ("--weight-bytes=1 --gradient-bytes=3 --master-bytes=2 --moment-bytes=3", 9),
    ("--weight-bytes=4 --master-bytes=0", 16)])
def test_bytes_are_asked_for_by_flags(ten, flags, told):
    asked = planning.Question(ten, planning.arguments(ten, ["--model=7b", *flags.split()]))
    found = states(ten, asked.model, ten.Layout(), asked.software)
    assert sum(found) == pytest.approx(told)


def test_a_7b_on_eight_gpus_of_40_gb_as_a_list_of_questions_has_it(ten):
    """16 bytes of 7 G parameters are 112 GB, which dp holds on each GPU and ZeRO-3 on all eight."""
    model, software = ten.MODELS["7b"], ten.Software(gradient_bytes=2)
    held = {zero: ten.memory(model, ten.Layout(8, zero=zero, recompute="full"), software, 1)
            for zero in (0, 3)}
    assert sum(held[0][part] for part in PARTS) / model.parameters() == 16
    assert sum(held[0].values()) > 40e9 > sum(held[3].values())


def test_what_is_published_has_the_bytes_of_its_software(ten):
    """Megatron's manual: 20 with gradients in fp16 and copies in fp32, 18 with sums in fp32. FSDP
    has sharded weights in fp32 alone, which are the masters."""
    bytes_of = {name: one.weight_bytes + one.gradient_bytes + one.master_bytes + one.moment_bytes
                for name, one in ten.SOFTWARE.items()}
    assert (bytes_of["megatron-2021"], bytes_of["megatron-2022"]) == (20, 18)
    assert (bytes_of["llama3"], bytes_of["ours"], bytes_of["torchtitan"]) == (18, 18, 16)


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


def test_muon_has_one_moment_of_a_matrix(ten):
    model, layout = ten.gpt(4, 64, 4, vocab=256), ten.Layout()
    optimizer = lambda **more: ten.memory(model, layout, ten.Software(**more), 1)["optimizer"]
    matrices = model.layers * model.weights(1)
    assert optimizer(moment_bytes=4) - optimizer(moment_bytes=4, optimizer="muon") == 2 * matrices
