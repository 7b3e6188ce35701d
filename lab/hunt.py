"""Hunts: a chapter with one silent bug of the museum, which somebody really had.

    python -m lab.hunt 06 --seed 3                              write hunts/06_context_parallel.py
    python -m lab.hunt --grade hunts/06_context_parallel.py     is it mended?
    python -m lab.hunt --reveal hunts/06_context_parallel.py    the story, and the lines

The seed draws the bug. What is printed is what a user would have noticed, and a run that shows it.
The last line of the file names the hunt. A hunt is mended if the chapter passes the runs of all its
exhibits. Comparing a hunt with the chapter itself shows the lines, and so does --reveal: students
who are to find them have a bundle without solutions, and get what a teacher has written with --out.
"""

import difflib
import random
import re
import shlex
import sys
import textwrap
from pathlib import Path

from lab import museum
from lab.classroom import checks
from lab.museum import observe
from lab.run import commands, refusals

# Doesn't import torch: another interpreter does, which `checks.warm_up` starts.

MARK = "# hunt"
SEEDS = 10**9
MENDED, SAME, OTHER = "✓ mended", "✗ the bug is still there", "✗ something is still wrong"
WRITES = "`python -m lab.hunt 06` writes one, to hunts/06_context_parallel.py"


# -------------------------------------------------------------------------------- drawing, planting

def huntable():
    """{number of a chapter: its exhibits}, of those that show in a run on ranks, in its own
    file."""
    rooms = {room: [one for one in these
                    if one.ranks and one.file.startswith(room) and not one.rehearsal]
             for room, these in museum.exhibits().items() if room.isdigit()}
    return {chapter: these for chapter, these in rooms.items() if these}


def draw(chapter, seed):
    """The exhibit of a hunt."""
    return random.Random(f"{chapter} {seed}").choice(huntable()[chapter])


def text_of(exhibit, chapter, seed):
    """The file of a hunt."""
    _, planted = observe.sources(exhibit)
    return f"{planted.rstrip()}\n{MARK} {chapter} {seed}\n"


def hunt_of(text):
    """(chapter, seed), as the last line of a hunt's file says; None: it is none."""
    match = re.search(rf"^{MARK} (\d\d) (\d{{1,9}})$", text, re.MULTILINE)
    return (match[1], int(match[2])) if match and match[1] in huntable() else None


def command_of(exhibit, path):
    """The run that shows it: of the file, or of another chapter, which imports it. That one finds
    what lies beside itself first, if Python is not told to leave that out (PYTHONSAFEPATH)."""
    where = f"PYTHONSAFEPATH=1 PYTHONPATH={path.parent}:." if exhibit.chapter else "PYTHONPATH=."
    return (f"{where} torchrun --standalone --nproc_per_node={exhibit.ranks} "
            f"{exhibit.chapter or path} {observe.flags_of(exhibit, 'sgd')}")


def noticed(exhibit):
    """What a user would have noticed, in a sentence, and nothing more."""
    caught = exhibit.caught_by
    if exhibit.file.startswith("00"):
        return ("Results are right, and they come late." if "values" not in caught else
                "Once in a while a result is not what it should be.")
    if "first loss" in caught:
        words = "The loss falls, but from the first step on it is not that of one GPU."
    elif "loss" in caught:
        words = "The first loss is right to the last digit. Later ones are not those of one GPU."
    else:
        words = "The loss falls as it should. Some say that the models are a little worse."
    if "sent" in caught:
        words += " The network is not as busy as it was computed to be."
    return words


# ------------------------------------------------------------------------------------------ grading

def runs_of(chapter):
    """The distinct runs of a chapter's exhibits, with SGD if they need no other optimizer: (ranks,
    flags, the chapter that is run, if it is another)."""
    return list(dict.fromkeys(run_of(exhibit) for exhibit in huntable()[chapter]))


def run_of(exhibit):
    return exhibit.ranks, observe.flags_of(exhibit, "sgd"), exhibit.chapter


