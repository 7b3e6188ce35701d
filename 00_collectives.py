r"""00 · Ranks and collectives: what several processes can do together, built from two verbs.

torchrun starts N copies of this program. Each copy is a rank: a process with its own memory and,
where there are GPUs, its own GPU. In its environment it finds its number, RANK, and N, WORLD_SIZE,
and where rank 0 can be met. `dist.init_process_group("nccl")` makes them a group (`join_ranks` in
common.py): NCCL is NVIDIA's library, between GPUs; "gloo" does the same between CPUs. Now a rank
can send a tensor (isend), or receive one (irecv). Both return a handle at once. Under gloo, wait()
of a handle returns when the tensor is free again, or filled. Under NCCL it returns at once: it is
the GPU's stream that waits, so that kernels launched later find the tensor free, or filled.

A collective is an operation that all ranks call together, each with a tensor x of its own. On N = 3
ranks whose tensors are a, b and c, of three parts each (a is a0 a1 a2):

                       rank 0       rank 1       rank 2
    broadcast          a            a            a            one has it, then all do
    reduce             a+b+c        .            .            all have one, one gets the sum
    scatter            a0           a1           a2           one deals its parts out
    gather             a0 b1 c2     .            .            each has a part, one gets them
    all_gather         a0 b1 c2     a0 b1 c2     a0 b1 c2     each has a part, all get them
    reduce_scatter     a0+b0+c0     a1+b1+c1     a2+b2+c2     each gets its part of the sum
    all_reduce         a+b+c        a+b+c        a+b+c        all get all of the sum
    all_to_all         a0 b0 c0     a1 b1 c1     a2 b2 c2     each has a part for each
    barrier            nobody goes on before all have come

What it costs. A message of m bytes takes α + m/B seconds: a latency α, however small it is, and its
bytes over the bandwidth B. Messages that do not wait for each other travel at the same time, in one
round. So with S bytes of x on N ranks, count the rounds, and add up the bytes of a message in each:

    tree         broadcast, reduce               log2 N rounds       S log2 N bytes
    one by one   scatter, gather                 N-1                 S (N-1)/N
    ring         all_gather, reduce_scatter      N-1                 S (N-1)/N  (all_to_all, too)
    all_reduce   naive: gather all x, broadcast  N-1 + log2 N        S (N-1 + log2 N)
                 tree: reduce, broadcast         2 log2 N            2 S log2 N
                 ring                            2 (N-1)             2 S (N-1)/N
                 halving and doubling            2 log2 N            2 S (N-1)/N  (N: a power of 2)

In a tree, twice as many ranks have it after every round. In a ring all send S/N to the right in
every round, so nobody is idle, and an all_reduce sends less than 2 S, whatever N is. No less will
do, unless switches add (NVLink SHARP): of each number, N-1 messages must go before any rank has its
sum, and N-1 more before all do. That is 2 (N-1)/N · S a rank, and over the time nccl-tests' busbw.

So the ring is right for large tensors, and a tree for small ones: on 16,384 ranks with α = 5 µs, a
ring's 2 (N-1) rounds take 0.16 s for a byte. Halving and doubling is good at both, but sends half
of its bytes N/2 ranks far. Over many machines two are combined: rings in each, a tree over all.

Duality. all_reduce is reduce_scatter, then all_gather. And backward turns a collective into another
one: if y = all_gather(x), the x of a rank is in the y of all, so its gradient is the sum of what
all have for it, a reduce_scatter. So broadcast and reduce are each other's backward, and scatter
and gather; all_to_all is its own, and so is all_reduce.

Run it. In the variants `deadlock`, `order` and `skip` some rank waits for ever. In `sizes` and
`overwrite` nobody waits, and numbers are wrong. In `sums` nothing is wrong but the last bits.
    torchrun --nproc_per_node=8 00_collectives.py --variant hello
    torchrun --nproc_per_node=8 00_collectives.py
    torchrun --nproc_per_node=4 00_collectives.py --variant deadlock
    torchrun --nproc_per_node=8 -m lab.scaling rates                (how fast each all_reduce is)

Sources: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005); Patarasuk, Yuan, Bandwidth Optimal All-reduce Algorithms (2009); Hensgen, Finkel, Manber,
Two Algorithms for Barrier Synchronization (1988); nccl-tests, PERFORMANCE.md; Playbook, A0.
"""

