"""Chapter 06: attention over ranks gives one GPU's numbers; so does a block alone."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from common import Refused
from lab import chapters, launch
from tests.chapters.test_04_tensor_parallel import FLOAT64, TRAINING, covering
from tests.conftest import FULL, TEXT, chapter, hold_to_one_gpu, needs_triton, run_main, sample
from tests.support.refused import hold_refusals

held = chapters.held("06")

SIX = "06_context_parallel"
VARIANTS = ("zigzag", "ring", "gather", "ulysses")


@pytest.fixture(scope="module")
def six():
    return chapter(SIX)


# ------------------------------------------------------------------------------- same as one GPU


SETTINGS = {
    "variant": VARIANTS,
    "world": (2, 3, 4, 1, 6, 8) if FULL else (2, 3, 4, 1),
    "inner": (1, 2),
    "kv-heads": (4, 3, 1),  # of 12 heads: ranks have some of their own, or share one
    "attention": ("plain", "sdpa"),
    "documents": (None, 7),
    "window": (None, 5),
    "cut": ("sequence", "document"),
    "training": (
        "--micro-batch=2 --layers=2",
        "--micro-batch=1 --optimizer=sgd --clip=0.1 --block=llama --ffn=72 --precision=bf16 "
        "--recompute=full",
        "--micro-batch=1 --optimizer=momentum --clip=0.1 --preset=gpt2 --vocab=257 "
        "--recompute=selective",  # gpt2 ties embedding and head
    ),
}
ON_EIGHT = dict(zip(SETTINGS, ("zigzag", 8, 2, 4, "sdpa", 7, 5, "document", "--micro-batch=1")))


def fits(one):
    """Neighbours that exchange heads have whole ones, or share one; Ulysses' are all ranks."""
    is_ulysses = one["variant"] == "ulysses"
    inner, kv_heads = one["world"] if is_ulysses else one["inner"], one["kv-heads"]
    if one["cut"] == "document" and (not one["documents"] or one["variant"] in ("ring", "ulysses")):
        return False
    shares = kv_heads % inner == 0 or inner % kv_heads == 0
    return one["world"] % inner == 12 % inner == 0 and shares and not (
        is_ulysses and one["inner"] > 1)


def flags_of(one):
    flags = [f"--{name}={one[name]}" for name in ("variant", "kv-heads", "attention")]
    flags += [f"--{name}={one[name]}" for name in ("documents", "window") if one[name]]
    flags += ["--cut=document"] * (one["cut"] == "document") + ["--inner=2"] * (one["inner"] == 2)
    flags.append(f"--seq={24 if one['world'] < 8 else 48}")
    return (*TRAINING, "--dtype=float64", "--heads=12", "--dim=48", "--layers=1", "--batch=2",
            *flags, *one["training"].split())


@pytest.mark.parametrize("one", [*covering(fits, **SETTINGS), ON_EIGHT])
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"], timeout=120)(run_main, SIX, flags, tmp_path), flags)


@pytest.mark.parametrize(("variant", "heads"), sample(
    [("zigzag", 16), ("gather", 1), ("ring", 16), ("gather", 16), ("zigzag", 1), ("ring", 1)], 2))
def test_one_head_and_heads_of_two_numbers(ranks, tmp_path, variant, heads):
    """The output of one head is not copied; RoPE's has strides where a head has two numbers."""
    flags = (*FLOAT64, f"--heads={heads}", f"--kv-heads={heads}", "--batch=1", "--attention=sdpa",
             f"--variant={variant}")
    hold_to_one_gpu(ranks(2, timeout=120)(run_main, SIX, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", sample(VARIANTS))
def test_bfloat16(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--dtype=bfloat16", f"--variant={variant}")
    status, _, output = ranks(2, timeout=120)(run_main, SIX, flags, tmp_path)[0]
    assert status == 0, output


@pytest.mark.full
def test_kernels_as_the_core_of_a_block(ranks, tmp_path):
    """On a GPU, or here in Triton's interpreter; where neither is, the report says so."""
    needs_triton()
    flags = (*FLOAT64, "--dtype=float32", "--kernels", "--steps=1", "--dim=64", "--layers=1",
             "--batch=1", "--window=5", "--documents=9")  # fmt: skip
    status, _, output = ranks(2, timeout=300)(run_main, SIX, flags, tmp_path)[0]
    assert status == 0 and "--kernels: no GPU" not in output, output


# ------------------------------------------------------------------------------- blocks alone


def qkv(heads, kv_heads, rows, keys, head_dim=8, dtype=torch.float64):
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, h, s, head_dim, dtype=torch.float64).to(dtype) for h, s in shapes]


def core_of(six, attention):
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
    return SimpleNamespace(variant=variant, cut=cut, window=window, inner=1)


def starts_of(lengths):
    return torch.tensor([sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)])


PACKED = sample([((7, 1, 8, 8), 4), ((1, 1, 22), 11), ((24,), None), ((3,) * 8, 1), *(
    itertools.product([(24,), (5, 19), (7, 1, 8, 8), (1,) * 24], (None, 1, 4, 11)))], 4)


@pytest.mark.parametrize(("lengths", "window"), PACKED)
def test_who_meets_whom(six, lengths, window):
    """By place: every token is held once, every query sees exactly the keys of its document and of
    its window, and at a hop at which no rank does, nobody sends."""
    for variant, how, n in itertools.product(VARIANTS, ("sequence", "document"), (1, 2, 3, 4)):
        if how == "document" and variant in ("ring", "ulysses"):
            continue
        parts = 1 if variant == "ulysses" else n
        flags = flags_alone(variant, how, window)
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
        assert seen.equal(wanted.long()), (variant, how, n)
        work = held.work(layouts[0])
        assert sum(work) == wanted.sum() and held.imbalance(layouts[0]) >= 1
        if how == "document" and window is None:
            assert len(set(work)) == 1  # and so is the work of each document
        if how == "sequence" and variant in ("zigzag", "ring"):
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


def test_refusals(run_chapter):
    hold_refusals(run_chapter, SIX, [
        ("--seq=12", 4, "--seq 12", "--seq 16"),
        ("--seq=4 --variant=ring", 4, "--seq 4", "--seq 8"),
        ("--seq=48 --variant=ulysses", 3, "--kv-heads 4", "--variant zigzag --inner 1"),
        ("--inner=4 --heads=2 --kv-heads=1", 4, "--heads 2", "--variant zigzag --inner 1"),
        ("--inner=3", 4, "--inner 3", "--inner 1"),
        ("--inner=6", 4, "--inner 6", "--inner 2"),
        ("--cut=document", 4, "--cut document", "--documents 128"),
        ("--variant=ring --cut=document --documents=9", 2, "--cut", "--variant zigzag"),
        ("--documents=129", 2, "--documents 129", "--documents 128"),
        ("--documents=0", 2, "--documents", "--documents 32"),
        ("--window=0", 2, "--window", "--window 32"),
        ("--variant=torch --attention=sdpa --device=cpu", 2, "--variant torch", "--variant zigzag"),
        ("--variant=torch --documents=9", 2, "--documents", "--variant zigzag"),
        ("--kernels --dtype=float64", 2, "--kernels", "--dtype float32 --dim 512"),
    ])


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
