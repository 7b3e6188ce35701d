"""common.py: configuration, text, model, shards, norms, flags, the bare run, and how it leaves."""

import argparse
import contextlib
import dataclasses
import io
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_

import common
from common import PRESETS, Config, gpt, loss_sum
from lab.bench import report
from lab.bench.anatomy import optimizer_state_bytes, tensors
from lab.bench.verify import named_parameters
from lab.cli import strict
from tests.conftest import (
    CHAPTERS,
    ROOT,
    SMALL,
    TEXT,
    arguments,
    chapter,
    no_flags,
    training_chapters,
)

SHAPE = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # what SMALL says

# ------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("cfg", [*PRESETS.values(), SHAPE, Config(3, 48, 6, 1, 8, 100, tie=True)])
def test_numbers_of_parameters_and_tensors(cfg):
    with torch.device("meta"):  # the large ones have no place here
        blocks = nn.ModuleList([common.Block(cfg) for _ in range(cfg.layers)])
    matrix, norm = cfg.vocab * cfg.dim, 2 * cfg.dim
    tables = [matrix] if cfg.tie else [matrix, matrix]
    sizes = [p.numel() for p in blocks.parameters()]
    assert cfg.parameters() == sum(sizes) + norm + sum(tables)
    assert tensors(cfg) == len(sizes) + 2 + len(tables)


@pytest.mark.parametrize("tie", [False, True])
def test_the_model_has_the_parameters_of_its_config(tie):
    cfg = dataclasses.replace(SHAPE, tie=tie)
    sizes = [p.numel() for p in gpt(cfg).parameters()]
    assert sum(sizes) == cfg.parameters() and len(sizes) == tensors(cfg)


def test_presets_have_their_published_sizes():
    published = {"tiny": 0.79e6, "gpt2": 124e6, "1b": 1.01e9, "7b": 6.9e9}
    assert {n: cfg.parameters() for n, cfg in PRESETS.items()} == pytest.approx(published, rel=0.01)
    of_pythia = {"1b": (1011781632, 805736448), "7b": (6857302016, 6444163072)}
    for name, (total, without_embedding) in of_pythia.items():  # and head: the padded vocabulary
        cfg = PRESETS[name]
        assert 2 * cfg.vocab * cfg.dim == total - without_embedding, name


def test_parameters_keep_their_global_names_wherever_they_go():
    model = gpt(SHAPE)
    assert [name for name, _ in model.named_children()] == ["embedding", "block1", "block2", "head"]
    names = [name for name, _ in model.named_parameters()]
    wrapped = nn.Sequential(nn.Sequential(*model), nn.Linear(2, 2))  # new names, and new parameters
    assert [name for name, _ in named_parameters(wrapped)] == [*names, "1.weight", "1.bias"]
    stage = [name for name, _ in named_parameters(model[1:3])]
    assert stage == [name for name in names if name.startswith("block")]


def test_weights_depend_on_seed_and_name_alone():
    a, b, other = gpt(SHAPE, seed=1), gpt(SHAPE, seed=1), gpt(SHAPE, seed=2)
    deeper = dict(gpt(Config(5, 32, 4, 2, 16, 256), seed=1).named_parameters())
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), other.parameters()):
        assert p.equal(q) and p.equal(deeper[name])
        assert p.ndim == 1 or not p.equal(r)
    matrices = [p for p in a.parameters() if p.ndim > 1]
    assert len({p.flatten()[:4].sum().item() for p in matrices}) == len(matrices)
    assert torch.cat([p.flatten() for p in matrices]).std().item() == pytest.approx(0.02, rel=0.02)


def test_each_parameter_has_a_generator_of_its_own():
    expected = torch.empty(32, 32)
    key = common.zlib.crc32(b"7 block2.attn.o.weight")
    expected.normal_(0, 0.02, generator=torch.Generator().manual_seed(key))
    model = gpt(SHAPE, seed=7)
    assert model.block2.attn.o.weight.equal(expected)
    assert model.head.norm.weight.equal(torch.ones(32)) and not model.head.norm.bias.any()


def test_tied_model_shares_one_matrix():
    model = gpt(Config(1, 32, 4, 4, 16, 256, tie=True), dtype=torch.float64)
    assert model.head.out.weight is model.embedding.weight


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_plain_attention_is_causal_grouped_attention(kv_heads):
    q, (k, v) = torch.randn(2, 4, 9, 8), torch.randn(2, 2, kv_heads, 9, 8)
    repeat = 4 // kv_heads
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(repeat, 1)) / math.sqrt(8)
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=bool).tril(), -math.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(repeat, 1)
    torch.testing.assert_close(common.plain_attention(q, k, v), expected)
    torch.testing.assert_close(common.sdpa_attention(q, k, v), expected)


