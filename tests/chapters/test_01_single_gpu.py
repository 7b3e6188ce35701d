"""Chapter 01: the step, mixed precision, recomputation, FLOPs, and what a run says of them."""

import functools
import json
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

import common
from common import Config, gpt, loss_sum
from lab import chapters
from lab.run import anatomy
from lab.run.meters import ActivationMeter, FlopMeter
from tests.conftest import TEXT, chapter, hold_to_the_run_without_ranks, sample
from tests.support.refused import hold_refusals

ONE = "01_single_gpu"
SMALL = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)
FLAGS = ("--layers=1", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", f"--data={TEXT}",
         "--device=cpu")  # fmt: skip
# The tiny preset tries all settings of attention and recomputation, others only the run's own.
ONE_SETTING = (*FLAGS, "--preset=1b", "--vocab=256", "--attention=plain", "--verify")
LLAMA = Config(2, 32, 4, 2, 16, 256, gated=True, ffn=44)
SHAPES = [LLAMA, SMALL, Config(1, 48, 8, 1, 24, 300, tie=True), Config(3, 48, 4, 4, 20, 100)]
SMALLEST = [  # two numbers a head; one token; one head
    Config(1, 16, 8, 8, 8, 50),
    Config(1, 16, 2, 1, 1, 50),
    Config(1, 16, 1, 1, 8, 50),
]
ALL_SIX = list(product(("plain", "sdpa"), ("none", "selective", "full")))


@pytest.fixture(scope="module")
def one():
    return chapter(ONE)


