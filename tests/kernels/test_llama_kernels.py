"""kernels/rmsnorm.py and kernels/swiglu.py, and the model that takes them, against float64."""

import importlib

import pytest
import torch

import common
from tests.kernels.tensors import (
    DEVICE,
    assert_close,
    backward,
    exact,
    interpreter,  # noqa: F401  (a fixture)
    layernorm,
    random,
)
from tests.kernels.test_kernels import IN_16_BITS, assert_rounded_once

rmsnorm = importlib.import_module("kernels.rmsnorm")
swiglu = importlib.import_module("kernels.swiglu")

# ------------------------------------------------------------------------------- RMSNorm


def compare_rms_norm(x, weight, residual=None, uses=(0, 1)):
    """Against float64: the outputs that are used, and all gradients."""
    inputs = x, weight, residual
    exacts = [exact(tensor) for tensor in inputs]
    outputs = rmsnorm.rms_norm(x, weight, residual=residual)
    outputs64 = rmsnorm.rms_norm_reference(*exacts[:2], residual=exacts[2])
    if residual is None:
        outputs, outputs64, uses = (outputs,), (outputs64,), (0,)
    gradients = [random(*x.shape, seed=i + 5).to(x.dtype) for i in uses]
    backward([outputs[i] for i in uses], gradients)
    backward([outputs64[i] for i in uses], gradients)
    for output, output64 in zip(outputs, outputs64):
        assert_close(output, output64, x.dtype)
    for tensor, tensor64 in zip(inputs, exacts):
        if tensor is not None:
            unused = torch.zeros_like(tensor64) if tensor64.grad is None else tensor64.grad
            assert_close(tensor.grad, unused, tensor.dtype)


@pytest.mark.parametrize(("width", "dtype", "residual"), [
    (1, torch.float32, False), (7, torch.bfloat16, True), (64, torch.float16, False),
    (1000, torch.float32, True), (1000, torch.bfloat16, False), (4096, torch.float16, True),
])  # fmt: skip
def test_rms_norm(width, dtype, residual):
    x, more = (random(2, 3, width, dtype=dtype, seed=seed) for seed in (0, 1))
    compare_rms_norm(x, random(width, dtype=dtype, seed=2), more if residual else None)


def test_the_widest_rms_norm_by_several_programs_a_row(monkeypatch):
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 2)
    compare_rms_norm(random(5, 16384), random(16384, seed=1))
    x, more = (random(5, 16384, dtype=torch.bfloat16, seed=i) for i in range(2))
    compare_rms_norm(x, random(16384, dtype=torch.bfloat16, seed=2), more)


@pytest.mark.parametrize("uses", [(0,), (1,)])
def test_rms_norm_of_which_one_output_is_used(uses):
    compare_rms_norm(random(4, 9), random(9), random(4, 9, seed=2), uses)


@pytest.mark.parametrize("view", ["rows apart", "transposed", "no rows", "zeros"])
def test_rms_norm_of_any_strides(view):
    x = {
        "rows apart": lambda: random(5, 40).detach()[:, 3:20],
        "transposed": lambda: random(17, 5).detach().t(),
        "no rows": lambda: random(0, 17).detach(),
        "zeros": lambda: torch.zeros(3, 17, device=DEVICE),
    }[view]()
    weight = random(34, seed=1).detach()[::2].requires_grad_()
    compare_rms_norm(x.requires_grad_(), weight)


@IN_16_BITS
def test_rms_norm_rounds_once(monkeypatch, dtype):
    """Over more rows than programs: not the addends of dweight, and not x · rrms."""
    monkeypatch.setattr(layernorm, "backward_programs", lambda *sizes: 3)
    x, dy = random(90, 200, seed=1).detach() + 2, random(90, 200, seed=2).detach() + 1
    x, dy, weight = (tensor.to(dtype) for tensor in (x, dy, random(200, seed=3).detach()))
    _, y, rrms = rmsnorm.rms_norm_forward(x, weight)
    inputs = exact(x), exact(weight)
    y64 = rmsnorm.rms_norm_reference(*inputs)
    assert_rounded_once(y, y64.detach())
    found = rmsnorm.rms_norm_backward(dy, x, weight, rrms)
    for gradient, gradient64 in zip(found, torch.autograd.grad(y64, inputs, dy.double())):
        assert_rounded_once(gradient, gradient64)


def test_rms_norm_refuses_what_does_not_fit():
    x, weight = torch.ones(2, 4), torch.ones(4)
    for arguments, message in [
        ((torch.ones(()), weight), r"x has shape \(\); expected \(\.\.\., width\)"),
        ((torch.ones(2, 16385), weight), "with a width of 1 to 16384"),
        ((x.double(), weight), r"x of shape \(2, 4\) is torch.float64"),
        ((x, torch.ones(3)), r"weight has shape \(3,\); expected \(4,\)"),
        ((x, weight.long()), "weight of shape .* is torch.int64 on cpu; expected"),
        ((x, weight, 1e-5, x.half()), "residual of shape .* torch.float16 on cpu; expected"),
    ]:
        with pytest.raises(ValueError, match=message):
            rmsnorm.rms_norm(*arguments)


