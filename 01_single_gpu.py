r"""01 · One GPU: what a training step holds and does.

Everything in this course is an answer to "it does not fit" or "it takes too long". So first: what
is it that has to fit, and what takes the time? A step is three acts:

    forward      tokens -> logits -> loss         leaves behind ACTIVATIONS, kept for backward
    backward     loss -> a gradient each          eats the activations, leaves behind GRADIENTS
    optimizer    gradients -> new parameters      reads and writes PARAMETERS and OPTIMIZER STATES

    bytes            ___
       |           _/   \__
       |         _/        \__           activations pile up in forward, backward uses them up
       |       _/   __________\______
       |     _/____/                 |   gradients come in backward, and go when a step begins
       |____/________________________|_  optimizer states come with the first step, and stay
       |_______________________________  parameters
            forward    backward   optimizer

The first step differs from all others: its optimizer states only appear at its end. (On a GPU it is
also slower: PyTorch has yet to get its memory from the driver, and keeps it from then on.) A run
draws this picture from what it measured.

Model states (bytes per parameter)

    --precision      parameters  gradients  optimizer states (AdamW)      sum
    fp32                 4           4      4 + 4          two moments     16
    bf16, fp16           2           2      4 + 4 + 4      master weights  16
    bf16-fp32grad        2         2 + 4    4 + 4 + 4                      20

Mixed precision saves nothing in this table. It buys fast 16-bit matmuls, and halves what the blocks
keep of activations (the loss stays in fp32, and with a large vocabulary that is much). It needs the
fp32 master copy because bf16 keeps 8 bits of a number: an update below 1/512 of a weight rounds
away. fp16 has 11 bits but a narrow range, so small gradients vanish: the loss is multiplied by a
scale before backward, and the gradients are divided by it after. Too large a scale shows up as inf:
that step is skipped and the scale halved. After a run of good steps it is doubled.

A run with --precision in 16 bits is compared with one GPU in fp32. (In --dtype bfloat16 all is 16
bits, and so is the run on one GPU.) Losses, means over many tokens, agree to 5e-3 in bf16 and 1e-3
in fp16. A gradient is a sum over tokens whose terms cancel, so its rounding errors are large
beside what is left: 0.4 and 0.05 of its largest element, and in the first step alone, since from
there on the two runs have other weights. AdamW's parameters are not compared: it moves one as far
for a tiny gradient as for a large one, so a wrong sign of a tiny one counts in full.

Gradient accumulation (--micro-batch) cuts the batch into micro-batches, which run one after the
other and add up their gradients: activations shrink, nothing else changes. The one trap: each
micro-batch divides its SUM of losses by the valid targets of the WHOLE batch. A mean of
micro-batch means weighs a target in a half-empty micro-batch twice.

Recomputation (--recompute) keeps less and computes it again in backward:

    none        keeps all that backward reads
    selective   drops what grows with seq^2, the attention core, and recomputes only that
    full        keeps the input of each block and runs the block's forward again: about 4/3 of
                the FLOPs, for the activations of one block at a time

Fused attention (--attention sdpa) makes the selective choice inside its kernel: it keeps one number
a row in place of the scores. Where such a kernel runs, "selective" gains next to nothing. --kernels
takes our own, kernels/flash_attention.py and kernels/layernorm.py, on a GPU.

FLOPs: a matmul of (m, k) by (k, n) takes 2mkn, and backward two more of that size. So a step takes
about 6 FLOPs per parameter and token, and attention 12 · layers · dim · seq per token on top. MFU
divides that by the time and the chip's peak; HFU counts what was recomputed as well. Recomputing
more can raise HFU, never MFU, which makes MFU the honest one.

Run it:
    python 01_single_gpu.py                                  300 steps, a picture, a sample of text
    python 01_single_gpu.py --micro-batch 2 --recompute full --attention sdpa --steps 10
    python 01_single_gpu.py --precision bf16-fp32grad --steps 10
    python 01_single_gpu.py --preset gpt2 --precision bf16 --attention sdpa       (on a GPU)

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
sections 4 and 5; Micikevicius et al., Mixed Precision Training (2018), section 3; Chowdhery et al.,
PaLM (2022), appendix B (MFU); Ultra-Scale Playbook, "First Steps: Training on One GPU".
"""

