"""Random legal runs of every chapter and variant, each held to one GPU: for `make test-all`.

What is drawn depends on the chapter, the variant and a number alone. RUNS=100 draws more of them.
"""

import argparse
import contextlib
import io
import os
import random

import pytest
from conftest import CHAPTERS, TEXT, chapter, chapter_names, no_flags, run_main

from lab import cli

RUNS = int(os.environ.get("RUNS", 6))  # of each variant
TRIES = 1000  # until one is legal
NOT_DRAWN = {"--draw", "--ranks", "--micro-batches", "--sleep"}  # chapter 07's: drawings, and sleep


def variants():
    return [(name, variant) for name in chapter_names() for variant in chapter(name).VARIANTS]


def own_flags(module, variant):
    """The actions of the chapter's own flags, but for those that only other variants know, and
    those that are not drawn."""
    parser = argparse.ArgumentParser()
    getattr(module, "flags", no_flags)(parser)
    known = {name: flags[1:] for name, flags in module.VARIANTS.items() if isinstance(flags, tuple)}
    elsewhere = {flag for flags in known.values() for flag in flags} - {*known.get(variant, ())}
    left_out = elsewhere | NOT_DRAWN
    return [action for action in parser._actions[1:] if action.option_strings[0] not in left_out]


def drawn(rng, module, variant):
    """A number of ranks and flags that need not fit each other."""
    heads, world = rng.randint(1, 8), rng.randint(1, 6)
    flags = {
        "variant": variant,
        "layers": rng.choice((1, 2, 3, world, 2 * world)),
        "heads": heads, "kv-heads": rng.randint(1, heads),
        "dim": 2 * heads * rng.randint(1, 6), "seq": rng.randint(1, 24),
        "vocab": rng.randint(128, 300), "attention": rng.choice(("plain", "sdpa")),
        "batch": rng.choice((1, world, 2 * world, 3 * world)), "steps": rng.randint(1, 4),
        "ignore": rng.choice((0, 0.3, 0.9)), "optimizer": rng.choice(("adamw", "sgd", "momentum")),
        "seed": rng.randint(0, 99)}
    flags |= {"micro-batch": rng.randint(1, 3)} if rng.random() < 0.7 else {}
    flags |= {"clip": rng.choice((0.01, 0.5, 100))} if rng.random() < 0.5 else {}
    words = [f"--{name}={value}" for name, value in flags.items()]

    for action in own_flags(module, variant):
        flag = rng.choice(action.option_strings)
        if rng.random() < 0.5:
            continue
        if action.nargs == 0:
            words.append(flag)
        elif action.choices:
            words.append(f"{flag}={rng.choice(list(action.choices))}")
        elif action.type is int:
            words.append(f"{flag}={rng.choice((*range(5), world, 2 * world))}")
        elif action.type is float:
            words.append(f"{flag}={(action.default or 1) * rng.choice((0.01, 0.5, 1))}")
    return world, words


def is_legal(module, world, flags):
    with contextlib.redirect_stderr(io.StringIO()):
        try:
            own = getattr(module, "flags", no_flags)
            args = cli.parse(module.__file__, "", module.VARIANTS, own, flags)
            module.requires(args, world)
        except SystemExit:
            return False
    return True


@pytest.mark.full
@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize(("name", "variant"), variants())
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
