"""Grades a student's functions, each beside the solution's others, and then the chapter as it is.

A bundle, which students have at home, has no solutions. There values are compared with stored ones,
functions are tried where they are, and the whole chapter is run.
"""

import re
import time
from typing import NamedTuple

from lab.classroom import checks, holes
from lab.classroom import exercises as table
from lab.classroom.exercises import short, solution
from lab.classroom.students import NotThere, Unreadable, read
from lab.classroom.words import in_words
from lab.run.refusals import one_line

RIGHT, WRONG, OPEN = "✓", "✗", "·"
WHOLE = "the whole chapter"


class Result(NamedTuple):
    """What the grader has found of one exercise, or of a chapter."""
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
    for chapter, exercises in chosen.items():
        is_whole = len(exercises) == len(table.EXERCISES[chapter])
        file, mark, why = file_of(folder, chapter)
        if file is None:
            yield result_of_all(chapter, exercises, is_whole, mark, why)
            continue
        results = []
        for exercise in exercises:
            begin = time.monotonic()
            mark, words = in_any_case(grade_exercise, exercise, file, limit)
            results.append(Result(exercise.number, exercise.what, mark, words, exercise.level,
                                  time.monotonic() - begin))
            yield results[-1]
        if is_whole:
            begin = time.monotonic()
            mark, words = in_any_case(grade_whole, exercises, file, results, limit)
            yield Result(short(chapter), WHOLE, mark, words, 1, time.monotonic() - begin, 0)


def file_of(folder, chapter):
    """(the File that is graded, "", ""); or (None, the mark, and why there is none)."""
    try:
        file = read(folder, chapter)
    except NotThere:
        return None, OPEN, "not submitted"
    except Unreadable as error:
        return None, WRONG, f"{chapter}.py {error}"
    except Exception as error:                          # of what nobody has thought of, too
        return None, WRONG, f"{chapter}.py {cannot(error)}"
    if chapter.startswith("kernels/") and not checks.has_triton():
        return None, OPEN, "not tried: Triton, which runs kernels, is not here"
    return file, "", ""


def result_of_all(chapter, exercises, is_whole, mark, why):
    """The one Result of a chapter of which nothing is tried."""
    one = exercises[0]
    number, what = short(chapter), "all of it"
    if len(exercises) == 1:
        number, what = one.number, one.what
    points = sum(exercise.level for exercise in exercises) + is_whole
    return Result(number, what, mark, escaped(why), points, 0, len(exercises))


def in_any_case(function, *args):
    """The mark and words that a function gives. A student's file on which the grader itself fails
    is not right, and the next student's is graded."""
    try:
        mark, words = function(*args)
        return mark, escaped(words)
    except Exception as error:
        return WRONG, escaped(cannot(error))


def cannot(error):
    return f"cannot be graded: {type(error).__name__}: {error}"


def grade_exercise(exercise, file, limit=checks.LIMIT):
    """The mark of a student's functions, and why."""
    nodes = {name: holes.find(file.tree, name) for name in exercise.functions}
    for name, node in nodes.items():
        if node is None:
            return WRONG, f"there is no {name} in {file.chapter}.py"
    if all(map(holes.is_hole, nodes.values())):
        return OPEN, "not begun"
    mark, words = try_functions(exercise, file, limit)
    holed = [name for name, node in nodes.items() if holes.is_hole(node, or_pass=False)]
    if holed and words:                                 # none: another function does its work
        return OPEN, f"not begun: {', '.join(holed)}"
    return mark, words


def try_functions(exercise, file, limit):
    """The mark of a student's functions, beside the solution's others; or, where there is no
    solution, in his file as it is."""
    if checks.stored() is not None:
        values = [check for check in exercise.checks if not checks.is_run(check)]
        return try_checks(file, file.text, values, limit, lambda line: line)
    own = solution(file.chapter)
    others = [name for other in table.EXERCISES[file.chapter] for name in other.functions]
    others += [name for name, node in holes.functions(file.tree)
               if holes.is_hole(node, or_pass=False) and holes.find(holes.parsed(own), name)]
    pasted = holes.paste(file.text, own, {*others} - {*exercise.functions})
    return try_checks(file, pasted.source, exercise.checks, limit, pasted.line_before)


def grade_whole(exercises, file, results, limit):
    """The student's chapter as it is: its runs, and the values of what is not right alone, since
    functions may have been changed together."""
    not_begun = [result.number for result in results if result.mark == OPEN]
    if len(not_begun) == len(results):
        return OPEN, "not begun"
    if not_begun:
        return OPEN, f"not begun: {', '.join(not_begun)}"
    wrong = {result.number: result.words for result in results if result.mark == WRONG}
    every = [(exercise.number, check) for exercise in exercises for check in exercise.checks]
    runs = [check for _, check in every if checks.is_run(check)]
    values = [check for number, check in every if number in wrong or not runs]
    distinct = {repr(check): check for check in (*runs, *values)}.values()
    mark, words = try_checks(file, file.text, distinct, limit, lambda line: line)
    for number, others in wrong.items():
        if others == escaped(words):
            return mark, f"as {number}"
    return mark, words


def try_checks(file, source, these, limit, line_of_student):
    """The mark of a source by these checks, up to the first that fails. At home, what a check calls
    may be another hole: the others decide."""
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
        match = re.fullmatch(r"NotImplementedError: (\w+\.\d+: [\w.]+)", error)
        if match:
            return match[1]
    return ""


def escaped(words):
    """In one line, whatever is in a student's text."""
    return one_line(" ".join(words.split()))
