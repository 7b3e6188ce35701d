r"""09 · 5D: data, tensor (with sequence), context, expert and pipeline parallelism in one run.

Each of the chapters before shares out one thing, and has one limit. So a large run multiplies them.
This chapter trains one model with all of them, and switches each by its degree:

    --dp    other sequences (chapter 02); --zero 1, 2 or 3 shards what all of them hold (chapter 03)
    --pp    other layers (chapter 07), by one of three schedules, with B and W together
    --cp    other parts of each sequence, in attention too (chapter 06, with gathered keys)
    --tp    other heads and hidden units (chapter 04); outside of the sub-layers, other tokens
            (sequence parallelism, chapter 05's variant `kept`)
    --ep    of a stage's ranks, those that share the experts of a mixture (chapter 08)

The number of ranks is pp · dp · cp · tp; ep divides dp · cp · tp. What the earlier chapters built
stands here once more in its plainest form. What is new is how it fits together.

The mesh. Every rank has a place on each axis. With 8 ranks, --order pp,dp,cp,tp, and cp of 1:

                    tp 0      tp 1
    pp 0    dp 0    rank 0    rank 1
            dp 1    rank 2    rank 3
    pp 1    dp 0    rank 4    rank 5
            dp 1    rank 6    rank 7

Along the axis that is named last, ranks are neighbours. A machine of 4 ranks would hold one stage
here, and only what pp sends would leave it. To choose the order, see what a rank sends in a step,
in numbers. (h: the model's dim, L: its layers, M: micro-batches, T = b·s/cp: tokens of one, which
the ranks of tp have together, K: experts of a token, k: the width of the keys that a rank holds.)

    tp      M · L/pp · 8 · (tp-1)/tp · T·h        4 gathers and scatters of attention, 4 of an MLP
    ep      M · L/pp · 4 · (ep-1)/ep · K·T·h/tp   rows to their experts and back, if chosen alike
    cp      M · L/pp · 4 · (cp-1) · T·k           keys and values, and their gradients
    pp      M · T·h/tp                            an activation or a gradient, to a neighbour stage
    dp      2 · (n-1)/n · Ψ                       gradients of Ψ parameters that n ranks hold alike

With --recompute full, backward sends again what a block's forward has sent, but for what comes
last: 11 in place of 8 over tp (with mixtures 6 of 4), 6 of 4 over ep and cp (cp: with selective,
too). With --precision bf16, a number takes 2 bytes here, a gradient 4: it is as wide as masters.

Experts are folded over the mesh. Between sub-layers each rank of tp has tokens of its own, and a
mixture asks for no others. So a rank routes and sends just these, and its experts do not see tp or
cp: of a stage's dp · cp · tp ranks, every ep neighbours have all experts, each whole on one rank.
Here of a stage with dp 2, cp 2, tp 2, and ep 4:

    rank                0     1     2     3     4     5     6     7
    part of experts     0     1     2     3     0     1     2     3     (rows stay in 0-3, and 4-7)

Frameworks used to cut each expert over tp, like an MLP. Then a rank of tp needs all tokens of its
group, gathered behind the router, and sends all through ep: tp times what it must. In a layer, in
units of t·h (t: tokens of the batch for each GPU), with ep GPUs that have all experts together:

                                                               tp 8, ep 64 and DeepSeek-V3's K 8
    cut by tp    over tp 8·(tp-1), over ep 4·(ep-tp)/ep·K·tp   56 (as in a dense layer) and 224
    folded       over tp 4·(tp-1), over ep 4·(ep-1)/ep·K       28 and 31.5

But the amount alone does not decide. What does is how long compute waits, and on which links:

    tp      Eight messages in each layer, four with a mixture, between matmuls that need them: none
            of it hides here. Latency counts as much as bytes. So tp comes last, in a machine.
    ep      Four of rows, which wait for the busiest rank; chapter 08 computes meanwhile. Experts
            often need more ranks than a machine has.
    cp      Two, of 2k numbers a token for each other rank: few with GQA, or under tp.
    pp      One message for a whole stage, while another micro-batch computes.
    dp      Once a step, or M times: most of it hides behind backward (chapters 02 and 03).

So pp and dp are the outer axes: Megatron puts pp outermost, and Llama 3 dp. Try `--order
tp,cp,dp,pp` with `--node-size 4`: it trains the same, and in the report tp leaves the machines.

One rule for gradients. Every rank divides its loss by the valid targets of the whole batch. Then
a gradient is summed over all ranks that hold the same part of the parameter, and nothing is divided
after that. Each has computed a part of the sum: from other tokens or, where tp ranks share a kv
head, from the same ones with other query heads (chapter 05). The cut of a parameter says who:

                                   pp        tp         ep       held by, and summed over
    embedding, head                a stage   whole      whole    dp · cp · tp ranks
    norms, router, shared expert   a stage   whole      whole    dp · cp · tp
    q, o, up, gate, down           a stage   cut        whole    dp · cp
    k, v                           a stage   kv heads   whole    dp · cp · (ranks of a kv head)
    experts                        a stage   whole      cut      dp · cp · tp/ep
    embedding = head (tied)        2 stages  whole      whole    2 · dp · cp · tp

So most of these groups are no axis of the mesh. They serve the norm as well, to which each of n
copies adds 1/n of its square; and ZeRO, under which those who hold the same part share it out.

In a stage's last backward, a module's gradients leave while those before it compute; the first
module's wait, or leave in the bubble at the end. ZeRO-2 and 3 send after every backward, M times as
much, so that 1/n of them stays. ZeRO-1 and 2 gather in the first forwards; ZeRO-3 2·M times or,
with --keep-gathered, once, for as much memory as ZeRO-2 has in a step.

Where axes meet, prototypes have gone wrong. The balance loss is about a sequence, which lies on
cp · tp ranks: so these sum how often each expert was picked (in the report: "cp and tp"). And the
two stages of a tied matrix are both in its sum, unless they lie on one rank (as in dualpipe-v).

How to choose. First make it fit: tp up to the size of a machine, then pp, or ZeRO-3; for long
sequences cp, for experts ep. All other ranks go to dp, up to the batch that may be. Published runs:

                    GPUs     tp   cp   pp   dp    ep
    llama3-8k       8,192    8    1    16   64    -     parameters stay gathered after forward
    llama3-128k     16,384   8    16   16   8     -     keys are gathered, as here
    deepseek-v3     2,048    1    1    16   128   64    ZeRO-1, DualPipe
    megatron-1t     3,072    8    1    64   6     -     interleaved

`--like` runs their axes on 8 ranks or 16, not their models and schedules. With --documents, texts
are packed as in chapter 06: attention takes keys run by run, and what cp sends stays as it is.

Run it:
    torchrun --nproc_per_node=8 09_5d.py --dp 2 --pp 2 --tp 2                # or --variant torch
    torchrun --nproc_per_node=8 09_5d.py --pp 2 --cp 2 --tp 2 --schedule dualpipe-v --zero 3
    torchrun --nproc_per_node=8 09_5d.py --dp 4 --tp 2 --ep 8 --experts 8   # or --like deepseek-v3

Sources: Ultra-Scale Playbook, "5D Parallelism in a Nutshell"; Narayanan et al., Efficient Large-
Scale Language Model Training on GPU Clusters (2021), sections 3 and 4.1; Llama Team, The Llama 3
Herd of Models (2024), section 3.3, table 4; DeepSeek-V3 Technical Report (2024), section 3; Liu et
al., MoE Parallel Folding (2025)."""

