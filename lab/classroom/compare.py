"""What a function of a student gives, beside what the solution's gives: equal, or how it is wrong.

Tensors say most. One that is twice what it should be, right but for its last rows, zero in one
head, transposed, or a multiple of the right one in every row has been computed by another mistake
each time. A sentence says what was seen, and no more.
"""

import dataclasses
import math
import numbers
import re
from fractions import Fraction

import torch

from lab.classroom.words import named
from lab.diagnose import names

# How far two right ways to compute the same are apart, relative to the largest number.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MOSTLY = 0.8            # so much of some rows and columns must be wrong, to be called wrong
MOST = 3                # findings that are said of a tuple, list or dict


def compare(found, right, elsewhere=()):
    """A sentence on how `found` differs from what is right; None: they are equal. elsewhere: what
    is right on each of the other ranks, (what that rank is called, value).

    Of numbers, tensors, strings, None, slices and the like, and of tuples, lists, dicts and
    dataclasses of such. Lists and tuples are not told apart, nor are 6 and 6.0.
    """
    findings = list(differences("", found, right, elsewhere))
    if not findings:
        return None
    said = [f"{path or 'the result'} {finding}" for path, finding in grouped(findings)]
    if len(said) > MOST:
        said[MOST:] = [f"and so on, {len(findings)} in all"]
    elif findings[0][0] and len(findings) < sum(1 for _ in leaves(right)):
        said.append("all else is right")
    return "; ".join(said)


def compare_ranks(values, right):
    """The same of the values on all ranks: the first difference, and on which ranks it is."""
    ranks = {}                                          # {a difference: where it is}
    for rank, (value, should) in enumerate(zip(values, right, strict=True)):
        finding = compare(value, should, neighbours(right, rank))
        if finding:
            ranks.setdefault(finding, []).append(rank)
    for finding, those in ranks.items():                # the first is enough
        where = f"on {named(those)}, " if len(those) < len(values) else ""
        return f"{where}{finding}"
    return None


def grouped(findings):
    """[("dk and dv", "are zero")]: what is said of several is said once."""
    paths, said = {}, []
    for path, finding in findings:
        paths.setdefault(finding, []).append(path)
    for finding, (*some, last) in paths.items():
        if some:
            finding = re.sub("^(is|has|differs)|\\bit( is| has| differs|(?= should be))", in_plural,
                             finding)
        said.append((f"{', '.join(some)} and {last}" if some else last, finding))
    return said


def in_plural(words):
    verbs = {"it": "they", "is": "are", "has": "have", "differs": "differ"}
    return " ".join(verbs[word] for word in words[0].split())


def neighbours(values, rank):
    """What a rank's value is looked for in: those of the other ranks, called by where they are, so
    that it is one sentence if all ranks have that of the next one."""
    ranks = len(values)
    called = {1: "the next rank", ranks - 1: "the rank before it"} if ranks > 2 else {
        1: "the other rank"}
    return [(called.get((other - rank) % ranks, f"rank {other}"), value)
            for other, value in enumerate(values) if other != rank]


def differences(path, found, right, elsewhere=()):
    """(path, what differs there), all the way down."""
    parts, others = parts_of(right), parts_of(found)
    at = lambda key: [(name, there[key]) for name, value in elsewhere
                      for there in [parts_of(value)] if there and key in there]
    if isinstance(found, torch.Tensor) != isinstance(right, torch.Tensor):
        yield path, f"is {called(found)}, and should be {called(right)}"
    elif parts is None or others is None or isinstance(found, dict) != isinstance(right, dict):
        finding = difference(found, right)
        if finding:
            yield path, of_another_rank(found, right, elsewhere) or finding
    elif len(parts) != len(others) and not isinstance(right, dict):
        yield path, f"has {len(others)} items, and should have {len(parts)}"
    elif isinstance(right, dict):
        missing, surplus = parts.keys() - others.keys(), others.keys() - parts.keys()
        if missing:
            yield path, f"lacks {' and '.join(sorted(map(str, missing)))}"
        if surplus:
            yield path, f"should not have {' and '.join(sorted(map(str, surplus)))}"
        for key in [key for key in parts if key in others]:
            yield from differences(below(path, key), others[key], parts[key], at(key))
    else:                                               # in order, be they named or not
        for (key, part), other in zip(parts.items(), others.values()):
            yield from differences(below(path, key), other, part, at(key))


