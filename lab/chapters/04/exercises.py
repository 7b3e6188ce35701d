"""The exercises of chapter 04: f and g, heads that are cut, a vocabulary that is cut; the types of
f and g, in duality.py; products of sharded matrices, in sharding.py."""

import itertools
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from common import PRESETS, Config, Cut, draw_weights
from lab.classroom.exercise import TINY, Exercise, Run, Same, random
from lab.run.meters import ActivationMeter, CommMeter


def own(*shape):
    """Random numbers, others on each rank."""
    return random(dist.get_world_size(), *shape)[dist.get_rank()]


def backward_of(chapter, name):
    """Of f or g, on two ranks beside a third one: the gradient of x, and what backward sends."""
    two, one = dist.new_group([0, 1]), dist.new_group([2])
    x = random(2, 3).requires_grad_()
    out = getattr(chapter, name).apply(x, two if dist.get_rank() < 2 else one)
    meter = CommMeter()
    with meter:
        out.backward(random(2, 3) if name == "SumOut" else own(2, 3))
    return {"the gradient of x": x.grad, "what backward sends": sent(meter)}


def sent(meter):
    return {op: (counts["calls"], counts["bytes"]) for op, counts in meter.total.items()}


def loss_of_logits(chapter, vocab, columns, scale):
    """And its gradient, what is sent, and what is kept for backward."""
    logits = (scale * own(2, 3, columns)).requires_grad_()
    targets = torch.tensor([[0, vocab - 1, -100], [columns, columns - 1, 1]])
    meter, kept = CommMeter(), ActivationMeter([targets])
    with kept, meter:
        loss = chapter.VocabParallelLoss.apply(logits, targets, vocab, dist.group.WORLD)
    numbers = kept.bytes
    (loss / 7).backward()
    return {"the loss": loss, "its gradient": logits.grad, "what is sent": sent(meter),
            "bytes kept": numbers}


def backward_of_columns(chapter):
    """Of two linears of different widths, on two ranks."""
    x, group = own(2, 3, 4).requires_grad_(), dist.group.WORLD
    weights = [own(width, 4).requires_grad_() for width in (5, 2, 3)]
    outs = chapter.CopyInColumns.apply(x, group, *weights)
    torch.autograd.backward(outs, [own(*out.shape) for out in outs])
    return {"the gradient of x": x.grad, "those of the weights": [w.grad for w in weights]}


class ThreeKinds(nn.Module):
    """Logits of a part that ranks share, of one that is cut, and of one that all hold."""

    def __init__(self, group):
        super().__init__()
        self.shared, self.cut, self.whole = (nn.Parameter(random(4, 6)) for _ in range(3))
        self.shared.partial, self.shared.global_name = group, "shared"
        self.cut.cuts = (Cut(0, group.rank(), 2, group),)

    def forward(self, tokens):
        return sum(p[tokens] for p in self.parameters()) * (1 + dist.get_rank())


def plain_loss(logits, targets, vocab, group):
    """In place of VocabParallelLoss.apply."""
    return F.cross_entropy(logits[..., :vocab].flatten(0, 1), targets.flatten(), reduction="sum")


def step_of_three_kinds(chapter, clip):
    group, found = dist.group.WORLD, {}
    model = ThreeKinds(group)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    batches = [(torch.tensor([[0, 1, 2, 3]]), torch.tensor([targets]))
               for targets in ([1, 2, 3, 0], [-100, 4, -100, -100])]
    with mock.patch.object(chapter, "VocabParallelLoss", SimpleNamespace(apply=plain_loss)):
        for step in (1, 2):
            meter = CommMeter()
            with meter:
                loss, norm = chapter.train_step(model, optimizer, batches, 5, clip, 5, group)
            found |= {f"loss of step {step}": loss, f"norm of step {step}": norm,
                      f"what step {step} sends": sent(meter),
                      "loss.requires_grad": loss.requires_grad}
            found |= {f"{name}, after step {step}": p.detach().clone()
                      for name, p in model.named_parameters()}
    return found


