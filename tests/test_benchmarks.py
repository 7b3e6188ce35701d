"""The benchmarks: what they compare, and how they measure it, on a CPU and on GPUs."""

import contextlib
import itertools
import os
import statistics
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import common
from benchmarks import draw_batch, results, time_chapters, time_checkpoints
from lab import schedules
from lab.bench import meters, report
from lab.checkpoints import saving
from lab.cli import strict
from lab.planner import batch as planned_batch
from tests.conftest import TEXT, chapter, no_flags, sample
from tests.support import programs

TINY = ["--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8", f"--data={TEXT}",
        "--device=cpu"]  # fmt: skip


def accepted(name, ranks, flags):
    """The arguments of a chapter that takes them."""
    module = chapter(name)
    args = strict.parse(module.__file__, "", module.VARIANTS, getattr(module, "flags", no_flags),
                        flags)
    module.requires(args, ranks)
    return args


@pytest.mark.parametrize("gpus", sample([8, 0, 1, 4], 2))
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
    """Programs that benchmarks start are forked from an interpreter that knows torch. What a test
    appends here is patched there."""
    patches = []

    def popen(command, env, **pipes):
        assert command[0] == sys.executable and pipes.pop("text") and set(pipes.values()) == {-1}
        more = {name: value for name, value in env.items() if os.environ.get(name) != value}
        [status], *said = programs.run(*command[1:], cwd=tmp_path, patches={0: patches}, **more)
        run = types.SimpleNamespace(returncode=status, communicate=lambda: said)
        return contextlib.nullcontext(run)

    monkeypatch.setattr(time_chapters.subprocess, "Popen", popen)
    return patches


def test_a_pair_in_the_same_process(warm):
    """The smallest one, of two chapters, as it is measured, with a clock in the first one."""
    sides = [["--steps=5", "--no-verify", *TINY, f"--attention={core}"]
             for core in ("plain", "sdpa")]
    names = "08_expert_parallel", "02_data_parallel"
    measured = time_chapters.measure(1, *zip(names, sides), clocked=True)
    assert [len(ms) for ms in measured["ms"]] == [2, 2]
    assert measured["tokens"] == 8 * 8
    sorting, matmuls = measured["operators"].values()  # a dense model sorts nothing
    assert 0 < sorting and 0 < matmuls and sorting + matmuls < statistics.mean(measured["ms"][0])


def play_pair(pair):
    """For a rank of the pool, whose other tests have their own Run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "Run", report.Run)
        return time_chapters.play_pair(pair)


@pytest.mark.full
def test_a_pair_on_two_ranks(ranks):
    """Each side in a thread, where no signal can be handled."""
    flags = ["--steps=5", "--no-verify", *TINY]
    sides = [("02_data_parallel", [*flags, f"--variant={name}"]) for name in ("naive", "bucket")]
    for measured in ranks(2)(play_pair, {"sides": sides, "clocked": False}):
        assert [len(ms) for ms in measured["ms"]] == [2, 2] and measured["alone"] > 0


def test_the_measuring_thread_has_the_device_of_its_rank(monkeypatch):
    """CUDA's current device is a thread's, and the runs of a pair had threads of their own. By a
    clock that ticks once a second whenever it is read."""
    device, chosen, ticks = torch.device("cuda", 1), [], itertools.count()
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    run = types.SimpleNamespace(device=device, world=2, rank=1, now=lambda: next(ticks))
    assert time_chapters.communication_alone(run, {}) == 1000 and chosen == [device]


def communicate_alone(totals):
    """For a rank: what the busiest sends, which it then sends when nothing else runs; metered."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, totals[dist.get_rank()])
    busiest = time_chapters.busiest(everyones)
    run = types.SimpleNamespace(device=torch.device("cpu"), world=dist.get_world_size(),
                                rank=dist.get_rank(), now=time.perf_counter)
    with meters.CommMeter() as meter:
        assert time_chapters.communication_alone(run, busiest) > 0
    return list(busiest.items()), meter.total


