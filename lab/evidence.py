"""What is known of a step that does not match one GPU's: numbers, which all ranks find together.

lab/diagnose.py puts them into words. They are found once, in the first step that does not match: a
run that matches costs nothing of this. Communication, outside of all measurements: broadcasts of
what rank 0 computes with one GPU, an all_reduce of the gradients, and gathers of small objects.
"""

import functools
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from common import part

# Up to which share of its size a tensor may be off and still be called a multiple of another, and
# up to which share of it a number may be off and still be called by another's name.
ROUNDING = {"float64": (1e-9, 1e-8), "float32": (1e-3, 1e-3), "float16": (0.05, 0.02),
            "bfloat16": (0.3, 0.05), "int8": (0.3, 0.05)}
NARROWER = torch.bfloat16, torch.float16, torch.float32     # what a wide dtype may hide
MOST_SHARES = 16            # data-parallel ranks of which each one's gradients are computed alone


class Fit(NamedTuple):
    """A tensor beside another: `ratio` times that one, but for a rest of `residue` of its size."""
    ratio: float
    residue: float


class Part(NamedTuple):
    """What a rank has seen of a tensor of its own, beside the same part of one GPU's."""
    where: tuple        # which part: (dim, index, parts) of each cut
    off: float          # the largest difference, in the verdict's measure
    fit: Fit
    state: str          # "missing", "zero", "not finite", "of another shape" or ""
    blank: bool         # one GPU's is zero in this part
    square: float       # of its norm
    probe: float        # a weighted sum: tensors with different ones are different
    narrow: str         # a narrower dtype that holds all of its numbers, or ""


@dataclass
class Evidence:
    """Lists go by rank. All gradients are those before clipping, here and on one GPU."""
    args: object
    world: int
    rounding: str       # a key of ROUNDING
    tolerance: dict     # by kind; None: not judged
    step: int           # the first is 1
    matched: int        # how many steps before it matched
    valid: int          # targets of its batch
    by_share: list      # and of each data-parallel rank's part of it
    names: list         # of all parameters, in the order of forward
    loss: list
    loss_there: float   # one GPU's
    norm: list
    norm_there: float
    parts: dict = field(default_factory=lambda: {   # {kind: {name: {rank: Part}}}
        "gradients": {}, "parameters": {}, "movement": {}})
    totals: dict = field(default_factory=dict)      # {name: Fit} of the gradients' sum over ranks
    losses: dict = field(default_factory=dict)      # {words: the loss} of other gradients: guesses
    fits: dict = field(default_factory=dict)        # {words: {name: {rank: Fit}}} of ours to them
    alone: dict = field(default_factory=dict)       # {name: {rank: whether each of its numbers is
                                                    # that of some rank's sequences alone}}

    def close(self, value, other):
        """Whether a number is another one, as exactly as this run computes."""
        return abs(value - other) <= ROUNDING[self.rounding][1] * abs(other)

    def alike(self, fit):
        return fit.residue <= ROUNDING[self.rounding][0]

    def is_off(self, kind, value, expected):
        """Whether a loss or a norm is off, as the verdict has it."""
        allowed = self.tolerance[kind]
        return allowed is not None and not abs(value - expected) <= allowed * (abs(expected) or 1)

    @property
    def norm_tolerance(self):
        """How exactly a norm is that of some gradients."""
        return max(self.tolerance["gradient norm"] or 0, 1e-9)

    def is_wrong(self, kind, name, rank=None):
        """Whether a tensor is off on this rank, or on any."""
        allowed, parts = self.tolerance[kind], self.parts[kind].get(name, {})
        if allowed is None:
            return False
        if rank is not None:
            return rank in parts and not parts[rank].off <= allowed
        return not parts or any(not seen.off <= allowed for seen in parts.values())

    def wrong(self, kind):
        """The names of those that are off somewhere."""
        return [name for name in self.names if self.is_wrong(kind, name)]

    def factor(self, kind, name, rank=None):
        """The number that times one GPU's gives this tensor in each of its parts, or in that of
        this rank: 1 for one that is right, 0 for zero, None if there is no such number."""
        parts = self.parts[kind].get(name, {})
        chosen = [seen for at, seen in parts.items() if rank in (None, at)]
        if not self.is_wrong(kind, name, rank):
            return 1.0
        ratios = []
        for seen in chosen:
            if seen.state in ("missing", "zero"):
                ratios += [] if seen.blank else [0.0]
            elif seen.state or not (seen.blank or self.alike(seen.fit)):
                return None
            elif not seen.blank:
                ratios.append(seen.fit.ratio)
            elif not seen.off <= self.tolerance["gradients" if kind == "movement" else kind]:
                return None                             # something where one GPU has nothing
        if not ratios or any(not self.close(ratio, ratios[0]) for ratio in ratios):
            return None
        return ratios[0]

    def factors(self, kind):
        return {name: self.factor(kind, name) for name in self.wrong(kind)}

    def disagree(self, kind, name):
        """Two ranks that hold the same part of it in different versions, or None."""
        first = {}
        for rank, seen in sorted(self.parts[kind].get(name, {}).items()):
            other_rank, other = first.setdefault(seen.where, (rank, seen))
            scale = max(seen.square, other.square) ** 0.5
            if not abs(seen.probe - other.probe) <= ROUNDING[self.rounding][0] * scale:
                return other_rank, rank
        return None


