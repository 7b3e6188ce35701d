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


def functions(tree):
    """The names of all functions and methods."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{inner.name}" for inner in node.body
                        if isinstance(inner, ast.FunctionDef))


@pytest.mark.parametrize("path", sample(CHAPTERS), ids=lambda path: path.stem)
def test_every_function_can_be_cut_and_grafted_back(path):
    holed = source = path.read_text()
    names = list(functions(ast.parse(source)))
    for name in names:
        holed = holes.cut(holed, name, "a question? " * 20, f"1.1: {name}")
    tree = ast.parse(holed)
    assert names == [name for name in functions(tree) if holes.is_hole(holes.find(tree, name))]

    back = holes.graft(holed, source, names)
    tree, ours = ast.parse(back.source), ast.parse(source)
    assert ast.dump(tree) == ast.dump(ours) and len(back.shifts) == len(names)
    for name in names:
        line = holes.find(tree, name).end_lineno
        assert back.line_of_student(line) == holes.find(ours, name).end_lineno, name


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


def test_helpers_and_imports_come_along_behind_what_they_follow_in_the_students_file():
    student = '''import math, torch
from torch import nn as layers, nn

SIZE = 5                                # known: stays with the solution
LIMIT = 9
print("no definition")

def helper(x):
  return x * LIMIT

class Block(nn.Module):
  @staticmethod
  def forward(x, y):
    text = """
not indented
"""

    return helper(x)

  def added(self):
    pass

class Other(Block):
    pass
'''
    graft = holes.graft(SOLUTION, student, ["Block.forward"])
    pieces = ("import math\n", "from torch import nn as layers\n", "SIZE = 4\n", "LIMIT = 9\n",
              "  return x * LIMIT\n", "class Block(nn.Module):\n", "        super().__init__()\n",
              '"""\nnot indented\n"""', "return helper(x)\n", "def added(self):\n",
              "class Other(Block):\n", "def last():\n")
    places = [graft.source.find(piece) for piece in pieces]
    assert -1 not in places and places == sorted(places) and ast.parse(graft.source)
    assert not any(text in graft.source for text in ("SIZE = 5", "no definition", "double(x) + y"))
    theirs, lines = student.split("\n"), graft.source.split("\n")
    found = {line: graft.line_of_student(line) for line in range(1, len(lines) + 1)}
    for text in ("LIMIT = 9", "  return x * LIMIT", "not indented", "class Other(Block):"):
        assert found[lines.index(text) + 1] == theirs.index(text) + 1
    assert found[1] is None and found[len(lines) - 2] is None
