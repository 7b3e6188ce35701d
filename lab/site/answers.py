"""What the tools ask: each answer is plain data, and comes from the functions of the chapters. No
formula is written a second time, here or in a script.

    plan?model=70b&gpus=512&tp=8        one layout: its bytes and its seconds, by cause
    best?model=70b&gpus=512             the ten best layouts
    schedule?schedule=1f1b&ranks=4...   when each action of a pipeline starts and ends
    roofline?model=70b&chips=512...     from which batch on compute takes longer than messages
    ring?ranks=4&documents=32...        who meets whose keys at which hop, ring and zig-zag
    collective?collective=reduce...     what each rank has after each round of a collective
    cuts?tp=2&pp=2...                   which part of each matrix each rank of a mesh holds
    memory?billions=7&ranks=8...        what a rank keeps in each stage of ZeRO
"""

from common import Refused
from lab.chapters import chapter, rooms_with
from lab.planner import rooflines
from lab.run.refusals import one_line
from lab.site import collectives, cuts, memory, pipelines, plans, rings, roofline

QUESTIONS = {"plan": plans.plan, "best": plans.best, "schedule": pipelines.schedule,
             "roofline": roofline.roofline, "ring": rings.ring, "cuts": cuts.cuts,
             "memory": memory.memory, "collective": collectives.collective}
IN_BROWSER = "plan", "best", "schedule", "roofline"     # these need no torch
BYTES = "weight_bytes", "gradient_bytes", "master_bytes", "moment_bytes", "sent_bytes"


def answer(name, asked):
    """The answer to a question, or {"error": a line}."""
    try:
        return QUESTIONS[name](**asked)
    except Refused as refused:
        return {"error": one_line(refused.args[0])}


def examples():
    """Yield (name, {parameter: value}) of each question whose answer is stored: what tools ask when
    they are opened, and a choice of what they can be asked next."""
    for module in plans, pipelines, roofline, rings, cuts, memory, collectives:
        yield from module.examples()


def first_questions(tool, begins):
    """What a tool asks when it begins with these values, as `examples`."""
    if tool.name == "planner":
        return plans.first_questions(begins)
    return [(tool.question, {name: begins[name] for name in begins if name not in tool.shown})]


def choices():
    """What the controls of the tools offer."""
    ten, figure = chapter("10"), rooms_with("figure")["10"]
    return {
        "models": {name: {"seq": model.seq, "layers": model.layers, "experts": model.experts,
                          "shared": model.shared, "node_limit": model.node_limit}
                   for name, model in ten.MODELS.items()},
        "clusters": list(ten.CLUSTERS), "software": list(ten.SOFTWARE),
        "optimizer": ten.CHOICES["optimizer"], "recompute": ten.CHOICES["recompute"],
        "layout_schedules": ten.CHOICES["schedule"],
        "two_hops": {name: software.two_hops for name, software in ten.SOFTWARE.items()},
        "bytes": {name: {field: getattr(software, field) for field in BYTES}
                  for name, software in ten.SOFTWARE.items()},
        "map": {"models": figure.MODELS, "gpus": figure.GPUS, "tokens": figure.TOKENS},
        "dense_models": roofline.dense_models(), "strategies": rooflines.STRATEGIES,
        "torus": rooflines.TORUS, "collectives": list(chapter("00").BY_HAND),
        "schedules": pipelines.names(), "rings": rings.VALUES, "cuts": cuts.VALUES,
        "memory": memory.VALUES}
