"""Batch as a variable: how many steps and tokens the same loss takes, and up to which batch more
GPUs shorten the way to it.

    python 10_planner.py --model 8b --gpus 512 --batch 512 --noise-scale 4e6

The gradient of a batch of B tokens is the true one and noise, whose square is as 1/B. At B = N, the
noise scale, both are as large. The same loss then takes, beside the least of both,

    steps       S = S_min · (1 + N/B)       a batch without noise would take S_min
    tokens      E = E_min · (1 + B/N)       a batch of few tokens would take E_min = N · S_min

Below N, twice the batch takes nearly half of the steps, and hardly more tokens. Above it, nearly as
many steps, and twice the tokens. At N both are twice the least.

A batch is micro-batch · accumulated · dp. More GPUs have more dp: they accumulate less, and when
there is nothing left to accumulate, the batch grows, beyond N for little. So of each number of GPUs
all batches are tried, with the layout of the best plan, and what counts is S · seconds of a step.
GPUs are said to buy little where twice as many shorten that by less than a tenth (WORTH).

N grows while a model trains, to many times its first value; chapter 02 measures it. S and E are an
approximation of one number, and say nothing of the learning rate, which each batch needs its own.

Source: McCandlish et al., An Empirical Model of Large-Batch Training (arXiv 1812.06162), 2.2, 2.3.
"""

import itertools
from dataclasses import replace
from typing import NamedTuple

WORTH = 0.1             # of the time, what twice the GPUs have to spare
DOUBLINGS = 16          # of the GPUs, at most
LARGEST = 64            # noise scales of the largest batch that is tried


def steps(batch, noise_scale):
    """Steps to the same loss, over the least that any batch takes. Both in tokens."""
    return 1 + noise_scale / batch


def tokens(batch, noise_scale):
    """Tokens to the same loss, over the fewest that any batch takes. Both in tokens."""
    return 1 + batch / noise_scale


class Way(NamedTuple):
    """To the same loss, with so many GPUs. batch: in sequences, micro-batch x accumulated x dp."""
    gpus: int
    batch: int
    accumulated: int
    layout: object          # chapter 10's Layout
    seconds: float          # of a step
    steps: float            # over S_min
    tokens: float           # over E_min

    @property
    def time(self):
        """Seconds to the loss, over S_min."""
        return self.steps * self.seconds


def ways(asked, plan, gpus, noise_scale):
    """Yield the Way of each batch with which the layout of a plan fits on so many GPUs: dp takes
    what is left of them. asked: lab.planner.planning's Question."""
    ten, (model, layout, cluster, software, _) = asked.ten, plan.asked
    dp, seq = gpus // (layout.tp * layout.cp * layout.pp), model.seq
    few = max(1, LARGEST * noise_scale / (dp * seq))        # micro-batches of the largest batch
    sizes = [layout.micro_batch] if "micro_batch" in asked.fixed else ten.powers(asked.most)
    for micro_batch, accumulated in itertools.product(sizes, ten.powers(few)):
        batch = dp * micro_batch * accumulated
        one = replace(layout, dp=dp, micro_batch=micro_batch)
        other = ten.Plan(model, one, cluster, software, gpus, batch)
        if not other.why:
            yield Way(gpus, batch, accumulated, one, other.total, steps(batch * seq, noise_scale),
                      tokens(batch * seq, noise_scale))


def best_ways(asked, plan, noise_scale):
    """[Way] of the shortest time, for twice as many GPUs each time, until twice as many are not
    worth it, or no layout divides."""
    best = []
    for doublings in range(DOUBLINGS):
        gpus = asked.gpus * 2**doublings
        every = list(ways(asked, plan, gpus, noise_scale))
        if not every:
            break
        best.append(min(every, key=lambda way: way.time))
        if len(best) > 1 and best[-1].time > (1 - WORTH) * best[-2].time:
            break
    return best


def as_data(way):
    """What --json writes of a Way."""
    return {"gpus": way.gpus, "batch": way.batch, "micro_batch": way.layout.micro_batch,
            "accumulated": way.accumulated, "dp": way.layout.dp, "seconds": way.seconds,
            "steps_over_least": way.steps, "tokens_over_least": way.tokens}


def table(best, seq, noise_scale):
    """Yield the lines about what `best_ways` gives. seq: tokens of a sequence."""
    if not best:
        yield "No batch fits: a layout that may fit is not followed."
        return
    yield (f"With a noise scale of {noise_scale:,.0f} tokens ({noise_scale / seq:,.0f} sequences), "
           "to the same loss, with the first of these layouts, of which dp grows:")
    yield (f"{'GPUs':>10}{'batch':>9} = micro x accum. x dp{'tokens':>10}{'s a step':>10}"
           f"{'steps/least':>13}{'tokens/least':>14}{'time':>7}{'GPU hours':>11}")
    for way in best:
        first, layout = best[0], way.layout
        degrees = f"{layout.micro_batch} x {way.accumulated} x {layout.dp}"
        yield (f"{way.gpus:>10,}{way.batch:>9,} = {degrees:<19}{way.batch * seq:>9.1e}"
               f"{way.seconds:>10.3f}{way.steps:>13.2f}{way.tokens:>14.2f}"
               f"{way.time / first.time:>7.0%}"
               f"{way.time * way.gpus / (first.time * first.gpus):>11.0%}")
    yield verdict(best, seq, noise_scale)


def verdict(best, seq, noise_scale):
    """From which batch on GPUs buy little, in a sentence."""
    *_, last = best
    if len(best) < 2 or last.time <= (1 - WORTH) * best[-2].time:
        return f"With {last.gpus:,} GPUs, twice as many do not divide, or were not tried."
    enough = best[-2]
    spared = 1 - last.time / enough.time
    return (f"Beyond {enough.gpus:,} GPUs, and a batch of {enough.batch * seq:,} tokens "
            f"({enough.batch * seq / noise_scale:.1f} noise scales), GPUs buy little: twice as "
            f"many take {abs(spared):.0%} {'less' if spared >= 0 else 'more'} time, where "
            f"{WORTH:.0%} less would be worth them.")
