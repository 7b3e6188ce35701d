"""common.py: configuration, text, model, shards, meters, verifier and report."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import ROOT, TEXT
from torch import nn

import common
from common import PRESETS, Config, gpt, loss_sum

SMALL = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)
A_TEXT = f"--data={TEXT}"  # quicker to read than the standard library
FLAGS = ["--layers=2", "--dim=32", "--heads=4", "--kv-heads=2", "--seq=16"]  # the same, as flags


def arguments(*flags, data_parallel=1):
    parser = common.parser("00_test.py", "", ("test",), "test", steps=3)
    args = common.parse(parser, [*FLAGS, *map(str, flags)])
    common.split_batch(args, data_parallel)
    return args


# ------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("cfg", [*PRESETS.values(), SMALL, Config(3, 48, 6, 1, 8, 100, tie=True)])
def test_number_of_parameters(cfg):
    with torch.device("meta"):
        model = nn.ModuleList([common.Block(cfg) for _ in range(cfg.layers)] + [common.Head(cfg)])
    embedding = 0 if cfg.tie else cfg.vocab * cfg.dim
    assert sum(p.numel() for p in model.parameters()) + embedding == cfg.parameters()


def test_presets_have_their_published_sizes():
    published = {"tiny": 0.79e6, "gpt2": 124e6, "1b": 1.01e9, "7b": 6.9e9}
    assert {n: cfg.parameters() for n, cfg in PRESETS.items()} == pytest.approx(published, rel=0.01)


def test_a_slice_of_the_model_keeps_the_names_of_its_parameters():
    model = gpt(SMALL)
    assert [name for name, _ in model.named_children()] == ["embedding", "block1", "block2", "head"]
    assert set(dict(model[1:3].named_parameters())) == {
        name for name in dict(model.named_parameters()) if name.startswith("block")
    }


def test_weights_depend_on_seed_and_name_alone():
    a, b, other = gpt(SMALL, seed=1), gpt(SMALL, seed=1), gpt(SMALL, seed=2)
    deeper = dict(gpt(Config(5, 32, 4, 2, 16, 256), seed=1).named_parameters())
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), other.parameters()):
        assert p.equal(q) and p.equal(deeper[name])
        assert p.ndim == 1 or not p.equal(r)
    matrices = [p for p in a.parameters() if p.ndim > 1]
    assert len({p.flatten()[:4].sum().item() for p in matrices}) == len(matrices)
    assert torch.cat([p.flatten() for p in matrices]).std().item() == pytest.approx(0.02, rel=0.02)


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
    attn, x = gpt(SMALL)[1].attn, torch.randn(2, 16, 32)
    whole, total = attn(x), 0
    for half in range(2):
        part = gpt(SMALL)[1].attn
        for name in ("q", "k", "v"):
            weight = getattr(attn, name).weight
            getattr(part, name).weight = nn.Parameter(weight.chunk(2)[half])
        part.o.weight = nn.Parameter(attn.o.weight.chunk(2, dim=1)[half])
        total = total + part(x)
    torch.testing.assert_close(total, whole)


def test_rope_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    score = lambda i, j: (
        common.rope(q, torch.tensor([i])) * common.rope(k, torch.tensor([j]))
    ).sum()
    assert score(7, 3).item() == pytest.approx(score(104, 100).item(), rel=1e-10)
    assert score(7, 3).item() != pytest.approx(score(7, 4).item(), rel=1e-3)


def test_rope_angles_survive_bfloat16():
    """At position 1001 a bfloat16 angle is off by radians; the rotation may be off by rounding."""
    x = torch.randn(1, 1, 1, 64)
    position = torch.tensor([1001])
    exact = common.rope(x.double(), position)
    model = gpt(SMALL).to(torch.bfloat16)
    assert model[1].attn.positions.dtype == torch.int64
    torch.testing.assert_close(
        common.rope(x.bfloat16(), position).double(), exact, atol=0.03, rtol=0.02
    )


def test_shorter_and_moved_positions():
    model = gpt(SMALL, dtype=torch.float64)
    tokens = torch.randint(256, (1, 16))
    whole = model(tokens)
    torch.testing.assert_close(model(tokens[:, :5]), whole[:, :5])
    for block in model[1:-1]:
        block.attn.positions = block.attn.positions + 1000
    torch.testing.assert_close(model(tokens), whole)  # RoPE is relative
    for block in model[1:-1]:
        block.attn.positions = block.attn.positions * 2
    assert not torch.allclose(model(tokens), whole)


def test_the_model_computes_what_its_lesson_says():
    """The whole forward once more, spelled out for one kv head per two heads, in float64."""
    model = gpt(SMALL, seed=5, dtype=torch.float64)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)  # LayerNorms of all ones hide mistakes
    tokens = torch.randint(256, (2, 16))

    def norm(x, layer):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * layer.weight + layer.bias

    def turned(x):  # pairs (i, i + 4) as complex numbers, turned by position * 10000^(-i/4)
        speed = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        turn = torch.polar(
            torch.ones(16, 4, dtype=torch.float64), torch.outer(torch.arange(16.0), speed)
        )
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


def test_each_parameter_has_a_generator_of_its_own():
    expected = torch.empty(32, 32)
    key = common.zlib.crc32(b"7 block2.attn.o.weight")
    expected.normal_(0, 0.02, generator=torch.Generator().manual_seed(key))
    model = gpt(SMALL, seed=7)
    assert model.block2.attn.o.weight.equal(expected)
    assert model.head.norm.weight.equal(torch.ones(32)) and not model.head.norm.bias.any()


def test_loss_is_a_sum_over_valid_targets_in_float32_or_better():
    logits, targets = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    log_p = logits.float().log_softmax(-1)
    expected = -sum(
        log_p[i, j, targets[i, j]] for i in range(2) for j in range(5) if targets[i, j] >= 0
    )
    assert loss_sum(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss_sum(logits, targets).dtype == torch.float32
    assert loss_sum(logits.double(), targets).dtype == torch.float64
    assert loss_sum(logits, torch.full((2, 5), -100)).item() == 0


# -------------------------------------------------------------------------------------------- text


def test_standard_library_is_the_same_everywhere(ranks):
    text = common.standard_library()
    assert len(text) > 5e6 and b"def " in text
    assert text == common.standard_library()
    assert set(ranks(2)(checksum)) == {common.zlib.crc32(text)}


def checksum():
    return common.zlib.crc32(common.standard_library())


def test_standard_library_is_sorted_without_tests_and_installed_packages(tmp_path, monkeypatch):
    root = tmp_path / "test/lib"  # only folders below the library's own count
    kept = [f"{folder}{i}.py" for i in (7, 3, 9, 1, 5, 8, 2) for folder in ("z", "json/", "a")]
    left_out = [
        "test/x.py",
        "json/tests/x.py",
        "idlelib/idle_test/x.py",
        "__pycache__/x.py",
        "x.txt",
    ]
    left_out += ["site-packages/x.py", "dist-packages/x.py"]
    for name in kept + left_out:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() + b"\xff")
    monkeypatch.setattr(common.sysconfig, "get_path", lambda name: str(root))
    assert common.standard_library() == b"".join(name.encode() + b"\xff" for name in sorted(kept))


def test_the_vocabulary_may_end_at_the_highest_token(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(200)))
    flags = ("--seq", 199, "--data", tmp_path / "text", "--vocab")
    assert common.Text(arguments(*flags, 200)).batch(0)[1].max() == 199
    with pytest.raises(SystemExit, match="2"):
        common.Text(arguments(*flags, 199))


def test_a_batch_depends_on_seed_and_step_alone():
    a, b = (
        common.Text(arguments(A_TEXT, "--ignore", 0.4)),
        common.Text(arguments(A_TEXT, "--ignore", 0.4)),
    )
    for step in (5, 0):
        for x, y in zip(a.batch(step), b.batch(step)):
            assert torch.as_tensor(x).equal(torch.as_tensor(y))
    assert not a.batch(0)[0].equal(a.batch(1)[0])
    assert not a.batch(1)[0].equal(common.Text(arguments(A_TEXT, "--seed", 1)).batch(0)[0])


def test_targets_are_the_next_tokens():
    tokens, targets, valid = common.Text(arguments("--batch", 3)).batch(0)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == targets.dtype == torch.int64
    assert tokens[:, 1:].equal(targets[:, :-1])
    assert bytes(tokens[0].tolist()) in common.standard_library()
    assert valid == 48 and type(valid) is int


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_ignore_marks_that_share_unevenly(share):
    text = common.Text(arguments(A_TEXT, "--ignore", share, "--batch", 512))
    _, targets, valid = text.batch(0)
    per_sequence = (targets != -100).sum(1)
    assert valid == per_sequence.sum() == (targets != -100).sum()
    assert 1 - valid / targets.numel() == pytest.approx(share, abs=0.05)
    assert len(per_sequence.unique()) > 5
    assert common.Text(arguments(A_TEXT, "--ignore", 0.999999, "--batch", 1)).batch(0)[2] >= 1


def test_bin_file_is_mapped_and_holds_uint16(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "tokens.bin")
    text = common.Text(arguments("--data", tmp_path / "tokens.bin", "--vocab", 512))
    tokens, targets, _ = text.batch(0)
    assert isinstance(text.tokens, np.memmap) and len(text.tokens) == 300
    assert (targets - tokens == 1).all() and tokens.max() > 255


def test_any_file_is_read_as_bytes(tmp_path):
    (tmp_path / "text.md").write_bytes(bytes(range(256)))
    text = common.Text(arguments("--data", tmp_path / "text.md"))
    assert len(text.tokens) == 256 and (text.batch(0)[1] - text.batch(0)[0] == 1).all()


def test_a_high_token_of_a_bin_is_refused_when_its_batch_is_made(tmp_path, capsys):
    tokens = np.zeros(2000, "<u2")
    tokens[1000] = 300
    tokens.tofile(tmp_path / "rare.bin")
    text = common.Text(arguments("--data", tmp_path / "rare.bin", "--batch", 1))
    with pytest.raises(SystemExit, match="2"):
        [text.batch(step) for step in range(2000)]
    assert "--vocab 256 is too small for token 300" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("device", "gpus", "expected"),
    [
        ("auto", 8, ("cuda:1", "nccl", "cuda, nccl (2 machines, GPUs: 8, local ranks: 4)")),
        ("cuda", 4, ("cuda:1", "nccl", "cuda, nccl (2 machines, --device cuda)")),
        ("cpu", 8, ("cpu", "gloo", "cpu, gloo (2 machines, --device cpu)")),
        ("auto", 3, ("cpu", "gloo", "cpu, gloo (2 machines, GPUs: 3, local ranks: 4)")),
        ("auto", 0, ("cpu", "gloo", "cpu, gloo (2 machines, no GPU)")),
    ],
)
def test_a_gpu_for_every_local_rank_or_the_cpu(monkeypatch, device, gpus, expected):
    """The second of four ranks on the second of two machines, without the machines."""
    started = []
    for variable, value in dict(RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4).items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: started.append(backend))
    ranks = common.start(common.argparse.Namespace(device=device))
    assert (str(ranks.device), *started, ranks.where) == expected
    assert (ranks.rank, ranks.world) == (5, 8)


LEAVES = """
import atexit
import weakref
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import common

