"""How the chapters scale on this machine: measured beside predicted, in one table.

    python -m lab.scaling [--json F]                        all of it, as `make scaling` does
    torchrun --nproc_per_node=8 -m lab.scaling rates        only the all_reduces of chapter 00

all_reduce   Chapter 00's four, by hand, and PyTorch's, a ring as well. A round takes α seconds, and
             each byte of its largest message 1/B: one α and one B are fitted to all of them. Ranks
             that share a core wait for it, so α grows.
tokens/s     The same batch on 1, 2, 4 and 8 ranks. Chapter 10 predicts it from α and B, the FLOP/s
             of a matmul and the bytes/s of an addition, measured while all ranks compute. It leaves
             out the time that Python and the start of an operator take.
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

import common
from common import Refused, environment
from lab.chapters import chapter
from lab.planner.models import as_planned
from lab.run import commands, ranks, refusals
from lab.run.formulas import WATCHED_STEPS

WORLDS = 1, 2, 4, 8


class Row(NamedTuple):
    """A row of the table. x: ranks or bytes, over which the figure shows it."""

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


# -------------------------------------------------------------------------------- the command line

def parse(argv):
    """The command line; raises Refused."""
    parser = commands.Parser("-m lab.scaling", description=__doc__)
    parser.add_argument("part", nargs="?", choices=("rates",), help="on torchrun's ranks")
    parser.add_argument("--json", type=commands.output("scaling.json"), help="write all rows")
    args, world = parser.parse_args(argv), environment("WORLD_SIZE", 0)
    if args.part and not world:
        raise Refused("rates are measured on ranks: torchrun --standalone --nproc_per_node=4 "
                      "-m lab.scaling rates would work")
    if world and not args.part:
        raise Refused("torchrun's ranks measure only rates", "with rates")
    args.device = "auto"
    return args


def measure_on_this_rank(args):
    """(Rows, rates) of all ranks, which rank 0 prints."""
    torch.set_num_threads(1)
    rows, rates = measure_rates(common.join_ranks(args, environment("RANK", 0)))
    if dist.get_rank() == 0:
        print_rates(rows, rates, dist.get_world_size())
    dist.destroy_process_group()
    return rows, rates


def measure_all():
    """All rows, printed as they are measured."""
    all_rows = []
    print("measured / predicted, how far off that is, and what the prediction is made of")
    for n in WORLDS:
        recorded = record_of(n, "-m", "lab.scaling", "rates")["recorded"]
        rows, rates = [Row(*row) for row in recorded["rows"]], recorded["rates"]
        print_rates(rows, rates, n)
        for axis in AXES:
            rows.append(measure_axis(axis, n, cluster_of(rates, n)))
            print(rows[-1], flush=True)
        all_rows += rows
    return all_rows


def main(argv=None):
    args = refusals.accepted(parse, sys.argv[1:] if argv is None else argv)
    if args.part:
        rows, rates = measure_on_this_rank(args)
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
