"""Five predictions about a run of a chapter, before anything runs.

    python -m lab.predict 04                five questions on random sizes
    python -m lab.predict 04 --seed 7       the same five for everybody
    python -m lab.predict 04 --for ada      ada's own: her name draws the seed
    python -m lab.predict 04 --seed 7 --export sheet.md     on paper, without the answers
    python -m lab.predict 04 --seed 7 --mark class          how many each student has right

An answer is a line: a number with its unit (4.87 MB, 12 kB, 3 MiB, x2, 1/2, 37.5%), or arithmetic
such as 2*3/4*811008*4 B. It is compared with the chapter's own formula, and the derivation is
shown. A number is right within 2%, a count below 1,000 if it is exact. An empty line shows the
answer, Ctrl-D ends.

The sizes are those of a run that the chapter takes. So afterwards its command shows what is
measured. Chapter 10 runs nothing: its command plans.
"""

import random
import shlex
import sys

from common import Refused
from lab.chapters import NAMES
from lab.classroom import predict, sheets, variants
from lab.classroom.questions import questions
from lab.run import commands, refusals


def chapter_of(text):
    """An argparse type: 04, 4, or 04_tensor_parallel, with .py or without."""
    for name in NAMES:
        if text in (name, f"{name}.py", name[:2], name[1:2]):
            return name
    raise Refused(f"{text!r} is no chapter; {', '.join(name[:2] for name in NAMES)} are", "04")


def parse(argv):
    parser = commands.Parser("-m lab.predict", description=__doc__)
    add = parser.add_argument
    add("chapter", type=chapter_of, nargs="?", metavar="CHAPTER", help="such as 04")
    add("--seed", type=commands.number(int, 0, predict.SEEDS, 1),
        help="of the sizes; the same seed asks the same questions")
    add("--for", type=variants.name, metavar="NAME", dest="student",
        help="the seed is this student's own")
    add("--export", type=sheet_to_write, metavar="FILE",
        help="ask nothing: write the questions, to .md or .json")
    add("--mark", metavar="PATH",
        help="a sheet with answers, or a folder of such, or of students' folders")
    add("--json", type=commands.output("marks.json"), help="write what --mark says")
    args = parser.parse_args(argv)
    marks = args.mark is not None
    if not args.chapter and not marks:
        raise Refused("a CHAPTER is missing", "with 04")
    if args.student and args.seed is not None:
        raise Refused(f"--for {args.student} means nothing beside --seed", "without --for")
    for flag, other in (("student", "for"), ("export", "export")):
        if marks and getattr(args, flag):
            raise Refused(f"--{other} means nothing beside --mark", f"without --{other}")
    if args.json and not marks:
        raise Refused("--json means nothing without --mark", "without --json")
    if args.seed is not None and not args.chapter:
        raise Refused(f"--seed {args.seed} means nothing without a CHAPTER", "with 04")
    if args.student:
        args.seed = predict.seed_of(args.student, args.chapter)
    if marks:
        args.sheets = sheets.sheets_in(args.mark)
    return args


def sheet_to_write(text):
    """An argparse type: a file that ends in .md or .json."""
    return commands.output("sheet.json" if text.endswith(".json") else "sheet.md")(text)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.mark is not None:
        return sheets.mark(args.sheets, args.chapter, args.seed, args.json)
    seed = random.randrange(1000) if args.seed is None else args.seed
    case, asked = questions(args.chapter, seed)
    if args.export:
        sheets.write(args.export, case, asked, seed, args.student)
        print(f"{args.export} asks {len(asked)} questions, --seed {seed}\n"
              f"    python -m lab.predict --mark {shlex.quote(str(args.export))}")
        return 0

    print(f"{case.name.replace('_', ' ')} · five predictions · --seed {seed} asks the same again\n"
          f"{predict.HOW} An empty\nline shows the answer, Ctrl-D ends. The run that all "
          f"questions are about:\n    {case.command}")
    right = predict.ask(case, asked)
    print(f"\n{right} of {len(asked)}. {case.says}: {case.command}")
    return 0


if __name__ == "__main__":
    commands.program(main)
