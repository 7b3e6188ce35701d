"""lab.schedules: what it draws, counts and refuses."""

import pytest

from lab import schedules
from tests.conftest import chapter


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
    schedule = chapter("07_pipeline_parallel").make_schedule(variant, 4, 8, 2)
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


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("flags", "works"), [
    ("1f1b --chunks=2", "without --chunks"), ("dualpipe --ranks=3", "--ranks 4"),
    ("interleaved --ranks=4 --micro-batches=6", "--micro-batches 8"),
    ("1f1b --ranks=180 --micro-batches=4096", "--micro-batches 8")])  # fmt: skip
def test_a_bad_argument_costs_one_line(capsys, flags, works):
    status, output, line = run(capsys, *flags.split())
    assert (status, output, line.count("\n")) == (2, "", 1)
    assert line.startswith("error: ") and line.endswith(f"; {works} would work\n")
