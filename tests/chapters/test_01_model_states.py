"""Chapter 01's model states: mixed precision, masters, loss scales."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
from common import Config, gpt
from lab.run import anatomy
from lab.run.meters import nbytes
from lab.run.verify import tolerances
from tests.chapters.test_01_single_gpu import (
    ONE,
    ONE_SETTING,
    SMALL,
    batch_of,
    one,  # noqa: F401  (fixtures)
    plain_forward,
)
from tests.chapters.test_01_timeline import state_formula
from tests.conftest import sample


def masters_of(one, model, make_optimizer, *how):
    common.name_parameters(model)
    return one.MasterWeights(model, make_optimizer, *how)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32grad", "fp16"])
def test_model_state_bytes_equal_the_formula(one, precision):
    n = SMALL.parameters()
    tokens, targets, valid = batch_of(SMALL, 2)
    pieces = [(tokens, targets)]
    for optimizer in ("adamw", "sgd", "momentum"):
        model = gpt(SMALL)
        forward, parameters = plain_forward(one, model), list(model.parameters())
        make = functools.partial(common.OPTIMIZERS[optimizer], lr=None)
        masters = []
        if precision == "fp32":
            states = make(parameters)
            one.train_step(model, states, forward, pieces, valid, None)
        else:
            how = one.HALF[precision], precision == "bf16-fp32grad"
            mixed = one.MasterWeights(model, make, *how)
            one.mixed_step(mixed, None, forward, pieces, valid, None)
            masters, states = mixed.masters, mixed.optimizer
        gradients = [p.grad for p in (*parameters, *masters)]
        held = parameters, gradients, [masters, *states.state.values()]
        flags = f"--precision={precision}", f"--optimizer={optimizer}"
        formula, most = state_formula(one, SMALL, *flags)
        assert formula == [nbytes(tensors) for tensors in held], optimizer
        assert most == (4 if precision == "fp32" else 6) * n
        if optimizer == "adamw":  # the lesson's table, and AdamW's step counts
            per_parameter = 20 if precision == "bf16-fp32grad" else 16
            assert sum(formula) == per_parameter * n + 4 * len(parameters)


class Operators(TorchDispatchMode):
    """Counts those that compute: no view, no alias."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        aliases = func.is_view or name in ("aten::detach", "aten::_unsafe_view")
        self.count += func.namespace == "aten" and not aliases
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("precision", "most"), [("fp32", 990), ("bf16", 1130)])
def test_a_step_does_not_wait_for_its_operators(one, precision, most):
    """Each operator costs the host some microseconds, and a GPU that has finished waits for them.
    One AdamW for each parameter, or a table of cos and sin for each layer, would triple them."""
    model = gpt(Config(layers=12, dim=32, heads=4, kv_heads=2, seq=16, vocab=256))
    forward = plain_forward(one, model)
    make = functools.partial(common.OPTIMIZERS["adamw"], lr=None)
    step = functools.partial(one.train_step, model, make(model.parameters()))
    if precision == "bf16":
        masters = one.MasterWeights(model, make, torch.bfloat16)
        step = functools.partial(one.mixed_step, masters, None)
    tokens = torch.randint(256, (2, 16))
    step(forward, [(tokens, tokens)], 32, 1.0)
    with Operators() as operators:
        step(forward, [(tokens, tokens)], 32, 1.0)
    assert operators.count <= most


@pytest.mark.parametrize("fp32_grads", [False, True])
def test_frozen_and_unused_parameters_stay_as_they_are(one, fp32_grads):
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
    used, frozen, unused = model
    frozen.requires_grad_(False)
    still = [*frozen.parameters(), *unused.parameters()]
    before = [p.detach().clone() for p in still]
    make = functools.partial(torch.optim.AdamW, lr=0.1)  # its weight decay moves a zero gradient's
    masters = masters_of(one, model, make, torch.bfloat16, fp32_grads)
    for _ in range(2):
        masters.zero_grad()
        for _ in range(2):
            frozen(used(torch.ones(1, 3, dtype=torch.bfloat16))).sum().backward()
            masters.accumulate()
        masters.step(1.0)
    assert all(p.equal(old.bfloat16()) for p, old in zip(still, before))
    shown = dict(masters.named_masters())
    assert [name for name, p in shown.items() if p.grad is not None] == ["0.weight", "0.bias"]
    assert list(shown) == [name for name, _ in model.named_parameters()]


