"""Grades a student's functions, each alone in the solution, and then the chapter as it is.

A bundle, which students have at home, has no solutions. There values are compared with stored ones,
functions are tried where they are, and the whole chapter is run.
"""

import re
import time
from typing import NamedTuple

from lab.classroom import checks, holes
from lab.classroom.students import NotThere, Unreadable, read
from lab.classroom.words import in_words
from lab.run.refusals import one_line

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
    share: float = 0        # of the points: of several functions, some may be right

    @property
    def score(self):
        points = round(self.share * self.points, 2)
        return int(points) if points == int(points) else points


def grade(folder, chosen, limit=checks.LIMIT):
    """Yields the Result of each exercise of a student, {chapter: exercises}, and after all of a
    chapter that of the whole. It comes to its end, whatever a student has written."""
    from lab.classroom.exercises import EXERCISES, short

    for chapter, exercises in chosen.items():
        results, is_whole = [], len(exercises) == len(EXERCISES[chapter])
        try:
            file = read(folder, chapter)
        except Exception as error:                      # of what nobody has thought of, too
            is_there = not isinstance(error, NotThere)
            why = error if isinstance(error, Unreadable) else cannot(error)
            why = f"{chapter}.py {why}" if is_there else "not submitted"
            yield of_all(chapter, exercises, is_whole, WRONG if is_there else OPEN, why)
            continue
        if chapter.startswith("kernels/") and not checks.has_triton():
            why = "not tried: Triton, which runs kernels, is not here"
            yield of_all(chapter, exercises, is_whole, OPEN, why)
            continue
        for exercise in exercises:
            begin = time.monotonic()
            mark, words = in_any_case(grade_exercise, exercise, file, limit)
            right = [] if mark == RIGHT else right_alone(exercise, file, limit)
            words += f"; right alone: {', '.join(right)}" if right else ""
            share = 1 if mark == RIGHT else len(right) / len(exercise.functions)
            results.append(Result(exercise.number, exercise.what, mark, escaped(words),
                                  exercise.level, time.monotonic() - begin, share=share))
            yield results[-1]
        if is_whole:
            begin = time.monotonic()
            mark, words = in_any_case(grade_whole, exercises, file, results, limit)
            alike = [r.number for r in results if r.mark == WRONG and r.words == escaped(words)]
            words = f"as {alike[0]}" if alike else words
            yield Result(short(chapter), WHOLE, mark, escaped(words), 1,
                         time.monotonic() - begin, 0, share=mark == RIGHT)


def of_all(chapter, exercises, is_whole, mark, why):
    """The one Result of a chapter of which nothing is tried."""
    from lab.classroom.exercises import short

    one = exercises[0]
    what = (one.number, one.what) if len(exercises) == 1 else (short(chapter), "all of it")
    points = sum(exercise.level for exercise in exercises) + is_whole
    return Result(*what, mark, escaped(why), points, 0, len(exercises))


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
    nodes = {name: holes.find(file.tree, name) for name in exercise.functions}
    for name in nodes:
        fault = file.faults.get(name) or file.faults.get(name.split(".")[0])
        if fault:
            return WRONG, fault
        if nodes[name] is None:
            return WRONG, f"there is no {name} in {file.chapter}.py"
    if all(map(holes.is_hole, nodes.values())):
        return OPEN, "not begun"
    mark, words = try_functions(exercise, file, limit)
    holed = [name for name, node in nodes.items() if holes.is_hole(node, or_pass=False)]
    if holed and words:                                 # none: another function does its work
        return OPEN, f"not begun: {', '.join(holed)}"
    return mark, words


def right_alone(exercise, file, limit):
    """Of an exercise's several functions, those that are right beside the solution's others."""
    if len(exercise.functions) == 1 or checks.stored() is not None:
        return []
    return [name for name in exercise.functions if in_any_case(
        grade_exercise, exercise._replace(names=name), file, limit)[0] == RIGHT]


def try_functions(exercise, file, limit):
    """The mark of a student's functions, in the solution; or, where there is none, in his file."""
    from lab.classroom.exercises import EXERCISES, solution

    if checks.stored() is not None:
        values = [check for check in exercise.checks if not checks.is_run(check)]
        return run(file, file.text, values, limit, lambda line: line)
    asked = {name for other in EXERCISES[file.chapter] for name in other.functions}
    names = [*exercise.functions,
             *holes.own_methods(solution(file.chapter), file.tree, exercise.functions, asked)]
    graft = holes.graft(solution(file.chapter), file.text, names)
    return run(file, graft.source, exercise.checks, limit, graft.line_of_student)


def grade_whole(exercises, file, results, limit):
    """The student's chapter as it is: its runs, and the values of what is not right alone, since
    functions may have been changed together."""
    not_begun = [result.number for result in results if result.mark == OPEN]
    if file.faults:
        return WRONG, next(iter(file.faults.values()))
    if not_begun:
        part = f": {', '.join(not_begun)}" if len(not_begun) < len(results) else ""
        return OPEN, f"not begun{part}"
    wrong = [result.number for result in results if result.mark == WRONG]
    every = [(exercise.number, check) for exercise in exercises for check in exercise.checks]
    runs = [check for _, check in every if checks.is_run(check)]
    values = [check for number, check in every if number in wrong or not runs]
    distinct = {repr(check): check for check in (*runs, *values)}.values()
    return run(file, file.text, distinct, limit, lambda line: line)


def run(file, source, these, limit, line_of_student):
    """The mark of a source by these checks, up to the first that fails. At home, what a check calls
    may be another hole: the others decide."""
    from lab.classroom.exercises import solution

    passed, waits_for = 0, ""
    for check in these:
        outcome = checks.outcome(file.chapter, source, solution(file.chapter), check, file.folder,
                                 limit)
        hole = hole_of(outcome) if checks.stored() is not None else ""
        if not outcome.right and not hole:
            return WRONG, "; ".join(in_words(outcome, source, line_of_student))
        passed, waits_for = passed + outcome.right, hole or waits_for
    if waits_for and not passed:
        return OPEN, f"to be tried here, it needs {waits_for}"
    return RIGHT, f"as far as it can be tried without {waits_for}" if waits_for else ""


def hole_of(outcome):
    """The hole that a check has come to, "04.3: vocabulary_loss"; "": it has come to none."""
    for error, _ in outcome.errors.values():
        found = re.fullmatch(r"NotImplementedError: (\w+\.\d+: [\w.]+)", error)
        if found:
            return found[1]
    return ""


def escaped(words):
    """In one line, whatever is in a student's text."""
    return one_line(" ".join(words.split()))
