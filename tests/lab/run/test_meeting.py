"""Ranks that don't come, are lost, or are told to end: one line on stderr names them."""

import functools
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from lab.run import meeting
from tests.conftest import CHAPTERS, TEXT, sample
from tests.lab.checkpoints.test_saving import at
from tests.support import programs

SMALL = ("--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=16", "--batch=6",
         "--device=cpu", "--no-verify", f"--data={TEXT}")  # fmt: skip
LONG = (CHAPTERS / "02_data_parallel.py", *SMALL, "--steps=100000")


@pytest.fixture
def start(tmp_path):
    """start(*words, **more): a program's Ranks, which end with the test."""
    started = []

    def ranks(*words, **more):
        started.append(programs.Ranks(*words, cwd=tmp_path, **more))
        return started[-1]

    yield ranks
    for each in started:
        each.stop()


def wait_until(condition, timeout=60):
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ------------------------------------------------------------------------------------------ killed

@programs.gloo_tells
@pytest.mark.parametrize(("rank", "flags"), sample([(2, []), (0, ["--timeout=30"])]))
def test_a_rank_that_is_killed_is_named_once(start, rank, flags):
    patches = {each: [("lab.run.meeting.Watch.PATIENCE", 60)] for each in range(3)}  # not needed
    ranks = start(*LONG, *flags, world=3, patches=patches)
    ranks.until("     5 ")
    ranks.send(signal.SIGKILL, rank)
    assert ranks.wait() == [-9 if each == rank else 1 for each in range(3)]
    assert re.fullmatch(rf"error: step \d+: rank {rank} has ended\n", ranks.err()), ranks.err()


def test_a_zombie_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not meeting.has_ended(process.pid)
    process.stdin.close()
    wait_until(lambda: meeting.has_ended(process.pid))
    assert psutil.pid_exists(process.pid)  # nobody has asked for its status
    process.wait()
    assert meeting.has_ended(process.pid)  # now its number is free


SOON = "lab.run.meeting.Watch.PATIENCE", 0.5


@pytest.mark.full
@programs.gloo_tells
def test_of_another_machine_it_is_found_over_the_store(start):
    """The others look at their own processes in vain."""
    elsewhere = {rank: [SOON, ("socket.gethostname", functools.partial(str, f"host {rank}"))]
                 for rank in range(3)}  # fmt: skip
    ranks = start(*LONG, world=3, patches=elsewhere)
    ranks.until("     5 ")
    ranks.send(signal.SIGKILL, 1)
    assert ranks.wait() == [1, -9, 1]
    who = "(rank 1|of ranks (0, 1|1, 2), at least one)"  # an innocent one may wait for the other
    assert re.fullmatch(rf"error: step \d+: {who} has ended\n", ranks.err()), ranks.err()


def receive():
    dist.recv(torch.zeros(1), src=0)


@pytest.mark.full
def test_ranks_that_wait_for_each_other_have_tracebacks(start):
    """The program is wrong, not the machine."""
    patches = {0: [SOON], 1: [SOON, at(2, [1], receive)]}
    ranks = start(*LONG, "--timeout=10", world=2, patches=patches)
    assert ranks.wait() == [1, 1]
    for rank in (0, 1):
        assert "RuntimeError: step" in ranks.err(rank) and "02_data_parallel.py" in ranks.err(rank)
        assert "each rank waits for another, and none is lost" in ranks.err(rank)
    assert "in receive" in ranks.err(1) and "another rank has ended" not in ranks.err()


# ------------------------------------------------------------------------------------- told to end

@pytest.mark.parametrize(("world", "flags"), sample([(2, ["--save=saved"]), (0, [])]))
def test_ctrl_c_is_a_line(start, world, flags):
    """The terminal sends it to all ranks, and torchrun sends it once more."""
    chapter, *more = LONG if world else (CHAPTERS / "01_single_gpu.py", *LONG[1:])
    ranks = start(chapter, *more, *flags, world=world)
    ranks.until("     5 ")
    for rank in [*range(world or 1)] * 2:
        ranks.send(signal.SIGINT, rank)
    assert ranks.wait() == [130] * (world or 1), ranks.err()
    assert re.fullmatch(r"error: interrupted after step \d+\n", ranks.err()), ranks.err()
