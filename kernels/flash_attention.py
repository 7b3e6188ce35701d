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

What keeps the tensor cores busy: most blocks are seen whole by every row and are walked over
without a mask; only those on the diagonal or over the edge take one (the loop over MASKED is
unrolled, so each kernel has both). exp is exp2, with the scale folded in. Of a head, the programs
with most to do start first. The kernel of dk and dv has its scores transposed, (keys, queries): so
they come out of one matmul in the registers from which the next takes them. And from Hopper on, a
copy engine loads the blocks (`as_argument`).

Grouped queries share a k and v: a program of queries reads its group's; a program of keys adds up
over all heads of its group. Causal is aligned at the end: the last query sees all keys, query i the
first i + 1 + keys - queries of them (torch.nn.attention.bias.causal_lower_right). A row that sees
nothing has out = 0 and lse = -inf. And since backward takes `lse` as an argument, a piece of
attention can be computed with the lse of the whole: that is ring attention.

Sources: Dao et al., FlashAttention (2022), algorithms 1 and 4; Dao, FlashAttention-2 (2023),
section 3; Milakov and Gimelshein, Online normalizer calculation for softmax (2018); Ultra-Scale
Playbook, "FlashAttention".
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
    """FLOPs of the matmuls: two forward, five backward (four, and the scores once more: so all
    kernels are compared, though ours does seven); half of each if causal."""
    matmuls = 5 if backward else 2
    return matmuls * 2 * batch * heads * queries * keys * dim * (0.5 if causal else 1)


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
def visible(rows, keys, seq_q, seq_k, CAUSAL: tl.constexpr):
    """Whether each row sees each key, of numbers (rows, 1) and (1, keys) or the other way round."""
    return (keys < seq_k) & (keys <= rows + seq_k - seq_q if CAUSAL else True)


