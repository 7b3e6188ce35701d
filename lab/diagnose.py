"""What kind of wrong it is: sentences about a run that does not match, from what is known of it.

A run that trains wrongly looks well: its loss falls. Beside one GPU's numbers it says what is wrong
by how it is wrong. Gradients of four ranks that are 4.00 times too large were summed twice; those
that add up to the right ones were not summed at all; a norm that leaves out the LayerNorms, or
counts them on each rank, is off by just their squares.

Below is a function for each finding. It looks at the Evidence (lab/evidence.py) of the first step
that does not match, and returns a sentence if it holds, else None. FINDINGS has them by what they
are about, the more specific ones first, and of each list the first that holds is said. None says
more than what was compared: where there is a reason in a sentence, the numbers leave no other.
"""

import math

from lab.evidence import ROUNDING
from lab.words import count

CLOSE = 1e-6            # so near a ratio is to the number that it is called by


# -------------------------------------------------------------------------- numbers and their names

def factor(ratio, numbers, within=CLOSE):
    """What a ratio is, in terms of these {name: number}: one of them, one over it, or a square root
    of either; None if it is none of them.

        factor(0.25, {"the number of ranks": 4})      "4 is the number of ranks"
    """
    size, opposite = abs(ratio), "the sign is the opposite one"
    numbers = {name: number for name, number in numbers.items() if abs(number - 1) > 2 * within}

    def says(words, form):
        """The sentence, if one of these numbers, or one over it, has this form and is the ratio."""
        names = [name for name, number in numbers.items()
                 if any(abs(size - value) <= within * value
                        for value in (form(number), 1 / form(number)))]
        if names:
            n = numbers[names[0]]
            return words.format(n=plain(n), root=plain(n**0.5), names=" and ".join(names))

    found = (says("{n} is {names}", lambda n: n)
             or says("{root} is the square root of {n}, which is {names}", lambda n: n**0.5))
    if ratio < 0:
        return opposite if abs(size - 1) <= within else found and f"{found}, and {opposite}"
    return found


def plain(number):
    """4 for 4.0, and 1.43 for 1.4285."""
    return f"{round(number):,}" if abs(number - round(number)) < 1e-6 * number else f"{number:.3g}"


def times(ratio):
    """A ratio as it is said before "one GPU's"."""
    if 0 < ratio < 1 and abs(1 / ratio - round(1 / ratio)) < 1e-3:
        return f"1/{round(1 / ratio):,} of"
    return f"{ratio:.2f} times" if 0.1 < abs(ratio) < 1000 else f"{ratio:.3g} times"


def numbers_of(found):
    """{name: number} of what a factor may be in this run."""
    args, world = found.args, found.world
    m = args.batch // args.shares // args.micro_batch
    numbers = {"the number of ranks": world, "the number of micro-batches": m}
    if 1 < args.shares < world:
        numbers["the number of data-parallel ranks"] = args.shares
    if 1 < args.shares and 1 < m:
        numbers["the number of micro-batches of all ranks"] = args.shares * m
    for axis in ("pp", "cp", "tp", "ep", "shard_size"):
        if 1 < (getattr(args, axis, None) or 1) < world:
            numbers[f"--{axis.replace('_', '-')}"] = getattr(args, axis)
    cfg, t = args.model, getattr(args, "tp", world)
    if args.shares == 1 and t > cfg.kv_heads:
        numbers["the number of ranks that share a kv head"] = t // cfg.kv_heads
    numbers["the number of query heads that share a kv head"] = cfg.heads // cfg.kv_heads
    tokens = args.batch * cfg.seq
    numbers |= {"the number of tokens in the batch": tokens,
                "the number of valid targets in the batch": found.valid}
    if args.micro_batch > 1:
        numbers["the number of sequences in the batch"] = args.batch
    if found.valid < tokens:
        numbers["all targets over the valid ones"] = tokens / found.valid
        numbers |= {f"the valid targets over those of data-parallel rank {rank}":
                    found.valid / valid for rank, valid in enumerate(found.by_share)
                    if 0 < valid < found.valid}
    if getattr(args, "precision", None) == "fp16":
        numbers["the loss scale"] = args.loss_scale
    if args.clip and found.norm_there > args.clip:
        numbers["the norm over --clip"] = found.norm_there / args.clip
    return numbers


def named_factor(found, ratio):
    """": 4 is the number of ranks", or nothing."""
    name = factor(ratio, numbers_of(found), within=ROUNDING[found.rounding][1])
    return f": {name}" if name else ""


