r"""03 · ZeRO: data parallelism in which no rank holds what another one has.

In chapter 02 every rank keeps all parameters, gradients and optimizer states; only the batch is
cut. But a rank that updates 1/N of the parameters needs the optimizer states of that part alone.
Then it needs the summed gradient of that part alone. And of the parameters it needs, at any moment,
only those of the module that computes. ZeRO cuts these three, and each cut is a stage:

    bytes per rank      parameters     gradients      optimizer states
    02 data parallel       P              G               O
    zero1                  P              G               O / N
    zero2                  P              G / N           O / N        and a unit's full gradient
    zero3                  P / N          G / N           O / N        and the units gathered by now

With Ψ parameters in fp32 under AdamW, P + G + O is 4Ψ + 4Ψ + 8Ψ. With --precision bf16 it is
2Ψ + 2Ψ + 12Ψ: chapter 01's fp32 master weights count as optimizer states, and are cut with them.
--reduce-fp32 sends and sums the gradients in fp32 (4Ψ/N). --offload keeps O on the CPU and updates
there: the gradient's shard is copied to the CPU, and the updated shard comes back.

Cutting is cheap, because an all_reduce is two steps already: a reduce_scatter, after which each
rank has the sum of 1/N of the gradient, and an all_gather, after which every rank has all of it.
ZeRO puts the update in between, and gathers parameters in place of gradients:

    02       backward | all_reduce gradients                      | update all of it
    zero1    backward | reduce_scatter gradients | update 1/N     | all_gather parameters
    zero2    backward, reduce_scatter unit by unit  | update 1/N  | all_gather parameters
    zero3    gather U1 | forward U1 | free U1, gather U2 | ... | forward Un | free Un
             gather Un | backward Un | free Un, reduce_scatter Un | ... | backward U1 | update 1/N

A unit is a module whose parameters are gathered together: here the embedding, each block, and the
head. They lie one after the other in one flat tensor, padded to a multiple of N, and each rank
keeps one of N equal shards of it. A shard may begin in the middle of one parameter and end in the
middle of another. The optimizer does not notice, since AdamW, SGD and momentum treat every number
by itself.

Our model is a list, so `train_step` walks it: for each unit it gathers, computes and frees, first
forwards, then backwards. PyTorch's FSDP (`--variant torch`) does the same for any module, whose
forward it cannot take apart. So it hangs hooks on each unit: before forward, to gather; after
forward, to free; on the gradient of the output, which is there when the unit's backward is about to
start, to gather again; and on the gradients of its parameters, to free and to start the
reduce_scatter. The collectives are the same, in the same order.

What a rank sends in a step (Ψ' is Ψ with padding, in bytes; M micro-batches; all times (N-1)/N)

    zero1                      2 Ψ'          as much as the all_reduce of chapter 02
    zero2                      (M + 1) Ψ'    after every backward: the full gradient is not kept
    zero3                      3 M Ψ'        gathered for forward, and again for backward
    zero3 --keep-gathered      2 M Ψ'        kept from forward to backward, for more memory
    hsdp                       as zero3 within a group of --shard-size ranks; across the groups, one
                               all_reduce of the gradient's shards a step
    zeropp                     as zero3, with a byte for each number of the forward's gather and of
                               the gradient; the backward's gather stays inside a node

ZeRO++ (zeropp) makes stage 3 send less, by three ideas with a switch each. Quantized weights:
parameters are gathered as int8, with a scale for every block of 256 numbers. Secondary shards: what
forward has gathered is kept, spread over the --shard-size ranks of a node, and backward gathers it
from there. Quantized gradients: in one all_to_all, every rank gets the N versions of its shard as
int8, and sums them in full precision; a ring would round the sums at every hop. The first and the
last change the numbers. So such a run is compared with one GPU by its loss, over 50 steps, and by
its first gradient norm: they may be off by 1% and 5%. Single tensors are not compared, since a
small gradient that shares a block with a large one has the large one's scale.

When it pays: prefetching (--prefetch) hides the gathers, at the price of memory: while a unit
computes, those of the next ones are under way. But stage 3 sends half of an all_reduce behind each
forward, which computes half as much as a backward. So chapter 02's condition holds for both, and
every micro-batch must meet it, where in chapter 02 only the last one had to. Stage 3 wants large
micro-batches; small models on fast networks should stay at stage 1 or 2. (For the sake of the
reader, this file draws the whole model on every rank before it cuts it. A model that does not fit
is drawn and cut one unit at a time.)

Run it:
    torchrun --nproc_per_node=4 03_zero.py
    torchrun --nproc_per_node=4 03_zero.py --variant zero2 --micro-batch 1
    torchrun --nproc_per_node=4 03_zero.py --prefetch 0 --keep-gathered
    torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4
    torchrun --nproc_per_node=8 03_zero.py --variant zeropp --steps 50 --no-quantized-gradients
    torchrun --nproc_per_node=4 03_zero.py --precision bf16 --reduce-fp32 --offload
    torchrun --nproc_per_node=4 03_zero.py --variant torch --stage 2

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), sections 5 and 7; Wang et al., ZeRO++ (2023), section 3 (where the three ideas are called
qwZ, hpZ and qgZ); Ren et al., ZeRO-Offload (2021); Zhao et al., PyTorch FSDP (2023), sections 3 and
4; Ultra-Scale Playbook, "Zero Redundancy Optimizer"; How To Scale Your Model, part 5,
"Fully-Sharded Data Parallelism".
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import common
from common import Cut, clip_grads, gpt, grad_norm, loss_sum, part

# --------------------------------------------------------------------------------------- one unit

class Unit:
    """Parameters of one dtype as one flat tensor, of which each rank of `group` keeps one shard.

    full: (N·k,), of which every parameter is a view, with zeros at its end as padding. shard: (k,),
    this rank's part of it. grad: (k,), this rank's part of the summed gradient, in `sum_dtype`; with
    it and `cuts`, a unit passes for a parameter in common.grad_norm. master: (k,), what is updated:
    the shard itself, unless that is rounded to `dtype` or updated on another `device`. ValueError:
    parameters of several dtypes. They must be the same on all ranks.
    """

    def __init__(self, parameters, group, dtype=None, sum_dtype=None, device=None):
        self.parameters, self.group = parameters, group
        dtypes = {str(p.dtype) for p in parameters}
        if len(dtypes) != 1:
            raise ValueError(f"a unit needs parameters of one dtype, and has {sorted(dtypes)}")
        self.padding = -sum(p.numel() for p in parameters) % group.size()
        self.cuts = (Cut(0, group.rank(), group.size(), group),)
        self.grad = self.gathering = self.reducing = self.secondary = None

        exact = self.flatten([p.detach() for p in parameters])
        self.full = exact.to(dtype or exact.dtype)
        self.full_bytes, self.sum_dtype = self.full.nbytes, sum_dtype or self.full.dtype
        for p, view in zip(parameters, self.views(self.full)):
            p.data = view
        self.shard = self.master = nn.Parameter(part(self.full, self))
        if dtype or device:
            self.master = nn.Parameter(part(exact, self).to(device or exact.device, copy=True))

    def flatten(self, tensors):
        """A new tensor, (N·k,), of tensors in the shapes of the parameters."""
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(self.padding)])

    def views(self, flat):
        """The reverse: views into a flat tensor in the shapes of the parameters."""
        flats = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [flat.view(p.shape) for flat, p in zip(flats, self.parameters)]

    def start_gather(self, backward=False):
        """Start to all_gather N·k numbers into new memory, for a forward or for a backward."""
        self.full.untyped_storage().resize_(self.full_bytes)
        self.gathering = self.all_gather(backward)

    def all_gather(self, backward):
        return common.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def gathered_bytes(self):
        return self.full.untyped_storage().nbytes()

    def free(self):
        """Give back the memory of `full`. Autograd has saved views of it for backward (a linear
        needs its weight there), so the tensor must survive, and we give back only its memory. The
        next gather gets new memory for it, and the views see that."""
        self.full.untyped_storage().resize_(0)

    def start_reduce(self):
        """Start to reduce_scatter the gradients, as N·k numbers, and let go of the originals."""
        self.sent = self.flatten([p.grad for p in self.parameters]).to(self.sum_dtype)
        self.summed = self.sent.new_empty(self.shard.shape)
        self.reducing = self.reduce_scatter(self.summed, self.sent)
        for p in self.parameters:
            p.grad = None

    def reduce_scatter(self, summed, sent):
        return common.reduce_scatter(summed, sent, group=self.group, async_op=True)

    def finish_reduce(self):
        """Add the sum to that of the micro-batches before."""
        self.reducing.wait()
        self.grad = self.summed if self.grad is None else self.grad.add_(self.summed)
        self.reducing = self.sent = self.summed = None  # until now, all of them had to live


def own_parameters(model):
    """The parameters of each module of the list; what two of them share belongs to the first."""
    own = {}
    for name, p in model.named_parameters():            # each parameter once
        own.setdefault(name.split(".")[0], []).append(p)
    return list(own.values())


def update(units, optimizer):
    """Update the shards. optimizer: any of torch.optim that treats each number by itself, with the
    units' masters. Where parameters stay gathered (stages 1 and 2), one all_gather per unit."""
    for unit in units:
        unit.master.grad = unit.grad.to(unit.master)    # that very tensor, if both are alike
    optimizer.step()
    for unit in units:
        unit.master.grad = None
        if unit.master is not unit.shard:
            unit.shard.data.copy_(unit.master.data)     # rounded, or back from the CPU
        if unit.gathered_bytes():
            common.all_gather(unit.full, unit.shard.data, unit.group)


