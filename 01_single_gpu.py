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

The first step differs from all others: its optimizer states only appear at its end. (On a GPU it is
also slower, because PyTorch first has to get memory from the driver, which it then keeps.) A run
measures this picture in its first three steps, and --plot draws it.

Model states (bytes per parameter)

    --precision      parameters  gradients  optimizer states (AdamW)      sum
    fp32                 4           4      4 + 4          two moments     16
    bf16, fp16           2           2      4 + 4 + 4      master weights  16 (in the update 20)
    bf16-fp32grad        2         2 + 4    4 + 4 + 4                      20

Mixed precision saves nothing in this table. It buys fast 16-bit matmuls, and it halves the
activations that the blocks keep. (The loss stays in fp32, and with a large vocabulary that is
much.) It needs the master weights, a copy in fp32, because bf16 keeps 8 bits of a number: an update
below 1/512 of a weight would be rounded away. For the same reason bf16-fp32grad adds up the
gradients of micro-batches in fp32. (The others have fp32 gradients only while the masters are
updated, when the activations have gone.) fp16 keeps 11 bits, but its range is narrow, so small
gradients would become zero. Therefore the loss is multiplied by a scale before backward, and the
gradients are divided by it after. If the scale is too large, gradients become inf: then the step is
skipped and the scale halved. After 100 good steps in a row it is doubled.

A run with --precision in 16 bits is compared with one GPU in fp32. (With --dtype bfloat16, both are
in 16 bits.) The losses are means over many tokens, and agree to 5e-3 in bf16 and 1e-3 in fp16. A
gradient is a sum over tokens whose terms cancel, and their rounding errors do not. So gradients may
differ by 0.4 (bf16) or 0.05 (fp16) of their largest element, and are compared in the first step
alone, because afterwards the two runs have other weights. Under AdamW the parameters are not
compared: a tiny gradient moves one as far as a large one does, and rounding may flip its sign.

Gradient accumulation (--micro-batch) cuts the batch into micro-batches, runs one after the other,
and adds up their gradients. Activations shrink, and nothing else changes. There is one trap.
Suppose one micro-batch has 100 valid targets, and another has 50. Every target should count 1/150.
If each micro-batch took the mean over its own, and the two means were averaged, a target would
count 1/200 in the first and 1/100 in the second. So each micro-batch divides its SUM of losses by
the valid targets of the WHOLE batch.

Recomputation (--recompute) keeps less, and computes it again in backward:

    none        keeps all that backward reads
    selective   drops what grows with seq^2, the attention core, and recomputes only that
    full        keeps the input of each block, and runs the block's forward again: about 4/3 of
                the FLOPs, for the activations of one block at a time

Fused attention (--attention sdpa) makes the selective choice inside its kernel: of each row of
scores it keeps one number. With such a kernel, "selective" gains next to nothing. --kernels takes
our own, kernels/flash_attention.py and kernels/layernorm.py, on a GPU.

FLOPs: a matmul of (m, k) by (k, n) takes 2mkn, and its backward is two matmuls of that size. So a
step takes about 6 FLOPs per parameter and token, and attention takes 12 · layers · dim · seq more
per token. MFU (model FLOPs utilization) divides these FLOPs by the time and by the chip's peak. HFU
(of the hardware) also counts what was recomputed. Recomputing more can raise HFU, but never MFU,
which makes MFU the honest one.

