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
import difflib
import hashlib
import json
import shlex
import sys
import textwrap
from typing import NamedTuple

from common import Refused
from lab import ROOT
from lab.classroom import holes
from lab.cli import commands, refusals


class Run(NamedTuple):
    """A check: the chapter runs on so many ranks with these flags, and must match its formulas and
    one GPU (00: PyTorch) in all that is compared. What a model's flags leave open is in SMALL."""
    ranks: int
    flags: str = ""


class Same(NamedTuple):
    """A check: an expression of the chapter's functions gives what the solution's functions give.
    It may use the names of the chapter, `tiny` (a Config), `random(*shape)` (in float64, the same
    numbers for both) and simulate.py. words: what is said in place of a long expression."""
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
         "--optimizer=sgd")

# A process group of one rank: what a rank alone shows of a chapter without a run.
ALONE = ("(dist.is_initialized() or dist.init_process_group('gloo', store=dist.HashStore(), "
         "rank=0, world_size=1), dist.group.WORLD)[1]")

# Chapter 08's mixture of 4 experts of width 8, with parameters that are not small.
MIXTURE = ("(lambda kind, **more: (lambda moe: ([p.data.copy_(random(*p.shape)) for p in "
           "moe.parameters()], moe.double())[1])(kind(Mixture(**vars(tiny) | {'dim': 8, 'experts': "
           "4, 'balance_weight': 0.0} | more))))")

# Chapter 09's groups, as rank 5 of 16 that are not there would have them.
GROUPS = ("(lambda args: (dist.is_initialized() or dist.init_process_group('fake', store="
          "__import__('torch.testing._internal.distributed.fake_pg', fromlist=['FakeStore'])"
          ".FakeStore(), rank=5, world_size=16), (made := make_groups(args, True)), dict(zip("
          "('axes', 'holders'), ({name: dist.get_process_group_ranks(group) for name, group in "
          "groups.items()} for groups in made)), groups_of_holders=len(set(made[1].values()))))"
          "[-1])")

# For chapter 00's collectives, (how many ranks, numbers of each one's tensor): with parts of one
# size, and of more than one, or of none.
EVEN, UNEVEN = "(3, 6), (4, 4)", "(4, 6), (5, 3), (6, 2), (2, 0), (1, 2)"
LETTERS = "in the letters of the lesson"

