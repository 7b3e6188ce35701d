"""What else a wrong step may have computed: each guess is a way that somebody has trained, done on
one GPU. A run whose gradients are those of a guess, in all their numbers, does what it describes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from lab.run.verify import named_parameters

MOST_SHARES = 16            # data-parallel ranks of which each one's gradients are computed alone


class Guess(NamedTuple):
    """compute(): the loss and {name: gradient in float64} of a step on one GPU."""
    words: str
    compute: Callable
    is_of_one_rank: bool = False        # only of the sequences of one data-parallel rank


def guesses(run, batch, drawn, before, evidence):
    """Yield Guesses. drawn: the weights that the run began with; before: those before this step;
    evidence: what is known so far."""
    all_once = torch.ones(batch.targets.shape, dtype=torch.float64)
    compute = partial(compute_step, run, run.args.model, batch)
    for words, importance, is_of_one_rank in importances(run.args, batch, run.world):
        if not torch.equal(importance, all_once):
            yield Guess(words, partial(compute, before, importance), is_of_one_rank)
    if before is not drawn:
        yield Guess("the weights that the run began with", partial(compute, drawn, all_once))
    if evidence.is_off("loss"):
        for words, change in (*attentions(run), *sums_of_parts(run, evidence)):
            yield Guess(words, partial(compute, before, all_once, change=change))
    for words, losses_of in vocabularies(run, evidence):
        yield Guess(words, partial(compute, before, all_once, losses_of=losses_of))


def without_balance_loss(run, batch, weights):
    """The loss and the gradients on one GPU without chapter 08's balance loss."""
    cfg = replace(run.args.model, balance_weight=0.0)
    importance = torch.ones(batch.targets.shape, dtype=torch.float64)
    return compute_step(run, cfg, batch, weights, importance)


def cross_entropy(logits, targets):
    """Of each target."""
    return F.cross_entropy(logits, targets, reduction="none")


def compute_step(run, cfg, batch, weights, importance, change=None, losses_of=cross_entropy):
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
    losses = losses_of(logits.flatten(0, 1), targets)
    loss = losses @ importance[rows].flatten().to(losses) / batch.valid
    loss.backward()
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad
                 for name, p in named_parameters(model)}
    return loss.item(), {name: gradient.double().cpu() for name, gradient in gradients.items()}


# ---------------------------------------------------------------------------- which targets count

def importances(args, batch, world):
    """Yield ways to weigh the targets of a batch: (words, how often each counts, whether only one
    rank's do). When all is right, each counts once."""
    valid = batch.targets != -100                       # (batch, seq)
    row = torch.arange(len(valid))[:, None].expand(valid.shape)     # of a ramp, not --batch
    of_share = len(valid) // args.shares
    share, micro = row // of_share, row % of_share // args.micro_batch
    m, of_each = of_share // args.micro_batch, " of each rank" if args.shares > 1 else ""

    def mean_of_means(group):
        counts = torch.bincount(group[valid], minlength=int(group.max()) + 1).clamp(min=1)
        return batch.valid / (counts[group].double() * len(counts))

    if m > 1:
        yield f"all micro-batches{of_each} but the last", (micro < m - 1).double(), False
        yield f"the last micro-batch{of_each} alone", (micro == m - 1).double(), False
        yield "the mean of the micro-batches' own means", mean_of_means(m * share + micro), False
    if m > 2:
        yield f"all micro-batches{of_each} but the first", (micro > 0).double(), False
        yield f"the first micro-batch{of_each} alone", (micro == 0).double(), False
    if args.shares > 1:
        yield "the mean of the ranks' own means", mean_of_means(share), False
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


# -------------------------------------------------------------------------- what attention computes

def attentions(run):
    """Yield other attentions: (words, what changes a block so)."""
    place = torch.arange(run.args.model.seq, device=run.device)
    is_causal = place[:, None] >= place

    def attend_with(mask, scale, block):
        def core(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale,
                                                  enable_gqa=q.shape[1] != k.shape[1])
        block.attn.core = core

    def count_from(positions, block):
        block.attn.rope.positions = positions

    yield "attention without a causal mask", partial(attend_with, None, None)
    yield ("attention whose scores are not divided by the root of head_dim",
           partial(attend_with, is_causal, 1.0))
    for owners, words in tokens_of_ranks(run.args, run.world):
        owners = owners.to(run.device)
        is_own = owners[:, None] == owners
        for what, mask in (
                (f"attention of each rank's {words} to their own keys alone", is_causal & is_own),
                (f"attention that is not causal within each rank's {words}, and between ranks is",
                 is_causal | is_own),
                (f"attention that is causal within each rank's {words}, and between ranks is not",
                 is_causal | ~is_own)):
            yield what, partial(attend_with, mask, None)
        own_places = torch.stack([(owners[:i] == owners[i]).sum() for i in place])
        yield f"positions that count each rank's {words} from 0", partial(count_from, own_places)