# ---------------------------------------------------------------------------------- how it is found

def collect(verifier, batch, here, there, scale):
    """All of it, the same on every rank. here: {(kind, name): (tensor, the parameter that says how
    it is cut)} of this rank; there: {(kind, name): tensor} of one GPU; scale: what differences are
    relative to."""
    run, args, tolerance = verifier.run, verifier.run.args, verifier.tolerance
    names = [name for kind, name in there if kind == "gradients"]
    loss, norm = (here[kind, ""][0].item() for kind in ("loss", "gradient norm"))
    loss_there, norm_there = (there[kind, ""].item() for kind in ("loss", "gradient norm"))
    if verifier.steps >= verifier.tensor_steps:
        tolerance = tolerance | {"gradients": None, "parameters": None}
    by_share = [int((targets != -100).sum()) for targets in batch.targets.chunk(args.shares)]
    found = Evidence(args, run.world, verifier.rounding, tolerance, batch.step + 1, verifier.steps,
                     batch.valid, by_share, names, everyones(run, loss), loss_there,
                     everyones(run, norm), norm_there)

    # Tensors, beside one GPU's. The weights before the step are those after the one before.
    send = functools.partial(from_rank_0, verifier, {n: there["gradients", n].shape for n in names})
    _, drawn = send(lambda: (0.0, weights_of(first_model(run))))
    before = drawn
    if verifier.previous:
        before = {name: verifier.previous["parameters", name].to(run.device) for name in names}
    ours, theirs, mine = {}, {}, {}
    by, by_there = share_left(norm, args.clip), share_left(norm_there, args.clip)
    for name in names:
        theirs[name] = there["gradients", name] / by_there
        if ("gradients", name) not in here:
            continue
        (gradient, owner), (after, _) = here["gradients", name], here["parameters", name]
        ours[name] = gradient.detach().double() / by, owner
        mine["gradients", name] = look_at(*ours[name], theirs[name],
                                          scale["gradients", name] / by_there)
        mine["parameters", name] = look_at(after, owner, there["parameters", name],
                                           scale["parameters", name])
        start = part(before[name], getattr(owner, "cuts", ()))
        moved = after.detach().double() - start if after.shape == start.shape else after
        mine["movement", name] = look_at(moved, owner, there["parameters", name] - before[name],
                                         scale["parameters", name])
    for rank, parts in enumerate(everyones(run, mine)):
        for (kind, name), seen in parts.items():
            found.parts[kind].setdefault(name, {})[rank] = seen
    found.totals = sums_over_ranks(ours, theirs)

    # Other gradients, which ours may be.
    if verifier.previous and tolerance["gradients"] is not None:
        added = {name: theirs[name] + verifier.previous["gradients", name].to(run.device)
                 for name in names}
        try_on(found, run, "those of this step and of the one before, which were not set to zero",
               ours, math.nan, added)
    moved = before is not drawn and run.rank == 0 and any(      # chapter 08's bias has moved, too
        buffer.is_floating_point() and buffer.any() for buffer in run.one_gpu.buffers())
    if is_explained(found) or any(everyones(run, moved)):
        return found
    seen = {name: torch.zeros_like(x, dtype=torch.bool) for name, (x, _) in ours.items()}
    for words, compute, of_one_share in guesses(run, batch, drawn, before):
        loss, gradients = send(compute)
        try_on(found, run, words, ours, loss, gradients)
        if of_one_share:
            for name, (x, owner) in ours.items():
                other = part(gradients[name], getattr(owner, "cuts", ()))
                if x.shape == other.shape:
                    near = (tolerance["gradients"] or 0) * scale["gradients", name] / by_there
                    seen[name] |= (x - other).abs() <= near
    mine = {name: x.all().item() for name, x in seen.items()}
    for rank, alone in enumerate(everyones(run, mine)):
        for name, is_alone in alone.items():
            found.alone.setdefault(name, {})[rank] = is_alone
    return found


