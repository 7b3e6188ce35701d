"""The operators of a pretended GPU, and what Python says of it."""

import json

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import Work
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lab.run.meters import group_of
from tests.support.pretended_gpu import Begun, RuleBroken, caller, kind, on_gpu, spans


def tensors(nested):
    """Those in lists, tuples and dictionaries. (PyTorch's tree_leaves takes ten times as long.)"""
    if isinstance(nested, torch.Tensor):
        return [nested]
    nested = nested.values() if isinstance(nested, dict) else nested
    if not isinstance(nested, (list, tuple, type({}.values()))):
        return []
    return [x for one in nested for x in tensors(one)]


def mark(nested, kind):
    """Mark where these tensors are."""
    for tensor in tensors(nested):
        tensor.untyped_storage().kind = kind
    return nested


# ----------------------------------------------------------------------------------- the operators

HOST_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2",
              "repeat_interleave")  # for a value, or a shape that no output_size tells
ONE_DEVICE = ("cat", "stack", "_fused")  # in others a scalar may be the host's


class Operators(TorchDispatchMode):
    """Below autograd, so that it sees backward too."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            name = func._schema.name.split("::")[1]
            if func.namespace == "c10d":
                return self.collective(func, name, args)
            return self.operator(func, name, args, kwargs or {})

    def collective(self, func, name, args):
        """NCCL wants every tensor on the device and contiguous. And two devices that start two
        communicators in different orders may wait for each other. So here each device waits for the
        others of a group to start what it starts, and for both ends of a message before it starts
        something else: ranks that could wait for each other do."""
        if group_of(args).group_name in self.gpu.on_host:
            if any(on_gpu(t) for t in tensors(args)):
                raise RuleBroken(f"{name} over gloo of a tensor that is not on the host")
            return func(*args)
        has_root = name in ("gather_", "scatter_")  # which alone has what is gathered or scattered
        given = args[:2] if has_root else [x for x in args if tensors(x)]
        first, *others = map(tensors, given)
        writes, reads = ([], first) if name == "send" else (first, sum(others, []))
        for t in (writes + reads) * (name != "barrier"):
            if not on_gpu(t) or not t.is_contiguous():
                lacks = "contiguous" if on_gpu(t) else "on the device"
                raise RuleBroken(f"{name} of {tuple(t.shape)}, which is not {lacks}")
        self.gpu.touch(name, spans(reads), spans(writes))
        group = group_of(args)
        for begun in self.gpu.collectives.values():
            if begun.meeting and begun.group != group.group_name and group.size() > 1:
                self.gpu.ranks.wait_for(*begun.meeting)

        received, sent = args[3:5] if name == "alltoall_base_" else ((), ())
        rows = lambda t: ("rows", *t.shape[1:]) if sent else t.shape
        alike = {"gather_": reads, "scatter_": writes}.get(name, writes + reads)
        what, meeting = str([(*rows(t), str(t.dtype)) for t in alike]), ()
        if name in ("send", "recv_"):
            meeting = self.meeting(name, group, *args[-2:], what)
        else:
            ranks = dist.get_process_group_ranks(group)
            place = self.gpu.ranks.place(group.group_name)
            if sent:
                self.gpu.ranks.announce(f"{place}, rows", json.dumps([sent, received]))
            self.gpu.ranks.announce(
                place, f"{name} over {group.size()} ranks, {caller()}, of {what}")
            self.gpu.ranks.wait_for(place, ranks)
            if sent:
                self.gpu.ranks.compare_rows(f"{place}, rows", ranks)
        result = func(*args)
        [work] = [Work.unbox(x) for x in tree_leaves(result) if isinstance(x, torch.ScriptObject)]
        begun = Begun(name, group.group_name, spans(reads), spans(writes), meeting)
        self.gpu.collectives[work] = begun
        return result

    def meeting(self, name, group, peer, tag, what):
        """NCCL knows no tags: the first that one rank sends to another is the first that this one
        receives from it, and so on. Returns where they meet, and who: a wait is a wait for both,
        since gloo would wait for ever for a rank that never comes."""
        if tag:
            raise RuleBroken(f"{name} with a tag, which NCCL does not know")
        ends = [dist.get_global_rank(group, rank) for rank in (group.rank(), peer)]
        a, b = ends if name == "send" else ends[::-1]
        place = self.gpu.ranks.place(f"message from rank {a} to rank {b} in {group.group_name}")
        self.gpu.ranks.announce(place, f"{place}, of {what}")
        if self.gpu.ranks.store and self.gpu.ranks.have_announced(place, [a, b]):
            self.gpu.ranks.compare(place, [a, b])
        return place, [a, b]

    def operator(self, func, name, args, kwargs):
        """CUDA wants all tensors on the device, but for scalars that are only read. (It takes the
        host's indices as well; no chapter needs that.)"""
        given, writes = tensors((args, kwargs)), written_by(func, args, kwargs)
        reads = [t for t in given if not any(t is written for written in writes)]
        shapes_alone = name.startswith(("new_", "empty")) or name.endswith("_like")
        if not func.is_view and not shapes_alone:
            self.gpu.touch(name, spans(reads), spans(writes))
        if name in ("copy_", "_foreach_copy_"):
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            for there, here in [args[:2]] if name == "copy_" else zip(*args[:2]):
                self.gpu.copied(there, here, non_blocking)
            return func(*args, **kwargs)

        gpu = any(map(on_gpu, given))
        large = [t for t in reads if t.ndim or name.startswith(ONE_DEVICE)]
        if gpu and not all(map(on_gpu, large + writes)):
            kinds = [(*t.shape, kind(t)) for t in given]
            raise RuleBroken(f"{name} of tensors on two devices: {kinds}")
        mask = name.startswith("index") and any(t.dtype == torch.bool for t in tensors(args[1:2]))
        known = kwargs.get("output_size") is not None
        if gpu and (name in HOST_WAITS and not known or mask):
            self.gpu.host_waits(name)
        result = func(*args, **kwargs)
        return mark(result, "device") if gpu else result


def written_by(func, args, kwargs):
    """The tensors that an operator writes to, by its schema."""
    schema = func._schema.arguments
    given = [*args, *(kwargs.get(argument.name) for argument in schema[len(args):])]
    return tensors([x for x, argument in zip(given, schema)
                    if argument.alias_info and argument.alias_info.is_write])


# --------------------------------------------------------------------------------- what Python says

DEVICE, IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__
MOVES = {torch.Tensor.cpu: ["cpu"], torch.Tensor.cuda: ["cuda"], torch.Tensor.to: []}


class Functions(TorchFunctionMode):
    """.device, .is_cuda, device=, pin_memory=, .to, .cpu and .cuda follow the mark."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if isinstance(func, torch._ops.OpOverload):  # of lab's modes: Operators sees it
            return func(*args, **kwargs)
        if func == DEVICE:
            return self.gpu.device if on_gpu(args[0]) else func(*args)
        if func == IS_CUDA:
            return on_gpu(args[0])
        if func is torch.Tensor.is_pinned:
            return kind(args[0]) == "pinned"
        if func in (torch.Tensor.numpy, torch.Tensor.pin_memory) and on_gpu(args[0]):
            raise RuleBroken(f"{func.__name__}() of a tensor on the device")
        if func is torch.Tensor.pin_memory:
            return mark(args[0].clone(), "pinned")
        if func is torch.Tensor.tolist and on_gpu(args[0]):
            self.gpu.host_waits("tolist")
        if func is F.one_hot and on_gpu(args[0]):
            return one_hot(*args, **kwargs)
        if func in MOVES:
            return self.move(args[0], *MOVES[func], *args[1:], **kwargs)

        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if device and torch.device(device).type != "meta":
            gpu, kwargs["device"] = torch.device(device).type == "cuda", "cpu"
            result = mark(func(*args, **kwargs), "device" if gpu else "host")
            if func is torch.tensor and gpu:
                self.gpu.host_waits("a copy to the device")
        else:
            result = func(*args, **kwargs)
        return mark(result, "pinned") if pinned else result

    def move(self, tensor, *args, copy=False, **kwargs):
        """tensor.to(...): a new one, where its kind changes."""
        if tensors(args):
            args = (self.gpu.device if on_gpu(args[0]) else "cpu", args[0].dtype, *args[1:])
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        gpu = device.type == "cuda" if device else on_gpu(tensor)
        if gpu == on_gpu(tensor):
            return tensor.to(dtype or tensor.dtype, copy=copy)
        moved = tensor.to(dtype or tensor.dtype, copy=True)
        self.gpu.copied(mark(moved, "device" if gpu else "host"), tensor, non_blocking)
        return moved


def one_hot(indices, num_classes=-1):
    """As on a device, where it does not look whether the indices are in range."""
    classes = num_classes if num_classes > 0 else int(indices.max()) + 1
    return (indices[..., None] == mark(torch.arange(classes), "device")).long()


def flash_attention(q, k, v, dropout, causal):
    """As on a device: a causal mask ends in the lower right corner. Returns the output alone."""
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return [F.scaled_dot_product_attention(q, k, v, mask if causal else None, enable_gqa=True)]
