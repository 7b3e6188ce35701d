"""Hunts: a chapter with one silent bug of the museum, which somebody really had.

    python -m lab.hunt 06 --seed 3                              write hunts/06_context_parallel.py
    python -m lab.hunt 06 --for ada                             the same, of ada's own seed
    python -m lab.hunt --grade hunts/06_context_parallel.py     is it mended?
    python -m lab.hunt --reveal hunts/06_context_parallel.py    the story, and the lines

The seed draws the bug. What is printed is what a user would have noticed, and a run that shows it.
With --level hard that run is not compared with one GPU: there are losses, memory and traffic alone.
The last line of the file names the hunt. A hunt is mended if the chapter passes the runs of all its
exhibits. If it doesn't, the grader tells the bug that was planted from another one. Comparing a
hunt with the chapter itself shows the lines, and so does --reveal: students who are to find them
have a bundle without solutions, and get what a teacher has written with --out.
"""

import difflib
import random
import re
import shlex
import sys
import textwrap
from pathlib import Path

from common import Refused
from lab import museum
from lab.classroom import checks, variants
from lab.museum import observe
from lab.run import commands, refusals

MARK = "# hunt"
SEEDS = 10**9
MENDED, SAME, OTHER = "✓ mended", "✗ the bug is still there", "✗ something else is wrong now"


# -------------------------------------------------------------------------------- drawing, planting

def huntable():
    """{number of a chapter: its exhibits}, of those that show in a run on ranks, in its own
    file."""
    found = {room: [one for one in those
                    if one.ranks and one.file.startswith(room) and not one.rehearsal]
             for room, those in museum.exhibits().items() if room.isdigit()}
    return {chapter: those for chapter, those in found.items() if those}


def draw(chapter, seed):
    """The exhibit of a hunt."""
    return random.Random(f"{chapter} {seed}").choice(huntable()[chapter])


def text_of(exhibit, chapter, seed, level):
    """The file of a hunt."""
    _, planted = observe.sources(exhibit)
    return f"{planted.rstrip()}\n{MARK} {chapter} {seed} {level}\n"


def hunt_of(text):
    """(chapter, seed, level), as the last line of a hunt's file says; None: it is none."""
    found = re.search(rf"^{MARK} (\d\d) (\d{{1,9}}) (easy|hard)$", text, re.MULTILINE)
    return (found[1], int(found[2]), found[3]) if found and found[1] in huntable() else None


def command_of(exhibit, path, level):
    """The run that shows it: of the file, or of another chapter, which imports it. That one finds
    what lies beside itself first, if Python is not told to leave that out (PYTHONSAFEPATH)."""
    flags = observe.flags_of(exhibit, "sgd")
    if level == "hard" and not exhibit.file.startswith("00"):
        flags = f"{flags.replace(' --verify', '')} --no-verify"
    found = f"PYTHONSAFEPATH=1 PYTHONPATH={path.parent}:." if exhibit.chapter else "PYTHONPATH=."
    return (f"{found} torchrun --standalone --nproc_per_node={exhibit.ranks} "
            f"{exhibit.chapter or path} {flags}")


def noticed(exhibit):
    """What a user would have noticed, in a sentence, and nothing more."""
    caught = exhibit.caught_by
    if exhibit.file.startswith("00"):
        return ("Results are right, and they come late." if "values" not in caught else
                "Once in a while a result is not what it should be.")
    if "first loss" in caught:
        said = "The loss falls, but from the first step on it is not that of one GPU."
    elif "loss" in caught:
        said = "The first loss is right to the last digit. Later ones are not those of one GPU."
    else:
        said = "The loss falls as it should. Some say that the models are a little worse."
    return said + (" The network is not as busy as it was computed to be." if "sent" in caught else
                   "")


# ------------------------------------------------------------------------------------------ grading

def runs_of(chapter):
    """The distinct runs of a chapter's exhibits, with SGD if they need no other optimizer: (ranks,
    flags, the chapter that is run, if it is another)."""
    return list(dict.fromkeys((exhibit.ranks, observe.flags_of(exhibit, "sgd"), exhibit.chapter)
                              for exhibit in huntable()[chapter]))


def grade(text, chapter, seed):
    """(verdict, the diagnosis or problems of the run that failed)."""
    exhibit = draw(chapter, seed)
    _, planted = observe.sources(exhibit)
    own = exhibit.ranks, observe.flags_of(exhibit, "sgd"), exhibit.chapter
    for run in dict.fromkeys([own, *runs_of(chapter)]):
        seen = observe.play(exhibit.file, text, *run)
        if seen.status != 0:
            as_planted = observe.play(exhibit.file, planted, *run)
            return (SAME if is_same_bug(exhibit, text, seen, as_planted) else OTHER), seen.said
    return MENDED, ()


