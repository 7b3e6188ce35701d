"""Checks of an exercise, in processes of their own: student code can't cost more than its check.

An interpreter that has imported torch forks a process per rank, so a run takes one second and not
five. Output of a rank is dropped; its answer comes back as plain bytes (lab/classroom/plain.py).

A `Same` compares values here, where no student code runs. A `Run` compares itself with one GPU and
with the chapter's formulas, as it does for whoever starts it, and hands in its JSON.

A run that would never end is ended after a few seconds. Either no rank computes any more, which is
a deadlock, or the ranks have computed for longer than a limit (lab/classroom/overseer.py).
"""

import base64
import contextlib
import functools
import importlib
import importlib.util
import json
import json.decoder
import os
import re
import shlex
import sys
import tempfile
import traceback
import types
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from lab.classroom import overseer, plain
from lab.classroom.overseer import CLOCK, LIMIT
from lab.run.ranks import CONTEXT, start_interpreter

# Doesn't import torch: the other interpreter does that while this one reads on.

TEXT = json.decoder.__file__    # short, and the same whatever the course's files are
LOST = "by peer", "Broken pipe", "remote process"       # gloo's words when another rank has ended
WAITING = ("all_", "reduce", "gather", "scatter", "broadcast", "barrier", "monitored_barrier",
           "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_")     # names begin so
LONGEST = 300                   # letters of an exception's text
PATIENCE = 120                  # seconds for the overseer itself


class Outcome(NamedTuple):
    """The result of a check. Lines are those of the file that has run, the innermost first."""
    right: bool
    problems: tuple         # the run's diagnosis or its problems; how a value differs
    errors: dict            # {rank: (the exception, lines)}
    stuck: dict             # {rank: (the collective that it waits in or "", lines)}: without end
    ended: dict             # {rank: (exit status, lines)} of those that ended without an answer
    world: int
    record: object = None   # a run's JSON
    answers: tuple = ()     # of each rank, packed


def has_triton():
    """Which runs kernels. It is for Linux."""
    return importlib.util.find_spec("triton") is not None


def warm_up():
    """Start the interpreter that forks. It imports while this one goes on."""
    was_set = "TRITON_INTERPRET" in os.environ
    os.environ["TRITON_INTERPRET"] = "1"                # there, kernels too run on the CPU
    start_interpreter()
    if not was_set:
        del os.environ["TRITON_INTERPRET"]


# --------------------------------------------------------------------------- in a student's process

def prefer(folder):
    """Import the course's modules from this folder, where it has them."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("common", "kernels", "lab"):
            del sys.modules[name]
    sys.path[:0] = [str(folder)]
    import lab

    lab.__path__[:0] = [str(folder / "lab")]
    for room in filter(Path.is_dir, (folder / "lab").glob("*")):
        importlib.import_module(f"lab.{room.name}").__path__[:0] = [str(room)]


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
    words = words if len(words) <= LONGEST else f"{words[:LONGEST]}..."
    return {"error": f"{type(error).__name__}: {words}".removesuffix(": "), "lines": lines}


def lines_in(error, path):
    """Those of the file in what led to an error, the innermost first."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return [frame.lineno for frame in frames if frame.filename == str(path)]


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


def launched_as(rank, world, argv):
    """Set the environment of a rank."""
    if "--kernels" not in argv:                         # in the interpreter, they take their time
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world)}


def be_a_rank(tell, path, rank, world, argv, preferred=None):
    """Run a chapter's file as one of its ranks, and tell how that ended; rank 0 also tells the JSON
    of the run. preferred: a folder whose modules take the place of the course's."""
    if preferred:
        prefer(preferred)
    launched_as(rank, world, argv)
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
        answer = raised(leaving, path)
        if hasattr(leaving, "line"):                        # with which we refuse something
            answer["error"] = leaving.line
        elif not leaves_itself(leaving, path):          # a loss that is not finite, say
            del answer["error"]
        answer["status"] = 1
    except BaseException as error:
        answer = {"status": 1} | raised(error, path)
    if record.exists() and rank == 0:
        answer["record"] = record.read_text()
    tell(plain.pack(answer))
    return answer["status"]


def leaves_itself(leaving, path):
    """Whether it is the chapter that calls sys.exit."""
    return traceback.extract_tb(leaving.__traceback__)[-1].filename == str(path)


def evaluate(tell, path, check, rank):
    """Call a Same on a student's file, and tell its value."""
    try:
        if check.ranks > 1:
            import torch.distributed as dist

            launched_as(rank, check.ranks, [])
            dist.init_process_group("gloo", f"file://{path.with_name('store')}",
                                    world_size=check.ranks, rank=rank)
        answer = {"status": 0, "value": check.value(load(path, "student"))}
    except BaseException as error:
        answer = {"status": 1} | raised(error, path)
    tell(plain.pack(answer))
    if check.ranks > 1 and answer["status"] == 0:           # after an error, the others are to fail
        wait_for_the_others(rank, check.ranks)
    return answer["status"]


def wait_for_the_others(rank, ranks, seconds=10):
    """A rank that ends closes its connections, also those of groups that others still make."""
    import torch.distributed as dist

    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        store.set(f"rank {rank} has told", "")
        with contextlib.suppress(RuntimeError):         # one that hangs or has died tells nothing
            store.wait([f"rank {other} has told" for other in range(ranks)],
                       timedelta(seconds=seconds))


# --------------------------------------------------------------------------------- from the outside

