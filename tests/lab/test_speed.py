"""lab.speed: the fit, crossovers and two levels by hand; the program on two ranks; refusals."""

import contextlib
import io
import json
import math
import types

import pytest
import torch.distributed as dist

from benchmarks import time_collectives
from lab import speed
from lab.bench.machines import LATENCY, MACHINES
from lab.bench.runs import read_runs
from tests.conftest import chapter

SIZES = [4**k for k in range(13)]
ALPHA, BETA = 2e-4, 1 / 3e9
COUNTED = {"broadcast": 7, "all_gather": 56, "reduce_scatter": 56, "all_to_all": 56, "barrier": 24,
           "all_reduce_naive": 14, "all_reduce_tree": 14, "all_reduce_ring": 112,
           "all_reduce_doubling": 48}  # fmt: skip


def made_up(cost, alpha=ALPHA, beta=BETA):
    """What would be measured if the model were all."""
    times = lambda name: {size: alpha * cost(name, size)[0] + beta * cost(name, size)[1]
                          for size in SIZES}  # fmt: skip
    return {name: times(name) for name in speed.NAMES}


@pytest.fixture
def costs():
    chapter("00_collectives")  # or skip
    return speed.costs_of(8, COUNTED)


@pytest.mark.parametrize("how", [speed.ROUNDS, speed.IN_TURN])
def test_the_fit_finds_what_times_are_made_of(costs, how):
    measured = made_up(costs[how])
    assert speed.fit(measured, costs[how]) == pytest.approx((ALPHA, BETA), rel=1e-9)
    fitted = speed.model(measured, costs[how])
    assert [ratio for ratio, _, _ in fitted["off"]] == pytest.approx([1] * len(fitted["off"]))
    assert dict(fitted["curves"]["all_reduce_ring"]) == pytest.approx(measured["all_reduce_ring"])


def test_twice_as_long_is_as_wrong_as_half_as_long(costs):
    """So the geometric mean of all ratios is 1, and the fit lies in the middle."""
    measured = made_up(costs[speed.ROUNDS])
    for times in measured.values():
        for i, size in enumerate(SIZES):
            times[size] *= (0.5, 1, 2)[i % 3]
    fitted = speed.model(measured, costs[speed.ROUNDS])
    ratios = [ratio for ratio, _, _ in fitted["off"]]
    assert math.prod(ratios) ** (1 / len(ratios)) == pytest.approx(1)
    assert fitted["alpha"] == pytest.approx(ALPHA, rel=0.2)


@pytest.mark.parametrize(("alpha", "beta"), [(ALPHA, 0), (0, BETA)])
def test_neither_is_fitted_below_zero(costs, alpha, beta):
    """Where times fall with size (or where small ones take no time), one of them is zero."""
    measured = made_up(costs[speed.ROUNDS], alpha, beta)
    for times in measured.values():
        for i, size in enumerate(SIZES):
            times[size] *= 0.9**i if beta == 0 else 1.1**i
    found = speed.fit(measured, costs[speed.ROUNDS])
    assert (found[0] > 0, found[1] > 0) == (alpha > 0, beta > 0) and min(found) == 0
    assert "no B to be seen" in "".join(speed.in_words("", speed.model(
        measured, costs[speed.ROUNDS]))) or beta  # fmt: skip


def test_crossovers_are_where_the_formulas_are_equal(costs):
    """On 8 ranks a ring has 8 rounds more than a tree, and 4.25 S fewer bytes in a row."""
    cost = costs[speed.ROUNDS]
    where = 8 * ALPHA / (4.25 * BETA)
    assert speed.crossover("ring", "tree", cost, ALPHA, BETA) == pytest.approx(where)
    assert speed.crossover("doubling", "tree", cost, ALPHA, BETA) == 0  # as many rounds
    assert speed.crossover("ring", "doubling", cost, ALPHA, BETA) is None  # as many bytes
    assert speed.crossover("ring", "tree", cost, ALPHA, 0) is None
    in_turn = costs[speed.IN_TURN]  # where all send as many bytes, and a tree the fewest messages
    assert speed.crossover("tree", "ring", in_turn, ALPHA, BETA) == 0
    assert speed.crossover("ring", "tree", in_turn, ALPHA, BETA) is None

    measured = made_up(cost, ALPHA / 64)
    first = min(size for size in SIZES if size > where / 64)
    assert speed.measured_crossover("ring", "tree", measured) == first
    measured["all_reduce_ring"][4 * first] = 1  # once slower, and faster again
    assert speed.measured_crossover("ring", "tree", measured) == 16 * first
    measured["all_reduce_ring"][SIZES[-1]] = 1
    assert speed.measured_crossover("ring", "tree", measured) is None
    assert speed.overtakes([["a", "b", 0], ["b", "c", None], ["c", "d", 4096.4]]) == (
        "a beats b always; b beats c never; c beats d from 4,096 B on")


