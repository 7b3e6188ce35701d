"""What a function of a student gives, beside what the solution's gives: equal, or how it is wrong.

Tensors say most. One that is twice what it should be, right but for its last rows, zero in one
head, transposed, or a multiple of the right one in every row has been computed by another mistake
each time. A sentence says what was seen, and no more.
"""

import math
import numbers
import re
from collections import OrderedDict
from fractions import Fraction

import torch

from lab.classroom.words import names_of
from lab.diagnose import names

# How far two right ways to compute the same are apart, relative to the largest number.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MOSTLY = 0.8            # so much of some rows and columns must be wrong, to be called wrong
MOST = 3                # findings that are named of a tuple, list or dict
VERBS = {"it": "they", "is": "are", "has": "have", "differs": "differ"}     # of one, and of several


def compare(value, right):
    """A sentence on how a value differs from what is right; None: they are equal.

    Of what lab/classroom/values.py reads: numbers, tensors, strings, None, dtypes, and tuples,
    lists, dicts and records of such. Lists, tuples and records are not told apart, nor are 6 and
    6.0.
    """
    findings = list(differences("", value, right))
    if not findings:
        return None
    sentences = [f"{path or 'the result'} {finding}" for path, finding in grouped(findings)]
    if len(sentences) > MOST:
        sentences[MOST:] = [f"and so on, {len(findings)} in all"]
    elif findings[0][0] and len(findings) < sum(1 for _ in leaves(right)):
        sentences.append("all else is right")
    return "; ".join(sentences)


def compare_ranks(values, right):
    """The same of the values on all ranks: the first difference, and on which ranks it is."""
    ranks = {}                                          # {a difference: where it is}
    for rank, (value, expected) in enumerate(zip(values, right, strict=True)):
        finding = compare(value, expected)
        if finding:
            ranks.setdefault(finding, []).append(rank)
    for finding, those in ranks.items():                # the first is enough
        where = f"on {names_of(those)}, " if len(those) < len(values) else ""
        return f"{where}{finding}"
    return None


def grouped(findings):
    """[("dk and dv", "are zero")]: a finding that several share is named once."""
    paths, groups = {}, []
    for path, finding in findings:
        paths.setdefault(finding, []).append(path)
    for finding, (*some, last) in paths.items():
        if some:
            finding = in_plural(finding)
        groups.append((f"{', '.join(some)} and {last}" if some else last, finding))
    return groups


def in_plural(finding):
    """`are zero` of `is zero`."""
    def plural(match):
        return " ".join(VERBS[word] for word in match[0].split())

    return re.sub("^(is|has|differs)|\\bit( is| has| differs|(?= should be))", plural, finding)


# --------------------------------------------------------------------------- all the way down

def differences(path, value, right):
    """(path, what differs there), all the way down."""
    parts, others = parts_of(right), parts_of(value)
    if isinstance(value, torch.Tensor) != isinstance(right, torch.Tensor):
        yield path, f"is {called(value)}, and should be {called(right)}"
    elif parts is None or others is None or is_mapping(value) != is_mapping(right):
        finding = difference(value, right)
        if finding:
            yield path, finding
    elif is_mapping(right):
        missing, surplus = parts.keys() - others.keys(), others.keys() - parts.keys()
        if missing:
            yield path, f"lacks {' and '.join(sorted(map(str, missing)))}"
        if surplus:
            yield path, f"should not have {' and '.join(sorted(map(str, surplus)))}"
        for key in [key for key in parts if key in others]:
            yield from differences(below(path, key), others[key], parts[key])
    elif len(parts) != len(others):
        yield path, f"has {len(others)} items, and should have {len(parts)}"
    else:                                               # in order, be they named or not
        for (key, part), other in zip(parts.items(), others.values()):
            yield from differences(below(path, key), other, part)


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


def leaves(value):
    """What has no parts."""
    parts = parts_of(value)
    if parts is None:
        yield value
    else:
        for part in parts.values():
            yield from leaves(part)


def difference(value, right, rounding=ROUNDING[torch.float64]):
    """How a value without parts differs; None: it does not."""
    if isinstance(right, torch.Tensor):
        return difference_of_tensors(value, right)
    if is_number(value) and is_number(right):
        return difference_of_numbers(value, right, rounding)
    if type(value) is type(right) and value == right:
        return None
    return f"is {called(value)}, and should be {called(right)}"


