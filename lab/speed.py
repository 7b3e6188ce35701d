"""How fast chapter 00's collectives are here, by the α-β model, and on large machines.

    torchrun --nproc_per_node=8 -m lab.speed        measured, beside PyTorch's own, and fitted
    python -m lab.speed                             which all_reduce is right where, by the formula

The model: each round of a collective takes α seconds, and a byte of its largest message 1/B. One α
and one B are fitted to all that was measured by hand. They are fitted a second time as if no two
messages travelled at the same time: so it is where ranks are more than processors.

Bandwidths are those of nccl-tests. The algorithm bandwidth is S/t, for x of S bytes. That of the
bus is what a link has really carried: for an all_reduce, 2 (N-1)/N times as much.
"""

import functools
import json
import math
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist

import common
from common import Refused, environment
from lab import chapters
from lab.bench import meeting
from lab.bench.machines import LATENCY, MACHINES
from lab.cli import commands, refusals, strict
from lab.cli.words import count, quantity

CHAPTER = "00_collectives"
KINDS = "naive", "tree", "ring", "doubling"             # of all_reduce
NAMES = ("broadcast", "all_gather", "reduce_scatter", "all_to_all", "barrier",
         *(f"all_reduce_{kind}" for kind in KINDS))
PAIRS = ("ring", "tree"), ("doubling", "tree"), ("ring", "doubling")
NODE = 8                                                # GPUs with NVLink to each other
NODES = {"A100": ("A100, NVLink 3", "A100, InfiniBand HDR"),
         "H100": ("H100, NVLink 4", "H100, InfiniBand NDR")}
ROUNDS, IN_TURN = "the messages of a round at the same time", "all messages one after the other"


def chapter():
    return chapters.chapter("00")


# ------------------------------------------------------------------------------------ measured here

def calls_on(x):
    """What is timed on x: {"by hand": {name: function without arguments}, "PyTorch": the same}.
    PyTorch's own take only parts of one size. (The chapter's by_torch copies x, which takes time.)
    """
    net, y, n = chapter().Network(dist.group.WORLD), torch.empty_like(x), dist.get_world_size()
    part, part_of_y = (tensor.tensor_split(n)[net.rank] for tensor in (x, y))
    theirs = {"broadcast": lambda: dist.broadcast(x, 0), "barrier": dist.barrier,
              "all_reduce": lambda: dist.all_reduce(x)}
    if len(x) % n == 0:
        theirs |= {"all_gather": lambda: common.all_gather(y, part),
                   "reduce_scatter": lambda: common.reduce_scatter(part_of_y, x),
                   "all_to_all": lambda: dist.all_to_all_single(y, x)}
    ours = {name: functools.partial(chapter().BY_HAND[name], net, x) for name in NAMES}
    return {"by hand": ours, "PyTorch": theirs}


def measure(sizes, repeats, device):
    """{"by hand": {name: {size: seconds}}, "PyTorch": the same}: all in turns, so that a noisy
    machine is noisy for all; the best of the repeats, which others have disturbed least."""
    found = {}
    for size in sizes:
        dtype = torch.uint8 if size % 4 else torch.float32
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
        for turn in range(repeats + 1):
            for whose, functions in calls_on(x).items():
                for name, function in functions.items():
                    seconds = slowest(function, device)
                    if turn > 0:                        # the first one connects, and allocates
                        best = found.setdefault(whose, {}).setdefault(name, {})
                        best[size] = min(seconds, best.get(size, math.inf))
    return found


def slowest(function, device):
    """The seconds of the rank that takes longest, from a moment when all are there."""
    dist.barrier()
    begin = now(device)
    function()
    seconds = torch.tensor(now(device) - begin, dtype=torch.float64, device=device)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def now(device):
    if device.type == "cuda":                           # whose kernels the host does not wait for
        torch.cuda.synchronize()
    return time.perf_counter()