def is_same_bug(exhibit, text, seen, as_planted):
    """Whether a run is wrong by the bug that was planted: its lines are all still there, or it is
    seen as that is, and what is said first of that is said here, be it with other numbers."""
    if seen.status is None:                             # it has not come as far
        return seen == as_planted
    if all(new in text and (old in new or old not in text)
           for old, new in ((exhibit.old, exhibit.new), *exhibit.more)):
        return True
    said, expected = map(without_numbers, (seen.said, as_planted.said))
    return seen.caught == as_planted.caught and expected[:1] == said[:1]


def without_numbers(said):
    return [re.sub(r"\d[\d.,/e+-]*", "#", words) for words in said]


# --------------------------------------------------------------------------------- the command line

def arguments(argv):
    parser = commands.Parser("-m lab.hunt", description=__doc__)
    add = parser.add_argument
    add("chapter", nargs="?", metavar="CHAPTER", help="06")
    add("--seed", type=commands.number(int, 0, SEEDS, 3), help="draws the bug; default: 0")
    add("--for", type=variants.name, metavar="NAME", dest="student",
        help="the seed is this student's own")
    add("--level", choices=("easy", "hard"), default="easy", help="hard: a run without comparison")
    add("--out", type=commands.output("hunts"), default=Path("hunts"), metavar="FOLDER")
    add("--force", action="store_true", help="write over a hunt that was changed, too")
    add("--grade", metavar="FILE", help="say whether it is mended")
    add("--reveal", metavar="FILE", help="tell the story, and the lines")
    args = parser.parse_args(argv)
    chapter, args.chapter = args.chapter, args.chapter and args.chapter.zfill(2)
    file = args.grade or args.reveal
    given = f"--grade {file}" if args.grade else f"--reveal {file}"
    writes = "`python -m lab.hunt 06` writes one, to hunts/06_context_parallel.py"
    if args.student and (file or args.seed is not None):
        beside = "--seed" if args.seed is not None else given
        raise Refused(f"--for {args.student} means nothing beside {beside}", "without --for")
    if not file and not args.chapter:
        raise Refused("a CHAPTER is missing, or --grade or --reveal and a file", "with 06")
    if args.grade and args.reveal:
        raise Refused(f"--grade {args.grade} means nothing beside --reveal", "without --reveal")
    if file and args.chapter:
        raise Refused(f"CHAPTER {args.chapter} means nothing beside {given}",
                      f"without {shlex.quote(chapter)}")
    if args.chapter and args.chapter not in huntable():
        near = difflib.get_close_matches(args.chapter, [*huntable()], 1, 0)[0]
        raise Refused(f"CHAPTER {args.chapter} has no hunt, as {' '.join(huntable())} have",
                      f"{near} in place of {shlex.quote(chapter)}")
    if file:
        args.file, text = Path(file), read(Path(file))
        if text is None:
            raise Refused(f"{given} is no file with a text in UTF-8; {writes}")
        args.text, args.hunt = text, hunt_of(text)
        if args.hunt is None:
            raise Refused(f"{given} is no hunt: its last line does not say which it is; {writes}")
    if args.student:
        args.out /= re.sub(r"\W", "_", args.student)
        args.seed = variants.seed_of(args.student, f"hunt {args.chapter}", SEEDS)
    args.seed = args.seed or 0
    return args


def read(path):
    """The text of a file; None: it has none, or is no file."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def write(args):
    exhibit = draw(args.chapter, args.seed)
    path, text = args.out / exhibit.file, text_of(exhibit, args.chapter, args.seed, args.level)
    if path.exists() and not args.force and is_changed(read(path)):
        refusals.fail(f"{path} is there, and was changed; --force would write over it")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        refusals.fail(f"cannot write {path}: {error.strerror}; --out with another folder would "
                      "work")
    print(f"{path} has one bug. {noticed(exhibit)}")
    print(f"    {command_of(exhibit, path, args.level)}")
    print(f"    python -m lab.hunt --grade {path}")
    return 0


def is_changed(text):
    """Whether a hunt is not as it was written. text: None, where it is no text any more."""
    hunt = text and hunt_of(text)
    return not hunt or text != text_of(draw(*hunt[:2]), *hunt)


def reveal(args):
    exhibit = draw(*args.hunt[:2])
    print(f"{exhibit.number}: {exhibit.title}")
    print(textwrap.fill(exhibit.story, 92, initial_indent="    ", subsequent_indent="    "))
    for old, new in ((exhibit.old, exhibit.new), *exhibit.more):
        for what, lines in (("- ", old), ("+ ", new)):
            print(textwrap.indent(lines.rstrip("\n"), what, lambda line: True))
    print(f"What sees it: {', '.join(exhibit.caught_by)}. What does not: "
          f"{', '.join(exhibit.blind) or 'nothing that is looked at'}.")
    return 0


def main(argv=None):
    checks.warm_up()
    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    if args.reveal:
        return reveal(args)
    if not args.grade:
        return write(args)
    verdict, problems = grade(args.text, *args.hunt[:2])
    print(f"{args.file.name}  {verdict}")
    for words in problems[:2]:
        print(textwrap.fill(refusals.one_line(words), 92, initial_indent="    ",
                            subsequent_indent="    "))
    return 0 if verdict == MENDED else 1
