"""000: the playbook's plots and runs, point by point: a part of `playbook`, in its order.

What it computed is ours to the last digit. What it has measured on its H100s is beside what chapter
10 predicts, of which no number was fitted to it: see lab/planner/playbook.py.
"""

from functools import partial

from lab.chapters import chapter
from lab.planner import playbook
from lab.sources.row import Row

NETWORK = ("its network is slower than the data sheet says, and the more so the more nodes there "
           "are; with the bandwidths that it has measured, see the plot over dp")
FULLER = ("its GPUs were fuller than is planned, and why is not told; so a smaller micro-batch is "
          "the largest that fits")
UNTOLD = "which micro-batches it ran is not told: here, the largest that fit"
STARTS = "the planner counts no time to start a kernel, and thin matrices are done soon"
NO_MASTERS = "no masters, though k = 12 of the text has them: see contradictions"
NEARLY_FULL = "its memory was nearly full: by the text that takes time, and here it does not"
FULL = "at 71.5 GiB " + NEARLY_FULL
SPEED = "tokens/s"


def ten():
    return chapter("10")


# --------------------------------------------------------------- memory, computed by its formulas

# GiB of activations, none, selective and full; and of parameters, all at 4,096 tokens.
LLAMAS = {"1B": (44.2578125, 4.2578125, 0.2578125, 4.0113677978515625),
          "3B": (63.66796875, 11.16796875, 0.66796875, 13.331336975097656),
          "8B": (97.015625, 17.015625, 1.015625, 26.025909423828125),
          "70B": (485.03125, 85.03125, 5.03125, 244.07086181640625),
          "405B": (1527.8125, 267.8125, 15.8125, 1520.17822265625)}
OVER_SEQUENCE = {1024: 9.25390625, 2048: 28.5078125, 8192: 354.03125}      # of the 8B, none


def llama(name, seq, recompute, cause):
    return playbook.llama_bytes(ten(), name, seq, recompute)[cause] / playbook.GIB


def activations(name, seq, **layout):
    """GiB on the first stage, if the model's layers were a GPT's with dropout, selectively
    recomputed."""
    plan = ten()
    like = plan.MODELS[name]
    model = plan.gpt(like.layers, like.dim, like.heads, seq=seq)
    layout = plan.Layout(recompute="selective", **layout)
    software = plan.Software(flash=False, dropout=True, ring=True)
    kept = plan.kept_by_layer(model, layout, software)
    alive = plan.micro_batches_alive(layout, 64)
    return model.layers / layout.pp * alive * kept / playbook.GIB


def weights(name, bytes_of_each=2, **layout):
    """GiB of a GPU, whose parameters have so many bytes."""
    plan = ten()
    held = plan.parameters_of_gpu(plan.MODELS[name], plan.Layout(**layout), plan.Software())
    return bytes_of_each * sum(size for size, _ in held.values()) / playbook.GIB


OVER_MODELS = {"1b": (2.3017578125, 1.0625), "8b": (14.95703125, 4.25),
               "70b": (131.4140625, 21.25)}
WITH_CP = {(1, 1): 544, (2, 1): 352, (2, 4): 88}        # tp, cp: GiB with 131,072 tokens

MEMORY = [
    *[Row("memory", f"plot: {name} with 4,096 tokens, {how}", told,
          partial(llama, name, 4096, how, "activations"), "GiB", 1e-6, "playbook.llama_bytes")
      for name, numbers in LLAMAS.items()
      for how, told in zip(("none", "selective", "full"), numbers)],
    *[Row("memory", f"plot: {name}: parameters in fp32", numbers[-1],
          partial(llama, name, 4096, "none", "parameters"), "GiB", 1e-6, "playbook.parameters")
      for name, numbers in LLAMAS.items()],
    *[Row("memory", f"plot: 8B with {seq:,} tokens, none", told,
          partial(llama, "8B", seq, "none", "activations"), "GiB", 1e-6, "playbook.llama_bytes")
      for seq, told in OVER_SEQUENCE.items()],
]
MODELS = [
    *[Row("DP", f"plot: {name.upper()}, weights in bf16", told, partial(weights, name), "GiB", 3e-3,
          "10_planner.parameters_of_gpu") for name, (told, _) in OVER_MODELS.items()],
    *[Row("DP", f"plot: {name.upper()}, activations with 1,024 tokens, selective", told,
          partial(activations, name, 1024), "GiB", 1e-6, "10_planner.kept_by_layer")
      for name, (_, told) in OVER_MODELS.items()],
]
ZERO = [
    Row("ZeRO", "plot: 8B, weights in bf16", 15, partial(weights, "8b"), "GiB", 0.05,
        "10_planner.parameters_of_gpu"),
    Row("ZeRO", "plot: 8B, weights with ZeRO-3 on 8 ranks", 1.875,
        lambda: weights("8b") / 8, "GiB", 0.006, "10_planner.parameters_of_gpu"),
    Row("ZeRO", "plot: 8B, optimizer states", 60, partial(weights, "8b", 12), "GiB", 0.5,
        "10_planner.memory", why=NO_MASTERS),
    *[Row("ZeRO", f"plot: 8B, activations with {seq:,} tokens, selective", told,
          lambda seq=seq: activations("8b", seq), "GiB", 1e-6,
          "10_planner.kept_by_layer") for seq, told in ((1024, 4.25), (4096, 17), (16384, 68))],
]
TP_MEMORY = [
    *[Row("SP", f"plot: 70B, weights on tp {t}", told,
          partial(weights, "70b", tp=t), "GiB", 0.1, "10_planner.parameters_of_gpu",
          why="with 8 kv heads, two ranks hold the same one" if t == 16 else "")
      for t, told in ((1, 131.5), (8, 16.4375), (16, 8.21875))],
    *[Row("SP", f"plot: 70B, activations with 16,384 tokens on tp {t}", told,
          lambda t=t: activations("70b", 16384, tp=t), "GiB", 1e-6,
          "10_planner.kept_by_layer") for t, told in ((1, 340), (8, 42.5), (16, 21.25))],
]
WHOLE_NORMS = [         # without SP: 10 + 24/t bytes of each number
    Row("TP", f"plot: 70B, activations with 16,384 tokens on tp {t}", told,
        partial(activations, "70b", 16384, tp=t, sp=False), "GiB", 1e-6,
        "10_planner.kept_by_layer") for t, told in ((8, 130), (16, 115))]
