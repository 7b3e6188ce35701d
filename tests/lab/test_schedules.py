"""lab.schedules: what it draws, counts and refuses; stages that sleep on real ranks."""

import contextlib
import io
import itertools
import json
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lab import schedules
from tests.conftest import chapter, sample


def run(capsys, *flags):
    """Exit status, stdout and stderr of the command."""
    try:
        status = schedules.main(list(flags))
    except SystemExit as leaving:
        status = leaving.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize(("flags", "alive", "bubble"), [
    ("interleaved --ranks=8 --micro-batches=16 --chunks=2",
     "23 21 19 17 15 13 11 9 / 23 21 19 17 15 13 11 9", "0.21875 / 0.21875"),
    ("zb-h2 --micro-batches=5", "5 5 5 5 / 5 5 5 5", "0.133333 / -"),  # too few for a closed form
])  # fmt: skip
def test_what_a_schedule_costs(capsys, flags, alive, bubble):
    status, output, errors = run(capsys, *flags.split())
    *_, of_alive, of_bubble = output.splitlines()
    assert (status, errors) == (0, "") and output.startswith("rank 0  F")
    assert of_alive.endswith(f"  {alive}") and of_bubble.endswith(f"  {bubble}")


@pytest.mark.parametrize("variant", ["1f1b", "zb-h1", "dualpipe-v"])
def test_a_drawing_has_every_unit_of_time(variant):
    """One letter for each unit of an action, and a dot for each unit that a rank waits."""
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


# ------------------------------------------------------------------------------------ the search


def every_order(m, memory):
    """All orders of m F, B and W in which a B follows its F, a W its B, and no more than `memory`
    micro-batches are alive."""
    for order in set(itertools.permutations("FBW" * m)):
        f = b = w = 0
        for kind in order:
            f, b, w = f + (kind == "F"), b + (kind == "B"), w + (kind == "W")
            if not w <= b <= f <= w + memory:
                break
        else:
            yield order


def bubbles_of(orders, times):
    """Of an order for each rank; None: ranks wait for each other."""
    seven = chapter(schedules.CHAPTER)
    actions = [[seven.Action(kind, rank, order[:place].count(kind))
                for place, kind in enumerate(order)] for rank, order in enumerate(orders)]
    with contextlib.suppress(ValueError):
        return schedules.bubbles(seven.Schedule(actions, list(range(len(orders))), len(orders)),
                                 **times)


@pytest.mark.parametrize(("p", "m", "memory", "times"), sample([
    (3, 2, 2, (3, 4, 2)), (2, 3, 3, (10, 12, 8)), (3, 2, 1, (1, 2, 1)), (2, 3, 2, (5, 7, 4)),
    *((2, 3, 3, times) for times in itertools.product((1, 2, 3), repeat=3))], size=2))
def test_the_rule_finds_what_the_best_of_all_orders_costs(p, m, memory, times):
    args = SimpleNamespace(ranks=p, micro_batches=m, memory=memory, times=dict(zip("FBW", times)))
    found = schedules.automatic_schedule(chapter(schedules.CHAPTER), args)
    every = {bubbles_of(orders, args.times)
             for orders in itertools.product([*every_order(m, memory)], repeat=p)} - {None}
    assert schedules.bubbles(found, **args.times) == min(every) and len(every) > 1


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("world", "flags", "works"), [
    (0, "1f1b --chunks=2", "without --chunks"), (0, "dualpipe --ranks=3", "--ranks 4"),
    (0, "interleaved --ranks=4 --micro-batches=6", "--micro-batches 8"),
    (0, "auto --ranks=16 --micro-batches=64", "--micro-batches 8"),
    (0, "1f1b --memory=3", "without --memory"), (0, "auto --times=1,2", "--times 10,12,8"),
    (2, "1f1b --ranks=4", "--nproc_per_node 4")])  # fmt: skip
def test_a_bad_argument_costs_one_line(capsys, monkeypatch, world, flags, works):
    if world:
        monkeypatch.setenv("WORLD_SIZE", str(world))
    status, output, line = run(capsys, *flags.split())
    assert (status, output, line.count("\n")) == (2, "", 1)
    assert line.startswith("error: ") and line.endswith(f"; {works} would work\n")


# ------------------------------------------------------------------------------- stages that sleep


def sleep_through(variant, folder):
    """On a rank of the pool: status, output, and on rank 0 the JSON."""
    path, output = folder / "run.json", io.StringIO()
    with contextlib.redirect_stdout(output):
        status = schedules.main([variant, "--sleep=20", f"--json={path}", "--device=cpu",
                                 "--micro-batches=4"])
    assert not dist.is_initialized()
    return status, output.getvalue(), json.loads(path.read_text()) if output.getvalue() else None


@pytest.mark.parametrize(("variant", "world"), sample([("dualpipe-v", 2), ("1f1b", 4)]))
def test_stages_sleep_in_the_order_of_their_schedule(ranks, tmp_path, variant, world):
    """Each for its time, or longer on a busy machine: so no upper limit is tested here. That ranks
    work at the same time is seen in what they did meanwhile."""
    (status, output, record), *others = ranks(world)(sleep_through, variant, tmp_path)
    assert others == [(0, "", None)] * (world - 1)
    [step] = record["checks"]
    assert status == int(not step["ok"]), output

    table = schedules.timetable(chapter(schedules.CHAPTER).make_schedule(variant, world, 4))
    units = max(actions[-1][-1] for actions in table)
    assert record["recorded"]["simulated"] == [[list(action) for action in of] for of in table]
    assert step["expected"] == 20 * units <= step["measured"]

    asleep = record["recorded"]["asleep"]
    assert [[action[:3] for action in of] for of in asleep] == [
        [list(action[:3]) for action in of] for of in table]
    for kind, *_, start, end in itertools.chain(*asleep):
        assert 1e3 * (end - start) >= 20 * len(kind)
    spans = [[(start, end) for *_, start, end in of] for of in asleep[:2]]
    assert any(start < other_end and other_start < end for start, end in spans[0]
               for other_start, other_end in spans[1])
