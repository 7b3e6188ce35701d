"""The exercises of chapter 06: who has which tokens, who meets whom, and sums that are merged."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lab.classroom.exercise import TINY, Exercise, Run, Same, random

LENGTHS = 5, 1, 10                                      # of three documents in a sequence of 16


def starts_of(lengths):
    """Where the document of each token begins."""
    lengths = torch.tensor(lengths)
    return (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def runs(chapter, part, parts, lengths, *how):
    return [run.tolist() for run in chapter.runs_of(part, parts, starts_of(lengths), *how)]


def meeting(chapter, runs, keys, lengths, window=None):
    """Each block, by its rows and keys. runs and keys: pairs of a first place and an end."""
    starts = starts_of(lengths)
    whole = torch.arange(len(starts))
    first = starts.maximum(whole - (window or len(starts)) + 1)
    found = []
    for rows, columns, causal, low in chapter.meeting(
            [torch.arange(*run) for run in runs], torch.cat([torch.arange(*run) for run in keys]),
            first):
        rows = whole[rows].tolist()
        found.append({"rows": rows, "keys": whole[columns].tolist(), "causal": bool(causal),
                      "low": [0] * len(rows) if low is None else low.tolist()})
    return found


def gradients_of_block(chapter, heads, kv_heads, rows, keys, causal):
    """mask_of is another exercise: here it hides all keys to the right of the diagonal, or none."""
    dout, q, out = random(3, 2, heads, rows, 8)
    k, v = random(2, 2, kv_heads, keys, 8)
    hidden = torch.full((rows, keys), -torch.inf, dtype=q.dtype).triu(1) if causal else None
    with mock.patch.object(chapter, "mask_of", lambda *args: hidden):
        found = chapter.plain_backward(dout, q, k, v, out, random(2, heads, rows) + 2, causal, None)
    return dict(zip(("dq", "dk", "dv"), found))


def backward_of_a_block(dout, q, k, v, out, lse, causal, low):
    """No attention, but numbers that depend on all there is."""
    dout, q, k, v, out = (x.double() for x in (dout, q, k, v, out))
    scores = (q @ k.mT + lse[..., None]).sin() * (2 if causal else 1)
    return scores @ v + out, scores.mT @ dout, scores.mT @ q + v


def ring_gradients(chapter, *hops, dtype=torch.float64):
    """By blocks of the check's own. hops: of each, its blocks, as ends of their rows and keys."""
    group = dist.group.WORLD
    q, k, v, out, dout = random(group.size(), 5, 2, 2, 6, 4).to(dtype)[group.rank()]
    blocks = [[(slice(*rows), slice(*keys), not hop, None) for rows, keys in of_hop]
              for hop, of_hop in enumerate(hops)]
    ctx = SimpleNamespace(saved_tensors=(q, k, v, out, out.sum(-1)), group=group, blocks=blocks,
                          core=SimpleNamespace(backward=backward_of_a_block),
                          needs_input_grad=(True, True, True, False, False, False))
    return dict(zip(("dq", "dk", "dv"), chapter.RingAttention.backward(ctx, dout)))


def bytes_around(chapter, *hops):
    """That this rank sends in backward, of bfloat16."""
    sent, send = [], dist.batch_isend_irecv

    def noted(operations):
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return send(operations)

    with mock.patch.object(dist, "batch_isend_irecv", noted):
        ring_gradients(chapter, *hops, dtype=torch.bfloat16)
    return sum(sent)


def around(chapter, hops):
    """What is here at each hop, by whose it was."""
    rank, group = dist.get_rank(), dist.group.WORLD
    mine = torch.full((2, 3), rank, dtype=torch.float64)
    return [(hop, kv.clone()) for hop, kv in chapter.around_the_ring(mine, group, hops)]


def exchanged_gradient(chapter, *dims):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = random(ranks, 2, 4, 8, 3)[rank].requires_grad_()
    out = chapter.Exchange.apply(x, *dims, dist.group.WORLD)
    out.backward(random(ranks, *out.shape)[rank])
    return x.grad


