r"""02 · Data parallelism: the same model on every rank, other sequences on each.

Chapter 01 cut the batch into micro-batches, ran one after the other, and added up their gradients.
Data parallelism runs them at the same time: each of N ranks, torchrun's copies of the program, has
a GPU and the whole model, and takes 1/N of the batch. What is left is to add up the gradients, over
ranks now, and that takes communication: an all_reduce (chapter 00), after which every rank holds
the sum. All then take the same optimizer step, so their models stay equal, and are not sent again.

    naive      forward | backward              | all_reduce, one per parameter ... | optimizer
    overlap    forward | backward              |     | optimizer
                           |-|---|-|---|-|---|-|---|-|   each starts when its gradient is ready
    bucket     forward | backward              |   | optimizer
                             |-----|-----|-----|---|     few large ones, when a bucket is full

A gradient is ready long before backward ends: the head's comes first, the embedding's last. So the
all_reduce of one can hide behind the backward of the rest, and only the last must be waited for.
And every message costs its latency, however small it is: a bucket packs several gradients into one
flat tensor. Once there, a gradient stays until the step ends: p.grad is a view into the bucket, so
the sum needs no unpacking, and a second micro-batch is added in place.

Three things must be right.

    Order.    Every rank must start the same collectives in the same order, or they sum what does
              not belong together, or hang. But gradients need not come in the same order
              everywhere: a rank may not use a parameter at all (a branch not taken). So a bucket
              waits for those before it, and one that never fills starts when backward has ended.

    Sum.      The gradients are summed, never averaged: each rank has already divided its loss by
              the valid targets of the whole batch. Suppose rank 0 has 100 valid targets and rank 1
              has 50. Every target should count 1/150. If each rank took the mean over its own, and
              the two means were averaged, a target would count 1/200 on rank 0 and 1/100 on rank 1.
              DistributedDataParallel averages over ranks: that is why the variant `torch`
              multiplies its loss by N.

    Once.     With several micro-batches, only the last backward sends. The gradients of the others
              wait in p.grad, and one sum over ranks serves for all.

What a rank stores and sends (S bytes of gradients, in --dtype with any --precision; N ranks)

    parameters, gradients, optimizer states     all of them, as on one GPU: nothing is saved
    all_reduce, payload                         S a step, however many micro-batches
    all_reduce, on the wire                     2 (N-1)/N · S
    calls                                       one per parameter, or one per bucket

The payload is the whole tensor; "on the wire" is what one rank sends for it in a ring (chapter 00):
in a reduce_scatter and in an all_gather, N-1 chunks of S/N each.

When it pays: all but the last bucket can hide behind backward, if the all_reduce takes no longer
than backward does. Backward computes two matmuls for each matrix, 4 FLOPs per parameter and token
(attention's own matmuls come on top):

    2 (N-1)/N · S / bandwidth  <=  4 · tokens · parameters / FLOP/s

where `tokens` are those of a rank's last micro-batch. With g bytes a gradient, S = g · parameters,
and the model's size cancels. What matters is that a rank has at least

    tokens  >=  g/2 · (N-1)/N · FLOP/s / bandwidth

An H100 computes 989 TFLOP/s in bf16 and sends 450 GB/s over NVLink, 50 GB/s over InfiniBand. So on
the 8 ranks of a machine, fp32 gradients need 3,846 tokens a rank over NVLink. Over InfiniBand, ever
more ranks need g/2 · FLOP/s / bandwidth = 39,560 each. And what does not fit is for chapter 03.

So more ranks need a larger batch (micro-batch x accumulated micro-batches x ranks). How large? If
the gradients of single tokens have the mean G and the covariance Σ, the mean of B of them is off by
tr(Σ)/B (squared, on average). That is as much as |G|² at

    B  =  tr(Σ) / |G|²  tokens, the gradient noise scale

Far below, twice the batch takes half as many steps. Far above, it takes as many, and more GPUs buy
nothing. Ranks can measure it: the mean gradient of a rank's own tokens has more noise, and so is
longer, than that of all tokens (--noise-scale). The scale grows while the loss falls, and so did
the batch of DeepSeek-V3: from 3,072 sequences to 15,360 in its first 469B tokens (--batch-ramp).

Run it:
    torchrun --nproc_per_node=4 02_data_parallel.py
    torchrun --nproc_per_node=4 02_data_parallel.py --variant naive --micro-batch 1
    torchrun --nproc_per_node=4 02_data_parallel.py --batch 32 --batch-ramp 8 10 --noise-scale
    torchrun --nproc_per_node=8 02_data_parallel.py --preset gpt2 --bucket-mb 25     (eight GPUs)

Sources: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020),
section 3; Ultra-Scale Playbook, "Data Parallelism" and A3 (where the condition begins with
num_params / (2 · num_tokens): for num_params read g, the bytes of a gradient); How To Scale Your
Model, part 5, "Data Parallelism" (where the condition is B/X > C/W: g = 2, at the limit);
McCandlish et al., An Empirical Model of Large-Batch Training (2018); DeepSeek-V3 (2024), 4.2.
"""

