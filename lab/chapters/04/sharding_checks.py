"""Checks of the exercises of sharding.py."""

import itertools
from unittest import mock


def products(sharding):
    """The product's cut, for all cuts of two tensors and each contracted dimension."""
    cuts = {}
    for contracted, first, second in (("J", "IJ", "JK"), ("K", "IK", "KJ"), ("I", "JI", "IK")):
        for a, b in itertools.product((None, *first), (None, *second)):
            try:
                cut = sharding.product(a, b, contracted)
            except sharding.Forbidden:
                cut = "forbidden"
            cuts[f"{a} and {b}, over {contracted}"] = cut
    return cuts


def collectives(sharding):
    targets = None, "I", "K"
    return {f"{source} to {target}": sharding.collective(source, target)
            for source, target in itertools.product((*targets, sharding.PARTIAL), targets)}


def wires(sharding):
    operators = "all_gather", "reduce_scatter", "all_reduce", "slice"
    return {f"{operator}, {ranks} ranks": sharding.wire_bytes(operator, 960, ranks)
            for operator, ranks in itertools.product(operators, (1, 2, 8))}


MESH, SIZES = {"X": 2, "Y": 4}, {"I": 32, "J": 64, "K": 96}


def layout(x, y):
    return {"X": x, "Y": y}


def parts_of_tensors(sharding):
    cuts = [(None, None), ("I", None), (None, "I"), ("I", "I"), (sharding.PARTIAL, "I")]
    return {f"{tensor} along {x} and {y}": sharding.bytes_of(tensor, layout(x, y), SIZES, MESH, 2)
            for tensor, (x, y) in itertools.product("AC", cuts)}


def steps_of_a_way(sharding):
    """Of products that need steps before and after them. No other exercise's functions are used."""

    def cut(a, b, contracted="J"):
        return "partial" if (a, b, contracted) == ("p", "q", "J") else f"{a}·{b} over {contracted}"

    def move(tensor, source, target, sizes, mesh, width, name=None):
        return [f"{name or tensor} from {source} to {target}, {width} bytes"]

    with mock.patch.multiple(sharding, product=cut, move=move):
        way = sharding.way(layout("a", "d"), layout("b", "e"), layout("c", "f"),
                           [layout("p", "r"), layout("q", "s")], SIZES, MESH, 4)
    return way._asdict()


def cheapest_ways(sharding):
    """Of candidates that differ in what they repeat, in what they send, and in their steps."""

    def candidate(cut, *wires):
        steps = [sharding.Step("all_gather", "A", "Y", None, wire, wire) for wire in wires]
        return sharding.Way({}, {}, layout(None, cut), steps[:1], steps[1:])

    cases = [candidate(None, 1), candidate("K", 9)], [
        candidate("K", 5), candidate("K", 1, 2), candidate("K", 4)], [
        candidate("K", 1, 2, 0), candidate("K", 3), candidate("K", 1, 2)]
    chosen = []
    for case in cases:
        with mock.patch.object(sharding, "ways", return_value=case) as ways:
            way = sharding.cheapest(layout(None, "J"), layout(None, "K"), layout("I", None), SIZES,
                                    MESH, 4)
        chosen.append((way.c["Y"], way.wire, len(way.forward + way.backward), *ways.call_args.args))
    return chosen


def times_repeated(sharding):
    way = sharding.Way({}, {}, {"X": None, "Y": None, "Z": "I"}, [], [])
    mesh = {"X": 2, "Y": 4, "Z": 8}
    return {f"A along {x}, B along {y}": sharding.repeats(
        {"X": x, "Y": None, "Z": "I"}, {"X": None, "Y": y, "Z": None}, way, mesh)
        for x, y in itertools.product((None, "I"), (None, "K"))}
