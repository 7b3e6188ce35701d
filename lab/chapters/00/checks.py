"""Checks of chapter 00: every collective, on a network in one process and on ranks."""

from functools import partial
from itertools import product
from unittest import mock

import torch

from lab import chapters
from lab.chapters.checking import random

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
        is_own, first = torch.zeros(net.ranks, len(x), dtype=x.dtype), x.new_zeros(net.ranks, 1)
        first[0] = 1
        for rank, row in enumerate(is_own):
            row.tensor_split(net.ranks)[rank].fill_(1)
        x.copy_(as_one(name, everyones(net, x, net.ranks), is_own, first)[net.rank])

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
    parts = "broadcast", "reduce", "gather", "reduce_scatter", "all_gather"
    return x_of_each(chapter, cases, ("all_reduce_naive", "all_reduce_tree", "all_reduce_ring"),
                     {name: in_place_of(name) for name in parts})


def x_of_doubling(chapter, *cases):
    return x_of_each(chapter, cases, ("all_reduce_doubling",), {"halve_and_double": sum_of_first})


def has_of_halves(chapter, *cases):
    """With all ranks, as all_reduce_doubling begins it."""

    def halve_and_double(net, x):
        chapter.halve_and_double(net, x, net.ranks // 2)

    return simulate.has(halve_and_double, *cases)


def who_has_heard_of_whom(chapter):
    return simulate.hears(chapter.barrier, 3, 4, 5, 6, 2, 1)


def devices_of_a_barrier(chapter):
    """Where what is sent lies, if x lies on PyTorch's device without memory."""
    _, _, nets, _ = simulate.play(chapter.barrier, [torch.zeros(3, device="meta")] * 3)
    return {f"from rank {net.rank}": [str(sent.device) for sent, _ in net.sent] for net in nets}


def of_each_collective(chapter, formula, *more):
    """A formula's value for all of them, with 120 bytes in a part."""
    return {f"{name} on {n} ranks": getattr(chapter, formula)(name, n, 120 * n, *more)
            for n, name in product((3, 4, 5, 6, 8, 1), chapter.BY_HAND)}
