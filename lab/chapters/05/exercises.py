"""The exercises of chapter 05: what is gathered along the sequence, and what is kept."""

from unittest import mock

import torch
import torch.distributed as dist

from common import Config, draw_weights
from lab.classroom.exercise import TINY, Exercise, Run, Same, random
from lab.run.meters import ActivationMeter, CommMeter


def own(*shape):
    """Random numbers, others on each rank."""
    return random(dist.get_world_size(), *shape)[dist.get_rank()]


def gradients_of(chapter, name, length, *widths):
    """Of x, and of weights of these widths; and what backward sends."""
    x = own(2, length, 4).requires_grad_()
    weights = [own(width, 4).requires_grad_() for width in widths]
    outs = getattr(chapter, name).apply(x, dist.group.WORLD, *weights)
    outs = outs if widths else (outs,)
    meter = CommMeter()
    with meter:
        torch.autograd.backward(outs, [own(*out.shape) for out in outs])
    return {"the gradient of x": x.grad, "those of the weights": [w.grad for w in weights],
            "what backward sends": {op: counts["calls"] for op, counts in meter.total.items()}}


def around(chapter):
    """Whose chunk comes, and how many sends have begun by then."""
    meter, found = CommMeter(), []
    with meter:
        for owner, chunk in chapter.ring_gather(own(2, 3), dist.group.WORLD):
            begun = meter.total.get("send", {"calls": 0})["calls"]
            found.append((owner, chunk.clone(), begun))
    return found


def sum_around(chapter):
    """Of parts that come from a table, which stays as it is; and which are asked for, when."""
    ranks, asked, meter = dist.get_world_size(), [], CommMeter()
    table = own(ranks, 2, 3)
    before = table.clone()

    def part_of(owner):
        asked.append((owner, meter.total.get("send", {"calls": 0})["calls"]))
        return table[owner].clone()

    with meter:
        total = chapter.ring_sum(part_of, dist.group.WORLD)
    return {"the sum": total, "parts, and how many sends had begun": asked,
            "whether the parts stay": torch.equal(table, before)}


def everyones(x, group):
    """In place of a ring: the chunk of each rank, this rank's first, then those before it."""
    every = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(every, x.contiguous(), group=group)
    for back in range(group.size()):
        yield (group.rank() - back) % group.size(), every[group.rank() - back]


def sum_of_all(part_of, group):
    """In place of a ring: every rank's parts are summed on all of them."""
    parts = torch.stack([part_of(owner) for owner in range(group.size())])
    dist.all_reduce(parts, group=group)
    return parts[group.rank()]


def columns_of_a_ring(chapter):
    """Outputs, gradients, and the bytes that are kept."""
    x, weights = own(2, 2, 4).requires_grad_(), [own(5, 4).requires_grad_() for _ in "ab"]
    meter = ActivationMeter([x, *weights])
    with mock.patch.multiple(chapter, ring_gather=everyones, ring_sum=sum_of_all):
        with meter:
            outs = chapter.RingColumns.apply(x, dist.group.WORLD, *weights)
        kept = meter.bytes
        torch.autograd.backward(outs, [own(*out.shape) for out in outs])
    return {"outputs": list(outs), "bytes kept beside x and the weights": kept,
            "the gradient of x": x.grad, "those of the weights": [w.grad for w in weights]}


def how_a_model_is_cut(chapter, variant, kv_heads):
    """Each parameter's shape, cuts, and the ranks that sum its gradient; and what it computes."""
    cfg = Config(1, 16, 4, kv_heads, 4, 10)
    model = chapter.parallelize(chapter.gpt(cfg, seed=None), cfg, dist.group.WORLD, variant)
    draw_weights(model, 0, dtype=torch.float64)
    tokens = chapter.my_tokens(torch.tensor([[9, 1, 5, 0]]), dist.group.WORLD)
    meter, found = ActivationMeter([tokens]), {}
    with meter:
        found["logits"] = model(tokens)
    found["bytes kept for backward"] = meter.bytes
    for p in model.parameters():
        partial = getattr(p, "partial", None)
        found[p.global_name] = [list(p.shape), [cut[:3] for cut in p.cuts],
                                partial and dist.get_process_group_ranks(partial)]
    return found


