"""The grader: what it says of right, wrong and broken answers."""

import importlib.util
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lab.classroom import checks, exercises, grading, holes, overseer
from lab.classroom.exercise import Run
from lab.classroom.words import in_words
from tests.conftest import sample
from tests.faults import EXERCISES as TABLE
from tests.lab.classroom.two_exercises import (
    ANSWER,
    CHAPTER,
    LINES,
    ON_RANKS,
    PAYS,
    RIGHT,
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


@pytest.mark.parametrize("chapter", sample(
    sorted(exercises.EXERCISES, key=lambda chapter: chapter != CHAPTER)))
def test_each_exercise_is_graded_alone(chapter, no_runs):
    """If one is solved and the others are holes, it is right, and the others are not begun."""
    holed = exercises.with_holes(chapter)
    those = exercises.EXERCISES[chapter]
    for solved in those:
        text = holes.graft(holed, exercises.solution(chapter), solved.functions).source
        file = file_of(text, chapter)
        for exercise in those:
            mark, words = grading.grade_exercise(exercise, file)
            if exercise == solved:
                assert mark == grading.RIGHT, words
            elif not set(exercise.functions) & set(solved.functions):
                assert (mark, words) == (grading.OPEN, "not begun")
    assert no_runs


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
    "name": (SUM, "        return gradient + ctx.no_such, None\n",
             f"{here(SUM)}: AttributeError: .*no_such.*"),
    "value": (PAYS, RIGHT.replace("1 + 8", "8"),
              r"\[ranks_that_pay\(dim, 2, 989e12, 450e9\) for dim in \(1024, 8192\)\]: .*item 0.*"),
    "one rank": (ON_RANKS, "        return gradient * (1 + 2 * (dist.get_rank() == 1)), None\n",
                 ".*on rank 1, gradient is 3 times .*"),
    "loop": (SUM, LOOP, "no end: rank 0 waits in all_reduce, in the solution's summed; "
             f"rank 1 is at (line [0-9]+|{here(SUM)}) of SumOut.backward"),
    "error on a rank": (SUM, NOT_ON_1, f"rank 1, {here(SUM)}: AssertionError: not on 1"),
    "_exit": (SUM, "        __import__('os')._exit(0)\n",
              "rank [01]: the process has ended with status 0"),
    "crash": (SUM, "        __import__('ctypes').string_at(0)\n",
              f"rank [01], {here(SUM)}: the process has ended by SIGSEGV.*"),
    "wait in a value": (PAYS, "    __import__('time').sleep(99)",
                        f"no end: rank 0 is at {here(PAYS)}")}


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

@pytest.mark.parametrize(("state", "least", "most"), [
    ((False, 0.0), overseer.LOOKS / 2, overseer.LOOKS / 2 + 1),  # it waits, whenever somebody looks
    ((True, 0.0), overseer.CLOCK, overseer.CLOCK + 1),  # it never seems idle, and uses no seconds
    ((True, 1.5), 0, 1)])  # it has computed for too long
def test_no_limit_is_outlived(monkeypatch, state, least, most):
    """By a clock that goes on by half a second whenever somebody looks at it."""
    ticks = itertools.count(0, 0.5)
    clock = SimpleNamespace(monotonic=ticks.__next__, sleep=lambda seconds: None)
    monkeypatch.setattr(overseer, "time", clock)
    monkeypatch.setattr(overseer, "state_of", lambda pid: state)
    monkeypatch.setattr(overseer.os, "cpu_count", lambda: 1)
    ours, its = multiprocessing.Pipe()
    process = SimpleNamespace(is_running=lambda: True, has_failed=lambda: False, pid=1)
    assert overseer.have_ended([process], 1, its) is False
    assert least <= next(ticks) <= most + 1
    ours.close()  # nobody waits any more
    with pytest.raises(SystemExit):
        overseer.have_ended([process], 1, its)
    its.close()


def test_seconds_of_computing_are_known_without_proc_too(monkeypatch):
    monkeypatch.setattr(overseer, "PROC", Path("/nowhere"))
    runs, seconds = overseer.state_of(os.getpid())
    assert runs is False and seconds > 0
    assert overseer.state_of(2**30) == (False, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the threads' states in Linux's /proc")
def test_a_process_is_not_idle_while_one_of_its_threads_computes():
    """Such as gloo's, which on a busy machine brings late the messages that others wait for."""
    program = ("import threading, time\nthread = threading.Thread(target=lambda: [None for _ in "
               "iter(time.monotonic, 0)], daemon=True)\nthread.start()\nprint()\ntime.sleep(600)")
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        assert sum(overseer.state_of(process.pid)[0] for _ in range(50)) >= 25
    finally:
        process.kill()
        process.communicate()
