"""The ring of chapter 06, and its zig-zag: who meets whose keys at which hop.

    /api/ring?ranks=4&documents=32&cut=document&window=16
"""

import itertools
from types import SimpleNamespace

import common
from common import Refused
from lab.chapters import held, rooms_with
from lab.site.parameters import known, one_of, whole

RANKS = 1, 16
DOCUMENTS, WINDOWS = (0, 16, 32, 64, 128), (0, 16, 64)          # of the sliders
TOKENS = 256                    # of a sequence around a ring, or as many as its ranks share
FEWEST = 8                      # of a document in the mean, and of a window
CUTS = "sequence", "document"
PACKED = 41                     # the step whose documents are as many as their mean lets expect


def ring(asked):
    """For a ring, and a zig-zag of the sequence or of each document: `holds`, the runs of places of
    each rank; `shapes`, of each hop and rank, what it computes, see flat;
    `pairs`, of each hop and rank, how many of a query and a key. No more hops than anybody needs.
    busiest: the work of the busiest rank over the mean, for both cuts. documents: how long they are
    in the mean, 0: one; window: 0: all. takes: of each name the values that are offered beside the
    others."""
    known(asked, "ranks", "documents", "cut", "window")
    n, cut = whole(asked, "ranks", 4, *RANKS), one_of(asked, "cut", "sequence", CUTS)
    documents, window = (at_least_or_none(asked, name) for name in ("documents", "window"))
    if cut == "document" and 0 < documents < 2 * n:
        raise Refused(f"documents = {documents} tokens in the mean are less than the {2 * n} chunks"
                      f" that each is cut into; documents={2 * n} would work")
    drawn, seq = rooms_with("figure")["06"], TOKENS // (2 * n) * 2 * n
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=seq), documents=documents, seed=0)), PACKED)
    of = {"ring": drawn.layout_of("ring", "sequence", n, starts, window)} | {
        each: drawn.layout_of("zigzag", each, n, starts, window) for each in CUTS}
    takes = {"ranks": [ranks for ranks in range(2, RANKS[1] + 1) if seen(ranks, documents, cut)],
             "documents": [mean for mean in DOCUMENTS if seen(n, mean, cut)],
             "cut": [each for each in CUTS if seen(n, documents, each)], "window": [*WINDOWS]}
    return {
        "ranks": n, "takes": takes, "tokens": seq, "padding": len(of["document"].starts) / seq - 1,
        "busiest": {name: held("06").imbalance(layout) for name, layout in of.items()},
        "ring": laid_out(drawn, of["ring"]), "zigzag": laid_out(drawn, of[cut])}


def at_least_or_none(asked, name):
    """So many tokens, or 0."""
    tokens = whole(asked, name, 0, 0, TOKENS)
    if 0 < tokens < FEWEST:
        raise Refused(f"{name} = {tokens} tokens are too few to see; {name}={FEWEST} would work")
    return tokens


def laid_out(drawn, layout):
    hops = drawn.shapes_by_hop(layout)
    return {"places": len(layout.starts), "documents": drawn.documents_of(layout),
            "padding": drawn.padding_of(layout), "holds": drawn.holds_of(layout),
            "shapes": [[[flat(corners) for corners, *_ in shapes] for shapes in of_hop]
                       for of_hop in hops],
            "pairs": [[sum(pairs for _, pairs, _ in shapes) for shapes in of_hop]
                      for of_hop in hops]}


def flat(corners):
    """Two opposite corners of a rectangle; of what is none, all: x and y in turn."""
    corners = [*dict.fromkeys(corners)]
    x, y = ({corner[axis] for corner in corners} for axis in (0, 1))
    if len(corners) == 4 and len(x) == len(y) == 2:
        corners = [(min(x), min(y)), (max(x), max(y))]
    return [number for corner in corners for number in corner]


def seen(n, documents, cut):
    """Whether it is offered. Documents are cut into chunks of two tokens or more in the mean:
    smaller ones are many, and too small to be seen."""
    return cut == "sequence" or documents == 0 or documents >= 4 * n


def examples():
    """All that the sliders can be moved to."""
    for n, documents, cut, window in itertools.product(
            range(2, RANKS[1] + 1), DOCUMENTS, CUTS, WINDOWS):
        if seen(n, documents, cut):
            yield "ring", {"ranks": str(n), "documents": str(documents), "cut": cut,
                           "window": str(window)}
