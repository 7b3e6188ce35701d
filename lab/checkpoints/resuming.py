"""From which checkpoint a run goes on, and why it does not from another: one line, status 2."""

import os
import shlex
import zlib

import numpy as np
import torch.distributed as dist

from common import Refused, Text, environment
from lab.checkpoints import checkpoint, storage

MODEL = "layers", "dim", "heads", "kv_heads", "seq", "vocab", "tie"
MIXTURE = "experts", "top_k", "shared_expert"
RUN = "seed", "batch", "ignore", "optimizer", "dtype"


def identity(args, text):
    """What a run must have in common with the one that it continues: {flag: value}."""
    cfg = args.model
    flags = {name: getattr(cfg, name) for name in MODEL}
    if getattr(cfg, "experts", 0):
        flags |= {name: getattr(cfg, name, False) for name in MIXTURE}
    flags["block"] = "llama" if cfg.gated else "gpt"
    if cfg.ffn:
        flags["ffn"] = cfg.hidden
    if getattr(cfg, "router", "softmax") != "softmax":
        flags["router"] = cfg.router
    if getattr(cfg, "node_limit", 1) < getattr(cfg, "nodes", 1):
        flags |= {"nodes": cfg.nodes, "node_limit": cfg.node_limit}
    if getattr(cfg, "bias_speed", None):
        flags["balance"] = "bias"
    for name in ("documents", "window", "batch_ramp"):
        if getattr(args, name, None):
            flags[name] = getattr(args, name)
    flags["data"] = f"a text of {len(text.tokens):,} tokens with CRC-32 {crc32_of_text(text):08x}"
    return flags | {name: getattr(args, name) for name in RUN}


def still_to_come(flags, step):
    """These flags without those that matter no more after so many steps: a ramp that is over."""
    if "batch_ramp" in flags and flags["batch_ramp"][1] <= step:
        return {name: value for name, value in flags.items() if name != "batch_ramp"}
    return flags


def crc32_of_text(text):
    """Of all of it, or of 1,024 parts of one that is too long to be read at every start."""
    tokens, length, crc32 = text.tokens, 2**16, 0
    if len(tokens) <= 1024 * length:
        return zlib.crc32(tokens)
    for start in np.linspace(0, len(tokens) - length, 1024).astype(np.int64):
        crc32 = zlib.crc32(tokens[start : start + length], crc32)
    return crc32


def goes_on_from(args):
    """The Checkpoint that the run goes on from, or None; refuses one that it cannot go on from.

    That is --resume's. If --save names the same folder, there need not be one yet: the same command
    begins, and goes on when a launcher starts it again.
    """
    written = storage.checkpoints_in(args.save) if args.save else []
    is_same = args.save and args.resume and args.resume.resolve() == args.save.resolve()
    if args.resume is None or is_same and not written:
        refuse_overwriting(args, written)
        return None
    folder = last_checkpoint(args.resume)
    try:
        index = storage.read_index(folder)
    except storage.Unusable as why:
        raise Refused(f"--resume {folder} {why}", older_checkpoint(folder)) from None
    refuse_another_run(args, folder, index)
    step = index["step"]
    if step >= args.steps and is_same:
        if environment("RANK", 0) == 0:
            print(f"step {step} was the last one, and {folder} has it", flush=True)
        raise SystemExit(0)
    if step >= args.steps:
        raise Refused(f"--steps {args.steps} are done in {folder}", f"--steps {step + args.steps}")
    is_beside = args.save and folder.parent.resolve() == args.save.resolve()
    refuse_overwriting(args, written, step if is_beside else 0)
    return checkpoint.Checkpoint(folder, index)


def last_checkpoint(path):
    """The newest one in a folder that --save wrote to; or path itself, if it is a checkpoint."""
    try:
        if storage.step_of(path) is not None or storage.INDEX in os.listdir(path):
            return path
        written = storage.checkpoints_in(path)
    except OSError as error:
        raise Refused(f"--resume {path} cannot be read: {error.strerror}",
                      "without --resume") from None
    if not written:
        raise Refused(f"--resume {path} holds no checkpoint", "without --resume")
    return written[0]


def older_checkpoint(folder):
    """The change to make if this one is not usable: to the one before it, if there is any."""
    for other in storage.checkpoints_in(folder.parent):
        if storage.step_of(other) < (storage.step_of(folder) or 0):
            return shlex.join(["--resume", str(other)])
    return "without --resume"


def refuse_another_run(args, folder, index):
    """Refuse the checkpoint of another model, text, seed, batch or optimizer. The length of the
    sequences may change, for no tensor depends on it, and with it their number in a batch."""
    here, saved = still_to_come(identity(args, Text(args)), index["step"]), index["run"]
    may_change = ("seq", "batch") if here["seq"] != saved["seq"] else ()
    for name in {**here, **saved}:
        value = saved.get(name)
        if here.get(name) != value and name not in may_change:
            theirs, ours = as_flag(name, value), as_flag(name, here.get(name))
            raise Refused(f"--resume {folder} is of a run with {theirs}, and this has {ours}",
                          theirs if theirs.startswith("--") else "without --resume")


def as_flag(name, value):
    """A value of `identity` as a reader would type it: `--top-k 2`, `no --experts`."""
    flag = f"--{name}".replace("_", "-")
    if name == "data":
        return value
    if name == "tie":
        return "--preset gpt2" if value else "no tied tables"
    if value is None or value is False:
        return f"no {flag}"
    if value is True:
        return flag
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return f"{flag} {value}"


def refuse_overwriting(args, written, step=0):
    """Refuse a folder for --save with checkpoints after the step from which the run goes on: it
    neither overwrites them nor removes them when too many stay."""
    later = [path for path in written if storage.step_of(path) > step]
    if later:
        raise Refused(f"--save {args.save} holds {later[0].name} already, and nothing is "
                      "overwritten", shlex.join(["--save", f"{args.save}-2"]))


def refuse_disagreement(run):
    """Refuse where ranks have found different checkpoints, since their machines share no folder.
    Communication: an all_gather_object."""
    own, everyones = None, [None] * run.world
    if run.checkpoint is not None:
        crc32 = storage.crc32_of(run.checkpoint.index)
        own = f"{run.checkpoint.reader.folder.name} with CRC-32 {crc32:08x}"
    dist.all_gather_object(everyones, own)
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise Refused(f"--resume {run.args.resume}: rank 0 finds {everyones[0]}, and rank "
                          f"{rank} {other}: all machines are to share the folder",
                          "without --resume")
