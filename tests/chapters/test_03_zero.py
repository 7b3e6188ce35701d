"""Chapter 03: every stage gives one GPU's numbers, and holds and sends what the formulas say."""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from common import Config
from lab.run import meters, verify
from tests.conftest import SMALL, STEPS, TEXT, chapter, hold_to_one_gpu, run_main, sample
from tests.support.pretend_cuda import pretended_cuda

THREE = "03_zero"
TRAINING = (*SMALL, STEPS, f"--data={TEXT}")
FLOAT64 = (*TRAINING, "--dtype=float64", "--ignore=0.5")
CONFIG = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # SMALL


@pytest.fixture(scope="module")
def three():
    return chapter(THREE)


# ------------------------------------------------------------------------------- same as one GPU

SETTINGS = {  # of 3 and 8 ranks, some units have padding
    1: "--batch=6 --micro-batch=2 --clip=0.1",
    2: "--batch=8 --micro-batch=1 --clip=0.1 --optimizer=momentum",
    3: "--batch=6 --optimizer=sgd --kv-heads=4 --vocab=257",
    4: "--batch=8 --micro-batch=1 --dim=40 --heads=2",
    8: "--layers=1 --batch=16 --micro-batch=1 --clip=0.1 --vocab=259",
}
BF16 = "--precision=bf16"  # masters in float64: the same numbers, by another path
TIED = "--preset=gpt2 --vocab=256 --verify"
OFF = "zeropp --no-quantized-weights"
COVERING = [  # every world, every stage by hand with one micro-batch and with several, and with
    # each block, precision and recomputation
    (3, "zero3 --prefetch=2 --recompute=selective"),
    (1, f"zero2 --recompute=selective {BF16}"),
    (2, "zero3 --prefetch=0 --layers=3 --blocks-per-unit=2"),
    (2, f"zero3 --keep-gathered --offload {BF16} --block=llama --recompute=full"),
    (4, "hsdp --shard-size=1 --keep-gathered --block=llama --recompute=selective"),
    (2, f"zero1 --offload --block=llama {BF16} --recompute=full --layers=3 --blocks-per-unit=2"),
    (8, f"hsdp --shard-size=4 --prefetch=2 --offload {BF16} --recompute=full"),
    (3, "zero1 --recompute=selective"),
    (3, f"zero2 --block=llama --recompute=full {TIED}"),
    (4, f"{OFF} --shard-size=2 --block=llama {BF16} --recompute=selective --layers=3 "
        "--blocks-per-unit=2"),
    (2, "torch --stage=1 --block=llama --recompute=selective"),
    (2, f"torch --stage=3 {BF16} --recompute=full --layers=3 --blocks-per-unit=2"),
    (2, f"zero1 {TIED}"), (1, OFF), (3, f"{OFF} --shard-size=3"), (8, f"{OFF} --shard-size=4"),
]  # fmt: skip
STAGES = ("zero1", "zero2", "zero3", "hsdp", *(f"torch --stage={stage}" for stage in (1, 2, 3)))


@pytest.mark.parametrize(
    ("world", "variant"), sample([*COVERING, *itertools.product(SETTINGS, STAGES)], size=11))
def test_same_as_one_gpu(ranks, tmp_path, world, variant):
    flags = (*FLOAT64, *SETTINGS[world].split(), *f"--variant={variant}".split())
    results = ranks(world)(run_main, THREE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    run = results[0][1]
    names = [check["name"] for check in run["checks"]]
    if variant.startswith("zero3"):
        assert "gathered parameters, at the peak" in names
        assert all(check["ok"] for check in run["checks"])
    assert ("optimizer states, on the CPU" in names) == ("--offload" in flags)
    if variant.startswith("torch --stage=1"):  # whole sums, and parameters from their owners
        comm = run["comm"]
        numbers = next(x["measured"] for x in run["checks"] if x["name"] == "gradients")
        assert comm["all_reduce"]["bytes"] == numbers <= comm["broadcast"]["bytes"] < 1.01 * numbers


@pytest.mark.parametrize("flags", sample([
    "zero2 --optimizer=sgd --micro-batch=1 --recompute=full",
    "hsdp --offload --micro-batch=1 --clip=0.5 --block=llama --recompute=selective",
    "zero1 --micro-batch=1 --block=llama",
    "zero1 --optimizer=sgd",
    "zero3 --micro-batch=1 --clip=0.5 --optimizer=sgd",
    "zeropp --micro-batch=1 --recompute=full",
    "torch --stage=1 --micro-batch=1",
    "torch --stage=3 --micro-batch=1 --block=llama",
]))
def test_bf16_with_master_shards(ranks, tmp_path, flags):
    world = 4 if flags.startswith("hsdp") else 2
    more = ("--precision=bf16", "--steps=2", f"--batch={2 * world}")
    flags = (*TRAINING, *more, *f"--variant={flags}".split())
    (status, run, output), *_ = ranks(world)(run_main, THREE, flags, tmp_path)
    variant = run["variant"]
    assert status == 0, output
    assert variant == "torch" or all(check["ok"] for check in run["checks"]), output
    rounding = "int8" if variant == "zeropp" else "bfloat16"
    assert run["tolerance"] == verify.tolerances(rounding, run["config"]["optimizer"])
    measured = {check["name"]: check["measured"] for check in run["checks"]}
    numbers = dataclasses.replace(CONFIG, gated=run["config"]["gated"]).parameters()
    if variant in ("zero1", "zero2"):  # whole, and 2 bytes each; sent as fp32
        assert measured["parameters"] == 2 * numbers
        assert measured["reduce_scatter, payload"] == 4 * numbers * (2 if variant == "zero2" else 1)


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


def groups_at_work(flags, folder):
    """For a rank of the pool: the groups that a run on pretended CUDA made, and those it used."""
    used = set()

    def group_of(args):
        used.add(meters.group_of(args).group_name)
        return meters.group_of(args)

    with mock.patch("tests.support.pretended_operators.group_of", group_of):
        with pretended_cuda():
            run_main(THREE, flags, folder)
    return set(dist.distributed_c10d._world.pg_names.values()), used


ONE_STEP = (*SMALL, f"--data={TEXT}", "--layers=1", "--steps=1", "--no-verify", "--batch=8")


@pytest.mark.parametrize(("variant", "count"), sample([
    ("hsdp --shard-size=2", 3), ("hsdp", 1), ("zero3", 1), ("zeropp --no-secondary-shard", 1),
    ("zeropp --shard-size=2 --prefetch=2 --micro-batch=1", 2)]))
def test_no_group_is_made_that_is_not_used(ranks, tmp_path, variant, count):
    flags = (*ONE_STEP, *f"--variant={variant}".split())
    for made, used in ranks(4)(groups_at_work, flags, tmp_path):
        assert made == used and len(made) == count


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