def outcome(chapter, source, solution, check, folder=None, limit=LIMIT):
    """The Outcome of a Run or a Same (of exercise.py) of a chapter with this source, which a Same
    compares with the solution. folder: the student's, from which the source may import."""
    more_paths = [str(Path(folder).resolve())] if folder and source != solution else []
    played = play_check(chapter, source, check, limit, more_paths)
    if is_run(check) or not played.right:
        return played
    from lab.classroom.compare import compare_ranks

    values, right = ([plain.unpack(answer)["value"] for answer in packed]
                     for packed in (played.answers, answers(chapter, solution, check)))
    problem = compare_ranks(values, right)
    if not problem:
        return played
    return played._replace(right=False, problems=(f"{check.words}: {problem}",))


def is_run(check):
    return hasattr(check, "flags")


def play_check(chapter, source, check, limit, more_paths=()):
    """The Outcome of a check of a chapter with this source, before values are compared."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        path, every = Path(scratch, f"{Path(chapter).name}.py"), range(check.ranks)
        path.write_text(source, encoding="utf-8")
        if is_run(check):
            argv = argv_of(check, path.stem)
            calls = [(be_a_rank, (path, rank, check.ranks, argv)) for rank in every]
        else:
            calls = [(evaluate, (path, check, rank)) for rank in every]
        return play(scratch, path, calls, limit, more_paths)


def argv_of(check, chapter):
    from lab import chapters
    from lab.classroom.exercise import SMALL

    model = f"--data={TEXT} {SMALL}" if chapters.trains(chapter) else ""
    return shlex.split(f"--device=cpu {model} {check.flags}")


STORED = Path(__file__).with_name("answers.json")       # of a bundle, which has no solutions
ANSWERS = {}                                            # {(solution, key of a Same): its answers}


@functools.cache
def stored():
    """{key of a Same: its answers}, as a bundle stores them; None: solutions are here."""
    if not STORED.exists():
        return None
    entries = json.loads(STORED.read_text())
    return {key: [*map(base64.b64decode, texts)] for key, texts in entries.items()}


def answers(chapter, solution, check):
    """The answer of each rank, packed, when a Same is called on the solution."""
    if stored() is not None:
        return stored()[check.key]
    key = solution, check.key
    if key not in ANSWERS:
        played = play_check(chapter, solution, check, 4 * LIMIT)
        if not played.right:
            raise RuntimeError(f"the solution of {chapter} fails: {check.words}: {played}")
        ANSWERS[key] = played.answers
    return ANSWERS[key]


def play(folder, path, calls, limit, more_paths=()):
    """The Outcome of these calls, (function, args): each calls function(tell, *args) in a process
    of its own. path: the file that they run. folder: where they may write."""
    ours, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=overseer.oversee, daemon=True,
                              args=(its, calls, folder, [*more_paths], limit))
    try:
        process.start()
        its.close()
        if not ours.poll(CLOCK * limit + PATIENCE):
            raise TimeoutError
        return judge(ours.recv(), path)
    except (EOFError, OSError) as error:                # a student's code killed it, say
        why = "has no end" if isinstance(error, TimeoutError) else "was ended"
        if process.pid:
            process.kill()
        return Outcome(False, (f"the process that oversees it {why}",), {}, {}, {}, len(calls))
    finally:
        ours.close()                                    # which ends it


def judge(processes, path):
    """The Outcome of what the overseer has sent."""
    ranks = dict(enumerate(processes))
    handed_in = {rank: answer_of(process.answer) for rank, process in ranks.items()}
    errors = {rank: (answer["error"], answer["lines"]) for rank, answer in handed_in.items()
              if "error" in answer and not any(words in answer["error"] for words in LOST)}
    stuck = {rank: place(process.stack, path) for rank, process in ranks.items()
             if process.is_stuck}
    ended = {rank: (process.status, *place(process.stack, path)) for rank, process in ranks.items()
             if process.status is not None and not handed_in[rank]}
    record = handed_in[0].get("record")
    problems = [] if "value" in handed_in[0] else problems_of(record)
    if problems is None and all(answer and "error" not in answer for answer in handed_in.values()):
        problems = ["the run's JSON is not there, or not as a run writes it"]
    all_ended = all(answer.get("status") == 0 for answer in handed_in.values())
    return Outcome(all_ended and not stuck and problems == [], tuple(problems or ()), errors, stuck,
                   ended, len(processes), record, tuple(process.answer for process in processes))


def answer_of(packed):
    """A process's answer, {"status": ..., ...}; {}: there is none, or it can't be read."""
    try:
        answer = plain.unpack(packed)
        if "status" not in answer:
            return {}
        if "error" in answer:
            answer["error"] = str(answer["error"])[: 2 * LONGEST]
            answer["lines"] = [int(line) for line in answer["lines"]]
        if "record" in answer:
            answer["record"] = json.loads(answer["record"], parse_constant=lambda name: None)
        return answer
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def problems_of(record):
    """A run's own verdict, in sentences: none if it calls itself right; None: it has no verdict."""
    try:
        problems = record["diagnosis"] or record["problems"][:2]
        steps = record["config"].get("steps", 0)        # none, where no model is trained
        taken = len(record.get("loss", ()))
        if not problems and taken < steps:
            problems = [f"only {taken} of {steps} steps were taken"]
        return [str(words)[:2000] for words in problems]
    except (TypeError, LookupError, AttributeError):
        return None


def place(stack, path):
    """From what faulthandler has written: the collective, or "", and the lines of the chapter."""
    text = stack.decode(errors="replace")
    frames = re.findall(r'^  File "(.*)", line (\d{1,9}) in (.*)$', text, re.MULTILINE)
    collectives = [name for file, _, name in frames if file.endswith("/distributed_c10d.py")
                   and name.startswith(WAITING)]
    lines = [int(line) for file, line, _ in frames if file == str(path)]
    return collectives[-1] if collectives else "", lines
