"""benchmarks/gpu.py: its steps for GPUs that are not here, and how it goes on after a failure."""

import dataclasses
import json
import os
import signal
import statistics
import threading
import time
import types

import pytest
import torch

import common
from benchmarks import gpu, results, time_chapters, time_kernels
from lab import chapters, speed
from lab.bench.machines import PEAK_FLOPS
from tests.conftest import TEXT, main
from tests.conftest import chapter as module_of

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory": 85e9, "capability": [9, 0]}
RTX = {"name": "NVIDIA GeForce RTX 4090", "memory": 25.2e9, "capability": [8, 9]}
T4 = {"name": "Tesla T4", "memory": 15.8e9, "capability": [7, 5]}
VERSIONS = {"driver": "1", "cuda": "12.8", "nccl": "2.27", "torch": "2.11", "triton": "3.6.0",
            "python": "3.11", "commit": "abc"}  # fmt: skip
NOBODY = {"gpus": [], **VERSIONS}


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "FOLDER", tmp_path / "gpu")
    gpu.FOLDER.mkdir()
    return gpu.FOLDER


def pretend(monkeypatch, kind, n):
    """So many GPUs, as far as a command line asks, and what kernels are compiled with."""
    monkeypatch.setattr(gpu.shutil, "which", lambda program: program)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties",
                        lambda i: types.SimpleNamespace(total_memory=int(kind["memory"])))
    return {"gpus": [kind] * n, **VERSIONS}


def refused(step):
    """Why a step's own command line would not take its flags; None: it does."""
    program, *flags = step.words
    try:
        if program.removesuffix(".py") in chapters.NAMES:
            gpu.parsed(step)
        elif program.endswith("time_kernels.py"):
            time_kernels.accept(flags)
        elif program.endswith("time_chapters.py"):
            time_chapters.accept(flags)
        elif flags[0] == "lab.speed":
            with gpu.environment(RANK=0, WORLD_SIZE=step.ranks, LOCAL_WORLD_SIZE=step.ranks):
                speed.parse(flags[1:])
        else:
            assert [program, flags[0]] == ["-m", "pytest"]
    except common.Refused as why:
        return why.args


@pytest.mark.parametrize(("kind", "n"), [
    (H100, 1), (T4, 2), pytest.param(RTX, 4, marks=pytest.mark.full), (H100, 8)])  # fmt: skip
def test_each_step_takes_its_flags(monkeypatch, kind, n):
    machine = pretend(monkeypatch, kind, n)
    steps = gpu.steps_of(machine, "cuda", n)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert {name for name in chapters.NAMES if name[:2] != "10"} <= set(names)
    assert set(gpu.FUSED) <= set(names)
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
    monkeypatch.setattr(gpu, "said_by", lambda *command: command[0])
    assert gpu.main(["--tell"]) == 0
    machine = json.loads(capsys.readouterr().out)
    assert machine["gpus"] == 2 * [{"name": "NVIDIA H200", "memory": 150e9, "capability": [9, 0]}]
    words = gpu.described(machine)
    assert words.startswith("2 x NVIDIA H200 of 150 GB, compute capability 9.0, driver nvidia-smi")
    assert f"torch {torch.__version__}" in words and words.endswith("commit git")


def test_a_driver_that_fails_costs_one_line(monkeypatch, capsys):
    failed = types.SimpleNamespace(returncode=1, stderr="Traceback\nRuntimeError: no driver\n\n")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *command, **more: failed)
    with pytest.raises(SystemExit, match="1"):
        gpu.asked_another_process("cuda")
    assert capsys.readouterr().err == ("error: the GPU does not say what it is: RuntimeError: no "
                                       "driver\n")  # fmt: skip


def test_on_a_cpu_it_is_the_same_list(monkeypatch):
    machine = pretend(monkeypatch, H100, 2)
    there = [step.name for step in gpu.steps_of(machine, "cuda", 2)]
    pretend(monkeypatch, H100, 0)
    steps = gpu.steps_of(NOBODY, "cpu", 2)
    assert set(there) - {step.name for step in steps} == {"06-torch"}  # which takes a GPU
    for step in steps:
        assert step.skipped or refused(step) is None, step


# ------------------------------------------------------------------------------ how it goes on


CHILD = ("import subprocess, sys; print('a child', flush=True); subprocess.Popen([sys.executable, "
         "'-c', 'import time; time.sleep(60)'], start_new_session=True); ")  # fmt: skip


