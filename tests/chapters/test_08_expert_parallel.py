"""Chapter 08: experts on several ranks give one GPU's numbers; routing, balance and places, too."""

import inspect
import itertools
import statistics
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import common
from common import Refused
from lab.bench import mixtures
from tests.chapters.test_04_tensor_parallel import FLOAT64, TRAINING, covering
from tests.conftest import TEXT, chapter, hold_to_one_gpu, run_main

EIGHT = "08_expert_parallel"
VARIANTS = ("dropless", "capacity", "two-hops", "overlapped", "torch")


@pytest.fixture(scope="module")
def eight():
    return chapter(EIGHT)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "variant": VARIANTS,
    "ranks": ((1, 1), (2, 2), (2, 1), (3, 3), (4, 4), (8, 4)),  # all, and those that share experts
    "nodes": ("all", "one", "any"),  # machines: one; several, of which a token goes to one, or any
    "top-k": (2, 1, 6),  # of 6 experts on three ranks, else of 8
    "router": ("softmax", "sigmoid"),
    "balance": ("loss", "loss-of-batch", "bias --bias-speed=0.01 --z-loss=0.1", "none"),
    "matmul": ("loop", "grouped"),
    "micro-batch": (1, 2),
    # gpt2 ties embedding and head; tiny has half as many kv heads
    "preset": ("tiny --kv-heads=2", "gpt2 --kv-heads=4 --attention=sdpa --shared-expert"),
    "optimizer": ("adamw", "sgd --clip=0.1"),
    "block": ("gpt --expert-dim=12", "llama --ffn=24"),
    "precision": ("fp32", "bf16"),
    "recompute": ("none", "selective", "full"),
}


def machines(one):
    """How many there are, and how many experts a token may choose from."""
    world = one["ranks"][0]
    nodes = 1 if one["nodes"] == "all" else 3 if world == 3 else 2
    experts = 6 if world == 3 else 8
    return nodes, experts // nodes if one["nodes"] == "one" else experts


def fits(one):
    nodes, choice = machines(one)
    if one["variant"] == "overlapped" and (
            one["recompute"] == "full" or one["balance"] == "loss-of-batch"):
        return False
    if one["variant"] == "two-hops" and (nodes == 1 or one["ranks"][1] == 1):
        return False
    if one["balance"] == "loss-of-batch" and one["micro-batch"] == 1 or one["top-k"] > choice:
        return False
    return one["ranks"] != (8, 4) or one["variant"] in ("dropless", "capacity", "two-hops")


def flags_of(one):
    world, ep = one["ranks"]
    sequences = 2 * world
    if one["variant"] == "overlapped":  # two micro-batches of two, or three of one: the last alone
        sequences = (2 + one["micro-batch"]) * world
    flags = [f"--ep={ep} --experts={6 if world == 3 else 8} --batch={sequences} --layers=1 "
             "--dim=24 --heads=4 --seq=8 --vocab=128 --dtype=float64"]
    others = {"ranks", "nodes"} | ({"matmul"} if one["variant"] == "torch" else set())
    flags += [f"--{name}={value}" for name, value in one.items() if name not in others]
    flags.append(f"--nodes={machines(one)[0]}" + " --node-limit=1" * (one["nodes"] == "one"))
    if one["variant"] == "capacity":
        flags.append(f"--capacity-factor={1 if one['top-k'] == 1 else 0.7}")
    return [*TRAINING, *" ".join(flags).split()]


@pytest.mark.parametrize("one", covering(fits, **SETTINGS))
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["ranks"][0])(run_main, EIGHT, flags, tmp_path), flags)


def test_what_a_run_records_is_for_its_picture(ranks, tmp_path):
    """Rows from each rank to each, of the first exchange; and how often each expert is picked."""
    flags = (*FLOAT64, "--ep=2", "--micro-batch=1", "--recompute=full")  # no pick is counted again
    (_, run, output), *_ = ranks(4)(run_main, EIGHT, flags, tmp_path)
    rows = torch.tensor(run["recorded"]["rows"])
    assert rows.sum(1).tolist() == 4 * [16 * 2]  # the picks of a sequence
    assert rows[:2, 2:].sum() == rows[2:, :2].sum() == 0  # none leaves those who share experts
    loads = torch.tensor(run["recorded"]["loads"])
    assert loads.shape == (run["config"]["steps"], 2, 8) and (loads.sum(2) == 4 * 16 * 2).all()
    assert "times as many rows come to the busiest rank" in output


