"""Processes that run students' code, and the process that oversees them.

An overseer is forked for each check. It forks one process per rank, ends them if they would run
forever, and then ends everything that they started. It never runs a line of a student's code, so
whatever that does costs only its own check.

A process writes its answer to a file without a name, and there is a second file for the lines at
which it stops: when a signal ends it, and when the overseer asks.
"""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from lab import ROOT

# Doesn't import torch: the other interpreter does that while this one reads on.

PROC = Path("/proc")
LIMIT = 5                       # seconds of computing: a right run needs one or two
CLOCK = 12                      # seconds of the clock for each of these, on a busy machine
IDLE = 2                        # seconds in which no rank computes: they wait for each other
LOOKS = 20                      # in these seconds; on a busy machine they take longer
GRACE = 1                       # seconds for the other ranks to end, once one has failed
LAST_LINES = b"in <module>\n", b"...\n"         # of a whole stack, which comes line by line
LARGEST = 2**28                 # bytes of an answer
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36         # of Linux's prctl


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ----------------------------------------------------------------------------- a student's process

class Remains(NamedTuple):
    """What is left of a process. status: its exit status, or None if the overseer ended it; then,
    is_stuck: it would have run forever. answer: the bytes that it handed in. stack: faulthandler's
    lines."""
    status: int | None
    is_stuck: bool
    answer: bytes
    stack: bytes


class Forked:
    """A process that runs function(tell, *args). tell(data) hands in its answer, in bytes."""

    def __init__(self, function, args, folder, more_paths):
        self.status, self.files = None, [tempfile.TemporaryFile() for _ in range(2)]
        self.pid = os.fork()
        if self.pid == 0:
            try:
                begin(*(file.fileno() for file in self.files), folder, more_paths)
                os._exit(function(self.tell, *args))
            finally:                                    # Python's shutdown may wait for threads
                os._exit(1)

    def tell(self, data):
        self.files[0].write(data)
        self.files[0].flush()

    def is_running(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def has_failed(self):
        return self.status is not None and (self.status != 0 or not self.read(0))

    def read(self, number):
        """All that is in a file by now. (Its own offset belongs to the process.)"""
        file = self.files[number].fileno()
        return os.pread(file, min(os.fstat(file).st_size, LARGEST), 0)


def begin(answer, stack, folder, more_paths):
    """Prepare a new process: no output, no terminal, and no open files but these two."""
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for number in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, answer, stack}:
        with contextlib.suppress(OSError):              # that of the folder itself is closed
            os.close(number)
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in ("r", "w", "w"))
    faulthandler.enable(stack)                          # where a signal such as SIGSEGV ends it
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.path[:0] = [str(ROOT)]
    sys.path += more_paths
    os.chdir(folder)
    import torch

    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------ the overseer

def oversee(parent, calls, folder, more_paths, limit):
    """Run each call, (function, args), in a process of its own, and send their Remains to the
    parent, a connection. If that closes, nobody waits for the check any more, and it ends."""
    os.setsid()                                         # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prctl(SET_SUBREAPER, 1)                             # orphans become its children
    gc.freeze()                                         # what is imported by now is no garbage
    processes = []
    try:
        for function, args in calls:
            processes.append(Forked(function, args, folder, more_paths))
        stuck = [] if have_ended(processes, limit, parent) else ask_where(processes)
        remains = [Remains(process.status, process in stuck, process.read(0), process.read(1))
                   for process in processes]
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all()
    parent.send(remains)


def have_ended(processes, limit, parent):
    """Wait until all have ended, or until one has failed and the others have had time to say why.
    False: they are in a deadlock, or have computed for longer than the limit, in seconds.

    Seconds of computing say more than those of a clock, which goes on while others compute."""
    used, failed_at, looked_at = {}, None, 0
    begun = since = time.monotonic()
    before, busy, looks = 0, 0, 0                       # of the last seconds, to find a deadlock
    while running := [process for process in processes if process.is_running()]:
        if parent.poll():                               # it has closed
            raise SystemExit
        time.sleep(0.01)
        now = time.monotonic()
        if failed_at is None and any(process.has_failed() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE:
            return True
        if now < looked_at + 0.1:
            continue
        looked_at, looks = now, looks + 1
        for process in running:
            computes, seconds = state_of(process.pid)
            used[process.pid] = max(seconds, used.get(process.pid, 0))
            busy += computes
        total = sum(used.values())
        if max(total / os.cpu_count(), *used.values()) > limit or now > begun + CLOCK * limit:
            return False
        if now > since + IDLE and looks >= LOOKS:
            if total < before + 0.1 and busy <= 1:      # whoever polls computes a little
                return False
            since, before, busy, looks = now, total, 0, 0
    return True


def state_of(pid):
    """Whether a process computes or wants to, be it in the thread that brings gloo's messages, and
    for how many seconds it has. Of one that has just ended: nothing. psutil knows the state of no
    thread: without Linux's /proc, a process computes only where its seconds say so."""
    try:
        times = psutil.Process(pid).cpu_times()
        threads = (PROC / f"{pid}/task").glob("*/stat")
        states = [path.read_text().rpartition(") ")[2][0] for path in threads]
        return bool({"R", "D"} & {*states}), times.user + times.system
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return False, 0


def ask_where(processes):
    """Let those that still run write the lines at which they are, which takes two seconds at the
    most. Returns those."""
    running = [process for process in processes if process.is_running()]
    for process in running:
        os.kill(process.pid, signal.SIGUSR1)            # works even inside gloo
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(
            process.read(1).endswith(LAST_LINES) for process in running):
        time.sleep(0.02)
    return running


def end_all(seconds=10):
    """End all processes below this one, however often they fork."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:                       # none is left
            return
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.002)
