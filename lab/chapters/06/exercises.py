"""The exercises of chapter 06: who has which tokens, who meets whom, and sums that are merged."""

import torch

from lab.classroom.exercise import TINY, Exercise, Run, Same, random


def positions_of(chapter, *which):
    return chapter.positions_of(*which).tolist()


def tokens_that_meet(chapter, mine, others, side):
    """Of 8 in a zig-zag. side: 0, the queries; 1, the keys."""
    return torch.arange(8)[chapter.meeting(mine, others, 8, True)[side]].tolist()


def masks_in_a_zigzag(chapter):
    return [chapter.meeting(1, other, 8, True)[2] for other in range(4)]


def meeting_in_a_ring(chapter):
    return chapter.meeting(1, 2, 8, False)


def merged(chapter, above=0):
    """Of two blocks, whose log-sum-exps are about as large as `above`."""
    out, lse = random(2, 3, 4), random(2, 3) + above
    chapter.merge(out, lse, random(2, 3, 4), random(2, 3) + above)
    return {"out": out, "lse": lse}


def pairs_of_each_rank(chapter, variant, *more):
    return [chapter.pairs(variant, rank, 4, 32, *more) for rank in range(4)]


def flops_of_each_rank(chapter, variant, recompute):
    return [chapter.attention_flops(TINY, variant, 2, rank, 4, recompute) for rank in range(4)]


def pairs_of_a_micro_batch(chapter):
    return chapter.pairs("zigzag", 1, 8, 64, 0.5)


