"""The grader and answers that are right, but not as ours are; and those that are right here alone.
"""

import pytest
import torch
import torch.distributed as dist

from lab.classroom import checks, exercises, grading, holes, second
from lab.classroom.exercise import Run
from tests.lab.classroom.test_grade import ANSWER, SOLUTION, TABLE, file_of
from tests.lab.classroom.two_exercises import CHAPTER, ON_RANKS, PAYS, SUM


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def graded(number, change, seed=None):
    """What is said of the solution of an exercise, with each first text replaced by the second."""
    chapter, exercise = TABLE[number]
    text = exercises.solution(chapter)
    for old, new in change:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return grading.grade_exercise(exercise, file_of(text, chapter), seed=seed)


PLACE = """    def place(self, p):
        if p.grad is not self.view[p]:
            self.view[p].copy_(0 if p.grad is None else p.grad)
            p.grad = self.view[p]
"""


@pytest.mark.parametrize("left", ["pass", 'raise NotImplementedError("02.4: Bucket")'])
def test_what_another_method_does_may_be_left_open(left):
    """Here a helper does what move_in is there for."""
    text = exercises.solution("02_data_parallel").replace("self.move_in(p)", "self.place(p)")
    node = holes.find(holes.parsed(text), "Bucket.move_in")
    first, last = holes.lines_of(node)
    lines = text.split("\n")
    lines[first:last] = [f"        {left}", "", *PLACE.split("\n")]
    chapter, exercise = TABLE["02.4"]
    file = file_of("\n".join(lines), chapter)
    assert grading.grade_exercise(exercise, file) == (grading.RIGHT, "")


def test_a_class_comes_with_what_it_is_made_of():
    """An attribute that a student's __init__ sets is there in his method."""
    chapter, exercise = TABLE["01.4"]
    text = exercises.solution(chapter)
    assert "self.good" in text
    text = text.replace("self.good", "self.steps_that_were_fine")
    assert grading.grade_exercise(exercise, file_of(text, chapter)) == (grading.RIGHT, "")


def test_with_a_method_comes_what_no_exercise_asks_for():
    methods = [f"    def {name}(self): return 1\n" for name in "fgh"]
    solution = "".join(["class A:\n", *methods])
    tree = holes.parsed(solution + "    def own(self): 1\n\n\nclass B:\n    def k(self): 1\n")
    names = lambda *these, asked=(): holes.own_methods(solution, tree, these, {*these, *asked})
    assert names("A.f") == ["A.g", "A.h"] and names("A.f", asked=["A.h"]) == ["A.g"]
    assert names("A") == names("f") == []


def test_of_several_functions_each_that_is_right_earns_its_part(monkeypatch):
    both = ON_RANKS._replace(level=3)
    monkeypatch.setattr(exercises, "EXERCISES", {CHAPTER: [both]})
    for text, share, words in [
            (SOLUTION, 1, ""),
            (SOLUTION.replace(ANSWER, "        return 2 * gradient, None\n"), 0.5,
             "right alone: SumOut.forward"),
            (SOLUTION.replace(ANSWER, "        return gradient,, None\n"), 0.5, "invalid syntax"),
            (holes.cut(SOLUTION, "SumOut.backward", "?", "?"), 0.5, "not begun: SumOut.backward")]:
        monkeypatch.setattr(grading, "read", lambda folder, chapter: file_of(text))  # noqa: B023
        result, _ = grading.grade(None, {CHAPTER: [both]})
        assert result.share == share and result.score == 3 * share and words in result.words


def test_a_constant_that_fits_the_run_is_wrong_in_another(monkeypatch):
    """Two ranks: each holds a half; with another number of them it does not."""
    chapter, exercise = TABLE["04.2"]
    fitted = [(ANSWER, "        return gradient * 2 / dist.get_world_size(), None\n")]
    two = exercise._replace(checks=(Run(2, "--steps=1 --layers=1"),))
    monkeypatch.setitem(TABLE, "04.2", (chapter, two))
    assert graded("04.2", fitted) == (grading.RIGHT, "")
    assert second.of(two.checks[0], chapter, "a day").ranks != 2
    mark, words = graded("04.2", fitted, "a day")
    assert mark == grading.WRONG and "right in its own run, and not in general" in words
    assert graded("04.2", [], "a day") == (grading.RIGHT, "")


def test_a_value_that_no_run_sees_is_wrong_in_the_whole_chapter_too():
    file = file_of(SOLUTION.replace("    return 1 + 8 * dim", "    return 8 * dim"))
    said = "[ranks_that_pay(dim, 2, 989e12, 450e9) for dim in (1024, 8192)]: "
    results = [grading.Result("04.7", "", grading.WRONG, "", 1, 0)]
    mark, words = grading.grade_whole([SUM, PAYS], file, results, checks.LIMIT)
    assert mark == grading.WRONG and words.startswith(said)


def test_at_home_a_function_that_is_left_open_is_no_point(monkeypatch):
    """Some values need the other one alone."""
    text = holes.cut(SOLUTION, "SumOut.backward", "?", "04.2: SumOut.backward")
    forward = ON_RANKS.checks[0]._replace(function=sum_alone, words="SumOut, forward")
    both = ON_RANKS._replace(checks=(forward, *ON_RANKS.checks))
    known = {check.key: checks.answers(CHAPTER, SOLUTION, check) for check in both.checks}
    monkeypatch.setattr(checks, "stored", lambda: known)
    assert grading.grade_exercise(both, file_of(text)) == (
        grading.OPEN, "not begun: SumOut.backward")
    assert grading.grade_exercise(both, file_of(SOLUTION)) == (grading.RIGHT, "")


def sum_alone(chapter):
    return chapter.SumOut.apply(torch.ones(2), dist.group.WORLD)
