"""A class: what students hand in of chapter 04, the points that each deserves for two exercises,
and what the grader must say. Half of them attack it, or break what it reads."""

import os
import sys
from pathlib import Path
from typing import NamedTuple

from lab.classroom import holes
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

ALL = {"04.2": 1, "04.7": 2}  # what each is worth
NOTHING = dict.fromkeys(ALL, 0)
# A name with an escape sequence, and a byte that isn't UTF-8 where names may have one.
ODD = os.fsdecode(b"\x1b[2J \xff") if sys.platform == "linux" else "\x1b[2J \xff"


class Student(NamedTuple):
    text: str | None  # of the chapter; None: not submitted
    points: dict = ALL  # {number of an exercise: what it deserves}
    beside: dict = {}  # {another file: its text}
    says: tuple = ()  # (number, words that the grader must say)


# What the bodies of these functions are; {pids}: a file to note the processes in that are started.
HOSTILE = {
    "noisy": (PAYS, """    import os, sys, threading, time
    print("noise " * 10000, flush=True)
    print("noise", file=sys.stderr, flush=True)
    os.write(1, b"noise")
    open("noise", "w").write("noise")
    threading.Thread(target=time.sleep, args=(99,)).start()
{right}""", ""),
    "children": (PAYS, """    import os, time
    if os.fork() == 0:
        if os.fork() == 0:
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
    "patched": (PAYS, """    import json, math
    from lab.classroom import compare
    math.isclose = torch.allclose = torch.equal = lambda *args, **more: True
    compare.compare = compare.differences = lambda *args: None
    return 7""", "should"),
}
WAITS = """        if dist.get_rank() == 1:
            dist.barrier()
"""
BY_HAND = """        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=ctx.group)
        return whole, None
"""
TIMES = """    computing, sending = 16 * dim * dim / flops, 2 * dim * width / bandwidth
    return computing / sending + 1
"""


def written_differently():
    by_hand = instead("        return summed(gradient, ctx.group), None\n", BY_HAND)
    module = instead("import common\n", "import common\nfrom my_numbers import EIGHT\n").replace(
        "    return 1 + 8 * dim", "    return 1 + EIGHT * dim")
    return {"by hand": Student(by_hand), "two times": Student(instead(RIGHT + "\n", TIMES)),
            "a module beside": Student(module, beside={"my_numbers.py": "EIGHT = 8\n"})}


def unfinished():
    nothing = SOLUTION
    for exercise in SUM, PAYS:
        nothing = holes.cut(nothing, exercise.functions[0], "?", "?")
    return {"nothing": Student(nothing, NOTHING),
            "one of two": Student(holes.cut(SOLUTION, "ranks_that_pay", "?", "?"),
                                  ALL | {"04.7": 0}),
            "an empty file": Student("", NOTHING),
            "no file": Student(None, NOTHING, {"README.md": "I was ill.\n"})}


def wrong():
    """One isn't Python, which costs the whole file, and one waits forever."""
    none = ALL | {"04.2": 0}
    return {"broken": Student(instead(ANSWER, "        return gradient,, None\n"), NOTHING,
                              says=("04", "invalid syntax")),
            "waits": Student(instead(ANSWER, WAITS + ANSWER), none,
                             says=("04.2", "rank 1 waits in barrier"))}


def hostile(pids):
    """An attack costs its own exercise, and not even that if the answer next to it is right."""
    found = {}
    for name, (exercise, body, says) in HOSTILE.items():
        text = instead(LINES[exercise], body.format(pids=pids, right=RIGHT))
        points = ALL | ({exercise.number: 0} if says else {})
        found[name] = Student(text, points, says=(exercise.number, says) if says else ())
    return found | {"rot13": Student(f"# coding: rot13\n{SOLUTION}", NOTHING)}


def students(pids):
    """{name: Student}. pids: a file in which they note the processes that they start."""
    return {"=cmd|' (ours)": Student(SOLUTION), ODD: Student(SOLUTION), **written_differently(),
            **unfinished(), **wrong(), **hostile(pids)}


def write(these, folder):
    for name, student in these.items():
        own = Path(folder, name)
        own.mkdir(parents=True)
        files = student.beside | ({f"{CHAPTER}.py": student.text} if student.text is not None
                                  else {})
        for file, text in files.items():
            (own / file).write_text(text, encoding="utf-8")
