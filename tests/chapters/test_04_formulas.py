"""Chapter 04: when what is sent, and the formulas."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import common
from lab.run.anatomy import activation_bytes
from lab.run.machines import MACHINES
from tests.chapters.test_04_tensor_parallel import (
    FOUR,
    LARGE,
    four,  # noqa: F401  (fixtures)
)
from tests.conftest import chapter, edited, loaded
from tests.support.refused import hold_refusals

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


def order_in_backward(variant, source=None):
    """What the backwards of an MLP and of the head do, in order."""
    four = loaded(FOUR, source) if source else chapter(FOUR)
    group, send, orders = dist.group.WORLD, dist.all_reduce, []
    model = four.parallelize(common.gpt(LARGE), LARGE, group, variant)

    def all_reduce(tensor, async_op=False, **more):
        assert tensor.is_contiguous()
        events.append("start")
        handle = send(tensor, async_op=True, **more)
        wait = lambda: (events.append("wait"), handle.wait())
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
    source = edited(FOUR, "        handle.wait()\n        return dx, None, *dw",
                    "        return dx, None, *dw")
    [(*faulty, _)] = ranks(1)(order_in_backward, "overlap", source)
    assert tuple(faulty) != expected


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


def test_refusals(run_chapter):
    hold_refusals(run_chapter, FOUR, [
        ("--heads=4", 3, "--heads 4", "--nproc_per_node 2"),
        ("--heads=4", 8, "--kv-heads 4", "--nproc_per_node 4"),
        ("--dim=96 --heads=12 --kv-heads=4", 6, "--heads 12", "--nproc_per_node 4"),
        ("--variant=torch", 8, "torch cannot share a kv head", "--nproc_per_node 4"),
        ("--ffn=30", 4, "--ffn 30", "--nproc_per_node 2"),
        ("--micro-batch=3", 2, "--batch 8", "--batch 9"),
    ])  # fmt: skip
