r"""07 · Pipeline parallelism: some of the layers on each rank, and micro-batches in turn.

The model is a list of modules, so it can be cut between any two of them. Each of p ranks holds one
slice of it, a stage. A stage receives the activations of a micro-batch from the stage before, puts
them through its layers, and sends the result to the next. In backward, gradients go the other way.
That is one message of (b, s, h) for a cut, a micro-batch and a direction. No other way to cut the
model sends so little for a token, so a cut may well lie between two machines. (Of t tensor-parallel
ranks, which have it all, each sends 1/t there, and they gather the rest inside their machine.)

For each of a step's m micro-batches, a stage has three things to do, which take about equally long:
F, the forward; B, the gradient of its input, for which the stage before is waiting; and W, the
gradients of its weights, for which nobody waits. BW is an ordinary backward, B and W at once. These
are three of the schedules below, on four ranks. The digits are the numbers of the micro-batches (in
dualpipe, those of capital letters come in at the other end than those of small ones):

              1f1b                   zb-h1              dualpipe
    rank 0    FFFF......BW.BW.BW.BW  FFFF...BWBWBWBW    FFFfbwfFbwfBWbwf.BWbwBWBW
              0123......00.11.22.33  0123...00112233    0124445355600667.11772233
    rank 1    .FFF....BWFBW.BW.BW    .FFF..BFBWBWBWW    .FfFfFbwfBWFbwfBWbwBWbBwW
              .012....00311.22.33    .012..031021323    .041524460035571166227373
    rank 2    ..FF..BWFBWFBW.BW      ..FF.BFBFBWBWWW    .fFfFfBWFbwfBWFbwBWbwBbWw
              ..01..00211322.33      ..01.0213203123    .405160024471135522663737
    rank 3    ...FBWFBWFBWFBW        ...FBFBFBFBWWWW    fffFBWFfBWFbwBWF.bwBWbwbw
              ...000111222333        ...001122330123    4560001711244223.55336677

The price is waiting. At the beginning of a step the last stage has nothing to do yet, and at the
end the first one waits for gradients. This idle time, the dots, is the bubble.

The order in which a rank works is its schedule, and a schedule is just a list of actions: of F, B,
W and BW. Everything else follows from the lists: when each action can start, what is sent, and how
much memory is needed. So each schedule is a few lines of code, and one executor runs them all. A
micro-batch is alive, once in each stage, from its F to its BW (or W): as long as backward needs it.

    naive         One micro-batch after the other: one rank works, and all others wait.
    afab          All forward, then all backward (GPipe): in between, all m of them are alive.
    1f1b          One forward, one backward, as soon as one can go back. The bubble is the same, but
                  only p-r are alive on rank r: so many have gone forward when the first comes back.
    2bw           1f1b without a flush (PipeDream-2BW): behind a step's last forwards come the next
                  one's first, before the update. So a rank keeps two versions of its weights: batch
                  t computes with W(t-1) in all stages, and updates W(t) to W(t+1). That is one GPU
                  whose gradients are a step late. It is held to that; the report has both losses.
    interleaved   Each rank holds v slices, so that a micro-batch goes round v times. A slice takes
                  1/v of the time, and so does the bubble. A rank between two others sends 2v
                  messages for a micro-batch, not 2. p micro-batches go through a slice in turn
                  (depth first), or with --breadth-first all m, which are all alive then.
    zb-h1         B and W come apart, and rank r puts each W off until r micro-batches later. What
                  it has put off fills what was the bubble at the end.
    zb-h2         The same, but F is twice as far ahead, and W twice as far behind. If F, B and W
                  take equally long, no rank waits between its first action and its last. But each
                  begins and ends later than the one before. A step that ends with a norm over all
                  ranks, as here, gains nothing by it, nor by 2bw. (In the paper each rank updates
                  at once, and undoes it if the norm was too large.)
    dualpipe      Two pipelines in opposite directions over the same ranks, with half of the micro-
                  batches each. So a rank holds two stages, and every stage lies on two ranks, which
                  sum their gradients. DeepSeek-V3 runs an F of one pipeline and a BW of the other
                  at the same time ("F&B"), so that one computes while the other communicates. The
                  table counts F + B + W for it. (Here BW follows F: half the wait, if F = B = W.)
    dualpipe-v    One pipeline of 2p half as large stages, which goes down the ranks and comes back.
                  The rest is as in dualpipe, without the second copy. Both need m >= 2p.

On rank r, where F, B and W are the times of 1/p of the model, and W <= F <= B:

                  the longest wait            alive, at the most                    parameters
    naive         (p-1) m (F+B+W)             1                                     1/p
    afab          (p-1) (F+B+W)               m                                     1/p
    1f1b          (p-1) (F+B+W)               p-r                                   1/p
    2bw           (p-1) (F+B+W), in a run     p-r                                   2/p, m >= p-1
    interleaved   (p-1) (F+B+W) / v           2(p-1-r) + (v-1)p + 1, 1/v each       1/p
    zb-h1         (p-1) (F+B-W)               p                                     1/p
    zb-h2         (p-1) (F+B-2W), see above   2p-1                                  1/p
    dualpipe      (p/2-1) (F&B + B - 2W)      p+1                                   2/p
    dualpipe-v    (p-1)/2 (F&B + B - 2W)      2p+1, 1/2 each                        1/p

Divided by the work, m (F+B+W), the first column is the bubble: (p-1)/m for 1f1b. There the last
rank, r = p-1, waits r·F for the first micro-batch, and in the end r·(B+W): the last gradient goes
through the r ranks before it. In zb-h1 it goes through r B's, and rank r meanwhile does the W's
that it has put off, r more than rank 0 has: r (F+B-W) is left. (Other ranks wait as long, but in
between.) At most p-r of rank r's micro-batches wait for B then, and r for W.

With --recompute full, a B computes its F again before it begins, so if F = W = 1, it takes 2. On 4
ranks with 8 micro-batches the bubble of 1f1b is still 3/8 of the work, which is 4/3 as long now;
but that of zb-h1 grows from 1/8 to 3/16. (From B on, what W needs is kept.)

In interleaved, a micro-batch has 2(p-1-r) hops to go from rank r to the last one and back. Each
takes a round (an F and a BW): what a rank computes in one, its neighbour uses in the next. So
rank r must be that many forwards ahead, besides p micro-batches in each of its v-1 earlier slices,
and the forward of its round is one more. No rank has more alive than there are: v·m.

A micro-batch that waits for W keeps the inputs of all linears and the gradients of their outputs.
In a GPT's block that is as much as before B, but for attention's core and the norms' statistics;
with SwiGLU, which has three tensors of hidden features and two gradients, one of them less.

The order of messages. Between two ranks, NCCL matches sends with receives by the order in which
they are posted, and a send may block until the other side has posted its receive. Suppose each rank
receives what it needs right before an action, and sends the result right after. In 1f1b, rank 2
then sends the second micro-batch down, while rank 3 sends the gradient of the first one up: both
wait for ever. So all messages of a step are put into one order, by the time at which they are ready
if F = B = W, and each rank posts its own in that order. Now take the first of them that is still
missing. All that its two ranks have to do before it are actions, which need earlier messages alone,
and these are there. So both ranks come to it, and it is exchanged; and then the next one. (On NCCL,
one starts after the other. So if F, B and W take other times, some wait without need.)

What a rank sends must stay in memory until it has left. But messages pass in the order of the
posts: once one has come for which a rank waits, those that it has posted before have left. So in
1f1b rank 0 has at most p-1 messages, and any other rank one, beside what its stage keeps.

If embedding and head are tied, the first and the last stage each have a copy. Their gradients are
summed, and the gradient norm counts them once. (In dualpipe-v, the same rank holds both ends.)

When it pays: a message, e bytes a number, hides behind the forward of a stage of k blocks if

    b·s·h·e / bandwidth  <=  24·b·s·h²·k / FLOP/s

So k must be at least e/(24h) · FLOP/s / bandwidth. (The report counts attention's scores, too.)
With few micro-batches it does not pay: with m = p, 1f1b is idle for nearly half of the step.

Run it:
    torchrun --nproc_per_node=4 07_pipeline_parallel.py --variant interleaved --layers 8
    python -m lab.schedules interleaved --ranks 8 --micro-batches 16 --chunks 2

Sources: Huang et al., GPipe (2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
Training (2021; 2bw, and 1f1b as "PipeDream-Flush") and Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM (2021), sections 2.2 and 4.1; Lamy-Poirier, Breadth-First
Pipeline Parallelism (2022); Qi et al., Zero Bubble Pipeline Parallelism (2023), sections 2 to 4;
DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.2.1, and DualPipe on GitHub (which owes
the V to Sea AI Lab's "cut-in-half"); How To Scale Your Model, part 5; Ultra-Scale Playbook,
"Pipeline Parallelism" and A3 (with e = 1, and 32 in place of 24).
"""

