"""The exercises of chapter 01: recomputation, masters, loss scales, memory and FLOPs."""

import functools
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from common import PRESETS, Config
from lab.classroom.exercise import TINY, Exercise, Run, Same, random
from lab.run.meters import ActivationMeter


def forward_of_layers(chapter, recompute, k=1):
    """Of three blocks: the logits, how often each is computed, and what is kept."""
    model = chapter.gpt(Config(3, 8, 2, 1, 4, 8), dtype=torch.float64)
    tokens = torch.tensor([[0, 1, 2, 3], [7, 6, 5, 4]])
    calls = {name: [] for name, _ in model.named_children()}
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda *about, name=name: calls[name].append("forward"))
    offloaded = []

    class Offload(chapter.Offload):
        def __enter__(self):
            offloaded.append("forward")
            return super().__enter__()

    meter = ActivationMeter([tokens])
    with mock.patch.object(chapter, "Offload", Offload), meter:
        logits = chapter.logits_of(model, tokens, recompute, k)
    kept = meter.bytes
    logits.square().sum().backward()
    return {"logits": logits, "the gradient of the embedding": model.embedding.weight.grad,
            "bytes kept for backward": kept if recompute != "offload" else "the host's",
            "times that Offload() was entered": len(offloaded)} | {
            f"times that {name} was computed": len(those) for name, those in calls.items()}


def cores_of_blocks(chapter, recompute):
    """How often the core that was asked for is called, by whom, and what comes out of it."""
    model, calls = chapter.gpt(Config(2, 8, 2, 1, 4, 8), dtype=torch.float64), []

    def core(q, k, v):
        calls.append(q.shape[-1])
        return q * k.mean() + v.exp()

    with mock.patch.dict(chapter.CORES, sdpa=core):
        chapter.choose_core(model, "sdpa", recompute)
    q, k, v = (random(2, 3).requires_grad_() for _ in "qkv")
    meter = ActivationMeter([q, k, v])
    with meter:
        out = model.block2.attn.core(q, k, v)
    kept = meter.bytes
    out.sum().backward()
    model(torch.tensor([[0, 1, 2]]))
    return {"what the core gives": out, "the gradient of k": k.grad, "bytes kept": kept,
            "width of q in each call": calls}


def sums_of_uneven_batches(chapter):
    """Of 3, 1 and 0 valid targets, with a backward of its own."""
    weights, losses = random(3, 3).requires_grad_(), []
    batches = [(torch.tensor([[0, 1, 2]]), torch.tensor([targets])) for targets in (
        [1, 2, 0], [-100, 1, -100], [-100, -100, -100])]

    def backward(loss):
        losses.append(loss.detach())
        (3 * loss).backward()

    loss = chapter.accumulate(lambda tokens: weights[tokens], batches, 4, backward)
    return {"the loss": loss, "its requires_grad": loss.requires_grad,
            "what goes into backward": losses, "gradient": weights.grad}


def without_a_backward_of_ones_own(chapter):
    weights, ones = random(3, 3).requires_grad_(), torch.ones(1, 2, dtype=int)
    chapter.accumulate(lambda tokens: weights[tokens], 2 * [(ones, ones)], 4)
    return {"gradient": weights.grad}


def masters_of(chapter, dtype, fp32_grads):
    """Of two parameters, the second of which has no gradient."""
    model = nn.ParameterList([random(4).float(), random(2).float()])
    for name, p in model.named_parameters():
        p.global_name = name
    make = functools.partial(torch.optim.SGD, lr=0.125, momentum=0.5)
    return model, chapter.MasterWeights(model, make, dtype, fp32_grads)


def two_steps_of_masters(chapter, fp32_grads):
    """Of two micro-batches each: what is there after each micro-batch, and after each step."""
    model, masters = masters_of(chapter, torch.bfloat16, fp32_grads)
    [p, _], found = model, {}
    for step in (1, 2):
        masters.zero_grad()
        for micro_batch in (1, 2):
            (p * random(4).bfloat16()).sum().backward()
            masters.accumulate()
            found |= {f"p.grad, micro-batch {micro_batch} of step {step}": p.grad.clone(),
                      f"the sum, micro-batch {micro_batch} of step {step}":
                          None if masters.masters[0].grad is None else
                          masters.masters[0].grad.clone()}
        masters.step(0.25)
        found |= {f"parameters after step {step}": [q.detach().clone() for q in model],
                  f"masters after step {step}": [m.detach().clone() for m in masters.masters],
                  f"their gradients after step {step}": [m.grad for m in masters.masters],
                  f"factor after step {step}": masters.factor,
                  f"what is compared after step {step}": [
                      shown.grad for _, shown in masters.named_masters()]}
    return found