def attention_of_heads(chapter, heads, kv_heads):
    """By PyTorch's attention, of tokens that see each other all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    q = random(ranks, 2, heads, 3, 8)[rank]
    k, v = random(ranks, 2, 2, kv_heads, 3, 8)[rank]
    core = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with torch.no_grad():
        return chapter.exchanged_attention(q, k, v, dist.group.WORLD, core)


def step_on_parts(chapter, clip):
    """Of a model that is an embedding and a linear layer, by two ranks; the second has padding."""
    rank, model = dist.get_rank(), nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    for p in model.double().parameters():
        p.data.copy_(random(*p.shape))
        p.partial = dist.group.WORLD
    tokens, targets = torch.randint(6, (2, 2, 3, 7)).unbind()   # of two micro-batches
    targets[0, :, 2:4] = -100
    mine = torch.tensor([[0, 1, 5, 6], [2, 3, 4, -1]][rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    loss, norm = chapter.train_step(model, optimizer, [*zip(tokens, targets)], mine,
                                    int((targets >= 0).sum()), clip)
    return {"loss": loss, "norm": norm, "embedding": model[0].weight, "linear": model[1].weight}


def merged(chapter, above=0, block_above=0):
    """Of two blocks, whose log-sum-exps are about as large as `above` and `block_above`."""
    out, lse = random(2, 3, 4), random(2, 3) + above
    chapter.merge(out, lse, random(2, 3, 4), random(2, 3) + block_above)
    return {"out": out, "lse": lse}


def merged_with_nothing(chapter):
    """One of the three rows has met keys, and the two others none so far."""
    lse = torch.tensor([[0.5, -torch.inf, -torch.inf]], dtype=torch.float64)
    out = random(1, 3, 4).where(lse.isfinite()[..., None], 0)
    chapter.merge(out, lse, random(1, 3, 4), random(1, 3))
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


def ordered(chapter, *of_parts):
    """Positions that were gathered, in order. of_parts: of each its runs, (first, end)."""
    of_parts = [[torch.arange(*run) for run in runs] for runs in of_parts]
    gathered = torch.cat([run for runs in of_parts for run in runs])
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
        (Same(meeting, "meeting of part 1's queries and keys, zig-zag",
              (((2, 4), (12, 14)), ((2, 4), (12, 14)), (16,))),
         Same(meeting, "meeting of part 2's queries and part 1's keys, zig-zag",
              (((4, 6), (10, 12)), ((2, 4), (12, 14)), (16,))),
         Same(meeting, "meeting of part 1's queries and part 2's keys, zig-zag",
              (((2, 4), (12, 14)), ((4, 6), (10, 12)), (16,))),
         Same(meeting, "meeting of part 1's queries and part 2's keys, plain ring",
              (((4, 8),), ((8, 12),), (16,))),
         Same(meeting, "the same of documents of 5, 1 and 10: part 1's queries, part 0's keys",
              (((4, 5), (5, 6), (6, 8), (8, 12)), ((0, 4), (12, 16)), LENGTHS)),
         Same(meeting, "the same with a window of 3: part 1's queries, part 0's keys, plain ring",
              (((8, 11), (11, 14), (14, 16)), ((0, 8),), (16,), 3)),
         Same(meeting, "the same with a window of 3: part 1's queries and keys, plain ring",
              (((8, 11), (11, 14), (14, 16)), ((8, 16),), (16,), 3)),
         Same(meeting, "the same with a window of 1, where each token sees itself alone",
              (((2, 3), (3, 4)), ((2, 4),), (8,), 1)),
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
        (Same(gradients_of_block, "of 3 queries and 5 keys, 2 heads", (2, 2, 3, 5, False)),
         Same(gradients_of_block, "causal, of 4 queries and keys, 4 heads of q and 2 of k",
              (4, 2, 4, 4, True)),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3")),
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
         Same(merged, "the same where both lse are about 1000", (1000, 1000)),
         Same(merged, "the same where the block's lse is about 1000, and lse 0", (0, 1000)),
         Same(merged, "the same where lse is about 1000, and the block's 0", (1000, 0)),
         Same(merged_with_nothing, "two rows that have seen nothing so far, lse -inf"),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3")),
    ),
    Exercise(
        "06.5", "RingAttention.backward around_the_ring", 3,
        "Give the gradients of this rank's q, k and v. Keys and values go around the ring once "
        "more, which around_the_ring does in forward, too; their gradients follow one hop behind, "
        "in float32 or better. From the last hop, which may be an early one, a sum goes straight "
        "home: as many sends of each as there are hops.",
        ("Draw the lesson's table for three ranks. At each hop: which part of which keys' "
         "gradient is computed, what has come from the rank before, and what is sent? The "
         "first hop is different, since those keys are at home already. And with a window: how "
         "far is home?",
         "For each hop of around_the_ring, compute dkv of the keys that are here: zeros "
         "where nobody meets. At hop 0, put it aside. At later ones, add what has come "
         "from the rank before, and send the sum on, from the last hop as many ranks back as "
         "there were hops. What comes home is added to what was put aside, if there was a hop at "
         "all. dq stays, and adds up in its rows. around_the_ring starts send_on, yields what is "
         "here, and then waits for the next; after `hops` of them it yields the last, and sends "
         "nothing."),
        (Same(around, "around_the_ring of 4 ranks, over 3 hops", (3,), 4),
         Same(around, "around_the_ring of 2 ranks, over no hop", (0,), 2),
         Same(ring_gradients, "backward on 4 ranks, all of whose blocks meet",
              4 * ([((0, 6), (0, 6))],), 4),
         Same(ring_gradients, "backward on 4 ranks, over 2 hops, of the last of which some is seen",
              ([((0, 3), (0, 3)), ((3, 6), (0, 6))], [], [((1, 4), (4, 6))]), 4),
         Same(ring_gradients, "backward on 2 ranks, over no hop", ([((0, 6), (0, 6))],), 2),
         Same(bytes_around, "bytes that are sent in backward, in bfloat16, over 2 hops of 3 ranks",
              3 * ([((0, 6), (0, 6))],), 3),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
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
        (Same(exchanged_gradient, "the gradient, on 4 ranks, from heads to tokens", (1, 2), 4),
         Same(exchanged_gradient, "the gradient, on 2 ranks, from tokens to heads", (2, 1), 2),
         Run(4, "--variant ulysses --batch 6 --micro-batch 2 --ignore 0.3")),
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
        "them into the order of the sequence, without an index, which autograd would keep (bytes "
        "are counted). runs: for each part a list of its runs, which are positions.",
        ("Cut what was gathered into runs again. Which of their positions tells where a run "
         "belongs?",
         "split takes a list of lengths. Sort the numbers of the runs by the first position of "
         "each, and concatenate."),
        (Same(ordered, "positions, gathered from a zig-zag of 4 parts",
              (((0, 2), (14, 16)), ((2, 4), (12, 14)), ((4, 6), (10, 12)), ((6, 8), (8, 10)))),
         Same(ordered, "positions, gathered from a zig-zag of documents of 5, 1 and 10, 2 parts",
              (((0, 4), (12, 16)), ((4, 5), (5, 6), (6, 8), (8, 12)))),
         Same(ordered, "positions, gathered from a zig-zag of each of two documents, 2 parts",
              (((0, 2), (6, 8), (8, 12), (20, 24)), ((2, 4), (4, 6), (12, 16), (16, 20)))),
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
        (Same(attention_of_heads, "4 ranks, 8 heads of q and 8 of k", (8, 8), 4),
         Same(attention_of_heads, "4 ranks, 8 heads of q and 2 of k", (8, 2), 4),
         Run(4, "--variant ulysses --batch 6 --micro-batch 2 --ignore 0.3"),
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
        (Same(step_on_parts, "a step of two ranks, one of which has padding", (0,), 2),
         Same(step_on_parts, "the same, clipped to a norm of 0.1", (0.1,), 2),
         Run(2, "--batch 6 --micro-batch 2 --ignore 0.3 --documents 6 --cut document"),
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
