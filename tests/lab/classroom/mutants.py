"""Small changes to the solutions, made automatically, each of which the checks must find wrong.

    python -m tests.lab.classroom.mutants 02            those of chapter 02 that are graded right
    python -m tests.lab.classroom.mutants 02.4 --each 9     up to nine of an exercise, not two
    python -m tests.lab.classroom.mutants 02.4 --alone  by the Same checks alone, with holes in
                                                        place of all other exercises

A mutant differs in one place: another operator, a constant that is one larger, two arguments
swapped, a statement left out. One that is graded right shows a check that is missing, or computes
the same: then tests/lab/classroom/equal_mutants.py says why.
"""

import argparse
import ast
import copy
import random
import sys
import time
from typing import NamedTuple

from lab.classroom import checks, exercises, grading, holes, students
from lab.classroom.exercise import Run
from tests.lab.classroom.equal_mutants import EQUAL

BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
          ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitXor: ast.Add,
          ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.MatMult: ast.Mult}
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
           ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn,
           ast.NotIn: ast.In}
SYMMETRIC = "min", "max", "promote_types", "equal"     # in what they are given
NAMES = {"min": "max", "max": "min", "amax": "amin", "any": "all", "all": "any"}


class Mutant(NamedTuple):
    number: str             # of the exercise
    function: str
    before: str             # what is replaced, in one line
    after: str
    which: int              # of the same changes in the function, from 1
    chapter: str
    source: str             # of the whole chapter

    @property
    def name(self):
        again = f" ({self.which})" if self.which > 1 else ""
        return f"{self.number} {self.function}: {self.before} -> {self.after}{again}"


# ------------------------------------------------------------------------------------- one change

def changed(node):
    """Yield what may take the place of a node of a function's tree."""
    def but(**fields):
        other = copy.copy(node)
        for name, value in fields.items():
            setattr(other, name, value)
        return other

    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in BINARY:
        yield but(op=BINARY[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
        yield but(ops=[COMPARE[type(node.ops[0])](), *node.ops[1:]])
    if isinstance(node, ast.BoolOp):
        yield but(op=ast.And() if isinstance(node.op, ast.Or) else ast.Or())
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
        yield but(value=not node.value if isinstance(node.value, bool) else node.value + 1)
    if isinstance(node, ast.IfExp):
        yield but(test=ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        if name in NAMES and isinstance(node.ctx, ast.Load):
            yield but(**{"id" if isinstance(node, ast.Name) else "attr": NAMES[name]})
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if len(node.args) > 1 and called not in SYMMETRIC and not any(
                isinstance(arg, ast.Starred) for arg in node.args[:2]):
            yield but(args=[node.args[1], node.args[0], *node.args[2:]])
        if getattr(node.func, "id", "") == "range":
            yield but(args=[*node.args[:-1], ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))])
        for keyword in node.keywords:
            yield but(keywords=[other for other in node.keywords if other is not keyword])
    if isinstance(node, ast.Slice):
        for bound in "lower", "upper":
            if getattr(node, bound):
                yield but(**{bound: None})
                yield but(**{bound: ast.BinOp(getattr(node, bound), ast.Add(), ast.Constant(1))})
    if isinstance(node, ast.Expr | ast.AugAssign) or isinstance(node, ast.Assign) and not all(
            isinstance(target, ast.Name) for target in node.targets):
        yield ast.Pass()


def places(function):
    """The nodes of a function's body, but for its docstring and what is in f-strings."""
    waiting = [node for node in function.body if not holes.is_nothing(node)]
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, ast.JoinedStr):
            waiting += ast.iter_child_nodes(node)


def mutants_of(chapter, exercise):
    """Yield each Mutant of the functions of an exercise."""
    source = exercises.solution(chapter)
    data = source.encode().split(b"\n")
    for name in exercise.functions:
        seen = {}
        for node in places(holes.find(holes.parsed(source), name)):
            for other in changed(node):
                ast.fix_missing_locations(other)
                before, after = (" ".join(ast.unparse(one).split()) for one in (node, other))
                seen[before, after] = seen.get((before, after), 0) + 1
                text = put(data, node, ast.unparse(other))
                yield Mutant(exercise.number, name, before, after, seen[before, after], chapter,
                             text)


def put(lines, node, text):
    """The source, given as lines of bytes, with a text in place of a node."""
    first, last = lines[node.lineno - 1], lines[node.end_lineno - 1]
    if not isinstance(node, ast.stmt) and not isinstance(node, ast.Slice):
        text = f"({text})"
    new = first[:node.col_offset] + text.encode() + last[node.end_col_offset:]
    return b"\n".join([*lines[:node.lineno - 1], new, *lines[node.end_lineno:]]).decode()


def is_python(mutant):
    try:
        compile(mutant.source, "", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def drawn(chapter, exercise, each):
    """So many mutants of an exercise, by its number alone."""
    every = [one for one in mutants_of(chapter, exercise) if is_python(one)]
    return random.Random(exercise.number).sample(every, min(each, len(every)))


# ------------------------------------------------------------------------------------- their grade

def grade(mutant, exercise, alone=False):
    """The mark of a mutant, and what is said. alone: by the Same checks, with holes in place of all
    other exercises, as at home, where there is no solution."""
    file = students.File(mutant.chapter, None, *students.without_faults(mutant.source))
    if not alone:
        return grading.grade_exercise(exercise, file)
    these = [check for check in exercise.checks if not isinstance(check, Run)]
    graft = holes.graft(exercises.with_holes(mutant.chapter), mutant.source, exercise.functions)
    return grading.run(file, graft.source, these, checks.LIMIT, graft.line_of_student)


def main(argv=None):
    parser = argparse.ArgumentParser("tests.lab.classroom.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", nargs="*", help="02, or 02.4; none: all")
    parser.add_argument("--each", type=int, default=2, help="how many of an exercise")
    parser.add_argument("--alone", action="store_true", help="by the Same checks alone")
    parser.add_argument("--said", action="store_true", help="also what is said of the others")
    args = parser.parse_args(argv)
    checks.warm_up()
    count = survivors = 0
    for chapter, those in exercises.chosen(args.exercise).items():
        for exercise in those:
            for mutant in drawn(chapter, exercise, args.each):
                begin = time.monotonic()
                mark, words = grade(mutant, exercise, args.alone)
                survives = mark == grading.RIGHT and mutant.name not in EQUAL
                count, survivors = count + 1, survivors + survives
                if survives or args.said:
                    seconds = time.monotonic() - begin
                    print(f"{mark} {mutant.name}  [{seconds:.1f} s] {words}", flush=True)
    print(f"{count} mutants, {survivors} graded right that are not in EQUAL")
    return survivors > 0


if __name__ == "__main__":
    sys.exit(main())
