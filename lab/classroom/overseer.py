"""Processes that run what a student has written, and the one that oversees them.

The overseer is forked for each check. It forks the students' processes from itself, reads what they
send, ends them when they have no end, and then all that they have started. It never runs a line of
theirs. What comes from one comes over two pipes: its messages, and the lines at which it is when a
signal asks, or ends it. Nothing that it has written to a disk is read.

A process whose parent has ended becomes a child of the overseer, on Linux, however it has left its
session and its group: so none is out of reach. Nor does any outlive the overseer's own parent.
"""

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import secrets
import selectors
import signal
import sys
import time
from pathlib import Path

import psutil

from lab import ROOT
from lab.classroom import sandbox

# Not torch, nor what imports it: see lab/classroom/checks.py.

PROC = Path("/proc")
LIMIT = 5                       # seconds of computing: a right run needs one or two
CLOCK = 12                      # seconds of the clock for each of these, on a busy machine
IDLE = 2                        # seconds in which no rank computes: they wait for each other
LOOKS = 20                      # in these seconds; on a busy machine they take longer
GRACE = 1                       # seconds for the other ranks to end, once one has failed
LAST_LINES = b"in <module>\n", b"...\n"         # of a whole stack, which comes line by line
LARGEST = 2**28                 # bytes of what a process sends
SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36     # of Linux's prctl


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ----------------------------------------------------------------------------- a student's process

class Teller:
    """Sends messages to the overseer. A token begins each: what else comes there is none."""

    def __init__(self, pipe, token):
        self.pipe, self.token = pipe, token

    def tell(self, data):
        data = memoryview(self.token + len(data).to_bytes(8, "big") + data)
        while data:
            data = data[os.write(self.pipe, data):]


def begin(tells, stack, folder, more_paths, is_confined):
    """First of all in a process: no output, no terminal, no file but two pipes, and a group of
    processes of its own, so that what it starts can be ended with it. stack: where it writes the
    lines at which it is. is_confined: a sandbox is built around it."""
    if is_confined:
        sandbox.enter()
    os.setsid()
    prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.alarm(2000)                                  # should nobody be left to end it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    for number in set(map(int, os.listdir("/dev/fd"))) - {0, 1, 2, tells, stack}:
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


class Followed:
    """A student's process, seen from the overseer: function(tell, *args), forked. status: its exit
    status, or None as long as it runs. said: its messages, once it has ended."""

    def __init__(self, function, args, folder, more_paths, is_confined):
        self.token, self.status, self.said = secrets.token_bytes(16), None, []
        (told, tells), (stack, writes) = os.pipe(), os.pipe()
        self.come = {told: bytearray(), stack: bytearray()}
        self.told, self.stack = self.come.values()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                begin(tells, writes, folder, more_paths, is_confined)
                os._exit(function(Teller(tells, self.token).tell, *args))
            finally:                                    # Python's shutdown may wait for threads
                os._exit(1)
        os.close(tells), os.close(writes)
        for pipe in self.come:
            os.set_blocking(pipe, False)

    def read(self, pipe):
        """Whether something has come; False: nothing has, or nothing will."""
        try:
            data = os.read(pipe, 2**20)
        except BlockingIOError:
            return False
        if len(self.come[pipe]) < LARGEST:              # what comes after that is lost
            self.come[pipe] += data
        return bool(data)

    def runs(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.read_all()
        return self.status is None

    def read_all(self):
        for pipe in self.come:
            while self.read(pipe):
                pass
        self.said, at = [], 0
        while self.told.startswith(self.token, at):
            begin = at + len(self.token) + 8
            at = begin + int.from_bytes(self.told[begin - 8 : begin], "big")
            if at <= len(self.told):                    # else it has not come whole
                self.said.append(bytes(self.told[begin:at]))

    @property
    def has_failed(self):
        return self.status is not None and (self.status != 0 or not self.said)


# ------------------------------------------------------------------------------------ the overseer

def oversee(calls, folder, more_paths, limit, parent, is_confined=False):
    """Run each call in a process, to their end or to ours, and end whatever they have started.
    Returns the processes, and those of them that had no end. parent: a connection, which closes
    when nobody waits for this any more. Until they have ended, SIGTERM ends them first.
    is_confined: this is in a sandbox, for them."""
    os.setsid()                                         # Ctrl-C is for the parent
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    prctl(SET_SUBREAPER, 1)
    gc.freeze()                                         # what is imported by now is no garbage
    processes = []
    try:
        for function, args in calls:
            processes.append(Followed(function, args, folder, more_paths, is_confined))
        has_end = follow(processes, limit, parent)
        return processes, [] if has_end else ask_where(processes)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_all(processes)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def confined(*what):
    """The same, in a sandbox of their own, which ends with them."""
    calls, folder, more_paths, *_ = what
    return sandbox.inside(functools.partial(oversee, *what, True), folder, more_paths)


def follow(processes, limit, parent):
    """Wait until all have ended, or one has failed and the others have had time to say why. False:
    they would have no end."""
    used, failed_at, looked_at = {}, None, 0
    begun = since = time.monotonic()
    before, busy, looks = 0, 0, 0                       # of the last seconds, to find a deadlock
    selector = selectors.DefaultSelector()
    selector.register(parent, selectors.EVENT_READ)
    for process in processes:
        for pipe in process.come:
            selector.register(pipe, selectors.EVENT_READ, process)
    closed = 0
    while running := [process for process in processes if process.runs()]:
        is_ending = closed > 2 * (len(processes) - len(running))    # its pipes are closed already
        for key, _ in selector.select(0.002 if is_ending else 0.1):
            if key.fileobj is parent:
                raise SystemExit
            if not key.data.read(key.fd):
                selector.unregister(key.fd)
                closed += 1
        now = time.monotonic()
        if failed_at is None and any(process.has_failed for process in processes):
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
    """Those that still run, once they have said at which lines they are."""
    running = [process for process in processes if process.runs()]
    for process in running:
        os.kill(process.pid, signal.SIGUSR1)            # works even inside gloo
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and any(process.runs() for process in running):
        for process in running:
            for pipe in process.come:                   # who waits to tell something is woken
                process.read(pipe)
        if all(process.stack.endswith(LAST_LINES) for process in running):
            break
        time.sleep(0.02)
    return running


def end_all(processes):
    """And all below them, however often they fork, for as long as ten seconds."""
    deadline = time.monotonic() + 10
    for process in processes:
        if process.status is None:
            # It may have no group yet; and of one that has ended, macOS says that it is not ours.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            os.kill(process.pid, signal.SIGKILL)
    while time.monotonic() < deadline:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:                       # there is none any more
            break
        if not ended:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.002)