# ---------------------------------------------------------------------------------------- stage 1

class ShardedOptimizer:
    """ZeRO-1: an optimizer of which each rank runs a part; all the rest is on every rank.

    units: lists of parameters, or just parameters; frozen ones are left alone. make_optimizer: from
    a list of parameters, see `update`. options: of a Unit. The gradients of a unit are views into
    one flat tensor; those that somebody has replaced are copied back. ValueError: a parameter is in
    two units.
    """

    def __init__(self, units, make_optimizer, group, **options):
        units = list(units)
        units = [units] if torch.is_tensor(units[0]) else units
        trained = [[p for p in parameters if p.requires_grad] for parameters in units]
        if len(set(sum(trained, []))) < sum(map(len, trained)):
            raise ValueError("a parameter is in two units")
        self.group = group
        self.units = [Unit(parameters, group, **options) for parameters in trained if parameters]
        self.gradients = [torch.zeros_like(unit.full) for unit in self.units]
        self.optimizer = make_optimizer([unit.master for unit in self.units])
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
            sent = flat.to(unit.sum_dtype)              # flat itself, but for --reduce-fp32
            unit.grad = part(sent, unit)
            common.reduce_scatter(unit.grad, sent, group=self.group)
            if sent is not flat:
                unit.grad = unit.grad.clone()           # so that the rest of `sent` can go

    def step(self):
        update(self.units, self.optimizer)


