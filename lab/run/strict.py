"""The command line, strict: ranges and fits of all flags, and one line for what is refused."""

import argparse
import itertools
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

import common
from common import DTYPES, Refused, Text, divides, environment
from lab.run.commands import Parser, number, output
from lab.run.words import name_of_text

LIMITS = {              # the lowest value, the first one that is too high, and one that would work;
                        # those of a chapter's own flags are in its room
    "lr": (1e-12, 2**31, 0.001),
    "clip": (1e-12, 2**31, 1.0),
    "ignore": (0, 1, 0.3),
    "seed": (0, 2**31, 1),
    "keep": (1, 2**31, 2),
    "ffn": (1, 2**31, 512),
    "timeout": (1, 2**31, 60),
}
WHOLE = "01", "02", "11"    # chapters whose --variant torch updates whole parameters
SIZES = "batch", "layers", "dim", "heads", "seq", "vocab", "experts"
FILES = "data", "json", "plot", "profile", "save"   # flags that name one, none of them the same
COUNT = (1, 2**31)          # of all others, for which the default or the tiny preset's would work


def parse(file: str, doc: str, variants: dict, flags: Callable | None,
          argv: list[str] | None, about: object = None,
          fits_here: bool = True) -> argparse.Namespace:
    """Parse `argv` as common.parse does; raises Refused for what is out of range or does not fit.
    about: the about.py of the chapter. fits_here: refuse sizes that this machine has no memory for.

    Adds the flags for what is written, and args.own: the chapter's own flags and their defaults.
    """
    limits = LIMITS | getattr(about, "LIMITS", {})
    if not getattr(about, "TRAINS", True):
        return parse_without_model(file, doc, variants, flags, argv, limits)
    own, given = {}, {}

    def all_flags(parser):
        everyones = len(parser._actions)
        if flags:
            flags(parser)
        own.update({action.dest: action.default for action in parser._actions[everyones:]})
        own.update({dest: parser.get_default(dest) for dest in ("precision", "recompute")})
        add = parser.add_argument
        add("--verify", action=argparse.BooleanOptionalAction,
            help="compare with one GPU; by default with the tiny preset only")
        flags_of_every_run(parser)
        add("--profile", type=output("trace.json"), help="trace the last step for Perfetto")
        add("--save", type=output("runs/checkpoints"),
            help="write checkpoints to this folder, the last one at the end")
        add("--save-every", type=int, help="and one after every so many steps")
        add("--keep", type=int, help="how many checkpoints stay; default: 2")
        add("--resume", type=input_folder,
            help="go on from a folder's last checkpoint, in any layout")
        limit_numbers(parser, limits)
        given.update(as_given(parser, argv))

    args = common.parse(file, doc, variants, all_flags, argv, Parser)
    args.own, args.chapter = own, Path(file).stem
    is_small = args.preset.startswith("tiny")           # a model for one GPU's run beside it
    args.verify = is_small if given["verify"] is None else given["verify"]
    for flag in ("save_every", "keep"):
        if given[flag] and not args.save:
            raise Refused(f"--{flag.replace('_', '-')} {given[flag]} means nothing without --save",
                          "--save runs/checkpoints")
    for flag in ("save", "resume"):
        if getattr(args, flag) and args.variant in getattr(about, "UNSAVED", ()):
            raise Refused(f"--{flag} {getattr(args, flag)}: steps of --variant {args.variant} "
                          "overlap, and have no state between them",
                          f"--variant {next(iter(variants))}")
    args.keep = args.keep or 2
    if getattr(args, "node_size", 0) is None:           # chapter 09: as it is, or 8 on one machine
        ranks, local = environment("WORLD_SIZE", 1), environment("LOCAL_WORLD_SIZE", 0)
        args.node_size = local if 0 < local < ranks else 8
    refuse_same_file(args)
    refuse_unknown_to_variant(args, variants, given)
    refuse_shapes(args)
    if args.precision == "bf16" and args.dtype == "bfloat16":
        raise Refused("--precision bf16 rounds wider masters, and --dtype is bfloat16",
                      "--dtype float32")
    if args.optimizer == "muon" and args.variant == "torch" and args.chapter[:2] not in WHOLE:
        raise Refused("--variant torch has --optimizer muon in chapters 01, 02 and 11 alone",
                      "--optimizer adamw")
    if fits_here:
        refuse_sizes(args, given)
    refuse_text(args)
    refuse_vocabulary(args)
    return args


def as_given(parser, argv):
    """Parsed without defaults: what is not None was given, be it the default's value."""
    nothing = argparse.Namespace(**{action.dest: None for action in parser._actions})
    return vars(parser.parse_args(argv, nothing))


def flags_of_every_run(parser):
    """Those of a run that trains no model, too."""
    add = parser.add_argument
    add("--json", type=output("run.json"), help="write the run as one object")
    add("--plot", type=output("figure.png"), help="draw the chapter's figure")
    add("--timeout", type=int, help="seconds after which a rank that hangs is named")


def limit_numbers(parser, limits):
    """Let the types of its flags refuse numbers that are out of range."""
    for action in parser._actions:
        if action.type in (int, float):
            usual = action.default or getattr(common.PRESETS["tiny"], action.dest, 1)
            action.type = number(action.type, *limits.get(action.dest, (*COUNT, usual)))


