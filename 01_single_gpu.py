r"""01 · One GPU: what a training step holds and does.

Everything in this course is an answer to "it does not fit" or "it takes too long". So first: what
is it that has to fit, and what takes the time? A step is three acts:

    forward      tokens -> logits -> loss         leaves behind ACTIVATIONS, kept for backward
    backward     loss -> a gradient each          eats the activations, leaves behind GRADIENTS
    optimizer    gradients -> new parameters      reads and writes PARAMETERS and OPTIMIZER STATES

    bytes            ___
       |           _/   \__
       |         _/        \__           activations pile up in forward, backward uses them up
       |       _/   __________\_____
       |     _/____/                |    gradients come in backward, and stay until the next step
       |____/_______________________|__  optimizer states come with the first step, and stay
       |_______________________________  parameters
            forward    backward   optimizer

The first step differs from all others: its optimizer states only appear at its end. (On a GPU, the
allocator also has its blocks to find.) A run draws this picture from what it measured.

Model states (bytes per parameter)

    --precision      parameters  gradients  optimizer states (AdamW)      sum
    fp32                 4           4      4 + 4          two moments     16
    bf16, fp16           2           2      4 + 4 + 4      master weights  16
    bf16-fp32grad        2         2 + 4    4 + 4 + 4                      20

Mixed precision saves no memory here: it buys fast 16-bit matmuls and halves the activations. It
needs the fp32 master copy because an update smaller than 1/256 of a bf16 weight would round away.
fp16 has more digits but a narrow range, so small gradients vanish: the loss is multiplied by a
scale before backward, and the gradients are divided by it after. Too large a scale shows up as
inf: that step is skipped and the scale halved. After a run of good steps it is doubled. A run in 16
bits is compared with one GPU in fp32, at the tolerances that `common.tolerances` explains.

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


def train_step(model, optimizer, forward, micro_batches, valid, clip):
    """One optimizer step in full precision. Returns the loss and the gradient norm.

    micro_batches: pairs of tokens and targets, (micro_batch, seq) each. valid: the valid targets
    of the whole batch; every micro-batch divides by them, and not by its own.
    """
    optimizer.zero_grad()
    total = 0
    for tokens, targets in micro_batches:
        loss = loss_sum(forward(tokens), targets) / valid
        loss.backward()                                         # adds to p.grad: accumulation
        total += loss.detach()

    norm = grad_norm(model.parameters())
    if clip:
        clip_grads(model.parameters(), norm, clip)
    optimizer.step()
    return total, norm


class MasterWeights:
    """An optimizer for 16-bit parameters: it steps fp32 copies of them, the master weights.

    It rounds the model's parameters to `dtype` in place. With fp32_grads, the 16-bit gradients of
    each micro-batch are added up in fp32. Without, they add up in 16 bits, and become fp32 one
    parameter at a time: hence an optimizer for each.
    """

    def __init__(self, model, make_optimizer, dtype, fp32_grads=False):
        self.parameters, self.fp32_grads, self.factor = list(model.parameters()), fp32_grads, 1.0
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]  # 4 bytes each
        self.optimizers = [make_optimizer([master]) for master in self.masters]     # 8 for AdamW
        for p, master in zip(self.parameters, self.masters):
            p.data = p.data.to(dtype)                                               # 2
            master.grad = torch.zeros_like(master) if fp32_grads else None          # 4 or 0

    def zero_grad(self):
        for p, master in zip(self.parameters, self.masters):
            p.grad = None
            if self.fp32_grads:
                master.grad.zero_()

    def accumulate(self):
        """After the backward of a micro-batch: move its gradients into the fp32 sums."""
        if self.fp32_grads:
            for p, master in zip(self.parameters, self.masters):
                master.grad += p.grad
                p.grad.zero_()

    def norm(self):
        return grad_norm(self.masters if self.fp32_grads else self.parameters)

    def step(self, factor):
        """Step the masters with `factor` times the gradients, and round them to the parameters."""
        self.factor = factor
        for p, master, optimizer in zip(self.parameters, self.masters, self.optimizers):
            if self.fp32_grads:
                master.grad *= factor
            else:
                master.grad = p.grad.float() * factor
            optimizer.step()
            p.data.copy_(master.data)
            if not self.fp32_grads:
                master.grad = None

    def held(self):
        """The tensors that stay between two steps: parameters, gradients, optimizer states."""
        gradients = [x.grad for x in (*self.parameters, *self.masters)]
        moments = [list(optimizer.state.values()) for optimizer in self.optimizers]
        return self.parameters, gradients, [self.masters, moments]

    def named_masters(self, names):
        """(name, fp32 parameter) pairs, with the gradients of the last step: for the verifier."""
        for name, p, master in zip(names, self.parameters, self.masters):
            shown = nn.Parameter(master.detach())
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
    """The same with PyTorch's tools: a GradScaler, and a forward under autocast, which keeps fp32
    parameters and rounds them inside each operator."""
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
    core = 0 if recompute == "selective" else {"plain": scores, "sdpa": x + log_sum_exp}[attention]

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
    """The well-known s·b·h·(34 + 5·a·s/h) of one 16-bit block (Korthikanti et al., equation 2)."""
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

    # Backward takes two matmuls for one; a fused core computes q @ k.T once more: 5 for 2.
    backward = 2 * linears + (2 * core if attention == "plain" else 5 * core // 2)
    again = {"none": 0, "selective": core, "full": linears + core}[recompute]
    if early_stop and recompute == "full":
        again -= 2 * tokens * 4 * h * h                         # down
    if early_stop and recompute == "selective" and attention == "plain":
        again -= core // 2                                      # weights @ v
    return cfg.layers * (linears + core + backward + again) + 3 * head


PEAK_FLOPS = {  # dense bf16 of one SXM module, by NVIDIA's data sheets
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


# -------------------------------------------------------------------------------- the measurements


def measure_activations(model, forward, tokens, targets):
    """Bytes that autograd holds at the end of one forward of tokens, targets (micro_batch, seq)."""
    meter = common.ActivationMeter([*model.parameters(), *model.buffers(), tokens, targets])
    with meter:
        loss_sum(forward(tokens), targets)
    return meter.bytes


def measure_flops(forward, tokens, targets, early_stop=False):
    """FLOPs of one forward and backward by PyTorch's counter, which must be told of CPU's SDPA."""
    from torch.utils.flop_counter import FlopCounterMode

    def matmuls(how_many, q, k):
        (batch, heads, rows, head_dim), columns = q, k[2]
        return how_many * 2 * batch * heads * rows * columns * head_dim

    aten, name = torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"
    counter = FlopCounterMode(display=False, custom_mapping={
        getattr(aten, name): lambda q, k, *rest, **more: matmuls(2, q, k),
        getattr(aten, name + "_backward"): lambda grad, q, k, *rest, **more: matmuls(5, q, k),
    })
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


# ----------------------------------------------------------------------------------------- the run

HALF = {"fp32": None, "bf16": torch.bfloat16, "bf16-fp32grad": torch.bfloat16,
        "fp16": torch.float16}
WATCHED_STEPS = 3       # how many steps the picture shows


def train(args, device, text, run):
    """Train for --steps steps, check the model states. Returns model, forward and timeline."""
    half, cfg = HALF[args.precision], args.model
    mixed, by_torch = half and args.variant == "hand", args.variant == "torch"
    model = gpt(cfg, args.seed, device, common.DTYPES[args.dtype])
    names = [name for name, _ in model.named_parameters()]
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
        run.log(i, batch, loss, norm,
                masters.named_masters(names) if mixed else model.named_parameters())

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
    exact = on_cpu and args.variant == "hand"       # CUDA and autocast keep other tensors
    batch = first_micro_batch(args, device, text)

    chosen = args.attention, args.recompute
    everything = itertools.product(CORES, RECOMPUTE)
    for attention, recompute in everything if on_cpu and args.preset == "tiny" else [chosen]:
        set_core(model, attention, recompute)
        forward = functools.partial(model_forward, recompute=recompute)
        kept = measure_activations(model, forward, *batch)
        formula = activation_bytes(cfg, b, attention, recompute, e)
        run.check(f"kept: {attention}, {recompute}", kept, formula, exact=exact)
        if not exact:
            run.note(f"the formula is that of CPU kernels without autocast: {kept - formula:+,} B")
        for early_stop in (False, True):
            formula = step_flops(cfg, args.batch, attention, recompute, early_stop)
            if early_stop and formula == step_flops(cfg, args.batch, attention, recompute):
                continue                            # nothing to stop early
            measured = args.batch // b * measure_flops(forward, *batch, early_stop)
            name = f"computed: {attention}, {recompute}{', early stop' * early_stop}"
            run.check(name, measured, formula, "FLOP", exact)
    set_core(model, *chosen)

    ours = block_activation_bytes(cfg, b, "plain", "none", 2)
    run.note(f"a block in 16 bits keeps {quantity(ours)}; the textbook's s·b·h·(34 + 5·a·s/h) is "
             f"{quantity(textbook_activation_bytes(cfg, b))}:")
    for reason, size in textbook_difference(cfg, b).items():
        run.note(f"  {quantity(size):>10} {reason}")

    model_flops = step_flops(cfg, args.batch, "plain", "none")     # a fused backward recomputes
    full = [step_flops(cfg, args.batch, "plain", "full", stop) for stop in (False, True)]
    run.note(f"recomputing every block takes {full[0] / model_flops:.2f} times the FLOPs, "
             f"{full[1] / model_flops:.2f} times where the checkpoint stops early, as in training")
    six_n = 6 * cfg.parameters() * args.batch * cfg.seq / model_flops
    run.note(f"6·N·tokens is {six_n:.2f} of the FLOPs: N has the embedding, which multiplies "
             "nothing, but not the scores")
    seconds = statistics.median(run.seconds[WATCHED_STEPS:] or run.seconds)
    speed = f"{args.batch * cfg.seq / seconds:,.0f} tokens/s"
    gpu = "" if on_cpu else torch.cuda.get_device_name(device)
    for peak in (PEAK_FLOPS[name] for name in PEAK_FLOPS if name in gpu):
        computed = step_flops(cfg, args.batch, *chosen, early_stop=True)
        speed += (f", MFU {model_flops / seconds / peak:.1%}, HFU {computed / seconds / peak:.1%} "
                  f"of the {peak / 1e12:.0f} TFLOP/s of {gpu} in bf16")
    run.note(speed)


@torch.no_grad()
def sample(model, prompt, length=160, temperature=0.7):
    """Let the model continue a text, byte by byte."""
    generator, tokens = torch.Generator().manual_seed(0), list(prompt.encode())
    device, seq = model[0].weight.device, len(model[1].attn.positions)
    for _ in range(length):
        logits = forward(model, torch.tensor([tokens[-seq:]], device=device), "none")[0, -1]
        probabilities = (logits[:256].float().cpu() / temperature).softmax(0)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return bytes(tokens).decode(errors="replace")


def main(argv=None):
    parser = common.parser(__file__, __doc__, ("hand", "torch"), default="hand", steps=300)
    parser.add_argument("--attention", choices=CORES, default="plain")
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
        common.refuse("--nproc_per_node: this chapter trains on one GPU; 1 would work")
    if HALF[args.precision] and args.dtype != "float32":
        common.refuse(f"--precision {args.precision} rounds float32, and --dtype is {args.dtype}; "
                      "--dtype float32 would work")
    text = common.Text(args)
    ranks = common.start(args)

    build = functools.partial(gpt, args.model, args.seed, ranks.device, common.DTYPES[args.dtype])
    run = common.Run(args, ranks, text, build, sixteen_bit=HALF[args.precision] is not None)
    model, model_forward, timeline = train(args, ranks.device, text, run)
    report(args, ranks.device, text, run, model, model_forward)
    last = run.loss[-20:]
    run.note(f"mean loss of the last {len(last)} steps: {statistics.mean(last):.3f} nats per token")
    how = f"{args.precision}, recompute {args.recompute}"
    draw(timeline, args.plot, f"The first steps ({how}): optimizer states come with the first")
    run.note(f"picture: {args.plot}")
    status = run.finish()
    if text.tokens.itemsize == 1:
        run.say(f"  what it writes by now:\n{sample(model, 'import ')}")
    return status


if __name__ == "__main__":
    common.launch(main)
