"""Five predictions about a run of a chapter, before anything runs.

    python -m lab.predict 04                five questions on random sizes
    python -m lab.predict 04 --seed 7       the same five for everybody

An answer is a line: a number with its unit (4.87 MB, 12 kB, 3 MiB, x2, 1/2, 37.5%), or arithmetic
such as 2*3/4*811008*4 B. It is compared with the chapter's own formula, and the derivation is
shown. A number is right within 2%, a count below 1,000 if it is exact. An empty line shows the
answer, Ctrl-D ends.

The sizes are those of a run that the chapter takes. So afterwards its command shows what is
measured. Chapter 10 runs nothing: its command plans.
"""

import random
import sys

from common import Refused
from lab.chapters import NAMES
from lab.chapters.question import SEEDS, draw_questions
from lab.classroom import predict
from lab.run import commands, refusals

TRIES = 5               # lines that are read for an answer, if none can be understood


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
    add("--seed", type=commands.number(int, 0, SEEDS, 1),
        help="of the sizes; the same seed asks the same questions")
    args = parser.parse_args(argv)
    if not args.chapter:
        raise Refused("a CHAPTER is missing", "with 04")
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    seed = random.randrange(1000) if args.seed is None else args.seed
    case, asked = draw_questions(args.chapter, seed)
    print(f"{case.name.replace('_', ' ')} · five predictions · --seed {seed} asks the same again\n"
          f"{predict.INSTRUCTIONS} An empty\nline shows the answer, Ctrl-D ends. The run that all "
          f"questions are about:\n    {case.command}")
    right = ask(case, asked)
    print(f"\n{right} of {len(asked)}. {case.says}: {case.command}")
    return 0


# --------------------------------------------------------------------------------- the dialogue

def ask(case, asked):
    """Ask the questions in turn, up to the end of the input. Returns how many are answered right.
    """
    right = 0
    for i, question in enumerate(asked, start=1):
        print(f"\n{predict.filled(f'{i}. {question.text}')}\n"
              f"{predict.given(question, case.sizes)}")
        try:
            answer = answer_to(question)
        except EOFError:
            print()
            break
        if answer is None:
            print("   The answer:")
        elif predict.is_right(answer, question):
            right += 1
            print("   ✓")
        else:
            words = predict.in_words(answer, question.unit)
            print(f"   ✗ {words} is {predict.off_by(answer, question)}")
        print(f"   {predict.derivation(question, case.sizes)}")
        print(predict.filled(question.why, "   "))
        if question.row:
            print(f"   in the report of a run: {question.row}")
    return right


def answer_to(question):
    """The number that is answered; None if the question is left open."""
    for _ in range(TRIES):
        line = read_line()
        if not line.strip():
            return None
        try:
            return predict.understood(line, question.unit)
        except ValueError as error:
            print(f"   {error}")
    return None


def read_line():
    """A line of standard input, whatever its bytes; raises EOFError at its end."""
    if sys.stdin is None:                                   # closed, by `<&-`
        raise EOFError
    if sys.stdin.isatty():
        print("> ", end="")
    sys.stdout.flush()
    try:
        line = sys.stdin.buffer.readline(10 * predict.LONGEST)      # some input has no line's end
    except OSError as error:
        refusals.fail(f"standard input: {error.strerror}")
    if not line:
        raise EOFError
    return line.decode(errors="backslashreplace")


if __name__ == "__main__":
    commands.program(main)
