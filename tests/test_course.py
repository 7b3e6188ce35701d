"""The course's pages are kept by hand: the exercises and hunts that they name are there."""

import re

from lab import hunt, museum
from lab.classroom.exercises import EXERCISES
from tests.conftest import ROOT
from tests.test_documents import text_of

LEVELS = {exercise.number: exercise.level
          for exercises in EXERCISES.values() for exercise in exercises}
REQUIRED = re.compile(r"^\| (\w+\.\d+) \|.*\| (\d) \|$", re.MULTILINE)
TOTALS = re.compile(r"^\| \d+ \| \[.*\| (\d+) \| (\d+) \|$", re.MULTILINE)
HUNT = re.compile(r"make hunt CHAPTER=(\d+) SEED=(\d+)")


def weeks():
    """The sections of the weeks, in their order."""
    return re.split(r"^## (?=Week )", text_of("pages/course.md"), flags=re.MULTILINE)[1:]


def test_each_week_asks_for_exercises_that_are_there():
    """With their levels, each once; the first table counts them, and adds up their points."""
    rows = [REQUIRED.findall(week) for week in weeks()]
    listed = [(number, int(level)) for week in rows for number, level in week]
    assert len({number for number, _ in listed}) == len(listed) > 50
    assert set(listed) <= LEVELS.items()
    totals = [(len(week), sum(int(level) for _, level in week)) for week in rows]
    text = text_of("pages/course.md")
    assert totals == [(int(count), int(points)) for count, points in TOTALS.findall(text)]


def test_no_two_hunts_have_the_same_bug_and_none_is_the_midterms():
    """Which bug a seed draws changes with a chapter's exhibits."""
    [midterms] = [one for one in museum.exhibits()["02"]
                  if one.new.strip() and one.new.strip() in text_of("pages/midterm.md")]
    drawn = [hunt.draw(*HUNT.search(week).groups()) for week in weeks()]
    assert len({exhibit.title for exhibit in drawn}) == len(drawn) == 10
    assert all(exhibit.ranks <= 4 for exhibit in drawn)
    [seed] = re.findall(r"lab.hunt 02 --seed (\d+)", (ROOT / "lab/notebook.md").read_text())
    assert midterms not in [*drawn, hunt.draw("02", int(seed))]
