"""What kind of wrong it is: sentences about a run that does not match, from what is known of it.

A run that trains wrongly looks well: its loss falls. Beside one GPU's numbers, how it is wrong says
what is wrong. Gradients of four ranks that are 4.00 times too large were summed twice; those that
add up to the right ones were not summed at all; a norm that leaves out the LayerNorms, or counts
them on every rank, is off by their squares and nothing else.

Below is a function for each finding. It looks at the Evidence (evidence.py) of the first step
that does not match, and returns words if it holds, else None. Lists have them in the order in which
they are asked, the more specific ones first; the first that holds is said. None says more than was
compared: a cause is given where the numbers leave no other.
"""

import math

from lab.bench.about import AS_COMPUTED, about
from lab.bench.evidence import ROUNDING, share_left
from lab.cli.words import count

CLOSE = 1e-6            # so near a ratio is to the number that it is called by
FEW = 0.05              # more stale weights than this share do not come from rounding


# -------------------------------------------------------------------------- numbers and their names

def factor(ratio, numbers, within=CLOSE):
    """What a ratio is, in terms of these {name: number}: one of them, its square root or square, or
    one over any of these; None if it is none of them.

        factor(0.25, {"the number of ranks": 4})      "4 is the number of ranks"
    """
    size, opposite = abs(ratio), "the sign is the opposite one"
    numbers = {name: number for name, number in numbers.items() if abs(number - 1) > 2 * within}

    def says(words, form):
        """The sentence, if one of these numbers has this form, and it or one over it is the ratio.
        """
        names = [name for name, number in numbers.items()
                 if any(abs(size - value) <= within * value
                        for value in (form(number), 1 / form(number)))]
        if names:
            n = numbers[names[0]]
            return words.format(form=plain(form(n)), n=plain(n), names=" and ".join(names))

    found = (says("{n} is {names}", lambda n: n)
             or says("{form} is the square root of {n}, which is {names}", lambda n: n**0.5)
             or says("{form} is the square of {n}, which is {names}", lambda n: n**2))
    if ratio < 0:
        return opposite if abs(size - 1) <= within else found and f"{found}, and {opposite}"
    return found


def plain(number):
    """4 for 4.0, and 1.43 for 1.4285."""
    return f"{round(number):,}" if abs(number - round(number)) < 1e-6 * number else f"{number:.3g}"


def times(ratio):
    """A ratio, as it is said before "those of one GPU"."""
    if 0 < ratio < 0.6 and abs(1 / ratio - round(1 / ratio)) < 1e-3:
        return f"1/{round(1 / ratio):,} of"
    if abs(ratio - 1) < 0.005:
        return f"(1 {ratio - 1:+.1e}) times"
    digits = ",.0f" if abs(ratio) >= 100 else ".2f" if abs(ratio) >= 0.1 else ".2g"
    return f"{ratio:{digits}} times"


def numbers_of(found):
    """{name: number} of what a factor may be in this run."""
    args, world, cfg = found.args, found.world, found.args.model
    m = args.batch // args.shares // args.micro_batch
    numbers = {"the number of ranks": world, "the number of micro-batches": m}
    if 1 < args.shares < world:
        numbers["the number of data-parallel ranks"] = args.shares
    if 1 < args.shares and 1 < m:
        numbers["the number of micro-batches of all ranks"] = args.shares * m
    for axis in ("pp", "cp", "tp", "ep", "shard_size"):
        size = getattr(args, axis, None) or 1
        if 1 < size < world:
            numbers[f"--{axis.replace('_', '-')}"] = size
    numbers |= shared_kv_heads(found)
    if getattr(args, "precision", None) == "fp16":
        numbers["the loss scale"] = args.loss_scale
    if not found.is_lossy:                              # else too many numbers are near to others
        tokens = args.batch * cfg.seq
        numbers |= {"head_dim": cfg.dim // cfg.heads, "the number of tokens in the batch": tokens,
                    "the number of valid targets in the batch": found.valid}
        if found.valid < tokens:
            numbers["all targets over the valid ones"] = tokens / found.valid
        for rank, valid in enumerate(found.by_share):
            if 0 < valid < found.valid:
                numbers[f"the valid targets over those of data-parallel rank {rank}"] = (
                    found.valid / valid)
    return numbers


