"""A matmul for all experts: PyTorch's grouped kernel, and its backward by hand.

The rows of a mixture are sorted by expert, and each expert has some of them, maybe none. A loop
over the experts starts a matmul for each, and the host has to know how many rows it takes. A
grouped kernel takes all of them at once, and reads on the device where each expert's rows end.

    forward     rows (picks, in) by matrices (experts, in, out) gives (picks, out)
    dX          gradient (picks, out) by the transposed matrices gives (picks, in)
    dW          rows.T (in, picks) by gradient (picks, out), each sum over one expert's rows alone,
                gives (experts, in, out): zero for an expert without a row

`torch.nn.functional.grouped_mm` does all three; on GPUs with bf16 in one kernel, elsewhere in a
loop of its own. It wants rows that begin at multiples of 16 bytes, and does not take float64, in
which a run is only held to one GPU: there each expert is a matmul of ours.

Source: Gale et al., MegaBlocks (2022), section 3 (its block-sparse kernels; these are dense).
"""

import torch
import torch.nn.functional as F

import common


class GroupedMatmul(torch.autograd.Function):
    """The rows of each expert times its matrix. rows (picks, in), sorted by expert; matrices
    (experts, in, out); ends (experts,), int32 on the device: where each expert's rows end. Returns
    (picks, out). Sends nothing. With bf16 on a GPU the host does not wait; a loop reads ends."""

    @staticmethod
    def forward(ctx, rows, matrices, ends):
        ctx.save_for_backward(rows, matrices, ends)
        return grouped_mm(rows, matrices, ends)

    @staticmethod
    def backward(ctx, gradient):
        rows, matrices, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_rows = grouped_mm(gradient, matrices.transpose(1, 2), ends)
        of_matrices = grouped_mm(rows.T, gradient, ends)
        return of_rows, of_matrices, None


def grouped_mm(a, b, ends):
    """(picks, in) @ (experts, in, out), or the parts of (in, picks) @ (picks, out)."""
    if a.dtype != torch.float64:
        return F.grouped_mm(a, b, offs=ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    if b.ndim == 3:
        return torch.cat([part @ matrix for part, matrix in zip(a.split(sizes), b)])
    return torch.stack([x @ y for x, y in zip(a.split(sizes, dim=1), b.split(sizes))])


def run_experts(rows, columns, downs, ends):
    """As chapter 08's loop over the experts, which takes how many rows each has, in place of ends.
    columns: [ups], or [ups, gates], (experts, dim, hidden) each; downs (experts, hidden, dim)."""
    ends = ends.to(torch.int32)
    hidden = [GroupedMatmul.apply(rows, matrices, ends) for matrices in columns]
    return GroupedMatmul.apply(common.activate(*hidden), downs, ends)
