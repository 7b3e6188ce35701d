"""What numbers and parameters are called in a diagnosis."""

import math

from lab.diagnose.evidence import ROUNDING

CLOSE = 1e-6            # so near a ratio is to the number that it is called by
SIMPLE = 16             # numbers up to here, and their fractions, are those of many things


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


def is_telling(ratio, within=CLOSE):
    """Whether a ratio has digits that no other number would have by chance: 1.5732 or 4,096, and
    not 3 or 3/4. What is called by its name then agrees with it in all of them."""
    return math.isfinite(ratio) and not any(
        math.isclose(abs(ratio), top / bottom, rel_tol=within)
        for top in range(SIMPLE + 1) for bottom in range(1, SIMPLE + 1))


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
    args, cfg, numbers = found.args, found.args.model, ranks_of(found)
    m = args.batch // args.shares // args.micro_batch
    numbers["the number of micro-batches"] = m
    if 1 < args.shares and 1 < m:
        numbers["the number of micro-batches of all ranks"] = args.shares * m
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


def ranks_of(found):
    """{name: number} of the ranks, and of those along an axis."""
    args, world = found.args, found.world
    numbers = {"the number of ranks": world}
    if 1 < args.shares < world:
        numbers["the number of data-parallel ranks"] = args.shares
    for axis in ("pp", "cp", "tp", "ep", "shard_size"):
        size = getattr(args, axis, None) or 1
        if 1 < size < world:
            numbers[f"--{axis.replace('_', '-')}"] = size
    return numbers | shared_kv_heads(found)


def shared_kv_heads(found):
    heads, ranks = found.args.model.kv_heads, getattr(found.args, "tp", found.world)
    cuts_heads = found.args.shares == 1 and ranks > heads
    return {"the number of ranks that share a kv head": ranks // heads} if cuts_heads else {}


def known_factor(found, ratio):
    """What a ratio is in terms of this run's numbers; None: it is none of them."""
    return factor(ratio, numbers_of(found), ROUNDING[found.rounding][1])


def named_factor(found, ratio, signs=()):
    """": 4,096 is the loss scale", or nothing. Any small number is the number of something. So it
    takes a second sign to name it: digits that agree, or what else speaks for some of these numbers
    already: signs, {name: number}."""
    within = ROUNDING[found.rounding][1]
    name = known_factor(found, ratio) if is_telling(ratio, within) else (
        factor(ratio, dict(signs), within))
    return f": {name}" if name else ""


# ----------------------------------------------------------------------- parameters and their names

ROLES = {               # what a global name contains: what it is called
    "embedding.": "the embedding", "norm": "the LayerNorms", "attn.q.": "q", "attn.k.": "k",
    "attn.v.": "v", "attn.o.": "o", "router": "the router", "mlp.shared": "the shared expert",
    "mlp.up.": "up", "mlp.gate.": "gate", "mlp.down.": "down", "mlp.up": "the experts' up",
    "mlp.gate": "the experts' gate", "mlp.down": "the experts' down", "head.out": "the head"}


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
