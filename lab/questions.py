"""Questions about distributed training, answered by the course's functions; and the five texts.

    python -m lab.questions                 the questions: the tutorial's 25, by its levels L1 to
                                            L3, and ten on what the lecture claims
    python -m lab.questions 7               one of them: the numbers that answer it, and why
    python -m lab.questions L2              those of a level
    python -m lab.questions bubble          those with a word, and all rows of the texts with it
    python -m lab.questions --seed 002      each formula, table and plot of a text, row by row
    python -m lab.questions --contradictions    what the texts say that does not hold

No answer is stored: each number comes from the function that is named beside it, when it is asked
for. A row tells what the text has, what the course has, and ✓; or how far they differ, and why. In
a terminal, a question asks for its first number before it answers. An empty line shows it.

The seeds are the five texts that the course grew from: 000 playbook, 001 scaling_book, 002
megatron, 003 lecture, 004 tutorial. The status is 1 if a row differs and does not say why.
"""

import difflib
import shlex
import sys
import textwrap

from common import Refused
from lab.classroom import predict
from lab.cli import commands, refusals
from lab.sources import SOURCES, lecture, texts
from lab.sources.asked import QUESTIONS as OF_TUTORIAL
from lab.sources.contradictions import CONTRADICTIONS

QUESTIONS = {question.number: question for question in (*OF_TUTORIAL, *lecture.QUESTIONS)}
LEVELS = {"L1": "what everybody should know", "L2": "more of it", "L3": "derivations and variants",
          "": "what the lecture claims"}
WIDTH = 100             # of a line


# ------------------------------------------------------------------------------------- what is said

def wrapped(text, first="", rest="     "):
    """A paragraph, on lines of 100 columns at most."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=rest,
                         break_long_words=False, break_on_hyphens=False)


def of_row(row, value):
    """Its lines: where, what, told, ours, verdict; then who gives it, and why it differs."""
    what = textwrap.wrap(row.what, 47) or [""]
    yield (f"{row.where:<9} {what[0]:<48}{texts.told(row):>17}{texts.shown(value, row.unit):>18} "
           f"{texts.verdict(row, value)}")
    for line in what[1:]:
        yield f"{'':<10}{line}"
    said = f"{row.why} ({row.by})" if row.why and row.by else row.why or row.by
    if texts.unexplained(row, value):
        said = f"✗ it differs, and no reason is given ({row.by})"
    if said:
        yield wrapped(said, " " * 12, " " * 12)


def head():
    return f"{'where':<9} {'what':<48}{'told':>17}{'ours':>18}"


def print_rows(pairs):
    """Print rows with their values. Returns 1 if one differs and does not say why, or else 0."""
    status = 0
    for row, value in pairs:
        print("\n".join(of_row(row, value)))
        status |= texts.unexplained(row, value)
    return int(status)


def title(question):
    level = f"{question.level} · " if question.level else ""
    return f"{question.number} · {level}{question.question}"


def print_list(questions):
    """Print questions by level."""
    for level, about in LEVELS.items():
        of_level = [question for question in questions if question.level == level]
        if of_level:
            print(f"{level or 'of the lecture'}: {about}" if level else about)
        for question in of_level:
            print(wrapped(question.question, f"  {question.number:>2}  ", " " * 6))


# -------------------------------------------------------------------------------------- a question

def answer(question, read=None):
    """Print a question and its answer; before that, ask for its first number. read(): a line of
    what somebody types; None: nobody is there. Returns the status."""
    print(wrapped(title(question)))
    first, *others = [(row, row.ours()) for row in question.rows]
    if read:
        print(wrapped(f"First a number: {question.first}", "   "))
        print(f"   {judged(read(), *first)}")
    print(head())
    status = print_rows([first, *others])
    print(wrapped(question.why, "   ", "   "))
    print(f"   see: {question.command}")
    return status


def judged(line, row, value):
    """What is said of a line that somebody has typed."""
    if not line.strip():
        return "The answer:"
    try:
        said = predict.understood(line, row.unit)
    except ValueError as error:
        return f"{error}. The answer:"
    is_right = abs(said - value) <= max(row.error, predict.WITHIN * abs(value))
    return "✓" if is_right else f"✗ {texts.shown(said, row.unit)} is not it. The answer:"


def from_terminal():
    try:
        return predict.read_line()
    except EOFError:
        print()
        return ""


# -------------------------------------------------------------------------------------- the texts

def print_text(source, words=()):
    """Print the rows of a text, those with all of the words; and what is left out. Returns the
    status."""
    with_words = [row for _, row in found_rows(words, [source])]
    pairs = [(row, value) for row, value in texts.values_of(source.number) if row in with_words]
    print(f"{source.number} · {source.title}" + f" · {source.address}" * bool(source.address))
    print(head())
    status = print_rows(pairs)
    agree = sum(row.told is not None and row.agrees(value) for row, value in pairs)
    differ = sum(not row.agrees(value) for row, value in pairs)
    print(f"{len(pairs)} rows: {agree} as told, {differ} not, "
          f"{len(pairs) - agree - differ} of which the text tells no number")
    left_out = texts.MODULES[source.number].LEFT_OUT
    if left_out and not words:
        print("Left out:")
    for what in left_out if not words else ():
        print(wrapped(what, "  - ", "    "))
    return status


def print_contradictions(words=()):
    """Print what the texts say that does not hold."""
    for entry in found_contradictions(words):
        told, ours = (texts.shown(value, entry.unit) for value in (entry.told, entry.ours()))
        print(wrapped(f"{entry.source} {entry.where}: {entry.says}"))
        print(wrapped(f"told {told}, ours {ours}: {entry.holds} {entry.derivation} "
                      f"({entry.by})", "     "))
    return 0


def print_found(words):
    """Print questions, and rows of all texts, that have these words. Returns the status."""
    print_list(found_questions(words))
    status, found = 0, found_rows(words)
    for source in SOURCES:
        rows = [row for number, row in found if number == source.number]
        if rows:
            print(f"\n{source.number} · {source.title}\n{head()}")
            status |= print_rows((row, row.ours()) for row in rows)
    return status


def found_questions(words):
    return [question for question in QUESTIONS.values()
            if texts.has_words(words, question.question, question.why, question.command,
                               *(row.what for row in question.rows))]


def found_rows(words, sources=SOURCES):
    """(the number of a text, row) of those that have all of the words."""
    return [(source.number, row) for source in sources
            for row in texts.MODULES[source.number].ROWS
            if texts.has_words(words, row.where, row.what, row.why, row.by)]


def found_contradictions(words):
    return [entry for entry in CONTRADICTIONS if texts.has_words(
        words, entry.source, entry.where, entry.says, entry.holds, entry.derivation, entry.by)]


# -------------------------------------------------------------------------------- the command line

def word(text):
    """An argparse type: a question's number, a level, or a word that some question or row has."""
    if text.isdecimal():
        if int(text[:9]) not in QUESTIONS or len(text) > 9:
            nearest = min(QUESTIONS, key=lambda number: abs(number - int(text[:9])))
            raise Refused(f"there is no question {text[:9]}; there are 1 to {max(QUESTIONS)}",
                          str(nearest))
    elif not text.strip() or not (text.upper() in LEVELS or found_questions([text])
                                  or found_rows([text]) or found_contradictions([text])):
        known = sorted({other for question in QUESTIONS.values()
                        for other in question.question.strip("?").lower().split()})
        near = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.6)
        raise Refused(f"no question and no row has the word {text!r}", *near, "bubble")
    return text


