"""Predictions about chapter 08: what experts send and hold."""

from dataclasses import replace

from lab.chapters.question import Case, Question, on_the_wire, shape
from lab.run.machines import MACHINES


def predictions(pick):
    ranks, b = pick(2, 4), pick(1, 2)
    case = Case("08_expert_parallel", ranks, "N", variant="capacity", **shape(pick),
                batch=2 * ranks * b, micro_batch=b, experts=8, top_k=pick(1, 2),
                capacity_factor=pick(1, 1.25, 1.5, 2), dtype=pick("float32", "float64"))
    chapter, args, cfg, e = case.chapter, case.args, case.cfg, case.e
    case.sizes |= {"E": cfg.experts, "K": cfg.top_k, "f": args.capacity_factor}
    case.sizes["C"], case.sizes["W"] = rates = MACHINES["H100, InfiniBand NDR"]
    tokens, micro_batches = b * cfg.seq, 2
    to_each = [cfg.experts // ranks * b * cfg.places] * ranks           # rows, and as many come
    seen = micro_batches * cfg.layers * [(to_each, to_each)]
    wire = on_the_wire(chapter.traffic(case.args, ranks, seen), "all_to_all")
    spread, cut = (chapter.row_bytes(replace(cfg, top_k=often), tokens, e)
                   for often in (cfg.top_k, ranks))
    return case, [
        Question(
            "How many places has an expert for each sequence?", "f * K * s / E", cfg.places,
            "places", "the mean number of picks, times the factor", also="N"),
        Question(
            "How many bytes does a rank send on the wire in a step, in all all_to_alls of "
            "--variant capacity?", "(N-1)/N * 4*L * B/N * f*K*s * h * e", wire, "B",
            "f·K·s rows of each sequence, there and back, and the same in backward; the rank's "
            "own part stays", "all_to_all, on the wire"),
        Question(
            "How many bytes do the parameters of a rank take?",
            "(Ψ - (N-1)/N * L*E * 8*h*h) * e", e * chapter.held_numbers(cfg, ranks)[0], "B",
            "all but the experts of others: an expert has 8 h² numbers", "parameters"),
        Question(
            "If each rank had a part of every expert, so that all tokens went to all ranks: how "
            "many times as much would it send for rows as dropless does, if all are picked alike?",
            "N / K", cut / spread, "times", "N rows for a token; dropless sends K", also="E"),
        Question(
            "On GPUs that compute C FLOP/s and send W bytes/s: over the time of attention, router "
            "and experts in a forward, how long do the rows of --variant overlapped travel?",
            "(N-1)/N * 2*K*h*e / W / ((4*h*(h + k) + 2*h*E + 4*s*h + 16*K*h*h) / C)",
            chapter.travel_over_compute(cfg, ranks, e, *rates), "times",
            "K rows there and back, over two FLOPs for each number of the matrices and 4·s·h for "
            "the scores: a larger batch does not change it", also="B"),
    ]  # fmt: skip
