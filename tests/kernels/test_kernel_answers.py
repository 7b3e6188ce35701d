"""Right answers to the kernels' exercises that do not look like ours: they must pass.

Other orders of summation, other roundings, other ways to share the work: what a kernel gives is
compared to rounding, and no check may ask for more than the question does.
"""

import pytest

from lab.classroom import checks, grading
from tests.conftest import needs_triton
from tests.support.right_answers import graded

ANSWERS = {
    "elu.3, by an exact quotient": """
@jit
def expm1(x):
    u = tl.exp(x)
    v = u - 1
    inside = (u != 1) & (v != -1)
    quotient = v * x / tl.log(tl.where(inside, u, 2))
    return tl.where(u == 1, x, tl.where(inside, quotient, v))
""",
    "fp8.1, by infinity's own mask": """
def amax_of(x, tile):
    return tiled(torch.where(x.isfinite(), x, 0).abs(), tile).amax(3).amax(1).float()
""",
    "fp8.2, by a logarithm in float64": """
def scales_of(amax, powers):
    scales = torch.maximum(amax / LARGEST, torch.tensor(SMALLEST))
    return torch.exp2(scales.double().log2().ceil()).float() if powers else scales
""",
    "matmul.2, by a loop": """
def occupancy(registers, shared, warps, memory=228 * 1024):
    per_thread = (registers + 7) // 8 * 8
    programs = 0
    while programs < 32 and (programs + 1) * warps <= 64 \\
            and (programs + 1) * warps <= 16384 // (32 * per_thread) * 4 \\
            and (programs + 1) * (shared + 1024) <= memory:
        programs += 1
    return programs * warps / 64
""",
    "elu.3, by the series alone": """
@jit
def expm1(x):
    s = x
    term = x
    for n in tl.static_range(2, 12):
        term = term * x / n
        s += term
    return tl.where(x > -1, s, tl.exp(x) - 1)
""",
    "layernorm.2": """
@jit
def forward_kernel(x_ptr, residual_ptr, weight_ptr, bias_ptr, sum_ptr, y_ptr, mean_ptr, rstd_ptr,
                   x_stride, residual_stride, width, eps,
                   RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < width
    x = tl.load(x_ptr + r * x_stride + c, mask=m, other=0.0).to(tl.float32)
    if RESIDUAL:
        other = tl.load(residual_ptr + r * residual_stride + c, mask=m, other=0.0).to(tl.float32)
        tl.store(sum_ptr + r * width + c, x + other, mask=m)
        x = (x + other).to(sum_ptr.dtype.element_ty).to(tl.float32)
    inv = 1.0 / width
    mean = tl.sum(x * inv)
    d = tl.where(m, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(d * d * inv) + eps)
    w = tl.load(weight_ptr + c, mask=m)
    b = tl.load(bias_ptr + c, mask=m)
    tl.store(y_ptr + r * width + c, d * (rstd * w) + b, mask=m)
    tl.store(mean_ptr + r, mean)
    tl.store(rstd_ptr + r, rstd)
""",
    "layernorm.3": """
@jit
def backward_kernel(dy_ptr, dsum_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr,
                    dbias_ptr, dy_stride, dsum_stride, x_stride, rows, width,
                    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                    PARTS: tl.constexpr, STAGES: tl.constexpr):
    part, program = tl.program_id(0), tl.program_id(1)
    mine = (part * BLOCK + tl.arange(0, BLOCK))[None, :]
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    each = tl.cdiv(tl.cdiv(rows, ROWS), tl.num_programs(1))
    for i in range(program * each, program * each + each):
        row = (i * ROWS + tl.arange(0, ROWS))[:, None]
        mean = tl.load(mean_ptr + row, mask=row < rows, other=0)
        rstd = tl.load(rstd_ptr + row, mask=row < rows, other=0)
        sg = tl.zeros((ROWS,), tl.float32)
        sgn = tl.zeros((ROWS,), tl.float32)
        for p in range(PARTS):
            c = (p * BLOCK + tl.arange(0, BLOCK))[None, :]
            w = tl.load(weight_ptr + c, mask=c < width, other=0)
            _, g, n = load_part(dy_ptr, x_ptr, w, mean, rstd, row, c, (row < rows) & (c < width),
                                dy_stride, x_stride)
            sg += tl.sum(g, 1) / width
            sgn += tl.sum(g * n, 1) / width
        w = tl.load(weight_ptr + mine, mask=mine < width, other=0)
        inside = (row < rows) & (mine < width)
        dy, g, n = load_part(dy_ptr, x_ptr, w, mean, rstd, row, mine, inside, dy_stride, x_stride)
        dweight += tl.sum(dy * n, 0)
        dbias += tl.sum(dy, 0)
        dx = (g - sg[:, None] - n * sgn[:, None]) * rstd
        if RESIDUAL:
            dx += tl.load(dsum_ptr + row * dsum_stride + mine, mask=inside)
        tl.store(dx_ptr + row * width + mine, dx, mask=inside)
    c = part * BLOCK + tl.arange(0, BLOCK)
    tl.store(dweight_ptr + program * width + c, dweight, mask=c < width)
    tl.store(dbias_ptr + program * width + c, dbias, mask=c < width)
""",
    "flash_attention.5": """
@jit
def forward_kernel(q_all, k_all, v_all, out_all, lse_ptr, scale, heads, group, seq_q, seq_k,
                   CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                   DIM: tl.constexpr, WIDE: tl.constexpr):
    n = tl.cdiv(seq_q, BLOCK_Q)
    bh, block = tl.program_id(0) // n, tl.program_id(0) % n
    b, h = bh // heads, bh % heads
    first = block * BLOCK_Q
    rows = first + tl.arange(0, BLOCK_Q)
    q = load(q_all, b, h, first, BLOCK_Q, DIM, WIDE).to(tl.float32) * (scale / LOG2_E)
    m = tl.full((BLOCK_Q,), -1e30, tl.float32)
    l = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for start in range(0, seq_k, BLOCK_K):
        k = load(k_all, b, h // group, start, BLOCK_K, DIM, WIDE)
        v = load(v_all, b, h // group, start, BLOCK_K, DIM, WIDE)
        keys = start + tl.arange(0, BLOCK_K)
        s = tl.dot(q, tl.trans(k).to(tl.float32))
        seen = visible(rows[:, None], keys[None, :], seq_q, seq_k, CAUSAL)
        new = tl.maximum(m, tl.max(tl.where(seen, s, -1e30), 1))
        p = tl.where(seen, tl.exp(s - new[:, None]), 0)
        a = tl.exp(m - new)
        l = l * a + tl.sum(p, 1)
        acc = acc * a[:, None] + tl.dot(p, v.to(tl.float32))
        m = new
    lse = tl.where(l > 0, m + tl.log(tl.where(l > 0, l, 1)), -float("inf"))
    store(out_all, acc / tl.where(l > 0, l, 1)[:, None], b, h, first, BLOCK_Q, DIM)
    tl.store(lse_ptr + bh * seq_q + rows, lse, mask=rows < seq_q)
""",
    "flash_attention.6": """
@jit
def dk_dv_kernel(dout_all, q_all, k_all, v_all, dk_all, dv_all, log2_ptr, delta_ptr, seq_padded,
                 scale, heads, group, seq_q, seq_k,
                 CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
                 DIM: tl.constexpr, WIDE: tl.constexpr):
    n = tl.cdiv(seq_k, BLOCK_K)
    bh, block = tl.program_id(0) // n, tl.program_id(0) % n
    kv_heads = heads // group
    b, kv = bh // kv_heads, bh % kv_heads
    first = block * BLOCK_K
    keys = first + tl.arange(0, BLOCK_K)
    k = load(k_all, b, kv, first, BLOCK_K, DIM, WIDE)
    v = load(v_all, b, kv, first, BLOCK_K, DIM, WIDE)
    dk = tl.zeros((BLOCK_K, DIM), tl.float32)
    dv = tl.zeros((BLOCK_K, DIM), tl.float32)
    h = kv * group
    for _ in range(group):
        for start in range(0, seq_q, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q = load(q_all, b, h, start, BLOCK_Q, DIM, WIDE)
            dout = load(dout_all, b, h, start, BLOCK_Q, DIM, WIDE)
            at = (b * heads + h) * seq_padded + rows
            lse, delta = tl.load(log2_ptr + at), tl.load(delta_ptr + at)
            p = tl.exp2(tl.dot(q * scale, k.T) - lse[:, None])
            p = tl.where(visible(rows[:, None], keys[None, :], seq_q, seq_k, CAUSAL), p, 0)
            dv += tl.dot(p.T, dout)
            ds = p * (tl.dot(dout, v.T) - delta[:, None]) * (scale / LOG2_E)
            dk += tl.dot(ds.T, q)
        h += 1
    store(dk_all, dk, b, kv, first, BLOCK_K, DIM)
    store(dv_all, dv, b, kv, first, BLOCK_K, DIM)
""",
    "flash_attention.1": """
def reference_backward(dout, q, k, v, out, lse, causal=False):
    group = q.shape[1] // k.shape[1]
    kk, vv = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = reference_scores(q, kk, causal)[:, :, 0]
    p = torch.where(lse.isinf()[..., None], 0, (s - lse[..., None]).exp())
    dv = p.mT @ dout
    dp = dout @ vv.mT
    ds = p * (dp - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    dk = ds.mT @ q
    fold = lambda x: x.unflatten(1, (-1, group)).sum(2)
    return ds @ kk, fold(dk), fold(dv)
""",
}


@pytest.fixture(scope="module", autouse=True)
def warm():
    needs_triton()
    checks.warm_up()


OFTEN = "elu.3", "fp8.2", "layernorm.3"     # the others in `make test-all`


@pytest.mark.parametrize("what", [
    pytest.param(what, marks=[] if what.startswith(OFTEN) else [pytest.mark.full])
    for what in ANSWERS])
def test_a_right_answer_that_is_written_otherwise(what):
    assert graded(what.split(",")[0], ANSWERS[what]) == (grading.RIGHT, "")
