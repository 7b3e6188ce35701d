"""Chapter 08: experts on several ranks give one GPU's numbers; routing, balance and places, too."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from test_04_tensor_parallel import FLOAT64, TRAINING, covering

import common

EIGHT = "08_expert_parallel"
VARIANTS = ("dropless", "capacity", "tensor", "torch")


@pytest.fixture(scope="module")
def eight():
    return chapter(EIGHT)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "variant": VARIANTS,
    "world": (1, 2, 3, 4, 6, 8),
    "ep": ("all", "some", 2, 1),
    "top-k": (2, 1, 6),  # of 6 experts, or of 8 where there are 4 or 8 ranks
    "balance": ("loss", "bias", "none"),
    "micro-batch": (1, 2),
    "preset": ("tiny", "gpt2"),  # gpt2 ties embedding and head; tiny has half as many kv heads
    "z-loss": (0.1, 0),
    "shared-expert": (False, True),
    "optimizer": ("adamw", "sgd"),
    "clip": (None, 0.1),
}


def fits(one):
    worlds = {"some": (4, 6, 8), 2: (6, 8)}  # of 4, 2 are some
    return one["world"] in worlds.get(one["ep"], SETTINGS["world"])


def flags_of(one):
    world = one["world"]
    ep = {"all": world, "some": world // 2}.get(one["ep"], one["ep"])
    experts = 8 if world in (4, 8) else 6
    flags = [f"--ep={ep}", f"--experts={experts}", f"--batch={2 * world}", "--layers=1", "--dim=24",
             "--heads=4", "--seq=6", "--vocab=128", "--attention=plain",
             f"--kv-heads={2 if one['preset'] == 'tiny' else 4}"]
    flags += ["--bias-speed=0.01"] if one["balance"] == "bias" else []
    flags += ["--shared-expert"] if one["shared-expert"] else []
    if one["variant"] == "capacity":
        flags.append(f"--capacity-factor={1 if one['top-k'] == 1 else 0.7}")
    given = ("variant", "top-k", "balance", "micro-batch", "preset", "z-loss", "optimizer", "clip")
    flags += [f"--{name}={one[name]}" for name in given if one[name] is not None]
    return [*TRAINING, "--dtype=float64", *flags]


@pytest.mark.parametrize("one", covering(fits, **SETTINGS))
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, EIGHT, flags, tmp_path), flags)


@pytest.mark.parametrize(("world", "flags"), [
    (2, "--nodes=2 --node-limit=1 --top-k=2"),
    (4, "--nodes=2 --node-limit=1 --top-k=3"),
    (4, "--nodes=4 --node-limit=2 --top-k=4 --balance=bias"),
    (8, "--nodes=2 --node-limit=2 --top-k=3 --ep=4 --experts=16"),
    (4, "--nodes=2 --node-limit=1 --variant=capacity --capacity-factor=1e9"),
    (4, "--nodes=2 --node-limit=1 --variant=tensor"),
    (2, "--nodes=2 --node-limit=1 --variant=torch"),
])  # fmt: skip
def test_experts_on_few_nodes(ranks, tmp_path, world, flags):
    flags = (*FLOAT64, *flags.split(), f"--batch={world}", "--micro-batch=1")
    results = ranks(world)(run_main, EIGHT, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    cfg, output = results[0][1]["config"], results[0][2]
    crosses = cfg["variant"] == "dropless"
    assert ("if all experts were chosen alike: " in output) == crosses
    assert ("; without --node-limit" in output) == (crosses and cfg["node_limit"] < cfg["nodes"])
    assert cfg["places"] in (None, cfg["seq"])  # a sequence brings an expert no more


def test_the_mixture_whose_flops_are_counted_is_that_of_a_step(ranks, tmp_path):
    """With weights that hardly move, as many rows come to this rank as in the last step."""
    flags = (*FLOAT64, "--lr=1e-12", "--batch=8")
    (_, run, output), *_ = ranks(4)(run_main, EIGHT, flags, tmp_path)
    rows = sum(row[0] for row in run["recorded"]["rows"])
    assert f"a mixture of {rows:.0f} rows" in output


@pytest.mark.parametrize("variant", [*VARIANTS[:3], "dropless --nodes=2"])
def test_bfloat16(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--dtype=bfloat16", *f"--variant={variant}".split())
    (status, run, output), *_ = ranks(2)(run_main, EIGHT, flags, tmp_path)
    assert all(check["ok"] is not False for check in run["checks"]), output


def lonely_experts(variant):
    """With a bias that sends all tokens to the first two experts of eight: the size of the experts'
    gradients, and how many rows came to this rank."""
    eight, world = chapter(EIGHT), dist.group.WORLD
    places = 4 if variant == "capacity" else None
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, sequences=4, places=places)
    seen, groups = [], {"world": world, "ep": world, "copies": dist.new_subgroups(1)[0]}
    model = eight.expert_parallel(eight.mixture_gpt(cfg, seed=None), variant, groups, seen)
    common.draw_weights(model, 0, dtype=torch.float64)
    moe = model.block1.mlp
    moe.bias[:2] += 10
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = [(torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8, dtype=torch.int64))]
    eight.train_step(model, optimizer, batch, 64, None, world)
    assert moe.up.grad is not None and moe.router.weight.grad.abs().sum() > 0
    received = [sum(exchange.received) for exchange in seen]
    return moe.up.grad.abs().sum().item(), received


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
    moe = eight.mixture_gpt(cfg, 0, dtype=torch.float64).block1.mlp
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    chosen, gates = moe.route(x)
    everyones = torch.stack([F.gelu(x @ up) @ down for up, down in zip(moe.up, moe.down)], dim=2)
    picked = everyones.gather(2, chosen[..., None].expand(-1, -1, -1, 16))
    expected = (picked * gates[..., None]).sum(2) + (moe.shared(x) if shared else 0)
    torch.testing.assert_close(moe(x), expected)


def test_the_best_of_equals_is_the_first(eight):
    scores = torch.tensor([[0.2, 0.3, 0.3, 0.2], [0.25, 0.25, 0.25, 0.25]])
    assert eight.best(scores, 3).tolist() == [[1, 2, 0], [0, 1, 2]]


def test_a_single_gate_is_its_score_and_several_add_up_to_one(eight):
    x = torch.randn(2, 5, 16)
    for k in (1, 3):
        moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=k), 0).block1.mlp
        chosen, gates = moe.route(x)
        scores = F.linear(x, moe.router.weight).softmax(-1).gather(-1, chosen)
        expected = scores if k == 1 else scores / scores.sum(-1, keepdim=True)
        torch.testing.assert_close(gates, expected)


def test_a_bias_chooses_and_no_more(eight):
    moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=1), 0).block1.mlp
    moe.bias[3] = 2
    x = torch.randn(2, 5, 16)
    chosen, gates = moe.route(x)
    assert (chosen == 3).all()
    torch.testing.assert_close(gates[..., 0], F.linear(x, moe.router.weight).softmax(-1)[..., 3])


def test_biases_move_by_the_sign_of_the_error(eight):
    model = eight.mixture_gpt(eight.Mixture(2, 16, 4, 4, 8, 64, experts=4, bias_speed=0.5), 0)
    eight.move_biases(model, torch.tensor([[4.0, 0, 2, 2], [1, 1, 1, 5]]))
    assert model.block1.mlp.bias.tolist() == [-0.5, 0.5, 0, 0]
    assert model.block2.mlp.bias.tolist() == [0.5, 0.5, 0.5, -0.5]


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
        model = eight.mixture_gpt(cfg, 0, dtype=torch.float64)
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
    added = 0.3 * (eight.balance_loss(scores, eight.best(scores, 2)) + z) / 2
    added.backward()
    torch.testing.assert_close(gradients[1] - gradients[0], moe.router.weight.grad)


def test_a_tokens_experts_lie_on_its_best_nodes(eight):
    scores = torch.tensor([[[0.30, 0.02, 0.2, 0.2, 0.05, 0.03, 0.11, 0.09]]])  # four nodes of two
    allowed = eight.on_good_nodes(scores, nodes=4, limit=2, k=4)  # two experts of each
    assert allowed[0, 0].tolist() == [True] * 4 + [False] * 4
    one = eight.on_good_nodes(scores, nodes=4, limit=1, k=2)
    assert one[0, 0].tolist() == [False, False, True, True] + [False] * 4


def test_who_finds_no_place_is_dropped(eight):
    """First choices before second ones, and earlier tokens first; each sequence for itself."""
    cfg = eight.Mixture(1, 16, 4, 4, 3, 64, experts=3, places=2)
    moe = eight.mixture_gpt(cfg, 0, dtype=torch.float64).block1.mlp
    x = torch.randn(2, 3, 16, dtype=torch.float64)
    chosen = torch.tensor([[[0, 1], [0, 2], [1, 0]], [[0, 1], [1, 2], [2, 0]]])
    gates = torch.rand(2, 3, 2, dtype=torch.float64)
    kept = torch.ones_like(gates)
    kept[0, 2, 1] = 0  # the third who wants expert 0 in the first sequence
    everyone = eight.with_places(moe, x, chosen, gates)
    without = eight.without_drops(moe_of(eight, moe), x, chosen, gates * kept)
    torch.testing.assert_close(everyone, without)
    assert moe.dropped == pytest.approx(1 / 12)


def moe_of(eight, moe):
    """The same experts, without places."""
    moe.compute = eight.one_by_one
    return moe


def test_expected_drops(eight):
    """By chance, of any k experts for a token: as many as in a simulation."""
    for k, places in ((2, 10), (4, 18), (8, 30)):
        cfg = eight.Mixture(1, 16, 4, 4, 32, 64, experts=8, top_k=k, places=places)
        picks = torch.rand(4000, 32, 8).argsort(-1)[..., :k].flatten(1)
        load = F.one_hot(picks, 8).sum(1)
        simulated = (load - places).clamp(min=0).sum() / picks.numel()
        assert eight.expected_drops(cfg) == pytest.approx(simulated.item(), rel=0.1)
    long = eight.Mixture(1, 16, 4, 4, 4096, 64, experts=8, top_k=2, places=1024)
    assert 0 < eight.expected_drops(long) < 0.02


@pytest.mark.parametrize(("limit", "k"), [(1, 4), (2, 4), (2, 3)])
def test_a_token_stays_on_few_nodes_by_its_biased_scores(eight, limit, k):
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=16, top_k=k, nodes=4, node_limit=limit)
    moe = eight.mixture_gpt(cfg, 0).block1.mlp
    x = torch.randn(4, 8, 16)
    nodes = moe.route(x)[0] // 4  # of each pick
    assert max(len(set(of_token)) for of_token in nodes.flatten(0, 1).tolist()) == limit
    moe.bias[12:14] += 3  # of two experts of the last node
    assert ((moe.route(x)[0] // 4 == 3).sum(-1) >= 2).all()


def rows_between_nodes(limit):
    """Of the first exchange: the rows sent, their picks, and this rank's picks in all."""
    eight, world = chapter(EIGHT), dist.group.WORLD
    alone = dist.new_subgroups(1)[0]
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=4, nodes=2, node_limit=limit, sequences=4)
    groups = {"world": world, "ep": world, "copies": alone, "across": world, "inside": alone}
    seen = []
    model = eight.expert_parallel(eight.mixture_gpt(cfg, seed=None), "dropless", groups, seen)
    common.draw_weights(model, 0)
    model(torch.arange(16).view(2, 8))
    return sum(seen[0].sent), sum(seen[0].picks), eight.take_loads(model).sum().item()


