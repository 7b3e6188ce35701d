"""Chapter 03: every stage gives one GPU's numbers, and holds and sends what the formulas say."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import common
from common import Config

THREE = "03_zero"
SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--steps=3")
FLOAT64 = (*SMALL, "--dtype=float64", "--ignore=0.5", f"--data={TEXT}")


@pytest.fixture(scope="module")
def three():
    return chapter(THREE)


# ------------------------------------------------------------------------------- same as one GPU

WORLDS = {  # flags that go with a number of ranks; 3 and 8 ranks do not divide the units
    1: ("--batch=6", "--micro-batch=2", "--clip=0.1"),
    2: ("--batch=8", "--micro-batch=1", "--clip=0.1", "--optimizer=momentum"),
    3: ("--batch=6", "--optimizer=sgd", "--kv-heads=4", "--vocab=257"),
    4: ("--batch=8", "--micro-batch=1", "--dim=40", "--heads=2"),
    8: ("--batch=16", "--micro-batch=1", "--clip=0.1", "--layers=1", "--vocab=259"),
}


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        *itertools.product(WORLDS, [(f"--variant=zero{stage}",) for stage in (1, 2, 3)]),
        (2, ("--variant=zero3", "--prefetch=0")),
        (2, ("--variant=zero3", "--prefetch=2")),
        (2, ("--variant=zero3", "--keep-gathered")),
        (3, ("--variant=hsdp",)),  # one group of three
        (4, ("--variant=hsdp",)),  # two groups of two
        (4, ("--variant=hsdp", "--shard-size=1")),
        (8, ("--variant=hsdp", "--shard-size=4", "--prefetch=2")),
        *itertools.product([2, 4], [("--variant=torch", f"--stage={s}") for s in (1, 2, 3)]),
    ],
    ids=str,
)  # fmt: skip
def test_same_as_one_gpu(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, *WORLDS[world], *flags)
    hold_to_one_gpu(ranks(world)(run_main, THREE, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", ["zero1", "zero2", "zero3", "hsdp"])
def test_offload_changes_no_number(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--batch=8", "--micro-batch=1", "--offload", f"--variant={variant}")
    (status, run, output), *_ = ranks(4)(run_main, THREE, flags, tmp_path)
    assert status == 0 and run["max_grad_diff"] < 1e-12 and run["max_param_diff"] < 1e-12, output
    [states] = [c for c in run["checks"] if c["name"] == "optimizer states, on the CPU"]
    group = 2 if variant == "hsdp" else 4
    masters = 3 * 8 * Config(2, 32, 4, 2, 16, 256).parameters() // group  # and two moments
    assert states["measured"] == masters + 4 * 4


@pytest.mark.parametrize(
    "flags",
    [
        ("--variant=zero1", "--optimizer=sgd"),
        ("--variant=zero1", "--reduce-fp32"),
        ("--variant=zero2", "--reduce-fp32", "--micro-batch=1"),
        ("--variant=zero3", "--micro-batch=1", "--clip=0.5", "--optimizer=sgd"),
        ("--variant=hsdp", "--reduce-fp32", "--offload"),
        ("--variant=zeropp",),
    ],
    ids=str,
)
def test_bf16_with_master_shards(ranks, tmp_path, flags):
    flags = (*SMALL, f"--data={TEXT}", "--precision=bf16", "--batch=8", *flags)
    (status, run, output), *_ = ranks(4)(run_main, THREE, flags, tmp_path)
    assert status == 0 and all(check["ok"] for check in run["checks"]), output
    rounding = "int8" if "--variant=zeropp" in flags else "bfloat16"
    assert run["tolerance"] == common.tolerances(rounding, run["config"]["optimizer"])


def fp32_sums(reduce_fp32):
    """512 times 1 on rank 0 and 1 on rank 1, in two micro-batches: bf16 has 8 bits for the sums."""
    three, rank = chapter(THREE), dist.get_rank()
    model = nn.Linear(1, 1, bias=False)
    sums = torch.float32 if reduce_fp32 else None
    zero = three.Zero3(model, [model], dist.group.WORLD, dtype=torch.bfloat16, sum_dtype=sums)
    for x in (512.0, 1.0):
        zero(torch.full((1, 1), x if rank == 0 else 1.0, dtype=torch.bfloat16)).backward()
        zero.finish_backward()
    return three.shard_norm(zero.units, dist.group.WORLD).item()


def test_reduce_fp32_keeps_what_bf16_loses(ranks):
    assert ranks(2)(fp32_sums, True) == [515.0] * 2
    assert ranks(2)(fp32_sums, False)[0] != 515.0


# ------------------------------------------------------------------------------- ZeRO++


@pytest.mark.parametrize(
    ("world", "size", "micro_batch"), [(2, 1, 2), (3, 3, 2), (4, 2, 1), (8, 4, 2)]
)
def test_secondary_shards_change_no_number(ranks, tmp_path, world, size, micro_batch):
    off = ("--no-quantized-weights", "--no-quantized-gradients", f"--shard-size={size}")
    batch = (f"--batch={2 * world}", f"--micro-batch={micro_batch}", "--layers=1")
    flags = (*FLOAT64, "--variant=zeropp", *off, *batch)
    (status, run, output), *_ = ranks(world)(run_main, THREE, flags, tmp_path)
    assert status == 0 and run["max_grad_diff"] < 1e-12 and run["max_param_diff"] < 1e-12, output


@pytest.mark.parametrize(
    ("switches", "steps"),
    [(("", "", ""), 50), (("", "no-", "no-"), 6), (("no-", "no-", ""), 6), (("no-", "", ""), 6)],
    ids=str,
)
def test_quantized_runs_stay_close_and_send_what_the_formula_says(ranks, tmp_path, switches, steps):
    names = "quantized-weights", "secondary-shard", "quantized-gradients"
    flags = [f"--{no}{name}" for no, name in zip(switches, names)]
    more = ("--variant=zeropp", "--batch=4", f"--steps={steps}", f"--data={TEXT}")
    (status, run, output), *_ = ranks(4)(run_main, THREE, (*SMALL, *more, *flags), tmp_path)
    assert status == 0 and all(check["ok"] for check in run["checks"]), output
    assert len(run["reference_loss"]) == steps and run["tolerance"]["loss"] == 0.01
    assert 0 < run["max_loss_diff"] < 0.01 and 0 < run["max_grad_diff"]
    assert ("all_to_all" in run["comm"]) == (switches[2] == "")
    if switches == ("", "", ""):
        sent = sum(op["wire_bytes"] for op in run["comm"].values())
        three = chapter(THREE)
        usual = three.traffic(Config(2, 32, 4, 2, 16, 256), 3, 4, 1)
        share = sent / sum(wire for _, _, wire in usual.values())
        assert f": {share:.0%}" in output and share < 0.45


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


@pytest.mark.parametrize("variant", ["zero1", "zero2"])
def test_tied_embedding_and_head(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--preset=gpt2", "--vocab=256", "--verify", f"--variant={variant}")
    (status, run, output), _ = ranks(2)(run_main, THREE, (*flags, "--batch=4"), tmp_path)
    assert status == 0 and run["max_grad_diff"] < 1e-12, output


@pytest.mark.parametrize("world", [2, 3])
def test_stages_agree_bit_for_bit(ranks, tmp_path, world):
    """And so does the same run, twice."""
    runs = []
    for variant in ("zero1", "zero2", "zero3", "zero3"):
        flags = (*FLOAT64, "--batch=6", "--clip=0.1", f"--variant={variant}")
        runs.append(ranks(world)(run_main, THREE, flags, tmp_path)[0][1])
    for run in runs[1:]:
        assert run["loss"] == runs[0]["loss"] and run["grad_norm"] == runs[0]["grad_norm"]
        assert run["max_param_diff"] == runs[0]["max_param_diff"]


@pytest.mark.parametrize(
    ("variant", "right", "wrong", "named"),
    [
        ("zero3", "common.reduce_scatter(summed, sent, group=self.group, async_op=True)",
         "common.reduce_scatter(summed, sent, dist.ReduceOp.MAX, self.group, True)", "gradients"),
        ("zero3", "self.gradient.add_(summed)\n        self.reducing = None\n\n    def take_g",
         "summed\n        self.reducing = None\n\n    def take_g", "gradients"),
        ("zero2", "    update.step()\n    zero.finish_step()\n", "    update.step()\n",
         "gradients"),
        ("hsdp", "        if self.replicas:\n", "        if False:\n", "gradients"),
        ("zero1", "            flat.zero_()\n", "            pass\n", "gradients"),
        ("zero1", "            if lo < hi:", "            if lo < hi and unit is update.units[0]:",
         "gradients"),
        ("zero3", "    dist.all_reduce(square, group=group)\n", "", "gradient norm"),
        ("zeropp", "dequantize(*received).sum(0)", "dequantize(*received)[0]", "gradient norm"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, variant, right, wrong, named):
    flags = (*FLOAT64, "--batch=8", "--micro-batch=1", f"--variant={variant}")
    flags += ("--shard-size=1",) * (variant == "hsdp")
    (status, _, output), *_ = ranks(2)(run_main, THREE, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


# ------------------------------------------------------------------------------- any module


class Odd(nn.Module):
    """Units with a frozen, an unused and a tied layer, and one whose output is a dictionary."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.frozen = nn.Linear(3, 5), nn.Linear(5, 5).requires_grad_(False)
        self.pair = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})
        self.pair["b"].weight = self.pair["a"].weight
        self.pair.forward = lambda x: {"x": self.pair["b"](self.pair["a"](x).tanh()) + x, "n": 7}
        self.last = nn.ModuleDict({"used": nn.Linear(5, 2), "unused": nn.Linear(5, 2)})
        self.last.forward = lambda out: self.last["used"](out["x"])

    def forward(self, x):
        return self.last(self.pair(self.frozen(self.first(x))))

    def units(self):
        return [self.first, self.frozen, self.pair, self.last]


