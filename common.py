"""What the chapters share and none of them teaches, in the order in which a run meets it.

    command line   parser, parse, refuse           flags to a checked configuration, or one line
    text           Text                            files to global batches, by (seed, step) alone
    model          gpt, draw_weights, loss_sum     a GPT as a list of modules, with seams to cut
    ranks          start, launch                   who am I, on which device, and a clean way out
    shards         keep_shard, part, grad_norm     one record of which rank holds which part
    meters         CommMeter, ActivationMeter      bytes sent, kept for backward, held between steps
    the run        Verifier, Run                   same as one GPU? the report and its JSON

`python common.py runs/*.json` prints one table of several runs.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import sys
import sysconfig
import time
import zlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch 2.13 renames these two and warns about the old names; 2.11 knows only the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# ------------------------------------------------------------------------------------ command line


@dataclass(frozen=True)
class Config:
    """The shape of a model; `tie` makes embedding and head share one matrix."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    seq: int
    vocab: int
    tie: bool = False

    def parameters(self):
        """The number of parameters: q and o, k and v, up and down, two LayerNorms a block."""
        kv_dim = self.dim * self.kv_heads // self.heads
        block = self.dim * (2 * self.dim + 2 * kv_dim + 8 * self.dim + 4)
        return self.layers * block + 2 * self.dim + (1 if self.tie else 2) * self.vocab * self.dim


PRESETS = {
    "tiny": Config(layers=4, dim=128, heads=8, kv_heads=4, seq=128, vocab=256),
    "gpt2": Config(layers=12, dim=768, heads=12, kv_heads=12, seq=1024, vocab=50304, tie=True),
    "1b": Config(layers=16, dim=2048, heads=8, kv_heads=8, seq=2048, vocab=50304),  # Pythia-1B
    "7b": Config(layers=32, dim=4096, heads=32, kv_heads=32, seq=2048, vocab=50304),  # Pythia-6.9B
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS = {  # higher rates or a smaller eps magnify rounding differences and learn no better
    "adamw": lambda params, lr: torch.optim.AdamW(params, lr or 5e-4, (0.9, 0.95), eps=1e-6),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr or 0.1),
    "momentum": lambda params, lr: torch.optim.SGD(params, lr or 0.02, momentum=0.9),
}


def environment(name, default):
    return int(os.environ.get(name, default))


def refuse(message):
    """End the program because of a bad argument: one line, status 2, the same on every rank.

    All ranks find the same fault; local rank 0 prints and leaves with 2, the others leave with 0:
    the user sees the line once, and as little of torchrun's own noise as there can be.
    """
    if environment("LOCAL_RANK", environment("RANK", 0)) > 0:
        raise SystemExit(0)
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """argparse, with an error on one line and help on one rank."""

    def error(self, message):
        refuse(f"{message.removeprefix('argument ')} (python {self.prog} --help lists the flags)")

    def print_help(self, file=None):
        if environment("LOCAL_RANK", 0) == 0:
            super().print_help(file)


