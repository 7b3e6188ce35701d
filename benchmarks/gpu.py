"""What was never run on a GPU, in one go: chapters on NCCL, speed, kernels, FP8.

    python benchmarks/gpu.py                        on the GPUs here, 10 minutes; `make gpu`
    python benchmarks/gpu.py --only 02 kernels      the steps whose names begin so
    python benchmarks/gpu.py --device cpu           the same list in the smallest sizes, without one

It runs on 1, 2, 4 or 8 GPUs: with 3 of them on two, with 6 on four. CUDA_VISIBLE_DEVICES chooses.

Each step (gpu_steps.py) is a program of its own with a time limit. A step that fails is named, and
the others go on. After each step, a section of benchmarks/RESULTS.md is written again: the machine,
a row for each step, the speed of large models, the kernels' tables. The output of a step goes to
runs/gpu/NAME.txt. With --device cpu everything goes to runs/gpu/.

Chapters that train the tiny model are compared with one GPU's run, tensor by tensor. MFU is chapter
01's: the FLOPs that the model needs over the time and the peak in bf16, of all GPUs together.

Exit status: 0; 1 if a step has failed; 2 for a bad flag, or where there is no GPU; 130 after
Ctrl-C: everything written by then stays.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import common  # noqa: E402  (after the path to it)
from benchmarks import gpu_steps, results  # noqa: E402
from benchmarks.gpu_steps import GB, Step  # noqa: E402
from lab import ROOT, chapters  # noqa: E402
from lab.run import commands, refusals  # noqa: E402
from lab.run.formulas import WATCHED_STEPS  # noqa: E402
from lab.run.machines import PEAK_FLOPS  # noqa: E402

RANKS = 8, 4, 2, 1      # of the steps: the first for which there are GPUs
KEPT = 400              # lines of a step's output
PATIENCE = 40           # seconds that torchrun has to end its ranks: it waits for 30 itself

# ---------------------------------------------------------------------------------- the machine


def machine_of(device):
    """{GPUs, and versions}, in plain data. used: on how many ranks the steps run. No GPU is asked
    through PyTorch, which would keep memory there while the steps run."""
    machine = {"gpus": [], "used": 2, "torch": torch.__version__,
               "python": platform.python_version(), "triton": gpu_steps.version_of("triton"),
               "commit": (output_of("git", "rev-parse", "--short", "HEAD") or ["unknown"])[0]}
    if device == "cpu":
        return machine
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = ["-i", visible] if visible else []
    lines = output_of("nvidia-smi", *chosen, "--format=csv,noheader,nounits",
                      "--query-gpu=name,memory.total,compute_cap,driver_version")
    for line in lines:
        name, memory, capability, driver = line.split(", ")
        machine["gpus"].append({"name": name, "memory": int(memory) * 2**20,
                                "capability": [int(part) for part in capability.split(".")]})
    if not lines:
        refusals.fail("nvidia-smi does not name the GPU", status=1)
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ("none",)
    return machine | {"used": max(n for n in RANKS if n <= len(lines)), "driver": driver,
                      "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}


def output_of(*command):
    """The lines that a program prints; none if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(command, cwd=ROOT, text=True, timeout=60,
                                       stderr=subprocess.DEVNULL).splitlines()
    return []


def name_of(machine):
    """The name of its section in RESULTS.md."""
    gpus = machine["gpus"]
    if not gpus:
        return "no GPU"
    of = f" of {len(gpus)}" if machine["used"] < len(gpus) else ""
    return f"{machine['used']}{of} x {gpus[0]['name']}"


def described(machine):
    """In a line."""
    words = [f"{os.cpu_count()} CPU cores"]
    if machine["gpus"]:
        gpu = machine["gpus"][0]
        words = [f"{name_of(machine)} of {gpu['memory'] / GB:.0f} GB, compute capability "
                 f"{'.'.join(map(str, gpu['capability']))}", f"driver {machine['driver']}",
                 f"CUDA {machine['cuda']}", f"NCCL {machine['nccl']}"]
    words += [f"{name} {machine[name.lower()]}" for name in ("torch", "Triton", "Python", "commit")]
    return ", ".join(words)


