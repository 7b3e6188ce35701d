r"""07 · Pipeline parallelism: some of the layers on each rank, and micro-batches in turn.

The model is a list of modules, so it can be cut between any two of them. Each of p ranks holds one
slice of it, a stage. A stage receives the activations of a micro-batch from the stage before, puts
them through its layers, and sends the result to the next. In backward, gradients go the other way.
That is one message of (b, s, h) for a cut, a micro-batch and a direction. No other way to cut the
model sends so little for a token, so a cut may well lie between two machines.

The price is waiting. While the first micro-batch is in the last stage, the first stage works on
others. But at the beginning of a step the last stage has nothing to do yet, and at the end the
first one waits for gradients. This idle time is the bubble. Four ranks and four micro-batches; F is
a forward, BW a backward, which takes twice as long; below stands the number of the micro-batch:

    naive (three quarters of it)                   1f1b
    rank 0  F.........BWF.........BWF...           rank 0  FFFF......BW.BW.BW.BW
            0.........001.........112...                   0123......00.11.22.33
    rank 1  .F......BW...F......BW...F..           rank 1  .FFF....BWFBW.BW.BW
            .0......00...1......11...2..                   .012....00311.22.33
    rank 2  ..F...BW......F...BW......F.           rank 2  ..FF..BWFBWFBW.BW
            ..0...00......1...11......2.                   ..01..00211322.33
    rank 3  ...FBW.........FBW.........F           rank 3  ...FBWFBWFBWFBW
            ...000.........111.........2                   ...000111222333

The order in which a rank works is its schedule, and a schedule is just a list of actions. An action
is one of four kinds: F; B, the gradient of the stage's input; W, the gradient of its weights; and
BW, both at once. Everything else follows from the lists: when each action can start, what is sent,
how much memory is needed, and what the rank has to do. So each schedule is a few lines of code, and
one executor runs them all.

    naive         One micro-batch after the other: one rank works, and all others wait.
    afab          All forward, all backward (GPipe). All m micro-batches are alive at the end of
                  forward: their activations are kept.
    1f1b          One forward, one backward, as soon as there is something to go backward with. The
                  bubble is the same, but rank r has only p-r micro-batches alive.
    interleaved   Each rank holds v slices, so that a micro-batch goes round v times. A slice takes
                  1/v of the time, and so does the bubble. A rank between two others sends 2v
                  messages for a micro-batch, not 2. p micro-batches go through a slice in turn
                  (depth first), or with --breadth-first all m, which are all alive then.
    zb-h1         Other ranks wait for B, nobody waits for W. So on rank r, W comes r micro-batches
                  after its B, and fills what was the bubble at the end. All ranks now have p micro-
                  batches alive, as 1f1b's first rank has.
    zb-h2         The same, with up to 2p-1 alive. If F, B and W take equally long, no rank waits
                  between its first action and its last. But each begins and ends later than the one
                  before. A step that ends with a norm over all ranks, as here, gains nothing by it:
                  the paper lets each rank update at once, and undoes it if the norm was too large.
    dualpipe      Two pipelines in opposite directions over the same ranks, with half of the micro-
                  batches each. So a rank holds two stages, and every stage lies on two ranks, which
                  sum their gradients. DeepSeek-V3 runs an F of one pipeline and a BW of the other
                  at the same time ("F&B"), so that one computes while the other communicates. (In
                  this file, which has nothing to hide, BW follows F: F&B takes F + B + W.)
    dualpipe-v    One pipeline of 2p half as large stages, which goes down the ranks and comes back.
                  The rest is as in dualpipe, without the second copy.

On rank r, where F, B and W are the times of 1/p of the model, and W <= F <= B:

                  the longest wait            alive, at the most                    parameters
    naive         (p-1) m (F+B+W)             1                                     1/p
    afab          (p-1) (F+B+W)               m                                     1/p
    1f1b          (p-1) (F+B+W)               p-r                                   1/p
    interleaved   (p-1) (F+B+W) / v           2(p-1-r) + (v-1)p + 1, 1/v each       1/p
    zb-h1         (p-1) (F+B-W)               p                                     1/p
    zb-h2         (p-1) (F+B-2W), see above   2p-1                                  1/p
    dualpipe      (p/2-1) (F&B + B - 2W)      p+1                                   2/p
    dualpipe-v    (p-1)/2 (F&B + B - 2W)      2p+1, 1/2 each                        1/p

Divided by the work, m (F+B+W), the first column is the bubble: (p-1)/m for 1f1b. A rank never has
more alive than there are: m, or v·m (which is interleaved's number with --breadth-first). One that
is only waiting for its W is alive too. It keeps the inputs of all linears and the gradients of
their outputs: as much as before B, but for what the core of attention and LayerNorm kept.

The order of messages. Between two ranks, NCCL matches sends with receives by the order in which
they are posted, and a send may block until the other side has posted its receive. Suppose each rank
receives what it needs right before an action, and sends the result right after. In 1f1b, rank 2
then sends the second micro-batch down, while rank 3 sends the gradient of the first one up: both
wait for ever. (gloo buffers messages, and would never show it.) So all messages of a step are put
into one order, by the time at which the simulator has them ready, and each rank posts its own in
that order. The first message that is still missing can then always be exchanged. Before the first
step, lab/ runs all lists on the strictest network there is, and raises if anything could block. (On
NCCL, a message starts when the rank's one before has arrived. So where F, B and W take other times
than the simulator's, one may wait for another that it does not need.)

If embedding and head are tied, the first and the last stage each have a copy. Their gradients are
summed, and the gradient norm counts them once. (In dualpipe-v, the same rank holds both ends.)

When it pays: a message, e bytes a number, hides behind the forward of a stage of k blocks if

    b·s·h·e / bandwidth  <=  24·b·s·h²·k / FLOP/s

So k must be at least e/24h · FLOP/s / bandwidth, whatever the batch and the sequence. (24 is for
the matrices; the report counts attention's scores too.) It stops paying where the batch is not many
more than p micro-batches: with m = p, 1f1b is idle for nearly half of the step.

Run it:
    torchrun --nproc_per_node=4 07_pipeline_parallel.py
    torchrun --nproc_per_node=4 07_pipeline_parallel.py --variant interleaved --layers 8
    torchrun --nproc_per_node=4 07_pipeline_parallel.py --variant zb-h1 --sleep 10
    python 07_pipeline_parallel.py --draw interleaved --ranks 8 --micro-batches 16 --chunks 2

Sources: Huang et al., GPipe (2019); Narayanan et al., Memory-Efficient Pipeline-Parallel DNN
Training (2021; 1f1b, as "PipeDream-Flush") and Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM (2021), sections 2.2 and 4.1; Lamy-Poirier, Breadth-First Pipeline
Parallelism (2022); Qi et al., Zero Bubble Pipeline Parallelism (2023), sections 2 and 4;
DeepSeek-AI, DeepSeek-V3 Technical Report (2024), section 3.2.1, and DualPipe on GitHub (where B
stands for our BW, and which owes the V to Sea AI Lab's "cut-in-half"); How To Scale Your Model,
part 5, "Pipelining"; Ultra-Scale Playbook, "Pipeline Parallelism" and A3 (which leaves the bytes of
a number out of the time of a message, and counts 32 where we count 24).
"""

