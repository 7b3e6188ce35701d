"""What runs in a student's process: a rank of a run, or a function whose value is compared.

Output is dropped. The answer leaves as bytes that lab/classroom/values.py reads: {"status": ...},
and "value", "record" (a run's JSON, by rank 0), or "error" and the "lines" that led there.
"""

import contextlib
import os
import sys
import traceback
import types
from datetime import timedelta
from pathlib import Path

from lab.classroom import values

# Doesn't import torch: see lab/classroom/checks.py.

LONGEST = 300                   # letters of an exception's text


class NoWatch:
    """Takes the place of the watch that names a lost rank: the grader sees each rank's end."""

    def __init__(self, run):
        pass

    def is_told_to_end(self):
        return False

    def leave(self, error):
        pass

    def let_go(self):
        pass

    stop = let_go


def be_a_rank(hand_in, path, rank, world, argv):
    """Run a chapter's file as one of its ranks, and hand in how that ended; rank 0 also hands in
    the JSON of the run."""
    set_rank(rank, world, argv)
    import torch.distributed as dist

    from lab import launch

    record = Path("run.json").absolute()
    try:
        dist.init_process_group("gloo", f"file://{record.with_name('store')}", world_size=world,
                                rank=rank)
        module = load(path, path.stem)
        status = launch.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                             getattr(module, "flags", None), module.formulas,
                             [*argv, f"--json={record}"], watch=NoWatch)
        answer = {"status": status}
    except SystemExit as leaving:
        answer = {"status": 1}
        if hasattr(leaving, "line"):                    # with which we refuse something
            answer |= raised(leaving, path) | {"error": leaving.line}
        elif leaves_itself(leaving, path):              # else the run stops: its loss is not finite
            answer |= raised(leaving, path)
    except BaseException as error:
        answer = {"status": 1} | raised(error, path)
    if record.exists() and rank == 0:
        answer["record"] = record.read_text()
    hand_in(values.pack(answer))
    return answer["status"]


def evaluate(hand_in, path, check, rank):
    """Call a Same on a student's file, and hand in its value."""
    try:
        if check.ranks > 1:
            import torch.distributed as dist

            set_rank(rank, check.ranks, [])
            dist.init_process_group("gloo", f"file://{path.with_name('store')}",
                                    world_size=check.ranks, rank=rank)
        answer = {"status": 0, "value": check.value(load(path, "student"))}
        packed = values.pack(answer)
    except BaseException as error:
        answer = {"status": 1} | raised(error, path)
        packed = values.pack(answer)
    hand_in(packed)
    if check.ranks > 1 and answer["status"] == 0:           # after an error, the others are to fail
        wait_for_the_others(rank, check.ranks)
    return answer["status"]


def set_rank(rank, world, argv):
    """Set the environment of a rank."""
    if "--kernels" not in argv:                         # in the interpreter, they take their time
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world)}


def load(path, name):
    """The module of a chapter's file. Triton reads the file once more."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def raised(error, path):
    """The exception, in one line, and the lines of the file that led there."""
    lines = lines_in(error, path)
    while type(error).__name__ == "InterpreterError" and error.__cause__:
        error = error.__cause__                         # Triton's own, around what was raised
        lines = lines_in(error, path) or lines
    words = " ".join(str(error).split("\n\n")[0].split())
    if len(words) > LONGEST:
        words = f"{words[:LONGEST]}..."
    return {"error": f"{type(error).__name__}: {words}".removesuffix(": "), "lines": lines}


def lines_in(error, path):
    """Those of the file in what led to an error, the innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return [frame.lineno for frame in frames if frame.filename == str(path)]


def leaves_itself(leaving, path):
    """Whether it is the chapter that calls sys.exit."""
    return traceback.extract_tb(leaving.__traceback__)[-1].filename == str(path)


def wait_for_the_others(rank, ranks, seconds=10):
    """A rank that ends closes its connections, also those of groups that others still make."""
    import torch.distributed as dist

    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.set(f"rank {rank} is done", "")
        with contextlib.suppress(RuntimeError):         # one that hangs or has died sets nothing
            store.wait([f"rank {other} is done" for other in range(ranks)],
                       timedelta(seconds=seconds))
