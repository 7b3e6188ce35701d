"""Chapter 02: every way to sum the gradients gives one GPU's, and sends what the formulas say."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lab.run.machines import MACHINES
from tests.conftest import chapter, sample
from tests.support.runs import check_run, runs

TWO = "02_data_parallel"
VARIANTS = ("naive", "overlap", "bucket", "torch")


@pytest.fixture(scope="module")
def two():
    return chapter(TWO)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("02"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


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
    """For a rank of the pool: (name, gradient, expected gradient) of each parameter of Odd."""
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
    """Of a norm in evaluation, where each rank has its own, and after a training step."""
    module, rank = Odd(seed=dist.get_rank()), dist.get_rank()
    replica = chapter(TWO).Naive(module, dist.group.WORLD)
    module.norm.running_mean.fill_(rank + 7)
    x = torch.ones(2, 4, dtype=torch.float64)
    replica.eval()(x, False)
    untouched = module.norm.running_mean[0].item()
    replica.train()(x * rank, False)
    return untouched, module.norm.running_mean[0].item()


def test_running_statistics_are_the_first_ranks(ranks):
    """In training: its 7, and then a tenth of this rank's batch, whose mean is 1."""
    _, (untouched, mean) = ranks(2)(running_statistics)
    assert untouched == 8 and mean == pytest.approx(0.9 * 7 + 0.1 * 1)


def test_buckets_are_in_order_full_and_of_one_dtype(two):
    """A bucket's bytes are those of its gradients. It is full only after its last parameter."""

    def nbytes(parameters):
        return sum(p.numel() * p.grad_dtype.itemsize for p in parameters)

    generator = torch.Generator().manual_seed(0)
    for capacity in (0, 100, 1000, 10**9):
        parameters = [torch.empty(size) for size in
                      torch.randint(1, 100, (40,), generator=generator).tolist()]
        for p in parameters:
            p.grad_dtype = torch.float32 if len(p) % 7 else torch.float64
        buckets = two.fill_buckets(parameters, capacity)
        assert [id(p) for p in sum(buckets, [])] == [id(p) for p in parameters]
        for bucket, following in itertools.pairwise([*buckets, None]):
            assert len({p.grad_dtype for p in bucket}) == 1
            assert nbytes(bucket[:-1]) < max(capacity, 1)
            if following and following[0].grad_dtype == bucket[0].grad_dtype:
                assert nbytes(bucket) >= capacity


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