# ------------------------------------------------------- what ranks add up, and a cut vocabulary

def number_of_parts(evidence, name, dim):
    """Into how many parts the ranks have cut a parameter along this dimension."""
    cuts = next((part.where for part in evidence.parts_of("gradients", name).values()), ())
    return next((parts for cut, _, parts in cuts if cut == dim), 1)


def sums_of_parts(run, evidence):
    """Yield other sums over ranks, where each rank keeps that of its own chunk of the sequence:
    (words, what changes a block so)."""
    n = number_of_parts(evidence, "block1.attn.o.weight", 1)
    if run.args.model.seq % n or 1 in (n, number_of_parts(evidence, "block1.mlp.down.weight", 1)):
        return

    def take_parts(chunk_of, linear, inputs):
        """A hook: in the input's features of a rank, another chunk's tokens, or zeros."""
        x = inputs[0].unflatten(1, (n, -1)).unflatten(-1, (n, -1))  # (batch, n, seq/n, n, dim/n)
        chunks = []
        for chunk in range(n):
            sources = [chunk_of(chunk, rank) for rank in range(n)]
            chunks.append(torch.cat([
                torch.zeros_like(x[:, 0, :, rank]) if source is None else x[:, source, :, rank]
                for rank, source in enumerate(sources)], dim=-1))
        return torch.cat(chunks, dim=1)

    def sum_so(chunk_of, block):
        for linear in (block.attn.o, block.mlp.down):
            linear.register_forward_pre_hook(partial(take_parts, chunk_of))

    # The chunk of which a rank's part goes into the sum for a chunk; None: it has none there.
    for words, chunk_of in (
            ("of which each rank has its own part alone",
             lambda chunk, rank: chunk if rank == chunk else None),
            ("that lack each rank's own part",
             lambda chunk, rank: None if rank == chunk else chunk),
            ("in which the next rank's part is of its own chunk",
             lambda chunk, rank: rank if rank == (chunk + 1) % n else chunk),
            ("of the next rank's chunk", lambda chunk, rank: (chunk + 1) % n)):
        yield f"sums over the ranks {words}", partial(sum_so, chunk_of)


def vocabularies(run, evidence):
    """Yield other losses of a vocabulary that ranks share: (words, each target's loss of logits
    (tokens, vocab) and targets)."""
    ranks, vocab = number_of_parts(evidence, "head.out.weight", 0), run.args.model.vocab
    if ranks == 1:
        return
    columns = -(-vocab // ranks)                        # of a rank; some may be padding
    padding = columns * ranks - vocab

    def losses_with(target_logit, logits, targets, largest_over=(-1, -2), of_not_valid=0):
        """target_logit(logits of each rank (tokens, ranks, columns), targets): a target's."""
        cut = F.pad(logits, (0, padding), value=-torch.inf).unflatten(-1, (ranks, columns))
        cut = cut - cut.detach().amax(largest_over, keepdim=True)
        logit = target_logit(cut, targets.clamp(min=0)).where(targets != -100, 0)
        losses = cut.exp().sum((-1, -2)).log() - logit
        return torch.where(targets != -100, losses, of_not_valid * losses)

    def right(cut, targets):
        return cut.flatten(-2).gather(-1, targets[:, None])[:, 0]

    def on_every_rank(cut, targets):
        first = torch.arange(ranks, device=targets.device) * columns
        column = (targets[:, None] - first).clamp(0, columns - 1)
        return cut.gather(-1, column[..., None]).sum((-1, -2))

    def on_both_sides(cut, targets):
        is_first = (targets % columns == 0) & (targets > 0)
        return right(cut, targets) + right(cut, (targets - 1).clamp(min=0)).where(is_first, 0)

    def with_padding(logits, targets):
        return cross_entropy(F.pad(logits, (0, padding)), targets)

    yield ("logits from which each rank takes its own largest one",
           partial(losses_with, right, largest_over=-1))
    yield ("a loss in which targets that are not valid count, too",
           partial(losses_with, right, of_not_valid=1))
    yield ("a loss in which every rank has each target in one of its columns",
           partial(losses_with, on_every_rank))
    yield ("a loss in which a rank has the first column of the next as well",
           partial(losses_with, on_both_sides))
    if padding:
        yield "a vocabulary whose columns of padding count as tokens", with_padding
