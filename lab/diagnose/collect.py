"""Collects the Evidence of a step that doesn't match one GPU's, on rank 0.

A run that matches costs nothing of this. Communication, outside of all measurements: rank 0 gathers
what each rank holds. It computes everything else itself.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from common import Cut, part
from lab.diagnose.evidence import Evidence, Fit, Part
from lab.diagnose.guesses import guesses, without_balance_loss
from lab.run.formulas import NARROWER
from lab.run.verify import named_parameters

ORDER = ("embedding", "norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "router", "mlp.up",
         "mlp.gate", "mlp.down", "mlp.shared", "head.norm", "head.out")     # as forward meets them


class Held(NamedTuple):
    """What a rank holds of a parameter."""
    gradient: torch.Tensor      # before clipping, in float64
    dtype: torch.dtype          # that it was computed in
    parameter: torch.Tensor     # after the step
    cuts: tuple
    is_missing: bool            # it has no gradient


class Rank(NamedTuple):
    """What rank 0 gathers from a rank."""
    loss: float
    norm: float
    held: dict          # {name: Held}


def collect(verifier, batch, here, there, scale):
    """The Evidence, on rank 0; None elsewhere. here: {(kind, name): (tensor, the parameter that
    says how it is cut)} of this rank; there: {(kind, name): tensor} of one GPU; scale: what
    differences are relative to."""
    run = verifier.run
    ranks = [None] * run.world if run.rank == 0 else None
    dist.gather_object(what_is_here(run, here), ranks)
    evidence = examine(verifier, batch, ranks, there, scale) if run.rank == 0 else None
    if run.device.type == "cuda" and run.world > 1:
        verifier.wait_for_rank_0()
    return evidence


def what_is_here(run, here):
    """The Rank that this one is, with tensors on the CPU."""
    loss, norm = (here[kind, ""][0].item() for kind in ("loss", "gradient norm"))
    held, left = {}, share_left(norm, run.args.clip)
    for (kind, name), (gradient, owner) in here.items():
        if kind == "gradients":
            after, _ = here["parameters", name]
            held[name] = Held(gradient.detach().double().cpu() / left, gradient.dtype,
                              after.detach().double().cpu(), cuts_of(owner), owner.grad is None)
    return Rank(loss, norm, held)


def cuts_of(owner):
    """How a parameter is cut, without the groups; not at all, if it doesn't say."""
    return tuple(Cut(*cut[:3], None) for cut in getattr(owner, "cuts", ()))


def examine(verifier, batch, ranks, there, scale):
    """The Evidence. ranks: the Rank of each."""
    run, args, previous = verifier.run, verifier.run.args, verifier.previous
    there = {key: tensor.cpu() for key, tensor in there.items()}
    scale = {key: float(value) for key, value in scale.items()}
    evidence = compare_losses_and_norms(verifier, batch, ranks, there, scale)
    names, held = evidence.names, [rank.held for rank in ranks]
    left = share_left(evidence.norm_there, args.clip)
    right = {name: there["gradients", name] / left for name in names}
    drawn = {name: p.detach().double().cpu() for name, p in named_parameters(run.first_model())}
    before = drawn                                      # the weights, before this step
    if previous:
        before = {name: previous["parameters", name] for name in names}
        added = {name: previous["gradients", name] for name in names}
        evidence.more["the step before"] = fits(held, added, less=right)
    for rank, of_rank in enumerate(held):
        for name, one in of_rank.items():
            for kind, seen in compare_tensors(name, one, there, before, right, scale, left):
                evidence.parts[kind].setdefault(name, {})[rank] = seen
    for name in names:
        copies = [of_rank[name] for of_rank in held if name in of_rank]
        evidence.totals[name] = fit(add_up(copies, right[name]), right[name])

    biases_moved = previous and any(                    # of chapter 08: no guess has them
        buffer.is_floating_point() and buffer.any() for buffer in run.one_gpu.buffers())
    if is_explained(evidence) or biases_moved:
        return evidence
    for words, compute in guesses(run, batch, drawn, before, evidence.is_off("loss")):
        evidence.losses[words], gradients = compute()
        evidence.fits[words] = fits(held, gradients)
    if getattr(args.model, "balance_weight", None):
        _, without = without_balance_loss(run, batch, before)
        balance = {name: right[name] - without[name] for name in names}
        evidence.more["the balance loss"] = fits(held, balance, less=right)
    return evidence


