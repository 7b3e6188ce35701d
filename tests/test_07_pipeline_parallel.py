"""Chapter 07: every schedule gives one GPU's numbers; the lists alone, and their messages, too."""

import contextlib
import dataclasses
import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import CHAPTERS, ROOT, TEXT, arguments, broken, chapter, hold_to_one_gpu, run_main
from test_04_tensor_parallel import FLOAT64, TRAINING, covering

import common
from lab import cli, meters, schedules

SEVEN = "07_pipeline_parallel"
VARIANTS = ("1f1b", "naive", "afab", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")
TORCH = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
         "DualPipeV")  # fmt: skip


@pytest.fixture(scope="module")
def seven():
    return chapter(SEVEN)


# ------------------------------------------------------------------------------- same as one GPU


def fits(one):
    """Whether a schedule is defined for so many ranks; as many micro-batches as it takes there are
    always."""
    return one["variant"] != "dualpipe" or one["world"] % 2 == 0


def flags_of(one):
    """A small model with a layer or two for each stage; where stages are uneven, one has three."""
    variant, p, v = one["variant"], one["world"], 2
    depth = {"interleaved": v * p, "dualpipe-v": 2 * p}.get(variant, p)
    least = {"interleaved": p, "dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(variant, 1)
    m = {"few": least, "many": 16 if p < 3 else 2 * p}[one["m"]]
    blocks = [1] * depth
    if one["stages"] == "uneven":
        blocks[depth // 2] += 2
    flags = [f"--variant={variant}", f"--layers={sum(blocks)}", f"--batch={m * one['micro-batch']}",
             "--dim=16", "--heads=4", "--seq=6", "--vocab=128"]
    if one["stages"] == "uneven":
        flags.append(f"--stages={','.join(map(str, blocks))}")
    given = ("micro-batch", "kv-heads", "preset", "attention", "optimizer", "clip")
    flags += [f"--{name}={one[name]}" for name in given if one[name] is not None]
    return [*TRAINING, "--dtype=float64", *flags]


SETTINGS = {
    "variant": VARIANTS,
    "world": (1, 2, 3, 4, 8),
    "m": ("few", "many"),
    "stages": ("by cost", "uneven"),
    "micro-batch": (1, 2),
    "kv-heads": (4, 2, 1),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "attention": ("plain", "sdpa"),
    "optimizer": ("adamw", "sgd", "momentum"),
    "clip": (None, 0.1),
}


@pytest.mark.parametrize("one", covering(fits, **SETTINGS))
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.full
@pytest.mark.parametrize("one", [
    dict(zip(SETTINGS, (*some, 1, 2, preset, "plain", "adamw", 0.1)))
    for some in itertools.product(VARIANTS, (1, 2, 3, 4, 8), ("few", "many"), ("by cost", "uneven"))
    for preset in ("tiny", "gpt2") if fits({"variant": some[0], "world": some[1]})
])  # fmt: skip
def test_same_as_one_gpu_in_full(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize("schedule", [
    *TORCH[:1], *(pytest.param(name, marks=pytest.mark.full) for name in TORCH[1:4]), *TORCH[4:5],
    *(pytest.param(name, marks=pytest.mark.full) for name in TORCH[5:])])  # fmt: skip
@pytest.mark.parametrize("preset", ["tiny", "gpt2"])
def test_pytorchs_own(ranks, tmp_path, schedule, preset):
    if torch.__version__ < "2.13" and schedule in ("ZBVZeroBubble", "DualPipeV"):
        pytest.skip("this PyTorch's V schedules send to their own rank: the chapter refuses them")
    flags = (*FLOAT64, "--variant=torch", f"--schedule={schedule}", "--layers=4", "--clip=0.1",
             f"--preset={preset}", "--attention=plain")
    hold_to_one_gpu(ranks(2, timeout=90)(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", ["1f1b", "zb-h2", "dualpipe"])
def test_bfloat16(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--dtype=bfloat16", f"--variant={variant}")
    status, _, output = ranks(2)(run_main, SEVEN, flags, tmp_path)[0]
    assert status == 0, output
    assert f"last stage, on rank {'0 and 1' if variant == 'dualpipe' else '1'}\n" in output


class FakeRun:
    """What `take_slices` asks of a run."""

    def __init__(self, args):
        self.args, self.world, self.rank = args, dist.get_world_size(), dist.get_rank()
        self.device, self.dtype = torch.device("cpu"), torch.float64


def small_pipeline(variant, m, v, programs_of=None, tie=False):
    """A pipeline of this rank, its model and its micro-batches."""
    seven, p = chapter(SEVEN), dist.get_world_size()
    args = arguments(f"--layers={2 * p}", f"--batch={m}", "--micro-batch=1", "--ignore=0.5")
    args.model = dataclasses.replace(args.model, tie=tie)
    schedule = seven.make_schedule(variant, p, m, v)
    cuts = seven.cut(args.model, seven.balanced(args.model, schedule.depth))
    slices, model = seven.take_slices(FakeRun(args), schedule.ranks, cuts)
    in_halves = variant.startswith(("zb", "dualpipe"))
    stages = {stage: seven.Stage(part, in_halves) for stage, part in slices.items()}
    cfg = args.model
    empty = functools.partial(torch.empty, 1, cfg.seq, cfg.dim, dtype=torch.float64)
    programs = (programs_of or seven.make_programs)(schedule)
    pipeline = seven.Pipeline(schedule, programs[dist.get_rank()], stages, dist.group.WORLD, empty,
                              lambda action, kept: contextlib.nullcontext())
    tokens, targets, valid = common.Text(args).batch(0)
    return args, pipeline, model, list(zip(tokens.split(1), targets.split(1))), valid


def same_bits(variant, v):
    """Loss and gradients of a step, beside those of one GPU that accumulates micro-batches."""
    args, pipeline, model, micro_batches, valid = small_pipeline(variant, 8, v)
    loss = chapter(SEVEN).execute(pipeline, micro_batches, valid)

    one_gpu, total = common.gpt(args.model, args.seed, dtype=torch.float64), 0
    for tokens, targets in micro_batches:
        part = common.loss_sum(one_gpu(tokens), targets) / valid
        part.backward()
        total += part.detach()
    expected = dict(one_gpu.named_parameters())
    equal = all(p.grad.equal(expected[p.global_name].grad) for p in model.parameters())
    is_last = any(stage.is_last for stage in pipeline.stages.values())
    return equal, not is_last or loss.equal(total)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "dualpipe"])
def test_gradients_add_up_in_the_same_order_as_on_one_gpu(ranks, variant):
    """Bit for bit. (dualpipe's two copies each have half of the sum.)"""
    assert ranks(2)(same_bits, variant, 2) == [(True, True)] * 2


# ------------------------------------------------------------------------------- the lists


def every_schedule(most=8):
    """(variant, p, m, v, breadth first) of all that are defined, up to 8 of each."""
    for variant, p, m in itertools.product(VARIANTS, range(1, most + 1), range(1, most + 1)):
        if variant == "dualpipe" and p % 2 == 0:
            yield variant, p, 2 * p + 2 * (m - 1), 1, False
        elif variant == "dualpipe-v":
            yield variant, p, 2 * p + m - 1, 1, False
        elif variant == "interleaved":
            for v in range(1, most + 1):
                yield variant, p, m, v, True
                if m % p == 0:
                    yield variant, p, m, v, False
        elif variant != "dualpipe":
            yield variant, p, m, 1, False


def test_every_schedule_is_complete_and_its_messages_meet(seven):
    """Each micro-batch has its F, B and W in each stage once; and nobody waits for ever."""
    seen = 0
    for variant, p, m, v, breadth_first in every_schedule():
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        done = [(kind, stage, i) for actions in schedule.actions for kinds, stage, i in actions
                for kind in kinds]
        expected = [(kind, stage, i) for kind in "FBW" for stage in range(len(schedule.ranks))
                    for i in range(m) if variant != "dualpipe" or i // (m // 2) == stage // p]
        assert sorted(done) == sorted(expected), (variant, p, m, v)
        for rank, actions in enumerate(schedule.actions):
            assert all(schedule.ranks[stage] == rank for _, stage, _ in actions)
        schedules.check_rendezvous(seven.make_programs(schedule), schedule.needs)
        seen += 1
    assert seen > 500


def test_what_an_action_needs(seven):
    """Of two pipelines with two stages each, as dualpipe has them."""
    schedule = seven.make_schedule("dualpipe", 2, 4)
    needs = {(kind, stage): schedule.needs(seven.Action(kind, stage, 5))
             for kind in ("F", "B", "BW", "W") for stage in (2, 3)}
    assert needs == {
        ("F", 2): [], ("F", 3): [("F", 2, 5)],
        ("B", 2): [("F", 2, 5), ("B", 3, 5)], ("B", 3): [("F", 3, 5)],
        ("BW", 2): [("F", 2, 5), ("B", 3, 5)], ("BW", 3): [("F", 3, 5)],
        ("W", 2): [("B", 2, 5)], ("W", 3): [("B", 3, 5)]}  # fmt: skip


def lazy_programs(schedule):
    """What a rank needs it receives right before an action, and sends right after: the order that
    gloo forgives."""
    seven, programs = chapter(SEVEN), []
    takers = {}
    for actions in schedule.actions:
        for action in actions:
            takers |= {need: action for need in schedule.needs(action) if need[1] != action.stage}
    for rank, actions in enumerate(schedule.actions):
        program = []
        for action in actions:
            for need in schedule.needs(action):
                if schedule.ranks[need[1]] != rank:
                    program.append([seven.Message(need, schedule.ranks[need[1]], rank)])
            program.append(action)
            taker = takers.get(action.output) if action.kind != "W" else None
            if taker and schedule.ranks[taker.stage] != rank:
                message = seven.Message(action.output, rank, schedule.ranks[taker.stage])
                program.append([message])
        programs.append(program)
    return programs


def lazy_step():
    """On gloo: whether the step's gradients are right all the same."""
    seven, results = chapter(SEVEN), []
    for programs_of in (lazy_programs, None):
        _, pipeline, model, micro_batches, valid = small_pipeline("1f1b", 4, 1, programs_of)
        seven.execute(pipeline, micro_batches, valid)
        results.append([p.grad for p in model.parameters()])
    return all(one.equal(other) for one, other in zip(*results))


def test_an_order_that_gloo_forgives_is_refused(seven, ranks):
    """Receive right before, send right after: rank 0 would send down while rank 1 sends up."""
    schedule = seven.make_schedule("1f1b", 2, 4)
    with pytest.raises(ValueError, match="ranks wait for ever: rank 0 .*; rank 1 "):
        schedules.check_rendezvous(lazy_programs(schedule), schedule.needs)
    assert all(ranks(2)(lazy_step))


def train_lazily(folder):
    with mock.patch.object(chapter(SEVEN), "make_programs", lazy_programs):
        try:
            run_main(SEVEN, FLOAT64, folder)
        except ValueError as error:
            return str(error)


def test_a_run_checks_the_order_before_its_first_step(ranks, tmp_path):
    assert all("ranks wait for ever" in said for said in ranks(2)(train_lazily, tmp_path))


def tied_copies(variant):
    """The embedding after three steps, as the first and the last stage have it."""
    seven = chapter(SEVEN)
    args, pipeline, model, micro_batches, valid = small_pipeline(variant, 8, 2, tie=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(3):
        seven.train_step(pipeline, model, optimizer, micro_batches, valid, 0.1)
    return [p.detach() for p in model.parameters() if p.global_name == "embedding.weight"]


@pytest.mark.parametrize("variant", ["1f1b", "interleaved", "dualpipe"])
def test_tied_embeddings_stay_equal_bit_for_bit(ranks, variant):
    [[one], *_, [other]] = ranks(4)(tied_copies, variant)
    assert one.equal(other)


def test_messages_out_of_order_or_missing_are_refused(seven):
    schedule = seven.make_schedule("afab", 2, 3)
    actions, (first, second, third) = schedule.actions, (
        [seven.Message(("F", 0, i), 0, 1)] for i in range(3))
    forwards = [actions[0][:3], actions[1][:3]]

    def check(*programs):
        schedules.check_rendezvous(programs, schedule.needs)

    f0, f1 = forwards
    check([f0[0], first, f0[1], second], [first, f1[0], second, f1[1]])
    with pytest.raises(ValueError, match="rank 1 posts .* where rank 0 has"):
        check([f0[0], first, f0[1], second], [second, first])
    with pytest.raises(ValueError, match="rank 1 comes to .*'F', stage=1, micro_batch=1.* without"):
        check([f0[0], first, f0[1], second], [first, f1[0], f1[1], second])
    with pytest.raises(ValueError, match="rank 0 for the other side of .*'F', 0, 2"):
        check([*f0, first, second, third], [first, second])


def test_a_schedule_in_which_ranks_wait_for_each_other_raises():
    """1f1b with the last rank ahead instead of the first."""
    module = broken(SEVEN, '"1f1b": p - 1 - rank,', '"1f1b": rank,')
    with pytest.raises(ValueError, match="ranks wait for each other: rank 0 before Action"):
        module.simulate(module.make_schedule("1f1b", 2, 4))


def test_the_lesson_has_the_drawings_that_the_code_makes(seven):
    for variant, columns in (("1f1b", None), ("naive", 36)):
        for line in seven.drawing(seven.make_schedule(variant, 4, 4)).splitlines():
            assert line[:columns] in seven.__doc__, line


# ------------------------------------------------------------------------------- the formulas


COSTS = ({}, {"F": 3, "B": 4, "W": 2}, {"F": 10, "B": 12, "W": 8}, {"F": 2, "B": 1, "W": 2},
         {"F": 2, "B": 1, "W": 1}, {"F": 1, "B": 1, "W": 2})


def test_bubbles_are_those_of_the_closed_forms(seven):
    for variant, p, m, v, breadth_first in every_schedule():
        if variant in ("interleaved", "afab", "1f1b", "naive") and p == 1:
            continue  # no bubble, and nothing to divide
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        for costs in COSTS:
            formula = seven.bubble(variant, p, m, v, **costs)
            if formula is not None:
                simulated = seven.simulated_bubble(schedule, variant, **costs)
                assert simulated == pytest.approx(formula, abs=1e-9), (variant, p, m, v, costs)


def test_bubbles_are_the_literatures(seven):
    for p, m in ((4, 8), (8, 32)):
        assert seven.bubble("1f1b", p, m, 1) == seven.bubble("afab", p, m, 1) == (p - 1) / m
        assert seven.bubble("interleaved", p, m, 4) == pytest.approx((p - 1) / (4 * m))
        assert seven.bubble("naive", p, m, 1) == p - 1
        assert seven.bubble("zb-h1", p, m, 1) == pytest.approx((p - 1) / m / 3)
        assert seven.bubble("zb-h2", p, m, 1) == 0
    assert seven.bubble("zb-h1", 2, 4, 1, 1, 1, 2) is None is seven.bubble("dualpipe", 4, 8, 1, 2)
    assert seven.bubble("zb-h2", 4, 6, 1) is None and seven.bubble("zb-h1", 4, 3, 1) is None


def test_as_many_micro_batches_are_alive_as_the_formula_says(seven):
    for variant, p, m, v, breadth_first in every_schedule():
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        stages_of_a_rank, ones = len(schedule.ranks) // p, [1] * schedule.depth
        for rank, actions in enumerate(schedule.actions):
            over_time = seven.alive_over_time(actions, ones, ones)
            assert over_time[-1] == 0 and max(over_time) == seven.most_alive(
                variant, rank, p, m, stages_of_a_rank, breadth_first), (variant, p, m, v, rank)


def test_as_many_messages_are_sent_as_the_formula_says(seven):
    for variant, p, m, v, breadth_first in every_schedule(most=5):
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        for rank, program in enumerate(seven.make_programs(schedule)):
            sent = [message for batch in program if isinstance(batch, list) for message in batch
                    if message.sender == rank]
            formula = seven.traffic(variant, rank, p, m, len(schedule.ranks) // p, 1, 0, 8)
            assert formula.get("send", (0,))[0] == len(sent), (variant, p, m, v, rank)


def test_blocks_are_spread_by_cost(seven):
    """No other way to spread them makes the slowest stage faster."""
    for layers, depth, vocab in ((8, 4, 256), (9, 4, 4096), (7, 3, 65536), (5, 5, 256)):
        cfg = common.Config(layers, 64, 4, 2, 32, vocab)
        slowest = {blocks: max(seven.per_stage(seven.forward_flops(cfg), seven.cut(cfg, blocks)))
                   for blocks in itertools.product(range(1, layers + 1), repeat=depth)
                   if sum(blocks) == layers}
        assert slowest[tuple(seven.balanced(cfg, depth))] == min(slowest.values())
        assert seven.cut(cfg, seven.balanced(cfg, depth))[-1][1] == layers + 2


def test_flops_are_what_pytorch_counts(seven):
    cfg = common.Config(3, 32, 4, 2, 16, 100)
    model, tokens = common.gpt(cfg), torch.zeros(2, 16, dtype=torch.int64)
    flops = meters.count_flops(lambda: model(tokens))
    assert flops == 2 * 16 * sum(seven.forward_flops(cfg))


def test_a_message_hides_behind_so_many_blocks(seven):
    cfg = common.Config(4, 8192, 64, 64, 1, 256)  # so short that only matrices count
    assert seven.blocks_to_hide(cfg, 2, 1e15, 1e11) == pytest.approx(
        2 * 1e15 / (24 * 8192 * 1e11), rel=1e-3)


def test_sleeping_stages_take_as_long_as_simulated(ranks, tmp_path):
    flags = (*FLOAT64, "--sleep=20", "--layers=8", "--batch=8", "--steps=1")
    for variant in ("1f1b", "dualpipe-v"):
        results = ranks(4)(run_main, SEVEN, (*flags, f"--variant={variant}"), tmp_path)
        status, run, output = results[0]
        assert status == 0, output
        [check] = [check for check in run["checks"] if "sleeping" in check["name"]]
        assert check["measured"] >= check["expected"] and check["ok"]
        assert f"last stage, on rank {'3' if variant == '1f1b' else '0'}\n" in output
        units = max(end for actions in run["recorded"]["simulated"] for *_, end in actions)
        assert check["expected"] == 20 * units


# ------------------------------------------------------------------------------- faults


TIED = ("--preset=gpt2", "--attention=plain")


@pytest.mark.parametrize(
    ("flags", "right", "wrong", "named"),
    [
        # whose gradients, and divided by what
        ("", "micro_batches[i]\n", "(micro_batches[i][0], micro_batches[i - 1][1])\n", "loss"),
        ("", "x, edge = self.for_b.pop(i)", "x, edge = self.for_b.pop(max(self.for_b))",
         "gradients"),
        ("", "out = loss_sum(out, targets) / valid",
         "out = loss_sum(out, targets) / (targets >= 0).sum() / 4", "loss"),
        ("", "dist.all_reduce(loss)  ", "pass  ", "loss"),
        # backward in halves
        ("--variant=zb-h1", "in self.for_w.pop(i):", "in 2 * self.for_w.pop(i):", "gradients"),
        ("--variant=zb-h1", "self.later.clear()", "pass", "gradients"),
        ("--variant=zb-h1", "x.detach(), dy))", "x, dy))", "activations"),
        ("--variant=zb-h1", '        if "W" in kind:\n', '        if "W" in kind and i:\n',
         "gradients"),
        # what lies on two ranks
        ("tied", "    sum_partial_grads(model.parameters())\n\n    norm", "    norm",
         "gradients embedding.weight"),
        ("tied", "parameter.copies, parameter.partial = 2, pair", "parameter.partial = pair",
         "gradient norm"),
        ("--variant=dualpipe", "parameter.copies, parameter.partial = 2, pair",
         "parameter.partial = pair", "gradient norm"),
        ("--variant=dualpipe", "sorted(slices, key=lambda stage: stage % depth)", "sorted(slices)",
         "gradients"),
        # the norm over all stages
        ("", "grad_norm(model.parameters(), pipeline.group)", "grad_norm(model.parameters())",
         "gradient norm"),
        # what is kept
        ("", "self.for_b[i] = x, get_gradient_edge(out)", "self.for_b[i] = x, get_gradient_edge("
         "out); self.all = [*getattr(self, 'all', []), self.for_b[i]]", "activations"),
        ("--variant=zb-h1", "inputs = x + x + x + 4 * x", "inputs = 2 * x", "activations"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, flags, right, wrong, named):
    """Faults that a student might make."""
    flags = TIED if flags == "tied" else flags.split()
    flags = (*FLOAT64, "--steps=1", "--clip=0.1", *flags)
    (status, _, output), *_ = ranks(2)(run_main, SEVEN, flags, tmp_path, (right, wrong))
    problems = [line for line in output.splitlines() if line.startswith("  ✗")]
    assert status == 1 and any(named in line for line in problems), output


KILLED = """
import importlib, os, signal, sys
sys.path[:0] = sys.argv.pop(1), sys.argv.pop(1)
import common
seven, forwards = importlib.import_module("07_pipeline_parallel"), []
forward = seven.Stage.forward

def die_in_the_second_step(*args):
    forwards.append(args)
    if os.environ["RANK"] == "1" and len(forwards) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    return forward(*args)

seven.Stage.forward = die_in_the_second_step
common.launch(seven.__file__, seven.__doc__, seven.VARIANTS, seven.requires, seven.flags)
"""


def test_when_a_rank_is_killed_the_others_end_with_a_line(seven, tmp_path):
    """In the middle of a step; no launcher ends them."""
    flags = ["--batch=4", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--device=cpu"]
    start, members = time.monotonic(), []
    port = str(20000 + os.getpid() % 10000)
    for rank in range(3):
        environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1",
                                    "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        members.append(subprocess.Popen(
            [sys.executable, "-c", KILLED, str(CHAPTERS), str(ROOT), *flags], cwd=tmp_path,
            env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
    errors = [member.communicate(timeout=60)[1] for member in members]
    assert time.monotonic() - start < 60
    assert [member.returncode for member in members] == [1, -signal.SIGKILL, 1]
    assert errors[0] == "error: rank 0: another rank has ended\n"
    assert errors[2] == "error: rank 2: another rank has ended\n"


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("world", "flags", "line"),
    [
        (4, "--variant=interleaved --layers=8 --batch=6", "interleaved on 4 ranks takes a multiple "
         "of 4 micro-batches, not 6; --batch 8 would work"),
        (4, "--variant=dualpipe --batch=6",
         "dualpipe on 4 ranks takes 8 or more micro-batches, not 6; --batch 8 would work"),
        (2, "--variant=dualpipe --batch=5 --micro-batch=1",
         "dualpipe on 2 ranks takes a multiple of 2 micro-batches, not 5; --batch 6 would work"),
        (2, "--variant=dualpipe-v --batch=6 --micro-batch=2",
         "dualpipe-v on 2 ranks takes 4 or more micro-batches, not 3; --batch 8 would work"),
        (3, "--variant=dualpipe",
         "dualpipe pairs ranks, and 3 is an odd number; --nproc_per_node=4 would work"),
        (4, "--variant=torch --schedule=Interleaved1F1B --layers=8 --batch=6", "Interleaved1F1B on "
         "4 ranks takes a multiple of 4 micro-batches, not 6; --batch 8 would work"),
        (3, "--variant=torch --batch=2",
         "1F1B on 3 ranks takes 3 or more micro-batches, not 2; --batch 3 would work"),
        (2, "--variant=torch --chunks=2",
         "--chunks means nothing to --schedule 1F1B; LoopedBFS would work"),
        (5, "", "--layers 4 is less than one for each of 5 stages; --layers 5 would work"),
        (4, "--variant=interleaved",
         "--layers 4 is less than one for each of 8 stages; --layers 8 would work"),
        (3, "--stages=2,2",
         "--stages 2,2 does not spread 4 blocks over 3 stages; 2,1,1 would work"),
        (2, "--stages=3,2",
         "--stages 3,2 does not spread 4 blocks over 2 stages; 2,2 would work"),
        (2, "--stages=4,0", "--stages: 4,0 does not give each stage a block; 3,5,4 would "
         "(python 07_pipeline_parallel.py --help lists the flags)"),
        (2, "--chunks=2",
         "--chunks means nothing to --variant 1f1b; interleaved or torch would work"),
        (2, "--variant=zb-h1 --breadth-first",
         "--breadth-first means nothing to --variant zb-h1; interleaved would work"),
        (2, "--variant=torch --sleep=10", "--sleep means nothing to --variant torch; 1f1b or naive "
         "or afab or interleaved or zb-h1 or zb-h2 or dualpipe or dualpipe-v would work"),
        *((world, f"--draw={flags}", "--draw is for one process, and takes --ranks, "
           "--micro-batches, --chunks and --breadth-first alone; python 07_pipeline_parallel.py "
           "--draw afab would work")
          for world, flags in ((2, "afab"), (1, "afab --stages=4"), (1, "afab --sleep=9"),
                               (1, "afab --variant=1f1b"))),
        (1, "--ranks=4", "--ranks and --micro-batches are of a drawing; --draw 1f1b would work"),
        (1, "--draw=dualpipe --ranks=3",
         "dualpipe pairs ranks, and 3 is an odd number; --ranks 4 would work"),
        (1, "--draw=interleaved --ranks=4 --micro-batches=6", "interleaved on 4 ranks takes a "
         "multiple of 4 micro-batches, not 6; --micro-batches 8 would work"),
        (2, "--batch=8 --micro-batch=3",
         "--batch 8 is not a multiple of 1 data-parallel ranks x --micro-batch = 3; 9 would work"),
    ],
)  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*flags.split(), f"--data={TEXT}")
    status, output, errors = run_chapter(SEVEN, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize(("version", "refused"), [("2.11.0", True), ("2.13.0+cpu", False)])
def test_a_v_through_an_old_pytorch_is_refused(seven, monkeypatch, capsys, version, refused):
    monkeypatch.setattr(torch, "__version__", version)
    flags = ("--variant=torch", "--schedule=DualPipeV", f"--data={TEXT}")
    args = cli.parse(seven.__file__, "", seven.VARIANTS, seven.flags, flags)
    with pytest.raises(SystemExit) if refused else contextlib.nullcontext():
        seven.requires(args, 2)
    assert refused == ("--schedule DualPipeV of PyTorch 2.11.0 sends" in capsys.readouterr().err)


@pytest.mark.parametrize(("world", "flags"), [
    (4, "--variant=torch --schedule=LoopedBFS --layers=8 --batch=6"),
    (2, "--variant=torch --schedule=GPipe --batch=1"),
    (4, "--variant=interleaved --layers=8 --batch=6 --breadth-first"),
    (1, "--draw=interleaved --ranks=4 --micro-batches=6 --breadth-first --layers=1 --batch=7"),
])  # fmt: skip
def test_what_is_not_refused(seven, world, flags):
    args = cli.parse(seven.__file__, "", seven.VARIANTS, seven.flags,
                     [*flags.split(), f"--data={TEXT}"])
    seven.requires(args, world)


def test_a_drawing_has_sizes_of_its_own(run_chapter):
    """And no step to profile."""
    status, output, _ = run_chapter(SEVEN, "--draw=zb-h2", "--profile=trace.json")
    assert status == 1 and "--profile trace.json is not written: ValueError: there was no" in output
    assert output.startswith("rank 0  FFFFFFFBWFBWBW") and "rank 3" in output


def test_a_schedule_is_drawn_without_training(run_chapter):
    """Whatever the layers; and the report has the formulas."""
    flags = ("--draw=interleaved", "--ranks=8", "--micro-batches=16", "--chunks=2")
    status, output, errors = run_chapter(SEVEN, *flags)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert [line[:8] for line in lines[0:16:2]] == [f"rank {rank}  " for rank in range(8)]
    assert lines[0][8:].startswith("FFFFFFFFffffffffFFFFFFF") and lines[1][8:16] == "01234567"
    assert "0.21875        0.21875   ✓" in output and "grad norm" not in output