import argparse
import functools
from collections import defaultdict
from dataclasses import replace
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

import common
from common import clip_grads, draw_weights, gpt, grad_norm, loss_sum, sum_partial_grads

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
    """First `ahead` forwards (none: naive; all: afab), then a forward and a backward in turn, as
    long as there are any. Each of v slices takes `group` micro-batches before the next slice does.
    """
    def order(kind, slices):
        return [Action(kind, slice * p + rank, i) for first in range(0, m, group)
                for slice in slices for i in range(first, min(first + group, m))]

    forwards, backwards = order("F", range(v)), order("BW", range(v)[::-1])
    actions = forwards[:ahead]
    for i, backward in enumerate(backwards):
        actions += [*forwards[ahead + i:ahead + i + 1], backward]
    return actions


def zero_bubble(rank, p, m, k):
    """F is k(p-1-r) micro-batches ahead of B on rank r, and W is k·r behind it."""
    ahead, behind = k * (p - 1 - rank), k * rank
    f, b, w = ([Action(kind, rank, i) for i in range(m)] for kind in "FBW")
    actions = f[:ahead]
    for i in range(m + behind):
        actions += f[ahead + i:ahead + i + 1] + b[i:i + 1]
        actions += w[i - behind:i - behind + 1] if i >= behind else []
    return actions


