"""Programs in processes of their own, as a reader starts them, without the seconds that Python and
torch take to start: an interpreter that has imported torch forks them.

    run = Ranks("02_data_parallel.py", "--steps=3", world=2, cwd=folder)
    run.wait()                          the exit status of each rank
    run.out(), run.err()                what they have printed

Each is the program from its first line to its exit. torchrun's part is done here: the environment
of each rank, and the store through which they meet.
"""

import contextlib
import functools
import gc
import itertools
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from lab.classroom.checks import PRELOAD

# The interpreter that the pool of conftest.py is forked from, too.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(PRELOAD)
NUMBER = itertools.count()


@functools.cache  # not at import, which every new process does
def folder():
    """Of what programs print."""
    return tempfile.TemporaryDirectory()


def play(words, cwd, outputs, environment, encoding, patches):
    """In the new process: be `python words ...`."""
    os.chdir(cwd)
    os.environ.update(environment)
    sys.stdout, sys.stderr = None, None
    for number, path in enumerate(outputs, start=1):
        os.close(number)
        if path is not None:  # else closed, as by `>&-`
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(file, number)
            os.close(file) if file != number else None
    if outputs[0]:
        sys.stdout = open(1, "w", encoding=encoding, closefd=False)
    if outputs[1]:
        sys.stderr = open(2, "w", encoding=encoding, errors="backslashreplace", buffering=1,
                          closefd=False)  # fmt: skip
    torch.set_num_threads(1)
    gc.freeze()  # what is imported by now is no garbage
    is_module = words[0] == "-m"
    sys.argv = words[1:] if is_module else words
    sys.path.append(str(Path(words[0]).parent))  # last: common.py and lab/ are always ours
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch(*patch))
        if is_module:
            sys.modules.pop(sys.argv[0], None)  # which the interpreter that forks has imported
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")


class Ranks:
    """The processes of one program, a rank each; world=0: one, without a launcher.

    stdout, stderr: paths to write to in place of files that out() and err() read; None: closed.
    meet_at: rank 0 keeps the store at this port, where no torchrun does. patches: for mock.patch,
    {rank: a list}.
    """

    def __init__(self, *words, world=0, cwd, stdout="", stderr="", encoding="utf-8", meet_at=None,
                 patches=None, **environment):  # fmt: skip
        words, launched = [str(word) for word in words], {}
        self.outputs, self.processes = [], []
        if world and meet_at is None:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            launched = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        for rank in range(max(world, 1)):
            if world:
                port = meet_at or self.store.port
                launched |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world,
                             "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
                             "MASTER_PORT": port}  # fmt: skip
            number = next(NUMBER)
            files = [f"{folder().name}/{number}{kind}" if path == "" else path
                     for kind, path in (("out", stdout), ("err", stderr))]
            more = {name: str(value) for name, value in (launched | environment).items()}
            process = CONTEXT.Process(target=play, daemon=True, args=(
                words, str(cwd), files, more, encoding, (patches or {}).get(rank, ())))
            process.start()
            self.outputs.append(files)
            self.processes.append(process)

    def wait(self, timeout=100):
        """The exit status of each; -9 of one that was killed, None of one that still runs."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def read(self, kind, rank):
        ranks = range(len(self.outputs)) if rank is None else [rank]
        paths = [Path(self.outputs[rank][kind] or "none") for rank in ranks]
        return "".join(path.read_text() for path in paths
                       if path.exists() and path.parent == Path(folder().name))  # fmt: skip

    def out(self, rank=None):
        return self.read(0, rank)

    def err(self, rank=None):
        return self.read(1, rank)

    def until(self, words, timeout=60):
        """Wait until rank 0 has printed that."""
        end = time.monotonic() + timeout
        while words not in self.out(0):
            assert time.monotonic() < end and self.processes[0].is_alive(), self.out() + self.err()
            time.sleep(0.01)

    def send(self, number, rank):
        os.kill(self.processes[rank].pid, number)

    def stop(self):
        for process in self.processes:
            process.kill()  # one that is stopped by SIGSTOP as well


def run(*words, cwd, world=0, **more):
    """A program to its end: (exit status of each rank, what they printed, and to stderr)."""
    ranks = Ranks(*words, world=world, cwd=cwd, **more)
    try:
        statuses = ranks.wait()
        return statuses, ranks.out(), ranks.err()
    finally:
        ranks.stop()
