"""kernels/: forward and gradients against float64, and what their compiler makes of them.

On a GPU the kernels run there. Without one they run in Triton's interpreter (conftest.py sets
TRITON_INTERPRET), which has no registers, no shared memory and no races: so they are also compiled,
in a process of its own, for the chips that they are meant for.
"""

import contextlib
import csv
import importlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import common
from tests.conftest import ROOT, needs_triton

pytest.importorskip("triton")
elu = importlib.import_module("kernels.elu")
layernorm = importlib.import_module("kernels.layernorm")
flash = importlib.import_module("kernels.flash_attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = torch.float32, torch.float16, torch.bfloat16
# Kernels compute in float32: what is off is the rounding of results (half of 2^-11 or 2^-8 of their
# size) and, on a GPU, of the weights that go into a dot. Relative to the largest number.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@pytest.fixture(autouse=True)
def interpreter(request):
    if "compiled" not in request.node.name:
        needs_triton()


def random(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * scale
    return x.to(DEVICE, dtype).requires_grad_()


def exact(x):
    return None if x is None else x.detach().double().requires_grad_()


def assert_close(actual, expected, dtype, smallest=0.1):
    assert actual.shape == expected.shape and actual.dtype == dtype
    largest = expected.detach().abs().nan_to_num(posinf=0).max().item() if expected.numel() else 0
    tolerance = TOLERANCE[dtype] * max(largest, smallest)  # what should be 0 too
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def backward(outputs, gradients):
    torch.autograd.backward(outputs, [g.to(o.dtype) for o, g in zip(outputs, gradients)])


# ------------------------------------------------------------------------------- ELU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0,), (1,), (2047,), (2049,), (3, 5, 700)])
def test_elu(dtype, shape):
    x = random(*shape, dtype=dtype, scale=3)
    dy, x64 = random(*shape, seed=1).to(dtype), exact(x)
    y, y64 = elu.elu(x, 0.7), elu.elu_reference(x64, 0.7)
    backward([y], [dy])
    backward([y64], [dy])
    assert_close(y, y64, dtype)
    assert_close(x.grad, x64.grad, dtype)


def test_elu_of_extreme_values():
    inf, nan = float("inf"), float("nan")
    values = [-1e38, -1e4, -1e-6, -1e-20, -0.0, 0.0, 1e-20, 1e4, 1e38, inf, -inf, nan]
    x = torch.cat([torch.tensor(values), torch.linspace(-2, 2, 1000)]).to(DEVICE).requires_grad_()
    x64 = exact(x)
    y, y64 = elu.elu(x), elu.elu_reference(x64)
    # near 0 too: no cancellation
    torch.testing.assert_close(y.double(), y64, rtol=5e-7, atol=0, equal_nan=True)
    y.backward(torch.ones_like(y))
    y64.backward(torch.ones_like(y64))
    usual = x64.isfinite()  # elsewhere the reference's own is inf * 0
    torch.testing.assert_close(
        x.grad[usual].double(), x64.grad[usual], rtol=5e-7, atol=1e-30, equal_nan=True
    )
    assert x.grad[9] == 1 and x.grad[10] == 0


@pytest.mark.parametrize("view", ["transposed", "every second", "expanded"])
def test_elu_of_any_strides(view):
    base = random(6, 10, scale=2)
    x = {
        "transposed": base.t(),
        "every second": base[:, ::2],
        "expanded": base[:1].expand(4, 10),
    }[view]
    y = elu.elu(x)
    dy = random(10, 4, seed=3).t() if view == "expanded" else torch.ones_like(y)
    y.backward(dy)
    base64 = exact(base)
    x64 = {
        "transposed": base64.t(),
        "every second": base64[:, ::2],
        "expanded": base64[:1].expand(4, 10),
    }[view]
    y64 = elu.elu_reference(x64)
    y64.backward(dy.double())
    assert_close(y, y64, torch.float32)
    assert_close(base.grad, base64.grad, torch.float32)
    if view == "transposed":
        assert y.stride() == x.stride()  # walked through memory as it is


def test_elu_moves_what_the_lesson_says():
    assert elu.chain_bytes(1, 2) == 10 * 2 + 2 and elu.fused_bytes(1, 2) == 2 * 2
    assert elu.arithmetic_intensity(2) == 1.25
    assert round(elu.instruction_budget(2)) == 37
    assert round(elu.instruction_budget(2, bandwidth=4.8e12)) == 26
    with pytest.raises(ValueError, match=r"x of shape \(3,\) is torch.int64; expected float32"):
        elu.elu(torch.ones(3, dtype=torch.int64))


# ------------------------------------------------------------------------------- LayerNorm


def compare_layer_norm(x, weight, bias, residual=None, uses=(0, 1)):
    """Against float64: the outputs that are used, and all gradients."""
    dtype, inputs = x.dtype, (x, weight, bias, residual)
    x64, weight64, bias64, residual64 = map(exact, inputs)
    outputs = layernorm.layer_norm(x, weight, bias, residual=residual)
    outputs64 = layernorm.layer_norm_reference(x64, weight64, bias64, residual=residual64)
    if residual is None:
        outputs, outputs64, uses = (outputs,), (outputs64,), (0,)
    gradients = [random(*x.shape, seed=i + 5).to(dtype) for i in uses]
    backward([outputs[i] for i in uses], gradients)
    backward([outputs64[i] for i in uses], gradients)
    for output, output64 in zip(outputs, outputs64):
        assert_close(output, output64, dtype)
    for tensor, tensor64 in zip(inputs, (x64, weight64, bias64, residual64)):
        if tensor is not None:
            unused = torch.zeros_like(tensor64) if tensor64.grad is None else tensor64.grad
            assert_close(tensor.grad, unused, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("width", [1, 7, 64, 1000, 4096])
def test_layer_norm(dtype, residual, width):
    x, more = random(2, 3, width, dtype=dtype), random(2, 3, width, dtype=dtype, seed=1)
    weight, bias = random(width, dtype=dtype, seed=2), random(width, dtype=dtype, seed=3)
    compare_layer_norm(x, weight, bias, more if residual else None)


def test_the_widest_layer_norm_with_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 3)
    compare_layer_norm(random(7, 16384), random(16384, seed=1), random(16384, seed=2))


@pytest.mark.parametrize("uses", [(0,), (1,)])
def test_layer_norm_of_which_one_output_is_used(uses):
    compare_layer_norm(random(4, 9), random(9), random(9, seed=1), random(4, 9, seed=2), uses)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_whose_tensors_all_have_strides_of_their_own(dtype):
    x = random(6, 40, dtype=dtype).detach()[:, 3:20]  # rows apart
    more = random(6, 100, dtype=dtype, seed=1).detach()[:, :17]  # rows further apart
    weight, bias = random(17, dtype=dtype, seed=2), random(17, dtype=dtype, seed=3)
    dtotal = random(1, 17, seed=4).detach().to(dtype).expand(6, 17)
    dy = random(17, 6, seed=5).detach().to(dtype).t()
    x64, weight64, bias64, more64 = map(exact, (x, weight, bias, more))
    x.requires_grad_(), more.requires_grad_()
    outputs = layernorm.layer_norm(x, weight, bias, 0.1, more)
    outputs64 = layernorm.layer_norm_reference(x64, weight64, bias64, 0.1, more64)
    backward(outputs, [dtotal, dy])
    backward(outputs64, [dtotal, dy])
    for output, output64 in zip(outputs, outputs64):
        assert_close(output, output64, dtype)
    pairs = (x, x64), (weight, weight64), (bias, bias64), (more, more64)
    for tensor, tensor64 in pairs:
        assert_close(tensor.grad, tensor64.grad, dtype)


def test_the_widest_layer_norm_in_16_bits(monkeypatch):
    """By two programs a row, which have the next rows loaded while they work."""
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 2)
    assert layernorm.backward_launch(16384, torch.bfloat16)[2:4] == (2, 2)
    x, more = (random(5, 16384, dtype=torch.bfloat16, seed=i) for i in range(2))
    weight, bias = (random(16384, dtype=torch.bfloat16, seed=i) for i in (2, 3))
    compare_layer_norm(x, weight, bias, more)


def test_layer_norm_of_bfloat16_with_weights_in_float32_of_any_strides():
    x, weights = random(5, 48, dtype=torch.bfloat16), random(2, 96, seed=1).detach()
    weight, bias = (x[::2].requires_grad_() for x in weights)
    x64, weight64, bias64 = map(exact, (x, weight, bias))
    y, y64 = (
        layernorm.layer_norm(x, weight, bias),
        layernorm.layer_norm_reference(x64, weight64, bias64),
    )
    dy = random(5, 48, seed=2).to(x.dtype)
    backward([y], [dy])
    backward([y64], [dy])
    assert_close(y, y64, torch.bfloat16)
    assert_close(x.grad, x64.grad, torch.bfloat16)
    assert_close(weight.grad, weight64.grad, torch.float32)
    assert_close(bias.grad, bias64.grad, torch.float32)


def test_rows_without_variance_and_rows_far_from_zero():
    x = torch.ones(3, 64, device=DEVICE)
    x[1] *= -1e4
    x[2] = 1e4 + torch.arange(64, device=DEVICE)
    compare_layer_norm(x.requires_grad_(), random(64), random(64, seed=1))


@pytest.mark.parametrize("view", ["rows apart", "transposed", "no rows"])
def test_layer_norm_of_any_strides(view):
    x = {
        "rows apart": lambda: random(5, 40).detach()[:, 3:20],
        "transposed": lambda: random(17, 5).detach().t(),
        "no rows": lambda: random(0, 17).detach(),
    }[view]()
    compare_layer_norm(x.requires_grad_(), random(17), random(17, seed=1))


def test_sums_over_rows_are_the_same_every_time():
    """No atomics: nobody's turn depends on anybody's speed."""
    gradients = []
    for _ in range(2):
        x, weight, bias = random(40, 33), random(33, seed=1), random(33, seed=2)
        layernorm.layer_norm(x, weight, bias).square().sum().backward()
        gradients.append((weight.grad, bias.grad))
    assert all(a.equal(b) for a, b in zip(*gradients))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), (1,), (1,)), r"x has shape \(\); expected \(\.\.\., width\)"),
        (((2, 16385), (16385,), (16385,)), r"x has shape \(2, 16385\); .* width of 1 to 16384"),
        (((2, 4), (3,), (4,)), r"weight has shape \(3,\); expected \(4,\)"),
        (((2, 4), (4,), (4,), (2, 3)), r"residual has shape \(2, 3\); expected \(2, 4\)"),
    ],
)
def test_layer_norm_refuses_what_does_not_fit(arguments, message):
    x, weight, bias, *residual = (torch.ones(shape) for shape in arguments)
    with pytest.raises(ValueError, match=message):
        layernorm.layer_norm(x, weight, bias, residual=residual[0] if residual else None)


