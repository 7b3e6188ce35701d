"""lab.asleep: the formulas by hand; chapters 02 and 03 asleep on two ranks, and with faults."""

import contextlib
import io
import json

import pytest
import torch.distributed as dist

import common
from lab import asleep
from lab.bench.runs import read_runs
from tests.conftest import broken, chapter

PLAN = asleep.Plan(layers=3, forward=0.005, backward=0.01, alpha=0.001, numbers=64,
                   micro_batches=2, in_bucket=3)  # fmt: skip
BY_HAND = asleep.Plan(layers=2, forward=1, backward=2, alpha=0, micro_batches=1, in_bucket=2)


def link(message, ranks=2):
    """Over which an all_gather or a reduce_scatter of a layer of BY_HAND takes so many seconds."""
    return asleep.Link(0, asleep.share(ranks) * BY_HAND.nbytes / message)


@pytest.mark.parametrize("ratio", [0.25, 0.9, 1.5, 4])
def test_overlap_is_what_a_closed_form_says(ratio):
    """Either backward is longer, and the last message is left; or the messages are, and the first
    backward comes before them."""
    plan, ranks = asleep.PLAN._replace(alpha=0), 4
    L, b, c = plan.layers, plan.backward, ratio * plan.backward
    expected = plan.micro_batches * plan.whole - L * b + b + (L - 1) * max(b, c) + c
    assert asleep.formula("02 overlap", plan, ratio, ranks) == pytest.approx(expected)
    assert asleep.formula("02 naive", plan, ratio, ranks) == pytest.approx(
        plan.micro_batches * plan.whole + L * c)


@pytest.mark.parametrize(("variant", "seconds"), [
    ("02 naive", 10),       # 6 + two messages of 2
    ("02 overlap", 8),      # backward ends at 4 and 6: messages from 4 to 6, and from 6 to 8
    ("02 bucket", 10),      # both together, from 6 on
    ("03 zero1", 8),        # gathers end at 1, 2; forward at 2, 3; backward at 5, 7, and a sum at 8
    ("03 zero2", 8),
    ("03 zero3 --prefetch 0", 11),  # forward 1-2, 3-4, backward 4-6, a sum to 7, a gather to 8 ...
    ("03 zero3 --prefetch 1", 8),   # the gather of the second backward hides, from 3 to 4
])  # fmt: skip
def test_formulas_by_hand(variant, seconds):
    """Two layers, f = 1, b = 2, and messages of 1: an all_reduce takes 2."""
    assert asleep.FORMULAS[variant](BY_HAND, link(1), 2) == pytest.approx(seconds)


def test_more_micro_batches_are_reduced_once_or_each_time():
    """With stage 1 a step is a work of 6 longer; with stage 2 also by the first one's last sum."""
    plan = BY_HAND._replace(micro_batches=2)
    assert asleep.FORMULAS["03 zero1"](plan, link(1), 2) == pytest.approx(8 + 6)
    assert asleep.FORMULAS["03 zero2"](plan, link(1), 2) == pytest.approx(8 + 7)


@pytest.mark.parametrize("variant", asleep.FORMULAS)
def test_a_step_takes_at_least_its_work_and_at_most_that_and_all_messages(variant):
    for ratio in (0.01, 0.5, 1, 2, 8):
        over = asleep.link_of(asleep.PLAN, ratio, 4)
        work = asleep.PLAN.micro_batches * asleep.PLAN.whole
        sent = asleep.messages(variant, asleep.PLAN, over, 4)
        seconds = asleep.formula(variant, asleep.PLAN, ratio, 4)
        assert work < seconds <= work + sent + 1e-9


def test_messages_of_a_link_wait_for_each_other():
    over = asleep.Link(alpha=1, bandwidth=10)
    assert [over.arrival(now, 20) for now in (0, 1, 100)] == [3, 6, 103]


def steps(ratio, variants, fault=None, plan=PLAN):
    """On a rank of the pool: {variant: (seconds, losses)}. fault: of a chapter."""
    whole, asleep.TRIES = asleep.chapter, 2
    if fault:
        name, *lines = fault
        module = broken(name, *lines)
        asleep.chapter = lambda number: module if name.startswith(number) else whole(number)
    try:
        return {variant: asleep.measure(variant, plan, ratio, dist.group.WORLD)
                for variant in variants}
    finally:
        asleep.chapter = whole


