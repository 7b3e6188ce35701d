"""What a run sends, keeps, holds and computes, measured where it happens: in PyTorch's dispatcher.

    CommMeter          collectives and sends: calls, bytes, when they ran, when backward did, and
                       when this rank waited
    ActivationMeter    what autograd keeps for backward, and the most of it at a time
    FlopMeter          FLOPs, by PyTorch's formulas
"""

import contextlib
import time
import weakref
from collections.abc import Iterable
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lab.run.verify import named_parameters


def local(tensor):
    """The local part of a DTensor, and what its collectives fill; any other tensor as it is."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)              # of an AsyncCollectiveTensor


def nbytes(tensors: Iterable) -> int:
    """Bytes behind tensors, however nested; a storage that several of them share counts once.

    For model states: the parameters, their gradients, `optimizer.state.values()`.
    """
    tensors = [t for t in tree_leaves(list(tensors)) if torch.is_tensor(t)]
    storages = (local(t).untyped_storage() for t in tensors)
    return sum({s._cdata: s.nbytes() for s in storages}.values())


# ------------------------------------------------------------------------------------ communication

class Clock:
    """Moments of a step: on a CPU seconds, on CUDA events, which tell the GPU's time and not the
    host's. A collective's end is an event on a stream that does nothing but wait for it, and a wait
    is between events on the stream that it holds up."""

    def __init__(self, cuda):
        self.cuda, self.ends = cuda, []
        self.side = torch.cuda.Stream() if cuda else None
        self.wait = Work.wait                           # as it is before a meter is told of waits
        self.start = self.now()

    def now(self):
        """This moment, as the clock has it."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def at_end(self, work, span):
        """Note the end of this work in the span, if the backend tells it."""
        if self.cuda:
            with torch.cuda.stream(self.side):
                self.wait(work)
                span[-1] = self.now()
        else:
            def note(future):
                span[-1] = span[-1] or time.perf_counter()

            with contextlib.suppress(RuntimeError):     # gloo does not tell when sends, receives
                self.ends.append(work.get_future().then(note))      # and reduce_scatters end

    def since_start(self):
        """A function from moments to seconds since the start, once all have come."""
        if self.cuda:
            torch.cuda.synchronize()
            return lambda moment: self.start.elapsed_time(moment) / 1e3
        for end in self.ends:
            end.wait()
        return lambda moment: moment - self.start


COLLECTIVES = {  # what an operator's name contains: our name, wire bytes over payload by ring
    "allreduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
    "allgather": ("all_gather", lambda n: (n - 1) / n),
    "reducescatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
    "broadcast": ("broadcast", lambda n: 1),
    "send": ("send", lambda n: 1),
    "scatter": ("scatter", lambda n: 1),
    "gather": ("gather", lambda n: 1),
    "reduce": ("reduce", lambda n: 1),
}


