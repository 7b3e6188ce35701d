"""What is said of a command line that is refused: one line, status 2, and what would work instead.

Whoever refuses raises common.Refused(why, change, ...). A change is text that a user could paste:
"--dtype float32 --dim 64" puts these flags in place of those given, "without --ep" drops one, and
"--nproc_per_node 4" starts so many ranks. What does the refusing, `accept(argv)`, is a function of
the arguments alone. So it can be asked what it says to the changed ones, and a change is printed
only if it is accepted.
"""

import contextlib
import io
import os
import shlex
import sys
from collections import deque

from common import Refused, environment

RANKS = "--nproc_per_node"          # torchrun's flag, and not one of the program
MOST = 30                           # tries of several changes together


def one_line(text):
    """With whatever would break the line, or could change a terminal, escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def fail(message):
    """End with status 2 and one line, on whatever rank this is."""
    with contextlib.suppress(OSError):                      # nobody reads it
        print(f"error: {one_line(message)}", file=sys.stderr)
    raise SystemExit(2)


def accepted(accept, argv, alone=False):
    """accept(argv), or the end. alone: the program has no ranks, whatever the environment says."""
    try:
        return accept(argv)
    except Refused as refused:
        complain(refused, accept, argv, alone)


def complain(refused, accept, argv, alone=False):
    """End because of a refusal, which all ranks have found: local rank 0 says it, with status 2."""
    if not alone and environment("LOCAL_RANK", environment("RANK", 0)) > 0:
        raise SystemExit(0)
    fail(f"{refused.args[0]}; {advice(refused, accept, argv)}")


def advice(refused, accept, argv):
    """What would work instead: rather one change than several, rather what the refusal names than
    to drop a flag. If nothing works, why not what the refusal names."""
    why, *named = refused.args
    changes = together(refused, accept, argv)
    if changes is None or len(changes) > 1 and changes not in map(parsed, named):
        flags = dict.fromkeys(word.partition("=")[0] for word in argv if word.startswith("--"))
        for flag in sorted(flags, key=lambda flag: flag not in why):    # those that it names first
            if refusal(accept, argv, {flag: None}) is None:
                return f"without {flag} would work"
    if changes:
        return f"{in_words(changes)} would work"
    beside = [f"with {change}, {refusal(accept, argv, parsed(change)).args[0]}; "
              for change in named[:1]]
    return "".join([*beside, "no single change would work"])


def together(refused, accept, argv):
    """The least changes, as {flag: values}, that are accepted, where each was named by a refusal of
    those before it; or None."""
    queue, tried = deque([({}, refused)]), []
    while queue and len(tried) < MOST:
        before, refused = queue.popleft()
        for change in refused.args[1:]:
            changes = before | parsed(change)
            if changes not in tried:
                tried.append(changes)
                again = refusal(accept, argv, changes)
                if again is None:
                    return changes
                queue.append((changes, again))
    return None


def refusal(accept, argv, changes):
    """With which Refused `accept` answers to the changed arguments; None: they are accepted."""
    silent, before = io.StringIO(), os.environ.copy()
    os.environ.update(launched(changes))
    try:
        with contextlib.redirect_stdout(silent), contextlib.redirect_stderr(silent):
            accept(changed(argv, changes))
    except Refused as refused:
        return refused
    except SystemExit as leaving:                           # 0: a run that has nothing left to do
        return Refused("the program ends") if leaving.code else None
    finally:
        os.environ.clear()
        os.environ.update(before)
    return None


def parsed(change):
    """{flag: its values, or None if it is dropped}, in place of what is given."""
    words = shlex.split(change)
    if words[0] == "without":
        return dict.fromkeys(words[1:])
    changes = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            changes[flag] = []
        else:
            changes[flag].append(word)
    return changes


def in_words(changes):
    """The reverse of `parsed`, the flags that are dropped at the end."""
    put = [shlex.join([flag, *values]) for flag, values in changes.items() if values is not None]
    dropped = [flag for flag, values in changes.items() if values is None]
    return " ".join([*put, *["without"] * bool(dropped), *dropped])


def changed(argv, changes):
    """The arguments with the changes."""
    kept, dropping = [], False
    for word in argv:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            dropping = flag in changes and not equals
            kept += [] if flag in changes else [word]
        elif dropping:
            dropping = False                                # it was that flag's value
        else:
            kept.append(word)
    for flag, values in changes.items():
        kept += [] if flag == RANKS or values is None else [flag, *values]
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
