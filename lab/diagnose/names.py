"""What the numbers and the parameters of a run are called in a diagnosis."""

import math

from lab.run.words import joined

# Up to which share of its size a tensor may be off and still be called a multiple of another, and
# up to which share of it a number may be off and still be called by another's name.
ROUNDING = {"float64": (1e-9, 1e-8), "float32": (1e-3, 1e-3), "float16": (0.05, 0.02),
            "bfloat16": (0.3, 0.05), "int8": (0.3, 0.05), "fp8": (0.3, 0.05),
            "float32 and fp8": (0.05, 0.02)}
CLOSE = 1e-6            # a ratio this near to a number is called by its name
SIMPLE = 16             # numbers up to here, and their fractions, are the number of many things


def first_that_holds(findings, *arguments):
    """The words of the first finding that holds, or None."""
    return next(filter(None, (finding(*arguments) for finding in findings)), None)


# ------------------------------------------------------------------------------------------ numbers

FORMS = [               # the power of a number that a ratio may be, and how to say so
    (1, "{n} is {names}"),
    (0.5, "{form} is the square root of {n}, which is {names}"),
    (2, "{form} is the square of {n}, which is {names}"),
]


def factor(ratio, numbers, within=CLOSE):
    """Describe a ratio by {name: number}: one of them, its root or square, or one over any of
    these; None if it is none of them.

        factor(0.25, {"the number of ranks": 4})      "4 is the number of ranks"
    """
    size, sentence = abs(ratio), None
    for power, words in FORMS:
        names = [name for name, n in numbers.items()
                 if abs(n - 1) > 2 * within and is_either(size, n**power, within)]
        if names:
            n = numbers[names[0]]
            sentence = words.format(form=plain(n**power), n=plain(n), names=" and ".join(names))
            break
    if ratio >= 0:
        return sentence
    opposite = "the sign is the opposite one"
    if abs(size - 1) <= within:
        return opposite
    return sentence and f"{sentence}, and {opposite}"


def is_either(size, number, within):
    """Whether a size is this number, or one over it."""
    return any(abs(size - value) <= within * value for value in (number, 1 / number))


def is_telling(ratio, within=CLOSE):
    """Whether a ratio has digits that no other number would have by chance: 1.5732 or 4,096, and
    not 3 or 3/4."""
    simple = {top / bottom for top in range(SIMPLE + 1) for bottom in range(1, SIMPLE + 1)}
    return math.isfinite(ratio) and not any(
        math.isclose(abs(ratio), number, rel_tol=within) for number in simple)


def plain(number):
    """4 for 4.0, and 1.43 for 1.4285."""
    return f"{round(number):,}" if abs(number - round(number)) < 1e-6 * number else f"{number:.3g}"


def times(ratio):
    """A ratio, as it reads before "those of one GPU"."""
    if 0 < ratio < 0.6 and abs(1 / ratio - round(1 / ratio)) < 1e-3:
        return f"1/{round(1 / ratio):,} of"
    if abs(ratio - 1) < 0.005:
        return f"(1 {ratio - 1:+.1e}) times"
    if abs(ratio) >= 100:
        return f"{ratio:,.0f} times"
    return f"{ratio:.2f} times" if abs(ratio) >= 0.1 else f"{ratio:.2g} times"


def numbers_of(args, world):
    """{name: number} of what a factor may be in this run."""
    micro_batches = args.batch // args.shares // args.micro_batch
    numbers = ranks_of(args, world) | {"the number of micro-batches": micro_batches}
    if args.shares > 1 and micro_batches > 1:
        numbers["the number of micro-batches of all ranks"] = args.shares * micro_batches
    if getattr(args, "precision", None) == "fp16":
        numbers["the loss scale"] = args.loss_scale
    return numbers


def numbers_of_tokens(args, valid):
    """{name: number} of the batch: so many that a rounded factor is near one of them by chance."""
    tokens = args.batch * args.model.seq
    numbers = {"the number of tokens in the batch": tokens,
               "the number of valid targets in the batch": valid}
    if valid < tokens:
        numbers["all targets over the valid ones"] = tokens / valid
    return numbers


def ranks_of(args, world):
    """{name: number} of the ranks, and of those along an axis."""
    numbers = {"the number of ranks": world}
    if 1 < args.shares < world:
        numbers["the number of data-parallel ranks"] = args.shares
    for axis in ("pp", "cp", "tp", "ep", "shard_size"):
        size = getattr(args, axis, None) or 1
        if 1 < size < world:
            numbers[f"--{axis.replace('_', '-')}"] = size
    return numbers


# --------------------------------------------------------------------------------------- parameters

ROLES = {               # what a global name contains: what it is called
    "embedding.": "the embedding", "attn.q.": "q", "attn.k.": "k", "attn.v.": "v", "attn.o.": "o",
    "norm": "the LayerNorms", "router": "the router", "mlp.shared": "the shared expert",
    "mlp.up.": "up", "mlp.gate.": "gate", "mlp.down.": "down", "mlp.": "the experts",
    "head.out": "the head"}


def role(name):
    """The part that a parameter plays in its module."""
    return next((called for part, called in ROLES.items() if part in name), name)


def module_of(name):
    return name.split(".")[0]


def short(name):
    """Without the last word, which both parameters of a LayerNorm differ in."""
    return name.removesuffix(".weight").removesuffix(".bias")


def distinct(words):
    return list(dict.fromkeys(words))


def describe_parameters(names, every):
    """What these of all parameters are: "q and k", "block1.norm1", "all but the head"."""
    names = [name for name in every if name in names]       # in the order of forward
    if len(names) == len(every):
        return "all parameters"
    is_tied = not any("head.out" in name for name in every)
    roles = {name: role(name) for name in every}
    if is_tied:
        roles = {name: called.replace("the embedding", "the tied table")
                 for name, called in roles.items()}
    own_roles = distinct(roles[name] for name in names)
    own_modules = distinct(map(module_of, names))
    own_places = distinct(map(short, names))
    if are_all(names, every, roles.get, own_roles):
        left = distinct(called for called in roles.values() if called not in own_roles)
        return f"all but {joined(left)}" if len(left) < len(own_roles) / 2 else joined(own_roles)
    if names == every[:len(names)]:
        return f"all up to {own_places[-1]}"
    if are_all(names, every, module_of, own_modules):
        return joined(own_modules)
    is_whole = are_all(names, every, short, own_places)
    if is_whole and len(own_places) < 3:
        return joined(own_places)
    in_modules = [name for name in every if module_of(name) in own_modules]
    if are_all(names, in_modules, roles.get, own_roles):
        return f"{joined(own_roles)} of {joined(own_modules)}"
    shown = own_places if is_whole else names
    return joined(shown if len(shown) < 5 else [*shown[:3], f"{len(shown) - 3} others"])


def are_all(names, every, group_of, groups):
    """Whether the names are all parameters in these groups."""
    return len(names) == sum(group_of(name) in groups for name in every)
