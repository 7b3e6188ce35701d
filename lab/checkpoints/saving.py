"""What a run does about checkpoints: when it saves, and what it says of it."""

import gc
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lab.checkpoints import checkpoint
from lab.checkpoints.resuming import identity, still_to_come
from lab.run import refusals
from lab.run.anatomy import matrices_of_blocks, optimizer_state_bytes, tensors
from lab.run.meters import nbytes
from lab.run.words import count

LOG = "log.jsonl"


def checkpoint_bytes(cfg, optimizer, width):
    """Parameters and their optimizer states, numbers of `width` bytes: 12 Ψ in fp32 under AdamW,
    and 4 bytes for the step count of each tensor."""
    numbers = cfg.parameters()
    return width * numbers + optimizer_state_bytes(optimizer, numbers, tensors(cfg), width,
                                                   matrices_of_blocks(cfg))


def make_folder(path):
    """Of --save; refuses one that cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refusals.fail(f"--save {path} cannot be made: {error.strerror}; runs/checkpoints"
                      " would work")


def saved_buffers(model):
    """{name: tensor} of those that a state_dict has."""
    if not isinstance(model, torch.nn.Module):
        return {}
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


class Saver:
    """Saves a run's checkpoints while it trains, and ends it early where SIGTERM asks for that.

    waits: seconds for which training stood still for each save (for the save before, and for a copy
    on the CPU). writes: seconds that each took in the background.
    """

    def __init__(self, run):
        self.run, self.args, self.problem, self.closing = run, run.args, None, False
        self.identity = identity(run.args, run.text)
        # A group of its own, for the thread; now: a rank that is lost while others connect to it
        # would be waited for, until a group's timeout.
        self.writers = dist.new_group(backend="gloo")
        self.thread, self.pending = ThreadPoolExecutor(1), None
        self.waits, self.writes, self.bytes = [], [], 0
        self.stop = False               # whether SIGTERM has come, on any rank

    def after_step(self, step, loss, model):
        """Save if it is time, the buffers too of a model that is a module."""
        if self.run.rank == 0:
            self.log(step, loss)
        stop, every = self.stop and step < self.args.steps, self.args.save_every
        if stop or step == self.args.steps or every and step % every == 0:
            self.save(step, saved_buffers(model))
        if stop:
            self.close()
            if self.problem:
                self.run.say(f"  ✗ {self.problem}")
                raise SystemExit(1)
            self.run.say(f"  SIGTERM: saved after step {step}; --resume {self.args.save} goes on")
            raise SystemExit(0)

    def log(self, step, loss):
        """Add a line for this step to the log."""
        args = self.args
        line = {"step": step, "loss": loss, "time": time.time(), "chapter": args.chapter,
                "variant": args.variant, "ranks": self.run.world}
        try:
            with (args.save / LOG).open("a") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            self.note_problem(f"{args.save / LOG} is not written: {error.strerror}")

    def save(self, step, buffers):
        """Copy the state, and start to write it."""
        start = time.perf_counter()
        self.wait()
        run, optimizers = self.run, self.run.optimizers
        state = checkpoint.state_of(optimizers, buffers)
        about = {"step": step, "run": still_to_come(self.identity, step),
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
            self.note_problem(f"the checkpoint of step {self.step} is not written: rank {rank}: "
                              f"{why}")
        self.pending = None

    def note_problem(self, problem):
        """Print a problem once, and keep it for the run's verdict. The verdict follows at once if
        the run is about to end, so then it is not printed here."""
        if problem != self.problem and not self.closing:
            self.run.say(f"  ✗ {problem}")
        self.problem = problem

    def close(self):
        """Wait for the last save, just before the verdict."""
        self.closing = True
        self.wait()
        self.thread.shutdown()

    def report(self):
        """Check what a checkpoint takes, and note how long it took."""
        if not self.writes:
            return
        run = self.run
        if run.rank == 0 and not run.skipped:
            size = checkpoint_bytes(self.args.model, self.args.optimizer, run.dtype.itemsize)
            run.check(("states", "a checkpoint"), self.bytes, size + self.buffers)
        wait, write = (1e3 * statistics.median(times) for times in (self.waits, self.writes))
        saved = count(len(self.writes), "checkpoint")
        run.note(f"{saved} in {self.args.save}: training stood still for {wait:.1f} ms, to copy "
                 "its state (and for the save before, if that was not over); the files were "
                 f"written in {write:.1f} ms, while it went on (medians)")
        run.record(checkpoints={"waits": self.waits, "writes": self.writes, "bytes": self.bytes})
