r"""Flash attention: attention whose scores never reach the GPU's memory.

    out = flash_attention(q, k, v)                  causal unless told otherwise: a model's core is
    out = flash_attention(q, k, v, causal=False)    (PyTorch's SDPA is not, without is_causal=True)

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

in two kernels, so that no two programs add to the same numbers: one holds a block of queries and
walks over the keys (dq), the other the other way round (dk, dv). Both compute the scores and
dweights once more, seven matmuls where plain attention, which keeps its weights, has four: more
FLOPs, and far fewer bytes.

    forward of a head          plain                        flash
    bytes (B a number)         (4 s·d + 4 s·s) B            4 s·d B + 4 s, if k and v are read once
    FLOPs                      4 s·s·d                      4 s·s·d, half of it if causal

So the arithmetic intensity grows with s, to s / B FLOPs a byte, and to s / 2 B if causal. That is
above an H100's ridge point of 295 (see elu.py) from 600 tokens on, in 16 bits, and if causal, which
is the default here, from 1,200 on. (`plain_bytes`, `flash_bytes`, `flops` below.)

What keeps the tensor cores busy: most blocks are seen whole by every row and take no mask; only
those on the diagonal or over the edge do (the loop over PART is unrolled, so each kernel has both).
exp is exp2, with the scale folded in. Of a head, the programs with most to do start first. The
kernel of dk and dv has its scores transposed, (keys, queries): so they come out of one matmul in
the registers from which the next takes them. And from Hopper on, a copy engine loads the blocks.

Grouped queries share a k and v: a program of queries reads its group's; a program of keys adds up
over all heads of its group. Causal is aligned at the end: the last query sees all keys, query i the
first i + 1 + keys - queries of them (torch.nn.attention.bias.causal_lower_right). A row that sees
nothing has out = 0 and lse = -inf. Backward is given `lse`, so that a piece of attention can have
that of the whole: this is ring attention.

Documents packed into one sequence (`lengths`) and      documents of 2 and 3    a window of 2
a sliding window (`window`) are one idea: a query       ██                      ██
sees an interval of keys, from `since` to its own       ████                    ████
place, and neither end ever goes back. So a block's         ██                    ████
first row says where its walk begins, its last one          ████                    ████
from where on no row needs that mask; and `until`,          ██████                    ████
the rows before which each key is seen, does so for a block of keys. What no row sees is not loaded.

Sources: Dao et al., FlashAttention (2022), algorithms 1 and 4; Dao, FlashAttention-2 (2023),
section 3 (its code has `flash_attn_varlen_func`); Milakov and Gimelshein, Online normalizer
calculation for softmax (2018); Ultra-Scale Playbook, "FlashAttention". Windows: Longformer (2020),
Mistral 7B (2023). Masks as intervals: Wang et al., FlashMask (2024).
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import math
import os

import torch
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    jit = triton.jit
    LOG2_E = tl.constexpr(math.log2(math.e))    # exp(x) is exp2(x · LOG2_E): GPUs have an exp2
except ImportError:                     # there is no Triton: the references run in its place
    triton, jit = None, lambda function: function

DTYPES = torch.float32, torch.float16, torch.bfloat16


# ----------------------------------------------------------------------------------- the references


def reference_scores(q, k, causal, since=None):
    """Scaled scores (batch, kv_heads, group, queries, keys), -inf where a query may not look."""
    q = q.unflatten(1, (k.shape[1], -1))
    scores = q @ k[:, :, None].transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(future.triu(1 + k.shape[2] - q.shape[3]), -math.inf)
    if since is not None:
        past = torch.arange(k.shape[2], device=q.device) < since[:, None]
        scores = scores.masked_fill(past, -math.inf)
    return scores


def reference_forward(q, k, v, causal=False, since=None):
    """`flash_forward` in plain PyTorch, with all scores in memory."""
    scores = reference_scores(q, k, causal, since)
    lse = scores.logsumexp(-1)                                      # (batch, kv, group, queries)
    weights = (scores - lse.nan_to_num(neginf=0)[..., None]).exp()
    out = (weights @ v[:, :, None]).flatten(1, 2)
    return out, lse.flatten(1, 2).to(torch.promote_types(lse.dtype, torch.float32))


def reference_backward(dout, q, k, v, out, lse, causal=False, since=None):
    """`flash_backward` in plain PyTorch."""
    group = q.shape[1] // k.shape[1]
    lse = lse.nan_to_num(neginf=math.inf).unflatten(1, (-1, group)).to(q.dtype)
    weights = (reference_scores(q, k, causal, since) - lse[..., None]).exp()
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


def flops(batch, heads, queries, keys, dim, causal, backward=False, pairs=None):
    """FLOPs of the matmuls: two forward, five backward (four, and the scores once more: so all
    kernels are compared, though ours does seven); half of each if causal. Or of so many `pairs` in
    a head of a query and a key that it sees: in documents of n tokens, the sum of n² / 2."""
    pairs = queries * keys * (0.5 if causal else 1) if pairs is None else pairs
    return (5 if backward else 2) * 2 * batch * heads * pairs * dim


# -------------------------------------------------------------------------------------- the kernels


@jit
def addresses(x, batch, head, first, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Pointers to (ROWS, DIM) of one head of x, from row `first` on, and which are inside."""
    ptr, batch_stride, head_stride, row_stride, seq, dim = x
    rows, dims = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, DIM)[None, :]
    ptr += batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return ptr + rows.to(tl.int64) * row_stride + dims, (rows < seq) & (dims < dim)


