"""Chapter 10's command line: what it answers, what it refuses, and that its advice works.

Streams, files and folders that can't be used: tests/support/test_trials.py.
"""

import contextlib
import io
import json
import math
import re
import shlex
import subprocess
import sys

import pytest

from lab.planner import planning
from tests.chapters.test_10_planner import TEN, ten  # noqa: F401  (a fixture)
from tests.conftest import ROOT, sample
from tests.support.refused import changed


def told(ten, argv):
    """(status, stdout, stderr) of the planner, called in this process."""
    said, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors):
        try:
            status = planning.main(ten, argv)
        except SystemExit as leaving:
            status = leaving.code
    return status, said.getvalue(), errors.getvalue()


def follow(ten, argv, line):
    """Where no plan fits, each change that is named works: something fits, for sure. A change of a
    flag that is refused may lead to such a question."""
    if line.endswith("no change was found to work\n"):
        return
    for change in re.search("; ([^;]*) would work\n$", line)[1].split(" or "):
        words, _ = changed(argv, 1, change)
        status, output, errors = told(ten, words)
        if status:
            assert errors != line and " or " not in change
            follow(ten, words, errors)
        else:
            assert not errors and " may fit" not in output


# ---------------------------------------------------------------------------------------- answers


def test_it_answers_without_torch(tmp_path):
    """As a reader starts it: `python 10_planner.py ...`."""
    file = tmp_path / "plan.json"
    code = ("import sys, runpy, atexit; sys.argv = sys.argv[1:]; "
            "atexit.register(lambda: 'torch' in sys.modules and print('torch')); "
            "runpy.run_path(sys.argv[0], run_name='__main__')")
    flags = f"--model 70b --gpus 512 --batch 1024 --explain --json {file}"
    ran = subprocess.run([sys.executable, "-c", code, ROOT / f"{TEN}.py", *shlex.split(flags)],
                         capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] != "torch", ran.stderr
    plan = json.loads(file.read_text())
    assert plan["seconds"] == pytest.approx(sum(plan["time"].values()))
    parts = [size for cause, size in plan["memory"].items() if cause != "total"]
    assert plan["memory"]["total"] == pytest.approx(sum(parts))
    assert plan["tokens_per_second_per_gpu"] * 512 * plan["seconds"] == pytest.approx(1024 * 8192)
    assert math.prod(plan["layout"][axis] for axis in ("dp", "tp", "cp", "pp")) == 512


def test_any_model_and_machine_can_be_given(ten, tmp_path):
    status, said, errors = told(ten, shlex.split(
        "--layers 4 --dim 512 --heads 8 --kv-heads 2 --ffn 256 --no-gated --vocab 1000 --seq 512 "
        "--no-tie --experts 16 --top-k 4 --shared 1 --node-limit 2 --dense-layers 1 "
        "--dense-ffn 1024 --head-dim 64 --rope-dim 32 --q-latent 96 --kv-latent 64 --peak 1e14 "
        "--matmul 0.5 --hbm 1e12 --memory 1e10 --nvlink 1e11 --nic 1e10 --per-node 4 --alpha 1e-5 "
        "--gpus 16 --batch 32 --ep 16 --no-flash --dropout --tp-hidden 0 --dp-hidden 0.5 "
        f"--two-hops --ep-hidden 0.9 --ep-units 0.1 --gradient-bytes 2 --json {tmp_path}/x.json"))
    assert (status, errors) == (0, "") and "ep 16" in said
    found = json.loads((tmp_path / "x.json").read_text())
    spared = 3 * 12 * 2 * 512 * 256                     # 12 of 16 experts, GELU, in 3 layers
    assert found["parameters"] - found["parameters_of_a_token"] == spared


@pytest.mark.parametrize("flags", [
    "--contexts --nic=1e12 --per-node=3", "--noise-scale=1e6", "--problems"])
def test_tables_are_printed(ten, flags):
    """--published is what the exhibits of the museum run."""
    status, said, errors = told(ten, flags.split())
    assert (status, errors) == (0, "") and len(said.splitlines()) > 5


def test_degrees_say_the_gpus_and_micro_batches_the_batch(ten):
    """The last is the playbook's batch of 4 M tokens: 1,024 sequences are 2 x 4 x 128."""
    for flags, gpus, batch in [
            ("--dp 4 --cp 2 --tp 2 --pp 2", 32, 64), ("--tp 2", 8, 64),
            ("--dp 2 --gpus 8 --batch 24", 8, 24),
            ("--dp 128 --micro-batch 2 --micro-batches 4 --seq 4096", 128, 1024)]:
        _, asked = planning.question(ten, shlex.split(flags))
        assert (asked.gpus, asked.batch) == (gpus, batch), flags
    [plan, *_], _ = asked.find()
    assert (plan.layout.dp, plan.layout.micro_batch) == (128, 2)


def test_where_nothing_fits_for_sure_it_says_so_and_what_would(ten):
    argv = shlex.split("--gpus 8 --batch 8 --seq 16384 --tp 1 --cp 1 --recompute none")
    status, said, _ = told(ten, argv)
    first, second, *_ = said.splitlines()
    assert status == 0 and "none does for sure" in first
    follow(ten, argv, second.strip("()") + "\n")


# --------------------------------------------------------------------------------------- refusals

REFUSED = [  # arguments, and what the line has to name; one of each kind first
    ("--tp 3", "--tp"), ("--dp 3", "--batch 66"), ("--micro-batches 4", "--dp 8 --micro-batch 1"),
    ("--model 7b --gpus 1", "--gpus"), ("--heads 3", "--layers"),
    ("--heads 48 --model 8b", "--heads 16"),
    ("--fp8 --cluster a100", "without --fp8"), ("--shared 2", "--experts 8"),
    ("--memory 80", "--memory 80e9"), ("--layer 3", "without --layer 3"),
    ("--pp 2 --schedule dualpipe-v --v 2", "dualpipe-v"),
    ("--gpus 8 --batch 1 --pp 8 --v 4 --tp 1", "pp = 8"),
    ("--model mixtral --gpus 64 --batch 64 --ep 3", "ep = 3"),
    ("--kv-heads 5 --model 405b", "--kv-heads 1"),
    ("--gpus 720720 --layers 90000 --dim 64 --heads 2 --seq 2000000 --experts 4096", "layouts")]


@pytest.mark.parametrize(("arguments", "named"), sample(REFUSED, size=9))
def test_a_refusal_is_one_line_and_its_advice_works(ten, arguments, named):
    status, output, line = told(ten, shlex.split(arguments))
    assert status == 2 and not output
    assert line.startswith("error: ") and named in line and line.count("\n") == 1
    follow(ten, shlex.split(arguments), line)
