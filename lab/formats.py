"""Number formats: what 32, 16 and 8 bits can hold, and what becomes of an update.

    python -m lab.formats [--out figures/formats.png]

A floating-point number is a sign, an exponent and a mantissa: bits of the exponent buy range, bits
of the mantissa precision. From one power of two to the next, all numbers are equally far apart, and
twice as far as before: so what a format cannot tell apart is a share of the number, its epsilon.

    float32, TF32, bfloat16     8 bits of exponent: the same range, ever fewer digits
    float16                     5, so gradients become zero, unless the loss is scaled
    E4M3, E5M2                  8 bits in all: digits for activations, or range for gradients; and a
                                scale for each tensor, row or tile (kernels/fp8.py)
    E8M0                        no mantissa, no sign: the scales of MX, which are powers of two

Weights in bfloat16 have 8 significant bits. An update below half the distance to the next number is
rounded away, each time, and the weight never moves. Two things help. Master weights are a copy in
float32 which adds the updates up. Stochastic rounding goes up or down at random, more often to the
nearer one, so that on average nothing is lost. Both are shown on the tiny preset, trained here.

Recipes for FP8 keep 20 to 9 bytes of a parameter between two steps, and what the last three save is
mostly AdamW's moments.

All of the table comes from torch.finfo and from casts. TF32 is no dtype: it is a float32 of which a
matmul reads 10 bits of mantissa, rounded here to the nearest.

Sources: Micikevicius et al., FP8 Formats for Deep Learning (2022); OCP Microscaling Formats (MX)
Specification 1.0 (2023); Peng et al., FP8-LM (2023); DeepSeek-AI, DeepSeek-V3 Technical Report
(2024), section 3.3; Ultra-Scale Playbook, "Mixed precision training".
"""

import math
import sys
from pathlib import Path

import torch

import common
from lab.drawing import new_figure, save
from lab.run import commands, refusals

FORMATS = {"float64": torch.float64, "float32": torch.float32, "TF32": "tf32",
           "bfloat16": torch.bfloat16, "float16": torch.float16, "E4M3": torch.float8_e4m3fn,
           "E5M2": torch.float8_e5m2, "E8M0": torch.float8_e8m0fnu}
LR = 5e-5               # so small that most updates of a weight in bfloat16 are lost
WAYS = "float32", "masters", "stochastic", "nearest"


# ---------------------------------------------------------------------------------- what they hold

def cast(x, name):
    """x (any shape), through the format and back to float64. What is above the largest number stays
    above it, as inf, or as NaN where there is no inf."""
    if name == "TF32":
        bits = x.float().view(torch.int32)
        bits = bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF        # to the nearest; ties to even
        return torch.where(x.isfinite(), bits.view(torch.float32).double(), x.double())
    if name == "E8M0":
        x = x.float()                                                   # PyTorch casts from there
    return x.to(FORMATS[name]).double()


def numbers(name):
    """All finite numbers above 0 of a format of 16 or 8 bits, in order."""
    dtype = FORMATS[name]
    kind = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    values = torch.arange(2 ** (8 * dtype.itemsize)).to(kind).view(dtype).double()
    return values[values.isfinite() & (values > 0)].unique()


def spacing(x, name):
    """From each of x > 0, rounded to the format, to its next number; NaN where there is none."""
    row, y = about(name), cast(x, name)
    gap = (row["epsilon"] * y.log2().floor().exp2()).clamp(min=row["smallest"])
    is_inside = (y > 0) & (y < row["largest"]) & (x <= row["largest"])
    return torch.where(is_inside, gap, math.nan)


def about(name):
    """A row of the table."""
    if name == "TF32":
        info, bits, epsilon = torch.finfo(torch.float32), 19, 2.0**-10
        largest = (2 - epsilon) * 2.0**127
    else:
        info = torch.finfo(FORMATS[name])
        bits, epsilon, largest = info.bits, info.eps, info.max
    sign, mantissa = int(info.min < 0), round(-math.log2(epsilon))
    normal = info.smallest_normal
    smallest = normal * epsilon if mantissa else normal                 # subnormal
    one_and_a_bit = torch.tensor([1.001, 0.001], dtype=torch.float64)
    total, milli = cast(one_and_a_bit, name).tolist()
    return {"bits": bits, "sign": sign, "exponent": bits - sign - mantissa, "mantissa": mantissa,
            "largest": largest, "normal": normal, "smallest": smallest, "epsilon": epsilon,
            "sum": total, "milli": milli}


