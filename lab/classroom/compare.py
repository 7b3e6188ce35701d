"""How the value of a student's function differs from the solution's, in words.

A tensor that is twice what it should be, right but for its last rows, zero in one head, transposed,
or multiplied by another number in every row: each has another mistake behind it. A sentence says
what was seen, and no more.
"""

import itertools
import math
import numbers
from collections import OrderedDict
from fractions import Fraction

import torch

from lab.classroom.words import names_of
from lab.diagnose import names
from lab.run.words import joined

# How far two right ways to compute the same are apart, relative to the largest number.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MOSTLY = 0.8            # so much of some rows and columns must be wrong, to be called wrong
MOST = 3                # findings that are named of a tuple, list or dict


def compare(value, right):
    """A sentence on how a value differs from what is right; None: they are equal.

    Of what lab/classroom/values.py reads: numbers, tensors, strings, None, dtypes, and tuples,
    lists, dicts and records of such. Lists, tuples and records are not told apart, nor are 6 and
    6.0.
    """
    paths = {}                                          # {a difference: where it is}
    for path, difference in differences("", value, right):
        paths.setdefault(difference, []).append(path or "the result")
    sentences = []
    for difference, places in paths.items():
        verb = ": each" if len(places) > 1 else ""
        sentences.append(f"{joined(places)}{verb} {difference}")
    if len(sentences) > MOST:
        sentences[MOST:] = [f"and so on, {sum(map(len, paths.values()))} in all"]
    return "; ".join(sentences) or None


def compare_ranks(values, right):
    """The same of the values on all ranks: the first difference, and on which ranks it is."""
    ranks = {}                                          # {a difference: where it is}
    for rank, (value, expected) in enumerate(zip(values, right, strict=True)):
        ranks.setdefault(compare(value, expected), []).append(rank)
    ranks.pop(None, None)
    if not ranks:
        return None
    difference, those = next(iter(ranks.items()))
    return difference if len(those) == len(values) else f"on {names_of(those)}, {difference}"


# --------------------------------------------------------------------------- all the way down

def differences(path, value, right):
    """(path, what differs there), all the way down."""
    parts, expected = parts_of(value), parts_of(right)
    if parts is None or expected is None or is_mapping(value) != is_mapping(right):
        difference = difference_of_leaves(value, right)
        if difference:
            yield path, difference
    elif is_mapping(right):
        missing, surplus = expected.keys() - parts.keys(), parts.keys() - expected.keys()
        if missing:
            yield path, f"lacks {joined(sorted(map(str, missing)))}"
        if surplus:
            yield path, f"should not have {joined(sorted(map(str, surplus)))}"
        for key in [key for key in expected if key in parts]:
            yield from differences(below(path, key), parts[key], expected[key])
    elif len(parts) != len(expected):
        yield path, f"has {len(parts)} items, and should have {len(expected)}"
    else:                                               # in order, be they named or not
        for part, (key, other) in zip(parts.values(), expected.items()):
            yield from differences(below(path, key), part, other)


def is_mapping(value):
    """Whether it is a dict, whose keys have no order, and no record."""
    return isinstance(value, dict) and not isinstance(value, OrderedDict)


def below(path, key):
    """The path to an item: of a tuple "item 2", of a dict "all_reduce", of both "all_reduce[2]"."""
    if isinstance(key, int):
        return f"{path}[{key}]" if path else f"item {key}"
    return f"{path}.{key}" if path else f"{key}"


def parts_of(value):
    """{key: part} of a dict, record, tuple or list; None: it has none."""
    if isinstance(value, dict):
        return value
    return dict(enumerate(value)) if isinstance(value, tuple | list) else None


def difference_of_leaves(value, right):
    """How a value without parts differs; None: it does not."""
    if isinstance(value, torch.Tensor) and isinstance(right, torch.Tensor):
        return difference_of_tensors(value, right)
    if is_number(value) and is_number(right):
        return difference_of_numbers(value, right, ROUNDING[torch.float64])
    if type(value) is type(right) and value == right:
        return None
    return f"is {called(value)}, and should be {called(right)}"


def called(value):
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = parts_of(value)
    if parts is not None:
        return f"a {type(value).__name__} of {len(parts)}"
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:57]}..."


# ------------------------------------------------------------------------------------------ numbers

def is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def difference_of_numbers(value, right, rounding):
    """How a number differs, and by which simple factor; None: it does not."""
    is_exact = isinstance(value, int) and isinstance(right, int)
    is_close = not is_exact and math.isclose(value, right, rel_tol=rounding)
    if value == right or is_close or math.isnan(value) and math.isnan(right):
        return None
    words = f"is {plain(value)}, and should be {plain(right)}"
    is_near = is_exact and abs(value - right) == 1          # an item is missing: no factor
    if is_near or 0 in (value, right) or not math.isfinite(value) or not math.isfinite(right):
        return words
    fraction = simple(value / right)
    return f"{words}: it is {fraction} what it should be" if fraction else words


def plain(number):
    """A number as one can compare it with another: no digits that do not matter."""
    if isinstance(number, int) or number == round(number, 0) and abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:.8g}"


def simple(ratio):
    """"3/4 of", "8 times" and the like; None if a ratio is not that simple."""
    fraction = Fraction(ratio).limit_denominator(names.SIMPLE)
    if not math.isclose(ratio, fraction, rel_tol=1e-9):
        return None
    return f"{fraction} times" if fraction.denominator == 1 else f"{fraction} of"


# ------------------------------------------------------------------------------------------ tensors

