"""Chapter 07: every schedule gives one GPU's numbers; the lists alone, and their messages, too."""

import ast
import contextlib
import dataclasses
import functools
import itertools
import os
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
from lab.bench.meters import FlopMeter
from lab.cli import strict
from lab.schedules import drawing, messages_over_time, simulate, simulated_bubble
from tests.chapters.test_04_tensor_parallel import FLOAT64, TRAINING, covering
from tests.conftest import CHAPTERS, TEXT, arguments, broken, chapter, hold_to_one_gpu, run_main

SEVEN = "07_pipeline_parallel"
VARIANTS = ("1f1b", "naive", "afab", "interleaved", "zb-h1", "zb-h2", "dualpipe", "dualpipe-v")
MOST = 8 if os.environ.get("FULL") else 6  # ranks, micro-batches and slices of `every_schedule`
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
    given = ("micro-batch", "kv-heads", "preset", "attention", "optimizer", "clip")
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
}


ON_EIGHT = dict(zip(SETTINGS, ("dualpipe", 8, "few", "uneven", 1, 2, "gpt2", "plain", "sgd", 0.1)))


@pytest.mark.parametrize("one", [*covering(fits, **SETTINGS), pytest.param(ON_EIGHT, id="8")])
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.full
@pytest.mark.parametrize("one", [
    dict(zip(SETTINGS, (*some, 1, 2, preset, "plain", "adamw", 0.1)))
    for some in itertools.product(VARIANTS, (1, 2, 3, 4, 8), ("few", "many"), ("even", "uneven"))
    for preset in ("tiny", "gpt2") if fits({"variant": some[0], "world": some[1]})
])  # fmt: skip
def test_same_as_one_gpu_in_full(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SEVEN, flags, tmp_path), flags)


@pytest.mark.parametrize(("schedule", "preset"), [
    pytest.param(name, preset, marks=() if few else pytest.mark.full)
    for name in TORCH for preset in ("tiny", "gpt2")
    for few in [(name, preset) in (("1F1B", "tiny"), ("InterleavedZeroBubble", "gpt2"))]
])  # fmt: skip
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


# ------------------------------------------------------------------------------- the lists


def every_schedule(most=MOST):
    """(variant, p, m, v, breadth first) of all that are defined, up to so many of each."""
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
        programs = seven.make_programs(schedule)
        seven.check_rendezvous(programs, schedule.needs)
        assert_in_order_of_time(seven, schedule, programs)
        seen += 1
    assert seen > 250


def assert_in_order_of_time(seven, schedule, programs):
    """In each program, an action stands where it ends, and a message right behind whatever has
    ended when its output is there: so it travels during the receiver's next action."""
    span = simulate(schedule)
    ready = {action.output: end for action, (_, end) in span.items() if action.kind != "W"}
    for actions, program in zip(schedule.actions, programs):
        assert [step for step in program if isinstance(step, seven.Action)] == actions
        times = [(span[step][1], False) if isinstance(step, seven.Action)
                 else (ready[step.output], True) for step in program]
        assert times == sorted(times)


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
                    program.append(seven.Message(need, schedule.ranks[need[1]], rank))
            program.append(action)
            taker = takers.get(action.output) if action.kind != "W" else None
            if taker and schedule.ranks[taker.stage] != rank:
                program.append(seven.Message(action.output, rank, schedule.ranks[taker.stage]))
        programs.append(program)
    return programs


def lazy_step():
    """On gloo: whether the step's gradients are right all the same."""
    results = []
    for programs_of in (lazy_programs, None):
        _, run_program, _, model, micro_batches, valid = small_pipeline("1f1b", 4, 1, programs_of)
        run_program(micro_batches, valid)
        results.append([p.grad for p in model.parameters()])
    return all(one.equal(other) for one, other in zip(*results))


def test_an_order_that_gloo_forgives_is_refused(seven, ranks):
    """Receive right before, send right after: rank 0 would send down while rank 1 sends up."""
    schedule = seven.make_schedule("1f1b", 2, 4)
    with pytest.raises(ValueError, match="ranks wait for ever before ..Message.*Message"):
        seven.check_rendezvous(lazy_programs(schedule), schedule.needs)
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
    _, run_program, _, model, micro_batches, valid = small_pipeline(variant, 8, 2, tie=True)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for _ in range(3):
        seven.train_step(run_program, model, optimizer, dist.group.WORLD, micro_batches, valid, 0.1)
    return [p.detach() for p in model.parameters() if p.global_name == "embedding.weight"]


@pytest.mark.parametrize(("variant", "world"), [("1f1b", 2), ("interleaved", 2), ("dualpipe", 4)])
def test_tied_embeddings_stay_equal_bit_for_bit(ranks, variant, world):
    [[one], *_, [other]] = ranks(world)(tied_copies, variant)
    assert one.equal(other)


