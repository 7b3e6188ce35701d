"""Each planted fault is seen, and named, by the instruments that its table lists.

`make test` plants the first fault of each chapter for each instrument; `make test-all` plants all.
"""

import importlib.util
import os

import pytest
import torch

from lab import museum
from lab.classroom import checks, exercises, grading, students
from lab.museum import observe
from tests import faults
from tests.conftest import SMALL, TEXT, chapter, run_main, sample
from tests.faults import EXERCISES, FAULTS, TABLES, Graded, OnCuda, Verified
from tests.support.pretend_cuda import WORLD, RuleBroken, run_on_cuda


def cases(kind):
    """(fault, what sees it): all in `make test-all`, else the first of each table."""
    params = []
    for name, table in TABLES.items():
        seen = [(fault, one) for fault in table for one in fault.by(kind)]
        for i, (fault, one) in enumerate(sample(seen)):
            what = one.exercise if kind is Graded else name
            params.append(pytest.param(fault, one, id=f"{what}-{i}"))
    return params


# ------------------------------------------------------------------------------------- the tables


def test_every_edit_applies_and_no_edit_is_planted_twice():
    """Two edits are the same if they change the same characters to the same, but for spaces. What
    the museum plants needs no run here, unless its diagnosis is looked at."""
    planted = {}
    for fault in FAULTS:
        what = fault.file, changed(exercises.solution(fault.file), fault.planted())
        assert what not in planted, f"{fault.file}: {fault.right} is planted twice"
        planted[what] = fault
    for exhibit in (one for room in museum.exhibits().values() for one in room):
        fault = planted.get((exhibit.file.removesuffix(".py"), changed(*observe.sources(exhibit))))
        assert not fault or not [seen for seen in fault.by(Verified) if not seen.diagnosis], (
            f"{exhibit.number} plants this already: {fault.right}")


def changed(old, new):
    """(where, what was there, what is there now) of an edit, without what both begin or end with,
    and without spaces."""
    start = len(os.path.commonprefix([old, new]))
    end = len(os.path.commonprefix([old[start:][::-1], new[start:][::-1]]))
    words = ["".join(text[start : len(text) - end].split()) for text in (old, new)]
    return len("".join(old[:start].split())), *words


def test_an_edit_that_does_not_apply_says_so():
    fault = faults.Fault("04_tensor_parallel", "there is no such line", "",
                         [Graded("04.1", "nothing")])
    with pytest.raises(ValueError, match="contains 0 times.*there is no such line"):
        fault.planted()


def test_every_exercise_has_a_wrong_answer():
    assert {seen.exercise for fault in FAULTS for seen in fault.by(Graded)} == EXERCISES.keys()


# -------------------------------------------------------------------------------- the verifier

# Three micro-batches on each rank, of which no two have as many valid targets.
FLAGS = (*SMALL, f"--data={TEXT}", "--verify", "--dtype=float64", "--optimizer=sgd", "--steps=1",
         "--micro-batch=1", "--ignore=0.3")  # fmt: skip
OF_CHAPTER = {"02": "--batch=6", "03": "--batch=6", "08": "--batch=12", "09": "--batch=6",
              "11": "--batch=6 --optimizer=muon"}  # of the others: --batch=3


@pytest.mark.parametrize(("fault", "seen"), cases(Verified))
def test_a_run_is_not_the_same_as_one_gpu(ranks, tmp_path, fault, seen):
    chapter(fault.file)  # or skip
    of_chapter = OF_CHAPTER.get(fault.file[:2], "--batch=3")
    flags = (*FLAGS, *of_chapter.split(), *seen.flags.split())
    (status, run, output), *_ = ranks(seen.ranks)(
        run_main, fault.file, flags, tmp_path, fault.planted())
    lines = output.splitlines()
    problems = [line for line in lines if line.startswith("  ✗ ")]
    assert status == 1 and run["problems"] and problems, output
    assert any(seen.named in line for line in problems), output
    if seen.diagnosis:
        printed = [line.removeprefix("  → ") for line in lines if line.startswith("  → ")]
        assert run["diagnosis"] == printed == seen.diagnosis


# ----------------------------------------------------------------------------------- the grader


@pytest.fixture
def warm():
    """The process from which the grader forks."""
    checks.warm_up()


@pytest.mark.parametrize(("fault", "seen"), cases(Graded))
def test_an_answer_is_wrong_and_the_grader_says_why(warm, fault, seen):
    if fault.file.startswith("kernels"):
        needs_an_interpreter()
    planted = fault.planted()
    file = students.File(fault.file, None, planted, students.parse(planted))
    mark, words = grading.grade_exercise(EXERCISES[seen.exercise][1], file)
    assert mark == grading.WRONG and seen.says in words, words


def needs_an_interpreter():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("there is no Triton")
    if torch.cuda.is_available():
        pytest.skip("where kernels are compiled, the tests' processes don't interpret them")


# ------------------------------------------------------------------------------- pretended CUDA


def rule_broken(name, flags, folder, source):
    """The rule that a chapter breaks on this rank, or else its output and where it waited."""
    try:
        _, output, steps = run_on_cuda(name, flags, folder, source)
    except (RuleBroken, ValueError) as broken:
        return str(broken)
    return f"{output}{steps}"


@pytest.mark.parametrize(("fault", "seen"), cases(OnCuda))
def test_a_broken_rule_is_named_on_every_rank(ranks, tmp_path, fault, seen):
    chapter(fault.file)  # or skip
    steps = () if fault.file.startswith("00") else ("--steps=1",)
    world = WORLD.get(fault.file, 2)
    results = ranks(world)(rule_broken, fault.file, (*steps, *seen.flags.split()), tmp_path,
                           fault.planted())
    assert all(seen.rule in result for result in results), results
