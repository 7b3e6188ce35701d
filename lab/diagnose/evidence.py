"""What is known of a step that does not match one GPU's: numbers, which all ranks find together.

diagnose.py puts them into words. They are found once, in the first step that does not match: a
run that matches costs nothing of this. Communication, outside of all measurements: broadcasts of
what rank 0 computes with one GPU, an all_reduce of the gradients, and gathers of small objects.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist

from common import part
from lab.diagnose.guesses import first_model, guesses, named, unbalanced, weights_of

# Up to which share of its size a tensor may be off and still be called a multiple of another, and
# up to which share of it a number may be off and still be called by another's name.
ROUNDING = {"float64": (1e-9, 1e-8), "float32": (1e-3, 1e-3), "float16": (0.05, 0.02),
            "bfloat16": (0.3, 0.05), "int8": (0.3, 0.05), "fp8": (0.3, 0.05),
            "float32 and fp8": (0.05, 0.02)}
SAME = 1e-2                 # so near are what two ranks hold, if they hold the same; mostly equal
NARROWER = torch.bfloat16, torch.float16, torch.float32     # what a wide dtype may hide
LARGEST = 10**8             # numbers of gradients and parameters: more would take too much memory


class Fit(NamedTuple):
    """A tensor beside another: `ratio` times that one, but for a rest of `residue` of its size."""
    ratio: float
    residue: float


class Part(NamedTuple):
    """What a rank has seen of a tensor of its own, beside the same part of one GPU's."""
    where: tuple        # which part: (dim, index, parts) of each cut
    off: float          # the largest difference, in the verdict's measure
    fit: Fit            # None if both are zero
    state: str          # "missing", "zero", "not finite", "of another shape" or ""
    square: float       # the sum of its numbers' squares
    square_there: float         # of one GPU's
    probe: float        # a weighted sum: tensors with different ones are different
    narrow: str         # a narrower dtype that holds all of its numbers, or ""


@dataclass
class Evidence:
    """Lists go by rank. All gradients are those before clipping, here and on one GPU."""
    args: object
    world: int
    rounding: str       # a key of ROUNDING
    tolerance: dict     # by kind; None: not judged; of loss and norm, shares of one GPU's
    step: int           # the first is 1
    matched: int        # how many steps before it matched
    valid: int          # targets of its batch
    by_share: list      # and of each data-parallel rank's part of it
    names: list         # of all parameters, in the order of forward
    loss: list
    loss_there: float   # one GPU's
    norm: list
    norm_there: float
    moved: float        # how far its weights have moved by then, as a share of what they began as
    parts: dict = field(default_factory=lambda: {   # {kind: {name: {rank: Part}}}
        "gradients": {}, "parameters": {}, "movement": {}})
    totals: dict = field(default_factory=dict)      # {name: Fit} of the gradients' sum over ranks
    stale: list = field(default_factory=list)       # the share of the weights that never moved
    losses: dict = field(default_factory=dict)      # {words: the loss} of other gradients: guesses
    fits: dict = field(default_factory=dict)        # {words: {name: {rank: Fit}}} of ours to them
    more: dict = field(default_factory=dict)        # {"the step before" or "the balance loss":
                                                    # {name: {rank: Fit}} of what ours are more than
                                                    # one GPU's to the gradients of that}
    alone: dict = field(default_factory=dict)       # {name: {rank: whether each of its numbers is
                                                    # that of some rank's sequences alone}}

    @property
    def is_lossy(self):
        return self.rounding not in ("float64", "float32")

    def close(self, value, other):
        """Whether a number is another one, as exactly as this run computes."""
        return abs(value - other) <= ROUNDING[self.rounding][1] * abs(other)

    def alike(self, fit):
        return fit.residue <= ROUNDING[self.rounding][0]

    def all_alike(self, fits):
        """The ratio that all of them have, if there is one."""
        fits = [fit for fit in fits if fit]
        if fits and all(self.alike(fit) and self.close(fit.ratio, fits[0].ratio) for fit in fits):
            return fits[0].ratio

    def is_off(self, kind):
        """Whether the "loss" or the "gradient norm" is off on some rank, as the verdict has it."""
        values, there = ((self.loss, self.loss_there) if kind == "loss" else
                         (self.norm, self.norm_there))
        allowed = self.tolerance[kind]
        return allowed is not None and any(
            not abs(value - there) <= allowed * (abs(there) or 1) for value in values)

    def at(self, kind, name):
        """{rank: Part} of those that have it."""
        return self.parts[kind].get(name, {})

    def is_wrong(self, kind, name, rank=None):
        """Whether a tensor is off on this rank, or on any; one that nobody has is."""
        allowed, parts = self.tolerance[kind], self.at(kind, name)
        if rank is not None:
            parts = {rank: parts[rank]} if rank in parts else None
        if allowed is None or parts is None:
            return False
        return not parts or any(not seen.off <= allowed for seen in parts.values())

    def wrong(self, kind):
        return [name for name in self.names if self.is_wrong(kind, name)]

    def factor(self, kind, name, rank=None):
        """The number by which one GPU's is to be multiplied to give this tensor, in each of its
        parts or in that of this rank: 1 if it is right, 0 if it is zero; None: there is none."""
        if not self.is_wrong(kind, name, rank):
            return 1.0
        ratios = []
        for at, seen in self.at(kind, name).items():
            if rank not in (None, at):
                continue
            if seen.square_there == 0:                  # one GPU has nothing there
                if seen.off <= self.tolerance[kind]:
                    continue
                return None
            if seen.state in ("missing", "zero"):
                ratios.append(0.0)
            elif seen.state or not self.alike(seen.fit) or (
                    seen.fit.residue > abs(seen.fit.ratio - 1) / 2):    # it is not the factor
                return None
            else:
                ratios.append(seen.fit.ratio)
        if ratios and all(self.close(ratio, ratios[0]) for ratio in ratios):
            return ratios[0]

    def disagree(self, kind, name):
        """Two ranks that hold the same part of it in different versions, or None."""
        first = {}
        for rank, seen in sorted(self.at(kind, name).items()):
            other_rank, other = first.setdefault(seen.where, (rank, seen))
            near = min(SAME, ROUNDING[self.rounding][0]) * max(seen.square, other.square) ** 0.5
            if rank != other_rank and not abs(seen.probe - other.probe) <= near:
                return other_rank, rank


