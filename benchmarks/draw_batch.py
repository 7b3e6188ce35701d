"""Draws what a larger batch buys: steps and tokens to the same loss, and the noise scale.

    python benchmarks/draw_batch.py [--loss 2.6] [--largest 256] [--out figures/batch.png]

A small model is trained on a CPU until it has this loss, on a batch that is never trained on: with
1, 2, 4, ... sequences a step, each with the best of several learning rates. Beside the steps and
tokens that this took are the curves of lab/planner/batch.py, for the noise scale that chapter 02's
`noise_and_signal` has measured on the way of one of these runs. Fitted is their height alone. That
run then goes on, to show that the scale grows. It takes some fifteen minutes. (In figures/batch.png
it is 493 ± 108 tokens, and all points are within 11% of the curves, from 64 tokens to 16,384.)

A stretch of the way that takes ds steps without noise takes (1 + N/B) ds with a batch of B. So what
counts of a scale that grows is its mean over the steps of a batch that has little noise.
"""

import itertools
import math
import statistics
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from lab import chapters  # noqa: E402
from lab.drawing import BLUE, GRAY, RED, new_figure, save  # noqa: E402
from lab.planner import batch as planned  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

SHAPE = "--layers=2", "--dim=64", "--heads=4", "--kv-heads=2", "--seq=64", "--device=cpu"
RATES = 5e-4, 1e-3, 2e-3, 4e-3
MEASURED = 64           # sequences in a batch of the run whose noise scale is drawn
PARTS = 4               # of a batch, whose gradients are the small ones
HELD_OUT = 10**6        # the step whose batch is never trained on
LOOKS = 1.04            # the loss is looked at each time that there are so many times the steps
WINDOW = 1.5            # and the noise scale is that of so many times the steps
MOST, LONG = 4000, 300  # steps to the loss, at most; and those of the run that shows how it grows


def arguments(batch):
    two = chapters.chapter("02")
    args = common.parse(two.__file__, "", two.VARIANTS, two.flags, [*SHAPE, f"--batch={batch}"])
    two.requires(args, 1)
    return args


def gradient(model, text, step):
    """Leaves the gradient of a step's batch in p.grad. Returns what noise_and_signal takes of its
    parts and of it."""
    tokens, targets, valid = text.batch(step)
    parts, square = min(PARTS, len(tokens)), 0
    total = [torch.zeros_like(p) for p in model.parameters()]
    for part, goals in zip(tokens.chunk(parts), targets.chunk(parts)):
        model.zero_grad()
        (common.loss_sum(model(part), goals) / valid).backward()
        square += parts * common.grad_norm(model.parameters()).item() ** 2
        for one, p in zip(total, model.parameters()):
            one += p.grad
    for one, p in zip(total, model.parameters()):
        p.grad = one
    return valid / parts, valid, square, common.grad_norm(model.parameters()).item() ** 2


def train(batch, rate, loss, most):
    """Until the model has this loss, or for so many steps. Returns whether it has; how many steps
    it took; and noise_and_signal of each of them, where a batch has parts."""
    args, estimates, next_look = arguments(batch), [], 1
    text, noise_and_signal = common.Text(args), chapters.chapter("02").noise_and_signal
    tokens, targets, valid = common.Text(arguments(64)).batch(HELD_OUT)
    model = common.gpt(args.model, args.seed)
    optimizer = common.OPTIMIZERS["adamw"](model.parameters(), rate)
    for step in range(1, most + 1):
        squares = gradient(model, text, step)
        estimates += [noise_and_signal(*squares)] if batch > 1 else []
        optimizer.step()
        if step >= next_look:
            next_look = math.ceil(LOOKS * step)
            with torch.no_grad():
                if common.loss_sum(model(tokens), targets) / valid <= loss:
                    return True, step, estimates
    return False, most, estimates


def fewest_steps(batch, loss):
    """(Steps, the rate, estimates) of the best rate, or None: all of them take more than MOST."""
    best, most = None, MOST
    for rate in RATES:
        there, steps, estimates = train(batch, rate, loss, most)
        if there:
            best, most = (steps, rate, estimates), steps - 1
    return best


def scale_of(estimates):
    """The noise scale of these steps, and its standard error."""
    noises, signals = map(list, zip(*estimates))
    noise = chapters.held("02")
    return noise.quotient(noises, signals), noise.error_of(noises, signals)


