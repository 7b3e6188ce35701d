"""Rectangles of any range of any tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.checkpoints import checkpoint


@st.composite
def ranges(draw):
    """A shape, and a range of its numbers."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5).map(tuple))
    numbers = math.prod(shape)
    start = draw(st.integers(0, numbers))
    return shape, start, draw(st.integers(start, numbers))


@given(ranges())
def test_rectangles_tile_their_range(drawn):
    """In order, each number once, and few of them."""
    shape, start, stop = drawn
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = list(checkpoint.rectangles(shape, start, stop))
    inside = [numbers[tuple(slice(at, at + size) for at, size in zip(*one))] for one in found]
    assert [part.shape for part in inside] == [sizes for _, sizes in found]
    assert [number for part in inside for number in part.flatten().tolist()] == [
        *range(start, stop)]
    assert len(found) <= 2 * len(shape) - 1
