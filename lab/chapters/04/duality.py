"""Duality: what f and g do to a gradient, without computing a single number.

Chapter 04 calls f and g conjugates: each communicates in the pass in which the other doesn't.
Types explain why. Along one axis of the mesh, a tensor has one of four types, and its type decides
its gradient's, which is called the dual type:

    type           on the ranks of the axis               type of the gradient
    R replicated   the same values, and each rank         P: each rank has the gradient of its own
                   uses them in its own way               use, and these add up
    P partial      terms of a sum that's still to come    R: each term has the gradient of the sum
    V varying      different values                       V: each rank has its own
    I invariant    the same values, used the same way     I: each rank computes the whole gradient

A function that takes one type to another has a backward that takes the dual of the second to the
dual of the first. You don't have to derive it, and the types tell you what it sends:

                      forward                    backward
    f of chapter 04   I to R    nothing          P to I    all_reduce
    g of chapter 04   P to I    all_reduce       I to R    nothing
    f of chapter 05   V to R    all_gather       P to V    reduce_scatter
    g of chapter 05   P to V    reduce_scatter   V to R    all_gather

f changes no number. It declares that from here on each rank uses x with its own weights. Leave it
out, and the first loss is right to the last bit, but the gradients are wrong. The types show it at
once: x is I and the weight is V, and you can't multiply those, since with an I all ranks have to do
the same. A parameter is I where each rank computes its whole gradient. Where each has a part, it's
R, and somebody must sum the parts before the optimizer steps. That's what `p.partial` notes.

Types can't see a wrong factor (a mean instead of a sum), wrong rows, or a wrong order.

Sources: spmd_types, docs/local_spmd_types.md (the four types and the backward of each function);
Shoeybi et al., Megatron-LM (2019), section 3 (f and g).
"""

REPLICATED, PARTIAL, VARYING, INVARIANT = "RPVI"
SENT = {"PR": "all_reduce", "PI": "all_reduce", "PV": "reduce_scatter",
        "VR": "all_gather", "VI": "all_gather"}


def dual(kind):
    """The type of the gradient of a tensor of this type."""
    return {REPLICATED: PARTIAL, PARTIAL: REPLICATED, VARYING: VARYING, INVARIANT: INVARIANT}[kind]


def copy_in():
    """f of chapter 04: the type of its input, and of its output."""
    return INVARIANT, REPLICATED


def sum_out():
    """g of chapter 04: the type of its input, and of its output."""
    return PARTIAL, INVARIANT


def gather_in():
    """f of chapter 05: the type of its input, and of its output."""
    return VARYING, REPLICATED


def scatter_out():
    """g of chapter 05: the type of its input, and of its output."""
    return PARTIAL, VARYING


def passes(source, target):
    """(forward, backward) of a function from one type to another, each with the collective that it
    needs: ("I to R: nothing", "P to I: all_reduce")."""
    return tuple(f"{start} to {end}: {SENT.get(start + end, 'nothing')}"
                 for start, end in ((source, target), (dual(target), dual(source))))


def misfit(given, wanted):
    """Why a gradient of the type `given` can't be used as one of the type `wanted`, or None if it
    can. In backward R and I are the same: the gradient itself has no gradient."""
    if given == PARTIAL != wanted or given == VARYING and wanted in (REPLICATED, INVARIANT):
        return "its sum is missing"
    if wanted == PARTIAL and given in (REPLICATED, INVARIANT):
        return "whoever sums it counts it once for each rank"
    return None
