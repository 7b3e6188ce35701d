"""lab/formats.py: recipes for FP8, the playbook's table, and AdamW with small moments."""

import pytest
import torch

import common
from lab import formats


def test_the_sums_are_the_playbooks():
    assert [formats.bytes_of(recipe) for recipe in formats.RECIPES.values()] == [
        20, 16, 16, 9, 15, 10]
    assert len(list(formats.table_of_recipes())) == 7


def test_adamw_by_hand_is_pytorchs():
    models = [torch.nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    by_hand = formats.AdamW(models[0].parameters(), ("fp32", "fp32"))
    pytorchs = common.OPTIMIZERS["adamw"](models[1].parameters(), None)
    for step in range(4):
        for model, optimizer in zip(models, (by_hand, pytorchs)):
            model.zero_grad()
            model(torch.arange(5.0) - step).square().sum().backward()
            optimizer.step()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "off"), [("bf16", 2**-8), ("fp16", 2**-11), ("fp8", 2**-4)])
def test_what_is_stored_comes_back_rounded(name, off):
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)) + 4
    found = formats.loaded(formats.stored(x, name), x)
    assert found.shape == x.shape and 0 < ((found - x) / x).abs().max() <= off


def test_small_moments_train_as_well_and_their_bytes_are_counted():
    args = formats.settings(6)
    args.batch, args.model = 2, common.Config(1, 32, 4, 2, 16, 256)
    lines = list(formats.small_moments(args))[1:]
    assert len(lines) == 4 and all("✓" in line for line in lines)
    assert all(abs(float(line.split("✓")[0].split()[-1])) < 0.01 for line in lines)
    shapes = [p.shape for p in common.gpt(args.model).parameters()]
    numbers = args.model.parameters()
    assert formats.moment_bytes(shapes, "bf16") == 2 * numbers
    rows = sum(p.numel() // p.shape[-1] for p in common.gpt(args.model).parameters())
    assert formats.moment_bytes(shapes, "fp8") == numbers + 4 * rows  # no row is above 128