def below(path, key):
    """The path to an item: of a tuple "item 2", of a dict "all_reduce", of both "all_reduce[2]"."""
    if isinstance(key, int):
        return f"{path}[{key}]" if path else f"item {key}"
    return f"{path}.{key}" if path else f"{key}"


def parts_of(value):
    """{key: part} of a dict, tuple, list or dataclass; None: it has none."""
    if isinstance(value, dict):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "_fields"):
        return dict(zip(value._fields, value))
    return dict(enumerate(value)) if isinstance(value, tuple | list | range) else None


def leaves(value):
    parts = parts_of(value)
    if parts is None:
        yield value
    else:
        for part in parts.values():
            yield from leaves(part)


def of_another_rank(found, right, elsewhere):
    """Whether a tensor is what another rank should have. (A number could be so by chance.)"""
    if isinstance(right, torch.Tensor) and right.numel() > 1 and right.is_floating_point():
        those = [name for name, value in elsewhere if isinstance(value, torch.Tensor)
                 and difference(found, value) is None]
        return f"is what {those[0]} should have" if those else None


def difference(found, right, rounding=ROUNDING[torch.float64]):
    if isinstance(right, torch.Tensor):
        return of_tensors(found, right)
    if is_number(found) and is_number(right):
        return of_numbers(found, right, rounding)
    if type(found).__name__ == type(right).__name__ and found == right:
        return None
    return f"is {called(found)}, and should be {called(right)}"


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


def of_numbers(found, right, rounding):
    exact = isinstance(found, int) and isinstance(right, int)
    if found == right or math.isnan(found) and math.isnan(right) \
            or not exact and math.isclose(found, right, rel_tol=rounding):
        return None
    words = f"is {plain(found)}, and should be {plain(right)}"
    if not (math.isfinite(found) and math.isfinite(right)) or 0 in (found, right):
        return words
    if found == -right:
        return f"{words}: the sign is the opposite one"
    if exact and abs(found - right) == 1:
        return f"{words}: one too {'many' if found > right else 'few'}"
    fraction = simple(found / right)
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
    close = math.isclose(ratio, fraction, rel_tol=1e-9)
    if not close or min(top, bottom) > 1 and max(top, bottom) > 16:
        return None
    return f"{fraction.numerator} times" if bottom == 1 else f"{fraction} of"


# ------------------------------------------------------------------------------------------ tensors

def of_tensors(found, right):
    rounding = ROUNDING.get(right.dtype, 0)                 # integers and masks are exact
    if found.shape != right.shape:
        words = f"has shape {tuple(found.shape)}, and should have {tuple(right.shape)}"
        swapped = transposed(found, right, rounding)
        return f"{words}: it is {swapped}" if swapped else words
    if found.dtype != right.dtype:
        return f"is in {found.dtype}, and should be in {right.dtype}"
    if right.ndim == 0:
        return difference(found.item(), right.item(), rounding)
    wrong = ~same(found.double(), right.double(), rounding)
    if not wrong.any():
        return None
    if not rounding and right.numel() <= 16:
        return f"is {found.tolist()}, and should be {right.tolist()}"
    found, right = found.detach().double(), right.detach().double()

    all_of_it = by_a_factor(found, right, rounding) or in_another_order(found, right, rounding)
    if all_of_it:
        return all_of_it

    # Is it in some rows, columns, heads alone? Then say in which, and what is wrong there.
    indices = [wrong.movedim(dim, 0).flatten(1).any(1) if wrong.ndim > 1 else wrong
               for dim in range(wrong.ndim)]
    if selected(wrong, indices).double().mean() < MOSTLY:
        return f"{how(found[wrong], right[wrong], rounding)} in {share(wrong)}"
    words = how(selected(found, indices), selected(right, indices), rounding)
    if all(some.all() for some in indices):
        return words
    where = ", ".join(map(as_index, indices))
    while where.endswith(", :"):
        where = where.removesuffix(", :")
    return f"is wrong in [{where}] and right elsewhere: there it {words}"


def selected(x, indices):
    for dim, some in enumerate(indices):
        x = x.index_select(dim, some.nonzero()[:, 0])
    return x


