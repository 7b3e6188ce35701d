"""Chapter 00 as a run, as a program, and its command line."""

import json
import re
import signal
import time

import pytest
import torch

from lab.bench import runs
from tests.chapters.test_00_collectives import ZERO
from tests.conftest import CHAPTERS, ROOT, chapter, run_main
from tests.support import programs

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
    ("--variant=best", "--variant: invalid choice: 'best' (choose from "),
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
