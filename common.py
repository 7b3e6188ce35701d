"""What the chapters share: text, the model and its seams, who holds which part, the command line,
and a bare run. A chapter and this file, copied anywhere, train; one rank is one GPU, and more print
the same losses and norms. Beside lab/, a run is also measured, and each tensor held to one GPU."""

import argparse
import contextlib
import functools
import gc
import importlib
import math
import os
import sys
import zlib
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

# torch 2.13 renames these two, and warns about the old names; 2.11 knows only the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Config:                   # the shape of a model
    layers: int
    dim: int
    heads: int
    kv_heads: int
    seq: int
    vocab: int
    tie: bool = False           # embedding and head share one matrix
    attention: str = "plain"
    gated: bool = False         # --block llama, today's: RMSNorm, and an MLP with a gate (SwiGLU)
    ffn: int = 0                # hidden features of the MLP; 0: 4·dim

    @property
    def hidden(self):
        return self.ffn or 4 * self.dim

    def mlp(self):              # parameters of one
        return (3 if self.gated else 2) * self.dim * self.hidden

    def parameters(self):
        kv_dim = self.dim * self.kv_heads // self.heads
        block = self.dim * (2 * self.dim + 2 * kv_dim) + self.mlp()         # q, o; k, v; the MLP
        norms = (2 * self.layers + 1) * (1 if self.gated else 2)            # RMSNorm has no bias
        return self.layers * block + (norms + (1 if self.tie else 2) * self.vocab) * self.dim


PRESETS = {     # layers, dim, heads, kv_heads, seq, vocab (chapter 10's 1b and 7b are Llama's)
    "tiny": Config(4, 128, 8, 4, 128, 256),
    "tiny-llama": Config(4, 128, 8, 4, 128, 256, gated=True, ffn=352),
    "gpt2": Config(12, 768, 12, 12, 1024, 50304, tie=True, attention="sdpa"),
    "1b": Config(16, 2048, 8, 8, 2048, 50304, attention="sdpa"),        # Pythia-1B
    "7b": Config(32, 4096, 32, 32, 2048, 50432, attention="sdpa"),      # Pythia-6.9B
    "llama-1b": Config(16, 2048, 32, 8, 8192, 128256, True, "sdpa", True, 8192),
    "llama-8b": Config(32, 4096, 32, 8, 8192, 128256, False, "sdpa", True, 14336),
}
ONE_BUCKET = 2**22              # so few gradients are one message; else a message for each module
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = {  # higher rates or a smaller eps magnify rounding differences and learn no better
    "adamw": lambda params, lr: torch.optim.AdamW(
        params, lr or 5e-4, (0.9, 0.95), eps=1e-6, fused=True),     # one operator for all of them
    "sgd": lambda params, lr: torch.optim.SGD(params, lr or 0.1),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr or 0.02, momentum=0.9),
}
if Path(__file__).with_name("11_muon.py").exists():
    OPTIMIZERS["muon"] = lambda *args: importlib.import_module("11_muon").ShardedMuon(*args)


