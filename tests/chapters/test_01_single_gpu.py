"""Chapter 01: the step, mixed precision, recomputation, FLOPs, and what a run says of them."""

import functools
import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

import common
from common import Config, gpt, loss_sum
from lab.bench import anatomy, settings
from lab.bench.machines import PEAK_FLOPS
from lab.bench.meters import ActivationMeter, CheckpointMeter, FlopMeter
from tests.conftest import TEXT, chapter

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
GPTS = [SMALL, Config(3, 48, 4, 4, 20, 100), Config(1, 48, 8, 1, 24, 300, tie=True)]
LLAMA = Config(2, 32, 4, 2, 16, 256, gated=True, ffn=44)
SHAPES = [*GPTS, LLAMA]
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


def formulas(one, cfg, *flags):
    """The arguments of a run, and the chapter's formulas of it."""
    args = common.parse(one.__file__, "", one.VARIANTS, one.flags, flags)
    one.requires(args, 1)
    args.model = cfg
    return args, one.formulas(args, 0, 1, gpt(cfg))


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
    "--micro-batch=4 --preset=gpt2 --attention=sdpa --recompute=full --block=llama",  # tied
    "--micro-batch=2 --variant=torch --clip=0.2 --block=llama --ffn=44 --recompute=every "
    "--layers=3 --k=2",
    "--micro-batch=4 --recompute=offload --optimizer=sgd",
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
            expected = sum(n * width.get(kind, e) for _, n, kind in table)
            assert meter.bytes == expected + (2 * cfg.layers + 1) * on_a_cpu(cfg, e)


def on_a_cpu(cfg, e):
    """Bytes that RMSNorm keeps there beyond the table: float32 or better, and a second tensor."""
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


# ------------------------------------------------------------------------------- parameters

PARTS = {  # and their names
    "embedding": r"embedding\.",
    "q and o": r".*\.attn\.[qo]\.",
    "k and v": r".*\.attn\.[kv]\.",
    "MLP": r".*\.mlp\.",
    "norms": r".*norm",
    "head": r"head\.out\.",
}


@pytest.mark.parametrize("cfg", SHAPES)
def test_parameters_by_part_are_those_of_the_model(one, cfg):
    sizes = dict.fromkeys(PARTS, 0)
    for name, p in gpt(cfg).named_parameters():
        [part] = [part for part, names in PARTS.items() if re.match(names, name)]
        sizes[part] += p.numel()
    assert one.parameters_by_part(cfg) == sizes and sum(sizes.values()) == cfg.parameters()


def test_the_lessons_table_of_parameters(one):
    models = [common.PRESETS["gpt2"], common.PRESETS["7b"],
              Config(80, 8192, 64, 8, 8192, 128256, gated=True, ffn=28672)]  # fmt: skip
    for part in PARTS:
        row = re.search(rf"^    {part}  .*?((?: +[\d.]+%){{3}})$", one.__doc__, re.MULTILINE)[1]
        for told, cfg in zip(row.split(), models):
            share = one.parameters_by_part(cfg)[part] / cfg.parameters()
            assert f"{share:.{len(told.partition('.')[2][:-1])}%}" == told, part
    h = 4096
    layer = lambda cfg: sum(one.parameters_by_part(cfg)[part] for part in ("q and o", "k and v",
                                                                          "MLP"))  # fmt: skip
    assert layer(Config(1, h, 32, 32, 8, 8)) == 12 * h * h
    gated = Config(1, h, 32, 32, 8, 8, gated=True, ffn=8 * h // 3)
    assert layer(gated) == pytest.approx(12 * h * h, rel=1e-3)
    assert models[2].parameters() == pytest.approx(70.6e9, rel=1e-3)


@pytest.mark.parametrize("cfg", [*GPTS, *(c for c in common.PRESETS.values() if not c.gated)])
def test_the_textbook_formula_differs_for_the_reasons_given(one, cfg):
    block = 2 * sum(numbers for _, numbers, _ in one.kept_for_backward(cfg, 4)[0])
    assert one.textbook_activation_bytes(cfg, 4) == block + sum(
        one.textbook_difference(cfg, 4).values()
    )
    on_cuda = one.textbook_difference(cfg, 4, statistic=4)  # two norms' two numbers, in float32
    on_cpu = one.textbook_difference(cfg, 4)
    assert sum(on_cuda.values()) == sum(on_cpu.values()) - 2 * 2 * 2 * 4 * cfg.seq
    for on_cuda, more in ((False, 0), (True, 2 * 2 * 2 * 4 * cfg.seq)) if cfg in GPTS else ():
        args, answer = formulas(one, cfg, "--batch=4")  # which makes a model
        said = []
        run = SimpleNamespace(args=args, on_cuda=on_cuda, note=said.append)
        settings.explain(run, answer["settings"])
        assert said[1].startswith(f"a block in 16 bits keeps {(block + more) / 1e6:.3f} MB; ")
    s, b, h, a = cfg.seq, 4, cfg.dim, cfg.heads
    assert one.textbook_activation_bytes(cfg, 4) == s * b * h * (34 + 5 * a * s / h)


def test_the_best_k_is_that_of_the_formula(one, run_chapter):
    """Of 36 small layers it pays to compute two again at once."""
    cfg = Config(36, 8, 2, 2, 4, 16)
    tokens, targets, _ = batch_of(cfg, 1)
    model, most = gpt(cfg), {}
    of_layer = anatomy.kept_by_modules(cfg, 1, 4, {})[1]
    of_input = 4 * 4 * 8
    for k in (1, 2, 3, 4, 5, 36):
        with CheckpointMeter([tokens, targets]) as meter:
            loss = loss_sum(one.logits_of(model, tokens, "every", k), targets)
            meter.most = 0
            loss.backward()
        most[k] = meter.most - anatomy.shared_bytes(cfg, 4, {})
        assert most[k] == one.most_again(36, k, of_input, of_layer)
    assert min(most, key=most.get) == one.best_k(36, of_input, of_layer) == 2
    assert run_chapter(ONE, *FLAGS, "--k=2")[0] == 2
    status, _, errors = run_chapter(ONE, *FLAGS, "--recompute=every", "--k=2")
    assert status == 2 and errors.startswith("error: --k 2: of --recompute every, 1 to 1; --k 1 ")


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_gradients_are_bit_for_bit_the_same_whatever_is_recomputed(one, attention):
    tokens, targets, valid = batch_of(SMALL, 4)
    gradients = []
    for recompute in ("none", "selective", "full", "offload"):
        model = gpt(SMALL)
        (
            loss_sum(plain_forward(one, model, attention, recompute)(tokens), targets) / valid
        ).backward()
        gradients.append([p.grad for p in model.parameters()])
    for none, *others in zip(*gradients):
        assert all(none.equal(other) for other in others)


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
    modules = "A100-SXM4-80GB", "H100 80GB HBM3", "H200", "B200"
    assert [PEAK_FLOPS[f"NVIDIA {name}"] / 1e12 for name in modules] == [312, 989, 989, 2250]


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
