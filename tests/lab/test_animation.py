"""lab/animation.py: the README's picture is what chapter 07's schedules do."""

import re
from xml.etree import ElementTree

import pytest

from lab import ROOT, animation
from lab.chapters import chapter

SVG = "{http://www.w3.org/2000/svg}"
UNIT, LANE = 22, 21                     # pixels of the template
KINDS = {color: kind for kind, color in animation.COLORS.items()}
BY_HAND = {                             # (share of the step that is idle, micro-batches in memory)
    "afab": (3 / 11, 8), "1f1b": (3 / 11, 4), "zb-h1": (1 / 9, 4)}

FRONT = (ROOT / "lab/page/files/front.html").read_text(encoding="utf-8")
[ALT] = re.findall(r'<img src="figures/pipeline.svg".* alt="(.*?)"', FRONT)


@pytest.fixture(scope="module")
def svg():
    return ElementTree.fromstring(animation.draw())


@pytest.fixture(scope="module")
def lanes(svg):
    """For each GPU of each panel (kind, start, end, share of the lane's height) of its boxes, and
    the units that its lane is long."""
    found = []
    for pad in svg.iter(f"{SVG}rect"):
        if pad.get("height") == str(LANE) and pad.get("fill") == "url(#idle)":
            found.append(([], float(pad.get("width")) / UNIT))
        elif found and pad.get("fill") in KINDS:
            start = (float(pad.get("x")) - 0.75) / UNIT
            end = start + (float(pad.get("width")) + 1.5) / UNIT
            found[-1][0].append((KINDS[pad.get("fill")], start, end,
                                 float(pad.get("height")) / LANE))
    assert len(found) == len(BY_HAND) * animation.P
    return {variant: found[i * animation.P:][:animation.P] for i, variant in enumerate(BY_HAND)}


def test_the_committed_picture_is_what_is_drawn_now():
    picture = (ROOT / "figures/pipeline.svg").read_text(encoding="utf-8")
    assert picture == animation.draw(), "python -m lab.animation draws it anew"
    assert len(picture) < 100_000


def test_each_lane_has_every_action_once_and_when_it_can_be(svg, lanes):
    """Boxes do not overlap, and none begins before what it needs has ended."""
    numbers = [[int(text.text) for text in group] for group in svg.iter(f"{SVG}g")
               if group.get("text-anchor") == "middle"]
    for v, variant in enumerate(BY_HAND):
        made = chapter("07").make_schedule(variant, animation.P, animation.M)
        ended, begun = {}, []
        for rank, (boxes, _) in enumerate(lanes[variant]):
            micro_batches = numbers[v * animation.P + rank]
            assert micro_batches == [action.micro_batch for action in made.actions[rank]]
            halves = iter(boxes)
            for action in made.actions[rank]:
                drawn = [next(halves) for _ in action.kind]
                [(start, end)] = {(start, end) for _, start, end, _ in drawn}
                assert "".join(kind for kind, *_ in drawn) == action.kind
                assert end - start == pytest.approx(len(action.kind))
                assert {height for *_, height in drawn} == {1 / len(drawn)}
                ended[action.output], begun = end, [*begun, (action, start)]
            assert next(halves, None) is None
            moments = sorted({(start, end) for _, start, end, _ in boxes})
            assert all(end <= start + 1e-9 for (_, end), (start, _) in zip(moments, moments[1:]))
        assert min(start for _, start in begun) == 0
        assert all(ended[need] <= start + 1e-9
                   for action, start in begun for need in made.needs(action))


def test_what_it_says_of_idle_time_and_memory(svg, lanes):
    """As measured in the picture, by the chapter's closed forms, and by hand."""
    told = ["".join(text.itertext()) for text in svg.iter(f"{SVG}text")
            if text.get("class") == "told"]
    for said, (variant, (idle, alive)) in zip(told, BY_HAND.items(), strict=True):
        bubble = chapter("07").bubble(variant, animation.P, animation.M, 1)
        assert bubble / (1 + bubble) == pytest.approx(idle)
        for boxes, long in lanes[variant]:
            work = sum((end - start) * height for _, start, end, height in boxes)
            assert 1 - work / long == pytest.approx(idle)
        most = [chapter("07").most_alive(variant, rank, animation.P, animation.M, 1)
                for rank in range(animation.P)]
        assert max(most) == alive
        assert said == f"up to {alive} micro-batches in memory{idle:.0%} idle"
        assert f"{idle:.0%}" in ALT
    [sooner] = [text.text for text in svg.iter(f"{SVG}text") if "sooner" in (text.text or "")]
    assert sooner == f"{1 - 27 / 33:.0%} sooner"


def test_a_lamp_shows_what_its_gpu_does(svg, lanes):
    style, cycle = svg.find(f"{SVG}style").text, 33 + animation.PAUSE
    for v, variant in enumerate(BY_HAND):
        for rank, (boxes, long) in enumerate(lanes[variant]):
            [frames] = re.findall(rf"@keyframes lamp-{v}-{rank} {{(.*)}}", style)
            lit = [(float(share) * cycle / 100, color) for share, color in
                   re.findall(r"([\d.]+)%(?:, 100%)? { fill: (\S+) }", frames)]
            for time in range(cycle):
                *_, color = [color for since, color in lit if since < time + 0.5]
                working = [kind for kind, start, end, _ in boxes if start < time + 0.5 < end]
                expected = animation.COLORS[working[0] if working else None]
                assert color == (expected if time < long else "none")


def test_what_does_not_move_is_the_finished_picture(svg):
    """All that moves is in a style for those who like motion; a page that loads no style, or shows
    the picture before it begins, has nothing over the boxes."""
    style = svg.find(f"{SVG}style").text.strip()
    assert style.startswith("@media (prefers-reduced-motion: no-preference) {")
    assert style.count("{") == style.count("}") and style.endswith("}\n}")
    for one in svg.iter():
        if one.get("class") in ("cover", "now"):
            assert one.get("opacity") == "0"
        elif one.get("class") == "lamp":
            assert one.get("fill") == "none"
    [shown] = re.findall(r"@keyframes cover .* ([\d.]+)%, 100% {.*scaleX\(0\)", style)
    assert float(shown) == pytest.approx(100 * 33 / (33 + animation.PAUSE), abs=0.01)
    assert svg.find(f"{SVG}title").text and "27% of the step" in svg.find(f"{SVG}desc").text
    assert {one.tag for one in svg.iter()} <= {SVG + tag for tag in (
        "svg title desc style defs pattern rect text tspan g circle path line").split()}
    text = animation.draw()                             # which loads nothing
    assert text.count("//") == 1 and text.count("url(") == text.count("url(#idle)")
