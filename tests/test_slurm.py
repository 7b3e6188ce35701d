"""slurm/*.sbatch on this machine's CPU, with stand-ins for Slurm's commands: a "node" of two "GPUs"
and the real torchrun. As in Slurm, an srun that gets SIGTERM kills what it has started, and scancel
sends a signal to that, but not to the script. (shellcheck reads the scripts in `make lint`.)"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, SMALL

STAND_INS = {
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
               trap 'pkill -KILL -P "$step"; kill -KILL "$step"' TERM
               "$@" & step=$!
               echo "$step" > step
               wait "$step" """,
    "scancel": '[ "$*" = "--signal=TERM $SLURM_JOB_ID" ] && kill -TERM "$(cat step)"',
    "scontrol": 'case $1 in show) echo localhost; echo another;; *) echo "$@";; esac'}
WORDS = "02_data_parallel.py", *SMALL, "--layers=1", "--no-verify"
WAIT = 300      # seconds, at most: for what takes few where nothing else runs


@pytest.fixture
def start(tmp_path):
    """start(script, *words, gpus=2): the process, in a folder with a chapter and no .venv."""
    for name, lines in STAND_INS.items():
        path = tmp_path / "commands" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
    (tmp_path / WORDS[0]).symlink_to(ROOT / WORDS[0])
    job = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": str(os.getpid()),
           "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "1",
           "CUDA_VISIBLE_DEVICES": "",
           "PATH": f"{tmp_path}/commands:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    started = []

    def run(script, *words, gpus=2):
        started.append(subprocess.Popen(
            ["bash", ROOT / "slurm" / script, *words], text=True,
            env=os.environ | job | {"SLURM_GPUS_ON_NODE": str(gpus)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_what_slurm_is_asked_for():
    """Without these lines, a job whose time is over would not come back."""
    asked = {path.stem: {*re.findall(r"^#SBATCH (.+)$", path.read_text(), re.M)}
             for path in ROOT.glob("slurm/*.sbatch")}
    assert all({"--exclusive", "--mem=0"} <= lines for lines in asked.values())
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@120"} <= asked["restart"]


def test_without_a_chapter_a_job_says_how_it_is_started(start):
    run = start("restart.sbatch")
    output, _ = run.communicate(timeout=WAIT)
    assert run.returncode != 0 and "usage: sbatch slurm/restart.sbatch NN_name.py" in output


@pytest.mark.full
def test_a_script_runs_on_each_gpu_of_a_node(start, tmp_path):
    """Each rank writes a file of its own: what two ranks print may be interleaved."""
    (tmp_path / "rank.py").write_text(
        "import os, sys\nrank = os.environ['RANK']\n"
        "open(f'{rank}.txt', 'w').write(f'{os.environ[\"WORLD_SIZE\"]} {sys.argv[1:]}')\n")
    run = start("fivefold.sbatch", "rank.py", "--lr", "1 2")
    output, _ = run.communicate(timeout=WAIT)
    assert run.returncode == 0, output
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == 2 * ["2 ['--lr', '1 2']"]


@pytest.mark.full
@pytest.mark.parametrize("script", ["fivefold.sbatch", "restart.sbatch"])
def test_a_chapter_that_fails_is_a_job_that_fails(start, script):
    run = start(script, *WORDS, "--steps=0")
    output, _ = run.communicate(timeout=WAIT)
    assert run.returncode != 0 and "--steps" in output


@pytest.mark.full
def test_a_job_whose_time_runs_out_goes_on_when_it_comes_back(start, tmp_path):
    """The second time it has two steps left, so that the test ends."""
    words = *WORDS, "--save-every=5"
    run = start("restart.sbatch", *words, "--steps=100000", gpus=1)
    folder = tmp_path / "runs" / f"slurm-{os.getpid()}"
    until = time.monotonic() + WAIT
    while not list(folder.glob("step-*")) and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(run.pid, signal.SIGTERM)                    # only to the script, as B: says
    output, _ = run.communicate(timeout=WAIT)
    assert run.returncode == 0 and f"requeue {os.getpid()}" in output, output
    saved = max(int(path.name[len("step-"):]) for path in folder.glob("step-*"))
    run = start("restart.sbatch", *words, f"--steps={saved + 2}", gpus=1)
    output, _ = run.communicate(timeout=WAIT)
    assert run.returncode == 0 and "requeue" not in output, output
    steps = re.findall(r"^ +(\d+) +\d+\.\d{4} ", output, re.M)
    assert steps == [f"{saved + 1}", f"{saved + 2}"], output
