"""Holes in sources of any shape."""

import ast

from hypothesis import given
from hypothesis import strategies as st

from lab.classroom import holes

SIGNATURES = ("{}(x)", "{}(x, *, y={{'a': [1]}}) -> dict", "{}(\n{indent}        x,   # a: b\n"
              "{indent}        y=lambda z: z)")
SHAPES = "", "           # (batch, seq)", "     # not a shape"
BODIES = ("return x", "if x:\n{indent}    return 1\n\n{indent}return 2", "for _ in x:   # why\n"
          "{indent}    pass\n{indent}# a last word", 'y = """two\nlines"""\n{indent}return y',
          "def inner():\n{indent}    return x\n{indent}return inner", "return (  # and\n\n   x)")
BETWEEN = "", "# a comment\n", "N = 1\n", "import math\n\n", "if 1:\n    M = 2\n"


@st.composite
def functions(draw, name, indent=""):
    inside = indent + "    "
    text = indent + "@staticmethod\n" * draw(st.booleans())
    text += indent if text.endswith("\n") else ""
    text += "def " + draw(st.sampled_from(SIGNATURES)).format(name, indent=indent)
    text += ":" + draw(st.sampled_from(SHAPES)) + "\n"
    text += f'{inside}"""What it does: {name}.\n{inside}"""\n' * draw(st.booleans())
    body = draw(st.lists(st.sampled_from(BODIES), min_size=1, max_size=2))
    return text + "".join(f"{inside}{part.format(indent=inside)}\n" for part in body)


@st.composite
def sources(draw):
    """A file with functions and classes, and the names of some of its functions and methods."""
    text, names = '"""A chapter."""\n\n', []
    for number in range(draw(st.integers(1, 4))):
        text += draw(st.sampled_from(BETWEEN)) + "\n" * draw(st.integers(0, 2))
        if draw(st.booleans()):
            names.append(f"f{number}")
            text += draw(functions(names[-1]))
        else:
            text += f"class C{number}:\n    size = 3\n\n"
            for method in "gh"[: draw(st.integers(1, 2))]:
                names.append(f"C{number}.{method}")
                text += draw(functions(method, "    ")) + "\n" * draw(st.booleans())
    return text, draw(st.lists(st.sampled_from(names), min_size=1, unique=True))


@given(sources(), st.text(st.characters(exclude_categories=["C", "Zl", "Zp"]), max_size=200))
def test_what_is_cut_is_grafted_back(drawn, comment):
    source, names = drawn
    holed = source
    for name in names:
        holed = holes.cut(holed, name, comment, f"1.1: {name}")
    tree, whole = ast.parse(holed), ast.parse(source)
    for name in names:
        hole, full = holes.find(tree, name), holes.find(whole, name)
        assert holes.is_hole(hole) and not holes.is_hole(full)
        assert ast.dump(hole.args) == ast.dump(full.args)
        assert ast.get_docstring(hole) == ast.get_docstring(full)
    back = holes.graft(holed, source, names)
    assert ast.dump(ast.parse(back.source)) == ast.dump(whole)
    for first, last, shift in back.shifts:
        ours, theirs = back.source.split("\n"), source.split("\n")
        assert ours[first - 1 : last] == theirs[first - 1 + shift : last + shift]
