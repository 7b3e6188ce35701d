"""Random legal runs of each chapter that trains, compared with one GPU: `make test-all`.

In float64, each variant with each optimizer that it accepts. In float32 and in bf16, a thousand
runs of any chapter, none of which may be called wrong: a tolerance is what rounding explains.
What is drawn depends only on the chapter, the variant and a number. RUNS=100 draws more of each.
"""

import argparse
import contextlib
import io
import itertools
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from common import Refused
from kernels import fp8
from lab import launch
from tests.conftest import CHAPTERS, TEXT, chapter, no_flags, run_main, sample, training_chapters
from tests.support.runs import TABLES

RUNS = int(os.environ.get("RUNS", 4))  # in float64, of each variant
OPTIMIZERS = "adamw", "sgd", "momentum", "muon"
MORE = {("09_5d", "hand"): 120}  # where far more can be combined
TRIES = 1000  # until one is legal
ROUNDED = 1000  # runs in float32 and bf16
DEGREES = [degrees for degrees in itertools.product(range(1, 9), repeat=4)  # of pp, dp, cp and tp
           if math.prod(degrees) <= 8]


def cases():
    """Chapter, variant and number of each run."""
    variants = [(name, variant) for name in training_chapters()
                for variant in chapter(name).VARIANTS]  # fmt: skip
    return [(*case, number) for case in variants for number in range(MORE.get(case, RUNS))]


def own_flags(module, variant):
    """The actions of the chapter's own flags, but for those that only other variants know."""
    parser = argparse.ArgumentParser()
    getattr(module, "flags", no_flags)(parser)
    known = {name: flags[1:] for name, flags in module.VARIANTS.items() if isinstance(flags, tuple)}
    elsewhere = {flag for flags in known.values() for flag in flags} - {*known.get(variant, ())}
    return [action for action in parser._actions[1:] if action.option_strings[0] not in elsewhere]