def kept(chapter, *how):
    return chapter.kept(TINY, *how)


def traffic(chapter, *sizes):
    return chapter.traffic(TINY, *sizes)


EXERCISES = [
    Exercise(
        "05.1", "GatherIn.backward ScatterOut.backward", 1,
        "In forward, f gathers the sequence, and g sums it over the ranks and scatters it. "
        "Give the gradients of what went in: for f this rank's part of the sequence, for g "
        "all of it.",
        ("A rank's part of the sequence has gone to all ranks through f, so all of them have a "
         "gradient for it. Through g, a rank's partial output went into every rank's part.",
         "The two are conjugates: each sends in backward what the other one sends in forward."),
        (Run(4, "--variant kept --batch 6 --micro-batch 2 --ignore 0.3"),
         Same(gradients_of, "the gradient of f", ("GatherIn", 2), 3),
         Same(gradients_of, "the gradient of g", ("ScatterOut", 6), 3)),
        "the gradients of f and g",
    ),
    Exercise(
        "05.2", "GatherInColumns.backward", 2,
        "Give the gradients of this rank's part of x, and of each weight. Nothing but this "
        "rank's part of x has been kept. Both transfers should be on their way while something "
        "is computed (the grader sees the numbers, not the time).",
        ("Which of the gradients needs the whole input, and which does without? What can be "
         "computed while the one transfer, and then the other, is on its way?",
         "Start to gather x; add up gradient @ weight over the linears; start to "
         "reduce_scatter that sum. Now wait for x: each weight's gradient is a matmul over all "
         "tokens of the batch. Wait for the other at the end."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Same(gradients_of, "three linears, on 2 ranks", ("GatherInColumns", 2, 5, 2, 3), 2)),
    ),
    Exercise(
        "05.3", "ring_gather", 2,
        "Yield (rank, its chunk) for every rank of the group, beginning with this rank's own. "
        "Between two of them, one hop of the ring: the next chunk should arrive while the "
        "caller works with this one.",
        ("A generator stands still at its yield, and the caller works meanwhile. So what must "
         "have been started before the yield, and what is left for after it?",
         "Start send_on, yield the chunk that is here, wait for the next. What comes is from "
         "the rank before, so at hop h it is the chunk of rank - h, modulo t. The last chunk "
         "is only yielded."),
        (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),
         Same(around, "(rank, its chunk, sends begun) on 4 ranks", (), 4),
         Same(around, "(rank, its chunk, sends begun) on 2 ranks", (), 2)),
    ),
    Exercise(
        "05.4", "ring_sum", 2,
        "Give the sum over the ranks of part_of(owner) for this rank's own chunk, in t-1 hops. "
        "Each part should be computed while the sum, to which it is added, travels.",
        ("A sum that is to end here after t-1 hops has begun at the next rank. So whose sum "
         "does this rank begin?",
         "It begins that of the rank before it, and at hop h it adds to that of rank - 1 - h, "
         "modulo t. In the last hop this is its own."),
        (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),
         Same(sum_around, "the sum on 4 ranks", (), 4),
         Same(sum_around, "the sum on 2 ranks", (), 2)),
    ),
    Exercise(
        "05.5", "RingColumns.forward RingColumns.backward", 3,
        "Do what GatherInColumns does, with ring_gather and ring_sum in place of the "
        "collectives: each chunk is multiplied while the next one arrives, and the gradient of "
        "x is computed chunk by chunk while the sum travels. Keep x and the weights for "
        "backward, nothing else.",
        ("In forward, the outputs of a chunk have a place in the sequence: that of its owner. "
         "In backward, which of the two gradients takes chunks of x as they come, and which is "
         "a sum over ranks?",
         "forward: for every weight a list of t outputs, filled at the owner's place, and "
         "concatenated along the sequence. backward: cut the gradients into chunks. "
         "part_of(owner) adds up gradient chunk @ weight over the linears; each weight's "
         "gradient adds up gradient chunkᵀ @ x chunk, as chunks of x come around again."),
        (Run(4, "--variant ring --batch 6 --micro-batch 2 --ignore 0.3"),
         Same(columns_of_a_ring, "two linears, on 3 ranks", (), 3)),
        "RingColumns",
    ),
    Exercise(
        "05.6", "parallelize", 2,
        "Cut every block's attention and MLP with share_kv_heads and sequence_parallel (and "
        "SUB_LAYERS), and give each parameter whose gradient is a partial sum the group over "
        "which it is to be summed, as p.partial. The group for share_kv_heads, of ranks with "
        "the same kv head, is made as in chapter 04: if there are more ranks than kv heads.",
        ("A parameter's gradient is a partial sum if the rank holds all of the parameter, but "
         "sees a part of the tokens. Which parameters of the model are that?",
         "dist.new_subgroups makes groups of neighbours, here of t // kv_heads ranks. Of "
         "the LayerNorms (two in a block, and the last one), the embedding and the head, all "
         "parameters are partial: a LayerNorm has two."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Same(how_a_model_is_cut, "a model of 2 kv heads", ("megatron", 2), 4),
         Same(how_a_model_is_cut, "a model of 4 kv heads", ("kept", 4), 4)),
    ),
    Exercise(
        "05.7", "kept", 1,
        "Which share of each of chapter 01's classes of activations does a rank keep? The "
        "classes are inside, core, keys and values, outside, inputs (of the sub-layers), "
        "positions (RoPE's tables), logits and ids.",
        ("Is there anything left that all ranks keep alike?",
         "RoPE's tables are whole, and in the variant `kept` the inputs of the sub-layers. Of "
         "keys and values a rank has 1/t, but no less than one of the kv heads."),
        (Same(kept, "kept(tiny, 4)", (4,)),
         Same(kept, "kept(tiny, 4, 'kept')", (4, "kept")),
         Same(kept, "kept(tiny, 8, 'ring')", (8, "ring"))),
    ),
    Exercise(
        "05.8", "traffic", 2,
        "Count what a rank sends in a step: all_gathers and reduce_scatters of f and g (in a ring "
        "sends, in their place), and all_reduces of partial gradients, of the norm, and of the "
        "gradients of kv heads that ranks share. With --recompute full, what is computed again is "
        "sent again, up to the last tensor that backward reads.",
        ("A block has two sub-layers, each with an f and a g. Which of the four does backward "
         "need again if nothing but the block's input was kept? Whose output does it never read?",
         "4 gathers and 4 scatters a block and micro-batch; 2 gathers more if the input of the "
         "linears is not kept. Recomputed, 2 gathers and 1 scatter more: the MLP's scatter ends "
         "the block, and the residual sum behind it keeps nothing. A ring sums while it "
         "multiplies, and the multiplication's inputs are kept, so there it is 2."),
        (Same(traffic, "traffic(tiny, 3, 2, 4, 8)", (3, 2, 4, 8)),
         Same(traffic, "traffic(tiny, 3, 2, 8, 2, 'kept', 'full', 4)",
              (3, 2, 8, 2, "kept", "full", 4)),
         Same(traffic, "traffic(tiny, 1, 4, 4, 4, 'ring', 'full')",
              (1, 4, 4, 4, "ring", "full")),
         Same(traffic, "traffic(tiny, 1, 4, 2, 4, 'megatron', 'selective')",
              (1, 4, 2, 4, "megatron", "selective"))),
    ),
]
