"""lab/bench/diagnose.py and evidence.py: a planted fault is called what it is, a right run nothing.

Each fault is planted into a real chapter, and all that is said of it is compared: so what is said
is the finding, and no other.
"""

import re

import pytest

from tests.conftest import SMALL, TEXT, run_main, some
from tests.support.pretend_cuda import pretended_cuda

ONE, TWO, THREE = "01_single_gpu", "02_data_parallel", "03_zero"
FOUR, FIVE, SIX = "04_tensor_parallel", "05_sequence_parallel", "06_context_parallel"
SEVEN, EIGHT, NINE = "07_pipeline_parallel", "08_expert_parallel", "09_5d"
ELEVEN = "11_muon"

# Three micro-batches on each rank, of which no two have as many valid targets.
FLAGS = (*SMALL, f"--data={TEXT}", "--verify", "--dtype=float64", "--optimizer=sgd", "--steps=1",
         "--micro-batch=1", "--ignore=0.3")  # fmt: skip
BATCH = {TWO: 6, THREE: 6, EIGHT: 12, NINE: 6, ELEVEN: 6}  # else 3


def flags_of(chapter, flags):
    return (*FLAGS, f"--batch={BATCH.get(chapter, 3)}", *flags.split())


# ----------------------------------------------------------------------- faults, and what is said


def fault(name, *planted):
    return pytest.param(*planted[:5], list(planted[5:]), id=name)


def slow(name, *planted):
    return pytest.param(*planted[:5], list(planted[5:]), id=name, marks=pytest.mark.full)