def test_a_row_travels_to_a_node_once(ranks):
    assert ranks(2)(rows_between_nodes, 1) == [(16, 64, 64.0)] * 2
    for rows, picks, loads in ranks(2)(rows_between_nodes, 2):
        assert 16 <= rows <= 32 and picks == loads == 64


@pytest.mark.parametrize(("limit", "k"), [(1, 3), (2, 3), (4, 3), (4, 1), (4, 16)])
def test_rows_to_other_nodes_if_all_are_chosen_alike(eight, limit, k):
    """As many as in a simulation: any nodes, and then any k of their experts."""
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, experts=16, top_k=k, nodes=4)
    tokens = 4000
    good = torch.zeros(tokens, 4).scatter(1, torch.rand(tokens, 4).argsort(1)[:, :limit], 1)
    scores = torch.rand(tokens, 16).masked_fill(good.repeat_interleave(4, dim=1) == 0, -1)
    chosen = eight.best(scores, k) // 4
    nodes = sum((chosen == node).any(1).sum() for node in range(1, 4))  # but for this one, the 0th
    assert eight.rows_away(cfg, tokens, limit) == pytest.approx(nodes.item(), rel=0.05)


def test_loads_are_counted_anew_in_each_step(eight):
    model = eight.mixture_gpt(eight.Mixture(2, 16, 4, 4, 8, 64, top_k=2), 0)
    for _ in range(2):
        model(torch.zeros(3, 8, dtype=torch.int64))
        assert eight.take_loads(model).sum(1).tolist() == [48, 48]


