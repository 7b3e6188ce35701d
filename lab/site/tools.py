"""The tools: what computes in a browser, on a page of its own, or in a lesson beside the paragraph
that it is about.

A tool NAME is files/tools/NAME.html and NAME.js. It is mounted in an element that says what it
begins with: `<div data-tool="rings" data-ranks="4">`. A lesson brings the first answer along.
"""

import functools
import json
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from lab import chapters

FILES = Path(__file__).parent / "files" / "tools"


class Tool(NamedTuple):
    title: str              # in the contents
    asks: str               # of answers.QUESTIONS, when it is opened; "": a search, and its plan
    begins: dict            # {name: value} of what it shows
    shown: tuple = ()       # names of these that are not asked for


TOOLS = {
    "planner": Tool("Planner", "", {"model": "70b", "cluster": "h100",
                                    "software": "megatron-2024", "optimizer": "adamw",
                                    "gpus": 512}),
    "roofline": Tool("Roofline", "roofline", {
        "cluster": "tpu-v5p", "model": "70b", "strategy": "both", "chips": 4096, "zero_axes": 2,
        "tp_axes": 1, "tokens": 256}, shown=("tokens",)),
    "schedules": Tool("Schedules", "schedule", {
        "schedule": "1f1b", "ranks": 4, "micro_batches": 8, "chunks": 2, "breadth_first": "false",
        "F": 1, "B": 1, "W": 1, "controls": ""}, shown=("controls",)),
    "rings": Tool("Rings", "ring", {"ranks": 4, "documents": 0, "cut": "sequence", "window": 0,
                                    "hop": 0}, shown=("hop",)),
    "collectives": Tool("Collectives", "collective", {"collective": "all_reduce_ring", "ranks": 4,
                                                      "round": 0}, shown=("round",)),
    "cuts": Tool("Cuts", "cuts", {
        "chapter": "09_5d", "pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1, "experts": 0,
        "kv_heads": 4, "layers": 4, "rank": 0, "controls": ""}, shown=("rank", "controls")),
    "memory": Tool("Memory", "memory", {"billions": 7, "ranks": 8, "precision": "fp32",
                                        "stage": "zero3", "gpu": "h100"}, shown=("stage", "gpu")),
}


def asked_first(name, begins):
    """The question that a tool asks when it begins so: {parameter: text}."""
    return {key: str(value) for key, value in begins.items() if key not in TOOLS[name].shown}


def written(question, asked):
    """A question in one line, as files/tools/tools.js writes it."""
    return f"{question}?" + "&".join(f"{key}={quote(asked[key], safe='')}" for key in sorted(asked))


@functools.lru_cache(maxsize=64)
def answered(question, asked):
    """Its answer as JSON. asked: pairs."""
    from lab.site import answers

    return json.dumps(answers.QUESTIONS[question](dict(asked)), separators=(",", ":"))


def asks_first(name, begins):
    """Yield each (question, parameters) that a tool asks when it begins so."""
    if TOOLS[name].asks:
        yield TOOLS[name].asks, asked_first(name, begins)
    else:
        from lab.site import plans

        yield from plans.asked_first(begins)


def mounted(name, begins):
    """What a template shows of a tool: its Tool, data-* attributes, and, in a lesson, what it asks
    first, with the answers."""
    begins = TOOLS[name].begins | begins
    return {"tool": TOOLS[name], "name": name, "begins": begins, "answers": lambda: [
        (written(question, asked), answered(question, tuple(asked.items())))
        for question, asked in asks_first(name, begins)]}


def plays(name):
    """{place: (tool, what it begins with)} of a chapter's lesson, as its about.py has it."""
    return getattr(chapters.about(name), "PLAYS", {})
