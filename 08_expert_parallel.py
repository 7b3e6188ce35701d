r"""08 · Expert parallelism: many experts, of which a token takes a few, spread over the ranks.

In a mixture of experts (MoE), the MLP of a block becomes E of them, the experts. A router, which is
one small matrix, gives each token a score for each expert: a softmax over E logits. The token picks
the K experts of the highest scores. What they give is added up, each weighted by its gate: its
score over the sum of the K scores. So the model has E times the parameters of the MLPs, and each
token computes no more than in a model with K MLPs in a block. (`--shared-expert` adds an expert
that every token takes. With `--block llama` experts are gated, and a gate is cut as its up is.)

The parameters must lie somewhere. Expert parallelism spreads them: N ranks share the experts, E/N
each. (N is `--ep`, by default the most that divides both E and the number of ranks.) The ranks also
see different sequences, as in chapter 02, and hold everything else as copies. So a row, which is
the vector of one token, travels to each expert that the token picks, and back. Both ways are an
all_to_all, in which each rank has something else for every other. With 2 ranks, 4 experts and one
pick each:

    rank 0: tokens  a b c d      sorted by expert    to rank 0   to rank 1
            experts 0 2 1 0                          a d | c     b |
    rank 1: tokens  e f g h
            experts 3 2 0 3                          g |         f | e h
                                 arrive on           a d g | c   b f | e h      one matmul each

    dispatch    the rows are sorted by expert, so what goes to one rank lies together. First the
                counts go, so that every rank knows how much comes; then the rows.
    experts     each rank sorts what has arrived by expert, and each expert takes its rows.
    combine     the same way back. Each token weights what comes by its gates, and adds it up.

This is the variant `dropless`, the default. Only the device knows how many rows each rank sends,
but the host must name the sizes to `all_to_all_single`. So it waits for the device, once in every
layer, and cannot run ahead of it. (On symmetric memory, `all_to_all_vdev_2d` reads them from the
device; its output must have room for the most rows that may come.) The other variants differ here:

    capacity    Each expert has places for each sequence (of s tokens), factor · K·s/E, and every
                all_to_all has the same size, so nobody waits. A pick that finds no place is
                dropped, and its gate with it; a token that loses all its picks goes on by its
                residual. (Since each sequence has its own places, the same are dropped on one GPU.)
    tensor      Every expert is cut over the N ranks, as chapter 04 cuts an MLP. Then all tokens
                must come to all ranks, and partial results are summed. All sizes are even, but the
                host waits as well, to learn how many rows each expert takes.
    overlapped  `dropless`, but two micro-batches take turns: while the rows of one travel, the
                attention or the experts of the other compute; in backward, too. The activations of
                both are alive. The host still waits for the counts, which come after the other's
                rows. (DeepSeek-V3 trains so: its two are a forward and a backward.)
    torch       `dropless` by PyTorch's differentiable all_to_all and grouped matmul.

A rank with T tokens sends, forward in one layer, in numbers (h: the model's dim)

    dropless    (N-1)/N · 2·K·T·h       there and back, if all experts are picked alike
    capacity    the same, times the factor
    tensor      (N-1)/N · 2·N·T·h       all_gather and reduce_scatter

and backward the same again. So spreading experts is better than cutting them, if K < N. (How many
rows there are differs from step to step. The report's table is about the third one.) With
`overlapped`, a forward can hide them if they take no longer than attention, the router and K
experts of Ψ numbers (one trip behind the first two, and one behind the experts),

    (N-1)/N · 2·K·h·e / bandwidth  <=  (4·h·(h + h_kv) + 4·s·h + 2·h·E + 2·K·Ψ) / FLOP/s

for a token, e bytes a number. Backward computes twice as much, and sends the same. A larger batch
does not help; longer sequences do, and a wider model and wider experts: in a GPT, Ψ = 8 h².

With `--recompute full`, a block's forward runs again in backward, and all that it sends is sent
again, so three passes go over the wire instead of two. The counts go again, too. (Only tensor's
reduce_scatter is spared, if nothing comes after it: nothing in backward reads what it gives.) What
counts must not count twice: a load that does so is right in proportion, and wrong in number. With
`--precision bf16` rows travel in bf16, but a router computes in float32: where two scores are
almost equal, rounding them would change who is chosen.

Gradients. An expert's rows come from all N ranks that share the experts, so its gradient is a sum
over their tokens from the start. If there are more than N ranks, each expert has world/N copies,
each with the tokens of other ranks, and its gradient is summed over these copies alone. All else is
summed over all ranks, as in chapter 02. Nothing is divided, since the loss was. (Who averages over
all ranks, but an expert over its copies, gets its gradient N times too large. That hardly shows in
the loss, since AdamW divides it out. It was found in MegaBlocks, DeepSpeed and a copy of
torchtitan's layer: see the sources.) An expert that nobody has picked has a gradient of zero, and
its rank still takes part in every collective.

Balance. A router may send everything to a few experts: they learn faster, so they are picked more
often, and the ranks that hold the others wait. There are two remedies (`--balance`):

    loss    E · sum over experts of (share of picks · mean score), which is 1 if all are picked
            alike, is added to the loss with a small weight. The share is counted and so has no
            gradient; but it is what the gradient of the score is multiplied by. So the scores that
            are pushed down most are those of the experts that are picked most, and the others,
            since all scores of a token add up to 1, rise. The sum is computed for each sequence:
            over a rank's whole batch it would depend on how the batch is cut. (It is in the
            gradients; the loss that is printed is cross-entropy alone.)
    bias    A bias on each score is used for choosing, not for the gates. After each step it goes up
            by a little for experts with less than the mean load, and down for the others. The load
            is that of all ranks. No gradient disturbs the model. (DeepSeek-V3 does so to sigmoids.
            A softmax has a mean of 1/E: the same speed moves more, if E is large.)

`--z-loss` keeps the router's logits small: the square of their logsumexp, times a weight, joins the
loss, as a mean over the tokens of a sequence and over the sequences.

When it pays: when E/N experts with K·T·N/E rows each still are large matmuls. It costs the same
bytes for every token, however large E is. It needs all_to_alls on the critical path, which wait for
the busiest rank: the report says how many times as many rows come to it as to the mean. Between
nodes the network is slower. So DeepSeek-V3, where a token picks 8 of 256 experts, lets them lie on
at most 4 of 8 nodes, and sends the row to each of these once. (This chapter does not.)

Run it:
    torchrun --nproc_per_node=4 08_expert_parallel.py
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant capacity --capacity-factor 1
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant tensor     # or torch
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant overlapped --micro-batch 1
    torchrun --nproc_per_node=4 08_expert_parallel.py --balance bias --steps 100

Sources: Lepikhin et al., GShard (2020), section 2.2 (capacity, top-2); Fedus et al., Switch
Transformers (2021), section 2.2 (the loss; top-1, whose gate is the score itself); Zoph et al.,
ST-MoE (2022), section 3 (z-loss; the router in float32); Gale et al., MegaBlocks (2022) (dropless);
DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 2.1.2, 3.2 and 3.4 (bias, per-sequence
loss, limited nodes, two micro-batches at a time); Ultra-Scale Playbook, "Expert Parallelism". The
factor N: databricks/megablocks #20, deepspeedai/DeepSpeed #6545, pytorch/pytorch #160285.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, keep_shard, loss_sum

# ----------------------------------------------------------------------------- a mixture of experts

@dataclass(frozen=True)
class Mixture(common.Config):
    """The shape of a model whose MLPs are mixtures of experts, and how they are balanced."""

    experts: int = 8
    top_k: int = 2
    shared_expert: bool = False
    balance_weight: float = 0.0     # of the loss that balances
    bias_speed: float = 0.0         # what a bias moves by after a step
    z_loss: float = 0.0
    sequences: int = 1              # of the whole batch: routers' losses are means over them
    places: int | None = None       # of an expert for a sequence; None: as many as come

    def parameters(self):
        """In place of the MLP: all experts, the router, and an expert that all tokens take."""
        mlp = (self.experts + self.shared_expert) * self.mlp() + self.experts * self.dim
        return super().parameters() + self.layers * (mlp - self.mlp())

    def active(self):
        """Parameters that take part in the computation of one token."""
        return self.parameters() - self.layers * (self.experts - self.top_k) * self.mlp()


class AddLoss(torch.autograd.Function):
    """Gives x back, and in backward a gradient of 1 to `loss`: as if it were added to the loss."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.like)


