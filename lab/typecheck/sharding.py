"""Products of sharded matrices: which collectives C[I, K] = A[I, J] · B[J, K] takes, and what they
send, forward and backward.

    python -m lab.sharding "A[I_X, J] B[J, K_Y]"        asks it of any two

An axis of the mesh cuts at most one dimension of a tensor: that is how the tensor lies along it.
None says that all ranks of the axis have the same, PARTIAL that they have parts of a sum. The
scaling book writes A[I_X, J] where X cuts I, and {U_X} for parts of a sum. Along one axis there are
nine pairs:

    A      B      first             C          backward                as in
    -      -                        -
    I      -                        I          all_reduce dB           dp
    -      K                        K          all_reduce dA           f of chapter 04
    J      J                        PARTIAL                            g of chapter 04
    J      -      all_gather A      -          slice dA
    -      J      all_gather B      -          slice dB
    I      J      all_gather B      I          reduce_scatter dB       ZeRO-3
    J      K      all_gather A      K          reduce_scatter dA       chapter 05, into a sub-layer
    I      K      all_gather one    K or I     reduce_scatter it

The last five cannot be multiplied as they lie. A rank that has a part of J in A, and all of J in B,
has nothing to multiply most of B with. And of an axis that cuts I and K, each rank would have a
block on the diagonal of C, and nobody the others.

Parts of a sum become whole by an all_reduce, or cut by a reduce_scatter, which sends half. Backward
are two products of the same kind, dA[I, J] = dC[I, K] · Bᵀ, over K, and dB[J, K] = Aᵀ · dC, over I:
the same rule says what they need. What was gathered is summed, and what was summed is gathered, or
handed on.

In two of the five each rank computes all of C. There is another way: to slice B along J, which
sends nothing, and to sum C. `cheapest` lets no axis that cuts something repeat a multiplication,
and takes of the other ways the one that sends least. Which one that is, sizes decide.

Axes meet in two places. A tensor that Y cuts, too, is smaller, and so are its messages over X. And
where both cut the same dimension, X cuts first and Y each part: X alone cannot be gathered, since
the rows would not lie one after the other. So `move` looks for the cheapest path of steps.

Each step is held to PyTorch's DTensor, by values, calls and bytes: 81 pairs of A and B on two axes,
and nine ways in which C may lie. DTensor alone, asked for A @ B and then for C, chooses for each
operator by itself. On 2 x 2 ranks it sends as much in 142 of these 729 cases and more in 575. In 12
it sends less, and its ranks repeat multiplications.

Source: Austin et al., How To Scale Your Model (2025), part 3; part 5, appendix A.
"""

import heapq
import itertools
import math
from typing import NamedTuple

PARTIAL = "partial"
DIMENSIONS = {"A": "IJ", "B": "JK", "C": "IK"}


class Forbidden(Exception):
    """Two tensors that cannot be multiplied as they lie."""


class Step(NamedTuple):
    """A collective on a tensor, or a gradient, over an axis, and how it lies along that then. Bytes
    of a rank: of its all_gather's output or reduce_scatter's input, and on the wire by a ring."""
    operator: str
    tensor: str
    axis: str
    to: str | None
    payload: float
    wire: float


class Way(NamedTuple):
    """How A and B lie when they are multiplied, and C then, {axis: dimension}; and all steps."""
    a: dict
    b: dict
    c: dict
    forward: list
    backward: list

    @property
    def wire(self):
        return sum(step.wire for step in [*self.forward, *self.backward])


# ----------------------------------------------------------------------------------- along one axis

def product(a, b, contracted="J"):
    """How the product lies along an axis, of two tensors that it cuts along a and b; None: it cuts
    no dimension. Raises Forbidden where a rank could not multiply what it has."""
    if a == contracted and b == contracted:
        return PARTIAL
    if contracted in (a, b):
        raise Forbidden(f"one has all of {contracted}, and one a part")
    if a and b:
        raise Forbidden(f"one axis would cut {a} and {b}")
    return a or b


def collective(found, wanted):
    """What takes a tensor from one way to lie along an axis to another; None: nothing."""
    if found == wanted:
        return None
    if found == PARTIAL:
        return "reduce_scatter" if wanted else "all_reduce"
    if wanted is None:
        return "all_gather"
    return "slice" if found is None else "all_to_all"


def wire_bytes(operator, payload, ranks):
    """That a rank sends, by a ring. A slice sends nothing."""
    times = {"all_reduce": 2, "slice": 0}.get(operator, 1)
    return times * (ranks - 1) / ranks * payload


