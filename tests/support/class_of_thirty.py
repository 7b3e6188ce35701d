"""A class of about thirty: what students hand in of chapter 04, the points that each deserves for
two exercises, and what the grader must say. Half of them attack it, or break what it reads."""

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
    "fifo": (PAYS, """    import os, pathlib, shutil
    folder = pathlib.Path(__file__).parent
    if folder.exists():
        for name in ("0.json", "run.json"):
            os.mkfifo(folder / name)
        os.mkdir(folder / "0.stack")
        shutil.rmtree(folder)
{right}""", ""),
    "noisy": (PAYS, """    import os, sys, threading, time
    print("noise " * 10000, flush=True)
    print("noise", file=sys.stderr, flush=True)
    os.write(1, b"noise")
    open("noise", "w").write("noise")
    threading.Thread(target=time.sleep, args=(99,)).start()
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
    "patched": (PAYS, """    import json, math
    from lab.classroom import compare
    math.isclose = torch.allclose = torch.equal = lambda *args, **more: True
    compare.compare = compare.of_numbers = lambda *args: None
    return 7""", "should"),
    "thief": (PAYS, """    import pathlib, sys
    found = [path for path in pathlib.Path().iterdir() if path.name != "04_tensor_parallel.py"]
    found += [name for name in sys.modules if name == "solution"]
    frame = sys._getframe(2)
    while frame:
        found += [name for name, value in frame.f_locals.items() if "return 1 + 8 * " in str(value)]
        frame = frame.f_back
    raise ArithmeticError(f"nothing is found: {{found}}")""", "nothing is found: []"),
    "empty": (SUM, """        from lab.run import report
        report.Run.as_json = lambda run: {{}}
        return 2 * gradient, None
""", "the run's JSON is not there, or not as"),
}
BROKEN = {"rot13": "# coding: rot13\n" + SOLUTION, "deep": "x = " + "-" * 50_000 + "1\n" + SOLUTION}


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
    """One isn't Python, and one waits forever."""
    none = ALL | {"04.2": 0}
    return {"broken": Student(instead(ANSWER, "        return gradient,, None\n"), none,
                              says=("04.2", "invalid syntax")),
            "waits": Student(instead(ANSWER, WAITS + ANSWER), none,
                             says=("04.2", "rank 1 waits in barrier"))}


def hostile(pids):
    """An attack costs its own exercise, and not even that if the answer next to it is right."""
    found = {}
    for name, (exercise, body, says) in HOSTILE.items():
        text = instead(LINES[exercise], body.format(pids=pids, right=RIGHT))
        points = ALL | ({exercise.number: 0} if says else {})
        found[name] = Student(text, points, says=(exercise.number, says) if says else ())
    return found | {name: Student(text, NOTHING) for name, text in BROKEN.items()}


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
