"""The tools: each is on a page of its own, or in a lesson below the paragraph that it is about.

A tool NAME is files/tools/NAME.html and NAME.js. It is mounted in an element whose data say what it
begins with: `<div data-tool="rings" data-ranks="4">`. PLAYS of a chapter's about.py says where.
"""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

FILES = Path(__file__).parent / "files" / "tools"


class Tool(NamedTuple):
    name: str
    question: str           # of answers.QUESTIONS, which it asks when it is opened
    begins: dict            # {name: value} of what it shows
    shown: tuple = ()       # names of these that are not asked for

    @property
    def title(self):
        """In the contents."""
        return self.name.capitalize()


TOOLS = {tool.name: tool for tool in (
    Tool("planner", "best", {"model": "70b", "cluster": "h100", "software": "megatron-2024",
                             "optimizer": "adamw", "gpus": 512}),
    Tool("roofline", "roofline", {"cluster": "tpu-v5p", "model": "70b", "strategy": "both",
                                  "chips": 4096, "zero_axes": 2, "tp_axes": 1, "tokens": 256},
         shown=("tokens",)),
    Tool("schedules", "schedule", {"schedule": "1f1b", "ranks": 4, "micro_batches": 8,
                                   "chunks": 2, "breadth_first": "false", "F": 1, "B": 1, "W": 1,
                                   "controls": ""}, shown=("controls",)),
    Tool("rings", "ring", {"ranks": 4, "documents": 0, "cut": "sequence", "window": 0, "hop": 0},
         shown=("hop",)),
    Tool("collectives", "collective", {"collective": "all_reduce_ring", "ranks": 4, "round": 0},
         shown=("round",)),
    Tool("cuts", "cuts", {"chapter": "09_5d", "pp": 2, "dp": 2, "cp": 1, "tp": 2, "ep": 1,
                          "experts": 0, "kv_heads": 4, "layers": 4, "rank": 0, "controls": ""},
         shown=("rank", "controls")),
    Tool("memory", "memory", {"billions": 7, "ranks": 8, "precision": "fp32", "stage": "zero3",
                              "gpu": "h100"}, shown=("stage", "gpu")))}


def written(question, asked):
    """A question in one line, as files/tools/tools.js writes it."""
    pairs = (f"{name}={quote(str(asked[name]), safe='')}" for name in sorted(asked))
    return f"{question}?{'&'.join(pairs)}"