def zero1_step(model, optimizer, micro_batches, valid, clip):
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

    norm = grad_norm(optimizer.units, optimizer.group)
    if clip:
        clip_grads(optimizer.units, norm, clip)
    optimizer.step()
    return total, norm


# --------------------------------------------------------------------------------- stages 2 and 3

@dataclass
class Zero:
    """A model under stage 2 or 3: a list of modules, and a unit for each of them."""

    model: nn.Sequential
    units: list
    stage: int
    replicas: dist.ProcessGroup | None = None   # ranks that hold the same shard (hybrid sharding)
    prefetch: int = 0                           # units to gather ahead of the one that computes
    keep_gathered: bool = False                 # from forward to backward
    peak: int = 0                               # the most bytes that were gathered at a time

    def __post_init__(self):
        if self.stage == 3:
            for unit in self.units:
                unit.shard.data = unit.shard.data.clone()       # until now a part of `full`
                unit.free()

    def gather(self, units, backward=False):
        """Wait for the first of these units; the gathers of the others have then started."""
        for unit in units:
            if not unit.gathered_bytes():
                unit.start_gather(backward)
        units[0].finish_gather()
        self.peak = max(self.peak, sum(unit.gathered_bytes() for unit in self.units))


def train_step(zero, optimizer, micro_batches, valid, clip):
    """The same for stages 2 and 3. In stage 2 nothing is freed, so there is nothing to gather.

    Every unit reads a detached input. So it has an autograd graph of its own, and its backward,
    from its output to its input, can be called by itself.
    """
    model, units, at_once = zero.model, zero.units, 1 + zero.prefetch
    for unit in units:
        unit.grad = None
    total = 0
    for tokens, targets in micro_batches:
        out, graphs = tokens, []
        for i, unit in enumerate(units):
            zero.gather(units[i:][:at_once])            # the next ones start before this computes
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
            zero.gather(units[i::-1][:at_once], backward=True)          # towards the first unit
            x, out = graphs.pop()
            torch.autograd.backward(out, grad)
            grad = x.grad
            if zero.stage == 3:
                units[i].free()
            if i + 1 < len(units):
                units[i + 1].finish_reduce()            # it was sent during this unit's backward
            units[i].start_reduce()
        units[0].finish_reduce()

    if zero.replicas:
        for unit in units:                              # once a step, and only the shards
            dist.all_reduce(unit.grad, group=zero.replicas)
    norm = grad_norm(units, units[0].group)
    if clip:
        clip_grads(units, norm, clip)
    update(units, optimizer)
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