def test_rms_norm_moves_what_the_lesson_says():
    """LayerNorm's bytes, but for those of rows and of columns."""
    for residual in (False, True):
        fewer = layernorm.forward_bytes(10, 100, 2, residual) - rmsnorm.forward_bytes(
            10, 100, 2, residual)
        assert fewer == 10 * 4 + 100 * 2  # a mean, and the bias
        fewer = layernorm.backward_bytes(10, 100, 2, 3, residual) - rmsnorm.backward_bytes(
            10, 100, 2, 3, residual)
        assert fewer == 10 * 4 + 2 * 3 * 100 * 4 + 100 * 2  # a mean, and the sums for the bias


# ------------------------------------------------------------------------------- SwiGLU


@pytest.mark.parametrize(("shape", "dtype"), [
    ((0,), torch.float32), ((1,), torch.bfloat16), ((2047,), torch.float16),
    ((2049,), torch.float32), ((3, 5, 700), torch.bfloat16), ((3, 5, 700), torch.float16),
])  # fmt: skip
def test_swiglu(shape, dtype):
    compare_swiglu(random(*shape, dtype=dtype), random(*shape, dtype=dtype, scale=3, seed=1))


def compare_swiglu(up, gate, dy=None):
    up64, gate64 = exact(up), exact(gate)
    up, gate = (x if x.is_leaf else x.detach().requires_grad_() for x in (up, gate))
    y, y64 = swiglu.swiglu(up, gate), swiglu.swiglu_reference(up64, gate64)
    dy = random(*up.shape, seed=2).to(up.dtype) if dy is None else dy
    backward([y], [dy])
    backward([y64], [dy])
    assert_close(y, y64, up.dtype)
    assert_close(up.grad, up64.grad, up.dtype)
    assert_close(gate.grad, gate64.grad, up.dtype)


def test_swiglu_of_strides_that_differ():
    up, gate = random(6, 10).detach().t(), random(10, 12, seed=1).detach()[:, ::2]
    compare_swiglu(up.requires_grad_(), gate.requires_grad_(), random(1, 6).expand(10, 6))


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter: sigmoid is 0 there
def test_swiglu_of_extreme_values():
    values = [-1e38, -1e4, -90.0, -1e-20, 0.0, 1e-20, 90.0, 1e4, 1e38]
    gate = torch.tensor(values, device=DEVICE)
    compare_swiglu(torch.ones_like(gate).requires_grad_(), gate.requires_grad_(),
                   torch.full_like(gate, 1e-3))


@IN_16_BITS
def test_swiglu_rounds_once(dtype):
    up, gate, dy = (random(3000, scale=2, seed=i).detach().to(dtype) for i in range(3))
    inputs = exact(up), exact(gate)
    y64 = swiglu.swiglu_reference(*inputs)
    assert_rounded_once(swiglu.swiglu_forward(up, gate), y64.detach())
    found = swiglu.swiglu_backward(dy, up, gate)
    for gradient, gradient64 in zip(found, torch.autograd.grad(y64, inputs, dy.double())):
        assert_rounded_once(gradient, gradient64)


def test_swiglu_keeps_gate_and_up_alone():
    """And the chain, silu(gate) as well: what autograd is given, once each."""
    for function, fused in ((swiglu.swiglu, True), (swiglu.swiglu_reference, False)):
        kept = {}
        note = lambda x, kept=kept: kept.setdefault(x.data_ptr(), x)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            y = function(random(4, 8), random(4, 8, seed=1))
        assert sum(x.nbytes for x in kept.values()) == swiglu.kept_bytes(y.numel(), 4, fused)
    assert swiglu.chain_forward_bytes(1, 2) == 5 * 2 and swiglu.forward_bytes(1, 2) == 3 * 2
    assert swiglu.chain_backward_bytes(1, 2) == 9 * 2 and swiglu.backward_bytes(1, 2) == 5 * 2


def test_swiglu_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"up of shape \(3,\) is torch.int64; expected float32"):
        swiglu.swiglu(torch.ones(3, dtype=torch.int64), torch.ones(3))
    with pytest.raises(ValueError, match=r"gate of shape \(1, 3\) is .*; expected \(3,\), .*32 on"):
        swiglu.swiglu(torch.ones(3), torch.ones(1, 3))


# ------------------------------------------------------------------------------- in the model


def test_a_llama_takes_the_kernels():
    model_of_kernels = importlib.import_module("kernels.model")
    cfg = common.Config(1, 32, 2, 1, 8, 32, gated=True, ffn=44)
    plain, fused = (common.gpt(cfg, device=DEVICE) for _ in range(2))
    fused.block1.attn.core = model_of_kernels.use_kernels(fused)
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    for model in (plain, fused):
        common.loss_sum(model(tokens), tokens).backward()
    assert fused.head.norm.forward.func is rmsnorm.rms_norm
    for p, q in zip(plain.parameters(), fused.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
