"""The files of a checkpoint: numbers and JSON, complete or not there.

    runs/checkpoints/
        log.jsonl                   a line for each step, by lab/checkpoints/saving.py
        step-000020/
            checkpoint.json         the index: what is where, with a CRC-32 of each rectangle
            0.bin, 1.bin, ...       a file for each rank that wrote, rectangle after rectangle

It is written into `.step-000020`, where every file is synced to the disk; the last act is to give
the folder its name. DCP's own storage is not used, since its index is a pickle, and to read a
pickle is to run what it says.
"""

import contextlib
import json
import math
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

FORMAT = 2
INDEX = "checkpoint.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float64, torch.float32, torch.bfloat16)}


def as_bytes(written):
    """JSON, in the only way in which an index is written."""
    return json.dumps(written, allow_nan=False).encode()


def crc32_of(index):
    """The checksum of an index."""
    return zlib.crc32(as_bytes(index))


def step_of(folder):
    """The step after which a checkpoint of this name was saved, or None."""
    name = re.fullmatch(r"step-([0-9]{6,})", folder.name)
    return int(name[1]) if name else None


def checkpoints_in(folder):
    """The checkpoints in a folder, the newest first. Each was complete once."""
    folders = [path for path in folder.glob("step-*")
               if step_of(path) is not None and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


# ------------------------------------------------------------------------------------- is it whole?

class Unusable(Exception):
    """Why a checkpoint cannot be used, in words that follow its name."""


def read_index(folder):
    """The index of a checkpoint whose every byte is as it was written; raises Unusable. Only JSON
    and numbers are read, so nothing in it can run."""
    try:
        data = (folder / INDEX).read_bytes()
        written = json.loads(data)
        index = written["index"]
        if index["format"] != FORMAT:
            raise Unusable(f"has format {index['format']}, and this course reads {FORMAT}")
        if data != as_bytes(written) or written["crc32"] != crc32_of(index):
            raise Unusable(f"has changed bytes in {INDEX}")
        for name, tensor in index["tensors"].items():
            check_numbers(folder, name, tensor)
        return index
    except OSError as error:
        file = Path(error.filename or folder).name
        raise Unusable(f"cannot be read: {file}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, RecursionError):
        raise Unusable(f"has no {INDEX} that can be read") from None


def check_numbers(folder, name, tensor):
    """The bytes of a tensor are all there and unchanged; raises Unusable and OSError."""
    itemsize = DTYPES[tensor["dtype"]].itemsize
    for _, sizes, rank, start, crc32 in tensor["chunks"]:
        file, size = folder / f"{rank:d}.bin", math.prod(sizes) * itemsize
        if file.stat().st_size < start + size:
            raise Unusable(f"is cut short: bytes of {name} are missing in {file.name}")
        if zlib.crc32(np.memmap(file, np.uint8, "r", start, size)) != crc32:
            raise Unusable(f"has changed bytes in {file.name}, of {name}")


# ----------------------------------------------------------------------------------- what DCP wants

def done(result=None):
    """A finished Future, which DCP wants of what is read or written."""
    future = torch.futures.Future()
    future.set_result(result)
    return future


class Storage:
    """What DCP calls in every storage, and what needs no answer here."""

    def reset(self, checkpoint_id=None):
        """There is one checkpoint for each Writer and Reader."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id):
        return True

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        return plans


def synced(path, data=None):
    """Write data, if there are any, and have the disk confirm it; a folder: its list of names."""
    if data is not None:
        path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


class Writer(Storage, StorageWriter):
    """Writes a checkpoint into a hidden folder, which gets its name at last. about: plain data for
    the index. keep: so many of the newest stay."""

    def __init__(self, folder, about, keep):
        self.folder, self.about, self.keep = folder, about, keep
        self.hidden = folder.with_name(f".{folder.name}")

    def set_up_storage_writer(self, *args, **more):
        pass

    def prepare_global_plan(self, plans):
        """On rank 0, before anybody writes: make the hidden folder."""
        for unfinished in self.folder.parent.glob(".step-[0-9]*"):      # of a save that has failed
            shutil.rmtree(unfinished, ignore_errors=True)
        self.hidden.mkdir(parents=True)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        """On each rank: write its file, one rectangle after the other."""
        results, at, path = [], 0, self.hidden / f"{plan.storage_data}.bin"
        with path.open("xb") as file:
            for item in plan.items:
                part = planner.resolve_data(item).contiguous()
                data = part.view(-1).view(torch.uint8).numpy()
                where = plan.storage_data, at, zlib.crc32(data)
                results.append(WriteResult(item.index, len(data), where))
                at += file.write(data)
        synced(path)
        return done(results)

    def finish(self, metadata, results):
        """On rank 0, once all have written: write the index, and give the folder its name."""
        where, tensors = {}, {}
        for of_rank in results:
            where |= {result.index: result.storage_data for result in of_rank}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = [[chunk.offsets, chunk.sizes, *where[meta.MetadataIndex(name, chunk.offsets)]]
                      for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": tensor.size, "chunks": chunks}
        index = {"format": FORMAT, **self.about, "tensors": tensors}
        synced(self.hidden / INDEX, as_bytes({"index": index, "crc32": crc32_of(index)}))
        synced(self.hidden)
        self.hidden.rename(self.folder)
        synced(self.folder.parent)
        for old in checkpoints_in(self.folder.parent)[self.keep:]:
            with contextlib.suppress(OSError):          # what matters is written
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")))


class Reader(Storage, StorageReader):
    """Reads what a checkpoint's index, which has been checked, says. Its files stay open, so they
    can be read even after a newer checkpoint has replaced them."""

    def __init__(self, folder, index):
        self.folder, self.tensors, self.where, self.files = folder, {}, {}, {}
        for name, tensor in index["tensors"].items():
            dtype, chunks = DTYPES[tensor["dtype"]], []
            for offsets, sizes, rank, at, _ in tensor["chunks"]:
                chunks.append(meta.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self.where[meta.MetadataIndex(name, offsets)] = rank, at, sizes, dtype
                if rank not in self.files:
                    self.files[rank] = np.memmap(folder / f"{rank}.bin", np.uint8, "r")
            self.tensors[name] = meta.TensorStorageMetadata(
                meta.TensorProperties(dtype), torch.Size(tensor["shape"]), chunks)

    def set_up_storage_reader(self, *args, **more):
        pass

    def read_metadata(self):
        return meta.Metadata(self.tensors)

    def read_data(self, plan, planner):
        """Copy the saved rectangles into what this rank asks for."""
        for item in plan.items:
            rank, at, sizes, dtype = self.where[item.storage_index]
            size = math.prod(sizes) * dtype.itemsize
            data = np.array(self.files[rank][at:at + size])
            part = torch.from_numpy(data).view(dtype).view(sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, offset, length)
            planner.resolve_tensor(item).copy_(part)
        return done()