def test_two_levels_are_what_a_person_adds_up(costs):
    """64 ranks, 8 MB: 7 rounds of 1 MB inside, 6 across (of 1 MB in a tree, of 1/2, 1/4, 1/8 and
    back in halves), 7 rounds of 1 MB inside."""
    inside, across = (1e-6, 1e9), (1e-5, 1e8)
    of_rings = 2 * 7 * (1e-6 + 1e-3)
    tree = speed.two_levels(8, 8_000_000, inside, across, "tree")
    assert tree == pytest.approx(of_rings + 6 * (1e-5 + 1e-2))
    doubling = speed.two_levels(8, 8_000_000, inside, across, "doubling")
    assert doubling == pytest.approx(of_rings + 6e-5 + 2 * 0.875e-2)

    found = speed.choices(64, 8_000_000, inside, across)
    assert found["two levels, tree"] == tree and found["two levels, doubling"] == doubling
    assert found["ring"] == pytest.approx(126 * 1e-5 + 126 / 64 * 8e-2)  # all of it across
    inside_one = speed.choices(8, 8_000_000, inside, across)
    assert [*inside_one] == ["tree", "ring", "doubling"]
    assert inside_one["ring"] == pytest.approx(14 * (1e-6 + 1e-3))


def test_which_is_right_on_large_machines(costs, capsys):
    for links in speed.NODES.values():
        assert all(link in LATENCY and link in MACHINES for link in links)
    assert speed.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("all_reduce, nodes of 8" in line for line in lines) == 2
    large = next(line for line in lines[::-1] if line.split()[:3] == ["1.00", "GB", "16,384"])
    assert large.endswith("two levels, doubling")
    assert large.split()[3:9] == ["560", "ms", "499", "ms", "40.4", "ms"]


def test_bus_bandwidths_have_the_factors_of_nccl_tests(costs):
    for name, factor in (("all_reduce_ring", 7 / 4), ("all_reduce_tree", 7 / 4), ("broadcast", 1),
                         ("all_gather", 7 / 8), ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8)):
        algorithm, bus = map(float, speed.bandwidths(name, 8, 8 * 10**9, 1))
        assert (algorithm, bus) == (8, pytest.approx(8 * factor, rel=0.01)), name