def how_a_model_is_cut(chapter, variant, kv_heads, gated):
    """Each parameter's shape, cuts, and the ranks that sum its gradient; and what it computes."""
    cfg = Config(1, 16, 4, kv_heads, 4, 10, gated=gated, ffn=24)
    model = chapter.parallelize(chapter.gpt(cfg, seed=None), cfg, dist.group.WORLD, variant)
    draw_weights(model, 0, dtype=torch.float64)
    found = {"the sub-layers": [type(part).__name__ for part in (model.block1.attn,
                                                                 model.block1.mlp)],
             "logits": model(torch.tensor([[9, 1, 5, 0]]))}
    for p in model.parameters():
        partial = getattr(p, "partial", None)
        found[p.global_name] = [list(p.shape), [cut[:3] for cut in p.cuts],
                                partial and dist.get_process_group_ranks(partial)]
    return found


def traffic(chapter, *sizes):
    return chapter.traffic(TINY, *sizes)


def traffic_of_7b(chapter):
    return chapter.traffic(PRESETS["7b"], 3, 2, 8, 2, sums=4)


def ranks_that_pay(chapter, *machine):
    return chapter.ranks_that_pay(*machine)


def duals(duality):
    return {kind: duality.dual(kind) for kind in "RPVI"}


def types_of(duality, name):
    """The types and collectives of f or g, in both passes."""
    return duality.passes(*getattr(duality, name)())


def misfits(duality):
    return {f"{given} for {wanted}": duality.misfit(given, wanted) is not None
            for given, wanted in itertools.product("RPVI", repeat=2)}


def products(sharding):
    """The product's cut, for all cuts of two tensors and each contracted dimension."""
    cuts = {}
    for contracted, first, second in (("J", "IJ", "JK"), ("K", "IK", "KJ"), ("I", "JI", "IK")):
        for a, b in itertools.product((None, *first), (None, *second)):
            try:
                cut = sharding.product(a, b, contracted)
            except sharding.Forbidden:
                cut = "forbidden"
            cuts[f"{a} and {b}, over {contracted}"] = cut
    return cuts


def collectives(sharding):
    targets = None, "I", "K"
    return {f"{source} to {target}": sharding.collective(source, target)
            for source, target in itertools.product((*targets, sharding.PARTIAL), targets)}


def wires(sharding):
    operators = "all_gather", "reduce_scatter", "all_reduce", "slice"
    return {f"{operator}, {ranks} ranks": sharding.wire_bytes(operator, 960, ranks)
            for operator, ranks in itertools.product(operators, (1, 2, 8))}


MESH, SIZES = {"X": 2, "Y": 4}, {"I": 32, "J": 64, "K": 96}


def layout(x, y):
    return {"X": x, "Y": y}


def parts_of_tensors(sharding):
    cuts = [(None, None), ("I", None), (None, "I"), ("I", "I"), (sharding.PARTIAL, "I")]
    return {f"{tensor} along {x} and {y}": sharding.bytes_of(tensor, layout(x, y), SIZES, MESH, 2)
            for tensor, (x, y) in itertools.product("AC", cuts)}


def steps_of_a_way(sharding):
    """Of products that need steps before and after them. No other exercise's functions are used."""

    def cut(a, b, contracted="J"):
        return "partial" if (a, b, contracted) == ("p", "q", "J") else f"{a}·{b} over {contracted}"

    def move(tensor, source, target, sizes, mesh, width, name=None):
        return [f"{name or tensor} from {source} to {target}, {width} bytes"]

    with mock.patch.multiple(sharding, product=cut, move=move):
        way = sharding.way(layout("a", "d"), layout("b", "e"), layout("c", "f"),
                           [layout("p", "r"), layout("q", "s")], SIZES, MESH, 4)
    return way._asdict()


