"""Chapter 02: every way to sum the gradients gives one GPU's, and sends what the formulas say."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from lab.run.machines import MACHINES
from tests.conftest import (
    SMALL,
    STEPS,
    TEXT,
    chapter,
    edited,
    hold_to_one_gpu,
    run_main,
    sample,
)
from tests.support.refused import hold_refusals

TWO = "02_data_parallel"
FLOAT64 = (*SMALL, STEPS, "--dtype=float64", "--ignore=0.5", f"--data={TEXT}")
CONFIG = common.Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL
VARIANTS = ("naive", "overlap", "bucket", "torch")


@pytest.fixture(scope="module")
def two():
    return chapter(TWO)


# ------------------------------------------------------------------------------- same as one GPU

SETTINGS = {
    "1 rank": (1, "--batch=6 --micro-batch=2 --clip=0.1"),
    "2 ranks": (2, "--batch=8 --micro-batch=1 --clip=0.1 --optimizer=momentum"),
    "3 ranks": (3, "--batch=6 --optimizer=sgd --kv-heads=4 --bucket-mb=0.01"),
    "4 ranks": (4, "--batch=8 --micro-batch=1 --bucket-mb=0.05 --batch-ramp 4 1"),
    "8 ranks": (8, "--layers=1 --batch=16 --micro-batch=1 --clip=0.1 --bucket-mb=0.02"),
    "tied": (2, "--preset=gpt2 --vocab=256 --verify --layers=1 --batch=4"),
}
CASES = {  # each setting, and each variant with one micro-batch and with several, with each block,
    # precision and recomputation; torch's only in `make test-all`, as are all others
    ("bucket", "1 rank"): "--block=llama --precision=bf16 --recompute=full",
    ("overlap", "2 ranks"): "--precision=bf16 --recompute=selective",
    ("naive", "3 ranks"): "--recompute=full",
    ("overlap", "3 ranks"): "--block=llama --recompute=full",
    ("naive", "4 ranks"): "--block=llama --precision=bf16 --recompute=selective",
    ("bucket", "8 ranks"): "--recompute=selective",
    ("bucket", "tied"): "--block=llama",
    ("torch", "2 ranks"): "--block=llama --precision=bf16 --recompute=full",
    ("torch", "4 ranks"): "--recompute=selective",
    ("torch", "tied"): "--precision=bf16",
}
CASES |= {pair: CASES.get(pair, "") for pair in itertools.product(VARIANTS, SETTINGS)}


@pytest.mark.parametrize(("variant", "setting"), sample(CASES, size=8))
def test_same_as_one_gpu(ranks, tmp_path, variant, setting):
    world, flags = SETTINGS[setting]
    known = [flag for flag in flags.split()
             if variant in ("bucket", "torch") or not flag.startswith("--bucket-mb")]
    more = CASES[variant, setting].split()
    flags = (*FLOAT64, *known, *more, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, TWO, flags, tmp_path), flags)


# ------------------------------------------------------------------------------- any module


class Odd(nn.Module):
    """A tied, a frozen and an unused layer, one that only some ranks use, running statistics."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.tied, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused, self.sometimes, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.single = nn.Parameter(torch.ones(4))
        self.double()
        self.single.data = self.single.data.float()  # a dtype of its own
        self.unused.bias.grad_dtype = torch.float32  # its gradient's
        self.unused.bias.data = self.unused.bias.data.bfloat16()

    def forward(self, x, sometimes):
        x = self.frozen(self.tied(self.first(self.norm(x)).tanh())) * self.single
        return self.sometimes(x) if sometimes else x


