"""Chapter 00: every collective by hand gives what it should, in its formulas' rounds and bytes."""

import itertools
import json
import re
import tomllib

import pytest
import torch
import torch.distributed as dist

from lab.chapters import held
from tests.conftest import CHAPTERS, FULL, ROOT, chapter, edited, run_main, sample
from tests.support import programs

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
        result = zero.BY_HAND[name](net, x)
        case = f"{name} on {n} ranks, {size} of {dtype}: "
        if not (buffer[:PAD] == 77).all() or not (buffer[PAD + size :] == 77).all():
            wrong.append(f"{case}it has written beyond x")
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
    """Its result, what it leaves alone, and its rounds and bytes."""
    results = ranks(n)(played, settings(n))
    wrong = [line for lines, _ in results for line in lines]
    assert not wrong, "\n".join(wrong)
    cases = itertools.product(settings(n), zero.BY_HAND)
    for ((numbers, dtype, _), name), *everyones in zip(cases, *(rounds for _, rounds in results)):
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
    results = ranks(5)(played, [(7, torch.float32, False)], [1, 2, 4])
    assert not any(wrong for wrong, _ in results), results
    assert [len(rounds) for _, rounds in results] == [0, 12, 12, 0, 12]


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


# ------------------------------------------------------------------------------- the run


def check_record(record, n, numbers, dtype):
    """Assert of the JSON of a run that each collective was checked, and what a ring sent."""
    assert record["world_size"] == n and not record["problems"] and not record["diagnosis"]
    names = set(chapter(ZERO).BY_HAND)
    checked = {check["name"].split(", ")[0] for check in record["checks"]}
    assert checked == set(record["recorded"]["messages"]) == names
    assert all(check["ok"] for check in record["checks"])
    size = numbers * n * getattr(torch, dtype).itemsize
    ring = record["recorded"]["messages"]["all_reduce_ring"]
    assert len(ring) == 2 * (n - 1)
    assert all(message == [r, (r + 1) % n, size // n]
               for messages in ring for r, message in enumerate(messages))  # fmt: skip


@pytest.mark.parametrize(("n", "numbers", "dtype"), sample(
    [(5, 7, "bfloat16"), (3, 0, "float64"), (4, 1, "float32"), (8, 1000, "bfloat16")], size=2))
def test_a_run_finds_them_equal_to_pytorchs(ranks, tmp_path, n, numbers, dtype):
    flags = f"--numbers={numbers}", f"--dtype={dtype}", f"--seed={n}"
    (status, record, output), *others = ranks(n)(run_main, ZERO, flags, tmp_path)
    assert status == 0 and "✗" not in output and output.count("✓") == 12, output
    assert all(other == (0, None, "") for other in others)
    check_record(record, n, numbers, dtype)
    assert record["dtype"] == dtype and record["config"]["numbers"] == numbers
    assert f"{n * numbers:,} numbers" in output


FAULTS = tomllib.loads((ROOT / "tests/chapters/diagnosed_00.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fault", sample(FAULTS["faults"]))
def test_a_fault_is_diagnosed(ranks, tmp_path, fault):
    name, source = fault["name"], edited(ZERO, fault["right"], fault["wrong"])
    (status, record, output), *_ = ranks(4)(run_main, ZERO, ["--numbers=3"], tmp_path, source)
    assert status == 1 and any(line.startswith(name) for line in record["problems"]), output
    [diagnosis] = record["diagnosis"]
    assert diagnosis.startswith(f"{name}: ") and fault["says"] in diagnosis, diagnosis
    assert f"  → {diagnosis}" in output.splitlines()


def test_the_sum_of_floats_depends_on_the_order(ranks, tmp_path):
    """Naive gives the same bits twice, and no other way gives them."""
    (status, _, output), *_ = ranks(3)(run_main, ZERO, ["--variant=sums"], tmp_path)
    rows = re.findall(r"^  (\w+) .*; +(\d+) .* by (\S+) at most$", output, re.MULTILINE)
    names, numbers, off = zip(*rows)
    assert status == 0 and names == ("naive", "naive", "tree", "ring", "doubling"), output
    assert [int(number) > 0 for number in numbers] == [False, False, True, True, True]
    assert all(float(most) < 2e-6 for most in off)


# ------------------------------------------------------------------------------- as a program


def run_program(folder, variant, world):
    """Its output, after status 0 on all ranks and nothing on stderr."""
    statuses, output, errors = programs.run(
        CHAPTERS / f"{ZERO}.py", f"--variant={variant}", "--json=run.json", world=world,
        cwd=folder)  # fmt: skip
    assert (statuses, errors) == ([0] * world, ""), output + errors
    assert output.startswith(f"00 collectives · {variant} · {world} ranks · ")
    return output


def test_as_a_reader_would(tmp_path):
    output = run_program(tmp_path, "hello", 2)
    printed = re.findall(r"  rank (\d) of 2: process (\d+) on ", output)
    assert [rank for rank, _ in printed] == ["0", "1"] and printed[0][1] != printed[1][1]
    assert run_program(tmp_path, "collectives", 2).count("✓") == 12
    check_record(json.loads((tmp_path / "run.json").read_text()), 2, 1000, "float32")


@pytest.mark.parametrize(("fault", "n", "waits", "has"), sample([
    ("order", 4, {0: 1, 1: 3, 3: 1}, ""),  # for whom each rank waits
    ("sizes", 3, {}, "rank 2 has [0.0, 0.0, 0.0, 2.0, 2.0]"),
    ("deadlock", 2, {0: 1, 1: 0}, ""),
    ("deadlock", 3, {0: 1, 1: 2, 2: 0}, ""),
    ("order", 2, {0: 1, 1: 0}, ""),
    ("skip", 2, {0: 1}, ""),
    ("skip", 3, {0: 2, 1: 2}, ""),
    ("sizes", 2, {}, "rank 1 has [0.0, 0.0, 0.0, 1.0, 1.0]"),
    ("overwrite", 2, {}, "rank 1 has got [0.0, 0.0, 0.0]"),
    ("overwrite", 4, {}, "rank 1 has got [0.0, 0.0, 0.0]"),
], size=2))  # fmt: skip
def test_what_goes_wrong_ends_by_itself_and_names_who_waits(tmp_path, fault, n, waits, has):
    output = run_program(tmp_path, fault, n)
    printed = re.findall(r"rank (\d) waits for rank (\d)", output)
    assert {int(rank): int(other) for rank, other in printed} == waits and has in output, output
