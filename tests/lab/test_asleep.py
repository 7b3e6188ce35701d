"""lab.asleep: formulas by hand; chapters 02 and 03 with layers that sleep, on a clock of our own.

On that clock a sleep takes no time, and nothing else does. A step takes exactly as long as its
formula says, on any machine, however busy it is.
"""

import contextlib
import io
import json

import pytest
import torch.distributed as dist

import common
from lab import asleep, speed
from lab.bench.runs import read_runs
from tests.conftest import chapter

PLAN = asleep.Plan(layers=3, forward=0.005, backward=0.01, alpha=0.001, numbers=2**12,
                   micro_batches=2, in_bucket=3)  # fmt: skip
BY_HAND = asleep.Plan(layers=2, forward=1, backward=2, alpha=0, micro_batches=1, in_bucket=2)
COLLECTIVES = dist.all_reduce, common.all_gather


def test_formulas_by_hand():
    """Two layers, f = 1, b = 2, and messages of 1: an all_reduce takes 2. A second micro-batch adds
    a work of 6, and in ZeRO-2 its last sum."""
    link = lambda: asleep.Link(0, asleep.share(2) * BY_HAND.nbytes)
    for variant, seconds in {
            "02 naive": 10,     # 6 + two messages of 2
            "02 overlap": 8,    # backward ends at 4 and 6: messages from 4 to 6, and from 6 to 8
            "02 bucket": 10,    # both together, from 6 on
            "03 zero1": 8,      # gathers to 1, 2; forward to 2, 3; backward to 5, 7; a sum to 8
            "03 zero2": 8,
            "03 zero3 --prefetch 0": 11,  # forward 1-2, 3-4, backward 4-6, a sum to 7, a gather ...
            "03 zero3 --prefetch 1": 8,   # the gather of the second backward hides, from 3 to 4
    }.items():  # fmt: skip
        assert asleep.FORMULAS[variant](BY_HAND, link(), 2) == pytest.approx(seconds), variant
    twice = BY_HAND._replace(micro_batches=2)
    assert asleep.FORMULAS["03 zero1"](twice, link(), 2) == pytest.approx(8 + 6)
    assert asleep.FORMULAS["03 zero2"](twice, link(), 2) == pytest.approx(8 + 7)
    over = asleep.Link(alpha=1, bandwidth=10)           # its messages wait for each other
    assert [over.arrival(now, 20) for now in (0, 1, 100)] == [3, 6, 103]


# ---------------------------------------------------------------------------------------- on ranks


class Clock:
    """Of a rank, instead of `time`."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@contextlib.contextmanager
def own_clock():
    clock, theirs = Clock(), (asleep.time, speed.time)
    asleep.time = speed.time = clock
    try:
        yield
    finally:
        asleep.time, speed.time = theirs


def steps():
    """On a rank of the pool: {variant: (seconds, losses)}."""
    with own_clock():
        return {variant: asleep.measure(variant, PLAN, 2, dist.group.WORLD)
                for variant in asleep.FORMULAS}


def test_chapters_take_exactly_as_long_as_the_formulas_say(ranks):
    for name in ("02_data_parallel", "03_zero"):
        chapter(name)  # or skip
    found, other = ranks(2)(steps)
    assert found == other
    _, losses = found["02 naive"]
    assert len(losses) == asleep.STEPS and losses[0] > losses[-1] + 0.01
    for variant, (seconds, of_variant) in found.items():
        expected = asleep.formula(variant, PLAN, 2, 2)  # ignores the bytes of the norm
        assert seconds == pytest.approx(expected, rel=1e-4), variant
        assert of_variant == pytest.approx(losses, rel=1e-5), variant


def of_main(folder):
    """On a rank of the pool: the status, the output, and whether all is as it was."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), own_clock():
        status = asleep.main([f"--json={folder}/run.json"], PLAN, [2.0])
    assert not dist.is_initialized()
    return status, output.getvalue(), (dist.all_reduce, common.all_gather) == COLLECTIVES


def test_the_program_on_two_ranks(ranks, tmp_path):
    for name in ("02_data_parallel", "03_zero"):
        chapter(name)  # or skip
    (status, output, put_back), other = ranks(2)(of_main, tmp_path)
    assert (status, put_back) == (0, True) and other == (0, "", True)
    [run] = read_runs([tmp_path / "run.json"])
    checks = {check["axis"]: check for check in run["checks"]}
    assert [*checks] == [*asleep.FORMULAS, ""] and all(check["ok"] for check in run["checks"])
    assert all(variant in output for variant in asleep.FORMULAS) and "✗" not in output
    recorded = json.loads((tmp_path / "run.json").read_text())["recorded"]
    for row in recorded["overlap"]:
        ratios, seconds = zip(*recorded["curves"][row["variant"]])
        assert seconds[ratios.index(row["ratio"])] == pytest.approx(row["expected"])
        assert checks[row["variant"]]["expected"] == round(1e3 * row["expected"], 1)


def test_one_rank_has_nobody_to_send_to(capsys):
    with pytest.raises(SystemExit, match="2"):
        asleep.main([])
    output, line = capsys.readouterr()
    assert not output and line.count("\n") == 1 and "--nproc_per_node 4" in line
