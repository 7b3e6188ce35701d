"""Schedules, as the page gets them: chapter 07's."""

import pytest

from common import Refused
from lab import schedules
from lab.site import pipelines
from tests.conftest import chapter, sample


def ask(name, ranks, micro_batches, F=1, B=1, W=1, chunks=2):
    return pipelines.schedule(name, ranks, micro_batches, chunks, "false", F, B, W)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe-v"])
def test_a_schedule_is_the_chapters(name):
    answer, seven = ask(name, 4, 8, 1, 1.5, 0.5), chapter("07_pipeline_parallel")
    made = seven.make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    span = schedules.simulate(made, 1, 1.5, 0.5, as_one=name == "dualpipe-v")
    assert answer["actions"] == [[[*action, *span[action]] for action in actions]
                                 for actions in made.actions]
    assert answer["bubble"] == pytest.approx(answer["formula"])
    assert [max(alive) for alive in answer["alive"]] == answer["most_alive"]


@pytest.mark.parametrize("name", sample(["dualpipe", *pipelines.names()]))
def test_numbers_that_a_schedule_does_not_take_become_some_that_it_takes(name):
    fitting = chapter("07_pipeline_parallel").fitting
    for ranks in (2, 3, 16):
        for micro_batches in (1, 7, 48, 10**6):
            answer = ask(name, ranks, micro_batches)
            n, m = answer["ranks"], answer["micro_batches"]
            assert n == ranks + (name == "dualpipe") * (ranks % 2) and len(answer["actions"]) == n
            assert fitting(name, n, m, False) == m and sum(map(len, answer["actions"])) < 9000
            assert micro_batches > 48 or m == fitting(name, n, micro_batches, False)


def test_what_no_schedule_takes_is_refused_in_a_line():
    for name, ranks, micro_batches, time in (("foo", 4, 8, 1), ("1f1b", 65, 8, 1),
                                             ("1f1b", 4, 0.5, 1), ("1f1b", 4, 8, -1),
                                             ("1f1b", 4, 8, "x")):
        with pytest.raises(Refused, match="schedule = "):
            ask(name, ranks, micro_batches, F=time)