def number(kind, lowest, example, below=2**31):
    """An argparse type: a `kind` (int or float) with lowest <= value < below."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) < below:
                return kind(text)
        what = f"{'whole ' * (kind is int)}number in [{lowest}, {below})"
        raise argparse.ArgumentTypeError(f"{text} is no {what}; {example} would work")

    return convert


def output(example):
    """An argparse type: a file to write, with the suffix of the example; its folder is made."""

    def convert(text):
        path = Path(text)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        place = path if os.path.isfile(path) else path.parent
        fits = path.suffix == Path(example).suffix and len(path.name) < 256
        if not (fits and os.path.isdir(path.parent) and os.access(place, os.W_OK)) \
                or os.path.isdir(path):
            raise argparse.ArgumentTypeError(f"cannot write {text!r}; {example} would work")
        return path

    return convert


def parser(file, doc, variants, default, steps):
    """The command line that every chapter has; a chapter adds its own flags to it."""
    p = Parser(Path(file).name, description=doc, allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    whole = number(int, 1, example=4)
    p.set_defaults(chapter=Path(file).stem)
    p.add_argument("--variant", choices=variants, default=default)
    p.add_argument("--steps", type=whole, default=steps, help="optimizer steps")
    p.add_argument("--preset", choices=PRESETS, default="tiny", help="shape of the model")
    for name in ("layers", "dim", "heads", "kv-heads", "seq", "vocab"):
        p.add_argument(f"--{name}", type=whole, help="in place of the preset's")
    p.add_argument("--batch", type=whole, default=8, help="sequences in the whole global batch")
    p.add_argument("--micro-batch", type=whole, help="sequences in one forward pass on one rank")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    p.add_argument("--lr", type=number(float, 1e-12, example=0.001), help="learning rate")
    p.add_argument("--clip", type=number(float, 1e-12, example=1.0), help="largest gradient norm")
    p.add_argument("--dtype", choices=DTYPES, default="float32")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    p.add_argument("--data", help="any text, or a .bin of uint16 tokens; default: Python's source")
    p.add_argument("--ignore", type=number(float, 0, example=0.3, below=1), default=0.0,
                   help="share of the targets to mark as not valid")
    p.add_argument("--seed", type=number(int, 0, example=1), default=0)
    p.add_argument("--verify", action=argparse.BooleanOptionalAction,
                   help="compare with one GPU; by default with the tiny preset only")
    p.add_argument("--json", type=output("run.json"), help="write the run as one object")
    p.add_argument("--plot", type=output("figure.png"), help="draw the chapter's figure")
    p.add_argument("--profile", type=output("trace.json"), help="trace the last step for Perfetto")
    return p


def parse(p, argv=None):
    """Parse `argv`, refuse shapes that do not fit, and add `args.model`, the Config of the run."""
    args = p.parse_args(argv)
    given = {f.name: vars(args).get(f.name) for f in fields(Config)}
    args.model = m = replace(PRESETS[args.preset], **{k: v for k, v in given.items() if v})
    args.verify = args.preset == "tiny" if args.verify is None else args.verify
    if args.kv_heads and m.heads % m.kv_heads:
        refuse(f"--kv-heads {m.kv_heads} does not divide --heads = {m.heads}; "
               f"{math.gcd(m.heads, m.kv_heads)} would work")
    divides("--heads", m.heads, "--kv-heads", m.kv_heads)
    divides("--dim", m.dim, "2 x --heads (RoPE turns pairs)", 2 * m.heads)
    return args


def split_batch(args, ranks):
    """Refuse a batch that `ranks` data-parallel ranks cannot share; fill in `args.micro_batch`."""
    divides("--batch", args.batch, f"{ranks} data-parallel ranks x --micro-batch",
            ranks * (args.micro_batch or 1))
    args.micro_batch = args.micro_batch or args.batch // ranks


def divides(flag, value, what, by):
    if value % by:
        fits = -(-value // by) * by
        refuse(f"{flag} {value} is not a multiple of {what} = {by}; {fits} would work")


# -------------------------------------------------------------------------------------------- text


class Text:
    """Training text: Python's own standard library, any file as bytes, or a .bin of uint16 tokens.

    Files given with --data are memory-mapped, not read; so a token above the vocabulary in a .bin
    is refused when the first batch that has it is made.
    """

    def __init__(self, args):
        self.args, seq = args, args.model.seq
        if args.data is None:
            self.name = f"Python {platform.python_version()} standard library"
            self.tokens = np.frombuffer(standard_library(), np.uint8)
        else:
            self.name, path = args.data, Path(args.data)
            if not os.path.isfile(path) or not os.access(path, os.R_OK):
                refuse(f"--data {path} is no readable file; the default is Python's source")
            kind = np.dtype("<u2" if path.suffix == ".bin" else "u1")
            size = path.stat().st_size // kind.itemsize
            self.tokens = np.memmap(path, kind, "r", shape=size) if size else np.empty(0, kind)
        if len(self.tokens) <= seq:
            fits = f"--seq {len(self.tokens) - 1}" if len(self.tokens) > 1 else "a longer --data"
            refuse(f"--seq {seq} needs a text of {seq + 1} tokens or more, and {self.name} has "
                   f"{len(self.tokens)}; {fits} would work")
        if self.tokens.itemsize == 1 and args.model.vocab < 256:
            self.refuse_above_vocabulary(self.tokens)
        self.batch(0)

    def refuse_above_vocabulary(self, tokens):
        top, vocab = int(tokens.max()), self.args.model.vocab
        if top >= vocab:
            refuse(f"--vocab {vocab} is too small for token {top} of {self.name}; "
                   f"{256**self.tokens.itemsize} would work")

    def batch(self, step):
        """The whole global batch of one step, a function of (seed, step) alone.

        Returns tokens and targets, int64 (batch, seq) on the CPU, and the number of valid targets:
        every rank knows the whole batch, so nobody has to send a count.
        """
        args, seq = self.args, self.args.model.seq
        rng = np.random.default_rng([args.seed, step])
        starts = rng.integers(len(self.tokens) - seq, size=(args.batch, 1))
        windows = torch.from_numpy(self.tokens[starts + np.arange(seq + 1)].astype(np.int64))
        self.refuse_above_vocabulary(windows)
        tokens, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
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


# ------------------------------------------------------------------------------------------- model


def plain_attention(q, k, v):
    """Causal attention with its scores in sight. The query heads of a group share one k and v.

    q (batch, heads, seq, head_dim); k, v (batch, kv_heads, seq, head_dim); returns q's shape.
    """
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)               # (batch, kv, group*seq, hd)
    scores = (rows * q.shape[-1] ** -0.5) @ k.transpose(2, 3)         # (batch, kv, group*seq, seq)
    future = torch.full((q.shape[2], k.shape[2]), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (scores.view(*q.shape[:3], -1) + future).softmax(-1)      # (batch, heads, seq, seq)
    return (weights.view_as(scores) @ v).view_as(q)


def sdpa_attention(q, k, v):
    """The same through PyTorch's fused kernels, which never materialise the scores."""
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)


