"""The steps of benchmarks/gpu.py: what each runs, on how many ranks, and for how long at the most.

steps_of(machine, device) lists them all, the most telling first.
"""

import os
import shutil
from importlib import metadata
from typing import NamedTuple

from lab import ROOT, chapters

GB = 1e9
FOLDER = ROOT / "runs/gpu"
WITH_FP8, WITH_BF16 = (8, 9), (8, 0)    # the compute capability of Ada, before Hopper; of Ampere
TINY = "--layers=2 --dim=64 --heads=2 --kv-heads=2 --seq=64 --vocab=256 --steps=4"      # on a CPU
MESHES = {1: "", 2: "--pp=2", 4: "--pp=2 --tp=2", 8: "--dp=2 --pp=2 --tp=2"}
LARGE_MESHES = {2: "--tp=2", 4: "--dp=2 --tp=2 --zero=1", 8: "--dp=4 --tp=2 --zero=1"}
ON_A_CPU = {"memory": 80 * GB, "capability": [9, 0]}    # in a GPU's place: nothing is skipped
FUSED = {               # variants with kernels of their own on a GPU
    "06-sdpa": "--attention=sdpa --dtype=bfloat16",
    "06-kernels": "--attention=sdpa --dtype=bfloat16 --kernels",
    "06-torch": "--attention=sdpa --dtype=bfloat16 --variant=torch",
    "08-grouped": "--matmul=grouped --dtype=bfloat16",
    "05-fp8": "--precision=fp8 --kv-heads=8",
}


class Step(NamedTuple):
    """A program: the words after `python`, or torchrun; its limit in seconds; why it is skipped, if
    it is; and what its output is, "text" or "tables" in Markdown, if the report shows all of it."""

    name: str
    words: list
    ranks: int = 1
    seconds: float = 60
    skipped: str = ""
    shows: str = ""


def steps_of(machine, device):
    """All steps, the most telling first."""
    n = machine["used"]
    gpu = machine["gpus"][0] if machine["gpus"] else ON_A_CPU
    no_triton = without_triton(machine)
    no_fp8 = "" if tuple(gpu["capability"]) >= WITH_FP8 else "FP8 takes an Ada, a Hopper or newer"
    first, fused = verified(n, device)
    one, several = large(n, gpu, device, no_triton, no_fp8)
    return [*first[:3], *one[:2], *first[3:], *several, *one[2:],
            *kernels(device, no_triton, no_fp8), *others(n, device), *fused]


def here(name=""):
    """A file of FOLDER, as it is typed in ROOT."""
    path = FOLDER / name
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def chapter_step(name, ranks, device, *flags, **more):
    """A run of the chapter with whose number the name begins."""
    words = [f"{chapters.name_of(name[:2])}.py", f"--device={device}", *flags]
    return Step(name, words, ranks, **more)


def verified(n, device):
    """Chapters on n ranks, compared with one GPU's run: each with its defaults, and FUSED."""
    own, first = {"07": ["--layers=8"], "09": MESHES[n].split()}, []
    for name in chapters.NAMES:
        number = name[:2]
        if number != "10":                              # it plans, and runs nothing
            steps = ["--steps=3"] if chapters.trains(name) else []
            first.append(chapter_step(name, 1 if number == "01" else n, device,
                                      *own.get(number, []), *steps))
    fused = [chapter_step(name, n, device, "--steps=3", *flags.split())
             for name, flags in FUSED.items()]
    no_gpu = "it takes a GPU" if device == "cpu" else ""
    return first, [step._replace(skipped=no_gpu) if step.name == "06-torch" else step
                   for step in fused]


def large(n, gpu, device, no_triton, no_fp8):
    """Models of usual sizes: steps on one rank, and on n."""
    memory, has_bf16 = gpu["memory"], tuple(gpu["capability"]) >= WITH_BF16
    gpt2 = "gpt2", 16 if memory > 32 * GB else 8 if memory > 20 * GB else 4, ["--steps=12"]
    room = 8 if memory > 60 * GB else 4 if memory > 36 * GB else 1      # sequences
    billion = "1b", room, ["--steps=8", *["--recompute=full"] * (room == 1)]
    half = "--precision=bf16" if has_bf16 else "--precision=fp16"
    no_room = "" if memory > 22 * GB else "its states and activations take 22 GB"

    def step(name, ranks, model, *flags, seconds=90, skipped=""):
        """Two micro-batches on each rank."""
        preset, room, usual = model
        tiny = TINY.split() if device == "cpu" else []
        return chapter_step(name, ranks, device, f"--preset={preset}", f"--micro-batch={room}",
                            f"--batch={2 * ranks * room}", *usual, *tiny, *flags,
                            seconds=seconds, skipped=skipped)

    no_compiler = "on a CPU it takes minutes" if device == "cpu" else no_triton
    one = [step("01-gpt2", 1, gpt2, half),
           step("01-1b", 1, billion, half, skipped=no_room, seconds=120),
           step("01-gpt2-kernels", 1, gpt2, half, "--kernels", skipped=no_triton),
           step("01-gpt2-fp8", 1, gpt2, "--precision=fp8", skipped=no_fp8 or no_triton),
           step("01-gpt2-compile", 1, gpt2, half, "--compile", seconds=120, skipped=no_compiler)]
    if n == 1:
        return one, []
    mixed = {"skipped": "" if has_bf16 else "bf16 takes an Ampere or newer", "seconds": 120}
    bf16 = "--precision=bf16"
    return one, [
        step("02-gpt2", n, gpt2, bf16, **mixed),
        step("03-gpt2-zero2", n, gpt2, bf16, "--variant=zero2", **mixed),
        step("03-1b-zero3", n, billion, bf16, "--variant=zero3", **mixed),
        step("09-gpt2", n, gpt2, bf16, *LARGE_MESHES[n].split(), **mixed)]


def kernels(device, no_triton, no_fp8):
    """The kernels' tests, and their tables."""
    skipped = no_triton or ("" if version_of("pytest") != "none" else "there is no pytest here")
    cheap = ["tests/kernels/test_matmul.py", "-k", "naive"]
    tests = cheap if device == "cpu" else ["tests/kernels", "-k", "not compiled"]
    workers = [] if device == "cpu" or version_of("pytest-xdist") == "none" else ["-n", "4"]
    words = ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *workers, *tests]
    no_gpu = "it takes a GPU" if device == "cpu" else no_triton
    return [Step("kernels-tests", words, 1, 200, skipped)] + [
        Step(f"kernels-{what}", ["benchmarks/time_kernels.py", f"--only={what}"], 1, 100,
             no_gpu or no_fp8 * (what == "fp8"), "tables")
        for what in ("attention", "matmul", "fp8", "pointwise")]


def others(n, device):
    """Other commands that measure GPUs."""
    rates = Step("00-rates", ["-m", "lab.scaling", "rates",
                              f"--json={here('00-rates-measured.json')}"], n, shows="text")
    more = ["--steps=7", "--", "--device=cpu"] if device == "cpu" else ["--steps=20"]
    pairs = Step("01-pairs", ["benchmarks/time_chapters.py", "--only=01", *more], 1, 150,
                 shows="tables")
    return [rates] * (n > 1) + [pairs]


def version_of(package):
    """As it is installed. It is not imported, and may be broken: then its step says so."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def without_triton(machine):
    """Why no kernel of Triton's runs here, if none does: it compiles with a compiler of C, too."""
    if machine["triton"] == "none":
        return "there is no Triton here"
    compilers = "cc", "gcc", "clang", os.environ.get("CC", "cc")
    return "" if any(map(shutil.which, compilers)) else "there is no C compiler here"
