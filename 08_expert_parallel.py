r"""08 · Expert parallelism: many experts, of which a token takes a few, spread over the ranks.

In a mixture of experts (MoE), the MLP of a block becomes E of them, the experts. A router, which is
one small matrix, gives each token a score for each expert: a softmax. The token goes to the K best
ones, and what they give is added up, each weighted by its gate: its score over the sum of the K
scores. (`--shared-expert` adds one that every token takes.) So the model has E times the parameters
of the MLPs, and computes no more than one with K MLPs in a block.

The parameters must lie somewhere. Expert parallelism spreads them: N ranks share the experts, E/N
each. (N is `--ep`, by default the most that divides both.) The ranks also see different sequences,
as in chapter 02, and hold everything else as copies. So a row, which is the vector of one token,
travels to each expert that the token picks, and back: two all_to_alls. With 2 ranks, 4 experts and
one pick each:

    rank 0: tokens  a b c d      sorted by expert    to rank 0   to rank 1
            experts 0 2 1 0                          a d | c     b |
    rank 1: tokens  e f g h
            experts 3 2 0 3                          g |         f | e h
                                 arrive on           a d g | c   b f | e h      one matmul each

    dispatch    the rows are sorted by expert, so what goes to one rank lies together. First the
                counts go, so that every rank knows how much comes; then the rows.
    experts     each rank sorts what has arrived by expert, and each expert takes its rows.
    combine     the same way back. Each token weights what comes by its gates, and adds it up.

Only the device knows how many rows each rank sends, but the host must name the sizes when it calls
the next all_to_all. So `dropless` makes the host wait, once in every layer. Other variants:

    capacity    Each expert has places for each sequence, C = factor · K·s/E, and every all_to_all
                has the same size, so nobody waits. A pick that finds no place is dropped, and its
                gate with it; a token that loses all its picks goes on by its residual. (Since each
                sequence has its own places, the same picks are dropped as on one GPU.)
    tensor      Every expert is cut over the N ranks, as chapter 04 cuts an MLP. Then all tokens
                must come to all ranks, and partial results are summed. All sizes are even, but the
                host waits as well, to learn how many rows each expert takes.
    torch       `dropless` by PyTorch's differentiable all_to_all, with experts that are DTensors.

A rank with T tokens sends, forward in one layer, in numbers (h: the model's dim)

    dropless    (N-1)/N · 2·K·T·h       there and back, if all experts are chosen alike
    capacity    the same, times the factor
    tensor      (N-1)/N · 2·N·T·h       all_gather and reduce_scatter

and backward the same again. So spreading experts is better than cutting them, if K < N. (The rows
differ from step to step: the bytes in the report's table are those of the third.)

Gradients. All N ranks sent their tokens to an expert, so its gradient is complete on the rank that
has it: it is summed over the copies of that expert alone, on world/N ranks. All else is summed over
all ranks, as in chapter 02. Nothing is divided. (A gradient that is wrong by the factor N hardly
shows in the loss, since AdamW divides it out. It has shipped in several frameworks.) An expert that
no token has chosen has a gradient of zero, and its rank still takes part in every collective.

Balance. A router may send everything to a few experts: they learn faster, so they are chosen more
often, and the ranks that hold the others wait. Hence

    loss    E · sum over experts of (share of picks · mean score), which is 1 if all are chosen
            alike, is added to the loss with a small weight. It is computed for each sequence: the
            mean over a rank's batch would depend on how the batch is cut. (It is in the gradients;
            the loss that is printed is cross-entropy alone.)
    bias    A bias on each score is used for choosing, not for the gates. After each step it goes up
            by a little for experts with less than the mean load, and down for the others. No
            gradient disturbs the model. The load is that of all ranks. (DeepSeek-V3 does so to
            sigmoids. A softmax has a mean of 1/E: the same speed moves more, if E is large.)

With `--z-loss`, the router's logits are kept small: the square of their logsumexp, times a weight,
joins the loss, as a mean over the tokens of a sequence and over the sequences.

Nodes. Between nodes the network is slower. With `--nodes n`, the experts lie on n nodes, and a row
for several experts of one node travels there once, to the rank with the same place in it; a second
all_to_all spreads it inside. (Only `dropless` does this, and its host then waits four times in a
layer.) `--node-limit m` also keeps each token's experts on m nodes, in all variants: on those whose
best experts have the highest sum of scores. DeepSeek-V3 takes 8 of 256, on 4 of 8 nodes.

When it pays: when E/N experts with K·T·N/E rows each still are large matmuls. It costs the same
bytes for every token, however large E is. It needs all_to_alls on the critical path, which wait for
the busiest rank: the report says how many times as many rows come to it as to the mean.

Run it:
    torchrun --nproc_per_node=4 08_expert_parallel.py
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant capacity --capacity-factor 1
    torchrun --nproc_per_node=4 08_expert_parallel.py --variant tensor     # or torch
    torchrun --nproc_per_node=4 08_expert_parallel.py --top-k 4 --nodes 2 --node-limit 1
    torchrun --nproc_per_node=4 08_expert_parallel.py --balance bias --steps 100

Sources: Lepikhin et al., GShard (2020), section 2.2 (capacity, top-2); Fedus et al., Switch
Transformers (2021), section 2.2 (the loss; top-1, whose gate is the score itself); Zoph et al.,
ST-MoE (2022), section 3 (z-loss; the router in float32); Gale et al., MegaBlocks (2022) (dropless);
DeepSeek-AI, DeepSeek-V3 Technical Report (2024), sections 2.1.2 and 3.2.2 (bias, per-sequence loss,
limited nodes); Ultra-Scale Playbook, "Expert Parallelism".
"""

