"""The types of chapter 05: f and g along the sequence, with the linears that they are fused with.
See lab/types.py."""

from spmd_types import rules

from lab.typecheck.duality import gather_in, scatter_out
from lab.typecheck.rules import by_messages, refuse_parts_of_tp, varying

TOKENS = ()             # all ranks have the same ones, and take their part of them:
MARKS = {"my_tokens": varying("tp")}


def requires(args):
    refuse_parts_of_tp(args, args.ranks)


def gather_in_columns(*, x, group, weights):
    whole = gather_in(x=x, group=group)
    return tuple(rules.einsum("bsk,nk->bsn", whole, weight) for weight in weights)


@by_messages
def ring_columns(*, x, group, weights):
    return gather_in_columns(x=x, group=group, weights=weights)


@by_messages
def ring_row(*, x, group, weight):
    return scatter_out(x=rules.einsum("bsk,nk->bsn", x, weight), group=group)


RULES = {"GatherIn": gather_in, "ScatterOut": scatter_out, "GatherInColumns": gather_in_columns,
         "RingColumns": ring_columns, "RingRow": ring_row}