def dual_pipe(rank, p, m, v_shaped):
    """Eight phases. Of a rank's two stages, `near` is the one that micro-batches reach first.

    n ranks lie between the end where they come in and the turn, which for dualpipe is the middle,
    where the two directions meet; `before` of them come before this rank.
    """
    n, each = (p, m) if v_shaped else (p // 2, m // 2)  # micro-batches through each stage
    near, far, before = rank, 2 * p - 1 - rank, rank
    if rank >= n:                                       # dualpipe's other half
        near, far, before = far, near, p - 1 - rank
    actions, late, count = [], [], defaultdict(int)

    def add(kind, stage):
        first = each if stage >= p and not v_shaped else 0      # the other direction's
        actions.append(Action(kind, stage, first + count[kind[0], stage]))
        count[kind[0], stage] += 1
        if kind == "B":
            late.append(actions[-1]._replace(kind="W"))

    for _ in range(2 * (n - 1 - before)):               # 1: the way to the turn fills
        add("F", near)
    for _ in range(before + 1):                         # 2: the first ones come back
        add("F", near), add("F", far)
    for _ in range(n - 1 - before):                     # 3: and so do gradients; W fills a hole
        add("B", far), actions.append(late.pop(0)), add("F", far)
    for _ in range(each - 2 * n + before + 1):          # 4: F&B, one way and the other
        add("F", near), add("BW", far), add("F", far), add("BW", near)
    for _ in range(n - 1 - before):                     # 5: no more come in
        add("BW", far), add("F", far), add("BW", near)
    for i in range(2 * before + 2):                     # 6: backward alone; the last half without W
        add("BW" if i <= before else "B", near if i % 2 else far)
    for _ in range(n - 1 - before):                     # 7: the last gradients
        actions.append(late.pop(0)), add("B", near)
    return actions + late                               # 8: all W that are left


def make_schedule(variant, p, m, v=1, breadth_first=False):
    """p: ranks. m: micro-batches. v: slices of a rank, which only interleaved has."""
    v = v if variant == "interleaved" else 1
    ranks, depth, actions = [stage % p for stage in range(v * p)], v * p, []
    if variant.startswith("dualpipe"):
        ranks, depth = [*range(p), *reversed(range(p))], p if variant == "dualpipe" else 2 * p
    for rank in range(p):
        ahead = {"naive": 0, "afab": m, "1f1b": p - 1 - rank,
                 "interleaved": v * m if breadth_first else 2 * (p - 1 - rank) + (v - 1) * p}
        if variant in ahead:
            group = m if breadth_first else p
            actions.append(one_forward_one_backward(rank, p, m, v, ahead[variant], group))
        elif variant.startswith("zb"):
            actions.append(zero_bubble(rank, p, m, {"zb-h1": 1, "zb-h2": 2}[variant]))
        else:
            actions.append(dual_pipe(rank, p, m, variant == "dualpipe-v"))
    return Schedule(actions, ranks, depth)


# ------------------------------------------------------------------------ what follows from lists

def simulate(schedule, F=1, B=1, W=1, as_one=False):
    """{action: (start, end)}, if each starts once its rank is free and what it needs is there.

    F, B, W: how long each takes; BW takes B + W. as_one: an F and the BW of another stage right
    after it start and end together (F&B). Raises ValueError if ranks wait for each other.
    """
    cost = {"F": F, "B": B, "W": W, "BW": B + W}
    left, free = [list(actions) for actions in schedule.actions], [0] * len(schedule.actions)
    span, done = {}, {}                                 # done: when each output is there
    while any(left):
        before = len(span)
        for rank, actions in enumerate(left):
            while actions:
                unit = actions[:2] if as_one and are_one(*actions[:2]) else actions[:1]
                needs = [need for action in unit for need in schedule.needs(action)]
                if any(need not in done for need in needs):
                    break
                start = max([free[rank], *(done[need] for need in needs)])
                free[rank] = start + sum(cost[action.kind] for action in unit)
                for action in unit:
                    done[action.output], span[action] = free[rank], (start, free[rank])
                del actions[:len(unit)]
        if len(span) == before:
            waiting = [f"rank {rank} before {actions[0]}" for rank, actions in enumerate(left)
                       if actions]
            raise ValueError(f"ranks wait for each other: {', '.join(waiting)}")
    return span


def are_one(first, second=None):
    """Whether these two actions are an F&B."""
    return second and (first.kind, second.kind) == ("F", "BW") and first.stage != second.stage


class Message(NamedTuple):
    """An output on its way to the rank that needs it."""

    output: tuple
    sender: int
    receiver: int


def make_programs(schedule):
    """A program for each rank: its actions, and between them batches, which are lists of messages
    to post at once. Raises what `simulate` does.

    An action stands where it ends, and a message where its output is computed. So one that arrives
    while the receiver works is posted before that work, and travels meanwhile.
    """
    span = simulate(schedule)
    ready = {action.output: end for action, (_, end) in span.items() if action.kind != "W"}
    events = []
    for action, (_, end) in span.items():
        rank = schedule.ranks[action.stage]
        events.append((end, "action", rank, action))
        for need in schedule.needs(action):
            sender = schedule.ranks[need[1]]
            if sender != rank:
                events.append((ready[need], "message", sender, Message(need, sender, rank)))

    programs = [[] for _ in schedule.actions]
    for _, what, rank, event in sorted(events):
        if what == "action":
            programs[rank].append(event)
            continue
        for program in (programs[event.sender], programs[event.receiver]):
            if not program or isinstance(program[-1], Action):
                program.append([])
            program[-1].append(event)
    return programs


def drawing(schedule):
    """For a terminal: two lines a rank, with the kinds (in lower case, if not of its first stage)
    and the last digit of the micro-batch."""
    span, lines = simulate(schedule), []
    for rank, actions in enumerate(schedule.actions):
        kinds = digits = ""
        for action in actions:
            start, _ = span[action]
            kind = action.kind if action.stage == rank else action.kind.lower()
            kinds = kinds.ljust(start, ".") + kind
            digits = digits.ljust(start, ".") + str(action.micro_batch % 10) * len(kind)
        lines += [f"rank {rank:<3}{kinds}", f"{'':8}{digits}"]
    return "\n".join(lines)


# ----------------------------------------------------------------------------- backward in halves

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
        ctx.later.append((ctx.weight, x.detach(), dy))  # detached, or it keeps the graph alive
        return dy @ ctx.weight, None, None


class Stage:
    """A slice of the model, and what it keeps of each micro-batch from one action to the next.

    in_halves: B and W come apart. LayerNorms' and the embedding's gradients, which cost little, are
    computed in B.
    """

    def __init__(self, module, in_halves):
        self.module, self.is_last = module, hasattr(module, "head")
        self.for_b, self.for_w, self.later = {}, {}, []
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
        self.for_b[i] = x, get_gradient_edge(out)       # where backward begins: out can be freed
        return out.detach()

    def backward(self, i, gradient):
        """gradient: of the output, or None for the loss. Returns that of the input."""
        x, edge = self.for_b.pop(i)
        torch.autograd.backward(edge, gradient)
        self.for_w[i] = self.later.copy()
        self.later.clear()
        return x.grad

    def weights(self, i):
        for weight, x, dy in self.for_w.pop(i):
            gradient = dy.flatten(0, -2).T @ x.flatten(0, -2)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)


