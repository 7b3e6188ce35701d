"""What overlap hides in chapters 02 and 03, with layers that sleep and a link of known speed.

    torchrun --nproc_per_node=4 -m lab.asleep [--json F]

On a few cores overlap is worth little: what sends takes time from what computes. So here a layer
sleeps in forward and in backward, which needs no core. Its gradient is real, ranks do sum it, by
the chapters' own classes and steps, and all variants have to come to the same losses. The link
sleeps, too: a message has arrived once all before it have, α seconds and its bytes' time later.

So a step should take as long as a formula says. Of chapter 02, with L layers whose forward takes f
and backward b, and all messages one after the other:

    naive              L (f + b) + the time of all messages
    overlap, bucket    L (f + b) + what of the messages is left when backward ends: each starts when
                       its gradients are there and the one before has arrived

Chapter 03's stages wait where a layer computes that has not arrived, and at the end for the sums.

Exit status: 0; 1 if a step takes more than 15% more or less than its formula says, or the losses
differ.
"""

import contextlib
import json
import math
import sys
import time
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import common
from common import Refused, environment
from lab import speed
from lab.bench import meeting
from lab.bench.about import as_check
from lab.chapters import chapter
from lab.cli import commands, refusals, strict
from lab.cli.words import count

RATIOS = 0.5, 1.0, 2.0      # of the seconds of an all_reduce of all gradients over a backward's
STEPS, WITHIN = 3, 0.15     # the best of so many; off by such a share at the most
TRIES = 6                   # times so many, where others keep the machine busy


class Plan(NamedTuple):
    """What sleeps. Seconds of a layer's forward and backward, and α of a message; numbers: those of
    a layer's parameters."""

    layers: int = 6
    forward: float = 0.01
    backward: float = 0.02
    alpha: float = 0.002
    numbers: int = 2**12
    micro_batches: int = 2
    in_bucket: int = 2      # layers whose gradients are sent together
    ahead: int = 1          # layers that ZeRO-3 gathers ahead

    @property
    def whole(self):
        """Seconds of a micro-batch's forward and backward."""
        return self.layers * (self.forward + self.backward)

    @property
    def nbytes(self):
        """Of a layer's gradients."""
        return 4 * self.numbers


PLAN = Plan()


# ------------------------------------------------------------------------------------ what sleeps

class Nap(torch.autograd.Function):
    """x, after a sleep; in backward, its gradient after another one."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.seconds = backward
        time.sleep(forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None, None


class Sleeper(nn.Module):
    """Adds the means of two halves of its numbers to x, (batch, seq, 2), and sleeps. The numbers'
    gradient is there when its backward has slept."""

    def __init__(self, plan):
        super().__init__()
        self.plan, self.weight = plan, nn.Parameter(torch.linspace(-1, 1, plan.numbers))

    def forward(self, x):
        x = x + self.weight.view(2, -1).mean(1)
        return Nap.apply(x, self.plan.forward, self.plan.backward)


class Link:
    """Of a rank to the others: one message at a time, as many seconds as its bytes take, and α."""

    def __init__(self, alpha, bandwidth):
        self.alpha, self.bandwidth, self.free = alpha, bandwidth, 0

    def seconds(self, sent):
        """Of a message of so many bytes on the wire."""
        return self.alpha + sent / self.bandwidth

    def arrival(self, now, sent):
        """When such a message, that is to start now, has arrived."""
        self.free = max(self.free, now) + self.seconds(sent)
        return self.free


class Message(NamedTuple):
    """The handle of a collective: it has ended, and its message has arrived."""

    work: object
    arrival: float

    def wait(self):
        self.work.wait()
        time.sleep(max(0, self.arrival - time.perf_counter()))


def slowed(collective, link, wire):
    """The collective over the link. wire: bytes on the wire over those of its largest tensor."""
    def run(*given, async_op=False, **more):
        largest = max(one.nbytes for one in given if isinstance(one, torch.Tensor))
        arrival = link.arrival(time.perf_counter(), wire * largest)
        message = Message(collective(*given, async_op=True, **more), arrival)
        return message if async_op else message.wait()

    return run


@contextlib.contextmanager
def over(link, ranks):
    """Meanwhile the chapters' collectives go over the link."""
    there = [(dist, "all_reduce", 2), (common, "all_gather", 1), (common, "reduce_scatter", 1)]
    before = [getattr(module, name) for module, name, _ in there]
    for (module, name, times), collective in zip(there, before):
        setattr(module, name, slowed(collective, link, times * (ranks - 1) / ranks))
    try:
        yield
    finally:
        for (module, name, _), collective in zip(there, before):
            setattr(module, name, collective)


# ------------------------------------------------------------------------- how long it should take

def link_of(plan, ratio, ranks):
    """The one over which an all_reduce of all gradients takes so many times as long as a backward,
    without α."""
    return Link(plan.alpha, share(ranks) * 2 * plan.nbytes / (ratio * plan.backward))