def table():
    """Its lines."""
    yield (f"{'':10}{'bits':>5}{'s e m':>10}{'largest':>10}{'normal':>10}{'smallest':>10}"
           f"{'epsilon':>10}{'1 + 0.001':>12}{'0.001':>12}")
    for name in FORMATS:
        row = about(name)
        layout = f"{row['sign']} {row['exponent']} {row['mantissa']}"
        yield (f"{name:10}{row['bits']:>5}{layout:>10}{row['largest']:>10.2g}"
               f"{row['normal']:>10.2g}{row['smallest']:>10.2g}{row['epsilon']:>10.2g}"
               f"{row['sum']:>12.7g}{row['milli']:>12.5g}")


# ----------------------------------------------------------------------------- what updates become

def stochastic(x, generator):
    """x, float32, to bfloat16, up with a probability that is the share of the way: random numbers
    are added to the 16 bits that are then cut off."""
    bits = x.view(torch.int32)
    noise = torch.randint(0, 2**16, x.shape, generator=generator, dtype=torch.int32)
    return (bits + noise & ~0xFFFF).view(torch.float32)


def lost(weight, update, name):
    """Which updates leave a weight of this format as it is."""
    weight = cast(weight, name)
    return cast(weight + update.double(), name) == weight


def kind_of(name):
    """The kind of parameter."""
    if name in ("embedding.weight", "head.out.weight"):
        return "tables"
    return "LayerNorms" if "norm" in name else "matrices"


def lost_by_kind(before, model, formats):
    """{kind of parameter: {format: the share of lost updates}}, among those that are not 0."""
    of_kind = {}
    for name, p in model.named_parameters():
        update = p.detach() - before[name]
        one = update != 0
        of_kind.setdefault(kind_of(name), []).append((before[name][one], update[one]))
    shares = {}
    for kind, pairs in of_kind.items():
        weights, updates = (torch.cat(tensors) for tensors in zip(*pairs))
        shares[kind] = {name: lost(weights, updates, name).double().mean().item()
                        for name in formats}
    return shares


def settings(steps):
    """The arguments of a run of the tiny preset."""
    return common.parse(__file__, "", {"": None}, lambda parser: None,
                        ["--device=cpu", f"--steps={steps}"])


def train(way, steps, lr=LR):
    """Train the tiny preset, computed in float32, with weights that are rounded to bfloat16 after a
    step, in one of the WAYS. Returns the losses, the weights before the last step, and the model
    after it."""
    args = settings(steps)
    text, model = common.Text(args), common.gpt(args.model)
    losses, before = [], {}
    optimizer = common.OPTIMIZERS["adamw"](model.parameters(), lr)
    generator = torch.Generator().manual_seed(0)
    masters = [p.detach().clone() for p in model.parameters()]
    for step in range(args.steps):
        tokens, targets, valid = text.batch(step)
        model.zero_grad()
        loss = common.loss_sum(model(tokens), targets) / valid
        loss.backward()
        losses.append(loss.item())
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p, master in zip(model.parameters(), masters):
            if way == "masters":
                p.data.copy_(master)                    # it is the master that is updated
        optimizer.step()
        for p, master in zip(model.parameters(), masters):
            master.copy_(p.data)
            if way == "stochastic":
                p.data.copy_(stochastic(p.data, generator))
            elif way != "float32":
                p.data.copy_(p.data.bfloat16())
    return losses, before, model


def end_of(losses):
    """The mean loss of the last steps, 20 at the most."""
    return sum(losses[-20:]) / len(losses[-20:])


