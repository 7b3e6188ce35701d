"""Students graded side by side: in order, with the time that is left, and ended all at once."""

import io
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lab.classroom import side_by_side
from lab.classroom.side_by_side import END, Progress, in_turn
from tests.conftest import ROOT
from tests.lab.classroom.test_grade import ANSWER, SOLUTION, assert_ended
from tests.lab.classroom.test_grade_broken_files import written


def test_what_comes_early_waits_for_its_turn_and_is_told_at_once():
    """The first ends last: it waits for the two others."""
    others, told = threading.Barrier(3), []

    def first():
        yield 1
        others.wait(30)
        yield 2

    def other():
        yield 3
        others.wait(30)

    found = list(in_turn({"a": first, "b": other, "c": other}, 3, lambda *what: told.append(what)))
    assert found == [("a", 1), ("a", 2), ("a", END), ("b", 3), ("b", END), ("c", 3), ("c", END)]
    assert sorted(map(str, told)) == sorted(map(str, found))
    assert told.index(("a", 2)) > told.index(("b", 3))


def test_no_more_go_on_at_once_than_there_are_jobs():
    running, most = [], []

    def task():
        running.append(0)
        most.append(len(running))
        time.sleep(0.01)
        yield 0
        running.pop()

    assert len(list(in_turn(dict.fromkeys(range(6), task), 2))) == 12 and max(most) == 2


def test_what_is_raised_beside_is_raised_here_and_ends_the_others():
    def fails():
        yield 1
        raise ArithmeticError("of a task")

    goes_on = []

    def endless():
        while True:
            goes_on.append(0)
            yield 0

    with pytest.raises(ArithmeticError, match="of a task"):
        list(in_turn({"a": fails, "b": endless, "c": endless}, 2))
    count = len(goes_on)
    time.sleep(0.05)
    assert len(goes_on) == count                        # in_turn has waited for it


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_time_left_is_that_of_what_is_not_there_yet(monkeypatch):
    monkeypatch.setattr(side_by_side.time, "monotonic", iter([0.0, 6, 12, 60, 60]).__next__)
    terminal = Terminal()
    progress = Progress(4, 3, terminal)                 # 12 results
    for name, item in (("ada", 1), ("ada", 2), ("bob", END)):
        progress.tell(name, item)                       # of bob, all three
    lines = [line.removesuffix("\x1b[K") for line in terminal.getvalue().split("\r")[1:]]
    assert lines == ["0 of 4 students, about 66 s left", "0 of 4 students, about 60 s left",
                     "1 of 4 students, about 84 s left"]
    assert side_by_side.in_minutes(200) == "about 3 min"
    monkeypatch.undo()
    for students, stream in ((1, Terminal()), (4, io.StringIO())):
        silent = Progress(students, 3, stream)
        silent.tell("ada", 1)
        assert stream.getvalue() == ""


@pytest.mark.parametrize("number", [
    signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_the_grader_is_ended_with_all_that_it_has_started(number, tmp_path):
    short = tempfile.TemporaryDirectory()               # a socket's path is 108 letters at most
    pids = tmp_path / "pids"
    answer = f'''        import os
        open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        while True:
            pass
'''
    for name in ("ada", "bob"):
        own = answer + f"            '{name}'\n"     # or it is played once for both
        written(tmp_path / "class" / name, SOLUTION.replace(ANSWER, own))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([
        sys.executable, "-m", "lab.grade", tmp_path / "class", "04.2", "--limit=99", "--jobs=2"],
        cwd=ROOT, **pipes, env=os.environ | {"TMPDIR": short.name,
                                             "XDG_CACHE_HOME": str(tmp_path / "cache")})
    try:
        end = time.monotonic() + 300
        while count(pids) < 8 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        assert count(pids) == 8                         # four ranks of each
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number and output in ("", "ada\n")
    assert errors == ("error: interrupted\n" if number == signal.SIGINT else "")
    assert_ended(pids)
    assert not any(path.is_dir() and list(path.iterdir()) for path in Path(short.name).iterdir())
    assert not list((tmp_path / "cache").rglob("*.json"))
    short.cleanup()


def count(pids):
    return len(pids.read_text().split()) if pids.exists() else 0
