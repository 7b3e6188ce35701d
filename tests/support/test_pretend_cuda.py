"""All chapters by a GPU's rules, on pretended CUDA; and the pretence, which catches faults."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from lab.bench import verify
from tests.conftest import SMALL, TEXT, chapter, run_main, training_chapters
from tests.support.pretend_cuda import RuleBroken, pretended_cuda

ZERO = "00_collectives"
ONE, TWO, THREE, FOUR, FIVE, SIX, SEVEN, EIGHT, NINE = (
    "01_single_gpu", "02_data_parallel", "03_zero", "04_tensor_parallel", "05_sequence_parallel",
    "06_context_parallel", "07_pipeline_parallel", "08_expert_parallel", "09_5d")  # fmt: skip
ELEVEN = "11_muon"
WORLD = {ONE: 1, NINE: 4}  # ranks; of all others: 2
FLAGS = (*SMALL, "--vocab=256", "--batch=4", "--micro-batch=1", "--clip=0.1", "--ignore=0.5",
         f"--data={TEXT}")  # fmt: skip
TIED = "--preset=gpt2 --attention=plain --verify"


def run_on_cuda(name, flags, folder, source=None, few=common.ONE_BUCKET):
    """For a rank of the pool: a chapter's run. Returns its status, its output, and the device.
    few: so many gradients are one message."""
    given = () if name == ZERO else FLAGS
    with mock.patch.object(common, "ONE_BUCKET", few), pretended_cuda() as gpu:
        status, _, output = run_main(name, (*given, *flags), folder, source)
    return status, output, gpu.steps, gpu.operators


# ------------------------------------------------------------------------------------ the chapters

# Chapter 08 waits for the counts, in 2 layers of each of a rank's 2 micro-batches.
COUNTS = 4 * ["tolist"]
OFFLOADED = 4 * ["a copy to the host"] + 4 * ["a copy to the device"]  # of chapter 03's four units

RUNS = {  # what is written by hand: where the host waits in each step, and what the device does
    f"{ONE} --dtype=float64 --recompute=full": ([], "_fused_adamw_"),
    f"{ONE} --precision=bf16 --attention=sdpa": ([], "_foreach_copy_"),
    f"{ONE} --precision=fp16 --recompute=selective": (["_local_scalar_dense"], "_fused_adamw_"),
    f"{ONE} --precision=fp8 --layers=1": ([], "_fused_adamw_"),
    f"{TWO} --variant=naive --dtype=float64 --optimizer=momentum": ([], "_foreach_add_"),
    f"{TWO} --variant=overlap --dtype=float64 --block=llama --recompute=full": ([], "allreduce_"),
    f"{TWO} --variant=bucket --precision=bf16 --bucket-mb=0.02": ([], "allreduce_"),
    f"{THREE} --variant=zero1 --dtype=float64": ([], "_reduce_scatter_base_"),
    f"{THREE} --variant=zero2 --precision=bf16 --recompute=selective": (
        [], "_reduce_scatter_base_"),
    f"{THREE} --variant=zero3 --precision=bf16 --block=llama --recompute=full": (
        [], "_allgather_base_"),
    f"{THREE} --variant=hsdp --dtype=float64 --prefetch=2": ([], "allreduce_"),
    f"{THREE} --variant=zeropp --shard-size=2": ([], "_allgather_base_"),
    f"{THREE} --variant=zero3 --precision=bf16 --offload": (OFFLOADED, "_fused_adamw_"),
    f"{FOUR} --variant=megatron --precision=bf16 --block=llama --recompute=full": (
        [], "allreduce_"),
    f"{FOUR} --variant=overlap --dtype=float64 --kv-heads=1": ([], "allreduce_"),
    f"{FIVE} --variant=kept --dtype=float64": ([], "_allgather_base_"),
    f"{FIVE} --variant=megatron --precision=bf16 --recompute=full --kv-heads=1": (
        [], "_reduce_scatter_base_"),
    f"{FIVE} --variant=megatron --precision=fp8 --dtype=float64 --seq=64 --dim=64": (
        [], "_allgather_base_"),
    f"{FIVE} --variant=ring --dtype=float64": ([], "recv_"),
    f"{SIX} --variant=zigzag --precision=bf16 --block=llama --documents=9 --cut=document": (
        [], "recv_"),
    f"{SIX} --variant=ring --dtype=bfloat16 --kv-heads=1 --window=11": ([], "recv_"),
    f"{SIX} --variant=gather --dtype=bfloat16 --documents=9": ([], "_allgather_base_"),
    f"{SIX} --variant=zigzag --inner=2 --window=5 --documents=9": ([], "alltoall_base_"),
    f"{SIX} --variant=ulysses --dtype=float64 --kv-heads=1 --recompute=selective": (
        [], "alltoall_base_"),
    f"{SEVEN} --variant=1f1b --precision=bf16 {TIED}": ([], "allreduce_"),
    f"{SEVEN} --variant=naive --dtype=float64": ([], "recv_"),
    f"{SEVEN} --variant=afab --dtype=float64": ([], "recv_"),
    f"{SEVEN} --variant=2bw --precision=bf16 --optimizer=sgd": (
        2 * ["a copy to the device"], "recv_"),  # the next batch, which a step begins with
    f"{SEVEN} --variant=interleaved --dtype=float64 --layers=4": ([], "recv_"),
    f"{SEVEN} --variant=zb-h1 --dtype=float64 {TIED}": ([], "allreduce_"),
    f"{SEVEN} --variant=zb-h2 --dtype=float64": ([], "recv_"),
    f"{SEVEN} --variant=dualpipe --dtype=float64": ([], "allreduce_"),
    f"{SEVEN} --variant=dualpipe-v --dtype=float64 --layers=4": ([], "recv_"),
    f"{EIGHT} --variant=dropless --precision=bf16 --shared-expert --matmul=grouped": (
        COUNTS, "alltoall_base_"),
    f"{EIGHT} --variant=dropless --dtype=float64 --ep=1 --z-loss=0.01": (COUNTS, "allreduce_"),
    f"{EIGHT} --variant=capacity --block=llama --recompute=full": ([], "alltoall_base_"),
    f"{EIGHT} --variant=two-hops --nodes=2 --router=sigmoid --balance=loss-of-batch "
    "--micro-batch=2": (COUNTS, "alltoall_base_"),      # two waits of half as many micro-batches
    f"{EIGHT} --variant=overlapped --precision=bf16 --shared-expert": (COUNTS, "alltoall_base_"),
    f"{NINE} --pp=2 --tp=2 --schedule=interleaved --layers=4 --kv-heads=1 --dtype=float64 "
    "--micro-batch=2": ([], "recv_"),
    f"{NINE} --pp=2 --dp=2 --zero=1 --dtype=float64 {TIED}": ([], "_allgather_base_"),
    f"{NINE} --dp=2 --tp=2 --ep=4 --experts=4 --shared-expert --zero=2 --dtype=float64": (
        COUNTS, "alltoall_base_"),
    f"{NINE} --cp=2 --tp=2 --zero=3 --dtype=bfloat16 --attention=sdpa --micro-batch=2 "
    "--documents=5": ([], "_allgather_base_"),
    f"{NINE} --pp=2 --dp=2 --zero=3 --keep-gathered --precision=bf16": ([], "recv_"),
    f"{NINE} --pp=2 --cp=2 --schedule=dualpipe-v --layers=4 --experts=4 --dtype=float64": (
        8 * ["tolist"], "allreduce_"),  # 2 layers of a rank, 4 micro-batches
    f"{ELEVEN} --variant=deal --precision=bf16 --zero=2": ([], "alltoall_base_"),
    f"{ELEVEN} --variant=gather --dtype=float64 --zero=3 --block=llama": ([], "_allgather_base_"),
    f"{ELEVEN} --variant=owner --dtype=float64 --recompute=full": ([], "broadcast_"),
    f"{THREE} --variant=zero2 --optimizer=muon --precision=bf16 --offload": (
        OFFLOADED[:4] + 2 * ["a copy to the device"] + 2 * ["a copy to the host"] + OFFLOADED[4:],
        "alltoall_base_"),  # two units have matrices
    f"{NINE} --dp=2 --tp=2 --zero=2 --optimizer=muon --precision=bf16": ([], "alltoall_base_"),
    f"{NINE} --dp=2 --tp=2 --zero=3 --optimizer=muon --dtype=float64 --kv-heads=1 --block=llama": (
        [], "_allgather_base_"),  # where ranks hold the same kv head, they gather
}  # fmt: skip


@pytest.mark.parametrize("name", training_chapters())
def test_all_that_is_written_by_hand_is_among_them(name):
    words = [run.split() for run in RUNS if run.startswith(name)]
    tried = {word.partition("=")[2] for run in words for word in run if "--variant" in word}
    assert (tried or {"hand"}) == set(chapter(name).VARIANTS) - {"torch"}


# These send and wait as another of their chapter does.
ALIKE = ("=naive", "=afab", "=zb-h1", "=dualpipe --", "=ring --dtype=bfloat16", "=zero1",
         "=megatron --dt", "=kept", "=fp8 --layers", "01_single_gpu --dtype=float64", "--zero=1",
         "--ep=1", "=dualpipe-v --layers=4 --experts", "--zero=3 --optimizer=muon")


def marks_of(run):
    return [pytest.mark.full] * any(alike in run for alike in ALIKE)


@pytest.mark.parametrize("name", training_chapters())
def test_every_chapters_default_is_among_them_in_bf16(name):
    default = next(iter(chapter(name).VARIANTS))
    named = f"--variant={default}" if default != "hand" else ""
    assert any(run.startswith(name) and named in run and "--precision=bf16" in run
               and not marks_of(run) for run in RUNS)


@pytest.mark.parametrize("run", [pytest.param(run, marks=marks_of(run)) for run in RUNS])
def test_a_run_keeps_the_rules_and_the_host_does_not_wait_in_a_step(ranks, tmp_path, run):
    """And it is compared with one GPU, as ever."""
    name, *flags = run.split()
    chapter(name)  # or skip
    waits, operator = RUNS[run]
    few = ["--micro-batch=2"] * (name in (FOUR, FIVE, SIX))  # two, whose batch is not cut
    flags = ("--steps=2", *few, *flags)
    world = 4 if "--inner=2" in flags else WORLD.get(name, 2)
    results = ranks(world)(run_on_cuda, name, flags, tmp_path)
    for status, output, steps, operators in results:
        assert status == 0, output
        assert [[wait.split(",")[0] for wait in step] for step in steps] == 2 * [waits], steps
        assert operators[operator]
    assert " cuda, gloo " in results[0][1] and "same as one GPU" in results[0][1]


@pytest.mark.parametrize("run", [
    f"{FOUR} --kv-heads=1 --micro-batch=2", f"{FIVE} --variant=ring --micro-batch=2 --kv-heads=1",
    f"{SEVEN} --variant=dualpipe", f"{SIX} --kv-heads=1 --micro-batch=2",
    f"{EIGHT} --variant=overlapped", f"{NINE} --pp=2 --dp=2 --block=llama"])
def test_gradients_of_large_models_are_under_way_module_by_module(ranks, tmp_path, run):
    """As in all models of more than 2^22 numbers."""
    name, *flags = run.split()
    for status, output, *_ in ranks(WORLD.get(name, 2))(
            run_on_cuda, name, ("--steps=2", "--dtype=float64", *flags), tmp_path, None, 100):
        assert status == 0 and "✗" not in output, output


def buckets_by_arrival(in_order):
    """Two buckets, of which rank 0 has the second one's gradients first, and rank 1 the other's."""

    class ByArrival(common.PartialSums):
        def note_ready(self, *parameters):
            for p in parameters:
                if p not in self.ready:
                    self.ready.add(p)
                    self.handles.append(dist.all_reduce(p.grad, group=p.partial, async_op=True))

    with mock.patch.object(common, "ONE_BUCKET", 1), pretended_cuda():
        parameters = [torch.nn.Parameter(torch.ones(size, device="cuda")) for size in (2, 3)]
        for i, p in enumerate(parameters):
            p.global_name, p.partial, p.grad = f"block{i}.", dist.group.WORLD, torch.ones_like(p)
        sums = (common.PartialSums if in_order else ByArrival)(parameters)
        for p in parameters[:: 1 if dist.get_rank() else -1]:
            sums.note_ready(p)
        sums.finish()
        return [p.grad.tolist() for p in parameters]


def what_is_said(*arguments):
    try:
        return buckets_by_arrival(*arguments)
    except RuleBroken as broken:
        return str(broken)


def test_buckets_are_sent_in_one_order_whatever_comes_first(ranks):
    assert ranks(2)(what_is_said, True) == 2 * [[[2.0] * 2, [2.0] * 3]]
    for said in ranks(2)(what_is_said, False):
        assert "ranks disagree; rank 0: allreduce_" in said


@pytest.mark.parametrize(("world", "flags", "said"), [
    (4, "--numbers=5", "4 ranks · cuda, gloo "),
    (3, "--dtype=bfloat16", "3 ranks · cuda, gloo "),
    (3, "--variant=sums", "3 ranks · cuda, gloo "),
    (2, "--variant=hello", "rank 1 of 2: process "),
])
def test_chapter_00_keeps_the_rules(ranks, tmp_path, world, flags, said):
    """Each collective by hand, and its run. (Its faults are on CPUs, also where there are GPUs.)"""
    chapter(ZERO)  # or skip
    results = ranks(world)(run_on_cuda, ZERO, flags.split(), tmp_path)
    assert all(status == 0 for status, *_ in results), results[0][1]
    assert said in results[0][1]


@pytest.mark.parametrize("run", [
    f"{THREE} --precision=bf16 --offload",
    pytest.param(f"{EIGHT} --dtype=float64 --balance=bias", marks=pytest.mark.full),
    f"{THREE} --variant=zero1 --dtype=float64 --layers=1",
    pytest.param(f"{NINE} --dp=2 --tp=2 --zero=3 --dtype=float64 --layers=1",
                 marks=pytest.mark.full)])
def test_a_checkpoint_is_copied_to_the_host_and_back(ranks, tmp_path, run):
    """In no step does the host wait for it; and the run goes on from it, compared with one GPU."""
    name, *flags = run.split()
    chapter(name)  # or skip
    waits = OFFLOADED if "--offload" in flags else COUNTS if name == EIGHT else []
    save = "--steps=2", "--save-every=1", f"--save={tmp_path / 'saved'}"
    resume = "--steps=4", f"--resume={tmp_path / 'saved'}"
    for more in (save, resume):
        call = run_on_cuda, name, (*flags, *more), tmp_path
        results = ranks(WORLD.get(name, 2))(*call)
        for status, output, waited, _ in results:
            assert status == 0, output
            assert [[wait.split(",")[0] for wait in step] for step in waited] == 2 * [waits]
        assert "same as one GPU" in results[0][1]


# ------------------------------------------------------------------------------- faults in chapters


def verified_on_the_host(folder):
    difference = verify.difference
    with mock.patch.object(verify, "difference", lambda x, *more: difference(x.cpu(), *more)):
        try:
            return run_on_cuda(TWO, ("--steps=1",), folder)[1]
        except RuleBroken as broken:
            return str(broken)


def test_a_verifier_on_the_host_is_caught(ranks, tmp_path):
    assert all("sub of tensors on two devices" in rule
               for rule in ranks(2)(verified_on_the_host, tmp_path))
