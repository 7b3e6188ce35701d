"""Students graded side by side: in order, with the time that is left, and ended all at once."""

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.classroom import side_by_side
from lab.classroom.side_by_side import END, Progress, in_turn
from tests.conftest import ROOT
from tests.lab.classroom.two_exercises import ANSWER, all_end, instead, written


def test_what_comes_early_waits_for_its_turn_and_is_told_at_once():
    """The first ends last: it waits for the two others."""
    others, told = threading.Barrier(3), []

    def first():
        yield 1
        others.wait(60)
        yield 2

    def other():
        yield 3
        others.wait(60)

    found = list(in_turn({"a": first, "b": other, "c": other}, 3, lambda *what: told.append(what)))
    assert found == [("a", 1), ("a", 2), ("a", END), ("b", 3), ("b", END), ("c", 3), ("c", END)]
    assert sorted(map(str, told)) == sorted(map(str, found))
    assert told.index(("a", 2)) > told.index(("b", 3))


def test_as_many_go_on_at_once_as_there_are_jobs():
    both, running, most = threading.Barrier(2), [], []

    def task():
        running.append(0)
        most.append(len(running))
        both.wait(60)  # for another one
        yield 0
        running.pop()

    assert len(list(in_turn(dict.fromkeys(range(6), task), 2))) == 12 and max(most) <= 2


def test_what_is_raised_in_a_thread_is_raised_here_and_ends_the_others():
    begun, ended = threading.Event(), []

    def fails():
        yield 1
        begun.wait(60)
        raise ArithmeticError("of a task")

    def endless():
        begun.set()
        try:
            while True:
                yield 0
        finally:
            ended.append(0)

    with pytest.raises(ArithmeticError, match="of a task"):
        list(in_turn({"a": fails, "b": endless}, 2))
    assert ended == [0]  # in_turn has waited for it


def test_the_time_left_is_that_of_what_is_not_there_yet(monkeypatch):
    monkeypatch.setattr(side_by_side, "time",
                        SimpleNamespace(monotonic=iter([0.0, 6, 12, 60]).__next__))
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    progress = Progress(4, 3, terminal)  # 12 results
    for name, item in (("ada", 1), ("ada", 2), ("bob", END)):
        progress.tell(name, item)  # of bob, all three
    assert re.findall(r"(\d) of 4 students, about (\d+) s", terminal.getvalue()) == [
        ("0", "66"), ("0", "60"), ("1", "84")]
    monkeypatch.undo()
    pipe = io.StringIO()
    Progress(4, 3, pipe).tell("ada", 1)
    assert pipe.getvalue() == ""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_grader_is_ended_with_all_that_it_has_started(number, tmp_path):
    pids = tmp_path / "pids"
    answer = f'''        import os
        open({str(pids)!r}, "a").write(f"{{os.getpid()}}\\n")
        while True:
            pass
'''
    for name in ("ada", "bob"):
        own = answer + f"            '{name}'\n"  # or it is played once for both
        written(tmp_path / "class" / name, instead(ANSWER, own))
    count = lambda: len(pids.read_text().split()) if pids.exists() else 0
    with tempfile.TemporaryDirectory() as short:  # a socket's path is 108 letters at most
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.grade", tmp_path / "class", "04.2", "--limit=99",
             "--jobs=2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"TMPDIR": short, "XDG_CACHE_HOME": str(tmp_path / "cache")})
        try:
            end = time.monotonic() + 300
            while count() < 8 and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert count() == 8  # four ranks of each
            process.send_signal(number)
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert all_end(pids) and output in ("", "ada\n")
        if number == signal.SIGKILL:  # nobody can handle it, nor remove files
            return
        assert process.returncode == 128 + number
        assert errors == ("error: interrupted\n" if number == signal.SIGINT else "")
        assert not any(path.is_dir() and [*path.iterdir()] for path in Path(short).iterdir())
    assert not list((tmp_path / "cache").rglob("*.json"))
