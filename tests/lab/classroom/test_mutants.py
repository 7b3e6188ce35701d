"""A mutant of each solution is found wrong: the checks see what a student may get wrong."""

import ast
import os

import pytest

from lab.classroom import checks, exercises, grading, holes
from lab.classroom.exercise import Exercise, Run, Same
from tests.lab.classroom import mutants
from tests.lab.classroom.equal_mutants import EQUAL

TABLE = {exercise.number: (chapter, exercise)
         for chapter, those in exercises.EXERCISES.items() for exercise in those}
EACH = 2 if os.environ.get("FULL") else 1
CHEAP = "00.12", "02.9", "04.7", "sharding.1"


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def at_one(chapter):
    return chapter.ranks_that_pay(1, 8, 1, 1)


def a_ramp(chapter):
    return chapter.ramp(1, 2, 1)


def survivors(number, each):
    chapter, exercise = TABLE[number]
    return [mutant.name for mutant in mutants.drawn(chapter, exercise, each)
            if mutant.name not in EQUAL
            and mutants.grade(mutant, exercise)[0] == grading.RIGHT]


@pytest.mark.parametrize("number", [
    pytest.param(number, marks=[] if number in CHEAP else [pytest.mark.full]) for number in TABLE])
def test_a_mutant_is_found_wrong(number):
    assert survivors(number, EACH) == []


def test_a_weak_check_lets_mutants_live():
    weak = Exercise("04.7", "ranks_that_pay", 1, "?", ("", ""), (Same(at_one, "of ones"),))
    marks = {mutant.after: mutants.grade(mutant, weak)[0]
             for mutant in mutants.mutants_of("04_tensor_parallel", weak)
             if mutant.before in ("8", "8 * dim / width * bandwidth / flops")}
    assert marks == {"8 * dim / width * bandwidth * flops": grading.RIGHT, "9": grading.WRONG}


def test_at_home_runs_are_not_played_and_other_exercises_are_holes():
    chapter, exercise = TABLE["02.5"]
    [mutant, *_] = mutants.drawn(chapter, exercise, 1)
    assert mutants.grade(mutant, exercise._replace(checks=(Run(9),)), alone=True) == (
        grading.RIGHT, "")
    hides = Same(a_ramp, "of another exercise")
    mark, words = mutants.grade(mutant, exercise._replace(checks=(hides,)), alone=True)
    assert mark == grading.WRONG and "NotImplementedError: 02.9: ramp" in words


@pytest.mark.parametrize("number", [
    "00.2", "sharding.1", *(pytest.param(number, marks=pytest.mark.full)
                            for number in ("02.4", "04.3"))])
def test_a_mutant_differs_from_the_solution_in_its_function_alone(number):
    chapter, exercise = TABLE[number]
    source = exercises.solution(chapter)
    every = list(mutants.mutants_of(chapter, exercise))
    assert len({mutant.name for mutant in every}) == len(every) > 5
    parsed = {mutant.name: mutant for mutant in every if mutants.is_python(mutant)}
    assert len(parsed) > 0.9 * len(every)
    for mutant in parsed.values():
        tree = ast.parse(mutant.source)
        assert ast.dump(holes.find(tree, mutant.function)) != ast.dump(
            holes.find(ast.parse(source), mutant.function)), mutant.name
        restored = holes.graft(mutant.source, source, [mutant.function]).source
        assert ast.dump(ast.parse(restored)) == ast.dump(ast.parse(source)), mutant.name
    assert [mutant.name for mutant in mutants.drawn(chapter, exercise, 3)] == [
        mutant.name for mutant in mutants.drawn(chapter, exercise, 3)]


def test_equal_mutants_are_mutants_and_each_has_a_reason():
    known = {}
    for name, why in EQUAL.items():
        number = name.split()[0]
        if number not in known:
            known[number] = {mutant.name for mutant in mutants.mutants_of(*TABLE[number])}
        assert name in known[number] and len(why) > 10, name