def scale_after_each(chapter, steps, patience):
    """steps: a letter each, "g" of a good one, "o" of one that overflows."""
    scale, values = chapter.LossScale(64.0, patience), {}
    for number, letter in enumerate(steps, start=1):
        scale.update(letter == "o")
        values[f"step {number}"] = scale.value
    return values


def plain_accumulate(forward, micro_batches, valid, backward):
    """In place of the chapter's: one sum of all, of which each micro-batch brings its part."""
    losses = []
    for tokens, targets in micro_batches:
        every = F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten(), reduction="none")
        losses.append(every.sum() / valid)
        backward(losses[-1])
    return torch.stack(losses).sum().detach()


def mixed_step_of(chapter, norm, scale, clip):
    """What a step tells its masters and its scale. norm: what masters.norm() gives."""
    weights, said = random(3, 3).requires_grad_(), []
    note = lambda *words: said.append(" ".join(f"{word:.6g}" if isinstance(word, float) else word
                                               for word in words))
    masters = SimpleNamespace(
        zero_grad=lambda: note("zero_grad()"),
        accumulate=lambda: note("accumulate() with a gradient of", weights.grad.norm().item()),
        norm=lambda: torch.tensor(norm), step=lambda factor: note("step of", float(factor)))

    class Scale(SimpleNamespace):
        def update(self, overflow):
            note("update,", "an overflow" if overflow else "no overflow")
            self.value *= 2.0

    batch = torch.tensor([[0, 1, 2]]), torch.tensor([[1, -100, 2]])
    with mock.patch.object(chapter, "accumulate", plain_accumulate):
        loss, true_norm = chapter.mixed_step(
            masters, scale and Scale(value=scale), lambda tokens: weights[tokens], 2 * [batch], 4,
            clip)
    return {"what is called": said, "loss": loss, "norm": true_norm,
            "loss.requires_grad": loss.requires_grad}


def parts_of(chapter, preset):
    return chapter.parameters_by_part(PRESETS[preset])


def numbers_by_class(chapter, part):
    """part: 0, what a block keeps; 1, what is kept around all of them."""
    numbers = {}
    for _, count, kind in chapter.kept_for_backward(TINY, 3)[part]:
        numbers[kind] = numbers.get(kind, 0) + count
    return numbers


def numbers_of(chapter, preset):
    return [sum(count for _, count, _ in part)
            for part in chapter.kept_for_backward(PRESETS[preset], 1)]


def flops_of_parts(chapter):
    """What the parts of a step take, as differences of steps that have more of one of them."""

    def flops(layers, batch, seq):
        cfg = Config(layers, 64, 8, 4, seq, 99 * (layers == 0))
        return chapter.step_flops(cfg, batch, "plain", "none")

    return {"the head": flops(0, 2, 16),
            "what all linears take": 2 * flops(1, 2, 16) - flops(1, 1, 32),
            "the core": flops(1, 1, 32) - flops(1, 2, 16)}


def most_of_groups(chapter):
    return {f"{layers} layers, k = {k}": chapter.most_again(layers, k, 1000, 14500)
            for layers in (7, 36) for k in (1, 2, 3, 7)}


def best_of_groups(chapter):
    """In units of a layer's input: a GPT's layer, one with long sequences, a small one."""
    return {f"{layers} layers, {of_layer} inputs each": chapter.best_k(layers, 1, of_layer)
            for layers in (1, 4, 36, 96) for of_layer in (0.1, 3, 14.5, 60)}


def flops_recomputed(chapter):
    return {again: chapter.step_flops(TINY, 3, "plain", again) for again in ("selective", "full")}


def flops_of_attention(chapter):
    return {attention: chapter.step_flops(TINY, 3, attention, "none")
            for attention in ("plain", "sdpa", "triton")}


def flops_with_early_stop(chapter):
    return {f"{attention}, {again}": chapter.step_flops(TINY, 3, attention, again, True)
            for attention in ("plain", "sdpa", "triton")
            for again in ("none", "selective", "full")}