def on_the_way(estimates):
    """The mean of the scale in the four quarters of the steps, and its standard error."""
    n = len(estimates)
    scales, errors = zip(*(scale_of(estimates[n * i // 4:n * (i + 1) // 4]) for i in range(4)))
    return statistics.fmean(scales), math.hypot(*errors) / 4


def windows(estimates):
    """(First step, last step, noise scale, error) of windows that become longer."""
    first = 4
    while WINDOW * first <= len(estimates):
        last = int(WINDOW * first)
        yield first, last, *scale_of(estimates[first:last])
        first = last


def height(batches, values, curve, scale):
    """Of a curve over the batch: the factor that brings it to the values, in the geometric mean."""
    ratios = [value / curve(batch, scale) for batch, value in zip(batches, values)]
    return statistics.geometric_mean(ratios)


def draw(found, loss, scale, grown, path):
    """found: {tokens of a batch: steps}; scale: (measured, its error); grown: windows."""
    figure, (steps, tokens, growth) = new_figure(13, 4, 1, 3)
    fine = [min(found) * (max(found) / min(found)) ** (i / 99) for i in range(100)]
    for axes, curve, values, name in (
            (steps, planned.steps, list(found.values()), "steps"),
            (tokens, planned.tokens, [batch * s for batch, s in found.items()], "tokens")):
        factor = height(found, values, curve, scale[0])
        axes.plot(fine, [factor * curve(b, scale[0]) for b in fine], color=GRAY,
                  label="as 1 + N/B" if axes is steps else "as 1 + B/N")
        axes.plot([*found], values, "o", color=BLUE, label="measured")
        axes.axvline(scale[0], color=RED, linewidth=1, label=f"N = {scale[0]:,.0f} tokens")
        axes.axvspan(scale[0] - scale[1], scale[0] + scale[1], color=RED, alpha=0.15, linewidth=0)
        axes.set_title(f"{name} to a loss of {loss:g}")
        axes.set_xlabel("B, tokens in a batch")
        axes.legend(fontsize=8)
    steps.set_yscale("log")
    tokens.set_yscale("log")
    steps.set_xscale("log", base=2)
    tokens.set_xscale("log", base=2)

    middle = [(first * last) ** 0.5 for first, last, *_ in grown]
    scales, errors = [one for *_, one, _ in grown], [error for *_, error in grown]
    growth.errorbar(middle, scales, errors, fmt="o-", color=RED, markersize=4, linewidth=1)
    growth.set_title("the noise scale grows on the way")
    growth.set_xlabel(f"step, of {MEASURED} sequences")
    growth.set_ylabel("N, tokens")
    growth.set_xscale("log")
    growth.set_yscale("log")
    save(figure, path, dpi=110)


def accept(argv):
    parser = commands.Parser("benchmarks/draw_batch.py", description=__doc__)
    add = parser.add_argument
    add("--loss", type=commands.number(float, 2, 5, 2.6), default=2.6)
    add("--largest", type=commands.number(int, MEASURED, 2**14, 256), default=256,
        help="sequences in the largest batch")
    add("--out", type=commands.output("batch.png"), default=ROOT / "figures/batch.png")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    found, best = {}, {}
    print(f"{'tokens in a batch':>18}{'rate':>9}{'steps':>8}{'all tokens':>12}")
    sizes = itertools.takewhile(lambda size: size <= args.largest, (2**i for i in range(15)))
    for size in sizes:
        best[size] = fewest_steps(size, args.loss)
        if best[size]:
            steps, rate, _ = best[size]
            tokens = size * arguments(size).model.seq
            found[tokens] = steps
            print(f"{tokens:>18,}{rate:>9g}{steps:>8,}{tokens * steps:>12,}", flush=True)
    if best[MEASURED] is None:
        refusals.fail(f"{MEASURED} sequences a step did not bring the loss to {args.loss:g} in "
                      f"{MOST} steps", status=1)
    _, rate, estimates = best[MEASURED]
    scale = on_the_way(estimates)
    print(f"noise scale, the mean on the way of {MEASURED} sequences a step: {scale[0]:,.0f} ± "
          f"{scale[1]:,.0f} tokens")
    *_, longer = train(MEASURED, rate, 0, LONG)
    grown = list(windows(longer))
    for first, last, one, error in grown:
        print(f"  steps {first} to {last}: {one:,.0f} ± {error:,.0f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(found, args.loss, scale, grown, args.out)


if __name__ == "__main__":
    commands.program(main)
