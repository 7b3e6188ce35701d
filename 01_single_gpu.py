"""01 · One GPU: what a training step holds and does.

Everything in this course is an answer to "it does not fit" or "it takes too long". So first: what
is it that has to fit, and what takes the time? A step is three acts:

    forward      tokens -> logits -> loss         leaves behind ACTIVATIONS, kept for backward
    backward     loss -> a gradient each          eats the activations, leaves behind GRADIENTS
    optimizer    gradients -> new parameters      reads and writes PARAMETERS and OPTIMIZER STATES

    memory     ____activations_____
              /                    \\____          time runs to the right: activations pile up in
             /                          \\___      forward and are used up in backward, while the
    ________/   gradients pile up  ________\\__    gradients appear; the states below never go away
    parameters, optimizer states
            |  forward |     backward     | optimizer

Model states (bytes per parameter, N parameters)

    --precision      parameters  gradients  optimizer states (AdamW)      sum
    fp32                 4           4      4 + 4          two moments     16
    bf16, fp16           2           2      4 + 4 + 4      master weights  16
    bf16-fp32grad        2         2 + 4    4 + 4 + 4                      20

Mixed precision saves no memory here: it buys fast 16-bit matmuls and halves the activations. It
needs the fp32 master copy because an update smaller than 1/256 of a bf16 weight would round away.
fp16 has more digits but a narrow range, so small gradients vanish; the loss is multiplied by a
scale before backward and the gradients divided by it after. A scale that is too large shows up as
inf: that step is skipped and the scale halved. After a run of good steps it is doubled.

Gradient accumulation (--micro-batch) cuts the batch into micro-batches, which run one after the
other and add up their gradients: activations shrink, nothing else changes. The one trap: each
micro-batch divides its SUM of losses by the valid targets of the WHOLE batch. A mean of
micro-batch means weighs a target in a half-empty micro-batch twice.

Recomputation (--recompute) keeps less and computes it again in backward:

    none        keeps all that backward reads
    selective   drops what grows with seq^2, the attention core, and recomputes only that
    full        keeps the input of each block and runs the block's forward again: about 4/3 of
                the FLOPs for almost no activations

Fused attention (--attention sdpa) makes the selective choice inside its kernel: it keeps one number
a row in place of the scores. That is why "selective" is history wherever such a kernel runs.

FLOPs: a matmul of (m, k) by (k, n) is 2mkn. Backward is two such matmuls for each one of forward.
So a step is about 6 FLOPs per parameter and token, plus attention's 12 * layers * dim * seq a token.
MFU divides these by time and the chip's peak; HFU also counts what was recomputed. Recomputing more
raises HFU and not MFU, which is why MFU is the honest one.

Run it:
    python 01_single_gpu.py                                  300 steps, a picture, a sample of text
    python 01_single_gpu.py --micro-batch 2 --recompute full --attention sdpa --steps 10
    python 01_single_gpu.py --precision bf16-fp32grad --steps 10
    python 01_single_gpu.py --preset gpt2 --precision bf16 --attention sdpa       (on a GPU)

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
section 4; Micikevicius et al., Mixed Precision Training (2018), section 3; Chowdhery et al., PaLM
(2022), appendix B (MFU); Ultra-Scale Playbook, "First Steps: Training on One GPU".
"""

import contextlib
import functools
import itertools
import statistics
import time
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import common
from common import clip_grads, gpt, grad_norm, loss_sum, nbytes, quantity

# ------------------------------------------------------------------------------------- the forward

CORES = {"plain": common.plain_attention, "sdpa": common.sdpa_attention}
RECOMPUTE = ("none", "selective", "full")
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def set_core(model, attention, recompute):
    """Choose the attention core of every block; "selective" wraps it so that it keeps q, k, v alone."""
    core = CORES[attention]
    for block in model[1:-1]:
        block.attn.core = functools.partial(recomputed, core) if recompute == "selective" else core


