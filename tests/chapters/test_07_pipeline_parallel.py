"""Chapter 07: every schedule gives one GPU's numbers, in the same order of sums."""

import contextlib
import dataclasses
import functools
import signal
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from common import Refused
from lab import launch
from tests.chapters.test_04_tensor_parallel import FLOAT64, TRAINING, covering
from tests.conftest import (
    CHAPTERS,
    FULL,
    SMALL,
    TEXT,
    arguments,
    chapter,
    hold_to_one_gpu,
    run_main,
    sample,
)
from tests.support import programs
from tests.support.refused import hold_refusals

SEVEN = "07_pipeline_parallel"
VARIANTS = ("1f1b", "naive", "afab", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")


@pytest.fixture(scope="module")
def seven():
    return chapter(SEVEN)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "variant": VARIANTS,
    "world": (2, 3, 4, 1, 8) if FULL else (2, 3, 4, 1),
    "m": ("few", "many"),  # micro-batches: as few as the schedule takes
    "stages": ("even", "uneven"),
    "training": (
        "--micro-batch=1 --kv-heads=4 --attention=plain",
        "--micro-batch=2 --kv-heads=2 --attention=sdpa --optimizer=sgd --clip=0.1 --preset=gpt2 "
        "--block=llama --ffn=40 --precision=bf16 --recompute=full",  # gpt2 ties its two tables
        "--micro-batch=1 --kv-heads=1 --attention=sdpa --optimizer=momentum --clip=0.1 "
        "--recompute=selective",
    ),
}
ON_EIGHT = dict(zip(SETTINGS, ("dualpipe", 8, "few", "uneven",
                               "--micro-batch=1 --kv-heads=2 --preset=gpt2 --attention=sdpa")))


def fits(one):
    """dualpipe pairs ranks. On one rank most schedules are alike: `make test` runs some."""
    if one["world"] == 1 and not FULL:
        return one["variant"] in ("1f1b", "interleaved", "dualpipe-v")
    return one["variant"] != "dualpipe" or one["world"] % 2 == 0


