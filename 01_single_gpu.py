r"""01 · One GPU: what a training step holds and does.

Everything in this course answers "it does not fit" or "it takes too long". So first: what is it
that has to fit, and what takes the time? A step has three acts:

    forward      tokens -> logits -> loss         leaves behind ACTIVATIONS, kept for backward
    backward     loss -> a gradient each          uses up the activations, leaves GRADIENTS
    optimizer    gradients -> new parameters      reads and writes PARAMETERS and OPTIMIZER STATES

    bytes            ___
       |           _/   \__
       |         _/        \__           activations pile up in forward, backward uses them up
       |       _/   __________\______
       |     _/____/                 |   gradients come in backward, and go when a step begins
       |____/________________________|_  optimizer states come with the first step, and stay
       |_______________________________  parameters
            forward    backward   optimizer

A run measures this picture in its first three steps, and --plot draws it.

Activations are what backward reads. A linear layer needs its input, for the gradient of its weight.
GELU needs its input too, LayerNorm its input and two numbers for each token, softmax its output,
and a product of two activations needs both. A sum needs nothing. So a block of our model keeps as
much as 14 tensors of (batch, seq, dim), the keys and values, the weights of attention, (batch,
heads, seq, seq), and both LayerNorms' two numbers. With 4 tokens, dim 8, 2 heads and 1 kv head that
is 14 · 32 + 2 · 16 + 32 + 16 = 528 numbers, 2,112 bytes in fp32. `kept_for_backward` below lists
them by class, because in later chapters a rank keeps a share of each class.

Today's block (--block llama) has RMSNorm, which keeps its input and one number a token, 1/rms; and
SwiGLU, silu(gate) · up. A product needs both factors, so with gate, for silu, and the product, for
down, that is four tensors of hidden features where GELU has two. (On a CPU, RMSNorm is no single
operator, and keeps its output before the weight as well: lab/run/anatomy.norm_bytes.)

On one GPU there are three ways to keep less:

Gradient accumulation (--micro-batch) cuts the batch into micro-batches, runs one after the other,
and adds up their gradients. Activations shrink, and nothing else changes. There is one trap.
Suppose one micro-batch has 100 valid targets (tokens to learn, not padding), and another has 50.
Every target should count 1/150. If each micro-batch took the mean over its own, and the two means
were averaged, a target would count 1/200 in the first and 1/100 in the second. So each micro-batch
divides its SUM of losses by the valid targets of the WHOLE batch.

Recomputation (--recompute) drops activations, and computes them again in backward:

    none        drops nothing
    selective   drops what grows with seq^2, the scores and weights of attention
    full        keeps only each block's input. Backward first runs the forward of a block again, so
                one block's activations exist at a time. A step takes about 4/3 of the FLOPs
    every       as full, of --k K blocks together: fewer inputs, but K blocks' activations at a time
    offload     as full, and the inputs wait in the host's memory. The GPU keeps none

With c = L/K groups, "every" keeps at the most c · A_in + K · A_layer, less an input that is in both
(`most_again`). That is least for c = √(L · A_layer / A_in). A_layer is more than 14 A_in here, so K
= 1 is best up to 30 layers (`best_k`). "offload" moves L · A_in to the host and back (`offloaded`).

Fused attention (--attention sdpa) makes the selective choice inside its kernel. Of each row of
scores it keeps one number, the logarithm of the sum of their exponentials, and computes the weights
again from that. So with such a kernel, "selective" gains next to nothing. --kernels takes our own,
flash attention, norms and SwiGLU in kernels/, on a GPU.

Parameters, with width h (dim), V words, and MLPs of f features (`parameters_by_part`; shares):

                                                         gpt2      7b    Llama's 70b
    embedding    V · h                                    31%      3%      1.5%
    q and o      2h² a layer                              11%     16%     15%
    k and v      2h² · kv_heads / heads a layer           11%     16%      2%
    MLP          2hf a layer, with a gate 3hf             46%     63%     80%
    norms        2h each, an RMSNorm h                     0%      0%      0%
    head         V · h, or nothing if it is tied           0%      3%      1.5%

With f = 4h, and as many kv heads as heads, a layer has about 12h²; with a gate, too, if f = 8h/3.

Model states, in bytes per parameter:

    --precision      parameters  gradients  optimizer states (AdamW)      sum
    fp32                 4           4      4 + 4          two moments     16
    bf16, fp16, fp8      2           2      4 + 4 + 4      master weights  16 (in the update 20)
    bf16-fp32grad        2         2 + 4    4 + 4 + 4                      20

Muon (--optimizer muon, chapter 11) has one moment of a matrix, 4 bytes less.

Mixed precision saves nothing in this table. It buys fast 16-bit matmuls, and it halves the
activations that the blocks keep. (The loss stays in fp32, and with a large vocabulary that is
much.) It needs the master weights, a copy in fp32, because bf16 keeps 8 bits of a number: an update
below 1/512 of a weight would be rounded away. For the same reason bf16-fp32grad adds up the
gradients of micro-batches in fp32. (The others have fp32 gradients only while the masters are
updated, when the activations have gone.)

fp16 keeps 11 bits, but its range is narrow, so small gradients would become zero. Therefore the
loss is multiplied by a scale before backward, and the gradients are divided by it after. If the
scale is too large, gradients become inf: then the step is skipped and the scale halved. After 100
good steps in a row it is doubled. (fp8 is bf16 with linears of 8-bit numbers: see kernels/fp8.py.)

A run in 16 bits is compared with one GPU in fp32. The losses are means over many tokens, and agree
to 1e-2 in fp8, 5e-3 in bf16 and 1e-3 in fp16. In a gradient the terms of the tokens cancel, and
their rounding errors do not: it may be off by 1/8 (bf16), 0.05 (fp16) or 0.4 (fp8) of its largest
element, or by 4 times what rounding does to it on one GPU. (On a CPU, LayerNorm's gradients are
sums over the tokens in bf16, and of 4,096 ones they make 256.) After the first step the weights
differ, so later only losses are compared. Under AdamW no parameters are: a tiny gradient moves one
as far as a large one, and rounding may flip its sign.

FLOPs: a matmul of (m, k) by (k, n) takes 2mkn, and its backward is two matmuls of that size. So a
parameter takes 2 FLOPs for each token in forward, and about 6 in a step. Attention multiplies
activations with each other, q with all keys and the weights with all values. Each of the two takes
2 · seq · dim for a token and a layer, so a step takes 12 · layers · seq · dim more per token. MFU
(model FLOPs utilization) divides these FLOPs, which the model needs, by the time and by the chip's
peak. HFU (of the hardware) also counts what is recomputed. Recomputing can raise HFU. With the same
layout and micro-batch it lowers MFU, which a larger micro-batch may then raise.

Run it:
    python 01_single_gpu.py                                  300 steps, and a sample of text
    python 01_single_gpu.py --steps 10 --precision bf16-fp32grad --plot runs/memory.png
    python 01_single_gpu.py --steps 10 --micro-batch 2 --recompute full --attention sdpa
    python 01_single_gpu.py --preset gpt2 --precision bf16                        (on a GPU)

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
sections 4 and 5; Micikevicius et al., Mixed Precision Training (2018), section 3; Chowdhery et al.,
PaLM (2022), appendix B (MFU); Ultra-Scale Playbook, "First Steps: Training on One GPU".
"""