def flops_of_groups(chapter):
    return {f"k = {k}": chapter.step_flops(TINY, 3, "plain", "every", True, k) for k in (1, 2, 3)}


EXERCISES = [
    Exercise(
        "01.1", "choose_core logits_of", 2,
        "`choose_core`: put the attention that is asked for into each block, as its core; with "
        "recompute \"selective\", nothing of a core is kept for backward but q, k and v. "
        "`logits_of`: walk the tokens through the list of modules; with \"full\", nothing of a "
        "block is kept but its input, and with \"every\" nothing of k blocks together "
        "(`groups_of`). With \"offload\" it is as with \"full\", within an `Offload()`.",
        ("`recomputed` keeps the inputs of a function, and calls it once more in backward. "
         "Which function is that in each of the two cases?",
         "In `full` it is the block, which is a group of k = 1, called on x. In `selective` it is "
         "the core: what is put into block.attn.core then takes q, k and v, and hands them to the "
         "core by way of `recomputed`."),
        (Run(1, "--layers 1 --dim 16 --batch 6 --micro-batch 2 --recompute full"),
         Run(1, "--layers 3 --dim 16 --seq 8 --batch 2 --recompute every --k 2"),
         Run(1, "--layers 1 --dim 16 --seq 8 --batch 2 --recompute offload"),
         Run(1, "--layers 1 --dim 16 --batch 6 --micro-batch 2 --recompute selective"),
         Same(forward_of_layers, "nothing computed again", ("none",)),
         Same(forward_of_layers, "3 blocks, full", ("full",)),
         Same(forward_of_layers, "3 blocks, every 2", ("every", 2)),
         Same(forward_of_layers, "3 blocks, offload", ("offload",)),
         Same(forward_of_layers, "3 blocks, selective", ("selective",)),
         Same(cores_of_blocks, "the cores with none", ("none",)),
         Same(cores_of_blocks, "the cores with selective", ("selective",)),
         Same(cores_of_blocks, "the cores with full", ("full",))),
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
         Same(sums_of_uneven_batches, "micro-batches of 3, 1 and 0 valid targets, of 4"),
         Same(without_a_backward_of_ones_own, "with the backward that is the default")),
    ),
    Exercise(
        "01.3", "MasterWeights.accumulate MasterWeights.add_to_masters MasterWeights.step", 3,
        "With fp32_grads, `accumulate` adds the gradients of a micro-batch to fp32 sums, which "
        "are the masters', and sets them to zero. `step` updates the masters with `factor` "
        "times the sums, noted in self.factor, and rounds them to the model's parameters. "
        "Without fp32_grads, gradients exist in fp32 during `step` alone.",
        ("There are two lists of parameters. Which of them does backward fill with gradients, "
         "which does self.optimizer know, and which does forward read? Something must be "
         "carried over each time.",
         "add_to_masters gives a master an fp32 copy of the gradient, or adds to what it has. "
         "The next backward would add to what is not set to zero. "
         "Without fp32_grads, `step` begins with add_to_masters, and ends by taking the "
         "masters' gradients away. named_masters needs self.factor; and some "
         "parameters may have no gradient."),
        (Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                "--precision bf16-fp32grad"),
         Run(1, "--layers 1 --dim 16 --seq 8 --batch 6 --micro-batch 2 --dtype float32 "
                "--precision fp16 --loss-scale 4096 --clip 0.1"),
         Same(two_steps_of_masters, "two steps with fp32_grads", (True,)),
         Same(two_steps_of_masters, "two steps without fp32_grads", (False,))),
        "MasterWeights: what a step does",
    ),
    Exercise(
        "01.4", "LossScale.update", 1,
        "An overflow halves the scale. `patience` good steps in a row double it, and as many "
        "more double it again.",
        ("What does an overflow do to the number of good steps in a row?",
         "self.good counts them, and an overflow sets it back to zero. Zero is a multiple of "
         "patience, too, but no reason to double."),
        (Same(scale_after_each,
              "64, patience 3, good (g) and overflowing (o) steps ggogggggg", ("ggogggggg", 3)),
         Same(scale_after_each, "64, patience 2, steps goggog", ("goggog", 2))),
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
         Same(mixed_step_of, "a scale of 64, which doubles; a norm of 640, clip 2", (640., 64., 2)),
         Same(mixed_step_of, "a scale of 64; a norm of 64, clip 2", (64., 64., 2)),
         Same(mixed_step_of, "a scale of 64, a norm of 64, no clip", (64., 64., None)),
         Same(mixed_step_of, "a scale of 64, an infinite norm", (float("inf"), 64., 2)),
         Same(mixed_step_of, "a scale of 64, a norm of zero, clip 2", (0., 64., 2)),
         Same(mixed_step_of, "no scale, a norm of 10, clip 2", (10., None, 2))),
    ),
    Exercise(
        "01.6", "kept_for_backward", 2,
        "List (words, how many numbers, class) of what a block, with a gate or without, keeps in "
        "outside, inputs, inside, keys and values, core. Then of what is kept around all blocks: "
        "RoPE's cos and sin (positions), what the last norm reads and gives (outside), "
        "log-probabilities and a scalar (logits), tokens and targets (ids). The words are yours.",
        ("Walk through Block.forward, and ask of each operator what its backward reads. The "
         "lesson says it of each of them. A sum reads nothing, and what two operators read is "
         "kept once.",
         "Let x be batch · seq · dim. A norm keeps x and two numbers for each token, outside; "
         "what it gives is x, an input. Inside are q (turned by RoPE), the input of o, and "
         "what goes into GELU and comes out, 4 x each. k and v have kv_heads / heads of x "
         "each; a gate keeps what it gives, and silu of it. The core keeps softmax's output: "
         "seq weights for each token and head. cos and sin have half of head_dim for each "
         "position."),
        (Same(numbers_by_class, "a block, by class", (0,)),
         Same(numbers_by_class, "around the blocks, by class", (1,)),
         Same(numbers_of, "all of a block, and around the blocks", ("7b",)),
         Same(numbers_of, "all of a block with a gate, and around the blocks", ("llama-8b",))),
    ),
    Exercise(
        "01.7", "step_flops", 2,
        "Count a step's FLOPs: forward, backward, and what is recomputed. In backward, sdpa "
        "computes q @ k.T once more, triton that and dout @ v.T. With early_stop, a recompute "
        "leaves out its last matmul: of each k blocks a down in full; weights @ v in selective, if "
        "attention is plain.",
        ("A matmul of (m, k) by (k, n) takes 2mkn. Which matmuls of a block multiply by "
         "weights, and which multiply activations with each other?",
         "The linears take 2 FLOPs per weight and token. The core has two matmuls of 2 · seq "
         "· dim for each token, masked or not. Backward takes twice a forward's; of the core's "
         "matmuls that are 4, sdpa's 5, triton's 7. Full adds a forward of the block, "
         "selective one of the core. The head, outside of the blocks, takes a forward's three "
         "times."),
        (Same(flops_of_parts, "plain attention, nothing recomputed"),
         Same(flops_recomputed, "plain attention"),
         Same(flops_of_attention, "nothing recomputed"),
         Same(flops_with_early_stop, "with early_stop"),
         Same(flops_of_groups, "with early_stop, k blocks recomputed together")),
    ),
    Exercise(
        "01.8", "most_again best_k", 1,
        "Blocks are computed again in groups of k, the last group first. `most_again`: the most "
        "bytes that are kept in backward for that. `best_k`: the k, from 1 to layers, with which "
        "that is least; of several the smallest.",
        ("While the last group is computed again, what is there of all other groups, and what of "
         "this one? Later in backward there is less.",
         "There are ceil(layers / k) groups (the first has what is left over). Of each but the "
         "last only its input is there, and of the last all that its k layers keep, in which its "
         "input is counted already."),
        (Same(most_of_groups, "the most bytes"), Same(best_of_groups, "the best k")),
    ),
    Exercise(
        "01.9", "parameters_by_part", 1,
        "How many parameters has each part of the model, over all layers: embedding, q and o, k "
        "and v, MLP, norms, head? Linears have no bias.",
        ("Which shape has each matrix of a block? With GQA k and v have fewer rows than q.",
         "A head has dim / heads rows in q, and a kv head as many in each of k and v. cfg.mlp() "
         "knows an MLP. There are two norms in each block and one before the head: a LayerNorm "
         "has a weight and a bias, an RMSNorm (cfg.gated) a weight. A tied head is the embedding."),
        (Same(parts_of, "tiny: GQA", ("tiny",)), Same(parts_of, "gpt2: tied", ("gpt2",)),
         Same(parts_of, "llama-8b: RMSNorm, and an MLP with a gate", ("llama-8b",))),
        "parameters of each part",
    ),
]
