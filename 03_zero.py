r"""03 · ZeRO: data parallelism in which no rank holds what another one has.

In chapter 02 every rank keeps all parameters, gradients and optimizer states; only the batch is
cut. But a rank that updates 1/N of the parameters needs only the optimizer states of that part, and
its summed gradient. And of the parameters it needs, at any moment, only those of the module that
computes. ZeRO cuts these three, and each cut is a stage:

    bytes per rank      parameters     gradients      optimizer states
    02 data parallel       P              G               O
    zero1                  P              G               O / N
    zero2                  P              G / N           O / N        and two units' full gradients
    zero3                  P / N          G / N           O / N        and those, and gathered units

Ψ parameters in fp32 under AdamW: P + G + O is 4Ψ + 4Ψ + 8Ψ bytes, for 7 billion 112 GB. On 8 ranks
that becomes 63 GB (zero1), 38.5 GB (zero2) or 14 GB (zero3). With --precision bf16 it is 2Ψ + 4Ψ +
12Ψ: the masters are divided as the moments are, and gradients are summed in fp32. (See `held`.)

Cutting is cheap, because an all_reduce is two steps already: a reduce_scatter, after which each
rank has the sum of 1/N of the gradient, and an all_gather, after which every rank has all of it.
ZeRO puts the update in between, and gathers parameters in place of gradients:

    02       forward                          | last backward, all_reduce       | update all of it
    zero1    gather what was updated, forward | last backward, reduce_scatter   | update 1/N
    zero2    gather what was updated, forward | every backward, reduce_scatter  | update 1/N
    zero3    gather U1 | forward U1 | free U1, gather U2 | ... | gather Un | forward Un
             backward Un | free Un, reduce_scatter Un | gather Un-1 | ... | backward U1 | update 1/N

A unit is a module whose parameters are gathered together: the embedding, each block (or several of
them, --blocks-per-unit), and the head. Their numbers become one flat tensor, with zeros at its end
until N divides its length, and each rank keeps one of N equal shards. If they are a 2 x 3 matrix w
and a vector b of 4, 4 ranks keep 3 numbers each, and two of these 12 are such zeros:

    rank 0    w00 w01 w02    rank 1    w10 w11 w12    rank 2    b0 b1 b2    rank 3    b3 0 0

The optimizer does not notice where a parameter begins, since it treats every number by itself.
(Muon does not: `--optimizer muon` brings matrices together for its update, see chapter 11.) Our
model is a list, so a step walks it, unit by unit. While one unit's backward computes, the gradients
of the one before are on their way: those of two are alive (a tied table's wait for its second use).
And zero1 and zero2 gather what an update has changed when the next step begins: first the unit that
comes first, which computes while the others travel. (After the last step, gather once more before
you evaluate or save the model.) In zero3 the head stays gathered, since its backward comes at once.
PyTorch's FSDP does the same in hooks (`--variant torch`: fully_shard, which is FSDP2, cuts each
parameter by its rows. Each module that it wraps is a unit. Its stage 2 is zero3 --keep-gathered).

What a rank sends in a step (Ψ' is Ψ with padding, in bytes; M micro-batches; all times (N-1)/N)

    zero1                      2 Ψ'          as much as the all_reduce of chapter 02
    zero2                      (M + 1) Ψ'    after every backward: the full gradient is not kept
    zero3                      3 M Ψ'        less M heads: those are not gathered for backward again
    zero3 --keep-gathered      2 M Ψ'        kept from forward to backward, for more memory

With --precision bf16 a reduction sends as much as in fp32, and a gather half of it. DDP, which does
not know who updates what, sums by all_reduce (--variant torch --stage 1): zero1's 2 Ψ' become 3 Ψ'.
To clip, no rank needs whole sums, since a norm takes one number of each.

A larger unit means fewer calls and more memory. With k of L blocks in each, and one gathered ahead,
2k blocks are there at the peak, and a micro-batch of stage 3 calls all_gather 2·ceil(L/k) + 3 times
for the same bytes. Each call waits N-1 times for a latency α, which is as long as its bytes take if
they are N·α·bandwidth. A block of a large model has many more of them; small blocks go together.

When it pays. Stage 1 holds less than chapter 02 and sends as much: its gather hides behind the next
forward, and its reduce_scatter behind the last backward. Stage 2 sends (M + 1)/2 times as much,
which is no more if M is 1. Stage 3 sends 3M/2 times as much; prefetching (--prefetch) hides its
gathers, for more memory: while a unit computes, those of the next ones are under way. A forward
has to hide p bytes of each number, and computes 2 FLOPs with it for each token. A backward has g
bytes, of the gradient, and in stage 3 also p; it computes 4. So, as in chapter 02, a micro-batch of

    forward     tokens  >=       p / 2 · (N-1)/N · FLOP/s / bandwidth
    backward    tokens  >=       g / 4 · (N-1)/N · FLOP/s / bandwidth       stage 3: (g + p) / 4

hides them: in bf16 with fp32 gradients on 8 H100s over NVLink, 1,923 and, in stage 3, 2,885.

What can be added:

    --offload          The CPU has O and master weights (4Ψ/N, in any case), and updates them.
    hsdp               Stage 3 in groups of --shard-size ranks, such as a machine's. Across these
                       groups, shards of gradients are summed once a step.
    zeropp             ZeRO++: forward gathers int8, with a scale for 256 numbers, and keeps the
                       weights spread over the --shard-size ranks of a machine (P / shard size more
                       bytes), where backward gathers them. The loss of 50 steps may be 1%, and the
                       first gradient norm 5% from one GPU's. (Gradients in 4 bits are not here.)

Run it:
    torchrun --nproc_per_node=4 03_zero.py
    torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4 --keep-gathered
    torchrun --nproc_per_node=8 03_zero.py --variant zeropp --shard-size 4 --steps 50
    torchrun --nproc_per_node=4 03_zero.py --variant torch --stage 2

Sources: Rajbhandari et al., ZeRO (2020), sections 5 and 7; Wang et al., ZeRO++ (2023), section 3;
Ren et al., ZeRO-Offload (2021); Zhao et al., PyTorch FSDP (2023), sections 3 and 4; Ultra-Scale
Playbook, "Zero Redundancy Optimizer" and A3; How To Scale Your Model, part 5, "FSDP".
"""