import contextlib
import functools
import itertools
import math
import statistics
import time
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import common
from common import clip_grads, clip_scale, gpt, grad_norm, loss_sum, nbytes, quantity

# ------------------------------------------------------------------------------------- the forward

CORES = {"plain": common.plain_attention, "sdpa": common.sdpa_attention}
RECOMPUTE = ("none", "selective", "full")
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class KernelLayerNorm(nn.Module):
    """kernels/layernorm.py in the place of an nn.LayerNorm, with its weight and bias."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x):
        from kernels.layernorm import layer_norm

        return layer_norm(x, self.weight, self.bias, self.eps)


def kernels_run(device):
    """Whether Triton can run on the device: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from kernels.flash_attention import interpreted, triton

    return triton is not None and (device.type == "cuda" or interpreted())


def use_kernels(model):
    """Put our Triton LayerNorms into the model, and flash attention into CORES, as "triton"."""
    from kernels.flash_attention import flash_attention

    CORES["triton"] = flash_attention
    for block in model[1:-1]:
        block.norm1, block.norm2 = KernelLayerNorm(block.norm1), KernelLayerNorm(block.norm2)
    model[-1].norm = KernelLayerNorm(model[-1].norm)


def set_core(model, attention, recompute):
    """Choose the attention core; a "selective" one keeps only q, k and v, and runs twice."""
    core = CORES[attention]
    for block in model[1:-1]:
        block.attn.core = functools.partial(recomputed, core) if recompute == "selective" else core


def forward(model, tokens, recompute):
    """Tokens (batch, seq) to logits (batch, seq, vocab). The model is a list, so walk it."""
    x = model[0](tokens)                                        # (batch, seq, dim)
    for block in model[1:-1]:
        x = recomputed(block, x) if recompute == "full" else block(x)
    return model[-1](x)


# ---------------------------------------------------------------------------------------- the step


def accumulate(forward, micro_batches, valid, backward=torch.Tensor.backward):
    """Add up the gradients of all micro-batches in p.grad. Returns the loss of the whole batch.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets
    of the whole batch; every micro-batch divides by them, and not by its own.
    """
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid
        backward(loss)                                          # adds to p.grad
        total += loss.detach()
    return total


def train_step(model, optimizer, forward, micro_batches, valid, clip):
    """One optimizer step in full precision. Returns the loss and the gradient norm."""
    optimizer.zero_grad()
    total = accumulate(forward, micro_batches, valid)

    norm = grad_norm(model.parameters())
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


class MasterWeights:
    """An optimizer for 16-bit parameters: it steps fp32 copies of them, the master weights.

    It rounds the model's parameters to `dtype` in place. With fp32_grads, the 16-bit gradients of
    each micro-batch are added up in fp32. Without, they add up in 16 bits, and become fp32 one
    parameter at a time: hence an optimizer for each. Frozen parameters only become 16-bit, and one
    that got no gradient is left as it is, as PyTorch's optimizers do.
    """

    def __init__(self, model, make_optimizer, dtype, fp32_grads=False):
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*trained)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]  # 4 bytes each
        self.optimizers = [make_optimizer([master]) for master in self.masters]     # 8 for AdamW
        self.fp32_grads, self.factor = fp32_grads, 1.0
        for p in model.parameters():
            p.data = p.data.to(dtype)                                               # 2

    def zero_grad(self):
        for p in (*self.parameters, *self.masters):
            p.grad = None

    def accumulate(self):
        """After the backward of a micro-batch: add its gradients to the fp32 sums."""
        for p, master in zip(self.parameters, self.masters):
            if self.fp32_grads and p.grad is not None:
                sums = torch.zeros_like(master) if master.grad is None else master.grad
                master.grad = sums.add_(p.grad)                                     # 4
                p.grad.zero_()

    def norm(self):
        return grad_norm(self.masters if self.fp32_grads else self.parameters)

    def step(self, factor):
        """Step the masters with `factor` times the gradients, and round them to the parameters."""
        self.factor = factor
        for p, master, optimizer in zip(self.parameters, self.masters, self.optimizers):
            if p.grad is None:
                continue
            master.grad = (master.grad if self.fp32_grads else p.grad.float()).mul_(factor)
            optimizer.step()
            p.data.copy_(master.data)
            if not self.fp32_grads:
                master.grad = None

    def held(self):
        """The tensors that stay between two steps: parameters, gradients, optimizer states."""
        gradients = [x.grad for x in (*self.parameters, *self.masters)]
        moments = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return self.parameters, gradients, [self.masters, moments]

    def named_masters(self):
        """(name, fp32 parameter) pairs, with the gradients of the last step: for the verifier."""
        for name, p, master in zip(self.names, self.parameters, self.masters):
            shown = nn.Parameter(master.detach())
            if p.grad is not None:
                shown.grad = master.grad if self.fp32_grads else p.grad.float() * self.factor
            yield name, shown