class Cycle:
    pass

def main():
    atexit.register(print, "Python shuts down, while the group's threads may run")
    common.start(common.argparse.Namespace(device="cpu"))
    mesh = init_device_mesh("cpu", (1,))
    cycle = Cycle()
    cycle.itself, cycle.mesh = cycle, mesh
    gone, destroy = weakref.ref(cycle), dist.destroy_process_group
    dist.destroy_process_group = lambda: (print("collected:", gone() is None), destroy())
    {ending}

common.launch(main)
"""


@pytest.mark.parametrize(("ending", "status"), [("return 1", 1), ("common.refuse('no')", 2)])
def test_launch_leaves_cleanly_with_the_status_of_main(tmp_path, ending, status):
    (tmp_path / "leaves.py").write_text(LEAVES.format(ending=ending))
    command = [sys.executable, tmp_path / "leaves.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert (run.returncode, run.stdout) == (status, "collected: True\n")
    assert run.stderr == ("error: no\n" if status == 2 else "")


# ------------------------------------------------------------------------------------------ shards


def shards_of_a_matrix(rows, parts):
    module = nn.Linear(5, rows, bias=False)
    module.weight.data = torch.arange(rows * 5.0).view(rows, 5)
    common.keep_shard(module, "weight", 0, dist.group.WORLD, parts)
    common.keep_shard(
        module, "weight", 1, dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
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


def bytes_behind_a_drawn_part():
    model = gpt(SMALL, seed=None)
    common.keep_shard(model.head.out, "weight", 0, dist.group.WORLD)
    common.draw_weights(model, 0)
    return model.head.out.weight.untyped_storage().nbytes()


def test_what_is_drawn_holds_no_more_than_its_part(ranks):
    assert ranks(2)(bytes_behind_a_drawn_part) == [4 * SMALL.vocab * SMALL.dim // 2] * 2


def uneven_parts():
    with pytest.raises(ValueError, match="2 parts of weight do not divide 3 ranks"):
        shards_of_a_matrix(6, 2)


def test_parts_that_do_not_divide_the_ranks_are_refused(ranks):
    ranks(3)(uneven_parts)


def test_fewer_parts_than_ranks_go_to_neighbours(ranks):
    results = ranks(4)(shards_of_a_matrix, 6, 2)
    assert [shard[0, 0] for shard, _, _ in results] == [0, 0, 15, 15]


def cut_mlp(model, group):
    for block in model[1:-1]:
        common.keep_shard(block.mlp.up, "weight", 0, group)
        common.keep_shard(block.mlp.down, "weight", 1, group)


def drawn_after_cutting():
    group, full = dist.group.WORLD, gpt(SMALL, seed=3)
    model = gpt(SMALL, seed=None)
    cut_mlp(model, group)
    common.draw_weights(model, seed=3)
    cut_mlp(full, group)
    return all(p.equal(q) for p, q in zip(model.parameters(), full.parameters()))


def test_a_rank_draws_just_what_it_keeps(ranks):
    assert ranks(4)(drawn_after_cutting) == [True] * 4


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
    common.clip_grads(model.parameters(), norm, 1.0)
    return expected.item(), norm.item(), common.grad_norm(model.parameters(), group).item()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_grad_norm_counts_every_parameter_once(ranks, world, whole):
    for expected, norm, clipped in ranks(world)(norms_of_a_cut_model, whole):
        assert norm == pytest.approx(expected, rel=1e-12)
        assert clipped == pytest.approx(1, rel=1e-5)


def norm_over_stages():
    """Each rank has a layer of its own, as in a pipeline: their squares add up."""
    layer = nn.Linear(2, 2)
    for p in layer.parameters():
        p.grad = torch.full_like(p, dist.get_rank() + 1.0)
    square = common.squared_norm(layer.parameters())
    dist.all_reduce(square)
    return square.item()


def test_squared_norms_add_up_over_stages(ranks):
    assert ranks(3)(norm_over_stages) == [6 * (1 + 4 + 9)] * 3


def test_grad_norm_needs_no_group_and_skips_parameters_without_gradient():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    assert common.grad_norm([p, q]).item() == 0
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    assert common.grad_norm([p, q]).item() == 5
    common.clip_grads([p, q], torch.tensor(5.0), 10.0)
    assert p.grad.tolist() == [3, 0, 4]  # under the limit: untouched
    p = nn.Parameter(torch.ones(3, dtype=torch.float16))
    p.grad = torch.full((3,), 300, dtype=torch.float16)
    assert common.grad_norm([p]).item() == pytest.approx(
        300 * math.sqrt(3)
    )  # float16 would overflow


def norms_in_groups_of_two():
    """Two models of two ranks each: the rows of the mesh are models, the columns their parts."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = nn.LayerNorm(4)
    common.keep_shard(module, "weight", 0, mesh["tp"].get_group())
    for p in module.parameters():
        p.grad = torch.full_like(p, 1.0 + mesh["dp"].get_local_rank())
    common.keep_whole(module, "bias", mesh["tp"].get_group())
    norm = common.grad_norm(module.parameters(), mesh["tp"].get_group()).item()
    common.sum_partial_grads(module.parameters())
    return norm, module.bias.grad.tolist(), common.nbytes([module.weight])


