"""Chapter 05: cut along the sequence, still one GPU's numbers; as much to send, less to keep."""

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import common
from lab.run.anatomy import activation_bytes
from lab.run.machines import MACHINES
from tests.chapters.test_04_tensor_parallel import FOUR, Log, classes_of_chapter_01
from tests.conftest import chapter
from tests.support.runs import check_run, runs

FIVE = "05_sequence_parallel"
THREE = common.Config(layers=1, dim=24, heads=6, kv_heads=3, seq=9, vocab=37)


@pytest.fixture(scope="module")
def five():
    return chapter(FIVE)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("05"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


def test_what_both_chapters_have_is_one_text(five):
    of_four = chapter(FOUR).share_kv_heads
    assert inspect.getsource(five.share_kv_heads) == inspect.getsource(of_four)


# ------------------------------------------------------------------------------- when it is sent


def order_in_backward(variant):
    """What the backward of an MLP does, in order: collectives that start and end, and matmuls."""
    group, events = dist.group.WORLD, []
    model = chapter(FIVE).parallelize(common.gpt(THREE), THREE, group, variant)
    out = model.block1.mlp(torch.ones(1, 6, THREE.dim, requires_grad=True)).sum()

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

    def hop(operations):
        assert all(operation.tensor.is_contiguous() for operation in operations)
        return logged("hop", dist_hop)(operations)

    dist_hop = dist.batch_isend_irecv
    with (
        mock.patch.object(common, "all_gather", logged("gather", common.all_gather)),
        mock.patch.object(common, "reduce_scatter", logged("scatter", common.reduce_scatter)),
        mock.patch.object(dist, "batch_isend_irecv", hop),
        Log(events),
    ):
        out.backward()
    return events


G_BACKWARD = ["start gather", "end gather", "matmul", "matmul"]  # of down


def test_what_megatron_overlaps_in_backward(ranks, five):
    for events in ranks(2)(order_in_backward, "megatron"):
        assert events == [
            *G_BACKWARD,
            *("start gather", "matmul", "start scatter", "end gather", "matmul", "end scatter"),
        ]
    for events in ranks(2)(order_in_backward, "kept"):
        assert events == [*G_BACKWARD, "matmul", "matmul", "start scatter", "end scatter"]


def test_every_hop_of_the_ring_hides_behind_a_matmul(ranks, five):
    hop = ["start hop", "matmul", "matmul", "end hop"]
    for events in ranks(3)(order_in_backward, "ring"):
        assert events == [
            *(2 * hop + ["matmul", "matmul"]),  # down: dx and dw of each chunk
            *("matmul", *2 * ["start hop", "matmul", "end hop"]),  # up: the sum of dx
            *(2 * ["start hop", "matmul", "end hop"] + ["matmul"]),  # up: dw of each chunk
        ]


# ------------------------------------------------------------------------------- the formulas


def test_all_activations_are_cut(five):
    cfg, t = common.PRESETS["7b"], 8
    assert classes_of_chapter_01() == five.kept(cfg, t).keys()
    uncut = cfg.seq * cfg.dim // cfg.heads * 2 + 4  # positions, and the loss

    def kept_by(t, *variant):
        return activation_bytes(cfg, 1, 2, five.kept(cfg, t, *variant)) - uncut

    assert kept_by(t) * t == kept_by(1)
    inputs = 2 * cfg.layers * cfg.seq * cfg.dim * 2  # of the sub-layers
    assert kept_by(t, "kept") - kept_by(t) == inputs * (t - 1) // t


def test_as_many_bytes_as_chapter_04(five):
    """When nothing is gathered twice, the blocks send as much. The rest is set apart: there, what
    the cut vocabulary and the norm need; here, the gradients in part and the norm."""
    four, cfg, t = chapter(FOUR), common.PRESETS["7b"], 8
    x, ring = 2 * cfg.seq * cfg.dim * 2, (t - 1) / t
    _, _, theirs = four.traffic(cfg, 3, 2, t, 2)["all_reduce"]
    theirs -= 2 * ring * (3 * (2 * x + 3 * 2 * cfg.seq * 4) + 4)
    kept, megatron, ring_sends = (five.traffic(cfg, 3, 2, t, 2, variant)
                                  for variant in ("kept", "megatron", "ring"))
    _, _, apart = kept["all_reduce"]
    assert apart == pytest.approx(2 * ring * (five.numbers_in_full(cfg) * 2 + 4))

    def total(sent):
        return sum(wire for _, _, wire in sent.values())

    assert total(kept) - apart == pytest.approx(theirs, rel=1e-12)
    again = 3 * 2 * cfg.layers * ring * x
    assert total(megatron) - total(kept) == pytest.approx(again, rel=1e-9)
    assert total(ring_sends) == pytest.approx(total(megatron), rel=1e-12)


def test_when_a_hop_is_hidden(five):
    """The bytes of a chunk over the FLOPs of its matmul, step by step; the lesson's numbers."""
    tokens, dim, t, width = 4096, 8192, 8, 2
    flops, bandwidth = MACHINES["H100, NVLink 4"]
    own, gqa = (five.columns_of_qkv(common.Config(80, dim, 64, kv_heads, 4096, 256), t)
                for kv_heads in (64, 8))
    for columns, expected in ((4 * dim, 0.5), (7 * dim, 0.3), (dim, 2.1), (own, 0.7), (gqa, 1.7)):
        hop = tokens / t * dim * width / bandwidth
        matmul = 2 * tokens / t * dim * columns / t / flops
        ratio = five.hop_over_matmul(columns, t, width, flops, bandwidth)
        assert ratio == pytest.approx(hop / matmul) and round(ratio, 1) == expected
        assert f" {expected}" in five.__doc__


def test_columns_of_qkv(five):
    """Of t ranks together, after the cut. Ranks that share a kv head each have a whole one."""
    for kv_heads, t, columns in ((8, 4, 3 * 32), (2, 2, 48), (2, 8, 96)):
        cfg = common.Config(layers=1, dim=32, heads=8, kv_heads=kv_heads, seq=8, vocab=8)
        group = mock.Mock(**{"rank.return_value": 0, "size.return_value": t})
        attn = common.Attention(cfg)
        five.share_kv_heads(attn, kv_heads, group, None)
        common.keep_shard(attn.q, "weight", 0, group)
        on_a_rank = sum(linear.weight.shape[0] for linear in (attn.q, attn.k, attn.v))
        assert t * on_a_rank == five.columns_of_qkv(cfg, t) == columns
