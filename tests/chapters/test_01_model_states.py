"""Chapter 01's model states: mixed precision, masters, loss scales."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
from common import Config, gpt
from lab.bench import anatomy
from lab.bench.meters import nbytes
from lab.bench.verify import tolerances
from tests.chapters.test_01_single_gpu import (
    ONE,
    ONE_SETTING,
    SMALL,
    batch_of,
    one,  # noqa: F401  (fixtures)
    plain_forward,
)
from tests.chapters.test_01_timeline import state_formula
from tests.conftest import chapter


def masters_of(one, model, make_optimizer, *how):
    common.name_parameters(model)
    return one.MasterWeights(model, make_optimizer, *how)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-fp32grad", "fp16"])
@pytest.mark.parametrize("tie", [False, True])
def test_model_state_bytes_equal_the_formula(one, precision, optimizer, tie):
    cfg = Config(2, 32, 4, 2, 16, 256, tie)
    tokens, targets, valid = batch_of(cfg, 2)
    model = gpt(cfg)
    forward, pieces = plain_forward(one, model), [(tokens, targets)]
    make = lambda p: common.OPTIMIZERS[optimizer](p, None)
    if precision == "fp32":
        states = make(model.parameters())
        one.train_step(model, states, forward, pieces, valid, None)
        masters = []
    else:
        mixed = one.MasterWeights(model, make, one.HALF[precision], precision == "bf16-fp32grad")
        one.mixed_step(mixed, None, forward, pieces, valid, None)
        masters, states = mixed.masters, mixed.optimizer
    parameters = list(model.parameters())
    gradients = [p.grad for p in (*parameters, *masters)]
    held = parameters, gradients, [masters, *states.state.values()]
    flags = f"--precision={precision}", f"--optimizer={optimizer}"
    formula, most = state_formula(one, cfg, *flags)
    assert formula == [nbytes(tensors) for tensors in held]
    n = cfg.parameters()
    assert most == (4 if precision == "fp32" else 6) * n
    tensors = len(list(model.parameters()))
    sums = {"fp32": 16, "bf16": 16, "bf16-fp32grad": 20, "fp16": 16}
    if optimizer == "adamw":  # the lesson's table, and AdamW's step counts
        assert sum(formula) == sums[precision] * n + 4 * tensors


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
    """Each costs the host some microseconds, in which a GPU that has finished waits. One AdamW for
    each of the 123 parameters, and tables of cos and sin for each layer, would triple them."""
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


def test_master_weights_keep_what_16_bits_would_lose(one):
    """An update of 1/1000 of a weight rounds away in bf16; its master adds them up."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    masters = masters_of(one, model, lambda p: torch.optim.SGD(p, 1e-3), torch.bfloat16)
    for _ in range(10):
        model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
        masters.step(1.0)
    assert masters.masters[0].item() == pytest.approx(0.99, rel=1e-6)
    assert model.weight.dtype == torch.bfloat16 and model.weight.item() == pytest.approx(
        0.99, rel=4e-3
    )
    assert (torch.tensor(1.0, dtype=torch.bfloat16) - 1e-3).item() == 1


def test_masters_start_exact_and_are_what_is_compared(one):
    model = gpt(SMALL)
    exact = [p.detach().clone() for p in model.parameters()]
    masters = one.MasterWeights(model, lambda p: torch.optim.SGD(p, 0.1), torch.bfloat16)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for (_, shown), p, weight in zip(masters.named_masters(), model.parameters(), exact):
        assert shown.equal(weight) and p.dtype == torch.bfloat16


@pytest.mark.parametrize("fp32_grads", [False, True])
def test_frozen_and_unused_parameters_stay_as_they_are(one, fp32_grads):
    model = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
    used, frozen, unused = model
    frozen.requires_grad_(False)
    before = [p.detach().clone() for p in (*frozen.parameters(), *unused.parameters())]
    make = lambda p: torch.optim.AdamW(
        p, 0.1
    )  # its weight decay would move what has a zero gradient
    masters = masters_of(one, model, make, torch.bfloat16, fp32_grads)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for _ in range(2):
        masters.zero_grad()
        for _ in range(2):
            frozen(used(torch.ones(1, 3, dtype=torch.bfloat16))).sum().backward()
            masters.accumulate()
        masters.step(1.0)
    after = [*frozen.parameters(), *unused.parameters()]
    assert all(p.equal(old.bfloat16()) for p, old in zip(after, before))
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
    """Above the norm the limit does nothing: it must never magnify."""
    tokens, targets, valid = batch_of(SMALL, 2)
    pieces, moves = [(tokens, targets)], []
    for mixed in (False, True):
        model = gpt(SMALL)
        before, sgd = model.head.out.weight.detach().clone(), lambda p: torch.optim.SGD(p, 1.0)
        forward = plain_forward(one, model)
        if mixed:
            masters = one.MasterWeights(model, sgd, torch.bfloat16)
            one.mixed_step(masters, one.LossScale(1024.0), forward, pieces, valid, clip)
            moved = dict(masters.named_masters())["head.out.weight"]
        else:
            one.train_step(model, sgd(model.parameters()), forward, pieces, valid, clip)
            moved = model.head.out.weight
        moves.append((moved - before).norm().item())
    assert moves[0] > 0 and moves[1] == pytest.approx(moves[0], rel=0.02)


