"""The pages that are computed, and the numbers of the midterm. No page that students read has a
line of a solution."""

import re

from lab.classroom import exercises, holes, hunt
from lab.course import answers, midterm, pages, project, times
from lab.course.week import TABLE
from lab.course.weeks import WEEKS
from lab.page import markdown
from tests.conftest import FULL, ROOT
from tests.faults import FAULTS, Graded

PAGES = markdown.pages()


def test_the_pages_are_those_that_are_computed():
    """If not: `python -m lab.syllabus --pages pages`, and commit what it writes."""
    names = pages.names() if FULL else ["points.md", "teacher/office-hours.md"]
    assert not [name for name in names if pages.make(name) != PAGES[name].text]


def lines_of_solution(number):
    """Of an exercise's functions, without comments and short ones."""
    lines = exercises.solution(TABLE[number][0]).split("\n")
    body = [lines[at].partition("  # ")[0].strip() for node in times.nodes_of(number)
            for at in range(times.body_of(node)[0].lineno - 1, holes.lines_of(node)[1])]
    return {line for line in body if len(line) > 20 and not line.startswith("#")}


def test_no_page_of_students_has_a_line_of_a_solution():
    """Office hours, which have some, are for teachers; CONTRIBUTING is for who writes exercises."""
    solutions = {number: lines_of_solution(number) for number in TABLE}
    for path, page in PAGES.items():
        told = {number for number, lines in solutions.items()
                if any(line in page.text for line in lines)}
        assert page.for_teachers or path == "../CONTRIBUTING.md" or not told, (path, told)
        assert path != "teacher/office-hours.md" or len(told) > 20


def test_office_hours_have_every_wrong_answer():
    """The tables of tests/faults, which are read as text."""
    found = [(number, *answer) for number, those in answers.read().items() for answer in those]
    graded = [(seen.exercise, fault.right, fault.wrong, seen.says)
              for fault in FAULTS for seen in fault.by(Graded)]
    assert sorted(found) == sorted(graded) and answers.read().keys() == TABLE.keys()
    text = PAGES["teacher/office-hours.md"].text
    for number, right, wrong, _ in found:
        assert pages.code(right) in text and pages.code(wrong) in text, (number, right)


# --------------------------------------------------------------------------- midterm and project

def test_marks_have_all_numbers():
    for task in midterm.TASKS:
        asked = sum(words.count("{}") for _, words in task.marks)
        assert asked == len(task.answers()), task.title
        assert not any("{}" in words for _, words in task.rubric)
    assert sum(points for points, _ in project.RUBRIC) == 100


def test_the_midterms_bug_is_in_no_hunt_that_a_student_has_played():
    [seed] = re.findall(r"lab.hunt 02 --seed (\d+)", (ROOT / "lab/notebook.md").read_text())
    played = [hunt.draw("02", int(seed)), *(hunt.draw(week.hunt.chapter, week.hunt.seed)
                                            for week in WEEKS if week.hunt)]
    assert midterm.a_bug().number not in {exhibit.number for exhibit in played}


def test_what_the_marks_say_of_the_numbers_holds():
    gigabytes = [float(number.split()[0]) for number in midterm.states()]
    assert gigabytes[0] > 80 and 80 < gigabytes[1] < 80.5 and max(gigabytes[2:]) < 80
    *_, ring, tree, small_ring, small_tree = midterm.ring_and_tree()
    assert float(ring.split()[0]) < float(tree.split()[0])
    assert float(small_ring.split()[0]) > float(small_tree.split()[0])