def gradients_of_an_odd_module(variant):
    two, rank, world = chapter(TWO), dist.get_rank(), dist.get_world_size()
    inputs = torch.arange(24.0 * world, dtype=torch.float64).sin().view(world, 3, 2, 4)
    expected, results = Odd(seed=0), []
    for bucket_bytes in (64, 200):  # `sometimes` has a bucket of its own, or one with others
        module = Odd(seed=rank)  # starts different on each rank
        replica = two.replicate(variant, module, dist.group.WORLD, bucket_bytes)
        assert replica.module is module
        for used_in in ({0, 1}, {0, 2}):  # by rank 0: only before the backward that sends; in it
            replica.zero_grad()
            for i, x in enumerate(inputs[rank]):
                replica.sends = i == 2
                replica(x, rank == 0 and i in used_in).square().sum().backward()
            replica.finish()
            expected.zero_grad()
            for r in range(world):
                for i, x in enumerate(inputs[r]):
                    expected(x, r == 0 and i in used_in).square().sum().backward()
            pairs = zip(module.named_parameters(), expected.parameters())
            results += copy.deepcopy([(name, p.grad, q.grad) for (name, p), q in pairs])
    return results


@pytest.mark.parametrize("variant", VARIANTS[:3])
@pytest.mark.parametrize("world", sample([3, 1]))
def test_any_module(ranks, variant, world):
    results = ranks(world)(gradients_of_an_odd_module, variant)
    for name, gradient, expected in itertools.chain(*results):
        if name.startswith("frozen"):
            assert gradient is None
        elif name.startswith("unused"):
            assert not gradient.any() and expected is None
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
    for (_, one, _), (_, other, _) in zip(results[0], results[-1]):
        assert one is None or one.equal(other)  # to the bit


def running_statistics():
    """In a training step the first rank's count for all; in evaluation each rank has its own."""
    module, rank = Odd(seed=dist.get_rank()), dist.get_rank()
    replica = chapter(TWO).Naive(module, dist.group.WORLD)
    module.norm.running_mean.fill_(rank + 7)
    module.norm.running_var.fill_(rank + 3)
    x = torch.ones(2, 4, dtype=torch.float64)
    replica.eval()(x, False)
    untouched = module.norm.running_mean[0].item()
    replica.train()(x * rank, False)
    return untouched, module.norm.running_mean[0].item(), module.norm.running_var[0].item()


def test_running_statistics_are_the_first_ranks(ranks):
    _, (untouched, mean, variance) = ranks(2)(running_statistics)
    assert untouched == 8
    assert mean == pytest.approx(0.9 * 7 + 0.1 * 1)  # the first rank's 7, and this batch's mean
    assert variance == pytest.approx(0.9 * 3)  # the first rank's 3, and this batch's 0


def misused(variant):
    """Without finish(), a second backward's gradients would be lost: it raises on every rank."""
    two, group, x = chapter(TWO), dist.group.WORLD, torch.ones(2, 3)
    replica = two.replicate(variant, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), group, 40)
    for sends_next in (True, False):
        replica.sends = True
        replica(x).sum().backward()  # and no finish()
        replica.zero_grad()
        replica.sends = sends_next
        with pytest.raises(AssertionError, match="finish"):
            replica(x).sum().backward()
        replica.finish()


@pytest.mark.parametrize("variant", ["overlap", "bucket"])
def test_a_backward_without_finish_raises(ranks, variant):
    ranks(2)(misused, variant)


# ------------------------------------------------------------------------------- when it is sent


def when_it_starts(variant):
    """How many all_reduces have started at the end of each of three backwards, and after finish."""
    two, counts = chapter(TWO), []
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    replica = two.replicate(variant, model, dist.group.WORLD, 2 * 256)
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as started:
        for _ in range(2):
            replica.zero_grad()
            for replica.sends in (False, False, True):
                replica(torch.ones(2, 8)).sum().backward()
                counts.append(started.call_count)
            replica.finish()
            counts.append(started.call_count)
            started.reset_mock()
    return counts, [p.grad.untyped_storage().nbytes() for p in model.parameters()]


@pytest.mark.parametrize(("variant", "counts", "storages"), [
    ("naive", [0, 0, 0, 5], [256] * 5),
    ("overlap", [0, 0, 5, 5], [256] * 5),
    ("bucket", [0, 0, 3, 3], [256, 512, 512, 512, 512]),  # from the end: 2, 2 and 1
])
def test_it_is_sent_once_a_step_and_in_backward(ranks, variant, counts, storages):
    for measured, views in ranks(2)(when_it_starts, variant):
        assert measured == 2 * counts and views == storages