def test_norms_and_sums_stay_in_their_group(ranks):
    one, two = (math.sqrt(8), [2.0] * 4, 8), (math.sqrt(32), [4.0] * 4, 8)
    for result, expected in zip(ranks(4)(norms_in_groups_of_two), (one, one, two, two)):
        assert result[0] == pytest.approx(expected[0]) and result[1:] == expected[1:]


def norm_of_a_matrix_cut_both_ways():
    from torch.distributed.device_mesh import init_device_mesh

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
    common.clip_grads([ours], common.grad_norm([ours]), largest)
    nn.utils.clip_grad_norm_([theirs], largest)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=0)


def partial_gradients():
    norm = nn.LayerNorm(4)
    common.keep_whole(norm, "weight", dist.group.WORLD)
    norm.weight.grad = torch.full((4,), dist.get_rank() + 1.0) if dist.get_rank() else None
    norm.bias.grad = torch.ones(4)
    common.sum_partial_grads(norm.parameters())
    return norm.weight.grad.tolist(), norm.bias.grad.tolist()


def test_partial_gradients_are_summed_and_whole_ones_left_alone(ranks):
    assert ranks(4)(partial_gradients) == [([9.0] * 4, [1.0] * 4)] * 4  # 0 + 2 + 3 + 4


# ------------------------------------------------------------------------------------------ meters


