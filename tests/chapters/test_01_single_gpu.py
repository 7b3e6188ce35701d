"""Chapter 01: the step, mixed precision, recomputation, FLOPs, and what a run says of them."""

import functools
import importlib
import itertools
import json
import math
import re
import statistics
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

import common
from common import Config, gpt, loss_sum
from lab.bench import anatomy
from lab.bench import formulas as instruments
from lab.bench.machines import PEAK_FLOPS
from lab.bench.meters import ActivationMeter, FlopMeter, nbytes
from lab.bench.verify import tolerances
from lab.cli.words import printable
from tests.conftest import TEXT, chapter, needs_triton

ONE = "01_single_gpu"
SMALL = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)
FLAGS = (
    "--layers=1",
    "--dim=32",
    "--heads=4",
    "--kv-heads=2",
    "--seq=16",
    f"--data={TEXT}",
    "--device=cpu",
)
# Of the settings of attention and recomputation, the tiny preset tries all, and others the run's.
ONE_SETTING = (*FLAGS, "--preset=1b", "--vocab=256", "--attention=plain", "--verify")
SHAPES = [SMALL, Config(3, 48, 4, 4, 20, 100), Config(1, 48, 8, 1, 24, 300, tie=True)]
SMALLEST = [  # one head; one token; two numbers a head
    Config(1, 16, 1, 1, 8, 50),
    Config(1, 16, 2, 1, 1, 50),
    Config(1, 16, 8, 8, 8, 50),
]
ALL_SIX = list(itertools.product(("plain", "sdpa"), ("none", "selective", "full")))


@pytest.fixture(scope="module")
def one():
    return chapter(ONE)


