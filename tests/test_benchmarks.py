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
    run = types.SimpleNamespace(device=device, world=2, rank=1, now=time.perf_counter,
                                comm=types.SimpleNamespace(total={}))
    assert chapters.communication_alone(run) >= 0 and chosen == [device]
