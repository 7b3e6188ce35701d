"""What checks an exercise, in processes of its own: whatever a student has written costs no more.

An interpreter that has imported torch forks a process for each rank, so that a run takes a second
and not five. A rank writes what became of it to a file, and what it prints goes nowhere. A run is
right if every rank has come to its end with status 0, and the JSON of rank 0 has no problems.

A run that has no end is ended. It may be a deadlock: then no rank computes any more. Or an endless
loop: then the ranks have computed for longer than `limit` seconds of a quiet machine, a core each
or all cores together. (Seconds of a clock would say little: other programs may have the cores.)
"""

import ast
import contextlib
import faulthandler
import gc
import importlib.machinery
import json
import json.decoder
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
import types
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TEXT = json.decoder.__file__    # it is read in no time
CONTEXT = multiprocessing.get_context("forkserver")
IDLE = 3                        # seconds in which no rank computes: they wait for each other
GRACE = 1                       # seconds for the other ranks to end, once one has failed
LOST = "by peer", "Broken pipe", "remote process"       # what gloo says where another has ended


class Outcome(NamedTuple):
    """What became of a check. right; or else any of the others."""
    right: bool
    said: list = []         # the run's diagnosis, or its problems; how an expression differs
    errors: dict = {}       # {rank: (what was raised, [(line, function), ...] from the inside)}
    stuck: dict = {}        # {rank: (collective, line, function)} of a run that had no end
    ended: list = []        # the ranks that had ended by then, or without a word
    world: int = 1


def warm_up():
    """Start the interpreter that forks. It imports while this one goes on."""
    os.environ["TRITON_INTERPRET"] = "1"                # kernels run on the CPU, too
    CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.tensor.parallel",
                                    "lab.report"])
    forkserver.ensure_running()


# ------------------------------------------------------------------------------- in a forked process

def begin(folder, name, more_paths):
    """First of all in a process: no output, no terminal, and a group of processes of its own, so
    that what it starts can be ended with it."""
    os.setsid()
    signal.alarm(600)                                   # should nobody be there to end it
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    sys.stdin, sys.stdout, sys.stderr = (open(os.devnull, mode) for mode in ("r", "w", "w"))
    faulthandler.register(signal.SIGUSR1, open(folder / f"{name}.stack", "w"), all_threads=False)
    sys.path[:0] = [str(ROOT)]
    sys.path += more_paths
    import torch

    torch.set_num_threads(1)
    gc.freeze()                                         # what is imported by now is no garbage
    os.chdir(folder)


def end(folder, name, answer):
    """Write what became of it, and leave without Python's shutdown."""
    temporary = folder / f"{name}.part"
    temporary.write_text(json.dumps(answer))
    temporary.rename(folder / f"{name}.json")
    os._exit(0)


def load(path, name):
    """The module of a chapter's file, which Triton can read again."""
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=str(path))
    sys.modules[name] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def told(error, path):
    """What was raised, in one line, and where that was in the file, from the inside."""
    words = " ".join(str(error).split("\n\n")[0].split())
    frames = [(frame.filename, line) for frame, line in
              ((frame, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))]
    lines = [line for file, line in reversed(frames) if file == str(path)]
    return {"error": f"{type(error).__name__}: {words}".removesuffix(": "), "lines": lines,
            "here": bool(frames) and frames[-1][0] == str(path)}


class Nobody:
    """In place of the watch that names a lost rank: the grader sees itself what becomes of each."""

    def __init__(self, run):
        pass

    def is_told_to_end(self):
        return False

    def leave(self, error):
        pass

    let_go = stop = lambda self: None


def be_a_rank(folder, path, rank, world, argv, more_paths):
    begin(folder, rank, more_paths)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_WORLD_SIZE": str(world)}
    import torch.distributed as dist

    from lab import refusals, report

    refused = []
    refusals.say = refused.append
    report.meeting.Watch = Nobody
    answer = {}
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", world_size=world, rank=rank)
        module = load(path, path.stem)
        nothing = lambda parser: None
        answer["status"] = report.main(
            module.__file__, module.__doc__, module.VARIANTS, module.requires,
            getattr(module, "flags", nothing), getattr(module, "formulas", None), argv)
    except SystemExit as leaving:
        answer = {"status": leaving.code or 0} | told(leaving, path)
        if not answer.pop("here"):                      # it is not the chapter that leaves
            del answer["error"]
        if refused:
            answer["error"] = refused[0]
    except BaseException as error:
        answer = {"status": 1} | told(error, path)
    end(folder, rank, answer)


