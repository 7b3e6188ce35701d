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
FORMULA = tuple("=+-@＝＋－＠")     # with one of these, a spreadsheet's formula begins


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
    return textwrap.wrap(result.words, WIDTH, initial_indent=head, break_long_words=False,
                         subsequent_indent=" " * len(head)) or [head.rstrip()]


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
            columns[number, WHOLE] = f"{number} {WHOLE}"
    file = io.StringIO()
    write = csv.writer(file, lineterminator="\n").writerow
    write(["student", *columns.values(), "total", "of"])
    for student in students:
        cells = [cell(student, *column) for column in columns]
        write([safe(student.name), *cells, student.score, student.points])
    return file.getvalue()


def cell(student, chapter, column):
    """The points of an exercise. A file that cannot be graded has one Result for all of them."""
    results = [one for one in student.results if one.number.partition(".")[0] == chapter]
    if results[0].words == NOT_SUBMITTED:
        return NOT_SUBMITTED
    return sum(one.score for one in results if column in (one.number, one.what))


def safe(name):
    """A text that no spreadsheet takes for a formula."""
    return f"'{name}" if name.lstrip().startswith(FORMULA) else name


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
