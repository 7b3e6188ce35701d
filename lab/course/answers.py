"""Typical wrong answers, from tests/faults: what students write, and what the grader tells them.

The tables are read as text, since lab/ imports nothing of the tests.
"""

import ast
import functools
from typing import NamedTuple

from lab import ROOT

FOLDER = ROOT / "tests/faults"


class Wrong(NamedTuple):
    right: str              # a piece of the solution
    wrong: str              # what stands there instead
    says: str               # words of what the grader tells


@functools.cache
def read():
    """{number of an exercise: its wrong answers}; {}: there are no tests here."""
    found = {}
    for path in sorted(FOLDER.glob("[!_]*.py")):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) != "Fault":
                continue
            right, wrong, *seen_by = call.args
            for seen in seen_by:
                if ast.unparse(seen.func) == "Graded":
                    number, says = map(ast.literal_eval, seen.args)
                    answer = Wrong(ast.literal_eval(right), ast.literal_eval(wrong), says)
                    found.setdefault(number, []).append(answer)
    return found
