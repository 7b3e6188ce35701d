"""Findings about what an update makes of parameters, and about the loss."""

import math

from lab.diagnose.names import describe_parameters, times
from lab.run.words import count, on_ranks

# --------------------------------------------------------------------------------- the parameters

RIGHT = "the gradients and their norm are right"


def not_updated(evidence):
    names = evidence.wrong("parameters")
    states = {(rank, part.state) for name in names
              for rank, part in evidence.parts_of("movement", name).items()
              if evidence.is_wrong("parameters", name, rank)}
    if {state for _, state in states} != {"zero"}:
        return None
    where = on_ranks({rank for rank, _ in states}, evidence.world)
    return (f"the update left {describe_parameters(names, evidence.names)} as they were{where}"
            f"{right_others(evidence, names)}; {RIGHT}")


def ranks_differ(evidence):
    names = [name for name in evidence.wrong("parameters")
             if evidence.disagree("parameters", name)]
    if not names:
        return None
    one, other = evidence.disagree("parameters", names[0])
    return (f"after the update {describe_parameters(names, evidence.names)} differ between ranks "
            f"{one} and {other}, which hold the same; {RIGHT}")


def moved_wrongly(evidence):
    names = evidence.wrong("parameters")
    ratios = [evidence.factor("movement", name) for name in names]
    if None in ratios or not all(evidence.is_close(x, ratios[0]) for x in ratios):
        distance, look = "otherwise than", "; look at the update"
        if evidence.matched:
            look = (f"; before, {count(evidence.matched, 'step')} matched: look at what the "
                    "optimizer keeps from step to step")
    else:
        distance, look = f"{times(ratios[0])} as far as", evidence.name_of_factor(ratios[0])
    return (f"{describe_parameters(names, evidence.names)} moved {distance} on one GPU"
            f"{right_others(evidence, names)}, although {RIGHT}{look}")


def right_others(evidence, names):
    """The end of a sentence about these parameters."""
    return "" if len(names) == len(evidence.names) else ", all others are right"


ABOUT_PARAMETERS = [not_updated, ranks_differ, moved_wrongly]

# --------------------------------------------------------------------------------------- the loss


def loss_is_off(evidence):
    """What the loss is, and whether the gradients are right; None if nothing is known of it."""
    words = what_the_loss_is(evidence)
    is_only_logged = (evidence.tolerance["gradients"] is not None
                      and not evidence.wrong("gradients"))
    if is_only_logged and "infinite" not in (words or ""):
        ratio = max((loss / evidence.loss_there for loss in evidence.loss),
                    key=lambda ratio: abs(ratio - 1))
        words = words or f"the loss is {times(ratio)} that of one GPU"
        return f"{words}; the gradients are right, so only what is logged is wrong"
    return words


def what_the_loss_is(evidence):
    where = [rank for rank, loss in enumerate(evidence.loss) if not math.isfinite(loss)]
    if where:
        return f"the loss is infinite or not a number{on_ranks(where, evidence.world)}"
    ratio, allowed = evidence.loss[0] / evidence.loss_there, evidence.tolerance["loss"]
    if evidence.known_factor(ratio) and evidence.losses_are(ratio * evidence.loss_there):
        return f"the loss is {times(ratio)} that of one GPU{evidence.name_of_factor(ratio)}"
    if evidence.world > 1 and abs(sum(evidence.loss) / evidence.loss_there - 1) <= allowed:
        return "the losses of the ranks add up to that of one GPU: each logs its own part"
    guesses = [words for words, loss in evidence.losses.items() if evidence.losses_are(loss)]
    if len(guesses) == 1:
        return f"the loss is that of {guesses[0]}"
    if max(evidence.loss) - min(evidence.loss) > allowed * evidence.loss_there:
        return (f"the ranks have different losses, from {min(evidence.loss):.4f} to "
                f"{max(evidence.loss):.4f}")
    return None
