"""What a run does about checkpoints: when it saves, and how it ends early."""

import gc
import json
import os
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.api import CheckpointException

from lab import checkpoint, cli
from lab.anatomy import optimizer_state_bytes, tensors
from lab.meters import nbytes
from lab.resuming import identity
from lab.words import name_of_text

LOG = "log.jsonl"
LOST = "by peer", "Broken pipe", "remote process"       # gloo's words, and NCCL's, for a lost rank


def checkpoint_bytes(cfg, optimizer, width):
    """Parameters and their optimizer states, numbers of `width` bytes: 12 Ψ in fp32 under AdamW,
    and 4 bytes for the step count of each tensor."""
    numbers = cfg.parameters()
    return width * numbers + optimizer_state_bytes(optimizer, numbers, tensors(cfg), width)


def make_folder(path):
    """Of --save; refuses one that cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        cli.fail(f"--save {path} cannot be made: {error.strerror}; runs/checkpoints would work")


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
        self.writers, self.thread, self.pending = None, ThreadPoolExecutor(1), None
        self.waits, self.writes, self.bytes = [], [], 0
        self.sigterm, self.stop = Sigterm(), False          # stop: it has come, on any rank

    def after_step(self, step, loss, model):
        """Save if it is time, the buffers too of a model that is a module."""
        if self.run.rank == 0:
            self.log(step, loss)
        stop, every = self.stop and step < self.args.steps, self.args.save_every
        if stop or step == self.args.steps or every and step % every == 0:
            self.save(step, saved_buffers(model))
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
        if self.writers is None:                            # a group of its own, for the thread
            self.writers = dist.new_group(backend="gloo")
        run, optimizers = self.run, self.run.optimizers
        state = checkpoint.state_of(optimizers, buffers)
        about = {"step": step, "run": self.identity, "text": name_of_text(run.args),
                 "biases": bool(getattr(self.args.model, "bias_speed", None)),
                 "remembered": {name: it.state_dict() for name, it in run.remembered.items()},
                 "by": [self.args.chapter, self.args.variant, run.world]}
        self.buffers = nbytes(buffers.values())
        self.pending, self.step = self.thread.submit(self.write, step, state, about), step
        self.waits.append(time.perf_counter() - start)

    def write(self, step, state, about):
        """In the thread. A garbage collection that this sets off would hold up training, for 0.1 s
        and more, so there is none meanwhile."""
        start, folder = time.perf_counter(), self.args.save / f"step-{step:06}"
        gc.disable()
        try:
            checkpoint.save(folder, state, about, self.args.keep, self.writers)
        finally:
            gc.enable()
        self.writes.append(time.perf_counter() - start)
        if self.run.rank == 0:
            self.bytes = sum(file.stat().st_size for file in folder.glob("*.bin"))

    def wait(self):
        """For the save that is under way. What a rank could not write is a problem, but training
        goes on; a rank that was waited for in vain (RuntimeError) ends it."""
        try:
            if self.pending:
                self.pending.result()
        except CheckpointException as error:
            rank, (why, _) = min(error.failures.items())
            why = (str(why).splitlines() or [type(why).__name__])[0]
            self.has(f"the checkpoint of step {self.step} is not written: rank {rank}: {why}")
        self.pending = None

    def has(self, problem):
        """Say it at once, and once; the last one is the run's, in its report, too."""
        if problem != self.problem:
            self.run.say(f"  ✗ {problem}")
        self.problem = problem

    def close(self):
        self.wait()
        self.thread.shutdown()

    def report(self):
        """Check what a checkpoint takes, and note how long it took."""
        if not self.writes:
            return
        run = self.run
        if run.rank == 0 and not run.skipped:
            size = checkpoint_bytes(self.args.model, self.args.optimizer, run.dtype.itemsize)
            run.check("a checkpoint", self.bytes, size + self.buffers)
        ms = lambda seconds: f"{1e3 * statistics.median(seconds):.1f} ms"
        number = len(self.writes)
        run.note(f"{number} checkpoint{'s' * (number > 1)} in {self.args.save}: training stood "
                 f"still for {ms(self.waits)}, to copy its state (and for the save before, if that "
                 f"was not over); the files were written in {ms(self.writes)}, while it went on "
                 "(medians)")
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


# -------------------------------------------------------------------- ranks that meet, or are lost

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
    if not late and not any(words in str(error) for words in LOST):
        return
    asking = threading.Thread(target=ask_who_waits, args=(run, late), daemon=True)
    asking.start()
    asking.join(4)
    if asking.is_alive():                               # rank 0 keeps it, where it is not torchrun
        say_lost(run, [0], late)
    raise SystemExit(1) from None


def ask_who_waits(run, late):
    store = c10d._get_default_store()
    try:
        store.set(f"waits {run.rank}", str(late))
        time.sleep(2)                                       # for others, which waited for this one
        waiting = [rank for rank in range(run.world) if store.check([f"waits {rank}"])]
        late = any(store.get(f"waits {rank}") == b"True" for rank in waiting)
        lost = sorted(set(range(run.world)) - set(waiting))
        first = store.add("said who is lost", 1) == 1
    except RuntimeError:                                    # the store has ended with rank 0
        lost, late, first = [0], False, True
    if lost and first:
        say_lost(run, lost, late)


def say_lost(run, ranks, late):
    who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    what = f"did not answer within {run.args.timeout} s" if late else "has ended"
    what = what.replace("has", "have") if len(ranks) > 1 else what
    print(f"error: step {run.step}: {who} {what}", file=sys.stderr, flush=True)