def count_messages(device):
    """{name: how many messages all ranks together send}."""
    counted = {}
    for name in NAMES:
        net = chapter().Network(dist.group.WORLD)
        chapter().BY_HAND[name](net, torch.zeros(net.ranks, device=device))
        sent = torch.tensor(sum(to is not None for to, _, _ in net.rounds), device=device)
        dist.all_reduce(sent)
        counted[name] = sent.item()
    return counted


# ------------------------------------------------------------------------------------------ the fit

def costs_of(n, counted):
    """{how: function of name and size} that gives what α, and what 1/B is multiplied with."""
    zero = chapter()
    return {ROUNDS: lambda name, size: (len(zero.round_bytes(name, n, size)),
                                        sum(zero.round_bytes(name, n, size))),
            IN_TURN: lambda name, size: (counted[name], zero.sent(name, n, size))}


def fit(measured, cost):
    """(α, 1/B), neither below zero, for which the squares of log(measured / modelled) add up to the
    least: so twice as long is as wrong as half as long. measured: {name: {size: seconds}}."""
    rows = [(*cost(name, size), seconds)
            for name, times in measured.items() for size, seconds in times.items()]
    alpha, beta = 0.0, 0.0
    for _ in range(50):                                 # Gauss and Newton's method
        aa = ab = bb = at = bt = 0.0
        for a, b, seconds in rows:
            fitted = alpha * a + beta * b or seconds    # in the first step, relative errors
            a, b, t = a / fitted, b / fitted, 1 + math.log(seconds / fitted)
            aa, ab, bb, at, bt = aa + a * a, ab + a * b, bb + b * b, at + a * t, bt + b * t
        determinant = aa * bb - ab * ab
        alpha, beta = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if beta < 0:                                    # then the best without it
            alpha, beta = at / aa, 0.0
        if alpha < 0:
            alpha, beta = 0.0, bt / bb
    return alpha, beta


def crossover(one, other, cost, alpha, beta):
    """By the model: the bytes from which on one all_reduce takes less time than the other; 0 if it
    does for all sizes, None if for none."""
    far = 2**40                                         # bytes, of which no half is rounded
    (a, b), (other_a, other_b) = (cost(f"all_reduce_{kind}", far) for kind in (one, other))
    if b >= other_b or beta == 0:                       # it gains nothing from larger sizes
        return 0 if b <= other_b and a < other_a else None
    return max(0, far * alpha * (a - other_a) / (beta * (other_b - b)))


def measured_crossover(one, other, measured):
    """The size from which on it was so for all larger ones too, or None."""
    ours, theirs = (measured[f"all_reduce_{kind}"] for kind in (one, other))
    slower = [size for size in ours if ours[size] >= theirs[size]]
    return min((size for size in ours if size > max(slower, default=0)), default=None)


def model(measured, cost):
    """How a model fits: what lab.pictures draws, and `in_words` says."""
    alpha, beta = fit(measured, cost)
    curves = {name: [[size, alpha * cost(name, size)[0] + beta * cost(name, size)[1]]
                     for size in times] for name, times in measured.items()}
    off = sorted([measured[name][size] / seconds, name, size]
                 for name, curve in curves.items() for size, seconds in curve)
    return {"alpha": alpha, "beta": beta, "curves": curves, "off": off,
            "crossovers": [[*pair, crossover(*pair, cost, alpha, beta)] for pair in PAIRS]}


# -------------------------------------------------------------------------------- on large machines

def two_levels(nodes, size, inside, across, kind):
    """Seconds of an all_reduce on nodes of NODE ranks: a ring in each node leaves a rank with the
    node's sum of an eighth of x, which it adds up with the same eighth of the other nodes by an
    all_reduce of this kind; a ring in each node gathers the eighths. inside, across: (α, B)."""
    seconds = chapter().seconds
    return (seconds("reduce_scatter", NODE, size, *inside)
            + seconds(f"all_reduce_{kind}", nodes, size / NODE, *across)
            + seconds("all_gather", NODE, size, *inside))