# ------------------------------------------------------------------------------------ the executor

class Pipeline(NamedTuple):
    """What a rank needs for a step. stages: {number: Stage}, its own. group: all ranks. empty():
    room for a message. timed(action, kept): a context manager around each action."""

    schedule: Schedule
    program: list
    stages: dict
    group: dist.ProcessGroup
    empty: Callable
    timed: Callable


class Output(NamedTuple):
    """An activation or a gradient: computed here, or on its way from another rank or to it (then it
    must stay alive until it has left)."""

    tensor: torch.Tensor
    handle: dist.Work | None = None                     # None: computed here

    def wait(self):
        if self.handle:
            self.handle.wait()
        return self.tensor


def post(batch, pipeline, outputs, leaving):
    """Start all messages of a batch at once, each (b, s, h). outputs: {name: Output}, computed or
    received, from which what is sent is taken. leaving: what is being sent."""
    group, operations = pipeline.group, []
    for message in batch:
        if message.sender == group.rank():
            how, tensor, peer = dist.isend, outputs.pop(message.output).tensor, message.receiver
        else:
            how, tensor, peer = dist.irecv, pipeline.empty(), message.sender
        operations.append(dist.P2POp(how, tensor, group=group, group_peer=peer))

    handles = dist.batch_isend_irecv(operations)
    if len(handles) < len(batch):                       # NCCL has one for all, gloo one for each,
        handles *= len(batch)                           # which must not be waited for twice
    for message, operation, handle in zip(batch, operations, handles):
        under_way = Output(operation.tensor, handle)
        if message.sender == group.rank():
            leaving.append(under_way)
        else:
            outputs[message.output] = under_way


def execute(pipeline, micro_batches, valid):
    """Walk through this rank's program. Returns the loss of the micro-batches that end here, a
    scalar. Communication: the program's messages."""
    outputs, leaving = {}, []
    total = torch.zeros((), dtype=torch.float64, device=micro_batches[0][0].device)
    for step in pipeline.program:
        if not isinstance(step, Action):
            leaving = [sent for sent in leaving if not sent.handle.is_completed()]  # gloo: never
            post(step, pipeline, outputs, leaving)
            continue

        kind, number, i = step
        stage, (tokens, targets) = pipeline.stages[number], micro_batches[i]
        given = [outputs.pop(need).wait() for need in pipeline.schedule.needs(step)
                 if need[1] != number]                  # of another stage: one, or none
        with pipeline.timed(step, (stage.for_b, stage.for_w)):
            if kind == "F":
                out = stage.forward(i, *(given or [tokens]), targets, valid)
            if "B" in kind:
                out = stage.backward(i, *(given or [None]))
            if "W" in kind:
                stage.weights(i)
        if kind == "F" and stage.is_last:
            total += out
        elif kind != "W":
            outputs[step.output] = Output(out)
    for sent in leaving:
        sent.wait()
    return total


def train_step(pipeline, model, optimizer, micro_batches, valid, clip):
    """One step. Returns this rank's part of the loss, and the norm over all stages.

    model: all that this rank holds. micro_batches: pairs of tokens and targets, (b, s) each, the
    same on every rank. valid: the valid targets of the whole batch. Communication: the messages; an
    all_reduce of what lies on two ranks (tied embeddings, dualpipe's copies); one for the norm.
    """
    optimizer.zero_grad()
    loss = execute(pipeline, micro_batches, valid)
    sum_partial_grads(model.parameters())

    norm = grad_norm(model.parameters(), pipeline.group)    # of all stages, not of this one
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return loss, norm


