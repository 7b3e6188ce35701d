"""Predictions about a run of a chapter: how an answer is read, judged and explained.

An answer is a line: a number with its unit (4.87 MB, 12 kB, 3 MiB, x2, 1/2, 37.5%), or arithmetic
such as 2*3/4*811008*4 B. It is compared with the chapter's own formula.
"""

import ast
import contextlib
import math
import operator
import re
import sys

from lab.classroom import variants
from lab.classroom.questions import LETTERS
from lab.run import refusals
from lab.run.words import quantity

WITHIN = 0.02           # of the formula's value
EXACT_BELOW = 1000      # counts
TRIES = 5               # lines that are read for an answer, if none can be understood
LONGEST = 200           # characters of a line that are looked at
SEEDS = 2**31
HOW = ("An answer is a number with its unit, such as 4.87 MB, 512 KiB, x2, 1/2, 37.5%, or "
       "arithmetic,\nsuch as 2*3/4*811008*4 B. It is right within 2%, a count below 1,000 if it "
       "is exact.")

# -------------------------------------------------------------------------- arithmetic and units

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.Pow: math.pow}
SECONDS = {"s": 1, "ms": 1e-3, "µs": 1e-6, "μs": 1e-6, "us": 1e-6, "second": 1, "seconds": 1}
PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
BYTES = {"byte": 1, "bytes": 1, **{f"{prefix}b": size for prefix, size in PREFIXES.items()},
         **{f"{prefix}ib": 2.0 ** (10 * i) for i, prefix in enumerate("kmgt", start=1)}}
EXAMPLES = {"B": "4.87 MB, 512 KiB or 2*3/4*811008*4 B", "FLOP": "1.5 GFLOP or 6*811008*512 FLOP",
            "s": "162 µs or 14*5e-6 s", "%": "37.5% or 3/8", "times": "2, x2, 1/2 or 7/6"}