import functools
import itertools
from collections import defaultdict, namedtuple
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PartialSums, Refused, gpt, grad_norm, loss_sum

# ------------------------------------------------------------------------------ schedules are lists

class Action(NamedTuple):
    """F, B, W or BW of a micro-batch in a stage."""

    kind: str
    stage: int
    micro_batch: int

    @property
    def output(self):
        """The name of what it computes; the gradient is the same, be it from a B or a BW."""
        return self.kind[0], self.stage, self.micro_batch


class Schedule(NamedTuple):
    """actions: a list for each rank. ranks: of each stage, the rank that holds it. depth: stages
    from embedding to head; dualpipe has twice as many, a second pipeline after the first."""

    actions: list
    ranks: list
    depth: int

    def needs(self, action):
        """The outputs without which an action cannot start: of its own stage, and of another."""
        kind, stage, i = action
        is_first, is_last = stage % self.depth == 0, (stage + 1) % self.depth == 0
        if kind == "F":
            return [] if is_first else [("F", stage - 1, i)]
        if kind == "W":
            return [("B", stage, i)]
        return [("F", stage, i)] if is_last else [("F", stage, i), ("B", stage + 1, i)]


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


def zero_bubble(rank, p, m, k):
    """F is k(p-1-r) micro-batches ahead of B on rank r, and W is k·r behind it. zb-h1: k = 1."""
    ahead, behind = k * (p - 1 - rank), k * rank
    f, b, w = ([Action(kind, rank, i) for i in range(m)] for kind in "FBW")
    actions = f[:ahead]
    for i in range(m + behind):
        actions += f[ahead + i:ahead + i + 1] + b[i:i + 1]
        actions += w[i - behind:i - behind + 1] if i >= behind else []
    return actions