class LossScale:
    """fp16's loss scale: halved by an overflow, doubled by `patience` good steps in a row."""

    def __init__(self, value=2.0**16, patience=100):
        self.value, self.patience, self.good, self.skipped = value, patience, 0, 0

    def update(self, overflow):
        if overflow:
            self.value, self.good, self.skipped = self.value / 2, 0, self.skipped + 1
        else:
            self.good += 1
            if self.good % self.patience == 0:
                self.value *= 2


def mixed_step(masters, scale, forward, micro_batches, valid, clip):
    """The same step with 16-bit parameters and gradients. scale: fp16's LossScale, or None."""
    factor = scale.value if scale else 1.0

    def backward(loss):
        (loss * factor).backward()
        masters.accumulate()

    masters.zero_grad()
    total = accumulate(forward, micro_batches, valid, backward)

    norm = masters.norm() / factor
    overflow = scale is not None and not norm.isfinite().item()         # the host waits for this
    if not overflow:
        masters.step(clip_scale(norm, clip) / factor if clip else 1 / factor)
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


def model_state_bytes(cfg, precision, optimizer, width=4):
    """Bytes of parameters, gradients and optimizer states. width: bytes of fp32, or of --dtype."""
    n, tensors = cfg.parameters(), 10 * cfg.layers + (3 if cfg.tie else 4)
    adamw = 2 * width * n + 4 * tensors                         # two moments; a step count each
    moments = {"adamw": adamw, "momentum": width * n, "sgd": 0}[optimizer]
    if precision == "fp32":
        return {"parameters": width * n, "gradients": width * n, "optimizer states": moments}
    sums = 4 * n if precision == "bf16-fp32grad" else 0
    masters = 4 * n
    return {"parameters": 2 * n, "gradients": 2 * n + sums, "optimizer states": masters + moments}


def block_activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes that a block keeps for backward, on a CPU. batch: sequences; e: bytes a number."""
    x = batch * cfg.seq * cfg.dim * e                           # one (batch, seq, dim)
    kv = x * cfg.kv_heads // cfg.heads
    rows = batch * cfg.heads * cfg.seq
    scores, log_sum_exp = rows * cfg.seq * e, rows * max(e, 4)
    core = 0 if recompute == "selective" else scores if attention == "plain" else x + log_sum_exp

    norms = 2 * (x + layer_norm_statistics(cfg, batch, e) + x)  # two: input, statistics, output
    attn = rope_tables(cfg, e) + x + 2 * kv + core + x          # q, k and v, the core, o's input
    mlp = 4 * x + 4 * x                                         # GELU's input and output
    return x if recompute == "full" else norms + attn + mlp


def layer_norm_statistics(cfg, batch, e):
    return 2 * batch * cfg.seq * e                              # mean and 1/std of each token


def rope_tables(cfg, e):
    return 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * e        # cos and sin, for q and for k


def activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes kept for backward by the whole forward and its loss, on a CPU."""
    x, wide = batch * cfg.seq * cfg.dim * e, max(e, 4)          # the loss works in fp32 or better
    norm = x + layer_norm_statistics(cfg, batch, e) + x
    loss = batch * cfg.seq * cfg.vocab * wide + wide            # log-probabilities, and a scalar
    return cfg.layers * block_activation_bytes(cfg, batch, attention, recompute, e) + norm + loss


def textbook_activation_bytes(cfg, batch):
    """The well-known s·b·h·(34 + 5·a·s/h) of one 16-bit block (Korthikanti et al., equation 1)."""
    return batch * cfg.seq * (34 * cfg.dim + 5 * cfg.heads * cfg.seq)