def replaced_gradients():
    """An optimizer's zero_grad sets gradients to None: they find their way back into the bucket."""
    model, sometimes = nn.Linear(3, 3), nn.Linear(3, 3)
    bucket = chapter(TWO).Bucket(nn.Sequential(sometimes, model), dist.group.WORLD, 10**6)
    for step in range(3):
        bucket.module.zero_grad(set_to_none=True)
        x = torch.ones(2, 3) * (dist.get_rank() + 1)
        (model(x).sum() + (0 if step else sometimes(x).sum())).backward()
        bucket.finish()
        assert sometimes.weight.grad.any() == (step == 0)  # later, nothing is left of it
        assert model.bias.grad.tolist() == [4] * 3  # of 2 sequences on 2 ranks
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1


def test_gradients_that_were_set_to_none_are_not_lost(ranks):
    ranks(2)(replaced_gradients)


def test_buckets_are_in_order_full_and_of_one_dtype(two):
    generator = torch.Generator().manual_seed(0)
    nbytes = lambda parameters: sum(p.numel() * p.grad_dtype.itemsize for p in parameters)
    for capacity in (0, 100, 1000, 10**9):
        sizes = torch.randint(1, 100, (40,), generator=generator).tolist()
        parameters = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
        for p, size in zip(parameters, sizes):
            p.grad_dtype = torch.float32 if size % 7 else torch.float64  # whose bytes are sent
        buckets = two.fill_buckets(parameters, capacity)
        in_order = sum(buckets, [])
        assert len(in_order) == 40 and all(p is q for p, q in zip(parameters, in_order))
        for bucket, following in zip(buckets, [*buckets[1:], None]):
            assert len({p.grad_dtype for p in bucket}) == 1
            assert nbytes(bucket[:-1]) < max(capacity, 1)  # not full before its last
            if following and following[0].grad_dtype == bucket[0].grad_dtype:
                assert nbytes(bucket) >= capacity


@pytest.mark.parametrize("variant", sample(["naive", "overlap", "bucket", "torch"], size=2))
def test_the_timeline_shows_what_hides_behind_backward(ranks, tmp_path, variant):
    flags = (*SMALL, "--steps=3", f"--data={TEXT}", f"--variant={variant}", "--batch=6")
    flags = (*flags, "--bucket-mb=0.05") if variant in ("bucket", "torch") else flags
    if variant != "overlap":  # gradients are sent in fp32
        flags = (*flags, "--precision=bf16")
    n = 3 if variant == "overlap" else 2
    (status, run, output), *_ = ranks(n)(run_main, TWO, flags, tmp_path)
    timeline, size = run["recorded"]["timeline"], 4 * CONFIG.parameters()
    [(begin, end)], gradients = timeline["backward"], timeline["gradients"]
    assert status == 0 and len(gradients) == 24 and gradients == sorted(gradients)
    assert 0 < begin < gradients[0] and gradients[-1] < end
    ops, sizes, starts, _, _ = zip(*timeline["collectives"])
    assert set(ops) == {"all_reduce"} and sum(sizes) == size
    overlap = run["recorded"]["overlap"]["all_reduce"]
    if variant == "naive":
        assert min(starts) > end and overlap["hidden"] < 0.01
    else:
        assert begin < starts[0] < end  # it starts while backward goes on
    if variant == "overlap":
        assert all(check["ok"] for check in run["checks"])
        wire, tokens = 4 / 3 * size, 2 * CONFIG.seq
        assert run["comm"]["all_reduce"]["wire_bytes"] == pytest.approx(wire)
        assert overlap["bandwidth"] == pytest.approx(wire / overlap["under way"])
        seconds = 4 * tokens * CONFIG.parameters() / overlap["flops"]
        assert overlap["ratio"] == pytest.approx(overlap["under way"] / seconds)


# ------------------------------------------------------------------------------- the formulas


