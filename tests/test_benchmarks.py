"""The benchmarks: what they compare, and how they measure it, on a CPU and on GPUs."""

import contextlib
import os
import sys
import types

import pytest
import torch

import common
from benchmarks import draw_batch, time_chapters
from lab import launch
from tests.conftest import TEXT, chapter
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
        models = []
        for side in sides:
            of_side, own = time_chapters.of_chapter(name, side)
            args = accepted(of_side, ranks, ["--no-verify", *both.split(), *own])
            assert (args.model.dim == 1024) == (gpus >= ranks)
            models.append((args.batch, args.micro_batch, args.model))
        (batch, micro_batch, model), other = models
        assert (batch, micro_batch) == other[:2]
        if pair[2] == "{dense}":  # a token takes as many FLOPs, but for the router
            router = model.layers * model.experts * model.dim
            assert model.active() - router == other[2].parameters()


def test_a_pair_in_the_same_process(monkeypatch, tmp_path):
    """The smallest one, of two chapters, as it is measured: in a program that is forked from an
    interpreter which knows torch."""

    def popen(command, env, **pipes):
        assert command[0] == sys.executable
        more = {name: value for name, value in env.items() if os.environ.get(name) != value}
        [status], *printed = programs.run(*command[1:], cwd=tmp_path, **more)
        run = types.SimpleNamespace(returncode=status, communicate=lambda: printed)
        return contextlib.nullcontext(run)

    monkeypatch.setattr(time_chapters.subprocess, "Popen", popen)
    sides = [["--steps=5", "--no-verify", *TINY, f"--attention={core}"]
             for core in ("plain", "sdpa")]
    measured = time_chapters.measure(1, *zip(["08_expert_parallel", "02_data_parallel"], sides))
    assert [len(ms) for ms in measured] == [2, 2] and min(map(min, measured)) > 0


def test_two_runs_take_turns(monkeypatch):
    """A step of one, a step of the other; and both come to their end."""
    steps = []

    def run_chapter(turns, chapter, flags):
        own, other = turns
        for step in range(3):
            other.release()
            own.acquire()
            steps.append((chapter, step))
        return types.SimpleNamespace(args=types.SimpleNamespace(steps=3))

    monkeypatch.setattr(time_chapters, "run_chapter", run_chapter)
    time_chapters.alternate([("a", []), ("b", [])])
    assert steps == [(name, step) for step in range(3) for name in "ab"]


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
