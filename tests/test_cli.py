"""The command line of every chapter, as a user meets it: refusals, launchers, help, grading."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import CHAPTERS, ROOT, TEXT, chapter_names

import common

EVERY = pytest.mark.parametrize("name", chapter_names())
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.bin").touch()
    (tmp_path / "short.txt").write_bytes(b"x" * 128)
    (tmp_path / "odd.bin").write_bytes(b"x" * 257)
    (tmp_path / "high.bin").write_bytes(b"\xff\x7f" * 1000)
    (tmp_path / "file").touch()


BAD = [  # flags, and what the line must say: the flag, the value, a value that would work
    (["--variant=best"], "--variant: invalid choice: 'best'.*torch"),
    (["--preset=huge"], "--preset: invalid choice: 'huge'.*tiny.*gpt2.*1b.*7b"),
    (["--dtype=float8"], "--dtype: invalid choice: 'float8'.*float64.*float32.*bfloat16"),
    (["--device=tpu"], "--device: invalid choice: 'tpu'.*auto.*cpu.*cuda"),
    (["--optimizer=lion"], "--optimizer: invalid choice: 'lion'.*adamw.*sgd"),
    *[
        ([f"{flag}={value}"], rf"{flag}: {value} is no whole number in \[1, 2147483648\); 4 would")
        for flag in (
            "--steps",
            "--layers",
            "--dim",
            "--heads",
            "--kv-heads",
            "--seq",
            "--vocab",
            "--batch",
            "--micro-batch",
        )
        for value in ("0", "-1", "x", "1.5", "9" * 30)
    ],
    *[
        ([f"--lr={value}"], r"--lr: .* is no number in \[1e-12, .*\); 0.001 would work")
        for value in ("0", "-1", "nan", "inf", "x")
    ],
    (["--clip=0"], "--clip: 0 is no number in .*; 1.0 would work"),
    (["--ignore=1"], r"--ignore: 1 is no number in \[0, 1\); 0.3 would work"),
    (["--ignore=-0.1"], "--ignore: -0.1 is no number in .*; 0.3 would work"),
    (["--seed=-1"], "--seed: -1 is no whole number in .*; 1 would work"),
    (["--kv-heads=3"], "--kv-heads 3 does not divide --heads = 8; 1 would work"),
    (["--heads=12", "--dim=96", "--kv-heads=8"], "--kv-heads 8 does not .* = 12; 4 would work"),
    (["--heads=6"], "--heads 6 is not a multiple of --kv-heads = 4; 8 would work"),
    (["--dim=100"], r"--dim 100 is not a multiple of 2 x --heads .* = 16; 112 would work"),
    (
        ["--dim=24", "--heads=8"],
        "--dim 24 is not a multiple of 2 x --heads .* = 16; 32 would work",
    ),  # odd head dim
    (
        ["--batch=10", "--micro-batch=4"],
        r"--batch 10 is not a multiple of .* = (4|8); (12|16) would work",
    ),
    (["--data=nowhere.txt"], "--data nowhere.txt is no readable file; the default is"),
    (["--data=."], "--data . is no readable file"),
    (
        ["--data=empty.txt"],
        "--seq 128 needs a text of 129 tokens or more, and empty.txt has 0; a longer --data",
    ),
    (
        ["--data=empty.bin"],
        "--seq 128 needs a text of 129 tokens or more, and empty.bin has 0; a longer --data",
    ),
    (
        ["--data=short.txt"],
        "--seq 128 needs .* 129 tokens or more, and short.txt has 128; --seq 127 would work",
    ),
    (
        ["--data=odd.bin"],
        "--seq 128 needs .* 129 tokens or more, and odd.bin has 128; --seq 127 would work",
    ),
    (["--seq=100000000"], "--seq 100000000 needs a text of 100000001 tokens or more, and Python"),
    (["--data=high.bin"], "--vocab 256 is too small for token 32767 of high.bin; 65536 would work"),
    (
        ["--vocab=100"],
        "--vocab 100 is too small for token 2[0-9]+ of Python .* library; 256 would work",
    ),
    (["--json=file/run.json"], "--json: cannot write 'file/run.json'; run.json would work"),
    (["--plot=figure.jpg2"], "--plot: cannot write 'figure.jpg2'; figure.png would work"),
    (["--profile=."], "--profile: cannot write '.'; trace.json would work"),
    (["--data=" + "x" * 5000], "--data x+ is no readable file"),
    (["--json=" + "x" * 5000 + ".json"], "--json: cannot write 'x+.json'; run.json would work"),
    (["--json=nowhere/" + "x" * 5000 + "/run.json"], "--json: cannot write 'nowhere/x+/run.json'"),
    (["--stepz=3"], "unrecognized arguments: --stepz=3"),
    (["--step=3"], "unrecognized arguments: --step=3"),
]


@EVERY
@pytest.mark.parametrize(("flags", "line"), BAD, ids=[" ".join(flags)[:60] for flags, _ in BAD])
def test_a_bad_argument_costs_one_line_and_status_2(run_chapter, files, name, flags, line):
    status, output, errors = run_chapter(name, *flags)
    assert status == 2 and output == ""
    assert re.match(f"error: {line}", errors) and errors.count("\n") == 1, errors


@EVERY
def test_only_local_rank_0_complains_and_no_group_is_started(run_chapter, name):
    for variables in ("RANK",), ("RANK", "LOCAL_RANK"):  # the latter is torchrun's, not mpirun's
        for rank, expected in ((0, (2, 1)), (1, (0, 0))):
            launched = dict.fromkeys(variables, rank) | dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
            status, output, errors = run_chapter(name, "--steps=0", **launched)
            assert (status, errors.count("\n"), output) == (*expected, "")
            assert "LOCAL_RANK" not in launched or (
                bool(run_chapter(name, "--help", **launched)[1]) == (rank == 0)
            )


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
        common.start(common.argparse.Namespace(device="cuda"))
    assert "--device cuda finds 2 GPUs for 4 local ranks; cpu would work" in capsys.readouterr().err


def test_chapter_01_refuses_what_only_it_can(run_chapter):
    for flags, environment, line in (
        (
            ["--precision=bf16", "--dtype=float64"],
            {},
            "--precision bf16 .*; --dtype float32 would work",
        ),
        (["--precision=int4"], {}, "--precision: invalid choice: 'int4'.*fp32.*bf16-fp32grad"),
        (["--attention=ring"], {}, "--attention: invalid choice: 'ring'.*plain.*sdpa"),
        (["--recompute=all"], {}, "--recompute: invalid choice: 'all'.*none.*selective.*full"),
        (
            ["--variant=torch", "--precision=bf16-fp32grad"],
            {},
            "--precision bf16-fp32grad is for --variant hand: .*; bf16 would work",
        ),
        (["--compile", "--steps=3"], {}, "--steps 3 ends before --compile .*; 4 would work"),
        (["--loss-scale=0"], {}, "--loss-scale: 0 is no number in .*; 65536 would work"),
        (
            [],
            dict(RANK=0, WORLD_SIZE=2),
            "--nproc_per_node 2: this chapter trains on one GPU; 1 would work",
        ),
    ):
        status, output, errors = run_chapter("01_single_gpu", *flags, **environment)
        assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors


def shell(*command, cwd, **environment):
    ours = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}  # a chapter's folder has no common.py
    environment = os.environ | ours | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@EVERY
def test_as_a_reader_would(tmp_path, name):
    """The default variant from the shell: torchrun with two ranks; all 300 steps of chapter 01."""
    launcher, steps = [*TORCHRUN, "--nproc_per_node=2"], ["--steps=3"]
    if name.startswith("01"):
        launcher, steps = [sys.executable], []
    command = [*launcher, CHAPTERS / f"{name}.py", *steps, "--json=run.json"]
    run = shell(*command, cwd=tmp_path, OMP_NUM_THREADS="2")
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert run.stdout.count("same as one GPU over") == 1 and "✗" not in run.stdout
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["checks"] and all(check["ok"] for check in record["checks"])
    assert len(record["reference_loss"]) == min(5, len(record["loss"]))
    if name.startswith("01"):  # what the lesson promises of its default run
        assert len(record["loss"]) == 300 and sum(record["loss"][-20:]) / 20 < 2.4
        assert record["tolerance"] == common.tolerances("float32", "adamw")
        assert (tmp_path / "runs/01_single_gpu.png").exists()


def test_a_refusal_under_torchrun_is_one_line_among_its_own(tmp_path):
    chapter = CHAPTERS / f"{chapter_names()[-1]}.py"
    run = shell(*TORCHRUN, "--nproc_per_node=2", chapter, "--steps=-3", cwd=tmp_path)
    assert run.returncode != 0 and run.stdout == ""
    assert run.stderr.count("error: --steps: -3 is no whole number") == 1
    assert "exitcode  : 2" in run.stderr  # torchrun's own summary of the rank that refused


@EVERY
def test_help_is_the_lesson_and_every_flag(run_chapter, name):
    status, output, _ = run_chapter(name, "--help")
    assert status == 0 and "Sources:" in output
    for flag in (
        "--variant",
        "--micro-batch",
        "--dtype",
        "--device",
        "--clip",
        "--data",
        "--ignore",
        "--json",
        "--plot",
        "--profile",
        "--no-verify",
    ):
        assert flag in output


def test_summary_of_several_runs(run_chapter, tmp_path, capsys):
    flags = (
        "--layers=1",
        "--dim=16",
        "--heads=2",
        "--kv-heads=1",
        "--seq=8",
        f"--data={TEXT}",
    )
    run_chapter("01_single_gpu", *flags, "--steps=1", "--json=one.json")
    run_chapter("01_single_gpu", *flags, "--steps=1", "--json=two.json", "--no-verify")
    common.summary([tmp_path / "one.json", tmp_path / "two.json"])
    header, one, two = capsys.readouterr().out.splitlines()
    assert (
        header.split("  ")[0] == "chapter" and "final loss" in header and "from one GPU" in header
    )
    checks = json.loads((tmp_path / "one.json").read_text())["checks"]
    assert one.split()[:4] == ["01_single_gpu", "hand", "1", "gloo"]
    assert one.split()[-2] == f"{len(checks)}/{len(checks)}" and two.split()[5] == "-"


def test_summary_of_no_file(capsys):
    with pytest.raises(SystemExit, match="2"):
        common.summary(["nowhere.json"])
    assert capsys.readouterr() == (
        "",
        "error: nowhere.json is no file; a run's --json would work\n",
    )


def grade(folder):
    tests = ROOT / "tests/test_01_single_gpu.py"
    return shell(
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"{tests}::test_accumulated_gradients_are_the_full_batchs[None-3]",
        f"{tests}::test_the_loss_scale_divides_out",
        cwd=ROOT,
        CHAPTERS=str(folder),
    )


def test_chapters_of_another_folder_are_graded(tmp_path):
    """One fault, one failure; their common.py, if they have one, is not the one that judges."""
    source = (ROOT / "01_single_gpu.py").read_text()
    right, wrong = "        backward(loss) ", "        backward(loss / len(micro_batches)) "
    assert source.count(right) == 1
    (tmp_path / "01_single_gpu.py").write_text(source.replace(right, wrong))
    (tmp_path / "common.py").write_text("raise SystemExit('a common.py of their own')")
    graded = grade(tmp_path)
    assert graded.returncode == 1 and "1 failed, 1 passed" in graded.stdout, graded.stdout
    nothing = grade(tmp_path / "nowhere")
    assert nothing.returncode not in (0, 1) and "there is no NN_*.py in CHAPTERS" in nothing.stderr
