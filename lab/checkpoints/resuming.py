"""From which checkpoint a run goes on, and why it does not from another: one line, status 2."""

import itertools
import math
import os
import shlex
import zlib

import numpy as np
import torch.distributed as dist

from common import Refused, Text, environment, gpt
from lab.checkpoints import checkpoint, storage
from lab.run import anatomy
from lab.run.words import name_of_text

MODEL = "layers", "dim", "heads", "kv_heads", "seq", "vocab", "tie"
MIXTURE = "experts", "top_k", "shared_expert"
RUN = "seed", "batch", "ignore", "optimizer", "dtype"
PACKED = "documents", "window"
STATES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "momentum": {"momentum_buffer"}, "sgd": set()}


def identity(args, text):
    """What a run must have in common with the one that it continues: {flag: value}."""
    cfg = args.model
    names = MODEL + (MIXTURE if getattr(cfg, "experts", 0) else ())
    names += ("gated",) if cfg.gated else ()
    names += ("hidden",) if cfg.ffn else ()
    names += ("router",) if getattr(cfg, "router", "softmax") != "softmax" else ()
    is_limited = getattr(cfg, "node_limit", 1) < getattr(cfg, "nodes", 1)
    names += ("nodes", "node_limit") if is_limited else ()
    same = {name: getattr(cfg, name, False) for name in names}
    same |= {name: getattr(args, name) for name in PACKED if getattr(args, name)}
    ramp = getattr(args, "batch_ramp", None)            # chapter 02's: START and STEPS
    same |= {"batch_ramp": ramp} if ramp else {}
    same["data"] = f"a text of {len(text.tokens):,} tokens with CRC-32 {crc32_of_text(text):08x}"
    return same | {name: getattr(args, name) for name in RUN}


def still_to_come(same, step):
    """What is in common after so many steps: a ramp that is over by then does not count."""
    if "batch_ramp" in same and same["batch_ramp"][1] <= step:
        return {name: value for name, value in same.items() if name != "batch_ramp"}
    return same


def may_change(mine, saved):
    """What may be another in the run that goes on: the length of the sequences, which no tensor
    has, and with it their number in a batch."""
    is_another = mine["seq"] != saved.get("seq") and type(saved.get("seq")) is int
    return ("seq", "batch") if is_another else ()


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
    mine = storage.checkpoints_in(args.save) if args.save else []
    there = args.save and args.save.resolve()
    in_place = there and args.resume and args.resume.resolve() == there
    if args.resume is None or in_place and not mine:
        refuse_overwriting(args, mine)
        return None
    folder = last_checkpoint(args.resume)
    try:
        index = storage.read_index(folder)
        refuse_others(args, folder, index)
        check_tensors(args, index["tensors"], "loss_scale" in index["remembered"])
    except storage.Unusable as why:
        raise Refused(f"--resume {folder} {why}", instead_of(args, folder)) from None
    if index["step"] >= args.steps and in_place:
        if environment("RANK", 0) == 0:
            print(f"step {index['step']} was the last one, and {folder} has it", flush=True)
        raise SystemExit(0)
    if index["step"] >= args.steps:
        raise Refused(f"--steps {args.steps} are done in {folder}",
                      f"--steps {index['step'] + args.steps}")
    refuse_overwriting(args, mine, index["step"] if folder.parent.resolve() == there else 0)
    return checkpoint.Checkpoint(folder, index)


def last_checkpoint(path):
    """Of a folder that --save wrote to; or path itself, if it is a checkpoint."""
    try:
        if storage.step_of(path) is not None or storage.INDEX in os.listdir(path):
            return path
        found = storage.checkpoints_in(path)
    except OSError as error:
        raise Refused(f"--resume {path} cannot be read: {error.strerror}",
                      "without --resume") from None
    if not found:
        raise Refused(f"--resume {path} holds no checkpoint", "without --resume")
    return found[0]


def instead_of(args, folder):
    """The change to make for a checkpoint that is not usable: to one next to it, the last older one
    if there is any; or to start anew."""
    step = storage.step_of(folder) or 0
    others = [other for other in storage.checkpoints_in(folder.parent) if other != folder]
    others.sort(key=lambda other: storage.step_of(other) > step)
    usable = next(filter(is_usable, others), None)
    if usable is None:
        return "without --resume"
    resume = ["--resume", str(usable)]
    if args.save and args.save.resolve() == folder.parent.resolve():
        resume += ["--save", another(args.save)]        # where nothing is in its way
    return shlex.join(resume)


def another(folder):
    """A new folder for --save in place of one that is taken: runs/saved-2 for runs/saved."""
    names = (f"{folder}-{number}" for number in itertools.count(2))
    return next(name for name in names if not os.path.lexists(name))


def is_usable(folder):
    try:
        return bool(storage.read_index(folder))
    except storage.Unusable:
        return False


