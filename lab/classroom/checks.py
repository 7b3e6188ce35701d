"""What checks an exercise, in processes of its own: whatever a student has written costs no more.

An interpreter that has imported torch forks a process for each rank, so that a run takes a second
and not five. What a rank prints goes nowhere, and what became of it comes over a pipe.

Nobody believes what a student's process says of itself. A function's value comes as plain
numbers, and of a run each rank's loss, gradients and parameters in each step. Where a run calls
itself right, another process, which has not run a line of the student's, knows or computes what
they must be, from the solution and one GPU, and compares (lab/classroom/trusted.py).

A run that has no end is ended. It may be a deadlock: then no rank computes any more. Or an endless
loop: then the ranks have computed for longer than a limit, one of them or all cores together. These
are seconds of computing, since those of a clock say little on a machine that has other work; only
many of them are too many, too (lab/classroom/overseer.py).
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
import threading
import traceback
import types
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from lab.bench.ranks import CONTEXT, start_interpreter
from lab.classroom import kept, overseer, plain, sandbox
from lab.classroom.overseer import CLOCK, LIMIT

# Not torch, nor what imports it: the other interpreter does so while this one reads on.

TEXT = json.decoder.__file__    # short, and the same whatever the course's files are
LOST = "by peer", "Broken pipe", "remote process"       # what gloo says where another has ended
WAITING = ("all_", "reduce", "gather", "scatter", "broadcast", "barrier", "monitored_barrier",
           "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_")     # names begin so
LONGEST = 300                   # letters of an exception's text
PATIENCE = 120                  # seconds for what is not the students'


class Outcome(NamedTuple):
    """What became of a check. Lines are those of the file that has run, the innermost first."""
    right: bool
    said: tuple             # the run's diagnosis, or its problems; how a value differs
    errors: dict            # {rank: (what it has raised, lines)}
    stuck: dict             # {rank: (the collective that it waits in or "", lines)}: without end
    ended: dict             # {rank: (exit status, lines)} of those that have ended without a word
    world: int
    record: object = None   # a run's JSON, of which all but its form is the run's own word
    told: list = ()         # the messages of each process, if these are compared with nothing


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
    """From now on, the course's modules are those of this folder, where it has them."""
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


def told(error, path):
    """What was raised, in one line, and the lines of the file that led there."""
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


class Nobody:
    """In place of the watch that names a lost rank: the grader sees what becomes of each."""

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
    """The environment of a rank."""
    if "--kernels" not in argv:                         # in the interpreter, they take their time
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world)}


def be_a_rank(tell, path, rank, world, argv, preferred=None):
    """preferred: a folder whose modules take the place of the course's."""
    if preferred:
        prefer(preferred)
    launched_as(rank, world, argv)
    import torch.distributed as dist

    from lab.bench import report
    from lab.cli import refusals

    refused, record = [], Path("run.json").absolute()
    refusals.say = refused.append
    report.meeting.Watch = Nobody
    report.verify.Verifier = telling_verifier(tell)
    report.collectives.Run = telling_collectives(tell)
    try:
        dist.init_process_group("gloo", f"file://{record.with_name('store')}", world_size=world,
                                rank=rank)
        module = load(path, path.stem)
        status = report.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                             getattr(module, "flags", None), module.formulas,
                             [*argv, f"--json={record}"])
        answer = {"status": status}
    except SystemExit as leaving:
        answer = told(leaving, path)
        if refused:
            answer["error"] = refused[0]
        elif not leaves_itself(leaving, path):          # a loss that is not finite, say
            del answer["error"]
        answer["status"] = 1
    except BaseException as error:
        answer = {"status": 1} | told(error, path)
    if record.exists() and rank == 0:
        answer["record"] = record.read_text()
    tell(plain.pack(answer))
    return answer["status"]


def telling_verifier(tell):
    """The one that holds a run to one GPU's; it also hands on what this rank holds in each step."""
    from lab.bench import verify

    class Telling(verify.Verifier):
        def compare(self, batch, loss, norm, parameters):
            parameters = list(parameters)
            here = verify.compared(loss, norm, parameters)
            if self.steps >= self.tensor_steps:
                here = {key: found for key, found in here.items() if key[0] == "loss"}
            held = [[*key, tensor, [tuple(cut)[:3] for cut in getattr(owner, "cuts", ())]]
                    for key, (tensor, owner) in here.items()]
            tell(plain.pack({"step": batch.step, "held": held}))
            return super().compare(batch, loss, norm, parameters)

    return Telling