def dual_pipe_v(rank, p, m):
    """Eight phases. The rank holds stage `near`, counted from the front, and `far`, from the back;
    `after` ranks lie between it and the turn."""
    near, far, after = rank, 2 * p - 1 - rank, p - 1 - rank
    alone = [("BW" if i <= rank else "B", near if i % 2 else far) for i in range(2 * rank + 2)]
    phases = [                                          # how often, and what
        (2 * after, [("F", near)]),                     # 1: the way to the turn fills
        (rank + 1, [("F", near), ("F", far)]),          # 2: the first ones come back
        (after, [("B", far), ("W", None), ("F", far)]),             # 3: B comes; W fills a hole
        (m - 2 * p + rank + 1, [("F", near), ("BW", far), ("F", far), ("BW", near)]),   # 4: F&B
        (after, [("BW", far), ("F", far), ("BW", near)]),           # 5: no more come in
        (1, alone),                                     # 6: backward alone; the last half without W
        (after, [("W", None), ("B", near)])]            # 7: the last gradients
    actions, late, count = [], [], defaultdict(int)
    for times, steps in phases:
        for kind, stage in times * steps:
            if kind == "W":
                actions.append(late.pop(0))             # the oldest that was put off
            else:
                actions.append(Action(kind, stage, count[kind[0], stage]))
                count[kind[0], stage] += 1
            if kind == "B":
                late.append(actions[-1]._replace(kind="W"))
    return actions + late                               # 8: all W that are left


