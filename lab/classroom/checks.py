"""Checks of an exercise, in processes of their own: student code can't cost more than its check.

An interpreter that has imported torch forks a process per rank, so a run takes one second and not
five. Values are compared here, where no student code runs: those of a `Same`, and the losses,
gradient norms and counts of a `Run`, with those of the solution. In its own process, a run also
compares itself with one GPU and with the chapter's formulas, as it does for whoever starts it.

A run that would never end is ended after a few seconds. Either no rank computes any more, which is
a deadlock, or the ranks have computed for longer than a limit (lab/classroom/overseer.py).
"""

import base64
import contextlib
import functools
import importlib.util
import json
import json.decoder
import os
import re
import shlex
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

from lab.classroom import inside, overseer, values
from lab.classroom.overseer import CLOCK, LIMIT
from lab.run.ranks import CONTEXT, start_interpreter

# Doesn't import torch: the other interpreter does that while this one reads on.

TEXT = json.decoder.__file__    # short, and the same whatever the course's files are
LOST = "by peer", "Broken pipe", "remote process"       # gloo's words when another rank has ended
WAITING = ("all_", "reduce", "gather", "scatter", "broadcast", "barrier", "monitored_barrier",
           "send", "recv", "isend", "irecv", "batch_isend_irecv", "new_")     # names begin so
PATIENCE = 120                  # seconds for the overseer itself
LONGEST = 2000                  # letters of a problem that a run names


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
    start_interpreter("lab.classroom.grading")
    if not was_set:
        del os.environ["TRITON_INTERPRET"]


def outcome(chapter, source, solution, check, folder=None, limit=LIMIT):
    """The Outcome of a Run or a Same (lab/classroom/exercise.py) of a chapter with this source,
    compared with the solution. folder: the student's, from which the source may import. (A bundle
    has no solution to run, so there a run's own verdict has to do.)"""
    more_paths = [str(Path(folder).resolve())] if folder and source != solution else []
    played = play_check(chapter, source, check, limit, more_paths)
    if not played.right:
        return played
    if is_run(check):
        if stored() is not None or source == solution:
            return played
        right = of_solution(chapter, solution, check)
        problem = compare_records(played.record, right.record)
    else:
        problem = compare_values(chapter, solution, check, played)
    return played._replace(right=False, problems=(problem,)) if problem else played


def is_run(check):
    return hasattr(check, "flags")


def play_check(chapter, source, check, limit, more_paths=()):
    """The Outcome of a check of a chapter with this source, before it is compared."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        path, every = Path(scratch, f"{Path(chapter).name}.py"), range(check.ranks)
        path.write_text(source, encoding="utf-8")
        if is_run(check):
            argv = argv_of(check, path.stem)
            calls = [(inside.be_a_rank, (path, rank, check.ranks, argv)) for rank in every]
        else:
            calls = [(inside.evaluate, (path, check, rank)) for rank in every]
        return play(scratch, path, calls, limit, more_paths)


def argv_of(check, chapter):
    """The flags of a Run."""
    from lab import chapters
    from lab.classroom.exercise import SMALL

    model = f"--data={TEXT} {SMALL}" if chapters.trains(chapter) else ""
    return shlex.split(f"--device=cpu {model} {check.flags}")


# ------------------------------------------------------------------------ what the solution gives

STORED = Path(__file__).with_name("answers.json")       # of a bundle, which has no solutions
OUTCOMES = {}                                           # of the solutions


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
    return of_solution(chapter, solution, check).answers


def of_solution(chapter, solution, check):
    """The Outcome of the solution. Each is played once, for all students."""
    key = chapter, solution, repr(check)
    if key not in OUTCOMES:
        played = play_check(chapter, solution, check, 4 * LIMIT)
        if not played.right:
            raise RuntimeError(f"the solution of {chapter} fails: {check}: {played}")
        OUTCOMES[key] = played
    return OUTCOMES[key]


def compare_values(chapter, solution, check, played):
    """How the values of a Same differ from the solution's, in words; "": in nothing."""
    from lab.classroom.compare import compare_ranks

    given, right = ([values.unpack(answer)["value"] for answer in packed]
                    for packed in (played.answers, answers(chapter, solution, check)))
    problem = compare_ranks(given, right)
    return f"{check.words}: {problem}" if problem else ""


