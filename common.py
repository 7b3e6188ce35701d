"""What the chapters share, in the order in which a run meets it.

    shapes    Config, PRESETS                        how large a model is
    text      Text                                   a file to global batches, by (seed, step) alone
    model     gpt, draw_weights, loss_sum            a GPT as a list of modules, with seams to cut
    shards    keep_shard, mark_partial, grad_norm    one record of which rank holds which part
    flags     parse, refuse, split_batch             the command line of every chapter
    the run   Run, launch                            ranks, batches, and a line for each step

A chapter and this file, copied anywhere, train. Where the folder lab/ lies beside it, the same run
is also measured, compared with one GPU tensor by tensor, and reported.
"""

import argparse
import contextlib
import gc
import math
import os
import platform
import sys
import sysconfig
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

# torch 2.13 renames these two, and warns about the old names; 2.11 knows only the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ------------------------------------------------------------------------------------------- shapes

@dataclass(frozen=True)
class Config:
    """The shape of a model, and its attention core; `tie` makes embedding and head share one
    matrix."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    seq: int
    vocab: int
    tie: bool = False
    attention: str = "plain"

    def parameters(self):
        """q and o, k and v, up and down, two LayerNorms a block; the last LayerNorm, the tables."""
        kv_dim = self.dim * self.kv_heads // self.heads
        block = self.dim * (2 * self.dim + 2 * kv_dim + 8 * self.dim + 4)
        return self.layers * block + 2 * self.dim + (1 if self.tie else 2) * self.vocab * self.dim


PRESETS = {     # layers, dim, heads, kv_heads, seq, vocab
    "tiny": Config(4, 128, 8, 4, 128, 256),
    "gpt2": Config(12, 768, 12, 12, 1024, 50304, tie=True, attention="sdpa"),
    "1b": Config(16, 2048, 8, 8, 2048, 50304, attention="sdpa"),        # Pythia-1B
    "7b": Config(32, 4096, 32, 32, 2048, 50304, attention="sdpa"),      # Pythia-6.9B
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = {  # higher rates or a smaller eps magnify rounding differences and learn no better
    "adamw": lambda params, lr: torch.optim.AdamW(
        params, lr or 5e-4, (0.9, 0.95), eps=1e-6, fused=True),     # one operator for all of them
    "sgd": lambda params, lr: torch.optim.SGD(params, lr or 0.1),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr or 0.02, momentum=0.9),
}


# --------------------------------------------------------------------------------------------- text

class Text:
    """Training text: Python's own standard library, any file as bytes, or a .bin of uint16 tokens
    (a file is memory-mapped, not read)."""

    def __init__(self, args):
        self.args = args
        self.name = args.data or f"Python {platform.python_version()} standard library"
        if args.data is None:
            self.tokens = np.frombuffer(standard_library(), np.uint8)
        else:
            kind = np.dtype("<u2" if args.data.endswith(".bin") else "u1")
            size = os.stat(args.data).st_size // kind.itemsize
            self.tokens = np.memmap(args.data, kind, "r", shape=size)

    def batch(self, step):
        """The whole global batch of one step, a function of (seed, step) alone.

        Returns tokens and targets, int64 (batch, seq) on the CPU, and the number of valid targets:
        every rank knows the whole batch, so nobody has to send a count.
        """
        args, seq = self.args, self.args.model.seq
        rng = np.random.default_rng([args.seed, step])
        starts = rng.integers(len(self.tokens) - seq, size=(args.batch, 1))
        windows = torch.from_numpy(self.tokens[starts + np.arange(seq + 1)].astype(np.int64))
        tokens, targets = windows[:, :-1].clone(), windows[:, 1:].clone()
        if args.ignore:                                 # each sequence its own share, of mean P
            share = rng.random((args.batch, 1)) ** (1 / args.ignore - 1)
            ignored = torch.from_numpy(rng.random((args.batch, seq)) < share)
            ignored[0, 0] = False                       # never an empty batch
            targets[ignored] = -100
        return tokens, targets, int((targets != -100).sum())


def standard_library():
    """The .py files of Python's standard library, joined; no tests, nothing installed later."""
    root = Path(sysconfig.get_path("stdlib"))
    leave_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = (path.relative_to(root) for path in root.rglob("*.py"))
    files = sorted(path.as_posix() for path in files if leave_out.isdisjoint(path.parts))
    return b"".join((root / path).read_bytes() for path in files)


