r"""02 · Data parallelism: the same model on every rank, other sequences on each.

Chapter 01 cut the batch into micro-batches, ran one after the other, and added up their gradients.
Data parallelism runs them at the same time: each of N ranks holds the whole model and takes 1/N of
the batch. What is left is to add up the gradients, over ranks now, and that takes communication: an
all_reduce, after which every rank holds the sum. All ranks then take the same optimizer step, so
their models stay equal for good, without ever being sent again.

    naive      forward | backward              | all_reduce, one per parameter ... | optimizer
    overlap    forward | backward              | optimizer
                           |-|---|-|---|-|---|-|     each starts when its gradient is ready
    bucket     forward | backward              | optimizer
                             |-----|-----|-----|     few large ones, each when its bucket is full

A gradient is ready long before backward ends: the head's comes first, the embedding's last. So the
all_reduce of one can hide behind the backward of the rest. And every message costs its latency,
however small it is: a bucket packs several gradients into one flat tensor. Once there, a gradient
stays: p.grad is a view into the bucket, so the sum needs no unpacking, and a second micro-batch is
added in place.

    order      Every rank must start the same collectives in the same order, or they sum what does
               not belong together, or hang. Backward may meet a parameter on one rank and not on
               another (think of experts), so a bucket waits for those before it.
    sum        The loss was divided by the valid targets of the whole batch, so gradients are
               summed. DistributedDataParallel averages: that is why the last variant multiplies its
               loss by N. A mean of the ranks' own means would weigh a target on a half-empty rank
               twice.
    no_sync    With several micro-batches, only the last backward sends: one sum over ranks does it.

What a rank stores and sends (S bytes of gradients, N ranks)

    parameters, gradients, optimizer states     all of them, as on one GPU: nothing is saved
    all_reduce, payload                         S a step, however many micro-batches
    all_reduce, on the wire                     2 (N-1)/N · S: a reduce_scatter and an all_gather
    calls                                       one per parameter, or one per bucket

When it pays: the all_reduce hides behind backward if it takes no longer than backward does,

    2 (N-1)/N · S / bandwidth  <=  4 · tokens · parameters / peak FLOP/s

Parameters cancel: with g bytes a gradient, S = g · parameters, a rank needs at least g/2 · (N-1)/N
· FLOP/s / bandwidth tokens in its last micro-batch. (With g = 2 and many ranks, this is the scaling
book's B/X > C/W. The playbook's A3 leaves num_params standing on one side; read it as S, and divide
by the parameters.) A fixed global batch over more and more ranks leaves too few tokens for each:
there data parallelism stops paying. And it never helps a model that does not fit: see chapter 03.

Run it:
    torchrun --nproc_per_node=4 02_data_parallel.py
    torchrun --nproc_per_node=4 02_data_parallel.py --variant naive --micro-batch 1
    torchrun --nproc_per_node=4 02_data_parallel.py --bucket-mb 0.25
    torchrun --nproc_per_node=8 02_data_parallel.py --preset gpt2 --bucket-mb 25     (eight GPUs)

Sources: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020),
section 3; Ultra-Scale Playbook, "Data Parallelism" and A3; How To Scale Your Model, part 5, "Data
Parallelism".
"""

import contextlib
import functools
import gc
import inspect
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import common
from common import clip_grads, gpt, grad_norm, loss_sum, nbytes

# ------------------------------------------------------------------------------------- the replicas


def all_reduce(tensor, group):
    """Start to sum `tensor` over the ranks of `group`, in place. Returns a handle: wait() on it."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def broadcast_module(module, group):
    """Make all ranks start alike: send the parameters and buffers of the group's first rank."""
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.data, group=group, group_src=0)