def textbook_difference(cfg, batch):
    """By how many bytes the textbook's block exceeds ours (plain, none, 16 bits), by reason."""
    x, scores = batch * cfg.seq * cfg.dim, batch * cfg.heads * cfg.seq**2
    norms, rope = 2 * layer_norm_statistics(cfg, batch, 2), rope_tables(cfg, 2)
    return {
        "dropout, which we leave out": 2 * x + 3 * scores,      # 1-byte masks; dropped-out scores
        "k and v of the heads that GQA shares": 4 * (x - x * cfg.kv_heads // cfg.heads),
        "LayerNorm statistics and RoPE tables, which it leaves out": -norms - rope,
    }


def step_flops(cfg, batch, attention, recompute, early_stop=False):
    """FLOPs of a step over `batch` sequences; of causal attention, the masked half counts too.

    early_stop: PyTorch's checkpoint stops recomputing once it has all that backward reads, and so
    skips the last matmul of what it recomputes: nobody kept its output.
    """
    tokens, s, h = batch * cfg.seq, cfg.seq, cfg.dim
    kv = h * cfg.kv_heads // cfg.heads
    linears = 2 * tokens * h * (2 * h + 2 * kv + 8 * h)         # q and o, k and v, up and down
    core = 2 * (2 * tokens * s * h)                             # q @ k.T and weights @ v
    head = 2 * tokens * h * cfg.vocab

    # Backward takes two matmuls for one; a fused core computes q @ k.T once more: 5 for 2. Ours,
    # in kernels/, is in two halves, which both compute that and dout @ v.T: 7 for 2.
    backward = 2 * linears + {"plain": 4, "sdpa": 5, "triton": 7}[attention] * core // 2
    again = {"none": 0, "selective": core, "full": linears + core}[recompute]
    if early_stop and recompute == "full":
        again -= 2 * tokens * 4 * h * h                         # down
    if early_stop and recompute == "selective" and attention == "plain":
        again -= core // 2                                      # weights @ v
    return cfg.layers * (linears + core + backward + again) + 3 * head


def model_flops(cfg, batch):
    """FLOPs that a step needs, however it is computed: fused attention recomputes its scores too,
    which no more counts here than our recomputation."""
    return step_flops(cfg, batch, "plain", "none")


def rule_of_thumb(cfg, batch):
    """6·N a token: N leaves out attention's scores, and has an untied embedding, which multiplies
    nothing."""
    return 6 * cfg.parameters() * batch * cfg.seq


# Dense bf16 FLOP/s of SXM modules (PCIe cards are slower), by CUDA's name of the device. Source:
# the data sheets at nvidia.com/en-us/data-center/ a100, h100, h200 and dgx-b200 (for 8 GPUs). From
# the H100 on they give the rate for sparse matrices, which is twice the dense one.
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def utilization(flops, seconds, gpu):
    """The share of the GPU's peak: MFU for the model's FLOPs, HFU for all that were computed."""
    return flops / seconds / PEAK_FLOPS[gpu]


# -------------------------------------------------------------------------------- the measurements


def measure_activations(model, forward, tokens, targets):
    """Bytes that autograd holds at the end of one forward of tokens, targets (micro_batch, seq)."""
    meter = common.ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
    with meter:
        loss_sum(forward(tokens), targets)
    return meter.bytes


def measure_flops(forward, tokens, targets, early_stop=False):
    """FLOPs of one forward and backward by PyTorch's counter.

    It must be told of the CPU's fused attention, and in torch 2.11 of CUDA's with grouped queries.
    """
    from torch.utils.flop_counter import FlopCounterMode

    def matmuls(how_many, q, k):
        (batch, heads, rows, head_dim), columns = q, k[2]
        return how_many * 2 * batch * heads * rows * columns * head_dim

    known = {}
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention",
                   "cudnn_attention"):
        forward_op, backward_op = (getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{suffix}")
                                   for suffix in ("", "_backward"))
        known[forward_op] = lambda q, k, *rest, **more: matmuls(2, q, k)
        known[backward_op] = lambda grad, q, k, *rest, **more: matmuls(5, q, k)

    counter = FlopCounterMode(display=False, custom_mapping=known)
    with set_checkpoint_early_stop(early_stop), counter:
        loss_sum(forward(tokens), targets).backward()
    return counter.get_total_flops()


