"""From which batch on compute takes longer than messages: the rooflines of the planner."""

import itertools
import math

from lab.chapters import chapter
from lab.planner import rooflines


def dense_models():
    return [name for name, model in chapter("10").MODELS.items() if model.experts == 1]


def roofline(cluster, model, strategy, chips, zero_axes, tp_axes):
    """For each number of tokens of a chip: the split of the chips; and the seconds of a layer's
    forward that compute, ZeRO-3's messages and tp's take by the data sheet (`roof`), and compute
    and messages as planned. least, planned_least: from how many tokens on compute takes longer with
    the best split; None: from none on, or there is no such plan. zero_axes, tp_axes: how many axes
    of the cluster's torus each has; of a switch, 1."""
    ten = chapter("10")
    roof = rooflines.Roof(ten, ten.MODELS[model], ten.CLUSTERS[cluster], (zero_axes, tp_axes))
    lines, (least, split) = roof.lines(strategy, chips), roof.best(strategy, chips)
    chip = "chip" if cluster in rooflines.TORUS else "GPU"
    return {
        "chip": chip, "summary": rooflines.in_words(roof, strategy, chips, chip), "split": split,
        "least": finite(least), "planned_least": finite(roof.planned_from(*split)),
        "features": roof.layer.weights / roof.layer.sent, "ffn": roof.model.ffn,
        "tokens": lines["tokens"], "splits": lines["splits"],
        "roof": [[four_digits(seconds[part]) for part in ("compute", "zero-3", "tp")]
                 for seconds in lines["roof"]],
        "planned": [planned_seconds(seconds) for seconds in lines["planned"]]}


def planned_seconds(seconds):
    """[of compute, of messages], or None where there is no such plan."""
    if seconds is None:
        return None
    return [four_digits(seconds["compute"]), four_digits(rooflines.messages(seconds))]


def finite(tokens):
    return None if tokens in (None, math.inf) else four_digits(tokens)


def four_digits(value):
    return float(f"{value:.4g}")


def examples():
    clusters = chapter("10").CLUSTERS
    for cluster, model, strategy, chips in itertools.product(
            clusters, ("8b", "70b"), rooflines.STRATEGIES, (8, 64, 512, 4096)):
        zero_axes = 2 if cluster in rooflines.TORUS else 1
        yield "roofline", {"cluster": cluster, "model": model, "strategy": strategy,
                           "chips": chips, "zero_axes": zero_axes, "tp_axes": 1}