# ------------------------------------------------------------------------------------ the formulas
# The model is a list of modules, and so is what they cost. A stage is a slice of each list.

def numbers(cfg):
    """Parameters of each module."""
    table = cfg.vocab * cfg.dim
    block = replace(cfg, layers=1).parameters() - replace(cfg, layers=0).parameters()
    return [table, *[block] * cfg.layers, 2 * cfg.dim + table]


def forward_flops(cfg):
    """FLOPs of each module for a token; looking up an embedding takes none."""
    matrices = numbers(cfg)[1] - 4 * cfg.dim
    return [0, *[2 * matrices + 4 * cfg.seq * cfg.dim] * cfg.layers, 2 * cfg.vocab * cfg.dim]


def activation_bytes(cfg, b, e):
    """What autograd keeps in each module for a micro-batch, between F and B, on a CPU."""
    tokens, accurate = b * cfg.seq, max(e, 4)
    x, kv = tokens * cfg.dim * e, tokens * cfg.dim // cfg.heads * cfg.kv_heads * e
    norm = x + 2 * tokens * e + x                       # input, mean and 1/std, output
    core = common.core_bytes(cfg.attention, cfg, b, e)
    attn = x + 2 * kv + core + x                        # q, k and v, the core, o's input
    mlp = 4 * x + 4 * x                                 # GELU's input and output
    loss = tokens * cfg.vocab * accurate + accurate     # log-probabilities, and a scalar
    return [0, *[2 * norm + attn + mlp] * cfg.layers, norm + loss]


def waiting_bytes(cfg, b, e):
    """The same between B and W: inputs of linears, and gradients of their outputs."""
    tokens = b * cfg.seq
    x, kv = tokens * cfg.dim * e, tokens * cfg.dim // cfg.heads * cfg.kv_heads * e
    inputs = x + x + x + 4 * x                          # of q, k and v together; o; up; down
    gradients = x + 2 * kv + x + 4 * x + x              # of q; k and v; o; up; down
    return [0, *[inputs + gradients] * cfg.layers, x + tokens * cfg.vocab * e]


def per_stage(costs, cuts):
    return [sum(costs[start:end]) for start, end in cuts]


def balanced(cfg, depth):
    """How many blocks each stage gets: the next one goes where it is cheapest so far."""
    _, block, *_, head = forward_flops(cfg)
    blocks = [1] * depth
    while sum(blocks) < cfg.layers:
        costs = [count * block for count in blocks]
        costs[-1] += head
        blocks[costs.index(min(costs))] += 1
    return blocks


def cut(cfg, blocks):
    """The slices (start, end) of the model's modules, for so many blocks in each stage."""
    ends = [1 + sum(blocks[:stage]) for stage in range(1, len(blocks))] + [cfg.layers + 2]
    return list(zip([0, *ends], ends))


def held(cfg, cuts, ranks, rank):
    """A rank's parameters, in how many tensors, and how many of them lie on another rank too."""
    count = lambda costs: sum(per_stage(costs, cuts)[stage % len(cuts)]
                              for stage, owner in enumerate(ranks) if owner == rank)
    parameters, tensors = count(numbers(cfg)), count([1, *[10] * cfg.layers, 3])
    tables, table = count([1, *[0] * cfg.layers, 1]), cfg.vocab * cfg.dim
    if cfg.tie and tables == 2:                         # one matrix serves both ends
        parameters, tensors = parameters - table, tensors - 1
    if len(ranks) > len(cuts):                          # dualpipe
        return parameters, tensors, parameters
    return parameters, tensors, table if cfg.tie and tables == 1 else 0


def traffic(variant, rank, p, m, v, message, shared, e):
    """What a rank sends in a step: {op: (calls, bytes of payload, bytes on the wire)}. message: its
    bytes. shared: parameters that lie on another rank too. e: bytes of a number."""
    if p == 1:
        return {}
    neighbours = (rank > 0) + (rank < p - 1)            # an F goes to one, a B to the other
    sends = {"interleaved": 2 * (v - 1) + neighbours, "dualpipe-v": 2 * neighbours}
    sends = m * sends.get(variant, neighbours)
    norm, shared = max(e, 4), shared * e                # the norm is one number
    return {"send": (sends, sends * message, sends * message),
            "all_reduce": (2 if shared else 1, norm + shared, 2 * (p - 1) / p * norm + shared)}


def alive_over_time(actions, alive, waiting):
    """Bytes after each action of a rank, or whatever else is alive in each stage for a micro-batch,
    between F and B; and what of it is still waiting between B and W."""
    now, over_time = 0, []
    for kind, stage, _ in actions:
        all_of_it, rest = alive[stage % len(alive)], waiting[stage % len(alive)]
        now += {"F": all_of_it, "B": rest - all_of_it, "W": -rest, "BW": -all_of_it}[kind]
        over_time.append(now)
    return over_time


