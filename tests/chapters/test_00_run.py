"""Chapter 00 as a run, as a program, and its command line."""

import json
import re

import pytest
import torch

from lab.run import runs
from tests.chapters.test_00_collectives import ZERO
from tests.conftest import CHAPTERS, ROOT, chapter, edited, run_main, sample
from tests.support import programs
from tests.support.refused import hold_refusals

# ------------------------------------------------------------------------------- the run


def hold_run(record, n, numbers, dtype):
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
    hold_run(record, n, numbers, dtype)
    assert record["dtype"] == dtype and record["config"]["numbers"] == numbers
    assert f"{n * numbers:,} numbers" in output


# In the chapter's source: right, wrong, the collective, and a part of the diagnosis of 4 ranks.
FAULTS = [
    ("            x += arrived\n\n\ndef scatter",  # also what only rounds
     "            x += arrived if x.dtype == torch.int64 else arrived.bfloat16()\n\n\ndef scatter",
     "reduce", "on rank 0"),
    ("        mine += arrived", "        mine.copy_(arrived)",
     "reduce_scatter", "rank 0 has 'b0 0 0 0'"),
    ("    for hop in range(net.ranks - 1)", "    for hop in range(net.ranks)",
     "all_gather", "4 rounds, 192 B, and by the formulas 3, 144 B"),
    ("to=(net.rank + 2**k) % net.ranks,\n"
     "                     receive=token[1:], source=(net.rank - 2**k)",
     "to=(net.rank + 1) % net.ranks,\n"
     "                     receive=token[1:], source=(net.rank - 1)",
     "barrier", "rank 0 goes on, and has not heard of rank 1"),
    # Gloo has begun both, so this run ends. A network without memory would not end it.
    ("    net.exchange(send=give, to=partner, receive=arrived, source=partner)\n",
     "    net.exchange(send=give, to=partner, receive=arrived, source=partner)\n"
     "    net.rounds[-1:] = [(partner, give.nbytes, None), (None, 0, partner)]\n",
     "all_reduce_doubling", "rank 0 waits for rank 2 to receive"),
]


@pytest.mark.parametrize(("right", "wrong", "name", "told"), sample(FAULTS))
def test_a_fault_is_found_and_told(ranks, tmp_path, right, wrong, name, told):
    source = edited(ZERO, right, wrong)
    (status, record, output), *_ = ranks(4)(run_main, ZERO, ["--numbers=3"], tmp_path, source)
    assert status == 1 and any(line.startswith(name) for line in record["problems"]), output
    [diagnosis] = record["diagnosis"]
    assert diagnosis.startswith(f"{name}: ") and told in diagnosis, diagnosis
    assert f"  → {diagnosis}" in output.splitlines()


def test_the_sum_of_floats_depends_on_the_order(ranks, tmp_path):
    """Naive gives the same bits twice, and no other way gives them."""
    (status, _, output), *_ = ranks(3)(run_main, ZERO, ["--variant=sums"], tmp_path)
    found = re.findall(r"^  (\w+) .*; +(\d+) .* by (\S+) at most$", output, re.MULTILINE)
    names, numbers, off = zip(*found)
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
    said = re.findall(r"  rank (\d) of 2: process (\d+) on ", output)
    assert [rank for rank, _ in said] == ["0", "1"] and said[0][1] != said[1][1]
    assert run_program(tmp_path, "collectives", 2).count("✓") == 12
    hold_run(json.loads((tmp_path / "run.json").read_text()), 2, 1000, "float32")


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
    said = re.findall(r"rank (\d) waits for rank (\d)", output)
    assert {int(rank): int(other) for rank, other in said} == waits and has in output, output


DIES = "    if net.rank == 2:\n        import os\n        os.kill(os.getpid(), 9)\n"


def test_a_rank_that_is_lost_is_named(tmp_path):
    right = "    token = torch.zeros(2,"  # in a barrier
    (tmp_path / f"{ZERO}.py").write_text(edited(ZERO, right, DIES + right))
    for name in "common.py", "lab":
        (tmp_path / name).symlink_to(ROOT / name)
    ranks = programs.Ranks(tmp_path / f"{ZERO}.py", "--timeout=30", world=3, cwd=tmp_path)
    try:
        ranks.processes[0].join(120)
        ranks.processes[1].join(120)
        assert [process.exitcode for process in ranks.processes[:2]] == [1, 1], ranks.err()
        assert ranks.err().count("\n") == 1 and "collectives: rank 2 " in ranks.err()
    finally:
        ranks.stop()


# ------------------------------------------------------------------------------- the command line


def test_a_bad_argument_costs_one_line(run_chapter):
    hold_refusals(run_chapter, ZERO, [
        ("--numbers=-1", 1, "--numbers", "--numbers 1000"),
        ("--numbers=1.5", 1, "--numbers", "--numbers 1000"),
        ("--timeout=0", 1, "--timeout", "--timeout 60"),
        ("--variant=deadlock", 1, "deadlock", "--nproc_per_node 2"),
        ("--variant=sums", 1, "sums", "--nproc_per_node 3"),
        ("--variant=hello --numbers=3", 1, "--numbers", "--variant collectives"),
        ("--variant=sums --plot=sums.png", 1, "--plot", "--variant collectives"),
        ("--plot=figure.jpg2", 1, "--plot", "--plot figure.png"),
        ("--dtype=int32", 1, "--dtype", "--dtype float32"),
        ("--steps=3", 1, "--steps", "without --steps"),
        ("--json=.", 1, "--json", "--json run.json"),
    ])  # fmt: skip


def test_the_json_of_a_run_makes_a_line_of_a_table(run_chapter, tmp_path):
    """And one rank alone is a run, too."""
    status, output, errors = run_chapter(ZERO, "--json=run.json")
    assert (status, errors) == (0, "") and "1 rank" in output
    [_, line] = runs.summary(runs.read_runs([tmp_path / "run.json"]))
    assert line.split()[:4] == [ZERO, "collectives", "1", "gloo"] and line.endswith("✓")
