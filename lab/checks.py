"""What checks an exercise, in processes of its own: whatever a student has written costs no more.

An interpreter that has imported torch forks a process for each rank, so that a run takes a second
and not five. A rank writes what became of it to a file, and what it prints goes nowhere. A run is
right if every rank has come to its end with status 0, and the JSON of rank 0 has no problems.

A run that has no end is ended. It may be a deadlock: then no rank computes any more. Or an endless
loop: then the ranks have computed for longer than a limit, one of them or all cores together. These
are seconds of computing, since those of a clock say little on a machine that has other work.
"""

import ast
import contextlib
import faulthandler
import gc
import json
import json.decoder
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

# Not torch, nor what imports it: the other interpreter does so while this one reads on.

PROC = Path("/proc")
ROOT = Path(__file__).resolve().parent.parent
TEXT = json.decoder.__file__    # short, and the same whatever the course's files are
CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["torch._dynamo", "torch.distributed.tensor.parallel",       # an optimizer's first step
           "triton.runtime.interpreter", "lab.report", "lab.compare", "lab.simulate"]
LIMIT = 5                       # seconds of computing: a right run needs one or two
IDLE = 2                        # seconds in which no rank computes: they wait for each other
GRACE = 1                       # seconds for the other ranks to end, once one has failed
LOST = "by peer", "Broken pipe", "remote process"       # what gloo says where another has ended
WAITING = ("all_", "reduce", "gather", "scatter", "broadcast", "barrier", "monitored_barrier",
           "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_")     # names begin so
LONGEST = 300                   # letters of an exception's text


class Outcome(NamedTuple):
    """What became of a check. Lines are those of the file that has run, the innermost first."""
    right: bool
    said: tuple             # the run's diagnosis, or its problems; how an expression differs
    errors: dict            # {rank: (what it has raised, lines)}
    stuck: dict             # {rank: (the collective that it waits in or "", lines)}: without end
    ended: dict             # {rank: (exit status, lines)} of those that have ended without a word
    world: int


def warm_up():
    """Start the interpreter that forks. It imports while this one goes on."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    was_set = "TRITON_INTERPRET" in os.environ
    os.environ["TRITON_INTERPRET"] = "1"                # there, kernels too run on the CPU
    forkserver.ensure_running()
    if not was_set:
        del os.environ["TRITON_INTERPRET"]


# ------------------------------------------------------------------------------ in a forked process

def begin(scratch, rank, more_paths):
    """First of all in a process: no output, no terminal, and a group of processes of its own, so
    that what it starts can be ended with it."""
    os.setsid()
    signal.alarm(600)                                   # should nobody be left to end it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in ("r", "w", "w"))
    stack = open(scratch / f"{rank}.stack", "w")
    faulthandler.enable(stack)                          # where a signal such as SIGSEGV ends it
    faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
    sys.path[:0] = [str(ROOT)]
    sys.path += more_paths
    os.chdir(scratch)
    import torch

    torch.set_num_threads(1)
    gc.freeze()                                         # what is imported by now is no garbage


def end(scratch, rank, answer):
    """Write what became of it, and leave without Python's shutdown, which may wait for threads."""
    part = scratch / f"{rank}.part"
    part.write_text(json.dumps(answer))
    part.rename(scratch / f"{rank}.json")
    os._exit(0)


def prefer(folder):
    """From now on, the course's modules are those of this folder, where it has them."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("common", "kernels", "lab"):
            del sys.modules[name]
    sys.path[:0] = [str(folder)]
    import lab

    lab.__path__[:0] = [str(folder / "lab")]


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


def be_a_rank(scratch, path, rank, world, argv, more_paths, preferred=None):
    """preferred: a folder whose modules take the place of the course's."""
    begin(scratch, rank, more_paths)
    if preferred:
        prefer(preferred)
    if "--kernels" not in argv:                         # in the interpreter, they take their time
        os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world)}
    import torch.distributed as dist

    from lab import refusals, report

    refused = []
    refusals.say = refused.append
    report.meeting.Watch = Nobody
    try:
        dist.init_process_group("gloo", f"file://{scratch}/store", world_size=world, rank=rank)
        module = load(path, path.stem)
        status = report.main(module.__file__, module.__doc__, module.VARIANTS, module.requires,
                             getattr(module, "flags", None), module.formulas, argv)
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
    end(scratch, rank, answer)


def leaves_itself(leaving, path):
    """Whether it is the chapter that calls sys.exit."""
    return traceback.extract_tb(leaving.__traceback__)[-1].filename == str(path)


