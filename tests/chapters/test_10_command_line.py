"""Chapter 10's command line: what it refuses, what it says would work, and what it writes."""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import common
from lab.cli import refusals
from lab.planner import planning
from tests.chapters.test_10_planner import TEN, ten  # noqa: F401  (a fixture)
from tests.conftest import ROOT, chapter, some
from tests.support import every_command, trials


def planner(arguments):
    return subprocess.run([sys.executable, ROOT / f"{TEN}.py", *shlex.split(arguments)],
                          capture_output=True, text=True, timeout=60)


def test_it_answers_in_a_second_without_torch(tmp_path):
    file = tmp_path / "plan.json"
    begin = time.perf_counter()
    ran = planner(f"--model 70b --gpus 512 --batch 1024 --explain --json {file}")
    assert ran.returncode == 0 and time.perf_counter() - begin < 5, ran.stderr
    plan = json.loads(file.read_text())
    assert {"seconds", "tokens_per_second_per_gpu", "tflops", "tflops_causal", "mfu", "time",
            "memory", "layout", "found"} <= plan.keys()
    assert plan["seconds"] == pytest.approx(sum(plan["time"].values()))
    parts = [size for cause, size in plan["memory"].items() if cause != "total"]
    assert plan["memory"]["total"] == pytest.approx(sum(parts))
    assert plan["tokens_per_second_per_gpu"] * 512 * plan["seconds"] == pytest.approx(1024 * 8192)
    assert math.prod(plan["layout"][axis] for axis in ("dp", "tp", "cp", "pp")) == 512
    code = ("import sys; sys.argv = ['x', '--tp', '8']; import runpy; "
            f"runpy.run_path('{ROOT / TEN}.py', run_name='__main__'); "
            "assert 'torch' not in sys.modules")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_reader_that_leaves_ends_it_without_a_word():
    command = f"{shlex.quote(sys.executable)} 10_planner.py --problems | true"
    assert not subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True).stderr
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN      # and tests go on as they were


def test_help_says_what_the_chapter_says_of_each_number():
    said = " ".join(planner("--help").stdout.split())
    for words in ("--nic NIC bytes/s of its network card", "--memory MEMORY bytes",
                  "--v V slices of the model on each stage", "attention is one kernel"):
        assert words in said


def test_any_model_and_machine_can_be_given(ten, capsys):
    planning.main(ten, shlex.split(
        "--layers 4 --dim 512 --heads 8 --kv-heads 2 --ffn 2048 --no-gated --vocab 1000 --seq 512 "
        "--untie --peak 1e14 --matmul 0.5 --hbm 1e12 --memory 1e10 --nvlink 1e11 --nic 1e10 "
        "--per-node 4 --alpha 1e-5 --gpus 4 --batch 16 --no-flash --dropout --tp-hidden 0 "
        "--dp-hidden 0.5 --gradient-bytes 2"))
    said = capsys.readouterr().out
    assert "0.0 G parameters" in said and "layouts fit" in said


