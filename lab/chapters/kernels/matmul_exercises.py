"""The exercises of kernels/matmul.py."""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

from unittest import mock

import torch

from lab.classroom.exercise import Exercise, Same, random

try:
    import triton
    import triton.language as tl
except ImportError:                     # then there is nothing to be graded here
    triton = None

LOADS = [(0, 4), (0, 2), (64, 4), (0, 8), (0, 0), (0, 128), (4, 4096), (0, 48)]


def segments(chapter, size):
    return {f"from {first} on, {step} bytes apart": chapter.segments(first, step, size)
            for first, step in LOADS}


def loads(chapter):
    return {"naive": chapter.loads(100, 200, 300),
            "in tiles that fit": chapter.loads(128, 512, 256, 64, 128),
            "in tiles that do not fit": chapter.loads(100, 200, 300, 64, 128)}


def occupancies(chapter, *programs):
    return {f"{registers} registers, {shared} bytes, {warps} warps":
            chapter.occupancy(registers, shared, warps) for registers, shared, warps in programs}


def pair(m, n, k):
    return random(m, k).float(), random(k, n).float()


def tiles_kernel(tiles_ptr, down, across, TILE_OF: tl.constexpr, GROUP: tl.constexpr):
    program = tl.program_id(0)
    row, column = TILE_OF(program, down, across, GROUP)
    tl.store(tiles_ptr + 2 * program, row)
    tl.store(tiles_ptr + 2 * program + 1, column)


def tiles(chapter, down, across, group):
    """(row, column) of each program's tile."""
    found = torch.zeros(down * across, 2, dtype=torch.int32)
    triton.jit(tiles_kernel)[(down * across,)](found, down, across, chapter.tile_of, group)
    return {f"program {i}": tile for i, tile in enumerate(found.tolist())}


def row_by_row(program, down, across, GROUP):
    """In place of tile_of, which is another exercise: without groups."""
    return program // across, program % across


def product_row_by_row(chapter, *sizes):
    with mock.patch.object(chapter, "tile_of", row_by_row):
        return product(chapter, *sizes)


def tiles_after(chapter, group, *counts):
    """Which of 5 x 3 tiles of C are written, once so many programs have run."""
    a, b = torch.ones(80, 16), torch.ones(16, 48)
    written = {}
    for programs in counts:
        c = torch.zeros(80, 48)
        chapter.tiled_kernel[(programs,)](a, b, c, 80, 48, 16, 16, 16, 16, group, True)
        written[f"{programs} programs"] = c[::16, ::16] / 16
    return written


def product(chapter, *sizes):
    a, b = pair(*sizes)
    return chapter.launch(chapter.tiled_kernel, a, b, 4, 16, 32, 16, 2, True)


def loads_of_warps(product, m, n, k):
    """What the kernels of product(a, b) load in Triton's interpreter, from a (m, k) and b (k, n) in
    fp32: {"a": for each load of a warp, how many bytes from the beginning of the matrix its numbers
    are, "b": the same}. An interpreter has no warps: 32 numbers that follow each other in a block,
    row by row, are taken to be a warp's, as in a kernel of CUDA."""
    from triton.runtime.interpreter import interpreter_builder as builder

    a, b = torch.ones(m, k), torch.ones(k, n)
    begins = {"a": a.data_ptr(), "b": b.data_ptr()}
    loads, load = {"a": [], "b": []}, builder.create_masked_load

    def record(pointers, mask, *others):
        places, inside = pointers.data.ravel(), mask.data.ravel()
        _, name = max((begin, name) for name, begin in begins.items() if begin <= places.min())
        for i in range(0, len(places), 32):
            warp = places[i:i + 32][inside[i:i + 32]]
            loads[name].append([int(place) - begins[name] for place in warp])
        return load(pointers, mask, *others)

    with mock.patch.object(builder, "create_masked_load", record):
        product(a, b)
    return loads


def count_loads(loads):
    """The numbers that are loaded, given what `loads_of_warps` returns."""
    return sum(len(warp) for warps in loads.values() for warp in warps)


def numbers_loaded(chapter):
    def in_tiles(a, b):
        return chapter.launch(chapter.tiled_kernel, a, b, 4, 16, 32, 32, 2, True)

    return count_loads(loads_of_warps(in_tiles, 20, 40, 17))


def product_in_float16(chapter):
    """First 4,096, and then 64 times 1, a tile each."""
    a, b = torch.ones(1, 65 * 16).half(), torch.full((65 * 16, 1), 1 / 16).half()
    b[:16] = 256
    return chapter.launch(chapter.tiled_kernel, a, b, 1, 16, 16, 16, 1, True)