def parse(argv):
    parser = commands.Parser("-m lab.questions", description=__doc__)
    add = parser.add_argument
    add("words", nargs="*", type=word, help="a number, a level, or words; default: list them all")
    add("--seed", type=texts.source_of, help="a text: its rows, or those with the words")
    add("--contradictions", action="store_true", help="what the texts say that does not hold")
    args = parser.parse_args(argv)
    refuse_misfits(args)
    return args


def refuse_misfits(args):
    """Refuse what does not fit together."""
    if args.seed and args.contradictions:
        raise Refused(f"--seed {args.seed.number} has rows, and --contradictions are of all texts",
                      "without --contradictions")
    is_number = [text for text in args.words if text.isdecimal()]
    if is_number and (args.seed or args.contradictions or len(args.words) > 1):
        others = [text for text in args.words if text != is_number[0]]
        raise Refused(f"question {is_number[0]} is answered alone",
                      " ".join(["without", *(["--seed"] * bool(args.seed)),
                                *(["--contradictions"] * args.contradictions), *others]))
    if args.words and not is_number and not has_any(args):
        raise Refused(f"nothing there has all of these words: {' '.join(args.words)}",
                      *(f"without {shlex.quote(text)}" for text in args.words))


def has_any(args):
    """Whether there is something to print that has the words."""
    if args.contradictions:
        return found_contradictions(args.words)
    if args.seed:
        return found_rows(args.words, [args.seed])
    is_level = len(args.words) == 1 and args.words[0].upper() in LEVELS
    return is_level or found_questions(args.words) or found_rows(args.words)


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.seed:
        return print_text(args.seed, args.words)
    if args.contradictions:
        return print_contradictions(args.words)
    if not args.words:
        print_list(QUESTIONS.values())
        print("\npython -m lab.questions 7 answers the seventh; --seed 002 has a text's rows")
        return 0
    [first, *more] = args.words
    if first.isdecimal():
        is_there = sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()
        return answer(QUESTIONS[int(first)], from_terminal if is_there else None)
    if first.upper() in LEVELS and not more:
        print_list([question for question in QUESTIONS.values() if question.level == first.upper()])
        return 0
    return print_found(args.words)


if __name__ == "__main__":
    commands.program(main)