def gradients_of_an_odd_module(stage, prefetch):
    three, rank, n = chapter(THREE), dist.get_rank(), dist.get_world_size()
    whole, module = Odd().double(), Odd().double()
    names = {p: name for name, p in module.named_parameters()}
    inputs = torch.arange(4.0 * 3 * 2 * n, dtype=torch.float64).cos().view(2, n, 4, 3)
    group = dist.group.WORLD
    if stage == 2:
        zero = three.Zero2(module, module.units(), group)
    else:
        zero = three.Zero3(module, module.units(), group, prefetch=prefetch)
    outputs = []
    for x in inputs:
        outputs.append((zero(x[rank]) - whole(x[rank])).abs().max().item())
        zero(x[rank]).square().sum().backward()
        zero.finish_backward()
        for r in range(n):
            whole(x[r]).square().sum().backward()
    worst = 0
    for name, piece in three.pieces(three.ShardUpdate(zero.units, lambda ps: None), names):
        p = dict(whole.named_parameters())[name]
        full = torch.zeros_like(p) if p.grad is None else p.grad
        worst = max(worst, (common.part(full, piece) - piece.grad).abs().max().item())
    frozen = dict(zero.module.named_parameters())["frozen.weight"]
    with torch.no_grad():  # evaluation frees what it gathered
        zero(inputs[0, 0])
    held = [unit.gathered_bytes() for unit in zero.units]
    return zero.module is module, max(outputs), worst, frozen.grad, held


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("stage", "prefetch"), [(2, 0), (3, 0), (3, 1), (3, 2)])
def test_any_module(ranks, world, stage, prefetch):
    for kept, output, worst, frozen, held in ranks(world)(
        gradients_of_an_odd_module, stage, prefetch
    ):
        assert kept and output == 0 and worst < 1e-12 and frozen is None
        assert len(held) == 3 and (stage == 2 or held == [0, 0, 0])