@pytest.mark.full
def test_ranks_that_send_unequally_send_as_the_busiest_when_nothing_else_runs(ranks):
    """The middle one of three ranks sends twice as often, and the first sums something first; the
    later a rank, the more of its rows go to others."""
    totals = [{"send": {"calls": calls, "wire_bytes": 400 * calls},
               "all_to_all": {"calls": 5, "wire_bytes": 100 * rank}}
              for rank, calls in enumerate((8, 16, 8))]
    totals[0]["all_reduce"] = {"calls": 1, "wire_bytes": 4}
    for busiest, _ in ranks(3)(communicate_alone, totals):
        assert busiest == [("all_reduce", (1, 4)), ("all_to_all", (5, 200)), ("send", (16, 6400))]


@pytest.mark.parametrize("op", sample(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]))
def test_alone_a_collective_puts_as_much_on_the_wire(ranks, op):
    """As in the step, whatever the group that it went through there."""
    sent = {op: {"calls": 3, "wire_bytes": 2400}}
    (_, total), _ = ranks(2)(communicate_alone, [sent, sent])
    assert [*total] == [op]
    assert total[op]["calls"] == 15 * 3 and total[op]["wire_bytes"] == 15 * 2400


def test_the_clock_of_operators():
    """Forward and backward; rows that are joined, and neither heads nor gradients. A tick each."""
    rows = torch.ones(4, 3, requires_grad=True)
    ticks = itertools.count()
    with time_chapters.OperatorClock(lambda: next(ticks)) as clock:
        order = torch.tensor([2, 0, 1, 3]).argsort(stable=True)  # sort
        there = rows[order]  # index
        torch.cat([there, there]).sum().backward()  # cat; and backward: new_zeros, index_put
        torch.cat([rows.flatten(), rows.flatten()])
        torch.cat([rows[None], rows[None]])
        rows.detach() @ rows.detach().T  # mm
    assert clock.seconds == {"sorting and copying": 5, "matmuls": 1}