# -------------------------------------------------------------------------------------------- model

def plain_attention(q, k, v):
    """Causal attention with its scores in sight; a group of query heads shares a k and a v (GQA).

    q (batch, heads, seq, head_dim); k, v (batch, kv_heads, seq, head_dim). Returns q's shape.
    """
    batch, heads, seq, head_dim = q.shape

    # The heads of a group meet the same keys. So their queries are stacked, one head's rows below
    # the other's, and one matmul serves the group, without a copy of k or v for each head.
    stacked = (q * head_dim**-0.5).reshape(batch, k.shape[1], -1, head_dim)
    scores = stacked @ k.transpose(2, 3)                    # (batch, kv_heads, group·seq, seq)
    scores = scores.view(batch, heads, seq, seq)            # a square for each head again

    future = torch.full((seq, seq), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (scores + future).softmax(-1)                 # (batch, heads, seq, seq)
    return (weights.view(batch, k.shape[1], -1, seq) @ v).view(q.shape)


def sdpa_attention(q, k, v):
    """The same through PyTorch's fused kernels, which never materialise the scores."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


CORES = {"plain": plain_attention, "sdpa": sdpa_attention}


class Rope(nn.Module):
    """Rotary position embedding: turns the pair (i, i + head_dim/2) by an angle of its own.

    positions: int64 (seq,), a buffer; put another one in its place, where the tokens are others.
    The tables of cos and sin are made at its first use, from angles in float32 or better.
    """

    def __init__(self, cfg):
        super().__init__()
        self.register_buffer("positions", torch.arange(cfg.seq), persistent=False)
        self.made_for = self.cos = self.sin = None

    def make_tables(self, dtype, half):
        precise = torch.promote_types(dtype, torch.float32)
        speed = 10000.0 ** (-torch.arange(half, device=self.positions.device, dtype=precise) / half)
        angle = self.positions[:, None].to(precise) * speed         # (seq, head_dim/2)
        self.cos, self.sin = angle.cos().to(dtype), angle.sin().to(dtype)
        self.made_for = self.positions

    def forward(self, x):                                   # (batch, heads, seq, head_dim)
        a, b = x.chunk(2, dim=-1)
        if self.made_for is not self.positions or self.cos.dtype != x.dtype:
            self.make_tables(x.dtype, a.shape[-1])
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        return turned.contiguous()                          # it is, but for heads of two numbers


class Attention(nn.Module):
    """Causal self-attention with as many heads as its projections are wide: one that keeps a part
    of q, k, v and o has a part of the heads, and need not know it."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.q = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.core, self.rope = CORES[cfg.attention], Rope(cfg)

    def project(self, x):
        """All that reads the input: (batch, seq, dim) to three of (batch, seq, width). (A method of
        its own, since later chapters put communication around it.)"""
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):
        heads = [y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.project(x)]
        q, k, v = heads                                     # (batch, heads, seq, head_dim)
        out = self.core(self.rope(q), self.rope(k), v)
        return self.o(out.transpose(1, 2).flatten(2))       # (batch, seq, dim)


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim, bias=False)
        self.down = nn.Linear(4 * cfg.dim, cfg.dim, bias=False)

    def project(self, x):
        return self.up(x)

    def forward(self, x):
        return self.down(F.gelu(self.project(x)))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(cfg.dim), Attention(cfg)
        self.norm2, self.mlp = nn.LayerNorm(cfg.dim), MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def gpt(cfg, seed=0, device="cpu", dtype=torch.float32):
    """The model as a list, nn.Sequential(embedding, block1, ..., head): tokens (batch, seq) to
    logits (batch, seq, vocab). Every parameter knows its `global_name`, wherever it goes.

    seed=None draws no weights: cut the model first, then let `run.draw` do it. (Until then they are
    untouched memory, which an operating system does not hand out.)
    """
    with torch.device("meta"):                              # shapes alone: nothing is drawn here
        head = ("norm", nn.LayerNorm(cfg.dim)), ("out", nn.Linear(cfg.dim, cfg.vocab, bias=False))
        modules = [("embedding", nn.Embedding(cfg.vocab, cfg.dim)),
                   *[(f"block{i}", Block(cfg)) for i in range(1, cfg.layers + 1)],
                   ("head", nn.Sequential(OrderedDict(head)))]
    model = nn.Sequential(OrderedDict(modules)).to_empty(device="cpu")
    rope = Rope(cfg)                                        # (to_empty has left theirs undefined)
    for block in model[1:-1]:
        block.attn.rope = rope                              # one for all, and one pair of tables
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    name_parameters(model)
    return model if seed is None else draw_weights(model, seed, device, dtype)


