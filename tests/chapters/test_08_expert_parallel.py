"""Chapter 08: experts on several ranks give one GPU's numbers; routing, balance and places, too."""

import contextlib
import itertools
import statistics
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import common
from lab import chapters
from tests.conftest import chapter, sample
from tests.support.runs import check_run, runs

mixtures = chapters.held("08")
EIGHT = "08_expert_parallel"


@pytest.fixture(scope="module")
def eight():
    return chapter(EIGHT)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("08"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    record, _ = check_run(ranks, tmp_path, run)
    if "--variant=overlapped" in run.flags and run.world > 1:
        assert "all_to_all" in record["recorded"]["overlap"]


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
    (some, received), *others = ranks(4, timeout=120)(lonely_experts, "dropless")
    assert some > 0 and received == [4 * 2 * 8 * 2]  # both picks of every token of every rank
    assert others == [(0.0, [0])] * 3
    (some, _), *others = ranks(4, timeout=120)(lonely_experts, "capacity")
    assert some > 0 and [gradient for gradient, _ in others] == [0.0] * 3


# ------------------------------------------------------------------------------- routing, alone


def test_a_mixture_is_the_sum_of_its_experts_by_their_gates(eight):
    """Each computed for every token; a gate that comes before the nonlinearity would differ."""
    for k, shared in ((1, False), (2, True), (4, False)):
        cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=4, top_k=k, shared_expert=shared)
        moe = eight.mixture_gpt(cfg).double().block1.mlp
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        chosen, gates = moe.route(x)
        everyones = torch.stack([F.gelu(x @ up) @ down for up, down in zip(moe.up, moe.down)], 2)
        picked = everyones.gather(2, chosen[..., None].expand(-1, -1, -1, 16))
        expected = (picked * gates[..., None]).sum(2) + (moe.shared(x) if shared else 0)
        torch.testing.assert_close(moe(x), expected)


def test_a_token_goes_to_the_machines_whose_best_scores_sum_to_the_most(eight):
    """Of two of four machines of two experts, four picks, so two of each: not the machine with the
    single best score, if its other one is low."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=4, nodes=4, node_limit=2)
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.2, 0.6, 0.3, 0.6]])
    assert sorted(eight.choose(scores, cfg)[0].tolist()) == [2, 3, 6, 7]
    assert eight.choose(scores, replace(cfg, node_limit=4))[0, 0] == 0


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_single_gate_is_its_score_and_several_add_up_to_one(eight, router):
    x = torch.randn(2, 5, 16)
    for k in (1, 3):
        cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=k, router=router)
        moe = eight.mixture_gpt(cfg).block1.mlp
        chosen, gates = moe.route(x)
        logits = F.linear(x, moe.router.weight)
        scores = logits.softmax(-1) if router == "softmax" else logits.sigmoid()
        scores = scores.gather(-1, chosen)
        torch.testing.assert_close(gates, scores if k == 1 else scores / scores.sum(-1, True))


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


def hops(cfg):
    """Of random choices: by one hop, how many rows leave this rank's machine; by two, how many
    cross, and the difference of what comes out, of gradients and of x's gradient."""
    eight, results = chapter(EIGHT), []
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
        results.append([out, *(each.grad for each in given), moe.up.grad, moe.down.grad])
        if kind is eight.MoE:
            [(sent, _)] = moe.seen
            each = len(sent) // nodes
            machine = rank // each
            one = sum(sent) - sum(sent[machine * each:(machine + 1) * each])
        else:
            [(sent, _)] = moe.crossed
            two = sum(sent) - sent[rank // (dist.get_world_size() // nodes)]
    counted = mixtures.crossings(chosen, cfg, rank // (dist.get_world_size() // nodes))
    far = max(((a - b).abs().max() / a.abs().max()).item() for a, b in zip(*results))
    return far, (one, two), [16 * rows for rows in counted]


@pytest.mark.parametrize(("world", "nodes", "k"), sample([(4, 2, 3), (4, 4, 2), (6, 3, 2)]))
def test_two_hops_give_what_one_gives_and_cross_less(ranks, eight, world, nodes, k):
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=12, top_k=k, nodes=nodes, node_limit=nodes)
    for far, (one, two), counted in ranks(world, timeout=120)(hops, cfg):
        assert far < 1e-12 and two < one
        assert counted == [pytest.approx(one), pytest.approx(two)]


@pytest.mark.parametrize(("experts", "k", "nodes", "limit"), [(8, 3, 4, 2), (6, 3, 2, 1)])
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


def test_parameters_are_counted(eight):
    for shared in (False, True):
        cfg = eight.Mixture(3, 16, 4, 2, 8, 64, experts=4, top_k=1, shared_expert=shared)
        model = eight.mixture_gpt(cfg)
        assert sum(p.numel() for p in model.parameters()) == cfg.parameters()
        unused = sum(p[1:].numel() for name, p in model.named_parameters()
                     if name.endswith(("mlp.up", "mlp.down")) and "shared" not in name)
        assert cfg.active() == cfg.parameters() - unused


# ------------------------------------------------------------------------------- in turns


class Notes(TorchDispatchMode):
    """What happens: a matmul, or several in a row, is "computes"; ("start", 2) and ("wait", 2) are
    of the third all_to_all of rows that has started."""

    def __init__(self, eight):
        super().__init__()
        self.said, self.trips, self.eight = [], [], eight

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm):
            self.said += ["computes"] * (self.said[-1:] != ["computes"])
        return func(*args, **kwargs or {})

    def note(self, what, under_way):
        if not any(under_way is trip for trip in self.trips):
            self.trips.append(under_way)
        [number] = [i for i, trip in enumerate(self.trips) if trip is under_way]
        self.said.append((what, number))

    @contextlib.contextmanager
    def of_trips(self):
        start = self.eight.start

        def noted_start(*args):
            self.note("start", args[-1])
            out = start(*args)
            handle, *rest = args[-1].pop()
            args[-1].append((SimpleNamespace(wait=partial(self.wait, handle, args[-1])), *rest))
            return out

        with mock.patch.object(self.eight, "start", noted_start), self:
            yield

    def wait(self, handle, under_way):
        self.note("wait", under_way)
        handle.wait()


