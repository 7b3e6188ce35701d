"""Chapter 09: every product of axes gives one GPU's numbers, and sends what the formulas say."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from test_04_tensor_parallel import TRAINING, covered

from lab import schedules

NINE = "09_5d"


@pytest.fixture(scope="module")
def nine():
    return chapter(NINE)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "dp": (1, 2, 4),
    "pp": (1, 2, 4),
    "cp": (1, 2),
    "tp": (1, 2, 4),
    "ep": (1, "dp"),
    "zero": (0, 1, 2, "3", "3 --regather"),
    "schedule": ("1f1b", "interleaved", "zb-h1", "dualpipe-v"),
    "experts": (None, 4),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head
    "kv-heads": (4, 2, 1),
    "micro-batch": (1, 2),
    "attention": ("plain", "sdpa"),
    "order": ("pp,dp,cp,tp", "tp,cp,pp,dp"),
    "optimizer": ("adamw", "sgd"),
    "clip": (None, 0.1),
}


def world_of(one):
    return one["dp"] * one["pp"] * one["cp"] * one["tp"]


def fits(one, worlds=(1, 2, 4, 8)):
    tied_3 = one["preset"] != "tiny" and str(one["zero"]).startswith("3")
    without_experts = one["ep"] == "dp" and (one["experts"] is None or one["dp"] == 1)
    return world_of(one) in worlds and not tied_3 and not without_experts


def drawn(number, **kept):
    """So many settings that fit, by chance."""
    rng, some = random.Random(0), []
    while len(some) < number:
        one = {name: rng.choice(values) for name, values in SETTINGS.items()} | kept
        if fits(one, (world_of(one),) if kept else (1, 2, 4, 8)):
            some.append(one)
    return some


def flags_of(one):
    one, depth = dict(one), one["pp"] * (2 if one["schedule"] in ("interleaved", "dualpipe-v") else 1)
    one["ep"] = one["dp"] if one["ep"] == "dp" else 1
    given = [f"--{name}={value}" for name, value in one.items() if value is not None]
    sequences = one["dp"] * 2 * one["pp"] * one["micro-batch"]
    return [*TRAINING, "--dtype=float64", "--vocab=128", f"--layers={max(depth, 2)}", "--dim=32",
            "--heads=4", "--seq=16", f"--batch={sequences}", *" ".join(given).split()]


def hold(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(world_of(one), timeout=150)(run_main, NINE, flags, tmp_path), flags)


@pytest.mark.parametrize("one", covered(drawn(300)))
def test_same_as_one_gpu(ranks, tmp_path, one):
    hold(ranks, tmp_path, one)
