"""The bare run: its flags, its steps, a chapter and common.py alone, and how it ends."""

import argparse
import contextlib
import io
import re
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from lab.run import report, strict
from tests.conftest import (
    CHAPTERS,
    ROOT,
    SMALL,
    TEXT,
    arguments,
    chapter,
    sample,
    training_chapters,
)

# ----------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(("device", "gpus", "expected"), [
    ("auto", 8, ("cuda:1", "nccl")),
    ("cpu", 8, ("cpu", "gloo")),
    ("auto", 3, ("cpu", "gloo")),
])
def test_a_gpu_for_every_local_rank_or_the_cpu(monkeypatch, device, gpus, expected):
    """Of the second of four ranks on the second of two machines."""
    started = []
    for variable, value in dict(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: started.append(backend))
    joined = common.join_ranks(argparse.Namespace(device=device), rank=5)
    assert (str(joined), started[-1]) == expected
    assert started[:-1] == ([joined] if joined.type == "cuda" else [])


def matmul_precision(*flags):
    """For a rank of the pool: how a run with these flags multiplies float32."""
    report.Run(arguments(*flags, parse=strict.parse))
    return torch.get_float32_matmul_precision()


def test_float32_is_rounded_to_tf32_only_where_nothing_is_verified(ranks):
    assert ranks(1, 180)(matmul_precision) == ["highest"]
    assert ranks(1, 180)(matmul_precision, "--no-verify") == ["high"]
    assert ranks(1, 180)(matmul_precision, "--verify") == ["highest"]


# ------------------------------------------------------------------- a chapter and common.py, alone

BARE = (*SMALL, "--layers=4", "--steps=2", f"--data={TEXT}", "--batch=4", "--dtype=float64")
LINE = r"step (\d+): loss (\S+), gradient norm (\S+)"


def copied(name, folder):
    """Copy a chapter and common.py."""
    shutil.copy(CHAPTERS / f"{name}.py", folder)
    shutil.copy(ROOT / "common.py", folder)


def launch_alone(name, folder, flags):
    """For a rank of the pool: launch a chapter beside a common.py in a folder without lab/. Returns
    its status and output."""
    output, wrong = io.StringIO(), io.StringIO()
    ours = {module: sys.modules.pop(module, None) for module in ("common", name)}
    with (contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong),
          mock.patch.object(sys, "argv", [f"{name}.py", *flags]),
          mock.patch.object(sys, "path", [str(folder), *sys.path])):
        try:
            runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code
        finally:
            sys.modules.pop(name, None)                 # 11 is imported by its common.py
            sys.modules.update({module: its for module, its in ours.items() if its})
    return status, output.getvalue(), wrong.getvalue()


def check_bare_run(output):
    """Assert that two steps were printed; returns their losses and norms."""
    steps, losses, norms = zip(*re.findall(LINE, output))
    assert steps == ("1", "2") and len(set(losses)) == 2, output
    assert all(5 < float(loss) < 6 for loss in losses) and all(float(norm) > 0 for norm in norms)
    return losses, norms


@pytest.mark.parametrize("name", sample(reversed(training_chapters()), 3))
def test_a_chapter_and_common_train_alone(ranks, tmp_path, name):
    """Copied to an empty folder, on 1 rank and on 4: both print the same losses and norms, so that
    neither text nor weights nor a rate depend on the number of ranks."""
    copied(name, tmp_path)
    found = set()
    for world in (1,) if name.startswith("01") else (1, 4):
        (status, output, wrong), *others = ranks(world, 240)(launch_alone, name, tmp_path, BARE)
        assert status == 0 and not wrong and all(other == (0, "", "") for other in others), wrong
        found.add(check_bare_run(output))
    assert len(found) == 1, found


@pytest.mark.parametrize(("flags", "last"), sample([
    (["--variant=skip"], "rank 0 .* rank 2 .* rank 1 "), (["--variant=hello"], "rank 2 of 3"),
    ([], "all_reduce_doubling.*equal=True")]))
def test_chapter_00_and_common_alone(ranks, tmp_path, flags, last):
    """It trains nothing: it prints what it has found, and who waits for whom."""
    name = "00_collectives"
    chapter(name)  # or skip
    copied(name, tmp_path)
    (status, output, wrong), *others = ranks(3, 240)(launch_alone, name, tmp_path, flags)
    assert (status, wrong) == (0, "") and all(other == (0, "", "") for other in others), wrong
    assert re.search(last, output.splitlines()[-1]), output


# ------------------------------------------------------------------------------------------ leaving

LEAVES = """
import atexit
import weakref

import torch.distributed as dist

import common

class Cycle:
    pass

def train(run):
    atexit.register(print, "Python shuts down, while the group's threads may run")
    cycle = Cycle()
    cycle.itself, cycle.mesh = cycle, run.mesh(dp=1)
    gone, destroy = weakref.ref(cycle), dist.destroy_process_group
    dist.destroy_process_group = lambda: (print("collected:", gone() is None), destroy())
    {ending}

common.launch(__file__, "", {{"test": train}}, lambda args, ranks: None)
"""


@pytest.mark.parametrize(("lab", "ending", "status"), sample([
    (True, "raise common.Refused('no', '--steps 1')", 2), (False, "run.status = 1", 1),
    (True, "run.finish = lambda: 1", 1)]))
def test_launch_leaves_cleanly_with_the_status_of_the_run(tmp_path, lab, ending, status):
    shutil.copy(ROOT / "common.py", tmp_path)
    if lab:
        (tmp_path / "lab").symlink_to(ROOT / "lab")
    (tmp_path / "leaves.py").write_text(LEAVES.format(ending=ending))
    command = [sys.executable, tmp_path / "leaves.py", f"--data={TEXT}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    shuts_down = "" if lab else "Python shuts down, while the group's threads may run\n"
    assert (run.returncode, run.stdout) == (status, "collected: True\n" + shuts_down)
    assert run.stderr.count("\n") == (status == 2), run.stderr
    assert status != 2 or run.stderr.startswith("error: no; --steps 1 ")
