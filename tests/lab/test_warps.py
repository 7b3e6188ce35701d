"""lab/warps.py: it counts what kernels load, and says where a formula is off."""

import os
import subprocess
import sys

import pytest
import torch

from lab import chapters, warps
from tests.conftest import ROOT, needs_triton


@pytest.fixture
def matmul():
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and nobody sees an address")
    needs_triton()
    return chapters.kernel("matmul")


def counted(found):
    return [warps.blocks_of(found, name, size) for name in "ab" for size in (128, 32)]


def test_a_warp_that_goes_down_a_column_takes_a_segment_for_each_number(matmul):
    found = warps.watch(lambda a, b: matmul.naive(a, b, True), 32, 2, 32)
    assert counted(found) == [32, 32, 1, 1]
    assert warps.numbers(found) == matmul.loads(32, 2, 32) == 2 * 32 * 2 * 32


def test_a_warp_that_goes_along_a_row_takes_one(matmul):
    found = warps.watch(lambda a, b: matmul.naive(a, b, False), 2, 32, 32)
    assert counted(found) == [1, 1, 1, 4]
    assert warps.numbers(found) == matmul.loads(2, 32, 32)


@pytest.mark.parametrize("shape", [(64, 64, 32), (33, 50, 40)])
def test_tiles_load_what_the_formula_says_whether_they_fit_or_not(matmul, shape):
    found = warps.watch(warps.tiled(matmul, 16, 32), *shape)
    assert warps.numbers(found) == matmul.loads(*shape, 16, 32)
    assert warps.different(found, "a") == shape[0] * shape[2]
    assert warps.different(found, "b") == shape[2] * shape[1]


def test_programs_in_groups_read_fewer_rows_and_columns(matmul):
    read = {group: measured for group, measured, formula in warps.of_orders(matmul)
            if measured == formula}
    assert read == {1: [1, 16], 2: [2, 8], 4: [4, 4], 8: [8, 2]}


def test_a_picture_shows_what_moves_and_what_is_used(matmul):
    figure = warps.draw(matmul)
    told = [axes.get_title("left").splitlines()[-1] for axes in figure.axes]
    assert told == ["32 of 1,024 used", "32 of 32 used", "1,024 of 1,024 used",
                    "read 1 row of A's tiles and 16 columns of B's",
                    "read 4 rows of A's tiles and 4 columns of B's"]  # fmt: skip
    first = figure.axes[0].images[0].get_array()
    assert (first[:, 1:] == first[0, 1]).all() and (first[:, 0] != first[:, 1]).any()


def test_a_formula_that_is_off_is_told(monkeypatch, capsys):
    right = ("tiles", [1, 4, 1, 4, 96], [1, 4, 1, 4, 96])
    wrong = ("tiles", [1, 4, 1, 4, 96], [1, 4, 1, 4, 64])
    monkeypatch.setattr(warps, "of_orders", lambda matmul: [(2, [2, 8], [2, 8])])
    for row, status in ((right, 0), (wrong, 1)):
        monkeypatch.setattr(warps, "of_kernels", lambda *given, row=row: [row])
        assert warps.main([]) == status
        printed = capsys.readouterr().out
        assert ("✗ by formula [1, 4, 1, 4, 64]" in printed) == bool(status)
    assert "fits 2 times by registers, 2 times by shared memory, 8 times by warps: 16 of" in printed


@pytest.mark.full
def test_the_command_finds_all_as_by_formula(tmp_path):
    """As a reader starts it: Triton is imported once the interpreter is asked for."""
    command = [sys.executable, "-m", "lab.warps", "--n=32", f"--plot={tmp_path}/warps.png"]
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.count("✓")) == (0, 9), ran.stderr
    assert (tmp_path / "warps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flags", "said"), [
    (["--m=33"], "--m 33 is no multiple of 32, a warp's threads; --m 64 would work"),
    (["--m=1024", "--k=1024"], "--m 32 --n 64 --k 32 would work")])
def test_a_bad_argument_costs_one_line(capsys, flags, said):
    with pytest.raises(SystemExit) as leaving:
        warps.main(flags)
    assert leaving.value.code == 2 and said in capsys.readouterr().err
