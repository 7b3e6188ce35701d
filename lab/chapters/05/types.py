"""The types of chapter 05: f and g along the sequence, with the linears that they are fused with.
See lab/types.py."""

from spmd_types import R, S, rules

from lab.typecheck.rules import by_messages, scattered, varying

TOKENS = ()             # all ranks have the same ones, and take their part of them:
MARKS = {"my_tokens": varying("tp")}


def gather_in(*, x, group):
    return rules.all_gather(x, group, src=S(1), dst=R)


def scatter_out(*, x, group):
    return scattered(x, group, S(1))


def gather_in_columns(*, x, group, weights):
    whole = rules.all_gather(x, group, src=S(1), dst=R)
    return tuple(rules.einsum("bsk,nk->bsn", whole, weight) for weight in weights)


@by_messages
def ring_columns(*, x, group, weights):
    return gather_in_columns(x=x, group=group, weights=weights)


@by_messages
def ring_row(*, x, group, weight):
    return scattered(rules.einsum("bsk,nk->bsn", x, weight), group, S(1))


RULES = {"GatherIn": gather_in, "ScatterOut": scatter_out, "GatherInColumns": gather_in_columns,
         "RingColumns": ring_columns, "RingRow": ring_row}
