"""Puts the kernels of this folder into a common.gpt: norms, a gated MLP's activation, attention."""

import functools

from torch import nn

import common
from kernels.flash_attention import flash_attention
from kernels.layernorm import layer_norm, runs_here
from kernels.rmsnorm import rms_norm
from kernels.swiglu import swiglu


def use_kernels(model):
    """Returns a core of attention for it, or None where Triton cannot run: it does on a GPU, or
    anywhere under TRITON_INTERPRET=1."""
    if not runs_here(model.embedding.weight):
        return None
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = functools.partial(
                layer_norm, weight=module.weight, bias=module.bias, eps=module.eps)
        if isinstance(module, nn.RMSNorm):
            module.forward = functools.partial(
                rms_norm, weight=module.weight, eps=module.eps)
        if isinstance(module, common.MLP) and module.gate is not None:
            module.forward = functools.partial(gated, module)
    return flash_attention


def gated(mlp, x):
    return mlp.down(swiglu(*mlp.project(x)))