class MemoryTimeline(TorchDispatchMode):
    """Adds up the storages that are alive, by kind, after every operator that changed their sum.

    held() returns lists of tensors: parameters, gradients, optimizer states. samples: (seconds in
    operators so far, bytes of each of the three, bytes of all else); all else is activations and
    what an operator needs for a moment.
    """

    def __init__(self, held):
        super().__init__()
        self.held, self.live, self.total, self.sampled = held, {}, 0, 0
        self.samples, self.seconds = [], 0.0
        self.watch(held())

    def watch(self, tensors):
        for tensor in tree_leaves(tensors):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in self.live:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = storage.nbytes()
                self.total += storage.nbytes()
                weakref.finalize(storage, self.forget, storage._cdata)

    def forget(self, key):
        self.total -= self.live.pop(key)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds += time.perf_counter() - start
        self.watch(result)
        if self.total != self.sampled:
            kinds = [nbytes(tensors) for tensors in self.held()]
            self.samples.append((self.seconds, *kinds, self.total - sum(kinds)))
            self.sampled = self.total
        return result


def draw(timeline, path, title):
    """Draw the bytes of each kind over time, stacked."""
    from matplotlib.figure import Figure

    seconds, parameters, gradients, states, activations = zip(*timeline.samples)
    kinds = parameters, states, gradients, activations
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot([1e3 * t for t in seconds], [[b / 1e6 for b in kind] for kind in kinds],
                   labels=("parameters", "optimizer states", "gradients",
                           "activations, and what an operator needs for a moment"),
                   colors=("#355070", "#6d597a", "#e56b6f", "#eaac8b"))
    axes.set(xlabel="time in operators (ms)", ylabel="MB", title=title)
    axes.margins(x=0)
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


# ----------------------------------------------------------------------------------------- the run

HALF = {"fp32": None, "bf16": torch.bfloat16, "bf16-fp32grad": torch.bfloat16,
        "fp16": torch.float16}
WATCHED_STEPS = 3       # how many steps the picture shows


def train(args, device, text, run):
    """Train for --steps steps, check the model states. Returns model, forward and timeline."""
    half, cfg = HALF[args.precision], args.model
    mixed, by_torch = half and args.variant == "hand", args.variant == "torch"
    model = gpt(cfg, args.seed, device, common.DTYPES[args.dtype])
    if args.attention == "triton":
        use_kernels(model)
    elif args.kernels:
        run.say("  --kernels: no GPU, or no Triton, for them here; LayerNorm and attention are "
                "PyTorch's")
    set_core(model, args.attention, args.recompute)
    autocast = torch.autocast(device.type, half or torch.bfloat16, enabled=bool(half and by_torch))

    def model_forward(tokens, recompute=args.recompute):
        with autocast:
            return forward(model, tokens, recompute)

    make_optimizer = functools.partial(common.OPTIMIZERS[args.optimizer], lr=args.lr)
    scale = LossScale(args.loss_scale) if half == torch.float16 else None
    if mixed:
        masters = MasterWeights(model, make_optimizer, half, args.precision == "bf16-fp32grad")
        step = functools.partial(mixed_step, masters, scale)
    else:
        optimizer = make_optimizer(model.parameters())
        step = functools.partial(train_step, model, optimizer)
    if by_torch:
        scaler = torch.amp.GradScaler(device.type, args.loss_scale, enabled=scale is not None)
        step = functools.partial(torch_step, model, optimizer, scaler)

    def held():
        if mixed:
            return masters.held()
        parameters = list(model.parameters())
        return parameters, [p.grad for p in parameters], list(optimizer.state.values())

    step_forward, timeline = model_forward, MemoryTimeline(held)
    if args.compile:
        step_forward = compiled(model_forward, *first_micro_batch(args, device, text), run.say)
    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)
        pieces = [x.to(device).split(args.micro_batch) for x in (tokens, targets)]
        watcher, run_forward = contextlib.nullcontext(), step_forward
        if i < WATCHED_STEPS:           # a dispatch mode would turn compiled code eager for good
            watcher, run_forward = timeline, model_forward
        with run.measure(i), watcher:
            loss, norm = step(run_forward, list(zip(*pieces)), valid, args.clip)
        shown = masters.named_masters() if mixed else model.named_parameters()
        run.log(i, batch, loss, norm, shown, skipped=bool(scale and not norm.isfinite()))

    run.check_comm({})                              # one GPU has nobody to send to
    width = common.DTYPES[args.dtype].itemsize
    formula = model_state_bytes(cfg, args.precision, args.optimizer, width)
    for kind, tensors in zip(formula, held()):
        run.check(kind, nbytes(tensors), None if by_torch else formula[kind])
    if mixed and scale:
        run.note(f"loss scale {scale.value:.0f} in the end; {scale.skipped} steps skipped")
    return model, model_forward, timeline


