"""benchmarks/chapters.py: its pairs, on a CPU and on GPUs."""

import sys
import time
import types

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT, TEXT, chapter, no_flags

from lab import cli

sys.path.append(str(ROOT / "benchmarks"))
import chapters  # noqa: E402  (after the path to it)

sys.path.pop()  # or `kernels` would be benchmarks/kernels.py


@pytest.mark.parametrize("gpus", [0, 1, 4])
def test_the_chapters_take_the_flags_of_every_pair(monkeypatch, gpus):
    """With shapes for GPUs where every rank has one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    for name, ranks, both, *sides in (chapters.filled_in(*pair) for pair in chapters.PAIRS):
        module = chapter(name)
        for side in sides:
            flags = ["--no-verify", *both.split(), *side.split()]
            args = cli.parse(module.__file__, "", module.VARIANTS,
                             getattr(module, "flags", no_flags), flags)
            module.requires(args, ranks)
            assert (args.model.dim == 1024) == (gpus >= ranks)


def test_a_pair_in_the_same_process(monkeypatch):
    """The smallest one, as it is measured."""
    sides = [["--steps=5", "--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8",
              "--no-verify", f"--data={TEXT}", "--device=cpu", f"--attention={core}"]
             for core in ("plain", "sdpa")]
    measured = chapters.measure("01_single_gpu", 1, sides)
    assert [len(ms) for ms in measured["ms"]] == [2, 2] and measured["alone"] >= 0


def test_the_measuring_thread_has_the_device_of_its_rank(monkeypatch):
    """CUDA's current device is a thread's, and the runs of a pair had threads of their own."""
    device, chosen = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "barrier", lambda: None)
    run = types.SimpleNamespace(device=device, world=2, rank=1, now=time.perf_counter)
    assert chapters.communication_alone(run, {}) >= 0 and chosen == [device]


def hops_of_a_pipeline():
    """The middle one of three ranks sends twice as often, and the first sums something first."""
    rank = dist.get_rank()
    sent = {"calls": 16 if rank == 1 else 8, "bytes": 6400 if rank == 1 else 3200}
    summed = {"calls": 1, "bytes": 4}
    total = {"all_reduce": summed, "send": sent} if rank == 0 else {"send": sent}
    everyones = [None] * 3
    dist.all_gather_object(everyones, total)
    busiest = chapters.busiest(everyones)
    run = types.SimpleNamespace(device=torch.device("cpu"), world=3, rank=rank,
                                now=time.perf_counter)
    return list(busiest.items()), chapters.communication_alone(run, busiest)


def test_ranks_that_send_unequally_send_as_the_busiest_when_nothing_else_runs(ranks):
    for busiest, milliseconds in ranks(3)(hops_of_a_pipeline):
        assert busiest == [("all_reduce", (1, 4)), ("send", (16, 6400))] and milliseconds > 0


def test_the_milliseconds_of_a_sleeping_step_come_from_the_run(tmp_path):
    """On one rank, where nobody waits."""
    flags = ["--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8", "--batch=2",
             "--steps=1", "--no-verify", "--sleep=50", f"--data={TEXT}", "--device=cpu"]
    executed, simulated = chapters.asleep(1, flags)
    assert simulated == 2 * 3 * 50 <= executed < 1.3 * simulated


def test_in_the_sleeping_table_every_rank_works_equally_long(monkeypatch):
    """Whatever the schedule; and its last columns are relative to 1f1b's step."""
    module, seen = chapter(chapters.PIPELINE), []

    def asleep(ranks, flags):
        own = getattr(module, "flags", no_flags)
        args = cli.parse(module.__file__, "", module.VARIANTS, own, flags)
        module.requires(args, ranks)
        schedule = module.make_schedule(args.variant, ranks, args.batch, args.chunks)
        forwards = {sum(action.kind == "F" for action in actions) for actions in schedule.actions}
        seen.append((args.variant, {args.sleep * count for count in forwards}))
        return 300 + 30 * len(seen), 100 + 20 * len(seen)

    monkeypatch.setattr(chapters, "asleep", asleep)
    _, _, _, *rows = chapters.sleeping(["--device=cpu"])
    work = {8 * chapters.SLEEP_MS}
    assert seen == [(variant, work) for variant in module.VARIANTS if variant != "torch"]
    assert rows[:2] == ["| 1f1b | 330 | 120 | 2.75 | 1.00 | 1.00 |",
                        "| naive | 360 | 140 | 2.57 | 1.09 | 1.17 |"]