@jit
def forward_kernel(q_all, k_all, v_all, out_all, lse_ptr, scale, heads, group, seq_q, seq_k,
                   CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   DIM: tl.constexpr, WIDE: tl.constexpr):
    blocks = tl.cdiv(seq_q, BLOCK_Q)
    which = tl.program_id(0) // blocks
    batch, head = which // heads, which % heads
    first = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_Q      # those with most keys first
    rows = first + tl.arange(0, BLOCK_Q)
    q = load(q_all, batch, head, first, BLOCK_Q, DIM, WIDE)
    largest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)    # of the scores so far, in log2
    total = tl.zeros((BLOCK_Q,), tl.float32)
    out = tl.zeros((BLOCK_Q, DIM), tl.float32)

    # First the keys that each row sees, then with a mask those that some do.
    whole, end = walk_over_keys(first, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else 0, end if MASKED else whole, BLOCK_K):
            k = load(k_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            scores = tl.dot(q, k.T, input_precision="ieee")
            if MASKED:
                keys = (start + tl.arange(0, BLOCK_K))[None, :]
                seen = visible(rows[:, None], keys, seq_q, seq_k, CAUSAL)
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
              DIM: tl.constexpr, WIDE: tl.constexpr):
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
    # First the keys that each row sees, then with a mask those that some do.
    whole, end = walk_over_keys(first, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else 0, end if MASKED else whole, BLOCK_K):
            k = load(k_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            v = load(v_all, batch, head // group, start, BLOCK_K, DIM, WIDE)
            scores = tl.dot(q, k.T, input_precision="ieee")
            weights = tl.exp2(scores * scale - lse[:, None])
            if MASKED:
                keys = (start + tl.arange(0, BLOCK_K))[None, :]
                seen = visible(rows[:, None], keys, seq_q, seq_k, CAUSAL)
                weights = tl.where(seen, weights, 0)
            dweights = tl.dot(dout, v.T, input_precision="ieee")
            dscores = weights * (dweights - delta[:, None])
            dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")
    store(dq_all, dq * (scale / LOG2_E), batch, head, first, BLOCK_Q, DIM)


@jit
def dk_dv_kernel(dout_all, q_all, k_all, v_all, dk_all, dv_all, log2_ptr, delta_ptr, seq_padded,
                 scale, heads, group, seq_q, seq_k,
                 CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 DIM: tl.constexpr, WIDE: tl.constexpr):
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
    begin, whole = 0, 0
    if CAUSAL:
        begin = tl.maximum(0, first + seq_q - seq_k) // BLOCK_Q * BLOCK_Q
        whole = tl.cdiv(tl.maximum(0, first + BLOCK_K - 1 + seq_q - seq_k), BLOCK_Q) * BLOCK_Q
        whole = tl.minimum(whole, tl.cdiv(seq_q, BLOCK_Q) * BLOCK_Q)
    first_rows = first + tl.arange(0, BLOCK_K) + seq_q - seq_k      # that see each key
    for MASKED in tl.static_range(2):
        low, high = begin if MASKED else whole, whole if MASKED else seq_q
        head, start = kv_head * group, low
        for _ in range(group * tl.cdiv(high - low, BLOCK_Q)):
            rows = start + tl.arange(0, BLOCK_Q)
            q = load(q_all, batch, head, start, BLOCK_Q, DIM, WIDE)
            dout = load(dout_all, batch, head, start, BLOCK_Q, DIM, WIDE)
            stats = (batch * heads + head).to(tl.int64) * seq_padded
            lse, delta = tl.load(log2_ptr + stats + rows), tl.load(delta_ptr + stats + rows)
            scores = tl.dot(k, q.T, input_precision="ieee")         # (keys, rows): transposed
            weights = tl.exp2(scores * scale - lse[None, :])
            if MASKED:
                weights = tl.where(first_rows[:, None] <= rows[None, :], weights, 0)
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


def interpreted():
    return os.environ.get("TRITON_INTERPRET") == "1"


def generation(x):
    """Of the GPU: 90 is Hopper and 100 Blackwell, which load a block of 16-bit numbers by their
    copy engine (TMA) and multiply it from where that puts it. 80 stands for everything else."""
    arch = 90 if interpreted() else triton.runtime.driver.active.get_current_target().arch
    return {90: 90, 100: 100, 103: 100}.get(arch, 80) if x.element_size() == 2 else 80


def blocks(gpu, kernel, x):
    """(held, walked, num_warps, num_stages, dim as the kernel has it): a line of BLOCKS for x."""
    block_d = max(16, triton.next_power_of_2(x.shape[-1]))
    if x.dtype == torch.float32:                # no tensor cores: they would round to 10 bits
        return 16, 16, 8, 2, block_d
    return *next(sizes for dim, sizes in BLOCKS[gpu][kernel].items() if block_d <= dim), block_d


def scale_in_log2(dim):
    """Of the scores, for exp2. The kernels have it from here: one register less."""
    return dim**-0.5 * LOG2_E.value


def as_argument(x, gpu, rows, dim):
    """x (batch, heads, seq, dim) as a kernel takes it, to load blocks of (rows, dim).

    For the copy engine, a descriptor: one thread asks for the block by its coordinates, and no
    thread computes an address. Without one, pointer, strides and lengths.
    """
    if gpu == 80 or not x.numel():
        return as_pointer(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, dim])


def as_pointer(x):
    return x, *x.stride()[:3], *x.shape[2:]


def readable(x):
    """x, if its rows are dense and all its steps in memory are of 16 bytes, as in any model. Else
    a copy that is so."""
    unit = 16 // x.element_size()
    if x.stride(-1) == 1 and all(step > 0 and step % unit == 0 for step in x.stride()[:3]) \
            and x.data_ptr() % 16 == 0:
        return x
    *shape, dim = x.shape
    return x.new_empty(*shape, math.ceil(dim / unit) * unit)[..., :dim].copy_(x)


def flash_forward(q, k, v, causal=False):
    """Attention, and the log-sum-exp of its scores. Raises ValueError for what does not fit.

    q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim), of any strides. Returns out,
    of q's shape, and lse (batch, heads, queries) in float32.
    """
    check(q, k, v)
    if not runs_here(q):
        return reference_forward(q, k, v, causal)
    q, k, v = map(readable, (q, k, v))
    batch, heads, seq_q, dim = q.shape
    out = torch.empty_like(q)
    lse = torch.empty(batch, heads, seq_q, device=q.device, dtype=torch.float32)
    with torch.cuda.device_of(q):
        gpu = generation(q)
        held, walked, warps, stages, block_d = blocks(gpu, "forward", q)
        if q.numel():
            forward_kernel[(triton.cdiv(seq_q, held) * batch * heads,)](
                as_argument(q, gpu, held, block_d), as_argument(k, gpu, walked, block_d),
                as_argument(v, gpu, walked, block_d), as_pointer(out), lse,
                scale_in_log2(dim), heads, heads // k.shape[1], seq_q, k.shape[2],
                causal, held, walked, block_d, interpreted(), num_warps=warps, num_stages=stages)
    return out, lse


def flash_backward(dout, q, k, v, out, lse, causal=False):
    """Gradients of (q, k, v), from that of out. Raises ValueError for what does not fit.

    dout and out of q's shape and dtype, of any strides; lse (batch, heads, queries) in float32.
    `out` and `lse` may be those of more keys than `k` has: then this is the part that these keys
    contribute (ring attention).
    """
    check(q, k, v)
    of_lse = q.shape[:3], torch.promote_types(q.dtype, torch.float32)
    for name, x, (shape, dtype) in (("dout", dout, (q.shape, q.dtype)),
                                    ("out", out, (q.shape, q.dtype)), ("lse", lse, of_lse)):
        if x.shape != shape or x.dtype != dtype or x.device != q.device:
            raise ValueError(f"flash_backward: {name} of shape {tuple(x.shape)} is {x.dtype} on "
                             f"{x.device}; expected {tuple(shape)}, {dtype} on {q.device}")
    if not runs_here(q):
        return reference_backward(dout, q, k, v, out, lse, causal)
    dout, q, k, v, out = map(readable, (dout, q, k, v, out))
    lse = lse.contiguous()
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    dq, dk, dv = map(torch.empty_like, (q, k, v))       # laid out in memory as they are

    with torch.cuda.device_of(q):
        gpu = generation(q)
        held, walked, warps, stages, block_d = blocks(gpu, "dq", q)
        seq_padded = triton.cdiv(seq_q, held) * held    # whole blocks, for dk_dv_kernel to read
        log2, delta = torch.empty(2, batch * heads * seq_padded, device=q.device,
                                  dtype=torch.float32)
        numbers = seq_padded, scale_in_log2(dim), heads, heads // kv_heads, seq_q, seq_k
        if q.numel():
            of_queries = [as_argument(x, gpu, held, block_d) for x in (dout, q, out)]
            of_keys = [as_argument(x, gpu, walked, block_d) for x in (k, v)]
            dq_kernel[(triton.cdiv(seq_q, held) * batch * heads,)](
                *of_queries, *of_keys, lse, as_pointer(dq), log2, delta, *numbers,
                causal, held, walked, block_d, interpreted(), num_warps=warps, num_stages=stages)
        held, walked, warps, stages, block_d = blocks(gpu, "dk_dv", q)
        if k.numel():
            of_queries = [as_argument(x, gpu, walked, block_d) for x in (dout, q)]
            of_keys = [as_argument(x, gpu, held, block_d) for x in (k, v)]
            dk_dv_kernel[(triton.cdiv(seq_k, held) * batch * kv_heads,)](
                *of_queries, *of_keys, as_pointer(dk), as_pointer(dv), log2, delta, *numbers,
                causal, walked, held, block_d, interpreted(), num_warps=warps, num_stages=stages)
    return dq, dk, dv


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        out, lse = flash_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, dout):
        return *flash_backward(dout, *ctx.saved_tensors, ctx.causal), None


def flash_attention(q, k, v, causal=True):
    """Attention, differentiable; causal unless told otherwise, as a model's core is. (PyTorch's
    scaled_dot_product_attention has the other default: there it is is_causal=False.)

    q (batch, heads, queries, dim); k, v (batch, kv_heads, keys, dim), of any strides; returns q's
    shape. Raises ValueError for what does not fit.
    """
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
    if k.shape[0] != batch or k.shape[3] != dim or heads * k.shape[1] == 0 \
            or heads % k.shape[1]:
        raise ValueError(f"flash_attention: k has shape {shapes['k']}; expected ({batch}, a "
                         f"divisor of {heads}, keys, {dim}), as q has shape {shapes['q']}")
    if v.shape != k.shape:
        raise ValueError(f"flash_attention: v has shape {shapes['v']}; expected {shapes['k']}, as "
                         "k")
