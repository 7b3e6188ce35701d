"""The grader: what it says of right, wrong and broken answers."""

import importlib.util
import itertools
import multiprocessing
import re
from types import SimpleNamespace

import pytest
import torch

from lab.classroom import checks, exercises, grading, overseer
from lab.classroom.exercise import Run
from lab.classroom.words import in_words
from tests.conftest import sample
from tests.faults import EXERCISES as TABLE
from tests.lab.classroom.two_exercises import (
    ANSWER,
    LINES,
    ON_RANKS,
    SOLUTION,
    SUM,
    file_of,
    instead,
)

pytestmark = pytest.mark.usefixtures("warm")


# ----------------------------------------------------------------------------------- right answers

CHECKS = [pytest.param(number, check, id=f"{number}-{i}")
          for number, (_, exercise) in TABLE.items() for i, check in enumerate(exercise.checks)]


@pytest.mark.parametrize(("number", "check"), sample(CHECKS))
def test_the_solution_is_right(number, check):
    chapter, _ = TABLE[number]
    if chapter.startswith("kernels"):
        if importlib.util.find_spec("triton") is None:
            pytest.skip("there is no Triton")
        if torch.cuda.is_available():
            pytest.skip("where kernels are compiled, the tests' processes don't interpret them")
    text = exercises.solution(chapter)
    outcome = checks.outcome(chapter, text, text, check)
    assert outcome.right, in_words(outcome, text, lambda line: None)


def test_without_triton_no_kernel_is_tried(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/swiglu.py").write_text("def backward_kernel(): pass")
    monkeypatch.setattr("importlib.util.find_spec", {"triton": None}.get)
    chosen = {"kernels/swiglu": exercises.EXERCISES["kernels/swiglu"]}
    [result] = grading.grade(tmp_path, chosen)
    assert (result.number, result.mark) == ("swiglu.1", grading.OPEN) and "Triton" in result.words


# ----------------------------------------------------------------------------------- wrong answers

def here(exercise):
    """How the grader names the exercise's line."""
    line = SOLUTION[: SOLUTION.index(LINES[exercise])].count("\n") + 1
    return f"line {line} of {exercise.functions[-1]}"


LOOP = "        while dist.get_rank() == 1:\n            dist.get_world_size()\n" + ANSWER
NOT_ON_1 = "        assert dist.get_rank() == 0, 'not on\\n1'\n" + ANSWER
WRONG = {  # an exercise, what a student writes in place of its line, and what must be said
    "one rank": (ON_RANKS, "        return gradient * (1 + 2 * (dist.get_rank() == 1)), None\n",
                 ".*on rank 1, gradient is 3 times .*"),
    "loop": (SUM, LOOP, "no end: rank 0 waiting in all_reduce, line [0-9]+ of summed; "
             f"rank 1 at (line [0-9]+|{here(SUM)}) of SumOut.backward"),
    "error on a rank": (SUM, NOT_ON_1, f"rank 1, {here(SUM)}: AssertionError: not on 1"),
    "crash": (SUM, "        __import__('ctypes').string_at(0)\n",
              f"rank [01], {here(SUM)}: the process has ended by SIGSEGV.*")}


@pytest.mark.parametrize("name", sample(WRONG, 3))
def test_what_is_wrong_is_said_with_the_students_own_line(name):
    exercise, answer, words = WRONG[name]
    file = file_of(instead(LINES[exercise], answer))
    mark, said = grading.grade_exercise(exercise, file, 1.5 if name == "loop" else checks.LIMIT)
    assert mark == grading.WRONG and re.fullmatch(words, said), said


def test_a_run_that_ends_early_is_not_right():
    last = "        run.log(batch, loss, norm, model)\n"
    train = SUM._replace(names="train", checks=(Run(2, "--steps=2 --layers=1"),))
    file = file_of(SOLUTION.replace(last, f"{last}        break\n", 1))
    assert grading.grade_exercise(train, file) == (
        grading.WRONG, "only 1 of 2 steps were taken")


# -------------------------------------------------------------------------- when a run has no end


class Process:
    """One that never ends, and is busy or not whenever somebody looks."""

    pid, status = 1, None

    def __init__(self, busy, seconds=0.0):
        self.busy, self.seconds = busy, seconds

    def is_running(self):
        return True

    def has_failed(self):
        return False

    def is_busy(self):
        return self.busy


@pytest.mark.parametrize(("process", "least", "most"), [
    (Process(False), overseer.IDLE, overseer.IDLE),  # it waits, whenever somebody looks
    (Process(True), 2 * overseer.CLOCK, 2 * overseer.CLOCK + 2),  # it uses no seconds
    (Process(True, 1.5), 1, 1)])  # it has computed for too long
def test_no_limit_is_outlived(monkeypatch, process, least, most):
    """By a clock that goes on by half a second whenever somebody looks at it."""
    looks, ticks = [], itertools.count(0, 0.5 * process.busy)
    clock = SimpleNamespace(monotonic=ticks.__next__, sleep=looks.append)
    monkeypatch.setattr(overseer, "time", clock)
    ours, its = multiprocessing.Pipe()
    assert overseer.have_ended([process], 1, its) is False
    assert least <= len(looks) <= most
    ours.close()  # nobody waits any more
    with pytest.raises(SystemExit):
        overseer.have_ended([process], 1, its)
    its.close()


# ------------------------------------------------------------------- runs are compared outside

FORGED = """        from lab.run import report
        if not hasattr(report.Run, "forged"):
            as_json, finish = report.Run.as_json, report.Run.finish
            report.Run.forged = True
            report.Run.as_json = lambda run: as_json(run) | {"problems": [], "diagnosis": []}
            report.Run.finish = lambda run: finish(run) and 0
        return 2 * gradient, None
"""


def test_a_run_that_calls_itself_right_is_compared_with_the_solution():
    mark, words = grading.grade_exercise(SUM, file_of(instead(ANSWER, FORGED)))
    assert mark == grading.WRONG
    assert re.match(r"the gradient norm of step 1 is [\d.]+, and should be [\d.]+$", words), words


def test_each_part_of_a_record_is_compared():
    def check(name, measured):
        return {"name": name, "kind": "sent", "measured": measured, "ok": True}

    right = {"reference_loss": [5.0, 4.0], "reference_grad_norm": [1.0, None],
             "tolerance": {"loss": 1e-9, "gradient norm": 1e-9}, "checks": [check("calls", 3)]}
    record = {"loss": [5.0, 4.0], "grad_norm": [1.0, 2.0], "checks": [check("calls", 3)]}
    assert checks.compare_records(record, right) == ""
    for change, words in [({"loss": [5.0, 4.1]}, "the loss of step 2 is 4.1, and should be 4"),
                          ({"grad_norm": [1.1, 2.0]}, "the gradient norm of step 1 is 1.1"),
                          ({"loss": [5.0]}, "only 1 of 2 steps were taken"),
                          ({"checks": []}, "calls: measured None, and should be 3")]:
        assert words in checks.compare_records(record | change, right)