def first_micro_batch(args, device, text):
    return [x[: args.micro_batch].to(device) for x in text.batch(0)[:2]]


def compiled(forward, tokens, targets, say):
    """`forward` under torch.compile, tried out once; where that fails, `forward` as it is."""
    fast = torch.compile(forward)
    try:
        loss_sum(fast(tokens), targets).backward()
    except Exception as error:          # a compiler that is missing has many names
        say(f"  --compile does not work here, so eager it is: {str(error).strip().splitlines()[0]}")
        return forward
    return fast


def report(args, device, text, run, model, model_forward):
    """Check activations and FLOPs against their formulas, and note what explains them."""
    cfg, b, on_cpu = args.model, args.micro_batch, device.type == "cpu"
    e = next(model.parameters()).element_size()
    autocast = args.variant == "torch" and HALF[args.precision]     # keeps others: no formula
    batch = first_micro_batch(args, device, text)

    chosen, off = (args.attention, args.recompute), 0
    every = on_cpu and args.preset == "tiny" and args.attention != "triton"
    for attention, recompute in itertools.product(CORES, RECOMPUTE) if every else [chosen]:
        set_core(model, attention, recompute)
        forward = functools.partial(model_forward, recompute=recompute)
        kept = measure_activations(model, forward, *batch)
        formula = None if autocast else activation_bytes(cfg, b, attention, recompute, e)
        run.check(f"kept per micro-batch: {attention}, {recompute}", kept, formula, exact=on_cpu)
        off = 0 if autocast else max(off, abs(kept - formula))
        if attention == "triton":
            run.note("computed: PyTorch's counter does not see the FLOPs of Triton's kernels")
            continue
        for early_stop in (False, True):
            formula = step_flops(cfg, args.batch, attention, recompute, early_stop)
            if early_stop and formula == step_flops(cfg, args.batch, attention, recompute):
                continue                            # nothing to stop early
            measured = args.batch // b * measure_flops(forward, *batch, early_stop)
            name = f"computed: {attention}, {recompute}{', early stop' * early_stop}"
            run.check(name, measured, formula, "FLOP", exact=on_cpu)
    set_core(model, *chosen)
    if off and not on_cpu:
        run.note("kept: CUDA's kernels keep other tensors than the CPU's, which the formula is of; "
                 f"up to {quantity(off)} away")

    ours = block_activation_bytes(cfg, b, "plain", "none", 2)
    run.note(f"a block in 16 bits keeps {quantity(ours)}; the textbook's s·b·h·(34 + 5·a·s/h) is "
             f"{quantity(textbook_activation_bytes(cfg, b))}:")
    for reason, size in textbook_difference(cfg, b).items():
        if size:
            run.note(f"  {quantity(size):>10} {reason}")

    needed = model_flops(cfg, args.batch)
    full = [step_flops(cfg, args.batch, "plain", "full", stop) for stop in (False, True)]
    run.note(f"recomputing every block takes {full[0] / needed:.2f} times the FLOPs, "
             f"{full[1] / needed:.2f} times where the checkpoint stops early, as in training")
    embedding = "" if cfg.tie else "has the embedding, which multiplies nothing, and "
    run.note(f"6·N·tokens is {rule_of_thumb(cfg, args.batch) / needed:.2f} of the FLOPs: N "
             f"{embedding}leaves out attention's scores")
    if args.steps <= WATCHED_STEPS:                 # the picture's steps are slow
        return
    seconds = statistics.median(run.seconds[WATCHED_STEPS:])
    run.note(f"{args.batch * cfg.seq / seconds:,.0f} tokens/s")
    gpu = "" if on_cpu else torch.cuda.get_device_name(device)
    if gpu in PEAK_FLOPS:
        computed = step_flops(cfg, args.batch, *chosen, early_stop=True)
        run.note(f"MFU {utilization(needed, seconds, gpu):.1%}, HFU "
                 f"{utilization(computed, seconds, gpu):.1%} of the {PEAK_FLOPS[gpu] / 1e12:.0f} "
                 f"TFLOP/s of {gpu} in bf16")
    elif gpu:
        run.note(f"no MFU: PEAK_FLOPS has no {gpu}")


