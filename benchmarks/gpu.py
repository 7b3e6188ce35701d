"""What was never run on a GPU, in one go: chapters on NCCL, speed, kernels, FP8, profiles.

    python benchmarks/gpu.py                        on every GPU here, 10 minutes; `make gpu`
    python benchmarks/gpu.py --only 02 kernels      the steps whose names begin so
    python benchmarks/gpu.py --device cpu           the same list in the smallest sizes, without one

Each step is a program of its own with a limit of time. One that fails is named, and the others go
on. What no time is left for is named, too. After each step, a section of benchmarks/RESULTS.md is
written anew: the machine, a row for each step, the speed of large models, the kernels' tables. What
a step has printed goes to runs/gpu/NAME.txt. With --device cpu it all goes to runs/gpu/.

Chapters that train the tiny model are compared with one GPU's run, tensor by tensor. MFU is chapter
01's: the FLOPs that the model needs over the time and the peak in bf16, of all GPUs together.

Exit status: 0; 1 if a step has failed; 2 for a bad flag, or where there is no GPU; 130 after
Ctrl-C: what is written by then stays.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from benchmarks import results  # noqa: E402
from common import Refused  # noqa: E402
from lab import chapters  # noqa: E402
from lab.bench import overlap  # noqa: E402
from lab.bench.formulas import WATCHED_STEPS  # noqa: E402
from lab.bench.machines import PEAK_FLOPS  # noqa: E402
from lab.cli import commands, refusals  # noqa: E402

FOLDER = ROOT / "runs/gpu"
RANKS = 8, 4, 2, 1      # as many as there are GPUs, at the most
KEPT = 400              # lines of what a step has printed
MARK = "FIVEFOLD_STEP"  # in the environment of all that a step starts, wherever it is by then
GB = 1e9
WITH_FP8, WITH_BF16 = (8, 9), (8, 0)    # the compute capability of Ada, before Hopper; of Ampere


class Step(NamedTuple):
    """A program: what follows `python`, or torchrun; its limit in seconds; why it is skipped, if it
    is; and whether all that it prints is a table."""

    name: str
    words: list
    ranks: int = 1
    seconds: float = 60
    skipped: str = ""
    is_a_table: bool = False


class Row(NamedTuple):
    """What became of a step: ok, failed, skipped, left out; and what it showed."""

    step: Step
    outcome: str
    seconds: float = 0
    showed: str = ""
    run: dict | None = None             # the JSON of a chapter
    tables: str = ""                    # that a benchmark has printed


# ------------------------------------------------------------------------------------ the machine

def machine_of(device):
    """{what is known of this machine}, in plain data."""
    told = {"gpus": [], "torch": torch.__version__, "python": platform.python_version(),
            "triton": version_of("triton"),
            "commit": said_by("git", "rev-parse", "--short", "HEAD")}
    if device == "cpu":
        return told
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        told["gpus"].append({"name": gpu.name, "memory": gpu.total_memory,
                             "capability": [gpu.major, gpu.minor]})
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ("none",)
    return told | {"driver": driver, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}


def version_of(package):
    if importlib.util.find_spec(package) is None:
        return "none"
    return importlib.import_module(package).__version__


def said_by(*command):
    """The first line that a program prints."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
        if said.returncode == 0 and said.stdout.strip():
            return said.stdout.splitlines()[0]
    return "unknown"


def asked_another_process(device):
    """The same from another process, since whoever asks a GPU for its name keeps memory there."""
    if device == "cpu":
        return machine_of(device)
    said = "nothing within two minutes"
    with contextlib.suppress(subprocess.TimeoutExpired):
        told = subprocess.run([sys.executable, __file__, "--tell"], capture_output=True, text=True,
                              timeout=120)
        if told.returncode == 0:
            return json.loads(told.stdout)
        said = last_of(told.stderr.splitlines())
    refusals.fail(f"the GPU does not say what it is: {said}", status=1)


