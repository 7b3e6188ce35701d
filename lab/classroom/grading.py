"""Grades a student's functions, each alone in the solution, and then the chapter as it is."""

import time
from typing import NamedTuple

from lab.classroom import checks, holes
from lab.classroom.students import Unreadable, read
from lab.classroom.words import in_words

# Not what imports torch: see lab/classroom/checks.py.

RIGHT, WRONG, OPEN = "✓", "✗", "·"
WHOLE = "the whole chapter"


class Result(NamedTuple):
    number: str             # "04.2"; "04": of a chapter
    what: str
    mark: str
    words: str
    points: int             # that it is worth
    seconds: float
    exercises: int = 1      # that it speaks of; 0: of the whole chapter

    @property
    def score(self):
        return self.points if self.mark == RIGHT else 0


def grade(folder, chosen, limit=checks.LIMIT):
    """Yields the Result of each exercise of a student, {chapter: exercises}, and after all of a
    chapter that of the whole. It comes to its end, whatever a student has written."""
    from lab.classroom.exercises import EXERCISES, short

    for chapter, exercises in chosen.items():
        results, is_whole = [], len(exercises) == len(EXERCISES[chapter])
        try:
            file = read(folder, chapter)
        except Exception as error:                      # of what nobody has thought of, too
            why = error if isinstance(error, Unreadable) else cannot(error)
            one = exercises[0]
            what = (one.number, one.what) if len(exercises) == 1 else (short(chapter), "all of it")
            points = sum(exercise.level for exercise in exercises) + is_whole
            yield Result(*what, WRONG, escaped(f"{chapter}.py {why}"), points, 0, len(exercises))
            continue
        for exercise in exercises:
            begin = time.monotonic()
            mark, words = in_any_case(grade_exercise, exercise, file, limit)
            results.append(Result(exercise.number, exercise.what, mark, escaped(words),
                                  exercise.level, time.monotonic() - begin))
            yield results[-1]
        if is_whole:
            begin = time.monotonic()
            mark, words = in_any_case(grade_whole, exercises, file, results, limit)
            alike = [r.number for r in results if r.mark == WRONG and r.words == escaped(words)]
            words = f"as {alike[0]}" if alike else words
            yield Result(short(chapter), WHOLE, mark, escaped(words), 1,
                         time.monotonic() - begin, 0)


def in_any_case(grading, *what):
    """Its mark and words. A student's file on which the grader itself fails is not right, and the
    next student's is graded."""
    try:
        return grading(*what)
    except Exception as error:
        return WRONG, cannot(error)


def cannot(error):
    return f"cannot be graded: {type(error).__name__}: {error}"


def grade_exercise(exercise, file, limit=checks.LIMIT):
    """The mark of a student's functions, and what is said of them."""
    from lab.classroom.exercises import solution

    nodes = {name: holes.find(file.tree, name) for name in exercise.functions}
    for name in nodes:
        fault = file.faults.get(name) or file.faults.get(name.split(".")[0])
        if fault:
            return WRONG, fault
        if nodes[name] is None:
            return WRONG, f"there is no {name} in {file.chapter}.py"
    empty = [name for name, node in nodes.items() if holes.is_hole(node)]
    if empty:
        return OPEN, "not begun" if len(empty) == len(nodes) else f"not begun: {', '.join(empty)}"
    graft = holes.graft(solution(file.chapter), file.text, exercise.functions)
    return run(file, graft.source, exercise.checks, limit, graft.line_of_student)


def grade_whole(exercises, file, results, limit):
    """The student's chapter as it is."""
    not_begun = [result.number for result in results if result.mark == OPEN]
    if file.faults:
        return WRONG, next(iter(file.faults.values()))
    if not_begun:
        part = f": {', '.join(not_begun)}" if len(not_begun) < len(results) else ""
        return OPEN, f"not begun{part}"
    distinct = {repr(check): check for exercise in exercises for check in exercise.checks}.values()
    runs = [check for check in distinct if checks.is_run(check)]
    return run(file, file.text, runs or distinct, limit, lambda line: line)


def run(file, source, these, limit, line_of_student):
    """The mark of a source by these checks, up to the first that fails."""
    from lab.classroom.exercises import solution

    for check in these:
        outcome = checks.outcome(file.chapter, source, solution(file.chapter), check, file.folder,
                                 limit)
        if not outcome.right:
            return WRONG, "; ".join(in_words(outcome, source, line_of_student))
    return RIGHT, ""


def escaped(words):
    """In one line, whatever is in a student's text."""
    from lab.cli.refusals import one_line

    return one_line(" ".join(words.split()))
