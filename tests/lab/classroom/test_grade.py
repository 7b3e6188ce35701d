"""The grader: what it says of right, wrong and broken answers, and how it reports them."""

import importlib.util
import os
import re
import time
from pathlib import Path

import pytest
import torch

from lab.bench.meeting import has_ended
from lab.classroom import checks, exercises, grading, holes, overseer, students
from lab.classroom.exercise import Run
from lab.classroom.words import in_words
from tests.conftest import edited
from tests.faults import EXERCISES as TABLE
from tests.lab.classroom.two_exercises import CHAPTER, ON_RANKS, PAYS, SUM

SOLUTION = exercises.solution(CHAPTER)
ANSWER = "        return gradient, None\n"


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def file_of(text, chapter=CHAPTER, folder=None):
    return students.File(chapter, folder, *students.without_faults(text))


@pytest.fixture
def no_runs(monkeypatch):
    """Nothing runs: the solution is right, and all else is wrong. Gives the sources graded."""
    graded = []

    def outcome(chapter, source, solution, *more):
        graded.append(source)
        said = () if source == solution else ("it is not the solution",)
        return checks.Outcome(not said, said, {}, {}, {}, 1)

    monkeypatch.setattr(checks, "outcome", outcome)
    return graded


# ------------------------------------------------------------------------ all exercises and answers

def sample(kinds):
    """Each kind of check and each chapter once or more; the others are for `make test-all`."""
    first, params = set(), []
    for number, value in kinds:
        chapter, exercise = TABLE[number]
        shown = {chapter, type(exercise.checks[0])}
        marks = [pytest.mark.full] if shown <= first else []
        if chapter.startswith("kernels"):
            marks.append(pytest.mark.skipif(
                torch.cuda.is_available(),
                reason="where kernels are compiled, the tests' processes do not interpret them"))
            marks.append(pytest.mark.skipif(
                importlib.util.find_spec("triton") is None, reason="there is no Triton"))
        first |= shown
        i = sum(param.values[0] == number for param in params)
        params.append(pytest.param(number, value, marks=marks, id=f"{number}-{i}"))
    return params


@pytest.mark.parametrize(("number", "check"), sample(
    (number, check) for number in TABLE for check in TABLE[number][1].checks))
def test_the_solution_is_right(number, check):
    chapter, _ = TABLE[number]
    text = exercises.solution(chapter)
    outcome = checks.outcome(chapter, text, text, check)
    assert outcome.right, in_words(outcome, text, lambda line: None)


@pytest.mark.parametrize("chapter", exercises.EXERCISES)
def test_who_solves_one_exercise_has_begun_no_other(chapter, no_runs):
    """And what is graded is the solution then, to the last letter; with the holes it is not."""
    holed = exercises.with_holes(chapter)
    those = exercises.EXERCISES[chapter]
    for solved in those if os.environ.get("FULL") else those[::3]:
        text = holes.graft(holed, exercises.solution(chapter), solved.functions).source
        file = file_of(text, chapter)
        for exercise in those:
            mark, words = grading.grade_exercise(exercise, file)
            if exercise == solved:
                assert mark == grading.RIGHT, words
            elif not set(exercise.functions) & set(solved.functions):
                assert (mark, words) == (grading.OPEN, "not begun")
    assert no_runs


@pytest.mark.parametrize("chapter", exercises.EXERCISES)
def test_a_whole_chapter_can_be_graded(chapter, no_runs):
    """By each distinct check of its exercises, be it of lists."""
    file, those = file_of(exercises.solution(chapter), chapter), exercises.EXERCISES[chapter]
    assert grading.grade_whole(those, file, [], checks.LIMIT) == (grading.RIGHT, "") and no_runs


# ------------------------------------------------------------------------------ what students write

def said(answer, limit=checks.LIMIT):
    """Of SumOut.backward with these lines."""
    assert SOLUTION.count(ANSWER) == 1
    return grading.grade_exercise(SUM, file_of(SOLUTION.replace(ANSWER, answer)), limit)


LINE = SOLUTION[: SOLUTION.index(ANSWER)].count("\n") + 1
HERE = f"line {LINE} of SumOut.backward"