def test_nbytes_counts_a_storage_once():
    x = torch.zeros(10)
    doubles = [torch.zeros(2, dtype=torch.float64)]
    assert common.nbytes([x, x[:3], x.view(2, 5), None, doubles]) == 56
    assert common.nbytes([x[:3]]) == 40  # a view keeps all of its storage alive


def test_activation_meter_counts_each_storage_once_and_no_parameter():
    linear, x = nn.Linear(8, 4, bias=False), torch.randn(2, 8)
    gathered = linear.weight.detach().clone().requires_grad_()  # as ZeRO-3 gathers a weight
    meter = common.ActivationMeter([*linear.parameters(), x])
    meter.ignore([gathered])
    with meter:
        h = linear(x)  # saves x and weight.t(): both known
        h = F.linear(x, gathered) + h
        h = h.exp()  # saves its result, 2*4 floats
        h = h * h  # saves it twice more
        (h[:1] * h[1:]).sum()  # views of the same storage
        (x + 1)[:1] * h[:1, :1].expand(1, 8)  # a view of another, which stays alive: 2*8 floats
    assert meter.bytes == (2 * 4 + 2 * 8 + 2 * 4) * 4
    h.sum().backward()
    assert linear.weight.grad is not None


def every_collective():
    n, group = dist.get_world_size(), dist.group.WORLD
    import torch.distributed._functional_collectives as functional

    x, full = torch.ones(6), torch.ones(6 * n)
    meter = common.CommMeter()
    with meter:
        dist.all_reduce(x.clone())
        dist.all_reduce(x.clone(), async_op=True).wait()
        functional.all_reduce(x, "sum", group) + 0
        common.all_gather(full.clone(), x)
        dist.all_gather([torch.empty(6) for _ in range(n)], x)
        common.reduce_scatter(x.clone(), full)
        dist.broadcast(x.clone(), 0)
        dist.reduce(x.clone(), 0)
        pieces = [torch.empty(6) for _ in range(n)] if dist.get_rank() == 0 else None
        dist.gather(x, pieces, 0)
        dist.scatter(x.clone(), pieces, 0)
        dist.all_to_all_single(full.clone(), full)
        functional.all_to_all_single(full, None, None, group) + 0
        dist.barrier()
        peer = dist.get_rank() ^ 1
        if peer < n:
            ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(6), peer)]
            [work.wait() for work in dist.batch_isend_irecv(ops)]
    before = dict(meter.total)
    dist.all_reduce(x)  # outside: not counted
    return before == meter.total, meter.total


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_comm_meter_counts_calls_payload_and_wire_bytes(ranks, n):
    def row(calls, payload, wire):
        return {"calls": calls, "bytes": payload, "wire_bytes": wire}

    for rank, (unchanged, total) in enumerate(ranks(n)(every_collective)):
        sends = {"send": row(1, 24, 24)} if rank ^ 1 < n else {}
        at_root = row(1, 24 * n, 24 * n) if rank == 0 else row(1, 24, 24)  # others see their piece
        assert unchanged and total == sends | {
            "all_reduce": row(3, 3 * 24, 3 * 24 * 2 * (n - 1) / n),
            "all_gather": row(2, 2 * 24 * n, 2 * 24 * (n - 1)),
            "reduce_scatter": row(1, 24 * n, 24 * (n - 1)),
            "broadcast": row(1, 24, 24),
            "reduce": row(1, 24, 24),
            "gather": at_root,
            "scatter": at_root,
            "all_to_all": row(2, 2 * 24 * n, 2 * 24 * (n - 1)),
        }


