"""Students graded side by side: told in order, and ended all at once."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from lab.classroom.grade import side_by_side
from tests.conftest import ROOT
from tests.lab.classroom.two_exercises import ANSWER, all_end, instead, written


def test_each_comes_in_its_turn():
    """The first ends last: it waits for the two others."""
    others = threading.Barrier(3)

    def first():
        yield 1
        others.wait(60)
        yield 2

    def other():
        yield 3
        others.wait(60)

    assert list(side_by_side([first, other, other], 3)) == [[1, 2], [3], [3]]


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
        list(side_by_side([fails, endless], 2))
    assert ended == [0]  # it was waited for


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
        written(tmp_path / "class" / name, instead(ANSWER, answer))
    count = lambda: len(pids.read_text().split()) if pids.exists() else 0
    with tempfile.TemporaryDirectory() as short:  # a socket's path is 108 letters at most
        process = subprocess.Popen(
            [sys.executable, "-m", "lab.grade", tmp_path / "class", "04.2", "--limit=99",
             "--jobs=2"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"TMPDIR": short})
        try:
            end = time.monotonic() + 300
            while count() < 8 and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            assert count() == 8  # four ranks of each
            process.send_signal(number)
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
        assert all_end(pids) and output == ""
        if number == signal.SIGKILL:  # nobody can handle it, nor remove files
            return
        assert process.returncode == 128 + number
        assert errors == ("error: interrupted\n" if number == signal.SIGINT else "")
        assert not any(path.is_dir() and [*path.iterdir()] for path in Path(short).iterdir())