def batch_of(cfg, sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(cfg.vocab, (2, sequences, cfg.seq), generator=generator)
    targets[
        torch.rand(targets.shape, generator=generator)
        < torch.rand(sequences, 1, generator=generator)
    ] = -100
    return tokens, targets, int((targets != -100).sum())


def plain_forward(one, model, attention="plain", recompute="none"):
    one.choose_core(model, attention, recompute)
    return functools.partial(one.logits_of, model, recompute=recompute)


def masters_of(one, model, make_optimizer, *how):
    common.name_parameters(model)
    return one.MasterWeights(model, make_optimizer, *how)


def formulas(one, cfg, *flags):
    """The arguments of a run, and the chapter's formulas of it."""
    args = common.parse(one.__file__, "", one.VARIANTS, one.flags, flags)
    one.requires(args, 1)
    args.model = cfg
    return args, one.formulas(args, 0, 1, gpt(cfg))


def state_formula(one, cfg, *flags):
    """Bytes of parameters, gradients and optimizer states, and of gradients at the most."""
    args, answer = formulas(one, cfg, *flags)
    return list(anatomy.state_bytes(args, answer, 4).values()), answer["most gradients"]


# ------------------------------------------------------------------------------- 1. the step


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 6])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_gradients_are_the_full_batchs(one, micro_batch, clip):
    tokens, targets, valid = batch_of(SMALL, 6)
    counts = {int((t != -100).sum()) for t in targets.split(micro_batch)}
    assert micro_batch == 6 or len(counts) > 1  # micro-batches of unequal valid counts
    results = []
    for size in (micro_batch, 6):
        model = gpt(SMALL, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        pieces = list(zip(tokens.split(size), targets.split(size)))
        loss, norm = one.train_step(
            model, optimizer, plain_forward(one, model), pieces, valid, clip
        )
        results.append([loss, norm, *(p.grad for p in model.parameters()), *model.parameters()])
    for accumulated, full in zip(*results):
        assert (accumulated - full).abs().max() <= 1e-12 * full.abs().max()
    expected = loss_sum(gpt(SMALL, dtype=torch.float64)(tokens), targets) / valid
    assert results[0][0].item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("flags", [
    "--micro-batch=1 --ignore=0.6 --optimizer=momentum --clip=0.2 --lr=0.01 --batch=5 --dim=36 "
    "--heads=3 --kv-heads=1 --seq=17 --vocab=263 --layers=3",  # nothing divides
    "--micro-batch=4 --optimizer=sgd --recompute=selective --kv-heads=4",
    "--micro-batch=4 --preset=gpt2 --attention=sdpa --recompute=full",  # tied
    "--micro-batch=2 --variant=torch --clip=0.2",
])  # fmt: skip
def test_every_way_is_the_same_as_the_plain_step(run_chapter, tmp_path, flags):
    status, output, _ = run_chapter(
        ONE, *ONE_SETTING, "--steps=5", "--dtype=float64", "--json=run.json", *flags.split()
    )
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and len(run["reference_loss"]) == 5, output
    assert max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-10
    assert run["comm"] == {} and all(check["ok"] is not False for check in run["checks"])


def test_a_mean_of_micro_batch_means_is_caught(run_chapter, monkeypatch):
    """The silent bug that the lesson warns of; the chapter's own check must not let it through."""
    module = chapter(ONE)

    def local_mean(logits, targets):
        return loss_sum(logits, targets) / (targets != -100).sum() * local_mean.valid / 4

    local_mean.valid = 1
    right = module.train_step

    def wrong(model, optimizer, forward, micro_batches, valid, clip):
        local_mean.valid = valid
        return right(model, optimizer, forward, micro_batches, valid, clip)

    monkeypatch.setattr(module, "loss_sum", local_mean)
    monkeypatch.setattr(module, "train_step", wrong)
    status, output, _ = run_chapter(
        ONE, *ONE_SETTING, "--steps=1", "--dtype=float64", "--micro-batch=2", "--ignore=0.5"
    )
    assert status == 1 and "NOT the same as one GPU" in output


# ------------------------------------------------------------------------------- 2. model states


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


# ------------------------------------------------------------------------------- 3. activations


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("cfg", [*SHAPES, *SMALLEST], ids=lambda cfg: f"{cfg.kv_heads}kv")
def test_activation_bytes_equal_the_formula(one, cfg, dtype):
    """The chapter's table, by itself and as shares of lab/bench/anatomy.py's."""
    model, e = gpt(cfg, dtype=dtype), dtype.itemsize
    tokens, targets, _ = batch_of(cfg, 3)
    for attention, recompute in ALL_SIX:
        forward = plain_forward(one, model, attention, recompute)
        meter = ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
        with meter:
            loss = loss_sum(forward(tokens), targets)  # noqa: F841 (it keeps what it needs)
        chosen = replace(cfg, attention=attention)
        formula = anatomy.activation_bytes(chosen, 3, e, one.KEPT[recompute])
        assert meter.bytes == formula, (attention, recompute)
        if (attention, recompute) == ("plain", "none"):
            block, around = one.kept_for_backward(cfg, 3)
            width = {"logits": max(e, 4), "ids": 0}
            table = [*cfg.layers * block, *around]
            assert meter.bytes == sum(n * width.get(kind, e) for _, n, kind in table)


@pytest.mark.parametrize("cfg", SHAPES, ids=lambda cfg: f"{cfg.kv_heads}kv")
def test_the_table_and_lab_agree_on_every_class(one, cfg):
    """What is missing where a rank keeps nothing of a class. (Tokens are int64, and e is 8.)"""
    tables = one.kept_for_backward(cfg, 3)
    classes = {kind for table in tables for *_, kind in table}
    all_kept = dict.fromkeys(classes, 1)
    kept = lambda shares: anatomy.kept_by_modules(cfg, 3, 8, shares)
    for kind in classes - {"positions"}:
        of_block, of_around = (8 * sum(n for _, n, k in table if k == kind) for table in tables)
        first, block, *_, last = kept(all_kept)
        first_without, block_without, *_, last_without = kept(all_kept | {kind: 0})
        assert block - block_without == of_block
        scalar = 8 if kind == "logits" else 0  # of the loss: not cut with them
        assert first + last - first_without - last_without == of_around - scalar
    assert anatomy.shared_bytes(cfg, 8, {}) == 8 * tables[1][0][1]  # positions


def test_the_block_of_the_lesson(one):
    """Its bytes by its numbers, which are those of the formula, class by class."""
    sums = r"(\d+) · (\d+) \+ (\d+) · (\d+) \+ (\d+) \+ (\d+) = (\d+) numbers, ([\d,]+) bytes"
    *terms, numbers, size = (int(number.replace(",", ""))
                             for number in re.search(sums, one.__doc__).groups())  # fmt: skip
    cfg = Config(layers=1, dim=8, heads=2, kv_heads=1, seq=4, vocab=16)
    assert "With 4 tokens, dim 8, 2 heads and 1 kv head" in one.__doc__
    block, _ = one.kept_for_backward(cfg, 1)
    of = {kind: sum(n for _, n, k in block if k == kind) for *_, kind in block}
    x, statistics = 4 * 8, 2 * 2 * 4
    assert terms == [14, x, 2, of["keys and values"] // 2, of["core"], statistics]
    assert of["outside"] + of["inputs"] + of["inside"] == 14 * x + statistics
    assert numbers == sum(of.values()) and size == 4 * numbers
    for kind in {kind for table in one.kept_for_backward(cfg, 1) for *_, kind in table}:
        assert f"\n        {kind}  " in one.kept_for_backward.__doc__  # each has its line


@pytest.mark.parametrize("cfg", [*SHAPES, *common.PRESETS.values()])
def test_the_textbook_formula_differs_for_the_reasons_given(one, cfg):
    block = 2 * sum(numbers for _, numbers, _ in one.kept_for_backward(cfg, 4)[0])
    assert one.textbook_activation_bytes(cfg, 4) == block + sum(
        one.textbook_difference(cfg, 4).values()
    )
    on_cuda = one.textbook_difference(cfg, 4, statistic=4)  # two norms' two numbers, in float32
    on_cpu = one.textbook_difference(cfg, 4)
    assert sum(on_cuda.values()) == sum(on_cpu.values()) - 2 * 2 * 2 * 4 * cfg.seq
    for device, more in (("cpu", 0), ("cuda", 2 * 2 * 2 * 4 * cfg.seq)) if cfg in SHAPES else ():
        args, _ = formulas(one, cfg, "--batch=4")  # which makes a model
        said, *_ = one.explanations(args, device)
        assert said.startswith(f"a block in 16 bits keeps {(block + more) / 1e6:.3f} MB; ")
    s, b, h, a = cfg.seq, 4, cfg.dim, cfg.heads
    assert one.textbook_activation_bytes(cfg, 4) == s * b * h * (34 + 5 * a * s / h)


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_gradients_are_bit_for_bit_the_same_whatever_is_recomputed(one, attention):
    tokens, targets, valid = batch_of(SMALL, 4)
    gradients = []
    for recompute in ("none", "selective", "full"):
        model = gpt(SMALL)
        (
            loss_sum(plain_forward(one, model, attention, recompute)(tokens), targets) / valid
        ).backward()
        gradients.append([p.grad for p in model.parameters()])
    for none, selective, full in zip(*gradients):
        assert none.equal(selective) and none.equal(full)


# ------------------------------------------------------------------------------- 4. FLOPs


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("cfg", SHAPES, ids=lambda cfg: f"{cfg.kv_heads}kv")
def test_flops_equal_the_formula(one, cfg, early_stop):
    model = gpt(cfg)
    tokens, targets, _ = batch_of(cfg, 3)
    for attention, recompute in ALL_SIX:
        forward = plain_forward(one, model, attention, recompute)
        with set_checkpoint_early_stop(early_stop), FlopMeter() as meter:
            loss_sum(forward(tokens), targets).backward()
        formula = one.step_flops(cfg, 3, attention, recompute, early_stop)
        assert meter.all == formula, (attention, recompute)


def test_model_flops_and_the_rule_of_thumb(one):
    cfg = common.PRESETS["gpt2"]
    needed = one.model_flops(cfg, 4)
    assert (
        needed == one.step_flops(cfg, 4, "plain", "none") < one.step_flops(cfg, 4, "sdpa", "none")
    )
    assert one.rule_of_thumb(cfg, 4) == 6 * cfg.parameters() * 4 * 1024
    assert 0.85 < one.rule_of_thumb(cfg, 4) / needed < 1
    _, answer = formulas(one, SMALL, "--batch=4", "--recompute=full", "--attention=sdpa")
    assert answer["utilization"] == {
        "mfu": one.model_flops(SMALL, 4), "hfu": one.step_flops(SMALL, 4, "sdpa", "full", True)
    }  # fmt: skip
    rates = {name.split()[1][:4]: rate for name, rate in PEAK_FLOPS.items()}
    assert rates == {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}


def test_what_the_lesson_says_of_flops(one):
    cfg = common.PRESETS["7b"]
    step = one.step_flops(cfg, 1, "plain", "none")
    assert one.step_flops(cfg, 1, "plain", "full") / step == pytest.approx(4 / 3, abs=0.02)
    assert one.step_flops(cfg, 1, "plain", "selective") / step < 1.05
    assert one.step_flops(cfg, 1, "plain", "full", True) < one.step_flops(cfg, 1, "plain", "full")
    # MFU is needed / (seconds · peak), HFU computed / (seconds · peak); at the hardware's own pace
    # seconds are as the FLOPs that are computed: HFU stays, and MFU falls to 3/4.
    assert step / one.step_flops(cfg, 1, "plain", "full") == pytest.approx(3 / 4, abs=0.01)
    tokens, embedding = cfg.seq, cfg.vocab * cfg.dim
    in_matmuls = cfg.parameters() - embedding - (4 * cfg.layers + 2) * cfg.dim
    assert step == 6 * in_matmuls * tokens + 12 * cfg.layers * cfg.dim * cfg.seq * tokens


# ------------------------------------------------------------------------------- 5. the timeline


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("bf16-fp32grad", 2)])
def test_memory_over_the_first_steps(one, run_chapter, tmp_path, precision, width):
    """What the lesson draws: gradients come and go, states come once, activations peak."""
    flags = "--layers=2", "--batch=4", "--steps=4", "--no-verify", f"--precision={precision}"
    assert run_chapter(ONE, *ONE_SETTING, *flags, "--json=run.json")[0] == 0
    memory = json.loads((tmp_path / "run.json").read_text())["recorded"]["memory"]
    seconds, parameters, gradients, states, others = memory
    formula, most = state_formula(one, SMALL, f"--precision={precision}")
    kept = anatomy.activation_bytes(SMALL, 4, width, {})
    adamw = 8 * SMALL.parameters() + 4 * anatomy.tensors(SMALL)

    begins = [i for i in range(1, len(seconds)) if gradients[i] == 0 < gradients[i - 1]]
    assert len(begins) == 2 and seconds == sorted(seconds)  # of three steps
    assert set(parameters) == {formula[0]} and max(gradients) == most
    for begin, end in zip([0, *begins], [*begins, len(seconds)]):
        assert gradients[begin] == 0 and gradients[end - 1] == formula[1]
        assert kept < max(others[begin:end]) < (1.5 if precision == "fp32" else 2) * kept
        assert others[end - 1] < 0.02 * kept  # all activations are gone again
    assert states[0] == formula[2] - adamw
    assert set(states[begins[0] :]) == {formula[2]}