import contextlib
import functools
import math

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_
from torch.utils.checkpoint import checkpoint

import common
from common import Refused, gpt, grad_norm, loss_sum

# ------------------------------------------------------------------------------------- the forward

CORES = dict(common.CORES)
# recomputed(function, *inputs) keeps the inputs alone, and calls the function again in backward.
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def choose_core(model, attention, recompute):
    """Put an attention into all blocks; with "selective" it keeps q, k and v, and runs twice."""
    core = CORES[attention]
    for block in model[1:-1]:
        selective = recompute == "selective"
        block.attn.core = functools.partial(recomputed, core) if selective else core


class Offload(torch.autograd.graph.saved_tensors_hooks):
    """What autograd keeps waits in the host's memory, pinned, since a GPU copies no other."""

    def __init__(self):
        super().__init__(self.send, lambda kept: kept[0].to(kept[1], copy=True))

    def send(self, x):
        host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
        return host.copy_(x), x.device


def groups_of(blocks, k):
    """The blocks, k at a time, each group a model of its own; the first has what is left over."""
    ends = range(len(blocks), 0, -k)
    return [blocks[max(0, end - k):end] for end in ends][::-1]


def logits_of(model, tokens, recompute, k=1):
    """Tokens (batch, seq) to logits (batch, seq, vocab). The model is a list, so walk it."""
    x = model[0](tokens)                                        # (batch, seq, dim)
    again = recompute not in ("none", "selective")
    for group in groups_of(model[1:-1], k):
        with Offload() if recompute == "offload" else contextlib.nullcontext():
            x = recomputed(group, x) if again else group(x)
    return model[-1](x)


