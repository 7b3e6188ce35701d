"""Runs of chapters that must give one GPU's numbers: those of tests/chapters/runs.toml."""

import dataclasses
import functools
import math
import os
import re
import tomllib
import types
from typing import NamedTuple

import pytest
import torch

import common
from lab import chapters
from tests.conftest import FULL, ROOT, STEPS, TEXT, run_main

TABLES = tomllib.loads((ROOT / "tests/chapters/runs.toml").read_text(encoding="utf-8"))
ALWAYS = (STEPS, "--ignore=0.5", "--verify", "--dtype=float64", "--device=cpu", f"--data={TEXT}")
SECONDS = 240  # after which a run hangs


class Run(NamedTuple):
    """A run of a chapter."""

    chapter: str
    world: int
    flags: tuple


def run_of(line, base=""):
    """The Run of "04 3 --variant=overlap": a chapter, a number of ranks, flags."""
    number, world, *flags = line.split()
    return Run(chapters.name_of(number), int(world), (*ALWAYS, *base.split(), *flags))


def runs(table):
    """The runs of a table of runs.toml, for parametrize."""
    lines = TABLES[table]["daily"]
    if FULL:
        lines += TABLES[table]["full"]
    return [pytest.param(run_of(line, TABLES[table]["base"]), id=" ".join(line.split()))
            for line in re.split(r"\n(?=\d)", lines.strip())]


def check_run(ranks, folder, run):
    """Run it on ranks of the pool, and compare it with one GPU: to the last bits in float64, by the
    report's own tolerance in other dtypes. Returns its JSON and its output."""
    results = ranks(run.world, SECONDS)(run_main, run.chapter, run.flags, folder)
    status, record, output = results[0]
    assert status == 0, output
    if record["config"]["dtype"] == "float64":
        compare_with_one_gpu(record, run.flags)
    assert all(check["ok"] is not False for check in record["checks"]), output
    return record, output


def compare_with_one_gpu(record, flags):
    """Assert of a run in float64 that all its steps (2 or more) were those of one GPU."""
    assert len(record["reference_loss"]) == record["config"]["steps"] >= 2
    compare_without_ranks(record)
    assert max(record[f"max_{what}_diff"] for what in ("loss", "grad", "param")) < 1e-12
    if "--clip=0.1" in flags:
        assert min(record["grad_norm"]) > 0.1  # the clipping was at work


def compare_without_ranks(record):
    """Compare losses and gradient norms of a dense model, unless it is rounded to 8 bits, with
    those of `steps_without_ranks`."""
    config = record["config"]
    if config.get("experts") or config.get("precision") == "fp8":
        return
    shape = tuple(config[field.name] for field in dataclasses.fields(common.Config))
    names = "data", "batch", "steps", "seed", "ignore", "optimizer", "lr", "clip"
    packed = config["documents"], config["window"]
    args = shape, *(config[name] for name in names), packed, tuple(config["ramp"])
    is_late = record["variant"] == "2bw"
    losses, norms = steps_without_ranks(*args, is_late)
    assert record["loss"] == pytest.approx(losses, rel=1e-10)
    assert record["grad_norm"] == pytest.approx(norms, rel=1e-9)
    if is_late:
        in_time = record["recorded"]["losses_in_time"]
        assert in_time == pytest.approx(steps_without_ranks(*args)[0], rel=1e-10)
        assert in_time[0] == pytest.approx(record["loss"][0], rel=1e-10)
        assert all(abs(x - y) > 1e-6 for x, y in zip(in_time[1:], record["loss"][1:]))


OPTIMIZERS = {
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr or 5e-4, (0.9, 0.95), eps=1e-6),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr or 0.1),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr or 0.02, momentum=0.9),
    "muon": lambda params, lr: common.OPTIMIZERS["muon"](params, lr),  # test_11_muon.py has it
}


@functools.cache
def steps_without_ranks(shape, data, batch, steps, seed, ignore, optimizer, lr, clip, packed,
                        ramp, is_late=False):
    """Losses and gradient norms of PyTorch's own step in float64, in this process, which is no
    rank. Comparing a run with one GPU misses what both get wrong: text, weights or a rate that
    depend on the number of ranks, say.

    is_late: the loss and the gradient of a step are those of weights which are a step old.
    """
    assert "WORLD_SIZE" not in os.environ
    cfg = common.Config(*shape)
    text = common.Text(types.SimpleNamespace(
        model=cfg, data=data, batch=batch, seed=seed, ignore=ignore, documents=packed[0],
        ramp=ramp))
    model, losses, norms = common.gpt(cfg, seed, dtype=torch.float64), [], []
    update = OPTIMIZERS[optimizer](model.parameters(), lr)
    before = now = [p.detach().clone() for p in model.parameters()]
    for step in range(steps):
        if is_late:
            before, now = now, [p.detach().clone() for p in model.parameters()]
            torch._foreach_copy_([p.data for p in model.parameters()], before)
        update.zero_grad()
        tokens, targets, valid = text.batch(step)
        if any(packed):
            model.block1.attn.rope.pack(text.starts(step), packed[1])
        logits = model(tokens).transpose(1, 2)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / valid
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item())
        if is_late:
            torch._foreach_copy_([p.data for p in model.parameters()], now)
        update.step()
        losses.append(loss.item())
    return losses, norms
