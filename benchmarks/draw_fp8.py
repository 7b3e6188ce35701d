"""Draws what FP8 costs: the loss in each scaling, an outlier, and sums with few bits.

    python benchmarks/draw_fp8.py [--steps 200] [--out figures/fp8.png]

Chapter 01 trains the tiny preset in fp32, bf16 and FP8 with each scaling, on a CPU; and in FP8 once
more with an outlier planted. For that, one feature of what GELU gives is multiplied by 2^18 before
it is rounded, and its weights are divided by that: without rounding, nothing would change. (A model
grows such features by itself, after more steps than these.) It takes some five minutes.
"""

import sys
from pathlib import Path
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import common  # noqa: E402  (after the path to it)
from kernels import fp8  # noqa: E402
from lab import chapters  # noqa: E402
from lab.drawing import new_figure, save  # noqa: E402
from lab.run import commands, refusals  # noqa: E402

FEATURE, OUTLIER = 5, 2.0**18
WINDOW = 20             # losses of so many steps are averaged
RUNS = {                # precision, scaling, whether there is an outlier
    "bf16": ("bf16", None, False),
    "fp8, one scale a tensor": ("fp8", "tensor", False),
    "fp8, a row": ("fp8", "row", False),
    "fp8, a tile": ("fp8", "tile", False),
    "a tensor, with an outlier": ("fp8", "tensor", True),
    "a tile, with an outlier": ("fp8", "tile", True),
}


class Losses(common.Run):
    """A bare run that keeps its losses, and its model."""

    def __init__(self, args):
        super().__init__(args)
        self.losses = []

    def log(self, batch, loss, norm, model, *more, **shown):
        self.losses.append(loss.item())
        self.model = model


def train(steps, precision="fp32", scaling=None, outlier=False):
    """A run of chapter 01 with these flags; on each machine the same."""
    one = chapters.chapter("01")
    flags = ["--device=cpu", f"--steps={steps}", f"--precision={precision}"]
    flags += [f"--scaling={scaling}"] if scaling else []
    args = common.parse(one.__file__, "", one.VARIANTS, one.flags, flags)
    one.requires(args, 1)
    run = Losses(args)
    with mock.patch.object(fp8, "linear8", with_outlier if outlier else fp8.linear8):
        one.train(run)
    return run


def with_outlier(x, scaling, *weights, linear8=fp8.linear8):
    """linear8, with an outlier in the input of `down`, the widest."""
    factors = torch.ones(x.shape[-1], dtype=x.dtype)
    if x.shape[-1] > weights[0].shape[0]:
        factors[FEATURE] = OUTLIER
    return linear8(x * factors, scaling, *[w / factors for w in weights])


def smooth(losses):
    """Means over the last WINDOW steps."""
    sums = torch.tensor(losses, dtype=torch.float64).cumsum(0)
    return ((sums[WINDOW:] - sums[:-WINDOW]) / WINDOW).tolist()


def input_of_down(run):
    """What GELU gives in the last block of a trained model: (tokens, features)."""
    mlp, seen = run.model[-2].mlp, []
    handle = mlp.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs))
    tokens, *_ = run.text.batch(0)
    with torch.no_grad():
        run.model(tokens)
        handle.remove()
        return torch.nn.functional.gelu(mlp.project(*seen)).flatten(0, 1)


def error_of(x, scaling, others):
    """How far the other features are off once x is rounded, as a share of their size."""
    tile, _ = fp8.SCALINGS[scaling]
    off = (fp8.dequantize(fp8.quantize(x, tile)) - x)[:, others]
    return (off.norm() / x[:, others].norm()).item()


def errors_by_outlier(x):
    """{scaling: [error of all other features]} for outliers of 2^0 to 2^20 times their size."""
    others = torch.arange(x.shape[1]) != FEATURE
    found = {scaling: [] for scaling in fp8.SCALINGS}
    for power in range(21):
        planted = x.clone()
        planted[:, FEATURE] *= 2.0**power
        for scaling, errors in found.items():
            errors.append(error_of(planted, scaling, others))
    return found


