"""The ring of chapter 06, and its zig-zag: who meets whose keys at which hop."""

import functools
import itertools
from types import SimpleNamespace

import common
from lab.chapters import held, rooms_with

VALUES = {"ranks": [2, 3, 4, 5, 6, 7, 8, 12, 16], "documents": [0, 16, 32, 64, 128],
          "cut": ["sequence", "document"], "window": [0, 16, 64]}
TOKENS = 256                    # of the sequence, or as many as 2 chunks of each rank divide
PACKED = 41                     # the step whose documents are as many as their mean lets expect


def ring(ranks, documents, cut, window):
    """A ring, and a zig-zag that cuts the sequence, or each document. documents: how many tokens
    they have in the mean, 0: there is one. window: how many tokens a token sees, 0: all."""
    layouts = {"ring": lay_out("ring", "sequence", ranks, documents, window)}
    for each in VALUES["cut"]:
        layouts[each] = lay_out("zigzag", each, ranks, documents, window)
    tokens = layouts["ring"]["places"]
    return {"ranks": ranks, "tokens": tokens,
            "padding": layouts["document"]["places"] / tokens - 1,
            "busiest": {name: layout["busiest"] for name, layout in layouts.items()},
            "ring": layouts["ring"], "zigzag": layouts[cut]}


@functools.cache
def lay_out(variant, cut, ranks, documents, window):
    """busiest: the work of the busiest rank over the mean. holds: the runs of places of each rank.
    For each hop and rank, shapes: what it computes, see `flat`; pairs: how many of a query and a
    key these are. No more hops than anybody needs."""
    figure, tokens = rooms_with("figure")["06"], TOKENS // (2 * ranks) * 2 * ranks
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=tokens), documents=documents, seed=0)), PACKED)
    layout = figure.layout_of(variant, cut, ranks, starts, window)
    hops = figure.shapes_by_hop(layout)
    return {"busiest": held("06").imbalance(layout), "places": len(layout.starts),
            "documents": figure.documents_of(layout), "padding": figure.padding_of(layout),
            "holds": figure.holds_of(layout),
            "shapes": [[[flat(corners) for corners, *_ in shapes] for shapes in hop]
                       for hop in hops],
            "pairs": [[sum(pairs for _, pairs, _ in shapes) for shapes in hop] for hop in hops]}


def flat(corners):
    """x and y in turn: of two opposite corners of a rectangle, or of all corners."""
    corners = [*dict.fromkeys(corners)]
    x, y = ({corner[axis] for corner in corners} for axis in (0, 1))
    if len(corners) == 4 and len(x) == len(y) == 2:
        corners = [(min(x), min(y)), (max(x), max(y))]
    return [number for corner in corners for number in corner]


def examples():
    """All that the sliders offer. The chunks of a document have two tokens or more in the mean:
    smaller ones are too small to be seen."""
    for values in itertools.product(*VALUES.values()):
        asked = dict(zip(VALUES, values))
        if asked["cut"] == "sequence" or not 0 < asked["documents"] < 4 * asked["ranks"]:
            yield "ring", asked
