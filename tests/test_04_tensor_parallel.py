"""Chapter 04: cut matrices give one GPU's numbers, and send what the formulas say."""

import copy
import functools
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import common

FOUR, FIVE = "04_tensor_parallel", "05_sequence_parallel"
SMALL = ("--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16", "--steps=3")
FLOAT64 = (*SMALL, "--batch=4", "--dtype=float64", "--ignore=0.5", f"--data={TEXT}")
BY_HAND = ("megatron", "overlap")


@pytest.fixture(scope="module")
def four():
    return chapter(FOUR)


# ------------------------------------------------------------------------------- same as one GPU


WHOLE_KV_HEADS = [
    (1, ("--micro-batch=2", "--clip=0.1")),
    (2, ("--micro-batch=1", "--clip=0.1", "--optimizer=momentum", "--vocab=257")),
    (3, ("--dim=48", "--heads=6", "--kv-heads=3", "--seq=15", "--optimizer=sgd", "--vocab=1000")),
    (4, ("--kv-heads=4", "--micro-batch=2", "--vocab=257")),
    (8, ("--layers=1", "--heads=8", "--kv-heads=8", "--clip=0.1", "--vocab=1000")),
]
SHARED_KV_HEADS = [
    (4, ("--clip=0.1", "--vocab=257")),  # two ranks for each kv head
    (4, ("--kv-heads=1", "--micro-batch=1", "--optimizer=sgd", "--vocab=1000")),
    (8, ("--layers=1", "--heads=8", "--clip=0.1", "--optimizer=momentum")),
]
TIED = ("--preset=gpt2", "--vocab=257", "--verify", "--clip=0.1", "--kv-heads=4")


