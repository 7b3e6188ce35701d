"""benchmarks/time_chapters.py: its pairs, on a CPU and on GPUs."""

import contextlib
import itertools
import os
import re
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
from lab.checkpoints import checkpoint, saving, storage
from lab.cli import strict
from lab.planner import batch as planned_batch
from tests.conftest import TEXT, chapter, no_flags
from tests.support import programs


@pytest.mark.parametrize("gpus", [0, 1, 4, 8])
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
            module, flags = chapter(of_side), ["--no-verify", *both.split(), *own]
            flags = [flag for flag in flags if flag != "--serial"]  # that is the benchmark's own
            args = strict.parse(module.__file__, "", module.VARIANTS,
                             getattr(module, "flags", no_flags), flags)
            module.requires(args, ranks)
            assert (args.model.dim == 1024) == (gpus >= ranks)
            sizes.add((args.batch, args.micro_batch))
        assert len(sizes) == 1


@pytest.mark.parametrize(("benchmark", "flags", "line"), [
    (time_chapters, "--only=99", "--only 99 begins the name of no chapter; --only 01 would work"),
    (time_chapters, "--only=04 -- --dim=100",
     "--dim 100 is not a multiple of 2 x --heads .* = 16; --dim 112 would work"),
    (time_checkpoints, "--only=09 -- --batch=6", "--batch 6 is not a multiple of .* would work"),
    (time_chapters, "--record",
     "--record cannot write /proc/version: .*; without --record would work"),
])  # fmt: skip
def test_what_a_run_would_refuse_is_refused_before_the_first(monkeypatch, capsys, benchmark, flags,
                                                             line):  # fmt: skip
    monkeypatch.setattr(results, "RESULTS", Path("/proc/version"))
    monkeypatch.setattr(benchmark, "measure", None)
    with pytest.raises(SystemExit, match="2"):
        benchmark.main(flags.split())
    assert re.fullmatch(f"error: {line}\n", capsys.readouterr().err)


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
    sides = [["--steps=5", "--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8",
              "--no-verify", f"--data={TEXT}", "--device=cpu", f"--attention={core}"]
             for core in ("plain", "sdpa")]
    names = "08_expert_parallel", "02_data_parallel"
    measured = time_chapters.measure(1, *zip(names, sides), clocked=True)
    assert [len(ms) for ms in measured["ms"]] == [2, 2]
    assert measured["tokens"] == 8 * 8
    sorting, matmuls = measured["operators"].values()           # a dense model sorts nothing
    assert 0 < sorting and 0 < matmuls and sorting + matmuls < statistics.mean(measured["ms"][0])


