"""Checks of the exercises of kernels/elu.py."""

import torch

from lab.chapters.checking import random


def bytes_of(chapter, name):
    return [getattr(chapter, name)(1000, width) for width in (2, 4)]


def elu_of_numbers(chapter):
    """Each by its name, so that it is said where it is wrong."""
    x = torch.cat([-torch.logspace(-7, 1, 25), torch.tensor([0.0, -0.4, -0.5, -1, -100])])
    return {f"elu({each:.3g})": value for each, value in zip(x.tolist(), chapter.elu(x))}


def backward_of_40_numbers(chapter):
    dy, x, dx = random(64).float(), random(64).float(), torch.ones(64)
    chapter.elu_backward_kernel[(3,)](dy, x, dx, 40, 0.7, 16)
    return dx
