r"""03 · ZeRO: data parallelism in which no rank holds what another one has.

Chapter 02 keeps N copies of everything: parameters, gradients, optimizer states. Only the batch was
cut. But a rank that updates 1/N of the parameters needs no optimizer states of others; then it
needs only that part of the summed gradient; and of the parameters it needs no more than those of
the module that computes right now. ZeRO cuts the three, and each cut is a stage:

    bytes per rank      parameters     gradients      optimizer states
    02 data parallel       P              G               O
    zero1                  P              G               O / N
    zero2                  P              G / N           O / N
    zero3                  P / N          G / N           O / N        and what is gathered by now

    with P + G + O = 4Ψ + 4Ψ + 8Ψ for Ψ parameters in fp32 under AdamW. (In mixed precision it is
    2Ψ + 2Ψ + kΨ with k = 12, the fp32 master weights among the optimizer states.)

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

Prefetching (--prefetch) hides the gathers: while a unit computes, the next ones are on their way,
at the price of their memory. Small models on fast networks should stay at stage 1 or 2, and small
micro-batches hurt stage 3 most. The condition is that of chapter 02 with 3/2 of the bytes.

Run it:
    torchrun --nproc_per_node=4 03_zero.py
    torchrun --nproc_per_node=4 03_zero.py --variant zero2 --micro-batch 1
    torchrun --nproc_per_node=4 03_zero.py --prefetch 0 --keep-gathered
    torchrun --nproc_per_node=8 03_zero.py --variant hsdp --shard-size 4
    torchrun --nproc_per_node=4 03_zero.py --variant torch --stage 2

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models
(2020), sections 5 and 7; Zhao et al., PyTorch FSDP (2023), sections 3 and 4; Ultra-Scale Playbook,
"Zero Redundancy Optimizer"; How To Scale Your Model, part 5, "Fully-Sharded Data Parallelism".
"""

import functools
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

import common
from common import clip_grads, gpt, grad_norm, loss_sum, nbytes

# --------------------------------------------------------------------------------------- one unit


