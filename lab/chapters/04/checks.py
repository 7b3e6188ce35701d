"""Checks of chapter 04: f and g, heads that are cut, a vocabulary that is cut."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from common import Config, Cut, draw_weights
from lab.chapters.checking import how_it_is_cut, random, random_of_rank
from lab.run.meters import ActivationMeter, CommMeter


def backward_of(chapter, name):
    """Of f or g, on two ranks beside a third one: the gradient of x, and what backward sends."""
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    x = random(2, 3).requires_grad_()
    out = getattr(chapter, name).apply(x, two if dist.get_rank() < 2 else one)
    meter = CommMeter()
    with meter:
        out.backward(random(2, 3) if name == "SumOut" else random_of_rank(2, 3))
    return {"the gradient of x": x.grad, "what backward sends": sent(meter)}


def sent(meter):
    return {op: (counts["calls"], counts["bytes"]) for op, counts in meter.total.items()}


def loss_of_logits(chapter, vocab, columns, scale):
    """And its gradient, what is sent, and what is kept for backward."""
    logits = (scale * random_of_rank(2, 3, columns)).requires_grad_()
    targets = torch.tensor([[0, vocab - 1, -100], [columns, columns - 1, 1]])
    meter, kept = CommMeter(), ActivationMeter([targets])
    with kept, meter:
        loss = chapter.VocabParallelLoss.apply(logits, targets, vocab, dist.group.WORLD)
    numbers = kept.bytes
    (loss / 7).backward()
    return {"the loss": loss, "its gradient": logits.grad, "what is sent": sent(meter),
            "bytes kept": numbers}


def backward_of_columns(chapter):
    """Of two linears of different widths, on two ranks."""
    x, group = random_of_rank(2, 3, 4).requires_grad_(), dist.group.WORLD
    weights = [random_of_rank(width, 4).requires_grad_() for width in (5, 2, 3)]
    outs = chapter.CopyInColumns.apply(x, group, *weights)
    torch.autograd.backward(outs, [random_of_rank(*out.shape) for out in outs])
    return {"the gradient of x": x.grad, "those of the weights": [w.grad for w in weights]}


class ThreeKinds(nn.Module):
    """Logits of a part that ranks share, of one that is cut, and of one that all hold."""

    def __init__(self, group):
        super().__init__()
        self.shared, self.cut, self.whole = (nn.Parameter(random(4, 6)) for _ in range(3))
        self.shared.partial, self.shared.global_name = group, "shared"
        self.cut.cuts = (Cut(0, group.rank(), 2, group),)

    def forward(self, tokens):
        return sum(p[tokens] for p in self.parameters()) * (1 + dist.get_rank())


def plain_loss(logits, targets, vocab, group):
    """In place of VocabParallelLoss.apply."""
    return F.cross_entropy(logits[..., :vocab].flatten(0, 1), targets.flatten(), reduction="sum")


def step_of_three_kinds(chapter, clip):
    group, facts = dist.group.WORLD, {}
    model = ThreeKinds(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, 2, 3, 0], [-100, 4, -100, -100])]
    with mock.patch.object(chapter, "VocabParallelLoss", SimpleNamespace(apply=plain_loss)):
        for step in (1, 2):
            meter = CommMeter()
            with meter:
                loss, norm = chapter.train_step(model, optimizer, batches, 5, clip, 5, group)
            facts |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                      f"what step {step} sends": sent(meter),
                      "loss.requires_grad": loss.requires_grad}
            facts |= {f"{name}, after step {step}": p.detach().clone()
                      for name, p in model.named_parameters()}
    return facts


def how_a_model_is_cut(chapter, variant, kv_heads, gated):
    """Each parameter's shape, cuts, and the ranks that sum its gradient; and what it computes."""
    cfg = Config(1, 16, 4, kv_heads, 4, 10, gated=gated, ffn=24)
    model = chapter.parallelize(chapter.gpt(cfg, seed=None), cfg, dist.group.WORLD, variant)
    draw_weights(model, 0, dtype=torch.float64)
    facts = {"the sub-layers": [type(part).__name__ for part in (model.block1.attn,
                                                                 model.block1.mlp)],
             "logits": model(torch.tensor([[9, 1, 5, 0]]))}
    return facts | {p.global_name: how_it_is_cut(p) for p in model.parameters()}
