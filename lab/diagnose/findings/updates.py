"""Findings about what an update makes of parameters, and about the loss."""

import math

from lab.diagnose.findings.names import (
    in_words,
    known_factor,
    named_factor,
    on_ranks,
    others,
    times,
)
from lab.run.words import count

# ------------------------------------------------------------------------- findings: the parameters

def not_updated(found):
    names = found.wrong("parameters")
    states = {(rank, seen.state) for name in names
              for rank, seen in found.at("movement", name).items()
              if found.is_wrong("parameters", name, rank)}
    if {state for _, state in states} == {"zero"}:
        where = on_ranks({rank for rank, _ in states}, found.world)
        return (f"the update left {in_words(names, found.names)} as they were{where}"
                f"{others(found, names, 'are right')}; the gradients and their norm are right")


def ranks_hold_others(found):
    names = [name for name in found.wrong("parameters") if found.disagree("parameters", name)]
    if names:
        one, other = found.disagree("parameters", names[0])
        return (f"after the update {in_words(names, found.names)} differ between ranks {one} and "
                f"{other}, which hold the same; the gradients and their norm are right")


def moved_by_a_factor(found):
    names = found.wrong("parameters")
    ratios = [found.factor("movement", name) for name in names]
    if None in ratios or not all(found.close(x, ratios[0]) for x in ratios):
        return None
    name = named_factor(found, ratios[0])
    shape = "; look at the shape by which Muon scales" if are_muons(found, names) else ""
    return (f"{in_words(names, found.names)} moved {times(ratios[0])} as far as on one GPU"
            f"{others(found, names, 'are right')}, although the gradients and their norm are right"
            f"{name}{shape}")


def updated_somehow(found):
    names = found.wrong("parameters")
    update = ("the matrices that Muon orthogonalizes, which are to be whole"
              if are_muons(found, names) else "the update")
    before = (f"; before, {count(found.matched, 'step')} matched: look at what the optimizer keeps "
              "from step to step" if found.matched else f"; look at {update}")
    return (f"{in_words(names, found.names)} moved otherwise than on one GPU"
            f"{others(found, names, 'are right')}, although the gradients and their norm are right"
            f"{before}")


def are_muons(found, names):
    """Whether Muon updates all of them, the matrices of blocks, and not AdamW."""
    return found.args.optimizer == "muon" and all(
        name.startswith("block") and "norm" not in name for name in names)


# ------------------------------------------------------------------------------- findings: the loss

def beside_the_loss(found):
    judged = found.tolerance["gradients"] is not None and not found.wrong("gradients")
    return "; the gradients are right, so only what is logged is wrong" if judged else ""


def losses_are(found, expected):
    return all(abs(loss - other) <= found.tolerance["loss"] * abs(other)
               for loss, other in zip(found.loss, expected))


def loss_not_finite(found):
    where = [rank for rank, loss in enumerate(found.loss) if not math.isfinite(loss)]
    if where:
        return f"the loss is infinite or not a number{on_ranks(where, found.world)}"


def loss_by_a_factor(found):
    ratio = found.loss[0] / found.loss_there
    if known_factor(found, ratio) and losses_are(found, [ratio * found.loss_there] * found.world):
        name = named_factor(found, ratio)
        return f"the loss is {times(ratio)} that of one GPU{name}{beside_the_loss(found)}"


def loss_not_summed(found):
    if found.world > 1 and abs(sum(found.loss) / found.loss_there - 1) <= found.tolerance["loss"]:
        return ("the losses of the ranks add up to that of one GPU: each logs its own part"
                f"{beside_the_loss(found)}")


def loss_of_something_else(found):
    said = [words for words, loss in found.losses.items()
            if losses_are(found, [loss] * found.world)]
    return f"the loss is that of {said[0]}{beside_the_loss(found)}" if len(said) == 1 else None


def losses_differ(found):
    if max(found.loss) - min(found.loss) > found.tolerance["loss"] * found.loss_there:
        return (f"the ranks have different losses, from {min(found.loss):.4f} to "
                f"{max(found.loss):.4f}{beside_the_loss(found)}")


def loss_off_somehow(found):
    worst = max(found.loss, key=lambda loss: abs(loss - found.loss_there))
    if beside_the_loss(found):
        return (f"the loss is {times(worst / found.loss_there)} that of one GPU"
                f"{beside_the_loss(found)}")
