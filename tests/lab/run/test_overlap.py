"""lab/run/overlap.py: what hides behind what, of timelines made by hand."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from lab.run import overlap


def timeline(*spans, waits=(), seconds=10):
    """Of spans (start, end), or (op, start, end), or (op, start, end, axis)."""
    whole = [span if isinstance(span[0], str) else ("all_reduce", *span) for span in spans]
    named = [[op, 4, start, end, *(axis or ["world"])] for op, start, end, *axis in whole]
    return {"seconds": seconds, "collectives": named, "waits": [list(wait) for wait in waits]}


def test_moments_are_joined_cut_and_left_out():
    assert overlap.union([(5, 6), (1, 3), (0, 2), (3, 4), (8, 8), (9, 7)]) == [[0, 4], [5, 6]]
    assert overlap.union([]) == []
    some, others = [[0, 4], [5, 6], [8, 9]], [[1, 2], [3, 5.5], [7, 9]]
    assert overlap.both(some, others) == [[1, 2], [3, 4], [5, 5.5], [8, 9]]
    assert overlap.without(some, others) == [[0, 1], [2, 3], [5.5, 6]]
    assert overlap.without(some, []) == some and overlap.without(some, some) == []


def test_hidden_is_what_is_under_way_while_nobody_waits():
    """Under way from 0 to 3, and from 5 to 6."""
    for waits, share in (
        ([], 1), ([(0, 9)], 0), ([(2, 4)], 3 / 4), ([(2, 4), (2, 4)], 3 / 4),  # noted twice
        ([(2, 3), (1, 2.5)], 2 / 4), ([(-2, 0.5), (3.5, 5.5)], 3 / 4), ([(3.25, 4.75)], 1),
    ):  # fmt: skip
        for spans in ([(0, 2), (1, 3), (5, 6)], [(5, 6), (1, 3), (0, 2)], [(0, 3), (1, 2), (5, 6)]):
            assert overlap.hidden_share(timeline(*spans, waits=waits)) == pytest.approx(share)


def test_an_operator_has_its_own_share_also_on_an_axis():
    """A message is under way while it is sent or received."""
    spans = ("all_gather", 0, 2, "dp"), ("all_gather", 1, 4, "tp"), ("send", 4, 5), (
        "receive", 4, 8, "world")
    shares = {"all_gather": 3 / 4, "dp: all_gather": 1 / 2, "tp: all_gather": 2 / 3,
              "send": 1 / 4, "world: send": 1 / 4, None: 4 / 8, "all_reduce": 0}
    for op, share in shares.items():
        hidden = overlap.hidden_share(timeline(*spans, waits=[(1, 2), (5, 9)]), op)
        assert hidden == pytest.approx(share), op


def instrument(by_axis, conditions):
    """Of 10 s, of which 6 are waited for; an all_gather is under way for 5 s, of them 4 hidden."""
    spans = ("all_gather", 0, 5, "dp"), ("all_reduce", 5, 10, "tp")
    recorded, notes = {"timeline": timeline(*spans, waits=[(4, 10)])}, []
    counts = {"all_gather": {"wire_bytes": 3e6}, "all_reduce": {"wire_bytes": 0}}
    groups = [dist.new_group([0], group_desc=f"mesh_{axis}") for axis in ("dp", "tp")]
    by_group = {group.group_name: {op: of} for group, (op, of) in zip(groups, counts.items())}
    run = SimpleNamespace(
        recorded=recorded, note=notes.append, flops=SimpleNamespace(all=8e9),
        comm=SimpleNamespace(by_group=by_group), record=lambda **data: recorded.update(data))
    overlap.hold_overlap(run, conditions, by_axis)
    return recorded["overlap"], notes


def test_conditions_are_called_with_this_runs_rates(ranks):
    [(found, notes)] = ranks(1)(instrument, False, {"all_gather": flops_and_bytes, "send": None})
    gather, reduce = found["all_gather"], found["all_reduce"]
    assert gather == {"hidden": 0.8, "under way": 5, "flops": 2e9, "bandwidth": 6e5,
                      "ratio": flops_and_bytes(2e9, 6e5)}
    assert reduce == gather | {"hidden": 0, "bandwidth": 0, "ratio": None}
    rows = [note.split() for note in notes]
    assert ["all_gather", "5000.0", "ms", "80%", "600.00", "kB/s", "8.00"] in rows
    assert ["all_reduce", "5000.0", "ms", "0%", "0", "B/s"] in rows

    several = {("dp: all_gather", "o"): half, ("dp: all_gather", "the MLP"): flops_and_bytes}
    [(found, notes)] = ranks(1)(instrument, True, several)
    assert found.keys() == {"dp: all_gather", "tp: all_reduce"}
    assert found["dp: all_gather"]["ratio"] == 8
    assert "   0.50 of o, 8.00 of the MLP" in notes[2]


def flops_and_bytes(flops, bandwidth):
    return flops / 1e9 + bandwidth / 1e5


def half(flops, bandwidth):
    return 0.5


@pytest.mark.full
@pytest.mark.parametrize(("chapter", "which", "op", "left"), [
    ("05_sequence_parallel", 1, "all_gather", 4 * 4 / (2 * 32)),  # e·t/(2n), with n = h, of o
    ("05_sequence_parallel", 2, "reduce_scatter", 4 * 4 / (2 * 32)),
    # 3 hops of 2 · 4 · kv numbers of 3 e bytes, over 7 matmuls of 1 or 9/4 blocks of 4 · 4 pairs
    ("06_context_parallel", 0, "send", 2 / 4 * 3 * 2 * 4 * 12 / (7 * 2 * 16)),
    ("06_context_parallel", 1, "send", 2 / 4 * 3 * 2 * 4 * 12 / (7 * 2 * 36))])
def test_chapters_state_their_lessons_conditions(recorded, chapter, which, op, left):
    """left: the lesson's left side without FLOP/s over bytes/s, of dim 32, 2 of 4 heads, 16 tokens
    on 4 ranks in fp32."""
    found = recorded(chapter)[which]["recorded"]["overlap"]
    of = found[op]
    assert of["ratio"] == pytest.approx(left * of["flops"] / of["bandwidth"])
    assert found["all_reduce"]["ratio"] is None  # gradients and the norm have no condition
