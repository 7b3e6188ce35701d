"""lab.schedules: what it draws, counts and refuses; sleeping stages take as long as simulated."""

import contextlib
import io
import itertools
import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lab import schedules
from lab.bench import automatic
from lab.bench.runs import read_runs
from lab.chapters import rooms_with
from tests.conftest import chapter


def run(capsys, *flags):
    """Exit status, stdout and stderr of the command."""
    try:
        status = schedules.main(list(flags))
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


def test_a_schedule_is_drawn_and_counted(capsys):
    flags = ("interleaved", "--ranks=8", "--micro-batches=16", "--chunks=2")
    status, output, errors = run(capsys, *flags)
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert [line[:8] for line in lines[0:16:2]] == [f"rank {rank}  " for rank in range(8)]
    assert lines[0][8:].startswith("FFFFFFFFffffffffFFFFFFF") and lines[1][8:16] == "01234567"
    assert lines[-2].endswith("  23 21 19 17 15 13 11 9 / 23 21 19 17 15 13 11 9")
    assert lines[-1].endswith("  0.21875 / 0.21875")


@pytest.mark.parametrize(("flags", "alive", "bubble"), [
    ("1f1b", "4 3 2 1 / 4 3 2 1", "0.375 / 0.375"),
    ("interleaved --chunks=3 --breadth-first --ranks=2 --micro-batches=3", "9 9 / 9 9",
     "0.111111 / 0.111111"),
    ("zb-h2 --micro-batches=5", "5 5 5 5 / 5 5 5 5", "0.133333 / -"),  # too few for a closed form
    ("dualpipe --ranks=2 --micro-batches=4", "3 3 / 3 3", "0 / 0"),
])  # fmt: skip
def test_what_it_costs(capsys, flags, alive, bubble):
    status, output, _ = run(capsys, *flags.split())
    *_, of_alive, of_bubble = output.splitlines()
    assert status == 0 and of_alive.endswith(f"  {alive}") and of_bubble.endswith(f"  {bubble}")


@pytest.mark.parametrize(("p", "m", "memory", "times"), [
    (2, 3, 3, (1, 1, 1)), (2, 3, 3, (10, 12, 8)), (2, 3, 2, (2, 1, 3)), (3, 2, 2, (3, 4, 2)),
    (4, 2, 2, (1, 3, 1)), (2, 4, 2, (5, 7, 4)), (3, 3, 2, (1, 2, 1)),
    *(pytest.param(3, 3, 3, times, marks=pytest.mark.full)
      for times in itertools.product((1, 2, 3), repeat=3))])  # fmt: skip
def test_the_rule_finds_what_the_best_of_all_orders_costs(p, m, memory, times):
    times = dict(zip("FBW", times))
    every = [automatic.cost(list(orders), times)
             for orders in itertools.product(automatic.every_order(m, memory), repeat=p)]
    best = automatic.best_built(p, m, memory, times)
    assert automatic.cost(best, times) == min(filter(None, every))
    assert len(set(filter(None, every))) > 2  # others are worse


def test_every_order_is_one_of_the_three_dimensional_catalan_numbers():
    """With memory for all; with that for one there is no choice."""
    assert [len(automatic.every_order(m, m)) for m in (1, 2, 3, 4)] == [1, 5, 42, 462]
    assert automatic.every_order(3, 1) == ("FBWFBWFBW",)
    assert automatic.cost(["FBFBWW", "FBBFWW"], dict(F=1, B=1, W=1)) is None  # B before its F


@pytest.mark.parametrize(("memory", "own", "step", "alive"), [
    (2, 17 / 24, 17 / 24, 2), (4, 1 / 8, 1 / 8, 4), (6, 1 / 24, 1 / 8, 6), (7, 0, 1 / 8, 7)])
def test_a_search_is_as_good_as_the_schedules_that_are_known(capsys, memory, own, step, alive):
    """At zb-h1's memory as zb-h1, at zb-h2's as zb-h2, and between them in between."""
    status, output, _ = run(capsys, "auto", "--micro-batches=8", f"--memory={memory}")
    rows = dict(line.split(maxsplit=1) for line in output.splitlines()[-4:])
    assert status == 0 and {name: row.split() for name, row in rows.items()} == {
        "auto": [str(alive), f"{own:.4f}", f"{step:.4f}"], "1f1b": ["4", "0.3750", "0.3750"],
        "zb-h1": ["4", "0.1250", "0.1250"], "zb-h2": ["7", "0.0000", "0.1250"]}
    assert "the best of 144 that a rule builds" in output


