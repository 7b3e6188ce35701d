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

import contextlib
import functools
import multiprocessing
import os
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import Refused
from lab.classroom import checks, exercises, gradebook
from lab.classroom.grading import RIGHT, grade
from lab.classroom.students import students_in
from lab.run import commands, refusals


def arguments(argv):
    parser = commands.Parser("-m lab.grade", description=__doc__)
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?",
        help="exercises/, a copy of the course, or a folder of such")
    add("exercise", nargs="*", default=[], metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--level", type=int, choices=(1, 2, 3), help="exercises of this level alone")
    add("--limit", type=commands.number(int, 1, 101, checks.LIMIT), default=checks.LIMIT,
        help=f"seconds of computing, of a run; default: {checks.LIMIT}")
    add("--jobs", type=commands.number(int, 1, 1001, 2), default=os.cpu_count(),
        help="students graded side by side; default: as many as the machine has cores")
    add("--predictions", type=gradebook.predictions, metavar="FILE",
        help="marked ones, in JSON: a column of --csv for each chapter")
    add("--csv", type=commands.output("grades.csv"), help="write a line for each student")
    add("--json", type=commands.output("results.json"),
        help="write what Gradescope reads; of a class, a list of students")
    args = parser.parse_args(argv)
    if not args.folder:
        what = "is missing" if args.folder is None else "'' is no name"
        raise Refused(f"FOLDER {what}; `make exercises` writes exercises/, which would work")
    if args.predictions is not None and not args.csv:
        raise Refused("--predictions means nothing without --csv", "--csv grades.csv")
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
    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    students = grade_all(args)
    as_csv = functools.partial(gradebook.as_csv, chosen=args.chosen, predicted=args.predictions)
    for path, write in ((args.json, gradebook.as_json), (args.csv, as_csv)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write(students), encoding="utf-8")
    every = [result for student in students for result in student.results]
    return 0 if all(result.mark == RIGHT for result in every) else 1


def grade_all(args):
    """The Students, in the order of their names, each printed once those before are."""
    columns = {exercises.short(chapter): gradebook.columns_of(found)
               for chapter, found in args.chosen.items()}
    students, is_class = [], len(args.students) > 1
    tasks = [functools.partial(grade, folder, args.chosen, args.limit)
             for folder in args.students.values()]
    graded = side_by_side(tasks, args.jobs) if is_class else (task() for task in tasks)
    with warnings.catch_warnings(), contextlib.closing(graded):
        warnings.simplefilter("ignore")                 # of a "\d" in a string: no thread can alone
        for name, results in zip(args.students, graded, strict=True):
            if is_class:
                print(refusals.one_line(name))
            student = gradebook.Student(refusals.one_line(name), [])
            for result in results:                      # one student's as soon as they are there
                student.results.append(result)
                lines = gradebook.lines_of(result, columns[result.number.partition(".")[0]])
                print(*lines, sep="\n", flush=True)
            students.append(student)
            print(f"{gradebook.summary(student)}\n", flush=True)
    return students


def side_by_side(tasks, jobs):
    """Yield a list of what each task gives, in their order. So many go on at once, each in a thread
    that waits for processes of its own. Whatever ends this, a signal say, ends those first."""
    is_ending, others = threading.Event(), {*multiprocessing.active_children()}

    def work(task):
        results = []
        for result in task():
            if is_ending.is_set():
                break
            results.append(result)
        return results

    pool = ThreadPoolExecutor(jobs)
    futures = [pool.submit(work, task) for task in tasks]
    try:
        for future in futures:
            yield future.result()
    finally:
        is_ending.set()
        pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in futures):
            for process in {*multiprocessing.active_children()} - others:
                process.terminate()                     # an overseer ends all below it first
            time.sleep(0.02)
