"""The sandbox: what a student's code cannot do in it, and that right answers are right there."""

import errno
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from unittest import mock

import pytest

from lab.classroom import checks, grade, sandbox
from tests.conftest import ROOT
from tests.lab.classroom.two_exercises import (
    ANSWER,
    CHAPTER,
    ON_RANKS,
    PAYS,
    RIGHT,
    SOLUTION,
    SUM,
    instead,
    written,
)

pytestmark = pytest.mark.usefixtures("warm")
WHY_NOT = sandbox.why_not()
NOBODY = 65534
possible = pytest.mark.skipif(bool(WHY_NOT), reason=f"no sandbox: {WHY_NOT}")

HARMLESS = {            # without a sandbox, each can be done; in one, it is an error
    "connect": """
        import socket
        socket.create_connection(("127.0.0.1", {port}), 1)""",
    "write": """
        open("{home}/mine", "w")""",
    "read": """
        open("{home}/secret")""",
    "kill": """
        os.kill({pid}, 0)""",
    "search": """
        import pathlib
        for path in pathlib.Path("{root}").rglob("*"):
            if path.suffix == ".py" and ".venv" not in path.parts:
                if "return 1 + 8 * " + "dim" in path.read_text():
                    break
        else:
            raise OSError""",
    "memory": """
        bytearray(5 * 2**30)                            # which nobody has touched yet""",
}
HARMFUL = {
    "change": """
        open("{root}/common.py", "a")""",
    "fork": """
        import subprocess
        for _ in range(10_000):
            subprocess.Popen(["sleep", "99"])""",
    "disk": """
        for i in range(4):
            with open(f"/tmp/{{i}}", "wb") as file:
                file.write(bytes(2**28 - 1))""",
    "one file": """
        with open("mine", "wb") as file:
            file.truncate(2**28 + 1)""",
    "root": """
        import ctypes
        libc = ctypes.CDLL(None)
        libc.unshare(2**28 | 2**17)                     # root of namespaces of its own
        if libc.mount(None, b"/", None, 2**5 | 2**12, None) != 0:       # to make it writable
            raise OSError""",
}


@pytest.fixture
def confined(monkeypatch):
    monkeypatch.setattr(sandbox, "REQUIRED", True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What there is outside: a server, a process, and files of the same user."""
    home = tmp_path_factory.mktemp("home")
    (home / "secret").write_text("1")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"home": home, "port": server.getsockname()[1], "pid": process.pid, "root": ROOT}
    process.kill()
    process.wait()


def done_by(deeds, world):
    """Which of these a student's function has done, one after the other."""
    lines = ["import os", "done = []"]
    for name, deed in deeds.items():
        lines += ["try:", textwrap.indent(textwrap.dedent(deed.format(**world)), "    "),
                  f"    done.append({name!r})", "except (OSError, MemoryError):", "    pass"]
    lines += ["raise ArithmeticError(' '.join(['done:', *done]))"]
    source = instead(RIGHT, textwrap.indent("\n".join(lines), "    "))
    found = checks.outcome(CHAPTER, source, SOLUTION, PAYS.checks[0], limit=30)
    said, _ = found.errors[0]
    return said.removeprefix("ArithmeticError: done:").split()


@possible
def test_it_cannot_be_done(confined, world):
    assert done_by(HARMLESS | HARMFUL, world) == []


@pytest.mark.full
def test_without_a_sandbox_it_can(world):
    assert done_by(HARMLESS, world) == [*HARMLESS]


@pytest.mark.full
@possible
def test_ranks_meet_and_a_right_answer_is_right(confined, tmp_path):
    """A helper next to the student's file is found, too."""
    (tmp_path / "helper.py").write_text("from torch import Tensor\n")
    source = instead("import common\n", "import common\nfrom helper import Tensor\n")
    found = checks.outcome(CHAPTER, source, SOLUTION, SUM.checks[0], tmp_path)
    assert found.right, found


@pytest.mark.full
@possible
def test_processes_that_wait_for_each_other_are_ended_there(confined):
    receive = "        dist.recv(gradient, (dist.get_rank() + 1) % 3)\n"
    source = instead(ANSWER, receive + ANSWER)
    found = checks.outcome(CHAPTER, source, SOLUTION, ON_RANKS.checks[0])
    assert {name for name, _ in found.stuck.values()} == {"recv"} and len(found.stuck) == 3


@possible
def test_what_belongs_to_who_grades_cannot_be_changed(monkeypatch):
    """Nor where who grades is no root of the machine, and students' code has the same user."""
    with tempfile.TemporaryDirectory() as folder:
        course, mine = Path(folder, "course"), Path(folder, "mine")
        course.mkdir(), mine.mkdir()
        (course / "common.py").write_text("as it was")
        for path in (folder, course, mine, course / "common.py"):
            os.chown(path, NOBODY, NOBODY) if os.geteuid() == 0 else None
        monkeypatch.setattr(sandbox, "ROOT", course)
        monkeypatch.setattr(sandbox, "python", set)

        def play():
            return ended_with(lambda: (sandbox.enter(), write(mine / "mine"),
                                       write(course / "common.py")))

        def as_nobody():
            if os.geteuid() == 0:
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                sandbox.call("prctl", sandbox.SET_DUMPABLE, 1, 0, 0, 0)
            os._exit(sandbox.inside(play, mine, []))

        assert ended_with(as_nobody) == errno.EROFS
        assert (course / "common.py").read_text() == "as it was" and not [*mine.iterdir()]


def write(path):
    with open(path, "a") as file:
        file.write("and more")


def ended_with(function):
    """The exit status of a process: the number of the OSError that the function has raised."""
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except OSError as error:
            os._exit(error.errno)
        finally:
            os._exit(255)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_where_there_is_none_it_is_refused(monkeypatch, capsys, tmp_path):
    written(tmp_path)
    monkeypatch.setattr(sandbox, "separate", mock.Mock(side_effect=PermissionError(1, "no")))
    with pytest.raises(SystemExit) as leaving:
        grade.main([str(tmp_path), "04.2", "--sandbox"])
    [line] = capsys.readouterr().err.splitlines()
    why = "does not allow it (no)" if sys.platform == "linux" else "has no namespaces"
    assert leaving.value.code == 2 and line.startswith(f"error: --sandbox: this system {why}; ")
    assert not sandbox.REQUIRED
