"""The pages: what is written is what the functions give, and no page that students read has a line
of a solution."""

import functools
import re

import pytest

from lab.classroom import exercises, holes, hunt
from lab.course import answers, midterm, pages, project, times
from lab.course.week import TABLE
from lab.course.weeks import WEEKS
from lab.page import markdown
from tests.conftest import ROOT

PAGES = markdown.pages()
EVERY = pytest.mark.parametrize("path", PAGES)


@pytest.mark.parametrize("name", pages.names())
def test_what_is_written_is_what_is_computed(name):
    """`python -m lab.syllabus --pages pages` writes it."""
    assert (pages.FOLDER / name).read_text(encoding="utf-8") == pages.make(name)


def test_pages_are_written_into_any_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "names", lambda: ["points.md", "teacher/midterm.md"])
    written = pages.write(tmp_path)
    assert [path.relative_to(tmp_path).as_posix() for path in written] == pages.names()
    assert all(path.read_text() == PAGES[name].text for path, name in zip(written, pages.names()))


@functools.cache
def lines_of_solutions():
    """{exercise: lines of its functions that say something, without what is said of them}."""
    found = {}
    for number in TABLE:
        lines = exercises.solution(TABLE[number][0]).split("\n")
        body = [lines[at].partition("  # ")[0].strip() for node in times.nodes_of(number)
                for at in range(times.body_of(node)[0].lineno - 1, holes.lines_of(node)[1])]
        found[number] = {line for line in body if len(line) > 20 and not line.startswith("#")}
    return found


@EVERY
def test_no_page_of_students_has_a_line_of_a_solution(path):
    """Office hours, which have some, are for teachers; CONTRIBUTING is for who writes exercises."""
    text = PAGES[path].text
    told = {number for number, lines in lines_of_solutions().items()
            if any(line in text for line in lines)}
    assert PAGES[path].for_teachers or path == "../CONTRIBUTING.md" or not told
    if path == "teacher/office-hours.md":
        assert len(told) > 20


def test_office_hours_have_every_wrong_answer():
    found = answers.read()
    assert found.keys() == TABLE.keys()
    text = PAGES["teacher/office-hours.md"].text
    assert text.count('in place of `') == sum(map(len, found.values()))
    assert [line for line in text.split("\n") if line.startswith("### ")] == [
        f"### Exercise {number}: {pages.what(number)}" for number in TABLE]


def test_code_is_code_whatever_is_in_it():
    assert pages.code("x = 1") == "`x = 1`" and pages.code("") == "` `"
    assert pages.code("a\n    b") == "`a ⏎ b`" and pages.code("a `b`") == "`` a `b` ``"


# --------------------------------------------------------------------------- midterm and project

def test_marks_have_all_numbers():
    for task in midterm.TASKS:
        asked = sum(words.count("{}") for _, words in task.marks)
        assert asked == len(task.answers()), task.title
        assert not any("{}" in words for _, words in task.rubric)
        assert 4 <= task.points <= 6


def test_the_midterms_bug_is_in_no_hunt_that_a_student_has_played():
    [seed] = re.findall(r"lab.hunt 02 --seed (\d+)", (ROOT / "lab/notebook.md").read_text())
    played = [hunt.draw("02", int(seed)), *(hunt.draw(week.hunt.chapter, week.hunt.seed)
                                            for week in WEEKS if week.hunt)]
    assert midterm.a_bug().number not in {exhibit.number for exhibit in played}


def test_what_the_marks_say_of_the_numbers_holds():
    gigabytes = [float(number.split()[0]) for number in midterm.states()]
    assert gigabytes[0] > 80 and 80 < gigabytes[1] < 80.5 and max(gigabytes[2:]) < 80
    assert midterm.means() == ("2.5", "2.25")
    _, sent, sent_by_six, ring, tree, small_ring, small_tree = midterm.ring_and_tree()
    assert (sent, sent_by_six) == ("1.1 GB", "1 GB")
    assert float(ring.split()[0]) < float(tree.split()[0])
    assert float(small_ring.split()[0]) > float(small_tree.split()[0])
    assert midterm.recomputed() == (str(48 * 17), str(47 + 17), "2", str(23 + 2 * 17))
    assert midterm.hidden()[0].replace(",", "").startswith(str(int(4 / 2 * 7 / 8 * 989e12 / 450e9)))


def test_the_projects_marks_are_a_hundred():
    assert sum(points for points, _ in project.RUBRIC) == 100
    assert len(set(project.PROJECTS)) == len(project.PROJECTS)
