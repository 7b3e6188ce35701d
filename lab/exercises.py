"""The exercises: which functions of the chapters students write, and what checks them.

    python -m lab.exercises                     all of them, a line each
    python -m lab.exercises 04.2                one question
    python -m lab.exercises 04.2 --hint 1       and its first hint; --hint 2: both
    python -m lab.exercises --write exercises   the chapters, with holes in place of the functions
                                                (--level 1: of that level alone; --force: also
                                                over files that somebody has changed)

This table is the only place where an exercise is defined. What belongs into a hole stands in the
chapter itself. Levels: 1 is a line or two, 2 a page that one has to think about, 3 an evening.
"""

import argparse
import hashlib
import json
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

from common import Refused
from lab import cli, holes, refusals

ROOT = Path(__file__).resolve().parent.parent


class Run(NamedTuple):
    """A check: the chapter runs on so many ranks with these flags, and must match one GPU and its
    formulas in all that is compared. What the flags leave open is in SMALL."""
    ranks: int
    flags: str = ""


class Same(NamedTuple):
    """A check: an expression of the chapter's functions gives what the solution's functions give.
    It may use the names of the chapter, `tiny` (a Config) and `random(*shape)` (in float64, the
    same numbers for both). words: what is said in place of a long expression."""
    expression: str
    words: str = ""


class Exercise(NamedTuple):
    number: str             # "04.2"
    names: str              # functions or methods of the chapter: "SumOut.forward SumOut.backward"
    level: int
    question: str           # one to three plain sentences
    hints: tuple            # two, which open one after the other
    checks: tuple           # Run and Same
    title: str = ""         # if the names are not one

    @property
    def functions(self):
        return self.names.split()

    @property
    def what(self):
        return self.title or self.names


SMALL = ("--layers=2 --dim=32 --heads=4 --kv-heads=2 --seq=16 --steps=3 --dtype=float64 "
         "--optimizer=sgd --device=cpu")

