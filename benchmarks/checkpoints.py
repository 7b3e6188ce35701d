"""Times checkpoints beside training: ours, and torch.save of what rank 0 has gathered.

One run of a chapter saves in both ways, in turn, with quiet steps between. Ours is lab/saving.py:
the step after which it is time waits for a copy, and a thread writes while training goes on. The
other way, all ranks send rank 0 what they hold, and wait until torch.save has the whole on the
disk. Both end with the disk's confirmation (fsync), and go to the same folder.

The first table is about steps: those that had a save in flight from their beginning to their end,
those that had none, and the ratio of their medians. A save also touches a step during which it
ends, so it costs what a step waits, and what all steps that began with it in flight took above the
quiet median: that sum, in milliseconds, is the last column. The second table is about saves: how
long training stands still for one, and after how long it is on the disk.

    python benchmarks/checkpoints.py [--saves N] [--only 03] [--record] [-- flags for every run]

--record writes the tables, with date, machine and versions, into benchmarks/RESULTS.md.
"""

import argparse
import contextlib
import datetime
import importlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import results  # noqa: E402  (after the path to it)
from chapters import on_ranks  # noqa: E402

import common  # noqa: E402
from lab import checkpoint, report, saving, storage  # noqa: E402

SETUP_STEPS = 4         # the first steps allocate, and are metered
QUIET_STEPS = 6         # before every save; the first of them, after one, is not counted
# So many parameters that a write takes longer than a few steps, of which each takes tokens enough
# to be no mere update.
SHAPE = "--layers=8 --dim=512 --heads=8 --kv-heads=8 --seq=64 --batch=2"
RUNS = [                # chapter, ranks, flags
    ("01_single_gpu", 1, f"{SHAPE} --variant=hand"),
    ("02_data_parallel", 2, f"{SHAPE} --variant=bucket"),
    ("03_zero", 2, f"{SHAPE} --variant=zero3"),
    ("04_tensor_parallel", 2, f"{SHAPE} --variant=megatron"),
    ("09_5d", 2, f"{SHAPE} --dp=2 --zero=1"),
]

# ------------------------------------------------------------------------------ on every rank


def held(optimizers):
    """{(name, offsets): (full shape, view)}: what this rank holds, as checkpoint.state_of, without
    a copy."""
    parts = {}
    for optimizer in optimizers:
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            states = {"": p.detach()} | {f"/{key}": x for key, x in optimizer.state[p].items()}
            for key, tensor in states.items():
                placed = checkpoint.rectangles_of(p, tensor if tensor.ndim else p.detach())
                for name, shape, at, view in placed:
                    part = (shape, view) if tensor.ndim else ((), tensor)
                    parts[name + key, tuple(at) if tensor.ndim else ()] = part
    return parts


def who_sends(parts):
    """{(name, offsets): (rank, full shape, shape, dtype)} of every rectangle, of which one rank
    that holds it sends it, rank 0 if it does. Communication: all_gather_object, once in a run."""
    mine = {key: (dist.get_rank(), tuple(shape), tuple(view.shape), view.dtype)
            for key, (shape, view) in parts.items()}
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    return {key: what for of_rank in reversed(everyones) for key, what in of_rank.items()}


def gathered(parts, senders):
    """{name: full tensor} on rank 0, and {} on the others. Communication: every rectangle that
    rank 0 does not hold, to it."""
    rank, whole, here, handles = dist.get_rank(), {}, {}, []
    for key, (sender, full_shape, shape, dtype) in senders.items():
        if sender == rank:
            here[key] = parts[key][1].contiguous()
        elif rank == 0:
            here[key] = torch.empty(shape, dtype=dtype)
        if rank == 0 and sender:
            handles.append(dist.irecv(here[key], sender))
        elif rank and sender == rank:
            handles.append(dist.isend(here[key], 0))
    for handle in handles:
        handle.wait()
    for (name, at), part in here.items() if rank == 0 else ():
        _, full_shape, shape, dtype = senders[name, at]
        full = whole[name] if name in whole else torch.empty(full_shape, dtype=dtype)
        whole[name] = full
        for dim, (offset, size) in enumerate(zip(at, shape)):
            full = full.narrow(dim, offset, size)
        full.copy_(part)
    return whole