import contextlib
import inspect

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Refused, gpt, grad_norm, loss_sum

# ------------------------------------------------------------------------------------- the replicas

class Naive(nn.Module):
    """A replica of `module` on each rank of `group`; after backward, one all_reduce per gradient.

    Set `sends` to False for every backward of a step but the last, and call `finish` after that:
    then the .grad of every trained parameter is the sum over all ranks, where what a rank did not
    use counts as zero. Float buffers (a BatchNorm's statistics; our model has none) are the first
    rank's, which sends them before a forward that `sends`. NCCL wants contiguous parameters.
    """

    def __init__(self, module, group):
        super().__init__()
        self.module, self.group, self.sends = module, group, True
        trained = [p for p in module.parameters() if p.requires_grad]
        self.trained = trained[::-1]                    # the order in which backward meets them
        self.statistics = [b for b in module.buffers() if b.is_floating_point()]
        for tensor in (*module.parameters(), *module.buffers()):    # (here they are alike already)
            dist.broadcast(tensor.data, group=group, group_src=0)   # so all start as the first

    def forward(self, *inputs, **more):
        if self.training and self.sends:
            for buffer in self.statistics:
                dist.broadcast(buffer, group=self.group, group_src=0)
        return self.module(*inputs, **more)

    def finish(self):
        for p in self.trained:
            p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=self.group)


class Overlap(Naive):
    """The same, but each all_reduce starts in backward, as soon as its gradient is ready."""

    def __init__(self, module, group):
        super().__init__(module, group)
        self.buckets = [[p] for p in self.trained]      # what is sent together
        self.ready = set()                              # parameters that backward has reached
        self.handles = []                               # of the buckets that are on their way
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.gradient_is_ready)

    def gradient_is_ready(self, p):
        """Called by autograd in the middle of backward, when p.grad has all of p's gradient."""
        assert p not in self.ready, "finish() must come after a backward that sends"
        if self.sends:
            self.ready.add(p)
            self.start_full_buckets()

    def start_full_buckets(self):
        """Start bucket after bucket, up to the first that is not full: the same order on all
        ranks, whatever the order in which their gradients come."""
        for i in range(len(self.handles), len(self.buckets)):
            if not self.ready.issuperset(self.buckets[i]):
                return
            handle = dist.all_reduce(self.payload(i), group=self.group, async_op=True)
            self.handles.append(handle)                 # to wait() on it in finish()

    def payload(self, i):
        """The one tensor that holds the gradients of bucket i."""
        [p] = self.buckets[i]                           # one each; Bucket has several
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
        return p.grad

    def finish(self):
        self.ready.update(self.trained)                 # what was not used will not come any more
        self.start_full_buckets()
        for handle in self.handles:
            handle.wait()
        self.ready, self.handles = set(), []


def fill_buckets(parameters, capacity):
    """Lists of parameters, in order: each with gradients of one dtype, and full once these have
    `capacity` bytes."""
    buckets = [[]]
    for p in parameters:
        last = buckets[-1]
        full = last and sum(q.numel() * q.grad_dtype.itemsize for q in last) >= capacity
        if full or last and last[0].grad_dtype != p.grad_dtype:
            buckets.append([p])
        else:
            last.append(p)
    return buckets