# --------------------------------------------------------------------------------- recipes for FP8

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "-": 0}
PARTS = "masters", "sums of gradients", "weights", "gradients", "first moment", "second moment"
RECIPES = {     # the format of each part; the products are in bf16 in the first two, then in FP8
    "bf16, fp32 sums": ("fp32", "fp32", "bf16", "bf16", "fp32", "fp32"),
    "bf16": ("fp32", "-", "bf16", "bf16", "fp32", "fp32"),
    "Transformer Engine": ("-", "-", "fp32", "fp32", "fp32", "fp32"),
    "FP8-LM, O3": ("fp16", "fp16", "fp8", "fp8", "fp8", "fp16"),
    "DeepSeek-V3": ("fp32", "fp32", "fp8", "bf16", "bf16", "bf16"),
    "Nanotron": ("bf16", "fp32", "fp8", "fp8", "fp8", "fp8"),
}


def bytes_of(recipe):
    """Of a parameter, between two steps."""
    return sum(WIDTHS[name] for name in recipe)


def table_of_recipes():
    """Its lines."""
    yield f"{'bytes of a parameter':20}" + "".join(f"{part:>18}" for part in PARTS) + "   sum"
    for name, recipe in RECIPES.items():
        yield (f"{name:20}" + "".join(f"{part:>18}" for part in recipe)
               + f"{bytes_of(recipe):>6}")


# --------------------------------------------------------------------------------------- the figure

def draw(shares, losses, path):
    """Draw the spacing of numbers, the shares of `lost_by_kind`, and {way: losses}."""
    figure, (distances, bars, gaps) = new_figure(13, 4.2, 1, 3)

    x = torch.logspace(-8, 5, 2000, dtype=torch.float64)
    for name in FORMATS:                                # TF32 lies on float16, where both exist
        distances.plot(x, spacing(x, name), label=name, linewidth=1.2)
    distances.set_xscale("log")
    distances.set_yscale("log")
    distances.set_title("from a number to the next")
    distances.set_xlabel("number")
    distances.legend(fontsize=7)

    formats = next(iter(shares.values()))
    for i, kind in enumerate(shares):
        places = [j + 0.25 * i for j in range(len(formats))]
        bars.bar(places, [100 * share for share in shares[kind].values()], 0.25, label=kind)
    bars.set_xticks([j + 0.25 for j in range(len(formats))], formats)
    bars.set_ylim(0, 125)
    bars.set_title("updates that round to nothing, %")
    bars.legend(fontsize=8, ncols=3, loc="upper left")

    for way in WAYS[1:]:
        gaps.plot([a - b for a, b in zip(losses[way], losses["float32"])], label=way, linewidth=1.2)
    gaps.axhline(0, color="black", linewidth=0.5)
    gaps.set_title("bfloat16 weights: loss above that of float32")
    gaps.set_xlabel("step")
    gaps.legend(fontsize=8)
    save(figure, path, dpi=120)


def arguments(argv):
    """The command line."""
    parser = commands.Parser("-m lab.formats", description=__doc__)
    parser.add_argument("--out", type=commands.output("formats.png"), help="draw it")
    parser.add_argument("--steps", type=commands.number(int, 1, 10**6, 100), default=100,
                        help="of each of the four runs")
    return parser.parse_args(argv)


def main(argv=None):
    args = refusals.accepted(arguments, sys.argv[1:] if argv is None else argv, alone=True)
    print(*table(), sep="\n")

    losses = {}
    for way in WAYS:
        losses[way], before, model = train(way, args.steps)
        if way == "float32":
            shares = lost_by_kind(before, model, ("float32", "float16", "bfloat16", "E4M3"))
    print(f"\nupdates that round to nothing, in step {args.steps} with AdamW and a rate of {LR:g}:")
    for kind, of_kind in shares.items():
        print(f"  {kind:12}" + "".join(f"{name:>10} {share:4.0%}"
                                       for name, share in of_kind.items()))
    print("\nweights in bfloat16: the mean loss of the last 20 steps, and how far above float32's")
    for way in WAYS:
        off = end_of(losses[way]) - end_of(losses["float32"])
        print(f"  {way:12}{end_of(losses[way]):8.4f} {off:+8.4f}")
    print("", *table_of_recipes(), sep="\n")
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        draw(shares, losses, args.out)


if __name__ == "__main__":
    commands.program(main)
