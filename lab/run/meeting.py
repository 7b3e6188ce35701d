"""How a rank that is lost is named.

Ranks wait for each other in every collective, so one that is lost ends all of them. But the error
that they get does not say who that was:

    it has died     its connections close, and so do those of the ranks that end because of it
    it hangs        the collective takes longer than the timeout, on all ranks that wait for it

So each rank learns at the start which processes the others are. When a connection is closed, it
looks which processes of its machine have ended. A rank that hangs, or has died on another machine,
is found over the store, a server of keys and values that torchrun keeps (or rank 0, where there is
no torchrun): whoever waits leaves a note there, and those without a note are lost. It asks 2
seconds later, since others may begin to wait a little later.

Whoever is the first to know says it, in one line; the store tells the others that it is said.
After that torchrun ends those that are left, by SIGTERM, and lists the rank that has died first.
"""

import os
import signal
import socket
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

try:
    import psutil
except ImportError:                                         # then the store alone finds the lost
    psutil = None

import common
from common import Refused, environment
from lab.run.refusals import fail, say

LOST = "by peer", "Broken pipe", "remote process"       # gloo's words, and NCCL's, for a lost rank
LATE = "imed out", "timeout"
USUAL = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout


def set_timeout(seconds):
    """Let nothing that is sent in a group made from now on take longer, nor a collective of a group
    that is there; None: PyTorch's own timeout. (What is sent from one rank to another keeps the
    timeout with which gloo has made the group.)"""
    wanted = [timedelta(seconds=seconds)] * 2 if seconds else USUAL
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = wanted
    for group in list(c10d._world.pg_map) if seconds else []:
        c10d._set_pg_timeout(wanted[0], group)


def join(args):
    """Make the group of all ranks that a launcher has started.

    Where torchrun has started the ranks of one machine again, the store in which they meet still
    has the addresses of the dead ones. So each attempt has names of its own."""
    if "RANK" not in os.environ or dist.is_initialized():
        return
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=c10d.default_pg_timeout))
    except ValueError as error:                             # a variable is missing
        fail(f"{error}; torchrun sets it")
    is_one_machine = environment("LOCAL_WORLD_SIZE", 0) == world
    attempt = environment("TORCHELASTIC_RESTART_COUNT", 0) if is_one_machine else 0
    backend, device = "gloo", None
    if common.on_cuda(args):
        backend, device = "nccl", torch.device("cuda", environment("LOCAL_RANK", rank))
    dist.init_process_group(backend, store=dist.PrefixStore(f"attempt {attempt}", store), rank=rank,
                            world_size=world, device_id=device)


def named(ranks):
    """`rank 2`, or `ranks 1, 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# ------------------------------------------------------------------------------------ one is lost

def have_ended(ranks):
    return f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} ended"


def has_ended(pid):
    """A zombie has, too: its parent has not asked for its status yet."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


