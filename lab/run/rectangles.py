"""Which rectangles of the model's global tensors a rank holds, whatever its layout.

`p.cuts` says where its part of a parameter begins, and `flat` which parameters a ZeRO shard runs
through, cut anywhere: lab/checkpoints/checkpoint.py has a drawing.
"""

import math

import torch


def trained(optimizer):
    """The parameters that an optimizer updates."""
    getattr(optimizer, "look", list)()                  # chapter 11's: at pieces of ZeRO's shards
    return [p for group in optimizer.param_groups for p in group["params"]]


def rectangles(shape, start, stop):
    """Yield the rectangles of a tensor's flat range [start, stop), in order: (offsets, sizes)."""
    row = math.prod(shape[1:])
    while start < stop:
        first, inside = divmod(start, row)
        rows = (stop - start) // row
        if inside or not rows:                          # a part of one row, which has rows too
            end = min(stop, (first + 1) * row)
            for offsets, sizes in rectangles(shape[1:], inside, inside + end - start):
                yield (first, *offsets), (1, *sizes)
        else:
            end = start + rows * row
            yield (first, *[0] * len(shape[1:])), (rows, *shape[1:])
        start = end


def place(name, p, offsets, view):
    """Yield (name, full shape, offsets in the full tensor, view) of a rectangle of this rank's part
    of `p`, without what only pads it; nothing, if that is all there is."""
    shape = getattr(p, "full_shape", p.shape)
    offsets, sizes = list(offsets), list(shape)
    for cut in getattr(p, "cuts", ()):
        sizes[cut.dim] = -(-sizes[cut.dim] // cut.parts)
        offsets[cut.dim] += cut.index * sizes[cut.dim]
    for dim, end in enumerate(shape):
        view = view.narrow(dim, 0, min(view.shape[dim], max(0, end - offsets[dim])))
    if view.numel():
        yield name, shape, torch.Size(offsets), view


def rectangles_of(p, tensor):
    """What `tensor` is of global tensors, as `place` says it, in views. It is a parameter of an
    optimizer, or a state of it: in its shape, or one number (a step count)."""
    if not tensor.ndim:
        for name, *_ in rectangles_of(p, p.detach()):
            yield name, (), torch.Size(), tensor
    elif hasattr(p, "flat"):                            # a shard of several, one after the other
        parameters, start, _ = p.flat
        at = 0
        for q in parameters:
            stop = min(q.numel(), start + len(tensor) - at)
            for offsets, sizes in rectangles(q.shape, start, stop):
                end = at + math.prod(sizes)
                yield from place(q.global_name, q, offsets, tensor[at:end].view(sizes))
                at = end
            start = max(0, start - q.numel())
    elif hasattr(p, "placements"):                      # a DTensor
        [chunk] = p.__create_chunk_list__()
        if math.prod(chunk.sizes):
            yield p.global_name, p.shape, chunk.offsets, tensor.to_local()
    else:
        yield from place(p.global_name, p, [0] * p.ndim, tensor)