import argparse
import contextlib
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Cut, Refused, gpt, grad_norm, loss_sum, part

# ----------------------------------------------------------------------------------------- the unit

class Unit:
    """The parameters of one module as one flat tensor, of which each rank of `group` has a shard.

    full: (N·k,), of which every parameter is a view. shard: (k,), this rank's part, a view too
    (until keep_only_shards). shard.grad: of the summed gradient. gradients: (N·k,), of which every
    p.grad is a view. Both have shard.grad_dtype, with --precision bf16 fp32. What a `start` sends
    lives until `finish`.
    """

    def __init__(self, parameters, group):
        assert len({p.dtype for p in parameters}) == 1, "a unit needs parameters of one dtype"
        self.parameters, self.group = parameters, group
        self.gathering = self.gradients = None
        self.padding = -sum(p.numel() for p in parameters) % group.size()
        zeros = parameters[0].new_zeros(self.padding)
        full = torch.cat([*(p.detach().flatten() for p in parameters), zeros])
        cut = Cut(0, group.rank(), group.size(), group)
        self.shard = nn.Parameter(part(full, [cut]))
        self.shard.cuts = (cut,)                        # the norm counts every number once
        self.shard.flat = parameters, cut.index * len(self.shard), group    # for a checkpoint
        self.hold(full)

    def hold(self, full):
        """Make the parameters views of `full`, and the shard this rank's part of it."""
        self.full, self.shard.data = full, part(full, self.shard.cuts)
        for p, view in zip(self.parameters, self.views(full)):
            p.grad_dtype, p.data = self.shard.grad_dtype, view

    def views(self, flat):
        """Views into a flat tensor, (N·k,), in the shapes of the parameters."""
        pieces = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [x.view(p.shape) for x, p in zip(pieces, self.parameters)]       # and not padding

    def free(self, until_backward=False):
        """Give back the memory of `full`, and keep the tensor. Autograd has saved the parameters,
        views of it, for backward (a linear needs its weight), and they will show what the next
        gather brings. Autograd counts the writes to a tensor, and backward fails if one came after
        it was saved. But `p.data = view` leaves p a count of its own, which no gather changes."""
        self.full.untyped_storage().resize_(0)

    def start_gather(self):
        """Start an all_gather of the shards, into new memory where `full` has been freed."""
        if not self.full.untyped_storage().nbytes():
            self.full.untyped_storage().resize_(self.full.nbytes)   # it still knows its shape
        self.gathering = common.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def make_room_for_gradients(self):
        """Each p.grad becomes a view into one tensor of zeros, to which backward adds. So nothing
        is copied before it is sent, and what a rank does not use counts as zero."""
        if self.gradients is not None:                  # of earlier micro-batches
            return
        self.gradients = torch.zeros_like(self.full, dtype=self.shard.grad_dtype)
        for p, view in zip(self.parameters, self.views(self.gradients)):
            if p.grad is not None:                      # of a tied table, from the head
                view.copy_(p.grad)
            p.grad = view

    def start_reduce(self, in_place=False):
        """Start a reduce_scatter of the gradients, and let go of the parameters' own. in_place:
        these stay, and the sum takes the place of this rank's part of them."""
        self.sum = part(self.gradients, self.shard.cuts)
        if not in_place:
            self.sum = torch.empty_like(self.sum)
        self.reducing = common.reduce_scatter(self.sum, self.gradients, group=self.group,
                                              async_op=True)
        for p in self.parameters:
            p.grad = p.grad if in_place else None

    def finish_reduce(self):
        """Add the sum to that of the micro-batches before."""
        self.reducing.wait()
        before = self.shard.grad
        self.shard.grad = self.sum if before is None else before.add_(self.sum)
        self.reducing = self.gradients = self.sum = None


