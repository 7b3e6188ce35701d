"""The exercises: which functions of the chapters students write, and what checks them.

    python -m lab.exercises                     all of them, a line each
    python -m lab.exercises 04.2                one question
    python -m lab.exercises 04.2 --hint 1       and its first hint; --hint 2: both
    python -m lab.exercises --write exercises   the chapters, with holes in place of the functions
                                                (--level 1: only those of that level; --force: also
                                                over files that are there)

Levels: 1 is a line or two, 2 a page that one has to think about, 3 an evening.
"""

import itertools
import sys
import textwrap

from common import Refused
from lab.classroom import exercises
from lab.run import commands, refusals


def parse(argv):
    parser = commands.Parser("-m lab.exercises", description=__doc__)
    add = parser.add_argument
    add("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--hint", type=int, choices=(1, 2), help="how many hints to open")
    add("--write", type=commands.output("exercises"), metavar="FOLDER",
        help="write the chapters with holes")
    add("--level", type=int, choices=exercises.LEVELS, help="only exercises of this level")
    add("--force", action="store_true", help="write over files that are there, too")
    args = parser.parse_args(argv)
    if args.write and args.exercise:
        raise Refused(f"EXERCISE {args.exercise[0]!r} means nothing beside --write, which writes "
                      "all", "without --write")
    if args.hint and not args.exercise:
        raise Refused(f"--hint {args.hint} means nothing without an EXERCISE", "without --hint")
    if args.force and not args.write:
        raise Refused("--force means nothing without --write", "--write exercises")
    args.chosen = exercises.chosen(args.exercise, args.level)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.write:
        write_all(args)
        return 0
    for exercise in itertools.chain(*args.chosen.values()):
        print(f"{exercise.number:18}level {exercise.level}   {exercise.what}")
        if args.exercise:
            print_paragraph(exercise.question)
            for hint in exercise.hints[: args.hint or 0]:
                print_paragraph(f"Hint: {hint}")
    return 0


def print_paragraph(words):
    print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))


def write_all(args):
    try:
        kept = exercises.write(args.write, args.level, args.force)
    except OSError as error:
        refusals.fail(f"cannot write {error.filename}: {error.strerror}; --write with another "
                      "folder would work")
    for path in kept:
        print(f"{path} is there and stays; --force (FORCE=1 make exercises) writes over it")
    count = len(exercises.EXERCISES) - len(kept)
    print(f"{count} chapters and kernels with holes are in {args.write}")
    print("a question:  python -m lab.exercises 04.2      (and --hint 1, --hint 2)")
    print("to try it:   PYTHONPATH=. torchrun --nproc_per_node=4 "
          f"{args.write}/04_tensor_parallel.py")
    print(f"to grade it: python -m lab.grade {args.write} 04.2")


if __name__ == "__main__":
    commands.program(main)