def name_parameters(model):
    """Note the global name on each parameter, so that it is known outside of the model too."""
    for name, p in model.named_parameters():
        p.global_name = name


def named_parameters(module):
    """(global name, parameter) pairs: as gpt() named it, or as the module does."""
    return [(getattr(p, "global_name", name), p) for name, p in module.named_parameters()]


def draw_weights(model, seed, device="cpu", dtype=torch.float32):
    """Give every parameter its first value: N(0, 0.02) for matrices, 1 and 0 for LayerNorm. It
    depends on the seed, the name and the full shape alone, whatever part of it a rank keeps."""
    for name, p in named_parameters(model):
        value = part(first_value(p, name, seed), p)
        p.data = value.to(device, dtype, copy=True)         # not a view into something larger
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    return model


def first_value(p, name, seed):
    """Of the full parameter."""
    full = torch.zeros(getattr(p, "full_shape", p.shape))
    if p.ndim > 1:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full.normal_(0, 0.02, generator=generator)
    elif name.endswith("weight"):
        full.fill_(1)
    return full


def loss_sum(logits, targets):
    """Cross-entropy, summed over the valid targets; divide by their global count for the mean.

    logits (batch, seq, vocab), targets (batch, seq) with -100 where not valid; float32 or better.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# ------------------------------------------------------------------------------------------- shards

class Cut(NamedTuple):
    """A cut along `dim` into `parts` equal parts, of which this rank holds the one at `index`; the
    ranks of the process group `axis` hold all of them."""

    dim: int
    index: int
    parts: int
    axis: dist.ProcessGroup

    def take(self, full):
        """This rank's part of a full tensor; a size that does not divide is padded with zeros."""
        size = -(-full.shape[self.dim] // self.parts)
        missing = size * self.parts - full.shape[self.dim]
        full = F.pad(full, [0, 0] * (full.ndim - 1 - self.dim) + [0, missing]) if missing else full
        return full.narrow(self.dim, self.index * size, size)


def keep_shard(module, name, dim, axis, parts=None):
    """Replace a parameter by this rank's part along `dim`, and note the cut in `p.cuts`.

    axis: the process group to share it among. parts: fewer parts than ranks, where neighbours hold
    the same one (kv heads). A parameter that two modules share is cut once. Nothing is sent.
    """
    p, parts = getattr(module, name), parts or axis.size()
    if axis.size() % parts:
        raise ValueError(f"{parts} parts of {name} do not divide {axis.size()} ranks")
    cuts = getattr(p, "cuts", ())
    if all(cut.axis != axis for cut in cuts):
        cut = Cut(dim, axis.rank() * parts // axis.size(), parts, axis)
        p.full_shape, p.cuts = getattr(p, "full_shape", p.shape), (*cuts, cut)
        p.data = cut.take(p.data).clone()


def part(full, p):
    """What this rank holds of `full` when it is cut as parameter `p` was."""
    for cut in getattr(p, "cuts", ()):
        full = cut.take(full)
    return full


def mark_partial(module, name, axis):
    """Note in `p.partial` that the gradient is only a partial sum on each rank of `axis`."""
    getattr(module, name).partial = axis


def sum_partial_grads(parameters):
    """Sum the gradients that `mark_partial` noted: an all_reduce of one flat bucket per axis."""
    buckets = {}
    for p in parameters:
        if hasattr(p, "partial"):                       # a rank without a gradient adds zero
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            buckets.setdefault(p.partial, []).append(p.grad)
    for axis, grads in buckets.items():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=axis)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad))


