"""Which layouts chapter 10 does not plan, and which change of one number would mend that.

What has to divide what, for each axis: chapters 02 to 09 refuse the same of a run.
"""

import math

NEAR = 10_000           # by how much a number may be changed at most

def divisions(model, layout, gpus, batch):
    """[(what, how many, by what, how many)], of which each has to be a multiple."""
    ranks, layers = layout.tp * layout.cp * layout.pp, math.ceil(model.layers / layout.pp)
    return [("gpus", gpus, "tp x cp x pp", ranks), ("heads", model.heads, "tp", layout.tp),
            ("ffn", 0 if model.experts > 1 else model.ffn, "tp", layout.tp),
            ("dense-ffn", model.dense_ffn, "tp", layout.tp), ("seq", model.seq, "cp", layout.cp),
            ("batch", batch, "dp x micro-batch", layout.dp * layout.micro_batch),
            ("dim", 0 if model.head_dim else model.dim, "heads", model.heads),
            ("dp x cp x tp", layout.stage, "ep", layout.ep),
            ("heads", model.heads, "kv-heads", model.kv_heads),
            ("experts", model.experts, "ep", layout.ep), ("a stage", layers, "v", layout.v)]


def misfit(model, layout, gpus, batch):
    """Why a layout does not divide; None: it does."""
    for what, size, by, degree in divisions(model, layout, gpus, batch):
        if size % degree:
            return f"{what} = {size} is not a multiple of {by} = {degree}"
    ranks = layout.dp * layout.tp * layout.cp * layout.pp
    if ranks != gpus:
        return f"dp x tp x cp x pp = {ranks}, and gpus = {gpus}"
    if layout.pp > model.layers or layout.pp == 1 < layout.v:
        return f"layers = {model.layers} are not enough for pp = {layout.pp}, v = {layout.v}"
    if model.top_k > model.experts:
        return f"top-k = {model.top_k} is more than experts = {model.experts}"
    m = batch // (layout.dp * layout.micro_batch)
    least = {"zero-bubble": layout.pp, "dualpipe-v": 2 * layout.pp}.get(layout.schedule, 1)
    if m < least or layout.v > 1 and m % layout.pp:
        return (f"{m} micro-batches for pp = {layout.pp}, v = {layout.v}, {layout.schedule}, which "
                f"takes {least} or more, and with v > 1 a multiple of pp")
    if layout.schedule != "1f1b" and (layout.v > 1 or layout.pp == 1):
        return f"{layout.schedule} needs pp of 2 or more, and v = 1"
    return None


def changes(model, layout, gpus, batch):
    """[(field, value)]: of the first two numbers of which one does not divide the other, what would
    do in place of each, the nearest first. No promise: then something else may not divide."""
    for what, size, by, degree in divisions(model, layout, gpus, batch):
        if size % degree:
            window = range(max(1, degree - NEAR), degree + NEAR)
            near = [other for other in window if size % other == 0]
            near.sort(key=lambda other: abs(other - degree))
            found = [*((by, other) for other in near[:2]), (what, -(-size // degree) * degree)]
            return [(name.replace("-", "_"), value) for name, value in found if " " not in name]
    ranks = layout.dp * layout.tp * layout.cp * layout.pp
    return [("gpus", ranks)] if ranks != gpus else []
