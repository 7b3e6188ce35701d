"""A collective of chapter 00, played on the classroom's network: after each round, what each rank
has; and in each, who sends what to whom.

    /api/collective?collective=all_reduce_ring&ranks=4

A number of x is a row of counts, one for each part of each rank: a sum of such rows tells what was
added up, whatever the number of ranks. (The classroom's Letters are digits of one number, which has
room for 5 ranks.) x has as many numbers as the collective cuts it into.
"""

import itertools
import threading
from typing import NamedTuple

import torch

from lab.chapters import chapter, room
from lab.run.machines import LATENCY, MACHINES
from lab.site.parameters import known, one_of, whole

LETTERS = "abcdefgh"
RANKS = 2, len(LETTERS)
WHOLE = "broadcast", "reduce", "all_reduce_naive", "all_reduce_tree"    # these never cut x
WORDS = {               # of those whose code is their docstring
    "all_reduce_tree": "A reduce, then a broadcast.",
    "all_reduce_ring": "A reduce_scatter, then an all_gather."}
TREE = "log2 N", "S log2 N", "S (N-1)"
ONE_BY_ONE = "N-1", "S (N-1)/N", "S (N-1)/N"
RING = "N-1", "S (N-1)/N", "S (N-1)"
FORMULAS = {            # the lesson's: rounds, bytes of a message in each, bytes sent by all ranks
    "broadcast": TREE, "reduce": TREE, "scatter": ONE_BY_ONE, "gather": ONE_BY_ONE,
    "all_gather": RING, "reduce_scatter": RING, "all_to_all": RING,
    "barrier": ("log2 N", "log2 N", "N log2 N"),        # a byte each
    "all_reduce_naive": ("N-1 + log2 N", "S (N-1 + log2 N)", "2 S (N-1)"),
    "all_reduce_tree": ("2 log2 N", "2 S log2 N", "2 S (N-1)"),
    "all_reduce_ring": ("2 (N-1)", "2 S (N-1)/N", "2 S (N-1)"),
    "all_reduce_doubling": ("2 log2 N", "2 S (N-1)/N", "2 S (N-1)")}
COUNTED = "rounds", "bytes of a message in each, added up", "bytes that all ranks send"
BEYOND = "2 log2 P + 2", "2 S (P-1)/P + 2 S", "2 S (N-1)"      # doubling, where N is no power of 2
PLAYING = threading.Lock()
MACHINE, SIZES = "H100, InfiniBand NDR", (10**3, 10**6, 10**9)



def collective(asked):
    """`states`: before the first round, and after each, what each rank has: rows of texts, x first,
    then what it has gathered beside x; "ab1" is a1+b1, "" nothing. `rounds`: the messages of each,
    see Film.message. `gives`: the row of each rank in which the result is, and from where to where.
    `costs`: [what, as played, the lesson's formula, its value], in shares of S but for a barrier.
    `takes`: [bytes of x, seconds]."""
    known(asked, "collective", "ranks")
    zero = chapter("00")
    name = one_of(asked, "collective", "all_reduce_ring", zero.BY_HAND)
    n, function = whole(asked, "ranks", 4, *RANKS), zero.BY_HAND[name]
    parts = 1 if name in WHOLE else 2**(n.bit_length() - 1) if name == "all_reduce_doubling" else n
    begins = torch.eye(n * parts, dtype=torch.int16).view(n, -1)
    film = (Heard if name == "barrier" else Film)(function, n, parts)
    simulate = room("00", "simulate")
    with PLAYING, simulate.unwritten_is_seen():         # which is a state of all threads
        simulate.play(film, list(begins), film.watch)
    rounds = [film.messages(i) for i in range(len(film.states) - 1)]
    bandwidth, latency = MACHINES[MACHINE][1], LATENCY[MACHINE]
    return {
        "collective": name, "ranks": n, "parts": parts,
        "says": WORDS.get(name) or " ".join(function.__doc__.split("\n\n")[0].split()),
        "states": film.states, "rounds": rounds,
        "gives": [film.gives(zero, name, rank) for rank in range(n)],
        "costs": costs(zero, name, n, film), "machine": [MACHINE, latency, bandwidth],
        "takes": [[size, zero.seconds(name, n, size, latency, bandwidth)] for size in SIZES]}


def costs(zero, name, n, film):
    """What the lesson's formulas say, beside what was sent."""
    size, number = film.x[0].nbytes, film.width * film.x[0].element_size()
    sizes = [[film.nets[rank].rounds[at][1] for rank, at in film.sends(i)]
             for i in range(len(film.states) - 1)]
    by_formula, share = zero.round_bytes(name, n, size, number), 1 if name == "barrier" else size
    played = (len(sizes), sum(map(max, sizes)) / share, sum(map(sum, sizes)) / share)
    found = len(by_formula), sum(by_formula) / share, zero.sent(name, n, size) / share
    is_beyond = name == "all_reduce_doubling" and n.bit_count() > 1
    return [[*row] for row in zip(COUNTED, played, BEYOND if is_beyond else FORMULAS[name], found)]


