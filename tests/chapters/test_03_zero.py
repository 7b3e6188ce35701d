"""Chapter 03: every stage gives one GPU's numbers, and holds and sends what the formulas say."""

import copy
import functools
import itertools
import re
from argparse import Namespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._pytree import tree_leaves

import common
from common import Config
from lab.bench import anatomy, meters, verify
from tests.conftest import SMALL, TEXT, chapter, hold_to_one_gpu, run_main
from tests.support.pretend_cuda import RuleBroken, pretended_cuda

THREE = "03_zero"
TRAINING = (*SMALL, "--steps=3", f"--data={TEXT}")
FLOAT64 = (*TRAINING, "--dtype=float64", "--ignore=0.5")
CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL


@pytest.fixture(scope="module")
def three():
    return chapter(THREE)


def full(*values):
    """A case that only `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


# ------------------------------------------------------------------------------- same as one GPU

SETTINGS = {  # of 3 and 8 ranks, some units have padding
    1: "--batch=6 --micro-batch=2 --clip=0.1",
    2: "--batch=8 --micro-batch=1 --clip=0.1 --optimizer=momentum",
    3: "--batch=6 --optimizer=sgd --kv-heads=4 --vocab=257",
    4: "--batch=8 --micro-batch=1 --dim=40 --heads=2",
    8: "--layers=1 --batch=16 --micro-batch=1 --clip=0.1 --vocab=259",
}
STAGES = ("zero1", "zero2", "zero3", "hsdp", *(f"torch --stage={stage}" for stage in (1, 2, 3)))
MORE = [
    (2, "zero3 --prefetch=0"),
    (2, "zero3 --keep-gathered"),
    (2, "zero3 --prefetch=2 --offload"),
    (4, "hsdp --shard-size=1 --keep-gathered"),
    (2, "zero1 --offload"),
    (2, "zero2 --offload"),
    (8, "hsdp --shard-size=4 --prefetch=2 --offload"),
]
COVERING = {  # every world, and every stage by hand with one micro-batch and with several
    *MORE, (1, "zero2"), (1, "zero3"), (2, "torch --stage=1"), (2, "torch --stage=3"),
    (3, "zero1"), (3, "zero2"), (3, "zero3"),
}  # fmt: skip


@pytest.mark.parametrize(("world", "variant"), [
    case if case in COVERING else full(*case)
    for case in [*itertools.product(SETTINGS, STAGES), *MORE]])
def test_same_as_one_gpu(ranks, tmp_path, world, variant):
    flags = (*FLOAT64, *SETTINGS[world].split(), *f"--variant={variant}".split())
    results = ranks(world)(run_main, THREE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    checks = results[0][1]["checks"]
    if variant == "zero3":  # three kinds of bytes, two peaks, and three numbers of each collective
        assert len(checks) == 5 + 3 * 3 and all(check["ok"] for check in checks)
    if "--offload" in flags:
        [states] = [c for c in checks if c["name"] == "optimizer states, on the CPU"]
        assert states["measured"] == states["expected"] > 0


@pytest.mark.parametrize("variant", ["zero1", "zero2"])
def test_tied_embedding_and_head(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--preset=gpt2", "--vocab=256", "--verify", f"--variant={variant}")
    (status, run, output), _ = ranks(2)(run_main, THREE, (*flags, "--batch=4"), tmp_path)
    assert status == 0 and run["max_grad_diff"] < 1e-12, output


@pytest.mark.parametrize("flags", [
    "zero1 --reduce-fp32 --micro-batch=1",
    full("zero1 --optimizer=sgd"),
    "zero2 --optimizer=sgd --micro-batch=1",
    full("zero3 --micro-batch=1 --clip=0.5 --optimizer=sgd"),
    "hsdp --reduce-fp32 --offload --micro-batch=1 --clip=0.5",
    "zeropp --micro-batch=1",
])
def test_bf16_with_master_shards(ranks, tmp_path, flags):
    world = 4 if flags.startswith("hsdp") else 2
    more = ("--precision=bf16", "--steps=2", f"--batch={2 * world}")
    flags = (*TRAINING, *more, *f"--variant={flags}".split())
    (status, run, output), *_ = ranks(world)(run_main, THREE, flags, tmp_path)
    assert status == 0 and all(check["ok"] for check in run["checks"]), output
    rounding = "int8" if "--variant=zeropp" in flags else "bfloat16"
    assert run["tolerance"] == verify.tolerances(rounding, run["config"]["optimizer"])
    [parameters] = [c["measured"] for c in run["checks"] if c["name"] == "parameters"]
    if run["variant"] in ("zero1", "zero2"):  # whole, and 2 bytes each
        assert parameters == 2 * CONFIG.parameters()


def fp32_sums(reduce_fp32):
    """512 times 1 on rank 0 and 1 on rank 1, in two micro-batches: bf16 has 8 bits for the sums."""
    three, p = chapter(THREE), nn.Parameter(torch.ones(1))
    unit = three.Unit([p], dist.group.WORLD)
    sums = torch.float32 if reduce_fp32 else torch.bfloat16
    sgd = lambda masters: torch.optim.SGD(masters, 1.0)
    three.Masters([unit], sgd, "cpu", torch.bfloat16, sums)
    for gradient in (512.0, 1.0):
        unit.make_room_for_gradients()
        p.grad += gradient if dist.get_rank() == 0 else 1.0
        unit.start_reduce()
        unit.finish_reduce()
    return common.grad_norm([unit.shard], dist.group.WORLD).item()


def test_reduce_fp32_keeps_what_bf16_loses(ranks):
    assert ranks(2)(fp32_sums, True) == [515.0] * 2
    assert ranks(2)(fp32_sums, False)[0] != 515.0


@pytest.mark.parametrize("world", [full(2), 3])
def test_stages_agree_bit_for_bit(ranks, tmp_path, world):
    """And so does the same run, twice."""
    runs = []
    for variant in ("zero1", "zero2", "zero3", "zero3"):
        small = ("--layers=1", "--steps=2", "--batch=6", "--clip=0.1")
        flags = (*FLOAT64, *small, f"--variant={variant}")
        runs.append(ranks(world)(run_main, THREE, flags, tmp_path)[0][1])
    for run in runs[1:]:
        assert run["loss"] == runs[0]["loss"] and run["grad_norm"] == runs[0]["grad_norm"]
        assert run["max_param_diff"] == runs[0]["max_param_diff"]


# ------------------------------------------------------------------------------- ZeRO++


@pytest.mark.parametrize(("world", "size", "micro_batch"), [
    (1, 1, 2), full(2, 1, 2), (3, 3, 2), (4, 2, 1), full(8, 4, 2)])
def test_secondary_shards_change_no_number(ranks, tmp_path, world, size, micro_batch):
    off = ("--no-quantized-weights", f"--shard-size={size}")
    batch = (f"--batch={2 * world}", f"--micro-batch={micro_batch}", "--layers=1")
    flags = (*FLOAT64, "--variant=zeropp", *off, *batch)
    hold_to_one_gpu(ranks(world)(run_main, THREE, flags, tmp_path), flags)


@pytest.mark.parametrize(("switch", "steps"), [
    ("--secondary-shard", 6), full("--secondary-shard", 50), ("--no-secondary-shard", 3)])
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


def groups_at_work(flags, folder, fault):
    """For a rank of the pool: the groups that a run on pretended CUDA made, and those in which it
    has sent something; or what it did while a collective of another group was under way."""
    used = set()

    def group_of(args):
        used.add(meters.group_of(args).group_name)
        return meters.group_of(args)

    with mock.patch("tests.support.pretend_cuda.group_of", group_of):
        try:
            with pretended_cuda():
                run_main(THREE, flags, folder, fault)
        except RuleBroken as broken:
            return str(broken), None
    return set(dist.distributed_c10d._world.pg_names.values()), used


ONE_STEP = (*SMALL, f"--data={TEXT}", "--layers=1", "--steps=1", "--no-verify", "--batch=8")


@pytest.mark.parametrize(("variant", "count"), [
    full("zero3", 1), ("hsdp --shard-size=2", 3), ("hsdp", 1),
    ("zeropp --no-secondary-shard", 1), ("zeropp --shard-size=2 --prefetch=2 --micro-batch=1", 2)])
def test_no_group_is_made_that_is_not_used_and_none_waits_for_another(
        ranks, tmp_path, variant, count):
    flags = (*ONE_STEP, *f"--variant={variant}".split())
    for made, used in ranks(4)(groups_at_work, flags, tmp_path, None):
        assert made == used and len(made) == count


@pytest.mark.parametrize(("variant", "right", "wrong", "rule"), [
    ("zeropp --shard-size=2", "common.all_gather(self.full, self.secondary, self.node)",
     "self.gathering = common.all_gather(self.full, self.secondary, self.node, async_op=True)",
     "is under way in another group"),
])
def test_what_a_gpu_would_suffer_from_is_caught(ranks, tmp_path, variant, right, wrong, rule):
    flags = (*ONE_STEP, *f"--variant={variant}".split())
    for said, _ in ranks(4)(groups_at_work, flags, tmp_path, (right, wrong)):
        assert rule in said


def members(flags, folder):
    """For a rank of the pool: each collective of a run, and the ranks among which it was."""
    seen, count = set(), meters.CommMeter.count

    def note(meter, op, wire, namespace, args, result):
        seen.add((op, *dist.get_process_group_ranks(meters.group_of(args))))
        return count(meter, op, wire, namespace, args, result)

    with mock.patch("lab.bench.meters.CommMeter.count", note):
        run_main(THREE, flags, folder)
    return seen


@pytest.mark.parametrize("variant", ["hsdp", "zeropp"])
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


# ------------------------------------------------------------------------------- a faulty chapter


@pytest.mark.parametrize(("flags", "right", "wrong", "named"), [
    ("zero3", "common.reduce_scatter(self.sum, self.sent, group",
     "common.reduce_scatter(self.sum, self.sent, dist.ReduceOp.MAX, group", "gradients"),
    ("zero3", "self.sum if before is None else before.add_(self.sum)", "self.sum", "gradients"),
    ("zero3", "grad = x.grad\n            units[i].free()",
     "grad = i and x.grad / 2\n            units[i].free()", "gradients"),
    ("zero3", "grad_norm(shards, units[0].group)", "grad_norm(shards)", "gradient norm"),
    ("zero3", "            if not keep_gathered:\n", "            if False:\n",
     "gathered parameters, at the peak"),
    ("zero3", "for unit in units[:1 + ahead]:", "for unit in units[:1]:",
     "gathered parameters, at the peak"),
    ("zero3", "norm, model, units)", "norm, model, units[1:])", "gradients"),
    ("zero3 --offload", "            unit.shard.data.copy_(unit.master.data)\n", "", "loss"),
    ("zero2", "        for p in self.parameters:\n            p.grad = None\n", "",
     "gradients, at the peak"),
    ("zero2", "finish_reduce()\n\n    norm = update(units, optimizer, clip)\n    for unit in units",
     "finish_reduce()\n\n    norm = update(units, optimizer, clip)\n    for unit in []",
     "gradients"),
    ("hsdp --shard-size=1", "    if replicas:\n", "    if False:\n", "gradients"),
    ("zero1", "    model.zero_grad()\n    for unit", "    for unit", "gradients"),
    ("zero1", "        unit.shard.grad = None                          # a part of",
     "        # a part of", "gradients, at the peak"),
    ("zero1 --dtype=float32 --precision=bf16 --reduce-fp32",
     "unit.shard.grad = unit.shard.grad.clone()", "pass", "gradients: measured"),
    ("zeropp --no-quantized-weights", "if self.node and not self.in_backward:",
     "if self.node and not hasattr(self, 'secondary'):", "gradients"),
    ("torch --stage=1", "(dist.get_world_size() * loss)", "loss", "gradients"),
])
def test_a_broken_chapter_says_so(ranks, tmp_path, flags, right, wrong, named):
    small = ("--layers=1", "--steps=2", "--batch=4", "--micro-batch=1")
    flags = (*FLOAT64, *small, *f"--variant={flags}".split())
    (status, _, output), *_ = ranks(2)(run_main, THREE, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


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
            three.reduce_in_place(unit)
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
            three.reduce_in_place(unit)
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
    ("--precision=bf16 --dtype=float64", 1, "--precision bf16 .*; --dtype float32 would"),
    ("--variant=torch --offload", 1, "--offload means nothing .*; --variant zero3 would"),
    ("--variant=zeropp --keep-gathered", 1, "--keep-gathered means .*; --variant zero3 would"),
    ("--variant=zero1 --prefetch=2", 1, "--prefetch means nothing .*; --variant zero3 would"),
    ("--variant=zero3 --shard-size=1", 1, "--shard-size means .*; --variant hsdp would"),
    ("--variant=zero3 --stage=2", 1, "--stage means nothing .*; --variant torch would"),
    ("--no-quantized-weights", 1, "--quantized-weights means nothing .*; --variant zeropp"),
    ("--variant=zeropp --no-quantized-gradients", 1, ".*--no-quantized-gradients"),
    ("--reduce-fp32", 1, "--reduce-fp32 is for 16-bit gradients; --precision bf16 would"),
    ("--prefetch=3", 1, r"--prefetch: 3 is no whole number in \[0, 3\); --prefetch 1 would"),
    ("--stage=0", 1, r"--stage: 0 is no whole number in \[1, 4\); "),
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
    step = three.zero2_step
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

    def held(stage, n, **more):
        args = Namespace(model=cfg, optimizer="adamw", **more)
        return list(anatomy.state_bytes(args, {"zero": stage, "holders": n}, 4).values())

    for stage, values in expected.items():
        assert held(stage, n) == pytest.approx(values, rel=1e-5)
    said = re.search(r"7 billion (\S+) GB. On 8 ranks\s+that becomes (\S+) GB .zero1., (\S+) GB "
                     r".zero2. or (\S+) GB", three.__doc__).groups()
    whole = [sum(held(stage, n)) / psi * 7 for stage, n in ((1, 1), (1, 8), (2, 8), (3, 8))]
    assert [float(number) for number in said] == pytest.approx(whole, rel=1e-5)
    p, g, o = 2 * psi, 2 * psi, 12 * psi
    assert held(1, 1, precision="bf16") == pytest.approx((p, g, o), rel=1e-5)  # nobody to share
    assert held(3, n, precision="bf16") == pytest.approx((p / n, g / n, o / n), rel=1e-5)
    sums = held(2, n, precision="bf16", reduce_fp32=True)
    assert sums == pytest.approx((p, 4 * psi / n, o / n), rel=1e-5)
    assert held(2, n, offload=True) == pytest.approx((4 * psi, 4 * psi / n, o / n), rel=1e-5)


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

    def peak(n=1, batch=1, **more):
        args = Namespace(model=cfg, shares=1, micro_batch=1, batch=batch, **more)
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


def masters_of_rounded_shards(device):
    three, p = chapter(THREE), nn.Parameter(torch.tensor([1.0, 1 + 2**-10]))
    unit = three.Unit([p], dist.group.WORLD)
    sgd = lambda masters: torch.optim.SGD(masters, 1.0)
    three.Masters([unit], sgd, device, torch.bfloat16, torch.float32)
    return unit.master.tolist(), unit.shard.tolist(), p.tolist(), unit.shard.grad_dtype


def test_masters_are_made_of_what_is_not_rounded(ranks):
    [found] = ranks(1)(masters_of_rounded_shards, "cpu")
    assert found == ([1, 1 + 2**-10], [1, 1], [1, 1], torch.float32)
