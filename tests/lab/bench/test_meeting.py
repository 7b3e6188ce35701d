"""Ranks that do not come, are lost, or are told to end: one line on stderr says so."""

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import torch.distributed as dist

from lab.bench import meeting
from tests.conftest import CHAPTERS, TEXT
from tests.lab.checkpoints.test_saving import at
from tests.support import programs

SMALL = ("--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=16", "--batch=6",
         "--device=cpu", "--no-verify", f"--data={TEXT}")  # fmt: skip
LONG = (CHAPTERS / "02_data_parallel.py", *SMALL, "--steps=100000")


def a_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


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


# ------------------------------------------------------------------------------------------ killed

@programs.gloo_tells
@pytest.mark.parametrize(("rank", "flags"), [(0, ["--timeout=30"]), (2, [])])
def test_a_rank_that_is_killed_is_named_once(start, rank, flags):
    patches = {each: [("lab.bench.meeting.Watch.PATIENCE", 60)] for each in range(3)}  # not needed
    ranks = start(*LONG, *flags, world=3, patches=patches)
    ranks.until("     5 ")
    ranks.send(signal.SIGKILL, rank)
    assert ranks.wait(20) == [-9 if each == rank else 1 for each in range(3)]
    assert re.fullmatch(rf"error: step \d+: rank {rank} has ended\n", ranks.err()), ranks.err()


def test_also_where_torchrun_ends_the_others_while_they_compute(start):
    """Its SIGTERM comes at any time after the death, so also before others have noticed."""
    ranks = start(*LONG, world=3, patches={rank: [at(5, [rank], functools.partial(time.sleep, 60))]
                                           for rank in (0, 2)})  # fmt: skip
    ranks.until("     5 ")
    time.sleep(0.2)
    ranks.send(signal.SIGKILL, 1)
    ranks.processes[1].join(5)
    ranks.send(signal.SIGTERM, 0)
    ranks.send(signal.SIGTERM, 2)
    assert ranks.wait(20) == [143, -9, 143]
    assert ranks.err() == "error: step 5: rank 1 has ended\n"


def test_a_zombie_has_ended():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not meeting.has_ended(process.pid)
    process.stdin.close()
    end = time.monotonic() + 20
    while not meeting.has_ended(process.pid) and time.monotonic() < end:
        time.sleep(0.01)
    assert meeting.has_ended(process.pid) and psutil.pid_exists(process.pid)  # nobody has asked
    process.wait()
    assert meeting.has_ended(process.pid)  # now its number is free


def test_without_psutil_no_process_is_watched(start):
    run = start(*LONG[:1], *SMALL, "--steps=1", world=2,
                patches=dict.fromkeys(range(2), [("lab.bench.meeting.psutil", None)]))
    assert run.wait() == [0, 0], run.err()


SOON = "lab.bench.meeting.Watch.PATIENCE", 0.5


@programs.gloo_tells
def test_of_another_machine_it_is_found_over_the_store(start):
    """The others look at their own processes in vain."""
    elsewhere = {rank: [SOON, ("socket.gethostname", functools.partial(str, f"host {rank}"))]
                 for rank in range(3)}  # fmt: skip
    ranks = start(*LONG, world=3, patches=elsewhere)
    ranks.until("     5 ")
    ranks.send(signal.SIGKILL, 1)
    assert ranks.wait(20) == [1, -9, 1]
    who = "(rank 1|of ranks (0, 1|1, 2), at least one)"  # an innocent one may wait for the other
    assert re.fullmatch(rf"error: step \d+: {who} has ended\n", ranks.err()), ranks.err()


def receive():
    dist.recv(meeting.torch.zeros(1), src=0)


def test_ranks_that_wait_for_each_other_say_where(start):
    """A fault of a program, not of a machine: so there are tracebacks."""
    patches = {0: [SOON], 1: [SOON, at(2, [1], receive)]}
    ranks = start(*LONG, "--timeout=1", world=2, patches=patches)
    assert ranks.wait(20) == [1, 1]
    for rank in (0, 1):
        assert "RuntimeError: step" in ranks.err(rank) and "02_data_parallel.py" in ranks.err(rank)
        assert "each rank waits for another, and none is lost" in ranks.err(rank)
    assert "in receive" in ranks.err(1) and "another rank has ended" not in ranks.err()


# ------------------------------------------------------------------------------------- told to end

@programs.gloo_tells
def test_sigterm_of_one_rank_ends_all_with_a_line(start):
    ranks = start(*LONG, world=2)
    ranks.until("     5 ")
    ranks.send(signal.SIGTERM, 1)
    assert ranks.wait(10) == [1, 143]
    said = ranks.err()
    assert re.fullmatch(r"error: step \d+: SIGTERM has come to rank 1\n", said), said


