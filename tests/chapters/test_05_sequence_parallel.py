"""Chapter 05: cut along the sequence, still one GPU's numbers; as much to send, less to keep."""

import inspect
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import common
from lab.bench.anatomy import activation_bytes
from lab.bench.machines import MACHINES
from lab.bench.report import quantity
from tests.chapters.test_04_formulas import Log, classes_of_chapter_01
from tests.chapters.test_04_tensor_parallel import (
    EIGHT_RANKS,
    FLOAT64,
    FOUR,
    OF_THREE,
    SETTINGS,
    SMALL_TRAINING,
    THREE,
    covering,
    flags_of,
    hold_put_together,
    hold_shapes,
    products,
    trained,
    twice,
)
from tests.conftest import chapter, hold_to_one_gpu, run_main

FIVE = "05_sequence_parallel"
VARIANTS = ("megatron", "kept", "ring", "torch")


@pytest.fixture(scope="module")
def five():
    return chapter(FIVE)


def test_what_both_chapters_have_is_one_text(five):
    of_four = chapter(FOUR).share_kv_heads
    assert inspect.getsource(five.share_kv_heads) == inspect.getsource(of_four)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("one", [*covering(variant=VARIANTS, **SETTINGS), EIGHT_RANKS])
def test_same_as_one_gpu(ranks, tmp_path, one):
    world, flags = one["world"], flags_of(one)
    results = ranks(world)(run_main, FIVE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    hold_shapes(results, outside=(48 // world, 48), inside=(48, 48 // world))


@pytest.mark.full
@pytest.mark.parametrize(("variant", "setting"), products(VARIANTS))
def test_same_as_one_gpu_in_full(ranks, tmp_path, variant, setting):
    world, flags = setting
    flags = (*FLOAT64, *flags, f"--variant={variant}")
    hold_to_one_gpu(ranks(world)(run_main, FIVE, flags, tmp_path), flags)


IN_FULL = "in_full = [model.embedding, model.head.norm, model.head.out]"
MINE = "x.chunk(group.size(), 1)[group.rank()].clone()"  # a part that nobody has summed
ONE_STEP = (*FLOAT64, "--layers=1", "--batch=2", "--steps=1")


def test_the_same_run_gives_the_same_bits(ranks, tmp_path):
    chapter(FIVE)
    flags = (*SMALL_TRAINING, *OF_THREE, "--variant=ring")
    one, other = ranks(3)(twice, FIVE, flags, tmp_path)[0]
    assert one == other


@pytest.mark.parametrize("variant", ["megatron", "torch"])
def test_bfloat16(ranks, five, tmp_path, variant):
    """PyTorch's sends are measured, and shown beside what ours would be."""
    flags = (*SMALL_TRAINING, "--dtype=bfloat16", f"--variant={variant}")
    (status, run, output), _ = ranks(2)(run_main, FIVE, flags, tmp_path)
    assert status == 0 and all(check["ok"] is not False for check in run["checks"]), output
    if variant == "torch":
        cfg = common.Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)
        ours = sum(wire for _, _, wire in five.traffic(cfg, 1, 4, 2, 2, "kept").values())
        assert f"kept sends {quantity(round(ours))}" in output


@pytest.mark.parametrize(("variant", "world"), [("ring", 3), ("megatron", 4), ("kept", 2)])
def test_shards_put_together_are_one_gpus_parameters(ranks, variant, world):
    """And what all ranks hold in full (LayerNorms, among others) stays equal bit for bit."""
    chapter(FIVE)
    results = ranks(world)(trained, FIVE, variant)
    hold_put_together(results)
    (_, norms), *others = results
    for _, theirs in others:
        assert all(mine.equal(other) for (_, mine), (_, other) in zip(norms, theirs))


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


def copies_along_the_sequence(batch, tokens=3):
    """Of an all_gather and a reduce_scatter: how many copies, whether the ends share storage with
    what was received and given, and whether the numbers are right. tokens: of a rank."""
    five, group = chapter(FIVE), dist.group.WORLD
    rank, t = group.rank(), group.size()
    full = torch.arange(batch * 2.0 * t * tokens).view(batch, t * tokens, 2)
    mine = full[:, tokens * rank : tokens * (rank + 1)].contiguous()
    same_storage = lambda x, y: x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()

    gather, scatter = Copies(), Copies()
    with gather:
        in_flight = five.start_all_gather(mine, group)
    received = in_flight.wait()  # here gloo makes copies of its own
    with gather:
        whole = five.whole_sequence(received)
    assert whole.equal(full) and in_flight.sent.data_ptr() == mine.data_ptr()
    in_place = same_storage(whole, received)

    with scatter:
        in_flight = five.start_reduce_scatter(full, group)
    assert in_flight.wait().equal(t * mine)
    return (gather.count, in_place), (scatter.count, same_storage(in_flight.sent, full))


def test_one_sequence_is_not_copied_and_more_are_copied_once(ranks, five):
    for gather, scatter in ranks(3)(copies_along_the_sequence, 1):
        assert gather == scatter == (0, True)
    for tokens in (3, 1):  # one token is no excuse: each linear would copy a view with strides
        for gather, scatter in ranks(3)(copies_along_the_sequence, 2, tokens):
            assert gather == scatter == (1, False)


# ------------------------------------------------------------------------------- the formulas


def test_all_activations_are_cut(five):
    cfg = common.PRESETS["7b"]
    assert classes_of_chapter_01() == five.kept(cfg, 2).keys()
    tokens, rope = cfg.seq, cfg.seq * cfg.dim // cfg.heads * 2
    kept_by = lambda t, *variant, cfg=cfg: activation_bytes(cfg, 1, 2, five.kept(cfg, t, *variant))
    uncut = rope + 4  # and the loss
    one = kept_by(1) - uncut
    for t in (2, 4, 8):
        cut = kept_by(t) - uncut
        assert cut * t == one
        gqa = replace(cfg, kv_heads=4)  # of which eight ranks hold a whole one each
        fewer = kept_by(t) - kept_by(t, cfg=gqa)
        assert fewer == cfg.layers * 2 * tokens * (cfg.dim // t - 128 * max(4 // t, 1)) * 2
        kept = kept_by(t, "kept") - uncut
        x = tokens * cfg.dim * 2
        assert kept - cut == 2 * cfg.layers * x * (t - 1) // t


def test_parameters_per_rank(five):
    """Tables and LayerNorms in full."""
    four, cfg = chapter(FOUR), common.Config(layers=2, dim=8, heads=4, kv_heads=2, seq=4, vocab=11)
    assert five.parameters_per_rank(cfg, 1) == cfg.parameters()
    for t in (1, 2, 4):
        for tie in (False, True):
            shape = replace(cfg, tie=tie)
            tables = (1 if tie else 2) * 8 * (11 - -(-11 // t))  # what chapter 04 does not hold
            more = five.parameters_per_rank(shape, t) - four.parameters_per_rank(shape, t)
            assert more == tables
    assert five.numbers_in_full(cfg) == (4 * 2 + 2) * 8 + 2 * 11 * 8


def test_as_many_bytes_as_chapter_04(five):
    """When nothing is gathered twice, the blocks send as much; what they do not send is set apart:
    in chapter 04 what the cut vocabulary and the norm need, here the gradients in part and the
    norm."""
    four, cfg = chapter(FOUR), common.PRESETS["7b"]
    x = 2 * cfg.seq * cfg.dim * 2
    for t in (1, 2, 8):
        ring, norm = (t - 1) / t, 4 * (t > 1)
        _, _, theirs = four.traffic(cfg, 3, 2, t, 2)["all_reduce"]
        theirs -= 2 * ring * (3 * (2 * x + 3 * 2 * cfg.seq * 4) + norm)
        ours = five.traffic(cfg, 3, 2, t, 2, "kept")
        calls, _, apart = ours.pop("all_reduce")
        assert calls == (34 if t == 1 else 35)  # of so large a model, each module's
        assert apart == pytest.approx(2 * ring * (five.numbers_in_full(cfg) * 2 + norm))
        assert sum(wire for _, _, wire in ours.values()) == pytest.approx(theirs, rel=1e-12)

        sent = {variant: five.traffic(cfg, 3, 2, t, 2, variant) for variant in VARIANTS[:3]}
        total = {v: sum(wire for _, _, wire in ops.values()) for v, ops in sent.items()}
        again = total["megatron"] - total["kept"]
        assert again == pytest.approx(3 * 2 * cfg.layers * ring * x, rel=1e-9)
        assert total["ring"] == pytest.approx(total["megatron"], rel=1e-12)
        assert sent["ring"]["send"][0] == 3 * 10 * cfg.layers * (t - 1)


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


@pytest.mark.parametrize(("kv_heads", "t", "columns"), [(8, 4, 3 * 32), (2, 2, 48), (2, 8, 96)])
def test_columns_of_qkv(five, kv_heads, t, columns):
    """Of t ranks together, after the cut; more ranks than kv heads have a whole one each."""
    cfg = common.Config(layers=1, dim=32, heads=8, kv_heads=kv_heads, seq=8, vocab=8)
    group = mock.Mock(**{"rank.return_value": 0, "size.return_value": t})
    attn = common.Attention(cfg)
    five.share_kv_heads(attn, kv_heads, group, None)
    common.keep_shard(attn.q, "weight", 0, group)
    on_a_rank = sum(linear.weight.shape[0] for linear in (attn.q, attn.k, attn.v))
    assert t * on_a_rank == five.columns_of_qkv(cfg, t) == columns


@pytest.mark.parametrize(
    ("flags", "world", "line"),
    [
        (("--heads=4",), 3, "--heads 4, .* do not fit 3 .*; --nproc_per_node 2 would work"),
        (("--heads=4",), 8, "--heads 4, .* do not fit 8 .*; --nproc_per_node 4 would work"),
        (
            ("--dim=96", "--heads=12", "--kv-heads=4", "--seq=96"),
            6,
            "--heads 12, --kv-heads 4, --ffn 384 and --seq 96 do not fit 6 .*; --nproc_per_node 4 ",
        ),
        (("--seq=126",), 4, ".* and --seq 126 do not fit 4 .*; --nproc_per_node 2 would work"),
        (("--ffn=6",), 4, ".*, --ffn 6 and .* do not fit 4 .*; --nproc_per_node 2 would work"),
        (("--variant=torch",), 8, r".* fit 8 .* \(torch cannot share a kv head\); .* 4 would work"),
    ],
)
def test_refusals(run_chapter, flags, world, line):
    status, output, errors = run_chapter(FIVE, *flags, WORLD_SIZE=world, RANK=0)
    assert status == 2 and output == "" and re.match(f"error: {line}", errors), errors