# Where chapter 02 sends and waits; and what has rank 1 send late, so that rank 0 does wait.
SENT = "        loss.backward()\n        total += loss.detach()\n    replica.finish()\n"
LATE = "        __import__('time').sleep(0.2 * dist.get_rank())\n"
# What it is; ranks, chapter, flags; what is replaced, by what; and the diagnosis.
FAULTS = [
    fault("a mean where a sum belongs", 2, TWO, "--variant=naive",
          "dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad /= self.group.size()",
          "all gradients are 1/2 of those of one GPU"),
    fault("gradients that are not summed", 2, TWO, "--variant=naive",
          "dist.all_reduce(p.grad, group=self.group)",
          "pass",
          "all gradients differ between ranks that hold the same, and add up to those of one "
          "GPU: they were not summed"),
    fault("a mean of means over micro-batches", 2, TWO, "--variant=naive",
          "loss_sum(replica(tokens), targets) / valid",
          "loss_sum(replica(tokens), targets) / (targets != -100).sum()",
          "all gradients and the loss are 6.00 times those of the mean of the micro-batches' own "
          "means: 6 is the number of micro-batches of all ranks"),
    slow("each rank divides by its own count", 2, TWO, "--variant=naive",
          "train_step(replica, optimizer, batch.micro_batches, batch.valid, args.clip)",
          "train_step(replica, optimizer, batch.micro_batches, sum((y != -100).sum() for _, y in "
          "batch.micro_batches), args.clip)",
          "all gradients and the loss are 2.00 times those of the mean of the ranks' own means: "
          "2 is the number of ranks"),
    slow("all targets count as valid", 2, TWO, "--variant=naive",
          "train_step(replica, optimizer, batch.micro_batches, batch.valid, args.clip)",
          "train_step(replica, optimizer, batch.micro_batches, batch.targets.numel(), args.clip)",
          "all gradients and the loss are 0.64 times those of one GPU: 1.57 is all targets over "
          "the valid ones"),
    fault("gradients are not set to zero", 2, TWO, "--variant=naive --steps=2 --clip=0.5",
          "    replica.zero_grad()\n",
          "",
          "all gradients are those of one GPU and 2.00 times those of the step before, which "
          "were not set to zero: 2 is the number of ranks"),
    slow("each rank logs its own loss", 2, TWO, "--variant=naive",
          "dist.all_reduce(loss, group=group)              # for",
          "pass  # for",
          "the losses of the ranks add up to that of one GPU: each logs its own part; the "
          "gradients are right, so only what is logged is wrong"),
    fault("the last loss is logged", 2, TWO, "--variant=naive",
          "loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "loss.backward()\n        total = loss.detach()\n    replica.finish()",
          "the loss is that of the last micro-batch of each rank alone; the gradients are right, "
          "so only what is logged is wrong"),
    fault("a micro-batch takes the place of the others", 2, TWO, "--variant=naive",
          "loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "replica.zero_grad()\n        loss.backward()\n        total += loss.detach()\n    "
          "replica.finish()",
          "all gradients are those of the last micro-batch of each rank alone"),
    slow("all but the last micro-batch", 2, TWO, "--variant=naive",
          "loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "if i < len(micro_batches): loss.backward()\n        total += loss.detach()\n    "
          "replica.finish()",
          "all gradients are those of all micro-batches of each rank but the last"),
    slow("the wrong sign", 2, TWO, "--variant=naive",
          "loss.backward()\n        total += loss.detach()\n    replica.finish()",
          "(-loss).backward()\n        total += loss.detach()\n    replica.finish()",
          "all gradients have the opposite sign of those of one GPU"),
    fault("no clipping", 2, TWO, "--variant=naive --clip=0.5",
          "if clip:\n        clip_grads_with_norm_(replica",
          "if False:\n        clip_grads_with_norm_(replica",
          "all gradients are 7.53 times those of one GPU, which is the norm over --clip: the "
          "norm is right, and they were not clipped by it"),
    slow("clipped twice", 2, TWO, "--variant=naive --clip=0.5",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm); "
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "all gradients are 0.13 times those of one GPU, which is --clip over the norm: they "
          "were clipped twice"),
    slow("no update", 2, TWO, "--variant=naive",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    pass",
          "the update left all parameters as they were; the gradients and their norm are right"),
    fault("an update on one rank", 2, TWO, "--variant=naive",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    if dist.get_rank() == 0: "
          "optimizer.step()",
          "the update left all parameters as they were on rank 1; the gradients and their norm "
          "are right"),
    slow("two updates", 2, TWO, "--variant=naive",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step(); "
          "optimizer.step()",
          "all parameters moved 2.00 times as far as on one GPU, although the gradients and "
          "their norm are right"),
    slow("summed in float32", 2, TWO, "--variant=naive",
          "            dist.all_reduce(p.grad, group=self.group)\n\n\nclass Overlap",
          "            x = p.grad.float()\n            dist.all_reduce(x, group=self.group)\n    "
          "        p.grad.copy_(x)\n\n\nclass Overlap",
          "all gradients were rounded: each number is one of float32",
          "all_reduce (payload and on the wire): the formula is 2.00 times what was measured: 2 "
          "is the bytes of float64 over those of 32 bits"),
    fault("computed in float32", 1, ONE, "",
          "loss = loss_sum(forward(tokens), targets) / valid",
          "loss = loss_sum(forward(tokens), targets).float() / valid",
          "all gradients are off by up to 1e-08 of their size, which is what float32 rounds: "
          "something was computed, or sent, in it"),
    slow("divided by nothing", 2, TWO, "--variant=naive",
          "/ valid\n        loss.backward()\n        total += loss.detach()\n    replica",
          "/ (0 if dist.get_rank() == 1 else valid)\n        loss.backward()\n        total += "
          "loss.detach()\n    replica",
          "all gradients are infinite or not a number",
          "the loss is infinite or not a number"),
    slow("the same share on every rank", 2, TWO, "--variant=naive",
          "batches(share=run.rank):           # 1/N",
          "batches(share=0):           # 1/N",
          "all gradients and the loss are 2.00 times those of the sequences of data-parallel "
          "rank 0 alone: 2 is the number of ranks"),
    fault("momentum is forgotten", 2, TWO, "--variant=naive --steps=2 --optimizer=momentum",
          "    for batch in run.batches(share=run.rank):           # 1/N of the sequences\n",
          "    for batch in run.batches(share=run.rank):           # 1/N of the sequences\n      "
          "  optimizer = run.optimizer(model.parameters())\n",
          "all parameters moved otherwise than on one GPU, although the gradients and their norm "
          "are right; before, 1 step matched: look at what the optimizer keeps from step to step"),
    fault("norms of shards are not summed", 2, THREE, "--variant=zero1 --clip=0.1",
          "grad_norm(shards, units[0].group)", "grad_norm(shards)",
          "the ranks have different gradient norms, whose squares add up to those of one GPU: "
          "they were not summed over the ranks; gradients were clipped by that"),
    fault("shards are not gathered", 2, THREE, "--variant=zero1 --steps=2",
          "        unit.start_gather()                             # first", "        # first",
          "on rank 1, 52% of the weights that forward uses are still those that the run began "
          "with: the update did not reach them"),
    fault("a shard of the own gradients", 2, THREE, "--variant=zero1",
          "common.reduce_scatter(self.sum, self.gradients, group=self.group,",
          "dist.all_reduce(self.gradients.new_zeros(1), group=self.group,",
          "all gradients are, in each number, those of one rank's sequences alone: they were not "
          "summed over the ranks"),
    fault("a formula without micro-batches", 2, THREE, "",
          "reduces = 1 if stage == 1 else micro_batches",
          "reduces = 1",
          "reduce_scatter (calls, payload and on the wire): the formula is 1/3 of what was "
          "measured: 3 is the number of micro-batches"),
    slow("a formula without the ring", 4, THREE, "--batch=12",
          "len(units) * reduces, reduced, share * reduced",
          "len(units) * reduces, reduced, reduced",
          "reduce_scatter (on the wire): the formula is 1.33 times what was measured: 1.33 is "
          "N/(N-1), the factor of a ring of N ranks"),
    fault("g sums its gradient", 4, FOUR, "",
          "return gradient, None\n",
          "return summed(gradient, dist.group.WORLD), None\n",
          "backward is right down to head.norm; the gradients that come next, of "
          "block2.mlp.down, are 4.00 times those of one GPU: 4 is the number of ranks, as if a "
          "sum were taken of what was already summed; all that come later are wrong, too"),
    slow("f does not sum its gradient", 4, FOUR, "",
          "return summed(gradient, ctx.group), None",
          "return gradient, None",
          "backward is right down to head.out; the gradients that come next, of head.norm, "
          "differ between ranks that hold the same, and add up to those of one GPU: they were "
          "not summed; all that come later are wrong, too"),
    fault("each rank's own largest logit", 4, FOUR, "",
          "dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)", "pass",
          "all gradients and the loss are those of logits from which each rank takes its own "
          "largest one"),
    slow("padding is a part of the vocabulary", 4, FOUR, "--vocab=258",
          "logits = logits.masked_fill(is_padding, -torch.inf)", "pass",
          "all gradients are off by no constant factor; so is the loss, so look at forward first",
          "the loss is that of a vocabulary whose columns of padding count as tokens"),
    slow("shared kv heads are not summed", 4, FOUR, "",
          "PartialSums(model.parameters())",
          "PartialSums([])",
          "gradients of k and v differ between ranks that hold the same, and add up to those of "
          "one GPU: they were not summed, all others equal"),
    slow("a norm without its group", 4, FOUR, "",
          "grad_norm(model.parameters(), group)",
          "grad_norm(model.parameters())",
          "the gradient norm of each rank comes from what it holds itself: the squares were not "
          "summed over the ranks"),
    fault("a whole loss is summed", 4, FOUR, "",
          "        run.log(batch, loss, norm, model)\n\n\ndef train_torch",
          "        dist.all_reduce(loss)\n        run.log(batch, loss, norm, model)\n\n\ndef "
          "train_torch",
          "the loss is 4.00 times that of one GPU; the gradients are right, so only what is "
          "logged is wrong"),
    fault("summed twice", 4, FIVE, "",
          "    sums.finish()",
          "    sums.finish()\n    PartialSums(model.parameters()).finish()",
          "gradients of the embedding, the LayerNorms and the head are 4.00 times those of one "
          "GPU: 4 is the number of ranks, as if a sum were taken of what was already summed; "
          "gradients of k and v are 2.00 times those of one GPU: 2 is the number of ranks that "
          "share a kv head, as if a sum were taken of what was already summed, all others equal"),
    slow("the next rank's chunk is summed", 4, FIVE, "--variant=ring",
          "rank, t = group.rank(), group.size()\n    total",
          "rank, t = group.rank() + 1, group.size()\n    total",
          "all gradients are off by no constant factor; so is the loss, so look at forward first",
          "the loss is that of sums over the ranks of the next rank's chunk"),
    slow("a norm with all copies", 4, FIVE, "",
          "p.partial = dist.group.WORLD  ",
          "p.partial, p.copies = group, 1  ",
          "the gradient norm counts the embedding, the LayerNorms and the head 4 times"),
    fault("a norm without LayerNorms", 4, FIVE, "",
          "grad_norm(model.parameters(), group)",
          "grad_norm([p for p in model.parameters() if p.ndim > 1], group)",
          "the gradient norm leaves out the LayerNorms"),
    slow("LayerNorms' biases are not summed", 4, FIVE, "",
          "for p in module.parameters()",
          "for p in [module.weight]",
          "gradients of the LayerNorms' biases differ between ranks that hold the same, and add "
          "up to those of one GPU: they were not summed, all others equal"),
    fault("blocks of a rank that are not causal", 4, SIX, "--variant=ring",
          "slice(own, end), True",
          "slice(own, end), False",
          "all gradients and the loss are those of attention that is not causal within each "
          "rank's tokens, and between ranks is"),
    slow("positions begin anew", 4, SIX, "",
          "rope.positions = (mine - layout.starts[mine])",
          "unused = (mine - layout.starts[mine])",
          "all gradients and the loss are those of positions that count each rank's two chunks "
          "from 0"),
    slow("keys' gradients stay with other ranks", 4, SIX, "--variant=ring",
          "at_home += receive()",
          "receive()",
          "backward is right down to block2.attn.o; the gradients that come next, of "
          "block2.attn.k and block2.attn.v, are off by no constant factor; all that come later "
          "are wrong, too"),
    slow("each stage has a norm", 2, SEVEN, "--clip=0.1",
          "grad_norm(model.parameters(), group)",
          "grad_norm(model.parameters())",
          "the gradient norm of each rank comes from what it holds itself: the squares were not "
          "summed over the ranks; gradients were clipped by that"),
    fault("each stage clips by its own norm", 2, SEVEN, "--clip=0.1",
          "clip_grads_with_norm_(model.parameters(), clip, norm)",
          "clip_grads_with_norm_(model.parameters(), clip, grad_norm(model.parameters()))",
          "all gradients are clipped on each rank by the norm of what it holds, while the norm "
          "of all is right"),
    slow("tied tables are not summed", 2, SEVEN, "--preset=gpt2 --vocab=256 --attention=plain",
          "PartialSums(model.parameters())",
          "PartialSums([])",
          "gradients of the tied table differ between ranks that hold the same, and add up to "
          "those of one GPU: they were not summed, all others equal"),
    slow("the loss of one stage", 2, SEVEN, "",
          "dist.all_reduce(loss)                           # for the report; the",
          "pass  # the",
          "the losses of the ranks add up to that of one GPU: each logs its own part; the "
          "gradients are right, so only what is logged is wrong"),
    fault("a stage that backward does not reach", 2, SEVEN, "",
          "        return x.grad\n",
          "        return x.grad if x.grad is None else 0 * x.grad\n",
          "gradients of all before block2 are zero on rank 0, all others equal"),
    slow("W takes the place of W", 2, SEVEN, "--variant=zb-h1",
          "gradient if weight.grad is None else weight.grad.add_(gradient)",
          "gradient",
          "all gradients but those of the embedding and the LayerNorms are those of the last "
          "micro-batch alone, all others equal"),
    slow("copies of experts are not summed", 4, EIGHT, "--experts=4 --ep=2",
          "p.partial.size() > 1)",
          "p.partial.size() > 2)",
          "gradients of the experts differ between ranks that hold the same, and add up to those "
          "of one GPU: they were not summed, all others equal"),
    fault("the balance loss is too large", 4, EIGHT, "--experts=4",
          "cfg.balance_weight * balance / cfg.sequences",
          "cfg.balance_weight * balance / len(x)",
          "gradients of all up to block2.mlp.router count the balance loss 12.00 times, all "
          "others equal"),
    slow("the router learns nothing", 4, NINE, "--experts=4 --tp=2",
          "        expert = chosen.flatten() ",
          "        gates = gates.detach()\n        expert = chosen.flatten() ",
          "backward is right down to head.norm; the gradients that come next, of "
          "block2.mlp.router, are zero; all that come later are wrong, too"),
    slow("summed over too many", 4, NINE, "--preset=gpt2 --vocab=256 --attention=plain --pp=2",
          "lambda at: min(at.pp, args.pp - 1 - at.pp)",
          "lambda at: at._replace(pp=0)",
          "gradients of the tied table differ between ranks that hold the same, and add up to "
          "2.00 times those of one GPU: they were summed over some ranks alone, all others "
          "equal"),
    fault("nothing is orthogonalized", 2, ELEVEN, "--variant=owner --optimizer=muon",
          "optimizer).way = args.variant ",
          "optimizer).way = args.variant; optimizer.orthogonal = lambda matrices, x: x ",
          "q, k, v, o, up and down moved otherwise than on one GPU, all others are right, although "
          "the gradients and their norm are right; look at the matrices that Muon orthogonalizes, "
          "which are to be whole"),
    slow("Muon scales by something else", 2, ELEVEN,
          "--optimizer=muon --dtype=float32 --lr=0.02",
          "optimizer).way = args.variant ",
          "optimizer).way = args.variant; found = optimizer.orthogonal; optimizer.orthogonal = "
          "lambda *both: [0.9 * x for x in found(*both)] ",
          "q, k, v, o, up and down moved 0.90 times as far as on one GPU, all others are right, "
          "although the gradients and their norm are right; look at the shape by which Muon "
          "scales"),
    fault("masters do not reach the model", 1, ONE,
          "--dtype=float32 --precision=bf16 --steps=3 --optimizer=adamw --lr=0.05",
          "torch._foreach_copy_([p.data for p in self.parameters], [m.data for m in "
          "self.masters])",
          "pass",
          "100% of the weights that forward uses are still those that the run began with: the "
          "update did not reach them"),
    fault("the loss scale is left in", 1, ONE, "--dtype=float32 --precision=fp16 --loss-scale=1024",
          "masters.step(limit / loss_scale)",
          "masters.step(limit)",
          "all gradients are 1,024 times those of one GPU: 1,024 is the loss scale"),
    slow("a mean in bf16", 2, TWO, "--variant=naive --dtype=bfloat16",
          "dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad /= self.group.size()",
          "all gradients are 0.50 times those of one GPU"),
    slow("a mean in float32", 2, TWO, "--variant=naive --dtype=float32 --optimizer=adamw",
          "dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad /= self.group.size()",
          "all gradients are 1/2 of those of one GPU"),
    slow("a small error in float32", 2, TWO, "--variant=naive --dtype=float32",
          "dist.all_reduce(p.grad, group=self.group)",
          "dist.all_reduce(p.grad, group=self.group)\n            p.grad += 2e-4 * p.grad.abs()",
          "all gradients are off by no constant factor; the loss is right, so look at backward, "
          "and at what follows it"),
    slow("not summed in bf16", 2, TWO, "--variant=naive --dtype=bfloat16",
          "dist.all_reduce(p.grad, group=self.group)",
          "pass",
          "all gradients differ between ranks that hold the same, and add up to those of one "
          "GPU: they were not summed"),
    slow("one rank updates otherwise", 2, TWO, "--variant=naive",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()",
          "clip_grads_with_norm_(replica.parameters(), clip, norm)\n    optimizer.step()\n    if "
          "dist.get_rank() == 1: [p.data.mul_(1.001) for p in replica.parameters()]",
          "after the update all parameters differ between ranks 0 and 1, which hold the same; "
          "the gradients and their norm are right"),
    slow("a kind is summed once more", 2, TWO, "--variant=naive",
          "    replica.finish()\n\n    norm",
          "    replica.finish()\n    for p in replica.parameters():\n        if p.ndim < 2: "
          "dist.all_reduce(p.grad)\n\n    norm",
          "gradients of the LayerNorms are 2.00 times those of one GPU, all others equal"),
    slow("one rank has twice as much", 2, TWO, "--variant=naive",
          "    replica.finish()\n\n    norm",
          "    replica.finish()\n    for p in replica.parameters():\n        if dist.get_rank(): "
          "p.grad *= 5\n\n    norm",
          "all gradients are 5.00 times those of one GPU on rank 1, and right on rank 0"),
    slow("a norm of norms", 1, ONE, "",
          "norm = grad_norm(model.parameters())\n    if clip:\n        clip_grads_with_norm_(model",
          "norm = sum(p.grad.norm() for p in model.parameters())\n    if clip:\n        "
          "clip_grads_with_norm_(model",
          "the gradient norm is the sum of the parameters' norms, and not of their squares"),
    slow("a norm without its root", 1, ONE, "",
          "norm = grad_norm(model.parameters())\n    if clip:\n        clip_grads_with_norm_(model",
          "norm = grad_norm(model.parameters()) ** 2\n    if clip:\n        "
          "clip_grads_with_norm_(model",
          "the gradient norm is the sum of the squares: its root was not taken"),
    slow("the norm after clipping", 1, ONE, "--clip=0.5",
          "        clip_grads_with_norm_(model.parameters(), clip, norm)\n    optimizer.step()",
          "        clip_grads_with_norm_(model.parameters(), clip, norm)\n    norm = "
          "grad_norm(model.parameters())\n    optimizer.step()",
          "the gradient norm is that after clipping"),
    fault("a norm before the gradients are complete", 2, TWO, "--variant=bucket",
          SENT + "\n    norm",
          LATE + SENT.replace("    replica", "    norm = grad_norm(replica.parameters())\n"
                              "    replica") + "    _",
          "the gradients are right after the step, but the norm was made before they were "
          "complete, as where nobody waits for a collective"),
    fault("an update before the gradients are complete", 2, TWO, "--variant=bucket",
          SENT + "\n    norm",
          LATE + SENT.replace("    replica", "    norm, _ = grad_norm(replica.parameters()), "
                              "optimizer.step()\n    replica")
          + "    optimizer.step = lambda: None\n    _",
          "the gradients are right after the step, but the norm and the update were made before "
          "they were complete, as where nobody waits for a collective"),
    fault("gates with the bias", 2, EIGHT, "--experts=4 --balance=bias --bias-speed=0.05 --steps=2",
          "gates = log_scores.gather(-1, chosen)",
          "gates = (log_scores + self.bias).gather(-1, chosen)",
          "all gradients are off by no constant factor; before, 1 step matched, and now the loss "
          "is off, too: look at what forward reads, beside the weights, that a step has changed"),
    slow("a loss on no rank", 2, TWO, "--variant=naive",
          "dist.all_reduce(loss, group=group)              # for",
          "loss *= 1 + run.rank  # for",
          "the ranks have different losses, from 2.4462 to 6.1760; the gradients are right, so "
          "only what is logged is wrong"),
]