def called(machine):
    """What a section of RESULTS.md is named after."""
    gpus = machine["gpus"]
    return f"{len(gpus)} x {gpus[0]['name']}" if gpus else "no GPU"


def described(machine):
    """In a line."""
    what = [f"{os.cpu_count()} CPU cores"]
    if machine["gpus"]:
        gpu = machine["gpus"][0]
        what = [f"{called(machine)} of {gpu['memory'] / GB:.0f} GB, compute capability "
                f"{'.'.join(map(str, gpu['capability']))}", f"driver {machine['driver']}",
                f"CUDA {machine['cuda']}", f"NCCL {machine['nccl']}"]
    what += [f"{name} {machine[name.lower()]}" for name in ("torch", "Triton", "Python", "commit")]
    return ", ".join(what)


# -------------------------------------------------------------------------------------- the steps

TINY = "--layers=2 --dim=64 --heads=2 --kv-heads=2 --seq=64 --vocab=256 --steps=4"      # on a CPU
MESHES = {1: "", 2: "--pp=2", 4: "--pp=2 --tp=2", 8: "--dp=2 --pp=2 --tp=2"}
LARGE_MESHES = {2: "--tp=2", 4: "--dp=2 --tp=2 --zero=1", 8: "--dp=4 --tp=2 --zero=1"}

FUSED = {               # what has kernels of its own on a GPU
    "06-sdpa": "--attention=sdpa --dtype=bfloat16",
    "06-kernels": "--attention=sdpa --dtype=bfloat16 --kernels",
    "06-torch": "--attention=sdpa --dtype=bfloat16 --variant=torch",
    "08-grouped": "--matmul=grouped --dtype=bfloat16",
    "05-fp8": "--precision=fp8 --kv-heads=8",
}


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
    gpu = machine["gpus"][0] if machine["gpus"] else {"memory": 80 * GB, "capability": [9, 0]}
    memory, capability = gpu["memory"], tuple(gpu["capability"])
    tiny = TINY.split() if device == "cpu" else []
    room = 16 if memory > 32 * GB else 8 if memory > 20 * GB else 4     # sequences of gpt2
    gpt2 = ["--preset=gpt2", f"--micro-batch={room}", "--steps=12", f"--device={device}"]
    room = 8 if memory > 60 * GB else 4 if memory > 36 * GB else 1      # and of 1b
    billion = ["--preset=1b", f"--micro-batch={room}", "--steps=8", f"--device={device}"]
    billion += ["--recompute=full"] if room == 1 else []
    half = "--precision=bf16" if capability >= WITH_BF16 else "--precision=fp16"
    no_bf16 = "" if capability >= WITH_BF16 else "bf16 takes an Ampere or newer"
    no_fp8 = "" if capability >= WITH_FP8 else "FP8 takes an Ada, a Hopper or newer"
    no_room = "" if memory > 22 * GB else "its states and activations take 22 GB"
    no_triton = without_triton(machine)

    def step(name, ranks, words, *more, skipped="", seconds=90):
        sequences = 2 * ranks * int(words[1].partition("=")[2])
        words = [f"{name[:2]}", *words, f"--batch={sequences}", *tiny, *more]
        words[0] = f"{chapters.name_of(name[:2])}.py"
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