# ----------------------------------------------------------------------------------- the steps


class Row(NamedTuple):
    """The outcome of a step: ok, failed, skipped, left out; and what it showed."""

    step: Step
    outcome: str
    seconds: float = 0
    showed: str = ""
    run: dict | None = None             # the JSON of a chapter
    tables: str = ""                    # of a benchmark


def play_all(steps, machine, minutes, path):
    """Play the steps, and write the report after each. Returns the exit status."""
    gpu_steps.FOLDER.mkdir(parents=True, exist_ok=True)
    rows, end = [], time.monotonic() + 60 * minutes
    print(f"{described(machine)}\n{len(steps)} steps, {minutes:g} minutes at the most", flush=True)
    try:
        for number, step in enumerate(steps, start=1):
            print(f"[{number} of {len(steps)}] {step.name}: ", end="", flush=True)
            rows.append(row := play(step, end - time.monotonic()))
            results.record(f"gpu.py: {name_of(machine)}",
                           report(rows, machine, len(steps), minutes), path)
            print(f"{row.outcome}, {row.seconds:.0f} s: {in_a_cell(row.showed)}", flush=True)
    except BaseException:
        print(f"\nwhat is done is in {path}", flush=True)
        raise
    for outcome in ("skipped", "left out", "failed"):
        names = [row.step.name for row in rows if row.outcome == outcome]
        if names:
            print(f"{outcome}: {', '.join(names)}")
    print(f"written: {path} and {gpu_steps.FOLDER}")
    if machine["gpus"]:
        print("Please send us benchmarks/RESULTS.md and the folder runs/gpu/.")
    return int(any(row.outcome == "failed" for row in rows))


def play(step, left):
    """Run a step, for its limit or for the seconds that are left. Returns its Row."""
    if step.skipped:
        return Row(step, "skipped", showed=step.skipped)
    if left < step.seconds / 3:
        return Row(step, "left out", showed="no time was left for it")
    output, written = (gpu_steps.FOLDER / f"{step.name}.{kind}" for kind in ("txt", "json"))
    written.unlink(missing_ok=True)                     # an old one would pass for the new one
    begun = time.monotonic()
    status = run(command(step), output, min(step.seconds, left))
    seconds = time.monotonic() - begun
    lines = output.read_text(errors="replace").splitlines()
    output.write_text("\n".join([f"$ {' '.join(command(step))}", *lines[-KEPT:], ""]))
    if status is None and left < step.seconds:
        return Row(step, "left out", seconds, "it had not ended when the time was over")
    if status is None:
        return Row(step, "failed", seconds,
                   f"it had no end within {step.seconds} s; last line: {last_of(lines)}")
    row = Row(step, "failed" if status else "ok", seconds, **shown_by(step, lines, written))
    if status and not row.run:
        return row._replace(showed=f"status {status}: {error_of(lines)}")
    return row


def command(step):
    """The words that subprocess takes."""
    words = list(step.words)
    if words[0].removesuffix(".py") in chapters.NAMES:
        words.append(f"--json={gpu_steps.here(step.name)}.json")
    return results.on_ranks(step.ranks, *words)