def compare_records(record, right):
    """How a run that calls itself right differs from the solution's, in words; "": in nothing.
    Losses and gradient norms are to be those of one GPU beside the solution, and all counts that a
    formula gives are to be the solution's."""
    for what, kind in (("loss", "loss"), ("grad_norm", "gradient norm")):
        given, expected = record.get(what, []), right.get(f"reference_{what}", [])
        within = right.get("tolerance", {}).get(kind)
        if len(given) < len(expected):
            return f"only {len(given)} of {len(expected)} steps were taken"
        largest = max((abs(x) for x in expected if x is not None), default=0)
        for step, (one, other) in enumerate(zip(given, expected), start=1):
            is_compared = None not in (one, other, within)
            if is_compared and abs(one - other) > within * largest:
                return f"the {kind} of step {step} is {one:.8g}, and should be {other:.8g}"
    counts = {check["name"]: check["measured"] for check in record["checks"]}
    for check in right["checks"]:
        if check["ok"] and check["kind"] != "time":
            measured, expected = counts.get(check["name"]), check["measured"]
            if measured != expected:
                return f"{check['name']}: measured {measured}, and should be {expected}"
    return ""


# ---------------------------------------------------------------------------------- a check, played

def play(folder, path, calls, limit, more_paths=()):
    """The Outcome of these calls, (function, args): each calls function(hand_in, *args) in a
    process of its own. path: the file that they run. folder: where they may write."""
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
        return Outcome(False, (f"the process that oversees it {why}",), {}, {}, {}, len(calls))
    finally:
        ours.close()
        with contextlib.suppress(ProcessLookupError, TypeError):    # it did not start
            os.killpg(process.pid, signal.SIGKILL)


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
    problems = problems_of(handed_in[0])
    all_ended = all(answer.get("status") == 0 for answer in handed_in.values())
    return Outcome(all_ended and not stuck and not problems, tuple(problems), errors, stuck, ended,
                   len(processes), handed_in[0].get("record"),
                   tuple(process.answer for process in processes))


def answer_of(packed):
    """A process's answer, {"status": ..., ...}; {}: there is none, or it can't be read."""
    try:
        answer = values.unpack(packed)
    except values.Unreadable:
        return {}
    if "record" in answer:
        answer["record"] = json.loads(answer["record"], parse_constant=lambda name: None)
    return answer


def problems_of(answer):
    """A run's own verdict, in sentences: none if it calls itself right, or has not come so far."""
    if "record" not in answer:
        is_lost = answer and "value" not in answer and "error" not in answer
        return ["the run has left no JSON"] if is_lost else []
    record = answer["record"]
    steps = record["config"].get("steps", 0)            # none, where no model is trained
    taken = len(record.get("loss", ()))
    problems = record["diagnosis"] or record["problems"][:2]
    if not problems and taken < steps:
        return [f"only {taken} of {steps} steps were taken"]
    return [words[:LONGEST] for words in problems]


def place(stack, path):
    """From what faulthandler has written: the collective, or "", and the lines of the chapter."""
    text = stack.decode(errors="replace")
    frames = re.findall(r'^  File "(.*)", line (\d{1,9}) in (.*)$', text, re.MULTILINE)
    collectives = [name for file, _, name in frames if file.endswith("/distributed_c10d.py")
                   and name.startswith(WAITING)]
    lines = [int(line) for file, line, _ in frames if file == str(path)]
    return collectives[-1] if collectives else "", lines
