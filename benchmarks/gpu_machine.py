"""The machine that benchmarks/gpu.py runs on: its GPUs, and the versions of what is installed."""

import contextlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata

import torch

from lab import ROOT
from lab.cli import refusals

GB = 1e9
RANKS = 8, 4, 2, 1      # what the steps are for: the first for which there are GPUs


def machine_of(device):
    """{what is known of this machine}, in plain data. used: on how many ranks the steps run."""
    told = {"gpus": [], "used": 2, "torch": torch.__version__, "python": platform.python_version(),
            "triton": version_of("triton"),
            "commit": said_by("git", "rev-parse", "--short", "HEAD")}
    if device == "cpu":
        return told
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        told["gpus"].append({"name": gpu.name, "memory": gpu.total_memory,
                             "capability": [gpu.major, gpu.minor]})
    told["used"] = max(n for n in RANKS if n <= len(told["gpus"]))
    driver = said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ("none",)
    return told | {"driver": driver, "cuda": torch.version.cuda, "nccl": ".".join(map(str, nccl))}


def version_of(package):
    """As it is installed. It is not imported, and may be broken: then its step says so."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def said_by(*command):
    """The first line that a program prints."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20)
        if said.returncode == 0 and said.stdout.strip():
            return said.stdout.splitlines()[0]
    return "unknown"


def last_of(lines):
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def asked_another_process(device):
    """The same from another process, since whoever asks a GPU for its name keeps memory there."""
    if device == "cpu":
        return machine_of(device)
    said = "nothing within two minutes"
    with contextlib.suppress(subprocess.TimeoutExpired):
        told = subprocess.run([sys.executable, ROOT / "benchmarks/gpu.py", "--tell"],
                              capture_output=True, text=True, timeout=120)
        if told.returncode == 0:
            return json.loads(told.stdout)
        said = last_of(told.stderr.splitlines())
    refusals.fail(f"the GPU does not say what it is: {said}", status=1)


def called(machine):
    """What a section of RESULTS.md is named after."""
    gpus = machine["gpus"]
    if not gpus:
        return "no GPU"
    of = f" of {len(gpus)}" if machine["used"] < len(gpus) else ""
    return f"{machine['used']}{of} x {gpus[0]['name']}"


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
