"""Chapter 04: when what is sent, and the formulas."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import common
from lab.bench.anatomy import activation_bytes
from lab.bench.machines import MACHINES
from tests.chapters.test_04_tensor_parallel import (
    FOUR,
    LARGE,
    four,  # noqa: F401  (fixtures)
)
from tests.conftest import broken, chapter

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


def order_in_backward(variant, fault=None):
    """What the backwards of an MLP and of the head do, in order."""
    four = broken(FOUR, *fault) if fault else chapter(FOUR)
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
    never = "        handle.wait()\n        return dx, None, *dw", "        return dx, None, *dw"
    [(*faulty, _)] = ranks(1)(order_in_backward, "overlap", never)
    assert tuple(faulty) != expected


# ------------------------------------------------------------------------------- the formulas


def test_the_two_identities(four):
    a, b = torch.randn(2, 12, 12, dtype=torch.float64)
    for t in (1, 2, 3):
        torch.testing.assert_close(four.matmul_by_columns(a, b, t), a @ b)
        torch.testing.assert_close(four.matmul_by_rows(a, b, t), a @ b)


def test_parameters_per_rank(four):
    cfg = common.Config(layers=2, dim=8, heads=4, kv_heads=2, seq=4, vocab=11)
    assert four.parameters_per_rank(cfg, 1) == cfg.parameters()
    head = 2 * 8  # one kv head
    block = (10 * 64) // 4 + 2 * 8 * head // 8 + 4 * 8  # two ranks for each
    assert four.parameters_per_rank(cfg, 4) == 2 * block + 2 * 8 + 2 * 3 * 8
    llama = replace(cfg, gated=True, ffn=20)
    block = (2 * 64 + 3 * 8 * 20) // 4 + 2 * 8 * head // 8 + 2 * 8  # a gate, too; no biases
    assert four.parameters_per_rank(llama, 4) == 2 * block + 8 + 2 * 3 * 8


def test_traffic_of_the_lesson(four):
    cfg, t = common.PRESETS["7b"], 8
    calls, payload, wire = four.traffic(cfg, 3, 2, t, 2, sums=4)["all_reduce"]
    x = 2 * cfg.seq * cfg.dim * 2
    assert calls == 3 * (4 * cfg.layers + 2 + 2) + 1
    assert payload == pytest.approx(3 * (4 * cfg.layers + 2) * x, rel=1e-3)
    assert wire == pytest.approx(2 * 7 / 8 * payload, rel=1e-9)
    again, more, _ = four.traffic(cfg, 3, 2, t, 2, "full", 4)["all_reduce"]
    assert (again - calls, more - payload) == (3 * cfg.layers, 3 * cfg.layers * x)
    assert four.traffic(cfg, 3, 2, t, 2, "selective", 4)["all_reduce"][0] == calls


def classes_of_chapter_01():
    """Of activations: a chapter says which share of each of them its ranks keep."""
    tables = chapter("01_single_gpu").kept_for_backward(LARGE, 1)
    return {kind for table in tables for *_, kind in table}


def test_activations_of_the_lesson(four):
    """A_in / t + A_out: what is cut falls as 1/t, and the rest does not change."""
    cfg = common.PRESETS["7b"]
    assert classes_of_chapter_01() <= four.kept(cfg, 2).keys()
    one, two, four_ranks = (activation_bytes(cfg, 1, 2, four.kept(cfg, t)) for t in (1, 2, 4))
    rope = cfg.seq * cfg.dim // cfg.heads * 2
    outside = (2 * cfg.layers + 1) * (2 * cfg.dim + 2) * cfg.seq * 2 + 19 * cfg.seq + rope
    assert (two - outside) * 2 == pytest.approx(one - outside, rel=1e-9)
    assert (four_ranks - outside) * 4 == pytest.approx(one - outside, rel=1e-9)


def test_when_ranks_stop_paying(four):
    """The three steps of the lesson, and the numbers in it."""
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
        ffn = 28672  # Llama 3's 70B: up, gate and down
        pays = four.ranks_that_pay(3 * ffn / 8, e, flops, bandwidth)
        compute = 3 * 2 * h * ffn / (pays * flops)
        assert compute == pytest.approx(2 * (pays - 1) / pays * h * e / bandwidth)
    on_eight = four.sending_over_computing(8, h, e, *MACHINES["H100, NVLink 4"])
    assert round(on_eight, 2) == 0.47
    # The scaling book's t < F·W/C, for TPU v5p (C/W = 2550): F = 30,000 is 4 h.
    assert four.ranks_that_pay(7500, 2, 2550, 1) == pytest.approx(1 + 11.76, abs=0.01)


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (("--heads=4",), 3, "--heads 4, --kv-heads 4 .* do not fit 3 .*; --nproc_per_node 2 would"),
        (("--heads=4",), 8, "--heads 4, --kv-heads 4 .* do not fit 8 .*; --nproc_per_node 4 would"),
        (
            ("--dim=96", "--heads=12", "--kv-heads=4"),
            6,
            "--heads 12, --kv-heads 4 and --ffn 384 do not fit 6 .*; --nproc_per_node 4 would work",
        ),
        (
            ("--variant=torch",),
            8,
            r"--heads 8, --kv-heads 4 .* 8 .* \(torch cannot share a kv head\); .* 4 would work",
        ),
        (("--variant=torch", "--heads=8", "--kv-heads=2"), 5, "--heads 8, .* 2 would work"),
        (("--ffn=30",), 4, "--heads 8, .* --ffn 30 do not fit 4 .*; --nproc_per_node 2 would work"),
        (("--micro-batch=3",), 2, "--batch 8 is not a multiple of .*; --batch 9 would work"),
    ],
)
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(FOUR, *flags, WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors
