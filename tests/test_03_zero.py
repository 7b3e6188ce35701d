"""Chapter 03: every stage gives one GPU's numbers, and holds and sends what the formulas say."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from conftest import chapter, run_main
from torch import nn
from torch.utils._pytree import tree_leaves

import common
from common import Config

THREE = "03_zero"
SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--steps=4")
FLOAT64 = (*SMALL, "--dtype=float64", "--ignore=0.5", f"--data={common.__file__}")


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
    (status, run, output), *_ = ranks(world)(run_main, THREE, flags, tmp_path)
    assert status == 0 and len(run["reference_loss"]) == 4, output
    assert max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-12
    assert all(check["ok"] is not False for check in run["checks"])
    if "--clip=0.1" in flags:
        assert min(run["grad_norm"]) > 0.1  # the clipping was at work


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
        ("zero3", "common.reduce_scatter(summed, flat, group=self.group, async_op=True)",
         "common.reduce_scatter(summed, flat, dist.ReduceOp.MAX, self.group, True)", "gradients"),
        ("zero3", "summed if self.shard.grad is None else self.shard.grad.add_(summed)", "summed",
         "gradients"),
        ("zero2", "    optimizer.step()\n    zero.finish_step()\n", "    optimizer.step()\n",
         "gradients"),
        ("hsdp", "        if self.replicas:\n", "        if False:\n", "gradients"),
        ("zero1", "            flat.zero_()\n", "            pass\n", "gradients"),
        ("zero1", "            if lo < hi:", "            if lo < hi and unit is units[0]:",
         "gradients"),
        ("zero3", "(common.Piece(self.mine.start, self.mine.stop, self.group.size()),)",
         "()", "gradient norm"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, variant, right, wrong, named):
    flags = (*FLOAT64, "--batch=8", "--micro-batch=1", f"--variant={variant}")
    (status, _, output), *_ = ranks(4)(run_main, THREE, flags, tmp_path, (right, wrong))
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
    for name, piece in three.pieces(zero.units, names):
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


def what_is_refused():
    three, group, model = chapter(THREE), dist.group.WORLD, nn.Sequential(nn.Linear(2, 2))
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"in no unit: 1\.bias"):
        three.Zero2(tied, tied[:1], group)
    with pytest.raises(ValueError, match=r"units share a parameter of shape \(2, 2\)"):
        three.Zero3(tied, list(tied), group)
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
    elements = sum(s.numel() for s in tree_leaves(sharded.optimizer.state) if torch.is_tensor(s))
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
        held = three.model_state_bytes(cfg, stage, "adamw", 4, n)
        assert list(held.values()) == pytest.approx(values, rel=1e-5)


def test_traffic_of_the_lesson(three):
    cfg, n, m = common.PRESETS["1b"], 8, 3
    size = 4 * cfg.parameters()

    def wire(stage, **more):
        sent = three.traffic(cfg, stage, 4, n, m, **more)
        return sum(wire for _, _, wire in sent.values()) / ((n - 1) / n * size)

    assert wire(1) == pytest.approx(2, rel=1e-5)
    assert wire(2) == pytest.approx(m + 1, rel=1e-5)
    assert wire(3) == pytest.approx(3 * m, rel=1e-5)
    assert wire(3, keep_gathered=True) == pytest.approx(2 * m, rel=1e-5)
    hybrid = three.traffic(cfg, 3, 4, n, m, replicas=4)["all_reduce"]
    assert hybrid[2] == pytest.approx(2 * 3 / 4 * size / n, rel=1e-5)


def test_sizes_with_padding(three):
    cfg = Config(layers=2, dim=8, heads=2, kv_heads=1, seq=4, vocab=11)
    block = 2 * 64 + 2 * 32 + 8 * 64 + 4 * 8
    assert three.padded_sizes(cfg, 1) == [88, block, block, 104]
    assert three.padded_sizes(cfg, 7) == [91, 742, 742, 105]
    assert three.gathered_peak(cfg, 4, 1, 0, False) == 4 * block
    assert three.gathered_peak(cfg, 4, 1, 1, False) == 4 * 2 * block
    assert three.gathered_peak(cfg, 4, 1, 2, False) == 4 * (2 * block + 104)
    assert three.gathered_peak(cfg, 4, 1, 0, True) == 4 * (2 * block + 104 + 88)


def test_figure(three, tmp_path):
    points = {1: (8, 9.0), 2: (8, 5.5), 3: (8, 2.0)}
    three.draw(points, "float32", "adamw", tmp_path / "zero.png")
    assert (tmp_path / "zero.png").read_bytes().startswith(b"\x89PNG")
