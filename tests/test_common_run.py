"""The bare run: its flags, its steps, a chapter and common.py alone, and how it ends."""

import argparse
import contextlib
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import common
from common import gpt
from lab.run import report, strict
from lab.run.one_gpu import BesideOneGpu
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


def device_in_the_group_of_the_test():
    with mock.patch("torch.cuda.device_count", lambda: 8):
        return str(common.join_ranks(argparse.Namespace(device="auto"), 0))


def test_the_device_follows_the_group_that_is_there(ranks):
    """Of gloo's ranks, here the pool's, none takes a GPU."""
    assert ranks(1, 180)(device_in_the_group_of_the_test) == ["cpu"]


def matmul_precision(*flags):
    report.Run(arguments(*flags, parse=strict.parse))
    return torch.get_float32_matmul_precision()


def test_float32_is_rounded_to_tf32_only_where_nothing_is_verified(ranks):
    assert ranks(1, 180)(matmul_precision) == ["highest"]
    assert ranks(1, 180)(matmul_precision, "--no-verify") == ["high"]
    assert ranks(1, 180)(matmul_precision, "--verify") == ["highest"]


def one_gpu(flags):
    """Three steps of one GPU's run, and the same in PyTorch's words."""
    run = BesideOneGpu(arguments("--dtype=float64", "--ignore=0.5", *flags))
    model = gpt(run.args.model, run.args.seed, dtype=torch.float64)
    theirs = {"adamw": lambda p: torch.optim.AdamW(p, 5e-4, (0.9, 0.95), eps=1e-6),
              "sgd": lambda p: torch.optim.SGD(p, 0.3)}[run.args.optimizer](model.parameters())
    norms, differences = [], []
    for batch in run.batches():
        loss, norm = run.one_gpu_step(batch)
        theirs.zero_grad()
        expected = nn.functional.cross_entropy(
            model(batch.tokens).transpose(1, 2), batch.targets, ignore_index=-100)
        expected.backward()
        norms.append(norm.item())
        total = nn.utils.clip_grad_norm_(model.parameters(), run.args.clip or math.inf)
        theirs.step()
        differences += [(loss - expected).item(), (norm - total).item()]
    pairs = zip(run.one_gpu.parameters(), model.parameters())
    return norms, max(map(abs, differences)), max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("flags", [("--clip=0.1",), ("--optimizer=sgd", "--lr=0.3")])
def test_one_gpus_step_is_pytorchs(ranks, flags):
    [(norms, scalars, parameters)] = ranks(1, 180)(one_gpu, flags)
    assert min(norms) > 0.1 and scalars < 1e-12 and parameters < 1e-12


def one_gpu_in_bf16():
    run = BesideOneGpu(arguments("--precision=bf16"))
    run.is_mixed = True
    losses = [run.one_gpu_step(batch)[0].item() for batch in run.batches()]
    parameters = list(run.one_gpu.parameters())
    return losses, {p.dtype for p in parameters}, {p.grad.dtype for p in parameters}


def test_one_gpu_is_in_the_same_precision(ranks):
    [(losses, dtypes, of_gradients)] = ranks(1, 180)(one_gpu_in_bf16)
    assert (dtypes, of_gradients) == ({torch.bfloat16}, {torch.float32}) and losses[-1] < losses[0]


# ------------------------------------------------------------------- a chapter and common.py, alone

BARE = (*SMALL, "--layers=4", "--steps=2", f"--data={TEXT}", "--batch=4", "--dtype=float64")
LINE = r"step (\d+): loss (\S+), gradient norm (\S+)"


def copied(name, folder):
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


def hold_bare_run(output):
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
        found.add(hold_bare_run(output))
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


@pytest.mark.full
def test_a_chapter_alone_under_torchrun(tmp_path):
    """As a user would start it: nothing but its lines, and a clean end."""
    copied("04_tensor_parallel", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    run = subprocess.run([*command, "04_tensor_parallel.py", *BARE], cwd=tmp_path,
                         env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True,
                         text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    hold_bare_run(run.stdout)


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
