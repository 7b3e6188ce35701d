"""kernels/elu.py and kernels/swiglu.py, forward and backward, against float64."""

import importlib

import pytest
import torch

from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    IN_16_BITS,
    assert_close,
    compare,
    compare_rounding,
    exact,
    interpreter,  # noqa: F401  (a fixture)
    random,
)

elu = importlib.import_module("kernels.elu")
swiglu = importlib.import_module("kernels.swiglu")
SHAPES = [(0,), (1,), (2049,), (3, 5, 700)]  # a program has 2,048 numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise_kernels(dtype):
    for shape in SHAPES:
        x, gate = (random(*shape, dtype=dtype, scale=3, seed=i) for i in range(2))
        compare(lambda x: elu.elu(x, 0.7), lambda x: elu.elu_reference(x, 0.7), [x])
        compare(swiglu.swiglu, swiglu.swiglu_reference, [x, gate])


def test_any_strides():
    base = random(6, 10, scale=2)
    for x, dy in [(base.t(), random(10, 6)), (base[:, ::2], torch.ones_like(base[:, ::2])),
                  (base[:1].expand(4, 10), random(10, 4, seed=3).t())]:  # fmt: skip
        compare(elu.elu, elu.elu_reference, [x], gradients=[dy])
    assert elu.elu(base.t()).stride() == base.t().stride()  # walked through memory as it is
    up, gate = base.t(), random(10, 12, seed=1)[:, ::2]
    compare(swiglu.swiglu, swiglu.swiglu_reference, [up, gate],
            gradients=[random(1, 6).expand(10, 6)])  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, in the interpreter
def test_extreme_values():
    inf, nan = float("inf"), float("nan")
    values = [-1e38, -1e4, -1e-6, -1e-20, -0.0, 0.0, 1e-20, 1e4, 1e38, inf, -inf, nan]
    x = torch.cat([torch.tensor(values), torch.linspace(-2, 2, 1000)]).to(DEVICE).requires_grad_()
    x64 = exact(x)
    y, y64 = elu.elu(x), elu.elu_reference(x64)
    # relative, so that nothing cancels near 0
    torch.testing.assert_close(y.double(), y64, rtol=5e-7, atol=0, equal_nan=True)
    y.sum().backward()
    y64.sum().backward()
    usual = x64.isfinite()
    torch.testing.assert_close(x.grad[usual].double(), x64.grad[usual], rtol=5e-7, atol=1e-30)
    assert x.grad[9] == 1 and x.grad[10] == 0  # of inf and -inf

    gate = torch.tensor([-1e38, -1e4, -90.0, -1e-20, 0.0, 1e-20, 90.0, 1e4, 1e38], device=DEVICE)
    compare(swiglu.swiglu, swiglu.swiglu_reference, [torch.ones_like(gate), gate],
            gradients=[torch.full_like(gate, 1e-3)])  # fmt: skip


@IN_16_BITS
def test_pointwise_kernels_round_once(dtype):
    x, gate, dy = (random(3000, scale=2, seed=i).to(dtype) for i in range(3))
    actual = elu.elu_forward(x, 0.7), elu.elu_backward(dy, x, 0.7)
    compare_rounding(actual, lambda x: elu.elu_reference(x, 0.7), [x], dy)
    actual = swiglu.swiglu_forward(x, gate), *swiglu.swiglu_backward(dy, x, gate)
    compare_rounding(actual, swiglu.swiglu_reference, [x, gate], dy)


def test_the_references_are_pytorchs():
    x, gate = exact(random(50)), exact(random(50, seed=1))
    assert_close(elu.elu_reference(x, 0.7).float(), torch.nn.functional.elu(x, 0.7), torch.float32)
    expected = torch.nn.functional.silu(gate) * x
    assert_close(swiglu.swiglu_reference(x, gate).float(), expected, torch.float32)


def test_swiglu_keeps_gate_and_up():
    """The chain of operators keeps silu(gate) as well."""
    for function, fused in ((swiglu.swiglu, True), (swiglu.swiglu_reference, False)):
        kept = {}
        with torch.autograd.graph.saved_tensors_hooks(
                lambda x, kept=kept: kept.setdefault(x.data_ptr(), x), lambda x: x):
            y = function(*(random(4, 8, seed=i).requires_grad_() for i in range(2)))
        assert sum(x.nbytes for x in kept.values()) == swiglu.kept_bytes(y.numel(), 4, fused)


def test_formulas():
    assert elu.chain_bytes(1, 2) == 10 * 2 + 2 and elu.fused_bytes(1, 2) == 2 * 2
    assert elu.arithmetic_intensity(2) == 1.25 and round(elu.instruction_budget(2)) == 37
    assert swiglu.chain_forward_bytes(1, 2) == 5 * 2 and swiglu.forward_bytes(1, 2) == 3 * 2
    assert swiglu.chain_backward_bytes(1, 2) == 9 * 2 and swiglu.backward_bytes(1, 2) == 5 * 2
