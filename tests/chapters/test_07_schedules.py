"""Chapter 07's lists of actions, their programs, and the formulas."""

import functools
import itertools
import re
from unittest import mock

import pytest
import torch

import common
from lab.run.meters import FlopMeter
from lab.schedules import check_rendezvous, drawing, simulate, simulated_bubble
from tests.chapters.test_07_pipeline_parallel import (
    SEVEN,
    VARIANTS,
    seven,  # noqa: F401  (a fixture)
)
from tests.conftest import FULL, ROOT, chapter, run_main
from tests.support.runs import run_of

MOST = 8 if FULL else 4  # ranks, micro-batches and slices of `every_schedule`


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
    for variant, p, m, v, breadth_first in every_schedule():
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        done = [(kind, stage, i) for actions in schedule.actions for kinds, stage, i in actions
                for kind in kinds]
        expected = [(kind, stage, i) for kind in "FBW" for stage in range(len(schedule.ranks))
                    for i in range(m) if variant != "dualpipe" or i // (m // 2) == stage // p]
        assert sorted(done) == sorted(expected), (variant, p, m, v)
        for rank, actions in enumerate(schedule.actions):
            assert all(schedule.ranks[stage] == rank for _, stage, _ in actions)
        for times in seven.times("none"), seven.times("full"):
            programs = seven.make_programs(schedule, **times)
            check_rendezvous(programs, schedule.needs)
            assert_in_order_of_time(seven, schedule, programs, times)


def assert_in_order_of_time(seven, schedule, programs, times):
    """In each program, an action stands where it ends, and a message right behind whatever has
    ended when its output is there: so it travels during the receiver's next action."""
    span = simulate(schedule, **times)
    ready = {action.output: end for action, (_, end) in span.items() if action.kind != "W"}
    for actions, program in zip(schedule.actions, programs):
        assert [step for step in program if isinstance(step, seven.Action)] == actions
        times = [(span[step][1], False) if isinstance(step, seven.Action)
                 else (ready[step.output], True) for step in program]
        assert times == sorted(times)


def lazy_programs(make_programs, schedule, **times):
    """A rank receives right before the action that needs it, and sends right behind the one that
    computed it: the order that gloo forgives."""
    seven, programs = chapter(SEVEN), []
    for rank, program in enumerate(make_programs(schedule, **times)):
        messages = [step for step in program if isinstance(step, seven.Message)]
        sent = {message.output: message for message in messages if message.sender == rank}
        received = {message.output: message for message in messages if message.receiver == rank}
        lazy = []
        for action in schedule.actions[rank]:
            lazy += [received[need] for need in schedule.needs(action) if need in received]
            lazy.append(action)
            if action.kind != "W" and action.output in sent:
                lazy.append(sent[action.output])
        programs.append(lazy)
    return programs


def train_lazily(folder):
    """For a rank of the pool: a run of 1f1b by lazy programs."""
    flags = run_of("07 2 --layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --batch=4").flags
    lazy = functools.partial(lazy_programs, chapter(SEVEN).make_programs)
    with mock.patch.object(chapter(SEVEN), "make_programs", lazy):
        return run_main(SEVEN, flags, folder)


def test_an_order_that_gloo_forgives_is_refused(seven, ranks, tmp_path):
    """Rank 0 would send down while rank 1 sends up. gloo stores messages, so the run's numbers
    are right, and the report says that other networks would wait for ever."""
    schedule = seven.make_schedule("1f1b", 2, 4)
    with pytest.raises(ValueError, match="for ever before ..Message.*Message"):
        check_rendezvous(lazy_programs(seven.make_programs, schedule), schedule.needs)
    (status, run, output), _ = ranks(2, timeout=120)(train_lazily, tmp_path)
    assert status == 1 and run["max_grad_diff"] < 1e-12
    assert "✗ ranks that can wait for ever" in output


def test_messages_out_of_order_or_missing_are_refused(seven):
    schedule = seven.make_schedule("afab", 2, 3)
    first, second, third = (seven.Message(("F", 0, i), 0, 1) for i in range(3))
    f0, f1 = schedule.actions[0][:3], schedule.actions[1][:3]

    def check(*programs):
        check_rendezvous(programs, schedule.needs)

    check([f0[0], first, f0[1], second], [first, f1[0], second, f1[1]])
    with pytest.raises(ValueError, match="ever before ..Message.*'F', 0, 0.*Message.*'F', 0, 1"):
        check([f0[0], first, f0[1], second], [second, first])
    with pytest.raises(ValueError, match="Action.kind='F', stage=1, micro_batch=1"):
        check([f0[0], first, f0[1], second], [first, f1[0], f1[1], second])
    with pytest.raises(ValueError, match="for ever before ..Message.*'F', 0, 2"):
        check([*f0, first, second, third], [first, second])
    with pytest.raises(ValueError, match="for ever before ..Message.*'F', 0, 0"):
        check([first, f0[0]], [first, f1[0]])  # sent before it is computed


def test_a_schedule_in_which_ranks_wait_for_each_other_raises(seven):
    schedule = seven.make_schedule("1f1b", 2, 4)
    schedule.actions[1].reverse()
    with pytest.raises(ValueError, match="ranks wait for each other"):
        seven.make_programs(schedule)
    with pytest.raises(ValueError, match="ranks wait for each other: rank 0 before Action"):
        simulate(schedule)


def test_the_lesson_has_the_drawings_that_the_code_makes(seven):
    for variant, m in (("1f1b", 4), ("zb-h1", 4), ("dualpipe", 8)):
        for line in drawing(seven.make_schedule(variant, 4, m)).splitlines():
            assert line[8:].strip() in seven.__doc__, line


# ------------------------------------------------------------------------------- the formulas


COSTS = ({}, {"F": 10, "B": 12, "W": 8}, {"F": 2, "B": 1, "W": 2}, {"F": 1, "B": 2, "W": 1})


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
    full = seven.times("full")
    assert full == {"F": 1, "B": 2, "W": 1}
    assert seven.bubble("1f1b", 4, 8, 1) == seven.bubble("1f1b", 4, 8, 1, **full) == 3 / 8
    assert seven.bubble("zb-h1", 4, 8, 1, **full) == 3 / 16
    assert seven.bubble("zb-h1", 2, 4, 1, 1, 1, 2) is None is seven.bubble("dualpipe", 4, 8, 1, 2)
    assert seven.bubble("zb-h2", 4, 6, 1) is None and seven.bubble("zb-h1", 4, 3, 1) is None


def test_what_is_alive_and_what_is_sent_is_as_the_formulas_say(seven):
    for variant, p, m, v, breadth_first in every_schedule():
        schedule = seven.make_schedule(variant, p, m, v, breadth_first)
        stages, case = len(schedule.ranks) // p, (variant, p, m, v)
        for rank, program in enumerate(seven.make_programs(schedule)):
            over_time = seven.alive_over_time(schedule.actions[rank])
            assert over_time[-1] == 0, case
            assert max(over_time) == seven.most_alive(
                variant, rank, p, m, stages, breadth_first), case
            sent = [step for step in program
                    if isinstance(step, seven.Message) and step.sender == rank]
            formula = seven.traffic(variant, rank, p, m, stages, 1, 0, 8)
            assert formula.get("send", (0,))[0] == len(sent), case


def test_blocks_are_spread_by_cost(seven):
    """No other way to spread them makes the slowest stage faster."""
    for layers, depth, vocab in ((8, 4, 256), (7, 3, 65536), (5, 5, 256)):
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


# ------------------------------------------------------------------------- the moving picture


def test_the_picture_shows_the_idle_time_and_memory_of_the_schedules(seven):  # noqa: F811
    """figures/pipeline.svg states both for three schedules of 4 GPUs and 8 micro-batches."""
    p, m = 4, 8
    picture = (ROOT / "figures/pipeline.svg").read_text(encoding="utf-8")
    captions = re.findall("up to ([0-9]+) micro-batches .*>([0-9]+)% idle", picture)
    for (alive, idle), variant in zip(captions, ("afab", "1f1b", "zb-h1"), strict=True):
        bubble = seven.bubble(variant, p, m, 1)
        assert int(idle) == round(100 * bubble / (1 + bubble)), variant
        assert int(alive) == max(seven.most_alive(variant, rank, p, m, 1) for rank in range(p))
