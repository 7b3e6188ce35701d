"""What kind of wrong it is: sentences about a run that doesn't match one GPU's.

A run that trains wrongly looks well: its loss falls. Compared with one GPU's numbers, how it is
wrong shows what is wrong. Gradients of four ranks that are 4.00 times too large were summed twice;
those that add up to the right ones were not summed at all; a norm that leaves out the LayerNorms,
or counts them on every rank, is off by their squares and nothing else.

collect.py compares the first step that doesn't match with one GPU's, and with guesses.py. A finding
(gradients.py, norms.py, updates.py) is a function of that Evidence: it returns words if it holds,
else None. Lists order the findings, the more specific ones first; the first that holds is used. No
finding claims more than was compared: a cause is given where the numbers leave no other, and no
ratio is called by the name of a number that it happens to be, if nothing else speaks for that.
"""

import math

from lab.diagnose import norms, updates
from lab.diagnose.gradients import WHICH_ARE_WRONG
from lab.diagnose.names import factor, first_that_holds, times
from lab.run.about import about
from lab.run.words import joined


def of_run(run):
    """Sentences on why a run doesn't match: on rank 0, at the end. An error in here must not cost
    the report that it explains."""
    evidence = run.verifier.evidence if run.verifier else None
    try:
        return [*(diagnose(evidence) if evidence else []), *compare_with_formulas(run)]
    except Exception as error:
        return [f"what is known of it cannot be put into words: {type(error).__name__}: {error}"]


def diagnose(evidence):
    """The sentences that the evidence of a step allows."""
    if not (math.isfinite(evidence.loss_there) and math.isfinite(evidence.norm_there)):
        return []                                       # one GPU's run is lost as well
    wrong = evidence.wrong("gradients")
    is_norm_off = evidence.is_off("gradient norm") and not is_norm_of_these(evidence)
    sentence = None
    if is_norm_off and (evidence.clips or not wrong):
        sentence = first_that_holds(norms.EXPLAINED, evidence)
    if sentence:                        # which explains gradients that were clipped by it
        if evidence.clips and "after clipping" not in sentence:
            sentence += "; gradients were clipped by that"
    elif wrong:
        sentence = first_that_holds(WHICH_ARE_WRONG, evidence)
    elif is_norm_off:
        sentence = norms.not_finite(evidence) or norms.off_somehow(evidence)
    elif evidence.wrong("parameters"):
        sentence = first_that_holds(updates.ABOUT_PARAMETERS, evidence)
    sentences = [sentence]
    if evidence.is_off("loss") and "and the loss" not in (sentence or ""):
        sentences.append(updates.loss_is_off(evidence))
    return [sentence for sentence in sentences if sentence]


def is_norm_of_these(evidence):
    """Whether the norm on each rank is that of the gradients that are there, right or wrong."""
    norms_here = []
    for rank in range(evidence.world):
        parts = evidence.distinct_parts() | evidence.distinct_parts(rank=rank)
        norms_here.append(sum(part.square for part in parts.values()) ** 0.5)
    return evidence.norms_are(norms_here)


# ----------------------------------------------------------------------------- measured and formula

def compare_with_formulas(run):
    """Sentences about operators that are called some number of ranks, blocks or micro-batches times
    as often as their formula says, and send so many times the bytes."""
    args, operators = run.args, {}
    ratios = {}                         # {About: the ratios on all ranks}
    for check in run.checks:
        if check["ok"] is False and check["measured"] and check["expected"]:
            ratio = check["expected"] / check["measured"]
            ratios.setdefault(about(check), set()).add(ratio)
    numbers = {"the number of ranks": run.world, "the number of blocks": args.model.layers,
               "the number of micro-batches": args.batch // args.shares // args.micro_batch}
    for calls, (ratio, *others) in ratios.items():
        payload = calls._replace(amount="payload")
        name = factor(ratio, numbers)
        if calls.amount == "calls" and not others and ratios.get(payload) == {ratio} and name:
            words = f"the formula is {times(ratio)} what was measured: {name}"
            operators.setdefault(words, []).append(calls._replace(amount="").name)
    return [f"calls and bytes of {joined(names)}: {words}" for words, names in operators.items()]