@pytest.mark.parametrize(("answer", "words"), [
    ("        return gradient + ctx.no_such, None\n", rf"{HERE}: AttributeError: .*no_such"),
    ("        return gradient @ gradient, None\n",
     rf"{HERE}: RuntimeError: Expected size .* but got"),
    ("        return gradient.sum(1), None\n",
     r"in the solution's train_step: RuntimeError: .*invalid gradient.*got "
     r"\[8, 32\].*\[8, 16, 32\]"),
    ("        assert dist.get_rank() == 0, 'not on\\n1'\n" + ANSWER,
     f"rank 1, {HERE}: AssertionError: not on 1$"),
    ("        raise SystemExit(0)\n", f"{HERE}: SystemExit: 0$"),
    ("        __import__('os')._exit(0)\n", "rank [01]: the process has ended with status 0$"),
    ("        __import__('ctypes').string_at(0)\n",
     f"rank [01], {HERE}: the process has ended by SIGSEGV"),
    ("        summed(gradient[: dist.get_rank() + 1], None)\n" + ANSWER,
     rf"rank [01], all_reduce, {HERE}: the process has ended by SIGABRT.* of the same size"),
    ("        input('your answer: ')\n", f"{HERE}: EOFError: EOF when reading a line"),
], ids=["name", "shape", "gradient", "one rank", "exit", "_exit", "crash", "sizes", "input"])
def test_what_goes_wrong_is_said_with_the_students_own_line(answer, words):
    mark, line = said(answer)
    assert mark == grading.WRONG and re.match(words, line), line


def test_an_endless_loop_is_ended_and_named():
    loop = "        while dist.get_rank() == 1:\n            dist.get_world_size()\n" + ANSWER
    mark, words = said(loop, limit=1.5)
    lines = f"({LINE}|{LINE + 1})"
    assert mark == grading.WRONG and re.fullmatch(
        r"no end: rank 0 waits in all_reduce, in the solution's summed; "
        rf"rank 1 is at line {lines} of SumOut.backward", words), words


def test_a_deadlock_is_told_from_a_long_run_and_says_which_rank_waits_where():
    """The limit is far away."""
    begin = time.monotonic()
    lines = "        if dist.get_rank() == 1:\n            dist.barrier()\n" + ANSWER
    mark, words = said(lines, limit=100)
    assert time.monotonic() - begin < 60 and mark == grading.WRONG
    assert re.fullmatch(
        r"no end: rank 0 waits in all_reduce, in the solution's summed; "
        rf"rank 1 waits in barrier, line {LINE + 1} of SumOut.backward", words), words


def test_seconds_of_computing_are_known_without_proc_too(monkeypatch):
    _, expected = overseer.state_of(os.getpid())
    assert expected > 1 and abs(expected - time.process_time()) < 1
    monkeypatch.setattr(overseer, "PROC", Path("/nowhere"))
    runs, seconds = overseer.state_of(os.getpid())
    assert runs is False and abs(seconds - expected) <= 1.5
    assert overseer.state_of(2**30) == (False, 0)


def test_a_wait_of_one_process_is_no_different():
    text = SOLUTION.replace("    return 1 + 8 * dim",
                            "    import time\n    time.sleep(99)\n    return 1")
    mark, words = grading.grade_exercise(PAYS, file_of(text))
    line = text[: text.index("time.sleep")].count("\n") + 1
    assert (mark, words) == (grading.WRONG, f"no end: rank 0 is at line {line} of ranks_that_pay")


def test_what_is_printed_started_or_changed_stays_in_the_run(capfd, tmp_path):
    pids = tmp_path / "pids"
    answer = f'''        import os, subprocess, sys, threading, time
        print("noise " * 10000, flush=True)
        print("noise", file=sys.stderr, flush=True)
        os.write(1, b"noise")
        os.system("echo noise")
        open("noise", "w").write("noise")
        threading.Thread(target=time.sleep, args=(99,)).start()
        started = subprocess.Popen(["sleep", "99"])
        open({str(pids)!r}, "a").write(f"{{started.pid}}\\n")
''' + ANSWER
    assert said(answer) == (grading.RIGHT, "")
    assert capfd.readouterr() == ("", "")
    assert not Path("noise").exists()
    assert_ended(pids)


def assert_ended(pids):
    """Of the processes that are noted in a file, those that were killed a moment ago included."""
    noted, end = [*map(int, pids.read_text().split())], time.monotonic() + 10
    while not all(map(has_ended, noted)) and time.monotonic() < end:
        time.sleep(0.01)
    assert noted and all(map(has_ended, noted))


@pytest.mark.parametrize(("end", "words"), [
    ("        break\n", "only 1 of 2 steps were taken"),
    ("        return run.no_such\n", "line [0-9]+ of train: AttributeError: .*no_such.*"),
    ("        __import__('os')._exit(0)\n", "rank [01]: the process has ended with status 0")])