def called(value):
    """A value in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    parts = parts_of(value)
    if parts is not None:
        kind = "record" if isinstance(value, OrderedDict) else type(value).__name__
        return f"a {kind} of {len(parts)}"
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
    if not (math.isfinite(value) and math.isfinite(right)) or 0 in (value, right):
        return words
    if value == -right:
        return f"{words}: the sign is the opposite one"
    if is_exact and abs(value - right) == 1:
        return f"{words}: one too {'many' if value > right else 'few'}"
    fraction = simple(value / right)
    return f"{words}: it is {fraction} what it should be" if fraction else words


def plain(number):
    """A number as one can compare it with another: no digits that do not matter."""
    if isinstance(number, int) or number == round(number, 0) and abs(number) < 1e15:
        return f"{number:,.0f}"
    return f"{number:.8g}"


def simple(ratio):
    """"3/4 of", "8 times" and the like; None if a ratio is not that simple."""
    fraction = Fraction(ratio).limit_denominator(64)
    top, bottom = abs(fraction.numerator), fraction.denominator
    is_close = math.isclose(ratio, fraction, rel_tol=1e-9)
    if not is_close or min(top, bottom) > 1 and max(top, bottom) > 16:
        return None
    return f"{fraction.numerator} times" if bottom == 1 else f"{fraction} of"


# ------------------------------------------------------------------------------------------ tensors

def difference_of_tensors(value, right):
    """How a tensor differs: in all of it, or in which rows and columns; None: it does not."""
    rounding = ROUNDING.get(right.dtype, 0)                 # integers and masks are exact
    if value.shape != right.shape:
        words = f"has shape {tuple(value.shape)}, and should have {tuple(right.shape)}"
        swapped = swapped_dimensions(value, right, rounding)
        return f"{words}: it is {swapped}" if swapped else words
    if value.dtype != right.dtype:
        return f"is in {value.dtype}, and should be in {right.dtype}"
    if right.ndim == 0:
        return difference(value.item(), right.item(), rounding)
    wrong = ~same(value.double(), right.double(), rounding)
    if not wrong.any():
        return None
    if not rounding and right.numel() <= 16:
        return f"is {value.tolist()}, and should be {right.tolist()}"
    value, right = value.detach().double(), right.detach().double()

    factor = one_factor(value, right, rounding)
    if factor:
        return factor
    swapped = swapped_dimensions(value, right, rounding)
    if swapped:
        return f"is {swapped}"

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
    if nan.any():
        return "is nan" if nan.all() else f"is nan in {share(nan)}"
    if infinite.any():
        return "is infinite" if infinite.all() else f"is infinite in {share(infinite)}"
    usual = right.isfinite()
    value, right = (torch.where(usual, x.nan_to_num(), 0) for x in (value, right))
    if not value.any():
        return "is zero"
    if not right.any():
        return "should be zero"
    if not rounding:
        return "differs"
    off = (value - right).abs().max() / right.abs().max()
    return (one_factor(value, right, rounding) or one_for_each_line(value, right, rounding)
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


def one_for_each_line(value, right, rounding):
    """Whether one number is added to all, or each row or column has a number that is added or
    multiplied. A row goes along the last dimension."""
    offset = (value - right).mean()
    if fits(right + offset, value, right, rounding):
        return f"has {offset:.4g} added to every number"
    if right.ndim == 1:
        return None
    value, right = value.flatten(0, -2), right.flatten(0, -2)
    for dim, line in ((1, "row"), (0, "column")):
        if right.shape[dim] > 1:
            ratios = (value * right).sum(dim, True) / right.square().sum(dim, True)
            if fits(ratios * right, value, right, rounding):
                return (f"has every {line} multiplied by a number of its own, "
                        f"{ratios.min():.3g} to {ratios.max():.3g}")
            if fits(right + (value - right).mean(dim, True), value, right, rounding):
                return f"has a number of its own added to every {line}"
    return None


def swapped_dimensions(value, right, rounding):
    """Which two dimensions one has to swap to be right; None: there are none."""
    if value.ndim != right.ndim:
        return None
    for first in range(right.ndim):
        for second in range(first + 1, right.ndim):
            other = value.transpose(first, second)
            if other.shape == right.shape and same(other, right, rounding).all():
                return f"right but for dimensions {first} and {second}, which are swapped"
    return None


def share(mask):
    """How many of a mask are true, in words."""
    count = int(mask.sum())
    return "all numbers" if count == mask.numel() else f"{count:,} of {mask.numel():,} numbers"
