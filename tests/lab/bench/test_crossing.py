"""lab.bench.crossing: what two stages that share their layers send, measured beside the formula."""

import pytest
import torch
import torch.distributed as dist

from lab.bench import crossing, meters
from tests.conftest import sample


def passed_on(t, how):
    """What a rank has in the end, if it is right, and the bytes that it sent and gathered."""
    stages = [dist.new_group([*range(first, first + t)]) for first in (0, t)]
    stage, x = dist.get_rank() // t, torch.arange(24.0).view(2, 3, 4)
    with meters.CommMeter(False) as comm:
        given = x if stage == 0 else torch.zeros_like(x)
        got = crossing.pass_on(given, t, how, stages[stage])
    sent = lambda op: comm.total.get(op, {"wire_bytes": 0})["wire_bytes"]
    return got.equal(x), sent("send"), sent("all_gather")


@pytest.mark.parametrize(("t", "how"), sample([(2, "scattered"), (2, "whole"), (4, "scattered")]))
def test_so_many_bytes_cross_machines(ranks, t, how):
    results = ranks(2 * t)(passed_on, t, how)
    arrived, across, inside = zip(*results)
    assert all(arrived)
    assert (sum(across), sum(inside)) == crossing.bytes_between(24 * 4, t)[how]
