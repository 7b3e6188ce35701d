"""Chapter 05: cut along the sequence, still one GPU's numbers; as much to send, less to keep."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import TEXT, chapter, hold_to_one_gpu, run_main
from test_04_tensor_parallel import (
    FIVE,
    FLOAT64,
    FOUR,
    LARGE,
    SHARED_KV_HEADS,
    SMALL,
    THREE,
    TIED,
    WHOLE_KV_HEADS,
    Log,
    Odd,
)

import common

BY_HAND = ("--variant=megatron", "--no-regather", "--variant=ring")
DOORS = ("tensor", "kept", "megatron", "ring")


@pytest.fixture(scope="module")
def five():
    return chapter(FIVE)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("variant", (*BY_HAND, "--variant=torch"))
@pytest.mark.parametrize(("world", "flags"), WHOLE_KV_HEADS)
def test_same_as_one_gpu(ranks, tmp_path, variant, world, flags):
    flags = (*FLOAT64, *flags, variant)
    hold_to_one_gpu(ranks(world)(run_main, FIVE, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", BY_HAND)
@pytest.mark.parametrize(("world", "flags"), SHARED_KV_HEADS)
def test_fewer_kv_heads_than_ranks(ranks, tmp_path, variant, world, flags):
    flags = (*FLOAT64, *flags, variant)
    hold_to_one_gpu(ranks(world)(run_main, FIVE, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", (*BY_HAND, "--variant=torch"))
def test_tied_embedding_and_head(ranks, tmp_path, variant):
    flags = (*FLOAT64, *TIED, variant)
    hold_to_one_gpu(ranks(2)(run_main, FIVE, flags, tmp_path), flags)


def test_the_same_losses_as_chapter_04(ranks, tmp_path):
    chapter(FOUR)
    (_, four, _), *_ = ranks(4)(run_main, FOUR, FLOAT64, tmp_path)
    (_, five, _), *_ = ranks(4)(run_main, FIVE, FLOAT64, tmp_path)
    assert four["loss"] == pytest.approx(five["loss"], rel=1e-13)
    assert four["grad_norm"] == pytest.approx(five["grad_norm"], rel=1e-12)


MINE = "x.chunk(group.size(), 1)[group.rank()].clone()"  # a part that nobody has summed


@pytest.mark.parametrize(
    ("variant", "right", "wrong", "named"),
    [
        # g: forward, backward; f: backward, with the linears behind it and alone
        ("megatron", "return reduce_scatter(x, group)", f"return {MINE}", "loss"),
        ("megatron", "return all_gather(gradient, ctx.group)",
         "return 2 * all_gather(gradient, ctx.group)", "gradients"),
        ("megatron", "return scattered(), None, *dw",
         "return dx.chunk(4, 1)[ctx.group.rank()], None, *dw", "gradients"),
        ("kept", "return reduce_scatter(gradient, ctx.group), None",
         "return gradient.chunk(4, 1)[ctx.group.rank()], None", "gradients"),
        ("megatron", 'keep_whole(norm, "weight", group)', "pass", "gradients"),
        ("megatron", 'keep_whole(norm, "bias", group)', "pass", "gradients"),
        ("megatron", "common.sum_partial_grads(model.parameters())", "pass", "gradients"),
        ("ring", "yield (rank - hop) % t, x", "yield (rank + hop) % t, x", "loss"),
        ("ring", "total += arriving()", "arriving()", "loss"),
        ("ring", "total += chunk[rank].flatten", "total += 2 * chunk[rank].flatten", "gradients"),
    ],
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, variant, right, wrong, named):
    """Faults that a student might make: each half of the conjugate pairs, and more."""
    flags = (*FLOAT64, "--no-regather" if variant == "kept" else f"--variant={variant}")
    (status, _, output), *_ = ranks(4)(run_main, FIVE, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    flags = (*SMALL, "--batch=4", "--variant=ring", f"--data={TEXT}")
    runs = [ranks(4)(run_main, FIVE, flags, tmp_path)[0][1] for _ in range(2)]
    for key in ("loss", "grad_norm"):
        assert runs[0][key] == runs[1][key]


# ------------------------------------------------------------------------------- any module


def odd_sub_layer(doors):
    five, group, n = chapter(FIVE), dist.group.WORLD, dist.get_world_size()
    whole = Odd()
    cut = five.SubLayer(Odd(), ("a", "b", "unused"), "out", group, five.DOORS[doors])
    full = torch.arange(2 * n * 6.0).double().view(1, 2 * n, 6).sin()
    x = full.clone().requires_grad_()
    mine = lambda x: x if doors == "tensor" else x.chunk(n, 1)[dist.get_rank()]
    y = mine(full).clone().requires_grad_()
    whole(x).square().sum().backward()
    out = cut(y)
    out.square().sum().backward()
    common.sum_partial_grads(cut.parameters())
    off = [(mine(whole(x)) - out).abs().max().item(), (mine(x.grad) - y.grad).abs().max().item()]
    for name, p in common.named_parameters(cut):
        if name.startswith(("b.", "unused")):
            assert p.grad is None or not p.grad.any()
        else:
            expected = common.part(whole.get_parameter(name).grad, p)
            off.append((expected - p.grad).abs().max().item())
    assert len(off) == 6
    return max(off)


@pytest.mark.parametrize("doors", DOORS)
@pytest.mark.parametrize("world", [1, 3])
def test_any_module(ranks, doors, world):
    assert max(ranks(world)(odd_sub_layer, doors)) < 1e-12


# ------------------------------------------------------------------------------- when it is sent


def order_in_backward(doors):
    """What the backward of an MLP does, in order: collectives that start and end, and matmuls."""
    five, group, events = chapter(FIVE), dist.group.WORLD, []
    mlp = five.SubLayer(common.MLP(THREE), ("up",), "down", group, five.DOORS[doors])
    out = mlp(torch.ones(1, 6, THREE.dim, requires_grad=True)).sum()

    def logged(name, send):
        def start(*tensors, **more):
            assert all(t.is_contiguous() for t in tensors if torch.is_tensor(t))
            events.append(f"start {name}")
            handle = send(*tensors, **more)
            handles = handle if isinstance(handle, list) else [handle]

            def wait():
                events.append(f"end {name}")
                for handle in handles:
                    handle.wait()

            waited = mock.Mock(wait=wait)
            return [waited] if isinstance(handle, list) else waited

        return start

    with (
        mock.patch.object(common, "all_gather", logged("gather", common.all_gather)),
        mock.patch.object(common, "reduce_scatter", logged("scatter", common.reduce_scatter)),
        mock.patch.object(dist, "batch_isend_irecv", logged("hop", dist.batch_isend_irecv)),
        Log(events),
    ):
        out.backward()
    return events


G_BACKWARD = ["start gather", "end gather", "matmul", "matmul"]  # of down


def test_what_megatron_overlaps_in_backward(ranks):
    for events in ranks(2)(order_in_backward, "megatron"):
        assert events == [
            *G_BACKWARD,
            *("start gather", "matmul", "start scatter", "end gather", "matmul", "end scatter"),
        ]
    for events in ranks(2)(order_in_backward, "kept"):
        assert events == [*G_BACKWARD, "matmul", "matmul", "start scatter", "end scatter"]


def test_every_hop_of_the_ring_hides_behind_a_matmul(ranks):
    hop = ["start hop", "matmul", "matmul", "end hop"]
    for events in ranks(3)(order_in_backward, "ring"):
        assert events == [
            *(2 * hop + ["matmul", "matmul"]),  # down: dx and dw of each chunk
            *("matmul", *2 * ["start hop", "matmul", "end hop"]),  # up: the sum of dx
            *(2 * ["start hop", "matmul", "end hop"] + ["matmul"]),  # up: dw of each chunk
        ]


# ------------------------------------------------------------------------------- the formulas


def test_all_activations_are_cut(five):
    cfg = common.PRESETS["7b"]
    tokens, rope = cfg.seq, cfg.layers * 4 * cfg.seq * (cfg.dim // cfg.heads // 2) * 2
    one = five.activation_bytes(cfg, 1, 1, 2) - 19 * tokens - rope
    for t in (2, 4, 8):
        cut = five.activation_bytes(cfg, 1, t, 2) - 19 * tokens - rope
        assert cut * t == pytest.approx(one, rel=1e-9)
        gqa = replace(cfg, kv_heads=4)  # of which eight ranks hold a whole one each
        fewer = five.activation_bytes(cfg, 1, t, 2) - five.activation_bytes(gqa, 1, t, 2)
        assert fewer == cfg.layers * 2 * tokens * (cfg.dim // t - 128 * max(4 // t, 1)) * 2
        kept = five.activation_bytes(cfg, 1, t, 2, "kept") - 19 * tokens - rope
        x = tokens * cfg.dim * 2
        assert kept - cut == pytest.approx((2 * cfg.layers + 1) * x * (1 - 1 / t), rel=1e-9)


def test_as_many_bytes_as_chapter_04(five):
    """When nothing is gathered twice; but for the gradients of the LayerNorms."""
    four, cfg = chapter(FOUR), common.PRESETS["7b"]
    for t in (1, 2, 8):
        _, _, theirs = four.traffic(cfg, 3, 2, t, 2)["all_reduce"]
        norms = 2 * (t - 1) / t * (4 * cfg.layers + 2) * cfg.dim * 2
        ours = sum(wire for _, _, wire in five.traffic(cfg, 3, 2, t, 2, "kept").values())
        assert ours - norms == pytest.approx(theirs, rel=1e-12)
        assert five.activation_bytes(cfg, 2, t, 2, "tensor") == four.activation_bytes(cfg, 2, t, 2)
        assert five.parameters_per_rank(cfg, t) == four.parameters_per_rank(cfg, t)
        again, ring = (
            sum(wire for _, _, wire in five.traffic(cfg, 3, 2, t, 2, doors).values())
            for doors in ("megatron", "ring")
        )
        x = 2 * cfg.seq * cfg.dim * 2
        assert again - ours == pytest.approx(3 * (2 * cfg.layers + 1) * (t - 1) / t * x, abs=1)
        assert ring == pytest.approx(again, rel=1e-12)


def test_when_a_hop_is_hidden(five):
    """The bytes of a chunk over the FLOPs of its matmul, step by step."""
    tokens, dim, t, width, flops, bandwidth = 4096, 8192, 8, 2, 989e12, 450e9
    hop = tokens / t * dim * width / bandwidth
    matmul = 2 * tokens / t * dim * dim / t / flops
    assert five.hop_over_matmul(dim, t, width, flops, bandwidth) == pytest.approx(hop / matmul)


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (("--heads=4",), 3, "--heads 4 is not a multiple of 3 .*; --nproc_per_node=2 would work"),
        (("--heads=4",), 8, "--heads 4 is fewer than 8 .*; --nproc_per_node=4 would work"),
        (
            ("--dim=96", "--heads=12", "--kv-heads=4", "--seq=96"),
            6,
            "--kv-heads 4 is neither a multiple nor a divisor of 6 .*; --nproc_per_node=4 would",
        ),
        (("--seq=126",), 4, "--seq 126 is not a multiple of 4 .*; --nproc_per_node=2 would work"),
        (
            ("--variant=torch",),
            8,
            r"--kv-heads 4 \(which --variant torch cannot share\).*node=4 wo",
        ),
        (("--variant=ring", "--no-regather"), 2, "--no-regather means nothing to .*; megatron wo"),
    ],
)
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(FIVE, *flags, WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors


def shapes(doors):
    """What a rank has of each tensor of a block, by whichever doors; under PyTorch's too."""
    five, group, tokens = chapter(FIVE), dist.group.WORLD, torch.zeros(1, LARGE.seq, dtype=int)
    if doors == "torch":
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        model = five.torch_parallelize(common.gpt(LARGE), LARGE, mesh)
    else:
        model = five.parallelize(common.gpt(LARGE), LARGE, group, group, five.DOORS[doors])
    return five.shapes_in_a_block(model, tokens)


@pytest.mark.parametrize("doors", (*DOORS, "torch"))
def test_what_is_cut_along_a_block(ranks, doors):
    seq, dim = LARGE.seq, LARGE.dim
    outside = (seq if doors == "tensor" else seq // 2, dim)
    for seen in ranks(2)(shapes, doors):
        assert {seen[name] for name in ("norm1", "attn.o", "norm2", "mlp.down")} == {outside}
        assert seen["attn.q"] == seen["heads"] == (seq, dim // 2)
        assert seen["mlp.up"] == (seq, 4 * dim // 2)


def test_figure(five, tmp_path):
    full = {"norm1": (8, 4), "mlp.up": (8, 16)}
    cuts = {"chapter 04": (full, {"norm1": (8, 4), "mlp.up": (8, 8)}), "megatron": (full, full)}
    shape = common.Config(2, 32, 4, 2, 16, 256), 2, 4, 2
    measured = {"tensor": (*shape, 10**5), "megatron": (*shape, 10**4)}
    five.draw(cuts, measured, tmp_path / "sp.png")
    assert (tmp_path / "sp.png").read_bytes().startswith(b"\x89PNG")
