"""Right answers to the kernels' exercises that don't look like ours must pass.

They sum in another order, round elsewhere, or share the work in another way.
"""

import pytest

from lab.classroom import checks, grading
from tests.conftest import needs_triton, sample
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


@pytest.mark.parametrize("what", sample(ANSWERS))
def test_a_right_answer_that_is_written_otherwise(what):
    assert graded(what.split(",")[0], ANSWERS[what]) == (grading.RIGHT, "")