def cheapest_ways(sharding):
    """Of candidates that differ in what they repeat, in what they send, and in their steps."""

    def candidate(cut, *wires):
        steps = [sharding.Step("all_gather", "A", "Y", None, wire, wire) for wire in wires]
        return sharding.Way({}, {}, layout(None, cut), steps[:1], steps[1:])

    cases = [candidate(None, 1), candidate("K", 9)], [
        candidate("K", 5), candidate("K", 1, 2), candidate("K", 4)], [
        candidate("K", 1, 2, 0), candidate("K", 3), candidate("K", 1, 2)]
    chosen = []
    for case in cases:
        with mock.patch.object(sharding, "ways", return_value=case) as ways:
            way = sharding.cheapest(layout(None, "J"), layout(None, "K"), layout("I", None), SIZES,
                                    MESH, 4)
        chosen.append((way.c["Y"], way.wire, len(way.forward + way.backward), *ways.call_args.args))
    return chosen


def times_repeated(sharding):
    way = sharding.Way({}, {}, {"X": None, "Y": None, "Z": "I"}, [], [])
    mesh = {"X": 2, "Y": 4, "Z": 8}
    return {f"A along {x}, B along {y}": sharding.repeats(
        {"X": x, "Y": None, "Z": "I"}, {"X": None, "Y": y, "Z": None}, way, mesh)
        for x, y in itertools.product((None, "I"), (None, "K"))}


