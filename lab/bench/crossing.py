"""What crosses machines between two stages of a pipeline, each of which t ranks share.

Under tensor parallelism alone, all t ranks of a stage have the whole activation, and the next stage
needs it whole on all of its t ranks. If each sends it to its counterpart, it crosses t times. It is
enough that each sends 1/t, and that the others gather it inside their machine (Megatron-LM, 2021,
section 4.1). Under sequence parallelism each has only 1/t to begin with, as in chapter 09, and the
next stage's f gathers in any case.
"""

import torch
import torch.distributed as dist

import common


def bytes_between(message: int, t: int) -> dict[str, tuple[int, int]]:
    """{how: (bytes from machine to machine, and inside the receiving one, of all its ranks)} for a
    message of so many bytes."""
    return {"whole": (t * message, 0), "scattered": (message, (t - 1) * message)}


def pass_on(x: torch.Tensor, t: int, how: str, stage_group: dist.ProcessGroup) -> torch.Tensor:
    """On ranks 0 to t-1, a stage, x goes to ranks t to 2t-1, the next: all of x is on each of both.
    stage_group: the ranks of the own stage. Communication: a message from each rank, and for
    "scattered" an all_gather inside the next stage, whose parts t has to divide."""
    stage, place = divmod(dist.get_rank(), t)
    part = x if how == "whole" else x.flatten().chunk(t)[place]
    if stage == 0:
        dist.send(part.contiguous(), dist.get_rank() + t)
        return x
    received = torch.empty_like(part)
    dist.recv(received, place)
    if how == "whole":
        return received
    whole = torch.empty_like(x)
    common.all_gather(whole.view(-1), received, group=stage_group)
    return whole
