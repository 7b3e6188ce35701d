"""Outcomes of checks that one grading keeps for the next, which plays only what has changed.

An outcome is kept under a digest of all that it depends on: the source that runs, the modules
beside a student's file, the solution, the check (its second configuration, too) and the limit. All
are dropped when the course, torch or Python is another one. An outcome that a busy machine may have
caused is not kept: a run without end, and a process that was ended.

They lie in the user's cache folder, in a file for each folder that is graded, and never in a
student's. The file is read once, before any student's code runs, and written from memory alone. So
what students' code writes there while it is graded is lost, and is told. What is not held: code
that ends the grader or changes its memory, since it has the rights of whoever grades. A container
and --sandbox hold that. --fresh reads nothing.
"""

import errno
import functools
import hashlib
import json
import os
import secrets
import sys
import tempfile
from pathlib import Path

from lab import ROOT
from lab.classroom import sandbox

# Not torch, nor what imports it: see lab/classroom/checks.py.

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "fivefold")
MOST = 200              # modules beside a student's file
LARGEST = 10**6         # bytes of one
OVERSEER = "the process that oversees it"       # so begins what is said where that has ended
FIELDS = "right", "said", "errors", "world"     # of an outcome that is kept


def digest(*what):
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


# ----------------------------------------------------------------------- what an outcome depends on

def key(chapter, source, solution, check, folders=(), limit=None):
    """folders: the student's, from which the source may import."""
    words = getattr(check, "key", repr(check)), getattr(check, "words", "")
    return digest(chapter, source, solution, words, limit, sandbox.REQUIRED,
                  *map(modules_in, folders))


def modules_in(folder):
    """What may be imported from a student's folder, besides the chapters: a digest. It is a new one
    each time where there is too much of it, or what cannot be read."""
    from lab.classroom.exercises import EXERCISES

    chapters, found = {f"{chapter}.py" for chapter in EXERCISES}, []
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name[0] not in "._")
        for path in (Path(where, name) for name in sorted(names) if name.endswith(".py")):
            name = path.relative_to(folder).as_posix()
            if name not in chapters:
                try:
                    if len(found) == MOST or not path.is_file() or path.stat().st_size > LARGEST:
                        return secrets.token_hex()
                    found.append((name, hashlib.sha256(path.read_bytes()).hexdigest()))
                except OSError:
                    return secrets.token_hex()
    return digest(found) if found else ""


@functools.cache
def version():
    """Of the course, torch and Python."""
    import torch

    files = [*ROOT.glob("*.py"), *ROOT.glob("kernels/*.py"), *ROOT.glob("lab/**/*.py"),
             *ROOT.glob("lab/classroom/*.json")]
    contents = [(str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest())
                for path in sorted(files)]
    return digest(contents, torch.__version__, sys.version)


# ------------------------------------------------------------------------------------- the file

def is_lasting(outcome):
    """Whether it would be the same on another day."""
    is_ended = any(words.startswith(OVERSEER) for words in outcome.said)
    return outcome.right or not (outcome.stuck or outcome.ended or is_ended)


class Kept:
    """The file of a folder that is graded. `outcomes`: {key: Outcome}, what is kept, and then what
    comes to be known."""

    def __init__(self, folder, outcomes):
        folder = Path(folder).resolve()
        self.path = FOLDER / f"{folder.name[:50]}-{digest(os.fsencode(folder).hex())[:16]}.json"
        self.outcomes, self.written, self.said = outcomes, set(), set()
        self.data = self.read()

    def read(self):
        """The file's bytes; None: it cannot be read."""
        try:
            return self.path.read_bytes() if self.path.is_file() else None
        except OSError:
            return None

    def load(self):
        """Take the outcomes from the file; none if it is broken, or of another course."""
        from lab.classroom.checks import Outcome

        try:
            there = json.loads(self.data)
            if there["version"] != version():
                return
            found = {}
            for key, (right, said, errors, world) in there["outcomes"].items():
                errors = {int(rank): (str(words), [*map(int, lines)])
                          for rank, (words, lines) in errors.items()}
                found[key] = Outcome(right is True, tuple(map(str, said)), errors, {}, {}, world)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return
        self.outcomes |= found
        self.written = set(found)

    def save(self):
        """Write the file anew if more is known: whole, or not at all. What hinders that is said,
        once, and so is that somebody else has written there."""
        lasting = {key: outcome for key, outcome in self.outcomes.copy().items()
                   if is_lasting(outcome)}
        is_changed = self.read() != self.data
        if is_changed:
            self.say(f"{self.path} was changed while this graded; what this has found replaces it")
        if lasting.keys() <= self.written and not is_changed:
            return
        kept = {key: [getattr(outcome, field) for field in FIELDS]
                for key, outcome in lasting.items()}
        self.data = json.dumps({"version": version(), "outcomes": kept}).encode()
        try:
            self.write()
        except OSError as error:
            self.data = self.read()
            self.say(f"nothing is kept for the next time in {self.path}: {error.strerror}")
        self.written = set(lasting)

    def write(self):
        if not self.path.is_absolute():                 # of who has no home
            raise FileNotFoundError(errno.ENOENT, "there is no home")
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=self.path.parent, delete=False) as file:
            file.write(self.data)
        try:
            os.replace(file.name, self.path)
        except OSError:                                 # a folder is there, say
            os.unlink(file.name)
            raise

    def say(self, words):
        from lab.cli.refusals import say

        if words not in self.said:
            say(words)
        self.said.add(words)