class Watch:
    """Knows the other ranks of a run, and says why this one ends early, unless another has said it.
    Communication: an all_gather_object."""

    PATIENCE = 2        # seconds after which all who wait for the lost rank are waiting

    def __init__(self, run):
        self.run, self.spoken, self.sigterm = run, False, None
        everyones, machine = [None] * run.world, socket.gethostname()
        dist.all_gather_object(everyones, (machine, os.getpid()))
        self.processes = {rank: pid for rank, (its_machine, pid) in enumerate(everyones)
                          if psutil and its_machine == machine and rank != run.rank
                          and not has_ended(pid)}
        # Names of this run's own, where a launcher starts ranks again.
        self.store = dist.PrefixStore(f"run of {everyones[0]}", c10d._get_default_store())
        if run.args.save and threading.current_thread() is threading.main_thread():
            self.sigterm = Sigterm()

    def is_told_to_end(self):
        return bool(self.sigterm and self.sigterm.came)

    def ended(self):
        """The ranks of this machine whose processes have."""
        return [rank for rank, pid in self.processes.items() if has_ended(pid)]

    def ended_within(self, seconds):
        """The same, as soon as there is one; or none."""
        deadline = time.monotonic() + seconds
        while not (ended := self.ended()) and time.monotonic() < deadline:
            time.sleep(0.005)
        return ended

    def let_go(self):
        """From here on, others may end, and the store with rank 0."""
        self.processes, self.store = {}, dist.HashStore()

    def stop(self):
        """More than once does no harm."""
        if self.sigterm:
            self.sigterm.put_back()

    def speak(self, line):
        """Print it unless another rank has spoken. None: this one has said enough."""
        if not self.spoken and self.is_first() and line:
            say(line)
        self.spoken = True

    def is_first(self):
        """Whether no other rank has spoken yet, as far as the store can tell."""
        try:
            return self.store.add("has spoken", 1) == 1
        except RuntimeError:                                # it has ended with its process
            return True

    def leave(self, error):
        """Before this rank ends because of it: what is there to say? Raises what is to follow in
        place of the error, which is for those that have no line of their own."""
        try:
            if isinstance(error, (SystemExit, Refused)):    # which say why
                self.speak(None)
            elif isinstance(error, KeyboardInterrupt):
                raise error
            elif isinstance(error, RuntimeError) and self.run.world > 1:
                self.name_the_lost(error, self.run.at)
        except KeyboardInterrupt:
            self.speak(f"interrupted {self.run.so_far}")
            raise KeyboardInterrupt("and has said so") from None
        finally:
            self.stop()

    def name_the_lost(self, error, at):
        """If the error says that this rank has waited for others too long, or that a connection is
        closed. That is gloo's way: NCCL's watchdog thread, after the same timeout, prints which
        collective had no end, and kills the process."""
        late, closed = (any(words in str(error) for words in kind) for kind in (LATE, LOST))
        if not late and not closed:
            return
        ended, lost = self.ended_within(0.1), []            # it closes them just before it ends
        try:
            if not ended:
                self.store.set(f"waits {self.run.rank}", str(late))
                ended = self.ended_within(self.PATIENCE)
            if not ended:
                lost, late = self.who_does_not_wait()
        except RuntimeError:                                # of rank 0, which kept the store
            lost = [0]
        if not ended and not lost:
            self.speak(None)
            time.sleep(0.5)                                 # others are about to find the same
            raise RuntimeError(f"{at}: each rank waits for another, and none is lost. "
                               "Do all call the same collectives in the same order?") from error
        if ended or not late and len(lost) == 1:
            what = have_ended(ended or lost)
        elif late:
            seconds = int(c10d.default_pg_timeout.total_seconds())
            what = f"{named(lost)} did not answer within {seconds} s"
        else:                                               # one may wait for another that asks
            what = f"of {named(lost)}, at least one has ended"
        self.speak(f"{at}: {what}")
        raise SystemExit(1)

    def who_does_not_wait(self):
        """And whether that is since somebody has waited too long."""
        waiting = [rank for rank in range(self.run.world) if self.store.check([f"waits {rank}"])]
        late = any(self.store.get(f"waits {rank}") == b"True" for rank in waiting)
        return sorted(set(range(self.run.world)) - set(waiting)), late


class Sigterm:
    """Notes that SIGTERM has come, for the run to save and end after its step. A second one ends
    the process at once, also where it waits for another rank: Python's own handlers would wait with
    it, so a thread reads what the signal writes into a pipe."""

    SAME = 2        # seconds: Slurm sends it to all processes, and torchrun once more to its ranks

    def __init__(self):
        self.came, (self.reads, self.writes) = None, os.pipe()
        os.set_blocking(self.writes, False)
        self.handler = signal.signal(signal.SIGTERM, lambda *signal_and_frame: None)
        self.other = signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        """In a thread: read the signals that have come."""
        while number := os.read(self.reads, 1):
            now = time.monotonic()
            if number[0] != signal.SIGTERM:
                continue
            self.came = self.came or now
            if now > self.came + self.SAME:
                os._exit(128 + signal.SIGTERM)
        os.close(self.reads)

    def put_back(self):
        """What was before; more than once does no harm."""
        if self.writes is not None:
            signal.signal(signal.SIGTERM, self.handler or signal.SIG_DFL)
            signal.set_wakeup_fd(self.other)
            os.close(self.writes)                           # the thread reads that nothing follows
            self.writes = None
