"""Silent bugs that two papers have published (published.toml), beside the exhibits here."""

import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

UNREAD = "not listed: 2 of TrainCheck's 20, which its artifact leaves out, and 12 of TTrace's 14"


class Published(NamedTuple):
    """A bug of a catalogue, and what it is here: an exhibit, or a reason why there is none."""
    name: str               # in the catalogue
    thread: str             # that tells of it
    what: str               # is wrong
    theirs: str             # how they see it; "": not told
    exhibit: tuple = ()     # (room, number) of ours
    why: str = ""

    @property
    def is_same_thread(self):
        return self.thread == self.exhibit[1]


def catalogues():
    """{title: its bugs}."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return {catalogue["title"]: [bug_of(entry) for entry in catalogue["bugs"]]
            for catalogue in tomllib.loads(text)["catalogues"]}


def bug_of(entry):
    """The Published of an entry of published.toml."""
    return Published(**entry | {"exhibit": tuple(entry.get("exhibit", ()))})


def table(exhibits):
    """The lines of `--published`. exhibits: {room: its exhibits}. Raises KeyError if a bug names
    one that is not there."""
    ours = {(room, one.number): one for room, those in exhibits.items() for one in those}
    lines, bugs = [], []
    for title, those in catalogues().items():
        lines.append(title)
        bugs += those
        for bug in those:
            lines += [f"  {bug.thread}: {bug.what}", f"    theirs: {bug.theirs or '(not told)'}"]
            here = f"not here: {bug.why}"
            if bug.exhibit:
                here = describe_exhibit(bug, ours[bug.exhibit])
            lines += textwrap.wrap(here, 99, initial_indent=" " * 4, subsequent_indent=" " * 8)
    return [*lines, *count(bugs, ours)]


def describe_exhibit(bug, exhibit):
    """What sees a bug here, in words."""
    mechanism = "" if bug.is_same_thread else f", by the mechanism of {exhibit.number}"
    seen_by = ", ".join(name for name in exhibit.caught_by if name != "first loss")
    first = "sees it" if "first loss" in exhibit.caught_by else "does not"
    return f"ours: in {bug.exhibit[0]}{mechanism}: {seen_by}; the first loss {first}"


def count(bugs, ours):
    """The last lines: how many bugs are here, and how many of them a first loss sees."""
    here = [bug for bug in bugs if bug.exhibit]
    same = sum(bug.is_same_thread for bug in here)
    first = sum("first loss" in ours[bug.exhibit].caught_by for bug in here)
    return [f"{len(bugs)} published bugs: {same} are exhibits, {len(here) - same} are of the same "
            f"mechanism as one, {len(bugs) - len(here)} are not here",
            f"of the {len(here)} here, the first loss sees {first}", UNREAD]
