r"""Flash attention: attention whose scores never reach the GPU's memory.

    scores = q · kᵀ / sqrt(d)       weights = softmax(scores)       out = weights · v

Plain attention (chapter 01) writes the scores to memory, reads them for the softmax, writes the
weights and reads them for the last matmul: four trips of s x s numbers, where all else is s x d.
Here a program holds a block of queries and walks over the keys, block by block:

                   keys, values
                 k0  k1  k2  k3           for each block of keys:
    queries  q0  ██                         scores = q · kᵀ                  on the chip
             q1  ██  ██        (causal)     m = max(m, scores' maximum)
             q2  ██  ██  ██                 weights = exp(scores - m)
             q3  ██  ██  ██  ██             l, out = l, out · exp(m before - m)    the correction
                                            l += sum of weights;  out += weights · v
                                          at the end: out / l,  lse = m + log(l)

This is the online softmax. The maximum that the softmax subtracts is known only at the end, so what
was added up under an older one is corrected by exp(m before - m). Nothing but out and one number a
row is stored: lse, the logarithm of the sum of exp(scores). Backward needs no more than that to
compute any block of weights again, since weights = exp(scores - lse):

    dv = weightsᵀ · dout        dweights = dout · vᵀ
    dscores = weights · (dweights - delta),  delta = the row's sum of dout · out
    dq = dscores · k / sqrt(d)  dk = dscoresᵀ · q / sqrt(d)

in two kernels, so that no two programs add to the same numbers: one holds a block of keys and walks
over the queries (dk, dv), the other the other way round (dq). Both compute the scores once more:
more FLOPs than plain attention, and far fewer bytes.

    forward of a head          plain                        flash
    bytes (B a number)         (4 s·d + 4 s·s) B            4 s·d B + 4 s, if k and v are read once
    FLOPs                      4 s·s·d                      4 s·s·d, half of it if causal

So the arithmetic intensity grows with s, to s / B FLOPs a byte: above an H100's ridge point of 295
(see elu.py) from six hundred tokens on, in 16 bits. (`plain_bytes`, `flash_bytes`, `flops` below.)

Grouped queries share a k and v: a program of queries reads its group's; a program of keys adds up
over all heads of its group. Causal is aligned at the end: the last query sees all keys, query i the
first i + 1 + keys - queries of them (torch.nn.attention.bias.causal_lower_right). A row that sees
nothing has out = 0 and lse = -inf. And since backward takes `lse` as an argument, a piece of
attention can be computed with the lse of the whole: that is ring attention (chapter 06).

Sources: Dao et al., FlashAttention (2022), algorithms 1 and 4; Dao, FlashAttention-2 (2023),
section 3; Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Ultra-Scale
Playbook, "FlashAttention".
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import math
import os

import torch

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:                     # there is no Triton: the references run in its place
    triton, jit = None, lambda function: function

DTYPES = torch.float32, torch.float16, torch.bfloat16
# exp(x) is exp2(x · LOG2_E), and exp2 is what GPUs have. Kernels write it out: 1.4426950408889634.
LOG2_E = math.log2(math.e)


# ----------------------------------------------------------------------------------- the references


def reference_scores(q, k, causal):
    """Scaled scores (batch, kv_heads, group, queries, keys), -inf where a query may not look."""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = q @ k[:, :, None].transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(future.triu(1 + k.shape[2] - q.shape[3]), -math.inf)
    return scores


def reference_forward(q, k, v, causal=False):
    """`flash_forward` in plain PyTorch, with all scores in memory."""
    scores = reference_scores(q, k, causal)
    lse = scores.logsumexp(-1)                                      # (batch, kv, group, queries)
    weights = (scores - lse.nan_to_num(neginf=0)[..., None]).exp()
    out = (weights @ v[:, :, None]).flatten(1, 2)
    return out, lse.flatten(1, 2).to(torch.promote_types(lse.dtype, torch.float32))


def reference_backward(dout, q, k, v, out, lse, causal=False):
    """`flash_backward` in plain PyTorch."""
    group = q.shape[1] // k.shape[1]
    lse = lse.nan_to_num(neginf=math.inf).unflatten(1, (-1, group)).to(q.dtype)
    weights = (reference_scores(q, k, causal) - lse[..., None]).exp()
    by_group = lambda x: x.unflatten(1, (-1, group))                # (batch, kv, group, queries, d)
    dout, out, grouped = by_group(dout), by_group(out), by_group(q)
    dv = (weights.transpose(-1, -2) @ dout).sum(2)
    dweights = dout @ v[:, :, None].transpose(-1, -2)
    dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dq = (dscores @ k[:, :, None]).flatten(1, 2)
    dk = (dscores.transpose(-1, -2) @ grouped).sum(2)
    return dq, dk, dv


# ------------------------------------------------------------------------------------- the formulas


def plain_bytes(queries, keys, dim, width):
    """Bytes that the forward of one head moves with its scores in memory. width: of a number."""
    return (2 * queries * dim + 2 * keys * dim + 4 * queries * keys) * width


def flash_bytes(queries, keys, dim, width):
    """The same without, if k and v are read once: the blocks of queries share a cache."""
    return (2 * queries * dim + 2 * keys * dim) * width + 4 * queries


def flops(batch, heads, queries, keys, dim, causal, backward=False):
    """FLOPs of the matmuls: two forward, five backward; half of each if causal and square."""
    matmuls = 5 if backward else 2
    return matmuls * 2 * batch * heads * queries * keys * dim * (0.5 if causal else 1)


# -------------------------------------------------------------------------------------- the kernels


@jit
def load_rows(ptr, rows, row_stride, dims, seq, dim, WIDE: tl.constexpr):
    """(rows, dims) of a matrix, zero outside. WIDE: as float32, since Triton's interpreter would
    multiply the raw bits of bfloat16."""
    inside = (rows[:, None] < seq) & (dims[None, :] < dim)
    x = tl.load(ptr + rows[:, None].to(tl.int64) * row_stride + dims[None, :], mask=inside, other=0)
    return x.to(tl.float32) if WIDE else x


@jit
def visible(rows, keys, seq_q, seq_k, CAUSAL: tl.constexpr):
    """Which keys each row may look at, (rows, keys)."""
    seen = (keys[None, :] < seq_k) & (rows[:, None] < seq_q)
    return seen & (keys[None, :] <= rows[:, None] + seq_k - seq_q) if CAUSAL else seen


@jit
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
                   q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
                   out_batch, out_head, out_row, scale, heads, group, seq_q, seq_k, dim,
                   CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    which = tl.program_id(1)
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    q_ptr += batch * q_batch + head * q_head
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    out_ptr += batch * out_batch + head * out_head

    first = tl.program_id(0) * BLOCK_Q
    rows, dims = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr, rows, q_row, dims, seq_q, dim, WIDE)
    largest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    end = tl.minimum(seq_k, first + BLOCK_Q + seq_k - seq_q) if CAUSAL else seq_k
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_rows(k_ptr, keys, k_row, dims, seq_k, dim, WIDE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale             # in log2
        scores = tl.where(visible(rows, keys, seq_q, seq_k, CAUSAL), scores, -float("inf"))

        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == -float("inf"), 0, larger)     # nothing seen yet: no inf - inf
        weights = tl.exp2(scores - base[:, None])
        correction = tl.exp2(largest - base)
        total = total * correction + tl.sum(weights, 1)
        v = load_rows(v_ptr, keys, v_row, dims, seq_k, dim, WIDE)
        out = out * correction[:, None]
        out += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = larger

    out /= tl.where(total == 0, 1, total)[:, None]
    lse = (largest + tl.log2(tl.where(total == 0, 1, total))) / 1.4426950408889634
    here = (rows[:, None] < seq_q) & (dims[None, :] < dim)
    tl.store(out_ptr + rows[:, None].to(tl.int64) * out_row + dims[None, :], out, mask=here)
    tl.store(lse_ptr + which.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


@jit
def weights_and_dscores(q, k, v, dout, lse, delta, seen, scale):
    """Of one block, from what forward has left: (rows, keys) each."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    weights = tl.exp2(tl.where(seen, scores, -float("inf")) - lse[:, None])
    dweights = tl.dot(dout, tl.trans(v), input_precision="ieee")
    return weights, weights * (dweights - delta[:, None])