def group_blocks(model, k):
    """The same list with k neighbouring blocks as one module, so that a unit is still an item."""
    embedding, *blocks, head = model
    groups = [nn.Sequential(*blocks[i:i + k]) for i in range(0, len(blocks), k)]
    return nn.Sequential(embedding, *groups, head) if k > 1 else model


def make_units(model, make_unit):
    """A unit for each module of the list; a parameter that two of them share is in the first's."""
    own = {}
    for name, p in model.named_parameters():            # each parameter once
        if p.requires_grad:
            own.setdefault(name.split(".")[0], []).append(p)
    return [make_unit(parameters) for parameters in own.values()]


def update(units, optimizer, clip):
    """Clip by the norm of the whole gradient, and update this rank's shards. Returns the norm."""
    shards = [unit.shard for unit in units]
    norm = grad_norm(shards, units[0].group)            # an all_reduce of one number
    if clip:
        clip_grads_with_norm_(shards, clip, norm)
    optimizer.step()
    return norm


# --------------------------------------------------------------------------------- stages 1 and 2

def zero1_step(model, units, optimizer, micro_batches, valid, clip, stage=1):
    """One step on this rank's micro-batches. Returns its part of the loss, and the norm. valid: the
    valid targets of the whole global batch. stage: 1 reduces gradients in the last backward, and 2
    in each one. To this end every module reads a detached input. So it has an autograd graph of its
    own, and its backward, from its output to its input, is ours to call. Communication, of all
    stages: see `traffic`."""
    model.zero_grad()
    for unit in units:
        unit.shard.grad = None                          # a part of the last step's gradients
        unit.start_gather()                             # first what forward needs first
    total = 0
    for count, (tokens, targets) in enumerate(micro_batches, start=1):
        out, graphs = tokens, []
        for unit, module in zip(units, model):
            unit.finish_gather()
            x = out.detach().requires_grad_(out.is_floating_point())    # tokens have no gradient
            out = module(x)                             # (micro_batch, seq, dim); logits at the end
            graphs.append((x, out))

        logits = out.detach().requires_grad_()          # (micro_batch, seq, vocab)
        loss = loss_sum(logits, targets) / valid
        loss.backward()
        total += loss.detach()

        grad = logits.grad                              # in the loop: of the output of module i
        sends = stage == 2 or count == len(micro_batches)
        for i in reversed(range(len(units))):
            units[i].make_room_for_gradients()
            x, out = graphs.pop()
            torch.autograd.backward(out, grad)
            grad = x.grad
            if sends and i + 1 < len(units):
                units[i + 1].finish_reduce()            # its sum travelled during this backward
            if sends:
                units[i].start_reduce(in_place=stage == 1)
        if sends:
            units[0].finish_reduce()
    return total, update(units, optimizer, clip)


