r"""08 · Expert parallelism: many experts, of which a token takes a few, spread over the ranks.

In a mixture of experts (MoE), the MLP of a block becomes E of them, the experts. A router, which is
one small matrix, gives each token a score for each expert: a softmax over E logits or, as in
DeepSeek-V3, the sigmoid of each (`--router`). The token picks the K experts of the highest scores.
What they give is added up, each weighted by its gate: its score over the sum of the K scores. So
the model has E times the parameters of the MLPs, and each token computes no more than in a model
with K MLPs in a block. (Today's experts are many and narrow: `--expert-dim`. `--shared-expert` adds
one that every token takes.)

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
layer. With `--matmul grouped`, one kernel takes the rows of all experts, and reads on the device
where each one's end (kernels/grouped_matmul.py). The other variants differ here:

    overlapped  Two micro-batches take turns: while the rows of one travel, the attention or the
                experts of the other compute; in backward, too. The activations of both are alive.
                (DeepSeek-V3 trains so: its two are a forward and a backward.)
    two-hops    A row crosses to each machine once, to the rank of the same number there. That one
                sends it on to the experts in its machine, weights what they give, and adds it up,
                so one row crosses back. (DeepEP and HybridEP do so. The host waits twice.)
    capacity    Each expert has places for each sequence (of s tokens), factor · K·s/E, and every
                all_to_all has the same size, so nobody waits. A pick that finds no place is
                dropped; a token that loses all its picks goes on by its residual.
    torch       `dropless` by PyTorch's differentiable all_to_all and grouped matmul.

A rank with T tokens sends, forward in one layer, (N-1)/N · 2·K·T·h numbers (h: the model's dim), if
all experts are picked alike, with capacity as many times its factor; and backward the same again.
(How many rows there are differs from step to step. The report's table is that of step 3.) If
every rank had a part of each expert instead, as chapter 04 cuts an MLP, all tokens would go to all
ranks: N in place of K. So it pays while an expert's N·K·T/E rows still are a large matmul, however
large E is. But rows that leave a machine travel slowly. With `--nodes M`, experts lie on M
machines, and K·(M-1)/M of a token's rows leave its own. DeepSeek-V3, with K = 8 on M = 8, has two
remedies: a token may go to `--node-limit` 4 of them, whose best scores sum to the most; and with
two hops, no more than 4·7/8 = 3.5 rows cross then, where 7 did.

With `overlapped`, a forward can hide its rows if they take no longer than attention, the router and
K experts (with a shared one, K + 1) of Ψ numbers, one trip behind the first two, one behind these:

    (N-1)/N · 2·K·h·e / bandwidth  <=  (4·h·(h + h_kv) + 4·s·h + 2·h·E + 2·K·Ψ) / FLOP/s

for a token, e bytes a number. Backward computes twice as much, and sends the same. A larger batch
does not help; longer sequences do, and a wider model and wider experts: in a GPT, Ψ = 8 h².

With `--recompute full`, all that a block's forward sends is sent again in backward. With
`--precision bf16` rows travel in bf16, but a router computes in float32: rounding two scores that
are almost equal would change who is chosen. `--z-loss` keeps its logits small: the mean square of
their logsumexp joins the loss.

Gradients. An expert's rows come from all N ranks that share the experts, so its gradient is a sum
over their tokens from the start. If there are more than N ranks, each expert has world/N copies,
each with the tokens of other ranks, and its gradient is summed over these copies alone. All else is
summed over all ranks, as in chapter 02. Nothing is divided, since the loss was. (Who averages over
all ranks, but an expert over its copies, gets its gradient N times too large: see the sources.) An
expert that nobody has picked has a gradient of zero, and its rank takes part in all collectives.

Balance. A router may send everything to a few experts: they learn faster, so they are picked more
often. All wait for the busiest rank, of which the report tells. The remedies (`--balance`):

    loss    E · sum over experts of (share of picks · mean score), which is 1 if all are picked
            alike, is added to the loss with a small weight. The share is counted and so has no
            gradient; but it is what the gradient of the score is multiplied by. So the scores that
            are pushed down most are those of the experts that are picked most. (Sigmoids are
            divided by their sum first.) It is computed for each sequence: over a rank's whole batch
            it would depend on how the batch is cut. The loss that is printed is without it.
    loss-of-batch       The same, with shares of the whole batch, which all ranks add up in each
            forward, of one micro-batch a rank. Then a sequence may want few experts.
    bias    A bias on each score is used for choosing, not for the gates. After each step it goes up
            by a little for experts with less than the mean load, and down for the others. The load
            is that of all ranks. No gradient disturbs the model. (DeepSeek-V3 does so to sigmoids.
            A softmax has a mean of 1/E: the same speed moves more, if E is large.)

Run it:
    torchrun --nproc_per_node=4 08_expert_parallel.py --matmul grouped     # or --variant torch
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant two-hops --nodes 2
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant overlapped --micro-batch 1
    torchrun --nproc_per_node=4 08_expert_parallel.py --router sigmoid --balance bias --steps 100

Sources: Lepikhin et al., GShard (2020), section 2.2 (capacity, top-2); Fedus et al., Switch
Transformers (2021), section 2.2 (the loss; top-1, whose gate is the score itself); Zoph et al.,
ST-MoE (2022), section 3 (z-loss; the router in float32); Gale et al., MegaBlocks (2022) (dropless);
DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 2.1.2, 3.2 and 3.4 (sigmoids, bias,
limited nodes, two hops, two micro-batches at a time); Qiu et al., Demons in the Detail (2025)
(shares of the whole batch); Ultra-Scale Playbook, "Expert Parallelism". The factor N:
databricks/megablocks #20, deepspeedai/DeepSpeed #6545, pytorch/pytorch #160285.
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
    router: str = "softmax"         # or sigmoid
    shared_expert: bool = False
    balance_weight: float = 0.0     # of the loss that balances
    over_batch: bool = False        # shares of the whole batch in it, not of each sequence
    bias_speed: float = 0.0         # what a bias moves by after a step
    z_loss: float = 0.0
    sequences: int = 1              # of the whole batch: routers' losses are means over them
    places: int | None = None       # of an expert for a sequence; None: as many as come
    nodes: int = 1                  # machines, which have as many experts each
    node_limit: int = 1             # to so many of them goes a token
    grouped: bool = False           # one matmul for all experts, or one for each

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


def add_up(rows, places, n):
    """(n, dim): at each place, the sum of its rows. Added in float32, and then rounded."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(n, rows.shape[1], dtype=wide, device=rows.device)
    return total.index_add(0, places, rows.to(wide)).to(rows.dtype)


