"""Typical wrong answers, from tests/chapters/wrong_answers: what students write, in place of what,
and what the grader tells them. They are read as text, since lab/ imports nothing of the tests."""

import ast
import functools
from typing import NamedTuple

from lab import ROOT

FOLDER = ROOT / "tests/chapters/wrong_answers"


class Wrong(NamedTuple):
    right: str              # a piece of the solution
    wrong: str              # what stands there instead
    says: str               # words of what the grader tells


@functools.cache
def read():
    """{number of an exercise: its wrong answers}; {}: there are no tests here."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and node.targets[0].id == "WRONG":
                for number, answers in zip(node.value.keys, node.value.values):
                    found[number.value] = [
                        Wrong(*map(ast.literal_eval, answer.args)) for answer in answers.elts]
    return found