Run it:
    python 01_single_gpu.py                                  300 steps, and a sample of text
    python 01_single_gpu.py --steps 10 --plot runs/memory.png
    python 01_single_gpu.py --micro-batch 2 --recompute full --attention sdpa --steps 10
    python 01_single_gpu.py --precision bf16-fp32grad --steps 10
    python 01_single_gpu.py --preset gpt2 --precision bf16                        (on a GPU)

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
sections 4 and 5; Micikevicius et al., Mixed Precision Training (2018), section 3; Chowdhery et al.,
PaLM (2022), appendix B (MFU); Ultra-Scale Playbook, "First Steps: Training on One GPU".
"""

import functools
import itertools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import common
from common import clip_grads, clip_scale, gpt, grad_norm, loss_sum

# ------------------------------------------------------------------------------------- the forward

CORES = dict(common.CORES)
RECOMPUTE = ("none", "selective", "full")
recomputed = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def set_core(model, attention, recompute):
    """Choose the attention core; a "selective" one keeps only q, k and v, and runs twice."""
    core = CORES[attention]
    for block in model[1:-1]:
        block.attn.core = functools.partial(recomputed, core) if recompute == "selective" else core


def use_kernels(model):
    """Put our Triton LayerNorm into the model, and flash attention into CORES, as "triton". Returns
    whether Triton can run there: on a GPU, or anywhere under TRITON_INTERPRET=1."""
    from kernels.flash_attention import flash_attention
    from kernels.layernorm import layer_norm, runs_here

    if not runs_here(model.embedding.weight):
        return False
    CORES["triton"] = flash_attention
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            of_module = {"weight": module.weight, "bias": module.bias, "eps": module.eps}
            module.forward = functools.partial(layer_norm, **of_module)
    return True


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
    each micro-batch are added up in fp32. Without, they add up in 16 bits, and exist in fp32 only
    during the update. Frozen parameters only become 16-bit, and one that got no gradient is left as
    it is, as PyTorch's optimizers do. (foreach: one operator for all tensors of a list.)
    """

    def __init__(self, model, make_optimizer, dtype, fp32_grads=False):
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.names, self.parameters = zip(*trained)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.parameters]  # 4 bytes each
        for name, master in zip(self.names, self.masters):
            master.global_name = name
        self.optimizer = make_optimizer(self.masters)                               # 8 for AdamW
        self.fp32_grads = fp32_grads
        self.factor = 1.0                                       # of the last step's gradients
        for p in model.parameters():
            p.data = p.data.to(dtype)                                               # 2

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

    def held(self):
        """The tensors that stay between two steps: parameters, gradients, optimizer states."""
        gradients = [x.grad for x in (*self.parameters, *self.masters)]
        return self.parameters, gradients, [self.masters, list(self.optimizer.state.values())]

    def named_masters(self):
        """(name, fp32 parameter) pairs, with the gradients of the last step: what is compared."""
        for name, p, master in zip(self.names, self.parameters, self.masters):
            shown = nn.Parameter(master.detach())
            if p.grad is not None:
                shown.grad = master.grad if self.fp32_grads else p.grad.float() * self.factor
            yield name, shown


class LossScale:
    """fp16's loss scale: halved by an overflow, doubled by `patience` good steps in a row."""

    def __init__(self, value=2.0**16, patience=100):
        self.value, self.patience = value, patience
        self.good = self.skipped = 0                            # steps

    def update(self, overflow):
        self.skipped += overflow
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
    n = cfg.parameters()
    states = common.optimizer_state_bytes(optimizer, n, cfg.tensors(), width)
    if precision == "fp32":
        return {"parameters": width * n, "gradients": width * n, "optimizer states": states}
    sums = 4 * n if precision == "bf16-fp32grad" else 0
    return {"parameters": 2 * n, "gradients": 2 * n + sums, "optimizer states": 4 * n + states}


def most_gradient_bytes(cfg, precision, width=4):
    """Bytes of gradients at the most: with masters, the update has them in 16 bits and in fp32."""
    return cfg.parameters() * (width if precision == "fp32" else 2 + 4)


