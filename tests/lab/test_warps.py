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
        pytest.skip("kernels are compiled here, so no address can be seen")
    needs_triton()
    return chapters.kernel("matmul")


def test_a_warp_takes_a_segment_for_each_number_of_a_column_and_one_for_a_row(matmul):
    for is_down, shape, segments in [(True, (32, 2, 32), [32, 32, 1, 1]),
                                     (False, (2, 32, 32), [1, 1, 1, 4])]:
        found = warps.watch(lambda a, b, down=is_down: matmul.naive(a, b, down), *shape)
        assert [warps.blocks_of(found, name, size) for name in "ab" for size in (128, 32)
                ] == segments
        assert warps.numbers(found) == matmul.loads(*shape) == 2 * 32 * 2 * 32


def test_a_formula_that_is_off_is_told(monkeypatch, capsys):
    right = ("tiles", [1, 4, 1, 4, 96], [1, 4, 1, 4, 96])
    wrong = ("tiles", [1, 4, 1, 4, 96], [1, 4, 1, 4, 64])
    monkeypatch.setattr(warps, "of_orders", lambda matmul: [(2, [2, 8], [2, 8])])
    for row, status in ((right, 0), (wrong, 1)):
        monkeypatch.setattr(warps, "of_kernels", lambda *given, row=row: [row])
        assert warps.main([]) == status
        printed = capsys.readouterr().out
        assert ("✗" in printed and "64]" in printed) == bool(status)


@pytest.mark.full
def test_the_command_finds_all_as_by_formula(tmp_path):
    """As a reader starts it: Triton is imported after the interpreter was chosen."""
    command = [sys.executable, "-m", "lab.warps", "--n=32", f"--plot={tmp_path}/warps.png"]
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.count("✓")) == (0, 9), ran.stderr
    assert (tmp_path / "warps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("flags", "works"), [
    (["--m=33"], "--m 64"), (["--m=1024", "--k=1024"], "--m 32 --n 64 --k 32")])
def test_a_bad_argument_costs_one_line(capsys, flags, works):
    with pytest.raises(SystemExit) as leaving:
        warps.main(flags)
    line = capsys.readouterr().err
    assert leaving.value.code == 2 and line.endswith(f"{works} would work\n")