def test_chapters_take_as_long_as_the_formulas_say(ranks):
    """On a busy machine somewhat longer, and never less; and all train the same."""
    for name in ("02_data_parallel", "03_zero"):
        chapter(name)  # or skip
    found, other = ranks(2)(steps, 2, [*asleep.FORMULAS])
    assert {variant: losses for variant, (_, losses) in found.items()} == {
        variant: losses for variant, (_, losses) in other.items()}
    _, losses = found["02 naive"]
    assert len(losses) == asleep.STEPS and losses[0] > losses[-1] + 0.01
    for variant, (seconds, of_variant) in found.items():
        expected = asleep.formula(variant, PLAN, 2, 2)
        assert 0.99 * expected < seconds < 1.5 * expected, variant
        assert of_variant == pytest.approx(losses, rel=1e-5), variant
    assert found["02 overlap"][0] < found["02 naive"][0]
    assert found["03 zero3 --prefetch 1"][0] < found["03 zero3 --prefetch 0"][0]


@pytest.mark.parametrize(("variant", "name", "waits"), [
    ("02 overlap", "02_data_parallel", "            handle.wait()\n"),
    ("03 zero1", "03_zero", "            self.gathering.wait()\n")], ids=["02", "03"])  # fmt: skip
def test_a_message_that_nobody_waits_for_is_seen(ranks, variant, name, waits):
    """The step is shorter than it can be. Naps are long beside what a busy machine adds to one."""
    chapter(name)  # or skip
    fault = name, waits, waits.replace("wait()", "work.wait()")
    plan = PLAN._replace(forward=4 * PLAN.forward, backward=4 * PLAN.backward)
    for found in ranks(2)(steps, 4, [variant], fault, plan):
        seconds, _ = found[variant]
        assert seconds < (1 - asleep.WITHIN) * asleep.formula(variant, plan, 4, 2)


def test_a_gradient_that_is_not_summed_is_seen(ranks):
    chapter("02_data_parallel")  # or skip
    fault = "02_data_parallel", "            dist.all_reduce(p.grad, group=self.group)\n", ""
    (wrong, right), _ = ranks(2)(losses_of_naive, [fault, None])
    rows = [{"ratio": 1, "variant": "02", "measured": 1, "expected": 1, "losses": losses}
            for losses in (right, wrong)]  # fmt: skip
    *_, same = asleep.checks_of(rows)
    assert same["ok"] is False
    *_, same = asleep.checks_of([rows[0], rows[0]])
    assert same["ok"] is True


def losses_of_naive(faults):
    """On a rank of the pool, with each of these."""
    return [steps(0.1, ["02 naive"], fault)["02 naive"][1] for fault in faults]


def of_main(folder, plan):
    """On a rank of the pool: the status and the output."""
    output, asleep.TRIES = io.StringIO(), 2
    with contextlib.redirect_stdout(output):
        status = asleep.main([f"--json={folder}/run.json"], plan, [2.0])
    assert not dist.is_initialized()
    return status, output.getvalue(), (dist.all_reduce, common.all_gather) == COLLECTIVES


COLLECTIVES = dist.all_reduce, common.all_gather


def test_the_program_on_two_ranks(ranks, tmp_path):
    for name in ("02_data_parallel", "03_zero"):
        chapter(name)  # or skip
    (status, output, put_back), other = ranks(2)(of_main, tmp_path, PLAN)
    assert put_back and other[1:] == ("", True)
    [run] = read_runs([tmp_path / "run.json"])
    checks = {check["axis"]: check for check in run["checks"]}
    assert status == other[0] == int(not all(check["ok"] for check in run["checks"]))
    assert [*checks] == [*asleep.FORMULAS, ""] and checks[""]["ok"]
    assert output.count("✓") + output.count("✗") == len(checks)
    recorded = json.loads((tmp_path / "run.json").read_text())["recorded"]
    for row in recorded["overlap"]:
        ratios, seconds = zip(*recorded["curves"][row["variant"]])
        assert seconds[ratios.index(row["ratio"])] == pytest.approx(row["expected"])
        assert checks[row["variant"]]["expected"] == round(1e3 * row["expected"], 1)


def test_one_rank_has_nobody_to_send_to(capsys):
    with pytest.raises(SystemExit, match="2"):
        asleep.main([])
    assert capsys.readouterr() == (
        "", "error: one rank has nobody to send to; --nproc_per_node 4 would work\n")
