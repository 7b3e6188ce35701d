"""The exercises of kernels/flash_attention.py."""

from __future__ import annotations  # tl.constexpr below is then read by Triton alone

from unittest import mock

import torch

from lab.classroom.exercise import Exercise, Same, random

try:
    import triton
    import triton.language as tl
except ImportError:                     # then there is nothing to be graded here
    triton = None

RESULTS, GRADIENTS = ("out", "lse"), ("dq", "dk", "dv")


def walk_kernel(ends_ptr, seq_q, seq_k, WALK: tl.constexpr, CAUSAL: tl.constexpr,
                BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    block = tl.program_id(0)
    whole, end = WALK(block * BLOCK_Q, seq_q, seq_k, CAUSAL, BLOCK_Q, BLOCK_K)
    tl.store(ends_ptr + 2 * block, whole)
    tl.store(ends_ptr + 2 * block + 1, end)


def ends(chapter, seq_q, seq_k, causal, block_k):
    """(whole, end) of each block of 16 queries. Of an end, which block of keys is the last counts:
    an end of 0 or less is none."""
    found = torch.zeros(-(-seq_q // 16), 2, dtype=torch.int32)
    triton.jit(walk_kernel)[(len(found),)](found, seq_q, seq_k, chapter.walk_over_keys, causal, 16,
                                           block_k)
    blocks = [(whole, -(-max(end, 0) // block_k)) for whole, end in found.tolist()]
    return {f"queries from {16 * i} on": {"whole": whole, "blocks of keys up to the end": end}
            for i, (whole, end) in enumerate(blocks)}


def visible_kernel(seen_ptr, seq_q, seq_k, VISIBLE: tl.constexpr, CAUSAL: tl.constexpr):
    rows, keys = tl.arange(0, 8)[:, None], tl.arange(0, 16)[None, :]
    seen = (rows + keys >= 0) & VISIBLE(rows, keys, seq_q, seq_k, CAUSAL)
    tl.store(seen_ptr + 16 * rows + keys, tl.where(seen, 1, 0))


def seen(chapter, seq_q, seq_k, causal):
    """Of rows of 8 and keys of 16, some of which are past the end."""
    found = torch.zeros(8, 16, dtype=torch.int32)
    triton.jit(visible_kernel)[(1,)](found, seq_q, seq_k, chapter.visible, causal)
    return {f"keys of row {i}": row.nonzero().flatten().tolist()
            for i, row in enumerate(found[:seq_q])}


def all_are_seen(chapter):
    """In place of two other exercises, where nothing is causal: all blocks take a mask, which hides
    what is past the end."""
    return mock.patch.multiple(
        chapter, walk_over_keys=lambda first, seq_q, seq_k, *more: (0, seq_k),
        visible=lambda rows, keys, seq_q, seq_k, causal: (rows > -1) & (keys < seq_k))


def forward_alone(chapter):
    with all_are_seen(chapter):
        return forward(chapter, (1, 4, 24, 40), (1, 2, 70, 40), scale=4)


def backward_alone(chapter):
    with all_are_seen(chapter):
        return backward(chapter, (1, 4, 20, 16), (1, 2, 50, 16))


def backward_by_definition(chapter):
    dout, q = random(2, 2, 4, 5, 16)
    k, v = random(2, 2, 2, 7, 16)
    out, lse = random(2, 4, 5, 16), random(2, 4, 5) + 3
    return dict(zip(GRADIENTS, chapter.reference_backward(dout, q, k, v, out, lse, True)))


def gradients_by(chapter, backward, dout, q, k, v):
    """Where rows see nothing."""
    found = backward(dout, q, k, v, *chapter.reference_forward(q, k, v, True), True)
    return dict(zip(GRADIENTS, found))


def definition_where_rows_see_nothing(chapter):
    tensors = *random(2, 1, 2, 5, 16), *random(2, 1, 2, 3, 16)
    return gradients_by(chapter, chapter.reference_backward, *tensors)


def backward_where_rows_see_nothing(chapter):
    tensors = *random(2, 1, 1, 40, 16).float(), *random(2, 1, 1, 20, 16).float()
    return gradients_by(chapter, chapter.flash_backward, *tensors)


def bytes_of(chapter, name):
    return [getattr(chapter, name)(1000, 3000, 64, width) for width in (2, 4)]


def forward(chapter, queries, keys, *causal, scale=1):
    """Shapes (batch, heads, seq, head_dim)."""
    q = scale * random(*queries).float()
    return dict(zip(RESULTS, chapter.flash_forward(q, *random(2, *keys).float(), *causal)))


def forward_of_infinite_values(chapter):
    q, k = random(2, 1, 1, 48, 16).float()
    v = random(1, 1, 48, 16).float().index_fill(2, torch.arange(32, 48), torch.inf)
    return chapter.flash_forward(q, k, v, True)[0]


def forward_of_large_queries(chapter):
    return forward(chapter, (1, 4, 24, 40), (1, 2, 70, 40), True, scale=4)


def forward_of_equal_keys(chapter):
    q, k = 200 * random(1, 1, 20, 16).float(), random(1, 1, 1, 16).float()
    v = random(1, 1, 50, 16).float()
    return dict(zip(RESULTS, chapter.flash_forward(q, k.expand(1, 1, 50, 16), v)))


def forward_in_float16(chapter):
    q, (k, v) = random(2, 1, 150, 130).half(), random(2, 2, 1, 200, 130).half()
    return dict(zip(RESULTS, chapter.flash_forward(q, k, v, True)))


def backward(chapter, queries, keys, *causal):
    dout, q = random(2, *queries).float()
    k, v = random(2, *keys).float()
    out, lse = random(*queries).float(), random(*queries[:3]).float() + 3
    return dict(zip(GRADIENTS, chapter.flash_backward(dout, q, k, v, out, lse, *causal)))


def backward_in_float16(chapter):
    dout, q = random(2, 2, 2, 150, 16).half()
    k, v = random(2, 2, 2, 200, 16).half()
    out, lse = random(2, 2, 150, 16).half(), random(2, 2, 150).float() + 3
    return dict(zip(GRADIENTS, chapter.flash_backward(dout, q, k, v, out, lse, True)))


EXERCISES = [
    Exercise(
        "flash_attention.1", "reference_backward", 2,
        "Give the gradients of q, k and v in plain PyTorch. out and lse may be those of more "
        "keys than k has. A row whose lse is -inf has seen nothing, and adds nothing.",
        ("How do the weights come out of scores and lse, without another softmax? And which "
         "heads of q have gone into one head of k and v?",
         "Weights are exp(scores - lse), with the lse of blind rows turned to +inf. The lesson "
         "has dv, dweights, delta and dscores; the scores were scaled, so dscores are too. "
         "Work on (batch, kv_heads, group, queries, dim), as reference_scores does, and sum dk "
         "and dv over the group."),
        (Same(backward_by_definition, "causal, 5 queries, 7 keys, 2 heads for each of k"),
         Same(definition_where_rows_see_nothing,
              "causal, 5 queries, 3 keys: two rows see nothing")),
    ),
    Exercise(
        "flash_attention.2", "plain_bytes flash_bytes", 1,
        "How many bytes does the forward of one head move, with its scores in memory and "
        "without? lse is in float32. Without, take it that k and v are read once.",
        ("Which tensors are read and written once in both? And how often do the scores, or the "
         "weights, go to memory or come from it?",
         "q and out have queries · dim numbers, k and v have keys · dim. Scores are written "
         "and read, and so are the weights. Without them, lse is what is written besides: "
         "4 bytes for each query."),
        (Same(bytes_of, "[plain_bytes(1000, 3000, 64, width) for width in (2, 4)]",
              ("plain_bytes",)),
         Same(bytes_of, "[flash_bytes(1000, 3000, 64, width) for width in (2, 4)]",
              ("flash_bytes",))),
        "the bytes of attention",
    ),
    Exercise(
        "flash_attention.3", "walk_over_keys", 2,
        "For the block of queries from `first` on, give `whole`, in whole blocks of keys, up "
        "to which each of its rows sees all keys, and `end`, from which on none sees any. No "
        "block of keys may be loaded of which nothing is seen.",
        ("The last query sees all keys. How many does query i see, then? Which row of the "
         "block sees the fewest, and which one the most?",
         "Query i sees the first i + 1 + seq_k - seq_q keys. The first row decides about "
         "`whole`, the last one about `end`. Neither is above seq_k; `whole` is not below 0, "
         "and is rounded down to blocks, causal or not."),
        (Same(ends, "causal, 40 queries, 70 keys, blocks of 16 and 32", (40, 70, True, 32)),
         Same(ends, "causal, 40 queries, 20 keys, blocks of 16 and 16", (40, 20, True, 16)),
         Same(ends, "not causal, 20 queries, 50 keys, blocks of 16 and 16", (20, 50, False, 16)),
         Same(forward, "causal, 40 queries, 70 keys", ((1, 2, 40, 16), (1, 1, 70, 16), True)),
         Same(forward, "causal, 40 queries, 20 keys", ((1, 1, 40, 16), (1, 1, 20, 16), True)),
         Same(forward, "not causal, 20 queries, 50 keys", ((1, 1, 20, 16), (1, 1, 50, 16))),
         Same(forward_of_infinite_values,
              "causal, 48 queries and keys, values infinite from key 32 on")),
    ),
    Exercise(
        "flash_attention.4", "visible", 1,
        "Say whether each row sees each key. None sees a key past the end and, if CAUSAL, none "
        "sees a key that comes after it: the last row is the one that sees all keys.",
        ("With as many keys as queries, row i sees key i and those before it. By how many is "
         "that shifted if there are more keys than queries?",
         "Two conditions, both to hold: the key's number is below seq_k; and, if causal, it is "
         "not above the row's number plus seq_k - seq_q. A row of numbers compared with a "
         "column gives a matrix."),
        (Same(seen, "causal, 6 rows, 9 keys", (6, 9, True)),
         Same(seen, "causal, 6 rows, 4 keys", (6, 4, True)),
         Same(seen, "not causal, 3 rows, 16 keys", (3, 16, False)),
         Same(seen, "not causal, 8 rows, 5 keys", (8, 5, False)),
         Same(forward, "causal, 40 queries, 70 keys", ((1, 2, 40, 16), (1, 1, 70, 16), True)),
         Same(forward, "causal, 40 queries, 20 keys", ((1, 1, 40, 16), (1, 1, 20, 16), True)),
         Same(forward, "not causal, 20 queries, 50 keys", ((1, 1, 20, 16), (1, 1, 50, 16)))),
    ),
    Exercise(
        "flash_attention.5", "forward_kernel", 3,
        "For a block of queries of one head, walk over the keys with the online softmax, and "
        "store out and, for each row, lse. `scale` makes of q · k the score in log2, so that "
        "exp becomes exp2; lse is to be the natural logarithm. A row that sees nothing has "
        "out = 0 and lse = -inf.",
        ("If a later block has a larger maximum, by which factor is what was added up before "
         "too large? And what would -inf less -inf be, in a row that has seen nothing yet?",
         "Keep for each row the maximum, the total of the weights and out, in float32. For "
         "each block: the new maximum; total and out, times exp2(maximum before - new "
         "maximum); then add the block's weights, and its weights · v. Behind the loop divide "
         "out by total, which is made 1 where it is 0. lse is maximum + log2(total), over "
         "LOG2_E."),
        (Same(forward_alone, "not causal, 24 queries, 70 keys, 4 heads of q and 2 of k, dim 40"),
         Same(forward_of_large_queries,
              "causal, 24 queries, 70 keys, 4 heads of q and 2 of k, dim 40"),
         Same(forward, "causal, 40 queries, 20 keys: twenty rows see nothing",
              ((1, 1, 40, 16), (1, 1, 20, 16), True)),
         Same(forward_of_equal_keys,
              "not causal, 20 queries, 50 keys that are the same, scores of some hundred"),
         Same(forward_in_float16,
              "causal, float16, 150 queries, 200 keys, in blocks of 128 by 64, batch 2")),
        "the online softmax",
    ),
    Exercise(
        "flash_attention.6", "dk_dv_kernel", 3,
        "For a block of keys of one kv head, walk over the queries of all heads that share it, "
        "and store the gradients of k and v. dq_kernel has written, for each head in "
        "seq_padded places, lse in log2 (+inf where a row has seen nothing) and delta. `load` "
        "wants a tensor as the head, and without a GPU the variable of a `for` is an int.",
        ("In dq_kernel queries stay and keys go by. What becomes of it if they change places? "
         "Which queries see none of these keys, which all of them, and which need a mask?",
         "Begin with head kv_head · group, and go over group heads. With scores (keys, rows): "
         "weights are exp2(scores · scale - lse), dv adds up weights · dout, dweights are "
         "v · doutᵀ, dscores are weights · (dweights - delta), dk adds up dscores · q. Row i "
         "sees key j if j <= i + seq_k - seq_q. dk takes scale / LOG2_E once, at the end."),
        (Same(backward_alone, "not causal, 20 queries, 50 keys, 4 heads of q and 2 of k"),
         Same(backward, "causal, 24 queries, 70 keys, 4 heads of q and 2 of k, dim 40",
              ((1, 4, 24, 40), (1, 2, 70, 40), True)),
         Same(backward_where_rows_see_nothing,
              "causal, 40 queries, 20 keys: twenty rows see nothing"),
         Same(backward, "not causal, 20 queries, 50 keys", ((1, 2, 20, 16), (1, 2, 50, 16))),
         Same(backward_in_float16,
              "causal, float16, 150 queries, 200 keys, in blocks of 128 by 64, batch 2")),
        "the gradients of k and v",
    ),
]