CP_MEMORY = [
    *[Row("CP", f"plot: 8B, activations with 131,072 tokens on tp {t}, cp {cp}", told,
          partial(activations, "8b", 131072, tp=t, cp=cp, sp=False), "GiB", 1e-6,
          "10_planner.kept_by_layer") for (t, cp), told in WITH_CP.items()],
    Row("CP", "plot: 8B, weights on tp 2, whatever cp is", 7.478515625,
        partial(weights, "8b", tp=2, cp=4), "GiB", 1e-3, "10_planner.parameters_of_gpu"),
]
PP_MEMORY = [
    *[Row("PP", f"plot: 8B, weights on the first of {p} stages", told,
          partial(weights, "8b", pp=p, sp=False), "GiB", 1e-3, "10_planner.parameters_of_gpu")
      for p, told in ((1, 14.95703125), (8, 2.603515625))],
    Row("PP", "plot: 8B, activations of 8 stages, 4,096 tokens: as of one GPU", 17,
        lambda: activations("8b", 4096, pp=8), "GiB", 1e-6,
        "10_planner.micro_batches_alive"),
]


# -------------------------------------------------------------- measured over one degree or another

def over(axis, degree):
    """Over dp with the bandwidth that it has measured."""
    return playbook.speed_over(ten(), axis, degree, measured=axis == "dp")


def drop(axis, low, high):
    return playbook.drop(lambda degree: playbook.speed_over(ten(), axis, degree), low, high)


def largest(axis, degree):
    return playbook.largest_that_fits(ten(), axis, degree)


DP = [
    *[Row("DP", f"plot: 1B on dp {degree}, with its own bandwidths", told,
          partial(over, "dp", degree), SPEED, by="playbook.speed_over", within=0.16)
      for degree, told in playbook.THROUGHPUT["dp"].items()],
    Row("DP", "plot: 1B on dp 256, with the data sheet's bandwidths",
        playbook.THROUGHPUT["dp"][256], lambda: playbook.speed_over(ten(), "dp", 256), SPEED,
        by="playbook.speed_over", within=0.16, why=NETWORK),
    Row("DP", "plot: GiB of a GPU, whatever dp is", playbook.MEMORY_OF_DP,
        lambda: playbook.gib_of_gpu(ten(), "1B", playbook.layout_over(ten(), "dp", 64)), "GiB",
        by="playbook.gib_of_gpu", within=0.25),
]


def over_tp(axis, drops):
    """The rows of its two plots of tensor parallelism. drops: {(from, to): share of the speed}."""
    part = "TP" if axis == "tp" else "SP"
    untold = {(axis, 4), (axis, 8)}
    slow, slower = {("tp", 32)}, {("tp", 32), ("tp + sp", 16)}
    small = {("tp", 2)} | {("tp + sp", degree) for degree in (4, 8, 16, 32)}
    yield from (
        Row(part, f"plot: 3B on tp {degree}", told, partial(over, axis, degree), SPEED,
            by="playbook.speed_over", within=0.25, why=NETWORK if (axis, degree) in slow else "")
        for degree, told in playbook.THROUGHPUT[axis].items())
    yield from (
        Row(part, f"plot: speed that is lost from tp {low} to {high}", told,
            partial(drop, axis, low, high), "%", 0.05, "playbook.drop",
            why=NETWORK if (axis, high) in slower else UNTOLD if (axis, high) in untold else "")
        for (low, high), told in drops.items())
    yield from (
        Row(part, f"plot: largest micro-batch of the 3B on tp {degree}", told,
            partial(largest, axis, degree), "sequences", by="playbook.largest_that_fits",
            within=0.25, why=FULLER if (axis, degree) in small else "")
        for degree, told in playbook.LARGEST[axis].items())


