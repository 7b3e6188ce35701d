"""kernels/matmul.py against float64, and its formulas; lab/warps.py counts what it loads."""

import importlib
import itertools

import pytest
import torch

from tests.conftest import some
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    assert_close,
    exact,
    interpreter,  # noqa: F401  (a fixture)
    random,
)

matmul = importlib.import_module("kernels.matmul")
SHAPES = [(1, 1, 1), (33, 70, 20), (129, 130, 100), (0, 3, 4), (3, 0, 4), (3, 4, 0)]


def pair(m, n, k, dtype=torch.float32):
    return random(m, k, dtype=dtype).detach(), random(k, n, dtype=dtype, seed=1).detach()


@pytest.mark.parametrize(("shape", "dtype"), some(itertools.product(SHAPES, DTYPES)))
def test_matmul(shape, dtype):
    a, b = pair(*shape, dtype)
    assert_close(matmul.matmul(a, b), (exact(a) @ exact(b)).detach(), dtype)


@pytest.mark.parametrize("down", [False, True])
def test_the_naive_kernel(down):
    a, b = pair(5, 7, 3)
    assert_close(matmul.naive(a, b, down), (exact(a) @ exact(b)).detach(), torch.float32)


def test_matmul_of_matrices_that_are_not_dense():
    a, b = random(40, 50).detach()[:, 3:23], random(30, 20, seed=1).detach().t()
    assert_close(matmul.matmul(a, b), (exact(a) @ exact(b)).detach(), torch.float32)


def test_matmul_sums_in_float32():
    """4,096 and then 64 times 1, a tile each: in float16 a 1 would be rounded away every time."""
    a, b = torch.ones(1, 65 * 16), torch.full((65 * 16, 1), 1 / 16)
    b[:16] = 256
    a, b = (x.half().to(DEVICE) for x in (a, b))
    c = matmul.launch(matmul.tiled_kernel, a, b, 1, 16, 16, 16, 1, DEVICE == "cpu")
    assert c.item() == 4096 + 64


def test_each_tile_is_computed_once_in_whatever_order():
    """Groups of rows that divide the tiles, and that do not; rows beyond the last are not read."""
    a, b = pair(40, 30, 20)
    for group in (1, 2, 8):
        c = matmul.launch(matmul.tiled_kernel, a, b, 3 * 2, 16, 16, 16, group, DEVICE == "cpu")
        assert_close(c, (exact(a) @ exact(b)).detach(), torch.float32)


def test_matmul_reads_nothing_beyond_its_matrices():
    a, b = pair(20, 24, 17)
    within = [torch.full((x.numel() + 4000,), torch.nan, device=DEVICE) for x in (a, b)]
    for x, around in zip((a, b), within):
        around[2000:-2000] = x.ravel()
    inner = [around[2000:-2000].view(x.shape) for x, around in zip((a, b), within)]
    assert matmul.matmul(*inner).equal(matmul.matmul(a, b))


@pytest.mark.parametrize(("a", "b"), [
    (torch.ones(2, 3), torch.ones(2, 3)), (torch.ones(2, 3), torch.ones(3)),
    (torch.ones(2, 3), torch.ones(3, 2).half()), (torch.ones(2, 3).double(),) * 2,
    (torch.ones(2, 3, 4), torch.ones(3, 4))])
def test_matmul_refuses_what_does_not_fit(a, b):
    with pytest.raises(ValueError, match=r"matmul: torch.float.* by .*; expected \(m, k\) by"):
        matmul.matmul(a, b)


def test_what_the_lesson_says():
    assert [matmul.segments(0, step) for step in (0, 2, 4, 8, 128, 4096)] == [1, 1, 1, 2, 32, 32]
    assert matmul.segments(64, 4) == 2 and matmul.segments(0, 4096, 32) * 32 == 8 * 128
    size = 1024
    assert matmul.loads(size, size, size) == 2 * size**3
    assert matmul.loads(size, size, size, 128, 128) == size**3 // 64
    tile = matmul.BLOCKS[2][:2]
    assert 2 * size**3 / (2 * matmul.loads(size, size, size, *tile)) == 64  # FLOPs a byte
    assert 132 * 128 * 1.83e9 == pytest.approx(31e12, rel=0.01)  # 128 bytes an SM and tick


def test_occupancy_is_that_of_nvidias_tables():
    """By registers of programs of 4 warps, as the occupancy calculator of the CUDA toolkit has it
    for compute capability 9.0; then by what else is scarce."""
    by_registers = {32: 64, 40: 48, 64: 32, 72: 28, 97: 16, 128: 16, 168: 12, 255: 8}
    for registers, warps in by_registers.items():
        assert matmul.occupancy(registers, 0, 4) == warps / 64
    assert matmul.occupancy(16, 0, 1) == 32 / 64  # 32 programs, if they are small
    assert matmul.occupancy(96, 0, 1) == 20 / 64  # 5 in each quarter, and not 21 in all
    assert matmul.occupancy(32, 113 * 1024, 8) == 2 * 8 / 64
    assert matmul.occupancy(32, 114 * 1024, 8) == 8 / 64  # each takes 1 KB more
    assert matmul.occupancy(118, 98304, 8) == 16 / 64
    assert matmul.occupancy(118, 98304, 8, 164 * 1024) == 8 / 64  # of an A100
    assert matmul.occupancy(255, 0, 32) == 0
