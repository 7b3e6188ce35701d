"""The exercises of chapter 08: routing, balance, dispatch and return, places of experts."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from lab.classroom.exercise import TINY, Exercise, Run, Same, random


def mixture(chapter, kind, **more):
    """Of 4 experts of width 8, with parameters that are not small."""
    sizes = vars(TINY) | {"dim": 8, "experts": 4, "balance_weight": 0.0} | more
    moe = kind(chapter.Mixture(**sizes))
    for p in moe.parameters():
        p.data.copy_(random(*p.shape))
    return moe.double()


def gradient_of_rows(chapter, *counts):
    """counts[i][j]: rows from rank i to rank j."""
    group, counts = dist.group.WORLD, torch.tensor(counts)
    sent, received = counts[group.rank()].tolist(), counts[:, group.rank()].tolist()
    rows = random(group.size(), sum(sent), 3)[group.rank()].requires_grad_()
    out = chapter.AllToAll.apply(rows, sent, received, group)
    out.backward(random(group.size(), sum(received), 3)[group.rank()])
    return rows.grad


def balance_of_equal_picks(chapter):
    picks = torch.tensor([[[0], [1], [0], [1]]] * 3)
    return chapter.balance_loss(torch.full((3, 4, 2), 0.5), picks)


def balance_loss(chapter):
    """Of 16 picks a sequence: their shares are exact in float32, too, which a quotient of counts
    has."""
    scores = random(3, 8, 5).softmax(-1)
    return chapter.balance_loss(scores, random(3, 8, 5).topk(2).indices)


def gradient_of_balance(chapter):
    scores = random(3, 8, 5).softmax(-1).requires_grad_()
    loss = chapter.balance_loss(scores, random(3, 8, 5).topk(2).indices)
    return torch.autograd.grad(loss, scores)[0]


def balance_over_the_batch(chapter):
    """Of both ranks."""
    group = dist.group.WORLD
    scores = random(2, 2, 8, 5)[group.rank()].softmax(-1)
    chosen = random(2, 2, 8, 5)[group.rank()].topk(2).indices
    return {"of both ranks": chapter.balance_loss(scores, chosen, True, group),
            "without a group": chapter.balance_loss(scores, chosen, True)}


def best(scores, cfg):
    """In place of choose, which is another exercise."""
    return scores.sort(descending=True).indices[..., :cfg.top_k]


def route(chapter, k, bias=(0, 0, 0, 0), **more):
    moe = mixture(chapter, chapter.MoE, top_k=k, **more)
    moe.bias.copy_(torch.tensor(bias))
    with mock.patch.object(chapter, "choose", best):
        chosen, gates = moe.route(random(2, 5, 8))[:2]
    (gates * random(2, 5, k)).sum().backward()
    return {"chosen": chosen, "gates": gates.detach(), "gradient": moe.router.weight.grad,
            "load": moe.load, "moe.chosen": moe.chosen}


def route_without_balance(chapter):
    return route(chapter, 2, balance_weight=0.0)


def route_by_sigmoids(chapter):
    return route(chapter, 2, router="sigmoid", balance_weight=0.5, sequences=6)


def route_with_balance(chapter):
    return route(chapter, 1, balance_weight=0.5, sequences=6)


def route_with_bias(chapter):
    return route(chapter, 2, bias=(0, 1, -1, 0))


def gradient_of_z_loss(chapter):
    return route(chapter, 2, z_loss=0.5, sequences=6)["gradient"]


def dtypes_in_bfloat16(chapter):
    moe = mixture(chapter, chapter.MoE, top_k=2).bfloat16()
    with mock.patch.object(chapter, "choose", best):
        return [each.dtype for each in moe.route(random(2, 5, 8).bfloat16())]


def through_experts(moe, x, chosen, gates):
    out = moe.through_experts(x, chosen, gates)
    (out * random(*x.shape)).sum().backward()
    return {"out": out.detach(), "x": x.grad, "gates": gates.grad, "up": moe.up.grad,
            "down": moe.down.grad}


def on_one_rank(chapter):
    moe, x = mixture(chapter, chapter.MoE, top_k=2), random(2, 5, 8).requires_grad_()
    chosen = random(2, 5, 3).topk(2).indices            # nobody picks the last one
    return through_experts(moe, x, chosen, random(2, 5, 2).requires_grad_())


def on_ranks_that_share(chapter):
    """Two ranks, with two of four experts each; those of the first get no row from the second."""
    moe, rank = mixture(chapter, chapter.MoE, top_k=2), dist.get_rank()
    moe.ep, moe.ranks = dist.group.WORLD, 2
    for p in (moe.up, moe.down):
        p.data = p.data[2 * rank:][:2].clone()
    x, gates = random(2, 2, 5, 8)[rank], random(2, 2, 5, 2)[rank]
    chosen = best(random(2, 5, 4), moe.cfg) if rank == 0 else torch.tensor([3, 2]).expand(2, 5, 2)
    with torch.no_grad():
        return {"out": moe.through_experts(x, chosen, gates), "seen": moe.seen}


def places_alone(chapter, places):
    """By an exchange of the check's own."""
    moe = mixture(chapter, chapter.WithPlaces, top_k=2, places=places, seq=5)
    given = []

    def exchange(rows, each):
        given.append([tuple(rows.shape), each])
        return (rows * torch.arange(1, 9)).sin() + 1    # an empty place, too, is sent back

    moe.exchange, x = exchange, random(3, 5, 8).requires_grad_()
    gates, chosen = random(3, 5, 2).requires_grad_(), random(3, 5, 4).topk(2).indices
    out = moe.through_experts(x, chosen, gates)
    (out * random(3, 5, 8)).sum().backward()
    return {"what exchange is given": given, "out": out.detach(), "x": x.grad, "gates": gates.grad,
            "dropped": moe.dropped, "lost": moe.lost}