def uneven_all_to_all():
    rank = dist.get_rank()  # rank 0 sends 5 to rank 1, rank 1 sends 1 back
    sends, receives = ([0, 5], [0, 1]) if rank == 0 else ([1, 0], [5, 0])
    meter = common.CommMeter()
    with meter:
        dist.all_to_all_single(torch.empty(sum(receives)), torch.ones(sum(sends)), receives, sends)
    return meter.total["all_to_all"]["bytes"]


def test_an_uneven_all_to_all_counts_what_it_sends(ranks):
    assert ranks(2)(uneven_all_to_all) == [20, 4]


def comm_in_a_subgroup():
    import torch.distributed._functional_collectives as functional

    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    meter, x = common.CommMeter(), torch.ones(6)
    with meter:
        dist.all_reduce(x, group=pairs[dist.get_rank() // 2])
        functional.all_reduce(x, "sum", pairs[dist.get_rank() // 2]) + 0
    return meter.total["all_reduce"]


def test_wire_bytes_are_those_of_the_group(ranks):
    assert ranks(4)(comm_in_a_subgroup) == [{"calls": 2, "bytes": 48, "wire_bytes": 48}] * 4


def comm_of_ddp_and_dtensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    meter = common.CommMeter()
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8, bias=False))
    with meter:
        model(torch.ones(2, 8)).sum().backward()
    ddp = dict(meter.total)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
    meter = common.CommMeter()
    with meter:
        sharded.full_tensor()
        sharded.softmax(0)  # over the cut dimension: DTensor gathers inside of the operator
        sharded.sum().full_tensor()  # a partial sum: an all_reduce
    return ddp, meter.total, common.nbytes([sharded])


def test_comm_meter_sees_ddp_and_dtensor(ranks):
    for ddp, dtensor, held in ranks(2)(comm_of_ddp_and_dtensor):
        assert ddp == {"all_reduce": {"calls": 1, "bytes": 256, "wire_bytes": 256}}
        assert dtensor["all_gather"] == {"calls": 2, "bytes": 512, "wire_bytes": 256}
        assert dtensor["all_reduce"] == {"calls": 1, "bytes": 4, "wire_bytes": 4}
        assert held == 128


# ------------------------------------------------------------------------- the run and its verifier


def train(flags, plant=None):
    """A small data-parallel run on the house alone; `plant` breaks it. Returns (status, JSON)."""
    world, rank = dist.get_world_size(), dist.get_rank()
    args = arguments(*flags, data_parallel=world)
    args.json = Path(flags[-1])
    dtype, group = common.DTYPES[args.dtype], dist.group.WORLD
    text, ranks = common.Text(args), common.start(args)
    run = common.Run(args, ranks, text, lambda: gpt(args.model, args.seed, dtype=dtype))
    model = gpt(args.model, args.seed, dtype=dtype)
    optimizer = common.OPTIMIZERS[args.optimizer](model.parameters(), args.lr)

    for step in range(args.steps):
        tokens, targets, valid = batch = text.batch(step)
        mine = [x.chunk(world)[rank].split(args.micro_batch) for x in (tokens, targets)]
        with run.measure(step):
            if step < min(common.METERED_STEP, args.steps - 1):
                dist.all_reduce(torch.ones(1000))  # what only the first steps send
            optimizer.zero_grad()
            loss = torch.zeros((), dtype=dtype)
            for x, y in zip(*mine):
                count = (
                    len(y.flatten()[y.flatten() != -100]) * world
                    if plant == "local means"
                    else valid
                )
                part = loss_sum(model(x), y) / count
                part.backward()
                loss += part.detach()
            for p in model.parameters():
                if plant != "no all_reduce":
                    dist.all_reduce(p.grad, group=group)
                if plant == "mean":
                    p.grad /= world
            norm = common.grad_norm(model.parameters())
            if plant == "norm counted twice":
                norm *= 2**0.5
            if args.clip:
                common.clip_grads(model.parameters(), norm, args.clip)
            optimizer.step()
            if plant == "parameter" and rank == world - 1:
                model.block2.mlp.up.weight.data[3, 3] += 1e-3
        dist.all_reduce(loss, group=group)
        if plant == "loss":
            loss *= 1.001
        held = [(n, p) for n, p in model.named_parameters() if plant != "missing" or "mlp" not in n]
        run.log(step, batch, loss, norm, held)

    size = sum(p.nbytes for p in model.parameters())
    tensors = len(list(model.parameters()))
    run.check(
        "parameters", common.nbytes(model.parameters()), size + (plant == "formula" and rank == 1)
    )
    wire = 2 * (world - 1) / world * size
    run.check_comm({"all_reduce": (tensors, size + (plant == "traffic"), wire)})
    status = run.finish()
    return status, json.loads(args.json.read_text()) if rank == 0 else None


FLOAT64 = ("--dtype=float64", "--ignore=0.5")


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ()),
        (2, ("--clip=0.1",)),
        (2, ("--optimizer=sgd",)),
        (3, ("--clip=0.1",)),
        (4, ("--optimizer=momentum", "--clip=0.1")),
        (8, ("--clip=0.1",)),
    ],
)
def test_a_correct_run_is_the_same_as_one_gpu(ranks, tmp_path, world, flags):
    json_flag = str(tmp_path / "run.json")
    results = ranks(world)(
        train_quietly, [*FLOAT64, f"--batch={4 * world}", "--micro-batch=2", *flags], json_flag
    )
    (status, run, output), *others = results
    assert status == 0 and [s for s, _, _ in others] == [0] * (world - 1), output
    assert 0 < max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-12
    assert "same as one GPU" in output and "✗" not in output
    assert [out for _, _, out in others] == [""] * (world - 1)  # rank 0 prints, and only rank 0
    if "--clip=0.1" in flags:
        assert min(run["grad_norm"]) > 0.1  # the clipping was at work


