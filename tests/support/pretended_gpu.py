"""What is under way on a pretended GPU, and what may not be done meanwhile."""

import collections
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import lab


class RuleBroken(Exception):
    """It says which rule, and by what."""


class Disagreement(RuleBroken):
    """Of the ranks, which all raise it together."""


def kind(tensor):
    """The mark: "device", "host", or "pinned", which is the host's too, and known to the device."""
    return getattr(tensor.untyped_storage(), "kind", "host")


def on_gpu(tensor):
    """Whether a tensor is on the pretended device."""
    return kind(tensor) == "device"


NOT_THE_CALLER = f"{Path(__file__).parent}/pretend", str(Path(torch.__file__).parent), *lab.__path__


def caller():
    """The line of a chapter, or of common.py, that came here through PyTorch or lab/."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}"


PATIENCE = 120  # seconds: less than what a test gives the pool, and much on a busy machine


def patiently(done, meanwhile=lambda: None):
    """Whether it gets done in time. meanwhile(): what else may happen, if it takes long."""
    end, pause = time.monotonic() + PATIENCE, 1e-4
    while not done():
        if pause == 5e-3:
            meanwhile()
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    return True


class Ranks:
    """What the ranks announce to each other, in the store through which they have met.

    Under NCCL, ranks that issue different collectives hang, or take each other's bytes. So each
    announces what comes next, and waits for the others of its group: all of them go on, or all
    raise. All raise as well if one has left by an error, or if they wait for each other in several
    groups.
    """

    def __init__(self):
        self.rank, self.all, self.store = 0, [0], None
        self.times = collections.Counter()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.all = dist.get_rank(), list(range(dist.get_world_size()))
            store = dist.distributed_c10d._get_default_store()
            pretence = store.add(f"pretences of {self.rank}", 1)
            self.store = dist.PrefixStore(f"pretence {pretence}", store)

    def place(self, name):
        """What happens again and again gets a name of its own each time, the same on each rank."""
        self.times[name] += 1
        return f"{name}, number {self.times[name]}"

    def announce(self, place, what):
        """Tell the other ranks what this one does there."""
        if self.store:
            self.store.set(f"{place}: {self.rank}", what)

    def announcement(self, place, rank):
        return self.store.get(f"{place}: {rank}").decode()

    def have_announced(self, place, ranks):
        return self.store.check([f"{place}: {rank}" for rank in ranks])

    def compare(self, place, ranks):
        """Raise if what these have announced differs."""
        announced = {rank: self.announcement(place, rank) for rank in ranks if self.store}
        if len(set(announced.values())) > 1:
            raise Disagreement(listed("ranks disagree", announced))

    def wait_for(self, place, ranks):
        """Wait until they have all announced the same."""

        def look_around():
            if self.store.check(["error"]):
                raise Disagreement(self.store.get("error").decode())
            stuck = self.stuck()
            if stuck and stuck == self.stuck():  # both times, so all at one time
                announced = {rank: self.announcement(place, rank) for rank, place in stuck.items()}
                raise Disagreement(listed("ranks wait for each other", announced))

        if self.store:
            self.announce("at", json.dumps([place, ranks]))
            if not patiently(lambda: self.have_announced(place, ranks), look_around):
                alone = self.announcement(place, self.rank)
                raise Disagreement(f"rank {self.rank} is alone at {alone}")
            self.compare(place, ranks)

    def compare_rows(self, place, ranks):
        """Of an all_to_all: raise if one sends more or fewer rows than another expects of it; and
        all raise, since the others would wait for these two."""
        announced = {rank: self.announcement(place, rank) for rank in ranks if self.store}
        sent, received = zip(*map(json.loads, announced.values())) if announced else ((), ())
        if list(zip(*sent)) != list(map(tuple, received)):
            raise Disagreement(listed("ranks disagree on [sent, received] rows", announced))

    def stuck(self):
        """Where each rank waits, if all do: then nobody can come to where another one is."""
        places = {}
        for rank in self.all:
            if not self.have_announced("at", [rank]):
                return None
            place, ranks = json.loads(self.announcement("at", rank))
            if self.have_announced(place, ranks):  # it goes on, or will do so at once
                return None
            places[rank] = place
        return places

    def leave(self):
        self.announce("left", "leaves in peace")
        self.wait_for("left", self.all)

    def leave_by(self, error):
        """All leave together: another rank may still need this one for what both have begun."""
        if self.store:
            what = f"leaves by {type(error).__name__}: {error}"
            if not self.store.check(["error"]):
                self.store.set("error", f"rank {self.rank}: {what}")
            self.announce("left", what)
            patiently(lambda: self.have_announced("left", self.all))


def listed(trouble, announced):
    """One line: the trouble, and what each rank has announced."""
    return "; ".join([trouble, *(f"rank {rank}: {what}" for rank, what in announced.items())])


class Begun(NamedTuple):
    """A copy or collective under way, and the bytes that it reads and writes."""

    what: str
    group: str | None
    reads: list
    writes: list
    meeting: tuple = ()  # of a send or a receive: its place, and the two ranks


class Gpu:
    """What is under way, and when the host waited for the device."""

    def __init__(self):
        self.ranks = Ranks()
        self.device = torch.device("cuda", self.ranks.rank)
        self.collectives, self.copies = {}, []  # Begun, each; of collectives, by their Work
        self.on_host = set()  # names of groups over gloo
        self.streams = [None]  # the last is the current one; None: the main one
        self.steps, self.step = [], None  # None: outside of a step

    def host_waits(self, what):
        """In a step the host should run ahead: while it waits, nobody gives the device its work."""
        if self.step is not None:
            self.step.append(f"{what}, {caller()}")

    def synchronize(self, *device):
        self.host_waits("synchronize")
        self.copies.clear()

    def copied(self, there, here, non_blocking):
        """A copy between host and device: the host waits for it, unless it is told not to and its
        memory is pinned. Then the host must synchronize before it reads what came, or writes to
        what is leaving."""
        if on_gpu(there) == on_gpu(here):
            return
        host = here if on_gpu(there) else there
        if non_blocking and kind(host) == "pinned":
            reads, writes = ([host], []) if on_gpu(there) else ([], [host])
            self.copies.append(Begun("a copy", None, spans(reads), spans(writes)))
        else:
            self.host_waits("a copy to the " + ("device" if on_gpu(there) else "host"))

    def touch(self, what, reads, writes):
        """What is only read, others may read as well; all else would be a race."""
        for begun in (*self.collectives.values(), *self.copies):
            if overlap(begun.writes, reads + writes) or overlap(begun.reads, writes):
                raise RuleBroken(f"race: {what} touches what {begun.what} under way uses")


def spans(some):
    """The bytes of tensors: (storage, first, end) each."""
    ranges = []
    for t in some:
        first = t.storage_offset()
        end = first + 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        if t.numel():
            ranges.append((t.untyped_storage(), first * t.itemsize, end * t.itemsize))
    return ranges


def overlap(some, others):
    """Whether any two ranges share bytes."""
    return any(a._cdata == b._cdata and a_first < b_end and b_first < a_end
               for a, a_first, a_end in some for b, b_first, b_end in others)