@pytest.mark.parametrize("variant", VARIANTS[:4])
def test_bfloat16(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--layers=1", "--dtype=bfloat16", "--micro-batch=1", f"--variant={variant}",
             "--nodes=2", "--matmul=grouped")
    (status, run, output), *_ = ranks(2)(run_main, EIGHT, flags, tmp_path)
    assert all(check["ok"] is not False for check in run["checks"]), output


def shared_out(eight, cfg, kind=None):
    """A model whose experts are shared by all ranks."""
    world = dist.group.WORLD
    groups = {"world": world, "ep": world, "holders": dist.new_subgroups(1)[0]}
    if kind is eight.TwoHops:
        mesh = dist.device_mesh.init_device_mesh("cpu", (cfg.nodes, world.size() // cfg.nodes),
                                                 mesh_dim_names=("across", "inside"))
        groups |= {axis: mesh[axis].get_group() for axis in ("across", "inside")}
    model = eight.expert_parallel(eight.mixture_gpt(cfg, seed=None, kind=kind), groups)
    return common.draw_weights(model, 0, dtype=torch.float64)


def lonely_experts(variant):
    """With a bias that sends all tokens to the first two experts of eight: the size of the experts'
    gradients, and how many rows came to this rank."""
    eight, world = chapter(EIGHT), dist.group.WORLD
    places = 4 if variant == "capacity" else None
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, sequences=4, places=places)
    model = shared_out(eight, cfg)
    moe = model.block1.mlp
    moe.bias[:2] += 10
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = [(torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))]
    eight.train_step(model, optimizer, batch, 64, None, world)
    assert moe.up.grad is not None and moe.router.weight.grad.abs().sum() > 0
    return moe.up.grad.abs().sum().item(), [sum(received) for _, received in moe.seen]


def test_a_rank_without_a_row_takes_part_and_has_gradients_of_zero(ranks):
    (some, received), *others = ranks(4)(lonely_experts, "dropless")
    assert some > 0 and received == [4 * 2 * 8 * 2]  # both picks of every token of every rank
    assert others == [(0.0, [0])] * 3
    (some, _), *others = ranks(4)(lonely_experts, "capacity")
    assert some > 0 and [gradient for gradient, _ in others] == [0.0] * 3


# ------------------------------------------------------------------------------- routing, alone


@pytest.mark.parametrize(("k", "shared"), [(1, False), (2, True), (4, False)])
def test_a_mixture_is_the_sum_of_its_experts_by_their_gates(eight, k, shared):
    """Each computed for every token; a gate that comes before the nonlinearity would differ."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=4, top_k=k, shared_expert=shared)
    moe = eight.mixture_gpt(cfg).double().block1.mlp
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    chosen, gates = moe.route(x)
    everyones = torch.stack([F.gelu(x @ up) @ down for up, down in zip(moe.up, moe.down)], dim=2)
    picked = everyones.gather(2, chosen[..., None].expand(-1, -1, -1, 16))
    expected = (picked * gates[..., None]).sum(2) + (moe.shared(x) if shared else 0)
    torch.testing.assert_close(moe(x), expected)


def test_a_token_goes_to_the_machines_whose_best_scores_sum_to_the_most(eight):
    """Of two of four machines of two experts, four picks, so two of each: not the machine with the
    single best score, if its other one is low."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=4, nodes=4, node_limit=2)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.2, 0.6, 0.3, 0.6]])
    assert sorted(eight.choose(scores, cfg)[0].tolist()) == [2, 3, 6, 7]
    free = replace(cfg, node_limit=4)
    assert eight.choose(scores, free)[0, 0] == 0 and sorted(eight.choose(scores, free)[0].tolist()
                                                            ) != [2, 3, 6, 7]


def test_a_sigmoid_router_has_gates_of_its_scores_over_their_sum(eight):
    x = torch.randn(2, 5, 16)
    for k in (1, 3):
        cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=k, router="sigmoid")
        moe = eight.mixture_gpt(cfg).block1.mlp
        chosen, gates = moe.route(x)
        scores = F.linear(x, moe.router.weight).sigmoid().gather(-1, chosen)
        torch.testing.assert_close(gates, scores if k == 1 else scores / scores.sum(-1, True))


