"""Predictions about chapter 08: what experts send and hold."""

from lab.classroom.questions import Case, Question, on_the_wire, shape


def predictions(pick):
    ranks, b = pick(2, 4), pick(1, 2)
    case = Case("08_expert_parallel", ranks, "N", variant="capacity", **shape(pick),
                batch=2 * ranks * b, micro_batch=b, experts=8, top_k=pick(1, 2),
                capacity_factor=pick(1, 1.25, 1.5, 2), dtype=pick("float32", "float64"))
    chapter, args, cfg, e = case.chapter, case.args, case.cfg, case.e
    case.sizes |= {"E": cfg.experts, "K": cfg.top_k, "f": args.capacity_factor}
    twice = case.changed(2 * ranks)
    wire = {n: on_the_wire(chapter.traffic(of.args, n, []), "all_to_all")
            for n, of in ((ranks, case), (2 * ranks, twice))}
    tokens = b * cfg.seq
    spread, cut = (chapter.row_bytes(cfg, tokens, e, often) for often in (cfg.top_k, ranks))
    return case, [
        Question(
            "How many places has an expert for each sequence?", "f * K * s / E", cfg.places,
            "places", "the mean number of picks, times the factor", also="N"),
        Question(
            "How many bytes does a rank send on the wire in a step, in all all_to_alls of "
            "--variant capacity?", "(N-1)/N * 4*L * B/N * f*K*s * h * e", wire[ranks], "B",
            "f·K·s rows of each sequence, there and back, and the same in backward; the rank's "
            "own part stays", "all_to_all, on the wire"),
        Question(
            "How many bytes do the parameters of a rank take?",
            "(Ψ - (N-1)/N * L*E * 8*h*h) * e", e * chapter.held_numbers(cfg, ranks)[0], "B",
            "all but the experts of others: an expert has 8 h² numbers", "parameters"),
        Question(
            "How many times as much would --variant tensor send for its rows as dropless does, if "
            "all experts are picked alike?", "N / K", cut / spread, "times",
            "all tokens go to all ranks; dropless sends K rows for a token", also="E"),
        Question(
            "Twice as many ranks share the same experts and the same batch: by what factor does "
            "that change the bytes of the second question?",
            "(2*N-1)/(2*N) * B/(2*N) / ((N-1)/N * B/N)", wire[2 * ranks] / wire[ranks], "times",
            "a rank has half of the sequences, and keeps a smaller part of their rows"),
    ]  # fmt: skip
