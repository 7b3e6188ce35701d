"""What else a wrong step may have computed: each guess is a way that somebody has trained, done on
one GPU. Where a run's gradients are those of a guess, in all their numbers, that is what it does.
"""

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F

MOST_SHARES = 16            # data-parallel ranks of which each one's gradients are computed alone


def first_model(run):
    """One GPU's, with the weights that the run began with."""
    return run.draw(run.build(run.args.model, seed=None))


def named(model):
    return [(getattr(p, "global_name", name), p) for name, p in model.named_parameters()]


def weights_of(model):
    return {name: p.data for name, p in named(model)}


def guesses(run, batch, drawn, before, found):
    """Yield what else the gradients may be those of: (words, a function that computes the loss and
    the gradients on one GPU, whether it is of one rank's sequences alone). drawn: the weights that
    the run began with; before: those before this step; found: the Evidence so far."""

    def compute(weights, importance, change=lambda block: None, losses_of=cross_entropy):
        model = first_model(run)
        for name, p in named(model):
            p.data.copy_(weights[name])
        for block in model[1:-1]:
            change(block)
        return weighted_step(model, batch, importance, losses_of)

    ones = torch.ones(batch.targets.shape, dtype=torch.float64)
    for words, importance, of_one_share in importances(run.args, batch, run.world):
        if not torch.equal(importance, ones):
            yield words, functools.partial(compute, before, importance), of_one_share
    if before is not drawn:
        yield "the weights that the run began with", functools.partial(compute, drawn, ones), False
    changes = (*attentions(run), *sums_of_parts(run, found)) if found.is_off("loss") else ()
    for words, change in changes:
        yield words, functools.partial(compute, before, ones, change), False
    for words, losses_of in vocabularies(run, found):
        yield words, functools.partial(compute, before, ones, losses_of=losses_of), False


def unbalanced(run, batch, weights):
    """The loss and the gradients on one GPU without chapter 08's balance loss."""
    cfg = replace(run.args.model, balance_weight=0.0)
    model = run.draw(run.build(cfg, seed=None))
    for name, p in named(model):
        p.data.copy_(weights[name])
    return weighted_step(model, batch, torch.ones(batch.targets.shape, dtype=torch.float64))


def cross_entropy(logits, targets):
    """Of each target."""
    return F.cross_entropy(logits, targets, reduction="none")


def weighted_step(model, batch, importance, losses_of=cross_entropy):
    """The loss and {name: gradient}. importance (batch, seq): how often each target counts;
    sequences of which none does are left out."""
    device, rows = next(model.parameters()).device, importance.any(1)
    logits = model(batch.tokens[rows].to(device))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = losses_of(logits.flatten(0, 1), batch.targets[rows].flatten().to(device))
    loss = losses @ importance[rows].flatten().to(losses) / batch.valid
    loss.backward()
    return loss.detach(), {name: torch.zeros_like(p) if p.grad is None else p.grad
                           for name, p in named(model)}


def importances(args, batch, world):
    """Yield ways to weigh the targets of a batch: (words, how often each counts, whether they are
    one rank's sequences alone). All that are right count once."""
    valid = batch.targets != -100                       # (batch, seq)
    row = torch.arange(len(valid))[:, None].expand(valid.shape)     # of a ramp, not --batch
    of_share = len(valid) // args.shares
    share, micro = row // of_share, row % of_share // args.micro_batch
    m, of_each = of_share // args.micro_batch, " of each rank" if args.shares > 1 else ""
    if m > 1:
        yield f"all micro-batches{of_each} but the last", (micro < m - 1).double(), False
        yield f"the last micro-batch{of_each} alone", (micro == m - 1).double(), False
    if m > 2:
        yield f"all micro-batches{of_each} but the first", (micro > 0).double(), False
        yield f"the first micro-batch{of_each} alone", (micro == 0).double(), False

    def mean_of_means(group):
        counts = torch.bincount(group[valid], minlength=int(group.max()) + 1).clamp(min=1)
        return batch.valid / (counts[group].double() * len(counts))

    if m > 1:
        yield "the mean of the micro-batches' own means", mean_of_means(m * share + micro), False
    if args.shares > 1:
        yield "the mean of the ranks' own means", mean_of_means(share), False
    if args.shares > 1 and m > 1:
        yield "the mean of means over a micro-batch of all ranks", mean_of_means(micro), False
    for rank in range(args.shares if 1 < args.shares <= MOST_SHARES else 0):
        words = f"the sequences of data-parallel rank {rank} alone"
        yield words, (share == rank).double(), True
    for owners, words in tokens_of_ranks(args, world):
        group = owners.expand(valid.shape)
        yield f"the mean of means over each rank's {words}", mean_of_means(group), False


def tokens_of_ranks(args, world):
    """Yield which rank each place of a sequence may be on, if ranks share it: a part on each, or a
    chunk from the front and one from the back; and what those are called."""
    seq, n = args.model.seq, getattr(args, "cp", None) or (world if args.shares == 1 else 1)
    if n > 1:
        chunk = torch.arange(seq) * 2 * n // seq
        yield chunk // 2, "tokens"
        yield torch.minimum(chunk, 2 * n - 1 - chunk), "two chunks"


