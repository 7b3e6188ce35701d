"""Products of sharded matrices: which collectives C[I, K] = A[I, J] · B[J, K] needs, and what they
send, forward and backward.

A layout records how a tensor is spread over the mesh: {axis: the dimension that it cuts}. None
means that all ranks of the axis hold the same, PARTIAL that they hold terms of a sum. The scaling
book writes A[I_X, J] if axis X cuts I, and {U_X} for terms of a sum. Along one axis there are nine
pairs:

    A      B      first             C          backward                example
    -      -                        -
    I      -                        I          all_reduce dB           chapter 02
    -      K                        K          all_reduce dA           f of chapter 04
    J      J                        PARTIAL                            g of chapter 04
    J      -      all_gather A      -          slice dA
    -      J      all_gather B      -          slice dB
    I      J      all_gather B      I          reduce_scatter dB       ZeRO-3
    J      K      all_gather A      K          reduce_scatter dA       f of chapter 05
    I      K      all_gather one    K or I     reduce_scatter it

The last five can't be multiplied as they are. A rank with a part of J in A, and with all of J in B,
has nothing to multiply most of B with. And if one axis cuts both I and K, each rank gets a block on
C's diagonal, and nobody gets the rest.

An all_reduce makes a sum whole. A reduce_scatter leaves it cut, and sends half as much. Backward
has two products of the same kind, dA = dC · Bᵀ over K and dB = Aᵀ · dC over I, so the same rule
applies. What forward gathers, backward sums; what forward sums, backward gathers or hands on.

In two of the five each rank computes all of C. You could also slice B along J, which sends nothing,
and sum C. `cheapest` repeats no multiplication if it can, and then sends the least, so it depends
on the sizes. Several axes interact: a tensor that Y cuts as well sends smaller messages over X. And
if both cut the same dimension, X cuts first, and then Y cuts each part. X alone can't be gathered
then, since its rows wouldn't be neighbours. That's why `move` searches for the cheapest path.

Tests compare each step with PyTorch's DTensor, in values, calls and bytes.

Source: Austin et al., How To Scale Your Model (2025), part 3; part 5, appendix A.
"""

import heapq
import itertools
import math
from typing import NamedTuple

PARTIAL = "partial"
DIMENSIONS = {"A": "IJ", "B": "JK", "C": "IK"}


class Forbidden(Exception):
    """Two tensors that can't be multiplied in their layouts."""


class Step(NamedTuple):
    """One collective, on a tensor or its gradient. payload: bytes of a rank's all_gather output or
    reduce_scatter input; wire: bytes that a rank sends in a ring."""
    operator: str
    tensor: str
    axis: str
    to: str | None
    payload: float
    wire: float


class Way(NamedTuple):
    """The layouts of A, B and C at the multiplication, and all Steps around it."""
    a: dict
    b: dict
    c: dict
    forward: list
    backward: list

    @property
    def wire(self):
        return sum(step.wire for step in self.forward + self.backward)


def product(a, b, contracted="J"):
    """The dimension of the product that an axis cuts, if it cuts its factors along a and b (None:
    not at all). Raises Forbidden if a rank couldn't multiply its parts."""
    if a == contracted and b == contracted:
        return PARTIAL
    if contracted in (a, b):
        raise Forbidden(f"one has all of {contracted}, and one a part")
    if a and b:
        raise Forbidden(f"one axis would cut {a} and {b}")
    return a or b


def collective(source, target):
    """What takes a tensor along an axis from one cut to another; None if they're equal."""
    if source == target:
        return None
    if source == PARTIAL:
        return "reduce_scatter" if target else "all_reduce"
    if target is None:
        return "all_gather"
    return "slice" if source is None else "all_to_all"


def wire_bytes(operator, payload, ranks):
    """Bytes that a rank sends in a ring. A slice sends nothing."""
    times = {"all_reduce": 2, "slice": 0}.get(operator, 1)
    return times * (ranks - 1) / ranks * payload


