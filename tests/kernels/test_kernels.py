"""kernels/: forward and gradients against float64, and what their compiler makes of them.

On a GPU the kernels run there. Without one they run in Triton's interpreter (conftest.py sets
TRITON_INTERPRET), which has no registers, no shared memory and no races: so they are also compiled,
in a process of its own, for the chips that they are meant for.
"""

import contextlib
import csv
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.attention import SDPBackend

import common
from tests.conftest import ROOT
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    assert_close,
    backward,
    elu,
    exact,
    flash,
    interpreter,  # noqa: F401  (a fixture)
    layernorm,
    qkv,
    random,
)

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
    cache = getattr(request.config, "cache", None)
    known = {"TRITON_CACHE_DIR": str(cache.mkdir("triton"))} if cache else {}
    with contextlib.ExitStack() as stack:
        yield {arch: stack.enter_context(compiler(arch, known, tmp_path_factory))
               for arch in SHARED}


@contextlib.contextmanager
def compiler(arch, known, tmp_path_factory):
    """known: where Triton finds again what it has compiled, by a hash of all that it comes from."""
    few = [] if os.environ.get("FULL") else ["--few"]
    command = ["nice", sys.executable, ROOT / "tests/kernels/compile_kernels.py", str(arch), *few]
    environment = os.environ | known | {"TMPDIR": str(tmp_path_factory.mktemp("compiler"))}
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
    assert len(names) == (12 if arch == 80 else 14) and len(compiled) > 15, names
    for kernel in compiled:
        # float32 has no tensor cores: many registers, and a few too many by some compilers
        allowed = 32 if "attention" in kernel["case"] and "float32" in kernel["case"] else 0
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
        if "matmul" in kernel["case"] and "bfloat16" in kernel["case"] and arch == 90:
            # as kernels/matmul.py says
            assert (kernel["shared"], kernel["occupancy"]) == (96 * 1024, 16 / 64), kernel
        if (kernel["kernel"] in ("product_kernel", "tiled_kernel")
                and "float32" not in kernel["case"]):  # fmt: skip
            assert TENSOR_CORES[arch] in kernel["instructions"], kernel


# ------------------------------------------------------------------------------- the benchmark


def test_the_benchmark_from_end_to_end(monkeypatch, tmp_path, capsys):
    """Not what it measures, which takes a GPU, but that it would."""
    bench = importlib.import_module("benchmarks.time_kernels")
    sizes = {"WIDTHS": (64, 256), "NUMBERS": 1024, "SEQUENCES": (16, 32), "DIMS": (16,), "DIM": 32}
    sizes |= {"DEVICE": DEVICE, "TOKENS": 32, "BACKENDS": {"flash": SDPBackend.FLASH_ATTENTION}}
    sizes |= {"SIZES": (32,), "MOST_NAIVE": 31, "TRIED_TILES": [(16, 16, 16, 1, 1)]}
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(bench, "milliseconds", lambda function: function() is None or 0.5)
    drawn, new_figure = [], bench.new_figure
    monkeypatch.setattr(bench, "new_figure", lambda *size: drawn.append(new_figure(*size))
                        or drawn[-1])
    bench.main(["--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for name in ("ELU", "SwiGLU", "LayerNorm", "RMSNorm"):
        assert f"| {name} backward | 256 |" in printed
    assert "| LayerNorm forward | 64 |" in printed and "| causal backward | 16 | 32 |" in printed
    rows = list(csv.DictReader(open(tmp_path / "kernels_attention.csv")))
    assert len(rows) == 8 and float(rows[0]["kernel"]) == 2 * flash.flops(2, 2, 16, 16, 16, 0) / 1e9
    rows = list(csv.DictReader(open(tmp_path / "kernels_fp8.csv")))
    speeds = [str(n * 32**3 / ms / 1e9) for n, ms in ((2, 0.5), (6, 1))]
    assert [row["bf16"] for row in rows] == speeds
    rows = list(csv.DictReader(open(tmp_path / "kernels_matmul.csv")))
    assert [row["what"] for row in rows] == ["matmul bfloat16", "matmul float32"]
    assert [rows[0][way] for way in ("cuBLAS", "along", "down")] == [str(2 * 32**3 / 0.5 / 1e9),
                                                                    "nan", "nan"]  # fmt: skip
    for (_, panels), name in zip(drawn, ("pointwise", "matmul", "attention", "fp8")):
        assert (tmp_path / f"kernels_{name}.png").read_bytes().startswith(b"\x89PNG")
        rows = csv.DictReader(open(tmp_path / f"kernels_{name}.csv"))
        speeds = [y for axes in panels.flat for line in axes.lines for y in line.get_ydata()
                  if line.get_label() == "kernel"]
        assert sorted(speeds) == sorted(float(row["kernel"]) for row in rows)
    monkeypatch.setattr(bench, "TRIED", {name: [(16, 16, 4, 1)] for name in bench.TRIED})
    bench.main(["--tune"])
    printed = capsys.readouterr().out
    assert "head dim 16, full, dk_dv (16, 16, 4, 1): " in printed
    assert "matmul of 32, blocks, warps, stages (16, 16, 16, 1, 1): " in printed