EXERCISES = {
    "00_collectives": [
        Exercise(
            "00.1", "Network.exchange", 1,
            "Send a tensor, receive one, or both at the same time, over self.group, and wait until "
            "that has ended, for each no longer than self.patience seconds (0: as long as it "
            "takes). Note the round in self.rounds, and before each wait in self.waits_for whose "
            "part it is: \"rank 1 to receive\", or \"rank 2 to send\".",
            ("Two ranks send to each other. If each of them waits for its send before it begins to "
             "receive, what do the two sends wait for?",
             "Make a list of dist.P2POp, of dist.isend and dist.irecv, with group= and "
             "group_peer=. dist.batch_isend_irecv begins all of them and gives a handle for each "
             "(NCCL's gives one for all): only then wait. A round is (to, bytes, source); without "
             "a send that is None and 0 bytes."),
            (Same("(lambda a, b: {'a send and a receive': simulate.posts(Network, None, 2, **a, "
                  "**b), 'a send alone': simulate.posts(Network, **a), 'a receive alone': "
                  "simulate.posts(Network, **b), 'a send without end': simulate.posts(Network, "
                  "'isend', 2, **a, **b), 'a receive without end': simulate.posts(Network, 'irecv',"
                  " 2, **a, **b)})({'send': random(4), 'to': 1}, {'receive': random(2), 'source': "
                  "2})", "what a round asks of dist"),
             Run(3)),
        ),
        Exercise(
            "00.2", "broadcast", 2,
            "Everyone's x becomes rank 0's. In each round every rank that has it sends it to one "
            "that has it not, so that log2 N rounds, rounded up, are enough for any N.",
            ("After k rounds 2**k ranks have it. If these are ranks 0 to 2**k - 1, to whom does "
             "each of them send it next, and which of them to nobody?",
             "With have = 2**k: a rank below `have` sends to rank + have, if that is below N; a "
             "rank from `have` up to 2 have - 1 receives from rank - have; the others do nothing "
             "in this round. (N-1).bit_length() is log2 N, rounded up."),
            (Same(f"simulate.has(broadcast, {EVEN})", LETTERS),
             Same(f"simulate.has(broadcast, {UNEVEN})", LETTERS), Run(5)),
        ),
        Exercise(
            "00.3", "reduce", 2,
            "Rank 0's x becomes the sum of all, in as many rounds as a broadcast has, and with "
            "memory for one more x. The others may be left with a part of the sum.",
            ("A film of the broadcast, run backwards: who sends first, and who has to wait with "
             "sending until it has received?",
             "The same ranks as in broadcast, from the last round to the first, and each message "
             "the other way: who got x sends it, and who sent it receives into another tensor, "
             "which is added to x in place."),
            (Same(f"simulate.has(reduce, {EVEN}, given=given)", LETTERS),
             Same(f"simulate.has(reduce, {UNEVEN}, given=given)", LETTERS), Run(5)),
        ),
        Exercise(
            "00.4", "scatter gather", 1,
            "`scatter`: everyone's own part of x becomes rank 0's. `gather`: each part of rank 0's "
            "x becomes that of the rank whose own part it is. Rank 0 sends, or receives, one part "
            "after the other.",
            ("A part is a view into x. Where do you receive it, so that nothing is left to copy?",
             "x.tensor_split(N) gives the parts, also where N does not divide x. In scatter, rank "
             "0 sends part r to rank r, which receives it into its own part r; in gather the other "
             "way round."),
            (Same(f"{{'scatter': simulate.has(scatter, {EVEN}), 'gather': simulate.has(gather, "
                  f"{EVEN})}}", LETTERS),
             Same(f"{{'scatter': simulate.has(scatter, {UNEVEN}), 'gather': simulate.has(gather, "
                  f"{UNEVEN})}}", LETTERS), Run(3)),
        ),
        Exercise(
            "00.5", "all_gather", 2,
            "Each part of everyone's x becomes that of the rank whose own part it is. In a ring: "
            "in each of N-1 rounds every rank sends one part to its right and receives one from "
            "its left, rank + 1 and rank - 1.",
            ("In the first round you send your own part. Which one do you send in the second "
             "round, so that it comes all the way around?",
             "What came in one round is sent in the next. So in round `hop`, from 0, a rank sends "
             "part rank - hop and receives part rank - 1 - hop, all modulo N, in one exchange."),
            (Same(f"simulate.has(all_gather, {EVEN})", LETTERS),
             Same(f"simulate.has(all_gather, {UNEVEN})", LETTERS), Run(5)),
        ),
        Exercise(
            "00.6", "reduce_scatter", 2,
            "Everyone's own part of x becomes the sum of all. In a ring of N-1 rounds: a partial "
            "sum goes to the right, and each rank adds its own numbers to it. It takes memory for "
            "one more part, and may leave partial sums in the other parts.",
            ("The sum of part r is to end at rank r, after N-1 hops to the right, and each rank on "
             "the way adds its numbers. At which rank does it begin, and so which part does a rank "
             "send in the first round?",
             "It begins at rank r + 1. So in round `hop`, from 1, a rank sends part rank - hop, "
             "and what it receives is for part rank - 1 - hop, modulo N: it is received into a "
             "tensor of that part's size, and added in place. Parts are not all of one size."),
            (Same(f"simulate.has(reduce_scatter, {EVEN}, given=given)", LETTERS),
             Same(f"simulate.has(reduce_scatter, {UNEVEN}, given=given)", LETTERS), Run(5)),
        ),
        Exercise(
            "00.7", "all_to_all", 2,
            "Part r of x goes to rank r. Return what this rank gets, in the order of the senders, "
            "in a tensor of its own; x stays as it was. In N-1 rounds each rank sends one part and "
            "receives one.",
            ("If all send to rank 0 first, it is busy and the others wait. How do you pick whom to "
             "send to, so that in each round every rank gets one part?",
             "In round d, from 1, a rank sends to rank + d and receives from rank - d, modulo N. "
             "What comes has the size of its own part, whoever it is from. Its own part it "
             "copies."),
            (Same(f"simulate.has(all_to_all, {EVEN})", LETTERS),
             Same(f"simulate.has(all_to_all, {UNEVEN})", LETTERS), Run(3)),
        ),
        Exercise(
            "00.8", "barrier", 2,
            "A barrier ends on no rank before it has begun on all. In log2 N rounds, rounded up, "
            "each rank sends one byte on x's device to another one, and so tells what it has heard "
            "of.",
            ("Who has heard of the rank to its left tells that to the right. How many have you "
             "heard of after two rounds, and from how far away must the next byte come to double "
             "that?",
             "In round k, from 0, a rank sends to rank + 2**k and receives from rank - 2**k, "
             "modulo N, in one exchange, from and into different bytes of dtype torch.uint8."),
            (Same("simulate.hears(barrier, 3, 4, 5, 6, 2, 1)", "who has heard of whom"), Run(5)),
        ),
        Exercise(
            "00.9", "all_reduce_naive all_reduce_tree all_reduce_ring", 1,
            "Everyone's x becomes the sum of all, three times. Naive: rank 0 gathers all, adds "
            "them up in the order of the ranks, and broadcasts. Tree and ring: two of the "
            "collectives above, one after the other.",
            ("What has each rank after a reduce_scatter, and which collective begins with that?",
             "Tree: reduce, broadcast. Ring: reduce_scatter, all_gather. Naive: gather needs a "
             "tensor of N parts, each as large as x, in which a rank's own part is its x; rank 0's "
             "own x is the first addend already."),
            (Same(f"{{f.__name__: simulate.has(f, {EVEN}) for f in (all_reduce_naive, "
                  "all_reduce_tree, all_reduce_ring)}", LETTERS),
             Same(f"{{f.__name__: simulate.has(f, {UNEVEN}) for f in (all_reduce_naive, "
                  "all_reduce_tree, all_reduce_ring)}", LETTERS), Run(5)),
            "all_reduce: naive, tree and ring",
        ),
        Exercise(
            "00.10", "all_reduce_doubling", 2,
            "Let halve_and_double do it among the first ranks, as many as the largest power of 2. "
            "Each rank beyond first adds its x to that of a partner among them, and gets the sum "
            "in the end.",
            ("With 6 ranks there are 2 beyond. Who are their partners, and who has none?",
             "With power = 2**k <= N, rank r's partner is r + power, if there is such a rank. "
             "halve_and_double(net, x, power // 2) is called by the first `power` ranks alone, "
             "between the two messages."),
            (Same(f"simulate.has(all_reduce_doubling, {EVEN})", LETTERS),
             Same(f"simulate.has(all_reduce_doubling, {UNEVEN})", LETTERS), Run(6)),
        ),
        Exercise(
            "00.11", "halve_and_double", 3,
            "Swap halves of x with the rank `distance` away, so that each of the two has the sum "
            "of both for one half; do the same with that half, at half the distance, until the "
            "distance is 0. Then the same swaps backwards, of sums.",
            ("Between the swap of addends and the swap of sums, whose turn is it? And which half "
             "does the rank with the higher number keep?",
             "The partner is rank ^ distance. Split x in two views, `keep` and `give`, the other "
             "way round on the higher of the two. Swap `give` for an addend of `keep`; call "
             "halve_and_double on `keep`; swap `keep` for `give`. At distance 0 there is nothing "
             "to do."),
            (Same("simulate.has(lambda net, x: halve_and_double(net, x, net.ranks // 2), (2, 4), "
                  "(4, 8))", LETTERS),
             Same(f"simulate.has(all_reduce_doubling, {UNEVEN})", LETTERS), Run(6)),
        ),
        Exercise(
            "00.12", "round_bytes seconds sent", 2,
            "`round_bytes`: the bytes of the largest message in each round of a collective on n "
            "ranks. `seconds`: what it takes by the α-β model, in which rounds follow one another. "
            "`sent`: the bytes that all ranks together send.",
            ("The lesson has a table of the rounds and of the bytes in a row. Which collectives "
             "send all of x in every round, which a part, and which another half each time?",
             "Tree: log2 N rounds, rounded up, of `size` bytes. Ring, scatter, gather and "
             "all_to_all: N-1 rounds of size / N. Naive: gathers whole x. Doubling: size/2, "
             "size/4, ... and back, with one more round of `size` before and after where N is no "
             "power of 2. For `sent`, count how often a number leaves a rank."),
            (Same("{f'{name} on {n} ranks': round_bytes(name, n, 120 * n) for n in (3, 4, 6, 1) "
                  "for name in BY_HAND}", "the bytes of each round"),
             Same("{f'{name} on {n} ranks': seconds(name, n, 120 * n, 5e-6, 1e9) for n in (3, 4, 6,"
                  " 1) for name in BY_HAND}", "seconds, of 120 bytes a part, 5 µs and 1 GB/s"),
             Same("{f'{name} on {n} ranks': sent(name, n, 120 * n) for n in (3, 4, 6, 1) for name "
                  "in BY_HAND}", "sent, of 120 bytes a part"), Run(6)),
            "rounds, bytes and seconds",
        ),
    ],
    "01_single_gpu": [
        Exercise(
            "01.1", "choose_core logits_of", 2,
            "`choose_core`: put the attention that is asked for into each block, as its core; with "
            "recompute \"selective\", nothing of a core is kept for backward but q, k and v. "
            "`logits_of`: walk the tokens through the list of modules; with \"full\", nothing of a "
            "block is kept but its input.",
            ("`recomputed` keeps the inputs of a function, and calls it once more in backward. "
             "Which function is that in each of the two cases?",
             "In `full` it is the block, called on x. In `selective` it is the core: what is put "
             "into block.attn.core then takes q, k and v, and hands them to the core by way of "
             "`recomputed`."),
            (Run(1, "--layers 1 --dim 16 --batch 6 --micro-batch 2 --recompute full"),
             Run(1, "--layers 1 --dim 16 --batch 6 --micro-batch 2 --recompute selective")),
            "the forward, with what is recomputed",
        ),
        Exercise(
            "01.2", "accumulate", 1,
            "Go forward and backward with each micro-batch, so that the gradients add up to that "
            "of the mean loss over all valid targets of the batch. Give that mean loss, detached "
            "from its graph.",
            ("One micro-batch has 100 valid targets, another one has 50. By what must the sum of "
             "each be divided, so that every target counts 1/150?",
             "By `valid`, in all of them alike. Then the losses add up to that of the batch. The "
             "gradients add up in p.grad by themselves, if each loss goes into `backward`."),
            (Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --ignore 0.3"),
             Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision fp16 --loss-scale 4096 --clip 0.1"),
             Same("(lambda w: {'requires_grad': accumulate(lambda tokens: w[tokens], "
                  "2 * [(torch.ones(1, 2, dtype=int), torch.ones(1, 2, dtype=int))], 4)"
                  ".requires_grad})(random(3, 3).requires_grad_())", "the loss that is returned")),
        ),
        Exercise(
            "01.3", "MasterWeights.accumulate MasterWeights.add_to_masters MasterWeights.step", 3,
            "With fp32_grads, `accumulate` adds the gradients of a micro-batch to fp32 sums, which "
            "are the masters', and sets them to zero. `step` updates the masters with `factor` "
            "times the sums, and rounds them to the model's parameters. Without fp32_grads, "
            "gradients exist in fp32 during `step` alone.",
            ("There are two lists of parameters. Which of them does backward fill with gradients, "
             "which does self.optimizer know, and which does forward read? Something must be "
             "carried over each time.",
             "add_to_masters gives a master an fp32 copy of the gradient, or adds to what it has. "
             "The next backward would add to what is not set to zero. "
             "Without fp32_grads, `step` begins with add_to_masters, and ends by taking the "
             "masters' gradients away. Keep `factor` in self.factor, for named_masters; and some "
             "parameters may have no gradient."),
            (Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision bf16-fp32grad"),
             Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision fp16 --loss-scale 4096 --clip 0.1")),
            "MasterWeights: what a step does",
        ),
        Exercise(
            "01.4", "LossScale.update", 1,
            "An overflow halves the scale. `patience` good steps in a row double it, and as many "
            "more double it again.",
            ("What does an overflow do to the number of good steps in a row?",
             "self.good counts them, and an overflow sets it back to zero. Zero is a multiple of "
             "patience, too, but no reason to double."),
            (Same("(lambda scale: {f'step {i}': (scale.update(letter == 'o'), scale.value)[1] "
                  "for i, letter in enumerate('ggogggggg', 1)})(LossScale(64.0, 3))",
                  "64, patience 3, good (g) and overflowing (o) steps ggogggggg"),
             Same("(lambda scale: {f'step {i}': (scale.update(letter == 'o'), scale.value)[1] "
                  "for i, letter in enumerate('goggog', 1)})(LossScale(64.0, 2))",
                  "64, patience 2, steps goggog")),
        ),
        Exercise(
            "01.5", "mixed_step", 2,
            "Take a step in which backward works on the loss times the scale, so that small "
            "gradients survive 16 bits. The loss and the norm (before clipping) that are returned, "
            "and the update, must not show the scale. If a gradient has overflowed, nothing is "
            "updated, and the scale is told.",
            ("`accumulate` takes a function that goes backward from a loss: what is to happen to "
             "the loss before, and to the gradients after? And which of your numbers have the "
             "scale in them?",
             "Multiply the loss, go backward, and let the masters accumulate. masters.norm() is "
             "too large by the scale. masters.step multiplies by one number: what is left after "
             "clipping by the true norm, over the scale. A gradient has overflowed if the norm is "
             "not finite. Without a scale (bf16) that is 1, and every step is taken."),
            (Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision fp16 --loss-scale 4096 --clip 0.1"),
             Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision fp16 --loss-scale 524288 --clip 2 --steps 6"),
             Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                    "--precision bf16-fp32grad"),
             Same("(lambda model, batch: (mixed_step(MasterWeights(model, lambda p: "
                  "torch.optim.SGD(p, 9), torch.float16), LossScale(64.0, 1), model, [batch], 8, "
                  "None), model.head.norm.bias)[1])(gpt(common.Config(1, 8, 2, 2, 8, 8)), "
                  "2 * [torch.arange(8)[None]])",
                  "the update of head.norm.bias in a step after which the scale doubles")),
        ),
        Exercise(
            "01.6", "kept_for_backward", 2,
            "List (words, how many numbers, class) of what a block keeps, in outside, inputs, "
            "inside, keys and values, core. Then of what is kept around all blocks: RoPE's cos and "
            "sin (positions), what the last norm reads and gives (outside), log-probabilities and "
            "a scalar (logits), tokens and targets (ids). The words are yours.",
            ("Walk through Block.forward, and ask of each operator what its backward reads. The "
             "lesson says it of each of them. A sum reads nothing, and what two operators read is "
             "kept once.",
             "Let x be batch · seq · dim. A norm keeps x and two numbers for each token, outside; "
             "what it gives is x, an input. Inside are q (turned by RoPE), the input of o, and "
             "what goes into GELU and comes out, 4 x each. k and v have kv_heads / heads of x "
             "each. The core keeps softmax's output: seq weights for each token and head. cos and "
             "sin have half of head_dim for each position."),
            (Same("(lambda part: {kind: sum(n for _, n, k in part if k == kind) for _, _, kind "
                  "in part})(kept_for_backward(tiny, 3)[0])", "a block, by class"),
             Same("(lambda part: {kind: sum(n for _, n, k in part if k == kind) for _, _, kind "
                  "in part})(kept_for_backward(tiny, 3)[1])", "around the blocks, by class"),
             Same("[sum(n for _, n, _ in part) for part in kept_for_backward("
                  "common.PRESETS['7b'], 1)]", "all of a block, and around the blocks")),
        ),
        Exercise(
            "01.7", "step_flops", 2,
            "Count a step's FLOPs: forward, backward, and what is recomputed. In backward, sdpa "
            "computes q @ k.T once more, triton that and dout @ v.T. With early_stop, a recompute "
            "leaves out its last matmul: down in full; weights @ v in selective, if attention is "
            "plain.",
            ("A matmul of (m, k) by (k, n) takes 2mkn. Which matmuls of a block multiply by "
             "weights, and which multiply activations with each other?",
             "The linears take 2 FLOPs per weight and token. The core has two matmuls of 2 · seq "
             "· dim for each token, masked or not. Backward takes twice a forward's; of the core's "
             "matmuls that are 4, sdpa's 5, triton's 7. Full adds a forward of the block, "
             "selective one of the core. The head, outside of the blocks, takes a forward's three "
             "times."),
            (Same("(lambda f: {'the head': f(0, 2, 16), 'what all linears take': 2 * f(1, 2, 16) "
                  "- f(1, 1, 32), 'the core': f(1, 1, 32) - f(1, 2, 16)})(lambda layers, batch, "
                  "seq: step_flops(common.Config(layers, 64, 8, 4, seq, 99 * (layers == 0)), batch,"
                  " 'plain', 'none'))", "plain attention, nothing recomputed"),
             Same("{again: step_flops(tiny, 3, 'plain', again) for again in ('selective', 'full')}",
                  "plain attention"),
             Same("{attention: step_flops(tiny, 3, attention, 'none') for attention in "
                  "('plain', 'sdpa', 'triton')}", "nothing recomputed"),
             Same("{f'{attention}, {again}': step_flops(tiny, 3, attention, again, True) for "
                  "attention in ('plain', 'sdpa', 'triton') for again in "
                  "('none', 'selective', 'full')}", "with early_stop")),
        ),
    ],
    "02_data_parallel": [
        Exercise(
            "02.1", "Naive.finish", 1,
            "After the last backward of a step: make the .grad of every trained parameter the sum "
            "over all ranks. What a rank did not use counts as zero.",
            ("Each rank has divided its loss by the valid targets of the whole batch. What is left "
             "to be done with the gradients?",
             "One all_reduce for each of self.trained, over self.group, and no division. Where a "
             "rank has None for a gradient, the other ranks wait for it all the same, so it takes "
             "part with zeros."),
            (Run(4, "--variant naive --batch 12 --micro-batch 1 --ignore 0.3"),
             Same("(lambda m, group: (r := Naive(m, group), m[0](torch.ones(2)).sum().backward(), "
                  "r.finish(), {f'grad of {name}': p.grad for name, p in m.named_parameters()})[-1]"
                  f")(nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1)), {ALONE})",
                  "where 1.weight and 1.bias are not used")),
        ),
        Exercise(
            "02.2", "Overlap.start_full_buckets Overlap.finish", 2,
            "Start the all_reduce of each bucket as soon as it is full, but in the same order on "
            "all ranks: a bucket waits for those before it. `finish` starts those that are left "
            "over, whatever is missing in them, waits for all, and leaves everything as it was "
            "before the step.",
            ("A bucket that has been started has a handle. So which bucket is the next one, and "
             "when must you stop, even if a later one is full?",
             "Begin at the bucket that has no handle yet, and stop at the first that is not wholly "
             "in self.ready. Each all_reduce takes self.payload(i), with async_op=True. In "
             "`finish` all of self.trained counts as ready. After the waiting both `ready` and "
             "`handles` are empty again."),
            (Same("(lambda r: {f'bucket {i}': (r.gradient_is_ready(r.trained[i]), len(r.handles))"
                  f"[1] for i in (2, 0, 1, 4)}})(Overlap(nn.ParameterList([torch.ones(3)] * 5), "
                  f"{ALONE}))", "all_reduces under way, once the gradient is ready that fills"),
             Same("(lambda r, seen: (r.gradient_is_ready(r.trained[0]), r.handles.__setitem__(0, "
                  "type('Handle', (), {'wait': lambda self: seen.append(0)})()), r.finish(), "
                  "{'waiting for bucket 0': len(seen), 'len(handles)': len(r.handles), "
                  "'len(ready)': len(r.ready), 'grad': [p.grad for p in r.trained]})[-1])"
                  f"(Overlap(nn.ParameterList([torch.ones(3)] * 2), {ALONE}), [])",
                  "after `finish`, without a gradient in bucket 1"),
             Run(4, "--variant overlap --batch 12 --micro-batch 1 --ignore 0.3")),
            "Overlap: the order, and the end",
        ),
        Exercise(
            "02.3", "fill_buckets", 1,
            "Put the parameters into buckets, in their order. A bucket takes parameters of one "
            "dtype, until it has `capacity` bytes or more.",
            ("When is it known that a bucket is full: once a parameter is in it, or once the next "
             "one comes?",
             "Only the last bucket can still take one. When a parameter comes, begin a new bucket "
             "if the last one has `capacity` bytes already, or holds another dtype. An empty "
             "bucket is never full, even if capacity is 0."),
            (Same("' | '.join(' '.join(str(p.nbytes) for p in bucket) for bucket in fill_buckets("
                  "[torch.zeros(n) for n in (3, 5, 9, 1, 1, 20, 2)], 32))",
                  "12, 20, 36, 4, 4, 80 and 8 bytes, capacity 32"),
             Same("' | '.join(' '.join(str(p.nbytes) for p in bucket) for bucket in fill_buckets("
                  "[torch.zeros(1, dtype=d) for d in (torch.float64, torch.float32, torch.float32, "
                  "torch.float64)], 100))", "8 bytes, 4, 4 and 8, of two dtypes, capacity 100"),
             Same("' | '.join(' '.join(str(p.nbytes) for p in bucket) for bucket in fill_buckets("
                  "[torch.zeros(n) for n in (1, 2, 3)], 0))", "4, 8 and 12 bytes, capacity 0")),
        ),
        Exercise(
            "02.4", "Bucket.__init__ Bucket.move_in Bucket.gradient_is_ready Bucket.payload", 3,
            "Give each bucket one flat tensor, which an all_reduce sums. When p's gradient is "
            "ready, it moves there, and p.grad becomes a view of its place, so that the next "
            "micro-batch is added there and the sum needs no unpacking. What a rank did not use "
            "counts as zero.",
            ("A step begins with p.grad = None, so the first backward makes a tensor of its own. "
             "What has happened to p.grad by the time of the second backward, and what does that "
             "one have to move?",
             "__init__ fills buckets as fill_buckets says, and makes for each a flat tensor of "
             "zeros, and for each parameter a view of its part, in its shape. When a gradient is "
             "ready, it is copied into the view, unless it is the view, which becomes p.grad; "
             "then Overlap's own gradient_is_ready goes on. payload(i) is the flat tensor, in "
             "which the place of an unused parameter is zero, and not the last step's sum."),
            (Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --bucket-mb 0.1"),
             Same("(lambda m, group: (r := Bucket(m, group, 12), r(torch.ones(2)).sum().backward(),"
                  " r.finish(), r.zero_grad(), m[1](torch.ones(2)).sum().backward(), "
                  "n := len(r.handles), r.finish(), {'all_reduces under way in backward': n} | "
                  "{f'grad of {name}': p.grad for name, p in m.named_parameters()})[-1])"
                  f"(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), {ALONE})",
                  "a second step, which does not use 0.weight and 0.bias")),
            "Bucket",
        ),
        Exercise(
            "02.5", "train_step", 2,
            "Take a step on this rank's micro-batches, with the gradient of the mean over the "
            "valid targets of the whole global batch, which is sent once. Give this rank's part of "
            "that mean loss, detached, and the norm before clipping.",
            ("What is divided by what, so that a target counts the same on whichever rank and in "
             "whichever micro-batch it is? And which backward may send?",
             "Every sum of losses is divided by `valid`, and nothing is divided after that. "
             "replica.sends is True for the last micro-batch alone, and is set before it begins. "
             "The norm, clipping and the update come after `finish`."),
            (Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --bucket-mb 0.1"),
             Run(2, "--batch 12 --micro-batch 2 --ignore 0.3 --clip 0.1 --variant naive"),
             Same("(lambda m, seen: {'loss.requires_grad': train_step(type('Seen', (Overlap,), "
                  "{'finish': lambda self: (seen.append(len(self.handles)), Overlap.finish(self))})"
                  f"(m, {ALONE}), torch.optim.SGD(m.parameters(), 1), "
                  "2 * [2 * [torch.arange(8)[None]]], 16, None)[0].requires_grad, "
                  "'all_reduces under way before `finish`': sum(seen)})"
                  "(gpt(common.Config(1, 8, 2, 2, 8, 8)), [])", "two micro-batches")),
        ),
        Exercise(
            "02.6", "wire_bytes", 1,
            "How many bytes does one of N ranks send, when they all_reduce a tensor of `payload` "
            "bytes in a ring?",
            ("The tensor is cut into N chunks. How many hops does a chunk need to meet all ranks?",
             "N-1 hops for the sum, and N-1 for the sum to get everywhere; in each hop a rank "
             "sends one chunk."),
            (Same("{f'wire_bytes(1000, {n})': wire_bytes(1000, n) for n in (1, 2, 4, 8)}",
                  "in a ring"),),
        ),
        Exercise(
            "02.7", "communication_over_backward tokens_to_hide", 1,
            "How long does the all_reduce take, as a multiple of the time of the backward that it "
            "hides behind? And from how many tokens on is that at most 1?",
            ("Each time is an amount over a rate. How many FLOPs does backward take for each "
             "parameter and token, and how many bytes go on the wire?",
             "Backward takes 4 FLOPs, for two matmuls. Set the two times equal, with "
             "bytes_per_gradient · parameters bytes of gradients, and solve for the tokens: the "
             "parameters cancel."),
            (Same("communication_over_backward(4e9, 1e9, 2048, 8, 989e12, 450e9)"),
             Same("{f'tokens_to_hide(2, {n}, ...)': tokens_to_hide(2, n, 989e12, 450e9) "
                  "for n in (1, 2, 8)}", "989 TFLOP/s and 450 GB/s"),
             Same("tokens_to_hide(4, 8, 989e12, 450e9)")),
            "when the all_reduce hides",
        ),
    ],
    "03_zero": [
        Exercise(
            "03.1", "Unit.views Unit.make_room_for_gradients", 1,
            "`views` gives views into a flat tensor, in the shapes of self.parameters; the last "
            "self.padding numbers belong to none. `make_room_for_gradients` makes every p.grad so "
            "a view into self.gradients, a new flat tensor of zeros.",
            ("What is written into a parameter must be seen in the flat tensor, and the other way "
             "round. Which operations of a tensor give a view, and which a copy?",
             "views: split the tensor into the numbers of each parameter and the padding, leave "
             "that one out, and view each piece in its shape. Room: as many zeros as self.full has "
             "numbers. A parameter that has a gradient already (a tied table) keeps its numbers."),
            (Run(3, "--layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
             Run(2, "--variant zero2 --preset gpt2 --layers 1 --dim 32 --heads 4 --kv-heads 2 "
                    "--seq 16 --vocab 256 --attention plain --batch 4 --verify")),
            "views and room",
        ),
        Exercise(
            "03.2", "Unit.start_reduce Unit.finish_reduce", 2,
            "Start to sum self.gradients over the ranks, in the dtype shard.grad_dtype, so that "
            "each rank gets its shard of the sum; and let go of them, and of the parameters' own. "
            "`finish_reduce` waits, and adds what has come to the sum of the micro-batches before, "
            "in shard.grad.",
            ("What is sent, and what is received into, must live until the transfer has ended. "
             "Where do you keep them meanwhile? And what is in shard.grad before a step's first "
             "micro-batch?",
             "common.reduce_scatter takes where the sum goes, a new tensor in the shard's shape, "
             "what is sent, group= and async_op=True, and gives a handle to wait for. shard.grad "
             "is None, or a sum that is added to. Afterwards nothing needs to be kept."),
            (Run(4, "--variant zero2 --batch 12 --micro-batch 1 --ignore 0.3"),
             Run(3, "--variant zero2 --layers 1 --batch 15 --micro-batch 1 --dtype float32 "
                    "--precision bf16 --reduce-fp32 --offload")),
            "Unit: the reduction",
        ),
        Exercise(
            "03.3", "gather", 1,
            "Start the gathers of the first of these units and of the next `ahead` ones, but not "
            "of those that are gathered already or on their way. Then wait for the first unit's.",
            ("What tells a unit that is gathered, or about to be, from one that was freed?",
             "free() leaves `full` no memory, and start_gather gives it all of it at once: ask "
             "its untyped_storage() for its nbytes(). Of the first unit, finish_gather waits, if "
             "there is something to wait for."),
            (Same("(lambda said: (gather([argparse.Namespace(full=torch.zeros(int(i == 1)), "
                  "start_gather=lambda i=i: said.append(f'start {i}'), "
                  "finish_gather=lambda i=i: said.append(f'wait {i}')) for i in range(4)], 2), "
                  "', '.join(said))[1])([])",
                  "what is called with ahead 2, if of units 0, 1, 2 and 3 unit 1 is gathered"),
             Run(4, "--batch 12 --micro-batch 1 --ignore 0.3 --prefetch 2")),
        ),
        Exercise(
            "03.4", "Masters.step", 2,
            "Update the masters with the summed gradients of the shards, and the shards from the "
            "masters.",
            ("Which tensors does the optimizer know, and where are the gradients? Follow a number "
             "through all of them, with bf16 and on the CPU.",
             "A master's gradient is that of its shard, on the master's device and in its dtype. "
             "After self.optimizer's step the masters need no gradients, and each is copied into "
             "its shard, which rounds."),
            (Run(4, "--variant zero1 --batch 12 --micro-batch 1 --ignore 0.3 --offload"),
             Run(3, "--variant zero2 --layers 1 --batch 15 --micro-batch 1 --dtype float32 "
                    "--precision bf16 --reduce-fp32 --offload"),
             Run(3, "--layers 1 --batch 15 --micro-batch 1 --dtype float32 --precision bf16")),
        ),
        Exercise(
            "03.5", "zero3_step", 3,
            "Take a step of stage 3: each unit is gathered for its forward and for its backward, "
            "with the next ones under way, is freed in between (unless keep_gathered), and is "
            "reduced after its backward. Give this rank's part of the loss, and the norm of the "
            "whole gradient.",
            ("Each module computes from a detached input, so each has a graph of its own. What do "
             "you keep of every module in forward, and where does the gradient come from with "
             "which its backward begins? zero2_step does the same without gathers.",
             "Keep each module's input and output; the tokens alone have no gradient. From the "
             "loss to the logits, then down the list: make room for the unit's gradients, and the "
             "output's backward gives the input's gradient, which is the next output's. Free a "
             "unit before you start to reduce it, and finish that after the next unit's backward. "
             "Once a step the replicas sum shard.grad; then `update`."),
            (Run(3, "--layers 1 --batch 15 --micro-batch 1 --ignore 0.3"),
             Run(4, "--variant hsdp --shard-size 2 --batch 12 --micro-batch 1 --ignore 0.3 "
                    "--keep-gathered --clip 0.1")),
        ),
        Exercise(
            "03.6", "quantize dequantize", 2,
            "`quantize` gives x as int8, and for every BLOCK numbers of a row a float32 scale, so "
            "that the largest magnitude of a block is 127; a scale is never zero. A row may end "
            "within a block. `dequantize` is the way back.",
            ("How far apart are the numbers that a block can represent, if its largest is to be "
             "127 of them away from zero? And what is 0 / 0?",
             "The scale is the largest magnitude over 127, and at least something tiny. Pad the "
             "rows with zeros to whole blocks, divide each block by its scale, round (int8 alone "
             "would cut off), and take the padding away. Back: each number times the scale of its "
             "block."),
            (Same("dict(zip(('numbers', 'scales'), quantize(random(3, 600))))",
                  "3 rows of 600 numbers"),
             Same("(lambda numbers, scales: {'numbers': numbers, 'that all scales are above zero': "
                  "bool((scales > 0).all())})(*quantize(torch.zeros(2, 256)))", "256 zeros"),
             Same("(lambda x: dequantize(*quantize(x)) - x)(1000 * random(2, 2, 300))",
                  "there and back, the error")),
            "int8 and scales",
        ),
        Exercise(
            "03.7", "traffic", 2,
            "Count what a rank sends in a step of each stage, from padded_sizes(cfg, n). Beside "
            "the units it is one number for the norm, in float32 or better, unless a rank is "
            "alone, and with replicas an all_reduce of each unit's shard of gradients.",
            ("How often in a step does each stage reduce a unit, and how often does it gather one? "
             "The lesson's table has the sums.",
             "Stage 1 reduces once, the others after every backward. Stages 1 and 2 gather once, "
             "after the update; stage 3 twice in each micro-batch, or once if it keeps what it "
             "has. Gathers send parameters, of widths[0] bytes, reductions gradients, of "
             "widths[1]. On the wire it is (n-1)/n of the payload, twice that for an all_reduce."),
            (Same("traffic(tiny, 1, 4, 3)", "stage 1, 4 ranks, 3 micro-batches"),
             Same("traffic(tiny, 2, 4, 3)", "stage 2, 4 ranks, 3 micro-batches"),
             Same("traffic(tiny, 3, 4, 3)", "stage 3, 4 ranks, 3 micro-batches"),
             Same("traffic(tiny, 3, 3, 5, (2, 4), keep_gathered=True)",
                  "stage 3, 3 ranks, 5 micro-batches, widths (2, 4), kept gathered"),
             Same("traffic(tiny, 2, 8, 1, (2, 2), replicas=2)",
                  "stage 2, 2 groups of 8 ranks, 1 micro-batch, widths (2, 2)"),
             Same("traffic(tiny, 3, 1, 1, (8, 8), replicas=4)",
                  "stage 3, 4 groups of 1 rank, 1 micro-batch, widths (8, 8)")),
        ),
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
             "grad_norm, which needs the group; PyTorch has clip_grads_with_norm_."),
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
            "Give the sum over the ranks of part_of(owner) for this rank's own chunk, in t-1 hops. "
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
             "part_of(owner) adds up gradient chunk @ weight over the linears; each weight's "
             "gradient adds up gradient chunkᵀ @ x chunk, as chunks of x come around again."),
            (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),),
            "RingColumns",
        ),
        Exercise(
            "05.6", "parallelize", 2,
            "Cut every block's attention and MLP with share_kv_heads and sequence_parallel (and "
            "SUB_LAYERS), and give each parameter whose gradient is a partial sum the group over "
            "which it is to be summed, as p.partial. The group for share_kv_heads, of ranks with "
            "the same kv head, is made as in chapter 04: if there are more ranks than kv heads.",
            ("A parameter's gradient is a partial sum if the rank holds all of the parameter, but "
             "sees a part of the tokens. Which parameters of the model are that?",
             "dist.new_subgroups makes groups of neighbours, here of t // kv_heads ranks. Of "
             "the LayerNorms (two in a block, and the last one), the embedding and the head, all "
             "parameters are partial: a LayerNorm has two."),
            (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "05.7", "kept", 1,
            "Which share of each of chapter 01's classes of activations does a rank keep? The "
            "classes are inside, core, keys and values, outside, inputs (of the sub-layers), "
            "positions (RoPE's tables), logits and ids.",
            ("Is there anything left that all ranks keep alike?",
             "RoPE's tables are whole, and in the variant `kept` the inputs of the sub-layers. Of "
             "keys and values a rank has 1/t, but no less than one of the kv heads."),
            (Same("kept(tiny, 4)"), Same("kept(tiny, 4, 'kept')"), Same("kept(tiny, 8, 'ring')")),
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
             "ring one for every earlier rank. Two chunks that meet are a quarter of a block: with "
             "gathered keys a rank's two meet 2N-1 earlier ones together, and themselves. In "
             "Ulysses it has 1/N of the heads over N² blocks, all on the diagonal."),
            (Same("[pairs('zigzag', rank, 4, 32) for rank in range(4)]"),
             Same("[pairs('ring', rank, 4, 32) for rank in range(4)]"),
             Same("[pairs('gather', rank, 4, 32, 0.5) for rank in range(4)]"),
             Same("[pairs('ulysses', rank, 4, 32, 0.5) for rank in range(4)]"),
             Same("pairs('zigzag', 1, 8, 64, 0.5)")),
        ),
    ],
    "07_pipeline_parallel": [
        Exercise(
            "07.1", "Schedule.needs", 1,
            "What must have been computed before an action can start? Give the names of these "
            "outputs, as Action.output has them: those of its own stage, and those that come from "
            "another.",
            ("A forward needs what the stage before has computed. What does a backward need "
             "besides the gradient that comes from the stage after it?",
             "F: the F of the stage before, unless the stage is the first of its pipeline. B and "
             "BW: the F of the stage itself and, unless it is the last, the \"B\" of the stage "
             "after it. W: the \"B\" of the stage itself. In dualpipe the second pipeline begins "
             "at stage `depth`, so a remainder tells the first and the last."),
            (Same("{f'{kind} in stage {stage} of 4': sorted(Schedule([], [0, 1, 2, 3], 4).needs("
                  "Action(kind, stage, 5))) for kind in ('F', 'B', 'W', 'BW') for stage in "
                  "range(4)}", "needs(action)"),
             Same("{f'{kind} in stage {stage}': sorted(Schedule([], [0, 1, 1, 0], 2).needs("
                  "Action(kind, stage, 3))) for kind in ('F', 'B', 'BW') for stage in range(4)}",
                  "needs(action) of two pipelines with 2 stages each")),
        ),
        Exercise(
            "07.2", "one_forward_one_backward", 3,
            "List a rank's actions, F and BW: `ahead` forwards, then a forward and a backward in "
            "turn, as long as there are any. Forwards take the rank's slices from the first to the "
            "last, backwards from the last to the first. Each slice takes `group` micro-batches, "
            "and after all slices have done so, the next `group` of them begins.",
            ("Write down all forwards of rank 1, for two ranks with two slices each, four "
             "micro-batches and a group of 2: which stage, which micro-batch? Then all backwards. "
             "How do the two lists become one?",
             "Slice s of a rank is stage s · p + rank. Three loops give the order of one kind: "
             "over the first micro-batch of each group, over the slices, over the micro-batches of "
             "the group, of which the last one may be smaller. Then come forwards[:ahead] and, "
             "with each backward, the next forward, if there is one."),
            (Same("{f'rank {rank}': ' '.join(f'{a.kind}{a.micro_batch}' for a in "
                  "one_forward_one_backward(rank, 4, 6, 1, 3 - rank, 4)) for rank in range(4)}",
                  "1f1b, 4 ranks, 6 micro-batches"),
             Same("[f'{a.kind} {a.micro_batch} in stage {a.stage}' for a in "
                  "one_forward_one_backward(1, 3, 6, 2, 5, 3)]",
                  "interleaved, rank 1 of 3, 6 micro-batches, 2 slices"),
             Same("[f'{a.kind} {a.micro_batch} in stage {a.stage}' for a in "
                  "one_forward_one_backward(0, 2, 3, 2, 6, 3)]",
                  "breadth first, rank 0 of 2, 3 micro-batches, 2 slices"),
             Run(2, "--variant interleaved --layers 4 --batch 4")),
            "1f1b, interleaved or not",
        ),
        Exercise(
            "07.3", "zero_bubble", 2,
            "List a rank's actions, F, B and W, of each kind in the order of the micro-batches. "
            "First come the forwards by which F is ahead. Then an F, a B and a W follow each "
            "other, as long as there are any, but W begins only after as many rounds as it is "
            "behind.",
            ("Take the last of four ranks, with k = 1: how far is F ahead of B there, and how far "
             "is W behind it? Compare with zb-h1 in the lesson.",
             "There are m rounds with a B, and as many more as W is behind: m + k · rank. In round "
             "i stand F number ahead + i, B number i and W number i - behind, each of them if "
             "there is one."),
            (Same("{f'rank {rank}': ' '.join(f'{a.kind}{a.micro_batch}' for a in "
                  "zero_bubble(rank, 4, 6, 1)) for rank in range(4)}",
                  "zb-h1, 4 ranks, 6 micro-batches"),
             Same("{f'rank {rank}': ' '.join(f'{a.kind}{a.micro_batch}' for a in "
                  "zero_bubble(rank, 3, 5, 2)) for rank in range(3)}",
                  "zb-h2, 3 ranks, 5 micro-batches"),
             Same("' '.join(f'{a.kind}{a.micro_batch}' for a in zero_bubble(1, 4, 2, 2))",
                  "zb-h2, rank 1 of 4, 2 micro-batches"),
             Run(2, "--variant zb-h1 --batch 4")),
        ),
        Exercise(
            "07.4", "make_programs", 3,
            "Let time run over a schedule, and give each rank's program: its actions where they "
            "end, and each message, on both of its ranks, behind all actions that end when its "
            "output is there. Only what another rank needs is sent. Raise ValueError if actions "
            "are left and no rank can begin one.",
            ("What has to be known at a moment, to decide whether a rank can begin its next "
             "action? And who needs an output of another rank: can that be read off the schedule "
             "before time begins to run?",
             "First {output: the rank that needs it}, from schedule.needs of every action, if "
             "schedule.ranks of the output's stage is another rank. Keep what is done, and for "
             "each busy rank its action and when that ends: now and its time of TIMES. Each round: "
             "begin what can begin, let one unit pass, end what ends. Only after all of these come "
             "the messages."),
            (Same("(lambda named: {f'rank {rank}': [words for kind, part in itertools.groupby("
                  "program, type) for words in (sorted if kind is Message else list)(map(named, "
                  "part))] for rank, program in enumerate(make_programs(make_schedule('1f1b', 3, "
                  "4)))})(lambda step: f'{step.kind} {step.micro_batch}' "
                  "if isinstance(step, Action) else "
                  "f'{step.output} from {step.sender} to {step.receiver}')",
                  "1f1b, 3 ranks, 4 micro-batches, messages side by side in any order"),
             Same("(lambda named: {f'rank {rank}': [words for kind, part in itertools.groupby("
                  "program, type) for words in (sorted if kind is Message else list)(map(named, "
                  "part))] for rank, program in enumerate(make_programs(make_schedule("
                  "'dualpipe-v', 2, 4)))})(lambda step: "
                  "f'{step.kind} {step.micro_batch} in stage {step.stage}' "
                  "if isinstance(step, Action) else "
                  "f'{step.output} from {step.sender} to {step.receiver}')",
                  "dualpipe-v, 2 ranks, 4 micro-batches, messages side by side in any order"),
             Same("[check_rendezvous(make_programs(schedule), schedule.needs) for schedule in ("
                  "make_schedule(name, 4, 8, 2) for name in ('1f1b', 'interleaved', 'zb-h1', "
                  "'dualpipe'))]", "on the strictest network"),
             Same("__import__('unittest').TestCase().assertRaises(ValueError, make_programs, "
                  "Schedule([[Action('F', 0, 0), Action('BW', 0, 0)], [Action('BW', 1, 0), "
                  "Action('F', 1, 0)]], [0, 1], 2))", "a BW that comes before its F"),
             Run(2, "--variant zb-h1 --batch 4")),
        ),
        Exercise(
            "07.5", "LinearInHalves.backward Stage.backward Stage.weight_gradients", 2,
            "B gives the gradient of the stage's input, and leaves those of its linears' weights "
            "for W, which computes them for one micro-batch and adds them up in weight.grad. "
            "Between B and W, no more may be kept than the inputs of the linears and the gradients "
            "of their outputs (bytes are counted).",
            ("Which tensors does the gradient of a weight need, and what hangs on them? And "
             "`later` is one list for all linears of a stage: which micro-batch's is in it when a "
             "B ends?",
             "LinearInHalves.backward appends (weight, x, dy), detached from the graph, and "
             "returns dy @ weight; Nones for the other two. Stage.backward takes out what forward "
             "kept, calls autograd.backward, moves what is in `later` to kept_for_weights[i] and "
             "empties it. For W: dyᵀ @ x over all tokens, added to what weight.grad has."),
            (Run(3, "--variant zb-h1 --layers 3 --batch 10 --micro-batch 2 --ignore 0.3"),
             Run(2, "--batch 6 --micro-batch 2 --ignore 0.3")),
            "B and W apart",
        ),
        Exercise(
            "07.6", "train_step", 2,
            "Take one step: forward and backward of all micro-batches, which is what run_program "
            "does, the norm of the whole model's gradient, clipping, the update. Give this rank's "
            "part of the loss, and the norm before clipping.",
            ("A rank has the gradients of its own stages. Which of them are still partial sums, "
             "and who has the rest of the norm?",
             "common.py has sum_partial_grads, for what lies on two ranks (tied tables, the copies "
             "of dualpipe), and grad_norm, which needs the group of all stages; PyTorch has "
             "clip_grads_with_norm_. They follow in this order, and gradients begin as zero."),
            (Run(3, "--layers 3 --batch 4 --ignore 0.3 --clip 0.1"),
             Run(2, "--variant dualpipe --batch 6 --ignore 0.3")),
        ),
        Exercise(
            "07.7", "alive_over_time", 1,
            "How many micro-batches are alive in a rank's stages, after each of its actions?",
            ("A micro-batch is alive from its F until backward needs nothing more of it. Which "
             "kinds of action add one, which take one away, which leave the number as it is?",
             "F adds one. BW and W take one away; B takes none, since W still needs what it "
             "leaves. itertools.accumulate adds up as it goes."),
            (Same("alive_over_time(make_schedule('1f1b', 4, 6).actions[1])",
                  "1f1b, rank 1 of 4, 6 micro-batches"),
             Same("alive_over_time(make_schedule('zb-h1', 4, 6).actions[2])",
                  "zb-h1, rank 2 of 4, 6 micro-batches"),
             Same("alive_over_time(make_schedule('dualpipe-v', 2, 5).actions[0])",
                  "dualpipe-v, rank 0 of 2, 5 micro-batches")),
        ),
    ],
    "08_expert_parallel": [
        Exercise(
            "08.1", "AllToAll.backward", 1,
            "Rows have gone to other ranks, ctx.sent[i] of them to rank i, and ctx.received[i] "
            "have come from there. The gradients of what came are here: give those of the rows "
            "that were sent, and None for the other arguments.",
            ("A row was moved, neither copied nor summed. Where must its gradient go?",
             "Back to where the row came from: the same exchange, and what was received is now "
             "what is sent."),
            (Run(2, "--batch 12 --micro-batch 2 --ignore 0.3"),),
        ),
        Exercise(
            "08.2", "balance_loss", 2,
            "For each sequence: how many experts there are, times the sum over experts of their "
            "share of the sequence's picks, times their mean score. Give the sum over the "
            "sequences: 1 for each of them, if all experts are picked alike.",
            ("What must be counted, and over which dimensions? The shares of a sequence add up to "
             "1, and so do the mean scores.",
             "F.one_hot turns picks into rows of zeros with a one. Its mean over a sequence's "
             "seq · k picks is the share of each expert, and the mean of the scores is one over "
             "seq tokens: (batch, experts) both."),
            (Same("balance_loss(torch.full((3, 4, 2), 0.5), torch.tensor([[[0], [1], [0], [1]]] * "
                  "3))", "3 sequences, 2 experts, all picked alike"),
             Same("balance_loss(random(3, 5, 4).softmax(-1), best(random(3, 5, 4), 2))",
                  "3 sequences of 5 tokens, 4 experts, 2 picks"),
             Same("(lambda scores: torch.autograd.grad(balance_loss(scores, best(random(3, 5, 4), "
                  "2)), scores)[0])(random(3, 5, 4).softmax(-1).requires_grad_())",
                  "its gradient"),
             Run(2, "--batch 12 --micro-batch 2 --balance-weight 1")),
        ),
        Exercise(
            "08.3", "MoE.route", 2,
            "Give the k experts of each token, and their gates: their scores over the sum of these "
            "k scores; if k is 1, the score itself. The bias has a say in the choice alone. With "
            "balance_weight or z_loss, add these losses, so that micro-batches and ranks add up to "
            "their mean over the sequences of the whole batch.",
            ("Which of all these numbers must have a gradient, and which must not? And what is the "
             "sum of the micro-batches' losses to be divided by?",
             "Compute logits and scores in float32 or better. best() takes scores + bias, "
             "detached; gather takes what was chosen, out of the logits: their softmax is the "
             "gates. The losses go into the graph by AddLoss.apply(gates, loss). Both are sums "
             "over this micro-batch's sequences, over cfg.sequences; z is, for a sequence, the "
             "mean of logsumexp² over its tokens."),
            (Run(2, "--batch 12 --micro-batch 2 --balance-weight 1"),
             Same("(lambda moe: (answer := moe.route(random(2, 5, 8)), (answer[1] * random(2, 5, "
                  "2)).sum().backward(), dict(chosen=answer[0], gates=answer[1].detach(), "
                  "gradient=moe.router.weight.grad))[2])(" + MIXTURE + "(MoE, top_k=2, "
                  "balance_weight=0.0))", "k = 2, no loss"),
             Same("(lambda moe: (moe.bias.copy_(torch.tensor([0, 1, -1, 0])), answer := moe.route("
                  "random(2, 5, 8)), dict(chosen=answer[0], gates=answer[1].detach()))[2])("
                  + MIXTURE + "(MoE, top_k=2, balance_weight=0.0))", "k = 2, a bias of 1 and -1"),
             Same("(lambda moe: (answer := moe.route(random(2, 5, 8)), (answer[1] * random(2, 5, "
                  "1)).sum().backward(), dict(chosen=answer[0], gates=answer[1].detach(), "
                  "gradient=moe.router.weight.grad))[2])(" + MIXTURE + "(MoE, top_k=1, "
                  "balance_weight=0.5, sequences=6))", "k = 1, with the balance loss"),
             Same("(lambda moe: ((moe.route(random(2, 5, 8))[1] * random(2, 5, 2)).sum()"
                  ".backward(), moe.router.weight.grad)[1])(" + MIXTURE + "(MoE, top_k=2, "
                  "z_loss=0.5, sequences=6))", "the router's gradient, with the z-loss"),
             Same("[each.dtype for each in " + MIXTURE + "(MoE, top_k=2).bfloat16().route("
                  "random(2, 5, 8).bfloat16())]", "dtypes, if all else is in bfloat16")),
        ),
        Exercise(
            "08.4", "MoE.through_experts MoE.exchange", 3,
            "Dispatch and combine: send each token's row to its k experts, which may be on other "
            "ranks, and add up what they give, weighted by the gates. The counts go first, so that "
            "every rank knows what comes; append (sent, received), in rows for each rank of ep, to "
            "self.seen. On one rank nothing is sent.",
            ("Follow the lesson's picture. In which order must the rows be sent, in which do they "
             "arrive, and in which do the experts want them? Every reordering has to be undone.",
             "through_experts: each token k times gives a row for each pick; a stable argsort of "
             "the flat choices is the order; Permute puts rows into it, and back. exchange: an "
             "all_to_all of counts; (ep, own experts) is what arrives. Sums of both over own "
             "experts are sent and received. What arrives is sorted by rank, then expert: say the "
             "expert of each row with repeat_interleave, and sort by it, stably."),
            (Same("(lambda moe, x, chosen, gates: (out := moe.through_experts(x, chosen, gates), "
                  "(out * random(2, 5, 8)).sum().backward(), dict(out=out.detach(), x=x.grad, "
                  "gates=gates.grad, up=moe.up.grad, down=moe.down.grad))[2])(" + MIXTURE +
                  "(MoE, top_k=2), random(2, 5, 8).requires_grad_(), best(random(2, 5, 3), 2), "
                  "random(2, 5, 2).requires_grad_())",
                  "on one rank, 10 tokens, 2 of 4 experts each, and nobody picks the last one"),
             Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
             Run(3, "--layers 1 --batch 6 --micro-batch 1 --experts 6 --top-k 1")),
            "dispatch and combine",
        ),
        Exercise(
            "08.5", "WithPlaces.through_experts", 3,
            "As MoE.through_experts, but each expert has `places` for each sequence, so that every "
            "exchange has one size. Places are taken in the order of the docstring, and a pick "
            "that finds none adds nothing. exchange_evenly takes rows (experts, batch · places, "
            "dim), zero where a place is empty.",
            ("Line the picks of a sequence up: all first choices, then all second ones. At which "
             "place of its expert's line does each pick stand, and which of all slots is that?",
             "A cumsum of one_hot along the line counts each expert's picks so far. Slot = expert "
             "· places + place, or one slot more, which is nobody's, for what is dropped. scatter "
             "puts x into the slots; behind the exchange, gather takes each pick's row out, and "
             "zero for the dropped. Weight by the gates, and sum over k."),
            (Same("(lambda moe, x, chosen, gates: (out := moe.through_experts(x, chosen, gates), "
                  "(out * random(3, 5, 8)).sum().backward(), dict(out=out.detach(), x=x.grad, "
                  "gates=gates.grad, up=moe.up.grad, down=moe.down.grad, dropped=moe.dropped))[2])("
                  + MIXTURE + "(WithPlaces, top_k=2, places=2), random(3, 5, 8).requires_grad_(), "
                  "best(random(3, 5, 4), 2), random(3, 5, 2).requires_grad_())",
                  "on one rank, 3 sequences of 5 tokens, 4 experts of 2 places, 2 picks"),
             Run(2, "--variant capacity --capacity-factor 1 --batch 8 --micro-batch 2")),
            "experts with places",
        ),
        Exercise(
            "08.6", "expert_parallel", 2,
            "Give each rank its part of every mixture's experts: some of them or, of CutExperts, "
            "some hidden units of each. Tell the mixture its group, ep, and every parameter, as "
            "p.partial, the group over which its gradient is to be summed.",
            ("With 4 ranks and ep = 2, each expert is on two ranks. The tokens of which ranks are "
             "in its gradient before anything is summed?",
             "An expert has had the rows of all ranks of its ep: what is left to be summed over is "
             "groups[\"holders\"]. All else is summed over the world. keep_shard cuts up and down "
             "along the experts, dimension 0; hidden units are dimension 2 of up and 1 of down."),
            (Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
             Run(2, "--variant tensor --batch 4 --micro-batch 1")),
        ),
        Exercise(
            "08.7", "move_biases", 1,
            "After a step: raise the bias of the experts that were picked less often than the "
            "mean, by all ranks together, and lower it where they were picked more often, by "
            "bias_speed. Give the loads, (layers, experts), and start to count anew.",
            ("Each rank has counted the picks of its own tokens. Which way does a bias go if its "
             "expert has more than the mean?",
             "Stack the loads of model[1:-1] and all_reduce them, if there is a group. For each "
             "layer, torch.sign(mean of its loads - load) says which way, and load.zero_() starts "
             "anew."),
            (Same("(lambda model: ([block.mlp.load.copy_(torch.tensor([5., 1, 0, 2]) + i) for i, "
                  "block in enumerate(model[1:-1])], loads := move_biases(model), "
                  "dict(loads=loads, biases=[block.mlp.bias for block in model[1:-1]], "
                  "counts=[block.mlp.load for block in model[1:-1]]))[2])(mixture_gpt(Mixture(**"
                  "vars(tiny) | {'layers': 2, 'dim': 16}, experts=4, bias_speed=0.25)))",
                  "2 layers, loads 5, 1, 0, 2 and 6, 2, 1, 3"),
             Run(2, "--balance bias --bias-speed 0.1 --batch 8 --micro-batch 2")),
        ),
    ],
    "09_5d": [
        Exercise(
            "09.1", "places_of_ranks sort_ranks", 1,
            "Give the Place of every rank: along the axis that args.order names last, ranks are "
            "neighbours. And sort ranks into lists: together are those for whose places key(place) "
            "is the same.",
            ("Of 8 ranks with --order pp,dp,cp,tp, which two differ in their place on pp alone? In "
             "which order does itertools.product count?",
             "product of a range for each axis, in the order of args.order: the last one runs "
             "fastest. A Place takes its axes by name, whatever their order is. In sort_ranks, a "
             "defaultdict(list) has the ranks of each key."),
            (Same("[str(place) for place in places_of_ranks(common.argparse.Namespace(pp=2, dp=2, "
                  "cp=1, tp=2, order='pp,dp,cp,tp'))]", "pp 2, dp 2, tp 2, in the usual order"),
             Same("[str(place) for place in places_of_ranks(common.argparse.Namespace(pp=2, dp=1, "
                  "cp=2, tp=3, order='tp,cp,dp,pp'))]", "pp 2, cp 2, tp 3, --order tp,cp,dp,pp"),
             Same("sorted(map(sorted, sort_ranks([Place(pp, dp, 0, tp) for pp in range(2) for dp "
                  "in range(2) for tp in range(2)], lambda at: (at.pp, at.tp))))",
                  "8 ranks, by pp and tp")),
            "where each rank stands",
        ),
        Exercise(
            "09.2", "make_groups", 3,
            "Give this rank's group along tp, cp, pp, ep and \"cp and tp\" (a sequence's ranks), "
            "if it has more than one rank; and for each kind of parameter (those of KINDS, norms, "
            "and tied if tied_stages) the group of those who hold the same part. Kinds of the same "
            "ranks share a group. The report knows a group by its group_desc: the axis, or a name "
            "of its own.",
            ("Two ranks are together on tp if all else of their places is the same. When do two "
             "ranks hold the same part of q, of k, of an expert? The lesson's table says it.",
             "Each group is a key for sort_ranks, whose lists go to dist."
             "new_subgroups_by_enumeration. Along an axis, it is the place with that axis set to "
             "0; for ep, with dp // ep. For tables and norms it is pp; for queries pp and tp; for "
             "keys pp and tp · n // t, if t ranks of tp hold n different parts of them; for mlp "
             "pp, tp and dp % ep; for tied pp or its mirror image, whichever is less."),
            (Same(GROUPS + "(common.argparse.Namespace(pp=2, dp=4, cp=1, tp=2, ep=2, "
                  "order='pp,dp,cp,tp', model=tiny))", "the groups of rank 5 of 16, with pp 2, "
                  "dp 4, tp 2, ep 2"),
             Same(GROUPS + "(common.argparse.Namespace(pp=1, dp=1, cp=2, tp=8, ep=1, "
                  "order='tp,cp,dp,pp', model=tiny))", "the groups of rank 5 of 16, with cp 2, "
                  "tp 8, 4 kv heads, --order tp,cp,dp,pp"),
             Run(4, "--dp 2 --tp 2 --kv-heads 1 --experts 4 --ep 2 --batch 12 --micro-batch 2")),
        ),
        Exercise(
            "09.3", "cut_stage", 3,
            "Cut the blocks of a stage as the lesson's table says, and put SequenceParallel around "
            "sub-layers that tp cuts; a mixture gathers itself, and is told tp, ep and its "
            "sequence's group. Under cp, attention gets the core and the positions of this rank. "
            "`seen` is to keep no more than a step's micro-batches.",
            ("Take the parameters of a block one by one. Which axis cuts it, along which "
             "dimension, into how many parts? What of this is needed only if that axis has more "
             "than one rank?",
             "keep_shard(module, name, dim, group, parts). tp cuts q and up along 0, o and down "
             "along 1, k and v along 0 into no more parts than kv heads. Experts, (experts, dim, "
             "hidden) and (experts, hidden, dim), are cut along 0 by ep, and by tp along their "
             "hidden units. Rope reads attn.rope.positions. seen is a deque with a maxlen."),
            (Run(4, "--cp 2 --tp 2 --batch 4 --micro-batch 2 --ignore 0.3"),
             Run(4, "--dp 2 --tp 2 --kv-heads 1 --experts 4 --ep 2 --batch 12 --micro-batch 2")),
        ),
        Exercise(
            "09.4", "note_holders", 2,
            "Note on each parameter its kind (p.kind), the group of those who hold the same part "
            "of it (p.holders), and for the norm how many they are (p.copies). If they are more "
            "than one, p.partial tells sum_partial_grads that they sum their gradients.",
            ("A parameter's global name says what it is. Which kind is left for what no word of "
             "KINDS is in?",
             "The kind is that of the word of KINDS that p.global_name contains, else norms. If "
             "there are holders of tied, the embedding, which is the head as well, is of that "
             "kind."),
            (Run(4, "--pp 2 --tp 2 --batch 3 --ignore 0.3"),
             Same("(lambda model, holders: (note_holders(model.parameters(), holders), "
                  "{p.global_name: dict(kind=p.kind, copies=p.copies, holders=p.holders is holders["
                  "p.kind], partial=getattr(p, 'partial', None) is p.holders) for p in "
                  "model.parameters()})[1])(build(Mixture(**vars(tiny) | {'layers': 1, 'tie': "
                  "True}, experts=4)), {kind: common.argparse.Namespace(size=lambda n=n: n) for "
                  "kind, n in dict(tables=8, norms=8, queries=4, keys=6, mlp=1, tied=16).items()})",
                  "a tied model with one mixture")),
        ),
        Exercise(
            "09.5", "make_units", 2,
            "Make a Unit for each module of the list and each group of holders. module.units are "
            "those of a module that are gathered around its forward and backward, which is what "
            "stage 3 does; in stages 1 and 2 there are none. What two modules share belongs to "
            "the first.",
            ("Why can the q and the norms of one block not be in the same unit, if tp is 2?",
             "A unit is shared out among the ranks of one group, p.holders. Walk over the modules "
             "of all stages (`model` is a list of lists), sort a module's parameters by p.holders, "
             "and leave out those that were seen before."),
            (Run(2, "--preset gpt2 --vocab 128 --dp 2 --zero 2 --batch 4 --micro-batch 1 "
                    "--verify"),
             Run(4, "--dp 2 --tp 2 --zero 2 --batch 12 --micro-batch 2 --ignore 0.3"),
             Run(2, "--pp 2 --zero 3 --batch 3 --layers 3 --schedule 1f1b")),
        ),
        Exercise(
            "09.6", "Stage.forward Stage.backward", 2,
            "Put a micro-batch through the stage's modules one by one, each with a detached input, "
            "and keep what its backward needs, no more; then go back the same way. Tokens and "
            "targets are those of whole sequences, of which this rank has self.positions. A "
            "module's parameters may be there only between its gather and its free.",
            ("Where does the graph of a module begin, and where does it end? What goes from one "
             "module to the one before it in backward?",
             "Around forward and backward of each module stands `with gathered(module):`. Keep x "
             "and get_gradient_edge(out), which does not keep out alive. Tokens get no gradient. "
             "The last stage ends with loss_sum over its targets / valid. Backward goes through "
             "the modules in reverse: autograd.backward(edge, gradient), and x.grad is the next "
             "gradient."),
            (Run(4, "--pp 2 --cp 2 --zero 3 --batch 6 --micro-batch 2 --ignore 0.3"),),
            "a stage, module by module",
        ),
        Exercise(
            "09.7", "balanced", 1,
            "Cut the model's list into slices (start, end), one for each stage: as many blocks in "
            "each, the first ones one more if that does not divide. The first has the embedding, "
            "too, and the last the head.",
            ("With 7 blocks and 3 stages, which items of the list are in which stage? The list has "
             "9 items, and the embedding is item 0.",
             "A stage has layers // depth blocks, and the first layers % depth stages have one "
             "more. Stage s ends where all blocks up to it end, plus 1 for the embedding; the last "
             "one ends at layers + 2."),
            (Same("balanced(8, 4)"), Same("balanced(7, 3)"), Same("balanced(5, 1)"),
             Same("balanced(3, 3)")),
        ),
    ],
    "10_planner": [
        Exercise(
            "10.1", "Machine.matmul", 1,
            "How many seconds a matmul of (m, k) by (k, n) takes, `times` in a row: its arithmetic "
            "at self.flops, and then all that it reads and writes, two bytes a number, at "
            "self.bandwidth. In FP8 arithmetic is FP8 times as fast, and what is read has one byte "
            "a number.",
            ("How many multiplications and additions is each of the m·n outputs?",
             "2·m·k·n FLOPs; and m·k, k·n and m·n numbers go through HBM, each once. The two times "
             "are added."),
            (Same("(lambda machine: {f'({m}, {k}) @ ({k}, {n})': machine.matmul(m, k, n, 3) for m, "
                  "k, n in ((8, 16, 32), (4096, 8192, 1024))})(Machine(CLUSTERS['h100'], "
                  "Software()))",
                  "seconds of a matmul"),
             Same("Machine(CLUSTERS['h100'], Software()).matmul(4096, 8192, 1024, fp8=True)",
                  "in FP8")),
        ),
        Exercise(
            "10.2", "Machine.links Machine.ring", 2,
            "`links`: bytes/s of a ring of n ranks, `stride` apart. Inside a node that is NVLink; "
            "it leaves one through its members' network cards there (in a last node perhaps "
            "fewer), but no faster than NVLink. `ring`: seconds of an all_gather or a "
            "reduce_scatter of so many bytes, in so many calls, each of n-1 hops, which cost alpha "
            "or between nodes (as many as there are nodes, or all) nic_alpha.",
            ("Of 16 ranks with stride 2, on nodes of 8 GPUs, how many share a node? And of 16 with "
             "stride 8?",
             "cluster.per_node // stride of them, at least one; in a last node that is not full "
             "what n leaves over; software.one_card: one. NVLINK and NIC say which share of their "
             "rates they reach. A ring sends (n-1)/n of the bytes, and one rank alone sends "
             "nothing."),
            (Same("(lambda machines: {f'{n} ranks, stride {stride}, {name}': machine.links(n, "
                  "stride) for name, machine in machines.items() for n, stride in ((8, 1), (2, 4), "
                  "(4, 8), (8, 2), (12, 1), (16, 1), (64, 16))})({'all cards': "
                  "Machine(CLUSTERS['a100'], Software()), 'one card': Machine(CLUSTERS['a100'], "
                  "Software(one_card=True))})", "bytes/s"),
             Same("(lambda machine: {f'{n} ranks': machine.ring(1e9, n, 2) for n in (1, 2, 4, 32)})"
                  "(Machine(CLUSTERS['a100'], Software()))", "seconds of a gigabyte"),
             Same("[Machine(replace(CLUSTERS['a100'], alpha=1.0, nic_alpha=9.0), Software()).ring("
                  "1e9, n, stride, 3) for n, stride in ((4, 1), (12, 1), (16, 1), (4, 8))]",
                  "in 3 calls, alpha 1, nic_alpha 9")),
            "Machine: links and rings",
        ),
        Exercise(
            "10.3", "numbers_kept Layout.shares", 3,
            "`numbers_kept`: how many numbers of 16 bits a layer keeps of so many tokens, in each "
            "class of chapter 01. `shares`: which share of each class a GPU keeps. Sequence "
            "parallelism divides what lies outside of the sub-layers; a kv head is never cut; and "
            "keys are gathered over cp, unless they go round in a ring.",
            ("For a GPT with dropout and without flash, all classes together come to "
             "s·b·h·(34 + 5·a·s/h) bytes. Which tensors are the 34, and in which class is each?",
             "Outside: the inputs of two norms, and two masks of a byte. Inputs: the outputs of "
             "the norms. Inside: q, the input of o, and of the MLP two (with SwiGLU three) tensors "
             "of ffn·top_k columns. Of the core 5 bytes a score with dropout, 2 without, and with "
             "flash 4 bytes a row. Shares: 1/(tp·cp), but 1/cp where sp or keeps_gathered say so, "
             "and of the keys at least 1/kv_heads."),
            (Same("{f'{name} {software}': numbers_kept(model, 96, software) for name, model in "
                  "{'gpt': gpt(4, 64, 4, seq=32), 'mixtral': MODELS['mixtral']}.items() for "
                  "software in (Software(), Software(flash=False), Software(False, True))}",
                  "numbers of a layer"),
             Same("{f'{layout} {name}': layout.shares(MODELS['8b'], SOFTWARE[name]) for name in "
                  "('megatron-2024', 'ours') for layout in (Layout(), Layout(tp=2, sp=False), "
                  "Layout(tp=2, cp=4), Layout(tp=16))}", "shares")),
            "what a layer keeps, and who keeps it",
        ),
        Exercise(
            "10.4", "micro_batches_alive bubble", 2,
            "`micro_batches_alive`: how many whole micro-batches a stage keeps at once, of "
            "m. `bubble`: how long a stage waits in a step, if a micro-batch takes it F forward, "
            "and B and W backward. For each of the three schedules.",
            ("Chapter 07 has both as a table. What does a rank with v slices keep of a micro-batch "
             "that has gone through one of them?",
             "Alive on stage i: p - i for 1f1b, (2(p-1-i) + (v-1)p + 1)/v interleaved, p for "
             "zero-bubble, (2p+1)/2 for dualpipe-v, and never more than m. The bubble: "
             "(p-1)(F+B+W)/v; (p-1)(F+B-W); and (p-1)/2 (F&B + B - 2W), where F&B takes F + B + "
             "W."),
            (Same("{f'{schedule}, pp {p}, v {v}, m {m}': micro_batches_alive(Layout(pp=p, v=v, "
                  "schedule=schedule), m) for schedule in CHOICES['schedule'] for p in (1, 4) for "
                  "v in (1, 2) for m in (2, 64)}", "micro-batches alive"),
             Same("[micro_batches_alive(Layout(pp=4, v=v), 64, 3) for v in (1, 2)]",
                  "on the last stage"),
             Same("{f'{schedule}, pp {p}, v {v}': bubble(Layout(pp=p, v=v, schedule=schedule), 3, "
                  "5, 2) for schedule in CHOICES['schedule'] for p in (1, 4) for v in (1, 2)}",
                  "the bubble, F 3, B 5, W 2")),
            "what is alive, and the bubble",
        ),
        Exercise(
            "10.5", "step_flops", 2,
            "FLOPs of a step over `batch` sequences: forward and twice that backward, and with "
            "full recomputation forward once more, but for the head. Of attention's scores, all "
            "are counted or the causal half. The embedding multiplies nothing.",
            ("How many FLOPs does a weight cost for a token, and how many the scores of a token "
             "with s others, of h columns in all heads?",
             "2 for each weight that a token meets (weights(top_k) of each layer, and the head's); "
             "4·s·h a layer for the scores. The head, "
             "2·vocab·h, is never recomputed: 3 passes, where all else has 4."),
            (Same("{f'{name} {scores} {recompute}': step_flops(MODELS[name], 3, scores, recompute) "
                  "for name in ('gpt3', '70b', 'mixtral') for scores in ('all', 'causal') for "
                  "recompute in ('none', 'full')}", "FLOPs"),),
        ),
        Exercise(
            "10.6", "degrees search", 3,
            "`degrees`: which values of each are tried; of `fixed`, its own. `search`: plans for "
            "all layouts that divide: those that fit, the fastest first, or if none does, those "
            "that may, within the factor ERROR. As a second value, all others.",
            ("Which degrees are left to choose, once the number of GPUs and three of tp, cp, pp "
             "and dp are known? A Plan says itself why it does not divide or fit.",
             "itertools.product over lists: tp up to a node's GPUs, cp where sequences are long, "
             "pp a divisor of the GPUs and no more than the layers, v, ep, zero 0, 1, 3, "
             "micro-batches up to `most`, recomputation. dp is what is left; sp goes with tp. Sort "
             "by (total, bytes)."),
            (Same("[(plan.layout, plan.total) for plan in search(MODELS['8b'], CLUSTERS['h100'], "
                  "SOFTWARE['megatron-2024'], 16, 64, {'v': 1, 'micro_batch': 1})[0][:5]]",
                  "the five best of the 8b on 16 GPUs"),
             Same("[(plan.layout, plan.total) for plan in search(gpt(8, 1024, 16), "
                  "CLUSTERS['a100'], SOFTWARE['megatron-2021'], 4, 12, {'tp': 2}, "
                  "4)[0]]", "all with tp 2 on 4 GPUs")),
        ),
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
                  "elu(x) over its right value, for x from -1e-7 to -10"),),
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
                  "two rows of 5 numbers in blocks of 8, eps 0.5, in a y of three rows"),
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
                  "10 rows of 21 by 2 programs of 2 parts, in blocks of 4 by 16, with a residual, "
                  "in a dx of 14 rows"),
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
    "kernels/fp8": [
        Exercise(
            "fp8.1", "amax_of", 1,
            "How large is the largest number of each tile, whatever its sign? `tiled` puts zeros "
            "behind x and shows it by tiles. What is inf or NaN does not count, or it would make "
            "all others zero.",
            ("In which two of its four dimensions does `tiled` have the numbers of one tile?",
             "Take magnitudes, put zero for what is not finite, and then the maximum over "
             "dimensions 1 and 3, in float32."),
            (Same("amax_of(random(5, 300) - 2, (1, 128))", "5 rows of 300 in tiles of 1 x 128"),
             Same("amax_of(random(130, 300), (128, 128))", "(130, 300) in tiles of 128 x 128"),
             Same("amax_of(torch.tensor([[1, -torch.inf, -3], [torch.nan, torch.inf, 0]]), "
                  "(1, 128))", "with inf and NaN")),
        ),
        Exercise(
            "fp8.2", "scales_of", 2,
            "Each amax over its scale is to be 448, the largest number of E4M3. With `powers`, the "
            "scale is the smallest power of two with which it is no more than that. No scale is "
            "smaller than SMALLEST.",
            ("A power of two is 1 · 2^e. What does frexp give of a number that is one already?",
             "frexp splits a number into a mantissa from 0.5 up to 1 and a power of two, which is "
             "the next one above it. Of a power of two itself, with the mantissa 0.5, it is one "
             "too many."),
            (Same("scales_of(torch.tensor([448.0, 1, 1e-3, 0, 3e38]), False)"),
             Same("scales_of(torch.tensor([448.0, 449, 447, 224, 225, 1e-3, 0]), True)"),
             Same("scales_of(1e6 * random(50).float().abs(), True)", "50 numbers")),
        ),
        Exercise(
            "fp8.3", "quantize", 2,
            "Round x to E4M3 by tiles. A cast would make inf 448, and nobody would see the "
            "overflow: what is not finite becomes NaN, alone. Other ranks may hold a part of the "
            "tiles, and then amax is given.",
            ("Each scale belongs to all numbers of its tile. In which dimensions of what `tiled` "
             "gives does it have to be spread?",
             "Divide what `tiled` gives by scales[:, None, :, None], and lay it out as x with "
             "`untiled`. Cast float32 to E4M3, not another dtype."),
            (Same("(lambda q: dict(values=q.values.float(), scales=q.scales))"
                  "(quantize(random(5, 300), (1, 128)))", "5 rows of 300 in tiles of 1 x 128"),
             Same("(lambda q: dict(values=q.values.float(), scales=q.scales))(quantize("
                  "random(130, 200), (128, 128), False, torch.full((2, 2), 8.0)))",
                  "with an amax that is given, and no powers of two"),
             Same("quantize(torch.tensor([[1, torch.inf, -3, torch.nan]]), (1, 128)).values.float()"
                  ".nan_to_num(1000)", "1, inf, -3 and NaN, which is shown as 1000")),
        ),
        Exercise(
            "fp8.4", "Linear8.backward", 3,
            "Two more products, in FP8: dx sums over the outputs, and dw over the tokens. Each "
            "factor has its scales along what is summed over. x is there in FP8, as it was kept, "
            "and serves all weights.",
            ("Which factor of which product has to be turned around? The rows of a Quantized are "
             "what stays, and its columns what is summed over.",
             "dx = product(dy8, weight_turned(w)) and dw = product(dy8 turned, x8 turned). "
             "both_ways gives dy as it is and turned, turned_around turns x. dx adds up over the "
             "weights, and has the shape of x."),
            tuple(Same("(lambda x, w, v, dy, dv: torch.autograd.grad(linear8(x, "
                       f"'{scaling}', w, v), [x, w, v], [dy, dv]))(*(t.requires_grad_() for t in "
                       "(random(3, 50, 140), random(150, 140), random(130, 140))), "
                       "random(3, 50, 150), random(3, 50, 130))", f"dx, dw and dv, by {scaling}")
                  for scaling in ("tile", "row", "tensor")),
        ),
        Exercise(
            "fp8.5", "hopper_product", 3,
            "Add as Hopper does. Of the sum so far and 32 products, what is below `bits` bits of "
            "the largest is cut off, and then they are added. Every `promote` of k the sum is "
            "multiplied with its scales, goes to fp32 and starts again; None: only in the end.",
            ("What is the value of the last bit that stays, if the largest number is m · 2^e with "
             "m from 0.5 up to 1?",
             "It is 2^(e - bits): divide by it, trunc, multiply by it, and sum. Scales are those "
             "of any of the 128, such as the first of these 32."),
            (Same("hopper_product(*(quantize(random(4, 512).abs(), (1, ALL)) for _ in 'ab'), None)",
                  "512 products, promoted in the end"),
             Same("hopper_product(*(quantize(random(4, 512).abs(), (1, 128)) for _ in 'ab'))",
                  "512 products, every 128 promoted"),
             Same("hopper_product(*(quantize(random(3, 100), (1, 128)) for _ in 'ab'), 128, 6)",
                  "100 products with 6 bits")),
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
            near = difflib.get_close_matches(word, sorted(known), 1, 0)[0]
            raise Refused(f"there is no EXERCISE {word!r}; `python -m lab.exercises` lists all",
                          f"{near} in place of {shlex.quote(word)}")
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
            words = f"{exercise.number}, level {exercise.level}: {exercise.question}"
            for name in exercise.functions:
                source = holes.cut(source, name, words, f"{exercise.number}: {name}")
                words = f"{exercise.number}: see {exercise.functions[0]}"
    return source


def write(folder, level=None, force=False):
    """Write the chapters with holes, but not over a file that somebody has changed: those are
    returned. What was ever written is noted in the folder, so that a change can be seen; it is
    noted before it is written, and each file comes whole, so that a kill changes nothing of that.
    """
    note, kept, texts = folder / ".written.json", [], {}
    written = noted(note)
    for chapter in EXERCISES:
        path, text = folder / f"{chapter}.py", with_holes(chapter, level).encode()
        is_ours = {digest(text), *written.get(chapter, [])}
        if path.exists() and not force and digest(path.read_bytes()) not in is_ours:
            kept.append(path)
        else:
            texts[path], written[chapter] = text, sorted(is_ours)
    put(note, (json.dumps(written, indent=1) + "\n").encode())
    for path, text in texts.items():
        put(path, text)
    return kept


def noted(note):
    """{chapter: the digests of what was written there}; {} if there is no such note."""
    try:
        written = json.loads(note.read_text())
        return {chapter: [found] if isinstance(found, str) else [*map(str, found)]
                for chapter, found in written.items()}
    except (FileNotFoundError, ValueError, AttributeError, TypeError):
        return {}


def put(path, data):
    """Write a file as a whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    try:
        part.replace(path)
    except OSError as error:                            # a folder is there, say
        part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def digest(data):
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------- the command line

def parse(argv):
    parser = commands.Parser("-m lab.exercises", description=__doc__,
                        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("exercise", nargs="*", metavar="EXERCISE", help="04.2, or 04 for all of it")
    add("--hint", type=int, choices=(1, 2), help="open so many hints")
    add("--write", type=commands.output("exercises"), metavar="FOLDER",
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
            said = [exercise.question, *(f"Hint: {hint}" for hint in exercise.hints)]
            for words in said[: 1 + (args.hint or 0)]:
                print(textwrap.fill(words, 92, initial_indent="    ", subsequent_indent="    "))
    return 0


def write_all(args):
    try:
        kept = write(args.write, args.level, args.force)
    except OSError as error:
        refusals.fail(f"cannot write {error.filename}: {error.strerror}; --write with another "
                      "folder would work")
    for path in kept:
        print(f"{path} was changed and stays as it is; --force (FORCE=1 make exercises) "
              "writes over it")
    print(f"{len(EXERCISES) - len(kept)} chapters and kernels with holes are in {args.write}")
    print("a question:  python -m lab.exercises 04.2      (and --hint 1, --hint 2)")
    print("to try it:   PYTHONPATH=. torchrun --nproc_per_node=4 "
          f"{args.write}/04_tensor_parallel.py")
    print(f"to grade it: python -m lab.grade {args.write} 04.2")
    return 0
