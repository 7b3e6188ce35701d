"""What lab.predict asks about each chapter: five questions, about one run on random sizes.

A question's answer is what the chapter's own formula function gives (or lab.bench.anatomy, for what
chapter 01 taught), with the arguments that the chapter itself makes of the run's flags. Beside it
stands the derivation, in the lesson's letters: that is text to read, and a test holds it to the
answer. Chapter 10 runs nothing: its questions are about a layout, and its Plan answers them.
"""

import importlib
import math
import random
from dataclasses import replace
from typing import NamedTuple

from torch import nn

import common
from common import DTYPES
from lab import chapters
from lab.bench import anatomy
from lab.bench.formulas import with_wire_bytes
from lab.bench.machines import MACHINES
from lab.cli.words import count

# What the letters of the derivations stand for, as the lessons have them.
LETTERS = {
    "N": "ranks", "t": "ranks", "p": "ranks", "pp": "ranks that share the layers",
    "dp": "ranks with other sequences", "cp": "ranks that share a sequence",
    "tp": "ranks that share a matrix", "r": "this rank", "n": "neighbours of this rank",
    "L": "layers", "l": "blocks of this rank", "h": "dim", "H": "heads",
    "k": "width of the keys: dim/heads · kv heads", "s": "seq", "V": "vocabulary",
    "B": "sequences of the whole batch", "b": "sequences of a micro-batch",
    "M": "micro-batches of a rank in a step", "m": "micro-batches in a step",
    "e": "bytes of a number", "Ψ": "parameters of the whole model", "T": "tensors of parameters",
    "u": "units", "P": "units gathered ahead", "F_blocks": "FLOPs of all blocks, forward, a token",
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
        self.chapter = importlib.import_module(name)
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


# ------------------------------------------------------------------ the questions of each chapter

def collectives(pick):
    n, numbers = pick(4, 5, 6, 8), pick(5, 10, 100, 1000, 10000)
    case = Case("00_collectives", n, "N", numbers=numbers, dtype=pick("float32", "float64"))
    chapter, size = case.chapter, n * numbers * case.e
    latency, (_, bandwidth) = pick(2e-6, 5e-6, 1e-5), MACHINES["H100, InfiniBand NDR"]
    case.sizes |= {"S": size, "D": (n - 1).bit_length(), "α": latency, "W": bandwidth}
    moved, formula, why = pick(
        ("scatter", "(N-1)/N * S", "rank 0 sends all but its own part"),
        ("all_gather", "(N-1) * S", "S/N of each of N ranks, in each of N-1 rounds"),
        ("all_reduce_ring", "2 * (N-1) * S", "S/N of each of N ranks, in each of 2 (N-1) rounds"))
    seconds = lambda name, size, latency, bandwidth=bandwidth: chapter.seconds(
        f"all_reduce_{name}", n, size, latency, bandwidth)
    tiny = seconds("ring", 0, latency) / seconds("doubling", 0, latency)
    rounds = seconds("ring", 0, latency) - seconds("tree", 0, latency)      # that the ring has more
    of_a_byte = seconds("tree", 1, 0) - seconds("ring", 1, 0)
    return case, [
        Question(
            "How many rounds does all_reduce_naive take?", "N-1 + D",
            len(chapter.round_bytes("all_reduce_naive", n, size)), "rounds",
            "rank 0 receives everyone's, one after the other; a broadcast doubles in every round "
            "the ranks that have the sum", "all_reduce_naive, rounds", also="S"),
        Question(
            f"How many bytes do all ranks together send in {moved}?", formula,
            chapter.sent(moved, n, size), "B", why, f"{moved}, bytes sent by all ranks"),
        Question(
            "How long does all_reduce_ring take, if a message of m bytes takes α + m/W seconds?",
            "2 * (N-1) * (α + S/N / W)", seconds("ring", size, latency), "s",
            "2 (N-1) rounds, and in each of them a part"),
        Question(
            "How many times as long as all_reduce_doubling does all_reduce_ring take, for tensors "
            "so small that their bytes take no time?", "2 * (N-1) / (2 * D)", tiny, "times",
            "then only rounds count: 2 (N-1), and 2 D, two of which are for the ranks beyond, if N "
            "is no power of 2"),
        Question(
            "From how many bytes of each rank's tensor on is all_reduce_ring faster than "
            "all_reduce_tree?", "(N-1 - D) * α * W / (D - (N-1)/N)", rounds / of_a_byte, "B",
            "it has 2 (N-1) - 2 D rounds more, and 2 S D - 2 S (N-1)/N bytes in a row less",
            also="S"),
    ]  # fmt: skip


def single_gpu(pick):
    b = pick(1, 2, 4)
    case = Case("01_single_gpu", 1, **shape(pick), batch=b * pick(1, 2), micro_batch=b,
                precision=pick("fp32", "bf16", "bf16-fp32grad", "fp16"))
    chapter, args, cfg = case.chapter, case.args, case.cfg
    widths = chapter.WIDTHS.get(args.precision, (4, 4, 0))
    activation = case.sizes["e"] = 2 if chapter.HALF[args.precision] else 4
    of_blocks = anatomy.kept_by_modules(cfg, b, activation, chapter.KEPT["full"])[1:-1]
    flops = {name: chapter.step_flops(cfg, b, "plain", name) for name in ("none", "full")}
    forward = flops["full"] - flops["none"]                 # of the blocks: full runs it again
    case.sizes["F_blocks"] = forward // (b * cfg.seq)
    case.sizes["F_head"] = (flops["none"] // 3 - forward) // (b * cfg.seq)
    masters = ", its master weight in fp32" if chapter.HALF[args.precision] else ""
    of_parameter = " + ".join(str(width) for width in (*widths, 8) if width)
    return case, [
        Question(
            f"How many bytes do parameters, gradients and AdamW's states take after a step with "
            f"--precision {args.precision}?", f"({of_parameter}) * Ψ + 4 * T",
            case.states({"parameters": cfg.parameters(), "widths": widths}), "B",
            f"per parameter: itself, its gradients{masters}, and two moments; and 4 bytes a tensor "
            "for AdamW's step count",
            "parameters + gradients + optimizer states"),
        Question(
            "How many numbers does one block keep for backward, of one micro-batch, with plain "
            "attention and without recomputation?",
            "14 * b*s*h + 2 * b*s*k + b*H * s*s + 4 * b*s",
            sum(numbers for _, numbers, _ in chapter.kept_for_backward(cfg, b)[0]), "numbers",
            "14 tensors of (b, s, h), keys and values, the weights of attention, and two "
            "statistics of each token for two LayerNorms"),
        Question(
            "How many bytes do all blocks together keep, of one micro-batch, with --recompute "
            "full?", "L * b*s*h * e", sum(of_blocks), "B", "only each block's input", also="H"),
        Question(
            "How many FLOPs does a step over the whole batch take, with plain attention and "
            "without recomputation?",
            "6 * B*s * (L * (10*h*h + 2*h*k) + V*h) + 12 * L * s*h * B*s",
            chapter.step_flops(cfg, args.batch, "plain", "none"), "FLOP",
            "6 for each token and number of a matrix (the embedding multiplies nothing), and two "
            "matmuls of attention, three times each", "computed: plain, none"),
        Question(
            "By what factor do the FLOPs of a step grow with --recompute full?",
            "(4*F_blocks + 3*F_head) / (3*F_blocks + 3*F_head)", flops["full"] / flops["none"],
            "times", "backward is two forwards, and recomputing the blocks is one more"),
    ]  # fmt: skip


def data_parallel(pick):
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    case = Case("02_data_parallel", ranks, "N", **shape(pick), variant=pick("naive", "overlap"),
                batch=ranks * m * b, micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    case.sizes["C"], case.sizes["W"] = MACHINES["H100, NVLink 4"]
    calls = anatomy.tensors(cfg)
    wire = {n: on_the_wire(chapter.traffic(e * cfg.parameters(), calls, n), "all_reduce")
            for n in (ranks, 2 * ranks)}
    return case, [
        Question(
            "How many bytes does a rank send on the wire in a step, if the ranks form a ring?",
            "2 * (N-1)/N * Ψ * e", wire[ranks], "B",
            "a reduce_scatter and an all_gather, once a step, however many micro-batches",
            "all_reduce, on the wire", also="M"),
        Question(
            "How many bytes does a rank keep: parameters, gradients and AdamW's states together?",
            "4 * e * Ψ + 4 * T", case.states({"parameters": cfg.parameters()}), "B",
            "all of them, as on one GPU: parameter, gradient and two moments; and 4 bytes a tensor "
            "for AdamW's step count", "parameters + gradients + optimizer states", also="N"),
        Question(
            f"How many all_reduces does the variant {case.args.variant} start in a step?",
            "10*L + 4", chapter.traffic(e * cfg.parameters(), calls, ranks)["all_reduce"][0],
            "calls", "one for each parameter: six matrices and two LayerNorms of two in a block; "
            "the embedding, the last LayerNorm and the head", "all_reduce, calls", also="M"),
        Question(
            "Twice as many ranks share the same batch. By what factor does that change the bytes "
            "that a rank sends on the wire in a step?", "2 * (2*N-1)/(2*N) / (2 * (N-1)/N)",
            wire[2 * ranks] / wire[ranks], "times",
            "the gradients are as large as before: on many ranks it is 2 Ψ e at the most"),
        Question(
            "From how many tokens of a rank on could the all_reduce hide behind backward, on "
            "GPUs that compute C FLOP/s and send W bytes/s?", "e/2 * (N-1)/N * C / W",
            chapter.tokens_to_hide(e, ranks, case.sizes["C"], case.sizes["W"]), "tokens",
            "2 (N-1)/N · Ψ · e / W <= 4 · tokens · Ψ / C: the model's size cancels", also="Ψ"),
    ]  # fmt: skip


def zero(pick):
    ranks, m, b, ahead = pick(2, 4, 8), pick(1, 2, 4), pick(1, 2), pick(0, 1, 2)
    case = Case("03_zero", ranks, "N", **shape(pick, layers=pick(3, 4), dim=pick(64, 128),
                                               vocab=256),
                batch=ranks * m * b, micro_batch=b, variant="zero3", prefetch=ahead,
                precision=pick("fp32", "bf16"))
    chapter, args, cfg = case.chapter, case.args, case.cfg
    width, of_sum = anatomy.widths(args, case.e)
    case.sizes |= {"e": width, "P": ahead, "u": len(chapter.padded_sizes(cfg, ranks))}
    states, masters = (8, "") if args.precision == "fp32" else (12, " and master weights")
    held = {(stage, n): case.states({"zero": stage, "holders": n}, case.e)
            for stage in (1, 3) for n in (ranks, 2 * ranks)}
    wire = {stage: on_the_wire(chapter.traffic(cfg, stage, ranks, m, (width, of_sum)),
                               "reduce_scatter", "all_gather") for stage in (1, 3)}
    at_stage_1 = f"({width} + {of_sum}) * Ψ + {states} * Ψ/{{}} + 4*u"
    return case, [
        Question(
            f"How many bytes does a rank keep at stage 3, with --precision {args.precision}: "
            "parameters, gradients and AdamW's states together?",
            f"({width} + {of_sum} + {states}) * Ψ/N + 4*u", held[3, ranks], "B",
            f"everything is cut, two moments{masters} too; and 4 bytes a unit for AdamW's step "
            "count", "parameters + gradients + optimizer states"),
        Question(
            "How many bytes of gathered parameters does a rank have at the peak, if P units are "
            "gathered ahead of the one that computes? (The blocks are the largest units.)",
            "(P + 1) * (10*h*h + 2*h*k + 4*h) * e",
            anatomy.gathered_peak(args, {"zero": 3, "holders": ranks}, case.e), "B",
            "P + 1 blocks: q, o, up and down; k and v; two LayerNorms",
            "gathered parameters, at the peak", also="N"),
        Question(
            "How many bytes does a rank send on the wire in a step at stage 3, in all_gathers and "
            "reduce_scatters together?", "3 * M * (N-1)/N * Ψ * e", wire[3], "B",
            "each micro-batch gathers for forward, gathers for backward, and reduces",
            "all_gather, on the wire + reduce_scatter, on the wire"),
        Question(
            "How many times as much is that as at stage 1?", "3 * M / 2", wire[3] / wire[1],
            "times", "stage 1 reduces and gathers once a step", also="N"),
        Question(
            f"At stage 1, with --precision {args.precision}, twice as many ranks share the model. "
            "By what factor does that change the bytes that a rank keeps, of parameters, "
            "gradients and AdamW's states together?",
            f"({at_stage_1.format('(2*N)')}) / ({at_stage_1.format('N')})",
            held[1, 2 * ranks] / held[1, ranks], "times",
            f"two moments{masters} halve; parameters and gradients stay whole"),
    ]  # fmt: skip


def whole_block(case):
    """Note A_out and A_in of a micro-batch: chapter 01's table of a block, on one GPU."""
    first = importlib.import_module("01_single_gpu")
    block, _ = first.kept_for_backward(case.cfg, case.args.micro_batch)
    case.sizes["A_out"] = sum(size for _, size, kind in block if kind in ("outside", "inputs"))
    case.sizes["A_in"] = sum(size for _, size, _ in block) - case.sizes["A_out"]


def eight_heads(pick, ranks):
    """Flags of a model whose kv heads twice as many ranks can share."""
    return shape(pick, dim=pick(64, 128), heads=8, kv_heads=8 if ranks == 4 else pick(4, 8))


def tensor_parallel(pick):
    ranks, m, b = pick(2, 4), pick(1, 2), pick(1, 2)
    case = Case("04_tensor_parallel", ranks, "t", **eight_heads(pick, ranks), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    whole_block(case)
    calls, _, wire = chapter.traffic(cfg, m, b, ranks, e)["all_reduce"]
    block = {n: case.block(chapter.kept(cfg, n)) for n in (ranks, 2 * ranks)}
    return case, [
        Question(
            "How many bytes does a rank send on the wire in a step, in all all_reduces?",
            "2 * (t-1)/t * (M * (4*L + 2) * b*s*h + 3 * M * b*s + 1) * e", wire, "B",
            "two in forward and two in backward of every block, one for the embedding, one for "
            "the head; three numbers a token for the loss, and the norm",
            "all_reduce, on the wire"),
        Question(
            "How many all_reduces are these?", "M * (4*L + 2 + 2) + 1", calls, "calls",
            "the loss has two: the largest logit, and the sums; the norm is once a step",
            "all_reduce, calls"),
        Question(
            "How many bytes do the parameters of a rank take?",
            "(L * (10*h*h + 2*h*k)/t + (4*L + 2) * h + 2 * V*h/t) * e",
            e * chapter.parameters_per_rank(cfg, ranks), "B",
            "every matrix is cut, the tables too; a LayerNorm is not", "parameters"),
        Question(
            "How many bytes does one block keep for backward on a rank, of one micro-batch?",
            "(A_out + A_in/t) * e", block[ranks], "B",
            "what is inside of the sub-layers is cut; LayerNorms and residuals are whole"),
        Question(
            "By what factor does that change, if there are twice as many ranks?",
            "(A_out + A_in/(2*t)) / (A_out + A_in/t)", block[2 * ranks] / block[ranks], "times",
            "A_out is whole on every rank, however many there are"),
    ]  # fmt: skip


def sequence_parallel(pick):
    ranks, m, b = pick(2, 4), pick(1, 2), pick(1, 2)
    variant = pick("megatron", "kept")
    case = Case("05_sequence_parallel", ranks, "t", variant=variant, **eight_heads(pick, ranks),
                batch=m * b, micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    before = importlib.import_module("04_tensor_parallel")
    whole_block(case)
    sent = {n: chapter.traffic(cfg, m, b, n, e, variant) for n in (ranks, 2 * ranks)}
    wire = {n: on_the_wire(sent[n], "reduce_scatter", "all_gather") for n in sent}
    block = case.block(chapter.kept(cfg, ranks, variant))
    again, here, inputs = 10, "(A_out + A_in)/t", "the inputs too: they are gathered again"
    if variant == "kept":
        again, here = 8, "(A_out - 2*b*s*h + A_in)/t + 2*b*s*h"
        inputs = "but the inputs of the two sub-layers, which are whole"
    return case, [
        Question(
            f"How many bytes does a rank send on the wire in a step, in all_gathers and "
            f"reduce_scatters together? (--variant {variant})",
            f"(t-1)/t * M * {again}*L * b*s*h * e", wire[ranks], "B",
            "4 L of each; where the input is not kept, 2 L gathers more",
            "all_gather, on the wire + reduce_scatter, on the wire"),
        Question(
            "How many bytes are in the all_reduces (the payload) once a step, of partial gradients "
            "and of the norm?", "((4*L + 2) * h + 2 * V*h + 1) * e", sent[ranks]["all_reduce"][1],
            "B", "LayerNorms, embedding and head are whole on every rank, which has seen its own "
            "tokens alone; the norm is one number", "all_reduce, payload", also="t"),
        Question(
            f"How many bytes does one block keep for backward on a rank, of one micro-batch? "
            f"(--variant {variant})", f"({here}) * e", block, "B", f"all is cut, {inputs}"),
        Question(
            "How many times as much does it keep on a rank of chapter 04?",
            f"(A_out + A_in/t) / ({here})", case.block(before.kept(cfg, ranks)) / block, "times",
            "there A_out is whole"),
        Question(
            "Twice as many ranks: by what factor does that change the bytes of the first "
            "question?", "(2*t-1)/(2*t) / ((t-1)/t)", wire[2 * ranks] / wire[ranks], "times",
            "a rank has all of it but its own part to send or to receive"),
    ]  # fmt: skip


def context_parallel(pick):
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    case = Case("06_context_parallel", ranks, "N", **shape(pick, seq=pick(64, 128)), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    sent = chapter.traffic(cfg, "zigzag", m, b, ranks, e)
    pairs = chapter.pairs("zigzag", 0, ranks, cfg.seq)
    last = chapter.pairs("ring", ranks - 1, ranks, cfg.seq)
    longer = chapter.pairs("zigzag", 0, 2 * ranks, 2 * cfg.seq)
    return case, [
        Question(
            "How many bytes of keys and values, and of their gradients, does a rank send around "
            "the ring in a step?", "3 * M * L * (N-1)/N * 2 * b*s*k * e",
            on_the_wire(sent, "send"), "B",
            "keys and values go around in forward and in backward, their gradients in backward",
            "send, on the wire", also="h"),
        Question(
            "How many bytes does a rank send on the wire for the sum of all gradients?",
            "2 * (N-1)/N * Ψ * e", on_the_wire(sent, "all_reduce"), "B",
            "every rank holds all parameters, and has seen other tokens",
            "all_reduce, on the wire", also="M"),
        Question(
            "How many bytes does one block keep for backward on a rank, of one micro-batch? (Of "
            "attention it keeps the lse of each query and head, in place of its weights.)",
            "(15 * b*s*h + 2 * b*s*k + 4 * b*s + b*H * s)/N * e",
            case.block(chapter.kept("zigzag", cfg, ranks)), "B",
            "1/N of chapter 01's table, and the output of attention twice: for its own backward "
            "and, with heads side by side, as the input of o"),
        Question(
            "A plain core computes all of a rank's own block. How many times as many pairs of a "
            "query and a key has the last rank of a ring (--variant ring) as any rank of a "
            "zig-zag?", "N / ((N-1)/2 + 1)", last / pairs, "times",
            "N blocks; and one at home and half a block at each later hop"),
        Question(
            "Twice as many ranks, and a sequence twice as long: by what factor does the number of "
            "pairs change that a rank of a zig-zag computes?",
            "((2*N-1)/2 + 1) / ((N-1)/2 + 1)", longer / pairs, "times",
            "blocks are as large as before, but there are twice as many keys to meet"),
    ]  # fmt: skip


def pipeline_parallel(pick):
    variant = pick("1f1b", "afab", "interleaved", "zb-h1", "dualpipe", "dualpipe-v")
    ranks = 4 if variant == "dualpipe" else pick(2, 4)      # two have no bubble in dualpipe
    deep, m, b = variant in ("interleaved", "dualpipe-v"), ranks * pick(2, 4), pick(1, 2)
    case = Case("07_pipeline_parallel", ranks, "p", variant=variant,
                **shape(pick, layers=ranks * (2 if deep else pick(1, 2))), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, args, cfg, e = case.chapter, case.args, case.cfg, case.e
    rank, (schedule, cuts) = pick(*range(ranks)), chapter.plan(args, ranks)
    slices = schedule.ranks.count(rank)
    modules = [module for stage, owner in enumerate(schedule.ranks) if owner == rank
               for module in range(*cuts[stage % schedule.depth])]
    held = anatomy.state_bytes(args, {"parameters": {}, "modules": modules}, e)["parameters"]
    blocks = [module for module in modules if 0 < module <= cfg.layers]
    neighbours = (rank > 0) + (rank < ranks - 1)
    case.sizes |= {"m": m, "r": rank, "n": neighbours, "l": len(blocks)}
    tables = modules.count(0) + modules.count(cfg.layers + 1)
    ends = f" + {tables} * V*h" * (tables > 0) + " + 2*h" * (cfg.layers + 1 in modules)
    also = {0: "the embedding", cfg.layers + 1: "the head with its LayerNorm"}
    stages = ", ".join([count(len(blocks), "block"),
                        *[also[module] for module in modules if module in also]])
    row = lambda name: name if rank == 0 else ""            # the report is about rank 0
    message = b * cfg.seq * cfg.dim * e
    wait = {"interleaved": "({p}-1)/2 / m", "zb-h1": "({p}-1)/3 / m",
            "dualpipe": "({p}/2-1) * 2/3 / m", "dualpipe-v": "({p}-1)/2 * 2/3 / m"}
    wait = wait.get(variant, "({p}-1) / m")
    alive = {"1f1b": "p - r", "afab": "m", "interleaved": "2*(p-1-r) + p + 1", "zb-h1": "p",
             "dualpipe": "p + 1", "dualpipe-v": "2*p + 1"}
    messages = {"interleaved": "(2 + n)", "dualpipe-v": "2 * n"}.get(variant, "n")
    bubbles = [chapter.bubble(variant, p, m, slices) for p in (ranks, 2 * ranks)]
    named = f"Schedule {variant}" + ", with 2 slices on a rank" * (variant == "interleaved")
    return case, [
        Question(
            f"{named}, and F, B and W take equally long: how large is the bubble, as a share of "
            "the work?", wait.format(p="p"), bubbles[0], "%",
            "the lesson's longest wait of a rank, over m (F + B + W)",
            "bubble over work if F = B = W, simulated"),
        Question(
            f"{named}: how many micro-batches does rank {rank} have alive, at the most? (In each "
            "of its stages they count once.)", alive[variant],
            chapter.most_alive(variant, rank, ranks, m, slices), "micro-batches",
            "the lesson's table: from F to BW, or to W",
            row("micro-batches alive, at the most"), also="p m r"),
        Question(
            f"{named}: how many bytes does rank {rank} send in a step, to its neighbours in the "
            "pipeline?", f"m * {messages} * b*s*h * e",
            on_the_wire(chapter.traffic(variant, rank, ranks, m, slices, message, 0, e), "send"),
            "B", "an activation or a gradient of (b, s, h), over each cut beside its stages",
            row("send, on the wire"), also="p r"),
        Question(
            f"How many bytes do the parameters of rank {rank} take? It holds {stages}.",
            f"(l * (10*h*h + 2*h*k + 4*h){ends}) * e", held, "B",
            "q, o, up and down; k and v; two LayerNorms in a block", row("parameters"),
            also="p r"),
        Question(
            "Twice as many ranks take the same micro-batches: by what factor does the bubble "
            "change?", f"({wait.format(p='2*p')}) / ({wait.format(p='p')})",
            bubbles[1] / bubbles[0], "times", "more ranks wait for the first micro-batch"),
    ]  # fmt: skip


def expert_parallel(pick):
    ranks, b = pick(2, 4), pick(1, 2)
    case = Case("08_expert_parallel", ranks, "N", variant="capacity", **shape(pick),
                batch=2 * ranks * b, micro_batch=b, experts=8, top_k=pick(1, 2),
                capacity_factor=pick(1, 1.25, 1.5, 2), dtype=pick("float32", "float64"))
    chapter, args, cfg, e = case.chapter, case.args, case.cfg, case.e
    case.sizes |= {"E": cfg.experts, "K": cfg.top_k, "f": args.capacity_factor}
    twice = case.changed(2 * ranks)
    wire = {n: on_the_wire(chapter.traffic(of.args, n, []), "all_to_all")
            for n, of in ((ranks, case), (2 * ranks, twice))}
    tokens = b * cfg.seq
    spread, cut = (chapter.row_bytes(cfg, tokens, e, often) for often in (cfg.top_k, ranks))
    return case, [
        Question(
            "How many places has an expert for each sequence?", "f * K * s / E", cfg.places,
            "places", "the mean number of picks, times the factor", also="N"),
        Question(
            "How many bytes does a rank send on the wire in a step, in all all_to_alls of "
            "--variant capacity?", "(N-1)/N * 4*L * B/N * f*K*s * h * e", wire[ranks], "B",
            "f·K·s rows of each sequence, there and back, and the same in backward; the rank's "
            "own part stays", "all_to_all, on the wire"),
        Question(
            "How many bytes do the parameters of a rank take?",
            "(Ψ - (N-1)/N * L*E * 8*h*h) * e", e * chapter.held_numbers(cfg, ranks)[0], "B",
            "all but the experts of others: an expert has 8 h² numbers", "parameters"),
        Question(
            "How many times as much would --variant tensor send for its rows as dropless does, if "
            "all experts are picked alike?", "N / K", cut / spread, "times",
            "all tokens go to all ranks; dropless sends K rows for a token", also="E"),
        Question(
            "Twice as many ranks share the same experts and the same batch: by what factor does "
            "that change the bytes of the second question?",
            "(2*N-1)/(2*N) * B/(2*N) / ((N-1)/N * B/N)", wire[2 * ranks] / wire[ranks], "times",
            "a rank has half of the sequences, and keeps a smaller part of their rows"),
    ]  # fmt: skip


def all_axes(pick):
    layout = pick({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2},
                  {"pp": 4, "dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 4})
    m, b, pp, dp = pick(4, 8), pick(1, 2), layout["pp"], layout.get("dp", 1)
    case = Case("09_5d", math.prod(layout.values()), **layout,
                **shape(pick, layers=pp * pick(1, 2), dim=pick(64, 128), heads=8, kv_heads=8),
                batch=dp * m * b, micro_batch=b, dtype=pick("float32", "float64"))
    args, cfg, e = case.args, case.cfg, case.e
    case.sizes |= {"pp": pp, "dp": dp, "cp": args.cp, "tp": args.tp}
    answer, sent = of_first_rank(case)
    _, of_more = of_first_rank(case.changed(2 * case.ranks, tp=2 * args.tp))
    tp = on_the_wire(sent["tp"], "all_gather", "reduce_scatter")
    cut = "queries", "keys", "mlp"
    names = {kind: "cut by tp" if kind in cut else "whole" for kind in answer["holders"]}
    gradients = anatomy.gradient_traffic(cfg, answer | {"gradients": names}, e)["cut by tp"]
    pipeline = importlib.import_module("07_pipeline_parallel")
    on_axis = pick(
        Question(
            "How many bytes does rank 0 send on the wire of tp in a step?",
            "M * L/pp * 8 * (tp-1)/tp * b*s/cp * h * e", tp, "B",
            "eight gathers and scatters in each of its blocks, around two sub-layers, forward and "
            "backward", "tp", also="dp"),
        Question(
            "How many bytes does rank 0 send to the next stage in a step?",
            "M * b*s/(cp*tp) * h * e", on_the_wire(sent["pp"], "send"), "B",
            "each rank of tp and of cp sends its own tokens of every micro-batch", "pp", also="L"))
    return case, [
        on_axis,
        Question(
            "How many bytes does rank 0 send on the wire in a step for the gradients of what tp "
            "cuts (q, k, v, o, up and down), without ZeRO?",
            "2 * (dp*cp-1)/(dp*cp) * L/pp * (10*h*h + 2*h*k)/tp * e",
            on_the_wire(gradients, "all_reduce"), "B",
            "an all_reduce over the dp · cp ranks that hold the same part, once a step",
            "gradients, cut by tp", also="M"),
        Question(
            "How many bytes do the parameters of rank 0 take? It holds the embedding and L/pp "
            "blocks.", "(L/pp * ((10*h*h + 2*h*k)/tp + 4*h) + V*h) * e",
            anatomy.state_bytes(args, answer, e)["parameters"], "B",
            "tp cuts the matrices of the blocks; LayerNorms and embedding are whole",
            "parameters"),
        Question(
            "How large is the bubble of 1f1b, as a share of the work, if F, B and W take equally "
            "long?", "(pp-1) / M", pipeline.bubble("1f1b", pp, args.micro_batches, 1), "%",
            "chapter 07: the last stage waits for pp-1 forwards, and the first for as many "
            "backwards", also="dp"),
        Question(
            "With twice as many ranks, all of them for tp: by what factor does that change the "
            "bytes that rank 0 sends on the wire of tp?", "(2*tp-1)/(2*tp) / ((tp-1)/tp)",
            on_the_wire(of_more["tp"], "all_gather", "reduce_scatter") / tp, "times",
            "the whole activation is gathered and scattered, but for its own part"),
    ]  # fmt: skip


def of_first_rank(case):
    """What chapter 09's formulas give for rank 0, and what it sends on each axis."""
    args, chapter = case.args, case.chapter
    answer = chapter.formulas(args, 0, case.ranks, nn.ModuleList())    # not built
    passes = args.micro_batches * sum(0 < module <= case.cfg.layers for module in answer["modules"])
    sends = answer["sent"]["pp"]["send"][0]
    sent = chapter.traffic(args, case.ranks, passes, 0, sends, case.e)
    return answer, with_wire_bytes(sent, answer["ranks"])


class Planned:
    """As a Case, a layout that nobody has planned: on H100s, with ZeRO-1, micro-batches of one
    sequence, of which a rank has m, and full recomputation."""

    says = "What the planner says"
    name, e = "10_planner", 2

    def __init__(self, model, dp, tp, pp, v, m):
        self.chapter = importlib.import_module(self.name)
        self.model, self.cluster = self.chapter.MODELS[model], self.chapter.CLUSTERS["h100"]
        self.software = self.chapter.SOFTWARE["megatron-2024"]      # the planner's defaults
        self.ranks, self.batch, self.micro_batches = dp * tp * pp, dp * m, m
        self.layout = self.chapter.Layout(dp, tp, pp=pp, v=v, zero=1, recompute="full")
        flags = {"model": model, "gpus": self.ranks, "batch": self.batch, "tp": tp, "pp": pp,
                 "v": v, "cp": 1, "micro-batch": 1, "zero": 1, "recompute": "full"}
        self.command = " ".join(["python 10_planner.py",
                                 *[f"--{flag} {value}" for flag, value in flags.items()]])
        self.sizes = {"G": self.ranks, "Ψ": self.model.parameters(), "R": self.cluster.memory,
                      "L": self.model.layers, "h": self.model.dim, "tp": tp, "pp": pp, "v": v,
                      "M": m}

    def plan(self, layout, batch):
        gpus = layout.dp * layout.tp * layout.pp
        return self.chapter.Plan(self.model, layout, self.cluster, self.software, gpus, batch)

    def states(self, **layout):
        """Bytes of weights, gradients and optimizer states on a GPU of another layout."""
        memory = self.plan(self.chapter.Layout(**layout), layout["dp"]).memory
        return sum(memory[cause] for cause in ("weights", "gradients", "optimizer"))


def planner(pick):
    name, tp, pp = pick(("8b", 2, 4), ("8b", 4, 2), ("70b", 8, 4), ("70b", 8, 8), ("gpt3", 8, 8),
                        ("405b", 8, 16))
    case = Planned(name, pick(8, 16, 32), tp, pp, pick(1, 2), pp * pick(1, 2, 4))
    chapter, layout, stage = case.chapter, case.layout, pick(1, 2)
    twice = replace(layout, dp=layout.dp // 2, tp=2 * tp)

    def tp_sends(layout):
        """Numbers that a GPU sends over tp in a layer's forward, of a step's micro-batches."""
        numbers, n, *_ = chapter.messages(case.model, layout)["tp"]
        return case.batch // layout.dp * (n - 1) / n * numbers

    longer = replace(case.model, seq=131072)
    flops = {scores: chapter.step_flops(longer, 1, scores) for scores in ("all", "causal")}
    case.sizes |= {"s": longer.seq, "Ψ_matmul": longer.layers * longer.weights(longer.top_k)
                   + longer.vocab * longer.dim}
    whole, cut = {1: ("(2 + 4)", "12"), 2: ("2", "(4 + 12)")}[stage]
    return case, [
        Question(
            f"With dp alone on all GPUs, and ZeRO-{stage}: how many bytes of weights, gradients "
            "and AdamW's states would a GPU have?", f"{whole} * Ψ + {cut} * Ψ/G",
            case.states(dp=case.ranks, zero=stage), "B",
            "a parameter has 2 bytes of weights, 4 of gradients, and 12 of a master weight and two "
            "moments; ZeRO-1 shards the last, ZeRO-2 the last two. An H100 has 80 GB", also="pp"),
        Question(
            "How many times the memory of one H100 do all weights, gradients and AdamW's states "
            "take, if each of them is kept once?", "(2 + 4 + 12) * Ψ / R",
            case.states(dp=1) / case.cluster.memory, "times",
            "so many GPUs are needed at the least, however they share the model, and activations "
            "come on top", also="G"),
        Question(
            "How large is the bubble of 1f1b (interleaved, if v > 1), as a share of the time that "
            "a stage takes for its micro-batches, if all stages take as long?", "(pp-1) / v / M",
            chapter.bubble(layout, 1, 1, 1) / (3 * case.micro_batches), "%",
            "(pp-1)/v times the time of a micro-batch on a stage: until the first has arrived and "
            "the last has returned", also="tp"),
        Question(
            "Twice the tp on as many GPUs, so half the dp, and the same batch: by what factor do "
            "the bytes that a GPU sends over tp in a step change?",
            "2 * (2*tp-1)/(2*tp) / ((tp-1)/tp)", tp_sends(twice) / tp_sends(layout), "times",
            "half as many replicas have twice as many micro-batches each, and in each of them a "
            "GPU sends all of the same activations but its own part", also="pp"),
        Question(
            "MFU by Megatron's convention counts all scores of attention, by Llama 3's only the "
            "causal half. How many times as large is the first one for the same run, with "
            "sequences of 131,072 tokens?",
            "(6*Ψ_matmul + 12*L*s*h) / (6*Ψ_matmul + 6*L*s*h)", flops["all"] / flops["causal"],
            "times", "of a token: 6 FLOPs for each parameter that multiplies, and 12·s·h in each "
            "layer for scores, or half of that", also="G"),
    ]  # fmt: skip


CHAPTERS = {
    "00_collectives": collectives, "01_single_gpu": single_gpu,
    "02_data_parallel": data_parallel, "03_zero": zero,
    "04_tensor_parallel": tensor_parallel, "05_sequence_parallel": sequence_parallel,
    "06_context_parallel": context_parallel, "07_pipeline_parallel": pipeline_parallel,
    "08_expert_parallel": expert_parallel, "09_5d": all_axes,
    "10_planner": planner}  # fmt: skip


def questions(name, seed):
    """The run that the seed draws for a chapter, and five questions about it."""
    rng = random.Random(seed)
    return CHAPTERS[name](lambda *options: rng.choice(options))
