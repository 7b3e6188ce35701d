"""The grader and students who attack it, or break what it reads: each costs himself an exercise,
and nobody else anything; and no points are to be had for a number that is not right."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from types import SimpleNamespace

import pytest
import torch

from lab.bench.meeting import has_ended
from lab.classroom import checks, exercises, grade, overseer, plain
from lab.classroom.exercise import Exercise
from tests.conftest import ROOT
from tests.lab.classroom.two_exercises import CHAPTER, PAYS, SUM

SOLUTION = exercises.solution(CHAPTER)
RIGHT = next(line for line in SOLUTION.splitlines() if "    return 1 + 8 * dim" in line)
# A student's name: where names must be UTF-8, as on macOS, without the byte that is none.
ODD = os.fsdecode(b"\x1b[2J \xff") if sys.platform == "linux" else "\x1b[2J \xff"
LINES = {PAYS: RIGHT, SUM: "        return gradient, None\n"}

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


@pytest.fixture(scope="module", autouse=True)
def warm():
    checks.warm_up()


def ended(pids):
    """Whether the processes are that are noted in a file."""
    return all(has_ended(int(pid)) for pid in pids.read_text().split())


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A class, graded once: {student: {exercise: its Result}}; and the files that were written."""
    folder = tmp_path_factory.mktemp("class")
    students = dict.fromkeys(["ada", ODD, "zoe"], SOLUTION) | BROKEN
    for name, (exercise, body, _) in HOSTILE.items():
        assert SOLUTION.count(LINES[exercise]) == 1
        body = body.format(pids=folder / "pids", right=RIGHT)
        students[name] = SOLUTION.replace(LINES[exercise], body)
    for name, text in students.items():
        (folder / "class" / name).mkdir(parents=True)
        (folder / "class" / name / f"{CHAPTER}.py").write_text(text)
    files = folder / "results.json", folder / "results.xml"
    with pytest.MonkeyPatch.context() as patch:
        other = PAYS._replace(number="04.9")
        patch.setattr(exercises, "EXERCISES", {CHAPTER: [SUM, PAYS, other]})
        status = grade.main([str(folder / "class"), "04.2", "04.7", f"--json={files[0]}",
                             f"--junit={files[1]}", "--secret=of a test"])
    assert status == 1
    suites = xml.parse(files[1]).getroot()
    found = {suite.attrib["name"]: {case.attrib["name"].split()[0]: case for case in
                                    suite.iter("testcase")}
             for suite in suites}
    assert len(found) == len(students)
    return found, json.loads(files[0].read_text()), folder / "pids"


def words_of(case):
    return None if case.find("failure") is None else case.find("failure").attrib["message"]


@pytest.mark.parametrize("name", [*HOSTILE, *BROKEN])
def test_a_student_who_attacks_the_grader_gets_what_he_deserves(graded, name):
    found, *_ = graded
    if name in BROKEN:
        [case] = found[name].values()
        assert words_of(case).startswith(f"{CHAPTER}.py ")
        return
    exercise, _, says = HOSTILE[name]
    [other] = [one.number for one in (SUM, PAYS) if one != exercise]
    assert words_of(found[name][other]) is None         # the other exercise is right
    words = words_of(found[name][exercise.number])
    assert words is None if not says else words and says in words, words


def test_nobody_else_loses_anything_and_odd_names_stay_well_formed(graded):
    found, results, _ = graded
    for student in ("ada", repr(ODD)[1:-1], "zoe"):
        assert [words_of(case) for case in found[student].values()] == [None, None], student
    assert f"{found.keys()}".isprintable()
    assert {student["student"] for student in results["students"]} == found.keys()
    assert all(student["student"].isprintable() for student in results["students"])


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's PR_SET_CHILD_SUBREAPER")
def test_a_process_that_has_left_its_session_is_ended(graded):
    *_, pids = graded
    assert pids.read_text() and ended(pids)