class QuantizedCollective:
    """Starts a collective that sends x as int8 numbers and their scales; wait() passes what came,
    (N, k) with a row from each rank, to `use`."""

    def __init__(self, collective, x, group, use):
        self.use, self.sent = use, quantize(x)          # what is sent must live until wait()
        self.received = [y.new_empty(group.size(), y.shape[-1]) for y in self.sent]
        self.handles = [collective(rows, y, group=group, async_op=True)
                        for rows, y in zip(self.received, self.sent)]

    def wait(self):
        for handle in self.handles:
            handle.wait()
        self.use(dequantize(*self.received))


class ZeroPlusPlusUnit(Unit):
    """A unit that sends less, by the three ideas of ZeRO++, of which any may be left out. node: the
    ranks inside a node, which share a secondary copy; None leaves that out."""

    def __init__(self, parameters, group, node, quantized_weights, quantized_gradients, **options):
        super().__init__(parameters, group, **options)
        self.quantized_weights, self.quantized_gradients = quantized_weights, quantized_gradients
        self.node = node
        if node:
            self.secondary = self.full.chunk(node.size())[node.rank()].clone()

    def all_gather(self, backward):
        if backward and self.node:
            return common.all_gather(self.full, self.secondary, self.node, async_op=True)
        if self.quantized_weights:
            return QuantizedCollective(common.all_gather, self.shard.data, self.group,
                                       lambda rows: self.full.copy_(rows.flatten()))
        return super().all_gather(backward)

    def finish_gather(self):
        super().finish_gather()
        if self.node:                                   # after backward's gather: the same again
            self.secondary.copy_(self.full.chunk(self.node.size())[self.node.rank()])

    def reduce_scatter(self, summed, sent):
        if self.quantized_gradients:                    # sent once as int8, never summed as int8
            rows = sent.view(self.group.size(), -1)     # one for each rank
            return QuantizedCollective(dist.all_to_all_single, rows, self.group,
                                       lambda rows: summed.copy_(rows.sum(0)))
        return super().reduce_scatter(summed, sent)