class Bucket(Overlap):
    """The same, with a few flat tensors in place of many gradients: each p.grad is a view into one.

    capacity: bytes at which a bucket is full. A step begins with gradients of None (zero_grad), so
    the first backward makes new ones, which move into their bucket; later ones are added there.
    """

    def __init__(self, module, group, capacity):
        super().__init__(module, group)
        self.buckets = fill_buckets(self.trained, capacity)
        self.flat, self.view = [], {}
        for bucket in self.buckets:
            sizes = [p.numel() for p in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].grad_dtype, device=bucket[0].device)
            self.flat.append(flat)
            for p, view in zip(bucket, flat.split(sizes)):
                self.view[p] = view.view_as(p)

    def move_in(self, p):
        view = self.view[p]
        if p.grad is None:
            view.zero_()
        elif p.grad is not view:
            view.copy_(p.grad)
        p.grad = view

    def gradient_is_ready(self, p):
        self.move_in(p)
        super().gradient_is_ready(p)

    def payload(self, i):
        for p in self.buckets[i]:
            self.move_in(p)                             # those that were not used
        return self.flat[i]


# ----------------------------------------------------------------------------------------- the step

def train_step(replica, optimizer, micro_batches, valid, clip):
    """One step on this rank's micro-batches. Returns this rank's part of the loss, and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets of
    the whole global batch. Communication: what `replica` sends in the last backward and after.
    """
    replica.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        replica.sends = i == len(micro_batches)
        loss = loss_sum(replica(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    replica.finish()

    norm = grad_norm(replica.parameters())              # every rank has all of it: nothing to send
    if clip:
        clip_grads_with_norm_(replica.parameters(), clip, norm)
    optimizer.step()
    return total, norm


def torch_step(ddp, optimizer, micro_batches, valid, clip):
    """The same with DistributedDataParallel, which averages over ranks: hence the factor."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        sends = i == len(micro_batches)
        with contextlib.nullcontext() if sends else ddp.no_sync():
            loss = loss_sum(ddp(tokens), targets) / valid
            (dist.get_world_size() * loss).backward()
        total += loss.detach()

    norm = nn.utils.clip_grad_norm_(ddp.parameters(), clip or float("inf"))     # inf: no clipping
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------- the formulas

def wire_bytes(payload, ranks):
    """What a rank sends in a ring all_reduce of so many bytes."""
    return 2 * (ranks - 1) / ranks * payload            # a reduce_scatter and an all_gather


def traffic(gradient_bytes, calls, ranks):
    """What is sent in a step: {op: (calls, bytes of payload, bytes on the wire)}."""
    return {"all_reduce": (calls, gradient_bytes, wire_bytes(gradient_bytes, ranks))}


def communication_over_backward(gradient_bytes, parameters, tokens, ranks, flops, bandwidth):
    """The all_reduce's time over backward's: where it is at most 1, all but the last can hide.

    tokens: of one rank in the backward that it hides behind. flops: FLOP/s. bandwidth: bytes/s.
    """
    return (wire_bytes(gradient_bytes, ranks) / bandwidth) / (4 * tokens * parameters / flops)


def tokens_to_hide(bytes_per_gradient, ranks, flops, bandwidth):
    """The tokens per rank from which on the all_reduce hides: where the ratio above is 1."""
    return bytes_per_gradient / 2 * (1 - 1 / ranks) * flops / bandwidth


def noise_and_signal(small, big, square_of_small, square_of_big):
    """Estimates of tr(Σ) and |G|², from squared norms of the mean gradients of `small` and of `big`
    tokens, which on average are |G|² + tr(Σ)/tokens. Divide their means over many steps."""
    noise = (square_of_small - square_of_big) / (1 / small - 1 / big)
    return noise, square_of_big - noise / big


def ramp(start, batch, steps):
    """The sequences in each of the first `steps` global batches: multiples of `start`, and at last
    `batch`. No ranks are in it: on other ones a run goes on with the same batches."""
    return [start + (batch // start - 1) * step // steps * start for step in range(steps)]


# ------------------------------------------------------------------------------------------ the run

def replicate(variant, module, group, bucket_bytes):
    if variant == "bucket":
        return Bucket(module, group, bucket_bytes)
    return {"naive": Naive, "overlap": Overlap}[variant](module, group)


def train(run):
    args = run.args
    mesh = run.mesh(dp=run.world)       # a DeviceMesh: the ranks on named axes, here all on one;
    group = mesh["dp"].get_group()      # along each axis there is a process group
    model = run.draw(gpt(args.model, seed=None))
    common.recompute(model, args.recompute)
    replica = replicate(args.variant, model, group, 2**20 * args.bucket_mb)
    optimizer = run.mixed(model.parameters())           # with --precision bf16, p.grad stays fp32

    for batch in run.batches(share=run.rank):           # 1/N of the sequences
        with run.measure():
            loss, norm = train_step(replica, optimizer, batch.micro_batches, batch.valid, args.clip)
        dist.all_reduce(loss, group=group)              # for the report, which shows the whole loss
        run.log(batch, loss, norm, model)


def train_torch(run):
    from torch.nn.parallel import DistributedDataParallel

    args, group = run.args, run.mesh(dp=run.world)["dp"].get_group()
    model = run.draw(gpt(args.model, seed=None))
    common.recompute(model, args.recompute)
    rounded = common.rounded(args)                      # parameters stay in run.dtype
    autocast = torch.autocast(run.device.type, rounded, enabled=rounded != run.dtype)
    model.forward = autocast(model.forward)
    # Buffers need not be sent: our model's never change. (torch 2.13 has renamed the argument.)
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    ddp = DistributedDataParallel(
        model, process_group=group, bucket_cap_mb=args.bucket_mb, gradient_as_bucket_view=True,
        **{"forward_sync_buffers" if renamed else "broadcast_buffers": False})
    optimizer = run.optimizer(model.parameters())

    for batch in run.batches(share=run.rank):
        with run.measure():
            loss, norm = torch_step(ddp, optimizer, batch.micro_batches, batch.valid, args.clip)
        dist.all_reduce(loss, group=group)
        run.log(batch, loss, norm, model)


def formulas(args, rank, ranks, model):
    """For lab/ alone (keys: lab/run/formulas.py). Skip it when you read this the first time."""
    parameters = args.model.parameters()                # how many numbers
    width = common.DTYPES[args.dtype].itemsize          # of a gradient, with any --precision
    gradient_bytes = width * parameters
    tokens = args.micro_batch * args.model.seq
    over_backward = lambda *rates: communication_over_backward(
        gradient_bytes, parameters, tokens, ranks, *rates)
    answer = {"parameters": parameters, "kept": {"outside": 1},     # all of it
              "overlap": {"all_reduce": over_backward},
              "noise": noise_and_signal if args.noise_scale else None}
    if args.variant == "torch":                         # autocast has no masters
        return answer | {"widths": (width, width, 0), "kept": None,
                         "beside": ("bucket", traffic(gradient_bytes, None, ranks))}

    messages = list(model.parameters())[::-1]
    if args.variant == "bucket":
        messages = fill_buckets(messages, 2**20 * args.bucket_mb)
    return answer | {"sent": traffic(gradient_bytes, len(messages), ranks), "machines": {
        f"all_reduce over backward: {args.dtype} gradients, {tokens} tokens in bf16": over_backward,
        "tokens in a rank's last backward that hide fp32 gradients of 8 ranks":
            lambda *rates: tokens_to_hide(4, 8, *rates)}}


def requires(args, ranks):
    if args.batch_ramp:
        start, steps = args.batch_ramp
        least = ranks * (args.micro_batch or 1)         # sequences of all ranks' micro-batches
        if start % least:
            raise Refused(f"--batch-ramp {start} is not a multiple of {ranks} ranks x "
                          f"--micro-batch = {least}", f"--batch-ramp {least} {steps}")
        common.divides("--batch", args.batch, "the START of --batch-ramp", start)
        args.micro_batch = args.micro_batch or start // ranks           # more and more come
        args.ramp = ramp(start, args.batch, steps)
    common.split_batch(args, ranks)


def flags(parser):
    add = parser.add_argument
    add("--bucket-mb", type=float, default=1.0,
        help="MiB at which a bucket is full; PyTorch's default is 25")
    add("--batch-ramp", type=int, nargs=2, metavar=("START", "STEPS"),
        help="let the batch grow to --batch over the first STEPS")
    add("--noise-scale", action="store_true", help="estimate tr(Σ)/|G|² (beside lab/ alone)")


VARIANTS = {  # the default first; with the flags that only some of them know
    "bucket": (train, "--bucket-mb", "--noise-scale"),
    "overlap": (train, "--noise-scale"),
    "naive": (train, "--noise-scale"),
    "torch": (train_torch, "--bucket-mb"),
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
