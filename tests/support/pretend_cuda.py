"""A GPU's rules without a GPU: CUDA and NCCL pretended on a CPU and gloo, with real numbers.

    with pretended_cuda() as gpu:       what runs in here sees a device "cuda", and keeps its rules

Tensors carry a mark on their storage: on the device, or the host's. What CUDA or NCCL would
refuse, or do wrong in silence, raises RuleBroken; and where one rank raises, all do: none hangs.

    Functions     what Python says of devices follows the mark
    Operators     an operator takes tensors of one kind; a collective, what NCCL takes
    Gpu           what is under way is left alone until somebody has waited for it
    Ranks         all make the same groups in the same order, and those of a group issue the same
                  collectives in the same order; what one sends to another is what that one
                  receives, message by message, and in an all_to_all row by row

gpu.steps has a list for each step: the places where the host waited for the device. It is for what
is written by hand: PyTorch's own wrappers (DDP, FSDP, DTensor) send and wait in C++, unseen.
"""

import collections
import contextlib
import json
import sys
import time
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import Work
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import lab
from lab.bench.meters import group_of
from lab.bench.report import Run


class RuleBroken(Exception):
    """It says which rule, and by what."""


class Disagreement(RuleBroken):
    """Of the ranks, which all raise it together."""


def tensors(nested):
    """Those in lists, tuples and dictionaries. (PyTorch's tree_leaves takes ten times as long.)"""
    if isinstance(nested, torch.Tensor):
        return [nested]
    nested = nested.values() if isinstance(nested, dict) else nested
    if not isinstance(nested, (list, tuple, type({}.values()))):
        return []
    return [x for one in nested for x in tensors(one)]


def kind(tensor):
    """The mark: "device", "host", or "pinned", which is the host's too, and known to the device."""
    return getattr(tensor.untyped_storage(), "kind", "host")


def on_gpu(tensor):
    return kind(tensor) == "device"


def mark(nested, kind):
    for tensor in tensors(nested):
        tensor.untyped_storage().kind = kind
    return nested


NOT_THE_CALLER = __file__, str(Path(torch.__file__).parent), *lab.__path__


