"""The run of chapter 00: rounds and bytes of all ranks beside their formulas, who would wait for
ever, and what backward makes of each collective.

A rank has written down, for each of its rounds, to whom it has sent, how many bytes, and from whom
it has received. From that of all ranks follows when each message could pass on the strictest
network there is, one that stores nothing: a rank is in one round at a time, and a message passes
when its sender and its receiver have both come to it.
"""

import json

import torch
import torch.distributed as dist

import common
from common import environment
from lab import meeting
from lab.bench import Bench
from lab.words import quantity


def in_rounds(everyones):
    """The messages that pass in each round, [(sender, receiver, bytes), ...], if no rank begins one
    before both ends of those of its last one have come to them. everyones: for each rank, its
    rounds (to, bytes, source). Raises ValueError, which names who waits, if that has no end."""
    now, passed = [0] * len(everyones), []
    sends, receives = {}, {}            # of each pair: the sender's rounds, the receiver's
    for rank, mine in enumerate(everyones):
        for i, (to, _, source) in enumerate(mine):
            if to is not None:
                sends.setdefault((rank, to), []).append(i)
            if source is not None:
                receives.setdefault((source, rank), []).append(i)

    def other_is_there(pair, i, mine, others, other):
        """Whether the other end of a message that a rank has in its round i has come to it."""
        which = mine[pair].index(i)
        return which < len(others.get(pair, [])) and others[pair][which] <= now[other]

    while any(i < len(mine) for i, mine in zip(now, everyones)):
        ending = []
        for rank, mine in enumerate(everyones):
            if now[rank] < len(mine):
                to, _, source = mine[now[rank]]
                sent = to is None or other_is_there((rank, to), now[rank], sends, receives, to)
                received = source is None or other_is_there(
                    (source, rank), now[rank], receives, sends, source)
                if sent and received:
                    ending.append(rank)
        if not ending:
            waiting = [f"rank {rank}" for rank, mine in enumerate(everyones)
                       if now[rank] < len(mine)]
            raise ValueError(f"on a network that stores nothing, {', '.join(waiting)} would wait "
                             "for ever")
        passed.append([(rank, everyones[rank][now[rank]][0], everyones[rank][now[rank]][1])
                       for rank in ending if everyones[rank][now[rank]][0] is not None])
        for rank in ending:
            now[rank] += 1
    return passed


# ------------------------------------------------------------------------------------------ duality

def own_parts(n, numbers):
    """(n, n·numbers): 1 where a column is in the row's own part."""
    return torch.eye(n, dtype=torch.float64).repeat_interleave(numbers, dim=1)


def as_one(name, X, own, first):
    """What n ranks make of their tensors, the rows of X (n, n·numbers), as one process does it.
    own: 1 in each row's own part. first: 1 in the first row. Zero where nothing is given."""
    n = len(X)
    if name == "broadcast":
        return X[:1].expand_as(X)
    if name == "reduce":
        return X.sum(0) * first
    if name == "scatter":
        return X[:1] * own
    if name == "gather":
        return (X * own).sum(0) * first
    if name == "all_gather":
        return (X * own).sum(0).expand_as(X)
    if name == "reduce_scatter":
        return X.sum(0) * own
    if name == "all_to_all":
        return X.view(n, n, -1).transpose(0, 1).flatten(1)
    return X.sum(0).expand_as(X)                        # all_reduce


class Collective(torch.autograd.Function):
    """One that autograd can go back through. takes, gives: 1 where it takes and gives a rank's
    numbers: what it leaves anywhere else does not count."""

    @staticmethod
    def forward(ctx, x, forward, backward, takes, gives, net):
        ctx.more = backward, forward, gives, takes, net
        y = x * takes
        result = forward(net, y)
        return (y if result is None else result) * gives

    @staticmethod
    def backward(ctx, dy):
        return Collective.apply(dy, *ctx.more), None, None, None, None, None


def dual_is_right(forward, backward, net, device, numbers=5):
    """Whether a collective and its gradient, which the other one computes, are those that autograd
    finds for all ranks as one process. Communication: both of them."""
    n, rank = net.ranks, net.rank
    own, first = own_parts(n, numbers), torch.zeros(n, 1, dtype=torch.float64)
    first[0] = 1
    seeded = torch.Generator().manual_seed(0)
    X, dY = torch.randint(-9, 10, (2, n, n * numbers), generator=seeded).double()
    X.requires_grad_()
    Y = as_one(forward.__name__, X, own, first)
    [dX] = torch.autograd.grad(Y, X, dY)
    # A collective takes and gives what is not zero if all that it could take and is given is one.
    takes = torch.autograd.grad(as_one(forward.__name__, X, own, first).sum(), X)[0] != 0
    gives = as_one(forward.__name__, torch.ones_like(X), own, first) != 0

    x, dy, takes, gives = (tensor.detach()[rank].to(device) for tensor in (X, dY, takes, gives))
    x.requires_grad_()
    y = Collective.apply(x, forward, backward, takes, gives, net)
    y.backward(dy)
    return torch.equal(y.cpu(), Y[rank]) and torch.equal(x.grad.cpu(), dX[rank])


