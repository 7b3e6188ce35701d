"""Chapter 00: every collective by hand gives what it should, in its formulas' rounds and bytes."""

import itertools
import json
import re
import signal
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lab.bench import runs
from lab.bench.collectives import in_rounds
from lab.classroom import simulate
from tests.conftest import CHAPTERS, ROOT, chapter, run_main
from tests.support import programs

ZERO = "00_collectives"
WORLDS = 1, 2, 3, 4, 5, 6, 7, 8
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


def sizes(n):
    """No number, one, fewer than ranks, no multiple of them, and two multiples."""
    return 0, 1, n - 1, 2 * n + 1, 8 * n, 1200 * n


def settings(n):
    """Each size with a dtype, another one for each number of ranks; and floats that are not whole,
    with as many dtypes."""
    for i, size in enumerate(sizes(n)):
        yield size, DTYPES[(i + n) % 5], True
    yield 3 * n + 1, DTYPES[n % 3], False


def every_setting(n):
    yield from itertools.product(sizes(n), DTYPES, (True,))
    yield from itertools.product(sizes(n), DTYPES[:3], (False,))


@pytest.mark.parametrize(("n", "settings"), [
    *[pytest.param(n, settings, id=f"{n}") for n in WORLDS],
    *[pytest.param(n, every_setting, id=f"{n}, all", marks=pytest.mark.full) for n in WORLDS],
])  # fmt: skip
def test_every_collective(ranks, zero, n, settings):
    """What it gives, what it leaves alone, what it takes; its rounds and bytes; and that it has an
    end on a network that stores nothing."""
    found = ranks(n)(played, list(settings(n)))
    assert not any(wrong for wrong, _ in found), "\n".join(sum((wrong for wrong, _ in found), []))
    cases = itertools.product(settings(n), zero.BY_HAND)
    for ((numbers, dtype, _), name), *everyones in zip(cases, *(rounds for _, rounds in found)):
        size, passed = numbers * dtype.itemsize, in_rounds(everyones)
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


def test_the_worked_reduce_scatter_is_what_it_does(zero):
    rows = re.findall(r"rank \d +((?:\d+ +){8}\d+)", zero.reduce_scatter.__doc__)
    numbers = torch.tensor([[int(number) for number in row.split()] for row in rows])
    states = []
    simulate.play(zero.reduce_scatter, list(numbers[:, :3]), states.append)
    assert torch.cat([torch.stack(state) for state in states], dim=1).equal(numbers)
    of_a_part = re.findall(r"of (\d+), (\d+) and (\d+)", zero.reduce_scatter.__doc__)
    assert [[int(number) for number in part] for part in of_a_part] == numbers[:, :3].T.tolist()
    assert [sum(part) for part in numbers[:, :3].T.tolist()] == numbers[:, 6:].diag().tolist()


def test_parts_may_be_empty_and_of_two_sizes():
    assert [len(part) for part in torch.empty(5).tensor_split(3)] == [2, 2, 1]
    assert [len(part) for part in torch.empty(1).tensor_split(3)] == [1, 0, 0]


# ------------------------------------------------------------------------------- the formulas


def test_the_costs_are_those_of_the_lesson(zero):
    """Of 8 ranks, and of 16,384 on which a single byte goes around."""
    size, n, log2 = 8e6, 8, 3
    for name, rounds, in_a_row in (
        ("broadcast", log2, size * log2), ("reduce", log2, size * log2), ("barrier", log2, 3),
        *((name, n - 1, size * 7 / 8) for name in ("all_gather", "reduce_scatter", "scatter",
                                                   "gather", "all_to_all")),
        ("all_reduce_naive", n - 1 + log2, size * (n - 1 + log2)),
        ("all_reduce_tree", 2 * log2, 2 * size * log2),
        ("all_reduce_ring", 2 * (n - 1), 2 * size * 7 / 8),
        ("all_reduce_doubling", 2 * log2, 2 * size * 7 / 8),
    ):  # fmt: skip
        assert zero.seconds(name, n, size, 1, float("inf")) == rounds, name
        assert zero.seconds(name, n, size, 0, 1) == pytest.approx(in_a_row), name
    many = {name: zero.seconds(f"all_reduce_{name}", 2**14, 1, 5e-6, 50e9)
            for name in ("ring", "tree", "doubling")}  # fmt: skip
    assert many["ring"] == pytest.approx(0.16, abs=0.005)
    assert many["tree"] == pytest.approx(28 * 5e-6, rel=1e-3)
    assert many["tree"] == pytest.approx(many["doubling"], rel=1e-3)


