"""Chapter 03: every stage gives one GPU's numbers, and holds and sends what the formulas say."""

import functools
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from common import Config
from lab.run import anatomy, meters
from tests.conftest import SMALL, STEPS, TEXT, chapter, run_main, sample
from tests.support.runs import check_run, runs

THREE = "03_zero"
TRAINING = (*SMALL, STEPS, f"--data={TEXT}")
FLOAT64 = (*TRAINING, "--dtype=float64", "--ignore=0.5")
CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL


@pytest.fixture(scope="module")
def three():
    return chapter(THREE)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("03"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    record, _ = check_run(ranks, tmp_path, run)
    names = [check["name"] for check in record["checks"]]
    assert ("optimizer states, on the CPU" in names) == ("--offload" in run.flags)
    assert ("gathered parameters, at the peak" in names) or "--variant=zero3" not in run.flags


def test_stages_agree_bit_for_bit(ranks, tmp_path):
    flags = (*FLOAT64, "--layers=1", "--steps=2", "--batch=6", "--clip=0.1")
    first, *others = [ranks(3)(run_main, THREE, (*flags, f"--variant={variant}"), tmp_path)[0][1]
                      for variant in ("zero1", "zero2", "zero3")]
    for run in others:
        assert run["loss"] == first["loss"] and run["grad_norm"] == first["grad_norm"]
        assert run["max_param_diff"] == first["max_param_diff"]


# ------------------------------------------------------------------------------- ZeRO++


@pytest.mark.parametrize(("switch", "steps"), sample([
    ("--secondary-shard", 3), ("--secondary-shard", 50), ("--no-secondary-shard", 3)]))
def test_quantized_runs_stay_close_and_send_what_the_formula_says(ranks, tmp_path, switch, steps):
    more = ("--variant=zeropp", "--shard-size=2", "--batch=4", f"--steps={steps}", switch)
    (status, run, output), *_ = ranks(4)(run_main, THREE, (*TRAINING, *more), tmp_path)
    assert status == 0 and all(check["ok"] for check in run["checks"]), output
    assert len(run["reference_loss"]) == steps and run["tolerance"]["loss"] == 0.01
    assert 0 < run["max_loss_diff"] < 0.01 and 0 < run["max_grad_diff"]
    sent = sum(op["wire_bytes"] for op in run["comm"].values())
    usual = chapter(THREE).traffic(CONFIG, 3, 4, 1)
    share = sent / sum(wire for _, _, wire in usual.values())
    assert f": {share:.0%}" in output and share < 0.65


def test_quantization_errs_by_half_a_step_at_most(three):
    generator = torch.Generator().manual_seed(0)
    for shape in ((5,), (256,), (1000,), (3, 700)):
        x = torch.randn(shape, generator=generator) * torch.randn(1, generator=generator).exp()
        numbers, scales = three.quantize(x)
        assert numbers.shape == x.shape and numbers.dtype == torch.int8
        assert scales.shape[-1] == -(-shape[-1] // three.BLOCK)
        again = three.dequantize(numbers, scales)
        step = scales.repeat_interleave(three.BLOCK, -1)[..., : shape[-1]]
        assert ((again - x).abs() <= 0.5001 * step).all()
        assert again.abs().max().item() == pytest.approx(x.abs().max().item(), rel=1e-6)
    assert not three.dequantize(*three.quantize(torch.zeros(300))).any()


# ------------------------------------------------------------------------------- groups of ranks


ONE_STEP = (*SMALL, f"--data={TEXT}", "--layers=1", "--steps=1", "--no-verify", "--batch=8")


def members(flags, folder):
    """For a rank of the pool: each collective of a run, and the ranks among which it was."""
    seen, count = set(), meters.CommMeter.count

    def note(meter, op, wire, namespace, args, result):
        seen.add((op, *dist.get_process_group_ranks(meters.group_of(args))))
        return count(meter, op, wire, namespace, args, result)

    with mock.patch("lab.run.meters.CommMeter.count", note):
        run_main(THREE, flags, folder)
    return seen


@pytest.mark.parametrize("variant", sample(["hsdp", "zeropp"]))
def test_who_shares_a_copy_is_in_one_machine(ranks, tmp_path, variant):
    """Of 4 ranks on two machines. Other groups of as many would send as much, over slow links."""
    flags = (*ONE_STEP, f"--variant={variant}", "--shard-size=2")
    for rank, seen in enumerate(ranks(4)(members, flags, tmp_path)):
        machine, across = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        every = 0, 1, 2, 3
        both = {("all_gather", *machine), ("reduce_scatter", *machine), ("all_reduce", *machine)}
        assert seen == (both | {("all_reduce", *across)} if variant == "hsdp" else {
            ("all_gather", *every), ("all_gather", *machine), ("reduce_scatter", *every),
            ("all_reduce", *every)})


def test_by_default_those_of_a_machine(three, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for variant, size in (("hsdp", 2), ("zeropp", 2), ("zero3", 8)):
        args = common.parse(THREE, "", three.VARIANTS, three.flags, [f"--variant={variant}"])
        three.requires(args, 8)
        assert args.shard_size == size


# ------------------------------------------------------------------------------- what is when there


def units_of(model):
    """The chapter's units of a model, shared by all ranks."""
    three = chapter(THREE)
    return three.make_units(model, functools.partial(three.Unit, group=dist.group.WORLD))


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


def frozen_and_unused():
    """Gradient norms of three units: of all ranks, of one rank only, of none; the first parameters
    are frozen, in no unit, and stay."""
    three = chapter(THREE)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))).double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    model[0].requires_grad_(False)
    before, units = model[0].weight.clone(), units_of(model)
    for unit in units:
        unit.make_room_for_gradients()
    x = model[1](model[0](torch.ones(1, 3, dtype=torch.float64)))
    (x if dist.get_rank() else model[2](x)).sum().backward()
    for unit in units:
        unit.start_reduce(in_place=True)
        unit.finish_reduce()
    norms = [common.grad_norm([unit.shard], unit.group).item() for unit in units]
    three.update(units, torch.optim.AdamW([unit.shard for unit in units], 0.1), clip=None)
    assert model[0].weight.equal(before)
    return norms


def test_frozen_and_unused_parameters(ranks):
    for used, used_by_one, unused in ranks(2)(frozen_and_unused):
        assert used > 0 and used_by_one > 0 and unused == 0


# ------------------------------------------------------------------------------- the formulas


def test_the_table_of_the_lesson(three):
    """P, G and O are 4, 4 and 8 bytes per parameter, and a stage divides them by N."""
    cfg, n = common.PRESETS["7b"], 64
    psi = cfg.parameters()

    def held(stage, n, precision="fp32", **more):
        args = Namespace(model=cfg, optimizer="adamw", dtype="float32", precision=precision, **more)
        results = list(anatomy.state_bytes(args, {"zero": stage, "holders": n}, 4).values())
        if not more:
            assert three.held(psi, stage, n, precision) == pytest.approx(results, rel=1e-5)
        return [size / psi for size in results]


    def about(*sizes):
        return pytest.approx(sizes, rel=1e-5)

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
