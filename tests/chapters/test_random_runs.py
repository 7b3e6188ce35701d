"""Random legal runs of each chapter that trains, and variant, held to one GPU: `make test-all`.

What is drawn depends on the chapter, the variant and a number alone. RUNS=100 draws more of them,
and OPTIMIZERS=muon (or several, with spaces) of these alone.
In 16 bits there are 200 of any chapter, of which the first few are a part of `make test`.
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
from lab.cli import strict
from tests.conftest import CHAPTERS, TEXT, chapter, no_flags, run_main, training_chapters

RUNS = int(os.environ.get("RUNS", 6))  # of each variant
OPTIMIZERS = os.environ.get("OPTIMIZERS", "adamw sgd momentum muon").split()
MORE = {("09_5d", "hand"): 300}  # where far more can be combined
TRIES = 1000  # until one is legal
IN_16_BITS, OF_MAKE_TEST = 200, 3
DEGREES = [degrees for degrees in itertools.product(range(1, 9), repeat=4)  # of pp, dp, cp and tp
           if math.prod(degrees) <= 8]


def cases():
    """Chapter, variant and number of each run."""
    variants = [(name, variant) for name in training_chapters()
                for variant in chapter(name).VARIANTS]  # fmt: skip
    of = lambda case: RUNS if "RUNS" in os.environ else MORE.get(case, RUNS)
    return [(*case, number) for case in variants for number in range(of(case))]


def own_flags(module, variant):
    """The actions of the chapter's own flags, but for those that only other variants know."""
    parser = argparse.ArgumentParser()
    getattr(module, "flags", no_flags)(parser)
    known = {name: flags[1:] for name, flags in module.VARIANTS.items() if isinstance(flags, tuple)}
    elsewhere = {flag for flags in known.values() for flag in flags} - {*known.get(variant, ())}
    return [action for action in parser._actions[1:] if action.option_strings[0] not in elsewhere]


def drawn(rng, module, variant):
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
        "ignore": rng.choice((0, 0.3, 0.9)), "optimizer": rng.choice(OPTIMIZERS),
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
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            own = getattr(module, "flags", no_flags)
            args = strict.parse(module.__file__, "", module.VARIANTS, own, flags)
            module.requires(args, world)
            if Path(module.__file__).name.startswith("05") and args.precision == "fp8":
                fp8.in_chapter_05(args, world, None, None)  # which is asked in train
        except (SystemExit, Refused):
            return False
    return True


@pytest.mark.full
@pytest.mark.parametrize(("name", "variant", "number"), cases())
def test_a_random_run_is_the_same_as_one_gpu(ranks, tmp_path, name, variant, number):
    module, rng = chapter(name), random.Random(f"{name} {variant} {number}")
    for _ in range(TRIES):
        world, flags = drawn(rng, module, variant)
        flags += [f"--data={TEXT}", "--device=cpu", "--verify"]
        if is_legal(module, world, [*flags, "--dtype=float64"]):
            flags.append("--dtype=float64")  # else what rounds to 16 bits may still be legal
            break
        if is_legal(module, world, flags):
            break
    else:
        pytest.skip("needs a GPU")  # as chapter 06's torch does
    print(f"torchrun --nproc_per_node={world} {CHAPTERS / name}.py {' '.join(flags)}")
    (status, _, output), *_ = ranks(world, timeout=200)(run_main, name, flags, tmp_path)  # compiles
    assert status == 0, output


def with_more_tokens(rng, flags):
    """The more addends a sum has, the more of it may be lost in 16 bits."""
    for flag in flags:
        name, _, value = flag.partition("=")
        often = rng.choice((1, 2, 4)) if name in ("--seq", "--batch") else 1
        yield f"{name}={int(value) * often}" if often > 1 else flag


@pytest.mark.parametrize("number", [
    pytest.param(i, marks=[] if i < OF_MAKE_TEST else pytest.mark.full)
    for i in range(IN_16_BITS)])  # fmt: skip
def test_no_random_run_in_16_bits_is_called_wrong(ranks, tmp_path, number):
    rng = random.Random(f"16 bits {number}")
    tokens = np.random.default_rng(number).integers(128, size=25000)  # in any order: what is to be
    tokens.astype("<u2").tofile(tmp_path / "text.bin")  # learned from them nearly cancels
    name = rng.choice(training_chapters())
    module = chapter(name)
    variant, text = rng.choice(list(module.VARIANTS)), rng.choice((TEXT, tmp_path / "text.bin"))
    # Triton's interpreter takes minutes; with a small scale, small gradients are zero.
    left_out = "--kernels", "--precision=fp8", "--loss-scale"
    for _ in range(TRIES):
        world, flags = drawn(rng, module, variant)
        flags = [flag for flag in with_more_tokens(rng, flags)
                 if not flag.startswith(left_out)]  # fmt: skip
        flags += [f"--data={text}", "--device=cpu", "--verify", "--steps=3"]
        is_mixed = "--precision=" in " ".join(flags) and "--precision=fp32" not in flags
        flags += [] if is_mixed else ["--dtype=bfloat16"]
        if is_legal(module, world, flags):
            break
    else:
        pytest.skip("needs a GPU")
    print(f"torchrun --nproc_per_node={world} {CHAPTERS / name}.py {' '.join(flags)}")
    (status, run, output), *_ = ranks(world, timeout=200)(run_main, name, flags, tmp_path)
    assert status == 0 and not run["diagnosis"], output