def caller():
    """The line of a chapter, or of common.py, that came here through PyTorch or lab/."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(NOT_THE_CALLER):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno}"


PATIENCE = 30  # seconds: less than the pool's


def patiently(done, meanwhile=lambda: None):
    """Whether it gets done in time. meanwhile(): what else may happen, if it takes long."""
    end, pause = time.monotonic() + PATIENCE, 1e-4
    while not done():
        if pause == 5e-3:
            meanwhile()
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 5e-3)
    return True


class Ranks:
    """What the ranks say to each other, in the store through which they have met.

    Under NCCL, ranks that issue different collectives hang, or take each other's bytes. So each
    says what comes next, and hears the others of its group: all of them go on, or all raise. All
    raise as well if one has left by an error, or if they wait for each other in several groups.
    """

    def __init__(self):
        self.rank, self.all, self.store = 0, [0], None
        self.times = collections.Counter()
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.all = dist.get_rank(), list(range(dist.get_world_size()))
            store = dist.distributed_c10d._get_default_store()
            pretence = store.add(f"pretences of {self.rank}", 1)
            self.store = dist.PrefixStore(f"pretence {pretence}", store)

    def place(self, name):
        """What happens again and again gets a name of its own each time, the same on each rank."""
        self.times[name] += 1
        return f"{name}, number {self.times[name]}"

    def say(self, place, what):
        if self.store:
            self.store.set(f"{place}: {self.rank}", what)

    def said(self, place, rank):
        return self.store.get(f"{place}: {rank}").decode()

    def have_said(self, place, ranks):
        return self.store.check([f"{place}: {rank}" for rank in ranks])

    def compare(self, place, ranks):
        """Raise if what these have said differs."""
        said = {rank: self.said(place, rank) for rank in ranks if self.store}
        if len(set(said.values())) > 1:
            raise Disagreement(listed("ranks disagree", said))

    def hear(self, place, ranks):
        """Wait until they have all said the same."""

        def look_around():
            if self.store.check(["error"]):
                raise Disagreement(self.store.get("error").decode())
            stuck = self.stuck()
            if stuck and stuck == self.stuck():  # both times, so all at one time
                said = {rank: self.said(place, rank) for rank, place in stuck.items()}
                raise Disagreement(listed("ranks wait for each other", said))

        if self.store:
            self.say("at", json.dumps([place, ranks]))
            if not patiently(lambda: self.have_said(place, ranks), look_around):
                raise Disagreement(f"rank {self.rank} is alone at {self.said(place, self.rank)}")
            self.compare(place, ranks)

    def compare_rows(self, place, ranks):
        """Of an all_to_all: raise if one sends more or fewer rows than another expects of it; and
        all raise, since the others would wait for these two."""
        said = {rank: self.said(place, rank) for rank in ranks if self.store}
        sent, received = zip(*map(json.loads, said.values())) if said else ((), ())
        if list(zip(*sent)) != list(map(tuple, received)):
            raise Disagreement(listed("ranks disagree on [sent, received] rows", said))

    def stuck(self):
        """Where each rank waits, if all do: then nobody can come to where another one is."""
        places = {}
        for rank in self.all:
            if not self.have_said("at", [rank]):
                return None
            place, ranks = json.loads(self.said("at", rank))
            if self.have_said(place, ranks):  # it goes on, or will do so at once
                return None
            places[rank] = place
        return places

    def leave(self):
        self.say("left", "leaves in peace")
        self.hear("left", self.all)

    def leave_by(self, error):
        """All leave together: another rank may still need this one for what both have begun."""
        if self.store:
            what = f"leaves by {type(error).__name__}: {error}"
            if not self.store.check(["error"]):
                self.store.set("error", f"rank {self.rank}: {what}")
            self.say("left", what)
            patiently(lambda: self.have_said("left", self.all))


def listed(trouble, said):
    return "; ".join([trouble, *(f"rank {rank}: {what}" for rank, what in said.items())])


# ------------------------------------------------------------------------------- what is under way


class Begun(NamedTuple):
    what: str
    group: str | None
    reads: list
    writes: list
    meeting: tuple = ()  # of a send or a receive: its place, and the two ranks


class Gpu:
    """What is under way, and when the host waited for the device."""

    def __init__(self):
        self.ranks = Ranks()
        self.device = torch.device("cuda", self.ranks.rank)
        self.collectives, self.copies = {}, []  # Begun, each; of collectives, by their Work
        self.on_host = set()  # names of groups over gloo
        self.streams = [None]  # the last is the current one; None: the main one
        self.steps, self.step = [], None  # None: outside of a step
        self.operators = collections.Counter()  # in steps, by name

    def host_waits(self, what):
        """In a step the host should run ahead: while it waits, nobody gives the device its work."""
        if self.step is not None:
            self.step.append(f"{what}, {caller()}")

    def synchronize(self, *device):
        self.host_waits("synchronize")
        self.copies.clear()

    def copied(self, there, here, non_blocking):
        """A copy between host and device: the host waits for it, unless it is told not to and its
        memory is pinned. Then the host must synchronize before it reads what came, or writes to
        what is leaving."""
        if on_gpu(there) == on_gpu(here):
            return
        host = here if on_gpu(there) else there
        if non_blocking and kind(host) == "pinned":
            reads, writes = ([host], []) if on_gpu(there) else ([], [host])
            self.copies.append(Begun("a copy", None, spans(reads), spans(writes)))
        else:
            self.host_waits("a copy to the " + ("device" if on_gpu(there) else "host"))

    def touch(self, what, reads, writes):
        """What is only read, others may read as well; all else would be a race."""
        for begun in (*self.collectives.values(), *self.copies):
            if overlap(begun.writes, reads + writes) or overlap(begun.reads, writes):
                raise RuleBroken(f"race: {what} touches what {begun.what} under way uses")


def spans(some):
    """The bytes of tensors: (storage, first, end) each."""
    found = []
    for t in some:
        first = t.storage_offset()
        end = first + 1 + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
        if t.numel():
            found.append((t.untyped_storage(), first * t.itemsize, end * t.itemsize))
    return found


def overlap(some, others):
    return any(a._cdata == b._cdata and a_first < b_end and b_first < a_end
               for a, a_first, a_end in some for b, b_first, b_end in others)


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
            self.gpu.operators[name] += self.gpu.step is not None
            if func.namespace == "c10d":
                return self.collective(func, name, args)
            return self.operator(func, name, args, kwargs or {})

    def collective(self, func, name, args):
        """NCCL wants every tensor on the device and contiguous. And one communicator at a time: two
        devices that start two of them in different orders wait for each other. (A pipeline's
        messages are under way while its stages sum over other axes. So here a device that starts
        something else first waits until they have met: ranks that could wait for each other do.)"""
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
            if begun.group != group.group_name and group.size() > 1:
                if not begun.meeting:
                    raise RuleBroken(f"{name} while {begun.what} is under way in another group")
                self.gpu.ranks.hear(*begun.meeting)

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
                self.gpu.ranks.say(f"{place}, rows", json.dumps([sent, received]))
            self.gpu.ranks.say(place, f"{name} over {group.size()} ranks, {caller()}, of {what}")
            self.gpu.ranks.hear(place, ranks)
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
        self.gpu.ranks.say(place, f"{place}, of {what}")
        if self.gpu.ranks.store and self.gpu.ranks.have_said(place, [a, b]):
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


# --------------------------------------------------------------------------------------- all of it


def fake_cuda(gpu):
    """What chapters and lab/ find in torch.cuda: more devices than ranks, clocks, streams."""

    class Event:
        def __init__(self, enable_timing=False):
            self.synchronize = gpu.synchronize

        def record(self, stream=None):
            self.time = time.perf_counter()

        def elapsed_time(self, later):
            return 1e3 * (later.time - self.time)

    @contextlib.contextmanager
    def stream(of):
        gpu.streams.append(of)
        yield
        gpu.streams.pop()

    Stream = lambda device=None: types.SimpleNamespace(synchronize=gpu.synchronize)
    answers = {"device_count": 8, "current_device": gpu.device.index, "set_device": None,
               "get_device_name": "NVIDIA H100 80GB HBM3", "max_memory_allocated": 0,
               "get_device_capability": (8, 0),  # without FP8: Triton can compile nothing here
               "reset_peak_memory_stats": None}
    answers = {name: lambda *args, value=value: value for name, value in answers.items()}
    return answers | {"Event": Event, "Stream": Stream, "current_stream": Stream, "stream": stream,
                      "synchronize": gpu.synchronize}


class OneWork:
    """Of a batch of sends and receives: NCCL has one for all of them."""

    def __init__(self, works):
        self.works = works

    def wait(self, *timeout):
        """It may be waited for again, which gloo's may not."""
        self.works = [work for work in self.works if not work.wait(*timeout)]

    def is_completed(self):
        return False


