"""Predictions about chapter 02: what is sent, and when it hides."""

from lab.chapters.question import Case, Question, on_the_wire, shape
from lab.run import anatomy
from lab.run.machines import MACHINES


def predictions(pick):
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    case = Case("02_data_parallel", ranks, "N", **shape(pick), variant=pick("naive", "overlap"),
                batch=ranks * m * b, micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    case.sizes["C"], case.sizes["W"] = MACHINES["H100, NVLink 4"]
    calls = anatomy.tensors(cfg)
    wire = {n: on_the_wire(chapter.traffic(e * cfg.parameters(), calls, n), "all_reduce")
            for n in (ranks, 2 * ranks)}
    return case, [
        Question(
            "How many bytes does a rank send on the wire in a step, if the ranks form a ring?",
            "2 * (N-1)/N * Ψ * e", wire[ranks], "B",
            "a reduce_scatter and an all_gather, once a step, however many micro-batches",
            "all_reduce, on the wire", also="M"),
        Question(
            "How many bytes does a rank keep: parameters, gradients and AdamW's states together?",
            "4 * e * Ψ + 4 * T", case.states({"parameters": cfg.parameters()}), "B",
            "all of them, as on one GPU: parameter, gradient and two moments; and 4 bytes a tensor "
            "for AdamW's step count", "parameters + gradients + optimizer states", also="N"),
        Question(
            f"How many all_reduces does the variant {case.args.variant} start in a step?",
            "10*L + 4", chapter.traffic(e * cfg.parameters(), calls, ranks)["all_reduce"][0],
            "calls", "one for each parameter: six matrices and two LayerNorms of two in a block; "
            "the embedding, the last LayerNorm and the head", "all_reduce, calls", also="M"),
        Question(
            "Twice as many ranks share the same batch. By what factor does that change the bytes "
            "that a rank sends on the wire in a step?", "2 * (2*N-1)/(2*N) / (2 * (N-1)/N)",
            wire[2 * ranks] / wire[ranks], "times",
            "the gradients are as large as before: on many ranks it is 2 Ψ e at the most"),
        Question(
            "From how many tokens of a rank on could the all_reduce hide behind backward, on "
            "GPUs that compute C FLOP/s and send W bytes/s?", "e/2 * (N-1)/N * C / W",
            chapter.tokens_to_hide(e, ranks, case.sizes["C"], case.sizes["W"]), "tokens",
            "2 (N-1)/N · Ψ · e / W <= 4 · tokens · Ψ / C: the model's size cancels", also="Ψ"),
    ]  # fmt: skip