def test_gates_are_finite_where_scores_have_vanished(eight):
    """A bias may choose experts whose softmax is zero in float32."""
    moe = eight.mixture_gpt(eight.Mixture(1, 16, 4, 4, 8, 64, top_k=2), 0).block1.mlp
    moe.router.weight.data[0] = 1000
    moe.bias[3:5] = 5
    _, gates = moe.route(torch.ones(1, 1, 16))
    assert gates.isfinite().all() and gates.sum().item() == pytest.approx(1)


def even_exchange(dtype):
    """Every token takes every expert: what is sent, but for the counts, and the formula."""
    eight, world = chapter(EIGHT), dist.group.WORLD
    cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=8, sequences=4)
    seen, groups = [], {"world": world, "ep": world, "copies": dist.new_subgroups(1)[0]}
    model = eight.expert_parallel(eight.mixture_gpt(cfg, seed=None), "dropless", groups, seen)
    common.draw_weights(model, 0, dtype=dtype)
    model(torch.arange(16).view(2, 8))
    e = dtype.itemsize
    return eight.exchange_bytes(seen[0], cfg, e) - 8 * 8, eight.even_bytes(cfg, 16, e)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_even_routing_sends_what_the_formula_says(ranks, dtype):
    for measured, formula in ranks(2)(even_exchange, dtype):
        assert measured == formula