def rope(x, positions):
    """Rotary position embedding: turns the pair (i, i + head_dim/2) by an angle of its own.

    x (batch, heads, seq, head_dim); positions int64 (seq,). Angles in float32 or better.
    """
    half, precise = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=precise) / half)
    angle = positions[:, None].to(precise) * speed                      # (seq, head_dim/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Grouped-query self-attention. It has as many heads as its projections are wide."""

    def __init__(self, cfg):
        super().__init__()
        self.head_dim = cfg.dim // cfg.heads
        self.q = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.k = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.v = nn.Linear(cfg.dim, cfg.kv_heads * self.head_dim, bias=False)
        self.o = nn.Linear(cfg.dim, cfg.dim, bias=False)
        self.core = plain_attention
        self.register_buffer("positions", torch.arange(cfg.seq), persistent=False)

    def forward(self, x):                                               # (batch, seq, dim)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q, self.k, self.v))     # (batch, heads, seq, head_dim)
        positions = self.positions[: q.shape[2]]
        out = self.core(rope(q, positions), rope(k, positions), v)
        return self.o(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.dim, 4 * cfg.dim, bias=False)
        self.down = nn.Linear(4 * cfg.dim, cfg.dim, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(cfg.dim), Attention(cfg)
        self.norm2, self.mlp = nn.LayerNorm(cfg.dim), MLP(cfg)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(cfg.dim), nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, x):
        return self.out(self.norm(x))


def gpt(cfg, seed=0, device="cpu", dtype=torch.float32):
    """The model as a list: nn.Sequential(embedding, block, ..., head). A slice keeps its names.

    Tokens (batch, seq) to logits (batch, seq, vocab). seed=None draws no weights: cut a model that
    is too large to hold, then call `draw_weights`. (Until then its weights are untouched memory,
    which an operating system does not hand out before it is written to.)
    """
    with torch.device("meta"):                          # shapes alone: no weight is drawn here
        table = torch.empty(cfg.vocab, cfg.dim)
        modules = [("embedding", nn.Embedding.from_pretrained(table, freeze=False))]
        modules += [(f"block{i}", Block(cfg)) for i in range(1, cfg.layers + 1)]
        modules += [("head", Head(cfg))]
    model = nn.Sequential(OrderedDict(modules)).to_empty(device="cpu")
    for block in model[1:-1]:
        block.attn.positions = torch.arange(cfg.seq)
    if cfg.tie:
        model.head.out.weight = model.embedding.weight
    return model if seed is None else draw_weights(model, seed, device, dtype)


def named_parameters(module):
    """Pairs of a parameter's global name and the parameter: as the plain model has it, where a
    wrapper around part of it calls that part `inner`."""
    return [(name.replace("inner.", ""), p) for name, p in module.named_parameters()]


def draw_weights(model, seed, device="cpu", dtype=torch.float32):
    """Give every parameter its first value: N(0, 0.02) for matrices, 1 and 0 for LayerNorm.

    The numbers depend on the seed, the name and the full shape alone, so that a rank gets the same
    weights whatever part of them it keeps.
    """
    for name, p in named_parameters(model):
        full = torch.zeros(getattr(p, "full_shape", p.shape))
        if p.ndim > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            full.normal_(0, 0.02, generator=generator)
        elif name.endswith("weight"):
            full.fill_(1)
        p.data = part(full, p).to(device, dtype, copy=True)      # not a view into `full`
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    return model


