"""Which collectives a product of sharded matrices takes, forward and backward, and what they send.

    python -m lab.sharding "A[I_X, J] B[J, K_Y]"
    python -m lab.sharding "A[I, J_X] B[J_X, K] -> C[I_X, K]" --sizes I=4096,J=1024,K=1024
    python -m lab.sharding "In[B_X, D_Y] W[D_X, F_Y] -> Tmp[B_X, F_Y]" --mesh X=16,Y=4

This is the scaling book's notation. Of A[I_X, J], axis X of the mesh cuts the rows. Of A[I_XY, J],
X cuts them, and Y cuts each part. C[I, K]{U_X} is in parts of a sum over X. Where no C is given, it
is cut as the rows of the first matrix and the columns of the second are, by each axis once.

Printed is the way on which no multiplication is repeated and a rank sends least. Behind each step
stand its payload, an all_gather's output or a reduce_scatter's input, and what a rank sends by a
ring. Below are other ways: what they send, and where ranks repeat each other's multiplications.

The rules, and how they are held to PyTorch's DTensor: lab/typecheck/sharding.py.
"""

import math
import re
import sys
import textwrap
from typing import NamedTuple

from common import Refused
from lab.cli import commands, refusals
from lab.cli.words import quantity
from lab.typecheck import sharding

EXAMPLE = "A[I_X, J] B[J, K_Y]"
RANKS, SIZE, WIDTH = 4, 8192, 2         # of an axis, of a dimension, of a number
AXES = 2                                # of a mesh
OTHERS = 3                              # ways that are printed beside the best
CUT = r"\s*([A-Za-z]+)(?:_\{?([A-Z]+)\}?)?\s*"
MATRIX = rf"([A-Za-z]\w*)\[{CUT},{CUT}\]"
PRODUCT = re.compile(rf"\s*{MATRIX}\s*(?:[·*](?:_\w+)?)?\s*{MATRIX}(?:\s*(?:->|→)\s*{MATRIX})?\s*")


class Product(NamedTuple):
    names: dict             # {"A": "In", "B": "W", "C": "Tmp"}
    dimensions: dict        # {"I": "B", "J": "D", "K": "F"}
    axes: list              # "X", "Y"
    a: dict                 # {axis: "I", "J" or None}, and so of B and of C
    b: dict
    c: dict


# ------------------------------------------------------------------------------------- the notation

def product(text):
    """An argparse type: the Product that a text names."""
    found = PRODUCT.fullmatch(text)
    if not found:
        raise Refused(f"{text!r} is no product of two matrices, as in {EXAMPLE}", EXAMPLE)
    words = found.groups()
    matrices = [words[i:i + 5] for i in (0, 5, 10) if words[i]]
    (_, i, _, j, _), (_, again, _, k, _), *third = matrices
    if again != j or len({i, j, k}) < 3:
        raise Refused(f"the second dimension of {words[0]} is the first of {words[5]}, and the "
                      "others have names of their own", EXAMPLE)
    if third and (third[0][1], third[0][3]) != (i, k):
        raise Refused(f"the product's dimensions are {i} and {k}", EXAMPLE)
    cuts = [cut or "" for matrix in matrices for cut in matrix[2::2]]
    axes = sorted(set("".join(cuts))) or ["X"]          # which cuts nothing
    if len(axes) > AXES:
        raise Refused(f"{', '.join(axes)} are more than {AXES} axes", EXAMPLE)
    a, b, *c = (lies(axes, matrix, both)
                for matrix, both in zip(matrices, sharding.DIMENSIONS.values()))
    usual = {axis: "I" if a[axis] == "I" else "K" if b[axis] == "K" else None for axis in axes}
    names = dict(zip("ABC", [matrix[0] for matrix in matrices] + ["C"]))
    return Product(names, {"I": i, "J": j, "K": k}, axes, a, b, c[0] if c else usual)


def lies(axes, matrix, both):
    """{axis: the dimension, of these both, that it cuts}."""
    name, _, first, _, second = matrix
    cuts = [(axis, dimension) for dimension, cut in zip(both, (first, second))
            for axis in cut or ""]
    if len(dict(cuts)) < len(cuts):
        raise Refused(f"an axis cuts {name} once", EXAMPLE)
    if any(cut and list(cut) != sorted(cut) for cut in (first, second)):
        raise Refused(f"the axes of a mesh cut {name} in their order, as in I_XY", EXAMPLE)
    return dict.fromkeys(axes) | dict(cuts)


def written(asked, tensor, cuts):
    """A matrix, or its gradient, as the book writes it."""
    along = lambda cut: "".join(axis for axis in asked.axes if cuts[axis] == cut)
    shown = [asked.dimensions[one] + (f"_{along(one)}" if along(one) else "")
             for one in sharding.DIMENSIONS[tensor[-1]]]
    sums = along(sharding.PARTIAL)
    return f"{named(asked, tensor)}[{', '.join(shown)}]" + (f"{{U_{sums}}}" if sums else "")


def named(asked, tensor):
    return tensor.replace(tensor[-1], asked.names[tensor[-1]])


# --------------------------------------------------------------------------------------- the answer

