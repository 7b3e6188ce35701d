"""Checks of chapter 08: routing, balance, dispatch and return, places of experts."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from lab.chapters.checking import TINY, random, ranks_of


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
    facts = through_experts(moe, x, chosen, random(3, 5, 2).requires_grad_())
    return facts | {"dropped": moe.dropped, "lost": moe.lost}


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


def groups_of(ranks, **lists):
    """{axis: this rank's group}, by lists of ranks."""
    return {axis: dist.new_subgroups_by_enumeration(ranks)[0] for axis, ranks in lists.items()} \
        | {"world": dist.group.WORLD}


def shared(chapter, kind, lists, **more):
    """What each rank of four has of a small model, and who sums its gradients."""
    groups = groups_of(4, **lists)
    sizes = vars(TINY) | {"layers": 2, "dim": 8, "heads": 2, "kv_heads": 2, "vocab": 5} | more
    model = chapter.mixture_gpt(chapter.Mixture(**sizes), kind=getattr(chapter, kind))
    given = chapter.expert_parallel(model, groups) or model
    held = {p.global_name: {"numbers": p.detach(), "ranks": ranks_of(p.partial)}
            for p in given.parameters() if "2" not in p.global_name}
    moe = given[1].mlp
    return held | {"ep": ranks_of(moe.ep), "how many": moe.ranks,
                   "across": ranks_of(getattr(moe, "across", None))}


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
    log, rows = [], {name: random(2, 4).requires_grad_() for name in "ab"}

    def start(given, sent, received, name, under_way):
        log.append(f"{name} starts with {len(given)} rows")
        handle = SimpleNamespace(wait=lambda: log.append(f"{name} is waited for"))
        out = given.new_full((sum(received), 4), given.sum().item())
        under_way.append((handle, out, given))
        return out

    trips = {name: ([2], [3], name, []) for name in rows}
    with mock.patch.object(chapter, "start", start):
        out = {name: chapter.Depart.apply(rows[name], *trips[name]) for name in rows}
        out = {name: chapter.Arrive.apply(out[name], *trips[name]) for name in rows}
        log.append("backward")
        torch.autograd.backward([each.square().sum() for each in out.values()])
    return {"order": log} | {f"gradient of {name}": rows[name].grad for name in rows}