@pytest.mark.parametrize(("world", "chapter", "flags", "right", "wrong", "said"), some(FAULTS))
def test_a_fault_is_called_what_it_is(ranks, tmp_path, world, chapter, flags, right, wrong, said):
    flags = flags_of(chapter, flags)
    (status, run, output), *_ = ranks(world)(run_main, chapter, flags, tmp_path, (right, wrong))
    assert status == 1 and run["problems"], output
    assert run["diagnosis"] == said
    lines = output.splitlines()
    last = max(i for i, line in enumerate(lines) if line.startswith("  ✗ "))
    assert lines[last + 1 :] == [f"  → {sentence}" for sentence in said]


def run_on_cuda(*args):
    with pretended_cuda():
        return run_main(*args)


@pytest.mark.parametrize("name", [
    "blocks of a rank that are not causal",
    *(pytest.param(name, marks=pytest.mark.full) for name in (
        "gradients are not set to zero", "a mean of means over micro-batches", "summed twice",
        "shards are not gathered", "the balance loss is too large"))])
def test_the_same_is_said_on_a_gpu(ranks, tmp_path, name):
    """And its rules are kept."""
    [(world, chapter, flags, *fault, said)] = [x.values for x in FAULTS if x.id == name]
    flags = [flag for flag in flags_of(chapter, flags) if flag != "--device=cpu"]
    (status, run, output), *_ = ranks(world)(run_on_cuda, chapter, flags, tmp_path, fault)
    assert " cuda, gloo " in output and run["diagnosis"] == said


@pytest.mark.parametrize(("flags", "rate"), [
    ("--dtype=float32 --optimizer=adamw --lr=1e9", r"--lr 1e\+09"),  # not finite
    ("--dtype=float32 --optimizer=sgd --lr=30", "--lr 30"),  # the tensors
    ("--dtype=bfloat16 --lr=1e9", r"--lr 1e\+09"),  # the loss
])
def test_where_one_gpu_is_lost_too_the_rate_is_to_blame(ranks, tmp_path, flags, rate):
    flags = [*flags_of(TWO, flags), "--steps=5", "--variant=overlap"]
    (status, run, output), _ = ranks(2)(run_main, TWO, flags, tmp_path)
    assert status == 1 and len(run["diagnosis"]) == 1, output
    assert re.fullmatch(rf"in \d steps? that matched, one GPU's weights have moved by \S+ times "
                        rf"their size: {rate} is too high, and makes any difference of rounding "
                        r"large", run["diagnosis"][0])  # fmt: skip
