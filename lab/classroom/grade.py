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

import ast
import json
import os
import re
import shlex
import sys
import textwrap
import time
import tokenize
import warnings
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import NamedTuple

from lab.classroom import checks, holes

# Not what imports torch: see lab/classroom/checks.py.

RIGHT, WRONG, OPEN = "✓", "✗", "·"
WIDTH = 100
WHOLE = "the whole chapter"
LARGEST = 10**6         # bytes of a student's file


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


# ------------------------------------------------------------------------------- the student's file

class Unreadable(Exception):
    """Why a file cannot be graded, in a few words; and the SyntaxError, if it is one."""


class File(NamedTuple):
    """A student's file. text: without the functions that are no Python. faults: {their names: what
    is wrong}."""
    chapter: str
    folder: Path
    text: str
    tree: ast.Module
    faults: dict


def read(folder, chapter):
    path = folder / f"{chapter}.py"
    try:
        if not path.exists():
            raise Unreadable("is not there")
        if not path.is_file():                          # to open a pipe would take for ever
            raise Unreadable("is no file")
        if path.stat().st_size > LARGEST:
            raise Unreadable(f"is larger than {LARGEST:,} bytes")
        with tokenize.open(path) as file:
            text = file.read()
    except (SyntaxError, UnicodeDecodeError, LookupError):      # the last: of `# coding: rot13`
        raise Unreadable("is no text in UTF-8") from None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    return File(chapter, folder, *without_faults(text))


def parse(text):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")             # of a "\d" in a string, say
            tree = ast.parse(text)
            compile(tree, "", "exec", dont_inherit=True)        # it finds more
            return tree
    except SyntaxError as error:
        raise Unreadable(f"line {error.lineno}: {error.msg}", error) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"cannot be parsed: {error}") from None


def without_faults(text):
    """The text without the functions that are no Python, its tree, and {their names: what is
    wrong}. Raises Unreadable where more is wrong than functions."""
    lines, faults = text.split("\n"), {}
    while True:
        text = "\n".join(lines)
        try:
            return text, parse(text), faults
        except Unreadable as why:
            message, *errors = why.args
            where = [re.search(r" on line (\d+)", error.msg) for error in errors]
            line = int(where[0][1]) if any(where) else errors[0].lineno if errors else None
            name, first, last = function_around(lines, line)
            if name is None or name in faults:
                raise Unreadable(next(iter(faults.values()), message)) from None
            indent = re.match(r"\s*", lines[first - 1])[0]
            lines[first - 1 : last] = [f"{indent}pass"] + [""] * (last - first)
            faults[name] = message


def function_around(lines, line):
    """The name, first and last line of the method, function or class in which a line is, by the
    looks of it, since it cannot be parsed. Nones: there is none."""
    outer, name = definition_above(lines, line, "")
    if not outer:
        return None, None, None
    found = [(name, outer)]
    if lines[outer - 1].startswith("class"):
        indents = [re.match(r"(\s+)def ", text) for text in lines[outer:line]]
        indent = next((match[1] for match in indents if match), None)
        method, its_name = definition_above(lines, line, indent) if indent else (None, None)
        if method:
            found.insert(0, (f"{name}.{its_name}", method))
    for name, first in found:
        indent = re.match(r"\s*", lines[first - 1])[0]
        after = (number for number in range(first, len(lines))
                 if re.match(rf"\s{{0,{len(indent)}}}[^\s)\]}}#]", lines[number]))
        last = next(after, len(lines))
        if line <= last:
            while first > 1 and lines[first - 2].startswith(f"{indent}@"):
                first -= 1
            return name, first, last
    return None, None, None


def definition_above(lines, line, indent):
    """The number of the last line up to this one that begins a definition, so far indented, and its
    name. Nones: there is none."""
    for number in range(line or 0, 0, -1):
        match = re.match(rf"{indent}(?:def|class)\s+(\w+)", lines[number - 1])
        if match:
            return number, match[1]
    return None, None


# ------------------------------------------------------------------------------------------ grading

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
    runs = [check for check in distinct if hasattr(check, "ranks")]
    return run(file, file.text, runs or distinct, limit, lambda line: line)


def run(file, source, these, limit, line_of_student):
    """The mark of a source by these checks, up to the first that fails."""
    from lab.classroom.exercises import solution

    for check in these:
        outcome = checks.outcome(file.chapter, source, solution(file.chapter), check, file.folder,
                                 limit)
        if not outcome.right:
            return WRONG, "; ".join(checks.in_words(outcome, source, line_of_student))
    return RIGHT, ""


