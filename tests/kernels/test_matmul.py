"""kernels/matmul.py against float64, its formulas, and kernels/grouped_matmul.py."""

import importlib

import pytest
import torch

from tests.conftest import chapter
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    assert_close,
    interpreter,  # noqa: F401  (a fixture)
    random,
)

matmul = importlib.import_module("kernels.matmul")
grouped_matmul = importlib.import_module("kernels.grouped_matmul")
exercises = importlib.import_module("lab.chapters.kernels.matmul_checks")
SHAPES = [(1, 1, 1), (33, 70, 20), (129, 130, 100), (0, 3, 4), (3, 0, 4), (3, 4, 0)]


def pair(m, n, k, dtype=torch.float32):
    """Two random matrices, (m, k) and (k, n)."""
    return random(m, k, dtype=dtype), random(k, n, dtype=dtype, seed=1)


def compare(function, a, b):
    """Compare a product with the one in float64."""
    assert_close(function(a, b), a.double() @ b.double(), a.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul(dtype):
    for shape in SHAPES:
        compare(matmul.matmul, *pair(*shape, dtype))
    compare(matmul.matmul, random(40, 50)[:, 3:23], random(30, 20, seed=1).t())  # not dense


@pytest.mark.parametrize("down", [False, True])
def test_the_naive_kernel(down):
    compare(lambda a, b: matmul.naive(a, b, down), *pair(5, 7, 3))


def in_tiles(a, b, programs, group=1):
    """The tiled kernel, in tiles of 16 x 16, by so many programs."""
    return matmul.launch(matmul.tiled_kernel, a, b, programs, 16, 16, 16, group, DEVICE == "cpu")


def test_matmul_sums_in_float32():
    """4,096 and then 64 times 1, a tile each. In float16, each 1 would be rounded away."""
    a, b = torch.ones(1, 65 * 16), torch.full((65 * 16, 1), 1 / 16)
    b[:16] = 256
    assert in_tiles(a.half().to(DEVICE), b.half().to(DEVICE), 1).item() == 4096 + 64


def test_each_tile_is_computed_once_in_whatever_order():
    """In groups of rows that divide the tiles, and that don't."""
    for group in (1, 2, 8):
        compare(lambda a, b, n=group: in_tiles(a, b, 3 * 2, n), *pair(40, 30, 20))


def test_matmul_reads_nothing_beyond_its_matrices():
    a, b = pair(20, 24, 17)
    within = [torch.full((x.numel() + 4000,), torch.nan, device=DEVICE) for x in (a, b)]
    for x, around in zip((a, b), within):
        around[2000:-2000] = x.ravel()
    inner = [around[2000:-2000].view(x.shape) for x, around in zip((a, b), within)]
    assert matmul.matmul(*inner).equal(matmul.matmul(a, b))


def test_bytes_that_are_loaded():
    assert [matmul.segments(0, step) for step in (0, 2, 4, 8, 128, 4096)] == [1, 1, 1, 2, 32, 32]
    assert matmul.segments(64, 4) == 2 and matmul.segments(0, 4096, 32) == 32
    size, tile = 1024, matmul.BLOCKS[2][:2]
    assert matmul.loads(size, size, size) == 2 * size**3
    assert matmul.loads(size, size, size, 128, 128) == size**3 // 64
    assert matmul.loads(100, 130, 20, *tile) == 100 * 20 * 2 + 20 * 130


def tiles_of(rows, columns, group=1, programs=None):
    """The tiled kernel with such tiles of C, as a function of a and b."""
    def product(a, b):
        tiles = -(-len(a) // rows) * -(-b.shape[1] // columns)
        return matmul.launch(matmul.tiled_kernel, a, b, programs or tiles, rows, columns, 32, group,
                             True)
    return product


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter shows addresses")
def test_kernels_load_what_the_formulas_count():
    """Segments and sectors of a warp's load, and all numbers that are loaded."""
    m, n, k = 32, 64, 32
    for product, tile, steps in [  # steps: bytes from a thread's number of A, and of B, to the next
            (lambda a, b: matmul.naive(a, b, True), (1, 1), (4 * k, 0)),
            (lambda a, b: matmul.naive(a, b, False), (1, 1), (0, 4)),
            *((tiles_of(*tile), tile, (4, 4)) for tile in ((16, 32), (32, 32), (32, 64)))]:
        loads = exercises.loads_of_warps(product, m, n, k)
        for warps, step in zip(loads.values(), steps):
            for size in (128, 32):
                blocks = {len({place // size for place in warp}) for warp in warps}
                assert blocks == {matmul.segments(0, step, size)}
        assert exercises.count_loads(loads) == matmul.loads(m, n, k, *tile)


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter shows addresses")
def test_programs_in_groups_of_rows_share_more_tiles():
    """16 programs that run at the same time, of 8 x 16 tiles: as many rows of A's tiles as a group
    has, and 16 over that of B's columns."""
    for group in (1, 2, 4, 8):
        loads = exercises.loads_of_warps(tiles_of(16, 16, group, 16), 128, 256, 16)
        rows, columns = (len({place for warp in loads[name] for place in warp}) / (16 * 16)
                         for name in "ab")
        assert (rows, columns) == (group, 16 // group)


def test_occupancy_is_that_of_nvidias_tables():
    """By registers of programs of 4 warps, as the occupancy calculator of the CUDA toolkit has it
    for compute capability 9.0; then by whatever else is scarce."""
    for registers, warps in {32: 64, 40: 48, 72: 28, 97: 16, 255: 8}.items():
        assert matmul.occupancy(registers, 0, 4) == warps / 64
    assert matmul.occupancy(16, 0, 1) == 32 / 64  # 32 programs, if they are small
    assert matmul.occupancy(96, 0, 1) == 20 / 64  # 5 in each quarter, and not 21 in all
    assert matmul.occupancy(32, 113 * 1024, 8) == 2 * 8 / 64
    assert matmul.occupancy(32, 114 * 1024, 8) == 8 / 64  # each takes 1 KB more
    assert matmul.occupancy(118, 98304, 8, 164 * 1024) == 8 / 64  # of an A100
    assert matmul.occupancy(255, 0, 32) == 0


# ------------------------------------------------------------------------------- by experts


def both(dtype, columns, counts):
    """Outputs and all gradients of chapter 08's loop over experts, and of grouped matmuls."""
    eight, ends = chapter("08_expert_parallel"), torch.tensor(counts).cumsum(0)
    results = []
    for grouped in (False, True):
        torch.manual_seed(0)
        rows, out = torch.randn(2, sum(counts), 16, dtype=torch.float64).to(dtype)
        matrices = [torch.randn(len(counts), *shape, dtype=torch.float64).to(dtype) / 8
                    for shape in [(16, 24)] * columns + [(24, 16)]]
        given = [rows, *matrices]
        for x in given:
            x.requires_grad_()
        if grouped:
            y = grouped_matmul.run_experts(rows, matrices[:-1], matrices[-1], ends)
        else:
            y = eight.run_experts(rows, matrices[:-1], matrices[-1], counts)
        y.backward(out)
        results.append([y, *(x.grad for x in given)])
    return zip(*results)


@pytest.mark.parametrize("columns", [1, 2])  # ups; or ups and gates
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5),
                                                  (torch.bfloat16, 2e-2)])
def test_as_the_loop_over_experts(columns, dtype, tolerance):
    """Some experts have no row: their gradient is zero."""
    for counts in ([5, 0, 1, 17, 0, 9, 3, 5], [40], [0, 0, 0]):
        for loop, grouped in both(dtype, columns, counts):
            assert loop.shape == grouped.shape and loop.dtype == grouped.dtype
            if loop.numel():
                scale = loop.abs().max().clamp(min=1e-9)
                assert (loop - grouped).abs().max() <= tolerance * scale
