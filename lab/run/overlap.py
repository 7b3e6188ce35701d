"""What hides behind what: how much of what is sent is under way while the rank computes.

A timeline is what CommMeter gives: [op, bytes, start, end, axis] of each collective, and [start,
end] of each time that the rank waited. What is under way while it does not wait is hidden.

The instrument of `overlap` in a chapter's formulas calls the lesson's conditions with this run's
own rates: FLOPs of the metered step over the seconds in which the rank did not wait, and what an
operator sends over the seconds in which it was under way.
"""

import functools
import itertools

import torch.distributed as dist

from lab.run.meters import name_of
from lab.run.words import quantity


def union(intervals: list) -> list:
    """The same moments in order, as intervals [start, end] that do not touch."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif start < end:
            merged.append([start, end])
    return merged


def both(some: list, others: list) -> list:
    """The moments that are in both of two unions, as such a union."""
    shared, first = [], 0                               # first: the first of others not yet over
    for start, end in some:
        while first < len(others) and others[first][1] <= start:
            first += 1
        at = first
        while at < len(others) and others[at][0] < end:
            shared.append([max(start, others[at][0]), min(end, others[at][1])])
            at += 1
    return shared


def without(some: list, others: list) -> list:
    """The moments of one union that are not in another, as such a union."""
    ends = [-float("inf"), *itertools.chain(*others), float("inf")]
    return both(some, [list(pair) for pair in zip(ends[::2], ends[1::2])])


def seconds_of(intervals: list) -> float:
    """How long they take together, if they do not overlap."""
    return sum(end - start for start, end in intervals)


def under_way(timeline: dict, op: str | None = None) -> list:
    """When some collective was under way, as a union: any, or those of "all_gather", or of
    "dp: all_gather" on one axis. A receive belongs to the sends."""
    return union([start, end] for name, _, start, end, axis in timeline["collectives"]
                 if op in (None, *names_of(name, axis)))


def names_of(op, axis):
    """Without the axis, and with it."""
    op = "send" if op == "receive" else op
    return op, f"{axis}: {op}"


def hidden_share(timeline: dict, op: str | None = None) -> float:
    """Of the time in which some collective (of this op) was under way, the share in which the rank
    did not wait."""
    spans = under_way(timeline, op)
    hidden = without(spans, union(timeline["waits"]))
    return seconds_of(hidden) / seconds_of(spans) if spans else 0.0


# ----------------------------------------------------------------------------------- the instrument

def hold_overlap(run, conditions: dict, by_axis: bool):
    """Record how much of each operator hides, and where the chapter states a condition what that
    comes to in this run; then also say so. conditions: see lab/run/formulas.py."""
    timeline, recorded, rows = run.recorded["timeline"], {}, []
    computing = timeline["seconds"] - seconds_of(union(timeline["waits"]))
    flops = run.flops.all / computing if run.flops else 0
    for op in dict.fromkeys(names_of(op, axis)[by_axis]
                            for op, *_, axis in timeline["collectives"]):
        seconds, share = seconds_of(under_way(timeline, op)), hidden_share(timeline, op)
        bandwidth = wire_bytes_of(run, op) / seconds if seconds else 0
        ratios = {of: function(flops, bandwidth) for of, function in conditions_of(op, conditions)
                  if flops and bandwidth}
        recorded[op] = {"hidden": share, "under way": seconds, "flops": flops,
                        "bandwidth": bandwidth, "ratio": max(ratios.values(), default=None)}
        beside = [f"{ratio:.2f}{of and ' of '}{of}" for of, ratio in ratios.items()]
        rows.append(f"  {op:<34}{1e3 * seconds:>7.1f} ms{share:>9.0%}"
                    f"{quantity(round(bandwidth), 'B/s'):>14}   {', '.join(beside)}")
    run.record(overlap=recorded)
    if conditions:
        run.note("what is under way while the rank computes, at "
                 f"{quantity(round(flops), 'FLOP/s')} (ratio: time to send over time to compute, "
                 "at most 1 can hide)")
        run.note(f"  {'':<34}{'under way':>10}{'hidden':>9}{'sent at':>14}   ratio")
        for row in rows:
            run.note(row)


def conditions_of_axes(answer, sent, flops_of_rank, micro_batches):
    """Where a chapter has axes, these conditions: of what no matmul waits for, the time to send
    over that of what can hide it. A pipeline's messages have the whole step; gradients a backward,
    of the last micro-batch if they are reduced once; and what is gathered once a forward."""
    conditions = {}
    for axis, ops in sent.items():
        for op, (_, _, wire) in ops.items():
            if axis != "pp" and not axis.startswith("gradients"):
                continue                                # a matmul waits for it
            share, is_gather = 1.0, op == "all_gather"
            once = axis != "pp" and answer["gathers" if is_gather else "reduces"] == 1
            if axis != "pp" and not is_gather:
                share = 2 / 3
            elif once:
                share = 1 / 3
            if once:
                share /= micro_batches
            conditions[f"{axis}: {op}"] = functools.partial(over_compute, wire,
                                                            share * flops_of_rank)
    return conditions


def over_compute(sent, computed, flops, bandwidth):
    """The time to send so many bytes, over the time of so many FLOPs."""
    return sent / bandwidth / (computed / flops)


def conditions_of(op, conditions):
    """Yield (what it can hide behind, in words or "", the function) of each condition of an op."""
    for key, function in conditions.items():
        name, of = key if isinstance(key, tuple) else (key, "")
        if name == op:
            yield of, function


def wire_bytes_of(run, op):
    """What this rank sent in the metered step with an operator, or with that of one axis."""
    total = 0
    for group, ops in run.comm.by_group.items():
        axis = name_of(dist.distributed_c10d._resolve_process_group(group))
        total += sum(seen["wire_bytes"] for name, seen in ops.items() if op in names_of(name, axis))
    return total
