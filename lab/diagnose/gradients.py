"""Findings about gradients: what the wrong ones are, and which ones are wrong."""


from lab.diagnose.collect import share_left
from lab.diagnose.names import (
    CLOSE,
    describe_parameters,
    distinct,
    first_that_holds,
    module_of,
    role,
    short,
    times,
)
from lab.run.words import count, joined, on_ranks

# ------------------------------------------------------- what they are: findings about some of them

def missing(evidence, names):
    if not evidence.gradient_parts(names):
        return "are on no rank"
    where = [ranks_with(evidence, name, "missing", "zero") for name in names]
    rest = [part for part in evidence.gradient_parts(names)
            if part.state not in ("missing", "zero")]
    if not all(where) or any(part.off > evidence.tolerance["gradients"] for part in rest):
        return None
    is_missing = any(ranks_with(evidence, name, "missing") for name in names)
    ranks = on_ranks(set().union(*where), evidence.world)
    return f"are {'missing' if is_missing else 'zero'}{ranks}"


def ranks_with(evidence, name, *states):
    """The ranks on which a gradient is in one of these states, and one GPU's is not zero."""
    return {rank for rank, part in evidence.parts_of("gradients", name).items()
            if part.state in states and part.square_there > 0}


def not_summed(evidence, names):
    """The ranks that hold a parameter have different gradients, which add up to the right one."""
    ratio = evidence.common_ratio(evidence.totals[name] for name in names)
    are_multiples = all(evidence.is_multiple(part.fit) for part in evidence.gradient_parts(names)
                        if part.fit)
    differ = any(evidence.disagree("gradients", name) for name in names)
    if ratio is None or are_multiples or not differ:
        return None
    if evidence.is_close(ratio, 1):
        return ("differ between ranks that hold the same, and add up to those of one GPU: they "
                "were not summed")
    is_whole = evidence.is_close(ratio, round(ratio))
    if is_whole and 1.5 < ratio < evidence.copies_of(names[0]):
        return (f"differ between ranks that hold the same, and add up to {times(ratio)} those of "
                f"one GPU{evidence.name_of_factor(ratio)}: they were summed over some ranks alone")
    return None


def clipped_wrongly(evidence, names):
    """The norm is right and all gradients are too large or too small: it is in the clipping."""
    if len(names) < len(evidence.names) or not evidence.clips or evidence.is_off("gradient norm"):
        return None
    right = share_left(evidence.norm_there, evidence.args.clip)
    ratio = evidence.common_ratio(part.fit for part in evidence.gradient_parts(names))
    if ratio is None:
        return None
    if evidence.is_close(ratio, 1 / right):
        return (f"are {times(1 / right)} those of one GPU, which is the norm over --clip: the norm "
                "is right, and they were not clipped by it")
    if evidence.is_close(ratio, right):
        return (f"are {times(right)} those of one GPU, which is --clip over the norm: they were "
                "clipped twice")
    return None


def rounded(evidence, names):
    """Right but for the precision of a narrower dtype."""
    parts = [part for part in evidence.gradient_parts(names) if part.square_there > 0]
    if not parts or not all(0.9 < part.fit.ratio < 1.1 for part in parts):
        return None
    narrow = {part.narrow for part in parts}
    if len(narrow) == 1 and narrow != {""}:
        return f"were rounded: each number is one of {narrow.pop()}"
    worst = max(max(part.fit.residue, abs(part.fit.ratio - 1)) for part in parts)
    is_factor = evidence.common_ratio(part.fit for part in parts) is not None
    if evidence.rounding == "float64" and 1e-9 < worst < (1.2e-7 if is_factor else 3e-6):
        return (f"are off by up to {worst:.0e} of their size, which is what float32 rounds: "
                "something was computed, or sent, in it")
    return None


def a_multiple(evidence, names):
    """All are wrong by the same factor."""
    ratios = [evidence.factor("gradients", name) for name in names]
    ratio = ratios[0]
    if None in ratios or 0 in ratios or not all(evidence.is_close(x, ratio) for x in ratios):
        return None
    if evidence.is_lossy and not evidence.known_factor(ratio):
        return None
    if evidence.is_close(ratio, -1):
        return "have the opposite sign of those of one GPU"
    signs = evidence.numbers_of_ranks if comes_from_ranks(evidence, names) else {}
    why = evidence.name_of_factor(ratio, signs)
    is_loss_too = len(names) == len(evidence.names) and all(
        evidence.is_close(loss / evidence.loss_there, ratio) for loss in evidence.loss)
    return f"{'and the loss ' if is_loss_too else ''}are {times(ratio)} those of one GPU{why}"


def comes_from_ranks(evidence, names):
    """Whether more than a factor speaks of the ranks: forward is right, and only some gradients are
    wrong, of ranks that have the same sequences, or of parameters that ranks share. Whatever else
    is counted in a step, micro-batches and targets, is a factor of all gradients."""
    if evidence.is_off("loss") or len(names) == len(evidence.names):
        return False
    whole = {name for name in evidence.names if evidence.copies_of(name) == evidence.world}
    are_cut = 0 < len(whole) < len(evidence.names) and not whole & {*names}
    return evidence.args.shares == 1 or are_cut