def test_a_single_gate_is_its_score_and_several_add_up_to_one(eight):
    x = torch.randn(2, 5, 16)
    for k in (1, 3):
        moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=k)).block1.mlp
        chosen, gates = moe.route(x)
        scores = F.linear(x, moe.router.weight).softmax(-1).gather(-1, chosen)
        expected = scores if k == 1 else scores / scores.sum(-1, keepdim=True)
        torch.testing.assert_close(gates, expected)


def test_a_bias_chooses_and_no_more(eight):
    moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=1)).block1.mlp
    moe.bias[3] = 2
    x = torch.randn(2, 5, 16)
    chosen, gates = moe.route(x)
    assert (chosen == 3).all()
    torch.testing.assert_close(gates[..., 0], F.linear(x, moe.router.weight).softmax(-1)[..., 3])


def test_biases_move_by_the_sign_of_the_error_and_loads_are_counted_anew(eight):
    model = eight.mixture_gpt(eight.Mixture(2, 16, 4, 4, 8, 64, experts=4, bias_speed=0.5))
    model.block1.mlp.load += torch.tensor([4.0, 0, 2, 2])
    model.block2.mlp.load += torch.tensor([1.0, 1, 1, 5])
    assert eight.move_biases(model).tolist() == [[4, 0, 2, 2], [1, 1, 1, 5]]
    assert model.block1.mlp.bias.tolist() == [-0.5, 0.5, 0, 0]
    assert model.block2.mlp.bias.tolist() == [0.5, 0.5, 0.5, -0.5]
    for _ in range(2):
        model(torch.zeros(3, 8, dtype=torch.int64))
        assert eight.move_biases(model).sum(1).tolist() == [48, 48]


def test_balance_loss_is_one_for_each_sequence_if_all_are_alike(eight):
    chosen = torch.arange(8).view(1, 4, 2).repeat(3, 1, 1)
    even = torch.full((3, 4, 8), 1 / 8)
    assert eight.balance_loss(even, chosen) == pytest.approx(3)
    all_to_one = torch.eye(8)[torch.zeros(3, 4, dtype=torch.int64)]
    assert eight.balance_loss(all_to_one, torch.zeros(3, 4, 1, dtype=torch.int64)) == 3 * 8


def test_the_losses_of_the_router_reach_its_gradient(eight):
    """As if they had been added to the loss: gradients of a model with and without them."""
    tokens, gradients = torch.randint(64, (2, 8)), []
    for weight in (0.0, 0.3):
        cfg = eight.Mixture(1, 16, 4, 4, 8, 64, balance_weight=weight, z_loss=weight, sequences=2)
        model = eight.mixture_gpt(cfg).double()
        loss, moe = common.loss_sum(model(tokens), tokens), model.block1.mlp
        loss.backward()
        gradients.append(moe.router.weight.grad.clone())
    moe.zero_grad()
    kept = []
    handle = moe.register_forward_pre_hook(lambda moe, inputs: kept.append(inputs[0].detach()))
    model(tokens)
    handle.remove()
    logits = F.linear(kept[0], moe.router.weight)
    scores = logits.softmax(-1)
    z = logits.logsumexp(-1).square().mean(1).sum()
    added = 0.3 * (eight.balance_loss(scores, scores.topk(2).indices) + z) / 2
    added.backward()
    torch.testing.assert_close(gradients[1] - gradients[0], moe.router.weight.grad)


def test_who_finds_no_place_is_dropped(eight):
    """First choices before second ones, and earlier tokens first; each sequence for itself."""
    cfg = eight.Mixture(1, 16, 4, 4, 3, 64, experts=3, places=2)
    moe = eight.mixture_gpt(cfg).double().block1.mlp
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    chosen = torch.tensor([[[0, 1], [0, 2], [1, 0]], [[0, 1], [1, 2], [2, 0]]])
    gates = torch.rand(2, 3, 2, dtype=torch.float64)
    kept = torch.ones_like(gates)
    kept[0, 2, 1] = 0  # the third who wants expert 0 in the first sequence
    everyone = moe.through_experts(x, chosen, gates)
    whole = eight.mixture_gpt(replace(cfg, places=None)).double().block1.mlp
    torch.testing.assert_close(everyone, whole.through_experts(x, chosen, gates * kept))
    assert moe.dropped == pytest.approx(1 / 12) and moe.lost == 0
    moe.through_experts(x, torch.ones(2, 3, 2, dtype=torch.int64).cumsum(2) % 2, gates)
    assert moe.dropped == pytest.approx(1 / 3) and moe.lost == pytest.approx(1 / 3)  # the third