class AllToAll(torch.autograd.Function):
    """Send the first sent[0] rows to rank 0, the next sent[1] to rank 1, and so on; received: how
    many come from each. The gradient goes the other way."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


class Permute(torch.autograd.Function):
    """rows[order] or, if back, what undoes that. The gradient goes the other way. (Indexing alone
    would add it up, slowly, since it cannot know that no row is taken twice.)"""

    @staticmethod
    def forward(ctx, rows, order, back):
        ctx.save_for_backward(order)
        ctx.back = back
        if back:                                        # by the inverse permutation
            place = torch.arange(len(order), device=order.device)
            order = torch.empty_like(order).scatter_(0, order, place)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx, gradient):
        [order] = ctx.saved_tensors
        return Permute.apply(gradient, order, not ctx.back), None, None


def best(scores, k):
    """Indices of the k largest of each row; of equal ones, the first, on every device."""
    in_order = scores.sort(dim=-1, descending=True, stable=True).indices
    return in_order[..., :k].clone()                    # the rest can go


def run_experts(rows, columns, downs, counts):
    """Each expert's MLP on its own rows: (picks, dim), sorted by expert, to the same shape.
    columns: [ups], or [ups, gates]; counts: how many rows are for each expert, a list. An expert
    with no row has a gradient of zero, not None."""
    out = []
    for part, column, down in zip(rows.split(counts), zip(*columns), downs, strict=True):
        out.append(common.activate(*[part @ matrix for matrix in column]) @ down)
    return torch.cat(out)


def runs_again():
    """Whether this is a forward in a backward, which --recompute full has: what counts has counted
    it before. (PyTorch's own checkpoint asks so.)"""
    return torch._C._current_graph_task_id() != -1


def balance_loss(scores, chosen):
    """scores (batch, seq, experts), chosen (batch, seq, k). For each sequence: experts · the sum
    over experts of (their share of its picks · their mean score); summed over the sequences."""
    experts = scores.shape[-1]
    picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)
    return experts * (picks * scores.mean(1)).sum()