def pair_of(rank):
    """Two micro-batches, other ones on each rank."""
    tokens = torch.randint(64, (2, 2, 8), generator=torch.Generator().manual_seed(rank))
    return [(x.clone(), x.clone()) for x in tokens]


def turns(layers):
    """What happens in the forward and in the backward of two micro-batches."""
    eight = chapter(EIGHT)
    cfg = eight.Mixture(layers, 16, 4, 4, 8, 64, sequences=8, balance_weight=0.01)
    model, said = shared_out(eight, cfg, eight.Overlapped), []
    with (notes := Notes(eight)).of_trips():
        pairs = pair_of(dist.get_rank())
        *_, losses = zip(*(eight.forward_in_turns(model, *pair) for pair in pairs))
        said.append(notes.said.copy())
        notes.said.clear()
        sum(losses).backward()
        said.append(notes.said)
    return said


def test_one_computes_while_the_rows_of_the_other_travel(ranks):
    """And backward does the same the other way round, in one order on all ranks."""
    layers, [(forward, backward), *others] = 2, ranks(2, timeout=120)(turns, 2)
    assert others == [[forward, backward]]
    trips = 4 * layers  # there and back, of both
    expected = ["computes", ("start", 0), "computes", ("start", 1)]
    for trip in range(2, trips):
        expected += [("wait", trip - 2), "computes", ("start", trip)]
    expected += [("wait", trips - 2), "computes", ("wait", trips - 1), "computes"]
    assert forward == expected
    other = {"start": "wait", "wait": "start"}
    assert backward == [what if what == "computes" else (other[what[0]], what[1])
                        for what in reversed(forward)]


def test_the_condition_is_of_what_travels_and_of_what_computes(eight):
    """Its FLOPs are those of a block's forward; its bytes a fourth of row_bytes for each way."""
    for more in ({}, {"gated": True, "ffn": 24, "shared_expert": True, "kv_heads": 2}):
        cfg = eight.Mixture(**{"layers": 1, "dim": 16, "heads": 4, "kv_heads": 4, "seq": 8,
                               "vocab": 64, "top_k": 3} | more)
        model, x = eight.mixture_gpt(cfg), torch.randn(2, 8, 16)
        with FlopCounterMode(display=False) as counter:
            model.block1(x)
        seconds = counter.get_total_flops() / 16 / 5e9  # of a token, at 5 GFLOP/s
        there_and_back = 2 * 3 * 16 * 2 * 3 / 4  # 3 rows of 16 numbers in bf16, 3/4 leave the rank
        assert eight.travel_over_compute(cfg, 4, 2, 5e9, 7e6) == pytest.approx(
            there_and_back / 7e6 / seconds)
    assert eight.travel_over_compute(cfg, 1, 2, 5e9, 7e6) == 0