def telling_collectives(tell):
    """Chapter 00's run; it also hands on this rank's rounds."""
    from lab.bench import collectives

    class Telling(collectives.Run):
        def hold(self):
            tell(plain.pack({"found": {found.name: [found.rounds, bool(found.equal)]
                                       for found in self.found}}))
            super().hold()

    return Telling


def leaves_itself(leaving, path):
    """Whether it is the chapter that calls sys.exit."""
    return traceback.extract_tb(leaving.__traceback__)[-1].filename == str(path)


def evaluate(tell, path, check, rank):
    """Tell what a Same gives of a student's file."""
    try:
        if check.ranks > 1:
            import torch.distributed as dist

            launched_as(rank, check.ranks, [])
            dist.init_process_group("gloo", f"file://{path.with_name('store')}",
                                    world_size=check.ranks, rank=rank)
        answer = {"status": 0, "value": check.value(load(path, "student"))}
    except BaseException as error:
        answer = {"status": 1} | told(error, path)
    tell(plain.pack(answer))
    if check.ranks > 1 and answer["status"] == 0:           # after an error, they need not wait
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


# --------------------------------------------------------------------------------- in the overseer

def oversee(parent, folder, path, calls, more_paths, limit, is_confined):
    """Run the calls, and send the Outcome. Only when the students' processes have ended, and call
    themselves right, it asks for what they are compared with, a call of trusted.py: so they cannot
    find it."""
    outcome, world = None, len(calls)
    try:
        play = overseer.confined if is_confined else overseer.oversee
        processes, running = play(calls, folder, more_paths, limit, parent)
        outcome = judge(processes, running, path)
        if outcome.right:
            parent.send(None)
            trusted, told = parent.recv(), [process.said for process in processes]
            if trusted:
                said = tuple(compare(told, *trusted))
                outcome = outcome._replace(right=not said, said=said)
            else:
                outcome = outcome._replace(told=told)
    except Exception as error:                          # whatever their messages have made of it
        said = f"this cannot be judged: {type(error).__name__}: {error}"[:LONGEST]
        outcome = Outcome(False, (said,), {}, {}, {}, world)
    parent.send(outcome)
    os._exit(0)


def compare(told, name, *args):
    """What is wrong with what the processes have told, in sentences: by a function of
    lab/classroom/trusted.py, and these arguments."""
    import torch

    from lab.classroom import trusted

    torch.set_num_threads(1)                            # as theirs, which round alike then
    told = [[plain.unpack(message) for message in messages] for messages in told]
    with (open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere),
          contextlib.redirect_stderr(nowhere)):
        return getattr(trusted, name)(told, *args)


def judge(processes, running, path):
    """What the processes say of themselves."""
    ranks = dict(enumerate(processes))
    answers = {rank: answer_of(process) for rank, process in ranks.items()}
    errors = {rank: (answer["error"], answer["lines"]) for rank, answer in answers.items()
              if "error" in answer and not any(words in answer["error"] for words in LOST)}
    stuck = {rank: place(process.stack, path) for rank, process in ranks.items()
             if process in running}
    ended = {rank: (process.status, *place(process.stack, path)) for rank, process in ranks.items()
             if process.status is not None and not answers[rank]}
    record = answers[0].get("record")
    said = [] if "value" in answers[0] else what_it_says(record)
    if said is None and all(answer and "error" not in answer for answer in answers.values()):
        said = ["the run's JSON is not there, or not as a run writes it"]
    all_ended = all(answer.get("status") == 0 for answer in answers.values())
    return Outcome(all_ended and not running and said == [], tuple(said or ()), errors, stuck,
                   ended, len(processes), record)


def answer_of(process):
    """The last message of a process, if it says what became of it; else {}."""
    try:
        answer = plain.unpack(process.said[-1]) if process.said else {}
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


