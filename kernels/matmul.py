r"""Matmul: what a GPU is made of, and how often a number moves.

A GPU computes in streaming multiprocessors (SMs), of which an H100 has 132. An SM holds up to 64
warps, and issues instructions of four at each tick of its clock. A warp is 32 threads that take an
instruction together, each with numbers of its own. In an H100 these lie in

    registers         256 KB an SM    a thread has its own
    shared memory     228 KB an SM    a program has its own    all SMs 31 TB/s
    L2, a cache        50 MB          all SMs share it         about 5.5 TB/s
    memory (HBM)       80 GB          all SMs share it         3.35 TB/s

C = A · B, of (m, k) and (k, n), takes 2mnk FLOPs. In bf16 an H100 does 295 while its memory moves
one byte (elu.py). So it matters how often a number is loaded.

Coalescing. Memory moves in segments of 128 bytes, and a warp's load takes each segment in which one
of its 32 numbers lies. In `naive_kernel` each thread computes a number of C, and there are two ways
to deal these out. In a step over k, a warp loads these numbers of A and B, in fp32:

    threads go down a column of C           threads go along a row of C
    A  x . . .    B  x . . .                A  x . . .    B  x x x x
       x . . .       . . . .                   . . . .       . . . .
    32 segments   1 segment                 1 segment     1 segment

Of each of the 32, 4 bytes are of use. (A GPU can move a quarter of a segment, a sector: then 8
times too much comes, not 32 times.) Triton deals out a block so that neighbours lie side by side.

Tiling. Either way, each thread loads 2k numbers, one for each FLOP. But a number of A is wanted for
n numbers of C. In `tiled_kernel` a program computes a tile of C: it walks over k, and loads tiles
of A and B to where all of its threads can read them (`loads`).

                 numbers loaded                       FLOPs a byte in 16 bits
    naive        2mnk                                 1/2
    tiled        mnk (1 / BLOCK_M + 1 / BLOCK_N)      64, with tiles of 128 x 128

Order. The rest is up to L2: programs that run at the same time read the same tiles. They start in
the order of their numbers, so of C with 4 x 6 tiles the first six read

    0 1 2 3 4 5     one row of A's tiles,           0 2 4 ...     in groups of two rows: two rows
    6 7 8 ...       and six columns of B's          1 3 5 ...     and three columns

Occupancy. A load takes hundreds of ticks, in which an SM issues what its other warps have. How many
find room is up to registers and shared memory (`occupancy`). For Hopper, `tiled_kernel` has 118 of
the former a thread and 96 KB of the latter: two programs of 8 warps, a quarter of 64. That is
enough, since each works ahead: of its three pairs of tiles two are on their way.

Sources: Ultra-Scale Playbook, "Diving into the GPUs"; Boehm, How to Optimize a CUDA Matmul Kernel
(2022); Triton's tutorial on matmuls (the order); NVIDIA, Hopper Tuning Guide; Chips and Cheese,
Nvidia's H100 (2023), which measured L2.
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import math
import os

import torch

from kernels.elu import DTYPES, jit, runs_here, triton

if triton:
    import triton.language as tl

# By the bytes of a number: BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages (pairs of tiles).
BLOCKS = {2: (128, 128, 64, 8, 3), 4: (64, 64, 32, 4, 3)}
GROUP = 8                               # rows of tiles


def segments(first, step, size=128):
    """Segments that a warp's load takes of numbers `step` bytes apart, from address `first` on."""
    return len({(first + thread * step) // size for thread in range(32)})


def loads(m, n, k, block_m=1, block_n=1):
    """Numbers that are loaded, with such tiles of C; with tiles of 1 x 1: the naive kernel's."""
    return m * k * math.ceil(n / block_n) + k * n * math.ceil(m / block_m)


def occupancy(registers, shared, warps, memory=228 * 1024):
    """The share of its 64 warps that an SM can hold. registers: of a thread, they come in eights;
    shared: bytes of a program; warps: of a program; memory: bytes that an SM's programs share."""
    room = 4 * (16384 // (32 * 8 * math.ceil(registers / 8)))   # a warp lies in a quarter of an SM
    return min(64 // warps, room // warps, memory // (shared + 1024), 32) * warps / 64


@jit
def naive_kernel(a_ptr, b_ptr, c_ptr, m, n, k, DOWN: tl.constexpr):
    """A program is one warp."""
    thread = tl.program_id(0) * 32 + tl.arange(0, 32)
    row, column = (thread % m, thread // m) if DOWN else (thread // n, thread % n)
    inside, a_ptr, b_ptr = thread < m * n, a_ptr + row * k, b_ptr + column
    total = tl.zeros((32,), tl.float32)
    for i in range(k):
        a, b = tl.load(a_ptr + i, mask=inside), tl.load(b_ptr + i * n, mask=inside)
        total += a.to(tl.float32) * b.to(tl.float32)
    tl.store(c_ptr + row * n + column, total, mask=inside)


@jit
def tile_of(program, down, across, GROUP: tl.constexpr):
    """(row, column) of a program's tile, of down x across: by groups of rows, down each column."""
    first = program // (GROUP * across) * GROUP
    rows = tl.minimum(GROUP, down - first)              # the last group may have fewer
    within = program % (GROUP * across)
    return first + within % rows, within // rows


@jit
def tiled_kernel(a_ptr, b_ptr, c_ptr, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_K: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr):
    """WIDE: as float32, since Triton's interpreter would multiply the raw bits of bfloat16."""
    row, column = tile_of(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP)
    rows = (row * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    columns = (column * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, k, BLOCK_K):
        inner = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
        across, down = inner[None, :], inner[:, None]
        a = tl.load(a_ptr + rows * k + across, mask=(rows < m) & (across < k), other=0)
        b = tl.load(b_ptr + down * n + columns, mask=(down < k) & (columns < n), other=0)
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + rows * n + columns, total, mask=(rows < m) & (columns < n))


def launch(kernel, a, b, programs, *choices, **options):
    """Run kernel on a (m, k) and b (k, n), on copies where they are not dense; gives c (m, n)."""
    a, b, c = a.contiguous(), b.contiguous(), a.new_empty(len(a), b.shape[1])
    with torch.cuda.device_of(a):
        kernel[(programs,)](a, b, c, *c.shape, len(b), *choices, **options)
    return c


def naive(a, b, down):
    """`matmul` by naive_kernel, whose threads go down the columns of C, or along its rows."""
    return launch(naive_kernel, a, b, triton.cdiv(len(a) * b.shape[1], 32), down, num_warps=1)


def matmul(a, b):
    """a (m, k) times b (k, n), both float32, float16 or bfloat16, summed in float32: (m, n) of that
    dtype. Without gradients. Where Triton cannot run, this is a @ b. Raises ValueError."""
    if (a.dtype, a.shape[1:]) != (b.dtype, b.shape[:1]) or b.ndim != 2 or a.dtype not in DTYPES:
        raise ValueError(f"matmul: {a.dtype} {tuple(a.shape)} by {b.dtype} {tuple(b.shape)}; "
                         "expected (m, k) by (k, n), both float32, float16 or bfloat16")
    if not runs_here(a):
        return a.detach() @ b.detach()
    *block, warps, stages = BLOCKS[a.element_size()]
    tiles = math.ceil(len(a) / block[0]) * math.ceil(b.shape[1] / block[1])
    return launch(tiled_kernel, a, b, tiles, *block, GROUP, num_warps=warps, num_stages=stages,
                  WIDE=os.environ.get("TRITON_INTERPRET") == "1")
