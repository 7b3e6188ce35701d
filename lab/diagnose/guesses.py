"""What else a wrong step may have computed: each guess is a way that somebody has trained, done on
one GPU. A run whose gradients are those of a guess, in all their numbers, does what it describes.
"""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from lab.run.verify import named_parameters

MOST_SHARES = 16            # data-parallel ranks of which each one's gradients are computed alone


def guesses(run, batch, drawn, before, is_loss_off):
    """Yield (words, a function that returns the loss and {name: gradient in float64} of such a step
    on one GPU). drawn: the weights that the run began with; before: those before this step."""
    all_once = torch.ones(batch.targets.shape, dtype=torch.float64)
    compute = partial(compute_step, run, run.args.model, batch)
    for words, importance in importances(run.args, batch):
        if not torch.equal(importance, all_once):
            yield words, partial(compute, before, importance)
    if before is not drawn:
        yield "the weights that the run began with", partial(compute, drawn, all_once)
    if is_loss_off:
        for words, change in attentions(run):
            yield words, partial(compute, before, all_once, change=change)


def without_balance_loss(run, batch, weights):
    """The loss and the gradients on one GPU without chapter 08's balance loss."""
    cfg = replace(run.args.model, balance_weight=0.0)
    importance = torch.ones(batch.targets.shape, dtype=torch.float64)
    return compute_step(run, cfg, batch, weights, importance)


def compute_step(run, cfg, batch, weights, importance, change=None):
    """The loss and {name: gradient} of a step on one GPU. importance (batch, seq): how often each
    target counts; sequences of which none does are left out. change(block): changes the model."""
    model, rows = run.draw(run.build(cfg, seed=None)), importance.any(1)
    for name, p in named_parameters(model):
        p.data.copy_(weights[name])
    if change:
        for block in model[1:-1]:
            change(block)
    logits = model(batch.tokens[rows].to(run.device))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    targets = batch.targets[rows].flatten().to(run.device)
    losses = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    loss = losses @ importance[rows].flatten().to(losses) / batch.valid
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad
                 for name, p in named_parameters(model)}
    return loss.item(), {name: gradient.double().cpu() for name, gradient in gradients.items()}


# ---------------------------------------------------------------------------- which targets count

def importances(args, batch):
    """Yield ways to weigh the targets of a batch: (words, how often each counts). When all is
    right, each counts once."""
    valid = batch.targets != -100                       # (batch, seq)
    row = torch.arange(len(valid))[:, None].expand(valid.shape)     # of a ramp, not --batch
    of_share = len(valid) // args.shares
    share, micro = row // of_share, row % of_share // args.micro_batch
    m, of_each = of_share // args.micro_batch, " of each rank" if args.shares > 1 else ""

    def mean_of_means(group):
        counts = torch.bincount(group[valid], minlength=int(group.max()) + 1).clamp(min=1)
        return batch.valid / (counts[group].double() * len(counts))

    if m > 1:
        yield f"all micro-batches{of_each} but the last", (micro < m - 1).double()
        yield f"the last micro-batch{of_each} alone", (micro == m - 1).double()
        yield "the mean of the micro-batches' own means", mean_of_means(m * share + micro)
    if m > 2:
        yield f"all micro-batches{of_each} but the first", (micro > 0).double()
        yield f"the first micro-batch{of_each} alone", (micro == 0).double()
    if args.shares > 1:
        yield "the mean of the ranks' own means", mean_of_means(share)
    for rank in range(args.shares if 1 < args.shares <= MOST_SHARES else 0):
        words = f"the sequences of data-parallel rank {rank} alone"
        yield words, (share == rank).double()


def tokens_of_ranks(args, world):
    """Yield which rank each place of a sequence may be on, if ranks share it: a part on each, or a
    chunk from the front and one from the back; and what those are called."""
    seq, n = args.model.seq, getattr(args, "cp", None) or (world if args.shares == 1 else 1)
    if n > 1:
        chunk = torch.arange(seq) * 2 * n // seq
        yield chunk // 2, "tokens"
        yield torch.minimum(chunk, 2 * n - 1 - chunk), "two chunks"


# -------------------------------------------------------------------------- what attention computes

def attentions(run):
    """Yield other attentions: (words, what changes a block so)."""
    place = torch.arange(run.args.model.seq, device=run.device)
    is_causal = place[:, None] >= place

    def attend_with(mask, block):
        def core(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask,
                                                  enable_gqa=q.shape[1] != k.shape[1])
        block.attn.core = core

    def count_from(positions, block):
        block.attn.rope.positions = positions

    yield "attention without a causal mask", partial(attend_with, None)
    for owners, words in tokens_of_ranks(run.args, run.world):
        owners = owners.to(run.device)
        is_own = owners[:, None] == owners
        yield (f"attention of each rank's {words} to their own keys alone",
               partial(attend_with, is_causal & is_own))
        yield (f"attention that is not causal within each rank's {words}, and between ranks is",
               partial(attend_with, is_causal | is_own))
        own_places = torch.stack([(owners[:i] == owners[i]).sum() for i in place])
        yield f"positions that count each rank's {words} from 0", partial(count_from, own_places)