class CommMeter(TorchDispatchMode):
    """Counts the collectives and sends issued while it is entered, by whomever.

    total[op]: calls; payload bytes (the full tensor: all_gather's output, reduce_scatter's input);
    wire bytes, what one rank sends under the ring algorithm. Receives are not counted again.
    by_group[name][op]: the same of each process group.
    gathered: the most bytes behind the tensors of `watched` when something was sent.
    gradient_peak: the most bytes behind the gradients of `sharded` parameters, and behind what
    reduce_scatters of them send and receive, when something was sent or a gradient was ready.
    timeline(): when each of them ran, when backward did, and when this rank waited.
    """

    def __init__(self, cuda=False, watched=(), sharded=()):
        super().__init__()
        self.sharded, self.reduced, self.gradient_peak = sharded, [], 0
        self.total, self.by_group, self.clock = {}, {}, Clock(cuda)
        self.watched, self.gathered = list(watched), 0
        self.spans, self.backwards, self.gradients = [], {}, []
        self.calls, self.waits = [], []     # [start, end] of each call that sends, and of each wait
        self.idle = None                    # the end of the last of them, until the next operator
        self.under_way, self.batch = {}, None       # spans, by what is waited for; NCCL's batch
        self.end = self.clock.start

    def __enter__(self):
        meter, wait = self, Work.wait
        begin, close = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

        def wait_and_tell(work, *timeout):
            start = meter.clock.now()
            done = wait(work, *timeout)
            meter.note_wait(work, start)
            return done

        def begin_and_tell(*group_and_device):
            meter.batch = []
            begin(*group_and_device)

        def close_and_tell(*group_and_device):
            work = close(*group_and_device)
            for span in meter.batch:
                meter.note_end(span, work)
            meter.batch = None
            return work

        self.patches = contextlib.ExitStack()
        for kind, name, tell in ((Work, "wait", wait_and_tell),
                                 (ProcessGroup, "_start_coalescing", begin_and_tell),
                                 (ProcessGroup, "_end_coalescing", close_and_tell)):
            self.patches.enter_context(mock.patch.object(kind, name, tell))
        return super().__enter__()

    def __exit__(self, *exception):
        self.patches.close()
        self.end = self.clock.now()
        self.under_way.clear()
        return super().__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ in ("DTensor", "AsyncCollectiveTensor") for t in types):
            return NotImplemented                       # until these have made it local operators
        start = self.clock.now()
        result = func(*args, **(kwargs or {}))
        self.note_backward(start)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].replace("_", "")
            if name == "waittensor":
                self.note_wait(storage_of(args[0])._cdata, start)
            elif "recv" in name:
                self.note_span("receive", max(sizes_of(args)), func.namespace, args, result, start)
            for key, (op, wire) in COLLECTIVES.items():
                if key in name:
                    size = self.count(op, wire, func.namespace, args, result)
                    self.gathered = max(self.gathered, nbytes(self.watched))
                    self.note_gradients(args if op == "reduce_scatter" else ())
                    self.note_span(op, size, func.namespace, args, result, start)
                    break
        else:
            self.idle = None
        return result

    def count(self, op, wire, namespace, args, result):
        """Add one call. Returns its payload."""
        sizes = sizes_of((*args, result))
        # An uneven all_to_all sends its input: c10d's second argument, the functional's first.
        payload = sizes[namespace == "c10d"] if op == "all_to_all" else max(sizes)
        group = group_of(args)
        for counts in (self.total, self.by_group.setdefault(group.group_name, {})):
            seen = counts.setdefault(op, {"calls": 0, "bytes": 0, "wire_bytes": 0})
            seen["calls"] += 1
            seen["bytes"] += payload
            seen["wire_bytes"] += payload * wire(group.size())
        return payload

    def note_span(self, op, size, namespace, args, result, start):
        """Note when a collective started, and have its end noted when it comes. A rank that calls
        one does not compute meanwhile, nor from there to a wait before the next operator: that
        counts as waiting."""
        span = [op, size, name_of(group_of(args)), start, None]
        self.spans.append(span)
        handles = [x for x in tree_leaves(result) if isinstance(x, torch.ScriptObject)]
        work = Work.unbox(handles[0]) if handles else None
        call = [self.idle or start, self.clock.now()]
        self.calls.append(call)
        self.idle = call[1]
        if work is not None:
            self.note_end(span, work)
        elif namespace != "c10d":                       # functional: until wait_tensor
            for tensor in filter(torch.is_tensor, tree_leaves(result)):
                self.under_way[storage_of(tensor)._cdata] = [span]
        elif self.batch is not None:
            self.batch.append(span)
        else:                                           # synchronous, on CUDA's current stream: it
            span[-1] = call[1]                          # is its own wait
            self.waits.append(call)

    def note_end(self, span, work):
        self.under_way.setdefault(work, []).append(span)
        self.clock.at_end(work, span)

    def note_wait(self, awaited, start):
        """Note a wait for a Work, or for a functional one's storage. gloo does not tell when sends,
        receives and reduce_scatters end: then they end here."""
        wait = [self.idle or start, self.clock.now()]
        self.waits.append(wait)
        self.idle = wait[1]
        for span in self.under_way.pop(awaited, ()):
            span[-1] = span[-1] or wait[1]

    def note_backward(self, since):
        """Note that a backward goes on, if one does, and that it has since this moment at least."""
        backward = torch._C._current_graph_task_id()    # -1 outside of any
        if backward != -1:
            self.backwards.setdefault(backward, [since, None])[1] = self.clock.now()

    def gradient_is_ready(self, p):
        """A hook for parameters."""
        self.gradients.append(self.clock.now())
        self.note_backward(self.gradients[-1])
        self.note_gradients()

    def note_gradients(self, reduced=()):
        """Look how many bytes of gradients are alive."""
        if self.sharded:
            tensors = [x for x in tree_leaves(reduced) if torch.is_tensor(x)]
            self.reduced += [weakref.ref(tensor) for tensor in tensors]
            alive = [*(p.grad for p in self.sharded), *(tensor() for tensor in self.reduced)]
            self.gradient_peak = max(self.gradient_peak, nbytes(alive))

    def timeline(self):
        """In seconds since the step began: when it ended; when each backward began and ended, and
        gradients were ready; [op, bytes, start, end, name of the group] of each collective whose
        end is known; and [start, end] of each time that this rank waited, or called one. DDP waits
        in C++, unseen, for what is under way after the last gradient."""
        since = self.clock.since_start()

        def seconds(pairs):
            return [[since(start), since(end)] for start, end in pairs]

        sent = [[op, size, since(start), since(end), name]
                for op, size, name, start, end in self.spans if end]
        gradients = [since(ready) for ready in self.gradients]
        waits = seconds([*self.calls, *self.waits])
        if sent and gradients and not self.waits:
            waits.append([gradients[-1], max(gradients[-1], *(end for *_, end, _ in sent))])
        return {"seconds": since(self.end), "backward": seconds(self.backwards.values()),
                "gradients": gradients, "collectives": sent, "waits": sorted(waits)}


