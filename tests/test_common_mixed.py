"""common.py's masters, and what it computes again in backward."""

import dataclasses
import functools

import pytest
import torch
from torch import nn

import common
from common import Masters, gpt, loss_sum
from lab.run.meters import ActivationMeter
from tests.test_common import SHAPE

SGD = functools.partial(torch.optim.SGD, lr=1.0)

# ----------------------------------------------------------------------------------------- masters


def masters_of(*values):
    """A parameter for each value, of one number, and the optimizer of their masters."""
    parameters = [nn.Parameter(torch.tensor([value])) for value in values]
    return parameters, Masters(parameters, SGD, torch.bfloat16)


def test_small_updates_are_kept_by_masters_and_reach_the_parameters():
    """1 - 1/1024 isn't a bf16 number, and rounds to 1."""
    [p], optimizer = masters_of(1.0)
    for step in range(1, 9):
        p.grad = torch.full((1,), 1 / 1024)
        optimizer.step()
        assert p.master.item() == 1 - step / 1024
        assert p.item() == torch.tensor(1 - step / 1024).bfloat16().item()
    assert p.dtype == torch.bfloat16 and p.item() < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    """In bf16, 256 + 1 is 256."""
    [p], optimizer = masters_of(1.0)
    for slope in (256.0, 1.0, 1.0):
        (slope * p).sum().backward()
    assert p.grad.dtype == torch.float32 and p.grad.item() == 258
    optimizer.zero_grad()
    assert p.grad is None


def test_a_master_is_not_rounded_and_keeps_the_parameters_notes():
    p = nn.Parameter(torch.tensor([1 + 2**-20]))
    p.global_name, p.cuts = "name", ("a cut",)
    Masters([p], SGD, torch.bfloat16)
    assert p.item() == 1 and p.master.item() == 1 + 2**-20
    assert (p.master.global_name, p.master.cuts) == ("name", ("a cut",))


def test_a_parameter_without_a_gradient_stays_and_no_master_keeps_one():
    (used, unused), optimizer = masters_of(1.0, 2.0)
    used.grad = torch.ones(1)
    optimizer.step()
    assert (used.item(), unused.item()) == (0, 2)
    assert used.grad is not None and used.master.grad is None


def partial_gradients():
    """For a rank of two: the sum of 1/3 and nothing, of bf16 parameters with fp32 gradients."""
    [p], _ = masters_of(1.0)
    p.partial, p.global_name = torch.distributed.group.WORLD, "block1.norm1.weight"
    if p.partial.rank() == 0:
        p.grad = torch.tensor([1 / 3])
    common.PartialSums([p]).finish()
    return p.grad.dtype, p.grad.item()


def test_ranks_sum_gradients_in_float32(ranks):
    third = torch.tensor(1 / 3).item()
    assert ranks(2, 180)(partial_gradients) == 2 * [(torch.float32, third)]


# ------------------------------------------------------------------------------------- recomputing


def gradients(gated, how):
    """Of a step in float64, what is kept at the end of its forward, and how often a core ran."""
    model = gpt(dataclasses.replace(SHAPE, gated=gated), dtype=torch.float64)
    tokens = torch.arange(32).view(2, 16)
    meter, calls = ActivationMeter([tokens]), []
    for attn in (model.block1.attn, model.block2.attn):
        attn.core = lambda *inputs, core=attn.core: calls.append(1) or core(*inputs)
    common.recompute(model, how)
    with meter:
        loss = loss_sum(model(tokens), tokens)
    loss.backward()
    return [p.grad for p in model.parameters()], meter.most, len(calls)


@pytest.mark.parametrize("gated", [False, True], ids=["gpt", "llama"])
def test_recomputing_changes_no_gradient_and_keeps_less(gated):
    whole, kept, calls = gradients(gated, "none")
    scores, block_inputs = 8 * 2 * 2 * 4 * 16 * 16, 8 * 2 * 2 * 16 * 32  # bytes, of two blocks
    for how in ("selective", "full"):
        again, kept_then, calls_then = gradients(gated, how)
        assert all(map(torch.equal, whole, again))
        assert calls == 2 and calls_then == 4  # each core once more
        if how == "selective":
            assert kept - kept_then == scores
        else:
            assert block_inputs < kept_then < kept - scores