def test_gates_are_finite_where_scores_have_vanished(eight):
    """A bias may choose experts whose softmax is zero in float32."""
    moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=2)).block1.mlp
    moe.router.weight.data[0] = 1000
    moe.bias[3:5] = 5
    _, gates = moe.route(torch.ones(1, 1, 16))
    assert gates.isfinite().all() and gates.sum().item() == pytest.approx(1)


def even_exchange():
    """Every token picks every expert: how many rows are sent and received in all."""
    eight = chapter(EIGHT)
    model = shared_out(eight, eight.Mixture(1, 16, 4, 4, 8, 64, top_k=8, sequences=4))
    model(torch.arange(16).view(2, 8))
    return [sum(rows) for rows in model.block1.mlp.seen[0]]


def test_even_routing_sends_what_the_formula_says(ranks, eight):
    """There and back, and their gradients: 16 numbers of each row, of e bytes."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=8, sequences=4)
    for rows in ranks(2)(even_exchange):
        for e in (2, 8):
            assert eight.row_bytes(cfg, 16, e) == 2 * sum(rows) * 16 * e


def hops(cfg):
    """Of random choices: by one hop, how many rows leave this rank's machine; by two, how many
    cross, and the difference of what comes out, of gradients and of x's gradient."""
    eight, found = chapter(EIGHT), []
    rank, nodes = dist.get_rank(), cfg.nodes
    drawn = torch.Generator().manual_seed(rank)
    x = torch.randn(2, 8, 16, dtype=torch.float64, generator=drawn)
    chosen = torch.rand(2, 8, cfg.experts, generator=drawn).topk(cfg.top_k).indices
    gates = torch.rand(2, 8, cfg.top_k, dtype=torch.float64, generator=drawn)
    for kind in (eight.MoE, eight.TwoHops):
        moe = shared_out(eight, cfg, kind).block1.mlp
        given = [x.clone().requires_grad_(), gates.clone().requires_grad_()]
        out = moe.through_experts(given[0], chosen, given[1])
        (out * x).sum().backward()
        found.append([out, *(each.grad for each in given), moe.up.grad, moe.down.grad])
        if kind is eight.MoE:
            [(sent, _)] = moe.seen
            each = len(sent) // nodes
            machine = rank // each
            one = sum(sent) - sum(sent[machine * each:(machine + 1) * each])
        else:
            [(sent, _)] = moe.crossed
            two = sum(sent) - sent[rank // (dist.get_world_size() // nodes)]
    counted = mixtures.crossings(chosen, cfg, rank // (dist.get_world_size() // nodes))
    far = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*found))
    return far, (one, two), [16 * rows for rows in counted]


@pytest.mark.parametrize(("world", "nodes", "k"), [
    (4, 2, 3), (4, 4, 2), pytest.param(6, 3, 2, marks=pytest.mark.full)])
def test_two_hops_give_what_one_gives_and_cross_less(ranks, eight, world, nodes, k):
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=12, top_k=k, nodes=nodes, node_limit=nodes)
    for far, (one, two), counted in ranks(world)(hops, cfg):
        assert far < 1e-12 and two < one
        assert counted == [pytest.approx(one), pytest.approx(two)]


@pytest.mark.parametrize(("experts", "k", "nodes", "limit"), [(6, 2, 3, 3), (8, 3, 4, 2),
                                                              (6, 3, 2, 1), (4, 1, 2, 2)])
def test_crossings_are_the_mean_over_all_choices(eight, experts, k, nodes, limit):
    """All sets of machines, and in each all sets of experts, one after the other."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=experts, top_k=k, nodes=nodes, node_limit=limit)
    each, ones, twos = experts // nodes, [], []
    for machines in itertools.combinations(range(nodes), limit):
        open = [expert for expert in range(experts) if expert // each in machines]
        for chosen in itertools.combinations(open, k):
            for own in range(nodes):
                others = [expert // each for expert in chosen if expert // each != own]
                ones.append(len(others))
                twos.append(len(set(others)))
    assert eight.crossings(cfg) == (pytest.approx(statistics.mean(ones)),
                                    pytest.approx(statistics.mean(twos)))


def test_deepseeks_rows_cross_half_as_often_by_two_hops(eight):
    """The lesson: of 8 picks on 8 machines 7 leave the token's own; on 4 of them, 3.5 at most."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=256, top_k=8, nodes=8, node_limit=4)
    one, two = eight.crossings(cfg)
    assert one == 7 and 3.1 < two < 3.5


