"""What the pages that compute ask for. Each answer is plain data, and comes from the functions of
the chapters themselves: there is no second copy of a formula, here or in a script.

    /api/plan?model=70b&gpus=512&tp=8       one layout: its bytes and its seconds, by cause
    /api/best?model=70b&gpus=512            the ten best
    /api/schedule?schedule=1f1b&ranks=4     when each action of a pipeline starts and ends
    /api/ring?ranks=4&documents=32          who meets whose keys at which hop, ring and zig-zag
    /api/collective?collective=reduce       what each rank has after each round of a collective
    /api/cuts?tp=2&pp=2                     which part of each matrix each rank of a mesh holds
    /api/memory?billions=7&ranks=8          what a rank keeps in each stage of ZeRO
    /api/roofline?model=70b&chips=512       from which batch on compute takes longer than messages

Raises Refused with one line for whatever cannot be answered.
"""

import itertools
import math
from dataclasses import fields

from common import Refused
from lab.chapters import chapter, rooms_with
from lab.planner import planning, rooflines
from lab.site import collectives, cuts, memory, pipelines, rings
from lab.site.parameters import known, one_of, whole
from lab.site.plans import best, layout_of, plan

BYTES = "weight_bytes", "gradient_bytes", "master_bytes", "moment_bytes", "sent_bytes"
HIGHEST = 2**31 - 1             # of the planner's whole numbers without a limit of their own


def ten():
    return chapter("10")


def choices():
    """What may be asked, and from what the pages begin."""
    first, figure = ten(), rooms_with("figure")["10"]
    return {
        "models": {name: {"seq": model.seq, "layers": model.layers, "experts": model.experts,
                          "shared": model.shared, "node_limit": model.node_limit,
                          "parameters": model.parameters()}
                   for name, model in first.MODELS.items()},
        "clusters": {name: {"memory": cluster.memory, "per_node": cluster.per_node}
                     for name, cluster in first.CLUSTERS.items()},
        "software": list(first.SOFTWARE), "optimizer": first.CHOICES["optimizer"],
        "two_hops": {name: software.two_hops for name, software in first.SOFTWARE.items()},
        "bytes": {name: {field: getattr(software, field) for field in BYTES}
                  for name, software in first.SOFTWARE.items()},
        "most": highest(), "recompute": first.CHOICES["recompute"],
        "layout_schedules": first.CHOICES["schedule"], "causes": planning.CAUSES,
        "map": {"models": figure.MODELS, "gpus": figure.GPUS, "tokens": figure.TOKENS},
        "collectives": list(chapter("00").BY_HAND),
        "schedules": list(pipelines.by_hand()), "torus": rooflines.TORUS,
        "dense_models": dense_models(), "strategies": rooflines.STRATEGIES,
    }


def highest():
    """{whole number that the planner is asked with: the highest that it takes}."""
    first = ten()
    names = ["gpus", "batch", *(field.name for kind in (first.Model, first.Layout, first.Software)
                                for field in fields(kind) if field.type is int)]
    return {name: max(first.CHOICES[name]) if name in first.CHOICES
            else planning.LIMITS.get(name, (HIGHEST + 1, 1))[0] - 1 for name in names}


# -------------------------------------------------------------------------------- 10: the rooflines

def dense_models():
    return [name for name, model in ten().MODELS.items() if model.experts == 1]