# ---------------------------------------------------------------------------------- how it is found

def collect(verifier, batch, here, there, scale):
    """All of it, the same on every rank. here: {(kind, name): (tensor, the parameter that says how
    it is cut)} of this rank; there: {(kind, name): tensor} of one GPU; scale: what differences are
    relative to."""
    run, args, tolerance = verifier.run, verifier.run.args, verifier.tolerance
    names = in_forward_order([name for kind, name in there if kind == "gradients"])
    loss, norm = (here[kind, ""][0].item() for kind in ("loss", "gradient norm"))
    loss_there, norm_there = (there[kind, ""].item() for kind in ("loss", "gradient norm"))
    if verifier.steps >= verifier.tensor_steps:
        tolerance = dict.fromkeys(tolerance, None) | {"loss": tolerance["loss"]}
    tolerance = tolerance | {"movement": tolerance["parameters"]}
    for kind, value in (("loss", loss_there), ("gradient norm", norm_there)):
        if tolerance[kind] is not None:                 # there is one number of it to be off from
            tolerance[kind] *= float(scale[kind, ""]) / (abs(value) or 1)
    by_share = [int((targets != -100).sum()) for targets in batch.targets.chunk(args.shares)]
    found = Evidence(args, run.world, verifier.rounding, tolerance, batch.step + 1, verifier.steps,
                     batch.valid, by_share, names, everyones(run, loss), loss_there,
                     everyones(run, norm), norm_there, moved=0.0)

    # The weights before the step: those after the one before, or those that were drawn.
    send = functools.partial(from_rank_0, verifier, {n: there["gradients", n].shape for n in names})
    _, drawn = send(lambda: (0.0, weights_of(first_model(run))))
    earlier = verifier.previous and {key: x.to(run.device) for key, x in verifier.previous.items()}
    before = {name: earlier["parameters", name] for name in names} if earlier else drawn
    found.moved = share_moved(drawn, before)

    # What this rank has, beside one GPU's.
    ours, theirs, mine = {}, {}, {}
    by, by_there = share_left(norm, args.clip), share_left(norm_there, args.clip)
    for name in names:
        theirs[name] = there["gradients", name] / by_there
        if ("gradients", name) not in here:
            continue
        (gradient, owner), (after, _) = here["gradients", name], here["parameters", name]
        ours[name] = gradient.detach().double() / by, owner
        start = part(before[name], getattr(owner, "cuts", ()))
        moved = after.detach().double() - start if after.shape == start.shape else after
        size = scale["parameters", name]
        mine |= {
            ("gradients", name): look_at(*ours[name], theirs[name],
                                         scale["gradients", name] / by_there, gradient.dtype),
            ("parameters", name): look_at(after, owner, there["parameters", name], size),
            ("movement", name): look_at(moved, owner, there["parameters", name] - before[name],
                                        size)}
        if owner.grad is None:
            mine["gradients", name] = mine["gradients", name]._replace(state="missing")
    for rank, parts in enumerate(everyones(run, mine)):
        for (kind, name), seen in parts.items():
            found.parts[kind].setdefault(name, {})[rank] = seen
    found.totals = sums_over_ranks(ours, theirs)

    # What the step before has left, and other gradients that ours may be.
    if earlier:
        now = {name: there["parameters", name] for name in names}
        found.stale = everyones(run, share_of_stale(run.model, drawn, now))
        added = {name: earlier["gradients", name] for name in names}
        found.more["the step before"] = fits_of_ranks(run, ours, added, theirs)
    moved = earlier and run.rank == 0 and any(          # chapter 08's bias has moved, too
        buffer.is_floating_point() and buffer.any() for buffer in run.one_gpu.buffers())
    if not is_explained(found) and not any(everyones(run, moved)):
        every = guesses(run, batch, drawn, before, found)
        try_guesses(found, run, every, send, ours,
                    {name: scale["gradients", name] / by_there for name in names})
        if getattr(args.model, "balance_weight", None):
            _, without = send(lambda: unbalanced(run, batch, before))
            balance = {name: theirs[name] - without[name] for name in names}
            found.more["the balance loss"] = fits_of_ranks(run, ours, balance, theirs)
    return found


