"""kernels/grouped_matmul.py against chapter 08's loop over the experts, forward and backward."""

import importlib

import pytest
import torch

from tests.conftest import chapter

grouped_matmul = importlib.import_module("kernels.grouped_matmul")


def both(dtype, columns, counts):
    """Of the loop, and of grouped matmuls: what comes out, and all gradients."""
    eight, ends = chapter("08_expert_parallel"), torch.tensor(counts).cumsum(0)
    found = []
    for grouped in (False, True):
        torch.manual_seed(0)
        rows, out = torch.randn(2, sum(counts), 16, dtype=torch.float64).to(dtype)
        matrices = [torch.randn(len(counts), *shape, dtype=torch.float64).to(dtype) / 8
                    for shape in [(16, 24)] * columns + [(24, 16)]]
        given = [rows, *matrices]
        for x in given:
            x.requires_grad_()
        if grouped:
            y = grouped_matmul.run_experts(rows, matrices[:-1], matrices[-1], ends)
        else:
            y = eight.run_experts(rows, matrices[:-1], matrices[-1], counts)
        y.backward(out)
        found.append([y, *(x.grad for x in given)])
    return zip(*found)


@pytest.mark.parametrize("columns", [1, 2])  # ups; or ups and gates
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5),
                                                  (torch.bfloat16, 2e-2)])
def test_as_the_loop_over_experts(columns, dtype, tolerance):
    """Some experts have no row: their gradient is zero."""
    for counts in ([5, 0, 1, 17, 0, 9, 3, 5], [40], [0, 0, 0]):
        for loop, grouped in both(dtype, columns, counts):
            assert loop.shape == grouped.shape and loop.dtype == grouped.dtype
            if loop.numel():
                scale = loop.abs().max().clamp(min=1e-9)
                assert (loop - grouped).abs().max() <= tolerance * scale
