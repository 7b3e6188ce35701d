"""Wrong answers to the exercises, as students give them, and what they are told: a file for each
chapter, and one for the kernels, with a dictionary WRONG.

Of each exercise one answer at least: `right`, a piece of the solution that its functions have once,
and `wrong`, what stands there instead. The grader must find it wrong and say the words `says`.
"""

import importlib
import pkgutil
from typing import NamedTuple


class Wrong(NamedTuple):
    right: str
    wrong: str
    says: str


WRONG = {}
for _, name, _ in pkgutil.iter_modules(__path__, f"{__name__}."):
    WRONG |= importlib.import_module(name).WRONG
