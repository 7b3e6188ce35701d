"""Chapter 04: cut matrices give one GPU's numbers, and send what the formulas say."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import common
from lab.run.anatomy import activation_bytes
from lab.run.machines import MACHINES
from tests.conftest import chapter
from tests.support.runs import check_run, runs

FOUR = "04_tensor_parallel"


@pytest.fixture(scope="module")
def four():
    return chapter(FOUR)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("04"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


# ------------------------------------------------------------------------------- the loss

LARGE = common.Config(layers=2, dim=32, heads=8, kv_heads=2, seq=8, vocab=37)


def losses(vocab, scale):
    """For a rank of the pool: loss and gradient of cut logits, and those of all of them."""
    group, rank, n = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 5, vocab, dtype=torch.float64, generator=generator).mul_(scale)
    full[0, 0] -= 2 * scale * 10  # all of them far below zero
    targets = torch.randint(vocab, (2, 5), generator=generator)
    targets[1, :2] = -100
    columns = -(-vocab // n)

    def part(x):
        return nn.functional.pad(x, (0, columns * n - vocab)).split(columns, -1)[rank]

    shard = part(full).clone().requires_grad_()
    full.requires_grad_()
    loss = chapter(FOUR).VocabParallelLoss.apply(shard, targets, vocab, group)
    (3 * loss).backward()
    expected = nn.functional.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="sum")
    (3 * expected).backward()
    padding = shard.grad[..., max(0, vocab - rank * columns) :]
    return loss.item(), expected.item(), shard.grad, part(full.grad), padding.any().item()


def small_and_large(vocab):
    """Of logits around one, and around ten thousand."""
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


# ------------------------------------------------------------------------------- when it is sent


class Log(TorchDispatchMode):
    """Appends every matmul to `events`."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.events.append("matmul")
        return func(*args, **(kwargs or {}))


def order_in_backward(variant):
    """What the backwards of an MLP and of the head do, in order."""
    four, group, send, orders = chapter(FOUR), dist.group.WORLD, dist.all_reduce, []
    model = four.parallelize(common.gpt(LARGE), LARGE, group, variant)

    def all_reduce(tensor, async_op=False, **more):
        assert tensor.is_contiguous()
        events.append("start")
        handle = send(tensor, async_op=True, **more)

        def wait():
            events.append("wait")
            handle.wait()

        return mock.Mock(wait=wait) if async_op else wait()

    for module in (model.block1.mlp, model.head.out):
        out, events = module(torch.ones(2, 3, LARGE.dim, requires_grad=True)).sum(), []
        with mock.patch.object(dist, "all_reduce", all_reduce), Log(events):
            out.backward()
        orders.append(events)
    contiguous = four.summed(torch.ones(2, 3).t(), group).is_contiguous()
    return *orders, contiguous


def test_the_weight_gradient_is_computed_while_the_inputs_is_sent(ranks, four):
    [(mlp, head, contiguous)] = ranks(1)(order_in_backward, "megatron")
    assert mlp == ["matmul"] * 4 + ["start", "wait"] and contiguous
    assert head == ["matmul"] * 2 + ["start", "wait"]
    expected = ["matmul"] * 3 + ["start", "matmul", "wait"], ["matmul", "start", "matmul", "wait"]
    [(*overlapped, _)] = ranks(1)(order_in_backward, "overlap")
    assert tuple(overlapped) == expected


# ------------------------------------------------------------------------------- the formulas


def test_the_two_identities(four):
    a, b = torch.randn(2, 12, 12, dtype=torch.float64)
    for t in (1, 2, 3):
        torch.testing.assert_close(four.matmul_by_columns(a, b, t), a @ b)
        torch.testing.assert_close(four.matmul_by_rows(a, b, t), a @ b)


def test_traffic_of_the_lesson(four):
    cfg, t = common.PRESETS["7b"], 8
    calls, payload, wire = four.traffic(cfg, 3, 2, t, 2, sums=4)["all_reduce"]
    x = 2 * cfg.seq * cfg.dim * 2
    assert calls == 3 * (4 * cfg.layers + 2 + 2) + 1
    assert payload == pytest.approx(3 * (4 * cfg.layers + 2) * x, rel=1e-3)
    assert wire == pytest.approx(2 * 7 / 8 * payload, rel=1e-9)
    again, more, _ = four.traffic(cfg, 3, 2, t, 2, "full", 4)["all_reduce"]
    assert (again - calls, more - payload) == (3 * cfg.layers, 3 * cfg.layers * x)


def classes_of_chapter_01():
    """Of activations: a chapter says which share of each of them its ranks keep."""
    tables = chapter("01_single_gpu").kept_for_backward(LARGE, 1)
    return {kind for table in tables for *_, kind in table}


def test_activations_of_the_lesson(four):
    """A_in / t + A_out: what is cut falls as 1/t, and the rest does not change."""
    cfg = common.PRESETS["7b"]
    assert classes_of_chapter_01() <= four.kept(cfg, 2).keys()
    one, two, four_ranks = (activation_bytes(cfg, 1, 2, four.kept(cfg, t)) for t in (1, 2, 4))
    assert (one - two) / 2 == pytest.approx(two - four_ranks, rel=1e-9)
    outside = two - (one - two)
    x = 2 * cfg.seq * cfg.dim
    assert outside == pytest.approx((2 * cfg.layers + 1) * 2 * x, rel=1e-2)


def test_when_ranks_stop_paying(four):
    h, e = 8192, 2
    for machine, most in (("H100, NVLink 4", 15), ("H100, InfiniBand NDR", 2)):
        flops, bandwidth = MACHINES[machine]
        pays = four.ranks_that_pay(h, e, flops, bandwidth)
        assert int(pays) == most
        for t in (1, 2, pays, 8, 16):
            compute = 16 * h**2 / (t * flops)
            send = 2 * (t - 1) / t * h * e / bandwidth
            assert (send <= compute * (1 + 1e-12)) == (t <= pays)
            ratio = four.sending_over_computing(t, h, e, flops, bandwidth)
            assert ratio == pytest.approx(send / compute, abs=1e-15)
    # The scaling book's t < F·W/C, for TPU v5p (C/W = 2550): F = 30,000 is 4 h.
    assert four.ranks_that_pay(7500, 2, 2550, 1) == pytest.approx(1 + 11.76, abs=0.01)
