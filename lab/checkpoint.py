"""Checkpoints: a run that has stopped goes on, on any number of ranks, in any chapter.

Llama 3 was trained on 16,384 GPUs and interrupted 466 times in 54 days: every three hours. What is
not on a disk by then is computed again. So a run of N ranks saves often, and goes on with the ranks
that are left, which may be fewer, or cut the model otherwise. A file for each rank, as torch.save
writes it, is of no use to them: its tensors are shards of that layout.

    what rank 1 of 4 holds                in the checkpoint
    01, 02   all of every matrix          a (768, 768) at (0, 0), which one rank writes
    04       columns of q, rows of o      a (768, 192) of o at (0, 192)
    03, 09   a shard, cut anywhere        (1, 500) at (192, 268), (190, 768) at (193, 0), ...

So a checkpoint is a set of *global* tensors: the parameters, and beside each its optimizer states,
`block1.attn.q.weight/exp_avg`. A rank knows which rectangles of them it holds: `p.cuts` says where
its part begins, and `flat` which parameters a ZeRO shard runs through. A range of the flat tensor
that begins and ends in the middle of a row is three rectangles: the rest of that row, the whole
rows, the beginning of the last one. With these, PyTorch's distributed checkpoint (DCP) plans:

    save    every rank says what it holds; rank 0 leaves each rectangle to one of those who hold it,
            so that all write about as much; every rank writes its file. No tensor is sent.
    load    every rank asks for the rectangles that it wants to hold, and reads the parts of the
            saved ones that overlap with them. Nothing is sent at all.

Saved is what the optimizer updates: of 16-bit parameters the fp32 masters, from which the run that
goes on makes the parameters anew. It draws its weights as every run does (`common.draw_weights`),
only that the seed now has a checkpoint to draw from.

    bytes       Ψ parameters, their states, and a step count per tensor: 12 Ψ with fp32 under AdamW
    a step      waits while the CPU takes a copy; a thread writes it while training goes on
    complete    a checkpoint is written into a hidden folder, all its files are synced to the disk,
                and the last act gives the folder its name: `step-000020` is complete, or not there
    the index   checkpoint.json, with a CRC-32 of every rectangle, and one of itself
    strangers   DCP's own files are pickles, and to read a pickle is to run what it says. Ours are
                JSON and plain bytes: no name in them becomes a path, no type one of Python's

Sources: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.4; Wan et al., ByteCheckpoint
(2024), section 3; PyTorch, torch.distributed.checkpoint (planner, storage).
"""

import math
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lab.storage import DTYPES, Reader, Writer

# ------------------------------------------------------------------------ who holds which rectangle

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
    """What `tensor`, a parameter of an optimizer or a state in its shape, is of global tensors: as
    `place`, with views into it."""
    if hasattr(p, "flat"):                              # a shard of several, one after the other
        parameters, start = p.flat
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


class Parts(dict):
    """What this rank holds of one global tensor, {offsets: tensor}, as DCP wants to be told."""

    def __init__(self, shape, parts=()):
        super().__init__(parts)
        self.shape = torch.Size(shape)

    def __create_chunk_list__(self):
        return [meta.ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.items()]

    def __create_write_items__(self, name, parts):
        """A WriteItem for each."""
        for chunk, part in zip(self.__create_chunk_list__(), self.values()):
            data = TensorWriteData(chunk, meta.TensorProperties(part.dtype), self.shape)
            index = meta.MetadataIndex(name, chunk.offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


# --------------------------------------------------------------------------------- to files, by DCP

class SavePlanner(dcp.DefaultSavePlanner):
    def lookup_object(self, index):
        return self.state_dict[index.fqn][index.offset]


class LoadPlanner(dcp.DefaultLoadPlanner):
    def lookup_tensor(self, index):
        return self.state_dict[index.fqn][index.offset]


# --------------------------------------------------------------------------------- what a run needs

def state_of(optimizers, buffers):
    """{name: Parts} on the CPU, copied: what this rank holds of the parameters and their states,
    and of buffers, {name: tensor}."""
    state = {}

    def add(name, shape, at, view):
        state.setdefault(name, Parts(shape))[at] = view.detach().to("cpu", copy=True)

    for name, buffer in buffers.items():
        add(name, buffer.shape, torch.Size([0] * buffer.ndim), buffer)
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            for name, shape, at, view in rectangles_of(p, p.detach()):
                add(name, shape, at, view)
            for key, tensor in optimizer.state[p].items():
                for name, shape, at, view in rectangles_of(p, tensor if tensor.ndim else p):
                    if tensor.ndim:
                        add(f"{name}/{key}", shape, at, view)
                    else:                               # a step count: the same for all of it
                        add(f"{name}/{key}", (), torch.Size(), tensor)
    return state


def save(folder, state, about, keep, group):
    """Write a checkpoint, as all ranks of `group` do at once. Communication: what each rank holds,
    to rank 0, and back what it writes; no tensor."""
    dcp.save(state, storage_writer=Writer(folder, about, keep), process_group=group,
             planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))


class Checkpoint(int):
    """A seed whose weights have been drawn before, and trained: common.draw_weights reads them."""

    def __new__(cls, seed, folder, index):
        self = super().__new__(cls, seed)
        self.index, self.reader = index, Reader(folder, index)
        return self

    def load(self, state):
        """Fill the tensors of state, {name: Parts}. Nothing is sent, as DCP warns."""
        planner = LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=self.reader, planner=planner, no_dist=True)

    def value(self, name, p):
        """What is saved of a parameter or a buffer, the part that this rank keeps; None: nothing is
        (of a buffer that does not change, or that the run before had not)."""
        saved = self.index["tensors"].get(name)
        if saved is None:
            return None
        value = torch.zeros(p.shape, dtype=DTYPES[saved["dtype"]])
        placed = place(name, p, [0] * p.ndim, value)
        self.load({name: Parts(shape, {at: view}) for name, shape, at, view in placed})
        return value

    def load_states(self, optimizer):
        """Give the optimizer the states that are saved of its parameters."""
        state, keys = {}, {}
        for name in self.index["tensors"]:
            name, _, key = name.partition("/")
            keys.setdefault(name, []).append(key)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            found = [name for name, *_ in rectangles_of(p, p.detach())]
            for key in filter(None, keys[found[0]] if found else ()):
                saved = self.index["tensors"][f"{found[0]}/{key}"]
                dtype = DTYPES[saved["dtype"]]
                if saved["shape"]:
                    tensor = torch.zeros_like(p, dtype=dtype, requires_grad=False)
                    for name, shape, at, view in rectangles_of(p, tensor):
                        state.setdefault(f"{name}/{key}", Parts(shape))[at] = view
                else:                                   # a step count
                    tensor = torch.zeros((), dtype=dtype, device=p.device)
                    state[f"{found[0]}/{key}"] = Parts((), {torch.Size(): tensor})
                optimizer.state[p][key] = tensor
        self.load(state)