def test_layer_norm_refuses_dtypes_and_devices():
    x, weight = torch.ones(2, 4), torch.ones(4)
    with pytest.raises(ValueError, match=r"x of shape \(2, 4\) is torch.float64"):
        layernorm.layer_norm(x.double(), weight, weight)
    with pytest.raises(
        ValueError, match="residual of shape .* is torch.float16 on cpu; expected torch.float32"
    ):
        layernorm.layer_norm(x, weight, weight, residual=x.half())
    with pytest.raises(ValueError, match=r"bias of shape \(4,\) is .* on meta; expected .* on cpu"):
        layernorm.layer_norm(x, weight, weight.to("meta"))
    with pytest.raises(ValueError, match="weight of shape .* is torch.int64 on cpu; expected"):
        layernorm.layer_norm(x, weight.long(), weight)
    with pytest.raises(ValueError, match=r"bias has shape None; expected \(4,\)"):
        layernorm.layer_norm(x, weight, None)


def test_layer_norm_moves_what_the_lesson_says():
    rows, dim = 10**4, 1000
    assert layernorm.forward_bytes(rows, dim, 2) == pytest.approx(2 * 2 * rows * dim, rel=5e-3)
    assert layernorm.forward_bytes(rows, dim, 2, True) == pytest.approx(8 * rows * dim, rel=5e-3)
    assert layernorm.backward_bytes(rows, dim, 2, 264) == pytest.approx(6 * rows * dim, rel=0.15)


