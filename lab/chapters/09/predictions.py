"""Predictions about chapter 09: rank 0 of a mesh."""

import math

import torch
from torch import nn

from lab import chapters
from lab.chapters.question import Case, Question, on_the_wire, shape
from lab.run import anatomy
from lab.run.formulas import with_wire_bytes


def predictions(pick):
    layout = pick({"pp": 2, "dp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2},
                  {"pp": 4, "dp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 4})
    m, b, pp, dp = pick(4, 8), pick(1, 2), layout["pp"], layout.get("dp", 1)
    case = Case("09_5d", math.prod(layout.values()), **layout,
                **shape(pick, layers=pp * pick(1, 2), dim=pick(64, 128), heads=8, kv_heads=8),
                batch=dp * m * b, micro_batch=b, dtype=pick("float32", "float64"))
    args, cfg, e = case.args, case.cfg, case.e
    case.sizes |= {"pp": pp, "dp": dp, "cp": args.cp, "tp": args.tp}
    answer, sent = of_first_rank(case)
    _, of_more = of_first_rank(case.changed(2 * case.ranks, tp=2 * args.tp))
    tp = on_the_wire(sent["tp"], "all_gather", "reduce_scatter")
    cut = "queries", "keys", "mlp"
    names = {kind: "cut by tp" if kind in cut else "whole" for kind in answer["holders"]}
    gradients = anatomy.gradient_traffic(cfg, answer | {"gradients": names}, e, e)["cut by tp"]
    pipeline = chapters.chapter("07")
    on_axis = pick(
        Question(
            "How many bytes does rank 0 send on the wire of tp in a step?",
            "M * L/pp * 8 * (tp-1)/tp * b*s/cp * h * e", tp, "B",
            "eight gathers and scatters in each of its blocks, around two sub-layers, forward and "
            "backward", "tp", also="dp"),
        Question(
            "How many bytes does rank 0 send to the next stage in a step?",
            "M * b*s/(cp*tp) * h * e", on_the_wire(sent["pp"], "send"), "B",
            "each rank of tp and of cp sends its own tokens of every micro-batch", "pp", also="L"))
    return case, [
        on_axis,
        Question(
            "How many bytes does rank 0 send on the wire in a step for the gradients of what tp "
            "cuts (q, k, v, o, up and down), without ZeRO?",
            "2 * (dp*cp-1)/(dp*cp) * L/pp * (10*h*h + 2*h*k)/tp * e",
            on_the_wire(gradients, "all_reduce"), "B",
            "an all_reduce over the dp · cp ranks that hold the same part, once a step",
            "gradients, cut by tp", also="M"),
        Question(
            "How many bytes do the parameters of rank 0 take? It holds the embedding and L/pp "
            "blocks.", "(L/pp * ((10*h*h + 2*h*k)/tp + 4*h) + V*h) * e",
            anatomy.state_bytes(args, answer, e)["parameters"], "B",
            "tp cuts the matrices of the blocks; LayerNorms and embedding are whole",
            "parameters"),
        Question(
            "How large is the bubble of 1f1b, as a share of the work, if F, B and W take equally "
            "long?", "(pp-1) / M", pipeline.bubble("1f1b", pp, args.micro_batches, 1), "%",
            "chapter 07: the last stage waits for pp-1 forwards, and the first for as many "
            "backwards", also="dp"),
        Question(
            "With twice as many ranks, all of them for tp: by what factor does that change the "
            "bytes that rank 0 sends on the wire of tp?", "(2*tp-1)/(2*tp) / ((tp-1)/tp)",
            on_the_wire(of_more["tp"], "all_gather", "reduce_scatter") / tp, "times",
            "the whole activation is gathered and scattered, but for its own part"),
    ]  # fmt: skip


def of_first_rank(case):
    """What chapter 09's formulas give for rank 0, and what it sends on each axis."""
    args, chapter = case.args, case.chapter
    model, places = nn.ModuleList(), torch.zeros(case.cfg.seq, dtype=torch.int64)  # it is not built
    model.blocks = [(len(run), 0, int(run[-1]) + 1)
                    for run in chapter.runs_of(0, args.cp, places)]
    answer = chapter.formulas(args, 0, case.ranks, model)
    passes = args.micro_batches * sum(0 < module <= case.cfg.layers for module in answer["modules"])
    sends = answer["sent"]["pp"]["send"][0]
    sent = chapter.traffic(args, case.ranks, passes, 0, sends, case.e)
    return answer, with_wire_bytes(sent, answer["ranks"])
