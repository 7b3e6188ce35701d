"""Each chapter's hand-written variants keep a GPU's rules, on pretended CUDA."""

import pytest

import common
from tests.conftest import chapter, chapter_names, sample, training_chapters
from tests.support.pretend_cuda import WORLD, run_on_cuda

NAMES = {name[:2]: name for name in chapter_names()}
TIED = "--preset=gpt2 --attention=plain --verify"
COUNTS = 4 * ["tolist"]  # of chapter 08, in 2 layers of each of a rank's 2 micro-batches
TO_HOST, TO_DEVICE = ["a copy to the host"], ["a copy to the device"]
OFFLOADED = 4 * TO_HOST + 4 * TO_DEVICE  # of chapter 03's four units
OF_MUON = 4 * TO_HOST + 2 * TO_DEVICE + 2 * TO_HOST + 4 * TO_DEVICE  # two units have matrices

# Chapter and variant, other flags, and where the host waits in each step. The first run of each
# chapter, its default in bf16, is a daily one.
RUNS = [
    ("01 hand", "--precision=bf16 --attention=sdpa", []),
    ("02 bucket", "--precision=bf16 --bucket-mb=0.02", []),
    ("03 zero3", "--precision=bf16 --offload", OFFLOADED),
    ("04 megatron", "--precision=bf16 --block=llama --recompute=full", []),
    ("05 megatron", "--precision=bf16 --recompute=full --kv-heads=1", []),
    ("06 zigzag", "--precision=bf16 --block=llama --documents=9 --cut=document", []),
    ("07 1f1b", f"--precision=bf16 {TIED}", []),
    ("08 dropless", "--precision=bf16 --shared-expert --matmul=grouped", COUNTS),
    ("09 hand", "--precision=bf16 --pp=2 --dp=2 --zero=3 --keep-gathered", []),
    ("11 deal", "--precision=bf16 --zero=2", []),
    ("01 hand", "--precision=fp16 --recompute=selective", ["_local_scalar_dense"]),
    ("01 hand", "--precision=fp8 --layers=1", []),
    ("02 naive", "--dtype=float64 --optimizer=momentum", []),
    ("02 overlap", "--dtype=float64 --block=llama --recompute=full", []),
    ("03 zero1", "--dtype=float64", []),
    ("03 zero2", "--optimizer=muon --precision=bf16 --offload", OF_MUON),
    ("03 hsdp", "--dtype=float64 --prefetch=2", []),
    ("03 zeropp", "--shard-size=2", []),
    ("04 overlap", "--dtype=float64 --kv-heads=1", []),
    ("05 kept", "--dtype=float64", []),
    ("05 megatron", "--precision=fp8 --dtype=float64 --seq=64 --dim=64", []),
    ("05 ring", "--dtype=float64 --kv-heads=1", []),
    ("06 ring", "--dtype=bfloat16 --kv-heads=1 --window=11", []),
    ("06 gather", "--dtype=bfloat16 --documents=9", []),
    ("06 zigzag", "--inner=2 --window=5 --documents=9", []),
    ("06 ulysses", "--dtype=float64 --kv-heads=1 --recompute=selective", []),
    ("07 naive", "--dtype=float64", []),
    ("07 afab", "--dtype=float64", []),
    ("07 2bw", "--precision=bf16 --optimizer=sgd", 2 * TO_DEVICE),  # the next batch
    ("07 interleaved", "--dtype=float64 --layers=4", []),
    ("07 zb-h1", f"--dtype=float64 {TIED}", []),
    ("07 zb-h2", "--dtype=float64", []),
    ("07 dualpipe", "--dtype=float64", []),
    ("07 dualpipe-v", "--dtype=float64 --layers=4", []),
    ("08 capacity", "--block=llama --recompute=full", []),
    ("08 two-hops", "--nodes=2 --router=sigmoid --balance=loss-of-batch --micro-batch=2",
     COUNTS),  # two waits in each of half as many micro-batches
    ("08 overlapped", "--precision=bf16 --shared-expert", COUNTS),
    ("09 hand", "--pp=2 --tp=2 --schedule=interleaved --layers=4 --kv-heads=1 --dtype=float64 "
     "--micro-batch=2", []),
    ("09 hand", "--dp=2 --tp=2 --ep=4 --experts=4 --shared-expert --zero=2 --dtype=float64",
     COUNTS),
    ("09 hand", "--cp=2 --tp=2 --zero=3 --dtype=bfloat16 --attention=sdpa --micro-batch=2 "
     "--documents=5", []),
    ("09 hand", "--pp=2 --cp=2 --schedule=dualpipe-v --layers=4 --experts=4 --dtype=float64",
     2 * COUNTS),  # 2 layers of a rank, 4 micro-batches
    ("09 hand", "--dp=2 --tp=2 --zero=3 --optimizer=muon --dtype=float64 --kv-heads=1 "
     "--block=llama", []),  # where ranks hold the same kv head, they gather
    ("11 gather", "--dtype=float64 --zero=3 --block=llama", []),
    ("11 owner", "--dtype=float64 --recompute=full", []),
]  # fmt: skip


