"""benchmarks/gpu.py: its steps for GPUs that are not here, and how it goes on after a failure."""

import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch

import common
from benchmarks import (
    gpu,
    gpu_machine,
    gpu_play,
    gpu_report,
    gpu_steps,
    results,
    time_chapters,
    time_kernels,
)
from lab import chapters, speed
from lab.bench.machines import PEAK_FLOPS
from lab.bench.meeting import has_ended
from tests.conftest import ROOT, TEXT, main
from tests.conftest import chapter as module_of

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


def machine_with(kind, n):
    return {"gpus": [kind] * n, "used": n, **VERSIONS}


def pretend(monkeypatch, kind, n):
    """So many GPUs, as far as a command line asks, and what kernels are compiled with."""
    monkeypatch.setattr(gpu_steps.shutil, "which", lambda program: program)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda i: types.SimpleNamespace(total_memory=int(kind["memory"])))
    return machine_with(kind, n)


def refused(step):
    """Why a step's own command line would not take its flags; None: it does."""
    program, *flags = step.words
    try:
        if program.removesuffix(".py") in chapters.NAMES:
            gpu_steps.parsed(step)
        elif program.endswith("time_kernels.py"):
            time_kernels.accept(flags)
        elif program.endswith("time_chapters.py"):
            time_chapters.accept(flags)
        elif flags[0] == "lab.speed":
            with gpu_steps.environment(RANK=0, WORLD_SIZE=step.ranks, LOCAL_WORLD_SIZE=step.ranks):
                speed.parse(flags[1:])
        else:
            assert [program, flags[0]] == ["-m", "pytest"]
    except common.Refused as why:
        return why.args


@pytest.mark.parametrize(("kind", "n"), [
    (H100, 1), (T4, 2), pytest.param(RTX, 4, marks=pytest.mark.full), (H100, 8)])  # fmt: skip
def test_each_step_takes_its_flags(monkeypatch, kind, n):
    machine = pretend(monkeypatch, kind, n)
    steps = gpu_steps.steps_of(machine, "cuda")
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert {name for name in chapters.NAMES if name[:2] != "10"} <= set(names)
    assert set(gpu_steps.FUSED) <= set(names)
    assert max(step.ranks for step in steps) == n
    assert any(step.name == "02-gpt2" for step in steps) == (n > 1)
    for step in steps:
        assert step.skipped or refused(step) is None, step
        assert step.ranks in (1, n) and "--device=cpu" not in step.words
    skipped = {step.name for step in steps if step.skipped}
    if kind == H100:
        assert not skipped
    if kind == T4:  # which has neither bf16 nor FP8, nor the memory
        assert skipped == {"01-1b", "01-gpt2-fp8", "kernels-fp8", "02-gpt2", "03-gpt2-zero2",
                           "03-1b-zero3", "09-gpt2"}  # fmt: skip


def test_what_two_gpus_say_of_themselves(monkeypatch, capsys):
    pretend(monkeypatch, H100, 2)
    told = types.SimpleNamespace(name="NVIDIA H200", total_memory=150e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: told)
    monkeypatch.setattr(gpu_machine, "said_by", lambda *command: command[0])
    assert gpu.main(["--tell"]) == 0
    machine = json.loads(capsys.readouterr().out)
    assert machine["gpus"] == 2 * [{"name": "NVIDIA H200", "memory": 150e9, "capability": [9, 0]}]
    words = gpu_machine.described(machine)
    assert machine["used"] == 2
    assert words.startswith("2 x NVIDIA H200 of 150 GB, compute capability 9.0, driver nvidia-smi")
    assert f"torch {torch.__version__}" in words and words.endswith("commit git")


@pytest.mark.parametrize(("n", "used", "name"), [
    (1, 1, "1 x T"), (3, 2, "2 of 3 x T"), (7, 4, "4 of 7 x T"), (8, 8, "8 x T"),
    (9, 8, "8 of 9 x T")])  # fmt: skip
def test_it_runs_on_a_power_of_two_and_says_so(monkeypatch, n, used, name):
    pretend(monkeypatch, H100, n)
    told = types.SimpleNamespace(name="T", total_memory=150e9, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: told)
    monkeypatch.setattr(gpu_machine, "said_by", lambda *command: command[0])
    machine = gpu_machine.machine_of("cuda")
    assert {step.ranks for step in gpu_steps.steps_of(machine, "cuda")} == {1, used}
    assert gpu_machine.called(machine) == name
    assert gpu_machine.described(machine).startswith(f"{name} of 150 GB")


