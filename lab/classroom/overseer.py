"""Processes that run students' code, and the process that oversees them.

An overseer is forked for each check. It forks one process per rank, ends them if they would run
forever, and in the end kills all of its group. It never runs a line of a student's code, so
whatever that does costs only its own check. (What a student starts in a session of its own is left
to the container.)

A process writes its answer to a file without a name, and there is a second file for the lines at
which it stops: when a signal ends it, and when the overseer asks.
"""

import contextlib
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
from collections import deque
from typing import NamedTuple

import psutil

from lab import ROOT

# Doesn't import torch: the other interpreter does that while this one reads on.

LIMIT = 5                       # seconds of computing: a right run needs one or two
CLOCK = 12                      # seconds of the clock for each of these, on a busy machine
LOOK = 0.03                     # seconds between two looks
IDLE = 80                       # looks in which hardly any rank computes: they wait for each other
HARDLY = 0.1                    # of these looks: a rank that polls computes a little
GRACE = 1                       # seconds for the other ranks to end, once one has failed
LAST_LINES = b"in <module>\n", b"...\n"         # of a whole stack, which comes line by line
LARGEST = 2**28                 # bytes of an answer


class Remains(NamedTuple):
    """What is left of a process. status: its exit status, or None if the overseer ended it; then,
    is_stuck: it would have run forever. answer: the bytes that it handed in. stack: faulthandler's
    lines."""
    status: int | None
    is_stuck: bool
    answer: bytes
    stack: bytes


class Forked:
    """A process that runs function(hand_in, *args). hand_in(data) takes its answer, in bytes."""

    def __init__(self, function, args, folder, more_paths):
        self.status, self.seconds = None, 0
        self.answer, self.stack = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                begin(self.answer.fileno(), self.stack.fileno(), folder, more_paths)
                os._exit(function(self.hand_in, *args))
            finally:                                    # Python's shutdown may wait for threads
                os._exit(1)

    def hand_in(self, data):
        self.answer.write(data)
        self.answer.flush()

    def is_running(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def is_busy(self):
        """Whether it computes or wants to. Notes for how many seconds it has computed."""
        try:
            process = psutil.Process(self.pid)
            times = process.cpu_times()
            self.seconds = times.user + times.system
            return process.status() in (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)
        except psutil.NoSuchProcess:
            return False

    def has_failed(self):
        return self.status is not None and (self.status != 0 or not written_in(self.answer))


def written_in(file):
    """All that is in a file by now. (Its own offset belongs to the process.)"""
    number = file.fileno()
    return os.pread(number, min(os.fstat(number).st_size, LARGEST), 0)


def begin(answer, stack, folder, more_paths):
    """Prepare a new process: no output, no terminal, and no open files but these two."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for number in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, answer, stack}:
        with contextlib.suppress(OSError):              # that of the folder itself is closed
            os.close(number)
    sys.stdin = open(os.devnull)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    faulthandler.enable(stack)                          # where a signal such as SIGSEGV ends it
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.path[:0] = [str(ROOT)]
    sys.path += more_paths
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)


def oversee(parent, calls, folder, more_paths, limit):
    """Run each call, (function, args), in a process of its own, and send their Remains to the
    parent, a connection. If that closes, nobody waits for the check any more, and it ends."""
    os.setsid()                                         # a group of its own; Ctrl-C is for others
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    gc.freeze()                                         # what is imported by now is no garbage
    processes, stuck = [], []
    try:
        for function, args in calls:
            processes.append(Forked(function, args, folder, more_paths))
        if not have_ended(processes, limit, parent):
            stuck = ask_where(processes)
        parent.send([Remains(process.status, process in stuck, written_in(process.answer),
                             written_in(process.stack)) for process in processes])
    finally:
        os.killpg(0, signal.SIGKILL)                    # this process as well


def have_ended(processes, limit, parent):
    """Wait until all have ended, or until one has failed and the others have had time to say why.
    False: they are in a deadlock, or one has computed for longer than the limit, in seconds.

    Seconds of computing say more than those of a clock, which goes on while others compute."""
    begun, failed_at, looks = time.monotonic(), None, deque(maxlen=IDLE)
    while running := [process for process in processes if process.is_running()]:
        if parent.poll():                               # it has closed
            raise SystemExit
        time.sleep(LOOK)
        now = time.monotonic()
        if failed_at is None and any(process.has_failed() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE:
            return True
        looks.append(any([process.is_busy() for process in running]))
        if len(looks) == IDLE and sum(looks) < HARDLY * IDLE:
            return False
        if now > begun + CLOCK * limit or max(process.seconds for process in running) > limit:
            return False
    return True


def ask_where(processes):
    """Let those that still run write the lines at which they are, which takes two seconds at the
    most. Returns those."""
    running = [process for process in processes if process.is_running()]
    for process in running:
        os.kill(process.pid, signal.SIGUSR1)            # works even inside gloo
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(
            written_in(process.stack).endswith(LAST_LINES) for process in running):
        time.sleep(LOOK)
    return running