def train_quietly(flags, json_path, plant=None):
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status, run = train([A_TEXT, *flags, "--json", json_path], plant)
    return status, run, output.getvalue()


@pytest.mark.parametrize(
    ("plant", "named"),
    [
        ("mean", r"gradients .* is off by .*e-01, tolerance 1e-10"),
        ("no all_reduce", "gradients "),
        ("local means", "loss in step"),
        ("norm counted twice", "gradient norm in step"),
        ("parameter", "parameters block2.mlp.up.weight in step"),
        ("loss", r"loss in step . is off by 1.0e-03, tolerance 1e-10"),
        ("missing", r"gradients block1.mlp.up.weight in step 1 is off by inf"),
        ("formula", "rank 1: parameters: measured"),
        ("traffic", "all_reduce, payload: measured"),
    ],
)
def test_a_planted_fault_is_caught_and_named(ranks, tmp_path, plant, named):
    results = ranks(2)(train_quietly, [*FLOAT64, "--batch=8"], str(tmp_path / "run.json"), plant)
    status, run, output = results[0]
    assert status == 1 and results[1][0] == 0
    assert re.search(f"✗ {named}", output), output
    if plant in ("formula", "traffic"):
        failed = [c["name"] for c in run["checks"] if c["ok"] is False]
        names = {"formula": [], "traffic": ["all_reduce, payload"]}[plant]
        assert failed == names + [f"rank 1: {name}" for name in names or ["parameters"]]
    else:
        assert "NOT the same as one GPU over 3 steps" in output


