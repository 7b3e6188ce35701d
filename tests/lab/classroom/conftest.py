"""Fixtures of all tests of the classroom."""

import ast

import pytest

from lab.classroom import checks, exercises
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM


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
        is_same = ast.dump(ast.parse(source)) == ast.dump(ast.parse(solution))
        problems = () if is_same else ("it is not the solution",)
        return checks.Outcome(not problems, problems, {}, {}, {}, 1)

    monkeypatch.setattr(checks, "outcome", outcome)
    return graded
