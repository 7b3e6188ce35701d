"""Findings about the gradient norm: whose squares it leaves out, or counts twice."""

import math

from lab.diagnose.names import CLOSE, describe_parameters, module_of, role, times
from lab.run.words import on_ranks


def read_too_early(evidence):
    """The norm is of other gradients than those that are there after the step: so is the update, or
    ranks have different norms of the same. (Clipping by a wrong norm makes a wrong update, too.)"""
    are_whole = all(evidence.copies_of(name) == evidence.world for name in evidence.names)
    norms_differ = are_whole and not evidence.norms_are(evidence.norm[:1] * evidence.world)
    is_update_wrong = bool(evidence.wrong("parameters"))
    if evidence.wrong("gradients") or not norms_differ and (
            evidence.clips or not is_update_wrong):
        return None
    what = "the norm and the update were" if is_update_wrong else "the norm was"
    return (f"the gradients are right after the step, but {what} made before they were complete, "
            "as where nobody waits for a collective")


def not_summed(evidence):
    """Each rank's norm is of its own squares."""
    if evidence.world == 1:
        return None
    if evidence.norms_are([evidence.squares(rank=rank)**0.5 for rank in range(evidence.world)]):
        return ("the gradient norm of each rank comes from what it holds itself: the squares were "
                "not summed over the ranks")
    ratio = sum(norm**2 for norm in evidence.norm) / evidence.norm_there**2
    differ = max(evidence.norm) > 1.001 * min(evidence.norm)
    if differ and any(abs(ratio - n) < CLOSE * n for n in (1, evidence.world)):
        return ("the ranks have different gradient norms, whose squares add up to those of one "
                "GPU: they were not summed over the ranks")
    return None


def leaves_out_or_repeats(evidence):
    """Some kind of parameter is left out, or counted as often as there are ranks, or copies."""
    if evidence.is_lossy:                               # too many sums are near to others
        return None
    phrases = {}
    for names in kinds(evidence):
        copies = evidence.copies_of(names[0])
        for times_counted in {0.0, evidence.world, 1 / evidence.world, copies, 1 / copies} - {1.0}:
            more = (times_counted - 1) * evidence.squares(names)
            square = max(0.0, evidence.norm_there**2 + more)
            is_seen = abs((square**0.5) / evidence.norm_there - 1) > 3 * evidence.tolerance[
                "gradient norm"]
            if is_seen and evidence.norms_are([square**0.5] * evidence.world):
                words = describe_parameters(names, evidence.names)
                phrases[words] = f"counts {words} {times_counted:.2g} times"
                if times_counted == 0:
                    phrases[words] = f"leaves out {words}"
    return f"the gradient norm {phrases.popitem()[1]}" if len(phrases) == 1 else None


def kinds(evidence):
    """Lists of parameters that are alike: in the part that they play, in how many ranks hold the
    same part, or in their module."""
    kinds = {}
    for name in evidence.names:
        for kind in (role(name), evidence.copies_of(name), module_of(name)):
            kinds.setdefault(kind, []).append(name)
    return [names for names in kinds.values() if len(names) < len(evidence.names)]


def computed_otherwise(evidence):
    """Every gradient counts, and the norm isn't the root of the sum of the squares."""
    there, clip = evidence.norm_there, evidence.args.clip
    norms = sum(part.square_there**0.5 for part in evidence.distinct_parts().values())
    held = sum(evidence.squares(rank=rank) for rank in range(evidence.world))
    copied = [name for name in evidence.names if evidence.copies_of(name) > 1]
    for norm, words in (
            (held**0.5, f"counts {describe_parameters(copied, evidence.names)} on each rank that "
             "holds the same, and not once" if copied else ""),
            (there**2, "is the sum of the squares: its root was not taken"),
            (norms, "is the sum of the parameters' norms, and not of their squares")):
        if words and evidence.norms_are([norm] * evidence.world):
            return f"the gradient norm {words}"
    if evidence.clips and all(abs(norm / clip - 1) < 1e-4 for norm in evidence.norm):
        return "the gradient norm is that after clipping"
    return None


EXPLAINED = [read_too_early, not_summed, computed_otherwise, leaves_out_or_repeats]


def not_finite(evidence):
    where = [rank for rank, norm in enumerate(evidence.norm) if not math.isfinite(norm)]
    if where:
        return ("the gradient norm is infinite or not a number"
                f"{on_ranks(where, evidence.world)}")
    return None


def off_somehow(evidence):
    worst = max(evidence.norm, key=lambda norm: abs(norm - evidence.norm_there))
    ratio = worst / evidence.norm_there
    name = ""
    if evidence.norms_are([worst] * evidence.world):
        name = evidence.name_of_factor(ratio)
    return f"the gradient norm is {times(ratio)} that of one GPU{name}"
