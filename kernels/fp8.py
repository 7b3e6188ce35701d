r"""FP8: linear layers whose three products multiply numbers of 8 bits.

Hopper's tensor cores multiply 8-bit numbers twice as fast as 16-bit ones, and an input that is kept
for backward, or sent, takes half the bytes. But E4M3 has four significant bits and ends at 448, and
below 2^-9 it has nothing but zero. So a tensor is divided by a scale before it is rounded, so that
its largest number, the amax, becomes 448 or a little less:

    scale = amax / 448          values = E4M3(x / scale)          x is about values · scale

How many numbers share a scale? One that is 100,000 times the others (a model's activations have
such channels) takes the scale with it, and then the others are rounded to zero.

    tensor      one scale for all                       one outlier ruins all
    row         one a row: a token, or an output        an outlier ruins its token
    tile        one for 1 x 128: of a token, 128        an outlier ruins its tile. Weights, which
                features                                have few of them: a block of 128 x 128

A product sums over the last dimension of both its factors, a (m, k) and b (n, k). A scale that is
the same along k can be multiplied in afterwards. One that changes every 128 of k has to be
multiplied in every 128 of k, which is a good moment for something else. Hopper adds up FP8 products
with about 14 significant bits: enough for 128 of them, not for 4096. So each 128 are added to a sum
in fp32, outside of the tensor cores. (`hopper_product` below adds as Hopper does, on any machine.)

A linear layer y = x·wᵀ has three products, and each sums over something else:

                        sums over       its factors
    forward   y         the inputs      x, w
    backward  dx        the outputs     dy, wᵀ
    backward  dw        the tokens      dyᵀ, xᵀ

So x and dy are needed with tiles along their rows, and along their columns. Kept for backward is x
in FP8, with tiles along its rows. For dw it is turned around, and rounded again, with tiles along
the tokens. Scales are rounded up to powers of two, so that this costs next to nothing: another
scale shifts the exponent, and no significant bit is lost (unless a number becomes too small).
`quantize_kernel` does both for dy in one pass over memory. A block of 128 x 128 is the same either
way round.

What stays as it was, and why: norms, GELU or SwiGLU, softmax and the residual stream are no
products, so there is nothing to gain; attention's scores have the widest range of all; the
embedding is a table, and the head's errors would reach the loss undamped; gradients are sums of
many small numbers, and the optimizer's masters keep what is below an update's last bit (python -m
lab.formats shows that).

Several ranks (chapter 05). What is gathered is gathered in FP8, with its scales behind it: a token
has its own. But where ranks share features, they may share a tile: of 128 features each has 32.
There they must agree on the amax, by an all_reduce of the maximum (`agreed_amax`). Otherwise each
would round as if its part were all, and the result would depend on the number of ranks. (With
scales that are powers of two only in what becomes too small: much less than with others.) Where a
rank has a multiple of 128, as in any large model, its tiles are its own, and nothing is sent. In
the same way, micro-batches that are no multiple of 128 tokens would share a tile of tokens.

Sources: Micikevicius et al., FP8 Formats for Deep Learning (2022); DeepSeek-AI, DeepSeek-V3
Technical Report (2024), section 3.3; Ultra-Scale Playbook, "FP8 pretraining".
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import math
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

import common

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:                     # there is no Triton: plain PyTorch runs in its place
    triton, jit = None, lambda function: function

E4M3 = torch.float8_e4m3fn
LARGEST = 448                           # of E4M3, which has no infinity
TILE = 128
SMALLEST = 2.0**-126                    # a scale: the smallest normal number of float32
ALL = 2**31                             # rows or columns of a tile that has no end
# Rows and columns that share a scale: of activations and gradients, and of weights.
SCALINGS = {"tensor": ((ALL, ALL), (ALL, ALL)), "row": ((1, ALL), (1, ALL)),
            "tile": ((1, TILE), (TILE, TILE))}


class Quantized(NamedTuple):
    """A matrix in FP8. x is about values · scales, each scale over its tile."""
    values: torch.Tensor                # (rows, columns), E4M3
    scales: torch.Tensor                # (tiles below each other, tiles in a row), float32
    tile: tuple                         # rows and columns that share a scale


# ----------------------------------------------------------------------------------- plain PyTorch

def tiles_of(shape, tile):
    """How many tiles there are below each other, and in a row."""
    return tuple(max(1, math.ceil(size / part)) for size, part in zip(shape, tile))


def tiled(x, tile):
    """x (rows, columns), with zeros behind it, as (tiles below, rows, tiles in a row, columns)."""
    rows, columns = (min(part, max(size, 1)) for size, part in zip(x.shape, tile))
    down, across = tiles_of(x.shape, tile)
    missing = 0, across * columns - x.shape[1], 0, down * rows - x.shape[0]
    x = F.pad(x, missing) if any(missing) else x
    return x.reshape(down, rows, across, columns)


def untiled(x, shape):
    return x.flatten(2, 3).flatten(0, 1)[:shape[0], :shape[1]]


def amax_of(x, tile):
    """The largest magnitude in each tile of x (rows, columns), float32, without inf and NaN."""
    return tiled(x.float().abs().nan_to_num(0, posinf=0), tile).amax((1, 3))


def scales_of(amax, powers):
    """With which the largest number becomes 448, or with `powers` of two 224 to 448. A tile of
    zeros has the smallest scale, and stays zero."""
    scales = (amax / LARGEST).clamp(min=SMALLEST)
    if powers:
        mantissa, exponent = scales.frexp()                             # mantissa: 0.5 to 1
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    return scales


def quantize(x, tile, powers=True, amax=None):
    """x (rows, columns) as Quantized. What is inf or NaN becomes NaN, and its tile's other numbers
    stay what they are. amax: of the tiles, where other ranks hold a part of them."""
    amax = amax_of(x, tile) if amax is None else amax
    scales = scales_of(amax, powers)
    values = untiled(tiled(x, tile) / scales[:, None, :, None], x.shape)
    values = values.masked_fill(~x.isfinite(), math.nan)                # a cast would make it 448
    return Quantized(values.float().to(E4M3), scales, tile)


def dequantize(x, dtype=torch.float32):
    """(rows, columns)"""
    values = tiled(x.values.to(dtype), x.tile) * x.scales[:, None, :, None].to(dtype)
    return untiled(values, x.values.shape)


def transposed(x, tile):
    """The Quantized of xᵀ, of a Quantized x: rounded again, unless its tiles are square blocks."""
    if x.tile == tile[::-1] and tile[0] == tile[1]:
        return Quantized(x.values.T.contiguous(), x.scales.T.contiguous(), tile)
    return quantize(dequantize(x).T, tile)


def reference_product(a, b, dtype):
    """a (m, k) and b (n, k), both Quantized, to a·bᵀ (m, n), with sums in fp32 or better."""
    wide = torch.promote_types(dtype, torch.float32)
    return (dequantize(a, wide) @ dequantize(b, wide).T).to(dtype)


def hopper_product(a, b, promote=TILE, bits=14):
    """The same as Hopper's tensor cores add: the sum so far and the next 32 products are cut off to
    `bits` significant bits of the largest of them. After `promote` of k the sum moves to fp32 and
    starts at zero; None: never. Slow, and for a look."""
    m, (n, k) = len(a.values), b.values.shape
    total, part = torch.zeros(m, n), torch.zeros(m, n)
    left, right = a.values.float(), b.values.float()
    ones = [Quantized(torch.ones_like(x.values.float()).to(E4M3), *x[1:]) for x in (a, b)]
    left_scales, right_scales = map(dequantize, ones)                   # of each number
    for start in range(0, k, 32):
        these = slice(start, start + 32)
        products = torch.cat([left[:, None, these] * right[None, :, these], part[..., None]], 2)
        _, exponent = products.abs().amax(2, keepdim=True).frexp()
        unit = torch.ldexp(torch.ones(m, n, 1), exponent - bits)
        part = ((products / unit).trunc() * unit).sum(2)
        if start + 32 >= k or promote and (start + 32) % promote == 0:
            total += part * left_scales[:, start, None] * right_scales[None, :, start]
            part = torch.zeros(m, n)
    return total


# ------------------------------------------------------------------------------------- the kernels

@jit
def scale_of(amax, POWERS: tl.constexpr):
    """As `scales_of` does, by the bits of the number: 8 of exponent above 23 of mantissa."""
    scale = tl.maximum(amax / 448, 2.0**-126)
    if POWERS:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)     # rounded up
    return scale


@jit
def rounded(x, INTERPRETED: tl.constexpr):
    """x to E4M3. Triton's interpreter would make 4 of 7.9, since it forgets what rounding carries
    into the exponent, and 384 of NaN. There, round before: to 4 bits, from 2^-9 on, by adding and
    taking off a number whose last bit is 1; and write NaN as its bits."""
    if INTERPRETED:
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        last_bit = tl.maximum(power, 2.0**-6) / 8
        nearest = (x / last_bit + 12582912.0 - 12582912.0) * last_bit
        bits = tl.where(x == x, nearest, 0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        values = tl.where(x == x, bits, 0x7F).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        values = x.to(tl.float8e4nv)
    return values


@jit
def quantize_kernel(x_ptr, values_ptr, scales_ptr, turned_ptr, turned_scales_ptr, rows, columns,
                    x_stride, SQUARE: tl.constexpr, TURN: tl.constexpr, POWERS: tl.constexpr,
                    INTERPRETED: tl.constexpr, TILE: tl.constexpr):
    """A block of TILE x TILE numbers of x: FP8, with a scale a row, or one for all (SQUARE). TURN:
    from these also FP8 of the block turned around, with a scale a column."""
    down, across = tl.program_id(0), tl.program_id(1)
    row = (down * TILE + tl.arange(0, TILE)).to(tl.int64)
    column = across * TILE + tl.arange(0, TILE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    x = tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0)
    x = x.to(tl.float32)
    finite = tl.abs(x) < float("inf")                                   # false of NaN too
    size = tl.where(finite, tl.abs(x), 0)
    x = tl.where(finite, x, float("nan"))

    amax = tl.max(size, 1)
    if SQUARE:
        amax = tl.zeros((TILE,), tl.float32) + tl.max(amax)
    scale = scale_of(amax, POWERS)
    values = rounded(x / scale[:, None], INTERPRETED)
    tl.store(values_ptr + row[:, None] * columns + column[None, :], values, mask=inside)
    if SQUARE:
        tl.store(scales_ptr + down * tl.num_programs(1) + across, tl.max(scale))
    else:
        tl.store(scales_ptr + row * tl.num_programs(1) + across, scale, mask=row < rows)

    if TURN:
        x = tl.where(finite, values.to(tl.float32) * scale[:, None], x)     # as others read it
        scale = scale_of(tl.max(tl.where(finite, tl.abs(x), 0), 0), POWERS)
        values = rounded(x / scale[None, :], INTERPRETED)
        at = column[None, :].to(tl.int64) * rows + row[:, None]
        tl.store(turned_ptr + at, values, mask=inside)
        at = column.to(tl.int64) * tl.num_programs(0) + down
        tl.store(turned_scales_ptr + at, scale, mask=column < columns)


@jit
def product_kernel(a_ptr, a_scales_ptr, b_ptr, b_scales_ptr, c_ptr, m, n, k,
                   a_down, a_across, b_down, b_across, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
                   INTERPRETED: tl.constexpr):
    """c (m, n) = a (m, k) · bᵀ, b (n, k). Of 1 or BLOCK_K rows that share a scale; steps in memory
    from one scale to the next are `down` and `across`, which are 0 where there is none."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_a, at_b = rows.to(tl.int64)[:, None] * k, columns.to(tl.int64)[:, None] * k
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(k, BLOCK_K)):
        inner = (step * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        a = tl.load(a_ptr + at_a + inner, mask=(rows[:, None] < m) & (inner < k), other=0.0)
        b = tl.load(b_ptr + at_b + inner, mask=(columns[:, None] < n) & (inner < k), other=0.0)
        a_scale = tl.load(a_scales_ptr + rows // A_ROWS * a_down + step * a_across,
                          mask=rows < m, other=0)
        b_scale = tl.load(b_scales_ptr + columns // B_ROWS * b_down + step * b_across,
                          mask=columns < n, other=0)
        if INTERPRETED:                                                 # which multiplies in fp16
            a, b = a.to(tl.float32), b.to(tl.float32)
        part = tl.dot(a, b.T)                                           # 128 of k, from zero
        total += part * a_scale[:, None] * b_scale[None, :]             # promoted to fp32
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    at = rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(c_ptr + at, total.to(c_ptr.dtype.element_ty), mask=inside)


# -------------------------------------------------------------------------------------- the launch

def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def has_fp8(device):
    """Whether a GPU can multiply FP8: Ada, Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def runs_here(x):
    """Whether Triton can work on x: on a GPU with FP8, or anywhere under TRITON_INTERPRET=1."""
    fits = triton is not None and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return fits and (has_fp8(x.device) or interpreted())


def quantize_tiles(x, tile, powers=True, turn=False):
    """By the kernel: x (rows, columns) as Quantized, with tiles of 1 x 128 or 128 x 128. turn: also
    the Quantized of xᵀ, from what is left of x, with tiles of 1 x 128; one pass over memory."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = x.shape
    values = torch.empty(rows, columns, dtype=E4M3, device=x.device)
    scales = torch.empty(tiles_of(x.shape, tile), device=x.device)
    turned = values.new_empty(columns, rows) if turn else values
    turned_scales = scales.new_empty(tiles_of((columns, rows), (1, TILE))) if turn else scales
    if x.numel():
        with torch.cuda.device_of(x):
            quantize_kernel[(triton.cdiv(rows, TILE), triton.cdiv(columns, TILE))](
                x, values, scales, turned, turned_scales, rows, columns, x.stride(0),
                tile[0] == TILE, turn, powers, interpreted(), TILE, num_warps=8)
    found = Quantized(values, scales, tile)
    return (found, Quantized(turned, turned_scales, (1, TILE))) if turn else found


def in_fp8(x, tile, powers=True):
    """`quantize`, by the kernel where it can be: it has tiles of 128."""
    if runs_here(x) and tile[1] == TILE:
        return quantize_tiles(x, tile, powers)
    return quantize(x, tile, powers)


def both_ways(x, tile):
    """x (rows, columns) as Quantized, and xᵀ from that: as `transposed(x8, tile)`."""
    if runs_here(x) and tile == (1, TILE):
        return quantize_tiles(x, tile, turn=True)
    x8 = in_fp8(x, tile)
    return x8, transposed(x8, tile)


def turned_around(x8, tile, like):
    """`transposed`, by the kernel where that would round `like`."""
    if runs_here(like) and x8.tile == tile == (1, TILE):
        return quantize_tiles(dequantize(x8), tile, turn=True)[1]
    return transposed(x8, tile)


def product(a, b, dtype):
    """a (m, k) and b (n, k), both Quantized, to a·bᵀ (m, n) of this dtype, with sums in fp32; in
    float64, which only a test can want, in plain PyTorch."""
    (m, k), n = a.values.shape, len(b.values)
    if dtype == torch.float64 or not runs_here(a.scales):
        return reference_product(a, b, dtype)
    c = torch.empty(m, n, dtype=dtype, device=a.values.device)
    steps = [stride if size > 1 else 0 for x in (a, b)
             for stride, size in zip(x.scales.stride(), x.scales.shape)]
    shared = [min(x.tile[0], TILE) for x in (a, b)]         # rows; of "tensor" all steps are 0
    width = TILE if shared[1] == TILE else TILE // 2        # a scale a column takes registers
    if m and n:
        with torch.cuda.device_of(c):
            product_kernel[(triton.cdiv(m, TILE), triton.cdiv(n, width))](
                a.values, a.scales, b.values, b.scales, c, m, n, k, *steps, *shared,
                TILE, width, TILE, interpreted(), num_warps=8, num_stages=3)
    return c


# ------------------------------------------------------------------------------- the linear layers

class Linear8(torch.autograd.Function):
    """Linears that read the same x (..., inputs), with weights (outputs, inputs): a tuple of (...,
    outputs). x is rounded once for all, and kept in FP8."""

    @staticmethod
    def forward(ctx, x, scaling, *weights):
        of_tokens, of_weights = SCALINGS[scaling]
        x8 = in_fp8(x.flatten(0, -2), of_tokens)                        # (tokens, inputs)
        ctx.save_for_backward(x8.values, x8.scales, *weights)
        ctx.scaling, ctx.shape = scaling, x.shape
        return tuple(product(x8, in_fp8(w, of_weights), x.dtype).unflatten(0, x.shape[:-1])
                     for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        values, scales, *weights = ctx.saved_tensors
        of_tokens, of_weights = SCALINGS[ctx.scaling]
        x8 = Quantized(values, scales, of_tokens)
        x8 = turned_around(x8, of_tokens, gradients[0])                 # (inputs, tokens)
        dx, dw = 0, []
        for dy, w in zip(gradients, weights):
            dy8, dy8_turned = both_ways(dy.flatten(0, -2), of_tokens)
            dx = dx + product(dy8, weight_turned(w, of_weights), dy.dtype)
            dw.append(product(dy8_turned, x8, w.dtype))
        return dx.view(ctx.shape), None, *dw


def weight_turned(w, tile):
    """wᵀ (inputs, outputs) as Quantized: a square block's values are those of w."""
    if tile[0] == tile[1]:
        return transposed(in_fp8(w, tile), tile)
    return in_fp8(w.T, tile)


def linear8(x, scaling, *weights):
    """x (..., inputs) times each weight (outputs, inputs), all three products in FP8: a tuple."""
    return Linear8.apply(x, scaling, *weights)


def use_fp8(model, scaling):
    """Let the linears of a common.gpt's blocks multiply in FP8; embedding and head stay. Returns
    whether that takes kernels: else it is the same in plain PyTorch."""

    def multiply(inner, columns, row):
        def project(x):
            return linear8(x, scaling, *[linear.weight for linear in columns])

        inner.project = project                             # in place of the method of that name
        row.forward = lambda x: linear8(x, scaling, row.weight)[0]

    for block in model[1:-1]:
        multiply(block.attn, [block.attn.q, block.attn.k, block.attn.v], block.attn.o)
        multiply(block.mlp, block.mlp.columns, block.mlp.down)
    return runs_here(model.embedding.weight)


# --------------------------------------------------------------------------------- on several ranks

ROWS, SQUARES = SCALINGS["tile"]


def agreed_amax(x, tile, dim, group):
    """The amax of the tiles of x, a part along `dim` of a matrix that the ranks of `group` share in
    equal parts, of whole tiles or within one. Communication: an all_reduce, if a tile is cut."""
    amax, mine = amax_of(x, tile), group.rank() * x.shape[dim] // TILE
    if x.shape[dim] % TILE == 0:
        return amax
    tiles = math.ceil(group.size() * x.shape[dim] / TILE)
    everyones = amax.new_zeros(tiles, *amax.shape)
    everyones[mine] = amax
    dist.all_reduce(everyones, dist.ReduceOp.MAX, group=group)
    return everyones[mine]


def cut_in_fp8(x, tile, dim, group):
    """A part of a matrix as Quantized, with the values that it has in the whole matrix's."""
    if x.shape[dim] % TILE == 0:
        return in_fp8(x, tile)
    return quantize(x, tile, amax=agreed_amax(x, tile, dim, group))


def gathered(values, scales, batch, group, all_gather):
    """Rows of (batch, seq/t) tokens, of all ranks: the Quantized of (batch, seq). In one message:
    of each token its values, and behind them the bytes of its scales."""
    packed = torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], 1)
    packed = all_gather(packed.unflatten(0, (batch, -1)), group).flatten(0, 1)
    values, scales = packed.split([values.shape[1], 4 * scales.shape[1]], 1)
    return Quantized(values.contiguous().view(E4M3), scales.contiguous().view(torch.float32), ROWS)