EXERCISES = [
    Exercise(
        "04.1", "CopyIn.backward", 1,
        "f has handed the same x to every rank, and each rank has a gradient from its own "
        "heads or hidden units alone. Give the whole gradient of x, the same on every rank.",
        ("If x goes into both y and z, how do the gradients of y and z become that of x?",
         "`gradient` is this rank's part of a sum over the ranks of ctx.group. backward gives "
         "one value for each argument of forward, and a group has no gradient."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Same(backward_of, "the gradient of f on two ranks, and on one", ("CopyIn",), 3)),
    ),
    Exercise(
        "04.2", "SumOut.backward", 1,
        "Every rank has put a partial output into the sum. Which gradient does a rank's part "
        "of a sum have, if the gradient of the sum is on every rank?",
        ("If z = x + y, what are dz/dx and dz/dy?",
         "The gradient of the sum is already on every rank: what is left to send?"),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3"),
         Same(backward_of, "the gradient of g on two ranks, and on one", ("SumOut",), 3)),
    ),
    Exercise(
        "04.3", "VocabParallelLoss.forward VocabParallelLoss.backward", 3,
        "Give the cross-entropy of logits of which each rank has its part of the vocabulary, "
        "summed over the valid targets, and its gradient. No exponential may overflow, and "
        "columns beyond `vocab` are padding. Bytes are counted too: send what the docstring "
        "says, and keep for backward the probabilities, the targets' columns (int64) and two "
        "masks (bool): which targets are this rank's, and which are valid.",
        ("The loss of a target needs three numbers: the largest logit, the sum of the "
         "exponentials, the target's logit. What does a rank know of each, and what must it "
         "contribute where the target is another rank's?",
         "Padding becomes -inf. One all_reduce finds the maximum, which is taken off the "
         "logits. Another one sums each rank's sum of exponentials, stacked on the target's "
         "logit, or on zero where the rank does not have it. The gradient is the probability, "
         "less 1 in the target's column on the rank that has it, and zero where the target is "
         "not valid."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --vocab 402"),  # 101, the first of
         Run(2, "--batch 2 --layers 1 --steps 2 --vocab 257 --lr 1e3"),     # a rank, is "e"
         Same(loss_of_logits, "a vocabulary of 5 on 2 ranks", (5, 3, 1), 2),
         Same(loss_of_logits, "a vocabulary of 4 on 3 ranks, logits of thousands", (4, 2, 2e3), 3)),
        "the vocabulary's loss",
    ),
    Exercise(
        "04.4", "CopyInColumns.backward", 2,
        "x has gone into all of the linears, and to all ranks. Give its gradient, summed over "
        "the ranks, and the gradient of each weight. The sum should be on its way while the "
        "weights' gradients are computed (the grader sees the numbers, not the time).",
        ("For y = x Wᵀ, the gradient of x is that of y times W, and the gradient of W is that "
         "of y, transposed, times x. Which of the two does another rank wait for?",
         "First add up gradient @ weight over the linears, and start the all_reduce with "
         "async_op=True. Then each weight's gradient is a matmul over all tokens of the "
         "batch. Wait for the handle before you return, None standing for the group."),
        (Run(4, "--variant overlap --batch 6 --micro-batch 2 --ignore 0.3"),
         Same(backward_of_columns, "three linears, on 2 ranks", (), 2)),
    ),
    Exercise(
        "04.5", "train_step", 2,
        "Take one step over all micro-batches: the gradient of the mean loss over the valid "
        "targets of the whole batch, the norm of the whole model's gradient, clipping, the "
        "update. Give the loss of the whole batch, detached, and the norm before clipping.",
        ("Which gradients are still partial sums after the last backward, and which ranks "
         "hold the gradient together, of which the norm is taken?",
         "Each micro-batch divides its sum by `valid`, so the losses add up, and so do the "
         "gradients. common.py has PartialSums, for kv heads that ranks share (make it before "
         "the last backward, and finish it after that), and grad_norm, which needs the group; "
         "PyTorch has clip_grads_with_norm_."),
        (Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --kv-heads 4"),
         Run(4, "--batch 6 --micro-batch 2 --ignore 0.3 --clip 0.1"),
         Same(step_of_three_kinds, "one parameter shared, one cut, one whole", (None,), 2),
         Same(step_of_three_kinds, "the same with clip 0.1", (0.1,), 2)),
    ),
    Exercise(
        "04.6", "traffic", 2,
        "Count what a rank sends in a step: the all_reduces of f and g, of the loss, of the "
        "norm (these two in float32 or better, whatever e is), and of the gradients of kv heads "
        "that ranks share. An all_reduce of n bytes over t ranks puts "
        "2 (t-1)/t · n on the wire. With recompute=\"full\", each block's forward runs again in "
        "backward, and stops once it has all that backward reads.",
        ("How many f and g are in a block, and how many outside of the blocks? Over how many "
         "ranks are the gradients of a shared kv head summed? And which of the sums in a block's "
         "forward does anything in its backward depend on?",
         "4 L + 2 sums of batch · seq · dim numbers in each micro-batch; two all_reduces for "
         "its loss, of one and of two numbers a token; once a step one number for the norm, "
         "unless a rank is alone. If t > kv_heads, one more, of k's and v's gradients for one "
         "head in every layer, over t / kv_heads ranks (or one in each layer, if they are more "
         "than common.ONE_BUCKET). Recomputing in full makes L more sums: "
         "the second norm reads what comes out of attention, and nobody reads what comes out of "
         "the MLP."),
        (Same(traffic, "traffic(tiny, 3, 2, 2, 8)", (3, 2, 2, 8)),
         Same(traffic, "traffic(tiny, 3, 2, 8, 2, \"none\", 4)", (3, 2, 8, 2, "none", 4)),
         Same(traffic, "traffic(tiny, 1, 4, 4, 2)", (1, 4, 4, 2)),
         Same(traffic, "traffic(tiny, 1, 4, 1, 2)", (1, 4, 1, 2)),
         Same(traffic, "traffic(tiny, 3, 2, 2, 8, \"full\")", (3, 2, 2, 8, "full")),
         Same(traffic_of_7b, "traffic(common.PRESETS['7b'], 3, 2, 8, 2, sums=4)")),
    ),
    Exercise(
        "04.7", "ranks_that_pay", 1,
        "Up to how many ranks does the all_reduce of an MLP's forward take no longer than its "
        "two matrix multiplications?",
        ("Write down both times for one token, and set them equal: the batch and the sequence "
         "fall out.",
         "They are 16 h² / (t·C) and 2 (t-1)/t · h·e / W seconds. Both are divided by t, so "
         "t - 1 is what is left of it."),
        (Same(ranks_that_pay, "ranks_that_pay(8192, 2, 989e12, 450e9)",
              (8192, 2, 989e12, 450e9)),
         Same(ranks_that_pay, "ranks_that_pay(4096, 4, 1e14, 5e10)", (4096, 4, 1e14, 5e10))),
    ),
    Exercise(
        "04.8", "parallelize", 2,
        "Cut the whole model: embedding, attention and MLP of each block, head. An MLP may have a "
        "gate, and more ranks than kv heads share them. Take the classes of the variant, and give "
        "the model back.",
        ("SwiGLU multiplies each unit of up by the same unit of the gate. Which part of the gate "
         "must a rank have, then, and which part of down?",
         "k and v are cut first, by share_kv_heads; if there are more ranks than kv heads, "
         "dist.new_subgroups makes the groups that hold the same head. q, k and v are the columns "
         "of attention and o its row; mlp.columns are those of an MLP, with a gate or without, and "
         "down its row. head.out is what VocabParallelHead replaces."),
        (Run(2, "--block llama --batch 2 --ignore 0.3"),
         Run(4, "--block llama --ffn 40 --variant overlap --batch 4 --micro-batch 2"),
         Run(4, "--kv-heads 4 --batch 2 --recompute full"),
         Same(how_a_model_is_cut, "a gated model of 2 kv heads", ("overlap", 2, True), 4),
         Same(how_a_model_is_cut, "a model of 4 kv heads", ("megatron", 4, False), 4)),
        "the whole model, with a gated MLP",
    ),
]

