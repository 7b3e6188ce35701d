"""What ZeRO's units are held to: the most bytes of them that are there at a time."""

import argparse

from common import rounded
from lab.run.anatomy import flat_units
from lab.run.instrument import Instrument


def gathered_peak(args: argparse.Namespace, answer: dict, width: int) -> int:
    """The most bytes of gathered parameters at a time in stage 3 of chapter 03: a unit's and those
    of the next ones, or with --keep-gathered all."""
    units = [-(-size // n) * n for size, n, _ in flat_units(args.model, answer)]
    at_once = len(units) if getattr(args, "keep_gathered", False) else args.prefetch + 1
    return rounded(args).itemsize * max(sum(units[i:i + at_once]) for i in range(len(units)))


def gradient_peak(args, answer, width):
    """The most bytes of gradients at a time in chapter 03. Stage 1: all, and in them the shards.
    Later ones: those of a unit while they are computed, those of the next one on their way, and
    shards."""
    units = [(-(-size // n) * n, -(-size // n)) for size, n, _ in flat_units(args.model, answer)]
    if answer["zero"] == 1:
        return width * sum(size for size, _ in units)
    is_first = args.batch // args.shares == args.micro_batch    # there are no sums of earlier ones
    peak = tied = 0
    for i, (size, shard) in enumerate(units):
        if args.model.tie:                                  # the head's gradient waits for unit 0
            tied = args.model.vocab * args.model.dim * (i > 0)
        later = units[i + 1:]                               # whose backward is over
        shards = sum(shard for _, shard in (later if is_first else units))
        arriving = sum(size + (0 if is_first else shard) for size, shard in later[:1])
        peak = max(peak, tied + size + arriving + shards, tied + size + shard + shards)
    return width * peak


class Held(Instrument):
    def hold_states(self, run, answer):
        if "zero" not in answer:
            return
        peaks = {"gradients": (run.comm.gradient_peak, gradient_peak)}
        if answer["zero"] == 3:
            peaks["gathered parameters"] = run.comm.gathered, gathered_peak
        for what, (measured, formula) in peaks.items():
            run.check(("states", what, "at the peak"), measured,
                      formula(run.args, answer, run.dtype.itemsize))
