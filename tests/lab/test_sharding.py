"""lab.typecheck.sharding: held to PyTorch's DTensor on a mesh of 2 x 2 ranks."""

import functools
import itertools
import os
from collections import Counter
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import placement_types

from lab.bench.meters import CommMeter
from lab.typecheck import sharding
from tests.conftest import some

SIZES, MESH, WIDTH = {"I": 8, "J": 12, "K": 16}, {"X": 2, "Y": 2}, 8
LIES = {tensor: [dict(zip(MESH, cuts)) for cuts in itertools.product((None, *both), repeat=2)]
        for tensor, both in sharding.DIMENSIONS.items()}
PAIRS = list(itertools.product(LIES["A"], LIES["B"]))       # 81
EVERY = 1 if os.environ.get("FULL") else 9      # of the 9 ways in which C may lie


def ways_of(pairs):
    """[(A lies, B lies, C lies, Way)]"""
    return [(a, b, c, sharding.cheapest(a, b, c, SIZES, MESH, WIDTH))
            for i, (a, b) in enumerate(pairs) for c in LIES["C"][i % EVERY::EVERY]]


# -------------------------------------------------------------------------------------- by one axis

AXIS = {"X": 4}
NINE = {  # (A, B): where both are multiplied, the product; steps forward, and backward
    (None, None): (None, None, None, [], []),
    ("I", None): ("I", None, "I", [], ["all_reduce dB"]),
    (None, "K"): (None, "K", "K", [], ["all_reduce dA"]),
    ("J", "J"): ("J", "J", sharding.PARTIAL, ["all_reduce C"], []),
    ("J", None): (None, None, None, ["all_gather A"], ["slice dA"]),
    (None, "J"): (None, None, None, ["all_gather B"], ["slice dB"]),
    ("I", "J"): ("I", None, "I", ["all_gather B"], ["reduce_scatter dB"]),
    ("J", "K"): (None, "K", "K", ["all_gather A"], ["reduce_scatter dA"]),
    ("I", "K"): ("I", None, "I", ["all_gather B"], ["reduce_scatter dB"])}


@pytest.mark.parametrize("pair", NINE)
def test_the_nine_pairs_of_one_axis(pair):
    """As the lesson's table has them, and what cannot be multiplied."""
    a, b, c, forward, backward = NINE[pair]
    lies = lambda cut: {"X": cut}
    to = sharding.whole(lies(c))
    way = sharding.way(*map(lies, pair), to, [lies(a), lies(b)], SIZES, AXIS)
    words = lambda steps: [f"{step.operator} {step.tensor}" for step in steps]
    assert (way.c, words(way.forward), words(way.backward)) == (lies(c), forward, backward)
    if (a, b) != pair:
        with pytest.raises(sharding.Forbidden):
            sharding.product(*pair)
    else:
        assert sharding.product(*pair) == c


def test_a_sum_that_is_cut_costs_half_and_is_gathered_backward():
    """Two of those make Megatron's MLP with sequence parallelism; bytes of 2, 4 ranks."""
    lies = lambda cut: {"X": cut}
    of = functools.partial(sharding.way, lies("J"), lies("J"), at=[lies("J"), lies("J")],
                           sizes=SIZES, mesh=AXIS)
    whole, cut = of(c=lies(None)), of(c=lies("I"))
    size = 2 * 8 * 16 * 3 / 4
    assert whole.wire == 2 * size and [step.wire for step in cut.forward] == [size]
    assert [(step.operator, step.tensor, step.wire) for step in cut.backward] == [
        ("all_gather", "dC", size)]


def test_sizes_decide_which_tensor_travels():
    """A few tokens go to the weights, of ZeRO-3's layout; many have the weights come to them."""
    lies = lambda cut: {"X": cut}
    operators = lambda rows: [
        (step.operator, step.tensor) for step in sharding.cheapest(
            lies("I"), lies("J"), lies("I"), {"I": rows, "J": 1024, "K": 1024}, AXIS).forward]
    assert operators(8192) == [("all_gather", "B")]
    assert operators(64) == [("all_to_all", "A"), ("reduce_scatter", "C")]