# ------------------------------------------------------------------------------- flash attention


def qkv(heads, kv_heads, queries, keys, dim, dtype=torch.float32, batch=1, scale=1.0):
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [
        random(batch, h, s, dim, dtype=dtype, scale=scale, seed=i)
        for i, (h, s) in enumerate(shapes)
    ]


def compare_attention(q, k, v, causal):
    q64, k64, v64 = map(exact, (q, k, v))
    out, out64 = (
        flash.flash_attention(q, k, v, causal),
        flash.reference_forward(q64, k64, v64, causal),
    )
    dout = random(*q.shape, seed=9).to(q.dtype)
    out.backward(dout)
    with torch.no_grad():
        gradients = flash.reference_backward(dout.double(), q64, k64, v64, *out64, causal)
        _, lse = flash.flash_forward(q, k, v, causal)
    assert_close(out, out64[0], q.dtype)
    seen = ~out64[1].isinf()
    assert (lse.isneginf() == ~seen).all() and lse.dtype == torch.float32
    assert_close(lse[seen], out64[1][seen].double(), torch.float32)
    for tensor, gradient in zip((q, k, v), gradients):
        assert_close(tensor.grad, gradient, q.dtype, smallest=1)


SHAPES = [  # heads, kv heads, queries, keys, dim
    (2, 2, 33, 33, 16),
    (2, 1, 20, 70, 40),
    (4, 2, 40, 20, 64),  # causal: the first twenty queries see nothing
    (1, 1, 1, 130, 128),
    (1, 1, 129, 1, 32),
    (1, 1, 40, 40, 256),
]


