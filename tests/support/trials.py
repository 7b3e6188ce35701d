"""Hard trials for every command of the project. Each command is a line of a table:

    fast = Command(["-m", "lab.fast"], fast.main, legal=["--seed=1"], stops_at=["lab.fast.train"],
                   writes={"--json": "run.json"})
    assert trials.bad_values(fast) == []

A trial returns what was wrong, as text, so that one run shows all of it:

    bad_values      of each flag and word that the command's parser has
    odd_files       for what it reads
    bad_places      for what it writes
    closed_streams  as by `>&-`, `| head -1` or `> /dev/full`, and one that cannot encode its marks
    signals         SIGINT and SIGTERM while it works

A bad value, file or place costs one line on stderr that begins with `error: ` and names the flag,
and status 2. Nothing is printed, and nothing hangs. What is legal gets as far as the work, where
the trial stops it: so most trials take a millisecond, in this process. Signals take a process.
"""

import argparse
import contextlib
import functools
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil

from tests.support import programs

NOBODY = 65534
PATIENCE = 20  # seconds; what takes longer hangs


@dataclass(frozen=True)
class Command:
    program: list  # what a reader types after `python`, up to its words and flags
    main: Callable  # of sys.argv: returns the status, or raises SystemExit
    legal: list = ()  # flags that it takes
    words: list = ()  # words that stand for themselves, before the flags
    files: dict = field(default_factory=dict)  # that it needs: {name: a function, for its bytes}
    stops_at: list = ()  # what it calls once nothing is refused: names of functions
    work: dict = field(default_factory=dict)  # {name: a function in its place}, where it takes long
    reads: dict = field(default_factory=dict)  # {flag or word: "text", or "ours": a run, say}
    writes: dict = field(default_factory=dict)  # {flag: an example; a folder if it has no suffix}
    prints: str | None = "\n"  # what it prints while it works; None: it works in other processes
    starts: bool = True  # False: its work is too long, or not possible here, but with `work`

    @property
    def name(self):
        return " ".join(["python", *(Path(word).name for word in self.program)])

    def arguments(self, flag=None, value=None):
        """Legal ones, but for this flag or word."""
        if flag is None:
            return [*self.words, *self.legal]
        if not flag.startswith("-"):
            return [value, *self.legal]
        others = [word for word in self.legal if not word.startswith(f"{flag}=")]
        return [*self.words, *others, flag if value is None else f"{flag}={value}"]


# ------------------------------------------------------------------------- what comes of a command


class Accepted(BaseException):
    """Nothing is refused, and the work would begin. No `except Exception` is to stop this."""


class Hangs(BaseException):
    """The command takes longer than PATIENCE."""


def accept(*args, **more):
    raise Accepted


def hang(*signal_and_frame):
    raise Hangs


@dataclass
class Outcome:
    status: int | str  # "accepted", "hangs"
    output: str
    errors: str

    def __str__(self):
        first, *others = self.errors.strip().splitlines() or [""]
        last = f" ... {others[-1][:150]!r}" if others else ""
        printed = f", on stdout {self.output[:80]!r}" if self.output else ""
        return f"status {self.status}, {first[:200]!r}{last}{printed}"

    def is_refusal(self, names):
        """One line, which has one of these names, and status 2."""
        line, end = self.errors[:-1], self.errors[-1:]
        return (self.status == 2 and self.output == "" and line.startswith("error: ")
                and line.isprintable() and end == "\n"
                and any(name in line for name in names))  # fmt: skip


def attempt(command, argv):
    """Call the command as far as its work."""
    errors, patches = io.StringIO(), dict.fromkeys(command.stops_at, accept)
    with tempfile.TemporaryFile("w+") as output:
        status = call(command, argv, patches, output, errors)
        output.seek(0)
        return Outcome(status, output.read(), errors.getvalue())


def call(command, argv, replaced, stdout, stderr):
    """The status of the command, called in this process as if it had been started with these
    arguments and streams. replaced: {name of a function: another one}."""

    def program():
        status = command.main()
        if sys.stdout:
            sys.stdout.flush()  # as Python does at the end
        return status

    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch(name, function))
        for name, value in (("argv", ["", *argv]), ("stdout", stdout), ("stderr", stderr)):
            stack.enter_context(mock.patch.object(sys, name, value))
        return status_of(program)


