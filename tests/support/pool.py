"""The pool of rank processes that tests call functions on."""

import faulthandler
import gc
import itertools
import os
import pickle
import signal
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lab.run.ranks import CONTEXT

LEAVE = b""  # from the pool to a rank: everyone is done, so leave your group
MOST_THREADS = 16  # of a rank between two calls; a group has three


class Absent(str):
    """Of a chapter that is not there: why its test is skipped."""


def serve(pipe, stacks):
    """One rank: for each call, join a new gloo group, run the function, send back its result.

    `new_group` returns as soon as this rank is connected, when its peers may still be connecting:
    if it left now, they would see a closed connection. So a rank whose function has worked leaves
    only when the pool has everyone's answers and says so.
    """
    torch.set_num_threads(1)  # first of all: a fork after OpenMP ran can hang
    gc.freeze()  # what is imported by now is no garbage: saves 0.1 s a call
    stacks = open(stacks, "w")
    faulthandler.enable(stacks)  # where it dies of a signal
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    while True:
        rank, world, store, call = pickle.loads(pipe.recv_bytes())
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        try:
            dist.init_process_group("gloo", f"file://{store}", timedelta(minutes=5), world, rank)
            dist.barrier()  # or one that sends nothing could leave while others still connect
            function, args = pickle.loads(call)
            worked, answer = True, pickle.dumps((True, function(*args)))
        except pytest.skip.Exception as skipped:
            worked, answer = True, pickle.dumps((True, Absent(skipped)))
        except BaseException:  # a SystemExit too: the test wants to see it
            worked, answer = False, pickle.dumps((False, f"failed:\n{traceback.format_exc()}"))
        gc.collect()
        if worked:
            pipe.send_bytes(answer)
            pipe.recv_bytes()  # LEAVE
            answer = pickle.dumps((True, "left"))
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send_bytes(answer)


class Pool:
    """Rank processes that outlive a test; all are replaced when one fails, dies or hangs."""

    def __init__(self, folder):
        self.folder, self.members = folder, []
        self.number = itertools.count()

    def path(self, kind):
        """Of a new file."""
        return f"{self.folder}/{next(self.number)}.{kind}"

    def member(self):
        """Start a rank process."""
        stacks = self.path("stacks")
        pipe, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=serve, args=(theirs, stacks), daemon=True)
        process.start()
        theirs.close()  # so that its death closes the pipe
        return process, pipe, stacks

    def renew(self, world):
        """So many members. One in which PyTorch has kept old groups, in caches of DTensor or hooks
        of autograd, is replaced: the threads of a group wake up all the time."""
        import psutil  # here: the kernels' tests need no pool, and run where there is no psutil

        for i, (process, pipe, _) in enumerate(self.members):
            if psutil.Process(process.pid).num_threads() > MOST_THREADS:
                end(process, pipe)
                self.members[i] = self.member()
        while len(self.members) < world:
            self.members.append(self.member())

    def call(self, world, timeout, function, *args):
        """function(*args) on ranks 0 ... world-1: their results in order, or the test fails."""
        self.renew(world)
        pipes = {pipe: rank for rank, (_, pipe, _) in enumerate(self.members[:world])}
        store = self.path("store")
        for pipe, rank in pipes.items():
            pipe.send_bytes(pickle.dumps((rank, world, store, pickle.dumps((function, args)))))

        deadline = time.monotonic() + timeout
        answers = self.collect(pipes, deadline)
        for pipe in pipes:
            pipe.send_bytes(LEAVE)
        self.collect(pipes, deadline)
        if isinstance(answers[0][1], Absent):
            pytest.skip(answers[0][1])
        return [answers[rank][1] for rank in range(world)]

    def collect(self, pipes, deadline):
        """{rank: (True, what it sends)}, or the test fails."""
        answers = {}  # rank: (whether it worked, result or report)
        while len(answers) < len(pipes) and all(worked for worked, _ in answers.values()):
            waiting = [pipe for pipe, rank in pipes.items() if rank not in answers]
            ready = wait(waiting, max(0, deadline - time.monotonic()))
            answers |= {pipes[pipe]: self.receive(pipes[pipe]) for pipe in ready}
            if not ready:
                break
        if len(answers) < len(pipes) or not all(worked for worked, _ in answers.values()):
            self.fail(pipes, answers)
        return answers

    def fail(self, pipes, answers):
        """Fail the test with what happened on each rank, and the stacks of those that hang."""
        time.sleep(1)  # a rank that lost its peer notices soon
        answers |= {
            rank: self.receive(rank)
            for pipe, rank in pipes.items()
            if rank not in answers and pipe.poll()
        }
        answers |= {
            rank: (False, f"hangs:\n{self.stack(rank)}")
            for rank in pipes.values()
            if rank not in answers
        }
        self.stop()
        reports = [
            f"rank {rank} {what}" for rank, (worked, what) in sorted(answers.items()) if not worked
        ]
        pytest.fail("\n".join(reports), pytrace=False)

    def receive(self, rank):
        """What a rank sends, or how it died."""
        process, pipe, stacks = self.members[rank]
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            process.join(5)
            return False, f"died, exit code {process.exitcode}\n{Path(stacks).read_text()}".strip()

    def stack(self, rank):
        """Where a rank hangs: it writes this when it gets a signal, `serve` last."""
        process, _, stacks = self.members[rank]
        os.kill(process.pid, signal.SIGUSR1)  # works even inside gloo
        end = time.monotonic() + 30
        while "in serve" not in (text := Path(stacks).read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        return text

    def stop(self):
        """End all processes."""
        for process, pipe, _ in self.members:
            end(process, pipe)
        self.members = []


def end(process, pipe):
    """Kill a process and close its pipe."""
    process.kill()
    process.join()
    pipe.close()
