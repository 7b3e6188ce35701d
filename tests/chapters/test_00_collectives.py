"""Chapter 00: every collective by hand gives what it should, in its formulas' rounds and bytes."""

import itertools
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lab.chapters import held
from tests.conftest import FULL, chapter, sample

ZERO = "00_collectives"
WORLDS = 3, 4, 1, 2, 8, 5, 6, 7
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.uint8
SUMS = "reduce", "reduce_scatter", "all_reduce"  # and all else only moves


@pytest.fixture(scope="module")
def zero():
    return chapter(ZERO)


# ------------------------------------------------------------------------------- what is right


def drawn(n, size, dtype, whole=True):
    """The x of each rank, the same on all of them. whole: numbers whose sums are exact."""
    generator = torch.Generator().manual_seed(size)
    if whole:
        return torch.randint(0, 10, (n, size), generator=generator).to(dtype)
    return torch.randn(n, size, generator=generator, dtype=torch.float64).to(dtype)


def right(name, X, rank):
    """What a rank has of x afterwards, with what it is given; and whether only that counts."""
    n, x, total = len(X), X[rank].clone(), X.sum(0, dtype=torch.float64).to(X.dtype)
    parts = [row.tensor_split(n) for row in X]
    owns = torch.cat([parts[r][r] for r in range(n)])
    if name == "broadcast":
        return X[0]
    if name == "scatter":
        x.tensor_split(n)[rank].copy_(parts[0][rank])
    if name == "gather" and rank == 0 or name == "all_gather":
        return owns
    if name == "reduce_scatter":
        return total.tensor_split(n)[rank]  # others keep partial sums
    if name == "reduce" and rank > 0:
        return total[:0]  # as they do here
    if name == "all_to_all":
        return torch.cat([parts[r][rank] for r in range(n)])
    return total if name.startswith(SUMS) else x


