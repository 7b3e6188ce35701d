"""What kind of wrong it is: sentences about a run that does not match, from what is known of it.

A run that trains wrongly looks well: its loss falls. Beside one GPU's numbers, how it is wrong says
what is wrong. Gradients of four ranks that are 4.00 times too large were summed twice; those that
add up to the right ones were not summed at all; a norm that leaves out the LayerNorms, or counts
them on every rank, is off by their squares and nothing else.

findings/ has a function for each finding. It looks at the Evidence (evidence.py) of the first step
that does not match, and returns words if it holds, else None. Lists have them in the order in which
they are asked, the more specific ones first; the first that holds is said. None says more than was
compared: a cause is given where the numbers leave no other, and no ratio is called by the name of a
number that it happens to be, if nothing else speaks for that.
"""

import math

from lab.diagnose.evidence import share_left
from lab.diagnose.findings.gradients import (
    all_alike,
    by_several_factors,
    from_some_place_on,
    lost_by_the_rate,
    not_finite,
    off_somehow,
    ranks_disagree,
    rate_too_high,
    stale_weights,
)
from lab.diagnose.findings.names import factor, listed, times
from lab.diagnose.findings.norms import (
    HOW_THE_NORM_IS,
    norm_by_a_factor,
    norm_not_finite,
    norm_off_somehow,
)
from lab.diagnose.findings.updates import (
    loss_by_a_factor,
    loss_not_finite,
    loss_not_summed,
    loss_of_something_else,
    loss_off_somehow,
    losses_differ,
    moved_by_a_factor,
    not_updated,
    ranks_hold_others,
    updated_somehow,
)
from lab.run.about import AS_COMPUTED, about

# ------------------------------------------------------------------------------- what is to be said

ABOUT_GRADIENTS = [
    not_finite, stale_weights, all_alike, by_several_factors, rate_too_high, from_some_place_on,
    ranks_disagree, off_somehow]
ABOUT_PARAMETERS = [
    not_updated, ranks_hold_others, moved_by_a_factor, rate_too_high, updated_somehow]
ABOUT_THE_LOSS = [loss_not_finite, loss_by_a_factor, loss_not_summed, loss_of_something_else,
                  losses_differ]


def diagnose(found):
    """The sentences that the evidence of a step allows."""
    first = lambda findings: next(filter(None, (says(found) for says in findings)), None)
    wrong, said = found.wrong("gradients"), []
    if lost_by_the_rate(found):
        return [lost_by_the_rate(found)]
    norm_is_off = found.is_off("gradient norm") and not is_of_ours(found)
    clips = share_left(found.norm_there, found.args.clip) < 1
    about_the_norm = first(HOW_THE_NORM_IS) if norm_is_off and (clips or not wrong) else None

    if about_the_norm:                  # which explains gradients that were clipped by it
        by_it = clips and "after clipping" not in about_the_norm
        said.append(about_the_norm + ("; gradients were clipped by that" if by_it else ""))
    elif wrong:
        said.append(first(ABOUT_GRADIENTS))
    elif norm_is_off:
        said.append(first([norm_not_finite, norm_by_a_factor, norm_off_somehow]))
    elif found.wrong("parameters"):
        said.append(first(ABOUT_PARAMETERS))
    if found.is_off("loss") and not (said and "and the loss" in said[0]):
        lossy = [] if wrong else [stale_weights, rate_too_high]     # the loss alone is compared
        said.append(first([*lossy, *ABOUT_THE_LOSS, loss_off_somehow]))
    return [sentence for sentence in said if sentence]


def is_of_ours(found):
    """Whether the norm on each rank is that of the gradients that are there, right or wrong."""
    for rank, norm in enumerate(found.norm):
        parts = {}
        for name in found.names:
            for at, seen in found.at("gradients", name).items():
                if at == rank or (name, seen.where) not in parts:
                    parts[name, seen.where] = seen.square
        if not abs(norm - sum(parts.values())**0.5) <= max(
                found.tolerance["gradient norm"], 1e-9) * norm:
            return False
    return True


# ----------------------------------------------------------------------------- measured and formula

def of_run(run):
    """What is known of why a run does not match: on rank 0, in the end. What fails in here is not
    to cost the report that it explains."""
    found = run.verifier.evidence if run.verifier else None
    try:
        return [*(diagnose(found) if found else []), *of_formulas(run)]
    except Exception as error:
        return [f"what is known of it cannot be put into words: {type(error).__name__}: {error}"]


def of_formulas(run):
    """Sentences about measurements whose ratio to their formula is a number of this run. It is
    named where a second measurement speaks for it: of calls and bytes alike; of bytes, where the
    calls are right; on the wire, where the bytes that are sent are right."""
    args, said, ratios = run.args, {}, {}               # ratios: {name: those of the ranks}
    numbers = {"the number of ranks": run.world, "the number of blocks": args.model.layers,
               "the number of micro-batches": args.batch // args.shares // args.micro_batch}
    widths = {f"the bytes of {args.dtype} over those of {8 * width} bits":
              run.dtype.itemsize / width for width in (4, 2) if width < run.dtype.itemsize}
    ring = {"N/(N-1), the factor of a ring of N ranks": run.world / max(run.world - 1, 1)}
    for check in run.checks:
        measured, formula = check["measured"], check["expected"]
        if check["ok"] is False:
            ratio = formula / measured if measured and formula else math.nan
            ratios.setdefault(about(check), set()).add(ratio)
    for one, (ratio, *more) in ratios.items():
        if more or math.isnan(ratio) or one[:2] == AS_COMPUTED:
            continue
        if one.amount == "calls" and ratios.get(one._replace(amount="payload")) != {ratio}:
            continue                                    # of few calls any ratio has a name
        calls_are_right = one.amount and one._replace(amount="calls") not in ratios
        on_the_wire = ring if one.amount == "on the wire" else {}
        named = (factor(ratio, numbers | (widths if calls_are_right else {}))
                 or factor(ratio, on_the_wire))
        if named and "square" not in named:
            whole_calls = all(ratios.get(one._replace(amount=amount)) == {ratio}
                              for amount in ("calls", "payload"))
            signs = numbers if whole_calls else widths if calls_are_right else {}
            name = factor(ratio, signs) or factor(ratio, on_the_wire)
            name = f": {name}" if name and " and " not in name else ""
            said.setdefault(f"the formula is {times(ratio)} what was measured{name}",
                            []).append(one)
    return [f"{listed(amounts(these))}: {sentence}" for sentence, these in said.items()]


def amounts(these):
    """What is checked of each operator, together: "all_reduce (calls and payload)"."""
    found = {}
    for one in these:
        found.setdefault(one._replace(amount="").name, []).extend(filter(None, [one.amount]))
    return [f"{what} ({listed(of_it)})" if of_it else what for what, of_it in found.items()]