def dual_pipe(rank, p, m):
    """As dual_pipe_v over half of the ranks: where that turns, here the two directions meet."""
    half, actions = p // 2, []
    for kind, stage, i in dual_pipe_v(min(rank, p - 1 - rank), half, m // 2):
        if (stage < half) != (rank < half):             # it is of the second direction
            stage, i = stage + p, i + m // 2
        actions.append(Action(kind, stage, i))
    return actions


def make_schedule(variant, p, m, v=1, breadth_first=False):
    """p: ranks. m: micro-batches. v: slices of a rank, which only interleaved has."""
    v = v if variant == "interleaved" else 1
    ranks, depth, actions = [stage % p for stage in range(v * p)], v * p, []
    if variant.startswith("dualpipe"):
        ranks, depth = [*range(p), *reversed(range(p))], p if variant == "dualpipe" else 2 * p
    for rank in range(p):
        ahead = {"naive": 0, "afab": m, "1f1b": p - 1 - rank, "2bw": p - 1 - rank,
                 "interleaved": v * m if breadth_first else 2 * (p - 1 - rank) + (v - 1) * p}
        if variant in ahead:
            group = m if breadth_first else p
            actions.append(one_forward_one_backward(rank, p, m, v, ahead[variant], group))
        elif variant.startswith("zb"):
            actions.append(zero_bubble(rank, p, m, {"zb-h1": 1, "zb-h2": 2}[variant]))
        else:
            make = dual_pipe if variant == "dualpipe" else dual_pipe_v
            actions.append(make(rank, p, m))
    return Schedule(actions, ranks, depth)


# ------------------------------------------------------------------------- what follows from lists

Message = namedtuple("Message", "output sender receiver")   # on its way to the rank that needs it


def make_programs(schedule, F=1, B=1, W=1):
    """A program for each rank: its actions and, between them, its messages.

    Lets time run: an action starts once its rank is free and what it needs is there, and takes its
    time, F, B or W. It stands where it ends, and a message where its output is computed: so one
    that arrives while the receiver works is posted before that work, and travels meanwhile. Raises
    ValueError if ranks wait for each other.
    """
    times = {"F": F, "B": B, "W": W, "BW": B + W}
    left = [list(actions) for actions in schedule.actions]
    receivers = {need: rank for rank, actions in enumerate(left) for action in actions
                 for need in schedule.needs(action) if schedule.ranks[need[1]] != rank}
    programs, done, running, now = [[] for _ in left], set(), {}, 0
    while any(left) or running:
        for rank, actions in enumerate(left):
            if actions and rank not in running and done.issuperset(schedule.needs(actions[0])):
                running[rank] = now + times[actions[0].kind], actions.pop(0)
        if not running:
            raise ValueError(f"ranks wait for each other; what is left: {left}")

        now += 1
        ended = [(rank, action) for rank, (end, action) in sorted(running.items()) if end == now]
        for rank, action in ended:
            programs[rank].append(action)
            done.add(action.output)
            del running[rank]
        for rank, action in ended:                      # messages, behind all actions that end now
            if action.output in receivers:
                message = Message(action.output, rank, receivers[action.output])
                programs[rank].append(message)
                programs[message.receiver].append(message)
    return programs


# ------------------------------------------------------------------------------------ the executor

class LinearInHalves(torch.autograd.Function):
    """y = x Wᵀ, whose backward gives x's gradient now, and leaves (W, x, dy) in the list `later`.

    (Two calls of autograd.grad, one for inputs and one for weights, would compute much twice.)
    What is left is added to W.grad by hand, so hooks on W's gradient do not see it.
    """

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x)
        ctx.weight, ctx.later = weight, later
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy):
        [x] = ctx.saved_tensors
        x, dy = x.detach(), dy.contiguous()             # else they keep the graph, or more, alive
        ctx.later.append((ctx.weight, x, dy))
        return dy @ ctx.weight, None, None


class Stage:
    """A slice of the model, and what it keeps of each micro-batch from one action to the next.

    in_halves: B and W come apart. The norms' and the embedding's gradients, which cost little, are
    computed in B.
    """

    def __init__(self, module, in_halves):
        self.module, self.is_last = module, hasattr(module, "head")
        self.kept_for_backward, self.kept_for_weights, self.later = {}, {}, []
        for linear in module.modules():
            if in_halves and isinstance(linear, nn.Linear):
                linear.forward = functools.partial(self.linear, linear)

    def linear(self, linear, x):
        return LinearInHalves.apply(x, linear.weight, self.later)

    def forward(self, i, x, targets, valid):
        """x: tokens (b, s), or activations (b, s, h). Returns activations, or in the last stage the
        micro-batch's part of the loss."""
        if x.is_floating_point():
            x = x.detach().requires_grad_()             # here this stage's graph begins
        out = self.module(x)
        if self.is_last:
            out = loss_sum(out, targets) / valid
        self.kept_for_backward[i] = x, get_gradient_edge(out)   # an edge does not keep out itself
        return out.detach()

    def backward(self, i, gradient):
        """gradient: of the output, or None for the loss. Returns that of the input."""
        x, edge = self.kept_for_backward.pop(i)
        torch.autograd.backward(edge, gradient)
        self.kept_for_weights[i] = self.later.copy()
        self.later.clear()
        return x.grad

    def weight_gradients(self, i):
        for weight, x, dy in self.kept_for_weights.pop(i):
            gradient = (dy.flatten(0, -2).T @ x.flatten(0, -2)).to(weight.grad_dtype)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


def post(messages, group, empty, outputs, under_way):
    """Start some messages at once. group: all ranks. empty(): room for a message. outputs: {name:
    tensor}, from which what is sent is taken, and to which what is received is added. under_way:
    {name: (handle, tensor)}, in the order of the posts: what is sent must stay alive meanwhile."""
    operations = []
    for message in messages:
        if message.sender == group.rank():
            how, tensor, peer = dist.isend, outputs.pop(message.output), message.receiver
        else:
            how, tensor, peer = dist.irecv, empty(), message.sender
        operations.append(dist.P2POp(how, tensor, group=group, group_peer=peer))

    handles = dist.batch_isend_irecv(operations)
    if len(handles) < len(messages):                    # NCCL has one for all, gloo one for each,
        handles *= len(messages)                        # which must not be waited for twice
    for message, operation, handle in zip(messages, operations, handles, strict=True):
        under_way[message.output] = handle, operation.tensor
        if message.receiver == group.rank():
            outputs[message.output] = operation.tensor


