"""Predictions about chapter 04: what tp sends, keeps and cuts."""

from lab.chapters.question import Case, Question, eight_heads, whole_block


def predictions(pick):
    ranks, m, b = pick(2, 4), pick(1, 2), pick(1, 2)
    case = Case("04_tensor_parallel", ranks, "t", **eight_heads(pick, ranks), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    whole_block(case)
    calls, _, wire = chapter.traffic(cfg, m, b, ranks, e)["all_reduce"]
    block = {n: case.block(chapter.kept(cfg, n)) for n in (ranks, 2 * ranks)}
    return case, [
        Question(
            "How many bytes does a rank send on the wire in a step, in all all_reduces?",
            "2 * (t-1)/t * (M * (4*L + 2) * b*s*h + 3 * M * b*s + 1) * e", wire, "B",
            "two in forward and two in backward of every block, one for the embedding, one for "
            "the head; three numbers a token for the loss, and the norm",
            "all_reduce, on the wire"),
        Question(
            "How many all_reduces are these?", "M * (4*L + 2 + 2) + 1", calls, "calls",
            "the loss has two: the largest logit, and the sums; the norm is once a step",
            "all_reduce, calls"),
        Question(
            "How many bytes do the parameters of a rank take?",
            "(L * (10*h*h + 2*h*k)/t + (4*L + 2) * h + 2 * V*h/t) * e",
            e * chapter.parameters_per_rank(cfg, ranks), "B",
            "every matrix is cut, the tables too; a LayerNorm is not", "parameters"),
        Question(
            "How many bytes does one block keep for backward on a rank, of one micro-batch?",
            "(A_out + A_in/t) * e", block[ranks], "B",
            "what is inside of the sub-layers is cut; LayerNorms and residuals are whole"),
        Question(
            "By what factor does that change, if there are twice as many ranks?",
            "(A_out + A_in/(2*t)) / (A_out + A_in/t)", block[2 * ranks] / block[ranks], "times",
            "A_out is whole on every rank, however many there are"),
    ]  # fmt: skip