def errors_by_length():
    """{promote: [(k, error)]} of a product as Hopper's tensor cores add it."""
    found, generator = {None: [], 128: []}, torch.Generator().manual_seed(0)
    for k in (128, 256, 512, 1024, 2048, 4096, 8192):
        a, b = (fp8.quantize(torch.rand(16, k, generator=generator), (1, fp8.ALL)) for _ in "ab")
        exact = fp8.reference_product(a, b, torch.float64)
        for promote, errors in found.items():
            off = (fp8.hopper_product(a, b, promote) - exact).abs() / exact
            errors.append((k, off.mean().item()))
    return found


def draw(fp32, losses, x, path):
    figure, panels = new_figure(11, 8, 2, 2)
    loss, histogram, outliers, sums = panels.flat

    for name, values in losses.items():
        gap = [a - b for a, b in zip(smooth(values), smooth(fp32))]
        style = "--" if "outlier" in name else "-"
        loss.plot(range(WINDOW, WINDOW + len(gap)), gap, style, label=name, linewidth=1.2)
    loss.axhline(0, color="black", linewidth=0.5)
    loss.set_title(f"loss above that of fp32 (means of {WINDOW} steps)")
    loss.set_xlabel("step")
    loss.set_yscale("symlog", linthresh=0.01)
    loss.legend(fontsize=8)

    planted = x.clone()
    planted[:, FEATURE] *= OUTLIER
    sizes = planted.abs()[planted != 0].log2()
    histogram.hist(sizes.tolist(), bins=120, color="#8899bb")
    histogram.set_yscale("log")
    for scaling, color in (("tensor", "#bb3333"), ("tile", "#228833")):
        tile, _ = fp8.SCALINGS[scaling]
        scale = fp8.quantize(planted, tile).scales[0, -1].log2().item()
        histogram.axvline(scale - 10, color=color)
        histogram.text(scale - 9.6, 0.94 if scaling == "tensor" else 0.84,
                       f"a {scaling}: zero left of this", color=color, fontsize=8,
                       transform=histogram.get_xaxis_transform())
    histogram.set_title("what GELU gives, with an outlier, and what becomes zero")
    histogram.set_xlabel("log2 of the magnitude")
    histogram.set_ylabel("numbers")

    for scaling, errors in errors_by_outlier(x).items():
        outliers.plot(range(21), errors, "o-", markersize=3, label=f"a scale for a {scaling}")
    outliers.set_yscale("log")
    outliers.set_title("error of all other features, as a share of their size")
    outliers.set_xlabel("log2 of the outlier's factor")
    outliers.set_xticks(range(0, 21, 4))
    outliers.legend(fontsize=8)

    names = {None: "14 bits for all of k", 128: "every 128 promoted to fp32"}
    for promote, errors in errors_by_length().items():
        sums.plot(*zip(*errors), "o-", markersize=3, label=names[promote])
    sums.set_xscale("log", base=2)
    sums.set_yscale("log")
    sums.set_title("relative error of a sum of k products in Hopper's tensor cores")
    sums.set_xlabel("k")
    sums.legend(fontsize=8)
    save(figure, path, dpi=120)


def accept(argv):
    parser = commands.Parser("benchmarks/draw_fp8.py", description=__doc__)
    parser.add_argument("--steps", type=commands.number(int, 2 * WINDOW, 10**6, 200), default=200)
    parser.add_argument("--out", type=commands.output("fp8.png"), default=ROOT / "figures/fp8.png")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(accept, sys.argv[1:] if argv is None else argv, alone=True)
    fp32, losses = train(args.steps), {}
    print(f"{'fp32':<28}{smooth(fp32.losses)[-1]:8.4f}")
    for name, run in RUNS.items():
        losses[name] = train(args.steps, *run).losses
        end, gap = smooth(losses[name])[-1], smooth(losses[name])[-1] - smooth(fp32.losses)[-1]
        print(f"{name:<28}{end:8.4f} {gap:+.4f}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(fp32.losses, losses, input_of_down(fp32), args.out)


if __name__ == "__main__":
    commands.program(main)
