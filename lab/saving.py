"""What a run does about checkpoints: from which it goes on, when it saves, how it ends early."""

import json
import signal
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from common import Text, environment, optimizer_state_bytes
from lab import checkpoint, cli, storage
from lab.meters import nbytes

MODEL = "layers", "dim", "heads", "kv_heads", "seq", "vocab", "tie"
MIXTURE = "experts", "top_k", "shared_expert"
LOG = "log.jsonl"


def identity(args, text):
    """What a run must have in common with the one that it continues: {flag: value}."""
    cfg = args.model
    names = MODEL + (MIXTURE if getattr(cfg, "experts", 0) else ())
    same = {name: getattr(cfg, name, False) for name in names}
    rows = np.linspace(0, len(text.tokens) - 64, 1024).astype(np.int64)
    sample = text.tokens[rows[:, None] + np.arange(64) % len(text.tokens)]
    same["data"] = [text.name, len(text.tokens), zlib.crc32(sample.tobytes())]
    flags = "seed", "batch", "ignore", "optimizer", "dtype"
    return same | {name: getattr(args, name) for name in flags}


def goes_on_from(args):
    """The Checkpoint that the run goes on from, or None; refuses one that it cannot go on from.

    That is --resume's; or, where the launcher has started the run again after a failure, the last
    one that it has saved.
    """
    again = environment("TORCHELASTIC_RESTART_COUNT", 0) or environment("SLURM_RESTART_COUNT", 0)
    mine = storage.checkpoints_in(args.save) if args.save else []
    path = mine[0] if again and mine else args.resume
    if path is None:
        refuse_overwriting(args, mine, 0)
        return None
    named = path.name.startswith("step-")
    folder, *older = [path] if named else storage.checkpoints_in(path) or [None]
    if folder is None:
        cli.refuse(f"--resume {path} holds no checkpoint; a folder that --save wrote to would work")
    older = [other for other in storage.checkpoints_in(folder.parent) if other < folder]
    try:
        index = storage.read_index(folder)
    except storage.Unusable as why:
        usable = next(filter(is_usable, older), None)
        works = f"--resume {usable}" if usable else "a run without it"
        cli.refuse(f"--resume {folder} {why}; {works} would work")
    refuse_others(args, folder, index)
    if index["step"] >= args.steps and again:
        print(f"step {index['step']} was the last one, and {folder} has it", flush=True)
        raise SystemExit(0)
    if index["step"] >= args.steps:
        cli.refuse(f"--steps {args.steps} are done in {folder}; --steps "
                   f"{index['step'] + args.steps} would work")
    refuse_overwriting(args, mine, index["step"])
    return checkpoint.Checkpoint(args.seed, folder, index)


def is_usable(folder):
    try:
        return bool(storage.read_index(folder))
    except storage.Unusable:
        return False


def refuse_others(args, folder, index):
    """A checkpoint of another run: another model, text, seed, batch or optimizer."""
    mine, saved = identity(args, Text(args)), index["run"]
    for name in [*mine, *saved]:
        here, there = mine.get(name), saved.get(name)
        if name == "data" and here[1:] != there[1:]:
            cli.refuse(f"--resume {folder} is of a run on {there[0]}, {there[1]:,} tokens, and "
                       f"this is {here[0]}, {here[1]:,} tokens; --data with that text would work")
        if name != "data" and here != there:
            flag = f"--{name.replace('_', '-')}"
            cli.refuse(f"--resume {folder} is of a run with {flag} {there}, and this has {here}; "
                       f"{flag} {there} would work")
    if index["biases"] and not getattr(args.model, "bias_speed", None):
        cli.refuse(f"--resume {folder} is of a run whose experts are chosen with biases; "
                   "08_expert_parallel.py --balance bias would work")