def forward(model, tokens, recompute):
    """Tokens (batch, seq) to logits (batch, seq, vocab). The model is a list, so walk it."""
    x = model[0](tokens)                                                # (batch, seq, dim)
    for block in model[1:-1]:
        x = recomputed(block, x) if recompute == "full" else block(x)
    return model[-1](x)


# ---------------------------------------------------------------------------------------- the step


def train_step(model, optimizer, forward, micro_batches, valid, clip):
    """One optimizer step in full precision; returns the loss and the gradient norm.

    micro_batches: pairs of tokens and targets (micro_batch, seq). valid: the number of valid
    targets of the whole batch, which every micro-batch divides by.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid
        loss.backward()                                 # adds to p.grad: this is the accumulation
        total += loss.detach()

    norm = grad_norm(model.parameters())
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


class MasterWeights:
    """An optimizer for 16-bit parameters: it steps fp32 copies, the master weights.

    Rounds the model's parameters to `dtype` in place. With fp32_grads the 16-bit gradients of each
    micro-batch are added up in fp32 (4 bytes per parameter more). Otherwise they add up in 16 bits
    and become fp32 one parameter at a time, which is why each has an optimizer of its own.
    """

    def __init__(self, model, make_optimizer, dtype, fp32_grads=False):
        self.parameters, self.fp32_grads = list(model.parameters()), fp32_grads
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]      # 4 bytes
        self.optimizers = [make_optimizer([master]) for master in self.masters]         # 8, AdamW
        for p, master in zip(self.parameters, self.masters):
            p.data = p.data.to(dtype)                                                   # 2
            master.grad = torch.zeros_like(master) if fp32_grads else None              # 4 or 0

    def zero_grad(self):
        for p, master in zip(self.parameters, self.masters):
            p.grad = None
            if self.fp32_grads:
                master.grad.zero_()

    def accumulate(self):
        """After the backward of each micro-batch: move its gradients into the fp32 sums."""
        if self.fp32_grads:
            for p, master in zip(self.parameters, self.masters):
                master.grad += p.grad
                p.grad.zero_()

    def norm(self):
        return grad_norm(self.masters if self.fp32_grads else self.parameters)

    def step(self, factor):
        """Step the masters with `factor` times the gradients; round them into the parameters."""
        for p, master, optimizer in zip(self.parameters, self.masters, self.optimizers):
            if self.fp32_grads:
                master.grad *= factor
            else:
                master.grad = p.grad.float() * factor
            optimizer.step()
            p.data.copy_(master.data)
            if not self.fp32_grads:
                master.grad = None
        self.factor = factor

    def held(self):
        """The tensors between two steps: parameters, gradients, optimizer states."""
        gradients = [x.grad for x in (*self.parameters, *self.masters)]
        return self.parameters, gradients, [self.masters, [list(o.state.values()) for o in self.optimizers]]

    def named_masters(self, names):
        """(name, fp32 parameter) pairs with the fp32 gradients of the last step, for the verifier."""
        for name, p, master in zip(names, self.parameters, self.masters):
            shown = nn.Parameter(master.detach())
            shown.grad = master.grad if self.fp32_grads else p.grad.float() * self.factor
            yield name, shown


class LossScale:
    """fp16's dynamic loss scale: an overflow halves it, `patience` good steps in a row double it."""

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
    masters.zero_grad()
    factor = scale.value if scale else 1.0
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid
        (loss * factor).backward()
        masters.accumulate()
        total += loss.detach()

    norm = masters.norm() / factor
    overflow = scale is not None and not norm.isfinite().item()         # the host waits for this
    if not overflow:
        masters.step((clip / (norm + 1e-6)).clamp(max=1) / factor if clip else 1 / factor)
    if scale:
        scale.update(overflow)
    return total, norm


def torch_step(model, optimizer, scaler, forward, micro_batches, valid, clip):
    """The same with PyTorch's tools: a forward under autocast, which keeps fp32 parameters and casts
    them inside each operator, and a GradScaler."""
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid
        scaler.scale(loss).backward()
        total += loss.detach()

    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return total, norm