def escaped(words):
    """In one line, whatever is in a student's text."""
    from lab.cli.refusals import one_line

    return one_line(" ".join(words.split()))


# --------------------------------------------------------------------------------------- the report

def lines_of(result, columns):
    """A line, and those that go on with it."""
    number, what = columns
    head = f"{result.number:{number}}  {result.what:{what}}  {result.mark}  "
    text = textwrap.wrap(result.words, WIDTH - len(head), break_long_words=False) or [""]
    return [f"{head}{text[0]}".rstrip(), *(" " * len(head) + line for line in text[1:])]


def summary(results, seconds):
    counts = {mark: sum(r.exercises for r in results if r.mark == mark)
              for mark in (RIGHT, WRONG, OPEN)}
    points, most = sum(r.score for r in results), sum(r.points for r in results)
    return (f"{counts[RIGHT]} of {sum(counts.values())} right, {counts[WRONG]} wrong, "
            f"{counts[OPEN]} not begun; {points} of {most} points; {seconds:.0f} s")


def as_json(students):
    """What Gradescope's autograder reads: results.json."""
    from lab.cli.refusals import one_line

    tests = []
    for student, results in students.items():
        student = one_line(student)                     # a folder's name may be any bytes
        for r in results:
            name = f"{r.number} {r.what}"
            tests.append({"name": f"{student}: {name}" if len(students) > 1 else name,
                          "score": r.score, "max_score": r.points,
                          "status": "passed" if r.mark == RIGHT else "failed",
                          "output": r.words or "right", "visibility": "visible"})
    every = [r for results in students.values() for r in results]
    results = {"output": summary(every, sum(r.seconds for r in every)), "tests": tests}
    return json.dumps(results, indent=1) + "\n"


def as_junit(students):
    """JUnit's XML, which GitLab, Jenkins and others show: a suite for each student."""
    from lab.cli.refusals import one_line

    root = xml.Element("testsuites")
    for student, results in students.items():
        student = one_line(student)                     # XML has no word for a control character
        marks = [r.mark for r in results]
        suite = xml.SubElement(root, "testsuite", name=student, tests=str(len(results)),
                               failures=str(marks.count(WRONG)), skipped=str(marks.count(OPEN)),
                               time=f"{sum(r.seconds for r in results):.3f}")
        for r in results:
            case = xml.SubElement(suite, "testcase", classname=student,
                                  name=f"{r.number} {r.what}", time=f"{r.seconds:.3f}")
            if r.mark != RIGHT:
                xml.SubElement(case, "failure" if r.mark == WRONG else "skipped", message=r.words)
    xml.indent(root)
    return xml.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


# --------------------------------------------------------------------------------- the command line

def students_in(folder):
    """{name: folder} of the students: of one whose chapters lie in the folder, or of all that have
    a folder in it. Raises Refused if there are none."""
    from common import Refused
    from lab.classroom.exercises import EXERCISES

    has_chapters = lambda path: any(os.path.exists(path / f"{chapter}.py") for chapter in EXERCISES)
    writes = f"`python -m lab.exercises --write {shlex.quote(str(folder))}` writes them there"
    try:
        folders = {path.name: where_chapters_lie(path) for path in sorted(folder.iterdir())
                   if os.path.isdir(path) and not path.name.startswith(".")}
    except FileNotFoundError:
        raise Refused(f"FOLDER {str(folder)!r} is not there; {writes}") from None
    except OSError as error:
        beside = folder.parent
        works = str(beside) if has_chapters(where_chapters_lie(beside)) else "exercises/"
        raise Refused(f"FOLDER {str(folder)!r}: {error.strerror}; {works} would work" + (
                      ", after `make exercises`" * (works == "exercises/"))) from None
    if has_chapters(where_chapters_lie(folder)):
        return {folder.resolve().name: where_chapters_lie(folder)}
    if not any(map(has_chapters, folders.values())):
        raise Refused(f"FOLDER {str(folder)!r} has no exercise such as 04_tensor_parallel.py, nor "
                      f"has a folder in it; {writes}")
    return folders


def where_chapters_lie(folder):
    """Of a student. Where the folder is a copy of the course, its own chapters are the solution."""
    is_course = os.path.exists(folder / "lab" / "exercises.py")
    return folder / "exercises" if is_course or os.path.isdir(folder / "exercises") else folder


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