def choices(n, size, inside, across):
    """{how: seconds} of an all_reduce on n ranks. On one level, each round is counted as one across
    nodes, though some of a tree stay inside."""
    link = inside if n <= NODE else across
    found = {kind: chapter().seconds(f"all_reduce_{kind}", n, size, *link) for kind in KINDS[1:]}
    over_nodes = {f"two levels, {kind}": two_levels(n // NODE, size, inside, across, kind)
                  for kind in KINDS[1:]}
    return found | over_nodes if n > NODE else found


def large_machines():
    """Yield, for each kind of machine, a table of how long an all_reduce takes."""
    row = "  {:>8}{:>8}" + 6 * "{:>10}" + "   {}"
    for machine, links in NODES.items():
        inside, across = ((LATENCY[link], MACHINES[link][1]) for link in links)
        yield (f"all_reduce, nodes of {NODE} {machine}: α {in_time(inside[0])}, "
               f"B {quantity(inside[1])}/s inside; α {in_time(across[0])}, "
               f"B {quantity(across[1])}/s across")
        yield f"{'one level':>48}{'rings inside, and across':>30}"
        yield row.format("x", "ranks", *KINDS[1:], *KINDS[1:], "the fastest")
        for size in (8, 10**6, 10**9):
            for n in (8, 64, 1024, 16384):
                found = choices(n, size, inside, across)
                times = [*map(in_time, found.values()), "", "", ""][:6]
                yield row.format(quantity(size), f"{n:,}", *times, min(found, key=found.get))
        yield ""
    yield "Here a tree sends x whole. NCCL's sends chunks of it, so that a round begins before the"
    yield "last one has ended: a tree's rounds, about a ring's bytes. Doubling sends far in most"
    yield "rounds, and the formula takes the network to be as fast everywhere."


# ----------------------------------------------------------------------------------------- in words

def in_time(seconds):
    unit, name = next((each for each in ((1, "s"), (1e-3, "ms")) if seconds >= each[0]),
                      (1e-6, "µs"))
    return f"{seconds / unit:.3g} {name}"


def bandwidths(name, n, size, seconds):
    """Algorithm and bus bandwidth, in GB/s. A bus's factor is what each rank sends over S; of a
    broadcast it is 1, since nccl-tests count what rank 0 sends."""
    factor = 1 if name == "broadcast" else chapter().sent(name, n, n) / n**2
    return [f"{bus * size / seconds / 1e9:.2g}" for bus in (1, factor)]


def tables(n, found):
    """Yield lines: the all_reduces on x of all sizes, and all collectives on the largest."""
    measured, theirs, ring = found["by hand"], found["PyTorch"], "all_reduce_ring"
    *_, largest = theirs["all_reduce"]
    row = "  {:>12}" + 5 * "{:>10}" + 4 * "{:>9}"
    yield row.format("all_reduce", *KINDS, "PyTorch's", "ring S/t", "bus", "PyT. S/t", "bus GB/s")
    for size, seconds in theirs["all_reduce"].items():
        times = [*(measured[f"all_reduce_{kind}"][size] for kind in KINDS), seconds]
        speeds = [bandwidths(ring, n, size, taken) for taken in (measured[ring][size], seconds)]
        yield row.format(f"{size:,} B", *map(in_time, times), *speeds[0], *speeds[1])
    row = "  {:<21}{:>10}{:>11}{:>9}{:>10}"
    yield ""
    yield row.format(f"x of {largest:,} B", "by hand", "PyTorch's", "S/t", "bus GB/s")
    for name in NAMES:
        of_torch = theirs.get("all_reduce" if name.startswith("all_reduce") else name, {})
        seconds = measured[name][largest]
        other = in_time(of_torch[largest]) if largest in of_torch else "-"
        speeds = "--" if name == "barrier" else bandwidths(name, n, largest, seconds)
        yield row.format(name, in_time(seconds), other, *speeds)


def in_words(how, fitted):
    """Yield lines: how well a model fits, and where one all_reduce overtakes another."""
    ratios = [ratio for ratio, _, _ in fitted["off"]]
    low, middle, high = statistics.quantiles(ratios, n=4)
    *_, (largest, name, size) = fitted["off"]
    bandwidth = f"B {quantity(1 / fitted['beta'])}/s" if fitted["beta"] else "no B to be seen"
    yield f"  fitted, {how}: α {in_time(fitted['alpha'])}, {bandwidth}"
    yield (f"    measured over fitted: median {middle:.2f}, half are {low:.2f} to {high:.2f}, all "
           f"{ratios[0]:.2f} to {largest:.2f} ({name} of {size:,} B)")
    yield f"    {overtakes(fitted['crossovers'])}"


def overtakes(crossovers):
    return "; ".join(f"{one} beats {other} " + ("never" if size is None else
                                                f"from {size:,.0f} B on" if size else "always")
                     for one, other, size in crossovers)


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.speed", description=__doc__)
    add = parser.add_argument
    add("--largest", type=commands.number(int, 1, 2**31, 2**24), default=2**24, metavar="BYTES",
        help="x has 1, 4, 16, ... bytes, up to this; default: 16,777,216")
    add("--repeats", type=commands.number(int, 1, 1001, 5), default=5,
        help="of which the best counts; default: 5")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", type=commands.output("run.json"), help="write what was measured")
    args = parser.parse_args(argv)
    if argv and "RANK" not in os.environ:
        raise Refused(f"{argv[0].partition('=')[0]} means nothing without torchrun: nothing is "
                      "measured", f"--nproc_per_node {NODE}")
    if environment("WORLD_SIZE", NODE) == 1:
        raise Refused("one rank has nobody to send to", f"--nproc_per_node {NODE}")
    strict.refuse_cuda(args)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    n = environment("WORLD_SIZE", 1)
    needed = n * (n + 3) * args.largest                 # the naive all_reduce has N times x
    if needed > memory and not common.on_cuda(args):
        raise Refused(f"--largest {args.largest} needs {needed / 1e9:,.0f} GB or more, and this "
                      f"machine has {memory / 1e9:,.0f} GB", f"--largest {2**24}")
    return args


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv)
    if "RANK" not in os.environ:
        print(*large_machines(), sep="\n")
        return 0
    strict.refuse_lonely()
    meeting.join(args)
    device, n = common.join_ranks(args, environment("RANK", 0)), dist.get_world_size()
    found = measure([4**k for k in range(16) if 4**k <= args.largest], args.repeats, device)
    costs = costs_of(n, count_messages(device))
    if dist.get_rank() == 0:
        report(args, n, device, found, costs)
    dist.destroy_process_group()
    return 0