# -------------------------------------------------------------------------------------- the formulas


def model_state_bytes(cfg, precision, optimizer, dtype_bytes=4):
    """Bytes of parameters, gradients and optimizer states, by kind. dtype_bytes: fp32's 4, or --dtype's."""
    n = cfg.parameters()
    tensors = 10 * cfg.layers + (3 if cfg.tie else 4)
    full = dtype_bytes if precision == "fp32" else 4    # bytes of a moment, a master weight
    width = dtype_bytes if precision == "fp32" else 2   # bytes of a parameter, a gradient
    moments = {"adamw": 2 * full * n + 4 * tensors, "momentum": full * n, "sgd": 0}[optimizer]
    return {
        "parameters": width * n,
        "gradients": width * n + (4 * n if precision == "bf16-fp32grad" else 0),
        "optimizer states": moments + (0 if precision == "fp32" else 4 * n),
    }


def block_activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes that one block keeps for backward, on a CPU. batch: sequences; e: bytes of an activation."""
    x = batch * cfg.seq * cfg.dim * e                           # one (batch, seq, dim)
    kv = x * cfg.kv_heads // cfg.heads
    rows = batch * cfg.heads * cfg.seq
    scores, log_sum_exp = rows * cfg.seq * e, rows * max(e, 4)
    core = 0 if recompute == "selective" else {"plain": scores, "sdpa": x + log_sum_exp}[attention]

    norms = 2 * (x + layer_norm_statistics(cfg, batch, e) + x)  # two of them: input, statistics, output
    attn = rope_tables(cfg, e) + x + 2 * kv + core + x          # q, k and v, the core, o's input
    mlp = 4 * x + 4 * x                                         # GELU's input and output
    return x if recompute == "full" else norms + attn + mlp


def layer_norm_statistics(cfg, batch, e):
    return 2 * batch * cfg.seq * e                              # mean and 1/std of each token


def rope_tables(cfg, e):
    return 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * e        # cos and sin, for q and for k


def activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes kept for backward at the end of the model's forward and its loss, on a CPU."""
    x, wide = batch * cfg.seq * cfg.dim * e, max(e, 4)          # the loss works in fp32 or better
    norm = x + layer_norm_statistics(cfg, batch, e) + x
    loss = batch * cfg.seq * cfg.vocab * wide + wide            # log-probabilities, and a scalar
    return cfg.layers * block_activation_bytes(cfg, batch, attention, recompute, e) + norm + loss


def textbook_activation_bytes(cfg, batch):
    """The well-known s·b·h·(34 + 5·a·s/h) of a 16-bit layer (Korthikanti et al., equation 2)."""
    return batch * cfg.seq * (34 * cfg.dim + 5 * cfg.heads * cfg.seq)