class MoE(nn.Module):
    """A mixture of experts, in place of a block's MLP: (batch, seq, dim) to the same shape.

    router: a score for each token and expert. up and, in a Llama, gate (experts, dim, hidden), and
    down (experts, hidden, dim): the matrices of all experts, or of those of this rank. ep: the
    process group that shares the experts; None: they all are here. load: how often each expert was
    picked, in this step. seen: of each exchange of rows in this step, how many went to each rank of
    ep, and came from it.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.ep, self.seen = cfg, None, []
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.dim, cfg.hidden))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if cfg.gated else None
        self.down = nn.Parameter(torch.empty(cfg.experts, cfg.hidden, cfg.dim))
        self.shared = common.MLP(cfg) if cfg.shared_expert else None
        self.register_buffer("bias", torch.zeros(cfg.experts))
        self.register_buffer("load", torch.zeros(cfg.experts), persistent=False)

    @property
    def columns(self):                                  # they read the rows, as in common.MLP
        return [self.up, self.gate] if self.cfg.gated else [self.up]

    def forward(self, x):                               # (batch, seq, dim)
        chosen, gates = self.route(x)
        if not runs_again():
            self.load.index_add_(0, chosen.flatten(), self.load.new_ones(chosen.numel()))
        out = self.through_experts(x, chosen, gates)
        return out + self.shared(x) if self.shared else out

    def route(self, x):
        """The experts of each token and their gates, (batch, seq, k) each; in float32 or better."""
        cfg, precise = self.cfg, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))    # (batch, seq, experts)
        scores = logits.softmax(-1)
        chosen = best(scores.detach() + self.bias, cfg.top_k)   # the bias is for choosing alone
        if cfg.top_k == 1:              # over their sum it would be 1, and the router learn nothing
            gates = scores.gather(-1, chosen)
        else:                           # equals scores over their sum, but for 0/0
            gates = logits.gather(-1, chosen).softmax(-1)

        if cfg.balance_weight:
            balance = cfg.balance_weight * balance_loss(scores, chosen)
            gates = AddLoss.apply(gates, balance / cfg.sequences)
        if cfg.z_loss:
            z = cfg.z_loss * logits.logsumexp(-1).square().mean(1).sum()
            gates = AddLoss.apply(gates, z / cfg.sequences)
        return chosen, gates

    def through_experts(self, x, chosen, gates):
        """Send each token through its experts, and add up what they give, weighted by its gates. x
        (batch, seq, dim) to the same shape; chosen and gates (batch, seq, k)."""
        expert = chosen.flatten()                       # of each pick: k of a token, k of the next
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.cfg.experts, dtype=torch.int64, device=x.device)
        counts.index_add_(0, expert, torch.ones_like(expert))
        rows = x.flatten(0, 1).repeat_interleave(self.cfg.top_k, dim=0)     # one for each pick
        out = self.exchange(Permute.apply(rows, order, False), counts)      # sorted by expert
        out = Permute.apply(out, order, True).view(*chosen.shape, -1)       # (batch, seq, k, dim)
        return (out * gates.to(x.dtype)[..., None]).sum(2)      # added in float32, and then rounded

    def exchange(self, rows, counts):
        """The rows travel to their experts, and what these give travels back: (picks, dim), sorted
        by expert, to the same shape. counts (experts,): how many are for each. Communication:
        all_to_alls of the counts, of the rows, and of what comes back."""
        if self.ep is None:
            return run_experts(rows, self.columns, self.down, counts.tolist())
        sent, received, own, _, order = self.announce(counts)
        rows = AllToAll.apply(rows, sent, received, self.ep)        # by rank, and then by expert
        out = run_experts(Permute.apply(rows, order, False), self.columns, self.down, own)
        return AllToAll.apply(Permute.apply(out, order, True), received, sent, self.ep)

    def announce(self, counts):
        """Say how many rows will come. Returns how many go to each rank, come from each, and are
        for each expert here, as lists; where an expert's rows end, on the device, if they are in
        order; and that order. Communication: an all_to_all of the counts."""
        n, arriving = self.ep.size(), torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.ep)
        both = torch.stack([counts, arriving]).view(2, n, -1)   # for each rank, or from each rank,
        there, here = both.tolist()                     # of each expert; the host waits for them
        sent, received = [sum(of_rank) for of_rank in there], [sum(of_rank) for of_rank in here]
        own = [sum(of_expert) for of_expert in zip(*here)]
        if not runs_again():
            self.seen.append((sent, received))
        expert = torch.arange(len(own), device=counts.device).repeat(n)
        expert = expert.repeat_interleave(arriving, output_size=sum(own))
        return sent, received, own, both[1].sum(0).cumsum(0), expert.argsort(stable=True)


class WithPlaces(MoE):
    """Each expert has `places` for the tokens of each sequence. First come the first choices of all
    tokens, in order, then the second. A pick that finds no place is dropped. dropped: the share of
    these in the last forward."""

    def through_experts(self, x, chosen, gates):
        batch, seq, k = chosen.shape
        experts, places = self.cfg.experts, self.cfg.places
        slots = experts * places
        expert = chosen.transpose(1, 2).flatten(1)      # (batch, k·seq)
        line = F.one_hot(expert, experts).cumsum(1)     # at each expert, up to this pick
        place = line.gather(-1, expert[..., None])[..., 0] - 1
        slot = torch.where(place < places, expert * places + place, slots)  # or nowhere
        self.dropped = (place >= places).to(torch.float32).mean()

        slot = slot[..., None].expand(-1, -1, x.shape[-1])          # (batch, k·seq, dim)
        rows = x.new_zeros(batch, slots + 1, x.shape[-1]).scatter(1, slot, x.repeat(1, k, 1))
        rows = rows[:, :-1].unflatten(1, (experts, places))
        rows = rows.transpose(0, 1).flatten(1, 2)       # (experts, batch·places, dim)
        out = self.exchange_evenly(rows)
        out = out.unflatten(1, (batch, places)).transpose(0, 1).flatten(1, 2)
        out = F.pad(out, (0, 0, 0, 1)).gather(1, slot)              # zeros for the dropped
        out = out * gates.to(x.dtype).transpose(1, 2).flatten(1)[..., None]
        return out.unflatten(1, (k, seq)).sum(1)

    def exchange_evenly(self, rows):
        """As `exchange`, with as many rows for each expert, so that nobody has to know how many:
        (experts, batch·places, dim). Communication: all_to_alls of rows, and of what comes back."""
        if self.ep is None:
            return self.run_evenly(rows)
        n, (experts, places, _) = self.ep.size(), rows.shape
        even = [experts // n] * n
        rows = AllToAll.apply(rows, even, even, self.ep)    # (n · own experts, batch·places, dim)
        rows = rows.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
        out = self.run_evenly(rows)                     # (own experts, n · batch·places, dim)
        out = out.unflatten(1, (n, places)).transpose(0, 1).flatten(0, 1)
        return AllToAll.apply(out, even, even, self.ep)

    def run_evenly(self, rows):
        """The experts that are here, each on its rows: (experts, rows, dim) to the same shape."""
        return common.activate(*[rows @ matrix for matrix in self.columns]) @ self.down


class Gather(torch.autograd.Function):
    """all_gather along the first dimension; if back, reduce_scatter. Gradients: the other one."""

    @staticmethod
    def forward(ctx, x, group, back):
        ctx.group, ctx.back, n = group, back, group.size()
        out = x.new_empty(len(x) // n if back else n * len(x), *x.shape[1:])
        collective = common.reduce_scatter if back else common.all_gather
        collective(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient, ctx.group, not ctx.back), None, None


class CutExperts(MoE):
    """Each rank of ep has a part of every expert: all tokens come to all ranks, and the partial
    results are added up on the rank that they came from."""

    def through_experts(self, x, chosen, gates):
        x, chosen, gates = [Gather.apply(each, self.ep, False) for each in (x, chosen, gates)]
        partial_sum = super().through_experts(x, chosen, gates)     # (ep·batch, seq, dim)
        return Gather.apply(partial_sum, self.ep, True)

    def exchange(self, rows, counts):
        return run_experts(rows, self.columns, self.down, counts.tolist())


class Depart(torch.autograd.Function):
    """AllToAll, which is under way until Arrive. trip: its other arguments and an empty list, the
    same for both. In backward the gradient sets out in Arrive, and is waited for here."""

    @staticmethod
    def forward(ctx, rows, *trip):
        ctx.under_way = trip[-1]
        return start(rows, *trip)

    @staticmethod
    def backward(ctx, gradient):
        return wait(ctx.under_way), None, None, None, None


class Arrive(torch.autograd.Function):
    """Wait for the rows that set out in Depart. In backward, their gradient sets out here."""

    @staticmethod
    def forward(ctx, rows, *trip):
        ctx.trip = trip
        return wait(trip[-1]).view_as(rows)

    @staticmethod
    def backward(ctx, gradient):
        sent, received, group, under_way = ctx.trip
        start(gradient, received, sent, group, under_way)
        return gradient, None, None, None, None         # of this shape; Depart has what comes


def start(rows, sent, received, group, under_way):
    out, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
    handle = dist.all_to_all_single(out, rows, received, sent, group=group, async_op=True)
    under_way.append((handle, out, rows))               # what is sent must stay, and as it is
    return out


def wait(under_way):
    handle, out, _ = under_way.pop()
    handle.wait()
    return out


class Overlapped(MoE):
    """MoE in three parts, between which it is another micro-batch's turn."""

    def in_turns(self, x):
        """As forward, but a generator, whose rows are under way at each yield."""
        chosen, gates = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, self.cfg.experts).sum((0, 1, 2))
        self.load += counts
        rows = x.flatten(0, 1).repeat_interleave(self.cfg.top_k, dim=0)
        sent, received, own, _, by_expert = self.announce(counts)
        there, back = (sent, received, self.ep, []), (received, sent, self.ep, [])

        rows = Depart.apply(Permute.apply(rows, order, False), *there)
        yield
        rows = Permute.apply(Arrive.apply(rows, *there), by_expert, False)
        out = run_experts(rows, self.columns, self.down, own)
        out = Depart.apply(Permute.apply(out, by_expert, True), *back)
        yield
        out = Permute.apply(Arrive.apply(out, *back), order, True).view(*chosen.shape, -1)
        out = (out * gates.to(x.dtype)[..., None]).sum(2)
        return out + self.shared(x) if self.shared else out


