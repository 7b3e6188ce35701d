"""benchmarks/gpu.py: its steps for GPUs that are not here, and how it goes on after a failure."""

import dataclasses
import json
import types
from unittest import mock

import pytest
import torch

import common
from benchmarks import gpu, gpu_steps, results, time_chapters, time_kernels
from lab import chapters, scaling
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
        elif flags[0] == "lab.scaling":
            ranks = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(step.ranks))
            with mock.patch.dict("os.environ", ranks | {"RANK": "0"}):
                scaling.parse(flags[1:])
        else:
            assert [program, flags[0]] == ["-m", "pytest"]
    except common.Refused as why:
        return why.args


# ------------------------------------------------------------------------- machines and their steps


@pytest.mark.parametrize(("kind", "n"), sample([(T4, 2), (H100, 8), (H100, 1)], 2))
def test_each_step_takes_its_flags(monkeypatch, kind, n):
    steps = gpu_steps.steps_of(pretend(monkeypatch, kind, n), "cuda")
    names = [step.name for step in steps]
    assert len(set(names)) == len(names)
    assert {name for name in chapters.NAMES if name[:2] != "10"} | {*gpu_steps.FUSED} <= {*names}
    assert ("02-gpt2" in names) == (n > 1)
    for step in steps:
        assert step.skipped or refused(step) is None, step
        assert step.ranks in (1, n) and "--device=cpu" not in step.words
    skipped = {step.name for step in steps if step.skipped}
    if kind == H100:
        assert not skipped and max(step.ranks for step in steps) == n
    if kind == T4:  # which has neither bf16 nor FP8, nor the memory
        assert skipped == {"01-1b", "01-gpt2-fp8", "kernels-fp8", "02-gpt2", "03-gpt2-zero2",
                           "03-1b-zero3", "09-gpt2"}  # fmt: skip
    pretend(monkeypatch, kind, 0)
    on_cpu = gpu_steps.steps_of(NOBODY, "cpu")
    assert {*names} - {step.name for step in on_cpu} <= {"06-torch"}  # which takes a GPU
    for step in on_cpu:
        assert step.skipped or refused(step) is None, step


def test_it_runs_on_a_power_of_two_and_says_so(monkeypatch):
    for n, used, name in (1, 1, "1 x "), (7, 4, "4 of 7 x "), (8, 8, "8 x "), (9, 8, "8 of 9 x "):
        pretend(monkeypatch, H100, n)
        machine = gpu.machine_of("cuda")
        assert [one["capability"] for one in machine["gpus"]] == [[9, 0]] * n
        assert machine["used"] == used and machine["driver"] == "570.1"
        assert {step.ranks for step in gpu_steps.steps_of(machine, "cuda")} == {1, used}
        assert gpu.name_of(machine) == name + H100["name"]
        assert " of 85 GB, compute capability 9.0, driver 570.1" in gpu.described(machine)


def test_where_no_gpu_can_be_asked_it_says_so_in_a_line(monkeypatch, capsys):
    pretend(monkeypatch, H100, 0)
    with pytest.raises(SystemExit, match="2"):
        gpu.main([])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--device cpu would work" in error
    with pytest.raises(SystemExit, match="1"):
        gpu.machine_of("cuda")
    assert capsys.readouterr().err.count("\n") == 1


# ------------------------------------------------------------------------------ how it goes on


