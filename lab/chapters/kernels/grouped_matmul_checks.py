"""Checks of the exercises of kernels/grouped_matmul.py."""

import torch

from lab.chapters.checking import random


def gradients(chapter, dtype, ends):
    rows, matrices = random(10, 8).to(dtype), random(4, 8, 16).to(dtype)
    rows.requires_grad_(), matrices.requires_grad_()
    out = chapter.GroupedMatmul.apply(rows, matrices, torch.tensor(ends, dtype=torch.int32))
    out.backward(random(10, 16).to(dtype))
    return {"dX": rows.grad, "dW": matrices.grad}


def gradient_of_a_sum(chapter):
    """All of its numbers lie in one place of memory."""
    rows, matrices = random(6, 8).float().requires_grad_(), random(2, 8, 4).float()
    out = chapter.GroupedMatmul.apply(rows, matrices, torch.tensor([2, 6], dtype=torch.int32))
    out.sum().backward()
    return rows.grad
