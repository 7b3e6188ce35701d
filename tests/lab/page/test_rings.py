"""The ring that is drawn is chapter 06's."""

import json
from types import SimpleNamespace

import pytest

import common
from lab.bench import contexts
from lab.page import answers, rings, tools
from tests.conftest import chapter


@pytest.mark.parametrize(("n", "documents", "cut", "window"), [
    (1, 0, "sequence", 0), (3, 0, "document", 0), (4, 32, "sequence", 0), (4, 32, "document", 0),
    (3, 64, "sequence", 16), (8, 16, "document", 40)])
def test_a_ring_is_the_chapters(n, documents, cut, window):
    """At each hop a rank computes each pair of its queries and of the keys that are there which the
    chapter's Layout lets it see; of one document as many as `pairs` says."""
    six, told = chapter("06_context_parallel"), rings.ring({
        "ranks": str(n), "documents": str(documents), "cut": cut, "window": str(window)})
    seq = told["tokens"]
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=seq), documents=documents, seed=0)), rings.PACKED)
    count = 256 // documents if documents else 0
    assert 0 <= len(starts.unique()) - count <= 1 and 240 < seq <= 256

    def laid_out(variant, cut):
        return six.Layout(SimpleNamespace(variant=variant, cut=cut, window=window or None, inner=1),
                          0, n, starts)

    for variant, its_cut in (("ring", "sequence"), ("zigzag", cut)):
        of, layout = told[variant], laid_out(variant, its_cut)
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
            if not documents:
                run = len(mine) // (2 if variant == "zigzag" else 1)
                assert sum(pairs[rank] for pairs in of["pairs"]) == six.pairs(
                    variant, rank, n, seq, (run + 1) / (2 * run))
        assert [sum(of_rank) for of_rank in zip(*of["pairs"])] == contexts.work(layout)
        assert {begin for begin, _ in of["documents"]} == {*layout.starts.tolist()}
        padding = [place for begin, end in of["padding"] for place in range(begin, end)]
        assert padding == (layout.source < 0).nonzero().flatten().tolist()
    assert told["busiest"] == {"ring": contexts.imbalance(laid_out("ring", "sequence"))} | {
        cut: contexts.imbalance(laid_out("zigzag", cut)) for cut in rings.CUTS}


def drawn(shapes):
    """How many pairs lie in these: the area, where a diagonal has half of its last pair in each
    row."""
    total = 0
    for shape in shapes:
        corners = corners_of(shape)
        area = abs(sum(ax * by - bx * ay for (ax, ay), (bx, by)
                       in zip(corners, corners[1:] + corners[:1]))) / 2
        for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1]):
            if ax != bx and ay != by:                   # down on the right, or up on the left
                area += abs(by - ay) / 2 * (1 if by > ay else -1)
        total += area
    return total


def corners_of(shape):
    if len(shape) == 4:
        left, top, right, bottom = shape
        return [(left, top), (right, top), (right, bottom), (left, bottom)]
    return [*zip(shape[::2], shape[1::2])]


def test_all_that_is_offered_beside_an_example_is_an_example():
    asked = [one for name, one in answers.examples_but_plans() if name == "ring"]
    for one in asked[::25]:
        for name, values in rings.ring(one)["takes"].items():
            assert all(one | {name: str(value)} in asked for value in values)


def test_script_and_answer_name_the_same_cuts():
    script = (tools.FILES / "rings.js").read_text()
    assert f"const CUTS = {json.dumps(rings.CUTS)};" in script


def test_examples_are_a_grid_and_small():
    """Each value of a slider but for the shortest documents is in it, beside each other's."""
    asked = [one for name, one in answers.examples_but_plans() if name == "ring"]
    assert {int(one["ranks"]) for one in asked} == {*range(2, 17)}
    for n in range(2, 17):
        mine = [one for one in asked if one["ranks"] == str(n)]
        assert {one["window"] for one in mine} == {"0", "16", "64"}
        assert {one["documents"] for one in mine} == {"0", "16", "32", "64", "128"}
        assert {one["cut"] for one in mine} == {*rings.CUTS}
    large = rings.ring({"ranks": "16", "documents": "64", "cut": "document"})
    assert len(json.dumps(large)) < 60_000