def with_places(chapter):
    moe = mixture(chapter, chapter.WithPlaces, top_k=2, places=2, seq=5)
    x = random(3, 5, 8).requires_grad_()
    chosen = random(3, 5, 4).topk(2).indices
    found = through_experts(moe, x, chosen, random(3, 5, 2).requires_grad_())
    return found | {"dropped": moe.dropped, "lost": moe.lost}


def moved_biases(chapter, *group):
    sizes = vars(TINY) | {"layers": 2, "dim": 16}
    model = chapter.mixture_gpt(chapter.Mixture(**sizes, experts=4, bias_speed=0.25))
    mixtures = [block.mlp for block in model[1:-1]]
    for i, moe in enumerate(mixtures):
        moe.load.copy_(torch.tensor([5.0, 1, 0, 2]) + i)
        if group and dist.get_rank():
            moe.load.mul_(torch.tensor([0, 1, 3, 7]))
    return {"loads": chapter.move_biases(model, *group), "biases": [moe.bias for moe in mixtures],
            "counts": [moe.load for moe in mixtures]}


def biases_moved_together(chapter):
    return moved_biases(chapter, dist.group.WORLD)


def groups_of(ranks, **lists):
    """{axis: this rank's group}, by lists of ranks."""
    return {axis: dist.new_subgroups_by_enumeration(those)[0] for axis, those in lists.items()} \
        | {"world": dist.group.WORLD}


def shared(chapter, kind, lists, **more):
    """What each rank of four has of a small model, and who sums its gradients."""
    groups = groups_of(4, **lists)
    sizes = vars(TINY) | {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 2, "vocab": 5} | more
    model = chapter.mixture_gpt(chapter.Mixture(**sizes), kind=getattr(chapter, kind))
    given = chapter.expert_parallel(model, groups) or model
    ranks = lambda group: group and dist.get_process_group_ranks(group)
    held = {p.global_name: {"numbers": p.detach(), "ranks": ranks(p.partial)}
            for p in given.parameters() if "2" not in p.global_name}
    moe = given[1].mlp
    return held | {"ep": ranks(moe.ep), "how many": moe.ranks, "across":
                   ranks(getattr(moe, "across", None))}


def experts_on_four(chapter):
    pairs = {"ep": [[0, 1], [2, 3]], "holders": [[0, 2], [1, 3]]}
    return shared(chapter, "MoE", pairs, experts=4)


def experts_of_machines(chapter):
    lists = {"ep": [[0, 1, 2, 3]], "holders": [[0], [1], [2], [3]], "across": [[0, 2], [1, 3]],
             "inside": [[0, 1], [2, 3]]}
    return shared(chapter, "TwoHops", lists, experts=4, nodes=2, node_limit=2, gated=True)