def shared_kv_heads(found):
    heads, ranks = found.args.model.kv_heads, getattr(found.args, "tp", found.world)
    cuts_heads = found.args.shares == 1 and ranks > heads
    return {"the number of ranks that share a kv head": ranks // heads} if cuts_heads else {}


def named_factor(found, ratio):
    """": 4 is the number of ranks", or nothing."""
    name = factor(ratio, numbers_of(found), ROUNDING[found.rounding][1])
    return f": {name}" if name else ""


# ----------------------------------------------------------------------- parameters and their names

ROLES = {               # what a global name contains: what it is called
    "embedding.": "the embedding", "norm": "the LayerNorms", "attn.q.": "q", "attn.k.": "k",
    "attn.v.": "v", "attn.o.": "o", "router": "the router", "mlp.shared": "the shared expert",
    "mlp.up.": "up", "mlp.down.": "down", "mlp.up": "the experts' up",
    "mlp.down": "the experts' down", "head.out": "the head"}


def role(name):
    found = next((called for words, called in ROLES.items() if words in name), name)
    if found == "the LayerNorms":
        return f"{found}' {'biases' if name.endswith('bias') else 'weights'}"
    return found


def in_words(names, every):
    """What these of all parameters are: "q and k", "block1.norm1", "all but the head"."""
    names = [name for name in every if name in names]       # in the order of forward
    if len(names) == len(every):
        return "all parameters"
    distinct = lambda words: list(dict.fromkeys(words))
    module, tied = lambda name: name.split(".")[0], not any("head.out" in name for name in every)
    called = lambda name: "the tied table" if tied and "embedding." in name else role(name)
    roles, modules = distinct(map(called, names)), distinct(map(module, names))
    if len(names) == sum(called(name) in roles for name in every):
        left = distinct(called(name) for name in every if called(name) not in roles)
        return f"all but {listed(left)}" if len(left) < len(roles) / 2 else listed(roles)
    if len(names) == sum(module(name) in modules for name in every):
        order = distinct(map(module, every))
        is_first = len(modules) > 1 and order[:len(modules)] == modules
        return f"all before {order[len(modules)]}" if is_first else listed(modules)
    if names == every[:len(names)]:
        return f"all up to {short(names[-1])}"
    places = distinct(map(short, names))
    is_whole = len(names) == sum(short(name) in places for name in every)
    if is_whole and len(places) < 3:
        return listed(places)
    if len(names) == sum(called(name) in roles and module(name) in modules for name in every):
        return f"{listed(roles)} of {listed(modules)}"
    shown = places if is_whole else names
    return listed(shown if len(shown) < 5 else [*shown[:3], f"{len(shown) - 3} others"])


def short(name):
    """Of a parameter, or of both of a LayerNorm."""
    return name.removesuffix(".weight").removesuffix(".bias")


TOGETHER = [("the LayerNorms' weights", "the LayerNorms' biases", "the LayerNorms"),
            ("the experts' up", "the experts' down", "the experts")]


def listed(words):
    """"a, b and c"; two words that one has together become that."""
    words = list(words)
    for one, other, both in TOGETHER:
        if one in words and other in words:
            words[words.index(one)] = both
            words.remove(other)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def gradients_of(found, names):
    words = in_words(names, found.names)
    if words == "all parameters":
        return "all gradients"
    but = words.removeprefix("all but ")
    return f"gradients of {words}" if but == words else f"all gradients but those of {but}"


def others(found, names, are="equal"):
    return "" if len(names) == len(found.names) else f", all others {are}"


def on_ranks(ranks, world):
    ranks = sorted(ranks)
    if len(ranks) == world:
        return ""
    if len(ranks) == world - 1 > 1:
        [other] = set(range(world)) - set(ranks)
        return f" on all ranks but {other}"
    return f" on rank {ranks[0]}" if len(ranks) == 1 else f" on ranks {listed(map(str, ranks))}"


# ---------------------------------------------------------------- findings: what some gradients are

# Each says of some gradients, which are wrong, what they are, if that is the same of all of them.

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
    why = named_factor(found, ratio)
    if found.is_lossy and not why:
        return None
    if found.close(ratio, -1):
        return "have the opposite sign of those of one GPU"
    ranks = [found.world, *shared_kv_heads(found).values()]
    if found.args.shares == 1 and not is_all and any(found.close(ratio, n) for n in ranks):
        why += ", as if a sum were taken of what was already summed"
    loss_too = is_all and all(found.close(loss / found.loss_there, ratio) for loss in found.loss)
    return f"{'and the loss ' if loss_too else ''}are {times(ratio)} those of one GPU{why}"


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
        return f"{subject} {times(ratio)} those of {words}{named_factor(found, ratio)}"


def not_set_to_zero(found, names):
    """What they are more than one GPU's are those of the step before: once, or where they are
    summed over ranks once more in each step, as often as there are ranks."""
    fits = [fit for name in names for fit in found.more.get("the step before", {}).get(
        name, {}).values() if fit]
    if fits and all(found.alike(fit) and fit.ratio > 0.5 for fit in fits):
        ratio = found.all_alike(fits)
        how = "some times" if ratio is None else "" if found.close(ratio, 1) else times(ratio)
        name = named_factor(found, ratio) if ratio else ""
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


# ------------------------------------------------------------------------------- findings: the norm

# Each takes the gradients for right, and looks how they were counted: by one GPU's squares.

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
    name = named_factor(found, ratio)
    if name and norms_are(found, [ratio * found.norm_there] * found.world):
        return f"the gradient norm is {times(ratio)} that of one GPU{name}"


def norm_off_somehow(found):
    worst = max(found.norm, key=lambda norm: abs(norm - found.norm_there))
    return f"the gradient norm is {times(worst / found.norm_there)} that of one GPU"


HOW_THE_NORM_IS = [
    read_too_early, norm_of_own_parts, norm_with_copies, norm_of_some, norms_that_add_up,
    norm_without_root, norm_of_norms, norm_after_clipping]


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
    is_whole = found.close(ratios[0], round(ratios[0]))     # 2 is the root of 4, and means nothing
    name = named_factor(found, ratios[0])
    return (f"{in_words(names, found.names)} moved {times(ratios[0])} as far as on one GPU"
            f"{others(found, names, 'are right')}, although the gradients and their norm are right"
            f"{'' if is_whole and 'square' in name else name}")


def updated_somehow(found):
    names = found.wrong("parameters")
    before = (f"; before, {count(found.matched, 'step')} matched: look at what the optimizer keeps "
              "from step to step" if found.matched else "; look at the update")
    return (f"{in_words(names, found.names)} moved otherwise than on one GPU"
            f"{others(found, names, 'are right')}, although the gradients and their norm are right"
            f"{before}")


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
    name = named_factor(found, ratio)
    if name and losses_are(found, [ratio * found.loss_there] * found.world):
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
    """Sentences about measurements whose ratio to their formula has a name."""
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
            said.setdefault(f"the formula is {times(ratio)} what was measured: {named}",
                            []).append(one)
    return [f"{listed(amounts(these))}: {sentence}" for sentence, these in said.items()]


def amounts(these):
    """What is checked of each operator, together: "all_reduce (calls and payload)"."""
    found = {}
    for one in these:
        found.setdefault(one._replace(amount="").name, []).extend(filter(None, [one.amount]))
    return [f"{what} ({listed(of_it)})" if of_it else what for what, of_it in found.items()]