import os
import socket
import time
from collections import namedtuple
from datetime import timedelta

import torch
import torch.distributed as dist

import common

# ------------------------------------------------------------------------------- two verbs, a round

class Network:
    """The ranks of a group, which can send and receive, and nothing else. rounds: of each one that
    this rank takes part in, to whom it sends, how many bytes, and from whom it receives (None:
    nobody). patience: seconds after which a round without end raises RuntimeError; 0: the group's.
    Part r of x, of `x.tensor_split(N)`, is rank r's own: a view, maybe empty. x is flat."""

    def __init__(self, group, patience=0):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.left, self.right = (self.rank - 1) % self.ranks, (self.rank + 1) % self.ranks
        self.patience, self.waits_for, self.rounds = patience, None, []

    def exchange(self, send=None, to=None, receive=None, source=None):
        """A round: send a tensor, receive another, or both at the same time (why: `deadlock`)."""
        operations, words = [], []
        if to is not None:
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
            words.append(f"rank {to} to receive")
        if source is not None:
            operations.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
            words.append(f"rank {source} to send")
        self.rounds.append((to, 0 if to is None else send.nbytes, source))
        handles = dist.batch_isend_irecv(operations)    # gloo: one for each; NCCL: one for both
        for handle in handles:
            self.waits_for = words.pop(0) if len(handles) > 1 else " and ".join(words)
            handle.wait(timedelta(seconds=self.patience))


# ------------------------------------------------------------------ rank 0 has it all, or gets it

def broadcast(net, x):
    """Everyone's x becomes rank 0's. In each round, all that have it send it on: 1, 2, 4, ..."""
    for k in range((net.ranks - 1).bit_length()):       # log2 N, rounded up
        have = 2**k
        if net.rank < have and net.rank + have < net.ranks:
            net.exchange(send=x, to=net.rank + have)
        elif have <= net.rank < 2 * have:
            net.exchange(receive=x, source=net.rank - have)


def reduce(net, x):
    """Rank 0's x becomes the sum of all. The same tree backwards: who was the last to get is the
    first to send. The others' x is left with a part of the sum. Memory: another x."""
    arrived = torch.empty_like(x)
    for k in reversed(range((net.ranks - 1).bit_length())):
        have = 2**k
        if have <= net.rank < 2 * have:
            net.exchange(send=x, to=net.rank - have)
        elif net.rank < have and net.rank + have < net.ranks:
            net.exchange(receive=arrived, source=net.rank + have)
            x += arrived


def scatter(net, x):
    """Part r of rank 0's x becomes part r of rank r's. It sends them one after the other."""
    parts = x.tensor_split(net.ranks)
    if net.rank > 0:
        net.exchange(receive=parts[net.rank], source=0)
    else:
        for rank in range(1, net.ranks):
            net.exchange(send=parts[rank], to=rank)


def gather(net, x):
    """Part r of rank r's x becomes part r of rank 0's."""
    parts = x.tensor_split(net.ranks)
    if net.rank > 0:
        net.exchange(send=parts[net.rank], to=0)
    else:
        for rank in range(1, net.ranks):
            net.exchange(receive=parts[rank], source=rank)


# -------------------------------------------------------------------- all ranks do the same: rings

def all_gather(net, x):
    """Part r of rank r's x becomes part r of everyone's. A rank sends its own to the right, and in
    every later round what has just come from the left."""
    parts = x.tensor_split(net.ranks)
    for hop in range(net.ranks - 1):
        net.exchange(send=parts[(net.rank - hop) % net.ranks], to=net.right,
                     receive=parts[(net.left - hop) % net.ranks], source=net.left)