def is_explained(found):
    """Whether factors alone tell what is wrong, so that no other gradients need be computed."""
    gradients = None not in found.factors("gradients").values()
    return gradients and not any(found.is_off("loss", loss, found.loss_there)
                                 for loss in found.loss)


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
    mine, theirs = mine.detach().flatten().double(), theirs.flatten()
    size, square = mine.norm(), theirs @ theirs
    if size == 0 or square == 0:
        return Fit(0.0, 0.0) if size == 0 else Fit(math.nan, math.inf)
    ratio = (mine @ theirs) / square
    return Fit(ratio.item(), ((mine - ratio * theirs).norm() / size).item())


def look_at(tensor, owner, full, scale):
    """The Part that a rank reports of a tensor. full: all of one GPU's."""
    cuts = getattr(owner, "cuts", ())
    expected, x = part(full, cuts), tensor.detach().double()
    where = tuple(cut[:3] for cut in cuts)
    blank = not expected.any().item()
    if x.shape != expected.shape:
        return Part(where, math.inf, Fit(math.nan, math.inf), "of another shape", blank, 0, 0, "")
    if not x.isfinite().all():
        return Part(where, math.inf, Fit(math.nan, math.inf), "not finite", blank, math.nan, 0, "")
    off = ((x - expected).abs().max() / (scale if scale > 0 else 1)).item()
    state = "" if x.any() else "zero"
    weights = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64).cos()
    narrow = [dtype for dtype in NARROWER if dtype.itemsize < tensor.dtype.itemsize
              and torch.equal(x.to(dtype).double(), x)] if x.any() else []
    return Part(where, off, fit(x, expected), state, blank, x.square().sum().item(),
                (x.flatten() @ weights).item(), str(narrow[0]).split(".")[1] if narrow else "")