def half(*numbers):
    """Of three settings, any two values together; the other half is for `make test-all`."""
    return [pytest.mark.full] if sum(numbers) % 2 else []


@pytest.mark.parametrize(("shape", "dtype", "causal"), [
    pytest.param(shape, dtype, causal, marks=half(i, j, causal))
    for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES) for causal in (True, False)
])  # fmt: skip
def test_attention(shape, dtype, causal):
    compare_attention(*qkv(*shape, dtype), causal)


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=[pytest.mark.full] * (seed > 3)) for seed in range(8)])
def test_attention_of_random_shapes(seed):
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    generator = torch.Generator().manual_seed(seed)
    kv_heads = draw(1, 3)
    heads, dim = kv_heads * draw(1, 4), draw(16, 100)
    queries, keys, causal = draw(1, 70), draw(1, 70), bool(draw(0, 2))
    dtype = DTYPES[draw(0, 3)]
    compare_attention(*qkv(heads, kv_heads, queries, keys, dim, dtype, draw(1, 3)), causal)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_many_blocks(dtype, causal, dim):
    """A real pipeline: loads ahead of use, and from blocks without a mask to blocks with one."""
    compare_attention(*qkv(4, 2, 600, 900, dim, dtype, batch=2), causal)
    compare_attention(*qkv(2, 2, 1024, 1024, dim, dtype), causal)


def test_attention_around_the_edges_of_blocks():
    """float32 goes in blocks of 16 by 16."""
    for queries, keys in itertools.product((15, 16, 17, 33), repeat=2):
        compare_attention(*qkv(1, 1, queries, keys, 16), True)
        if queries != keys:
            compare_attention(*qkv(1, 1, queries, keys, 16), False)


def test_logits_of_ten_thousand():
    """Nothing overflows. A float32 of 10^4 is off by 5e-4, and the weights by that share."""
    q, k, v = qkv(1, 1, 40, 40, 64, scale=70)
    q64, k64, v64 = map(exact, (q, k, v))
    assert flash.reference_scores(q64, k64, False).abs().max() > 1e4
    out = flash.flash_attention(q, k, v, True)
    out64, lse64 = flash.reference_forward(q64, k64, v64, True)
    torch.testing.assert_close(out.double(), out64, rtol=0, atol=2e-3 * 70)
    dout = random(*q.shape, seed=9)
    out.backward(dout)
    expected = flash.reference_backward(dout.double(), q64, k64, v64, out64, lse64, True)
    for tensor, gradient in zip((q, k, v), expected):
        torch.testing.assert_close(tensor.grad.double(), gradient, rtol=0, atol=2e-3 * 70)


def test_the_reference_is_pytorchs():
    q, k, v = (x.double() for x in qkv(4, 2, 5, 9, 16))
    from torch.nn.attention.bias import causal_lower_right

    for causal in (False, True):
        bias = causal_lower_right(5, 9) if causal else None
        expected = nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        out, lse = flash.reference_forward(q, k, v, causal)
        torch.testing.assert_close(out, expected)
        assert lse.shape == (1, 4, 5)


def test_attention_is_causal_unless_told_otherwise():
    """As a model's core is called; PyTorch's own has the other default."""
    q, k, v = qkv(2, 2, 5, 5, 16)
    theirs = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(flash.flash_attention(q, k, v), theirs(q, k, v, is_causal=True))
    torch.testing.assert_close(flash.flash_attention(q, k, v, causal=False), theirs(q, k, v))


