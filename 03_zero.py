r"""03 · ZeRO: data parallelism in which no rank holds what another one has.

In chapter 02 every rank keeps all parameters, gradients and optimizer states; only the batch is
cut. But a rank that updates 1/N of the parameters needs only the optimizer states of that part, and
its summed gradient. And of the parameters it needs, at any moment, only those of the module that
computes. ZeRO cuts these three, and each cut is a stage:

    bytes per rank      parameters     gradients      optimizer states
    02 data parallel       P              G               O
    zero1                  P              G               O / N
    zero2                  P              G / N           O / N        and a unit's full gradient
    zero3                  P / N          G / N           O / N        and the units gathered by now

With Ψ parameters in fp32 under AdamW, P + G + O is 4Ψ + 4Ψ + 8Ψ. With --precision bf16 it is
2Ψ + 2Ψ + 12Ψ: chapter 01's fp32 master weights count as optimizer states, and are cut with them.
--reduce-fp32 sends and sums the gradients in fp32 (4Ψ/N). --offload keeps O on the CPU, with master
weights in any case (4Ψ/N), and updates there: the gradient's shard is copied to the CPU (4Ψ/N), and
the updated shard comes back.

Cutting is cheap, because an all_reduce is two steps already: a reduce_scatter, after which each
rank has the sum of 1/N of the gradient, and an all_gather, after which every rank has all of it.
ZeRO puts the update in between, and gathers parameters in place of gradients:

    02       backward | all_reduce gradients                      | update all of it
    zero1    backward | reduce_scatter gradients | update 1/N     | all_gather parameters
    zero2    backward, reduce_scatter unit by unit  | update 1/N  | all_gather parameters
    zero3    gather U1 | forward U1 | free U1, gather U2 | ... | forward Un | free Un
             gather Un | backward Un | free Un, reduce_scatter Un | ... | backward U1 | update 1/N

A unit is a module whose parameters are gathered together: here the embedding, each block, and the
head. They lie one after the other in a flat tensor, padded to a multiple of N, and each rank keeps
one of N equal shards of it. A shard may begin in the middle of a parameter. The optimizer does not
notice, since it treats every number by itself. Our model is a list, so `train_step` walks it, unit
by unit. PyTorch's FSDP (`--variant torch`) does the same for any module, in hooks on each unit. One
gathers before its forward, and one frees after it. When the gradient of its output is there, which
is just before its backward, one gathers again. When those of its parameters are there, the last one
frees and reduces.

What a rank sends in a step (Ψ' is Ψ with padding, in bytes; M micro-batches; all times (N-1)/N)

    zero1                      2 Ψ'          as much as the all_reduce of chapter 02
    zero2                      (M + 1) Ψ'    after every backward: the full gradient is not kept
    zero3                      3 M Ψ'        gathered for forward, and again for backward
    zero3 --keep-gathered      2 M Ψ'        kept from forward to backward, for more memory
    hsdp      as zero3 in groups of --shard-size ranks; across them, an all_reduce of shards a step
    zeropp    as zero3, but forward's gather and the gradients' reduction send a byte a number, and
              backward's gather stays inside a node

ZeRO++ (zeropp) makes stage 3 send less, by three ideas with a switch each. Quantized weights:
forward gathers parameters as int8, with a scale for every block of 256 numbers. Secondary shards:
what it has gathered is kept, spread over the --shard-size ranks of a node (P / shard size more
bytes), and backward gathers it from there. Quantized gradients: in an all_to_all, every rank gets
the N versions of its shard as int8, and sums them in full precision; a ring would round the sums at
every hop. The first and the last change the numbers, so of such a run only the loss (over 50 steps)
and the first gradient norm are compared with one GPU's. They may be off by 1% and 5%.

When it pays: stage 1 sends no more than chapter 02 does, so it always pays. Stage 3 sends more, but
prefetching (--prefetch) hides the gathers, for more memory: while a unit computes, those of the
next ones are under way. (Not zeropp's inside a node, which are short.) A backward has as much to
hide as in chapter 02, a gather and a reduce_scatter. A forward has half of that to hide, a gather,
and computes half as much. So chapter 02's condition holds for both, and now for every micro-batch,
not only the last: stage 3 wants large ones. A model that fits at stage 1 or 2 should stay there.
(This file draws the whole model on every rank before it cuts it. A model that fits on none must be
drawn and cut one unit at a time.)

Run it:
    torchrun --nproc_per_node=4 03_zero.py
    torchrun --nproc_per_node=4 03_zero.py --variant zero2 --precision bf16 --reduce-fp32 --offload
    torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4 --keep-gathered
    torchrun --nproc_per_node=8 03_zero.py --variant zeropp --steps 50 --no-quantized-gradients
    torchrun --nproc_per_node=4 03_zero.py --variant torch --stage 2

Sources: Rajbhandari et al., ZeRO (2020), sections 5 and 7; Wang et al., ZeRO++ (2023), section 3
(qwZ, hpZ, qgZ); Ren et al., ZeRO-Offload (2021); Zhao et al., PyTorch FSDP (2023), sections 3 and
4; Ultra-Scale Playbook, "Zero Redundancy Optimizer"; How To Scale Your Model, part 5, "FSDP".
"""