# ------------------------------------------------------------------------------------ the formulas

FP32 = (4, 4, 4)        # bytes of a number: of parameters, of their summed gradients, of the update


def widths(args):
    if args.precision == "bf16":
        return 2, 4 if args.reduce_fp32 else 2, 4
    return (common.DTYPES[args.dtype].itemsize,) * 3


def padded_sizes(cfg, n):
    """The numbers in each unit (embedding, blocks, head), with the padding for n shards."""
    table = cfg.vocab * cfg.dim
    head = 2 * cfg.dim + (0 if cfg.tie else table)
    block = (cfg.parameters() - table - head) // cfg.layers
    return [-(-size // n) * n for size in (table, *[block] * cfg.layers, head)]


def model_state_bytes(cfg, stage, optimizer, n, widths=FP32, offload=False, node=None):
    """Bytes of parameters, gradients and optimizer states per rank, at the end of a step.

    stage: 0 (data parallel), 1, 2 or 3. n: the ranks that share. Masters count as optimizer states.
    node: the number of ranks that share a secondary copy of the parameters (ZeRO++).
    """
    width, sum_width, update_width = widths
    units = padded_sizes(cfg, n if stage else 1)
    size = sum(units)
    shard = size // n if stage else size                # numbers that this rank updates
    tensors = len(units) if stage else cfg.tensors()
    states = common.optimizer_state_bytes(optimizer, shard, tensors, update_width)
    masters = update_width * shard if offload or width != update_width else 0
    full_gradients = width * size if stage < 2 else 0
    sums = sum_width * shard if stage >= 2 or width != sum_width else 0
    secondary = size // node if node else 0
    return {"parameters": width * ((shard if stage == 3 else size) + secondary),
            "gradients": full_gradients + sums, "optimizer states": masters + states}


def traffic(cfg, stage, n, micro_batches, widths=FP32, keep_gathered=False, replicas=1):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}.

    n: the ranks of a shard group, which sum one number for the norm. replicas: the groups.
    """
    units, share = padded_sizes(cfg, n), (n - 1) / n
    width, sum_width, _ = widths
    reduces = 1 if stage == 1 else micro_batches
    gathers = micro_batches * (1 if keep_gathered else 2) if stage == 3 else 1
    reduced, gathered = reduces * sum_width * sum(units), gathers * width * sum(units)
    norm = max(sum_width, 4) if n > 1 else 0
    shards = sum_width * sum(units) // n if replicas > 1 else 0
    calls = (1 if n > 1 else 0) + (len(units) if replicas > 1 else 0)
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

def whole_parameters(units):
    """For the verifier: (global name, parameter with its gradient) pairs, gathered from masters."""
    for unit in units:
        flats = []
        for shard in (unit.master.data, unit.grad.to(unit.master)):
            flats.append(shard.new_empty(unit.full.shape, device=unit.full.device))
            common.all_gather(flats[-1], shard.to(flats[-1]), unit.group)
        for p, whole, grad in zip(unit.parameters, *map(unit.views, flats)):
            whole.grad = grad
            yield p.global_name, whole


def unit_options(run):
    """What --precision, --reduce-fp32 and --offload make of a Unit, and of the run's tolerances."""
    args, bf16 = run.args, run.args.precision == "bf16"
    run.rounds_to("bfloat16" if bf16 else args.dtype)
    return {"dtype": torch.bfloat16 if bf16 else None,
            "sum_dtype": torch.float32 if args.reduce_fp32 else None,
            "device": torch.device("cpu") if args.offload else None}


def check_states(run, units, optimizer, stage, node=None):
    args, n = run.args, units[0].group.size()
    formula = model_state_bytes(args.model, stage, args.optimizer, n, widths(args), args.offload,
                                node)
    masters = [unit.master for unit in units if unit.master is not unit.shard]
    held = {"parameters": [(unit.full, unit.shard, unit.secondary) for unit in units],
            "gradients": [(unit.grad, [p.grad for p in unit.parameters]) for unit in units],
            "optimizer states": [masters, *optimizer.state.values()]}
    for kind, tensors in held.items():
        where = ", on the CPU" if args.offload and kind == "optimizer states" else ""
        run.check_bytes(kind + where, tensors, formula[kind])


def train_zero1(run):
    args, group = run.args, run.mesh(shard=run.world)["shard"].get_group()
    model = gpt(args.model, args.seed, run.device, run.dtype)
    sharded = ShardedOptimizer(own_parameters(model), run.optimizer, group, **unit_options(run))

    for batch in run.batches(share=run.rank):           # 1/N of the sequences
        with run.measure():
            loss, norm = zero1_step(model, sharded, batch.micro_batches, batch.valid, args.clip)
        dist.all_reduce(loss)                           # for the report, which shows the whole loss
        run.log(batch, loss, norm, whole_parameters(sharded.units))

    check_states(run, sharded.units, sharded.optimizer, stage=1)
    run.check_traffic(traffic(args.model, 1, run.world, len(batch.micro_batches), widths(args)))


def train(run):
    """zero2, zero3 and hsdp, of which only the last has several groups of --shard-size ranks."""
    args, n = run.args, run.args.shard_size
    mesh = run.mesh(replicate=run.world // n, shard=n)
    group, replicas = mesh["shard"].get_group(), mesh["replicate"].get_group()
    model = gpt(args.model, args.seed, run.device, run.dtype)
    units = [Unit(own, group, **unit_options(run)) for own in own_parameters(model)]
    zero = Zero(model, units, 2 if args.variant == "zero2" else 3,
                replicas if replicas.size() > 1 else None, args.prefetch, args.keep_gathered)
    m = take_steps(run, zero)
    run.check_traffic(traffic(args.model, zero.stage, n, m, widths(args), args.keep_gathered,
                              replicas.size()))


def train_zeropp(run):
    args, n, size = run.args, run.world, run.args.shard_size
    group = run.mesh(shard=n)["shard"].get_group()
    node = run.mesh(nodes=n // size, node=size)["node"].get_group()
    node, size = (node, size) if args.secondary_shard else (None, None)
    quantized = args.quantized_weights, args.quantized_gradients
    model = gpt(args.model, args.seed, run.device, run.dtype)
    units = [ZeroPlusPlusUnit(own, group, node, *quantized, **unit_options(run))
             for own in own_parameters(model)]
    if any(quantized):
        run.rounds_to("int8", steps=50)
    m = take_steps(run, Zero(model, units, 3, prefetch=args.prefetch), size)
    run.check_traffic(zeropp_traffic(args.model, n, m, widths(args), size, *quantized))
    run.compare_traffic("zero3", traffic(args.model, 3, n, m, widths(args)))


def take_steps(run, zero, node=None):
    """Train under stage 2 or 3. Returns the number of micro-batches in a step.
    node: the number of ranks that share a secondary copy."""
    args, units = run.args, zero.units
    optimizer = run.optimizer([unit.master for unit in units])

    for batch in run.batches(share=run.rank):
        with run.measure():
            loss, norm = train_step(zero, optimizer, batch.micro_batches, batch.valid, args.clip)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, whole_parameters(units))

    check_states(run, units, optimizer, zero.stage, node)
    if zero.stage == 3:
        peak = gathered_peak(args.model, units[0].group.size(), zero.prefetch, zero.keep_gathered,
                             widths(args)[0])
        run.check("gathered parameters, at the peak", zero.peak, peak)
    return len(batch.micro_batches)


def torch_step(model, optimizer, micro_batches, valid, clip, scale):
    """The same through PyTorch, which divides the gradients by `scale`."""
    optimizer.zero_grad()
    total = 0
    for i, (tokens, targets) in enumerate(micro_batches, start=1):
        model.require_backward_grad_sync = i == len(micro_batches)      # DDP sends in the last one
        loss = loss_sum(model(tokens), targets) / valid
        (scale * loss).backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf)
    optimizer.step()
    return total, norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def train_torch(run):
    args, mesh, scale = run.args, run.mesh(shard=run.world), 1
    model = wrapped = gpt(args.model, args.seed, run.device, run.dtype)
    if args.stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped, scale = common.ddp(model, mesh.get_group(), gradient_as_bucket_view=True), run.world
        optimizer = ZeroRedundancyOptimizer(model.parameters(), run.optimizer, mesh.get_group())
    else:
        from torch.distributed.fsdp import fully_shard

        for unit in (*model, model):
            fully_shard(unit, mesh=mesh, reshard_after_forward=args.stage == 3)
            unit.set_gradient_divide_factor(1.0)        # it would average; this is per unit
            unit.set_force_sum_reduction_for_comms(True)        # gloo has no scaled sum
        optimizer = run.optimizer(model.parameters())

    for batch in run.batches(share=run.rank):
        with run.measure():
            loss, norm = torch_step(wrapped, optimizer, batch.micro_batches, batch.valid, args.clip,
                                    scale)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)

    run.check_states(model, getattr(optimizer, "optim", optimizer))
    run.check_traffic()


