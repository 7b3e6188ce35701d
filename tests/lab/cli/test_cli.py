"""The command line of every chapter, as a user meets it: refusals, launchers, help, grading."""

import argparse
import errno
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import common
from common import Refused
from lab import pictures
from lab.bench import verify
from lab.cli import commands, refusals, strict
from tests import conftest
from tests.conftest import (
    CHAPTERS,
    ROOT,
    SMALL,
    TEXT,
    arguments,
    chapter_names,
    run_main,
    training_chapters,
)
from tests.support import programs

EVERY = pytest.mark.parametrize("name", chapter_names())
OTHERS = pytest.mark.parametrize("name", [name for name in training_chapters() if name[:2] != "02"])
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
    (tmp_path / "text.json").write_bytes(b"x" * 1000)
    (tmp_path / "hard.json").hardlink_to(tmp_path / "text.json")
    (tmp_path / "soft.json").symlink_to("text.json")
    (tmp_path / "null.json").symlink_to("/dev/null")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link").symlink_to("folder.json")
    os.mkfifo(tmp_path / "fifo.json")
    monkeypatch.setattr(common, "standard_library", lambda: bytes(range(250)))


COUNTS = {"--steps": 20, "--layers": 4, "--dim": 128, "--heads": 8, "--kv-heads": 4, "--seq": 128,
          "--vocab": 256, "--batch": 8, "--micro-batch": 1}
