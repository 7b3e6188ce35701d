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
from lab.bench.report import quantity
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main

FOUR = "04_tensor_parallel"
VARIANTS = ("megatron", "overlap", "torch")
MANY = 4000  # combinations
TRAINING = (STEPS, "--ignore=0.5", f"--data={TEXT}", "--verify")
SMALL_TRAINING = (*SMALL, *TRAINING, "--batch=4")
FLOAT64 = (*SMALL_TRAINING, "--dtype=float64")
OF_THREE = ("--layers=1", "--heads=6", "--dim=24", "--kv-heads=3", "--seq=15")
# Of two ranks, which share a kv head; one step is enough for a fault to be seen.
@pytest.fixture(scope="module")
def four():
    return chapter(FOUR)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "world": (1, 2, 3, 4),
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


EIGHT_RANKS = {  # four share each kv head; in full every variant has eight, too
    "variant": "megatron", "world": 8, "kv-heads": 2, "preset": "gpt2", "vocab": 257,
    "micro-batch": 1, "optimizer": "adamw", "clip": 0.1, "block": "llama", "precision": "bf16",
    "recompute": "full",
}  # fmt: skip


def fits(one):
    own = one["kv-heads"] == "own" or one["kv-heads"] % one["world"] == 0
    if one["variant"] == "torch":  # its first steps take long on each rank: three are enough
        return own and one["world"] <= 3
    return own or one["world"] % one["kv-heads"] == 0


def covering(fits=fits, **settings):
    """A few of all combinations, in which any two values that go together occur together. Each rank
    that imports a test chooses them once more: of very many, where some thousands are enough."""
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
    given |= {"heads": heads, "dim": 48, "layers": 1 if world == 8 else 2, "seq": 48, "batch": 2}
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


