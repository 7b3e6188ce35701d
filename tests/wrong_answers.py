"""Wrong answers to the exercises, as students give them, and what they are told.

Of each exercise one answer at least: `right`, a piece of the solution that its functions have once,
and `wrong`, what stands there instead. The grader must find it wrong and say the words `says`.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    right: str
    wrong: str
    says: str


WRONG = {
    # 01
    # 02
    # 03
    # 04
    "04.2": [Wrong("return gradient, None", "return summed(gradient, dist.group.WORLD), None",
                   "4 is the number of ranks")],
    # 05
    # 06
    # 07
    # 08
    # 09
    # elu
    # layernorm
    # flash_attention
}
