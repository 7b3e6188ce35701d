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
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

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


def text_of(chapter, seed):
    """The file of a hunt."""
    _, planted = observe.sources(draw(chapter, seed))
    return f"{planted.rstrip()}\n{MARK} {chapter} {seed}\n"


class Hunt(NamedTuple):
    """A file that this command has written."""
    path: Path
    text: str
    chapter: str
    seed: int


def read(path):
    """The Hunt in a file. Raises ValueError, which says what is wrong with the file."""
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError):
        text = None
    if text is None:
        raise ValueError(f"{path} is no file with a text in UTF-8")
    mark = re.search(rf"^{MARK} (\d\d) (\d{{1,9}})$", text, re.MULTILINE)
    if mark is None or mark[1] not in huntable():
        raise ValueError(f"{path} is no hunt: its last line does not say which it is")
    return Hunt(path, text, mark[1], int(mark[2]))


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


def grade(hunt):
    """(verdict, the diagnosis or problems of the run that failed)."""
    exhibit = draw(hunt.chapter, hunt.seed)
    for run in dict.fromkeys([run_of(exhibit), *runs_of(hunt.chapter)]):
        seen = observe.play(exhibit.file, hunt.text, *run)
        if seen.status != 0:
            is_there = all(new in hunt.text for _, new in edits_of(exhibit))
            return (SAME if is_there else OTHER), seen.said
    return MENDED, ()


def edits_of(exhibit):
    """(what is right, what the bug has in its place), in all places."""
    return (exhibit.old, exhibit.new), *exhibit.more


# --------------------------------------------------------------------------------- the command line

def a_chapter(text):
    """An argparse type: 06, or 6."""
    chapter = text.zfill(2)
    if not text or chapter not in huntable():
        near = difflib.get_close_matches(chapter, [*huntable()], 1, 0)[0]
        raise refusals.refusal()(f"{text or repr(text)} has no hunt, as {' '.join(huntable())} "
                                 "have", near)
    return chapter


def a_hunt(text):
    """An argparse type: a file that this command has written."""
    try:
        return read(Path(text))
    except ValueError as error:
        raise refusals.refusal()(f"{error}; {WRITES}") from None


def parse(argv):
    parser = commands.Parser("-m lab.hunt", description=__doc__)
    add = parser.add_argument
    add("chapter", nargs="?", type=a_chapter, metavar="CHAPTER", help="06")
    add("--seed", type=commands.number(int, 0, SEEDS, 3), default=0,
        help="draws the bug; default: 0")
    add("--out", type=commands.output("hunts"), default=Path("hunts"), metavar="FOLDER")
    add("--force", action="store_true", help="write over a hunt that is there")
    add("--grade", type=a_hunt, metavar="FILE", help="say whether it is mended")
    add("--reveal", type=a_hunt, metavar="FILE", help="tell the story, and the lines")
    args = parser.parse_args(argv)
    choices = {f"CHAPTER {args.chapter}": args.chapter, "--grade": args.grade,
               "--reveal": args.reveal}
    given = [word for word, value in choices.items() if value]
    if not given:
        raise refusals.refusal()("a CHAPTER is missing, or --grade or --reveal and a file",
                                 "with 06")
    if len(given) > 1:
        raise refusals.refusal()(f"{given[0]} means nothing beside {given[1]}",
                                 f"without {given[1]}")
    return args


def write(args):
    """Write the file of a hunt, and print what was noticed, and what to type."""
    exhibit = draw(args.chapter, args.seed)
    path = args.out / exhibit.file
    if path.exists() and not args.force:
        refusals.fail(f"{path} is there; --force would write over it")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(args.chapter, args.seed), encoding="utf-8")
    except OSError as error:
        refusals.fail(f"cannot write {path}: {error.strerror}; --out with another folder would "
                      "work")
    print(f"{path} has one bug. {noticed(exhibit)}")
    print(f"    {command_of(exhibit, path)}")
    print(f"    python -m lab.hunt --grade {path}")


def reveal(hunt):
    """Print the exhibit's story and its lines."""
    exhibit = draw(hunt.chapter, hunt.seed)
    print(f"{exhibit.number}: {exhibit.title}")
    print_paragraph(exhibit.story)
    for old, new in edits_of(exhibit):
        print(textwrap.indent(old.rstrip("\n"), "- ", lambda line: True))
        print(textwrap.indent(new.rstrip("\n"), "+ ", lambda line: True))
    print(f"What sees it: {', '.join(exhibit.caught_by)}. What does not: "
          f"{', '.join(exhibit.blind) or 'nothing that is looked at'}.")


def print_paragraph(words):
    print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))


def print_grade(hunt):
    """Print whether a hunt is mended. Returns the exit status."""
    verdict, problems = grade(hunt)
    print(f"{hunt.path.name}  {verdict}")
    for words in problems[:2]:
        print_paragraph(refusals.one_line(words))
    return 0 if verdict == MENDED else 1


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    if args.grade:
        checks.warm_up()
        return print_grade(args.grade)
    if args.reveal:
        reveal(args.reveal)
    else:
        write(args)
    return 0


if __name__ == "__main__":
    commands.program(main)