def share(ranks):
    """Bytes on the wire over those of a tensor that is gathered, or reduced and scattered."""
    return (ranks - 1) / ranks


def messages(variant, plan, link, ranks):
    """Seconds of all that a step sends, one after the other."""
    layers, m, one = plan.layers, plan.micro_batches, share(ranks) * plan.nbytes
    if variant.startswith("02"):
        together = plan.in_bucket if variant == "02 bucket" else 1
        return layers / together * link.seconds(2 * together * one)
    calls = {"1": 2 * layers, "2": layers + m * layers, "3": m * (3 * layers - 1)}
    return calls[variant[len("03 zero")]] * link.seconds(one) + plan.alpha      # and the norm


def naive(plan, link, ranks):
    """Seconds of a step in which all that is sent is waited for."""
    return plan.micro_batches * plan.whole + messages("02 naive", plan, link, ranks)


def overlap(plan, link, ranks, together=1):
    """If the last backward starts a message whenever so many layers' gradients are there."""
    now, arrival = plan.micro_batches * plan.whole - plan.layers * plan.backward, 0
    for ready in range(1, plan.layers + 1):
        now += plan.backward
        if ready % together == 0:
            arrival = link.arrival(now, 2 * share(ranks) * together * plan.nbytes)
    return max(now, arrival)


def zero(plan, link, ranks, stage, ahead=0):
    """If stages 1 and 2 start all gathers at once, and stage 3 gathers `ahead` of the layer that
    computes, for forward and again for backward, but for the last layer; and if the sum of a layer
    travels during the backward of the next one. At the end, the norm's one number."""
    now, sent, layers = 0, share(ranks) * plan.nbytes, plan.layers
    for k in range(1, plan.micro_batches + 1):
        there = []                                      # when each layer has arrived
        if stage < 3:
            there = [link.arrival(0, sent) if k == 1 else 0 for _ in range(layers)]
        for i in range(layers):
            while len(there) < min(layers, i + 1 + ahead):
                there.append(link.arrival(now, sent))
            now = max(now, there[i]) + plan.forward

        there, reduced = [0] * (layers if stage < 3 else 1), 0
        for i in range(layers):
            while len(there) < min(layers, i + 1 + ahead):
                there.append(link.arrival(now, sent))
            now = max(now, there[i]) + plan.backward
            if stage > 1 or k == plan.micro_batches:
                now = max(now, reduced)                 # of the layer before
                reduced = link.arrival(now, sent)
        now = max(now, reduced)
    return now + plan.alpha


FORMULAS = {
    "02 naive": naive,
    "02 overlap": overlap,
    "02 bucket": lambda plan, link, ranks: overlap(plan, link, ranks, plan.in_bucket),
    "03 zero1": partial(zero, stage=1),
    "03 zero2": partial(zero, stage=2),
    "03 zero3 --prefetch 0": partial(zero, stage=3, ahead=0),
    "03 zero3 --prefetch 1": partial(zero, stage=3, ahead=1),
}


def formula(variant, plan, ratio, ranks):
    """Seconds of a step."""
    return FORMULAS[variant](plan, link_of(plan, ratio, ranks), ranks)


# ------------------------------------------------------------------------------ how long it takes

def step_of(variant, plan, group):
    """The chapter's own step of the variant, with layers that sleep: a function of micro-batches
    and of the valid targets of all ranks."""
    model = nn.Sequential(*(Sleeper(plan) for _ in range(plan.layers)))
    rate = plan.numbers / 4                             # as if the means were what is trained
    if variant.startswith("02"):
        two = chapter("02")
        replica = two.replicate(variant.split()[1], model, group, plan.in_bucket * plan.nbytes)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        return partial(two.train_step, replica, optimizer, clip=None)
    three = chapter("03")
    units = three.make_units(model, partial(three.Unit, group=group))
    name, *prefetch = variant.removeprefix("03 ").split(" --prefetch ")
    if prefetch:
        three.keep_only_shards(units)
        step = partial(three.zero3_step, model, units, ahead=int(*prefetch))
    else:
        step = partial(three.zero1_step, model, units, stage=three.STAGES[name])
    shards = torch.optim.SGD([unit.shard for unit in units], rate)
    return partial(step, optimizer=shards, clip=None)


def micro_batches(plan, rank):
    """Of this rank: (batch, seq, 2) and targets, other ones on each."""
    numbers = torch.Generator().manual_seed(rank)
    return [(torch.randn(1, 4, 2, generator=numbers), torch.randint(2, (1, 4), generator=numbers))
            for _ in range(plan.micro_batches)]