def refuse_overwriting(args, mine, step):
    later = [path for path in mine if int(path.name.removeprefix("step-")) > step]
    if later:
        cli.refuse(f"--save {args.save} holds {later[0].name} already, and nothing is overwritten; "
                   f"--resume {args.save} or another folder would work")


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
        self.run, self.args = run, run.args
        self.writers = dist.new_group(backend="gloo")       # its own, since it is used by a thread
        self.flags = dist.new_group(backend="gloo")
        self.thread, self.pending = ThreadPoolExecutor(1), None
        self.waits, self.writes, self.bytes = [], [], 0
        self.problem, self.stop = None, False
        self.before = signal.signal(signal.SIGTERM, self.terminate)
        if run.rank == 0:
            self.args.save.mkdir(parents=True, exist_ok=True)

    def terminate(self, *signal_and_frame):
        """By SIGTERM: save after this step, and end. A second one ends at once."""
        self.stop = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def after_step(self, step, loss, model):
        """Save if it is time, the buffers too of a model that is a module. Communication, over
        gloo: an all_reduce of whether to stop, since all ranks must do so after the same step."""
        stop = torch.tensor(int(self.stop))
        dist.all_reduce(stop, dist.ReduceOp.MAX, group=self.flags)
        stop = stop.item() and step < self.args.steps
        every = self.args.save_every
        if stop or step == self.args.steps or every and step % every == 0:
            self.save(step, saved_buffers(model))
        if self.run.rank == 0:
            self.log(step, loss)
        if stop:
            self.close()
            self.run.say(f"  SIGTERM: saved after step {step}; --resume {self.args.save} goes on")
            raise SystemExit(1 if self.problem else 0)

    def log(self, step, loss):
        args = self.args
        line = {"step": step, "loss": loss, "time": time.time(), "chapter": args.chapter,
                "variant": args.variant, "ranks": self.run.world}
        with (args.save / LOG).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def save(self, step, buffers):
        """Copy the state, and start to write it."""
        start = time.perf_counter()
        self.wait()
        run, optimizers = self.run, self.run.optimizers
        state = checkpoint.state_of(optimizers, buffers)
        about = {"step": step, "run": identity(self.args, run.text),
                 "biases": bool(getattr(self.args.model, "bias_speed", None)),
                 "remembered": {name: it.state_dict() for name, it in run.remembered.items()},
                 "by": [self.args.chapter, self.args.variant, run.world]}
        self.buffers = nbytes(buffers.values())
        self.pending = self.thread.submit(self.write, step, state, about)
        self.waits.append(time.perf_counter() - start)

    def write(self, step, state, about):
        start, folder = time.perf_counter(), self.args.save / f"step-{step:06}"
        checkpoint.save(folder, state, about, self.args.keep, self.writers)
        self.writes.append(time.perf_counter() - start)
        if self.run.rank == 0:
            self.bytes = sum(file.stat().st_size for file in folder.glob("*.bin"))

    def wait(self):
        """For the save that is under way."""
        try:
            if self.pending:
                self.pending.result()
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", {0: (error, None)})
            rank, (why, _) = min(failures.items())
            self.problem = f"a checkpoint is not written: rank {rank}: {why}"
            self.run.say(f"  ✗ {self.problem}")
        self.pending = None

    def close(self):
        self.wait()
        self.thread.shutdown()
        signal.signal(signal.SIGTERM, self.before)

    def report(self):
        """Check what a checkpoint takes, and note how long it took."""
        if not self.writes:
            return
        run, cfg, width = self.run, self.args.model, self.run.dtype.itemsize
        states = optimizer_state_bytes(self.args.optimizer, cfg.parameters(), cfg.tensors(), width)
        if run.rank == 0 and not run.skipped:
            run.check("a checkpoint", self.bytes, width * cfg.parameters() + states + self.buffers)
        ms = lambda seconds: f"{1e3 * sorted(seconds)[len(seconds) // 2]:.1f} ms"
        run.note(f"checkpoints in {self.args.save}: {len(self.writes)}, for which a step waited "
                 f"{ms(self.waits)}, and a write took {ms(self.writes)} beside training (medians)")
        run.record(checkpoints={"waits": self.waits, "writes": self.writes, "bytes": self.bytes})


# ------------------------------------------------------------------------------------------- hangs

def set_timeout(seconds):
    """Let no collective, of whatever group, wait longer."""
    if seconds:
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def name_the_hanging(step, rank, world):
    """Called by the ranks that have waited for too long: find out, over the store, who has not.
    Returns those ranks on the first that calls, and None on the others."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"waits {step} {rank}", "")
    time.sleep(2)                                           # for others, which waited for this one
    waiting = [other for other in range(world) if store.check([f"waits {step} {other}"])]
    return sorted(set(range(world)) - set(waiting)) if rank == min(waiting) else None