@contextlib.contextmanager
def pretended_cuda():
    """All is put back at the end, by which somebody must have waited for every collective."""
    gpu, engine, wait = Gpu(), torch.autograd._engine_run_backward, Work.wait
    resize, measure, batch = torch.UntypedStorage.resize_, Run.measure, dist.batch_isend_irecv
    make_group, by_kind = dist.new_group, clip_grad._group_tensors_by_device_and_dtype

    def backward(*args, **kwargs):  # so that Python sees in it (in hooks, say) what it sees outside
        with Functions(gpu):
            return engine(*args, **kwargs)

    def wait_for(work, *args):
        """It holds up the current stream. So one on a side stream does not make it safe to touch
        the tensors on the main one."""
        if gpu.streams[-1] is None:
            begun = gpu.collectives.pop(work, None)
            if begun and begun.meeting:
                gpu.ranks.hear(*begun.meeting)
            with _disable_current_modes():  # gloo may copy now
                return wait(work, *args)

    def new_group(ranks=None, *args, **kwargs):
        """All ranks make all groups, in the same order, those that they are not in as well."""
        place = gpu.ranks.place("a new group")
        gpu.ranks.say(place, f"{place}, of ranks {ranks}")
        gpu.ranks.hear(place, gpu.ranks.all)
        group = make_group(ranks, *args, **kwargs)
        if kwargs.get("backend") == "gloo":  # asked for: it is the host's
            gpu.on_host.add(group.group_name)
        return group

    def resize_(storage, size):
        if size and size == storage.nbytes():
            raise RuleBroken(f"resize_ to the {size} bytes that there are: CUDA copies them all")
        gpu.touch("resize_", [], [(storage, 0, storage.nbytes())])
        return resize(storage, size)

    @contextlib.contextmanager
    def measured(run):
        with measure(run):  # whose own synchronize is outside of the step
            gpu.step = []
            yield
            gpu.steps.append(gpu.step)
            gpu.step = None

    def by_mark(lists):  # when clipping: else the device is what C++ sees
        return {(alike[0][0].device, dtype): (alike, indices)
                for (_, dtype), (alike, indices) in by_kind(lists).items()}

    def device_of_objects(group=None):
        on_host = group is not None and group.group_name in gpu.on_host
        return torch.device("cpu") if on_host else gpu.device

    objects = "torch.distributed.distributed_c10d._get_object_coll_device"
    one_work = lambda operations: [OneWork(batch(operations))]
    checks = "torch.utils.checkpoint._allowed_determinism_checks_to_fns"
    patches = [
        mock.patch("common.join_ranks", lambda *args: gpu.device),  # though the backend is gloo
        mock.patch("torch.autograd._engine_run_backward", backward),
        mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention", flash_attention),
        mock.patch(objects, device_of_objects),  # what is pickled travels as all else
        mock.patch.dict(checks, default=lambda x: (x.shape, x.dtype)),  # no device: it asks in C++
        mock.patch.object(Work, "wait", wait_for),
        mock.patch.object(dist, "batch_isend_irecv", one_work),
        mock.patch.object(dist, "new_group", new_group),
        mock.patch.object(dist.distributed_c10d, "new_group", new_group),
        mock.patch.object(clip_grad, "_group_tensors_by_device_and_dtype", by_mark),
        mock.patch.object(torch.UntypedStorage, "resize_", resize_),
        mock.patch.object(Run, "measure", measured),
        mock.patch.multiple(torch.cuda, **fake_cuda(gpu)),
        mock.patch("kernels.fp8.interpreted", lambda: False),
    ]
    try:
        with contextlib.ExitStack() as all_of_it:
            for context in (*patches, Functions(gpu), Operators(gpu)):
                all_of_it.enter_context(context)
            yield gpu
        if gpu.collectives:
            raise RuleBroken(f"nobody waited for {[x.what for x in gpu.collectives.values()]}")
        gpu.ranks.leave()
    except BaseException as error:
        gpu.ranks.leave_by(error)
        raise
