"""Chapter 03's units: of any module, what is there when, and the formulas."""

import copy
import functools
import re
from argparse import Namespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import tree_leaves

import common
from common import Config
from lab.bench import anatomy
from tests.chapters.test_03_zero import (
    THREE,
    three,  # noqa: F401  (fixtures)
)
from tests.conftest import chapter

# ------------------------------------------------------------------------------- any module

OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.001, momentum=0.9, nesterov=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}


def units_of(model):
    three = chapter(THREE)
    return three.make_units(model, functools.partial(three.Unit, group=dist.group.WORLD))


def any_optimizer(name):
    """Beside an optimizer of all: in two groups, by one of PyTorch's learning rate schedulers."""
    three, rank, n = chapter(THREE), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    whole = copy.deepcopy(model)

    def in_two_groups(first, last):
        groups = [{"params": first, "weight_decay": 0.1}, {"params": last}]
        return OPTIMIZERS[name](groups)

    plain = in_two_groups(whole[0].parameters(), whole[2].parameters())
    units = units_of(model)
    ours = in_two_groups(*([unit.shard] for unit in units))
    largest = [2 * plain.defaults["lr"], plain.defaults["lr"]]
    schedulers = [OneCycleLR(optimizer, largest, total_steps=4, cycle_momentum=name == "AdamW")
                  for optimizer in (ours, plain)]
    inputs = torch.arange(12.0 * n, dtype=torch.float64).sin().view(n, 4, 3)
    for _ in range(4):
        model.zero_grad()
        for unit in units:
            unit.make_room_for_gradients()
        model(inputs[rank]).square().sum().backward()
        for unit in units:
            unit.shard.grad = None
            unit.start_reduce(in_place=True)
            unit.finish_reduce()
        three.update(units, ours, clip=None)
        for unit in units:
            common.all_gather(unit.full, unit.shard.data, unit.group)
        plain.zero_grad()
        whole(inputs).square().sum().backward()
        plain.step()
        for scheduler in schedulers:
            scheduler.step() if scheduler.last_epoch < 3 else None
    off = [(p - q).abs().max().item() for p, q in zip(model.parameters(), whole.parameters())]
    states = tree_leaves(list(ours.state.values()))
    return max(off), sum(state.numel() for state in states if torch.is_tensor(state))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_that_treats_each_number_by_itself(ranks, name):
    states, steps = {"AdamW": (2, 2), "SGD": (1, 0), "Adagrad": (1, 2), "RMSprop": (1, 2)}[name]
    for off, elements in ranks(3)(any_optimizer, name):
        assert off < 1e-12
        assert elements == states * (10 + 6) + steps  # 28 and 16 numbers on 3 ranks; a count each


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


def two_dtypes():
    model = nn.Linear(2, 2)
    model.bias.data = model.bias.data.double()
    with pytest.raises(AssertionError, match="a unit needs parameters of one dtype"):
        chapter(THREE).Unit(list(model.parameters()), dist.group.WORLD)


def test_what_cannot_work_is_refused(ranks):
    ranks(1)(two_dtypes)