class TorchMoE(MoE):
    """`dropless` by PyTorch's differentiable all_to_all and, on a GPU, its grouped matmul."""

    def exchange(self, rows, counts):
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        sent, received, own, ends, order = self.announce(counts)
        rows = all_to_all_single_autograd(rows, received, sent, self.ep)
        rows = Permute.apply(rows, order, False)
        if rows.is_cuda and rows.dtype == torch.bfloat16:           # all experts in one kernel
            ends = ends.to(torch.int32)
            hidden = [F.grouped_mm(rows, matrices, offs=ends) for matrices in self.columns]
            out = F.grouped_mm(common.activate(*hidden), self.down, offs=ends)
        else:
            out = run_experts(rows, self.columns, self.down, own)
        return all_to_all_single_autograd(Permute.apply(out, order, True), sent, received, self.ep)


# ------------------------------------------------------------------------- a model of such mixtures

def mixture_gpt(cfg, seed=0, kind=None):
    """common.gpt with a mixture of experts in each block. kind: its class, if not one GPU's."""
    model = gpt(cfg, seed=None)
    kind = kind or (WithPlaces if cfg.places else MoE)
    for block in model[1:-1]:
        block.mlp = kind(cfg)
    common.name_parameters(model)
    return model if seed is None else common.draw_weights(model, seed)