def same(found, right, rounding):
    """Where numbers are equal, to rounding relative to the largest: a mask."""
    finite = right[right.isfinite()].abs()
    largest = finite.max() if finite.numel() else 0
    return ((found - right).abs() <= rounding * largest) | (found == right) \
        | (found.isnan() & right.isnan())


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


def how(found, right, rounding):
    """What is wrong with numbers of which nearly all are wrong: the first that holds."""
    nan, infinite = found.isnan() & ~right.isnan(), found.isinf() & (found != right)
    if nan.any():
        return "is nan" if nan.all() else f"is nan in {share(nan)}"
    if infinite.any():
        return "is infinite" if infinite.all() else f"is infinite in {share(infinite)}"
    usual = right.isfinite()
    found, right = (torch.where(usual, x.nan_to_num(), 0) for x in (found, right))
    if not found.any():
        return "is zero"
    if not right.any():
        return "should be zero"
    if not rounding:
        return "differs"

    return (by_a_factor(found, right, rounding) or by_lines(found, right, rounding)
            or f"differs by up to {(found - right).abs().max() / right.abs().max():.2g} times the "
               "largest number")


def fits(guess, found, right, rounding):
    """Whether a guess explains what was found: to rounding, and nearly all that is wrong."""
    rest, off = (found - guess).abs().max(), (found - right).abs().max()
    return bool(same(guess, found, rounding).all() and rest < 0.01 * off)


def by_a_factor(found, right, rounding):
    """Whether it is all multiplied by one number. That may be log2(e), or the length of a dimension
    or a root of it."""
    ratio = ((found * right).sum() / right.square().sum()).item()
    if ratio == 0 or not fits(ratio * right, found, right, rounding):
        return None
    if math.isclose(ratio, -1, rel_tol=rounding):
        return "has the opposite sign"
    digits = 8 if abs(ratio - 1) < 0.01 else 3
    name = names.factor(
        ratio, {"log2(e)": math.log2(math.e)} | {f"the length of dimension {dim}": size
                                               for dim, size in enumerate(right.shape) if size > 4},
        within=max(rounding, names.CLOSE))
    has_name = name and names.is_telling(ratio, rounding)       # any small number is some length
    return f"is {ratio:.{digits}g} times what it should be" + (f": {name}" if has_name else "")


def in_another_order(found, right, rounding):
    """Whether the right numbers stand in other places."""
    swapped = transposed(found, right, rounding)
    if swapped:
        return f"is {swapped}"
    for dim in range(right.ndim):
        for shift in range(1, min(right.shape[dim], 33)):
            if same(found, right.roll(shift, dim), rounding).all():
                return f"is shifted by {shift} along dimension {dim}"
        if same(found, right.flip(dim), rounding).all():
            return f"is in reverse along dimension {dim}"
    return None


def by_lines(found, right, rounding):
    """Whether one number is added to all, or one to each row or column, or multiplied with it. A
    row goes along the last dimension."""
    offset = (found - right).mean()
    if fits(right + offset, found, right, rounding):
        return f"has {offset:.4g} added to every number"
    if right.ndim == 1:
        return None
    found, right = found.flatten(0, -2), right.flatten(0, -2)
    for dim, line in ((1, "row"), (0, "column")):
        if right.shape[dim] > 1:
            ratios = (found * right).sum(dim, True) / right.square().sum(dim, True)
            if fits(ratios * right, found, right, rounding):
                return (f"has every {line} multiplied by a number of its own, "
                        f"{ratios.min():.3g} to {ratios.max():.3g}")
            if fits(right + (found - right).mean(dim, True), found, right, rounding):
                return f"has a number of its own added to every {line}"
    return None


def transposed(found, right, rounding):
    """Which two dimensions one has to swap to be right; None: there are none."""
    if found.ndim != right.ndim:
        return None
    for first in range(right.ndim):
        for second in range(first + 1, right.ndim):
            other = found.transpose(first, second)
            if other.shape == right.shape and same(other, right, rounding).all():
                return f"right but for dimensions {first} and {second}, which are swapped"
    return None


def share(mask):
    """How many of a mask are true, in words."""
    count = int(mask.sum())
    return "all numbers" if count == mask.numel() else f"{count:,} of {mask.numel():,} numbers"
