"""Findings about gradients: what those are that do not match, which do not, and rates."""

import math

from lab.diagnose.evidence import share_left
from lab.diagnose.findings.names import (
    CLOSE,
    gradients_of,
    known_factor,
    listed,
    named_factor,
    numbers_of,
    on_ranks,
    others,
    ranks_of,
    role,
    shared_kv_heads,
    short,
    times,
)
from lab.diagnose.findings.norms import copies_of, norms_held
from lab.diagnose.findings.updates import losses_are
from lab.run.words import count

FEW = 0.05              # more stale weights than this share do not come from rounding


# ---------------------------------------------------------------- findings: what some gradients are

def held_by_nobody(found, names):
    if not any(found.at("gradients", name) for name in names):
        return "are on no rank"


def of_another_shape(found, names):
    if all(ranks_with(found, name, "of another shape") for name in names):
        return "have another shape than the part that p.cuts says"


def missing(found, names):
    where = [ranks_with(found, name, "missing", "zero") for name in names]
    rest = [seen for name in names for seen in found.at("gradients", name).values()
            if seen.state not in ("missing", "zero")]
    if all(where) and all(seen.off <= found.tolerance["gradients"] for seen in rest):
        is_none = any(ranks_with(found, name, "missing") for name in names)
        return f"are {'missing' if is_none else 'zero'}{on_ranks(set().union(*where), found.world)}"


def ranks_with(found, name, *states):
    """The ranks on which a gradient is in one of these states, and one GPU's is not zero."""
    return {rank for rank, seen in found.at("gradients", name).items()
            if seen.state in states and seen.square_there > 0}


def not_summed(found, names):
    """The ranks that hold a parameter have different gradients, which add up to the right one."""
    ratio = found.all_alike(found.totals[name] for name in names)
    are_multiples = all(found.alike(seen.fit) for name in names
                        for seen in found.at("gradients", name).values() if seen.fit)
    if ratio is None or are_multiples or not any(found.disagree("gradients", name)
                                                 for name in names):
        return None
    if found.close(ratio, 1):
        return ("differ between ranks that hold the same, and add up to those of one GPU: they "
                "were not summed")
    if ratio > 1.5 and found.close(ratio, round(ratio)) and ratio < copies_of(found, names[0]):
        return (f"differ between ranks that hold the same, and add up to {times(ratio)} those of "
                f"one GPU{named_factor(found, ratio)}: they were summed over some ranks alone")


def clipped_otherwise(found, names):
    """The norm is right and all gradients are too large or too small: it is in the clipping."""
    right = share_left(found.norm_there, found.args.clip)
    if right == 1 or len(names) < len(found.names) or found.is_off("gradient norm"):
        return None
    by_rank = [found.all_alike(found.at("gradients", name)[rank].fit for name in names
                               if rank in found.at("gradients", name))
               for rank in range(found.world)]
    if None in by_rank:
        return None
    close = lambda expected: all(map(found.close, by_rank, expected))
    if close([1 / right] * found.world):
        return (f"are {times(1 / right)} those of one GPU, which is the norm over --clip: the norm "
                "is right, and they were not clipped by it")
    if close([right] * found.world):
        return (f"are {times(right)} those of one GPU, which is --clip over the norm: they were "
                "clipped twice")
    if close([share_left(norm, found.args.clip) / right for norm in norms_held(found)]):
        return ("are clipped on each rank by the norm of what it holds, while the norm of all is "
                "right")


def a_multiple(found, names):
    """All are wrong by the same factor."""
    ratios = [found.factor("gradients", name) for name in names]
    if None in ratios or 0 in ratios or not all(found.close(x, ratios[0]) for x in ratios):
        return None
    ratio, is_all = ratios[0], len(names) == len(found.names)
    if found.is_lossy and not known_factor(found, ratio):
        return None
    why = named_factor(found, ratio, ranks_of(found) if comes_from_ranks(found, names) else {})
    if found.close(ratio, -1):
        return "have the opposite sign of those of one GPU"
    ranks = [found.world, *shared_kv_heads(found).values()]
    if why and found.args.shares == 1 and any(found.close(ratio, n) for n in ranks):
        why += ", as if a sum were taken of what was already summed"
    loss_too = is_all and all(found.close(loss / found.loss_there, ratio) for loss in found.loss)
    return f"{'and the loss ' if loss_too else ''}are {times(ratio)} those of one GPU{why}"


def comes_from_ranks(found, names):
    """Whether more than a factor speaks of the ranks: forward is right, and only some gradients are
    wrong, of ranks that have the same sequences, or of parameters that ranks share. Whatever else
    is counted in a step, micro-batches and targets, is a factor of all gradients."""
    if found.is_off("loss") or len(names) == len(found.names):
        return False
    are_whole = {copies_of(found, name) == found.world for name in found.names}
    return found.args.shares == 1 or len(are_whole) == 2 and not any(
        copies_of(found, name) == found.world for name in names)