def frozen_and_replaced():
    """A plain list with a frozen parameter, which decay must not move, and lost gradients."""
    three, model = chapter(THREE), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    decay = lambda ps: torch.optim.AdamW(ps, 0.1, weight_decay=0.5)
    sharded, moved = three.ShardedOptimizer(model.parameters(), decay, dist.group.WORLD), []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        sharded.reduce_gradients()
        moved.append(three.shard_norm(sharded.units, dist.group.WORLD).item())
        sharded.zero_grad()
        model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
        sharded.reduce_gradients()
        moved.append(three.shard_norm(sharded.units, dist.group.WORLD).item())
    sharded.step()
    return model[0].weight.equal(before), len(set(moved)), moved[0] > 0


def test_frozen_parameters_and_replaced_gradients_of_a_plain_list(ranks):
    assert ranks(2)(frozen_and_replaced) == [(True, 1, True)] * 2


class Skips(nn.Module):
    """A unit that is not always run, as in LayerDrop, and one that is recomputed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.units = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)).double()
        self.skip, self.recompute = False, False

    def forward(self, x):
        x = self.units[0](x).tanh()
        if not self.skip:
            x = x + self.units[1](x).tanh()
        if self.recompute:
            with set_checkpoint_early_stop(False):  # so that the recomputed forward ends
                return checkpoint(self.units[2], x, use_reentrant=False)
        return self.units[2](x)


def skipped_and_recomputed(prefetch, keep):
    """Against the plain module: a skipped unit, evaluation, an update between, recomputation."""
    three, whole, module, group = chapter(THREE), Skips(), Skips(), dist.group.WORLD
    zero = three.Zero3(module, list(module.units), group, None, prefetch, keep)
    x, off = torch.ones(2, 3, dtype=torch.float64), []
    update = three.ShardUpdate(zero.units, lambda ps: torch.optim.SGD(ps, 0.1))
    plain = torch.optim.SGD(whole.parameters(), 0.1 * dist.get_world_size())
    names = {p: name for name, p in module.named_parameters()}
    for skip, recompute in ((True, False), (False, True), (False, False)):
        whole.skip = module.skip = skip
        module.recompute = recompute
        with torch.no_grad():
            off.append((zero(x) - whole(x)).abs().max().item())
        off.append(sum(unit.gathered_bytes() for unit in zero.units))
        zero.zero_grad()
        zero(x).square().sum().backward()
        zero.finish_backward()
        plain.zero_grad()
        whole(x).square().sum().backward()
        for name, piece in three.pieces(update, names):
            p = whole.get_parameter(name)
            full = torch.zeros_like(p) if p.grad is None else p.grad * dist.get_world_size()
            off.append((common.part(full, piece) - piece.grad).abs().max().item())
        off.append(sum(unit.gathered_bytes() for unit in zero.units))
        assert all(unit.gathering is None for unit in zero.units)
        zero(x)  # a forward without a backward, whose weights are old after the update
        update.step()
        zero.finish_step()
        plain.step()
    return max(off)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_skipped_recomputed_and_evaluated_units(ranks, prefetch, keep):
    for off in ranks(2)(skipped_and_recomputed, prefetch, keep):
        assert off < 1e-12


def what_runs_wrong():
    three, group = chapter(THREE), dist.group.WORLD
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    zero = three.Zero2(model, list(model), group)
    model(zero(torch.ones(1, 2))).sum().backward()
    with pytest.raises(RuntimeError, match="a unit ran more than once in one forward"):
        zero.finish_backward()
    odd = nn.Linear(2, 2)
    odd.forward = lambda x: {1, 2}
    with pytest.raises(TypeError, match="unit 0 must return tensors"):
        three.Zero2(odd, [odd], group)(torch.ones(1, 2))


def test_what_runs_wrong_says_so(ranks):
    ranks(1)(what_runs_wrong)


def what_is_refused():
    three, group, model = chapter(THREE), dist.group.WORLD, nn.Sequential(nn.Linear(2, 2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"in no unit: 1\.bias"):
        three.Zero2(tied, tied[:1], group)
    with pytest.raises(ValueError, match=r"units share a parameter of shape \(2, 2\)"):
        three.Zero3(tied, list(tied), group)
    apart = nn.Sequential(tied[0], nn.Linear(2, 2), tied[1])
    with pytest.raises(ValueError, match="units share a parameter"):
        three.Zero3(apart, list(apart), group)
    with pytest.raises(ValueError, match="a parameter is in two units"):
        three.ShardedOptimizer([list(unit.parameters()) for unit in apart], None, group)
    with pytest.raises(ValueError, match="in no unit: any trained parameter"):
        three.Zero2(nn.Linear(2, 2).requires_grad_(False), [], group)
    tied[0].weight.requires_grad_(False)
    three.Zero3(tied, list(tied), group)  # a frozen one is whole everywhere
    masters = three.ShardUpdate(
        three.Zero2(model, list(model), group).units, OPTIMIZERS["SGD"], torch.device("meta")
    ).masters
    assert masters[0].device.type == "meta"  # offload: where it was told
    model[0].bias.data = model[0].bias.data.double()
    with pytest.raises(ValueError, match=r"one dtype, and has .*float32.*float64"):
        three.Zero2(model, list(model), group)


def test_what_cannot_work_is_refused(ranks):
    ranks(1)(what_is_refused)


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (("--preset=gpt2", "--variant=zero3"), 1, "--preset gpt2 ties embedding and head.*zero2"),
        (
            ("--variant=hsdp", "--shard-size=3"),
            8,
            "--shard-size 3 does not divide 8 ranks; 1 would",
        ),
        (
            ("--variant=hsdp", "--shard-size=6"),
            8,
            "--shard-size 6 does not divide 8 ranks; 2 would",
        ),
        (("--precision=bf16", "--dtype=float64"), 1, "--precision bf16 .*; --dtype float32 would"),
        (
            ("--variant=torch", "--offload"),
            1,
            "--offload means nothing to --variant torch; zero1 or",
        ),
        (
            ("--variant=zeropp", "--keep-gathered"),
            1,
            "--keep-gathered means .*; zero3 or hsdp would",
        ),
        (
            ("--variant=zero1", "--prefetch=2"),
            1,
            "--prefetch means nothing .*; zero3 or hsdp or zero",
        ),
        (("--variant=zero3", "--shard-size=1"), 1, "--shard-size means .*; hsdp or zeropp would"),
        (("--variant=zero3", "--stage=2"), 1, "--stage means nothing .*; torch would work"),
        (("--no-quantized-weights",), 1, "--quantized-weights means nothing .*; zeropp would work"),
        (("--reduce-fp32",), 1, "--reduce-fp32 is for 16-bit gradients; --precision bf16 would"),
        (("--prefetch=3",), 1, r"--prefetch: 3 is no whole number in \[0, 3\); 1 would work"),
        (("--stage=0",), 1, r"--stage: 0 is no whole number in \[1, 4\); 3 would work"),
    ],
)
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(THREE, *flags, WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1),
    "SGD": lambda ps: torch.optim.SGD(ps, 0.001, momentum=0.9, nesterov=True),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, 0.1),
}


def a_plain_parameter_list(name):
    three, rank, n = chapter(THREE), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    whole = copy.deepcopy(model)
    sharded = three.ShardedOptimizer(list(model.parameters()), OPTIMIZERS[name], dist.group.WORLD)
    plain = OPTIMIZERS[name](whole.parameters())
    inputs = torch.arange(12.0 * n, dtype=torch.float64).sin().view(n, 4, 3)
    for _ in range(4):
        sharded.zero_grad()
        model(inputs[rank]).square().sum().backward()
        sharded.reduce_gradients()
        sharded.step()
        plain.zero_grad()
        whole(inputs).square().sum().backward()
        plain.step()
    off = [(p - q).abs().max().item() for p, q in zip(model.parameters(), whole.parameters())]
    elements = sum(
        s.numel()
        for s in tree_leaves([o.state for o in sharded.update.optimizers])
        if torch.is_tensor(s)
    )
    return max(off), elements


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_on_a_plain_parameter_list(ranks, name):
    states = {"AdamW": 2, "SGD": 1, "Adagrad": 1, "RMSprop": 1}[name]
    for off, elements in ranks(3)(a_plain_parameter_list, name):
        assert off < 1e-12 and states * 15 <= elements <= states * 15 + 1  # 44 numbers on 3 ranks


# ------------------------------------------------------------------------------- when it is there


def watched(prefetch, keep):
    """Which units are gathered whenever a unit's forward or backward runs; and in the end."""
    three, seen = chapter(THREE), []
    units = [nn.Linear(4, 4) for _ in range(4)]
    model = nn.Sequential(*units)
    zero = three.Zero3(model, units, dist.group.WORLD, None, prefetch, keep)

    def note(name):
        seen.append((name, [bool(unit.gathered_bytes()) for unit in zero.units]))
        if name[0] == "f":  # the next ones are still on their way
            on_its_way = [unit.gathering is not None for unit in zero.units]
            i = int(name[1])
            assert on_its_way == [i < j <= i + prefetch for j in range(4)]

    for i, unit in enumerate(units):
        unit.register_forward_pre_hook(lambda module, inputs, i=i: note(f"f{i}"))
        unit.register_full_backward_hook(lambda module, gin, gout, i=i: note(f"b{i}"))
    out = zero(torch.ones(2, 4, requires_grad=True)).sum()
    note("loss")
    out.backward()
    zero.finish_backward()
    note("end")
    gradients = [p.grad for p in model.parameters()]
    return seen, gradients


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_nothing_gathered_outlives_its_use(ranks, prefetch):
    for seen, gradients in ranks(2)(watched, prefetch, False):
        assert gradients == [None] * 8
        assert [name for name, _ in seen] == "f0 f1 f2 f3 loss b3 b2 b1 b0 end".split()
        for name, gathered in seen:
            i = int(name[1]) if name[1].isdigit() else None
            if name in ("loss", "end"):
                assert gathered == [False] * 4
            elif name[0] == "f":
                assert gathered == [i <= j <= i + prefetch for j in range(4)]
            else:
                assert gathered == [i - prefetch <= j <= i for j in range(4)]