def in_forward_order(names):
    """As forward meets them; a module lists what it holds itself before what is in its own."""
    order = ("embedding", "norm1", "attn.q", "attn.k", "attn.v", "attn.o", "norm2", "router",
             "mlp.up", "mlp.gate", "mlp.down", "mlp.shared", "head.norm", "head.out")
    modules = list(dict.fromkeys(name.split(".")[0] for name in names))
    place = lambda name: next((i for i, words in enumerate(order) if words in name), len(order))
    return sorted(names, key=lambda name: (modules.index(name.split(".")[0]), place(name)))


def is_explained(found):
    """Whether factors tell all that is wrong, or nothing can, so that no other gradients need be
    computed."""
    factors = [found.factor("gradients", name) for name in found.names]
    has_factors = None not in factors and not found.is_off("loss")
    return has_factors or not all(map(math.isfinite, found.loss + found.norm))


def everyones(run, value):
    """What all ranks have, by rank."""
    values = [None] * run.world
    dist.all_gather_object(values, value)
    return values


def from_rank_0(verifier, shapes, compute):
    """A number and tensors, {name: tensor of shapes[name]}, that rank 0 computes, in float64."""
    run = verifier.run
    sizes = [1, *(shape.numel() for shape in shapes.values())]
    flat = torch.empty(sum(sizes), dtype=torch.float64, device=run.device)
    if run.rank == 0:
        number, tensors = compute()
        flat[0] = number
        torch.cat([tensors[name].detach().flatten().double() for name in shapes], out=flat[1:])
    if run.device.type == "cuda" and run.world > 1:
        verifier.wait_for_rank_0()
    dist.broadcast(flat, 0)
    number, *tensors = flat.split(sizes)
    return number.item(), {name: x.view(shapes[name]) for name, x in zip(shapes, tensors)}


def share_left(norm, clip):
    """What clipping by this norm leaves of a gradient."""
    return min(1.0, clip / (norm + 1e-6)) if clip and math.isfinite(norm) else 1.0


def fit(mine, theirs):
    """None if both are zero: they are alike, but have no ratio."""
    mine, theirs = mine.detach().flatten().double(), theirs.flatten()
    size, square = mine.norm(), theirs @ theirs
    if size == 0 or square == 0:
        return None if size == square else Fit(0.0, 0.0) if size == 0 else Fit(math.nan, math.inf)
    ratio = (mine @ theirs) / square
    return Fit(ratio.item(), ((mine - ratio * theirs).norm() / size).item())


