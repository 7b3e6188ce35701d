"""What the checks of several rooms use.

A check compares what it computes with a student's module and, in other processes, with the
solution's. So it must give the same value whenever it is called, here and elsewhere.
"""

import torch
import torch.distributed as dist

from common import PRESETS

TINY = PRESETS["tiny"]
NUMBERS = torch.Generator()


def seed():
    """Draw the same numbers again, as before each check."""
    torch.manual_seed(0)
    NUMBERS.manual_seed(0)


def random(*shape):
    """Numbers in float64, normally distributed: the same ones in each evaluation of a check."""
    return torch.randn(*shape, generator=NUMBERS, dtype=torch.float64)


def random_of_rank(*shape):
    """Random numbers, different ones on each rank."""
    return random(dist.get_world_size(), *shape)[dist.get_rank()]


def alone():
    """A process group of one rank: what a rank shows of a chapter without a run."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def ranks_of(group):
    """Of a group that this rank is in; None: there is no group."""
    return group and dist.get_process_group_ranks(group)


def how_it_is_cut(p):
    """A parameter's shape, its cuts, and the ranks that sum its gradient."""
    return [list(p.shape), [cut[:3] for cut in p.cuts], ranks_of(getattr(p, "partial", None))]
