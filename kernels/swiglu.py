r"""SwiGLU: an activation with two inputs, and what a fused kernel need not keep.

    y = silu(gate) · up                 silu(x) = x · sigmoid(x)

An MLP with a gate has two matrices that read its input. One of the two outputs decides, number by
number, how much of the other one goes on to the last matrix. In PyTorch's operators that is two
kernels, with silu(gate) in memory between them:

    bytes a number (B each)      a chain                            one kernel
    forward     silu             read B, write B
                product          read 2 B, write B                  read 2 B, write B
    backward    of silu(gate)    read dy, up, write B
                of up            read dy, silu(gate), write B       read dy, gate, up
                of gate          read that, gate, write B           write 2 B

So 3 B for 5 B forward, and 5 B for 9 B backward (`forward_bytes`, `backward_bytes`, and those of a
chain). The FLOPs do not matter: see elu.py.

It also keeps less. A product's backward reads both factors, so the chain keeps gate (for silu's
backward), silu(gate) and up. The kernel keeps gate and up alone, and computes silu again, from what
it has to load anyway: nothing is cheaper to recompute than what needs no byte more. (`kept_bytes`.
The product is kept as well, by the matrix that reads it.) With s = sigmoid(gate), backward is

    dup   = dy · gate · s
    dgate = dy · up · s · (1 + gate · (1 - s))

Sources: Shazeer, GLU Variants Improve Transformer (2020); Hsu et al., Liger Kernel (2024).
"""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from kernels.elu import BLOCK, DTYPES, dense_like, jit, runs_here, triton

if triton:
    import triton.language as tl


def swiglu_reference(up, gate):
    """The same in plain PyTorch: two tensors of a shape and dtype; returns such a one."""
    return F.silu(gate) * up


def chain_forward_bytes(numbers, width):
    silu, product = 2, 3
    return numbers * (silu + product) * width


def chain_backward_bytes(numbers, width):
    of_silu, of_up, of_gate = 3, 3, 3
    return numbers * (of_silu + of_up + of_gate) * width


def forward_bytes(numbers, width):
    """Bytes that one kernel moves: gate, up, y. width: bytes of a number."""
    return numbers * 3 * width


def backward_bytes(numbers, width):
    """dy, gate, up, and the gradients of both."""
    return numbers * 5 * width


def kept_bytes(numbers, width, fused):
    """Bytes kept for backward: gate, up, and of a chain silu(gate)."""
    return numbers * (2 if fused else 3) * width


@jit
def forward_kernel(up_ptr, gate_ptr, y_ptr, n, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    up = tl.load(up_ptr + here, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + here, mask=inside, other=0).to(tl.float32)
    tl.store(y_ptr + here, gate * tl.sigmoid(gate) * up, mask=inside)


@jit
def backward_kernel(dy_ptr, up_ptr, gate_ptr, dup_ptr, dgate_ptr, n, BLOCK: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = here < n
    dy = tl.load(dy_ptr + here, mask=inside, other=0).to(tl.float32)
    up = tl.load(up_ptr + here, mask=inside, other=0).to(tl.float32)
    gate = tl.load(gate_ptr + here, mask=inside, other=0).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dup_ptr + here, dy * gate * s, mask=inside)
    tl.store(dgate_ptr + here, dy * up * s * (1 + gate * (1 - s)), mask=inside)


def swiglu_forward(up, gate):
    """Two tensors of one shape and dtype, of any strides; returns y, laid out as up is."""
    y = torch.empty_like(up)                            # keeps the strides of up, but not its gaps
    if up.numel():
        with torch.cuda.device_of(up):
            forward_kernel[(triton.cdiv(up.numel(), BLOCK),)](
                dense_like(up, y), dense_like(gate, y), y, up.numel(), BLOCK)
    return y


def swiglu_backward(dy, up, gate):
    """The gradients of up and gate, from that of y."""
    dup, dgate = torch.empty_like(up), torch.empty_like(up)
    if up.numel():
        with torch.cuda.device_of(up):
            backward_kernel[(triton.cdiv(up.numel(), BLOCK),)](
                dense_like(dy, dup), dense_like(up, dup), dense_like(gate, dup), dup, dgate,
                up.numel(), BLOCK)
    return dup, dgate


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, up, gate):
        ctx.save_for_backward(up, gate)                 # and not silu(gate)
        return swiglu_forward(up, gate)

    @staticmethod
    @once_differentiable                # its own gradient would be left out
    def backward(ctx, dy):
        return swiglu_backward(dy, *ctx.saved_tensors)


def swiglu(up, gate):
    """silu(gate) · up, of two tensors of one shape, any strides, and float32, float16 or bfloat16;
    differentiable. The order is that of common.activate.

    Raises ValueError for others. Where Triton cannot run, this is `swiglu_reference`.
    """
    if up.dtype not in DTYPES:
        raise ValueError(f"swiglu: up of shape {tuple(up.shape)} is {up.dtype}; expected float32, "
                         "float16 or bfloat16")
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise ValueError(f"swiglu: gate of shape {tuple(gate.shape)} is {gate.dtype} on "
                         f"{gate.device}; expected {tuple(up.shape)}, {up.dtype} on {up.device}, "
                         "as up is")
    return SwiGLU.apply(up, gate) if runs_here(up) else swiglu_reference(up, gate)