class Naive(nn.Module):
    """A replica of `module` on each rank of `group`; after backward, one all_reduce per gradient.

    Call `finish` after the last backward of a step: then the .grad of every parameter that requires
    one is the sum over all ranks. Where a rank did not use a parameter, it counts as zero; frozen
    parameters are left alone. NCCL wants contiguous parameters. Running statistics (float buffers)
    are the first rank's, as in DDP, and are sent before each forward in training. start(tensor,
    group): starts an all_reduce.
    """

    def __init__(self, module, group, start=all_reduce):
        super().__init__()
        self.module, self.group, self.start, self.sends = module, group, start, True
        self.trained = [p for p in module.parameters() if p.requires_grad][::-1]  # backward's order
        self.statistics = [b for b in module.buffers() if b.is_floating_point()]
        broadcast_module(module, group)

    def forward(self, *inputs, **more):
        if self.training and self.sends:
            for buffer in self.statistics:
                dist.broadcast(buffer, group=self.group, group_src=0)
        return self.module(*inputs, **more)

    @contextlib.contextmanager
    def no_sync(self):
        """A backward in here adds to this rank's gradients, and sends nothing."""
        self.sends = False
        try:
            yield
        finally:
            self.sends = True

    def finish(self):
        for p in self.trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.start(p.grad, self.group).wait()


class Overlap(Naive):
    """The same, but each all_reduce starts in backward, as soon as its gradient is ready."""

    def __init__(self, module, group, start=all_reduce):
        super().__init__(module, group, start)
        self.buckets = [[p] for p in self.trained]          # what is sent together
        self.ready, self.handles = set(), []                # of this step
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, p):
        if self.sends:
            self.ready.add(p)
            self.start_in_order()

    def start_in_order(self):
        """Start every bucket that is full, and has only started ones before it."""
        for i in range(len(self.handles), len(self.buckets)):
            if not self.ready.issuperset(self.buckets[i]):
                break
            self.handles.append(self.start(self.payload(i), self.group))

    def payload(self, i):
        """The one tensor that holds the gradients of bucket i."""
        [p] = self.buckets[i]
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        return p.grad

    def finish(self):
        self.ready.update(self.trained)                     # what was not used is ready too
        self.start_in_order()
        for handle in self.handles:
            handle.wait()
        self.ready, self.handles = set(), []


def fill_buckets(parameters, capacity):
    """Lists of parameters, in order: each of one dtype, and full once it has `capacity` bytes."""
    buckets = []
    for p in parameters:
        last = buckets[-1] if buckets else []
        full = sum(q.nbytes for q in last) >= capacity
        if last and not full and last[0].dtype == p.dtype:
            last.append(p)
        else:
            buckets.append([p])
    return buckets