def loss_sum(logits, targets):
    """Cross-entropy, summed over the valid targets; divide by their global count for the mean.

    logits (batch, seq, vocab), targets (batch, seq) with -100 where not valid; float32 or better.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


# ------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Ranks:
    """Who this process is: its rank of how many, its device, and a line that says why that one."""

    rank: int
    world: int
    device: torch.device
    where: str


def start(args):
    """Join the process group: NCCL if every local rank has a GPU of its own, otherwise gloo."""
    rank, world = environment("RANK", 0), environment("WORLD_SIZE", 1)
    local_rank = environment("LOCAL_RANK", rank)
    local_world = environment("LOCAL_WORLD_SIZE", world)
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < local_world:
        refuse(f"--device cuda finds {gpus} GPUs for {local_world} local ranks; cpu would work")
    cuda = args.device != "cpu" and gpus >= local_world
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    backend = "nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        by_torchrun = "RANK" in os.environ
        dist.init_process_group(backend, device_id=device if cuda else None,
                                **({} if by_torchrun else alone))
    machines = f"{world // local_world} machine{'s' * (world > local_world)}"
    why = f"GPUs: {gpus}, local ranks: {local_world}" if gpus else "no GPU"
    why = why if args.device == "auto" else f"--device {args.device}"
    return Ranks(rank, world, device, f"{device.type}, {backend} ({machines}, {why})")


def launch(main):
    """Run a chapter's `main` and leave cleanly, with the status that it returns.

    A group that a mesh or a closure still refers to when Python shuts down aborts the process. So
    `main` returns, garbage is collected, and then the group is destroyed. PyTorch itself never lets
    go of a group whose collectives a TorchDispatchMode has seen (CommMeter is one), and its threads
    would run on while Python shuts down, which now and then aborts. So leave at once.
    """
    try:
        status = main()
    except SystemExit as leaving:
        status = leaving.code
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


# ------------------------------------------------------------------------------------------ shards


class Cut(NamedTuple):
    """Cut along `dim` into `parts` equal parts, of which this rank holds the one at `index`; the
    ranks of the process group `axis` hold all of them."""

    dim: int
    index: int
    parts: int
    axis: dist.ProcessGroup


class Piece(NamedTuple):
    """Of a flattened parameter, the elements from start to stop; it is on one of `parts` ranks."""

    start: int
    stop: int
    parts: int


def keep_shard(module, name, dim, axis, parts=None):
    """Replace a parameter by this rank's part along `dim`, and note the cut in `p.cuts`.

    axis: the process group to share it among. parts: fewer parts than ranks, where neighbours hold
    the same one (kv heads). A size that does not divide is padded with zeros. What has already been
    cut over `axis` is left alone: two modules may share it, or a rule of its own came first.
    Nothing is sent. ValueError: parts that do not divide the ranks.
    """
    p, parts = getattr(module, name), parts or axis.size()
    if axis.size() % parts:
        raise ValueError(f"{parts} parts of {name} do not divide {axis.size()} ranks")
    cuts = getattr(p, "cuts", ())
    if all(cut.axis != axis for cut in cuts):
        cut = Cut(dim, axis.rank() * parts // axis.size(), parts, axis)
        p.full_shape, p.cuts = getattr(p, "full_shape", p.shape), (*cuts, cut)
        p.data = take(p.data, cut).clone()


def keep_whole(module, name, axis):
    """Note a parameter that is whole on each rank of `axis` but whose gradient is partial there."""
    getattr(module, name).partial = axis


def take(full, cut):
    if isinstance(cut, Piece):
        return full.flatten()[cut.start:cut.stop]
    size = -(-full.shape[cut.dim] // cut.parts)
    padding = size * cut.parts - full.shape[cut.dim]
    full = F.pad(full, [0, 0] * (full.ndim - 1 - cut.dim) + [0, padding]) if padding else full
    return full.narrow(cut.dim, cut.index * size, size)


def part(full, p):
    """What this rank holds of `full` when it is cut as parameter `p` was."""
    for cut in getattr(p, "cuts", ()):
        full = take(full, cut)
    return full


def gather_whole(tensor, p):
    """The full tensor of which `tensor` is this rank's part: parameter `p`, its gradient, or what
    an optimizer keeps for it. Communication: an all_gather for each cut of `p`."""
    shapes = [getattr(p, "full_shape", p.shape)]        # before each cut
    for cut in getattr(p, "cuts", ()):
        shapes.append([-(-n // cut.parts) if i == cut.dim else n for i, n in enumerate(shapes[-1])])
    tensor = tensor.detach()
    for cut, shape in reversed(list(zip(getattr(p, "cuts", ()), shapes))):
        tensor = tensor.contiguous()
        shards = [torch.empty_like(tensor) for _ in range(cut.axis.size())]
        dist.all_gather(shards, tensor, group=cut.axis)
        parts = shards[:: cut.axis.size() // cut.parts]             # one of those that are equal
        tensor = torch.cat(parts, cut.dim).narrow(cut.dim, 0, shape[cut.dim])       # no padding
    return tensor


def sum_partial_grads(parameters):
    """Sum the gradients that `keep_whole` noted. Communication: an all_reduce of one flat bucket
    for each axis and dtype; what got no gradient counts as zero."""
    buckets = {}
    for p in parameters:
        if p.requires_grad and hasattr(p, "partial"):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            buckets.setdefault((p.partial, p.dtype), []).append(p.grad)
    for (axis, _), grads in buckets.items():
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=axis)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(total.view_as(grad))


def squared_norm(parameters, ranks=1):
    """This rank's share of the squared norm of the gradient, a scalar in float32 or better.

    Summed over the `ranks` that hold these parameters between them, every one of them counts once:
    a parameter in n parts is on ranks/n of them, and each adds n/ranks of its square.
    """
    parameters = list(parameters)
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    norms = {}                                          # share: the norms that count so much
    for p in parameters:
        if p.grad is not None:
            share = math.prod(cut.parts for cut in getattr(p, "cuts", ())) / ranks
            norm = torch.linalg.vector_norm(p.grad, dtype=wide)
            norms.setdefault(share, []).append(norm)
    squares = [share * torch.stack(some).square().sum() for share, some in norms.items()]
    return sum(squares, torch.zeros((), dtype=wide, device=parameters[0].device))


def grad_norm(parameters, group=None):
    """The norm of the whole model's gradient, a scalar tensor: every parameter exactly once.

    group: the ranks that hold one model between them. Communication: one all_reduce of one number.
    """
    total = squared_norm(parameters, group.size() if group else 1)
    if group and group.size() > 1:
        dist.all_reduce(total, group=group)
    return total.sqrt()


def clip_scale(norm, largest):
    """What to multiply the gradients by, so that their global norm is at most `largest`."""
    return (largest / (norm + 1e-6)).clamp(max=1)


def clip_grads(parameters, norm, largest):
    """Scale all gradients by largest/norm if the global norm is above `largest`; sends nothing."""
    scale = clip_scale(norm, largest)
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale)


# ------------------------------------------------------------------------------------------ meters


def local(tensor):
    """The local part of a DTensor, and what its collectives fill; any other tensor as it is."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)              # of an AsyncCollectiveTensor