import functools
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import common
from common import (
    Config,
    clip_grads,
    draw_weights,
    gpt,
    grad_norm,
    keep_shard,
    loss_sum,
    sum_partial_grads,
)

# ----------------------------------------------------------------------------- a mixture of experts

@dataclass(frozen=True)
class Mixture(Config):
    """The shape of a model whose MLPs are mixtures of experts, and how they are balanced."""

    experts: int = 8
    top_k: int = 2
    shared_expert: bool = False
    balance_weight: float = 0.0     # of the loss that balances
    bias_speed: float = 0.0         # what a bias moves by after a step
    z_loss: float = 0.0
    sequences: int = 1              # of the whole batch: routers' losses are means over them
    places: int | None = None       # of an expert for a sequence; None: as many as come
    nodes: int = 1
    node_limit: int = 1             # a token's experts lie on so many nodes at most

    def expert(self):
        """Parameters of one: as many as the MLP's."""
        return 8 * self.dim**2

    def parameters(self):
        """In place of the MLP: all experts, the router, and an expert that all tokens take."""
        mlp = (self.experts + self.shared_expert) * self.expert() + self.experts * self.dim
        return super().parameters() + self.layers * (mlp - self.expert())

    def tensors(self):
        return super().tensors() + self.layers * (3 if self.shared_expert else 1)

    def active(self):
        """Parameters that take part in the computation of one token."""
        return self.parameters() - self.layers * (self.experts - self.top_k) * self.expert()


