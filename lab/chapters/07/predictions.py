"""Predictions about chapter 07: a schedule's bubble, and what a rank has."""

from lab.chapters.question import Case, Question, on_the_wire, shape
from lab.run import anatomy
from lab.run.words import count


def predictions(pick):
    variant = pick("1f1b", "afab", "interleaved", "zb-h1", "dualpipe", "dualpipe-v")
    ranks = 4 if variant == "dualpipe" else pick(2, 4)      # two have no bubble in dualpipe
    deep, m, b = variant in ("interleaved", "dualpipe-v"), ranks * pick(2, 4), pick(1, 2)
    case = Case("07_pipeline_parallel", ranks, "p", variant=variant,
                **shape(pick, layers=ranks * (2 if deep else pick(1, 2))), batch=m * b,
                micro_batch=b, dtype=pick("float32", "float64"))
    chapter, args, cfg, e = case.chapter, case.args, case.cfg, case.e
    rank, (schedule, cuts) = pick(*range(ranks)), chapter.plan(args, ranks)
    slices = schedule.ranks.count(rank)
    modules = [module for stage, owner in enumerate(schedule.ranks) if owner == rank
               for module in range(*cuts[stage % schedule.depth])]
    held = anatomy.state_bytes(args, {"parameters": {}, "modules": modules}, e)["parameters"]
    blocks = [module for module in modules if 0 < module <= cfg.layers]
    neighbours = (rank > 0) + (rank < ranks - 1)
    case.sizes |= {"m": m, "r": rank, "n": neighbours, "l": len(blocks)}
    tables = modules.count(0) + modules.count(cfg.layers + 1)
    ends = f" + {tables} * V*h" * (tables > 0) + " + 2*h" * (cfg.layers + 1 in modules)
    also = {0: "the embedding", cfg.layers + 1: "the head with its LayerNorm"}
    stages = ", ".join([count(len(blocks), "block"),
                        *[also[module] for module in modules if module in also]])

    def row(name):
        """Of the report, which is about rank 0."""
        return name if rank == 0 else ""

    message = b * cfg.seq * cfg.dim * e
    wait = {"interleaved": "({p}-1)/2 / m", "zb-h1": "({p}-1)/3 / m",
            "dualpipe": "({p}/2-1) * 2/3 / m", "dualpipe-v": "({p}-1)/2 * 2/3 / m"}
    wait = wait.get(variant, "({p}-1) / m")
    alive = {"1f1b": "p - r", "afab": "m", "interleaved": "2*(p-1-r) + p + 1", "zb-h1": "p",
             "dualpipe": "p + 1", "dualpipe-v": "2*p + 1"}
    messages = {"interleaved": "(2 + n)", "dualpipe-v": "2 * n"}.get(variant, "n")
    bubbles = [chapter.bubble(variant, p, m, slices) for p in (ranks, 2 * ranks)]
    named = f"Schedule {variant}" + ", with 2 slices on a rank" * (variant == "interleaved")
    return case, [
        Question(
            f"{named}, and F, B and W take equally long: how large is the bubble, as a share of "
            "the work?", wait.format(p="p"), bubbles[0], "%",
            "the lesson's longest wait of a rank, over m (F + B + W)",
            "bubble over work if F = B = W, simulated"),
        Question(
            f"{named}: how many micro-batches does rank {rank} have alive, at the most? (In each "
            "of its stages they count once.)", alive[variant],
            chapter.most_alive(variant, rank, ranks, m, slices), "micro-batches",
            "the lesson's table: from F to BW, or to W",
            row("micro-batches alive, at the most"), also="p m r"),
        Question(
            f"{named}: how many bytes does rank {rank} send in a step, to its neighbours in the "
            "pipeline?", f"m * {messages} * b*s*h * e",
            on_the_wire(chapter.traffic(variant, rank, ranks, m, slices, message, 0, e), "send"),
            "B", "an activation or a gradient of (b, s, h), over each cut beside its stages",
            row("send, on the wire"), also="p r"),
        Question(
            f"How many bytes do the parameters of rank {rank} take? It holds {stages}.",
            f"(l * (10*h*h + 2*h*k + 4*h){ends}) * e", held, "B",
            "q, o, up and down; k and v; two LayerNorms in a block", row("parameters"),
            also="p r"),
        Question(
            "Twice as many ranks take the same micro-batches: by what factor does the bubble "
            "change?", f"({wait.format(p='2*p')}) / ({wait.format(p='p')})",
            bubbles[1] / bubbles[0], "times", "more ranks wait for the first micro-batch"),
    ]  # fmt: skip