import functools
import itertools
import logging
import math
from collections import defaultdict, deque, namedtuple
from dataclasses import asdict, dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import clip_grads_with_norm_

import common
from common import Refused, gpt, grad_norm, keep_shard, loss_sum

# ----------------------------------------------------------------------------------------- the mesh

Place = namedtuple("Place", "pp dp cp tp")              # where a rank stands on each axis


def places_of_ranks(args):
    """The Place of every rank. args.order: of the axes; along the last, ranks are neighbours."""
    order = args.order.split(",")
    every = itertools.product(*(range(getattr(args, axis)) for axis in order))
    return [Place(**dict(zip(order, indices))) for indices in every]


def sort_ranks(places, key):
    """Lists of ranks: together are those whose places have the same key(place)."""
    together = defaultdict(list)
    for rank, place in enumerate(places):
        together[key(place)].append(rank)
    return list(together.values())


def make_groups(args, tied_stages):
    """Returns this rank's {axis: group}, without axes of one rank, and {kind of parameter: group of
    those who hold the same part}. Every rank makes all groups, in the same order, or NCCL would
    hang. tied_stages: the first and the last stage, on two ranks of pp, hold one matrix."""
    places, ep, t, kv_heads = places_of_ranks(args), args.ep, args.tp, args.model.kv_heads
    together = functools.partial(sort_ranks, places)
    stages, parts = together(lambda at: at.pp), min(t, kv_heads)    # of k and v
    along = {
        "tp": together(lambda at: at._replace(tp=0)),   # all else is the same
        "cp": together(lambda at: at._replace(cp=0)),
        "pp": together(lambda at: at._replace(pp=0)),
        "ep": [stage[i:i + ep] for stage in stages for i in range(0, len(stage), ep)],
        "cp and tp": together(lambda at: at._replace(cp=0, tp=0))}      # with the same sequences
    whole, by_tp = ("whole", stages), ("cut by tp", together(lambda at: (at.pp, at.tp)))
    experts = "experts", [stage[i::ep] for stage in stages for i in range(ep)]
    same = {
        "tables": whole, "norms": whole, "queries": by_tp,      # norms: and the router
        "keys": ("kv heads", together(lambda at: (at.pp, at.tp * parts // t))),     # t/parts share
        "mlp": experts if args.experts else by_tp}
    if tied_stages:
        same["tied"] = "tied", together(lambda at: min(at.pp, args.pp - 1 - at.pp))

    axes, holders, made = {}, {}, {}
    for axis, ranks in along.items():
        if len(ranks) < len(places):                    # else each rank is alone
            axes[axis], _ = dist.new_subgroups_by_enumeration(ranks, group_desc=axis)
    for kind, (cut, ranks) in same.items():
        if str(ranks) not in made:                      # else it is held like a kind before
            name = f"gradients, {cut}"
            made[str(ranks)], _ = dist.new_subgroups_by_enumeration(ranks, group_desc=name)
        holders[kind] = made[str(ranks)]
    return axes, holders


# ------------------------------------------------------------ sequence parallelism, from chapter 05

class GatherIn(torch.autograd.Function):
    """f: all_gather along the sequence, (batch, seq/t, ...) to (batch, seq, ...)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty(group.size(), *x.shape)
        common.all_gather(parts.flatten(0, 1), x.contiguous(), group=group)
        return parts.transpose(0, 1).flatten(1, 2).contiguous()

    @staticmethod
    def backward(ctx, gradient):
        return ScatterOut.apply(gradient, ctx.group), None


class ScatterOut(torch.autograd.Function):
    """g: reduce_scatter along the sequence, (batch, seq, ...) to (batch, seq/t, ...)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
        mine = torch.empty_like(parts[0])
        common.reduce_scatter(mine, parts.flatten(0, 1), group=group)
        return mine

    @staticmethod
    def backward(ctx, gradient):
        return GatherIn.apply(gradient, ctx.group), None


class SequenceParallel(nn.Module):
    """A sub-layer between f and g: gather the sequence, compute with 1/t of the heads, scatter."""

    def __init__(self, inner, group):
        super().__init__()
        self.inner, self.group = inner, group

    def forward(self, x):                               # (batch, seq/t, dim)
        partial_sum = self.inner(GatherIn.apply(x, self.group))
        return ScatterOut.apply(partial_sum, self.group)


# ------------------------------------------------------------- context parallelism, from chapter 06

def runs_of(rank, ranks, starts):
    """The tokens of a rank, int64, ascending, as runs: neighbours of one document. Of 2N chunks of
    the sequence it has one from the front and one from the back: then all ranks have as many pairs
    of a query and a key, but for documents. starts: (seq,), where each token's document begins."""
    chunks = torch.arange(len(starts)).chunk(2 * ranks if ranks > 1 else 1)
    mine = [chunks[rank], chunks[-1 - rank]] if ranks > 1 else chunks
    return [run for chunk in mine
            for run in chunk.tensor_split(starts[chunk].diff().nonzero().flatten() + 1)]


def lay_out(starts, rope, blocks, rank, ranks):
    """Set RoPE and `blocks` for a step: of each run, how many queries it has, and where the keys
    begin and end that they may see. Returns which tokens of a sequence this rank of cp has."""
    runs = runs_of(rank, ranks, starts)
    blocks[:] = [(len(run), int(starts[run[0]]), int(run[-1]) + 1) for run in runs]
    tokens = torch.cat(runs)
    rope.positions = (tokens - starts[tokens]).to(rope.positions.device)
    return tokens


def gathered_attention(q, k, v, group, attention, blocks):
    """Causal attention of this rank's queries, (batch, heads, s/N, head_dim), to the keys and
    values of all ranks, which are gathered. blocks: as `lay_out` sets them."""
    if group:
        both = GatherIn.apply(torch.cat([k, v]).transpose(1, 2), group)     # (2·batch, s, ...)
        chunks = both.transpose(1, 2).chunk(2 * group.size(), dim=2)    # rank 0's two, rank 1's
        k, v = torch.cat([*chunks[0::2], *chunks[::-2]], dim=2).chunk(2)    # in the right order
    outputs, is_flash = [], attention == "sdpa" and q.is_cuda and q.itemsize == 2
    for queries, (rows, begin, end) in zip(q.split([rows for rows, *_ in blocks], dim=2), blocks):
        block = queries, k[:, :, begin:end], v[:, :, begin:end]
        if is_flash and q.shape[3] in range(8, 257, 8):     # its mask ends in the lower right, too
            out = torch.ops.aten._scaled_dot_product_flash_attention(*block, 0.0, True)[0]
        else:
            seen = torch.ones(rows, end - begin, dtype=torch.bool, device=q.device)
            out = common.CORES[attention](*block, seen.tril(end - begin - rows))
        outputs.append(out)
    return torch.cat(outputs, dim=2)


# -------------------------------------------------------------- expert parallelism, from chapter 08

@dataclass(frozen=True)
class Mixture(common.Config):
    """The shape of a model whose MLPs may be mixtures of experts: where `experts` is not 0."""

    experts: int = 0
    top_k: int = 2
    balance_weight: float = 0.01
    sequences: int = 1              # of the whole batch: the balance loss is a mean over them
    shared_expert: bool = False

    def parameters(self):           # in place of the MLP, a router and experts of the same size
        more = self.experts * (self.mlp() + self.dim) - (not self.shared_expert) * self.mlp()
        return super().parameters() + (self.layers * more if self.experts else 0)


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


def unsorted(rows, order):
    """What undoes rows.index_select(0, order)."""
    return torch.empty_like(rows).scatter(0, order[:, None].expand_as(rows), rows)


def run_experts(rows, columns, downs, counts):
    """Each expert's MLP on its own rows: (picks, dim), sorted by expert, to the same shape.
    columns: [ups], or [ups, gates]; counts: how many rows are for each expert, a list. An expert
    with no row has a gradient of zero, not None."""
    out = []
    for part, column, down in zip(rows.split(counts), zip(*columns), downs, strict=True):
        out.append(common.activate(*[part @ matrix for matrix in column]) @ down)
    return torch.cat(out)


class MoE(nn.Module):
    """A mixture of experts in place of the MLP, for the tokens that a rank has between sub-layers:
    (batch, seq, dim) to the same shape. ep, sequence: process groups, or None for one rank. shared:
    an expert, whole on each rank. seen: of each micro-batch of a step, the rows sent to the ranks
    of ep, and received."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.ep, self.sequence, self.seen = cfg, None, None, []
        self.router = nn.Linear(cfg.dim, cfg.experts, bias=False)
        self.up = nn.Parameter(torch.empty(cfg.experts, cfg.dim, cfg.hidden))
        self.gate = nn.Parameter(torch.empty_like(self.up)) if cfg.gated else None
        self.down = nn.Parameter(torch.empty(cfg.experts, cfg.hidden, cfg.dim))
        self.columns = [self.up, self.gate] if cfg.gated else [self.up]     # they read the rows
        self.shared = common.MLP(cfg) if cfg.shared_expert else None

    def forward(self, x):                               # (batch, seq/(cp·tp), dim)
        chosen, gates = self.route(x)
        expert = chosen.flatten()                       # of each pick: k of a token, k of the next
        order = expert.argsort(stable=True)
        counts = torch.zeros(self.cfg.experts, dtype=torch.int64, device=x.device)
        counts.index_add_(0, expert, torch.ones_like(expert))
        rows = x.flatten(0, 1).repeat_interleave(self.cfg.top_k, dim=0)     # one for each pick
        out = unsorted(self.exchange(rows.index_select(0, order), counts), order)
        out = out.view(*chosen.shape, -1)               # (batch, seq, k, dim)
        out = (out * gates.to(x.dtype)[..., None]).sum(2)       # added in float32, and then rounded
        return out + self.shared(x) if self.shared else out

    def route(self, x):
        """The experts of each token and their gates, (batch, seq, k) each; in float32 or better."""
        cfg, precise = self.cfg, torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(precise), self.router.weight.to(precise))    # (batch, seq, experts)
        scores = logits.softmax(-1)
        chosen = scores.detach().topk(cfg.top_k).indices
        if cfg.top_k == 1:              # over their sum it would be 1, and the router learn nothing
            gates = scores.gather(-1, chosen)
        else:                           # equals scores over their sum, but for 0/0
            gates = logits.gather(-1, chosen).softmax(-1)

        picks = scores.new_zeros(len(x), cfg.experts)   # how often, in each sequence
        picks.scatter_add_(1, chosen.flatten(1), torch.ones_like(gates.detach()).flatten(1))
        if self.sequence:                               # of all of it, which lies on several ranks
            dist.all_reduce(picks, group=self.sequence)
        share = picks / (cfg.seq * cfg.top_k)
        balance = cfg.experts / cfg.seq * (share * scores.sum(1)).sum()
        return chosen, AddLoss.apply(gates, cfg.balance_weight / cfg.sequences * balance)

    def exchange(self, rows, counts):
        """The rows travel to their experts, and what these give travels back: (picks, dim), sorted
        by expert, to the same shape. counts (experts,): how many are for each. Communication:
        all_to_alls of the counts, of the rows, and of what comes back."""
        if self.ep is None:
            return run_experts(rows, self.columns, self.down, counts.tolist())
        n = self.ep.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.ep)
        arriving = arriving.view(n, -1)                 # from each rank, for each expert here
        sizes = torch.cat([counts.view(n, -1).sum(1), arriving.sum(1), arriving.sum(0)])
        sizes = sizes.tolist()                          # here the host waits for the device
        sent, received, own = sizes[:n], sizes[n:2 * n], sizes[2 * n:]
        if torch._C._current_graph_task_id() == -1:     # else it is computed again
            self.seen.append((sent, received))

        rows = AllToAll.apply(rows, sent, received, self.ep)        # by rank, and then by expert
        expert = torch.arange(arriving.shape[1], device=rows.device).repeat(n)
        expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order = expert.argsort(stable=True)
        out = run_experts(rows.index_select(0, order), self.columns, self.down, own)
        return AllToAll.apply(unsorted(out, order), received, sent, self.ep)


def build(cfg, seed=None):
    """common.gpt, where cfg says so with mixtures of experts; no weights are drawn."""
    model = gpt(cfg, seed=None)
    for block in model[1:-1] if cfg.experts else []:
        block.mlp = MoE(cfg)
    common.name_parameters(model)
    return model


# --------------------------------------------------------------------- one rule: who sums with whom

def cut_stage(stage, args, axes, core):
    """Cut the blocks of a pipeline stage over tp and ep, and put in what cp, tp and ep need; the
    embedding and the head are whole everywhere. core: of attention, under cp."""
    cfg, (tp, cp, ep) = args.model, (axes.get(axis) for axis in ("tp", "cp", "ep"))
    for block in [module for module in stage if isinstance(module, common.Block)]:
        attn, mlp = block.attn, block.mlp
        if cp or args.documents:
            attn.core = core
        if cfg.experts:
            mlp.ep, mlp.sequence = ep, axes.get("cp and tp")
            mlp.seen = deque(maxlen=args.micro_batches)         # of the last step
            for name, _ in mlp.named_parameters(recurse=False) if ep else []:
                keep_shard(mlp, name, 0, ep)            # some of the experts, and these whole
        if not tp:
            continue
        for linear in (attn.k, attn.v):
            keep_shard(linear, "weight", 0, tp, parts=min(tp.size(), cfg.kv_heads))
        keep_shard(attn.q, "weight", 0, tp), keep_shard(attn.o, "weight", 1, tp)
        block.attn = SequenceParallel(attn, tp)
        if not cfg.experts:
            for linear in mlp.columns:
                keep_shard(linear, "weight", 0, tp)
            keep_shard(mlp.down, "weight", 1, tp)
            block.mlp = SequenceParallel(mlp, tp)


KINDS = {"embedding": "tables", "head.out": "tables", "attn.q": "queries", "attn.o": "queries",
         "attn.k": "keys", "attn.v": "keys", "mlp.up": "mlp", "mlp.gate": "mlp",
         "mlp.down": "mlp"}                             # else: norms


def note_holders(parameters, holders):
    """Note on each parameter who holds the same part of it: over these ranks its gradient is
    summed, and for the norm they are its copies."""
    for p in parameters:
        kinds = [kind for name, kind in KINDS.items() if name in p.global_name]
        p.kind = kinds[0] if kinds else "norms"         # and the router, and a shared expert
        if "tied" in holders and p.global_name == "embedding.weight":
            p.kind = "tied"
        p.holders = holders[p.kind]
        p.copies = p.holders.size()


# ---------------------------------------------------------------------------- ZeRO, from chapter 03

class Unit:
    """Parameters of a module that the same ranks hold. stage: 0 sums their gradients. From 1 on,
    they are views of one flat tensor, `full`, (N·k,), of which each of these ranks updates a shard,
    (k,); 2 shards gradients, too, and 3 all. kept: gathered once a step, till its last backward."""

    def __init__(self, parameters, stage, keep_gathered):
        self.parameters, self.stage, self.group = parameters, stage, parameters[0].holders
        self.kept, self.gathering, self.reducing = stage in (1, 2) or keep_gathered, None, None
        self.padding = -sum(p.numel() for p in parameters) % self.group.size() if stage else 0
        if stage:
            self.full = self.flatten([p.detach() for p in parameters])
            self.shard = nn.Parameter(self.mine(self.full))
            self.shard.flat = parameters, self.group.rank() * len(self.shard), self.group
            self.shard.copies = 1                       # for the norm: each number is in one shard

    def hold(self, full):
        """Before the first step: the parameters, and the shard, become views of `full`, which may
        be rounded. Gradients are as wide as what the optimizer updates."""
        self.full, self.shard.data = full, self.mine(full)
        for p, view in zip(self.parameters, self.views(full)):
            p.data, p.grad_dtype = view, self.shard.grad_dtype
        if self.stage == 3:
            self.shard.data = self.shard.data.clone()
            self.free(last=True)

    def mine(self, flat):                               # this rank's part of it
        return flat.view(self.group.size(), -1)[self.group.rank()]

    def flatten(self, tensors):                         # in the shapes of the parameters
        return torch.cat([*(t.flatten() for t in tensors), tensors[0].new_zeros(self.padding)])

    def views(self, flat):                              # in the same shapes
        flats = flat.split([*(p.numel() for p in self.parameters), self.padding])
        return [flat.view(p.shape) for flat, p in zip(flats, self.parameters)]

    def start_gather(self):
        """An all_gather of the shards, into memory that was freed if this is stage 3."""
        if self.stage == 3:
            self.full.untyped_storage().resize_(self.full.nbytes)
        self.gathering = common.all_gather(self.full, self.shard.data, self.group, async_op=True)

    def free(self, last=False):
        """Under stage 3, after a forward or a backward; what is kept, after the last of a step."""
        if self.stage == 3 and (last or not self.kept):
            self.full.untyped_storage().resize_(0)      # what autograd has saved of it will show

    def start_reduce(self):
        """Sum the gradients of the micro-batches so far: an all_reduce, or a reduce_scatter."""
        flat = self.flatten([torch.zeros_like(p, dtype=p.grad_dtype) if p.grad is None else p.grad
                             for p in self.parameters])
        if self.stage == 0:
            handle = dist.all_reduce(flat, group=self.group, async_op=True)
        else:
            self.sum = flat.new_empty(self.shard.shape) if self.stage > 1 else self.mine(flat)
            handle = common.reduce_scatter(self.sum, flat, group=self.group, async_op=True)
        for p, view in zip(self.parameters, self.views(flat)):
            p.grad = view if self.stage < 2 else None
        self.reducing = handle, flat                    # which must live until it has left

    def finish_reduce(self):
        if self.reducing:
            self.reducing[0].wait()
            if self.stage:                              # add it to that of earlier micro-batches
                before = self.shard.grad
                self.shard.grad = self.sum if before is None else before.add_(self.sum)
            self.reducing = self.sum = None


def make_units(model, stage, keep_gathered=False):
    """A unit for each module of the list and group of holders, as module.units. What two modules
    share belongs to the first. Stage 0: few numbers do, too; what one rank holds is in no unit."""
    modules, seen, parts = list(itertools.chain(*model)), set(), defaultdict(list)
    few = not stage and sum(p.numel() for p in model.parameters()) <= common.ONE_BUCKET
    for module in modules:
        for p in module.parameters():
            if p not in seen and (stage or p.copies > 1):
                parts[modules[0] if few else module, p.holders].append(p)
        seen.update(module.parameters())
        module.units = []
    for (module, _), own in parts.items():
        module.units.append(Unit(own, stage, keep_gathered))
    return [unit for module in modules for unit in module.units]


def gather(modules):
    """Wait for the parameters of the first module. Under stage 3 the next one's are under way."""
    for unit in [unit for module in modules[:2] for unit in module.units]:
        if unit.stage == 3 and not unit.full.untyped_storage().nbytes():
            unit.start_gather()
    for unit in modules[0].units:
        if unit.gathering:
            unit.gathering.wait()


# ------------------------------------------------------------ pipeline parallelism, from chapter 07

Action = namedtuple("Action", "kind stage micro_batch")     # kind: F or BW
Action.output = property(lambda action: action)             # what it computes has the same name
Message = namedtuple("Message", "output sender receiver")   # on its way to the rank that needs it


def one_forward_one_backward(rank, p, m, v, ahead, group):
    """First `ahead` forwards, then a forward and a backward in turn, as long as there are any. Each
    of v slices takes `group` micro-batches before the next slice does."""
    def order(kind, slices):
        return [Action(kind, slice * p + rank, i) for first in range(0, m, group)
                for slice in slices for i in range(first, min(first + group, m))]

    forwards, backwards = order("F", range(v)), order("BW", range(v)[::-1])
    actions = forwards[:ahead]
    for i, backward in enumerate(backwards):
        actions += [*forwards[ahead + i:ahead + i + 1], backward]
    return actions


def dual_pipe_v(rank, p, m):
    """The rank holds stage `near`, counted from the front, and `far`, from the back; `after` ranks
    lie between it and the turn. (In chapter 07 some BW come apart, and their W fill holes.)"""
    near, far, after = rank, 2 * p - 1 - rank, p - 1 - rank
    phases = [
        (2 * after, [("F", near)]),                     # the way to the turn fills
        (rank + 1, [("F", near), ("F", far)]),          # the first ones come back
        (after, [("BW", far), ("F", far)]),             # and so do gradients
        (m - 2 * p + rank + 1, [("F", near), ("BW", far), ("F", far), ("BW", near)]),
        (after, [("BW", far), ("F", far), ("BW", near)]),           # no more come in
        (rank + 1, [("BW", far), ("BW", near)]),        # backward alone
        (after, [("BW", near)])]                        # the last gradients
    actions, count = [], defaultdict(int)
    for times, steps in phases:
        for kind, stage in times * steps:
            actions.append(Action(kind, stage, count[kind, stage]))
            count[kind, stage] += 1
    return actions


def make_schedule(name, p, m):
    """A list of actions for each of p ranks, for m micro-batches; and of each stage, its rank."""
    ranks, v = list(range(p)), 2 if name == "interleaved" else 1    # v: slices of a rank
    if name == "dualpipe-v":
        return [dual_pipe_v(rank, p, m) for rank in ranks], ranks + ranks[::-1]
    ahead = [p - 1 - rank if v == 1 else 2 * (p - 1 - rank) + p for rank in ranks]
    return [one_forward_one_backward(rank, p, m, v, ahead[rank], p) for rank in ranks], v * ranks


def needs(action, depth):
    """The outputs without which an action cannot start. depth: the number of stages."""
    kind, stage, i = action
    if kind == "F":
        return [("F", stage - 1, i)] if stage else []
    return [("F", stage, i)] + ([("BW", stage + 1, i)] if stage + 1 < depth else [])


def make_programs(schedule, ranks, recompute="none"):
    """A program for each rank: its actions and, between them, messages. Lets time run: an action
    starts once its rank is free and what it needs is there. A message enters both programs when its
    output is made, and an action when it ends. Raises ValueError if ranks wait for each other."""
    left, depth = [list(actions) for actions in schedule], len(ranks)
    times = {"F": 1, "BW": 3 if recompute == "full" else 2}         # B and W, after F again
    programs, done, ends, now = [[] for _ in left], set(), {}, 0
    while any(left):
        for rank, actions in enumerate(left):
            if actions and rank not in ends and done.issuperset(needs(actions[0], depth)):
                ends[rank] = now + times[actions[0].kind]
        if not ends:
            raise ValueError(f"ranks wait for each other; what is left: {left}")
        now += 1
        ended = {rank: left[rank].pop(0) for rank in sorted(ends) if ends[rank] == now}
        for rank, action in ended.items():
            programs[rank].append(action)
            done.add(action)
            del ends[rank]
        for rank, action in ended.items():              # messages, behind all actions that end now
            to = action.stage + (1 if action.kind == "F" else -1)
            if 0 <= to < depth and ranks[to] != rank:
                message = Message(action, rank, ranks[to])
                programs[rank].append(message), programs[ranks[to]].append(message)
    return programs


class Stage:
    """A slice of the model, and what it keeps of each micro-batch from F to BW. Every module of it
    reads a detached input, so that its backward is ours to call: under ZeRO-3, between a gather and
    a free; then its gradients are sent. positions: of this rank's tokens in a sequence."""

    def __init__(self, modules, positions):
        self.modules, self.positions, self.kept_for_backward = list(modules), positions, {}
        self.is_last, self.reducing = hasattr(modules, "head"), []      # units, the latest ones

    def forward(self, i, x, targets, valid):
        """x: tokens (b, s), or activations (b, s/(cp·tp), h). Returns activations, or in the last
        stage this rank's part of the micro-batch's loss."""
        graphs = []
        if not x.is_floating_point():
            x = x[:, self.positions]
        for k, module in enumerate(self.modules):
            x = x.detach().requires_grad_(x.is_floating_point())
            gather(self.modules[k:])
            out = module(x)
            for unit in module.units:
                unit.free()
            if self.is_last and module is self.modules[-1]:
                out = loss_sum(out, targets[:, self.positions]) / valid
            graphs.append((x, get_gradient_edge(out)))  # an edge does not keep out itself
            x = out
        self.kept_for_backward[i] = graphs
        return x.detach()

    def backward(self, i, gradient, last):
        """gradient: of the output, or None for the loss. last: whether no other micro-batch comes
        after this one. Returns the gradient of the input."""
        graphs = self.kept_for_backward.pop(i)
        for k in reversed(range(len(self.modules))):
            module, (x, edge) = self.modules[k], graphs.pop()
            gather(self.modules[k::-1])
            torch.autograd.backward(edge, gradient)
            for unit in module.units:
                unit.free(last)
            self.reduce(module.units, last)
            gradient = x.grad
        return gradient

    def reduce(self, units, last):
        """Start to sum a module's gradients: in the last backward; ZeRO's stages 2 and 3 in each,
        once the sums of the module before have come, so that two modules' full ones are alive."""
        units = [unit for unit in units if unit.stage > 1 or last]
        for unit in self.reducing:
            if unit.stage > 1:
                unit.finish_reduce()
        self.reducing = [unit for unit in units if unit.parameters[0].kind != "tied"]
        for unit in self.reducing:
            unit.start_reduce()


def execute(program, stages, group, empty, span, micro_batches, valid):
    """Walk through this rank's program. Returns the loss of the micro-batches that end here.
    stages: {number: Stage}, this rank's. group: all ranks of the pipeline. empty(): room for a
    message. span(action, kept, between): a context manager around each action."""
    outputs, under_way = {}, {}                         # what is sent must stay alive meanwhile
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)

    for step in program:
        if isinstance(step, Message):                   # (chapter 07 posts some at once)
            if step.sender == group.rank():
                tensor, how, peer = outputs.pop(step.output), dist.isend, step.receiver
            else:
                tensor, how, peer = empty(), dist.irecv, step.sender
                outputs[step.output] = tensor
            operation = dist.P2POp(how, tensor, group=group, group_peer=peer)
            # PyTorch asks to wait for what is under way in one group before another is used. Here
            # messages travel beside collectives: right on NCCL if the device runs both at once, or
            # in the order in which all ranks post them (NCCL_LAUNCH_ORDER_IMPLICIT=1).
            [handle] = dist.batch_isend_irecv([operation])
            under_way[step.output] = handle, tensor
            del operation, handle, tensor               # nothing else keeps the tensor alive
            continue

        kind, number, i = step
        stage, (tokens, targets) = stages[number], micro_batches[i]
        need = (kind, number - 1, i) if kind == "F" else (kind, number + 1, i)
        while need in under_way:                        # wait for all up to it, the oldest first
            under_way.pop(next(iter(under_way)))[0].wait()
        with span(step, stage.kept_for_backward, (outputs, under_way)):
            if kind == "F":
                out = stage.forward(i, outputs.pop(need, tokens), targets, valid)
            else:
                out = stage.backward(i, outputs.pop(need, None), i + 1 == len(micro_batches))
        if kind == "F" and stage.is_last:
            total += out
        elif out is not None:                           # tokens have no gradient
            outputs[step] = out
        del out                                         # once it has left, nothing keeps it alive
    for handle, _ in under_way.values():
        handle.wait()
    return total


def train_step(run_program, model, units, optimizer, micro_batches, valid, clip):
    """One step. Returns this rank's part of the loss, and the norm over all ranks. run_program:
    all of forward and backward; returns the loss. units: those of model. micro_batches: pairs of
    tokens and targets, (b, s) each. valid: the valid targets of the whole batch."""
    shards = [unit.shard for unit in units if unit.stage]
    for p in (*model.parameters(), *shards):
        p.grad = None
    for unit in [unit for unit in units if unit.kept]:
        unit.start_gather()                             # first what forward needs first
    loss = run_program(micro_batches, valid)            # and gradients are summed
    for unit in units:
        if unit.parameters[0].kind == "tied":           # it has waited for the other stage
            unit.start_reduce()
        unit.finish_reduce()

    held = shards or list(model.parameters())
    norm = grad_norm(held, dist.group.WORLD)            # of all ranks, each number once
    if clip:
        clip_grads_with_norm_(held, clip, norm)

    optimizer.step()
    return loss, norm


def balanced(layers, depth):
    """The slices (start, end) of the model's list, one for each stage: as many blocks in each, and
    one more in the first ones; the embedding in the first, and the head in the last."""
    blocks = [layers // depth + (stage < layers % depth) for stage in range(depth)]
    ends = [1 + sum(blocks[:stage]) for stage in range(1, depth)]
    return list(zip([0, *ends], [*ends, layers + 2]))


def sent_in_a_layer(tp, ep, top_k, cut=False):
    """What a rank sends in a layer with a mixture, over tp and over ep, in units of t·h: t tokens
    for each GPU. ep GPUs have all experts together. cut: over tp, as a dense MLP is (which is one
    expert, with ep = tp); then ep/tp ranks share experts, and each sends all tp·t tokens."""
    if cut:
        return 8 * (tp - 1), 4 * (ep - tp) / ep * top_k * tp
    return 4 * (tp - 1), 4 * (ep - 1) / ep * top_k


def traffic(args, ranks, passes, rows, sends, e):
    """The payload of a step, but for gradients: {axis: {op: (calls, bytes)}}. passes: of a
    micro-batch through a block. rows: sent to experts, and received, in all of them. sends:
    messages to other stages. e: bytes of a number."""
    cfg, b, cp, t, wide = args.model, args.micro_batch, args.cp, args.tp, max(e, 4)
    again = 1 if args.recompute == "full" else 0        # all but what comes last in a block
    keys = 1 if args.recompute == "none" else 2         # how often they are gathered
    mixtures, both = (passes, cp * t) if cfg.experts else (0, 1)
    tokens, h = b * cfg.seq // cp, cfg.dim              # of a micro-batch
    x = passes * tokens * h * e
    kv = 2 * cp * x // cfg.heads * max(cfg.kv_heads // t, 1)
    often = (1 + again) * mixtures                      # a mixture's forward
    gathers, scatters = (2 + again,) * 2 if cfg.experts else (4 + 2 * again, 4 + again)
    sent = {
        # Around attention, forward and backward, and around an MLP.
        "tp": (t, {"all_gather": (gathers * passes, gathers * x),
                   "reduce_scatter": (scatters * passes, scatters * x)}),
        "cp": (cp, {"all_gather": (keys * passes, keys * kv), "reduce_scatter": (passes, kv)}),
        "cp and tp": (both, {"all_reduce": (often, often * b * cfg.experts * wide)}),
        # Counts; rows there and back, and their gradients.
        "ep": (args.ep, {"all_to_all": (2 * mixtures + 3 * often, 8 * cfg.experts * often
                                        + (2 + again) * rows * h * e)}),
        "pp": (args.pp, {"send": (sends, sends * tokens // t * h * e)}),
        "world": (ranks, {"all_reduce": (1, wide)})}    # the norm
    return {axis: ops for axis, (n, ops) in sent.items() if n > 1}


def formulas(args, rank, ranks, model):
    """model: a list of this rank's stages, each a list of modules."""
    if args.variant == "torch":
        return {}
    cfg, e, cp, t, ep = args.model, common.rounded(args).itemsize, args.cp, args.tp, args.ep
    m, pp, whole = args.micro_batches, places_of_ranks(args)[rank].pp, ranks // args.pp
    schedule, owners = make_schedule(args.schedule, args.pp, m)
    slices = balanced(cfg.layers, len(owners))
    stages = [stage for stage, owner in enumerate(owners) if owner == pp]
    sends = m * sum(pp in cut and len({*cut}) > 1 for cut in zip(owners, owners[1:]))
    messages = {"program": make_programs(schedule, owners, args.recompute)[pp],
                "needs": functools.partial(needs, depth=len(owners)),
                "message": args.micro_batch * cfg.seq // (cp * t) * cfg.dim * e}

    # Rows that were sent to this rank's experts, and from it: of each block, and micro-batch.
    seen = {stage: [[*getattr(block.mlp, "seen", [])] for block in part
                    if isinstance(block, common.Block)] for stage, part in zip(stages, model)}
    travelled = sum(sum(sent) + sum(received) for of_stage in seen.values()
                    for of_block in of_stage for sent, received in of_block)
    passes = m * sum(map(len, seen.values()))
    of_mlp, kv = ep if cfg.experts else t, 1 / min(t, cfg.kv_heads)     # its parts; a share
    met = sum(rows * (end - begin) for rows, begin, end in model.blocks) / (cfg.seq**2 / cp)
    return {
        "parameters": {"queries": 1 / t, "keys": 1 / min(t, cfg.kv_heads), "mlp": 1 / of_mlp},
        "modules": [module for stage in stages for module in range(*slices[stage])],
        "holders": {"tables": whole, "norms": whole, "queries": whole // t, "tied": 2 * whole,
                    "keys": whole // min(t, cfg.kv_heads), "mlp": whole // of_mlp},
        "ranks": {"tp": t, "cp": cp, "cp and tp": cp * t, "ep": ep, "pp": args.pp, "world": ranks},
        "gradients": {p.kind: p.holders.group_desc for p in model.parameters()},
        "gathers": 2 * m if args.zero == 3 and not args.keep_gathered else 1,   # of a module
        "zero": args.zero, "reduces": m if args.zero > 1 else 1,        # of its gradients
        "kept": dict.fromkeys(("outside", "inside", "logits", "ids"), 1 / (cp * t)) | {
            "inputs": 1 / cp, "positions": 1 / cp, "keys and values": kv, "own keys": kv / cp,
            "how": "gathered" if cp > 1 or args.documents else None, "met": met},
        "contexts": {"blocks": [*model.blocks], "passes": passes, "parts": cp, "runs_of": runs_of},
        "experts": {"seen": seen, "sent": sent_in_a_layer} if cfg.experts else None,
        "schedule": {"actions": schedule[pp], "slices": slices, "inputs": range(cfg.layers + 2)}
        | (messages if args.pp > 1 else {}),            # inputs: every module detaches its own
        "sent": traffic(args, ranks, passes, travelled, sends, e),
        "record": {"order": args.order.split(","), "places": places_of_ranks(args)}}


def train(run):
    args, cfg, me = run.args, run.args.model, places_of_ranks(run.args)[run.rank]
    schedule, owners = make_schedule(args.schedule, args.pp, args.micro_batches)
    programs = make_programs(schedule, owners, args.recompute)

    axes, holders = make_groups(args, cfg.tie and owners[0] != owners[-1])
    if "pp" in axes:
        dist.barrier(axes["pp"])                        # NCCL: the first use of a group is by all
    blocks, cp = [], axes.get("cp")                     # of attention, in this step
    core = lambda q, k, v: gathered_attention(q, k, v, cp, cfg.attention, blocks)
    full, slices = build(cfg), balanced(cfg.layers, len(owners))
    parts = {stage: full[slice(*slices[stage])] for stage, owner in enumerate(owners)
             if owner == me.pp}
    place = full.block1.attn.rope, blocks, me.cp, args.cp       # all blocks share RoPE
    del full                                            # and with it the other stages
    for part in parts.values():
        cut_stage(part, args, axes, core)
    model = run.draw(nn.ModuleList(parts.values()))
    note_holders(model.parameters(), holders)
    common.recompute(model, args.recompute)

    units = make_units(model, args.zero, args.keep_gathered)
    tokens = lay_out(torch.zeros(cfg.seq, dtype=torch.int64), *place)
    positions = tokens.chunk(args.tp)[me.tp].to(run.device)
    stages = {stage: Stage(part, positions) for stage, part in parts.items()}
    shape = args.micro_batch, len(positions), cfg.dim   # of a message
    empty = functools.partial(torch.empty, shape, dtype=common.rounded(args), device=run.device)
    run_program = functools.partial(execute, programs[me.pp], stages, axes.get("pp"), empty,
                                    run.span)
    sharded = units if args.zero else []
    optimizer = run.mixed([unit.shard for unit in sharded] or model.parameters())
    for unit in sharded:
        unit.hold(unit.full.to(common.rounded(args)))

    model.blocks = blocks
    for batch in run.batches(share=me.dp, build=build):         # 1/dp of the sequences
        if args.documents:
            lay_out(batch.starts, *place)
        with run.measure():
            loss, norm = train_step(run_program, model, units, optimizer, batch.micro_batches,
                                    batch.valid, args.clip)
        dist.all_reduce(loss)                           # for the report
        run.log(batch, loss, norm, model, sharded or None)


def torch_parallelize(stage, mesh, args):
    """Chapter 05's plan over `tp`, then chapter 03's units over `dp`: every parameter becomes a
    DTensor of both. stage: a slice of the model; (batch, seq/tp, dim) goes in and comes out."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate, Shard, parallel

    norm, columns = parallel.SequenceParallel(), parallel.ColwiseParallel()
    gather = parallel.PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    scatter = parallel.RowwiseParallel(output_layouts=Shard(1))
    plan = {"block*.norm[12]": norm, "block*.attn": gather, "block*.mlp": gather,
            "block*.attn.[qkv]": columns, "block*.mlp.[ug]*": columns,      # up, gate
            "block*.attn.o": scatter, "block*.mlp.down": scatter}
    if hasattr(stage, "embedding"):                     # PyTorch warns of a name that is not there
        plan["embedding"] = parallel.RowwiseParallel(input_layouts=Replicate(),
                                                     output_layouts=Shard(1))
    if hasattr(stage, "head"):
        plan |= {"head.norm": norm, "head.out": parallel.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)}
    parallel.parallelize_module(stage, mesh["tp"], plan)

    policy = MixedPrecisionPolicy(common.rounded(args), reduce_dtype=common.DTYPES[args.dtype])
    # The embedding is in the stage's own unit: its output is a view, of which fully_shard warns.
    for unit in (*(unit for unit in stage if not isinstance(unit, nn.Embedding)), stage):
        fully_shard(unit, mesh=mesh["dp"], reshard_after_forward=args.zero == 3, mp_policy=policy)
        unit.set_force_sum_reduction_for_comms(True)    # gloo has no average,
        unit.set_gradient_divide_factor(1)              # and the loss is divided already
    common.name_parameters(stage)                       # DTensors by now


def train_torch(run):
    """The same through PyTorch, whose three APIs compose: a pipeline of DTensors of two axes."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import loss_parallel

    args, cfg = run.args, run.args.model
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel("ERROR")   # of its speed
    mesh = run.mesh(pp=args.pp, dp=args.dp, tp=args.tp)
    stage, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    model = run.draw(gpt(cfg, seed=None)[slice(*balanced(cfg.layers, args.pp)[stage])])
    common.recompute(model, args.recompute)
    torch_parallelize(model, mesh, args)
    optimizer = run.optimizer(model.parameters())
    pipeline = Schedule1F1B(PipelineStage(model, stage, args.pp, run.device, group=group),
                            args.micro_batches, scale_grads=False, loss_fn=lambda logits, targets:
                            loss_sum(logits, targets) / batch.valid)

    for batch in run.batches(mesh["dp"].get_local_rank()):
        tokens, targets = (torch.cat(parts) for parts in zip(*batch.micro_batches))
        tokens, losses = ([tokens] if stage == 0 else []), []       # for the first stage alone
        with run.measure(), loss_parallel():            # of logits that are cut by vocabulary
            optimizer.zero_grad()
            pipeline.step(*tokens, target=targets, losses=losses, return_outputs=False)
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
            square = norm.square()                      # of this stage, over its dp and tp
            dist.all_reduce(square, group=group)
            clip_grads_with_norm_(model.parameters(), args.clip or math.inf, square.sqrt())
            optimizer.step()
        loss = torch.zeros((), dtype=torch.float64, device=run.device)
        loss += sum(part.detach().full_tensor() for part in losses)
        dist.all_reduce(loss)                           # tp ranks have the same, and all add it
        run.log(batch, loss / args.tp, square.sqrt(), model)


# ---------------------------------------------------------------------------- the command line

LIKE = {                                                # published runs; dp is what is left
    "llama3-8k": {"tp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"},
    "llama3-128k": {"tp": 2, "cp": 2, "pp": 2, "zero": 2, "schedule": "interleaved"},
    "deepseek-v3": {"pp": 2, "ep": 4, "experts": 8, "zero": 1, "schedule": "dualpipe-v"},
    "megatron-1t": {"tp": 2, "pp": 2, "schedule": "interleaved"}}
AXES = {"pp": 1, "dp": None, "cp": 1, "tp": 1, "ep": 1, "experts": 0, "zero": 0, "schedule": "1f1b"}


def demand(fits, otherwise, change):
    if not fits:
        raise Refused(otherwise, change)


def fill_in(args, ranks):
    """What --like sets, and what was not given: --dp takes what is left of the ranks."""
    if args.like:
        for flag, default in AXES.items():
            demand(getattr(args, flag) == default, f"--like {args.like} sets the axes, and --{flag}"
                   " does so too", f"without --{flag}")
        vars(args).update(LIKE[args.like])
        args.model = replace(args.model, layers=max(args.model.layers, 2 * args.pp))
        if args.schedule == "dualpipe-v":               # it takes 2·pp micro-batches
            args.batch = max(args.batch, 2 * ranks)
    args.dp = args.dp or max(1, ranks // (args.pp * args.cp * args.tp))
    if args.variant == "torch":
        args.zero = args.zero or 2
    if args.pp > 1:
        args.micro_batch = args.micro_batch or 1        # as many micro-batches as there can be
    args.model = Mixture(**asdict(args.model), experts=args.experts, top_k=args.top_k,
                         sequences=args.batch, shared_expert=args.shared_expert)


def requires(args, ranks):
    fill_in(args, ranks)
    pp, dp, cp, tp, ep, cfg = args.pp, args.dp, args.cp, args.tp, args.ep, args.model
    others = pp * cp * tp
    fits = f"--nproc_per_node {others}" if ranks % others else f"--dp {ranks // others}"
    demand(dp * others == ranks, f"--pp {pp} x --dp {dp} x --cp {cp} x --tp {tp} is {others * dp} "
           f"ranks, not {ranks}", fits)
    common.split_batch(args, dp)
    common.divides("--heads", cfg.heads, "--tp", tp)
    common.divides("--ffn", cfg.hidden, "--tp", 1 if args.experts else tp)
    demand(max(cfg.kv_heads, tp) % min(cfg.kv_heads, tp) == 0, f"--kv-heads {cfg.kv_heads} and "
           f"--tp {tp}: neither divides the other", f"--kv-heads {tp}")
    demand((args.documents or 1) <= cfg.seq, f"--documents {args.documents} are longer than --seq "
           f"= {cfg.seq}", f"--documents {cfg.seq}")
    chunks = 2 if cp > 1 else 1                         # of the sequence, for each rank of cp
    common.divides("--seq", cfg.seq, "what --cp and --tp cut it into", cp * math.lcm(chunks, tp))
    fits = "without --like" if args.like else f"--ep {math.gcd(ep, dp * cp * tp)}"
    demand(dp * cp * tp % ep == 0, f"--dp {dp} x --cp {cp} x --tp {tp} is no multiple of --ep = "
           f"{ep}", fits)
    demand(args.experts or ep == 1 and args.top_k == 2 and not args.shared_expert, "--ep, --top-k "
           "and --shared-expert are about experts, of which there are none",
           f"--experts {ep * args.top_k}")
    common.divides("--experts", args.experts, "--ep", ep)
    demand(not args.experts or args.top_k <= args.experts, f"--top-k {args.top_k} is more than "
           f"--experts = {args.experts}", f"--top-k {args.experts}")

    m, name, is_torch = args.batch // dp // args.micro_batch, args.schedule, args.variant == "torch"
    args.micro_batches = m                              # of a rank, in a step
    least = 2 * pp if name == "dualpipe-v" else pp if is_torch else 1
    multiple = pp if name == "interleaved" else 1
    fits = -(-max(m, least) // multiple) * multiple
    takes = f"{least} or more" if least > m else f"a multiple of {multiple}"
    demand(fits == m, f"{name} on --pp {pp} takes {takes} micro-batches, not {m}",
           f"--micro-batch {args.micro_batch} --batch {fits * args.micro_batch * dp}")
    depth = pp if name == "1f1b" else 2 * pp
    demand(cfg.layers >= depth, f"--layers {cfg.layers} is less than one for each of {depth} "
           "stages", f"--layers {depth}")
    demand(args.zero < 3 or not cfg.tie, "--zero 3 gathers modules one by one, and tied ones share "
           "a matrix", "--zero 2")
    demand(args.zero == 3 or not args.keep_gathered, "--keep-gathered is of --zero 3",
           "without --keep-gathered")
    if is_torch:
        demand(args.zero > 1, f"--variant torch has no --zero {args.zero}", "--zero 2")
        common.divides("--kv-heads", cfg.kv_heads, "--variant torch's --tp", tp)
        demand(not cfg.tie, f"--variant torch does not know tied tables, as --preset {args.preset} "
               "has", "--variant hand")


def flags(parser):
    add, orders = parser.add_argument, itertools.permutations(Place._fields)
    add("--dp", type=int, help="ranks with other sequences; default: what is left of the ranks")
    add("--pp", type=int, default=1, help="ranks that share the layers")
    add("--cp", type=int, default=1, help="ranks that share a sequence in attention")
    add("--tp", type=int, default=1, help="ranks that share each matrix, and the sequence outside")
    add("--ep", type=int, default=1, help="ranks of dp x cp x tp that share the experts")
    add("--zero", type=int, choices=range(4), default=0, help="ZeRO's stage; torch: 2, 3")
    add("--keep-gathered", action="store_true", help="gather once a step, under --zero 3")
    add("--schedule", choices=("1f1b", "interleaved", "dualpipe-v"), default="1f1b")
    add("--experts", type=int, default=0, help="of a mixture in place of each MLP")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--shared-expert", action="store_true", help="and one that every token takes")
    add("--documents", type=int, metavar="MEAN", help="tokens of a packed document, in the mean")
    add("--order", choices=[",".join(order) for order in orders], default="pp,dp,cp,tp",
        metavar="PP,DP,CP,TP", help="the axes, in any order; along the last, ranks are neighbours")
    add("--node-size", type=int, help="ranks of a machine, for the report; default: as it is, or 8")
    add("--like", choices=LIKE, help="the axes of a published run, on 8 ranks or more")


OWN = ("--cp", "--ep", "--schedule", "--experts", "--top-k", "--shared-expert", "--order",
       "--node-size", "--like", "--keep-gathered", "--documents")
VARIANTS = {"hand": (train, *OWN), "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
