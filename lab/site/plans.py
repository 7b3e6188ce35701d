"""The plans of chapter 10, as the pages ask for them.

    /api/plan?model=70b&gpus=512&tp=8       one layout: its bytes and its seconds, by cause
    /api/best?model=70b&gpus=512            the ten best, of a search that may take so many SECONDS
"""

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import fields

import common
from common import Refused
from lab.chapters import chapter, rooms_with
from lab.planner import planning
from lab.run.refusals import one_line
from lab.site.parameters import known, one_of
from lab.site.search import plan_as_data

SECONDS = 10                    # of a search
SEARCHES = threading.Semaphore(2)       # at a time
LOOKS = 0.1                     # seconds after which a search looks whether it is still waited for
FOUND, MOST = {}, 256           # answers of searches, by their flags


def ten():
    return chapter("10")


def flags_of(asked):
    """The command line of chapter 10 that asks the same."""
    first, argv = ten(), []
    kinds = {field.name: field.type for kind in (first.Model, first.Layout, first.Cluster,
                                                 first.Software) for field in fields(kind)}
    kinds |= dict.fromkeys(("model", "cluster", "gpus", "batch", "software"), str)
    known(asked, *kinds)
    for name, value in asked.items():
        flag = planning.as_flag(name)
        if kinds[name] is bool:
            no = one_of(asked, name, None, ("true", "false")) == "false"
            argv.append(flag.replace("--", "--no-", 1) if no else flag)
        else:
            argv.append(f"{flag}={value}")
    return argv


def in_words_of_the_page(text):
    """Without what is for a terminal: "--micro-batch 2" is "micro batch 2", "in [1, 9)" is "from 1
    to 8"."""
    text = re.sub(r"in \[(\d+), (\d+)\)", lambda of: f"from {of[1]} to {int(of[2]) - 1}", text)
    text = re.sub(r"(: --published| \(python .*)$", "", text)
    return re.sub(r"--([a-z0-9-]+)", lambda flag: flag[1].replace("-", " "), text)


def question(asked):
    try:
        return planning.Question(ten(), planning.arguments(ten(), flags_of(asked)))
    except Refused as refused:
        raise Refused(in_words_of_the_page(refused.args[0])) from None


def plan(asked):
    """One layout. Where degrees are not given they are 1, and dp takes what is left of the GPUs."""
    of, first = question(asked), ten()
    layout = first.Layout(**of.fixed)
    degrees = {"dp": of.gpus // (layout.tp * layout.cp * layout.pp), "sp": layout.tp > 1}
    layout = first.Layout(**degrees | of.fixed)
    try:
        found = first.Plan(of.model, layout, of.cluster, of.software, of.gpus, of.batch)
        told = plan_as_data(of, found)
        told["explain"] = list(planning.explain(
            first, of.model, of.cluster, of.software, of.gpus, of.batch, found)
        ) if found.memory else []
    except (OverflowError, ZeroDivisionError):
        raise Refused("these numbers are too large to compute with") from None
    return told | {
        "parameters": of.model.parameters(), "capacity": of.cluster.memory,
        "room": first.ROOM * of.cluster.memory,
        "caveats": [in_words_of_the_page(caveat) for caveat in of.caveats()],
        "command": shlex.join(["python", "10_planner.py", *flags_of(asked)])}


# --------------------------------------------------------------------------------------- the search

def never():
    return False


def best(asked, is_gone=never):
    """The ten best layouts. What is given of a layout stays as it is. Where nothing fits: `why`,
    `changes` of which each would work, {parameter: text}, and `nearest`, the layout that is nearest
    to fitting. is_gone: says whether nobody waits for it any more."""
    question(asked)                                     # refused at once, or worth a process
    argv = tuple(sorted(flags_of(asked)))
    if argv not in FOUND:
        found = searched(argv, SECONDS, is_gone)
        found["why"] = found["why"] and in_words_of_the_page(found["why"])
        found["changes"] = [as_parameters(change) for change in found["changes"]]
        while len(FOUND) >= MOST:
            FOUND.pop(next(iter(FOUND)), None)          # the oldest
        FOUND[argv] = found
    return FOUND[argv]


def searched(argv, seconds, is_gone=never):
    """What the search prints. It is stopped if it takes longer, or if nobody waits for it."""
    command = [sys.executable, "-m", "lab.site.search", *argv]
    folder = common.__file__.removesuffix("common.py") or "."
    while not SEARCHES.acquire(timeout=LOOKS):
        refuse_if(is_gone(), "nobody waits for this search")
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              cwd=folder) as search:
            try:
                printed, said = waited_for(search, time.monotonic() + seconds, is_gone)
            finally:
                search.kill()                           # of one that has ended, nothing is left
    finally:
        SEARCHES.release()
    refuse_if(printed is None, f"the search took more than {seconds} s, and was stopped: fewer "
              "GPUs, or degrees that are given, would work")
    if search.returncode:
        why = (said.strip().splitlines() or ["the search failed"])[-1]
        raise Refused(in_words_of_the_page(one_line(why)))
    return json.loads(printed)


def waited_for(search, until, is_gone):
    """What it prints, and says of errors; (None, None): it takes too long."""
    while time.monotonic() < until:
        try:
            return search.communicate(timeout=min(LOOKS, max(0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            refuse_if(is_gone(), "nobody waits for this search")
    return None, None


def refuse_if(is_so, why):
    if is_so:
        raise Refused(why)


def as_parameters(change):
    """{parameter: text}, of the {field: value} that the planner would change."""
    return {name: value if isinstance(value, str) else json.dumps(value)
            for name, value in change.items()}


# ----------------------------------------------------------------------------- what a page begins

def asked_first(begins):
    """Yield what the planner asks when it begins so: its search, and the plan that this finds."""
    tokens, model = rooms_with("figure")["10"].TOKENS, ten().MODELS[begins["model"]]
    asked = {name: str(value) for name, value in begins.items() if name != "optimizer"}
    asked["batch"] = str(tokens // model.seq)
    yield "best", asked
    yield "plan", asked | layout_of(best(asked)["plans"][0])


def layout_of(found):
    """The parameters of a plan's layout. dp is what is left of the GPUs."""
    return {name: str(value).lower() for name, value in found["layout"].items() if name != "dp"}