def run(words, output, limit):
    """Run a program, which prints to the file `output`. Returns its exit status; None: it had no
    end within the limit, and was killed with the processes that it had started."""
    variables = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        process = subprocess.Popen(words, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                                   stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            stop(process)


def stop(process):
    """End a program, and what it has started in its process group."""
    process.terminate()                                 # nothing happens if it has ended
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---------------------------------------------------------------------------- what they showed


def shown_by(step, lines, written):
    """What a step has shown: in words; and a chapter's run, or tables."""
    if step.shows:
        fence = ["```"] if step.shows == "text" else []
        return {"showed": "its table is below", "tables": "\n".join([*fence, *lines, *fence])}
    if not written.exists():
        return {"showed": last_of(lines)}
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
    words.append(f"✗ {run['problems'][0]}" if run["problems"] else "✓")
    return {"showed": ", ".join(words), "run": run}


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


def error_of(lines):
    """The line that says why: the first error, since torchrun's own summary is the last."""
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: |^error: ", line)]
    return re.sub(r"^\[rank\d+\]:", "", errors[0]).strip() if errors else last_of(lines)


def last_of(lines):
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def in_a_cell(text):
    """On one line of a table, and no longer than one would read."""
    text = refusals.one_line(" ".join(text.split())).replace("|", "\\|")
    return text if len(text) <= 300 else f"{text[:299]}…"


def report(rows, machine, number, minutes):
    """Lines of Markdown about the steps so far, of `number` steps."""
    taken = sum(row.seconds for row in rows)
    ran = sum(row.outcome in ("ok", "failed") for row in rows)
    yield (f"{datetime.date.today()}, {described(machine)}. {ran} of {number} steps ran, "
           f"{taken:.0f} of {60 * minutes:.0f} seconds.\n")
    yield results.header("step", "ranks", "outcome", "seconds", "what it showed")
    left_out = [row.step.name for row in rows if row.outcome == "left out" and not row.seconds]
    for row in rows:
        if row.step.name not in left_out:
            yield results.row(row.step.name, row.step.ranks, row.outcome, f"{row.seconds:.0f}",
                              in_a_cell(row.showed))
    if left_out:
        yield f"\nFor these no time was left: {', '.join(left_out)}."
    yield from speeds(rows, machine["gpus"][0]["name"] if machine["gpus"] else None)
    for row in rows:
        if row.tables:
            yield f"\n{row.step.name}:\n{row.tables}"


def speeds(rows, gpu):
    """The table of the large models."""
    large = [row for row in rows if row.run and row.run["config"].get("preset") in ("gpt2", "1b")]
    paces = [(row, pace(row.run, gpu)) for row in large if pace(row.run, gpu)]
    if paces:
        yield ("\nThe median step after the first ones. MFU: of the GPU's peak in bf16, FP8 too. "
               "Memory: what PyTorch has allocated at the most, on rank 0.\n")
        yield results.header("step", "ms", "tokens/s", "MFU", "memory", "flags")
    for row, (ms, tokens, mfu) in paces:
        peak = [check["measured"] for check in row.run["checks"]
                if check["what"].startswith("allocated at the peak")]
        yield results.row(row.step.name, f"{ms:.1f}", f"{tokens:,.0f}",
                          "-" if mfu is None else f"{mfu:.1%}",
                          f"{peak[0] / GB:.1f} GB" if peak else "-", " ".join(row.step.words[1:]))


# ---------------------------------------------------------------------------- the command line


def accept(argv):
    """The arguments; raises Refused for those that do not fit."""
    parser = commands.Parser("benchmarks/gpu.py", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=commands.number(float, 0.1, 1440, 10), default=10, help="for all of it")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: smallest sizes, on gloo")
    add("--only", nargs="+", default=[""], metavar="NAME", help="steps whose names begin so")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.device_count():
        raise common.Refused("there is no GPU here", "--device cpu")
    args.path = gpu_steps.FOLDER / "RESULTS.md" if args.device == "cpu" else results.RESULTS
    try:
        commands.try_to_write(args.path, is_file=True)
    except OSError as error:
        raise common.Refused(f"cannot write {args.path}: {error.strerror}") from None
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    machine = machine_of(args.device)
    steps = [step for step in gpu_steps.steps_of(machine, args.device)
             if step.name.startswith(tuple(args.only))]
    if not steps:
        refusals.fail(f"--only {' '.join(args.only)} begins the name of no step; "
                      "--only 02 kernels would work")
    return play_all(steps, machine, args.minutes, args.path)


if __name__ == "__main__":
    commands.program(main)
