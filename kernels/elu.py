r"""ELU: a first kernel. Blocks, masks, and why a chain of pointwise operators should be one kernel.

    elu(x) = x                      where x > 0
             alpha · (exp(x) - 1)   elsewhere

Written with PyTorch's operators that is a chain: compare, exp, subtract, multiply, choose. Each is
a kernel of its own, which reads its input from the GPU's memory and writes its output there:

    a chain      x > 0     reads x        writes a mask of 1 byte
                 exp       reads x        writes e
                 - 1       reads e        writes f
                 * alpha   reads f        writes g
                 where     reads mask, x, g   writes y
    one kernel             reads x        writes y

With B bytes a number that is 10 B + 2 bytes against 2 B, for every number. The FLOPs are the same,
and they are not what takes the time: 5 FLOPs for 2 B bytes is an arithmetic intensity of about 1,
and an H100 can do 989e12 / 3.35e12 = 295 FLOPs of bf16 matmul while it moves one byte. Below that,
its ridge point, only bytes matter. (`chain_bytes`, `fused_bytes`, `arithmetic_intensity` below.)

Once fused, the instructions can come to matter after all. An H100 issues 132 processors · 128 lanes
· 1.83e9 a second, and in that second moves 3.35e12 / 2 B numbers: in 16 bits, there is time for 37
instructions a number, loads and conversions included, and on an H200 for 26 (`instruction_budget`).
The forward kernel below has about 22, with a series where it might have had a logarithm and a
division.

A kernel is written for one block of numbers, and a grid of programs runs it for all blocks:

    x      |. . . . . . . .|. . . . . . . .|. . . . . - - -|     n = 21, in blocks of 8
    pid            0               1               2
    mask    1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 0 0 0     past the end: not loaded, not stored

A pointwise operation does not care in which order it meets the numbers. So a transposed tensor
needs no copy: the kernel walks through memory, and the output is laid out as the input is.

Backward needs the input again and nothing else: dx = dy where x > 0, and dy · alpha · exp(x)
elsewhere. It reads dy and x, and writes dx: 3 B bytes.

Sources: Clevert et al., Fast and Accurate Deep Network Learning by Exponential Linear Units (2016);
Ultra-Scale Playbook, "Diving into the GPUs" and "Fused kernels".
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import os

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:                     # there is no Triton: the reference runs in its place
    triton, jit = None, lambda function: function

DTYPES = torch.float32, torch.float16, torch.bfloat16
BLOCK = 2048                            # numbers of one program: 16 for each of its 128 threads


def elu_reference(x, alpha=1.0):
    """The same in plain PyTorch: x of any shape and floating dtype; returns its shape."""
    below = x.clamp(max=0)              # or a large x overflows in the half that is not chosen
    return torch.where(x > 0, x, alpha * torch.expm1(below))


def chain_bytes(numbers, width):
    """Bytes that the chain of five operators moves. width: bytes of a number."""
    compare, exp_subtract_multiply, where = width + 1, 3 * 2 * width, 1 + 3 * width
    return numbers * (compare + exp_subtract_multiply + where)


def fused_bytes(numbers, width):
    """Bytes that one kernel moves."""
    return numbers * 2 * width


def arithmetic_intensity(width):
    """FLOPs for each byte that the kernel moves; compare with a machine's FLOP/s over bytes/s."""
    return 5 / (2 * width)


def instruction_budget(width, processors=132, clock=1.83e9, bandwidth=3.35e12):
    """Instructions a number for which there is time while it is read and written. clock: in Hz;
    bandwidth: of the GPU's memory, in bytes a second. As given: an H100."""
    return processors * 128 * clock / (bandwidth / (2 * width))


@jit
def expm1(x):
    """exp(x) - 1 of x <= 0, (block,) in float32, and as precise near 0 as elsewhere."""
    # Near 0, tl.exp(x) - 1 would lose its digits. There, Taylor's series.
    series = 1 / 120 + x * (1 / 720 + x / 5040)
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * series))))
    return tl.where(x > -0.4, series, tl.exp(x) - 1)


@jit
def elu_forward_kernel(x_ptr, y_ptr, n, alpha, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    x = tl.load(x_ptr + here, mask=inside, other=0).to(tl.float32)
    y = tl.where(x > 0, x, alpha * expm1(x))            # what is not chosen may overflow
    tl.store(y_ptr + here, y, mask=inside)


@jit
def elu_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, alpha, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    x = tl.load(x_ptr + here, mask=inside, other=0).to(tl.float32)
    dy = tl.load(dy_ptr + here, mask=inside, other=0).to(tl.float32)
    dx = tl.where(x > 0, dy, dy * alpha * tl.exp(x))
    tl.store(dx_ptr + here, dx, mask=inside)


def dense_like(x, like):
    """x, laid out in memory as `like` is, which has no gaps: x itself if it already is."""
    return x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)


def elu_forward(x, alpha=1.0):
    """x of any shape and strides, in float32, float16 or bfloat16; returns y of its shape and, if
    x has no gaps in memory, its strides."""
    y = torch.empty_like(x)                             # keeps the strides of x, but not its gaps
    if x.numel():
        with torch.cuda.device_of(x):
            elu_forward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                dense_like(x, y), y, x.numel(), alpha, BLOCK)
    return y


def elu_backward(dy, x, alpha=1.0):
    """The gradient of x, of its shape, from that of y."""
    dx = torch.empty_like(x)
    if x.numel():
        with torch.cuda.device_of(x):
            elu_backward_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                dense_like(dy, dx), dense_like(x, dx), dx, x.numel(), alpha, BLOCK)
    return dx


class ELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, alpha):
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return elu_forward(x, alpha)

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return elu_backward(dy, x, ctx.alpha), None


def runs_here(x):
    """Whether Triton can work on x: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def elu(x, alpha=1.0):
    """ELU of x, of any shape and strides, in float32, float16 or bfloat16; differentiable.

    Raises ValueError for another dtype. Where Triton cannot run, this is `elu_reference`.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"elu: x of shape {tuple(x.shape)} is {x.dtype}; expected float32, "
                         "float16 or bfloat16")
    return ELU.apply(x, alpha) if runs_here(x) else elu_reference(x, alpha)
