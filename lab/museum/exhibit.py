"""What an exhibit of the museum is, and how a room's exhibits.toml is read.

    file = "02_data_parallel.py"        # where bugs are planted, if an exhibit names no other file

    [runs.naive]                        # a run that several exhibits share: `run = "naive"`
    ranks = 3
    flags = "--variant naive"

    [[exhibits]]                        # the fields of an Exhibit; `before` and `more` if needed
    number = "NVIDIA/Megatron-LM#1685"
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

OBSERVABLES = ("first loss", "loss", "gradients", "gradient norm", "parameters", "sent", "kept",
               "states", "FLOPs", "values", "time", "resume", "rehearsal")
KINDS = {str: "text", int: "number", list: "list"}


class Exhibit(NamedTuple):
    """A silent bug that somebody had, and how to have it here."""

    number: str             # the thread that tells of it: "pytorch/pytorch#158903"
    title: str
    story: str              # three to six sentences: what was wrong, how it was found, what it cost
    file: str               # where it is planted: the lines `old` are replaced by `new`
    old: str
    new: str
    ranks: int              # of the run that shows it, and its flags; 0: chapter 10, a program
    flags: str
    caught_by: tuple        # observables of that run that see it
    blind: tuple            # and those that do not
    more: tuple = ()        # further (old, new), such as a check of ours that would say so at once
    chapter: str = ""       # the chapter that is run, if `file` is none
    before: tuple = ()      # runs that stopped before, which it goes on from: (ranks, steps)
    rehearsal: str = ""     # flags of the rehearsal at full size that sees it, where no run does

    def edits(self):
        """All (old, new)."""
        return (self.old, self.new), *self.more

    def plant(self, source):
        """The file's source, with the bug. Raises ValueError if its lines are not there once."""
        for old, new in self.edits():
            count = source.count(old)
            if count != 1:
                raise ValueError(f"{self.number}: {self.file} has {count} times: {old}")
            source = source.replace(old, new)
        return source


def read(path: Path) -> list[Exhibit]:
    """The exhibits of an exhibits.toml. Raises ValueError with one line: the file, the exhibit, and
    what is wrong with it."""
    try:
        room = tomllib.loads(path.read_text(encoding="utf-8"))
        check_keys("outside of all exhibits", room, (), ("file", "runs", "exhibits"))
        return [exhibit_of(entry, room) for entry in room.get("exhibits", [])]
    except ValueError as error:                         # also of tomllib
        raise ValueError(f"{path}: {error}") from None


def exhibit_of(entry, room):
    """The Exhibit of an entry. What it leaves out is the room's: the file, and the run it names."""
    name = entry.get("number") or f"the exhibit {entry.get('title', 'without a number')!r}"
    settings = {"file": room["file"]} if "file" in room else {}
    if "run" in entry:
        if entry["run"] not in room.get("runs", {}):
            raise ValueError(f"{name}: there is no [runs.{entry['run']}]")
        settings |= room["runs"][entry["run"]]
    settings |= {key: value for key, value in entry.items() if key != "run"}
    required = [key for key in Exhibit._fields if key not in Exhibit._field_defaults]
    check_keys(name, settings, required, Exhibit._fields)
    for key, value in settings.items():
        kind = {tuple: list}.get(Exhibit.__annotations__[key], Exhibit.__annotations__[key])
        if not isinstance(value, kind):
            raise ValueError(f"{name}: {key} = {value!r} is not a {KINDS[kind]}")
        if kind is list:
            settings[key] = tuple(value)
    for observable in (*settings["caught_by"], *settings["blind"]):
        if settings["ranks"] and observable not in OBSERVABLES:     # chapter 10's are its tables
            raise ValueError(f"{name}: {observable!r} is no observable; they are "
                             f"{', '.join(OBSERVABLES)}")
    for edit in settings.get("more", ()):
        check_keys(f"{name}, more", edit, ("old", "new"), ("old", "new"))
    settings["more"] = tuple((edit["old"], edit["new"]) for edit in settings.get("more", ()))
    settings["before"] = tuple(map(tuple, settings.get("before", ())))
    return Exhibit(**settings | {"story": " ".join(settings["story"].split())})


def check_keys(name, table, required, known):
    """Raise ValueError if a required key is missing, or if there is an unknown one."""
    for key in required:
        if key not in table:
            raise ValueError(f"{name}: {key} is missing")
    for key in table:
        if key not in known:
            raise ValueError(f"{name}: there is no setting {key!r}")