@pytest.mark.parametrize(("a", "b", "c"), [
    (("I", "I"), ("J", None), ("I", "I")), (("I", "J"), ("J", None), (None, "K")),
    ((None, "I"), ("K", "J"), ("I", "K"))])
def test_the_cheapest_way_is_found_among_all(a, b, c):
    a, b, c = (dict(zip(MESH, cuts)) for cuts in (a, b, c))
    found = sharding.cheapest(a, b, c, SIZES, MESH)
    every = [way for way in sharding.ways(a, b, c, SIZES, MESH)
             if sharding.repeats(a, b, way, MESH) == 1]
    assert len(every) > 1 and found.wire == min(way.wire for way in every)
    assert sharding.repeats(a, b, found, MESH) == 1


def test_where_two_axes_cut_a_dimension_the_inner_one_makes_way():
    """X cuts I, and Y each half. Before X gathers, Y has to cut J, which sends less than to gather
    and to cut once more."""
    lies = lambda x, y: {"X": x, "Y": y}
    steps = sharding.move("A", lies("I", "I"), lies(None, "I"), SIZES, MESH, 1)
    assert [(step.operator, step.axis, step.to, step.wire) for step in steps] == [
        ("all_to_all", "Y", "J", 12), ("all_gather", "X", None, 24), ("all_to_all", "Y", "I", 24)]
    assert [step.operator for step in sharding.move(
        "A", lies("I", "I"), lies("I", None), SIZES, MESH, 1)] == ["all_gather"]


# ------------------------------------------------------------------------------------ on four ranks


def placements(tensor, lies):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Partial() if cut == sharding.PARTIAL else Replicate() if cut is None
            else Shard(sharding.DIMENSIONS[tensor].index(cut)) for cut in lies.values()]


def part_of(full, tensor, lies, place):
    """What a rank at this place of the mesh has of it."""
    for cut, index, ranks in zip(lies.values(), place, MESH.values()):
        if cut:
            full = full.chunk(ranks, sharding.DIMENSIONS[tensor].index(cut))[index]
    return full


def sent(meter):
    return [(name, op, int(counts["calls"]), int(counts["bytes"]), int(counts["wire_bytes"]))
            for name, ops in meter.by_group.items() for op, counts in ops.items()]


def expected(step, names):
    """What the meter says of it. gloo has no all_to_all for DTensor, which gathers there."""
    if step.operator == "slice":
        return []
    operator, times = step.operator, 1
    if operator == "all_to_all":
        operator, times = "all_gather", MESH[step.axis]
    return [(names[step.axis], operator, 1, int(step.payload) * times, int(step.wire) * times)]


def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*(SIZES[dimension] for dimension in both), dtype=torch.float64,
                        generator=generator) for both in sharding.DIMENSIONS.values()]