@pytest.mark.parametrize(("world", "flags"), [(0, []), (2, ["--save=saved"])])
def test_ctrl_c_is_a_line(start, world, flags):
    """To all ranks, from the terminal, and once more, from torchrun."""
    chapter, *more = LONG if world else (CHAPTERS / "01_single_gpu.py", *LONG[1:])
    ranks = start(chapter, *more, *flags, world=world)
    ranks.until("     5 ")
    for rank in [*range(world or 1)] * 2:
        ranks.send(signal.SIGINT, rank)
    assert ranks.wait(10) == [130] * (world or 1), ranks.err()
    assert re.fullmatch(r"error: interrupted after step \d+\n", ranks.err()), ranks.err()


# ------------------------------------------------------------------------------------ never coming

def alone(start, rank, world, *flags, **more):
    """One of `world` ranks; the others, nobody has started."""
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": a_port()} | more
    flags = flags or ("--timeout=1",)
    return start(*LONG, *flags, RANK=rank, WORLD_SIZE=world, **more)


def test_ranks_that_never_come_are_named(start):
    """These wait at the same time, each for others of its own."""
    ports, keeps = [a_port() for _ in range(4)], dict(is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", 0, **keeps)
    torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": store.port}
    usual = {0: [("lab.bench.meeting.USUAL", (meeting.timedelta(seconds=1),) * 2)]}
    silent = socket.create_server(("127.0.0.1", 0))
    odd = {"MASTER_PORT": silent.getsockname()[1]}
    waiting = {
        "rank 0": alone(start, 0, 2, MASTER_PORT=ports[0]),
        "rank 1": alone(start, 1, 2, MASTER_PORT=ports[1]),
        "no timeout": alone(start, 0, 2, "--steps=2", patches=usual, MASTER_PORT=ports[2]),
        "a program that listens": alone(start, 1, 2, **odd),
        "a port in use": alone(start, 0, 2, **odd),
        "the first of two": alone(start, 0, 3, "--timeout=4", MASTER_PORT=ports[3]),
        "the second": alone(start, 1, 3, "--timeout=30", MASTER_PORT=ports[3]),  # it is told
    } | {f"torchrun {rank}": alone(start, rank, 6, "--timeout=4", LOCAL_RANK=rank,
                                   LOCAL_WORLD_SIZE=3, **torchrun) for rank in range(3)}
    if sys.platform == "darwin":  # two may listen there, one of them at any address
        waiting.pop("a port in use").stop()
    assert [each.wait(20) for each in waiting.values()] == [[1]] * len(waiting)
    said, place = {name: each.err() for name, each in waiting.items()}, f"127.0.0.1:{ports[1]}"
    odd = f"the store at 127.0.0.1:{odd['MASTER_PORT']}"
    seconds = re.search(r"2 of 3 ranks came within (4|30) s", said["the second"])[1]
    assert "".join(said.pop(f"torchrun {rank}") for rank in range(3)) == (
        "error: 3 of 6 ranks came within 4 s: ranks 3, 4, 5 are missing\n")  # one of them says it
    assert said == {name: f"error: {line}\n" for name, line in {
        "rank 0": "1 of 2 ranks came within 1 s: rank 1 is missing",
        "rank 1": f"nobody answers within 1 s at {place}, where rank 0 is to listen: Connection "
                  "refused",
        "no timeout": "1 of 2 ranks came within 1 s: rank 1 is missing",
        "a program that listens": f"rank 1 cannot read {odd}: what listens there is no store",
        "a port in use": f"rank 0 cannot keep {odd}: address already in use",
        "the first of two": "2 of 3 ranks came within 4 s: rank 2 is missing",
        "the second": f"2 of 3 ranks came within {seconds} s: rank 2 is missing",
    }.items() if name in waiting}  # fmt: skip
    silent.close()


def test_ranks_start_again_in_the_same_store(start):
    """As torchrun starts them: in it are the addresses of the attempt before."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt in range(2):
        ranks = [alone(start, rank, 2, "--steps=2", LOCAL_RANK=rank, LOCAL_WORLD_SIZE=2,
                       TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=store.port,
                       TORCHELASTIC_RESTART_COUNT=attempt) for rank in range(2)]  # fmt: skip
        assert [each.wait(20) for each in ranks] == [[0], [0]], ranks[0].err()
        assert os.path.exists(ranks[0].outputs[0][0]) and not ranks[0].err() + ranks[1].err()
