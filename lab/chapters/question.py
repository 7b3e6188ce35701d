"""What lab.predict asks about a chapter: five questions, about one run on random sizes. They are in
the predictions.py of its room, and what the rooms share is here.

A question's answer is what the chapter's own formula function gives (or lab.run.anatomy, for what
chapter 01 taught), with the arguments that the chapter itself makes of the run's flags. Beside it
stands the derivation, in the lesson's letters: that is text to read, and a test holds it to the
answer. Chapter 10 runs nothing: its questions are about a layout, and its Plan answers them.
"""

import random
from typing import NamedTuple

import common
from common import DTYPES
from lab import chapters
from lab.run import anatomy

SEEDS = 2**31           # a seed is below

# What the letters of the derivations stand for, as the lessons have them.
LETTERS = {
    "N": "ranks", "t": "ranks", "p": "ranks", "pp": "ranks that share the layers",
    "dp": "ranks with other sequences", "cp": "ranks that share a sequence",
    "tp": "ranks that share a matrix", "r": "this rank", "n": "neighbours of this rank",
    "L": "layers", "l": "blocks of this rank", "h": "dim", "H": "heads",
    "k": "width of the keys: dim/heads · kv heads", "s": "seq", "V": "vocabulary",
    "B": "sequences of the whole batch", "b": "sequences of a micro-batch",
    "M": "micro-batches of a rank in a step", "m": "micro-batches in a step",
    "e": "bytes of a number", "g": "bytes of a gradient", "Ψ": "parameters of the whole model",
    "T": "tensors of parameters", "u": "units", "P": "units gathered ahead",
    "F_blocks": "FLOPs of all blocks, forward, a token",
    "F_head": "FLOPs of the head, forward, a token",
    "A_out": "numbers outside of the sub-layers and their inputs, on one GPU",
    "A_in": "numbers inside of the sub-layers, on one GPU", "E": "experts",
    "K": "experts of a token", "f": "capacity factor", "C": "FLOP/s", "W": "bytes/s",
    "S": "bytes of each rank's tensor", "D": "log2 N, rounded up", "α": "seconds of latency",
    "G": "GPUs", "R": "bytes of a GPU's memory", "v": "slices of the model on each stage",
    "Ψ_matmul": "parameters in matmuls: all but the embedding's and the norms'",
}  # fmt: skip


class Question(NamedTuple):
    text: str
    formula: str        # the derivation, in letters: what it gives is checked against `value`
    value: float        # by the chapter's own function
    unit: str           # B, FLOP, s, %, times; or what is counted
    why: str
    row: str = ""       # the rows of the run's report whose sum it is, if they show it
    also: str = ""      # sizes to show that the answer does not depend on


class Case:
    """A run that nobody has started: a chapter, its arguments, and the sizes by their letters."""

    says = "What is measured"

    def __init__(self, name, ranks, letter=None, **flags):
        self.name, self.ranks, self.letter, self.flags = name, ranks, letter, flags
        self.chapter = chapters.chapter(name[:2])
        words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        start = f"torchrun --nproc_per_node={ranks}" if ranks > 1 else "python"
        trains = chapters.trains(name)
        self.command = " ".join([start, f"{name}.py", *words, *["--steps=3"] * trains])
        own = getattr(self.chapter, "flags", lambda parser: None)
        args = common.parse(f"{name}.py", "", self.chapter.VARIANTS, own, [*words, "--device=cpu"])
        self.chapter.requires(args, ranks)

        self.args, self.cfg, self.e = args, args.model, DTYPES[args.dtype].itemsize
        self.micro_batches, self.sizes = 1, {}
        if trains:
            self.of_the_model()
        if letter:
            self.sizes[letter] = ranks

    def of_the_model(self):
        args, cfg = self.args, self.cfg
        self.micro_batches = args.batch // args.shares // args.micro_batch
        self.sizes = {"L": cfg.layers, "h": cfg.dim, "H": cfg.heads, "s": cfg.seq, "V": cfg.vocab,
                      "k": cfg.dim // cfg.heads * cfg.kv_heads, "Ψ": cfg.parameters(),
                      "B": args.batch, "b": args.micro_batch, "M": self.micro_batches,
                      "e": self.e, "T": anatomy.tensors(cfg)}

    def changed(self, ranks=None, **flags):
        """The same run but for this."""
        return Case(self.name, ranks or self.ranks, self.letter, **self.flags | flags)

    def block(self, kept):
        """Bytes that a block keeps for backward, of these shares of chapter 01's classes."""
        return anatomy.kept_by_modules(self.cfg, self.args.micro_batch, self.e, kept)[1]

    def states(self, answer, width=None):
        """Bytes of parameters, gradients and optimizer states together."""
        return sum(anatomy.state_bytes(self.args, answer, width or self.e).values())


def shape(pick, **fixed):
    """Flags of a small model."""
    drawn = {"layers": pick(2, 3, 4), "dim": pick(32, 64, 128), "heads": 4, "kv_heads": pick(2, 4),
             "seq": pick(32, 64, 128), "vocab": pick(256, 512)}
    return drawn | fixed


def on_the_wire(sent, *ops):
    return sum(sent[op][2] for op in ops)


def whole_block(case):
    """Note A_out and A_in of a micro-batch: chapter 01's table of a block, on one GPU."""
    block, _ = chapters.chapter("01").kept_for_backward(case.cfg, case.args.micro_batch)
    case.sizes["A_out"] = sum(size for _, size, kind in block if kind in ("outside", "inputs"))
    case.sizes["A_in"] = sum(size for _, size, _ in block) - case.sizes["A_out"]


def eight_heads(pick, ranks):
    """Flags of a model whose kv heads twice as many ranks can share."""
    return shape(pick, dim=pick(64, 128), heads=8, kv_heads=8 if ranks == 4 else pick(4, 8))


def draw_questions(name, seed):
    """The run that the seed draws for a chapter, and five questions about it."""
    rng, room = random.Random(seed), chapters.rooms_with("predictions")[name[:2]]
    return room.predictions(lambda *options: rng.choice(options))
