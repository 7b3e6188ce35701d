"""Every command of the project is tried hard; tests/support/trials.py says how, and
tests/support/every_command.py what they are."""

import argparse
import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

from lab.classroom import checks
from tests.support import every_command, trials
from tests.support.every_command import (
    ASLEEP_ON_RANKS,
    KERNELS,
    ON_RANKS,
    OTHERS,
    PLANNER,
    SPEED_ON_RANKS,
    WARPS,
)
from tests.support.trials import Command

HERE = [*OTHERS, *[PLANNER] * PLANNER.program[0].exists()]
if importlib.util.find_spec("triton") is None:
    HERE = [command for command in HERE if command not in (KERNELS, WARPS)]
EVERY = pytest.mark.parametrize("command", [*ON_RANKS, *HERE], ids=lambda command: command.name)


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The interpreter that forks is there before a trial takes away the right to start it."""
    checks.warm_up()


@pytest.mark.parametrize("name", every_command.typed())
def test_a_command_that_is_here_is_tried(name):
    tried = {command.name for command in (*ON_RANKS, *OTHERS, PLANNER)}
    assert name in tried, f"`{name}` is in no trial: tests/support/every_command.py takes a line"


# Of these a trial takes seconds: one of each kind is enough, as lab.cli.commands stands before all.
SLOW = "exercises", "plans", "rehearse", "types", "time_kernels.py"


def in_turn(kinds, others, never=()):
    """Parametrize by command and kinds of trial. The chapters share lab.bench: the first is put
    to the first kind, the second to the next, and in `make test-all` each to all; so are those that
    are SLOW, and all other commands are put to all kinds. never: in `make test-all` alone."""
    slow = [command for command in others if command.name.endswith(SLOW)]
    params = [pytest.param(command, kinds, id=command.name) for command in others
              if command not in slow]  # fmt: skip
    for i, command in enumerate(slow):
        params.append(pytest.param(command, kinds, id=f"{command.name}, all",
                                   marks=pytest.mark.full))  # fmt: skip
        if not command.name.endswith(never):
            one = i % len(kinds)
            params.append(pytest.param(command, kinds[one : one + 1], id=command.name))
    for i, command in enumerate(ON_RANKS):
        params.append(pytest.param(command, kinds, id=f"{command.name}, all",
                                   marks=pytest.mark.full))  # fmt: skip
        if i < len(kinds):
            params.append(pytest.param(command, kinds[i : i + 1], id=command.name))
    return pytest.mark.parametrize(("command", "kinds"), params)


def hold(wrong):
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", [
    pytest.param(command, id=command.name, marks=[pytest.mark.full] * (command is PLANNER))
    for command in (*ON_RANKS, *HERE)])
def test_bad_values(command):
    """What the first chapter has is left out of the others, but for `make test-all`; so is the
    planner, whose advice takes seconds."""
    first, *others = ON_RANKS
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


@in_turn(list(trials.STREAMS), [other for other in HERE
                                if other not in (SPEED_ON_RANKS, ASLEEP_ON_RANKS)])
def test_closed_streams(command, kinds):
    hold(trials.closed_streams(command, *kinds))


@in_turn([signal.SIGINT, signal.SIGTERM], [other for other in HERE if other.starts],
         never=("plans",))  # its first line takes as long as its figure
def test_signals(command, kinds):
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
    (trials.closed_streams, [*[f"{name}: status 1" for name in [*trials.STREAMS][1:]],
                             "stderr is closed: status 2, '', on"]),
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