# ----------------------------------------------------------------------- parameters and their names

ROLES = {   # what a global name contains: what it is called
    "embedding.": "the embedding", "norm": "the LayerNorms", "attn.q.": "q", "attn.k.": "k",
    "attn.v.": "v", "attn.o.": "o", "router": "the router", "mlp.shared": "the shared expert",
    "mlp.up.": "up", "mlp.down.": "down", "mlp.up": "the experts' up",
    "mlp.down": "the experts' down", "head.out": "the head"}


def role(name):
    found = next((called for words, called in ROLES.items() if words in name), name)
    if found == "the LayerNorms" and name.endswith("bias"):
        return "the LayerNorms' biases"
    return found


def in_words(names, every):
    """What these of all parameters are: "q and k", "the experts of block1"."""
    names = [name for name in every if name in names]       # in the order of forward
    if len(names) == len(every):
        return "all parameters"
    blocks = lambda some: list(dict.fromkeys(name.split(".")[0] for name in some))
    chosen, roles = blocks(names), list(dict.fromkeys(map(role, names)))
    of_roles = [name for name in every if role(name) in roles]
    if len(of_roles) == len(names):
        others = list(dict.fromkeys(role(name) for name in every if role(name) not in roles))
        if len(others) < min(3, len(roles)):
            return f"all but {listed(others)}"
        return listed(roles)
    of_blocks = [name for name in every if name.split(".")[0] in chosen]
    if len(of_blocks) == len(names):
        everything = blocks(every)
        if len(chosen) > 1 and everything[:len(chosen)] == chosen:
            return f"all before {everything[len(chosen)]}"
        return listed(chosen)
    if len([name for name in of_blocks if role(name) in roles]) == len(names):
        return f"{listed(roles)} of {listed(chosen)}"
    shown = [name.removesuffix(".weight") for name in names]
    return listed(shown if len(shown) < 5 else [*shown[:3], f"{len(shown) - 3} others"])


def listed(words):
    """"a, b and c"; what belongs together is said as one."""
    words = list(words)
    for parts, whole in ((("the LayerNorms", "the LayerNorms' biases"), "the LayerNorms"),
                         (("the experts' up", "the experts' down"), "the experts")):
        if all(part in words for part in parts):
            words[words.index(parts[0])] = whole
            words = [word for word in words if word not in parts or word == whole]
        elif parts[0] in words and parts[0] == "the LayerNorms":
            words[words.index(parts[0])] = "the LayerNorms' weights"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def gradients_of(found, names):
    names = in_words(names, found.names)
    if names.startswith("all but"):
        return f"all gradients {names.removeprefix('all ')}"
    return "all gradients" if names == "all parameters" else f"gradients of {names}"


def others(found, names):
    return "" if len(names) == len(found.names) else ", all others equal"


def on_ranks(ranks, world):
    ranks = sorted(ranks)
    if len(ranks) == world:
        return ""
    if len(ranks) == world - 1 > 1:
        [other] = set(range(world)) - set(ranks)
        return f" on every rank but {other}"
    return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {listed(map(str, ranks))}"


# ------------------------------------------------------------------ findings: what gradients are

# Each of these says of some gradients, which are wrong, what they are, if it is the same of all.

def held_by_nobody(found, names):
    if not any(name in found.parts["gradients"] for name in names):
        return "are on no rank"


def of_another_shape(found, names):
    if all(seen.state == "of another shape" for seen in parts_of(found, names)):
        return "have another shape than the part that p.cuts says"


def not_finite(found, names):
    where = {rank for name in names for rank, seen in found.parts["gradients"].get(name, {}).items()
             if seen.state == "not finite"}
    if where and all(any(seen.state == "not finite" for seen in parts_of(found, [name]))
                     for name in names):
        return f"are not finite{on_ranks(where, found.world)}"


def missing(found, names):
    parts = parts_of(found, names)
    where = {rank for name in names for rank, seen in found.parts["gradients"].get(name, {}).items()
             if seen.state in ("missing", "zero")}
    if all(seen.state in ("missing", "zero") or seen.off <= found.tolerance["gradients"]
           for seen in parts):
        what = "missing" if any(seen.state == "missing" for seen in parts) else "zero"
        return f"are {what}{on_ranks(where, found.world)}"


