"""The steps of benchmarks/gpu.py: what each runs, on how many ranks, and for how long at the most.

steps_of(machine, device) has them all, those that tell most first.
"""

import contextlib
import os
import shutil
from typing import NamedTuple

from benchmarks.gpu_machine import GB, version_of
from common import Refused
from lab import ROOT, chapters
from lab.cli import strict

FOLDER = ROOT / "runs/gpu"
WITH_FP8, WITH_BF16 = (8, 9), (8, 0)    # the compute capability of Ada, before Hopper; of Ampere
TINY = "--layers=2 --dim=64 --heads=2 --kv-heads=2 --seq=64 --vocab=256 --steps=4"      # on a CPU
MESHES = {1: "", 2: "--pp=2", 4: "--pp=2 --tp=2", 8: "--dp=2 --pp=2 --tp=2"}
IN_ITS_PLACE = {"memory": 80 * GB, "capability": [9, 0]}        # on a CPU: it skips nothing
LARGE_MESHES = {2: "--tp=2", 4: "--dp=2 --tp=2 --zero=1", 8: "--dp=4 --tp=2 --zero=1"}

FUSED = {               # what has kernels of its own on a GPU
    "06-sdpa": "--attention=sdpa --dtype=bfloat16",
    "06-kernels": "--attention=sdpa --dtype=bfloat16 --kernels",
    "06-torch": "--attention=sdpa --dtype=bfloat16 --variant=torch",
    "08-grouped": "--matmul=grouped --dtype=bfloat16",
    "05-fp8": "--precision=fp8 --kv-heads=8",
}


class Step(NamedTuple):
    """A program: what follows `python`, or torchrun; its limit in seconds; why it is skipped, if it
    is; and whether all that it prints is a table."""

    name: str
    words: list
    ranks: int = 1
    seconds: float = 60
    skipped: str = ""
    is_a_table: bool = False


def here(name=""):
    """A file of FOLDER, as it is typed in ROOT."""
    path = FOLDER / name
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def verified(n, device):
    """Chapters on n ranks, beside one GPU's run: each once, as it is by default; then what else
    they have, and float64, where differences are those of rounding alone."""
    own = {"07": "--layers=8", "09": MESHES[n]}
    first, exact, others = [], [], []
    for name in chapters.NAMES:
        number = name[:2]
        if number == "10":                              # it plans, and runs nothing
            continue
        trains, ranks = chapters.trains(name), 1 if number == "01" else n
        words = [f"{name}.py", f"--device={device}", *own.get(number, "").split()]
        words += ["--steps=3"] if trains else []
        first.append(Step(name, words, ranks))
        if not trains:
            continue
        exact.append(Step(f"{name}-float64", [*words, "--dtype=float64"], ranks))
        for variant in list(chapters.chapter(number).VARIANTS)[1:] if n > 1 else ():
            others.append(Step(f"{name}-{variant}", [*words, f"--variant={variant}"], ranks))
    fused = [Step(name, [f"{chapters.name_of(name[:2])}.py", f"--device={device}", "--steps=3",
                         *flags.split()], n) for name, flags in FUSED.items()]
    return first, [step for step in [*fused, *exact, *others] if fits(step)]


def large(n, machine, device):
    """Models of usual sizes: on one rank, and on n."""
    [gpu, *_] = machine["gpus"] or [IN_ITS_PLACE]
    memory, capability = gpu["memory"], tuple(gpu["capability"])
    tiny = TINY.split() if device == "cpu" else []
    room = 16 if memory > 32 * GB else 8 if memory > 20 * GB else 4     # sequences of gpt2
    gpt2 = "gpt2", room, "--steps=12"
    room = 8 if memory > 60 * GB else 4 if memory > 36 * GB else 1      # and of 1b
    billion = "1b", room, "--steps=8", *["--recompute=full"] * (room == 1)
    half = "--precision=bf16" if capability >= WITH_BF16 else "--precision=fp16"
    no_bf16 = "" if capability >= WITH_BF16 else "bf16 takes an Ampere or newer"
    no_fp8 = without_fp8(gpu)
    no_room = "" if memory > 22 * GB else "its states and activations take 22 GB"
    no_triton = without_triton(machine)

    def step(name, ranks, model, *more, skipped="", seconds=90):
        """Two micro-batches on each rank."""
        preset, room, *words = model
        words = [f"{chapters.name_of(name[:2])}.py", f"--preset={preset}", f"--micro-batch={room}",
                 f"--batch={2 * ranks * room}", f"--device={device}", *words, *tiny, *more]
        return Step(name, words, ranks, seconds, skipped)

    trace = [f"--profile={here('01-gpt2-trace.json')}"]
    one = [step("01-gpt2", 1, gpt2, half, *trace),
           step("01-1b", 1, billion, half, skipped=no_room, seconds=120),
           step("01-gpt2-kernels", 1, gpt2, half, "--kernels", skipped=no_triton),
           step("01-gpt2-fp8", 1, gpt2, "--precision=fp8", skipped=no_fp8 or no_triton),
           step("01-gpt2-compile", 1, gpt2, half, "--compile", seconds=120,
                skipped="on a CPU it takes minutes" if device == "cpu" else no_triton)]
    if n == 1:
        return one, []
    trace = [f"--profile={here('02-gpt2-trace.json')}"]
    mixed = dict(skipped=no_bf16, seconds=120)
    return one, [
        step("02-gpt2", n, gpt2, "--precision=bf16", *trace, **mixed),
        step("03-gpt2-zero2", n, gpt2, "--precision=bf16", "--variant=zero2", **mixed),
        step("03-1b-zero3", n, billion, "--precision=bf16", "--variant=zero3", **mixed),
        step("09-gpt2", n, gpt2, "--precision=bf16", *LARGE_MESHES[n].split(), **mixed)]


