"""The ring of chapter 06, and its zig-zag: who meets whose keys at which hop."""

import functools
import itertools
from types import SimpleNamespace

import common
from lab.chapters import chapter, held

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
    tokens = TOKENS // (2 * ranks) * 2 * ranks
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=tokens), documents=documents, seed=0)), PACKED)
    args = SimpleNamespace(variant=variant, cut=cut, window=window or None, inner=1)
    layout = chapter("06").Layout(args, 0, ranks, starts)
    shapes = [[shapes_of_part(layout, rank, hop) for rank in range(ranks)]
              for hop in range(len(layout.blocks))]
    begins = layout.starts.unique_consecutive().tolist()
    return {"busiest": held("06").imbalance(layout), "places": len(layout.starts),
            "documents": [[*pair] for pair in zip(begins, [*begins[1:], len(layout.starts)])],
            "padding": ends((layout.source < 0).nonzero().flatten().tolist()),
            "holds": [ends(positions.tolist()) for positions in layout.positions],
            "shapes": [[[flat(corners) for corners, _ in of_rank] for of_rank in hop]
                       for hop in shapes],
            "pairs": [[sum(pairs for _, pairs in of_rank) for of_rank in hop] for hop in shapes]}


def shapes_of_part(layout, rank, hop):
    """What a rank computes at a hop, in the matrix of queries (down) and keys (across): for each
    piece of neighbouring keys its corners (x, y), and how many pairs of a query and a key it has.
    """
    queries, keys, shapes = layout.positions[rank], layout.positions[rank - hop], []
    for block in chapter("06").meeting(layout.runs[rank], keys, layout.first):
        rows_down, keys_across = queries[block.rows].tolist(), keys[block.keys].tolist()
        begin = [0] * len(rows_down) if block.low is None else block.low.tolist()
        seen = [len(keys_across) - i * block.causal for i in reversed(range(len(rows_down)))]
        at = 0
        for piece in neighbours(keys_across):
            end = at + len(piece)
            rows = [(row, piece[0] + max(left, at) - at, piece[0] + min(right, end) - at)
                    for row, left, right in zip(rows_down, begin, seen)
                    if left < end and right > at]
            if rows:
                shapes.append((corners_of(rows), sum(right - left for _, left, right in rows)))
            at = end
    return shapes


def corners_of(rows):
    """The outline of neighbouring rows, each with where it begins and ends; a diagonal is a
    straight line."""
    down, up = [], []
    for top, bottom, left, right, left_step, right_step in bands(rows):
        height = bottom - top
        down += [(right - right_step, top), (right + right_step * (height - 1), bottom)]
        up += [(left - left_step, top), (left + left_step * (height - 1), bottom)]
    return down + up[::-1]


def bands(rows):
    """Neighbouring rows whose ends move alike: [top, bottom, left and right of the first row, and
    by how much these move from row to row, 0 or 1]."""
    groups = []
    for row, left, right in rows:
        if groups:
            top, bottom, first_left, first_right, *step = groups[-1]
            height = bottom - top
            moved = [left - first_left - step[0] * (height - 1),
                     right - first_right - step[1] * (height - 1)]
            if height == 1 or moved == step:
                groups[-1] = [top, bottom + 1, first_left, first_right, *moved]
                continue
        groups.append([row, row + 1, left, right, 0, 0])
    return groups


def neighbours(places):
    """Ascending places, in pieces without a gap."""
    cuts = [i for i, (one, other) in enumerate(itertools.pairwise(places), 1) if other - one > 1]
    return [places[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(places)])]


def ends(places):
    """[begin, end] of each piece."""
    return [[piece[0], piece[-1] + 1] for piece in neighbours(places) if piece]


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