def not_summed(found, names):
    """The ranks that hold a parameter have different gradients, which add up to the right one."""
    if not all(found.disagree("gradients", name) for name in names):
        return None
    fits = [found.totals[name] for name in names]
    ratio = fits[0].ratio
    if not all(found.alike(fit) and found.close(fit.ratio, ratio) for fit in fits):
        return None
    if found.close(ratio, 1):
        return ("differ between ranks that hold the same, and add up to those of one GPU: they "
                "were not summed")
    if ratio > 1.5 and found.close(ratio, round(ratio)):
        return (f"differ between ranks that hold the same, and add up to {times(ratio)} those of "
                f"one GPU{named_factor(found, ratio)}: they were summed over some ranks alone")


def a_multiple(found, names):
    """All are wrong by the same factor."""
    ratios = [found.factor("gradients", name) for name in names]
    if None in ratios or 0 in ratios or not all(found.close(x, ratios[0]) for x in ratios):
        return None
    why = named_factor(found, ratios[0])
    replicated_batch = found.args.shares == 1 and len(names) < len(found.names)
    if why and replicated_batch and found.close(ratios[0], found.world):
        why += ", so a sum was taken of what was already summed"
    return f"are {times(ratios[0])} those of one GPU{why}"


def of_something_else(found, names):
    """They are the gradients of another computation, or a multiple of them."""
    for words, fits in found.fits.items():
        seen = [fit for name in names for fit in fits.get(name, {}).values()]
        ratio = seen[0].ratio if seen else math.nan
        if all(found.alike(fit) and found.close(fit.ratio, ratio) for fit in seen) and seen:
            if found.close(ratio, 1):
                return f"are {words}"
            return f"are {times(ratio)} {words}{named_factor(found, ratio)}"


def of_one_rank_alone(found, names):
    """As where a shard of each rank's own gradients is taken for one of their sum."""
    if all(all(found.alone.get(name, {0: False}).values()) for name in names):
        return ("are, in each number, those of one rank's sequences alone: they were not summed "
                "over the ranks")


def rounded(found, names):
    """Right but for the precision of a narrower dtype."""
    parts = [seen for seen in parts_of(found, names) if not seen.blank]
    if not parts or not all(0.9 < seen.fit.ratio < 1.1 for seen in parts):
        return None
    narrow = {seen.narrow for seen in parts}
    if len(narrow) == 1 and narrow != {""}:
        return f"were rounded: each number is one of {narrow.pop()}"
    worst = max(seen.fit.residue for seen in parts)
    if found.rounding == "float64" and 1e-9 < worst < 3e-6:
        return (f"are off by up to {worst:.0e} of their size, which is what float32 rounds: "
                "something was computed, or sent, in it")


def by_a_factor_on_each_rank(found, names):
    """Of each rank they are wrong by one factor, which is not the same on all ranks."""
    groups = {}
    for rank in range(found.world):
        held = [name for name in names if rank in found.parts["gradients"].get(name, {})]
        factors = [found.factor("gradients", name, rank) for name in held]
        if None in factors or any(not found.close(x, factors[0]) for x in factors):
            return None
        ratio = factors[0] if factors else 1.0
        key = next((other for other in groups if found.close(ratio, other)), ratio)
        groups.setdefault(key, []).append(rank)
    if len(groups) < 2:
        return None
    right = groups.pop(1.0, [])
    said = [f"{times(ratio)} those of one GPU{on_ranks(ranks, found.world)}"
            f"{named_factor(found, ratio)}" if ratio else f"zero{on_ranks(ranks, found.world)}"
            for ratio, ranks in groups.items()]
    return f"are {listed(said)}" + (f", and right{on_ranks(right, found.world)}" if right else "")


WHAT_THEY_ARE = [
    held_by_nobody, of_another_shape, not_finite, missing, not_summed, a_multiple,
    of_something_else, of_one_rank_alone, rounded, by_a_factor_on_each_rank]


def parts_of(found, names):
    return [seen for name in names for seen in found.parts["gradients"].get(name, {}).values()]


def what_they_are(found, names):
    return next(filter(None, (says(found, names) for says in WHAT_THEY_ARE)), None)


# -------------------------------------------------------------- findings: which gradients are wrong

def alike(found):
    """The same is to be said of all that are wrong."""
    names = found.wrong("gradients")
    said = what_they_are(found, names)
    return said and f"{gradients_of(found, names)} {said}{others(found, names)}"


