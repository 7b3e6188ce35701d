"""Findings about the gradient norm: whose squares it leaves out, or counts twice."""

import math

from lab.diagnose.evidence import share_left
from lab.diagnose.findings.names import (
    CLOSE,
    TOGETHER,
    in_words,
    known_factor,
    named_factor,
    on_ranks,
    role,
    times,
)


def squares(found, names=None, rank=None):
    """The sum of the squares of one GPU's gradients, of each part once; or of what a rank holds."""
    parts = {(name, seen.where): seen.square_there for name in names or found.names
             for at, seen in found.at("gradients", name).items() if rank in (None, at)}
    return sum(parts.values())


def norms_held(found):
    return [squares(found, rank=rank)**0.5 for rank in range(found.world)]


def norms_are(found, expected):
    """Whether the norms, by rank, are these."""
    within = max(found.tolerance["gradient norm"], 1e-9)
    return all(abs(norm - other) <= within * other for norm, other in zip(found.norm, expected))


def read_too_early(found):
    """The norm is of other gradients than those that are there after the step: so is the update, or
    ranks have different norms of the same. (Clipping by a wrong norm makes a wrong update, too.)"""
    clips = share_left(found.norm_there, found.args.clip) < 1
    are_whole = all(copies_of(found, name) == found.world for name in found.names)
    norms_differ = are_whole and not norms_are(found, found.norm[:1] * found.world)
    if not found.wrong("gradients") and (norms_differ or found.wrong("parameters") and not clips):
        what = "the norm and the update were" if found.wrong("parameters") else "the norm was"
        return (f"the gradients are right after the step, but {what} made before they were "
                "complete, as where nobody waits for a collective")


def norm_of_own_parts(found):
    if found.world == 1:
        return None
    parts = {name: math.prod(n for _, _, n in next(iter(seen.values())).where)
             for name, seen in found.parts["gradients"].items()}
    as_cut = [sum(many * squares(found, [name], rank) for name, many in parts.items())**0.5
              for rank in range(found.world)]           # as grad_norm counts that knows no group
    if norms_are(found, norms_held(found)) or norms_are(found, as_cut):
        return ("the gradient norm of each rank comes from what it holds itself: the squares were "
                "not summed over the ranks")
    for rank, norm in enumerate(norms_held(found)):
        if norms_are(found, [norm] * found.world):
            return f"the gradient norm is that of what rank {rank} holds alone"


def norms_that_add_up(found):
    times_n = sum(norm**2 for norm in found.norm) / found.norm_there**2
    differ = max(found.norm) > 1.001 * min(found.norm)
    if differ and any(abs(times_n - n) < CLOSE * n for n in (1, found.world)):
        return ("the ranks have different gradient norms, whose squares add up to those of one "
                "GPU: they were not summed over the ranks")


def norm_with_copies(found):
    held = sum(squares(found, rank=rank) for rank in range(found.world))
    copies = [name for name in found.names if copies_of(found, name) > 1]
    if copies and norms_are(found, [held**0.5] * found.world):
        return (f"the gradient norm counts {in_words(copies, found.names)} on each rank that "
                "holds the same, and not once")


def copies_of(found, name):
    """How many ranks hold the same part of it."""
    parts = found.at("gradients", name).values()
    return len(parts) / max(1, len({seen.where for seen in parts}))


def norm_of_some(found):
    """Some kind of parameter is left out, or counted as often as there are ranks, or copies."""
    if found.is_lossy:                                  # too many sums are near to others
        return None
    said, ranks = {}, float(found.world)
    for names in kinds(found):
        for often in {0.0, ranks, 1 / ranks, copies_of(found, names[0]),
                      1 / max(1, copies_of(found, names[0]))} - {1.0}:
            expected = (found.norm_there**2 + (often - 1) * squares(found, names))**0.5
            is_seen = abs(expected / found.norm_there - 1) > 3 * found.tolerance["gradient norm"]
            if is_seen and norms_are(found, [expected] * found.world):
                words = in_words(names, found.names)
                how = f"counts {words} {often:.2g} times" if often else f"leaves out {words}"
                said[words] = f"the gradient norm {how}"
    return next(iter(said.values())) if len(said) == 1 else None


def kinds(found):
    """Lists of parameters that are alike: in what they are, in how many ranks hold the same part,
    or in their module."""
    alike = {}
    for name in found.names:
        words = role(name)
        wholes = [both for one, other, both in TOGETHER if words in (one, other)]
        wholes += ["k and v"] if words in ("k", "v") else []
        for kind in (words, *wholes, copies_of(found, name), name.split(".")[0]):
            alike.setdefault(kind, []).append(name)
    return [names for names in alike.values() if len(names) < len(found.names)]


def norm_without_root(found):
    if norms_are(found, [found.norm_there**2] * found.world):
        return "the gradient norm is the sum of the squares: its root was not taken"


def norm_of_norms(found):
    total = sum(seen.square_there**0.5 for seen in {
        (name, seen.where): seen for name in found.names
        for seen in found.at("gradients", name).values()}.values())
    if norms_are(found, [total] * found.world):
        return "the gradient norm is the sum of the parameters' norms, and not of their squares"


def norm_after_clipping(found):
    clip = found.args.clip
    if clip and clip < found.norm_there and all(abs(norm / clip - 1) < 1e-4 for norm in found.norm):
        return "the gradient norm is that after clipping"


def norm_not_finite(found):
    where = [rank for rank, norm in enumerate(found.norm) if not math.isfinite(norm)]
    if where:
        return f"the gradient norm is infinite or not a number{on_ranks(where, found.world)}"


def norm_by_a_factor(found):
    ratio = found.norm[0] / found.norm_there
    if known_factor(found, ratio) and norms_are(found, [ratio * found.norm_there] * found.world):
        return f"the gradient norm is {times(ratio)} that of one GPU{named_factor(found, ratio)}"


def norm_off_somehow(found):
    worst = max(found.norm, key=lambda norm: abs(norm - found.norm_there))
    return f"the gradient norm is {times(worst / found.norm_there)} that of one GPU"


HOW_THE_NORM_IS = [
    read_too_early, norm_of_own_parts, norm_with_copies, norm_of_some, norms_that_add_up,
    norm_without_root, norm_of_norms, norm_after_clipping]
