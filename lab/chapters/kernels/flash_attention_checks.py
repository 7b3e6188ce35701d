"""Checks of the exercises of kernels/flash_attention.py."""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

from unittest import mock

import torch

from lab.chapters.checking import random

try:
    import triton
    import triton.language as tl
except ImportError:                     # then there is nothing to be graded here
    triton = None

RESULTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")


def walk_kernel(ends_ptr, seq_q, seq_k, WALK: tl.constexpr, CAUSAL: tl.constexpr,
                BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    block = tl.program_id(0)
    whole, end = WALK(block * BLOCK_Q, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    tl.store(ends_ptr + 2 * block, whole)
    tl.store(ends_ptr + 2 * block + 1, end)


def ends(chapter, seq_q, seq_k, causal, block_k):
    """(whole, end) of each block of 16 queries. Of an end, which block of keys is the last counts:
    an end of 0 or less is none."""
    ends = torch.zeros(-(-seq_q // 16), 2, dtype=torch.int32)
    triton.jit(walk_kernel)[(len(ends),)](ends, seq_q, seq_k, chapter.walk_over_keys, causal, 16,
                                           block_k)
    blocks = [(whole, -(-max(end, 0) // block_k)) for whole, end in ends.tolist()]
    return {f"queries from {16 * i} on": {"whole": whole, "blocks of keys up to the end": end}
            for i, (whole, end) in enumerate(blocks)}


def visible_kernel(seen_ptr, seq_q, seq_k, VISIBLE: tl.constexpr, CAUSAL: tl.constexpr):
    rows, keys = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    seen = (rows + keys >= 0) & VISIBLE(rows, keys, seq_q, seq_k, CAUSAL)
    tl.store(seen_ptr + 16 * rows + keys, tl.where(seen, 1, 0))


def seen(chapter, seq_q, seq_k, causal):
    """Of rows of 8 and keys of 16, some of which are past the end."""
    seen = torch.zeros(8, 16, dtype=torch.int32)
    triton.jit(visible_kernel)[(1,)](seen, seq_q, seq_k, chapter.visible, causal)
    return {f"keys of row {i}": row.nonzero().flatten().tolist()
            for i, row in enumerate(seen[:seq_q])}


def all_are_seen(chapter):
    """In place of two other exercises, where nothing is causal: all blocks take a mask, which hides
    what is past the end."""
    return mock.patch.multiple(
        chapter, walk_over_keys=lambda first, seq_q, seq_k, *more: (0, seq_k),
        visible=lambda rows, keys, seq_q, seq_k, causal: (rows > -1) & (keys < seq_k))


def forward_alone(chapter):
    with all_are_seen(chapter):
        return forward(chapter, (1, 4, 24, 40), (1, 2, 70, 40), scale=4)


def backward_alone(chapter):
    with all_are_seen(chapter):
        return backward(chapter, (1, 4, 20, 16), (1, 2, 50, 16))


def backward_by_definition(chapter):
    dout, q = random(2, 2, 4, 5, 16)
    k, v = random(2, 2, 2, 7, 16)
    out, lse = random(2, 4, 5, 16), random(2, 4, 5) + 3
    return dict(zip(GRADIENTS, chapter.reference_backward(dout, q, k, v, out, lse, True)))


def gradients_by(chapter, backward, dout, q, k, v):
    """Where rows see nothing."""
    gradients = backward(dout, q, k, v, *chapter.reference_forward(q, k, v, True), True)
    return dict(zip(GRADIENTS, gradients))


def definition_where_rows_see_nothing(chapter):
    tensors = *random(2, 1, 2, 5, 16), *random(2, 1, 2, 3, 16)
    return gradients_by(chapter, chapter.reference_backward, *tensors)


def backward_where_rows_see_nothing(chapter):
    tensors = *random(2, 1, 1, 40, 16).float(), *random(2, 1, 1, 20, 16).float()
    return gradients_by(chapter, chapter.flash_backward, *tensors)


def bytes_of(chapter, name):
    return [getattr(chapter, name)(1000, 3000, 64, width) for width in (2, 4)]


def forward(chapter, queries, keys, *causal, scale=1):
    """Shapes (batch, heads, seq, head_dim)."""
    q = scale * random(*queries).float()
    return dict(zip(RESULTS, chapter.flash_forward(q, *random(2, *keys).float(), *causal)))


def forward_of_infinite_values(chapter):
    q, k = random(2, 1, 1, 48, 16).float()
    v = random(1, 1, 48, 16).float().index_fill(2, torch.arange(32, 48), torch.inf)
    return chapter.flash_forward(q, k, v, True)[0]


def forward_of_equal_keys(chapter):
    q, k = 200 * random(1, 1, 20, 16).float(), random(1, 1, 1, 16).float()
    v = random(1, 1, 50, 16).float()
    return dict(zip(RESULTS, chapter.flash_forward(q, k.expand(1, 1, 50, 16), v)))


def forward_in_float16(chapter):
    q, (k, v) = random(2, 1, 150, 130).half(), random(2, 2, 1, 200, 130).half()
    return dict(zip(RESULTS, chapter.flash_forward(q, k, v, True)))


def backward(chapter, queries, keys, *causal):
    dout, q = random(2, *queries).float()
    k, v = random(2, *keys).float()
    out, lse = random(*queries).float(), random(*queries[:3]).float() + 3
    return dict(zip(GRADIENTS, chapter.flash_backward(dout, q, k, v, out, lse, *causal)))


def backward_in_float16(chapter):
    dout, q = random(2, 2, 2, 150, 16).half()
    k, v = random(2, 2, 2, 200, 16).half()
    out, lse = random(2, 2, 150, 16).half(), random(2, 2, 150).float() + 3
    return dict(zip(GRADIENTS, chapter.flash_backward(dout, q, k, v, out, lse, True)))
