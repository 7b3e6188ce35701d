"""Random tensors for kernels, and a kernel compared with its reference in float64."""

import importlib

import pytest
import torch

from tests.conftest import needs_triton

pytest.importorskip("triton")
flash = importlib.import_module("kernels.flash_attention")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = torch.float32, torch.float16, torch.bfloat16
# Relative to the largest number. Kernels compute in float32, so they are off by the rounding of
# their results (half of 2^-11 or 2^-8) and, on a GPU, of the weights that go into a dot.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Triton's interpreter cuts off the last bits of bfloat16, so there only float16 is rounded once.
IN_16_BITS = pytest.mark.parametrize("dtype", DTYPES[1 : 2 if DEVICE == "cpu" else 3], ids=str)


@pytest.fixture(autouse=True)
def interpreter(request):
    """Skip what Triton's interpreter would run, where it can't."""
    if "compiled" not in request.node.name:
        needs_triton()


def random(*shape, dtype=torch.float32, scale=1.0, seed=0):
    """The same random tensor for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * scale
    return x.to(DEVICE, dtype)


def exact(x):
    """A copy in float64 that requires a gradient."""
    return None if x is None else x.detach().double().requires_grad_()


def assert_close(actual, expected, dtype, smallest=0.1):
    """smallest: a tensor whose largest number is below this may be off by as much as one of it."""
    assert actual.shape == expected.shape and actual.dtype == dtype
    largest = expected.detach().abs().nan_to_num(posinf=0).max().item() if expected.numel() else 0
    tolerance = TOLERANCE[dtype] * max(largest, smallest)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=tolerance)


def assert_rounded_once(actual, expected):
    """Off by half of a last bit of 16 bits, or by what float32 is off. TOLERANCE would also accept
    sums whose addends were rounded to 16 bits."""
    half_a_bit = expected.abs() * torch.finfo(actual.dtype).eps / 2
    off = (actual.double() - expected).abs() - half_a_bit
    assert off.max() <= 3e-6 * expected.abs().max(), off.max() / expected.abs().max()


def compare(function, reference, inputs, used=None, gradients=None):
    """What comes out of a kernel and all its gradients, against its reference in float64.

    used: of several outputs, those through which backward comes; default: all. gradients: theirs.
    """
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    exacts = [exact(x) for x in inputs]
    actual, expected = function(*inputs), reference(*exacts)
    if torch.is_tensor(actual):
        actual, expected = (actual,), (expected,)
    used = range(len(actual)) if used is None else used
    if gradients is None:
        gradients = [random(*actual[i].shape, seed=i + 5).to(actual[i].dtype) for i in used]
    torch.autograd.backward([actual[i] for i in used], gradients)
    torch.autograd.backward([expected[i] for i in used], [g.double() for g in gradients])
    for one, other in zip(actual, expected):
        assert_close(one, other, inputs[0].dtype)
    for x, x64 in zip(inputs, exacts):
        if x is not None:
            unused = torch.zeros_like(x64) if x64.grad is None else x64.grad
            assert_close(x.grad, unused, x.dtype)


def compare_rounding(actual, reference, inputs, dy):
    """actual: y, and the gradients of all inputs, of which nothing was rounded to 16 bits."""
    exacts = [exact(x) for x in inputs]
    y = reference(*exacts)
    for one, other in zip(actual, (y.detach(), *torch.autograd.grad(y, exacts, dy.double()))):
        assert_rounded_once(one, other)


def qkv(heads, kv_heads, queries, keys, dim, dtype=torch.float32, batch=1, scale=1.0):
    """Random queries, keys and values."""
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [random(batch, h, s, dim, dtype=dtype, scale=scale, seed=i)
            for i, (h, s) in enumerate(shapes)]
