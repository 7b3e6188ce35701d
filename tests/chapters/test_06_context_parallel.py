"""Chapter 06: attention over ranks gives one GPU's numbers; so does a block alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common import Refused
from lab import chapters, launch
from tests.conftest import TEXT, chapter, needs_triton, sample
from tests.support.runs import check_run, run_of, runs

held = chapters.held("06")

SIX = "06_context_parallel"
VARIANTS = ("zigzag", "ring", "gather", "ulysses")


@pytest.fixture(scope="module")
def six():
    return chapter(SIX)


# ------------------------------------------------------------------------------- same as one GPU


@pytest.mark.parametrize("run", runs("06"))
def test_same_as_one_gpu(ranks, tmp_path, run):
    check_run(ranks, tmp_path, run)


@pytest.mark.full
def test_kernels_as_the_core_of_a_block(ranks, tmp_path):
    """On a GPU, or here in Triton's interpreter; where neither is, the report says so."""
    needs_triton()
    _, output = check_run(ranks, tmp_path, run_of(
        "06 2 --kernels --dtype=float32 --steps=1 --dim=64 --heads=4 --kv-heads=2 --layers=1 "
        "--seq=16 --batch=1 --window=5 --documents=9"))
    assert "--kernels: no GPU" not in output, output


# ------------------------------------------------------------------------------- blocks alone


def qkv(heads, kv_heads, rows, keys, head_dim=8, dtype=torch.float64):
    """Random queries, keys and values of two sequences."""
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, h, s, head_dim, dtype=torch.float64).to(dtype) for h, s in shapes]


def core_of(six, attention):
    """Forward and backward of a block, by this attention."""
    return six.core_of(SimpleNamespace(kernels=False, attention=attention), like=None)


@pytest.mark.parametrize("core", ["plain", "sdpa"])
@pytest.mark.parametrize("kind", ["causal", "all", "low"])
def test_a_block_is_attention(six, core, kind):
    """Out, lse and all gradients, against PyTorch's autograd. low: as under a window."""
    causal, low = kind == "causal", torch.tensor([0, 0, 2, 5, 7, 8]) if kind == "low" else None
    seen = torch.arange(9) >= low[:, None] if kind == "low" else None
    for heads, kv_heads in ((4, 4), (4, 2), (3, 1)):
        q, k, v = (x.requires_grad_() for x in qkv(heads, kv_heads, 6, 6 if causal else 9))
        expected = F.scaled_dot_product_attention(
            q, k, v, seen, is_causal=causal, enable_gqa=heads != kv_heads)
        dout = torch.randn_like(expected)
        expected.backward(dout)
        with torch.no_grad():
            forward, backward = core_of(six, core)
            out, lse = forward(q, k, v, causal, low)
            gradients = backward(dout, q, k, v, out, lse, causal, low)
            exact = six.scores_of(q, k, causal, low).logsumexp(-1)
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(lse, exact)
        for gradient, x in zip(gradients, (q, k, v)):
            torch.testing.assert_close(gradient, x.grad)


def flags_alone(variant, cut="sequence", window=None):
    """The flags that a Layout reads."""
    return SimpleNamespace(variant=variant, cut=cut, window=window, inner=1)


def starts_of(lengths):
    """For each token, where its document begins."""
    return torch.tensor([sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)])


PACKED = sample([((7, 1, 8, 8), 4), ((1, 1, 22), 11), ((24,), None), ((3,) * 8, 1), *(
    itertools.product([(24,), (5, 19), (7, 1, 8, 8), (1,) * 24], (None, 1, 4, 11)))], 4)