def computed(text):
    """The value of plain arithmetic, in floats, in which nothing takes long. Raises ValueError."""
    for typed, meant in {"·": "*", "×": "*", "−": "-", "^": "**"}.items():
        text = text.replace(typed, meant)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)     # 811,008
    try:
        value = float(evaluated(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if not math.isfinite(value):
        raise ValueError("it is not finite")
    return value


def evaluated(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = evaluated(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluated(node.left), evaluated(node.right))
    raise ValueError("it is no arithmetic")


def scale(word, unit):
    """What a number with this word is multiplied by; None if the word is no such unit."""
    bits, word = word in ("Mb", "Gb", "Tb"), word.lower()
    if unit == "B":
        return None if bits else BYTES.get(word)
    if unit == "s":
        return SECONDS.get(word)
    if unit in ("%", "times"):
        return {"": 1, "%": 0.01, "percent": 0.01, "x": 1, "times": 1}.get(word)
    noun = unit.lower()
    for ending in (noun, noun.removesuffix("s"), noun.removesuffix("es"), f"{noun}s"):
        if word.endswith(ending):
            return PREFIXES.get(word.removesuffix(ending).strip())
    return PREFIXES.get(word)


def understood(line, unit):
    """The number that a line says, in this unit. Raises ValueError, which says what is wrong."""
    text, example = line.strip().removeprefix("= "), EXAMPLES.get(unit, f"24 {unit} or 4*5+4")
    shown = f"'{refusals.one_line(text[:60])}'"
    if len(line) > LONGEST:
        raise ValueError(f"{shown} and so on is too long; an answer is such as {example}")
    if unit == "times":
        text = re.sub(r"^[x×]\s*", "", text)
    word = re.search(r"[A-Za-zµμ%\- ]*$", text).group().strip(" -")
    try:
        value = computed(text.removesuffix(word))
    except ValueError:
        raise ValueError(f"no number can be read in {shown}; an answer is such as {example}"
                         ) from None
    if scale(word, unit) is None:
        what = f"'{word}' is no unit here" if word else f"{shown} has no unit"
        raise ValueError(f"{what}; an answer is such as {example}")
    if not math.isfinite(value * scale(word, unit)):
        raise ValueError(f"{shown} is too large; an answer is such as {example}")
    return value * scale(word, unit)


# ------------------------------------------------------------------------------------ in words

def letters(question):
    """Those of a formula and those that are shown besides, in an order that gives nothing away."""
    found = re.findall(r"[^\W\d]\w*", f"{question.formula} {question.also}")
    return [letter for letter in LETTERS if letter in found]


def number(value):
    """811,008; 1.25; 989e12"""
    for power in (12, 9):
        short = f"{value / 10**power:g}e{power}"
        if value >= 10**power and float(short) == value:
            return short
    return f"{value:,g}" if value % 1 else f"{value:,.0f}"


def given(question, sizes):
    """The sizes in its formula, and what they are."""
    return wrapped(["  ", *[f"{letter} = {number(sizes[letter])} ({LETTERS[letter]})"
                            for letter in letters(question)]], ", ")


def wrapped(words, between=" "):
    """On lines of 100 columns at most, indented from the second one on."""
    lines = [words[0]]
    for i, word in enumerate(words[1:]):
        gap = between if i or words[0].strip() else " "
        if len(lines[-1] + gap + word) > 100:
            lines[-1] += gap.rstrip()
            lines.append(f"   {word}")
        else:
            lines[-1] += gap + word
    return "\n".join(lines)


def in_numbers(question, sizes):
    """Its formula, with numbers in place of letters."""
    put = lambda found: number(sizes[found.group()])
    return pretty(re.sub(r"[^\W\d]\w*", put, question.formula))


def pretty(formula):
    return formula.replace("*", "·")


def in_words(value, unit):
    """A value as a person would say it."""
    if abs(value) >= 1e15:
        return f"{value:.3g} {unit}"
    if unit in ("B", "FLOP"):
        return quantity(round(value), unit)
    if unit == "s":
        return f"{1e6 * value:,.4g} µs"
    if unit == "%":
        return f"{value:.2%}"
    return f"{value:.4g} times" if unit == "times" else f"{round(value):,} {unit}"


def derivation(question, sizes):
    """`formula = numbers = value`; on several lines, if it is long."""
    unit = question.unit if question.unit in ("B", "FLOP", "s") else ""
    parts = [pretty(question.formula), f"{in_numbers(question, sizes)} {unit}".strip(),
             in_words(question.value, question.unit)]
    line = " = ".join(parts)
    return line if len(line) <= 96 else "\n   = ".join(parts)


def is_right(answer, question):
    """Within 2%; small counts exactly."""
    value = question.value
    is_count = question.unit not in ("B", "FLOP", "s", "%", "times")
    within = 0.5 if is_count and value < EXACT_BELOW else WITHIN * value
    return abs(answer - value) < within


def off_by(line, answer, question):
    """What is known of a wrong answer. Why it is wrong, only the student knows: a ratio that is
    also the number of ranks may be chance."""
    ratio = answer / question.value
    if question.unit == "times" and abs(ratio * question.value**2 - 1) < 0.01:
        return "the other way round"
    if ratio <= 0:
        return "too small"
    meant = in_the_other_unit(line)
    with contextlib.suppress(ValueError):
        if meant and is_right(understood(meant, question.unit), question):
            return f"too {'large' if ratio > 1 else 'small'}: {meant} would be right"
    times = max(ratio, 1 / ratio)
    how = f"{number(float(f'{times:.3g}'))} times" if times < 1e6 else "over a million times"
    return f"{how} too {'large' if ratio > 1 else 'small'}"


def in_the_other_unit(line):
    """The same number in MiB in place of MB, and so on; "": there is no such unit in it."""
    found = re.fullmatch(r"(.*[^A-Za-z])([kKMGT])(i?)[bB]", line.strip())
    return found and f"{found[1]}{found[2].upper() if not found[3] else found[2]}" + (
        "B" if found[3] else "iB")


# --------------------------------------------------------------------------------- the dialogue

def read_line():
    """A line of standard input, whatever its bytes; raises EOFError at its end."""
    if sys.stdin is None:                                   # closed, by `<&-`
        raise EOFError
    if sys.stdin.isatty():
        print("> ", end="")
    sys.stdout.flush()
    try:
        line = sys.stdin.buffer.readline(10 * LONGEST)      # some input has no end of a line
    except OSError as error:
        refusals.fail(f"standard input: {error.strerror}")
    if not line:
        raise EOFError
    return line.decode(errors="backslashreplace")


def answer_to(question):
    """The line that is answered, and its number; None if it is left open."""
    for _ in range(TRIES):
        line = read_line()
        if not line.strip():
            return None
        try:
            return line.strip(), understood(line, question.unit)
        except ValueError as error:
            print(f"   {error}")
    return None


def ask(case, asked):
    """Ask the questions in turn, up to the end of the input. Returns how many are answered right.
    """
    right = 0
    for i, question in enumerate(asked, start=1):
        print(f"\n{wrapped(f'{i}. {question.text}'.split())}\n{given(question, case.sizes)}")
        try:
            answer = answer_to(question)
        except EOFError:
            print()
            break
        if answer is None:
            print("   The answer:")
        elif is_right(answer[1], question):
            right += 1
            print("   ✓")
        else:
            print(f"   ✗ {in_words(answer[1], question.unit)} is {off_by(*answer, question)}")
        print(f"   {derivation(question, case.sizes)}")
        print(wrapped(["  ", *question.why.split()]))
        if question.row:
            print(f"   in the report of a run: {question.row}")
    return right


def seed_of(student, chapter):
    """The seed that a student's name draws for a chapter."""
    return variants.seed_of(student, f"predict {chapter[:2]}", SEEDS)
