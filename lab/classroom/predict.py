"""Predictions about a run of a chapter: how an answer is read, judged and explained.

An answer is a line: a number with its unit (4.87 MB, 12 kB, 3 MiB, x2, 1/2, 37.5%), or arithmetic
such as 2*3/4*811008*4 B. It is compared with the chapter's own formula.
"""

import ast
import math
import operator
import re
import textwrap

from lab.chapters.question import LETTERS
from lab.run import refusals
from lab.run.words import quantity

WIDTH = 100
WITHIN = 0.02           # of the formula's value
EXACT_BELOW = 1000      # counts
LETTER = r"[^\W\d]\w*"  # of a formula: h, F_blocks, Ψ
LONGEST = 200           # characters of a line that are looked at
INSTRUCTIONS = ("An answer is a number with its unit, such as 4.87 MB, 512 KiB, x2, 1/2, 37.5%, or "
                "arithmetic,\nsuch as 2*3/4*811008*4 B. It is right within 2%, a count below 1,000 "
                "if it is exact.")

# -------------------------------------------------------------------------- arithmetic and units

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
             ast.Div: operator.truediv, ast.Pow: math.pow}
PREFIXES = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
RATIOS = {"": 1, "%": 0.01, "percent": 0.01, "x": 1, "times": 1}
UNITS = {               # of what is asked: {what may stand behind a number: its factor}
    "B": {"byte": 1, "bytes": 1, **{f"{prefix}b": size for prefix, size in PREFIXES.items()},
          "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40},
    "s": {"s": 1, "ms": 1e-3, "µs": 1e-6, "us": 1e-6, "second": 1, "seconds": 1},
    "%": RATIOS, "times": RATIOS}
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
    """The value of a tree of numbers, minus signs and OPERATORS."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -evaluated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluated(node.left), evaluated(node.right))
    raise ValueError("it is no arithmetic")


def scale(word, unit):
    """What a number with this word is multiplied by; None if the word is no such unit."""
    if unit == "B" and word in ("Mb", "Gb", "Tb"):          # bits
        return None
    word = word.lower().replace("μ", "µ")                   # a Greek letter, and a sign of its own
    if unit in UNITS:
        return UNITS[unit].get(word)
    stem = unit.lower().removesuffix("s").removesuffix("e")
    counted = re.fullmatch(rf"([kmgt]?) ?({stem}e?s?)?", word)
    return counted and PREFIXES[counted[1]]


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
    factor = scale(word, unit)
    if factor is None:
        raise ValueError(f"{shown} has no unit that fits; an answer is such as {example}")
    if not math.isfinite(value * factor):
        raise ValueError(f"{shown} is too large; an answer is such as {example}")
    return value * factor


def is_right(answer, question):
    """Within 2%; small counts exactly."""
    is_exact = question.unit not in EXAMPLES and question.value < EXACT_BELOW
    return abs(answer - question.value) < (0.5 if is_exact else WITHIN * question.value)


def off_by(answer, question):
    """How far a wrong answer is off. Why it is wrong, only the student knows: a ratio that is also
    the number of ranks may be chance."""
    ratio = answer / question.value
    if ratio <= 0:
        return "too small"
    times = max(ratio, 1 / ratio)
    factor = number(float(f"{times:.3g}")) if times < 1e6 else "over a million"
    return f"{factor} times too {'large' if ratio > 1 else 'small'}"


# ------------------------------------------------------------------------------------ in words

def given(question, sizes):
    """The sizes in its formula and those that are shown besides, and what they are, in an order
    that gives nothing away."""
    names = re.findall(LETTER, f"{question.formula} {question.also}")
    items = [f"{letter} = {number(sizes[letter])} ({LETTERS[letter]})"
             for letter in LETTERS if letter in names]
    unbroken = ", ".join(item.replace(" ", "\xa0") for item in items)
    return filled(unbroken, "   ").replace("\xa0", " ")


def filled(text, indent=""):
    """On lines of 100 columns at most, indented from the second one on."""
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent="   ",
                         break_on_hyphens=False)


def number(value):
    """811,008; 1.25; 989e12"""
    for power in (12, 9):
        short = f"{value / 10**power:g}e{power}"
        if value >= 10**power and float(short) == value:
            return short
    return f"{value:,g}" if value % 1 else f"{value:,.0f}"


def in_numbers(question, sizes):
    """Its formula, with numbers in place of letters."""
    numbers = re.sub(LETTER, lambda letter: number(sizes[letter.group()]), question.formula)
    return pretty(numbers)


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
    if unit == "times":
        return f"{value:.4g} times"
    return f"{round(value):,} {unit}"


def derivation(question, sizes):
    """`formula = numbers = value`; on several lines, if it is long."""
    unit = question.unit if question.unit in ("B", "FLOP", "s") else ""
    parts = [pretty(question.formula), f"{in_numbers(question, sizes)} {unit}".strip(),
             in_words(question.value, question.unit)]
    line = " = ".join(parts)
    return line if len(line) <= 96 else "\n   = ".join(parts)
