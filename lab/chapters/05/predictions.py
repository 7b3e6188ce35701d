"""Predictions about chapter 05: what is cut along the sequence."""

from lab import chapters
from lab.chapters.question import Case, Question, eight_heads, on_the_wire, whole_block


def predictions(pick):
    ranks, m, b = pick(2, 4), pick(1, 2), pick(1, 2)
    variant = pick("megatron", "kept")
    case = Case("05_sequence_parallel", ranks, "t", variant=variant, **eight_heads(pick, ranks),
                batch=m * b, micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    before = chapters.chapter("04")
    whole_block(case)
    sent = {n: chapter.traffic(cfg, m, b, n, e, variant) for n in (ranks, 2 * ranks)}
    wire = {n: on_the_wire(sent[n], "reduce_scatter", "all_gather") for n in sent}
    block = case.block(chapter.kept(cfg, ranks, variant))
    again, here, inputs = 10, "(A_out + A_in)/t", "the inputs too: they are gathered again"
    if variant == "kept":
        again, here = 8, "(A_out - 2*b*s*h + A_in)/t + 2*b*s*h"
        inputs = "but the inputs of the two sub-layers, which are whole"
    return case, [
        Question(
            f"How many bytes does a rank send on the wire in a step, in all_gathers and "
            f"reduce_scatters together? (--variant {variant})",
            f"(t-1)/t * M * {again}*L * b*s*h * e", wire[ranks], "B",
            "4 L of each; where the input is not kept, 2 L gathers more",
            "all_gather, on the wire + reduce_scatter, on the wire"),
        Question(
            "How many bytes are in the all_reduces (the payload) once a step, of partial gradients "
            "and of the norm?", "((4*L + 2) * h + 2 * V*h + 1) * e", sent[ranks]["all_reduce"][1],
            "B", "LayerNorms, embedding and head are whole on every rank, which has seen its own "
            "tokens alone; the norm is one number", "all_reduce, payload", also="t"),
        Question(
            f"How many bytes does one block keep for backward on a rank, of one micro-batch? "
            f"(--variant {variant})", f"({here}) * e", block, "B", f"all is cut, {inputs}"),
        Question(
            "How many times as much does it keep on a rank of chapter 04?",
            f"(A_out + A_in/t) / ({here})", case.block(before.kept(cfg, ranks)) / block, "times",
            "there A_out is whole"),
        Question(
            "Twice as many ranks: by what factor does that change the bytes of the first "
            "question?", "(2*t-1)/(2*t) / ((t-1)/t)", wire[2 * ranks] / wire[ranks], "times",
            "a rank has all of it but its own part to send or to receive"),
    ]  # fmt: skip
