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
import stat
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as meta
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult

FORMAT = 1
INDEX = "checkpoint.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype
          for dtype in (torch.float64, torch.float32, torch.bfloat16)}


def as_bytes(written):
    return json.dumps(written, allow_nan=False).encode()


def crc32_of(index):
    return zlib.crc32(as_bytes(index))


def step_of(folder):
    """The step after which a checkpoint of this name was saved; None: it is no such name."""
    name = re.fullmatch(r"step-([0-9]{6,})", folder.name)
    return int(name[1]) if name else None


def checkpoints_in(folder):
    """The newest first. Whatever bears such a name was complete once."""
    found = [path for path in folder.glob("step-*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


# ------------------------------------------------------------------------------------- is it whole?

class Unusable(Exception):
    """Why a checkpoint cannot be used, in words that follow its name."""


def read_index(folder):
    """The index of a checkpoint whose every byte is as it was written; raises Unusable. All that is
    read is JSON and numbers: nothing is run, and no name in it is one of a file."""
    try:
        if size_of(folder / INDEX) is None:
            raise Unusable(f"has no {INDEX}")
        data = (folder / INDEX).read_bytes()
        written = json.loads(data)
        index = written["index"]
        if type(index["format"]) is int and index["format"] > FORMAT:
            raise Unusable(f"has format {index['format']}, and this course reads {FORMAT}")
        if data != as_bytes(written) or written["crc32"] != crc32_of(index):
            raise Unusable(f"has changed bytes in {INDEX}")
        check_fields(index)
        for name, tensor in index["tensors"].items():
            check_chunks(folder, f"{name:.80}", tensor["shape"], DTYPES[tensor["dtype"]],
                         tensor["chunks"])
        return index
    except OSError as error:
        file = Path(error.filename or folder).name
        raise Unusable(f"cannot be read: {file:.80}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError):
        raise Unusable(f"has no {INDEX} that can be read") from None


def size_of(path):
    """Of a file, in bytes; None where there is none: a pipe, say, would let us wait. Raises OSError
    where nobody may look."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def check_fields(index):
    """What saving.py wrote beside the tensors is of the kinds that it reads; raises others."""
    chapter, variant, ranks = index["by"]
    remembered = [value for numbers in index["remembered"].values() for value in numbers.values()]
    fits = (index["format"] == FORMAT and is_count(index["step"]) and is_count(ranks)
            and isinstance(index["run"], dict) and isinstance(index["text"], str)
            and isinstance(index["biases"], bool)
            and all(re.fullmatch(r"[\w.-]+", name) for name in (chapter, variant))
            and all(type(value) in (int, float) for value in remembered))
    if not fits:
        raise ValueError


def is_count(number, least=0):
    return type(number) is int and number >= least


def check_chunks(folder, name, shape, dtype, chunks):
    """The rectangles of a tensor are there, unchanged, and tile it; raises Unusable and others."""
    for offsets, sizes, rank, at, crc32 in chunks:
        inside = [is_count(length, 1) and is_count(offset) and offset + length <= end
                  for offset, length, end in zip(offsets, sizes, shape, strict=True)]
        if not all([*inside, is_count(rank), is_count(at)]):
            raise ValueError
        size, file = math.prod(sizes) * dtype.itemsize, f"{rank}.bin"
        if size_of(folder / file) is None:
            raise Unusable(f"has no file {file}")
        if size_of(folder / file) < at + size:
            raise Unusable(f"is cut short: bytes of {name} are missing in {file}")
        if zlib.crc32(np.memmap(folder / file, np.uint8, "r", at, size)) != crc32:
            raise Unusable(f"has changed bytes in {file}, of {name}")
    start = np.array([offsets for offsets, *_ in chunks]).reshape(len(chunks), -1)
    stop = start + np.array([sizes for _, sizes, *_ in chunks]).reshape(len(chunks), -1)
    overlap = any(((one < stop) & (start < end)).all(1).sum() > 1 for one, end in zip(start, stop))
    if overlap or sum(math.prod(sizes) for _, sizes, *_ in chunks) != math.prod(shape):
        raise Unusable(f"has rectangles that overlap or are missing, of {name}")


# ----------------------------------------------------------------------------------- what DCP wants


class Storage:
    """What DCP asks of every storage, and this one need not answer."""

    def ignore(self, *args, **more):
        pass

    reset = set_up_storage_writer = ignore
    prepare_local_plan = prepare_global_plan = lambda self, plan: plan
    validate_checkpoint_id = classmethod(lambda cls, checkpoint_id: True)


def synced(path, data=None):
    """Write data, if there are any, and have the disk confirm it; a folder: its list of names."""
    if data is not None:
        path.write_bytes(data)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


class Writer(Storage, StorageWriter):
    """Writes a checkpoint into a hidden folder, which gets its name at last. about: plain data for
    the index. keep: so many of the newest stay. Entered around a save, it removes that folder if
    the save has failed."""

    def __init__(self, folder, about, keep):
        self.folder, self.about, self.keep, self.made_it = folder, about, keep, False
        self.aside = folder.with_name(f".{folder.name}")

    def __enter__(self):
        return self

    def __exit__(self, kind, *more):
        # CheckpointException: every rank has said that it is done. After any other error, one may
        # still be writing. On rank 0 alone, and not what another run has made.
        if self.made_it and kind is CheckpointException:
            shutil.rmtree(self.aside, ignore_errors=True)

    def prepare_global_plan(self, plans):               # on rank 0, before anybody writes
        for left in self.folder.parent.glob(".step-[0-9]*"):        # by a run before, when killed
            shutil.rmtree(left, ignore_errors=True)
        self.aside.mkdir(parents=True)
        self.made_it = True
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan, planner):
        results, at, path = [], 0, self.aside / f"{plan.storage_data}.bin"
        with path.open("xb") as file:
            for item in plan.items:
                part = planner.resolve_data(item).contiguous()
                data = part.view(-1).view(torch.uint8).numpy()
                where = plan.storage_data, at, zlib.crc32(data)
                results.append(WriteResult(item.index, len(data), where))
                at += file.write(data)
        synced(path)
        done = torch.futures.Future()
        done.set_result(results)
        return done

    def finish(self, metadata, results):                # on rank 0, once all have written
        tensors = {}
        where = {result.index: result.storage_data for of_rank in results for result in of_rank}
        for name, tensor in metadata.state_dict_metadata.items():
            chunks = [[chunk.offsets, chunk.sizes, *where[meta.MetadataIndex(name, chunk.offsets)]]
                      for chunk in tensor.chunks]
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": tensor.size, "chunks": chunks}
        index = {"format": FORMAT, **self.about, "tensors": tensors}
        written = {"index": index, "crc32": crc32_of(index)}
        synced(self.aside / INDEX, as_bytes(written))
        synced(self.aside)
        self.aside.rename(self.folder)
        synced(self.folder.parent)
        for old in checkpoints_in(self.folder.parent)[self.keep:]:
            with contextlib.suppress(OSError):          # what matters is written
                shutil.rmtree(old.rename(old.with_name(f".{old.name}")))


class Reader(Storage, StorageReader):
    """Reads what a checkpoint's index, which has been checked, says."""

    def __init__(self, folder, index):
        self.folder, self.tensors, self.where, self.files = folder, {}, {}, {}
        for name, tensor in index["tensors"].items():
            dtype, chunks = DTYPES[tensor["dtype"]], []
            for offsets, sizes, rank, at, _ in tensor["chunks"]:
                chunks.append(meta.ChunkStorageMetadata(*map(torch.Size, (offsets, sizes))))
                self.where[meta.MetadataIndex(name, offsets)] = rank, at, sizes, dtype
                if rank not in self.files:              # stays readable when its name is gone
                    self.files[rank] = np.memmap(folder / f"{rank}.bin", np.uint8, "r")
            properties = meta.TensorProperties(dtype)
            self.tensors[name] = meta.TensorStorageMetadata(properties, torch.Size(tensor["shape"]),
                                                            chunks)

    def read_metadata(self):
        return meta.Metadata(self.tensors)

    set_up_storage_reader = Storage.ignore

    def read_data(self, plan, planner):
        for item in plan.items:
            rank, at, sizes, dtype = self.where[item.storage_index]
            size = math.prod(sizes) * dtype.itemsize
            data = np.array(self.files[rank][at:at + size])
            part = torch.from_numpy(data).view(dtype).view(sizes)
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                part = part.narrow(dim, offset, length)
            planner.resolve_tensor(item).copy_(part)
        done = torch.futures.Future()
        done.set_result(None)
        return done