import argparse
import functools
import inspect
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Cut, Refused, gpt, grad_norm, loss_sum, part

# -------------------------------------------------------------------------------- units of a model

class Unit:
    """Parameters of one dtype as one flat tensor, of which each rank of `group` keeps one shard.

    full: (N·k,), of which every parameter is a view, with zeros at its end as padding. shard: (k,),
    this rank's part of it. master: (k,), what is updated: the shard, unless that is rounded to
    `dtype` or updated on the CPU (offload), where its gradient has `room`. grad: (k,), this rank's
    part of the summed gradient, in `sum_dtype`. Since a unit has `grad` and `cuts`, as a parameter
    that was cut has, grad_norm and clip_grads_with_norm_ take it for one.
    """

    def __init__(self, parameters, group, dtype=None, sum_dtype=None, offload=False):
        assert len({p.dtype for p in parameters}) == 1, "a unit needs parameters of one dtype"
        self.parameters, self.group = parameters, group
        self.padding = -sum(p.numel() for p in parameters) % group.size()
        self.cuts = (Cut(0, group.rank(), group.size(), group),)
        self.all_gather, self.reduce_scatter = common.all_gather, common.reduce_scatter
        self.grad = self.room = self.gathering = None
        self.node = self.secondary = None               # of ZeRO++

        exact = self.flatten([p.detach() for p in parameters])      # not rounded
        self.full = exact.to(dtype or exact.dtype)
        self.sum_dtype = sum_dtype or self.full.dtype
        for p, view in zip(parameters, self.views(self.full)):
            p.data = view
        self.shard = self.master = nn.Parameter(part(self.full, self.cuts))
        if dtype or offload:
            master = part(exact, self.cuts).to("cpu" if offload else exact.device, copy=True)
            if exact.device != master.device:
                master = master.pin_memory()            # the host need not wait for its copies
            self.master = nn.Parameter(master)
            self.room = torch.empty_like(master, pin_memory=master.is_pinned()) if offload else None
        self.master.flat = parameters, group.rank() * len(self.master)      # for a checkpoint

    def flatten(self, tensors):
        """A new tensor, (N·k,), of tensors in the shapes of the parameters."""
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(self.padding)])

    def views(self, flat):
        """The reverse: views into a flat tensor in the shapes of the parameters."""
        flats = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [flat.view(p.shape) for flat, p in zip(flats, self.parameters)]

    def start_gather(self, backward=False):
        """Start to gather N·k numbers into new memory: from the shards or (ZeRO++), for a backward,
        from the secondary ones, of which the ranks of `node` have all between them."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        if backward and self.node:
            self.gathering = common.all_gather(self.full, self.secondary, self.node, async_op=True)
        else:
            self.gathering = self.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None
            if self.node:                               # after backward's gather: the same again
                self.secondary.copy_(self.full.chunk(self.node.size())[self.node.rank()])

    def gathered_bytes(self):
        return self.full.untyped_storage().nbytes()

    def free(self):
        """Give back the memory of `full`, and keep the tensor: autograd has saved views of it for
        backward (a linear needs its weight there), which will show what the next gather brings."""
        self.full.untyped_storage().resize_(0)

    def start_reduce(self):
        """Start to reduce_scatter the gradients, N·k numbers, and let go of the parameters' own."""
        self.sent = self.flatten([p.grad for p in self.parameters]).to(self.sum_dtype)
        self.summed = self.sent.new_empty(self.shard.shape)
        self.reducing = self.reduce_scatter(self.summed, self.sent, group=self.group, async_op=True)
        for p in self.parameters:
            p.grad = None

    def finish_reduce(self):
        """Add the sum to that of the micro-batches before."""
        self.reducing.wait()
        self.grad = self.summed if self.grad is None else self.grad.add_(self.summed)
        self.reducing = self.sent = self.summed = None  # all of them had to live until now