# ---------------------------------------------------------------------------------------- stage 3

def gather(units, ahead):
    """Wait for the first of these units; the gathers of the next `ahead` ones have then started."""
    for unit in units[:1 + ahead]:
        if not unit.full.untyped_storage().nbytes():     # else it is there, or on its way
            unit.start_gather()
    units[0].finish_gather()


def keep_only_shards(units):
    """Before the first step: a rank's shards get memory of their own, and all else is freed."""
    for unit in units:
        unit.shard.data = unit.shard.data.clone()
        unit.full.untyped_storage().resize_(0)


def zero3_step(model, units, optimizer, micro_batches, valid, clip, ahead, keep_gathered=False,
               replicas=None):
    """The same, but a unit is gathered for its forward and for its backward alone. ahead: units to
    gather before they are needed. keep_gathered: from forward to backward. replicas: the ranks that
    hold the same shards (hsdp)."""
    for unit in units:
        unit.shard.grad = None
    total = 0
    for tokens, targets in micro_batches:
        out, graphs = tokens, []
        for i, module in enumerate(model):
            gather(units[i:], ahead)
            x = out.detach().requires_grad_(out.is_floating_point())
            out = module(x)
            graphs.append((x, out))
            if i + 1 < len(units) and not keep_gathered:    # backward needs the last one at once
                units[i].free(until_backward=True)

        logits = out.detach().requires_grad_()
        loss = loss_sum(logits, targets) / valid
        loss.backward()
        total += loss.detach()

        grad = logits.grad
        for i in reversed(range(len(units))):
            gather(units[i::-1], ahead)                 # towards the first unit
            units[i].make_room_for_gradients()
            x, out = graphs.pop()
            torch.autograd.backward(out, grad)
            grad = x.grad
            units[i].free()
            if i + 1 < len(units):
                units[i + 1].finish_reduce()
            units[i].start_reduce()
        units[0].finish_reduce()

    if replicas:
        for unit in units:
            dist.all_reduce(unit.shard.grad, group=replicas)
    return total, update(units, optimizer, clip)


# ----------------------------------------------------------------------------------------- ZeRO++

BLOCK = 256             # numbers that share a scale


def quantize(x):
    """(..., k) to int8 (..., k), and a float32 scale per block, whose largest becomes 127."""
    padding = -x.shape[-1] % BLOCK
    blocks = F.pad(x.float(), (0, padding)).unflatten(-1, (-1, BLOCK))          # (..., blocks, 256)
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-30)                     # (..., blocks)
    numbers = (blocks / scales[..., None]).round().to(torch.int8)
    return numbers.flatten(-2)[..., :x.shape[-1]].contiguous(), scales


def dequantize(numbers, scales):
    return numbers * scales.repeat_interleave(BLOCK, -1)[..., :numbers.shape[-1]]


