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
