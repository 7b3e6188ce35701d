"""The exercises of chapter 00: every collective, on a network in one process and on ranks."""

from functools import partial
from unittest import mock

import torch

from lab import chapters
from lab.classroom.exercise import Exercise, Run, Same, random

simulate, as_one = chapters.room("00", "simulate"), chapters.held("00").as_one

# (how many ranks, numbers of each one's tensor): with parts of one size; of more than one, or none.
EVEN = (3, 6), (4, 4)
UNEVEN = (4, 6), (5, 3), (6, 2), (2, 0), (1, 2)
MANY = *UNEVEN, (9, 1)
LETTERS = "in the letters of the lesson"


def posts_of_rounds(chapter):
    """What is asked of dist in a round, where all goes well and where it has no end."""
    send, receive = {"send": random(4), "to": 1}, {"receive": random(2), "source": 2}
    posts = partial(simulate.posts, chapter.Network)
    return {"a send and a receive": posts(None, 2, **send, **receive),
            "a send alone": posts(**send),
            "a receive alone": posts(**receive),
            "a send without end": posts("isend", 2, **send, **receive),
            "a receive without end": posts("irecv", 2, **send, **receive)}


def has(chapter, cases, name):
    """What each rank has after a collective."""
    return simulate.has(getattr(chapter, name), *cases)


def has_what_counts(chapter, cases, name):
    """The same of one that may leave something else in the rest of x."""
    return simulate.has(getattr(chapter, name), *cases, given=chapter.given)


def each_has(chapter, cases, *names):
    return {name: has(chapter, cases, name) for name in names}


def everyones(net, x, first):
    """The x of the first ranks: each two of them swap theirs."""
    xs = [torch.empty_like(x) for _ in range(first)]
    xs[net.rank] = x.clone()
    for one in range(first):
        for other in range(one):
            if net.rank in (one, other):
                theirs = one + other - net.rank
                net.exchange(xs[net.rank], theirs, xs[theirs], theirs)
    return torch.stack(xs)


def in_place_of(name):
    """A collective for checks of what is made of it, so that its own exercise may be open."""

    def collective(net, x):
        own, first = torch.zeros(net.ranks, len(x), dtype=x.dtype), x.new_zeros(net.ranks, 1)
        first[0] = 1
        for rank, row in enumerate(own):
            row.tensor_split(net.ranks)[rank].fill_(1)
        x.copy_(as_one(name, everyones(net, x, net.ranks), own, first)[net.rank])

    return collective


def sum_of_first(net, x, distance):
    """In place of halve_and_double."""
    x.copy_(everyones(net, x, max(1, 2 * distance)).sum(0))


def x_of_each(chapter, cases, names, stand_ins):
    """What is in x after collectives that are made of others, whatever their rounds."""
    with mock.patch.multiple(chapter, **stand_ins):
        return {name: {key: value for key, value in has(chapter, cases, name).items()
                       if key.startswith("x of")} for name in names}


def x_of_sums(chapter, *cases):
    those = "broadcast", "reduce", "gather", "reduce_scatter", "all_gather"
    return x_of_each(chapter, cases, ("all_reduce_naive", "all_reduce_tree", "all_reduce_ring"),
                     {name: in_place_of(name) for name in those})


def x_of_doubling(chapter, *cases):
    return x_of_each(chapter, cases, ("all_reduce_doubling",), {"halve_and_double": sum_of_first})