def program(name, code, seconds=30.0):
    return gpu.Step(name, ["-c", code], 1, seconds)


STEPS = [
    program("fine", "print('a number:'); print('| 1 |'); print(); print('all is well')"),
    program("wrong", "print('soon'); raise ValueError('of that kind')"),
    program("hangs", f"{CHILD} import time; time.sleep(600)", 1.5),
    program("leaves", f"{CHILD} print('done')"),
    gpu.Step("not here", ["-c", "raise SystemExit(9)"], skipped="it takes a GPU"),
    program("too long", "raise SystemExit(9)", 3600),
    program("last", "print('still there')"),
]


def test_it_goes_on_and_keeps_what_it_has(monkeypatch, folder, capsys):
    path, seen, marks = folder / "RESULTS.md", [], []
    record, kill = results.record, gpu.kill

    def recorded(*given):
        record(*given)
        seen.append(path.read_text().count("\n| "))

    def killed(process, mark):
        marks.append(mark)
        kill(process, mark)

    monkeypatch.setattr(results, "record", recorded)
    monkeypatch.setattr(gpu, "kill", killed)
    (folder / "fine.json").write_text("{}")  # an older one, which would pass for its own
    begun = time.monotonic()
    assert gpu.play_all(STEPS, NOBODY, 0.5, path) == 1
    assert time.monotonic() - begun < 25
    assert len(marks) == 5 and len(seen) == len(STEPS) and seen == sorted(seen)
    assert not any(map(gpu.marked, marks))

    text, said = path.read_text(), capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()
            if line.startswith("| ")]
    told = {row[0]: (row[2], row[4]) for row in rows if len(row) == 5}
    assert told == {
        "step": ("outcome", "what it showed"), "---": ("---", "---"),
        "fine": ("ok", "its table is below"), "leaves": ("ok", "done"),
        "last": ("ok", "still there"),
        "wrong": ("failed", "status 1: ValueError: of that kind"),
        "hangs": ("failed", "it had no end within 1.5 s; last line: a child"),
        "not here": ("skipped", "it takes a GPU")}  # fmt: skip
    assert "For these no time was left: too long." in text and "\na number:\n\n| 1 |" in text
    assert "7 of 7 steps" in text and "skipped: not here\nleft out: too long\n" in said
    assert "failed: wrong, hangs\n" in said and "send us" not in said
    assert "ValueError" in (folder / "wrong.txt").read_text()
    assert (folder / "wrong.txt").read_text().startswith("$ python -c ")


def test_a_step_that_the_end_of_the_time_cuts_has_not_failed(folder):
    row = gpu.play(program("slow", "import time; time.sleep(600)", 3), 1.5)
    assert row.outcome == "left out" and 1 < row.seconds < 3


def test_after_ctrl_c_what_is_there_stays(folder, capsys):
    path = folder / "RESULTS.md"
    steps = [program("fine", "print('well')"), program("hangs", "import time; time.sleep(600)", 60)]

    def interrupt():
        while "fine" not in (path.read_text() if path.exists() else ""):
            time.sleep(0.05)
        while not (folder / "hangs.txt").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        gpu.play_all(steps, NOBODY, 1, path)
    assert "1 of 2 steps" in path.read_text() and "| fine | 1 | ok |" in path.read_text()
    assert f"what is done is in {path}" in capsys.readouterr().out