def test_a_version_is_read_where_the_package_is_broken(monkeypatch, tmp_path):
    (tmp_path / "brokenly").mkdir()
    (tmp_path / "brokenly/__init__.py").write_text("raise RuntimeError('half of it is there')")
    (tmp_path / "brokenly-1.2.dist-info").mkdir()
    (tmp_path / "brokenly-1.2.dist-info/METADATA").write_text("Name: brokenly\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert gpu_machine.version_of("brokenly") == "1.2"
    assert gpu_machine.version_of("no-such-package") == "none"
    assert gpu_machine.version_of("pytest") == pytest.__version__


def test_a_driver_that_fails_costs_one_line(monkeypatch, capsys):
    failed = types.SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no driver\n\n")
    monkeypatch.setattr(gpu_machine.subprocess, "run", lambda *command, **more: failed)
    with pytest.raises(SystemExit, match="1"):
        gpu_machine.asked_another_process("cuda")
    assert capsys.readouterr().err == ("error: the GPU does not say what it is: RuntimeError: no "
                                       "driver\n")  # fmt: skip


def test_on_a_cpu_it_is_the_same_list(monkeypatch):
    machine = pretend(monkeypatch, H100, 2)
    there = [step.name for step in gpu_steps.steps_of(machine, "cuda")]
    pretend(monkeypatch, H100, 0)
    steps = gpu_steps.steps_of(NOBODY, "cpu")
    assert set(there) - {step.name for step in steps} == {"06-torch"}  # which takes a GPU
    for step in steps:
        assert step.skipped or refused(step) is None, step


# ------------------------------------------------------------------------------ how it goes on


LEAVES = """
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(child, start_new_session=True).pid)
"""


def program(name, code, seconds=600.0):
    return gpu_steps.Step(name, ["-c", code], 1, seconds)


STEPS = [
    program("fine", "print('a number:'); print('| 1 |'); print(); print('all is well')"),
    program("wrong", "print('soon'); raise ValueError('of that kind')"),
    program("hangs", "import time; time.sleep(600)", 0.5),
    program("leaves", f"{LEAVES}print('done')"),
    gpu_steps.Step("not here", ["-c", "raise SystemExit(9)"], skipped="it takes a GPU"),
    program("too long", "raise SystemExit(9)", 4 * 3600),
    program("last", "print('still there')"),
]


@pytest.mark.parametrize("has_psutil", [True, pytest.param(False, marks=pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="needs Linux's /proc"))])
def test_it_goes_on_and_keeps_what_it_has(monkeypatch, folder, capsys, has_psutil):
    """No outcome depends on how fast this machine is: one step never ends, the others have time."""
    if not has_psutil:
        monkeypatch.setattr(gpu_play, "psutil", None)
    path, seen, started = folder / "RESULTS.md", [], []
    record, kill = results.record, gpu_play.kill

    def recorded(*given):
        record(*given)
        seen.append(path.read_text().count("\n| "))

    def killed(process, mark):
        started.append(process.pid)
        kill(process, mark)

    monkeypatch.setattr(results, "record", recorded)
    monkeypatch.setattr(gpu_play, "kill", killed)
    (folder / "fine.json").write_text("{}")  # an older one, which would pass for its own
    assert gpu_play.play_all(STEPS, NOBODY, 60, path) == 1
    assert len(started) == 5 and len(seen) == len(STEPS) and seen == sorted(seen)
    [of_leaves] = [int(line) for line in (folder / "leaves.txt").read_text().splitlines()
                   if line.isdecimal()]
    left = [pid for pid in [*started, of_leaves] if not ends(pid)]
    assert not left

    text, said = path.read_text(), capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("| ")]
    told = {row[0]: (row[2], row[4]) for row in rows if len(row) == 5}
    assert told == {
        "step": ("outcome", "what it showed"), "---": ("---", "---"),
        "fine": ("ok", "its table is below"), "leaves": ("ok", "done"),
        "last": ("ok", "still there"),
        "wrong": ("failed", "status 1: ValueError: of that kind"),
        "hangs": ("failed", "it had no end within 0.5 s; last line: nothing"),
        "not here": ("skipped", "it takes a GPU")}  # fmt: skip
    assert "For these no time was left: too long." in text and "\na number:\n\n| 1 |" in text
    assert "5 of 7 steps ran" in text and "skipped: not here\nleft out: too long\n" in said
    assert "failed: wrong, hangs\n" in said and "send us" not in said
    assert "ValueError" in (folder / "wrong.txt").read_text()
    assert (folder / "wrong.txt").read_text().startswith("$ python -c ")