def test_no_limit_of_time_is_outlived(monkeypatch):
    """Nor by one that never seems idle, and whose seconds of computing are somebody else's."""
    monkeypatch.setattr(overseer, "state_of", lambda pid: (True, 0.0))
    reads, writes = os.pipe()
    process = SimpleNamespace(runs=lambda: True, come={}, has_failed=False, pid=1)
    begin = time.monotonic()
    assert overseer.follow([process], 0.05, reads) is False
    assert 0.5 < time.monotonic() - begin < 30
    os.close(writes)                                    # nobody waits any more
    with pytest.raises(SystemExit):
        overseer.follow([process], 9, reads)
    os.close(reads)


@pytest.mark.skipif(sys.platform != "linux", reason="needs the threads' states in Linux's /proc")
def test_a_process_is_not_idle_while_one_of_its_threads_computes():
    """As gloo's, which brings the messages that the others wait for: late, on a busy machine."""
    program = ("import threading, time\nthread = threading.Thread(target=lambda: [None for _ in "
               "iter(time.monotonic, 0)], daemon=True)\nthread.start()\nprint()\ntime.sleep(60)")
    process = subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        time.sleep(0.2)
        assert sum(overseer.state_of(process.pid)[0] for _ in range(10)) >= 5
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("module", [
    "lab.classroom.grade", pytest.param("lab.museum", marks=pytest.mark.full)])
def test_nothing_is_left_behind_by_who_is_killed(module, tmp_path):
    """By SIGKILL, which nobody can handle."""
    pids = tmp_path / "pids"
    body = (f"        import os\n        open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n')\n"
            "        while True:\n            pass\n")
    (tmp_path / f"{CHAPTER}.py").write_text(SOLUTION.replace(LINES[SUM], body))
    words = [str(tmp_path), "04.2", "--limit=99"]
    program = f"from lab.classroom.grade import main; main({words!r})"
    if module == "lab.museum":
        program = ("from lab.classroom import checks; checks.warm_up(); "
                   "from lab.museum import observe; "
                   f"source = open({str(tmp_path / CHAPTER)!r} + '.py').read(); "
                   f"observe.play('{CHAPTER}.py', source, 2, '')")
    process = subprocess.Popen([sys.executable, "-c", f"if __name__ == '__main__': {program}"],
                               cwd=ROOT)
    end = time.monotonic() + 60
    while not pids.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 10
    while not ended(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert pids.read_text() and ended(pids)


# ------------------------------------------------------------------------------------- plain values

def test_values_come_back_as_they_are():
    x = torch.randn(3, 4, dtype=torch.float64)
    value = {"a": [1, 2.5, None, True, "x"], 3: (x, x.t(), torch.tensor(7), torch.zeros(0, 2)),
             "b": torch.bfloat16, "c": slice(1, None), "d": torch.tensor([True, False]),
             "e": x[0].bfloat16(), "f": float("inf"), "g": range(3), "h": x.sum().numpy()[()]}
    found = plain.unpack(plain.pack(value))
    assert found.keys() == value.keys() and found["a"] == value["a"] and found["b"] == value["b"]
    assert found["c"] == slice(1, None) and found["g"] == [0, 1, 2] and found["h"] == x.sum().item()
    for mine, theirs in zip([*found[3], found["d"], found["e"]], [*value[3], value["d"],
                                                                  value["e"]]):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    [record, other] = plain.unpack(plain.pack([PAYS, {1, 2}]))
    assert type(record).__name__ == "Exercise" and record._fields == Exercise._fields
    assert record[0] == "04.7" and other == plain.Other("set", "{1, 2}")


@pytest.mark.parametrize("text", [
    b"", b"x", b"[", b"[" * 10**6, b'["tensor", "float64", [9]]', b'["tensor", "nn", [0]]',
    b'["tensor", "float64", [-1]]', b'["tensor", "float64", [1e9]]', b'["eval", "1"]', b"[]",
    b'["dict", [["list"], 1]]', b'["record", "x"', b"1" * 5000, b'["dtype", "load"]', b"[[]]"])
def test_what_nobody_has_packed_is_unreadable(text):
    with pytest.raises(plain.Unreadable):
        plain.unpack(len(text).to_bytes(8, "big") + text)
