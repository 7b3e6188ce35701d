"""The run of chapter 00: what each collective gives beside PyTorch's, its rounds and bytes beside
their formulas, who would wait for ever, and what backward makes of it.

A rank has written down, for each of its rounds, to whom it has sent, how many bytes, and from whom
it has received. From that of all ranks follows when each message could pass on the strictest
network there is, one that stores nothing: a rank is in one round at a time, and a message passes
when its sender and its receiver have both come to it.
"""

import argparse
import itertools
import json
from collections import namedtuple
from collections.abc import Callable

import torch
import torch.distributed as dist

import common
from common import environment
from lab import chapters
from lab.run import meeting
from lab.run.about import as_check
from lab.run.bench import Bench
from lab.run.meeting import named
from lab.run.words import count, on_ranks, quantity

# Which of its rounds it is for each of the two; None: none, it has no other end.
Message = namedtuple("Message", "sender sent_in size receiver received_in")


def messages_of(everyones):
    """What a rank sends first to another is what that one receives first from it, and so on.
    everyones: for each rank, its rounds (to, bytes, source)."""
    sends, receives = {}, {}            # of each pair
    for rank, rounds in enumerate(everyones):
        for i, (to, size, source) in enumerate(rounds):
            if to is not None:
                sends.setdefault((rank, to), []).append((i, size))
            if source is not None:
                receives.setdefault((source, rank), []).append(i)
    return [Message(sender, *(sent or (None, 0)), receiver, received_in)
            for sender, receiver in sends | receives
            for sent, received_in in itertools.zip_longest(
                sends.get((sender, receiver), []), receives.get((sender, receiver), []))]


def in_rounds(everyones):
    """The messages that pass in each round, [(sender, receiver, bytes), ...], if no rank begins one
    before those of its last one have passed. everyones: for each rank, its rounds (to, bytes,
    source). Raises ValueError, which names who waits for whom, if that has no end."""
    left, now, passed = messages_of(everyones), [0] * len(everyones), []
    while left:
        sends = [message for message in left if message.sent_in == now[message.sender]]
        receives = [message for message in left if message.received_in == now[message.receiver]]
        passing = set(sends) & set(receives)
        if not passing:
            waits = {message.receiver: f"rank {message.sender} to send" for message in receives}
            waits |= {message.sender: f"rank {message.receiver} to receive" for message in sends}
            said = [f"rank {rank} waits for {what}" for rank, what in sorted(waits.items())]
            raise ValueError(f"on a network that stores nothing, {', '.join(said)}")
        passed.append(sorted((message.sender, message.receiver, message.size)
                             for message in passing))
        left = [message for message in left if message not in passing]
        busy = {(message.sender, message.sent_in) for message in left}
        busy |= {(message.receiver, message.received_in) for message in left}
        now = [i if (rank, i) in busy else i + 1 for rank, i in enumerate(now)]
    return passed


def heard_of(n, passed):
    """Of which ranks each of n has heard in the end, itself included, by these messages."""
    heard = [{rank} for rank in range(n)]
    for messages in passed:
        before = [set(ranks) for ranks in heard]
        for sender, receiver, _ in messages:
            heard[receiver] |= before[sender]
    return heard


# ------------------------------------------------------------------------------------------ duality

def own_parts(n, numbers):
    """(n, n·numbers): 1 where a column is in the row's own part."""
    return torch.eye(n, dtype=torch.float64).repeat_interleave(numbers, dim=1)


