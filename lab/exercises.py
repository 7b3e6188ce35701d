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
    same numbers for both)."""
    expression: str


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
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --vocab 257"),),
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
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --clip 0.1"),),
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
             Same("traffic(tiny, 1, 4, 1, 2)"),
             Same("traffic(common.PRESETS['7b'], 3, 2, 8, 2)")),
        ),
        Exercise(
            "04.7", "ranks_that_pay", 1,
            "Up to how many ranks does the all_reduce of an MLP's forward take no longer than its "
            "two matrix multiplications?",
            ("Write down both times for one token, and set them equal: the batch and the sequence "
             "fall out.",
             "16 h² / (t·C) seconds against 2 (t-1)/t · h·e / W seconds: t stands below both."),
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
             "Its own keys: all, causal. Keys of an earlier rank of a zig-zag: all queries come "
             "after its front chunk, none after its back chunk. Of a later rank: only our back "
             "chunk comes after them, but after both. In a plain ring it is all or nothing."),
            (Same("[torch.arange(8)[part].tolist() for part in meeting(1, 1, 8, True)[:2]]"),
             Same("[torch.arange(8)[part].tolist() for part in meeting(2, 1, 8, True)[:2]]"),
             Same("[torch.arange(8)[part].tolist() for part in meeting(1, 2, 8, True)[:2]]"),
             Same("[torch.arange(8)[part].tolist() for part in meeting(1, 1, 8, False)[:2]]"),
             Same("[torch.arange(8)[part].tolist() for part in meeting(2, 1, 8, False)[:2]]"),
             Same("[meeting(1, other, 8, True)[2] for other in range(4)]"),
             Same("[meeting(1, other, 8, False)[2] for other in range(2)]"),
             Same("meeting(1, 2, 8, False)")),
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
            (Same("(lambda out, lse: (merge(out, lse, random(1, 2, 3, 4) + 1, "
                  "2 * random(1, 2, 3)), out, lse)[1:])(random(1, 2, 3, 4), random(1, 2, 3))"),
             Same("(lambda out, lse: (merge(out, lse, random(1, 2, 3, 4) + 1, "
                  "2 * random(1, 2, 3) + 1000), out, lse)[1:])"
                  "(random(1, 2, 3, 4), random(1, 2, 3) + 1000)"),
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
             Run(4, "--variant ring --batch 2")),
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
    ],
    "kernels/layernorm": [
    ],
    "kernels/flash_attention": [
    ],
}


def solution(chapter):
    return (ROOT / f"{chapter}.py").read_text()


def short(chapter):
    """What the numbers of a chapter's exercises begin with: "04", "layernorm"."""
    name = chapter.split("/")[-1]
    return name[:2] if name[0].isdigit() else name


def chosen(words):
    """{chapter: its exercises} that words such as "04", "04.2" and "layernorm" name; no words: all.
    """
    found = {}
    for word in words:
        these = {chapter: [e for e in exercises if word in (e.number, short(chapter))]
                 for chapter, exercises in EXERCISES.items()}
        these = {chapter: exercises for chapter, exercises in these.items() if exercises}
        if not these:
            raise Refused(f"there is no exercise {word}", "without EXERCISE")
        for chapter, exercises in these.items():
            found.setdefault(chapter, []).extend(exercises)
    return found if words else EXERCISES


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
    written = json.loads(note.read_text()) if note.exists() else {}
    changed = []
    for chapter in EXERCISES:
        path = folder / f"{chapter}.py"
        if path.exists() and not force and digest(path.read_bytes()) != written.get(chapter):
            changed.append(path)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(with_holes(chapter, level))
        written[chapter] = digest(path.read_bytes())
    note.write_text(json.dumps(written, indent=1) + "\n")
    return changed


def digest(data):
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = cli.Parser("python -m lab.exercises", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    parser.add_argument("--hint", type=int, choices=(1, 2), help="open so many hints")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the chapters with holes")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), help="holes of this level alone")
    parser.add_argument("--force", action="store_true", help="also over files that were changed")
    args = parser.parse_args(argv)
    args.chosen = chosen(args.exercise)
    return args


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    args = refusals.accepted(parse, argv, alone=True)
    if args.write:
        changed = write(args.write, args.level, args.force)
        print(f"{len(EXERCISES) - len(changed)} files with holes are in {args.write}")
        for path in changed:
            print(f"{path} was changed, and stays as it is (FORCE=1 make exercises, or --force)")
        return 0
    for exercises in args.chosen.values():
        for exercise in exercises:
            print(f"{exercise.number:20}level {exercise.level}   {exercise.what}")
            if args.exercise:
                for words in (exercise.question, *exercise.hints[: args.hint or 0]):
                    print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))
    return 0


if __name__ == "__main__":
    cli.program(main)