def from_some_place_on(found):
    """Right from the head down to some place, and wrong in all that backward meets after it."""
    wrong = found.wrong("gradients")
    if any(found.is_off("loss", loss, found.loss_there) for loss in found.loss):
        return None
    order = places(found.names)
    last = max(i for i, place in enumerate(order) if any(name in wrong for name in place))
    before = [name for place in order[:last] for name in place]
    if not before or any(name not in wrong for name in before):
        return None
    first = [name for name in order[last] if name in wrong]
    right = (f"backward is right down to {in_place(order[last + 1])}" if last + 1 < len(order) else
             "backward goes wrong at once")
    said = what_they_are(found, first) or "are off by no constant factor"
    return (f"{right}; the gradients that it gives next, of {in_place(first)}, {said}; all that "
            "come later are wrong, too")


def places(names):
    """The parameters in the order of forward, together those that belong to one matmul or norm, or
    read the same input."""
    found = {}
    for name in names:
        module, *_ = name.split(".")
        place = name.removesuffix(".weight").removesuffix(".bias")
        found.setdefault(f"{module} qkv" if role(name) in ("q", "k", "v") else place,
                         []).append(name)
    return list(found.values())


def in_place(names):
    return listed(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias")
                                for name in names))


def by_several_factors(found):
    groups = {}
    for name in found.wrong("gradients"):
        ratio = found.factor("gradients", name)
        if ratio is None:
            return None
        key = next((other for other in groups if found.close(ratio, other)), ratio)
        groups.setdefault(key, []).append(name)
    if 1 < len(groups) < 4:
        said = [f"{gradients_of(found, names)} {what_they_are(found, names)}"
                for names in groups.values()]
        return "; ".join(said) + others(found, found.wrong("gradients"))


def ranks_disagree(found):
    wrong = found.wrong("gradients")
    names = [name for name in wrong if found.disagree("gradients", name)]
    if names:
        one, other = found.disagree("gradients", names[0])
        more = "" if len(names) == len(wrong) else "; more are wrong"
        return (f"{gradients_of(found, names)} are others on rank {other} than on rank {one}, "
                f"which holds the same parameters{more or others(found, names)}")


def off_somehow(found):
    names = found.wrong("gradients")
    lost = any(found.is_off("loss", loss, found.loss_there) for loss in found.loss)
    so = ("; so is the loss, so look at forward first" if lost else
          "; the loss is right, so look at backward, and at what follows it")
    if found.matched:
        so = f"; before, {count(found.matched, 'step')} matched: look at what a step leaves behind"
    return f"{gradients_of(found, names)} are off by no constant factor{others(found, names)}{so}"


# ------------------------------------------------------------------------------ findings: the norm

def norm_is_judged(found):
    """Whether the norm is off, and the gradients are not: else it may well be theirs."""
    return (any(found.is_off("gradient norm", norm, found.norm_there) for norm in found.norm)
            and not found.wrong("gradients"))


def square_of(found, names, rank=None):
    """The square of the norm of these gradients: of each part once, or of what a rank holds."""
    parts = {(name, seen.where if rank is None else at): seen.square for name in names
             for at, seen in found.parts["gradients"][name].items() if rank in (None, at)}
    return sum(parts.values())


def all_are(found, values, expected):
    return all(abs(value - other) <= found.norm_tolerance * abs(other)
               for value, other in zip(values, expected, strict=True))


def norm_of_own_parts(found):
    held = [square_of(found, found.names, rank)**0.5 for rank in range(found.world)]
    if found.world == 1:
        return None
    whole = [sum(found.parts["gradients"][name][rank].square * parts_cut(found, name)
                 for name in found.names if rank in found.parts["gradients"][name])**0.5
             for rank in range(found.world)]            # as common.grad_norm counts without a group
    if all_are(found, found.norm, held) or all_are(found, found.norm, whole):
        return ("the gradient norm of each rank comes from what it holds itself: the squares were "
                "not summed over the ranks")
    for rank, norm in enumerate(held):
        if all_are(found, found.norm, [norm] * found.world):
            return f"the gradient norm is that of what rank {rank} holds alone"


def norm_with_copies(found):
    """What several ranks hold is counted on each of them."""
    held = [square_of(found, found.names, rank) for rank in range(found.world)]
    copies = [name for name in found.names if copies_of(found, name) > 1]
    if copies and all_are(found, found.norm, [sum(held)**0.5] * found.world):
        names = in_words(copies, found.names)
        return (f"the gradient norm counts {names} once for each rank that holds the same, and not "
                "once")


