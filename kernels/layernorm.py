r"""LayerNorm: one pass over memory forward and one backward, with the residual add thrown in.

    y = (x - mean) · rstd · weight + bias        mean and rstd = 1 / sqrt(var + eps) of each row

As a chain of operators, x is read for the mean, again for the variance, again to be normalised, and
so on. But a row is small: 16384 numbers fit into the registers of one program. So a row is loaded
once, everything is computed on the chip, and y is stored:

    load x ---> [ mean | x - mean | var | rstd | · weight + bias ] ---> store y, mean, rstd

A transformer adds a sub-layer's output to the residual stream, which the next LayerNorm reads.
Fused, the sum is stored (the stream needs it) but not loaded again:

    bytes a number (B each)      a chain                            one kernel
    residual add                 read 2 B, write B                  read 2 B, write B
    forward                      read B for each of 3 passes or     write B
                                 more, write B
    backward                     read x and dy, twice or more       read 2 B, write B

With g = dy · weight and n = (x - mean) · rstd, backward is, row by row,

    dx = rstd · (g - mean(g) - n · mean(g · n))

and dweight = sum over the rows of dy · n, dbias = sum of dy. Rows are spread over programs, and if
all of them added to one dweight, they would race (or wait for each other, and add in a different
order every time). So each program keeps sums of its own in registers, over all rows that it takes,
and stores them once, in a row of its own; a second step adds up the programs' rows. The result does
not depend on who comes first.

Registers are what is short: a processor has 65536, and of a row of 16384 numbers the sums alone
would take half. So two programs share such a row, or four. Each owns a part of the
columns, and reads the others too, for the means; by then they are in the cache (L2), and memory is
read once all the same. Of short rows, a program works on several at once. In 16 bits, the next are
being loaded meanwhile.

The arithmetic intensity is about 8 FLOPs for 2 B bytes: far below an H100's ridge point (see
elu.py), so LayerNorm costs what its bytes cost. (`forward_bytes` and `backward_bytes` below.)

Sources: Ba et al., Layer Normalization (2016); Ultra-Scale Playbook, "Fused kernels"; Narayanan et
al., PTD-P (2021), section 4.2.
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import os

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:                     # there is no Triton: the reference runs in its place
    triton, jit = None, lambda function: function

DTYPES = torch.float32, torch.float16, torch.bfloat16
WIDEST = 16384
SMS = 132                               # of an H100; asked of the GPU where there is one


def layer_norm_reference(x, weight, bias, eps=1e-5, residual=None):
    """The same in plain PyTorch. x (..., width); returns y; with a residual, (x + residual, y)."""
    total = x if residual is None else x + residual
    weight, bias = weight.to(total.dtype), bias.to(total.dtype)
    y = F.layer_norm(total, total.shape[-1:], weight, bias, eps)
    return y if residual is None else (total, y)


def forward_bytes(rows, dim, width, residual=False):
    """Bytes that the forward moves: x, y, and with a residual that and the sum; statistics."""
    return rows * dim * width * (4 if residual else 2) + rows * 2 * 4 + 2 * dim * width


def backward_bytes(rows, dim, width, programs, residual=False):
    """Bytes that the backward moves: x, dy, dx, with a residual the sum's gradient; each program's
    sums, stored and read again (`backward_programs` says how many programs there are)."""
    sums = 2 * 2 * programs * dim * 4 + 2 * dim * width
    return rows * dim * width * (4 if residual else 3) + rows * 2 * 4 + dim * width + sums


@jit
def forward_kernel(x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, mean_ptr, rstd_ptr,
                   x_stride, residual_stride, width, eps,
                   RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width

    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0)
        x = x.to(sum_ptr.dtype.element_ty)              # rounded, as the stream will have it
        tl.store(sum_ptr + row * width + columns, x, mask=inside)
        x = x.to(tl.float32)

    mean = tl.sum(x) / width
    centered = tl.where(inside, x - mean, 0)
    rstd = 1 / tl.sqrt(tl.sum(centered * centered) / width + eps)

    weight = tl.load(weight_ptr + columns, mask=inside, other=0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + row * width + columns, centered * rstd * weight + bias, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@jit
def load_part(dy_ptr, x_ptr, weight, mean, rstd, row, columns, inside, dy_stride, x_stride):
    """dy, g = dy · weight and n = (x - mean) · rstd, in these columns of the rows."""
    dy = tl.load(dy_ptr + row * dy_stride + columns, mask=inside, other=0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0).to(tl.float32)
    return dy, dy * weight.to(tl.float32), tl.where(inside, (x - mean) * rstd, 0)


@jit
def backward_kernel(dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr,
                    dbias_ptr, dy_stride, dsum_stride, x_stride, rows, width,
                    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                    PARTS: tl.constexpr, STAGES: tl.constexpr):
    part, program = tl.program_id(0), tl.program_id(1)
    columns = (part * BLOCK + tl.arange(0, BLOCK))[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0)
    dweight = tl.zeros((1, BLOCK), tl.float32)
    dbias = tl.zeros((1, BLOCK), tl.float32)

    # num_stages: the next rows are on their way to the chip while these are worked on.
    for first in tl.range(program * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS))[:, None].to(tl.int64)
        inside = (row < rows) & (columns < width)
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0)
        sum_g = tl.zeros((ROWS, 1), tl.float32)
        sum_gn = tl.zeros((ROWS, 1), tl.float32)
        for step in tl.static_range(1, PARTS):          # the means are those of the whole row
            others = ((part + step) % PARTS * BLOCK + tl.arange(0, BLOCK))[None, :]
            others_weight = tl.load(weight_ptr + others, mask=others < width, other=0)
            _, g, n = load_part(dy_ptr, x_ptr, others_weight, mean, rstd, row, others,
                                (row < rows) & (others < width), dy_stride, x_stride)
            sum_g += tl.sum(g, 1, keep_dims=True)
            sum_gn += tl.sum(g * n, 1, keep_dims=True)

        dy, g, n = load_part(dy_ptr, x_ptr, weight, mean, rstd, row, columns, inside,
                             dy_stride, x_stride)
        dweight += tl.sum(dy * n, 0, keep_dims=True)
        dbias += tl.sum(dy, 0, keep_dims=True)
        sum_g += tl.sum(g, 1, keep_dims=True)
        sum_gn += tl.sum(g * n, 1, keep_dims=True)
        dx = rstd * (g - sum_g / width - n * (sum_gn / width))
        if RESIDUAL:                                    # the sum is used elsewhere too
            dx += tl.load(dsum_ptr + row * dsum_stride + columns, mask=inside, other=0)
        tl.store(dx_ptr + row * width + columns, dx, mask=inside)

    mine = program * width + columns
    tl.store(dweight_ptr + mine, dweight, mask=columns < width)
    tl.store(dbias_ptr + mine, dbias, mask=columns < width)


def forward_launch(width):
    """(BLOCK, num_warps): a thread has up to 32 numbers of a row, 64 of the widest. Small programs:
    many fit a processor, so that some wait for memory at any time, and keep it busy."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 1024, 1), 8)