def across_machines(chapter, experts, k, skip=()):
    """Machines of one rank each. What comes there is counted by the check; skip: experts whom
    nobody picks."""
    group = dist.group.WORLD
    moe = mixture(chapter, chapter.TwoHops, experts=experts, top_k=k, nodes=group.size(),
                  node_limit=group.size())
    moe.across, rank = group, group.rank()
    here = experts // group.size()

    def send_picks(rows, token, expert, gates):
        """An expert is a factor here."""
        factors = rank * here + expert + 1
        return torch.zeros_like(rows).index_add(0, token, rows[token] * (factors * gates)[:, None])

    moe.send_picks = send_picks
    x, gates = random(group.size(), 2, 5, 8)[rank], random(group.size(), 2, 5, k)[rank]
    scores = random(group.size(), 2, 5, experts).index_fill(-1, torch.tensor(skip).long(), -9)
    with torch.no_grad():
        out = moe.through_experts(x, best(scores[rank], moe.cfg), gates)
    return {"out": out, "crossed": moe.crossed}


def traffic(chapter, variant, ranks, recompute="none", crossed=(), **more):
    """Of two ranks that share experts, and two micro-batches on each."""
    cfg = chapter.Mixture(**vars(TINY) | {"layers": 2, "places": 40} | more)
    args = SimpleNamespace(model=cfg, variant=variant, ep=2, batch=4 * ranks, micro_batch=2,
                           nodes=2, dtype="float32", precision="bf16", recompute=recompute)
    return chapter.traffic(args, ranks, [([300, 212], [280, 300])] * 4, crossed)


def traffic_of_rows(chapter, recompute):
    return traffic(chapter, "dropless", 4, recompute)


def traffic_with_places(chapter, recompute):
    return traffic(chapter, "capacity", 2, recompute)


def traffic_of_shares(chapter, recompute):
    return traffic(chapter, "dropless", 2, recompute, over_batch=True)


def best_machines(chapter, k, limit):
    """Of 4 machines with 3 experts each, by scores of a softmax plus a bias."""
    cfg = SimpleNamespace(top_k=k, nodes=4, node_limit=limit, experts=12)
    return chapter.choose(random(3, 5, 12).softmax(-1) + random(12) / 8, cfg)


