"""Predictions about chapter 06: what a ring sends and computes."""

from lab.classroom.questions import Case, Question, on_the_wire, shape


def predictions(pick):
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    case = Case("06_context_parallel", ranks, "N", **shape(pick, seq=pick(64, 128)), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, cfg, e = case.chapter, case.cfg, case.e
    sent = chapter.traffic(cfg, "zigzag", m, b, ranks, e)
    pairs = chapter.pairs("zigzag", 0, ranks, cfg.seq)
    last = chapter.pairs("ring", ranks - 1, ranks, cfg.seq)
    longer = chapter.pairs("zigzag", 0, 2 * ranks, 2 * cfg.seq)
    return case, [
        Question(
            "How many bytes of keys and values, and of their gradients, does a rank send around "
            "the ring in a step?", "3 * M * L * (N-1)/N * 2 * b*s*k * e",
            on_the_wire(sent, "send"), "B",
            "keys and values go around in forward and in backward, their gradients in backward",
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
            case.block(chapter.kept("zigzag", cfg, ranks)), "B",
            "1/N of chapter 01's table, and the output of attention twice: for its own backward "
            "and, with heads side by side, as the input of o"),
        Question(
            "A plain core computes all of a rank's own block. How many times as many pairs of a "
            "query and a key has the last rank of a ring (--variant ring) as any rank of a "
            "zig-zag?", "N / ((N-1)/2 + 1)", last / pairs, "times",
            "N blocks; and one at home and half a block at each later hop"),
        Question(
            "Twice as many ranks, and a sequence twice as long: by what factor does the number of "
            "pairs change that a rank of a zig-zag computes?",
            "((2*N-1)/2 + 1) / ((N-1)/2 + 1)", longer / pairs, "times",
            "blocks are as large as before, but there are twice as many keys to meet"),
    ]  # fmt: skip
