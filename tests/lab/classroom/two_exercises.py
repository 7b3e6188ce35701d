"""Two exercises of chapter 04 that tests of the grader use in place of all, and students' files."""

import time

import torch
import torch.distributed as dist

from lab.classroom import exercises, students
from lab.classroom.exercise import Exercise, Run, Same
from lab.run.meeting import has_ended

CHAPTER = "04_tensor_parallel"
SOLUTION = exercises.solution(CHAPTER)
ANSWER = "        return gradient, None\n"  # to SUM
RIGHT = next(line for line in SOLUTION.splitlines() if "    return 1 + 8 * dim" in line)  # to PAYS


def sums_on_ranks(chapter):
    """The gradient that a sum on all ranks hands back if the loss weighs rank r with 10^r."""
    x = torch.zeros(2, requires_grad=True)
    y = chapter.SumOut.apply(x, dist.group.WORLD)
    (y * 10**dist.get_rank()).sum().backward()
    return {"y": y, "gradient": x.grad}


SUM = Exercise("04.2", "SumOut.backward", 1, "?", ("", ""), (Run(2, "--steps=1 --layers=1"),))
PAYS = Exercise("04.7", "ranks_that_pay", 2, "?", ("", ""), (
    Same("[chapter.ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]",
         "of 1,024 and 8,192 numbers", __name__),), "who pays")
ON_RANKS = Exercise("04.2", "SumOut.forward SumOut.backward", 1, "?", ("?", "?"),
                    (Same("sums_on_ranks(chapter)", "SumOut on 3 ranks", __name__, 3),))
LINES = {SUM: ANSWER, ON_RANKS: ANSWER, PAYS: RIGHT}


def instead(old, new):
    """The solution with one piece replaced."""
    assert SOLUTION.count(old) == 1, old
    return SOLUTION.replace(old, new)


def file_of(text, chapter=CHAPTER, folder=None):
    return students.File(chapter, folder, text, students.parse(text))


def written(folder, text=SOLUTION, chapter=CHAPTER):
    """A student's folder with a chapter in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{chapter}.py").write_text(text, encoding="utf-8")
    return folder


def all_end(pids):
    """Whether the processes that a file lists have ended, or do so within a minute."""
    listed, end = [*map(int, pids.read_text().split())], time.monotonic() + 60
    while not all(map(has_ended, listed)) and time.monotonic() < end:
        time.sleep(0.02)
    return bool(listed) and all(map(has_ended, listed))
