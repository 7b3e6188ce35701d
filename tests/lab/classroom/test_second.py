"""A second configuration: drawn by a seed, accepted by the chapter, and other in what counts."""

from types import SimpleNamespace

import pytest

from lab.classroom import checks, second
from lab.classroom.exercise import Run
from lab.classroom.exercises import EXERCISES
from tests.conftest import sample

RUNS = [(chapter, check) for chapter, these in EXERCISES.items() for check in dict.fromkeys(
    check for exercise in these for check in exercise.checks if checks.is_run(check))]


def sizes(ranks, flags, chapter):
    before = "" if chapter.startswith("00") else second.LEFT_OPEN
    return second.sizes(second.accepted(chapter, ranks, f"{before} {flags}"), ranks)


@pytest.mark.parametrize("chapter", sample(["03_zero", "00_collectives", "08_expert_parallel"]))
def test_what_is_drawn_is_accepted_and_differs_in_all_that_is_divided_by(chapter):
    check = next(check for name, check in RUNS if name == chapter)
    counts = "batch", "of a rank", "micro-batches"
    first, drawn = sizes(*check, chapter), list(second.varied(*check, chapter, "monday"))
    assert drawn == list(second.varied(*check, chapter, "monday"))
    assert drawn[0] != next(second.varied(*check, chapter, "tuesday"))
    others = [sizes(*one, chapter) for one in drawn]
    for (_, flags), other in zip(drawn, others):
        assert flags.startswith(check.flags) and other["ranks"] <= max(6, check.ranks)
        assert (other["ranks"] > 1) == (check.ranks > 1)
        assert not any(first[name] == other[name] > 1 for name in counts if name in first)
        if "batch" in first:
            assert (first["micro-batches"] > 1) == (other["micro-batches"] > 1)
    differing = [(first["ranks"] != other["ranks"],  # most constants are made of that
                  sum(first[name] != other.get(name) for name in first)) for other in others]
    assert differing == sorted(differing, reverse=True)
    assert differing[0][0] and differing[0][1] > len(first) / 2


def test_the_first_one_that_the_solution_passes_is_taken(monkeypatch):
    chapter, played = "00_collectives", []

    def outcome(chapter, source, solution, check):
        played.append(check)
        return SimpleNamespace(right=len(played) == 3)

    monkeypatch.setattr(checks, "outcome", outcome)
    found = second.of(Run(3), chapter, "of this test alone")
    assert found == played[2] and [tuple(run) for run in played] == [
        *second.varied(3, "", chapter, "of this test alone")][:3]
    assert second.of(Run(3), chapter, "of this test alone") is found and len(played) == 3


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(("chapter", "check"), [
    pytest.param(chapter, check, id=f"{chapter[:2]} {' '.join(map(str, check))}")
    for chapter, check in sample(RUNS)])
def test_the_solution_passes_a_second_configuration_of_each_run(chapter, check):
    found = second.of(check, chapter, "monday")
    assert found and tuple(found) in [*second.varied(*check, chapter, "monday")][:3]