def test_a_cut_block_has_the_heads_that_its_projections_have():
    """Two halves of the heads, each in a block of its own, sum up to the whole."""
    attn, x = gpt(SHAPE)[1].attn, torch.randn(2, 16, 32)
    whole, total = attn(x), 0
    for half in range(2):
        part = gpt(SHAPE)[1].attn
        for name in ("q", "k", "v"):
            weight = getattr(attn, name).weight
            getattr(part, name).weight = nn.Parameter(weight.chunk(2)[half])
        part.o.weight = nn.Parameter(attn.o.weight.chunk(2, dim=1)[half])
        total = total + part(x)
    torch.testing.assert_close(total, whole)


def test_projections_are_a_seam():
    """What replaces `project` computes all that reads the input, as a fused gather would."""
    block, x = gpt(SHAPE)[1], torch.randn(2, 16, 32)
    expected = block(x)
    attn, mlp = block.attn, block.mlp
    attn.project = lambda x: [x @ linear.weight.T for linear in (attn.q, attn.k, attn.v)]
    mlp.project = lambda x: x @ mlp.up.weight.T
    for linear in (attn.q, attn.k, attn.v, mlp.up):
        linear.forward = None
    torch.testing.assert_close(block(x), expected)


def tables_made(model, tokens):
    made, cos = [], torch.Tensor.cos
    with mock.patch.object(torch.Tensor, "cos", lambda angle: made.append(1) or cos(angle)):
        model(tokens)
    return len(made)


def test_all_blocks_share_ropes_tables():
    """They are made once, and again only for other positions or another precision."""
    model, tokens = gpt(dataclasses.replace(SHAPE, layers=3)), torch.randint(256, (1, 16))
    rope = model.block1.attn.rope
    assert tables_made(model, tokens) == 1
    assert tables_made(model, tokens) == tables_made(model, tokens[:, :7]) == 0
    rope.positions = rope.positions + 1
    assert tables_made(model, tokens) == 1
    assert tables_made(model.double(), tokens) == 1 and rope.cos.dtype == torch.float64


@pytest.mark.parametrize("preset", common.PRESETS)
def test_the_core_is_the_flags_or_else_the_presets(preset):
    parse = lambda *flags: arguments(f"--preset={preset}", "--vocab=256", *flags)
    default = parse()
    assert default.attention == ("plain" if preset == "tiny" else "sdpa")
    for args in (default, parse("--attention=plain"), parse("--attention=sdpa")):
        [core] = {block.attn.core for block in gpt(args.model)[1:-1]}
        assert core is {"plain": common.plain_attention, "sdpa": common.sdpa_attention}[
            args.attention]


def turned(x, position):
    """x (1, 1, 1, head_dim) as a token at this position turns it."""
    rope = common.Rope(SHAPE)
    rope.positions = torch.tensor([position])
    return rope(x)


def test_rope_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i, j):
        return (turned(q, i) * turned(k, j)).sum().item()

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_rope_angles_survive_bfloat16():
    """At position 1001 a bfloat16 angle is off by radians; the rotation may be off by rounding."""
    x = torch.randn(1, 1, 1, 64)
    exact = turned(x.double(), 1001)
    assert gpt(SHAPE).to(torch.bfloat16)[1].attn.rope.positions.dtype == torch.int64
    rounded = turned(x.bfloat16(), 1001).double()
    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0.02)


def test_shorter_and_moved_positions():
    model = gpt(SHAPE, dtype=torch.float64)
    tokens = torch.randint(256, (1, 16))
    whole = model(tokens)
    torch.testing.assert_close(model(tokens[:, :5]), whole[:, :5])
    rope = model.block1.attn.rope  # of all blocks
    rope.positions = rope.positions + 1000
    torch.testing.assert_close(model(tokens), whole)  # RoPE is relative
    rope.positions = rope.positions * 2
    assert not torch.allclose(model(tokens), whole)