def sums_over_ranks(ours, theirs):
    """{name: Fit} of the sum of what all ranks hold, each in its place. Communication: an
    all_reduce of all gradients."""
    places = []
    for name, full in theirs.items():
        gradient, owner = ours.get(name, (None, None))
        cuts = getattr(owner, "cuts", ())
        parts = [math.prod(cut.parts for cut in cuts if cut.dim == dim)
                 for dim in range(full.ndim)]           # of each dimension
        room = torch.zeros([-(-n // m) * m for n, m in zip(full.shape, parts)], dtype=full.dtype,
                           device=full.device)
        if gradient is not None and part(room, cuts).shape == gradient.shape:
            part(room, cuts).add_(gradient)             # a view: nothing needs padding any more
        places.append(room[tuple(slice(n) for n in full.shape)].flatten())
    flat = torch.cat(places)
    dist.all_reduce(flat)
    totals = flat.split([full.numel() for full in theirs.values()])
    return {name: fit(total, full) for total, (name, full) in zip(totals, theirs.items())}


# --------------------------------------------------------------------- other gradients, on one GPU

def try_on(found, run, words, ours, loss, gradients):
    """Note how the gradients of every rank lie beside these, and the loss that goes with them."""
    mine = {}
    for name, (gradient, owner) in ours.items():
        other = part(gradients[name], getattr(owner, "cuts", ()))
        if gradient.shape == other.shape:
            mine[name] = fit(gradient, other)
    for rank, fits in enumerate(everyones(run, mine)):
        for name, seen in fits.items():
            found.fits.setdefault(words, {}).setdefault(name, {})[rank] = seen
    found.losses[words] = loss


def first_model(run):
    """One GPU's, with the weights that the run began with."""
    return run.draw(run.build(run.args.model, seed=None))


def named(model):
    return [(getattr(p, "global_name", name), p) for name, p in model.named_parameters()]


def weights_of(model):
    return {name: p.data for name, p in named(model)}


def gradients_of(model, batch, importance):
    """The loss and {name: gradient} of one GPU. importance (batch, seq): how often each token
    counts; sequences of which none does are left out."""
    device = next(model.parameters()).device
    rows = importance.any(1)
    logits = model(batch.tokens[rows].to(device))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_tokens = F.cross_entropy(logits.flatten(0, 1), batch.targets[rows].flatten().to(device),
                                reduction="none")
    loss = (of_tokens @ importance[rows].flatten().to(of_tokens)) / batch.valid
    loss.backward()
    zero = torch.zeros_like
    return loss.detach(), {name: zero(p) if p.grad is None else p.grad for name, p in named(model)}


def guesses(run, batch, drawn, before):
    """Yield what else the gradients may be those of: (words, a function that computes the loss and
    the gradients, whether it is a share of the batch alone). drawn: the weights that the run began
    with; before: those before this step."""
    args = run.args

    def compute(weights, importance, **changed):
        cfg = replace(args.model, **changed)
        model = run.draw(run.build(cfg, seed=None))
        for name, p in named(model):
            p.data.copy_(weights[name])
        return gradients_of(model, batch, importance)

    ones = torch.ones(batch.targets.shape)
    for words, importance, is_share in importances(args, batch, run.world):
        if not torch.equal(importance, ones):
            yield words, functools.partial(compute, before, importance), is_share
    if before is not drawn:
        yield "those at the weights that the run began with", functools.partial(
            compute, drawn, ones), False
    if getattr(args.model, "balance_weight", None):
        yield "those without the balance loss", functools.partial(
            compute, before, ones, balance_weight=0.0), False


def importances(args, batch, world):
    """Yield ways to weigh the tokens of a batch: (words, how often each token counts (batch, seq),
    whether it is a share of the batch alone)."""
    valid = batch.targets != -100
    sequences, shares = torch.arange(args.batch)[:, None].expand(valid.shape), args.shares
    of_share = args.batch // shares
    share, micro = sequences // of_share, sequences % of_share // args.micro_batch
    m = of_share // args.micro_batch
    where = " of each rank" if shares > 1 else ""
    if m > 1:
        yield f"those of all micro-batches{where} but the last", (micro < m - 1).double(), False
        yield f"those of the last micro-batch{where} alone", (micro == m - 1).double(), False
    if m > 2:
        yield f"those of all micro-batches{where} but the first", (micro > 0).double(), False
        yield f"those of the first micro-batch{where} alone", (micro == 0).double(), False

    def mean_of_means(groups):                          # (batch, seq): the group of each token
        counts = torch.bincount(groups[valid], minlength=int(groups.max()) + 1).clamp(min=1)
        return batch.valid / (counts[groups].double() * len(counts))

    if m > 1:
        yield "the mean of the micro-batches' own means", mean_of_means(m * share + micro), False
    if shares > 1:
        yield "the mean of the ranks' own means", mean_of_means(share), False
    if shares > 1 and m > 1:
        yield ("the mean of means over a micro-batch of all ranks", mean_of_means(micro), False)
    if 1 < shares <= MOST_SHARES:
        for rank in range(shares):
            yield (f"those of the sequences of data-parallel rank {rank} alone",
                   (share == rank).double(), True)
    if shares == 1 and 1 < world <= args.model.seq:
        place = torch.arange(args.model.seq).expand(valid.shape)
        chunk = place * world // args.model.seq
        yield "the mean of the means over each rank's tokens", mean_of_means(chunk), False
        chunk = place * 2 * world // args.model.seq
        pairs = torch.minimum(chunk, 2 * world - 1 - chunk)
        yield "the mean of the means over each rank's two chunks", mean_of_means(pairs), False