class Allocated(TorchDispatchMode):
    """The bytes of all tensors that are made and are no views."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage()._cdata not in known:
            self.bytes += result.untyped_storage().nbytes()
        return result


def memory(name, x, rank, n):
    """The most bytes that the docstrings allow beyond x; of halves, one of two may be larger."""
    size, parts = x.nbytes, [part.nbytes for part in x.tensor_split(n)]
    return {"reduce": size, "reduce_scatter": parts[0], "all_to_all": n * parts[rank], "barrier": 2,
            "all_reduce_naive": n * size, "all_reduce_tree": size,
            "all_reduce_ring": parts[0],
            "all_reduce_doubling": 2 * size + 3 * x.itemsize}.get(name, 0)  # fmt: skip


PAD = 3  # numbers on both sides of x that belong to somebody else


def played(settings, members=None):
    """For a rank of the pool: what was wrong, and the rounds, of each collective in each setting
    (size, dtype, whether of whole numbers). members: a group of some ranks."""
    zero, wrong, rounds = chapter(ZERO), [], []
    group = dist.group.WORLD if members is None else dist.new_group(members)
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        return wrong, rounds
    n, rank = group.size(), group.rank()
    for (size, dtype, whole), name in itertools.product(settings, zero.BY_HAND):
        X, net = drawn(n, size, dtype, whole), zero.Network(group)
        buffer = torch.full([size + 2 * PAD], 77, dtype=dtype)
        x = buffer[PAD : PAD + size].copy_(X[rank])
        with Allocated() as allocated:
            result = zero.BY_HAND[name](net, x)
        case = f"{name} on {n} ranks, {size} of {dtype}: "
        if not (buffer[:PAD] == 77).all() or not (buffer[PAD + size :] == 77).all():
            wrong.append(f"{case}it has written beyond x")
        if allocated.bytes > memory(name, x, rank, n):
            wrong.append(f"{case}it has taken {allocated.bytes} bytes")
        if (name == "all_to_all") != torch.is_tensor(result):
            wrong.append(f"{case}it returns {result}")
        if name == "all_to_all" and not torch.equal(x, X[rank]):
            wrong.append(f"{case}x has changed")
        got, expected = x if result is None else result, right(name, X, rank)
        if name == "reduce_scatter":
            got = x.tensor_split(n)[rank]
        if name == "reduce" and rank > 0:
            got = x[:0]
        rounding = 0 if whole or not name.startswith(SUMS) else 4 * n * torch.finfo(dtype).eps
        if not torch.allclose(got, expected, rounding, rounding):
            wrong.append(f"{case}rank {rank} has {got.tolist()}, not {expected.tolist()}")
        rounds.append(net.rounds)
    return wrong, rounds


def settings(n):
    """(size, dtype, whether of whole numbers): each size in one dtype, or in FULL in all of them.

    The sizes: fewer than ranks, no multiple of the ranks, and a large multiple.
    """
    sizes = n - 1, 2 * n + 1, 1200 * n
    if FULL:
        return [*itertools.product((*sizes, 0, 1, 8 * n), DTYPES, (True,)),
                *itertools.product(sizes, DTYPES[:3], (False,))]
    return [*((size, DTYPES[(i + n) % 5], True) for i, size in enumerate(sizes)),
            (3 * n + 1, DTYPES[n % 3], False)]


@pytest.mark.parametrize("n", sample(WORLDS, size=5))
def test_every_collective(ranks, zero, n):
    """Its result, what it leaves alone, the memory it takes, and its rounds and bytes."""
    found = ranks(n)(played, settings(n))
    wrong = [line for lines, _ in found for line in lines]
    assert not wrong, "\n".join(wrong)
    cases = itertools.product(settings(n), zero.BY_HAND)
    for ((numbers, dtype, _), name), *everyones in zip(cases, *(rounds for _, rounds in found)):
        size, passed = numbers * dtype.itemsize, held("00").in_rounds(everyones)
        formula = zero.round_bytes(name, n, size, dtype.itemsize)
        assert len(passed) == len(formula), name
        if numbers % n == 0 or name not in ("scatter", "gather"):
            sent = sum(size for messages in passed for _, _, size in messages)
            assert sent == zero.sent(name, n, size), name
        if numbers % n == 0:
            assert [max(size for *_, size in messages) for messages in passed] == formula, name


def test_a_group_of_some_ranks(ranks):
    """Who are other numbers in it than in the world."""
    found = ranks(5)(played, [(7, torch.float32, False)], [1, 2, 4])
    assert not any(wrong for wrong, _ in found), found
    assert [len(rounds) for _, rounds in found] == [0, 12, 12, 0, 12]


def test_a_round_of_one_handle_names_both_for_whom_it_waits(zero, monkeypatch):
    """NCCL gives one for all that a batch begins, gloo one for each."""
    waits = {"one": [], "each": []}

    def network(which, handles):
        net = zero.Network(mock.Mock(rank=lambda: 0, size=lambda: 3), patience=2)
        handle = mock.Mock(wait=lambda timeout: waits[which].append((net.waits_for, timeout)))
        monkeypatch.setattr(dist, "P2POp", mock.Mock())
        monkeypatch.setattr(dist, "batch_isend_irecv", lambda operations: handles * [handle])
        return net

    x = torch.zeros(2)
    network("one", 1).exchange(x, 1, x, 2)
    network("each", 2).exchange(x, 1, x, 2)
    send, receive, seconds = "rank 1 to receive", "rank 2 to send", timedelta(seconds=2)
    assert waits == {"one": [(f"{send} and {receive}", seconds)],
                     "each": [(send, seconds), (receive, seconds)]}  # fmt: skip


def test_the_costs_of_eight_ranks(zero):
    """In rounds, where only latency counts, and in bytes, where only bandwidth does."""
    size = 8e6
    for name, rounds, in_a_row in (
        ("broadcast", 3, 3 * size), ("barrier", 3, 3), ("all_gather", 7, 7 / 8 * size),
        ("all_reduce_naive", 7 + 3, (7 + 3) * size), ("all_reduce_tree", 6, 6 * size),
        ("all_reduce_ring", 14, 14 / 8 * size), ("all_reduce_doubling", 6, 14 / 8 * size),
    ):  # fmt: skip
        assert zero.seconds(name, 8, size, 1, float("inf")) == rounds, name
        assert zero.seconds(name, 8, size, 0, 1) == pytest.approx(in_a_row), name
