"""Chapters as a reader starts them: with ranks, streams of any kind, and from other folders."""

import json
import os

import pytest

from lab.run import verify
from tests.conftest import (
    CHAPTERS,
    ROOT,
    SMALL,
    TEXT,
    sample,
    training_chapters,
)
from tests.support import programs

TWO = CHAPTERS / "02_data_parallel.py"
OWN_TEXT = f"--data={TEXT}"

# -------------------------------------------------------------------------------- from the shell


def hold_to_what_a_reader_expects(output, errors, steps, folder):
    """Of the default variant of a chapter. Returns its JSON."""
    assert errors == "" and "✗" not in output, errors
    record = json.loads((folder / "run.json").read_text())
    assert record["checks"] and all(check["ok"] for check in record["checks"])
    assert len(record["loss"]) == steps and len(record["reference_loss"]) == min(5, steps)
    usual = verify.tolerances("float32", "adamw")
    assert all(record["tolerance"][kind] <= usual[kind] for kind in usual)
    return record


@pytest.mark.parametrize("name", sample([one for one in training_chapters() if one[:2] != "01"]))
def test_as_a_reader_would(tmp_path, name):
    """(tests/test_torchrun.py has all of them, every day, and smaller.)"""
    statuses, *said = programs.run(CHAPTERS / f"{name}.py", "--steps=1", "--json=run.json",
                                   world=2, cwd=tmp_path)
    assert statuses == [0, 0], said
    assert hold_to_what_a_reader_expects(*said, 1, tmp_path)["world_size"] == 2


@pytest.mark.parametrize(("flags", "steps", "loss"), sample([
    ((*SMALL, "--lr=0.01"), 60, 3.3), ((), 300, 2.4)]))
def test_chapter_01_learns_what_its_lesson_promises(tmp_path, flags, steps, loss):
    statuses, *said = programs.run(CHAPTERS / "01_single_gpu.py", f"--steps={steps}",
                                   "--json=run.json", *flags, cwd=tmp_path)
    assert statuses == [0], said
    losses = hold_to_what_a_reader_expects(*said, steps, tmp_path)["loss"]
    assert sum(losses[-10:]) / 10 < loss


def test_a_run_outlives_its_reader_and_an_encoding_without_its_marks(tmp_path):
    """As with PYTHONIOENCODING=ascii and `| head -1`."""
    os.mkfifo(tmp_path / "pipe")
    ranks = programs.Ranks(TWO, *SMALL, "--steps=2", "--json=run.json", OWN_TEXT, cwd=tmp_path,
                           encoding="ascii", stdout=tmp_path / "pipe")  # fmt: skip
    with open(tmp_path / "pipe") as reader:
        assert r" \N{MIDDLE DOT} " in reader.readline()
    assert (ranks.wait(), ranks.err()) == ([0], "")
    assert len(json.loads((tmp_path / "run.json").read_text())["loss"]) == 2


def test_a_run_needs_no_output_at_all(tmp_path):
    ended = programs.run(TWO, *SMALL, "--steps=1", OWN_TEXT, "--json=run.json", cwd=tmp_path,
                         stdout=None, stderr=None)
    assert ended == ([0], "", "") and (tmp_path / "run.json").exists()


# ------------------------------------------------------------------------------------------ grading


GRADES = """
from tests import conftest
print(conftest.chapter_names(), conftest.chapter("02_data_parallel").wire_bytes(100, 4))
"""


def test_chapters_of_another_folder_are_graded(tmp_path):
    """The tests import those, and a common.py that lies with them does not judge."""
    source = (ROOT / TWO.name).read_text()
    right = "return 2 * (ranks - 1) / ranks * payload"
    assert source.count(right) == 1
    (tmp_path / TWO.name).write_text(source.replace(right, "return payload"))
    (tmp_path / "common.py").write_text("raise SystemExit('a common.py of their own')")
    (tmp_path / "grades.py").write_text(GRADES)
    graded = programs.run(tmp_path / "grades.py", cwd=ROOT, CHAPTERS=tmp_path)
    assert graded == ([0], "['02_data_parallel'] 100\n", "")
