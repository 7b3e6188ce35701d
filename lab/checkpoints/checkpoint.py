"""Checkpoints: a run that has stopped goes on, on any number of ranks, in any chapter.

Llama 3 was trained on 16,384 GPUs and interrupted 466 times in 54 days: every 2.8 hours. What is
not on a disk by then is computed again. So a run of N ranks saves often, and goes on with the ranks
that are left, and may cut the model in another way. A file for each rank, as torch.save
writes it, is of no use to them: its tensors are shards of that layout.

So a checkpoint is a set of *global* tensors: the parameters, and beside each its optimizer states,
`block1.attn.q.weight/exp_avg`. A rank knows which rectangles of them it holds: `p.cuts` says where
its part begins, and `flat` which parameters a ZeRO shard runs through, cut anywhere:

    the range [5, 23) of a        . . . . . 1         1 x 1 at (0, 5)       the rest of a row
    matrix of 4 x 6 numbers       2 2 2 2 2 2         2 x 6 at (1, 0)       whole rows
                                  2 2 2 2 2 2
                                  3 3 3 3 3 .         1 x 5 at (3, 0)       a part of the last

With these, PyTorch's distributed checkpoint (DCP) makes plans:

    save    every rank says what it holds; rank 0 leaves each rectangle to one of those who hold it,
            so that all write about as much; every rank writes its file. No tensor is sent.
    load    every rank asks for the rectangles that it wants to hold, and reads the saved ones that
            overlap with them. Nothing is sent at all.

Saved is what the optimizer updates: of 16-bit parameters the fp32 masters, from which the run that
goes on makes the parameters anew. It draws its weights as every run does, and the saved ones take
their place; then come the optimizer states, each rank's own part. The data go on where they were: a
batch is a function of seed and step, and of --seq, which may be another from here on.

With Ψ parameters in fp32 under AdamW, a checkpoint has 12 Ψ bytes, and a step count per tensor. A
step waits for a copy on the CPU (and for the save before, if it is not over), which a thread writes
while training goes on. Files are complete or not there, and a stranger's are safe (storage.py).

Sources: Llama Team, The Llama 3 Herd of Models (2024), section 3.3.4; PyTorch, Distributed
Checkpoint (planner, storage); Wan et al., ByteCheckpoint (2024), of shards that are cut anywhere;
Distributed Training Tutorial, section 15.4.
"""

import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lab.checkpoints.storage import DTYPES, Reader, Writer
from lab.run.rectangles import place, rectangles_of, trained
from lab.run.verify import named_parameters
from lab.run.words import count

# ------------------------------------------------------------------------ who holds which rectangle

class Parts(dict):
    """What this rank holds of one global tensor, {offsets: tensor}, as DCP wants to be told."""

    def __init__(self, shape, parts=()):
        super().__init__(parts)
        self.shape = torch.Size(shape)

    def __create_chunk_list__(self):
        return [meta.ChunkStorageMetadata(torch.Size(at), part.shape) for at, part in self.items()]

    def __create_write_items__(self, name, parts):
        for chunk, part in zip(self.__create_chunk_list__(), self.values()):
            data = TensorWriteData(chunk, meta.TensorProperties(part.dtype), self.shape)
            index = meta.MetadataIndex(name, chunk.offsets)
            yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


# --------------------------------------------------------------------------------- to files, by DCP

class SavePlanner(dcp.DefaultSavePlanner):
    """Finds a rectangle that is to be written in {name: Parts}."""

    def lookup_object(self, index):
        return self.state_dict[index.fqn][index.offset]


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Finds a rectangle that is to be filled in {name: Parts}."""

    def lookup_tensor(self, index):
        return self.state_dict[index.fqn][index.offset]


# --------------------------------------------------------------------------------- what a run needs

def state_of(optimizers, buffers):
    """{name: Parts} on the CPU, copied: what this rank holds of the parameters and their states,
    and of buffers, {name: tensor}."""
    state = {name: Parts(buffer.shape, {torch.Size([0] * buffer.ndim): buffer.cpu().clone()})
             for name, buffer in buffers.items()}
    for optimizer in optimizers:
        for p in trained(optimizer):
            for key, tensor in {"": p.detach(), **optimizer.state.get(p, {})}.items():
                for name, shape, at, view in rectangles_of(p, tensor):
                    name = f"{name}/{key}" if key else name
                    state.setdefault(name, Parts(shape))[at] = view.to("cpu", copy=True)
    return state


def save(folder, state, about, keep, group):
    """All ranks of `group` write a checkpoint. Sent is who holds and who writes what, no tensor."""
    dcp.save(state, storage_writer=Writer(folder, about, keep), process_group=group,
             planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False))


class Checkpoint:
    """One that a run goes on from: what its ranks read of it."""

    def __init__(self, folder, index):
        self.index, self.reader = index, Reader(folder, index)

    def load(self, state):
        """Fill the tensors of state, {name: Parts}. Nothing is sent, as DCP warns."""
        planner = LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=self.reader, planner=planner, no_dist=True)

    def value(self, name, p):
        """What is saved of a parameter or a buffer, the part that this rank keeps."""
        value = torch.zeros(p.shape, dtype=DTYPES[self.index["tensors"][name]["dtype"]])
        placed = place(name, p, [0] * p.ndim, value)
        self.load({name: Parts(shape, {at: view}) for name, shape, at, view in placed})
        return value

    def load_model(self, model):
        """Fill the parameters and buffers of a model."""
        for name, p in (*named_parameters(model), *model.named_buffers()):
            if name in self.index["tensors"]:           # a buffer that does not change is not
                p.data.copy_(self.value(name, p))

    def load_states(self, optimizer):
        """Give the optimizer the states that are saved of its parameters."""
        keys = {name.partition("/")[2] for name in self.index["tensors"]} - {""}
        state = {}
        for p in trained(optimizer):
            names = [name for name, *_ in rectangles_of(p, p.detach())]
            own = [key for key in keys if names and f"{names[0]}/{key}" in self.index["tensors"]]
            for key in own:                             # Muon's matrices have others than AdamW's
                saved = self.index["tensors"][f"{names[0]}/{key}"]
                like = p.detach() if saved["shape"] else torch.empty((), device=p.device)
                tensor = torch.zeros_like(like, dtype=DTYPES[saved["dtype"]])
                for name, shape, at, view in rectangles_of(p, tensor):
                    state.setdefault(f"{name}/{key}", Parts(shape))[at] = view
                optimizer.state[p][key] = tensor
        self.load(state)

    def describe(self, args):
        """Lines for the report of the run that goes on, whose flags these are. A batch is a
        function of seed, step, --seq and --batch, so where --seq has changed, what follows is as if
        it had never been another."""
        chapter, variant, ranks = self.index["by"]
        by = f"{chapter.replace('_', ' ')} · {variant} · {count(ranks, 'rank')}"
        yield f"goes on after step {self.index['step']} of {by}: {self.reader.folder}"
        saved = self.index["run"]
        if args.model.seq != saved["seq"]:
            flags = f"--seq {args.model.seq}"
            if args.batch != saved.get("batch"):
                flags += f" --batch {args.batch}"
            yield (f"it had --seq {saved['seq']!s:.80}: from here on, batches are those of a run "
                   f"that has {flags} from its first step")
