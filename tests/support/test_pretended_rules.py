"""The rules of a pretended GPU, one at a time."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F

import common
from tests.support.pretend_cuda import RuleBroken, Run, Work, pretended_cuda


def test_tensors_say_where_they_are():
    with pretended_cuda():
        x, host = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
        assert x.device.type == "cuda" and x.is_cuda and host.device.type == "cpu"
        there = (host.to("cuda"), host.cuda(), host.to(x), host.to(x.device, torch.float64), x + 1,
                 x.view(4)[1:], torch.zeros_like(x), x.new_empty(3), torch.arange(2, device="cuda"),
                 torch.empty_like(host, device="cuda"), x.to(torch.bfloat16), x * torch.tensor(2.0))
        here = (x.to("cpu"), x.cpu(), x.to(host), host + 1, torch.zeros_like(x, device="cpu"))
        assert all(y.is_cuda for y in there) and not any(y.is_cuda for y in here)
        assert there[3].dtype == torch.float64 and there[10].dtype == torch.bfloat16
        assert x.to("cuda") is x and host.to("cpu") is host and x.to("cuda", copy=True) is not x
        assert not host.is_pinned() and host.pin_memory().is_pinned()
        assert torch.empty(2, pin_memory=True).is_pinned()
        leaf = torch.ones(2, device="cuda", requires_grad=True)
        leaf.sum().backward()
        assert leaf.grad.is_cuda
        x.copy_(host), host.copy_(x)
        assert x.is_cuda and not host.is_cuda


# -------------------------------------------------------------------- what is refused, on two ranks


def all_reduce(x):
    return dist.all_reduce(x, async_op=True)


def wait_on_a_side_stream(x, host):
    work = all_reduce(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    x.add_(1)


def two_groups(x, host):
    """Both under way at once; rank 1 starts them in the other order."""
    group = dist.new_group([0, 1])
    starts = [lambda: all_reduce(x[:2]), lambda: dist.broadcast(x[2:], 0, group, async_op=True)]
    for work in [start() for start in starts[:: -1 if dist.get_rank() else 1]]:
        work.wait()


def groups_in_another_order(x, host):
    for ranks in ([0], [0, 1])[:: -1 if dist.get_rank() else 1]:
        dist.new_group(ranks)


def one_rank_alone(x, host):
    if dist.get_rank() == 1:
        dist.all_reduce(x)


def one_group_each(x, host):
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair if dist.get_rank() else None)


def exchange(x, sent, received, tag=0):
    """Both ranks send and receive so many rows, in a group of their own, so that no later exchange
    meets what a fault leaves there."""
    group, other = dist.new_group([0, 1]), 1 - dist.get_rank()
    rooms = [x.new_empty(rows, 4) for rows in received]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x[:rows], group=group, group_peer=other, tag=tag) for rows in sent]
        + [dist.P2POp(dist.irecv, room, group=group, group_peer=other) for room in rooms])
    assert len(works) == 1 and not works[0].is_completed()  # one for all
    [work.wait() for work in works + works]  # twice, which NCCL does not mind
    assert all(room.sum() == room.numel() for room in rooms)


def meanwhile(x, is_late):
    """A message in a group of its own, under way during a collective. If late, rank 1 receives it
    after that: a device that runs one after the other would wait for ever."""
    pair, rank = dist.new_group([0, 1]), dist.get_rank()
    if is_late and rank:
        dist.all_reduce(x[2:])
    work = (dist.irecv if rank else dist.isend)(x[:2], 1 - rank, pair)
    if not (is_late and rank):
        dist.all_reduce(x[2:])
    work.wait()


def exchange_rows(x, sent, received):
    """An all_to_all, in which this rank sends and expects so many rows of each rank."""
    room = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(room, x[: sum(sent)], received, sent)
    assert room.sum() == room.numel()


def receive(x, host, other_rank):
    """Rank 0 waits for rank 1, which does something else."""
    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.recv(x, 1, group)
    elif other_rank:
        other_rank(x, host)


def each_sends_first(x, host):
    dist.send(x, 1 - dist.get_rank(), dist.new_group([0, 1]))


FAULTS = {  # of x on the device and a pinned tensor of the host, (4, 4) both: what is said of them
    "on the host": (lambda x, host: dist.all_reduce(host), "not on the device"),
    "transposed": (lambda x, host: common.all_gather(x.new_empty(8, 4), x.T), "not contiguous"),
    "sent twice": (lambda x, host: [all_reduce(x), dist.broadcast(x, 0)], "race: broadcast_ touch"),
    "never waited for": (lambda x, host: all_reduce(x), "nobody waited for ['allreduce_']"),
    "freed": (lambda x, host: [all_reduce(x), x.untyped_storage().resize_(0)], "race: resize_"),
    "part of it": (lambda x, host: [all_reduce(x[:2]), x[1].add(1)], "race: add touches"),
    "on a side stream": (wait_on_a_side_stream, "race: add_ touches"),
    "read before it came": (lambda x, host: [host.copy_(x, non_blocking=True), host + 1],
                            "race: add touches what a copy"),
    "overwritten before it left": (lambda x, host: [x.copy_(host, non_blocking=True), host.zero_()],
                                   "race: zero_ touches what a copy"),
    "same size": (lambda x, host: x.untyped_storage().resize_(64), "CUDA copies them all"),
    "two devices": (lambda x, host: x + host, "add of tensors on two devices"),
    "a host's scalar": (lambda x, host: torch.stack([x[0, 0], host[0, 0]]), "stack of tensors on"),
    "into a host's scalar": (lambda x, host: host[0, 0].add_(x[0, 0]), "add_ of tensors on two"),
    "numpy": (lambda x, host: x.numpy(), "numpy() of a tensor on the device"),
    "two groups": (two_groups, "ranks wait for each other; rank 0: allreduce_"),
    "other groups": (groups_in_another_order,
                     "ranks disagree; rank 0: a new group, number 1, of ranks [0]; rank 1: a new"),
    "rank 1 alone": (one_rank_alone, "rank 0: leaves in peace; rank 1: allreduce_"),
    "one group each": (one_group_each, "ranks wait for each other; rank 0: allreduce_"),
    "order": (lambda x, host: exchange(x, (4, 2), (2, 4)), "number 1, of [(4, 4, 'torch.float32')"),
    "fewer": (lambda x, host: exchange(x, (4,), (4, 2)), "ranks wait for each other; rank 0: mess"),
    "more rows": (lambda x, host: exchange_rows(x, [1, 2], [1, 2]),
                  "ranks disagree on [sent, received] rows; rank 0: [["),
    "wide rows": (lambda x, host: exchange_rows(x.view(4 << dist.get_rank(), -1), [1, 1], [1, 1]),
                  "ranks disagree; rank 0: alltoall_base_"),
    "too late": (lambda x, host: meanwhile(x, True), "ranks wait for each other; rank 0: message"),
    "a tag": (lambda x, host: exchange(x, (4,), (4,), tag=1), "send with a tag"),
    "it left": (lambda x, host: receive(x, host, None), "; rank 1: leaves in peace"),
    "it broke": (lambda x, host: receive(x, host, torch.add), "add of tensors on two devices"),
    "all send": (each_sends_first, "ranks wait for each other; rank 0: message from rank 0"),
}  # fmt: skip
NO_FAULTS = {
    "waited for": lambda x, host: [all_reduce(x).wait(), x.add_(1)],
    "another part": lambda x, host: [x[:2].add_(1), all_reduce(x[2:]).wait(), x[:2].add_(1)],
    "read while it is sent": lambda x, host: [
        work := dist.all_gather([torch.empty_like(x) for _ in range(2)], x, async_op=True),
        x + 1, work.wait()],
    "only its shape": lambda x, host: [work := all_reduce(x), torch.zeros_like(x), work.wait()],
    "came": lambda x, host: [
        host.copy_(x, non_blocking=True), torch.cuda.current_stream().synchronize(), host + 1],
    "grown again": lambda x, host: [x.untyped_storage().resize_(n) for n in (0, 64)],
    "in order": lambda x, host: [exchange(x, (4, 2), (4, 2)), exchange(x, (3, 3), (3, 3))],
    "meanwhile": lambda x, host: meanwhile(x, False),
    "rows": lambda x, host: exchange_rows(
        x, *(([3, 1], [0, 1]) if dist.get_rank() else ([1, 0], [1, 3]))),
    "alone": lambda x, host: dist.all_reduce(
        x[dist.get_rank():], group=dist.new_subgroups_by_enumeration([[0], [1]])[0]),
    "pickled": lambda x, host: dist.all_gather_object([None, None], {"rank": dist.get_rank()}),
}  # fmt: skip


def said_of():
    """For a rank of the pool: what is said of each case, in a pretence of its own."""
    said, faults = {}, {name: fault for name, (fault, _) in FAULTS.items()}
    for name, function in (faults | NO_FAULTS).items():
        said[name] = ""
        try:
            with pretended_cuda():
                function(torch.ones(4, 4, device="cuda"), torch.ones(4, 4).pin_memory())
        except RuleBroken as broken:
            said[name] = str(broken)
    return said


def test_each_rule(ranks):
    for said in ranks(2, 240)(said_of):
        for name, (_, rule) in FAULTS.items():
            assert rule in said[name], name
        assert not any(said[name] for name in NO_FAULTS), said


def in_pairs(is_broken):
    """Ranks 0 and 3 issue other collectives than 1 and 2. Rank 2 may break a rule while 1 waits for
    it, and 0 and 3 wait for both. Returns what is said of it."""
    try:
        with pretended_cuda():
            x, rank = torch.ones(4, 4, device="cuda"), dist.get_rank()
            pair, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
            for rows in (4,) if rank in (0, 3) else (1, 2):
                dist.all_reduce(x[:rows], group=pair)
            if is_broken and rank == 2:
                x.numpy()
            dist.all_reduce(x, group=pair if is_broken and rank == 1 else None)
    except RuleBroken as broken:
        return str(broken)


def test_each_group_agrees_on_its_own(ranks):
    assert ranks(4, 240)(in_pairs, False) == 4 * [None]
    assert all("numpy() of a tensor" in said for said in ranks(4, 240)(in_pairs, True))


# ------------------------------------------------------------------------ what the host waits for

WAITS = {  # of x and of a host's tensor, pinned or not
    "item": lambda x, pinned, host: x.sum().item(),
    "tolist": lambda x, pinned, host: x.tolist(),
    "print": lambda x, pinned, host: f"{x[0]:.3f}",
    "mask": lambda x, pinned, host: x[x > 0],
    "nonzero": lambda x, pinned, host: (x > 0).nonzero(),
    "repeat": lambda x, pinned, host: x.repeat_interleave(x.long()),
    "one_hot": lambda x, pinned, host: F.one_hot(x.long()),
    "cpu": lambda x, pinned, host: x.cpu(),
    "cuda": lambda x, pinned, host: host.cuda(),
    "copy": lambda x, pinned, host: x.copy_(host),
    "not pinned": lambda x, pinned, host: x.copy_(host, non_blocking=True),
    "foreach": lambda x, pinned, host: torch._foreach_copy_([x, x], [host, x]),
    "a number": lambda x, pinned, host: torch.tensor(1.0, device="cuda"),
    "synchronize": lambda x, pinned, host: torch.cuda.synchronize(),
}
NO_WAITS = {
    "repeat": lambda x, pinned, host: x.repeat_interleave(x.long(), output_size=4),
    "one_hot": lambda x, pinned, host: F.one_hot(x.long(), 2),
    "pinned": lambda x, pinned, host: x.copy_(pinned, non_blocking=True),
    "to": lambda x, pinned, host: pinned.to("cuda", non_blocking=True),
    "full": lambda x, pinned, host: torch.full((2,), 1.0, device="cuda"),
    "the host's own": lambda x, pinned, host: host.sum().item(),
}


def test_what_the_host_waits_for():
    for cases, waits in (WAITS, 1), (NO_WAITS, 0):
        for name, function in cases.items():
            with pretended_cuda() as gpu:
                x, host = torch.ones(4, device="cuda"), torch.ones(4)
                pinned, gpu.step = host.pin_memory(), []
                function(x, pinned, host)
                torch.cuda.Event().synchronize()
            assert len(gpu.step) == waits + 1, (name, gpu.step)
            assert all(", test_pretended_rules:" in wait for wait in gpu.step)


def test_all_is_put_back():
    places = [(common, "join_ranks"), (Work, "wait"), (Run, "measure"), (torch.cuda, "Event"),
              (torch.UntypedStorage, "resize_"), (dist, "batch_isend_irecv")]  # fmt: skip
    patched = lambda: [getattr(*place) for place in places]
    before = patched()
    with contextlib.suppress(ZeroDivisionError), pretended_cuda():
        assert not any(now is then for now, then in zip(patched(), before))
        raise ZeroDivisionError
    assert patched() == before and torch.ones(2).device.type == "cpu"
