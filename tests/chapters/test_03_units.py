"""Chapter 03's units: of any module, what is there when, and the formulas."""

import functools
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from lab.run import anatomy
from tests.chapters.test_03_zero import (
    THREE,
    three,  # noqa: F401  (fixtures)
)
from tests.conftest import chapter
from tests.support.refused import hold_refusals

# ------------------------------------------------------------------------------- any module

def units_of(model):
    three = chapter(THREE)
    return three.make_units(model, functools.partial(three.Unit, group=dist.group.WORLD))


def frozen_and_unused():
    """What is frozen is not decayed, what no rank or only one has used counts as zero there."""
    three = chapter(THREE)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    model[0].requires_grad_(False)
    before, x = model[0].weight.clone(), torch.ones(1, 3, dtype=torch.float64)
    units, results = units_of(model), []
    decay = torch.optim.AdamW([unit.shard for unit in units], 0.1, weight_decay=0.5)
    for _ in range(2):
        model.zero_grad()
        for unit in units:
            unit.make_room_for_gradients()
        x1 = model[1](model[0](x))
        (x1 if dist.get_rank() else model[2](x1)).sum().backward()
        for unit in units:
            unit.shard.grad = None
            unit.start_reduce(in_place=True)
            unit.finish_reduce()
        results.append([common.grad_norm([unit.shard], unit.group).item() for unit in units])
    three.update(units, decay, clip=None)
    used, sometimes, unused = results[0]
    return model[0].weight.equal(before), results[0] == results[1], used, sometimes, unused


def test_frozen_and_unused_parameters(ranks):
    for untouched, twice, used, sometimes, unused in ranks(2)(frozen_and_unused):
        assert untouched and twice and used > 0 and sometimes > 0 and unused == 0


def test_refusals(run_chapter):
    hold_refusals(run_chapter, THREE, [
        ("--preset=gpt2", 1, "--preset gpt2", "--preset tiny"),
        ("--preset=gpt2 --variant=torch --stage=2", 1, "--preset gpt2", "--preset tiny"),
        ("--variant=hsdp --shard-size=6", 8, "--shard-size 6", "--shard-size 2"),
        ("--precision=bf16 --dtype=bfloat16", 1, "--precision bf16", "--dtype float32"),
        ("--variant=torch --offload", 1, "--offload", "--variant zero3"),
        ("--variant=zero3 --shard-size=1", 1, "--shard-size", "--variant hsdp"),
        ("--variant=zero3 --stage=2", 1, "--stage", "--variant torch"),
        ("--no-quantized-weights", 1, "--quantized-weights", "--variant zeropp"),
        ("--prefetch=3", 1, "--prefetch", "--prefetch 1"),
        ("--blocks-per-unit=5", 1, "--blocks-per-unit 5", "--blocks-per-unit 4"),
        ("--variant=torch --stage=1 --blocks-per-unit=2", 1, "--blocks-per-unit 2",
         "--blocks-per-unit 1"),
    ])  # fmt: skip


# ------------------------------------------------------------------------------- what is when there


def watched(stage, prefetch, keep):
    """What is there whenever a unit's forward or backward begins, and in the end: which units are
    gathered, which are on their way, which have gradients, and which are being reduced."""
    three, seen = chapter(THREE), []
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 5))
    units = units_of(model)
    sgd = torch.optim.SGD([unit.shard for unit in units], 0.1)

    def note(name):
        where = [i for i, unit in enumerate(units) if unit.full.untyped_storage().nbytes()]
        coming = [i for i, unit in enumerate(units) if unit.gathering]
        gradients = [i for i, module in enumerate(model)
                     if any(p.grad is not None for p in module.parameters())]
        sent = [i for i, unit in enumerate(units) if getattr(unit, "reducing", None)]
        seen.append((name, where, coming, gradients, sent))

    for i, module in enumerate(model):
        module.register_forward_pre_hook(lambda module, inputs, i=i: note(f"f{i}"))
        module.register_full_backward_pre_hook(lambda module, gradient, i=i: note(f"b{i}"))
    tokens = torch.tensor([[0, 1, 2]])
    step = functools.partial(three.zero1_step, stage=2)
    if stage == 3:
        step = functools.partial(three.zero3_step, ahead=prefetch, keep_gathered=keep)
        three.keep_only_shards(units)
    step(model, units, sgd, [(tokens, tokens)] * 2, valid=6, clip=None)
    note("end")
    return seen