def as_one(name: str, X: torch.Tensor, own: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """What n ranks make of their tensors, the rows of X (n, n·numbers), as one process does it.
    own: 1 in each row's own part. first: 1 in the first row. Zero where nothing is given."""
    n = len(X)
    if name == "barrier":
        return X
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
        return X.view(n, n, -1).transpose(0, 1).contiguous().flatten(1)
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

    def __init__(self, args: argparse.Namespace, formulas: Callable,
                 watch: Callable = meeting.Watch, draw: Callable | None = None):
        self.draw_record = draw
        self.args, self.formulas, self.dtype = args, formulas, common.DTYPES[args.dtype]
        self.rank, self.world = environment("RANK", 0), environment("WORLD_SIZE", 1)
        self.prepare(args)
        self.device = common.join_ranks(args, self.rank)
        self.at, self.so_far = args.variant, f"in {args.variant}"
        self.watch = watch(self)
        self.found, self.checks, self.problems, self.diagnosis, self.recorded = [], [], [], [], {}
        self.first_line(args.dtype)

    def judge_and_report(self):
        if isinstance(self.found[0], str):
            self.say("\n".join(f"  {line}" for line in self.found))
        else:
            self.hold()
        self.watch.let_go()
        if self.rank > 0:
            return 0
        return self.report_problems()

    def hold(self):
        """Each collective, one line: what all ranks did, beside the formulas."""
        answer = self.formulas(self.args, self.rank, self.world, None)
        pairs = [*answer["duals"], *(pair[::-1] for pair in answer["duals"])]
        duals = {one.__name__: other for one, other in pairs}
        mine = []
        for found in self.found:
            by_hand, dual = answer["by_hand"][found.name], duals.get(found.name)
            net = answer["network"](dist.group.WORLD)
            right = dual is None or dual_is_right(by_hand, dual, net, self.device)
            mine.append((found.rounds, found.equal, right))
        everyones = self.of_all_ranks(mine)
        if self.rank > 0:
            return
        size = self.world * self.args.numbers * self.dtype.itemsize
        self.say(f"  each rank's tensor: {self.world * self.args.numbers:,} numbers, "
                 f"{quantity(size)}, in {count(self.world, 'part')}")
        self.say(f"  {'':<20}{'rounds':>7}{'formula':>8}{'in a row':>12}{'formula':>12}"
                 f"{'sent by all':>13}{'formula':>12}{'PyTorch has':>13}  backward is")
        wrong = []
        for found, *ranks in zip(self.found, *everyones):
            by_hand, dual = answer["by_hand"][found.name], duals.get(found.name)
            wrong += self.line(by_hand, answer["collectives"][found.name], *zip(*ranks), dual)
        self.diagnosis = [words for _, words in sorted(wrong, key=lambda told: told[0])[:1]]

    def line(self, by_hand, formula, everyones, equal, dual_is_right, dual):
        """Print and check what is measured of one. Returns (kind, words) of what is wrong."""
        name, world, dual, wrong = by_hand.__name__, self.world, dual and dual.__name__, []
        sent = sum(size for mine in everyones for _, size, _ in mine)
        try:
            passed = in_rounds(everyones)
        except ValueError as error:
            self.problems.append(f"{name}: {error}")
            wrong.append((WAITING, f"{name}: {error}"))
            passed = []
        self.recorded.setdefault("messages", {})[name] = passed
        messages, sent_by_formula = formula
        in_a_row = sum(max(size for _, _, size in together) for together in passed)
        rounds = self.check(("sent", name, "rounds"), len(passed), len(messages))
        row = self.check(("sent", name, "bytes in a row"), in_a_row, sum(messages))
        size = self.check(("sent", name, "bytes sent by all ranks"), sent, sent_by_formula)
        if not rounds or not row or not size:
            wrong.append((MESSAGES, f"{name}: {len(passed)} rounds, {quantity(sent)}, and by the "
                          f"formulas {len(messages)}, {quantity(sent_by_formula)}; "
                          f"{who_sends_what(everyones)}"))
        about = "values", name, "ranks with what PyTorch's gives"
        if not self.check(about, sum(equal), world):
            simulate = chapters.room("00", "simulate")
            whose = simulate.what_is_wrong(by_hand, as_one, min(world, LETTERS))
            words = f"{name}: other numbers than PyTorch's{where_not(equal)}"
            wrong.append((NUMBERS, f"{words}; {whose}" if whose else words))
        heard = heard_of(world, passed)
        all_of = [len(ranks) == world for ranks in heard]
        about = "values", name, "ranks that have heard of all"
        if name == "barrier" and not self.check(about, sum(all_of), world):
            rank = all_of.index(False)
            missing = sorted({*range(world)} - heard[rank])
            wrong.append((NUMBERS, f"{name}: rank {rank} goes on, and has not heard of "
                          f"{named(missing)}, which may not have come"))
        about = "values", name, f"ranks where {dual} is its backward"
        if dual and not self.check(about, sum(dual_is_right), world):
            wrong.append((BACKWARD, f"{name}: {dual} does not give its gradient"
                          f"{where_not(dual_is_right)}"))
        self.say(f"  {name:<20}{len(passed):>7}{len(messages):>8}{quantity(in_a_row):>12}"
                 f"{quantity(round(sum(messages))):>12}{quantity(sent):>13}"
                 f"{quantity(sent_by_formula):>12}{'the same' if all(equal) else 'others':>13}  "
                 f"{dual or '':<15} {'✗' if wrong else '✓'}")
        return wrong

    def check(self, about, measured, formula):
        ok = measured == formula
        self.checks.append(as_check(about, measured, formula, ok))
        if not ok:
            name = self.checks[-1]["name"]
            self.problems.append(f"{name}: measured {measured}, formula {formula}")
        return ok

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


# -------------------------------------------------------------------------- what is wrong, in words

# The kinds of it, first what may be why there is more.
WAITING, NUMBERS, MESSAGES, BACKWARD = range(4)
LETTERS = 5             # the most ranks whose parts have letters in simulate.py


def where_not(right):
    """right: whether it is, of each rank."""
    return on_ranks([rank for rank, is_right in enumerate(right) if not is_right], len(right))


def who_sends_what(everyones):
    """Ranks that send alike, together."""
    alike = {}
    for rank, mine in enumerate(everyones):
        sizes = tuple(size for to, size, _ in mine if to is not None)
        alike.setdefault((len(sizes), sum(sizes)), []).append(rank)
    return "; ".join(f"{named(ranks)} {'sends' if len(ranks) == 1 else 'send'} "
                     f"{count(messages, 'message')}, {quantity(size)} in all"
                     for (messages, size), ranks in alike.items())
