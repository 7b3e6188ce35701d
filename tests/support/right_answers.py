"""A right answer that does not look like ours, graded."""

import ast

from lab.classroom import exercises, grading, holes, students


def graded(number, answer, name=None):
    """(mark, words) of an exercise whose function is this text. name: of several, which one."""
    chapter, exercise = next((chapter, e) for chapter, those in exercises.EXERCISES.items()
                             for e in those if e.number == number)
    source = exercises.solution(chapter)
    first, last = holes.lines_of(holes.find(ast.parse(source), name or exercise.functions[0]))
    lines = source.split("\n")
    lines[first - 1 : last] = answer.strip("\n").split("\n")
    text = "\n".join(lines)
    file = students.File(chapter, None, text, students.parse(text))
    return grading.grade_exercise(exercise, file)
