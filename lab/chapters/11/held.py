"""What --optimizer muon adds to what a run is held to: bytes of momentum, FLOPs and messages, by
the layout of what its optimizer updates: parameters, p.cuts, and flat shards, p.flat."""

import math

from lab import chapters
from lab.run.instrument import Instrument
from lab.run.meters import name_of
from lab.run.rectangles import trained

STEPS = 5               # of Newton-Schulz


def is_ours(run):
    """Whether chapter 11's optimizer does the update: always, but in its own --variant torch."""
    is_pytorchs = run.args.variant == "torch" and run.args.chapter.startswith("11")
    return run.args.optimizer == "muon" and not is_pytorchs


def is_matrix(p):
    return p.ndim > 1 and p.global_name.startswith("block")


def state_bytes(run):
    """A momentum for matrices of blocks; two moments, and a step count each, for what is left."""
    size = 0
    for optimizer in run.optimizers:
        for p in trained(optimizer):
            [of], *_ = getattr(p, "flat", ([p],))
            size += p.nbytes if is_matrix(of) else 2 * p.nbytes + 4
    return size


def flops_of(q):
    """Newton-Schulz on a matrix, or on one expert's: in each step x·x^T, its square, and the
    polynomial's product with x."""
    m, n = sorted(getattr(q, "full_shape", q.shape)[-2:])
    return STEPS * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def matrices(p):
    """[(parameter, numbers that this rank holds of it, or of one expert)]: of a flat shard's."""
    return [(q, math.prod(q.shape[-2:]))
            for q in (p.flat[0] if hasattr(p, "flat") else [p]) if is_matrix(q)
            for _ in range(len(q) if q.ndim > 2 else 1)]


def matrices_inside(shard):
    """Those that begin in the shard."""
    parameters, start, _ = shard.flat
    for q in parameters:
        if is_matrix(q) and -len(shard) < start <= 0:
            yield q, q.numel()
        start -= q.numel()


def held(shard):
    """The numbers of a flat shard that are of matrices."""
    parameters, start, _ = shard.flat
    count = 0
    for q in parameters:
        count += is_matrix(q) * max(0, min(q.numel() - start, len(shard)) - max(0, -start))
        start -= q.numel()
    return count


class Cost:
    """Of a rank's step: FLOPs, and what is sent, {group: {op: [calls, payload]}}."""

    def __init__(self, width):
        self.flops, self.sent, self.width = 0, {}, width

    def send(self, group, op, numbers):
        seen = self.sent.setdefault(group, {}).setdefault(op, [0, 0])
        seen[0] += 1
        seen[1] += numbers * self.width

    def orthogonalize(self, q):
        """A matrix: gathered along its cuts, and computed."""
        numbers = q.numel()
        for cut in reversed(getattr(q, "cuts", ())):
            if cut.dim >= q.ndim - 2:
                self.send(cut.group, "all_gather", numbers * cut.group.size())
                numbers *= cut.parts
        self.flops += flops_of(q)


def cost_of_step(run):
    """The Cost of this rank."""
    found, eleven = Cost(min(run.rounded.itemsize, run.dtype.itemsize)), chapters.chapter("11")
    for optimizer in run.optimizers:
        together = {}
        for shard in optimizer.shards:
            if matrices(shard):
                together.setdefault(shard.flat[2], []).append(shard)
        for group, shards in together.items():
            all_of_them = [pair for shard in shards for pair in matrices(shard)]
            if optimizer.way == "owner":
                mine = [pair for shard in shards for pair in matrices_inside(shard)]
            elif optimizer.way == "gather" or any(eleven.has_copies(q) for q, _ in all_of_them):
                for shard in shards:
                    found.send(group, "all_gather", len(shard) * group.size())
                mine = all_of_them
            else:
                owners = eleven.share_out([flops_of(q) for q, _ in all_of_them], group.size())
                mine = [x for x, owner in zip(all_of_them, owners) if owner == group.rank()]
                found.send(group, "all_to_all", sum(map(held, shards)))
                found.send(group, "all_to_all", sum(numbers for _, numbers in mine))
            for q, _ in mine:
                found.orthogonalize(q)
        for p in trained(optimizer):
            for q, _ in matrices(p) if not hasattr(p, "flat") else ():
                found.orthogonalize(q)
    return found


def add_traffic(run, sent, by_axis):
    """To {op: (calls, payload, wire)}, or to that of each axis, what the optimizer sends."""
    for group, ops in cost_of_step(run).sent.items():
        for op, (calls, payload) in ops.items():
            of_axis = sent.setdefault(name_of(group), {}) if by_axis else sent
            wire = payload * (group.size() - 1) / group.size()
            before = of_axis.get(op, (0, 0, 0))
            of_axis[op] = tuple(map(sum, zip(before, (calls, payload, wire))))
    return sent


def hold_flops(run):
    """Of Newton-Schulz, on this rank; and how far the busiest is above the mean. Communication,
    after all measurements: an all_gather_object."""
    flops = cost_of_step(run).flops
    run.check(("FLOPs", "FLOPs of a step", "Newton-Schulz"), run.flops.optimizer, flops, "FLOP")
    run.flops_of["Newton-Schulz"] = run.flops.optimizer
    everyones = run.of_all_ranks(flops)
    if max(everyones) > 0 and len(everyones) > 1:
        mean = sum(everyones) / len(everyones)
        run.note(f"Newton-Schulz: the busiest rank computes {max(everyones) / mean:.2f} times the "
                 "mean")


class Held(Instrument):
    """Of every run with --optimizer muon. In chapter 11's --variant torch, PyTorch's does it."""

    def moments(self, run):
        return state_bytes(run) if is_ours(run) or "states" in run.answer else None

    def flops(self, run, answer):
        if is_ours(run):
            hold_flops(run)
        return {}

    def add_traffic(self, run, sent, by_axis):
        if is_ours(run):
            add_traffic(run, sent, by_axis)