class GatherColumns8(torch.autograd.Function):
    """Chapter 05's f and the linears behind it: x (batch, seq/t, inputs) is rounded, gathered, and
    multiplied by this rank's rows of each weight. Kept is this rank's part, and gathered again."""

    @staticmethod
    def forward(ctx, x, group, ways, *weights):
        ctx.group, ctx.ways = group, ways
        x8 = in_fp8(x.flatten(0, 1), ROWS)
        ctx.save_for_backward(x8.values, x8.scales, *weights)
        whole = gathered(x8.values, x8.scales, len(x), group, ways[0])
        return tuple(product(whole, cut_in_fp8(w, SQUARES, 0, group), x.dtype).unflatten(
            0, (len(x), -1)) for w in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        values, scales, *weights = ctx.saved_tensors
        (all_gather, reduce_scatter), batch = ctx.ways, len(gradients[0])
        whole = gathered(values, scales, batch, ctx.group, all_gather)
        whole = turned_around(whole, ROWS, gradients[0])
        dx, dw = 0, []
        for dy, w in zip(gradients, weights):
            dy8 = cut_in_fp8(dy.flatten(0, 1), ROWS, 1, ctx.group)
            turned = transposed(cut_in_fp8(w, SQUARES, 0, ctx.group), SQUARES)
            dx = dx + product(dy8, turned, dy.dtype)
            dw.append(product(turned_around(dy8, ROWS, dy), whole, w.dtype))
        return reduce_scatter(dx.unflatten(0, (batch, -1)), ctx.group), None, None, *dw


class RowScatter8(torch.autograd.Function):
    """The linear that ends a sub-layer, and g: x (batch, seq, inputs/t) times this rank's columns
    of the weight; the sum over the ranks, (batch, seq/t, outputs), is no FP8. Its gradient is
    rounded, and gathered."""

    @staticmethod
    def forward(ctx, x, group, ways, weight):
        ctx.group, ctx.ways, ctx.batch = group, ways, len(x)
        x8 = cut_in_fp8(x.flatten(0, 1), ROWS, 1, group)
        ctx.save_for_backward(x8.values, x8.scales, weight)
        partial = product(x8, cut_in_fp8(weight, SQUARES, 1, group), x.dtype)
        return ways[1](partial.unflatten(0, (len(x), -1)), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        values, scales, weight = ctx.saved_tensors
        x8 = turned_around(Quantized(values, scales, ROWS), ROWS, dy)
        mine = in_fp8(dy.flatten(0, 1), ROWS)
        dy8 = gathered(mine.values, mine.scales, ctx.batch, ctx.group, ctx.ways[0])
        turned = transposed(cut_in_fp8(weight, SQUARES, 1, ctx.group), SQUARES)
        dx = product(dy8, turned, dy.dtype).unflatten(0, (ctx.batch, -1))
        return dx, None, None, product(turned_around(dy8, ROWS, dy), x8, weight.dtype)


def in_chapter_05(args, t, all_gather, reduce_scatter):
    """What stands in a sub-layer's place there, with its own all_gather(x, group) and
    reduce_scatter(x, group): the first linears, and the last one; and the model of one GPU. Raises
    Refused where a rank's share of the features is neither of whole tiles nor within one, and where
    one GPU's tiles of tokens would be cut by micro-batches."""
    cfg, tokens = args.model, args.micro_batch * args.model.seq
    if args.micro_batch < args.batch and tokens % TILE:
        raise common.Refused(f"--precision fp8 has --micro-batch {args.micro_batch}: a part "
                             f"of {tokens} tokens, which share tiles of {TILE}",
                             f"--seq {-(-cfg.seq // TILE) * TILE}")
    kv = cfg.dim // cfg.heads * cfg.kv_heads
    alone = "--nproc_per_node 1"
    for cut, works in (cfg.dim, alone), (kv, alone), (cfg.hidden, f"--ffn {TILE * t}"):
        if cut % t or cut // t % TILE and TILE % (cut // t):
            raise common.Refused(f"--precision fp8 cuts {cut} features into tiles of {TILE}, and "
                                 f"--nproc_per_node {t} cuts tiles in two", works)
    ways = all_gather, reduce_scatter
    pair = (lambda x, group, *weights: GatherColumns8.apply(x, group, ways, *weights),
            lambda x, group, weight: RowScatter8.apply(x, group, ways, weight))

    def build(cfg, seed):
        model = common.gpt(cfg, seed)
        use_fp8(model, "tile")
        return model

    return pair, build


def agreements(cfg, tokens, t):
    """What a layer's agreements send for so many tokens, forward and backward: all_reduces, and
    numbers of float32. Of each matrix the weight, twice, and the activation or gradient that is cut
    with it."""
    calls, numbers, kv = 0, 0, cfg.dim // cfg.heads * cfg.kv_heads
    of_mlp = (3 if cfg.gated else 2) * [cfg.hidden]         # up, gate, down
    for cut in (cfg.dim, kv, kv, cfg.dim, *of_mlp):         # q, k, v, o
        if cut // t % TILE:
            calls += 3
            numbers += math.ceil(cut / TILE) * (2 * math.ceil(cfg.dim / TILE) + tokens)
    return calls, numbers


def sent_in_fp8(sent, cfg, micro_batches, batch, t):
    """Chapter 05's {op: (calls, payload, wire)} with gathers in FP8, a byte a number and four a
    scale, and with agreements."""
    share, tokens = (t - 1) / t, batch * cfg.seq
    gathers, _, _ = sent["all_gather"]
    gathered = gathers * tokens * (cfg.dim + 4 * math.ceil(cfg.dim / TILE))
    times, numbers = (micro_batches * cfg.layers * n for n in agreements(cfg, tokens, t))
    calls, payload, wire = sent["all_reduce"]
    reduced = calls + times, payload + 4 * numbers, wire + 2 * share * 4 * numbers
    return sent | {"all_gather": (gathers, gathered, share * gathered), "all_reduce": reduced}
