"""What the pages that compute ask for. Each answer is plain data, and comes from the functions of
the chapters themselves: there is no second copy of a formula, here or in a script.

    /api/plan?model=70b&gpus=512&tp=8       one layout: its bytes and its seconds, by cause
    /api/best?model=70b&gpus=512            the ten best, of a search that may take so many SECONDS
    /api/schedule?schedule=1f1b&ranks=4     when each action of a pipeline starts and ends
    /api/ring?ranks=4&documents=32          who meets whose keys at which hop, ring and zig-zag
    /api/cuts?tp=2&pp=2                     which part of each matrix each rank of a mesh holds
    /api/memory?billions=7&ranks=8          what a rank keeps in each stage of ZeRO
    /api/roofline?model=70b&chips=512       from which batch on compute takes longer than messages

Raises Refused with one line for whatever cannot be answered.
"""

import functools
import itertools
import json
import math
import shlex
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import common
from common import Refused
from lab import schedules
from lab.bench import contexts, meters
from lab.chapters import chapter, rooms_with
from lab.cli import strict
from lab.cli.refusals import one_line
from lab.page import memory
from lab.page.parameters import known, one_of, real, whole
from lab.page.search import plan_as_data
from lab.planner import planning, rooflines

SECONDS = 10                    # of a search
SEARCHES = threading.Semaphore(2)       # at a time
RANKS = 64                      # of a mesh, and of a pipeline
ACTIONS = 6000                  # of a schedule
TOKENS = 256                    # of a sequence around a ring, or as many as its ranks share
FEWEST = 8                      # of a document in the mean, and of a window
CUTS = "sequence", "document"
BYTES = "weight_bytes", "gradient_bytes", "master_bytes", "moment_bytes", "sent_bytes"
PACKED = 41                     # the step whose documents are as many as their mean lets expect


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
        "recompute": first.CHOICES["recompute"],
        "layout_schedules": first.CHOICES["schedule"], "causes": planning.CAUSES,
        "map": {"models": figure.MODELS, "gpus": figure.GPUS, "tokens": figure.TOKENS},
        "schedules": list(by_hand()), "torus": rooflines.TORUS,
        "dense_models": dense_models(), "strategies": rooflines.STRATEGIES,
    }


def by_hand():
    """The schedules that chapter 07 makes itself."""
    return [name for name in seven().VARIANTS if name != "torch"]


def seven():
    return chapter("07")


# ---------------------------------------------------------------------------------- 10: the planner

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


def question(asked):
    try:
        return planning.Question(ten(), planning.arguments(ten(), flags_of(asked)))
    except Refused as refused:                          # what it says of a terminal is not for here
        raise Refused(refused.args[0].split(" (python ")[0]) from None


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
        "room": first.ROOM * of.cluster.memory, "caveats": list(of.caveats()),
        "command": shlex.join(["python", "10_planner.py", *flags_of(asked)])}


def best(asked):
    """The ten best layouts. What is given of a layout stays as it is."""
    question(asked)                                     # refused at once, or worth a process
    return searched(tuple(sorted(flags_of(asked))), SECONDS)


@functools.lru_cache(maxsize=256)
def searched(argv, seconds):
    command = [sys.executable, "-m", "lab.page.search", *argv]
    try:
        with SEARCHES:
            ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds,
                                 cwd=common.__file__.removesuffix("common.py") or ".")
    except subprocess.TimeoutExpired:
        raise Refused(f"the search took more than {seconds} s, and was stopped: fewer GPUs, or "
                      "degrees that are given, would work") from None
    if ran.returncode:
        raise Refused(one_line((ran.stderr.strip().splitlines() or ["the search failed"])[-1]))
    return json.loads(ran.stdout)


# -------------------------------------------------------------------------------- 07: the schedules

