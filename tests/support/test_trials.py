"""Every command of the project stands the trials (tests/support/trials.py).

`make test` has bad values and streams for all commands and three chapters, and the other trials for
one command each; `make test-all` has all trials for all commands.
"""

import importlib.util
from pathlib import Path

import pytest

from tests.conftest import CHAPTERS, ROOT, sample
from tests.support import trials
from tests.support.every_command import ON_RANKS, OTHERS, PLANNER

HERE = [*sample(ON_RANKS, 3), *OTHERS, *[PLANNER] * Path(*PLANNER.program).exists()]
TRIED = [command for command in HERE if importlib.util.find_spec("triton")
         or not command.name.endswith("time_kernels.py")]


def by(command):
    """A name for a parameter."""
    return f"{command.name} {command.legal}"


def test_all_commands_are_in_the_table():
    lab = ROOT / "lab"
    modules = [*(path.stem for path in lab.glob("*.py") if "__main__" in path.read_text()),
               *(path.parent.name for path in lab.glob("*/__main__.py"))]
    files = [*CHAPTERS.glob("[0-9][0-9]_*.py"),
             *(path for path in ROOT.glob("benchmarks/*.py") if "__main__" in path.read_text())]
    there = {*(f"python -m lab.{name}" for name in modules),
             *(f"python {path.name}" for path in files)}
    assert there == {command.name for command in (*ON_RANKS, *HERE)}, (
        "tests/support/commands.toml has a table")


def fail_with(wrong):
    """Fail with all that was wrong."""
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("trial", [trials.bad_values, trials.closed_streams])
def test_all_commands_stand(trial):
    fail_with([line for command in TRIED for line in trial(command)])


@pytest.mark.parametrize("command", sample([one for one in TRIED if one.reads]), ids=by)
def test_odd_files(command):
    fail_with(trials.odd_files(command))


@pytest.mark.parametrize("command", sample([one for one in TRIED[::-1] if one.writes]), ids=by)
def test_bad_places(command):
    fail_with(trials.bad_places(command))


@pytest.mark.parametrize("command", sample([one for one in TRIED[::-1] if one.starts]), ids=by)
def test_signals(command):
    fail_with(trials.signals(command))
