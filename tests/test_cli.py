"""The command line of every chapter, as a user meets it: refusals, launchers, help, grading."""

import argparse
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import conftest
import pytest
import torch
from conftest import CHAPTERS, ROOT, TEXT, arguments, chapter_names

import common
from lab import cli, verify

EVERY = pytest.mark.parametrize("name", chapter_names())
OTHERS = pytest.mark.parametrize("name", [name for name in chapter_names() if name[:2] != "02"])
TWO = "02_data_parallel"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]

# ---------------------------------------------------------------------------------------- refusals


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Bad files; and for the standard library, which takes a second to read, a few bytes."""
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 128)
    (tmp_path / "odd.bin").write_bytes(b"x" * 257)
    (tmp_path / "high.bin").write_bytes(b"\xff\x7f" * 1000)
    (tmp_path / "file").touch()
    monkeypatch.setattr(common, "standard_library", lambda: bytes(range(250)))


COUNTS = ("--steps", "--layers", "--dim", "--heads", "--kv-heads", "--seq", "--vocab", "--batch",
          "--micro-batch")
SHORT = "--seq 128 needs a text of 129 tokens or more, and"
BAD = [  # flags, and what the line must say: the flag, the value, a value that would work
    ("--variant=best", "--variant: invalid choice: 'best'.*torch"),
    ("--preset=huge", "--preset: invalid choice: 'huge'.*tiny.*gpt2.*1b.*7b"),
    ("--dtype=float8", "--dtype: invalid choice: 'float8'.*float64.*float32.*bfloat16"),
    ("--device=tpu", "--device: invalid choice: 'tpu'.*auto.*cpu.*cuda"),
    ("--optimizer=lion", "--optimizer: invalid choice: 'lion'.*adamw.*sgd"),
    *[(f"{flag}={value}", rf"{flag}: {value} is no whole number in \[1, 2147483648\); 4 would")
      for flag in COUNTS for value in ("0", "-1", "x", "1.5", "9" * 30)],
    *[(f"--lr={value}", r"--lr: .* is no number in \[1e-12, .*\); 0.001 would work")
      for value in ("0", "-1", "nan", "inf", "x")],
    ("--clip=0", "--clip: 0 is no number in .*; 1.0 would work"),
    ("--ignore=1", r"--ignore: 1 is no number in \[0, 1\); 0.3 would work"),
    ("--ignore=-0.1", "--ignore: -0.1 is no number in .*; 0.3 would work"),
    ("--seed=-1", "--seed: -1 is no whole number in .*; 1 would work"),
    *[(f"--bucket-mb={value}", rf"--bucket-mb: {value} is no number in \[0, .*; 25 would work")
      for value in ("-1", "nan", "x")],
    ("--variant=naive --bucket-mb=4",
     "--bucket-mb means nothing to --variant naive; bucket or torch would work"),
    ("--kv-heads=3", "--kv-heads 3 does not divide --heads = 8; 1 would work"),
    ("--heads=12 --dim=96 --kv-heads=8", "--kv-heads 8 does not .* = 12; 4 would work"),
    ("--heads=6", "--heads 6 is not a multiple of --kv-heads = 4; 8 would work"),
    ("--dim=100", r"--dim 100 is not a multiple of 2 x --heads .* = 16; 112 would work"),
    ("--dim=24 --heads=8", "--dim 24 is not a multiple of 2 x --heads .* = 16; 32 would work"),
    ("--batch=10 --micro-batch=4",
     r"--batch 10 is not a multiple of 1 data-parallel ranks .* = 4; 12 would work"),
    ("--data=nowhere.txt", "--data nowhere.txt is no readable file; the default is"),
    ("--data=.", "--data . is no readable file"),
    ("--data=empty.txt", f"{SHORT} empty.txt has 0; a longer --data would work"),
    ("--data=empty.bin", f"{SHORT} empty.bin has 0; a longer --data would work"),
    ("--data=short.txt", f"{SHORT} short.txt has 128; --seq 127 would work"),
    ("--data=odd.bin", f"{SHORT} odd.bin has 128; --seq 127 would work"),
    ("--seq=100000000", "--seq 100000000 needs a text of 100000001 tokens or more, and Python"),
    ("--data=high.bin", "--vocab 256 is too small for token 32767 of high.bin; 65536 would work"),
    ("--vocab=100", "--vocab 100 is too small for token 249 of Python .* library; 256 would work"),
    ("--json=file/run.json", "--json: cannot write 'file/run.json'; run.json would work"),
    ("--plot=figure.jpg2", "--plot: cannot write 'figure.jpg2'; figure.png would work"),
    ("--profile=.", "--profile: cannot write '.'; trace.json would work"),
    ("--data=" + "x" * 5000, "--data x+ is no readable file"),
    ("--json=" + "x" * 5000 + ".json", "--json: cannot write 'x+.json'; run.json would work"),
    ("--json=nowhere/" + "x" * 5000 + "/run.json", "--json: cannot write 'nowhere/x+/run.json'"),
    ("--stepz=3", "unrecognized arguments: --stepz=3"),
    ("--step=3", "unrecognized arguments: --step=3"),
]


def refused(run_chapter, name, flags, line):
    status, output, errors = run_chapter(name, *flags.split())
    assert status == 2 and output == ""
    assert re.match(f"error: {line}", errors) and errors.count("\n") == 1, errors


@pytest.mark.parametrize(("flags", "line"), BAD, ids=[flags[:60] for flags, _ in BAD])
def test_a_bad_argument_costs_one_line_and_status_2(run_chapter, files, flags, line):
    refused(run_chapter, TWO, flags, line)


@OTHERS
def test_every_chapter_refuses_alike(run_chapter, files, name):
    """One flag of each kind: the rest of the table is the same code."""
    for flags, line in (
        ("--variant=best", "--variant: invalid choice: 'best'.*torch"),
        ("--steps=0", "--steps: 0 is no whole number in"),
        ("--heads=6", "--heads 6 is not a multiple of --kv-heads = 4; 8 would work"),
        ("--batch=10 --micro-batch=4", r"--batch 10 is not a multiple of .* = 4; 12 would work"),
        ("--data=nowhere.txt", "--data nowhere.txt is no readable file; the default is"),
        ("--plot=figure.jpg2", "--plot: cannot write 'figure.jpg2'; figure.png would work"),
        ("--step=3", "unrecognized arguments: --step=3"),
    ):
        refused(run_chapter, name, flags, line)


def test_chapter_01_refuses_what_only_it_can(run_chapter):
    for flags, environment, line in (
        ("--precision=bf16 --dtype=float64", {}, "--precision bf16 .*; --dtype float32 would work"),
        ("--precision=int4", {}, "--precision: invalid choice: 'int4'.*fp32.*bf16-fp32grad"),
        ("--attention=ring", {}, "--attention: invalid choice: 'ring'.*plain.*sdpa"),
        ("--recompute=all", {}, "--recompute: invalid choice: 'all'.*none.*selective.*full"),
        ("--variant=torch --precision=bf16-fp32grad", {},
         "--precision bf16-fp32grad is for --variant hand: .*; bf16 would work"),
        ("--compile --steps=3", {}, "--steps 3 ends before --compile .*; 4 would work"),
        ("--loss-scale=0", {}, "--loss-scale: 0 is no number in .*; 65536 would work"),
        ("", {"RANK": 0, "WORLD_SIZE": 2},
         "--nproc_per_node 2: this chapter trains on one GPU; 1 would work"),
    ):
        refused(lambda *flags, more=environment: run_chapter(*flags, **more), "01_single_gpu",
                flags, line)


def test_the_vocabulary_may_end_at_the_highest_token(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    flags = ("--seq", 199, "--data", tmp_path / "text", "--vocab")
    assert common.Text(arguments(*flags, 200, parse=cli.parse)).batch(0)[1].max() == 199
    with pytest.raises(SystemExit, match="2"):
        arguments(*flags, 199, parse=cli.parse)


def test_arguments_that_fit_do_not_read_the_standard_library(monkeypatch):
    monkeypatch.setattr(common, "standard_library", None)
    assert cli.parse("00.py", "", {"a": None}, conftest.no_flags, []).model.vocab == 256


def test_settings_are_the_flags_that_are_not_at_their_default():
    def own(parser):
        parser.add_argument("--stage", type=int, default=3)
        parser.add_argument("--offload", action="store_true")
        parser.add_argument("--secondary", action=argparse.BooleanOptionalAction, default=True)

    variants = {"zero": (None, "--stage"), "torch": None}
    parse = lambda *flags: cli.settings(cli.parse("03.py", "", variants, own, flags))
    assert parse() == "" and parse("--offload", "--stage=2") == "stage 2, offload"
    assert parse("--variant=torch", "--no-secondary") == "no secondary"
    with pytest.raises(SystemExit, match="2"):
        parse("--variant=torch", "--stage=1")


# -------------------------------------------------------------------------------- ranks and devices


@EVERY
def test_only_local_rank_0_complains_and_no_group_is_started(run_chapter, name):
    for variables in ("RANK",), ("RANK", "LOCAL_RANK"):  # the latter is torchrun's, not mpirun's
        for rank, expected in ((0, (2, 1)), (1, (0, 0))):
            launched = dict.fromkeys(variables, rank) | dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
            status, output, errors = run_chapter(name, "--steps=0", **launched)
            assert (status, errors.count("\n"), output) == (*expected, "")
    assert run_chapter(name, "--help", **launched)[1] == ""  # of rank 1


@EVERY
def test_help_is_the_lesson_and_every_flag(run_chapter, name):
    status, output, _ = run_chapter(name, "--help")
    assert status == 0 and "Sources:" in output
    flags = {"--variant", "--micro-batch", "--dtype", "--device", "--clip", "--data", "--ignore",
             "--json", "--plot", "--profile", "--no-verify"}
    assert flags <= set(re.findall(r"--[a-z-]+", output))


@EVERY
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(run_chapter, name):
    status, output, errors = run_chapter(name, "--device=cuda", f"--data={TEXT}")
    assert status == 2 and output == ""
    assert errors == "error: --device cuda finds 0 GPUs for 1 local ranks; cpu would work\n"


def test_more_local_ranks_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for variable, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(variable, str(value))
    with pytest.raises(SystemExit, match="2"):
        cli.refuse_cuda(argparse.Namespace(device="cuda"))
    assert "--device cuda finds 2 GPUs for 4 local ranks; cpu would work" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    cli.refuse_cuda(argparse.Namespace(device="cuda"))


# -------------------------------------------------------------------------------- from the shell


def shell(*command, cwd, **environment):
    ours = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}  # a chapter's folder has no common.py
    environment = os.environ | ours | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=300)


def as_a_reader_would(name, launcher, steps, folder):
    """The default variant of a chapter from the shell: its JSON."""
    chapter = CHAPTERS / f"{name}.py"
    run = shell(*launcher, chapter, f"--steps={steps}", "--json=run.json", cwd=folder)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.count("same as one GPU over") == 1 and "✗" not in run.stdout
    record = json.loads((folder / "run.json").read_text())
    assert record["checks"] and all(check["ok"] for check in record["checks"])
    assert len(record["loss"]) == steps and len(record["reference_loss"]) == min(5, steps)
    assert record["tolerance"] == verify.tolerances("float32", "adamw")
    return record


@pytest.mark.parametrize("name", [name for name in chapter_names() if name[:2] != "01"])
def test_as_a_reader_would(tmp_path, name):
    assert as_a_reader_would(name, TORCHRUN, 3, tmp_path)["world_size"] == 2


@pytest.mark.parametrize(("steps", "loss"), [
    (30, 3.6), pytest.param(300, 2.4, marks=pytest.mark.full)])
def test_chapter_01_learns_what_its_lesson_promises(tmp_path, steps, loss):
    losses = as_a_reader_would("01_single_gpu", [sys.executable], steps, tmp_path)["loss"]
    assert sum(losses[-10:]) / 10 < loss


def test_a_refusal_under_torchrun_is_one_line_among_its_own(tmp_path):
    chapter = CHAPTERS / f"{chapter_names()[-1]}.py"
    run = shell(*TORCHRUN, chapter, "--steps=-3", cwd=tmp_path)
    assert run.returncode != 0 and run.stdout == ""
    assert run.stderr.count("error: --steps: -3 is no whole number") == 1
    assert "exitcode  : 2" in run.stderr  # torchrun's own summary of the rank that refused


# ------------------------------------------------------------------------------------------ grading


def test_chapters_of_another_folder_are_graded(tmp_path):
    """One fault, one failure; their common.py, if they have one, is not the one that judges."""
    source = (ROOT / f"{TWO}.py").read_text()
    right = "return 2 * (ranks - 1) / ranks * payload"
    assert source.count(right) == 1
    (tmp_path / f"{TWO}.py").write_text(source.replace(right, "return payload"))
    (tmp_path / "common.py").write_text("raise SystemExit('a common.py of their own')")
    tests = ROOT / f"tests/test_{TWO}.py"
    chosen = (f"{tests}::test_when_communication_hides",
              f"{tests}::test_buckets_are_in_order_full_and_of_one_dtype")
    graded = shell(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen,
                   cwd=ROOT, CHAPTERS=str(tmp_path))
    assert graded.returncode == 1 and "1 failed, 1 passed" in graded.stdout, graded.stdout


def test_a_folder_without_chapters_is_not_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(conftest, "CHAPTERS", tmp_path)
    with pytest.raises(pytest.UsageError, match="there is no NN_.*py in CHAPTERS="):
        conftest.pytest_configure(SimpleNamespace(addinivalue_line=lambda *line: None))