ORDER = [*"f0 f1 f2 f3 b3 b2 b1 b0".split() * 2, "end"]  # of two micro-batches


@pytest.mark.parametrize(("prefetch", "keep"), [(0, False), (1, False), (2, False), (1, True)])
def test_nothing_gathered_outlives_its_use(ranks, prefetch, keep):
    for seen in ranks(2)(watched, 3, prefetch, keep):
        assert [name for name, *_ in seen] == ORDER
        for name, where, coming, *_ in seen[:-1]:
            i, forward = int(name[1]), name[0] == "f"
            ahead = [j for j in range(4) if 0 < (j - i if forward else i - j) <= prefetch]
            kept = [j for j in range(4) if keep and (j < i or not forward and j <= i)]
            assert where == sorted({i, *ahead, *kept})
            assert coming == ([] if keep and not forward else ahead)  # still on their way
        assert seen[-1][1:3] == ([], [])


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_reduced_in_backward_and_freed_at_once(ranks, stage):
    for seen in ranks(2)(watched, stage, 0, False):
        assert [name for name, *_ in seen] == ORDER
        for name, where, _, gradients, sent in seen:
            # There is room for those of the unit that computes, and the ones before are gone.
            assert gradients == ([int(name[1])] if name[0] == "b" else [])
            assert sent == ([int(name[1]) + 1] if name in ("b2", "b1", "b0") else [])
            assert stage == 3 or where == [0, 1, 2, 3]


# ------------------------------------------------------------------------------- the formulas


def test_the_table_of_the_lesson(three):
    """P, G and O are 4, 4 and 8 bytes per parameter, and a stage divides them by N."""
    cfg, n = common.PRESETS["7b"], 64
    psi = cfg.parameters()

    def held(stage, n, precision="fp32", **more):
        args = Namespace(model=cfg, optimizer="adamw", dtype="float32", precision=precision, **more)
        found = list(anatomy.state_bytes(args, {"zero": stage, "holders": n}, 4).values())
        if not more:
            assert three.held(psi, stage, n, precision) == pytest.approx(found, rel=1e-5)
        return [size / psi for size in found]

    about = lambda *sizes: pytest.approx(sizes, rel=1e-5)
    assert held(1, n) == about(4, 4, 8 / n)
    assert held(2, n) == about(4, 4 / n, 8 / n)
    assert held(3, n) == about(4 / n, 4 / n, 8 / n)
    assert held(2, n, offload=True) == about(4, 4 / n, 12 / n)
    assert held(1, 1, precision="bf16") == about(2, 4, 12)  # there is nobody to share with
    assert held(2, n, precision="bf16") == about(2, 4 / n, 12 / n)
    assert held(3, n, precision="bf16") == about(2 / n, 4 / n, 12 / n)
    for stage, ranks in ((1, 1), (1, 8), (2, 8), (3, 8)):
        assert f"{7 * sum(held(stage, ranks)):g} GB" in three.__doc__


def test_traffic_of_the_lesson(three):
    cfg, n, m = common.PRESETS["1b"], 8, 3
    size = 4 * cfg.parameters()

    def wire(stage, **more):
        sent = three.traffic(cfg, stage, n, m, **more)
        return sum(wire for _, _, wire in sent.values()) / ((n - 1) / n * size)

    assert [wire(1), wire(2)] == pytest.approx([2, m + 1], rel=1e-5)
    head = 4 * (cfg.vocab + 2) * cfg.dim
    assert wire(3) == pytest.approx((3 - head / size) * m, rel=1e-5)
    assert wire(3, keep_gathered=True) == pytest.approx(2 * m, rel=1e-5)


def test_tokens_to_hide_of_the_lesson(three):
    """A number's p bytes behind 2 FLOPs a token, and g bytes, or g and p, behind 4."""
    rates = 989e12, 450e9
    forward, backward = (three.tokens_to_hide(*sent, 8, *rates) for sent in ((2, 1), (6, 2)))
    assert f" {forward:,.0f} " in three.__doc__ and f" {backward:,.0f}." in three.__doc__
    numbers, n = 10**6, 8
    sending = 6 * numbers * (n - 1) / n / rates[1]
    assert sending == pytest.approx(4 * numbers * backward / rates[0])
