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
from lab.run.meters import ActivationMeter, FlopMeter, nbytes
from lab.run.verify import tolerances
from tests.conftest import TEXT, chapter, sample
from tests.support.runs import check_run, runs

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
    """Random tokens, targets of which some are ignored, and how many are valid."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(cfg.vocab, (2, sequences, cfg.seq), generator=generator)
    ignored = torch.rand(sequences, 1, generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
    return tokens, targets, int((targets != -100).sum())


def plain_forward(one, model, attention="plain", recompute="none"):
    """The chapter's forward of a model, with this attention and recomputation."""
    one.choose_core(model, attention, recompute)
    return functools.partial(one.logits_of, model, recompute=recompute)


def formulas(one, cfg, *flags):
    """The arguments of a run, and the chapter's formulas of it."""
    args = common.parse(one.__file__, "", one.VARIANTS, one.flags, flags)
    one.requires(args, 1)
    args.model = cfg
    return args, one.formulas(args, 0, 1, gpt(cfg))


# ------------------------------------------------------------------------------- 1. the step


@pytest.mark.parametrize("run", runs("01"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


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


# ------------------------------------------------------------------------------- model states


def state_formula(one, cfg, *flags):
    """Bytes of parameters, gradients and optimizer states, and of gradients at the most."""
    args, answer = formulas(one, cfg, *flags)
    return list(anatomy.state_bytes(args, answer, 4).values()), answer["most gradients"]


def masters_of(one, model, make_optimizer, *options):
    """The MasterWeights of a model whose parameters have names."""
    common.name_parameters(model)
    return one.MasterWeights(model, make_optimizer, *options)


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
            mixed = one.MasterWeights(
                model, make, one.HALF[precision], precision == "bf16-fp32grad")
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


def test_gradients_are_unscaled_in_fp32(one):
    """2**-10 / 2**16 would vanish in float16, whose smallest number is 2**-24."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.zero_()
    masters = masters_of(one, model, lambda p: torch.optim.SGD(p, 1.0), torch.float16)
    model.weight.grad = torch.full((1, 1), 2.0**-10, dtype=torch.float16)
    masters.step(2.0**-16)
    assert masters.masters[0].item() == -(2.0**-26)


def test_the_loss_scale_doubles_after_each_run_of_good_steps(one):
    scale, values = one.LossScale(8.0, patience=2), []
    for overflow in (False, False, False, True, False, False, False, False):
        scale.update(overflow)
        values.append(scale.value)
    assert values == [8, 16, 16, 8, 8, 16, 16, 32]


def test_fp32_gradients_add_up_what_16_bits_would_lose(one):
    """bf16 has 8 bits: 256 + 1 is 256. Sixteen micro-batches of small gradients must not vanish.
    And a parameter without a gradient stays as it is."""
    sums = {}
    for fp32_grads in (False, True):
        model = torch.nn.Linear(1, 1, bias=False)
        model.unused = torch.nn.Parameter(torch.ones(1))
        sgd = functools.partial(torch.optim.SGD, lr=1.0)
        masters = masters_of(one, model, sgd, torch.bfloat16, fp32_grads)
        masters.zero_grad()
        for x in [256.0] + [1.0] * 16:
            model(torch.full((1, 1), x, dtype=torch.bfloat16)).backward()
            masters.accumulate()
        sums[fp32_grads] = masters.norm().item()
        masters.step(1.0)
        assert model.unused.item() == 1 and masters.masters[1].grad is None
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
    options = f"--precision={precision}", f"--variant={variant}", f"--optimizer={optimizer}"
    status, output, _ = run_chapter(ONE, *ONE_SETTING, *flags, *options)
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