@pytest.mark.parametrize(("flags", "world", "line"), [
    ("--preset=gpt2", 1, "--preset gpt2 ties embedding and head.*--variant zero2 would"),
    ("--preset=gpt2 --variant=torch --stage=2", 1, "--preset gpt2 ties .*; without --preset"),
    ("--variant=hsdp --shard-size=3", 8, "--shard-size 3 does not divide 8 .*; --shard-size 1"),
    ("--variant=hsdp --shard-size=6", 8, "--shard-size 6 does not divide 8 .*; --shard-size 2"),
    ("--precision=bf16 --dtype=bfloat16", 1, "--precision bf16 rounds .*--dtype float32 would"),
    ("--variant=torch --offload", 1, "--offload means nothing .*; --variant zero3 would"),
    ("--variant=zeropp --keep-gathered", 1, "--keep-gathered means .*; --variant zero3 would"),
    ("--variant=zero1 --prefetch=2", 1, "--prefetch means nothing .*; --variant zero3 would"),
    ("--variant=zero3 --shard-size=1", 1, "--shard-size means .*; --variant hsdp would"),
    ("--variant=zero3 --stage=2", 1, "--stage means nothing .*; --variant torch would"),
    ("--no-quantized-weights", 1, "--quantized-weights means nothing .*; --variant zeropp"),
    ("--variant=zeropp --no-quantized-gradients", 1, ".*--no-quantized-gradients"),
    ("--prefetch=3", 1, r"--prefetch: 3 is no whole number in \[0, 3\); --prefetch 1 would"),
    ("--stage=0", 1, r"--stage: 0 is no whole number in \[1, 4\); "),
    ("--blocks-per-unit=5", 1, "--blocks-per-unit 5: a unit has 4 here; --blocks-per-unit 4 would"),
    ("--variant=torch --stage=1 --blocks-per-unit=2", 1, "--blocks-per-unit 2: a unit has 1 here; "
     "--blocks-per-unit 1 would"),
])
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(THREE, *flags.split(), WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors


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
    expected = {
        1: (4 * psi, 4 * psi, 8 * psi / n),
        2: (4 * psi, 4 * psi / n, 8 * psi / n),
        3: (4 * psi / n, 4 * psi / n, 8 * psi / n),
    }

    def held(stage, n, precision="fp32", **more):
        args = Namespace(model=cfg, optimizer="adamw", dtype="float32", precision=precision, **more)
        found = list(anatomy.state_bytes(args, {"zero": stage, "holders": n}, 4).values())
        if not more:
            assert three.held(psi, stage, n, precision) == pytest.approx(found, rel=1e-5)
        return found

    for stage, values in expected.items():
        assert held(stage, n) == pytest.approx(values, rel=1e-5)
    said = re.search(r"7 billion (\S+) GB. On 8 ranks\s+that becomes (\S+) GB .zero1., (\S+) GB "
                     r".zero2. or (\S+) GB", three.__doc__).groups()
    whole = [sum(held(stage, n)) / psi * 7 for stage, n in ((1, 1), (1, 8), (2, 8), (3, 8))]
    assert [float(number) for number in said] == pytest.approx(whole, rel=1e-5)
    p, g, o = 2 * psi, 4 * psi, 12 * psi
    assert held(1, 1, precision="bf16") == pytest.approx((p, g, o), rel=1e-5)  # nobody to share
    assert held(3, n, precision="bf16") == pytest.approx((p / n, g / n, o / n), rel=1e-5)
    assert held(2, n, precision="bf16") == pytest.approx((p, g / n, o / n), rel=1e-5)
    assert held(2, n, offload=True) == pytest.approx((4 * psi, 4 * psi / n, o / n), rel=1e-5)


def test_traffic_of_the_lesson(three):
    cfg, n, m = common.PRESETS["1b"], 8, 3
    size = 4 * cfg.parameters()

    def wire(stage, **more):
        sent = three.traffic(cfg, stage, n, m, **more)
        return sum(wire for _, _, wire in sent.values()) / ((n - 1) / n * size)

    assert wire(1) == pytest.approx(2, rel=1e-5)
    assert wire(2) == pytest.approx(m + 1, rel=1e-5)
    head = 4 * (cfg.vocab + 2) * cfg.dim
    assert wire(3) == pytest.approx((3 - head / size) * m, rel=1e-5)
    assert wire(3, keep_gathered=True) == pytest.approx(2 * m, rel=1e-5)
    hybrid = three.traffic(cfg, 3, n, m, replicas=4)["all_reduce"]
    assert hybrid[2] == pytest.approx(2 * 3 / 4 * size / n, rel=1e-5)


def test_tokens_to_hide_of_the_lesson(three):
    """A number's p bytes behind 2 FLOPs a token, and g bytes, or g and p, behind 4."""
    rates = 989e12, 450e9
    forward, backward = (three.tokens_to_hide(*sent, 8, *rates) for sent in ((2, 1), (6, 2)))
    assert f"NVLink, {forward:,.0f} and, in stage 3, {backward:,.0f}." in three.__doc__
    numbers, n = 10**6, 8
    sending = 6 * numbers * (n - 1) / n / rates[1]
    assert sending == pytest.approx(4 * numbers * backward / rates[0])


def test_units_of_several_blocks(three):
    """Fewer calls send as much, and more is gathered at the peak."""
    cfg, n, m = common.Config(layers=7, dim=8, heads=2, kv_heads=1, seq=4, vocab=8), 4, 3
    block = three.padded_sizes(cfg, n)[1]
    assert three.padded_sizes(cfg, n, 3) == [64, 3 * block, 3 * block, block, 80]
    args = Namespace(model=cfg, prefetch=1, dtype="float32", precision="fp32")
    sent = {k: three.traffic(cfg, 3, n, m, k=k) for k in range(1, 8)}
    for k, operators in sent.items():
        groups = -(-7 // k)
        assert operators["all_gather"][0] == m * (2 * groups + 3)
        assert operators["reduce_scatter"][0] == m * (groups + 2)
        assert [of[1:] for of in operators.values()] == [of[1:] for of in sent[1].values()]
        answer = {"zero": 3, "holders": n, "blocks": k}
        peak = anatomy.gathered_peak(args, answer, 4) / 4
        assert peak == min(2 * k, 7) * block + (80 if k == 7 else 0)  # and the head
        assert [size for size, *_ in anatomy.flat_units(cfg, answer)] == three.padded_sizes(
            cfg, 1, k)
    assert "all_gather 2·ceil(L/k) + 3 times" in three.__doc__


def test_sizes_with_padding(three):
    cfg = Config(layers=2, dim=8, heads=2, kv_heads=1, seq=4, vocab=11)
    block = 2 * 64 + 2 * 32 + 8 * 64 + 4 * 8
    assert three.padded_sizes(cfg, 1) == [88, block, block, 104]
    assert three.padded_sizes(cfg, 7) == [91, 742, 742, 105]

    def peak(n=1, batch=1, **more):
        args = Namespace(model=cfg, shares=1, micro_batch=1, batch=batch, dtype="float32",
                         precision="fp32", **more)
        formula = anatomy.gathered_peak if more else anatomy.gradient_peak
        return formula(args, {"zero": 3, "holders": n}, 4) / 4

    assert peak(prefetch=0) == block and peak(prefetch=1) == 2 * block
    assert peak(prefetch=2) == 2 * block + 104
    assert peak(prefetch=0, keep_gathered=True) == 2 * block + 104 + 88
    # On 7 ranks: two blocks of 742, and shards: a block's 106, the head's 15; or those of all.
    assert peak(7) == 2 * 742 + 106 + 15
    assert peak(7, batch=2) == 2 * 742 + 106 + (91 + 742 + 742 + 105) / 7


def unit_of_ten_numbers():
    """The lesson's: what each rank's shard is, and whether a gather is a write to a parameter."""
    w = nn.Parameter(torch.arange(6.0).view(2, 3))
    b = nn.Parameter(10 + torch.arange(4.0))
    unit = chapter(THREE).Unit([w, b], dist.group.WORLD)
    chapter(THREE).keep_only_shards([unit])
    written, full = w._version, unit.full._version
    unit.start_gather()
    unit.finish_gather()
    whole = w.tolist(), b.tolist()
    return unit.shard.tolist(), whole, w._version - written, unit.full._version - full


def test_the_unit_of_the_lesson(ranks, three):
    rows = [[0, 1, 2], [3, 4, 5], [10, 11, 12], [13, 0, 0]]
    names = [f"w{i // 3}{i % 3}" for i in range(6)] + [f"b{i}" for i in range(4)] + ["0", "0"]
    for rank, (shard, whole, of_parameter, of_full) in enumerate(ranks(4)(unit_of_ten_numbers)):
        assert shard == rows[rank]
        assert whole == ([rows[0], rows[1]], [10, 11, 12, 13])
        assert of_parameter == 0 < of_full  # autograd would refuse what was saved of `full` itself
        assert f"rank {rank}    {' '.join(names[3 * rank:3 * rank + 3])}" in three.__doc__


def masters_of_rounded_shards(offload):
    """A shard that is rounded stays the unit's, and a view of what is gathered."""
    p, args = nn.Parameter(torch.tensor([1.0, 1 + 2**-10])), Namespace(offload=offload)
    unit = chapter(THREE).Unit([p], dist.group.WORLD)
    sgd = lambda masters: torch.optim.SGD(masters, 1.0)
    mixed = lambda shards, device: common.Masters(shards, sgd, torch.bfloat16, device)
    chapter(THREE).make_optimizer(Namespace(args=args, mixed=mixed), [unit])
    unit.full[0] = 2
    dtypes = {p.grad_dtype, unit.shard.grad_dtype, unit.shard.master.dtype}
    return unit.shard.master.tolist(), unit.shard.tolist(), p.tolist(), p.dtype, dtypes


@pytest.mark.parametrize("offload", [False, True])
def test_masters_are_made_of_what_is_not_rounded(ranks, offload):
    [found] = ranks(1)(masters_of_rounded_shards, offload)
    assert found == ([1, 1 + 2**-10], [2, 1], [2, 1], torch.bfloat16, {torch.float32})