def backward_launch(width, dtype):
    """(ROWS, BLOCK, PARTS, STAGES, num_warps): a thread has 16 numbers, of one row or of several.

    A program's part of a row is up to 4096 numbers, or 8192 in 16 bits. Of those, the next rows are
    loaded ahead (STAGES), if all rows are aligned so that 16 bytes can be at a time.
    """
    fast = dtype != torch.float32 and width % 16 == 0
    block = min(triton.next_power_of_2(width), 8192 if fast else 4096)
    rows = max(4096 // block, 1)
    return rows, block, triton.cdiv(width, block), 2 if fast else 1, rows * block // 512


def backward_programs(x, rows, parts, warps):
    """How many programs share the rows: two for each of the GPU's processors, or one if large."""
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else SMS
    return min(max(sms * 16 // warps // parts, 1), triton.cdiv(len(x), rows))


def by_rows(x):
    """x (..., width) as (rows, width), numbers of a row side by side: a view, where it can be."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def layer_norm_forward(x, weight, bias, eps=1e-5, residual=None):
    """x (..., width), weight and bias (width,), residual of x's shape or None. Returns sum, y
    (..., width), and mean, rstd (rows,), float32. Without a residual the sum is x."""
    rows, width = by_rows(x), x.shape[-1]
    y, total = torch.empty_like(x, memory_format=torch.contiguous_format), x
    mean = torch.empty(len(rows), device=x.device, dtype=torch.float32)
    rstd = torch.empty_like(mean)
    more = rows if residual is None else by_rows(residual)
    if residual is not None:
        total = torch.empty_like(y)
    weight, bias = weight.contiguous(), bias.contiguous()
    block, warps = forward_launch(width)
    if len(rows):
        with torch.cuda.device_of(x):
            forward_kernel[(len(rows),)](rows, more, weight, bias, total, y, mean, rstd,
                                         rows.stride(0), more.stride(0), width, eps,
                                         residual is not None, block, num_warps=warps)
    return total, y, mean, rstd


def layer_norm_backward(dy, total, weight, mean, rstd, dsum=None):
    """Gradients of x or the sum, weight, bias; from that of y, and of the sum if there is one."""
    rows, width = by_rows(total), total.shape[-1]
    dy = by_rows(dy)
    more = dy if dsum is None else by_rows(dsum)
    weight = weight.contiguous()
    dx = torch.empty(total.shape, dtype=total.dtype, device=total.device)
    together, block, parts, stages, warps = backward_launch(width, total.dtype)
    programs = backward_programs(rows, together, parts, warps)
    sums = torch.empty(2, programs, width, device=total.device, dtype=torch.float32)
    if programs:
        with torch.cuda.device_of(total):
            backward_kernel[(parts, programs)](
                dy, more, rows, weight, mean, rstd, dx, *sums, dy.stride(0), more.stride(0),
                rows.stride(0), len(rows), width, dsum is not None, together, block, parts, stages,
                num_warps=warps)
    dweight, dbias = sums.sum(1).to(weight.dtype)
    return dx, dweight, dbias


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, residual):
        total, y, mean, rstd = layer_norm_forward(x, weight, bias, eps, residual)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.residual = residual is not None
        return (total, y) if ctx.residual else y

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, *gradients):
        total, weight, mean, rstd = ctx.saved_tensors
        dsum = gradients[0] if ctx.residual else None
        dx, dweight, dbias = layer_norm_backward(gradients[-1], total, weight, mean, rstd, dsum)
        return dx, dweight, dbias, None, dx if ctx.residual else None


def runs_here(x):
    """Whether Triton can work on x: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    return triton is not None and (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


def layer_norm(x, weight, bias, eps=1e-5, residual=None):
    """LayerNorm over the last dimension of x (..., width); differentiable.

    weight, bias (width,). With a residual of x's shape and dtype, returns (x + residual, its norm).
    x may have any strides; a row whose numbers are not beside each other is copied. Raises
    ValueError for shapes, dtypes or devices that do not fit, or a width above 16384. Where Triton
    cannot run, this is `layer_norm_reference`.
    """
    shape = tuple(x.shape)
    if not shape or not 0 < shape[-1] <= WIDEST:
        raise ValueError(f"layer_norm: x has shape {shape}; expected (..., width), with a width of "
                         f"1 to {WIDEST}")
    if x.dtype not in DTYPES:
        raise ValueError(f"layer_norm: x of shape {shape} is {x.dtype}; expected float32, float16 "
                         "or bfloat16")
    others = [("weight", weight, shape[-1:], DTYPES), ("bias", bias, shape[-1:], DTYPES)]
    if residual is not None:
        others.append(("residual", residual, shape, (x.dtype,)))
    for name, tensor, expected, dtypes in others:
        found = tensor if tensor is None else tuple(tensor.shape)
        if found != expected:
            raise ValueError(f"layer_norm: {name} has shape {found}; expected {expected}")
        if tensor.dtype not in dtypes or tensor.device != x.device:
            raise ValueError(f"layer_norm: {name} of shape {found} is {tensor.dtype} on "
                             f"{tensor.device}; expected {' or '.join(map(str, dtypes))} on "
                             f"{x.device}, where x is")
    if not runs_here(x):
        return layer_norm_reference(x, weight, bias, eps, residual)
    return LayerNorm.apply(x, weight, bias, eps, residual)
