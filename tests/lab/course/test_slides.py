"""Slides: each fits, has one idea, and says what the lessons and functions say."""

import re

import pytest
from PIL import Image

from lab import ROOT
from lab.course import slides, times
from lab.course.week import numbers, picture, point
from lab.course.weeks import WEEKS
from lab.sources import texts
from lab.sources.asked import QUESTIONS

ROOM = 560              # pixels of 720 below a title
TEXT, CODE, COLUMNS, WIDE = 39, 27, 85, 100     # pixels of a line; letters of one, and of code


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


@pytest.mark.parametrize("week", WEEKS, ids=lambda week: str(week.number))
def test_a_slide_fits(week):
    for one in week.outline:
        body = slides.body(one)
        assert height(body) <= ROOM, (one.title, height(body))
        drawn = re.findall(r"```text\n(.*?)```", body, re.DOTALL)
        assert all(len(line) <= WIDE for text in drawn for line in text.split("\n")), one.title
        assert len(one.title) <= 60
        assert re.search(r"[.?)|`]$", body), f"{one.title} ends with {body[-40:]!r}"
    assert height(slides.next_steps(week)) <= ROOM


def test_a_slide_that_is_too_full_is_told():
    assert height("x" * 86) == 2 * TEXT
    assert height("```text\na\nb\n```\n\nsaid") == 30 + 2 * CODE + TEXT
    assert height(slides.body(point("", "10_planner", "matmul"))) > ROOM


def test_what_a_slide_says_stands_in_the_lesson():
    assert slides.body(point("", "02_data_parallel", "- Once.")).startswith(
        "**Once.** With several micro-batches, only the last backward sends.")
    drawn = slides.body(point("", "04_tensor_parallel", "B by columns"))
    assert drawn.startswith("```text\nB by columns    A · [B1 | B2]") and drawn.endswith("```")
    lesson = (ROOT / "04_tensor_parallel.py").read_text()
    assert all(line in lesson for line in drawn.split("\n")[1:-1])
    both = slides.body(point("", "00_collectives", "Duality.", "In a tree"))
    assert both.index("Duality.") < both.index("In a tree") and "\n\n" in both
    with pytest.raises(LookupError, match="nothing in the lesson of 02_data_parallel begins"):
        slides.piece("02_data_parallel", "Nobody says so")


def test_entries_of_a_list():
    lines = ["    a   one", "        more", "    b   two"]
    assert slides.entries(lines) == [lines[:2], lines[2:]]
    assert slides.as_entry(lines[:2]) == "**a** one more"


def test_signs_of_markdown_stay_signs():
    assert slides.as_text("a_b _c_ 2*3 <b> `x_*` | [a]") == (
        r"a_b \_c\_ 2\*3 \<b\> `x_*` \| \[a\]")
    assert slides.as_text("a *word* of 2*3*4") == r"a *word* of 2\*3\*4"


def test_numbers_are_computed():
    [asked] = [one for one in QUESTIONS if one.number == 2]
    body = slides.body(numbers("", 2))
    for row in asked.rows:
        assert f"| {texts.shown(row.ours(), row.unit)} |" in body
    assert "`python -m lab.questions 2` says why." in body


def test_a_week_is_written_with_its_figures(tmp_path):
    week = WEEKS[2]._replace(outline=(picture("Seen", "06_context_parallel"),
                                      point("Said", "02_data_parallel", "- Once.")))
    [path] = slides.write([week], tmp_path)
    assert path == tmp_path / "week-03.md" and path.read_text() == slides.make(week)
    with Image.open(tmp_path / "figures/06_context_parallel.png") as shown:
        assert shown.height == round(shown.width * slides.TALL)
    text = path.read_text()
    head, *parts = re.split(r"^## ", text, flags=re.MULTILINE)
    assert head.startswith("---\nmarp: true\n") and "headingDivider: 2" in head
    assert "\n---\n\n# Data parallelism\n" in head and "\n---\n" not in text[len(head):]
    assert [part.split("\n")[0] for part in parts] == ["Seen", "Said", "Until next week"]
    assert "`make figures ONLY=06` draws all of it." in parts[0]
    assert week.hunt.command in parts[2] and times.in_hours(
        sum(times.of_week(week).values())) in parts[2]