TWICE = "--data=text.json --json=text.json"
SHORT = "--seq 128 needs a text of 129 tokens or more, and"
BAD = [  # flags, and what the line must say: the flag, the value, a value that would work
    ("--variant=best", "--variant: invalid choice: 'best'.*torch"),
    ("--preset=huge", "--preset: invalid choice: 'huge'.*tiny.*gpt2.*1b.*7b"),
    ("--dtype=float8", "--dtype: invalid choice: 'float8'.*float64.*float32.*bfloat16"),
    ("--device=tpu", "--device: invalid choice: 'tpu'.*auto.*cpu.*cuda"),
    ("--optimizer=lion", "--optimizer: invalid choice: 'lion'.*adamw.*sgd"),
    *[(f"{flag}={value}", rf"{flag}: {value} is no whole number in \[1, .*\); {flag} {works} would")
      for flag, works in COUNTS.items() for value in ("0", "9" * 30)],
    *[(f"--steps={value}", f"--steps: {value} is no") for value in ("-1", "x", "1.5")],
    *[(f"--lr={value}", r"--lr: .* is no number in \[1e-12, .*\); --lr 0.001 would work")
      for value in ("0", "-1", "nan", "inf", "x")],
    ("--clip=0", "--clip: 0 is no number in .*; --clip 1.0 would work"),
    ("--ignore=1", r"--ignore: 1 is no number in \[0, 1\); --ignore 0.3 would work"),
    ("--ignore=-0.1", "--ignore: -0.1 is no number in .*; --ignore 0.3 would work"),
    ("--seed=-1", "--seed: -1 is no whole number in .*; --seed 1 would work"),
    *[(f"--bucket-mb={value}", rf"--bucket-mb: {value} is no number in .*; --bucket-mb 25 would")
      for value in ("-1", "nan", "x")],
    ("--variant=naive --bucket-mb=1",  # its default
     "--bucket-mb means nothing to --variant naive; --variant bucket would work"),
    ("--kv-heads=3", "--kv-heads 3 does not divide --heads = 8; --kv-heads 1 would work"),
    ("--heads=12 --dim=96 --kv-heads=8", "--kv-heads 8 does not .* = 12; --kv-heads 4 would work"),
    ("--heads=6", "--heads 6 is not a multiple of --kv-heads = 4; --heads 8 would work"),
    ("--dim=100", r"--dim 100 is not a multiple of 2 x --heads .* = 16; --dim 112 would work"),
    ("--dim=24 --heads=8", "--dim 24 is not a multiple of 2 x --heads .* = 16; --dim 32"),
    ("--batch=10 --micro-batch=4",
     r"--batch 10 is not a multiple of 1 data-parallel ranks .* = 4; --batch 12 would work"),
    ("--data=nowhere.txt", "--data nowhere.txt is no readable file; without --data would"),
    ("--data=.", "--data . is no readable file"),
    ("--data=empty.txt", f"{SHORT} empty.txt has 0; without --data would work"),
    ("--data=empty.bin", f"{SHORT} empty.bin has 0; without --data would work"),
    ("--data=short.txt", f"{SHORT} short.txt has 128; --seq 127 would work"),
    ("--data=odd.bin", f"{SHORT} odd.bin has 128; --seq 127 --vocab 65536 would work"),
    ("--seq=100000000 --batch=1 --vocab=2 --attention=sdpa",
     "--seq 100000000 needs a text of 100000001 tokens or more, and Python"),
    ("--data=high.bin", "--vocab 256 is too small for token 32767 of high.bin; --vocab 65536"),
    ("--vocab=100", "--vocab 100 is too small for token 249 of Python .* library; --vocab 256"),
    ("--json=file/run.json", "--json: cannot write 'file/run.json' .*; --json run.json would work"),
    ("--plot=figure.jpg2", "--plot: cannot write 'figure.jpg2'; --plot figure.png would work"),
    ("--profile=.", "--profile: cannot write '.'; --profile trace.json would work"),
    *[(f"--json={name}.json", f"--json: cannot write '{name}.json' .*; --json run.json would work")
      for name in ("null", "folder", "fifo", "\N{GREEK SMALL LETTER PSI}" * 126)],
    ("--data=" + "x" * 5000, "--data x+ is no readable file"),
    ("--json=" + "x" * 5000 + ".json", "--json: cannot write 'x+.json' .*; --json run.json"),
    ("--json=nowhere/" + "x" * 256 + "/run.json", "--json: cannot write 'nowhere/x+/run.json'"),
    ("--json=" + "nowhere/../" * 400 + "run.json", "--json: cannot write 'nowhere/.*/run.json'"),
    (TWICE, "--json text.json is the file of --data too; --json text-json.json would work"),
    (TWICE.replace("t.json", "t.json ", 1).replace("json=text", "json=./nowhere/../text"),
     "--json nowhere/../text.json is the file of --data too; --json nowhere/../text-"),
    *[(f"--data=text.json --profile={link}.json",
       f"--profile {link}.json is the file of --data too; --profile {link}-profile.json would work")
      for link in ("hard", "soft")],
    ("--json=folder.json/a.json --profile=link/a.json",
     "--profile link/a.json is the file of --json too; --profile link/a-profile.json would work"),
    ("--json=nowhere/a.json --profile=nowhere/b/../a.json",
     "--profile nowhere/b/../a.json is the file of --json too; --profile nowhere/b/../a-profile"),
    ("--stepz=3", "unrecognized arguments: --stepz=3 .*; without --stepz would work"),
    ("--step=3", "unrecognized arguments: --step=3 .*; without --step would work"),
    ("stray", "unrecognized arguments: stray .*; without stray would work"),
    ("--stepz 3 -x", "unrecognized arguments: --stepz 3 -x .*; without --stepz 3 -x would work"),
    ("--batch=--", "--batch: -- is no whole number in .*; --batch 8 would work"),
    ("--batch= --", "--batch: '' is no whole number in .*; --batch 8 (without -- )?would work"),
    ("--data=--", "--data -- is no readable file; without --data would work"),
    ("--variant=--", "--variant: invalid choice: '--' .*; --variant bucket would work"),
    ("--variant=torhc", "--variant: invalid choice: .*; --variant torch would work"),
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
    """One flag of each kind: the rest of the table is the same code. (00 has a table of its own.)
    """
    for flags, line in (
        ("--variant=best", "--variant: invalid choice: 'best'.*torch"),
        ("--steps=0", "--steps: 0 is no whole number in"),
        ("--heads=6", "--heads 6 is not a multiple of --kv-heads = 4; --heads 8 would work"),
        ("--batch=10 --micro-batch=4", r"--batch 10 is not a multiple of .* = 4; --batch 12"),
        ("--data=nowhere.txt", "--data nowhere.txt is no readable file; without --data would"),
        ("--plot=figure.jpg2", "--plot: cannot write 'figure.jpg2'; --plot figure.png would work"),
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
         "--precision bf16-fp32grad is for --variant hand: .*; --precision bf16 would work"),
        ("--compile --steps=3", {}, "--steps 3 end before --compile .*; --steps 4 would work"),
        ("--loss-scale=0", {}, "--loss-scale: 0 is no number in .*; --loss-scale 65536 would work"),
        ("", {"RANK": 0, "WORLD_SIZE": 2},
         "--nproc_per_node 2: this is about one GPU; --nproc_per_node 1 would work"),
    ):
        refused(lambda *flags, more=environment: run_chapter(*flags, **more), "01_single_gpu",
                flags, line)


