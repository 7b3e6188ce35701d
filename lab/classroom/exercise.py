"""What an exercise is: functions that students write, and what checks them.

A check of a Same is a function of the module that a student has written. What it gives of the
solution's module was computed in other processes: so it must give the same value whenever it is
called, here and elsewhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from common import PRESETS

TINY = PRESETS["tiny"]
NUMBERS = torch.Generator()
SMALL = ("--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps=3 --dtype=float64 "
         "--optimizer=sgd")                             # what a Run's flags leave open


class Run(NamedTuple):
    """A check: the chapter runs on so many ranks with these flags, and must match its formulas and
    one GPU (00: PyTorch) in all that is compared. What a model's flags leave open is in SMALL."""
    ranks: int
    flags: str = ""


class Same(NamedTuple):
    """A check: what function(chapter, *sizes) gives of a student's module is what it gives of the
    solution's. words: what is compared, as a student is told. ranks: where it is called; those of
    several are gloo's, all in dist.group.WORLD, and each one's value is compared."""
    function: Callable
    words: str
    sizes: tuple = ()
    ranks: int = 1

    @property
    def key(self):
        """What tells it from the other checks of all exercises."""
        function = f"{self.function.__module__}.{self.function.__qualname__}"
        return f"{function} {self.sizes!r} on {self.ranks}"

    def value(self, chapter):
        """Of a chapter's module."""
        torch.manual_seed(0)
        NUMBERS.manual_seed(0)
        return self.function(chapter, *self.sizes)


class Exercise(NamedTuple):
    number: str             # "04.2"
    names: str              # functions or methods of the chapter: "SumOut.forward SumOut.backward"
    level: int
    question: str           # one to three plain sentences
    hints: tuple            # two, which open one after the other
    checks: tuple           # Run and Same
    title: str = ""         # if the names are not one

    @property
    def functions(self):
        return self.names.split()

    @property
    def what(self):
        return self.title or self.names


def random(*shape):
    """Numbers in float64, normally distributed: the same ones in each evaluation of a check."""
    return torch.randn(*shape, generator=NUMBERS, dtype=torch.float64)


def alone():
    """A process group of one rank: what a rank shows of a chapter without a run."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
