"""What is refused costs one line, which names the flag and what would work; and that works."""

import functools
import os
from unittest import mock

import pytest
import torch

import common
from lab import pictures
from lab.run import refusals, strict
from lab.run.commands import Parser
from tests.conftest import SMALL, TEXT, chapter_names
from tests.support.refused import hold_refusals

TWO = "02_data_parallel"
EVERY = chapter_names()

# ---------------------------------------------------------------------------------------- a table


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Bad files; and for the standard library, which takes a second to read, a few bytes."""
    for name, content in (("short.txt", b"x" * 128), ("odd.bin", b"x" * 257),
                          ("high.bin", b"\xff\x7f" * 1000), ("old.json", b"x" * 2000)):
        (tmp_path / name).write_bytes(content)
    monkeypatch.setattr(common, "standard_library", lambda: bytes(range(250)))


OF_02 = [  # flags, what the line names, what works; one of each kind
    ("--variant=torhc", "--variant", "--variant torch"),
    (f"--heads={'9' * 30}", "--heads", "--heads 8"),
    ("--ignore=1", "--ignore", "--ignore 0.3"),
    ("--batch=--", "--batch", "--batch 8"),
    ("--variant=naive --bucket-mb=1", "--bucket-mb", "--variant bucket"),  # its default
    ("--heads=12 --dim=96 --kv-heads=8", "--kv-heads 8", "--kv-heads 4"),
    ("--dim=24 --heads=8", "--dim 24", "--dim 32"),
    ("--batch=10 --micro-batch=4", "--batch 10", "--batch 12"),
    ("--data=short.txt", "short.txt", "--seq 127"),
    ("--data=odd.bin --vocab=65536", "odd.bin", "--seq 127"),
    ("--data=high.bin", "32767", "--vocab 65536"),
    ("--vocab=249", "--vocab 249", "--vocab 256"),  # the highest token is 249
    ("--plot=figure.jpg2", "--plot", "--plot figure.png"),
    ("--data=old.json --json=old.json", "--json old.json", "without --json"),
    ("--json=new.json --profile=folder/../new.json", "--profile", "without --profile"),
    ("--step=3", "--step=3", "without --step"),
    ("stray", "stray", "without stray"),
]
OF_01 = [
    ("--precision=bf16 --dtype=float64", "--precision bf16", "--dtype float32"),
    ("--variant=torch --precision=bf16-fp32grad", "bf16-fp32grad", "--precision bf16"),
    ("--compile --steps=3", "--steps 3", "--steps 4"),
    ("--loss-scale=0", "--loss-scale", "--loss-scale 65536"),
]


def test_a_line_names_the_flag_and_what_works(run_chapter, files):
    for name, table in ((TWO, OF_02), ("01_single_gpu", OF_01)):
        hold_refusals(run_chapter, name, [(flags, 1, *said) for flags, *said in table])
    hold_refusals(run_chapter, "01_single_gpu", [("", 2, "one GPU", "--nproc_per_node 1")])


def test_a_refusal_stays_on_its_line(run_chapter):
    _, _, errors = run_chapter(TWO, "--data=a\nb\x1b[31m\u202ec\udcff")
    assert r"a\nb\x1b[31m\u202ec\udcff" in errors and errors.count("\n") == 1


def test_only_an_accepted_command_line_makes_folders(run_chapter, tmp_path):
    flags = *SMALL, f"--data={TEXT}", "--json=new/a/run.json"
    assert run_chapter(TWO, *flags, "--vocab=1")[0] == 2
    assert run_chapter(TWO, *flags, "--micro-batch=3")[0] == 2  # the chapter refuses it
    assert not (tmp_path / "new").exists()
    assert run_chapter(TWO, *flags, "--steps=1", "--no-verify")[0] == 0
    assert os.listdir(tmp_path / "new/a") == ["run.json"]


def test_sizes_that_cannot_be_meant_are_refused(tmp_path, monkeypatch, capsys):
    """By the parser alone: a run that it let pass would not end well."""
    monkeypatch.chdir(tmp_path)
    own = lambda parser: parser.add_argument("--experts", type=int, default=8)
    parse = functools.partial(strict.parse, "00.py", "", {"a": None}, own)
    for flags, works in (
        ("--layers=2147483647", "without --layers"),
        ("--experts=1000000000", "without --experts"),
        ("--batch=2147483647 --layers=2147483647", "without --batch --layers"),
    ):
        with pytest.raises(SystemExit, match="2"):
            refusals.accepted(parse, flags.split())
        error = capsys.readouterr().err
        assert " GB" in error and error.endswith(f"; {works} would work\n"), error


# ---------------------------------------------------------------------------------- on which rank


def test_only_local_rank_0_complains_and_no_group_is_started(run_chapter, monkeypatch):
    for name in EVERY:
        for variables in ("RANK",), ("RANK", "LOCAL_RANK"):  # as mpirun and as torchrun do
            for rank, expected in ((0, (2, 1)), (1, (0, 0))):
                launched = dict.fromkeys(variables, rank) | dict(WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
                status, output, errors = run_chapter(name, "--steps=0", **launched)
                assert (status, errors.count("\n"), output) == (*expected, ""), name
        assert run_chapter(name, "--help", **launched)[1] == ""  # of rank 1
        for variable in launched:
            monkeypatch.delenv(variable)


def test_a_left_behind_local_rank_hides_no_refusal(monkeypatch, capsys):
    """Of a program without ranks, `python -m lab.report` or `lab.pictures`."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    with pytest.raises(SystemExit, match="2"):
        pictures.read_runs(["no"])
    assert capsys.readouterr().err.startswith("error: no holds no run")


def test_cuda_needs_a_gpu_for_each_local_rank(run_chapter, monkeypatch):
    four = {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 4}
    for gpus in 0, 2:
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        text = [f"--data={TEXT}", "--batch=8"]
        status, output, errors = run_chapter(TWO, "--device=cuda", *text, **four)
        assert (status, output) == (2, "") and "--device cpu would work" in errors
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    strict.refuse_cuda(mock.Mock(device="cuda"))


# ------------------------------------------------------------------------------- what would work


def test_a_word_that_is_missing_or_wrong_has_one_that_works(capsys):
    for words, change in (
        ("", "with ring"), ("rnig", "ring in place of rnig"), ("ring --level x", "without --level"),
        ("ring --level 2 y", "without y"), ("ring --level -1 --far", "--level 1"),
        ("ring --far", "without --far"), ("ring --level", "without --level"),
    ):
        parser = Parser("way.py")
        parser.add_argument("way", choices=["ring", "tree"])
        parser.add_argument("--level", type=int, choices=(1, 2))
        with pytest.raises(SystemExit, match="2"):
            refusals.accepted(parser.parse_args, words.split(), alone=True)
        assert capsys.readouterr().err.endswith(f"; {change} would work\n")