def execute(program, stages, group, empty, span, micro_batches, valid, outputs=None):
    """Walk through this rank's program. stages: {number: Stage}, its own. span(action, kept,
    between): a context manager around each action. outputs: what an earlier program left (2bw).
    Returns the loss of the micro-batches that end here, a scalar. Communication: the messages."""
    outputs, under_way = {} if outputs is None else outputs, {}
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)

    def take(name, otherwise):
        """What another stage has computed, or for the first and the last stage something else."""
        while name in under_way:                        # those posted before it have left, too
            under_way.pop(next(iter(under_way)))[0].wait()
        return outputs.pop(name, otherwise)

    for what, steps in itertools.groupby(program, type):
        if what is Message:                             # at once: that blocks no more than in turn
            post(list(steps), group, empty, outputs, under_way)
            continue
        for action in steps:
            kind, number, i = action
            stage, (tokens, targets) = stages[number], micro_batches[i % len(micro_batches)]
            x = take(("F", number - 1, i), tokens) if kind == "F" else None
            gradient = take(("B", number + 1, i), None) if "B" in kind else None
            kept, out = (stage.kept_for_backward, stage.kept_for_weights), None
            with span(action, kept, (outputs, under_way)):
                if kind == "F":
                    out = stage.forward(i, x, targets, valid)
                if "B" in kind:
                    out = stage.backward(i, gradient)
                if "W" in kind:
                    stage.weight_gradients(i)
            if kind == "F" and stage.is_last:
                total += out
            elif out is not None:                       # W has none, nor the first stage's B
                outputs[action.output] = out
    for handle, _ in under_way.values():                # NCCL: before another group sends anything
        handle.wait()
    return total


def train_step(run_program, model, optimizer, group, micro_batches, valid, clip):
    """One step. Returns this rank's part of the loss, and the norm over all stages.

    run_program(micro_batches, valid): this rank's actions and messages. model: all that it holds.
    micro_batches: pairs of tokens and targets, (b, s) each, the same on every rank. valid: the
    valid targets of the whole batch. Communication: the messages; an all_reduce of what lies on two
    ranks (tied embeddings, dualpipe's copies); one for the norm.
    """
    optimizer.zero_grad()
    loss = run_program(micro_batches, valid)
    PartialSums(model.parameters()).finish()

    norm = grad_norm(model.parameters(), group)         # of all stages, not of this one
    if clip:
        clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return loss, norm