def test_gradients_of_the_references():
    q, k, v = (exact(x) for x in qkv(4, 2, 5, 7, 16))
    for causal in (False, True):
        forward = lambda q, k, v, c=causal: flash.reference_forward(q, k, v, c)[0]
        assert torch.autograd.gradcheck(forward, (q, k, v))
        out, lse = flash.reference_forward(q, k, v, causal)
        dout = random(*q.shape, seed=4).double()
        expected = torch.autograd.grad(out, (q, k, v), dout)
        ours = flash.reference_backward(dout, q, k, v, out, lse, causal)
        for gradient, other in zip(ours, expected):
            torch.testing.assert_close(gradient, other)
    x, weight, bias = exact(random(3, 5)), exact(random(5)), exact(random(5, seed=1))
    assert torch.autograd.gradcheck(layernorm.layer_norm_reference, (x, weight, bias))
    assert torch.autograd.gradcheck(elu.elu_reference, (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_pieces_with_the_lse_of_the_whole(causal, dtype):
    """As ring attention calls it: block by block, merged by lse; backward with the whole lse, a
    slice of what all ranks know."""
    q, k, v = (x.detach() for x in qkv(2, 1, 48, 48, 32, dtype))
    whole, whole_lse = flash.flash_forward(q, k, v, causal)
    dout = random(*q.shape, seed=7).detach().to(dtype)
    dq, dk, dv = flash.flash_backward(dout, q, k, v, whole, whole_lse, causal)
    tolerance = {"rtol": 1.3e-6, "atol": TOLERANCE[dtype]}
    for rows in (slice(0, 32), slice(32, 48)):
        outs, lses, gradients = [], [], []
        for keys in (slice(0, 32), slice(32, 48)):
            if causal and keys.start > rows.start:
                continue  # these rows see none of them
            here = q[:, :, rows], k[:, :, keys], v[:, :, keys], causal and rows == keys
            out, lse = flash.flash_forward(*here)
            outs, lses = [*outs, out], [*lses, lse]
            of_whole = whole[:, :, rows], whole_lse[:, :, rows]
            gradients.append(
                flash.flash_backward(dout[:, :, rows], *here[:3], *of_whole, here[3])[0]
            )
        lse = torch.stack(lses).logsumexp(0)
        merged = sum(out * (lse_of - lse).exp()[..., None] for out, lse_of in zip(outs, lses))
        torch.testing.assert_close(lse, whole_lse[:, :, rows], **tolerance)
        torch.testing.assert_close(
            merged, whole[:, :, rows].float(), check_dtype=False, **tolerance
        )
        torch.testing.assert_close(sum(gradients), dq[:, :, rows], **tolerance)
    last = slice(32, 48)  # keys that, if causal, only the last rows see
    rows = last if causal else slice(0, 48)
    of_rows = [x[:, :, rows] for x in (dout, q)], [x[:, :, rows] for x in (whole, whole_lse)]
    _, *piece = flash.flash_backward(*of_rows[0], k[:, :, last], v[:, :, last], *of_rows[1], causal)
    for gradient, expected in zip(piece, (dk, dv)):
        torch.testing.assert_close(gradient, expected[:, :, last], **tolerance)


def test_rows_that_saw_nothing_anywhere_get_no_gradient():
    q, k, v = (x.detach() for x in qkv(1, 1, 20, 20, 16))
    out, lse = flash.flash_forward(q, k, v)
    dout, lse[:, :, 3] = torch.ones_like(q), -float("inf")
    kernel = flash.flash_backward(dout, q, k, v, out, lse)
    reference = flash.reference_backward(dout, q, k, v, out, lse)
    assert not kernel[0][:, :, 3].any()
    for ours, other in zip(kernel, reference):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_attention_of_any_strides():
    """(batch, seq, heads, dim) turned around, as a model has it, is not copied. Others are."""
    base = [random(2, 20, 2, 32, seed=i).detach() for i in range(3)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in base)
    assert flash.readable(q) is q and flash.flash_forward(q, k, v)[0].stride() == q.stride()
    compare_attention(q, k, v, True)
    compare_attention(*(x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v)), False)
    sliced = [x.detach()[..., 1:18].requires_grad_() for x in (q, k, v)]  # rows start anywhere
    copied = flash.readable(sliced[0])
    assert copied.equal(sliced[0]) and copied.stride(2) % 4 == 0 and copied.data_ptr() % 16 == 0
    compare_attention(*sliced, True)
    for dtype in (torch.float32, torch.float16):
        q = random(2, 4, 20, 32, dtype=dtype)
        k, v = (random(2, 2, 1, 32, dtype=dtype, seed=i).expand(-1, -1, 30, -1) for i in (1, 2))
        assert flash.readable(k).stride(2) > 0  # the copy engine takes no step of 0
        compare_attention(q, k.detach().requires_grad_(), v.detach().requires_grad_(), False)


@pytest.mark.parametrize("gpu", [80, 90, 100])
@pytest.mark.parametrize("dim", [36, 128, 256])
def test_attention_as_each_gpu_launches_it(monkeypatch, gpu, dim):
    """In blocks of every size; by pointers, or by descriptors for the copy engine."""
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "generation", lambda x: gpu)
    elif gpu != flash.generation(torch.empty(1, dtype=torch.float16, device=DEVICE)):
        pytest.skip("this GPU launches others")
    compare_attention(*qkv(2, 1, 150, 270, dim, torch.float16), True)
    compare_attention(*qkv(1, 1, 129, 64, dim, torch.bfloat16), False)