def evaluate(scratch, solution, student, expression, words, more_paths):
    """The expression in two files. words: what it is."""
    begin(scratch, 0, more_paths)
    import torch

    import common
    from lab import simulate
    from lab.compare import compare

    def value(path, name):
        torch.manual_seed(0)
        seeded = torch.Generator().manual_seed(0)
        random = lambda *shape: torch.randn(*shape, generator=seeded, dtype=torch.float64)
        tools = {"tiny": common.PRESETS["tiny"], "random": random, "simulate": simulate}
        return eval(expression, vars(load(path, name)) | tools)

    try:
        right = value(solution, "solution")
        finding = compare(value(student, "student"), right)
        answer = {"status": 0, "said": [f"{words}: {finding}"] if finding else []}
    except BaseException as error:
        answer = {"status": 1} | told(error, student)
        if not answer["lines"]:                         # of what the function has returned
            answer["error"] = f"{words}: {answer['error']}"
    end(scratch, 0, answer)


def short(text):
    text = " ".join(text.split())
    return text if len(text) <= 72 else f"{text[:69]}..."


# --------------------------------------------------------------------------------- from the outside

OUTCOMES = {}           # of what was asked before: most functions are somebody else's as well


def outcome(chapter, source, solution, check, folder=None, limit=LIMIT):
    """What becomes of a Run or a Same (of lab/exercises.py) of a chapter with this source. folder:
    the student's, from which it may import."""
    more_paths = [str(Path(folder).resolve())] if folder and source != solution else []
    key = chapter, source, check, *more_paths
    if key not in OUTCOMES:
        with tempfile.TemporaryDirectory() as scratch:
            scratch = Path(scratch)
            path = scratch / f"{Path(chapter).name}.py"
            path.write_text(source, encoding="utf-8")
            if hasattr(check, "ranks"):
                calls = ranks_of(scratch, path, check, more_paths)
            else:
                beside = scratch / "solution.py"
                beside.write_text(solution, encoding="utf-8")
                words = check.words or short(check.expression)
                calls = [(evaluate, (scratch, beside, path, check.expression, words, more_paths))]
            OUTCOMES[key] = play(scratch, path, calls, limit)
    return OUTCOMES[key]


def ranks_of(scratch, path, check, more_paths):
    from lab.cli import TRAIN_NO_MODEL
    from lab.exercises import SMALL

    model = "" if path.stem in TRAIN_NO_MODEL else f"--data={TEXT} {SMALL}"
    argv = shlex.split(f"--device=cpu {model} {check.flags} --json={scratch}/run.json")
    return [(be_a_rank, (scratch, path, rank, check.ranks, argv, more_paths))
            for rank in range(check.ranks)]


def play(scratch, path, calls, limit):
    """Run each call in a process, to their end or to ours."""
    processes = [CONTEXT.Process(target=target, args=args, daemon=True) for target, args in calls]
    try:
        for process in processes:
            process.start()
        stuck = {} if follow(processes, scratch, limit) else stacks(processes, scratch, path)
        return judge(processes, scratch, path, stuck)
    finally:
        for process in processes:
            stop(process)


def stop(process):
    """With all that it has started."""
    if process.pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()                                  # it may have no group yet
        process.join()


def follow(processes, scratch, limit):
    """Wait until all have ended, or one has failed and the others have had time to say why. False:
    they would have no end."""
    used, failed_at = {}, None
    since, before, busy = time.monotonic(), 0, 0        # of the last seconds, to find a deadlock
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], 0.1)
        now = time.monotonic()
        for process in alive:
            computes, seconds = state_of(process.pid)
            used[process.pid] = max(seconds, used.get(process.pid, 0))
            busy += computes
        total = sum(used.values())
        if max(total / os.cpu_count(), *used.values()) > limit:
            return False
        if now > since + IDLE:
            if total < before + 0.1 and busy <= 1:      # whoever polls computes a little
                return False
            since, before, busy = now, total, 0
        if failed_at is None and has_failed(processes, scratch):
            failed_at = now
        if failed_at is not None and now > failed_at + GRACE:
            return True
    return True


def state_of(pid):
    """Whether a process computes or wants to, and for how many seconds it has. Of one that has just
    ended: nothing."""
    try:
        if PROC.exists():
            words = (PROC / f"{pid}/stat").read_text().rpartition(") ")[2].split()
            ticks = int(words[11]) + int(words[12])
            return words[0] in "RD", ticks / os.sysconf("SC_CLK_TCK")
        command = ["ps", "-o", "stat=,time=", "-p", str(pid)]       # macOS
        state, clock = subprocess.run(command, capture_output=True, text=True).stdout.split()
        minutes, seconds = clock.split(":")[-2:]
        return state[0] in "RU", 60 * int(minutes) + float(seconds)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return False, 0


def has_failed(processes, scratch):
    """Whether one has ended otherwise than with status 0."""
    return any(answer_of(scratch, rank).get("status") != 0
               for rank, process in enumerate(processes) if not process.is_alive())


def answer_of(scratch, rank):
    path = scratch / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def stacks(processes, scratch, path):
    """{rank: where it is} of those that are still there."""
    files = {rank: scratch / f"{rank}.stack" for rank, process in enumerate(processes)
             if process.is_alive()}
    for rank in files:
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[rank].pid, signal.SIGUSR1)        # works even inside gloo
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(map(is_written, files.values())):
        time.sleep(0.02)
    return {rank: place(file, path) for rank, file in files.items() if file.exists()}


