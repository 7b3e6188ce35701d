"""A class of thirty: what students hand in of chapter 04, and the points that each deserves."""

from pathlib import Path
from typing import NamedTuple

from lab.classroom import exercises, holes
from tests.faults import EXERCISES as TABLE
from tests.faults import wrong_answers
from tests.lab.classroom.test_hostile import BROKEN, HOSTILE, LINES, RIGHT
from tests.lab.classroom.two_exercises import CHAPTER, SUM

NUMBERS = "04.1", "04.2", "04.3", "04.6", "04.7"
ALL = {"04.1": 1, "04.2": 1, "04.3": 3, "04.6": 2, "04.7": 1}   # what each is worth
NOTHING = dict.fromkeys(ALL, 0)
SOLUTION = exercises.solution(CHAPTER)


class Student(NamedTuple):
    text: str | None        # of the chapter; None: not submitted
    points: dict            # {number of an exercise: what it deserves}
    beside: dict = {}       # {another file: its text}


def instead(old, new):
    assert SOLUTION.count(old) == 1, old
    return SOLUTION.replace(old, new)


def with_holes(*names):
    text = SOLUTION
    for name in names:
        text = holes.cut(text, name, "?", "?")
    return text


def wrong(number, index, points=0):
    """With one of the wrong answers of this exercise."""
    return Student(wrong_answers(number)[index].planted(), ALL | {number: points})


BY_HAND = """        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
"""
TIMES = """    computing, sending = 16 * dim * dim / flops, 2 * dim * width / bandwidth
    return computing / sending + 1
"""
FITTED = "return gradient * (dist.get_world_size() / {ranks}), None"


def written_differently():
    """Right ones; the last is a copy, with other names."""
    by_hand = instead("        return summed(gradient, ctx.group), None\n", BY_HAND)
    module = instead("import common\n", "import common\nfrom my_numbers import SUMS\n").replace(
        "(4 * cfg.layers", "(SUMS * cfg.layers")
    times = instead(RIGHT + "\n", TIMES)
    copy = times.replace("computing, sending", "a, b").replace("computing / sending", "a / b")
    clone = instead(LINES[SUM], "        return gradient.clone(), None\n")
    return {"by hand": Student(by_hand, ALL), "a clone": Student(clone, ALL),
            "a module beside": Student(module, ALL, {"my_numbers.py": "SUMS = 4\n"}),
            "two times": Student(times, ALL), "a copy of two times": Student(copy, ALL)}


def unfinished():
    """Nothing begun, three exercises left, and one of two functions left."""
    functions = [name for number in NUMBERS for name in TABLE[number][1].functions]
    loss = TABLE["04.3"][1].functions
    return {"nothing": Student(with_holes(*functions), NOTHING),
            "two of five": Student(with_holes(*functions[2:]), NOTHING | {"04.1": 1, "04.2": 1}),
            "half a loss": Student(with_holes(loss[1]), ALL | {"04.3": 1.5}),
            "an empty file": Student("", NOTHING),
            "no file": Student(None, NOTHING, {"README.md": "I was ill.\n"})}


def hostile(pids):
    """Who attacks the grader earns the other exercises, and his own if it is right beside that.
    pids: a file in which they note what they start."""
    found = {}
    for name, (exercise, body, says) in HOSTILE.items():
        text = instead(LINES[exercise], body.format(pids=pids, right=RIGHT))
        found[name] = Student(text, ALL | ({exercise.number: 0} if says else {}))
    return found | {name: Student(text, NOTHING) for name, text in BROKEN.items()}


def thirty(pids):
    """{name: Student}, by the numbers of NUMBERS."""
    return {
        "=cmd|' (ours)": Student(SOLUTION, ALL), "ours, too": Student(SOLUTION, ALL),
        **written_differently(), **unfinished(), "unsummed": wrong("04.1", 0),
        "fits 4 ranks": Student(instead("return gradient, None", FITTED.format(ranks=4)),
                                ALL | {"04.2": 0}),
        "half wrong": wrong("04.3", 0, 1.5), "miscounted": wrong("04.6", 0), **hostile(pids)}


def write(students, folder):
    for name, student in students.items():
        own = Path(folder, name)
        own.mkdir(parents=True)
        files = student.beside | ({f"{CHAPTER}.py": student.text} if student.text is not None
                                  else {})
        for file, text in files.items():
            (own / file).write_text(text, encoding="utf-8")