def test_a_run_of_one_step_is_metered_too(ranks, tmp_path):
    flags = [*FLOAT64, "--batch=4", "--steps=1"]
    (status, run, output), _ = ranks(2)(train_quietly, flags, str(tmp_path / "run.json"))
    assert status == 0 and run["comm"]["all_reduce"]["calls"] == 24, output


def test_adamw_hides_a_wrong_gradient_scale_from_all_but_the_gradients(ranks, tmp_path):
    """Why the verifier looks at gradients: AdamW takes halved ones to the same parameters."""
    flags = ["--dtype=float32", "--batch=8"]
    (status, run, _), _ = ranks(2)(train_quietly, flags, str(tmp_path / "run.json"), "mean")
    assert status == 1 and run["max_loss_diff"] < 1e-3 and run["max_grad_diff"] > 0.4


def cut_and_verified(wrong_part):
    """A step with MLPs cut over the ranks: each rank is compared with its own part."""
    args = arguments(A_TEXT, "--dtype=float64", "--steps=1", "--optimizer=sgd")
    text, ranks, group = common.Text(args), common.start(args), dist.group.WORLD
    build = lambda: gpt(args.model, dtype=torch.float64)
    verifier = common.Verifier(build, args, ranks, tensor_steps=5)
    whole = build()
    tokens, targets, valid = batch = text.batch(0)
    loss = loss_sum(whole(tokens), targets) / valid
    loss.backward()
    norm = common.grad_norm(whole.parameters())
    common.OPTIMIZERS["sgd"](whole.parameters(), None).step()
    model = build()
    for name, p in whole.named_parameters():
        q = model.get_parameter(name)
        q.data, q.grad = p.data, p.grad
    for block, full in zip(model[1:-1], whole[1:-1]):
        for linear, source, dim in (
            (block.mlp.up, full.mlp.up, 0),
            (block.mlp.down, full.mlp.down, 1),
        ):
            grad, linear.weight.grad = source.weight.grad, None
            common.keep_shard(linear, "weight", dim, group)
            linear.weight.grad = common.part(grad, linear.weight).clone()
    gradient = model.block1.mlp.up.weight.grad
    if ranks.rank == 1:
        gradient.mul_(1 + wrong_part)
    verifier.compare(0, batch, loss, norm, model.named_parameters())
    largest = whole.block1.mlp.up.weight.grad.abs().max()
    return verifier.worst, (wrong_part * gradient.abs().max() / largest).item()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_rank_is_compared_with_its_own_part(ranks, world):
    for worst, _ in ranks(world)(cut_and_verified, 0.0):
        assert max(value for value, _ in worst.values()) < 1e-12
    results = ranks(world)(cut_and_verified, 1e-3)
    for worst, _ in results:  # relative to the whole gradient's largest element, not the part's
        expected = pytest.approx(results[1][1], rel=1e-2)
        assert worst["gradients"] == (expected, "gradients block1.mlp.up.weight in step 1")


def compared_over_steps(plant):
    """Two steps of one rank against itself, with tensor_steps=1 and a fault in the second step."""
    args = arguments(A_TEXT, "--dtype=float64", "--optimizer=sgd")
    text, ranks = common.Text(args), common.start(args)
    build = lambda: gpt(args.model, dtype=torch.float64)
    verifier, model = common.Verifier(build, args, ranks, tensor_steps=1), build()
    optimizer = common.OPTIMIZERS["sgd"](model.parameters(), None)
    for step in range(2):
        tokens, targets, valid = batch = text.batch(step)
        optimizer.zero_grad()
        loss = loss_sum(model(tokens), targets) / valid
        loss.backward()
        optimizer.step()
        norm = common.grad_norm(model.parameters())
        if step == (plant == "no gradient"):
            loss = loss * (1 + (plant == "loss"))
            model.block1.mlp.up.weight.grad = None
            norm = norm * 2
        verifier.compare(step, batch, loss, norm, model.named_parameters())
    return verifier.steps, verifier.worst


@pytest.mark.parametrize("plant", ["loss", "no gradient"])
def test_the_verifier_looks_at_tensors_for_so_many_steps(ranks, plant):
    [(steps, worst)] = ranks(1)(compared_over_steps, plant)
    assert steps == 2 and worst["parameters"][0] < 1e-12
    if plant == "loss":  # all in the first step, and a gradient of None counts as zeros
        assert worst["loss"] == (pytest.approx(1), "loss in step 1")
        assert worst["gradient norm"] == (pytest.approx(1), "gradient norm in step 1")
        assert worst["gradients"] == (1, "gradients block1.mlp.up.weight in step 1")
    else:
        assert max(value for value, _ in worst.values()) < 1e-12


