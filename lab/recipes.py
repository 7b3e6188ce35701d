"""Recipes for training in FP8: what each keeps of a parameter, in bytes, and what small moments do.

`python -m lab.formats` prints it. The table is the Ultra-Scale Playbook's ("FP8 pretraining"): six
ways to keep a parameter between two steps, from 20 bytes to 9. Its formats are data here, and the
sum is a formula.

What the last three save is mostly AdamW's moments. These are measured: AdamW by hand, on the tiny
preset, with moments that are stored in bfloat16, float16 or FP8 between two steps, and computed
with in float32. The second moment is stored as its root: a square has twice the range, and in FP8
most of it would be zero, by which AdamW divides. FP8 has a scale for each tile of 1 x 128
(kernels/fp8.py), which is 1/32 of a byte more.

Sources: Peng et al., FP8-LM (2023); DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.3.
"""

import math

import torch

import common
from kernels import fp8
from lab.bench.meters import nbytes

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
MEASURED = {name: recipe[-2:] for name, recipe in RECIPES.items()
            if recipe[-2:] != ("fp32", "fp32")}
TILE = 1, fp8.TILE
KEEP = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_of(recipe):
    """Of a parameter, between two steps."""
    return sum(WIDTHS[name] for name in recipe)


def moment_bytes(shapes, name):
    """Of one moment of parameters of these shapes; FP8 has scales."""
    numbers = sum(math.prod(shape) for shape in shapes)
    tiles = sum(math.prod(shape[:-1]) * math.ceil(shape[-1] / fp8.TILE) for shape in shapes)
    return WIDTHS[name] * numbers + (4 * tiles if name == "fp8" else 0)


def stored(x, name):
    if name == "fp8":
        return fp8.quantize(x.reshape(-1, x.shape[-1]), TILE)
    return x.to(KEEP[name])


def loaded(kept, like):
    wide = fp8.dequantize(kept) if isinstance(kept, fp8.Quantized) else kept.float()
    return wide.view_as(like)


class AdamW:
    """By hand, with moments that are stored in these formats between two steps."""

    def __init__(self, parameters, formats, lr=5e-4, betas=(0.9, 0.95), eps=1e-6, decay=0.01):
        self.parameters, self.formats, self.steps = list(parameters), formats, 0
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.kept = [[stored(torch.zeros_like(p.data), name) for name in formats]
                     for p in self.parameters]

    @torch.no_grad()
    def step(self):
        self.steps += 1
        first, second = self.betas
        for p, kept in zip(self.parameters, self.kept):
            mean = loaded(kept[0], p).lerp(p.grad, 1 - first)
            square = loaded(kept[1], p).square().lerp(p.grad.square(), 1 - second)
            root = (square / (1 - second**self.steps)).sqrt() + self.eps
            p.mul_(1 - self.lr * self.decay)
            p.sub_(self.lr / (1 - first**self.steps) * mean / root)
            kept[:] = [stored(x, name) for x, name in zip((mean, square.sqrt()), self.formats)]


def train(args, formats):
    """The losses of a run, and bytes of all moments."""
    text, model = common.Text(args), common.gpt(args.model)
    optimizer, losses = AdamW(model.parameters(), formats), []
    for step in range(args.steps):
        tokens, targets, valid = text.batch(step)
        model.zero_grad()
        loss = common.loss_sum(model(tokens), targets) / valid
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, nbytes([tuple(x) if isinstance(x, tuple) else x
                           for kept in optimizer.kept for x in kept])


def table():
    """Its lines."""
    yield f"{'bytes of a parameter':20}" + "".join(f"{part:>18}" for part in PARTS) + "   sum"
    for name, recipe in RECIPES.items():
        yield (f"{name:20}" + "".join(f"{part:>18}" for part in recipe)
               + f"{bytes_of(recipe):>6}")


def measured(args):
    """Lines: of each choice of moments its bytes, beside the formula, and its loss beside that of
    moments in fp32, the mean of the last steps (20 at the most)."""
    shapes = [p.shape for p in common.gpt(args.model).parameters()]
    numbers, usual = sum(map(math.prod, shapes)), None
    yield f"{'AdamW, moments in':20}{'bytes measured':>16}{'formula':>12}{'a number':>10}{'loss':>9}"
    for name, formats in {"": ("fp32", "fp32"), **MEASURED}.items():
        losses, size = train(args, formats)
        end = sum(losses[-20:]) / len(losses[-20:])
        usual = end if usual is None else usual
        formula = sum(moment_bytes(shapes, of_moment) for of_moment in formats)
        right = "✓" if size == formula else "✗"
        yield (f"{' and '.join(formats):20}{size:>16,}{formula:>12,}{size / numbers:>10.2f}"
               f"{end:>9.4f} {end - usual:+.4f}   {right}  {name}")