# ---------------------------------------------------------------------------------------- the step

def accumulate(forward, micro_batches, valid, backward=torch.Tensor.backward):
    """Add up the gradients of all micro-batches, pairs of tokens and targets (micro_batch, seq), in
    p.grad. Returns the loss of the whole batch. forward: tokens to logits; backward(loss): adds to
    p.grad; valid: how many targets of the whole batch are valid."""
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid       # not by the micro-batch's own
        backward(loss)
        total += loss.detach()
    return total


def train_step(model, optimizer, forward, micro_batches, valid, clip):
    """One optimizer step in full precision. Returns the loss and the gradient norm."""
    optimizer.zero_grad()
    total = accumulate(forward, micro_batches, valid)

    norm = grad_norm(model.parameters())
    if clip:
        clip_grads_with_norm_(model.parameters(), clip, norm)
    optimizer.step()
    return total, norm


class MasterWeights:
    """An optimizer for 16-bit parameters: it steps fp32 copies of them, the master weights.

    It rounds the model's parameters to `dtype` in place. With fp32_grads, the 16-bit gradients of
    each micro-batch are added up in fp32. Without, they add up in 16 bits, and exist in fp32 only
    during the update. A parameter without a gradient stays as it is, as in PyTorch's optimizers."""

    def __init__(self, model, make_optimizer, dtype, fp32_grads=False):
        self.parameters = list(model.parameters())
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]  # 4 bytes each
        for p, master in zip(self.parameters, self.masters):
            master.global_name, master.rounded = p.global_name, dtype
            p.data = p.data.to(dtype)                                               # 2
        self.optimizer = make_optimizer(self.masters)                               # 8 for AdamW
        self.fp32_grads = fp32_grads
        self.factor = 1.0                       # by which the last step multiplied the gradients

    def zero_grad(self):
        for p in (*self.parameters, *self.masters):
            p.grad = None

    def accumulate(self):
        """After the backward of a micro-batch: add its gradients to the fp32 sums."""
        if self.fp32_grads:
            self.add_to_masters()
            torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])

    def add_to_masters(self):
        for p, master in zip(self.parameters, self.masters):
            if p.grad is not None:
                first = master.grad is None
                master.grad = p.grad.float() if first else master.grad.add_(p.grad)     # 4

    def norm(self):
        return grad_norm(self.masters if self.fp32_grads else self.parameters)

    def step(self, factor):
        """Step the masters with `factor` times the gradients, and round them to the parameters."""
        self.factor = factor
        if not self.fp32_grads:
            self.add_to_masters()
        torch._foreach_mul_([m.grad for m in self.masters if m.grad is not None], factor)
        self.optimizer.step()
        torch._foreach_copy_([p.data for p in self.parameters], [m.data for m in self.masters])
        if not self.fp32_grads:
            for master in self.masters:
                master.grad = None

    def named_masters(self):
        """(name, fp32 parameter) pairs, with the gradients of the last step: what is compared."""
        for p, master in zip(self.parameters, self.masters):
            shown = nn.Parameter(master.detach())
            if p.grad is not None:
                shown.grad = master.grad if self.fp32_grads else p.grad.float() * self.factor
            yield master.global_name, shown


