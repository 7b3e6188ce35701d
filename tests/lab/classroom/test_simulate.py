"""Chapter 00's collectives in one process: what is said of them, and that it is what a run does.

The wrong answers of chapter 00 (tests/faults) show what is said of each rank's letters, of
deadlocks, of ranks that are not there, and of the calls that a round is built from.
"""

import pytest
import torch

from lab.bench import collectives
from lab.classroom import simulate
from tests.conftest import chapter, edited, loaded

NAME = "00_collectives"


@pytest.fixture
def chapter_00():
    return chapter(NAME)


def broken(right, wrong):
    return loaded(NAME, edited(NAME, right, wrong))


def test_rounds_and_bytes_are_those_of_the_chapters_formulas(chapter_00):
    """The ranks' rounds are put in order, as those of a run."""
    for n in (1, 2, 3, 5, 6):
        for name, by_hand in chapter_00.BY_HAND.items():
            *_, nets, passed = simulate.play(by_hand, [torch.zeros(2 * n)] * n)
            costs = simulate.costs("", nets, passed).values()
            assert tuple(costs) == (len(chapter_00.round_bytes(name, n, 8 * n)),
                                    chapter_00.sent(name, n, 8 * n)), name
            assert passed == len(collectives.in_rounds([net.rounds for net in nets]))


def test_what_is_sent_is_what_it_was_when_it_was_sent(chapter_00):
    """A student who catches every exception does not see how a rank is left."""
    def changes(net, x):
        try:
            chapter_00.broadcast(net, x)
        except Exception:
            return
        if net.rank == 0:
            x.zero_()

    found = simulate.has(changes, (2, 2))
    assert found["x of rank 0 of 2"] == "0 0" and found["x of rank 1 of 2"] == "a0 a1"


def test_sums_parts_that_differ_and_what_nobody_wrote_are_said():
    letters = simulate.Letters(3)
    a, b = letters.tensor(0, 7), letters.tensor(1, 7)
    assert letters.row(a, a) == "a0 a1 a2" and letters.row(a, a[3:5]) == ". a1 ."
    a += 2 * b
    a[1:3] = letters.tensor(2, 7)[1:3]
    assert letters.row(a, a) == "a0+2·b0 | c0 a1+2·b1 a2+2·b2"
    with simulate.unwritten_is_seen():
        assert letters.row(b + torch.empty_like(a), b[:0]) == ". . ."
        x = torch.empty_like(a)
        assert letters.row(x, x) == " ".join(3 * ["unwritten"])
    assert not torch.are_deterministic_algorithms_enabled()
    assert letters.of_number(0) == "0" and letters.of_number(-1) == "unwritten"


def test_the_first_rank_that_has_something_else_is_named(chapter_00):
    for name, by_hand in chapter_00.BY_HAND.items():
        if name != "barrier":
            assert simulate.what_is_wrong(by_hand, collectives.as_one) == "", name
    for other, says in (("receive=parts[0], source=0", "rank 1 has '0 b1 0', and should have "
                         "'0 a1 0'"),
                        ("receive=x, source=0", "rank 0 sends 8 bytes, and rank 1 receives 24")):
        module = broken("receive=parts[net.rank], source=0", other)
        assert says in simulate.what_is_wrong(module.scatter, collectives.as_one)


ROUND = """\
        handles = dist.batch_isend_irecv(operations)    # gloo: one for each; NCCL: one for both
        for handle in handles:
            self.waits_for = words.pop(0) if len(handles) > 1 else " and ".join(words)
            handle.wait(timedelta(seconds=self.patience))
"""
ONE_BY_ONE = """        for handle in (dist.irecv(receive, group=self.group, group_src=source),
                       dist.isend(send, group=self.group, group_dst=to)):
            handle.wait()
"""


def test_a_round_is_noted_whichever_calls_it_is_built_from():
    """Afterwards, dist is what it was."""
    found = []
    for body in ROUND, ONE_BY_ONE:
        module = broken(ROUND, body)
        found.append(simulate.posts(module.Network, send=torch.ones(2), to=1,
                                    receive=torch.ones(2), source=2))
        assert module.dist is torch.distributed
    assert found[0] == found[1] and found[0]["begun before the first wait"] == 2
