"""The rules of a pretended GPU that no fault of a chapter breaks (tests/faults has those)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.pretend_cuda import RuleBroken, pretended_cuda

# -------------------------------------------------------------------- what is refused, on two ranks


def all_reduce(x):
    return dist.all_reduce(x, async_op=True)


def wait_on_a_side_stream(x, host):
    work = all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    x.add_(1)


def exchange(x, received, tag=0):
    """Both ranks send one message and expect so many, in a group of their own, so that no later
    exchange meets what a fault leaves there."""
    group, other = dist.new_group([0, 1]), 1 - dist.get_rank()
    rooms = [torch.empty_like(x) for _ in range(received)]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, group=group, group_peer=other, tag=tag)]
        + [dist.P2POp(dist.irecv, room, group=group, group_peer=other) for room in rooms])
    works[0].wait()


def wide_rows(x, host):
    """An all_to_all of one row for each rank, which are longer on rank 0."""
    rows = x.view(4 << dist.get_rank(), -1)
    dist.all_to_all_single(rows.new_empty(2, rows.shape[1]), rows[:2], [1, 1], [1, 1])


def one_breaks_a_rule(x, host):
    """While the other one waits for it."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.recv(x, 1, group)
    torch.add(x, host)


FAULTS = {  # of x on the device and a pinned tensor of the host, (4, 4) both: what is said of them
    "never waited for": (lambda x, host: all_reduce(x), "nobody waited for ['allreduce_']"),
    "freed": (lambda x, host: [all_reduce(x), x.untyped_storage().resize_(0)], "race: resize_"),
    "on a side stream": (wait_on_a_side_stream, "race: add_ touches"),
    "read before it came": (lambda x, host: [host.copy_(x, non_blocking=True), host + 1],
                            "race: add touches what a copy"),
    "overwritten before it left": (lambda x, host: [x.copy_(host, non_blocking=True), host.zero_()],
                                   "race: zero_ touches what a copy"),
    "a host's scalar": (lambda x, host: torch.stack([x[0, 0], host[0, 0]]), "stack of tensors on"),
    "into a host's scalar": (lambda x, host: host[0, 0].add_(x[0, 0]), "add_ of tensors on two"),
    "numpy": (lambda x, host: x.numpy(), "numpy() of a tensor on the device"),
    "fewer": (lambda x, host: exchange(x, 2), "ranks wait for each other; rank 0: mess"),
    "wide rows": (wide_rows, "ranks disagree; rank 0: alltoall_base_"),
    "a tag": (lambda x, host: exchange(x, 1, tag=1), "send with a tag"),
    "it broke": (one_breaks_a_rule, "add of tensors on two devices"),
}  # fmt: skip


def said_of():
    """For a rank of the pool: what is said of each case, in a pretence of its own."""
    said = {}
    for name, (fault, _) in FAULTS.items():
        try:
            with pretended_cuda():
                fault(torch.ones(4, 4, device="cuda"), torch.ones(4, 4).pin_memory())
        except RuleBroken as broken:
            said[name] = str(broken)
    return said


def test_each_rule(ranks):
    for said in ranks(2, 240)(said_of):
        for name, (_, rule) in FAULTS.items():
            assert rule in said[name], name


# ------------------------------------------------------------------------ what the host waits for

WAITS = {  # of x and of a host's tensor, which is not pinned
    "mask": lambda x, host: x[x > 0],
    "repeat": lambda x, host: x.repeat_interleave(x.long()),
    "one_hot": lambda x, host: F.one_hot(x.long()),
    "not pinned": lambda x, host: x.copy_(host, non_blocking=True),
    "foreach": lambda x, host: torch._foreach_copy_([x, x], [host, x]),
    "a number": lambda x, host: torch.tensor(1.0, device="cuda"),
    "synchronize": lambda x, host: torch.cuda.synchronize(),
}


def test_what_the_host_waits_for():
    for name, function in WAITS.items():
        with pretended_cuda() as gpu:
            x, host = torch.ones(4, device="cuda"), torch.ones(4)
            gpu.step = []
            function(x, host)
        [wait] = gpu.step
        assert ", test_pretended_rules:" in wait, name