def block_activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes that a block keeps for backward, on a CPU. batch: sequences; e: bytes a number."""
    x = batch * cfg.seq * cfg.dim * e                           # one (batch, seq, dim)
    kv = x * cfg.kv_heads // cfg.heads
    core = 0 if recompute == "selective" else common.core_bytes(attention, cfg, batch, e)

    norms = 2 * (x + layer_norm_statistics(cfg, batch, e) + x)  # two: input, statistics, output
    attn = x + 2 * kv + core + x                                # q, k and v, the core, o's input
    mlp = 4 * x + 4 * x                                         # GELU's input and output
    return x if recompute == "full" else norms + attn + mlp


def layer_norm_statistics(cfg, batch, e):
    return 2 * batch * cfg.seq * e                              # mean and 1/std of each token


def activation_bytes(cfg, batch, attention, recompute, e):
    """Bytes kept for backward by the whole forward and its loss, on a CPU."""
    x, wide = batch * cfg.seq * cfg.dim * e, max(e, 4)          # the loss works in fp32 or better
    norm = x + layer_norm_statistics(cfg, batch, e) + x
    loss = batch * cfg.seq * cfg.vocab * wide + wide            # log-probabilities, and a scalar
    blocks = cfg.layers * block_activation_bytes(cfg, batch, attention, recompute, e)
    if recompute != "full":
        blocks += cfg.seq * cfg.dim // cfg.heads * e            # RoPE's tables, which they share
    return blocks + norm + loss


def textbook_activation_bytes(cfg, batch):
    """The well-known s·b·h·(34 + 5·a·s/h) of one 16-bit block (Korthikanti et al., equation 1)."""
    return batch * cfg.seq * (34 * cfg.dim + 5 * cfg.heads * cfg.seq)


def textbook_difference(cfg, batch):
    """By how many bytes the textbook's block exceeds ours (plain, none, 16 bits), by reason."""
    x, scores = batch * cfg.seq * cfg.dim, batch * cfg.heads * cfg.seq**2
    return {
        "dropout, which we leave out": 2 * x + 3 * scores,      # 1-byte masks; dropped-out scores
        "k and v of the heads that GQA shares": 4 * (x - x * cfg.kv_heads // cfg.heads),
        "LayerNorm statistics, which it leaves out": -2 * layer_norm_statistics(cfg, batch, 2),
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


def utilization(flops, seconds, peak):
    """The share of the chip's peak: MFU for the model's FLOPs, HFU for all that were computed."""
    return flops / seconds / peak


# ----------------------------------------------------------------------------------------- the run

HALF = {"fp32": None, "bf16": torch.bfloat16, "bf16-fp32grad": torch.bfloat16,
        "fp16": torch.float16}
# The memory of the first steps is measured in a dispatch mode, which would turn compiled code eager
# for good. So --compile begins after them.
WATCHED = 3


def build(run):
    """The model, with the attention and the kernels that the flags name, and its forward."""
    args, half = run.args, HALF[run.args.precision]
    if half:
        run.rounds_to(str(half).removeprefix("torch."))
    model = gpt(args.model, args.seed, run.device, run.dtype)
    if args.kernels and use_kernels(model):
        args.attention = "triton"
    elif args.kernels:
        run.note("--kernels: no GPU, or no Triton, for them here; LayerNorm and attention are "
                 "PyTorch's")
    set_core(model, args.attention, args.recompute)
    return model, functools.partial(forward, model, recompute=args.recompute)


def train(run):
    if HALF[run.args.precision]:
        return train_mixed(run)
    model, eager = build(run)
    optimizer = run.optimizer(model.parameters())
    step = functools.partial(train_step, model, optimizer)
    held = functools.partial(held_by, model, optimizer)

    take_steps(run, step, eager, held, model.named_parameters)
    check_states(run, held())
    run.check_most_gradients(most_gradient_bytes(run.args.model, "fp32", run.dtype.itemsize))
    report(run, model, eager, run.dtype.itemsize)


def train_mixed(run):
    args, half = run.args, HALF[run.args.precision]
    model, eager = build(run)
    masters = MasterWeights(model, run.optimizer, half, args.precision == "bf16-fp32grad")
    scale = LossScale(args.loss_scale) if half == torch.float16 else None
    if scale:
        run.remember(loss_scale=scale)
    step = functools.partial(mixed_step, masters, scale)

    take_steps(run, step, eager, masters.held, masters.named_masters)
    check_states(run, masters.held())
    if not (scale and scale.skipped):                           # else there was no update to see
        run.check_most_gradients(most_gradient_bytes(args.model, args.precision))
    if scale:
        run.note(f"loss scale {scale.value:.0f} in the end; {scale.skipped} steps skipped")
    report(run, model, eager, half.itemsize)


def train_torch(run):
    args, half = run.args, HALF[run.args.precision]
    model, eager = build(run)
    optimizer = run.optimizer(model.parameters())
    if half:
        eager = torch.autocast(run.device.type, half)(eager)
    scaler = torch.amp.GradScaler(run.device.type, args.loss_scale, enabled=half == torch.float16)
    run.remember(loss_scale=scaler)
    step = functools.partial(torch_step, model, optimizer, scaler)
    held = functools.partial(held_by, model, optimizer)

    take_steps(run, step, eager, held, model.named_parameters)
    run.check_states(model, optimizer)
    report(run, model, eager, None if half else run.dtype.itemsize)     # autocast mixes widths


def take_steps(run, step, eager, held, compared):
    """Train: step(forward, micro_batches, valid, clip) takes one step. eager: the forward, for
    --compile to compile. held(): what `held_by` returns. compared(): (name, parameter) pairs, to
    compare with one GPU's."""
    args, fast = run.args, eager
    run.watch_memory(held)
    for batch in run.batches():
        if args.compile and len(run.seconds) == WATCHED:
            fast = compiled(run, eager, batch)
        with run.measure():
            loss, norm = step(fast, batch.micro_batches, batch.valid, args.clip)
        skipped = args.precision == "fp16" and not norm.isfinite().item()
        run.log(batch, loss, norm, compared(), skipped)


def compiled(run, forward, batch):
    """`forward` under torch.compile, tried out once; where that fails, `forward` as it is."""
    fast = torch.compile(forward)
    tokens, targets = batch.micro_batches[0]
    try:
        loss_sum(fast(tokens), targets).backward()
    except Exception as error:          # a compiler that is missing has many names
        why = str(error).strip().splitlines()[0]
        run.note(f"--compile does not work here, so eager it is: {why}")
        return forward
    return fast


def held_by(model, optimizer):
    """The tensors that stay between two steps: parameters, gradients, optimizer states."""
    parameters = list(model.parameters())
    return parameters, [p.grad for p in parameters], list(optimizer.state.values())


def check_states(run, held):
    args = run.args
    formula = model_state_bytes(args.model, args.precision, args.optimizer, run.dtype.itemsize)
    for kind, tensors in zip(formula, held):
        run.check_bytes(kind, tensors, formula[kind])


def check_combination(run, model, forward, attention, recompute, width):
    """What a combination of attention and recomputation keeps, and the FLOPs of a step with it."""
    args, cfg, name = run.args, run.args.model, f"{attention}, {recompute}"
    set_core(model, attention, recompute)

    def loss(tokens, targets):
        return loss_sum(forward(tokens, recompute=recompute), targets)

    kept = None
    if width:
        kept = activation_bytes(cfg, args.micro_batch, attention, recompute, width)
    run.check_activations(model, loss, kept, f"kept per micro-batch: {name}")
    if attention == "triton":
        run.note("computed: PyTorch's counter does not see the FLOPs of Triton's kernels")
        return

    def forward_and_backward(tokens, targets):
        loss(tokens, targets).backward()

    flops, stopped = (step_flops(cfg, args.batch, attention, recompute, stop)
                      for stop in (False, True))
    micro_batches = args.batch // args.micro_batch
    with set_checkpoint_early_stop(False):
        run.check_flops(f"computed: {name}", forward_and_backward, flops, micro_batches)
    if stopped < flops:                                         # in training, it does stop early
        run.check_flops(f"computed: {name}, early stop", forward_and_backward, stopped,
                        micro_batches)


def report(run, model, forward, width):
    """Check activations and FLOPs against their formulas, and note what explains them. width: bytes
    of a number in an activation; None where several are mixed, for which there is no formula."""
    args, cfg = run.args, run.args.model
    run.check_traffic({})                                       # one GPU has nobody to send to
    combinations = [(args.attention, args.recompute)]
    if args.preset == "tiny" and run.device.type == "cpu" and args.attention != "triton":
        combinations = itertools.product(CORES, RECOMPUTE)
    for attention, recompute in combinations:
        check_combination(run, model, forward, attention, recompute, width)
    set_core(model, args.attention, args.recompute)

    ours = block_activation_bytes(cfg, args.micro_batch, "plain", "none", 2)
    textbook = textbook_activation_bytes(cfg, args.micro_batch)
    run.note(f"a block in 16 bits keeps {ours / 1e6:.3f} MB; the textbook's s·b·h·(34 + 5·a·s/h) "
             f"is {textbook / 1e6:.3f} MB:")
    for reason, size in textbook_difference(cfg, args.micro_batch).items():
        if size:
            run.note(f"  {size / 1e6:8.3f} MB {reason}")

    needed = model_flops(cfg, args.batch)
    full, stopped = (step_flops(cfg, args.batch, "plain", "full", stop) for stop in (False, True))
    run.note(f"recomputing every block takes {full / needed:.2f} times the FLOPs, "
             f"{stopped / needed:.2f} times where the checkpoint stops early, as in training")
    embedding = "" if cfg.tie else "has the embedding, which multiplies nothing, and "
    run.note(f"6·N·tokens is {rule_of_thumb(cfg, args.batch) / needed:.2f} of the FLOPs: N "
             f"{embedding}leaves out attention's scores")
    computed = step_flops(cfg, args.batch, args.attention, args.recompute, early_stop=True)
    run.note_speed(mfu=functools.partial(utilization, needed),
                   hfu=functools.partial(utilization, computed))
    run.note_sample(functools.partial(sample, model))


@torch.no_grad()
def sample(model, prompt, length=160, temperature=0.7):
    """Let the model continue a text, token by token. Returns all tokens, the prompt's first."""
    generator, tokens = torch.Generator().manual_seed(0), list(prompt)
    device, seq = model[0].weight.device, len(model[1].attn.rope.positions)
    for _ in range(length):
        logits = forward(model, torch.tensor([tokens[-seq:]], device=device), "none")[0, -1]
        if not logits.isfinite().all():                         # the last step has overflowed
            break
        probabilities = (logits.float().cpu() / temperature).softmax(0)
        tokens.append(torch.multinomial(probabilities, 1, generator=generator).item())
    return tokens


def requires(args, ranks):
    common.split_batch(args, 1)
    if ranks > 1:
        common.refuse(f"--nproc_per_node {ranks}: this chapter trains on one GPU; 1 would work")
    if HALF[args.precision] and args.dtype != "float32":
        common.refuse(f"--precision {args.precision} rounds float32, and --dtype is {args.dtype}; "
                      "--dtype float32 would work")
    if args.compile and args.steps <= WATCHED:
        common.refuse(f"--steps {args.steps} ends before --compile comes in, after the steps of "
                      f"the picture; {WATCHED + 1} would work")
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


def flags(parser):
    add = parser.add_argument
    add("--kernels", action="store_true",
        help="on a GPU: LayerNorm and, in place of --attention, that from kernels/")
    add("--recompute", choices=RECOMPUTE, default="none")
    add("--precision", choices=HALF, default="fp32")
    add("--loss-scale", type=float, default=2.0**16, help="where fp16's loss scale starts")
    add("--compile", action="store_true",
        help="torch.compile where it works, after the steps of the picture")
    parser.set_defaults(steps=300)


VARIANTS = {"hand": train, "torch": train_torch}

if __name__ == "__main__":
    common.launch(__file__, __doc__, VARIANTS, requires, flags)