def own_parameters(model):
    """The parameters of each module of the list; what two of them share belongs to the first."""
    own = {}
    for name, p in model.named_parameters():            # each parameter once
        if p.requires_grad:
            own.setdefault(name.split(".")[0], []).append(p)
    return list(own.values())


class Zero:
    """A list of modules in stage 1, 2 or 3: its units, and an optimizer of their masters, one that
    treats each number by itself. replicas: the ranks that hold the same shard (hybrid sharding).
    prefetch: units to gather ahead of the one that computes. keep_gathered: from forward to
    backward. options: of a Unit."""

    def __init__(self, model, make_optimizer, group, stage, replicas=None, prefetch=0,
                 keep_gathered=False, **options):
        self.units = [Unit(parameters, group, **options) for parameters in own_parameters(model)]
        self.optimizer = make_optimizer([unit.master for unit in self.units])
        self.group, self.stage, self.replicas = group, stage, replicas
        self.prefetch, self.keep_gathered = prefetch, keep_gathered
        for unit in self.units if stage == 3 else []:
            unit.shard.data = unit.shard.data.clone()           # until now a part of `full`
            unit.free()

    def gather(self, units, backward=False):
        """Wait for the first of these units; the gathers of the others have then started."""
        for unit in units:
            if not unit.gathered_bytes():
                unit.start_gather(backward)
        units[0].finish_gather()

    def update(self):
        """Update masters, and from them shards. Stages 1 and 2 keep all parameters gathered, so
        there an all_gather per unit follows."""
        for unit in self.units:
            grad = unit.grad if unit.room is None else unit.room.copy_(unit.grad, non_blocking=True)
            unit.master.grad = grad.to(unit.master)     # that very tensor, if both are alike
        if self.units[0].master.device != self.units[0].shard.device:
            torch.cuda.synchronize()                    # once: the gradients of all units are there
        self.optimizer.step()
        for unit in self.units:
            unit.master.grad = unit.room                # None, but for the CPU's
            if unit.master is not unit.shard:           # rounded, or back from the CPU
                unit.shard.data.copy_(unit.master.data, non_blocking=True)
            if unit.gathered_bytes():
                common.all_gather(unit.full, unit.shard.data, unit.group)


# ---------------------------------------------------------------------------------------- stage 1

def reduce_gradients(units):
    """One reduce_scatter per unit. Its gradients are first copied into one flat tensor, where they
    stay, and where the sum takes the place of this rank's own."""
    for unit in units:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in unit.parameters]
        flat = unit.flatten(grads)                      # and zero for those that were not used
        for p, view in zip(unit.parameters, unit.views(flat)):
            p.grad = view
        sent = flat.to(unit.sum_dtype)                  # flat itself, but for --reduce-fp32
        unit.grad = part(sent, unit.cuts)
        common.reduce_scatter(unit.grad, sent, group=unit.group)
        if sent is not flat:
            unit.grad = unit.grad.clone()               # so that the rest of `sent` can go


def zero1_step(model, zero, micro_batches, valid, clip):
    """One step of stage 1 on this rank's micro-batches. Returns its part of the loss, and the norm.
    valid: the valid targets of the whole global batch. Communication: see `traffic`."""
    model.zero_grad()
    for unit in zero.units:
        unit.grad = None
    total = 0
    for tokens, targets in micro_batches:               # (micro_batch, seq) each
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    reduce_gradients(zero.units)

    norm = grad_norm(zero.units, zero.group)
    if clip:
        clip_grads_with_norm_(zero.units, clip, norm)
    zero.update()
    return total, norm


# --------------------------------------------------------------------------------- stages 2 and 3