def test_trace_and_sample_are_written(run_chapter, tmp_path):
    status, output, _ = run_chapter(ONE, *FLAGS, "--steps=3", "--profile=b/trace.json")
    assert status == 0
    events = json.loads((tmp_path / "b/trace.json").read_text())["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event["name"] for event in events}
    written = output.split("what it writes by now:\n")[1].splitlines()
    assert sum(map(len, written[:-1])) > 50 and "same as one GPU" in written[-1]  # verdict is last


def written_by(one, model, prompt, length):
    seq = len(model[1].attn.rope.positions)
    return instruments.sample(plain_forward(one, model), prompt, seq, length=length)


def test_the_sample_follows_the_model(one):
    model = gpt(SMALL)
    for p in model.parameters():
        p.data.zero_()
    model.embedding.weight.data[:, 0] = 1
    model.head.norm.weight.data.fill_(1)
    model.head.out.weight.data[ord("a"), 0] = 1000.0  # nothing but "a" is likely
    assert bytes(written_by(one, model, b"xy", 30)) == b"xy" + 30 * b"a"
    assert printable([65, 10, 27, 7, 200, 9, 50000, 126]) == "A\n·····~"


def test_the_sample_reads_what_it_has_written(one):
    """A model that counts: after more than seq tokens it still goes on from the last one."""
    model = gpt(Config(1, 32, 4, 2, 8, 32))
    for p in model.parameters():
        p.data.zero_()
    model.head.norm.weight.data.fill_(1)
    model.embedding.weight.data.copy_(torch.eye(32))
    model.head.out.weight.data.copy_(1000 * torch.eye(32).roll(1, 0))
    assert written_by(one, model, [3, 4, 5], 20) == list(range(3, 26))


def test_the_sample_has_its_temperature(one):
    """Of two tokens, odds of 3^0.7 to 1 become 3 to 1 at temperature 0.7."""
    model = gpt(Config(1, 32, 4, 2, 8, 2))
    for p in model.parameters():
        p.data.zero_()
    model.embedding.weight.data[:, 0] = 1.0
    model.head.norm.weight.data.fill_(1)
    at_head = nn.functional.layer_norm(model.embedding.weight[0], (32,))[0]
    model.head.out.weight.data[0, 0] = 0.7 * math.log(3) / at_head.item()
    written = written_by(one, model, [0], 800)[1:]
    assert written.count(0) / 800 == pytest.approx(0.75, abs=0.05)


def test_no_sample_without_numbers(run_chapter, tmp_path):
    """A run that diverged, a vocabulary below 256, tokens that are no bytes: all end well."""
    diverges = "--steps=6", "--optimizer=sgd", "--lr=1e9", "--no-verify", "--json=run.json"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *diverges)
    assert status == 1 and "what it writes" not in output
    assert json.loads((tmp_path / "run.json").read_text())["loss"][-1] is None
    overflows = "--steps=1", "--optimizer=sgd", "--lr=2e9"  # at the end, not before
    assert "same as one GPU" in run_chapter(ONE, *ONE_SETTING, *overflows)[1]
    (tmp_path / "low.txt").write_bytes(bytes(range(100)) * 3)
    flags = (*ONE_SETTING, "--steps=1", "--data=low.txt", "--vocab=100")
    assert "what it writes" in run_chapter(ONE, *flags)[1]
    (tmp_path / "text.bin").write_bytes(bytes(1000))
    flags = (*ONE_SETTING, "--steps=1", "--data=text.bin")
    assert "what it writes" not in run_chapter(ONE, *flags)[1]


