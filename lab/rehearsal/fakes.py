"""A rank without its cluster, and tensors without numbers.

Every tensor of numbers is a FakeTensor: a shape, a dtype and a storage that has a size and no
memory. Integers that do not come from such tensors are real: positions, layouts, and how many rows
go to an expert. A choice of experts, which depends on numbers, is a balanced one instead.
Nothing is sent: PyTorch's `fake` process group has any number of ranks, and every collective
returns at once. Of an all_to_all's real integers, each rank sends to this one what this one sends
to itself: all ranks choose alike.
"""

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import common
from common import environment
from lab.rehearsal.lines import line_in
from lab.run.meters import group_of, storage_of


class Integers(TorchDispatchMode):
    """Over a FakeTensorMode: computes integers of which no input is fake, and what topk picks."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._schema.name
        tensors = [*tensors_in(args), *tensors_in(kwargs.values())]
        if any(isinstance(x, FakeTensor) for x in tensors):
            result = func(*args, **kwargs)
            return (result[0], balanced(result[0], args[0])) if name == "aten::topk" else result
        dtype = kwargs.get("dtype")
        is_integer = dtype not in (None, torch.bool) and not dtype.is_floating_point     # no mask
        if not (tensors or is_integer or name == "aten::arange"):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            result = func(*args, **kwargs)
            if name.startswith("c10d::alltoall_base_"):
                arrive(*args[:2], group_of(args), args[4])
            return result


def tensors_in(values: Iterable) -> Iterator[torch.Tensor]:
    """Of an operator's arguments or results: they, or lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def balanced(values, scores):
    """Picks in the shape of topk's values: each expert in turn."""
    with unset_fake_temporarily():
        return (torch.arange(values.numel()) % scores.shape[-1]).view(values.shape)


def arrive(out, sent, group, sizes):
    """Fill `out` with what comes of an all_to_all among ranks that are all alike: from each, what
    this one sends to itself. sizes: what it sends to each; none: as much to all."""
    parts = sent.split(sizes) if sizes else sent.chunk(group.size())
    out.copy_(torch.cat(group.size() * [parts[group.rank()]]))


def apply(module, fn, recurse=True):
    """In place of Module._apply, which cannot swap fake parameters."""
    for one in module.modules():
        for p in filter(lambda p: p is not None, one._parameters.values()):
            new = fn(p.data)
            if new is not p.data:
                p.data = new
        for key, buffer in one._buffers.items():
            one._buffers[key] = None if buffer is None else fn(buffer)
    return module


def to_empty(module, *, device, recurse=True):
    """In place of Module.to_empty, for the same reason."""
    for one in module.modules():
        for key, p in one._parameters.items():
            if p is not None:
                one._parameters[key] = torch.nn.Parameter(torch.empty_like(p, device=device))
        for key, buffer in one._buffers.items():
            one._buffers[key] = None if buffer is None else torch.empty_like(buffer, device=device)
    return module


def fused_attention(q, k, v, seen=None):
    """What the core `sdpa` runs on a CPU. Of fake tensors PyTorch would take the one that has all
    scores in memory."""
    mask = None
    if seen is not None:                                # as PyTorch does it
        mask = q.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(q, k, v, 0.0, seen is None, attn_mask=mask)[0]


class FusedNorm(torch.autograd.Function):
    """RMSNorm as one operator, as a GPU has it: it keeps its input, and a number of each token in
    float32. On a CPU PyTorch makes it of several, which keep input and output in float32."""

    @staticmethod
    def forward(ctx, x, shape, weight, eps):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None, torch.empty_like(weight), None


def as_rank(rank: int, ranks: int) -> AbstractContextManager:
    """With what torchrun would set in the environment of this rank, on machines of eight."""
    local = min(8, ranks)
    return mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks),
                           LOCAL_RANK=str(rank % local), LOCAL_WORLD_SIZE=str(local))


@contextlib.contextmanager
def cluster(operators: str) -> Iterator[None]:
    """Be the rank of the environment in a cluster that is not there, and make fake tensors.
    operators: those of a "gpu", or of a "cpu", which has RMSNorm of several."""
    rank, ranks = environment("RANK", 0), environment("WORLD_SIZE", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(common.CORES, sdpa=fused_attention))
            for name, function in (("_apply", apply), ("to_empty", to_empty)):
                stack.enter_context(mock.patch.object(torch.nn.Module, name, function))
            if operators == "gpu":
                stack.enter_context(mock.patch.object(
                    torch.nn.functional, "rms_norm", FusedNorm.apply))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(Integers())
            yield
    finally:
        dist.destroy_process_group()


class LiveMeter(TorchDispatchMode):
    """Follows every storage from the operator that makes it until it is gone or resized.

    files: the sources, in whose lines tensors are made. Since `begin`: peak, the most bytes alive
    after an operator; at_peak(), the storages that were alive then. A storage that is resized is
    another one to `made`, and has the `name` that it had.
    """

    def __init__(self, files):
        super().__init__()
        self.files, self.numbers, self.names = set(files), {}, {}   # by address
        self.made = []                                  # of each number: (bytes, line, name)
        self.live = 0
        self.begin()
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage, size):
            result = resize(storage, size)
            self.resized(storage)
            return result

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_tell)

    def __enter__(self):
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *exception):
        self.patch.stop()
        return super().__exit__(*exception)

    def begin(self):
        self.peak, self.events, self.peak_at = self.live, [], 0
        self.before = list(self.numbers.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            if tensor.device.type != "meta":
                storage = storage_of(tensor)
                if storage._cdata not in self.names:
                    self.names[storage._cdata] = len(self.made)
                    weakref.finalize(storage, self.forget, storage._cdata)
                    self.begins(storage)
        self.note_peak()
        return result

    def note_peak(self):
        if self.live > self.peak:
            self.peak, self.peak_at = self.live, len(self.events)

    def begins(self, storage):
        """A storage is there, or has another size."""
        key, size = storage._cdata, storage.nbytes()
        number = self.numbers[key] = len(self.made)
        self.made.append((size, line_in(self.files), self.names[key]))
        self.events.append((number, True))
        self.live += size

    def ends(self, key):
        number = self.numbers.pop(key)
        self.events.append((number, False))
        self.live -= self.made[number][0]

    def resized(self, storage):
        """A storage that is followed has another size."""
        if storage._cdata in self.numbers:
            self.ends(storage._cdata)
            self.begins(storage)
            self.note_peak()

    def forget(self, key):
        self.ends(key)
        del self.names[key]

    def name(self, tensor):
        """Of its storage, whatever size that has; None if it was made unseen."""
        return self.names.get(storage_of(tensor)._cdata)

    def at_peak(self):
        """[(bytes, line, name)] of the storages that were alive."""
        alive = set(self.before)
        for number, is_born in self.events[:self.peak_at]:
            alive.add(number) if is_born else alive.remove(number)
        return [self.made[number] for number in sorted(alive) if self.made[number][0]]