def bytes_of(tensor, layout, sizes, mesh, width):
    """Bytes of a rank's part. sizes: {dimension: length}; mesh: {axis: ranks}; width: bytes of a
    number."""
    parts = math.prod(mesh[axis] for axis, cut in layout.items() if cut not in (None, PARTIAL))
    return width * math.prod(sizes[dimension] for dimension in DIMENSIONS[tensor]) / parts


def steps_from(tensor, layout, sizes, mesh, width, name):
    """Yield (Step, the layout after it) for each collective that's possible. An outer axis can't
    cut a dimension anew, or gather it, while an inner one cuts it."""
    axes = list(mesh)
    for axis, cut in itertools.product(axes, (None, *DIMENSIONS[tensor])):
        inner = {layout[other] for other in axes[axes.index(axis) + 1:]} - {None, PARTIAL}
        operator = collective(layout[axis], cut)
        if operator and not inner & {layout[axis], cut}:
            after = layout | {axis: cut}
            payload = max(bytes_of(tensor, one, sizes, mesh, width) for one in (layout, after))
            wire = wire_bytes(operator, payload, mesh[axis])
            yield Step(operator, name, axis, cut, payload, wire), after


def move(tensor, source, target, sizes, mesh, width, name=None):
    """The Steps from one layout to another that send the least; of those, the fewest. name: what
    the Steps call the tensor, if it's a gradient."""
    order = itertools.count()                           # if two paths cost the same, the first wins
    queue, done = [(0, 0, next(order), source, [])], []
    while True:
        wire, count, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return steps
        if layout not in done:
            done.append(layout)
            for step, after in steps_from(tensor, layout, sizes, mesh, width, name or tensor):
                path = wire + step.wire, count + 1, next(order), after, [*steps, step]
                heapq.heappush(queue, path)


def multiplied(a, b, contracted="J"):
    """The layout of the product of two layouts. Raises Forbidden."""
    return {axis: product(a[axis], b[axis], contracted) for axis in a}


def whole(layout):
    """The layout once every sum is done."""
    return {axis: None if cut == PARTIAL else cut for axis, cut in layout.items()}


def way(a, b, c, at, sizes, mesh, width=2):
    """The Way from the layouts a and b to c, if A and B are multiplied in the layouts `at`. Raises
    Forbidden if they can't be."""
    (a_at, b_at), cluster = at, (sizes, mesh, width)
    c_at = multiplied(a_at, b_at)
    forward = [*move("A", a, a_at, *cluster), *move("B", b, b_at, *cluster),
               *move("C", c_at, c, *cluster)]

    dc = whole(c_at)                                    # a term of a sum has the sum's gradient
    da, db = multiplied(dc, b_at, "K"), multiplied(a_at, dc, "I")
    backward = [*move("C", c, dc, *cluster, "dC"), *move("A", da, a, *cluster, "dA"),
                *move("B", db, b, *cluster, "dB")]
    return Way(a_at, b_at, c_at, forward, backward)


def ways(a, b, c, sizes, mesh, width=2):
    """Yield all Ways from the layouts a and b to c. Along an axis that cuts A or B, each of them
    stays as it is, is gathered, or is cut along J."""
    per_axis = []
    for axis in mesh:
        both = [dict.fromkeys([layout[axis], None, "J"]) for layout in (a, b)]
        per_axis.append(itertools.product(*both) if a[axis] or b[axis] else [(None, None)])
    for cuts in itertools.product(*per_axis):
        at = [dict(zip(mesh, layout)) for layout in zip(*cuts)]
        try:
            yield way(a, b, c, at, sizes, mesh, width)
        except Forbidden:
            pass


def repeats(a, b, one, mesh):
    """How many ranks do each multiplication on a Way: those along the axes that cut A or B, but
    don't cut C."""
    return math.prod(ranks for axis, ranks in mesh.items()
                     if (a[axis] or b[axis]) and one.c[axis] is None)


def cheapest(a, b, c, sizes, mesh, width=2):
    """The Way that repeats no multiplication, if there is one; of those, the one that sends least,
    forward and backward; of those, the one with the fewest Steps."""
    return min(ways(a, b, c, sizes, mesh, width), key=lambda one: (
        repeats(a, b, one, mesh), one.wire, len(one.forward) + len(one.backward)))
