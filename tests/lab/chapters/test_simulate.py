"""Chapter 00's collectives in one process: what is said of them, and that it is what a run does.

The wrong answers of chapter 00 (tests/faults) show what is said of each rank's letters, of
deadlocks, of ranks that are not there, and of the calls that a round is built from.
"""

import pytest
import torch

from lab import chapters
from tests.conftest import chapter, edited, loaded

collectives, simulate = chapters.held("00"), chapters.room("00", "simulate")
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


def test_sums_parts_that_differ_and_what_nobody_wrote_are_said():
    letters = simulate.Letters(3)
    a, b = letters.tensor(0, 7), letters.tensor(1, 7)
    a += 2 * b
    a[1:3] = letters.tensor(2, 7)[1:3]
    assert letters.row(a, a) == "a0+2·b0 | c0 a1+2·b1 a2+2·b2"
    with simulate.unwritten_is_seen():
        x = torch.empty_like(a)
        assert letters.row(x, x) == " ".join(3 * ["unwritten"])
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_first_rank_that_has_something_else_is_named(chapter_00):
    for name, by_hand in chapter_00.BY_HAND.items():
        if name != "barrier":
            assert simulate.what_is_wrong(by_hand, collectives.as_one) == "", name
    module = broken("receive=parts[net.rank], source=0", "receive=parts[0], source=0")
    assert ("rank 1 has '0 b1 0', and should have '0 a1 0'"
            in simulate.what_is_wrong(module.scatter, collectives.as_one))


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


def test_a_round_may_be_built_from_other_calls():
    """Afterwards, dist is what it was."""
    module = broken(ROUND, ONE_BY_ONE)
    found = simulate.posts(module.Network, send=torch.ones(2), to=1, receive=torch.ones(2),
                           source=2)
    assert found["begun before the first wait"] == 2 and module.dist is torch.distributed