@pytest.mark.parametrize(("words", "change"), [
    ("", "with ring"), ("rnig", "ring in place of rnig"), ("ring --level x", "--level 1"),
    ("ring --level 3", "--level 1"), ("--level 2 x y", "ring in place of x without y"),
    ("--level -1 --far", "--level 1 with ring without --far")])
def test_a_word_that_is_missing_or_wrong_has_one_that_works(capsys, words, change):
    parser = commands.Parser("way.py")
    parser.add_argument("way", choices=["ring", "tree"])
    parser.add_argument("--level", type=int, choices=(1, 2))
    with pytest.raises(SystemExit, match="2"):
        refusals.accepted(parser.parse_args, words.split(), alone=True)
    assert capsys.readouterr().err.endswith(f"; {change} would work\n")


def test_a_refusal_stays_on_its_line(run_chapter):
    _, _, errors = run_chapter(TWO, "--data=a\nb\x1b[31m\u202ec\udcff")
    assert errors.startswith(r"error: --data a\nb\x1b[31m\u202ec\udcff is no readable file")
    assert errors.count("\n") == 1


def test_from_a_read_only_folder_another_one_is_suggested(run_chapter, monkeypatch):
    temporary = tempfile.TemporaryFile

    def not_here(dir):
        if str(dir) == ".":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return temporary(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", not_here)
    works = Path(tempfile.gettempdir(), "run.json")
    refused(run_chapter, TWO, "--json=x.json",
            rf"--json: cannot write 'x.json' \(Permission denied\); --json {works} would work")


def test_only_an_accepted_command_line_makes_folders(run_chapter, tmp_path):
    flags = *SMALL, f"--data={TEXT}", "--json=new/a/run.json"
    assert run_chapter(TWO, *flags, "--vocab=1")[0] == 2
    assert run_chapter(TWO, *flags, "--micro-batch=3")[0] == 2  # the chapter refuses it
    assert not (tmp_path / "new").exists()
    assert run_chapter(TWO, *flags, "--steps=1")[0] == 0
    assert os.listdir(tmp_path / "new/a") == ["run.json"]


def with_experts(parser):
    parser.add_argument("--experts", type=int, default=8)


@pytest.mark.parametrize(("flags", "line"), [
    ("--batch=2147483647", "--batch 2147483647 {}; --batch 8"),
    ("--batch=1048576 --micro-batch=1048576", "--micro-batch 1048576 {}; --micro-batch 1"),
    ("--dim=2147483632", "--dim 2147483632 {}; --dim 128"),
    ("--layers=2147483647", "--layers 2147483647 {}; --layers 4"),
    ("--vocab=2147483647", "--vocab 2147483647 {}; --vocab 65536"),
    ("--data=long.txt --seq=1000000", "--seq 1000000 {}; --seq 128"),
    ("--experts=1000000000", "--experts 1000000000 {}; --experts 8"),
    ("--batch=2147483647 --layers=2147483647",
     "--preset tiny in these sizes {}; without --batch --layers"),
])
def test_sizes_that_cannot_be_meant_are_refused(tmp_path, monkeypatch, capsys, flags, line):
    """By the parser alone: a run that it let pass would not end well."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "long.txt").touch()
    os.truncate("long.txt", 2 * 10**6)  # without taking room on the disk
    parse = functools.partial(strict.parse, "00.py", "", {"a": None}, with_experts)
    with pytest.raises(SystemExit, match="2"):
        refusals.accepted(parse, flags.split())
    line = line.format(r"needs [\d,]+ GB or more, and this machine has [\d,]+ GB")
    assert re.fullmatch(f"error: {line} would work\n", capsys.readouterr().err)


@pytest.mark.parametrize("flags", [(), ("--attention=sdpa", "--dtype=bfloat16", "--optimizer=sgd")])
def test_the_least_memory_of_a_run_is_below_what_it_takes(ranks, tmp_path, flags):
    every = *SMALL, f"--data={TEXT}", "--steps=1"
    [(_, run, _)] = ranks(1)(run_main, "01_single_gpu", (*every, *flags), tmp_path)
    taken = {check["name"]: check["measured"] for check in run["checks"]}
    states = sum(taken[kind] for kind in ("parameters", "gradients", "optimizer states"))
    kept = taken[f"kept per micro-batch: {run['config']['attention']}, none"]

    args = arguments(*flags)
    rows, seen = args.batch * args.model.seq, 0 if flags else args.model.heads * args.model.seq
    logits_and_scores = rows * (4 * args.model.vocab + 2 * seen)
    tokens_and_targets = rows * (8 + 8)
    assert strict.least_bytes(args) == states + logits_and_scores + tokens_and_targets
    assert logits_and_scores <= kept


def test_the_ranks_of_a_machine_need_their_share(monkeypatch):
    args = arguments("--attention=sdpa")
    batch, alone = 2 * 8 * args.batch * args.model.seq, strict.least_bytes(args)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert strict.least_bytes(args) == (alone - batch) // 4 + 2 * batch


def test_the_memory_of_gpus_counts_where_they_may_be_used(monkeypatch):
    gpu = SimpleNamespace(total_memory=10**9)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(os, "sysconf", lambda name: 1)
    arguments("--device=auto", parse=strict.parse)
    with pytest.raises(Refused, match="needs 0 GB or more, and this machine has 0 GB"):
        arguments("--device=cpu", parse=strict.parse)


def test_the_vocabulary_may_end_at_the_highest_token(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    flags = ("--seq", 199, "--data", tmp_path / "text", "--vocab")
    assert common.Text(arguments(*flags, 200, parse=strict.parse)).batch(0)[1].max() == 199
    with pytest.raises(Refused, match="--vocab 199 is too small for token 199"):
        arguments(*flags, 199, parse=strict.parse)


def test_arguments_that_fit_do_not_read_the_standard_library(monkeypatch):
    monkeypatch.setattr(common, "standard_library", None)
    assert strict.parse("00.py", "", {"a": None}, conftest.no_flags, []).model.vocab == 256


def test_settings_are_the_flags_that_are_not_at_their_default():
    def own(parser):
        parser.add_argument("--stage", type=int, default=3)
        parser.add_argument("--offload", action="store_true")
        parser.add_argument("--secondary", action=argparse.BooleanOptionalAction, default=True)

    variants = {"zero": (None, "--stage"), "torch": None}
    parse = lambda *flags: strict.settings(strict.parse("03.py", "", variants, own, flags))
    assert parse() == "" and parse("--offload", "--stage=2") == "stage 2, offload"
    assert parse("--variant=torch", "--no-secondary") == "no secondary"
    with pytest.raises(Refused, match="--stage means nothing to --variant torch"):
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


@pytest.mark.parametrize("variables", [
    "LOCAL_RANK=7",
    "WORLD_SIZE=2",
    "RANK=0",
    "RANK=0 LOCAL_WORLD_SIZE=1",
    "RANK= WORLD_SIZE=2",
    "RANK=x WORLD_SIZE=2",
    "RANK=-1 WORLD_SIZE=2",
    "RANK=2 WORLD_SIZE=2",
    "RANK=0 WORLD_SIZE=0",
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=x",
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=2",
    "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1",
    "RANK=1 WORLD_SIZE=2 LOCAL_WORLD_SIZE=3",
])
def test_ranks_of_no_launcher_are_refused_wherever_they_are(run_chapter, variables):
    launched = dict(variable.split("=") for variable in variables.split())
    status, output, errors = run_chapter(TWO, "--steps=0", **launched)
    expected = f"error: no launcher sets {launched}; torchrun or `unset {' '.join(launched)}` would"
    assert (status, output) == (2, "") and errors == f"{expected} work\n"


def test_a_rank_that_nobody_can_meet_is_refused(run_chapter, monkeypatch):
    """Unless a process group is there already, as in the pool of these tests."""
    variables = {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    for missing in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(missing, raising=False)
        others = {name: value for name, value in variables.items() if name != missing}
        status, output, errors = run_chapter(TWO, *SMALL, f"--data={TEXT}", **others)
        assert (status, output) == (2, "")
        assert errors == f"error: RANK is set, and {missing} not; torchrun sets all of them\n"
    for port in ("abc", "0", "65536"):
        status, output, errors = run_chapter(TWO, *SMALL, f"--data={TEXT}",
                                             **variables | {"MASTER_PORT": port})
        assert (status, output) == (2, "")
        assert errors == f"error: MASTER_PORT {port} is no port; torchrun sets one that works\n"


def test_a_left_behind_local_rank_hides_no_refusal(monkeypatch, capsys):
    """Of a program without ranks, `python -m lab.report` or `lab.pictures`."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(SystemExit, match="2"):
        pictures.read_runs(["no"])
    assert capsys.readouterr().err.startswith("error: no holds no run")


@EVERY
def test_help_is_the_lesson_and_every_flag(run_chapter, name):
    status, output, _ = run_chapter(name, "--help")
    assert status == 0 and "Sources:" in output
    flags = {"--variant", "--dtype", "--device", "--seed", "--json", "--plot", "--timeout"}
    training = {"--micro-batch", "--clip", "--data", "--ignore", "--profile", "--no-verify"}
    found = set(re.findall(r"--[a-z-]+", output))
    there = training if name in training_chapters() else set()
    assert flags <= found and found & training == there


@EVERY
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_is_refused(run_chapter, name):
    text = [f"--data={TEXT}"] if name in training_chapters() else []
    status, output, errors = run_chapter(name, "--device=cuda", *text)
    assert status == 2 and output == ""
    assert errors.startswith("error: --device cuda finds 0 GPUs for 1 local ranks; --device cpu ")


def test_more_local_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for variable, value in dict(RANK=0, WORLD_SIZE=4, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(variable, str(value))
    with pytest.raises(Refused, match="--device cuda finds 2 GPUs for 4 local ranks"):
        strict.refuse_cuda(argparse.Namespace(device="cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    strict.refuse_cuda(argparse.Namespace(device="cuda"))


# -------------------------------------------------------------------------------- from the shell


def shell(*command, cwd, **environment):
    ours = {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}  # a chapter's folder has no common.py
    environment = os.environ | ours | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment,
                          capture_output=True, text=True, timeout=300)


def hold_to_what_a_reader_expects(output, errors, steps, folder):
    """Of the default variant of a chapter. Returns its JSON."""
    assert errors == "" and output.count("same as one GPU over") == 1 and "✗" not in output, errors
    record = json.loads((folder / "run.json").read_text())
    assert record["checks"] and all(check["ok"] for check in record["checks"])
    assert len(record["loss"]) == steps and len(record["reference_loss"]) == min(5, steps)
    assert record["tolerance"] == verify.tolerances("float32", "adamw")
    return record


@pytest.mark.parametrize("name", [name for name in training_chapters() if name[:2] != "01"])
def test_as_a_reader_would(tmp_path, name):
    chapter = CHAPTERS / f"{name}.py"
    statuses, *said = programs.run(chapter, "--steps=1", "--json=run.json", world=2, cwd=tmp_path)
    assert statuses == [0, 0], said
    assert hold_to_what_a_reader_expects(*said, 1, tmp_path)["world_size"] == 2


def test_under_torchrun_itself(tmp_path):
    run = shell(*TORCHRUN, CHAPTERS / f"{TWO}.py", "--steps=1", "--json=run.json", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    hold_to_what_a_reader_expects(run.stdout, run.stderr, 1, tmp_path)


@pytest.mark.parametrize(("steps", "loss"), [
    (30, 3.6), pytest.param(300, 2.4, marks=pytest.mark.full)])
def test_chapter_01_learns_what_its_lesson_promises(tmp_path, steps, loss):
    chapter = CHAPTERS / "01_single_gpu.py"
    statuses, *said = programs.run(chapter, f"--steps={steps}", "--json=run.json", cwd=tmp_path)
    assert statuses == [0], said
    losses = hold_to_what_a_reader_expects(*said, steps, tmp_path)["loss"]
    assert sum(losses[-10:]) / 10 < loss


def test_of_two_ranks_that_are_refused_one_says_it_and_has_status_2(tmp_path):
    chapter = CHAPTERS / f"{chapter_names()[-1]}.py"
    statuses, output, errors = programs.run(chapter, "--steps=-3", world=2, cwd=tmp_path)
    assert statuses == [2, 0] and output == "" and errors.count("\n") == 1
    assert errors.startswith("error: --steps: -3 is no whole number")


def test_a_run_outlives_its_reader_and_an_encoding_without_its_marks(tmp_path):
    """As with PYTHONIOENCODING=ascii and `| head -1`."""
    flags = *SMALL, "--steps=2", "--json=run.json", f"--data={TEXT}"
    os.mkfifo(tmp_path / "pipe")
    ranks = programs.Ranks(CHAPTERS / f"{TWO}.py", *flags, cwd=tmp_path, encoding="ascii",
                           stdout=tmp_path / "pipe")  # fmt: skip
    with open(tmp_path / "pipe") as reader:
        assert reader.readline().startswith(r"02 data parallel \N{MIDDLE DOT} bucket")
    assert (ranks.wait(), ranks.err()) == ([0], "")
    assert len(json.loads((tmp_path / "run.json").read_text())["loss"]) == 2


def test_a_run_needs_no_output_at_all(tmp_path):
    command = CHAPTERS / f"{TWO}.py", *SMALL, "--steps=1", f"--data={TEXT}", "--json=run.json"
    assert programs.run(*command, cwd=tmp_path, stdout=None, stderr=None) == ([0], "", "")
    assert (tmp_path / "run.json").exists()
    if os.path.exists("/dev/full"):
        statuses, _, errors = programs.run(*command, cwd=tmp_path, stdout="/dev/full")
        assert (statuses, errors) == ([1], "error: standard output: No space left on device\n")


# ------------------------------------------------------------------------------------------ grading


def test_chapters_of_another_folder_are_graded(tmp_path):
    """One fault, one failure; their common.py, if they have one, is not the one that judges."""
    source = (ROOT / f"{TWO}.py").read_text()
    right = "return 2 * (ranks - 1) / ranks * payload"
    assert source.count(right) == 1
    (tmp_path / f"{TWO}.py").write_text(source.replace(right, "return payload"))
    (tmp_path / "common.py").write_text("raise SystemExit('a common.py of their own')")
    tests = ROOT / f"tests/chapters/test_{TWO}.py"
    chosen = (f"{tests}::test_when_communication_hides",
              f"{tests}::test_buckets_are_in_order_full_and_of_one_dtype")
    graded = programs.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, cwd=ROOT,
                          CHAPTERS=tmp_path)  # fmt: skip
    assert graded[0] == [1] and "1 failed, 1 passed" in graded[1], graded


def test_a_folder_without_chapters_is_not_graded(tmp_path, monkeypatch):
    monkeypatch.setattr(conftest, "CHAPTERS", tmp_path)
    with pytest.raises(pytest.UsageError, match="there is no NN_.*py in CHAPTERS="):
        conftest.pytest_configure(SimpleNamespace(addinivalue_line=lambda *line: None))