def test_a_search_draws_what_it_has_found(capsys):
    status, output, _ = run(capsys, "auto", "--ranks=2", "--micro-batches=2", "--times=2,3,1")
    lines = output.splitlines()
    assert status == 0 and "auto: the best of all 25" in output
    assert lines[0].startswith("rank 0  FFFF") and lines[0].count("B") == 6
    for line in lines[:4:2]:
        assert [line[8:].count(kind) for kind in "FBW"] == [4, 6, 2]


@pytest.mark.parametrize("variant", ["1f1b", "zb-h1", "interleaved", "dualpipe", "dualpipe-v"])
def test_a_drawing_has_every_unit_of_time(variant):
    """Rank by rank: one letter for each unit of an action, and dots for those in which it waits."""
    schedule = chapter(schedules.CHAPTER).make_schedule(variant, 4, 8, 2)
    lines = schedules.drawing(schedule).splitlines()
    table = schedules.timetable(schedule)
    for actions, kinds, digits in zip(table, lines[::2], lines[1::2], strict=True):
        kinds, digits, end = kinds[8:], digits[8:], 0
        assert [kind == "." for kind in kinds] == [digit == "." for digit in digits]
        for kind, _, i, start, stop in actions:
            assert set(kinds[end:start]) <= {"."} and kinds[start:stop].upper() == kind
            assert digits[start:stop] == str(i) * (stop - start)
            end = stop
        assert len(kinds) == end


@pytest.mark.parametrize(("world", "flags", "line"), [
    (0, "1f1b --chunks=2", "--chunks means nothing to 1f1b; without --chunks would work"),
    (0, "zb-h1 --breadth-first", "--breadth-first means nothing to zb-h1; "
     "without --breadth-first would work"),
    (0, "dualpipe --ranks=3", "dualpipe pairs ranks, and 3 is an odd number; --ranks 4 would work"),
    (0, "interleaved --ranks=4 --micro-batches=6",
     "interleaved on 4 ranks does not take 6 micro-batches; --micro-batches 8 would work"),
    (0, "dualpipe-v --micro-batches=7",
     "dualpipe-v on 4 ranks does not take 7 micro-batches; --micro-batches 8 would work"),
    (0, "1f1b --ranks=128 --micro-batches=129", "--micro-batches 129 on 128 ranks is too much "
     "to draw; --micro-batches 8 would work"),
    (0, "auto --ranks=16 --micro-batches=64", "--micro-batches 64 on 16 ranks is too much to "
     "search; --micro-batches 8 would work"),
    (0, "1f1b --memory=3", "--memory means nothing to 1f1b; without --memory would work"),
    (0, "auto --recompute=full", "--recompute full means nothing to auto: --times says how long B "
     "takes; without --recompute would work"),
    (2, "auto --sleep=10 --times=1,2,1", "stages sleep as long in each F, B and W; "
     "without --times would work"),
    *((0, f"auto --times={wrong}", f"--times: {wrong} is not F,B,W, whole numbers in [1, 100); "
       "--times 10,12,8 would work") for wrong in ("1,2", "1,2,x", "1,2,3,4", "0,1,1")),
    (0, "naive --ranks=32 --micro-batches=64", "--micro-batches 64 on 32 ranks is too much to "
     "draw; --micro-batches 8 would work"),
    (0, "interleaved --chunks=4096", "--micro-batches 8 on 4 ranks is too much to draw; "
     "without --chunks would work"),
    (0, "1f1b --ranks=0", "--ranks: 0 is no whole number in [1, 181); --ranks 4 would work"),
    (0, "1f1b --ranks=4 --sleep=10", "--ranks 4 is not what torchrun has started; "
     "--nproc_per_node 4 would work"),
    (2, "1f1b --ranks=4", "--ranks 4 is not what torchrun has started; "
     "--nproc_per_node 4 would work"),
    (0, "1f1b --json=run.json",
     "--json run.json means nothing without --sleep; without --json would work"),
    (4, "1f1b --json=run.json",
     "--json run.json means nothing without --sleep; --sleep 10 would work"),
    (4, "1f1b --slow=2=15", "--slow 2=15 means nothing without --sleep; --sleep 10 would work"),
    (4, "1f1b --sleep=10 --slow=0=15 --slow=4=15",
     "--slow 4=15: 1f1b on 4 ranks has stages 0 to 3; --slow 3=15 would work"),
    (2, "interleaved --chunks=3 --sleep=10 --slow=6=15",
     "--slow 6=15: interleaved on 2 ranks has stages 0 to 5; --slow 5=15 would work"),
    (4, "dualpipe --sleep=10 --slow=8=15",
     "--slow 8=15: dualpipe on 4 ranks has stages 0 to 7; --slow 7=15 would work"),
    *((4, f"1f1b --sleep=10 --slow={wrong}", f"--slow: {wrong} is no STAGE=MS, whole numbers, of "
       "ms in [1, 10000); --slow 0=15 would work") for wrong in ("2=x", "2", "2=0", "-1=15")),
])  # fmt: skip
def test_refusals(capsys, monkeypatch, world, flags, line):
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    assert run(capsys, *flags.split()) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("name", ["naive", "afab", "1f1b"])
def test_the_closed_form_of_a_step_with_slow_stages_is_simulated(name):
    """From a stage that is hardly slow to one that nobody waits for, and several of them."""
    makes, known = chapter(schedules.CHAPTER).make_schedule, 0
    for p, m in ((1, 1), (2, 2), (3, 8), (4, 4), (4, 9)):
        slow = [{stage: ms} for stage in range(p) for ms in (10, 11, 15, 20, 29, 50)]
        for stages in [{}, *slow, {0: 15, p - 1: 17}]:
            args = SimpleNamespace(schedule=name, ranks=p, micro_batches=m, sleep=10, slow=stages)
            formula = schedules.milliseconds_by_formula(args)
            if formula is not None:
                assert formula == schedules.milliseconds(args, makes(name, p, m), stages), args
                known += 1
    assert known == sum(6 * p + 2 for p in (1, 2, 3, 4, 4)) - (name == "1f1b") * 9


