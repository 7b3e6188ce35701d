"""Predictions about chapter 06: what a ring sends and computes."""

from lab.chapters.question import Case, Question, on_the_wire, shape


def predictions(pick):
    """Of a plain ring, whose window ends so many hops away."""
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    seq, hops = pick(64, 128), pick(*range(1, ranks))
    window = (hops - 1) * seq // ranks + pick(2, 3, seq // ranks)
    case = Case("06_context_parallel", ranks, "N", **shape(pick, seq=seq), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"), variant="ring", window=window)
    chapter, cfg, e = case.chapter, case.cfg, case.e
    needed = chapter.hops_needed("ring", ranks, seq, window)
    sent = chapter.traffic(cfg, "ring", m, b, ranks, e, hops=needed)
    pairs = chapter.pairs("zigzag", 0, ranks, cfg.seq)
    last = chapter.pairs("ring", ranks - 1, ranks, cfg.seq)
    halves = chapter.pairs("zigzag", 0, ranks, cfg.seq, documents=2)
    return case, [
        Question(
            "A token sees as many tokens as the window has, itself among them. How many bytes of "
            "keys and values, and of their gradients, does a rank send around the ring in a step?",
            f"3 * M * L * {hops}/N * 2 * b*s*k * e", on_the_wire(sent, "send"), "B",
            f"the window reaches back into {hops} of the parts before, of {seq // ranks} tokens: "
            "as many hops for keys and values in forward and in backward, and for their gradients, "
            "of which the last one is home",
            "send, on the wire", also="h"),
        Question(
            "How many bytes does a rank send on the wire for the sum of all gradients?",
            "2 * (N-1)/N * Ψ * e", on_the_wire(sent, "all_reduce"), "B",
            "every rank holds all parameters, and has seen other tokens",
            "all_reduce, on the wire", also="M"),
        Question(
            "How many bytes does one block keep for backward on a rank, of one micro-batch? (Of "
            "attention it keeps the lse of each query and head, in place of its weights.)",
            "(15 * b*s*h + 2 * b*s*k + 4 * b*s + b*H * s)/N * e",
            case.block(chapter.kept("ring", cfg, ranks)), "B",
            "1/N of chapter 01's table, and the output of attention twice: for its own backward "
            "and, with heads side by side, as the input of o"),
        Question(
            "Without the window: how many times as many pairs of a query and a key has the last "
            "rank of this ring as any rank of a zig-zag? A plain core computes all of what lies on "
            "the diagonal.", "N / ((2*N+1)/4)", last / pairs, "times",
            "N blocks; and of a zig-zag three quarters of a block at hop 0, since its front chunk "
            "meets no other one, and half a block at each later hop"),
        Question(
            "If the sequence that such a zig-zag cuts were two documents of s/2 tokens: by what "
            "factor would the pairs of a rank become fewer?",
            "((2*N+1)/4) / ((N+1)/4)", pairs / halves, "times",
            "of 2N+1 quarters of a block N+1 are left: its front chunk meets chunks of the first "
            "document, and its back one those of the second alone"),
    ]  # fmt: skip
