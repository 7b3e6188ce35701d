"""Chapter 07's lists of actions, their programs, and the formulas."""

import ast
import itertools
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from lab.bench.meters import FlopMeter
from lab.schedules import (
    automatic_schedule,
    check_rendezvous,
    drawing,
    messages_over_time,
    simulate,
    simulated_bubble,
)
from tests.chapters.test_04_tensor_parallel import FLOAT64
from tests.chapters.test_07_pipeline_parallel import (
    SEVEN,
    VARIANTS,
    same_bits,
    seven,  # noqa: F401  (fixtures)
    small_pipeline,
)
from tests.conftest import CHAPTERS, chapter, edited, loaded, run_main

MOST = 8 if os.environ.get("FULL") else 6  # ranks, micro-batches and slices of `every_schedule`


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
        for times in seven.times("none"), seven.times("full"):
            programs = seven.make_programs(schedule, **times)
            check_rendezvous(programs, schedule.needs)
            assert_in_order_of_time(seven, schedule, programs, times)
        seen += 1
    assert seen > 250


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


def lazy_programs(schedule, **times):
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
        check_rendezvous(lazy_programs(schedule), schedule.needs)
    assert all(ranks(2)(lazy_step))


def bits_of_a_search(p, m, memory):
    """Like `same_bits`, of a schedule that a search has found."""
    seven = chapter(SEVEN)
    args = SimpleNamespace(ranks=p, micro_batches=m, memory=memory, times=dict(F=2, B=3, W=1))
    found, _ = automatic_schedule(seven, args)
    with mock.patch.object(seven, "make_schedule", lambda *args: found):
        return same_bits("zb-h1", 1), max(map(max, map(seven.alive_over_time, found.actions)))


def test_what_a_search_finds_trains_bit_for_bit(ranks):
    for (*same, outputs), alive in ranks(2)(bits_of_a_search, 2, 8, 3):
        assert same == [True, True] and outputs == {} and alive == 3


def train_lazily(folder):
    with mock.patch.object(chapter(SEVEN), "make_programs", lazy_programs):
        return run_main(SEVEN, FLOAT64, folder)


def test_a_run_says_that_its_order_works_on_some_networks_alone(ranks, tmp_path):
    (status, run, output), _ = ranks(2)(train_lazily, tmp_path)
    assert status == 1 and "ranks wait for ever before [[Message(" in output
    assert "✗ ranks that can wait for ever, on a strict network: measured 2" in output


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


def test_a_schedule_in_which_ranks_wait_for_each_other_raises():
    """1f1b with the last rank ahead instead of the first."""
    module = loaded(SEVEN, edited(SEVEN, '"1f1b": p - 1 - rank,', '"1f1b": rank,'))
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
         {"F": 2, "B": 1, "W": 1}, {"F": 1, "B": 1, "W": 2}, {"F": 1, "B": 2, "W": 1})


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
    assert seven.bubble("zb-h1", 4, 8, 1) == 1 / 8
    assert seven.bubble("zb-h1", 4, 8, 1, **full) == 3 / 16
    assert "of zb-h1 grows from 1/8 to 3/16" in seven.__doc__
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
