"""Every command of the project is tried hard; tests/support/trials.py says how."""

import argparse
import functools
import gc
import importlib.util
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from lab import faults, pictures, schedules
from lab.bench import runs
from lab.classroom import predict
from lab.cli import commands
from tests import conftest
from tests.conftest import CHAPTERS, ROOT, SMALL, TEXT, chapter_names, training_chapters
from tests.support import trials
from tests.support.trials import Command

sys.path.append(str(ROOT / "benchmarks"))
import chapters  # noqa: E402  (after the path to it)
import checkpoints  # noqa: E402

sys.path.pop()  # or `kernels` would be benchmarks/kernels.py
from benchmarks import kernels  # noqa: E402

SHORT = *SMALL, "--steps=1", "--data=text", "--no-verify"
FILES = {"text": Path(TEXT).read_bytes}


def run_chapter(name):
    """As a program."""
    try:
        return conftest.main(conftest.chapter(name), None)
    finally:
        if dist.is_initialized():
            gc.collect()
            dist.destroy_process_group()


def of_chapter(name):
    return Command(
        (CHAPTERS / f"{name}.py",), partial(run_chapter, name), SHORT, files=FILES,
        stops_at=["common.Run.__init__"], reads={"--data": "text", "--resume": "ours"},
        writes={"--json": "run.json", "--plot": "figure.png", "--profile": "trace.json",
                "--save": "checkpoints"}, prints="per rank and step")  # fmt: skip


def without_model(name):
    return Command(
        (CHAPTERS / f"{name}.py",), partial(run_chapter, name), ["--numbers=3"],
        stops_at=["lab.bench.bench.Bench.meet"], writes={"--json": "run.json",
                                                         "--plot": "figure.png"},
        prints="each rank's tensor")  # fmt: skip


@functools.cache
def a_run():
    """The JSON of one. Where CHAPTERS has no such chapter, the test is skipped here."""
    name = "02_data_parallel"
    command, _ = of_chapter(name), conftest.chapter(name)
    with trials.working_folder(command):
        status = trials.call(command, [*SHORT, "--json=run.json"], {}, None, None)
        assert status == 0
        return Path("run.json").read_bytes()


def both_parts(folder, args, deadline):
    """In place of the kills of lab.faults."""
    print("in one layout: 240 steps ✓")
    return [{"name": "losses", "measured": 0, "expected": 0, "ok": True}] * 2, {}


def measure_pair(ranks, *sides, **clocked):
    """In place of runs of benchmarks/chapters.py."""
    return {"ms": [[1, 2, 3]] * 2, "alone": 1, "longest": [1, 1]}


def measure_saves(*what):
    """In place of runs of benchmarks/checkpoints.py."""
    save = {"before": [0.1], "during": [0.2], "waits": 0.1, "on disk": 0.2}
    return {"ours": [save] * 2, "theirs": [0.2] * 2, "bytes": (1, 1), "parameters": 1}


ROWS = {
    "pointwise": {"what": "ELU", "width": 64, "chain": 1.0, "eager": 1.0, "compile": 1.0,
                  "copy": 1.0, "kernel": 1.0},
    "attention": {"what": "full", "head dim": 16, "sequence": 64, "kernel": 1.0,
                  **dict.fromkeys(kernels.BACKENDS, 1.0)},
    "products": {"what": "product", "size": 64, "kernel": 1.0, "scaled_mm": 1.0, "bf16": 1.0},
}  # fmt: skip

def time_kernels():
    """benchmarks/kernels.py, as if there were a GPU."""
    with mock.patch.object(kernels, "DEVICE", "cpu"):
        return commands.program(kernels.main)


WITHOUT_MODEL = [name for name in chapter_names() if name not in training_chapters()]
CHAPTERS_OF_IT = [*map(of_chapter, training_chapters()), *map(without_model, WITHOUT_MODEL)]
OTHERS = [
    Command(["-m", "lab.schedules"], partial(commands.program, schedules.main), ["--ranks=2"],
            ["1f1b"],
            stops_at=["lab.schedules.simulate"]),
    Command(["-m", "lab.schedules"], partial(commands.program, schedules.main),
            ["--ranks=1", "--sleep=10"], ["1f1b"], stops_at=["lab.schedules.sleep_through"],
            work={"lab.schedules.sleep_through": lambda *given: (0, [])},
            writes={"--json": "run.json"}),
    Command(["-m", "lab.faults"], partial(commands.program, faults.main), ["--kills=1"],
            stops_at=["lab.faults.both_parts"], work={"lab.faults.both_parts": both_parts},
            writes={"--json": "run.json"}, prints=None),
    Command(["-m", "lab.predict"], partial(commands.program, predict.main), ["--seed=1"], ["02"],
            stops_at=["lab.classroom.predict.ask"],
            work={"lab.classroom.predict.ask": lambda case, asked: 0}),
    Command(["-m", "lab.report"], partial(commands.program, runs.main), words=["run.json"],
            files={"run.json": a_run}, reads={"runs": "ours"}),
    Command(["-m", "lab.pictures"], partial(commands.program, pictures.main), words=["run.json"],
            files={"run.json": a_run}, stops_at=["lab.pictures.draw"], reads={"runs": "ours"},
            writes={"--out": "figures"}),
    Command([ROOT / "benchmarks/chapters.py"], partial(commands.program, chapters.main),
            ["--only=01"],
            stops_at=["chapters.measure", "chapters.asleep"],
            work={"chapters.measure": measure_pair}, prints=None),
    Command([ROOT / "benchmarks/checkpoints.py"], partial(commands.program, checkpoints.main),
            ["--only=09"], stops_at=["checkpoints.measure"],
            work={"checkpoints.measure": measure_saves}, prints=None),
]
KERNELS = Command(
    [ROOT / "benchmarks/kernels.py"], time_kernels, ["--out=runs/new"], writes={"--out": "runs"},
    stops_at=["benchmarks.kernels.pointwise", "benchmarks.kernels.tune"],
    work={f"benchmarks.kernels.{name}": partial(list, [row]) for name, row in ROWS.items()})