def compare(folder, paths, expression, more_paths):
    """The expression in two files, the solution first."""
    begin(folder, 0, more_paths)
    import torch

    import common

    def value(path, name):
        seeded = torch.Generator().manual_seed(0)
        torch.manual_seed(0)
        random = lambda *shape: torch.randn(*shape, generator=seeded, dtype=torch.float64)
        module = load(path, name)
        sys.modules[path.stem] = module
        return eval(expression, vars(module) | {"tiny": common.PRESETS["tiny"], "random": random})

    solution, student = paths
    expected = value(solution, "solution")
    try:
        given = value(student, "student")
    except BaseException as error:
        end(folder, 0, {"status": 1} | told(error, student))
    where = difference(given, expected)
    said = [] if where is None else [f"{expression} gives {where}"]
    end(folder, 0, {"status": 0 if where is None else 1, "said": said})


def difference(given, expected, of=""):
    """How a value differs from the expected one, in words; None: it does not, to 1e-9."""
    import torch

    if torch.is_tensor(expected) and torch.is_tensor(given) and given.shape == expected.shape:
        given, expected = given.detach(), expected.detach()
        if torch.allclose(given.double(), expected.double(), rtol=0, equal_nan=True,
                          atol=1e-9 * float(expected.double().abs().max() if expected.numel()
                                            else 0)):
            return None
        return f"{short(given)}, not {short(expected)}{of}"
    if isinstance(expected, (list, tuple)) and isinstance(given, (list, tuple)):
        if len(given) == len(expected):
            for i, (a, b) in enumerate(zip(given, expected)):
                words = difference(a, b, f" in [{i}]{of}")
                if words:
                    return words
            return None
    elif isinstance(expected, dict) and isinstance(given, dict):
        if given.keys() == expected.keys():
            for key in expected:
                words = difference(given[key], expected[key], f" in [{key!r}]{of}")
                if words:
                    return words
            return None
    elif isinstance(expected, (int, float)) and isinstance(given, (int, float)):
        if given == expected or abs(given - expected) <= 1e-9 * abs(expected):
            return None
    elif not torch.is_tensor(expected) and not torch.is_tensor(given) and given == expected:
        return None
    return f"{short(given)}, not {short(expected)}{of}"


def short(value, most=60):
    import torch

    if torch.is_tensor(value) and value.numel() > 6:
        return f"a tensor of {tuple(value.shape)}"
    value = value.tolist() if torch.is_tensor(value) else value
    words = repr(value)
    return words if len(words) <= most else f"{words[:most]}..."


# ---------------------------------------------------------------------------------- from the outside

OUTCOMES = {}           # of what was asked before


def outcome(chapter, source, solution, check, folder=None, limit=8):
    """What becomes of a check (as lab/exercises.py has them) of a chapter with this source.
    folder: the student's, from which it may import."""
    more_paths = [str(folder)] if folder and source != solution else []
    key = chapter, source, check, *more_paths
    if key not in OUTCOMES:
        with tempfile.TemporaryDirectory() as scratch:
            OUTCOMES[key] = play(Path(scratch), Path(chapter).name, source, solution, check,
                                 more_paths, limit)
    return OUTCOMES[key]


def play(scratch, name, source, solution, check, more_paths, limit):
    path = scratch / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    if hasattr(check, "ranks"):
        from lab.exercises import SMALL

        argv = shlex.split(f"--data={TEXT} {SMALL} {check.flags} --json={scratch}/run.json")
        calls = [(be_a_rank, (scratch, path, rank, check.ranks, argv, more_paths))
                 for rank in range(check.ranks)]
    else:
        (scratch / "solution").mkdir()
        beside = scratch / "solution" / f"{name}.py"
        beside.write_text(solution, encoding="utf-8")
        calls = [(compare, (scratch, (beside, path), check.expression, more_paths))]
    world = len(calls)
    processes = [CONTEXT.Process(target=target, args=args, daemon=True) for target, args in calls]
    try:
        for process in processes:
            process.start()
        in_time = follow(processes, scratch, limit)
        stuck = {} if in_time else stacks(processes, scratch, path)
        ended = [rank for rank, process in enumerate(processes) if not process.is_alive()]
    finally:
        for process in processes:
            stop(process)
    return judge(scratch, world, stuck, ended, is_run=hasattr(check, "ranks"))


def stop(process):
    """With all that it has started."""
    if process.pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()                                  # it may have no group yet
        process.join()


def follow(processes, scratch, limit):
    """Until all have ended, or one has failed and the others have had time to do so. False: they
    would have no end."""
    used, last, deadline = {}, time.monotonic(), None
    cores = os.cpu_count()
    while alive := [process for process in processes if process.is_alive()]:
        wait([process.sentinel for process in alive], 0.1)
        now = time.monotonic()
        before = sum(used.values())
        states = []
        for process in alive:
            state, seconds = state_of(process.pid)
            used[process.pid] = max(seconds, used.get(process.pid, 0))
            states.append(state)
        if sum(used.values()) > before + 0.005 or not {"S", "Z"} >= set(states):
            last = now
        if now > last + IDLE or max(sum(used.values()) / cores, *used.values()) > limit:
            return False
        if deadline is None and has_failed(processes, scratch):
            deadline = now + GRACE
        if deadline is not None and now > deadline:
            return True
    return True