def nbytes(tensors):
    """Bytes behind tensors, however nested; a storage that several of them share counts once.

    For model states: the parameters, their gradients, `optimizer.state.values()`.
    """
    tensors = [t for t in tree_leaves(list(tensors)) if torch.is_tensor(t)]
    storages = (local(t).untyped_storage() for t in tensors)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class ActivationMeter(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for backward while it is entered, each storage once.

    known: tensors that are there anyway (parameters, buffers, the batch); `ignore` adds others,
    such as gathered copies of parameters. Read `bytes` at the end of forward.
    """

    def __init__(self, known):
        self.storages, self.known = {}, set()
        self.ignore(known)
        super().__init__(self.pack, lambda tensor: tensor)

    def ignore(self, tensors):
        self.known |= {local(t).untyped_storage().data_ptr() for t in tensors}

    def pack(self, tensor):
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self):
        return sum(self.storages.values())


COLLECTIVES = {  # what an operator's name contains: our name, wire bytes over payload by ring
    "allreduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
    "allgather": ("all_gather", lambda n: (n - 1) / n),
    "reducescatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
    "broadcast": ("broadcast", lambda n: 1),
    "send": ("send", lambda n: 1),
    "scatter": ("scatter", lambda n: 1),
    "gather": ("gather", lambda n: 1),
    "reduce": ("reduce", lambda n: 1),
}


class CommMeter(TorchDispatchMode):
    """Counts the collectives and sends issued while it is entered, by whomever.

    total[op]: calls; payload bytes (the full tensor: all_gather's output, reduce_scatter's input);
    wire bytes, what one rank sends under the ring algorithm. Receives are not counted again.
    """

    def __init__(self):
        super().__init__()
        self.total = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(t.__name__ == "DTensor" for t in types):
            return NotImplemented                       # until DTensor has made it local operators
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1].replace("_", "")
            for key, (op, wire) in COLLECTIVES.items():
                if key in name:
                    self.count(op, wire, func.namespace, args, result)
                    break
        return result

    def count(self, op, wire, namespace, args, result):
        sizes = [sum(t.nbytes for t in tree_leaves(x) if torch.is_tensor(t))
                 for x in (*args, result)]
        # An uneven all_to_all sends its input: c10d's second argument, the functional's first.
        payload = sizes[namespace == "c10d"] if op == "all_to_all" else max(sizes)
        seen = self.total.setdefault(op, {"calls": 0, "bytes": 0, "wire_bytes": 0})
        seen["calls"] += 1
        seen["bytes"] += payload
        seen["wire_bytes"] += payload * wire(group_of(args).size())


def group_of(args):
    """The process group of a c10d operator, or of a functional one, whose last string names it."""
    for x in args:
        if isinstance(x, torch.ScriptObject) and x._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(x)
    return dist.distributed_c10d._resolve_process_group([x for x in args if isinstance(x, str)][-1])


# ----------------------------------------------------------------------------------------- the run

VERIFIED_STEPS = 5      # so many steps are compared: rounding differences grow in any training
METERED_STEP = 2        # communication is counted in the third step, or the last if there are fewer
LOSSY = {               # twice what an honest run was seen to stray, or more
    "bfloat16": {"loss": 5e-3, "gradient norm": 2e-2, "gradients": 0.4, "parameters": 0.4},
    "float16": {"loss": 1e-3, "gradient norm": 5e-3, "gradients": 0.05, "parameters": 0.05},
    "int8": {"loss": 1e-2, "gradient norm": 5e-2, "gradients": None, "parameters": None},
}


def tolerances(dtype, optimizer):
    """The largest difference that passes, relative to the reference tensor's largest magnitude.

    Rounding to 16 bits may put a sum over all tokens (a LayerNorm's gradient) off by tenths, so
    tensors are compared in the first step alone. AdamW then moves a parameter as far either way,
    however small its gradient: those are not compared (None), nor are tensors that were sent as
    int8, where a small one may share the scale of a large one. In float32 AdamW magnifies rounding
    likewise.
    """
    kinds = "loss", "gradient norm", "gradients", "parameters"
    exact = dict.fromkeys(kinds, 1e-10 if dtype == "float64" else 1e-5)
    allowed = LOSSY.get(dtype, exact)
    if optimizer == "adamw" and dtype != "float64":
        allowed = allowed | {"parameters": None if dtype in LOSSY else 1e-3}
    return allowed


class Verifier:
    """Trains the single-GPU run on rank 0, on the same batches, and holds this run to it.

    build() returns the full model. steps: how many it has compared; beyond `tensor_steps` of them
    only the loss counts. worst[kind]: the largest difference so far and where it was.
    Communication per step, outside of all measurements: one broadcast of the reference's tensors,
    one small all_reduce, and what DTensors send to become whole.
    """

    def __init__(self, build, args, ranks, tensor_steps):
        self.clip, self.ranks, self.tensor_steps = args.clip, ranks, tensor_steps
        self.steps, self.worst = 0, {}
        shapes = [None]
        if ranks.rank == 0:
            self.model = build()
            self.optimizer = OPTIMIZERS[args.optimizer](self.model.parameters(), args.lr)
            tensors = compared(torch.zeros(()), torch.zeros(()), self.model.named_parameters())
            shapes = [{key: tensor.shape for key, (tensor, _) in tensors.items()}]
        dist.broadcast_object_list(shapes, 0)
        self.shapes = shapes[0]

    def train_step(self, tokens, targets, valid):
        """The plain step that every variant must equal. Returns all that is compared, flat."""
        self.optimizer.zero_grad()
        loss = loss_sum(self.model(tokens), targets) / valid
        loss.backward()
        norm = grad_norm(self.model.parameters())
        if self.clip:
            clip_grads(self.model.parameters(), norm, self.clip)
        self.optimizer.step()
        tensors = compared(loss, norm, self.model.named_parameters())
        return torch.cat([tensor.detach().flatten().double() for tensor, _ in tensors.values()])

    def compare(self, step, batch, loss, norm, named_parameters):
        """Compare the step just taken, each rank what it holds. Returns one GPU's loss and norm."""
        device, sizes = self.ranks.device, [shape.numel() for shape in self.shapes.values()]
        reference = torch.empty(sum(sizes), dtype=torch.float64, device=device)
        if self.ranks.rank == 0:
            tokens, targets, valid = batch
            reference = self.train_step(tokens.to(device), targets.to(device), valid)
        dist.broadcast(reference, 0)

        mine = compared(loss, norm, named_parameters)
        off = torch.full([len(sizes)], -1.0, dtype=torch.float64, device=device)     # -1: not here
        for i, (key, full) in enumerate(zip(self.shapes, reference.split(sizes))):
            if key in mine:
                tensor, owner = mine[key]
                expected = part(full.view(self.shapes[key]), owner)
                off[i] = difference(tensor, expected, full.abs().max())
        dist.all_reduce(off, dist.ReduceOp.MAX)

        for (kind, name), value in zip(self.shapes, off.tolist()):
            value = math.inf if value < 0 else value    # nobody has it
            largest, _ = self.worst.get(kind, (-1, ""))
            if value > largest and (kind == "loss" or self.steps < self.tensor_steps):
                self.worst[kind] = value, f"{kind} {name}".strip() + f" in step {step + 1}"
        self.steps += 1
        return reference[:2].tolist()


def compared(loss, norm, named_parameters):
    """All that is compared: {(kind, name): (tensor, the parameter that says how it is cut)}."""
    tensors = {("loss", ""): (loss, None), ("gradient norm", ""): (norm, None)}
    for name, p in named_parameters:
        tensors["gradients", name] = whole(torch.zeros_like(p) if p.grad is None else p.grad), p
        tensors["parameters", name] = whole(p), p
    return tensors


def whole(tensor):
    """All of a DTensor, by communication; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def difference(tensor, reference, scale):
    """max |tensor - reference| / scale; infinite if the shapes differ or anything is not finite."""
    if tensor.shape != reference.shape:
        return math.inf
    distance = (tensor.detach().double() - reference).abs().max()
    return (distance / (scale if scale > 0 else 1)).nan_to_num(math.inf, posinf=math.inf)


class Run:
    """One run of a chapter: times and meters its steps, compares them with one GPU, and reports.

    build() returns the model that one GPU would train. how: the chapter's own settings, in words.
    rounding: a key of LOSSY, if the run rounds more than --dtype says. Only rank 0 prints.
    """

    def __init__(self, args, ranks, text, build, how="", rounding=None,
                 verified_steps=VERIFIED_STEPS):
        self.args, self.ranks, self.started = args, ranks, time.perf_counter()
        self.rounding, self.verified_steps = rounding or args.dtype, verified_steps
        self.tolerance = tolerances(self.rounding, args.optimizer)
        tensor_steps = 1 if self.rounding in LOSSY else verified_steps
        self.verifier = Verifier(build, args, ranks, tensor_steps) if args.verify else None
        self.comm, self.checks, self.notes, self.peak = CommMeter(), [], [], 0
        self.loss, self.grad_norm, self.reference, self.seconds = [], [], [], []
        m, s = args.model, "s" * (ranks.world > 1)
        self.say(f"{args.chapter.replace('_', ' ')} · {args.variant} · {ranks.world} rank{s} · "
                 f"{ranks.where} · {self.rounding}")
        self.say(f"  {m.layers} layers, dim {m.dim}, {m.heads} heads ({m.kv_heads} kv), seq "
                 f"{m.seq}, batch {args.batch} · {m.parameters() / 1e6:.2f} M parameters")
        self.say(f"  {args.optimizer}{how and ', ' + how} · text: {text.name}, "
                 f"{len(text.tokens):,} tokens")
        self.say("  step      loss   single GPU   difference   grad norm    ms")

    def say(self, line):
        if self.ranks.rank == 0:
            print(line, flush=True)

    @contextlib.contextmanager
    def measure(self, step):
        """Around one training step: its seconds, and CUDA's peak memory; in one step the
        communication, in the last the profile."""
        last, cuda = self.args.steps - 1, self.ranks.device.type == "cuda"
        profile = self.args.profile and self.ranks.rank == 0 and step == last
        with contextlib.ExitStack() as meters:
            if profile:
                os.environ.setdefault("KINETO_LOG_LEVEL", "7")      # else it prints its own log
                profiler = meters.enter_context(torch.profiler.profile(acc_events=True))
            if step == min(METERED_STEP, last):
                meters.enter_context(self.comm)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            start = self.now()
            yield
            self.seconds.append(self.now() - start)
            if cuda:
                self.peak = max(self.peak, torch.cuda.max_memory_allocated())
        if profile:
            profiler.export_chrome_trace(str(self.args.profile))

    def now(self):
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def log(self, step, batch, loss, norm, named_parameters, skipped=False):
        """After a step: compare it with one GPU and print its line.

        loss, norm: of the whole batch and the whole model. named_parameters: what this rank holds.
        skipped: the optimizer refused the step (fp16's overflow), so one GPU does not take it.
        """
        self.loss.append(loss.item())
        self.grad_norm.append(norm.item())
        beside = f"{'-':>12} {'-':>12}"
        verified = self.verifier and self.verifier.steps < self.verified_steps
        if verified and skipped:
            self.reference.append((None, None))
        elif verified:
            self.reference.append(self.verifier.compare(step, batch, loss, norm, named_parameters))
            expected = self.reference[-1][0]
            off = abs(self.loss[-1] - expected) / (abs(expected) or 1)
            beside = f"{expected:12.4f} {off:12.1e}"
        if step < VERIFIED_STEPS or (step + 1) % max(1, self.args.steps // 10) == 0:
            self.say(f"{step + 1:6} {self.loss[-1]:9.4f} {beside} {self.grad_norm[-1]:11.4f} "
                     f"{1e3 * self.seconds[-1]:5.0f}{'   skipped' * skipped}")

    def check(self, name, measured, formula=None, unit="B", exact=True):
        """Record a measurement, beside its formula if it has one: equal, if that is `exact`."""
        ok = measured == formula if exact and formula is not None else None
        self.checks.append({"name": name, "measured": measured, "expected": formula, "ok": ok})
        values = f"{quantity(measured, unit):>12}{quantity(formula, unit):>15}"
        self.notes.append(f"  {name:<38}{values}   {'' if ok is None else '✓' if ok else '✗'}")

    def check_comm(self, formula):
        """Check all that this rank sent in the metered step.

        formula: {op: (calls, payload bytes, wire bytes)}; None where there is no formula.
        """
        nothing = {"calls": 0, "bytes": 0, "wire_bytes": 0}
        for op in sorted({*formula, *self.comm.total}):
            seen = self.comm.total.get(op, nothing).values()
            expected = formula.get(op, nothing.values())
            for what, measured, value in zip(("calls", "payload", "on the wire"), seen, expected):
                value = value if value is None else round(value)
                self.check(f"{op}, {what}", round(measured), value, unit="B" * (what != "calls"))

    def note(self, line):
        """Say something below the measurements."""
        self.notes.append(line)

    def finish(self):
        """Print the report, write the JSON; returns the exit status: 1 on rank 0 for a mismatch."""
        if self.ranks.device.type == "cuda":
            beside = " (with one GPU's run)" if self.verifier and self.ranks.rank == 0 else ""
            self.check(f"allocated at the peak{beside}", self.peak)
        failed = [None] * self.ranks.world
        dist.all_gather_object(failed, [check for check in self.checks if check["ok"] is False])
        if self.ranks.rank > 0:
            return 0
        for rank, checks in enumerate(failed[1:], start=1):
            self.checks += [c | {"name": f"rank {rank}: {c['name']}"} for c in checks]
        print(f"  {'per rank and step':<40}{'measured':>12}{'formula':>15}")
        for note in self.notes:
            print(f"  {note}".rstrip())

        wrong = [f"{c['name']}: measured {c['measured']}, formula {c['expected']}"
                 for c in self.checks if c["ok"] is False]
        if self.verifier:
            wrong = self.judge(self.verifier.worst) + wrong
        for problem in wrong:
            print(f"  ✗ {problem}", flush=True)
        if self.args.json:
            self.args.json.write_text(self.as_json())
        return 1 if wrong else 0

    def judge(self, worst):
        """Print the verdict of the comparison with one GPU; returns a line for each mismatch."""
        if not worst:
            return ["no step was compared with one GPU: all were skipped"]
        judged = {kind: off for kind, off in worst.items() if self.tolerance[kind] is not None}
        wrong = [f"{where} is off by {value:.1e}, tolerance {self.tolerance[kind]:.0e}"
                 for kind, (value, where) in judged.items() if value > self.tolerance[kind]]
        if self.rounding in LOSSY:
            allowed = ", ".join(f"{kind} {self.tolerance[kind]:.0e}" for kind in judged)
            print(f"  tolerances for {self.rounding}: {allowed}; from step 2 on only the loss "
                  "counts")
        verdict = ", ".join(f"{kind} {value:.0e}" for kind, (value, _) in judged.items())
        same, mark = ("NOT the same", "✗") if wrong else ("same", "✓")
        steps = f"{self.verifier.steps} step{'s' * (self.verifier.steps > 1)}"
        print(f"  {same} as one GPU over {steps}: {verdict}   {mark}", flush=True)
        return wrong

    def as_json(self):
        """The run as one JSON object; what is not finite becomes null."""
        args, ranks = self.args, self.ranks
        worst = self.verifier.worst if self.verifier else {}
        off = {kind: value for kind, (value, _) in worst.items()}
        flags = {k: v for k, v in vars(args).items() if not isinstance(v, (Path, Config))}
        record = {
            "chapter": args.chapter, "variant": args.variant, "world_size": ranks.world,
            "backend": dist.get_backend(), "device": str(ranks.device), "dtype": args.dtype,
            "config": flags | asdict(args.model),
            "loss": self.loss, "reference_loss": [loss for loss, _ in self.reference],
            "grad_norm": self.grad_norm, "reference_grad_norm": [n for _, n in self.reference],
            "step_seconds": self.seconds, "seconds": time.perf_counter() - self.started,
            "max_loss_diff": off.get("loss"),
            "max_grad_diff": max(off["gradients"], off["gradient norm"]) if off else None,
            "max_param_diff": off.get("parameters"),
            "tolerance": self.tolerance, "comm": self.comm.total, "checks": self.checks,
        }
        finite = json.loads(json.dumps(record), parse_constant=lambda name: None)
        return json.dumps(finite, indent=1) + "\n"


def quantity(value, unit="B"):
    """A number for a person: 3154944 and "B" to "3.15 MB"."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value is not None and unit and abs(value) >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return "-" if value is None else f"{value} {unit}".rstrip()


def summary(paths):
    """Print one line for each run whose JSON is given."""
    for path in paths:
        if not os.path.isfile(path):
            refuse(f"{path} is no file; a run's --json would work")
    row = "{:<24}{:<12}{:>5}  {:<8}{:>11}{:>14}{:>8}{:>9}"
    print(row.format("chapter", "variant", "ranks", "backend", "final loss", "from one GPU",
                     "checks", "seconds"))
    for path in paths:
        run = json.loads(Path(path).read_text())
        off = [run[f"max_{kind}_diff"] for kind in ("loss", "grad", "param")]
        largest = "-" if None in off else f"{max(off):.0e}"
        loss = "-" if run["loss"][-1] is None else f"{run['loss'][-1]:.4f}"
        checks = [check["ok"] for check in run["checks"] if check["ok"] is not None]
        print(row.format(run["chapter"], run["variant"], run["world_size"], run["backend"],
                         loss, largest, f"{sum(checks)}/{len(checks)}",
                         f"{run['seconds']:.0f}"))


if __name__ == "__main__":
    summary(sys.argv[1:])