def of_something_else(found, names):
    """They are the gradients of another computation, or a multiple of them: of the guesses that
    fit, those of the one that fits best, and far better than one GPU's."""
    fitting, there = {}, max((seen.fit.residue for name in names
                              for seen in found.at("gradients", name).values() if seen.fit),
                             default=0)
    for words, fits in found.fits.items():
        seen = [fit for name in names for fit in fits.get(name, {}).values()]
        ratio = found.all_alike(seen)
        residue = max((fit.residue for fit in seen if fit), default=0)
        if ratio is not None and residue < there / 3:
            fitting[words] = residue, ratio
    if fitting:
        words = min(fitting, key=fitting.get)
        ratio = fitting[words][1]
        loss_too = len(names) == len(found.names) and found.is_off("loss") and losses_are(
            found, [ratio * found.losses[words]] * found.world)
        subject = "and the loss are" if loss_too else "are"
        if found.close(ratio, 1):
            return f"{subject} those of {words}"
        name = named_factor(found, ratio, numbers_of(found))    # that they fit is a sign as well
        return f"{subject} {times(ratio)} those of {words}{name}"


def not_set_to_zero(found, names):
    """What they are more than one GPU's are those of the step before: once, or where they are
    summed over ranks once more in each step, as often as there are ranks."""
    fits = [fit for name in names for fit in found.more.get("the step before", {}).get(
        name, {}).values() if fit]
    if fits and all(found.alike(fit) and fit.ratio > 0.5 for fit in fits):
        ratio = found.all_alike(fits)
        how = "some times" if ratio is None else "" if found.close(ratio, 1) else times(ratio)
        name = named_factor(found, ratio, ranks_of(found)) if ratio else ""
        return (f"are those of one GPU and {f'{how} ' if how else ''}those of the step before, "
                f"which were not set to zero{name}")


def with_another_balance(found, names):
    """They have the gradients of chapter 08's balance loss too often, or not at all."""
    fits = found.more.get("the balance loss", {})
    more = found.all_alike(fit for name in names for fit in fits.get(name, {}).values())
    if more is not None:
        often = f"{times(1 + more)}{named_factor(found, 1 + more)}"
        return "lack the balance loss" if abs(1 + more) < CLOSE else (
            f"count the balance loss {often}")


def of_one_rank_alone(found, names):
    """As where a shard of each rank's own gradients is taken for one of their sum."""
    if all(all(found.alone.get(name, {0: False}).values()) for name in names):
        return ("are, in each number, those of one rank's sequences alone: they were not summed "
                "over the ranks")


def rounded(found, names):
    """Right but for the precision of a narrower dtype."""
    parts = [seen for name in names for seen in found.at("gradients", name).values()
             if seen.square_there > 0]
    if not parts or not all(0.9 < seen.fit.ratio < 1.1 for seen in parts):
        return None
    narrow = {seen.narrow for seen in parts}
    if len(narrow) == 1 and narrow != {""}:
        return f"were rounded: each number is one of {narrow.pop()}"
    worst = max(max(seen.fit.residue, abs(seen.fit.ratio - 1)) for seen in parts)
    by_a_factor = found.all_alike(seen.fit for seen in parts) is not None
    if found.rounding == "float64" and 1e-9 < worst < (1.2e-7 if by_a_factor else 3e-6):
        return (f"are off by up to {worst:.0e} of their size, which is what float32 rounds: "
                "something was computed, or sent, in it")


def a_multiple_on_each_rank(found, names):
    """Of each rank they are wrong by one factor, which is not the same on all ranks."""
    groups = {}
    for rank in range(found.world):
        factors = [found.factor("gradients", name, rank) for name in names
                   if rank in found.at("gradients", name)]
        if None in factors or not all(found.close(x, factors[0]) for x in factors):
            return None
        together(found, groups, factors[0] if factors else 1.0).append(rank)
    if len(groups) < 2 or found.is_lossy:
        return None
    right = groups.pop(1.0, [])
    said = [f"{times(ratio)} those of one GPU{on_ranks(ranks, found.world)}"
            f"{named_factor(found, ratio)}" if ratio else f"zero{on_ranks(ranks, found.world)}"
            for ratio, ranks in groups.items()]
    return f"are {listed(said)}" + (f", and right{on_ranks(right, found.world)}" if right else "")


def together(found, groups, ratio):
    """The list of those in {ratio: list} whose ratio is this one."""
    return groups.setdefault(next((x for x in groups if found.close(ratio, x)), ratio), [])


WHAT_THEY_ARE = [
    held_by_nobody, of_another_shape, missing, not_summed, clipped_otherwise,
    rounded, a_multiple, of_something_else, not_set_to_zero, with_another_balance,
    of_one_rank_alone, a_multiple_on_each_rank]


