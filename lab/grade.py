"""Grade exercises: each of a student's functions alone, and then the whole chapter.

    python -m lab.grade exercises               all of them
    python -m lab.grade exercises 04 05.2       a chapter, and one exercise
    python -m lab.grade class                   a folder of students' folders

Each function is put into the solution, alone, and the chapter runs. It must match one GPU and its
formulas, so one mistake does not sink the others. A student's code runs with the rights of whoever
calls this: graders belong into a container.
"""

import argparse
import ast
import sys
import textwrap
import tokenize
import warnings
from pathlib import Path
from typing import NamedTuple

from lab import checks, holes

RIGHT, WRONG, OPEN = "✓", "✗", "·"
WIDTH = 100


class Result(NamedTuple):
    number: str
    what: str
    mark: str
    words: tuple = ()       # sentences
    points: int = 1


class Unreadable(Exception):
    """Of a student's file, in a few words."""


def read(path):
    """A student's file."""
    if not path.exists():
        raise Unreadable("is not there")
    if not path.is_file():
        raise Unreadable("is no file")
    try:
        with tokenize.open(path) as file:
            return file.read()
    except (SyntaxError, UnicodeDecodeError):
        raise Unreadable("is no text in UTF-8") from None
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None


def parse(text):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(f"line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise Unreadable(f"cannot be parsed: {error}") from None


def grade_exercise(exercise, chapter, text, folder, limit):
    """Its mark, and what is said."""
    from lab.exercises import solution

    tree = parse(text)
    nodes = {name: holes.find(tree, name) for name in exercise.functions}
    missing = [name for name, node in nodes.items() if node is None]
    if missing:
        return WRONG, [f"there is no {' and no '.join(missing)} in {chapter}.py"]
    empty = [name for name, node in nodes.items() if holes.is_hole(node)]
    if empty:
        part = "" if len(empty) == len(nodes) else f": {', '.join(empty)}"
        return OPEN, [f"not begun{part}"]
    graft = holes.graft(solution(chapter), text, exercise.functions)
    return run(chapter, graft.source, exercise.checks, folder, limit, graft.line_of_student)


def run(chapter, source, these, folder, limit, line_of_student):
    from lab.exercises import solution

    for check in these:
        outcome = checks.outcome(chapter, source, solution(chapter), check, folder, limit)
        if not outcome.right:
            return WRONG, checks.in_words(outcome, source, line_of_student)
    return RIGHT, []


def grade_whole(chapter, exercises, text, results, folder, limit):
    """The student's chapter as it is."""
    parse(text)
    not_begun = [result.number for result in results if result.mark == OPEN]
    if not_begun:
        return OPEN, [f"not begun: {', '.join(not_begun)}"]
    distinct = list(dict.fromkeys(check for exercise in exercises for check in exercise.checks))
    runs = [check for check in distinct if hasattr(check, "ranks")]
    return run(chapter, text, runs[:3] or distinct, folder, limit, lambda line: line)


def grade(folder, chosen, limit):
    """Yields the result of each exercise of a student, and of each whole chapter."""
    from lab.exercises import EXERCISES, short

    for chapter, exercises in chosen.items():
        results = []
        try:
            text = read(folder / f"{chapter}.py")
            fault = None
        except Unreadable as why:
            fault = why
        for exercise in exercises:
            try:
                if fault:
                    raise Unreadable(f"{chapter}.py {fault}")
                mark, words = grade_exercise(exercise, chapter, text, folder, limit)
            except Unreadable as why:
                mark, words = WRONG, [str(why)]
            results.append(Result(exercise.number, exercise.what, mark, tuple(words),
                                  exercise.level))
            yield results[-1]
        if fault is None and exercises and len(exercises) == len(EXERCISES[chapter]):
            try:
                mark, words = grade_whole(chapter, exercises, text, results, folder, limit)
            except Unreadable as why:
                mark, words = WRONG, [str(why)]
            yield Result(short(chapter), "the whole chapter", mark, tuple(words))


def lines_of(result, columns):
    """A line, and those that go on with it."""
    number, what = columns
    head = f"{result.number:{number}}  {result.what:{what}}  {result.mark}  "
    text = textwrap.wrap("; ".join(result.words), max(WIDTH - len(head), 40)) or [""]
    return [f"{head}{text[0]}".rstrip(), *(" " * len(head) + line for line in text[1:])]


def main(argv=None):
    checks.warm_up()
    from lab import cli, exercises, refusals

    def arguments(argv):
        parser = cli.Parser("-m lab.grade", description=__doc__,
                            formatter_class=argparse.RawDescriptionHelpFormatter)
        add = parser.add_argument
        add("folder", type=Path, metavar="FOLDER", help="with NN_name.py, or with such folders")
        add("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
        add("--limit", type=cli.number(int, 1, 600, 8), default=8,
            help="seconds of computing that a run may take")
        args = parser.parse_args(argv)
        args.chosen = exercises.chosen(args.exercise)
        return args

    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    these = [exercise for found in args.chosen.values() for exercise in found]
    columns = (max(len(exercise.number) for exercise in these),
               max(len("the whole chapter"), *(len(exercise.what) for exercise in these)))
    results = []
    for result in grade(args.folder, args.chosen, args.limit):
        results.append(result)
        print(*lines_of(result, columns), sep="\n", flush=True)
    return 0 if all(result.mark == RIGHT for result in results) else 1


if __name__ == "__main__":
    from lab import cli

    cli.program(main)