class InTurn(saving.Saver):
    """Saves in both ways, as often as it is told to, whenever there have been QUIET_STEPS. Notes
    the seconds of each: `ours`, (the step waits, until it is on the disk), and `theirs`; and of
    each step, in `steps`, its seconds and whether a save was in flight when it began and when it
    ended, on any rank."""

    saves = 0           # of each way

    def __init__(self, run):
        super().__init__(run)
        self.steps, self.ours, self.theirs, self.senders = [], [], [], None
        self.flew, self.quiet, self.until = False, 0, []

    @property
    def done(self):
        return len(self.ours) == len(self.theirs) == self.saves and not self.flew

    def after_step(self, step, loss, model):
        flies = self.anywhere(self.pending is not None and not self.pending.done())
        self.steps.append((self.run.seconds[-1], self.flew, flies))
        self.quiet = 0 if self.flew else self.quiet + 1
        if self.flew and not flies:
            self.wait()
            self.until.append(self.waits[-1] + self.writes[-1])
        if not flies and self.quiet >= QUIET_STEPS and step >= SETUP_STEPS + QUIET_STEPS:
            self.save_either(step, saving.saved_buffers(model))
            flies, self.quiet = self.pending is not None, 0
        self.flew = flies

    def anywhere(self, here):
        flag = torch.tensor(int(here))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.flags)
        return bool(flag)

    def save_either(self, step, buffers):
        """Ours, theirs, theirs, ours, ours, ...: each comes first as often."""
        dist.barrier(self.flags)
        if (len(self.ours) + len(self.theirs)) % 4 in (0, 3):
            self.save(step, buffers)
            self.ours.append(self.waits[-1])
            return
        parts = held(self.run.optimizers)
        self.senders = self.senders or who_sends(parts)
        path = self.args.save / "whole.pt"
        start = time.perf_counter()
        whole = gathered(parts, self.senders)
        if self.run.rank == 0:
            with path.open("wb") as file:
                torch.save(whole, file)
            storage.synced(path)
        dist.barrier(self.flags)
        self.theirs.append(time.perf_counter() - start)
        path.unlink(missing_ok=True)


class SavesInTurn(report.Run):
    """Ends when all saves are made."""

    def __init__(self, args):
        super().__init__(args)
        InTurn.last = self.saver

    def batches(self, share=0):
        for batch in super().batches(share):
            yield batch
            if self.saver.done:
                return


def play(chapter, saves, flags):
    """For a rank: what `InTurn` has noted, in seconds, and of a checkpoint's bytes those measured
    and their formula."""
    saving.Saver, report.Run, InTurn.saves = InTurn, SavesInTurn, saves
    module = importlib.import_module(chapter)
    own = getattr(module, "flags", lambda parser: None)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = common.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                             own, flags)
    if status:
        sys.exit(printed.getvalue())
    saver = InTurn.last
    [size] = [check for check in saver.run.checks if check["name"] == "a checkpoint"] or [{}]
    return {"steps": saver.steps[SETUP_STEPS:], "ours": list(zip(saver.ours, saver.until)),
            "theirs": saver.theirs, "bytes": size.get("measured"), "formula": size.get("expected"),
            "parameters": saver.args.model.parameters()}


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=8, help="of each way")
    parser.add_argument("--only", default="", help="chapters whose name begins so")
    parser.add_argument("--record", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("flags", nargs="*", help="for every run, after --")
    parser.add_argument("--play", help=argparse.SUPPRESS)       # for the ranks
    args = parser.parse_args()
    if args.play:
        answer = play(*json.loads(args.play))
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
        dist.barrier()
        os._exit(0)                                     # as common.launch does, and why
    for chapter, ranks, flags in RUNS:
        if chapter.startswith(args.only):
            with tempfile.TemporaryDirectory(dir=ROOT / "runs") as folder:
                told = [chapter, args.saves, [*flags.split(), "--no-verify", "--steps=100000",
                        "--keep=1", f"--save={folder}/checkpoints", *args.flags]]
                a = json.loads(on_ranks(ranks, __file__, f"--play={json.dumps(told)}").splitlines()[-1])
            st = a["steps"]
            q = [s for s, b, e in st if not b and not e]
            f = [s for s, b, e in st if b and e]
            t = [s for s, b, e in st if b]
            m = statistics.median
            print(chapter, a["parameters"]/1e6, "quiet", len(q), m(q), "flight", len(f), f and m(f), "ratio", f and m(f)/m(q), "began", len(t), m(t)/m(q))
            print("  cost above ms", 1e3*sum(x-m(q) for x in t)/len(a["ours"]), "wait", m(w for w,_ in a["ours"]), "disk", m(d for _, d in a["ours"]), "theirs", m(a["theirs"]), a["bytes"], a["formula"])
            if os.environ.get("RAW"): print(a)


if __name__ == "__main__":
    main()