class ZeroPlusPlusUnit(Unit):
    """quantized: whether shards are sent as int8; these gathers do not hide. node: the ranks of a
    machine, or None; each keeps a part of what forward has gathered, the secondary shard, for
    backward. (Two groups are then in use at once: with NCCL, their collectives must start in the
    same order on all ranks, as here.)"""

    def __init__(self, parameters, group, node, quantized):
        super().__init__(parameters, group)
        self.node, self.quantized, self.in_backward = node, quantized, False

    def start_gather(self):
        if not (self.in_backward or self.quantized):
            return super().start_gather()
        self.full.untyped_storage().resize_(self.full.nbytes)
        if self.in_backward:
            self.gathering = common.all_gather(self.full, self.secondary, self.node, async_op=True)
        else:
            everyones = []
            for mine in quantize(self.shard.data[None]):            # (1, k) and (1, blocks)
                everyones.append(mine.new_empty(self.group.size(), mine.shape[1]))
                common.all_gather(everyones[-1], mine, self.group)
            self.full.copy_(dequantize(*everyones).flatten())

    def free(self, until_backward=False):
        self.in_backward = until_backward and self.node is not None
        if self.in_backward:
            self.secondary = self.full.chunk(self.node.size())[self.node.rank()].clone()
        super().free()


# ------------------------------------------------------------------------------------ the formulas

def held(numbers, stage, n, precision="fp32"):
    """Bytes that a rank keeps between steps: P, G and O of the lesson's table, under AdamW."""
    p, g, o = (4, 4, 8) if precision == "fp32" else (2, 4, 12)
    return (p * numbers / (n if stage == 3 else 1), g * numbers / (n if stage > 1 else 1),
            o * numbers / n)