def schedule(asked):
    """Its actions, each [kind, stage, micro-batch, start, end], for each rank; how many
    micro-batches are alive after each; the bubble, simulated and by the closed form."""
    known(asked, "schedule", "ranks", "micro_batches", "chunks", "breadth_first", "F", "B", "W")
    chapter = seven()
    name = one_of(asked, "schedule", "1f1b", by_hand())
    p, m = whole(asked, "ranks", 4, 1, RANKS), whole(asked, "micro_batches", 8, 1, 1024)
    v = whole(asked, "chunks", 2, 1, 16) if name == "interleaved" else 1
    breadth_first = one_of(asked, "breadth_first", "false", ("true", "false")) == "true"
    breadth_first = breadth_first and name == "interleaved"
    times = [real(asked, kind, 1, 0.01, 100) for kind in "FBW"]
    if p * m * v * 3 > ACTIONS:
        raise Refused(f"{p} ranks, {m} micro-batches and {v} slices are more than {ACTIONS:,} "
                      f"actions; micro_batches={max(1, ACTIONS // (3 * p * v))} would work")
    if name == "dualpipe" and p % 2:
        raise Refused(f"dualpipe pairs ranks, and {p} is an odd number; ranks={p + 1} would work")
    fits = chapter.fitting(name, p, m, breadth_first)
    if fits != m:
        raise Refused(f"{name} on {p} ranks does not take {m} micro-batches; micro_batches={fits} "
                      "would work")
    made = chapter.make_schedule(name, p, m, v, breadth_first)
    span = schedules.simulate(made, *times, as_one=name.startswith("dualpipe"))
    v = len(made.ranks) // p                            # dualpipe's are two, too
    most = [chapter.most_alive(name, rank, p, m, v, breadth_first) for rank in range(p)]
    return {
        "actions": [[[*action, *span[action]] for action in actions] for actions in made.actions],
        "alive": [chapter.alive_over_time(actions) for actions in made.actions],
        "most_alive": most, "stages": made.ranks, "depth": made.depth, "slices": v,
        "end": max(end for _, end in span.values()),
        "bubble": schedules.simulated_bubble(made, name, *times),
        "formula": chapter.bubble(name, p, m, v, *times),
        "lists": [" ".join(f"{kind}{i}" if v == 1 else f"{kind}{stage}.{i}"
                           for kind, stage, i in actions) for actions in made.actions],
        "drawing": schedules.drawing(made), "command": "python -m lab.schedules "
        f"{name} --ranks {p} --micro-batches {m}" + f" --chunks {v}" * (name == "interleaved")
        + " --breadth-first" * breadth_first}


# ------------------------------------------------------------------------------------- 06: the ring

def ring(asked):
    """For a ring, and a zig-zag of the sequence or of each document: `holds`, the runs of places of
    each rank; of each hop and rank whose keys are there, and the shapes [corners, pairs of a query
    and a key, middle] that it computes; `work`, the pairs of each rank. No more hops than anybody
    needs. busiest: the work of the busiest rank over the mean, for both cuts. documents: how long
    they are in the mean, 0: one; window: 0: all."""
    known(asked, "ranks", "documents", "cut", "window")
    n, cut = whole(asked, "ranks", 4, 1, 16), one_of(asked, "cut", "sequence", CUTS)
    documents, window = (at_least_or_none(asked, name) for name in ("documents", "window"))
    if cut == "document" and 0 < documents < 2 * n:
        raise Refused(f"documents = {documents} tokens in the mean are less than the {2 * n} chunks"
                      f" that each is cut into; documents={2 * n} would work")
    drawn, seq = rooms_with("figure")["06"], TOKENS // (2 * n) * 2 * n
    starts = common.Text.starts(SimpleNamespace(args=SimpleNamespace(
        model=SimpleNamespace(seq=seq), documents=documents, seed=0)), PACKED)
    of = {"ring": drawn.layout_of("ring", "sequence", n, starts, window)} | {
        each: drawn.layout_of("zigzag", each, n, starts, window) for each in CUTS}
    return {
        "ranks": n, "tokens": seq, "padding": len(of["document"].starts) / seq - 1,
        "busiest": {name: contexts.imbalance(layout) for name, layout in of.items()},
        "ring": laid_out(drawn, of["ring"]), "zigzag": laid_out(drawn, of[cut])}


def at_least_or_none(asked, name):
    """So many tokens, or 0."""
    tokens = whole(asked, name, 0, 0, TOKENS)
    if 0 < tokens < FEWEST:
        raise Refused(f"{name} = {tokens} tokens are too few to see; {name}={FEWEST} would work")
    return tokens


def laid_out(drawn, layout):
    n = len(layout.positions)
    hops = [[{"keys": (rank - hop) % n,
              "shapes": [[[[*corner] for corner in corners], pairs, [round(x, 2) for x in middle]]
                         for corners, pairs, middle in shapes]}
             for rank, shapes in enumerate(of_hop)]
            for hop, of_hop in enumerate(drawn.shapes_by_hop(layout))]
    return {"places": len(layout.starts), "documents": drawn.documents_of(layout),
            "padding": drawn.padding_of(layout), "holds": drawn.holds_of(layout), "hops": hops,
            "work": contexts.work(layout)}


# ------------------------------------------------------------------------------------- 09: the cuts

