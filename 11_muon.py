r"""11 · Muon: an optimizer that needs the whole matrix.

Every optimizer so far treats each number by itself. So chapter 03 may cut anywhere: a rank updates
the numbers that it holds, and need not know whose they are. Muon asks for the matrix.

The momentum of a matrix, M = U S V^T, has a few large singular values and many small ones. A step
along M moves the weights far in a few directions, and hardly in the others. Muon takes U V^T in
place of M: the same directions, all as far. An SVD would be slow. Newton-Schulz comes near with
matmuls alone. X begins as M over its norm, so that no singular value is above 1. Five times,
X becomes a·X + b·(X·X^T)·X + c·(X·X^T)²·X. That applies a·s + b·s³ + c·s⁵ to each singular value s,
and leaves U and V as they are. (a, b, c) = (3.4445, -4.7750, 2.0315) lift a small s by 3.4 in each
step: five bring all from 0.002 on to between 0.68 and 1.21, and nearer to 1 they need not be.

    W  <-  (1 - lr · decay) · W  -  lr · 0.2 · sqrt(max(m, n)) · U V^T                  W: (m, n)

The root mean square of U V^T is 1/sqrt(max(m, n)), so that of an update is 0.2, about AdamW's. Then
one learning rate can serve both: Muon's, for the matrices of blocks, and AdamW's, for the tables,
the head, and norms. q, k, v and o are one matrix each, with all their heads, as in PyTorch's; so
are up, gate and down, each expert's, and a router.

    optimizer states, in fp32     AdamW 4 + 4 bytes a number      Muon 4, the momentum
    FLOPs of an (m, n), m <= n    AdamW some m·n                  Muon 5 · (4·m²·n + 2·m³)

A step of t tokens takes 6·t·m·n with that matrix. For a square one Muon adds 5·m/t: with 4 million
tokens and m = 4,096 half a percent. But if 128 ranks share these tokens, and each orthogonalizes
all matrices, Muon adds 128 times that, 65%.

Under ZeRO a rank has a run of numbers, which may begin and end inside of a matrix. It can keep the
momentum of these, since that is a sum. But U V^T of a part is no part of U V^T. A rank that
orthogonalizes what it has trains on, by other updates for each number of ranks: nothing fails
(DeepSpeed#7807, and others in the museum). Three ways are right. With Ψ numbers in all matrices and
F FLOPs for them, each of N ranks

                          sends more than under AdamW    computes
    --variant gather      (N-1)/N · Ψ                    F
    --variant owner       nothing                        F/N or more
    --variant deal        2 · (N-1)/N · Ψ/N              F/N or more

gather. Every rank gathers the updates of all, and orthogonalizes every matrix. It is the simplest.
(Shards travel as they are, with what they have of norms.)

owner. Shards end where matrices end, so that one rank has all of a matrix. Gradients are reduced to
this owner in place of a reduce_scatter, and what it updated is broadcast in place of an all_gather:
as many bytes, N ranks together (a report counts each message in full). With few matrices for many
ranks, some hold more than 1/N, and others wait. (torchtitan#3502; nanochat.)

deal. Shards stay as they are. For the update alone, an all_to_all brings each matrix to one rank,
which orthogonalizes it, and another one brings its parts back. That is N/2 times less than to
gather. As it asks nothing of the shards, `--optimizer muon` does it in chapters 03 and 09, too.
(torchtitan#4060; Dion.)

Who gets which matrix? The one with the most FLOPs first, each goes to the rank with the least so
far (`share_out`). A run reports the busiest rank's FLOPs over the mean.

Under tensor parallelism (chapters 04, 05, 09) a rank has some rows of a matrix, or some columns.
`whole` gathers the update along each cut, all t ranks compute the same, and each keeps its part.
That sends (t-1)/t · m·n. If the longer side n is cut, one could sum X·X^T over the parts instead:
it gives an (m, m), by which each rank multiplies its own part. That sends 2·(t-1)/t · m², less
if n > 2·m: half, for an MLP of 4·h hidden features, and twice as much for q. (But it squares
singular values, and rounding drowns the small ones.) Experts (chapters 08, 09) are not cut.

Rounding. With --precision bf16 updates are rounded to bf16 before they are sent, and Newton-Schulz
is bf16 matmuls, as PyTorch's own always is. Of random numbers, entries are then off by 2.5% of the
largest at most. Where singular values are zero, what rounding leaves there is lifted like all else:
of a (512, 128) of rank 20, entries are off by half of the largest.

Run it:
    torchrun --nproc_per_node=4 11_muon.py                                  # or --variant owner
    torchrun --nproc_per_node=3 11_muon.py --variant gather --zero 3 --batch 6
    torchrun --nproc_per_node=8 09_5d.py --dp 2 --pp 2 --tp 2 --zero 1 --optimizer muon

Sources: Jordan et al., Muon (2024); Liu et al., Muon is Scalable for LLM Training (2025), parts
2 and 3; Ahn et al., Dion (2025); torchtitan#4060, DistMuon; torch.optim.Muon.
"""

