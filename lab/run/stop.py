"""A stop of the tour: one command, and what it is for. A room's about.py lists its own as TOUR."""

from typing import NamedTuple


class Stop(NamedTuple):
    """words: what a reader types after `python` or torchrun's flags. what: it shows. seconds: that
    it took on two quiet cores. ranks: 0, without torchrun. name: of its JSON; "", it writes none.
    drawn_on: ranks for figures/; None, no figure shows it. by_torchrun: it is started as it is
    typed."""

    words: str
    what: str
    seconds: float
    name: str = ""
    ranks: int = 4
    drawn_on: int | None = 8
    by_torchrun: bool = False