def test_when_communication_hides(two):
    # The playbook's A3: S/(2·tokens·parameters) · (N-1)/N · flops/bandwidth.
    ratio = two.communication_over_backward(2 * 7e9, 7e9, 4096, 8, 989e12, 50e9)
    assert ratio == pytest.approx(2 / (2 * 4096) * 7 / 8 * 989e12 / 50e9)
    for g in (2, 4):
        tokens = two.tokens_to_hide(g, 8, 989e12, 50e9)
        ratio = two.communication_over_backward(g * 1e9, 1e9, tokens, 8, 989e12, 50e9)
        assert ratio == pytest.approx(1)
    of_tpu = two.tokens_to_hide(2, math.inf, *MACHINES["TPU v5p, one axis of ICI"])
    assert of_tpu == pytest.approx(2550, rel=1e-3)  # the scaling book's, for B/X > C/W
    # The lesson's: in a machine, and of as many as there are, where the tokens grow with the ranks.
    needed = [two.tokens_to_hide(4, n, *MACHINES["H100, InfiniBand NDR"])
              for n in (1, 16, 10**6, math.inf)]
    assert needed == sorted(needed) and needed[0] == 0 and needed[2] == pytest.approx(needed[3])
    for tokens in (two.tokens_to_hide(4, 8, *MACHINES["H100, NVLink 4"]), needed[3]):
        assert f" {tokens:,.0f}" in two.__doc__


# ------------------------------------------------------------------------------- the batch


def test_a_ramp_grows_by_multiples_of_its_start(two):
    assert two.ramp(2, 8, 3) == [2, 4, 6]  # and then 8
    assert two.ramp(4, 8, 4) == [4] * 4 and two.ramp(8, 8, 2) == [8, 8]
    assert two.ramp(1, 8, 2) == [1, 4]  # what is left over comes in larger steps
    # DeepSeek-V3's, in sequences of 4,096 tokens: 469B tokens in 14,909 steps.
    sizes = two.ramp(3072, 15360, 14_909)
    assert sizes == sorted(sizes) and set(sizes) == {3072, 6144, 9216, 12288}
    assert round(sum(sizes) * 4096 / 1e9) == 469


def test_the_batches_of_a_ramp(ranks, tmp_path):
    """--noise-scale counts their tokens, and rank 0's one GPU trains on the same batches."""
    flags = (*SMALL, "--layers=1", "--steps=4", "--batch=6", "--batch-ramp", "2", "2",
             "--noise-scale", f"--data={TEXT}")
    (status, run, output), _ = ranks(2)(run_main, TWO, flags, tmp_path)
    assert status == 0, output
    tokens = [step[1] for step in run["recorded"]["noise"]["steps"]]
    assert tokens == [2 * 16, 4 * 16, 6 * 16, 6 * 16] and run["config"]["micro_batch"] == 1


def test_a_fault_in_a_ramp_is_named(ranks, tmp_path):
    """By whose sequences are whose, in a batch that is smaller than --batch."""
    flags = (*FLOAT64, "--layers=1", "--steps=1", "--batch=8", "--batch-ramp", "4", "2",
             "--micro-batch=1", "--variant=naive")
    source = edited(TWO, "/ valid\n        loss.backward()",
                    "/ (targets != -100).sum() / len(micro_batches) / 2\n        loss.backward()")
    (status, _, output), _ = ranks(2)(run_main, TWO, flags, tmp_path, source)
    assert status == 1 and "the mean of the micro-batches' own means" in output, output


# ------------------------------------------------------------------------------- bad arguments


def test_refusals(run_chapter):
    hold_refusals(run_chapter, TWO, [
        ("--batch=10", 4, "--batch 10", "--batch 12"),
        ("--variant=naive --bucket-mb=1", 1, "--bucket-mb", "--variant bucket"),
        ("--batch=10 --batch-ramp 4 10", 4, "--batch 10", "--batch 12"),
        ("--batch=12 --batch-ramp 6 10", 4, "--batch-ramp 6", "--batch-ramp 4 10"),
        ("--batch=32 --micro-batch=2 --batch-ramp 12 10", 4, "--batch-ramp 12",
         "--batch-ramp 8 10"),
        ("--batch=8 --batch-ramp 0 10", 4, "--batch-ramp", "--batch-ramp 8 8"),
        ("--batch=8 --batch-ramp 4", 4, "--batch-ramp", "without --batch-ramp"),
    ])  # fmt: skip
