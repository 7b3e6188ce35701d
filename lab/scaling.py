"""How the chapters scale on this machine: measured beside predicted, in one table.

    python -m lab.scaling [--json F]                        all of it, as `make scaling` does
    torchrun --nproc_per_node=8 -m lab.scaling rates        only the all_reduces of chapter 00
    torchrun --nproc_per_node=4 -m lab.scaling overlap      only what chapters 02 and 03 hide

all_reduce   Chapter 00's four, by hand, and PyTorch's, a ring as well. A round takes α seconds, and
             each byte of its largest message 1/B: one α and one B are fitted to all of them. Ranks
             that share a core wait for it, so α grows.
tokens/s     The same batch on 1, 2, 4 and 8 ranks. Chapter 10 predicts it from α and B, the FLOP/s
             of a matmul and the bytes/s of an addition, measured while all ranks compute. It leaves
             out the time that Python and the start of an operator take.
overlap      On few cores, sending takes time from computing, so overlap gains little. Here layers
             sleep in forward and backward, and so does a link: a message arrives when those before
             it have, α and its bytes' time later. The steps are chapter 02's and 03's.
"""

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import common
from common import Refused, environment
from lab.chapters import chapter
from lab.planner.models import as_planned
from lab.run import commands, ranks, refusals
from lab.run.formulas import WATCHED_STEPS

WORLDS = 1, 2, 4, 8


class Row(NamedTuple):
    """A row of the table. x: ranks, bytes or a ratio, over which the figure shows it."""

    what: str
    unit: str
    ranks: int
    x: float
    measured: float
    predicted: float
    note: str

    def __str__(self):
        numbers = f"{self.measured:>9,.4g} / {self.predicted:<9,.4g}"
        off = self.measured / self.predicted - 1
        return f"  {self.what:<22}{numbers}{self.unit:<9}{off:>+6.0%}   {self.note}"


# --------------------------------------------------------------- the rates of this machine, α and B

KINDS = "naive", "tree", "ring", "doubling"             # of chapter 00's all_reduce