@jit
def load_lse(lse_ptr, delta_ptr, rows, seq_q):
    """In log2, and +inf for a row that saw nothing: its weights are 0 then. And delta."""
    lse = tl.load(lse_ptr + rows, mask=rows < seq_q, other=0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse) * 1.4426950408889634
    return lse, tl.load(delta_ptr + rows, mask=rows < seq_q, other=0)


@jit
def dk_dv_kernel(dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                 dout_batch, dout_head, dout_row, q_batch, q_head, q_row, k_batch, k_head, k_row,
                 v_batch, v_head, v_row, scale, heads, group, seq_q, seq_k, dim,
                 CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    which, kv_heads = tl.program_id(1), heads // group
    batch, kv_head = (which // kv_heads).to(tl.int64), (which % kv_heads).to(tl.int64)
    first = tl.program_id(0) * BLOCK_K
    keys, dims = first + tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_D)
    k = load_rows(k_ptr + batch * k_batch + kv_head * k_head, keys, k_row, dims, seq_k, dim, WIDE)
    v = load_rows(v_ptr + batch * v_batch + kv_head * v_head, keys, v_row, dims, seq_k, dim, WIDE)
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)

    begin = tl.maximum(first + seq_q - seq_k, 0) // BLOCK_Q * BLOCK_Q if CAUSAL else 0
    for i in range(0, group):
        head = kv_head * group + i
        q_here, dout_here = q_ptr + batch * q_batch + head * q_head, \
            dout_ptr + batch * dout_batch + head * dout_head
        row_of_head = (batch * heads + head) * seq_q
        for start in range(begin, seq_q, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q = load_rows(q_here, rows, q_row, dims, seq_q, dim, WIDE)
            dout = load_rows(dout_here, rows, dout_row, dims, seq_q, dim, WIDE)
            lse, delta = load_lse(lse_ptr + row_of_head, delta_ptr + row_of_head, rows, seq_q)
            seen = visible(rows, keys, seq_q, seq_k, CAUSAL)
            weights, dscores = weights_and_dscores(q, k, v, dout, lse, delta, seen, scale)
            dv += tl.dot(tl.trans(weights).to(dout.dtype), dout, input_precision="ieee")
            dk += tl.dot(tl.trans(dscores).to(q.dtype), q, input_precision="ieee")

    here = (which.to(tl.int64) * seq_k + keys[:, None]) * dim + dims[None, :]
    inside = (keys[:, None] < seq_k) & (dims[None, :] < dim)
    tl.store(dk_ptr + here, dk * (scale / 1.4426950408889634), mask=inside)
    tl.store(dv_ptr + here, dv, mask=inside)


@jit
def dq_kernel(dout_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr,
              dout_batch, dout_head, dout_row, q_batch, q_head, q_row, k_batch, k_head, k_row,
              v_batch, v_head, v_row, scale, heads, group, seq_q, seq_k, dim,
              CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
              BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    which = tl.program_id(1)
    batch, head = (which // heads).to(tl.int64), (which % heads).to(tl.int64)
    k_ptr += batch * k_batch + head // group * k_head
    v_ptr += batch * v_batch + head // group * v_head
    q_ptr += batch * q_batch + head * q_head
    dout_ptr += batch * dout_batch + head * dout_head

    first = tl.program_id(0) * BLOCK_Q
    rows, dims = first + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    q = load_rows(q_ptr, rows, q_row, dims, seq_q, dim, WIDE)
    dout = load_rows(dout_ptr, rows, dout_row, dims, seq_q, dim, WIDE)
    row_of_head = which.to(tl.int64) * seq_q
    lse, delta = load_lse(lse_ptr + row_of_head, delta_ptr + row_of_head, rows, seq_q)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    end = tl.minimum(seq_k, first + BLOCK_Q + seq_k - seq_q) if CAUSAL else seq_k
    for start in range(0, end, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        k = load_rows(k_ptr, keys, k_row, dims, seq_k, dim, WIDE)
        v = load_rows(v_ptr, keys, v_row, dims, seq_k, dim, WIDE)
        seen = visible(rows, keys, seq_q, seq_k, CAUSAL)
        _, dscores = weights_and_dscores(q, k, v, dout, lse, delta, seen, scale)
        dq += tl.dot(dscores.to(k.dtype), k, input_precision="ieee")

    here = (row_of_head + rows[:, None]) * dim + dims[None, :]
    inside = (rows[:, None] < seq_q) & (dims[None, :] < dim)
    tl.store(dq_ptr + here, dq * (scale / 1.4426950408889634), mask=inside)


# -------------------------------------------------------------------------------------- the launch


def blocks(dim, dtype, backward=False):
    """(held, walked, BLOCK_D, num_warps, num_stages): the block that a program holds, those that it
    walks over. As large as registers and shared memory allow without spilling, and never below
    what tl.dot can multiply, 16 in each direction."""
    padded = max(16, triton.next_power_of_2(dim))
    if dtype == torch.float32:
        return 16, 16, padded, 8, 1
    if backward:
        large = {256: (32, 32, 256, 8, 1), 128: (64, 32, 128, 8, 1)}
        return large.get(padded, (64, 32, padded, 8, 2))
    large = {256: (64, 32, 256, 8, 2), 128: (128, 64, 128, 8, 2)}
    return large.get(padded, (128, 64, padded, 8, 2))


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def last_dense(x):
    """x with its last dimension contiguous, as the kernels read it: itself, nearly always."""
    return x if x.stride(-1) == 1 else x.contiguous()


def flash_forward(q, k, v, causal=False):
    """Attention, and the log-sum-exp of its scores. Raises ValueError for what does not fit.

    q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim), of any strides. Returns out,
    of q's shape, and lse (batch, heads, queries) in float32.
    """
    check(q, k, v)
    if not runs_here(q):
        return reference_forward(q, k, v, causal)
    q, k, v = map(last_dense, (q, k, v))
    batch, heads, seq_q, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq_q, device=q.device)
    block_q, block_k, block_d, warps, stages = blocks(dim, q.dtype)
    if q.numel():
        forward_kernel[(triton.cdiv(seq_q, block_q), batch * heads)](
            q, k, v, out, lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
            dim**-0.5 * LOG2_E, heads, heads // k.shape[1], seq_q, k.shape[2], dim, causal,
            block_q, block_k, block_d, interpreted(), num_warps=warps, num_stages=stages)
    return out, lse


def flash_backward(dout, q, k, v, out, lse, causal=False):
    """Gradients of (q, k, v), from that of out. `out` and `lse` may be those of more keys than `k`
    has: then this is the part that these keys contribute (ring attention)."""
    check(q, k, v)
    if not runs_here(q):
        return reference_backward(dout, q, k, v, out, lse, causal)
    dout, q, k, v = map(last_dense, (dout, q, k, v))
    lse = lse.contiguous()
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    held, walked, block_d, warps, stages = blocks(dim, q.dtype, backward=True)
    delta = (dout.float() * out.float()).sum(-1)        # (batch, heads, queries)
    strides = *dout.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3]
    shapes = dim**-0.5 * LOG2_E, heads, heads // kv_heads, seq_q, seq_k, dim
    if k.numel():
        dk_dv_kernel[(triton.cdiv(seq_k, held), batch * kv_heads)](
            dout, q, k, v, lse, delta, dk, dv, *strides, *shapes, causal, walked, held, block_d,
            interpreted(), num_warps=warps, num_stages=stages)
    if q.numel():
        dq_kernel[(triton.cdiv(seq_q, held), batch * heads)](
            dout, q, k, v, lse, delta, dq, *strides, *shapes, causal, held, walked, block_d,
            interpreted(), num_warps=warps, num_stages=stages)
    return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = flash_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout):
        return *flash_backward(dout, *ctx.saved_tensors, ctx.causal), None


def flash_attention(q, k, v, causal=True):
    """Attention, differentiable. q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim),
    of any strides; returns q's shape. Raises ValueError for what does not fit; see `check`."""
    return FlashAttention.apply(q, k, v, causal)


def runs_here(x):
    """Whether Triton can work on x: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    return triton is not None and x.dtype in DTYPES and (x.is_cuda or interpreted())


def check(q, k, v):
    """Raise ValueError, with the shape and what was expected, for tensors that do not fit."""
    shapes = {name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"flash_attention: {name} has shape {shapes[name]}; expected (batch, "
                             "heads, seq, dim)")
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"flash_attention: {name} of shape {shapes[name]} is {x.dtype} on "
                             f"{x.device}; expected {q.dtype} on {q.device}, as q")
    batch, heads, _, dim = q.shape
    if q.dtype not in (*DTYPES, torch.float64):
        raise ValueError(f"flash_attention: q of shape {shapes['q']} is {q.dtype}; expected "
                         "float32, float16 or bfloat16")
    if not 16 <= dim <= 256:
        raise ValueError(f"flash_attention: q has shape {shapes['q']}; expected a dim of 16 to "
                         "256")
    if k.shape[0] != batch or k.shape[3] != dim or k.shape[1] == 0 or heads % k.shape[1]:
        raise ValueError(f"flash_attention: k has shape {shapes['k']}; expected ({batch}, a "
                         f"divisor of {heads}, keys, {dim}), as q has shape {shapes['q']}")
    if v.shape != k.shape:
        raise ValueError(f"flash_attention: v has shape {shapes['v']}; expected {shapes['k']}, as "
                         "k")
