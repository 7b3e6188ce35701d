"""The exercises of chapter 06: who has which tokens, who meets whom, and sums that are merged."""

import torch

from lab.classroom.exercise import TINY, Exercise, Run, Same, random

LENGTHS = 5, 1, 10                                      # of three documents in a sequence of 16


def starts_of(lengths):
    """Where the document of each token begins."""
    lengths = torch.tensor(lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def runs(chapter, part, parts, lengths, *how):
    return [run.tolist() for run in chapter.runs_of(part, parts, starts_of(lengths), *how)]


def meeting(chapter, mine, other, parts, lengths, zigzag, window=None):
    """Each block, by its rows and keys."""
    starts = starts_of(lengths)
    whole = torch.arange(len(starts))
    first = starts.maximum(whole - (window or len(starts)) + 1)
    of_queries = chapter.runs_of(mine, parts, starts, zigzag, False, window)
    keys = torch.cat(chapter.runs_of(other, parts, starts, zigzag, False, window))
    found = []
    for rows, columns, causal, low in chapter.meeting(of_queries, keys, first):
        rows = whole[rows].tolist()
        found.append({"rows": rows, "keys": whole[columns].tolist(), "causal": bool(causal),
                      "low": [0] * len(rows) if low is None else low.tolist()})
    return found


def merged(chapter, above=0):
    """Of two blocks, whose log-sum-exps are about as large as `above`."""
    out, lse = random(2, 3, 4), random(2, 3) + above
    chapter.merge(out, lse, random(2, 3, 4), random(2, 3) + above)
    return {"out": out, "lse": lse}


def pairs_of_each_part(chapter, variant, parts=4, *more):
    return [chapter.pairs(variant, part, parts, 8 * parts, *more) for part in range(parts)]


def hops(chapter, variant, *windows):
    return [chapter.hops_needed(variant, 4, 32, window) for window in windows]


def with_room(chapter, lengths, multiple):
    source, starts = chapter.with_room(starts_of(lengths), multiple)
    return {"source": source.tolist(), "starts": starts.tolist()}


def weights(chapter, rows, keys, causal, low=None):
    """What a mask leaves of equal scores: 1 or 0."""
    low = None if low is None else torch.tensor(low)
    return chapter.mask_of(random(1, 2, rows, 4), random(1, 1, keys, 4), causal, low).exp().tolist()


def ordered(chapter, lengths, *how):
    """Positions that were gathered, in order."""
    of_parts = [chapter.runs_of(part, 4, starts_of(lengths), *how) for part in range(4)]
    gathered = torch.cat([run for of_part in of_parts for run in of_part])
    return chapter.in_order(gathered[None, :, None], of_parts, 1).flatten().tolist()


def traffic(chapter, variant, *more):
    return chapter.traffic(TINY, variant, 2, 3, *more)


EXERCISES = [
    Exercise(
        "06.1", "runs_of", 1,
        "Give the positions that a part holds, as runs: in a zig-zag one chunk from the front "
        "and one from the back, of the sequence or of each document, else a contiguous part. A "
        "run is ascending, lies in one document, and is no longer than the window.",
        ("Into how many chunks does a zig-zag cut the sequence, and which two are part 0's? "
         "Where in a chunk does `starts` change?",
         "Of 2N chunks, a part has the one at `part`, and the one as far from the end; or those of "
         "each document in turn. by_document cuts places at borders, whether these are all places "
         "or those of a chunk, and split() makes pieces of a window's length."),
        (Same(runs, "runs_of(2, 4, starts of one document of 16, True)", (2, 4, (16,), True)),
         Same(runs, "runs_of(2, 4, starts of one document of 16, False)", (2, 4, (16,), False)),
         Same(runs, "runs_of(1, 2, starts of documents of 5, 1 and 10, True)",
              (1, 2, LENGTHS, True)),
         Same(runs, "runs_of(1, 2, starts of documents of 8 and 16, True, True)",
              (1, 2, (8, 16), True, True)),
         Same(runs, "runs_of(1, 2, starts of documents of 5, 1 and 10, False, window=3)",
              (1, 2, LENGTHS, False, False, 3)),
         Run(4, "--batch 2 --documents 6 --window 3")),
    ),
    Exercise(
        "06.2", "meeting", 3,
        "In which blocks do these runs of queries meet these keys? Of each run there may be two: "
        "one with keys before it, without those that none of it sees, and without rows that see "
        "none of them; and one with itself, which is causal. No rank may compute more than it has "
        "to.",
        ("Keys ascend. Which of them is the first that a run's first query sees, and where among "
         "them does the run itself begin and end? Where a window has moved on, which rows of a run "
         "still see one of the keys before it?",
         "searchsorted finds three places in the keys: of first[run[0]], of run[0], and of what "
         "comes after run[-1]. For the keys between the first two, searchsorted of first[run] says "
         "from where on each query sees them; one that begins behind the last of them sees none, "
         "nor do those after it. `low` is needed if the last row that sees any does not begin at "
         "0. Count rows on where a run meets nothing, too."),
        (Same(meeting, "meeting of part 1's queries and keys, zig-zag", (1, 1, 4, (16,), True)),
         Same(meeting, "meeting of part 2's queries and part 1's keys, zig-zag",
              (2, 1, 4, (16,), True)),
         Same(meeting, "meeting of part 1's queries and part 2's keys, zig-zag",
              (1, 2, 4, (16,), True)),
         Same(meeting, "meeting of part 1's queries and part 2's keys, plain ring",
              (1, 2, 4, (16,), False)),
         Same(meeting, "the same of documents of 5, 1 and 10: part 1's queries, part 0's keys",
              (1, 0, 2, LENGTHS, True)),
         Same(meeting, "the same with a window of 3: part 1's queries, part 0's keys, plain ring",
              (1, 0, 2, (16,), False, 3)),
         Same(meeting, "the same with a window of 3: part 1's queries and keys, plain ring",
              (1, 1, 2, (16,), False, 3)),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --documents 6 --window 5")),
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
        "more, as far as in forward, and their gradients follow one hop behind, in float32 or "
        "better. From the last hop, which may be an early one, a sum goes straight home: as many "
        "sends of each as there are hops.",
        ("Draw the lesson's table for three ranks. At each hop: which part of which keys' "
         "gradient is computed, what has come from the rank before, and what is sent? The "
         "first hop is different, since those keys are at home already. And with a window: how "
         "far is home?",
         "For each hop of around_the_ring, compute dkv of the keys that are here: zeros "
         "where nobody meets. At hop 0, put it aside. At later ones, add what has come "
         "from the rank before, and send the sum on, from the last hop as many ranks back as "
         "there were hops. What comes home is added to what was put aside, if there was a hop at "
         "all. dq stays, and adds up in its rows."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Run(4, "--variant ring --batch 2 --window 6"),
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
        "06.7", "pairs", 2,
        "How many pairs of a query and a key does a part of the sequence compute, in each of the "
        "four variants? A block that is met in full has (s/N)² of them. If there are several "
        "documents, all as long, each lies on N/documents parts.",
        ("How many blocks does a part compute at hop 0, and at each of the N-1 later hops? And "
         "what is N of a document that lies on fewer parts?",
         "Its own block counts `diagonal`. A zig-zag adds half a block at each later hop, a "
         "ring one for every earlier part of its document. Two chunks that meet are a quarter of "
         "a block, and with gathered keys they are as many. In Ulysses the sequence is one "
         "part, of a rank's own heads: each document is a square on the diagonal."),
        (Same(pairs_of_each_part, "[pairs('zigzag', part, 4, 32) for part in range(4)]",
              ("zigzag",)),
         Same(pairs_of_each_part, "[pairs('ring', part, 4, 32) for part in range(4)]",
              ("ring",)),
         Same(pairs_of_each_part, "[pairs('gather', part, 4, 32, 0.5) for part in range(4)]",
              ("gather", 4, 0.5)),
         Same(pairs_of_each_part, "[pairs('ring', part, 8, 64, 0.5, 2) for part in range(8)]",
              ("ring", 8, 0.5, 2)),
         Same(pairs_of_each_part, "[pairs('zigzag', part, 8, 64, 1, 4) for part in range(8)]",
              ("zigzag", 8, 1, 4)),
         Same(pairs_of_each_part, "[pairs('ulysses', 0, 1, 8, 0.5, 2)]", ("ulysses", 1, 0.5, 2))),
    ),
    Exercise(
        "06.8", "hops_needed", 1,
        "Over how many hops must keys and values travel, if a token sees `window` tokens, itself "
        "among them (None: all), and each of n parts has seq/n of one document? Say it of a plain "
        "ring and of a zig-zag.",
        ("How many tokens back does the first token of a part see, and over how many parts do "
         "these lie? In a zig-zag, which ranks have the chunk before a rank's front one, and "
         "the one before its back one?",
         "It sees window - 1 tokens back, so that many over seq/n, rounded up; and never more "
         "than n-1 hops. In a zig-zag one neighbour is one hop away and the other one n-1, so "
         "it is all or nothing: nothing where a token sees itself alone."),
        (Same(hops, "[hops_needed('ring', 4, 32, window) for window in (None, 18, 17, 9, 2, 1)]",
              ("ring", None, 18, 17, 9, 2, 1)),
         Same(hops, "[hops_needed('zigzag', 4, 32, window) for window in (None, 17, 2, 1)]",
              ("zigzag", None, 17, 2, 1))),
    ),
    Exercise(
        "06.9", "with_room", 2,
        "Pad documents at their ends, so that the length of each is a multiple of `multiple`. For "
        "each place give the token that it holds, -1 for none, and where its document begins now.",
        ("Of documents of 3 and 5 tokens and a multiple of 4: write down both results. How many "
         "places are missing behind a document, and where does the next one begin now?",
         "by_document gives the places of each document, which are its tokens. -len(document) % "
         "multiple are missing behind them: F.pad with -1. All of these places have the same begin "
         "now, which is how many places there are before."),
        (Same(with_room, "with_room(starts of documents of 3 and 5, 4)", ((3, 5), 4)),
         Same(with_room, "with_room(starts of documents of 5, 1 and 10, 4)", (LENGTHS, 4)),
         Same(with_room, "with_room(starts of documents of 4 and 12, 4)", ((4, 12), 4)),
         Run(2, "--batch 2 --documents 6 --cut document")),
    ),
    Exercise(
        "06.10", "mask_of", 1,
        "Give the mask of a block, (rows, keys), to be added to its scores: 0 where a query sees "
        "a key, and -inf elsewhere. In a causal block a run meets itself, so there are as many "
        "keys as queries. Else `low` says which key is the first that each query sees.",
        ("Which keys may query i of a run not see? And which ones, if it sees those from low[i] "
         "on?",
         "Compare the number of each key, in a row, with the number of each query in a column, or "
         "with low in a column: key > query is hidden, and so is key < low. masked_fill_ puts -inf "
         "there."),
        (Same(weights, "mask_of 3 queries and 3 keys, causal", (3, 3, True)),
         Same(weights, "mask_of 3 queries and 4 keys, low 0, 1 and 3", (3, 4, False, (0, 1, 3))),
         Run(4, "--batch 2 --window 3")),
    ),
    Exercise(
        "06.11", "in_order", 1,
        "Keys were gathered: part after part, and of each part run after run, along `dim`. Put "
        "them into the order of the sequence. runs: for each part a list of its runs, which are "
        "positions.",
        ("Cut what was gathered into runs again. Which of their positions tells where a run "
         "belongs?",
         "split takes a list of lengths. Sort the numbers of the runs by the first position of "
         "each, and concatenate."),
        (Same(ordered, "positions, gathered from a zig-zag of 4 parts", ((16,), True)),
         Same(ordered, "positions, gathered from a zig-zag of documents of 5, 1 and 10",
              (LENGTHS, True)),
         Same(ordered, "positions, gathered from a zig-zag of each of two documents",
              ((8, 16), True, True)),
         Run(4, "--variant gather --batch 2 --documents 6")),
    ),
    Exercise(
        "06.12", "exchanged_attention", 2,
        "Give attention over the tokens of all ranks of the group, by core(q, k, v) with this "
        "rank's share of the heads. Where there are fewer kv heads than ranks, repeat each until "
        "every rank gets one, and each query head the one that it belongs to.",
        ("An exchange gives the first heads to rank 0, and the last ones to the last rank. Which "
         "kv head do a rank's query heads share, and in which order must the copies stand?",
         "Ranks over kv heads, at least 1, is how often: with repeat_interleave, so that copies "
         "of one head are neighbours. Then Exchange of q, k and v, from heads (dimension 1) to "
         "tokens (2), the core, and Exchange of its output the other way."),
        (Run(4, "--variant ulysses --batch 6 --micro-batch 2 --ignore 0.3"),
         Run(4, "--inner 2 --batch 2 --documents 6"),
         Run(4, "--inner 2 --batch 2 --kv-heads 1")),
    ),
    Exercise(
        "06.13", "train_step", 2,
        "Take one step on this rank's tokens: `mine` says which of a sequence they are, and -1 is "
        "padding, neither a token nor a target. Give this rank's part of the loss, which is the "
        "mean over the valid targets of the whole batch, detached, and the norm before clipping.",
        ("What does an index of -1 take, and what must stand there, in tokens and in targets? "
         "Whose gradients are partial sums, and when may they be sent?",
         "Pad tokens by one of any value, and targets by one that is not valid (-100): then -1 "
         "finds it. Divide each loss_sum by `valid`. Make PartialSums before the last backward, "
         "and finish it after that; then every rank has all of the gradient, and grad_norm needs "
         "no group."),
        (Run(2, "--batch 6 --micro-batch 2 --ignore 0.3 --documents 6 --cut document"),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --clip 0.1")),
    ),
    Exercise(
        "06.14", "traffic", 3,
        "Count what a rank sends in a step: calls, payload and bytes on the wire of each operator "
        "that sends anything. `inner` neighbours exchange heads, and keys and values travel over "
        "`hops` of the rings around them (None: over all). Recomputing sends a layer's forward "
        "again, but an exchanged output if it is \"full\" alone.",
        ("Of how many tokens and heads are a hop's keys and values, once `inner` ranks have "
         "exchanged theirs? What do gradients of keys and values weigh, and what those of "
         "parameters?",
         "First the all_reduce, of `sums` or e bytes a gradient, in one bucket or in layers + 2. "
         "An exchange is of s/N tokens of all heads, and of as many kv heads as `inner` at least: "
         "q, k, v and the output, forward and backward, of which (inner-1)/inner leave the rank. A "
         "hop is of as many numbers of k and v, since `inner` times as many tokens have 1/inner of "
         "the heads: once in each forward, once in backward, and their gradients in 4 bytes at "
         "least. Gathered keys are reduce_scattered in e bytes instead."),
        (Same(traffic, "traffic(tiny, 'zigzag', 2, 3, 8, 4)", ("zigzag", 8, 4)),
         Same(traffic, "traffic(tiny, 'ring', 2, 3, 8, 2, \"full\", 4, hops=2)",
              ("ring", 8, 2, "full", 4, 1, 2)),
         Same(traffic, "traffic(tiny, 'zigzag', 2, 3, 8, 2, \"selective\", 4, inner=2)",
              ("zigzag", 8, 2, "selective", 4, 2)),
         Same(traffic, "traffic(tiny, 'gather', 2, 3, 8, 4, inner=4)",
              ("gather", 8, 4, "none", None, 4)),
         Same(traffic, "traffic(tiny, 'ulysses', 2, 3, 8, 4, \"full\")", ("ulysses", 8, 4, "full")),
         Same(traffic, "traffic(tiny, 'ring', 2, 3, 2, 4, hops=0)",
              ("ring", 2, 4, "none", None, 1, 0))),
    ),
]
