"""Chapter 06: attention over ranks gives one GPU's numbers; blocks, merges and rings alone, too."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import common
from common import Refused
from lab.bench import anatomy, contexts
from lab.cli import strict
from tests.chapters.test_04_tensor_parallel import FLOAT64, SETTINGS, TRAINING, covering, flags_of
from tests.conftest import TEXT, chapter, hold_to_one_gpu, needs_triton, run_main

SIX = "06_context_parallel"
VARIANTS = ("zigzag", "ring", "gather", "ulysses")
RINGS = ("zigzag", "ring")


@pytest.fixture(scope="module")
def six():
    return chapter(SIX)


# ------------------------------------------------------------------------------- same as one GPU


def fits(one):
    """A rank of Ulysses needs whole heads; all others take any."""
    own = one["kv-heads"] == "own" or one["world"] % one["kv-heads"] == 0
    return one["variant"] != "ulysses" or own or one["kv-heads"] % one["world"] == 0


FEW = SETTINGS | {"world": (1, 2, 3, 4)}  # up to 6 in full: 8 meet no other blocks or heads


@pytest.mark.parametrize("one", covering(fits, variant=VARIANTS, attention=("plain", "sdpa"),
                                         **FEW))  # fmt: skip
def test_same_as_one_gpu(ranks, tmp_path, one):
    flags = flags_of(one)
    hold_to_one_gpu(ranks(one["world"])(run_main, SIX, flags, tmp_path), flags)


def packed_fits(one):
    inner = one["world"] if one["variant"] == "ulysses" else one["inner"]
    is_cut = one["cut"] == "sequence" or (
        one["documents"] is not None and one["variant"] in ("zigzag", "gather"))
    kv_heads = one["kv-heads"]
    is_fit = one["variant"] != "ulysses" or one["inner"] == 1
    shared = kv_heads % inner == 0 or inner % kv_heads == 0
    return is_cut and is_fit and shared and one["world"] % inner == 0


@pytest.mark.parametrize("one", covering(
    packed_fits, variant=VARIANTS, world=(2, 3, 4), documents=(None, 7),
    window=(None, 5), cut=("sequence", "document"), inner=(1, 2),
    attention=("plain", "sdpa"), recompute=("none", "full", "selective"),
    **{"kv-heads": (1, 3, 8)}))  # fmt: skip
def test_packed_the_same_as_one_gpu(ranks, tmp_path, one):
    given = {name: value for name, value in one.items() if name != "world" and value is not None}
    given = given if one["cut"] == "document" else given | {"cut": None}
    given = given if one["inner"] > 1 else given | {"inner": None}
    flags = (*TRAINING, "--dtype=float64", "--heads=24", "--dim=48", "--seq=24", "--layers=2",
             "--batch=2", "--micro-batch=1", "--clip=0.1",
             *(f"--{name}={value}" for name, value in given.items() if value))  # fmt: skip
    hold_to_one_gpu(ranks(one["world"])(run_main, SIX, flags, tmp_path), flags)


@pytest.mark.full
@pytest.mark.parametrize(
    ("variant", "world", "kv_heads", "seq", "attention"),
    [
        (variant, world, kv_heads, seq, attention)
        for variant, world, kv_heads, seq, attention in itertools.product(
            VARIANTS, (1, 2, 3, 4, 6), (12, 6, 2, 1), (24, 72), ("plain", "sdpa"))
        if fits({"variant": variant, "world": world, "kv-heads": kv_heads})
    ],
)
def test_same_as_one_gpu_in_full(ranks, tmp_path, variant, world, kv_heads, seq, attention):
    flags = (*FLOAT64, f"--variant={variant}", f"--kv-heads={kv_heads}", "--heads=12", "--dim=48",
             f"--seq={seq}", f"--attention={attention}")  # fmt: skip
    hold_to_one_gpu(ranks(world)(run_main, SIX, flags, tmp_path), flags)


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("variant", ["zigzag", "ring", "gather"])
def test_one_head_and_heads_of_two_numbers(ranks, tmp_path, variant, heads):
    """The output of one head is not copied; RoPE's has strides where a head has two numbers."""
    flags = (*FLOAT64, f"--heads={heads}", f"--kv-heads={heads}", "--batch=1", "--attention=sdpa",
             f"--variant={variant}")
    hold_to_one_gpu(ranks(2)(run_main, SIX, flags, tmp_path), flags)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16(ranks, tmp_path, variant):
    flags = (*FLOAT64, "--dtype=bfloat16", f"--variant={variant}")
    status, _, output = ranks(2)(run_main, SIX, flags, tmp_path)[0]
    assert status == 0, output