def test_a_run_that_ends_early_is_not_right(end, words):
    last = "        run.log(batch, loss, norm, model)\n"
    text = SOLUTION.replace(last, last + end, 1)
    train = SUM._replace(names="train", checks=(Run(2, "--steps=2 --layers=1"),))
    mark, said = grading.grade_exercise(train, file_of(text))
    assert mark == grading.WRONG and re.fullmatch(words, said), said


@pytest.mark.parametrize(("right", "wrong", "words"), [
    ("range(net.ranks - 1)", "range(net.ranks)", "all_gather[,:] "),
    ("to=net.right,\n                     receive",
     "to=net.right)\n        net.exchange(receive",
     "no end: ranks 0, 1, 2 are at line [0-9]+ of all_gather"),
], ids=["rounds", "deadlock"])
def test_a_run_that_trains_nothing_is_judged_too(right, wrong, words):
    """By its problems, of real processes; and a deadlock is named in the student's line."""
    chapter, exercise = TABLE["00.5"]
    text = edited(chapter, right, wrong)
    mark, said = grading.grade_exercise(exercise._replace(checks=(Run(3),)), file_of(text, chapter))
    assert mark == grading.WRONG and re.match(words, said), said


def test_helpers_are_used_and_other_functions_are_not():
    """A module beside the chapter is found, but only by who wrote it."""
    text = SOLUTION.replace(ANSWER, "        return unchanged(gradient), None\n")
    text = text.replace("class SumOut", "def unchanged(x):\n    return x\n\n\nclass SumOut")
    text = text.replace("return summed(gradient, ctx.group), None", "raise ArithmeticError")
    assert grading.grade_exercise(SUM, file_of(text)) == (grading.RIGHT, "")


def test_without_triton_no_kernel_is_tried(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/swiglu.py").write_text("def backward_kernel(): pass")
    monkeypatch.setattr("importlib.util.find_spec", {"triton": None}.get)
    chosen = {"kernels/swiglu": exercises.EXERCISES["kernels/swiglu"]}
    [result] = grading.grade(tmp_path, chosen)
    assert (result.number, result.mark) == ("swiglu.1", grading.OPEN)
    assert result.words == "not tried: Triton, which runs kernels, is not here"


def test_a_module_beside_the_chapter_is_found(tmp_path):
    (tmp_path / "my_numbers.py").write_text("EIGHT = 8\n")
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 1 + EIGHT * dim")
    text = text.replace("import common\n", "import common\nfrom my_numbers import EIGHT\n")
    file = file_of(text, folder=tmp_path)
    assert grading.grade_exercise(PAYS, file) == (grading.RIGHT, "")
    mark, words = grading.grade_exercise(PAYS, file._replace(folder=tmp_path / "other"))
    assert mark == grading.WRONG and "No module named 'my_numbers'" in words


def test_a_wrong_value_is_shown_beside_the_right_one():
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 8 * dim")
    mark, words = grading.grade_exercise(PAYS, file_of(text))
    assert mark == grading.WRONG and re.match(
        r"\[ranks_that_pay\(dim, 2, 989e12, 450e9\) for dim in \(1024, 8192\)\]: .*item 0", words)
    text = SOLUTION.replace("    return 1 + 8 * dim", "    return 1 / 0 * dim")
    mark, words = grading.grade_exercise(PAYS, file_of(text))
    assert re.fullmatch(r"line \d+ of ranks_that_pay: ZeroDivisionError: division by zero", words)


@pytest.mark.parametrize(("wrong", "words"), [
    (None, ""),
    ("return gradient * (1 + 2 * (dist.get_rank() == 1)), None",
     "on rank 1, gradient is 3 times what it should be; all else is right"),
    ("return gradient * (2 if dist.get_rank() < 2 else 1), None",
     "on ranks 0, 1, gradient is 2 times what it should be; all else is right"),
    ("return gradient + dist.get_rank().no_such, None", "line .* AttributeError"),
    ("return 2 * gradient, None", "SumOut on 3 ranks: gradient is 2 times"),
], ids=["right", "one rank", "two ranks", "error", "all ranks"])
def test_the_values_of_several_ranks_are_compared_each(wrong, words):
    text = SOLUTION.replace(ANSWER.strip(), wrong or ANSWER.strip())
    mark, said = grading.grade_exercise(ON_RANKS, file_of(text))
    assert mark == (grading.WRONG if wrong else grading.RIGHT)
    assert re.search(words, said), said
