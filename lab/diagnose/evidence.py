"""What is known of a step that doesn't match one GPU's: numbers, the same on all ranks.

collect.py finds them, once, in the first step that doesn't match. diagnose.py puts them into words.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from lab.diagnose.names import (
    ROUNDING,
    factor,
    is_telling,
    numbers_of,
    numbers_of_tokens,
    ranks_of,
)

SAME = 1e-2                 # what two ranks hold is this near, if they hold the same; mostly equal


class Fit(NamedTuple):
    """A tensor is `ratio` times another, but for a rest of `residue` of its size."""
    ratio: float
    residue: float


class Part(NamedTuple):
    """What a rank holds of a tensor, compared with the same part of one GPU's."""
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
    matched: int        # how many steps before it matched
    valid: int          # targets of its batch
    names: list         # of all parameters, in the order of forward
    loss: list
    loss_there: float   # one GPU's
    norm: list
    norm_there: float
    parts: dict = field(default_factory=lambda: {   # {kind: {name: {rank: Part}}}
        "gradients": {}, "parameters": {}, "movement": {}})
    totals: dict = field(default_factory=dict)      # {name: Fit} of the gradients' sum over ranks
    losses: dict = field(default_factory=dict)      # {guess: its loss}
    fits: dict = field(default_factory=dict)        # {guess: {name: {rank: Fit}}} of our gradients
    more: dict = field(default_factory=dict)        # {"the step before" or "the balance loss":
                                                    # {name: {rank: Fit}}} of what ours are more
                                                    # than one GPU's to the gradients of that

    # Numbers.

    @property
    def is_lossy(self):
        return self.rounding not in ("float64", "float32")

    def is_close(self, value, other):
        """Whether a number is another one, as exactly as this run computes."""
        return abs(value - other) <= ROUNDING[self.rounding][1] * abs(other)

    def is_multiple(self, fit):
        """Whether a tensor is a multiple of the other one, as exactly as this run computes."""
        return fit.residue <= ROUNDING[self.rounding][0]

    def common_ratio(self, fits):
        """The ratio that all of these fits share, if there is one."""
        fits = [fit for fit in fits if fit]
        if fits and all(self.is_multiple(fit) and self.is_close(fit.ratio, fits[0].ratio)
                        for fit in fits):
            return fits[0].ratio
        return None

    @property
    def numbers(self):
        """{name: number} of what a factor may be."""
        numbers = numbers_of(self.args, self.world)
        if self.is_lossy:                               # too many numbers are near to others
            return numbers
        return numbers | numbers_of_tokens(self.args, self.valid)

    @property
    def numbers_of_ranks(self):
        return ranks_of(self.args, self.world)

    def known_factor(self, ratio):
        """Describe a ratio by this run's numbers; None if it is none of them."""
        return factor(ratio, self.numbers, ROUNDING[self.rounding][1])

    def name_of_factor(self, ratio, signs=()):
        """": 4,096 is the loss scale", or nothing. Any small number is the number of something. So
        a name takes a second sign: digits that agree, or what else speaks for some of these numbers
        already: signs, {name: number}."""
        within = ROUNDING[self.rounding][1]
        name = (self.known_factor(ratio) if is_telling(ratio, within) else
                factor(ratio, dict(signs), within))
        return f": {name}" if name else ""

    # The loss and the norm.

    def is_off(self, kind):
        """Whether the "loss" or the "gradient norm" is off on some rank, for the verdict."""
        values, there = self.norm, self.norm_there
        if kind == "loss":
            values, there = self.loss, self.loss_there
        allowed = self.tolerance[kind]
        return allowed is not None and any(
            not abs(value - there) <= allowed * (abs(there) or 1) for value in values)

    def losses_are(self, expected):
        """Whether the loss on each rank is this number."""
        return all(abs(loss - expected) <= self.tolerance["loss"] * abs(expected)
                   for loss in self.loss)

    def norms_are(self, expected):
        """Whether the norms are these, by rank."""
        within = max(self.tolerance["gradient norm"], 1e-9)
        return all(abs(norm - other) <= within * other for norm, other in zip(self.norm, expected))

    # Tensors.

    def parts_of(self, kind, name):
        """{rank: Part} of those that hold it."""
        return self.parts[kind].get(name, {})

    def gradient_parts(self, names):
        """The Parts of these gradients on all ranks."""
        return [part for name in names for part in self.parts_of("gradients", name).values()]

    def copies_of(self, name):
        """How many ranks hold the same part of it."""
        parts = self.gradient_parts([name])
        return len(parts) / max(1, len({part.where for part in parts}))

    def is_wrong(self, kind, name, rank=None):
        """Whether a tensor is off on this rank, or on any; one that nobody has is."""
        allowed, parts = self.tolerance[kind], self.parts_of(kind, name)
        if allowed is None or rank is not None and rank not in parts:
            return False
        parts = parts if rank is None else {rank: parts[rank]}
        return not parts or any(not part.off <= allowed for part in parts.values())

    def wrong(self, kind):
        """The names of the tensors that are off."""
        return [name for name in self.names if self.is_wrong(kind, name)]

    def factor(self, kind, name, rank=None):
        """The number that one GPU's tensor is multiplied by, on this rank or on each: 1 if it is
        right, 0 if it is zero; None: there is no such number."""
        if not self.is_wrong(kind, name, rank):
            return 1.0
        ratios = [self.factor_of(part)
                  for at, part in self.parts_of(kind, name).items() if rank in (None, at)
                  and (part.square_there > 0 or not part.off <= self.tolerance[kind])]
        if ratios and None not in ratios and all(self.is_close(x, ratios[0]) for x in ratios):
            return ratios[0]
        return None

    def factor_of(self, part):
        """That of a Part."""
        if part.square_there == 0:                      # and there is something here
            return None
        if part.state in ("missing", "zero"):
            return 0.0
        explains_most = part.fit.residue <= abs(part.fit.ratio - 1) / 2
        if part.state or not self.is_multiple(part.fit) or not explains_most:
            return None
        return part.fit.ratio

    def disagree(self, kind, name):
        """Two ranks that hold the same part of it in different versions, or None."""
        first = {}
        for rank, part in sorted(self.parts_of(kind, name).items()):
            other_rank, other = first.setdefault(part.where, (rank, part))
            near = min(SAME, ROUNDING[self.rounding][0]) * max(part.square, other.square) ** 0.5
            if rank != other_rank and not abs(part.probe - other.probe) <= near:
                return other_rank, rank
        return None

    # Squares of one GPU's gradients.

    @property
    def clips(self):
        """Whether one GPU's gradients are clipped."""
        return bool(self.args.clip) and self.norm_there > self.args.clip

    def distinct_parts(self, names=None, rank=None):
        """{(name, where): Part}: each part of these gradients once; or only what a rank holds."""
        return {(name, part.where): part for name in names or self.names
                for at, part in self.parts_of("gradients", name).items() if rank in (None, at)}

    def squares(self, names=None, rank=None):
        """The sum of the squares of these parts."""
        return sum(part.square_there for part in self.distinct_parts(names, rank).values())