# ------------------------------------------------------------------------------------------ the run

class Run(Bench):
    """A run that trains nothing. found: what the variant has returned: lines, or a Found for each
    collective, which is then held to the formulas."""

    def __init__(self, args, formulas):
        self.args, self.formulas, self.dtype = args, formulas, common.DTYPES[args.dtype]
        self.rank, self.world = environment("RANK", 0), environment("WORLD_SIZE", 1)
        self.meet(args)
        self.device = common.join_ranks(args, self.rank)
        self.at, self.so_far, self.seconds = args.variant, f"in {args.variant}", []
        self.watch = meeting.Watch(self)
        self.found, self.checks, self.problems, self.diagnosis, self.recorded = [], [], [], [], {}

    def finish(self):
        """Print what was found. Returns the exit status."""
        with self.guard():
            status = self.judge_and_report()
        self.watch.stop()
        return status

    def judge_and_report(self):
        self.first_line(self.args.variant, self.args.dtype)
        if self.found and not isinstance(self.found[0], str):
            self.hold()
        else:
            self.say("\n".join(f"  {line}" for line in self.found))
        self.watch.let_go()
        if self.rank > 0:
            return 0
        self.report_problems()
        outputs = {"json": self.write_json, "plot": self.draw_picture}
        written = [self.wrote(flag, write) for flag, write in outputs.items()]
        return 0 if all(written) and not self.problems else 1

    def hold(self):
        """Each collective, one line: what all ranks did, beside the formulas."""
        answer = self.formulas(self.args, self.rank, self.world, None)
        backward = {}
        for pair in answer["duals"]:
            for one, other in (pair, pair[::-1]):
                net = answer["network"](dist.group.WORLD)
                right = dual_is_right(one, other, net, self.device)
                backward[one.__name__] = other.__name__, right
        everyones = [None] * self.world
        dist.all_gather_object(everyones, [
            (found.rounds, found.equal, backward.get(found.name, ("", True))[1])
            for found in self.found])
        if self.rank > 0:
            return
        size = self.world * self.args.numbers * self.dtype.itemsize
        self.say(f"  each rank's tensor: {self.world * self.args.numbers:,} numbers, "
                 f"{quantity(size)}, in {self.world} parts")
        self.say(f"  {'':<21}{'rounds':>7}{'formula':>9}{'sent by all':>15}{'formula':>13}"
                 f"{'PyTorch has':>15}   backward is")
        for found, *ranks in zip(self.found, *everyones):
            rounds, equal, right = zip(*ranks)
            self.line(found.name, answer["collectives"][found.name], rounds, all(equal),
                      backward.get(found.name, ("", True))[0], all(right))

    def line(self, name, formula, everyones, equal, dual, dual_is_right):
        sent = sum(size for mine in everyones for _, size, _ in mine)
        try:
            passed = in_rounds(everyones)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            passed = []
        self.recorded.setdefault("messages", {})[name] = passed
        measured = {"rounds": len(passed), "bytes sent by all ranks": sent}
        for (what, value), expected in zip(measured.items(), formula):
            self.check(f"{name}, {what}", value, expected)
        self.check(f"{name}, ranks with what PyTorch's gives", int(equal), 1)
        if dual:
            self.check(f"{name}, {dual} is its backward", int(dual_is_right), 1)
        ok = all(check["ok"] for check in self.checks if check["name"].startswith(f"{name}, "))
        self.say(f"  {name:<21}{len(passed):>7}{formula[0]:>9}{quantity(sent):>15}"
                 f"{quantity(formula[1]):>13}{'the same' if equal else 'others':>15}   "
                 f"{dual:<15} {'✓' if ok else '✗'}")

    def check(self, name, measured, formula):
        ok = measured == formula
        self.checks.append({"name": name, "measured": measured, "expected": formula, "ok": ok})
        if not ok:
            self.problems.append(f"{name}: measured {measured}, formula {formula}")

    def as_json(self):
        args = self.args
        flags = {name: value for name, value in vars(args).items()
                 if value is None or isinstance(value, (int, float, str))}
        record = {
            "chapter": args.chapter, "variant": args.variant, "world_size": self.world,
            "backend": dist.get_backend(), "device": str(self.device), "dtype": args.dtype,
            "config": flags, "checks": self.checks, "problems": self.problems,
            "diagnosis": self.diagnosis, "recorded": self.recorded,
        }
        return json.loads(json.dumps(record))