class Text:
    """Python's own standard library, any file as bytes, or a .bin of uint16 tokens."""

    def __init__(self, args):
        self.args = args
        if args.data is None:
            self.tokens = np.frombuffer(standard_library(), np.uint8)
        else:
            kind = np.dtype("<u2" if args.data.endswith(".bin") else "u1")
            size = os.stat(args.data).st_size // kind.itemsize
            self.tokens = np.memmap(args.data, kind, "r", shape=size)

    def starts(self, step):
        """Where each token's document begins, int64 (seq,), in all sequences of a step alike."""
        seq, mean = self.args.model.seq, self.args.documents or math.inf
        begins = np.random.default_rng([self.args.seed, step, 1]).random(seq) < 1 / mean
        begins[1:2] = False                             # the first one has a target
        return torch.from_numpy(np.maximum.accumulate(begins * np.arange(seq)))

    def batch(self, step):
        """The whole global batch of a step, a function of (seed, step) alone: tokens and targets,
        int64 (batch, seq) on the CPU, and how many targets are valid."""
        args, seq, starts = self.args, self.args.model.seq, self.starts(step).numpy()
        batch = args.ramp[step] if step < len(args.ramp) else args.batch    # sequences
        rng = np.random.default_rng([args.seed, step])
        places = rng.integers(len(self.tokens) - seq, size=(batch, starts[-1] + 1))
        places = places.take(starts, axis=1) + np.arange(seq) - starts      # a text from anywhere
        tokens = torch.from_numpy(self.tokens[places].astype(np.int64))
        targets = torch.from_numpy(self.tokens[places + 1].astype(np.int64))
        targets[:, np.flatnonzero(np.diff(starts))] = -100      # the next document's first tokens
        if args.ignore:                                 # of each sequence another share
            share = rng.random((batch, 1)) ** (1 / args.ignore - 1)     # their mean is P
            ignored = torch.from_numpy(rng.random((batch, seq)) < share)
            ignored[0, 0] = False                       # never an empty batch
            targets[ignored] = -100
        return tokens, targets, int((targets != -100).sum())


def standard_library():
    root = Path(os.__file__).parent
    leave_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = [path for path in root.rglob("*.py")
             if leave_out.isdisjoint(path.relative_to(root).parts)]
    return b"".join(path.read_bytes() for path in sorted(files, key=Path.as_posix))


def plain_attention(q, k, v, seen=None):
    """Causal attention with its scores in sight; a group of query heads shares a k and a v (GQA).
    q (batch, heads, seq, head_dim); k, v (batch, kv_heads, seq, head_dim); seen, if not all keys up
    to each query: bool (queries, keys). Returns q's shape."""
    batch, heads, seq, head_dim = q.shape
    # The heads of a group meet the same keys: one matmul serves their queries, head below head.
    stacked = (q * head_dim**-0.5).reshape(batch, k.shape[1], -1, head_dim)
    scores = (stacked @ k.transpose(2, 3)).view(batch, heads, seq, -1)
    if seen is None:
        hidden = q.new_full((seq, seq), -math.inf).triu(1)  # the future
    else:
        hidden = q.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)
    weights = (scores + hidden).softmax(-1)                 # (batch, heads, queries, keys)
    return (weights.view(*k.shape[:2], -1, k.shape[2]) @ v).view(q.shape)


CORES = {"plain": plain_attention,      # sdpa: PyTorch's fused kernels never materialise the scores
         "sdpa": lambda q, k, v, seen=None: F.scaled_dot_product_attention(
             q, k, v, seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1])}
NORMS = {False: nn.LayerNorm, True: functools.partial(nn.RMSNorm, eps=1e-5)}    # by cfg.gated


class Rope(nn.Module):
    """Rotary position embedding: turns each pair (x[i], x[i + head_dim/2]) of a query or a key by
    the angle position · base^(-2i/head_dim): their product tells how far apart they are.
    positions: int64 (seq,), a buffer: of all tokens, or of those that a rank has (06)."""

    def __init__(self, cfg):
        super().__init__()
        self.register_buffer("positions", torch.arange(cfg.seq), persistent=False)
        self.base = 500_000.0 if cfg.gated else 10_000.0        # Llama 3's, for longer sequences
        self.made_for, self.seen = None, ()                     # seen: what a core is given, too

    def pack(self, starts, window=None):
        """Each token is to see its own document, from starts[token] on: the last `window` of it."""
        key = torch.arange(len(starts), device=starts.device)
        query, self.positions = key[:, None], key - starts
        first = starts[:, None].maximum(query - (window or len(starts)) + 1)
        self.seen = ((first <= key) & (key <= query),)          # blocks along the diagonal

    def forward(self, x):                                   # (batch, heads, seq, head_dim)
        a, b = x.chunk(2, dim=-1)
        if self.made_for is not self.positions or self.cos.dtype != x.dtype:   # for all blocks
            position = self.positions[:, None].to(torch.promote_types(x.dtype, torch.float32))
            i = torch.arange(a.shape[-1], device=x.device, dtype=position.dtype)
            angle = position * self.base ** (-i / len(i))   # (seq, head_dim/2), float32 or better
            self.cos, self.sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
            self.made_for = self.positions
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).contiguous()