if importlib.util.find_spec("triton"):
    OTHERS.append(KERNELS)
COMMANDS = CHAPTERS_OF_IT + OTHERS
EVERY = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def in_turn(kinds, others):
    """Parametrize by command and kinds of trial. The chapters share lab.bench: the first is put
    to the first kind, the second to the next, and in `make test-all` each to all; all other
    commands are put to all kinds."""
    params = [pytest.param(command, kinds, id=command.name) for command in others]
    for i, command in enumerate(CHAPTERS_OF_IT):
        params.append(pytest.param(command, kinds, id=f"{command.name}, all",
                                   marks=pytest.mark.full))  # fmt: skip
        if i < len(kinds):
            params.append(pytest.param(command, kinds[i : i + 1], id=command.name))
    return pytest.mark.parametrize(("command", "kinds"), params)


def hold(wrong):
    assert not wrong, "\n".join(wrong)


@EVERY
def test_bad_values(command):
    """What the first chapter has is left out of the others, but for `make test-all`."""
    first, *others = CHAPTERS_OF_IT
    if command in others and not os.environ.get("FULL"):
        hold(trials.bad_values(command, but=trials.parser_of(first)._option_string_actions))
    else:
        hold(trials.bad_values(command))


@EVERY
def test_odd_files(command):
    hold(trials.odd_files(command))


@EVERY
def test_bad_places(command):
    hold(trials.bad_places(command))


@in_turn(list(trials.STREAMS), OTHERS)
def test_closed_streams(command, kinds):
    hold(trials.closed_streams(command, *kinds))


@in_turn([signal.SIGINT, signal.SIGTERM], [other for other in OTHERS if other != KERNELS])
def test_signals(command, kinds):
    """But for the kernels, which take a GPU."""
    hold(trials.signals(command, *kinds))


# ------------------------------------------------------------------- commands without any care


def careless():
    """Takes what argparse takes, prints before it has looked, and writes when all is done."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--text", type=Path)
    args = parser.parse_args()
    print("\N{CHECK MARK}")
    if args.text:
        json.loads(args.text.read_bytes())
    if args.out:
        args.out.mkdir()
    work()


def work():
    """What a trial stops."""


@pytest.mark.parametrize(("trial", "found"), [
    (trials.bad_values, ["--size '-1': status accepted", "--size 'x': status 2, 'usage: "]),
    (trials.odd_files, ["--text 'missing.json': status 1, 'Traceback", "--text 'fifo.json': status "
                        "hangs", "--text 'null.json': status accepted", "--text 'deep.json': "
                        "status 1", "--text 'locked.json': status 1, 'Trace"]),
    (trials.bad_places, ["--out 'readonly/new': status 1, 'Traceback", "--out 'closed': status 1",
                         "--out=.: status 1, 'Traceback"]),
    (trials.closed_streams, ["the reader has left: status 1", "the disk is full: status 1",
                             "stdout is ASCII: status 1", "stderr is closed: status 2, '', on"]),
], ids=lambda what: getattr(what, "__name__", ""))  # fmt: skip
def test_a_trial_finds(monkeypatch, trial, found):
    monkeypatch.setattr(trials, "PATIENCE", 1)
    wrong = trial(Command(["careless.py"], careless, stops_at=[f"{__name__}.work"],
                          reads={"--text": "ours"}, writes={"--out": "folder"}))  # fmt: skip
    for what in found:
        assert any(what in line for line in wrong), "\n".join(wrong)


def test_a_trial_finds_what_a_signal_leaves(tmp_path):
    program = tmp_path / "careless.py"
    program.write_text("import subprocess\nsubprocess.run(['sleep', '30'])\n")
    of_sigint, of_sigterm = trials.signals(Command([program], careless, prints=None))
    assert of_sigint.startswith("python careless.py, SIGINT: status 1") and "Keyboard" in of_sigint
    assert of_sigterm.startswith("python careless.py, SIGTERM: it leaves process ")
