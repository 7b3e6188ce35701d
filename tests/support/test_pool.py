"""The pool of ranks itself: it reports a rank that fails, dies or hangs, and goes on."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.conftest import chapter, sample


def total(trouble=None):
    """What goes wrong does so on rank 1, while rank 0 is in its second collective."""
    x = torch.ones(())
    dist.all_reduce(x)
    if trouble:
        if dist.get_rank() == 1:
            return trouble()
        dist.all_reduce(x)
    return dist.get_rank(), x.item()


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def hang():
    time.sleep(1000)


def hears_of(peer):
    """Rank 1 waits for a message that never comes. Returns what gloo says of that."""
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError) as error:
            dist.irecv(torch.empty(1), peer).wait(timedelta(seconds=1))
        return str(error.value)


def test_a_rank_stays_until_all_are_done(ranks):
    """Or others that still connect in a `new_group` would see a closed connection."""
    _, heard = ranks(2)(hears_of, 0)
    assert "timed out" in heard.lower() and "closed" not in heard, heard


def test_of_a_chapter_that_is_not_there_a_test_is_skipped(ranks):
    with pytest.raises(pytest.skip.Exception):
        ranks(2)(chapter, "99_no_such_chapter")


@pytest.mark.parametrize(("trouble", "report", "timeout"), sample([
    (crash, "rank 1 died, exit code -11.*Segmentation fault.*in crash", 60),
    (hang, "rank 0 hangs.*all_reduce.*rank 1 hangs.*in hang", 20)]))
def test_trouble_is_reported_by_rank_and_the_next_test_passes(ranks, trouble, report, timeout):
    with pytest.raises(pytest.fail.Exception, match=f"(?s){report}"):
        ranks(2, timeout=timeout)(total, trouble)
    assert ranks(2)(total) == [(0, 2), (1, 2)]
