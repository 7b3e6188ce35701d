"""Random tensors for kernels, where they run, and how close to exact they must be."""

import importlib

import pytest
import torch

from tests.conftest import needs_triton

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


def qkv(heads, kv_heads, queries, keys, dim, dtype=torch.float32, batch=1, scale=1.0):
    shapes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    return [
        random(batch, h, s, dim, dtype=dtype, scale=scale, seed=i)
        for i, (h, s) in enumerate(shapes)
    ]
