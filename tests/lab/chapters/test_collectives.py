"""The run of chapter 00: who waits for whom, what travels together, and what backward is."""

import pytest
import torch
import torch.distributed as dist

from lab import chapters
from tests.conftest import chapter

collectives = chapters.held("00")
as_one, heard_of, in_rounds = collectives.as_one, collectives.heard_of, collectives.in_rounds
own_parts = collectives.own_parts

ZERO = "00_collectives"


def ring(n, hops, size=4):
    """The rounds of each rank: (to, bytes, source)."""
    return [[((rank + 1) % n, size, (rank - 1) % n)] * hops for rank in range(n)]


# ------------------------------------------------------------------------------- in rounds


def test_in_a_ring_all_travel_at_once():
    messages = [(0, 1, 4), (1, 2, 4), (2, 0, 4)]
    assert in_rounds(ring(3, 2)) == [messages, messages]
    assert in_rounds([[], [], []]) == [] and in_rounds([[]]) == []


def test_in_a_tree_who_has_nothing_to_do_waits_for_nobody():
    assert in_rounds([
        [(1, 8, None), (2, 8, None)],
        [(None, 0, 0), (3, 8, None)],
        [(None, 0, 0)],
        [(None, 0, 1)],
    ]) == [[(0, 1, 8)], [(0, 2, 8), (1, 3, 8)]]  # fmt: skip


def test_a_rank_is_in_one_round_at_a_time():
    """Rank 0 sends to rank 1 while it waits for rank 2, which comes a round later: it must not
    begin to receive from rank 3 before."""
    assert in_rounds([
        [(1, 1, 2), (None, 0, 3)],
        [(None, 0, 0)],
        [(3, 2, None), (0, 3, None)],
        [(None, 0, 2), (0, 4, None)],
    ]) == [[(0, 1, 1), (2, 3, 2)], [(2, 0, 3)], [(3, 0, 4)]]  # fmt: skip


def test_the_first_that_is_sent_is_the_first_that_is_received():
    assert in_rounds([[(1, 1, None), (1, 2, None)], [(None, 0, 0)] * 2]) == [
        [(0, 1, 1)], [(0, 1, 2)]]  # fmt: skip


WAITS = "rank 0 waits for rank 1 to "


@pytest.mark.parametrize(("everyones", "said"), [
    ([[(1, 4, None), (None, 0, 1)], [(0, 4, None), (None, 0, 0)]],  # both send first
     f"{WAITS}receive, rank 1 waits for rank 0 to receive"),
    ([[(None, 0, 1)], []], f"{WAITS}send"),  # nobody is there
    ([[(1, 4, None)], [(None, 0, 2), (None, 0, 0)], [(None, 0, 1), (1, 4, None)]],  # in a chain
     f"{WAITS}receive, rank 1 waits for rank 2 to send, rank 2 waits for rank 1 to send"),
])  # fmt: skip
def test_who_waits_for_ever_is_named(everyones, said):
    with pytest.raises(ValueError, match=f"{said}$"):
        in_rounds(everyones)


def test_who_has_heard_of_whom():
    assert heard_of(3, in_rounds(ring(3, 1))) == [{0, 2}, {0, 1}, {1, 2}]
    assert heard_of(3, in_rounds(ring(3, 2))) == [{0, 1, 2}] * 3
    assert heard_of(3, [[(0, 1, 1), (1, 2, 1)]])[2] == {1, 2}  # at the same time: not of rank 0


# ------------------------------------------------------------------------------- as one


def test_as_one_is_the_table_of_the_lesson():
    """Parts of one number: a0 is 1, a1 is 2, a2 is 4, b0 is 8, ..."""
    X = 2.0 ** torch.arange(9, dtype=torch.float64).view(3, 3)
    own, first = own_parts(3, 1), torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    a, b, c = X.tolist()
    total, nothing, owns = [73, 146, 292], [0, 0, 0], [1, 16, 256]
    assert {name: as_one(name, X, own, first).tolist() for name in chapter(ZERO).BY_HAND} == {
        "broadcast": [a, a, a],
        "reduce": [total, nothing, nothing],
        "scatter": [[1, 0, 0], [0, 2, 0], [0, 0, 4]],
        "gather": [owns, nothing, nothing],
        "all_gather": [owns, owns, owns],
        "reduce_scatter": [[73, 0, 0], [0, 146, 0], [0, 0, 292]],
        "all_to_all": [[1, 8, 64], [2, 16, 128], [4, 32, 256]],
        "barrier": [a, b, c],
        **{name: [total] * 3 for name in chapter(ZERO).BY_HAND if name.startswith("all_reduce")},
    }
    assert own_parts(2, 3).tolist() == [[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]]


def gradients():
    """For a rank of the pool: (collective, whether this one gives its gradient)."""
    zero = chapter(ZERO)
    net, device = zero.Network(dist.group.WORLD), torch.device("cpu")
    dual = lambda *pair: collectives.dual_is_right(
        *(zero.BY_HAND[name] for name in pair), net, device, numbers=2)  # fmt: skip
    wrong = ("all_gather", "broadcast"), ("reduce_scatter", "reduce"), ("all_to_all", "gather")
    return [dual(*(one.__name__ for one in pair)) for pair in zero.DUALS], [dual(*w) for w in wrong]


def test_the_gradient_of_each_collective_is_another_one(ranks):
    """And what isn't is found out, on one rank at least."""
    right, wrong = zip(*ranks(3)(gradients))
    assert all(map(all, right)) and not any(map(all, zip(*wrong)))
