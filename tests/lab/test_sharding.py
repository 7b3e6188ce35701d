"""Products of sharded matrices: by hand, and against DTensor on 2 x 2 ranks."""

import itertools

import pytest
import torch

from lab import chapters
from lab.run.meters import CommMeter
from tests.conftest import FULL, chapter, sample

sharding = chapters.rooms_with("sharding")["04"]
SIZES, MESH, WIDTH = {"I": 8, "J": 12, "K": 16}, {"X": 2, "Y": 2}, 8
LIES = {tensor: [dict(zip(MESH, cuts)) for cuts in itertools.product((None, *both), repeat=2)]
        for tensor, both in sharding.DIMENSIONS.items()}
PAIRS = list(itertools.product(LIES["A"], LIES["B"]))       # 81
EVERY = 1 if FULL else 9        # of the 9 ways in which C may lie


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


def along_x(cut):
    return {"X": cut}


def test_the_nine_pairs_of_one_axis():
    """From the lesson's table, with what cannot be multiplied."""
    words = lambda steps: [f"{step.operator} {step.tensor}" for step in steps]
    for pair, (a, b, c, forward, backward) in NINE.items():
        to = sharding.whole(along_x(c))
        at = [along_x(a), along_x(b)]
        way = sharding.way(*map(along_x, pair), to, at, SIZES, AXIS)
        found = way.c, words(way.forward), words(way.backward)
        assert found == (along_x(c), forward, backward), pair
        if (a, b) == pair:
            assert sharding.product(*pair) == c
        else:
            with pytest.raises(sharding.Forbidden):
                sharding.product(*pair)


def test_the_cheapest_way_depends_on_sizes_and_repeats_nothing():
    """With many rows the weights travel, with few the rows."""
    operators = lambda rows: [
        (step.operator, step.tensor) for step in sharding.cheapest(
            along_x("I"), along_x("J"), along_x("I"), {"I": rows, "J": 1024, "K": 1024},
            AXIS).forward]
    assert operators(8192) == [("all_gather", "B")]
    assert operators(64) == [("all_to_all", "A"), ("reduce_scatter", "C")]
    a, b, c = ({"X": x, "Y": y} for x, y in (("I", "I"), ("J", None), ("I", "I")))
    every = [way for way in sharding.ways(a, b, c, SIZES, MESH)
             if sharding.repeats(a, b, way, MESH) == 1]
    found = sharding.cheapest(a, b, c, SIZES, MESH)
    assert len(every) > 1 and found in every and found.wire == min(way.wire for way in every)


def test_zero_3_beside_tp_sends_what_the_book_lists():
    """Its algorithm of both: forward gathers over both axes, backward scatters over both."""
    a, b, c = {"X": "I", "Y": "J"}, {"X": "J", "Y": "K"}, {"X": "I", "Y": "K"}
    way = sharding.cheapest(a, b, c, {"I": 65536, "J": 8192, "K": 32768}, {"X": 16, "Y": 4})
    steps = {(step.operator, step.tensor, step.axis) for step in way.forward + way.backward}
    assert steps >= {("all_gather", "A", "Y"), ("all_gather", "B", "X"),
                     ("reduce_scatter", "dA", "Y"), ("reduce_scatter", "dB", "X")}
    rows, weights = 2 * 65536 / 16 * 8192 * 3 / 4, 2 * 8192 * 32768 / 4 * 15 / 16
    assert sum(step.wire for step in way.forward) == rows + weights
    assert sum(step.wire for step in way.backward if step.operator == "reduce_scatter") == (
        rows + weights)


# ------------------------------------------------------------------------------------ on four ranks


def placements(tensor, lies):
    from torch.distributed.tensor import Partial, Replicate, Shard

    return [Partial() if cut == sharding.PARTIAL else Replicate() if cut is None
            else Shard(sharding.DIMENSIONS[tensor].index(cut)) for cut in lies.values()]


def part_of(full, tensor, lies, place):
    """The part of a rank at this place of the mesh."""
    for cut, index, ranks in zip(lies.values(), place, MESH.values()):
        if cut:
            full = full.chunk(ranks, sharding.DIMENSIONS[tensor].index(cut))[index]
    return full


def sent(meter):
    return [(name, op, int(counts["calls"]), int(counts["bytes"]), int(counts["wire_bytes"]))
            for name, ops in meter.by_group.items() for op, counts in ops.items()]


def expected(step, names):
    """What the meter counts. With gloo, DTensor gathers instead of an all_to_all."""
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
    """Takes the steps of a Way with DTensors, and notes other messages and other results."""

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


@pytest.mark.parametrize("begin", sample([4, 0, 1, 2, 3, 5, 6, 7, 8]))
def test_every_step_is_a_redistribution_of_dtensor(ranks, begin):
    """Values, calls and bytes of all pairs of A and B, forward and backward."""
    cases = ways_of(PAIRS[begin::9])
    assert len(cases) == 81 // EVERY
    for wrong in ranks(4)(on_ranks, cases):
        assert not wrong


# ------------------------------------------------------------------------------------- the duality

def passes_of(name, f):
    """What f or g of a chapter sends in forward, and in backward."""
    function = getattr(chapter(name), f)
    x, meters = torch.randn(2, 4, 4, requires_grad=True), (CommMeter(), CommMeter())
    with meters[0]:
        out = function.apply(x, torch.distributed.group.WORLD)
    with meters[1]:
        out.sum().backward()
    return [" ".join(meter.total) or "nothing" for meter in meters]


@pytest.mark.parametrize(("name", "f", "rule"), [
    ("04_tensor_parallel", "CopyIn", "copy_in"), ("04_tensor_parallel", "SumOut", "sum_out"),
    ("05_sequence_parallel", "GatherIn", "gather_in"),
    ("05_sequence_parallel", "ScatterOut", "scatter_out")])
def test_f_and_g_send_what_their_types_say(ranks, name, f, rule):
    chapter(name)  # or skip
    duality = chapters.rooms_with("duality")["04"]
    expected = [line.split(": ")[1] for line in duality.passes(*getattr(duality, rule)())]
    assert ranks(2)(passes_of, name, f) == [expected] * 2