def product_within_nan(chapter):
    """Of matrices around which all of memory is NaN."""
    inner = []
    for x in pair(20, 40, 17):
        around = torch.full((x.numel() + 4000,), torch.nan)
        inner.append(around[2000:-2000].view(x.shape).copy_(x))
    return chapter.launch(chapter.tiled_kernel, *inner, 4, 16, 32, 16, 2, True)


EXERCISES = [
    Exercise(
        "matmul.1", "segments loads", 1,
        "`segments`: how many segments of `size` bytes does a warp's load take, whose 32 numbers "
        "lie `step` bytes apart? `loads`: how many numbers do all programs load, with tiles of C "
        "of block_m x block_n? The last ones may be cut off.",
        ("Number the segments of memory: in which of them does the byte at an address lie? And "
         "how many programs load the same number of A?",
         "Segment address // size: count how many different ones there are. A is loaded once for "
         "each column of tiles, of which there are n / block_n, rounded up; and B once for each "
         "row of tiles. What is masked is not loaded."),
        (Same(segments, "segments of 128 bytes", (128,)),
         Same(segments, "sectors of 32 bytes", (32,)),
         Same(loads, "numbers that are loaded")),
        "segments of a warp's load, and all loads",
    ),
    Exercise(
        "matmul.2", "occupancy", 2,
        "Which share of its 64 warps can an SM of an H100 hold, in whole programs, of which it "
        "takes 32 at most? A program takes 1 KB of shared memory more than it asks for. A thread "
        "gets registers in eights, and a warp lies in one of the four quarters of an SM, which "
        "have 16,384 registers each.",
        ("There are four limits. How many programs fit by each of them alone?",
         "By warps 64 // warps. By shared memory memory // (shared + 1024). By registers: a "
         "quarter holds 16384 // (32 · registers, rounded up to eights) warps, an SM four times as "
         "many, and of these only whole programs. The least of them and 32, times warps, over 64."),
        (Same(occupancies, "registers are scarce",
              ((32, 0, 4), (33, 0, 4), (97, 0, 4), (168, 0, 4), (96, 0, 1), (255, 0, 16))),
         Same(occupancies, "something else is",
              ((16, 0, 1), (32, 100_000, 8), (32, 116_000, 8), (118, 98304, 8)))),
    ),
    Exercise(
        "matmul.3", "tile_of", 2,
        "Which tile of C does a program compute, of down x across tiles? Take GROUP rows of tiles "
        "together: go down the first column of the group, then down its second one, and so on; "
        "then comes the next group. The last group may have fewer rows.",
        ("How many programs does a group have? And which of its group is this program?",
         "A group has GROUP · across programs: `//` gives the group, `%` the place in it. With "
         "as many rows as are left, up to GROUP, the place // rows is the column, and the place % "
         "rows the row within the group."),
        (Same(tiles, "the tiles of 5 x 3, in groups of 2 rows", (5, 3, 2)),
         Same(tiles, "the tiles of 2 x 4, in groups of 8 rows", (2, 4, 8)),
         Same(tiles, "the tiles of 3 x 2, row by row", (3, 2, 1)),
         Same(tiles_after, "5 x 3 tiles, in groups of 2 rows", (2, 1, 3, 6, 8, 13, 14)),
         Same(tiles_after, "5 x 3 tiles, row by row", (1, 4)),
         Same(tiles_after, "5 x 3 tiles, in one group", (8, 7, 15))),
    ),
    Exercise(
        "matmul.4", "tiled_kernel", 3,
        "Compute this program's tile of C, with sums in float32. a (m, k), b (k, n) and c (m, n) "
        "are dense, and each of m, n and k may be any number: nothing beyond a matrix is to be "
        "loaded or stored. Without a GPU, turn tiles into float32 before tl.dot (WIDE).",
        ("tile_of says which tile. Which rows of A and which columns of B does it need? In which "
         "steps do you walk over k, and where does a number of row i and column j lie?",
         "rows are row · BLOCK_M + arange, columns alike. For each `first` of range(0, k, "
         "BLOCK_K): load a tile (BLOCK_M, BLOCK_K) of A from a_ptr + row · k + inner, and one "
         "(BLOCK_K, BLOCK_N) of B from b_ptr + inner · n + column, with zeros where the mask is "
         "false; total = tl.dot(a, b, total, input_precision=\"ieee\")."),
        (Same(product_row_by_row, "tiles row by row, (20, 17) by (17, 40)", (20, 40, 17)),
         Same(product_row_by_row, "tiles row by row, (1, 16) by (16, 33)", (1, 33, 16)),
         Same(product, "(32, 32) by (32, 64)", (32, 64, 32)),
         Same(product, "(20, 17) by (17, 40)", (20, 40, 17)),
         Same(numbers_loaded, "how many numbers it loads"),
         Same(product_within_nan, "the same, with NaN around both matrices"),
         Same(product_in_float16, "float16: 4,096, and 64 times 1")),
        "a product in tiles",
    ),
]
