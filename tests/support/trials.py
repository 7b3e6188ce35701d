"""Trials that every command has to stand: bad values for each of its flags, odd files for what it
reads, bad places for what it writes, closed streams, and signals while it works.

    fast = Command(["-m", "lab.fast"], "--seed=1", "lab.fast.train", writes={"--json": "run.json"})
    assert trials.bad_values(fast) == []

A trial returns what was wrong, as text, so that one run shows all of it. A bad value, file or place
costs one line on stderr that begins with `error: ` and names the flag, and status 2. Legal
arguments get as far as the work, where the trial stops: so most trials take a millisecond, in this
process. Only signals need another one.
"""

import argparse
import ast
import contextlib
import functools
import importlib
import io
import json
import os
import pkgutil
import shlex
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

from lab.run.meeting import has_ended
from tests.conftest import ROOT, sample
from tests.support import programs

PATIENCE = 120  # seconds; longer is a hang


@dataclass(frozen=True)
class Command:
    """A command of the project, and what a trial needs to know of it."""

    program: list  # what a reader types after `python`, up to its words and flags
    legal: str = ""  # words and flags that it takes
    stops_at: str = ""  # functions that it calls once nothing is refused; "": it runs to its end
    main: Callable | None = None  # in place of the last lines of the program
    files: dict = field(default_factory=dict)  # that it needs: {name: a function, for its bytes}
    reads: dict = field(default_factory=dict)  # {flag or word: "text", or "ours": a run, say}
    writes: dict = field(default_factory=dict)  # {flag: an example; a folder if it has no suffix}
    pretends: dict = field(default_factory=dict)  # {name: a value in its place}
    environment: dict = field(default_factory=dict)
    starts: bool = True  # False: its work is too long, or impossible here
    starts_others: bool = False  # other processes do its work

    @property
    def name(self):
        return " ".join(["python", *(Path(word).name for word in self.program)])

    def arguments(self, flag=None, value=None):
        """Legal ones, but for this flag or word."""
        words = shlex.split(self.legal)
        flags = [word for word in words if word.startswith("--")]
        words = [word for word in words if word not in flags]
        if flag is None:
            return [*words, *flags]
        if not flag.startswith("-"):
            return [value, *flags]
        others = [word for word in flags if not word.startswith(f"{flag}=")]
        return [*words, *others, flag if value is None else f"{flag}={value}"]

    def run(self):
        if self.main:
            return self.main()
        lines, module = last_lines(self.program[-1])
        return exec(lines, {**vars(module)})


@functools.cache
def last_lines(program):
    """What stands below `if __name__ == "__main__":`, and the module as others import it."""
    name = program.removeprefix(f"{ROOT}/").removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    *_, last = ast.parse(Path(module.__file__).read_text()).body
    return compile(ast.Module(last.body, []), module.__file__, "exec"), module


# ------------------------------------------------------------------------ what becomes of a command


class Ends(BaseException):
    """The command ends here, with this status; no `except Exception` is to stop it."""


def end(status, *given, **more):
    """In place of a function: the command ends here."""
    raise Ends(status)


accept = functools.partial(end, "accepted")  # nothing is refused, and the work would begin


@dataclass
class Outcome:
    """How a command ended, and what it printed."""

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
    errors, patches = io.StringIO(), dict.fromkeys(command.stops_at.split(), accept)
    with tempfile.TemporaryFile("w+") as output:
        status = call(command, argv, patches, output, errors)
        output.seek(0)
        return Outcome(status, output.read(), errors.getvalue())


def call(command, argv, replaced, stdout, stderr):
    """The status of the command, called in this process as if it had been started with these
    arguments and streams. replaced: {name of a function: another one}."""

    def program():
        try:
            return command.run()
        finally:
            if sys.stdout:
                sys.stdout.flush()  # as Python does at the end

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", command.environment))
        for name, function in (command.pretends | replaced).items():
            stack.enter_context(mock.patch(name, function))
        for name, value in (("argv", ["", *argv]), ("stdout", stdout), ("stderr", stderr)):
            stack.enter_context(mock.patch.object(sys, name, value))
        return status_of(program)


def status_of(program):
    """The status with which a process would end that calls this. What Python would print of an
    exception is printed; signal handlers are put back."""
    numbers = signal.SIGALRM, signal.SIGTERM, signal.SIGINT
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGALRM, functools.partial(end, "hangs"))
    signal.alarm(PATIENCE)
    try:
        return program() or 0
    except SystemExit as leaving:
        return leaving.code or 0
    except Ends as leaving:
        return leaving.args[0]
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
    """What was wrong. If legal arguments are refused, the other refusals prove nothing."""
    argv = command.arguments(flag, value)
    outcome = attempt(command, argv)
    fine = outcome.status == ("accepted" if command.stops_at else 0)
    return [] if fine else [f"{command.name} {' '.join(argv)}: {outcome}"]