def reduced_in_backward():
    """What happens in a backward of stage 2, and which units' gradients are there at the time."""
    three, events = chapter(THREE), []
    units = [nn.Linear(4, 4) for _ in range(4)]
    model = nn.Sequential(*units)
    zero = three.Zero2(model, units, dist.group.WORLD)

    def note(name):
        here = [any(p.grad is not None for p in unit.parameters) for unit in zero.units]
        sent = [unit.reducing is not None for unit in zero.units]
        events.append((name, here, sent))

    for i, unit in enumerate(units):
        unit.register_full_backward_hook(lambda module, gin, gout, i=i: note(f"b{i}"))
    zero(torch.ones(2, 4, requires_grad=True)).sum().backward()
    zero.finish_backward()
    note("end")
    return events


def test_gradients_are_reduced_in_backward_and_freed_at_once(ranks):
    def only(*indices):
        return [i in indices for i in range(4)]

    for events in ranks(2)(reduced_in_backward):
        for name, here, sent in events[:-1]:
            i = int(name[1])
            assert sent == only(i + 1) and here in (only(i), only())
        assert [name for name, *_ in events] == ["b3", "b2", "b1", "b0", "end"]
        assert events[-1][1:] == (only(), only())


def test_kept_until_backward(ranks):
    seen = dict(ranks(2)(watched, 0, True)[0][0])
    assert seen["loss"] == [True] * 4 and seen["b1"] == [True, True, False, False]
    assert seen["end"] == [False] * 4


