"""The grader: what it says of right, wrong and broken answers, and how it reports them."""

import os

import pytest
from wrong_answers import WRONG

from lab import checks, exercises, grade, holes

TABLE = {exercise.number: (chapter, exercise)
         for chapter, those in exercises.EXERCISES.items() for exercise in those}


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def planted(chapter, exercise, right, wrong):
    """The chapter with a wrong answer in the functions of an exercise."""
    source = exercises.solution(chapter)
    lines, found = source.split("\n"), 0
    tree = grade.parse(source)
    for name in exercise.functions:
        first, last = holes.lines_of(holes.find(tree, name))
        text = "\n".join(lines[first - 1 : last])
        if right in text:
            found += text.count(right)
            assert source.count(text) == 1
            changed = source.replace(text, text.replace(right, wrong))
    assert found == 1, f"{exercise.number} has {found} times: {right}"
    return changed


ANSWERS = [pytest.param(number, wrong, id=f"{number}-{i}")
           for number, answers in WRONG.items() for i, wrong in enumerate(answers)]


@pytest.mark.parametrize(("number", "answer"), ANSWERS)
def test_a_wrong_answer_is_wrong_and_is_told_why(number, answer, tmp_path):
    chapter, exercise = TABLE[number]
    text = planted(chapter, exercise, answer.right, answer.wrong)
    text, faults = grade.without_faults(text)
    file = grade.File(chapter, tmp_path, text, grade.parse(text), faults)
    mark, words = grade.grade_exercise(exercise, file)
    assert mark == grade.WRONG and answer.says in words, words


@pytest.mark.parametrize("number", TABLE)
def test_the_solution_passes(number, tmp_path):
    chapter, exercise = TABLE[number]
    text = exercises.solution(chapter)
    file = grade.File(chapter, tmp_path, text, grade.parse(text), {})
    mark, words = grade.grade_exercise(exercise, file)
    assert mark == grade.RIGHT, words
