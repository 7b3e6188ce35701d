"""The pool of ranks itself: it reports a rank that fails, dies or hangs, and goes on."""

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.conftest import chapter, sample
from tests.support.pool import MOST_THREADS


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


def die():
    os._exit(3)


def hang():
    time.sleep(1000)


def fail():
    raise ArithmeticError("one and one is three")


def absent():
    chapter("99_no_such_chapter")


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


def keeps_threads():
    """On rank 1 as many as make it too many. Returns who it was."""
    for _ in range(MOST_THREADS * dist.get_rank()):
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
    return os.getpid()


def test_of_a_chapter_that_is_not_there_a_test_is_skipped(ranks):
    with pytest.raises(pytest.skip.Exception, match="there is no 99_no_such_chapter.py in "):
        ranks(2)(absent)


def test_a_rank_that_has_collected_threads_is_replaced(ranks):
    first, second = ranks(2)(keeps_threads)
    assert ranks(2)(total) == [(0, 2), (1, 2)]
    found = ranks(2)(os.getpid)
    assert found[0] == first and found[1] != second


def test_every_rank_answers_in_order(ranks):
    for world in 1, 3, 4:
        assert ranks(world)(total) == [(rank, world) for rank in range(world)]


@pytest.mark.parametrize(("trouble", "report", "timeout"), sample([
    (crash, "rank 1 died, exit code -11.*Segmentation fault.*in crash", 60),
    (fail, "rank 1 failed.*one and one is three", 60),
    (die, "rank 1 died, exit code 3", 60),
    (hang, "rank 0 hangs.*all_reduce.*rank 1 hangs.*in hang", 20)]))
def test_trouble_is_reported_by_rank_and_the_next_test_passes(ranks, trouble, report, timeout):
    with pytest.raises(pytest.fail.Exception, match=f"(?s){report}"):
        ranks(2, timeout=timeout)(total, trouble)
    assert ranks(2)(total) == [(0, 2), (1, 2)]