def has_of_halves(chapter, *cases):
    halve = lambda net, x: chapter.halve_and_double(net, x, net.ranks // 2)
    return simulate.has(halve, *cases)


def who_has_heard_of_whom(chapter):
    return simulate.hears(chapter.barrier, 3, 4, 5, 6, 2, 1)


def devices_of_a_barrier(chapter):
    """Where what is sent lies, if x lies on PyTorch's device without memory."""
    _, _, nets, _ = simulate.play(chapter.barrier, [torch.zeros(3, device="meta")] * 3)
    return {f"from rank {net.rank}": [str(sent.device) for sent, _ in net.sent] for net in nets}


def of_each_collective(chapter, formula, *more):
    """A formula's value for all of them, with 120 bytes in a part."""
    return {f"{name} on {n} ranks": getattr(chapter, formula)(name, n, 120 * n, *more)
            for n in (3, 4, 5, 6, 8, 1) for name in chapter.BY_HAND}


EXERCISES = [
    Exercise(
        "00.1", "Network.exchange", 1,
        "Send a tensor, receive one, or both at the same time, over self.group, and wait until "
        "that has ended, for each no longer than self.patience seconds (0: as long as it "
        "takes). Note the round in self.rounds, and before each wait in self.waits_for whose "
        "part it is: \"rank 1 to receive\", or \"rank 2 to send\".",
        ("Two ranks send to each other. If each of them waits for its send before it begins to "
         "receive, what do the two sends wait for?",
         "Make a list of dist.P2POp, of dist.isend and dist.irecv, with group= and "
         "group_peer=. dist.batch_isend_irecv begins all of them and gives a handle for each "
         "(NCCL's gives one for all): only then wait. A round is (to, bytes, source); without "
         "a send that is None and 0 bytes."),
        (Same(posts_of_rounds, "what a round asks of dist"),
         Run(3)),
    ),
    Exercise(
        "00.2", "broadcast", 2,
        "Everyone's x becomes rank 0's. In each round every rank that has it sends it to one "
        "that has it not, so that log2 N rounds, rounded up, are enough for any N.",
        ("After k rounds 2**k ranks have it. If these are ranks 0 to 2**k - 1, to whom does "
         "each of them send it next, and which of them to nobody?",
         "With have = 2**k: a rank below `have` sends to rank + have, if that is below N; a "
         "rank from `have` up to 2 have - 1 receives from rank - have; the others do nothing "
         "in this round. (N-1).bit_length() is log2 N, rounded up."),
        (Same(has, LETTERS, (EVEN, "broadcast")),
         Same(has, LETTERS, (MANY, "broadcast")), Run(5)),
    ),
    Exercise(
        "00.3", "reduce", 2,
        "Rank 0's x becomes the sum of all, in as many rounds as a broadcast has, and with "
        "memory for one more x. The others may be left with a part of the sum.",
        ("A film of the broadcast, run backwards: who sends first, and who has to wait with "
         "sending until it has received?",
         "The same ranks as in broadcast, from the last round to the first, and each message "
         "the other way: who got x sends it, and who sent it receives into another tensor, "
         "which is added to x in place."),
        (Same(has_what_counts, LETTERS, (EVEN, "reduce")),
         Same(has_what_counts, LETTERS, (MANY, "reduce")), Run(5)),
    ),
    Exercise(
        "00.4", "scatter gather", 1,
        "`scatter`: everyone's own part of x becomes rank 0's. `gather`: each part of rank 0's "
        "x becomes that of the rank whose own part it is. Rank 0 sends, or receives, one part "
        "after the other.",
        ("A part is a view into x. Where do you receive it, so that nothing is left to copy?",
         "x.tensor_split(N) gives the parts, also where N does not divide x. In scatter, rank "
         "0 sends part r to rank r, which receives it into its own part r; in gather the other "
         "way round."),
        (Same(each_has, LETTERS, (EVEN, "scatter", "gather")),
         Same(each_has, LETTERS, (UNEVEN, "scatter", "gather")), Run(3)),
    ),
    Exercise(
        "00.5", "all_gather", 2,
        "Each part of everyone's x becomes that of the rank whose own part it is. In a ring: "
        "in each of N-1 rounds every rank sends one part to its right and receives one from "
        "its left, rank + 1 and rank - 1.",
        ("In the first round you send your own part. Which one do you send in the second "
         "round, so that it comes all the way around?",
         "What came in one round is sent in the next. So in round `hop`, from 0, a rank sends "
         "part rank - hop and receives part rank - 1 - hop, all modulo N, in one exchange."),
        (Same(has, LETTERS, (EVEN, "all_gather")),
         Same(has, LETTERS, (UNEVEN, "all_gather")), Run(5)),
    ),
    Exercise(
        "00.6", "reduce_scatter", 2,
        "Everyone's own part of x becomes the sum of all. In a ring of N-1 rounds: a partial "
        "sum goes to the right, and each rank adds its own numbers to it. It takes memory for "
        "one more part, and may leave partial sums in the other parts.",
        ("The sum of part r is to end at rank r, after N-1 hops to the right, and each rank on "
         "the way adds its numbers. At which rank does it begin, and so which part does a rank "
         "send in the first round?",
         "It begins at rank r + 1. So in round `hop`, from 1, a rank sends part rank - hop, "
         "and what it receives is for part rank - 1 - hop, modulo N: it is received into a "
         "tensor of that part's size, and added in place. Parts are not all of one size."),
        (Same(has_what_counts, LETTERS, (EVEN, "reduce_scatter")),
         Same(has_what_counts, LETTERS, (UNEVEN, "reduce_scatter")), Run(5)),
    ),
    Exercise(
        "00.7", "all_to_all", 2,
        "Part r of x goes to rank r. Return what this rank gets, in the order of the senders, "
        "in a tensor of its own; x stays as it was. In N-1 rounds each rank sends one part and "
        "receives one.",
        ("If all send to rank 0 first, it is busy and the others wait. How do you pick whom to "
         "send to, so that in each round every rank gets one part?",
         "In round d, from 1, a rank sends to rank + d and receives from rank - d, modulo N. "
         "What comes has the size of its own part, whoever it is from. Its own part it "
         "copies."),
        (Same(has, LETTERS, (EVEN, "all_to_all")),
         Same(has, LETTERS, (UNEVEN, "all_to_all")), Run(3)),
    ),
    Exercise(
        "00.8", "barrier", 2,
        "A barrier ends on no rank before it has begun on all. In log2 N rounds, rounded up, "
        "each rank sends one byte on x's device to another one, and so tells what it has heard "
        "of.",
        ("Who has heard of the rank to its left tells that to the right. How many have you "
         "heard of after two rounds, and from how far away must the next byte come to double "
         "that?",
         "In round k, from 0, a rank sends to rank + 2**k and receives from rank - 2**k, "
         "modulo N, in one exchange, from and into different bytes of dtype torch.uint8."),
        (Same(who_has_heard_of_whom, "who has heard of whom"),
         Same(devices_of_a_barrier, "where the bytes are, if x is on the device meta"), Run(5)),
    ),
    Exercise(
        "00.9", "all_reduce_naive all_reduce_tree all_reduce_ring", 1,
        "Everyone's x becomes the sum of all, three times. Naive: rank 0 gathers all, adds "
        "them up in the order of the ranks, and broadcasts. Tree and ring: two of the "
        "collectives above, one after the other.",
        ("What has each rank after a reduce_scatter, and which collective begins with that?",
         "Tree: reduce, broadcast. Ring: reduce_scatter, all_gather. Naive: gather needs a "
         "tensor of N parts, each as large as x, in which a rank's own part is its x; rank 0's "
         "own x is the first addend already."),
        (Same(x_of_sums, LETTERS, EVEN), Same(x_of_sums, LETTERS, UNEVEN), Run(5)),
        "all_reduce: naive, tree and ring",
    ),
    Exercise(
        "00.10", "all_reduce_doubling", 2,
        "Let halve_and_double do it among the first ranks, as many as the largest power of 2. "
        "Each rank beyond first adds its x to that of a partner among them, and gets the sum "
        "in the end.",
        ("With 6 ranks there are 2 beyond. Who are their partners, and who has none?",
         "With power = 2**k <= N, rank r's partner is r + power, if there is such a rank. "
         "halve_and_double(net, x, power // 2) is called by the first `power` ranks alone, "
         "between the two messages."),
        (Same(x_of_doubling, LETTERS, EVEN), Same(x_of_doubling, LETTERS, UNEVEN), Run(6)),
    ),
    Exercise(
        "00.11", "halve_and_double", 3,
        "Swap halves of x with the rank `distance` away, so that each of the two has the sum "
        "of both for one half; do the same with that half, at half the distance, until the "
        "distance is 0. Then the same swaps backwards, of sums.",
        ("Between the swap of addends and the swap of sums, whose turn is it? And which half "
         "does the rank with the higher number keep?",
         "The partner is rank ^ distance. Split x in two views, `keep` and `give`, the other "
         "way round on the higher of the two. Swap `give` for an addend of `keep`; call "
         "halve_and_double on `keep`; swap `keep` for `give`. At distance 0 there is nothing "
         "to do."),
        (Same(has_of_halves, LETTERS, ((2, 4), (4, 8))),
         Same(has_of_halves, LETTERS, ((4, 6), (4, 3), (2, 1), (1, 2))), Run(6)),
    ),
    Exercise(
        "00.12", "round_bytes seconds sent", 2,
        "`round_bytes`: the bytes of the largest message in each round of a collective on n "
        "ranks. `seconds`: what it takes by the α-β model, in which rounds follow one another. "
        "`sent`: the bytes that all ranks together send.",
        ("The lesson has a table of the rounds and of the bytes in a row. Which collectives "
         "send all of x in every round, which a part, and which another half each time?",
         "Tree: log2 N rounds, rounded up, of `size` bytes. Ring, scatter, gather and "
         "all_to_all: N-1 rounds of size / N. Naive: gathers whole x. Doubling: size/2, "
         "size/4, ... and back (of numbers of `width` bytes, the larger half), with one more "
         "round of `size` before and after where N is no power of 2. For `sent`, count how often a "
         "number leaves a rank."),
        (Same(of_each_collective, "the bytes of each round", ("round_bytes",)),
         Same(of_each_collective, "the bytes of each round, of numbers of 4 bytes",
              ("round_bytes", 4)),
         Same(of_each_collective, "seconds, of 120 bytes a part, 5 µs and 1 GB/s",
              ("seconds", 5e-6, 1e9)),
         Same(of_each_collective, "sent, of 120 bytes a part", ("sent",)), Run(6)),
        "rounds, bytes and seconds",
    ),
]
