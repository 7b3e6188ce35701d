"""The gradient noise scale of a run of chapter 02: up to which batch more ranks still pay.

Each rank has the gradient of its own tokens, until the ranks sum theirs. So a step has gradients of
two sizes of batch: the ranks' own, and the sum. Of their norms the chapter's `noise_and_signal`
makes two estimates. They scatter widely, so of each the mean over many steps is taken, and then the
quotient: a mean of the steps' quotients would be biased. The first half of the steps is left out,
in which gradients are longest, and the scale is another.

A token here is a valid target. Tokens of one sequence are not independent, and whole sequences are
drawn. So the number is that of this --seq, and means as many sequences as it has tokens.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (2018), section 2 and appendix
A.1.
"""

import argparse
import math
import statistics

import torch
import torch.distributed as dist
from torch import nn

from common import Batch, Refused, environment
from lab.planner import batch as planned
from lab.run.instrument import Instrument
from lab.run.refusals import RANKS
from lab.run.words import count


def refuse_alone(args: argparse.Namespace) -> None:
    """--noise-scale on one rank, whose gradient is the sum. Raises Refused."""
    if getattr(args, "noise_scale", False) and environment("WORLD_SIZE", 1) == 1:
        raise Refused("--noise-scale compares the gradients of ranks with their sum, and there is "
                      "one rank", f"{RANKS} 2")


class NoiseMeter:
    """The squared norms of a step's gradients, before they are summed over the ranks and after.

    It is made before the replica, which sends them: of a parameter's hooks, the first one runs
    first. steps: of each one [tokens of the small batch, tokens of the big one, the square of the
    mean gradient of the one, and of the other].
    """

    def __init__(self, model: nn.Module):
        self.squares, self.steps = {}, []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.note)

    def note(self, p):
        """The last micro-batch's note stays: p.grad has all of them by then."""
        self.squares[p] = torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()

    def after_step(self, batch: Batch, norm: torch.Tensor) -> None:
        """Once the ranks have summed; norm: of the sum. Sent is an all_reduce of two numbers.

        The loss was divided by all `valid` targets, so the mean gradient of the n of a rank is
        valid/n times what it holds. A rank counts by its targets, n/valid: then the mean square
        over ranks is |G|² + tr(Σ) · ranks/valid on average, whatever n they have.
        """
        own = sum((targets != -100).sum() for _, targets in batch.micro_batches)
        square = sum(self.squares.values()) * batch.valid / own.clamp(min=1)
        both = torch.stack([square, (own > 0).to(square)])
        dist.all_reduce(both)
        square, ranks = both.tolist()
        self.squares.clear()
        if ranks > 1:                           # else all valid targets are one rank's
            self.steps.append([batch.valid / ranks, batch.valid, square, norm.item() ** 2])


def quotient(noises: list, signals: list) -> float:
    """tr(Σ)/|G|² of the steps' estimates; infinite where noise has hidden the signal."""
    signal = statistics.fmean(signals)
    return statistics.fmean(noises) / signal if signal > 0 else math.inf


def error_of(noises: list, signals: list) -> float:
    """The standard error of their quotient, by the jackknife: from what it is without each step."""
    n = len(noises)
    without = [quotient(noises[:i] + noises[i + 1:], signals[:i] + signals[i + 1:])
               for i in range(n)] if n > 1 else [math.inf]
    if math.inf in without:
        return math.inf
    mean = statistics.fmean(without)
    return math.sqrt((n - 1) / n * sum((one - mean) ** 2 for one in without))


def explain(run, steps_seen, noise_and_signal):
    """Note what the run's steps say, and keep all of them for the JSON."""
    estimates = [noise_and_signal(*step) for step in steps_seen]
    run.record(noise={"steps": steps_seen, "noise": [noise for noise, _ in estimates],
                      "signal": [signal for _, signal in estimates]})
    last = estimates[len(estimates) // 2:]
    steps = f"the last {count(len(last), 'step')}"
    scale = quotient(*map(list, zip(*last))) if last else math.inf
    if not 0 < scale < math.inf:
        run.note(f"noise scale: {steps} do not tell noise from signal; more steps or tokens would")
        return
    error, batch = error_of(*map(list, zip(*last))), steps_seen[-1][1]
    run.recorded["noise"] |= {"scale": scale, "error": error, "mean of": len(last)}
    run.note(f"noise scale {scale:,.0f} tokens ± {error:,.0f}, of the means of tr(Σ) and |G|² over "
             f"{steps}")
    run.note(f"of all batches, one of {batch:,} tokens takes {planned.steps(batch, scale):.2f} "
             f"times the fewest steps, and {planned.tokens(batch, scale):.2f} times the fewest "
             "tokens")


class Held(Instrument):
    """The noise scale, where --noise-scale asks for it."""

    meter = None

    def refuse(self, args):
        refuse_alone(args)

    def begin(self, run, model):
        if run.args.noise_scale:
            self.meter = NoiseMeter(model)

    def after_step(self, batch, norm):
        if self.meter:
            self.meter.after_step(batch, norm)

    def explain(self, run, answer):
        if answer.get("noise"):
            explain(run, self.meter.steps, answer["noise"])