def without_triton(machine):
    """Why no kernel of Triton's runs here, if none does: it compiles with a compiler of C, too."""
    if machine["triton"] == "none":
        return "there is no Triton here"
    compilers = "cc", "gcc", "clang", os.environ.get("CC", "cc")
    return "" if any(map(shutil.which, compilers)) else "there is no C compiler here"


def without_fp8(gpu):
    """Why it has no FP8, if it has none."""
    return "" if tuple(gpu["capability"]) >= WITH_FP8 else "FP8 takes an Ada, a Hopper or newer"


def of_kernels(machine, device):
    """Their tests, and their tables."""
    no_triton = without_triton(machine)
    skipped = no_triton or ("" if version_of("pytest") != "none" else "there is no pytest here")
    cheap = ["tests/kernels/test_matmul.py", "-k", "naive"] if device == "cpu" else [
        "tests/kernels", "-k", "not compiled"]          # without what is compiled for other GPUs
    workers = [] if device == "cpu" or version_of("pytest-xdist") == "none" else ["-n", "4"]
    tests = Step("kernels-tests", ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                                   *workers, *cheap], 1, 200, skipped)
    no_gpu = "it takes a GPU" if device == "cpu" else no_triton
    [gpu, *_] = machine["gpus"] or [IN_ITS_PLACE]
    tables = [Step(f"kernels-{what}", ["benchmarks/time_kernels.py", f"--only={what}",
                                       f"--out={here()}"], 1, 100, no_gpu or skip)
              for what, skip in (("attention", ""), ("matmul", ""), ("fp8", without_fp8(gpu)),
                                 ("pointwise", ""))]
    return [tests, *tables]


def others(n, device):
    """What other commands measure of GPUs."""
    shape = "--largest=4096" if device == "cpu" else "--largest=67108864"
    speed = Step("00-speed", ["-m", "lab.speed", f"--device={device}", shape, "--repeats=5",
                              f"--json={here('00-speed-measured.json')}"], n, is_a_table=True)
    steps, only = ("7", ["--", "--device=cpu"]) if device == "cpu" else ("20", [])
    pairs = Step("01-pairs", ["benchmarks/time_chapters.py", "--only=01", f"--steps={steps}",
                              *only], 1, 150)
    return [speed] * (n > 1) + [pairs]


def steps_of(machine, device):
    """All steps, those that tell most first."""
    n = machine["used"]
    first, more = verified(n, device)
    one, several = large(n, machine, device)
    tests, *tables = of_kernels(machine, device)
    return [*first[:3], *one[:2], *first[3:], *several, *one[2:], tests, *tables,
            *others(n, device), *more]


def fits(step):
    """Whether the chapter takes these flags on so many ranks: not each variant does."""
    try:
        parsed(step)
    except Refused:
        return False
    return True


def parsed(step):
    """The arguments of a chapter's step; raises Refused as the run would."""
    name, *flags = step.words
    module = chapters.chapter(name[:2])
    own = getattr(module, "flags", lambda parser: None)
    with environment(WORLD_SIZE=step.ranks, LOCAL_WORLD_SIZE=step.ranks):
        args = strict.parse(module.__file__, "", module.VARIANTS, own, flags)
        module.requires(args, step.ranks)
    return args


@contextlib.contextmanager
def environment(**names):
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