def what_they_are(found, names):
    return next(filter(None, (says(found, names) for says in WHAT_THEY_ARE)), None)


# -------------------------------------------------------------- findings: which gradients are wrong

def not_finite(found):
    where = {name: ranks_with(found, name, "not finite") for name in found.names}
    names = [name for name in found.names if where[name]]
    if names:
        left = "" if len(names) == len(found.names) else ", all others are finite"
        ranks = set().union(*where.values())
        return (f"{gradients_of(found, names)} are infinite or not a number"
                f"{on_ranks(ranks, found.world)}{left}")


def stale_weights(found):
    rank = max(range(len(found.stale)), key=found.stale.__getitem__, default=None)
    if found.stale and found.stale[rank] > FEW:
        whose = f"on rank {rank}, " if found.world > 1 else ""
        return (f"{whose}{found.stale[rank]:.0%} of the weights that forward uses are still those "
                "that the run began with: the update did not reach them")


def all_alike(found):
    """The same is to be said of all that are wrong."""
    names = found.wrong("gradients")
    said = what_they_are(found, names)
    return said and f"{gradients_of(found, names)} {said}{others(found, names)}"


def by_several_factors(found):
    names, groups = found.wrong("gradients"), {}
    for name in names:
        ratio = found.factor("gradients", name)
        if ratio is None:
            return None
        together(found, groups, ratio).append(name)
    said = {of_group[0]: what_they_are(found, of_group) for of_group in groups.values()}
    if 1 < len(groups) < 4 and all(said.values()):
        return "; ".join(f"{gradients_of(found, of_group)} {said[of_group[0]]}"
                         for of_group in groups.values()) + others(found, names)


def from_some_place_on(found):
    """Right from the head down to some place, and wrong in all that backward meets after it."""
    wrong, order = found.wrong("gradients"), places(found.names)
    last = max(i for i, place in enumerate(order) if any(name in wrong for name in place))
    before = [name for place in order[:last] for name in place]
    is_all = not before or last + 1 == len(order)
    if is_all or found.is_off("loss") or any(name not in wrong for name in before):
        return None
    first = [name for name in order[last] if name in wrong]
    said = what_they_are(found, first) or "are off by no constant factor"
    return (f"backward is right down to {in_place(order[last + 1])}; the gradients that come next, "
            f"of {in_place(first)}, {said}; all that come later are wrong, too")


def places(names):
    """The parameters in the order of forward, together those between which there is no such order:
    q, k and v, or a mixture's router and its experts."""
    mixtures = {name.split(".")[0] for name in names if "router" in name}
    found = {}
    for name in names:
        module, place = name.split(".")[0], short(name)
        if role(name) in ("q", "k", "v"):
            place = f"{module} q, k, v"
        elif module in mixtures and ".mlp." in name:
            place = f"{module} mixture"
        found.setdefault(place, []).append(name)
    return list(found.values())


def in_place(names):
    return listed(dict.fromkeys(map(short, names)))


def ranks_disagree(found):
    wrong = found.wrong("gradients")
    names = [name for name in wrong if found.disagree("gradients", name)]
    if names:
        one, other = found.disagree("gradients", names[0])
        said = what_they_are(found, names) or (
            f"differ between ranks {one} and {other}, which hold the same")
        more = "" if len(names) == len(wrong) else "; others are wrong, too"
        return f"{gradients_of(found, names)} {said}{more or others(found, names)}"


def off_somehow(found):
    names = found.wrong("gradients")
    so = ("; so is the loss, so look at forward first" if found.is_off("loss") else
          "; the loss is right, so look at backward, and at what follows it")
    if found.matched:
        where = (", and now the loss is off, too: look at what forward reads, beside the weights, "
                 "that a step has changed" if found.is_off("loss") else
                 ": look at what a step leaves behind")
        so = f"; before, {count(found.matched, 'step')} matched{where}"
    return f"{gradients_of(found, names)} are off by no constant factor{others(found, names)}{so}"


# ------------------------------------------------------------------------------- findings: the rate

def rate_too_high(found):
    """One GPU's run is lost as well: it matched at first, and its weights are no longer what they
    were by then."""
    if found.matched and not found.moved <= 1:
        rate = "the learning rate" if found.args.lr is None else f"--lr {found.args.lr:g}"
        return (f"in {count(found.matched, 'step')} that matched, one GPU's weights have moved by "
                f"{found.moved:.2g} times their size: {rate} is too high, and makes any "
                "difference of rounding large")


def lost_by_the_rate(found):
    """Nothing else can be told where one GPU's own numbers are not finite."""
    is_finite = math.isfinite(found.loss_there) and math.isfinite(found.norm_there)
    return None if is_finite else rate_too_high(found)