def ends(pid, within=10):
    """Who is killed is gone soon, and at once on most systems."""
    end = time.monotonic() + within
    while not has_ended(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return has_ended(pid)


@pytest.mark.parametrize(("left", "outcome", "showed"), [
    (60, "failed", "it had no end within 3 s; last line: a child"),
    (1.5, "left out", "it had not ended when the time was over")])  # fmt: skip
def test_a_step_that_the_end_of_the_time_cuts_has_not_failed(monkeypatch, folder, left, outcome,
                                                             showed):
    limits = []

    def never_ends(words, said, limit):
        said.write_text("soon\na child\n\n")
        limits.append(limit)

    monkeypatch.setattr(gpu_play, "run", never_ends)
    row = gpu_play.play(program("slow", "", 3), left)
    assert (row.outcome, row.showed, limits) == (outcome, showed, [min(left, 3)])


HANGS = "import time; print('it runs', flush=True); time.sleep(600)"


def test_after_ctrl_c_what_is_there_stays(folder, capsys):
    path = folder / "RESULTS.md"
    steps = [program("fine", "print('well')"), program("hangs", HANGS)]

    def interrupt():
        said = folder / "hangs.txt"  # the last of all that is awaited
        while "it runs" not in (said.read_text() if said.exists() else ""):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gpu_play.play_all(steps, NOBODY, 60, path)
    assert "1 of 2 steps ran" in path.read_text() and "| fine | 1 | ok |" in path.read_text()
    assert f"what is done is in {path}" in capsys.readouterr().out


def test_ctrl_c_while_torch_is_imported_costs_one_line(tmp_path):
    (tmp_path / "torch.py").write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, "benchmarks/gpu.py", "--device=cpu"], cwd=ROOT, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE)  # fmt: skip
    try:
        assert process.stdout.readline() == "it runs\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "error: interrupted\n")


def test_gpus_of_one_kind_have_a_section_of_their_own(tmp_path):
    path = tmp_path / "RESULTS.md"
    for kind, n in ((H100, 1), (H100, 8), (RTX, 1), (H100, 8)):
        machine = machine_with(kind, n)
        results.record(gpu_machine.called(machine), gpu_report.report([], machine, 3, 10), path)
    text = path.read_text()
    assert text.count("\n## ") == 3 and text.count("8 x NVIDIA H100 80GB HBM3\n") == 1
    assert ("8 x NVIDIA H100 80GB HBM3 of 85 GB, compute capability 9.0, driver 1, CUDA 12.8, NCCL "
            "2.27, torch 2.11, Triton 3.6.0, Python 3.11, commit abc. 0 of 3 steps ran,") in text


