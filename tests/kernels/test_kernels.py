"""The model that takes the kernels, what their compiler makes of them, and their benchmark.

Triton's interpreter has no registers, no shared memory and no races. So kernels are also compiled
for the chips that they are meant for, which takes no GPU, in a process of its own.
"""

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
from tests.conftest import FULL, ROOT, sample
from tests.kernels.tensors import (
    DEVICE,
    flash,
    interpreter,  # noqa: F401  (a fixture)
)

# ------------------------------------------------------------------------------- in the model


@pytest.mark.parametrize("gated", [False, True])
def test_a_model_takes_the_kernels(gated):
    cfg = common.Config(1, 32, 2, 1, 8, 32, gated=gated, ffn=44)
    plain, fused = (common.gpt(cfg, device=DEVICE) for _ in range(2))
    use_kernels = importlib.import_module("kernels.model").use_kernels
    fused.block1.attn.core = use_kernels(fused)
    assert fused.block1.attn.core is flash.flash_attention
    norm = importlib.import_module("kernels.rmsnorm" if gated else "kernels.layernorm")
    assert fused.head.norm.forward.func is (norm.rms_norm if gated else norm.layer_norm)
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    for model in (plain, fused):
        common.loss_sum(model(tokens), tokens).backward()
    for p, q in zip(plain.parameters(), fused.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------- what does not fit

ONE, TWO = torch.ones(2, 4), torch.ones(4)
Q, LSE = torch.ones(1, 4, 5, 16), torch.zeros(1, 4, 5)
MISFITS = {  # a kernel, and what it says: the arguments
    ("matmul.matmul", "matmul: "): [
        (torch.ones(2, 3), torch.ones(2, 3)), (torch.ones(2, 3), torch.ones(3)),
        (torch.ones(2, 3), torch.ones(3, 2).half()),
        (torch.ones(2, 3).double(), torch.ones(3, 2).double())],
    ("elu.elu", "x of shape"): [(TWO.long(),)],
    ("swiglu.swiglu", "up of shape"): [(TWO.long(), TWO)],
    ("swiglu.swiglu", "gate of shape"): [(TWO, TWO[None])],
    ("rmsnorm.rms_norm", "x has shape"): [(torch.ones(2, 16385), TWO)],
    ("rmsnorm.rms_norm", "x of shape"): [(ONE.double(), TWO)],
    ("rmsnorm.rms_norm", "weight has shape"): [(ONE, torch.ones(3))],
    ("layernorm.layer_norm", "x of shape"): [(ONE.double(), TWO, TWO)],
    ("layernorm.layer_norm", "bias"): [(ONE, TWO, None), (ONE, TWO, TWO.to("meta"))],
    ("flash_attention.flash_attention", "q of shape"): [
        (torch.ones(2, 3, 16), Q, Q), 3 * (torch.ones(1, 2, 3, 257),), 3 * (Q.int(),)],
    ("flash_attention.flash_attention", "k of shape"): [
        (Q, Q.half(), Q), (Q, *2 * (torch.ones(1, 3, 3, 16),))],
    ("flash_attention.flash_attention", "v of shape"): [(Q, Q, torch.ones(1, 4, 3, 16))],
    ("flash_attention.flash_attention", "lengths of shape"): [
        (Q, Q, Q, True, torch.tensor(lengths))
        for lengths in ([0.0, 5.0], [[0, 5]], [1, 5], [0, 3], [0, 3, 2, 5])],
    ("flash_attention.flash_attention", "window is"): [
        (Q, Q, Q, True, None, 0), (Q, Q, Q, False, None, 2)],
    ("flash_attention.flash_backward", "dout of shape"): [(Q.half(), Q, Q, Q, Q, LSE)],
    ("flash_attention.flash_backward", "out of shape"): [
        (Q, Q, Q, Q, torch.ones(1, 4, 6, 16), LSE)],
    ("flash_attention.flash_backward", "lse of shape"): [(Q, Q, Q, Q, Q, LSE[..., None])],
}


@pytest.mark.parametrize(("name", "says"), MISFITS)
def test_what_does_not_fit(name, says):
    module, function = name.split(".")
    kernel = getattr(importlib.import_module(f"kernels.{module}"), function)
    for arguments in MISFITS[name, says]:
        with pytest.raises(ValueError, match=says):
            kernel(*arguments)


# ------------------------------------------------------------------------------- compiled

# Bytes of shared memory that a program may have; for sm_80, of the smallest that run its code.
SHARED = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05.mma"}


def compiled(arch, tmp_path):
    """What compile_kernels.py prints: daily of a matmul, nightly of all kernels."""
    only = [] if FULL else ["--only=matmul ((256, 384, 512), torch.bfloat16)"]
    command = [sys.executable, ROOT / "tests/kernels/compile_kernels.py", str(arch), *only]
    run = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True,
                         text=True, timeout=1800)  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize("arch", sample([90, 80, 100]))
def test_compiled_without_spills_for(arch, tmp_path):
    kernels = compiled(arch, tmp_path)
    names = {(kernel["case"].split()[0], kernel["kernel"]) for kernel in kernels}
    assert len(names) >= ((12 if arch == 80 else 14) if FULL else 1), names
    version = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    for kernel in kernels:
        is_wide = "float32" in kernel["case"]  # which has no tensor cores, but many registers
        if version >= (3, 7):  # older compilers spill here and there
            assert kernel["stack"] <= (32 if "attention" in kernel["case"] and is_wide else 0)
        assert kernel["shared"] <= SHARED[arch], kernel
        assert "tf32" not in kernel["instructions"], kernel  # which no interpreter rounds to
        multiplies = kernel["kernel"] in ("product_kernel", "tiled_kernel")
        if "attention" in kernel["case"] and not is_wide:
            multiplies = True
            assert ("cp.async.bulk.tensor" in kernel["instructions"]) == (arch >= 90), kernel
        if multiplies and not is_wide:
            assert TENSOR_CORES[arch] in kernel["instructions"], kernel
        if "matmul" in kernel["case"] and "bfloat16" in kernel["case"] and arch == 90:
            # as kernels/matmul.py says
            assert (kernel["shared"], kernel["occupancy"]) == (96 * 1024, 16 / 64), kernel


# ------------------------------------------------------------------------------- the benchmark


@pytest.fixture
def bench(monkeypatch):
    """Small sizes: not what it measures, which takes a GPU, but that it would."""
    bench = importlib.import_module("benchmarks.time_kernels")
    sizes = {"WIDTHS": (64, 256), "NUMBERS": 1024, "SEQUENCES": (16, 32), "DIMS": (16,), "DIM": 32,
             "DEVICE": DEVICE, "TOKENS": 32, "BACKENDS": {"flash": SDPBackend.FLASH_ATTENTION},
             "SIZES": (32,), "MOST_NAIVE": 31}  # fmt: skip
    for name, value in sizes.items():
        monkeypatch.setattr(bench, name, value)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(bench, "milliseconds", lambda function: function() is None or 0.5)
    return bench


@pytest.mark.full
def test_the_benchmark_from_end_to_end(bench, capsys):
    bench.main([])
    printed = capsys.readouterr().out
    for name in ("ELU", "SwiGLU", "LayerNorm", "RMSNorm"):
        assert f"| {name} backward | 256 |" in printed
    assert " | nan | nan | " in printed and "| product | 32 |" in printed
    assert next(bench.attention())["kernel"] == 2 * flash.flops(2, 2, 16, 16, 16, 0) / 1e9
    assert next(bench.matmuls())["cuBLAS"] == 2 * 32**3 / 0.5 / 1e9