import math
from collections import namedtuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import OPTIMIZERS, Refused, gpt, grad_norm, loss_sum, part

# ------------------------------------------------------------------------------------ on one GPU

def orthogonalize(x, steps=5):
    """Newton-Schulz: a matrix U S V^T, (m, n), to about U V^T."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x                           # so that x·x^T is the smaller product
    x = x / x.norm().clamp(min=1e-7)                    # no singular value is above 1
    for _ in range(steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """For the matrices of blocks (by p.global_name), and AdamW for all else, in one state."""

    def __init__(self, parameters, lr=None, momentum=0.95, weight_decay=0.01):
        kinds = {True: [], False: []}
        for p in parameters:
            kinds[is_matrix(p)].append(p)
        lr = lr or 4e-3                                 # pages/today.md has others
        super().__init__([{"params": kinds[True]}, {"params": kinds[False]}],
                         {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.adamw = OPTIMIZERS["adamw"](self.param_groups[1:], lr)

    @torch.no_grad()
    def step(self):
        self.adamw.param_groups, self.adamw.state = self.param_groups[1:], self.state
        self.adamw.step()
        group = self.param_groups[0]
        lr, mu = group["lr"], group["momentum"]
        matrices = [p for p in group["params"] if p.grad is not None]

        def updates():                                  # one at a time: no other is in memory
            for p in matrices:
                if p not in self.state:
                    self.state[p] = {"momentum_buffer": torch.zeros_like(p)}
                momentum = self.state[p]["momentum_buffer"]
                momentum.lerp_(p.grad, 1 - mu)
                yield narrow(p, p.grad.lerp(momentum, mu))      # Nesterov's

        for p, update in zip(matrices, self.orthogonal(matrices, updates())):
            p.mul_(1 - lr * group["weight_decay"])
            p.sub_(update, alpha=lr * 0.2 * max(whole_shape(p)) ** 0.5)

    def orthogonal(self, matrices, updates):            # of the same shapes
        return map(orthogonal, updates)


def orthogonal(x):
    """Of a matrix, or of each expert's, (experts, m, n)."""
    return orthogonalize(x) if x.ndim == 2 else torch.stack([*map(orthogonalize, x)])


def parameter_of(p):
    """The parameter of which p is a piece (`pieces_of`), or p."""
    return p.flat[0][0] if hasattr(p, "flat") else p


def is_matrix(p):
    """Whether it is Muon's."""
    p = parameter_of(p)
    return p.ndim > 1 and p.global_name.startswith("block")


def whole_shape(p):
    """(m, n) of the whole matrix, of which p may be a part."""
    p = parameter_of(p)
    return getattr(p, "full_shape", p.shape)[-2:]


def narrow(p, update):
    """Rounded to bf16 where p is the master of 16-bit weights."""
    return update.bfloat16() if getattr(p, "rounded", p.dtype).itemsize == 2 else update


# -------------------------------------------------------------------------- matrices that are cut