TP = [*over_tp("tp", {(2, 4): 0.108, (4, 8): 0.122, (8, 16): 0.427, (16, 32): 0.656})]
TP_SP = [*over_tp("tp + sp", {(2, 4): 0.05, (4, 8): 0.191, (8, 16): 0.434, (16, 32): 0.414})]


def ring_bandwidth(nodes):
    """B/s of an all_gather of 256 MB, as nccl-tests counts them."""
    plan, n = ten(), 8 * nodes
    machine = plan.Machine(plan.CLUSTERS["h100"], plan.Software())
    return (n - 1) / n * 256e6 / machine.ring(256e6, n, 1)


BANDWIDTH = [
    *[Row("PP", f"plot: all_gather of 256 MB over {8 * nodes} GPUs", told * 1e9,
          partial(ring_bandwidth, nodes), "B/s", by="10_planner.Machine.ring", within=0.15,
          why=NETWORK if nodes > 1 else "")
      for nodes, told in playbook.BANDWIDTH["all_gather"].items()],
    Row("PP", "plot: all_reduce of 256 MB on a node",
        playbook.BANDWIDTH["all_reduce"][1] * 1e9, partial(ring_bandwidth, 1), "B/s", 5e7,
        "10_planner.Machine.ring",
        why="a ring is no faster in it than in an all_gather; NVLink's switches can add (NVLS)"),
]

STAGES = [
    Row("1F1B", "plot: speed that is lost from 8 stages to 16, with m = p - 1", 0.14,
        lambda: playbook.drop(lambda p: playbook.speed_over_stages(ten(), p, p - 1), 8, 16), "%",
        0.005, "playbook.speed_over_stages",
        why="its model is not told; of the 8B, the head makes the last of many stages slow"),
]


# ------------------------------------------------------------------------------------- all its runs

def best(name, nodes):
    plan = playbook.best(ten(), name, nodes)
    return playbook.BATCH * 4096 / plan.total / (8 * nodes)


def of_8b():
    """Of the 8B on a node: (layout, tokens/s)."""
    for name, nodes, layout, told, _ in playbook.runs(ten()):
        if (name, nodes) == ("8B", 1):
            yield layout, told


def memory_of_best(name, nodes):
    """Of the fastest run, the first one that is listed."""
    layout = next(layout for of, on, layout, *_ in playbook.runs(ten())
                  if (of, on) == (name, nodes))
    return playbook.gib_of_gpu(ten(), name, layout)


def named(layout):
    degrees = f"dp {layout.dp} tp {layout.tp} pp {layout.pp}"
    return f"{degrees}, micro-batch {layout.micro_batch}, ZeRO-{layout.zero}"


RUNS = [
    *[Row("runs", f"G of the {name}, by its MFU and tokens/s", told,
          lambda name=name: playbook.model_of(ten(), name).parameters() / 1e9, "G", 0.006,
          "10_planner.Model.parameters")
      for name, told in (("1B", 1.34), ("3B", 3.57), ("8B", 8.86), ("80B", 80.0))],
    *[Row("runs", f"heat map: best of the {name} on {8 * nodes} GPUs", told,
          partial(best, name, nodes), SPEED, by="playbook.best", within=0.2, why=why)
      for name, nodes, told, why in (
          ("1B", 1, 40150, ""), ("3B", 8, 13312, NETWORK), ("8B", 1, 7503, ""),
          ("8B", 16, 6028, NETWORK),
          ("80B", 4, 285, NEARLY_FULL))],
    *[Row("runs", f"8B on a node: {named(layout)}", told,
          lambda layout=layout: playbook.speed(ten(), "8B", layout), SPEED, by="playbook.speed",
          within=0.2, why=STARTS if (layout.tp, layout.micro_batch) == (8, 1) else
          FULL if (layout.dp, layout.pp) == (4, 2) else "") for layout, told in of_8b()],
    *[Row("runs", f"heat map: memory of that of the {name} on {8 * nodes} GPUs", told,
          partial(memory_of_best, name, nodes), "GiB", by="playbook.gib_of_gpu", within=0.25,
          why=FULLER if name in ("3B", "8B") else "")
      for name, nodes, told in (("1B", 1, 50.2), ("3B", 8, 47.7), ("8B", 1, 63.1),
                                ("80B", 4, 66.0))],
]
