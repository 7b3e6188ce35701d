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

import contextlib
import time
import types
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import _disable_current_modes

import common
from lab.run.report import Run
from tests.conftest import SMALL, TEXT, run_main
from tests.support.pretended_gpu import Gpu, RuleBroken
from tests.support.pretended_operators import Functions, Operators, flash_attention

WORLD = {"01_single_gpu": 1, "09_5d": 4}  # ranks on which a chapter runs here; of others, 2
FLAGS = (*SMALL, "--vocab=256", "--batch=4", "--micro-batch=1", "--clip=0.1", "--ignore=0.5",
         f"--data={TEXT}")  # fmt: skip


def run_on_cuda(name, flags, folder, source=None, few=common.ONE_BUCKET):
    """For a rank of the pool: a chapter's run. Returns its status, its output, and where the host
    waited in each step. few: so many gradients are one message."""
    given = () if name.startswith("00") else FLAGS
    with mock.patch.object(common, "ONE_BUCKET", few), pretended_cuda() as gpu:
        status, _, output = run_main(name, (*given, *flags), folder, source)
    return status, output, gpu.steps


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
                gpu.ranks.wait_for(*begun.meeting)
            with _disable_current_modes():  # gloo may copy now
                return wait(work, *args)

    def new_group(ranks=None, *args, **kwargs):
        """All ranks make all groups, in the same order, those that they are not in as well."""
        place = gpu.ranks.place("a new group")
        gpu.ranks.announce(place, f"{place}, of ranks {ranks}")
        gpu.ranks.wait_for(place, gpu.ranks.all)
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
