"""The exercises of chapter 08: routing, balance, dispatch and return, places of experts."""

from types import SimpleNamespace
from unittest import mock

import torch

from lab.classroom.exercise import TINY, Exercise, Run, Same, random


def mixture(chapter, kind, **more):
    """Of 4 experts of width 8, with parameters that are not small."""
    sizes = vars(TINY) | {"dim": 8, "experts": 4, "balance_weight": 0.0} | more
    moe = kind(chapter.Mixture(**sizes))
    for p in moe.parameters():
        p.data.copy_(random(*p.shape))
    return moe.double()


def balance_of_equal_picks(chapter):
    picks = torch.tensor([[[0], [1], [0], [1]]] * 3)
    return chapter.balance_loss(torch.full((3, 4, 2), 0.5), picks)


def balance_loss(chapter):
    scores = random(3, 5, 4).softmax(-1)
    return chapter.balance_loss(scores, chapter.best(random(3, 5, 4), 2))


def gradient_of_balance(chapter):
    scores = random(3, 5, 4).softmax(-1).requires_grad_()
    loss = chapter.balance_loss(scores, chapter.best(random(3, 5, 4), 2))
    return torch.autograd.grad(loss, scores)[0]


def route(chapter, k, **more):
    moe = mixture(chapter, chapter.MoE, top_k=k, **more)
    chosen, gates = moe.route(random(2, 5, 8))[:2]
    (gates * random(2, 5, k)).sum().backward()
    return {"chosen": chosen, "gates": gates.detach(), "gradient": moe.router.weight.grad}


def route_without_balance(chapter):
    return route(chapter, 2, balance_weight=0.0)


def route_with_balance(chapter):
    return route(chapter, 1, balance_weight=0.5, sequences=6)


def route_with_bias(chapter):
    moe = mixture(chapter, chapter.MoE, top_k=2, balance_weight=0.0)
    moe.bias.copy_(torch.tensor([0, 1, -1, 0]))
    chosen, gates = moe.route(random(2, 5, 8))[:2]
    return {"chosen": chosen, "gates": gates.detach()}


def gradient_of_z_loss(chapter):
    return route(chapter, 2, z_loss=0.5, sequences=6)["gradient"]


def dtypes_in_bfloat16(chapter):
    moe = mixture(chapter, chapter.MoE, top_k=2).bfloat16()
    return [each.dtype for each in moe.route(random(2, 5, 8).bfloat16())]


def through_experts(moe, x, chosen, gates):
    out = moe.through_experts(x, chosen, gates)
    (out * random(*x.shape)).sum().backward()
    return {"out": out.detach(), "x": x.grad, "gates": gates.grad, "up": moe.up.grad,
            "down": moe.down.grad}


def on_one_rank(chapter):
    moe, x = mixture(chapter, chapter.MoE, top_k=2), random(2, 5, 8).requires_grad_()
    chosen = chapter.best(random(2, 5, 3), 2)           # nobody picks the last one
    return through_experts(moe, x, chosen, random(2, 5, 2).requires_grad_())


def with_places(chapter):
    moe = mixture(chapter, chapter.WithPlaces, top_k=2, places=2)
    x = random(3, 5, 8).requires_grad_()
    chosen = chapter.best(random(3, 5, 4), 2)
    found = through_experts(moe, x, chosen, random(3, 5, 2).requires_grad_())
    return found | {"dropped": moe.dropped}


def moved_biases(chapter):
    sizes = vars(TINY) | {"layers": 2, "dim": 16}
    model = chapter.mixture_gpt(chapter.Mixture(**sizes, experts=4, bias_speed=0.25))
    mixtures = [block.mlp for block in model[1:-1]]
    for i, moe in enumerate(mixtures):
        moe.load.copy_(torch.tensor([5.0, 1, 0, 2]) + i)
    return {"loads": chapter.move_biases(model), "biases": [moe.bias for moe in mixtures],
            "counts": [moe.load for moe in mixtures]}


def traffic(chapter, variant, ranks, recompute="none", **more):
    """Of two ranks that share experts, and two micro-batches on each."""
    cfg = chapter.Mixture(**vars(TINY) | {"layers": 2, "places": 40} | more)
    args = SimpleNamespace(model=cfg, variant=variant, ep=2, batch=4 * ranks, micro_batch=2,
                           dtype="float32", precision="bf16", recompute=recompute)
    return chapter.traffic(args, ranks, [([300, 212], [280, 300])] * 4)


def traffic_of_rows(chapter, recompute):
    return traffic(chapter, "dropless", 4, recompute)


def traffic_with_places(chapter, recompute):
    return traffic(chapter, "capacity", 2, recompute)


def traffic_of_cut_experts(chapter, recompute, shared):
    return traffic(chapter, "tensor", 2, recompute, shared_expert=shared)


