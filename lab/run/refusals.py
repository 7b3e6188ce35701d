"""A command line that is refused: one line on stderr, status 2, and one value that works.

A check raises common.Refused(why, change), and the line ends with "; CHANGE would work". A change
is what a reader would type: "--dtype float32 --dim 64" sets these flags, "--nproc_per_node 4"
starts that many ranks, "without --ep" drops a flag (or a word), "ring in place of rnig" replaces a
word and "with ring" adds one.

If a second flag doesn't fit either, the changed command line is refused in turn, with a change for
that flag.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

RANKS = "--nproc_per_node"          # torchrun's flag, and not one of the program


class Refused(Exception):
    """As common's, for a program that does without torch, and so without common."""


def refusal() -> type[Exception]:
    """The class of what is raised to refuse: common's, or ours where nobody has imported that."""
    return getattr(sys.modules.get("common"), "Refused", Refused)


def environment(name, default):                         # as common's
    return int(os.environ.get(name, default))


def one_line(text: str) -> str:
    """With whatever would break the line, or could change a terminal, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def say(message: str) -> None:
    """One line on stderr, whether or not anybody reads it, on whatever rank this is."""
    with contextlib.suppress(OSError):
        if sys.stderr:                                      # it is None where it is closed
            print(f"error: {one_line(message)}", file=sys.stderr)


class Ended(SystemExit):
    """The end of a program, with this status, after a `line` that says why."""

    def __init__(self, line: str, status: int):
        super().__init__(status)
        self.line = line


def fail(message: str, status: int = 2) -> NoReturn:
    """Say it, and end with this status."""
    say(message)
    raise Ended(message, status)


def accepted(accept: Callable, argv: list[str], alone: bool = False):
    """accept(argv), or the end, with one line and status 2. alone: the program has no ranks,
    whatever the environment says."""
    try:
        return accept(argv)
    except refusal() as refused:
        complain(refused, alone)


def complain(refused: Exception, alone: bool = False) -> NoReturn:
    """End because of a refusal, which all ranks have raised: local rank 0 prints it, with status
    2."""
    if not alone and environment("LOCAL_RANK", environment("RANK", 0)) > 0:
        raise SystemExit(0)
    why, *change = refused.args
    fail(f"{why}; {change[0]} would work" if change else why)