def expert_parallel(model, groups):
    """Share the experts of a mixture_gpt among ranks, and note whose gradients are summed. groups:
    `world`, all ranks; `ep`, those that share the experts; `holders`, those that hold the same
    ones, which are all ranks if each has every expert."""
    for p in model.parameters():
        p.partial = groups["world"]                     # all ranks have seen other tokens
    for block in model[1:-1]:
        moe, ep = block.mlp, groups["ep"]
        moe.ep = ep
        for name, p in moe.named_parameters(recurse=False):     # up, gate, down
            dim = 0                                     # some experts each
            if isinstance(moe, CutExperts):             # or some hidden units of each expert
                dim = 1 if name == "down" else 2
            keep_shard(moe, name, dim, ep)
            p.partial = groups["holders"]               # it is with the tokens of all of ep
    return model


def move_biases(model, group=None):
    """After a step: what was picked more often than the mean will be picked less, and the other way
    round. Returns how often each expert was picked, (layers, experts), and starts to count anew.
    Communication: an all_reduce of these counts over `group`."""
    loads = torch.stack([block.mlp.load for block in model[1:-1]])
    if group and group.size() > 1:
        dist.all_reduce(loads, group=group)
    for block, load in zip(model[1:-1], loads):
        block.mlp.bias += block.mlp.cfg.bias_speed * torch.sign(load.mean() - load)
        block.mlp.load.zero_()
    return loads


