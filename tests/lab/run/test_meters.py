"""lab/run/meters.py: what is sent, kept, held and computed, and when."""

import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import Work
from torch.distributed.device_mesh import init_device_mesh

import common
from lab.run import meters
from lab.run.meters import (
    CommMeter,
    nbytes,
)
from lab.run.overlap import hidden_share
from tests.conftest import sample


def test_nbytes_counts_a_storage_once():
    x, doubles = torch.zeros(10), [torch.zeros(2, dtype=torch.float64)]
    assert nbytes([x, x[:3], x.view(2, 5), None, doubles]) == 56
    assert nbytes([x[:3]]) == 40  # a view keeps all of its storage alive


# ----------------------------------------------------------------------------------- communication


def every_collective():
    n, group = dist.get_world_size(), dist.group.WORLD
    x, full = torch.ones(6), torch.ones(6 * n)
    meter = CommMeter()
    with meter:
        dist.all_reduce(x.clone())
        dist.all_reduce(x.clone(), async_op=True).wait()
        functional.all_reduce(x, "sum", group) + 0
        common.all_gather(full.clone(), x)
        dist.all_gather([torch.empty(6) for _ in range(n)], x)
        common.reduce_scatter(x.clone(), full)
        dist.broadcast(x.clone(), 0)
        dist.reduce(x.clone(), 0)
        pieces = [torch.empty(6) for _ in range(n)] if dist.get_rank() == 0 else None
        dist.gather(x, pieces, 0)
        dist.scatter(x.clone(), pieces, 0)
        dist.all_to_all_single(full.clone(), full)
        functional.all_to_all_single(full, None, None, group) + 0
        dist.barrier()
        peer = dist.get_rank() ^ 1
        if peer < n:
            ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(6), peer)]
            [work.wait() for work in dist.batch_isend_irecv(ops)]
    before = {op: dict(seen) for op, seen in meter.total.items()}
    dist.all_reduce(x)  # outside: not counted
    return before == meter.total, meter.total, meter.timeline()


@pytest.mark.parametrize("n", sample([3, 1]))
def test_comm_meter_counts_calls_payload_and_wire_bytes(ranks, n):
    def row(calls, payload, wire):
        return {"calls": calls, "bytes": payload, "wire_bytes": wire}

    for rank, (unchanged, total, timeline) in enumerate(ranks(n)(every_collective)):
        sends = {"send": row(1, 24, 24)} if rank ^ 1 < n else {}
        at_root = row(1, 24 * n, 24 * n) if rank == 0 else row(1, 24, 24)  # others see their piece
        assert unchanged and total == sends | {
            "all_reduce": row(3, 3 * 24, 3 * 24 * 2 * (n - 1) / n),
            "all_gather": row(2, 2 * 24 * n, 2 * 24 * (n - 1)),
            "reduce_scatter": row(1, 24 * n, 24 * (n - 1)),
            "broadcast": row(1, 24, 24),
            "reduce": row(1, 24, 24),
            "gather": at_root,
            "scatter": at_root,
            "all_to_all": row(2, 2 * 24 * n, 2 * 24 * (n - 1)),
        }
        spans = timeline["collectives"]
        assert all(0 < start < end and group == "world" for _, _, start, end, group in spans)
        ops = [op for op, *_ in spans]  # a receive has a span, and is not counted as sent
        calls = {op: of["calls"] for op, of in total.items()}
        assert Counter(ops) == calls | ({"receive": 1} if sends else {})
        assert timeline["backward"] == timeline["gradients"] == []
        waits = timeline["waits"]  # a call and a wait of each, and the wait of a barrier
        assert len(waits) == 2 * len(ops) + 1 and waits == sorted(waits)
        assert all(0 < start < end < timeline["seconds"] for start, end in waits)


def comm_of_dtensors():
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(torch.ones(8, 8), init_device_mesh("cpu", (2,)), [Shard(0)])
    meter = CommMeter()
    with meter:
        sharded.full_tensor()
        sharded.softmax(0)  # over the cut dimension: it gathers inside of the operator
        sharded.sum().full_tensor()  # a partial sum: an all_reduce
    return meter.total


def test_comm_meter_sees_dtensors(ranks):
    expected = {"all_gather": {"calls": 2, "bytes": 512, "wire_bytes": 256},
                "all_reduce": {"calls": 1, "bytes": 4, "wire_bytes": 4}}
    assert ranks(2)(comm_of_dtensors) == [expected] * 2


# ------------------------------------------------------------------------------------ when it ran


def late():
    """Rank 0 starts a collective, works, and waits for rank 1. Returns the timeline, and for each
    operator when rank 0 began to work, when to wait, and when it went on."""
    x, full, me = torch.ones(2), torch.ones(4), dist.get_rank()
    group, meter, moments = dist.group.WORLD, CommMeter(), {}
    now = meter.clock.now

    def messages():
        receiving = dist.irecv(torch.empty(2), 1 - me)
        moments["between"] = [now(), time.sleep((1 - me) * 0.02), now()]
        return [receiving, dist.isend(x, 1 - me)]

    starts = {"all_reduce": lambda: [dist.all_reduce(x, async_op=True)],  # gloo tells its end
              "reduce_scatter": lambda: [common.reduce_scatter(x, full, async_op=True)],
              "send": messages,
              "all_to_all": lambda: [functional.all_to_all_single(full, None, None, group)]}
    with meter:
        for op, start in starts.items():
            dist.barrier()
            time.sleep(me * 0.1)
            handles = start()
            torch.ones(1)  # an operator: what comes now is no longer the call
            moments[op] = [now()]
            time.sleep((1 - me) * 0.05)
            moments[op] += [now()]
            for handle in handles:
                handle + 0 if torch.is_tensor(handle) else handle.wait()
            moments[op] += [now()]
        dist.barrier()
        handle = common.all_gather(full.clone(), x, async_op=True)
        time.sleep((1 - me) * 0.05)  # without an operator nothing is computed
        handle.wait()
    since = meter.clock.since_start()
    moments = {op: [since(moment) for moment in of if moment] for op, of in moments.items()}
    return meter.timeline(), moments


