"""Chapter 00's collectives in one process, for its exercises: what each of N ranks has in the end.

A rank is run up to a message that cannot pass yet. Once all have come so far, the messages pass
whose two ends have both come to them, and all begin anew: what a rank has received before is given
to it again, up to its next message. So ranks need no processes and no threads, and what goes wrong
goes wrong in a line of the student. The network stores nothing (see held.py).

What a rank has is said in the letters of the lesson: rank 0 begins with the parts a0 a1 a2, rank 1
with b0 b1 b2, and their sum is a0+b0.
"""

import contextlib
from types import SimpleNamespace

import torch


class Pause(BaseException):
    """Leaves a rank where it waits. A student's `except Exception` lets it pass."""


class Deadlock(RuntimeError):
    """Ranks wait for each other."""


class Network:
    """What a collective sees: rank, left, exchange and so on, as in the chapter. arrived: for
    each round that has passed, what has come, and of which ranks its sender had heard. heard:
    the ranks of which this one has, itself included. stop: what is raised after these rounds."""

    def __init__(self, rank, ranks, arrived, stop):
        self.rank, self.ranks, self.arrived, self.stop = rank, ranks, arrived, stop
        self.left, self.right = (rank - 1) % ranks, (rank + 1) % ranks
        self.rounds, self.sent, self.heard = [], [], {rank}

    def exchange(self, send=None, to=None, receive=None, source=None):
        for other, does in (to, "sends to"), (source, "receives from"):
            if other == self.rank or other not in (None, *range(self.ranks)):
                raise ValueError(f"rank {self.rank} of {self.ranks} {does} rank {other}")
        self.rounds.append((to, 0 if to is None else send.nbytes, source))
        self.sent.append((None if to is None else send.clone(), set(self.heard)))
        if len(self.rounds) > len(self.arrived):
            raise self.stop
        if source is not None:
            tensor, heard = self.arrived[len(self.rounds) - 1]
            if tensor.nbytes != receive.nbytes:
                raise ValueError(f"rank {source} sends {tensor.nbytes} bytes, and rank {self.rank} "
                                 f"receives {receive.nbytes}")
            receive.copy_(tensor.view(receive.dtype))
            self.heard |= heard

    def sends_to(self, rank):
        """What it has sent to this rank so far, and of whom it had heard before."""
        return [sent for (to, _, _), sent in zip(self.rounds, self.sent) if to == rank]

    def receives_from(self, rank):
        return [source for _, _, source in self.rounds].count(rank)

    def waits_for(self, nets):
        """Who has not come to the other end of its last message yet, in words; "": nobody."""
        to, _, source = self.rounds[-1]
        if to is not None and len(self.sends_to(to)) > nets[to].receives_from(self.rank):
            return f"rank {to} to receive"
        if source is not None and not self.has_come(nets):
            return f"rank {source} to send"
        return ""

    def has_come(self, nets):
        """What it receives in its last round, and of whom the sender had heard; None: nothing."""
        _, _, source = self.rounds[-1]
        sent = nets[source].sends_to(self.rank) if source is not None else []
        which = self.receives_from(source) - 1
        return sent[which] if which < len(sent) else None


def play(function, tensors, watch=lambda xs: None):
    """Call function(net, x) on a rank for each tensor. Returns, of all ranks, x, what was returned,
    and the networks; and how many rounds it took. watch: called before each round, and in the end,
    with the x of all ranks."""
    n, passed = len(tensors), 0
    arrived = [[] for _ in tensors]
    while True:
        nets, xs, results, waiting = [], [], [], []
        for rank, tensor in enumerate(tensors):
            nets.append(Network(rank, n, arrived[rank], Pause()))
            xs.append(tensor.clone())
            try:
                results.append(function(nets[rank], xs[rank]))
            except Pause:
                waiting.append(nets[rank])
        watch(xs)
        if not waiting:
            return xs, results, nets, passed
        ending = [net for net in waiting if not net.waits_for(nets)]
        if not ending:
            said = [f"rank {net.rank} waits for {net.waits_for(nets)}" for net in waiting]
            first = waiting[0].rank
            stop = Deadlock(f"on a network that stores nothing, {', '.join(said)}")
            function(Network(first, n, arrived[first], stop), tensors[first].clone())   # raises it
        for net in ending:
            arrived[net.rank].append(net.has_come(nets))
        passed += 1


# ----------------------------------------------------------------------------------- in the letters