@pytest.mark.parametrize("variant", (*BY_HAND, "torch"))
@pytest.mark.parametrize(("world", "flags"), WHOLE_KV_HEADS)
def test_same_as_one_gpu(ranks, tmp_path, variant, world, flags):
    flags = (*FLOAT64, *flags, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, FOUR, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", BY_HAND)
@pytest.mark.parametrize(("world", "flags"), SHARED_KV_HEADS)
def test_fewer_kv_heads_than_ranks(ranks, tmp_path, variant, world, flags):
    flags = (*FLOAT64, *flags, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, FOUR, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", (*BY_HAND, "torch"))
def test_tied_embedding_and_head(ranks, tmp_path, variant):
    flags = (*FLOAT64, *TIED, f"--variant={variant}")
    hold_to_one_gpu(ranks(2)(run_main, FOUR, flags, tmp_path), flags)


F = """        return all_reduce(gradient, ctx.group), None"""
G = """        return all_reduce(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None"""


@pytest.mark.parametrize(
    ("right", "wrong", "named"),
    [
        (F, "        return gradient, None", "gradients"),
        (G, G.replace("all_reduce(x, group)", "x.clone()"), "loss"),
        (G, G.replace("return gradient", "return gradient * 4"), "gradients"),
        ("common.keep_whole(linear, name, copies)", "pass", "gradients"),
        ("if real < size:", "if False:", "loss"),
        ("sums[1]) * valid)", "sums[1]))", "loss"),
        ("logits.scatter_add_(-1, here, -scale * mine[..., None])", "logits", "gradients"),
        ("x.masked_fill(elsewhere[..., None], 0)", "x", "loss"),
        ("grad_norm(model.parameters(), group)", "grad_norm(model.parameters())", "gradient norm"),
    ],
)
def test_a_broken_chapter_says_so(ranks, tmp_path, right, wrong, named):
    """Faults that a student might make: each half of both conjugate pairs, and more."""
    flags = (*FLOAT64, "--vocab=257")
    (status, _, output), *_ = ranks(4)(run_main, FOUR, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


def test_a_broken_overlap_says_so(ranks, tmp_path):
    fault = "handle = dist.all_reduce(dx,", "handle = dist.all_reduce(dx.clone(),"
    flags = (*FLOAT64, "--variant=overlap")
    (status, _, output), _ = ranks(2)(run_main, FOUR, flags, tmp_path, fault)
    assert status == 1 and "✗ gradients" in output, output


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    flags = (*SMALL, "--batch=4", f"--data={TEXT}")
    runs = [ranks(4)(run_main, FOUR, flags, tmp_path)[0][1] for _ in range(2)]
    for key in ("loss", "grad_norm"):
        assert runs[0][key] == runs[1][key]


# ------------------------------------------------------------------------------- after training


LARGE = common.Config(layers=2, dim=32, heads=8, kv_heads=2, seq=8, vocab=37)
THREE = common.Config(layers=1, dim=24, heads=6, kv_heads=3, seq=9, vocab=37)


def trained(name, variant, steps):
    """What a rank holds after some steps; and put together, beside the single-GPU run's."""
    module, group, n = chapter(name), dist.group.WORLD, dist.get_world_size()
    cfg = LARGE if n != 3 else THREE
    kv = min(cfg.kv_heads, n)
    copies = torch.distributed.device_mesh.init_device_mesh(
        "cpu", (kv, n // kv), mesh_dim_names=("kv_head", "copy")
    )["copy"].get_group()
    how = variant == "overlap" if name == FOUR else module.DOORS[variant]
    model = module.parallelize(common.gpt(cfg, None), cfg, group, copies, how)
    common.draw_weights(model, 0, dtype=torch.float64)
    optimizer = common.OPTIMIZERS["adamw"](model.parameters(), None)
    whole = common.gpt(cfg, 0, dtype=torch.float64)
    plain = common.OPTIMIZERS["adamw"](whole.parameters(), None)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(cfg.vocab, (2, cfg.seq + 1), generator=generator)
        pair = tokens[:, :-1], tokens[:, 1:]
        module.train_step(model, optimizer, [pair], 16, 0.5, cfg.vocab, group)
        plain.zero_grad()
        (common.loss_sum(whole(pair[0]), pair[1]) / 16).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 0.5)
        plain.step()
    put_together = {
        name: (common.gather_whole(p, p), common.gather_whole(p.grad, p), q.detach(), q.grad)
        for (name, p), q in zip(common.named_parameters(model), whole.parameters())
    }
    norms = [(name, p.detach()) for name, p in common.named_parameters(model) if "norm" in name]
    assert [name for name, _ in whole.named_parameters()] == list(put_together)
    return put_together, norms


@pytest.mark.parametrize(
    ("name", "variant", "world"),
    [
        *((FOUR, "megatron", 3), (FOUR, "overlap", 2), (FOUR, "megatron", 8)),
        *((FIVE, "megatron", 3), (FIVE, "ring", 4), (FIVE, "tensor", 4), (FIVE, "megatron", 8)),
    ],
)
def test_shards_put_together_are_one_gpus_parameters(ranks, name, variant, world):
    chapter(name)
    for put_together, _ in ranks(world)(trained, name, variant, 3):
        for name, (parameter, gradient, expected, expected_gradient) in put_together.items():
            assert parameter.shape == expected.shape, name
            torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-10, atol=1e-12)


def test_layer_norms_stay_in_step_by_themselves(ranks):
    """Bit for bit, though nobody sends them."""
    results = [norms for _, norms in ranks(4)(trained, FOUR, "megatron", 3)]
    assert len(results[0]) == 10
    for others in results[1:]:
        for (name, mine), (_, theirs) in zip(results[0], others):
            assert mine.equal(theirs), name


# ------------------------------------------------------------------------------- the loss


def losses(name, vocab, scale):
    group, n = dist.group.WORLD, dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 5, vocab, dtype=torch.float64, generator=generator).mul_(scale)
    full[0, 0] -= 2 * scale * 10  # all of them far below zero
    targets = torch.randint(vocab, (2, 5), generator=generator)
    targets[1, :2] = -100
    size = -(-vocab // n)
    mine = nn.functional.pad(full, (0, size * n - vocab)).split(size, -1)[dist.get_rank()]
    mine = mine.clone().requires_grad_()
    full.requires_grad_()
    loss = chapter(name).VocabParallelLoss.apply(mine, targets, vocab, group)
    (3 * loss).backward()
    expected = nn.functional.cross_entropy(full.flatten(0, 1), targets.flatten(), reduction="sum")
    (3 * expected).backward()
    expected_gradient = nn.functional.pad(full.grad, (0, size * n - vocab)).split(size, -1)[
        dist.get_rank()
    ]
    first = dist.get_rank() * size
    padding = mine.grad[..., max(0, vocab - first) :]
    return loss.item(), expected.item(), mine.grad, expected_gradient, padding.any().item()


@pytest.mark.parametrize("name", [FOUR, FIVE])
@pytest.mark.parametrize("scale", [1, 1e4])
@pytest.mark.parametrize(("world", "vocab"), [(1, 5), (2, 8), (3, 7), (4, 5), (8, 3)])
def test_loss_of_cut_logits(ranks, world, vocab, scale, name):
    """Logits of +-1e4 do not overflow; padding, up to whole ranks of it, has no probability."""
    chapter(name)
    for loss, expected, gradient, expected_gradient, padding in ranks(world)(
        losses, name, vocab, scale
    ):
        assert loss == pytest.approx(expected, rel=1e-12) and not padding
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


def loss_of_bfloat16(name):
    logits = torch.randn(1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    loss = chapter(name).VocabParallelLoss.apply(
        logits, torch.zeros(1, 4, dtype=int), 8, dist.group.WORLD
    )
    loss.backward()
    expected = common.loss_sum(logits, torch.zeros(1, 4, dtype=int))
    return loss.dtype, (loss - expected).abs().item(), logits.grad.dtype


@pytest.mark.parametrize("name", [FOUR, FIVE])
def test_the_loss_of_16_bits_is_computed_in_32(ranks, name):
    chapter(name)
    [(dtype, off, gradient)] = ranks(1)(loss_of_bfloat16, name)
    assert dtype == torch.float32 and off < 1e-5 and gradient == torch.bfloat16


def shape_of_logits():
    four, group = chapter(FOUR), dist.group.WORLD
    head = four.VocabParallelHead(nn.Linear(4, 7), group)
    return tuple(head(torch.ones(2, 3, 4)).shape)


def test_the_full_logits_never_exist(ranks):
    assert ranks(3)(shape_of_logits) == [(2, 3, 3)] * 3


# ------------------------------------------------------------------------------- any module


class Odd(nn.Module):
    """Two linears with biases that read the input, one frozen, one unused; dropout's place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 12), nn.Linear(6, 12)
        self.unused, self.out = nn.Linear(6, 12), nn.Linear(12, 6)
        self.b.requires_grad_(False)
        self.double()

    def forward(self, x):
        return self.out(self.a(x).tanh() * self.b(x))


def odd_sub_layer(overlap):
    four, group = chapter(FOUR), dist.group.WORLD
    wrapper = four.OverlapTensorParallel if overlap else four.TensorParallel
    whole, cut = Odd(), wrapper(Odd(), ("a", "b", "unused"), "out", group)
    x, y = (torch.arange(12.0).double().view(2, 6).sin().requires_grad_() for _ in range(2))
    whole(x).square().sum().backward()
    cut(y).square().sum().backward()
    off = [(whole(x) - cut(y)).abs().max().item(), (x.grad - y.grad).abs().max().item()]
    for name, p in common.named_parameters(cut):
        expected = whole.get_parameter(name)
        if name.startswith("b."):
            assert p.grad is None
        elif name.startswith("unused"):
            assert p.grad is None or not p.grad.any()
        else:
            off.append((common.part(expected.grad, p) - p.grad).abs().max().item())
    assert len(off) == 6
    return max(off)


def what_does_not_fit():
    four, group = chapter(FOUR), dist.group.WORLD
    with pytest.raises(ValueError, match="2 ranks do not divide 5 inputs"):
        four.TensorParallel(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4)), ("0",), "1", group)
    with pytest.raises(ValueError, match="an embedding with padding_idx or max_norm cannot be cut"):
        four.VocabParallelEmbedding(nn.Embedding(4, 2, padding_idx=1), group)


def test_what_cannot_be_cut_is_refused(ranks):
    ranks(2)(what_does_not_fit)


def shared_kv_biases():
    """k and v with biases, of one head that two ranks share, as in Qwen2."""
    four, group, cfg = chapter(FOUR), dist.group.WORLD, common.Config(1, 8, 2, 1, 4, 8)
    torch.manual_seed(0)
    whole = common.Attention(cfg).double()
    for name in ("k", "v"):
        linear = nn.Linear(8, 4).double()
        setattr(whole, name, linear)
    cut = copy.deepcopy(whole)
    four.share_kv_heads(cut, 1, group, group)
    cut = four.TensorParallel(cut, ("q", "k", "v"), "o", group)
    x = torch.randn(1, 4, 8, dtype=torch.float64)
    whole(x).square().sum().backward()
    cut(x).square().sum().backward()
    common.sum_partial_grads(cut.parameters())
    return max(
        (common.part(whole.get_parameter(name).grad, p) - p.grad).abs().max().item()
        for name, p in common.named_parameters(cut)
    )


def test_biases_of_shared_kv_heads(ranks):
    assert max(ranks(2)(shared_kv_biases)) < 1e-12


def outputs_and_contiguity():
    four, group = chapter(FOUR), dist.group.WORLD
    cut = four.OverlapTensorParallel(Odd(), ("a", "b", "unused"), "out", group)
    cut(torch.ones(2, 6, dtype=torch.float64))
    summed = four.all_reduce(torch.ones(2, 3).t(), group)
    return [column.output for column in cut.columns], summed.is_contiguous()


def test_nothing_computed_outlives_its_sub_layer(ranks):
    assert ranks(1)(outputs_and_contiguity) == [([None] * 3, True)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("world", [1, 3])
def test_any_module(ranks, overlap, world):
    assert max(ranks(world)(odd_sub_layer, overlap)) < 1e-12


class Log(TorchDispatchMode):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "mm" in str(func):
            self.events.append("matmul")
        return func(*args, **(kwargs or {}))


def order_in_backward(overlap, head=False):
    """What the backward of an MLP, or of the head, does, in order."""
    four, group, events = chapter(FOUR), dist.group.WORLD, []
    if head:
        module = four.parallelize(common.gpt(LARGE), LARGE, group, group, overlap).head.out
    else:
        wrapper = four.OverlapTensorParallel if overlap else four.TensorParallel
        module = wrapper(common.MLP(LARGE), ("up",), "down", group)
    out = module(torch.ones(2, 3, LARGE.dim, requires_grad=True)).sum()
    send = dist.all_reduce

    def all_reduce(tensor, async_op=False, **more):
        assert tensor.is_contiguous()
        events.append("start")
        handle = send(tensor, async_op=True, **more)
        wait = lambda: (events.append("wait"), handle.wait())
        return mock.Mock(wait=wait) if async_op else wait()

    with mock.patch.object(dist, "all_reduce", all_reduce), Log(events):
        out.backward()
    return events


def test_the_weight_gradient_is_computed_while_the_inputs_is_sent(ranks):
    [plain] = ranks(1)(order_in_backward, False)
    assert plain == ["matmul"] * 4 + ["start", "wait"]
    [overlapped] = ranks(1)(order_in_backward, True)
    assert overlapped == ["matmul"] * 3 + ["start", "matmul", "wait"]
    assert ranks(1)(order_in_backward, False, True) == [["matmul"] * 2 + ["start", "wait"]]
    assert ranks(1)(order_in_backward, True, True) == [["matmul", "start", "matmul", "wait"]]


# ------------------------------------------------------------------------------- the formulas


def test_the_two_identities(four):
    a, b = torch.randn(2, 12, 12, dtype=torch.float64)
    for t in (1, 2, 3):
        torch.testing.assert_close(four.matmul_by_columns(a, b, t), a @ b)
        torch.testing.assert_close(four.matmul_by_rows(a, b, t), a @ b)


def test_parameters_per_rank(four):
    cfg = common.Config(layers=2, dim=8, heads=4, kv_heads=2, seq=4, vocab=11)
    assert four.parameters_per_rank(cfg, 1) == cfg.parameters()
    head = 2 * 8  # one kv head
    block = (10 * 64) // 4 + 2 * 8 * head // 8 + 4 * 8  # two ranks for each
    assert four.parameters_per_rank(cfg, 4) == 2 * block + 2 * 8 + 2 * 3 * 8


def test_traffic_of_the_lesson(four):
    cfg, t = common.PRESETS["7b"], 8
    calls, payload, wire = four.traffic(cfg, 3, 2, t, 2)["all_reduce"]
    x = 2 * cfg.seq * cfg.dim * 2
    assert calls == 3 * (4 * cfg.layers + 2 + 2) + 1
    assert payload == pytest.approx(3 * (4 * cfg.layers + 2) * x, rel=1e-3)
    assert wire == pytest.approx(2 * 7 / 8 * payload, rel=1e-9)


def test_activations_of_the_lesson(four):
    """A_in / t + A_out: what is cut falls as 1/t, and the rest does not change."""
    cfg = common.PRESETS["7b"]
    one, two, four_ranks = (four.activation_bytes(cfg, 1, t, 2) for t in (1, 2, 4))
    rope = cfg.layers * 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * 2
    outside = (2 * cfg.layers + 1) * (2 * cfg.dim + 2) * cfg.seq * 2 + 19 * cfg.seq + rope
    assert (two - outside) * 2 == pytest.approx(one - outside, rel=1e-9)
    assert (four_ranks - outside) * 4 == pytest.approx(one - outside, rel=1e-9)


def test_when_ranks_stop_paying(four):
    flops, bandwidth = 2550 * 90e9, 90e9  # the scaling book's C/W for TPU v5p
    assert four.ranks_that_pay(30_000, flops, bandwidth) == pytest.approx(11.76, abs=0.01)
    ratio = functools.partial(four.gather_over_matmul, 4096, width=1)
    assert ratio(t=1, flops=1, bandwidth=1) == 0
    assert ratio(t=9, flops=1024, bandwidth=1) == 1  # 8 / (2 · 4096) · 1024
    for machine, gather, mlp in (("H100, NVLink 4", 4, 14), ("H100, InfiniBand NDR", 1, 1)):
        rates = four.MACHINES[machine]  # the numbers of the lesson
        fits = [t for t in range(1, 99) if four.gather_over_matmul(8192, t, 2, *rates) <= 1]
        assert max(fits) == gather and int(four.ranks_that_pay(4 * 8192, *rates)) == mlp


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (("--heads=4",), 3, "--heads 4 is not a multiple of 3 .*; --nproc_per_node=2 would work"),
        (("--heads=4",), 8, "--heads 4 is fewer than 8 .*; --nproc_per_node=4 would work"),
        (
            ("--dim=96", "--heads=12", "--kv-heads=4"),
            6,
            "--kv-heads 4 is neither a multiple nor a divisor of 6 .*; --nproc_per_node=4 would",
        ),
        (
            ("--variant=torch",),
            8,
            r"--kv-heads 4 \(which --variant torch cannot share\).*node=4 wo",
        ),
        (
            ("--variant=torch", "--heads=8", "--kv-heads=2"),
            5,
            "--heads 8 is not a multiple of 5 .*; --nproc_per_node=2 would work",
        ),
        (("--micro-batch=3",), 2, "--batch 8 is not a multiple of .*; 9 would work"),
    ],
)
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(FOUR, *flags, WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors


def test_pytorch_sends_more_and_the_report_says_so(ranks, tmp_path):
    flags = (*FLOAT64, "--variant=torch")
    (_, run, output), _ = ranks(2)(run_main, FOUR, flags, tmp_path)
    ours = chapter(FOUR).traffic(
        common.Config(2, 32, 4, 2, 16, 256), 1, 4, 2, 8
    )["all_reduce"]  # fmt: skip
    assert sum(op["wire_bytes"] for op in run["comm"].values()) > 1.2 * ours[2]
    assert f"megatron sends {common.quantity(round(ours[2]))}" in output


def cuts_of_a_torch_model():
    four, mesh = chapter(FOUR), torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    model = four.torch_parallelize(common.gpt(LARGE), LARGE, mesh)
    names = ("block1.attn.q.weight", "block1.mlp.down.weight")
    return [four.shape_and_cuts(model.get_parameter(name)) for name in names]


def test_cuts_of_pytorchs_shards(ranks):
    for rank, cuts in enumerate(ranks(2)(cuts_of_a_torch_model)):
        assert cuts == [((32, 32), [(0, rank, 2)]), ((32, 128), [(1, rank, 2)])]


@pytest.mark.parametrize("name", [FOUR, FIVE])
@pytest.mark.parametrize("variant", ["megatron", "torch"])
def test_bfloat16(ranks, tmp_path, name, variant):
    chapter(name)
    flags = (*SMALL, "--batch=4", "--dtype=bfloat16", f"--data={TEXT}", f"--variant={variant}")
    (status, run, output), *_ = ranks(2)(run_main, name, flags, tmp_path)
    assert status == 0 and all(check["ok"] is not False for check in run["checks"]), output


def test_figure(four, tmp_path):
    held = [
        {"q": ((8, 8), [(0, rank, 2)]), "k": ((4, 8), [(0, 0, 1)]), "o": ((8, 8), [(1, rank, 2)])}
        for rank in range(2)
    ]
    four.draw(held, ({1: 0.0, 2: 10.0, 4: 15.0}, 2, 10.0, "megatron"), tmp_path / "tp.png")
    assert (tmp_path / "tp.png").read_bytes().startswith(b"\x89PNG")
