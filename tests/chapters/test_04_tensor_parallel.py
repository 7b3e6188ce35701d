"""Chapter 04: cut matrices give one GPU's numbers, and send what the formulas say."""

import itertools
import math
import os
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from lab.run.report import quantity
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main, sample

FOUR = "04_tensor_parallel"
MANY = 4000  # combinations
TRAINING = (STEPS, "--ignore=0.5", f"--data={TEXT}", "--verify")
SMALL_TRAINING = (*SMALL, *TRAINING, "--batch=4")
FLOAT64 = (*SMALL_TRAINING, "--dtype=float64")


@pytest.fixture(scope="module")
def four():
    return chapter(FOUR)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "world": (2, 3, 4),
    "kv-heads": ("own", 2, 1),  # each rank has some of its own, or shares one
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "vocab": (256, 257),
    "micro-batch": (2, 1),
    "optimizer": ("adamw", "sgd", "momentum"),
    "clip": (None, 0.1),
    "block": ("gpt", "llama"),
    "precision": ("fp32", "bf16"),  # masters in float64: the same numbers, by another path
    "recompute": ("none", "selective", "full"),
}


def combination(*values):
    """Of a variant, and of a value for each of SETTINGS."""
    return dict(zip(("variant", *SETTINGS), values))


def cases(*by_hand):
    """The combinations of a chapter with these variants, and PyTorch's. On eight ranks, four share
    each kv head. PyTorch's takes long to start on each rank."""
    on_one = [combination(variant, 1, 1, "tiny", 257, 2, "sgd", 0.1, "gpt", "bf16", "none")
              for variant in reversed(by_hand)]  # fmt: skip
    on_eight = [combination(variant, 8, kv_heads, "gpt2", 257, 1, "adamw", 0.1, "llama", "bf16",
                            "full") for kv_heads in (2, "own") for variant in by_hand]  # fmt: skip
    of_torch = [
        combination("torch", 2, "own", "gpt2", 257, 1, "adamw", 0.1, "llama", "bf16", "selective"),
        combination("torch", 3, "own", "tiny", 256, 2, "sgd", None, "gpt", "fp32", "full"),
        combination("torch", 2, 2, "tiny", 257, 2, "momentum", 0.1, "gpt", "bf16", "none"),
        combination("torch", 1, 1, "tiny", 257, 1, "adamw", 0.1, "llama", "fp32", "none"),
    ]
    by_pairs = covering(variant=by_hand, **SETTINGS)
    return [*by_pairs, *sample(on_one), *sample(on_eight), *sample(of_torch)]


def fits(one):
    own = one["kv-heads"] == "own" or one["kv-heads"] % one["world"] == 0
    return own or one["world"] % one["kv-heads"] == 0


def covering(fits=fits, **settings):
    """A few of all combinations, in which any two values that go together occur together. Each rank
    that imports a test chooses them once more, so it looks at some thousands only."""
    every = itertools.product(*settings.values())
    if math.prod(map(len, settings.values())) > MANY and not os.environ.get("FULL"):
        rng = random.Random(0)
        every = [[rng.choice(values) for values in settings.values()] for _ in range(MANY)]
    return covered([one for one in (dict(zip(settings, values)) for values in every) if fits(one)])


def covered(every):
    """A few of these settings, in which any two values that occur together in all do so, too."""
    columns = []  # of each setting, the numbers of its values
    for values in zip(*(one.values() for one in every)):
        number = {value: i for i, value in enumerate(dict.fromkeys(values))}
        columns.append(np.array([number[value] for value in values]))
    both = [a * (b.max() + 1) + b for a, b in itertools.combinations(columns, 2)]
    has = np.concatenate([pair[:, None] == np.unique(pair) for pair in both], 1, dtype="float32")

    missing, chosen = np.ones(has.shape[1], "float32"), []
    while missing.any():
        best = (has @ missing).argmax()
        missing *= 1 - has[best]
        chosen.append(pytest.param(every[best], id="-".join(map(str, every[best].values()))))
    return chosen