def a_late_loss():
    args = arguments(A_TEXT, "--dtype=float64", "--optimizer=sgd", "--lr=1e-12")
    text, ranks = common.Text(args), common.start(args)
    verifier = common.Verifier(lambda: gpt(args.model, dtype=torch.float64), args, ranks, 1)
    model = gpt(args.model, dtype=torch.float64)
    for step in range(3):
        tokens, targets, valid = batch = text.batch(step)
        loss = loss_sum(model(tokens), targets) / valid
        verifier.compare(step, batch, loss * (1 + step), loss, model.named_parameters())
    return verifier.worst["loss"]


def test_losses_are_compared_in_every_step(ranks):
    assert ranks(1)(a_late_loss) == [(pytest.approx(2), "loss in step 3")]


def dtensors_compared():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    p = nn.Parameter(distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]))
    p.grad = distribute_tensor(torch.arange(6.0) * 2, mesh, [Shard(0)])
    tensors = common.compared(torch.zeros(()), torch.zeros(()), [("p", p)])
    return [tensors[kind, "p"][0].tolist() for kind in ("parameters", "gradients")]


def test_dtensors_are_compared_whole(ranks):
    whole = [0, 1, 2, 3, 4, 5]
    assert ranks(2)(dtensors_compared) == [[whole, [2 * x for x in whole]]] * 2


def test_tolerances():
    kinds = "loss", "gradient norm", "gradients", "parameters"
    for dtype, optimizer, values in (
        ("float64", "adamw", (1e-10, 1e-10, 1e-10, 1e-10)),
        ("float32", "sgd", (1e-5, 1e-5, 1e-5, 1e-5)),
        ("float32", "adamw", (1e-5, 1e-5, 1e-5, 1e-3)),
        ("bfloat16", "momentum", (5e-3, 2e-2, 0.4, 0.4)),
        ("bfloat16", "adamw", (5e-3, 2e-2, 0.4, None)),
        ("float16", "sgd", (1e-3, 5e-3, 0.05, 0.05)),
    ):
        assert common.tolerances(dtype, optimizer) == dict(zip(kinds, values))


def test_difference_is_never_silently_zero():
    reference = torch.ones(3, dtype=torch.float64)
    assert common.difference(torch.tensor([1.0, math.nan, 1.0]), reference, 1) == math.inf
    assert common.difference(torch.ones(2), reference, 1) == math.inf
    assert common.difference(torch.tensor([1.0, math.inf, 1.0]), reference, 1) == math.inf
    assert common.difference(torch.ones(3) * 1.5, reference, torch.tensor(2.0)).item() == 0.25
    assert common.difference(torch.ones(3), torch.zeros(3), torch.tensor(0.0)).item() == 1


def test_json_has_every_field_of_the_contract(ranks, tmp_path):
    _, run, _ = ranks(2)(
        train_quietly, ["--batch=8", "--steps=4", "--dtype=float64"], str(tmp_path / "run.json")
    )[0]
    for key in ("loss", "grad_norm", "step_seconds", "reference_loss", "reference_grad_norm"):
        assert len(run[key]) == 4 and all(x > 0 for x in run[key])
    expected = dict(
        chapter="00_test",
        variant="test",
        world_size=2,
        backend="gloo",
        device="cpu",
        dtype="float64",
    )
    assert expected.items() <= run.items()
    assert (
        run["config"]["layers"] == 2
        and run["config"]["batch"] == 8
        and run["config"]["micro_batch"] == 4
    )
    assert run["tolerance"] == common.tolerances("float64", "adamw")
    assert set(run["comm"]["all_reduce"]) == {"calls", "bytes", "wire_bytes"}
    assert all({"name", "measured", "expected", "ok"} <= set(check) for check in run["checks"])
    assert max(run["max_loss_diff"], run["max_grad_diff"], run["max_param_diff"]) < 1e-10


def test_without_verification_nothing_is_compared(ranks, tmp_path):
    status, run, output = ranks(2)(
        train_quietly, ["--batch=8", "--no-verify"], str(tmp_path / "run.json"), "mean"
    )[0]
    assert status == 0 and run["reference_loss"] == [] and run["max_loss_diff"] is None
    assert "one GPU:" not in output


def test_quantity():
    numbers = [(0, "B"), (999, "B"), (3154944, "B"), (5.44e9, "FLOP"), (None, "B"), (12345, "")]
    assert [common.quantity(*x) for x in numbers] == [
        "0 B",
        "999 B",
        "3.15 MB",
        "5.44 GFLOP",
        "-",
        "12345",
    ]