@pytest.mark.parametrize(("arguments", "words"), some([
    ("--tp 3", "tp x cp x pp = 3; --tp"),
    ("--dp-hidden 2", "--dp-hidden: 2 is no number from 0 to 1; --dp-hidden 0.5"),
    ("--gpus 100000 --batch 2048", "; --batch 100000 would work"),
    ("--model 405b", "needs 919 GB of a GPU"), ("--tp 16", "gpus = 8 is not a multiple of tp"),
    ("--gpus 1 --tp 2", "gpus = 1 is not a multiple"), ("--tp x", "--tp: x is no whole number"),
    ("--gpus 0", "--gpus"), ("--model 9b", "--model"), ("stray", "; without stray"),
    ("--seq 100 --cp 8", "seq = 100 is not a multiple of cp = 8"),
    ("--pp 64 --gpus 64", "layers = 32"),
    ("--heads 3 --model 8b", "dim = 4096 is not a multiple of"),
    ("--heads 3", "--layers, --dim and --heads"), ("--matmul 0", "--matmul: 0 is no number from"),
    ("--attention 0", "--attention"), ("--matmul 5", "--matmul: 5 is no number from 0.001 to 1"),
    ("--gpus 8 --batch 1 --pp 8 --v 4 --tp 1", "1 micro-batches for pp = 8, v = 4"),
    ("--kv-heads 64", "heads = 32 is not a multiple of kv-heads"),
    ("--top-k 2", "than --experts = 1; --top-k 1 would work"),
    ("--kv-heads 5", "kv-heads = 5; --kv-heads 4 would"), ("--dp 3", "; --batch 66 would"),
    ("--heads 31 --model 8b", "; --heads 32 would"),
    ("--gpus 8 --tp 1 --pp 1 --cp 1 --batch 12", "; --batch 16 would"),
    ("--kv-heads 5 --model 405b", "; --kv-heads 4 --gpus 128 would"),
    ("--micro-batches 4", "; --dp 8 --micro-batch 1 would"),
    ("--dp 9 --micro-batch 1 --micro-batches 2 --batch 18", "the same; without --micro-batches"),
    ("--dp 4000 --micro-batch 1 --micro-batches 999999", "is too many; --micro-batches 1 would"),
    ("--dp 9999999 --tp 8", "79,999,992 GPUs: 16,777,215 are the most; --dp 1 would"),
    ("--pp 2 --schedule dualpipe-v --v 2", "dualpipe-v needs pp of 2 or more"),
    ("--nic nan", "--nic"), ("--peak 1e99", "--peak"), ("--memory 80", "--memory 80e9 would"),
    ("--fp8 --cluster a100", "a100 has no matmuls in FP8; without --fp8"),
    ("--json /proc/plan.json", "--json: cannot write"), ("--layer 3", "without --layer 3"),
    ("--layers 1000000000000", "--layers"), ("--dim 99999999999", "--dim"),
    ("--gpus 720720 --layers 90000 --dim 64 --heads 2 --seq 2000000 --experts 4096",
     "34,744,320 layouts are more than")]))
def test_a_bad_argument_costs_one_line(ten, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)                         # where a change may write a plan
    status, output, line = told(ten, shlex.split(arguments))
    assert status == 2 and not output
    assert line.startswith("error: ") and words in line and line.count("\n") == 1
    follow(ten, shlex.split(arguments), line)


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
    """Each change that a refusal names works: something fits, for sure."""
    for change in re.search("; ([^;]*) would work\n$", line)[1].split(" or "):
        status, said, errors = told(ten, refusals.changed(argv, refusals.parsed(change)))
        assert status == 0 and " may fit" not in said, (argv, line, change, errors)


@pytest.mark.parametrize("arguments", [
    "--model 70b --tp 1", "--no-sp --tp 3", "--heads 3 stray --model 9b --layer=3",
    "--model 1t --gpus 1 --memory 1e6 --batch 1",
    "--gpus 8388608 --seq 200000000 --experts 32768 --top-k 2 --v 1 --micro-batch 1 --memory 1e6"])
def test_what_a_refusal_names_works(ten, arguments):
    argv = shlex.split(arguments)
    follow(ten, argv, told(ten, argv)[2])


WRONG = ("--tp 3", "--pp 3", "--cp 3", "--ep 4", "--v 3", "--dp 5", "--zero 4", "--kv-heads 5",
         "--heads 31 --model 8b", "--gpus 7 --tp 2", "--seq 999 --cp 2", "--batch 3 --dp 2",
         "--model 405b", "--micro-batches 4", "--top-k 2", "--schedule zero-bubble --pp 1",
         "--memory 1e6", "--gradient-bytes 9", "--nic 25", "--layers 3", "stray",
         "--fp8 --cluster a100", "--recompute all", "--sent-bytes 0", "--micro-batch 1000")


@pytest.mark.parametrize("arguments", some(
    [(" ".join(both),) for both in itertools.combinations(WRONG, 2)], 61))
def test_two_mistakes_are_mended_together(ten, arguments):
    argv = shlex.split(arguments)
    status, output, line = told(ten, argv)
    if arguments == "--model 405b --layers 3":          # a model of a given kind, of other sizes
        assert status == 0
    else:
        assert status == 2 and not output and line.count("\n") == 1
        follow(ten, argv, line)


def test_each_flag_says_what_it_is(ten):
    for action in planning.parser(ten)._actions:
        assert action.help and len(action.help) > 4, action.dest


@pytest.mark.parametrize(("flags", "gpus", "batch"), [
    ("--dp 64 --tp 8 --pp 16", 8192, 64), ("--dp 4 --cp 2 --tp 2 --pp 2", 32, 64),
    ("--dp 16", 16, 64), ("--tp 2", 8, 64), ("--dp 2 --gpus 8 --batch 24", 8, 24),
    ("--dp 128 --micro-batch 2 --micro-batches 4 --seq 4096", 128, 1024),
    ("--dp 512 --micro-batch 2 --micro-batches 1 --seq 4096", 512, 1024)])
