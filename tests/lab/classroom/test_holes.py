"""Holes in a chapter's source, and a student's functions in their place."""

import ast

import pytest

from lab.classroom import holes
from tests.conftest import ROOT, sample

CHAPTERS = sorted([*ROOT.glob("[0-9][0-9]_*.py"), *ROOT.glob("kernels/[a-z]*.py")])

SOLUTION = '''"""A chapter."""

import torch
from torch import nn

SIZE = 4


def double(x):                          # (batch, dim): twice
    """Twice x."""
    return 2 * x                        # the answer
    # Its last words.


class Block(nn.Module):
    """Of two."""

    def __init__(self):
        super().__init__()

    @staticmethod
    def forward(
        x,
        y={"a": lambda: 1},
    ) -> dict[str, int]:                # adds
        return double(x) + y


def last():
    return Block()
'''


@pytest.mark.parametrize("path", sample(CHAPTERS), ids=lambda path: path.stem)
def test_every_function_can_be_cut_and_grafted_back(path):
    holed = source = path.read_text()
    names = [name for name, _ in holes.functions(ast.parse(source))]
    for name in names:
        holed = holes.cut(holed, name, "a question? " * 20, f"1.1: {name}")
    tree = ast.parse(holed)
    assert all(holes.is_hole(holes.find(tree, name)) for name in names)

    back = holes.paste(holed, source, names)
    tree, ours = ast.parse(back.source), ast.parse(source)
    assert ast.dump(tree) == ast.dump(ours)
    assert not any(back.line_before(holes.find(tree, name).end_lineno) for name in names)


def test_a_hole_keeps_signature_docstring_and_shapes_and_nothing_of_the_answer():
    holed = holes.cut(SOLUTION, "double", "4.1: What is twice x?", "4.1: double")
    assert holed == SOLUTION.replace('''
    return 2 * x                        # the answer
    # Its last words.
''', '''
    # 4.1: What is twice x?
    raise NotImplementedError("4.1: double")
''')


def test_a_hole():
    for body, is_hole in {
            "raise NotImplementedError": True, "raise NotImplementedError('4.2')": True,
            "'Words.'\n    pass": True, "...": True, "return": False,
            "x = 1\n    raise NotImplementedError": False}.items():
        node = ast.parse(f"def f():\n    {body}").body[0]
        assert holes.is_hole(node) == is_hole, body


def test_what_is_not_pasted_stays_as_the_student_wrote_it_and_knows_its_line():
    student = '''import math
from torch import nn

def helper(x):
  return x * math.pi

class Block(nn.Module):
    @staticmethod
    def forward(x, y):
        return helper(x)

def double(x):
    raise NotImplementedError
# The end.
'''
    pasted = holes.paste(student, SOLUTION, ["double", "last"])  # it has no `last`
    theirs, lines = student.split("\n"), pasted.source.split("\n")
    assert ast.parse(pasted.source) and "return 2 * x" in pasted.source
    assert "raise" not in pasted.source and "def last" not in pasted.source
    for number, line in enumerate(lines, start=1):
        before = pasted.line_before(number)
        assert theirs[before - 1] == line if before else line in SOLUTION.split("\n")
    assert pasted.line_before(lines.index("# The end.") + 1) == theirs.index("# The end.") + 1
