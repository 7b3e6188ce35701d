"""A collective of chapter 00, played on the classroom's network: after each round, what each rank
has; and in each round, who sends what to whom.

A number of x is a row of counts, one for each part of each rank: so a sum of numbers shows what was
added up. x has as many numbers as the collective cuts it into.
"""

import bisect
import itertools
from typing import NamedTuple

import torch

from lab.chapters import chapter, held, room
from lab.run.machines import LATENCY, MACHINES

LETTERS = "abcdefgh"            # of the ranks
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
BEYOND = "2 log2 P + 2", "2 S (P-1)/P + 2 S", "2 S (N-1)"      # doubling, where N is no power of 2
COUNTED = "rounds", "bytes of a message in each, added up", "bytes that all ranks send"
MACHINE, SIZES = "H100, InfiniBand NDR", (10**3, 10**6, 10**9)


def collective(collective, ranks):
    """`states`: before the first round, and after each, what each rank has: rows of texts, x first,
    then what it has gathered beside x; "ab1" is a1+b1, "" nothing. `rounds`: the messages of each,
    see Recording.drawing. `gives`: in which row of each rank the result is, from where to where.
    `costs`: [what, as played, the lesson's formula, its value], in shares of S but for a barrier.
    `takes`: [bytes of x, seconds]."""
    zero = chapter("00")
    function, parts = zero.BY_HAND[collective], parts_of(collective, ranks)
    tensors = torch.eye(ranks * parts, dtype=torch.int16).view(ranks, -1)
    make = RecordedBarrier if collective == "barrier" else Recording
    recording = make(function, ranks, parts)
    simulate = room("00", "simulate")
    with simulate.unwritten_is_seen():
        simulate.play(recording, list(tensors), recording.watch)
    rounds, (_, bandwidth) = recording.rounds(), MACHINES[MACHINE]
    return {
        "collective": collective, "ranks": ranks, "parts": parts,
        "summary": WORDS.get(collective) or first_paragraph(function.__doc__),
        "states": recording.states,
        "rounds": [sorted(map(recording.drawing, messages)) for messages in rounds],
        "gives": [recording.result(zero, collective, rank) for rank in range(ranks)],
        "costs": costs(zero, collective, recording, rounds),
        "machine": [MACHINE, LATENCY[MACHINE], bandwidth],
        "takes": [[size, zero.seconds(collective, ranks, size, LATENCY[MACHINE], bandwidth)]
                  for size in SIZES]}


def first_paragraph(doc):
    return " ".join(doc.split("\n\n")[0].split())


def parts_of(name, ranks):
    """Into how many parts a collective cuts x."""
    if name in WHOLE:
        return 1
    if name == "all_reduce_doubling":
        return 2 ** (ranks.bit_length() - 1)
    return ranks


def costs(zero, name, recording, rounds):
    """What was sent, beside the lesson's formulas and their values."""
    n, x = recording.n, recording.x[0]
    sizes = [[message.size for message in messages] for messages in rounds]
    by_formula = zero.round_bytes(name, n, x.nbytes, recording.width * x.element_size())
    share = 1 if name == "barrier" else x.nbytes
    played = len(sizes), sum(map(max, sizes)) / share, sum(map(sum, sizes)) / share
    values = len(by_formula), sum(by_formula) / share, zero.sent(name, n, x.nbytes) / share
    is_beyond = name == "all_reduce_doubling" and n.bit_count() > 1
    formulas = BEYOND if is_beyond else FORMULAS[name]
    return [list(row) for row in zip(COUNTED, played, formulas, values)]


class Post(NamedTuple):
    """A round of a rank: what it sends to whom, what it receives from whom."""

    send: torch.Tensor | None
    to: int | None
    receive: torch.Tensor | None
    source: int | None