def state_of(pid):
    """Of a process: the letter of its state, and the seconds that it has computed."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "Z", 0
    return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def has_failed(processes, scratch):
    """Whether one has ended otherwise than with status 0."""
    return any(answer_of(scratch, rank).get("status") != 0
               for rank, process in enumerate(processes) if not process.is_alive())


def answer_of(scratch, rank):
    path = scratch / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def stacks(processes, scratch, path):
    """{rank: (collective, [lines])} of those that are still there: where they are."""
    alive = {rank: process for rank, process in enumerate(processes) if process.is_alive()}
    files = {rank: scratch / f"{rank}.stack" for rank in alive}
    for process in alive.values():
        os.kill(process.pid, signal.SIGUSR1)            # works even inside gloo
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline and not all(
            file.exists() and file.read_text().endswith("\n") for file in files.values()):
        time.sleep(0.02)
    time.sleep(0.1)
    return {rank: place(file.read_text(), path) for rank, file in files.items()}


def place(stack, path):
    """From faulthandler's words: the collective that it waits in, or "", and the lines in the file
    that lead there, from the inside."""
    frames = []
    for line in stack.splitlines():
        if line.startswith("  File "):
            file, number, name = line.removeprefix("  File ").rsplit(", line ", 1)[0], *(
                line.rsplit(", line ", 1)[1].split(" in ", 1))
            frames.append((file.strip('"'), int(number), name))
    collectives = [name for file, _, name in frames
                   if file.endswith("distributed_c10d.py") and name != "wrapper"]
    return collectives[-1] if collectives else "", [
        number for file, number, _ in frames if file == str(path)]


def judge(scratch, world, stuck, ended, is_run):
    answers = {rank: answer_of(scratch, rank) for rank in range(world)}
    errors = {rank: (answer["error"], answer["lines"]) for rank, answer in answers.items()
              if "error" in answer and not any(words in answer["error"] for words in LOST)}
    record = scratch / "run.json"
    run = json.loads(record.read_text()) if record.exists() else {}
    said = run.get("diagnosis") or run.get("problems", [])[:2] if is_run else answers[0].get("said")
    finished = all(answer.get("status") == 0 for answer in answers.values())
    right = finished and not stuck and not errors and not said and bool(run or not is_run)
    return Outcome(right, said or [], errors, stuck, ended, world)


# ------------------------------------------------------------------------------------------ in words

def function_of(tree, line):
    """The name of the function around a line: `SumOut.backward`."""
    name, scope = [], tree
    while scope:
        inner = [node for node in ast.iter_child_nodes(scope) if hasattr(node, "lineno")
                 and node.lineno <= line <= node.end_lineno]
        scope = inner[0] if inner else None
        if isinstance(scope, (ast.FunctionDef, ast.ClassDef)):
            name.append(scope.name)
    return ".".join(name)


def at(lines, source, line_of_student):
    """Where that is: the innermost of these lines that a student has written, with its text; or, if
    none is, the innermost of the solution's."""
    theirs = [line for line in lines if line_of_student(line)]
    if not lines:
        return ""
    line = (theirs or lines)[0]
    text, function = source.split("\n")[line - 1].strip(), function_of(ast.parse(source), line)
    of = f" of {function}" if function else ""
    if theirs:
        return f"line {line_of_student(line)}{of}"
    return f"the solution's {function or 'file'}, `{text}`"


def named(ranks):
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def in_words(outcome, source, line_of_student):
    """Sentences that say why it is not right."""
    if outcome.stuck:
        return [no_end(outcome, source, line_of_student)]
    groups = {}
    for rank, (error, lines) in outcome.errors.items():
        groups.setdefault((error, tuple(lines)), []).append(rank)
    sentences = []
    for (error, lines), ranks in groups.items():
        who = "" if len(ranks) == outcome.world else f"{named(ranks)}: "
        where = at(lines, source, line_of_student)
        sentences.append(f"{who}{where}{': ' * bool(where)}{error}")
    return sentences[:1] or outcome.said or ["it has ended before its end"]


def no_end(outcome, source, line_of_student):
    groups = {}
    for rank, (collective, lines) in outcome.stuck.items():
        where = at(lines, source, line_of_student) or "the comparison at the end"
        words = f"in {collective}, {where}" if collective else f"in {where}"
        groups.setdefault(words, []).append(rank)
    said = [f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} {words}"
            for words, ranks in groups.items()]
    if outcome.ended:
        said.append(f"{named(outcome.ended)} {'has' if len(outcome.ended) == 1 else 'have'} ended")
    return "no end: " + "; ".join(said)