def test_the_model_computes_what_its_lesson_says():
    """The whole forward once more, spelled out for one kv head per two heads, in float64."""
    model = gpt(SHAPE, seed=5, dtype=torch.float64)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)  # LayerNorms of all ones hide mistakes
    tokens = torch.randint(256, (2, 16))

    def norm(x, layer):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * layer.weight + layer.bias

    def turned(x):  # pairs (i, i + 4) as complex numbers, turned by position * 10000^(-i/4)
        speed = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        angle = torch.outer(torch.arange(16.0), speed)
        turn = torch.polar(torch.ones(16, 4, dtype=torch.float64), angle)
        z = torch.complex(x[..., :4].contiguous(), x[..., 4:].contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)

    x = model.embedding.weight[tokens]
    for block in model[1:-1]:
        y = norm(x, block.norm1)
        outputs = []
        for head in range(4):
            q = y @ block.attn.q.weight[8 * head : 8 * head + 8].T
            kv = slice(8 * (head // 2), 8 * (head // 2) + 8)
            k, v = y @ block.attn.k.weight[kv].T, y @ block.attn.v.weight[kv].T
            scores = turned(q) @ turned(k).transpose(1, 2) / math.sqrt(8)
            past = torch.ones(16, 16, dtype=bool).tril()
            outputs.append(scores.masked_fill(~past, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(outputs, -1) @ block.attn.o.weight.T
        up = norm(x, block.norm2) @ block.mlp.up.weight.T
        x = x + (up * (1 + torch.erf(up / math.sqrt(2))) / 2) @ block.mlp.down.weight.T
    logits = norm(x, model.head.norm) @ model.head.out.weight.T
    torch.testing.assert_close(model(tokens), logits)


def test_loss_is_a_sum_over_valid_targets_in_float32_or_better():
    logits, targets = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    log_p = logits.float().log_softmax(-1)
    places = [(i, j) for i in range(2) for j in range(5) if targets[i, j] >= 0]
    expected = -sum(log_p[i, j, targets[i, j]] for i, j in places)
    assert loss_sum(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss_sum(logits, targets).dtype == torch.float32
    assert loss_sum(logits.double(), targets).dtype == torch.float64
    assert loss_sum(logits, torch.full((2, 5), -100)).item() == 0


@pytest.mark.parametrize("name", common.OPTIMIZERS)
def test_optimizer_states_are_as_large_as_their_formula_says(name):
    model = gpt(SHAPE, dtype=torch.float64)
    optimizer = common.OPTIMIZERS[name](model.parameters(), None)
    model(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x is not None]
    expected = optimizer_state_bytes(name, SHAPE.parameters(), tensors(SHAPE), 8)
    assert sum(x.nbytes for x in states) == expected


# -------------------------------------------------------------------------------------------- text


def test_the_default_text_is_the_standard_library_on_every_machine(ranks):
    args = arguments("--batch=3")
    args.data = None
    text = common.Text(args)
    library = text.tokens.tobytes()
    assert len(library) > 5e6 and b"def " in library
    assert ranks(1)(checksum) == [common.zlib.crc32(library)]
    tokens, targets, valid = text.batch(0)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == targets.dtype == torch.int64
    assert tokens[:, 1:].equal(targets[:, :-1])  # a target is the next token
    assert bytes(tokens[0].tolist()) in library
    assert valid == 48 and type(valid) is int


def checksum():
    return common.zlib.crc32(common.standard_library())


def test_standard_library_is_sorted_without_tests_and_installed_packages(tmp_path, monkeypatch):
    root = tmp_path / "test/lib"  # only folders below the library's own count
    kept = [f"{folder}{i}.py" for i in (7, 3, 9, 1, 5, 8, 2) for folder in ("z", "json/", "a")]
    left_out = ["test/x.py", "json/tests/x.py", "idlelib/idle_test/x.py", "__pycache__/x.py"]
    left_out += ["x.txt", "site-packages/x.py", "dist-packages/x.py"]
    for name in kept + left_out:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() + b"\xff")
    monkeypatch.setattr(os, "__file__", str(root / "os.py"))
    assert common.standard_library() == b"".join(name.encode() + b"\xff" for name in sorted(kept))


def test_a_batch_depends_on_seed_and_step_alone():
    a, b = (common.Text(arguments("--ignore", 0.4)) for _ in range(2))
    for step in (5, 0):
        for x, y in zip(a.batch(step), b.batch(step)):
            assert torch.as_tensor(x).equal(torch.as_tensor(y))
    assert not a.batch(0)[0].equal(a.batch(1)[0])
    assert not a.batch(1)[0].equal(common.Text(arguments("--seed", 1)).batch(0)[0])


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_ignore_marks_that_share_unevenly(share):
    _, targets, valid = common.Text(arguments("--ignore", share, "--batch", 512)).batch(0)
    per_sequence = (targets != -100).sum(1)
    assert valid == per_sequence.sum() == (targets != -100).sum()
    assert 1 - valid / targets.numel() == pytest.approx(share, abs=0.05)
    assert len(per_sequence.unique()) > 5
    assert common.Text(arguments("--ignore", 0.999999, "--batch", 1)).batch(0)[2] >= 1


def test_bin_file_is_mapped_and_holds_uint16(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "tokens.bin")
    text = common.Text(arguments("--data", tmp_path / "tokens.bin"))
    tokens, targets, _ = text.batch(0)
    assert isinstance(text.tokens, np.memmap) and len(text.tokens) == 300
    assert (targets - tokens == 1).all() and tokens.max() > 255


def test_any_file_is_read_as_bytes(tmp_path):
    (tmp_path / "text.md").write_bytes(bytes(range(256)))
    text = common.Text(arguments("--data", tmp_path / "text.md"))
    assert len(text.tokens) == 256 and (text.batch(0)[1] - text.batch(0)[0] == 1).all()


# ------------------------------------------------------------------------------------------ shards


def shards_of_a_matrix(rows, parts):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    module = nn.Linear(5, rows, bias=False)
    module.weight.data = torch.arange(rows * 5.0).view(rows, 5)
    common.keep_shard(module, "weight", 0, dist.group.WORLD, parts)
    common.keep_shard(module, "weight", 0, dist.group.WORLD, parts)  # it has been cut: left alone
    common.keep_shard(module, "weight", 1, alone)
    weight = module.weight
    return weight.detach().numpy(), [cut[:3] for cut in weight.cuts], tuple(weight.full_shape)


@pytest.mark.parametrize(("world", "rows"), [(1, 4), (2, 4), (3, 7), (4, 10), (8, 16), (4, 3)])
def test_shards_put_together_are_the_whole(ranks, world, rows):
    results = ranks(world)(shards_of_a_matrix, rows, None)
    whole = np.concatenate([shard for shard, _, _ in results])
    assert (whole[:rows] == np.arange(rows * 5.0).reshape(rows, 5)).all() and not whole[rows:].any()
    assert {len(shard) for shard, _, _ in results} == {math.ceil(rows / world)}
    assert [cuts for _, cuts, _ in results] == [[(0, r, world), (1, 0, 1)] for r in range(world)]
    assert results[0][2] == (rows, 5)


def test_fewer_parts_than_ranks_go_to_neighbours(ranks):
    results = ranks(4)(shards_of_a_matrix, 6, 2)
    assert [shard[0, 0] for shard, _, _ in results] == [0, 0, 15, 15]


def test_the_worked_shard_is_what_is_kept():
    linear = nn.Linear(6, 4, bias=False)
    linear.weight.data = torch.arange(24.0).view(4, 6)
    common.name_parameters(linear)
    ranks = {"rows": (1, 2), "columns": (2, 3)}
    rows, columns = (mock.Mock(rank=lambda r=rank: r, size=lambda n=size: n)
                     for rank, size in ranks.values())
    common.keep_shard(linear, "weight", 0, rows)
    assert linear.weight.tolist() == [[*range(12, 18)], [*range(18, 24)]]
    common.keep_shard(linear, "weight", 1, columns)
    assert str(linear.weight.int().tolist()) in common.keep_shard.__doc__
    assert linear.weight.cuts == ((0, 1, 2, rows), (1, 2, 3, columns))
    told = common.keep_shard.__doc__.replace("rows", "0").replace("columns", "0")
    assert ", ".join(str((*cut[:3], 0)) for cut in linear.weight.cuts) in told
    assert tuple(linear.weight.full_shape) == (4, 6)


def cut_mlp(model, group):
    for block in model[1:-1]:
        common.keep_shard(block.mlp.up, "weight", 0, group)
        common.keep_shard(block.mlp.down, "weight", 1, group)


def drawn_after_cutting():
    group, full = dist.group.WORLD, gpt(SHAPE, seed=3)
    model = gpt(SHAPE, seed=None)
    cut_mlp(model, group)
    common.draw_weights(model, seed=3)
    cut_mlp(full, group)
    same = all(p.equal(q) for p, q in zip(model.parameters(), full.parameters()))
    return same, model.block2.mlp.up.weight.untyped_storage().nbytes()


def test_a_rank_draws_just_what_it_keeps(ranks):
    """The values, and no more memory than they take."""
    assert ranks(4)(drawn_after_cutting) == [(True, 4 * 32 * 4 * 32 // 4)] * 4


def norms_of_a_cut_model(whole):
    """Each rank keeps its part of a known gradient; kv heads live on several ranks."""
    world, group = dist.get_world_size(), dist.group.WORLD
    model = gpt(Config(2, 32, 8, 2, 16, 257), dtype=torch.float64)
    for p in model.parameters():
        p.grad = p.detach() * 3
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    if not whole:
        cut_mlp(model, group)
        for block in model[1:-1]:
            common.keep_shard(block.attn.k, "weight", 0, group, parts=1 if world % 2 else 2)
        common.keep_shard(model.head.out, "weight", 0, group)  # 257 rows: padded
        for p in model.parameters():
            p.grad = p.detach() * 3
    norm = common.grad_norm(model.parameters(), group)
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    return expected.item(), norm.item(), common.grad_norm(model.parameters(), group).item()


@pytest.mark.parametrize(("world", "whole"), [
    (1, True), (4, True), (1, False), (2, False), (3, False), (4, False), (8, False)])
def test_grad_norm_counts_every_parameter_once(ranks, world, whole):
    for expected, norm, clipped in ranks(world)(norms_of_a_cut_model, whole):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx(1, rel=1e-5)


def norm_over_stages():
    """Each rank has a layer of its own, as in a pipeline: the squares of their norms add up."""
    layer = nn.Linear(2, 2)
    for p in layer.parameters():
        p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    square = common.grad_norm(layer.parameters()) ** 2
    dist.all_reduce(square)
    return square.item()


def test_squared_norms_add_up_over_stages(ranks):
    assert ranks(3)(norm_over_stages) == pytest.approx([6 * (1 + 4 + 9)] * 3)


def test_grad_norm_needs_no_group_and_skips_parameters_without_gradient():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert common.grad_norm([p, q]).item() == 5
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.full((3,), 300, dtype=torch.float16)  # float16 would overflow
    assert common.grad_norm([p]).item() == pytest.approx(300 * math.sqrt(3))


def norms_in_groups_of_two():
    """Two models of two ranks each: the rows of the mesh are models, the columns their parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.LayerNorm(4)
    common.keep_shard(module, "weight", 0, mesh["tp"].get_group())
    for p in module.parameters():
        p.grad = torch.full_like(p, 1.0 + mesh["dp"].get_local_rank())
    module.bias.partial = mesh["tp"].get_group()
    norm = common.grad_norm(module.parameters(), mesh["tp"].get_group()).item()
    common.sum_partial_grads(module.parameters())
    return norm, module.bias.grad.tolist(), module.weight.untyped_storage().nbytes()


def test_norms_and_sums_stay_in_their_group(ranks):
    one, two = (math.sqrt(8), [2.0] * 4, 8), (math.sqrt(32), [4.0] * 4, 8)
    for result, expected in zip(ranks(4)(norms_in_groups_of_two), (one, one, two, two)):
        assert result[0] == pytest.approx(expected[0]) and result[1:] == expected[1:]


def norm_of_a_matrix_cut_both_ways():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    module = nn.Linear(6, 4)
    module.weight.data = torch.arange(24.0).view(4, 6)
    common.keep_shard(module, "weight", 0, mesh["a"].get_group())
    common.keep_shard(module, "weight", 1, mesh["b"].get_group())
    module.weight.grad = module.weight.detach().clone()
    module.bias.grad = torch.ones(4)
    return common.grad_norm(module.parameters(), dist.group.WORLD).item()


def test_a_matrix_cut_both_ways_counts_once(ranks):
    expected = math.sqrt(sum(x * x for x in range(24)) + 4)
    assert ranks(4)(norm_of_a_matrix_cut_both_ways) == pytest.approx([expected] * 4)


@pytest.mark.parametrize("largest", [1e-4, 1e-3, 1.0])
def test_clipping_is_pytorchs(largest):
    ours, theirs = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))
    ours.grad, theirs.grad = (torch.full((3,), 1e-3, dtype=torch.float64) for _ in range(2))
    clip_grads_with_norm_([ours], largest, common.grad_norm([ours]))
    nn.utils.clip_grad_norm_([theirs], largest)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def partial_gradients():
    norm, half = nn.LayerNorm(4), nn.LayerNorm(2).half()
    norm.weight.partial = dist.group.WORLD
    half.bias.partial = dist.group.WORLD
    norm.weight.grad = torch.full((4,), dist.get_rank() + 1.0) if dist.get_rank() else None
    norm.bias.grad, half.bias.grad = torch.ones(4), torch.ones(2, dtype=torch.float16)
    common.sum_partial_grads([*norm.parameters(), *half.parameters()])
    return norm.weight.grad.tolist(), norm.bias.grad.tolist(), half.bias.grad.tolist()


def test_partial_gradients_are_summed_and_whole_ones_left_alone(ranks):
    """Where a rank has no gradient, it is zero: every rank must join in the same all_reduce."""
    expected = [0.0 + 2 + 3 + 4] * 4, [1.0] * 4, [4.0] * 2
    assert ranks(4)(partial_gradients) == [expected] * 4


# ------------------------------------------------------------------------------------------- flags


def test_flags_make_the_model_and_the_default_is_the_first_variant():
    args = arguments("--kv-heads=4", "--variant=test")
    assert args.model == Config(2, 32, 4, 4, 16, 256)
    variants = {"a": None, "b": None}
    parse = lambda *flags: common.parse("a/01_x.py", "", variants, no_flags, flags)
    assert parse().model == PRESETS["tiny"] and parse().variant == "a"
    gpt2 = Config(12, 768, 12, 12, 8, 50304, True, "sdpa")
    assert parse("--preset=gpt2", "--seq=8").model == gpt2


def test_only_the_tiny_preset_is_verified_by_default():
    for flags, verified in (((), True), (("--no-verify",), False), (("--preset=1b",), False),
                            (("--preset=1b", "--verify"), True)):
        assert arguments(*flags, parse=strict.parse).verify is verified


def test_a_chapter_adds_flags_of_its_own():
    add = lambda parser: parser.add_argument("--stage", type=int, default=3)
    parse = lambda *flags: common.parse("03.py", "", {"a": None}, add, flags)
    assert parse().stage == 3 and parse("--stage=1").stage == 1
    with pytest.raises(SystemExit, match="2"):
        parse("--sta=1")


def test_a_batch_that_cannot_be_shared_is_refused():
    args = arguments("--batch=12", shares=2)
    assert (args.shares, args.micro_batch) == (2, 6)
    assert arguments("--batch=12", "--micro-batch=3", shares=2).micro_batch == 3
    for flags, line in (
        (("--batch=12", "--micro-batch=5"), "12 is not a multiple of 2 data.* = 10; --batch 20"),
        (("--batch=11",), "11 is not a multiple of 2 data.* = 2; --batch 12"),
    ):
        with pytest.raises(common.Refused) as refused:
            arguments(*flags, shares=2)
        assert re.fullmatch(f"--batch {line}", "; ".join(refused.value.args))


# ----------------------------------------------------------------------------------------- the run


@pytest.mark.parametrize(("device", "gpus", "expected"), [
    ("auto", 8, ("cuda:1", "nccl")),
    ("cuda", 4, ("cuda:1", "nccl")),
    ("cpu", 8, ("cpu", "gloo")),
    ("auto", 3, ("cpu", "gloo")),
    ("auto", 0, ("cpu", "gloo")),
])
def test_a_gpu_for_every_local_rank_or_the_cpu(monkeypatch, device, gpus, expected):
    """The second of four ranks on the second of two machines, without the machines."""
    started = []
    for variable, value in dict(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: started.append(device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: started.append(backend))
    joined = common.join_ranks(argparse.Namespace(device=device), rank=5)
    assert (str(joined), started[-1]) == expected
    assert started[:-1] == ([joined] if joined.type == "cuda" else [])


def device_in_the_group_of_the_test():
    with mock.patch("torch.cuda.device_count", lambda: 8):
        return str(common.join_ranks(argparse.Namespace(device="auto"), 0))


def test_the_device_follows_the_group_that_is_there(ranks):
    """Of gloo's ranks, here the pool's, none takes a GPU."""
    assert ranks(1)(device_in_the_group_of_the_test) == ["cpu"]


def matmul_precision(*flags):
    report.Run(arguments(*flags, parse=strict.parse))
    return torch.get_float32_matmul_precision()


def test_float32_is_rounded_to_tf32_only_where_nothing_is_verified(ranks):
    assert ranks(1)(matmul_precision) == ["highest"]
    assert ranks(1)(matmul_precision, "--no-verify") == ["high"]
    assert ranks(1)(matmul_precision, "--verify") == ["highest"]


def shared_batches():
    args = arguments("--batch=12", "--micro-batch=2", "--ignore=0.5", shares=3)
    run = common.Run(args)
    return list(run.batches()), list(run.batches(share=2))


def test_a_share_of_each_batch_in_micro_batches(ranks):
    [(first, last)] = ranks(1)(shared_batches)
    text = common.Text(arguments("--batch=12", "--ignore=0.5"))
    assert len(first) == len(last) == 3
    for step, (a, b) in enumerate(zip(first, last)):
        tokens, targets, valid = text.batch(step)
        for batch, share in ((a, slice(0, 4)), (b, slice(8, 12))):
            assert (batch.step, batch.valid, len(batch.micro_batches)) == (step, valid, 2)
            assert batch.tokens.equal(tokens) and batch.targets.equal(targets)
            for i, whole in enumerate((tokens, targets)):
                assert torch.cat([pair[i] for pair in batch.micro_batches]).equal(whole[share])


def one_gpu(optimizer, clip):
    """Three steps on one GPU by common.py, and the same in PyTorch's words."""
    run = common.Run(arguments("--dtype=float64", "--ignore=0.5", *optimizer, *clip))
    kind = run.args.optimizer
    model = gpt(run.args.model, run.args.seed, dtype=torch.float64)
    theirs = {"adamw": lambda p: torch.optim.AdamW(p, 5e-4, (0.9, 0.95), eps=1e-6),
              "sgd": lambda p: torch.optim.SGD(p, 0.3)}[kind](model.parameters())
    norms, differences = [], []
    for batch in run.batches():
        loss, norm = run.one_gpu_step(batch)
        theirs.zero_grad()
        expected = nn.functional.cross_entropy(
            model(batch.tokens).transpose(1, 2), batch.targets, ignore_index=-100)
        expected.backward()
        norms.append(norm.item())
        largest = run.args.clip or math.inf
        total = nn.utils.clip_grad_norm_(model.parameters(), largest)
        theirs.step()
        differences += [(loss - expected).item(), (norm - total).item()]
    pairs = zip(run.one_gpu.parameters(), model.parameters())
    return norms, max(map(abs, differences)), max((p - q).abs().max().item() for p, q in pairs)


@pytest.mark.parametrize("optimizer", [(), ("--optimizer=sgd", "--lr=0.3")])
@pytest.mark.parametrize("clip", [(), ("--clip=0.1",)])
def test_one_gpus_step_is_pytorchs(ranks, optimizer, clip):
    [(norms, scalars, parameters)] = ranks(1)(one_gpu, optimizer, clip)
    assert min(norms) > 0.1 and scalars < 1e-12 and parameters < 1e-12


def lines_of_a_bare_run():
    run, output = common.Run(arguments("--steps=2")), io.StringIO()
    with contextlib.redirect_stdout(output):
        for batch in run.batches():
            with run.measure(), run.span(("F", 0, 0), []):
                pass
            run.log(batch, torch.tensor(5.25), torch.tensor(0.5), None, loads=[1])
    return output.getvalue(), run.status


def test_a_bare_run_prints_a_line_per_step_on_one_rank(ranks):
    (lines, status), (nothing, other) = ranks(2)(lines_of_a_bare_run)
    line = r"step {}: loss 5\.2500, on one GPU 5\.\d+, gradient norm 0\.5000, \d+ ms\n"
    assert re.fullmatch(line.format(1) + line.format(2), lines), lines
    assert (nothing, status, other) == ("", 0, 0)


# ------------------------------------------------------------------- a chapter and common.py, alone


BARE = (*SMALL, "--layers=4", "--steps=2", f"--data={TEXT}", "--batch=4", "--dtype=float64")
LINE = r"step (\d+): loss (\S+), on one GPU (\S+), gradient norm (\S+), \d+ ms"


def copied(name, folder):
    shutil.copy(CHAPTERS / f"{name}.py", folder)
    shutil.copy(ROOT / "common.py", folder)


def launch_alone(name, folder, flags):
    """For a rank of the pool: launch a chapter beside a common.py in a folder without lab/. Returns
    its status and output."""
    output, ours, wrong = io.StringIO(), sys.modules["common"], io.StringIO()
    with (contextlib.redirect_stdout(output), contextlib.redirect_stderr(wrong),
          mock.patch.object(sys, "argv", [f"{name}.py", *flags]),
          mock.patch.object(sys, "path", [str(folder), *sys.path])):
        try:
            del sys.modules["common"]
            runpy.run_path(str(folder / f"{name}.py"), run_name="__main__")
        except SystemExit as leaving:
            status = leaving.code
        finally:
            sys.modules["common"] = ours
    return status, output.getvalue(), wrong.getvalue()


def hold_bare_run(output):
    steps, losses, one_gpus, norms = zip(*re.findall(LINE, output))
    assert steps == ("1", "2") and losses == one_gpus and len(set(losses)) == 2, output
    assert all(5 < float(loss) < 6 for loss in losses) and all(float(norm) > 0 for norm in norms)
    return losses, norms


@pytest.mark.parametrize("name", training_chapters())
def test_a_chapter_and_common_train_alone(ranks, tmp_path, name):
    """Copied to an empty folder, on 1 rank and on 4: the losses are those of one GPU, and the same
    for both, so that neither text nor weights nor a rate depend on the number of ranks."""
    copied(name, tmp_path)
    found = set()
    for world in (1,) if name.startswith("01") else (1, 4):
        (status, output, wrong), *others = ranks(world)(launch_alone, name, tmp_path, BARE)
        assert status == 0 and not wrong and all(other == (0, "", "") for other in others), wrong
        found.add(hold_bare_run(output))
    assert len(found) == 1, found


def test_chapter_00_and_common_alone(ranks, tmp_path):
    """It trains nothing: it prints what it has found, and who waits for whom."""
    name = "00_collectives"
    chapter(name)  # or skip
    copied(name, tmp_path)
    for flags, last in (
        ((), r"Found\(name='all_reduce_doubling', rounds=\[.*\], equal=True\)"),
        (["--variant=hello"], "rank 2 of 3: process .*, tensors on cpu, sent over gloo"),
        (["--variant=skip"], "rank 0 waits for rank 2 to send; rank 1 waits for .*end"),
    ):
        (status, output, wrong), *others = ranks(3)(launch_alone, name, tmp_path, flags)
        assert (status, wrong) == (0, "") and all(other == (0, "", "") for other in others), wrong
        assert re.fullmatch(last, output.splitlines()[-1]), output


@pytest.mark.full
def test_a_chapter_alone_under_torchrun(tmp_path):
    """As a user would start it: nothing but its lines, and a clean end."""
    copied("04_tensor_parallel", tmp_path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    run = subprocess.run([*command, "04_tensor_parallel.py", *BARE], cwd=tmp_path,
                         env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True,
                         text=True, timeout=300)
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
    hold_bare_run(run.stdout)


# ------------------------------------------------------------------------------------------ leaving

LEAVES = """
import atexit
import weakref

import torch.distributed as dist

import common

class Cycle:
    pass

def train(run):
    atexit.register(print, "Python shuts down, while the group's threads may run")
    cycle = Cycle()
    cycle.itself, cycle.mesh = cycle, run.mesh(dp=1)
    gone, destroy = weakref.ref(cycle), dist.destroy_process_group
    dist.destroy_process_group = lambda: (print("collected:", gone() is None), destroy())
    {ending}

common.launch(__file__, "", {{"test": train}}, lambda args, ranks: None)
"""


@pytest.mark.parametrize(("lab", "ending", "status"), [
    (False, "run.status = 1", 1), (True, "run.finish = lambda: 1", 1),
    (True, "raise common.Refused('no', '--steps 1')", 2)])
def test_launch_leaves_cleanly_with_the_status_of_the_run(tmp_path, lab, ending, status):
    shutil.copy(ROOT / "common.py", tmp_path)
    if lab:
        (tmp_path / "lab").symlink_to(ROOT / "lab")
    (tmp_path / "leaves.py").write_text(LEAVES.format(ending=ending))
    command = [sys.executable, tmp_path / "leaves.py", f"--data={TEXT}"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100)
    shuts_down = "" if lab else "Python shuts down, while the group's threads may run\n"
    assert (run.returncode, run.stdout) == (status, "collected: True\n" + shuts_down)
    assert run.stderr == ("error: no; --steps 1 would work\n" if status == 2 else "")