def flags_of(one):
    """The flags of one combination."""
    world = one["world"]
    heads = 6 if world == 3 else 8
    given = {name: value for name, value in one.items() if name != "world" and value is not None}
    given |= {"heads": heads, "dim": 48, "layers": 2 if world < 4 else 1, "seq": 48, "batch": 2}
    if one["kv-heads"] == "own":
        given["kv-heads"] = max(heads // 2, world)
    if one["block"] == "llama":
        given["ffn"] = 72
    return *TRAINING, "--dtype=float64", *(f"--{name}={value}" for name, value in given.items())


def hold_shapes(results, outside, inside):
    """Assert what a rank has of the first block: (rows, columns) outside of its sub-layers, and
    the rows and the heads times head_dim inside."""
    rows, columns = inside
    expected = dict.fromkeys(("norm1", "attn", "norm2", "mlp"), list(outside))
    run, hidden = results[0][1], results[0][1]["config"]["ffn"] or 4 * 48
    expected |= {"heads": [rows, columns], "hidden units": [rows, columns * hidden // 48]}
    assert run["recorded"]["shapes_of_a_block"] == expected


@pytest.mark.parametrize("one", cases("megatron", "overlap"))
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    results = ranks(one["world"])(run_main, FOUR, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    hold_shapes(results, outside=(48, 48), inside=(48, 48 // one["world"]))


@pytest.mark.parametrize(("variant", "flag"), sample([
    ("megatron", "--dtype=bfloat16"), ("torch", "--precision=bf16")]))
def test_bfloat16(ranks, four, tmp_path, variant, flag):
    """PyTorch's cuts alike, and sends more."""
    flags = (*SMALL_TRAINING, flag, f"--variant={variant}")
    (status, run, output), _ = ranks(2)(run_main, FOUR, flags, tmp_path)
    assert status == 0 and all(check["ok"] is not False for check in run["checks"]), output
    for rank, shards in enumerate(run["recorded"]["shards"]):
        assert shards["attn.q"] == [[32, 32], [[0, rank, 2]]]
        assert shards["mlp.down"] == [[32, 128], [[1, rank, 2]]]
    if variant == "torch":
        cfg = common.Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)
        _, _, ours = four.traffic(cfg, 1, 4, 2, 2, sums=4)["all_reduce"]
        assert sum(op["wire_bytes"] for op in run["comm"].values()) > 1.2 * ours
        assert quantity(round(ours)) in output


# ------------------------------------------------------------------------------- the loss

LARGE = common.Config(layers=2, dim=32, heads=8, kv_heads=2, seq=8, vocab=37)


def losses(vocab, scale):
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 5, vocab, dtype=torch.float64, generator=generator).mul_(scale)
    full[0, 0] -= 2 * scale * 10  # all of them far below zero
    targets = torch.randint(vocab, (2, 5), generator=generator)
    targets[1, :2] = -100
    columns = -(-vocab // n)
    part = lambda x: nn.functional.pad(x, (0, columns * n - vocab)).split(columns, -1)[rank]
    mine = part(full).clone().requires_grad_()
    full.requires_grad_()
    loss = chapter(FOUR).VocabParallelLoss.apply(mine, targets, vocab, group)
    (3 * loss).backward()
    expected = nn.functional.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="sum")
    (3 * expected).backward()
    padding = mine.grad[..., max(0, vocab - rank * columns) :]
    return loss.item(), expected.item(), mine.grad, part(full.grad), padding.any().item()


def small_and_large(vocab):
    return [losses(vocab, scale) for scale in (1, 1e4)]


@pytest.mark.parametrize(("world", "vocab"), [(2, 8), (3, 7), (5, 3)])
def test_loss_of_cut_logits(ranks, four, world, vocab):
    """Logits of +-1e4 don't overflow, and padding (of whole ranks, too) has no probability."""
    for both in ranks(world)(small_and_large, vocab):
        for loss, expected, gradient, expected_gradient, padding in both:
            assert loss == pytest.approx(expected, rel=1e-12) and not padding
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def test_the_worked_example(four):
    """The loss and the gradients of the docstring's four logits."""
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0], requires_grad=True)
    loss = nn.functional.cross_entropy(logits, torch.tensor(1))
    loss.backward()
    for number in (loss.item(), *logits.grad.tolist()):
        assert f" {number:.2f}" in four.VocabParallelLoss.__doc__


def loss_of_bfloat16():
    logits = torch.randn(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(1, 4, dtype=int)
    loss = chapter(FOUR).VocabParallelLoss.apply(logits, targets, 8, dist.group.WORLD)
    loss.backward()
    off = (loss - common.loss_sum(logits, targets)).abs().item()
    return loss.dtype, off, logits.grad.dtype


def test_the_loss_of_16_bits_is_computed_in_32(ranks, four):
    [(dtype, off, gradient)] = ranks(1)(loss_of_bfloat16)
    assert dtype == torch.float32 and off < 1e-5 and gradient == torch.bfloat16


def shape_of_logits():
    head = chapter(FOUR).VocabParallelHead(nn.Linear(4, 7, bias=False), dist.group.WORLD)
    return tuple(head(torch.ones(2, 3, 4)).shape)


def test_the_full_logits_never_exist(ranks, four):
    assert ranks(3)(shape_of_logits) == [(2, 3, 3)] * 3
