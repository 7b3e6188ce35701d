"""common.py's shards of any tensor."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import common

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=3)
PARTS = st.lists(st.integers(1, 5), min_size=3, max_size=3)


@given(SHAPES, PARTS)
def test_parts_put_together_are_the_whole(shape, parts):
    """Along each dim, in order, but for the zeros behind, fewer than there are parts."""
    full = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)

    def together(cuts):
        dim = len(cuts)
        if dim == len(shape):
            return common.part(full, cuts)
        return torch.cat([together([*cuts, common.Cut(dim, index, parts[dim], None)])
                          for index in range(parts[dim])], dim)

    padded = together([])
    for dim, size in enumerate(shape):
        assert padded.shape[dim] - size < parts[dim]
    assert torch.equal(padded[tuple(map(slice, shape))], full)
    assert padded.count_nonzero() == full.numel()