def test_gradients_are_unscaled_in_fp32(one):
    """2**-10 / 2**16 would vanish in float16, whose smallest number is 2**-24."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    masters = masters_of(one, model, lambda p: torch.optim.SGD(p, 1.0), torch.float16)
    model.weight.grad = torch.full((1, 1), 2.0**-10, dtype=torch.float16)
    masters.step(2.0**-16)
    assert masters.masters[0].item() == -(2.0**-26)


@pytest.mark.parametrize("clip", [None, 1e6, 1e-3])
def test_a_mixed_step_clips_as_a_plain_one(one, clip):
    """A limit above the norm does nothing, it never magnifies."""
    tokens, targets, valid = batch_of(SMALL, 2)
    pieces, sgd = [(tokens, targets)], functools.partial(torch.optim.SGD, lr=1.0)
    plain, mixed = gpt(SMALL), gpt(SMALL)
    before = plain.head.out.weight.detach().clone()
    one.train_step(plain, sgd(plain.parameters()), plain_forward(one, plain), pieces, valid, clip)
    masters = one.MasterWeights(mixed, sgd, torch.bfloat16)
    scale = one.LossScale(1024.0)
    one.mixed_step(masters, scale, plain_forward(one, mixed), pieces, valid, clip)
    of_mixed = dict(masters.named_masters())["head.out.weight"]
    moves = [(p - before).norm().item() for p in (plain.head.out.weight, of_mixed)]
    assert moves[0] > 0 and moves[1] == pytest.approx(moves[0], rel=0.02)


def test_the_loss_scale_doubles_after_each_run_of_good_steps(one):
    scale, values = one.LossScale(8.0, patience=2), []
    for overflow in (False, False, False, True, False, False, False, False):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [8, 16, 16, 8, 8, 16, 16, 32]


def test_fp32_gradients_add_up_what_16_bits_would_lose(one):
    """bf16 has 8 bits: 256 + 1 is 256. Sixteen micro-batches of small gradients must not vanish."""
    sums = {}
    for fp32_grads in (False, True):
        model = torch.nn.Linear(1, 1, bias=False)
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        masters = masters_of(one, model, sgd, torch.bfloat16, fp32_grads)
        masters.zero_grad()
        for x in [256.0] + [1.0] * 16:
            model(torch.full((1, 1), x, dtype=torch.bfloat16)).backward()
            masters.accumulate()
        sums[fp32_grads] = masters.norm().item()
    assert sums == {False: 256, True: 272}


@pytest.mark.parametrize(("precision", "variant", "optimizer"), sample([
    ("bf16-fp32grad", "hand", "sgd"),
    ("fp16", "torch", "adamw"),
    ("fp16", "hand", "sgd"),
    ("bf16", "hand", "adamw"),
    ("bf16", "torch", "sgd"),
], size=2))  # fmt: skip
def test_16_bits_train_like_32(run_chapter, tmp_path, precision, variant, optimizer):
    flags = "--steps=5", "--micro-batch=2", "--clip=1", "--json=run.json"
    how = f"--precision={precision}", f"--variant={variant}", f"--optimizer={optimizer}"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *flags, *how)
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and len(run["reference_loss"]) == 5, output
    assert run["max_loss_diff"] < 5e-3 and run["max_grad_diff"] > 1e-4  # the 16 bits are at work
    states = "parameters", "gradients", "optimizer states", "gradients, at the most"
    assert [(c["name"], c["ok"]) for c in run["checks"][:4]] == [(name, True) for name in states]
    [kept] = [c for c in run["checks"] if c["name"].startswith("kept")]
    assert kept["ok"] is (True if variant == "hand" else None)  # autocast keeps several widths
    in_fp32 = anatomy.activation_bytes(replace(SMALL, layers=1), 2, 4, {})
    assert kept["measured"] != in_fp32
    dtype = {"b": "bfloat16", "f": "float16"}[precision[0]]
    assert run["tolerance"] == tolerances(dtype, optimizer)


@pytest.mark.parametrize("variant", sample(["hand", "torch"]))
def test_a_skipped_step_is_no_mismatch(run_chapter, tmp_path, variant):
    """Neither run takes it: what comes after is compared. JSON knows no infinity."""
    flags = (*ONE_SETTING, "--precision=fp16", f"--variant={variant}", "--json=run.json")
    status, output, _ = run_chapter(ONE, *flags, "--steps=9", f"--loss-scale={2.0**18}")
    run = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    skipped = [norm is None for norm in run["grad_norm"]]
    assert skipped[0] and 1 <= sum(skipped) <= 9
    compared = len(run["reference_loss"])
    assert [loss is None for loss in run["reference_loss"]] == skipped[:compared]
    assert compared - sum(skipped[:compared]) == 5
    assert status == 0 and f"{sum(skipped)} steps skipped" in output, output
    all_skipped = *flags, "--steps=1", f"--loss-scale={2.0**30}"
    assert run_chapter(ONE, *all_skipped)[0] == 1  # nothing was compared
    assert run_chapter(ONE, *all_skipped, "--no-verify")[0] == 0  # and nothing was to be