def sizes_of(values):
    """Of each of them, the bytes of the tensors in it."""
    return [sum(t.nbytes for t in tree_leaves(x) if torch.is_tensor(t)) for x in values]


def group_of(args):
    """The process group of a c10d operator, or of a functional one, whose last string names it."""
    for x in args:
        if isinstance(x, torch.ScriptObject) and x._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(x)
    return dist.distributed_c10d._resolve_process_group([x for x in args if isinstance(x, str)][-1])


def name_of(group):
    """An axis of a mesh, or what the chapter called the group; all ranks are the world."""
    if group is dist.group.WORLD:
        return "world"
    return group.group_desc.removeprefix("mesh_")


# -------------------------------------------------------------------------------------- activations

class ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for backward while it is entered, each storage once.

    bytes: what is kept at the moment; most: the most of it at a time. Not counted are parameters,
    however their memory comes and goes, and `known` tensors, which are there anyway (the batch).
    `keep` adds tensors that are kept without autograd's knowing. note(key): called for each.
    """

    def __init__(self, known=()):
        self.bytes, self.most, self.note = 0, 0, None
        self.counted, self.known = set(), {storage_of(t)._cdata for t in known}
        super().__init__(self.pack, lambda tensor: tensor)

    def pack(self, tensor):
        """What autograd calls when it keeps a tensor."""
        storage = storage_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        if is_parameter(tensor):
            self.known.add(key)
        if key not in self.known and key not in self.counted:
            self.counted.add(key)
            if self.note:
                self.note(key)
            self.bytes += size
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self.forget, key, size)
        return tensor

    def forget(self, key, size):
        self.counted.remove(key)
        self.bytes -= size

    def keep(self, nested):
        for tensor in tree_leaves(nested):
            if torch.is_tensor(tensor):
                self.pack(tensor)


def storage_of(tensor):
    return local(tensor).untyped_storage()


def is_parameter(tensor):
    """Whether it is one, or a view of one, such as the transpose that a linear keeps."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)