def refuse_others(args, folder, index):
    """A checkpoint of another run: another model, text, seed, batch or optimizer."""
    mine, saved = still_to_come(identity(args, Text(args)), index["step"]), index["run"]
    names = [name for name in dict.fromkeys([*mine, *saved])
             if mine.get(name) != saved.get(name) and name not in may_change(mine, saved)]
    if names:
        there, here = (in_words(names[0], run.get(names[0])) for run in (saved, mine))
        if names[0] == "data":
            there, here = f"{there} ({index['text']:.80})", f"{here} ({name_of_text(args)})"
        changes = [change_back(args, name, saved.get(name), index["text"]) for name in names]
        fits = " ".join(changes)
        if len(changes) > 1 and any(change.startswith("without") for change in changes):
            fits = "without --resume"
        raise Refused(f"--resume {folder} is of a run with {there}, and this has {here}", fits)
    if index["biases"] and not getattr(args.model, "bias_speed", None):
        raise Refused(f"--resume {folder} is of a run whose experts are chosen with biases",
                      "--balance bias")


def change_back(args, name, value, text):
    """The change that gives this run the checkpoint's value, or drops --resume if no flag does.
    text: the name of the checkpoint's text."""
    flag = in_words(name, value)
    if flag.startswith("--"):
        return flag
    if name == "data" and os.path.isfile(text) and text != args.data:
        return shlex.join(["--data", text])
    if name == "hidden":
        return "without --ffn"
    if not value and getattr(args, name, None) != args.own.get(name):
        return f"without --{name}".replace("_", "-")
    return "without --resume"


def in_words(name, value):
    """How a run says that: `--top-k 2`, `no --experts`."""
    flag = f"--{name:.80}".replace("_", "-")
    if name == "data":
        return f"{value:.80}" if isinstance(value, str) else "no text"
    if name == "tie":
        return "--preset gpt2" if value else "no tied tables"
    if name == "hidden":
        return f"--ffn {value}" if value else "no --ffn"
    if name == "gated":
        return "--block llama" if value else "--block gpt"
    if name == "batch_ramp" and isinstance(value, list):
        return f"--batch-ramp {' '.join(map(str, value)):.80}"
    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value!s:.80}"


def check_tensors(args, tensors, may_skip):
    """The tensors are those that a run with these flags saves; raises storage.Unusable. Those of
    experts, whose names are their chapter's, are only counted. may_skip: in fp16, all steps so far
    may have been skipped, and the optimizer have no states."""
    cfg, dtype, states, shapes = args.model, args.dtype, {}, {}
    for name, tensor in tensors.items():
        name, _, key = name.partition("/")
        kind = tensor["dtype"], tensor["shape"]
        if key:
            states.setdefault(name, {})[key] = kind
        elif not name.endswith("mlp.bias"):             # a buffer
            shapes[name] = kind
    expected = {name: (dtype, list(p.shape)) for name, p in gpt(cfg, seed=None).named_parameters()}
    if getattr(cfg, "experts", 0):
        expected = {name: kind for name, kind in expected.items() if ".mlp." not in name}
    numbers = sum(math.prod(shape) for _, shape in shapes.values())
    wrong = [name for name, kind in expected.items() if shapes.get(name) != kind]
    if (len(shapes), numbers) != (anatomy.tensors(cfg), cfg.parameters()):
        wrong += ["others"]
    for name, kind in shapes.items() if states or not may_skip else ():
        keys = STATES[states_of(args.optimizer, name, kind[1])]
        fits = {key: ("float32", []) if key == "step" else kind for key in keys}
        wrong += [] if states.get(name, {}) == fits else [f"the states of {name}"]
    wrong += sorted(states.keys() - shapes.keys())
    if wrong:
        raise storage.Unusable(f"has other tensors than this run: {wrong[0]:.80}")


def states_of(optimizer, name, shape):
    """Which optimizer's states a parameter has: Muon leaves all but matrices of blocks to AdamW."""
    if optimizer != "muon":
        return optimizer
    return "momentum" if name.startswith("block") and len(shape) > 1 else "adamw"


def refuse_overwriting(args, mine, step=0):
    """Checkpoints in --save's folder after the step from which the run goes on: nothing is
    overwritten, nor does another run's go when too many stay."""
    later = [path for path in mine if storage.step_of(path) > step]
    if later:
        raise Refused(f"--save {args.save} holds {later[0].name} already, and nothing is "
                      "overwritten", shlex.join(["--save", another(args.save)]))


def refuse_disagreement(run):
    """Ranks that have found different checkpoints: of machines that do not share the folder, say.
    Communication: an all_gather_object."""
    mine, everyones = None, [None] * run.world
    if run.checkpoint is not None:
        crc32 = storage.crc32_of(run.checkpoint.index)
        mine = f"{run.checkpoint.reader.folder.name} with CRC-32 {crc32:08x}"
    dist.all_gather_object(everyones, mine)
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise Refused(f"--resume {run.args.resume}: rank 0 finds {everyones[0]}, and rank "
                          f"{rank} {other}: all machines are to share the folder",
                          "without --resume")