def grade(text, chapter, seed):
    """(verdict, the diagnosis or problems of the run that failed)."""
    exhibit = draw(chapter, seed)
    for run in dict.fromkeys([run_of(exhibit), *runs_of(chapter)]):
        seen = observe.play(exhibit.file, text, *run)
        if seen.status != 0:
            is_there = all(new in text for _, new in ((exhibit.old, exhibit.new), *exhibit.more))
            return (SAME if is_there else OTHER), seen.said
    return MENDED, ()


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.hunt", description=__doc__)
    add = parser.add_argument
    add("chapter", nargs="?", metavar="CHAPTER", help="06")
    add("--seed", type=commands.number(int, 0, SEEDS, 3), default=0,
        help="draws the bug; default: 0")
    add("--out", type=commands.output("hunts"), default=Path("hunts"), metavar="FOLDER")
    add("--force", action="store_true", help="write over a hunt that was changed, too")
    add("--grade", metavar="FILE", help="say whether it is mended")
    add("--reveal", metavar="FILE", help="tell the story, and the lines")
    args = parser.parse_args(argv)
    refused = refusals.refusal()
    given = {"CHAPTER": args.chapter or None, "--grade": args.grade, "--reveal": args.reveal}
    given = {name: word for name, word in given.items() if word is not None}
    if not given:
        raise refused("a CHAPTER is missing, or --grade or --reveal and a file", "with 06")
    if len(given) > 1:
        (name, word), (other, _), *_ = given.items()
        raise refused(f"{name} {word} means nothing beside {other}", f"without {other}")
    if not args.chapter:
        read_hunt(args, args.grade if args.reveal is None else args.reveal)
        return args
    chapter, args.chapter = args.chapter, args.chapter.zfill(2)
    if args.chapter not in huntable():
        near = difflib.get_close_matches(args.chapter, [*huntable()], 1, 0)[0]
        raise refused(f"CHAPTER {args.chapter} has no hunt, as {' '.join(huntable())} have",
                      f"{near} in place of {shlex.quote(chapter)}")
    return args


def read_hunt(args, file):
    """Note the file of a hunt, its text, and which it is."""
    flag = "--reveal" if args.grade is None else "--grade"
    args.file, args.text = Path(file), read(Path(file))
    if args.text is None:
        raise refusals.refusal()(f"{flag} {file} is no file with a text in UTF-8; {WRITES}")
    args.hunt = hunt_of(args.text)
    if args.hunt is None:
        raise refusals.refusal()(f"{flag} {file} is no hunt: its last line does not say which it "
                                 f"is; {WRITES}")


def read(path):
    """The text of a file; None: it has none, or is no file."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        return None


def write(args):
    """Write the file of a hunt, and print what was noticed, and what to type."""
    exhibit = draw(args.chapter, args.seed)
    path, text = args.out / exhibit.file, text_of(exhibit, args.chapter, args.seed)
    if path.exists() and not args.force and is_changed(read(path)):
        refusals.fail(f"{path} is there, and was changed; --force would write over it")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        refusals.fail(f"cannot write {path}: {error.strerror}; --out with another folder would "
                      "work")
    print(f"{path} has one bug. {noticed(exhibit)}")
    print(f"    {command_of(exhibit, path)}")
    print(f"    python -m lab.hunt --grade {path}")


def is_changed(text):
    """Whether a hunt is not as it was written. text: None, where it is no text any more."""
    hunt = text and hunt_of(text)
    return not hunt or text != text_of(draw(*hunt), *hunt)


def reveal(args):
    """Print the exhibit's story and its lines."""
    exhibit = draw(*args.hunt)
    print(f"{exhibit.number}: {exhibit.title}")
    print(textwrap.fill(exhibit.story, 92, initial_indent="    ", subsequent_indent="    "))
    for old, new in ((exhibit.old, exhibit.new), *exhibit.more):
        for what, lines in (("- ", old), ("+ ", new)):
            print(textwrap.indent(lines.rstrip("\n"), what, lambda line: True))
    print(f"What sees it: {', '.join(exhibit.caught_by)}. What does not: "
          f"{', '.join(exhibit.blind) or 'nothing that is looked at'}.")


def print_grade(args):
    """Print whether a hunt is mended. Returns the exit status."""
    verdict, problems = grade(args.text, *args.hunt)
    print(f"{args.file.name}  {verdict}")
    for words in problems[:2]:
        print(textwrap.fill(refusals.one_line(words), 92, initial_indent="    ",
                            subsequent_indent="    "))
    return 0 if verdict == MENDED else 1


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    if args.grade is not None:
        checks.warm_up()
        return print_grade(args)
    if args.reveal is not None:
        reveal(args)
    else:
        write(args)
    return 0


if __name__ == "__main__":
    commands.program(main)