def choose(scores, cfg):
    """The experts of the top_k scores of each token, (..., experts) to (..., k); with a node_limit,
    of those on its best machines. How good one is: the sum of its best k/limit scores there."""
    if cfg.node_limit < cfg.nodes:
        by_node = scores.unflatten(-1, (cfg.nodes, -1))
        how_good = by_node.topk(math.ceil(cfg.top_k / cfg.node_limit)).values.sum(-1)
        best = how_good.topk(cfg.node_limit).indices
        others = torch.ones_like(how_good, dtype=torch.bool).scatter(-1, best, False)
        scores = by_node.masked_fill(others[..., None], -math.inf).flatten(-2)
    return scores.topk(cfg.top_k).indices


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


def balance_loss(scores, chosen, over_batch=False, group=None):
    """scores (batch, seq, experts), of which a token's add up to 1; chosen (batch, seq, k). For
    each sequence: experts · the sum over experts of (their share of its picks · their mean score);
    summed over the sequences. over_batch: with shares of all picks of `group`, by an all_reduce."""
    experts = scores.shape[-1]
    picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)
    if over_batch:
        picks = picks.mean(0)
        if group and group.size() > 1:
            dist.all_reduce(picks, group=group)
            picks /= group.size()
    return experts * (picks * scores.mean(1)).sum()