class Axis:
    """Stands in for a process group, of which cutting a model asks no more than this."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


MESH = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "ep": 1, "experts": 0, "kv_heads": 4, "layers": 4}


def cuts(asked):
    """Of each rank of a mesh: its place on each axis, its stage's layers, and {matrix: [full shape,
    [[dim, index, parts], ...]]} as the meters record it of a run, of the tables and of the
    first block of its stage. From `p.cuts`, after chapter 09 has cut the model: no rank runs."""
    known(asked, *MESH)
    mesh = {name: whole(asked, name, default, min(default, 1), RANKS)
            for name, default in MESH.items()}
    nine = chapter("09")
    args = of_mesh(nine, mesh)
    held = functools.cache(functools.partial(held_at, nine, args))
    told, of_stage = [], Counter()
    for rank, place in enumerate(nine.places_of_ranks(args)):
        ep = of_stage[place.pp] % args.ep               # neighbours of a stage share the experts
        of_stage[place.pp] += 1
        told.append({"rank": rank, "place": place._asdict() | {"ep": ep}}
                    | held(place.pp, place.tp, ep))
    return {"degrees": {axis: mesh[axis] for axis in ("pp", "dp", "cp", "tp", "ep")},
            "ranks": told}


def of_mesh(nine, mesh):
    """The arguments of chapter 09's run on a mesh, which it may refuse."""
    ranks = math.prod(mesh[axis] for axis in ("pp", "dp", "cp", "tp"))
    if ranks > RANKS:
        raise Refused(f"pp x dp x cp x tp = {ranks} ranks are more than {RANKS} to show")
    flags = [f"{planning.as_flag(name)}={value}" for name, value in mesh.items() if value]
    flags += ["--dim=64", "--heads=8", "--seq=64", "--micro-batch=1", f"--batch={ranks}"]
    args = strict.parse(nine.__file__, "", nine.VARIANTS, nine.flags, flags)
    nine.requires(args, ranks)
    return args


def held_at(nine, args, pp, tp, ep):
    """What a rank at this place holds: others at the same pp, tp and ep hold the same."""
    axes = {"tp": Axis(tp, args.tp), "ep": Axis(ep, args.ep)}
    start, end = nine.balanced(args.model.layers, args.pp)[pp]
    stage = nine.build(args.model)[start:end]
    nine.cut_stage(stage, args, {name: axis for name, axis in axes.items() if axis.size() > 1},
                   core=None)
    return {"items": [name for name, _ in stage.named_children()], "shards": shards_of_stage(stage)}


def shards_of_stage(stage):
    """What the meters record of a run, the stage's first block as if it were the model's."""
    first = next((name for name, _ in stage.named_children() if name.startswith("block")), "")
    for p in stage.parameters():
        p.global_name = p.global_name.replace(f"{first}.", "block1.", 1)
    return meters.shards_of(stage)


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
    for asked in (ring, cuts, schedule, plan):
        asked({})


QUESTIONS = {"plan": plan, "best": best, "schedule": schedule, "ring": ring, "cuts": cuts,
             "roofline": roofline, "memory": memory.memory}


def examples():
    """Yield (question, parameters) of what the pages ask when they are opened, and of a choice of
    what they can be asked: so much is answered where nobody computes. As the scripts ask it."""
    machine = {"cluster": "h100", "software": "megatron-2024"}
    figure = rooms_with("figure")["10"]
    for model, gpus in itertools.product(figure.MODELS, figure.GPUS):
        asked = machine | {"model": model, "gpus": str(gpus),
                           "batch": str(figure.TOKENS // ten().MODELS[model].seq)}
        yield "best", asked
        for found in best(asked)["plans"]:
            yield "plan", asked | {name: str(value).lower() for name, value
                                   in found["layout"].items() if name != "dp"}
    yield from examples_but_plans()


def examples_but_plans():
    for name, (p, m) in itertools.product(by_hand(), ((2, 4), (4, 8), (4, 16), (8, 16))):
        yield "schedule", {"schedule": name, "ranks": str(p), "micro_batches": str(m),
                           "chunks": "2", "breadth_first": "false", "F": "1", "B": "1", "W": "1"}
    for n, documents, cut, window in (
            *((n, 0, "sequence", 0) for n in range(2, 17)),
            *itertools.product((4, 8), (16, 32, 64, 128), CUTS, (0, 64))):
        yield "ring", {"ranks": str(n), "documents": str(documents), "cut": cut,
                       "window": str(window)}
    for pp, dp, cp, tp in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4, 8)):
        mesh = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "ep": 1, "experts": 0, "kv_heads": 4,
                "layers": 4}
        yield "cuts", {axis: str(degree) for axis, degree in mesh.items()}
    for cluster, model, strategy, chips in itertools.product(
            ten().CLUSTERS, ("8b", "70b"), rooflines.STRATEGIES, (8, 64, 512, 4096)):
        torus = cluster in rooflines.TORUS
        yield "roofline", {
            "cluster": cluster, "model": model, "strategy": strategy, "chips": str(chips),
            "zero_axes": "2" if torus else "1", "tp_axes": "1"}
    yield from memory.examples()