def of_kernels(machine, device):
    """Their tests, and their tables."""
    no_triton = without_triton(machine)
    skipped = no_triton or ("" if version_of("pytest") != "none" else "there is no pytest here")
    cheap = ["tests/kernels/test_matmul.py", "-k", "naive"] if device == "cpu" else [
        "tests/kernels", "-k", "not compiled"]          # without what is compiled for other GPUs
    workers = [] if device == "cpu" or version_of("xdist") == "none" else ["-n", "4"]
    tests = Step("kernels-tests", ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider",
                                   *workers, *cheap], 1, 200, skipped)
    no_gpu = "it takes a GPU" if device == "cpu" else no_triton
    gpu = machine["gpus"][0] if machine["gpus"] else {"capability": [0, 0]}
    no_fp8 = "" if tuple(gpu["capability"]) >= WITH_FP8 else "FP8 takes an Ada, a Hopper or newer"
    tables = [Step(f"kernels-{what}", ["benchmarks/time_kernels.py", f"--only={what}",
                                       f"--out={here()}"], 1, 100, no_gpu or skip)
              for what, skip in (("attention", ""), ("matmul", ""), ("fp8", no_fp8),
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


def steps_of(machine, device, n):
    """All steps, those that tell most first."""
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
    from lab.cli import strict

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


# ---------------------------------------------------------------------------------- how one goes

def play(step, left):
    """Run a step, for its limit or for the seconds that are left. Returns its Row."""
    if step.skipped:
        return Row(step, "skipped", showed=step.skipped)
    if left < step.seconds / 3:
        return Row(step, "left out", showed="no time was left for it")
    said, written = FOLDER / f"{step.name}.txt", FOLDER / f"{step.name}.json"
    written.unlink(missing_ok=True)                     # an old one would pass for the new one
    begun = time.monotonic()
    status = run(command(step), said, min(step.seconds, left))
    seconds = time.monotonic() - begun
    lines = said.read_text(errors="replace").splitlines()
    said.write_text("\n".join([f"$ {typed(step)}", *lines[-KEPT:], ""]))
    if status is None and left < step.seconds:
        return Row(step, "left out", seconds, "it had not ended when the time was over")
    outcome = "ok" if status == 0 else "failed"
    found = told_by(step, lines, written) if status is not None else {
        "showed": f"it had no end within {step.seconds} s; last line: {last_of(lines)}"}
    if outcome == "failed" and status is not None and not found.get("run"):
        found["showed"] = f"status {status}: {error_of(lines)}"
    return Row(step, outcome, seconds, **found)


def command(step):
    """What subprocess takes."""
    words = [str(word) for word in step.words]
    if chapters.NAMES and words[0].removesuffix(".py") in chapters.NAMES:
        words.append(f"--json={here(step.name)}.json")
    launcher = [sys.executable]
    if step.ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone",
                     f"--nproc_per_node={step.ranks}"]
    return [*launcher, *words]


def typed(step):
    """The same as a reader would type it."""
    launcher = f"torchrun --standalone --nproc_per_node={step.ranks}"
    return " ".join([launcher if step.ranks > 1 else "python", *map(str, step.words)])


def run(words, said, limit):
    """Run a program, which prints to the file `said`. Returns its exit status; None: it had no end
    within the limit. Nothing of what it has started is left."""
    mark = f"{os.getpid()}.{time.monotonic_ns()}"
    variables = os.environ | {MARK: mark, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with said.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                                   stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill(process, mark)


def kill(process, mark):
    """Kill it and all that it has started: its group, and whoever has its mark in the environment,
    since torchrun's ranks are in groups of their own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    while left := marked(mark):
        for other in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
        time.sleep(0.05)                                # until they are gone
    process.wait()


def marked(mark):
    """Processes that have it in their environment."""
    def has_it(process):
        try:
            return process.environ().get(MARK) == mark
        except (psutil.Error, OSError):                 # it has ended, or is not ours
            return False

    return [process for process in psutil.process_iter() if has_it(process)]


# -------------------------------------------------------------------------------- what it showed

def told_by(step, lines, written):
    """What a step has shown: in words; and a chapter's run, or tables."""
    if not written.exists():
        tables = "\n".join(["```", *lines, "```"]) if step.is_a_table else tables_of(lines)
        return {"showed": "its table is below" if tables else last_of(lines), "tables": tables}
    run = json.loads(written.read_text())
    words = [line.strip() for line in lines if line.startswith("  --")]     # what cannot be here
    off = [f"{name} {run[f'max_{kind}_diff']:.0e}" for kind, name in
           (("loss", "loss"), ("grad", "gradients"), ("param", "parameters"))
           if run.get(f"max_{kind}_diff") is not None and run["tolerance"][name]]
    if off:
        words.append(f"from one GPU: {', '.join(off)}")
    checks = [check["ok"] for check in run["checks"] if check["ok"] is not None]
    if checks:
        words.append(f"{sum(checks)} of {len(checks)} formulas")
    words += [f"{op} {100 * seen['hidden']:.0f}% hidden"
              for op, seen in run["recorded"].get("overlap", {}).items()]
    words += [traced(ROOT / word.removeprefix("--profile=")) for word in step.words
              if word.startswith("--profile=")]
    wrong = run["problems"]
    words.append(f"✗ {wrong[0]}" if wrong else "✓")
    return {"showed": ", ".join(words), "run": run}


def traced(path):
    """What a profiler's timeline has of the GPU: how busy it is, and what NCCL's kernels hide."""
    if not path.exists():
        return "no timeline"
    kernels = [(event["name"], [event["ts"], event["ts"] + event["dur"]])
               for event in json.loads(path.read_text())["traceEvents"]
               if event.get("cat") == "kernel"]
    if not kernels:
        return "a timeline without a GPU's kernel"
    all_of_them = overlap.union(times for _, times in kernels)
    sending = overlap.union(times for name, times in kernels if "nccl" in name.lower())
    rest = overlap.union(times for name, times in kernels if "nccl" not in name.lower())
    busy = overlap.seconds_of(all_of_them) / (all_of_them[-1][1] - all_of_them[0][0])
    words = f"a timeline of {len(kernels):,} kernels, the GPU busy {busy:.0%}"
    if sending:
        hidden = overlap.seconds_of(overlap.both(sending, rest)) / overlap.seconds_of(sending)
        words += f", {hidden:.0%} of NCCL's time beside other kernels"
    return words


def pace(run, gpu):
    """Milliseconds of a step (the median, without those that are watched), tokens a second, and
    MFU of all GPUs together; None where there is no step, or no peak."""
    seconds = run["step_seconds"][WATCHED_STEPS:]
    if not seconds:
        return None
    config, step = run["config"], statistics.median(seconds)
    shape = {field.name: config[field.name] for field in dataclasses.fields(common.Config)}
    flops = chapters.chapter("01").model_flops(common.Config(**shape), config["batch"])
    peak = PEAK_FLOPS.get(gpu)
    mfu = flops / step / run["world_size"] / peak if peak else None
    return 1e3 * step, config["batch"] * config["seq"] / step, mfu


def tables_of(lines):
    """The tables of Markdown, each with the line above it."""
    kept = []
    for i, line in enumerate(lines):
        if line.startswith("|"):
            if i == 0 or not lines[i - 1].startswith("|"):
                kept += ["", *[above for above in lines[:i] if above.strip()][-1:], ""]
            kept.append(line)
    return "\n".join(kept)


def last_of(lines):
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def error_of(lines):
    """The line that says why: the first error, since torchrun's own summary is the last."""
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: |^error: ", line)]
    return re.sub(r"^\[rank\d+\]:", "", errors[0]).strip() if errors else last_of(lines)


# ------------------------------------------------------------------------------------- the report

def report(rows, machine, number, minutes):
    """Lines of Markdown, of the steps that were played so far, of so many."""
    taken = sum(row.seconds for row in rows)
    yield (f"{datetime.date.today()}, {described(machine)}. {len(rows)} of {number} steps, "
           f"{taken:.0f} of {60 * minutes:.0f} seconds.\n")
    yield "| step | ranks | outcome | seconds | what it showed |"
    yield "|" + " --- |" * 5
    left_out = [row.step.name for row in rows if row.outcome == "left out" and not row.seconds]
    for row in rows:
        if row.step.name in left_out:
            continue
        yield (f"| {row.step.name} | {row.step.ranks} | {row.outcome} | {row.seconds:.0f} | "
               f"{in_a_cell(row.showed)} |")
    if left_out:
        yield f"\nFor these no time was left: {', '.join(left_out)}."
    gpu = machine["gpus"][0]["name"] if machine["gpus"] else None
    paces = [(row, pace(row.run, gpu)) for row in rows
             if row.run and row.run["config"].get("preset") in ("gpt2", "1b")]
    if any(found for _, found in paces):
        yield ("\nThe median step after the first ones. MFU: of the GPU's peak in bf16, FP8 too. "
               "Memory: what PyTorch has allocated at the most, on rank 0.\n")
        yield "| step | ms | tokens/s | MFU | memory | flags |"
        yield "|" + " --- |" * 6
    for row, found in paces:
        if found:
            ms, tokens, mfu = found
            peak = [check["measured"] for check in row.run["checks"]
                    if check["what"].startswith("allocated at the peak")]
            yield (f"| {row.step.name} | {ms:.1f} | {tokens:,.0f} | "
                   f"{'-' if mfu is None else f'{mfu:.1%}'} | "
                   f"{f'{peak[0] / GB:.1f} GB' if peak else '-'} | "
                   f"{' '.join(word for word in row.step.words[1:] if 'profile' not in word)} |")
    for row in rows:
        if row.tables:
            yield f"\n{row.step.name}:\n{row.tables}"


def in_a_cell(text):
    """Of a table: on one line, and no longer than one would read."""
    text = refusals.one_line(" ".join(text.split())).replace("|", "\\|")
    return text if len(text) <= 300 else f"{text[:299]}…"


def play_all(steps, machine, minutes, path):
    """Play the steps, and write the report after each. Returns the exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows, end = [], time.monotonic() + 60 * minutes
    print(f"{described(machine)}\n{len(steps)} steps, {minutes:g} minutes at the most", flush=True)
    section = f"gpu.py: {called(machine)}"
    try:
        for number, step in enumerate(steps, start=1):
            print(f"[{number} of {len(steps)}] {step.name}: ", end="", flush=True)
            rows.append(row := play(step, end - time.monotonic()))
            results.record(section, report(rows, machine, len(steps), minutes), path)
            print(f"{row.outcome}, {row.seconds:.0f} s: {in_a_cell(row.showed)}", flush=True)
    except BaseException:
        print(f"\nwhat is done is in {path}", flush=True)
        raise
    failed = [row.step.name for row in rows if row.outcome == "failed"]
    for outcome in ("skipped", "left out", "failed"):
        names = [row.step.name for row in rows if row.outcome == outcome]
        if names:
            print(f"{outcome}: {', '.join(names)}")
    print(f"written: {path} and {FOLDER}")
    if machine["gpus"]:
        print("Please send us benchmarks/RESULTS.md and the folder runs/gpu/.")
    return int(bool(failed))


# ------------------------------------------------------------------------------- the command line

def accept(argv):
    """The arguments; raises Refused for those that do not fit."""
    parser = commands.Parser("benchmarks/gpu.py", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=commands.number(float, 0.1, 1440, 10), default=10, help="for all of it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: smallest sizes, on gloo")
    add("--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so")
    add("--tell", action="store_true", help=argparse.SUPPRESS)      # what this machine is
    args = parser.parse_args(argv)
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and not gpus:
        raise Refused("there is no GPU here", "--device cpu")
    args.path = FOLDER / "RESULTS.md" if args.device == "cpu" else results.RESULTS
    try:
        commands.try_to_write(args.path, is_file=True)
    except OSError as error:
        raise Refused(f"cannot write {args.path}: {error.strerror}") from None
    args.ranks = 2 if args.device == "cpu" else max(n for n in RANKS if n <= gpus)
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    if args.tell:
        print(json.dumps(machine_of(args.device)))
        return 0
    machine = asked_another_process(args.device)
    steps = [step for step in steps_of(machine, args.device, args.ranks)
             if step.name.startswith(tuple(args.only))]
    if not steps:
        refusals.fail(f"--only {' '.join(args.only)} begins the name of no step; "
                      "--only 02 kernels would work")
    return play_all(steps, machine, args.minutes, args.path)


if __name__ == "__main__":
    commands.program(main)
