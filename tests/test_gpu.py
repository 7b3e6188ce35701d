"""benchmarks/gpu.py: its steps for GPUs that are not here, and how it goes on after a failure."""

import dataclasses
import json
import types

import pytest
import torch

import common
from benchmarks import gpu, gpu_steps, time_chapters, time_kernels
from lab import chapters, launch
from lab.run.machines import PEAK_FLOPS
from tests.conftest import chapter as module_of
from tests.conftest import sample
from tests.support.trials import ends

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 85e9, "capability": [9, 0]}
RTX = {"name": "NVIDIA GeForce RTX 4090", "memory": 25.2e9, "capability": [8, 9]}
T4 = {"name": "Tesla T4", "memory": 15.8e9, "capability": [7, 5]}
VERSIONS = {"driver": "1", "cuda": "12.8", "nccl": "2.27", "torch": "2.11", "triton": "3.6.0",
            "python": "3.11", "commit": "abc"}  # fmt: skip
NOBODY = {"gpus": [], "used": 2, **VERSIONS}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_steps, "FOLDER", tmp_path / "gpu")
    gpu_steps.FOLDER.mkdir()
    return gpu_steps.FOLDER


def pretend(monkeypatch, kind, n):
    """So many GPUs, as far as anybody asks here."""
    properties = types.SimpleNamespace(name=kind["name"], total_memory=int(kind["memory"]))
    capability = ".".join(map(str, kind["capability"]))
    line = f"{kind['name']}, {kind['memory'] // 2**20:.0f}, {capability}, 570.1"
    monkeypatch.setattr(gpu_steps.shutil, "which", lambda program: program)
    monkeypatch.setattr(gpu, "output_of", lambda program, *flags: [line] * n)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: properties)
    return {"gpus": [kind] * n, "used": n, **VERSIONS}


def accept(monkeypatch, step):
    """Raise Refused where the step's own command line would not take its flags."""
    program, *flags = step.words
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(step.ranks))
    if step.skipped:
        return
    if program.removesuffix(".py") in chapters.NAMES:
        module = module_of(program.removesuffix(".py"))
        module.requires(launch.parse(module, flags), step.ranks)
    elif program.startswith("benchmarks/"):
        {"time_kernels.py": time_kernels, "time_chapters.py": time_chapters}[
            program.removeprefix("benchmarks/")].accept(flags)
    else:
        assert [program, flags[0]] in (["-m", "pytest"], ["-m", "lab.scaling"])


# ------------------------------------------------------------------------- machines and their steps


@pytest.mark.parametrize(("kind", "n"), sample([(T4, 2), (H100, 8), (H100, 1)], 2))
def test_each_step_takes_its_flags(monkeypatch, kind, n):
    steps = gpu_steps.steps_of(pretend(monkeypatch, kind, n), "cuda")
    names = [step.name for step in steps]
    assert len(set(names)) == len(names) and ("02-gpt2" in names) == (n > 1)
    assert {name for name in chapters.NAMES if name[:2] != "10"} | {*gpu_steps.FUSED} <= {*names}
    skipped = {step.name for step in steps if step.skipped}
    # A T4 has neither bf16 nor FP8, nor the memory.
    assert skipped == set() if kind == H100 else {
        "01-1b", "01-gpt2-fp8", "kernels-fp8", "02-gpt2", "03-gpt2-zero2", "03-1b-zero3", "09-gpt2"}
    for step in steps:
        assert step.ranks in (1, n) and "--device=cpu" not in step.words
        accept(monkeypatch, step)
    pretend(monkeypatch, kind, 0)
    for step in gpu_steps.steps_of(NOBODY, "cpu"):
        accept(monkeypatch, step)


def test_it_runs_on_a_power_of_two_and_says_so(monkeypatch):
    for n, used, name in (1, 1, "1 x "), (7, 4, "4 of 7 x "), (8, 8, "8 x "), (9, 8, "8 of 9 x "):
        pretend(monkeypatch, H100, n)
        machine = gpu.machine_of("cuda")
        assert [one["capability"] for one in machine["gpus"]] == [[9, 0]] * n
        assert machine["used"] == used and machine["driver"] == "570.1"
        assert {step.ranks for step in gpu_steps.steps_of(machine, "cuda")} == {1, used}
        assert gpu.name_of(machine) == name + H100["name"]
        assert " of 85 GB, compute capability 9.0, driver 570.1" in gpu.described(machine)


# ------------------------------------------------------------------------------ how it goes on


HANGS = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(child).pid, flush=True)
time.sleep(600)
"""


def program(name, code, seconds=600.0):
    return gpu_steps.Step(name, ["-c", code], 1, seconds)


STEPS = [
    program("fine", "print('a number:'); print('| 1 |')")._replace(shows="tables"),
    program("wrong", "print('soon'); raise ValueError('of that kind')"),
    program("hangs", HANGS, 2),
    gpu_steps.Step("not here", ["-c", "raise SystemExit(9)"], skipped="it takes a GPU"),
    program("too long", "raise SystemExit(9)", 4 * 3600),
    program("last", "print('still there')"),
]


def test_it_goes_on_and_keeps_what_it_has(folder, capsys):
    """No outcome depends on how fast this machine is: one step never ends, the others have time."""
    path = folder / "RESULTS.md"
    (folder / "fine.json").write_text("{}")  # an older one, which would pass for its own
    assert gpu.play_all(STEPS, NOBODY, 60, path) == 1
    [child] = [int(line) for line in (folder / "hangs.txt").read_text().splitlines()
               if line.isdecimal()]
    assert ends(child)

    text, said = path.read_text(), capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("| ")]
    outcomes = {row[0]: row[2] for row in rows[2:] if len(row) == 5}
    assert outcomes == {"fine": "ok", "last": "ok", "wrong": "failed", "hangs": "failed",
                        "not here": "skipped"}  # fmt: skip
    showed = {row[0]: row[4] for row in rows if len(row) == 5}
    assert showed["wrong"].endswith("ValueError: of that kind")
    assert "too long" in text and "a number:" in text and "4 of 6 steps ran" in text
    assert "failed: wrong, hangs\n" in said


# ------------------------------------------------------------------------------ what it showed


def test_the_pace_of_a_run_is_that_of_its_median_step():
    cfg = common.Config(layers=1, dim=16, heads=2, kv_heads=2, seq=8, vocab=256)
    run = {"config": dataclasses.asdict(cfg) | {"batch": 2}, "world_size": 1,
           "step_seconds": [90, 90, 90, 1, 2, 6]}
    ms, tokens, mfu = gpu.pace(run, H100["name"])
    flops = module_of("01_single_gpu").model_flops(cfg, 2)
    assert (ms, tokens) == (2000, 2 * 8 / 2)
    assert mfu == pytest.approx(flops / 2 / PEAK_FLOPS[H100["name"]])
    assert gpu.pace(run | {"world_size": 4}, H100["name"])[2] == pytest.approx(mfu / 4)


@pytest.mark.full
def test_two_steps_on_a_cpu(folder):
    """As they are, in processes of their own."""
    assert gpu.main(["--device=cpu", "--only", "01-1b", "kernels-fp8"]) == 0
    text = (folder / "RESULTS.md").read_text()
    assert "| kernels-fp8 | 1 | skipped | 0 |" in text and "| 01-1b | 1 | ok | " in text
    run = json.loads((folder / "01-1b.json").read_text())
    assert run["config"]["preset"] == "1b" and run["config"]["precision"] == "bf16"
