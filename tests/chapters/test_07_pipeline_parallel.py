"""Chapter 07: every schedule gives one GPU's numbers, in the same order of sums."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from tests.conftest import arguments, chapter
from tests.support.runs import check_run, run_of, runs

SEVEN = "07_pipeline_parallel"
VARIANTS = ("1f1b", "naive", "afab", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")


@pytest.fixture(scope="module")
def seven():
    return chapter(SEVEN)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("07"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


@pytest.mark.full
@pytest.mark.skipif(torch.__version__ < "2.13", reason="these send to their own rank: refused")
@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_pytorchs_v_schedules(ranks, tmp_path, schedule):
    check_run(ranks, tmp_path, run_of(
        f"07 2 --variant=torch --schedule={schedule} --layers=4 --dim=16 --heads=4 --kv-heads=2 "
        "--seq=6 --batch=4 --micro-batch=1 --clip=0.1 --attention=plain"))


# ------------------------------------------------------------------------------- bit for bit


class FakeRun:
    """What `take_slices` asks of a run."""

    def __init__(self, args):
        self.args, self.world, self.rank = args, dist.get_world_size(), dist.get_rank()

    def draw(self, model):
        return common.draw_weights(model, self.args.seed, dtype=torch.float64)


def small_pipeline(variant, m, v):
    """How this rank runs its program, its stages, its model and its micro-batches."""
    seven, p = chapter(SEVEN), dist.get_world_size()
    args = arguments(f"--layers={2 * p}", f"--batch={m}", "--micro-batch=1", "--ignore=0.5")
    cfg, schedule = args.model, seven.make_schedule(variant, p, m, v)
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
    """For a rank of the pool: `same_bits` of each variant."""
    return {variant: same_bits(variant, 4, 2) for variant in VARIANTS}


def test_gradients_add_up_in_the_same_order_as_on_one_gpu(ranks):
    """Bit for bit. (dualpipe's two copies each have half of the sum.) And nothing is left."""
    for results in ranks(2, timeout=120)(same_bits_of_all):
        for variant, (*same, outputs) in results.items():
            assert outputs == {}, variant
            assert variant == "dualpipe" or same == [True, True], variant
