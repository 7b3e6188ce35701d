"""A mixture of experts as its definition has it, for the single-GPU run that others are held to.

That run builds its model by the chapter's own code. For most chapters that is common.gpt, which is
no part of what they teach. But the mixture of chapters 08 and 09 is: a mistake in it would be in
both runs, and they would agree. So here every token goes through every expert, with weights of
which most are zero, and losses of routers are written down anew.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn


class WithLoss(torch.autograd.Function):
    """Hands x on, and in backward a gradient of 1 to a loss that is not part of x."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        [loss] = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


def losses_of_router(cfg, logits, scores, taken):
    """What a router adds to the loss of the batch: means over its sequences. taken (batch, seq,
    experts): 1 where a token goes to an expert."""
    load = taken.sum(1) / (cfg.top_k * taken.shape[1])      # each expert's share of the picks
    if getattr(cfg, "over_batch", False):                   # of all sequences
        load = load.sum(0) / len(load)
    scores = scores / scores.sum(-1, keepdim=True)          # a softmax's are shares already
    balance = cfg.experts * (load * scores.mean(1)).sum()   # (batch, experts): of the sequences
    z = torch.logsumexp(logits, -1).pow(2).mean(1).sum()
    weighted = cfg.balance_weight * balance + getattr(cfg, "z_loss", 0) * z
    return weighted / cfg.sequences


def without_far_nodes(cfg, chances):
    """chances (batch, seq, experts), and none where a machine is not among a token's best: those of
    the largest sums of their ceil(k/limit) largest chances."""
    nodes = chances.chunk(cfg.nodes, dim=-1)
    most = -(-cfg.top_k // cfg.node_limit)
    value = torch.stack([node.sort(dim=-1, descending=True).values[..., :most].sum(-1)
                         for node in nodes], dim=-1)        # (batch, seq, nodes)
    rank = (value[..., None, :] > value[..., None]).sum(-1)             # how many are better
    return torch.cat([node.where(rank[..., i, None] < cfg.node_limit, -torch.inf)
                      for i, node in enumerate(nodes)], dim=-1)


def forward(moe, x):
    """x (batch, seq, dim) to the same shape. moe: a mixture of chapter 08 or 09 on one GPU."""
    cfg, wide = moe.cfg, x.to(torch.promote_types(x.dtype, torch.float32))
    logits = wide @ moe.router.weight.to(wide).T            # (batch, seq, experts)
    scores = logits.sigmoid() if getattr(cfg, "router", "") == "sigmoid" else logits.softmax(-1)
    chances = scores.detach() + getattr(moe, "bias", 0)
    if getattr(cfg, "node_limit", 1) < getattr(cfg, "nodes", 1):
        chances = without_far_nodes(cfg, chances)
    ranked = chances.sort(dim=-1, descending=True, stable=True).indices
    taken = torch.zeros_like(scores).scatter(-1, ranked[..., :cfg.top_k], 1.0)
    if hasattr(moe, "load"):                                # how often each was picked
        moe.load += taken.sum((0, 1)).to(moe.load)

    gates = scores * taken
    if cfg.top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    gates = WithLoss.apply(gates, losses_of_router(cfg, logits, scores, taken))
    out = 0
    for e, down in enumerate(moe.down):
        hidden = F.silu(x @ moe.gate[e]) * (x @ moe.up[e]) if cfg.gated else F.gelu(x @ moe.up[e])
        out = out + hidden @ down * gates[..., e, None]
    out = out.to(x.dtype)
    return out + moe.shared(x) if getattr(moe, "shared", None) else out


def move_biases(model: nn.Module) -> None:
    """After a step: each bias by its speed, towards experts that had less than the mean."""
    for module in model.modules():
        if getattr(module, "load", None) is not None:
            mean = module.load.sum() / len(module.load)
            module.bias += module.cfg.bias_speed * (mean - module.load).sign()
            module.load *= 0


def take_place(model: nn.Module) -> nn.Module:
    """In a single-GPU model, of each mixture that drops no tokens. Returns the model."""
    for module in model.modules():
        if hasattr(module, "router") and not getattr(module.cfg, "places", None):
            module.forward = functools.partial(forward, module)
    return model