BESIDE = {"lab/chapters/04/duality": [
    Exercise(
        "duality.1", "dual", 1,
        "Which type does the gradient of a tensor have that is R, P, V or I?",
        ("All ranks have the same x, and each multiplies it by its own matrix. How much of x's "
         "gradient does one rank compute?",
         "R and P are each other's dual. A tensor that varies has a gradient that varies, and for "
         "an I all ranks compute the same gradient."),
        (Same(duals, "the duals of R, P, V and I"),),
    ),
    Exercise(
        "duality.2", "copy_in", 1,
        "Give f's type: (that of its input, that of its output). Its backward must be an "
        "all_reduce, from P to I.",
        ("Before f all ranks compute the same, and after it each has its own heads. Which type "
         "does x have before it, and after it?",
         "Backward's input has the dual of the output's type, and that's P. Backward's output has "
         "the dual of the input's type, and that's I."),
        (Same(types_of, "the passes of copy_in", ("copy_in",)),),
    ),
    Exercise(
        "duality.3", "sum_out", 1,
        "Give g's type. After it all ranks compute the same, and backward has nothing to send.",
        ("The output is the same on all ranks, so it could be R or I. For which of them would "
         "backward have to communicate?",
         "If the output were R, its gradient would be P, and somebody would have to sum it. The "
         "gradient of an I is whole already."),
        (Same(types_of, "the passes of sum_out", ("sum_out",)),),
    ),
    Exercise(
        "duality.4", "gather_in scatter_out", 1,
        "Give the types of f and g of chapter 05, where ranks have different tokens between the "
        "sub-layers.",
        ("Which tokens does a rank have between the sub-layers, and which inside of one?",
         "f gathers what varies, and each rank uses all tokens with its own heads: R. g takes the "
         "terms of a sum to something that varies."),
        (Same(types_of, "the passes of gather_in", ("gather_in",)),
         Same(types_of, "the passes of scatter_out", ("scatter_out",))),
        "f and g along the sequence",
    ),
    Exercise(
        "duality.5", "misfit", 2,
        "Find the type error: a gradient has the type `given`, where `wanted` is needed. Give None "
        "if it fits, and otherwise a sentence that explains the error.",
        ("A gradient that's the same on all ranks fits where ranks may differ. Where does a P fit?",
         "A gradient that should be whole can't be V or P, since its sum is missing; nor can a P "
         "be a V. One that will be summed can't be whole: each rank would add it once more."),
        (Same(misfits, "for which pairs of types misfit gives a sentence"),),
    ),
], "lab/chapters/04/sharding": [
    Exercise(
        "sharding.1", "product", 1,
        "An axis cuts one tensor along dimension a, and another along b (None: not at all). Along "
        "which dimension does it cut their product? Give PARTIAL if the ranks have terms of a "
        "sum, and raise Forbidden if they couldn't multiply their parts.",
        ("An axis of two ranks cuts the contracted dimension of both tensors. What does a rank get "
         "when it multiplies its parts?",
         "Both along the contracted dimension: PARTIAL. Only one of them: forbidden. One other "
         "dimension of each: forbidden as well. Else the product is cut like the cut tensor."),
        (Same(products, "the product's cut"),),
    ),
    Exercise(
        "sharding.2", "collective wire_bytes", 1,
        "`collective`: the name of what takes a tensor along an axis from one cut to another; None "
        "if there's nothing to do. `wire_bytes`: what a rank sends in a ring, where payload is "
        "the bytes of the whole tensor along that axis.",
        ("Ranks hold terms of a sum. What do they do if each needs all of it, or a part of it?",
         "all_reduce, and reduce_scatter, which is its first half. all_gather makes a cut tensor "
         "whole, a slice cuts a whole one, and all_to_all cuts another dimension. A ring sends "
         "(n-1)/n of the bytes in n-1 hops, and an all_reduce does that twice."),
        (Same(collectives, "the collective"), Same(wires, "bytes on the wire")),
        "from one cut to another",
    ),
    Exercise(
        "sharding.3", "bytes_of", 1,
        "Bytes of a rank's part of a tensor on a mesh. layout: {axis: the dimension that it cuts}.",
        ("How many numbers does the whole tensor have, and which axes make a rank's part smaller?",
         "DIMENSIONS shows which of the sizes to multiply. Divide by the ranks of each axis that "
         "cuts. PARTIAL and None cut nothing."),
        (Same(parts_of_tensors, "bytes of a part"),),
    ),
    Exercise(
        "sharding.4", "way", 2,
        "All Steps of C = A · B and its backward. Move A and B to the layouts in which they're "
        "multiplied, and their product to c. In backward dC starts in the layout c, and dA and dB "
        "must end in those of A and B.",
        ("dA is dC · Bᵀ. Which dimension is contracted, and which layouts do dC and B have, once "
         "dC has been moved?",
         "dC moves to the layout that the product had, where a term of a sum has the gradient of "
         "the sum. Then multiplied(.., .., \"K\") is the layout of dA, and with \"I\" that of "
         "dB. Each moves to where A and B are."),
        (Same(steps_of_a_way, "from a and b, at p and q, to c"),),
    ),
    Exercise(
        "sharding.5", "repeats cheapest", 2,
        "`repeats`: how many ranks do each multiplication on a Way, because an axis that cuts A or "
        "B doesn't cut the product. `cheapest`: of all `ways`, one that repeats none if there is "
        "one; of those, the one that sends least; of those, the one with the fewest Steps.",
        ("If both A and B are gathered over an axis of 4 ranks, how often is each number of C "
         "computed?",
         "Multiply the ranks of the axes that cut A or B and have None in one.c. min takes a key, "
         "which may be a tuple: repeats first, then one.wire, then the number of Steps."),
        (Same(times_repeated, "how often a multiplication is done"),
         Same(cheapest_ways, "the cut of C, bytes on the wire, steps")),
        "the cheapest way",
    ),
]}