def test_no_all_reduce_sends_less_than_the_ring(zero):
    for n in WORLDS:
        least = 2 * (n - 1) * 120
        assert zero.sent("all_reduce_ring", n, 120) == least
        assert all(zero.sent(name, n, 120) >= least for name in zero.BY_HAND if "all_red" in name)


# ------------------------------------------------------------------------------- the run


def hold_run(record, n, numbers, dtype):
    assert record["world_size"] == n and not record["problems"] and not record["diagnosis"]
    names = set(chapter(ZERO).BY_HAND)
    checked = {check["name"].split(", ")[0] for check in record["checks"]}
    assert checked == set(record["recorded"]["messages"]) == names
    assert len(record["checks"]) == 4 * len(names) + 8 + 1  # duals, and a barrier's own
    assert all(check["ok"] for check in record["checks"])
    size = numbers * n * getattr(torch, dtype).itemsize
    ring = record["recorded"]["messages"]["all_reduce_ring"]
    assert len(ring) == 2 * (n - 1)
    assert all(message == [r, (r + 1) % n, size // n]
               for messages in ring for r, message in enumerate(messages))  # fmt: skip


@pytest.mark.parametrize(("n", "numbers", "dtype"), [
    (1, 5, "float32"), (3, 0, "float64"), (4, 1, "bfloat16"), (5, 7, "float32"),
    pytest.param(8, 1000, "bfloat16", marks=pytest.mark.full)])  # fmt: skip
def test_a_run_finds_them_equal_to_pytorchs(ranks, tmp_path, n, numbers, dtype):
    flags = f"--numbers={numbers}", f"--dtype={dtype}", f"--seed={n}"
    (status, record, output), *others = ranks(n)(run_main, ZERO, flags, tmp_path)
    assert status == 0 and "✗" not in output and output.count("✓") == 12, output
    assert all(other == (0, None, "") for other in others)
    hold_run(record, n, numbers, dtype)
    assert record["dtype"] == dtype and record["config"]["numbers"] == numbers
    first, second, _, broadcast, *_ = output.splitlines()
    ranks_of_it = "1 rank" if n == 1 else f"{n} ranks"
    assert first.startswith(f"00 collectives · collectives · {ranks_of_it} · cpu, gloo (")
    assert f"{n * numbers:,} numbers" in second and broadcast.endswith("reduce          ✓")


FAULTS = {  # in the chapter, found by a run of 4 ranks: who is wrong, and what is said of it
    "broadcast backwards": (
        "            net.exchange(send=x, to=net.rank + have)\n        elif have <=",
        "            net.exchange(send=x.flip(0), to=net.rank + have)\n        elif have <=",
        "broadcast, ranks with what PyTorch's gives: measured 2, formula 4",
        "broadcast: other numbers than PyTorch's on ranks 1 and 2; on 4 ranks, rank 1 has 'a3"),
    "reduce adds twice": (
        "            x += arrived\n\n\ndef scatter",
        "            x += 2 * arrived\n\n\ndef scatter",
        "reduce, ranks with what PyTorch's gives: measured 3, formula 4",
        "reduce: other numbers than PyTorch's on rank 0; on 4 ranks, rank 0 has 'a0+2·b0+2·c0+4·d"),
    "reduce rounds to 16 bits": (
        "            x += arrived\n\n\ndef scatter",
        "            x += arrived if x.dtype == torch.int64 else arrived.bfloat16()\n\n\n"
        "def scatter",
        "reduce, ranks with what PyTorch's gives: measured 3, formula 4",
        "reduce: other numbers than PyTorch's on rank 0"),
    "scatter to the next": (
        "            net.exchange(send=parts[rank], to=rank)",
        "            net.exchange(send=parts[rank - 1], to=rank)",
        "scatter, ranks with what PyTorch's gives: measured 1, formula 4",
        "rank 1 has '0 a0 0 0', and should have '0 a1 0 0'"),
    "gather into the next": (
        "            net.exchange(receive=parts[rank], source=rank)",
        "            net.exchange(receive=parts[(rank + 1) % net.ranks], source=rank)",
        "gather, ranks with what PyTorch's gives: measured 3, formula 4",
        "rank 0 has 'd3 a1 b1 c2', and should have 'a0 b1 c2 d3'"),
    "all_gather passes its own on": (
        "send=parts[(net.rank - hop) % net.ranks], to=net.right,\n"
        "                     receive=parts[",
        "send=parts[net.rank], to=net.right,\n"
        "                     receive=parts[",
        "all_gather, ranks with what PyTorch's gives: measured 0, formula 4",
        "all_gather: other numbers than PyTorch's; on 4 ranks, rank 0 has 'a0 d3 d3 d3', and sh"),
    "all_gather goes on": (
        "    for hop in range(net.ranks - 1)", "    for hop in range(net.ranks)",
        "all_gather, rounds: measured 4, formula 3",
        "all_gather: 4 rounds, 192 B, and by the formulas 3, 144 B; ranks 0, 1, 2, 3 send 4 mes"),
    "reduce_scatter overwrites": (
        "        mine += arrived", "        mine.copy_(arrived)",
        "reduce_scatter, ranks with what PyTorch's gives: measured 0, formula 4",
        "rank 0 has 'b0 0 0 0', and should have 'a0+b0+c0+d0 0 0 0'"),
    "all_to_all keeps another's part": (
        "    got[net.rank] = parts[net.rank]\n", "    got[net.rank] = parts[net.right]\n",
        "all_to_all, ranks with what PyTorch's gives: measured 0, formula 4",
        "rank 0 has 'a1 b0 c0 d0', and should have 'a0 b0 c0 d0'"),
    "a barrier of neighbours": (
        "to=(net.rank + 2**k) % net.ranks,\n"
        "                     receive=token[1:], source=(net.rank - 2**k)",
        "to=(net.rank + 1) % net.ranks,\n"
        "                     receive=token[1:], source=(net.rank - 1)",
        "barrier, ranks that have heard of all: measured 0, formula 4",
        "barrier: rank 0 goes on, and has not heard of rank 1, which may not have come"),
    "naive forgets its own": (
        "    for theirs in everyones", "    x.zero_()\n    for theirs in everyones",
        "all_reduce_naive, ranks with what PyTorch's gives: measured 0, formula 4",
        "all_reduce_naive: other numbers than PyTorch's; on 4 ranks, rank 0 has 'b0+c0+d0 b1+c1"),
    "halves are not swapped": (
        "        keep, give = give, keep\n", "        pass\n",
        "all_reduce_doubling, ranks with what PyTorch's gives: measured 0, formula 4",
        "rank 0 has 'a0+b1+c2+d3 "),
    "rounds that a network without memory does not end": (  # though gloo has begun both at once
        "    net.exchange(send=give, to=partner, receive=arrived, source=partner)\n",
        "    net.exchange(send=give, to=partner, receive=arrived, source=partner)\n"
        "    net.rounds[-1:] = [(partner, give.nbytes, None), (None, 0, partner)]\n",
        "all_reduce_doubling: on a network that stores nothing, rank 0 waits for rank 2 to receive",
        "rank 1 waits for rank 3 to receive, rank 2 waits for rank 0 to receive, rank 3 waits for"),
    "another dual": (
        "DUALS = ((broadcast, reduce), (scatter, gather),",
        "DUALS = ((broadcast, gather), (scatter, reduce),",
        "broadcast, ranks where gather is its backward: measured 3, formula 4",
        "broadcast: gather does not give its gradient on rank 0"),
    "a formula for fewer ranks": (
        "    return (2 if name.startswith(\"all_reduce\") else 1) * (n - 1) * size",
        "    return (2 if name.startswith(\"all_reduce\") else 1) * (n - 2) * size",
        "all_reduce_doubling, bytes sent by all ranks: measured 288, formula 192",
        "broadcast: 2 rounds, 144 B, and by the formulas 2, 96 B; rank 0 sends 2 messages, 96 B in "
        "all; rank 1 sends 1 message, 48 B in all; ranks 2, 3 send 0 messages, 0 B in all"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_and_told(ranks, tmp_path, fault):
    *fault, problem, told = FAULTS[fault]
    (status, record, output), *_ = ranks(4)(run_main, ZERO, ["--numbers=3"], tmp_path, fault)
    assert status == 1 and any(problem in line for line in record["problems"]), output
    [diagnosis] = record["diagnosis"]
    assert told in diagnosis and f"  → {diagnosis}" in output.splitlines(), diagnosis


def test_the_sum_of_floats_depends_on_the_order(ranks, tmp_path):
    """Naive has its bits again, and no other way has them."""
    flags = ["--variant=sums"]
    for n in (3, 8):
        (status, record, output), *_ = ranks(n)(run_main, ZERO, flags, tmp_path)
        found = re.findall(r"^  (\w+) +the first .* is (-?\d\.\d{9}); +(\d+) .* by (\S+) at most$",
                           output, re.MULTILINE)  # fmt: skip
        assert status == 0 and [name for name, *_ in found] == [
            "naive", "naive", "tree", "ring", "doubling"], output  # fmt: skip
        others = [int(number) for _, _, number, _ in found]
        assert others[:2] == [0, 0] and all(others[2:])
        assert all(float(off) < 2e-6 for *_, off in found)


# ------------------------------------------------------------------------------- as a program


def test_hello_is_the_first_thing_that_a_newcomer_runs(tmp_path):
    statuses, output, errors = programs.run(CHAPTERS / f"{ZERO}.py", "--variant=hello", world=2,
                                            cwd=tmp_path)  # fmt: skip
    assert (statuses, errors) == ([0, 0], "")
    first, *lines = output.splitlines()
    assert first.startswith("00 collectives · hello · 2 ranks · ")
    said = [re.fullmatch(r"  rank (\d) of 2: process (\d+) on \S+, tensors on (\S+), sent over "
                         r"(\w+)", line).groups() for line in lines]  # fmt: skip
    assert [rank for rank, *_ in said] == ["0", "1"] and said[0][1] != said[1][1]


def test_as_a_reader_would(tmp_path):
    statuses, output, errors = programs.run(CHAPTERS / f"{ZERO}.py", "--json=run.json", world=2,
                                            cwd=tmp_path)  # fmt: skip
    assert (statuses, errors) == ([0, 0], "") and output.count("✓") == 12, output + errors
    hold_run(json.loads((tmp_path / "run.json").read_text()), 2, 1000, "float32")


END = "has come to its end"
WRONG = {  # what goes wrong on so many ranks, and who is said to wait for whom
    ("deadlock", 2): "rank 0 waits for rank 1 to receive; rank 1 waits for rank 0 to receive",
    ("deadlock", 3): "rank 0 waits for rank 1 to receive; rank 1 waits for rank 2 to receive; "
                     "rank 2 waits for rank 0 to receive",
    ("order", 2): "rank 0 waits for rank 1 to receive; rank 1 waits for rank 0 to receive",
    ("order", 4): "rank 0 waits for rank 1 to send; rank 1 waits for rank 3 to receive; "
                  f"rank 2 {END}; rank 3 waits for rank 1 to receive",
    ("skip", 2): f"rank 0 waits for rank 1 to receive; rank 1 {END}",
    ("skip", 3): "rank 0 waits for rank 2 to send; rank 1 waits for rank 2 to receive; "
                 f"rank 2 {END}",
    ("sizes", 2): f"rank 0 {END}; rank 1 has [0.0, 0.0, 0.0, 1.0, 1.0] after a broadcast of zeros",
    ("sizes", 3): f"rank 0 {END}; rank 1 {END}; "
                  "rank 2 has [0.0, 0.0, 0.0, 2.0, 2.0] after a broadcast of zeros",
    ("overwrite", 2): f"rank 0 {END}; rank 1 has got [0.0, 0.0, 0.0], and ones were sent",
    ("overwrite", 4): f"rank 0 {END}; rank 1 has got [0.0, 0.0, 0.0], and ones were sent; "
                      f"rank 2 {END}; rank 3 {END}",
}  # fmt: skip
QUICK = ("deadlock", 2), ("order", 4), ("skip", 3), ("sizes", 3), ("overwrite", 2)


@pytest.mark.parametrize(("fault", "n"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full) for case in WRONG])
def test_what_goes_wrong_ends_by_itself_and_names_who_waits(tmp_path, fault, n):
    start = time.monotonic()
    statuses, output, errors = programs.run(CHAPTERS / f"{ZERO}.py", f"--variant={fault}", world=n,
                                            cwd=tmp_path)  # fmt: skip
    assert time.monotonic() - start < 10 and errors == "" and statuses == [0] * n
    first, why, waits = output.splitlines()
    assert first.startswith(f"00 collectives · {fault} · {n} ranks · ")
    assert why.strip() == " ".join(chapter(ZERO).FAULTS[fault].__doc__.split())
    assert waits.strip() == WRONG[fault, n]


def faulty(folder, right, wrong):
    """A copy of the chapter with a fault, beside our common.py and lab/."""
    source = (CHAPTERS / f"{ZERO}.py").read_text()
    assert source.count(right) == 1
    (folder / f"{ZERO}.py").write_text(source.replace(right, wrong))
    for name in "common.py", "lab":
        (folder / name).symlink_to(ROOT / name)
    return folder / f"{ZERO}.py"


def test_a_run_that_waits_for_ever_ends_after_its_timeout(tmp_path):
    """On this network as on one that stores nothing."""
    path = faulty(
        tmp_path,
        "    net.exchange(send=give, to=partner, receive=arrived, source=partner)",
        "    net.exchange(send=give, to=partner)\n"
        "    net.exchange(receive=arrived, source=partner)",
    )
    statuses, _, errors = programs.run(path, "--timeout=2", world=2, cwd=tmp_path)
    assert statuses == [1, 1] and "collectives: each rank waits for another" in errors, errors


DIES = "    if net.rank == 2:\n        import os, signal\n        os.kill(os.getpid(), signal.{})\n"


@pytest.mark.parametrize(("how", "line"), [
    ("SIGKILL", "error: collectives: rank 2 has ended\n"),
    ("SIGSTOP", "error: collectives: rank 2 did not answer within 2 s\n"),
])
def test_a_rank_that_is_lost_is_named(tmp_path, how, line):
    right = "    token = torch.zeros(2,"  # in a barrier
    path = faulty(tmp_path, right, DIES.format(how) + right)
    ranks = programs.Ranks(path, "--timeout=2", world=3, cwd=tmp_path)
    try:
        ranks.processes[0].join(30)
        ranks.processes[1].join(30)
        assert [process.exitcode for process in ranks.processes[:2]] == [1, 1], ranks.err()
        assert ranks.err() == line
    finally:
        ranks.stop()


@pytest.mark.parametrize(("number", "rank", "line", "status"), [
    (signal.SIGINT, 0, "error: interrupted in collectives\n", 130),
    (signal.SIGTERM, 1, "error: collectives: SIGTERM has come to rank 1\n", 143),
])
def test_a_signal_ends_it_in_one_line(tmp_path, number, rank, line, status):
    """While ranks wait for each other."""
    right = "    token = torch.zeros(2,"
    sleep = "net.rank or (print('sleeps', flush=True), time.sleep(60))"
    path = faulty(tmp_path, right, f"    {sleep}\n{right}")
    ranks = programs.Ranks(path, world=2, cwd=tmp_path)
    try:
        ranks.until("sleeps")
        ranks.send(number, rank)
        ranks.processes[rank].join(30)
        assert (ranks.processes[rank].exitcode, ranks.err(rank)) == (status, line)
        assert "Traceback" not in ranks.err()
    finally:
        ranks.stop()


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(("flags", "line"), [
    ("--numbers=-1", "--numbers: -1 is no whole number in [0, 1048576); --numbers 1000 would work"),
    ("--numbers=1.5", "--numbers: 1.5 is no whole number in [0, 1048576); --numbers 1000 would"),
    ("--dtype=int32", "--dtype: invalid choice: 'int32'"),
    ("--variant=best", "--variant: invalid choice: 'best' (choose from 'collectives', 'hello', 's"),
    ("--steps=3", "unrecognized arguments: --steps=3 (python 00_collectives.py --help lists the"),
    ("--variant=deadlock", "deadlock needs 2 ranks; --nproc_per_node 2 would work"),
    ("--variant=sums", "sums needs 3 ranks; --nproc_per_node 3 would work"),
    ("--variant=hello --numbers=3",
     "--numbers means nothing to --variant hello; --variant collectives would work"),
    ("--variant=sums --dtype=float64",
     "--dtype means nothing to --variant sums; --variant collectives would work"),
    ("--variant=sums --plot=sums.png",
     "--plot means nothing to --variant sums; --variant collectives would work"),
    ("--json=.", "--json: cannot write '.'"),
    ("--plot=figure.jpg2", "--plot: cannot write 'figure.jpg2'; --plot figure.png would work"),
    ("--timeout=0", "--timeout: 0 is no whole number in [1, 2147483648); --timeout 60 would work"),
])  # fmt: skip
def test_a_bad_argument_costs_one_line(run_chapter, flags, line):
    status, output, errors = run_chapter(ZERO, *flags.split())
    assert (status, output) == (2, "") and errors.startswith(f"error: {line}"), errors
    assert errors.count("\n") == 1


def test_the_json_of_a_run_makes_a_line_of_a_table(run_chapter, tmp_path):
    """And one rank alone is a run, too."""
    for variant in "collectives", "hello":
        status, output, errors = run_chapter(ZERO, f"--variant={variant}", "--json=run.json")
        assert (status, errors) == (0, "") and output.startswith(f"00 collectives · {variant} · 1 ")
        [_, line] = runs.summary(runs.read_runs([tmp_path / "run.json"]))
        checks, mark = ("57/57", "✓") if variant == "collectives" else ("0/0", "-")
        assert line.split() == [ZERO, variant, "1", "gloo", "-", "-", checks, "-", mark]
