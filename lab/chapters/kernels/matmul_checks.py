"""Checks of the exercises of kernels/matmul.py."""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

from unittest import mock

import torch

from lab.chapters.checking import random

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
    tiles = torch.zeros(down * across, 2, dtype=torch.int32)
    triton.jit(tiles_kernel)[(down * across,)](tiles, down, across, chapter.tile_of, group)
    return {f"program {i}": tile for i, tile in enumerate(tiles.tolist())}


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
    return sum(sum(map(len, warps)) for warps in loads.values())


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