def crossings(chapter, *sizes):
    experts, k, nodes, limit = sizes
    return chapter.crossings(SimpleNamespace(experts=experts, top_k=k, nodes=nodes,
                                             node_limit=limit))


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
        (Same(gradient_of_rows, "the gradient, on 2 ranks", ([1, 3], [0, 2]), 2),
         Same(gradient_of_rows, "the gradient, on 3 ranks", ([2, 0, 1], [3, 1, 0], [1, 1, 2]), 3),
         Run(2, "--batch 12 --micro-batch 2 --ignore 0.3")),
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
         Same(balance_loss, "3 sequences of 8 tokens, 5 experts, 2 picks"),
         Same(gradient_of_balance, "its gradient"),
         Same(balance_over_the_batch, "with shares of the whole batch, of 2 ranks", (), 2),
         Run(2, "--batch 12 --micro-batch 2 --balance-weight 1")),
    ),
    Exercise(
        "08.3", "MoE.route", 2,
        "Give the k experts of each token, and their gates: their scores over the sum of these k; "
        "if k is 1, the score itself. Count who is chosen in self.load and keep it as self.chosen, "
        "but not if runs_again(); the bias has a say in the choice alone. With balance_weight or "
        "z_loss, add these losses, as means over the sequences of the whole batch.",
        ("Which of all these numbers must have a gradient, and which must not? And what is the "
         "sum of the micro-batches' losses to be divided by?",
         "Compute logits and scores in float32 or better. choose() takes scores + bias, detached; "
         "gather takes what was chosen, out of the logarithms of scores: their softmax is the "
         "gates. The losses go into the graph by AddLoss.apply(gates, loss). Both are sums over "
         "this micro-batch's sequences, over cfg.sequences; balance_loss takes scores that add up "
         "to 1, and z is, for a sequence, the mean of logsumexp² over its tokens."),
        (Run(2, "--batch 12 --micro-batch 2 --balance-weight 1"),
         Same(route_without_balance, "k = 2, no loss"),
         Same(route_with_bias, "k = 2, a bias of 1 and -1"),
         Same(route_with_balance, "k = 1, with the balance loss"),
         Same(route_by_sigmoids, "k = 2, by sigmoids, with the balance loss"),
         Same(gradient_of_z_loss, "the router's gradient, with the z-loss"),
         Same(dtypes_in_bfloat16, "dtypes, if all else is in bfloat16")),
    ),
    Exercise(
        "08.4", "MoE.send_picks MoE.exchange MoE.announce", 3,
        "Dispatch and combine: send each token's row to its k experts, which may be on other "
        "ranks, and add up what they give, weighted by the gates. The counts go first, so that "
        "every rank knows what comes; append (sent, received), in rows for each rank of ep, to "
        "self.seen, unless a block is recomputed (runs_again()). On one rank nothing is sent.",
        ("Follow the lesson's picture. In which order must the rows be sent, in which do they "
         "arrive, and in which do the experts want them? Every reordering has to be undone.",
         "send_picks: a stable argsort of expert is the order; index_select takes a row for each "
         "pick, and add_up adds up what comes for a token. exchange: an all_to_all of counts; "
         "(ranks, own experts) is what arrives. Sums of both over own experts are sent and "
         "received. What arrives is sorted by rank, then expert: say the expert of each row with "
         "repeat_interleave, and sort by it, stably; so far, it is announce. What undoes an order "
         "is its argsort."),
        (Same(on_one_rank, "on one rank, 10 tokens, 2 of 4 experts each, and nobody picks the "
              "last one"),
         Same(on_ranks_that_share, "on 2 ranks, 10 tokens on each, 2 of 4 experts", (), 2),
         Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(3, "--layers 1 --batch 6 --micro-batch 1 --experts 6 --top-k 1 --recompute full")),
        "dispatch and combine",
    ),
    Exercise(
        "08.5", "WithPlaces.send_picks", 3,
        "As MoE.send_picks, but each expert has `places` for each sequence, so that every exchange "
        "has one size. The picks come in the order in which they take places, and one that finds "
        "none adds nothing. exchange takes rows (experts · batch · places, dim), zero where a "
        "place is empty, and batch · places.",
        ("Each expert has a line for each sequence. Which picks stand in it, and at which place "
         "does each stand?",
         "Sort the picks by expert · batch + sequence, stably. A pick's place is its index minus "
         "how many stand in the lines before its own: a cumsum of counts. Slot = line · places + "
         "place, or one slot more, which is nobody's, for what is dropped. index_add puts rows "
         "into slots; behind the exchange, index_select takes them out, and zero for the dropped."),
        (Same(places_alone, "by an exchange of the check's own, 3 sequences of 5 tokens, 4 experts "
              "of 2 places, 2 picks", (2,)),
         Same(places_alone, "the same with 5 places, of which some stay empty", (5,)),
         Same(with_places, "on one rank, 3 sequences of 5 tokens, 4 experts of 2 places, "
              "2 picks"),
         Run(2, "--variant capacity --capacity-factor 1 --batch 8 --micro-batch 2")),
        "experts with places",
    ),
    Exercise(
        "08.6", "expert_parallel", 2,
        "Give each rank some of every mixture's experts. Tell the mixture its groups, and how many "
        "ranks ep has: with two hops, ep is `inside` alone. Tell every parameter, as p.partial, "
        "the group over which its gradient is to be summed.",
        ("With 4 ranks and ep = 2, each expert is on two ranks. The tokens of which ranks are "
         "in its gradient before anything is summed?",
         "An expert has had the rows of all ranks of its ep: what is left to be summed over is "
         "groups[\"holders\"]. All else is summed over the world. keep_shard cuts up, down and, in "
         "a Llama, gate along the experts, dimension 0, over all that share them: groups[\"ep\"]."),
        (Same(experts_on_four, "4 ranks, 4 experts, ep = 2", (), 4),
         Same(experts_of_machines, "4 ranks, two hops, 4 experts of a Llama", (), 4),
         Run(4, "--ep 2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(4, "--variant two-hops --nodes 2 --block llama --batch 4 --micro-batch 1")),
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
         Same(biases_moved_together, "the same on two ranks with other loads", (), 2),
         Run(2, "--balance bias --bias-speed 0.1 --batch 8 --micro-batch 2")),
    ),
    Exercise(
        "08.8", "traffic", 3,
        "Count what a rank sends in a step, for each variant: rows to experts and back, what goes "
        "with them, gradients, loads and the norm. With --recompute full, each block's forward "
        "runs again in backward. held_numbers says how many parameters a rank holds.",
        ("Write down what is sent in forward, in order, and then what its backward sends. Which of "
         "the first does a forward that runs again repeat: what does the product of outputs and "
         "gates need, and what comes behind it?",
         "dropless: counts (int64), rows, and results; back, two gradients. `seen` says how many "
         "rows went and came. capacity: the same without counts. two-hops: the same within a "
         "machine; and across, pairs of counts (int64), rows with their k choices (int64) and "
         "gates (float32 or better), and results; gradients of all but the choices. over_batch: an "
         "all_reduce of each expert's share in each forward."),
        (Same(traffic_of_rows, "of the rows", ("none",)),
         Same(traffic_of_rows, "of the rows, recomputed", ("full",)),
         Same(traffic_with_places, "with places, recomputed", ("full",)),
         Same(traffic_of_shares, "with shares of the whole batch, recomputed", ("full",)),
         Run(2, "--batch 4 --micro-batch 1 --recompute full"),
         Run(4, "--variant two-hops --nodes 2 --batch 8 --micro-batch 1 --recompute full")),
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
    Exercise(
        "08.10", "choose", 2,
        "Give each token's top_k experts, by score. With node_limit below nodes they lie on so "
        "many machines at most: those whose ceil(k / limit) best scores have the largest sums. "
        "Machines have as many experts each, neighbours.",
        ("Which machines are left to a token? And what must happen to the scores of all others, so "
         "that topk cannot take them?",
         "unflatten the last dimension to (nodes, experts of one); topk there, and a sum, is how "
         "good each machine is; topk of that says which stay. masked_fill the others with -inf, "
         "flatten, and take the topk."),
        (Same(best_machines, "2 of 4 machines, 4 picks", (4, 2)),
         Same(best_machines, "one machine, 2 picks", (2, 1)),
         Same(best_machines, "no limit", (3, 4)),
         Run(2, "--nodes 4 --node-limit 2 --router sigmoid --batch 4 --micro-batch 1")),
        "limited nodes",
    ),
    Exercise(
        "08.11", "crossings", 2,
        "How many rows of a token leave its machine by one hop, which sends one for each pick, and "
        "by two, which send one to each other machine? Every choice of node_limit machines is "
        "equally likely, and so is every choice of top_k experts on them.",
        ("A machine is spared if none of the k picks lies on it. Of how many cases is that, and in "
         "how many is it so?",
         "math.comb(n, k) cases for the n experts that may be chosen, and math.comb(n - m, k) of "
         "them without the m of one machine. Of what is chosen, 1 - 1/nodes lies elsewhere."),
        (Same(crossings, "6 experts, 2 picks, 3 machines", (6, 2, 3, 3)),
         Same(crossings, "256 experts, 8 picks, 4 of 8 machines", (256, 8, 8, 4)),
         Run(4, "--variant two-hops --nodes 2 --batch 4 --micro-batch 1")),
        "what two hops save",
    ),
    Exercise(
        "08.12", "TwoHops.through_experts", 3,
        "Send each row once to each machine of its token's experts, with all choices and gates; "
        "hand what arrives, and its picks here, to send_picks; send back and add up. Append (sent, "
        "received) to self.crossed, unless runs_again(). The host may wait once.",
        ("Which pairs of a token and a machine are there, and in which order must they be sent? "
         "How does the other side know which of the k picks are its own?",
         "one_hot(chosen // experts of a machine) summed over k says how many picks lie where. "
         "Counts of rows and of picks go first, together. nonzero_static(wanted.T, size=...) gives "
         "tokens by machine. What arrives has picks here where chosen // experts is "
         "across.rank(); send_picks takes experts from 0 on."),
        (Same(across_machines, "2 machines, 6 experts, 2 picks", (6, 2), 2),
         Same(across_machines, "4 machines, 8 experts, 3 picks, none of the last two experts",
              (8, 3, (6, 7)), 4),
         Run(4, "--variant two-hops --nodes 2 --batch 12 --micro-batch 1 --ignore 0.3"),
         Run(4, "--variant two-hops --nodes 4 --top-k 3 --batch 8 --micro-batch 2")),
        "two hops",
    ),
]
