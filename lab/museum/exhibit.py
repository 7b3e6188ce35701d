"""What an exhibit of the museum is: a silent bug that somebody had, and how to have it here."""

from typing import NamedTuple

AT_FULL_SIZE = ("rehearsal",), ("first loss", "loss", "gradients", "gradient norm", "parameters",
                                "sent", "kept", "states")      # caught_by, and blind


class Exhibit(NamedTuple):
    number: str             # the thread that tells of it: "pytorch/pytorch#158903"
    title: str
    story: str              # three to six sentences: what was wrong, how it was found, what it cost
    file: str               # where it is planted: these lines are replaced by those
    old: str
    new: str
    ranks: int              # of the run that shows it, and its flags; 0: chapter 10, a program
    flags: str
    caught_by: tuple        # observables of that run (lab/museum/observe.py) that see it
    blind: tuple            # and those that do not
    more: tuple = ()        # further (old, new), such as a check of ours that would say so at once
    chapter: str = ""       # that is run, where `file` is none
    before: tuple = ()      # runs that stopped before, which it goes on from: (ranks, steps)
    rehearsal: str = ""     # flags of the rehearsal at full size that sees it, where no run does

    def plant(self, source):
        """The file's source, with the bug. Raises ValueError if its lines are not there once."""
        for old, new in ((self.old, self.new), *self.more):
            found = source.count(old)
            if found != 1:
                raise ValueError(f"{self.number}: {self.file} has {found} times: {old}")
            source = source.replace(old, new)
        return source
