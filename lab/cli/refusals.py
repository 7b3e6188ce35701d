"""What is said of a command line that is refused: one line, status 2, and what would work instead.

Whoever refuses raises common.Refused(why, change, ...). A change is text that a user could follow:
"--dtype float32 --dim 64" puts these flags in place of those given, "without --ep" drops one, "1f1b
in place of 1fb" puts one word for another, "with 1f1b" adds one, "without stray" drops one, and
"--nproc_per_node 4" starts so many ranks. What does the refusing, `accept(argv)`, is a function of
the arguments alone. So it can be asked what it says to the changed ones, and a change is printed
only if it is accepted.
"""

import contextlib
import heapq
import io
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable
from typing import NoReturn

RANKS = "--nproc_per_node"          # torchrun's flag, and not one of the program
MOST = 50                           # tries
DEAR = "--resume", "--save", "--data"       # without it, the run is not what somebody wants
VALUES = {}                         # {flag: how many values it takes}, of the parser that has read
                                    # last, where they are not one


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


def fail(message: str, status: int = 2) -> NoReturn:
    """Say it, and end with this status."""
    say(message)
    raise SystemExit(status)


def accepted(accept: Callable, argv: list[str], alone: bool = False):
    """accept(argv), or the end, with one line and status 2. alone: the program has no ranks,
    whatever the environment says."""
    try:
        return accept(argv)
    except refusal() as refused:
        complain(refused, accept, argv, alone)


def complain(refused: Exception, accept: Callable, argv: list[str],
             alone: bool = False) -> NoReturn:
    """End because of a refusal, which all ranks have found: local rank 0 says it, with status 2."""
    if not alone and environment("LOCAL_RANK", environment("RANK", 0)) > 0:
        raise SystemExit(0)
    fail("; ".join([refused.args[0], *advice(refused, accept, argv)]))


def advice(refused: Exception, accept: Callable, argv: list[str]) -> list[str]:
    """What would work instead; if nothing does, why not what the refusal names, if it does."""
    why, *named = refused.args
    changes = least_changes(refused, accept, argv)
    if changes:
        return [f"{in_words(changes)} would work"]
    if not named:
        return []
    again = answer(accept, argv, parsed(named[0]))
    change = named[0] if named[0].startswith("with") else f"with {named[0]}"
    return [f"{change}, {again.args[0]}", "no change of a few flags was found to work"]


def least_changes(refused, accept, argv):
    """The fewest changes that are accepted, as {flag: values}, or None; rather to put a flag than
    to drop one, and three others rather than to drop one that is DEAR. Tried are those that a
    refusal names, and to drop the flags that it speaks of; because of the first refusal, any flag;
    at last, to drop all of them.
    """
    given = dict.fromkeys(word.partition("=")[0] for word in argv
                          if word.startswith("--") and word != "--")
    order, queue, tried = itertools.count(), [], []

    def go_on(refused, before, dropped):
        for change in [*refused.args[1:], *(f"without {shlex.quote(flag)}" for flag in dropped)]:
            changes = before | {tuple(parsed(change)): change}      # a later value, same flags
            drops = sum(change.startswith("without") for change in changes.values())
            dear = sum(f"without {flag}" in changes.values() for flag in DEAR)
            if changes not in tried:
                tried.append(changes)
                heapq.heappush(queue, (len(changes) + 2 * dear, drops, next(order), changes))

    go_on(refused, {}, sorted(given, key=lambda flag: flag not in spoken_of(refused)))
    for _ in range(MOST):
        if queue:
            *_, changes = heapq.heappop(queue)
            merged = {flag: values for change in changes.values()
                      for flag, values in parsed(change).items()}
            again = answer(accept, argv, merged)
            if again is None:
                return merged
            go_on(again, changes, [flag for flag in spoken_of(again) if flag in given])
    merged = dict.fromkeys(given)
    for _ in range(3 if given else 0):                      # without any, and what that is told
        again = answer(accept, argv, merged)
        if again is None:
            return merged
        merged |= parsed(again.args[1]) if again.args[1:] else {}
    return None


def spoken_of(refused):
    """The flags in what a refusal says."""
    return re.findall(r"--[a-z][a-z_-]*", refused.args[0])


def answer(accept: Callable, argv: list[str], changes: dict):
    """With which Refused `accept` answers to the changed arguments; None: they are accepted."""
    silent, before = io.StringIO(), os.environ.copy()
    os.environ.update(launched(changes))
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            accept(changed(argv, changes))
    except refusal() as refused:
        return refused
    except SystemExit as leaving:                           # 0: a run that has nothing left to do
        return refusal()("the program ends") if leaving.code else None
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None


def parsed(change: str) -> dict:
    """{flag: its values, or None if it is dropped}, in place of what is given; of a word that
    stands for itself, {the word: [another one], or None}, and of a new one {None: [the word]}."""
    words, changes, flag = shlex.split(change), {}, None
    while words:
        word, *words = words
        if word == "without":
            return changes | dict.fromkeys(words)
        if word == "with":
            changes[None], words = words[:1], words[1:]
        elif words[:3] == ["in", "place", "of"]:
            changes[words[3]], words = [word], words[4:]
        elif word.startswith("--"):
            flag, changes[word] = word, []
        else:
            changes[flag].append(word)
    return changes


def in_words(changes):
    """The reverse of `parsed`, the flags that are dropped at the end."""
    put = [f"with {shlex.join(values)}" if name is None else
           shlex.join([name, *values]) if name.startswith("--") else
           f"{shlex.join(values)} in place of {shlex.quote(name)}"
           for name, values in changes.items() if values is not None]
    dropped = [shlex.quote(name) for name, values in changes.items() if values is None]
    return " ".join([*put, *["without"] * bool(dropped), *dropped])


def changed(argv, changes):
    """The arguments with the changes."""
    kept, dropping = [*changes.get(None, [])], 0            # values of a flag that is dropped
    for word in argv:
        if word.startswith("--") and word != "--":
            flag, equals, _ = word.partition("=")
            dropping = VALUES.get(flag, 1) if flag in changes and not equals else 0
            kept += [] if flag in changes else [word]
        elif dropping:
            dropping -= 1
        elif word in changes:
            kept += changes[word] or []
        else:
            kept.append(word)
    end = kept.index("--") if "--" in kept else len(kept)   # behind it, benchmarks have the flags
    behind = {word.partition("=")[0] for word in argv[argv.index("--") + 1:]} if end < len(kept) \
        else set()                                          # of their runs
    for flag, values in changes.items():
        if flag and flag.startswith("--") and flag != RANKS and values is not None:
            put = [flag, *values]
            if flag in behind:
                kept += put
            else:
                kept[end:end] = put
                end += len(put)
    return kept


def launched(changes):
    """What torchrun would set in the environment, if so many ranks were started on each machine."""
    if RANKS not in changes:
        return {}
    [ranks] = map(int, changes[RANKS])
    world = environment("WORLD_SIZE", 1)
    machines = world // environment("LOCAL_WORLD_SIZE", world)
    return {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks),
            "WORLD_SIZE": str(ranks * machines)}