class Letters:
    """Numbers that tell what was added up in them: a digit for each part of each rank."""

    def __init__(self, n):
        self.n, self.base = n, int(2 ** (62 / n**2))    # all digits fit into an int64

    def tensor(self, rank, size):
        """The x of a rank, of so many numbers."""
        x = torch.empty(size, dtype=torch.int64)
        for part, numbers in enumerate(x.tensor_split(self.n)):
            numbers.fill_(self.base ** (rank * self.n + part))
        return x

    def row(self, x, counts):
        """What is in each part: a0, or a0+b0; with a | in between where its numbers differ, and a
        dot where they do not count. counts: a view of what does."""
        parts = [part for part in x.tensor_split(self.n) if part.numel()]
        begin, end = counts.data_ptr(), counts.data_ptr() + counts.nbytes
        return " ".join(self.said(part) if begin <= part.data_ptr() < end else "."
                        for part in parts)

    def said(self, part):
        words = [self.of_number(number) for number in part.flatten().tolist()]
        return " | ".join(word for word, before in zip(words, ["", *words]) if word != before)

    def of_number(self, number):
        if not 0 <= number < self.base ** self.n**2:
            return "unwritten"
        words = []
        for i in range(self.n**2):
            number, times = divmod(number, self.base)
            if times > 2 * self.n:                      # no sum: unwritten, and something added
                return "unwritten"
            if times:
                words.append(f"{times}·" * (times > 1) + "abcdef"[i // self.n] + str(i % self.n))
        return "+".join(words) or "0"


@contextlib.contextmanager
def unwritten_is_seen():
    """Memory that nobody has written to holds one and the same number, which is no sum."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def has(collective, *cases, given=None):
    """What a collective leaves on the ranks, its rounds and its bytes. cases: (ranks, numbers of
    x). given: the chapter's function that names the part of x which counts; None: all of it."""
    found = {}
    for n, size in cases:
        letters, sized = Letters(n), f" ({size} numbers)" * (size % n > 0)
        with unwritten_is_seen():
            tensors = [letters.tensor(rank, size) for rank in range(n)]
            xs, results, nets, passed = play(collective, tensors)
        for rank, (x, result) in enumerate(zip(xs, results)):
            counts = given(collective.__name__, x, rank, n) if given else x
            found[f"x of rank {rank} of {n}{sized}"] = letters.row(x, counts)
            found[f"what rank {rank} of {n}{sized} returns"] = (
                "nothing" if result is None or result is x else letters.row(result, result)
                + f", of shape {tuple(result.shape)}" * (result.dim() > 1))
        found |= costs(f"{n} ranks{sized}", nets, passed)
    return found


def what_is_wrong(collective, as_one, n=3):
    """The first rank that a collective leaves with something else than as_one says (that of
    held.py), in words; "": none."""
    letters, own = Letters(n), torch.eye(n, dtype=torch.int64)
    X = torch.stack([letters.tensor(rank, n) for rank in range(n)])
    right, counts = (as_one(collective.__name__, x, own, own[:, :1])
                     for x in (X, torch.ones_like(X)))
    try:
        with unwritten_is_seen():
            xs, results, _, _ = play(collective, list(X))
    except Exception as error:                          # whatever a student's code raises
        return f"on {n} ranks, {type(error).__name__}: {error}"
    for rank, (x, result) in enumerate(zip(xs, results)):
        x = (x if result is None else result) * (counts[rank] != 0)
        if not torch.equal(x, right[rank]):
            has, should = (letters.row(row, row) for row in (x, right[rank]))
            return f"on {n} ranks, rank {rank} has '{has}', and should have '{should}'"
    return ""


def costs(of_whom, nets, passed):
    return {f"the number of rounds of {of_whom}": passed,
            f"the number of bytes that {of_whom} send": sum(
                size for net in nets for _, size, _ in net.rounds)}


def hears(barrier, *ranks):
    """Of whom each rank has heard, directly or by others, when its barrier ends."""
    found = {}
    for n in ranks:
        _, _, nets, passed = play(barrier, [torch.zeros(n)] * n)
        found |= {f"what rank {net.rank} of {n} has heard of": " ".join(map(str, sorted(net.heard)))
                  for net in nets}
        found |= costs(f"{n} ranks", nets, passed)
    return found


# ----------------------------------------------------------------------- what a round is built from

class NoEnd(RuntimeError):
    """Of a wait that took longer than it may."""


class OfGroup(int):
    """A rank of all, which was asked for by its rank of a group."""


def posts(Network, late=None, patience=0, **message):
    """What Network.exchange asks of torch.distributed, in whose place is one that only takes notes.
    late: "isend" or "irecv", the one that has no end: then, for whom it waits."""
    begun, first = [], "begun before the first wait"
    notes = {first: 0}

    def begin(verb, peer, group, peer_of_group):
        begun.append(verb)
        notes[verb] = f"rank {peer} of all"
        if isinstance(peer, OfGroup):
            notes[verb] = f"rank {peer} of the group"
        if peer_of_group is not None and group is not None:
            notes[verb] = f"rank {peer_of_group} of the group"
        notes[f"the wait for {verb}"] = "none"

        def wait(timeout=None):
            notes[first] = notes[first] or len(begun)
            seconds = f"{timeout.total_seconds():g} seconds" if timeout else "as long as it takes"
            notes[f"the wait for {verb}"] = seconds
            if verb == late:
                raise NoEnd(verb)

        return SimpleNamespace(wait=wait)

    def isend(tensor, dst=None, group=None, tag=0, group_dst=None):
        return begin("isend", dst, group, group_dst)

    def irecv(tensor, src=None, group=None, tag=0, group_src=None):
        return begin("irecv", src, group, group_src)

    def p2p_op(op, tensor, peer=None, group=None, tag=0, group_peer=None):
        return lambda: op(tensor, peer, group, tag, group_peer)

    module = Network.exchange.__globals__
    real = module["dist"]
    stand_ins = dict(
        isend=isend, irecv=irecv, P2POp=p2p_op, batch_isend_irecv=lambda ops: [op() for op in ops],
        send=lambda *args, **more: isend(*args, **more).wait(),
        recv=lambda *args, **more: irecv(*args, **more).wait(),
        get_global_rank=lambda group, rank: OfGroup(rank))
    imported = {name: module[name] for name in stand_ins
                if name in module and module[name] is getattr(real, name)}
    module |= {name: stand_ins[name] for name in imported}
    module["dist"] = SimpleNamespace(**vars(real) | stand_ins)
    try:
        net = Network(SimpleNamespace(rank=lambda: 0, size=lambda: 3), patience)
        net.exchange(**message)
    except NoEnd:
        return {"net.waits_for": net.waits_for}
    finally:
        module |= imported | {"dist": real}
    return notes | {"net.rounds": net.rounds}
