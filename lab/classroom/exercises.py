"""The exercises: which functions of the chapters students write, and what checks them.

    python -m lab.exercises                     all of them, a line each
    python -m lab.exercises 04.2                one question
    python -m lab.exercises 04.2 --hint 1       and its first hint; --hint 2: both
    python -m lab.exercises --write exercises   the chapters, with holes in place of the functions
                                                (--level 1: of that level alone; --force: also
                                                over files that somebody has changed)

An exercise is defined in one place, lab/chapters/NN/exercises.toml. What belongs into a hole
stands in the chapter itself. Levels: 1 is a line or two, 2 a page that one has to think about, 3 an
evening.
"""

import difflib
import shlex
import sys
import textwrap
from pathlib import Path

from common import Refused
from lab import ROOT, chapters
from lab.classroom import holes
from lab.classroom.exercise import read
from lab.run import commands, refusals


def read_all():
    """{file without .py: its exercises}: of chapters, and of the files beside them."""
    paths = [chapters.HERE / room / "exercises.toml" for room in chapters.ROOMS]
    for room, about in chapters.rooms_with("about").items():
        names = [Path(file).name for file in getattr(about, "FILES", ())]
        paths += [chapters.HERE / room / f"{name}_exercises.toml" for name in names]
    try:
        return dict(read(path) for path in paths if path.exists())
    except ValueError as error:
        refusals.fail(str(error))


EXERCISES = read_all()


def solution(chapter):
    return (ROOT / f"{chapter}.py").read_text(encoding="utf-8")


def short(chapter):
    """What the numbers of a chapter's exercises begin with: "04", "layernorm"."""
    name = chapter.split("/")[-1]
    return name[:2] if name[0].isdigit() else name


def chosen(words):
    """{chapter: its exercises} that words such as "04", "04.2" and "layernorm" name; no words: all.
    """
    known = {name for chapter, exercises in EXERCISES.items()
             for name in (short(chapter), *(exercise.number for exercise in exercises))}
    for word in words:
        if word not in known:
            near = difflib.get_close_matches(word, sorted(known), 1, 0)[0]
            raise Refused(f"there is no EXERCISE {word!r}; `python -m lab.exercises` lists all",
                          f"{near} in place of {shlex.quote(word)}")
    found = {chapter: [e for e in exercises
                       if not words or e.number in words or short(chapter) in words]
             for chapter, exercises in EXERCISES.items()}
    return {chapter: exercises for chapter, exercises in found.items() if exercises}


# ------------------------------------------------------------------------------------ to write them

def with_holes(chapter, level=None):
    """The source of a chapter with a hole for every exercise, or for those of a level."""
    source = solution(chapter)
    for exercise in EXERCISES[chapter]:
        if level in (None, exercise.level):
            words = f"{exercise.number}, level {exercise.level}: {exercise.question}"
            for name in exercise.functions:
                source = holes.cut(source, name, words, f"{exercise.number}: {name}")
                words = f"{exercise.number}: see {exercise.functions[0]}"
    return source


def write(folder, level=None, force=False):
    """Write the chapters with holes, but without force not over a file that differs from what this
    writes for some level: somebody may have changed it. Returns the paths of those."""
    kept = []
    for chapter in EXERCISES:
        path = folder / f"{chapter}.py"
        if path.exists() and not force and not is_as_written(path, chapter):
            kept.append(path)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(with_holes(chapter, level), encoding="utf-8")
    return kept


def is_as_written(path, chapter):
    """Whether `write` could have written this file, for all levels or for one of them."""
    data = path.read_bytes()
    return any(data == with_holes(chapter, level).encode() for level in (None, 1, 2, 3))


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.exercises", description=__doc__)
    add = parser.add_argument
    add("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--hint", type=int, choices=(1, 2), help="open so many hints")
    add("--write", type=commands.output("exercises"), metavar="FOLDER",
        help="write the chapters with holes")
    add("--level", type=int, choices=(1, 2, 3), help="exercises of this level alone")
    add("--force", action="store_true", help="write over files that were changed, too")
    args = parser.parse_args(argv)
    if args.write and args.exercise:
        raise Refused(f"EXERCISE {args.exercise[0]} means nothing beside --write, which writes all",
                      "without --write")
    if args.hint and not args.exercise:
        raise Refused(f"--hint {args.hint} means nothing without an EXERCISE", "without --hint")
    if args.force and not args.write:
        raise Refused("--force means nothing without --write", "--write exercises")
    args.chosen = chosen(args.exercise)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.write:
        return write_all(args)
    these = [e for found in args.chosen.values() for e in found if args.level in (None, e.level)]
    for exercise in these:
        print(f"{exercise.number:18}level {exercise.level}   {exercise.what}")
        if args.exercise:
            said = [exercise.question, *(f"Hint: {hint}" for hint in exercise.hints)]
            for words in said[: 1 + (args.hint or 0)]:
                print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))
    return 0


def write_all(args):
    try:
        kept = write(args.write, args.level, args.force)
    except OSError as error:
        refusals.fail(f"cannot write {error.filename}: {error.strerror}; --write with another "
                      "folder would work")
    for path in kept:
        print(f"{path} was changed and stays as it is; --force (FORCE=1 make exercises) "
              "writes over it")
    print(f"{len(EXERCISES) - len(kept)} chapters and kernels with holes are in {args.write}")
    print("a question:  python -m lab.exercises 04.2      (and --hint 1, --hint 2)")
    print("to try it:   PYTHONPATH=. torchrun --nproc_per_node=4 "
          f"{args.write}/04_tensor_parallel.py")
    print(f"to grade it: python -m lab.grade {args.write} 04.2")
    return 0
