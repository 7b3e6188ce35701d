"""lab/animation.py: the README's picture is what chapter 07's schedules do."""

import re
from xml.etree import ElementTree

import pytest

from lab import ROOT, animation
from lab.chapters import chapter

SVG = "{http://www.w3.org/2000/svg}"
UNIT, LANE = 22, 21                     # pixels of the template
KINDS = {color: kind for kind, color in animation.COLORS.items()} | {"url(#idle)": "idle"}
BY_HAND = {                             # (share of the step that is idle, micro-batches in memory)
    "afab": (3 / 11, 8), "1f1b": (3 / 11, 4), "zb-h1": (1 / 9, 4)}
ENDS = {"afab": 33, "1f1b": 33, "zb-h1": 27}


@pytest.fixture(scope="module")
def svg():
    return ElementTree.fromstring(animation.draw())


@pytest.fixture(scope="module")
def lanes(svg):
    """{variant: for each GPU (kind or "idle", start, end, share of the lane's height) of what its
    lane has, in the order of time, and its micro-batches' numbers}."""
    found = []
    for lane in svg.iter(f"{SVG}g"):
        if lane.get("transform") == "translate(82 0)":
            boxes = [(KINDS[box.get("fill")], (float(box.get("x")) - 0.75) / UNIT,
                      (float(box.get("x")) + 0.75 + float(box.get("width"))) / UNIT,
                      float(box.get("height")) / LANE) for box in lane.findall(f"{SVG}rect")]
            numbers = [int(text.text) for text in lane.iter(f"{SVG}text")]
            found.append((sorted(boxes, key=lambda box: box[1]), numbers))
    assert len(found) == len(BY_HAND) * animation.P
    return {variant: found[i * animation.P:][:animation.P] for i, variant in enumerate(BY_HAND)}


def test_the_committed_picture_is_what_is_drawn_now():
    picture = (ROOT / "figures/pipeline.svg").read_text(encoding="utf-8")
    assert picture == animation.draw(), "python -m lab.animation draws it again"
    assert picture.count("//") == 1  # it loads nothing: this is the name of SVG


def test_each_lane_has_every_action_once_and_when_it_can_be(lanes):
    """None begins before what it needs has ended, and a GPU is idle where it has none."""
    for variant in BY_HAND:
        made = chapter("07").make_schedule(variant, animation.P, animation.M)
        ended, begun = {}, []
        for rank, (boxes, numbers) in enumerate(lanes[variant]):
            assert numbers == [action.micro_batch for action in made.actions[rank]]
            working, now = iter(box for box in boxes if box[0] != "idle"), 0
            for action in made.actions[rank]:
                drawn = [next(working) for _ in action.kind]
                [(start, end)] = {(start, end) for _, start, end, _ in drawn}
                assert "".join(kind for kind, *_ in drawn) == action.kind
                assert end - start == pytest.approx(len(action.kind))
                assert {height for *_, height in drawn} == {1 / len(drawn)}
                ended[action.output], begun = end, [*begun, (action, start)]
            assert next(working, None) is None
            for start, end in sorted({(start, end) for _, start, end, _ in boxes}):
                assert start == pytest.approx(now)
                now = end
            assert now == pytest.approx(ENDS[variant])
        assert all(ended[need] <= start + 1e-9
                   for action, start in begun for need in made.needs(action))


def test_what_it_says_of_idle_time_and_memory(svg, lanes):
    """As measured in the picture, by the chapter's closed forms, and by hand."""
    told = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")
            if text.get("class") == "told"]
    for said, (variant, (idle, alive)) in zip(told, BY_HAND.items(), strict=True):
        bubble = chapter("07").bubble(variant, animation.P, animation.M, 1)
        assert bubble / (1 + bubble) == pytest.approx(idle)
        for boxes, _ in lanes[variant]:
            waits = sum(end - start for kind, start, end, _ in boxes if kind == "idle")
            assert waits / ENDS[variant] == pytest.approx(idle)
        most = [chapter("07").most_alive(variant, rank, animation.P, animation.M, 1)
                for rank in range(animation.P)]
        assert max(most) == alive
        assert re.findall(r"\d+", said) == [str(alive), f"{100 * idle:.0f}"]