def reduce_scatter(net, x):
    """Part r of rank r's x becomes the sum of all. It begins at rank r+1 and goes to the right, and
    each rank on the way adds its own. Other parts keep partial sums. Memory: a part.

                   x           after hop 1         after hop 2
        rank 0     1   2   3     1 202   3   111 202   3       the sum of 1, 10 and 100
        rank 1    10  20  30    10  20  33    10 222  33       of 2, 20 and 200
        rank 2   100 200 300   110 200 300   110 200 333       of 3, 30 and 300"""
    parts = x.tensor_split(net.ranks)
    room = torch.empty_like(parts[0])                   # if they differ, the first is the largest
    for hop in range(1, net.ranks):
        mine = parts[(net.left - hop) % net.ranks]      # to which this rank adds what arrives
        arrived = room[:len(mine)]
        net.exchange(send=parts[(net.rank - hop) % net.ranks], to=net.right,
                     receive=arrived, source=net.left)
        mine += arrived


def all_to_all(net, x):
    """Part r of x goes to rank r. Returns what this rank gets, in the order of the senders: N parts
    of the size of its own. In round d, each sends to the rank that is d to the right."""
    parts = x.tensor_split(net.ranks)
    got = x.new_empty(net.ranks, len(parts[net.rank]))
    got[net.rank] = parts[net.rank]
    for distance in range(1, net.ranks):
        to, source = (net.rank + distance) % net.ranks, (net.rank - distance) % net.ranks
        net.exchange(send=parts[to], to=to, receive=got[source], source=source)
    return got.flatten()


def barrier(net, x):
    """Ends on no rank before it has begun on all. In round k, from 0, a rank tells the one 2^k to
    its right that it has come, and so have all of whom it knows: those are 1, 3, 7, ... to its left
    after 1, 2, 3, ... rounds. It sends a byte, not x. (With NCCL streams wait here.)"""
    token = torch.zeros(2, dtype=torch.uint8, device=x.device)
    for k in range((net.ranks - 1).bit_length()):
        net.exchange(send=token[:1], to=(net.rank + 2**k) % net.ranks,
                     receive=token[1:], source=(net.rank - 2**k) % net.ranks)


# ---------------------------------------------------------------------------- all_reduce, four ways

def all_reduce_naive(net, x):
    """Rank 0 gets all, and adds them up in the order of the ranks. Memory: N times x."""
    everyones = x.repeat(net.ranks)                     # each of its N parts is an x
    gather(net, everyones)
    for theirs in everyones.tensor_split(net.ranks)[1:]:
        x += theirs                                     # only rank 0 has theirs, and so the sum
    broadcast(net, x)


def all_reduce_tree(net, x):
    reduce(net, x)
    broadcast(net, x)


def all_reduce_ring(net, x):
    reduce_scatter(net, x)
    all_gather(net, x)


