"""What a run does about checkpoints: from which it goes on, when it saves, how it ends early."""

import json
import math
import os
import signal
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException

from common import Text, environment, gpt, optimizer_state_bytes
from lab import checkpoint, cli, storage
from lab.meters import nbytes

MODEL = "layers", "dim", "heads", "kv_heads", "seq", "vocab", "tie"
MIXTURE = "experts", "top_k", "shared_expert"
RUN = "seed", "batch", "ignore", "optimizer", "dtype"
STATES = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "momentum": {"momentum_buffer"}, "sgd": set()}
LOG = "log.jsonl"


# -------------------------------------------------------------------------- the run that it goes on

def identity(args, text):
    """What a run must have in common with the one that it continues: {flag: value}."""
    cfg = args.model
    names = MODEL + (MIXTURE if getattr(cfg, "experts", 0) else ())
    same = {name: getattr(cfg, name, False) for name in names}
    same["data"] = f"a text of {len(text.tokens):,} tokens with CRC-32 {crc32_of_text(text):08x}"
    return same | {name: getattr(args, name) for name in RUN}


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

    That is --resume's; or, where the launcher has started the run again after a failure, the last
    one that it has saved.
    """
    again = environment("TORCHELASTIC_RESTART_COUNT", 0) or environment("SLURM_RESTART_COUNT", 0)
    mine = storage.checkpoints_in(args.save) if args.save else []
    again = again and mine
    if not (again or args.resume):
        refuse_overwriting(args, mine, None)
        return None
    folder = mine[0] if again else last_checkpoint(args.resume)
    try:
        index = storage.read_index(folder)
        refuse_others(args, folder, index)
        check_tensors(args, index["tensors"])
    except storage.Unusable as why:
        cli.refuse(f"--resume {folder} {why}; {instead_of(args, folder)} would work")
    if index["step"] >= args.steps and again:
        if environment("RANK", 0) == 0:
            print(f"step {index['step']} was the last one, and {folder} has it", flush=True)
        raise SystemExit(0)
    if index["step"] >= args.steps:
        cli.refuse(f"--steps {args.steps} are done in {folder}; --steps "
                   f"{index['step'] + args.steps} would work")
    refuse_overwriting(args, mine, folder)
    return checkpoint.Checkpoint(args.seed, folder, index)


def last_checkpoint(path):
    """Of a folder that --save wrote to; or path itself, if it is a checkpoint."""
    if storage.step_of(path) is not None or (path / storage.INDEX).exists():
        return path
    found = storage.checkpoints_in(path)
    if not found:
        why = "holds no checkpoint" if path.is_dir() else "is no folder"
        cli.refuse(f"--resume {path} {why}; a folder that --save wrote to would work")
    return found[0]


def instead_of(args, folder):
    """What to use in place of a checkpoint that is not usable: one that stands beside it, the last
    older one if there is any."""
    step = storage.step_of(folder) or 0
    others = [other for other in storage.checkpoints_in(folder.parent) if other != folder]
    others.sort(key=lambda other: storage.step_of(other) > step)
    usable = next(filter(is_usable, others), None)
    if usable is None:
        return "a run without it"
    in_its_way = args.save and args.save.resolve() == folder.parent.resolve()
    return f"--resume {usable}" + (" with another --save folder" if in_its_way else "")


def is_usable(folder):
    try:
        return bool(storage.read_index(folder))
    except storage.Unusable:
        return False


def refuse_others(args, folder, index):
    """A checkpoint of another run: another model, text, seed, batch or optimizer."""
    text = Text(args)
    mine, saved = identity(args, text), index["run"]
    for name in [*mine, *saved]:
        if mine.get(name) == saved.get(name):
            continue
        there, here = in_words(name, saved.get(name)), in_words(name, mine.get(name))
        works = there
        if name == "data":
            there, here = f"{there} ({index['text']:.80})", f"{here} ({text.name})"
            works = "--data with that text"
        cli.refuse(f"--resume {folder} is of a run with {there}, and this has {here}; {works} "
                   "would work")
    if index["biases"] and not getattr(args.model, "bias_speed", None):
        cli.refuse(f"--resume {folder} is of a run whose experts are chosen with biases; "
                   "08_expert_parallel.py --balance bias would work")


def in_words(name, value):
    """How a run says that: `--top-k 2`, `no --experts`."""
    flag = f"--{name:.80}".replace("_", "-")
    if name == "data":
        return f"{value:.80}" if isinstance(value, str) else "no text"
    if name == "tie":
        return "--preset gpt2" if value else "no tied tables"
    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value!s:.80}"


def check_tensors(args, tensors):
    """The tensors are those that a run with these flags saves; raises storage.Unusable. Those of
    experts, whose names are their chapter's, are only counted."""
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
    if (len(shapes), numbers) != (cfg.tensors(), cfg.parameters()):
        wrong += ["others"]
    for name, its in states.items():                    # none: all steps so far were skipped
        fits = {key: ("float32", []) if key == "step" else shapes.get(name)
                for key in STATES[args.optimizer]}
        wrong += [] if its == fits else [name]
    if wrong:
        raise storage.Unusable(f"has other tensors than this run: {wrong[0]:.80}")