def copies_of(found, name):
    """How many ranks hold the same part of it."""
    parts = found.parts["gradients"][name]
    return len(parts) / len({seen.where for seen in parts.values()})


def parts_cut(found, name):
    """How many parts there are of it."""
    where = next(iter(found.parts["gradients"][name].values())).where
    return math.prod(parts for _, _, parts in where)


def norm_of_some(found):
    """Some kind of parameter is left out, or counted as often as there are ranks."""
    if not all_are(found, found.norm, [found.norm[0]] * found.world):
        return None
    kinds = {}
    for name in found.names:
        for kind in ((role(name),), ("copies", copies_of(found, name)), name.split(".")[0]):
            kinds.setdefault(kind, []).append(name)
    kinds["LayerNorms"] = [name for name in found.names if role(name).startswith("the LayerNorms")]
    kinds["experts"] = [name for name in found.names if role(name).startswith("the experts")]
    kinds["kv"] = [name for name in found.names if role(name) in ("k", "v")]
    said = {}
    for names in kinds.values():
        if not names or len(names) == len(found.names):
            continue
        square, copies = square_of(found, names), copies_of(found, names[0])
        for often in {0.0, float(found.world), copies, 1 / found.world, 1 / copies} - {1.0}:
            expected = (found.norm_there**2 + (often - 1) * square)**0.5
            visible = abs(expected - found.norm_there) > 3 * found.norm_tolerance * expected
            if visible and all_are(found, found.norm[:1], [expected]):
                words = in_words(names, found.names)
                said[words] = (f"the gradient norm leaves out {words}" if not often else
                               f"the gradient norm counts {words} {often:g} times")
    return next(iter(said.values())) if len(said) == 1 else None


def norm_before_the_root(found):
    if all_are(found, found.norm, [found.norm_there**2] * found.world):
        return "the gradient norm is the sum of the squares: the root was not taken"


def norm_after_clipping(found):
    clip = found.args.clip
    if clip and clip < found.norm_there and all(abs(norm - clip) < 1e-5 * clip
                                                for norm in found.norm):
        return "the gradient norm is that after clipping"


def norm_of_norms(found):
    parts = {(name, seen.where): seen.square**0.5 for name in found.names
             for seen in found.parts["gradients"][name].values()}
    if all_are(found, found.norm, [sum(parts.values())] * found.world):
        return "the gradient norm is the sum of the norms of all parameters, not of their squares"


def norm_by_a_factor(found):
    ratio = found.norm[0] / found.norm_there
    name = named_factor(found, ratio)
    if name and all_are(found, found.norm, [ratio * found.norm_there] * found.world):
        return f"the gradients are right, and their norm is {times(ratio)} one GPU's{name}"


def norm_off_somehow(found):
    ratio = max(found.norm, key=lambda norm: abs(norm - found.norm_there)) / found.norm_there
    return f"the gradients are right, and their norm is {times(ratio)} one GPU's"


# ------------------------------------------------------------------------- findings: the parameters

def parameters_are_judged(found):
    """Whether they are off, although the gradients and the norm are right."""
    return found.wrong("parameters") and not found.wrong("gradients") and not any(
        found.is_off("gradient norm", norm, found.norm_there) for norm in found.norm)


def ranks_hold_others(found):
    names = [name for name in found.wrong("parameters") if found.disagree("parameters", name)]
    if names:
        one, other = found.disagree("parameters", names[0])
        return (f"{in_words(names, found.names)} are others on rank {other} than on rank {one} "
                "after the update, although both hold the same part and its gradient is right")


def not_updated(found):
    names = found.wrong("parameters")
    still = {rank for name in names for rank, seen in found.parts["movement"][name].items()
             if found.is_wrong("parameters", name, rank) and seen.state == "zero"}
    moved = {rank for name in names for rank, seen in found.parts["movement"][name].items()
             if found.is_wrong("parameters", name, rank) and seen.state != "zero"}
    if still and not moved:
        left = others(found, names).replace("others equal", "others are right")
        return (f"{in_words(names, found.names)} were not updated{on_ranks(still, found.world)}"
                f"{left}; the gradients and their norm are right")


def moved_by_a_factor(found):
    names = found.wrong("parameters")
    factors = [found.factor("movement", name) for name in names]
    if None in factors or any(not found.close(x, factors[0]) for x in factors):
        return None
    ratio = factors[0]
    return (f"{in_words(names, found.names)} moved {times(ratio)} as far as on one GPU, and the "
            f"gradients and their norm are right{named_factor(found, ratio)}")