def train_step(model, zero, micro_batches, valid, clip):
    """The same for stages 2 and 3. In stage 2 nothing is freed, so there is nothing to gather.

    Every module reads a detached input. So it has an autograd graph of its own, and its backward,
    from its output to its input, is ours to call.
    """
    units, at_once = zero.units, 1 + zero.prefetch
    for unit in units:
        unit.grad = None
    total = 0
    for tokens, targets in micro_batches:
        out, graphs = tokens, []
        for i, unit in enumerate(units):
            zero.gather(units[i:i + at_once])           # the next ones start before this computes
            x = out.detach().requires_grad_(i > 0)      # tokens, the first input, have no gradient
            out = model[i](x)                           # (micro_batch, seq, dim); logits at the end
            graphs.append((x, out))
            if zero.stage == 3 and not zero.keep_gathered:
                unit.free()

        logits = out.detach().requires_grad_()          # (micro_batch, seq, vocab)
        loss = loss_sum(logits, targets) / valid
        loss.backward()
        total += loss.detach()

        grad = logits.grad                              # of the output of the unit that comes next
        for i in reversed(range(len(units))):
            ahead = 1 if units[i].node else at_once     # inside a node: see below
            zero.gather(units[i::-1][:ahead], backward=True)            # towards the first unit
            x, out = graphs.pop()
            torch.autograd.backward(out, grad)
            grad = x.grad
            if zero.stage == 3:
                units[i].free()
            if i + 1 < len(units):
                units[i + 1].finish_reduce()            # it was sent during this unit's backward
            if i and units[i].node:
                # Collectives of two groups at once can deadlock GPUs that start them in different
                # orders. So the gather in the node comes first, and ends before the reduce starts.
                zero.gather([units[i - 1]], backward=True)
            units[i].start_reduce()
        units[0].finish_reduce()

    if zero.replicas:
        for unit in units:                              # once a step, and only the shards
            dist.all_reduce(unit.grad, group=zero.replicas)
    norm = grad_norm(units, zero.group)
    if clip:
        clip_grads_with_norm_(units, clip, norm)
    zero.update()
    return total, norm


# ----------------------------------------------------------------------------------------- ZeRO++

BLOCK = 256             # numbers that share a scale


def quantize(x):
    """(..., k) to int8 (..., k), and a float32 scale per block: its largest magnitude is 127."""
    padding = -x.shape[-1] % BLOCK
    blocks = F.pad(x.float(), (0, padding)).unflatten(-1, (-1, BLOCK))          # (..., blocks, 256)
    scales = (blocks.abs().amax(-1) / 127).clamp(min=1e-30)                     # (..., blocks)
    numbers = (blocks / scales[..., None]).round().to(torch.int8)
    return numbers.flatten(-2)[..., :x.shape[-1]].contiguous(), scales


def dequantize(numbers, scales):
    return numbers * scales.repeat_interleave(BLOCK, -1)[..., :numbers.shape[-1]]


class Quantized:
    """Starts a collective that sends x, rows of k numbers, as int8 and scales. What comes is a row
    from each rank, (N, k); wait() puts combine(rows) into `out`."""

    def __init__(self, collective, combine, out, x, group, async_op):
        self.combine, self.out = combine, out
        k = min(len(x), len(out))                       # a shard; the other is N·k
        self.sent = quantize(x.view(-1, k))             # it must live until wait()
        self.received = [y.new_empty(group.size(), y.shape[-1]) for y in self.sent]
        self.handles = [collective(rows, y, group=group, async_op=async_op)
                        for rows, y in zip(self.received, self.sent)]

    def wait(self):
        for handle in self.handles:
            handle.wait()
        self.out.copy_(self.combine(dequantize(*self.received)))


quantized_all_gather = functools.partial(Quantized, common.all_gather, torch.flatten)
quantized_reduce_scatter = functools.partial(
    Quantized, dist.all_to_all_single, functools.partial(torch.sum, dim=0))


# ------------------------------------------------------------------------------------ the formulas

def widths(args):
    """Bytes of a number: of parameters, and of their summed gradients."""
    if args.precision == "bf16":
        return 2, 4 if args.reduce_fp32 else 2
    return (common.DTYPES[args.dtype].itemsize,) * 2