def test_degrees_say_the_gpus_and_micro_batches_the_batch(ten, flags, gpus, batch):
    """The playbook's batch of 4 M tokens: 1,024 sequences are 2 x 4 x 128, or 2 x 1 x 512."""
    status, said, errors = told(ten, [*shlex.split(flags), "--explain"])
    assert status == 0 and not errors
    if "--micro-batches" in flags:
        dp, _, micro, _, accumulated = shlex.split(flags)[1:6]
        assert f"of 1,024 is micro-batch {micro} x accumulated {accumulated} x dp {dp}" in said
    assert f" on {gpus} x h100, megatron-2024: {batch} sequences" in said


ODD = {"int": ["-1", "0", "1", "2", "3", "5", "8", "12", "64", "1000", "x", "1.5", "", "--",
               "65536", "9" * 20],
       "float": ["0", "1e-9", "0.3", "1", "80", "1e12", "1e30", "nan", "inf", "-1", ""]}


def drawn(rng, ten):
    """A command line of one to five flags, of which some are bad, or do not fit each other."""
    argv = []
    flags = [action for action in planning.parser(ten)._actions if action.dest not in (
        "help", "published", "problems", "contexts", "json")]
    for action in rng.sample(flags, rng.choice((1, 1, 2, 2, 3, 4, 5))):
        flag = rng.choice(action.option_strings)
        if action.nargs == 0:
            argv.append(flag)
        elif action.choices:
            argv.append(f"{flag}={rng.choice([*action.choices, 'x'])}")
        else:
            kind = "int" if trials.kind_of(action) is int else "float"
            argv.append(f"{flag}={rng.choice(ODD[kind])}")
    return argv + ["stray"] * (rng.random() < 0.1)


@pytest.mark.parametrize("seed", [
    0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))])
def test_every_odd_question_is_answered_or_refused_with_a_change_that_works(ten, seed):
    rng, refused = random.Random(seed), 0
    while refused < 15:
        argv, begin = drawn(rng, ten), time.process_time()
        status, said, line = told(ten, argv)
        assert time.process_time() - begin < 15, argv
        assert (status, line) == (0, "") and said or status == 2 and not said, (argv, line)
        if status == 2:
            refused += 1
            assert line.startswith("error: ") and line.count("\n") == 1, (argv, line)
            follow(ten, argv, line)


def test_the_sizes_of_a_search_are_limited(ten, monkeypatch):
    """As many layouts as are to be tried are counted before any is."""
    asked = planning.question(ten, [])[1]
    tried = []
    monkeypatch.setattr(ten, "Plan", lambda model, layout, *others: tried.append(layout)
                        or SimpleNamespace(why="", total=0, bytes=0))
    asked.find(8, {"zero": 1, "cp": 1})
    degrees = ten.degrees(asked.model, asked.cluster, asked.software, 8, {"zero": 1, "cp": 1}, 16)
    assert len(tried) == math.prod(map(len, degrees.values())) <= planning.MOST
    monkeypatch.setattr(planning, "MOST", len(tried) - 1)
    with pytest.raises(common.Refused, match="layouts are more than"):
        planning.question(ten, ["--zero=1", "--cp=1"])


def test_a_refusal_and_a_full_disk_leave_nothing(tmp_path, monkeypatch):
    """Other streams and files: tests/support/test_trials.py."""
    monkeypatch.chdir(tmp_path)
    assert told(chapter(TEN), ["--json=plan.json", "--tp=3"])[0] == 2 and os.listdir() == []

    def full(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    errors = io.StringIO()
    assert trials.call(every_command.PLANNER, ["--json=plan.json"], {}, None, errors) == 1
    assert errors.getvalue() == "error: cannot write all of a file: No space left on device\n"


def test_where_nothing_fits_for_sure_it_says_so_and_what_would():
    ran = planner("--gpus 8 --batch 8 --seq 16384 --tp 1 --cp 1 --recompute none")
    first, second, *_ = ran.stdout.splitlines()
    assert first.endswith("layouts may fit, and none does for sure")
    assert second.endswith("; --tp 2 or --cp 2 or --recompute full would work)")