def without_flush(run, program, model, *where):
    """2bw's run_program(micro_batches, valid): a step of the whole run's program. It is m backwards
    and m forwards, the last p-1-stage of them of the next batch. p.versions: two of each parameter.
    Batch t computes with versions[t % 2], which batch t-2 has updated; its own update goes from the
    newest version to there. where: what `execute` needs to know."""
    args, text, parts = run.args, common.Text(run.args), defaultdict(list)
    m, steps, outputs = args.batch // args.micro_batch, itertools.count(), {}
    for what in program:
        kind, stage, i = what.output                    # a message is in one step on both its ranks
        ahead = run.world - 1 - stage if kind == "F" else 0
        parts[max(0, i - ahead) // m].append(what)
    parameters = tuple(model.parameters())
    for p in parameters:
        p.versions = p.data, p.data.clone()

    def span(action, *kept):
        for p in parameters:
            p.data = p.versions[action.micro_batch // m % 2]
        return run.span(action, *kept)

    def run_program(micro_batches, valid):
        step = next(steps)              # autograd need not mind the update, which no F has read:
        torch._C._autograd._unsafe_set_version_counter(parameters, [0] * len(parameters))
        ahead = (x.to(run.device).split(args.micro_batch) for x in text.batch(step + 1)[:2])
        both = [micro_batches, zip(*ahead)][::-1 if step % 2 else 1]
        loss = execute(parts[step], *where, span, [*both[0], *both[1]], valid, outputs)
        for p in parameters:                            # no backward needs the old ones any more
            p.data = p.versions[step % 2].copy_(p.versions[1 - step % 2])
        return loss

    return run_program


# ------------------------------------------------------------------------------------ the formulas

def forward_flops(cfg):
    """FLOPs of each module of the list for a token: none to look it up, the blocks, the head."""
    h, kv = cfg.dim, cfg.dim * cfg.kv_heads // cfg.heads
    block = 2 * (2 * h * h + 2 * h * kv + cfg.mlp()) + 4 * cfg.seq * h      # matrices, and scores
    return [0, *[block] * cfg.layers, 2 * cfg.vocab * h]


def blocks_to_hide(cfg, e, flops, bandwidth):
    """How many blocks a message hides behind. flops: FLOP/s. bandwidth: bytes/s."""
    return e * cfg.dim / bandwidth / (forward_flops(cfg)[1] / flops)


def cut(cfg, depth):
    """The slices (start, end) of the model's list, one for each stage. The next block goes where
    the fewest FLOPs are so far; the embedding to the first stage, and the head to the last."""
    _, block, *_, head = forward_flops(cfg)
    blocks = [1] * depth
    while sum(blocks) < cfg.layers:
        costs = [count * block for count in blocks]
        costs[-1] += head
        blocks[costs.index(min(costs))] += 1
    ends = [1 + sum(blocks[:stage]) for stage in range(1, depth)]
    return list(zip([0, *ends], [*ends, cfg.layers + 2]))


def traffic(variant, rank, p, m, v, message, shared, sums, modules=0):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}. message: its
    bytes. shared: parameters that lie on another rank too, in so many modules. sums: bytes of a
    number of gradients."""
    if p == 1:
        return {}
    neighbours = (rank > 0) + (rank < p - 1)            # an F goes to one, a B to the other
    sends = {"interleaved": 2 * (v - 1) + neighbours, "dualpipe-v": 2 * neighbours}
    sends = m * sends.get(variant, neighbours)
    norm, shared = max(sums, 4), shared * sums          # the norm is one number
    return {"send": (sends, sends * message, sends * message),
            "all_reduce": (1 + modules, norm + shared, 2 * (p - 1) / p * norm + shared)}


def times(recompute="none"):
    """How long F, B and W take. With --recompute full, a B computes its F again before it begins.
    (Of selective, which repeats the core of attention alone, the small part is not counted.)"""
    return {"F": 1, "B": 2 if recompute == "full" else 1, "W": 1}


def alive_over_time(actions):
    """How many micro-batches are alive in a rank's stages, after each of its actions."""
    changes = {"F": 1, "B": 0, "W": -1, "BW": -1}
    return list(itertools.accumulate(changes[action.kind] for action in actions))


def most_alive(variant, rank, p, m, v, breadth_first=False):
    """The most micro-batches of its v stages that a rank has alive at a time."""
    most = {"naive": 1, "afab": m, "1f1b": p - rank, "2bw": p - rank, "zb-h1": p,
            "zb-h2": 2 * p - 1, "dualpipe": p + 1, "dualpipe-v": 2 * p + 1,
            "interleaved": v * m if breadth_first else 2 * (p - 1 - rank) + (v - 1) * p + 1}
    return min(most[variant], v * m)


def bubble(variant, p, m, v, F=1, B=1, W=1):
    """The longest wait of a rank over its work (zb-h2's: between its own first and last action), if
    F&B ends as one, after F + B + W. None where no closed form holds."""
    work = F + B + W
    wait = {"naive": (p - 1) * m * work, **dict.fromkeys(("afab", "1f1b", "2bw"), (p - 1) * work),
            "interleaved": (p - 1) / v * work, "zb-h1": (p - 1) * (F + B - W),
            "zb-h2": (p - 1) * (F + B - 2 * W), "dualpipe": (p / 2 - 1) * (work + B - 2 * W),
            "dualpipe-v": (p - 1) / 2 * (work + B - 2 * W)}
    least = {"interleaved": p, "zb-h1": p, "zb-h2": 2 * p - 1}.get(variant, 1)
    if m < least or variant.startswith(("zb", "dualpipe")) and not W <= F <= B:
        return None
    return wait[variant] / (m * work)


# ----------------------------------------------------------------------------------------- the run

def plan(args, p):
    """The schedule on p ranks, and the slice of the model's list that is each stage."""
    name = ALIKE[args.schedule] if args.variant == "torch" else args.variant
    m = args.batch // args.micro_batch * args.batches_in_turn
    schedule = make_schedule(name, p, m, args.chunks, args.breadth_first)
    return schedule, cut(args.model, schedule.depth)


def take_slices(run, schedule, cuts):
    """What this rank holds: {stage: its slice of the model}, and all of it as one module."""
    (_, ranks, depth), p, tie = schedule, run.world, run.args.model.tie
    full = gpt(run.args.model, seed=None)
    slices = {stage: full[slice(*cuts[stage % depth])]
              for stage, rank in enumerate(ranks) if rank == run.rank}
    in_order = sorted(slices, key=lambda stage: stage % depth)      # alike on both ranks of a pair
    model = nn.ModuleList(slices[stage] for stage in in_order)

    is_dual, is_tied = len(ranks) > depth, tie and ranks[0] != ranks[depth - 1]
    if is_dual or is_tied:                              # ranks that hold the same: 0 and p-1, ...
        pairs = [sorted({rank, p - 1 - rank}) for rank in range((p + 1) // 2)]
        pair, _ = dist.new_subgroups_by_enumeration(pairs)
    for parameter in model.parameters():
        parameter.copies = 1                            # on all ranks, for the norm
        if is_dual or is_tied and parameter.global_name == "embedding.weight":
            parameter.copies, parameter.partial = 2, pair
    return slices, run.draw(model)


def train(run):
    args, (schedule, cuts) = run.args, plan(run.args, run.world)
    programs = make_programs(schedule, **times(args.recompute))
    group = run.mesh(pp=run.world)["pp"].get_group()
    dist.barrier(group)                                 # NCCL: the first use of a group is by all
    slices, model = take_slices(run, schedule, cuts)
    common.recompute(model, args.recompute)
    in_halves = args.variant.startswith(("zb", "dualpipe"))
    stages = {stage: Stage(part, in_halves) for stage, part in slices.items()}
    empty = functools.partial(torch.empty, args.micro_batch, args.model.seq, args.model.dim,
                              dtype=common.rounded(args), device=run.device)
    run_program = functools.partial(execute, programs[run.rank], stages, group, empty, run.span)
    optimizer = run.mixed(model.parameters())
    if args.variant == "2bw":
        run_program = without_flush(run, programs[run.rank], model, stages, group, empty)

    for batch in run.batches():                         # all of it on every rank
        with run.measure():
            loss, norm = train_step(run_program, model, optimizer, group, batch.micro_batches,
                                    batch.valid, args.clip)
        dist.all_reduce(loss)                           # for the report; the last stage knows it
        run.log(batch, loss, norm, model)


def train_torch(run):
    """The same through PyTorch, whose schedules are lists of actions too."""
    from torch.distributed.pipelining import PipelineStage, schedules

    args, (schedule, cuts) = run.args, plan(run.args, run.world)
    group = run.mesh(pp=run.world)["pp"].get_group()
    slices, model = take_slices(run, schedule, cuts)
    common.recompute(model, args.recompute)
    optimizer = run.mixed(model.parameters())
    stages = [PipelineStage(part, stage, len(cuts), run.device, group=group)
              for stage, part in slices.items()]
    kind = schedules.get_schedule_class(args.schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    pipeline = kind(stages[0] if single else stages, args.batch // args.micro_batch,
                    scale_grads=False,                  # the loss is divided, as everywhere
                    loss_fn=lambda logits, targets: loss_sum(logits, targets) / batch.valid)

    def run_schedule(micro_batches, valid):
        tokens, targets = (torch.cat(parts) for parts in zip(*micro_batches))
        inputs, losses = [tokens] if 0 in slices else [], []    # tokens: for the first stage alone
        pipeline.step(*inputs, target=targets, losses=losses, return_outputs=False)
        no_loss = torch.zeros((), dtype=torch.float64, device=run.device)
        return sum((loss.detach() for loss in losses), no_loss)

    for batch in run.batches():
        with run.measure():
            loss, norm = train_step(run_schedule, model, optimizer, group, batch.micro_batches,
                                    batch.valid, args.clip)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)


ALIKE = {                                               # whose stages lie where PyTorch's do
    "1F1B": "1f1b", "GPipe": "afab", "Interleaved1F1B": "interleaved", "LoopedBFS": "interleaved",
    "InterleavedZeroBubble": "interleaved", "ZBVZeroBubble": "dualpipe-v",
    "DualPipeV": "dualpipe-v"}


def formulas(args, rank, ranks, model):
    """What lab/ holds a run to."""
    cfg, (schedule, cuts), takes = args.model, plan(args, ranks), times(args.recompute)
    e, sums = common.rounded(args).itemsize, common.DTYPES[args.dtype].itemsize
    mine = [stage for stage, owner in enumerate(schedule.ranks) if owner == rank]
    modules = [module for stage in mine for module in range(*cuts[stage % schedule.depth])]
    if args.variant == "torch":
        return {"parameters": {}, "modules": modules}

    m, v, actions = args.batch // args.micro_batch, len(mine), schedule.actions[rank]
    in_turn, is_late = m * args.batches_in_turn, args.variant == "2bw"
    message, shared, both = args.micro_batch * cfg.seq * cfg.dim * e, 0, 0
    if args.variant == "dualpipe":                      # all that this rank holds
        shared = sum(p.numel() for p in model.parameters())
        both = len(modules) if shared > common.ONE_BUCKET else 1
    elif cfg.tie and (0 in modules) != (cfg.layers + 1 in modules):
        shared, both = cfg.vocab * cfg.dim, 1
    ends = sorted({schedule.ranks[schedule.depth - 1], schedule.ranks[-1]})
    most = most_alive(args.variant, rank, ranks, in_turn, v, args.breadth_first)
    return {
        "parameters": {}, "modules": modules, "kept": {}, "versions": 2 if is_late else 1,
        "schedule": {"actions": actions[:ranks - 1 - rank] if is_late else actions,
                     "slices": cuts, "of all ranks": schedule,
                     "inputs": [start for start, _ in cuts],        # which a stage detaches
                     "times": takes, "bubble": bubble(args.variant, ranks, in_turn, v, **takes),
                     "needs": schedule.needs, "message": message,
                     "programs": make_programs(schedule, **takes)},
        "sent": traffic(args.variant, rank, ranks, m, v, message, shared, sums, both),
        "checks": {("kept", "micro-batches alive", "at the most"):
                   (max(alive_over_time(actions)), most)},
        "machines": {"blocks in a stage from which on a message hides behind them, in bf16":
                     functools.partial(blocks_to_hide, cfg, 2)},
        "notes": [f"the loss comes from the last stage, on rank {' and '.join(map(str, ends))}"]}


def fitting(name, p, m, breadth_first=False):
    """The number of micro-batches, m or the next higher one, that a schedule on p ranks takes."""
    least = {"dualpipe": 2 * p, "dualpipe-v": 2 * p, "2bw": p - 1}.get(name, 1)
    multiple = {"interleaved": 1 if breadth_first else p, "dualpipe": 2}.get(name, 1)
    return -(-max(m, least) // multiple) * multiple


def requires(args, ranks):
    args.micro_batch = args.micro_batch or 1            # as many micro-batches as there can be
    common.split_batch(args, 1)
    name, called = args.variant, args.variant
    args.batches_in_turn = args.steps + 1 if name == "2bw" else 1       # without a flush
    if name == "2bw" and args.steps == 1:
        raise Refused("--variant 2bw is late from its second step on", "--steps 2")
    if name == "torch":
        name, called = ALIKE[args.schedule], args.schedule
        if name != "interleaved" and args.chunks:
            raise Refused(f"--chunks means nothing to --schedule {called}", "--schedule LoopedBFS")
        if name == "dualpipe-v" and torch.__version__ < "2.13":
            raise Refused(f"--schedule {called} of PyTorch {torch.__version__} sends to its "
                          "own rank, which not all networks can", "--schedule 1F1B")
    if name == "interleaved":
        args.chunks = args.chunks or 2
    if name == "dualpipe" and ranks % 2:
        raise Refused(f"dualpipe pairs ranks, and {ranks} is an odd number",
                      f"--nproc_per_node {ranks + 1}")
    m, least = args.batch // args.micro_batch, ranks if called == "1F1B" else 1
    breadth_first = args.breadth_first or called == "LoopedBFS"
    fits = fitting(name, ranks, max(m, least), breadth_first)
    if fits != m:
        raise Refused(f"{called} on {ranks} ranks does not take {m} micro-batches",
                      f"--batch {fits * args.micro_batch}")
    depth = ranks * {"interleaved": args.chunks, "dualpipe-v": 2}.get(name, 1)
    if args.model.layers < depth:
        raise Refused(f"--layers {args.model.layers} is less than one for each of {depth} "
                      "stages", f"--layers {depth}")


def flags(parser):
    add = parser.add_argument
    add("--chunks", type=int, help="slices of the model on each rank; default: 2")
    add("--breadth-first", action="store_true",
        help="a slice takes all micro-batches in turn, not as many as there are ranks")
    add("--schedule", choices=ALIKE, default="1F1B", help="PyTorch's name of a schedule")


VARIANTS = dict.fromkeys(("1f1b", "naive", "afab", "2bw", "interleaved", "zb-h1", "zb-h2",
                          "dualpipe", "dualpipe-v"), train)
VARIANTS["interleaved"] = train, "--chunks", "--breadth-first"
VARIANTS["torch"] = train_torch, "--chunks", "--schedule"

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