def test_messages_out_of_order_or_missing_are_refused(seven):
    schedule = seven.make_schedule("afab", 2, 3)
    first, second, third = (seven.Message(("F", 0, i), 0, 1) for i in range(3))
    f0, f1 = schedule.actions[0][:3], schedule.actions[1][:3]

    def check(*programs):
        seven.check_rendezvous(programs, schedule.needs)

    check([f0[0], first, f0[1], second], [first, f1[0], second, f1[1]])
    with pytest.raises(ValueError, match="ever before ..Message.*'F', 0, 0.*Message.*'F', 0, 1"):
        check([f0[0], first, f0[1], second], [second, first])
    with pytest.raises(ValueError, match="Action.kind='F', stage=1, micro_batch=1"):
        check([f0[0], first, f0[1], second], [first, f1[0], f1[1], second])
    with pytest.raises(ValueError, match="for ever before ..Message.*'F', 0, 2"):
        check([*f0, first, second, third], [first, second])
    with pytest.raises(ValueError, match="for ever before ..Message.*'F', 0, 0"):
        check([first, f0[0]], [first, f1[0]])  # sent before it is computed


def test_a_schedule_in_which_ranks_wait_for_each_other_raises():
    """1f1b with the last rank ahead instead of the first."""
    module = broken(SEVEN, '"1f1b": p - 1 - rank,', '"1f1b": rank,')
    schedule = module.make_schedule("1f1b", 2, 4)
    with pytest.raises(ValueError, match="ranks wait for each other"):
        module.make_programs(schedule)
    with pytest.raises(ValueError, match="ranks wait for each other: rank 0 before Action"):
        simulate(schedule)


def test_the_lesson_has_the_drawings_that_the_code_makes(seven):
    columns = [[line[8:] for line in drawing(seven.make_schedule(variant, 4, m)).splitlines()]
               for variant, m in (("1f1b", 4), ("zb-h1", 4), ("dualpipe", 8))]
    for i, (first, second, third) in enumerate(zip(*columns)):
        label = "" if i % 2 else f"rank {i // 2}"
        assert f"\n    {label:<10}{first:<23}{second:<19}{third}\n" in seven.__doc__


def test_what_chapter_09_has_too_is_the_same_text(seven):
    def sources(name):
        source, found = (CHAPTERS / f"{name}.py").read_text(), {}
        for node in ast.parse(source).body:
            known_as = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            found[getattr(node, "name", known_as)] = ast.get_source_segment(source, node)
        return found

    nine = chapter("09_5d")
    ours, theirs = sources(SEVEN), sources(nine.__name__)
    for name in ("Message", "one_forward_one_backward"):
        assert ours[name] == theirs[name], name


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
                simulated = simulated_bubble(schedule, variant, **costs)
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
        stages_of_a_rank = len(schedule.ranks) // p
        for rank, actions in enumerate(schedule.actions):
            over_time = seven.alive_over_time(actions)
            assert over_time[-1] == 0 and max(over_time) == seven.most_alive(
                variant, rank, p, m, stages_of_a_rank, breadth_first), (variant, p, m, v, rank)