def requires(args, ranks):
    common.split_batch(args, ranks)
    if args.reduce_fp32 and args.precision != "bf16":
        common.refuse("--reduce-fp32 is for 16-bit gradients; --precision bf16 would work with it")
    if args.precision == "bf16" and args.dtype != "float32":
        common.refuse(f"--precision bf16 rounds float32, and --dtype is {args.dtype}; --dtype "
                      "float32 would work")
    whole = args.variant in ("zero1", "zero2") or args.variant == "torch" and args.stage == 1
    if args.model.tie and not whole:
        common.refuse(f"--preset {args.preset} ties embedding and head, which --variant "
                      f"{args.variant} keeps in two units; --variant zero2 would work")
    half = ranks // math.gcd(ranks, 2)                  # or all, if their number is odd
    grouped = args.variant in ("hsdp", "zeropp")
    size = args.shard_size = args.shard_size or (half if grouped else ranks)
    if ranks % size:
        common.refuse(f"--shard-size {size} does not divide {ranks} ranks; "
                      f"{math.gcd(ranks, size)} would work")


def flags(parser):
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--prefetch", type=int, default=1, help="units to gather ahead of the one that computes")
    add("--keep-gathered", action="store_true", help="keep parameters from forward to backward")
    add("--shard-size", type=int, help="ranks that share a copy, or a secondary one; default: half")
    add("--quantized-weights", action=switch, default=True, help="gather parameters as int8")
    add("--secondary-shard", action=switch, default=True, help="gather inside nodes for backward")
    add("--quantized-gradients", action=switch, default=True, help="send gradients as int8")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: with fp32 masters")
    add("--reduce-fp32", action="store_true", help="send and sum the gradients of bf16 in fp32")
    add("--offload", action="store_true", help="keep masters and states on the CPU, update there")
    add("--stage", type=int, default=3, help="of torch")


NUMBERS = ("--precision", "--reduce-fp32", "--offload")
QUANTIZED = ("--quantized-weights", "--secondary-shard", "--quantized-gradients")
VARIANTS = {
    "zero3": (train, "--prefetch", "--keep-gathered", *NUMBERS),
    "zero1": (train_zero1, *NUMBERS),
    "zero2": (train, *NUMBERS),
    "hsdp": (train, "--prefetch", "--keep-gathered", "--shard-size", *NUMBERS),
    "zeropp": (train_zeropp, "--prefetch", "--shard-size", *QUANTIZED, *NUMBERS),
    "torch": (train_torch, "--stage"),
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