def test_every_variant_is_among_them():
    tried = {run for run, *_ in RUNS}
    for name in training_chapters():
        variants = {f"{name[:2]} {variant}" for variant in chapter(name).VARIANTS}
        assert tried >= variants - {f"{name[:2]} torch"}


def hold_to_the_rules(ranks, folder, run, flags, waits, few=common.ONE_BUCKET):
    """A run on pretended CUDA is the same as on one GPU, and the host waits there only."""
    number, variant = run.split()
    if number not in NAMES:
        pytest.skip(f"there is no chapter {number}")
    flags = [*flags, f"--variant={variant}"]
    world = 4 if "--inner=2" in flags else WORLD.get(NAMES[number], 2)
    results = ranks(world, 240)(run_on_cuda, NAMES[number], flags, folder, None, few)
    for status, output, steps in results:
        assert status == 0, output
        found = [[wait.split(",")[0] for wait in step] for step in steps]
        assert found == 2 * [waits], steps
    assert " cuda, gloo " in results[0][1] and "same as one GPU" in results[0][1]


@pytest.mark.parametrize(("run", "flags", "waits"), sample(RUNS, 10))
def test_a_run_keeps_the_rules_and_the_host_does_not_wait_in_a_step(
        ranks, tmp_path, run, flags, waits):
    """In float64, gradients are sent module by module, as in models of more than 2^22 numbers."""
    fewer = ["--micro-batch=2"] * (run[:2] in ("04", "05", "06"))  # whose batch is not cut
    few = 100 if "--dtype=float64" in flags else common.ONE_BUCKET
    flags = ["--steps=2", *fewer, *flags.split()]
    hold_to_the_rules(ranks, tmp_path, run, flags, waits, few)


@pytest.mark.parametrize(("world", "flags"), sample([
    (4, "--numbers=5"), (3, "--dtype=bfloat16"), (3, "--variant=sums"), (2, "--variant=hello")]))
def test_chapter_00_keeps_the_rules(ranks, tmp_path, world, flags):
    """Each collective by hand, and its run. (Its faults are on CPUs, also where there are GPUs.)"""
    chapter("00_collectives")  # or skip
    results = ranks(world, 240)(run_on_cuda, "00_collectives", flags.split(), tmp_path)
    assert all(status == 0 for status, *_ in results), results[0][1]
    assert "hello" in flags or f"{world} ranks · cuda, gloo " in results[0][1]


@pytest.mark.full
@pytest.mark.parametrize(("run", "flags", "waits"), [
    ("03 zero3", "--precision=bf16 --offload", OFFLOADED),
    ("09 hand", "--dp=2 --tp=2 --zero=3 --dtype=float64 --layers=1", []),
])
def test_a_checkpoint_is_copied_to_the_host_and_back(ranks, tmp_path, run, flags, waits):
    """In no step does the host wait for it; and the run goes on from it."""
    saved = tmp_path / "saved"
    save = "--steps=2", "--save-every=1", f"--save={saved}"
    resume = "--steps=4", f"--resume={saved}"
    for more in (save, resume):
        hold_to_the_rules(ranks, tmp_path, run, [*flags.split(), *more], waits)