def compare_losses_and_norms(verifier, batch, ranks, there, scale):
    """The Evidence, with what is known of losses and norms."""
    run, tolerance = verifier.run, verifier.tolerance
    if verifier.steps >= verifier.tensor_steps:
        tolerance = dict.fromkeys(tolerance, None) | {"loss": tolerance["loss"]}
    tolerance = tolerance | {"movement": tolerance["parameters"]}
    for kind in ("loss", "gradient norm"):
        if tolerance[kind] is not None:                 # there is one number of it to be off from
            tolerance[kind] *= scale[kind, ""] / (abs(there[kind, ""].item()) or 1)
    return Evidence(
        run.args, run.world, verifier.rounding, tolerance, matched=verifier.steps,
        valid=batch.valid, names=in_forward_order([n for kind, n in there if kind == "gradients"]),
        loss=[rank.loss for rank in ranks], loss_there=there["loss", ""].item(),
        norm=[rank.norm for rank in ranks], norm_there=there["gradient norm", ""].item())


def in_forward_order(names):
    """A module lists what it holds itself before what is in its own modules."""
    modules = list(dict.fromkeys(name.split(".")[0] for name in names))

    def place(name):
        in_module = (i for i, words in enumerate(ORDER) if words in name)
        return modules.index(name.split(".")[0]), next(in_module, len(ORDER))

    return sorted(names, key=place)


def is_explained(evidence):
    """Whether factors explain all that is wrong, or nothing can, so that no other gradients need to
    be computed."""
    factors = [evidence.factor("gradients", name) for name in evidence.names]
    has_factors = None not in factors and not evidence.is_off("loss")
    return has_factors or not all(map(math.isfinite, evidence.loss + evidence.norm))


# ----------------------------------------------------------------------------------------- tensors

def share_left(norm, clip):
    """What clipping by this norm leaves of a gradient."""
    return min(1.0, clip / (norm + 1e-6)) if clip and math.isfinite(norm) else 1.0


def fit(tensor, other):
    """The Fit of a tensor to another. None if both are zero: they are alike, but have no ratio."""
    x, other = tensor.flatten().double(), other.flatten().double()
    size, square = x.norm(), other @ other
    if size == 0:
        return None if square == 0 else Fit(0.0, 0.0)
    if square == 0:
        return Fit(math.nan, math.inf)
    ratio = (x @ other) / square
    return Fit(ratio.item(), ((x - ratio * other).norm() / size).item())


def fits(held, others, less=None):
    """{name: {rank: Fit}} of each rank's gradients, minus `less`, to these."""
    by_name = {}
    for rank, of_rank in enumerate(held):
        for name, one in of_rank.items():
            other, rest = part(others[name], one.cuts), one.gradient
            if rest.shape != other.shape:
                continue
            if less:
                rest = rest - part(less[name], one.cuts)
            by_name.setdefault(name, {})[rank] = fit(rest, other)
    return by_name


def compare_tensors(name, one, there, before, right, scale, left):
    """Yield (kind, Part) of what a rank holds of a parameter."""
    seen = part_of(one.gradient, one.cuts, right[name], scale["gradients", name] / left, one.dtype)
    yield "gradients", seen._replace(state="missing") if one.is_missing else seen
    after, now, size = one.parameter, there["parameters", name], scale["parameters", name]
    yield "parameters", part_of(after, one.cuts, now, size)
    start = part(before[name], one.cuts)
    moved = after - start if after.shape == start.shape else after
    yield "movement", part_of(moved, one.cuts, now - before[name], size)


def part_of(x, cuts, full, scale, dtype=torch.float64):
    """The Part that a rank holds of a tensor, which was computed in this dtype. full: all of one
    GPU's."""
    expected = part(full, cuts)
    square = expected.square().sum().item()
    unlike = Part(tuple(cut[:3] for cut in cuts), math.inf, Fit(math.nan, math.inf),
                  "of another shape", 0.0, square, 0.0, "")
    if x.shape != expected.shape:
        return unlike
    if not x.isfinite().all():
        return unlike._replace(state="not finite", square=math.nan)
    weights = torch.arange(1, x.numel() + 1, dtype=torch.float64).cos()
    narrow = [str(other).removeprefix("torch.") for other in NARROWER
              if other.itemsize < dtype.itemsize and torch.equal(x.to(other).double(), x)]
    return unlike._replace(
        off=((x - expected).abs().max() / (scale if scale > 0 else 1)).item(),
        fit=fit(x, expected), state="" if x.any() else "zero", square=x.square().sum().item(),
        probe=(x.flatten() @ weights).item(), narrow=narrow[0] if narrow and x.any() else "")


def add_up(copies, full):
    """The sum of what ranks hold of a tensor, each part in its place."""
    total = torch.zeros_like(full)
    for one in copies:
        parts = [math.prod(cut.parts for cut in one.cuts if cut.dim == dim)
                 for dim in range(full.ndim)]
        padded = full.new_zeros([-(-n // m) * m for n, m in zip(full.shape, parts)])
        place = part(padded, one.cuts)                  # a view
        if place.shape == one.gradient.shape:
            place.add_(one.gradient)
            total += padded[tuple(slice(n) for n in full.shape)]
    return total