@pytest.mark.parametrize(("lengths", "window"), PACKED)
def test_who_meets_whom(six, lengths, window):
    """By place: every token is held once, every query sees exactly the keys of its document and of
    its window, and at a hop at which no rank does, nobody sends."""
    for variant, cut, n in itertools.product(VARIANTS, ("sequence", "document"), (1, 2, 3, 4)):
        if cut == "document" and variant in ("ring", "ulysses"):
            continue
        parts = 1 if variant == "ulysses" else n
        flags = flags_alone(variant, cut, window)
        layouts = [six.Layout(flags, part, parts, starts_of(lengths)) for part in range(parts)]
        places = len(layouts[0].starts)
        assert torch.cat(layouts[0].positions).sort().values.equal(torch.arange(places))
        assert layouts[0].source[layouts[0].source >= 0].equal(torch.arange(24))
        seen = torch.zeros(places, places, dtype=torch.int64)
        for part, layout in enumerate(layouts):
            assert len(layout.blocks) == len(layouts[0].blocks) <= max(1, parts)
            queries = layout.positions[part]
            for hop, blocks in enumerate(layout.blocks):
                here = layout.positions[part - hop]
                here = torch.arange(places) if variant in ("gather", "ulysses") else here
                for rows, keys, causal, low in blocks:
                    block = torch.ones(rows.stop - rows.start, keys.stop - keys.start).long()
                    block = block.tril() if causal else block
                    if low is not None:
                        block[torch.arange(block.shape[1]) < low[:, None]] = 0
                    assert block.any(1).all() and block.any(0).all()  # nothing is met in vain
                    seen[queries[rows, None], here[keys]] += block
        starts, token = layouts[0].starts, torch.arange(places)
        back = token[:, None] - token
        wanted = (0 <= back) & (back < (window or places)) & (starts[:, None] <= token)
        assert seen.equal(wanted.long()), (variant, cut, n)
        work = held.work(layouts[0])
        assert sum(work) == wanted.sum() and held.imbalance(layouts[0]) >= 1
        if cut == "document" and window is None:
            assert len(set(work)) == 1  # and so is the work of each document
        if cut == "sequence" and variant in ("zigzag", "ring"):
            hops = held.hops_of(variant, n, starts, window)
            assert len(layouts[0].blocks) - 1 == hops


# ------------------------------------------------------------------------------- the formulas


def test_pairs_by_the_formula(six):
    """Of equal documents, all blocks as a plain core computes them."""
    for variant, n, documents in itertools.product(VARIANTS, (1, 2, 4), (1, 2, 4, 8, 16)):
        parts = 1 if variant == "ulysses" else n
        starts = starts_of((48 // documents,) * documents)
        for part in range(parts):
            layout = six.Layout(flags_alone(variant), part, parts, starts)
            computed = sum(map(held.pairs_of, layout.blocks))
            assert computed == six.pairs(variant, part, parts, 48, documents=documents)


def test_hops_that_a_window_needs(six):
    """By the formula, as the layout finds them, and chunk by chunk."""
    for variant, n, window in itertools.product(
            ("zigzag", "ring"), (1, 2, 3, 4), (None, 1, 2, *range(4, 50, 7))):
        starts = starts_of((24 * n,))
        layout = six.Layout(flags_alone(variant, window=window), 0, n, starts)
        hops = len(layout.blocks) - 1
        assert hops == six.hops_needed(variant, n, 24 * n, window)
        assert hops == held.hops_of(variant, n, starts, window)


def test_ring_over_zigzag(six):
    """4N/(2N+1), or 2 - 1/N; and a zig-zag's ranks all compute as much."""
    for n in (2, 8):
        for diagonal, longer in ((1, 4 * n / (2 * n + 1)), (0.5, 2 - 1 / n)):
            ring, zigzag = ([six.pairs(variant, rank, n, 4 * n, diagonal) for rank in range(n)]
                            for variant in ("ring", "zigzag"))  # fmt: skip
            assert max(ring) / max(zigzag) == pytest.approx(longer)
            assert len(set(zigzag)) == 1
            assert diagonal == 1 or sum(ring) == sum(zigzag)


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(("flags", "works"), [
    ("--attention=sdpa", "--attention plain"),
    ("--attention=sdpa --dtype=bfloat16 --heads=32", "--attention plain"),
    ("--attention=sdpa --precision=bf16 --window=9", "--attention plain"),
    ("--variant=torch", "--variant zigzag"),
    ("--variant=torch --attention=sdpa --dtype=bfloat16", None),
    ("--attention=sdpa --precision=bf16", None),
])
def test_refusals_on_gpus(six, monkeypatch, flags, works):
    """Of two machines with two GPUs each: the ranks of one have as many as they need."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = (*flags.split(), f"--data={TEXT}")
    args = launch.parse(six, flags)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if works is None:
        return six.requires(args, 4)
    with pytest.raises(Refused) as refused:
        six.requires(args, 4)
    assert refused.value.args[1] == works