def now(device):
    """Seconds, once the device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds_of(function, device, repeats=5, calls=4):
    """The median time of a call on the slowest rank. Ranks that share a core have it in turns, so
    several calls are timed together. Communication: a barrier, and an all_reduce of one number."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = now(device)
        for _ in range(calls):
            function()
        seconds = torch.tensor((now(device) - begin) / calls, dtype=torch.float64, device=device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        times.append(seconds.item())
    return statistics.median(times)


def time_all_reduces(device, largest):
    """[(name, bytes, seconds)] of each all_reduce and size, in float32."""
    zero, times, x = chapter("00"), [], torch.zeros(largest // 4, device=device)
    for size in (largest // 16**k for k in range(6)):
        part, net = x[:size // 4], zero.Network(dist.group.WORLD)
        functions = {kind: partial(zero.BY_HAND[f"all_reduce_{kind}"], net, part) for kind in KINDS}
        for name, function in (functions | {"PyTorch": partial(dist.all_reduce, part)}).items():
            function()                                  # connects, and allocates
            times.append((name, size, seconds_of(function, device)))
    return times


def cost(name, n, size):
    """(Rounds, bytes of the largest message in each, added up) of an all_reduce on n ranks."""
    kind = "ring" if name == "PyTorch" else name
    messages = chapter("00").round_bytes(f"all_reduce_{kind}", n, size, 4)
    return len(messages), sum(messages)


def fit(costs, seconds):
    """[α, 1/B] for which the squares of log(seconds / fitted) add up to the least, by Gauss and
    Newton's method: twice as long is as wrong as half as long. costs: of `cost`."""
    costs, seconds = (torch.tensor(numbers).double() for numbers in (costs, seconds))
    fitted = seconds                                    # in the first step, relative errors
    for _ in range(50):
        target = 1 + (seconds / fitted).log()[:, None]
        solution = torch.linalg.lstsq(costs / fitted[:, None], target).solution.clamp(min=1e-18)
        fitted = (costs @ solution)[:, 0]
    return solution.flatten().tolist()


def measure_rates(device):
    """(A Row of each all_reduce and size, {"flops": FLOP/s of a matmul, "memory": bytes/s of an
    addition, "alpha": seconds, "beta": 1/B}), on all ranks at the same time."""
    side, numbers, largest = (4096, 2**28, 2**26) if device.type == "cuda" else (768, 2**22, 2**22)
    a, b = torch.randn(2, side, side, device=device)
    x, y = torch.randn(2, numbers, device=device)
    flops = 2 * side**3 / seconds_of(partial(torch.mm, a, b), device)
    memory = 3 * x.nbytes / seconds_of(partial(torch.add, x, y, out=y), device)
    n, alpha, beta, rows = dist.get_world_size(), 0, 0, []
    if n > 1:
        times = time_all_reduces(device, largest)
        costs = [cost(name, n, size) for name, size, _ in times]
        alpha, beta = fit(costs, [seconds for *_, seconds in times])
        rows = [Row(f"all_reduce {name}", "ms", n, size, 1e3 * seconds,
                    1e3 * (alpha * rounds + beta * sent), f"{size:,} B")
                for (name, size, seconds), (rounds, sent) in zip(times, costs)]
    return rows, {"flops": flops, "memory": memory, "alpha": alpha, "beta": beta}


def print_rates(rows, rates, n):
    """A line with the rates, and the Row of the largest all_reduce of each kind."""
    print(f"ranks: {n} · {rates['flops'] / 1e9:.3g} GFLOP/s each, memory "
          f"{rates['memory'] / 1e9:.3g} GB/s, α {1e6 * rates['alpha']:.3g} µs, 1/B "
          f"{1e12 * rates['beta']:.3g} ms/GB", *rows[:1 + len(KINDS)], sep="\n", flush=True)


# ------------------------------------------------------------------- tokens/s, beside the planner's

AXES = {"dp": "02_data_parallel.py --variant=bucket", "zero3": "03_zero.py --variant=zero3",
        "tp": "04_tensor_parallel.py", "cp": "06_context_parallel.py --variant=gather",
        "pp": "07_pipeline_parallel.py --variant=1f1b"}
MODEL = {"layers": 8, "dim": 192, "heads": 8, "kv-heads": 8, "seq": 128, "vocab": 256}
BATCH = 8                               # sequences of a step
STEPS = WATCHED_STEPS + 3


def cluster_of(rates, n):
    """The planner's Cluster with these rates. Those in bytes are halved, for the planner counts 2
    bytes for a number that has 4 here."""
    ten = chapter("10")
    return ten.Cluster(peak=rates["flops"], matmul=1, attention=1, memory=1e30, nic=1, per_node=n,
                       hbm=rates["memory"] / 2 / ten.HBM, alpha=rates["alpha"],
                       nvlink=1 / max(rates["beta"], 1e-18) / 2 / ten.NVLINK)


def layout_of(axis, n):
    """The planner's Layout on n ranks. A micro-batch is one sequence in a pipeline, and elsewhere
    all sequences of a rank."""
    degree = "dp" if axis == "zero3" else axis
    micro_batches = {"dp": n, "pp": BATCH}.get(degree, 1)       # of all ranks
    return chapter("10").Layout(**{degree: n}, zero=3 * (axis == "zero3"), sp=False,
                                    micro_batch=BATCH // micro_batches)


def command_of(axis, n):
    """The chapter and its flags, on n ranks."""
    return [*AXES[axis].split(), *(f"--{name}={value}" for name, value in MODEL.items()),
            f"--batch={BATCH}", f"--micro-batch={layout_of(axis, n).micro_batch}",
            f"--steps={STEPS}", "--no-verify", "--device=cpu"]


def predict_seconds(axis, n, cluster):
    """{cause: seconds} of a step. A gradient is one number, as here, and nothing hides what is
    sent, since ranks send by the cores that they compute with."""
    ten = chapter("10")
    shape = {name.replace("-", "_"): value for name, value in MODEL.items()}
    model = as_planned(common.Config(**shape, tie=False, attention="plain"))
    software = replace(ten.SOFTWARE["ours"], gradient_bytes=2, sent_bytes=2, dp_hidden=0)
    return ten.step_seconds(model, layout_of(axis, n), cluster, software, BATCH)


def measure_axis(axis, n, cluster):
    """The Row of n ranks. A step takes the median of those that no meter watches."""
    run = record_of(n, *command_of(axis, n))
    seconds, tokens = statistics.median(run["step_seconds"][WATCHED_STEPS:]), BATCH * MODEL["seq"]
    causes = predict_seconds(axis, n, cluster)
    return Row(axis, "tokens/s", n, n, tokens / seconds, tokens / sum(causes.values()),
               chapter("10").largest(causes, 3))


def record_of(n, *command):
    """The JSON of a program on n ranks. Ends with status 1 if it leaves none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        _, _, errors = ranks.run(*command, f"--json={file}", world=n, timeout=None)
        if not file.exists():
            refusals.fail(f"{' '.join(command)} has failed: {errors.strip()[-500:]}", status=1)
        return json.loads(file.read_text())


# ------------------------------------------------------------------ overlap, with layers that sleep

RATIOS = 0.5, 1, 2          # seconds of an all_reduce of all gradients, over those of a backward


class Plan(NamedTuple):
    """Seconds that a layer sleeps, and α of a message. numbers: those of a layer's parameters."""

    layers: int = 6
    forward: float = 0.01
    backward: float = 0.02
    alpha: float = 0.002
    numbers: int = 2**12
    micro_batches: int = 2
    in_bucket: int = 2      # layers whose gradients are sent together


class Sleeper(nn.Module):
    """Adds the means of two halves of its numbers to x, (batch, seq, 2), and sleeps: in forward,
    and in backward before the numbers' gradient is there."""

    def __init__(self, plan):
        super().__init__()
        self.plan, self.weight = plan, nn.Parameter(torch.linspace(-1, 1, plan.numbers))

    def forward(self, x):
        time.sleep(self.plan.forward)
        x = x + self.weight.view(2, -1).mean(1)
        x.register_hook(lambda gradient: time.sleep(self.plan.backward))
        return x


class Link:
    """From a rank to the others: one message at a time. sent: bytes on the wire when a layer is
    gathered, or reduced and scattered; an all_reduce sends twice as many."""

    def __init__(self, plan, ratio, ranks):
        self.share, self.alpha, self.free = (ranks - 1) / ranks, plan.alpha, 0
        self.sent = self.share * 4 * plan.numbers
        self.bandwidth = 2 * self.sent / (ratio * plan.backward)

    def arrival(self, now, sent):
        """When a message of so many bytes has arrived that could start now."""
        self.free = max(self.free, now) + self.alpha + sent / self.bandwidth
        return self.free


class Arrival(NamedTuple):
    """What a collective returns at once: it is over when its message has arrived, too."""

    work: object
    moment: float

    def wait(self):
        self.work.wait()
        time.sleep(max(0, self.moment - time.perf_counter()))


class SlowGroup(dist.ProcessGroup):
    """All ranks, as a group whose collectives go over a Link. Chapters take it like any other."""

    link = None

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)

    def arrival(self, work, sent):
        """Of a message of so many bytes that could start now."""
        return Arrival(work, self.link.arrival(time.perf_counter(), sent))

    def allreduce(self, tensors, options):
        work = dist.all_reduce(tensors[0], async_op=True)
        return self.arrival(work, 2 * self.link.share * tensors[0].nbytes)

    def all_gather_single(self, full, part, options):
        work = common.all_gather(full, part, async_op=True)
        return self.arrival(work, self.link.share * full.nbytes)

    def reduce_scatter_single(self, part, full, options):
        work = common.reduce_scatter(part, full, async_op=True)
        return self.arrival(work, self.link.share * full.nbytes)

    def broadcast(self, tensors, options):              # before the first step, so without the link
        return dist.group.WORLD.broadcast(tensors, options)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single    # torch 2.11


dist.Backend.register_backend("slow", SlowGroup, devices=["cpu"])


def data_parallel(plan, link, variant):
    """Seconds of a step of chapter 02: `naive` sends when backward has ended, and the others as
    soon as the gradients of a layer, or of a bucket, are there."""
    together = plan.in_bucket if variant == "bucket" else 1
    end = plan.micro_batches * plan.layers * (plan.forward + plan.backward)
    for ready in range(together, plan.layers + 1, together):
        to_come = 0 if variant == "naive" else plan.layers - ready
        arrival = link.arrival(end - to_come * plan.backward, 2 * together * link.sent)
    return max(end, arrival)


def zero3(plan, link, ahead):
    """Seconds of a step of ZeRO-3, which gathers `ahead` of the layer that computes: in forward,
    and again in backward all but the last layer. The sum of a layer travels during the backward of
    the next one. At the end comes the norm's one number."""
    now = 0
    for _ in range(plan.micro_batches):
        reduced = 0                                     # when the sum of the layer before is there
        for seconds, arrived in (plan.forward, []), (plan.backward, [0]):
            is_backward = bool(arrived)
            for i in range(plan.layers):
                while len(arrived) < min(plan.layers, i + 1 + ahead):
                    arrived.append(link.arrival(now, link.sent))
                now = max(now, arrived[i]) + seconds
                if is_backward:
                    now = max(now, reduced)
                    reduced = link.arrival(now, link.sent)
        now = max(now, reduced)
    return now + plan.alpha


FORMULAS = {f"02 {variant}": partial(data_parallel, variant=variant)
            for variant in ("naive", "overlap", "bucket")}
FORMULAS |= {f"03 zero3 --prefetch {ahead}": partial(zero3, ahead=ahead) for ahead in (0, 1)}


def step_of(variant, plan, group):
    """The chapter's own step, with layers that sleep: a function of `micro_batches` and `valid`,
    the valid targets of all ranks."""
    model = nn.Sequential(*(Sleeper(plan) for _ in range(plan.layers)))
    rate = plan.numbers / 4                             # as if the means were what is trained
    if variant.startswith("02"):
        two = chapter("02")
        replica = two.replicate(variant[3:], model, group, plan.in_bucket * 4 * plan.numbers)
        optimizer = torch.optim.SGD(model.parameters(), rate)
        return partial(two.train_step, replica, optimizer, clip=None)
    three = chapter("03")
    units = three.make_units(model, partial(three.Unit, group=group))
    three.keep_only_shards(units)
    return partial(three.zero3_step, model, units, ahead=int(variant[-1]), clip=None,
                   optimizer=torch.optim.SGD([unit.shard for unit in units], rate))


def measure_step(variant, plan, ratio, group):
    """The Row of a variant, over the SlowGroup: of the best of three steps, since other programs
    only make one longer."""
    numbers = torch.Generator().manual_seed(group.rank())
    batch = [(torch.randn(1, 4, 2, generator=numbers), torch.randint(2, (1, 4), generator=numbers))
             for _ in range(plan.micro_batches)]
    step = partial(step_of(variant, plan, group), micro_batches=batch,
                   valid=group.size() * 4 * len(batch))
    predicted, seconds = FORMULAS[variant](plan, Link(plan, ratio, group.size())), []
    for _ in range(3):
        group.link = Link(plan, ratio, group.size())
        seconds.append(seconds_of(step, torch.device("cpu"), 1, 1))
    return Row(variant, "ms", group.size(), ratio, 1e3 * min(seconds), 1e3 * predicted,
               f"all_reduce over backward {ratio:g}")


# -------------------------------------------------------------------------------- the command line

def parse(argv):
    """The command line; raises Refused."""
    parser = commands.Parser("-m lab.scaling", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("rates", "overlap"), help="on torchrun's ranks")
    parser.add_argument("--json", type=commands.output("scaling.json"), help="write all rows")
    args, world = parser.parse_args(argv), environment("WORLD_SIZE", 0)
    if args.part and not world:
        raise Refused(f"{args.part} is measured on ranks: torchrun --standalone --nproc_per_node=4 "
                      f"-m lab.scaling {args.part} would work")
    if world and not args.part:
        raise Refused("ranks of torchrun measure a part", "with rates")
    if args.part == "overlap" and world == 1:
        raise Refused("one rank has nobody to send to", "--nproc_per_node 4")
    args.device = "cpu" if args.part == "overlap" else "auto"
    return args


def measure_part(args):
    """On a rank: (rows, rates or None) of the part, which rank 0 prints."""
    torch.set_num_threads(1)
    device, rates = common.join_ranks(args, environment("RANK", 0)), None
    if args.part == "rates":
        rows, rates = measure_rates(device)
    else:
        group = dist.new_group(backend="slow")
        rows = [measure_step(variant, Plan(), ratio, group)
                for variant in FORMULAS for ratio in RATIOS]
    if dist.get_rank() == 0 and rates:
        print_rates(rows, rates, dist.get_world_size())
    elif dist.get_rank() == 0:
        print(*rows, sep="\n")
    dist.destroy_process_group()
    return rows, rates


def measure_all():
    """All rows, printed as they are measured."""
    all_rows = []
    print("measured / predicted, how far off that is, and what the prediction is made of")
    for n in WORLDS:
        rows, rates = rows_on(n, "rates")
        print_rates(rows, rates, n)
        for axis in AXES:
            rows.append(measure_axis(axis, n, cluster_of(rates, n)))
            print(rows[-1], flush=True)
        all_rows += rows
    rows, _ = rows_on(4, "overlap")
    print("ranks: 4 · layers sleep", *rows, sep="\n")
    return all_rows + rows


def rows_on(n, part):
    """(Rows, rates) of a part on n ranks."""
    recorded = record_of(n, "-m", "lab.scaling", part)["recorded"]
    return [Row(*row) for row in recorded["rows"]], recorded["rates"]


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv)
    if args.part:
        rows, rates = measure_part(args)
    else:
        rows, rates = measure_all(), None
    if args.json and environment("RANK", 0) == 0:
        record = {"chapter": "scaling", "variant": args.part or "scaling", "config": MODEL,
                  "world_size": environment("WORLD_SIZE", WORLDS[-1]), "backend": "gloo",
                  "checks": [], "problems": [], "recorded": {"rows": rows, "rates": rates}}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    commands.program(main)