def forward_in_turns(model, tokens, targets):
    """The forward of a micro-batch, a generator that at last gives the sum of its losses. One
    backward of two mirrors their turns: autograd runs nodes, whatever graph they are of, in the
    opposite order of their creation. So all ranks start the same all_to_alls in the same order."""
    x = model[0](tokens)
    for block in model[1:-1]:
        x = x + block.attn(block.norm1(x))
        x = x + (yield from block.mlp.in_turns(block.norm2(x)))
    yield loss_sum(model[-1](x), targets)


def train_step(model, optimizer, micro_batches, valid, clip, world, at_once=1):
    """One step. Returns this rank's part of the loss, the norm, and the loads of the experts.
    micro_batches: pairs of tokens and targets, (b, s) each, of this rank. valid: the valid targets
    of the whole batch. at_once: 2, if two take turns. Communication: that of the experts; in the
    last backward, of each module, an all_reduce of what all ranks hold, and one of the experts over
    their holders; then one for the norm, and one of the loads."""
    optimizer.zero_grad()
    for block in model[1:-1]:
        block.mlp.seen.clear()
    total = 0
    for i in range(0, len(micro_batches), at_once):
        if at_once == 1:
            tokens, targets = micro_batches[i]
            loss = loss_sum(model(tokens), targets) / valid
        else:                                           # an odd one at the end is alone
            both = [forward_in_turns(model, *pair) for pair in micro_batches[i:i + at_once]]
            *_, losses = zip(*both)                     # in turn, each goes on to its next yield
            loss = sum(losses) / valid
        if i + at_once >= len(micro_batches):           # they start in this backward
            sums = PartialSums(p for p in model.parameters() if p.partial.size() > 1)
        loss.backward()
        total += loss.detach()
    sums.finish()

    norm = grad_norm(model.parameters(), world)
    if clip:
        clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    loads = move_biases(model, world)
    return total, norm, loads


# ------------------------------------------------------------------------------------ the formulas

def held_numbers(cfg, ep):
    """Parameters of a rank, and how many of them are its experts'."""
    experts = cfg.layers * cfg.experts * cfg.mlp() // ep
    return cfg.parameters() - (ep - 1) * experts, experts


def row_bytes(cfg, tokens, e, often):
    """Payload of a layer's rows, there and back, in both passes, from a rank with so many tokens,
    which each go to so many places: to cfg.top_k, if all experts are picked alike; to all ranks of
    ep, if every expert is cut (choices and gates are small beside them). e: bytes of a number."""
    return 4 * often * tokens * cfg.dim * e


def travel_over_compute(cfg, n, e, flops, bandwidth):
    """In a layer's forward, the time in which a token's rows travel, there and back, over that of
    attention, router and experts: where it is at most 1, all can hide, but the first and the last
    trip. n: ranks that share experts. e: bytes of a number. flops: FLOP/s. bandwidth: bytes/s."""
    h, kv = cfg.dim, cfg.dim * cfg.kv_heads // cfg.heads
    numbers = h * (2 * h + 2 * kv + cfg.experts) + (cfg.top_k + cfg.shared_expert) * cfg.mlp()
    rows = (n - 1) / n * row_bytes(cfg, 1, e, cfg.top_k) / 2
    return rows / bandwidth / ((2 * numbers + 4 * cfg.seq * h) / flops)


