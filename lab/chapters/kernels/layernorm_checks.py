"""Checks of the exercises of kernels/layernorm.py."""

import torch

from lab.chapters.checking import random

OUTPUTS = "sum", "y", "mean", "rstd"
GRADIENTS = "dx", "dweight", "dbias"


def forward_bytes(chapter, *residual):
    return [chapter.forward_bytes(1000, 768, width, *residual) for width in (2, 4)]


def forward_of_two_rows(chapter):
    """Of three rows of 8 numbers, of which 5 count: all else stays as it was."""
    x, y, weight = random(3, 8).float(), torch.ones(3, 5), random(8).float()
    mean, rstd = torch.ones(2, 2)
    chapter.forward_kernel[(2,)](x, x, weight, weight + 1, y, y, mean, rstd, 8, 8, 5, 0.5, False,
                                 8)
    return {"y": y, "mean": mean, "rstd": rstd}


def forward_around_100(chapter):
    x = 100 + random(3, 9).float()[:, 2:7]
    outputs = chapter.layer_norm_forward(x, random(5).float(), random(5).float(), 0.5)
    return dict(zip(OUTPUTS, outputs))


def forward_with_residual(chapter):
    x, weight, bias = (random(*shape).bfloat16() for shape in ((3, 1000), (1000,), (1000,)))
    residual = random(3, 1024).bfloat16()[:, :1000]
    return dict(zip(OUTPUTS, chapter.layer_norm_forward(x, weight, bias, 0.1, residual)))


def backward_of_two_programs(chapter):
    dy, x = random(2, 14, 21).float()
    mean, rstd = random(2, 14).float()
    dx, sums = torch.ones(14, 21), torch.zeros(2, 4, 21)
    chapter.backward_kernel[(2, 2)](dy, x, x, dy[12], mean, rstd, dx, *sums, 21, 21, 21, 10, 21,
                                    True, 4, 16, 2, 1)
    return {"dx": dx, "dweight": sums[0].sum(0), "dbias": sums[1].sum(0)}


def backward_without_residual(chapter):
    dy, x = random(150, 24).float()[:, 3:], random(150, 21).float()
    gradients = chapter.layer_norm_backward(dy, x, random(21).float(), *random(2, 150).float())
    return dict(zip(GRADIENTS, gradients))


def backward_of_long_rows(chapter):
    dy, x = random(2, 5000).float(), random(2, 5000).float()
    gradients = chapter.layer_norm_backward(dy, x, random(5000).float(), *random(2, 2).float())
    return dict(zip(GRADIENTS, gradients))