class Attention(nn.Module):
    """It has as many heads as its projections are wide, and need not know that they were cut."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.q = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.core, self.rope = CORES[cfg.attention], None   # gpt has one Rope for all

    def project(self, x):                                   # later chapters communicate around it
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for y in self.project(x))                # (batch, heads, seq, head_dim)
        out = self.core(self.rope(q), self.rope(k), v, *self.rope.seen)
        return self.o(out.transpose(1, 2).flatten(2))       # (batch, seq, dim)


def activate(up, gate=None):
    return F.gelu(up) if gate is None else F.silu(gate) * up        # the second is SwiGLU


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.dim, cfg.hidden, bias=False)
        self.down = nn.Linear(cfg.hidden, cfg.dim, bias=False)
        self.gate = nn.Linear(cfg.dim, cfg.hidden, bias=False) if cfg.gated else None
        self.columns = [self.up, self.gate] if cfg.gated else [self.up]     # they read its input

    def project(self, x):
        return [linear(x) for linear in self.columns]

    def forward(self, x):
        return self.down(activate(*self.project(x)))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = NORMS[cfg.gated](cfg.dim), Attention(cfg)
        self.norm2, self.mlp = NORMS[cfg.gated](cfg.dim), MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def gpt(cfg, seed=0, device="cpu", dtype=torch.float32):
    """The model as a list, nn.Sequential(embedding, block1, ..., head): tokens (batch, seq) to
    logits (batch, seq, vocab). seed=None draws no weights: cut it, then let `run.draw` do that."""
    with torch.device("meta"):                              # shapes alone: no memory is touched
        blocks = {f"block{i}": Block(cfg) for i in range(1, cfg.layers + 1)}
        head = dict(norm=NORMS[cfg.gated](cfg.dim), out=nn.Linear(cfg.dim, cfg.vocab, bias=False))
        modules = {"embedding": nn.Embedding(cfg.vocab, cfg.dim), **blocks,
                   "head": nn.Sequential(OrderedDict(head))}
    model = nn.Sequential(OrderedDict(modules)).to_empty(device="cpu")
    rope = Rope(cfg)
    for block in model[1:-1]:
        block.attn.rope = rope
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    name_parameters(model)
    return model if seed is None else draw_weights(model, seed, device, dtype)


def name_parameters(model):
    """p.global_name: its name in the whole model, also in a slice. p.cuts: none, it is whole."""
    for name, p in model.named_parameters():
        p.global_name, p.cuts = name, ()


def draw_weights(model, seed, device="cpu", dtype=torch.float32):
    """Give every parameter its first value: N(0, 0.02) for matrices, 1 and 0 for norms. It
    depends on the seed, the name and the full shape alone, whatever part of it a rank keeps."""
    for p in model.parameters():
        full = torch.zeros(getattr(p, "full_shape", p.shape))
        if p.ndim > 1:
            key = zlib.crc32(f"{seed} {p.global_name}".encode())
            full.normal_(0, 0.02, generator=torch.Generator().manual_seed(key))
        elif p.global_name.endswith("weight"):
            full.fill_(1)
        p.data = part(full, p.cuts).to(device, dtype, copy=True)    # not a view into all of it
    return model.to(device)                                         # the buffers are still to move


def recompute(model, how):
    """Drop after forward what backward reads, and compute it again there, with what that sends:
    attention's core ("selective"), or all of a block but its input ("full")."""
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    kind, name = {"selective": (Attention, "core"), "full": (Block, "forward")}.get(how, ((), ""))
    for module in model.modules():
        if isinstance(module, kind):
            setattr(module, name, functools.partial(again, getattr(module, name)))


