"""Chapter 05: cut along the sequence, still one GPU's numbers; as much to send, less to keep."""

import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import common
from lab.run.anatomy import activation_bytes
from lab.run.machines import MACHINES
from tests.chapters.test_04_formulas import Log, classes_of_chapter_01
from tests.chapters.test_04_tensor_parallel import (
    FOUR,
    SMALL_TRAINING,
    cases,
    flags_of,
    hold_shapes,
)
from tests.conftest import chapter, hold_to_one_gpu, run_main
from tests.support.refused import hold_refusals

FIVE = "05_sequence_parallel"
VARIANTS = ("megatron", "kept", "ring")
THREE = common.Config(layers=1, dim=24, heads=6, kv_heads=3, seq=9, vocab=37)


@pytest.fixture(scope="module")
def five():
    return chapter(FIVE)


def test_what_both_chapters_have_is_one_text(five):
    of_four = chapter(FOUR).share_kv_heads
    assert inspect.getsource(five.share_kv_heads) == inspect.getsource(of_four)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("one", cases(*VARIANTS))
def test_same_as_one_gpu(ranks, tmp_path, one):
    world, flags = one["world"], flags_of(one)
    results = ranks(world)(run_main, FIVE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    hold_shapes(results, outside=(48 // world, 48), inside=(48, 48 // world))


def test_bfloat16(ranks, five, tmp_path):
    flags = (*SMALL_TRAINING, "--dtype=bfloat16")
    (status, run, output), _ = ranks(2)(run_main, FIVE, flags, tmp_path)
    assert status == 0 and all(check["ok"] for check in run["checks"]), output


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


class Copies(TorchDispatchMode):
    """Counts the copies of tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy")
        return func(*args, **(kwargs or {}))


def copies_along_the_sequence(batch, tokens):
    """How many copies an all_gather and a reduce_scatter make of sequences, of which each rank has
    so many tokens, and whether the numbers are right."""
    five, group = chapter(FIVE), dist.group.WORLD
    rank, t = group.rank(), group.size()
    full = torch.arange(batch * 2.0 * t * tokens).view(batch, t * tokens, 2)
    mine = full[:, tokens * rank : tokens * (rank + 1)].contiguous()
    gather, scatter = Copies(), Copies()
    with gather:
        in_flight = five.start_all_gather(mine, group)
    received = in_flight.wait()  # here gloo makes copies of its own
    with gather:
        whole = five.whole_sequence(received)
    with scatter:
        in_flight = five.start_reduce_scatter(full, group)
    assert whole.equal(full) and in_flight.wait().equal(t * mine)
    return gather.count, scatter.count


def test_one_sequence_is_not_copied_and_more_are_copied_once(ranks, five):
    assert ranks(3)(copies_along_the_sequence, 1, 3) == [(0, 0)] * 3
    for tokens in (3, 1):  # one token is no excuse: each linear would copy a view with strides
        assert ranks(3)(copies_along_the_sequence, 2, tokens) == [(1, 1)] * 3


# ------------------------------------------------------------------------------- the formulas


def test_all_activations_are_cut(five):
    cfg, t = common.PRESETS["7b"], 8
    assert classes_of_chapter_01() == five.kept(cfg, t).keys()
    uncut = cfg.seq * cfg.dim // cfg.heads * 2 + 4  # positions, and the loss
    kept_by = lambda t, *variant: activation_bytes(cfg, 1, 2, five.kept(cfg, t, *variant)) - uncut
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
    total = lambda sent: sum(wire for _, _, wire in sent.values())
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


def test_refusals(run_chapter):
    hold_refusals(run_chapter, FIVE, [
        ("--heads=4", 3, "--heads 4", "--nproc_per_node 2"),
        ("--heads=4", 8, "--heads 4", "--nproc_per_node 4"),
        ("--dim=96 --heads=12 --kv-heads=4 --seq=96", 6, "--heads 12", "--nproc_per_node 4"),
        ("--seq=126", 4, "--seq 126", "--nproc_per_node 2"),
        ("--ffn=6", 4, "--ffn 6", "--nproc_per_node 2"),
        ("--variant=torch", 8, "torch cannot share a kv head", "--nproc_per_node 4"),
    ])  # fmt: skip