def most_alive(variant, rank, p, m, v, breadth_first=False):
    """The most micro-batches of its v stages that a rank has alive at a time."""
    most = {"naive": 1, "afab": m, "1f1b": p - rank, "zb-h1": p, "zb-h2": 2 * p - 1,
            "interleaved": v * m if breadth_first else 2 * (p - 1 - rank) + (v - 1) * p + 1,
            "dualpipe": p + 1, "dualpipe-v": 2 * p + 1}
    return min(most[variant], v * m)


def bubble(variant, p, m, v, F=1, B=1, W=1):
    """The longest wait of a rank over its work (zb-h2's: between its own first and last action), if
    F&B takes F + B + W. None where no closed form holds."""
    work = F + B + W
    wait = {"naive": (p - 1) * m * work, "afab": (p - 1) * work, "1f1b": (p - 1) * work,
            "interleaved": (p - 1) / v * work, "zb-h1": (p - 1) * (F + B - W),
            "zb-h2": (p - 1) * (F + B - 2 * W), "dualpipe": (p / 2 - 1) * (work + B - 2 * W),
            "dualpipe-v": (p - 1) / 2 * (work + B - 2 * W)}
    least = {"interleaved": p, "zb-h1": p, "zb-h2": 2 * p - 1}.get(variant, 1)
    if m < least or variant.startswith(("zb", "dualpipe")) and not W <= F <= B:
        return None
    return wait[variant] / (m * work)


def simulated_bubble(schedule, variant, F=1, B=1, W=1):
    """The same from the lists."""
    span = simulate(schedule, F, B, W, as_one=variant.startswith("dualpipe"))
    start, end, ratios = 0, max(end for _, end in span.values()), []
    for actions in schedule.actions:
        if variant == "zb-h2":
            start, end = span[actions[0]][0], span[actions[-1]][1]
        work = (F + B + W) * sum(action.kind == "F" for action in actions)
        ratios.append((end - start) / work - 1)
    return max(ratios)


def blocks_to_hide(cfg, e, flops, bandwidth):
    """Blocks of a stage from which on a message hides behind them. flops: FLOP/s. bandwidth:
    bytes/s."""
    return e * cfg.dim / bandwidth / (forward_flops(cfg)[1] / flops)


# ----------------------------------------------------------------------------------------- the run