class LossScale:
    """fp16's loss scale: halved by an overflow, doubled by `patience` good steps in a row."""

    def __init__(self, value=2.0**16, patience=100):
        self.value, self.patience = value, patience
        self.good = 0                                           # steps in a row

    def update(self, overflow):
        self.good = 0 if overflow else self.good + 1
        if overflow:
            self.value /= 2
        elif self.good % self.patience == 0:
            self.value *= 2

    def state_dict(self):
        """What a checkpoint keeps, by the names of PyTorch's GradScaler."""
        return {"scale": self.value, "_growth_tracker": self.good % self.patience}

    def load_state_dict(self, saved):
        self.value, self.good = saved["scale"], saved["_growth_tracker"]


def mixed_step(masters, scale, forward, micro_batches, valid, clip):
    """The same step with 16-bit parameters and gradients. scale: fp16's LossScale, or None."""
    loss_scale = scale.value if scale else 1.0

    def backward(loss):
        (loss * loss_scale).backward()
        masters.accumulate()

    masters.zero_grad()
    total = accumulate(forward, micro_batches, valid, backward)

    norm = masters.norm() / loss_scale
    overflow = scale is not None and not norm.isfinite().item()         # the host waits for this
    if not overflow:
        limit = (clip / (norm + 1e-6)).clamp(max=1) if clip else 1
        masters.step(limit / loss_scale)        # where fp32 gradients are made, and clipped
    if scale:
        scale.update(overflow)
    return total, norm


def torch_step(model, optimizer, scaler, forward, micro_batches, valid, clip):
    """The same with PyTorch's tools: a GradScaler, and a forward under autocast, which keeps fp32
    parameters and rounds them inside each operator."""
    optimizer.zero_grad()
    total = accumulate(forward, micro_batches, valid, lambda loss: scaler.scale(loss).backward())

    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return total, norm


# ------------------------------------------------------------------------------------ the formulas

def parameters_by_part(cfg):
    """{part of the model: its parameters, of all layers}, which add up to cfg.parameters()."""
    h, kv = cfg.dim, cfg.dim * cfg.kv_heads // cfg.heads
    return {
        "embedding": cfg.vocab * h,
        "q and o": cfg.layers * 2 * h * h,
        "k and v": cfg.layers * 2 * h * kv,
        "MLP": cfg.layers * cfg.mlp(),                          # 2 or 3 matrices, h by ffn
        "norms": (2 * cfg.layers + 1) * (1 if cfg.gated else 2) * h,
        "head": 0 if cfg.tie else h * cfg.vocab,
    }