def all_reduce_doubling(net, x):
    """Recursive halving and doubling. Ranks beyond the largest power of 2 first add their x to that
    of a partner, and get the sum in the end. Memory: less than twice x."""
    power = 2 ** (net.ranks.bit_length() - 1)
    if net.rank >= power:
        net.exchange(send=x, to=net.rank - power)
        net.exchange(receive=x, source=net.rank - power)
    elif net.rank + power < net.ranks:
        arrived = torch.empty_like(x)
        net.exchange(receive=arrived, source=net.rank + power)
        x += arrived
        halve_and_double(net, x, power // 2)
        net.exchange(send=x, to=net.rank + power)
    else:
        halve_and_double(net, x, power // 2)


def halve_and_double(net, x, distance):
    """Two ranks swap halves of x, and each adds up one of them. That one it halves again with its
    next partner, until each has a part of the sum. The same swaps backwards make them whole."""
    if distance == 0:
        return
    partner = net.rank ^ distance                       # one bit is another: 0 and 2, 1 and 3
    keep, give = x.tensor_split(2)
    if net.rank > partner:
        keep, give = give, keep
    arrived = torch.empty_like(keep)
    net.exchange(send=give, to=partner, receive=arrived, source=partner)
    keep += arrived
    halve_and_double(net, keep, distance // 2)
    net.exchange(send=keep, to=partner, receive=give, source=partner)


BY_HAND = {function.__name__: function for function in (
    broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_to_all, barrier,
    all_reduce_naive, all_reduce_tree, all_reduce_ring, all_reduce_doubling)}
DUALS = ((broadcast, reduce), (scatter, gather), (all_gather, reduce_scatter),
         (all_to_all, all_to_all), (all_reduce_ring, all_reduce_ring))      # each other's backward

# ------------------------------------------------------------------------------------- the formulas

def round_bytes(name, n, size, width=1):
    """The bytes of the largest message in each round. size: bytes of x; width: of a number."""
    log2 = (n - 1).bit_length()                         # rounded up
    tree, ring = [size] * log2, [size / n] * (n - 1)
    halves = [-(-size // (width * 2**k)) * width for k in range(1, n.bit_length())]
    beyond = [size] * (n < 2**log2)                     # where n is no power of 2
    return {"broadcast": tree, "reduce": tree, "barrier": [1] * log2,
            "all_reduce_naive": [size] * (n - 1) + tree, "all_reduce_tree": tree + tree,
            "all_reduce_ring": ring + ring,
            "all_reduce_doubling": beyond + halves + halves[::-1] + beyond}.get(name, ring)


def seconds(name, n, size, latency, bandwidth):
    """How long a collective takes, by the α-β model."""
    return sum(latency + message / bandwidth for message in round_bytes(name, n, size))


def sent(name, n, size):
    """How many bytes all ranks together send. size: bytes of x."""
    if name == "barrier":
        return n * (n - 1).bit_length()
    if name in ("scatter", "gather"):
        return (n - 1) * size // n
    return (2 if name.startswith("all_reduce") else 1) * (n - 1) * size


def by_torch(name, x):
    """What PyTorch's own collective makes of x, whose parts must be of one size there."""
    rank, n, y = dist.get_rank(), dist.get_world_size(), x.clone()
    parts, outputs = x.tensor_split(n), list(y.tensor_split(n))
    calls = {"broadcast": lambda: dist.broadcast(y, 0), "reduce": lambda: dist.reduce(y, 0),
             "scatter": lambda: dist.scatter(outputs[rank], list(parts) if rank == 0 else None),
             "gather": lambda: dist.gather(parts[rank], outputs if rank == 0 else None),
             "all_gather": lambda: common.all_gather(y, parts[rank]),
             "reduce_scatter": lambda: common.reduce_scatter(outputs[rank], x),
             "all_to_all": lambda: dist.all_to_all_single(y, x), "barrier": dist.barrier}
    calls.get(name, lambda: dist.all_reduce(y))()
    return y


# ---------------------------------------------------------------------------------- what goes wrong

def deadlock(net, x):
    """All send to the right, and only then receive. gloo stores nothing on the way, so that a send
    ends when its receive has begun, and all wait in a circle. (NCCL may store a small message.)"""
    net.exchange(send=x, to=net.right)
    net.exchange(receive=x, source=net.left)


def order(net, x):
    """The last rank calls reduce before broadcast. Messages have no names: who waits for one knows
    only from whom. (Of two rings, nobody would wait, and sums would be wrong.)"""
    for collective in (reduce, broadcast) if net.rank == net.ranks - 1 else (broadcast, reduce):
        collective(net, x)


def skip(net, x):
    """The last rank has nothing to add, and leaves the all_reduce out."""
    if net.rank < net.ranks - 1:
        all_reduce_ring(net, x)


def sizes(net, x):
    """The last rank has a longer tensor: gloo fills its beginning, NCCL demands equal sizes."""
    x = torch.full([len(x) + 2 * (net.rank == net.ranks - 1)], float(net.rank))
    broadcast(net, x)
    return f"has {x.tolist()} after a broadcast of zeros" if x.any() else ""


def overwrite(net, x):
    """Rank 0 sends ones to rank 1, and sets them to zero before the send has ended."""
    if net.rank == 0:
        handle = dist.isend(x, group=net.group, group_dst=1)
        x.zero_()
        handle.wait()
    if net.rank == 1:
        time.sleep(0.2)                                 # it comes to its receive a little late
        net.exchange(receive=x, source=0)
    return f"has got {x.tolist()}, and ones were sent" if net.rank == 1 and not x.all() else ""


FAULTS = {fault.__name__: fault for fault in (deadlock, order, skip, sizes, overwrite)}

def go_wrong(run):
    """Commit a fault, on CPUs, and say who waits for whom once nobody has moved for two seconds."""
    fault, aside = FAULTS[run.args.variant], dist.new_group(backend="gloo")
    net = Network(dist.new_group(backend="gloo"), patience=2)
    try:
        said = fault(net, torch.ones(3)) or "has come to its end"
    except RuntimeError:                                # of a round that has no end
        said = f"waits for {net.waits_for}"
    everyones = [None] * run.world
    dist.all_gather_object(everyones, said, group=aside)
    why = " ".join(fault.__doc__.split())
    return [why, "; ".join(f"rank {rank} {said}" for rank, said in enumerate(everyones))]


# ----------------------------------------------------------------------------------------- the runs

def hello(run):
    """Who is there. Each rank has a line of its own, and rank 0 gets them all."""
    line = (f"rank {run.rank} of {run.world}: process {os.getpid()} on {socket.gethostname()}, "
            f"tensors on {run.device}, sent over {dist.get_backend()}")
    everyones = [None] * run.world
    dist.all_gather_object(everyones, line)
    return everyones


Found = namedtuple("Found", "name rounds equal")        # equal: to what PyTorch's own gives


def given(name, x, rank, n):
    """The part of a rank's tensor that a collective gives it."""
    if name in ("reduce", "gather"):
        return x if rank == 0 else x[:0]
    return x.tensor_split(n)[rank] if name in ("scatter", "reduce_scatter") else x


def collectives(run):
    """All of them, on whole numbers so small that a sum of N is exact. Returns a list of Found."""
    n, found, own = run.world, [], torch.Generator().manual_seed(1000 * run.args.seed + run.rank)
    most = int(2 / torch.finfo(run.dtype).eps) // n     # up to 2 / eps, none is rounded
    x = torch.randint(-most, most + 1, [n * run.args.numbers], generator=own)
    x = x.to(run.device, run.dtype)
    for name, by_hand in BY_HAND.items():
        net, y = Network(dist.group.WORLD), x.clone()
        result = by_hand(net, y)
        y = y if result is None else result
        pair = [given(name, tensor, run.rank, n) for tensor in (y, by_torch(name, x))]
        found.append(Found(name, net.rounds, torch.equal(*pair)))
    return found


def sums(run):
    """A float32 sum depends on its order. Each all_reduce has one of its own: none is wrong, and
    each gives the same bits in every run, but others on another number of ranks."""
    own, lines, fixed = torch.Generator().manual_seed(12 + run.rank), [], None
    x = torch.randn(1000, generator=own).to(run.device)
    for name in ("naive", "naive", "tree", "ring", "doubling"):
        y = x.clone()
        BY_HAND[f"all_reduce_{name}"](Network(dist.group.WORLD), y)
        fixed = y if fixed is None else fixed
        lines.append(f"{name:10}the first of 1000 sums is {y[0]:.9f}; {(y != fixed).sum():3} are "
                     f"not those of naive, by {(y - fixed).abs().max():.0e} at most")
    return [" ".join(sums.__doc__.split()), *lines]


def formulas(args, rank, ranks, model):
    """{collective: (bytes of the largest message in each round, bytes that all ranks send)}."""
    width = common.DTYPES[args.dtype].itemsize
    size = ranks * args.numbers * width
    return {"network": Network, "by_hand": BY_HAND, "duals": DUALS, "collectives": {
        one: (round_bytes(one, ranks, size, width), sent(one, ranks, size)) for one in BY_HAND}}


def flags(parser):
    parser.add_argument("--numbers", type=int, default=1000, help="in a part of a rank's tensor")


def requires(args, ranks):
    least = {"collectives": 1, "hello": 1, "sums": 3}.get(args.variant, 2)
    if ranks < least:
        raise common.Refused(f"{args.variant} needs {least} ranks", f"--nproc_per_node {least}")


VARIANTS = {"collectives": (collectives, "--numbers", "--dtype", "--seed", "--plot"),
            "hello": hello, "sums": sums, **dict.fromkeys(FAULTS, go_wrong)}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