def flags_of(one):
    """A small model with a layer for each stage; where stages are uneven, one of them has two."""
    variant, p, training = one["variant"], one["world"], one["training"].split()
    depth = 2 * p if variant in ("interleaved", "dualpipe-v") else p
    least = {"interleaved": p, "dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(variant, 1)
    m = least if one["m"] == "few" else max(2 * p, 4)
    batch = m * (2 if "--micro-batch=2" in training else 1)
    layers = depth + (one["stages"] == "uneven")
    return (*TRAINING, "--dtype=float64", f"--variant={variant}", f"--layers={layers}",
            f"--batch={batch}", "--dim=16", "--heads=4", "--seq=6", "--vocab=128", *training)


@pytest.mark.parametrize("one", [*covering(fits, **SETTINGS), ON_EIGHT])
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"], timeout=120)(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize(("world", "flags"), sample([
    (3, "--batch=8 --optimizer=momentum --recompute=selective --layers=3"),
    (2, "--batch=1 --clip=0.1 --preset=gpt2 --attention=plain --layers=3 --block=llama --ffn=40"),
    (1, "--batch=3 --micro-batch=3 --optimizer=sgd --precision=bf16"),
    (4, "--batch=6 --micro-batch=2 --precision=bf16 --layers=5 --recompute=full"),
    (8, "--batch=7 --layers=8 --preset=gpt2 --clip=0.1"),
], size=2))  # fmt: skip
def test_without_a_flush_it_is_one_gpu_that_is_a_step_late(ranks, tmp_path, world, flags):
    """With the fewest micro-batches, p - 1, too."""
    small = "--dim=16 --heads=4 --seq=6 --vocab=128 --steps=4 --variant=2bw --verify"
    flags = [*FLOAT64, *small.split(), *flags.split()]
    results = ranks(world, timeout=120)(run_main, SEVEN, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    assert f"{results[0][1]['recorded']['losses_in_time'][-1]:.4f} in step 4" in results[0][2]


def pytorchs():
    """(schedule, flags)"""
    tiny = "--preset=tiny"
    tied = "--preset=gpt2 --block=llama --ffn=96 --precision=bf16 --recompute=full"
    yield from [("InterleavedZeroBubble", tied), ("GPipe", f"{tiny} --recompute=selective")]
    for name in ("1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"):
        yield from [(name, tiny), (name, tied)]
    yield from [("InterleavedZeroBubble", tiny), ("GPipe", tied)]


@pytest.mark.parametrize(("schedule", "flags"), sample(pytorchs(), size=1))
def test_pytorchs_own(ranks, tmp_path, schedule, flags):
    if torch.__version__ < "2.13" and schedule in ("ZBVZeroBubble", "DualPipeV"):
        pytest.skip("this PyTorch's V schedules send to their own rank: the chapter refuses them")
    flags = (*FLOAT64, "--variant=torch", f"--schedule={schedule}", "--layers=4", "--clip=0.1",
             "--attention=plain", *flags.split())
    hold_to_one_gpu(ranks(2, timeout=200)(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize("flags", sample([
    "--variant=zb-h2 --dtype=float32 --precision=bf16 --block=llama --recompute=selective",
    "--variant=1f1b --dtype=bfloat16",
    "--variant=dualpipe --dtype=float32 --precision=bf16",
]))
def test_bfloat16(ranks, tmp_path, flags):
    flags = (*FLOAT64, *flags.split())
    status, _, output = ranks(2, timeout=120)(run_main, SEVEN, flags, tmp_path)[0]
    assert status == 0, output


# ------------------------------------------------------------------------------- bit for bit


class FakeRun:
    """What `take_slices` asks of a run."""

    def __init__(self, args):
        self.args, self.world, self.rank = args, dist.get_world_size(), dist.get_rank()

    def draw(self, model):
        return common.draw_weights(model, self.args.seed, dtype=torch.float64)


def small_pipeline(variant, m, v, tie=False):
    """How this rank runs its program, its stages, its model and its micro-batches."""
    seven, p = chapter(SEVEN), dist.get_world_size()
    args = arguments(f"--layers={2 * p}", f"--batch={m}", "--micro-batch=1", "--ignore=0.5")
    cfg = args.model = dataclasses.replace(args.model, tie=tie)
    schedule = seven.make_schedule(variant, p, m, v)
    slices, model = seven.take_slices(FakeRun(args), schedule, seven.cut(cfg, schedule.depth))
    in_halves = variant.startswith(("zb", "dualpipe"))
    stages = {stage: seven.Stage(part, in_halves) for stage, part in slices.items()}
    empty = functools.partial(torch.empty, 1, cfg.seq, cfg.dim, dtype=torch.float64)
    run_program = functools.partial(
        seven.execute, seven.make_programs(schedule)[dist.get_rank()], stages, dist.group.WORLD,
        empty, lambda action, *kept: contextlib.nullcontext())
    tokens, targets, valid = common.Text(args).batch(0)
    return args, run_program, stages, model, list(zip(tokens.split(1), targets.split(1))), valid


def same_bits(variant, m, v):
    """Loss and gradients of a step, beside those of one GPU that accumulates micro-batches; and
    the outputs that nobody took."""
    seven = chapter(SEVEN)
    args, run_program, stages, model, micro_batches, valid = small_pipeline(variant, m, v)
    with mock.patch.object(seven, "post", wraps=seven.post) as post:
        loss = run_program(micro_batches, valid)
    _, _, _, outputs, _ = post.call_args.args

    one_gpu, total = common.gpt(args.model, args.seed, dtype=torch.float64), 0
    for tokens, targets in micro_batches:
        part = common.loss_sum(one_gpu(tokens), targets) / valid
        part.backward()
        total += part.detach()
    expected = dict(one_gpu.named_parameters())
    equal = all(p.grad.equal(expected[p.global_name].grad) for p in model.parameters())
    is_last = any(stage.is_last for stage in stages.values())
    return equal, not is_last or loss.equal(total), outputs


def same_bits_of_all():
    return {variant: same_bits(variant, 4, 2) for variant in VARIANTS}


def test_gradients_add_up_in_the_same_order_as_on_one_gpu(ranks):
    """Bit for bit. (dualpipe's two copies each have half of the sum.) And nothing is left."""
    for results in ranks(2, timeout=120)(same_bits_of_all):
        for variant, (*same, outputs) in results.items():
            assert outputs == {}, variant
            assert variant == "dualpipe" or same == [True, True], variant


# ------------------------------------------------------------------------------- faults


@pytest.mark.full
@programs.gloo_tells
def test_when_a_rank_is_killed_the_other_ends_with_a_line(tmp_path):
    """It waits for a message at that time; no launcher ends it."""
    ranks = programs.Ranks(CHAPTERS / f"{SEVEN}.py", *SMALL, f"--data={TEXT}", "--batch=4",
                           "--no-verify", "--steps=100000", world=2, cwd=tmp_path)
    try:
        ranks.until("     5 ")
        ranks.send(signal.SIGKILL, 1)
        assert ranks.wait() == [1, -9]
        assert ranks.err().count("\n") == 1 and "rank 1 has ended" in ranks.err()
    finally:
        ranks.stop()


# ------------------------------------------------------------------------------- bad arguments


def test_refusals(run_chapter):
    hold_refusals(run_chapter, SEVEN, [
        ("--variant=interleaved --layers=8 --batch=6", 4, "interleaved", "--batch 8"),
        ("--variant=dualpipe --batch=5 --micro-batch=1", 2, "dualpipe", "--batch 6"),
        ("--variant=dualpipe-v --batch=6 --micro-batch=2", 2, "dualpipe-v", "--batch 8"),
        ("--variant=dualpipe", 3, "dualpipe", "--nproc_per_node 4"),
        ("--variant=torch --schedule=Interleaved1F1B --layers=8 --batch=6", 4, "Interleaved1F1B",
         "--batch 8"),
        ("--variant=torch --batch=2", 3, "1F1B", "--batch 3"),
        ("--variant=torch --chunks=2", 2, "--chunks", "--schedule LoopedBFS"),
        ("", 5, "--layers 4", "--layers 5"),
        ("--variant=interleaved", 4, "--layers 4", "--layers 8"),
        ("--variant=2bw --batch=4 --micro-batch=2", 4, "2bw", "--batch 6"),
        ("--variant=2bw --steps=1", 2, "--variant 2bw", "--steps 2"),
        ("--variant=2bw --save=here", 2, "--save here", "--variant 1f1b"),
        ("--chunks=2", 2, "--chunks", "--variant interleaved"),
        ("--variant=zb-h1 --breadth-first", 2, "--breadth-first", "--variant interleaved"),
        ("--batch=8 --micro-batch=3", 2, "--batch 8", "--batch 9"),
    ])


@pytest.mark.parametrize(("version", "refused"), [("2.11.0", True), ("2.13.0+cpu", False)])
def test_a_v_through_an_old_pytorch_is_refused(seven, monkeypatch, version, refused):
    monkeypatch.setattr(torch, "__version__", version)
    args = parsed(seven, "--variant=torch --schedule=DualPipeV")
    what = "--schedule DualPipeV of PyTorch 2.11.0"
    with pytest.raises(Refused, match=what) if refused else contextlib.nullcontext():
        seven.requires(args, 2)


def parsed(seven, flags):
    return launch.parse(seven, [*flags.split(), f"--data={TEXT}"])


def test_what_is_not_refused(seven):
    seven.requires(parsed(seven, "--variant=torch --schedule=LoopedBFS --layers=8 --batch=6"), 4)
    seven.requires(parsed(seven, "--variant=torch --schedule=GPipe --batch=1"), 2)
    seven.requires(parsed(seven, "--variant=interleaved --layers=8 --batch=6 --breadth-first"), 4)