@pytest.mark.parametrize("works", [True, False])
def test_compile_where_it_works(run_chapter, monkeypatch, works):
    """With a stand-in for the compiler, which takes long: what happens around it is tested."""
    calls = []

    def compile(function):
        def fast(tokens):
            calls.append(torch._C._len_torch_dispatch_stack())
            if not works:
                raise RuntimeError("no C++ compiler\nmore lines")
            return function(tokens)

        return fast

    monkeypatch.setattr(torch, "compile", compile)
    status, output, _ = run_chapter(ONE, *ONE_SETTING, "--steps=5", "--compile")
    assert status == 0 and calls == (
        [0] * 3 if works else [0]
    )  # a trial, the steps after the third
    refusal = "  --compile does not work here, so eager it is: no C++ compiler\n"
    assert output.count(refusal) == (0 if works else 1)


# ------------------------------------------------------------------------------- our kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU takes the kernels")
def test_without_a_gpu_the_kernels_are_pytorchs(run_chapter, monkeypatch):
    for name in ("flash_attention", "layernorm"):  # to be interpreted, for other tests
        importlib.import_module(f"kernels.{name}")
    monkeypatch.delenv("TRITON_INTERPRET")
    fits = "--kernels", "--dim=32", "--heads=2"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *fits, "--steps=1")
    assert status == 0 and output.count("  --kernels: no GPU, or no Triton, for them here; ") == 1
    status, _, errors = run_chapter(ONE, *FLAGS, "--kernels", "--dtype=float64")
    assert status == 2 and errors.startswith("error: --kernels compute in float32")
    status, _, errors = run_chapter(ONE, *FLAGS, "--kernels", "--dim=64", "--heads=8")
    assert status == 2 and "not 64 in 8 heads of 8; --dim 128 --heads 4 would" in errors


