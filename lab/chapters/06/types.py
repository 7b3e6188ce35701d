"""The types of chapter 06: attention around a ring, and without one. See lab/types.py."""

from spmd_types import R, S, rules

from lab.typecheck.mesh import V

TOKENS = ()             # all ranks have the same ones, and each takes those that are `mine`


def layout(checker, function, *args):
    """It is made of places alone, which types do not tell apart."""
    with checker.off():
        return function(*args)


def train_step(checker, function, model, optimizer, micro_batches, mine, *args):
    checker.put(mine, checker.mesh.all(V))
    return function(model, optimizer, micro_batches, mine, *args)


MARKS = {"Layout": layout, "train_step": train_step}


def ring_attention(*, q, k, v, group, core, blocks):
    """Each query meets the keys of all ranks. (With `gather`, they are here already.)"""
    for of_hop in blocks:
        rules.ignore(*(block.low for block in of_hop if block.low is not None))
    return rules.einsum("b_s_,b___,b___->b_s_", q, k, v)


def gather_keys(*, kv, group):
    return rules.all_gather(kv, group, src=S(3), dst=R)


def exchange(*, x, split, join, group):
    return rules.all_to_all(x, group, src=S(join), dst=S(split))


RULES = {"RingAttention": ring_attention, "GatherKeys": gather_keys, "Exchange": exchange}