def refuse_overwriting(args, mine, folder):
    """Checkpoints in --save's folder that are none of those before `folder`, from which it goes on:
    nothing is overwritten, nor does another run's go when too many stay."""
    same = folder is not None and folder.parent.resolve() == args.save.resolve() if mine else True
    later = [it for it in mine if not same or storage.step_of(it) > storage.step_of(folder)]
    if later:
        cli.refuse(f"--save {args.save} holds {later[0].name} already, and nothing is overwritten; "
                   f"--resume {args.save} or another folder would work")


# --------------------------------------------------------------------------------- when it saves

def saved_buffers(model):
    """{name: tensor} of those that a state_dict has."""
    if not isinstance(model, torch.nn.Module):
        return {}
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class Saver:
    """Saves a run's checkpoints while it trains, and ends it early where SIGTERM asks for that.

    Of every save it knows for how many seconds the step waited (for the save before, and for a copy
    on the CPU) and how long the write took in the background.
    """

    def __init__(self, run):
        self.run, self.args, self.problem = run, run.args, None
        self.identity = identity(run.args, run.text)
        self.writers = dist.new_group(backend="gloo")       # its own, since it is used by a thread
        self.thread, self.pending = ThreadPoolExecutor(1), None
        self.waits, self.writes, self.bytes = [], [], 0
        self.sigterm = Sigterm()
        if run.rank == 0:
            self.args.save.mkdir(parents=True, exist_ok=True)

    def after_step(self, step, loss, model, stop):
        """Save if it is time, the buffers too of a model that is a module. stop: the run is to end
        after this step, unless that was its last one anyhow."""
        stop, every = stop and step < self.args.steps, self.args.save_every
        if stop or step == self.args.steps or every and step % every == 0:
            self.save(step, saved_buffers(model))
        if self.run.rank == 0:
            self.log(step, loss)
        if stop:
            self.close()
            if not self.problem:
                self.run.say(f"  SIGTERM: saved after step {step}; --resume {self.args.save} goes "
                             "on")
            raise SystemExit(1 if self.problem else 0)

    def log(self, step, loss):
        args = self.args
        line = {"step": step, "loss": loss, "time": time.time(), "chapter": args.chapter,
                "variant": args.variant, "ranks": self.run.world}
        try:
            with (args.save / LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.has(f"{args.save / LOG} is not written: {error.strerror}")

    def save(self, step, buffers):
        """Copy the state, and start to write it."""
        start = time.perf_counter()
        self.wait()
        run, optimizers = self.run, self.run.optimizers
        state = checkpoint.state_of(optimizers, buffers)
        about = {"step": step, "run": self.identity, "text": run.text.name,
                 "biases": bool(getattr(self.args.model, "bias_speed", None)),
                 "remembered": {name: it.state_dict() for name, it in run.remembered.items()},
                 "by": [self.args.chapter, self.args.variant, run.world]}
        self.buffers = nbytes(buffers.values())
        self.pending = step, self.thread.submit(self.write, step, state, about)
        self.waits.append(time.perf_counter() - start)

    def write(self, step, state, about):
        start, folder = time.perf_counter(), self.args.save / f"step-{step:06}"
        checkpoint.save(folder, state, about, self.args.keep, self.writers)
        self.writes.append(time.perf_counter() - start)
        if self.run.rank == 0:
            self.bytes = sum(file.stat().st_size for file in folder.glob("*.bin"))

    def wait(self):
        """For the save that is under way. One that fails is a problem, but training goes on."""
        step, pending = self.pending or (None, None)
        try:
            if pending:
                pending.result()
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", {self.run.rank: (error, None)})
            rank, (why, _) = min(failures.items())
            why = (str(why).splitlines() or [type(why).__name__])[0]
            self.has(f"the checkpoint of step {step} is not written: rank {rank}: {why}")
        self.pending = None

    def has(self, problem):
        """Say it at once; the first one is the run's, in its report, too."""
        self.problem = self.problem or problem
        self.run.say(f"  ✗ {problem}")

    def close(self):
        self.wait()
        self.thread.shutdown()

    def report(self):
        """Check what a checkpoint takes, and note how long it took."""
        if not self.writes:
            return
        run, cfg, width = self.run, self.args.model, self.run.dtype.itemsize
        states = optimizer_state_bytes(self.args.optimizer, cfg.parameters(), cfg.tensors(), width)
        if run.rank == 0 and not run.skipped:
            run.check("a checkpoint", self.bytes, width * cfg.parameters() + states + self.buffers)
        ms = lambda seconds: f"{1e3 * sorted(seconds)[len(seconds) // 2]:.1f} ms"
        number = len(self.writes)
        run.note(f"{number} checkpoint{'s' * (number > 1)} in {self.args.save}: training stood "
                 f"still for {ms(self.waits)}, to copy what is saved; to write it took "
                 f"{ms(self.writes)}, while training went on (median of each)")
        run.record(checkpoints={"waits": self.waits, "writes": self.writes, "bytes": self.bytes})


class Sigterm:
    """Notes that SIGTERM has come, for the run to save and end after its step. A second one ends
    the process at once, also where it waits for another rank: Python's own handlers would wait with
    it, so a thread reads what the signal writes into a pipe."""

    SAME = 2        # seconds: Slurm sends it to all processes, and torchrun once more to its ranks

    def __init__(self):
        self.came, (self.reads, self.writes) = None, os.pipe()
        os.set_blocking(self.writes, False)
        self.handler = signal.signal(signal.SIGTERM, lambda *signal_and_frame: None)
        self.other = signal.set_wakeup_fd(self.writes, warn_on_full_buffer=False)
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        while number := os.read(self.reads, 1):
            now = time.monotonic()
            if number[0] != signal.SIGTERM:
                continue
            self.came = self.came or now
            if now > self.came + self.SAME:
                os._exit(128 + signal.SIGTERM)
        os.close(self.reads)

    def put_back(self):
        """What was before; more than once does no harm."""
        if self.writes is not None:
            signal.signal(signal.SIGTERM, self.handler or signal.SIG_DFL)
            signal.set_wakeup_fd(self.other)
            os.close(self.writes)                           # the thread reads that nothing follows
            self.writes = None


# ------------------------------------------------------------------- what all ranks must agree upon

def on_any_rank(run, *facts):
    """For each, whether it is so on any rank. Communication: an all_reduce of a number for each."""
    facts = torch.tensor([bool(fact) for fact in facts], dtype=torch.int32, device=run.device)
    if run.world > 1:
        dist.all_reduce(facts, dist.ReduceOp.MAX)
    return map(bool, facts.tolist())


def gradients_are_finite(optimizers):
    """Of the parameters that this rank updates."""
    return all(p.grad.isfinite().all() for optimizer in optimizers
               for p in checkpoint.trained(optimizer) if p.grad is not None)


USUAL = c10d.default_pg_timeout, c10d.default_pg_nccl_timeout


CLOSED = "by peer", "Broken pipe", "remote process"         # as common.launch reads them


def set_timeout(seconds):
    """Let nothing that is sent in a group made from now on take longer, nor a collective of a group
    that is there; None: PyTorch's own timeout. (What is sent from one rank to another keeps the
    timeout with which gloo has made the group.)"""
    wanted = [timedelta(seconds=seconds)] * 2 if seconds else USUAL
    c10d.default_pg_timeout, c10d.default_pg_nccl_timeout = wanted
    for group in list(c10d._world.pg_map) if seconds else []:
        c10d._set_pg_timeout(wanted[0], group)


def name_the_lost(error, run):
    """If `error` says that this rank has waited for others too long, or that their connection is
    closed: find out over the store who waits too, and end with status 1. The first one that knows
    says who does not. That is gloo's way: NCCL's watchdog thread, after the same timeout, prints
    which collective had no end, and kills the process."""
    late = any(words in str(error) for words in ("imed out", "timeout"))
    if not late and not any(words in str(error) for words in CLOSED):
        return
    asking = threading.Thread(target=ask_who_waits, args=(run, late), daemon=True)
    asking.start()
    asking.join(4)
    if asking.is_alive():                               # rank 0 keeps it, where it is not torchrun
        say_lost(run, [0], late)
    raise SystemExit(1) from None


def ask_who_waits(run, late):
    store = c10d._get_default_store()
    store.set(f"waits {run.rank}", str(late))
    time.sleep(2)                                           # for others, which waited for this one
    waiting = [rank for rank in range(run.world) if store.check([f"waits {rank}"])]
    late = any(store.get(f"waits {rank}") == b"True" for rank in waiting)
    lost = sorted(set(range(run.world)) - set(waiting))
    if store.add("said who is lost", 1) == 1 and lost:
        say_lost(run, lost, late)


def say_lost(run, ranks, late):
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    what = f"did not answer within {run.args.timeout} s" if late else "has ended"
    what = what.replace("has", "have") if len(ranks) > 1 else what
    print(f"error: step {run.step}: {who} {what}", file=sys.stderr, flush=True)