def test_a_run_with_our_kernels(run_chapter, monkeypatch):
    """From end to end, on a GPU or in Triton's interpreter (where what they keep must be what the
    formula says): they train as one GPU does without them."""
    needs_triton()
    monkeypatch.setattr(chapter(ONE), "CORES", dict(chapter(ONE).CORES))
    monkeypatch.setattr(instruments, "sample", lambda *args: [65])
    fits = "--kernels", "--dim=32", "--heads=2", "--kv-heads=1", "--batch=2"
    status, output, _ = run_chapter(ONE, *FLAGS, *fits, "--steps=1")
    assert status == 0 and "triton attention" in output and "no GPU" not in output.split("\n", 1)[1]
    assert "kept per micro-batch: triton, none" in output and "computed: triton" not in output


def test_flops_of_our_kernels_are_two_matmuls_more_than_a_fused_cores(one):
    """test_kernels.py counts the matmuls of the kernels: 7 backward, where others have 5."""
    cfg = Config(layers=3, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    sdpa, triton = (one.step_flops(cfg, 5, core, "none") for core in ("sdpa", "triton"))
    assert triton - sdpa == 3 * 2 * (2 * 5 * 16 * 16 * 32)


def test_the_model_with_our_kernels(one, monkeypatch):
    needs_triton()
    monkeypatch.setattr(one, "CORES", dict(one.CORES))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cfg = Config(layers=1, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    plain, fused = gpt(cfg, device=device), gpt(cfg, device=device)
    kernels, calls = importlib.import_module("kernels.layernorm"), []
    layer_norm = kernels.layer_norm
    counted = lambda *args, **more: calls.append(1) or layer_norm(*args, **more)
    monkeypatch.setattr(kernels, "layer_norm", counted)
    one.use_kernels(fused)
    tokens = torch.arange(32, device=device).view(2, 16)
    for model, core in ((plain, "plain"), (fused, "triton")):
        loss_sum(plain_forward(one, model, core)(tokens), tokens).backward()
    assert len(calls) == 3  # two in the block, and the last
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in fused.named_parameters()]
    for p, q in zip(plain.parameters(), fused.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- the report


def test_the_report_is_of_this_run(run_chapter, tmp_path, monkeypatch):
    """A preset other than tiny reports the combination that ran; every printed number is right."""
    module, cores = chapter(ONE), []
    sample = lambda forward, *args: [cores.append(forward.args[0][1].attn.core) or 65]
    monkeypatch.setattr(instruments, "sample", sample)
    flags = ("--preset=gpt2", "--vocab=256", "--verify", "--steps=24", "--micro-batch=2")
    chosen = ("--attention=sdpa", "--recompute=full", "--json=run.json")
    status, output, _ = run_chapter(ONE, *FLAGS, *flags, *chosen)
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and cores == [common.sdpa_attention]
    names = [check["name"] for check in run["checks"] if ":" in check["name"]]
    combination = "sdpa, full"
    assert names == [
        f"kept per micro-batch: {combination}",
        f"computed: {combination}",
        f"computed: {combination}, early stop",
    ]
    cfg = Config(1, 32, 4, 2, 16, 256, tie=True)
    full = [module.step_flops(cfg, 8, "plain", "full", stop) for stop in (False, True)]
    ratios = [f / module.model_flops(cfg, 8) for f in full]
    assert f"takes {ratios[0]:.2f} times the FLOPs, {ratios[1]:.2f} times where" in output
    n = module.rule_of_thumb(cfg, 8) / module.model_flops(cfg, 8)
    assert f"6·N·tokens is {n:.2f} of the FLOPs: N leaves out attention's scores" in output
    speed = 8 * 16 / statistics.median(run["step_seconds"][3:])
    assert f"  {speed:,.0f} tokens/s" in output
    assert f"last 20 steps: {statistics.mean(run['loss'][-20:]):.3f} nats" in output
    few = run_chapter(ONE, *FLAGS, "--kv-heads=4", "--steps=3", "--no-verify")[1]
    assert "that GQA shares" in output and "that GQA shares" not in few
    assert few.count("kept per micro-batch") == 6 and cores[1] == common.plain_attention
    assert "tokens/s" not in few and "N has the embedding, which multiplies nothing, and" in few


@pytest.mark.parametrize(("formula", "wrong"), [
    ("WIDTHS", {"bf16": (2, 2, 2)}),
    ("KEPT", {"none": {"inside": 0.5}}),
    ("step_flops", lambda *args, **more: 1e6),
])  # fmt: skip
def test_a_wrong_formula_is_reported(run_chapter, monkeypatch, formula, wrong):
    monkeypatch.setattr(chapter(ONE), formula, wrong)
    flags = "--steps=1", "--no-verify", "--precision=bf16"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *flags)
    assert status == 1 and "✗" in output and "measured" in output