def grad_norm(parameters, group=None):
    """The norm of the whole model's gradient, a scalar in float32 or better: every parameter once.

    group: the ranks that hold one model between them. The squares of all that they hold are summed;
    where several ranks hold the same part, as many as `p.copies` or `p.cuts` say, each gives its
    share of the square, so that it counts once. Communication: an all_reduce of one number.
    """
    ranks, grads, copies = group.size() if group else 1, [], []
    for p in parameters:
        if p.grad is not None:
            grads.append(p.grad)
            by_cuts = ranks / math.prod(cut.parts for cut in getattr(p, "cuts", ()))
            copies.append(getattr(p, "copies", by_cuts))
    exact = any(grad.dtype == torch.float64 for grad in grads)
    wide = torch.float64 if exact else torch.float32
    norms = torch._foreach_norm(grads, dtype=wide)          # foreach: one operator for all of them
    norms = torch._foreach_div(norms, [number**0.5 for number in copies])
    square = torch.stack(norms).square().sum()
    if ranks > 1:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def clip_scale(norm, largest):
    """What to multiply the gradients by, so that their global norm is at most `largest`."""
    return (largest / (norm + 1e-6)).clamp(max=1)


def clip_grads(parameters, norm, largest):
    """Scale all gradients by largest/norm if the global norm is above `largest`; sends nothing."""
    scale = clip_scale(norm, largest)
    torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], scale)


# -------------------------------------------------------------------------------------------- flags

def parse(file, doc, variants, flags, argv, Parser=argparse.ArgumentParser):
    """The command line of a chapter; `args.model` becomes the Config of the run's model."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(Path(file).name, description=doc, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("--variant", choices=list(variants), default=next(iter(variants)))
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the model")
    for name in ("layers", "dim", "heads", "kv-heads", "seq", "vocab"):
        add(f"--{name}", type=int, help="in place of the preset's")
    add("--attention", choices=CORES, help="in place of the preset's; sdpa is PyTorch's fused one")
    add("--batch", type=int, default=8, help="sequences in the whole global batch")
    add("--micro-batch", type=int, help="sequences in one forward pass on one rank")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--lr", type=float, help="learning rate")
    add("--clip", type=float, help="largest gradient norm")
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--data", help="any text, or a .bin of uint16 tokens; default: Python's source")
    add("--ignore", type=float, default=0.0, help="share of the targets to mark as not valid")
    add("--seed", type=int, default=0)
    add("--verify", action=argparse.BooleanOptionalAction,
        help="compare with one GPU; by default with the tiny preset only")
    flags(parser)
    args = parser.parse_args(argv)
    args.chapter = Path(file).stem
    shape = {f.name: getattr(args, f.name, None) or getattr(PRESETS[args.preset], f.name)
             for f in fields(Config)}
    args.model, args.attention = Config(**shape), shape["attention"]
    args.verify = args.preset == "tiny" if args.verify is None else args.verify
    return args


def environment(name, default):
    return int(os.environ.get(name, default))


def refuse(message):
    """End the program because of a bad argument. All ranks find the same fault: local rank 0 says
    it in one line and leaves with status 2, the others leave with 0, so that it is read once."""
    if environment("LOCAL_RANK", environment("RANK", 0)) > 0:
        raise SystemExit(0)
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def divides(flag, value, what, by):
    """Refuse a value that is not a multiple of `by`."""
    if value % by:
        fits = -(-value // by) * by
        refuse(f"{flag} {value} is not a multiple of {what} = {by}; {fits} would work")


def split_batch(args, shares):
    """Refuse a batch that `shares` data-parallel ranks cannot share; fill in `args.micro_batch`."""
    divides("--batch", args.batch, f"{shares} data-parallel ranks x --micro-batch",
            shares * (args.micro_batch or 1))
    args.shares, args.micro_batch = shares, args.micro_batch or args.batch // shares


# ------------------------------------------------------------------------------------------ the run

class Batch(NamedTuple):
    """What a step reads: the whole global batch, on the CPU, and this rank's share of it."""

    step: int
    tokens: torch.Tensor        # int64 (batch, seq)
    targets: torch.Tensor       # the same, -100 where not valid
    valid: int                  # the number of valid targets of the whole batch
    micro_batches: list         # pairs of tokens and targets, (micro_batch, seq), on the device