def status_of(program):
    """With which a process would end that calls this. What Python would print of an exception is
    printed; the handlers of signals are put back."""
    numbers = signal.SIGALRM, signal.SIGTERM, signal.SIGINT
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, hang)
    signal.alarm(PATIENCE)
    try:
        return program() or 0
    except SystemExit as leaving:
        return leaving.code or 0
    except Accepted:
        return "accepted"
    except Hangs:
        return "hangs"
    except BaseException:
        traceback.print_exc(file=sys.stderr or io.StringIO())
        return 1
    finally:
        signal.alarm(0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def refused(command, flag, value, must_be, *names):
    """What was wrong. must_be: False, if the value may also be legal. names: of which the line may
    have one instead of the flag's."""
    outcome = attempt(command, command.arguments(flag, value))
    if outcome.is_refusal([flag, *names]) or outcome.status == "accepted" and not must_be:
        return []
    shown = f"{flag} {value!r:.60}" if value is not None else flag
    return [f"{command.name} {shown}: {outcome}"]


def legal(command, flag=None, value=None):
    """What was wrong. Where this is refused, to be refused means nothing."""
    argv = command.arguments(flag, value)
    outcome = attempt(command, argv)
    fine = outcome.status == ("accepted" if command.stops_at else 0)
    return [] if fine else [f"{command.name} {' '.join(argv)}: {outcome}"]


@contextlib.contextmanager
def working_folder(command):
    """A temporary one, with the command's files. It is nobody's, and others may enter it; pytest's
    are root's alone."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in command.files.items():
            Path(folder, name).write_bytes(content())
        if os.getuid() == 0:
            os.chown(folder, NOBODY, -1)
        os.chmod(folder, 0o755)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            for path in Path(folder).glob("closed*"):
                path.chmod(0o755)  # or who is not root could not remove it


@contextlib.contextmanager
def powerless():
    """Without root's rights, whom no permission bit binds: as nobody, and back. The real user is
    changed too, since os.access asks about that one. Who is not root has nothing to give up."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


# -------------------------------------------------------------------------------------- bad values

VALUES = "0", "-1", "x", "", "1.5", "nan", "inf", "-inf", str(10**30)


def bad_values(command, but=()):
    """but: flags that are left out."""
    with working_folder(command):
        wrong = legal(command)
        for action in parser_of(command)._actions:
            if action.dest == "help" or action.help == argparse.SUPPRESS:  # not for a reader
                continue
            if not {*but}.isdisjoint(action.option_strings):
                continue
            for value in VALUES:
                if action.option_strings:
                    flag = action.option_strings[0]
                    wrong += refused(command, flag, value, is_bad(action, value))
                elif not value.startswith("-"):  # else it is a flag
                    bad = is_bad(action, value)
                    wrong += refused(command, action.dest, value, bad, value or "''")
        return wrong + refused(command, "--no-such-flag", None, must_be=True)


def parser_of(command):
    """The parser that the command asks."""
    parsers, parse_args = [], argparse.ArgumentParser.parse_args

    def seen(parser, *args, **more):
        parsers.append(parser)
        return parse_args(parser, *args, **more)

    with mock.patch("argparse.ArgumentParser.parse_args", seen):
        outcome = attempt(command, ["--help"])
    assert outcome.status == 0 and "usage: " in outcome.output, f"{command.name} --help: {outcome}"
    return parsers[0]


def is_bad(action, value):
    """Whether the value cannot be legal. 0 and 1.5 can, and so can any text; but no number of this
    project is negative, infinite or as large as 10**30."""
    if action.nargs == 0:
        return True
    if action.choices:
        return value not in map(str, action.choices)
    kind = kind_of(action)
    return kind is not str and value not in (("0",) if kind is int else ("0", "1.5"))


def kind_of(action):
    """int, float, or str for all else that a flag may take."""
    for text in "1", "0.5", "64":
        with contextlib.suppress(Exception):
            if isinstance(action.type(text), (int, float)):
                return type(action.type(text))
    return str


# --------------------------------------------------------------------------- odd files and places

CONTENTS = {"empty": b"", "latin": b"d\xe9j\xe0 vu, without the UTF-8", "null": b"null",
            "list": b"[]", "object": b"{}", "number": b"5",
            "deep": b"[" * 200_000 + b"]" * 200_000}  # fmt: skip
LONG = "x" * 300


def make_odd(suffix):
    """In the working folder, something of each kind, with this suffix. What is closed, locked or
    read-only is root's; if there is no root, it has no such bit for its owner either."""
    for name in "folder", "closed", "readonly":
        Path(f"{name}{suffix}").mkdir()
    for name, content in (CONTENTS | {"locked": b"{}", "fixed": b"{}"}).items():
        Path(f"{name}{suffix}").write_bytes(content)
    Path(f"closed{suffix}/file{suffix}").write_bytes(b"{}")
    os.mkfifo(f"fifo{suffix}")
    for name, target in ("dangling", "no/where"), ("full", "/dev/full"), ("loop", f"loop{suffix}"):
        Path(f"{name}{suffix}").symlink_to(target)
    for name, mode in (("closed", 0), ("readonly", 0o555), ("locked", 0), ("fixed", 0o444)):
        os.chmod(f"{name}{suffix}", mode)


def odd_files(command):
    """A text may have any content; what another program of ours has written has none of these."""
    unreadable = ["missing.json", "folder.json", "fifo.json", "dangling.json", "loop.json",
                  "locked.json", "closed.json", "closed.json/file.json", "fixed.json/file.json",
                  f"{LONG}.json", "/proc/self/mem"]  # fmt: skip
    with working_folder(command):
        wrong = legal(command)  # so that all is imported that nobody could read
        make_odd(".json")
        with powerless():
            for flag, kind in command.reads.items():
                wrong += refused(command, flag, "", True, "''")
                for name in unreadable:
                    wrong += refused(command, flag, name, True, name)
                for name in CONTENTS:
                    wrong += refused(command, flag, f"{name}.json", kind != "text", f"{name}.json")
    return wrong


def bad_places(command):
    """A folder may be new or there, a file be new."""
    bad = ["closed{0}/new{0}", "readonly{0}/new{0}", "fixed{0}/new{0}", "fixed{0}", "locked{0}",
           "fifo{0}", "full{0}", "dangling{0}/new{0}", "loop{0}", f"{LONG}{{0}}", "",
           "/proc/new{0}"]  # fmt: skip
    bad_file, bad_folder = ["folder{0}"], ["closed{0}", "readonly{0}", "dangling{0}"]
    wrong = []
    for flag, example in command.writes.items():
        suffix = Path(example).suffix
        with working_folder(command):
            wrong += legal(command)
            make_odd(suffix)
            with powerless():
                for place in bad + (bad_file if suffix else bad_folder):
                    wrong += refused(command, flag, place.format(suffix), must_be=True)
                for place in [f"new/good{suffix}"] + ([] if suffix else ["."]):
                    wrong += legal(command, flag, place)
    return wrong


# ----------------------------------------------------------------------------------------- streams


def without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


FULL = "error: standard output: No space left on device\n"
STREAMS = {  # what standard output is, and the status and what is said then
    "stdout is closed": (lambda: None, 0, ""),
    "the reader has left": (without_reader, 0, ""),
    "the disk is full": (lambda: open("/dev/full", "w"), 1, FULL),
    "stdout is ASCII": (lambda: open(os.devnull, "w", encoding="ascii"), 0, ""),
}
if not os.path.exists("/dev/full"):  # as on macOS
    del STREAMS["the disk is full"]


def closed_streams(command, *only):
    """only: some of STREAMS. Without stderr, a bad argument says nothing, but has its status."""
    wrong = []
    with working_folder(command):
        for name in only or STREAMS:
            (stdout, *expected), errors = STREAMS[name], io.StringIO()
            status = call(command, command.arguments(), command.work, stdout(), errors)
            if [status, errors.getvalue()] != expected:
                wrong.append(f"{command.name}, {name}: {Outcome(status, '', errors.getvalue())}")
        with open("printed", "w+") as printed:
            status = call(command, ["--no-such-flag"], {}, printed, None)
        outcome = Outcome(status, Path("printed").read_text(), "")
    if (outcome.status, outcome.output) != (2, ""):
        wrong.append(f"{command.name}, stderr is closed: {outcome}")
    return wrong


# ----------------------------------------------------------------------------------------- signals


def signals(command, *numbers):
    """numbers: SIGINT and SIGTERM, if not others. Either one ends the command with its status, or
    as if nobody had handled it; with at most one line on stderr, and with its child processes."""
    wrong = []
    for number in numbers or (signal.SIGINT, signal.SIGTERM):
        with working_folder(command) as folder:
            pause = "builtins.print", functools.partial(print_and_wait, command.prints)
            ranks = programs.Ranks(*command.program, *command.arguments(), cwd=folder,
                                   patches={0: [pause] if command.prints else []})  # fmt: skip
            try:
                if command.prints:
                    ranks.until(command.prints, PATIENCE)
                children = [] if command.prints else children_of(ranks.processes[0].pid)
                ranks.send(number, 0)
                [status] = ranks.wait(PATIENCE)
                left = [pid for pid in children if not has_ended(pid)]
            finally:
                ranks.stop()
        outcome = Outcome("hangs" if status is None else status, "", ranks.err())
        quiet = outcome.errors.count("\n") <= 1 and "Traceback" not in outcome.errors
        if status not in (128 + number, -number) or not quiet:
            wrong.append(f"{command.name}, {number.name}: {outcome}")
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            wrong.append(f"{command.name}, {number.name}: it leaves process {pid}")
    return wrong


def print_and_wait(mark, *words, printed=print, waits=[True], **more):  # noqa: B006 (its memory)
    """In place of print: wait for the signal once that has printed the mark."""
    printed(*words, **more)
    if waits and mark in " ".join([*map(str, words), "\n"]):
        waits.clear()
        sys.stdout.flush()
        time.sleep(PATIENCE)


def children_of(pid):
    """Of a process, once it has started another program."""
    deadline, process = time.monotonic() + PATIENCE, psutil.Process(pid)
    while time.monotonic() < deadline:
        children = process.children()
        if any(child.cmdline() != process.cmdline() for child in children):
            time.sleep(0.1)  # until it knows that it has
            return [child.pid for child in children]
        time.sleep(0.02)
    raise AssertionError(f"process {pid} has started no other")


def has_ended(pid):
    """Within two seconds."""
    for _ in range(100):
        if not psutil.pid_exists(pid):
            return True
        time.sleep(0.02)
    return False
