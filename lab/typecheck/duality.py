"""Duality as types: what f and g do to a gradient, said without a number.

Chapter 04 calls f and g conjugates: each sends in the pass in which the other does not. Types say
why. Along each axis of the mesh a tensor is one of four things, and that decides what its gradient
is, which is called the dual type:

    type           on the ranks of the axis           its gradient    since
    R replicated   the same, and each uses it in      P partial       each has the gradient of its
                   its own way                                        own use: together they sum up
    P partial      parts of a sum that is to come     R replicated    each part has the gradient of
                                                                      the sum
    V varying      another one on each                V varying       each has its own
    I invariant    the same, and all do the same      I invariant     all compute the same one
                   with it

What takes one type to another has a backward that takes the dual of the second to the dual of the
first. So the backwards need no derivation, and what they send follows from their types:

                      forward                      backward
    f of chapter 04   I to R    hands on           P to I    all_reduce
    g of chapter 04   P to I    all_reduce         I to R    hands on
    f of chapter 05   V to R    all_gather         P to V    reduce_scatter
    g of chapter 05   P to V    reduce_scatter     V to R    all_gather

f changes no number. It says that from here on each rank uses x with its own weights. Leave it out,
and the loss of the first step is the same to the last bit, since only gradients are wrong. Types
see it at once: x is I, the weight is V, and these two do not go together. In the same way a
parameter is I where all ranks compute its whole gradient, and R where each has a part, so that
somebody must sum it before the optimizer takes it. That is what `p.partial` notes.

What types cannot see: a factor (the mean in place of the sum), the wrong rows or the wrong order,
another rank of the right axis, what numbers decide, and a sum that ranks make by sending each other
messages. Those of chapter 05's variant `ring` do so: there the types of a fused f or g are a rule
that is believed, and no bug in its body is seen. Its row in the table has a *.

    python -m lab.types 04_tensor_parallel.py       # a type for each tensor of the step
    python -m lab.hunt 04 --seed 1                  # a chapter with a bug: do types see it?

Sources: spmd_types, docs/local_spmd_types.md (the four types and the table of backwards); Shoeybi
et al., Megatron-LM (2019), section 3 (f and g).
"""

from spmd_types import (
    I,
    P,
    R,
    S,
    V,
    get_axis_local_type,
    get_partition_spec,
    normalize_axis,
    rules,
)


def dual(kind):
    """The type of the gradient of what is of this type."""
    return {R: P, P: R, V: V, I: I}[kind]


# --------------------------------------------------- rules: the output's type, of that of the input

def copy_in(*, x, group):
    """f of chapter 04."""
    return rules.convert(x, group, src=I, dst=R)


def sum_out(*, x, group):
    """g of chapter 04. In local types a product of parts is varying, which may be summed, too."""
    return rules.all_reduce(x, group, src=parts(x, group), dst=I)


def gather_in(*, x, group):
    """f of chapter 05. x (batch, seq/t, ...): each rank has other tokens, along dimension 1."""
    return rules.all_gather(x, group, src=S(1), dst=R)


def scatter_out(*, x, group):
    """g of chapter 05. x (batch, seq, ...), of which each rank then has its part of the tokens."""
    return rules.reduce_scatter(x, group, src=parts(x, group), dst=S(1))


def parts(x, group):
    """As what a reduction takes x: P; or V, if it is not cut along a dimension."""
    is_varying = normalize_axis(group).size() > 1 and get_axis_local_type(x, group) is V
    return V if is_varying and get_partition_spec(x) is None else P


# ------------------------------------------------------------------------------------ a type error

def misfit(found, wanted):
    """Why a gradient of the type `found` is none of the type `wanted`; None, if it is one. In
    backward R and I are the same: the gradient itself has no gradient."""
    if wanted in (R, I) and found in (P, V) or wanted is V and found is P:
        return "its sum is missing"
    if wanted is P and found in (R, I):
        return "whoever sums it counts it once for each rank"
    return None
