"""What several chapters' typing rules say, beside those of duality.py."""

from spmd_types import R, S, SpmdTypeError, V, get_local_type, normalize_axis, rules
from spmd_types._checker import _resolve_collective_axes

from common import Refused
from lab.typecheck.duality import parts


def summed(x, group, dst):
    """An all_reduce: of what is partial, or of what is varying, which it takes for parts."""
    return rules.all_reduce(x, group, src=parts(x, group), dst=dst)


def exchanged(rows, group):
    """An all_to_all of rows, along each axis of the group."""
    axes = _resolve_collective_axes(normalize_axis(group), get_local_type(rows)) or [group]
    kind = S(0) if len(axes) == 1 else V
    for axis in axes:
        rows = rules.all_to_all(rows, axis, src=kind, dst=kind)
    return rows


def add_loss(*, x, loss):
    """x, and a loss that is tied to it. Its gradient is 1 on each rank, so each has a part."""
    for axis, kind in get_local_type(loss).items():
        if kind is R:
            raise SpmdTypeError(f"expects its loss to be P on axis {axis}, but it is R")
    rules.ignore(loss)
    return rules.einsum("...->...", x, linear_in=(0,))


def all_to_all(*, rows, sent, received, group):
    return exchanged(rows, group)


def refuse_parts_of_tp(args, ranks):
    """Refuse kv heads that several of these tensor-parallel ranks hold, and not all: they lie along
    a part of the axis, and there are no types along that."""
    heads = args.model.kv_heads
    if 1 < heads < ranks:
        raise Refused(f"each of --kv-heads {heads} is on {ranks // heads} of {ranks} "
                      "tensor-parallel ranks, which are no axis", f"--kv-heads {ranks}",
                      "--kv-heads 1")


def by_messages(rule):
    """Its Function sums by send and receive, of which types know no sum: its body is not held."""
    rule.by_messages = True
    return rule


def varying(*names):
    """A function gives each rank along these axes another part of what it has got."""
    def mark(checker, function, *args):
        part = function(*args)
        checker.change(part, names, V)
        return part

    return mark
