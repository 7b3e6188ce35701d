"""Programs on ranks, as torchrun starts them, without the seconds that Python and torch take to
start: an interpreter that has imported torch forks them.

    started = Ranks("02_data_parallel.py", "--steps=3", world=4)
    started.wait()                      the exit status of each rank
    started.out(), started.err()        what they have printed

Each is the program from its first line to its exit. torchrun's part is done here: the environment
of each rank, and the store through which they meet. What torchrun does besides, to start ranks
again and to find those of other machines, is its own.
"""

import gc
import math
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing import connection, forkserver
from pathlib import Path

from lab import ROOT
from lab.run import refusals

# Not torch, nor what imports it: the other interpreter does so while this one reads on.

if "forkserver" not in multiprocessing.get_all_start_methods():
    refusals.fail("this system forks no processes; torchrun NN_name.py would work")
# On macOS, frameworks under torch begin in a fork what their Objective-C lets only an exec begin.
os.environ.setdefault("OBJC_DISABLE_INITIALIZE_FORK_SAFETY", "YES")
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["torch._dynamo", "torch.distributed.tensor.parallel",       # an optimizer's first step
           "triton.runtime.interpreter", "lab.launch", "lab.classroom.exercises"]
CONTEXT.set_forkserver_preload(PRELOAD)


def start_interpreter(*more: str) -> None:
    """Start the interpreter that forks. It imports while this one goes on. more: modules that it
    is to import besides."""
    CONTEXT.set_forkserver_preload([*PRELOAD, *more])
    forkserver.ensure_running()


def typed(words: Iterable[str], world: int = 0) -> str:
    """The command that a reader types for the same; world=0: one process, without torchrun."""
    launcher = f"torchrun --standalone --nproc_per_node={world}" if world else "python"
    return " ".join([launcher, *words])


def play(words, cwd, outputs, environment, encoding, buffering, first):
    """In the new process: be `python words ...`."""
    os.chdir(cwd)
    os.environ.update(environment)
    sys.stdout, sys.stderr = None, None
    for number, path in enumerate(outputs, start=1):
        if path is None:
            os.close(number)            # as by `>&-`
        else:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
    if outputs[0]:
        sys.stdout = open(1, "w", buffering, encoding=encoding, closefd=False)
    if outputs[1]:
        sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)
    import torch

    torch.set_num_threads(1)
    gc.freeze()                         # what is imported by now is no garbage
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path.append(str(Path(words[0]).parent))     # last: common.py and lab/ are always ours
    if first:
        first()
    if is_module:
        sys.modules.pop(sys.argv[0], None)          # which the interpreter that forks has imported
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[0], run_name="__main__")


class Ranks:
    """The processes of one program, a rank each; world=0: one, without a launcher.

    stdout, stderr: paths to write to in place of files that out() and err() read; None: closed.
    buffering: of stdout, as `open` takes it. first: {rank: a function without arguments, called
    before the program}. Other names: of the environment.
    """

    def __init__(self, *words, world: int = 0, cwd: Path = ROOT, stdout: Path | str | None = "",
                 stderr: Path | str | None = "", encoding: str = "utf-8", buffering: int = -1,
                 first: dict | None = None, **environment):
        words, launched = [str(word) for word in words], {}
        self.processes, self.failed = [], None          # failed: when the first has
        self.folder = tempfile.TemporaryDirectory()     # of what they print
        if world:
            self.store = store()
            launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
                        "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world,
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.store.port}
        for rank in range(max(world, 1)):
            if world:
                launched |= {"RANK": rank, "LOCAL_RANK": rank}
            files = [f"{self.folder.name}/{kind}{rank}" if path == "" else path
                     for kind, path in (("out", stdout), ("err", stderr))]
            more = {name: str(value) for name, value in (launched | environment).items()}
            process = CONTEXT.Process(target=play, daemon=True, args=(
                words, str(cwd), files, more, encoding, buffering, (first or {}).get(rank)))
            process.start()
            self.processes.append(process)

    def wait(self, timeout: float | None = 100, grace: float | None = None) -> list[int | None]:
        """The exit status of each; -9 of one that was killed, None of one that still runs.
        timeout: seconds, or None. grace: seconds after which the others are killed, too, once one
        has failed."""
        end = time.monotonic() + timeout if timeout is not None else math.inf
        while running := [process for process in self.processes if process.exitcode is None]:
            now = time.monotonic()
            if self.failed is None and any(process.exitcode for process in self.processes):
                self.failed = now
            if grace is not None and self.failed is not None and now > self.failed + grace:
                self.stop()
            elif now >= end:
                break
            connection.wait([process.sentinel for process in running], min(end - now, 0.2))
        return [process.exitcode for process in self.processes]

    def read(self, kind, rank):
        """What was printed to one stream."""
        ranks = range(len(self.processes)) if rank is None else [rank]
        paths = [Path(self.folder.name, f"{kind}{rank}") for rank in ranks]
        return "".join(path.read_text() for path in paths if path.exists())

    def out(self, rank: int | None = None) -> str:
        """What this one, or all of them, have printed so far."""
        return self.read("out", rank)

    def err(self, rank: int | None = None) -> str:
        """The same of stderr."""
        return self.read("err", rank)

    def send(self, number: int, rank: int) -> None:
        """A signal, to one rank."""
        os.kill(self.processes[rank].pid, number)

    def stop(self) -> None:
        """Kill those that still run."""
        for process in self.processes:
            process.kill()              # one that is stopped by SIGSTOP as well
        for process in self.processes:
            process.join()


def store():
    """Where ranks meet, in a process that is none."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def run(*words, timeout: float = 100, launch: type = Ranks, **more) -> tuple[list, str, str]:
    """A program to its end: (exit status of each rank, what they printed, and to stderr)."""
    started = launch(*words, **more)
    try:
        return started.wait(timeout), started.out(), started.err()
    finally:
        started.stop()
