"""Grade exercises: each of a student's functions alone, and then the whole chapter.

    python -m lab.grade exercises               all of them
    python -m lab.grade exercises 04 05.2       a chapter, and one exercise
    python -m lab.grade class 04                a folder of students' folders

Each function is put into the solution, alone, and the chapter runs on as many ranks as its exercise
says. It must match one GPU and its formulas. So one mistake does not sink the other functions. The
exit status is 0 if all that was asked for is right, 1 if not, 2 for a bad argument.

A student's code runs with the rights of whoever calls this: a grader belongs into a container. What
a student's process says of itself is not believed, as far as trusted.py can know better.
"""

import sys
import time
from pathlib import Path

from lab.classroom import checks
from lab.classroom.gradebook import as_json, as_junit, lines_of, summary
from lab.classroom.grading import RIGHT, WHOLE, grade
from lab.classroom.students import students_in

# Not what imports torch: see lab/classroom/checks.py.


def arguments(argv):
    from common import Refused
    from lab.classroom import exercises
    from lab.cli import commands

    parser = commands.Parser("-m lab.grade", description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?",
        help="exercises/, a copy of the course, or a folder of such")
    add("exercise", nargs="*", default=[], metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--level", type=int, choices=(1, 2, 3), help="exercises of this level alone")
    add("--limit", type=commands.number(int, 1, 101, checks.LIMIT), default=checks.LIMIT,
        help=f"seconds of computing, of a run; default: {checks.LIMIT}")
    add("--json", type=commands.output("results.json"), help="write what Gradescope reads")
    add("--junit", type=commands.output("results.xml"), help="write JUnit's XML")
    args = parser.parse_args(argv)
    if not args.folder:
        what = "is missing" if args.folder is None else "'' is no name"
        raise Refused(f"FOLDER {what}; `make exercises` writes exercises/, which would work")
    args.students = students_in(Path(args.folder))
    chosen = exercises.chosen(args.exercise)
    args.chosen = {chapter: [e for e in found if args.level in (None, e.level)]
                   for chapter, found in chosen.items()}
    args.chosen = {chapter: found for chapter, found in args.chosen.items() if found}
    if not args.chosen:
        raise Refused(f"--level {args.level}: none of these exercises is of that level",
                      "without --level")
    return args


def main(argv=None):
    checks.warm_up()
    from lab.cli import refusals

    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    columns, students = {}, {}                          # of a chapter: wide enough for each line
    for found in args.chosen.values():
        widths = (max(len(exercise.number) for exercise in found),
                  max(len(what) for what in (WHOLE, *(exercise.what for exercise in found))))
        columns[found[0].number.partition(".")[0]] = widths
    for student, folder in args.students.items():
        if len(args.students) > 1:
            print(f"{refusals.one_line(student)}", flush=True)
        begin, students[student] = time.monotonic(), []
        for result in grade(folder, args.chosen, args.limit):
            students[student].append(result)
            print(*lines_of(result, columns[result.number.partition(".")[0]]), sep="\n", flush=True)
        print(f"{summary(students[student], time.monotonic() - begin)}\n", flush=True)

    for path, write in ((args.json, as_json), (args.junit, as_junit)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write(students), encoding="utf-8")
    every = [result for results in students.values() for result in results]
    return 0 if all(result.mark == RIGHT for result in every) else 1
