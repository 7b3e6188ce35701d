"""The ring that is drawn is chapter 06's."""

from types import SimpleNamespace

import pytest

import common
from lab import chapters
from lab.site import rings
from tests.conftest import chapter, sample


@pytest.mark.parametrize(("n", "documents", "cut", "window"), sample([
    (3, 64, "sequence", 16), (4, 32, "document", 0), (1, 0, "sequence", 0)], 2))
def test_a_ring_is_the_chapters(n, documents, cut, window):
    """At each hop a rank computes the pairs of its queries and the keys that it has then, as far as
    the chapter's Layout lets a query see a key."""
    six, answer = chapter("06_context_parallel"), rings.ring(n, documents, cut, window)
    seq = answer["tokens"]
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=seq), documents=documents, seed=0)), rings.PACKED)
    assert 240 < seq <= 256

    def laid_out(variant, cut):
        return six.Layout(SimpleNamespace(variant=variant, cut=cut, window=window or None, inner=1),
                          0, n, starts)

    for variant, its_cut in (("ring", "sequence"), ("zigzag", cut)):
        of, layout = answer[variant], laid_out(variant, its_cut)
        for rank, mine in enumerate(layout.positions):
            held = [place for begin, end in of["holds"][rank] for place in range(begin, end)]
            assert held == mine.tolist()
            for hop in range(n):
                keys, queries = layout.positions[rank - hop], mine[:, None]
                sees = int(((layout.first[queries] <= keys) & (keys <= queries)).sum())
                if hop < len(of["pairs"]):
                    assert of["pairs"][hop][rank] == sees
                    assert drawn(of["shapes"][hop][rank]) == sees
                assert sees == 0 or hop < len(of["pairs"]) == len(layout.blocks)
        assert [sum(of_rank) for of_rank in zip(*of["pairs"])] == chapters.held("06").work(layout)
        assert {begin for begin, _ in of["documents"]} == {*layout.starts.tolist()}
    layouts = {"ring": laid_out("ring", "sequence")}
    layouts |= {cut: laid_out("zigzag", cut) for cut in rings.VALUES["cut"]}
    assert answer["busiest"] == {name: chapters.held("06").imbalance(layout)
                                 for name, layout in layouts.items()}


def drawn(shapes):
    """How many pairs lie in these shapes: their area, where a diagonal has half of its last pair in
    each row."""
    total = 0
    for shape in shapes:
        if len(shape) == 4:
            left, top, right, bottom = shape
            corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        else:
            corners = [*zip(shape[::2], shape[1::2])]
        sides = [*zip(corners, corners[1:] + corners[:1])]
        total += abs(sum(ax * by - bx * ay for (ax, ay), (bx, by) in sides)) / 2
        for (ax, ay), (bx, by) in sides:
            if ax != bx and ay != by:  # down on the right, or up on the left
                total += abs(by - ay) / 2 * (1 if by > ay else -1)
    return total