def whole(x, cuts):
    """All of a tensor of which this rank has part(x, cuts): an all_gather along each cut."""
    for dim, _, parts, group in reversed(cuts):
        everyones = x.new_empty(group.size(), *x.shape)
        common.all_gather(everyones.flatten(0, 1), x.contiguous(), group=group)
        x = torch.cat([*everyones[::group.size() // parts]], dim)   # neighbours may hold the same
    return x


def orthogonal_part(p, x):
    """Of an update of which this rank has what it has of p, its part. (Experts are not cut.)"""
    cuts = [cut for cut in getattr(p, "cuts", ()) if cut.dim >= p.ndim - 2]
    return part(orthogonal(whole(x, cuts)), cuts)


def has_copies(p):
    """Whether neighbours hold the same part of p, since they share a kv head."""
    return any(cut.parts < cut.group.size() for cut in getattr(p, "cuts", ()))


# -------------------------------------------------------------------- shards of ZeRO, cut anywhere

def pieces_of(shard):
    """Of a flat shard, each run that lies in one parameter: [(the run as a parameter, where it is
    in the shard)]. So every number has an optimizer, and a state, by what it belongs to."""
    (parameters, start, group), pieces = shard.flat, []
    for p in parameters:                                # start: of the shard, from where p begins
        where = slice(max(0, -start), min(p.numel() - start, len(shard)))
        if where.start < where.stop:
            piece = nn.Parameter(shard.detach()[where])
            piece.flat = [p], max(0, start), group
            piece.rounded = getattr(shard, "rounded", shard.dtype)
            pieces.append((piece, where))
        start -= p.numel()
    return pieces


class Matrix(namedtuple("Matrix", "p update begin shape")):
    """One in a flat unit, from number `begin` on: p, or one of its experts. update: (k,), what this
    rank has of the unit's."""

    def run_on(self, rank):
        """Which numbers of that rank's shard belong to it."""
        ends = [self.begin - rank * len(self.update) + more for more in (0, math.prod(self.shape))]
        return slice(*[min(max(0, end), len(self.update)) for end in ends])

    def length(self, rank):
        run = self.run_on(rank)
        return run.stop - run.start


def matrices_of(shards, updates):
    """Every Matrix of these shards' units, in the same order on all ranks that share them."""
    found = []
    for shard, update in zip(shards, updates):
        at = 0
        for p in shard.flat[0]:
            shape = p.shape[-2:]
            starts = range(at, at + p.numel(), math.prod(shape)) if is_matrix(p) else ()
            found += [Matrix(p, update, start, shape) for start in starts]
            at += p.numel()
    return found


def gather(shards, updates):
    """Every rank gathers all updates, (k,) of a shard, and orthogonalizes every matrix. In place.
    Communication: an all_gather for each shard."""
    for shard, update in zip(shards, updates):
        group = shard.flat[2]
        full = update.new_empty(group.size() * len(update))
        common.all_gather(full, update, group=group)
        for p, _, begin, shape in matrices_of([shard], [update]):
            x = full[begin:begin + math.prod(shape)].view(shape)
            x.copy_(orthogonal_part(p, x))
        update.copy_(full.chunk(group.size())[group.rank()])


def work(shape, steps=5):
    """FLOPs of Newton-Schulz on an (m, n): in each step two matmuls with all of it, and a square's
    own."""
    m, n = sorted(shape[-2:])
    return steps * (4 * m * m * n + 2 * m**3)


def share_out(work, n):
    """The owner of each, of n ranks: the largest first, each to the rank that has least so far."""
    owners, busy = [0] * len(work), [0] * n
    for i in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        owners[i] = busy.index(min(busy))
        busy[owners[i]] += work[i]
    return owners


def deal(shards, updates):
    """Each matrix goes to one rank, which orthogonalizes it, and its parts go back. In place.
    Communication: an all_to_all there and one back, of all matrices of these shards together."""
    group, matrices = shards[0].flat[2], matrices_of(shards, updates)
    ranks, me = range(group.size()), group.rank()
    owners = share_out([work(whole_shape(matrix.p)) for matrix in matrices], len(ranks))
    hands = [[x for x, owner in zip(matrices, owners) if owner == rank] for rank in ranks]

    def exchange(tensors, sent, received):              # numbers to each rank, and from each
        out = tensors[0].new_empty(sum(received))
        dist.all_to_all_single(out, torch.cat(tensors), received, sent, group=group)
        return out

    here = [x.update[x.run_on(me)] for hand in hands for x in hand]     # by who gets it
    sent = [sum(x.length(me) for x in hand) for hand in hands]
    lengths = [[x.length(rank) for x in hands[me]] for rank in ranks]   # of mine, on each rank
    received = [sum(of_rank) for of_rank in lengths]
    runs = exchange(here, sent, received).split([n for of_rank in lengths for n in of_rank])

    for i, x in enumerate(hands[me]):
        own = runs[i::len(hands[me])]                   # from rank 0, 1, ...
        full = orthogonal_part(x.p, torch.cat(own).view(x.shape)).flatten()
        for run, done in zip(own, full.split([len(run) for run in own])):
            run.copy_(done)
    runs = exchange([*runs, here[0][:0]], received, sent).split([len(run) for run in here])
    for run, done in zip(here, runs):
        run.copy_(done)


def owner(shards, updates):
    """Each matrix lies whole in one rank's shard. In place. No communication."""
    for shard, update in zip(shards, updates):
        for p, _, begin, shape in matrices_of([shard], [update]):
            start = begin - shard.flat[1]
            if 0 <= start < len(update):
                x = update[start:start + math.prod(shape)].view(shape)
                x.copy_(orthogonal_part(p, x))


WAYS = {"deal": deal, "gather": gather, "owner": owner}


class ShardedMuon(Muon):
    """For parameters that may be cut (p.cuts), or for flat shards (shard.flat). way: of WAYS."""

    def __init__(self, parameters, lr=None, way="deal"):
        parameters, self.way = list(parameters), way
        self.shards = [p for p in parameters if hasattr(p, "flat")]
        self.places = {piece: (shard, where) for shard in self.shards
                       for piece, where in pieces_of(shard)}
        super().__init__(self.places if self.shards else parameters, lr)

    def look(self):
        """Let the pieces be views of their shards, whose memory may have moved."""
        for piece, (shard, where) in self.places.items():
            piece.data = shard.data[where]
            piece.grad = None if shard.grad is None else shard.grad[where]

    def step(self):
        self.look()
        super().step()
        for piece in self.places:
            piece.grad = None                           # the shard keeps it

    def orthogonal(self, matrices, updates):
        if not self.shards:
            return map(orthogonal_part, matrices, updates)
        rooms, together = {}, {}                        # for a shard's updates; by who shares it
        for shard in self.shards:
            if any(map(is_matrix, shard.flat[0])):
                rooms[shard] = narrow(shard, shard.new_empty(0)).new_zeros(len(shard))
                together.setdefault(shard.flat[2], []).append(shard)
        for p, update in zip(matrices, updates):
            shard, where = self.places[p]
            rooms[shard][where] = update
        for shards in together.values():
            flats = [rooms[shard].to(shard.flat[0][0].device) for shard in shards]  # if offloaded
            # The owner of a kv head's copy would wait for its tp neighbours, who have another one.
            shared = [p for shard in shards for p in shard.flat[0] if has_copies(p)]
            WAYS["gather" if shared else self.way](shards, flats)
            rooms |= {shard: flat.to(shard.device) for shard, flat in zip(shards, flats)}
        return [rooms[shard][where] for shard, where in map(self.places.get, matrices)]


# ------------------------------------------------------------------------ units, from chapter 03

def layout(model, n, by_owner):
    """[(a module's parameters, how many of their numbers each rank keeps)]. by_owner: a matrix is
    on one rank, whole; else shards are equal, and cut anywhere."""
    matrices = [p for p in model.parameters() if is_matrix(p)]
    owners = dict(zip(matrices, share_out([work(p.shape) for p in matrices], n)))
    units, seen = [], set()
    for module in model:
        own = [p for p in module.parameters() if p not in seen]     # a tied table is the first's
        seen.update(own)
        if by_owner and any(p in owners for p in own):
            own.sort(key=lambda p: owners.get(p, 0))    # norms are rank 0's
            sizes = [sum(p.numel() for p in own if owners.get(p, 0) == rank) for rank in range(n)]
        else:
            sizes = [-(-sum(p.numel() for p in own) // n)] * n
        units.append((own, sizes))
    return units


class Unit:
    """The parameters of a module in one flat tensor, `full`; this rank updates sizes[rank] of its
    numbers, the shard. stage: ZeRO's. No message hides here (chapter 03's do)."""

    def __init__(self, parameters, sizes, group, stage):
        self.parameters, self.sizes, self.group, self.stage = parameters, sizes, group, stage
        self.padding = sum(sizes) - sum(p.numel() for p in parameters)
        self.full = self.flatten([p.detach() for p in parameters])
        self.shard = nn.Parameter(self.mine(self.full))
        self.shard.flat = parameters, sum(sizes[:group.rank()]), group
        self.shard.copies = 1                           # for the norm: each number is in one shard

    def flatten(self, tensors):
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(self.padding)])

    def mine(self, flat):
        return flat.split(self.sizes)[self.group.rank()]

    def views(self, flat):
        """Views in the shapes of the parameters."""
        pieces = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [x.view(p.shape) for x, p in zip(pieces, self.parameters)]

    def hold(self, full):
        """Before the first step: what computes is a view of `full`, which may be rounded."""
        self.full, self.shard.data = full, self.mine(full)
        for p, view in zip(self.parameters, self.views(full)):
            p.data, p.grad_dtype = view, self.shard.grad_dtype
        if self.stage == 3:
            self.shard.data = self.shard.data.clone()
            self.free()

    def free(self):
        if self.stage == 3:                             # what autograd saved will show the next one
            self.full.untyped_storage().resize_(0)

    def gather(self):
        """All that was updated, to all ranks: from equal shards, or from each owner."""
        if self.stage == 3:
            self.full.untyped_storage().resize_(self.full.nbytes)
        if len(set(self.sizes)) == 1:
            return common.all_gather(self.full, self.shard.data, self.group)
        self.mine(self.full).copy_(self.shard.data)
        for rank, own in enumerate(self.full.split(self.sizes)):
            if len(own):
                dist.broadcast(own, group=self.group, group_src=rank)

    def reduce(self):
        """The sum of all ranks' gradients, to those who update them."""
        flat = self.flatten([torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
                             for p in self.parameters])
        mine = torch.empty_like(self.mine(flat))
        if len(set(self.sizes)) == 1:
            common.reduce_scatter(mine, flat, group=self.group)
        else:
            for rank, own in enumerate(flat.split(self.sizes)):
                if len(own):
                    dist.reduce(own, group=self.group, group_dst=rank)
            mine.copy_(self.mine(flat))
        before = self.shard.grad                        # of earlier micro-batches
        self.shard.grad = mine if before is None else before.add_(mine)
        for p in self.parameters:
            p.grad = None


def train_step(model, units, optimizer, micro_batches, valid, clip):
    """One step. Returns this rank's part of the loss, and the norm. valid: the valid targets of the
    whole batch. A module reads a detached input: so its backward is ours to call."""
    stage, total = units[0].stage, 0
    for unit in units:
        unit.shard.grad = None
        if stage < 3:
            unit.gather()
    for count, (tokens, targets) in enumerate(micro_batches, start=1):
        out, graphs = tokens, []
        for unit, module in zip(units, model):
            if stage == 3:
                unit.gather()
            x = out.detach().requires_grad_(out.is_floating_point())    # tokens have no gradient
            out = module(x)                             # (micro_batch, seq, dim); logits at the end
            graphs.append((x, out))
            unit.free()
        out = loss_sum(out, targets) / valid
        total, grad = total + out.detach(), None
        graphs[-1] = graphs[-1][0], out

        for unit in reversed(units):
            if stage == 3:
                unit.gather()
            x, out = graphs.pop()
            torch.autograd.backward(out, grad)
            grad = x.grad
            unit.free()
            if stage > 1 or count == len(micro_batches):
                unit.reduce()

    shards = [unit.shard for unit in units]
    norm = grad_norm(shards, units[0].group)
    if clip:
        clip_grads_with_norm_(shards, clip, norm)
    optimizer.step()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas

def step_costs(shapes, n):
    """{way: (numbers that a rank sends more than under AdamW, FLOPs of the busiest rank)}, of
    matrices of these shapes on n ranks of ZeRO."""
    numbers, works = sum(map(math.prod, shapes)), [work(shape) for shape in shapes]
    owners = share_out(works, n)
    busiest = max(sum(w for w, owner in zip(works, owners) if owner == rank) for rank in range(n))
    share = (n - 1) / n
    return {"gather": (share * numbers, sum(works)), "owner": (0, busiest),
            "deal": (2 * share * numbers / n, busiest)}


def traffic(units, stage, n, micro_batches, widths):
    """What a rank sends in a step, but for the optimizer: {op: (calls, payload, wire bytes)}.
    units: `layout`. widths: bytes of a parameter, and of a gradient."""
    gathers = 2 * micro_batches if stage == 3 else 1
    sent = {"all_reduce": (n > 1, max(widths[1], 4) * (n > 1), 2 * (n - 1) / n * max(widths[1], 4))}
    for _, sizes in units:
        is_even, size = len(set(sizes)) == 1, sum(sizes)
        calls, wire = (1, (n - 1) / n) if is_even else (sum(map(bool, sizes)), 1)
        for times, width, op in ((gathers, widths[0], "all_gather" if is_even else "broadcast"),
                                 (micro_batches if stage > 1 else 1, widths[1],
                                  "reduce_scatter" if is_even else "reduce")):
            more = times * calls, times * width * size, times * width * size * wire
            sent[op] = tuple(map(sum, zip(sent.get(op, (0, 0, 0)), more)))
    return sent


# ----------------------------------------------------------------------------------------- the run

def train(run):
    args, group = run.args, run.mesh(dp=run.world).get_group()
    model = run.draw(gpt(args.model, seed=None))
    common.recompute(model, args.recompute)
    units = [Unit(*unit, group, args.zero)
             for unit in layout(model, run.world, args.variant == "owner")]
    optimizer = run.mixed([unit.shard for unit in units])
    getattr(optimizer, "optimizer", optimizer).way = args.variant       # of the masters', if any
    for unit in units:
        unit.hold(unit.full.to(common.rounded(args)))
    for batch in run.batches(share=run.rank):
        with run.measure():
            loss, norm = train_step(model, units, optimizer, batch.micro_batches, batch.valid,
                                    args.clip)
        dist.all_reduce(loss)                           # for the report
        run.log(batch, loss, norm, model, units)


def train_torch(run):
    """PyTorch's, of whole parameters on every rank; it always computes in bf16."""
    from torch.nn.parallel import DistributedDataParallel
    args = run.args
    model = run.draw(gpt(args.model, seed=None))
    common.recompute(model, args.recompute)
    optimizer = run.optimizer(model.parameters())
    theirs = torch.optim.Muon(optimizer.param_groups[0]["params"], optimizer.defaults["lr"],
                              weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    theirs.state = optimizer.adamw.state = optimizer.state      # which a checkpoint has
    ddp = DistributedDataParallel(model)
    for batch in run.batches(share=run.rank):
        with run.measure():
            optimizer.zero_grad()
            loss = 0
            for tokens, targets in batch.micro_batches:
                share = loss_sum(ddp(tokens), targets) / batch.valid
                (run.world * share).backward()          # DDP averages
                loss += share.detach()
            norm = grad_norm(model.parameters())
            clip_grads_with_norm_(model.parameters(), args.clip or math.inf, norm)
            theirs.step()
            optimizer.adamw.step()
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)


def formulas(args, rank, ranks, model):
    if args.variant == "torch":
        return {}
    p, g, zero = common.rounded(args).itemsize, common.DTYPES[args.dtype].itemsize, args.zero
    units = layout(model, ranks, args.variant == "owner")
    whole, own = sum(sum(sizes) for _, sizes in units), sum(sizes[rank] for _, sizes in units)
    shapes = [q.shape for q in model.parameters() if is_matrix(q)]
    costs = step_costs(shapes, ranks)
    notes = ["each way, by formula, for the matrices alone:", *(
        f"  {way:<8}{sent * min(p, g) / 1e6:9.3f} MB more than under AdamW{flops / 1e9:9.3f} "
        "GFLOP on the busiest rank" for way, (sent, flops) in costs.items())]
    m = args.batch // args.shares // args.micro_batch
    return {"sent": traffic(units, zero, ranks, m, (p, g)),
            "states": {"parameters": p * (own if zero == 3 else whole), "gradients": g * own,
                       "masters": g * own if args.precision == "bf16" else 0},
            "kept": {"outside": 1}, "notes": notes}     # as one GPU


def requires(args, ranks):
    common.split_batch(args, ranks)
    if args.optimizer != "muon":
        raise Refused(f"--optimizer {args.optimizer} is chapter 03's", "--optimizer muon")
    if args.model.tie and args.zero == 3:
        raise Refused(f"--preset {args.preset} ties embedding and head, which --zero 3 gathers one "
                      "by one", "--zero 2")


def flags(parser):
    parser.add_argument("--zero", type=int, choices=(1, 2, 3), default=1, help="ZeRO's stage")
    parser.set_defaults(optimizer="muon")


VARIANTS = {**dict.fromkeys(("deal", "gather", "owner"), (train, "--zero")), "torch": train_torch}

if __name__ == "__main__":
    OPTIMIZERS["muon"] = ShardedMuon                    # this file's, whatever it is called
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