def textbook_difference(cfg, batch):
    """Why that is not `block_activation_bytes(cfg, batch, "plain", "none", 2)`: bytes by reason."""
    x, scores = batch * cfg.seq * cfg.dim, batch * cfg.heads * cfg.seq**2
    return {
        "dropout, which we leave out": 2 * x + 3 * scores,      # masks of 1 byte; attention's output twice
        "k and v of heads that GQA shares": 4 * (x - x * cfg.kv_heads // cfg.heads),
        "LayerNorm statistics and RoPE tables": -2 * layer_norm_statistics(cfg, batch, 2) - rope_tables(cfg, 2),
    }


def step_flops(cfg, batch, attention, recompute, early_stop=False):
    """FLOPs of one step over `batch` sequences, as PyTorch's counter counts (the causal half too).

    early_stop: PyTorch's checkpoint stops recomputing once it has what backward reads, and so skips
    the last matmul of each recomputed piece, whose output nobody kept.
    """
    tokens, s, h = batch * cfg.seq, cfg.seq, cfg.dim
    kv = h * cfg.kv_heads // cfg.heads
    linears = 2 * tokens * h * (2 * h + 2 * kv + 8 * h)         # q o, k v, up down: one block, forward
    core = 2 * (2 * tokens * s * h)                             # q @ k.T and weights @ v
    head = 2 * tokens * h * cfg.vocab

    # a fused backward computes q @ k.T once more: 5 matmuls in place of 4
    backward = 2 * linears + (2 * core if attention == "plain" else 5 * core // 2)
    again = {"none": 0, "selective": core, "full": linears + core}[recompute]
    if early_stop and recompute == "full":
        again -= 2 * tokens * 4 * h * h                         # down
    if early_stop and recompute == "selective" and attention == "plain":
        again -= core // 2                                      # weights @ v
    return cfg.layers * (linears + core + backward + again) + 3 * head


PEAK_FLOPS = {  # dense bf16, per GPU, SXM modules: NVIDIA's data sheets
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


# --------------------------------------------------------------------------------- the measurements


def measure_activations(model, forward, tokens, targets):
    """Bytes that autograd holds at the end of one forward of tokens, targets (micro_batch, seq)."""
    meter = common.ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
    with meter:
        loss_sum(forward(tokens), targets)
    return meter.bytes


def measure_flops(forward, tokens, targets, early_stop=False):
    """FLOPs of one forward and backward by PyTorch's counter, which has to be told of the CPU's SDPA."""
    from torch.utils.flop_counter import FlopCounterMode

    def attention_matmuls(count, q, k):
        (batch, heads, rows, head_dim), columns = q, k[2]
        return count * 2 * batch * heads * rows * columns * head_dim

    aten = torch.ops.aten
    cpu = {
        aten._scaled_dot_product_flash_attention_for_cpu:
            lambda q, k, v, *rest, **kw: attention_matmuls(2, q, k),
        aten._scaled_dot_product_flash_attention_for_cpu_backward:
            lambda grad, q, k, v, *rest, **kw: attention_matmuls(5, q, k),
    }
    counter = FlopCounterMode(display=False, custom_mapping=cpu)
    with set_checkpoint_early_stop(early_stop), counter:
        loss_sum(forward(tokens), targets).backward()
    return counter.get_total_flops()


class MemoryTimeline(TorchDispatchMode):
    """Adds up the storages that are alive, by kind, after every operator that changed their sum.

    held() returns lists of tensors: parameters, gradients, optimizer states. samples: (seconds in
    operators so far, bytes of each of the three, bytes of all else), where all else is activations
    and what an operator needs for a moment.
    """

    def __init__(self, held):
        super().__init__()
        self.held, self.live, self.total, self.seen = held, {}, 0, 0
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
        if self.total != self.seen:
            kinds = [nbytes(tensors) for tensors in self.held()]
            self.samples.append((self.seconds, *kinds, self.total - sum(kinds)))
            self.seen = self.total
        return result


def draw(timeline, path, title):
    """Draw the bytes of each kind over time, stacked."""
    from matplotlib.figure import Figure                # half a second, for those who draw

    seconds, *kinds = zip(*timeline.samples)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.stackplot([1e3 * t for t in seconds], [[b / 1e6 for b in kind] for kind in kinds],
                   labels=("parameters", "gradients", "optimizer states", "activations"),
                   colors=("#355070", "#e56b6f", "#b56576", "#eaac8b"))
    axes.set(xlabel="time in operators (ms)", ylabel="MB", title=title)
    axes.margins(x=0)
    axes.set_ylim(top=1.15 * axes.get_ylim()[1])
    axes.legend(loc="upper center", ncols=4, frameon=False)
    figure.savefig(path, dpi=130)


# ------------------------------------------------------------------------------------------ the run

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "bf16-fp32grad": torch.bfloat16, "fp16": torch.float16}
WATCHED_STEPS = 3       # how many steps the picture shows


def train(args, ranks, text, run):
    """Train for --steps steps and check the model states. Returns the model, its forward, a timeline."""
    device, half = ranks.device, PRECISIONS[args.precision]
    model = gpt(args.model, args.seed, device, common.DTYPES[args.dtype])
    set_core(model, args.attention, args.recompute)
    autocast = torch.autocast(device.type, half or torch.bfloat16, enabled=bool(half) and args.variant == "torch")

    def model_forward(tokens, recompute=args.recompute):
        with autocast:
            return forward(model, tokens, recompute)

    make_optimizer = functools.partial(common.OPTIMIZERS[args.optimizer], lr=args.lr)
    mixed = bool(half) and args.variant == "hand"
    if mixed:
        optimizer = MasterWeights(model, make_optimizer, half, args.precision == "bf16-fp32grad")
        scale = LossScale(args.loss_scale) if half == torch.float16 else None
        step = functools.partial(mixed_step, optimizer, scale)
    else:
        optimizer = make_optimizer(model.parameters())
        step = functools.partial(train_step, model, optimizer)
        if args.variant == "torch":
            scaler = torch.amp.GradScaler(device.type, args.loss_scale, enabled=half == torch.float16)
            step = functools.partial(torch_step, model, optimizer, scaler)
    if args.compile:
        batch = (x[: args.micro_batch].to(device) for x in text.batch(0)[:2])
        step_forward = compiled(model_forward, *batch, run.say)
    else:
        step_forward = model_forward

    def held():
        if mixed:
            return optimizer.held()
        parameters = list(model.parameters())
        return parameters, [p.grad for p in parameters], list(optimizer.state.values())

    names = [name for name, _ in model.named_parameters()]
    timeline = MemoryTimeline(held)
    for i in range(args.steps):
        tokens, targets, valid = batch = text.batch(i)
        micro_batches = list(zip(*(x.to(device).split(args.micro_batch) for x in (tokens, targets))))
        with run.measure(i), timeline if args.plot and i < WATCHED_STEPS else contextlib.nullcontext():
            loss, norm = step(step_forward, micro_batches, valid, args.clip)
        run.log(i, batch, loss, norm, optimizer.named_masters(names) if mixed else model.named_parameters())

    formula = model_state_bytes(args.model, args.precision, args.optimizer, common.DTYPES[args.dtype].itemsize)
    for (kind, expected), tensors in zip(formula.items(), held()):
        run.check(kind, nbytes(tensors), expected if args.variant == "hand" else None)
    if mixed and scale:
        run.say(f"  loss scale {scale.value:.0f} in the end; {scale.skipped} steps skipped")
    return model, model_forward, timeline


def compiled(forward, tokens, targets, say):
    """The forward under torch.compile, tried out once; where that fails, the forward as it was."""
    fast = torch.compile(forward)
    try:
        loss_sum(fast(tokens), targets).backward()
    except Exception as error:                          # whatever compiler or Python it misses here
        say(f"  --compile does not work here, so eager it is: {str(error).strip().splitlines()[0]}")
        return forward
    return fast


def report(args, device, text, run, model, model_forward):
    """Check activations and FLOPs against their formulas, and note what there is to say about them."""
    cfg, b, on_cpu = args.model, args.micro_batch, device.type == "cpu"
    e = next(model.parameters()).element_size()
    tokens, targets = (x[:b].to(device) for x in text.batch(0)[:2])
    exact = on_cpu and args.variant == "hand"           # CUDA's kernels keep other tensors; so does autocast

    every = on_cpu and args.preset == "tiny"
    for attention, recompute in itertools.product(CORES, RECOMPUTE) if every else [(args.attention, args.recompute)]:
        set_core(model, attention, recompute)
        forward = functools.partial(model_forward, recompute=recompute)
        kept = measure_activations(model, forward, tokens, targets)
        formula = activation_bytes(cfg, b, attention, recompute, e)
        run.check(f"kept: {attention}, {recompute}", kept, formula, exact=exact)
        for early_stop in (False, True):
            formula = step_flops(cfg, args.batch, attention, recompute, early_stop)
            if not early_stop or formula < step_flops(cfg, args.batch, attention, recompute):
                flops = args.batch // b * measure_flops(forward, tokens, targets, early_stop)
                name = f"computed: {attention}, {recompute}" + ", early stop" * early_stop
                run.check(name, flops, formula, "FLOP", exact=exact)
    set_core(model, args.attention, args.recompute)

    textbook, ours = textbook_activation_bytes(cfg, b), block_activation_bytes(cfg, b, "plain", "none", 2)
    reasons = ", ".join(f"{quantity(size)} {why}" for why, size in textbook_difference(cfg, b).items())
    run.note(f"a 16-bit block keeps {quantity(ours)}, the textbook's s·b·h·(34 + 5·a·s/h) is {quantity(textbook)}: "
             f"{reasons}")
    model_flops = step_flops(cfg, args.batch, args.attention, "none")
    hardware_flops = step_flops(cfg, args.batch, args.attention, args.recompute, early_stop=True)
    six_n = 6 * cfg.parameters() * args.batch * cfg.seq
    run.note(f"6·N·tokens is {six_n / model_flops:.2f} of the FLOPs: N has the embedding, which multiplies nothing, "
             "and no attention scores")
    seconds = statistics.median(run.seconds)
    speed = f"{args.batch * cfg.seq / seconds:,.0f} tokens/s"
    peak = next((x for gpu, x in PEAK_FLOPS.items() if not on_cpu and gpu in torch.cuda.get_device_name()), None)
    if peak:
        speed += (f", MFU {model_flops / seconds / peak:.1%}, HFU {hardware_flops / seconds / peak:.1%} "
                  f"of {peak / 1e12:.0f} dense bf16 TFLOP/s")
    run.note(speed)


@torch.no_grad()
def sample(model, prompt, length=160, temperature=0.7):
    """Let the model continue a text of bytes, one byte at a time."""
    generator = torch.Generator().manual_seed(0)
    tokens = list(prompt.encode())
    device, seq = model[0].weight.device, len(model[1].attn.positions)
    for _ in range(length):
        logits = forward(model, torch.tensor([tokens[-seq:]], device=device), "none")[0, -1]
        probabilities = (logits.float().cpu()[:256] / temperature).softmax(0)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return bytes(tokens).decode(errors="replace")


def main(argv=None):
    parser = common.parser(__file__, __doc__, variants=("hand", "torch"), default="hand", steps=300)
    parser.add_argument("--attention", choices=CORES, default="plain")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--loss-scale", type=common.number(float, 1, example=65536), default=2.0**16,
                        help="fp16's first loss scale")
    parser.add_argument("--compile", action="store_true", help="use torch.compile where it works")
    parser.set_defaults(plot="runs/01_single_gpu.png")
    args = common.parse(parser, argv)
    common.split_batch(args, ranks=1)
    if common.environment("WORLD_SIZE", 1) > 1:
        common.refuse("--nproc_per_node: this chapter trains on one GPU; 1 would work")
    if PRECISIONS[args.precision] and args.dtype != "float32":
        common.refuse(f"--precision {args.precision} is float32 rounded to 16 bits, and --dtype is {args.dtype}; "
                      "--dtype float32 would work")
    text = common.Text(args)
    ranks = common.start(args)

    run = common.Run(args, ranks, text, lambda: gpt(args.model, args.seed, ranks.device, common.DTYPES[args.dtype]),
                     exact=PRECISIONS[args.precision] is None)
    model, model_forward, timeline = train(args, ranks, text, run)
    report(args, ranks.device, text, run, model, model_forward)
    last = run.loss[-20:]
    run.note(f"mean loss of the last {len(last)} steps: {sum(last) / len(last):.3f} nats per token")
    if args.plot:
        draw(timeline, args.plot, f"Memory of the first steps ({args.precision}, recompute {args.recompute})")
        run.note(f"picture: {args.plot}")
    status = run.finish()
    if text.tokens.itemsize == 1:
        run.say(f"  what it writes by now:\n{sample(model, 'import ')}")
    return status


if __name__ == "__main__":
    common.launch(main)