def look_at(tensor, owner, full, scale, dtype=torch.float64):
    """The Part that a rank has seen of a tensor, which was computed in this dtype. full: all of one
    GPU's."""
    cuts = getattr(owner, "cuts", ())
    expected, x = part(full, cuts), tensor.detach().double()
    square = expected.square().sum().item()
    unlike = Part(tuple(cut[:3] for cut in cuts), math.inf, Fit(math.nan, math.inf),
                  "of another shape", 0.0, square, 0.0, "")
    if x.shape != expected.shape:
        return unlike
    if not x.isfinite().all():
        return unlike._replace(state="not finite", square=math.nan)
    weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64).cos()
    holds = [narrow for narrow in NARROWER if narrow.itemsize < dtype.itemsize
             and x.any() and torch.equal(x.to(narrow).double(), x)]
    return unlike._replace(
        off=((x - expected).abs().max() / (scale if scale > 0 else 1)).item(),
        fit=fit(x, expected), state="" if x.any() else "zero", square=x.square().sum().item(),
        probe=(x.flatten() @ weights).item(), narrow=str(holds[0])[6:] if holds else "")


def sums_over_ranks(ours, theirs):
    """{name: Fit} of the sum of what all ranks hold, each in its place. Communication: an
    all_reduce of all gradients."""
    places = []
    for name, full in theirs.items():
        gradient, owner = ours.get(name, (None, None))
        cuts = getattr(owner, "cuts", ())
        parts = [math.prod(cut.parts for cut in cuts if cut.dim == dim)
                 for dim in range(full.ndim)]
        room = full.new_zeros([-(-n // m) * m for n, m in zip(full.shape, parts)])
        if gradient is not None and part(room, cuts).shape == gradient.shape:
            part(room, cuts).add_(gradient)             # a view: nothing needs padding any more
        places.append(room[tuple(slice(n) for n in full.shape)].flatten())
    flat = torch.cat(places)
    dist.all_reduce(flat)
    totals = flat.split([full.numel() for full in theirs.values()])
    return {name: fit(total, full) for total, (name, full) in zip(totals, theirs.items())}


def share_moved(drawn, now):
    """How far all matrices have moved together, as a share of their size (a LayerNorm's weights of
    1 would hide it)."""
    size = lambda of: sum(of(name).square().sum() for name in drawn if drawn[name].ndim > 1)
    return (size(lambda name: now[name] - drawn[name]) / size(drawn.get)).sqrt().item()


def share_of_stale(model, drawn, now):
    """Of the weights that forward uses here, and that one GPU has moved since the run began, the
    share of those that have not moved; 0 where they are not here (ZeRO-3 has freed them)."""
    stale = moved = 0
    for name, p in named(model):
        cuts = getattr(p, "cuts", ())
        if hasattr(p, "full_tensor") or name not in drawn or p.untyped_storage().nbytes() == 0:
            continue
        start, end = (part(x[name], cuts).to(p.dtype) for x in (drawn, now))
        if p.shape == start.shape:
            stale += ((p == start) & (start != end)).sum().item()
            moved += (start != end).sum().item()
    return stale / max(moved, 1)


# --------------------------------------------------------------------- other gradients, on one GPU

def fits_of_ranks(run, ours, others, less=None):
    """{name: {rank: Fit}} of each rank's gradients, less what `less` has, to these."""
    mine, every = {}, {}
    for name, (gradient, owner) in ours.items():
        cuts = getattr(owner, "cuts", ())
        other = part(others[name], cuts)
        if gradient.shape == other.shape:
            mine[name] = fit(gradient - part(less[name], cuts) if less else gradient, other)
    for rank, fits in enumerate(everyones(run, mine)):
        for name, seen in fits.items():
            every.setdefault(name, {})[rank] = seen
    return every


def try_guesses(found, run, guesses, send, ours, scale):
    """Note how each rank's gradients lie beside those that each guess computes."""
    near = {name: torch.zeros_like(x, dtype=torch.bool) for name, (x, _) in ours.items()}
    allowed = 0 if found.is_lossy else found.tolerance["gradients"]
    for words, compute, of_one_share in guesses:
        found.losses[words], gradients = send(compute)
        found.fits[words] = fits_of_ranks(run, ours, gradients)
        for name, (x, owner) in ours.items() if of_one_share else ():
            other = part(gradients[name], getattr(owner, "cuts", ()))
            if x.shape == other.shape:
                near[name] |= (x - other).abs() <= allowed * scale[name]
    for rank, alone in enumerate(everyones(run, {name: bool(x.all()) for name, x in near.items()})):
        for name, is_alone in alone.items():
            found.alone.setdefault(name, {})[rank] = is_alone