@torch.no_grad()
def sample(model, prompt, length=160, temperature=0.7):
    """Let the model continue a text, token by token. Returns all tokens, the prompt's first."""
    generator, tokens = torch.Generator().manual_seed(0), list(prompt)
    device, seq = model[0].weight.device, len(model[1].attn.positions)
    for _ in range(length):
        logits = forward(model, torch.tensor([tokens[-seq:]], device=device), "none")[0, -1]
        probabilities = (logits.float().cpu() / temperature).softmax(0)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return tokens


def printable(tokens):
    """Byte tokens as text, in which whatever a terminal could stumble over is a dot."""
    text = bytes(min(token, 255) for token in tokens).decode("latin-1")
    return "".join(c if c == "\n" or c.isascii() and c.isprintable() else "·" for c in text)


def main(argv=None):
    parser = common.parser(__file__, __doc__, ("hand", "torch"), default="hand", steps=300)
    parser.add_argument("--attention", choices=("plain", "sdpa"), default="plain")
    parser.add_argument("--kernels", action="store_true",
                        help="on a GPU: LayerNorm and, in place of --attention, that from kernels/")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--precision", choices=HALF, default="fp32")
    parser.add_argument("--loss-scale", type=common.number(float, 1, example=65536),
                        default=2.0**16, help="where fp16's loss scale starts")
    parser.add_argument("--compile", action="store_true",
                        help="torch.compile where it works, after the steps of the picture")
    parser.set_defaults(plot="runs/01_single_gpu.png")
    args = common.parse(parser, argv)
    common.split_batch(args, ranks=1)
    if common.environment("WORLD_SIZE", 1) > 1:
        common.refuse(f"--nproc_per_node {common.environment('WORLD_SIZE', 1)}: this chapter "
                      "trains on one GPU; 1 would work")
    if HALF[args.precision] and args.dtype != "float32":
        common.refuse(f"--precision {args.precision} rounds float32, and --dtype is {args.dtype}; "
                      "--dtype float32 would work")
    if args.compile and args.steps <= WATCHED_STEPS:
        common.refuse(f"--steps {args.steps} ends before --compile comes in, after the steps of "
                      f"the picture; {WATCHED_STEPS + 1} would work")
    if args.variant == "torch" and args.precision == "bf16-fp32grad":
        common.refuse("--precision bf16-fp32grad is for --variant hand: autocast's gradients are "
                      "fp32 in any case; bf16 would work")
    if args.kernels and args.dtype == "float64":
        common.refuse("--kernels compute in float32, and --dtype is float64; --dtype float32 would "
                      "work")
    dim, heads = args.model.dim, args.model.heads
    if args.kernels and (dim > 16384 or not 16 <= dim // heads <= 256):
        common.refuse(f"--kernels take a --dim up to 16384, in heads of 16 to 256; --dim {dim} in "
                      f"{heads} heads of {dim // heads} is not; --dim 128 --heads 4 would work")
    text = common.Text(args)
    ranks = common.start(args)

    if args.kernels and kernels_run(ranks.device):
        args.attention = "triton"
    build = functools.partial(gpt, args.model, args.seed, ranks.device, common.DTYPES[args.dtype])
    half = HALF[args.precision]
    precision = args.precision if half else args.dtype
    how = f"precision {precision}, attention {args.attention}, recompute {args.recompute}"
    run = common.Run(args, ranks, text, build, how, half and str(half).removeprefix("torch."))
    model, model_forward, timeline = train(args, ranks.device, text, run)
    report(args, ranks.device, text, run, model, model_forward)

    last = run.loss[-20:]
    run.note(f"mean loss of the last {len(last)} steps: {statistics.mean(last):.3f} nats per token")
    draw(timeline, args.plot, f"The first steps ({how}): optimizer states come with the first")
    run.note(f"picture: {args.plot}")
    if text.tokens.itemsize == 1 and math.isfinite(last[-1]):
        written = printable(sample(model, text.tokens[:8].tolist())).splitlines()
        run.note("what it writes by now:" + "".join(f"\n    | {line}" for line in written))
    return run.finish()


if __name__ == "__main__":
    common.launch(main)