def test_as_many_messages_are_sent_as_the_formula_says(seven):
    for variant, p, m, v, breadth_first in every_schedule(most=5):
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        for rank, program in enumerate(seven.make_programs(schedule)):
            sent = [step for step in program
                    if isinstance(step, seven.Message) and step.sender == rank]
            formula = seven.traffic(variant, rank, p, m, len(schedule.ranks) // p, 1, 0, 8)
            assert formula.get("send", (0,))[0] == len(sent), (variant, p, m, v, rank)


def test_so_many_messages_are_in_memory(seven):
    """As the lesson says of 1f1b; and in no schedule more if there are more micro-batches, but in
    afab, whose first rank sends all before one comes, and whose last one gets all before."""
    for variant, p in itertools.product(VARIANTS, (2, 4, 6)):
        most = []
        for m in (4 * p, 8 * p):
            schedule = seven.make_schedule(variant, p, m, 3)
            most.append([max(messages_over_time(program, schedule.needs))
                         for program in seven.make_programs(schedule)])
        assert variant == "afab" or most[0] == most[1], (variant, p, most)
        assert variant != "1f1b" or most[0] == [p - 1] + (p - 1) * [1]


def test_blocks_are_spread_by_cost(seven):
    """No other way to spread them makes the slowest stage faster."""
    for layers, depth, vocab in ((8, 4, 256), (9, 4, 4096), (7, 3, 65536), (5, 5, 256)):
        cfg = common.Config(layers, 64, 4, 2, 32, vocab)
        embedding, block, *_, head = seven.forward_flops(cfg)
        slowest = {}
        for blocks in itertools.product(range(1, layers + 1), repeat=depth):
            if sum(blocks) == layers:
                slowest[blocks] = max(*(n * block for n in blocks), blocks[-1] * block + head)
        cuts = seven.cut(cfg, depth)
        assert cuts[0][0] == embedding == 0 and cuts[-1][1] == layers + 2
        assert all(end == start for (_, end), (start, _) in zip(cuts, cuts[1:]))
        sizes = [end - start for start, end in cuts]
        sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1  # the embedding, and the head
        assert slowest[tuple(sizes)] == min(slowest.values())


def test_flops_are_what_pytorch_counts(seven):
    cfg = common.Config(3, 32, 4, 2, 16, 100)
    model, tokens = common.gpt(cfg), torch.zeros(2, 16, dtype=torch.int64)
    with FlopMeter() as meter:
        model(tokens)
    assert meter.all == 2 * 16 * sum(seven.forward_flops(cfg))


def test_a_message_hides_behind_so_many_blocks(seven):
    cfg = common.Config(4, 8192, 64, 64, 1, 256)  # so short that only matrices count
    assert seven.blocks_to_hide(cfg, 2, 1e15, 1e11) == pytest.approx(
        2 * 1e15 / (24 * 8192 * 1e11), rel=1e-3)
    a3 = 1e15 / (32 * 8192 * 1e11)  # the Playbook's
    assert seven.blocks_to_hide(cfg, 1, 1e15, 1e11) == pytest.approx(a3 * 32 / 24, rel=1e-3)


# ------------------------------------------------------------------------------- faults


TIED = ("--preset=gpt2", "--attention=plain")


@pytest.mark.parametrize(
    ("flags", "right", "wrong", "named"),
    [
        # whose gradients, and divided by what
        ("", "micro_batches[i]\n", "(micro_batches[i][0], micro_batches[i - 1][1])\n", "loss"),
        ("", "x, edge = self.kept_for_backward.pop(i)",
         "x, edge = self.kept_for_backward.pop(max(self.kept_for_backward))", "gradients"),
        ("", "out = loss_sum(out, targets) / valid",
         "out = loss_sum(out, targets) / (targets >= 0).sum() / 4", "loss"),
        ("", "dist.all_reduce(loss)  ", "pass  ", "loss"),
        # backward in halves
        ("--variant=zb-h1", "in self.kept_for_weights.pop(i):",
         "in 2 * self.kept_for_weights.pop(i):", "gradients"),
        ("--variant=zb-h1", "self.later.clear()", "pass", "gradients"),
        ("--variant=zb-h1", "x, dy = x.detach(), dy", "dy = dy", "activations"),
        ("--variant=zb-h1", 'if "W" in kind:', 'if "W" in kind and i:', "gradients"),
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
        ("", "grad_norm(model.parameters(), group)", "grad_norm(model.parameters())",
         "gradient norm"),
        # what is kept
        ("", "self.kept_for_backward[i] = x, get_gradient_edge(out)",
         "self.kept_for_backward[i] = x, get_gradient_edge(out); "
         "self.all = [*getattr(self, 'all', []), self.kept_for_backward[i]]", "activations"),
        ("", '"kept": {}', '"kept": {"inside": 0.5}', "activations"),
        ("", "outputs.pop(name, otherwise)", "outputs.get(name, otherwise)", "messages kept"),
        ("", "            under_way.pop(next(iter(under_way)))[0].wait()",
         "            under_way.pop(name)[0].wait()", "messages kept"),
        ("", '"modules": modules, "kept"', '"modules": [0], "kept"', "parameters"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, flags, right, wrong, named):
    """Faults that a student might make."""
    flags = TIED if flags == "tied" else flags.split()
    flags = (*FLOAT64, "--steps=1", "--clip=0.1", *flags)
    (status, _, output), *_ = ranks(2)(run_main, SEVEN, flags, tmp_path, (right, wrong))
    problems = [line for line in output.splitlines() if line.startswith("  ✗")]
    assert status == 1 and any(named in line for line in problems), output


def die_in_the_second_step(rank, port, flags):
    """One of two ranks, in a process of its own and without a launcher; rank 1 is the one."""
    os.dup2(os.open(f"{rank}.txt", os.O_CREAT | os.O_WRONLY), 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
                   "MASTER_PORT": port}
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


def test_when_a_rank_is_killed_the_others_end_with_a_line(seven, pool, tmp_path, monkeypatch):
    """In the middle of a step; no launcher ends them."""
    monkeypatch.chdir(tmp_path)
    flags = ["--batch=4", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--device=cpu"]
    start, port = time.monotonic(), str(20000 + os.getpid() % 10000)
    members = [pool.context.Process(target=die_in_the_second_step, args=(rank, port, flags))
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
