"""Checks of the exercises of kernels/swiglu.py."""

import torch

from lab.chapters.checking import random


def gradients_of_40_numbers(chapter):
    dy, up, gate = (random(64).float() for _ in range(3))
    dup, dgate = torch.ones(64), torch.ones(64)
    chapter.backward_kernel[(3,)](dy, up, 2 * gate, dup, dgate, 40, 16)
    return {"the gradient of up": dup, "the gradient of gate": dgate}


def gradients_of_16_bits(chapter):
    """Where silu is rounded on the way, the gradient of up is another."""
    dy, up, gate = (random(5, 700).half() for _ in range(3))
    dup, dgate = chapter.swiglu_backward(dy, up, gate)
    return {"the gradient of up": dup, "the gradient of gate": dgate}