def is_written(file):
    return file.exists() and file.read_text().endswith("\n")


def place(file, path):
    """From what faulthandler has written: the collective, or "", and the lines of the chapter."""
    frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', file.read_text(), re.MULTILINE)
    collectives = [name for file, _, name in frames if file.endswith("/distributed_c10d.py")
                   and name.startswith(WAITING)]
    lines = [int(line) for file, line, _ in frames if file == str(path)]
    return collectives[-1] if collectives else "", lines


def judge(processes, scratch, path, stuck):
    answers = {rank: answer_of(scratch, rank) for rank in range(len(processes))}
    errors = {rank: (answer["error"], answer["lines"]) for rank, answer in answers.items()
              if "error" in answer and not any(words in answer["error"] for words in LOST)}
    record, said = scratch / "run.json", answers[0].get("said")
    if record.exists():
        run = json.loads(record.read_text())
        said = run["diagnosis"] or run["problems"][:2]
        steps = run["config"].get("steps", 0)           # none, where no model is trained
        taken = len(run.get("loss", ()))
        if not said and taken < steps:
            said = [f"only {taken} of {steps} steps were taken"]
    ended = {rank: (process.exitcode, *place(scratch / f"{rank}.stack", path))
             for rank, process in enumerate(processes)
             if not process.is_alive() and not answers[rank]}
    all_ended = all(answer.get("status") == 0 for answer in answers.values())
    return Outcome(all_ended and said == [], tuple(said or ()), errors, stuck, ended,
                   len(processes))


# ----------------------------------------------------------------------------------------- in words


def in_words(outcome, source, line_of_student):
    """Why it is not right, in sentences. line_of_student(line): where in the student's file a line
    of this source is; None: it is not the student's."""
    where = lambda lines: place_in_words(lines, source, line_of_student)
    if outcome.stuck:
        return [no_end(outcome, where)]
    if outcome.errors:
        return [what_was_raised(outcome, where)]
    if outcome.said:
        return list(outcome.said)
    if outcome.ended:
        return [end_of_a_process(outcome, where)]
    return ["the ranks have lost each other"]


def named(ranks, one="", more=""):
    """`rank 2 is`, `ranks 1, 2 are`."""
    words = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    return f"{words} {one if len(ranks) == 1 else more}".rstrip()


def no_end(outcome, where):
    """Which rank waits where."""
    groups = {}
    for rank, (collective, lines) in outcome.stuck.items():
        place = where(lines) or "the end of the run"
        groups.setdefault((collective, place), []).append(rank)
    said = []
    for (collective, place), ranks in groups.items():
        if collective:
            said.append(f"{named(ranks, 'waits', 'wait')} in {collective}, {place}")
        else:
            said.append(f"{named(ranks, 'is', 'are')} at {place}")
    others = [rank for rank in range(outcome.world) if rank not in outcome.stuck]
    if others:
        said.append(named(others, "has ended", "have ended"))
    return f"no end: {'; '.join(said)}"


def what_was_raised(outcome, where):
    """By the first rank, and by those that have raised such an error in the same place."""
    text, lines = outcome.errors[min(outcome.errors)]
    kind = text.split(":")[0]
    ranks = [rank for rank, (other, there) in outcome.errors.items()
             if there == lines and other.split(":")[0] == kind]
    who = "" if len(ranks) == outcome.world else named(ranks)
    place = ", ".join(filter(None, [who, where(lines)]))
    return ": ".join(filter(None, [place, text]))


def end_of_a_process(outcome, where):
    rank, (status, collective, lines) = min(outcome.ended.items())
    how = f"with status {status}"
    if status < 0:
        how = f"by {signal.Signals(-status).name}"
        if collective:
            how += (", since it got more or less than it expected: not all ranks call the same "
                    "collectives in the same order, with tensors of the same size")
        elif -status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT):
            how += ", as if it had used memory beyond the end of a tensor"
    who = named([rank]) if outcome.world > 1 else ""
    place = ", ".join(filter(None, [who, collective, where(lines)]))
    return ": ".join(filter(None, [place, f"the process has ended {how}"]))


def place_in_words(lines, source, line_of_student):
    """The innermost of these lines that the student has written; or else the innermost one of the
    solution, with its text, since the student does not see its number."""
    if not lines:
        return ""
    theirs = [line for line in lines if line_of_student(line)]
    line = (theirs or lines)[0]
    function = function_of(ast.parse(source), line)
    if theirs:
        return f"line {line_of_student(line)}{' of ' * bool(function)}{function}"
    return f"`{source.splitlines()[line - 1].strip()}` in the solution's {function}"


def function_of(tree, line):
    """The name of the function around a line: "SumOut.backward"; "": there is none."""
    names = []
    for node in ast.walk(tree):                         # from the outside
        is_definition = isinstance(node, (ast.FunctionDef, ast.ClassDef))
        if is_definition and node.lineno <= line <= node.end_lineno:
            names.append(node.name)
    return ".".join(names)