def take_slices(run, ranks, cuts):
    """What this rank holds: {stage: its slice of the model}, and all of it as one module."""
    cfg, p, depth = run.args.model, run.world, len(cuts)
    full = gpt(cfg, seed=None)
    slices = {stage: full[slice(*cuts[stage % depth])]
              for stage, rank in enumerate(ranks) if rank == run.rank}
    in_order = sorted(slices, key=lambda stage: stage % depth)      # alike on both ranks of a pair
    model = nn.ModuleList(slices[stage] for stage in in_order)
    draw_weights(model, run.args.seed, run.device, run.dtype)

    is_dual, is_tied = len(ranks) > depth, cfg.tie and ranks[0] != ranks[depth - 1]
    if is_dual or is_tied:                              # ranks that hold the same: 0 and p-1, ...
        pairs = [sorted({rank, p - 1 - rank}) for rank in range((p + 1) // 2)]
        pair, _ = dist.new_subgroups_by_enumeration(pairs)
    for parameter in model.parameters():
        parameter.copies = 1
        if is_dual or is_tied and parameter.global_name == "embedding.weight":
            parameter.copies, parameter.partial = 2, pair
    return slices, model


def train(run):
    args, (p, m) = run.args, sizes(run.args, run.world)
    schedule = make_schedule(args.variant, p, m, args.chunks, args.breadth_first)
    if args.draw:
        print(drawing(schedule))
        return say_what_it_costs(run, schedule, p, m)
    programs = make_programs(schedule)
    run.check_rendezvous(schedule, programs)            # raises if anything could block

    group = run.mesh(pp=p)["pp"].get_group()
    dist.barrier(group)                                 # NCCL: the first use of a group is by all
    cuts = cut(args.model, args.stages or balanced(args.model, schedule.depth))
    slices, model = take_slices(run, schedule.ranks, cuts)
    in_halves = args.variant.startswith(("zb", "dualpipe"))
    stages = {stage: Stage(part, in_halves) for stage, part in slices.items()}
    empty = functools.partial(torch.empty, args.micro_batch, args.model.seq, args.model.dim,
                              dtype=run.dtype, device=run.device)
    pipeline = Pipeline(schedule, programs[run.rank], stages, group, empty, run.timed)
    optimizer = run.optimizer(model.parameters())
    run.watch_actions(model)

    for batch in run.batches():                         # all of it on every rank
        with run.measure():
            loss, norm = train_step(pipeline, model, optimizer, batch.micro_batches, batch.valid,
                                    args.clip)
        dist.all_reduce(loss)                           # for the report; the last stage knows it
        run.log(batch, loss, norm, model)

    check(run, schedule, cuts, model, optimizer, m)
    say_what_it_costs(run, schedule, p, m)
    if args.sleep:                                      # on an idle machine: stages that sleep
        def execute_with(stages, timed):
            execute(pipeline._replace(stages=stages, timed=timed), batch.micro_batches, valid=1)

        run.sleep_through(execute_with, stages, empty().zero_(),
                          args.sleep * max(end for _, end in simulate(schedule).values()))


def check(run, schedule, cuts, model, optimizer, m):
    """Hold what was measured to the formulas."""
    args, cfg, p, rank, e = run.args, run.args.model, run.world, run.rank, run.dtype.itemsize
    parameters, tensors, shared = held(cfg, cuts, schedule.ranks, rank)
    run.check_states(model, optimizer, parameters, tensors)
    alive, waiting = (per_stage(costs(cfg, args.micro_batch, e), cuts)
                      for costs in (activation_bytes, waiting_bytes))
    tables = cfg.seq * cfg.dim // cfg.heads * e         # RoPE's cos and sin, which stay
    over_time = alive_over_time(schedule.actions[rank], alive, waiting)
    run.check_alive([tables + now for now in over_time])
    message, v = args.micro_batch * cfg.seq * cfg.dim * e, len(schedule.ranks) // p
    run.check_traffic(traffic(args.variant, rank, p, m, v, message, shared, e))
    knows = {schedule.ranks[schedule.depth - 1], schedule.ranks[-1]}
    run.note(f"the loss comes from the last stage, on rank {' and '.join(map(str, sorted(knows)))}")


def say_what_it_costs(run, schedule, p, m):
    """What follows from the lists alone, beside the closed forms; and on which machines it pays."""
    args, rank, v = run.args, run.rank, len(schedule.ranks) // p
    ones = [1] * schedule.depth
    run.check("micro-batches alive, at the most",
              max(alive_over_time(schedule.actions[rank], ones, ones)),
              most_alive(args.variant, rank, p, m, v, args.breadth_first), "")
    formula, simulated = bubble(args.variant, p, m, v), simulated_bubble(schedule, args.variant)
    run.check("bubble over work if F = B = W, simulated", round(simulated, 6),
              None if formula is None else round(formula, 6), "")
    span = simulate(schedule)
    run.record(simulated=[[[*action, *span[action]] for action in actions]
                          for actions in schedule.actions])
    run.on_machines({"blocks in a stage from which on a message hides behind them, in bf16":
                     functools.partial(blocks_to_hide, args.model, 2)})


def torch_step(pipeline, model, optimizer, tokens, targets, clip, group):
    optimizer.zero_grad()
    losses = []
    pipeline.step(*tokens, target=targets, losses=losses, return_outputs=False)
    sum_partial_grads(model.parameters())
    norm = grad_norm(model.parameters(), group)
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    no_loss = torch.zeros((), dtype=torch.float64, device=targets.device)
    return sum((loss.detach() for loss in losses), no_loss), norm


def train_torch(run):
    """The same through PyTorch, whose schedules are lists of actions too."""
    from torch.distributed.pipelining import PipelineStage, schedules

    args, (p, m) = run.args, sizes(run.args, run.world)
    group = run.mesh(pp=p)["pp"].get_group()
    _, ranks, depth = make_schedule(ALIKE[args.schedule], p, m, args.chunks)
    cuts = cut(args.model, args.stages or balanced(args.model, depth))
    slices, model = take_slices(run, ranks, cuts)
    optimizer = run.optimizer(model.parameters())
    stages = [PipelineStage(part, stage, depth, run.device, group=group)
              for stage, part in slices.items()]
    kind = schedules.get_schedule_class(args.schedule)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    pipeline = kind(stages[0] if single else stages, m, scale_grads=False,  # the loss is divided
                    loss_fn=lambda logits, targets: loss_sum(logits, targets) / batch.valid)

    for batch in run.batches():
        tokens, targets = (torch.cat(parts) for parts in zip(*batch.micro_batches))
        tokens = [tokens] if 0 in slices else []        # for the first stage alone
        with run.measure():
            loss, norm = torch_step(pipeline, model, optimizer, tokens, targets, args.clip, group)
        dist.all_reduce(loss)
        run.log(batch, loss, norm, model)

    parameters, tensors, _ = held(args.model, cuts, ranks, run.rank)
    run.check_states(model, optimizer, parameters, tensors)
    run.check_traffic()


ALIKE = {                                               # whose stages lie where PyTorch's do
    "1F1B": "1f1b", "GPipe": "afab", "Interleaved1F1B": "interleaved", "LoopedBFS": "interleaved",
    "InterleavedZeroBubble": "interleaved", "ZBVZeroBubble": "dualpipe-v",
    "DualPipeV": "dualpipe-v"}


def sizes(args, ranks):
    """Ranks, and micro-batches of a step: of the run, or of what is only drawn."""
    if args.draw:
        return args.ranks or 4, args.micro_batches or 8
    return ranks, args.batch // args.micro_batch


def requires(args, ranks):
    if not args.draw:
        args.micro_batch = args.micro_batch or 1        # as many micro-batches as there can be
        common.split_batch(args, 1)
        if args.ranks or args.micro_batches:
            common.refuse("--ranks and --micro-batches are of a drawing; --draw 1f1b would work")
    elif args.draw != args.variant or args.stages or args.sleep or ranks > 1:
        common.refuse("--draw is for one process, and takes --ranks, --micro-batches, --chunks and "
                      f"--breadth-first alone; python {args.chapter}.py --draw {args.draw} would "
                      "work")
    args.verify = args.verify and not args.draw

    (p, m), layers, name, called = sizes(args, ranks), args.model.layers, args.variant, args.variant
    if name == "torch":
        name, called = ALIKE[args.schedule], args.schedule
        if name != "interleaved" and args.chunks:
            common.refuse(f"--chunks means nothing to --schedule {called}; LoopedBFS would work")
        if name == "dualpipe-v" and torch.__version__ < "2.13":
            common.refuse(f"--schedule {called} of PyTorch {torch.__version__} sends to its own "
                          "rank, which not all networks can; --schedule 1F1B would work")
    if name == "interleaved":
        args.chunks = args.chunks or 2

    if name == "dualpipe" and p % 2:
        fits = f"--ranks {p + 1}" if args.draw else f"--nproc_per_node={p + 1}"
        common.refuse(f"dualpipe pairs ranks, and {p} is an odd number; {fits} would work")
    least = {"dualpipe": 2 * p, "dualpipe-v": 2 * p}.get(name, p if called == "1F1B" else 1)
    by_rank = name == "interleaved" and not args.breadth_first and called != "LoopedBFS"
    multiple = p if by_rank else 2 if name == "dualpipe" else 1
    fits = -(-max(m, least) // multiple) * multiple
    if fits != m:
        takes = f"{least} or more" if least > m else f"a multiple of {multiple}"
        flag = f"--micro-batches {fits}" if args.draw else f"--batch {fits * args.micro_batch}"
        common.refuse(f"{called} on {p} ranks takes {takes} micro-batches, not {m}; {flag} would "
                      "work")

    depth = args.chunks * p if name == "interleaved" else 2 * p if name == "dualpipe-v" else p
    if layers < depth and not args.draw:
        common.refuse(f"--layers {layers} is less than one for each of {depth} stages; "
                      f"--layers {depth} would work")
    if args.stages and (len(args.stages) != depth or sum(args.stages) != layers):
        given, fits = (",".join(map(str, blocks))
                       for blocks in (args.stages, balanced(args.model, depth)))
        common.refuse(f"--stages {given} does not spread {layers} blocks over {depth} stages; "
                      f"{fits} would work")


def block_counts(text):
    """An argparse type: 3,5,4."""
    counts = [int(count) if count.isdecimal() else 0 for count in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text} does not give each stage a block; 3,5,4 would")
    return counts


class Draw(argparse.Action):
    """--draw NAME chooses the variant, too."""

    def __call__(self, parser, args, variant, flag):
        args.draw = args.variant = variant


def flags(parser):
    add = parser.add_argument
    add("--chunks", type=int, help="slices of the model on each rank; default: 2")
    add("--breadth-first", action="store_true",
        help="a slice takes all micro-batches in turn, not as many as there are ranks")
    add("--stages", type=block_counts,
        help="how many blocks each stage has, as 3,5,4; default: balanced by FLOPs")
    add("--schedule", choices=ALIKE, default="1F1B", help="PyTorch's name of a schedule")
    add("--sleep", type=int, metavar="MS",
        help="at the end, a step in which each F, B and W sleeps: the bubble where cores are few")
    add("--draw", choices=[name for name in VARIANTS if name != "torch"], action=Draw,
        help="draw this schedule, and train nothing")
    add("--ranks", type=int, help="to draw; default: 4")
    add("--micro-batches", type=int, help="to draw; default: 8")


VARIANTS = {
    "1f1b": (train, "--sleep"),
    "naive": (train, "--sleep"),
    "afab": (train, "--sleep"),
    "interleaved": (train, "--chunks", "--breadth-first", "--sleep"),
    "zb-h1": (train, "--sleep"),
    "zb-h2": (train, "--sleep"),
    "dualpipe": (train, "--sleep"),
    "dualpipe-v": (train, "--sleep"),
    "torch": (train_torch, "--chunks", "--schedule"),
}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