EXERCISES = [
    Exercise(
        "06.1", "positions_of", 1,
        "Give the positions of the tokens that a rank holds, in ascending order: in a zig-zag "
        "one chunk from the front and one from the back, else a contiguous part.",
        ("Into how many chunks does a zig-zag cut the sequence, and which two are rank 0's?",
         "Of 2N chunks, a rank has the one at `rank`, and the one as far from the end."),
        (Same(positions_of, "positions_of(0, 4, 16, True).tolist()", (0, 4, 16, True)),
         Same(positions_of, "positions_of(2, 4, 16, True).tolist()", (2, 4, 16, True)),
         Same(positions_of, "positions_of(1, 3, 12, True).tolist()", (1, 3, 12, True)),
         Same(positions_of, "positions_of(2, 4, 16, False).tolist()", (2, 4, 16, False))),
    ),
    Exercise(
        "06.2", "meeting", 2,
        "Which of this rank's queries meet which of the other rank's keys, and is the block "
        "masked? Give (slice of the queries, slice of the keys, causal), or None if no query "
        "comes after any of these keys. No rank may compute more than it has to.",
        ("Take two ranks of a zig-zag, 0 and 1 of 2, so chunks 0 and 3, and 1 and 2. Which "
         "chunk comes after which?",
         "A rank meets all of its own keys, and that block is causal. In a zig-zag, all of its "
         "queries come after an earlier rank's front chunk, and none after that rank's back "
         "chunk; and only its back chunk comes after a later rank's keys, but after all of "
         "them. In a plain ring it is all or nothing."),
        (Same(tokens_that_meet, "torch.arange(8)[meeting(2, 1, 8, True)[0]].tolist()",
              (2, 1, 0)),
         Same(tokens_that_meet, "torch.arange(8)[meeting(2, 1, 8, True)[1]].tolist()",
              (2, 1, 1)),
         Same(tokens_that_meet, "torch.arange(8)[meeting(1, 2, 8, True)[0]].tolist()",
              (1, 2, 0)),
         Same(tokens_that_meet, "torch.arange(8)[meeting(1, 2, 8, True)[1]].tolist()",
              (1, 2, 1)),
         Same(masks_in_a_zigzag, "[meeting(1, other, 8, True)[2] for other in range(4)]"),
         Same(meeting_in_a_ring, "meeting(1, 2, 8, False)"),
         Run(4, "--variant ring --batch 2"),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3")),
    ),
    Exercise(
        "06.3", "plain_backward", 2,
        "Give the gradients of q, k and v of one block of queries and keys, from the gradient "
        "of the output. lse and out are those of all keys, not of this block alone.",
        ("The lesson has two forms of dS. Which of them needs only what is at home? And q was "
         "multiplied by head_dim^-½ before it met the keys.",
         "P is exp(scores - lse), dv is Pᵀ @ dout, dP is dout @ vᵀ. dS takes from dP the sum "
         "of out∘dout over head_dim, and is multiplied by P and by head_dim^-½. `stacked` "
         "puts the query heads that share a kv head below each other, for each matmul."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
    ),
    Exercise(
        "06.4", "merge", 2,
        "Add a block to out and lse, in place: afterwards they are the output and the lse over "
        "all keys so far. It must work where nothing has been seen (lse is -inf), and where "
        "the exponential of an lse would overflow.",
        ("By how much must the output so far be scaled down, now that there are more keys in "
         "the softmax's denominator? Only differences of two lse may be exponentiated.",
         "torch.logaddexp gives the lse of both without overflow. The old output is scaled by "
         "exp(old lse - new lse), the block's by exp(block's lse - new lse); then lse is "
         "overwritten, last of all."),
        (Same(merged, "out and lse, merged with another block's"),
         Same(merged, "the same where lse is 1000", (1000,)),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3")),
    ),
    Exercise(
        "06.5", "RingAttention.backward", 3,
        "Give the gradients of this rank's q, k and v. Keys and values go around the ring once "
        "more, and their gradients follow one hop behind, in float32 or better, until they are "
        "home: N-1 sends of each.",
        ("Draw the lesson's table for three ranks. At each hop: which part of which keys' "
         "gradient is computed, what has come from the rank before, and what is sent? The "
         "first hop is different, since those keys are at home already.",
         "For each `other` of around_the_ring, compute dkv of the keys that are here: zeros "
         "where nobody meets. At the first hop, put it aside. At later ones, add what has come "
         "from the rank before, and send the sum on. After the last hop one sum comes home, "
         "and is added to what was put aside. dq stays, and adds up in its rows."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Run(4, "--variant ring --batch 2"),
         Run(2, "--batch 2 --layers 1 --steps 1 --dtype bfloat16")),
    ),
    Exercise(
        "06.6", "Exchange.backward", 1,
        "In forward, x was cut along `split`, exchanged, and joined along `join`. Give the "
        "gradient of x, and None for the other arguments.",
        ("What went to a rank was moved there, not copied and not summed: where must its "
         "gradient go?",
         "The same exchange, the other way: cut where it was joined, join where it was cut."),
        (Run(4, "--variant ulysses --batch 6 --micro-batch 2 --ignore 0.3"),),
    ),
    Exercise(
        "06.7", "pairs", 1,
        "How many pairs of a query and a key does a rank compute, in each of the four "
        "variants? A block that is met in full has (s/N)² of them.",
        ("How many blocks does a rank compute at hop 0, and at each of the N-1 later hops?",
         "Its own block counts `diagonal`. A zig-zag adds half a block at each later hop, a "
         "ring one for every earlier rank. Two chunks that meet are a quarter of a block: with "
         "gathered keys a rank's two meet 2N-1 earlier ones together, and themselves. In "
         "Ulysses it has 1/N of the heads over N² blocks, all on the diagonal."),
        (Same(pairs_of_each_rank, "[pairs('zigzag', rank, 4, 32) for rank in range(4)]",
              ("zigzag",)),
         Same(pairs_of_each_rank, "[pairs('ring', rank, 4, 32) for rank in range(4)]",
              ("ring",)),
         Same(pairs_of_each_rank, "[pairs('gather', rank, 4, 32, 0.5) for rank in range(4)]",
              ("gather", 0.5)),
         Same(pairs_of_each_rank, "[pairs('ulysses', rank, 4, 32, 0.5) for rank in range(4)]",
              ("ulysses", 0.5)),
         Same(pairs_of_a_micro_batch, "pairs('zigzag', 1, 8, 64, 0.5)")),
    ),
    Exercise(
        "06.8", "attention_flops", 2,
        "Give the FLOPs of a layer's attention on a rank, forward and backward, with all of its "
        "own block. A recompute ends as soon as it has what backward reads.",
        ("How many matmuls are in forward and in backward, and which one computes scores again "
         "where a variant has kept lse in their place? Of the 2 that are recomputed: does "
         "backward read the output of the last one?",
         "2 and 4, and 1 where the scores were not kept. A recompute adds 2. With plain scores "
         "the last matmul's output is nobody's in backward, if the core alone is computed "
         "again. In `gather` that is the matmul of the back chunk, which meets 2N - rank of the "
         "2N + 1 chunks that the rank's two meet together."),
        (Same(flops_of_each_rank, "attention_flops(tiny, 'ring', 2, rank, 4, 'selective')",
              ("ring", "selective")),
         Same(flops_of_each_rank, "attention_flops(tiny, 'ulysses', 2, rank, 4, 'selective')",
              ("ulysses", "selective")),
         Same(flops_of_each_rank, "attention_flops(tiny, 'gather', 2, rank, 4, 'selective')",
              ("gather", "selective")),
         Same(flops_of_each_rank, "attention_flops(tiny, 'gather', 2, rank, 4, 'full')",
              ("gather", "full")),
         Same(flops_of_each_rank, "attention_flops(tiny, 'zigzag', 2, rank, 4, 'none')",
              ("zigzag", "none"))),
    ),
]