class MoE(nn.Module):
    """A mixture of experts, in place of a block's MLP: (batch, seq, dim) to the same shape.

    router: a score for each token and expert. up and, in a Llama, gate (experts, dim, hidden), and
    down (experts, hidden, dim): the matrices of all experts, or of those of this rank. ep: the
    group that shares the experts, and ranks, how many it has; None: they all are here. load: how
    often each expert was picked, in this step; chosen: by whom, in the last forward. seen: of each
    exchange of rows in this step, how many went to each rank of ep, and came from it; crossed: the
    same of TwoHops, between machines.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.ep, self.ranks, self.world = cfg, None, 1, None
        self.seen, self.crossed = [], []
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.dim, cfg.hidden))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if cfg.gated else None
        self.down = nn.Parameter(torch.empty(cfg.experts, cfg.hidden, cfg.dim))
        self.columns = [self.up, self.gate] if cfg.gated else [self.up]     # they read the rows
        self.shared = common.MLP(cfg) if cfg.shared_expert else None
        self.register_buffer("bias", torch.zeros(cfg.experts))
        self.register_buffer("load", torch.zeros(cfg.experts), persistent=False)

    def forward(self, x):                               # (batch, seq, dim)
        chosen, gates = self.route(x)
        out = self.through_experts(x, chosen, gates)
        return out + self.shared(x) if self.shared else out

    def route(self, x):
        """The experts of each token and their gates, (batch, seq, k) each; in float32 or better."""
        cfg, precise = self.cfg, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))    # (batch, seq, experts)
        log_scores = F.logsigmoid(logits) if cfg.router == "sigmoid" else logits.log_softmax(-1)
        scores = log_scores.exp()
        chosen = choose(scores.detach() + self.bias, cfg)   # the bias is for choosing alone
        if not runs_again():
            self.load.index_add_(0, chosen.flatten(), self.load.new_ones(chosen.numel()))
            self.chosen = chosen

        gates = log_scores.gather(-1, chosen)
        if cfg.top_k == 1:              # over their sum it would be 1, and the router learn nothing
            gates = gates.exp()
        else:                           # equals scores over their sum, but for 0/0
            gates = gates.softmax(-1)

        if cfg.balance_weight:
            shares = scores / scores.sum(-1, keepdim=True)      # of a softmax, the same
            balance = balance_loss(shares, chosen, cfg.over_batch, self.world)
            gates = AddLoss.apply(gates, cfg.balance_weight * balance / cfg.sequences)
        if cfg.z_loss:
            z = cfg.z_loss * logits.logsumexp(-1).square().mean(1).sum()
            gates = AddLoss.apply(gates, z / cfg.sequences)
        return chosen, gates

    def through_experts(self, x, chosen, gates):
        """Send each token through its experts, and add up what they give, weighted by its gates. x
        (batch, seq, dim) to the same shape; chosen and gates (batch, seq, k)."""
        rows = x.flatten(0, 1)
        token = torch.arange(len(rows), device=x.device).repeat(self.cfg.top_k)  # choice by choice
        expert, gates = (each.flatten(0, 1).T.flatten() for each in (chosen, gates))
        return self.send_picks(rows, token, expert, gates).view_as(x)

    def send_picks(self, rows, token, expert, gates):
        """rows (tokens, dim) to the same shape. Of each pick, its token, its expert and its gate:
        (picks,) each."""
        order = expert.argsort(stable=True)
        token, gates = token[order], gates.index_select(0, order).to(rows.dtype)
        counts = torch.zeros(self.ranks * len(self.down), dtype=torch.int64, device=rows.device)
        counts.index_add_(0, expert, torch.ones_like(expert))
        out = self.exchange(rows.index_select(0, token), counts)    # a row for each pick
        return add_up(out * gates[:, None], token, len(rows))

    def exchange(self, rows, counts):
        """The rows travel to their experts, and what these give travels back: (picks, dim), sorted
        by expert, to the same shape. counts (experts,): how many are for each. Communication:
        all_to_alls of the counts, of the rows, and of what comes back."""
        sent, received, own, ends, order = self.announce(counts)
        if not runs_again():
            self.seen.append((sent, received))
        if self.ep is None:
            return self.run(rows, own, ends)
        rows = self.travel(rows, sent, received)        # they arrive by rank, and then by expert
        out = self.run(rows.index_select(0, order), own, ends)
        return self.travel(out.index_select(0, order.argsort()), received, sent)

    def travel(self, rows, sent, received):
        return AllToAll.apply(rows, sent, received, self.ep)

    def run(self, rows, own, ends):
        """The experts that are here, on rows that are sorted by them. own: how many each has, a
        list; ends: where they end, on the device."""
        if self.cfg.grouped:
            from kernels import grouped_matmul
            return grouped_matmul.run_experts(rows, self.columns, self.down, ends)
        return run_experts(rows, self.columns, self.down, own)

    def announce(self, counts):
        """Say how many rows will come. Returns how many go to each rank, come from each, and are
        for each expert here, as lists; where an expert's rows end, on the device, if they are in
        order; and that order. Communication: an all_to_all of the counts."""
        n, arriving = self.ranks, counts
        if self.ep:
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=self.ep)
        both = torch.stack([counts, arriving]).view(2, n, -1)   # for each rank, or from each rank,
        there, here = both.tolist()                     # of each expert; the host waits for them
        sent, received = [sum(of_rank) for of_rank in there], [sum(of_rank) for of_rank in here]
        own = [sum(of_expert) for of_expert in zip(*here)]
        expert = torch.arange(len(own), device=counts.device).repeat(n)
        expert = expert.repeat_interleave(arriving, output_size=sum(own))
        return sent, received, own, both[1].sum(0).cumsum(0), expert.argsort(stable=True)


class WithPlaces(MoE):
    """Each expert has `places` for the tokens of each sequence. First come the first choices of all
    tokens, in order, then the second. A pick that finds no place is dropped. dropped: the share of
    these in the last forward; lost: the share of tokens whose picks all were."""

    def send_picks(self, rows, token, expert, gates):
        places, batch = self.cfg.places, len(rows) // self.cfg.seq
        line, order = (expert * batch + token // self.cfg.seq).sort(stable=True)
        token, gates = token[order], gates.index_select(0, order).to(rows.dtype)
        waiting = torch.zeros(self.cfg.experts * batch, dtype=torch.int64, device=rows.device)
        waiting.index_add_(0, line, torch.ones_like(line))      # for an expert, of a sequence
        before = waiting.cumsum(0) - waiting
        place = torch.arange(len(line), device=rows.device) - before[line]
        is_in = place < places                          # the others are dropped
        self.dropped = 1 - is_in.double().mean()
        self.lost = (add_up(is_in[:, None].double(), token, len(rows)) == 0).double().mean()

        slots = len(waiting) * places
        slot = (line * places + place).where(is_in, slots)      # the last one is nobody's
        filled = rows.new_zeros(slots + 1, rows.shape[1])
        filled = filled.index_add(0, slot, rows.index_select(0, token))[:-1]
        out = F.pad(self.exchange(filled, batch * places), (0, 0, 0, 1))    # zeros for the dropped
        return add_up(out.index_select(0, slot) * gates[:, None], token, len(rows))

    def announce(self, each):
        """As many rows for each expert, from each rank: nobody has to be told, or to wait."""
        n, own, device = self.ranks, len(self.down), self.down.device
        ends = torch.arange(1, own + 1, device=device) * n * each
        order = torch.arange(n * own * each, device=device).view(n, own, each).transpose(0, 1)
        return n * [own * each], n * [own * each], own * [n * each], ends, order.flatten()


class TwoHops(MoE):
    """First a row crosses, once to each machine that has experts of its token: to the rank of the
    same number there, with all of the token's choices and gates. From there it goes to the experts
    in that machine, as in MoE, and what they give is added up before it crosses back. across: the
    ranks of the same number of all machines; ep: those of this machine."""

    def through_experts(self, x, chosen, gates):
        x_rows, chosen, gates = (each.flatten(0, 1) for each in (x, chosen, gates))
        n, experts = self.across.size(), self.cfg.experts // self.across.size()  # of a machine
        picks = F.one_hot(chosen // experts, n).sum(1)  # (tokens, n): how many lie on each
        wanted = picks > 0
        there = torch.stack([wanted.sum(0), picks.sum(0)], dim=1)   # rows and picks, (n, 2)
        here = torch.empty_like(there)
        dist.all_to_all_single(here, there, group=self.across)
        there, here = torch.stack([there, here]).tolist()           # the host waits
        sent, received = [rows for rows, _ in there], [rows for rows, _ in here]
        if not runs_again():
            self.crossed.append((sent, received))

        # Where the answer's size is known, the host need not wait to find what is true.
        token = torch.nonzero_static(wanted.T, size=sum(sent))[:, 1]            # by machine
        rows, chosen, gates = (AllToAll.apply(some.index_select(0, token), sent, received,
                                              self.across) for some in (x_rows, chosen, gates))
        mine = chosen // experts == self.across.rank()
        row, pick = torch.nonzero_static(mine, size=sum(picks for _, picks in here)).T
        out = self.send_picks(rows, row, chosen[row, pick] % experts, gates[row, pick])
        out = AllToAll.apply(out, received, sent, self.across)
        return add_up(out, token, len(x_rows)).view_as(x)


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
        counts = F.one_hot(chosen, self.cfg.experts).sum((0, 1, 2))
        sent, received, own, ends, by_expert = self.announce(counts)
        self.seen.append((sent, received))
        there, back = (sent, received, self.ep, []), (received, sent, self.ep, [])
        order = chosen.flatten().argsort(stable=True)
        token, gates = order // self.cfg.top_k, gates.flatten().index_select(0, order).to(x.dtype)

        rows = Depart.apply(x.flatten(0, 1).index_select(0, token), *there)
        yield
        rows = Arrive.apply(rows, *there)
        out = self.run(rows.index_select(0, by_expert), own, ends)
        out = Depart.apply(out.index_select(0, by_expert.argsort()), *back)
        yield
        out = Arrive.apply(out, *back) * gates[:, None]
        out = add_up(out, token, x[..., 0].numel()).view_as(x)
        return out + self.shared(x) if self.shared else out


class TorchMoE(MoE):
    """`dropless` by PyTorch's differentiable all_to_all and its grouped matmul."""

    def travel(self, rows, sent, received):
        from torch.distributed._functional_collectives import all_to_all_single_autograd
        return all_to_all_single_autograd(rows, received, sent, self.ep)

    def run(self, rows, own, ends):
        if rows.dtype == torch.float64:                 # which it does not take
            return super().run(rows, own, ends)
        ends = ends.to(torch.int32)
        hidden = [F.grouped_mm(rows, matrices, offs=ends) for matrices in self.columns]
        return F.grouped_mm(common.activate(*hidden), self.down, offs=ends)


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
    ones, which are all ranks if each has every expert; for TwoHops, ep is `across` times `inside`.
    """
    for p in model.parameters():
        p.partial = groups["world"]                     # all ranks have seen other tokens
    for block in model[1:-1]:
        moe, moe.world = block.mlp, groups["world"]
        moe.across, moe.ep = groups.get("across"), groups.get("inside", groups["ep"])
        moe.ranks = moe.ep.size()
        for name, p in moe.named_parameters(recurse=False):     # up, gate, down
            keep_shard(moe, name, 0, groups["ep"])      # some experts each,
            p.partial = groups["holders"]               # with the tokens of all of ep
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
        block.mlp.seen.clear(), block.mlp.crossed.clear()
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


def row_bytes(cfg, tokens, e):
    """Payload of a layer's rows, there and back, in both passes, from a rank with so many tokens,
    if all experts are picked alike. e: bytes of a number."""
    return 4 * cfg.top_k * tokens * cfg.dim * e


def crossings(cfg):
    """How many rows of a token leave its machine by one hop, and by two, if all choices are equally
    likely. Of n experts, k are none of a machine's m in C(n - m, k) of C(n, k) choices."""
    m, k = cfg.experts // cfg.nodes, cfg.top_k
    n = cfg.node_limit * m
    nodes = cfg.node_limit * (1 - math.comb(n - m, k) / math.comb(n, k))
    return k * (1 - 1 / cfg.nodes), nodes * (1 - 1 / cfg.nodes)