# ------------------------------------------------------------------------------ what it showed


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """The JSON of chapter 01, as a step has it; and the FLOPs of its step, by the chapter."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    one = module_of("01_single_gpu")
    status = main(one, ["--layers=1", "--dim=16", "--heads=2", "--kv-heads=2", "--seq=8",
                        "--batch=2", "--steps=5", "--device=cpu", f"--data={TEXT}",
                        f"--json={path}"])  # fmt: skip
    torch.distributed.destroy_process_group()
    assert status == 0
    return path


def test_what_a_chapter_has_shown(a_run, tmp_path):
    run = json.loads(a_run.read_text())
    step = gpu_steps.Step("01", ["01_single_gpu.py", f"--profile={tmp_path / 'no.json'}"])
    found = gpu_report.told_by(step, ["  --kernels: no GPU"], a_run)
    right = sum(check["ok"] is True for check in run["checks"])
    assert found["run"] == run and right > 5
    assert found["showed"] == ("--kernels: no GPU, from one GPU: loss 0e+00, gradients 0e+00, "
                               f"parameters 0e+00, {right} of {right} formulas, no "
                               "timeline, ✓")  # fmt: skip
    run |= {"max_grad_diff": 0.0123, "problems": ["gradients: no", "more"]}
    run["checks"][0]["ok"] = False
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(run))
    shown = gpu_report.told_by(step, [], path)["showed"]
    assert "gradients 1e-02" in shown and f"{right - 1} of {right} formulas" in shown
    assert shown.endswith("✗ gradients: no")


def test_mfu_is_that_of_chapter_01(a_run):
    run = json.loads(a_run.read_text())
    shape = {field.name: run["config"][field.name] for field in dataclasses.fields(common.Config)}
    cfg = common.Config(**shape)
    assert (cfg.dim, cfg.seq) == (16, 8)
    args = types.SimpleNamespace(**run["config"] | {"model": cfg})
    one = module_of("01_single_gpu")
    needed = one.formulas(args, 0, 1, None)["utilization"]["mfu"]
    seconds = statistics.median(run["step_seconds"][3:])
    ms, tokens, mfu = gpu_report.pace(run, H100["name"])
    assert ms == 1000 * seconds and tokens == pytest.approx(2 * 8 / seconds)
    assert mfu == pytest.approx(needed / (seconds * PEAK_FLOPS[H100["name"]]))
    assert gpu_report.pace(run | {"world_size": 4}, H100["name"])[2] == pytest.approx(mfu / 4)
    assert gpu_report.pace(run, "Tesla T4")[2] is None
    assert gpu_report.pace(run | {"step_seconds": [1, 1, 1]}, H100["name"]) is None

    run["config"]["preset"] = "gpt2"
    run["checks"].append({"what": "allocated at the peak (with one GPU's run)", "amount": "",
                          "measured": 41.3e9, "ok": None})  # fmt: skip
    run["step_seconds"][3:] = [1e-9] * 2
    step = gpu_steps.Step("01-gpt2", ["01_single_gpu.py", "--some"])
    row = gpu_report.Row(step, "ok", 3, "well", run)
    *_, line = gpu_report.report([row], machine_with(H100, 1), 1, 10)
    peak = PEAK_FLOPS[H100["name"]]
    assert line == (f"| 01-gpt2 | 0.0 | 16,000,000,000 | {needed / 1e-9 / peak:.1%} | 41.3 GB | "
                    "--some |")  # fmt: skip


def test_a_timeline_says_how_busy_a_gpu_is_and_what_hides(tmp_path):
    path = tmp_path / "trace.json"
    assert gpu_report.traced(path) == "no timeline"
    kernel = lambda name, ts, dur: {"name": name, "cat": "kernel", "ts": ts, "dur": dur, "ph": "X"}
    events = [{"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 900}, {"name": "process"}]
    path.write_text(json.dumps({"traceEvents": events}))
    assert gpu_report.traced(path) == "a timeline without a GPU's kernel"
    events += [kernel("gemm", 100, 30), kernel("ncclDevKernel_AllReduce", 120, 40),
               kernel("gemm", 190, 10), kernel("elementwise", 120, 5)]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    assert gpu_report.traced(path) == ("a timeline of 4 kernels, the GPU busy 70%, 25% of NCCL's "
                                       "time beside other kernels")  # fmt: skip


def test_the_error_that_counts_is_not_torchruns():
    lines = ["soon", "[rank1]: Traceback (most recent call last):", "[rank1]: KeyError: 'x'",
             "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
             "====", "Root Cause (first observed failure):", "===="]  # fmt: skip
    assert gpu_report.error_of(lines) == "KeyError: 'x'"
    assert gpu_report.error_of(["error: --dim 3 is odd", "=="]) == "error: --dim 3 is odd"
    assert gpu_report.error_of(["Killed", ""]) == "Killed"


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    pretend(monkeypatch, H100, 0)
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert capsys.readouterr().err == "error: there is no GPU here; --device cpu would work\n"


def test_two_steps_on_a_cpu(folder):
    """As they are, in processes of their own."""
    assert gpu.main(["--device=cpu", "--only", "01-1b", "kernels-fp8"]) == 0
    text = (folder / "RESULTS.md").read_text()
    assert "1 of 2 steps ran" in text
    assert "| kernels-fp8 | 1 | skipped | 0 | it takes a GPU |" in text
    assert "| 01-1b | 1 | ok | " in text and "formulas, ✓ |" in text
    run = json.loads((folder / "01-1b.json").read_text())
    assert run["config"]["preset"] == "1b" and run["config"]["precision"] == "bf16"
    [row] = [line for line in text.splitlines() if line.startswith("| 01-1b |")][1:]
    ms, tokens, mfu = gpu_report.pace(run, None)
    assert row.startswith(f"| 01-1b | {ms:.1f} | {tokens:,.0f} | - | - | --preset=1b --micro-batch")
