"""kernels/fp8.py: what is rounded how, the kernels against plain PyTorch, and the linear layers."""

import importlib
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F

from common import Config, gpt, loss_sum
from tests.conftest import STEPS, needs_triton, sample

fp8 = importlib.import_module("kernels.fp8")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, SQUARES = (1, 128), (128, 128)
ONE, FIVE = "01_single_gpu", "05_sequence_parallel"
SMALL = ("--layers=1", "--dim=32", "--heads=2", "--kv-heads=1", "--seq=16", "--batch=4")


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


def test_the_largest_number_of_a_tile_sets_its_scale():
    x = random(130, 300)
    for tile in {tile for tiles in fp8.SCALINGS.values() for tile in tiles}:
        q = fp8.quantize(x, tile, powers=False)
        rows, columns = min(tile[0], 130), min(tile[1], 300)
        for i, j in itertools.product(range(0, 130, rows), range(0, 300, columns)):
            part = x[i:i + rows, j:j + columns]
            scale = q.scales[i // rows, j // columns]
            assert scale == part.abs().max() / 448
            assert q.values[i:i + rows, j:j + columns].float().abs().max() == 448


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
    for value in (0.0, math.nan, 1e-44):
        q = fp8.quantize(torch.full((2, 3), value), SQUARES)
        assert q.scales.item() == fp8.SMALLEST
        assert q.values.float().isnan().all() == (not math.isfinite(value))


# ------------------------------------------------------------------------------------- the kernels


@pytest.mark.parametrize("shape", [(130, 300), (5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_rounds_as_pytorch_does(shape, dtype):
    needs_triton()
    x = random(*shape, spread=6).to(dtype)
    x[0, 0], x[1, 1], x[2] = math.nan, math.inf, 0
    strided = x.T.contiguous().T
    for tile, powers in itertools.product((ROWS, SQUARES), (True, False)):
        same(fp8.quantize_tiles(strided, tile, powers), fp8.quantize(x, tile, powers))
    rounded, turned = fp8.quantize_tiles(x, ROWS, turn=True)
    same(rounded, fp8.quantize(x, ROWS))
    same(turned, fp8.transposed(rounded, ROWS))


@pytest.mark.parametrize(("m", "n", "k"), sample(
    [(5, 130, 200), (0, 4, 8), (130, 200, 300), (1, 129, 128)], 2))
def test_the_kernel_multiplies_as_pytorch_does(m, n, k):
    needs_triton()
    tiles = [*fp8.SCALINGS.values(), (ROWS, ROWS)]
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


# --------------------------------------------------------------------------------------- 14 bits


def test_hopper_adds_with_few_bits():
    """What is lost without promotion grows with k; with it, it's what 128 products lose."""
    a, b = (fp8.quantize(random(8, 2048, seed=seed).abs(), (1, fp8.ALL)) for seed in (1, 2))
    exact = fp8.reference_product(a, b, torch.float64)

    def off(*options):
        return ((fp8.hopper_product(a, b, *options) - exact).abs() / exact).mean().item()

    assert off(None) > 5 * off(128) and off(128) < 2e-3 and off(128, 40) < 1e-6

    def one(*row):
        return fp8.Quantized(torch.tensor([row]).to(fp8.E4M3), torch.ones(1, 1), ROWS)

    for little, total in ((2.0**-6, 1 + 2**-13), (2.0**-7, 1)):  # of this, 14 bits stay
        assert fp8.hopper_product(one(1, little), one(1, 2.0**-7)).item() == total


# -------------------------------------------------------------------------------- the linear layers


def exact_in_fp8(*shape, seed):
    """Small whole numbers, each row and column times a power of two: their tiles lose nothing, and
    sums of their products neither."""
    generator = torch.Generator().manual_seed(seed)

    def whole(low, high, *size):
        return torch.randint(low, high, size, generator=generator).float()

    x = whole(-8, 9, *shape) * 2 ** whole(-2, 3, shape[0], 1) * 2 ** whole(-2, 3, 1, shape[1])
    return x.to(DEVICE).requires_grad_()


@pytest.mark.parametrize(("scaling", "interpreted"), sample(
    [("tile", True), ("row", False), ("tensor", True), ("row", True)], 2))
def test_three_products_of_what_fp8_holds_are_exact(monkeypatch, scaling, interpreted):
    """Forward and both gradients, to the bit: so each factor meets its own scales."""
    if interpreted:
        needs_triton()
    else:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    shapes = (132, 140), (150, 140), (130, 140)
    x, w, v = (exact_in_fp8(*shape, seed=i) for i, shape in enumerate(shapes))
    gradients = exact_in_fp8(132, 150, seed=3), exact_in_fp8(132, 130, seed=4)
    outputs = fp8.linear8(x.view(4, 33, 140), scaling, w, v)
    assert [y.shape for y in outputs] == [(4, 33, 150), (4, 33, 130)]
    actual = torch.autograd.grad([y.flatten(0, 1) for y in outputs], [x, w, v], gradients)
    wanted = torch.autograd.grad([F.linear(x, w), F.linear(x, v)], [x, w, v], gradients)
    for y, weight in zip(outputs, (w, v)):
        torch.testing.assert_close(y.flatten(0, 1), F.linear(x, weight), rtol=1e-6, atol=1e-5)
    for one, other in zip(actual, wanted):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-4)


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


# -------------------------------------------------------------------------------------- chapter 01


@pytest.mark.parametrize("scaling", sample(["tile", "tensor", "row"]))
def test_chapter_01_trains_in_fp8(run_chapter, tmp_path, monkeypatch, scaling):
    """And keeps what its formula says, also of an odd number of features."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)       # in plain PyTorch, which is faster
    flags = (*SMALL, "--dim=144", STEPS, "--micro-batch=2", "--json=run.json")
    status, output, errors = run_chapter(ONE, *flags, "--precision=fp8", f"--scaling={scaling}")
    assert status == 0, output + errors
    run = json.loads((tmp_path / "run.json").read_text())
    kept = [check for check in run["checks"] if "kept" in check["name"]]
    assert len(kept) == 6 and all(check["ok"] for check in kept)
    assert run["tolerance"]["loss"] == 1e-2 and run["loss"] != run["reference_loss"]
