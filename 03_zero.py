r"""03 · ZeRO: data parallelism in which no rank holds what another one has.

Chapter 02 keeps N copies of everything: parameters, gradients, optimizer states. Only the batch was
cut. But a rank that updates 1/N of the parameters needs no optimizer states of others; then it
needs only that part of the summed gradient; and of the parameters it needs no more than those of
the module that computes right now. ZeRO cuts the three, and each cut is a stage:

    bytes per rank      parameters     gradients      optimizer states
    02 data parallel       P              G               O
    zero1                  P              G               O / N
    zero2                  P              G / N           O / N        and a unit's being reduced
    zero3                  P / N          G / N           O / N        and what is gathered by now

    with P + G + O = 4Ψ + 4Ψ + 8Ψ for Ψ parameters in fp32 under AdamW. With --precision bf16 it is
    2Ψ + 2Ψ + kΨ, k = 12: the fp32 master weights of chapter 01 are optimizer states, and cut too.
    --reduce-fp32 sends and sums gradients in fp32 (4Ψ/N). --offload keeps O on the CPU, and updates
    there: the gradient's shard goes to the CPU and the updated shard comes back.

What makes it cheap: an all_reduce IS a reduce_scatter, after which each rank has the sum of 1/N of
the gradient, and an all_gather, after which all have all of it. ZeRO puts the update in between:

    02       backward | all_reduce gradients                      | update all of it
    zero1    backward | reduce_scatter gradients | update 1/N     | all_gather parameters
    zero2    backward, reduce_scatter unit by unit  | update 1/N  | all_gather parameters
    zero3    gather U1 | forward U1 | free U1, gather U2 | ... | forward Un | free Un
             gather Un | backward Un | free Un, reduce_scatter Un | ... | backward U1 | update 1/N

A unit is a module whose parameters move together: here the embedding, each block, and the head. Its
parameters live in one flat tensor, padded to a multiple of N, of which each rank keeps one shard:
a parameter may end in the middle of it. The optimizer sees the shards alone and does not notice,
since AdamW, SGD and momentum treat every number by itself.

What a rank sends in a step (Ψ' = Ψ with padding, in bytes; M micro-batches; times (N-1)/N)

    zero1                      2 Ψ'          as much as the all_reduce of chapter 02
    zero2                      (M + 1) Ψ'    every micro-batch is reduced: its gradient has no place
    zero3                      3 M Ψ'        gathered for forward and for backward
    zero3 --keep-gathered      2 M Ψ'        kept from forward to backward, for more memory
    hsdp                       as zero3 within a group of --shard-size ranks; across the groups, one
                               all_reduce of the gradient's shards a step
    zeropp                     as zero3, with a byte for each number of the forward's gather and of
                               the gradient; the backward's gather stays inside a node

ZeRO++ (zeropp) makes stage 3 send less, by three ideas with a switch each. Parameters are gathered
as int8, with a scale for every block of 256. Each rank keeps a second, larger shard of what the
forward gathered, the node's --shard-size ranks a whole copy between them, and backward gathers from
those. And gradients travel as int8, once: an all_to_all brings every rank the N versions of its
shard, and the sum is made in full precision, since sums of int8 would be rounded at every hop. The
first and the last change the numbers, so such a run is compared with one GPU by its loss, over 50
steps, and its first gradient norm: they may be off by 1% and 5%. Single tensors are not compared: a
small gradient that shares a block with a large one has the large one's scale.

Prefetching (--prefetch) hides the gathers: while a unit computes, the next ones are on their way,
at the price of their memory. Small models on fast networks should stay at stage 1 or 2, and small
micro-batches hurt stage 3 most: it sends half of an all_reduce behind each forward, which computes
half as much as a backward, so chapter 02's condition holds for both, but every micro-batch must
meet it and not just the last. (This file draws the whole model on every rank before it cuts it, for
the sake of the reader; a model that does not fit needs one unit drawn and cut at a time.)

Run it:
    torchrun --nproc_per_node=4 03_zero.py
    torchrun --nproc_per_node=4 03_zero.py --variant zero2 --micro-batch 1
    torchrun --nproc_per_node=4 03_zero.py --prefetch 0 --keep-gathered
    torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4
    torchrun --nproc_per_node=8 03_zero.py --variant zeropp --steps 50 --no-quantized-gradients
    torchrun --nproc_per_node=4 03_zero.py --precision bf16 --reduce-fp32 --offload
    torchrun --nproc_per_node=4 03_zero.py --variant torch --stage 2

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), sections 5 and 7; Wang et al., ZeRO++ (2023), section 3; Ren et al., ZeRO-Offload (2021);
Zhao et al., PyTorch FSDP (2023), sections 3 and 4; Ultra-Scale Playbook, "Zero Redundancy
Optimizer"; How To Scale Your Model, part 5, "Fully-Sharded Data Parallelism".
"""

import argparse
import functools
import gc
import inspect
import math
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import common
from common import gpt, loss_sum, nbytes, quantity

# --------------------------------------------------------------------------------------- one unit


