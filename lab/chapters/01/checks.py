"""Checks of chapter 01: recomputation, masters, loss scales, memory and FLOPs."""

import functools
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

from common import PRESETS, Config
from lab.chapters.checking import TINY, random
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
            f"times that {name} was computed": len(times) for name, times in calls.items()}


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
    [p, _], facts = model, {}
    for step in (1, 2):
        masters.zero_grad()
        for micro_batch in (1, 2):
            (p * random(4).bfloat16()).sum().backward()
            masters.accumulate()
            facts |= {f"p.grad, micro-batch {micro_batch} of step {step}": p.grad.clone(),
                      f"the sum, micro-batch {micro_batch} of step {step}":
                          None if masters.masters[0].grad is None else
                          masters.masters[0].grad.clone()}
        masters.step(0.25)
        facts |= {f"parameters after step {step}": [q.detach().clone() for q in model],
                  f"masters after step {step}": [m.detach().clone() for m in masters.masters],
                  f"their gradients after step {step}": [m.grad for m in masters.masters],
                  f"factor after step {step}": masters.factor,
                  f"what is compared after step {step}": [
                      shown.grad for _, shown in masters.named_masters()]}
    return facts


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
    weights, log = random(3, 3).requires_grad_(), []
    masters = SimpleNamespace(
        zero_grad=lambda: log.append("zero_grad()"),
        accumulate=lambda: log.append(
            f"accumulate() with a gradient of {weights.grad.norm().item():.6g}"),
        norm=lambda: torch.tensor(norm),
        step=lambda factor: log.append(f"step of {float(factor):.6g}"))

    class Scale(SimpleNamespace):
        def update(self, overflow):
            log.append("update, an overflow" if overflow else "update, no overflow")
            self.value *= 2.0

    batch = torch.tensor([[0, 1, 2]]), torch.tensor([[1, -100, 2]])
    with mock.patch.object(chapter, "accumulate", plain_accumulate):
        loss, true_norm = chapter.mixed_step(
            masters, scale and Scale(value=scale), lambda tokens: weights[tokens], 2 * [batch], 4,
            clip)
    return {"what is called": log, "loss": loss, "norm": true_norm,
            "loss.requires_grad": loss.requires_grad}


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
