"""Predictions about chapter 11: what Muon keeps, sends and computes under ZeRO."""

import math
from itertools import chain

import common
from lab.chapters.question import Case, Question, on_the_wire, shape

BLOCK = "10*h*h + 2*h*k"        # numbers in the matrices of a block: q and o, k and v, up and down
WORK = "48*h*h*h + 8*k*k*h + 4*k*k*k"       # FLOPs of one step of Newton-Schulz on them


def predictions(pick):
    ranks, m, b = pick(2, 4, 8), pick(1, 2), pick(1, 2)
    layers = pick(2, 3, 4) if ranks == 2 else pick(ranks // 2, 4)   # as many matrices to each owner
    case = Case("11_muon", ranks, "N", **shape(pick, layers=layers), batch=ranks * m * b,
                micro_batch=b, variant=pick("deal", "gather", "owner"), zero=pick(1, 2),
                dtype=pick("float32", "float64"))
    chapter, args, e, way = case.chapter, case.args, case.e, case.args.variant
    by_owner, model = way == "owner", common.gpt(case.cfg, seed=None)
    units = chapter.layout(model, ranks, by_owner)
    shapes = [p.shape for p in model.parameters() if chapter.is_matrix(p)]
    costs, of_many = (chapter.step_costs(shapes, n) for n in (ranks, len(shapes)))
    flops = costs["gather"][1]

    # Of a block, rank 0 has both norms if it owns them, or if its part reaches beyond attention.
    norms = 4 if by_owner or ranks == 2 else 2              # tensors: weights and biases
    own = f"L * ({BLOCK})/N" if by_owner else f"L * (({BLOCK} + 4*h)/N - {norms}*h)"
    runs = runs_of_rank_0(chapter, units)
    other = {"deal": "gather", "gather": "deal"}.get(way) or pick("gather", "deal")
    return case, [
        Question(
            "How many bytes of optimizer states does rank 0 keep?"
            + " (All norms of blocks are rank 0's.)" * by_owner,
            f"e * {own} + 2*e * ({norms}*L*h + (2*V*h + 2*h)/N) + 4 * ({norms}*L + 4)",
            sum(e * size if is_matrix else 2 * e * size + 4 for size, is_matrix in runs), "B",
            "a momentum for what it has of matrices; two moments for its part of the embedding and "
            f"the head, and for {'both norms' if norms == 4 else 'the first norm'} of each block; "
            "and 4 bytes for AdamW's step count, for what it has of each of these parameters",
            "optimizer states"),
        on_the_wire_of_rank_0(case, units, own),
        Question(
            "How many bytes would a rank send on the wire in a step, more than under AdamW, with "
            f"--variant {other}, in the mean of all ranks? (Norms and padding do not count.)",
            {"gather": f"(N-1)/N * L * ({BLOCK}) * e",
             "deal": f"2 * (N-1)/N * L * ({BLOCK})/N * e"}[other], costs[other][0] * e, "B",
            {"gather": "each rank gathers all updates, but for its own part",
             "deal": "an N-th of all updates goes to owners, and as much comes back"}[other],
            also="B"),
        Question(
            "How many FLOPs does Newton-Schulz take in a step, on the busiest rank?",
            f"5 * L * ({WORK})" + "/N" * (way != "gather"), costs[way][1], "FLOP",
            "five times 4·m²·n + 2·m³ of each matrix, m its smaller side: 6·h³ for q and for o, "
            "18·h³ for up and for down; " + {"gather": "each rank takes all of them"}.get(
                way, "here the owners have equally many of each shape"),
            "FLOPs of a step, Newton-Schulz", also="B"),
        pick(
            Question(
                "If each of the 6·L matrices of blocks had a rank of its own: how many times the "
                "mean would the busiest rank compute in Newton-Schulz?",
                f"6 * 18*h*h*h / ({WORK})", of_many["owner"][1] / flops * len(shapes), "times",
                "it has an up or a down: no rank can have less than the largest matrix", also="L"),
            Question(
                "If each rank orthogonalizes all: how much does that add to its matmuls with the "
                "matrices of blocks, forward and backward?",
                f"5 * ({WORK}) / (6 * B*s/N * ({BLOCK}))",
                flops / (6 * args.batch * case.cfg.seq / ranks * sum(map(math.prod, shapes))), "%",
                "a rank computes 6 FLOPs with each number for each of its own tokens", also="L")),
    ]  # fmt: skip


def runs_of_rank_0(chapter, units):
    """[(how many numbers it has of a parameter, whether that is a matrix)]"""
    runs = []
    for parameters, (left, *_) in units:
        for p in parameters:
            runs.append((min(left, p.numel()), chapter.is_matrix(p)))
            left -= runs[-1][0]
    return [run for run in runs if run[0]]


def on_the_wire_of_rank_0(case, units, own):
    """In the operators of the variant. own: what it has of matrices, in letters."""
    chapter, args, e, share = case.chapter, case.args, case.e, (case.ranks - 1) / case.ranks
    traffic = chapter.traffic(units, args.zero, case.ranks, case.micro_batches, (e, e))
    blocks = [unit for unit in units if any(map(chapter.is_matrix, unit[0]))]
    if args.variant == "owner":
        reduces, how_often = (1, "once a step") if args.zero == 1 else ("M", "in each micro-batch")
        return Question(
            "How many bytes does a rank send on the wire in a step, in reduces and broadcasts "
            "together?", f"({reduces} + 1) * L * ({BLOCK} + 4*h) * e",
            on_the_wire(traffic, "reduce", "broadcast"), "B",
            f"all gradients of blocks, {how_often}, and once a step what was updated; each message "
            "counts in full", "reduce, on the wire + broadcast, on the wire", also="N")
    if args.variant == "gather":
        updates = e * sum(sum(sizes) for _, sizes in blocks)
        return Question(
            "How many bytes does a rank send on the wire in a step, in all_gathers of parameters "
            "and of updates together?", f"(N-1)/N * (Ψ + L * ({BLOCK} + 4*h)) * e",
            on_the_wire(traffic, "all_gather") + share * updates, "B",
            "once a step all that was updated, and the updates of all blocks, in which norms are "
            "zeros", "all_gather, on the wire", also="M")
    there = sum(size for size, is_matrix in runs_of_rank_0(chapter, units) if is_matrix)
    matrices = filter(chapter.is_matrix, chain.from_iterable(unit[0] for unit in blocks))
    back = sum(p.numel() for p in matrices) / case.ranks     # as many to each owner
    return Question(
        "How many bytes does rank 0 send on the wire in a step, in the two all_to_alls together?",
        f"(N-1)/N * ({own} + L * ({BLOCK})/N) * e", share * (there + back) * e, "B",
        "there what its shards have of matrices, and back what it has orthogonalized; an N-th of "
        "either stays", "all_to_all, on the wire", also="M")