def padded_sizes(cfg, n, k=1):
    """The numbers in each unit (embedding, every k blocks, head), padded for n shards."""
    table = cfg.vocab * cfg.dim
    head = (1 if cfg.gated else 2) * cfg.dim + (0 if cfg.tie else table)
    block = (cfg.parameters() - table - head) // cfg.layers
    groups = [block * min(k, cfg.layers - first) for first in range(0, cfg.layers, k)]
    return [-(-size // n) * n for size in (table, *groups, head)]


def traffic(cfg, stage, n, micro_batches, widths=(4, 4), keep_gathered=False, replicas=1, k=1):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}. n: ranks of a group,
    which share one model, and sum one number for the norm. widths: bytes of a parameter, and of a
    gradient. replicas: the number of groups. k: blocks of a unit."""
    units, share = padded_sizes(cfg, n, k), (n - 1) / n
    width, sum_width = widths
    reduces = 1 if stage == 1 else micro_batches
    again = [] if keep_gathered else units[:-1]                     # for backward, without the head
    gathers = micro_batches * [*units, *again] if stage == 3 else units
    reduced, gathered = reduces * sum_width * sum(units), width * sum(gathers)
    norm = max(sum_width, 4) if n > 1 else 0                        # in float32 or better
    shards = sum_width * sum(units) // n if replicas > 1 else 0     # gradients, across groups
    calls = (n > 1) + len(units) * (replicas > 1)
    wire = 2 * share * norm + 2 * (replicas - 1) / replicas * shards
    return {"reduce_scatter": (len(units) * reduces, reduced, share * reduced),
            "all_gather": (len(gathers), gathered, share * gathered),
            "all_reduce": (calls, norm + shards, wire)}


def zeropp_traffic(cfg, n, micro_batches, widths, node, quantized, k=1):
    """The same for ZeRO++. node: its number of ranks if there are secondary shards, else None.
    quantized: whether a weight is sent in a byte, and the scale of a block in 4."""
    def gathers(units, ranks, in_int8):
        size = widths[0] * sum(units)
        if in_int8:
            size = sum(unit + 4 * n * -(-unit // n // BLOCK) for unit in units)
        return (1 + in_int8) * len(units), size, (ranks - 1) / ranks * size

    units = padded_sizes(cfg, n, k)
    forward = gathers(units, n, quantized)
    backward = gathers(units[:-1], node or n, quantized and not node)
    both = [micro_batches * (x + y) for x, y in zip(forward, backward)]
    return traffic(cfg, 3, n, micro_batches, widths, k=k) | {"all_gather": both}


def tokens_to_hide(bytes_sent, matmuls, n, flops, bandwidth):
    """The tokens of a micro-batch from which on so many bytes of each parameter hide behind its
    matmuls, 1 in forward and 2 in backward. flops: FLOP/s. bandwidth: bytes/s."""
    return bytes_sent * (n - 1) / n / bandwidth / (2 * matmuls / flops)


# ----------------------------------------------------------------------------------------- the run

def take_steps(run, step, model, units=None):
    for batch in run.batches(share=run.rank):           # 1/N of the sequences
        with run.measure():
            loss, norm = step(batch.micro_batches, batch.valid, run.args.clip)
        dist.all_reduce(loss)                           # for the report, which shows the whole loss
        run.log(batch, loss, norm, model, units)


def make_optimizer(run, units):
    """Of the shards, or their masters, on the CPU with --offload. (Chapter 01 has the masters.)"""
    shards = [unit.shard for unit in units]
    optimizer = run.mixed(shards, device="cpu" if run.args.offload else None)   # rounds the shards
    for unit in units:
        unit.hold(unit.full.to(unit.shard.dtype))       # and this the other ranks' parts
    return optimizer


def train(run):
    """zero1, zero2, zero3, and hsdp, which has a grid of ranks: those of a row share one copy of
    the model, and those of a column hold the same shard. A DeviceMesh gives each a group."""
    args, n = run.args, run.args.shard_size
    mesh = run.mesh(replicate=run.world // n, shard=n) if run.world > n else run.mesh(shard=n)
    model = run.draw(group_blocks(gpt(args.model, seed=None), args.blocks_per_unit))
    common.recompute(model, args.recompute)             # in a unit's backward, while it is gathered
    units = make_units(model, partial(Unit, group=mesh["shard"].get_group()))
    optimizer = make_optimizer(run, units)
    step = partial(zero1_step, stage=STAGES[args.variant])
    if STAGES[args.variant] == 3:
        step = partial(zero3_step, ahead=args.prefetch, keep_gathered=args.keep_gathered,
                       replicas=mesh["replicate"].get_group() if run.world > n else None)
        keep_only_shards(units)
    take_steps(run, partial(step, model, units, optimizer), model, units)


def train_zeropp(run):
    args, group = run.args, run.mesh(shard=run.world).get_group()
    node = dist.new_subgroups(args.shard_size)[0] if args.secondary_shard else None
    model = run.draw(group_blocks(gpt(args.model, seed=None), args.blocks_per_unit))
    common.recompute(model, args.recompute)
    units = make_units(model, partial(ZeroPlusPlusUnit, group=group, node=node,
                                      quantized=args.quantized_weights))
    step = partial(zero3_step, model, units, make_optimizer(run, units), ahead=args.prefetch)
    keep_only_shards(units)
    take_steps(run, step, model, units)


def torch_step(model, optimizer, micro_batches, valid, clip, no_sync=contextlib.nullcontext):
    """The same through PyTorch, which averages over ranks: hence the factor. no_sync: DDP's, for
    all backwards but the last. (fully_shard reduces in every one.)"""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        with contextlib.nullcontext() if i == len(micro_batches) else no_sync():
            loss = loss_sum(model(tokens), targets) / valid
            (dist.get_world_size() * loss).backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train_torch(run):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    args, mesh = run.args, run.mesh(shard=run.world)
    model = run.draw(group_blocks(gpt(args.model, seed=None), args.blocks_per_unit))
    common.recompute(model, args.recompute)
    rounded = common.rounded(args)                              # parameters stay in run.dtype
    if args.stage == 1:
        autocast = torch.autocast(run.device.type, rounded, enabled=rounded != run.dtype)
        model.forward = autocast(model.forward)
        ddp = DistributedDataParallel(model, device_mesh=mesh, gradient_as_bucket_view=True)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), run.optimizer, mesh.get_group())
        step = partial(torch_step, ddp, optimizer, no_sync=ddp.no_sync)
        return take_steps(run, step, ddp)
    names = [p.global_name for p in model.parameters()]
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=args.stage == 3,
                    mp_policy=MixedPrecisionPolicy(rounded, reduce_dtype=run.dtype))
        unit.set_force_sum_reduction_for_comms(True)            # gloo has no average
    for p, name in zip(model.parameters(), names):              # DTensors by now
        p.global_name, p.cuts = name, ()
    take_steps(run, partial(torch_step, model, run.optimizer(model.parameters())), model)


def formulas(args, rank, ranks, model):
    if args.variant == "torch":
        return {}
    cfg, stage, k = args.model, STAGES[args.variant], args.blocks_per_unit
    p, g = widths = common.rounded(args).itemsize, common.DTYPES[args.dtype].itemsize
    n = ranks if args.variant == "zeropp" else args.shard_size
    m = args.batch // args.shares // args.micro_batch
    sent = traffic(cfg, stage, n, m, widths, args.keep_gathered, ranks // n, k)
    answer = {"zero": stage, "holders": n, "blocks": k, "sent": sent, "kept": {"outside": 1}}
    in_backward = p + g if stage == 3 and not args.keep_gathered else g
    tokens = args.micro_batch * cfg.seq
    answer["overlap"] = {
        "all_gather": lambda *rates: tokens_to_hide(p, 1, n, *rates) / tokens,
        "reduce_scatter": lambda *rates: tokens_to_hide(in_backward, 2, n, *rates) / tokens}
    answer["machines"] = {
        "tokens of a micro-batch that hide in forward what 8 ranks send of bf16 parameters":
            lambda *rates: tokens_to_hide(2, 1, 8, *rates),
        "in backward, with fp32 gradients, in stage 3":
            lambda *rates: tokens_to_hide(2 + 4, 2, 8, *rates)}
    if args.variant == "zeropp":
        node = args.shard_size if args.secondary_shard else None
        less = zeropp_traffic(cfg, n, m, widths, node, args.quantized_weights, k)
        answer |= {"secondary": node, "sent": less, "beside": ("zero3", sent)}
    return answer


def requires(args, ranks):
    common.split_batch(args, ranks)
    whole = args.variant in ("zero1", "zero2") or args.variant == "torch" and args.stage == 1
    if args.model.tie and not whole:
        raise Refused(f"--preset {args.preset} ties embedding and head, which --variant "
                      f"{args.variant} keeps in two units", "--preset tiny")
    k, most = args.blocks_per_unit, 1 if whole and args.variant == "torch" else args.model.layers
    if k > most:                                        # DDP has buckets in place of units
        raise Refused(f"--blocks-per-unit {k}: a unit has {most} here", f"--blocks-per-unit {most}")
    in_groups = args.variant in ("hsdp", "zeropp")
    local = common.environment("LOCAL_WORLD_SIZE", ranks) if in_groups else ranks
    args.shard_size = args.shard_size or local
    if ranks % args.shard_size:
        raise Refused(f"--shard-size {args.shard_size} does not divide {ranks} ranks",
                      f"--shard-size {math.gcd(ranks, args.shard_size)}")


def flags(parser):
    add = parser.add_argument
    add("--blocks-per-unit", type=int, default=1, help="blocks that are gathered together")
    add("--prefetch", type=int, default=1, help="units to gather ahead of the one that computes")
    add("--keep-gathered", action="store_true", help="keep parameters from forward to backward")
    add("--shard-size", type=int, help="ranks of hsdp's or zeropp's groups; default: a machine's")
    add("--offload", action="store_true", help="keep masters and states on the CPU, update there")
    for idea in IDEAS:
        add(idea, action=argparse.BooleanOptionalAction, default=True, help="an idea of ZeRO++")
    add("--stage", type=int, default=3, help="of torch; its 2 is zero3 --keep-gathered")


IDEAS = ("--quantized-weights", "--secondary-shard")
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3, "zeropp": 3}
VARIANTS = {
    "zero3": (train, "--prefetch", "--keep-gathered", "--offload"),
    **dict.fromkeys(("zero1", "zero2"), (train, "--offload")),
    "hsdp": (train, "--prefetch", "--keep-gathered", "--shard-size", "--offload"),
    "zeropp": (train_zeropp, "--prefetch", "--shard-size", *IDEAS, "--offload"),
    "torch": (train_torch, "--stage"),
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
