"""A class of thirty: what students hand in of chapter 04, the points that each deserves, and what
the grader must say. Twelve attack the grader, or break what it reads."""

import ast
import os
import sys
from pathlib import Path
from typing import NamedTuple

from lab.classroom import holes
from tests.faults import EXERCISES as TABLE
from tests.faults import Graded, wrong_answers
from tests.lab.classroom.two_exercises import (
    ANSWER,
    CHAPTER,
    LINES,
    PAYS,
    RIGHT,
    SOLUTION,
    SUM,
    instead,
)

NUMBERS = "04.1", "04.2", "04.3", "04.6", "04.7"
ALL = {"04.1": 1, "04.2": 1, "04.3": 3, "04.6": 2, "04.7": 1}  # what each is worth
NOTHING = dict.fromkeys(ALL, 0)
# A name with an escape sequence, and a byte that isn't UTF-8 where names may have one.
ODD = os.fsdecode(b"\x1b[2J \xff") if sys.platform == "linux" else "\x1b[2J \xff"


class Student(NamedTuple):
    text: str | None  # of the chapter; None: not submitted
    points: dict  # {number of an exercise: what it deserves}
    beside: dict = {}  # {another file: its text}
    says: tuple = ()  # (number, words that the grader must say)


# What the bodies of these functions are; {pids}: a file to note the processes in that are started.
HOSTILE = {
    "fifo": (PAYS, """    import os, pathlib, shutil
    folder = pathlib.Path(__file__).parent
    if folder.exists():
        for name in ("0.json", "run.json"):
            os.mkfifo(folder / name)
        os.mkdir(folder / "0.stack")
        shutil.rmtree(folder)
{right}""", ""),
    "daemon": (PAYS, """    import os, signal, time
    signal.alarm(0)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.environ.clear()
            open("{pids}", "a").write(f"{{os.getpid()}}\\n")
            time.sleep(99)
        os._exit(0)
    os.wait()
    while not os.path.exists("{pids}"):
        time.sleep(0.01)
{right}""", ""),
    "believed": (PAYS, """    import os
    open("0.json", "w").write('{{"status": 0, "said": []}}')
    for pipe in range(3, 99):
        try:
            os.write(pipe, b'\\xff{{"status": 0, "said": [], "value": []}}')
        except OSError:
            pass
    os._exit(0)""", "the process has ended with status 0"),
    "regicide": (PAYS, """    import os, signal
    os.kill(os.getppid(), signal.SIGKILL)
{right}""", "the process that oversees it was ended"),
    "equal": (PAYS, """    class Equal(float):
        __eq__ = __le__ = __ge__ = lambda self, other: True
        __sub__ = __rsub__ = lambda self, other: 0.0
    return Equal(7)""", "should"),
    "patched": (PAYS, """    import json, math
    from lab.classroom import compare
    math.isclose = torch.allclose = torch.equal = lambda *args, **more: True
    compare.compare = compare.of_numbers = lambda *args: None
    return 7""", "should"),
    "dumped": (PAYS, """    import json
    json.dumps = lambda value, **more: '{{"status": 0, "said": [], "value": []}}'
    return 7""", "should"),
    "nested": (PAYS, """    found = []
    for _ in range(10**5):
        found = [found]
    return found""", "RecursionError"),
    "thief": (PAYS, """    import pathlib, sys
    found = [path for path in pathlib.Path().iterdir() if path.name != "04_tensor_parallel.py"]
    found += [name for name in sys.modules if name == "solution"]
    frame = sys._getframe(2)
    while frame:
        found += [name for name, value in frame.f_locals.items() if "return 1 + 8 * " in str(value)]
        frame = frame.f_back
    raise ArithmeticError(f"nothing is found: {{found}}")""", "nothing is found: []"),
    "judge": (SUM, """        from lab.bench import report
        report.verify.verdict = lambda *args: ([], {{}})
        report.Run.check = lambda *args, **more: None
        report.diagnose.of_run = lambda run: []
        return 2 * gradient, None
""", "in step 1 is off by"),
    "empty": (SUM, """        from lab.bench import report
        report.Run.as_json = lambda run: {{}}
        return 2 * gradient, None
""", "the run's JSON is not there, or not as"),
    "leaves": (SUM, """        from lab.bench import report
        report.Run.log = lambda self, *args: self.losses.append(1.0)
        return 2 * gradient, None
""", "no step was compared with one GPU"),
}
BROKEN = {"rot13": "# coding: rot13\n" + SOLUTION, "deep": "x = " + "-" * 50_000 + "1\n" + SOLUTION}


def with_holes(*names):
    text = SOLUTION
    for name in names:
        text = holes.cut(text, name, "?", "?")
    return text


def wrong(number):
    """With a wrong answer to this exercise: its functions that are as ours earn their part."""
    fault = wrong_answers(number)[0]
    text, functions = fault.planted(), TABLE[number][1].functions
    tree, ours = ast.parse(text), ast.parse(SOLUTION)
    right = [name for name in functions
             if ast.dump(holes.find(tree, name)) == ast.dump(holes.find(ours, name))]
    [says] = [seen.says for seen in fault.by(Graded) if seen.exercise == number]
    points = ALL[number] * len(right) / len(functions)
    return Student(text, ALL | {number: points}, says=(number, says))


BY_HAND = """        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
"""
TIMES = """    computing, sending = 16 * dim * dim / flops, 2 * dim * width / bandwidth
    return computing / sending + 1
"""


def fits(ranks):
    """Right on this number of ranks, and wrong on all others."""
    return instead(ANSWER, f"        return gradient * (dist.get_world_size() / {ranks}), None\n")


def written_differently():
    """Right ones; the last is a copy, with other names."""
    by_hand = instead("        return summed(gradient, ctx.group), None\n", BY_HAND)
    module = instead("import common\n", "import common\nfrom my_numbers import SUMS\n").replace(
        "(4 * cfg.layers", "(SUMS * cfg.layers")
    times = instead(RIGHT + "\n", TIMES)
    copy = times.replace("computing, sending", "a, b").replace("computing / sending", "a / b")
    clone = instead(ANSWER, "        return gradient.clone(), None\n")
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
    """An attack costs its own exercise, and not even that if the answer next to it is right."""
    found = {}
    for name, (exercise, body, says) in HOSTILE.items():
        text = instead(LINES[exercise], body.format(pids=pids, right=RIGHT))
        points = ALL | ({exercise.number: 0} if says else {})
        found[name] = Student(text, points, says=(exercise.number, says) if says else ())
    return found | {name: Student(text, NOTHING) for name, text in BROKEN.items()}


def thirty(pids):
    """{name: Student}. pids: a file in which they note the processes that they start."""
    return {
        "=cmd|' (ours)": Student(SOLUTION, ALL), ODD: Student(SOLUTION, ALL),
        **written_differently(), **unfinished(),
        "unsummed": wrong("04.1"), "half wrong": wrong("04.3"), "miscounted": wrong("04.6"),
        "fits 4 ranks": Student(fits(4), ALL | {"04.2": 0}), **hostile(pids)}


def write(students, folder):
    for name, student in students.items():
        own = Path(folder, name)
        own.mkdir(parents=True)
        files = student.beside | ({f"{CHAPTER}.py": student.text} if student.text is not None
                                  else {})
        for file, text in files.items():
            (own / file).write_text(text, encoding="utf-8")