def kept_for_backward(cfg, batch):
    """What each block keeps, and what is kept around them, as (tensor, how many numbers, class);
    with plain attention, and nothing recomputed. The classes:

        outside           what a norm reads, outside of attention and MLP, and its numbers a token
        inputs            what a norm gives, and attention or the MLP reads
        inside            what a head has of its own, or a hidden feature of the MLP
        keys and values   what a kv head has of its own
        core              what a head has of its own for each pair of tokens
        positions         what a position has, whatever token stands there
        logits            what a word of the vocabulary has for each token
        ids               the tokens and targets themselves"""
    tokens = batch * cfg.seq
    x = tokens * cfg.dim                                        # one (batch, seq, dim)
    kv, hidden = x * cfg.kv_heads // cfg.heads, tokens * cfg.hidden
    statistics = (1 if cfg.gated else 2) * tokens               # 1/rms; mean and 1/std
    block = [
        ("input of norm1, and its numbers for each token", x + statistics, "outside"),
        ("output of norm1, input of q, k and v", x, "inputs"),
        ("q, turned by RoPE", x, "inside"),
        ("k, turned by RoPE, and v", 2 * kv, "keys and values"),
        ("output of softmax, the weights", tokens * cfg.heads * cfg.seq, "core"),
        ("input of o", x, "inside"),
        ("input of norm2, and its numbers for each token", x + statistics, "outside"),
        ("output of norm2, input of up, and of gate", x, "inputs"),
        ("output of up, input of GELU or SwiGLU", hidden, "inside"),
        ("output of GELU or SwiGLU, input of down", hidden, "inside"),
    ]
    if cfg.gated:
        block += [("output of gate", hidden, "inside"), ("silu(gate)", hidden, "inside")]
    around = [
        ("RoPE's cos and sin, for all blocks", cfg.seq * cfg.dim // cfg.heads, "positions"),
        ("input and output of the last norm, and its numbers", 2 * x + statistics, "outside"),
        ("log-probabilities, in fp32 or better, and a scalar", tokens * cfg.vocab + 1, "logits"),
        ("tokens and targets, which are there anyway", 2 * tokens, "ids"),
    ]
    return block, around


# What --recompute keeps: a share of each class, 1 where none is said; or each block's input alone.
KEPT = {"none": {}, "selective": {"core": 0}, "full": {"recompute": "full"},
        "every": {"recompute": "full"}, "offload": {"recompute": "offload"}}


def most_again(layers, k, of_input, of_layer):
    """The most bytes kept in backward, while it computes the last k layers again: the inputs of the
    groups, and what these layers keep, of which one is such an input. The known c·A_in +
    (L/c)·A_layer of c groups counts it twice (Korthikanti et al., section 5)."""
    return (math.ceil(layers / k) - 1) * of_input + k * of_layer


def best_k(layers, of_input, of_layer):
    """The k that keeps least then. (The FLOPs are the same.)"""
    return min(range(1, layers + 1), key=lambda k: most_again(layers, k, of_input, of_layer))


def offloaded(layers, of_input):
    """Bytes of a micro-batch that go to the host, and as many that come back."""
    return layers * of_input


def textbook_activation_bytes(cfg, batch):
    """The well-known s·b·h·(34 + 5·a·s/h) of one 16-bit block (Korthikanti et al., equation 1)."""
    return batch * cfg.seq * (34 * cfg.dim + 5 * cfg.heads * cfg.seq)


def textbook_difference(cfg, batch, statistic=2):
    """By how many bytes the textbook's block exceeds ours (plain, none, 16 bits), by reason.
    statistic: bytes of a LayerNorm's mean: 2 on a CPU, 4 on CUDA, which keeps them in float32."""
    x, scores = batch * cfg.seq * cfg.dim, batch * cfg.heads * cfg.seq**2
    return {
        "dropout, which we leave out": 2 * x + 3 * scores,      # 1-byte masks; dropped-out scores
        "k and v of the heads that GQA shares": 4 * (x - x * cfg.kv_heads // cfg.heads),
        "LayerNorm statistics, which it leaves out": -statistic * 2 * (2 * batch * cfg.seq),
    }


def step_flops(cfg, batch, attention, recompute, early_stop=False, k=1):
    """FLOPs of a step over `batch` sequences; of causal attention, the masked half counts too.
    early_stop: PyTorch's checkpoint ends as soon as it has all that backward reads, so it does not
    recompute the last matmul, whose output is not kept. k: blocks of a checkpoint."""
    tokens, s, h = batch * cfg.seq, cfg.seq, cfg.dim
    kv = h * cfg.kv_heads // cfg.heads
    linears = 2 * tokens * (h * (2 * h + 2 * kv) + cfg.mlp())   # q and o, k and v; of the MLP
    core = 2 * (2 * tokens * s * h)                             # q @ k.T and weights @ v
    head = 2 * tokens * h * cfg.vocab

    # Backward takes two matmuls for one; a fused core computes q @ k.T once more: 5 for 2. Ours,
    # in kernels/, is in two halves, which both compute that and dout @ v.T: 7 for 2.
    backward = 2 * linears + {"plain": 4, "sdpa": 5, "triton": 7}[attention] * core // 2
    again = {"none": 0, "selective": core}.get(recompute, linears + core)
    if early_stop and recompute == "selective" and attention == "plain":
        again -= core // 2                                      # weights @ v
    step = cfg.layers * (linears + core + backward + again) + 3 * head
    if early_stop and recompute not in ("none", "selective"):
        step -= math.ceil(cfg.layers / k) * 2 * tokens * h * cfg.hidden     # each group's last down
    return step


def model_flops(cfg, batch):
    """FLOPs that a step needs, without what we or a fused core compute again."""
    return step_flops(cfg, batch, "plain", "none")


def rule_of_thumb(cfg, batch):
    """6·N a token, with the parameters of an embedding, and without attention's scores."""
    return 6 * cfg.parameters() * batch * cfg.seq


# ----------------------------------------------------------------------------------------- the run

HALF = {"fp32": None, "bf16": torch.bfloat16, "bf16-fp32grad": torch.bfloat16,
        "fp16": torch.float16, "fp8": torch.bfloat16}
# Bytes of a parameter, of its gradients, and of its master weight, as in the lesson's table.
WIDTHS = {"bf16": (2, 2, 4), "bf16-fp32grad": (2, 2 + 4, 4), "fp16": (2, 2, 4), "fp8": (2, 2, 4)}
WATCHED = 3         # lab/ measures memory in these steps, at each operator: --compile begins after


def build(run):
    """The model, and its forward from tokens to logits, as the flags choose it."""
    args = run.args
    model = run.draw(gpt(args.model, seed=None))
    if args.kernels:
        from kernels.model import use_kernels
        CORES["triton"] = use_kernels(model)
        args.attention = "triton" if CORES["triton"] else args.attention
        if not CORES["triton"]:
            print("  --kernels: no GPU, or no Triton, for them here; all kernels are PyTorch's")
    if args.precision == "fp8":
        from kernels.fp8 import use_fp8
        args.fp8_kernels = use_fp8(model, args.scaling or "tile")
        if not args.fp8_kernels:
            print("  --precision fp8: no GPU with FP8, or no Triton, here: all in plain PyTorch")
    choose_core(model, args.attention, args.recompute)
    return model, functools.partial(logits_of, model, recompute=args.recompute, k=args.k)


def train(run):
    args, half = run.args, HALF[run.args.precision]
    model, eager = build(run)
    if not half:
        optimizer = run.optimizer(model.parameters())
        return take_steps(run, model, eager, functools.partial(train_step, model, optimizer))

    scale = LossScale(args.loss_scale) if half == torch.float16 else None
    remembered = {"loss_scale": scale} if scale else {}
    make_optimizer = functools.partial(run.optimizer, **remembered)
    masters = MasterWeights(model, make_optimizer, half, args.precision == "bf16-fp32grad")
    take_steps(run, model, eager, functools.partial(mixed_step, masters, scale), masters)


def train_torch(run):
    args, half = run.args, HALF[run.args.precision]
    model, eager = build(run)
    if half:
        eager = torch.autocast(run.device.type, half)(eager)
    scaler = torch.amp.GradScaler(run.device.type, args.loss_scale, enabled=half == torch.float16)
    optimizer = run.optimizer(model.parameters(), loss_scale=scaler)
    take_steps(run, model, eager, functools.partial(torch_step, model, optimizer, scaler))


def take_steps(run, model, eager, step, masters=None):
    """Train: step(forward, micro_batches, valid, clip) takes one step. eager: the forward, for
    --compile to compile. masters: the MasterWeights, where such are updated."""
    args, fast = run.args, eager
    for taken, batch in enumerate(run.batches()):
        if args.compile and taken == WATCHED:
            fast = compiled(eager, batch)
        with run.measure():
            loss, norm = step(fast, batch.micro_batches, batch.valid, args.clip)
        skipped = args.precision == "fp16" and not norm.isfinite().item()
        run.log(batch, loss, norm, model, masters and masters.named_masters(), skipped)


def compiled(forward, batch):
    """`forward` under torch.compile, tried out once; where that fails, `forward` as it is."""
    fast = torch.compile(forward)
    tokens, targets = batch.micro_batches[0]
    try:
        loss_sum(fast(tokens), targets).backward()
    except Exception as error:          # a compiler that is missing has many names
        why = str(error).strip().splitlines()[0]
        print(f"  --compile does not work here, so eager it is: {why}")
        return forward
    return fast


def formulas(args, rank, ranks, model):
    """What lab/ holds the run to, by the keys that lab/run/formulas.py explains."""
    cfg, n, width = args.model, args.model.parameters(), common.DTYPES[args.dtype].itemsize
    half = HALF[args.precision]
    mixed = args.variant == "hand" and half                             # autocast keeps fp32
    computed = step_flops(cfg, args.batch, args.attention, args.recompute, True, args.k)
    return {
        "parameters": n,
        "widths": WIDTHS[args.precision] if mixed else (width, width, 0),
        "most gradients": n * (2 + 4 if mixed else width),
        "settings": {"choose": choose_core, "forward": logits_of, "kept": KEPT,
                     "flops": step_flops, "most again": most_again, "best k": best_k,
                     "offloaded": offloaded, "parts": parameters_by_part, "rule": rule_of_thumb,
                     "textbook": (textbook_activation_bytes, textbook_difference),
                     "autocast": half if args.variant == "torch" else None,
                     "width": half.itemsize if half else width},
        "sent": {},                                             # one GPU has nobody to send to
        "utilization": {"mfu": model_flops(cfg, args.batch), "hfu": computed},
        "sample": functools.partial(logits_of, model, recompute="none"),
    }


def requires(args, ranks):
    common.split_batch(args, 1)
    if ranks > 1:
        raise Refused(f"--nproc_per_node {ranks}: this is about one GPU", "--nproc_per_node 1")
    if HALF[args.precision] and args.dtype != "float32":
        raise Refused(f"--precision {args.precision} rounds float32, and --dtype is {args.dtype}",
                      "--dtype float32")
    if not 1 <= args.k <= args.model.layers or args.k > 1 and args.recompute != "every":
        raise Refused(f"--k {args.k}: of --recompute every, 1 to {args.model.layers}", "--k 1")
    if args.compile and args.steps <= WATCHED:
        raise Refused(f"--steps {args.steps} end before --compile begins", f"--steps {WATCHED + 1}")
    if args.variant == "torch" and args.precision in ("bf16-fp32grad", "fp8"):
        raise Refused(f"--precision {args.precision} is for --variant hand: autocast has none, and "
                      "its gradients are fp32 in any case", "--precision bf16")
    if args.scaling and args.precision != "fp8":
        raise Refused(f"--scaling {args.scaling} is of --precision fp8", "--precision fp8")
    if args.kernels and args.dtype == "float64":
        raise Refused("--kernels compute in float32, not in float64", "--dtype float32")
    dim, heads = args.model.dim, args.model.heads
    if args.kernels and (dim > 16384 or not 16 <= dim // heads <= 256):
        raise Refused(f"--kernels take a --dim up to 16384, in heads of 16 to 256, not {dim} in "
                      f"{heads} heads of {dim // heads}", "--dim 128 --heads 4")


def flags(parser):
    add = parser.add_argument
    add("--kernels", action="store_true", help="on a GPU: norms, SwiGLU and attention of kernels/")
    add("--recompute", choices=KEPT, default="none")
    add("--k", type=int, default=1, help="blocks that --recompute every computes again together")
    add("--precision", choices=HALF, default="fp32")
    add("--scaling", choices=("tensor", "row", "tile"), help="of fp8's scales; default: tile")
    add("--loss-scale", type=float, default=2.0**16, help="where fp16's loss scale starts")
    add("--compile", action="store_true", help="where it works, after the steps of the picture")
    parser.set_defaults(steps=300)


VARIANTS = {"hand": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags, formulas)