class AddLoss(torch.autograd.Function):
    """Gives x back, and in backward a gradient of 1 to `loss`: as if it were added to the loss."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones_like(ctx.like)


def best(scores, k):
    """Indices of the k largest of each row; of equal ones, the first, on every device."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def on_good_nodes(scores, nodes, limit, k):
    """Whether each expert lies on one of the `limit` best nodes, like scores (batch, seq, experts).
    A node is as good as the sum of its best experts, of which it may give k/limit."""
    by_node = scores.unflatten(-1, (nodes, -1))
    few = min(-(-k // limit), by_node.shape[-1])
    goodness = by_node.gather(-1, best(by_node, few)).sum(-1)
    good = torch.zeros_like(goodness).scatter(-1, best(goodness, limit), 1.0)
    return good.repeat_interleave(by_node.shape[-1], dim=-1) > 0


def balance_loss(scores, chosen):
    """scores (batch, seq, experts), chosen (batch, seq, k). For each sequence: experts · the sum
    over experts of (their share of its picks · their mean score); summed over the sequences."""
    experts = scores.shape[-1]
    picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)
    return experts * (picks * scores.mean(1)).sum()


class MoE(nn.Module):
    """A mixture of experts, in place of a block's MLP: (batch, seq, dim) to the same shape.

    router: a score for each token and expert. up (experts, dim, hidden) and down (experts, hidden,
    dim): the matrices of all experts. `combine` and `compute` are replaced where ranks share them.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.dim, 4 * cfg.dim))
        self.down = nn.Parameter(torch.empty(cfg.experts, 4 * cfg.dim, cfg.dim))
        self.shared = common.MLP(cfg) if cfg.shared_expert else None
        self.register_buffer("bias", torch.zeros(cfg.experts))
        self.register_buffer("load", torch.zeros(cfg.experts), persistent=False)
        self.combine = with_places if cfg.places else without_drops
        self.compute = batched if cfg.places else one_by_one

    def forward(self, x):
        chosen, gates = self.route(x)
        self.load.index_add_(0, chosen.flatten(), self.load.new_ones(chosen.numel()))
        out = self.combine(self, x, chosen, gates).to(x.dtype)
        return out + self.shared(x) if self.shared else out

    def route(self, x):
        """The experts of each token and their gates, (batch, seq, k) each; in float32 or better."""
        cfg, precise = self.cfg, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))    # (batch, seq, experts)
        scores = logits.softmax(-1)

        choosing = scores.detach() + self.bias          # the bias is for choosing alone
        if cfg.nodes > 1:
            good = on_good_nodes(choosing, cfg.nodes, cfg.node_limit, cfg.top_k)
            choosing = choosing.masked_fill(~good, -torch.inf)
        chosen = best(choosing, cfg.top_k)
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


def in_turn(rows, up, down, counts):
    """rows (picks, dim), sorted by expert; counts: how many are for each, a list. Returns rows'
    shape. An expert with no row has a gradient of zero, not None."""
    parts = zip(rows.split(counts), up, down, strict=True)
    return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


def one_by_one(moe, rows, counts):
    """The same, with counts (experts,) on the device: the host waits for it."""
    return in_turn(rows, moe.up, moe.down, counts.tolist())


def batched(moe, rows):
    """rows (experts, places, dim): as many for each expert, so nobody has to know how many."""
    return F.gelu(rows @ moe.up) @ moe.down


def add_up_picks(moe, rows, token, expert, gate, experts):
    """Send the rows of `token` through the experts of `expert`; add up what they give, by `gate`.

    rows (tokens, dim); token, expert, gate (picks,). Returns (tokens, dim).
    """
    order = expert.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int64, device=rows.device)
    counts.index_add_(0, expert, torch.ones_like(expert))
    token, gate = token[order], gate[order, None]
    out = gate * moe.compute(moe, rows[token], counts)
    return torch.zeros_like(rows, dtype=out.dtype).index_add(0, token, out)


def without_drops(moe, x, chosen, gates):
    """x (batch, seq, dim); chosen and gates (batch, seq, k). Returns x's shape, in the gates'
    dtype: every token gets all that its experts give."""
    tokens, k = chosen.flatten(0, 1).shape
    token = torch.arange(tokens, device=x.device).repeat_interleave(k)
    out = add_up_picks(moe, x.flatten(0, 1), token, chosen.flatten(), gates.flatten(),
                       moe.cfg.experts)
    return out.view(x.shape)


def with_places(moe, x, chosen, gates):
    """The same, where each expert has `places` for the tokens of each sequence. First come the
    first choices of all tokens, in order, then the second. Who finds no place is dropped."""
    (batch, seq, k), places = chosen.shape, moe.cfg.places
    slots = moe.cfg.experts * places
    expert = chosen.transpose(1, 2).flatten(1)          # (batch, k·seq)
    line = F.one_hot(expert, moe.cfg.experts).cumsum(1)     # before each expert, up to this pick
    place = line.gather(-1, expert[..., None])[..., 0] - 1
    slot = torch.where(place < places, expert * places + place, slots)  # one more, for the dropped
    slot = slot[..., None].expand(-1, -1, x.shape[-1])  # (batch, k·seq, dim)

    rows = x.new_zeros(batch, slots + 1, x.shape[-1]).scatter(1, slot, x.repeat(1, k, 1))
    rows = rows[:, :-1].unflatten(1, (-1, places))      # (batch, experts, places, dim)
    out = moe.compute(moe, rows.transpose(0, 1).flatten(1, 2))      # (experts, batch·places, dim)
    out = out.unflatten(1, (batch, places)).transpose(0, 1).flatten(1, 2)
    moe.dropped = (place >= places).to(torch.float32).mean()    # a share
    out = F.pad(out, (0, 0, 0, 1)).gather(1, slot)      # zeros for the dropped
    out = out * gates.transpose(1, 2).flatten(1)[..., None]
    return out.unflatten(1, (k, seq)).sum(1)


# ------------------------------------------------------------------------- experts on several ranks

class Exchange(NamedTuple):
    """What an exchange of rows came to, for the formulas: so many counts went ahead; so many rows
    were sent to each rank, and received from each. Only an exchange between nodes has `picks`: for
    so many of each node the rows stand, and a token's experts and gates go with its row."""

    counts: int
    sent: list
    received: list
    picks: list | None = None


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


def exchanged(moe, rows, counts, group, seen):
    """As `one_by_one`, where each rank of the group has its part of the experts: the rows travel to
    their expert, and what it gives travels back.

    Communication: all_to_all of the counts, of the rows, and of what comes back.
    """
    n = group.size()
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(n, -1)                     # from each rank, for each expert here
    sizes = torch.cat([counts.view(n, -1).sum(1), arriving.sum(1), arriving.sum(0)])
    sizes = sizes.tolist()                              # here the host waits for the device
    sent, received, own = sizes[:n], sizes[n:2 * n], sizes[2 * n:]
    seen.append(Exchange(counts.numel(), sent, received))

    rows = AllToAll.apply(rows, sent, received, group)  # by rank, and then by expert
    expert = torch.arange(arriving.shape[1], device=rows.device).repeat(n)
    expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
    order = expert.argsort(stable=True)
    out = in_turn(rows[order], moe.up, moe.down, own)
    out = torch.zeros_like(out).index_copy(0, order, out)       # by rank again
    return AllToAll.apply(out, received, sent, group)


def exchanged_evenly(moe, rows, group):
    """As `batched`. rows (experts, places, dim); the same number goes to each rank."""
    n, (experts, places, _) = group.size(), rows.shape
    even = [experts // n] * n
    rows = AllToAll.apply(rows, even, even, group)      # (n · own experts, places, dim)
    rows = rows.unflatten(0, (n, -1)).transpose(0, 1).flatten(1, 2)
    out = batched(moe, rows).unflatten(1, (n, places)).transpose(0, 1).flatten(0, 1)
    return AllToAll.apply(out, even, even, group)


def across_nodes(moe, x, chosen, gates, across, seen):
    """As `without_drops`, where a row goes to each node once, however many experts it has there.

    across: one rank of each node, of which this is one. moe.compute spreads the rows inside of it.
    Communication: all_to_alls of counts, rows, experts and gates, and of what comes back.
    """
    n, rows, per_node = across.size(), x.flatten(0, 1), moe.cfg.experts // across.size()
    chosen, gates = chosen.flatten(0, 1), gates.flatten(0, 1)               # (tokens, k)
    nodes = torch.arange(n, device=x.device)[:, None, None]
    goes = (chosen // per_node == nodes)                                    # (nodes, tokens, k)
    to, token = goes.any(-1).nonzero(as_tuple=True)     # sorted by node; the host waits

    counts = goes.any(-1).sum(1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=across)
    sent, received, picks = torch.stack([counts, arriving, goes.sum((1, 2))]).tolist()
    seen.append(Exchange(n, sent, received, picks))

    travel = lambda what: AllToAll.apply(what, sent, received, across)
    there = travel(rows[token])
    expert = travel(torch.where(goes[to, token], chosen[token] % per_node, -1))     # -1: elsewhere
    gate = travel(gates[token] * goes[to, token])
    row, pick = (expert >= 0).nonzero(as_tuple=True)    # and once more
    out = add_up_picks(moe, there, row, expert[row, pick], gate[row, pick], per_node)
    out = AllToAll.apply(out.to(x.dtype), received, sent, across).to(gates.dtype)
    return torch.zeros_like(rows, dtype=gates.dtype).index_add(0, token, out).view(x.shape)


class Gather(torch.autograd.Function):
    """all_gather along the first dimension; the gradient is reduce_scattered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(group.size() * x.shape[0], *x.shape[1:])
        common.all_gather(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Scatter.apply(gradient, ctx.group), None


class Scatter(torch.autograd.Function):
    """reduce_scatter along the first dimension; the gradient is all_gathered."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
        common.reduce_scatter(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Gather.apply(gradient, ctx.group), None


def cut_experts(moe, x, chosen, gates, group):
    """As `without_drops`, where each rank has a part of every expert: all tokens come to all ranks,
    and the partial results are added up on the rank that they came from."""
    chosen = chosen.flatten(0, 1)
    everyones = chosen.new_empty(group.size() * chosen.shape[0], chosen.shape[1])
    common.all_gather(everyones, chosen.contiguous(), group=group)
    gathered = Gather.apply(x.flatten(0, 1), group)
    everyones_gates = Gather.apply(gates.flatten(0, 1), group)
    partial = without_drops(moe, gathered[None], everyones[None], everyones_gates[None])[0]
    return Scatter.apply(partial, group).view(x.shape)


def mixture_gpt(cfg, seed=0, device="cpu", dtype=torch.float32):
    """common.gpt with a mixture of experts in each block."""
    model = gpt(cfg, seed=None)
    for block in model[1:-1]:
        block.mlp = MoE(cfg)
    common.name_parameters(model)
    return model if seed is None else draw_weights(model, seed, device, dtype)


def expert_parallel(model, variant, groups, seen):
    """Share the experts of a mixture_gpt among ranks, and note whose gradients are summed.

    groups: `world`, all ranks; `ep`, those that share the experts; `copies`, those with the same
    ones; across and inside nodes. seen: a list for what exchanges send and receive.
    """
    for p in model.parameters():
        p.partial = groups["world"]                     # all ranks have seen other tokens
    for block in model[1:-1]:
        moe, cut_hidden = block.mlp, variant == "tensor"
        keep_shard(moe, "up", 2 if cut_hidden else 0, groups["ep"])
        keep_shard(moe, "down", 1 if cut_hidden else 0, groups["ep"])
        for p in (moe.up, moe.down):                    # they have seen the tokens of all of ep
            p.partial = groups["copies"]
        if variant == "tensor":
            moe.combine = functools.partial(cut_experts, group=groups["ep"])
        elif variant == "capacity":
            moe.compute = functools.partial(exchanged_evenly, group=groups["ep"])
        elif "across" in groups:
            moe.combine = functools.partial(across_nodes, across=groups["across"], seen=seen)
            moe.compute = functools.partial(exchanged, group=groups["inside"], seen=seen)
        else:
            moe.compute = functools.partial(exchanged, group=groups["ep"], seen=seen)
    return model


def take_loads(model, group=None):
    """How often each expert was chosen in this step, (layers, experts); the count starts again.
    Communication: an all_reduce of it over all ranks of `group`."""
    loads = torch.stack([block.mlp.load for block in model[1:-1]])
    for block in model[1:-1]:
        block.mlp.load.zero_()
    if group and group.size() > 1:
        dist.all_reduce(loads, group=group)
    return loads


def move_biases(model, loads):
    """After a step: what was chosen more often than the mean will be chosen less, and the other way
    round. No gradient, and no loss."""
    for block, load in zip(model[1:-1], loads):
        block.mlp.bias += block.mlp.cfg.bias_speed * torch.sign(load.mean() - load)


def train_step(model, optimizer, micro_batches, valid, clip, world):
    """One step. Returns this rank's part of the loss, the norm, and the loads of the experts.

    micro_batches: pairs of tokens and targets, (b, s) each, of this rank. valid: the valid targets
    of the whole batch. Communication: that of the experts; an all_reduce of what all ranks hold,
    one of the experts over their copies, one for the norm, and one of the loads.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    sum_partial_grads(p for p in model.parameters() if p.partial.size() > 1)

    norm = grad_norm(model.parameters(), world)
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    loads = take_loads(model, world)
    move_biases(model, loads)
    return total, norm, loads


# ------------------------------------------------------------------------------------ the formulas

def held_numbers(cfg, ep):
    """Parameters of a rank, and how many of them are its experts'."""
    experts = cfg.layers * cfg.experts * cfg.expert() // ep
    return cfg.parameters() - (ep - 1) * experts, experts


def exchange_bytes(exchange, cfg, e):
    """Bytes that a rank sends in an exchange, forward and backward: rows, which go there and back,
    and their gradients; between nodes also k experts, as int64, k gates, and gradients of gates."""
    sent, received = sum(exchange.sent), sum(exchange.received)
    k, accurate = cfg.top_k if exchange.picks else 0, max(e, 4)
    along = sent * k * (8 + accurate) + received * k * accurate
    return 8 * exchange.counts + 2 * (sent + received) * cfg.dim * e + along


def even_bytes(cfg, tokens, e):
    """The same for a rank with so many tokens, if all experts are chosen alike; without counts."""
    return 4 * cfg.top_k * tokens * cfg.dim * e


def rows_away(cfg, tokens, limit):
    """How many rows go to other nodes from a rank with so many tokens, if a token takes any k of
    the experts of any `limit` nodes alike: a node is left out where all k lie on the others."""
    candidates = limit * cfg.experts // cfg.nodes
    others = candidates - cfg.experts // cfg.nodes
    left_out = math.comb(others, cfg.top_k) / math.comb(candidates, cfg.top_k)
    return tokens * limit * (1 - left_out) * (cfg.nodes - 1) / cfg.nodes


def cut_bytes(cfg, tokens, ep, e):
    """The same where every expert is cut: the rows of all ranks, and partial sums, which are in
    float32 or better; without choices and gates, which are small beside them."""
    return 2 * ep * tokens * cfg.dim * (e + max(e, 4))


def traffic(cfg, variant, seen, micro_batches, b, n, ep, e):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}. seen: the
    exchanges of the step. b: sequences of a micro-batch. n: ranks. e: bytes of a number."""
    layers, tokens, accurate = micro_batches * cfg.layers, b * cfg.seq, max(e, 4)
    numbers, experts = held_numbers(cfg, ep)
    dense = e * (numbers - experts) + 4 * cfg.layers * cfg.experts + accurate   # loads; the norm
    copies, copied = n // ep, e * experts if n > ep else 0
    sent = {"all_reduce": (3 + (1 < copies < n), dense + copied, 2 * (n - 1) / n * dense
                           + 2 * (copies - 1) / copies * copied)} if n > 1 else {}
    share = (ep - 1) / ep
    if variant == "dropless":
        payload = [exchange_bytes(exchange, cfg, e) for exchange in seen]
        wire = sum(size * (1 - 1 / len(exchange.sent)) for size, exchange in zip(payload, seen))
        # Counts, rows, what comes back, two gradients; between nodes also experts, gates, theirs.
        calls = sum(8 if exchange.picks else 5 for exchange in seen)
        return sent | {"all_to_all": (calls, sum(payload), wire)}
    if variant == "capacity":
        payload = 4 * layers * b * cfg.experts * cfg.places * cfg.dim * e
        return sent | {"all_to_all": (4 * layers, payload, share * payload)}
    rows, picks = ep * tokens * cfg.dim, ep * tokens * cfg.top_k
    gathered = layers * (rows * e + 8 * picks + accurate * picks + accurate * rows)
    scattered = layers * (accurate * rows + rows * e + accurate * picks)
    return sent | {"all_gather": (4 * layers, gathered, share * gathered),
                   "reduce_scatter": (3 * layers, scattered, share * scattered)}


def mixture_flops(cfg, tokens, rows):
    """FLOPs of a mixture on a rank, forward and backward, which route so many tokens, and put so
    many rows through experts."""
    rows += tokens * cfg.shared_expert
    return 3 * 2 * (rows * cfg.expert() + tokens * cfg.dim * cfg.experts)


def expected_drops(cfg):
    """The share of the picks that find no place, if every token takes any k experts alike. Then the
    load of an expert, for a sequence, is binomial."""
    n, p = cfg.seq, cfg.top_k / cfg.experts
    if p == 1:
        return max(0, n - cfg.places) / n
    log_choose = lambda k: math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    chance = lambda k: math.exp(log_choose(k) + k * math.log(p) + (n - k) * math.log1p(-p))
    return sum((k - cfg.places) * chance(k) for k in range(cfg.places + 1, n + 1)) / (n * p)


# ----------------------------------------------------------------------------------------- the run

def make_groups(run):
    """All ranks; the neighbours that share the experts; and those with the same experts."""
    n, ep = run.world, run.args.ep
    mesh, world = run.mesh(copies=n // ep, ep=ep), dist.group.WORLD
    copies = mesh["copies"].get_group() if ep > 1 else world
    return mesh, {"world": world, "ep": mesh["ep"].get_group(), "copies": copies}


def train(run):
    args, cfg, n = run.args, run.args.model, run.world
    mesh, groups = make_groups(run)
    if cfg.nodes > 1 and args.variant == "dropless":
        nodes = run.mesh(copies=n // args.ep, across=cfg.nodes, inside=args.ep // cfg.nodes)
        groups |= {name: nodes[name].get_group() for name in ("across", "inside")}
    seen, formulas, everyones_loads = [], [], []
    model = expert_parallel(mixture_gpt(cfg, seed=None), args.variant, groups, seen)
    draw_weights(model, args.seed, run.device, run.dtype)
    optimizer = run.optimizer(model.parameters())
    run.build, run.after_step = mixture_gpt, lambda one: move_biases(one, take_loads(one))

    b, m, e = args.micro_batch, args.batch // n // args.micro_batch, run.dtype.itemsize

    for batch in run.batches(share=run.rank):           # 1/n of the sequences
        seen.clear()
        with run.measure():
            loss, norm, loads = train_step(model, optimizer, batch.micro_batches, batch.valid,
                                           args.clip, groups["world"])
        dist.all_reduce(loss)                           # for the report
        run.log(batch, loss, norm, model)
        formulas.append(traffic(cfg, args.variant, seen, m, b, n, args.ep, e))
        everyones_loads.append(loads.tolist())

    run.check_states(model, optimizer, held_numbers(cfg, args.ep)[0])
    run.check_traffic(run.of_metered_step(formulas))    # in each step, other rows are sent
    say_what_it_costs(run, model, seen, everyones_loads, groups["ep"])
    check_flops(run, model, seen, batch.micro_batches[0][0])


def check_flops(run, model, seen, ids):
    """Of the first mixture, for the tokens (b, s) of one micro-batch of each rank."""
    args, cfg, block = run.args, run.args.model, model.block1
    x = model.embedding(ids)
    x = block.norm2(x + block.attn(block.norm1(x))).detach().requires_grad_()   # what it sees
    mixture = lambda *micro_batch: block.mlp(x).sum().backward()

    mixture()                                           # to see where the rows go
    tokens = ids.numel()
    rows = tokens * cfg.top_k           # tensor: ep times as many, each through 1/ep of an expert
    if args.variant == "dropless":
        rows = sum(seen[-1].received)
    elif args.variant == "capacity":
        rows = len(ids) * cfg.experts * cfg.places
    run.check_flops(f"a mixture of {rows} rows, both passes", mixture,
                    mixture_flops(cfg, tokens, rows))


def say_what_it_costs(run, model, seen, loads, ep):
    """What the routing of the last step came to, and the conditions of the lesson."""
    args, cfg, n = run.args, run.args.model, ep.size()
    tokens, e = args.micro_batch * cfg.seq, run.dtype.itemsize
    run.note(f"parameters: {cfg.parameters():,}, of which a token meets {cfg.active():,} and a "
             f"rank holds {held_numbers(cfg, n)[0]:,}")
    arrived = [sum(exchange.received) for exchange in seen if not exchange.picks]
    if arrived and n > 1:
        everyones = of_all_ranks(run, arrived)
        wait = (everyones.max(0).values / everyones.mean(0)).mean()
        run.note(f"in the last step, {wait:.2f} times as many rows come to the busiest rank of a "
                 "mixture as to the mean of them: others wait for it")
    if cfg.places:
        dropped = torch.stack([block.mlp.dropped for block in model[1:-1]]).mean()
        run.note(f"{cfg.places} places for each expert and sequence: {dropped:.1%} of the last "
                 f"micro-batch's picks are dropped, {expected_drops(cfg):.1%} if all are as likely")
    across = seen[0] if seen and seen[0].picks else None
    if across:
        here = run.rank % n * len(across.sent) // n     # this rank's node
        rows, picks = (sum(there) - there[here] for there in (across.sent, across.picks))
        size = cfg.dim * e + cfg.top_k * (8 + max(e, 4))        # a row, its experts and gates
        said = lambda rows: f"{rows:,.0f} rows, {rows * size:,.0f} bytes"
        limited, free = (said(rows_away(cfg, tokens, m)) for m in (cfg.node_limit, cfg.nodes))
        more = f"; without --node-limit {free}" if cfg.node_limit < cfg.nodes else ""
        run.note("to other nodes, forward in the first layer, of a micro-batch of the last step: "
                 f"{said(rows)} for {picks} picks (a row for each: {picks * cfg.dim * e:,} bytes); "
                 f"if all experts were chosen alike: {limited}{more}")
    elif n > 1:
        even, cut = even_bytes(cfg, tokens, e), cut_bytes(cfg, tokens, n, e)
        share = (n - 1) / n / 1e6                       # of that goes to other ranks, in MB
        run.note(f"a layer's rows, per rank and micro-batch, both passes: {share * even:.2f} MB if "
                 f"all experts are chosen alike; {share * cut:.2f} MB with --variant tensor")

    run.record(loads=loads, rows=[])
    if seen and not across:                             # who sends how many rows: the first layer
        before = run.rank // n * n
        rows = [0] * before + seen[0].sent + [0] * (run.world - before - n)
        run.record(rows=of_all_ranks(run, rows).tolist())


def of_all_ranks(run, numbers):
    """Of a list of each rank, a tensor (ranks, numbers)."""
    mine = torch.tensor(numbers, dtype=torch.float32, device=run.device)
    everyones = mine.new_empty(run.world * len(mine))
    common.all_gather(everyones, mine)
    return everyones.view(run.world, -1)


def torch_compute(moe, rows, counts, group):
    """As `exchanged`, with PyTorch's differentiable all_to_all, and experts that are DTensors."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    n, own = group.size(), moe.up.to_local().shape[0]
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    arriving = arriving.view(n, own)
    sent, received = torch.stack([counts.view(n, own).sum(1), arriving.sum(1)]).tolist()

    rows = all_to_all_single_autograd(rows, received, sent, group)
    expert = torch.arange(own, device=rows.device).repeat(n)
    expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
    order = expert.argsort(stable=True)
    rows, up, down = rows[order], moe.up.to_local(), moe.down.to_local()
    if rows.is_cuda and rows.dtype == torch.bfloat16:   # all experts in one kernel
        ends = arriving.sum(0).cumsum(0).to(torch.int32)
        out = F.grouped_mm(F.gelu(F.grouped_mm(rows, up, offs=ends)), down, offs=ends)
    else:
        out = in_turn(rows, up, down, arriving.sum(0).tolist())
    out = torch.zeros_like(out).index_copy(0, order, out)
    return all_to_all_single_autograd(out, sent, received, group)


def torch_step(model, optimizer, experts, others, micro_batches, valid, clip, groups):
    """experts: DTensors over groups["ep"]. others: plain parameters, the same on all ranks."""
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        total += loss.detach()
    own = [p.grad.to_local() for p in experts]
    for grad in own if groups["copies"].size() > 1 else ():
        dist.all_reduce(grad, group=groups["copies"])
    for p in others:
        dist.all_reduce(p.grad, group=groups["world"])

    square = nn.utils.get_total_norm(own) ** 2
    dist.all_reduce(square, group=groups["ep"])
    norm = (square + nn.utils.get_total_norm([p.grad for p in others]) ** 2).sqrt()
    if clip:
        scale = common.clip_scale(norm, clip)
        torch._foreach_mul_([*own, *(p.grad for p in others)], scale)
    optimizer.step()
    move_biases(model, take_loads(model, groups["world"]))
    return total, norm


def train_torch(run):
    from torch.distributed.tensor import Shard, distribute_tensor

    args, cfg = run.args, run.args.model
    mesh, groups = make_groups(run)
    model = mixture_gpt(cfg, args.seed, run.device, run.dtype)
    for block in model[1:-1]:
        moe = block.mlp
        for name in ("up", "down"):
            full = getattr(moe, name)
            sharded = nn.Parameter(distribute_tensor(full.data, mesh["ep"], [Shard(0)]))
            sharded.global_name = full.global_name
            setattr(moe, name, sharded)
        moe.compute = functools.partial(torch_compute, group=groups["ep"])
    experts = [p for block in model[1:-1] for p in (block.mlp.up, block.mlp.down)]
    others = [p for p in model.parameters() if all(p is not expert for expert in experts)]
    optimizer = run.optimizer([{"params": others}, {"params": experts}])
    run.build, run.after_step = mixture_gpt, lambda one: move_biases(one, take_loads(one))

    for batch in run.batches(share=run.rank):
        with run.measure():
            loss, norm = torch_step(model, optimizer, experts, others, batch.micro_batches,
                                    batch.valid, args.clip, groups)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)

    run.check_states(model, optimizer, held_numbers(cfg, args.ep)[0])
    run.check_traffic()


def requires(args, ranks):
    common.split_batch(args, ranks)
    experts, k, nodes = args.experts, args.top_k, args.nodes
    ep = args.ep = math.gcd(ranks, experts) if args.ep is None else args.ep
    limit = nodes if args.node_limit is None else args.node_limit
    if min(experts, k, nodes, ep, limit) < 1:
        common.refuse("--experts, --top-k, --ep, --nodes and --node-limit are 1 or more; the "
                      "defaults would work")
    if ranks % ep:
        common.refuse(f"--ep {ep} does not divide {ranks} ranks; {math.gcd(ep, ranks)} would work")
    common.divides("--experts", experts, "--ep", ep)
    if k > experts:
        common.refuse(f"--top-k {k} is more than --experts = {experts}; {experts} would work")
    if nodes == 1 and args.node_limit is not None:
        common.refuse(f"--node-limit {limit} means nothing to --nodes 1; more --nodes would work")
    if args.variant == "dropless" and ep % nodes or experts % nodes:
        common.refuse(f"--nodes {nodes} does not divide --ep = {ep} and --experts = {experts}; "
                      f"{math.gcd(nodes, ep, experts)} would work")
    if limit > nodes or k > limit * experts // nodes:
        common.refuse(f"--node-limit {limit}, where each of {nodes} nodes has {experts // nodes} "
                      f"experts, cannot be for --top-k {k}; {-(-k * nodes // experts)} would work")
    dim = args.model.dim
    if args.variant == "tensor" and 4 * dim % ep:
        common.refuse(f"--dim {dim} makes {4 * dim} hidden units, which --ep {ep} does not divide; "
                      f"--dim {math.lcm(dim, ep)} would work")
    even = k * args.model.seq / experts                 # picks of an expert in a sequence
    if args.variant == "capacity" and args.capacity_factor * even < 1:
        common.refuse(f"--capacity-factor {args.capacity_factor:g} leaves an expert less than one "
                      f"place in a sequence; {math.ceil(1 / even)} would work")
    places = min(math.ceil(args.capacity_factor * even), args.model.seq)    # no more can come
    strengths = {}
    for name, balance, default in (("balance_weight", "loss", 0.01), ("bias_speed", "bias", 0.001)):
        given = getattr(args, name)
        if args.balance == balance:
            strengths[name] = default if given is None else given
        elif given is not None:
            common.refuse(f"--{name.replace('_', '-')} means nothing to --balance {args.balance}; "
                          f"--balance {balance} would work")
    args.model = Mixture(
        **asdict(args.model), **strengths, experts=experts, top_k=k, z_loss=args.z_loss,
        shared_expert=args.shared_expert, sequences=args.batch, nodes=nodes, node_limit=limit,
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
    add("--nodes", type=int, default=1, help="among which the experts lie")
    add("--node-limit", type=int, help="nodes of a token's experts, at most")


VARIANTS = {"dropless": train, "capacity": (train, "--capacity-factor"), "tensor": train,
            "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
