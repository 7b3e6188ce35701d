"""Predictions about chapter 03: what each stage keeps and sends."""

import common
from lab.chapters import room
from lab.chapters.question import Case, Question, on_the_wire, shape
from lab.run.machines import MACHINES


def predictions(pick):
    ranks, m, b, ahead = pick(2, 4, 8), pick(1, 2, 4), pick(1, 2), pick(0, 1, 2)
    case = Case("03_zero", ranks, "N", **shape(pick, layers=pick(3, 4), dim=pick(64, 128),
                                               vocab=256),
                batch=ranks * m * b, micro_batch=b, variant="zero3", prefetch=ahead,
                precision=pick("fp32", "bf16"))
    chapter, args, cfg = case.chapter, case.args, case.cfg
    width, of_sum = common.rounded(args).itemsize, case.e
    case.sizes |= {"e": width, "g": of_sum, "P": ahead, "u": len(chapter.padded_sizes(cfg, ranks))}
    case.sizes["C"], case.sizes["W"] = MACHINES["H100, NVLink 4"]
    states, masters = (8, "") if args.precision == "fp32" else (12, " and master weights")
    held = {(stage, n): case.states({"zero": stage, "holders": n}, case.e)
            for stage in (1, 3) for n in (ranks, 2 * ranks)}
    wire = {stage: on_the_wire(chapter.traffic(cfg, stage, ranks, m, (width, of_sum)),
                               "reduce_scatter", "all_gather") for stage in (1, 3)}
    at_stage_1 = f"({width} + {of_sum}) * Ψ + {states} * Ψ/{{}} + 4*u"
    last = pick(
        Question(
            "How many times as much is that as at stage 1?",
            "M * ((2*e + g) * Ψ - e * (V*h + 2*h)) / ((e + g) * Ψ)",
            wire[3] / wire[1], "times", "stage 1 reduces and gathers once a step", also="N"),
        Question(
            "From how many tokens of a micro-batch on could stage 3 hide what it sends in a "
            "backward, on GPUs that compute C FLOP/s and send W bytes/s?",
            "(e + g)/4 * (N-1)/N * C / W",
            chapter.tokens_to_hide(width + of_sum, 2, ranks, case.sizes["C"], case.sizes["W"]),
            "tokens", "a gather and a reduce_scatter of each number, behind 4 FLOPs a token",
            also="Ψ"))
    return case, [
        Question(
            f"How many bytes does a rank keep at stage 3, with --precision {args.precision}: "
            "parameters, gradients and AdamW's states together?",
            f"({width} + {of_sum} + {states}) * Ψ/N + 4*u", held[3, ranks], "B",
            f"everything is cut, two moments{masters} too; and 4 bytes a unit for AdamW's step "
            "count", "parameters + gradients + optimizer states"),
        Question(
            "How many bytes of gathered parameters does a rank have at the peak, if P units are "
            "gathered ahead of the one that computes? (The blocks are the largest units.)",
            "(P + 1) * (10*h*h + 2*h*k + 4*h) * e",
            room("03", "held").gathered_peak(args, {"zero": 3, "holders": ranks}, case.e), "B",
            "P + 1 blocks: q, o, up and down; k and v; two LayerNorms",
            "gathered parameters, at the peak", also="N"),
        Question(
            "How many bytes does a rank send on the wire in a step at stage 3, in all_gathers and "
            "reduce_scatters together?", "M * ((2*e + g) * Ψ - e * (V*h + 2*h)) * (N-1)/N", wire[3],
            "B", "each micro-batch gathers for forward, and again for backward all but the head, "
            "and reduces gradients, which are fp32 with any --precision",
            "all_gather, on the wire + reduce_scatter, on the wire"),
        last,
        Question(
            f"At stage 1, with --precision {args.precision}, twice as many ranks share the model. "
            "By what factor does that change the bytes that a rank keeps, of parameters, "
            "gradients and AdamW's states together?",
            f"({at_stage_1.format('(2*N)')}) / ({at_stage_1.format('N')})",
            held[1, 2 * ranks] / held[1, ranks], "times",
            f"two moments{masters} halve; parameters and gradients stay whole"),
    ]  # fmt: skip