def crossing(chapter):
    """Two all_to_alls, of which b sets out before a arrives: what starts and is waited for when, in
    forward and then in backward, and the gradients."""
    said, rows = [], {name: random(2, 4).requires_grad_() for name in "ab"}

    def start(given, sent, received, name, under_way):
        said.append(f"{name} starts with {len(given)} rows")
        handle = SimpleNamespace(wait=lambda: said.append(f"{name} is waited for"))
        out = given.new_full((sum(received), 4), given.sum().item())
        under_way.append((handle, out, given))
        return out

    trips = {name: ([2], [3], name, []) for name in rows}
    with mock.patch.object(chapter, "start", start):
        out = {name: chapter.Depart.apply(rows[name], *trips[name]) for name in rows}
        out = {name: chapter.Arrive.apply(out[name], *trips[name]) for name in rows}
        said.append("backward")
        torch.autograd.backward([each.square().sum() for each in out.values()])
    return {"order": said} | {f"gradient of {name}": rows[name].grad for name in rows}


EXERCISES = [
    Exercise(
        "08.1", "AllToAll.backward", 1,
        "Rows have gone to other ranks, ctx.sent[i] of them to rank i, and ctx.received[i] "
        "have come from there. The gradients of what came are here: give those of the rows "
        "that were sent, and None for the other arguments.",
        ("A row was moved, neither copied nor summed. Where must its gradient go?",
         "Back to where the row came from: the same exchange, and what was received is now "
         "what is sent."),
        (Run(2, "--batch 12 --micro-batch 2 --ignore 0.3"),),
    ),
    Exercise(
        "08.2", "balance_loss", 2,
        "For each sequence: how many experts there are, times the sum over experts of their "
        "share of the sequence's picks, times their mean score. Give the sum over the "
        "sequences: 1 for each of them, if all experts are picked alike.",
        ("What must be counted, and over which dimensions? The shares of a sequence add up to "
         "1, and so do the mean scores.",
         "F.one_hot turns picks into rows of zeros with a one. Its mean over a sequence's "
         "seq · k picks is the share of each expert, and the mean of the scores is one over "
         "seq tokens: (batch, experts) both."),
        (Same(balance_of_equal_picks, "3 sequences, 2 experts, all picked alike"),
         Same(balance_loss, "3 sequences of 5 tokens, 4 experts, 2 picks"),
         Same(gradient_of_balance, "its gradient"),
         Run(2, "--batch 12 --micro-batch 2 --balance-weight 1")),
    ),
    Exercise(
        "08.3", "MoE.route", 2,
        "Give the k experts of each token, and their gates: their scores over the sum of these "
        "k scores; if k is 1, the score itself. The bias has a say in the choice alone. With "
        "balance_weight or z_loss, add these losses, so that micro-batches and ranks add up to "
        "their mean over the sequences of the whole batch.",
        ("Which of all these numbers must have a gradient, and which must not? And what is the "
         "sum of the micro-batches' losses to be divided by?",
         "Compute logits and scores in float32 or better. best() takes scores + bias, "
         "detached; gather takes what was chosen, out of the logits: their softmax is the "
         "gates. The losses go into the graph by AddLoss.apply(gates, loss). Both are sums "
         "over this micro-batch's sequences, over cfg.sequences; z is, for a sequence, the "
         "mean of logsumexp² over its tokens."),
        (Run(2, "--batch 12 --micro-batch 2 --balance-weight 1"),
         Same(route_without_balance, "k = 2, no loss"),
         Same(route_with_bias, "k = 2, a bias of 1 and -1"),
         Same(route_with_balance, "k = 1, with the balance loss"),
         Same(gradient_of_z_loss, "the router's gradient, with the z-loss"),
         Same(dtypes_in_bfloat16, "dtypes, if all else is in bfloat16")),
    ),
    Exercise(
        "08.4", "MoE.through_experts MoE.exchange MoE.announce", 3,
        "Dispatch and combine: send each token's row to its k experts, which may be on other "
        "ranks, and add up what they give, weighted by the gates. The counts go first, so that "
        "every rank knows what comes; append (sent, received), in rows for each rank of ep, to "
        "self.seen, unless a block is recomputed (runs_again()). On one rank nothing is sent.",
        ("Follow the lesson's picture. In which order must the rows be sent, in which do they "
         "arrive, and in which do the experts want them? Every reordering has to be undone.",
         "through_experts: each token k times gives a row for each pick; a stable argsort of "
         "the flat choices is the order; Permute puts rows into it, and back. exchange: an "
         "all_to_all of counts; (ep, own experts) is what arrives. Sums of both over own "
         "experts are sent and received. What arrives is sorted by rank, then expert: say the "
         "expert of each row with repeat_interleave, and sort by it, stably; so far, it is "
         "announce."),
        (Same(on_one_rank, "on one rank, 10 tokens, 2 of 4 experts each, and nobody picks the "
              "last one"),
         Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(3, "--layers 1 --batch 6 --micro-batch 1 --experts 6 --top-k 1 --recompute full")),
        "dispatch and combine",
    ),
    Exercise(
        "08.5", "WithPlaces.through_experts", 3,
        "As MoE.through_experts, but each expert has `places` for each sequence, so that every "
        "exchange has one size. Places are taken in the order of the docstring, and a pick "
        "that finds none adds nothing. exchange_evenly takes rows (experts, batch · places, "
        "dim), zero where a place is empty.",
        ("Line the picks of a sequence up: all first choices, then all second ones. At which "
         "place of its expert's line does each pick stand, and which of all slots is that?",
         "A cumsum of one_hot along the line counts each expert's picks so far. Slot = expert "
         "· places + place, or one slot more, which is nobody's, for what is dropped. scatter "
         "puts x into the slots; behind the exchange, gather takes each pick's row out, and "
         "zero for the dropped. Weight by the gates, and sum over k."),
        (Same(with_places, "on one rank, 3 sequences of 5 tokens, 4 experts of 2 places, "
              "2 picks"),
         Run(2, "--variant capacity --capacity-factor 1 --batch 8 --micro-batch 2")),
        "experts with places",
    ),
    Exercise(
        "08.6", "expert_parallel", 2,
        "Give each rank its part of every mixture's experts: some of them or, of CutExperts, "
        "some hidden units of each. Tell the mixture its group, ep, and every parameter, as "
        "p.partial, the group over which its gradient is to be summed.",
        ("With 4 ranks and ep = 2, each expert is on two ranks. The tokens of which ranks are "
         "in its gradient before anything is summed?",
         "An expert has had the rows of all ranks of its ep: what is left to be summed over is "
         "groups[\"holders\"]. All else is summed over the world. keep_shard cuts up, down and, in "
         "a Llama, gate along the experts, dimension 0; hidden units are dimension 2 of up and "
         "gate, and 1 of down."),
        (Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(2, "--variant tensor --block llama --batch 4 --micro-batch 1")),
    ),
    Exercise(
        "08.7", "move_biases", 1,
        "After a step: raise the bias of the experts that were picked less often than the "
        "mean, by all ranks together, and lower it where they were picked more often, by "
        "bias_speed. Give the loads, (layers, experts), and start to count anew.",
        ("Each rank has counted the picks of its own tokens. Which way does a bias go if its "
         "expert has more than the mean?",
         "Stack the loads of model[1:-1] and all_reduce them, if there is a group. For each "
         "layer, torch.sign(mean of its loads - load) says which way, and load.zero_() starts "
         "anew."),
        (Same(moved_biases, "2 layers, loads 5, 1, 0, 2 and 6, 2, 1, 3"),
         Run(2, "--balance bias --bias-speed 0.1 --batch 8 --micro-batch 2")),
    ),
    Exercise(
        "08.8", "traffic", 3,
        "Count what a rank sends in a step, for each variant written by hand: rows that go to "
        "experts and come back, what goes with them, gradients, loads and the norm. With "
        "--recompute full, each block's forward runs again in backward, until it has all that "
        "backward reads. held_numbers says how many parameters a rank holds.",
        ("Write down what is sent in forward, in order, and then what its backward sends. Which of "
         "the first does a forward that runs again repeat: what does the product of outputs and "
         "gates need, and what comes behind it?",
         "dropless: counts (int64), rows, and results; back, two gradients. `seen` says how many "
         "rows went and came. capacity: the same without counts. tensor: x, chosen (int64) and "
         "gates (float32 or better) are gathered, the sum is scattered; its gradient is gathered, "
         "and those of x and gates are scattered. To run again repeats all of a forward but "
         "tensor's reduce_scatter, and with a shared expert, which comes behind it, that as well."),
        (Same(traffic_of_rows, "of the rows", ("none",)),
         Same(traffic_of_rows, "of the rows, recomputed", ("full",)),
         Same(traffic_with_places, "with places, recomputed", ("full",)),
         Same(traffic_of_cut_experts, "of cut experts, recomputed", ("full", False)),
         Same(traffic_of_cut_experts, "of those and a shared one, recomputed", ("full", True)),
         Run(2, "--batch 4 --micro-batch 1 --recompute full")),
        "what is sent, and sent again",
    ),
    Exercise(
        "08.9", "Depart.backward Arrive.backward", 2,
        "Rows set out in Depart and have come in Arrive: what runs between these two hides their "
        "travel. Give both backwards, so that the gradient travels while the backward of just that "
        "runs. start and wait are there; trip is (sent, received, group, under_way).",
        ("Backward comes to Arrive first. Who has to start the gradient's trip, and who to wait? "
         "And what must a gradient have the shape of?",
         "Arrive starts it, with sent and received exchanged, and must give something of the shape "
         "of its own input: the gradient that it was given will do. Depart gives what wait gives."),
        (Same(crossing, "two that cross: the order of starts and waits, and the gradients"),
         Run(2, "--variant overlapped --batch 12 --micro-batch 2 --ignore 0.3")),
        "the two halves of an all_to_all",
    ),
]
