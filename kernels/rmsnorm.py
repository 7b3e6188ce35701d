r"""RMSNorm: LayerNorm without the mean, and so with half of its sums.

    y = x · rrms · weight                       rrms = 1 / sqrt(mean(x²) + eps) of each row

There is no bias and no mean: a row needs one sum over its numbers where LayerNorm needs two, one
after the other, and backward needs one number for each row. All else is as in layernorm.py, which
is to be read first: a row is loaded once, into registers; the residual add is thrown in, whose sum
is stored but not loaded again; and in backward, programs keep sums of their own.

    bytes a number (B each)      a chain                            one kernel
    residual add                 read 2 B, write B                  read 2 B, write B
    forward                      read B for each of 2 passes or     write B
                                 more, write B
    backward                     read x and dy, twice or more       read 2 B, write B

The bytes of a number are LayerNorm's: only the small ones, of each row and of each column, are
fewer. RMSNorm is not faster than a fused LayerNorm since it computes less, but it keeps less, and
has less to sum over ranks. With g = dy · weight and n = x · rrms, backward is, row by row,

    dx = rrms · (g - n · mean(g · n))

and dweight = sum over the rows of dy · n. There is no mean(g): to add a constant to a row does
change its RMSNorm. (`forward_bytes` and `backward_bytes` below.)

Sources: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Hsu et al., Liger Kernel
(2024).
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels import layernorm
from kernels.layernorm import DTYPES, WIDEST, by_rows, forward_launch, jit, runs_here, triton

if triton:
    import triton.language as tl


def rms_norm_reference(x, weight, eps=1e-5, residual=None):
    """The same in plain PyTorch. x (..., width); returns y; with a residual, (x + residual, y)."""
    total = x if residual is None else x + residual
    y = F.rms_norm(total, total.shape[-1:], weight.to(total.dtype), eps)
    return y if residual is None else (total, y)


def forward_bytes(rows, dim, width, residual=False):
    """Bytes that the forward moves: x, y, and with a residual that and the sum; 1/rms."""
    return rows * dim * width * (4 if residual else 2) + rows * 4 + dim * width


def backward_bytes(rows, dim, width, programs, residual=False):
    """Bytes that the backward moves: x, dy, dx, with a residual the sum's gradient; each program's
    sums, stored and read again."""
    sums = 2 * programs * dim * 4 + dim * width
    return rows * dim * width * (4 if residual else 3) + rows * 4 + dim * width + sums


@jit
def forward_kernel(x_ptr, residual_ptr, weight_ptr, sum_ptr, y_ptr, rrms_ptr, x_stride,
                   residual_stride, width, eps, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width

    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0)
        x = x.to(sum_ptr.dtype.element_ty)              # rounded, as the stream will have it
        tl.store(sum_ptr + row * width + columns, x, mask=inside)
        x = x.to(tl.float32)

    rrms = 1 / tl.sqrt(tl.sum(x * x) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + columns, x * rrms * weight, mask=inside)
    tl.store(rrms_ptr + row, rrms)


@jit
def load_part(dy_ptr, x_ptr, weight, rrms, row, columns, inside, dy_stride, x_stride):
    """dy, g = dy · weight and n = x · rrms, in these columns of the rows."""
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0).to(tl.float32)
    return dy, dy * weight.to(tl.float32), x * rrms


@jit
def backward_kernel(dy_ptr, dsum_ptr, x_ptr, weight_ptr, rrms_ptr, dx_ptr, dweight_ptr,
                    dy_stride, dsum_stride, x_stride, rows, width,
                    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                    PARTS: tl.constexpr, STAGES: tl.constexpr):
    part, program = tl.program_id(0), tl.program_id(1)
    columns = (part * BLOCK + tl.arange(0, BLOCK))[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0)
    dweight = tl.zeros((1, BLOCK), tl.float32)

    # num_stages: the next rows are on their way to the chip while these are worked on.
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & (columns < width)
        rrms = tl.load(rrms_ptr + row, mask=row < rows, other=0)
        sum_gn = tl.zeros((ROWS, 1), tl.float32)
        for step in tl.static_range(1, PARTS):          # the mean is that of the whole row
            others = ((part + step) % PARTS * BLOCK + tl.arange(0, BLOCK))[None, :]
            others_weight = tl.load(weight_ptr + others, mask=others < width, other=0)
            _, g, n = load_part(dy_ptr, x_ptr, others_weight, rrms, row, others,
                                (row < rows) & (others < width), dy_stride, x_stride)
            sum_gn += tl.sum(g * n, 1, keep_dims=True)

        dy, g, n = load_part(dy_ptr, x_ptr, weight, rrms, row, columns, inside, dy_stride, x_stride)
        dweight += tl.sum(dy * n, 0, keep_dims=True)
        sum_gn += tl.sum(g * n, 1, keep_dims=True)
        dx = rrms * (g - n * (sum_gn / width))
        if RESIDUAL:                                    # the sum is used elsewhere too
            dx += tl.load(dsum_ptr + row * dsum_stride + columns, mask=inside, other=0)
        tl.store(dx_ptr + row * width + columns, dx, mask=inside)

    tl.store(dweight_ptr + program * width + columns, dweight, mask=columns < width)


def rms_norm_forward(x, weight, eps=1e-5, residual=None):
    """x (..., width), weight (width,), residual of x's shape or None. Returns sum, y (..., width),
    and rrms (rows,), float32. Without a residual the sum is x."""
    rows, width = by_rows(x), x.shape[-1]
    y, total = torch.empty_like(x, memory_format=torch.contiguous_format), x
    rrms = torch.empty(len(rows), device=x.device, dtype=torch.float32)
    more = rows if residual is None else by_rows(residual)
    if residual is not None:
        total = torch.empty_like(y)
    block, warps = forward_launch(width)
    if len(rows):
        with torch.cuda.device_of(x):
            forward_kernel[(len(rows),)](rows, more, weight.contiguous(), total, y, rrms,
                                         rows.stride(0), more.stride(0), width, eps,
                                         residual is not None, block, num_warps=warps)
    return total, y, rrms


def rms_norm_backward(dy, total, weight, rrms, dsum=None):
    """Gradients of x or the sum, and weight; from that of y, and of the sum if there is one."""
    rows, width = by_rows(total), total.shape[-1]
    dy = by_rows(dy)
    more = dy if dsum is None else by_rows(dsum)
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    together, block, parts, stages, warps = layernorm.backward_launch(width, total.dtype)
    programs = layernorm.backward_programs(rows, together, parts, warps)
    sums = torch.empty(programs, width, device=total.device, dtype=torch.float32)
    if programs:
        with torch.cuda.device_of(total):
            backward_kernel[(parts, programs)](
                dy, more, rows, weight.contiguous(), rrms, dx, sums, dy.stride(0), more.stride(0),
                rows.stride(0), len(rows), width, dsum is not None, together, block, parts, stages,
                num_warps=warps)
    return dx, sums.sum(0).to(weight.dtype)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, residual):
        total, y, rrms = rms_norm_forward(x, weight, eps, residual)
        ctx.save_for_backward(total, weight, rrms)
        ctx.residual = residual is not None
        return (total, y) if ctx.residual else y

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, *gradients):
        total, weight, rrms = ctx.saved_tensors
        dsum = gradients[0] if ctx.residual else None
        dx, dweight = rms_norm_backward(gradients[-1], total, weight, rrms, dsum)
        return dx, dweight, None, dx if ctx.residual else None


def rms_norm(x, weight, eps=1e-5, residual=None):
    """RMSNorm over the last dimension of x (..., width); differentiable.

    weight (width,). With a residual of x's shape and dtype, returns (x + residual, its norm). x may
    have any strides; a row whose numbers are not beside each other is copied. Raises ValueError for
    shapes, dtypes or devices that do not fit, or a width above 16384. Where Triton cannot run, this
    is `rms_norm_reference`.
    """
    shape = tuple(x.shape)
    if not shape or not 0 < shape[-1] <= WIDEST:
        raise ValueError(f"rms_norm: x has shape {shape}; expected (..., width), with a width of 1 "
                         f"to {WIDEST}")
    if x.dtype not in DTYPES:
        raise ValueError(f"rms_norm: x of shape {shape} is {x.dtype}; expected float32, float16 or "
                         "bfloat16")
    others = [("weight", weight, shape[-1:], DTYPES)]
    if residual is not None:
        others.append(("residual", residual, shape, (x.dtype,)))
    for name, tensor, expected, dtypes in others:
        if tuple(tensor.shape) != expected:
            raise ValueError(f"rms_norm: {name} has shape {tuple(tensor.shape)}; expected "
                             f"{expected}")
        if tensor.dtype not in dtypes or tensor.device != x.device:
            raise ValueError(f"rms_norm: {name} of shape {expected} is {tensor.dtype} on "
                             f"{tensor.device}; expected {' or '.join(map(str, dtypes))} on "
                             f"{x.device}, where x is")
    if not runs_here(x):
        return rms_norm_reference(x, weight, eps, residual)
    return RMSNorm.apply(x, weight, eps, residual)
