"""Grade exercises: each of a student's functions alone, and then the whole chapter.

    python -m lab.grade exercises               all of them
    python -m lab.grade exercises 04 05.2       a chapter, and one exercise
    python -m lab.grade class 04                a folder of students' folders
    python -m lab.grade class 04 --csv grades.csv

Each function is put into the solution, alone, and the chapter runs on as many ranks as its exercise
says. It must match one GPU and its formulas. So one mistake does not sink the other functions. The
exit status is 0 if all that was asked for is right, 1 if not, 2 for a bad argument.

A student's code runs with the rights of whoever calls this, so run it in a container
(pages/teacher/grading.md).
"""

import sys
import warnings
from pathlib import Path

from lab.classroom import checks
from lab.run import commands, refusals

if __name__ == "__main__":
    checks.warm_up()                    # another interpreter imports torch while this one does

from common import Refused  # noqa: E402
from lab.classroom import exercises, gradebook, grading, students  # noqa: E402


def parse(argv):
    parser = commands.Parser("-m lab.grade", description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?",
        help="exercises/, a copy of the course, or a folder of such")
    add("exercise", nargs="*", default=[], metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--level", type=int, choices=exercises.LEVELS, help="only exercises of this level")
    add("--limit", type=commands.number(int, 1, 101, checks.LIMIT), default=checks.LIMIT,
        help=f"seconds of computing, of a run; default: {checks.LIMIT}")
    add("--csv", type=commands.output("grades.csv"), help="write a line for each student")
    add("--json", type=commands.output("results.json"),
        help="write what Gradescope reads; of a class, one such object for each student")
    args = parser.parse_args(argv)
    if not args.folder:
        what = "is missing" if args.folder is None else "'' is no name"
        raise Refused(f"FOLDER {what}; `make exercises` writes exercises/, which would work")
    args.students = students.students_in(Path(args.folder))
    args.chosen = exercises.chosen(args.exercise, args.level)
    return args


def main(argv=None):
    checks.warm_up()
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")                 # of a "\d" in a student's string, say
        graded = grade_all(args)
    if args.json:
        write(args.json, gradebook.as_json(graded))
    if args.csv:
        write(args.csv, gradebook.as_csv(graded, args.chosen))
    every = [result for student in graded for result in student.results]
    return 0 if all(result.mark == grading.RIGHT for result in every) else 1


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def grade_all(args):
    """The Students, in the order of their names. Each result is printed as soon as it is there."""
    columns = {exercises.short(chapter): gradebook.columns_of(these)
               for chapter, these in args.chosen.items()}
    graded = []
    for name, folder in args.students.items():
        student = gradebook.Student(refusals.one_line(name), [])
        if len(args.students) > 1:
            print(student.name)
        for result in grading.grade(folder, args.chosen, args.limit):
            student.results.append(result)
            lines = gradebook.lines_of(result, columns[result.number.partition(".")[0]])
            print(*lines, sep="\n", flush=True)
        graded.append(student)
        print(f"{gradebook.summary(student)}\n", flush=True)
    return graded


if __name__ == "__main__":
    commands.program(main)