@pytest.mark.parametrize("fp32_grads", [False, True])
def test_every_step_begins_without_gradients(one, fp32_grads):
    tokens, targets, valid = batch_of(SMALL, 2)
    model = gpt(SMALL)
    standing = lambda p: torch.optim.SGD(p, 0.0)
    masters = one.MasterWeights(model, standing, torch.bfloat16, fp32_grads)
    forward = plain_forward(one, model)
    norms = [
        one.mixed_step(masters, None, forward, [(tokens, targets)], valid, None)[1].item()
        for _ in range(3)
    ]
    assert norms[0] > 0 and norms == [norms[0]] * 3


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
        masters = masters_of(
            one, model, lambda p: torch.optim.SGD(p, 1.0), torch.bfloat16, fp32_grads
        )
        masters.zero_grad()
        for x in [256.0] + [1.0] * 16:
            model(torch.full((1, 1), x, dtype=torch.bfloat16)).backward()
            masters.accumulate()
        sums[fp32_grads] = masters.norm().item()
    assert sums == {False: 256, True: 272}


@pytest.mark.parametrize(
    ("precision", "variant", "optimizer"),
    [
        ("bf16", "hand", "adamw"),
        ("bf16-fp32grad", "hand", "sgd"),
        ("fp16", "hand", "sgd"),
        ("bf16", "torch", "sgd"),
        ("fp16", "torch", "adamw"),
    ],
)
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
    assert ("loss scale 65536 in the end; 0 steps skipped" in output) == (precision == "fp16")
    dtype = {"b": "bfloat16", "f": "float16"}[precision[0]]
    assert run["tolerance"] == tolerances(dtype, optimizer)
    assert f"tolerances for {dtype}: loss" in output


@pytest.mark.parametrize("variant", ["hand", "torch"])
def test_a_skipped_step_is_no_mismatch(run_chapter, tmp_path, variant):
    """Neither run takes it: what comes after is compared. JSON knows no infinity."""
    flags = (*ONE_SETTING, "--precision=fp16", f"--variant={variant}", "--json=run.json")
    status, output, _ = run_chapter(ONE, *flags, "--steps=9", f"--loss-scale={2.0**18}")
    run = json.loads((tmp_path / "run.json").read_text(), parse_constant=pytest.fail)
    skipped = [norm is None for norm in run["grad_norm"]]
    assert skipped[0] and 1 <= sum(skipped) <= 9
    assert output.count("skipped\n") >= min(sum(skipped), 5)
    compared = len(run["reference_loss"])
    assert [loss is None for loss in run["reference_loss"]] == skipped[:compared]
    assert compared - sum(skipped[:compared]) == 5
    assert status == 0 and "same as one GPU over 5 steps" in output, output

    assert f"; {sum(skipped)} steps skipped" in output
    status, output, _ = run_chapter(ONE, *flags, "--steps=1", f"--loss-scale={2.0**30}")
    assert status == 1 and "no step was compared with one GPU: all were skipped" in output


def test_without_one_gpu_beside_it_a_run_of_skipped_steps_is_no_mismatch(run_chapter, tmp_path):
    flags = "--precision=fp16", "--steps=1", f"--loss-scale={2.0**30}", "--no-verify"
    assert run_chapter(ONE, *ONE_SETTING, *flags, "--json=run.json")[0] == 0
    assert json.loads((tmp_path / "run.json").read_text())["reference_loss"] == []


def test_16_bit_runs_are_held_to_fp32(run_chapter, monkeypatch):
    """Masters that never reach the parameters, or a forgotten unscaling, are caught."""
    module = chapter(ONE)
    step = module.MasterWeights.step
    flags = (*ONE_SETTING, "--steps=1", "--precision=bf16", "--optimizer=sgd")
    monkeypatch.setattr(module.MasterWeights, "step", lambda self, factor: step(self, factor * 2))
    status, output, _ = run_chapter(ONE, *flags)
    assert status == 1 and "✗ gradients" in output
    monkeypatch.setattr(
        module.MasterWeights, "step", lambda self, factor: setattr(self, "factor", factor)
    )
    status, output, _ = run_chapter(ONE, *flags, "--lr=1")
    assert status == 1 and "✗ parameters" in output


def test_a_forced_overflow_skips_the_step_and_halves_the_scale(one):
    tokens, targets, valid = batch_of(SMALL, 2)
    model = gpt(SMALL)
    masters = one.MasterWeights(model, lambda p: torch.optim.SGD(p, 0.1), torch.float16)
    scale = one.LossScale(2.0**40, patience=3)
    scales, moved = [], []
    for _ in range(40):
        before = model.head.out.weight.clone()
        _, norm = one.mixed_step(
            masters, scale, plain_forward(one, model), [(tokens, targets)], valid, 1.0
        )
        moved.append(not before.equal(model.head.out.weight))
        assert moved[-1] == norm.isfinite().item()
        scales.append(scale.value)
    skipped = moved.index(True)
    assert skipped > 3 and scales[:skipped] == [2.0 ** (39 - i) for i in range(skipped)]
    assert all(moved[skipped : skipped + 3])  # the scale is right: three good steps ...
    assert scales[skipped + 2] == 2 * scales[skipped]  # ... double it


def test_the_loss_scale_divides_out(one):
    tokens, targets, valid = batch_of(SMALL, 4)
    norms = []
    for scale in (None, one.LossScale(256.0), one.LossScale(4096.0)):
        model = gpt(SMALL)
        masters = one.MasterWeights(model, lambda p: torch.optim.SGD(p, 0.1), torch.float16)
        forward = plain_forward(one, model)
        _, norm = one.mixed_step(
            masters, scale, forward, list(zip(tokens.split(2), targets.split(2))), valid, None
        )
        norms.append(norm.item())
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-2)