def loss_sum(logits, targets):
    """Cross-entropy of logits (batch, seq, vocab), summed over the targets that are not -100."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# One cut: the ranks of `group` share `dim` in equal parts, of which this rank has part `index`.
Cut = namedtuple("Cut", "dim index parts group")


def keep_shard(module, name, dim, group, parts=None):
    """Keep this rank's part of a parameter along `dim` among the ranks of `group`, and note that in
    p.cuts. parts: fewer, if neighbours hold the same (kv heads). What modules share is cut once."""
    p, parts = getattr(module, name), parts or group.size()
    cuts = getattr(p, "cuts", ())
    if all(cut.group != group for cut in cuts):
        cut = Cut(dim, group.rank() * parts // group.size(), parts, group)
        p.full_shape, p.cuts = getattr(p, "full_shape", p.shape), (*cuts, cut)
        p.data = part(p.data, [cut]).clone()


def part(full, cuts):
    """This rank's part of a tensor; a size that does not divide is padded with zeros."""
    for dim, index, parts, _ in cuts:
        size = -(-full.shape[dim] // parts)
        missing = size * parts - full.shape[dim]
        full = F.pad(full, [0, 0] * (full.ndim - 1 - dim) + [0, missing]) if missing else full
        full = full.narrow(dim, index * size, size)
    return full


class PartialSums:
    """Sums p.grad over p.partial, where a parameter has that: a group of ranks which hold it all,
    and each have a part of its gradient. To be made before a step's last backward: there, as in
    chapter 02, a bucket is sent once all of it has come: a module's gradients or, if few, all."""

    def __init__(self, parameters):
        self.partial = [p for p in parameters if hasattr(p, "partial")]
        self.buckets, self.ready, self.handles = {}, set(), []
        is_small = sum(p.numel() for p in self.partial) <= ONE_BUCKET
        for p in reversed(self.partial):                # the order in which backward meets them
            module = "all" if is_small else p.global_name.split(".")[0]
            self.buckets.setdefault((module, p.partial), []).append(p)
        self.hooks = [p.register_post_accumulate_grad_hook(self.note_ready) for p in self.partial]

    def note_ready(self, *parameters):
        self.ready.update(parameters)
        for (_, group), bucket in list(self.buckets.items())[len(self.handles):]:
            if not self.ready.issuperset(bucket):
                return                                  # all ranks start them in the same order
            flat = torch.cat([torch.zeros_like(p, dtype=p.grad_dtype).flatten() if p.grad is None
                              else p.grad.flatten() for p in bucket])
            for p, view in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad = view.view_as(p)                # the sum needs no unpacking
            self.handles.append(dist.all_reduce(flat, group=group, async_op=True))

    def finish(self):
        self.note_ready(*self.partial)                  # what was not used will not come any more
        for handle in self.handles:
            handle.wait()
        for hook in self.hooks:
            hook.remove()


def grad_norm(parameters, group=None):
    """The norm of the whole model's gradient, a scalar in float32 or better: an all_reduce adds up
    the squares of the ranks of `group`. What p.copies of them hold counts 1/copies on each."""
    held, ranks = [p for p in parameters if p.grad is not None], group.size() if group else 1
    parts = [math.prod(cut.parts for cut in getattr(p, "cuts", ())) for p in held]
    copies = [getattr(p, "copies", ranks / n) for p, n in zip(held, parts)]     # 8 hold 4 parts: 2
    wide = torch.promote_types(held[0].grad.dtype, torch.float32)
    norms = torch._foreach_norm([p.grad for p in held], dtype=wide)     # one operator for them all
    norms = torch._foreach_div(norms, [number**0.5 for number in copies])
    square = torch.stack(norms).square().sum()
    if ranks > 1:
        dist.all_reduce(square, group=group)
    return square.sqrt()


class Masters(torch.optim.Optimizer):
    """Mixed precision: an optimizer of fp32 copies, the masters, which it rounds to `dtype` for the
    parameters: bf16 alone would lose small updates. p.grad is fp32, too: autograd widens what a
    micro-batch adds, and so ranks sum it. 2 + 4 + 12 bytes a parameter. device: of the masters."""

    def __init__(self, parameters, make_optimizer, dtype, device=None):
        super().__init__(parameters, {})                    # which zero_grad looks through
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        for p in self.parameters:
            master = nn.Parameter(p.detach().to(device or p.device, copy=True))
            vars(master).update(vars(p), rounded=dtype)     # its name, and how it is cut
            p.master, p.grad_dtype, p.data = master, p.dtype, p.data.to(dtype)
        self.optimizer = make_optimizer([p.master for p in self.parameters])

    def step(self):
        for p in self.parameters:
            p.master.grad = None if p.grad is None else p.grad.to(p.master.device)
        self.optimizer.step()
        for p in self.parameters:
            p.master.grad = None                            # p keeps it
            p.data.copy_(p.master.data)


def parse(file, doc, variants, flags, argv, Parser=argparse.ArgumentParser):
    """The command line of a chapter; args.model is the Config of its model."""
    parser = Parser(Path(file).name, description=doc, allow_abbrev=False,
                    conflict_handler="resolve",         # 01 and 05 have more precisions
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variant", choices=list(variants), default=next(iter(variants)))
    add("--steps", type=int, default=20, help="optimizer steps")
    add("--preset", choices=PRESETS, default="tiny", help="shape of the model")
    add("--block", choices=("gpt", "llama"), help="in place of the preset's")
    for name in ("layers", "dim", "heads", "kv-heads", "seq", "vocab", "ffn"):
        add(f"--{name}", type=int, help="in place of the preset's")
    add("--attention", choices=CORES, help="in place of the preset's; sdpa is PyTorch's fused one")
    add("--batch", type=int, default=8, help="sequences in the whole global batch")
    add("--micro-batch", type=int, help="sequences in one forward pass on one rank")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--lr", type=float, help="learning rate")
    add("--clip", type=float, help="largest gradient norm")
    add("--dtype", choices=DTYPES, default="float32")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: masters in --dtype")
    add("--recompute", choices=("none", "selective", "full"), default="none")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--data", help="any text, or a .bin of uint16 tokens; default: Python's source")
    add("--ignore", type=float, default=0.0, help="share of the targets to mark as not valid")
    add("--seed", type=int, default=0)
    parser.set_defaults(documents=None, window=None, ramp=())   # which 06, 09 and 02 have
    flags(parser)
    args = parser.parse_args(argv)
    shape = {f.name: getattr(args, f.name, None) or getattr(PRESETS[args.preset], f.name)
             for f in fields(Config)}
    shape["gated"] = args.block == "llama" if args.block else shape["gated"]
    args.model, args.attention = Config(**shape), shape["attention"]
    return args


def rounded(args):
    """What parameters and activations are rounded to; not float64, which is held to one GPU."""
    is_mixed = args.precision == "bf16" and args.dtype == "float32"
    return torch.bfloat16 if is_mixed else DTYPES[args.dtype]


def environment(name, default):
    return int(os.environ.get(name, default))


class Refused(Exception):
    """Arguments that do not fit: why, and a change of the command line that would work."""


def divides(flag, value, what, by):
    if value % by:
        raise Refused(f"{flag} {value} is not a multiple of {what} = {by}",
                      f"{flag} {-(-value // by) * by}")


def split_batch(args, shares):
    """Refuse a batch that does not divide into `shares` (data-parallel ranks) of micro-batches."""
    divides("--batch", args.batch, f"{shares} data-parallel ranks x --micro-batch",
            shares * (args.micro_batch or 1))
    args.shares, args.micro_batch = shares, args.micro_batch or args.batch // shares


# The whole batch on the CPU and its number of valid targets; this rank's (micro_batch, seq) pairs.
Batch = namedtuple("Batch", "step tokens targets valid micro_batches starts", defaults=[None])


class Run:
    """What a chapter trains with, bare; lab/run/ adds all instruments. A chapter uses args, rank,
    world, device, dtype, mesh, draw, optimizer, mixed, batches, measure, span and log alone."""

    def __init__(self, args):
        self.args, self.text, self.dtype = args, Text(args), DTYPES[args.dtype]
        self.rank, self.world = environment("RANK", 0), environment("WORLD_SIZE", 1)
        self.device = join_ranks(args, self.rank)
        self.first_step, self.status = 0, 0

    def mesh(self, **axes):
        """A DeviceMesh with named axes; along the last one, ranks are neighbours."""
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def draw(self, model):
        return draw_weights(model, self.args.seed, self.device, self.dtype)

    def optimizer(self, parameters, **remembered):
        """remembered: what else changes from step to step, by name, for lab/'s checkpoints."""
        return OPTIMIZERS[self.args.optimizer](parameters, self.args.lr)

    def mixed(self, parameters, device=None):
        """The optimizer for --precision: of the parameters, or of their Masters."""
        if self.args.precision != "bf16" and device is None:
            return self.optimizer(parameters)
        return Masters(parameters, self.optimizer, rounded(self.args), device)

    def batches(self, share=0, build=gpt, after_step=None):
        """Yield a Batch for each step, of which this rank takes one of args.shares parts. For lab/:
        build(cfg, seed), the model that one GPU trains; after_step(model), what follows a step."""
        for step in range(self.first_step, self.args.steps):
            tokens, targets, valid = self.text.batch(step)
            mine = [x.chunk(self.args.shares)[share].to(self.device) for x in (tokens, targets)]
            pairs = zip(*(x.split(self.args.micro_batch) for x in mine))
            yield Batch(step, tokens, targets, valid, list(pairs), self.text.starts(step))

    # For lab/: around a step; and around an action of a schedule, what is kept, and under way.
    measure = span = lambda self, *about: contextlib.nullcontext()

    def log(self, batch, loss, norm, model, updated=None, skipped=False, **shown):
        """Print a step's line. loss, norm: of the whole batch and model. skipped: fp16 refused it.
        The rest is for lab/; updated: flat shards or (name, parameter) pairs, not model's own."""
        if self.rank == 0:
            print(f"step {batch.step + 1}: loss {loss:.4f}, gradient norm {norm:.4f}", flush=True)
        self.status |= not math.isfinite(loss)


def on_cuda(args):
    """Whether every rank of this machine has a GPU of its own, which it is to use."""
    local_ranks = environment("LOCAL_WORLD_SIZE", environment("WORLD_SIZE", 1))
    return args.device != "cpu" and torch.cuda.device_count() >= local_ranks


def join_ranks(args, rank):
    """Make the group of all ranks; returns this one's device. They meet in a store, a dictionary
    whose address torchrun has put into the environment; that of a rank alone is in its memory."""
    on_gpus = dist.get_backend() == "nccl" if dist.is_initialized() else on_cuda(args)
    device = torch.device(f"cuda:{environment('LOCAL_RANK', rank)}" if on_gpus else "cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group("nccl" if on_gpus else "gloo", **alone,
                                device_id=device if on_gpus else None)
    return device


def launch(file, doc, variants, requires, flags=lambda parser: None, formulas=None):
    """Run a chapter, with lab/ if that lies beside this file, and leave with its exit status.
    variants: {name: train(run) or (train, its own flags)}. requires(args, ranks) raises Refused."""
    if Path(__file__).with_name("lab").exists():
        import lab.launch
        lab.launch.launch(file, doc, variants, requires, flags, formulas)   # does not come back
    args = parse(file, doc, variants, flags, argv=None)
    try:
        requires(args, environment("WORLD_SIZE", 1))
    except Refused as refused:                              # on every rank: one of them says so
        if environment("LOCAL_RANK", environment("RANK", 0)) > 0:
            sys.exit(0)
        print("error: {}; {} would work".format(*refused.args), file=sys.stderr)
        sys.exit(2)
    run, train = Run(args), variants[args.variant]
    found = (train[0] if isinstance(train, tuple) else train)(run)
    if found and run.rank == 0:
        print(*found, sep="\n")                             # of a chapter that trains nothing
    gc.collect()                # a group that is still referred to would abort Python's shutdown
    dist.destroy_process_group()
    sys.exit(run.status)