def traffic(args, ranks, seen):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}. seen: its
    exchanges, pairs of how many rows were sent to each rank, and received from each."""
    cfg, ep, of_gradient = args.model, args.ep, common.DTYPES[args.dtype].itemsize
    e, again = common.rounded(args).itemsize, 1 if args.recompute == "full" else 0
    wide, share = max(e, 4), (ep - 1) / ep              # wide: of a gate, and of the norm
    sequences = args.batch // ranks                     # of this rank, in all micro-batches
    layers = sequences // args.micro_batch * cfg.layers             # passes through a mixture

    sent, copies = {}, ranks // ep
    numbers, experts = held_numbers(cfg, ep)
    if ranks > 1:
        loads = 4 * cfg.layers * cfg.experts
        dense = of_gradient * (numbers - experts) + loads + wide            # and the norm
        copied = of_gradient * experts if copies > 1 else 0
        wire = 2 * (ranks - 1) / ranks * dense + 2 * (copies - 1) / copies * copied
        each = numbers - (copies == 1) * experts > common.ONE_BUCKET        # module sends its own
        calls = (cfg.layers + 2, cfg.layers) if each else (1, 1)            # to all; to holders
        calls = calls[0] + calls[1] * (1 < copies < ranks) + 2              # the loads, the norm
        sent["all_reduce"] = calls, dense + copied, wire
    if args.variant in DROPLESS:                        # counts; rows, what comes back, gradients
        rows = sum(sum(there) + sum(here) for there, here in seen)
        payload = (1 + again) * 8 * cfg.experts * layers + (2 + again) * rows * cfg.dim * e
        sent["all_to_all"] = (5 + 3 * again) * layers, payload, share * payload
    if args.variant == "capacity":
        rows = cfg.layers * sequences * cfg.experts * cfg.places
        payload = (4 + 2 * again) * rows * cfg.dim * e
        sent["all_to_all"] = (4 + 2 * again) * layers, payload, share * payload
    if args.variant == "tensor":                        # tokens, who is chosen, gates; gradients
        tokens = ep * cfg.layers * sequences * cfg.seq
        rows, picks = tokens * cfg.dim, tokens * cfg.top_k
        forward = rows * e + picks * (8 + wide)
        gathered = (1 + again) * forward + rows * e
        sums = 1 + again * cfg.shared_expert            # what comes last is not computed again
        scattered = (sums + 1) * rows * e + picks * wide
        sent["all_gather"] = (4 + 3 * again) * layers, gathered, share * gathered
        sent["reduce_scatter"] = (sums + 2) * layers, scattered, share * scattered
    return sent


def step_flops(cfg, tokens, rows, recompute="none"):
    """FLOPs of a step on a rank that has so many tokens, and whose experts take so many rows, in
    all layers. As in chapter 01, a number that multiplies a row takes 2 forward and 4 backward, and
    2 more where it is computed again."""
    kv, shared = cfg.dim * cfg.kv_heads // cfg.heads, cfg.layers * tokens * cfg.shared_expert
    blocks = cfg.layers * tokens * cfg.dim * (2 * cfg.dim + 2 * kv + cfg.experts)
    blocks += (rows + shared) * cfg.mlp()
    # Attention's core: two matmuls, and four backward, or five where scores are computed again.
    plain, matmuls = cfg.attention == "plain", 6 if cfg.attention == "plain" else 7
    again = 0
    if recompute == "selective":            # the output that ends a plain core is not read again
        matmuls += 1 if plain else 2
    if recompute == "full":
        again, matmuls = blocks - shared * cfg.dim * cfg.hidden, matmuls + 2    # nor a shared down
    core = cfg.layers * 2 * tokens * cfg.seq * cfg.dim * matmuls
    return 6 * (blocks + tokens * cfg.dim * cfg.vocab) + 2 * again + core


def formulas(args, rank, ranks, model):
    """What a run is held to: see lab/bench/formulas.py."""
    cfg, n, sequences = args.model, args.ep, args.batch // ranks
    numbers, _ = held_numbers(cfg, n)
    mixtures = [block.mlp for block in model[1:-1]]
    seen = [exchange for moe in mixtures for exchange in moe.seen]
    rows = sequences * cfg.seq * cfg.top_k * cfg.layers     # tensor: n times as many, of 1/n expert
    if args.variant == "capacity":
        rows = sequences * cfg.places * cfg.experts * cfg.layers
    if args.variant in DROPLESS:
        rows = sum(sum(received) for _, received in seen)
    answer = {"parameters": numbers, "sent": traffic(args, ranks, seen),
              "flops": {"all": step_flops(cfg, sequences * cfg.seq, rows, args.recompute)}}

    if args.variant == "overlapped":
        answer["overlap"] = {"all_to_all": lambda *rates: travel_over_compute(
            cfg, n, common.rounded(args).itemsize, *rates)}
    notes = answer["notes"] = [f"parameters: {cfg.parameters():,}, of which a token meets "
                               f"{cfg.active():,} and a rank holds {numbers:,}"]
    if cfg.places:
        dropped = sum(moe.dropped.item() for moe in mixtures) / cfg.layers
        notes.append(f"{cfg.places} places for each expert and sequence: {dropped:.1%} of the last "
                     "micro-batch's picks are dropped")
    if n > 1:
        shape = cfg, args.micro_batch * cfg.seq, common.rounded(args).itemsize
        share = (n - 1) / n / 1e6                       # of that goes to other ranks, in MB
        even, cut = share * row_bytes(*shape, cfg.top_k), share * row_bytes(*shape, n)
        notes.append(f"a layer's rows, per rank and micro-batch, both passes: {even:.2f} MB if all "
                     f"experts are picked alike; {cut:.2f} MB with --variant tensor")
    if seen:
        before = rank // n * n                          # the ranks before those of ep
        answer["rows sent"] = [0] * before + seen[0][0] + [0] * (ranks - before - n)
    if seen and n > 1:
        answer["busiest"] = [sum(received) for _, received in seen]
    return answer


# ----------------------------------------------------------------------------------------- the run

KINDS = {"dropless": MoE, "overlapped": Overlapped, "capacity": WithPlaces,
         "tensor": CutExperts, "torch": TorchMoE}
DROPLESS = "dropless", "overlapped", "torch"


def train(run):
    args, world = run.args, dist.group.WORLD
    mesh = run.mesh(holders=run.world // args.ep, ep=args.ep)       # neighbours share the experts
    holders = mesh["holders"].get_group() if args.ep > 1 else world
    groups = {"world": world, "ep": mesh["ep"].get_group(), "holders": holders}
    model = mixture_gpt(args.model, seed=None, kind=KINDS[args.variant])
    model = run.draw(expert_parallel(model, groups))
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())

    at_once = 2 if args.variant == "overlapped" else 1
    for batch in run.batches(share=run.rank, build=mixture_gpt, after_step=move_biases):
        with run.measure():
            loss, norm, loads = train_step(model, optimizer, batch.micro_batches, batch.valid,
                                           args.clip, world, at_once)
        dist.all_reduce(loss)                           # to show that of the whole batch
        run.log(batch, loss, norm, model, loads=loads)


def requires(args, ranks):
    common.split_batch(args, ranks)
    experts, k = args.experts, args.top_k
    ep = args.ep = math.gcd(ranks, experts) if args.ep is None else args.ep
    if min(experts, k, ep) < 1:
        raise Refused("--experts, --top-k and --ep are 1 or more", "--experts 8")
    if ranks % ep:
        raise Refused(f"--ep {ep} does not divide {ranks} ranks", f"--ep {math.gcd(ep, ranks)}")
    common.divides("--experts", experts, "--ep", ep)
    if k > experts:
        raise Refused(f"--top-k {k} is more than --experts = {experts}", f"--top-k {experts}")
    if args.variant == "overlapped" and args.batch == ranks * args.micro_batch:
        raise Refused("overlapped: two micro-batches take turns, and a rank has one",
                      f"--batch {max(args.batch, 2 * ranks)} --micro-batch 1")
    if args.variant == "overlapped" and args.recompute == "full":
        raise Refused("--recompute full runs a whole block again, which overlapped takes apart",
                      "--recompute selective")
    if args.variant == "tensor":
        common.divides("--ffn", args.model.hidden, "--ep", ep)
    even = k * args.model.seq / experts                 # picks of an expert in a sequence
    if args.variant == "capacity" and args.capacity_factor * even < 1:
        raise Refused(f"--capacity-factor {args.capacity_factor:g} leaves an expert less "
                      "than one place in a sequence", f"--capacity-factor {math.ceil(1 / even)}")
    places = min(math.ceil(args.capacity_factor * even), args.model.seq)    # no more can come
    strengths = {}
    for name, balance, default in (("balance_weight", "loss", 0.01), ("bias_speed", "bias", 0.001)):
        given = getattr(args, name)
        if args.balance == balance:
            strengths[name] = default if given is None else given
        elif given is not None:
            raise Refused(f"--{name.replace('_', '-')} means nothing to --balance "
                          f"{args.balance}", f"--balance {balance}")
    args.model = Mixture(
        **asdict(args.model), **strengths, experts=experts, top_k=k, z_loss=args.z_loss,
        shared_expert=args.shared_expert, sequences=args.batch,
        places=places if args.variant == "capacity" else None)


def flags(parser):
    add = parser.add_argument
    add("--experts", type=int, default=8, help="of each mixture")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--ep", type=int, help="ranks that share the experts; default: all that can")
    add("--shared-expert", action="store_true", help="and one that every token takes")
    add("--capacity-factor", type=float, default=1.25, help="places of an expert over mean picks")
    add("--balance", choices=("loss", "bias", "none"), default="loss")
    add("--balance-weight", type=float, help="of the loss; default: 0.01")
    add("--bias-speed", type=float, help="of the bias, in a step; default: 0.001")
    add("--z-loss", type=float, default=0.0, help="weight of the router's z-loss")


VARIANTS = dict.fromkeys(KINDS, train) | {"capacity": (train, "--capacity-factor")}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