def what_it_says(record):
    """A run's own verdict: sentences, none if it calls itself right; None: it says nothing."""
    try:
        said = record["diagnosis"] or record["problems"][:2]
        steps = record["config"].get("steps", 0)        # none, where no model is trained
        taken = len(record.get("loss", ()))
        if not said and taken < steps:
            said = [f"only {taken} of {steps} steps were taken"]
        return [str(words)[:2000] for words in said]
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


# --------------------------------------------------------------------------------- from the outside

OUTCOMES = {}           # {kept.key: of what was asked before}; most are somebody else's as well
LOCKS = {}              # {key: held by who finds that out}


def outcome(chapter, source, solution, check, folder=None, limit=LIMIT):
    """What becomes of a Run or a Same (of exercise.py) of a chapter with this source. folder:
    the student's, from which it may import."""
    more_paths = [str(Path(folder).resolve())] if folder and source != solution else []
    key = kept.key(chapter, source, solution, check, more_paths, limit)
    with LOCKS.setdefault(key, threading.Lock()):       # who asks the same beside waits for it
        if key not in OUTCOMES:
            name = Path(chapter).name
            trusted = (("of_a_run", name, solution, argv_of(check, name)) if is_run(check) else
                       ("of_values", check.words, answers(chapter, solution, check)))
            OUTCOMES[key] = played(chapter, source, check, limit, trusted, more_paths)
        return OUTCOMES[key]


def is_run(check):
    return hasattr(check, "flags")


def played(chapter, source, check, limit, trusted=None, more_paths=()):
    """The Outcome of a check of a chapter with this source, which is compared with `trusted`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        path, every = Path(scratch, f"{Path(chapter).name}.py"), range(check.ranks)
        path.write_text(source, encoding="utf-8")
        if is_run(check):
            argv = argv_of(check, path.stem)
            calls = [(be_a_rank, (path, rank, check.ranks, argv)) for rank in every]
        else:
            calls = [(evaluate, (path, check, rank)) for rank in every]
        return play(scratch, path, calls, limit, trusted, more_paths)


STORED = Path(__file__).with_name("answers.json")       # in what students get, without solutions


@functools.cache
def stored():
    """{key of a Same: what it gives on each rank, packed}; None: solutions are here."""
    if not STORED.exists():
        return None
    found = json.loads(STORED.read_text())
    return {key: [*map(base64.b64decode, those)] for key, those in found.items()}


ANSWERS = {}


def answers(chapter, solution, check):
    """What a Same gives of the solution, on each rank, packed."""
    if stored() is not None:
        return stored()[check.key]
    key = solution, check.key
    if key not in ANSWERS:
        outcome = played(chapter, solution, check, 4 * LIMIT)
        if not outcome.right:
            raise RuntimeError(f"the solution of {chapter} fails: {check.words}: {outcome}")
        ANSWERS[key] = [messages[-1] for messages in outcome.told]
    return ANSWERS[key]


def argv_of(check, chapter):
    from lab import chapters
    from lab.classroom.exercise import SMALL

    model = f"--data={TEXT} {SMALL}" if chapters.trains(chapter) else ""
    return shlex.split(f"--device=cpu {model} {check.flags}")


def play(folder, path, calls, limit, trusted=None, more_paths=()):
    """The Outcome of these calls, each in a process of its own: (function, what it takes besides a
    function that tells). path: the file that they run. folder: where they may write. trusted: what
    `compare` takes; None: they are believed."""
    ours, its = CONTEXT.Pipe()
    process = CONTEXT.Process(target=oversee, args=(its, folder, path, calls, [*more_paths],
                                                    limit, sandbox.REQUIRED))
    process.daemon, answer = True, None
    try:
        process.start()
        its.close()
        answer = received(ours, CLOCK * limit + PATIENCE)
        if answer is None:
            ours.send(trusted)
            answer = received(ours, PATIENCE)
    except (EOFError, OSError) as error:                # by a signal of theirs, say
        why = "has no end" if isinstance(error, TimeoutError) else "was ended"
        return Outcome(False, (f"the process that oversees it {why}",), {}, {}, {}, len(calls))
    finally:
        ours.close()                                    # which ends it
        if process.pid and answer is None:
            process.join(PATIENCE / 4)
            process.kill()
            process.join()
    return answer


def received(connection, seconds):
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()