class Ranks:
    """Does what a Way says, with DTensors, and notes where something else is sent or comes out."""

    def __init__(self):
        from torch.distributed.device_mesh import init_device_mesh

        self.mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
        self.place = self.mesh.get_coordinate()
        self.names = {axis: self.mesh.get_group(axis).group_name for axis in MESH}
        self.wrong = []

    def lay(self, full, tensor, lies):
        from torch.distributed.tensor import DTensor

        local = part_of(full, tensor, lies, self.place).contiguous()
        return DTensor.from_local(local, self.mesh, placements(tensor, lies), run_check=False)

    def take(self, x, tensor, steps):
        """The steps of one tensor, each a redistribution along one axis."""
        for step in steps:
            if step.tensor == tensor:
                at = list(MESH).index(step.axis)
                lies = list(x.placements)
                lies[at], = placements(tensor[-1], {step.axis: step.to})
                with CommMeter() as meter:
                    x = x.redistribute(self.mesh, lies)
                if sent(meter) != expected(step, self.names):
                    self.wrong.append((step, sent(meter)))
        return x

    def multiply(self, x, y):
        with CommMeter() as meter:
            z = x @ y
        if meter.total:
            self.wrong.append(("a product sends", sent(meter)))
        return z

    def compare(self, x, full, tensor, lies):
        right = part_of(full, tensor, lies, self.place)
        if list(x.placements) != placements(tensor, lies) or not torch.allclose(
                x.to_local(), right):
            self.wrong.append((tensor, lies, x.placements))

    def do(self, a, b, c, way):
        full_a, full_b, gradient = tensors()
        x = self.take(self.lay(full_a, "A", a), "A", way.forward)
        y = self.take(self.lay(full_b, "B", b), "B", way.forward)
        z = self.multiply(x, y)
        if list(z.placements) != placements("C", way.c):
            self.wrong.append(("the product lies", z.placements, way))
        self.compare(self.take(z, "C", way.forward), full_a @ full_b, "C", c)

        of_c = self.take(self.lay(gradient, "C", c), "dC", way.backward)
        of_a = self.take(self.multiply(of_c, y.t()), "dA", way.backward)
        of_b = self.take(self.multiply(x.t(), of_c), "dB", way.backward)
        self.compare(of_a, gradient @ full_b.t(), "A", a)
        self.compare(of_b, full_a.t() @ gradient, "B", b)


def on_ranks(cases):
    ranks = Ranks()
    for case in cases:
        ranks.do(*case)
    return ranks.wrong


@pytest.mark.parametrize("begin", some([(begin,) for begin in range(9)], 3))
def test_every_step_is_a_redistribution_of_dtensor(ranks, begin):
    """Values, calls and bytes of all pairs of A and B, forward and backward."""
    cases = ways_of(PAIRS[begin::9])
    assert len(cases) == 81 // EVERY
    for wrong in ranks(4)(on_ranks, cases):
        assert not wrong


# ----------------------------------------------------------------------------- DTensor's own choice


def alone(cases):
    """[(bytes on the wire, how the product lies)] of each case, if DTensor is asked for A @ B, and
    then for C as it is to lie. Where it falls back to a gather, it counts as all_to_all."""
    ranks, found = Ranks(), []
    fallback = placement_types.shard_dim_alltoall
    for a, b, c, _ in cases:
        full_a, full_b, gradient = tensors()
        x = ranks.lay(full_a, "A", a).requires_grad_()
        y = ranks.lay(full_b, "B", b).requires_grad_()
        with CommMeter() as meter, mock.patch.object(
                placement_types, "shard_dim_alltoall", wraps=fallback) as exchanges:
            product = x @ y
            z = product.redistribute(ranks.mesh, placements("C", c))
            z.backward(ranks.lay(gradient, "C", c))
            x.grad.redistribute(ranks.mesh, placements("A", a))
            y.grad.redistribute(ranks.mesh, placements("B", b))
        wire = sum(counts["wire_bytes"] for counts in meter.total.values())
        for call in exchanges.call_args_list:           # a gather sends twice as much, on two ranks
            wire -= call.args[0].numel() * WIDTH / 2
        found.append((wire, [one.is_replicate() for one in product.placements]))
    return found


@pytest.mark.full
def test_dtensor_alone_sends_as_much_or_more_or_repeats_multiplications(ranks):
    """It chooses for each operator by itself, and does not know how C is to lie."""
    cases = ways_of(PAIRS)
    found, *_ = ranks(4, timeout=300)(alone, cases)
    counts = Counter()
    for (a, b, _, way), (wire, is_whole) in zip(cases, found):
        repeats = any(whole and (a[axis] or b[axis]) for whole, axis in zip(is_whole, MESH))
        counts["as much" if wire == way.wire else "more" if wire > way.wire else "less"] += 1
        assert wire >= way.wire or repeats
    assert counts == {"as much": 142, "more": 575, "less": 12}