class Unit:
    """Parameters of one dtype as one flat tensor, of which each rank of `group` keeps one shard.

    full: (N·k,) with zeros at its end as padding; every parameter becomes a view into it. shard:
    (k,), this rank's part, is what an optimizer gets; the gradient's part is its .grad. Parameters
    must be the same on all ranks. Raises ValueError if they are of different dtypes.
    """

    def __init__(self, parameters, group):
        self.parameters, self.group = list(parameters), group
        dtypes = {str(p.dtype) for p in self.parameters}
        if len(dtypes) != 1:
            raise ValueError(f"a unit needs parameters of one dtype, and has {sorted(dtypes)}")
        size, n, rank = sum(p.numel() for p in self.parameters), group.size(), group.rank()
        k = -(-size // n)
        self.mine, self.padding = slice(rank * k, (rank + 1) * k), n * k - size
        self.full = self.parameters[0].new_zeros(n * k)
        self.full_bytes = self.full.nbytes
        for p, view in zip(self.parameters, self.views(self.full)):
            view.copy_(p.data)
            p.data = view
        self.set_shard(self.full[self.mine])
        self.gathering = self.reducing = None           # what is on its way

    def set_shard(self, data):
        self.shard = nn.Parameter(data)
        self.shard.cuts = (common.Piece(self.mine.start, self.mine.stop, self.group.size()),)

    def views(self, flat):
        """The parts of a flat tensor in the shapes of the parameters."""
        parts = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [part.view(p.shape) for p, part in zip(self.parameters, parts)]

    # Parameters are gathered from the shards, and freed. What autograd saved of them is a view into
    # `full`, so that stays one tensor, and only its storage comes and goes.

    def start_gather(self):
        """Start to all_gather N·k numbers."""
        self.full.untyped_storage().resize_(self.full_bytes)
        self.gathering = common.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def finish_gather(self):
        if self.gathering:
            self.gathering.wait()
            self.gathering = None

    def free(self):
        self.full.untyped_storage().resize_(0)

    def gathered_bytes(self):
        return self.full.untyped_storage().nbytes()

    # Gradients are summed over the ranks, and each keeps its part of the sum.

    def start_reduce(self, flat, summed):
        """Start to reduce_scatter the N·k numbers of `flat` into the k of `summed`."""
        handle = common.reduce_scatter(summed, flat, group=self.group, async_op=True)
        self.reducing = handle, summed, flat            # flat must live until it is sent

    def finish_reduce(self):
        """Add the sum to the shard's gradient, and let go of the full one."""
        handle, summed, _ = self.reducing
        handle.wait()
        self.shard.grad = summed if self.shard.grad is None else self.shard.grad.add_(summed)
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


# ---------------------------------------------------------------------------------------- stage 1


class ShardedOptimizer:
    """ZeRO-1: a torch optimizer for this rank's shards, and all the rest on every rank.

    units: lists of parameters, or one plain list. make_optimizer(shards): any torch.optim
    class that treats each number by itself, not one with a norm per tensor. Gradients are views
    into one flat tensor per unit, which they keep: set them to zero with `zero_grad` of this class.
    """

    def __init__(self, units, make_optimizer, group):
        units = [units] if torch.is_tensor(units[0]) else units
        self.units = [Unit(parameters, group) for parameters in units]
        self.gradients = [torch.zeros_like(unit.full) for unit in self.units]
        self.optimizer = make_optimizer([unit.shard for unit in self.units])
        self.zero_grad()

    def zero_grad(self):
        for unit, flat in zip(self.units, self.gradients):
            flat.zero_()
            unit.shard.grad = None
            for p, view in zip(unit.parameters, unit.views(flat)):
                p.grad = view

    def reduce_gradients(self):
        """After the last backward: one reduce_scatter per unit, in place."""
        for unit, flat in zip(self.units, self.gradients):
            unit.start_reduce(flat, flat[unit.mine])
        for unit in self.units:
            unit.finish_reduce()

    def step(self):
        """Update the shards, then one all_gather of the parameters per unit."""
        self.optimizer.step()
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
    Raises ValueError if a parameter that requires a gradient is in no unit.

    Autograd runs a backward in the reverse order of its forward. So when the gradient of unit i's
    output is there, the backward of unit i+1 is over.
    """

    def __init__(self, module, units, group, replicas=None):
        super().__init__()
        self.module, self.replicas = module, replicas
        own = own_parameters(units)
        left = {p: name for name, p in module.named_parameters() if p.requires_grad}
        left = [name for p, name in left.items() if p not in set(sum(own, []))]
        if left:
            raise ValueError(f"in no unit: {', '.join(left)}")
        self.units = [Unit(parameters, group) for parameters in own if parameters]
        self.modules_of_units = [unit for unit, parameters in zip(units, own) if parameters]
        for i, unit in enumerate(self.modules_of_units):
            unit.register_forward_hook(functools.partial(self.after_forward, i))
        self.not_reduced, self.sending = 0, None

    def forward(self, *inputs, **more):
        self.not_reduced = len(self.units)
        return self.module(*inputs, **more)

    def after_forward(self, i, module, inputs, output):
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self.before_backward(i))

    def before_backward(self, i):
        self.reduce_down_to(i + 1)

    def reduce_down_to(self, i):
        """Start to reduce all units from the last to the i-th whose gradients are still here."""
        while self.not_reduced > i:
            self.not_reduced -= 1
            unit = self.units[self.not_reduced]
            flat = unit.take_gradients()
            if self.sending:                            # one at a time: two full gradients at most
                self.sending.finish_reduce()
            unit.start_reduce(flat, torch.empty_like(unit.shard))
            self.sending = unit

    def finish_backward(self):
        """After every backward: afterwards the gradients are in the shards alone."""
        self.reduce_down_to(0)
        self.sending.finish_reduce()
        self.sending = None

    def finish_gradients(self):
        """After the last backward of a step: sum the shards over the replicas, if there are any."""
        if self.replicas:
            handles = [dist.all_reduce(unit.shard.grad, group=self.replicas, async_op=True)
                       for unit in self.units]
            for handle in handles:
                handle.wait()

    def shards(self):
        return [unit.shard for unit in self.units]

    def zero_grad(self, set_to_none=True):
        for unit in self.units:
            unit.shard.grad = None

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
    if units share a parameter, which one would free while the other needs it.
    """

    def __init__(self, module, units, group, replicas=None, prefetch=1, keep_gathered=False):
        shared = [p for i, unit in enumerate(units) for p in unit.parameters()
                  if any(p is q for other in units[:i] for q in other.parameters())]
        if shared:
            raise ValueError(f"units share a parameter of shape {tuple(shared[0].shape)}: make one "
                             "unit of them")
        super().__init__(module, units, group, replicas)
        self.prefetch, self.keep_gathered, self.peak = prefetch, keep_gathered, 0
        for i, (unit, unit_module) in enumerate(zip(self.units, self.modules_of_units)):
            unit.set_shard(unit.shard.detach().clone())
            unit.free()
            unit_module.register_forward_pre_hook(functools.partial(self.before_forward, i))

    def gather(self, indices):
        """Wait for the first of these units, and start the gathers of the others."""
        for i in indices:
            if not self.units[i].gathered_bytes():
                self.units[i].start_gather()
        self.units[indices[0]].finish_gather()
        self.peak = max(self.peak, sum(unit.gathered_bytes() for unit in self.units))

    def before_forward(self, i, module, inputs):
        self.gather(range(i, min(i + self.prefetch + 1, len(self.units))))

    def after_forward(self, i, module, inputs, output):
        super().after_forward(i, module, inputs, output)
        if not (self.keep_gathered and torch.is_grad_enabled()):
            self.units[i].free()

    def before_backward(self, i):
        for unit in self.units[i + 1:]:
            unit.free()
        self.gather(range(i, max(i - self.prefetch, 0) - 1, -1))
        super().before_backward(i)

    def finish_backward(self):
        super().finish_backward()
        for unit in self.units:
            unit.free()

    def finish_step(self):
        """Nothing: the next forward gathers."""


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

    shards = [unit.shard for unit in optimizer.units]
    norm = grad_norm(shards, group)                     # each number of the gradient is on one rank
    if clip:
        clip_grads(shards, norm, clip)
    optimizer.step()
    return total, norm


def zero_step(zero, optimizer, micro_batches, valid, clip, group):
    """The same for stages 2 and 3, where every backward ends with the gradients in the shards."""
    zero.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(zero(tokens), targets) / valid
        loss.backward()
        zero.finish_backward()
        total += loss.detach()
    zero.finish_gradients()

    norm = grad_norm(zero.shards(), group)
    if clip:
        clip_grads(zero.shards(), norm, clip)
    optimizer.step()
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


def model_state_bytes(cfg, stage, optimizer, width, n):
    """Bytes of parameters, gradients and optimizer states per rank, at the end of a step.

    stage: 0 (data parallel), 1, 2 or 3. width: bytes of a number. n: the ranks that share.
    """
    units = padded_sizes(cfg, n if stage else 1)
    size = width * sum(units)
    tensors = len(units) if stage else 10 * cfg.layers + (3 if cfg.tie else 4)
    states = size // n if stage else size
    states = {"adamw": 2 * states + 4 * tensors, "momentum": states, "sgd": 0}[optimizer]
    return {"parameters": size // n if stage == 3 else size,
            "gradients": size // n if stage >= 2 else size, "optimizer states": states}


def traffic(cfg, stage, width, n, micro_batches, keep_gathered=False, replicas=1):
    """What a rank sends in a step: {op: (calls, payload bytes, wire bytes)}.

    n: the ranks of a shard group; replicas: the groups. The norm takes one number's all_reduce.
    """
    units = padded_sizes(cfg, n)
    size = width * sum(units)
    reduces = 1 if stage == 1 else micro_batches
    gathers = micro_batches * (1 if keep_gathered else 2) if stage == 3 else 1
    sent = {"reduce_scatter": (len(units) * reduces, size * reduces, (n - 1) / n * size * reduces),
            "all_gather": (len(units) * gathers, size * gathers, (n - 1) / n * size * gathers)}
    norm = max(width, 4) if n > 1 else 0
    shards = size // n if replicas > 1 else 0
    if norm or shards:
        wire = 2 * (n - 1) / n * norm + 2 * (replicas - 1) / replicas * shards
        calls = (len(units) if shards else 0) + (1 if norm else 0)
        sent["all_reduce"] = calls, shards + norm, wire
    return sent


def gathered_peak(cfg, width, n, prefetch, keep_gathered):
    """The most bytes of gathered parameters at a time in stage 3: a unit's and the next ones'."""
    units = padded_sizes(cfg, n)
    at_once = len(units) if keep_gathered else prefetch + 1
    return width * max(sum(units[i:i + at_once]) for i in range(len(units)))


# -------------------------------------------------------------------------------------- the picture

SHAPES = {"7B": common.PRESETS["7b"],
          "70B": common.Config(layers=86, dim=8192, heads=64, kv_heads=64, seq=4096, vocab=50304)}


def draw(points, dtype, optimizer, path):
    """Bytes per rank by formula, for two shapes and up to 1024 ranks. points: {stage: (ranks, bytes
    per parameter)} as measured, shown at the size of each shape."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    worlds = [2**i for i in range(11)]
    colors = {"parameters": "#355070", "gradients": "#e56b6f", "optimizer states": "#6d597a"}
    for axes, (name, cfg) in zip(figure.subplots(2, sharex=True), SHAPES.items()):
        for stage in range(4):
            places = [x + 0.2 * (stage - 1.5) for x in range(len(worlds))]
            width = common.DTYPES[dtype].itemsize
            held = [model_state_bytes(cfg, stage, optimizer, width, n) for n in worlds]
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
                          label="measured by this run" if stage == 1 else None)
        axes.axhline(80, color="gray", linestyle=":", linewidth=1)
        axes.text(len(worlds) - 0.4, 80, "80 GB", va="bottom", ha="right", color="gray", fontsize=8)
        axes.set_ylabel("GB per rank")
        axes.set_title(f"{name}: {cfg.parameters() / 1e9:.1f} B parameters, {dtype}, {optimizer}; "
                       "from left: data parallel, zero1, zero2, zero3", loc="left", fontsize=9)
    axes.set_xticks(range(len(worlds)), worlds)
    axes.set_xlabel("ranks")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=4,
                  frameon=False)
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run


def pieces(units, names):
    """(name, parameter) pairs of what this rank's shards hold, for the verifier."""
    for unit in units:
        first = 0                                       # of this parameter in the flat tensor
        for p in unit.parameters:
            lo, hi = max(first, unit.mine.start), min(first + p.numel(), unit.mine.stop)
            if lo < hi:
                here = slice(lo - unit.mine.start, hi - unit.mine.start)
                piece = nn.Parameter(unit.shard.detach()[here])
                piece.grad = unit.shard.grad[here]
                piece.cuts = (common.Piece(lo - first, hi - first, unit.group.size()),)
                yield names[p], piece
            first += p.numel()


def by_hand(args, variant, device, group, replicas=None):
    """A model under one of our variants. Returns its step, functions that give the tensors it holds
    and its named parameters, and the model as it is wrapped."""
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    names = {p: name for name, p in model.named_parameters()}
    make_optimizer = functools.partial(common.OPTIMIZERS[args.optimizer], lr=args.lr)
    if variant == "zero1":
        zero, sharded = model, ShardedOptimizer(own_parameters(model), make_optimizer, group)
        units, optimizer = sharded.units, sharded.optimizer
        step = functools.partial(zero1_step, model, sharded)
    else:
        if variant == "zero2":
            zero = Zero2(model, list(model), group)
        else:
            zero = Zero3(model, list(model), group, replicas, args.prefetch, args.keep_gathered)
        units, optimizer = zero.units, make_optimizer(zero.shards())
        step = functools.partial(zero_step, zero, optimizer)

    def held():
        gradients = [unit.shard.grad for unit in units] + [p.grad for p in names]
        parameters = [tensor for unit in units for tensor in (unit.full, unit.shard)]
        return parameters, gradients, list(optimizer.state.values())

    return functools.partial(step, group=group), held, lambda: pieces(units, names), zero


OPTIONS = ("lr", "betas", "eps", "weight_decay", "momentum")      # of a torch.optim class


def by_torch(args, device, mesh):
    """The same under PyTorch: stage 1 is DDP with ZeroRedundancyOptimizer, 2 and 3 fully_shard."""
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    group, n = mesh.get_group("shard"), mesh["shard"].size()
    like = common.OPTIMIZERS[args.optimizer]([torch.zeros(1)], args.lr)
    options = {k: v for k, v in like.defaults.items() if k in OPTIONS}
    if args.stage == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ddp = nn.parallel.DistributedDataParallel(model, process_group=group)
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


def train(args, ranks, mesh, text, run):
    """Train for --steps steps; check model states and traffic against their formulas."""
    group, n, copies = mesh.get_group("shard"), mesh["shard"].size(), mesh["replicate"].size()
    replicas = mesh.get_group("replicate") if copies > 1 else None
    if args.variant == "torch":
        step, held, named, zero = by_torch(args, ranks.device, mesh)
    else:
        step, held, named, zero = by_hand(args, args.variant, ranks.device, group, replicas)

    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)
        mine = [x.chunk(ranks.world)[ranks.rank].to(ranks.device) for x in (tokens, targets)]
        pairs = list(zip(*(x.split(args.micro_batch) for x in mine)))
        with run.measure(i):
            loss, norm = step(micro_batches=pairs, valid=valid, clip=args.clip)
        dist.all_reduce(loss)                           # for the report, and outside of the meters
        run.log(i, batch, loss, norm, named())

    stage = {"zero1": 1, "zero2": 2, "zero3": 3, "hsdp": 3, "torch": None}[args.variant]
    width = common.DTYPES[args.dtype].itemsize
    kinds = "parameters", "gradients", "optimizer states"
    formula = model_state_bytes(args.model, stage, args.optimizer, width, n) if stage else {}
    for kind, tensors in zip(kinds, held()):
        run.check(kind, nbytes(tensors), formula.get(kind))
    if stage == 3:
        peak = gathered_peak(args.model, width, n, args.prefetch, args.keep_gathered)
        run.check("gathered parameters, at the peak", zero.peak, peak)
    if stage:
        run.check_comm(traffic(args.model, stage, width, n, len(pairs), args.keep_gathered, copies))
    else:
        run.check_comm({op: (None, None, None) for op in run.comm.total})


def report(args, ranks, text, run):
    """Draw what the stages hold, with what a step of each held here."""
    tokens, targets, valid = text.batch(0)
    mine = [x.chunk(ranks.world)[ranks.rank][: args.micro_batch].to(ranks.device)
            for x in (tokens, targets)]
    points = {}
    for stage in (1, 2) if args.model.tie else (1, 2, 3):
        step, held, *_ = by_hand(args, f"zero{stage}", ranks.device, dist.group.WORLD)
        step(micro_batches=[mine], valid=valid, clip=None)
        total = sum(nbytes(tensors) for tensors in held())
        points[stage] = ranks.world, total / args.model.parameters()
        run.note(f"zero{stage} on {ranks.world} ranks holds {points[stage][1]:.2f} bytes per "
                 "parameter after a step")
    if ranks.rank == 0:
        draw(points, args.dtype, args.optimizer, args.plot)
    run.note(f"picture: {args.plot}")


def main(argv=None):
    variants = "zero1", "zero2", "zero3", "hsdp", "torch"
    parser = common.parser(__file__, __doc__, variants, default="zero3", steps=20)
    whole = functools.partial(common.number, int)
    parser.add_argument("--prefetch", type=whole(0, example=1, below=3), default=1,
                        help="units to gather ahead of the one that computes (zero3, hsdp)")
    parser.add_argument("--keep-gathered", action="store_true",
                        help="keep parameters from forward to backward (zero3, hsdp)")
    parser.add_argument("--shard-size", type=whole(1, example=2), help="ranks of a group (hsdp)")
    parser.add_argument("--stage", type=whole(1, example=3, below=4), default=3, help="of torch")
    parser.set_defaults(plot="runs/03_zero.png")
    args = common.parse(parser, argv)
    world = common.environment("WORLD_SIZE", 1)
    common.split_batch(args, world)
    if args.model.tie and args.variant in ("zero3", "hsdp", "torch"):
        common.refuse(f"--preset {args.preset} ties embedding and head, which --variant "
                      f"{args.variant} keeps in two units; --variant zero2 would work")
    shard_size = world
    if args.variant == "hsdp":
        shard_size = args.shard_size or (world // 2 if world % 2 == 0 else world)
        if world % shard_size:
            common.refuse(f"--shard-size {shard_size} does not divide {world} ranks; "
                          f"{math.gcd(world, shard_size)} would work")
    text = common.Text(args)
    ranks = common.start(args)

    mesh = init_device_mesh(ranks.device.type, (world // shard_size, shard_size),
                            mesh_dim_names=("replicate", "shard"))
    build = functools.partial(gpt, args.model, args.seed, ranks.device, common.DTYPES[args.dtype])
    run = common.Run(args, ranks, text, build, settings(args, shard_size))
    train(args, ranks, mesh, text, run)
    report(args, ranks, text, run)
    return run.finish()


def settings(args, shard_size):
    """The chapter's own settings in words, those that matter to the variant."""
    if args.variant == "torch":
        return f"stage {args.stage}"
    if args.variant in ("zero1", "zero2"):
        return ""
    kept = ", gathered parameters kept" * args.keep_gathered
    return f"prefetch {args.prefetch}{kept}, shards over {shard_size} ranks"


if __name__ == "__main__":
    common.launch(main)
