"""Schedules, as the page is told them."""

import pytest

from common import Refused
from lab import schedules
from lab.page import pipelines, tools
from tests.conftest import chapter


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_a_schedule_is_the_chapters(name):
    seven = chapter("07_pipeline_parallel")
    told = pipelines.schedule({"schedule": name, "ranks": "4", "micro_batches": "8", "F": "1",
                               "B": "1.5", "W": "0.5"})
    made = seven.make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    span = schedules.simulate(made, 1, 1.5, 0.5, as_one=name == "dualpipe-v")
    assert told["actions"] == [[[*action, *span[action]] for action in actions]
                               for actions in made.actions]
    assert told["bubble"] == pytest.approx(told["formula"])
    assert [max(alive) for alive in told["alive"]] == told["most_alive"]
    assert told["drawing"] == schedules.drawing(made)
    assert told["lists"][0].split()[0] == ("F0" if told["slices"] == 1 else "F0.0")
    assert len(told["lists"][0].split()) == len(made.actions[0])

@pytest.mark.parametrize("name", pipelines.by_hand())
def test_what_a_schedule_takes_is_answered(name):
    """And of what it does not take, it is refused with a change that is taken."""
    for p in (1, 2, 3, 16):
        asked = {"schedule": name, "ranks": str(p), "micro_batches": "48"}
        if name == "dualpipe" and p % 2:
            with pytest.raises(Refused, match=f"; ranks={p + 1} would work"):
                pipelines.schedule(asked)
            continue
        takes = pipelines.schedule(asked)["takes"]
        assert p in takes["ranks"] and 48 in takes["micro_batches"]
        for m in range(1, 65):
            try:
                pipelines.must_be_taken(name, p, m, 2 if name == "interleaved" else 1, False)
                is_taken = True
            except Refused as refused:
                is_taken, works = False, int(refused.args[0].split("=")[1].split()[0])
                pipelines.must_be_taken(name, p, works, 2 if name == "interleaved" else 1, False)
            assert is_taken == (m in takes["micro_batches"])


def test_too_many_actions_are_refused_with_what_works():
    with pytest.raises(Refused, match=r"micro_batches=31\d? would work"):
        pipelines.schedule({"ranks": "64", "micro_batches": "1024"})
    with pytest.raises(Refused, match="fewer ranks than 64 would work"):
        pipelines.schedule({"ranks": "64", "micro_batches": "1024", "schedule": "dualpipe-v"})
    with pytest.raises(Refused, match="on 1 rank does not take 1 micro-batch; micro_batches=2 "):
        pipelines.schedule({"ranks": "1", "micro_batches": "1", "schedule": "dualpipe-v"})


def test_what_the_pages_ask_first_is_among_the_stored_answers():
    first = tools.asked_first("schedules", tools.TOOLS["schedules"].begins)
    assert ("schedule", first) in list(pipelines.examples())