def roofline(asked):
    """Over tokens of a chip: the split; of a layer's forward, seconds of compute, of ZeRO-3's
    messages and of tp's on the roof of data sheets; those of compute and messages as planned.
    least, planned_least: tokens from which on compute takes longer, of the best split; null: none,
    or no such plan."""
    known(asked, "cluster", "model", "strategy", "chips", "zero_axes", "tp_axes")
    cluster = one_of(asked, "cluster", "tpu-v5p", ten().CLUSTERS)
    model = one_of(asked, "model", "70b", dense_models())
    strategy = one_of(asked, "strategy", "both", rooflines.STRATEGIES)
    chips, chip = whole(asked, "chips", 4096, 2, 2**16), unit_of(cluster)
    axes = axes_of(asked, cluster, strategy)
    roof = rooflines.Roof(ten(), ten().MODELS[model], ten().CLUSTERS[cluster], axes)
    lines, (least, split) = roof.lines(strategy, chips), roof.best(strategy, chips)
    return {
        "chip": chip, "says": rooflines.in_words(roof, strategy, chips, chip), "split": split,
        "least": or_none(least), "planned_least": or_none(roof.planned_from(*split)),
        "features": roof.layer.weights / roof.layer.sent, "ffn": roof.model.ffn,
        "tokens": lines["tokens"], "splits": lines["splits"],
        "roof": [[four_digits(at[what]) for what in ("compute", "zero-3", "tp")]
                 for at in lines["roof"]],
        "planned": [at and [four_digits(at["compute"]), four_digits(rooflines.messages(at))]
                    for at in lines["planned"]]}


def unit_of(cluster):
    return "chip" if cluster in rooflines.TORUS else "GPU"


def or_none(tokens):
    return None if tokens in (None, math.inf) else four_digits(tokens)


def four_digits(value):
    return float(f"{value:.4g}")


def axes_of(asked, cluster, strategy):
    """How many axes of the cluster's mesh ZeRO-3 and tp have. A switch is one, for both."""
    most = rooflines.TORUS.get(cluster, 0)
    zero, tp = (whole(asked, name, 1, 1, max(rooflines.TORUS.values()))
                for name in ("zero_axes", "tp_axes"))
    if not most and max(zero, tp) > 1:
        name = "zero_axes" if zero > 1 else "tp_axes"
        raise Refused(f"{name} = {max(zero, tp)}: {cluster} has a switch, and no axes; {name}=1 "
                      "would work")
    if strategy == "both" and most and zero + tp > most:
        raise Refused(f"zero_axes = {zero} and tp_axes = {tp} are more than the {most} axes of "
                      f"{cluster}; zero_axes=1 would work" if tp < most else
                      f"tp_axes = {tp} are all axes of {cluster}; tp_axes=1 would work")
    return zero, tp


def warm_up():
    """Import what answers need, before the first of them is waited for."""
    for asked in (rings.ring, cuts.cuts, pipelines.schedule, plan):
        asked({})


QUESTIONS = {"plan": plan, "best": best, "schedule": pipelines.schedule, "ring": rings.ring,
             "cuts": cuts.cuts, "roofline": roofline, "memory": memory.memory,
             "collective": collectives.collective}


def examples():
    """Yield (question, parameters) of what the pages ask when they are opened, and of a choice of
    what they can be asked: so much is answered where nobody computes. As the scripts ask it."""
    machine = {"cluster": "h100", "software": "megatron-2024"}
    figure = rooms_with("figure")["10"]
    for model, gpus in itertools.product(figure.MODELS, figure.GPUS):
        asked = machine | {"model": model, "gpus": str(gpus),
                           "batch": str(figure.TOKENS // ten().MODELS[model].seq)}
        yield "best", asked
        told = best(asked)
        for found in told["plans"] or [{"layout": told["nearest"]}]:
            yield "plan", asked | layout_of(found)
    yield from examples_but_plans()


def examples_but_plans():
    yield from collectives.examples()
    yield from rings.examples()
    yield from pipelines.examples()
    yield from cuts.examples()
    for cluster, model, strategy, chips in itertools.product(
            ten().CLUSTERS, ("8b", "70b"), rooflines.STRATEGIES, (8, 64, 512, 4096)):
        torus = cluster in rooflines.TORUS
        yield "roofline", {
            "cluster": cluster, "model": model, "strategy": strategy, "chips": str(chips),
            "zero_axes": "2" if torus else "1", "tp_axes": "1"}
    yield from memory.examples()
