"""Grade exercises: each of a student's functions alone, and then the whole chapter.

    python -m lab.grade exercises               all of them
    python -m lab.grade exercises 04 05.2       a chapter, and one exercise
    python -m lab.grade class 04                a folder of students' folders
    python -m lab.grade --similar class 04      which students' functions are alike
    python -m lab.grade class 04 --csv grades.csv --due 2026-11-30T23:59

Each function is put into the solution, alone, and the chapter runs on as many ranks as its exercise
says. It must match one GPU and its formulas. So one mistake does not sink the other functions. The
exit status is 0 if all that was asked for is right, 1 if not, 2 for a bad argument. A second
grading plays only what has changed (lab/classroom/kept.py).

A student's code runs with the rights of whoever calls this: a grader belongs into a container. What
a student's process says of itself is not believed, as far as trusted.py can know better.
"""

import contextlib
import datetime
import functools
import os
import sys
import warnings
from pathlib import Path

from lab.classroom import checks, gradebook, sandbox, similar
from lab.classroom.grading import RIGHT, grade
from lab.classroom.kept import Kept
from lab.classroom.side_by_side import END, Progress, in_turn
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
    add("--secret", metavar="TEXT", default=str(datetime.date.today()),
        help="draws each run's second configuration; default: today's date")
    add("--jobs", type=commands.number(int, 1, 1001, 2), default=os.cpu_count(),
        help="students graded side by side; default: as many as the machine has cores")
    add("--fresh", action="store_true", help="play all, be it known from the last time")
    add("--due", type=gradebook.due_date, metavar="DATE",
        help="say by how much a student's newest file is later; local time, if it has no zone")
    add("--predictions", type=gradebook.predictions, metavar="FILE",
        help="marked ones, in JSON: a column of --csv for each chapter")
    add("--sandbox", action="store_true",
        help="students' code in a sandbox of Linux (lab/classroom/sandbox.py)")
    add("--similar", action="store_true",
        help="grade nothing: name students whose functions are alike (lab/classroom/similar.py)")
    add("--csv", type=commands.output("grades.csv"), help="write a line for each student")
    add("--json", type=commands.output("results.json"),
        help="write what Gradescope reads; of a class, a list of students")
    add("--junit", type=commands.output("results.xml"), help="write JUnit's XML")
    args = parser.parse_args(argv)
    if not args.folder:
        what = "is missing" if args.folder is None else "'' is no name"
        raise Refused(f"FOLDER {what}; `make exercises` writes exercises/, which would work")
    if args.predictions is not None and not args.csv:
        raise Refused("--predictions means nothing without --csv", "--csv grades.csv")
    for flag in ("sandbox", "fresh", "due", "csv", "json", "junit") if args.similar else ():
        if getattr(args, flag):
            raise Refused(f"--{flag} means nothing beside --similar", f"without --{flag}")
    if args.sandbox and (why := sandbox.why_not()):
        raise Refused(f"--sandbox: {why}; the container of container/README.md would work")
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
    if args.similar:
        print(*similar.report(args.students, args.chosen), sep="\n")
        return 0
    sandbox.REQUIRED = args.sandbox
    kept = Kept(args.folder, checks.OUTCOMES)
    if not args.fresh:
        kept.load()
    students = grade_all(args, kept)
    for path, write in ((args.json, gradebook.as_json), (args.junit, gradebook.as_junit),
                        (args.csv, functools.partial(gradebook.as_csv, chosen=args.chosen,
                                                     due=args.due, predicted=args.predictions))):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write(students), encoding="utf-8")
    every = [result for student in students for result in student.results]
    return 0 if all(result.mark == RIGHT for result in every) else 1


def grade_all(args, kept):
    """The Students, in the order of their names, each printed as soon as those before are."""
    from lab.classroom.exercises import EXERCISES, short
    from lab.cli.refusals import one_line

    known, students, results = len(kept.outcomes), [], []
    columns = {short(chapter): gradebook.columns_of(found)
               for chapter, found in args.chosen.items()}
    tasks = {name: functools.partial(grade, folder, args.chosen, args.limit, args.secret)
             for name, folder in args.students.items()}
    count = sum(len(found) + (len(found) == len(EXERCISES[chapter]))
                for chapter, found in args.chosen.items())
    progress = Progress(len(tasks), count, sys.stderr)
    graded = in_turn(tasks, min(args.jobs, len(tasks)), progress.tell)
    with warnings.catch_warnings(), contextlib.closing(graded):
        warnings.simplefilter("ignore")                 # of a "\d" in a string: no thread can alone
        for name, result in graded:
            progress.clear()
            if not results and len(tasks) > 1:
                print(one_line(name), flush=True)
            if result is END:
                late = gradebook.lateness(args.students[name], args.chosen, args.due)
                students.append(gradebook.Student(one_line(name), results, late))
                print(f"{gradebook.summary(students[-1])}\n", flush=True)
                results = []
                kept.save()
            else:
                results.append(result)
                lines = gradebook.lines_of(result, columns[result.number.partition(".")[0]])
                print(*lines, sep="\n", flush=True)
            progress.show()
        progress.clear()
    if known:
        print(f"{len(kept.outcomes) - known} checks were played; what has not changed since the "
              "last time was not (--fresh plays all)")
    return students