def test_parameters_are_counted(eight):
    for shared in (False, True):
        cfg = eight.Mixture(3, 16, 4, 2, 8, 64, experts=4, top_k=1, shared_expert=shared)
        model = eight.mixture_gpt(cfg)
        assert sum(p.numel() for p in model.parameters()) == cfg.parameters()
        unused = sum(p[1:].numel() for name, p in model.named_parameters()
                     if name.endswith(("mlp.up", "mlp.down")) and "shared" not in name)
        assert cfg.active() == cfg.parameters() - unused


# ------------------------------------------------------------------------------- faults


FAULTY = (*FLOAT64, "--layers=1", "--steps=1", "--batch=4", "--micro-batch=1")


# ------------------------------------------------------------------------------- beside chapter 09


def test_what_09_takes_from_here_is_the_same_text(eight):
    nine = chapter("09_5d")
    for name in ("AddLoss", "AllToAll", "run_experts"):
        assert inspect.getsource(getattr(nine, name)) == inspect.getsource(getattr(eight, name))


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("flag", ["--ep=-1", "--ep=0", "--top-k=0", "--experts=0"])
def test_a_run_without_lab_refuses_what_is_below_one(eight, flag):
    args = common.parse("", "", eight.VARIANTS, eight.flags, [flag])
    with pytest.raises(Refused, match="are 1 or more"):
        eight.requires(args, 2)


@pytest.mark.parametrize(("world", "flags", "line"), [
    (4, "--ep=3 --experts=6", "--ep 3 does not divide 4 ranks; --ep 1 would work"),
    (4, "--ep=4 --experts=6", "--experts 6 is not a multiple of --ep = 4; --experts 8 would work"),
    (2, "--top-k=9", "--top-k 9 is more than the 8 experts that a token can go to; --top-k 8 would "
     "work"),
    (2, "--top-k=5 --nodes=2 --node-limit=1", "--top-k 5 is more than the 4 experts that a token "
     "can go to; --top-k 4 would work"),
    (2, "--nodes=2 --node-limit=3",
     "--node-limit 3 is more than --nodes = 2; --node-limit 2 would work"),
    (4, "--variant=two-hops", "two-hops: --nodes 1 is less than 2, or does not divide --ep = 4; "
     "--nodes 4 would work"),
    (2, "--balance=loss-of-batch --micro-batch=1", "--balance loss-of-batch needs all picks of the "
     "batch in one forward, and ranks have several; --balance loss would work"),
    (2, "--variant=torch --matmul=loop",
     "--matmul means nothing to --variant torch; --variant dropless would work"),
    (2, "--matmul=grouped --expert-dim=30", "--expert-dim 30 is not a multiple of what a grouped "
     "matmul takes = 4; --expert-dim 32 would work"),
    (4, "--balance-weight=0.1 --balance=none",
     "--balance-weight means nothing to --balance none; --balance loss would work"),
    (4, "--bias-speed=0",
     "--bias-speed means nothing to --balance loss; --balance bias would work"),
    (2, "--variant=capacity --capacity-factor=0.01", "--capacity-factor 0.01 leaves an expert less "
     "than one place in a sequence; --capacity-factor 1 would work"),
    (2, "--capacity-factor=2",
     "--capacity-factor means nothing to --variant dropless; --variant capacity would work"),
    (4, "--batch=6", "--batch 6 is not a multiple of 4 data-parallel ranks x --micro-batch = 4; "
     "--batch 8 would work"),
    (4, "--variant=overlapped", "overlapped: two micro-batches take turns, and a rank has one; "
     "--batch 8 --micro-batch 1 would work"),
    (4, "--variant=overlapped --batch=4 --micro-batch=1", "overlapped: two micro-batches take "
     "turns, and a rank has one; --batch 8 --micro-batch 1 would work"),
    (2, "--variant=overlapped --micro-batch=1 --recompute=full", "--recompute full runs a whole "
     "block again, which overlapped takes apart; --recompute selective would work"),
])  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*flags.split(), f"--data={TEXT}")
    status, output, errors = run_chapter(EIGHT, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")