def travel_over_compute(cfg, n, e, flops, bandwidth):
    """In a layer's forward, the time in which a token's rows travel, there and back, over that of
    attention, router and experts: where it is at most 1, all can hide, but the first and the last
    trip. n: ranks that share experts. e: bytes of a number. flops: FLOP/s. bandwidth: bytes/s."""
    h, kv = cfg.dim, cfg.dim * cfg.kv_heads // cfg.heads
    numbers = h * (2 * h + 2 * kv + cfg.experts) + (cfg.top_k + cfg.shared_expert) * cfg.mlp()
    rows = (n - 1) / n * row_bytes(cfg, 1, e) / 2
    return rows / bandwidth / ((2 * numbers + 4 * cfg.seq * h) / flops)


def traffic(args, ranks, seen, crossed=()):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}. seen: its
    exchanges, pairs of how many rows were sent to each rank, and received from each. crossed: the
    same of those between machines."""
    cfg, of_gradient = args.model, common.DTYPES[args.dtype].itemsize
    e, again = common.rounded(args).itemsize, 1 if args.recompute == "full" else 0
    wide = max(e, 4)                                    # of a gate, and of the norm
    layers = args.batch // ranks // args.micro_batch * cfg.layers   # passes through a mixture
    forwards, copies = (1 + again) * layers, ranks // args.ep       # copies: of an expert

    numbers, experts = held_numbers(cfg, args.ep)
    alone = numbers - (copies == 1) * experts <= common.ONE_BUCKET  # else: of each module
    messages = [                                        # operator, ranks, calls, payload
        ("all_reduce", ranks, 1 if alone else cfg.layers + 2, of_gradient * (numbers - experts)),
        ("all_reduce", copies, (copies < ranks) * (1 if alone else cfg.layers),
         of_gradient * experts),
        ("all_reduce", ranks, 2, 4 * cfg.layers * cfg.experts + wide)]          # loads; the norm
    if cfg.over_batch:
        messages.append(("all_reduce", ranks, forwards, forwards * cfg.experts * wide))
    nodes = args.nodes if args.variant == "two-hops" else 1
    told = 0 if args.variant == "capacity" else forwards            # how many rows will come
    rows = sum(sum(there) + sum(back) for there, back in seen)
    messages.append(("all_to_all", args.ep // nodes, 2 * layers + 2 * forwards + told,
                     told * 8 * cfg.experts // nodes + (2 + again) * rows * cfg.dim * e))
    if args.variant == "two-hops":                      # with a row, its choices and gates
        there, back = (sum(map(sum, way)) for way in zip(*crossed))
        gates = ((1 + again) * there + back) * cfg.top_k * wide
        others = forwards * 16 * nodes + (1 + again) * there * cfg.top_k * 8
        messages.append(("all_to_all", nodes, 3 * layers + 5 * forwards,
                         gates + others + (2 + again) * (there + back) * cfg.dim * e))

    sent = {}
    for op, n, calls, payload in messages:
        if n > 1 or op == "all_to_all":
            factor = (2 if op == "all_reduce" else 1) * (n - 1) / n
            before = sent.get(op, (0, 0, 0))
            sent[op] = before[0] + calls, before[1] + payload, before[2] + factor * payload
    return sent


def formulas(args, rank, ranks, model):
    """What a run is held to: see lab/run/formulas.py."""
    cfg, n, e = args.model, args.ep, common.rounded(args).itemsize
    numbers, _ = held_numbers(cfg, n)
    mixtures = [block.mlp for block in model[1:-1]]
    seen = [exchange for moe in mixtures for exchange in moe.seen]
    crossed = [exchange for moe in mixtures for exchange in moe.crossed]
    answer = {"parameters": numbers, "sent": traffic(args, ranks, seen, crossed), "mixtures": {
        "seen": seen, "chosen": [moe.chosen for moe in mixtures],
        "dropped": [(moe.dropped.item(), moe.lost.item()) for moe in mixtures if cfg.places],
        "crossings": crossings(cfg)}}

    if args.variant == "overlapped":
        answer["overlap"] = {"all_to_all": lambda *rates: travel_over_compute(cfg, n, e, *rates)}
    notes = answer["notes"] = [f"parameters: {cfg.parameters():,}, of which a token meets "
                               f"{cfg.active():,} and a rank holds {numbers:,}"]
    if n > 1 and not cfg.places and args.variant != "two-hops":
        even = (n - 1) / n * row_bytes(cfg, args.micro_batch * cfg.seq, e) / 1e6
        notes.append(f"a layer's rows, per rank and micro-batch, both passes: {even:.2f} MB go to "
                     "other ranks, if all experts are picked alike")
    return answer


# ----------------------------------------------------------------------------------------- the run

KINDS = {"dropless": MoE, "overlapped": Overlapped, "two-hops": TwoHops, "capacity": WithPlaces,
         "torch": TorchMoE}


def train(run):
    args, world = run.args, dist.group.WORLD
    mesh = run.mesh(holders=run.world // args.ep, ep=args.ep)       # neighbours share the experts
    holders = mesh["holders"].get_group() if args.ep > 1 else world
    groups = {"world": world, "ep": mesh["ep"].get_group(), "holders": holders}
    if args.variant == "two-hops":
        mesh = run.mesh(holders=run.world // args.ep, across=args.nodes,
                        inside=args.ep // args.nodes)
        groups |= {axis: mesh[axis].get_group() for axis in ("across", "inside")}
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


def demand(fits, otherwise, change):
    if not fits:
        raise Refused(otherwise, change)


def requires(args, ranks):
    common.split_batch(args, ranks)
    experts, k, nodes, variant = args.experts, args.top_k, args.nodes, args.variant
    ep = args.ep = math.gcd(ranks, experts) if args.ep is None else args.ep
    limit, several = args.node_limit or nodes, args.batch > ranks * args.micro_batch
    demand(min(experts, k, ep, nodes, limit) > 0, "--experts, --top-k, --ep, --nodes and "
           "--node-limit are 1 or more", "--experts 8")
    demand(ranks % ep == 0, f"--ep {ep} does not divide {ranks} ranks",
           f"--ep {math.gcd(ep, ranks)}")
    common.divides("--experts", experts, "--ep", ep)
    common.divides("--experts", experts, "--nodes", nodes)
    demand(limit <= nodes, f"--node-limit {limit} is more than --nodes = {nodes}",
           f"--node-limit {nodes}")
    most = limit * experts // nodes
    demand(k <= most, f"--top-k {k} is more than the {most} experts that a token can go to",
           f"--top-k {most}")
    demand(variant != "two-hops" or 1 < nodes and ep % nodes == 0, f"two-hops: --nodes {nodes} is "
           f"less than 2, or does not divide --ep = {ep}", f"--nodes {ep}")
    demand(variant != "overlapped" or several, "overlapped: two micro-batches take turns, and a "
           "rank has one", f"--batch {max(args.batch, 2 * ranks)} --micro-batch 1")
    demand(variant != "overlapped" or args.recompute != "full", "--recompute full runs a whole "
           "block again, which overlapped takes apart", "--recompute selective")
    demand(args.balance != "loss-of-batch" or not several, "--balance loss-of-batch needs all "
           "picks of the batch in one forward, and ranks have several", "--balance loss")
    shape = asdict(args.model) | {"ffn": args.expert_dim or args.model.ffn}
    if args.dtype != "float64" and (args.matmul == "grouped" or variant == "torch"):
        multiple = 16 // common.rounded(args).itemsize  # rows begin at 16 bytes
        for flag, size in (("--dim", args.model.dim), ("--expert-dim", shape["ffn"])):
            common.divides(flag, size, "what a grouped matmul takes", multiple)

    even = k * args.model.seq / experts                 # picks of an expert in a sequence
    demand(variant != "capacity" or args.capacity_factor * even >= 1, "--capacity-factor "
           f"{args.capacity_factor:g} leaves an expert less than one place in a sequence",
           f"--capacity-factor {math.ceil(1 / even)}")
    places = min(math.ceil(args.capacity_factor * even), args.model.seq)    # no more can come
    strengths = {}
    for name, balance, default in (("balance_weight", "loss", 0.01), ("bias_speed", "bias", 0.001)):
        given = getattr(args, name)
        if args.balance.startswith(balance):
            strengths[name] = default if given is None else given
        else:
            demand(given is None, f"--{name.replace('_', '-')} means nothing to --balance "
                   f"{args.balance}", f"--balance {balance}")
    args.model = Mixture(
        **shape, **strengths, experts=experts, top_k=k, router=args.router, z_loss=args.z_loss,
        shared_expert=args.shared_expert, sequences=args.batch, nodes=nodes, node_limit=limit,
        over_batch=args.balance == "loss-of-batch", grouped=args.matmul == "grouped",
        places=places if variant == "capacity" else None)


def flags(parser):
    add = parser.add_argument
    add("--experts", type=int, default=8, help="of each mixture")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--ep", type=int, help="ranks that share the experts; default: all that can")
    add("--expert-dim", type=int, help="hidden units of an expert; default: as an MLP's, --ffn")
    add("--shared-expert", action="store_true", help="and one that every token takes")
    add("--router", choices=("softmax", "sigmoid"), default="softmax")
    add("--nodes", type=int, default=1, help="machines, which share the experts")
    add("--node-limit", type=int, help="to how many of them a token goes; default: all")
    add("--matmul", choices=("loop", "grouped"), default="loop", help="for each expert, or all")
    add("--capacity-factor", type=float, default=1.25, help="places of an expert over mean picks")
    add("--balance", choices=("loss", "loss-of-batch", "bias", "none"), default="loss")
    add("--balance-weight", type=float, help="of the loss; default: 0.01")
    add("--bias-speed", type=float, help="of the bias, in a step; default: 0.001")
    add("--z-loss", type=float, default=0.0, help="weight of the router's z-loss")


VARIANTS = dict.fromkeys(KINDS, (train, "--matmul")) | {
    "capacity": (train, "--matmul", "--capacity-factor"), "torch": train}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
