"""The plans of chapter 10: one layout, or the ten best."""

import functools
import json
import re
import shlex

from common import Refused
from lab.chapters import chapter, rooms_with
from lab.planner import planning

SHOWN = 10                      # of the plans that a search finds


def flags_of(asked):
    """The command line of chapter 10 that asks the same."""
    flags = []
    for name, value in sorted(asked.items()):
        if value in ("true", "false"):
            flags.append(planning.as_flag(name, value == "true"))
        else:
            flags.append(f"{planning.as_flag(name)}={value}")
    return flags


def without_dashes(text):
    """A text of a terminal for the page: "--micro-batch 2" is "micro-batch 2"."""
    return re.sub(r"--(?=[a-z])", "", text)


def question_of(flags):
    """The planner's Question."""
    try:
        _, question = planning.question(chapter("10"), flags)
        return question
    except Refused as refused:
        raise Refused(without_dashes(refused.args[0])) from None


def plan_as_data(question, plan):
    """A plan, as the page shows it; without bytes and seconds if the layout doesn't divide."""
    data = {"layout": vars(plan.layout), "words": planning.in_words(question.ten, plan.layout),
            "why": plan.why, "memory": plan.memory}
    if plan.memory:
        speed = planning.as_json(question, [plan])
        for name in "time", "tokens_per_second_per_gpu", "tflops", "mfu":
            data[name] = speed[name]
        data |= {"bytes": plan.bytes, "seconds": plan.total}
    return data


def plan(**asked):
    """One layout. Degrees that are not given are 1, and dp is what is left of the GPUs."""
    ten, question = chapter("10"), question_of(flags_of(asked))
    layout = ten.Layout(**question.fixed)
    others = {"dp": question.gpus // (layout.tp * layout.cp * layout.pp), "sp": layout.tp > 1}
    layout = ten.Layout(**others | question.fixed)
    try:
        found = ten.Plan(question.model, layout, question.cluster, question.software,
                         question.gpus, question.batch)
        data = plan_as_data(question, found)
        data["explain"] = [*planning.explain(question, found)] if found.memory else []
    except (OverflowError, ZeroDivisionError):
        raise Refused("these numbers are too large to compute with") from None
    cluster = question.cluster
    return data | {
        "capacity": cluster.memory, "room": ten.ROOM * cluster.memory,
        "caveats": [without_dashes(caveat) for caveat in question.caveats()],
        "command": shlex.join(["python", "10_planner.py", *flags_of(asked)])}


def best(**asked):
    """The ten best layouts; what is given of a layout stays as it is. Where nothing fits: `why`,
    `changes` of which each would work, {parameter: text}, and `nearest`, the layout that is nearest
    to fitting."""
    return search(tuple(flags_of(asked)))


@functools.lru_cache(maxsize=256)
def search(flags):
    question = question_of(list(flags))
    fit, others = question.find(question.gpus, question.fixed)
    data = {"count": len(fit), "fits": bool(fit) and not fit[0].why, "why": None, "nearest": None,
            "changes": [], "plans": [plan_as_data(question, plan) for plan in fit[:SHOWN]]}
    if not data["fits"]:
        why, changes = planning.advice(question, fit or others)
        data["why"] = without_dashes(why)
        data["changes"] = [as_parameters(change) for change in changes]
        data["nearest"] = vars(planning.nearest_of(fit or others).layout)
    return data


def as_parameters(change):
    """{parameter: text}, of the {field: value} that the planner would change."""
    return {name: value if isinstance(value, str) else json.dumps(value)
            for name, value in change.items()}


# -------------------------------------------------------------------------------- what is stored

def batch_of(model):
    """Sequences of the step that the tool begins with."""
    return rooms_with("figure")["10"].TOKENS // chapter("10").MODELS[model].seq


def layout_of(layout):
    """The parameters of a plan's layout. dp is what is left of the GPUs."""
    texts = {True: "true", False: "false"}
    return {name: texts[value] if isinstance(value, bool) else value
            for name, value in layout.items() if name != "dp"}


def first_questions(begins):
    """What the tool asks when it begins so: its search, and the plan that this finds."""
    asked = {name: value for name, value in begins.items() if name != "optimizer"}
    asked["batch"] = batch_of(begins["model"])
    return [("best", asked), ("plan", asked | layout_of(best(**asked)["plans"][0]["layout"]))]


def examples():
    """The searches of the map, and the plans that they find."""
    figure = rooms_with("figure")["10"]
    for model in figure.MODELS:
        for gpus in figure.GPUS:
            asked = {"cluster": "h100", "software": "megatron-2024", "model": model, "gpus": gpus,
                     "batch": batch_of(model)}
            yield "best", asked
            found = best(**asked)
            for layout in [plan["layout"] for plan in found["plans"]] or [found["nearest"]]:
                yield "plan", asked | layout_of(layout)