def measure(variant, plan, ratio, group):
    """Seconds of the best step, and the losses of the first ones, of all ranks together."""
    mine, ranks, losses = micro_batches(plan, group.rank()), group.size(), []
    step, best = step_of(variant, plan, group), math.inf
    valid, link = ranks * sum(targets.numel() for _, targets in mine), None

    def run():
        with over(link, ranks):
            losses.append(step(micro_batches=mine, valid=valid)[0])

    expected = formula(variant, plan, ratio, ranks)
    while len(losses) < STEPS or len(losses) < TRIES * STEPS and not fits(best, expected):
        link = link_of(plan, ratio, ranks)
        best = min(best, speed.slowest(run, torch.device("cpu")))
    total = torch.stack(losses[:STEPS]).double()
    dist.all_reduce(total, group=group)
    return best, total.tolist()


def fits(measured, expected):
    return abs(measured / expected - 1) <= WITHIN


def compare(plan, ratios, group):
    """Yield for each ratio and variant {ratio, variant, measured, expected: seconds, messages:
    seconds of all of them, losses}."""
    ranks = group.size()
    for ratio in ratios:
        for variant in FORMULAS:
            measured, losses = measure(variant, plan, ratio, group)
            yield {"ratio": ratio, "variant": variant, "measured": measured, "losses": losses,
                   "expected": formula(variant, plan, ratio, ranks),
                   "messages": messages(variant, plan, link_of(plan, ratio, ranks), ranks)}


def curves(plan, ranks):
    """{variant: [[ratio, seconds], ...]}, by the formulas."""
    ratios = [k / 20 for k in range(2, 1 + round(25 * max(RATIOS)))]
    return {variant: [[ratio, formula(variant, plan, ratio, ranks)] for ratio in ratios]
            for variant in FORMULAS}


# -------------------------------------------------------------------------------- the command line

def checks_of(rows):
    """Of each row its step's time; and whether all have the same losses, to float32's rounding."""
    checks = []
    for row in rows:
        ratio, variant, measured, expected = (row[key] for key in (
            "ratio", "variant", "measured", "expected"))
        about = "time", "ms of a step", f"communication {ratio:g} of backward", variant
        checks.append(as_check(about, round(1e3 * measured, 1), round(1e3 * expected, 1),
                               fits(measured, expected)))
    off = max(abs(loss / first - 1) for row in rows
              for loss, first in zip(row["losses"], rows[0]["losses"], strict=True))
    return [*checks, as_check(("values", "losses of all variants"), off, 1e-5, off <= 1e-5)]


def lines_of(plan, rows, ranks):
    """Yield the table. gain: if the step waited for each message, it would take so many times as
    long."""
    work = plan.micro_batches * plan.whole
    yield (f"{count(ranks, 'rank')} · {plan.layers} layers that sleep {1e3 * plan.forward:g} ms in "
           f"forward, {1e3 * plan.backward:g} ms in backward · {plan.micro_batches} micro-batches: "
           f"{1e3 * work:.0f} ms")
    yield (f"a link of known speed: a message takes {1e3 * plan.alpha:g} ms and its bytes' time; "
           "gradients are real, and summed")
    yield "  all_reduce over backward        messages     a step    formula             gain"
    for row in rows:
        sent, measured, expected = (row[key] for key in ("messages", "measured", "expected"))
        mark, gain = "✓" if fits(measured, expected) else "✗", (work + sent) / measured
        yield (f"  {row['ratio']:<5g}{row['variant']:<24}{1e3 * sent:>6.0f} ms"
               f"{1e3 * measured:>8.0f} ms{1e3 * expected:>8.0f} ms"
               f"{measured / expected - 1:>+5.0%} {mark}{gain:>9.2f}")


def parse(argv):
    parser = commands.Parser("-m lab.asleep", description=__doc__)
    parser.add_argument("--json", type=commands.output("run.json"), help="write the table")
    parser.set_defaults(device="cpu")
    args = parser.parse_args(argv)
    if environment("WORLD_SIZE", 1) == 1:
        raise Refused("one rank has nobody to send to", "--nproc_per_node 4")
    return args


def main(argv=None, plan=PLAN, ratios=RATIOS):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv)
    strict.refuse_lonely()
    meeting.join(args)
    torch.set_num_threads(1)
    common.join_ranks(args, environment("RANK", 0))
    ranks, rows = dist.get_world_size(), [*compare(plan, ratios, dist.group.WORLD)]
    checks = checks_of(rows)
    if dist.get_rank() == 0:
        print(*lines_of(plan, rows, ranks), sep="\n")
        same = checks[-1]
        print(f"  all variants have the same losses, to {same['measured']:.0e}   "
              f"{'✓' if same['ok'] else '✗'}")
        if args.json:
            record = {"chapter": "asleep", "variant": "overlap", "world_size": ranks,
                      "backend": dist.get_backend(), "config": plan._asdict(), "checks": checks,
                      "problems": [], "recorded": {"overlap": rows, "curves": curves(plan, ranks)}}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()
    return int(not all(check["ok"] for check in checks))


if __name__ == "__main__":
    commands.program(main)
