"""The grades of students, for a teacher, a spreadsheet and Gradescope."""

import csv
import io
import json
import textwrap
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab.classroom.grading import OPEN, RIGHT, WHOLE, WRONG
from lab.run.refusals import one_line

WIDTH = 100
NOT_SUBMITTED = "not submitted"
STATUS = {RIGHT: "right", WRONG: "wrong", OPEN: "not begun"}
FORMULA = "=+-@＝＋－＠"        # with one of these, a spreadsheet's formula begins


class Student(NamedTuple):
    name: str               # in one line, whatever bytes the folder's name has
    results: list

    @property
    def score(self):
        return round(sum(result.score for result in self.results), 2)

    @property
    def points(self):
        """That can be had."""
        return sum(result.points for result in self.results)


# --------------------------------------------------------------------------------- on the terminal

def lines_of(result, columns):
    """A line, and those that go on with it."""
    number, what = columns
    head = f"{result.number:{number}}  {result.what:{what}}  {result.mark}  "
    words = result.words
    if 0 < result.score < result.points:
        words = f"{result.score:g} of {result.points} points; {words}"
    text = textwrap.wrap(words, WIDTH - len(head), break_long_words=False) or [""]
    return [f"{head}{text[0]}".rstrip(), *(" " * len(head) + line for line in text[1:])]


def columns_of(exercises):
    """Of a chapter: wide enough for each line."""
    return (max(len(exercise.number) for exercise in exercises),
            max(len(what) for what in (WHOLE, *(exercise.what for exercise in exercises))))


def summary(student):
    results = student.results
    counts = {mark: sum(r.exercises for r in results if r.mark == mark)
              for mark in (RIGHT, WRONG, OPEN)}
    return (f"{counts[RIGHT]} of {sum(counts.values())} right, {counts[WRONG]} wrong, "
            f"{counts[OPEN]} not begun; {student.score:g} of {student.points} points; "
            f"{sum(r.seconds for r in results):.0f} s")


# ------------------------------------------------------------------------------------- predictions

def predictions(text):
    """An argparse type: of a JSON file with a list of objects, {"student": "ada", "chapter": "04",
    "right": 4, "of": 5}: {(student, chapter): (right, of)}, summed over what else they say. Large
    letters in a name are no other name."""
    found = {}
    try:
        if not Path(text).is_file():                    # to open a pipe would take for ever
            raise ValueError
        for entry in json.loads(Path(text).read_text(encoding="utf-8")):
            key = one_line(entry["student"]).casefold(), entry["chapter"]
            right, count = found.get(key, (0, 0))
            if not 0 <= entry["right"] <= entry["of"] <= 1000:
                raise ValueError
            found[key] = right + entry["right"], count + entry["of"]
        if not found:
            raise ValueError
        return found
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise Refused(f"{text!r} is no JSON of marked predictions") from None


# ------------------------------------------------------------------------------------------- files

def as_csv(students, chosen, predicted=None):
    """A line for each student, after one of names; a column for each exercise and whole chapter
    that was graded, with its points. chosen: {chapter: exercises}."""
    from lab.classroom.exercises import EXERCISES, short

    columns = {}                                        # {(chapter's number, exercise's): its name}
    for chapter, exercises in chosen.items():
        number = short(chapter)
        columns |= {(number, one.number): f"{one.number} {one.what}" for one in exercises}
        if len(exercises) == len(EXERCISES[chapter]):
            columns[number, number] = f"{number} {WHOLE}"
    chapters = list(dict.fromkeys(number for number, _ in columns))
    predicted_in = [number for number in chapters
                    if any(chapter == number for _, chapter in predicted or ())]
    head = ["student", *columns.values(), "total", "of",
            *(f"{number} predicted" for number in predicted_in)]
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(head)
    for student in students:
        found = {result.number: result for result in student.results}
        cells = [cell(found, *numbers) for numbers in columns]
        name = student.name.casefold()
        shares = [share(predicted.get((name, number))) for number in predicted_in]
        write([safe(student.name), *cells, f"{student.score:g}", student.points, *shares])
    return file.getvalue()


def cell(found, chapter, number):
    """The points of an exercise. found: {number: Result}; a file that cannot be graded has one for
    all of its exercises."""
    result = found.get(number) or next(
        one for one in found.values() if one.number.partition(".")[0] == chapter)
    if number == chapter and result.exercises:
        result = result._replace(share=0)
    return NOT_SUBMITTED if result.words == NOT_SUBMITTED else f"{result.score:g}"


def share(prediction):
    return "" if not prediction or not prediction[1] else round(prediction[0] / prediction[1], 2)


def safe(name):
    """A text that no spreadsheet takes for a formula."""
    return f"'{name}" if name.lstrip()[:1] in tuple(FORMULA) else name


def as_json(students):
    """Of one student what Gradescope's autograder reads, results.json; of a class each student's
    total and exercises."""
    if len(students) == 1:
        [student] = students
        tests = [{"name": f"{r.number} {r.what}", "score": r.score, "max_score": r.points,
                  "status": "passed" if r.mark == RIGHT else "failed",
                  "output": r.words or "right", "visibility": "visible"} for r in student.results]
        found = {"output": summary(student), "tests": tests}
    else:
        found = {"students": [
            {"student": student.name, "total": student.score, "of": student.points, "exercises": [
                 {"number": r.number, "what": r.what, "score": r.score, "of": r.points,
                  "status": NOT_SUBMITTED if r.words == NOT_SUBMITTED else STATUS[r.mark],
                  "words": r.words} for r in student.results]} for student in students]}
    return json.dumps(found, indent=1) + "\n"