# ------------------------------------------------------------------------------- the formulas


def test_the_table_of_the_lesson(three):
    """P, G and O are 4, 4 and 8 bytes per parameter, and a stage divides them by N."""
    cfg, n = common.PRESETS["7b"], 64
    psi = cfg.parameters()
    expected = {
        0: (4 * psi, 4 * psi, 8 * psi),
        1: (4 * psi, 4 * psi, 8 * psi / n),
        2: (4 * psi, 4 * psi / n, 8 * psi / n),
        3: (4 * psi / n, 4 * psi / n, 8 * psi / n),
    }
    for stage, values in expected.items():
        held = three.model_state_bytes(cfg, stage, "adamw", n)
        assert list(held.values()) == pytest.approx(values, rel=1e-5)


def test_traffic_of_the_lesson(three):
    cfg, n, m = common.PRESETS["1b"], 8, 3
    size = 4 * cfg.parameters()

    def wire(stage, **more):
        sent = three.traffic(cfg, stage, n, m, **more)
        return sum(wire for _, _, wire in sent.values()) / ((n - 1) / n * size)

    assert wire(1) == pytest.approx(2, rel=1e-5)
    assert wire(2) == pytest.approx(m + 1, rel=1e-5)
    assert wire(3) == pytest.approx(3 * m, rel=1e-5)
    assert wire(3, keep_gathered=True) == pytest.approx(2 * m, rel=1e-5)
    hybrid = three.traffic(cfg, 3, n, m, replicas=4)["all_reduce"]
    assert hybrid[2] == pytest.approx(2 * 3 / 4 * size / n, rel=1e-5)


def test_sizes_with_padding(three):
    cfg = Config(layers=2, dim=8, heads=2, kv_heads=1, seq=4, vocab=11)
    block = 2 * 64 + 2 * 32 + 8 * 64 + 4 * 8
    assert three.padded_sizes(cfg, 1) == [88, block, block, 104]
    assert three.padded_sizes(cfg, 7) == [91, 742, 742, 105]
    assert three.gathered_peak(cfg, 1, 0, False) == 4 * block
    assert three.gathered_peak(cfg, 1, 1, False) == 4 * 2 * block
    assert three.gathered_peak(cfg, 1, 2, False) == 4 * (2 * block + 104)
    assert three.gathered_peak(cfg, 1, 0, True) == 4 * (2 * block + 104 + 88)


def test_figure(three, tmp_path):
    points = {1: (8, 9.0), 2: (8, 5.5), 3: (8, 2.0)}
    three.draw(points, "float32", three.Widths(), "adamw", tmp_path / "zero.png")
    assert (tmp_path / "zero.png").read_bytes().startswith(b"\x89PNG")