def test_blocks_fit_what_they_are_made_for():
    for gpu, kernels in flash.BLOCKS.items():
        for kernel, choices in kernels.items():
            for held, walked, _, _ in choices.values():
                assert held >= 16 and walked >= 16, (gpu, kernel)  # tl.dot takes no less
        for dim in kernels["dq"]:  # dk_dv reads the rows that dq has written, whole blocks of them
            assert kernels["dq"][dim][0] % kernels["dk_dv"][dim][1] == 0, (gpu, dim)


class Allocated(TorchDispatchMode):
    """Bytes of all storages that operators bring up while it is entered."""

    def __init__(self, *known):
        super().__init__()
        self.total, self.storages = 0, {x.untyped_storage().data_ptr(): x for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.storages:
                self.storages[storage.data_ptr()] = x  # kept: or its place is used again
                self.total += storage.nbytes()
        return result


def test_memory_is_linear_in_the_sequence():
    totals = {}
    for seq in (128, 256):
        q, k, v = (x.detach() for x in qkv(1, 1, seq, seq, 16, torch.float16))
        with Allocated(q, k, v) as allocated:
            out, lse = flash.flash_forward(q, k, v, True)
            flash.flash_backward(out, q, k, v, out, lse, True)
        totals[seq] = allocated.total
    results = 4 * 256 * 16 * 2 + 256 * 4  # out, dq, dk, dv; lse
    assert results < totals[256] < 256 * 256  # a byte for each score would be more
    assert totals[256] <= 2 * totals[128]


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's allocator is asked")
def test_memory_on_a_gpu_is_linear_in_the_sequence():
    q, k, v = (x.detach() for x in qkv(1, 1, 8192, 8192, 64, torch.bfloat16))
    flash.flash_forward(q, k, v, True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash.flash_forward(q, k, v, True)
    flash.flash_backward(out, q, k, v, out, lse, True)
    assert torch.cuda.max_memory_allocated() - before < 8192 * 8192


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 16), (1, 1, 3, 16), (1, 1, 3, 16)), r"q has shape \(2, 3, 16\); expected \(batch"),
        (((1, 2, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)), "expected a dim of 16 to 256"),
        (((1, 2, 3, 257), (1, 1, 3, 257), (1, 1, 3, 257)), "expected a dim of 16 to 256"),
        (
            ((1, 4, 3, 16), (1, 3, 3, 16), (1, 3, 3, 16)),
            r"k has shape .*; expected \(1, a divisor of",
        ),
        (((1, 4, 3, 16), (2, 4, 3, 16), (2, 4, 3, 16)), r"k has shape \(2, 4, 3, 16\)"),
        (
            ((1, 4, 3, 16), (1, 4, 3, 16), (1, 4, 5, 16)),
            r"v has shape .*; expected \(1, 4, 3, 16\)",
        ),
    ],
)
def test_attention_refuses_what_does_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        flash.flash_attention(*map(torch.ones, shapes))