# ------------------------------------------------------------------------------------- along a mesh

def bytes_of(tensor, lies, sizes, mesh, width):
    """Of a rank's part of a tensor. sizes: {dimension: numbers}; mesh: {axis: ranks}."""
    parts = math.prod(mesh[axis] for axis, cut in lies.items() if cut not in (None, PARTIAL))
    return width * math.prod(sizes[dimension] for dimension in DIMENSIONS[tensor]) / parts


def steps_from(tensor, lies, sizes, mesh, width, name):
    """Yield (step, how the tensor lies behind it) of all that one collective can do. The axes of
    the mesh cut a dimension in their order: where an inner one cuts it, an outer one cannot."""
    axes = list(mesh)
    for axis in axes:
        inner = {lies[other] for other in axes[axes.index(axis) + 1:]} - {None, PARTIAL}
        for wanted in (None, *DIMENSIONS[tensor]):
            operator = collective(lies[axis], wanted)
            if operator and not inner & {lies[axis], wanted}:
                there = lies | {axis: wanted}
                payload = max(bytes_of(tensor, one, sizes, mesh, width) for one in (lies, there))
                wire = wire_bytes(operator, payload, mesh[axis])
                yield Step(operator, name, axis, wanted, payload, wire), there


def move(tensor, found, wanted, sizes, mesh, width, name=None):
    """Steps from one way to lie on the mesh to another, on which a rank sends least; the fewest of
    such. name: of the tensor's gradient."""
    order = itertools.count()                           # of what costs the same, what came first
    queue, done = [(0, 0, next(order), found, [])], []
    while True:
        wire, count, _, lies, steps = heapq.heappop(queue)
        if lies == wanted:
            return steps
        if lies not in done:
            done.append(lies)
            for step, there in steps_from(tensor, lies, sizes, mesh, width, name or tensor):
                heapq.heappush(queue, (wire + step.wire, count + 1, next(order), there,
                                       [*steps, step]))


def multiplied(a, b, contracted="J"):
    """How the product lies on the mesh."""
    return {axis: product(a[axis], b[axis], contracted) for axis in a}


def whole(lies):
    """The same, with every sum done."""
    return {axis: None if cut == PARTIAL else cut for axis, cut in lies.items()}


def way(a, b, c, at, sizes, mesh, width=2):
    """The Way from a and b to c, by multiplying at[0] and at[1]. Raises Forbidden if these cannot
    be multiplied."""
    (a_there, b_there), to = at, (sizes, mesh, width)
    found = multiplied(a_there, b_there)
    forward = [*move("A", a, a_there, *to), *move("B", b, b_there, *to), *move("C", found, c, *to)]

    before = whole(found)                               # a part of a sum has the sum's gradient
    of_a, of_b = multiplied(before, b_there, "K"), multiplied(a_there, before, "I")
    backward = [*move("C", c, before, *to, "dC"), *move("A", of_a, a, *to, "dA"),
                *move("B", of_b, b, *to, "dB")]
    return Way(a_there, b_there, found, forward, backward)


def ways(a, b, c, sizes, mesh, width=2):
    """Yield all Ways from A and B to C that lie so, {axis: dimension or None}. Along an axis that
    cuts one of both, each stays as it is, or is gathered, or is cut along J."""
    per_axis = []
    for axis in mesh:
        both = [dict.fromkeys([lies[axis], None, "J"]) for lies in (a, b)]
        per_axis.append(itertools.product(*both) if a[axis] or b[axis] else [(None, None)])
    for chosen in itertools.product(*per_axis):
        at = [dict(zip(mesh, lies)) for lies in zip(*chosen)]
        try:
            yield way(a, b, c, at, sizes, mesh, width)
        except Forbidden:
            pass


def repeats(a, b, found, mesh):
    """How many ranks do each multiplication, because an axis that cuts A or B cuts no longer
    either."""
    return math.prod(ranks for axis, ranks in mesh.items()
                     if (a[axis] or b[axis]) and found.c[axis] is None)


def cheapest(a, b, c, sizes, mesh, width=2):
    """The Way on which no multiplication is repeated, and a rank sends least, forward and backward;
    of several, that of the fewest steps. width: bytes of a number."""
    return min(ways(a, b, c, sizes, mesh, width), key=lambda found: (
        repeats(a, b, found, mesh), found.wire, len(found.forward) + len(found.backward)))
