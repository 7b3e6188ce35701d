"""The grades of students, for a teacher, a spreadsheet and Gradescope."""

import csv
import io
import json
import textwrap
from typing import NamedTuple

from lab.classroom import exercises as table
from lab.classroom.exercises import short
from lab.classroom.grading import OPEN, RIGHT, WHOLE, WRONG

WIDTH = 100
NOT_SUBMITTED = "not submitted"
FORMULA = "=+-@＝＋－＠"        # with one of these, a spreadsheet's formula begins


class Student(NamedTuple):
    name: str               # in one line, whatever bytes the folder's name has
    results: list

    @property
    def score(self):
        return sum(result.score for result in self.results)

    @property
    def points(self):
        """That can be had."""
        return sum(result.points for result in self.results)


# --------------------------------------------------------------------------------- on the terminal

def lines_of(result, columns):
    """A line, and those that go on with it. columns: their widths."""
    number, what = columns
    head = f"{result.number:{number}}  {result.what:{what}}  {result.mark}  "
    text = textwrap.wrap(result.words, WIDTH - len(head), break_long_words=False) or [""]
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
            f"{counts[OPEN]} not begun; {student.score} of {student.points} points; "
            f"{sum(r.seconds for r in results):.0f} s")


# ------------------------------------------------------------------------------------------- files

def as_csv(students, chosen):
    """A line for each student, after one of names; a column for each exercise and whole chapter
    that was graded, with its points. chosen: {chapter: exercises}."""
    columns = {}                                        # {(chapter's number, exercise's): its name}
    for chapter, exercises in chosen.items():
        number = short(chapter)
        columns |= {(number, one.number): f"{one.number} {one.what}" for one in exercises}
        if len(exercises) == len(table.EXERCISES[chapter]):
            columns[number, number] = f"{number} {WHOLE}"
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(["student", *columns.values(), "total", "of"])
    for student in students:
        results = {result.number: result for result in student.results}
        cells = [cell(results, *numbers) for numbers in columns]
        write([safe(student.name), *cells, student.score, student.points])
    return file.getvalue()


def cell(results, chapter, number):
    """The points of an exercise. results: {number: Result}; a file that cannot be graded has one
    for all of its exercises."""
    result = results.get(number) or next(
        one for one in results.values() if one.number.partition(".")[0] == chapter)
    if result.words == NOT_SUBMITTED:
        return NOT_SUBMITTED
    is_of_all = number == chapter and result.exercises
    return 0 if is_of_all else result.score


def safe(name):
    """A text that no spreadsheet takes for a formula."""
    return f"'{name}" if name.lstrip()[:1] in tuple(FORMULA) else name


def as_json(students):
    """What Gradescope's autograder reads, results.json; of a class, {student: such an object}."""
    by_name = {student.name: {"output": summary(student), "tests": tests_of(student)}
               for student in students}
    data = by_name if len(students) > 1 else by_name[students[0].name]
    return json.dumps(data, indent=1) + "\n"


def tests_of(student):
    """His results, as Gradescope calls their parts."""
    return [{"name": f"{r.number} {r.what}", "score": r.score, "max_score": r.points,
             "status": "passed" if r.mark == RIGHT else "failed", "output": r.words or "right",
             "visibility": "visible"} for r in student.results]
