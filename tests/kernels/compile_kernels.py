"""Compiles what the launchers of kernels/ would launch on a GPU, on a machine without one.

    python tests/kernels/compile_kernels.py 90 [--only=TEXT]    prints what came out as JSON

Of each kernel: registers, bytes of shared memory, and the share of an SM's warps that find room.

A process of its own, since Triton's interpreter and its compiler do not mix in one.
"""

import argparse
import atexit
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
if "TRITON_CACHE_DIR" not in os.environ:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # fresh
    atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels import elu, flash_attention, fp8, layernorm, matmul, rmsnorm, swiglu

MEMORY = {80: 164 * 1024, 90: 228 * 1024, 100: 228 * 1024}  # bytes that an SM's programs share
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class NoGPU:
    """In place of Triton's driver: says which GPU to compile for, and has none."""

    def __init__(self, arch):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_all(arch, only):
    """Calls the launchers on CPU tensors, compiles instead of launching, and yields what came out.
    only: what must be in a case's description."""
    triton.runtime.driver.set_active(NoGPU(arch))
    launch, compiled = JITFunction.run, []

    def compile_only(self, *args, grid, warmup, **options):
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
    for module in (elu, matmul, layernorm, rmsnorm, swiglu, flash_attention, fp8):
        module.runs_here = lambda x: True
    for case, call in (*cases(), *(cases_of_fp8() if arch >= 90 else ())):
        if only not in case:
            continue
        compiled.clear()
        call()
        for kernel in compiled:
            taken, about = resources(kernel), kernel.metadata
            room = matmul.occupancy(taken["registers"], about.shared, about.num_warps, MEMORY[arch])
            yield {"case": case, "shared": about.shared, "occupancy": room} | taken


def cases():
    """What to launch: (description, function that does)."""
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    norms = [(64, fp16), (1000, bf16), (4096, bf16), (16384, bf16), (16384, fp32)]
    attention = [(64, bf16, True, 256), (128, bf16, True, 256), (256, bf16, True, 256),
                 (64, fp16, False, 1), (40, bf16, True, 1000), (80, bf16, False, 250),
                 (128, fp32, True, 256)]
    for dtype in (bf16, fp16, fp32):
        x = torch.empty(4096, dtype=dtype)
        yield f"elu {dtype}", lambda x=x: elu.elu_backward(elu.elu_forward(x), x)
        yield f"swiglu {dtype}", lambda x=x: swiglu.swiglu_backward(
            swiglu.swiglu_forward(x, x), x, x)
    odd = (250, 333, 501), fp16  # rows that no copy of 16 bytes fits
    for case in [((256, 384, 512), bf16), ((256, 384, 512), fp32), odd]:
        yield f"matmul {case}", functools.partial(run_matmul, *case)
    for case, residual in itertools.product(norms, (False, True)):
        yield f"layer norm {case} {residual}", functools.partial(run_layer_norm, *case, residual)
        yield f"rms norm {case} {residual}", functools.partial(run_rms_norm, *case, residual)
    for case in attention:
        yield f"attention {case}", functools.partial(run_attention, *case)
    for dim, dtype, causal, seq in attention:
        if causal:
            call = functools.partial(run_attention, dim, dtype, True, seq, [0, seq // 3, seq])
            yield f"attention in documents {dim, dtype, seq}", call


def cases_of_fp8():
    """A layer's forward and backward, which only newer GPUs run."""
    for scaling, dtype in itertools.product(fp8.SCALINGS, (torch.bfloat16, torch.float32)):
        yield f"fp8 {scaling} {dtype}", functools.partial(run_linear, scaling, dtype)


def run_linear(scaling, dtype):
    x, w = (torch.ones(n, 512, dtype=dtype, requires_grad=True) for n in (256, 384))
    fp8.linear8(x, scaling, w)[0].sum().backward()


def run_matmul(sizes, dtype):
    m, k, n = sizes
    a, b = torch.empty(m, k, dtype=dtype), torch.empty(k, n, dtype=dtype)
    matmul.matmul(a, b)
    if dtype == torch.float32:
        matmul.naive(a, b, True)


def run_layer_norm(width, dtype, residual):
    x, weight, bias = (torch.empty(*n, width, dtype=dtype) for n in ((8,), (), ()))
    more = x if residual else None
    total, y, mean, rstd = layernorm.layer_norm_forward(x, weight, bias, residual=more)
    layernorm.layer_norm_backward(y, total, weight, mean, rstd, more)


def run_rms_norm(width, dtype, residual):
    x, weight = (torch.empty(*n, width, dtype=dtype) for n in ((8,), ()))
    more = x if residual else None
    total, y, rrms = rmsnorm.rms_norm_forward(x, weight, residual=more)
    rmsnorm.rms_norm_backward(y, total, weight, rrms, more)


def run_attention(dim, dtype, causal, seq, lengths=None):
    """Grouped queries, or one of everything: 1 is a constant to Triton, and 1000 not aligned."""
    batch, heads, kv_heads = (1, 1, 1) if seq == 1 else (2, 4, 2)
    q, k, v = (torch.empty(batch, n, seq, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    lengths = lengths and torch.tensor(lengths)
    seen = causal, flash_attention.seen_from(q, k, causal, lengths)
    out, lse = flash_attention.flash_forward(q, k, v, *seen)
    flash_attention.flash_backward(out, q, k, v, out, lse, *seen)


def resources(kernel):
    """Registers of a thread, bytes of its stack (0 means that nothing is spilled), and which the
    kernel has of the instructions that matter: tensor cores of Ampere, Hopper and Blackwell, the
    copy engine, and float32 cut to 10 bits."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    name, registers, stack = re.search(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", printed).groups()
    interesting = "mma.sync", "wgmma", "tcgen05.mma", "cp.async.bulk.tensor", "tf32"
    present = [name for name in interesting if name in kernel.asm["ptx"]]
    return {"kernel": name, "instructions": present, "registers": int(registers),
            "stack": int(stack)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", type=int, choices=(80, 90, 100), help="Ampere, Hopper, Blackwell")
    parser.add_argument("--only", default="", help="cases whose description contains this")
    args = parser.parse_args()
    compiled = compile_all(args.arch, args.only)
    print("[" + ",\n ".join(map(json.dumps, compiled)) + "]")
