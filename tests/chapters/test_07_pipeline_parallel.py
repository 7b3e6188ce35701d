"""Chapter 07: every schedule gives one GPU's numbers; the lists alone, and their messages, too."""

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from common import Refused
from lab.bench import report
from lab.bench.ranks import CONTEXT, store
from lab.cli import strict
from tests.chapters.test_04_tensor_parallel import FLOAT64, TRAINING, covered
from tests.conftest import TEXT, arguments, chapter, hold_to_one_gpu, run_main
from tests.support.programs import gloo_tells

SEVEN = "07_pipeline_parallel"
VARIANTS = ("1f1b", "naive", "afab", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")
TORCH = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
         "DualPipeV")  # fmt: skip


@pytest.fixture(scope="module")
def seven():
    return chapter(SEVEN)


# ------------------------------------------------------------------------------- same as one GPU


def fits(one):
    """Whether a schedule is defined for so many ranks (as many micro-batches as it takes there are
    always). On one rank, where most are alike, only some."""
    if one["world"] == 1 and not os.environ.get("FULL"):
        return one["variant"] in ("1f1b", "interleaved", "dualpipe-v")
    return one["variant"] != "dualpipe" or one["world"] % 2 == 0


def flags_of(one):
    """A small model with a layer for each stage; where stages are uneven, two of them have two."""
    variant, p, v = one["variant"], one["world"], 2
    depth = {"interleaved": v * p, "dualpipe-v": 2 * p}.get(variant, p)
    least = {"interleaved": p, "dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(variant, 1)
    m = {"few": least, "many": 16 if p < 3 else 2 * p}[one["m"]]
    layers = depth + (2 if one["stages"] == "uneven" else 0)
    flags = [f"--variant={variant}", f"--layers={layers}", f"--batch={m * one['micro-batch']}",
             "--dim=16", "--heads=4", "--seq=6", "--vocab=128"]
    if one["block"] == "llama":
        flags.append("--ffn=40")
    given = ("micro-batch", "kv-heads", "preset", "attention", "optimizer", "clip", "block",
             "precision", "recompute")
    flags += [f"--{name}={one[name]}" for name in given if one[name] is not None]
    return [*TRAINING, "--dtype=float64", *flags]


SETTINGS = {
    "variant": VARIANTS,
    "world": (1, 2, 3, 4),
    "m": ("few", "many"),
    "stages": ("even", "uneven"),
    "micro-batch": (1, 2),
    "kv-heads": (4, 2, 1),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "attention": ("plain", "sdpa"),
    "optimizer": ("adamw", "sgd", "momentum"),
    "clip": (None, 0.1),
    "block": ("gpt", "llama"),
    "precision": ("fp32", "bf16"),  # masters in float64: the same numbers, by another path
    "recompute": ("none", "selective", "full"),
}


ON_EIGHT = dict(zip(SETTINGS, ("dualpipe", 8, "few", "uneven", 1, 2, "gpt2", "plain", "sgd", 0.1,
                               "llama", "bf16", "full")))


def drawn(number):
    """So many settings that fit, by chance: all of them are too many to choose from."""
    rng = random.Random(0)
    some = [{name: rng.choice(values) for name, values in SETTINGS.items()} for _ in range(number)]
    return [one for one in some if fits(one)]


@pytest.mark.parametrize("one", [*covered(drawn(3000)), pytest.param(ON_EIGHT, id="8")])
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.full
@pytest.mark.parametrize("one", [
    dict(zip(SETTINGS, (*some, 1, 2, preset, "plain", "adamw", 0.1, "llama", "bf16", "full")))
    for some in itertools.product(VARIANTS, (1, 2, 3, 4, 8), ("few", "many"), ("even", "uneven"))
    for preset in ("tiny", "gpt2") if fits({"variant": some[0], "world": some[1]})
])  # fmt: skip
def test_same_as_one_gpu_in_full(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize(("world", "flags"), [
    (1, "--batch=3 --micro-batch=3 --optimizer=sgd --precision=bf16"),
    (2, "--batch=1 --clip=0.1 --preset=gpt2 --attention=plain --layers=3 --block=llama"),
    (3, "--batch=8 --optimizer=momentum --recompute=selective --layers=3"),
    (4, "--batch=6 --micro-batch=2 --precision=bf16 --layers=5 --recompute=full"),
    pytest.param(8, "--batch=7 --layers=8 --preset=gpt2 --clip=0.1", marks=pytest.mark.full),
])  # fmt: skip
def test_without_a_flush_it_is_one_gpu_that_is_a_step_late(ranks, tmp_path, world, flags):
    """With the fewest micro-batches, p - 1, too."""
    small = "--dim=16 --heads=4 --seq=6 --vocab=128 --ffn=40 --steps=4 --variant=2bw --verify"
    flags = [*FLOAT64, *small.split(), *flags.split()]
    results = ranks(world)(run_main, SEVEN, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    said = "one GPU that waits for its gradients has loss "
    assert f"{said}{results[0][1]['recorded']['losses_in_time'][-1]:.4f} in step 4" in results[0][2]


@pytest.mark.parametrize(("schedule", "preset"), [
    pytest.param(name, preset, marks=() if few else pytest.mark.full)
    for name in TORCH for preset in ("tiny", "gpt2")
    for few in [(name, preset) in (("1F1B", "tiny"), ("GPipe", "tiny"),
                                   ("InterleavedZeroBubble", "gpt2"))]
])  # fmt: skip
def test_pytorchs_own(ranks, tmp_path, schedule, preset):
    if torch.__version__ < "2.13" and schedule in ("ZBVZeroBubble", "DualPipeV"):
        pytest.skip("this PyTorch's V schedules send to their own rank: the chapter refuses them")
    flags = (*FLOAT64, "--variant=torch", f"--schedule={schedule}", "--layers=4", "--clip=0.1",
             f"--preset={preset}", "--attention=plain")
    if preset == "gpt2":  # and each pair of the others
        flags += ("--block=llama", "--ffn=96", "--precision=bf16", "--recompute=full")
    if schedule == "GPipe":
        flags += ("--recompute=selective",)
    hold_to_one_gpu(ranks(2, timeout=90)(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", ["1f1b", "zb-h2", "dualpipe"])
def test_bfloat16(ranks, tmp_path, variant):
    of_variant = {"1f1b": "--dtype=bfloat16", "dualpipe": "--dtype=float32 --precision=bf16",
                  "zb-h2": "--dtype=float32 --precision=bf16 --block=llama --recompute=selective"}
    flags = (*FLOAT64, *of_variant[variant].split(), f"--variant={variant}")
    status, _, output = ranks(2)(run_main, SEVEN, flags, tmp_path)[0]
    assert status == 0, output
    assert f"last stage, on rank {'0 and 1' if variant == 'dualpipe' else '1'}\n" in output


class FakeRun:
    """What `take_slices` asks of a run."""

    def __init__(self, args):
        self.args, self.world, self.rank = args, dist.get_world_size(), dist.get_rank()

    def draw(self, model):
        return common.draw_weights(model, self.args.seed, dtype=torch.float64)


def small_pipeline(variant, m, v, programs_of=None, tie=False):
    """How this rank runs its program, its stages, its model and its micro-batches."""
    seven, p = chapter(SEVEN), dist.get_world_size()
    args = arguments(f"--layers={2 * p}", f"--batch={m}", "--micro-batch=1", "--ignore=0.5")
    cfg = args.model = dataclasses.replace(args.model, tie=tie)
    schedule = seven.make_schedule(variant, p, m, v)
    slices, model = seven.take_slices(FakeRun(args), schedule, seven.cut(cfg, schedule.depth))
    in_halves = variant.startswith(("zb", "dualpipe"))
    stages = {stage: seven.Stage(part, in_halves) for stage, part in slices.items()}
    empty = functools.partial(torch.empty, 1, cfg.seq, cfg.dim, dtype=torch.float64)
    programs = (programs_of or seven.make_programs)(schedule)
    run_program = functools.partial(
        seven.execute, programs[dist.get_rank()], stages, dist.group.WORLD, empty,
        lambda action, *kept: contextlib.nullcontext())
    tokens, targets, valid = common.Text(args).batch(0)
    return args, run_program, stages, model, list(zip(tokens.split(1), targets.split(1))), valid


def same_bits(variant, v):
    """Loss and gradients of a step, beside those of one GPU that accumulates micro-batches; and
    the outputs that nobody took."""
    seven = chapter(SEVEN)
    args, run_program, stages, model, micro_batches, valid = small_pipeline(variant, 8, v)
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


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_add_up_in_the_same_order_as_on_one_gpu(ranks, variant):
    """Bit for bit. (dualpipe's two copies each have half of the sum.) And nothing is left."""
    results = ranks(2)(same_bits, variant, 2)
    assert all(outputs == {} for *_, outputs in results)
    assert variant == "dualpipe" or [same for *same, _ in results] == [[True, True]] * 2


# ------------------------------------------------------------------------------- faults


TIED = ("--preset=gpt2", "--attention=plain")


def die_in_the_second_step(rank, port, flags):
    """One of two ranks, in a process of its own and without a launcher; rank 1 is the one."""
    os.dup2(os.open(f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    seven, forwards = chapter(SEVEN), []
    forward = seven.Stage.forward

    def die(*args):
        forwards.append(args)
        if rank == 1 and len(forwards) == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*args)

    seven.Stage.forward = die
    sys.argv = [seven.__file__, *flags]
    report.launch(seven.__file__, seven.__doc__, seven.VARIANTS, seven.requires, seven.flags,
                  seven.formulas)


@gloo_tells
def test_when_a_rank_is_killed_the_others_end_with_a_line(seven, tmp_path, monkeypatch):
    """In the middle of a step; no launcher ends them."""
    monkeypatch.chdir(tmp_path)
    flags = ["--batch=4", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--device=cpu"]
    start, meeting = time.monotonic(), store()
    members = [CONTEXT.Process(target=die_in_the_second_step, args=(rank, meeting.port, flags))
               for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join(60)
    assert time.monotonic() - start < 60
    assert [member.exitcode for member in members] == [1, -signal.SIGKILL]
    assert Path("0.txt").read_text() == "error: step 2: rank 1 has ended\n"


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("world", "flags", "line"),
    [
        (4, "--variant=interleaved --layers=8 --batch=6",
         "interleaved on 4 ranks does not take 6 micro-batches; --batch 8 would work"),
        (4, "--variant=dualpipe --batch=6",
         "dualpipe on 4 ranks does not take 6 micro-batches; --batch 8 would work"),
        (2, "--variant=dualpipe --batch=5 --micro-batch=1",
         "dualpipe on 2 ranks does not take 5 micro-batches; --batch 6 would work"),
        (2, "--variant=dualpipe-v --batch=6 --micro-batch=2",
         "dualpipe-v on 2 ranks does not take 3 micro-batches; --batch 8 would work"),
        (3, "--variant=dualpipe",
         "dualpipe pairs ranks, and 3 is an odd number; --nproc_per_node 4 would work"),
        (4, "--variant=torch --schedule=Interleaved1F1B --layers=8 --batch=6",
         "Interleaved1F1B on 4 ranks does not take 6 micro-batches; --batch 8 would work"),
        (3, "--variant=torch --batch=2",
         "1F1B on 3 ranks does not take 2 micro-batches; --batch 3 would work"),
        (2, "--variant=torch --chunks=2",
         "--chunks means nothing to --schedule 1F1B; --schedule LoopedBFS would work"),
        (5, "", "--layers 4 is less than one for each of 5 stages; --layers 5 would work"),
        (4, "--variant=interleaved",
         "--layers 4 is less than one for each of 8 stages; --layers 8 would work"),
        (4, "--variant=2bw --batch=4 --micro-batch=2",
         "2bw on 4 ranks does not take 2 micro-batches; --batch 6 would work"),
        (2, "--variant=2bw --steps=1",
         "--variant 2bw is late from its second step on; --steps 2 would work"),
        (2, "--variant=2bw --save=here", "--save here: steps of --variant 2bw overlap, and have no "
         "state between them; --variant 1f1b would work"),
        (2, "--chunks=2",
         "--chunks means nothing to --variant 1f1b; --variant interleaved would work"),
        (2, "--chunks=10000000",  # found without a schedule of so many stages
         "--chunks means nothing to --variant 1f1b; without --chunks would work"),
        (2, "--variant=zb-h1 --breadth-first",
         "--breadth-first means nothing to --variant zb-h1; --variant interleaved would work"),
        (2, "--batch=8 --micro-batch=3",
         "--batch 8 is not a multiple of 1 data-parallel ranks x --micro-batch = 3; --batch 9 "
         "would work"),
    ],
)  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*flags.split(), f"--data={TEXT}")
    status, output, errors = run_chapter(SEVEN, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize(("version", "refused"), [("2.11.0", True), ("2.13.0+cpu", False)])
def test_a_v_through_an_old_pytorch_is_refused(seven, monkeypatch, version, refused):
    monkeypatch.setattr(torch, "__version__", version)
    flags = ("--variant=torch", "--schedule=DualPipeV", f"--data={TEXT}")
    args = strict.parse(seven.__file__, "", seven.VARIANTS, seven.flags, flags)
    what = "--schedule DualPipeV of PyTorch 2.11.0 sends"
    with pytest.raises(Refused, match=what) if refused else contextlib.nullcontext():
        seven.requires(args, 2)


@pytest.mark.parametrize(("world", "flags"), [
    (4, "--variant=torch --schedule=LoopedBFS --layers=8 --batch=6"),
    (2, "--variant=torch --schedule=GPipe --batch=1"),
    (4, "--variant=interleaved --layers=8 --batch=6 --breadth-first"),
])  # fmt: skip
def test_what_is_not_refused(seven, world, flags):
    args = strict.parse(seven.__file__, "", seven.VARIANTS, seven.flags,
                     [*flags.split(), f"--data={TEXT}"])
    seven.requires(args, world)