def test_parameters_are_counted(eight):
    for shared in (False, True):
        cfg = eight.Mixture(3, 16, 4, 2, 8, 64, experts=4, top_k=1, shared_expert=shared)
        model = eight.mixture_gpt(cfg, 0)
        assert sum(p.numel() for p in model.parameters()) == cfg.parameters()
        assert len(list(model.parameters())) == cfg.tensors()
        unused = sum(p[1:].numel() for name, p in model.named_parameters()
                     if name.endswith(("mlp.up", "mlp.down")) and "shared" not in name)
        assert cfg.active() == cfg.parameters() - unused


def test_spreading_experts_sends_less_than_cutting_them_if_k_is_below_n(eight):
    for k, n in ((1, 2), (2, 2), (2, 4), (4, 2)):
        cfg = eight.Mixture(1, 16, 4, 4, 8, 64, top_k=k)
        rows, cut = eight.cut_bytes(cfg, 8, n, 4), eight.traffic(cfg, "tensor", [], 1, 1, n, n, 4)
        extra = n * 8 * k * (8 + 4 + 4)  # choices, gates and their gradients
        assert cut["all_gather"][1] + cut["reduce_scatter"][1] == rows + extra
        assert (eight.even_bytes(cfg, 8, 4) < rows) == (k < n)


# ------------------------------------------------------------------------------- faults


FAULTY = (*FLOAT64, "--steps=1")