def batch_of(cfg, sequences, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(cfg.vocab, (2, sequences, cfg.seq), generator=generator)
    ignored = torch.rand(sequences, 1, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
    return tokens, targets, int((targets != -100).sum())


def plain_forward(one, model, attention="plain", recompute="none"):
    one.choose_core(model, attention, recompute)
    return functools.partial(one.logits_of, model, recompute=recompute)


def formulas(one, cfg, *flags):
    """The arguments of a run, and the chapter's formulas of it."""
    args = common.parse(one.__file__, "", one.VARIANTS, one.flags, flags)
    one.requires(args, 1)
    args.model = cfg
    return args, one.formulas(args, 0, 1, gpt(cfg))


# ------------------------------------------------------------------------------- 1. the step


@pytest.mark.parametrize("flags", sample([
    "--micro-batch=1 --ignore=0.6 --optimizer=momentum --clip=0.2 --lr=0.01 --batch=3 --dim=36 "
    "--heads=3 --kv-heads=1 --seq=17 --vocab=263 --layers=2",  # nothing divides
    "--micro-batch=4 --clip=0.2 --block=llama --ffn=44 --recompute=every --layers=3 --k=2",
    "--micro-batch=4 --preset=gpt2 --attention=sdpa --recompute=full --block=llama",  # tied
    "--micro-batch=4 --recompute=offload --optimizer=sgd --kv-heads=4",
    "--micro-batch=4 --optimizer=sgd --recompute=selective --kv-heads=4",
    "--micro-batch=2 --clip=0.2 --block=llama --ffn=44 --variant=torch",
], size=4))  # fmt: skip
def test_every_way_is_the_same_as_the_plain_step(run_chapter, tmp_path, flags):
    status, output, _ = run_chapter(ONE, *ONE_SETTING, "--steps=3", "--dtype=float64",
                                    "--json=run.json", *flags.split())  # fmt: skip
    run = json.loads((tmp_path / "run.json").read_text())
    assert status == 0 and len(run["reference_loss"]) == 3, output
    hold_to_the_run_without_ranks(run)
    assert max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-10
    assert run["comm"] == {} and all(check["ok"] is not False for check in run["checks"])


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_gradients_are_bit_for_bit_the_same_whatever_is_recomputed(one, attention):
    tokens, targets, valid = batch_of(SMALL, 4)
    gradients = []
    for recompute in ("none", "selective", "full", "offload"):
        model = gpt(SMALL)
        logits = plain_forward(one, model, attention, recompute)(tokens)
        (loss_sum(logits, targets) / valid).backward()
        gradients.append([p.grad for p in model.parameters()])
    for none, *others in zip(*gradients):
        assert all(none.equal(other) for other in others)


# ------------------------------------------------------------------------------- 3. activations


@pytest.mark.parametrize("cfg", [*SHAPES, *sample(SMALLEST)], ids=lambda cfg: f"{cfg.kv_heads}kv")
def test_activation_bytes_equal_the_formula(one, cfg):
    """The chapter's table, by itself and as shares of lab/run/anatomy.py's."""
    for (attention, recompute), dtype in product(ALL_SIX, (torch.bfloat16, torch.float64)):
        model, e = gpt(cfg, dtype=dtype), dtype.itemsize
        tokens, targets, _ = batch_of(cfg, 3)
        forward = plain_forward(one, model, attention, recompute)
        meter = ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
        with meter:
            loss = loss_sum(forward(tokens), targets)  # noqa: F841 (it keeps what it needs)
        chosen = replace(cfg, attention=attention)
        formula = anatomy.activation_bytes(chosen, 3, e, one.KEPT[recompute])
        assert meter.bytes == formula, (attention, recompute, dtype)
        if (attention, recompute) == ("plain", "none"):
            block, around = one.kept_for_backward(cfg, 3)
            width = {"logits": max(e, 4), "ids": 0}
            table = [*cfg.layers * block, *around]
            expected = sum(n * width.get(kind, e) for _, n, kind in table)
            assert meter.bytes == expected + (2 * cfg.layers + 1) * on_a_cpu(cfg, e)


def on_a_cpu(cfg, e):
    """Bytes that a CPU's RMSNorm keeps beyond the table: float32 or better, and a second tensor."""
    tokens = 3 * cfg.seq
    x = tokens * cfg.dim
    return max(e, 4) * (2 * x + tokens) - e * (x + tokens) if cfg.gated else 0


@pytest.mark.parametrize("cfg", SHAPES, ids=lambda cfg: f"{cfg.kv_heads}kv")
def test_the_table_and_lab_agree_on_every_class(one, cfg):
    """What is missing where a rank keeps nothing of a class. (Tokens are int64, and e is 8.)"""
    tables = one.kept_for_backward(cfg, 3)
    classes = {kind for table in tables for *_, kind in table}
    all_kept = dict.fromkeys(classes, 1)
    kept = lambda shares: anatomy.kept_by_modules(cfg, 3, 8, shares)
    for kind in classes - {"positions"}:
        of_block, of_around = (8 * sum(n for _, n, k in table if k == kind) for table in tables)
        if kind == "outside":
            of_block, of_around = of_block + 2 * on_a_cpu(cfg, 8), of_around + on_a_cpu(cfg, 8)
        first, block, *_, last = kept(all_kept)
        first_without, block_without, *_, last_without = kept(all_kept | {kind: 0})
        assert block - block_without == of_block
        scalar = 8 if kind == "logits" else 0  # of the loss: not cut with them
        assert first + last - first_without - last_without == of_around - scalar
    assert anatomy.shared_bytes(cfg, 8, {}) == 8 * tables[1][0][1]  # positions


def test_the_block_of_the_lesson(one):
    """4 tokens, dim 8, 2 heads and 1 kv head: its numbers and bytes are in the lesson."""
    block, _ = one.kept_for_backward(Config(1, 8, 2, 1, 4, 16), 1)
    numbers = sum(n for _, n, _ in block)
    assert f"{numbers} numbers" in one.__doc__ and f"{4 * numbers:,} bytes" in one.__doc__


# ------------------------------------------------------------------------------- parameters

PARTS = {  # and their names
    "embedding": r"embedding\.",
    "q and o": r".*\.attn\.[qo]\.",
    "k and v": r".*\.attn\.[kv]\.",
    "MLP": r".*\.mlp\.",
    "norms": r".*norm",
    "head": r"head\.out\.",
}


def test_parameters_by_part_are_those_of_the_model(one):
    for cfg in SHAPES:
        sizes = dict.fromkeys(PARTS, 0)
        for name, p in gpt(cfg).named_parameters():
            [part] = [part for part, names in PARTS.items() if re.match(names, name)]
            sizes[part] += p.numel()
        assert one.parameters_by_part(cfg) == sizes and sum(sizes.values()) == cfg.parameters()


@pytest.mark.parametrize("cfg", [*SHAPES[1:], common.PRESETS["7b"]])
def test_the_textbook_formula_differs_for_the_reasons_given(one, cfg):
    s, b, h, a = cfg.seq, 4, cfg.dim, cfg.heads
    block = 2 * sum(numbers for _, numbers, _ in one.kept_for_backward(cfg, b)[0])
    textbook, reasons = one.textbook_activation_bytes(cfg, b), one.textbook_difference(cfg, b)
    assert textbook == s * b * h * (34 + 5 * a * s / h) == block + sum(reasons.values())
    on_cuda = one.textbook_difference(cfg, b, statistic=4)  # two norms' two numbers, in float32
    assert sum(on_cuda.values()) == sum(reasons.values()) - 2 * 2 * 2 * b * s


def test_the_best_k_is_that_of_the_formula(one):
    """Of 36 small layers, two are best recomputed at once."""
    cfg = Config(36, 8, 2, 2, 4, 16)
    tokens, targets, _ = batch_of(cfg, 1)
    model, most = gpt(cfg), {}
    of_layer = anatomy.kept_by_modules(cfg, 1, 4, {})[1]
    of_input = 4 * 4 * 8
    for k in (1, 2, 3):
        with chapters.held("01").CheckpointMeter([tokens, targets]) as meter:
            loss = loss_sum(one.logits_of(model, tokens, "every", k), targets)
            meter.most = 0
            loss.backward()
        most[k] = meter.most - anatomy.shared_bytes(cfg, 4, {})
        assert most[k] == one.most_again(36, k, of_input, of_layer)
    assert min(most, key=most.get) == one.best_k(36, of_input, of_layer) == 2


# ------------------------------------------------------------------------------- 4. FLOPs


@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("cfg", sample(SHAPES, size=2), ids=lambda cfg: f"{cfg.kv_heads}kv")
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
    cfg = common.PRESETS["7b"]
    step = functools.partial(one.step_flops, cfg, 1)
    needed = step("plain", "none")
    assert one.model_flops(cfg, 1) == needed < step("sdpa", "none")
    assert one.rule_of_thumb(cfg, 1) == 6 * cfg.parameters() * cfg.seq
    assert 0.85 < one.rule_of_thumb(cfg, 1) / needed < 1
    assert step("plain", "full") / needed == pytest.approx(4 / 3, abs=0.02)
    assert step("plain", "selective") / needed < 1.05
    assert step("plain", "full", True) < step("plain", "full")
    in_matmuls = cfg.parameters() - cfg.vocab * cfg.dim - (4 * cfg.layers + 2) * cfg.dim
    assert needed == 6 * in_matmuls * cfg.seq + 12 * cfg.layers * cfg.dim * cfg.seq**2
    # test_kernels.py counts the matmuls of the kernels: 7 backward, where a fused core has 5.
    extra = step("triton", "none") - step("sdpa", "none")
    assert extra == cfg.layers * 2 * (2 * cfg.seq**2 * cfg.dim)
    _, answer = formulas(one, SMALL, "--batch=4", "--recompute=full", "--attention=sdpa")
    assert answer["utilization"] == {
        "mfu": one.model_flops(SMALL, 4), "hfu": one.step_flops(SMALL, 4, "sdpa", "full", True)
    }  # fmt: skip


# ------------------------------------------------------------------------------- bad arguments


def test_refusals(run_chapter):
    hold_refusals(run_chapter, ONE, [
        ("--recompute=every --k=2 --layers=1", 1, "--k 2", "--k 1"),
        ("--k=2", 1, "--k 2", "--k 1"),
        ("--kernels --dtype=float64", 1, "--kernels", "--dtype float32"),
        ("--kernels --dim=64 --heads=8", 1, "64 in 8 heads", "--dim 128 --heads 4"),
    ])  # fmt: skip