def padded_sizes(cfg, n):
    """The numbers in each unit (embedding, blocks, head), with the padding for n shards."""
    table = cfg.vocab * cfg.dim
    head = 2 * cfg.dim + (0 if cfg.tie else table)
    block = (cfg.parameters() - table - head) // cfg.layers
    return [-(-size // n) * n for size in (table, *[block] * cfg.layers, head)]


def traffic(cfg, stage, n, micro_batches, widths=(4, 4), keep_gathered=False, replicas=1):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}. n: ranks of a group,
    which share one model, and sum one number for the norm. replicas: the number of groups."""
    units, share = padded_sizes(cfg, n), (n - 1) / n
    width, sum_width = widths
    reduces = 1 if stage == 1 else micro_batches
    gathers = micro_batches * (1 if keep_gathered else 2) if stage == 3 else 1
    reduced, gathered = reduces * sum_width * sum(units), gathers * width * sum(units)
    norm = max(sum_width, 4) if n > 1 else 0                        # in float32 or better
    shards = sum_width * sum(units) // n if replicas > 1 else 0     # gradients, across groups
    calls = (n > 1) + len(units) * (replicas > 1)
    wire = 2 * share * norm + 2 * (replicas - 1) / replicas * shards
    return {"reduce_scatter": (len(units) * reduces, reduced, share * reduced),
            "all_gather": (len(units) * gathers, gathered, share * gathered),
            "all_reduce": (calls, norm + shards, wire)}


def zeropp_traffic(cfg, n, micro_batches, widths, node, weights, gradients):
    """The same for ZeRO++. node: its number of ranks if there are secondary shards, else None.
    weights, gradients: whether they are sent in a byte each, and 4 for the scale of a block."""
    sent = traffic(cfg, 3, n, micro_batches, widths)
    units, share = padded_sizes(cfg, n), (n - 1) / n
    plain = widths[0] * sum(units)
    quantized = sum(unit + 4 * n * -(-unit // n // BLOCK) for unit in units)
    int8 = 2 * len(units), quantized, share * quantized
    forward = int8 if weights else (len(units), plain, share * plain)
    backward = (len(units), plain, (node - 1) / node * plain) if node else forward
    sent["all_gather"] = [micro_batches * (x + y) for x, y in zip(forward, backward)]
    if gradients:
        del sent["reduce_scatter"]
        sent["all_to_all"] = [micro_batches * x for x in int8]
    return sent


def gathered_peak(cfg, n, prefetch, keep_gathered, width=4):
    """The most bytes of gathered parameters at a time in stage 3: a unit's and the next ones'."""
    units = padded_sizes(cfg, n)
    at_once = len(units) if keep_gathered else prefetch + 1
    return width * max(sum(units[i:i + at_once]) for i in range(len(units)))


# ----------------------------------------------------------------------------------------- the run

def take_steps(run, step, model, zero, units=None):
    for batch in run.batches(share=run.rank):           # 1/N of the sequences
        with run.measure():
            loss, norm = step(model, zero, batch.micro_batches, batch.valid, run.args.clip)
        dist.all_reduce(loss)                           # for the report, which shows the whole loss
        run.log(batch, loss, norm, model, units)


def unit_options(args):
    """What --precision, --reduce-fp32 and --offload make of a Unit."""
    return {"dtype": torch.bfloat16 if args.precision == "bf16" else None, "offload": args.offload,
            "sum_dtype": torch.float32 if args.reduce_fp32 else None}


def train(run):
    """zero1, zero2, zero3, and hsdp, of which only the last has groups of --shard-size ranks."""
    args, n, stage = run.args, run.args.shard_size, STAGES[run.args.variant]
    mesh = run.mesh(replicate=run.world // n, shard=n) if run.world > n else run.mesh(shard=n)
    replicas = mesh["replicate"].get_group() if run.world > n else None
    model = run.draw(gpt(args.model, seed=None))
    zero = Zero(model, run.optimizer, mesh["shard"].get_group(), stage, replicas, args.prefetch,
                args.keep_gathered, **unit_options(args))
    take_steps(run, zero1_step if stage == 1 else train_step, model, zero, zero.units)


def train_zeropp(run):
    args, group = run.args, run.mesh(shard=run.world).get_group()
    node = dist.new_subgroups(args.shard_size)[0] if args.secondary_shard else None
    model = run.draw(gpt(args.model, seed=None))
    zero = Zero(model, run.optimizer, group, 3, None, args.prefetch, **unit_options(args))
    for unit in zero.units:
        if args.quantized_weights:
            unit.all_gather = quantized_all_gather
        if args.quantized_gradients:
            unit.reduce_scatter = quantized_reduce_scatter
        if node:
            unit.node, unit.secondary = node, unit.full.new_empty(unit.full.numel() // node.size())
    take_steps(run, train_step, model, zero, zero.units)


def torch_step(model, optimizer, micro_batches, valid, clip):
    """The same through PyTorch, which averages over ranks: hence the factor."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        # What DDP's no_sync() sets: only the last backward sends. (fully_shard does in every one.)
        model.require_backward_grad_sync = i == len(micro_batches)
        loss = loss_sum(model(tokens), targets) / valid
        (dist.get_world_size() * loss).backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train_torch(run):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    args, mesh = run.args, run.mesh(shard=run.world)
    group, model = mesh.get_group(), run.draw(gpt(args.model, seed=None))
    if args.stage == 1:
        # Buffers need not be sent, as in chapter 02. (torch 2.13 has renamed the argument.)
        renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        no_buffers = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
        replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True,
                                          **no_buffers)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), run.optimizer, group)
        return take_steps(run, torch_step, replica, optimizer)
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=args.stage == 3)
        unit.set_force_sum_reduction_for_comms(True)            # gloo has no average
    common.name_parameters(model)                               # DTensors by now
    take_steps(run, torch_step, model, run.optimizer(model.parameters()))


