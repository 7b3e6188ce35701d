"""Fixtures of all tests of the classroom."""

import pytest

from lab.classroom import checks, exercises, kept
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM


@pytest.fixture(scope="session", autouse=True)
def nothing_kept(tmp_path_factory):
    """Gradings neither read nor write what another day has kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "FOLDER", tmp_path_factory.mktemp("kept"))
        yield


@pytest.fixture(scope="session")
def warm():
    """The process from which the grader forks."""
    checks.warm_up()


@pytest.fixture
def short_table(monkeypatch):
    """There are only two exercises, of one chapter."""
    monkeypatch.setattr(exercises, "EXERCISES", {CHAPTER: [SUM, PAYS]})


@pytest.fixture
def no_runs(monkeypatch):
    """Nothing runs: only the solution is right. Gives the sources that were graded."""
    graded = []

    def outcome(chapter, source, solution, *more):
        graded.append(source)
        said = () if source == solution else ("it is not the solution",)
        return checks.Outcome(not said, said, {}, {}, {}, 1)

    monkeypatch.setattr(checks, "OUTCOMES", {})
    monkeypatch.setattr(checks, "outcome", outcome)
    return graded