def of_a_guess(evidence, names):
    """They are the gradients of another computation, or a multiple of them: of the guesses that
    fit, those of the one that fits best, and far better than one GPU's."""
    there = max((part.fit.residue for part in evidence.gradient_parts(names) if part.fit),
                default=0)
    fitting = {}
    for words, fits_of_guess in evidence.fits.items():
        fits = [fit for name in names for fit in fits_of_guess.get(name, {}).values()]
        ratio = evidence.common_ratio(fits)
        residue = max((fit.residue for fit in fits if fit), default=0)
        if ratio is not None and residue < there / 3:
            fitting[words] = residue, ratio
    if not fitting:
        return None
    words = min(fitting, key=fitting.get)
    _, ratio = fitting[words]
    is_loss_too = (len(names) == len(evidence.names) and evidence.is_off("loss")
                   and evidence.losses_are(ratio * evidence.losses[words]))
    subject = "and the loss are" if is_loss_too else "are"
    if evidence.is_close(ratio, 1):
        return f"{subject} those of {words}"
    name = evidence.name_of_factor(ratio, evidence.numbers)     # that they fit is a sign as well
    return f"{subject} {times(ratio)} those of {words}{name}"


def more_than_one_gpus(evidence, names):
    """What they are more than one GPU's is a multiple of the gradients of the step before, or of
    chapter 08's balance loss."""
    more = {}               # {what: the ratio}
    for what, fits_of_names in evidence.more.items():
        more[what] = evidence.common_ratio(
            fit for name in names for fit in fits_of_names.get(name, {}).values())
    if more.get("the balance loss") is not None:
        ratio = 1 + more["the balance loss"]
        if abs(ratio) < CLOSE:
            return "lack the balance loss"
        return f"count the balance loss {times(ratio)}{evidence.name_of_factor(ratio)}"
    ratio = more.get("the step before") or 0
    if ratio <= 0.5:
        return None
    words = "" if evidence.is_close(ratio, 1) else f"{times(ratio)} "
    name = evidence.name_of_factor(ratio, evidence.numbers_of_ranks)
    return (f"are those of one GPU and {words}those of the step before, which were not set to "
            f"zero{name}")


WHAT_THEY_ARE = [
    missing, not_summed, clipped_wrongly, rounded, a_multiple, of_a_guess, more_than_one_gpus]


def what_they_are(evidence, names):
    """What is wrong with these gradients, if anything is known of it."""
    return first_that_holds(WHAT_THEY_ARE, evidence, names)


# ------------------------------------------------------- which ones are wrong: findings about all

def not_finite(evidence):
    where = {name: ranks_with(evidence, name, "not finite") for name in evidence.names}
    names = [name for name in evidence.names if where[name]]
    if not names:
        return None
    ranks = on_ranks(set().union(*where.values()), evidence.world)
    others = "" if len(names) == len(evidence.names) else ", all others are finite"
    return f"{gradients_of(evidence, names)} are infinite or not a number{ranks}{others}"


def all_wrong_ones(evidence):
    """The same holds of all that are wrong."""
    names = evidence.wrong("gradients")
    words = what_they_are(evidence, names)
    return words and f"{gradients_of(evidence, names)} {words}{equal_others(evidence, names)}"


def from_some_place_on(evidence):
    """Right from the head down to some place, and wrong in all that backward meets after it."""
    if evidence.is_off("loss"):
        return None
    wrong, places = {*evidence.wrong("gradients")}, in_places(evidence.names)
    last = max(i for i, place in enumerate(places) if wrong & {*place})
    before = {name for place in places[:last] for name in place}
    if not before or last + 1 == len(places) or not before <= wrong:
        return None
    first = [name for name in places[last] if name in wrong]
    words = what_they_are(evidence, first) or "are off by no constant factor"
    right, next_ones = (joined(distinct(map(short, names))) for names in (places[last + 1], first))
    return (f"backward is right down to {right}; the gradients that come next, of {next_ones}, "
            f"{words}; all that come later are wrong, too")


def in_places(names):
    """The parameters in the order of forward, together those between which there is no such order:
    q, k and v, or a mixture's router and its experts."""
    mixtures = {module_of(name) for name in names if "router" in name}
    places = {}
    for name in names:
        place = short(name)
        if role(name) in ("q", "k", "v"):
            place = f"{module_of(name)} q, k, v"
        elif module_of(name) in mixtures and ".mlp." in name:
            place = f"{module_of(name)} mixture"
        places.setdefault(place, []).append(name)
    return list(places.values())


def ranks_disagree(evidence):
    wrong = evidence.wrong("gradients")
    names = [name for name in wrong if evidence.disagree("gradients", name)]
    if not names:
        return None
    one, other = evidence.disagree("gradients", names[0])
    words = what_they_are(evidence, names) or (
        f"differ between ranks {one} and {other}, which hold the same")
    rest = equal_others(evidence, names) if len(names) == len(wrong) else "; others are wrong, too"
    return f"{gradients_of(evidence, names)} {words}{rest}"


def off_somehow(evidence):
    names, is_loss_off = evidence.wrong("gradients"), evidence.is_off("loss")
    if evidence.matched and is_loss_off:
        where = (f"before, {count(evidence.matched, 'step')} matched, and now the loss is off, "
                 "too: look at what forward reads that a step has changed")
    elif evidence.matched:
        where = (f"before, {count(evidence.matched, 'step')} matched: look at what a step leaves "
                 "behind")
    elif is_loss_off:
        where = "so is the loss, so look at forward first"
    else:
        where = "the loss is right, so look at backward, and at what follows it"
    return (f"{gradients_of(evidence, names)} are off by no constant factor"
            f"{equal_others(evidence, names)}; {where}")


WHICH_ARE_WRONG = [not_finite, all_wrong_ones, from_some_place_on, ranks_disagree, off_somehow]


def gradients_of(evidence, names):
    """What these gradients are called."""
    words = describe_parameters(names, evidence.names)
    if words == "all parameters":
        return "all gradients"
    if words.startswith("all but "):
        return f"all gradients but those of {words.removeprefix('all but ')}"
    return f"gradients of {words}"


def equal_others(evidence, names):
    return "" if len(names) == len(evidence.names) else ", all others equal"
