"""lab.speed: the fit, crossovers and two levels by hand; the program on two ranks; refusals."""

import contextlib
import io
import json
import types

import pytest
import torch.distributed as dist

from benchmarks import time_collectives
from lab import speed
from lab.bench.runs import read_runs
from tests.conftest import chapter

SIZES = [4**k for k in range(13)]
ALPHA, BETA = 2e-4, 1 / 3e9
COUNTED = {"broadcast": 7, "all_gather": 56, "reduce_scatter": 56, "all_to_all": 56, "barrier": 24,
           "all_reduce_naive": 14, "all_reduce_tree": 14, "all_reduce_ring": 112,
           "all_reduce_doubling": 48}  # fmt: skip


def made_up(cost, alpha=ALPHA, beta=BETA):
    """Times that follow the model exactly."""
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
    assert dict(fitted["curves"]["all_reduce_ring"]) == pytest.approx(measured["all_reduce_ring"])
    falling = made_up(costs[how], beta=0)               # with size: neither is fitted below zero
    for times in falling.values():
        for i, size in enumerate(SIZES):
            times[size] *= 0.9**i
    alpha, beta = speed.fit(falling, costs[how])
    assert alpha > 0 == beta


def test_crossovers_are_where_the_formulas_are_equal(costs):
    """On 8 ranks a ring has 8 rounds more than a tree, and sends 4.25 S fewer bytes in a row."""
    cost = costs[speed.ROUNDS]
    where = 8 * ALPHA / (4.25 * BETA)
    assert speed.crossover("ring", "tree", cost, ALPHA, BETA) == pytest.approx(where)
    assert speed.crossover("doubling", "tree", cost, ALPHA, BETA) == 0  # as many rounds
    assert speed.crossover("ring", "doubling", cost, ALPHA, BETA) is None  # as many bytes

    measured = made_up(cost, ALPHA / 64)
    first = min(size for size in SIZES if size > where / 64)
    assert speed.measured_crossover("ring", "tree", measured) == first


def test_two_levels_are_what_a_person_adds_up(costs, capsys):
    """64 ranks, 8 MB: 7 rounds of 1 MB inside, 6 across (1 MB each in a tree; with doubling 1/2,
    1/4, 1/8 and back), 7 rounds of 1 MB inside."""
    inside, across = (1e-6, 1e9), (1e-5, 1e8)
    of_rings = 2 * 7 * (1e-6 + 1e-3)
    tree = speed.two_levels(8, 8_000_000, inside, across, "tree")
    assert tree == pytest.approx(of_rings + 6 * (1e-5 + 1e-2))
    doubling = speed.two_levels(8, 8_000_000, inside, across, "doubling")
    assert doubling == pytest.approx(of_rings + 6e-5 + 2 * 0.875e-2)

    found = speed.choices(64, 8_000_000, inside, across)
    assert found["two levels, tree"] == tree and found["two levels, doubling"] == doubling
    assert found["ring"] == pytest.approx(126 * 1e-5 + 126 / 64 * 8e-2)  # all of it across
    inside_one = speed.choices(8, 8_000_000, inside, across)["ring"]
    assert inside_one == pytest.approx(14 * (1e-6 + 1e-3))
    assert speed.main([]) == 0 and "16,384" in capsys.readouterr().out


def test_bus_bandwidths_have_the_factors_of_nccl_tests():
    for name, factor in (("all_reduce_ring", 7 / 4), ("broadcast", 1), ("all_gather", 7 / 8),
                         ("reduce_scatter", 7 / 8), ("all_to_all", 7 / 8)):
        algorithm, bus = map(float, speed.bandwidths(name, 8, 8 * 10**9, 1))
        assert (algorithm, bus) == (8, pytest.approx(8 * factor, rel=0.01)), name


# ---------------------------------------------------------------------------------------- on ranks


def timed(folder):
    """On a rank of the pool: how many messages each collective sends; the status, the output."""
    output, counted = io.StringIO(), speed.count_messages(speed.torch.device("cpu"))
    time_collectives.SIZES = {64: 1, 256: 2}
    played = time_collectives.play(types.SimpleNamespace(device="cpu", calls=8))
    with contextlib.redirect_stdout(output):
        status = speed.main([f"--json={folder}/run.json", "--device=cpu", "--largest=100",
                             "--repeats=2"])
    assert not dist.is_initialized()
    return counted, played, status, output.getvalue()


def test_the_program_and_the_benchmark_on_three_ranks(ranks, tmp_path):
    chapter("00_collectives")
    (counted, played, status, output), *others = ranks(3)(timed, tmp_path)
    assert counted == {"broadcast": 2, "all_gather": 6, "reduce_scatter": 6, "all_to_all": 6,
                       "barrier": 6, "all_reduce_naive": 4, "all_reduce_tree": 4,
                       "all_reduce_ring": 12, "all_reduce_doubling": 6}  # fmt: skip
    assert others == [(counted, played, status, "")] * 2 and status == 0
    [run] = read_runs([tmp_path / "run.json"])
    assert (run["chapter"], run["variant"], run["world_size"]) == ("00_collectives", "speed", 3)
    recorded = json.loads((tmp_path / "run.json").read_text())["recorded"]
    by_hand, theirs = recorded["speed"]["by hand"], recorded["speed"]["PyTorch"]
    assert [*by_hand] == [*speed.NAMES]
    for times in (*by_hand.values(), theirs["all_reduce"]):
        assert [size for size, _ in times] == [1, 4, 16, 64] and all(s > 0 for _, s in times)
    assert [*recorded["models"]] == [speed.ROUNDS, speed.IN_TURN]
    assert "all_reduce_doubling" in output
    for size, calls in ((64, 8), (256, 4)):
        assert [*played[size]] == ["ring", "PyTorch's", "messages", "sums"]
        assert {len(times) for times in played[size].values()} == {calls + 2}


@pytest.mark.parametrize(("world", "flags", "works"), [
    (0, "--json=run.json", "--nproc_per_node 8"), (2, "--repeats=x", "--repeats 5"),
    (2, "--largest=2147483647", "--largest 16777216")])
def test_a_bad_argument_costs_one_line(capsys, monkeypatch, world, flags, works):
    monkeypatch.setattr(speed.os, "sysconf", lambda name: 2**16)
    if world:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(world))
    with pytest.raises(SystemExit, match="2"):
        speed.main(flags.split())
    output, line = capsys.readouterr()
    assert not output and line.count("\n") == 1 and line.endswith(f"; {works} would work\n")