def passes(asked, way):
    """Yield ("forward" or "backward", the product as it is written, steps before it and after)."""
    of = lambda tensor, steps: [step for step in steps if step.tensor == tensor]
    whole = sharding.whole(way.c)
    lies = {"A": way.a, "B": way.b, "C": way.c, "dC": whole,
            "dA": sharding.multiplied(whole, way.b, "K"),
            "dB": sharding.multiplied(way.a, whole, "I")}
    shown = {tensor: written(asked, tensor, cuts) for tensor, cuts in lies.items()}
    yield ("forward", f"{shown['C']} = {shown['A']} · {shown['B']}",
           of("A", way.forward) + of("B", way.forward), of("C", way.forward))
    yield ("backward", f"{shown['dA']} = {shown['dC']} · {shown['B']}ᵀ",
           of("dC", way.backward), of("dA", way.backward))
    yield "", f"{shown['dB']} = {shown['A']}ᵀ · {shown['dC']}", [], of("dB", way.backward)


def in_words(asked, step):
    return f"{step.operator} {named(asked, step.tensor)} over {step.axis}"


def told(size):
    return quantity(round(size)) if size else "nothing"


def report(asked, sizes, mesh, width):
    """Yield the lines of the cheapest way, and of others."""
    best = sharding.cheapest(asked.a, asked.b, asked.c, sizes, mesh, width)
    order = lambda way: (sharding.repeats(asked.a, asked.b, way, mesh), way.wire,
                         len(way.forward) + len(way.backward))
    a, b, c = (written(asked, tensor, getattr(asked, tensor.lower())) for tensor in "ABC")
    yield f"{a} · {b} → {c}"
    yield (", ".join(f"{asked.dimensions[one]} {size:,}" for one, size in sizes.items())
           + "".join(f", {axis} of {ranks} ranks" for axis, ranks in mesh.items())
           + f", {width} bytes a number")
    yield f"{'':55}{'payload':>14}{'a rank sends':>16}"
    for name, multiplication, before, after in passes(asked, best):
        lines = [*(row(asked, step) for step in before), multiplication,
                 *(row(asked, step) for step in after)]
        yield from (f"{name if i == 0 else '':10}{line}" for i, line in enumerate(lines))
    yield f"in all a rank sends {told(best.wire)}"
    ways = sorted(sharding.ways(asked.a, asked.b, asked.c, sizes, mesh, width), key=order)
    others = [way for way in ways if way != best]
    if others:
        yield f"other ways ({len(others)}):"
    for way in others[:OTHERS]:
        repeats, *_ = order(way)
        again = f", and {repeats} ranks do each multiplication" if repeats > 1 else ""
        steps = [", ".join(in_words(asked, step) for step in part) or "nothing"
                 for part in (way.forward, way.backward)]
        yield textwrap.fill(f"{told(way.wire)}{again}: forward {steps[0]}; backward {steps[1]}",
                            100, initial_indent="  ", subsequent_indent="    ")


def row(asked, step):
    return f"{in_words(asked, step):45}{told(step.payload):>14}{told(step.wire):>16}"


# --------------------------------------------------------------------------------- the command line

def numbers(lowest, below, example):
    """An argparse type: {name: number}, of a text such as X=16,Y=4."""
    convert = commands.number(int, lowest, below, lowest)

    def pairs(text):
        found = [re.fullmatch(r"\s*([A-Za-z]+)=(\d+)\s*", part) for part in text.split(",")]
        if not all(found):
            raise Refused(f"{text!r} is no list of names and numbers, as in {example}", example)
        try:
            return {one[1]: convert(one[2]) for one in found}
        except Refused as refused:
            raise Refused(refused.args[0], example) from None

    return pairs


def put_in(flag, given, known, usual):
    """Those that are given, and the usual number of others."""
    for name in given:
        if name not in known:
            raise Refused(f"{flag}: the product has no {name}, but {', '.join(known)}",
                          f"without {flag}")
    return {name: given.get(name, usual) for name in known}


def parse(argv):
    parser = commands.Parser("-m lab.sharding", description=__doc__)
    add = parser.add_argument
    add("product", type=product, nargs="?", default=EXAMPLE, help=f'default: "{EXAMPLE}"')
    add("--sizes", type=numbers(1, 2**31, "I=8192"), default={}, metavar="I=8192,...",
        help=f"of dimensions; default: {SIZE:,} each")
    add("--mesh", type=numbers(2, 2**16, "X=4"), default={}, metavar="X=4,...",
        help=f"ranks of each axis; default: {RANKS} each")
    add("--width", type=commands.number(int, 1, 9, WIDTH), default=WIDTH,
        help=f"bytes of a number; default: {WIDTH}")
    args = parser.parse_args(argv)
    asked = args.product
    sizes = put_in("--sizes", args.sizes, list(asked.dimensions.values()), SIZE)
    args.mesh = put_in("--mesh", args.mesh, asked.axes, RANKS)
    ranks = math.prod(args.mesh.values())
    for name, size in sizes.items():
        if size % ranks:
            near = {name: -(-size // ranks) * ranks for name, size in sizes.items()}
            raise Refused(f"{name} = {size} is no multiple of the {ranks} ranks of the mesh, each "
                          "of which may have a part",
                          "--sizes " + ",".join(f"{one}={size}" for one, size in near.items()))
    args.sizes = {one: sizes[name] for one, name in asked.dimensions.items()}
    return args


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv, alone=True)
    print(*report(args.product, args.sizes, args.mesh, args.width), sep="\n")
    return 0


if __name__ == "__main__":
    commands.program(main)