def formulas(args, rank, ranks, model):
    if args.variant == "torch":
        return {}
    cfg, stage, width = args.model, STAGES[args.variant], widths(args)
    n = ranks if args.variant == "zeropp" else args.shard_size
    m = args.batch // args.shares // args.micro_batch
    sent = traffic(cfg, stage, n, m, width, args.keep_gathered, ranks // n)
    answer = {"zero": stage, "holders": n, "sent": sent}
    if stage == 3:
        answer["gathered"] = gathered_peak(cfg, n, args.prefetch, args.keep_gathered, width[0])
    if args.variant == "zeropp":
        node = args.shard_size if args.secondary_shard else None
        less = zeropp_traffic(cfg, n, m, width, node, args.quantized_weights,
                              args.quantized_gradients)
        answer |= {"secondary": node, "sent": less, "beside": ("zero3", sent)}
    return answer


def requires(args, ranks):
    common.split_batch(args, ranks)
    if args.reduce_fp32 and args.precision != "bf16":
        raise Refused("--reduce-fp32 is for 16-bit gradients", "--precision bf16")
    if args.precision == "bf16" and args.dtype != "float32":
        raise Refused(f"--precision bf16 rounds float32, and --dtype is {args.dtype}",
                      "--dtype float32")
    whole = args.variant in ("zero1", "zero2") or args.variant == "torch" and args.stage == 1
    if args.model.tie and not whole:
        raise Refused(f"--preset {args.preset} ties embedding and head, which --variant "
                      f"{args.variant} keeps in two units", "--variant zero2")
    groups = 2 if args.variant in ("hsdp", "zeropp") and ranks % 2 == 0 else 1
    size = args.shard_size = args.shard_size or ranks // groups
    if ranks % size:
        raise Refused(f"--shard-size {size} does not divide {ranks} ranks",
                      f"--shard-size {math.gcd(ranks, size)}")


def flags(parser):
    add = parser.add_argument
    add("--prefetch", type=int, default=1, help="units to gather ahead of the one that computes")
    add("--keep-gathered", action="store_true", help="keep parameters from forward to backward")
    add("--shard-size", type=int, help="ranks that share a copy, or a secondary one; default: half")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: with fp32 masters")
    add("--reduce-fp32", action="store_true", help="send and sum the gradients of bf16 in fp32")
    add("--offload", action="store_true", help="keep masters and states on the CPU, update there")
    for idea in IDEAS:
        add(idea, action=argparse.BooleanOptionalAction, default=True, help="an idea of ZeRO++")
    add("--stage", type=int, default=3, help="of torch")


BY_HAND = ("--precision", "--reduce-fp32", "--offload")
IDEAS = ("--quantized-weights", "--secondary-shard", "--quantized-gradients")
STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3, "zeropp": 3}
VARIANTS = {
    "zero3": (train, "--prefetch", "--keep-gathered", *BY_HAND),
    "zero1": (train, *BY_HAND),
    "zero2": (train, *BY_HAND),
    "hsdp": (train, "--prefetch", "--keep-gathered", "--shard-size", *BY_HAND),
    "zeropp": (train_zeropp, "--prefetch", "--shard-size", *IDEAS, *BY_HAND),
    "torch": (train_torch, "--stage"),
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
