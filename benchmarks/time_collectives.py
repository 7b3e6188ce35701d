"""Times chapter 00's ring all_reduce, by hand, against PyTorch's own, which is a ring too.

All sides go on in the same processes, one call of each in turn, so that a noisy machine is noisy
for all. A call takes as long as on the rank where it takes longest. The table has the median, the
range of its middle half and the best, and the ratios of the medians and of the bests: at 1.00 or
less, the ring by hand is no slower.

What the ring's time goes to: the same messages without sums (all_gather by hand, twice), the sums
without messages, and for how long it keeps processors busy, on all ranks together, beside PyTorch's
own. Where ranks are more than processors, no call can take less than that over the processors.

    python benchmarks/time_collectives.py [--calls N] [--record] [--device cpu]

--record writes the table, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from benchmarks import results  # noqa: E402
from benchmarks.results import middle  # noqa: E402
from benchmarks.time_chapters import on_ranks  # noqa: E402
from common import environment  # noqa: E402
from lab import chapters, scaling  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

RANKS = 4
SIZES = {2**20: 1, 2**26: 8}            # bytes of x, and which part of the calls there is time for
SETUP_CALLS = 2                         # of each side, which connect and allocate
RING, TORCH, MESSAGES, SUMS = "ring", "PyTorch's", "messages", "sums"


# ------------------------------------------------------------------------------ on every rank


def sides_on(x):
    """{side: function without arguments}."""
    zero = chapters.chapter("00")
    net = zero.Network(dist.group.WORLD)

    def messages():
        zero.all_gather(net, x)
        zero.all_gather(net, x)

    def sums():
        parts = x.tensor_split(net.ranks)
        room = torch.zeros_like(parts[0])
        for part in parts[1:]:
            part += room[:len(part)]

    return {RING: lambda: zero.all_reduce_ring(net, x), TORCH: lambda: dist.all_reduce(x),
            MESSAGES: messages, SUMS: sums}


def play(args):
    """For a rank: {bytes of x: {side: [[seconds of the slowest rank, processor seconds of all
    ranks], for each call]}}."""
    device, answer = common.join_ranks(args, environment("RANK", 0)), {}
    for size in SIZES:
        sides = sides_on(torch.zeros(size // 4, device=device))
        answer[size] = {side: [] for side in sides}
        for _ in range(calls_of(size, args) + SETUP_CALLS):
            for side, function in sides.items():
                answer[size][side].append(timed(function, device))
    return answer


def calls_of(size, args):
    return max(4, args.calls // SIZES[size])


def timed(function, device):
    dist.barrier()
    begin, busy = scaling.now(device), time.process_time()
    function()
    wall, busy = scaling.now(device) - begin, time.process_time() - busy      # gloo's threads too
    slowest, total = (torch.tensor(s, dtype=torch.float64, device=device) for s in (wall, busy))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest.item(), total.item()


# ------------------------------------------------------------------------------ the table


def measure(args):
    """`play` on all ranks: rank 0's answer."""
    output = on_ranks(RANKS, __file__, "--play", f"--calls={args.calls}", f"--device={args.device}")
    return json.loads(output.splitlines()[-1])


def table(args):
    """Yields the lines of the table, in Markdown."""
    yield (f"{results.machine()}, {RANKS} ranks, float32, {args.calls} calls of each side in turn "
           f"(of the largest x, {calls_of(2**26, args)}). Milliseconds: medians, with the range of "
           "the middle half, and the best.\n")
    yield results.header(
        "bytes of x", "all_reduce, ring by hand", "best", "PyTorch's own", "best", "ratio",
        "ratio of the bests", "the ring's messages alone", "its sums alone",
        "processors busy, all ranks", "with PyTorch's own")
    for size, sides in measure(args).items():
        wall, busy = ({side: [1e3 * call[i] for call in calls[SETUP_CALLS:]]
                       for side, calls in sides.items()} for i in (0, 1))
        median = {side: statistics.median(ms) for side, ms in wall.items()}
        best = {side: min(ms) for side, ms in wall.items()}
        yield results.row(
            f"{int(size):,}", middle(wall[RING]), f"{best[RING]:.1f}", middle(wall[TORCH]),
            f"{best[TORCH]:.1f}", f"{median[RING] / median[TORCH]:.2f}",
            f"{best[RING] / best[TORCH]:.2f}", middle(wall[MESSAGES]), middle(wall[SUMS]),
            middle(busy[RING]), middle(busy[TORCH]))


def accept(argv):
    parser = commands.Parser("benchmarks/time_collectives.py", description=__doc__)
    parser.add_argument("--calls", type=commands.number(int, 4, 2**31, 120), default=120,
                        help="of each side; default: 120")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)  # for its ranks
    args = parser.parse_args(argv)
    if args.record:
        results.refuse_record()
    return args


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    if args.play:
        answer = play(args)
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
        dist.destroy_process_group()
        return
    results.tell(table(args), "collectives", args.record)


if __name__ == "__main__":
    commands.program(main)