def drawn(rng, module, variant, optimizer):
    """A number of ranks and flags that need not fit each other."""
    actions, world, pp, dp, cp, tp = own_flags(module, variant), rng.randint(1, 6), 1, 1, 1, 1
    has_axes = any("--pp" in action.option_strings for action in actions)
    if has_axes:
        pp, dp, cp, tp = rng.choice(DEGREES)
        world = pp * dp * cp * tp
    heads, chunks = tp * rng.randint(1, 8 // tp), cp * tp * (2 if cp > 1 else 1)
    flags = {
        "variant": variant,
        "layers": rng.choice((1, 2, 3, world, 2 * world)),
        "heads": heads, "kv-heads": rng.randint(1, heads),
        "dim": 2 * heads * rng.randint(1, 6), "seq": chunks * rng.randint(1, 24 // chunks),
        "vocab": rng.randint(128, 300), "attention": rng.choice(("plain", "sdpa")),
        "batch": rng.choice((1, world, 2 * world, 3 * world)), "steps": rng.randint(1, 4),
        "ignore": rng.choice((0, 0.3, 0.9)), "optimizer": optimizer,
        "seed": rng.randint(0, 99), "block": rng.choice(("gpt", "llama")),
        "ffn": 2 * tp * world * rng.randint(1, 9)}
    own = {name for action in actions for name in action.option_strings}
    flags |= {} if "--precision" in own else {"precision": rng.choice(("fp32", "bf16"))}
    flags |= {} if "--recompute" in own else {
        "recompute": rng.choice(("none", "selective", "full"))}
    flags |= {"micro-batch": rng.randint(1, 3)} if rng.random() < 0.7 else {}
    flags |= {"clip": rng.choice((0.01, 0.5, 100))} if rng.random() < 0.5 else {}
    if has_axes:
        stage = dp * cp * tp  # over which experts are folded
        ep = rng.choice([ep for ep in range(1, stage + 1) if stage % ep == 0])
        flags |= {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
        flags |= {"experts": ep * rng.randint(1, 4)} if ep > 1 or rng.random() < 0.3 else {}
    words = [f"--{name}={value}" for name, value in flags.items()]

    for action in actions:
        flag = rng.choice(action.option_strings)
        if flag[2:] in flags or rng.random() < 0.5:
            continue
        if action.nargs == 0:
            words.append(flag)
        elif action.choices:
            words.append(f"{flag}={rng.choice(list(action.choices))}")
        elif "," in str(action.default):  # names in any order
            names = action.default.split(",")
            words.append(f"{flag}={','.join(rng.sample(names, len(names)))}")
        elif action.type is int:
            words.append(f"{flag}={rng.choice((*range(5), world, 2 * world))}")
        elif action.type is float:
            words.append(f"{flag}={(action.default or 1) * rng.choice((0.01, 0.5, 1))}")
    return world, words


def is_legal(module, world, flags):
    """Whether the chapter accepts these flags on so many ranks."""
    if "--noise-scale" in flags and world == 1:
        return False  # which is asked when the run begins
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            args = launch.parse(module, flags)
            module.requires(args, world)
            if Path(module.__file__).name.startswith("05") and args.precision == "fp8":
                fp8.in_chapter_05(args, world, None, None)  # which is asked in train
        except (SystemExit, Refused):
            return False
    return True


def with_more_tokens(rng, flags):
    """The more addends a sum has, the more of it may be lost to rounding."""
    for flag in flags:
        name, _, value = flag.partition("=")
        often = rng.choice((1, 2, 4)) if name in ("--seq", "--batch") else 1
        yield f"{name}={int(value) * often}" if often > 1 else flag


def legal_run(rng, name, variant, optimizers, *more, change=lambda rng, flags: flags):
    """(ranks, flags): the first legal one that is drawn; None if there is none. more: flags."""
    module = chapter(name)
    for _ in range(TRIES):
        world, flags = drawn(rng, module, variant, rng.choice(optimizers))
        flags = [*change(rng, flags), "--device=cpu", "--verify", *more]
        if is_legal(module, world, flags):
            print(f"torchrun --nproc_per_node={world} {CHAPTERS / name}.py {' '.join(flags)}")
            return world, flags
    return None


def test_every_variant_is_in_the_table_of_runs():
    """Those by hand are run every day."""
    for name in training_chapters():
        assert name[:2] in TABLES, f"tests/chapters/runs.toml has no runs of {name}"
        table = TABLES[name[:2]]
        words = f"{table['base']} {table['daily']}".split()
        _, *variants = chapter(name).VARIANTS  # the first is the default
        for variant in variants:
            assert variant == "torch" or f"--variant={variant}" in words, f"{name} {variant}"


@pytest.mark.full
@pytest.mark.parametrize(("name", "variant", "number"), sample(cases(), 0))
def test_a_random_run_is_the_same_as_one_gpu(ranks, tmp_path, name, variant, number):
    rng, text = random.Random(f"{name} {variant} {number}"), f"--data={TEXT}"
    legal = (legal_run(rng, name, variant, [OPTIMIZERS[number % 4]], text, "--dtype=float64")
             or legal_run(rng, name, variant, OPTIMIZERS, text, "--dtype=float64")
             or legal_run(rng, name, variant, OPTIMIZERS, text))  # what rounds may refuse float64
    if not legal:
        pytest.skip("needs a GPU")  # as chapter 06's torch does
    world, flags = legal
    (status, _, output), *_ = ranks(world, timeout=400)(run_main, name, flags, tmp_path)
    assert status == 0, output


def without_kernels(rng, flags):
    """Triton's interpreter takes minutes; with a small --loss-scale, small gradients are zero."""
    left_out = "--kernels", "--precision=fp8", "--loss-scale"
    return [flag for flag in with_more_tokens(rng, flags) if not flag.startswith(left_out)]


@pytest.mark.parametrize("number", sample(range(ROUNDED), 1))
def test_no_random_run_is_called_wrong(ranks, tmp_path, number):
    rng = random.Random(f"rounded {number}")
    tokens = np.random.default_rng(number).integers(128, size=25000)  # in any order: what is to be
    tokens.astype("<u2").tofile(tmp_path / "text.bin")  # learned from them nearly cancels
    name = rng.choice(training_chapters())
    variant, text = rng.choice(list(chapter(name).VARIANTS)), rng.choice(
        (TEXT, tmp_path / "text.bin"))
    dtype = "bfloat16" if number % 5 == 4 else "float32"  # half of these with --precision bf16
    legal = legal_run(rng, name, variant, OPTIMIZERS, f"--data={text}", "--steps=3",
                      f"--dtype={dtype}", change=without_kernels)
    if not legal:
        pytest.skip("needs a GPU")
    world, flags = legal
    (status, run, output), *_ = ranks(world, timeout=400)(run_main, name, flags, tmp_path)
    assert status == 0 and not run["diagnosis"], output