@pytest.mark.parametrize(("flags", "right", "wrong", "named"), [
    # whose gradients
    ("--ep=2", 'p.partial = groups["copies"]', 'p.partial = groups["world"]', "gradients"),
    ("--ep=2", 'p.partial = groups["copies"]', 'p.partial = groups["ep"]', "gradients"),
    ("--ep=2", "return AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None",
     "return 2 * AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None", "gradients"),
    ("--ep=2", "if p.partial.size() > 1)", "if p.partial.size() > 2)", "gradients"),
    ("--ep=2", "norm = grad_norm(model.parameters(), world)",
     "norm = grad_norm([p for p in model.parameters() if p.shape[0] != 8], world)",
     "gradient norm"),
    ("--ep=2", "norm = grad_norm(model.parameters(), world)",
     "norm = grad_norm(model.parameters())", "gradient norm"),
    # which rows, by which gates
    ("", "out = torch.zeros_like(out).index_copy(0, order, out)       #", "out = out[order]  #",
     "loss"),
    ("", "return AllToAll.apply(out, received, sent, group)\n\n\ndef exchanged_evenly",
     "return AllToAll.apply(out.flip(0), received, sent, group)\n\n\ndef exchanged_evenly", "loss"),
    ("--variant=capacity", "transpose(0, 1).flatten(0, 1)\n    return AllToAll",
     "flatten(0, 1)\n    return AllToAll", "loss"),
    ("--variant=tensor", "everyones_gates = Gather.apply(gates.flatten(0, 1), group)",
     "everyones_gates = Gather.apply(gates.flatten(0, 1), group).detach()", "gradients"),
    ("--nodes=2 --node-limit=1", "gate = travel(gates[token] * goes[to, token])",
     "gate = travel(gates[token] * goes[to, token]).detach()", "gradients"),
    # balance
    ("", "gates = AddLoss.apply(gates, balance / cfg.sequences)",
     "gates = AddLoss.apply(gates, balance / len(x))", "gradients"),
    ("", "picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean(1)",
     "picks = F.one_hot(chosen.flatten(1), experts).to(scores.dtype).mean((0, 1))", "gradients"),
    ("--z-loss=0.1", "z = cfg.z_loss * logits.logsumexp(-1).square().mean(1).sum()",
     "z = cfg.z_loss * logits.logsumexp(-1).square().mean()", "gradients"),
    ("--balance=bias --bias-speed=0.5 --steps=2", "loads = take_loads(model, world)",
     "loads = take_loads(model)", "loss"),
    # formulas
    ("", "return 3 * 2 * (rows * cfg.expert()", "return 2 * 2 * (rows * cfg.expert()", "a mixture"),
    ("", "return 8 * exchange.counts + 2 * (sent + received)",
     "return 8 * exchange.counts + 4 * sent", "all_to_all"),
])  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, flags, right, wrong, named):
    """Faults that a student might make, on four ranks. The reference has faults of routing, too, so
    those are planted where only ranks that share experts are concerned, or the batch is cut."""
    flags = (*FAULTY, "--batch=8", "--micro-batch=1", *flags.split())
    (status, _, output), *_ = ranks(4)(run_main, EIGHT, flags, tmp_path, (right, wrong))
    assert status == 1 and any(named in line for line in output.splitlines() if "✗" in line), output


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("flag", ["--ep=-1", "--ep=0", "--node-limit=0", "--experts=0"])
def test_a_run_without_lab_refuses_what_is_below_one(eight, capsys, flag):
    args = common.parse("", "", eight.VARIANTS, eight.flags, [flag])
    with pytest.raises(SystemExit, match="2"):
        eight.requires(args, 2)
    assert capsys.readouterr().err.endswith("are 1 or more; the defaults would work\n")


@pytest.mark.parametrize(("world", "flags", "line"), [
    (4, "--ep=3 --experts=6", "--ep 3 does not divide 4 ranks; 1 would work"),
    (4, "--ep=4 --experts=6", "--experts 6 is not a multiple of --ep = 4; 8 would work"),
    (3, "--variant=tensor --experts=6 --ep=3 --batch=3", "--dim 128 makes 512 hidden units, which "
     "--ep 3 does not divide; --dim 384 would work"),
    (2, "--top-k=9", "--top-k 9 is more than --experts = 8; 8 would work"),
    (4, "--nodes=3", "--nodes 3 does not divide --ep = 4 and --experts = 8; 1 would work"),
    (4, "--nodes=2 --node-limit=1 --top-k=5", "--node-limit 1, where each of 2 nodes has 4 "
     "experts, cannot be for --top-k 5; 2 would work"),
    (4, "--nodes=2 --node-limit=3", "--node-limit 3, where each of 2 nodes has 4 experts, cannot "
     "be for --top-k 2; 1 would work"),
    (4, "--node-limit=1", "--node-limit 1 means nothing to --nodes 1; more --nodes would work"),
    (4, "--balance-weight=0.1 --balance=none",
     "--balance-weight means nothing to --balance none; --balance loss would work"),
    (4, "--bias-speed=0",
     "--bias-speed means nothing to --balance loss; --balance bias would work"),
    (2, "--variant=capacity --capacity-factor=0.01", "--capacity-factor 0.01 leaves an expert less "
     "than one place in a sequence; 1 would work"),
    (2, "--capacity-factor=2",
     "--capacity-factor means nothing to --variant dropless; capacity would work"),
    (4, "--batch=6", "--batch 6 is not a multiple of 4 data-parallel ranks x --micro-batch = 4; 8 "
     "would work"),
])  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*flags.split(), f"--data={TEXT}")
    status, output, errors = run_chapter(EIGHT, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")