class Unit:
    """Parameters of one dtype as one flat tensor, of which each rank of `group` keeps one shard.

    full: (N·k,) with zeros at its end as padding; every parameter becomes a view into it. shard:
    (k,), this rank's part. gradient: (k,), this rank's part of the gradient's sum, or None. dtype:
    what the parameters are rounded to, if not None; `exact` is the shard before that. sum_dtype: in
    which the gradients are sent and added up. Parameters must be the same on all ranks. Raises
    ValueError if they are of different dtypes.
    """

    def __init__(self, parameters, group, dtype=None, sum_dtype=None):
        self.parameters, self.group = list(parameters), group
        dtypes = {str(p.dtype) for p in self.parameters}
        if len(dtypes) != 1:
            raise ValueError(f"a unit needs parameters of one dtype, and has {sorted(dtypes)}")
        size, n, rank = sum(p.numel() for p in self.parameters), group.size(), group.rank()
        k = -(-size // n)
        self.mine, self.padding = slice(rank * k, (rank + 1) * k), n * k - size
        exact = self.parameters[0].new_zeros(n * k)
        for p, view in zip(self.parameters, self.views(exact)):
            view.copy_(p.data)
        self.full = exact.to(dtype or exact.dtype)
        for p, view in zip(self.parameters, self.views(self.full)):
            p.data = view
        self.full_bytes, self.sum_dtype = self.full.nbytes, sum_dtype or self.full.dtype
        self.shard = nn.Parameter(self.full[self.mine])
        self.exact = exact[self.mine].clone() if dtype else None
        self.gradient = self.gathering = self.reducing = None       # the latter: on their way
        self.secondary = None                                       # for ZeRO++

    def views(self, flat):
        """The parts of a flat tensor in the shapes of the parameters."""
        parts = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [part.view(p.shape) for p, part in zip(self.parameters, parts)]

    # Parameters are gathered from the shards, and freed. What autograd saved of them is a view into
    # `full`, so that stays one tensor, and only its storage comes and goes.

    def start_gather(self, backward=False):
        """Start to all_gather N·k numbers, for the forward or the backward."""
        self.full.untyped_storage().resize_(self.full_bytes)
        self.gathering = common.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        self.finish_gather()                            # or it would write to what is gone
        self.full.untyped_storage().resize_(0)

    def gathered_bytes(self):
        return self.full.untyped_storage().nbytes()

    # Gradients are summed over the ranks, and each keeps its part of the sum.

    def start_reduce(self, flat, in_place=False):
        """Start to reduce_scatter the N·k numbers of `flat`, in place or to k others."""
        sent = flat.to(self.sum_dtype)
        in_place = in_place and sent is flat
        summed = sent[self.mine] if in_place else sent.new_empty(self.shard.shape)
        handle = common.reduce_scatter(summed, sent, group=self.group, async_op=True)
        self.reducing = handle, summed, sent            # which must live until it has been sent

    def finish_reduce(self):
        """Add the sum to this rank's part of the gradient, and let go of the full one."""
        handle, summed, _ = self.reducing
        handle.wait()
        self.gradient = summed if self.gradient is None else self.gradient.add_(summed)
        self.reducing = None

    def take_gradients(self):
        """The gradients as one new flat tensor, (N·k,); what got none counts as zero."""
        gradients = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten()
                     for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return torch.cat([*gradients, gradients[0].new_zeros(self.padding)])


def own_parameters(units):
    """For each module, the parameters to be trained that no module before it has."""
    seen, own = set(), []
    for unit in units:
        own.append([p for p in unit.parameters() if p.requires_grad and p not in seen])
        seen.update(own[-1])
    return own


# --------------------------------------------------------------------------------------- the update


class ShardUpdate:
    """A torch optimizer for the shard of each unit: the only part of a step that knows of it.

    make_optimizer(parameters): any torch.optim class that treats each number by itself, and has no
    norm per tensor. A shard of 16 bits is updated through its master, an fp32 copy. device: where
    masters and optimizer states live and the update runs, if that is not where the units are.
    """

    def __init__(self, units, make_optimizer, device=None):
        self.units, self.masters = units, []
        for unit in units:
            if unit.exact is None and device is None:
                self.masters.append(unit.shard)
            else:
                exact = unit.shard.data if unit.exact is None else unit.exact
                self.masters.append(nn.Parameter(exact.to(device or exact.device, copy=True)))
                unit.exact = None
        self.optimizers = [make_optimizer([master]) for master in self.masters]

    def step(self):
        for unit, master, optimizer in zip(self.units, self.masters, self.optimizers):
            master.grad = unit.gradient.to(master)      # the very tensor if it is alike
            optimizer.step()
            master.grad = None
            unit.shard.data.copy_(master.data)          # rounds; nothing if it is the shard

    def held(self):
        """Masters, if they are not the shards, and optimizer states."""
        shards = {unit.shard for unit in self.units}
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return [master for master in self.masters if master not in shards], states


def shard_norm(units, group):
    """The norm of the whole gradient, of which each number is on one rank of `group`. Padding is
    zero and adds nothing. Communication: an all_reduce of one number."""
    wide = torch.promote_types(units[0].gradient.dtype, torch.float32)
    norms = [torch.linalg.vector_norm(unit.gradient, dtype=wide) for unit in units]
    square = torch.stack(norms).square().sum()
    dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_shards(units, norm, largest):
    for unit in units:
        unit.gradient.mul_(common.clip_scale(norm, largest))


# ---------------------------------------------------------------------------------------- stage 1


class ShardedOptimizer:
    """ZeRO-1: an optimizer of which each rank runs a part; all the rest is on every rank.

    units: lists of parameters, or just parameters; frozen ones are left alone. For the other
    arguments see ShardUpdate and Unit. Gradients are views into one flat tensor per unit; those
    that somebody has replaced are copied back. Raises ValueError if a parameter is in two lists.
    """

    def __init__(self, units, make_optimizer, group, device=None, **dtypes):
        units = list(units)
        units = [units] if torch.is_tensor(units[0]) else units
        trained = [[p for p in parameters if p.requires_grad] for parameters in units]
        if len(set(sum(trained, []))) < sum(map(len, trained)):
            raise ValueError("a parameter is in two units")
        self.units = [Unit(parameters, group, **dtypes) for parameters in trained if parameters]
        self.gradients = [torch.zeros_like(unit.full) for unit in self.units]
        self.update = ShardUpdate(self.units, make_optimizer, device)
        self.zero_grad()

    def zero_grad(self):
        for unit, flat in zip(self.units, self.gradients):
            flat.zero_()
            for p, view in zip(unit.parameters, unit.views(flat)):
                p.grad = view

    def reduce_gradients(self):
        """After the last backward: one reduce_scatter per unit, in place."""
        for unit, flat in zip(self.units, self.gradients):
            for p, view in zip(unit.parameters, unit.views(flat)):
                if p.grad is None:                      # set to None by somebody, and not used
                    view.zero_()
                elif p.grad.data_ptr() != view.data_ptr():
                    view.copy_(p.grad)
            unit.gradient = None
            unit.start_reduce(flat, in_place=True)
        for unit in self.units:
            unit.finish_reduce()

    def step(self):
        """Update the shards, then one all_gather of the parameters per unit."""
        self.update.step()
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()


# --------------------------------------------------------------------------------- stages 2 and 3


class Zero2(nn.Module):
    """ZeRO-2: gradients are reduce_scattered in backward, unit by unit, and the full ones freed.

    units: the modules of `module` that its forward runs one after the other, on every rank in the
    same order. A parameter that several of them share belongs to the first; frozen ones stay whole.
    replicas: the ranks that hold the same shard, if `group` is but a part of all (hybrid sharding).
    make_unit, options: what makes a Unit, and with what. A unit runs once in a forward, and no
    other module uses its parameters. Raises ValueError if a trained parameter is in no unit, or
    there is none.

    Autograd runs a backward in the reverse order of its forward. So when the gradient of unit i's
    output is there, the backward of unit i+1 is over.
    """

    def __init__(self, module, units, group, replicas=None, make_unit=Unit, **options):
        super().__init__()
        self.module, self.replicas = module, replicas
        own = own_parameters(units)
        held = set(sum(own, []))
        left = [n for n, p in module.named_parameters() if p.requires_grad and p not in held]
        if left or not held:
            raise ValueError(f"in no unit: {', '.join(left) or 'any trained parameter'}")
        self.units = [make_unit(parameters, group, **options) for parameters in own if parameters]
        self.modules_of_units = [unit for unit, parameters in zip(units, own) if parameters]
        for p in module.parameters():
            if not p.requires_grad and options.get("dtype"):
                p.data = p.data.to(options["dtype"])
        for i, unit in enumerate(self.modules_of_units):
            unit.register_forward_hook(functools.partial(self.after_forward, i))
        self.not_reduced, self.sending, self.in_backward = 0, None, False

    def forward(self, *inputs, **more):
        self.not_reduced = len(self.units)
        return self.module(*inputs, **more)

    def after_forward(self, i, module, inputs, output):
        tensors = [x for x in tree_leaves(output) if torch.is_tensor(x)]
        if not tensors:
            raise TypeError(f"unit {i} must return tensors, in lists, tuples or dictionaries")
        for tensor in tensors:
            if tensor.requires_grad and not self.in_backward:   # where it is only recomputed
                tensor.register_hook(lambda gradient: self.before_backward(i))

    def before_backward(self, i):
        self.in_backward = True
        self.reduce_down_to(i + 1)

    def reduce_down_to(self, i):
        """Start to reduce all units from the last to the i-th whose gradients are still here."""
        while self.not_reduced > i:
            self.not_reduced -= 1
            if self.sending:                            # one at a time, for the memory
                self.sending.finish_reduce()
            self.sending = self.units[self.not_reduced]
            self.sending.start_reduce(self.sending.take_gradients())

    def finish_backward(self):
        """After every backward: afterwards the gradients are in the shards alone.

        Raises RuntimeError if a unit ran twice, since its first gradient then comes too late.
        """
        self.reduce_down_to(0)
        self.sending.finish_reduce()
        self.sending, self.in_backward = None, False
        if any(p.grad is not None for unit in self.units for p in unit.parameters):
            raise RuntimeError("a unit ran more than once in one forward")

    def finish_gradients(self):
        """After the last backward of a step: sum the shards over the replicas, if there are any."""
        if self.replicas:
            handles = [dist.all_reduce(unit.gradient, group=self.replicas, async_op=True)
                       for unit in self.units]
            for handle in handles:
                handle.wait()

    def zero_grad(self, set_to_none=True):
        for unit in self.units:
            unit.gradient = None

    def finish_step(self):
        """After the update of the shards: all_gather the parameters."""
        for unit in self.units:
            unit.start_gather()
        for unit in self.units:
            unit.finish_gather()


class Zero3(Zero2):
    """ZeRO-3: the parameters of a unit are gathered just before its forward and its backward too.

    prefetch: how many of the units that come next are gathered while one computes. keep_gathered:
    do not free after forward. peak: the most bytes that were gathered at a time. Raises ValueError
    if units share a trained parameter, which one would free while the other needs it.
    """

    def __init__(self, module, units, group, replicas=None, prefetch=1, keep_gathered=False,
                 **options):
        everywhere = [p for unit in units for p in unit.parameters() if p.requires_grad]
        shared = [p for p in everywhere if sum(p is q for q in everywhere) > 1]
        if shared:
            raise ValueError(f"units share a parameter of shape {tuple(shared[0].shape)}: make one "
                             "unit of them")
        super().__init__(module, units, group, replicas, **options)
        self.prefetch, self.keep_gathered, self.peak = prefetch, keep_gathered, 0
        for i, (unit, unit_module) in enumerate(zip(self.units, self.modules_of_units)):
            unit.shard.data = unit.shard.data.clone()
            unit.free()
            unit_module.register_forward_pre_hook(functools.partial(self.before_forward, i))

    def gather(self, indices, backward=False):
        """Wait for the first of these units, and start the gathers of the others."""
        for i in indices:
            if not self.units[i].gathered_bytes():
                self.units[i].start_gather(backward)
        self.units[indices[0]].finish_gather()
        self.peak = max(self.peak, sum(unit.gathered_bytes() for unit in self.units))

    def forward(self, *inputs, **more):
        self.free()                                     # what a forward without a backward left
        output = super().forward(*inputs, **more)
        if not torch.is_grad_enabled():
            self.free()                                 # prefetched, and then not run
        return output

    def free(self):
        for unit in self.units:
            unit.free()

    def before_forward(self, i, module, inputs):
        if not self.in_backward:
            self.gather(range(i, min(i + self.prefetch + 1, len(self.units))))

    def after_forward(self, i, module, inputs, output):
        super().after_forward(i, module, inputs, output)
        kept = self.keep_gathered and torch.is_grad_enabled()
        if not (kept or self.in_backward):
            self.units[i].free()

    def before_backward(self, i):
        for unit in self.units[i + 1:]:
            unit.free()
        self.gather(range(i, max(i - self.prefetch, 0) - 1, -1), backward=True)
        super().before_backward(i)

    def finish_backward(self):
        super().finish_backward()
        self.free()

    def finish_step(self):
        """Nothing: the next forward gathers."""


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


class ZeroPlusPlusUnit(Unit):
    """A unit that sends less, by the three ideas of ZeRO++, of which any may be left out.

    quantized_weights: parameters are gathered as int8. node: the group of ranks inside a node; they
    keep what the forward gathered, a secondary shard each, and gather for backward from it, so that
    nothing leaves the node. quantized_gradients: every rank sends the others their shards as int8,
    and each adds up its own in full precision: int8 numbers are sent once, and never added.
    """

    def __init__(self, parameters, group, dtype=None, sum_dtype=None, quantized_weights=True,
                 node=None, quantized_gradients=True):
        super().__init__(parameters, group, dtype, sum_dtype)
        self.quantized_weights, self.quantized_gradients = quantized_weights, quantized_gradients
        self.node = node
        if node:
            self.secondary = self.full.chunk(node.size())[node.rank()].clone()

    def start_gather(self, backward=False):
        self.full.untyped_storage().resize_(self.full_bytes)
        if backward and self.node:
            handle = common.all_gather(self.full, self.secondary, self.node, async_op=True)
            self.gathering = backward, [handle], None
        elif self.quantized_weights:
            mine = quantize(self.shard.data)
            everyones = [x.new_empty(self.group.size() * len(x)) for x in mine]
            handles = [common.all_gather(full, x, self.group, async_op=True)
                       for full, x in zip(everyones, mine)]
            self.gathering = backward, handles, everyones
        else:
            handle = common.all_gather(self.full, self.shard.data, self.group, async_op=True)
            self.gathering = backward, [handle], None

    def finish_gather(self):
        if self.gathering:
            backward, handles, quantized = self.gathering
            for handle in handles:
                handle.wait()
            if quantized:
                rows = [x.view(self.group.size(), -1) for x in quantized]
                self.full.copy_(dequantize(*rows).flatten())
            if self.node and not backward:
                self.secondary.copy_(self.full.chunk(self.node.size())[self.node.rank()])
            self.gathering = None

    def start_reduce(self, flat, in_place=False):
        if not self.quantized_gradients:
            return super().start_reduce(flat)
        sent = quantize(flat.view(self.group.size(), -1))       # a row for each rank
        received = [torch.empty_like(x) for x in sent]
        handles = [dist.all_to_all_single(y, x, group=self.group, async_op=True)
                   for y, x in zip(received, sent)]
        self.reducing = handles, received, sent

    def finish_reduce(self):
        if not self.quantized_gradients:
            return super().finish_reduce()
        handles, received, _ = self.reducing
        for handle in handles:
            handle.wait()
        summed = dequantize(*received).sum(0).to(self.sum_dtype)
        self.gradient = summed if self.gradient is None else self.gradient.add_(summed)
        self.reducing = None


# --------------------------------------------------------------------------------------- the steps


def zero1_step(model, optimizer, micro_batches, valid, clip, group):
    """One step of stage 1. Returns this rank's part of the loss, and the norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets of
    the whole global batch. Communication: a reduce_scatter and an all_gather per unit, and the
    all_reduce of the norm.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    optimizer.reduce_gradients()

    norm = shard_norm(optimizer.units, group)
    if clip:
        clip_shards(optimizer.units, norm, clip)
    optimizer.step()
    return total, norm


def zero_step(zero, update, micro_batches, valid, clip, group):
    """The same for stages 2 and 3, where every backward ends with the gradients in the shards."""
    zero.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(zero(tokens), targets) / valid
        loss.backward()
        zero.finish_backward()
        total += loss.detach()
    zero.finish_gradients()

    norm = shard_norm(zero.units, group)
    if clip:
        clip_shards(zero.units, norm, clip)
    update.step()
    zero.finish_step()
    return total, norm


def torch_step(model, optimizer, micro_batches, valid, clip, scale, no_sync):
    """The same through PyTorch. scale: the ranks over which it averages. no_sync(early): DDP's."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        with no_sync(i < len(micro_batches)):
            loss = loss_sum(model(tokens), targets) / valid
            (loss * scale).backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas


def padded_sizes(cfg, n):
    """The numbers in each unit (embedding, blocks, head), with the padding for n shards."""
    kv_dim = cfg.dim * cfg.kv_heads // cfg.heads
    block = cfg.dim * (2 * cfg.dim + 2 * kv_dim + 8 * cfg.dim + 4)
    table = cfg.vocab * cfg.dim
    head = 2 * cfg.dim + (0 if cfg.tie else table)
    return [-(-size // n) * n for size in (table, *[block] * cfg.layers, head)]


class Widths(NamedTuple):
    """Bytes of a number: of the parameters, of their summed gradients, and of the update."""

    parameter: int = 4
    gradient: int = 4
    update: int = 4


FP32 = Widths()


def model_state_bytes(cfg, stage, optimizer, n, widths=FP32, offload=False, node=None):
    """Bytes of parameters, gradients and optimizer states per rank, at the end of a step.

    stage: 0 (data parallel), 1, 2 or 3. n: the ranks that share. Masters count as optimizer states.
    node: the number of ranks that share a secondary copy of the parameters (ZeRO++).
    """
    units = padded_sizes(cfg, n if stage else 1)
    size = sum(units)
    shard = size // n if stage else size                # numbers that this rank updates
    tensors = len(units) if stage else 10 * cfg.layers + (3 if cfg.tie else 4)
    moments = {"adamw": 2 * widths.update * shard + 4 * tensors,
               "momentum": widths.update * shard, "sgd": 0}[optimizer]
    masters = widths.update * shard if offload or widths.parameter != widths.update else 0
    full_gradients = widths.parameter * size if stage < 2 else 0
    sums = widths.gradient * shard if stage >= 2 or widths.gradient != widths.parameter else 0
    secondary = size // node if node else 0
    return {"parameters": widths.parameter * ((shard if stage == 3 else size) + secondary),
            "gradients": full_gradients + sums, "optimizer states": masters + moments}


def traffic(cfg, stage, n, micro_batches, widths=FP32, keep_gathered=False, replicas=1):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}.

    n: the ranks of a shard group; replicas: the groups. The norm takes one number's all_reduce.
    """
    units = padded_sizes(cfg, n)
    size, share = sum(units), (n - 1) / n
    reduces = 1 if stage == 1 else micro_batches
    gathers = micro_batches * (1 if keep_gathered else 2) if stage == 3 else 1
    reduced, gathered = reduces * size * widths.gradient, gathers * size * widths.parameter
    norm = max(widths.gradient, 4)
    shards = widths.gradient * size // n if replicas > 1 else 0
    wire = 2 * share * norm + 2 * (replicas - 1) / replicas * shards
    return {"reduce_scatter": (len(units) * reduces, reduced, share * reduced),
            "all_gather": (len(units) * gathers, gathered, share * gathered),
            "all_reduce": (1 + (len(units) if shards else 0), norm + shards, wire)}


def zeropp_traffic(cfg, n, micro_batches, widths, node, weights, gradients):
    """The same for ZeRO++. node: its number of ranks if there are secondary shards, else None.
    weights, gradients: whether they are quantized to a byte each, and 4 for each block's scale."""
    units, m = padded_sizes(cfg, n), micro_batches
    size, share = sum(units), (n - 1) / n
    quantized = sum(unit + 4 * n * -(-unit // n // BLOCK) for unit in units)
    forward = (2 * len(units), quantized) if weights else (len(units), size * widths.parameter)
    backward = (len(units), size * widths.parameter) if node else forward
    wire = share * forward[1] + ((node - 1) / node if node else share) * backward[1]
    calls, payload = (2 * len(units), quantized) if gradients else (len(units),
                                                                   size * widths.gradient)
    norm = max(widths.gradient, 4)
    gathered = m * (forward[0] + backward[0]), m * (forward[1] + backward[1]), m * wire
    reduced = m * calls, m * payload, m * share * payload
    return {"all_gather": gathered, "all_to_all" if gradients else "reduce_scatter": reduced,
            "all_reduce": (1, norm, 2 * share * norm)}


def gathered_peak(cfg, n, prefetch, keep_gathered, width=4):
    """The most bytes of gathered parameters at a time in stage 3: a unit's and the next ones'."""
    units = padded_sizes(cfg, n)
    at_once = len(units) if keep_gathered else prefetch + 1
    return width * max(sum(units[i:i + at_once]) for i in range(len(units)))


# -------------------------------------------------------------------------------------- the picture

SHAPES = {"7B": common.PRESETS["7b"],
          "70B": common.Config(layers=86, dim=8192, heads=64, kv_heads=64, seq=4096, vocab=50304)}


def draw(points, precision, widths, optimizer, path):
    """Bytes per rank by formula, for two shapes and up to 1024 ranks. points: {stage: (ranks, bytes
    per parameter)} as measured, shown at the size of each shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    worlds = [2**i for i in range(11)]
    colors = {"parameters": "#355070", "gradients": "#e56b6f", "optimizer states": "#6d597a"}
    for axes, (name, cfg) in zip(figure.subplots(2, sharex=True), SHAPES.items()):
        for stage in range(4):
            places = [x + 0.2 * (stage - 1.5) for x in range(len(worlds))]
            held = [model_state_bytes(cfg, stage, optimizer, n, widths) for n in worlds]
            bottom = [0.0] * len(worlds)
            for kind, color in colors.items():
                heights = [h[kind] / 1e9 for h in held]
                axes.bar(places, heights, 0.17, bottom, color=color, edgecolor="white",
                         linewidth=0.3, label=kind if stage == 0 else None)
                bottom = [b + h for b, h in zip(bottom, heights)]
            if stage in points:
                n, per_parameter = points[stage]
                x = math.log2(n) + 0.2 * (stage - 1.5)
                axes.plot(x, per_parameter * cfg.parameters() / 1e9, "kx", markersize=5,
                          label="measured by this run" if stage == min(points) else None)
        axes.axhline(80, color="gray", linestyle=":", linewidth=1)
        axes.text(len(worlds) - 0.4, 80, "80 GB", va="bottom", ha="right", color="gray", fontsize=8)
        axes.set_ylabel("GB per rank")
        what = f"{name}: {cfg.parameters() / 1e9:.1f} B parameters, {precision}, {optimizer}"
        axes.set_title(f"{what}; from left: data parallel, zero1, zero2, zero3", loc="left",
                       fontsize=9)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set_xlabel("ranks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4,
                  frameon=False)
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run


def pieces(update, names):
    """(name, parameter) pairs of what this rank updates, with its gradients: for the verifier."""
    for unit, master in zip(update.units, update.masters):
        first = 0                                       # of this parameter in the flat tensor
        for p in unit.parameters:
            lo, hi = max(first, unit.mine.start), min(first + p.numel(), unit.mine.stop)
            if lo < hi:
                here = slice(lo - unit.mine.start, hi - unit.mine.start)
                piece = nn.Parameter(master.detach()[here].to(unit.full.device))
                piece.grad = unit.gradient[here].to(piece)
                piece.cuts = (common.Piece(lo - first, hi - first, unit.group.size()),)
                yield names[p], piece
            first += p.numel()


def by_hand(args, variant, device, group, replicas=None, node=None):
    """A model under one of our variants. Returns its step, functions that give the tensors it holds
    and its named parameters, and the model as it is wrapped."""
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    names = {p: name for name, p in model.named_parameters()}
    make_optimizer = functools.partial(common.OPTIMIZERS[args.optimizer], lr=args.lr)
    cpu = torch.device("cpu") if args.offload else None
    bf16 = args.precision == "bf16"
    dtypes = {"dtype": torch.bfloat16 if bf16 else None,
              "sum_dtype": torch.float32 if bf16 and args.reduce_fp32 else None}
    if variant == "zero1":
        zero, units = model, own_parameters(model)
        sharded = ShardedOptimizer(units, make_optimizer, group, cpu, **dtypes)
        update, step = sharded.update, functools.partial(zero1_step, model, sharded)
    else:
        if variant == "zero2":
            zero = Zero2(model, list(model), group, **dtypes)
        else:
            pp = {"make_unit": ZeroPlusPlusUnit, "node": node,
                  "quantized_weights": args.quantized_weights,
                  "quantized_gradients": args.quantized_gradients} if variant == "zeropp" else {}
            zero = Zero3(model, list(model), group, replicas, args.prefetch, args.keep_gathered,
                         **dtypes, **pp)
        update = ShardUpdate(zero.units, make_optimizer, cpu)
        step = functools.partial(zero_step, zero, update)

    def held():
        gradients = [unit.gradient for unit in update.units] + [p.grad for p in names]
        parameters = [tensor for unit in update.units
                      for tensor in (unit.full, unit.shard, unit.secondary)]
        return parameters, gradients, update.held()

    return functools.partial(step, group=group), held, lambda: pieces(update, names), zero


STAGES = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3, "zeropp": 3, "torch": None}
BY_HAND = ("zero1", "zero2", "zero3", "hsdp", "zeropp")
USED_BY = {             # the flags that only some variants know
    "prefetch": ("zero3", "hsdp", "zeropp"), "keep_gathered": ("zero3", "hsdp"),
    "shard_size": ("hsdp", "zeropp"), "quantized_weights": ("zeropp",),
    "secondary_shard": ("zeropp",), "quantized_gradients": ("zeropp",), "stage": ("torch",),
    "precision": BY_HAND, "reduce_fp32": BY_HAND, "offload": BY_HAND,
}
OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")      # of a torch.optim class


def by_torch(args, device, mesh):
    """The same under PyTorch: stage 1 is DDP with ZeroRedundancyOptimizer, 2 and 3 fully_shard."""
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    group, n = mesh.get_group("shard"), mesh["shard"].size()
    like = common.OPTIMIZERS[args.optimizer]([torch.zeros(1)], args.lr)
    options = {k: v for k, v in like.defaults.items() if k in OPTIONS}
    if args.stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        DDP = nn.parallel.DistributedDataParallel
        new_name = "forward_sync_buffers" in inspect.signature(DDP).parameters
        still = {"forward_sync_buffers" if new_name else "broadcast_buffers": False}
        ddp = DDP(model, process_group=group, gradient_as_bucket_view=True, **still)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), type(like), process_group=group,
                                            **options)
        step = functools.partial(torch_step, ddp, optimizer, scale=n,
                                 no_sync=lambda early: ddp.no_sync() if early else nullcontext())
        states = optimizer.optim.state
    else:
        from torch.distributed.fsdp import fully_shard

        for unit in (*model, model):
            fully_shard(unit, mesh=mesh["shard"], reshard_after_forward=args.stage == 3)
            unit.set_gradient_divide_factor(1.0)        # it would average; this is per unit
            unit.set_force_sum_reduction_for_comms(True)        # gloo has no scaled sum
        optimizer = type(like)(model.parameters(), **options)
        step = functools.partial(torch_step, model, optimizer, scale=1,
                                 no_sync=lambda early: nullcontext())
        states = optimizer.state

    def held():
        parameters = list(model.parameters())
        return parameters, [p.grad for p in parameters], list(states.values())

    return step, held, model.named_parameters, model


def train(args, ranks, mesh, node, text, run):
    """Train for --steps steps; check model states and traffic against their formulas."""
    group, n, copies = mesh.get_group("shard"), mesh["shard"].size(), mesh["replicate"].size()
    replicas = mesh.get_group("replicate") if copies > 1 else None
    if args.variant == "torch":
        step, held, named, zero = by_torch(args, ranks.device, mesh)
    else:
        step, held, named, zero = by_hand(args, args.variant, ranks.device, group, replicas, node)

    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)
        mine = [x.chunk(ranks.world)[ranks.rank].to(ranks.device) for x in (tokens, targets)]
        pairs = list(zip(*(x.split(args.micro_batch) for x in mine)))
        with run.measure(i):
            loss, norm = step(micro_batches=pairs, valid=valid, clip=args.clip)
        dist.all_reduce(loss)                           # for the report, and outside of the meters
        run.log(i, batch, loss, norm, named())

    cfg, stage, width = args.model, STAGES[args.variant], widths(args)
    kinds = "parameters", "gradients", "optimizer states"
    if args.variant == "torch":                         # which pads and copies as it likes
        for kind, tensors in zip(kinds, held()):
            run.check(kind, nbytes(tensors))
        run.check_comm({op: (None, None, None) for op in run.comm.total})
        return
    node_size = node and node.size()
    formula = model_state_bytes(cfg, stage, args.optimizer, n, width, args.offload, node_size)
    for kind, tensors in zip(kinds, held()):
        where = ", on the CPU" * (args.offload and kind == "optimizer states")
        run.check(kind + where, nbytes(tensors), formula[kind])
    if stage == 3:
        peak = gathered_peak(cfg, n, args.prefetch, args.keep_gathered, width.parameter)
        run.check("gathered parameters, at the peak", zero.peak, peak)
    sent = traffic(cfg, stage, n, len(pairs), width, args.keep_gathered, copies)
    if args.variant == "zeropp":
        usual, switches = sent, (args.quantized_weights, args.quantized_gradients)
        sent = zeropp_traffic(cfg, n, len(pairs), width, node_size, *switches)
        less, more = (sum(wire for _, _, wire in x.values()) for x in (sent, usual))
        run.note(f"on the wire {quantity(round(less))} in a step, and zero3 sends "
                 f"{quantity(round(more))}" + f": {less / more:.0%}" * (more > 0))
    run.check_comm(sent)


def widths(args):
    if args.precision == "bf16":
        return Widths(2, 4 if args.reduce_fp32 else 2, 4)
    return Widths(*[common.DTYPES[args.dtype].itemsize] * 3)


def report(args, ranks, text, run):
    """Draw what the stages hold, with what a step of each held here."""
    tokens, targets, valid = text.batch(0)
    mine = [x.chunk(ranks.world)[ranks.rank][: args.micro_batch].to(ranks.device)
            for x in (tokens, targets)]
    points, on_device = {}, argparse.Namespace(**vars(args) | {"offload": False})
    for stage in (1, 2, 3):
        if args.preset != "tiny" and args.variant != f"zero{stage}":
            continue                                    # what is too large for another stage
        gc.collect()                                    # the model before: its hooks are cycles
        step, held, *_ = by_hand(on_device, f"zero{stage}", ranks.device, dist.group.WORLD)
        step(micro_batches=[mine], valid=valid, clip=None)
        total = sum(nbytes(tensors) for tensors in held())
        points[stage] = ranks.world, total / args.model.parameters()
        run.note(f"zero{stage} on {ranks.world} ranks holds {points[stage][1]:.2f} bytes per "
                 "parameter after a step")
    if ranks.rank == 0:
        precision = args.precision if args.precision == "bf16" else args.dtype
        draw(points, precision, widths(args), args.optimizer, args.plot)
    run.note(f"picture: {args.plot}")


def main(argv=None):
    parser = common.parser(__file__, __doc__, STAGES, default="zero3", steps=20)
    whole = functools.partial(common.number, int)
    parser.add_argument("--prefetch", type=whole(0, example=1, below=3), default=1,
                        help="units to gather ahead of the one that computes (stage 3)")
    parser.add_argument("--keep-gathered", action="store_true",
                        help="keep parameters from forward to backward (zero3, hsdp)")
    parser.add_argument("--shard-size", type=whole(1, example=2),
                        help="ranks that share one copy (hsdp), or a secondary one (zeropp); half")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--quantized-weights", action=switch, default=True,
                        help="zeropp: gather parameters as int8")
    parser.add_argument("--secondary-shard", action=switch, default=True,
                        help="zeropp: gather for backward inside groups of --shard-size")
    parser.add_argument("--quantized-gradients", action=switch, default=True,
                        help="zeropp: send gradients as int8")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32",
                        help="bf16: 16-bit parameters and gradients, fp32 master shards")
    parser.add_argument("--reduce-fp32", action="store_true",
                        help="send and add up the gradients of bf16 parameters in fp32")
    parser.add_argument("--offload", action="store_true",
                        help="keep masters and optimizer states on the CPU, and update them there")
    parser.add_argument("--stage", type=whole(1, example=3, below=4), default=3, help="of torch")
    parser.set_defaults(plot="runs/03_zero.png")
    args = common.parse(parser, argv)
    world = common.environment("WORLD_SIZE", 1)
    common.split_batch(args, world)
    for flag, variants in USED_BY.items():
        given = getattr(args, flag) != parser.get_default(flag)
        if given and args.variant not in variants:
            common.refuse(f"--{flag.replace('_', '-')} means nothing to --variant {args.variant}; "
                          f"{' or '.join(variants)} would work")
    if args.reduce_fp32 and args.precision != "bf16":
        common.refuse("--reduce-fp32 is for 16-bit gradients; --precision bf16 would work with it")
    in_units = args.variant not in ("zero1", "zero2") and (args.variant, args.stage) != ("torch", 1)
    if args.model.tie and in_units:
        common.refuse(f"--preset {args.preset} ties embedding and head, which --variant "
                      f"{args.variant} keeps in two units; --variant zero2 would work")
    if args.precision == "bf16" and args.dtype != "float32":
        common.refuse(f"--precision bf16 rounds float32, and --dtype is {args.dtype}; --dtype "
                      "float32 would work")
    size = args.shard_size = args.shard_size or (world // 2 if world % 2 == 0 else world)
    if world % size:
        common.refuse(f"--shard-size {size} does not divide {world} ranks; "
                      f"{math.gcd(world, size)} would work")
    text = common.Text(args)
    ranks = common.start(args)

    # One group for all shards; or (hybrid) groups of --shard-size, and across them those of peers.
    grouped = init_device_mesh(ranks.device.type, (world // size, size),
                               mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh(ranks.device.type, (1, world), mesh_dim_names=("replicate", "shard"))
    mesh = grouped if args.variant == "hsdp" else flat
    secondary = args.variant == "zeropp" and args.secondary_shard
    node = grouped.get_group("shard") if secondary else None
    build = functools.partial(gpt, args.model, args.seed, ranks.device, common.DTYPES[args.dtype])
    rounding = "bfloat16" if args.precision == "bf16" else None
    if args.variant == "zeropp" and (args.quantized_weights or args.quantized_gradients):
        rounding = "int8"
    steps = 50 if rounding == "int8" else common.VERIFIED_STEPS     # of the loss
    run = common.Run(args, ranks, text, build, settings(args), rounding, steps)
    train(args, ranks, mesh, node, text, run)
    report(args, ranks, text, run)
    return run.finish()


def settings(args):
    """The chapter's own settings in words, those that matter to the variant."""
    if args.variant == "torch":
        return f"stage {args.stage}"
    words = [f"groups of {args.shard_size}"] * (args.variant == "hsdp")
    if STAGES[args.variant] == 3:
        words += [f"prefetch {args.prefetch}"] + ["gathered parameters kept"] * args.keep_gathered
    if args.variant == "zeropp":
        words += ["int8 weights"] * args.quantized_weights
        words += [f"secondary shards over {args.shard_size} ranks"] * args.secondary_shard
        words += ["int8 gradients"] * args.quantized_gradients
    words += ["gradients summed in fp32"] * args.reduce_fp32 + ["offload"] * args.offload
    return ", ".join(words)


if __name__ == "__main__":
    common.launch(main)