class Post(NamedTuple):
    """A round of a rank: what it sends to whom, what it receives from whom."""

    send: torch.Tensor | None
    to: int | None
    receive: torch.Tensor | None
    source: int | None


class Film:
    """A collective that is watched: simulate.play(film, tensors, film.watch). Of each rank, as it
    was called last: its network, x, posts, and what it returned. Before each round, and in the end:
    how many of its own each rank has been through, and what it has."""

    def __init__(self, function, n, parts):
        self.function, self.n, self.parts, self.width = function, n, parts, n * parts
        self.nets, self.x, self.posts, self.returned = {}, {}, {}, {}
        self.through, self.states = [], []

    def __call__(self, net, x):
        posts, exchange, rank = [], net.exchange, net.rank
        self.nets[rank], self.x[rank], self.posts[rank], self.returned[rank] = net, x, posts, None

        def noted(send=None, to=None, receive=None, source=None):
            posts.append(Post(send, to, receive, source))
            exchange(send, to, receive, source)

        net.exchange = noted
        self.returned[rank] = self.function(net, x)
        return self.returned[rank]

    def watch(self, xs):
        self.through.append([len(self.nets[rank].arrived) for rank in range(self.n)])
        self.states.append([self.has(rank) for rank in range(self.n)])

    def has(self, rank):
        """Rows: x, and what it has gathered beside x."""
        gathered = self.gathers(rank)
        return [self.said(self.x[rank])] + ([] if gathered is None else [self.said(gathered)])

    def gathers(self, rank):
        """The memory beside x that has room for more than the message that comes there, or None."""
        for post in self.posts[rank]:
            if post.source is not None and not self.is_in_x(rank, post.receive):
                memory = post.receive.new_empty(0).set_(post.receive.untyped_storage())
                if memory.numel() > post.receive.numel():
                    return memory
        return None

    def is_in_x(self, rank, tensor):
        return tensor.untyped_storage().data_ptr() == self.x[rank].untyped_storage().data_ptr()

    def said(self, tensor):
        return [self.number(counts) for counts in tensor.view(-1, self.n, self.parts)]

    def number(self, counts):
        """How often each part of each rank is in it: "ab1", a1+b1."""
        if int(counts.max()) > self.n:
            return ""                                   # unwritten
        [part] = {part for _, part in counts.nonzero().tolist()}
        letters = "".join(LETTERS[rank] * int(counts[rank, part]) for rank in range(self.n))
        return letters + str(part) * (self.parts > 1)

    # ------------------------------------------------------------------- of a round that has passed

    def receives(self, i):
        """(rank, which of its own rounds), of all to whom something comes in this one."""
        return [(rank, at) for rank, at in enumerate(self.through[i])
                if at < self.through[i + 1][rank] and self.posts[rank][at].source is not None]

    def sends(self, i):
        """The same of those who send it: what is the k-th from them is the k-th to them."""
        found = []
        for rank, at in self.receives(i):
            source = self.posts[rank][at].source
            k = [post.source for post in self.posts[rank][:at]].count(source)
            mine = [at for at, post in enumerate(self.posts[source]) if post.to == rank]
            found.append((source, mine[k]))
        return found

    def messages(self, i):
        return sorted(self.message(*sent, *received) for sent, received
                      in zip(self.sends(i), self.receives(i)))

    def message(self, sender, sent, receiver, received):
        """[sender, receiver, what it carries, where that begins in the sender's x, the row of the
        receiver where it goes, and where it begins there]."""
        post, send = self.posts[receiver][received], self.posts[sender][sent].send
        first = self.place(send) % self.parts           # of N copies of x, each is x
        row, into = 0, first                            # what is added is added to the same part
        if self.is_in_x(receiver, post.receive):
            into = self.place(post.receive)
        elif self.gathers(receiver) is not None:
            row, into = 1, self.place(post.receive)
        return [sender, receiver, self.said(self.nets[receiver].arrived[received][0]), first, row,
                into]

    def place(self, tensor):
        return tensor.storage_offset() // self.width

    def gives(self, zero, name, rank):
        """[row, begin, end] of the result."""
        if self.returned[rank] is not None:
            return [1, 0, self.returned[rank].numel() // self.width]
        given = zero.given(name, self.x[rank], rank, self.n)
        begin = self.place(given)
        return [0, begin, begin + given.numel() // self.width]


class Heard(Film):
    """A barrier, which moves no x: a rank has the letters of those of whom it has heard."""

    def has(self, rank):
        return [self.letters(self.nets[rank].heard)]

    def letters(self, heard):
        return [LETTERS[rank] if rank in heard else "" for rank in range(self.n)]

    def message(self, sender, sent, receiver, received):
        _, heard = self.nets[receiver].arrived[received]
        return [sender, receiver, self.letters(heard), 0, 0, 0]


def examples():
    """All there are."""
    for name, n in itertools.product(chapter("00").BY_HAND, range(RANKS[0], RANKS[1] + 1)):
        yield "collective", {"collective": name, "ranks": str(n)}