HANGS = """
import subprocess, sys, time
child = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(child, start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def program(name, code, seconds=600.0):
    return gpu_steps.Step(name, ["-c", code], 1, seconds)


STEPS = [
    program("fine", "print('a number:'); print('| 1 |'); print(); print('all is well')"),
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


@pytest.mark.parametrize(("left", "outcome"), [(60, "failed"), (1.5, "left out")])
def test_a_step_that_the_end_of_the_time_cuts_has_not_failed(monkeypatch, folder, left, outcome):
    limits = []

    def never_ends(words, said, limit):
        said.write_text("soon\na child\n\n")
        limits.append(limit)

    monkeypatch.setattr(gpu, "run", never_ends)
    row = gpu.play(program("slow", "", 3), left)
    assert (row.outcome, limits) == (outcome, [min(left, 3)])
    assert outcome == "left out" or row.showed.endswith("a child")


def test_after_ctrl_c_what_is_there_stays(monkeypatch, folder, capsys):
    def play(step, left):
        if step.name == "wrong":
            raise KeyboardInterrupt
        return gpu.Row(step, "ok", 3, "well")

    monkeypatch.setattr(gpu, "play", play)
    path = folder / "RESULTS.md"
    with pytest.raises(KeyboardInterrupt):
        gpu.play_all(STEPS, NOBODY, 60, path)
    assert "1 of 6 steps ran" in path.read_text() and "| fine | 1 | ok |" in path.read_text()
    assert str(path) in capsys.readouterr().out


def test_gpus_of_one_kind_have_a_section_of_their_own(tmp_path):
    path = tmp_path / "RESULTS.md"
    for kind, n in ((H100, 1), (H100, 8), (RTX, 1), (H100, 8)):
        machine = {"gpus": [kind] * n, "used": n, **VERSIONS}
        results.record(gpu.name_of(machine), gpu.report([], machine, 3, 10), path)
    text = path.read_text()
    assert text.count("\n## ") == 3 and text.count("8 x NVIDIA H100 80GB HBM3\n") == 1


# ------------------------------------------------------------------------------ what it showed


def test_what_a_chapter_has_shown(tmp_path):
    path = tmp_path / "run.json"
    run = {"max_loss_diff": 0, "max_grad_diff": 0.0123, "recorded": {}, "problems": [],
           "tolerance": {"loss": 1e-5, "gradients": 1e-5},
           "checks": [{"ok": True}, {"ok": False}, {"ok": None}, {"ok": True}]}
    step = gpu_steps.Step("01", ["01_single_gpu.py", f"--profile={tmp_path / 'no.json'}"])
    path.write_text(json.dumps(run))
    found = gpu.shown_by(step, ["  --kernels: no GPU"], path)
    assert found["run"] == run and found["showed"].endswith("✓")
    for words in "--kernels: no GPU", "gradients 1e-02", "2 of 3 ", "no timeline":
        assert words in found["showed"]
    path.write_text(json.dumps(run | {"problems": ["gradients: no", "more"]}))
    assert gpu.shown_by(step, [], path)["showed"].endswith("✗ gradients: no")


def test_the_pace_of_a_run_is_that_of_its_median_step():
    cfg = common.Config(layers=1, dim=16, heads=2, kv_heads=2, seq=8, vocab=256)
    run = {"config": dataclasses.asdict(cfg) | {"batch": 2}, "world_size": 1,
           "step_seconds": [90, 90, 90, 1, 2, 6]}
    ms, tokens, mfu = gpu.pace(run, H100["name"])
    flops = module_of("01_single_gpu").model_flops(cfg, 2)
    assert (ms, tokens) == (2000, 2 * 8 / 2)
    assert mfu == pytest.approx(flops / 2 / PEAK_FLOPS[H100["name"]])
    assert gpu.pace(run | {"world_size": 4}, H100["name"])[2] == pytest.approx(mfu / 4)


def test_a_timeline_says_how_busy_a_gpu_is_and_what_hides(tmp_path):
    path = tmp_path / "trace.json"
    kernel = lambda name, ts, dur: {"name": name, "cat": "kernel", "ts": ts, "dur": dur, "ph": "X"}
    events = [{"name": "aten::mm", "cat": "cpu_op", "ts": 0, "dur": 900}, {"name": "process"},
              kernel("gemm", 100, 30), kernel("ncclDevKernel_AllReduce", 120, 40),
              kernel("gemm", 190, 10), kernel("elementwise", 120, 5)]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    assert all(word in gpu.traced(path) for word in (" 4 kernels", " 70%", " 25% "))


@pytest.mark.full
def test_two_steps_on_a_cpu(folder):
    """As they are, in processes of their own."""
    assert gpu.main(["--device=cpu", "--only", "01-1b", "kernels-fp8"]) == 0
    text = (folder / "RESULTS.md").read_text()
    assert "| kernels-fp8 | 1 | skipped | 0 |" in text and "| 01-1b | 1 | ok | " in text
    run = json.loads((folder / "01-1b.json").read_text())
    assert run["config"]["preset"] == "1b" and run["config"]["precision"] == "bf16"
