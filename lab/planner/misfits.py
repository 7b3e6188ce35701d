"""Which layouts chapter 10 does not plan.

What has to divide what, for each axis: chapters 02 to 09 refuse the same of a run.
"""

import math


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
