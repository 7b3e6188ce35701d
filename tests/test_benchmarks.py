"""The benchmarks: what they compare, and how they measure it, on a CPU and on GPUs."""

import contextlib
import itertools
import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import common
from benchmarks import draw_batch, results, time_chapters, time_checkpoints
from lab import launch
from lab.run import meters
from tests.conftest import TEXT, chapter, sample
from tests.support import programs

TINY = ["--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8", f"--data={TEXT}",
        "--device=cpu"]  # fmt: skip


def accepted(name, ranks, flags):
    """The arguments of a chapter that takes them."""
    module = chapter(name)
    args = launch.parse(module, flags)
    module.requires(args, ranks)
    return args


@pytest.mark.parametrize("gpus", [8, 0])
def test_the_chapters_take_the_flags_of_every_pair(monkeypatch, gpus):
    """With shapes for GPUs where every rank has one; and both sides in equal micro-batches."""
    gpu = types.SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    for pair in time_chapters.PAIRS:
        name, ranks, both, *sides = time_chapters.filled_in(*pair)
        sizes = set()
        for side in sides:
            of_side, own = time_chapters.of_chapter(name, side)
            flags = ["--no-verify", *both.split(), *own]
            args = accepted(of_side, ranks, [flag for flag in flags if flag != "--serial"])
            assert (args.model.dim == 1024) == (gpus >= ranks)
            sizes.add((args.batch, args.micro_batch))
        assert len(sizes) == 1
    for name, ranks, flags in time_checkpoints.RUNS:
        accepted(name, ranks, ["--device=cpu", "--no-verify", *flags.split()])


def test_what_a_run_would_refuse_is_refused_before_the_first(monkeypatch, capsys):
    monkeypatch.setattr(results, "RESULTS", Path("/proc/version"))
    for benchmark, flags, named in (
        (time_chapters, "--only=04 -- --dim=100", "--dim 112 would work"),
        (time_checkpoints, "--only=09 -- --batch=6", "--batch 6 "),
        (time_chapters, "--record", "without --record would work"),
    ):
        monkeypatch.setattr(benchmark, "measure", None)
        with pytest.raises(SystemExit, match="2"):
            benchmark.main(flags.split())
        error = capsys.readouterr().err
        assert error.startswith("error: ") and named in error and error.count("\n") == 1


# ----------------------------------------------------------------------------------------- pairs


@pytest.fixture
def warm(monkeypatch, tmp_path):
    """Programs that benchmarks start are forked from an interpreter that knows torch."""

    def popen(command, env, **pipes):
        assert command[0] == sys.executable and pipes.pop("text") and set(pipes.values()) == {-1}
        more = {name: value for name, value in env.items() if os.environ.get(name) != value}
        [status], *said = programs.run(*command[1:], cwd=tmp_path, **more)
        run = types.SimpleNamespace(returncode=status, communicate=lambda: said)
        return contextlib.nullcontext(run)

    monkeypatch.setattr(time_chapters.subprocess, "Popen", popen)


def test_a_pair_in_the_same_process(warm):
    """The smallest one, of two chapters, as it is measured."""
    sides = [["--steps=5", "--no-verify", *TINY, f"--attention={core}"]
             for core in ("plain", "sdpa")]
    measured = time_chapters.measure(1, *zip(["08_expert_parallel", "02_data_parallel"], sides))
    assert [len(ms) for ms in measured["ms"]] == [2, 2] and len(measured["longest"]) == 2
    assert min(map(min, measured["ms"])) > 0 <= measured["alone"]


def test_the_measuring_thread_has_the_device_of_its_rank(monkeypatch):
    """CUDA's current device is a thread's, and the runs of a pair had threads of their own. By a
    clock that ticks once a second whenever it is read."""
    device, chosen, ticks = torch.device("cuda", 1), [], itertools.count()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    run = types.SimpleNamespace(device=device, world=2, rank=1, now=lambda: next(ticks))
    assert time_chapters.communication_alone(run, {}) == 1000 and chosen == [device]


def communicate_alone(busiest):
    """For a rank: what it has sent is sent again, with nothing else running; metered."""
    run = types.SimpleNamespace(device=torch.device("cpu"), world=dist.get_world_size(),
                                rank=dist.get_rank(), now=time.perf_counter)
    with meters.CommMeter() as meter:
        assert time_chapters.communication_alone(run, busiest) > 0
    return meter.total


@pytest.mark.parametrize("op", sample(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]))
def test_alone_a_collective_puts_as_much_on_the_wire(ranks, op):
    """As in the step, on the rank that sends most there."""
    sent = [{op: {"calls": calls, "wire_bytes": 800 * calls}} for calls in (2, 3)]
    total, _ = ranks(2)(communicate_alone, time_chapters.busiest(sent))
    assert [*total] == [op]
    assert total[op]["calls"] == 15 * 3 and total[op]["wire_bytes"] == 15 * 2400


@pytest.mark.parametrize("gpus", [0, 4])
def test_of_experts_and_of_the_dense_model_a_token_takes_as_many_flops(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    [pair] = [pair for pair in time_chapters.PAIRS if pair[2] == "{dense}"]
    name, ranks, both, *sides = time_chapters.filled_in(*pair)
    experts, dense = (accepted(of_side, ranks, ["--no-verify", *both.split(), *own]).model
                      for of_side, own in (time_chapters.of_chapter(name, side) for side in sides))
    router = experts.layers * experts.experts * experts.dim
    assert experts.active() - router == dense.parameters()


# -------------------------------------------------------------------------- checkpoints and batches


def test_a_run_that_saves(warm):
    run, cfg, whole = time_checkpoints.measure("03_zero", 1, 2, [*TINY, "--batch=2"])
    saves = run["recorded"]["checkpoints"]
    assert len(saves["waits"]) == len(saves["writes"]) == 3  # and the last one
    assert len(run["step_seconds"]) == 3 * time_checkpoints.EVERY and min(whole) > 0
    [size] = [check for check in run["checks"] if check["name"] == "a checkpoint"]
    assert size["measured"] == size["expected"] > 12 * cfg.parameters()


def test_what_saves_cost():
    """The ratio is of the first step with a save in flight; the cost has all of those, and what
    training waits for."""
    quiet, first, ratio, costs = time_checkpoints.costs_of(
        [*[9.0] * 6, 0.1, 0.2, 0.3, 0.5, 0.3, *[0.2] * 7, 0.3, *[0.2] * 8], [0.02, 0.04])
    assert quiet == pytest.approx([100, 200, 300, 200, 200, 200])
    assert first == pytest.approx([500, 300]) and ratio == pytest.approx(2)
    assert costs == pytest.approx([420, 140])


def test_the_batch_is_measured_by_its_parts():
    """The gradient is that of the whole batch; small ones are those of a quarter each."""
    args = draw_batch.arguments(8)
    model, whole = (common.gpt(args.model, dtype=torch.float64) for _ in "ab")
    text = common.Text(args)
    small, big, square, square_of_all = draw_batch.gradient(model, text, 3)
    tokens, targets, valid = text.batch(3)
    (common.loss_sum(whole(tokens), targets) / valid).backward()
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    assert square_of_all == pytest.approx(common.grad_norm(whole.parameters()).item() ** 2)
    assert (small, big) == (2 * 64, 8 * 64) and 0 < square != pytest.approx(square_of_all)