def sleep_through(variant, flags, folder):
    """On a rank of the pool: status, output, and on rank 0 the JSON."""
    path, output = folder / "run.json", io.StringIO()
    with contextlib.redirect_stdout(output):
        status = schedules.main([variant, "--sleep=20", f"--json={path}", "--device=cpu", *flags])
    assert not dist.is_initialized()
    return status, output.getvalue(), json.loads(path.read_text()) if output.getvalue() else None


@pytest.mark.parametrize(("variant", "world", "units"), [("1f1b", 4, 21), ("dualpipe-v", 2, 25)])
def test_sleeping_stages_take_as_long_as_simulated(ranks, tmp_path, variant, world, units):
    flags = ["--micro-batches=4"]
    (status, output, record), *others = ranks(world)(sleep_through, variant, flags, tmp_path)
    assert status == 0 and others == [(0, "", None)] * (world - 1), output
    [check] = record["checks"]
    assert check["expected"] == 20 * units and check["ok"]
    assert check["measured"] >= check["expected"]
    assert f"a step takes {check['measured']} ms, simulated {20 * units} ms   ✓" in output

    [run] = read_runs([tmp_path / "run.json"])
    timeline = rooms_with("figure")["07"].timeline
    asleep, simulated = (timeline(run, of) for of in ("asleep", "simulated"))
    assert [[action[:3] for action in of_rank] for of_rank in asleep] == [
        [action[:3] for action in of_rank] for of_rank in simulated]
    for of_rank in asleep:
        assert all(end - start >= 20 * len(kind) for kind, _, _, start, end in of_rank)
    assert run["config"]["sleep"] == 20


@pytest.mark.parametrize(("variant", "slow", "times", "even", "closed"), [
    ("1f1b", {1: 40}, {1: 2}, 21, 29),
    ("dualpipe-v", {0: 30, 3: 30}, {0: 1.5, 3: 1.5}, 25, None),
])  # fmt: skip
def test_a_straggler_sets_the_pace(ranks, tmp_path, variant, slow, times, even, closed):
    """Its actions are slow and no others, and the step is compared with one of even stages."""
    world = 4 if variant == "1f1b" else 2
    flags = ["--micro-batches=4", *(f"--slow={stage}={ms}" for stage, ms in slow.items())]
    (status, output, record), *_ = ranks(world)(sleep_through, variant, flags, tmp_path)
    assert status == 0, output

    step, ratio = record["checks"]
    schedule = chapter(schedules.CHAPTER).make_schedule(variant, world, 4)
    table = schedules.timetable(schedule, slow=times)
    units = max(end for of_rank in table for *_, end in of_rank)
    assert units > even and closed in (None, units)
    assert step["expected"] == 20 * units <= step["measured"]
    assert ratio["expected"] == units / even and 1 < ratio["measured"] < 1.3 * units / even
    assert ("no closed form" if closed is None else f"closed form {units / even:.3f}") in output

    assert record["recorded"]["simulated"] == [[list(action) for action in of] for of in table]
    shortest = {}
    for kind, stage, _, start, end in itertools.chain(*record["recorded"]["asleep"]):
        ms = 1e3 * (end - start) / len(kind)
        shortest[stage] = min(shortest.get(stage, ms), ms)
    assert sorted(shortest) == list(range(len(schedule.ranks)))
    for stage, ms in shortest.items():
        assert 0 <= ms - slow.get(stage, 20) < 9
    assert record["config"]["slow"] == " ".join(f"{stage}={ms}" for stage, ms in slow.items())
