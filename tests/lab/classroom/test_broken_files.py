"""What the grader reads of a file that is no Python: the functions that are."""

import re

import pytest

from lab.classroom import grade, holes

BROKEN = '''import math


def one(x):
    return x


class Two:
    """Of three."""

    @staticmethod
    def three(x):
        return {}

    def four(self):
        return 4


def five():
    return 5
'''


@pytest.mark.parametrize(("wrong", "name", "words"), [
    ("x +", "Two.three", "line 13: invalid syntax"),
    ("(x", "Two.three", r"line 13: '\(' was never closed"),
    ("'x", "Two.three", "line 13: unterminated string literal .*"),
    ("'''x", "Two.three", "line 13: unterminated triple-quoted string literal .*"),
    ("[x)", "Two.three", r"line 13: closing parenthesis '\)' does not match .*"),
    ("x\n      y", "Two.three", "line 14: unindent does not match any outer indentation level"),
    ("x\n        if x:", "Two.three",
     "line 16: expected an indented block after 'if' statement on line 14"),
    ("x\n\n    def more(self):", "Two.more",
     r"line 17: expected an indented block after function definition on line 15"),
    ("x\n\n    nonlocal x", "Two", "line 15: no binding for nonlocal 'x' found"),
    ("x\x00", "", "source code string cannot contain null bytes|.*null bytes"),
], ids=["end", "bracket", "string", "text", "brackets", "indent", "if", "def", "class", "null"])
def test_a_function_that_is_no_python_does_not_sink_the_others(wrong, name, words):
    source = BROKEN.format(wrong)
    if not name:
        with pytest.raises(grade.Unreadable, match=words):
            grade.without_faults(source)
        return
    text, tree, faults = grade.without_faults(source)
    assert list(faults) == [name] and re.fullmatch(words, faults[name]), faults
    assert holes.find(tree, "one") and holes.find(tree, "five")
    assert bool(holes.find(tree, "Two.four")) == (name != "Two")
    assert text.count("\n") == source.count("\n")       # so that lines keep their numbers


@pytest.mark.parametrize(("text", "words"), [
    ("return 1\n", "line 1: 'return' outside function"), ("x = = 1\n", "line 1: invalid syntax"),
    ("def f():\n    pass\n\nx = (\n", r"line 4: '\(' was never closed")])
def test_what_is_wrong_outside_of_functions_is_wrong_with_the_file(text, words):
    with pytest.raises(grade.Unreadable, match=words):
        grade.without_faults(text)
