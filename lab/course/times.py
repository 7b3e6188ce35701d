"""How long the parts of a week take. These are estimates, made of what is read and written: nobody
has measured a class."""

import ast
import functools

from lab import ROOT
from lab.classroom import holes
from lab.classroom.exercises import EXERCISES, short, solution
from lab.course.week import TABLE, room_of

WORDS = 40              # of a lesson, read in a minute
LINES = 6               # of code, read in a minute
BEFORE = {1: 5, 2: 15, 3: 40}   # minutes of an exercise until somebody writes, by its level
EACH_LINE = 2           # minutes to write a line of the solution, and to see it run
PREDICTION = 20         # minutes of five predictions
HUNT = {"easy": 40, "hard": 60}
PROMISED = 6, 8         # hours of required work in a week, beside its lecture
LECTURE = 90            # minutes
BUILDS_ON = {           # {chapter: those whose ideas it builds on}
    "01": "00", "02": "00 01", "03": "02", "04": "00 01", "05": "04", "06": "00 01", "07": "00 01",
    "08": "02", "09": "03 05 06 07 08", "10": "01 02 03 04 05 06 07 08", "11": "03 04",
    "elu": "01", "matmul": "01", "layernorm": "elu", "swiglu": "elu", "fp8": "matmul",
    "flash_attention": "06 matmul", "grouped_matmul": "08", "duality": "04", "sharding": "04"}


def in_fives(minutes):
    return 5 * round(minutes / 5) or 5


def body_of(node):
    """The statements of a function, without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def nodes_of(number):
    """The functions of an exercise, in the solution."""
    file, exercise = TABLE[number]
    tree = holes.parsed(solution(file))
    return [holes.find(tree, name) for name in exercise.functions]


@functools.cache
def lines_to_write(number):
    """Lines of code of an exercise's solution, without blank ones, comments and docstrings."""
    lines = solution(TABLE[number][0]).split("\n")
    return sum(bool(lines[at].strip()) and not lines[at].lstrip().startswith("#")
               for node in nodes_of(number)
               for at in range(body_of(node)[0].lineno - 1, node.end_lineno))


def of_exercise(number):
    """Minutes."""
    level = TABLE[number][1].level
    return in_fives(BEFORE[level] + EACH_LINE * lines_to_write(number))


@functools.cache
def of_file(name):
    """Minutes that it takes to read a file."""
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    lesson, below = ast.get_docstring(tree), text.split("\n")[tree.body[0].end_lineno:]
    lines = sum(bool(line.strip()) for line in below)
    return in_fives(len(lesson.split()) / WORDS + lines / LINES)


def of_week(week):
    """Minutes of required work: {what: minutes}."""
    return {"reading": sum(map(of_file, week.reads)),
            "exercises": sum(map(of_exercise, week.required)),
            "hunt": HUNT[week.hunt.level], "prediction": PREDICTION}


def in_hours(minutes):
    """390 to "6.5 h"."""
    return f"{minutes / 60:.1f} h"


# ---------------------------------------------------------------------------------- prerequisites

@functools.cache
def calls(number):
    """The exercises whose functions the solution of this one calls, in the same file. A method's
    name says which one it is if no other exercise has it."""
    file, exercise = TABLE[number]
    written = [(name.split(".")[-1], other.number) for other in EXERCISES[file]
               for name in other.functions]
    names = [name for name, _ in written]
    owners = {name: owner for name, owner in written if names.count(name) == 1}
    called = {getattr(node.func, "id", getattr(node.func, "attr", None))
              for function in nodes_of(number) for node in ast.walk(function)
              if isinstance(node, ast.Call)}
    found = {owners[name] for name in called & owners.keys()} - {number}
    return tuple(other.number for other in EXERCISES[file] if other.number in found)


def builds_on(room):
    """The chapters to have read before this one."""
    return tuple(BUILDS_ON.get(room, "").split())


def before(week):
    """The chapters to have read before a week: what those build on that it asks for."""
    rooms = sorted({room_of(number) for number in week.required})
    read = set(map(short, week.reads))
    return sorted({other for room in rooms for other in builds_on(room)} - read)