@contextlib.contextmanager
def shapes_of_a_block(model):
    """Fills the dictionary that it yields with the shapes (rows, columns), sequence by features, of
    what the first block makes of its input: what comes out of its norms and sub-layers, and what
    goes into the last linear of each (the heads, and the hidden units)."""
    shapes, handles = {}, []

    def note(name, tensor):
        shapes[name] = tuple(local(tensor).shape[1:])

    for name, module in model.block1.named_modules():
        last = {"o": "heads", "down": "hidden units"}.get(name.rsplit(".")[-1])
        if name in ("norm1", "attn", "norm2", "mlp"):
            handles.append(module.register_forward_hook(
                lambda module, inputs, output, name=name: note(name, output)))
        if last:
            handles.append(module.register_forward_pre_hook(
                lambda module, inputs, last=last: note(last, inputs[0])))
    yield shapes
    for handle in handles:
        handle.remove()


def shards_of(model: torch.nn.Module) -> dict[str, list]:
    """What this rank holds of the matrices outside of blocks and in the first one: {name: [full
    shape, [[dim, index, parts], ...]]}."""
    shards = {}
    for name, p in named_parameters(model):
        if p.ndim > 1 and name.startswith(("embedding", "block1.", "head.out")):
            cuts = [list(cut[:3]) for cut in getattr(p, "cuts", ())]
            if hasattr(p, "placements"):                        # a DTensor's
                cuts = [[cut.dim, p.device_mesh.get_local_rank(axis), p.device_mesh.size(axis)]
                        for axis, cut in enumerate(p.placements) if cut.is_shard()]
            name = name.removesuffix(".weight").removeprefix("block1.")
            shards[name] = [list(getattr(p, "full_shape", p.shape)), cuts]
    return shards


# -------------------------------------------------------------------------------------------- FLOPs

class FlopMeter(TorchDispatchMode):
    """Adds up FLOPs by PyTorch's own formulas: `matrices` are those of a linear, and `attention`
    those of batched matmuls and of fused attention; `optimizer` those of its step, which are in
    none of the two. Of kernels of our own it knows nothing."""

    def __init__(self):
        super().__init__()
        self.matrices = self.attention = self.optimizer = 0
        self.updating = 0                               # optimizers that step: one may call another
        self.formulas = dict(flop_registry)
        for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                       "cudnn_attention"):              # the first is not there in any version, and
            for suffix, many in (("", 2), ("_backward", 5)):    # grouped queries not in 2.11
                op = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}")
                self.formulas[op] = fused(many, skip=len(suffix) > 0)
        self.formulas[torch.ops.aten._grouped_mm] = grouped

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        op = func._overloadpacket
        if op in self.formulas:
            flops = self.formulas[op](*args, **(kwargs or {}), out_val=result)
            if self.updating:
                self.optimizer += flops
            elif op in (torch.ops.aten.mm, torch.ops.aten.addmm):
                self.matrices += flops
            else:
                self.attention += flops
        return result

    def __enter__(self):
        def note(change):
            def hook(*update):
                self.updating += change
            return hook

        self.hooks = [register_optimizer_step_pre_hook(note(1)),
                      register_optimizer_step_post_hook(note(-1))]
        return super().__enter__()

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        return super().__exit__(*exception)

    @property
    def all(self):
        return self.matrices + self.attention


def grouped(a, b, *rest, **more):
    """The formula of a matmul for each group of rows, or of columns that are summed over."""
    return 2 * a.shape[0] * a.shape[1] * b.shape[-1]


def fused(how_many, skip):
    """The formula of a fused kernel that takes so many matmuls of queries with keys. skip: the
    first argument is a gradient."""

    def flops(*args, **more):
        (batch, heads, rows, head_dim), columns = args[skip].shape, args[1 + skip].shape[2]
        return how_many * 2 * batch * heads * rows * columns * head_dim

    return flops
