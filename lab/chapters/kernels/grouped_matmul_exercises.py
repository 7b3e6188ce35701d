"""The exercise of kernels/grouped_matmul.py."""

import torch

from lab.classroom.exercise import Exercise, Same, random


def gradients(chapter, dtype, ends):
    rows, matrices = random(10, 8).to(dtype), random(4, 8, 16).to(dtype)
    rows.requires_grad_(), matrices.requires_grad_()
    out = chapter.GroupedMatmul.apply(rows, matrices, torch.tensor(ends, dtype=torch.int32))
    out.backward(random(10, 16).to(dtype))
    return {"dX": rows.grad, "dW": matrices.grad}


def gradients_of_all(chapter):
    return gradients(chapter, torch.float64, [3, 5, 9, 10])


def gradients_without_a_row(chapter):
    return gradients(chapter, torch.float32, [0, 4, 4, 10])


def gradient_of_a_sum(chapter):
    """All of its numbers lie in one place of memory."""
    rows, matrices = random(6, 8).float().requires_grad_(), random(2, 8, 4).float()
    out = chapter.GroupedMatmul.apply(rows, matrices, torch.tensor([2, 6], dtype=torch.int32))
    out.sum().backward()
    return rows.grad


EXERCISES = [
    Exercise(
        "grouped_matmul.1", "GroupedMatmul.backward", 2,
        "From the gradient of what came out, (picks, out), give those of rows and of matrices, "
        "each by one grouped_mm, and None for ends. Without a row, that of an expert is zero.",
        ("For one expert it is a linear layer: which two products are its gradients? Over what "
         "does the second one sum?",
         "Rows: the gradient by the transposed matrices, with the same ends. Matrices: rows.T by "
         "the gradient, where the ends cut what is summed over. A gradient may be expanded from a "
         "single number: make it contiguous."),
        (Same(gradients_of_all, "10 rows, 4 experts, float64"),
         Same(gradients_without_a_row, "two experts without a row, float32"),
         Same(gradient_of_a_sum, "of a sum, whose gradient is one number, expanded")),
    ),
]