FAULTY = (*FLOAT64, "--steps=1", "--kv-heads=1", "--layers=1", "--batch=2")
# ------------------------------------------------------------------------------- a block, and rings


def qkv(heads, kv_heads, rows, keys, head_dim=8, dtype=torch.float64):
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, h, s, head_dim, dtype=torch.float64).to(dtype) for h, s in shapes]


def full_attention(q, k, v, causal=True):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def core_of(six, attention):
    return six.core_of(SimpleNamespace(kernels=False, attention=attention), like=None)


@pytest.mark.parametrize("core", ["plain", "sdpa"])
@pytest.mark.parametrize("kind", ["causal", "all", "low"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_a_block_is_attention(six, core, kind, heads, kv_heads):
    """Out, lse and all gradients, against PyTorch's autograd. low: as under a window."""
    causal, low = kind == "causal", torch.tensor([0, 0, 2, 5, 7, 8]) if kind == "low" else None
    q, k, v = (x.requires_grad_() for x in qkv(heads, kv_heads, 6, 6 if causal else 9))
    seen = torch.arange(9) >= low[:, None] if kind == "low" else None
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


def merged(six, q, k, v, blocks, precision):
    """Attention to all keys, block after block. precision: of what they are merged into."""
    out = torch.zeros(q.shape, dtype=precision)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=precision)
    for keys in torch.arange(k.shape[2]).chunk(blocks):
        block = six.plain_forward(q, k[:, :, keys], v[:, :, keys], causal=False, low=None)
        six.merge(out, lse, *(x.to(precision) for x in block))
    return out.to(q.dtype)


def test_blocks_are_merged_in_float32(six):
    """Of bfloat16: no further from the truth than SDPA, where a merge in bfloat16 strays."""
    q, k, v = qkv(4, 2, 64, 512, dtype=torch.bfloat16)
    truth = full_attention(q.double(), k.double(), v.double(), causal=False)
    error = lambda out: (out.double() - truth).square().mean().sqrt().item()
    theirs = error(full_attention(q, k, v, causal=False))
    assert error(merged(six, q, k, v, 16, torch.float32)) <= theirs
    assert error(merged(six, q, k, v, 16, torch.bfloat16)) > 2 * theirs


def flags_alone(variant, cut="sequence", window=None, inner=1):
    return SimpleNamespace(variant=variant, cut=cut, window=window, inner=inner)


def ring_alone(seed):
    """Ring attention and its gradients on this rank's rows: the largest differences from full
    attention, for shapes that depend on the seed."""
    six, group = chapter(SIX), dist.group.WORLD
    rank, n = group.rank(), group.size()
    torch.manual_seed(seed)
    kv_heads, group_size, chunk = (int(torch.randint(1, 4, ())) for _ in range(3))
    zigzag, core = bool(seed % 2), core_of(six, ("plain", "sdpa")[seed // 2 % 2])
    window = (None, 1, 3, seq := 2 * n * chunk)[seed % 4]
    token = torch.arange(seq)
    starts = torch.where(torch.rand(seq) < 0.2, token, 0).cummax(0).values
    variant, how = ("ring", "zigzag")[zigzag], ("sequence", "document")[zigzag and seed // 4 % 2]
    layout = six.Layout(flags_alone(variant, how, window), rank, n, starts)
    q, k, v = (x.requires_grad_() for x in qkv(kv_heads * group_size, kv_heads, seq, seq))
    back = token[:, None] - token
    seen = (0 <= back) & (back < (window or seq)) & (starts[:, None] <= token)
    expected = F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=group_size > 1)
    dout = torch.randn_like(q)
    expected.backward(dout)

    mine = layout.source[layout.positions[rank]]  # -1: padding, which is to be of no account
    held = lambda x: torch.where(mine[:, None] < 0, 9, x[:, :, mine])
    parts = [held(x.detach()).requires_grad_() for x in (q, k, v)]
    out = six.RingAttention.apply(*parts, group, core, layout.blocks)
    out.backward(torch.where(mine[:, None] < 0, 0, dout[:, :, mine]))
    here, real = (out, *(part.grad for part in parts)), mine >= 0
    there = (expected, q.grad, k.grad, v.grad)
    return [(x[:, :, mine] - y)[:, :, real].abs().max().item() if real.any() else 0
            for x, y in zip(there, here)]


def rings_alone(seeds):
    return {seed: max(ring_alone(seed)) for seed in range(seeds)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ring_attention_is_full_attention(ranks, world):
    for differences in ranks(world)(rings_alone, 8):
        assert max(differences.values()) < 1e-12, differences


LENGTHS = (24,), (1, 1, 22), (5, 19), (7, 1, 8, 8), (3,) * 8, (1,) * 24


def starts_of(lengths):
    return torch.tensor([sum(lengths[:i]) for i, n in enumerate(lengths) for _ in range(n)])


@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("lengths", LENGTHS)
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
            queries, ends = layout.positions[part], len(layout.blocks)
            assert ends == len(layouts[0].blocks) <= max(1, parts)
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
        work = contexts.work(layouts[0])
        assert sum(work) == wanted.sum() and contexts.imbalance(layouts[0]) >= 1
        if how == "document" and window is None:
            assert len(set(work)) == 1  # and so is the work of each document
        if how == "sequence" and variant in RINGS:
            hops = contexts.hops_of(variant, n, starts, window)
            assert len(layouts[0].blocks) - 1 == hops


def test_pairs_by_the_formula(six):
    """Of equal documents, all blocks as a plain core computes them."""
    for variant, n, documents in itertools.product(VARIANTS, (1, 2, 4), (1, 2, 4, 8, 16)):
        if n % documents == 0 or documents % n == 0:
            parts = 1 if variant == "ulysses" else n
            starts = starts_of((48 // documents,) * documents)
            for part in range(parts):
                layout = six.Layout(flags_alone(variant), part, parts, starts)
                computed = sum(map(contexts.pairs_of, layout.blocks))
                assert computed == six.pairs(variant, part, parts, 48, documents=documents)


def test_hops_that_a_window_needs(six):
    """By the formula, as the layout finds them, and chunk by chunk."""
    for variant, n, window in itertools.product(RINGS, (1, 2, 3, 4), (None, *range(1, 50, 3))):
        layout = six.Layout(flags_alone(variant, window=window), 0, n, starts_of((24 * n,)))
        assert len(layout.blocks) - 1 == six.hops_needed(variant, n, 24 * n, window)
        assert len(layout.blocks) - 1 == contexts.hops_of(variant, n, starts_of((24 * n,)), window)


def test_documents_are_padded(six):
    """To two chunks for each part, of as many tokens for each rank of it."""
    source, starts = six.with_room(starts_of((1, 5, 4)), 4)
    assert source.tolist() == [0, -1, -1, -1, 1, 2, 3, 4, 5, -1, -1, -1, 6, 7, 8, 9]
    assert starts.tolist() == [0] * 4 + [4] * 8 + [12] * 4


def test_kernels_as_the_core_of_a_block(ranks, tmp_path):
    """On a GPU, or here in Triton's interpreter; where neither is, the report says so."""
    needs_triton()
    flags = (*FLOAT64, "--dtype=float32", "--kernels", "--steps=1", "--dim=64", "--layers=1",
             "--batch=1", "--window=5", "--documents=9")  # fmt: skip
    status, _, output = ranks(2)(run_main, SIX, flags, tmp_path)[0]
    assert status == 0 and "--kernels: no GPU" not in output, output


# ------------------------------------------------------------------------------- the formulas


def test_ring_over_zigzag(six):
    """4N/(2N+1), or 2 - 1/N; and a zig-zag's ranks all compute as much."""
    for n in (2, 4, 8, 64):
        for diagonal, longer in ((1, 4 * n / (2 * n + 1)), (0.5, 2 - 1 / n)):
            ring, zigzag = ([six.pairs(variant, rank, n, 4 * n, diagonal) for rank in range(n)]
                            for variant in RINGS[::-1])  # fmt: skip
            assert max(ring) / max(zigzag) == pytest.approx(longer)
            assert len(set(zigzag)) == 1
            assert diagonal == 1 or sum(ring) == sum(zigzag)


def test_who_sends_least(six):
    """The lesson's table for forward, of which a step in bf16 sends: all of gather's all_gather,
    half of Ulysses' exchanges, and the first 2 of 8 bytes that a ring sends for a number. Ulysses
    sends least as soon as h + kv < N·kv, where kv is that of N heads at least."""
    for (kv_heads, kv), n in itertools.product(((8, 1024), (2, 256)), (2, 4, 8)):
        cfg = common.Config(1, 8192, 64, kv_heads, 2**17, 256)  # 8: as Llama 3's 70B
        sent = {v: six.traffic(cfg, v, 1, 1, n, 2) for v in ("ring", "gather", "ulysses")}
        parts = ("ring", "send", 8), ("gather", "all_gather", 2), ("ulysses", "all_to_all", 4)
        forward = {variant: sent[variant][op][2] / width for variant, op, width in parts}
        there = (n - 1) / n * 2 * cfg.seq
        exchanged = there / n * (8192 + max(kv, 128 * n))
        assert forward == {"ring": there * kv, "gather": there * kv, "ulysses": exchanged}
        assert (forward["ulysses"] < forward["ring"]) == (8192 + max(kv, 128 * n) < n * kv)


def test_activations_fall_with_the_ranks(six):
    """All of them, but for a loss and for gathered keys."""
    cfg = common.Config(4, 64, 8, 8, 64, 256, attention="sdpa")
    keys = 4 * 2 * 2 * 64 * 64 * 4

    def bytes_kept(variant, n):
        inner = n if variant == "ulysses" else 1
        return anatomy.activation_bytes(cfg, 2, 4, six.kept(variant, cfg, n, inner)) - 4

    for n in (2, 4, 8):
        assert n * bytes_kept("zigzag", n) == bytes_kept("zigzag", 1)
        assert n * (bytes_kept("gather", n) - keys) == bytes_kept("zigzag", 1) - keys
        assert n * bytes_kept("ulysses", n) == bytes_kept("zigzag", 1)


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("world", "flags", "line"),
    [
        (4, "--seq=12",
         "--seq 12 is not a multiple of two chunks for each rank = 8; --seq 16 would work"),
        (4, "--seq=4 --variant=ring",
         "--seq 4 is not a multiple of two chunks for each rank = 8; --seq 8 would work"),
        (1, "--seq=1 --variant=gather",
         "--seq 1 is not a multiple of two chunks for each rank = 2; --seq 2 would work"),
        (3, "--seq=48 --variant=ulysses",
         "--heads 8 and --kv-heads 4 cannot be shared by 3 ranks; --variant zigzag --inner 1 "
         "would work"),
        (2, "--kv-heads=1 --heads=1 --variant=ulysses",
         "--heads 1 and --kv-heads 1 cannot be shared by 2 ranks; --variant zigzag --inner 1 "
         "would work"),
        (4, "--cut=document", "--cut document means nothing without --documents; --documents 128 "
         "would work"),
        (4, "--inner=3", "--inner 3 does not divide 4 ranks; --inner 1 would work"),
        (4, "--inner=6", "--inner 6 does not divide 4 ranks; --inner 2 would work"),
        (4, "--inner=4 --heads=2 --kv-heads=1", "--heads 2 and --kv-heads 1 cannot be shared by 4 "
         "ranks; --variant zigzag --inner 1 would work"),
        (2, "--documents=129", "--documents 129 are longer than --seq = 128; --documents 128 would "
         "work"),
        *((2, f"--{flag}=0",
           f"--{flag}: 0 is no whole number in [1, 2147483648); --{flag} 32 would work")
          for flag in ("window", "documents")),
        (2, "--variant=ring --cut=document",
         "--cut means nothing to --variant ring; without --cut would work"),
        (2, "--variant=torch --attention=sdpa --device=cpu", "--variant torch needs --attention "
         "sdpa and a GPU for each rank; --variant zigzag would work"),
        (2, "--variant=torch --documents=9",
         "--documents means nothing to --variant torch; --variant zigzag would work"),
        (2, "--kernels --dtype=float64",
         "--kernels take float32 or bfloat16 in heads of 16 to 256, "
         "not float64 in heads of 16; --dtype float32 --dim 512 would work"),
    ],
)  # fmt: skip
def test_refusals(run_chapter, world, flags, line):
    flags = (*flags.split(), f"--data={TEXT}")
    status, output, errors = run_chapter(SIX, *flags, WORLD_SIZE=world, RANK=0)
    assert (status, output, errors) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        *((f"--attention=sdpa {more}", "--attention sdpa is flash attention here, which on a GPU "
           "takes 16 bits in heads of 8, 16, 24, ... and no --window; --attention plain")
          for more in ("", "--dtype=bfloat16 --heads=32", "--precision=bf16 --window=9")),
        ("--variant=torch", "--variant torch needs --attention sdpa and a GPU for each rank; "
         "--variant zigzag"),
        ("--variant=torch --attention=sdpa --dtype=bfloat16", None),
        ("--attention=sdpa --precision=bf16", None),
    ],
)  # fmt: skip
def test_refusals_on_gpus(six, monkeypatch, flags, line):
    """Of two machines with two GPUs each: the ranks of one have as many as they need."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    flags = (*flags.split(), f"--data={TEXT}")
    args = strict.parse(six.__file__, "", six.VARIANTS, six.flags, flags)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if line is None:
        return six.requires(args, 4)
    with pytest.raises(Refused) as refused:
        six.requires(args, 4)
    assert "; ".join(refused.value.args) == line
