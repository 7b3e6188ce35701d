"""How benchmarks/gpu.py plays its steps: each as a program of its own, which it ends with all that
the program has started; and what is written after each.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

try:
    import psutil
except ImportError:     # which a GPU's machine need not have: Linux tells the same in /proc
    psutil = None

from benchmarks import gpu_steps, results
from benchmarks.gpu_machine import called, described, last_of
from benchmarks.gpu_report import Row, error_of, in_a_cell, report, told_by
from lab import ROOT, chapters

KEPT = 400              # lines of what a step has printed
MARK = "FIVEFOLD_STEP"  # in the environment of all that a step starts, wherever it is by then


def play_all(steps, machine, minutes, path):
    """Play the steps, and write the report after each. Returns the exit status."""
    gpu_steps.FOLDER.mkdir(parents=True, exist_ok=True)
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
    print(f"written: {path} and {gpu_steps.FOLDER}")
    if machine["gpus"]:
        print("Please send us benchmarks/RESULTS.md and the folder runs/gpu/.")
    return int(bool(failed))


def play(step, left):
    """Run a step, for its limit or for the seconds that are left. Returns its Row."""
    if step.skipped:
        return Row(step, "skipped", showed=step.skipped)
    if left < step.seconds / 3:
        return Row(step, "left out", showed="no time was left for it")
    said, written = (gpu_steps.FOLDER / f"{step.name}.{kind}" for kind in ("txt", "json"))
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
        words.append(f"--json={gpu_steps.here(step.name)}.json")
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
    while left := [pid for pid in pids() if is_marked(pid, mark)]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)                                # until they are gone
    process.wait()


def pids():
    return psutil.pids() if psutil else [int(name) for name in os.listdir("/proc")
                                         if name.isdigit()]


def is_marked(pid, mark):
    """Whether the mark is in a process's environment."""
    gone = (OSError, psutil.Error) if psutil else OSError       # or it is not ours
    with contextlib.suppress(gone):
        if psutil:
            return psutil.Process(pid).environ().get(MARK) == mark
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
