"""The planner's search, as a process that can be stopped: `plans.best` starts it.

    python -m lab.site.search --model 70b --gpus 512 --batch 1024

The flags are those of chapter 10. Prints JSON: how many layouts fit, or may fit, and the ten best;
if there is none, why, what would work, and the layout that is nearest to it. A flag that is
refused: status 2, and a line. No torch.
"""

import functools
import gc
import json
import sys
from operator import attrgetter

from lab.chapters import chapter
from lab.planner import planning
from lab.run.refusals import refusal

SHOWN = 10
READS = {               # {function of the chapter: what it reads of a layout}
    "parameters_of_gpu": ("tp", "pp", "ep", "stage", "schedule"),
    "layer_of_gpu": ("tp", "ep"), "kept_by_layer": ("tp", "cp", "sp", "micro_batch", "recompute"),
    "layer_seconds": ("tp", "cp", "ep", "sp", "micro_batch")}


def remembering(ten):
    """The chapter, whose functions answer from memory for layouts that differ in nothing that they
    read: of 40,000 layouts that a search tries, a few hundred differ so."""
    for name, read in READS.items():
        setattr(ten, name, remembered(getattr(ten, name), attrgetter(*read)))
    return ten


def remembered(function, read):
    answers = {}

    @functools.wraps(function)
    def answer(model, layout, machine):                 # a process has one machine and software
        asked = model, read(layout)
        try:
            return answers[asked]
        except KeyError:
            return answers.setdefault(asked, function(model, layout, machine))

    return answer


def plan_as_data(asked, plan):
    """A plan, as the page shows it; without bytes and seconds where the layout does not divide."""
    told = {"layout": vars(plan.layout), "words": planning.in_words(asked.ten, plan.layout),
            "why": plan.why, "memory": plan.memory}
    if plan.memory:
        speed = planning.as_json(asked, [plan])
        told |= {key: speed[key] for key in ("time", "tokens_per_second_per_gpu", "tflops", "mfu")}
        told |= {"bytes": plan.bytes, "seconds": plan.total}
    return told


def found(ten, argv):
    """What it prints, as data. Raises Refused for a flag."""
    _, asked = planning.question(ten, argv)
    fit, others = asked.find(asked.gpus, asked.fixed)
    told = {"count": len(fit), "fits": bool(fit) and not fit[0].why, "why": None, "nearest": None,
            "changes": [], "plans": [plan_as_data(asked, plan) for plan in fit[:SHOWN]]}
    if not told["fits"]:
        told["why"], told["changes"] = planning.advice(asked, fit or others)
        told["nearest"] = vars(planning.nearest_of(fit or others).layout)
    return told


def main(argv):
    gc.disable()                                        # there are no cycles, and it ends soon
    try:
        json.dump(found(remembering(chapter("10")), argv), sys.stdout)
    except refusal() as refused:
        print(refused.args[0], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