def test_a_rank_waits_from_its_wait_on_and_not_while_it_works(ranks):
    """Whether gloo tells the collective's end or not, and functional or not."""
    (timeline, moments), _ = ranks(2)(late)
    waits, (before, after) = timeline["waits"], moments.pop("between")
    assert any(start <= before and after <= end for start, end in waits)  # no operator in between
    assert len(moments) == 4
    for op, (begin, wait, end) in moments.items():
        assert not any(start < wait and stop > begin for start, stop in waits), op
        assert any(wait <= start < stop <= end for start, stop in waits), op
        ends = [stop for what, _, _, stop, _ in timeline["collectives"] if what == op]
        assert len(ends) == 1 and ends[0] <= end, op
    assert hidden_share(timeline, "all_gather") == 0


class PretendedStream:
    """CUDA's stream, as far as the clock uses it: work on it is done at its own `time`."""

    def __init__(self):
        self.time = 0

    def __enter__(self):
        self.outer, PretendedStream.current = PretendedStream.current, self

    def __exit__(self, *error):
        PretendedStream.current = self.outer


class PretendedEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.time = PretendedStream.current.time

    def elapsed_time(self, later):
        return later.time - self.time  # milliseconds


def pretended_streams(monkeypatch):
    """The current one."""
    main = PretendedStream()
    monkeypatch.setattr(PretendedStream, "current", main, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", PretendedEvent)
    monkeypatch.setattr(torch.cuda, "Stream", PretendedStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    return main


def test_nccls_synchronous_collective_is_its_own_wait_and_a_batch_has_one_end(monkeypatch):
    """NCCL gives a Work for neither; that of a batch comes when it is closed. Moments are events,
    and an end is one on a stream that waits: the main stream goes on meanwhile."""
    main, work, synchronized = pretended_streams(monkeypatch), object(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: synchronized.append(True))

    def wait(work):  # until 30 ms
        stream = PretendedStream.current
        stream.time = max(stream.time, 30)

    monkeypatch.setattr(meters, "group_of", lambda args: None)
    monkeypatch.setattr(meters, "name_of", lambda group: "cp")
    monkeypatch.setattr(Work, "wait", wait)
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda *args: None)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda *args: work)
    meter = CommMeter(cuda=True)
    with meter:
        start, main.time = meter.clock.now(), 10
        meter.note_span("all_reduce", 8, "c10d", (), (), start)
        dist.ProcessGroup._start_coalescing(None)
        for op in ("send", "receive"):
            meter.note_span(op, 4, "c10d", (), (), meter.clock.now())
        assert dist.ProcessGroup._end_coalescing(None) is work
        torch.ones(1)
        main.time = 20  # what is computed meanwhile
        Work.wait(work)
        main.time += 2
    timeline = meter.timeline()
    assert timeline["seconds"] == 0.032 and synchronized
    assert timeline["collectives"] == [["all_reduce", 8, 0, 0.01, "cp"],
                                       ["send", 4, 0.01, 0.03, "cp"],
                                       ["receive", 4, 0.01, 0.03, "cp"]]
    assert timeline["waits"] == [[0, 0.01]] * 2 + [[0.01, 0.01]] * 2 + [[0.02, 0.03]]
    assert hidden_share(timeline) == pytest.approx(1 / 3)
    assert hidden_share(timeline, "cp: send") == pytest.approx(1 / 2)


# ------------------------------------------------------------------------------------------- FLOPs


def test_flops_of_matmuls_and_of_the_cpus_fused_attention():
    """Forward has two matmuls of scores, backward four, and one more to compute them again."""
    q, k, v = torch.randn(3, 4, 9, 8, requires_grad=True), *torch.randn(2, 3, 2, 9, 8)
    a, b = torch.randn(5, 6, requires_grad=True), torch.randn(6, 7)
    scores = 2 * 3 * 4 * 9 * 9 * 8
    attend = lambda: common.CORES["sdpa"](q, k, v).sum().backward()
    with meters.FlopMeter() as meter:
        attend()
    assert (meter.attention, meter.matrices) == (7 * scores, 0)
    with meter:
        (a @ b).sum().backward()
    assert meter.matrices == 2 * 2 * 5 * 6 * 7 and meter.all == meter.matrices + 7 * scores


@pytest.mark.parametrize(("kernel", "kv_heads", "more"), [
    ("flash", 2, (0.0, True)), ("efficient", 4, (None, True)), ("cudnn", 4, (None, True))])
def test_flops_of_cudas_fused_attention(kernel, kv_heads, more):
    """Their shapes alone, on the meta device, through the operators that SDPA calls on CUDA."""
    operator = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention")
    q, k, v = (torch.empty(3, heads, 16, 8, device="meta", requires_grad=True)
               for heads in (4, kv_heads, kv_heads))
    with meters.FlopMeter() as meter:
        operator(q, k, v, *more)[0].sum().backward()
    assert meter.attention == 7 * 2 * 3 * 4 * 16 * 16 * 8