@pytest.mark.parametrize("one", [*covering(variant=VARIANTS, **SETTINGS), EIGHT_RANKS])
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    results = ranks(one["world"])(run_main, FOUR, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    hold_shapes(results, outside=(48, 48), inside=(48, 48 // one["world"]))


WHOLE_KV_HEADS = [
    (1, ("--micro-batch=2", "--clip=0.1")),
    (2, ("--micro-batch=1", "--clip=0.1", "--optimizer=momentum", "--vocab=257")),
    (3, ("--dim=48", "--heads=6", "--kv-heads=3", "--seq=15", "--optimizer=sgd", "--vocab=1000")),
    (4, ("--kv-heads=4", "--micro-batch=2", "--vocab=257")),
    (8, ("--layers=1", "--heads=8", "--kv-heads=8", "--clip=0.1", "--vocab=1000")),
    (2, ("--preset=gpt2", "--vocab=257", "--clip=0.1", "--kv-heads=4")),
]
SHARED_KV_HEADS = [
    (4, ("--clip=0.1", "--vocab=257")),  # two ranks for each kv head
    (4, ("--kv-heads=1", "--micro-batch=1", "--optimizer=sgd", "--vocab=1000")),
    (8, ("--layers=1", "--heads=8", "--clip=0.1", "--optimizer=momentum")),
]


def products(variants):
    """All of those settings for each variant; PyTorch's cannot share kv heads."""
    return [
        *itertools.product(variants, WHOLE_KV_HEADS),
        *itertools.product([v for v in variants if v != "torch"], SHARED_KV_HEADS),
    ]


@pytest.mark.full
@pytest.mark.parametrize(("variant", "setting"), products(VARIANTS))
def test_same_as_one_gpu_in_full(ranks, tmp_path, variant, setting):
    world, flags = setting
    flags = (*FLOAT64, *flags, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, FOUR, flags, tmp_path), flags)


def twice(name, flags, folder):
    """The losses and norms of a run, and of another."""
    runs = [run_main(name, flags, folder)[1] for _ in range(2)]
    return dist.get_rank() == 0 and [(run["loss"], run["grad_norm"]) for run in runs]


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    chapter(FOUR)
    one, other = ranks(3)(twice, FOUR, (*SMALL_TRAINING, *OF_THREE), tmp_path)[0]
    assert one == other


@pytest.mark.parametrize(("variant", "flag"), [
    ("megatron", "--dtype=bfloat16"), ("torch", "--precision=bf16")])  # fmt: skip
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
        assert f"megatron sends {quantity(round(ours))}" in output


# ------------------------------------------------------------------------------- after training


LARGE = common.Config(layers=2, dim=32, heads=8, kv_heads=2, seq=8, vocab=37)
THREE = common.Config(layers=1, dim=24, heads=6, kv_heads=3, seq=9, vocab=37)


def gather_whole(tensor, p):
    """The full tensor of which `tensor` is this rank's part: parameter `p`, or its gradient.
    Communication: an all_gather for each cut of `p`."""
    shapes = [getattr(p, "full_shape", p.shape)]  # before each cut
    for cut in getattr(p, "cuts", ()):
        shapes.append([-(-n // cut.parts) if i == cut.dim else n for i, n in enumerate(shapes[-1])])
    tensor = tensor.detach()
    for cut, shape in reversed(list(zip(getattr(p, "cuts", ()), shapes))):
        tensor = tensor.contiguous()
        shards = [torch.empty_like(tensor) for _ in range(cut.group.size())]
        dist.all_gather(shards, tensor, group=cut.group)
        parts = shards[:: cut.group.size() // cut.parts]  # one of those that are equal
        tensor = torch.cat(parts, cut.dim).narrow(cut.dim, 0, shape[cut.dim])  # no padding
    return tensor


def trained(name, variant, *own):
    """What a rank holds after three steps, put together, and beside it one GPU's; its LayerNorms.

    own: what the chapter's train_step takes between the clipping and the group.
    """
    module, group, n = chapter(name), dist.group.WORLD, dist.get_world_size()
    cfg = LARGE if n != 3 else THREE
    model = module.parallelize(common.gpt(cfg, None), cfg, group, variant)
    common.draw_weights(model, 0, dtype=torch.float64)
    optimizer = common.OPTIMIZERS["adamw"](model.parameters(), None)
    whole = common.gpt(cfg, 0, dtype=torch.float64)
    plain = common.OPTIMIZERS["adamw"](whole.parameters(), None)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(cfg.vocab, (2, cfg.seq + 1), generator=generator)
        pair = tokens[:, :-1], tokens[:, 1:]
        module.train_step(model, optimizer, [pair], 16, 0.5, *own, group)
        plain.zero_grad()
        (common.loss_sum(whole(pair[0]), pair[1]) / 16).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
    put_together = {
        p.global_name: (gather_whole(p, p), gather_whole(p.grad, p), q.detach(), q.grad)
        for p, q in zip(model.parameters(), whole.parameters())
    }
    assert [name for name, _ in whole.named_parameters()] == list(put_together)
    norms = [(p.global_name, p.detach()) for p in model.parameters() if "norm" in p.global_name]
    return put_together, norms


def hold_put_together(results):
    for put_together, _ in results:
        for name, (parameter, gradient, expected, expected_gradient) in put_together.items():
            assert parameter.shape == expected.shape, name
            torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("variant", "world"), [("overlap", 3), ("megatron", 4)])
def test_shards_put_together_are_one_gpus_parameters(ranks, variant, world):
    """And LayerNorms stay equal bit for bit, though nobody sends them."""
    results = ranks(world)(trained, FOUR, variant, (LARGE if world != 3 else THREE).vocab)
    hold_put_together(results)
    (_, norms), *others = results
    assert len(norms) == (10 if world == 4 else 6)
    for _, theirs in others:
        for (name, mine), (_, other) in zip(norms, theirs):
            assert mine.equal(other), name


# ------------------------------------------------------------------------------- the loss


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


@pytest.mark.parametrize(("world", "vocab"), [(1, 5), (2, 8), (3, 7), (4, 5), (5, 3)])
def test_loss_of_cut_logits(ranks, four, world, vocab):
    """Logits of +-1e4 do not overflow; padding, up to whole ranks of it, has no probability."""
    for both in ranks(world)(small_and_large, vocab):
        for loss, expected, gradient, expected_gradient, padding in both:
            assert loss == pytest.approx(expected, rel=1e-12) and not padding
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def worked_example():
    """Of VocabParallelLoss's docstring, on this rank of two: every number in it."""
    group, logits = dist.group.WORLD, torch.tensor([[1.0, 2.0], [3.0, 0.0]])[dist.get_rank()]
    mine = logits.view(1, 1, 2).requires_grad_()
    loss = chapter(FOUR).VocabParallelLoss.apply(mine, torch.tensor([[1]]), 4, group)
    loss.backward()
    return loss.item(), mine.grad.flatten().tolist()


def test_the_worked_example(ranks, four):
    (loss, left), (same, right) = ranks(2)(worked_example)
    logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
    shifted = logits - logits.max()
    powers = shifted.exp()
    sums = [powers[:2].sum(), powers[2:].sum()]
    probabilities = powers / powers.sum()
    assert loss == same == pytest.approx(-probabilities[1].log().item())
    assert torch.tensor(left + right).allclose(probabilities - torch.tensor([0.0, 1, 0, 0]))

    two = lambda values: [f"{float(value):.2f}" for value in values]
    (a, b, c, d), (of_left, of_right, both) = two(powers), two([*sums, powers.sum()])
    table = [line.split("  ") for line in four.VocabParallelLoss.__doc__.splitlines()]
    rows = {words[0]: words[1:] for words in
            ([word.strip() for word in line if word.strip()] for line in table) if words}
    assert rows["logits"] == [*two(logits), "largest: 3.00"]
    assert rows["less the largest"] == two(shifted)
    assert rows["sum of exponentials"] == [
        f"{a} + {b} = {of_left}", f"{c} + {d} = {of_right}", f"sum: {both}"]
    assert rows["the target's, if here"] == [*two([shifted[1], 0]), f"sum: {shifted[1]:.2f}"]
    assert rows["loss"] == [f"log {both} - ({shifted[1]:.2f}) = {loss:.2f}, on both"]
    assert rows[f"exponentials / {both}"] == two(probabilities)
    assert rows["gradient"] == two(left + right)


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
