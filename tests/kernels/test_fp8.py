"""kernels/fp8.py: what is rounded how, the kernels against plain PyTorch, and the linear layers."""

import contextlib
import importlib
import io
import itertools
import json
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from common import Config, gpt, loss_sum
from tests.conftest import STEPS, chapter, hold_to_one_gpu, main, needs_triton, run_main

fp8 = importlib.import_module("kernels.fp8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, SQUARES = (1, 128), (128, 128)
SHAPES = [(5, 7), (128, 128), (130, 300), (257, 129)]
ONE, FIVE = "01_single_gpu", "05_sequence_parallel"
SMALL = ("--layers=1", "--dim=32", "--heads=2", "--kv-heads=1", "--seq=16", "--batch=4")
IN_FLOAT64 = ("--layers=2", "--seq=16", "--batch=4", "--ignore=0.3", STEPS, "--optimizer=sgd",
              "--precision=fp8", "--dtype=float64")


def random(*shape, seed=0, spread=0):
    """spread: columns differ by up to so many powers of ten."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    x = torch.randn(shape, generator=generator) * torch.logspace(-spread, spread, shape[-1])
    return x.to(DEVICE)


def same(a, b):
    """Two Quantized: the same numbers, NaN in the same places, the same scales."""
    assert a.tile == b.tile and a.values.shape == b.values.shape
    torch.testing.assert_close(a.scales, b.scales, rtol=0, atol=0)
    torch.testing.assert_close(a.values.float(), b.values.float(), rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------------------------------- rounding


def test_every_number_of_e4m3_stays_what_it_is():
    codes = torch.arange(256, dtype=torch.uint8).view(fp8.E4M3).float()
    codes = codes[codes.isfinite()]
    assert codes.abs().max() == fp8.LARGEST
    for factor in (1, 2.0**-20, 2.0**100):
        x = (codes * factor).to(DEVICE)[None]
        torch.testing.assert_close(fp8.dequantize(fp8.quantize(x, ROWS)), x, rtol=0, atol=0)


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_the_largest_number_of_a_tile_sets_its_scale(scaling):
    x = random(130, 300)
    for tile in fp8.SCALINGS[scaling]:
        q = fp8.quantize(x, tile, powers=False)
        rows, columns = min(tile[0], 130), min(tile[1], 300)
        for i, j in itertools.product(range(0, 130, rows), range(0, 300, columns)):
            part = x[i:i + rows, j:j + columns]
            scale = q.scales[i // rows, j // columns]
            assert scale == part.abs().max() / 448
            assert q.values[i:i + rows, j:j + columns].float().abs().max() == 448


def test_a_number_is_off_by_a_sixteenth_at_most():
    x = random(64, 256)
    for powers in (True, False):
        q = fp8.quantize(x, ROWS, powers)
        scales = q.scales.repeat_interleave(128, 1)
        off = (fp8.dequantize(q) - x).abs()
        assert (off <= torch.maximum(x.abs() * 2**-4, scales * 2**-10)).all()
        assert (off / x.abs()).max() > 0.9 * 2**-4              # the bound is one that is reached


def test_powers_of_two_are_rounded_up():
    amax = torch.tensor([448.0, 449, 224, 224.1, 1e-30, 3e38])
    scales = fp8.scales_of(amax, True)
    mantissas, _ = scales.frexp()
    assert (mantissas == 0.5).all() and (scales * 448 >= amax).all()
    assert (scales / 2 * 448 < amax).all()
    assert scales[:4].tolist() == [1, 2, 0.5, 1]


def test_what_is_not_finite_stays_alone():
    x = random(4, 256)
    whole = fp8.quantize(x, ROWS)
    x[1, 3], x[1, 200], x[3, 4] = math.nan, math.inf, -math.inf
    q = fp8.quantize(x, ROWS)
    bad = ~x.isfinite()
    assert q.values.float().isnan().equal(bad) and q.scales.isfinite().all()
    for row in (0, 2):                                          # and others know nothing of it
        assert q.values.float()[row].equal(whole.values.float()[row])
    for value in (0.0, math.inf, math.nan, 1e-44):
        q = fp8.quantize(torch.full((2, 3), value), SQUARES)
        assert q.scales.item() == fp8.SMALLEST
        assert q.values.float().isnan().all() == (not math.isfinite(value))


def test_turned_around_nothing_is_lost_with_powers_of_two():
    x = random(200, 300)                                        # and not much too small
    for tile in (ROWS, SQUARES):
        q = fp8.quantize(x, tile)
        back = fp8.dequantize(fp8.transposed(q, tile))
        expected = fp8.dequantize(q).T
        lost = (back != expected) & (expected.abs() > expected.abs().max() * 2**-12)
        assert not lost.any()
    rough = fp8.transposed(fp8.quantize(x, ROWS, powers=False), ROWS)
    exact = fp8.dequantize(fp8.quantize(x, ROWS, powers=False)).T
    assert (fp8.dequantize(rough) != exact).float().mean() > 0.3      # without them, much is


def test_one_outlier_ruins_its_tile_alone():
    """Of all other features, what is lost: everything, with one scale; nothing in other tiles."""
    x = random(64, 512)
    x[:, 5] *= 1e6
    off = {}
    for scaling, (tile, _) in fp8.SCALINGS.items():
        others = slice(128, None)
        error = fp8.dequantize(fp8.quantize(x, tile))[:, others] - x[:, others]
        off[scaling] = (error.norm() / x[:, others].norm()).item()
    assert off["tensor"] > 0.9 and off["row"] > 0.5 and 0.01 < off["tile"] < 0.04


# ------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_as_pytorch_does(shape, dtype):
    needs_triton()
    x = random(*shape, spread=6).to(dtype)
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, 0
    strided = x.T.contiguous().T
    for tile, powers in itertools.product((ROWS, SQUARES), (True, False)):
        same(fp8.quantize_tiles(strided, tile, powers), fp8.quantize(x, tile, powers))
    found, turned = fp8.quantize_tiles(x, ROWS, turn=True)
    same(found, fp8.quantize(x, ROWS))
    same(turned, fp8.transposed(found, ROWS))


@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 3), (130, 200, 300), (1, 129, 128), (0, 4, 8)])
def test_the_kernel_multiplies_as_pytorch_does(m, n, k):
    needs_triton()
    tiles = [pair for pair in fp8.SCALINGS.values()] + [(ROWS, ROWS)]
    dtypes = torch.float32, torch.float16, torch.float16, torch.bfloat16
    for (left, right), dtype in zip(tiles, dtypes):
        a = fp8.quantize(random(m, k, spread=3) / 256, left)
        b = fp8.quantize(random(n, k, seed=1, spread=3) / 256, right)
        expected = fp8.reference_product(a, b, torch.float64)
        size = fp8.reference_product(*(x._replace(values=x.values.float().abs().to(fp8.E4M3))
                                       for x in (a, b)), torch.float64)     # of the terms
        off = (fp8.product(a, b, dtype) - expected).abs()
        cut_off = dtype == torch.bfloat16 and DEVICE == "cpu"               # by the interpreter
        last_bit = expected.abs() * torch.finfo(dtype).eps
        once = last_bit * (1 if cut_off else 0.5) + torch.finfo(dtype).smallest_normal
        assert (off <= once + size * 1e-6).all()


def test_what_there_is_no_kernel_for(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x = torch.empty(1)
    assert not fp8.runs_here(x) and not fp8.runs_here(x.double())
    for capability, has in (((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        assert fp8.has_fp8(torch.device("cuda")) == has


# --------------------------------------------------------------------------------------- 14 bits


def test_hopper_adds_with_few_bits():
    """What is lost without promotion grows with k; with it, it is what 128 products lose."""
    off = {}
    for k in (128, 2048):
        a, b = (fp8.quantize(random(8, k, seed=seed).abs(), (1, fp8.ALL)) for seed in (1, 2))
        exact = fp8.reference_product(a, b, torch.float64)
        for promote in (None, 128):
            found = fp8.hopper_product(a, b, promote)
            off[k, promote] = ((found - exact).abs() / exact).mean().item()
        torch.testing.assert_close(fp8.hopper_product(a, b, 128, bits=40).double(), exact,
                                   rtol=1e-6, atol=0)
    assert off[128, None] == off[128, 128] < 2e-3
    assert off[2048, None] > 5 * off[2048, 128] and off[2048, 128] < 2e-3


def test_of_one_and_a_little_fourteen_bits_stay():
    one = lambda *row: fp8.Quantized(torch.tensor([row]).to(fp8.E4M3), torch.ones(1, 1), ROWS)
    for little, found in ((2.0**-6, 1 + 2**-13), (2.0**-7, 1)):
        assert fp8.hopper_product(one(1, little), one(1, 2.0**-7)).item() == found


# -------------------------------------------------------------------------------- the linear layers


def exact_in_fp8(*shape, seed):
    """Small whole numbers, each row and column times a power of two: their tiles lose nothing, and
    sums of their products neither."""
    generator = torch.Generator().manual_seed(seed)
    of = lambda low, high, *size: torch.randint(low, high, size, generator=generator).float()
    x = of(-8, 9, *shape) * 2 ** of(-2, 3, shape[0], 1) * 2 ** of(-2, 3, 1, shape[1])
    return x.to(DEVICE).requires_grad_()


@pytest.mark.parametrize(("scaling", "interpreted"), [
    pytest.param(scaling, interpreted, marks=[pytest.mark.full] * ((scaling, interpreted) in (
        ("row", True), ("tensor", False)))) for scaling in fp8.SCALINGS
    for interpreted in (True, False)])
def test_three_products_of_what_fp8_holds_are_exact(monkeypatch, scaling, interpreted):
    """Forward and both gradients, to the bit: so each factor meets its own scales."""
    if interpreted:
        needs_triton()
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, w, v = exact_in_fp8(132, 140, seed=0), exact_in_fp8(150, 140, seed=1), \
        exact_in_fp8(130, 140, seed=2)
    gradients = exact_in_fp8(132, 150, seed=3), exact_in_fp8(132, 130, seed=4)
    outputs = fp8.linear8(x.view(4, 33, 140), scaling, w, v)
    assert [y.shape for y in outputs] == [(4, 33, 150), (4, 33, 130)]
    found = torch.autograd.grad([y.flatten(0, 1) for y in outputs], [x, w, v], gradients)
    wanted = torch.autograd.grad([F.linear(x, w), F.linear(x, v)], [x, w, v], gradients)
    for y, weight in zip(outputs, (w, v)):
        torch.testing.assert_close(y.flatten(0, 1), F.linear(x, weight), rtol=1e-6, atol=1e-5)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("scaling", fp8.SCALINGS)
def test_random_products_are_off_by_a_few_percent(monkeypatch, scaling):
    """Each factor is off by 2.6% of its size, in the mean, so a sum of products by 3.7%."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, w, dy = random(130, 160), random(140, 160, seed=1), random(130, 140, seed=2)
    x, w = x.requires_grad_(), w.requires_grad_()
    y = fp8.linear8(x, scaling, w)[0]
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    for found, exact in ((y, x @ w.T), (dx, dy @ w), (dw, dy.T @ x)):
        assert 0.025 < ((found - exact).norm() / exact.norm()).item() < 0.05


@pytest.mark.parametrize(("scaling", "scales"), [("tensor", 1), ("row", 60), ("tile", 60 * 3)])
def test_one_copy_in_fp8_is_kept_for_all_weights(monkeypatch, scaling, scales):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kept = {}

    def keep(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    x = random(3, 20, 300).requires_grad_()
    weights = [random(n, 300, seed=n).requires_grad_() for n in (40, 50)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        fp8.linear8(x, scaling, *weights)
    of_weights = sum(kept.pop(w.untyped_storage().data_ptr()) for w in weights)
    assert of_weights == 4 * 90 * 300 and sum(kept.values()) == 60 * 300 + 4 * scales


def test_the_linears_of_the_blocks_and_no_others(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)       # in plain PyTorch, which is faster
    cfg = Config(layers=2, dim=32, heads=2, kv_heads=1, seq=16, vocab=64)
    model, plain = gpt(cfg), gpt(cfg)
    fp8.use_fp8(model, "tile")
    names = [[name for name, _ in one.named_parameters()] for one in (model, plain)]
    assert names[0] == names[1]
    tokens = torch.arange(32).view(2, 16)
    for one in (model, plain):
        loss_sum(one(tokens), tokens).backward()
    difference = {name: ((p.grad - q.grad).norm() / q.grad.norm()).item()
                  for (name, p), q in zip(model.named_parameters(), plain.parameters())}
    assert all(0.001 < off < 0.2 for off in difference.values()), difference
    x = random(2, 16, 32)
    assert model.head(x).equal(plain.head(x))
    assert model.embedding(tokens).equal(plain.embedding(tokens))


# --------------------------------------------------------------------------------- on several ranks


def agree(dim, size):
    """Of one matrix (256, 256), cut along dim in parts of so many: what each rank would round its
    own to, beside what all agree on, which is the whole matrix's."""
    rank = torch.distributed.get_rank()
    x = random(256, size * torch.distributed.get_world_size(), spread=3)
    x = x if dim else x.T
    part = x.narrow(dim, rank * size, size).contiguous()
    found = {}
    for tile in (ROWS, SQUARES) if dim else (SQUARES,):
        mine = fp8.cut_in_fp8(part, tile, dim, torch.distributed.group.WORLD)
        alone = fp8.quantize(part, tile)
        whole = fp8.dequantize(fp8.quantize(x, tile)).narrow(dim, rank * size, size)
        found[tile] = [fp8.dequantize(q).equal(whole) for q in (mine, alone)]
    return found


@pytest.mark.parametrize(("size", "is_cut"), [(32, True), (64, True), (128, False)])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_tile_that_is_cut_has_one_scale(ranks, dim, size, is_cut):
    everyones = ranks(4)(agree, dim, size)
    for tile in everyones[0]:
        mine, alone = zip(*(found[tile] for found in everyones))
        assert all(mine) and all(alone) == (not is_cut)


@pytest.mark.parametrize(("world", "flags"), [
    (2, ["--dim=64", "--heads=4", "--kv-heads=2", "--clip=0.1", "--block=llama"]),  # cut tiles
    (4, ["--dim=128", "--heads=4", "--kv-heads=4", "--layers=1", "--seq=64", "--micro-batch=2"]),
    (2, ["--dim=256", "--heads=2", "--kv-heads=2", "--layers=1"]),          # and none is
])
def test_chapter_05_is_one_gpu_in_fp8(ranks, tmp_path, world, flags):
    """In float64, so that no number is rounded otherwise; and sends what the formula says."""
    flags = (*IN_FLOAT64, *flags)
    results = ranks(world)(run_main, FIVE, flags, tmp_path)
    hold_to_one_gpu(results, flags)
    assert "✓" in next(line for line in results[0][2].splitlines() if "all_gather, payload" in line)


def run_without_agreement(flags, folder):
    alone = lambda x, tile, *_: fp8.amax_of(x, tile)
    with mock.patch.object(fp8, "agreed_amax", alone):
        return run_main(FIVE, flags, folder)


def test_ranks_that_do_not_agree_are_seen(ranks, tmp_path):
    """By what they send: with powers of two, hardly any number is another one."""
    flags = (*IN_FLOAT64, "--dim=64", "--heads=4", "--kv-heads=2", "--steps=1")
    (status, _, output), _ = ranks(2)(run_without_agreement, flags, tmp_path)
    assert status == 1 and "✗ rank 1: all_reduce" in output


@pytest.mark.parametrize(("world", "flags", "says"), [
    (4, ["--dim=192", "--heads=4", "--kv-heads=4"], "error: --precision fp8 cuts 192 features into "
     "tiles of 128, and --nproc_per_node 4 cuts tiles in two; --nproc_per_node 1 would work"),
    (2, ["--dim=64", "--heads=4", "--kv-heads=4", "--ffn=352"], "cuts 352 features into tiles of "
     "128, and --nproc_per_node 2 cuts tiles in two; --ffn 256 would work"),
    (4, ["--heads=4", "--kv-heads=2"], "(fp8 cannot share a kv head); --nproc_per_node 2 would"),
    (2, ["--micro-batch=1"], "of 16 tokens, which share tiles of 128; --seq 128 would work"),
    (2, ["--variant=ring"], "error: --precision fp8 is not of --variant ring --recompute none; "
     "--variant megatron --recompute none would work"),
])
def test_what_does_not_fit(ranks, tmp_path, world, flags, says):
    (_, _, errors), *_ = ranks(world)(refused, (*IN_FLOAT64, *flags), tmp_path)
    assert says in errors and len(errors.splitlines()) == 1


def refused(flags, folder):
    """What a rank says on stderr, and its status."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        main(chapter(FIVE), flags)
    return 0, None, errors.getvalue()


# -------------------------------------------------------------------------------------- chapter 01


@pytest.mark.parametrize("scaling", ["tensor", "tile", pytest.param("row", marks=pytest.mark.full)])
def test_chapter_01_trains_in_fp8(run_chapter, tmp_path, monkeypatch, scaling):
    """And keeps, in each setting, what the formula says: an odd number of features, too."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)       # in plain PyTorch, which is faster
    flags = (*SMALL, "--dim=144", STEPS, "--micro-batch=2", "--json=run.json")
    status, output, errors = run_chapter(ONE, *flags, "--precision=fp8", f"--scaling={scaling}")
    assert status == 0, output + errors
    run = json.loads((tmp_path / "run.json").read_text())
    kept = [check for check in run["checks"] if "kept" in check["name"]]
    assert len(kept) == 6 and all(check["ok"] for check in kept)
    assert run["tolerance"]["loss"] == 1e-2 and run["loss"] != run["reference_loss"]


@pytest.mark.parametrize(("flags", "says"), [
    (["--scaling=row"], "error: --scaling row is of --precision fp8; --precision fp8 would work"),
    (["--precision=fp8", "--variant=torch"], "--precision fp8 is for --variant hand"),
    (["--precision=fp8", "--dtype=float64"], "--precision fp8 rounds float32"),
])
def test_refusals(run_chapter, flags, says):
    status, _, errors = run_chapter(ONE, *SMALL, *flags)
    assert status == 2 and says in errors and len(errors.splitlines()) == 1


@pytest.mark.full
def test_two_hundred_steps_end_where_fp32_does(run_chapter, tmp_path):
    ends = {}
    for precision in ("fp32", "fp8"):
        flags = "--steps=200", "--no-verify", f"--precision={precision}", "--json=run.json"
        assert run_chapter(ONE, *flags)[0] == 0
        ends[precision] = json.loads((tmp_path / "run.json").read_text())["loss"][-1]
    assert abs(ends["fp8"] - ends["fp32"]) < 0.02