def test_attention_refuses_dtypes():
    q = torch.ones(1, 1, 4, 16)
    with pytest.raises(
        ValueError, match="k of shape .* is torch.float16 on cpu; expected torch.flo"
    ):
        flash.flash_attention(q, q.half(), q)
    with pytest.raises(ValueError, match="is torch.int32; expected float32, float16 or bfloat16"):
        flash.flash_attention(q.int(), q.int(), q.int())
    lse = torch.zeros(1, 1, 4)
    for name, others in {
        "dout of shape .* is torch.float16": (q.half(), q, q, q, q, lse),
        r"out of shape \(1, 1, 5, 16\)": (q, q, q, q, torch.ones(1, 1, 5, 16), lse),
        r"lse of shape \(1, 1, 4, 1\) .* expected \(1, 1, 4\), torch.float32": (
            *(q,) * 5,
            lse[..., None],
        ),
    }.items():
        with pytest.raises(ValueError, match=f"flash_backward: {name}"):
            flash.flash_backward(*others)


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter's matmuls can be counted")
def test_flops_are_those_of_the_kernels(monkeypatch):
    """Two matmuls forward; backward the five that are counted, and two once more."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    dot, counted = builder.create_dot, []

    def counting(self, a, b, *others):
        (rows, inner), columns = a.data.shape, b.data.shape[1]
        counted.append(2 * rows * inner * columns)
        return dot(self, a, b, *others)

    monkeypatch.setattr(builder, "create_dot", counting)
    q, k, v = (x.detach() for x in qkv(4, 2, 32, 48, 16))
    out, lse = flash.flash_forward(q, k, v)
    assert sum(counted) == flash.flops(1, 4, 32, 48, 16, False)
    counted.clear()
    flash.flash_backward(q, q, k, v, out, lse)
    assert sum(counted) == flash.flops(1, 4, 32, 48, 16, False, backward=True) * 7 / 5


def test_formulas_of_the_lesson():
    assert flash.plain_bytes(1000, 1000, 64, 2) == (4 * 1000 * 64 + 4 * 10**6) * 2
    assert flash.flash_bytes(1000, 1000, 64, 2) == 4 * 1000 * 64 * 2 + 4000
    assert flash.flops(1, 1, 1000, 1000, 64, False) == 4 * 64 * 10**6
    assert flash.flops(1, 1, 1000, 1000, 64, True, backward=True) == 5 * 64 * 10**6
    intensity = lambda seq, causal: (flash.flops(1, 1, seq, seq, 128, causal)
                                     / flash.flash_bytes(seq, seq, 128, 2))  # fmt: skip
    for causal, above in ((False, 600), (True, 1200)):  # the ridge point of the lesson
        assert f"{above:,} " in flash.__doc__ or f"{above:,} on" in flash.__doc__
        assert intensity(above - 20, causal) < 295 < intensity(above, causal)
        assert intensity(10**6, causal) == pytest.approx(10**6 / (4 if causal else 2), rel=0.01)


# ------------------------------------------------------------------------------- sums in float32


def assert_rounded_once(actual, expected):
    """In 16 bits, and off by half of a last bit, or what float32 is off by: so whatever was summed
    or subtracted on the way was not rounded to 16 bits, which TOLERANCE would let pass."""
    half_a_bit = expected.abs() * torch.finfo(actual.dtype).eps / 2
    off = (actual.double() - expected).abs() - half_a_bit
    assert off.max() <= 3e-6 * expected.abs().max(), off.max() / expected.abs().max()


# Not of bfloat16 in the interpreter, which cuts off its last bits.
IN_16_BITS = pytest.mark.parametrize("dtype", DTYPES[1 : 2 if DEVICE == "cpu" else 3], ids=str)


@IN_16_BITS
def test_layer_norm_rounds_once(monkeypatch, dtype):
    """Over more rows than programs, and of numbers whose mean is not zero: neither of x, nor of the
    addends of dweight and dbias."""
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 3)
    x, dy = random(90, 200, seed=1).detach() + 2, random(90, 200, seed=2).detach() + 1
    weight, bias = (random(200, seed=seed).detach() for seed in (3, 4))
    x, dy, weight, bias = (tensor.to(dtype) for tensor in (x, dy, weight, bias))
    _, y, mean, rstd = layernorm.layer_norm_forward(x, weight, bias)
    inputs = [exact(tensor) for tensor in (x, weight, bias)]
    y64 = layernorm.layer_norm_reference(*inputs)
    assert_rounded_once(y, y64.detach())
    found = layernorm.layer_norm_backward(dy, x, weight, mean, rstd)
    for gradient, gradient64 in zip(found, torch.autograd.grad(y64, inputs, dy.double())):
        assert_rounded_once(gradient, gradient64)


@IN_16_BITS
def test_elu_rounds_once(dtype):
    x, dy = random(3000, scale=2).detach().to(dtype), random(3000, seed=1).detach().to(dtype)
    x64 = exact(x)
    y64 = elu.elu_reference(x64, 0.7)
    assert_rounded_once(elu.elu_forward(x, 0.7), y64.detach())
    [dx64] = torch.autograd.grad(y64, x64, dy.double())
    assert_rounded_once(elu.elu_backward(dy, x, 0.7), dx64)


@pytest.mark.skipif(DEVICE == "cuda", reason="there, weights are rounded for the tensor cores")
@IN_16_BITS
def test_attention_rounds_once(dtype):
    """Over several blocks of keys and of queries, for two heads that share them. Backward is given
    the output that forward has rounded."""
    q, k, v = (x.detach() for x in qkv(2, 1, 140, 140, 16, dtype))
    out, lse = flash.flash_forward(q, k, v + 1, True)
    out64, lse64 = flash.reference_forward(*(x.double() for x in (q, k, v + 1)), True)
    assert_rounded_once(out, out64)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-6, atol=1e-6)
    dout = random(*q.shape, seed=9).detach().to(dtype)
    found = flash.flash_backward(dout, q, k, v + 1, out, lse, True)
    wide = [x.double() for x in (dout, q, k, v + 1, out, lse)]
    for gradient, gradient64 in zip(found, flash.reference_backward(*wide, True)):
        assert_rounded_once(gradient, gradient64)


# ------------------------------------------------------------------------------- in the model


def test_the_models_seams_take_the_kernels():
    cfg = common.Config(layers=1, dim=64, heads=4, kv_heads=2, seq=8, vocab=32)
    plain, fused = (common.gpt(cfg, device=DEVICE) for _ in range(2))
    fused.block1.attn.core = flash.flash_attention
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    for model in (plain, fused):
        common.loss_sum(model(tokens), tokens).backward()
    for p, q in zip(plain.parameters(), fused.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- compiled

# Bytes of shared memory that a program may have; for sm_80, of the smallest that run its code.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


@pytest.fixture(scope="module", autouse=True)
def compilers(request, tmp_path_factory):
    """{chip: a process that compiles kernels/ for it}, from the first test of this file to its last
    one, if a test asks for them: the cores are not busy all the time."""
    if not any(item.name.startswith("test_compiled") for item in request.session.items):
        yield
        return
    with contextlib.ExitStack() as stack:
        yield {arch: stack.enter_context(compiler(arch, tmp_path_factory)) for arch in SHARED}


@contextlib.contextmanager
def compiler(arch, tmp_path_factory):
    few = [] if os.environ.get("FULL") else ["--few"]
    command = ["nice", sys.executable, ROOT / "tests/kernels/compile_kernels.py", str(arch), *few]
    environment = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("compiler"))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        yield process
        process.kill()  # if no test has waited for it


@pytest.mark.parametrize("arch", SHARED)
def test_compiled_without_spills_for(compilers, arch):
    output, errors = compilers[arch].communicate(timeout=600)
    assert compilers[arch].returncode == 0, errors[-2000:]
    compiled = json.loads(output)
    names = {(kernel["case"].split()[0], kernel["kernel"]) for kernel in compiled}
    assert len(names) == (7 if arch == 80 else 9) and len(compiled) > 13, names
    for kernel in compiled:
        # float32 has no tensor cores: many registers, and a few too many by some compilers
        allowed = 16 if "attention" in kernel["case"] and "float32" in kernel["case"] else 0
        version = importlib.metadata.version("triton").split(".")
        if tuple(map(int, version[:2])) >= (3, 7):  # older compilers spill here and there
            assert kernel["stack"] <= allowed, kernel
        assert kernel["shared"] <= SHARED[arch], kernel
        assert "tf32" not in kernel["instructions"], kernel  # which no interpreter rounds to
        if kernel["kernel"] == "elu_forward_kernel":  # the lesson's budget, on an H200
            assert 16 * 15 < kernel["count"] < 16 * elu.instruction_budget(2, bandwidth=4.8e12)
        if "attention" in kernel["case"] and "float32" not in kernel["case"]:
            assert TENSOR_CORES[arch] in kernel["instructions"], kernel
            assert ("cp.async.bulk.tensor" in kernel["instructions"]) == (arch >= 90), kernel
        if kernel["kernel"] == "product_kernel":
            assert TENSOR_CORES[arch] in kernel["instructions"], kernel


# ------------------------------------------------------------------------------- the benchmark


def test_the_benchmark_from_end_to_end(monkeypatch, tmp_path, capsys):
    """Not what it measures, which takes a GPU, but that it would."""
    bench = importlib.import_module("benchmarks.kernels")
    sizes = {"WIDTHS": (64, 256), "NUMBERS": 1024, "SEQUENCES": (16, 32), "DIMS": (16,), "DIM": 32}
    sizes |= {"DEVICE": DEVICE, "TOKENS": 32, "BACKENDS": {"flash": SDPBackend.FLASH_ATTENTION}}
    sizes |= {"SIZES": (32,)}
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(bench, "milliseconds", lambda function: function() is None or 0.5)
    bench.main(["--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| LayerNorm backward | 256 |" in printed and "| causal backward | 16 | 32 |" in printed
    rows = list(csv.DictReader(open(tmp_path / "kernels_attention.csv")))
    assert len(rows) == 8 and float(rows[0]["kernel"]) == 2 * flash.flops(2, 2, 16, 16, 16, 0) / 1e9
    rows = list(csv.DictReader(open(tmp_path / "kernels_fp8.csv")))
    speeds = [str(n * 32**3 / ms / 1e9) for n, ms in ((2, 0.5), (6, 1))]
    assert [row["bf16"] for row in rows] == speeds
    for name in ("pointwise", "attention", "fp8"):
        assert (tmp_path / f"kernels_{name}.png").stat().st_size > 10_000
    monkeypatch.setattr(bench, "TRIED", {name: [(16, 16, 4, 1)] for name in bench.TRIED})
    bench.main(["--tune"])
    assert "head dim 16, full, dk_dv (16, 16, 4, 1): " in capsys.readouterr().out
