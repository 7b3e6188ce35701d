"""The command line, strict: ranges and fits of all flags, and one line for what is refused."""

import argparse
import contextlib
import math
import os
from pathlib import Path

import torch

import common
from common import Text, divides, environment, refuse

LIMITS = {              # the lowest value, the first one that is too high, and one that would work
    "lr": (1e-12, 2**31, 0.001),
    "clip": (1e-12, 2**31, 1.0),
    "ignore": (0, 1, 0.3),
    "seed": (0, 2**31, 1),
    "loss_scale": (1, 2**31, 65536),            # chapter 01
    "bucket_mb": (0, 2**31, 25),                # chapter 02
    "prefetch": (0, 3, 1),                      # chapter 03
    "shard_size": (1, 2**31, 2),
    "stage": (1, 4, 3),
}
COUNT = (1, 2**31, 4)                           # of all others


class Parser(argparse.ArgumentParser):
    """argparse, with an error on one line and help on one rank."""

    def error(self, message):
        refuse(f"{message.removeprefix('argument ')} (python {self.prog} --help lists the flags)")

    def print_help(self, file=None):
        if environment("LOCAL_RANK", 0) == 0:
            super().print_help(file)


def parse(file, doc, variants, flags, argv):
    """Parse `argv` as common.parse does, and refuse what is out of range or does not fit.

    Adds the flags for what is written, and args.own: the chapter's own flags and their defaults.
    """
    own, defaults = {}, {}

    def all_flags(parser):
        everyones = len(parser._actions)
        if flags:
            flags(parser)
        own.update({action.dest: action.default for action in parser._actions[everyones:]})
        add = parser.add_argument
        add("--json", type=output("run.json"), help="write the run as one object")
        add("--plot", type=output("figure.png"), help="draw the chapter's figure")
        add("--profile", type=output("trace.json"), help="trace the last step for Perfetto")
        for action in parser._actions:
            if action.type in (int, float):
                action.type = number(action.type, *LIMITS.get(action.dest, COUNT))
            defaults[action.dest] = action.default

    args = common.parse(file, doc, variants, all_flags, argv, Parser)
    args.own = own
    refuse_unknown_to_variant(args, variants, defaults)
    refuse_shapes(args)
    refuse_text(args)
    return args


def number(kind, lowest, below, example):
    """An argparse type: a `kind` (int or float) with lowest <= value < below."""

    def convert(text):
        with contextlib.suppress(ValueError):
            if lowest <= kind(text) < below:
                return kind(text)
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(
            f"{text} is no {what} in [{lowest}, {below}); {example} would work")

    return convert


def output(example):
    """An argparse type: a file to write, with the suffix of the example; its folder is made."""

    def convert(text):
        path = Path(text)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        place = path if os.path.isfile(path) else path.parent
        fits = path.suffix == Path(example).suffix and len(path.name) < 256
        writable = os.path.isdir(path.parent) and os.access(place, os.W_OK)
        if not fits or not writable or os.path.isdir(path):
            raise argparse.ArgumentTypeError(f"cannot write {text!r}; {example} would work")
        return path

    return convert


def refuse_unknown_to_variant(args, variants, defaults):
    """Refuse a flag that other variants have declared and this one has not."""
    declared = {name: known[1:] for name, known in variants.items() if isinstance(known, tuple)}
    for flag in sorted({flag for known in declared.values() for flag in known}):
        dest = flag.removeprefix("--").replace("-", "_")
        knows = [name for name, known in declared.items() if flag in known]
        if args.variant not in knows and getattr(args, dest) != defaults[dest]:
            refuse(f"{flag} means nothing to --variant {args.variant}; "
                   f"{' or '.join(knows)} would work")


def refuse_shapes(args):
    cfg = args.model
    if args.kv_heads and cfg.heads % cfg.kv_heads:
        refuse(f"--kv-heads {cfg.kv_heads} does not divide --heads = {cfg.heads}; "
               f"{math.gcd(cfg.heads, cfg.kv_heads)} would work")
    divides("--heads", cfg.heads, "--kv-heads", cfg.kv_heads)
    divides("--dim", cfg.dim, "2 x --heads (RoPE turns pairs)", 2 * cfg.heads)


def refuse_text(args):
    """A file that cannot be read, is too short, or has tokens above the vocabulary. Of a .bin, only
    the first batch is looked at; the later ones when they are made."""
    if args.data is not None:
        if not os.path.isfile(args.data) or not os.access(args.data, os.R_OK):
            refuse(f"--data {args.data} is no readable file; the default is Python's source")
        tokens = os.stat(args.data).st_size // (2 if args.data.endswith(".bin") else 1)
        refuse_short(args, args.data, tokens)
    elif args.model.vocab >= 256 and args.model.seq < 10**6:
        return                                  # no need to read it twice
    text = Text(args)
    refuse_short(args, text.name, len(text.tokens))
    sample = text.tokens if text.tokens.itemsize == 1 else text.batch(0)[0].numpy()
    refuse_above_vocabulary(args, text, int(sample.max()))


def refuse_short(args, name, tokens):
    seq = args.model.seq
    if tokens <= seq:
        fits = f"--seq {tokens - 1}" if tokens > 1 else "a longer --data"
        refuse(f"--seq {seq} needs a text of {seq + 1} tokens or more, and {name} has {tokens}; "
               f"{fits} would work")


def refuse_above_vocabulary(args, text, token):
    if token >= args.model.vocab:
        refuse(f"--vocab {args.model.vocab} is too small for token {token} of {text.name}; "
               f"{256**text.tokens.itemsize} would work")


def refuse_cuda(args):
    """--device cuda without a GPU for each rank of this machine."""
    gpus = torch.cuda.device_count()
    local_world = environment("LOCAL_WORLD_SIZE", environment("WORLD_SIZE", 1))
    if args.device == "cuda" and gpus < local_world:
        refuse(f"--device cuda finds {gpus} GPUs for {local_world} local ranks; cpu would work")


def settings(args):
    """The chapter's own flags in words, where they are not the default."""
    words = []
    for dest, default in args.own.items():
        value, name = getattr(args, dest), dest.replace("_", " ")
        if value is True and not default:
            words.append(name)
        elif value is False and default:
            words.append(f"no {name}")
        elif value != default:
            words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)