@pytest.mark.parametrize("gpus", [0, 4])
def test_of_experts_and_of_the_dense_model_a_token_takes_as_many_flops(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    runs = []

    def measure(ranks, *sides):
        runs.extend(accepted(name, ranks, flags) for name, flags in sides)
        return {"tokens": 1000, "ms": [[40, 50, 90], [20, 25, 30]],
                "loads": [[[1.0, 3, 0, 1, 1, 1, 1, 0]], [[1.0] * 8]]}

    monkeypatch.setattr(time_chapters, "measure", measure)
    *_, default, random = time_chapters.against_dense(9, ["--no-verify"])
    experts, dense, *_ = (args.model for args in runs)
    router = experts.layers * experts.experts * experts.dim
    assert experts.active() - router == dense.parameters() and runs[0].batch == runs[1].batch
    assert default == "| default | 1.50 | 20,000 | 40,000 | 0.50 |"
    assert random.startswith("| random | ") and [run.data is None for run in runs] == 2 * [
        True] + 2 * [False]


# ------------------------------------------------------------------------------- sleeping pipelines


def sleep(seconds, passed=[0.0]):  # noqa: B006 (its memory)
    """Takes no time but that of `clock`."""
    passed[0] += seconds
    return passed[0]


def clock():
    return sleep(0)


def test_the_milliseconds_of_a_sleeping_step_come_from_the_run(warm):
    """On one rank, where nobody waits, by a clock that only sleep sets forward."""
    warm += [("time.sleep", sleep), ("time.perf_counter", clock)]
    flags = ["1f1b", "--micro-batches=2", "--sleep=50", "--device=cpu"]
    assert time_chapters.asleep(1, flags) == (2 * 3 * 50, 2 * 3 * 50)
    with pytest.raises(SystemExit, match="(?s)lab.schedules 2f2b .* failed:.*error: .*2f2b"):
        time_chapters.asleep(1, ["2f2b"])


def test_in_the_sleeping_table_every_rank_works_equally_long(monkeypatch):
    """Whatever the schedule; and its last columns are relative to 1f1b's step."""
    module, seen = chapter(time_chapters.PIPELINE), []

    def asleep(ranks, flags):
        args = schedules.parse(module, [*flags, f"--ranks={ranks}"])
        schedule = module.make_schedule(args.schedule, ranks, args.micro_batches, args.chunks)
        forwards = {sum(action.kind == "F" for action in actions) for actions in schedule.actions}
        seen.append((args.schedule, args.device, {args.sleep * count for count in forwards}))
        return 300 + 30 * len(seen), 100 + 20 * len(seen)

    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(time_chapters, "asleep", asleep)
    _, _, _, *rows = time_chapters.sleeping(["--device=cpu", "--seed=1"])
    work = {8 * time_chapters.SLEEP_MS}
    assert seen == [(variant, "cpu", work) for variant in module.VARIANTS if variant != "torch"]
    assert rows[1] == "| naive | 360 | 140 | 2.57 | 1.09 | 1.17 |"


# -------------------------------------------------------------------------- checkpoints and batches


def play_saves(name, flags):
    """For a rank of the pool, whose other tests have their own Saver and Run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "Saver", saving.Saver)
        patch.setattr(report, "Run", report.Run)
        return time_checkpoints.play(name, 2, flags)


@pytest.mark.parametrize(("name", "own"), sample([("03_zero", "--variant=zero3"),
                                                  ("04_tensor_parallel", "--variant=megatron")]))
def test_both_ways_of_saving_write_as_much(ranks, tmp_path, name, own):
    """Shards that end anywhere, and rectangles of which some are replicated."""
    flags = [*TINY, "--batch=2", "--vocab=131", own, f"--save={tmp_path}"]
    measured, _ = ranks(2)(play_saves, name, flags)
    assert len(measured["ours"]) == len(measured["theirs"]) == 2
    for save in measured["ours"]:
        assert len(save["before"]) == time_checkpoints.QUIET and save["during"]
        assert 0 < save["waits"] < save["on disk"]
    assert measured["bytes"][0] == measured["bytes"][1] > 12 * measured["parameters"]


def test_what_saves_cost():
    """The ratio is of the first step with a save in flight; the cost has all of those, and what
    training waits for."""
    ours = [{"before": [0.1, 0.2, 0.3], "during": [0.5, 0.3], "waits": 0.02, "on disk": 0.72},
            {"before": [0.2, 0.2, 0.2], "during": [0.3], "waits": 0.04, "on disk": 0.34}]
    before, first, ratio, costs = time_checkpoints.of_steps({"ours": ours})
    assert sorted(before) == pytest.approx([100, 200, 200, 200, 200, 300])
    assert first == pytest.approx([500, 300]) and ratio == pytest.approx(2)
    assert costs == pytest.approx([420, 140])


def test_the_batch_is_measured_by_its_parts():
    """The gradient is that of the whole batch, and the small ones are those of a quarter each."""
    args = draw_batch.arguments(8)
    model, whole = (common.gpt(args.model, dtype=torch.float64) for _ in "ab")
    text = common.Text(args)
    small, big, square, square_of_all = draw_batch.gradient(model, text, 3)
    tokens, targets, valid = text.batch(3)
    (common.loss_sum(whole(tokens), targets) / valid).backward()
    for p, q in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    assert square_of_all == pytest.approx(common.grad_norm(whole.parameters()).item() ** 2)
    squares = []
    for part, goals in zip(tokens.split(2), targets.split(2)):
        whole.zero_grad()
        (common.loss_sum(whole(part), goals) / goals.numel()).backward()
        squares.append(common.grad_norm(whole.parameters()).item() ** 2)
    assert (small, big) == (2 * 64, 8 * 64) and square == pytest.approx(statistics.fmean(squares))


def test_the_noise_scale_of_windows_and_the_height_of_a_curve():
    estimates = [(float(i), 2.0) for i in range(20)]
    windows = [one[:3] for one in draw_batch.windows(estimates)]
    assert windows == [(4, 6, 4.5 / 2), (6, 9, 7 / 2), (9, 13, 10.5 / 2), (13, 19, 15.5 / 2)]
    assert draw_batch.on_the_way(estimates)[0] == pytest.approx(9.5 / 2)
    values = [3 * planned_batch.steps(batch, 100) for batch in (10, 1000)]
    assert draw_batch.height((10, 1000), values, planned_batch.steps, 100) == pytest.approx(3)