def test_gpus_of_one_kind_have_a_section_of_their_own(tmp_path):
    path = tmp_path / "RESULTS.md"
    for kind, n in ((H100, 1), (H100, 8), (RTX, 1), (H100, 8)):
        machine = {"gpus": [kind] * n, **VERSIONS}
        results.record(gpu.called(machine), gpu.report([], machine, 3, 10), path)
    text = path.read_text()
    assert text.count("\n## ") == 3 and text.count("8 x NVIDIA H100 80GB HBM3\n") == 1
    assert ("8 x NVIDIA H100 80GB HBM3 of 85 GB, compute capability 9.0, driver 1, CUDA 12.8, NCCL "
            "2.27, torch 2.11, Triton 3.6.0, Python 3.11, commit abc. 0 of 3 steps") in text


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
    step = gpu.Step("01", ["01_single_gpu.py", f"--profile={tmp_path / 'no.json'}"])
    found = gpu.told_by(step, ["  --kernels: no GPU"], a_run)
    right = sum(check["ok"] is True for check in run["checks"])
    assert found["run"] == run and right > 5
    assert found["showed"] == ("--kernels: no GPU, from one GPU: loss 0e+00, gradients 0e+00, "
                               f"parameters 0e+00, {right} of {right} formulas, no "
                               "timeline, ✓")  # fmt: skip
    run |= {"max_grad_diff": 0.0123, "problems": ["gradients: no", "more"]}
    run["checks"][0]["ok"] = False
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(run))
    shown = gpu.told_by(step, [], path)["showed"]
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
    ms, tokens, mfu = gpu.pace(run, H100["name"])
    assert ms == 1000 * seconds and tokens == pytest.approx(2 * 8 / seconds)
    assert mfu == pytest.approx(needed / (seconds * PEAK_FLOPS[H100["name"]]))
    assert gpu.pace(run | {"world_size": 4}, H100["name"])[2] == pytest.approx(mfu / 4)
    assert gpu.pace(run, "Tesla T4")[2] is None
    assert gpu.pace(run | {"step_seconds": [1, 1, 1]}, H100["name"]) is None

    run["config"]["preset"] = "gpt2"
    run["checks"].append({"what": "allocated at the peak (with one GPU's run)", "amount": "",
                          "measured": 41.3e9, "ok": None})  # fmt: skip
    run["step_seconds"][3:] = [1e-9] * 2
    row = gpu.Row(gpu.Step("01-gpt2", ["01_single_gpu.py", "--some"]), "ok", 3, "well", run)
    *_, line = gpu.report([row], {"gpus": [H100], **VERSIONS}, 1, 10)
    peak = PEAK_FLOPS[H100["name"]]
    assert line == (f"| 01-gpt2 | 0.0 | 16,000,000,000 | {needed / 1e-9 / peak:.1%} | 41.3 GB | "
                    "--some |")  # fmt: skip


def test_a_timeline_says_how_busy_a_gpu_is_and_what_hides(tmp_path):
    path = tmp_path / "trace.json"
    assert gpu.traced(path) == "no timeline"
    kernel = lambda name, ts, dur: {"name": name, "cat": "kernel", "ts": ts, "dur": dur, "ph": "X"}
    events = [{"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 900}, {"name": "process"}]
    path.write_text(json.dumps({"traceEvents": events}))
    assert gpu.traced(path) == "a timeline without a GPU's kernel"
    events += [kernel("gemm", 100, 30), kernel("ncclDevKernel_AllReduce", 120, 40),
               kernel("gemm", 190, 10), kernel("elementwise", 120, 5)]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    assert gpu.traced(path) == ("a timeline of 4 kernels, the GPU busy 70%, 25% of NCCL's time "
                                "beside other kernels")  # fmt: skip


def test_the_error_that_counts_is_not_torchruns():
    lines = ["soon", "[rank1]: Traceback (most recent call last):", "[rank1]: KeyError: 'x'",
             "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
             "====", "Root Cause (first observed failure):", "===="]  # fmt: skip
    assert gpu.error_of(lines) == "KeyError: 'x'"
    assert gpu.error_of(["error: --dim 3 is odd", "=="]) == "error: --dim 3 is odd"
    assert gpu.error_of(["Killed", ""]) == "Killed"


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    pretend(monkeypatch, H100, 0)
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    assert capsys.readouterr().err == "error: there is no GPU here; --device cpu would work\n"


def test_two_steps_on_a_cpu(folder):
    """As they are, in processes of their own."""
    assert gpu.main(["--device=cpu", "--only", "01-1b", "kernels-fp8"]) == 0
    text = (folder / "RESULTS.md").read_text()
    assert "2 of 2 steps" in text and "| kernels-fp8 | 1 | skipped | 0 | it takes a GPU |" in text
    assert "| 01-1b | 1 | ok | " in text and "formulas, ✓ |" in text
    run = json.loads((folder / "01-1b.json").read_text())
    assert run["config"]["preset"] == "1b" and run["config"]["precision"] == "bf16"
    [row] = [line for line in text.splitlines() if line.startswith("| 01-1b |")][1:]
    ms, tokens, mfu = gpu.pace(run, None)
    assert row.startswith(f"| 01-1b | {ms:.1f} | {tokens:,.0f} | - | - | --preset=1b --micro-batch")
