"""The planner's search, as a process that can be stopped: `answers.best` starts it.

    python -m lab.page.search --model 70b --gpus 512 --batch 1024

The flags are those of chapter 10. Prints JSON: how many layouts fit, or may fit, and the ten best;
if there is none, why, and what would work. A flag that is refused: status 2, and a line. No torch.
"""

import json
import sys

from lab.chapters import chapter
from lab.cli.refusals import refusal
from lab.planner import planning

SHOWN = 10


def plan_as_data(asked, plan):
    """A plan, as the page shows it; without bytes and seconds where the layout does not divide."""
    told = {"layout": vars(plan.layout), "words": planning.in_words(asked.ten, plan.layout),
            "why": plan.why, "memory": plan.memory}
    if plan.memory:
        speed = planning.as_json(asked, [plan])
        told |= {key: speed[key] for key in ("time", "tokens_per_second_per_gpu", "tflops", "mfu")}
        told |= {"bytes": plan.bytes, "seconds": plan.total}
    return told


def main(argv):
    ten = chapter("10")
    try:
        _, asked = planning.question(ten, argv)
    except refusal() as refused:
        print(refused.args[0], file=sys.stderr)
        return 2
    fit, others = asked.find(asked.gpus, asked.fixed)
    fits = bool(fit) and not fit[0].why
    json.dump({"count": len(fit), "fits": fits,
               "why": None if fits else planning.advice(asked, fit or others, argv),
               "plans": [plan_as_data(asked, plan) for plan in fit[:SHOWN]]}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