EXERCISES = {
    "01_single_gpu": [
    ],
    "02_data_parallel": [
    ],
    "03_zero": [
    ],
    "04_tensor_parallel": [
        Exercise(
            "04.1", "CopyIn.backward", 1,
            "f has handed the same x to every rank, and each rank has a gradient from its own "
            "heads or hidden units alone. Give the whole gradient of x, the same on every rank.",
            ("If x goes into both y and z, how do the gradients of y and z become that of x?",
             "`gradient` is this rank's part of a sum over the ranks of ctx.group. backward gives "
             "one value for each argument of forward, and a group has no gradient."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "04.2", "SumOut.backward", 1,
            "Every rank has put a partial output into the sum. Which gradient does a rank's part "
            "of a sum have, if the gradient of the sum is on every rank?",
            ("If z = x + y, what are dz/dx and dz/dy?",
             "The gradient of the sum is already on every rank: what is left to send?"),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "04.3", "VocabParallelLoss.forward VocabParallelLoss.backward", 3,
            "Give the cross-entropy of logits of which each rank has its part of the vocabulary, "
            "summed over the valid targets, and its gradient. No exponential may overflow, and "
            "columns beyond `vocab` are padding. Bytes are counted too: send what the docstring "
            "says, and keep for backward the probabilities, the targets' columns (int64) and two "
            "masks (bool): which targets are this rank's, and which are valid.",
            ("The loss of a target needs three numbers: the largest logit, the sum of the "
             "exponentials, the target's logit. What does a rank know of each, and what must it "
             "contribute where the target is another rank's?",
             "Padding becomes -inf. One all_reduce finds the maximum, which is taken off the "
             "logits. Another one sums each rank's sum of exponentials, stacked on the target's "
             "logit, or on zero where the rank does not have it. The gradient is the probability, "
             "less 1 in the target's column on the rank that has it, and zero where the target is "
             "not valid."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --vocab 402"),  # 101, the first of
             Run(2, "--batch 2 --layers 1 --steps 2 --vocab 257 --lr 1e3")),    # a rank, is "e"
            "the vocabulary's loss",
        ),
        Exercise(
            "04.4", "CopyInColumns.backward", 2,
            "x has gone into all of the linears, and to all ranks. Give its gradient, summed over "
            "the ranks, and the gradient of each weight. The sum should be on its way while the "
            "weights' gradients are computed (the grader sees the numbers, not the time).",
            ("For y = x Wᵀ, the gradient of x is that of y times W, and the gradient of W is that "
             "of y, transposed, times x. Which of the two does another rank wait for?",
             "First add up gradient @ weight over the linears, and start the all_reduce with "
             "async_op=True. Then each weight's gradient is a matmul over all tokens of the "
             "batch. Wait for the handle before you return, None standing for the group."),
            (Run(4, "--variant overlap --batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "04.5", "train_step", 2,
            "Take one step over all micro-batches: the gradient of the mean loss over the valid "
            "targets of the whole batch, the norm of the whole model's gradient, clipping, the "
            "update. Give the loss of the whole batch, detached, and the norm before clipping.",
            ("Which gradients are still partial sums after the last backward, and which ranks "
             "hold the gradient together, of which the norm is taken?",
             "Each micro-batch divides its sum by `valid`, so the losses add up, and so do the "
             "gradients. common.py then has sum_partial_grads, for kv heads that ranks share, "
             "grad_norm, which needs the group, and clip_grads."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --kv-heads 4"),
             Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --clip 0.1")),
        ),
        Exercise(
            "04.6", "traffic", 2,
            "Count what a rank sends in a step: the all_reduces of f and g, of the loss, of the "
            "norm, and of the gradients of kv heads that ranks share. Losses and norms are in "
            "float32 or better, whatever e is. An all_reduce of n bytes over t ranks puts "
            "2 (t-1)/t · n on the wire.",
            ("How many f and g are in a block, and how many outside of the blocks? And over how "
             "many ranks are the gradients of a shared kv head summed?",
             "4 L + 2 sums of batch · seq · dim numbers in each micro-batch; two all_reduces for "
             "its loss, of one and of two numbers a token; once a step one number for the norm, "
             "unless a rank is alone. If t > kv_heads, one more, of k's and v's gradients for one "
             "head in every layer, over t / kv_heads ranks."),
            (Same("traffic(tiny, 3, 2, 2, 8)"),
             Same("traffic(tiny, 3, 2, 8, 4)"),
             Same("traffic(tiny, 1, 4, 4, 2)"),
             Same("traffic(tiny, 1, 4, 1, 2)"),
             Same("traffic(common.PRESETS['7b'], 3, 2, 8, 2)")),
        ),
        Exercise(
            "04.7", "ranks_that_pay", 1,
            "Up to how many ranks does the all_reduce of an MLP's forward take no longer than its "
            "two matrix multiplications?",
            ("Write down both times for one token, and set them equal: the batch and the sequence "
             "fall out.",
             "They are 16 h² / (t·C) and 2 (t-1)/t · h·e / W seconds. Both are divided by t, so "
             "t - 1 is what is left of it."),
            (Same("ranks_that_pay(8192, 2, 989e12, 450e9)"),
             Same("ranks_that_pay(4096, 4, 1e14, 5e10)")),
        ),
    ],
    "05_sequence_parallel": [
        Exercise(
            "05.1", "GatherIn.backward ScatterOut.backward", 1,
            "In forward, f gathers the sequence, and g sums it over the ranks and scatters it. "
            "Give the gradients of what went in: for f this rank's part of the sequence, for g "
            "all of it.",
            ("A rank's part of the sequence has gone to all ranks through f, so all of them have a "
             "gradient for it. Through g, a rank's partial output went into every rank's part.",
             "The two are conjugates: each sends in backward what the other one sends in forward."),
            (Run(4, "--variant kept --batch 6 --micro-batch 2 --ignore 0.3"),),
            "the gradients of f and g",
        ),
        Exercise(
            "05.2", "GatherInColumns.backward", 2,
            "Give the gradients of this rank's part of x, and of each weight. Nothing but this "
            "rank's part of x has been kept. Both transfers should be on their way while something "
            "is computed (the grader sees the numbers, not the time).",
            ("Which of the gradients needs the whole input, and which does without? What can be "
             "computed while the one transfer, and then the other, is on its way?",
             "Start to gather x; add up gradient @ weight over the linears; start to "
             "reduce_scatter that sum. Now wait for x: each weight's gradient is a matmul over all "
             "tokens of the batch. Wait for the other at the end."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "05.3", "ring_gather", 2,
            "Yield (rank, its chunk) for every rank of the group, beginning with this rank's own. "
            "Between two of them, one hop of the ring: the next chunk should arrive while the "
            "caller works with this one.",
            ("A generator stands still at its yield, and the caller works meanwhile. So what must "
             "have been started before the yield, and what is left for after it?",
             "Start send_on, yield the chunk that is here, wait for the next. What comes is from "
             "the rank before, so at hop h it is the chunk of rank - h, modulo t. The last chunk "
             "is only yielded."),
            (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "05.4", "ring_sum", 2,
            "Give the sum over the ranks of partial(owner) for this rank's own chunk, in t-1 hops. "
            "Each part should be computed while the sum, to which it is added, travels.",
            ("A sum that is to end here after t-1 hops has begun at the next rank. So whose sum "
             "does this rank begin?",
             "It begins that of the rank before it, and at hop h it adds to that of rank - 1 - h, "
             "modulo t. In the last hop this is its own."),
            (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "05.5", "RingColumns.forward RingColumns.backward", 3,
            "Do what GatherInColumns does, with ring_gather and ring_sum in place of the "
            "collectives: each chunk is multiplied while the next one arrives, and the gradient of "
            "x is computed chunk by chunk while the sum travels. Keep x and the weights for "
            "backward, nothing else.",
            ("In forward, the outputs of a chunk have a place in the sequence: that of its owner. "
             "In backward, which of the two gradients takes chunks of x as they come, and which is "
             "a sum over ranks?",
             "forward: for every weight a list of t outputs, filled at the owner's place, and "
             "concatenated along the sequence. backward: cut the gradients into chunks. "
             "partial(owner) adds up gradient chunk @ weight over the linears; each weight's "
             "gradient adds up gradient chunkᵀ @ x chunk, as chunks of x come around again."),
            (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),),
            "RingColumns",
        ),
        Exercise(
            "05.6", "parallelize", 2,
            "Cut every block's attention and MLP with share_kv_heads and sequence_parallel (and "
            "SUB_LAYERS), and give each parameter whose gradient is a partial sum the group over "
            "which it is to be summed, as p.partial. The group for share_kv_heads, of ranks with "
            "the same kv head, is made as in chapter 04.",
            ("A parameter's gradient is a partial sum if the rank holds all of the parameter, but "
             "sees a part of the tokens. Which parameters of the model are that?",
             "dist.new_subgroups makes groups of neighbours: of t // kv_heads ranks, or of 1. Of "
             "the LayerNorms (two in a block, and the last one), the embedding and the head, all "
             "parameters are partial: a LayerNorm has two."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "05.7", "kept", 1,
            "Which share of each class of activations does a rank keep? The classes are inside, "
            "outside, inputs (of the sub-layers), logits and ids.",
            ("Is there anything left that all ranks keep alike?",
             "Only in the variant `kept`, and there only the inputs of the sub-layers."),
            (Same("kept(4)"), Same("kept(4, 'kept')"), Same("kept(8, 'ring')")),
        ),
    ],
    "06_context_parallel": [
        Exercise(
            "06.1", "positions_of", 1,
            "Give the positions of the tokens that a rank holds, in ascending order: in a zig-zag "
            "one chunk from the front and one from the back, else a contiguous part.",
            ("Into how many chunks does a zig-zag cut the sequence, and which two are rank 0's?",
             "Of 2N chunks, a rank has the one at `rank`, and the one as far from the end."),
            (Same("positions_of(0, 4, 16, True).tolist()"),
             Same("positions_of(2, 4, 16, True).tolist()"),
             Same("positions_of(1, 3, 12, True).tolist()"),
             Same("positions_of(2, 4, 16, False).tolist()")),
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
            (Same("torch.arange(8)[meeting(2, 1, 8, True)[0]].tolist()"),
             Same("torch.arange(8)[meeting(2, 1, 8, True)[1]].tolist()"),
             Same("torch.arange(8)[meeting(1, 2, 8, True)[0]].tolist()"),
             Same("torch.arange(8)[meeting(1, 2, 8, True)[1]].tolist()"),
             Same("[meeting(1, other, 8, True)[2] for other in range(4)]"),
             Same("meeting(1, 2, 8, False)"),
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
            (Same("(lambda out, lse, *block: (merge(out, lse, *block), dict(out=out, lse=lse))[1])"
                  "(random(2, 3, 4), random(2, 3), random(2, 3, 4), random(2, 3))"),
             Same("(lambda out, lse, *block: (merge(out, lse, *block), dict(out=out, lse=lse))[1])"
                  "(random(2, 3, 4), random(2, 3) + 1000, random(2, 3, 4), random(2, 3) + 1000)"),
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
             "ring one for every earlier rank. With gathered keys a rank computes N blocks, masked "
             "or not; in Ulysses it has 1/N of the heads over N² blocks, all on the diagonal."),
            (Same("[pairs('zigzag', rank, 4, 32) for rank in range(4)]"),
             Same("[pairs('ring', rank, 4, 32) for rank in range(4)]"),
             Same("[pairs('gather', rank, 4, 32, 0.5) for rank in range(4)]"),
             Same("[pairs('ulysses', rank, 4, 32, 0.5) for rank in range(4)]"),
             Same("pairs('zigzag', 1, 8, 64, 0.5)")),
        ),
    ],
    "07_pipeline_parallel": [
    ],
    "08_expert_parallel": [
    ],
    "09_5d": [
    ],
    "kernels/elu": [
        Exercise(
            "elu.1", "chain_bytes fused_bytes", 1,
            "How many bytes go through the GPU's memory, with five operators that are a kernel "
            "each, and with one kernel for all of them? A mask has one byte for each number.",
            ("Each operator reads its inputs from memory and writes its output there. Which of "
             "the five reads or writes something else than one tensor of numbers?",
             "The comparison reads x and writes a mask. Three operators read a tensor and write "
             "one. The choice reads the mask and two tensors, and writes one. The one kernel reads "
             "x and writes y."),
            (Same("[chain_bytes(1000, width) for width in (2, 4)]"),
             Same("[fused_bytes(1000, width) for width in (2, 4)]")),
            "the bytes of a chain, and of one kernel",
        ),
        Exercise(
            "elu.2", "instruction_budget", 1,
            "At every tick of the clock each processor issues an instruction for 128 numbers. How "
            "many instructions may a kernel spend on a number before they take longer than to read "
            "it and to write it?",
            ("How many instructions does the GPU issue in a second? And how many numbers can be "
             "read and written in that second?",
             "The first is the product of processors, 128 and clock. The second is the bandwidth "
             "over the bytes that one number moves, in and out."),
            (Same("instruction_budget(2)"),
             Same("instruction_budget(4, 78, 1.4e9, 9e11)")),
        ),
        Exercise(
            "elu.3", "expm1", 2,
            "Give exp(x) - 1 of x <= 0 in float32, right to six digits, also where x is -1e-7. "
            "Triton has tl.exp, and no expm1.",
            ("exp(-1e-7) is 0.9999999, of which float32 keeps seven digits. How many are left once "
             "1 is subtracted, and which term of exp's series should not have been added at all?",
             "Near 0, add up the series without its 1: x · (1 + x · (1/2 + x · (1/6 + ...))), to "
             "so many terms that the next would not be seen. Further off, tl.exp(x) - 1 is right. "
             "tl.where chooses, number by number."),
            (Same("elu(-torch.logspace(-7, 1, 50)) / torch.expm1(-torch.logspace(-7, 1, 50))",
                  "over the right values, from x = -1e-7 to -10"),),
        ),
        Exercise(
            "elu.4", "elu_backward_kernel", 1,
            "Store the gradient of x for this program's block: dy where x > 0, and "
            "dy · alpha · exp(x) elsewhere. What is past the n-th number must be neither loaded "
            "nor stored.",
            ("How does elu_forward_kernel find its block, and how does it stop at the end?",
             "The numbers of a block begin at program_id · BLOCK. Both loads and the store take "
             "the same mask, and tl.where chooses between the two gradients."),
            (Same("(lambda dx: (elu_backward_kernel[(3,)](random(64).float(), random(64).float(), "
                  "dx, 40, 0.7, 16), dx)[1])(torch.ones(64))",
                  "of 64 numbers n = 40 are to be stored, in blocks of 16"),
             Same("elu_backward(random(5, 700).float(), 2 * random(5, 700).float(), 0.7)",
                  "x of (5, 700), alpha 0.7")),
        ),
    ],
    "kernels/layernorm": [
        Exercise(
            "layernorm.1", "forward_bytes", 1,
            "How many bytes does forward_kernel move, without and with a residual? mean and rstd "
            "are in float32. weight and bias come from memory once, and then from the cache.",
            ("What does the kernel load and store for each number of a row, for each row, and for "
             "all rows together?",
             "For a number: x and y, with a residual two more. For a row: two numbers of 4 bytes. "
             "For all rows: two vectors of dim numbers."),
            (Same("[forward_bytes(1000, 768, width) for width in (2, 4)]"),
             Same("[forward_bytes(1000, 768, width, True) for width in (2, 4)]")),
        ),
        Exercise(
            "layernorm.2", "forward_kernel", 2,
            "A program takes one row of x, and BLOCK is at least its width. Store y, mean and rstd "
            "of the row. With RESIDUAL, add the residual first and store the sum in the precision "
            "of the stream; it is this rounded sum that is normalised.",
            ("A row may be shorter than BLOCK. What do the places past its end add to the mean, "
             "and what to the variance?",
             "All loads and stores of a row take the mask, and one computes in float32. Past the "
             "end there is 0, which is right for the mean; but x - mean is not 0 there, and has to "
             "be made so before it is squared. eps stands under the root."),
            (Same("(lambda x, y, w, stats: (forward_kernel[(2,)](x, x, w, w + 1, y, y, *stats, 8, "
                  "8, 5, 0.5, False, 8), dict(y=y, mean=stats[0], rstd=stats[1]))[1])"
                  "(random(3, 8).float(), torch.ones(3, 5), random(8).float(), torch.ones(2, 2))",
                  "two rows of 5 numbers in blocks of 8, eps 0.5"),
             Same("dict(zip(('sum', 'y', 'mean', 'rstd'), layer_norm_forward(100 + random(3, 9)"
                  ".float()[:, 2:7], random(5).float(), random(5).float(), 0.5)))",
                  "three rows of 5 numbers around 100, eps 0.5"),
             Same("dict(zip(('sum', 'y', 'mean', 'rstd'), layer_norm_forward(random(3, 1000)"
                  ".bfloat16(), random(1000).bfloat16(), random(1000).bfloat16(), 0.1, "
                  "random(3, 1024).bfloat16()[:, :1000])))",
                  "rows of 1000 bfloat16 with a residual, eps 0.1")),
        ),
        Exercise(
            "layernorm.3", "backward_kernel", 3,
            "Store dx for the rows of this program, and the program's own sums over them for "
            "dweight and dbias. It takes ROWS rows at a time, all programs taking turns, and has "
            "one of PARTS parts of their columns, but the two means are those of whole rows. With "
            "RESIDUAL, the gradient of the sum is added to dx.",
            ("Two of the four sums go along a row, and two go down the columns. Which of them "
             "need numbers of other parts? And what do rows and columns past the end add to each?",
             "Walk from program · ROWS to rows, num_programs(1) · ROWS at a time. load_part gives "
             "dy, g and n of this part, and g and n of each other part, with that part's weight. "
             "The sums of g and g · n over all parts, over width, are the means. dy · n and dy are "
             "added up over the rows of this part alone, and stored behind the loop in row "
             "`program`."),
            (Same("(lambda dy, x, stats, dx, sums: (backward_kernel[(2, 2)](dy, x, x, dy[12], "
                  "*stats, dx, *sums, 21, 21, 21, 10, 21, True, 4, 16, 2, 1), {'dx': dx, "
                  "'dweight': sums[0].sum(0), 'dbias': sums[1].sum(0)})[1])"
                  "(*random(2, 14, 21).float(), random(2, 14).float(), torch.ones(14, 21), "
                  "torch.zeros(2, 4, 21))",
                  "10 rows of 21 by 2 programs of 2 parts, in blocks of 4 by 16, with a residual"),
             Same("dict(zip(('dx', 'dweight', 'dbias'), layer_norm_backward(random(150, 24)"
                  ".float()[:, 3:], random(150, 21).float(), random(21).float(), "
                  "*random(2, 150).float())))",
                  "150 rows of 21, without a residual"),
             Same("dict(zip(('dx', 'dweight', 'dbias'), layer_norm_backward(random(2, 5000)"
                  ".float(), random(2, 5000).float(), random(5000).float(), "
                  "*random(2, 2).float())))",
                  "2 rows of 5000, in two parts")),
        ),
    ],
    "kernels/flash_attention": [
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
            (Same("dict(zip(('dq', 'dk', 'dv'), reference_backward(*random(2, 2, 4, 5, 16), "
                  "*random(2, 2, 2, 7, 16), random(2, 4, 5, 16), random(2, 4, 5) + 3, True)))",
                  "causal, 5 queries, 7 keys, 2 heads for each of k"),
             Same("(lambda dout, q, k, v: dict(zip(('dq', 'dk', 'dv'), reference_backward(dout, q, "
                  "k, v, *reference_forward(q, k, v, True), True))))"
                  "(*random(2, 1, 2, 5, 16), *random(2, 1, 2, 3, 16))",
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
            (Same("[plain_bytes(1000, 3000, 64, width) for width in (2, 4)]"),
             Same("[flash_bytes(1000, 3000, 64, width) for width in (2, 4)]")),
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
            (Same("dict(zip(('out', 'lse'), flash_forward(random(1, 2, 40, 16).float(), "
                  "*random(2, 1, 1, 70, 16).float(), True)))",
                  "causal, 40 queries, 70 keys"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(1, 1, 40, 16).float(), "
                  "*random(2, 1, 1, 20, 16).float(), True)))",
                  "causal, 40 queries, 20 keys"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(1, 1, 20, 16).float(), "
                  "*random(2, 1, 1, 50, 16).float())))",
                  "not causal, 20 queries, 50 keys"),
             Same("flash_forward(*random(2, 1, 1, 48, 16).float(), random(1, 1, 48, 16).float()"
                  ".index_fill(2, torch.arange(32, 48), torch.inf), True)[0]",
                  "causal, 48 queries and keys, values infinite from key 32 on, of which "
                  "rows before 32 have no need")),
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
            (Same("dict(zip(('out', 'lse'), flash_forward(random(1, 2, 40, 16).float(), "
                  "*random(2, 1, 1, 70, 16).float(), True)))",
                  "causal, 40 queries, 70 keys"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(1, 1, 40, 16).float(), "
                  "*random(2, 1, 1, 20, 16).float(), True)))",
                  "causal, 40 queries, 20 keys"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(1, 1, 20, 16).float(), "
                  "*random(2, 1, 1, 50, 16).float())))",
                  "not causal, 20 queries, 50 keys")),
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
            (Same("dict(zip(('out', 'lse'), flash_forward(4 * random(1, 4, 24, 40).float(), "
                  "*random(2, 1, 2, 70, 40).float(), True)))",
                  "causal, 24 queries, 70 keys, 4 heads of q and 2 of k, dim 40"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(1, 1, 40, 16).float(), "
                  "*random(2, 1, 1, 20, 16).float(), True)))",
                  "causal, 40 queries, 20 keys: twenty rows see nothing"),
             Same("dict(zip(('out', 'lse'), flash_forward(200 * random(1, 1, 20, 16).float(), "
                  "random(1, 1, 1, 16).float().expand(1, 1, 50, 16), "
                  "random(1, 1, 50, 16).float())))",
                  "not causal, 20 queries, 50 keys that are the same, scores of some hundred"),
             Same("dict(zip(('out', 'lse'), flash_forward(random(2, 1, 150, 130).half(), "
                  "*random(2, 2, 1, 200, 130).half(), True)))",
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
            (Same("dict(zip(('dq', 'dk', 'dv'), flash_backward(*random(2, 1, 4, 24, 40).float(), "
                  "*random(2, 1, 2, 70, 40).float(), random(1, 4, 24, 40).float(), "
                  "random(1, 4, 24).float() + 3, True)))",
                  "causal, 24 queries, 70 keys, 4 heads of q and 2 of k, dim 40"),
             Same("(lambda dout, q, k, v: dict(zip(('dq', 'dk', 'dv'), flash_backward(dout, q, "
                  "k, v, *reference_forward(q, k, v, True), True))))"
                  "(*random(2, 1, 1, 40, 16).float(), *random(2, 1, 1, 20, 16).float())",
                  "causal, 40 queries, 20 keys: twenty rows see nothing"),
             Same("dict(zip(('dq', 'dk', 'dv'), flash_backward(*random(2, 1, 2, 20, 16).float(), "
                  "*random(2, 1, 2, 50, 16).float(), random(1, 2, 20, 16).float(), "
                  "random(1, 2, 20).float() + 3)))",
                  "not causal, 20 queries, 50 keys"),
             Same("dict(zip(('dq', 'dk', 'dv'), flash_backward(*random(2, 2, 2, 150, 16).half(), "
                  "*random(2, 2, 2, 200, 16).half(), random(2, 2, 150, 16).half(), "
                  "random(2, 2, 150).float() + 3, True)))",
                  "causal, float16, 150 queries, 200 keys, in blocks of 128 by 64, batch 2")),
            "the gradients of k and v",
        ),
    ],
}


def solution(chapter):
    return (ROOT / f"{chapter}.py").read_text(encoding="utf-8")


def short(chapter):
    """What the numbers of a chapter's exercises begin with: "04", "layernorm"."""
    name = chapter.split("/")[-1]
    return name[:2] if name[0].isdigit() else name


def chosen(words):
    """{chapter: its exercises} that words such as "04", "04.2" and "layernorm" name; no words: all.
    """
    known = {name for chapter, exercises in EXERCISES.items()
             for name in (short(chapter), *(exercise.number for exercise in exercises))}
    for word in words:
        if word not in known:
            raise Refused(f"there is no EXERCISE {word!r}; `python -m lab.exercises` lists all")
    found = {chapter: [e for e in exercises
                       if not words or e.number in words or short(chapter) in words]
             for chapter, exercises in EXERCISES.items()}
    return {chapter: exercises for chapter, exercises in found.items() if exercises}


# ------------------------------------------------------------------------------------ to write them

def with_holes(chapter, level=None):
    """The source of a chapter with a hole for every exercise, or for those of a level."""
    source = solution(chapter)
    for exercise in EXERCISES[chapter]:
        if level in (None, exercise.level):
            for name in exercise.functions:
                question = f"{exercise.number}, level {exercise.level}: {exercise.question}"
                source = holes.cut(source, name, question, f"{exercise.number}: {name}")
    return source


def write(folder, level=None, force=False):
    """Write the chapters with holes, but not over a file that somebody has changed: those are
    returned. What was written is noted in the folder, so that a change can be seen."""
    note = folder / ".written.json"
    try:
        written = json.loads(note.read_text())
    except (FileNotFoundError, ValueError):             # never written, or only in part
        written = {}
    kept = []
    for chapter in EXERCISES:
        path, text = folder / f"{chapter}.py", with_holes(chapter, level).encode()
        if path.exists() and not force:
            there = path.read_bytes()
            if there != text and digest(there) != written.get(chapter):
                kept.append(path)
                continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
        written[chapter] = digest(text)
    note.write_text(json.dumps(written, indent=1) + "\n")
    return kept


def digest(data):
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = cli.Parser("python -m lab.exercises", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--hint", type=int, choices=(1, 2), help="open so many hints")
    add("--write", type=cli.output("exercises"), metavar="FOLDER",
        help="write the chapters with holes")
    add("--level", type=int, choices=(1, 2, 3), help="exercises of this level alone")
    add("--force", action="store_true", help="write over files that were changed, too")
    args = parser.parse_args(argv)
    if args.write and args.exercise:
        raise Refused(f"EXERCISE {args.exercise[0]} means nothing beside --write, which writes all",
                      "without --write")
    if args.hint and not args.exercise:
        raise Refused(f"--hint {args.hint} means nothing without an EXERCISE", "without --hint")
    if args.force and not args.write:
        raise Refused("--force means nothing without --write", "--write exercises")
    args.chosen = chosen(args.exercise)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.write:
        return write_all(args)
    these = [e for found in args.chosen.values() for e in found if args.level in (None, e.level)]
    for exercise in these:
        print(f"{exercise.number:18}level {exercise.level}   {exercise.what}")
        if args.exercise:
            for words in (exercise.question, *exercise.hints[: args.hint or 0]):
                print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))
    return 0


def write_all(args):
    try:
        kept = write(args.write, args.level, args.force)
    except OSError as error:
        refusals.fail(f"cannot write {error.filename}: {error.strerror}")
    for path in kept:
        print(f"{path} was changed and stays as it is; --force (FORCE=1 make exercises) "
              "writes over it")
    print(f"{len(EXERCISES) - len(kept)} chapters and kernels with holes are in {args.write}")
    print(f"a question:  python -m lab.exercises 04.2      (and --hint 1, --hint 2)\n"
          f"to try it:   PYTHONPATH=. torchrun --nproc_per_node=4 {args.write}/04_tensor_parallel.py"
          f"\nto grade it: python -m lab.grade {args.write} 04.2")
    return 0


if __name__ == "__main__":
    cli.program(main)