@contextlib.contextmanager
def working_folder(command):
    """A temporary one, with the command's files."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in command.files.items():
            Path(folder, name).write_bytes(content())
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


# -------------------------------------------------------------------------------------- bad values

VALUES = sample(("-1", "nan", str(10**30), "x", "", "0", "1.5", "inf", "-inf"), 2)


def bad_values(command):
    """Each flag with each of VALUES; and a flag that is not there."""
    with working_folder(command):
        wrong = legal(command)
        for action in parser_of(command)._actions:
            if action.dest == "help" or action.help == argparse.SUPPRESS:  # not for a reader
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
    """In the working folder, something of each kind, with this suffix. No permission bit is among
    them: it does not bind root."""
    Path(f"folder{suffix}").mkdir()
    for name, content in CONTENTS.items():
        Path(f"{name}{suffix}").write_bytes(content)
    os.mkfifo(f"fifo{suffix}")
    for name, target in ("dangling", "no/where"), ("full", "/dev/full"), ("loop", f"loop{suffix}"):
        Path(f"{name}{suffix}").symlink_to(target)


def odd_files(command):
    """A text may have any content; what another program of ours has written has none of these."""
    unreadable = ["missing.json", "folder.json", "fifo.json", "dangling.json", "loop.json",
                  "list.json/file.json", f"{LONG}.json", "/proc/self/mem"]  # fmt: skip
    with working_folder(command):
        wrong = legal(command)
        make_odd(".json")
        for flag, kind in command.reads.items():
            wrong += refused(command, flag, "", True, "''")
            for name in unreadable:
                wrong += refused(command, flag, name, True, name)
            for name in CONTENTS:
                wrong += refused(command, flag, f"{name}.json", kind != "text", f"{name}.json")
    return wrong


def bad_places(command):
    """A folder may be new or there, a file be new."""
    wrong = []
    for flag, example in command.writes.items():
        suffix = Path(example).suffix
        bad = ["list{0}/new{0}", "fifo{0}", "full{0}", "dangling{0}/new{0}", "loop{0}",
               f"{LONG}{{0}}", "", "/proc/new{0}", "folder{0}" if suffix else "dangling{0}"]
        with working_folder(command):
            wrong += legal(command)
            make_odd(suffix)
            for place in bad:
                wrong += refused(command, flag, place.format(suffix), must_be=True)
            for place in [f"new/good{suffix}"] + ([] if suffix else ["."]):
                wrong += legal(command, flag, place)
    return wrong


# ----------------------------------------------------------------------------------------- streams


def without_reader():
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w")


FULL_DISK = "error: standard output: No space left on device\n"
STREAMS = {  # what standard output is, and the status and what is said then
    "stdout is closed": (lambda: None, 0, ""),
    "the reader has left": (without_reader, 0, ""),
    "the disk is full": (lambda: open("/dev/full", "w"), 1, FULL_DISK),
    "stdout is ASCII": (lambda: open(os.devnull, "w", encoding="ascii"), 0, ""),
}
if not os.path.exists("/dev/full"):  # as on macOS
    del STREAMS["the disk is full"]


def closed_streams(command):
    """A command with long work prints its help. Without stderr, a bad argument says nothing, but
    has its status."""
    argv, wrong = ["--help"] if command.stops_at else command.arguments(), []
    with working_folder(command):
        for name, (stdout, *expected) in STREAMS.items():
            errors = io.StringIO()
            status = call(command, argv, {}, stdout(), errors)
            if [status, errors.getvalue()] != expected:
                wrong.append(f"{command.name}, {name}: {Outcome(status, '', errors.getvalue())}")
        with open("printed", "w+") as printed:
            status = call(command, ["--no-such-flag"], {}, printed, None)
        outcome = Outcome(status, Path("printed").read_text(), "")
    if (outcome.status, outcome.output) != (2, ""):
        wrong.append(f"{command.name}, stderr is closed: {outcome}")
    return wrong


# ----------------------------------------------------------------------------------------- signals


def signals(command):
    """The command gets a signal when it first prints or, if others do its work, when it first waits
    for them. It ends with that status, or as if nobody had handled the signal; with at most one
    line on stderr, and with its child processes."""
    wrong, waits = [], ["poll", "wait", "communicate"]
    names = [f"subprocess.Popen.{name}" for name in waits if command.starts_others]
    for number in signal.SIGINT, signal.SIGTERM:
        patches = [(name, functools.partial(signalled, number, pkgutil.resolve_name(name)))
                   for name in names or ["builtins.print"]]
        with working_folder(command):
            [status], _, errors = programs.run(
                *command.program, *command.arguments(), cwd=Path.cwd(),
                timeout=PATIENCE, patches={0: patches}, PYTHONPATH=ROOT)
            children = json.loads(Path("children").read_text())
        outcome = Outcome("hangs" if status is None else status, "", errors)
        quiet = errors.count("\n") <= 1 and "Traceback" not in errors
        if status not in (128 + number, -number) or not quiet:
            wrong.append(f"{command.name}, {number.name}: {outcome}")
        wrong += [f"{command.name}, {number.name}: it leaves process {pid}" for pid in children
                  if not ends(pid)]
    return wrong


def signalled(number, function, *given, **more):
    """In the command's process, in place of a function: at the first call of any, a signal."""
    if not os.path.exists("children"):
        children = [child.pid for child in psutil.Process().children()]
        Path("children").write_text(json.dumps(children))
        os.kill(os.getpid(), number)
    return function(*given, **more)


def ends(pid):
    """Whether a process ends by itself. If not, it is killed."""
    end = time.monotonic() + PATIENCE
    while not has_ended(pid):
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            return False
        time.sleep(0.02)
    return True