@jit
def load(x, batch, head, first, ROWS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr):
    """A block of x, zero outside: see `as_argument` for the two kinds of x. WIDE: as float32, since
    Triton's interpreter would multiply the raw bits of bfloat16."""
    if isinstance(x, tl.tensor_descriptor):
        block = x.load([batch, head, first, 0]).reshape(ROWS, DIM)
    else:
        pointers, inside = addresses(x, batch, head, first, ROWS, DIM)
        block = tl.load(pointers, mask=inside, other=0)
    return block.to(tl.float32) if WIDE else block


@jit
def store(x, block, batch, head, first, ROWS: tl.constexpr, DIM: tl.constexpr):
    pointers, inside = addresses(x, batch, head, first, ROWS, DIM)
    tl.store(pointers, block, mask=inside)


@jit
def walk_over_keys(first, seq_q, seq_k, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    """(whole, end): each row of the block sees all keys before `whole`, and none from `end` on."""
    whole, end = seq_k, seq_k
    if CAUSAL:
        whole = tl.minimum(seq_k, tl.maximum(0, first + 1 + seq_k - seq_q))
        end = tl.minimum(seq_k, first + BLOCK_Q + seq_k - seq_q)
    return whole // BLOCK_K * BLOCK_K, end


@jit
def walk_within(since_ptr, rows, first, seq_q, seq_k, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr,
                BLOCK_K: tl.constexpr):
    """The first key that each row sees, and the ends of three parts of the keys: those that some
    rows do not see any more, those that all see, those that some do not see yet."""
    whole, end = walk_over_keys(first, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    since, begin, recent = 0, 0, 0
    if since_ptr is not None:
        since = tl.load(since_ptr + rows, mask=rows < seq_q, other=0)
        begin = tl.load(since_ptr + first) // BLOCK_K * BLOCK_K
        recent = tl.load(since_ptr + tl.minimum(first + BLOCK_Q, seq_q) - 1)
        recent = tl.cdiv(recent, BLOCK_K) * BLOCK_K
        whole = tl.maximum(whole, recent)
    return since, (begin, recent, whole, end)


@jit
def visible(rows, keys, seq_q, seq_k, CAUSAL: tl.constexpr):
    """Whether each row sees each key, of numbers (rows, 1) and (1, keys) or the other way round."""
    return (keys < seq_k) & (keys <= rows + seq_k - seq_q if CAUSAL else True)


@jit
def forward_kernel(q_all, k_all, v_all, out_all, lse_ptr, scale, heads, group, seq_q, seq_k,
                   CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   DIM: tl.constexpr, WIDE: tl.constexpr, since_ptr=None):
    blocks = tl.cdiv(seq_q, BLOCK_Q)
    which = tl.program_id(0) // blocks
    batch, head = which // heads, which % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q      # those with most keys first
    rows = first + tl.arange(0, BLOCK_Q)
    q = load(q_all, batch, head, first, BLOCK_Q, DIM, WIDE)
    largest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)    # of the scores so far, in log2
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, DIM), tl.float32)

    # The keys that all rows see take no mask. Those before them, of documents, and after them do.
    since, ends = walk_within(since_ptr, rows, first, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for PART in tl.static_range(1 if since_ptr is None else 0, 3):
        for start in range(ends[PART], ends[PART + 1], BLOCK_K):
            k = load(k_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            scores = tl.dot(q, k.T, input_precision="ieee")
            if PART != 1:
                keys = (start + tl.arange(0, BLOCK_K))[None, :]
                seen = visible(rows[:, None], keys, seq_q, seq_k, CAUSAL)
                if since_ptr is not None:
                    seen &= since[:, None] <= keys
                scores = tl.where(seen, scores, -float("inf"))
            larger = tl.maximum(largest, tl.max(scores, 1) * scale)
            base = tl.where(larger == -float("inf"), 0, larger)     # nothing seen: no inf - inf
            weights = tl.exp2(scores * scale - base[:, None])
            correction = tl.exp2(largest - base)
            total = total * correction + tl.sum(weights, 1)
            v = load(v_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            out *= correction[:, None]
            out = tl.dot(weights.to(v.dtype), v, out, input_precision="ieee")   # added to out
            largest = larger

    total = tl.where(total == 0, 1, total)
    store(out_all, out / total[:, None], batch, head, first, BLOCK_Q, DIM)
    lse = (largest + tl.log2(total)) / LOG2_E
    tl.store(lse_ptr + which.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


@jit
def dq_kernel(dout_all, q_all, out_all, k_all, v_all, lse_ptr, dq_all, log2_ptr, delta_ptr,
              seq_padded, scale, heads, group, seq_q, seq_k,
              CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
              DIM: tl.constexpr, WIDE: tl.constexpr, since_ptr=None):
    blocks = tl.cdiv(seq_q, BLOCK_Q)
    which = tl.program_id(0) // blocks
    batch, head = which // heads, which % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q
    q = load(q_all, batch, head, first, BLOCK_Q, DIM, WIDE)
    dout = load(dout_all, batch, head, first, BLOCK_Q, DIM, WIDE)
    out = load(out_all, batch, head, first, BLOCK_Q, DIM, WIDE)

    # What each row's weights and their gradients are reckoned from, for dk_dv_kernel too. A row
    # that saw nothing gets an lse of +inf, and so weights of 0.
    rows, which = first + tl.arange(0, BLOCK_Q), which.to(tl.int64)
    lse = tl.load(lse_ptr + which * seq_q + rows, mask=rows < seq_q, other=0)
    lse = tl.where(lse == -float("inf"), float("inf"), lse) * LOG2_E
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(log2_ptr + which * seq_padded + rows, lse)
    tl.store(delta_ptr + which * seq_padded + rows, delta)

    dq = tl.zeros((BLOCK_Q, DIM), tl.float32)
    # The keys that all rows see take no mask. Those before them, of documents, and after them do.
    since, ends = walk_within(since_ptr, rows, first, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for PART in tl.static_range(1 if since_ptr is None else 0, 3):
        for start in range(ends[PART], ends[PART + 1], BLOCK_K):
            k = load(k_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            v = load(v_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            scores = tl.dot(q, k.T, input_precision="ieee")
            weights = tl.exp2(scores * scale - lse[:, None])
            if PART != 1:
                keys = (start + tl.arange(0, BLOCK_K))[None, :]
                seen = visible(rows[:, None], keys, seq_q, seq_k, CAUSAL)
                if since_ptr is not None:
                    seen &= since[:, None] <= keys
                weights = tl.where(seen, weights, 0)
            dweights = tl.dot(dout, v.T, input_precision="ieee")
            dscores = weights * (dweights - delta[:, None])
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    store(dq_all, dq * (scale / LOG2_E), batch, head, first, BLOCK_Q, DIM)


@jit
def dk_dv_kernel(dout_all, q_all, k_all, v_all, dk_all, dv_all, log2_ptr, delta_ptr, seq_padded,
                 scale, heads, group, seq_q, seq_k,
                 CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 DIM: tl.constexpr, WIDE: tl.constexpr, until_ptr=None):
    blocks, kv_heads = tl.cdiv(seq_k, BLOCK_K), heads // group
    which = tl.program_id(0) // blocks
    batch, kv_head = which // kv_heads, which % kv_heads
    first = tl.program_id(0) % blocks * BLOCK_K         # here the first have most to do
    k = load(k_all, batch, kv_head, first, BLOCK_K, DIM, WIDE)
    v = load(v_all, batch, kv_head, first, BLOCK_K, DIM, WIDE)
    dk = tl.zeros((BLOCK_K, DIM), tl.float32)
    dv = tl.zeros((BLOCK_K, DIM), tl.float32)

    # Rows before `begin` see none of these keys, and from `whole` on they see them all. Walk over
    # them for all heads that share k and v, in one loop: two would take more registers.
    begin, whole, recent, end = 0, 0, seq_q, seq_q
    if CAUSAL:
        begin = tl.maximum(0, first + seq_q - seq_k) // BLOCK_Q * BLOCK_Q
        whole = tl.cdiv(tl.maximum(0, first + BLOCK_K - 1 + seq_q - seq_k), BLOCK_Q) * BLOCK_Q
        whole = tl.minimum(whole, tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q)
    if until_ptr is not None:   # rows from `recent` on no longer see all, and from `end` on none
        keys = first + tl.arange(0, BLOCK_K)
        until = tl.load(until_ptr + keys, mask=keys < seq_k, other=0)
        end = tl.load(until_ptr + tl.minimum(first + BLOCK_K, seq_k) - 1)
        recent = tl.maximum(whole, tl.load(until_ptr + first) // BLOCK_Q * BLOCK_Q)
    first_rows = first + tl.arange(0, BLOCK_K) + seq_q - seq_k      # that see each key
    for PART in tl.static_range(2 if until_ptr is None else 3):
        low, high = (whole, begin, recent)[PART], (recent, whole, end)[PART]
        head, start = kv_head * group, low
        for _ in range(group * tl.cdiv(high - low, BLOCK_Q)):
            rows = start + tl.arange(0, BLOCK_Q)
            q = load(q_all, batch, head, start, BLOCK_Q, DIM, WIDE)
            dout = load(dout_all, batch, head, start, BLOCK_Q, DIM, WIDE)
            stats = (batch * heads + head).to(tl.int64) * seq_padded
            lse, delta = tl.load(log2_ptr + stats + rows), tl.load(delta_ptr + stats + rows)
            scores = tl.dot(k, q.T, input_precision="ieee")         # (keys, rows): transposed
            weights = tl.exp2(scores * scale - lse[None, :])
            if PART != 0:
                if CAUSAL:
                    weights = tl.where(first_rows[:, None] <= rows[None, :], weights, 0)
                if until_ptr is not None:
                    weights = tl.where(rows[None, :] < until[:, None], weights, 0)
            dv = tl.dot(weights.to(dout.dtype), dout, dv, input_precision="ieee")
            dweights = tl.dot(v, dout.T, input_precision="ieee")
            dscores = weights * (dweights - delta[None, :])
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
            start += BLOCK_Q
            if start >= high:
                head, start = head + 1, low
    store(dk_all, dk * (scale / LOG2_E), batch, kv_head, first, BLOCK_K, DIM)
    store(dv_all, dv, batch, kv_head, first, BLOCK_K, DIM)


# -------------------------------------------------------------------------------------- the launch

# For a GPU, a kernel and a head dim up to: the rows of the block that a program holds, of those
# that it walks over, and num_warps and num_stages. As large as registers and shared memory allow
# without spilling, and never below what tl.dot can multiply, 16 in each direction.
BLOCKS = {
    80: {"forward": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
         "dk_dv": {64: (128, 32, 8, 2), 128: (64, 32, 8, 2), 256: (32, 32, 8, 1)},
         "dq": {64: (128, 32, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)}},
    90: {"forward": {64: (128, 128, 4, 2), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
         "dk_dv": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (64, 16, 8, 2)},
         "dq": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)}},
    100: {"forward": {64: (128, 128, 8, 2), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
          "dk_dv": {64: (128, 64, 8, 3), 128: (128, 64, 4, 2), 256: (64, 16, 8, 2)},
          "dq": {64: (128, 64, 8, 3), 128: (128, 64, 4, 2), 256: (128, 32, 8, 2)}},
}
PACKED = {(90, "forward"): {64: (128, 64, 4, 3)}}       # with documents, whose mask would spill


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def generation(x):
    """Of the GPU: 90 is Hopper and 100 Blackwell, which load a block of 16-bit numbers by their
    copy engine (TMA) and multiply it from where that puts it. 80 stands for everything else."""
    arch = 90 if interpreted() else triton.runtime.driver.active.get_current_target().arch
    return {90: 90, 100: 100, 103: 100}.get(arch, 80) if x.element_size() == 2 else 80


def blocks(gpu, kernel, x, packed):
    """(held, walked, dim as the kernel has it, the launch's options): a line of BLOCKS for x."""
    block_d = max(16, triton.next_power_of_2(x.shape[-1]))
    choices = BLOCKS[gpu][kernel] | (PACKED.get((gpu, kernel), {}) if packed else {})
    if x.dtype == torch.float32:                # no tensor cores: they would round to 10 bits
        choices = {256: (16, 16, 8, 2)}
    held, walked, warps, stages = next(choices[dim] for dim in choices if block_d <= dim)
    return held, walked, block_d, {"num_warps": warps, "num_stages": stages}


def as_argument(x, gpu, rows, dim):
    """x (batch, heads, seq, dim) as a kernel takes it, to load blocks of (rows, dim). For the copy
    engine a descriptor: one thread asks for the block by its coordinates, and no thread computes an
    address. Without one, pointer, strides and lengths."""
    if gpu == 80 or not x.numel():
        return as_pointer(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, dim])


def as_pointer(x):
    return x, *x.stride()[:3], *x.shape[2:]


def readable(x):
    """x, if its rows are dense and its steps all of 16 bytes, as in any model. Else such a copy."""
    unit = 16 // x.element_size()
    if x.stride(-1) == 1 and all(step > 0 and step % unit == 0 for step in x.stride()[:3]) \
            and x.data_ptr() % 16 == 0:
        return x
    *shape, dim = x.shape
    return x.new_empty(*shape, math.ceil(dim / unit) * unit)[..., :dim].copy_(x)


def flash_forward(q, k, v, causal=False, since=None):
    """Attention, and the log-sum-exp of its scores. Raises ValueError for what does not fit.

    q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim), of any strides. Returns out,
    of q's shape, and lse (batch, heads, queries) in float32. since: as `seen_from` gives it.
    """
    check(q, k, v)
    if not runs_here(q):
        return reference_forward(q, k, v, causal, since)
    q, k, v = map(readable, (q, k, v))
    batch, heads, seq_q, dim = q.shape
    out, since = torch.empty_like(q), () if since is None else (since,)
    lse = q.new_empty(batch, heads, seq_q, dtype=torch.float32)
    with torch.cuda.device_of(q):
        gpu = generation(q)
        held, walked, block_d, options = blocks(gpu, "forward", q, since)
        if q.numel():
            forward_kernel[(triton.cdiv(seq_q, held) * batch * heads,)](
                as_argument(q, gpu, held, block_d), as_argument(k, gpu, walked, block_d),
                as_argument(v, gpu, walked, block_d), as_pointer(out), lse,
                dim**-0.5 * LOG2_E.value, heads, heads // k.shape[1], seq_q, k.shape[2],
                causal, held, walked, block_d, interpreted(), *since, **options)
    return out, lse


def flash_backward(dout, q, k, v, out, lse, causal=False, since=None):
    """Gradients of (q, k, v), from that of out. Raises ValueError for what does not fit.

    dout and out of q's shape and dtype, of any strides; lse (batch, heads, queries) in float32.
    `out` and `lse` may be those of more keys than `k` has: then this is the part that these keys
    contribute (ring attention).
    """
    check(q, k, v)
    of_lse = q.shape[:3], torch.promote_types(q.dtype, torch.float32)
    for name, x, (shape, dtype) in (("dout", dout, (q.shape, q.dtype)),
                                    ("out", out, (q.shape, q.dtype)), ("lse", lse, of_lse)):
        expect(x.shape == shape and x.dtype == dtype and x.device == q.device, name, x,
               f"{tuple(shape)}, {dtype} on {q.device}")
    if not runs_here(q):
        return reference_backward(dout, q, k, v, out, lse, causal, since)
    dout, q, k, v, out = map(readable, (dout, q, k, v, out))
    lse = lse.contiguous()
    (batch, heads, seq_q, dim), (kv_heads, seq_k) = q.shape, k.shape[1:3]
    keys = torch.arange(seq_k, device=q.device, dtype=torch.int32)  # rows before `until` see each
    since = () if since is None else (since,)
    until = [torch.searchsorted(x, keys, right=True, out_int32=True) for x in since]
    dq, dk, dv = map(torch.empty_like, (q, k, v))       # laid out in memory as they are

    with torch.cuda.device_of(q):
        gpu = generation(q)
        held, walked, block_d, options = blocks(gpu, "dq", q, since)
        seq_padded = triton.cdiv(seq_q, held) * held    # whole blocks, for dk_dv_kernel to read
        log2, delta = q.new_empty(2, batch * heads * seq_padded, dtype=torch.float32)
        numbers = (seq_padded, dim**-0.5 * LOG2_E.value, heads, heads // kv_heads, seq_q, seq_k)
        if q.numel():
            of_queries = [as_argument(x, gpu, held, block_d) for x in (dout, q, out)]
            of_keys = [as_argument(x, gpu, walked, block_d) for x in (k, v)]
            dq_kernel[(triton.cdiv(seq_q, held) * batch * heads,)](
                *of_queries, *of_keys, lse, as_pointer(dq), log2, delta, *numbers,
                causal, held, walked, block_d, interpreted(), *since, **options)
        held, walked, block_d, options = blocks(gpu, "dk_dv", q, since)
        if k.numel():
            of_queries = [as_argument(x, gpu, walked, block_d) for x in (dout, q)]
            of_keys = [as_argument(x, gpu, held, block_d) for x in (k, v)]
            dk_dv_kernel[(triton.cdiv(seq_k, held) * batch * kv_heads,)](
                *of_queries, *of_keys, as_pointer(dk), as_pointer(dv), log2, delta, *numbers,
                causal, walked, held, block_d, interpreted(), *until, **options)
    return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, since):
        out, lse = flash_forward(q, k, v, causal, since)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.seen = causal, since
        return out

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, dout):
        return *flash_backward(dout, *ctx.saved_tensors, *ctx.seen), None, None


def flash_attention(q, k, v, causal=True, lengths=None, window=None):
    """Attention, differentiable; causal unless told otherwise, as a model's core is.

    q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim), of any strides; returns q's
    shape. lengths: cumulative, from 0 to seq, of the documents in the sequence: integers (documents
    + 1,). No token sees another document. window: a query sees so many keys, its own the last. Both
    want causal, and lengths as many keys as queries. Raises ValueError for what does not fit; but
    for numbers in `lengths` only on the CPU, from where they are copied: a GPU would be waited for.
    """
    check(q, k, v)
    return FlashAttention.apply(q, k, v, causal, seen_from(q, k, causal, lengths, window))


def runs_here(x):
    """Whether Triton can work on x: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    return triton is not None and x.dtype in DTYPES and (x.is_cuda or interpreted())


def expect(fits, name, x, expected):
    """Raise ValueError, with the shape and what was expected, unless x fits."""
    if not fits:
        raise ValueError(f"flash_attention: {name} of shape {tuple(x.shape)} is {x.dtype} on "
                         f"{x.device}; expected {expected}")


def check(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        expect(x.ndim == 4 and x.dtype == q.dtype and x.device == q.device, name, x,
               f"(batch, heads, seq, dim), {q.dtype} on {q.device}")
    (batch, heads, _, dim), (kv_heads, keys) = q.shape, k.shape[1:3]
    expect(q.dtype in (*DTYPES, torch.float64) and 16 <= dim <= 256, "q", q,
           "float32, float16 or bfloat16, and a dim of 16 to 256")
    expect(k.shape == (batch, kv_heads, keys, dim) and heads * kv_heads and not heads % kv_heads,
           "k", k, f"({batch}, a divisor of {heads}, keys, {dim}), as q is {tuple(q.shape)}")
    expect(v.shape == k.shape, "v", v, f"{tuple(k.shape)}, as k")


def seen_from(q, k, causal, lengths=None, window=None):
    """The first key that each query sees, (queries,) in int32, never descending; or None, where
    that is always key 0: without documents and window. Raises ValueError for what does not fit."""
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"flash_attention: window is {window} and causal {causal}; expected 1 key "
                         "or more, and causal")
    rows = torch.arange(queries, device=q.device)
    since = (rows + keys - queries + 1 - (window or keys)).clamp(min=0)
    if lengths is None:
        return since.int() if window else None
    expect(causal and keys == queries, "lengths", lengths,
           f"causal and {queries} keys, one a query, not causal {causal} and {keys} keys")
    expect(lengths.ndim == 1 and len(lengths) > 1 and lengths.dtype in (torch.int32, torch.int64)
           and lengths.device in (torch.device("cpu"), q.device), "lengths", lengths,
           f"(documents + 1,), int32 or int64, on cpu or {q.device}")
    if lengths.device.type == "cpu":
        first, *between, last = lengths.tolist()
        expect([first, *between, last] == sorted([0, *between, queries]), "lengths", lengths,
               f"to ascend from 0 to {queries}, not from {first} to {last}")
    starts = lengths.to(rows).contiguous()  # of the documents that have begun, the last one's first
    return since.maximum(starts[torch.searchsorted(starts, rows, right=True) - 1]).int()