def parse_without_model(file, doc, variants, flags, argv, limits):
    """The same for a chapter that trains no model: args has none, nor whatever belongs to one."""
    parser = Parser(Path(file).name, description=doc)
    add = parser.add_argument
    add("--variant", choices=list(variants), default=next(iter(variants)))
    add("--dtype", choices=DTYPES, default="float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    flags(parser)
    flags_of_every_run(parser)
    limit_numbers(parser, limits)
    args = parser.parse_args(argv)
    args.chapter, args.profile, args.save = Path(file).stem, None, None
    refuse_same_file(args)
    refuse_unknown_to_variant(args, variants, as_given(parser, argv))
    return args


def input_folder(text):
    """An argparse type: a folder to read. The path "" would be the current one."""
    if not text:
        raise Refused("'' is no folder", "runs/checkpoints")
    return Path(text)


def refuse_same_file(args):
    """Refuse two flags that name the same file: one of them would overwrite the other's."""
    flags = {}
    for name in FILES:
        path = getattr(args, name, None)
        if path is None:
            continue
        other = flags.setdefault(os.path.realpath(path), name)
        if other != name:
            raise Refused(f"--{name} {path} is the file of --{other}, too", f"without --{name}")


def refuse_unknown_to_variant(args, variants, given):
    """Refuse a flag that other variants have declared and this one has not."""
    declared = {name: known[1:] for name, known in variants.items() if isinstance(known, tuple)}
    for flag in sorted(set(itertools.chain(*declared.values()))):
        dest = flag.removeprefix("--").replace("-", "_")
        knows = [name for name, known in declared.items() if flag in known]
        if args.variant not in knows and given[dest] is not None:
            raise Refused(f"{flag} means nothing to --variant {args.variant}",
                          f"--variant {knows[0]}")


def refuse_shapes(args):
    """Heads that do not divide the width, or each other."""
    cfg = args.model
    if args.kv_heads and cfg.heads % cfg.kv_heads:
        raise Refused(f"--kv-heads {cfg.kv_heads} does not divide --heads = {cfg.heads}",
                      f"--kv-heads {math.gcd(cfg.heads, cfg.kv_heads)}")
    divides("--heads", cfg.heads, "--kv-heads", cfg.kv_heads)
    divides("--dim", cfg.dim, "2 x --heads (RoPE turns pairs)", 2 * cfg.heads)


def refuse_text(args):
    """A text that cannot be read or is too short."""
    if args.data is not None:
        if not os.path.isfile(args.data) or not os.access(args.data, os.R_OK):
            raise Refused(f"--data {args.data} is no readable file", "without --data")
        tokens = os.stat(args.data).st_size // (2 if args.data.endswith(".bin") else 1)
        refuse_short(args, args.data, tokens)
    elif args.model.seq >= 10**6:               # else there is no need to read it twice
        text = Text(args)
        refuse_short(args, name_of_text(args), len(text.tokens))


def refuse_vocabulary(args):
    """A text with tokens above the vocabulary. Of a .bin, only the first batch is looked at; the
    later ones when they are made."""
    if args.data is None and args.model.vocab >= 256:
        return
    text = Text(args)
    sample = text.tokens if text.tokens.itemsize == 1 else text.batch(0)[0].numpy()
    refuse_above_vocabulary(args, text, int(sample.max()))


def refuse_short(args, name, tokens):
    """A text that is no longer than one sequence."""
    seq = args.model.seq
    if tokens <= seq:
        change = f"--seq {tokens - 1}" if tokens > 1 else "without --data"
        raise Refused(f"--seq {seq} needs a text of {seq + 1} tokens or more, and {name} has "
                      f"{tokens}", change)


def refuse_above_vocabulary(args: argparse.Namespace, text: Text, token: int) -> None:
    """The largest token of a text that the model has no row for. Raises Refused."""
    if token >= args.model.vocab:
        raise Refused(f"--vocab {args.model.vocab} is too small for token {token} of "
                      f"{name_of_text(args)}", f"--vocab {256**text.tokens.itemsize}")


def refuse_sizes(args, given):
    """Sizes that cannot be meant: they need more memory than this machine has."""
    needed, memory = least_bytes(args), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory and args.device != "cpu":
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        memory += sum(gpu.total_memory for gpu in gpus)
    if needed <= memory:
        return
    flags = [f"--{size.replace('_', '-')}" for size in SIZES if given.get(size)]
    raise Refused(f"--preset {args.preset} in these sizes needs {needed / 1e9:,.0f} GB or more, "
                  f"and this machine has {memory / 1e9:,.0f} GB",
                  f"without {' '.join(flags)}" if flags else "--preset tiny")


def least_bytes(args):
    """Bytes that this machine cannot do without, whatever the chapter: its ranks' share of the
    parameters, and of their gradients; and the batch's int64 tokens and targets on each rank."""
    cfg, width = args.model, DTYPES[args.dtype].itemsize
    experts = getattr(args, "experts", None) or 1           # each as large as an MLP
    numbers = cfg.parameters() + (experts - 1) * cfg.layers * cfg.mlp()
    ranks = environment("WORLD_SIZE", 1)
    local_ranks = environment("LOCAL_WORLD_SIZE", ranks)
    return (2 * width * numbers // ranks + 16 * args.batch * cfg.seq) * local_ranks


def refuse_cuda(args: argparse.Namespace) -> None:
    """--device cuda without a GPU for each rank of this machine. Raises Refused."""
    if args.device == "cuda" and not common.on_cuda(args):
        gpus = torch.cuda.device_count()
        local_world = environment("LOCAL_WORLD_SIZE", environment("WORLD_SIZE", 1))
        raise Refused(f"--device cuda finds {gpus} GPUs for {local_world} local ranks",
                      "--device cpu")


def settings(args: argparse.Namespace) -> str:
    """The chapter's own flags in words, where they are not the default."""
    words = []
    for dest, default in args.own.items():
        value, name = getattr(args, dest), dest.replace("_", " ")
        if value is True and not default:
            words.append(name)
        elif value is False and default:
            words.append(f"no {name}")
        elif isinstance(value, list):
            words.append(f"{name} {' '.join(map(str, value))}")
        elif value != default:
            words.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
    return ", ".join(words)