def attentions(run):
    """Yield other attentions: (words, what changes a block so)."""
    place = torch.arange(run.args.model.seq, device=run.device)
    is_causal = place[:, None] >= place

    def masked(mask, scale=None):
        def core(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale,
                                                  enable_gqa=q.shape[1] != k.shape[1])
        return lambda block: setattr(block.attn, "core", core)

    yield "attention without a causal mask", masked(torch.ones_like(is_causal))
    yield "attention whose scores are not divided by the root of head_dim", masked(is_causal, 1.0)
    for owners, words in tokens_of_ranks(run.args, run.world):
        owners = owners.to(run.device)
        is_own = owners[:, None] == owners
        begun = torch.stack([(owners[:i] == owners[i]).sum() for i in place])
        yield (f"attention of each rank's {words} to their own keys alone",
               masked(is_causal & is_own))
        yield (f"attention that is not causal within each rank's {words}, and between ranks is",
               masked(is_causal | is_own))
        yield (f"attention that is causal within each rank's {words}, and between ranks is not",
               masked(is_causal | ~is_own))
        yield (f"positions that count each rank's {words} from 0",
               lambda block, begun=begun: setattr(block.attn.rope, "positions", begun))


def parts_of(found, name, dim):
    """Into how many parts the ranks have cut a parameter along this dimension. All ranks know it,
    those too that have other layers."""
    cuts = next((seen.where for seen in found.at("gradients", name).values()), ())
    return next((parts for cut, _, parts in cuts if cut == dim), 1)


def sums_of_parts(run, found):
    """Yield other sums over ranks, where each rank keeps that of its own chunk of the sequence:
    (words, what changes a block so)."""
    ranks = parts_of(found, "block1.attn.o.weight", 1)
    if run.args.model.seq % ranks or 1 in (ranks, parts_of(found, "block1.mlp.down.weight", 1)):
        return

    def summed(whose):
        """whose(chunk, rank): the chunk of which a rank's part is; None: it has none there."""

        def with_these(linear, args):
            x = args[0].unflatten(1, (ranks, -1)).unflatten(-1, (ranks, -1))
            part = lambda chunk, rank: (x[:, chunk, :, rank] if chunk is not None else
                                        torch.zeros_like(x[:, 0, :, rank]))
            return torch.cat([torch.cat([part(whose(chunk, rank), rank) for rank in range(ranks)],
                                        dim=-1) for chunk in range(ranks)], dim=1)

        return lambda block: [linear.register_forward_pre_hook(with_these)
                              for linear in (block.attn.o, block.mlp.down)]

    yield ("sums over the ranks of which each rank has its own part alone",
           summed(lambda chunk, rank: chunk if rank == chunk else None))
    yield ("sums over the ranks that lack each rank's own part",
           summed(lambda chunk, rank: None if rank == chunk else chunk))
    yield ("sums over the ranks in which the next rank's part is of its own chunk",
           summed(lambda chunk, rank: rank if rank == (chunk + 1) % ranks else chunk))
    yield ("sums over the ranks of the next rank's chunk",
           summed(lambda chunk, rank: (chunk + 1) % ranks))
    if ranks > 2:
        yield ("sums over the ranks of the chunk of the rank before",
               summed(lambda chunk, rank: (chunk - 1) % ranks))


def vocabularies(run, found):
    """Yield other losses of a vocabulary that ranks share: (words, each target's loss of logits
    (tokens, vocab) and targets)."""
    ranks, vocab = parts_of(found, "head.out.weight", 0), run.args.model.vocab
    if ranks == 1:
        return
    columns = -(-vocab // ranks)                        # of a rank; some may be padding
    padding = columns * ranks - vocab

    def loss_of(own, of_not_valid=0):
        """own(logits of each rank (tokens, ranks, columns), targets): those of a target."""
        def losses(logits, targets):
            cut = F.pad(logits, (0, padding), value=-torch.inf).unflatten(-1, (ranks, columns))
            cut = cut - cut.detach().amax((-1, -2), keepdim=True)
            less = own(cut, targets.clamp(min=0)).where(targets != -100, 0)
            weight = torch.where(targets != -100, 1, of_not_valid)
            return (cut.exp().sum((-1, -2)).log() - less) * weight
        return losses

    def right(cut, targets):
        return cut.flatten(-2).gather(-1, targets[:, None])[:, 0]

    def on_every_rank(cut, targets):
        first = torch.arange(ranks, device=targets.device) * columns
        column = (targets[:, None] - first).clamp(0, columns - 1)
        return cut.gather(-1, column[..., None]).sum((-1, -2))

    def on_both_sides(cut, targets):
        is_first = (targets % columns == 0) & (targets > 0)
        return right(cut, targets) + right(cut, (targets - 1).clamp(min=0)).where(is_first, 0)

    def less_own_largest(logits, targets):
        cut = F.pad(logits, (0, padding), value=-torch.inf).unflatten(-1, (ranks, columns))
        cut = cut - cut.detach().amax(-1, keepdim=True)
        own = right(cut, targets.clamp(min=0))
        return (cut.exp().sum((-1, -2)).log() - own).where(targets != -100, 0)

    yield "logits from which each rank takes its own largest one", less_own_largest
    yield "a loss in which targets that are not valid count, too", loss_of(right, 1)
    yield "a loss in which every rank has each target in one of its columns", loss_of(on_every_rank)
    yield "a loss in which a rank has the first column of the next as well", loss_of(on_both_sides)
    if padding:
        yield ("a vocabulary whose columns of padding count as tokens",
               lambda logits, targets: cross_entropy(F.pad(logits, (0, padding)), targets))