def report(args, n, device, found, costs):
    """Print what was measured and fitted, and write it as a run that lab/bench/runs.py can read."""
    measured = found["by hand"]
    models = {how: model(measured, cost) for how, cost in costs.items()}
    crossed = [[*pair, measured_crossover(*pair, measured)] for pair in PAIRS]
    where = f"{device.type}, {dist.get_backend()}"
    processors = f", {count(os.cpu_count(), 'processor')}" * (device.type == "cpu")
    print(f"{count(n, 'rank')} · {where}{processors} · the best of {args.repeats} in turns")
    print(*tables(n, found), "", f"  measured: {overtakes(crossed)}", sep="\n")
    for how, fitted in models.items():
        print(*in_words(how, fitted), sep="\n")
    print("  left out: that sums and copies take time, and that memory is slower than a cache")
    if args.json:
        pairs = {whose: {name: [*map(list, times.items())] for name, times in of_all.items()}
                 for whose, of_all in found.items()}
        record = {"chapter": CHAPTER, "variant": "speed", "world_size": n, "device": device.type,
                  "backend": dist.get_backend(), "checks": [], "problems": [],
                  "config": {"largest": args.largest, "repeats": args.repeats},
                  "recorded": {"speed": pairs, "models": models, "crossovers": crossed}}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    commands.program(main)