def states_are_stale(found):
    names = found.wrong("parameters")
    if found.matched:
        return (f"{in_words(names, found.names)} were updated wrongly, although their gradients "
                f"are right, and in the {count(found.matched, 'step')} before they matched: look "
                "at what the optimizer keeps from step to step")


def updated_somehow(found):
    names = found.wrong("parameters")
    return (f"{in_words(names, found.names)} were updated wrongly, although the gradients and "
            "their norm are right: look at what comes after the norm")


# ------------------------------------------------------------------------------- findings: the loss

def loss_is_judged(found):
    return any(found.is_off("loss", loss, found.loss_there) for loss in found.loss)


def beside_the_loss(found):
    return "" if found.wrong("gradients") or found.tolerance["gradients"] is None else (
        "; the gradients are right, so only what is logged is wrong")


def losses_are(found, values):
    allowed = found.tolerance["loss"]
    return all(abs(loss - value) <= allowed * abs(value)
               for loss, value in zip(found.loss, values, strict=True))


def loss_not_summed(found):
    total = sum(found.loss)
    if found.world > 1 and abs(total - found.loss_there) <= found.tolerance["loss"] * total:
        return ("the losses of the ranks add up to one GPU's: each logs its own part"
                f"{beside_the_loss(found)}")


def loss_by_a_factor(found):
    ratio = found.loss[0] / found.loss_there
    if losses_are(found, [ratio * found.loss_there] * found.world):
        name = named_factor(found, ratio)
        if name:
            return f"the loss is {times(ratio)} one GPU's{name}{beside_the_loss(found)}"


def loss_of_something_else(found):
    for words, loss in found.losses.items():
        if losses_are(found, [loss] * found.world):
            return f"the loss is that of {words.removeprefix('those of ')}{beside_the_loss(found)}"


def loss_off_somehow(found):
    if not found.wrong("gradients"):
        ratio = max(found.loss, key=lambda loss: abs(loss - found.loss_there)) / found.loss_there
        return f"the loss is {times(ratio)} one GPU's{beside_the_loss(found)}"


# ------------------------------------------------------------------------------- what is to be said

FINDINGS = [    # when they are asked, and in which order
    (lambda found: found.wrong("gradients"), [
        alike, by_several_factors, from_some_place_on, ranks_disagree, off_somehow]),
    (norm_is_judged, [
        norm_of_own_parts, norm_with_copies, norm_of_some, norm_before_the_root,
        norm_after_clipping, norm_of_norms, norm_by_a_factor, norm_off_somehow]),
    (parameters_are_judged, [
        ranks_hold_others, not_updated, moved_by_a_factor, states_are_stale, updated_somehow]),
    (loss_is_judged, [
        loss_by_a_factor, loss_not_summed, loss_of_something_else, loss_off_somehow])]


def diagnose(found):
    """The sentences that the evidence of a step allows."""
    said = []
    for is_asked, findings in FINDINGS:
        if is_asked(found):
            sentences = (finding(found) for finding in findings)
            said += [next(filter(None, sentences), None)]
    return [sentence for sentence in said if sentence]


def of_run(run):
    """What is known of why a run does not match, on rank 0 in the end."""
    said = (run.verifier.diagnosis if run.verifier else None) or []
    failed = [check for check in run.checks if check["ok"] is False]
    return [*said, *(of_formulas(failed, numbers_of_formulas(run)) if failed else [])]


def numbers_of_formulas(run):
    args = run.args
    return {"the number of ranks": run.world,
            "the number of micro-batches": args.batch // args.shares // args.micro_batch,
            "the number of blocks": args.model.layers,
            "the bytes of a number": run.dtype.itemsize,
            "N/(N-1), of a ring of N ranks": run.world / max(run.world - 1, 1),
            "the number of query heads that share a kv head":
                args.model.heads // args.model.kv_heads}


def of_formulas(checks, numbers):
    """Sentences about measurements that are not as their formula says. checks: as in the JSON."""
    said = {}
    for check in checks:
        measured, formula = check["measured"], check["expected"]
        if check["ok"] is False and measured and formula:
            ratio = formula / measured
            name = factor(ratio, numbers)
            if name:
                said.setdefault(f"the formula is {times(ratio)} what was measured: {name}",
                                []).append(check["name"])
    return [f"{listed(names)}: {sentence}" for sentence, names in said.items()]
