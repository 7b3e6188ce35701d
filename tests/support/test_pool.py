"""The pool of ranks itself: it reports a rank that fails, dies or hangs, and goes on."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.conftest import chapter
from tests.support.pool import MOST_THREADS


def total():
    x = torch.ones(())
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def die():
    total()
    if dist.get_rank() == 1:
        time.sleep(0.5)  # by now the other one is in the collective
        os._exit(3)
    total()


def crash():
    total()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    total()


def hang():
    total()
    if dist.get_rank() == 1:
        time.sleep(1000)
    total()


def answers_nonsense():
    return total() if dist.get_rank() == 0 else (lambda: 1)


def fail():
    total()
    if dist.get_rank() == 1:
        raise ArithmeticError("one and one is three")
    total()


def absent():
    chapter("99_no_such_chapter")


def test_of_a_chapter_that_is_not_there_a_test_is_skipped(ranks):
    with pytest.raises(pytest.skip.Exception, match="there is no 99_no_such_chapter.py in "):
        ranks(2)(absent)


def keeps_threads():
    """On rank 1 as many as make it too many. Returns who it was."""
    for _ in range(MOST_THREADS * dist.get_rank()):
        threading.Thread(target=time.sleep, args=[1000], daemon=True).start()
    return os.getpid()


def test_a_rank_that_has_collected_threads_is_replaced(ranks):
    first, second = ranks(2)(keeps_threads)
    assert ranks(2)(total) == [(0, 2), (1, 2)]
    found = ranks(2)(os.getpid)
    assert found[0] == first and found[1] != second


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_every_rank_answers_in_order(ranks, world):
    assert ranks(world)(total) == [(rank, world) for rank in range(world)]


@pytest.mark.parametrize(
    ("function", "report"),
    [
        pytest.param(die, "rank 0 .*all_reduce.*rank 1 died, exit code 3", marks=pytest.mark.full),
        (crash, "rank 0 .*all_reduce.*rank 1 died, exit code -11.*Segmentation fault.*in crash"),
        (hang, "rank 0 hangs.*all_reduce.*rank 1 hangs.*in hang"),
        pytest.param(answers_nonsense, "rank 1 failed.*pickle", marks=pytest.mark.full),
        (fail, "rank 0 .*all_reduce.*rank 1 failed.*one and one is three"),
    ],
)
def test_trouble_is_reported_by_rank_and_the_next_test_passes(ranks, function, report):
    start = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match=f"(?s){report}"):
        ranks(2, timeout=3)(function)
    assert time.monotonic() - start < 60
    assert ranks(2)(total) == [(0, 2), (1, 2)]