class Recording:
    """A collective that is recorded: simulate.play(recording, tensors, recording.watch).

    The simulation calls it for each rank again and again. nets, x, posts, returned: of each rank's
    last call. states: what each rank has before each round, and in the end. passed: by then, how
    many of its own rounds each rank has been through."""

    def __init__(self, function, n, parts):
        self.function, self.n, self.parts, self.width = function, n, parts, n * parts
        self.nets, self.x, self.posts, self.returned = {}, {}, {}, {}
        self.passed, self.states = [], []

    def __call__(self, net, x):
        posts, exchange, rank = [], net.exchange, net.rank
        self.nets[rank], self.x[rank], self.posts[rank], self.returned[rank] = net, x, posts, None

        def record(send=None, to=None, receive=None, source=None):
            posts.append(Post(send, to, receive, source))
            exchange(send, to, receive, source)

        net.exchange = record
        self.returned[rank] = self.function(net, x)
        return self.returned[rank]

    def watch(self, xs):
        self.passed.append([len(self.nets[rank].arrived) for rank in range(self.n)])
        self.states.append([self.rows(rank) for rank in range(self.n)])

    def rows(self, rank):
        """x, and what the rank has gathered beside x."""
        gathered = self.gathered(rank)
        tensors = [self.x[rank]] if gathered is None else [self.x[rank], gathered]
        return [self.texts(tensor) for tensor in tensors]

    def gathered(self, rank):
        """The memory beside x that has room for more than the message that comes there, or None."""
        for post in self.posts[rank]:
            if post.source is not None and not self.is_in_x(rank, post.receive):
                memory = post.receive.new_empty(0).set_(post.receive.untyped_storage())
                if memory.numel() > post.receive.numel():
                    return memory
        return None

    def is_in_x(self, rank, tensor):
        return tensor.untyped_storage().data_ptr() == self.x[rank].untyped_storage().data_ptr()

    def texts(self, tensor):
        return [self.text(counts) for counts in tensor.view(-1, self.n, self.parts)]

    def text(self, counts):
        """How often each part of each rank is in a number: "ab1" is a1+b1."""
        if int(counts.max()) > self.n:
            return ""                                   # unwritten
        [part] = {part for _, part in counts.nonzero().tolist()}
        letters = "".join(LETTERS[rank] * int(counts[rank, part]) for rank in range(self.n))
        return letters + str(part) * (self.parts > 1)

    def rounds(self):
        """The Messages of each round, as the classroom matches what ranks send and receive."""
        rounds = [[] for _ in self.passed[1:]]
        for message in held("00").messages_of([self.nets[rank].rounds for rank in range(self.n)]):
            passed = [of_ranks[message.receiver] for of_ranks in self.passed[1:]]
            rounds[bisect.bisect_right(passed, message.received_in)].append(message)
        return rounds

    def drawing(self, message):
        """[sender, receiver, what it carries, where that begins in the sender's x, the row of the
        receiver where it goes, and where it begins there]."""
        sender, sent, _, receiver, received = message
        post, send = self.posts[receiver][received], self.posts[sender][sent].send
        first = self.place(send) % self.parts           # of N copies of x, each is x
        row, into = 0, first                            # what is added is added to the same part
        if self.is_in_x(receiver, post.receive):
            into = self.place(post.receive)
        elif self.gathered(receiver) is not None:
            row, into = 1, self.place(post.receive)
        tensor, _ = self.nets[receiver].arrived[received]
        return [sender, receiver, self.texts(tensor), first, row, into]

    def place(self, tensor):
        return tensor.storage_offset() // self.width

    def result(self, zero, name, rank):
        """[row, begin, end] of what the collective gives."""
        if self.returned[rank] is not None:
            return [1, 0, self.returned[rank].numel() // self.width]
        given = zero.given(name, self.x[rank], rank, self.n)
        begin = self.place(given)
        return [0, begin, begin + given.numel() // self.width]


class RecordedBarrier(Recording):
    """A barrier moves no x: a rank has the letters of the ranks that it has heard of."""

    def rows(self, rank):
        return [self.letters(self.nets[rank].heard)]

    def letters(self, heard):
        return [LETTERS[rank] if rank in heard else "" for rank in range(self.n)]

    def drawing(self, message):
        _, heard = self.nets[message.receiver].arrived[message.received_in]
        return [message.sender, message.receiver, self.letters(heard), 0, 0, 0]


def examples():
    """All that can be asked."""
    for name, ranks in itertools.product(chapter("00").BY_HAND, range(2, len(LETTERS) + 1)):
        yield "collective", {"collective": name, "ranks": ranks}