def timed(folder, *flags):
    """On a rank of the pool: the status and the output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = speed.main([f"--json={folder}/run.json", "--device=cpu", *flags])
    assert not dist.is_initialized()
    return status, output.getvalue()


def test_the_program_on_two_ranks(ranks, tmp_path):
    chapter("00_collectives")
    (status, output), other = ranks(2)(timed, tmp_path, "--largest=100", "--repeats=2")
    assert (status, other) == (0, (0, ""))
    [run] = read_runs([tmp_path / "run.json"])
    assert (run["chapter"], run["variant"], run["world_size"]) == ("00_collectives", "speed", 2)
    recorded = json.loads((tmp_path / "run.json").read_text())["recorded"]
    by_hand, theirs = recorded["speed"]["by hand"], recorded["speed"]["PyTorch"]
    assert [*by_hand] == [*speed.NAMES]
    sizes = [1, 4, 16, 64]
    for times in by_hand.values():
        assert [size for size, _ in times] == sizes and all(0 < s < 10 for _, s in times)
    assert [size for size, _ in theirs["all_reduce"]] == sizes
    assert [size for size, _ in theirs["all_gather"]] == [16, 64]  # 4 bytes are one number
    assert [*recorded["models"]] == [speed.ROUNDS, speed.IN_TURN]
    for fitted in recorded["models"].values():
        assert fitted["alpha"] > 0 and len(fitted["off"]) == 4 * len(speed.NAMES)
    for words in ("2 ranks · cpu, gloo, ", "x of 64 B", "all_reduce_doubling",
                  f"fitted, {speed.ROUNDS}", "left out: "):
        assert words in output, output


def counted():
    found = speed.count_messages(speed.torch.device("cpu"))
    return found


@pytest.mark.parametrize("world", [3])
def test_messages_are_counted(ranks, world):
    chapter("00_collectives")
    first, *others = ranks(world)(counted)
    assert first == {"broadcast": 2, "all_gather": 6, "reduce_scatter": 6, "all_to_all": 6,
                     "barrier": 6, "all_reduce_naive": 4, "all_reduce_tree": 4,
                     "all_reduce_ring": 12, "all_reduce_doubling": 6}  # fmt: skip
    assert others == [first] * (world - 1)


@pytest.mark.parametrize(("world", "flags", "line"), [
    (0, "--json=run.json", "--json means nothing without torchrun: nothing is measured; "
     "--nproc_per_node 8 would work"),
    (0, "--repeats 3", "--repeats means nothing without torchrun: nothing is measured; "
     "--nproc_per_node 8 would work"),
    (1, "", "one rank has nobody to send to; --nproc_per_node 8 would work"),
    (2, "--largest=0", "--largest: 0 is no whole number in [1, 2147483648); "
     "--largest 16777216 would work"),
    (2, "--repeats=x", "--repeats: x is no whole number in [1, 1001); --repeats 5 would work"),
    (2, "--device=cuda", "--device cuda finds 0 GPUs for 2 local ranks; --device cpu would work"),
    (2, "--largest=2147483647", "--largest 2147483647 needs 21 GB or more, and this machine has "
     "4 GB; --largest 16777216 would work"),
    (2, "--json=run.txt", "--json: cannot write 'run.txt'; --json run.json would work"),
])  # fmt: skip
def test_refusals(capsys, monkeypatch, world, flags, line):
    monkeypatch.setattr(speed.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(speed.os, "sysconf", lambda name: 2**16)
    if world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit, match="2"):
        speed.main(flags.split())
    assert capsys.readouterr() == ("", f"error: {line}\n")


def played():
    time_collectives.SIZES = {64: 1, 256: 2}
    return time_collectives.play(types.SimpleNamespace(device="cpu", calls=8))


def test_the_ring_is_timed_beside_pytorchs_own(ranks, monkeypatch):
    """And the table has the ratio of their medians, without the calls that connect."""
    chapter("00_collectives")
    first, second = ranks(2)(played)
    assert first == second and [*first] == [64, 256]
    for size, calls in ((64, 8), (256, 4)):
        assert [*first[size]] == ["ring", "PyTorch's", "messages", "sums"]
        assert {len(times) for times in first[size].values()} == {calls + 2}
        assert all(wall > 0 and busy >= 0 for times in first[size].values() for wall, busy in times)

    calls = {"ring": 1.5, "PyTorch's": 1.25, "messages": 1, "sums": 0.5}
    made = {2**20: {side: [[100, 100]] * 2 + [[ms / 1e3, ms / 1e3]] * 4
                    for side, ms in calls.items()}}  # fmt: skip
    monkeypatch.setattr(time_collectives, "measure", lambda args: made)
    *_, line = time_collectives.table(types.SimpleNamespace(device="cpu", calls=4))
    cells = line.strip("| ").split(" | ")
    assert cells[:7] == ["1,048,576", "1.5 (1.5 to 1.5)", "1.5", "1.2 (1.2 to 1.2)", "1.2", "1.20",
                         "1.20"]  # fmt: skip
    assert cells[7:9] == ["1.0 (1.0 to 1.0)", "0.5 (0.5 to 0.5)"] and len(cells) == 11


def test_ranks_of_the_benchmark_are_started(monkeypatch, capsys):
    on_ranks = lambda ranks, *command: f"{{\"said\": {ranks}}}"
    monkeypatch.setattr(time_collectives, "on_ranks", on_ranks)
    assert time_collectives.measure(types.SimpleNamespace(calls=4, device="cpu")) == {"said": 4}
    with pytest.raises(SystemExit, match="2"):
        time_collectives.main(["--calls=3"])
    assert capsys.readouterr().err == (
        "error: --calls: 3 is no whole number in [4, 2147483648); --calls 120 would work\n")
