"""What every command does at its edges: its flags, the files that it writes, its standard output,
and its signals. No torch, so that the planner has it, too."""

import argparse
import contextlib
import difflib
import errno
import io
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TextIO

from lab.run.refusals import environment, fail, refusal


class Parser(argparse.ArgumentParser):
    """argparse, which raises Refused in place of an error, with a change that works, and prints
    its help on one rank. A type may raise Refused(why, a value that works). The help is a module's
    docstring, as it stands."""

    def __init__(self, prog=None, **more):
        settings = {"allow_abbrev": False, "exit_on_error": False,
                    "formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(prog, **settings | more)

    def error(self, message, *changes):
        """Raise Refused in place of leaving."""
        for action in self._actions:                        # a choice for a word that is missing
            if action.required and action.choices and message.endswith(f": {action.dest}"):
                changes = [f"with {shlex.quote(str(next(iter(action.choices))))}"]
        raise refusal()(f"{message.removeprefix('argument ')} (python {self.prog} --help lists the "
                        "flags)", *changes)

    def parse_known_args(self, args=None, namespace=None):
        """All are to be known."""
        words = sys.argv[1:] if args is None else args
        try:
            namespace, unknown = super().parse_known_args(words, namespace)
        except argparse.ArgumentError as error:             # a value is missing, or one too many
            given = {word.partition("=")[0] for word in words}
            flags = [flag for flag in error.argument_name.split("/") if flag in given]
            self.error(str(error), *(f"without {flag}" for flag in flags))
        if unknown:
            names = [word.partition("=")[0] if word.startswith("--") else word for word in unknown]
            self.error(f"unrecognized arguments: {' '.join(unknown)}",
                       f"without {shlex.join(names)}")
        return namespace, []

    def _get_values(self, action, words):
        if words == ["--"] and action.option_strings:       # of `--batch=--`, which argparse drops
            words = [self._get_value(action, "--")]
            self._check_value(action, *words)
            return words if action.nargs else words[0]
        return super()._get_values(action, words)

    def _get_value(self, action, text):
        try:
            return super()._get_value(action, text)
        except refusal() as refused:
            name, (why, *values) = "/".join(action.option_strings) or action.dest, refused.args
            changes = [put(action, value, text) for value in values]
            raise refusal()(f"{name}: {why}", *changes) from None

    def _check_value(self, action, value):
        """A choice that is none gets the nearest one."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices]
            nearest = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.3) or choices
            self.error(str(error), put(action, nearest[0], value))

    def print_help(self, file=None):
        if "RANK" not in os.environ or environment("LOCAL_RANK", 0) == 0:
            super().print_help(file)


def put(action: argparse.Action, value: object, given: str) -> str:
    """The change that gives the action this value."""
    value = shlex.quote(str(value))
    if not action.option_strings:
        return f"{value} in place of {shlex.quote(str(given))}"
    times = action.nargs if isinstance(action.nargs, int) else 1
    return " ".join([action.option_strings[0], *[value] * times])


def number(kind: type, lowest: float, below: float, example: float) -> Callable[[str], float]:
    """An argparse type: a `kind` (int or float) with lowest <= value < below. example: one. Raises
    Refused for others."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) < below:
                return kind(text)
        what = "whole number" if kind is int else "number"
        raise refusal()(f"{text or repr(text)} is no {what} in [{lowest}, {below})", str(example))

    return convert


def output(example: str) -> Callable[[str], Path]:
    """An argparse type: a file to write, with the suffix of the example; or a folder, where that
    has none. The folders above may be missing: they are made once nothing has been refused. Raises
    Refused where it could not be written."""
    is_file = bool(Path(example).suffix)

    def convert(text):
        path = Path(text)
        try:
            if not text or is_file and path.suffix != Path(example).suffix:
                raise OSError
            try_to_write(path, is_file)
        except OSError as error:
            why = f" ({error.strerror})" if error.strerror else ""
            raise refusal()(f"cannot write {text!r}{why}", example) from None
        return path

    return convert


def try_to_write(path: Path, is_file: bool) -> None:
    """As the run will do it hours later; raises OSError. Nothing of it stays."""
    folder = path.parent if is_file else path
    while not os.path.lexists(folder):
        folder = folder.parent
    with contextlib.suppress(FileNotFoundError):
        path.stat()                                         # a name may be too long
    if is_file and os.path.lexists(path):
        if not path.is_file():                              # a pipe would let us wait
            raise OSError(errno.EINVAL, "it is no file")
        path.open("r+b").close()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


class Output(io.FileIO):
    """Standard output that goes on when its reader has left (`| head`): a run is no filter, its
    status and its files are still to come. A full disk ends the run, in one line."""

    def write(self, data):
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            self.write = len                                # what is left in the buffer is lost
            print(f"error: standard output: {error.strerror}", file=sys.stderr)
            raise SystemExit(1) from None


def steady(stdout: TextIO | None) -> TextIO:
    """Standard output that ends no run, whoever stops reading it and whatever it cannot encode."""
    if stdout is None:                                      # closed, by `>&-`
        return open(os.devnull, "w")
    buffer = io.BufferedWriter(Output(stdout.fileno(), "w", closefd=False))
    return io.TextIOWrapper(buffer, stdout.encoding, "namereplace",     # a mark, by its name
                            line_buffering=stdout.line_buffering)


def program(main: Callable[[], int | None]) -> NoReturn:
    """Run a command's main as a program, and leave with its status; with 130 if Ctrl-C has ended
    it, with 143 if SIGTERM has: by an exception, so that what was begun is put away; with 1 and a
    line if the disk is full."""
    sys.stdout = steady(sys.stdout)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        fail("interrupted", 128 + signal.SIGINT)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        fail(f"cannot write {error.filename or 'all of a file'}: {error.strerror}", status=1)
    finally:
        sys.stdout.flush()                                  # which may find that the disk is full