class Run:
    """What a chapter trains with: bare here, and with all instruments in lab/report.py.

    A chapter uses these names of it, and no other: args, rank, world (the number of ranks), device
    and dtype; the methods mesh, draw, optimizer, batches, measure and log; and span.
    """

    def __init__(self, args):
        self.args, self.text, self.dtype = args, Text(args), DTYPES[args.dtype]
        self.rank, self.world = environment("RANK", 0), environment("WORLD_SIZE", 1)
        self.device = join_ranks(args, self.rank, self.world)
        self.build, self.after_step, self.one_gpu = gpt, None, None     # what one GPU would train
        self.first_step, self.seconds, self.status = 0, [], 0
        torch.set_float32_matmul_precision("highest" if args.verify else "high")    # TF32 on a GPU

    def mesh(self, **axes):
        """A DeviceMesh over all ranks with named axes, of which the last one's are neighbours."""
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def draw(self, model):
        """Give the model its first values, on this run's device and in its dtype; returns it."""
        return draw_weights(model, self.args.seed, self.device, self.dtype)

    def optimizer(self, parameters, **remembered):
        """remembered: whatever else changes from step to step and has a state_dict of numbers (a
        loss scale), by name: lab/ saves it with the optimizer's states."""
        return OPTIMIZERS[self.args.optimizer](parameters, self.args.lr)

    def batches(self, share=0, build=gpt, after_step=None):
        """Yield a Batch for each step; of its sequences this rank takes the `share`-th of the
        args.shares parts that `split_batch` has made of them.

        build(cfg, seed): the model that one GPU would train; after_step(model): what it does to
        that model behind the optimizer's step, if anything.
        """
        self.build, self.after_step = build, after_step
        for step in range(self.first_step, self.args.steps):
            tokens, targets, valid = self.text.batch(step)
            mine = [x.chunk(self.args.shares)[share].to(self.device) for x in (tokens, targets)]
            pairs = zip(*(x.split(self.args.micro_batch) for x in mine))
            yield Batch(step, tokens, targets, valid, list(pairs))

    @contextlib.contextmanager
    def measure(self):
        """Around a training step: its seconds."""
        start = self.now()
        yield
        self.seconds.append(self.now() - start)

    def now(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()                        # the host is ahead of the GPU
        return time.perf_counter()

    def span(self, action, kept):
        """Around an action of a schedule, a tuple of plain data. kept: the tensors, however nested,
        that are kept for backward without autograd's knowing."""
        return contextlib.nullcontext()

    def log(self, batch, loss, norm, model, updated=None, skipped=False, **shown):
        """After a step: its line; and status 1 if a number is not finite.

        loss, norm: of the whole batch and the whole model. model: the module that this rank holds.
        updated: what the optimizer updates, if that is not the model's own parameters: flat shards,
        or (name, parameter) pairs. skipped: fp16 has refused the step, whose norm is not finite.
        shown: what else the step has to show, numbers or lists, which a picture is drawn from.
        """
        if self.rank == 0:
            one_gpu = f"{self.one_gpu_step(batch)[0]:.4f}" if self.args.verify else "-"
            print(f"step {batch.step + 1}: loss {loss:.4f}, on one GPU {one_gpu}, gradient norm "
                  f"{norm:.4f}, {1e3 * self.seconds[-1]:.0f} ms", flush=True)
        if self.status == 0 and not (math.isfinite(loss) and (skipped or math.isfinite(norm))):
            self.status = 1
            print(f"✗ step {batch.step + 1}, rank {self.rank}: loss {loss:.4f}, gradient norm "
                  f"{norm:.4f}", flush=True)

    def one_gpu_step(self, batch):
        """The plain step that every variant must equal, on the whole batch. Returns loss, norm."""
        if self.one_gpu is None:
            self.one_gpu = self.draw(self.build(self.args.model, seed=None))
            self.one_gpu_optimizer = self.optimizer(self.one_gpu.parameters())
        self.one_gpu_optimizer.zero_grad()
        logits = self.one_gpu(batch.tokens.to(self.device))
        loss = loss_sum(logits, batch.targets.to(self.device)) / batch.valid
        loss.backward()
        norm = grad_norm(self.one_gpu.parameters())
        if self.args.clip:
            clip_grads(self.one_gpu.parameters(), norm, self.args.clip)
        self.one_gpu_optimizer.step()
        if self.after_step:
            self.after_step(self.one_gpu)
        return loss.detach(), norm


def on_cuda(args):
    """Whether the run is on GPUs: if every rank of this machine has one of its own."""
    local_ranks = environment("LOCAL_WORLD_SIZE", environment("WORLD_SIZE", 1))
    return args.device != "cpu" and torch.cuda.device_count() >= local_ranks


def join_ranks(args, rank, world):
    """Join the process group, NCCL on GPUs and gloo on a CPU. Returns this rank's device."""
    backend = "nccl" if on_cuda(args) else "gloo"
    if dist.is_initialized():
        backend = dist.get_backend()                        # somebody else's group: theirs decides
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", environment("LOCAL_RANK", rank))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group(backend, device_id=device if backend == "nccl" else None,
                                **({} if "RANK" in os.environ else alone))
    return device


def launch(file, doc, variants, requires, flags=lambda parser: None, formulas=None):
    """Run a chapter, with lab/ if that lies beside this file, and leave with its exit status.

    variants: {name: train(run)}, the default first; or a tuple of that and the flags that not all
    variants know. requires(args, ranks): refuses what does not fit. flags(parser): adds flags.
    formulas(args, rank, ranks, model): what lab/ holds the run to (see lab/formulas.py).
    """
    if Path(__file__).with_name("lab").joinpath("report.py").exists():
        from lab.report import launch as launch_with_lab

        launch_with_lab(file, doc, variants, requires, flags, formulas)
    args = parse(file, doc, variants, flags, argv=None)
    requires(args, environment("WORLD_SIZE", 1))
    run, train = Run(args), variants[args.variant]
    train = train[0] if isinstance(train, tuple) else train
    train(run)
    gc.collect()                # a process group that is still referred to when Python shuts down
    dist.destroy_process_group()                            # would abort the process
    sys.exit(run.status)


if __name__ == "__main__":
    refuse("common.py is no run; python 01_single_gpu.py is one, and so is each chapter after it")