class Bucket(Overlap):
    """The same, with a few flat tensors in place of many gradients: each p.grad is a view into one.

    capacity: bytes at which a bucket is full. A step begins with gradients of None (zero_grad), so
    the first backward makes new ones, which move into their bucket; later ones are added there.
    """

    def __init__(self, module, group, capacity, start=all_reduce):
        super().__init__(module, group, start)
        self.buckets = fill_buckets(self.trained, capacity)
        self.flat, self.view = [], {}
        for bucket in self.buckets:
            sizes = [p.numel() for p in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            self.flat.append(flat)
            self.view |= {p: v.view_as(p) for p, v in zip(bucket, flat.split(sizes))}

    def move_in(self, p):
        if p.grad is not self.view[p]:
            self.view[p].zero_() if p.grad is None else self.view[p].copy_(p.grad)
            p.grad = self.view[p]

    def gradient_is_ready(self, p):
        self.move_in(p)
        super().gradient_is_ready(p)

    def payload(self, i):
        for p in self.buckets[i]:
            self.move_in(p)                             # what was not used
        return self.flat[i]


def replicate(variant, module, group, bucket_bytes, start=all_reduce):
    if variant == "naive":
        return Naive(module, group, start)
    if variant == "overlap":
        return Overlap(module, group, start)
    return Bucket(module, group, bucket_bytes, start)


# ---------------------------------------------------------------------------------------- the step


def train_step(replica, optimizer, micro_batches, valid, clip):
    """One step on this rank's micro-batches. Returns this rank's part of the loss, and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets of
    the whole global batch. Communication: what `replica` sends in the last backward and after.
    """
    replica.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        last = i == len(micro_batches)
        with contextlib.nullcontext() if last else replica.no_sync():
            loss = loss_sum(replica(tokens), targets) / valid
            loss.backward()
        total += loss.detach()
    replica.finish()

    norm = grad_norm(replica.parameters())          # every rank has the whole gradient: no sending
    if clip:
        clip_grads(replica.parameters(), norm, clip)
    optimizer.step()
    return total, norm


def torch_step(ddp, optimizer, micro_batches, valid, clip):
    """The same with DistributedDataParallel, which averages over ranks: hence their number."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        last = i == len(micro_batches)
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss = loss_sum(ddp(tokens), targets) / valid
            (loss * dist.get_world_size(ddp.process_group)).backward()
        total += loss.detach()

    norm = nn.utils.clip_grad_norm_(ddp.parameters(), clip or float("inf"))
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas


def model_state_bytes(cfg, optimizer, width):
    """Bytes of parameters, gradients and optimizer states on every rank: no fewer than on one GPU.

    width: bytes of a number. AdamW has two moments, and a step count of 4 bytes per tensor.
    """
    size = width * cfg.parameters()
    tensors = 10 * cfg.layers + (3 if cfg.tie else 4)
    states = {"adamw": 2 * size + 4 * tensors, "momentum": size, "sgd": 0}[optimizer]
    return {"parameters": size, "gradients": size, "optimizer states": states}


def wire_bytes(payload, ranks):
    """What a rank sends in a ring all_reduce: a reduce_scatter and an all_gather, each (N-1)/N."""
    return 2 * (ranks - 1) / ranks * payload


def communication_over_backward(gradient_bytes, parameters, tokens, ranks, flops, bandwidth):
    """How long the all_reduce takes, in backwards: all of it can be hidden if this is 1 or less.

    tokens: of one rank in the backward that it hides behind. flops: FLOP/s. bandwidth: bytes/s.
    """
    return (wire_bytes(gradient_bytes, ranks) / bandwidth) / (4 * tokens * parameters / flops)


def tokens_to_hide(bytes_per_gradient, ranks, flops, bandwidth):
    """The tokens per rank from which on the all_reduce is hidden: where the ratio above is 1."""
    return bytes_per_gradient / 2 * (ranks - 1) / ranks * flops / bandwidth


MACHINES = {  # dense bf16 FLOP/s of a chip, and bytes/s that it can send, as its makers give them
    "A100, NVLink 3": (312e12, 300e9),
    "A100, InfiniBand HDR": (312e12, 25e9),
    "H100, NVLink 4": (989e12, 450e9),
    "H100, InfiniBand NDR": (989e12, 50e9),
    "TPU v5p, one axis of ICI": (459e12, 180e9),
}


# -------------------------------------------------------------------------------------- the picture


class Timeline:
    """When gradients became ready and all_reduces ran, on this rank, in seconds.

    On a CPU a handle's future says when it is done; on CUDA events do, an all_reduce's on a stream
    that does nothing but wait for it.
    """

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.side = torch.cuda.Stream() if self.cuda else None
        self.clear()

    def clear(self):
        self.marks, self.gradients, self.sent, self.done = {}, [], [], []

    def now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self, name):
        self.marks[name] = self.now()

    def gradient_is_ready(self, p):
        self.gradients.append(self.now())

    def start(self, tensor, group):
        """all_reduce, with a note of when it started and ended: [start, end, bytes]."""
        span = [self.now(), None, tensor.nbytes]
        self.sent.append(span)
        handle = all_reduce(tensor, group)
        if self.cuda:
            with torch.cuda.stream(self.side):
                handle.wait()
                span[1] = self.now()
        else:
            self.done.append(handle.get_future().then(
                lambda future, span=span: span.__setitem__(1, time.perf_counter())))
        return handle

    def seconds(self):
        """(end of backward, gradient times, spans of the all_reduces), all since backward began."""
        if self.cuda:
            torch.cuda.synchronize()
        for future in self.done:
            future.wait()
        begin = self.marks["backward begins"]
        since = begin.elapsed_time if self.cuda else lambda t: 1e3 * (t - begin)
        spans = [(since(a) / 1e3, since(b) / 1e3, size) for a, b, size in self.sent]
        return (since(self.marks["backward ends"]) / 1e3, [since(t) / 1e3 for t in self.gradients],
                spans)


def record_timeline(variant, args, group, device, tokens, targets):
    """A forward and a backward of one variant, the third after two to warm up: its `seconds()`."""
    timeline = Timeline(device)
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    for p in model.parameters():                    # before the replica's own hooks
        p.register_post_accumulate_grad_hook(timeline.gradient_is_ready)
    replica = replicate(variant, model, group, 2**20 * args.bucket_mb, timeline.start)
    for _ in range(3):
        replica.zero_grad()
        loss = loss_sum(replica(tokens), targets)
        dist.barrier(group)                         # ranks that were late would look like sending
        timeline.clear()
        timeline.mark("backward begins")
        loss.backward()
        timeline.mark("backward ends")
        replica.finish()
    return timeline.seconds()


def hidden_share(backward_end, spans):
    """Of the time in which some all_reduce was under way, the share before backward's end."""
    total = hidden = reached = 0.0
    for start, end, _ in sorted(spans):
        start, end = max(start, reached), max(end, reached)
        total += end - start
        hidden += max(0.0, min(end, backward_end) - start)
        reached = end
    return hidden / total if total else 0.0


def lanes(spans):
    """A lane for each span, such that spans of one lane do not overlap."""
    free_from, chosen = [], []
    for start, end, _ in spans:
        lane = next((i for i, t in enumerate(free_from) if t <= start), len(free_from))
        free_from[lane:lane + 1] = [end]
        chosen.append(lane)
    return chosen


def draw(timelines, path, title):
    """One row per variant: backward with a tick per gradient; below it its all_reduces, from start
    to end, with the time for which they queued behind each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 * len(timelines) + 1), layout="constrained")
    rows = figure.subplots(len(timelines), sharex=True)
    for axes, (variant, (end, gradients, spans)) in zip(rows, timelines.items()):
        axes.barh(0.5, 1e3 * end, height=0.8, left=0, color="#355070", label="backward")
        axes.vlines([1e3 * t for t in gradients], 0.1, 0.9, color="#eaac8b", linewidth=0.8,
                    label="a gradient is ready")
        lane = lanes(spans)
        height = 2 / (1 + max(lane, default=0))                     # all lanes share two units
        for i, (start, stop, _) in enumerate(spans):
            axes.barh(1.1 + height * (lane[i] + 0.5), 1e3 * (stop - start), left=1e3 * start,
                      height=0.9 * min(height, 1), color="#e56b6f", edgecolor="white",
                      linewidth=0.5 * (height > 0.2), label="an all_reduce" if i == 0 else None)
        axes.set_title(f"{variant}: {len(spans)} all_reduces, {hidden_share(end, spans):.0%} of "
                       "their time hidden", loc="left", fontsize=10)
        axes.set_yticks([])
        axes.invert_yaxis()
        axes.margins(x=0)
    rows[-1].set_xlabel("ms since backward began")
    figure.legend(*rows[0].get_legend_handles_labels(), loc="outside upper right", ncols=3,
                  frameon=False)
    figure.suptitle(title, x=0.01, ha="left")
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run


def train(args, ranks, group, text, run):
    """Train for --steps steps; check model states and traffic against their formulas."""
    cfg, dtype = args.model, common.DTYPES[args.dtype]
    bucket_bytes = 2**20 * args.bucket_mb
    model = gpt(cfg, args.seed, ranks.device, dtype)
    optimizer = common.OPTIMIZERS[args.optimizer](model.parameters(), args.lr)
    by_torch = args.variant == "torch"
    if by_torch:
        DDP = nn.parallel.DistributedDataParallel
        new_name = "forward_sync_buffers" in inspect.signature(DDP).parameters
        still = {"forward_sync_buffers" if new_name else "broadcast_buffers": False}
        replica = DDP(model, process_group=group, bucket_cap_mb=args.bucket_mb,
                      gradient_as_bucket_view=True, **still)      # our buffers never change
        step = functools.partial(torch_step, replica, optimizer)
    else:
        replica = replicate(args.variant, model, group, bucket_bytes)
        step = functools.partial(train_step, replica, optimizer)

    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)
        mine = [x.chunk(ranks.world)[ranks.rank].to(ranks.device) for x in (tokens, targets)]
        pieces = list(zip(*(x.split(args.micro_batch) for x in mine)))
        with run.measure(i):
            loss, norm = step(pieces, valid, args.clip)
        dist.all_reduce(loss, group=group)              # for the report, and outside of the meters
        run.log(i, batch, loss, norm, model.named_parameters())

    parameters = list(model.parameters())
    formula = model_state_bytes(cfg, args.optimizer, dtype.itemsize)
    held = parameters, [p.grad for p in parameters], list(optimizer.state.values())
    for (kind, expected), tensors in zip(formula.items(), held):
        run.check(kind, nbytes(tensors), expected)

    size, calls = formula["gradients"], len(parameters)
    if args.variant == "bucket":
        calls = len(fill_buckets(parameters[::-1], bucket_bytes))
    traffic = {"all_reduce": (None if by_torch else calls, size, wire_bytes(size, ranks.world))}
    run.check_comm(traffic)


def report(args, ranks, group, text, run):
    """Say when the all_reduce can be hidden, and draw when it was."""
    parameters, width = args.model.parameters(), common.DTYPES[args.dtype].itemsize
    tokens, n = args.micro_batch * args.model.seq, ranks.world
    run.note(f"left: all_reduce over backward for {tokens} tokens in {args.dtype} on {n} rank(s), "
             "if both ran at these peak rates")
    run.note("right: the tokens in a rank's last backward from which on bf16 gradients are hidden, "
             "over many ranks")
    for machine, rates in MACHINES.items():
        ratio = communication_over_backward(width * parameters, parameters, tokens, n, *rates)
        needed = tokens_to_hide(2, 2**20, *rates)
        run.note(f"  {machine:<26}{ratio:8.2f}{needed:10,.0f} tokens")

    mine = [x.chunk(n)[ranks.rank][: args.micro_batch].to(ranks.device) for x in text.batch(0)[:2]]
    timelines = {}
    for variant in ("naive", "overlap", "bucket"):
        gc.collect()                                # the model before: its hooks are cycles
        timelines[variant] = record_timeline(variant, args, group, ranks.device, *mine)
    for variant, (end, _, spans) in timelines.items():
        run.note(f"{variant:<8}{len(spans):4} all_reduces, backward {1e3 * end:6.1f} ms, hidden "
                 f"behind it: {hidden_share(end, spans):.0%} of the communication")
    if ranks.rank == 0:
        draw(timelines, args.plot, f"Rank 0 of {n}, {ranks.device.type}")
    run.note(f"picture: {args.plot}")


def main(argv=None):
    parser = common.parser(__file__, __doc__, ("naive", "overlap", "bucket", "torch"),
                           default="bucket", steps=20)
    parser.add_argument("--bucket-mb", type=common.number(float, 0, example=25), default=1.0,
                        help="MiB at which a bucket is full; PyTorch's default is 25")
    parser.set_defaults(plot="runs/02_data_parallel.png")
    args = common.parse(parser, argv)
    common.split_batch(args, common.environment("WORLD_SIZE", 1))
    text = common.Text(args)
    ranks = common.start(args)

    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("dp",))
    group = mesh.get_group("dp")
    build = functools.partial(gpt, args.model, args.seed, ranks.device, common.DTYPES[args.dtype])
    run = common.Run(args, ranks, text, build, f"buckets of {args.bucket_mb:g} MiB")
    train(args, ranks, group, text, run)
    report(args, ranks, group, text, run)
    return run.finish()


if __name__ == "__main__":
    common.launch(main)
