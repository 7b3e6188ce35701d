"""Which collectives a product of sharded matrices needs, forward and backward, and what they send.

    python -m lab.sharding "A[I_X, J] B[J, K_Y]"
    python -m lab.sharding "A[I, J_X] B[J_X, K] -> C[I_X, K]" I=4096 X=16

The notation is the scaling book's: axis X of the mesh cuts the rows of A[I_X, J]. In A[I_XY, J], X
cuts them, and Y cuts each part. Without a C, it's cut like the rows of A and the columns of B.
Dimensions have 8,192 numbers of 2 bytes, and axes 4 ranks, unless you set them (I=4096 X=16). If
the ranks don't divide a dimension, you get the mean of their bytes.

Each row shows a step, its payload (an all_gather's output, a reduce_scatter's input), and what a
rank sends in a ring. The lesson is in lab/chapters/04/sharding.py.
"""

import re
import sys

from common import Refused
from lab import chapters
from lab.run import commands, refusals
from lab.run.words import quantity

EXAMPLE = "A[I_X, J] B[J, K_Y]"
CUT = r"(?:_(X?Y?))?"
PRODUCT = re.compile(rf"A\[I{CUT}, *J{CUT}\] *B\[J{CUT}, *K{CUT}\]"
                     rf"(?: *-> *(C)\[I{CUT}, *K{CUT}\])?")
SIZES, MESH = {"I": 8192, "J": 8192, "K": 8192}, {"X": 4, "Y": 4}


def product(text):
    """An argparse type: the layouts of A, B and C, each {axis: the dimension that it cuts}."""
    match = PRODUCT.fullmatch(text.strip())
    if not match:
        raise Refused(f"{text!r} isn't a product like {EXAMPLE}", EXAMPLE)
    *cuts, c, rows, columns = match.groups("")
    if not c:                                           # an axis that cuts I can't cut K as well
        rows, columns = cuts[0], "".join(axis for axis in cuts[3] if axis not in cuts[0])
    pairs = [("IJ", *cuts[:2]), ("JK", *cuts[2:]), ("IK", rows, columns)]
    for dimensions, *both in pairs:
        if set.intersection(*map(set, both)):
            raise Refused(f"an axis can't cut both {' and '.join(dimensions)}", EXAMPLE)
    axes = sorted(set("".join([*cuts, rows, columns]))) or ["X"]
    return [dict.fromkeys(axes) | dict.fromkeys(one, first) | dict.fromkeys(other, second)
            for (first, second), one, other in pairs]


def setting(text):
    """An argparse type: (name, number) of I=4096."""
    defaults, (name, _, value) = SIZES | MESH, text.partition("=")
    if name not in defaults:
        raise Refused(f"{text!r} sets none of {', '.join(defaults)}", "X=16")
    try:
        return name, commands.number(int, 2, 2**31, defaults[name])(value)
    except Refused as refused:
        raise Refused(refused.args[0], f"{name}={defaults[name]}") from None


def parse(argv):
    """The command line; raises Refused."""
    parser = commands.Parser("-m lab.sharding", description=__doc__)
    parser.add_argument("product", type=product, nargs="?", default=EXAMPLE,
                        help=f'default: "{EXAMPLE}"')
    parser.add_argument("settings", type=setting, nargs="*", default=[], metavar="NAME=NUMBER",
                        help="length of I, J or K; ranks of X or Y")
    args = parser.parse_args(argv)
    settings = dict(args.settings)
    args.mesh = {axis: settings.get(axis, MESH[axis]) for axis in args.product[0]}
    args.sizes = {name: settings.get(name, SIZES[name]) for name in SIZES}
    for name in settings.keys() - args.mesh.keys() - args.sizes.keys():
        raise Refused(f"the product has no axis {name}", f"without {name}={settings[name]}")
    return args


def written(name, dimensions, layout):
    """A matrix in the book's notation."""
    words = []
    for dimension in dimensions:
        cuts = "".join(axis for axis in layout if layout[axis] == dimension)
        words.append(f"{dimension}_{cuts}".rstrip("_"))
    return f"{name}[{', '.join(words)}]"


def report(layouts, sizes, mesh):
    """Print the steps of the cheapest way."""
    way = chapters.rooms_with("sharding")["04"].cheapest(*layouts, sizes, mesh)
    a, b = written("A", "IJ", way.a), written("B", "JK", way.b)
    print(f"{f'{a} times {b}':44}{'payload':>12}{'a rank sends':>16}")
    for name, steps in ("forward", way.forward), ("backward", way.backward):
        for step in steps:
            print(f"{name:10}{f'{step.operator} {step.tensor} over {step.axis}':34}"
                  f"{quantity(round(step.payload)):>12}{quantity(round(step.wire)):>16}")
    print(f"{'in all':56}{quantity(round(way.wire)):>16}")


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    report(args.product, args.sizes, args.mesh)
    return 0


if __name__ == "__main__":
    commands.program(main)
