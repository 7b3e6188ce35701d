"""The types of chapter 04: f and g, and the loss of a vocabulary that is cut. See lab/types.py."""

from spmd_types import I, rules

from lab.typecheck.duality import copy_in, sum_out
from lab.typecheck.rules import refuse_parts_of_tp, summed

TOKENS = ()             # all ranks have the same ones


def requires(args):
    refuse_parts_of_tp(args, args.ranks)


def copy_in_columns(*, x, group, weights):
    x = copy_in(x=x, group=group)
    return tuple(rules.einsum("...k,nk->...n", x, weight) for weight in weights)


def vocab_parallel_loss(*, logits, targets, vocab, group):
    exponentials = summed(rules.einsum("bsv->bs", logits), group, I)
    own = summed(rules.einsum("bsv,bs->bs", logits, targets), group, I)
    return rules.einsum("bs,bs->", exponentials, own)   # the logarithm of the one, less the other


RULES = {"CopyIn": copy_in, "SumOut": sum_out, "CopyInColumns": copy_in_columns,
         "VocabParallelLoss": vocab_parallel_loss}
