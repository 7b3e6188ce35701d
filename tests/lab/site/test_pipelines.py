"""Schedules, as the page is told them: chapter 07's."""

import pytest

from common import Refused
from lab import schedules
from lab.site import pipelines
from tests.conftest import chapter, sample


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


@pytest.mark.parametrize("name", sample(["dualpipe", *pipelines.by_hand()]))
def test_the_page_offers_the_numbers_that_a_schedule_takes(name):
    """A refused number comes with one that works."""
    chunks = 2 if name == "interleaved" else 1
    for p in (2, 16) if name == "dualpipe" else (1, 2, 3, 16):
        takes = pipelines.schedule({"schedule": name, "ranks": str(p),
                                    "micro_batches": "48"})["takes"]
        assert p in takes["ranks"] and 48 in takes["micro_batches"]
        for m in range(1, 65):
            try:
                pipelines.must_be_taken(name, p, m, chunks, False)
                is_taken = True
            except Refused as refused:
                is_taken, works = False, int(refused.args[0].split("=")[1].split()[0])
                pipelines.must_be_taken(name, p, works, chunks, False)
            assert is_taken == (m in takes["micro_batches"]), (p, m)
