"""Each chapter's hand-written variants keep a GPU's rules, on pretended CUDA."""

import tomllib

import pytest

import common
from tests.conftest import ROOT, chapter, chapter_names, sample, training_chapters
from tests.support.pretend_cuda import WORLD, run_on_cuda

NAMES = {name[:2]: name for name in chapter_names()}
TABLES = tomllib.loads((ROOT / "tests/support/cuda.toml").read_text(encoding="utf-8"))


def runs(table):
    """(chapter and variant, flags, where the host waits) of each run of a table of cuda.toml."""
    return [(run, flags, sum(([wait] * count for count, wait in waits), []))
            for run, flags, waits in TABLES[table]]


def test_every_variant_is_among_them():
    tried = {run for run, *_ in TABLES["runs"]}
    for name in training_chapters():
        variants = {f"{name[:2]} {variant}" for variant in chapter(name).VARIANTS}
        assert tried >= variants - {f"{name[:2]} torch"}


def check_rules(ranks, folder, run, flags, waits, few=common.ONE_BUCKET):
    """A run on pretended CUDA is the same as on one GPU, and the host waits there only."""
    number, variant = run.split()
    if number not in NAMES:
        pytest.skip(f"there is no chapter {number}")
    flags = [*flags, f"--variant={variant}"]
    world = 4 if "--inner=2" in flags else WORLD.get(NAMES[number], 2)
    results = ranks(world, 240)(run_on_cuda, NAMES[number], flags, folder, None, few)
    for status, output, steps in results:
        assert status == 0, output
        places = [[wait.split(",")[0] for wait in step] for step in steps]
        assert places == 2 * [waits], steps
    assert " cuda, gloo " in results[0][1] and "same as one GPU" in results[0][1]


@pytest.mark.parametrize(("run", "flags", "waits"), sample(runs("runs"), 10))
def test_a_run_keeps_the_rules_and_the_host_does_not_wait_in_a_step(
        ranks, tmp_path, run, flags, waits):
    """In float64, gradients are sent module by module, as in models of more than 2^22 numbers."""
    fewer = ["--micro-batch=2"] * (run[:2] in ("04", "05", "06"))  # whose batch is not cut
    few = 100 if "--dtype=float64" in flags else common.ONE_BUCKET
    flags = ["--steps=2", *fewer, *flags.split()]
    check_rules(ranks, tmp_path, run, flags, waits, few)


@pytest.mark.parametrize(("world", "flags"), sample([
    (4, "--numbers=5"), (3, "--dtype=bfloat16"), (3, "--variant=sums"), (2, "--variant=hello")]))
def test_chapter_00_keeps_the_rules(ranks, tmp_path, world, flags):
    """Each collective by hand, and its run. (Its faults are on CPUs, also where there are GPUs.)"""
    chapter("00_collectives")  # or skip
    results = ranks(world, 240)(run_on_cuda, "00_collectives", flags.split(), tmp_path)
    assert all(status == 0 for status, *_ in results), results[0][1]
    assert "hello" in flags or f"{world} ranks · cuda, gloo " in results[0][1]


@pytest.mark.full
@pytest.mark.parametrize(("run", "flags", "waits"), runs("checkpointed"))
def test_a_checkpoint_is_copied_to_the_host_and_back(ranks, tmp_path, run, flags, waits):
    """In no step does the host wait for it; and the run goes on from it."""
    saved = tmp_path / "saved"
    save = "--steps=2", "--save-every=1", f"--save={saved}"
    resume = "--steps=4", f"--resume={saved}"
    for more in (save, resume):
        check_rules(ranks, tmp_path, run, [*flags.split(), *more], waits)