def play_pair(pair):
    """For a rank of the pool, whose other tests have their own Run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "Run", report.Run)
        return time_chapters.play_pair(pair)


def test_a_pair_on_two_ranks(ranks):
    """Each side in a thread, where no signal can be handled."""
    flags = ["--steps=5", "--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8",
             "--no-verify", f"--data={TEXT}", "--device=cpu"]  # fmt: skip
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


def hops_of_a_pipeline():
    """The middle one of three ranks sends twice as often, and the first sums something first; the
    later a rank, the more of its rows go to others."""
    rank = dist.get_rank()
    sent = {"calls": 16 if rank == 1 else 8, "wire_bytes": 6400 if rank == 1 else 3200}
    total = {"send": sent, "all_to_all": {"calls": 5, "wire_bytes": 100 * rank}}
    if rank == 0:
        total["all_reduce"] = {"calls": 1, "wire_bytes": 4}
    everyones = [None] * 3
    dist.all_gather_object(everyones, total)
    busiest = time_chapters.busiest(everyones)
    run = types.SimpleNamespace(device=torch.device("cpu"), world=3, rank=rank,
                                now=time.perf_counter)
    return list(busiest.items()), time_chapters.communication_alone(run, busiest)


def test_ranks_that_send_unequally_send_as_the_busiest_when_nothing_else_runs(ranks):
    for busiest, milliseconds in ranks(3)(hops_of_a_pipeline):
        assert busiest == [("all_reduce", (1, 4)), ("all_to_all", (5, 200)), ("send", (16, 6400))]
        assert milliseconds > 0


@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
def test_alone_a_collective_puts_as_much_on_the_wire(ranks, op):
    """As in the step, whatever the group that it went through there."""
    calls, total = ranks(2)(metered_alone, op)[0]
    assert calls == {op} and total["calls"] == 15 * 3 and total["wire_bytes"] == 15 * 2400


def metered_alone(op):
    run = types.SimpleNamespace(device=torch.device("cpu"), world=2, rank=dist.get_rank(),
                                now=time.perf_counter)
    with meters.CommMeter() as meter:
        time_chapters.communication_alone(run, {op: (3, 2400)})
    return set(meter.total), meter.total[op]


def test_the_clock_of_operators(monkeypatch):
    """Forward and backward; rows that are joined, and neither heads nor gradients. A tick each."""
    rows = torch.ones(4, 3, requires_grad=True)
    ticks = itertools.count()
    with time_chapters.OperatorClock(lambda: next(ticks)) as clock:
        order = torch.tensor([2, 0, 1, 3]).argsort(stable=True)                     # sort
        there = rows[order]                                                         # index
        torch.cat([there, there]).sum().backward()      # cat; and backward: new_zeros, index_put
        torch.cat([rows.flatten(), rows.flatten()])
        torch.cat([rows[None], rows[None]])
        rows.detach() @ rows.detach().T                                             # mm
    assert clock.seconds == {"sorting and copying": 5, "matmuls": 1}


@pytest.mark.parametrize("gpus", [0, 4])
def test_of_experts_and_of_the_dense_model_a_token_takes_as_many_flops(monkeypatch, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    runs = []

    def measure(ranks, *sides):
        for name, flags in sides:
            module = chapter(name)
            own = getattr(module, "flags", no_flags)
            runs.append(strict.parse(module.__file__, "", module.VARIANTS, own, flags))
            module.requires(runs[-1], ranks)
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


def test_the_shares_of_operators_are_of_a_step_without_a_clock(monkeypatch):
    def measure(ranks, first, second, clocked):
        assert first == second and clocked
        return {"ms": [[900] * 3, [90, 100, 200]],
                "operators": {"sorting and copying": 5.0, "matmuls": 50.0}}

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(time_chapters, "measure", measure)
    shape = time_chapters.SHAPES["cpu"]["experts"]
    _, header, _, *rows = time_chapters.shares(9, [])
    assert header == "| flags | a step, ms | sorting and copying | matmuls |"
    assert rows == [f"| {shape} --experts={experts} | 100.0 | 5% | 50% |" for experts in (8, 32)]


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
    assert rows[:2] == ["| 1f1b | 330 | 120 | 2.75 | 1.00 | 1.00 |",
                        "| naive | 360 | 140 | 2.57 | 1.09 | 1.17 |"]


def test_the_chapters_take_the_flags_of_every_run_that_saves():
    for name, ranks, flags in time_checkpoints.RUNS:
        module = chapter(name)
        args = strict.parse(module.__file__, "", module.VARIANTS, getattr(module, "flags",
                                                                          no_flags),
                         ["--device=cpu", "--no-verify", *flags.split()])
        module.requires(args, ranks)


def saves_in_turn(name, flags, folder):
    """For a rank of the pool: what is measured; and on rank 0, what is gathered at the end, and
    what a checkpoint has then."""
    with pytest.MonkeyPatch.context() as patch:             # the pool's other tests have their own
        patch.setattr(saving, "Saver", saving.Saver)
        patch.setattr(report, "Run", report.Run)
        measured = time_checkpoints.play(name, 2, [*flags, f"--save={folder / 'in turn'}"])
    saver, path = time_checkpoints.InTurn.last, folder / "step-000001"
    about = {"step": 1, "run": {}, "text": "", "biases": False, "remembered": {},
             "by": [name, "hand", 2]}
    state = checkpoint.state_of(saver.run.optimizers, {})
    checkpoint.save(path, state, about, 1, dist.group.WORLD)
    parts = time_checkpoints.held(saver.run.optimizers)
    whole = time_checkpoints.gathered(parts, time_checkpoints.who_sends(parts), dist.group.WORLD)
    if dist.get_rank() > 0:
        return measured, whole, None
    saved = checkpoint.Checkpoint(path, storage.read_index(path))
    return measured, whole, {name: saved.value(name, torch.empty(tensor["shape"]))
                             for name, tensor in saved.index["tensors"].items()}


@pytest.mark.parametrize(("name", "own"), [("03_zero", "--variant=zero3"),
                                           ("04_tensor_parallel", "--variant=megatron")])
def test_both_ways_of_saving_have_the_same_tensors(ranks, tmp_path, name, own):
    """Shards that end anywhere, and rectangles of which some are replicated; as it is measured."""
    flags = ["--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8", "--batch=2",
             "--vocab=131", f"--data={TEXT}", "--device=cpu", own]
    (measured, whole, saved), (_, nothing, _) = ranks(2)(saves_in_turn, name, flags, tmp_path)
    assert nothing == {} and len(whole) == len(saved) > 0
    for name, tensor in saved.items():
        assert torch.equal(tensor, whole[name]), name
    assert len(measured["ours"]) == len(measured["theirs"]) == 2
    for save in measured["ours"]:
        assert len(save["before"]) == time_checkpoints.QUIET and save["during"]
        assert 0 < save["waits"] < save["on disk"]
    assert measured["bytes"][0] == measured["bytes"][1] > 12 * measured["parameters"]


def test_the_tables_of_saves(monkeypatch):
    """The ratio is of the first step with a save in flight; the cost has all of those, and what
    training waits for."""
    ours = [{"before": [0.1, 0.2, 0.3], "during": [0.5, 0.3], "waits": 0.02, "on disk": 0.72},
            {"before": [0.2, 0.2, 0.2], "during": [0.3], "waits": 0.04, "on disk": 0.34}]
    measured = {"ours": ours, "theirs": [1.0, 1.12], "bytes": (700, 700), "parameters": 10}
    seen = []
    monkeypatch.setattr(time_checkpoints, "measure", lambda *told: seen.append(told) or measured)
    runs = [("03_zero", 2, "--dim=8")]
    _, _, _, row, _, _, _, saves = time_checkpoints.tables(runs, 2, ["--seed=1"])
    assert seen == [("03_zero", 2, 2, ["--dim=8", "--seed=1"])]
    assert row.endswith("| 200 (200 to 200) | 400 (350 to 450) | 2.00 | 280 (210 to 350) |")
    assert saves == ("| 03_zero | --dim=8 | 10 | 700 | 700 | 30 (25 to 35) | 1060 (1030 to 1090) "
                     "| 0.03 | 530 (435 to 625) | 0.50 | 0 |")


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
