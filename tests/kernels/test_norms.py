"""kernels/layernorm.py and kernels/rmsnorm.py, forward and backward, against float64."""

import importlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import FULL
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    IN_16_BITS,
    compare,
    compare_rounding,
    interpreter,  # noqa: F401  (a fixture)
    random,
)

layernorm = importlib.import_module("kernels.layernorm")
rmsnorm = importlib.import_module("kernels.rmsnorm")
LAYER = SimpleNamespace(
    call=layernorm.layer_norm, reference=layernorm.layer_norm_reference, weights=2,
    forward=layernorm.layer_norm_forward, backward=layernorm.layer_norm_backward)
RMS = SimpleNamespace(
    call=rmsnorm.rms_norm, reference=rmsnorm.rms_norm_reference, weights=1,
    forward=rmsnorm.rms_norm_forward, backward=rmsnorm.rms_norm_backward)
OF_BOTH = pytest.mark.parametrize("norm", [LAYER, RMS], ids=["layer", "rms"])


def compare_norm(norm, x, residual=None, dtype=None, weights=None, eps=1e-5, **more):
    """dtype: of the weights, if not x's. The outputs are the sum with the residual, and its norm.
    """
    if weights is None:
        weights = [random(x.shape[-1], dtype=dtype or x.dtype, seed=i + 2)
                   for i in range(norm.weights)]

    def called(function):
        return lambda x, residual, *weights: function(x, *weights, eps=eps, residual=residual)

    inputs = [x, residual, *weights]
    compare(called(norm.call), called(norm.reference), inputs, **more)


@OF_BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(norm, dtype):
    """In bfloat16 the weights are also tried in float32, as a mixed-precision model has them."""
    widths = (1, 7, 64, 1000, 4096) if FULL else (7, 1000)
    for width, is_added in itertools.product(widths, (False, True)):
        x, more = (random(2, 3, width, dtype=dtype, seed=i) for i in range(2))
        compare_norm(norm, x, more if is_added else None)
    compare_norm(norm, random(5, 48, dtype=dtype), dtype=torch.float32)


@OF_BOTH
@pytest.mark.parametrize(("dtype", "programs"), [(torch.float32, 3), (torch.bfloat16, 2)])
def test_the_widest_row_with_more_rows_than_programs(monkeypatch, norm, dtype, programs):
    """In bfloat16, two programs share a row and load the next rows while they work."""
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: programs)
    x, more = (random(programs + 2, 16384, dtype=dtype, seed=i) for i in range(2))
    compare_norm(norm, x, more if dtype == torch.bfloat16 else None)


@OF_BOTH
def test_one_output_is_used(norm):
    for used in ((0,), (1,)):
        compare_norm(norm, random(4, 9), random(4, 9, seed=2), used=used)


@OF_BOTH
def test_any_strides(norm):
    for x in (random(5, 40)[:, 3:20], random(17, 5).t(), random(0, 17)):
        compare_norm(norm, x, weights=[w[::2] for w in random(2, 34)[: norm.weights]])
    x, more = random(6, 40)[:, 3:20], random(6, 100, seed=1)[:, :17]
    gradients = [random(1, 17, seed=4).expand(6, 17), random(17, 6, seed=5).t()]
    compare_norm(norm, x, more, eps=0.1, gradients=gradients)


def test_rows_without_variance_and_rows_far_from_zero():
    x = torch.ones(4, 64, device=DEVICE)
    x[1] *= -1e4
    x[2] = 1e4 + torch.arange(64, device=DEVICE)
    x[3] = 0
    compare_norm(LAYER, x)
    compare_norm(RMS, x)


@OF_BOTH
@IN_16_BITS
def test_norms_round_once(monkeypatch, norm, dtype):
    """Over more rows than programs, of numbers whose mean isn't zero: neither x, nor what the sums
    over rows add up, is rounded."""
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 3)
    x, dy = ((random(90, 200, seed=i) + 3 - i).to(dtype) for i in (1, 2))
    weights = [random(200, dtype=dtype, seed=i + 3) for i in range(norm.weights)]
    _, y, *statistics = norm.forward(x, *weights)
    actual = norm.backward(dy, x, weights[0], *statistics)
    compare_rounding([y, *actual], norm.reference, [x, *weights], dy)


def test_bytes_that_are_moved():
    rows, dim = 10**4, 1000
    assert layernorm.forward_bytes(rows, dim, 2) == pytest.approx(2 * 2 * rows * dim, rel=5e-3)
    assert layernorm.forward_bytes(rows, dim, 2, True) == pytest.approx(8 * rows * dim, rel=5e-3)
    assert layernorm.backward_bytes(rows, dim, 2, 264) == pytest.approx(6 * rows * dim, rel=0.15)
    # RMSNorm has no mean and no bias
    forward = [norm.forward_bytes(10, 100, 2, True) for norm in (layernorm, rmsnorm)]
    assert forward[0] - forward[1] == 10 * 4 + 100 * 2
    backward = [norm.backward_bytes(10, 100, 2, 3, True) for norm in (layernorm, rmsnorm)]
    assert backward[0] - backward[1] == 10 * 4 + 2 * 3 * 100 * 4 + 100 * 2
