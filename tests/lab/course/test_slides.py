"""Slides: each fits, and says what the lessons and functions say."""

import re

from lab.course import slides
from lab.course.week import numbers, picture
from lab.course.weeks import WEEKS
from lab.sources import texts
from lab.sources.asked import QUESTIONS
from tests.conftest import ROOT

ROOM = 560  # pixels of 720 below a title
TEXT, CODE, COLUMNS = 39, 27, 85  # pixels of a line, and of one of code; letters of a line


def height(body):
    """About the pixels that a slide's body takes, with the sizes in slides.HEAD."""
    pixels = 0
    for part in re.split(r"(```text\n.*?```)", body, flags=re.DOTALL):
        lines = [line for line in part.split("\n") if line.strip() and "| --- |" not in line]
        if part.startswith("```"):
            pixels += 30 + CODE * (len(lines) - 2)
        else:
            pixels += sum(500 if line.startswith("![") else TEXT * -(-len(line) // COLUMNS)
                          for line in lines)
    return pixels


def test_each_slide_fits():
    for week in WEEKS:
        for one in week.outline:
            body = slides.body(one)
            assert height(body) <= ROOM, (week.number, one.title, height(body))
        assert height(slides.next_steps(week)) <= ROOM


def test_a_slide_says_what_stands_in_the_lesson():
    """Its words, in their order, from those on with which a piece begins."""
    words = lambda text: " ".join(re.findall(r"\w+", text))
    for one in (one for week in WEEKS for one in week.outline if one.begins):
        lesson = words((ROOT / f"{one.lesson}.py").read_text())
        for begin in one.begins:
            piece = words(slides.piece(one.lesson, begin).removeprefix("```text"))
            assert piece.startswith(words(begin)) and piece in lesson, begin


def test_signs_of_markdown_stay_signs():
    assert slides.as_text("a_b _c_ 2*3 <b> `x_*` | [a]") == (
        r"a_b \_c\_ 2\*3 \<b\> `x_*` \| \[a\]")
    assert slides.as_text("a *word* of 2*3*4") == r"a *word* of 2\*3\*4"


def test_numbers_are_computed():
    [asked] = [one for one in QUESTIONS if one.number == 2]
    body = slides.body(numbers("", 2))
    for row in asked.rows:
        assert f"| {texts.shown(row.ours(), row.unit)} |" in body


def test_a_week_is_written_with_its_figures(tmp_path):
    from PIL import Image

    [shown] = [one for one in WEEKS[2].outline if one.begins][:1]
    week = WEEKS[2]._replace(outline=(picture("Seen", "06_context_parallel"), shown))
    [path] = slides.write([week], tmp_path)
    assert path == tmp_path / "week-03.md" and path.read_text() == slides.make(week)
    with Image.open(tmp_path / "figures/06_context_parallel.png") as image:
        assert image.height == round(image.width * slides.TALL)
    head, *parts = path.read_text().split("\n## ")
    assert "marp: true\n" in head and len(parts) == 3
    assert "make figures ONLY=06" in parts[0] and week.hunt.command in parts[2]