def difference_of_tensors(value, right):
    """How a tensor differs: in all of it, or in which rows and columns; None: it does not."""
    rounding = ROUNDING.get(right.dtype, 0)                 # integers and masks are exact
    if value.shape != right.shape:
        return f"has shape {tuple(value.shape)}, and should have {tuple(right.shape)}"
    if value.dtype != right.dtype:
        return f"is in {value.dtype}, and should be in {right.dtype}"
    if right.ndim == 0:
        return difference_of_numbers(value.item(), right.item(), rounding)
    wrong = ~same(value.double(), right.double(), rounding)
    if not wrong.any():
        return None
    if not rounding and right.numel() <= 16:
        return f"is {value.tolist()}, and should be {right.tolist()}"
    value, right = value.detach().double(), right.detach().double()

    of_all = one_factor(value, right, rounding) or swapped_dimensions(value, right, rounding)
    if of_all:
        return of_all
    # Is it in some rows, columns, heads alone? Then say in which, and what is wrong there.
    indices = [wrong.movedim(dim, 0).flatten(1).any(1) if wrong.ndim > 1 else wrong
               for dim in range(wrong.ndim)]
    if selected(wrong, indices).double().mean() < MOSTLY:
        return f"{what_is_wrong(value[wrong], right[wrong], rounding)} in {share(wrong)}"
    words = what_is_wrong(selected(value, indices), selected(right, indices), rounding)
    if all(some.all() for some in indices):
        return words
    where = ", ".join(map(as_index, indices))
    while where.endswith(", :"):
        where = where.removesuffix(", :")
    return f"is wrong in [{where}] and right elsewhere: there it {words}"


def selected(x, indices):
    """The rows, columns and so on of a tensor in which these masks are true."""
    for dim, some in enumerate(indices):
        x = x.index_select(dim, some.nonzero()[:, 0])
    return x


def same(value, right, rounding):
    """Where numbers are equal, to rounding relative to the largest: a mask."""
    finite = right[right.isfinite()].abs()
    largest = finite.max() if finite.numel() else 0
    return ((value - right).abs() <= rounding * largest) | (value == right) \
        | (value.isnan() & right.isnan())


def as_index(some):
    """The true ones of a mask as one writes them in Python: ":", "3", "16:20", "::2", "[0, 3]"."""
    places = some.nonzero()[:, 0].tolist()
    first, last, size = places[0], places[-1], len(some)
    if len(places) == size:
        return ":"
    if len(places) == 1:
        return str(first)
    step = places[1] - first
    if places == list(range(first, last + 1, step)):
        stop = "" if last + step >= size else last + 1
        return f"{first or ''}:{stop}" + (f":{step}" if step > 1 else "")
    return str(places) if len(places) <= 6 else f"{len(places)} of {size}"


def what_is_wrong(value, right, rounding):
    """With numbers of which nearly all are wrong: the first that holds."""
    nan, infinite = value.isnan() & ~right.isnan(), value.isinf() & (value != right)
    for name, mask in (("nan", nan), ("infinite", infinite)):
        if mask.any():
            return f"is {name}" if mask.all() else f"is {name} in {share(mask)}"
    usual = right.isfinite()
    value, right = (torch.where(usual, x.nan_to_num(), 0) for x in (value, right))
    if not value.any():
        return "is zero"
    if not right.any():
        return "should be zero"
    if not rounding:
        return "differs"
    off = (value - right).abs().max() / right.abs().max()
    return (one_factor(value, right, rounding) or one_factor_for_each_row(value, right, rounding)
            or f"differs by up to {off:.2g} times the largest number")


def fits(guess, value, right, rounding):
    """Whether a guess explains the value: to rounding, and nearly all that is wrong."""
    rest, off = (value - guess).abs().max(), (value - right).abs().max()
    return bool(same(guess, value, rounding).all() and rest < 0.01 * off)


def one_factor(value, right, rounding):
    """Whether it is all multiplied by one number. That may be log2(e), or the length of a dimension
    or a root of it."""
    ratio = ((value * right).sum() / right.square().sum()).item()
    if ratio == 0 or not fits(ratio * right, value, right, rounding):
        return None
    if math.isclose(ratio, -1, rel_tol=rounding):
        return "has the opposite sign"
    known = {f"the length of dimension {dim}": size
             for dim, size in enumerate(right.shape) if size > 4}
    known = {"log2(e)": math.log2(math.e)} | known
    name = names.factor(ratio, known, within=max(rounding, names.CLOSE))
    digits = 8 if abs(ratio - 1) < 0.01 else 3
    words = f"is {ratio:.{digits}g} times what it should be"
    is_named = name and names.is_telling(ratio, rounding)       # any small number is some length
    return f"{words}: {name}" if is_named else words


def one_factor_for_each_row(value, right, rounding):
    """Whether each row, along the last dimension, is multiplied by a number of its own."""
    if right.ndim == 1 or right.shape[-1] == 1:
        return None
    ratios = (value * right).sum(-1, True) / right.square().sum(-1, True)
    if not fits(ratios * right, value, right, rounding):
        return None
    return (f"has every row multiplied by a number of its own, {ratios.min():.3g} to "
            f"{ratios.max():.3g}")


def swapped_dimensions(value, right, rounding):
    """Which two dimensions one has to swap to be right; None: there are none."""
    for first, second in itertools.combinations(range(right.ndim), 2):
        other = value.transpose(first, second)
        if other.shape == right.shape and same(other, right, rounding).all():
            return f"is right but for dimensions {first} and {second}, which are swapped"
    return None


def share(mask):
    """How many of a mask are true, in words."""
    return f"{int(mask.sum()):,} of {mask.numel():,} numbers"
