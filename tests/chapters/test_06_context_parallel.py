"""Chapter 06: attention over ranks gives one GPU's numbers; blocks, merges and rings alone, too."""

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import common
from common import Refused
from lab.bench import anatomy
from lab.bench.machines import MACHINES
from lab.cli import strict
from tests.chapters.test_04_tensor_parallel import FLOAT64, SETTINGS, covering, flags_of
from tests.conftest import TEXT, chapter, hold_to_one_gpu, needs_triton, run_main, some
from tests.support.pretend_cuda import pretended_cuda

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
SEND_ON = """dist.isend, x, group=group, group_peer=(rank + 1) % n),
        dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % n)"""


@pytest.mark.parametrize(
    ("variant", "right", "wrong", "named"),
    some([
        # whose tokens, and where they are
        ("zigzag", "model.block1.attn.rope.positions = positions", "pass", "loss"),
        ("zigzag", "parts[-1 - rank]", "parts[ranks + rank]", "loss"),
        ("gather", "model.block1.attn.rope.positions = positions", "pass", "loss"),
        ("gather", ".triu(1 + keys - rows)", ".triu(2 + keys - rows)", "loss"),
        ("gather", "*chunks[::-2]]", "*chunks[1::2]]", "loss"),
        ("gather", "zip(q.chunk(2, dim=2), (rank, 2 * n - 1 - rank))",
         "zip(q.chunk(2, dim=2), (rank + 1, 2 * n - 1 - rank))", "loss"),
        ("zigzag", "dist.all_reduce(loss, group=group)", "pass", "loss"),
        # whom it meets, and with what
        ("ring", "if other < rank else None", "if other <= rank + 1 else None", "loss"),
        ("ring", "if other < rank else None", "if other < rank - 1 else None", "loss"),
        ("zigzag", "return everything, front, False", "return everything, back, False", "loss"),
        ("zigzag", "return back, everything", "return front, everything", "loss"),
        ("zigzag", "return everything, everything, True", "return everything, everything, False",
         "loss"),
        ("zigzag", ".triu(1)", ".triu(2)", "loss"),
        # the merge, and the lse of the whole
        ("ring", "lse.copy_(total)", "pass", "loss"),
        ("ring", "(lse - total).exp()", "(total - total).exp()", "loss"),
        ("ring", "out[:, :, rows], lse[:, :, rows], causal)", "out[:, :, rows], scores_of(q, "
         "k_here).logsumexp(-1), causal)", "gradients"),
        # around the ring, and home
        ("ring", "group.rank(), other, q.shape[2], zigzag)", "group.rank(), (other + 1) % 3, "
         "q.shape[2], zigzag)", "loss"),
        ("ring", SEND_ON, SEND_ON.replace("1", "2"), "loss"),  # of three ranks, to the one before
        ("ring", " kv = receive()", " receive()", "loss"),
        ("ring", "dkv += receive()", "receive()", "gradients"),
        ("ring", "at_home += receive()", "receive()", "gradients"),
        ("zigzag", "dkv[:, :, :, keys] += torch",
         "dkv[:, :, :, -k_here[:, :, keys].shape[2] :] += torch", "gradients"),
        ("zigzag", "dq[:, :, rows] += dq_block", "dq[:, :, rows] = dq_block", "gradients"),
        # without a ring
        ("gather", "mine, parts.flatten(0, 1), group=ctx.group)", "mine, parts.flatten(0, 1), "
         "group=ctx.group); mine = parts[ctx.group.rank()]", "gradients"),
        ("ulysses", "(group.size(), -1)).movedim(split, 0)",
         "(-1, group.size())).movedim(split + 1, 0)", "loss"),
        ("ulysses", "x.repeat_interleave(copies, dim=1)", "x.repeat(1, copies, 1, 1)", "loss"),
        # all parameters
        ("zigzag", "PartialSums(model.parameters())", "PartialSums([])", "gradients"),
        ("zigzag", "norm = grad_norm(model.parameters())",
         "norm = grad_norm(model.parameters()) * 1.001", "gradient norm"),
    ]),
)  # fmt: skip
def test_a_broken_chapter_says_so(ranks, tmp_path, variant, right, wrong, named):
    """Faults that a student might make, on three ranks (Ulysses on four, which share kv heads)."""
    world, shape = 3, ("--heads=3", "--dim=12", "--seq=24")
    if variant == "ulysses":
        world, shape = 4, ("--kv-heads=2", "--seq=16")
    flags = (*FAULTY, *shape, f"--variant={variant}")
    (status, _, output), *_ = ranks(world)(run_main, SIX, flags, tmp_path, (right, wrong))
    assert status == 1 and f"✗ {named}" in output, output


# ------------------------------------------------------------------------------- a block, and rings


def qkv(heads, kv_heads, rows, keys, head_dim=8, dtype=torch.float64):
    shapes = (heads, rows), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(2, h, s, head_dim, dtype=torch.float64).to(dtype) for h, s in shapes]


def full_attention(q, k, v, causal=True):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def core_of(six, attention):
    return six.core_of(SimpleNamespace(kernels=False, attention=attention), like=None)


@pytest.mark.parametrize("core", ["plain", "sdpa"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_a_block_is_attention(six, core, causal, heads, kv_heads):
    """Out, lse and all gradients, against PyTorch's autograd."""
    q, k, v = (x.requires_grad_() for x in qkv(heads, kv_heads, 6, 6 if causal else 9))
    expected = full_attention(q, k, v, causal)
    dout = torch.randn_like(expected)
    expected.backward(dout)
    with torch.no_grad():
        forward, backward = core_of(six, core)
        out, lse = forward(q, k, v, causal)
        gradients = backward(dout, q, k, v, out, lse, causal)
        exact = six.scores_of(q, k, causal).logsumexp(-1)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(lse, exact)
    for gradient, x in zip(gradients, (q, k, v)):
        torch.testing.assert_close(gradient, x.grad)


def merged(six, q, k, v, blocks, precision):
    """Attention to all keys, block after block. precision: of what they are merged into."""
    out = torch.zeros(q.shape, dtype=precision)
    lse = torch.full(q.shape[:3], -torch.inf, dtype=precision)
    for keys in torch.arange(k.shape[2]).chunk(blocks):
        block = six.plain_forward(q, k[:, :, keys], v[:, :, keys], causal=False)
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


def ring_alone(seed):
    """Ring attention and its gradients on this rank's rows: the largest differences from full
    attention, for shapes that depend on the seed."""
    six, group = chapter(SIX), dist.group.WORLD
    rank, n = group.rank(), group.size()
    torch.manual_seed(seed)
    kv_heads, group_size, chunk = (int(torch.randint(1, 4, ())) for _ in range(3))
    zigzag, core = bool(seed % 2), core_of(six, ("plain", "sdpa")[seed // 2 % 2])
    seq = 2 * n * chunk
    q, k, v = (x.requires_grad_() for x in qkv(kv_heads * group_size, kv_heads, seq, seq))
    expected, dout = full_attention(q, k, v), torch.randn_like(q)
    expected.backward(dout)

    mine = six.positions_of(rank, n, seq, zigzag)
    parts = [x.detach()[:, :, mine].requires_grad_() for x in (q, k, v)]
    out = six.RingAttention.apply(*parts, group, core, zigzag)
    out.backward(dout[:, :, mine])
    there = (expected, q.grad, k.grad, v.grad)
    here = (out, *(part.grad for part in parts))
    return [(x[:, :, mine] - y).abs().max().item() for x, y in zip(there, here)]


def rings_alone(seeds):
    return {seed: max(ring_alone(seed)) for seed in range(seeds)}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ring_attention_is_full_attention(ranks, world):
    for differences in ranks(world)(rings_alone, 4):
        assert max(differences.values()) < 1e-12, differences


def test_who_meets_whom(six):
    """By position: every query sees exactly the keys up to its own, for both layouts; and a rank
    computes as many pairs as the formula says, with all of its own block."""
    for zigzag, n, length in itertools.product((False, True), (1, 2, 3, 4), (2, 6)):
        seq = n * length
        seen, computed = torch.zeros(seq, seq, dtype=torch.int64), [0] * n
        for rank, other in itertools.product(range(n), repeat=2):
            queries = six.positions_of(rank, n, seq, zigzag)
            keys = six.positions_of(other, n, seq, zigzag)
            met = six.meeting(rank, other, length, zigzag)
            if met:
                rows, columns, causal = queries[met[0]], keys[met[1]], met[2]
                block = torch.ones(len(rows), len(columns), dtype=torch.int64)
                seen[rows[:, None], columns] += block.tril() if causal else block
                computed[rank] += block.numel()
        assert seen.equal(torch.ones(seq, seq, dtype=torch.int64).tril())
        variant = "zigzag" if zigzag else "ring"
        assert computed == [six.pairs(variant, rank, n, seq) for rank in range(n)]


def test_gathered_keys_meet_whom_they_may(six):
    """In the order of the sequence; and what the two chunks compute is what the formula counts."""
    for n, length in itertools.product((1, 2, 3, 4), (2, 6)):
        seq, half = n * length, length // 2
        positions = [six.positions_of(rank, n, seq, zigzag=True) for rank in range(n)]
        assert six.in_order(torch.cat(positions), n, 0).equal(torch.arange(seq))
        for rank, mine in enumerate(positions):
            ends = [chunk[-1].item() + 1 for chunk in mine.chunk(2)]
            assert sum(half * end for end in ends) == six.pairs("gather", rank, n, seq)


@pytest.mark.parametrize(("rows", "keys"), [(6, 6), (6, 18)])
def test_flash_attention_needs_no_mask(six, rows, keys):
    """On pretended CUDA: numbers as with a mask, and nothing as large as one is made."""
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            made.append(getattr(result, "shape", ())[-2:])
            return result

    q, k, v = qkv(4, 2, rows, keys, dtype=torch.bfloat16)
    expected = six.lower_right_attention(q, k, v, "sdpa")
    with pretended_cuda():
        q, k, v = (x.to("cuda") for x in (q, k, v))
        unseen = lambda q, *args: [torch.empty_like(q)]  # what a kernel does inside
        flash = mock.patch.object(
            torch.ops.aten, "_scaled_dot_product_flash_attention", unseen)
        with Sizes(), flash:
            six.lower_right_attention(q, k, v, "sdpa")
        out = six.lower_right_attention(q, k, v, "sdpa").cpu()
    torch.testing.assert_close(out, expected)
    assert (rows, keys) not in made


def test_kernels_as_the_core_of_a_block(ranks, tmp_path):
    """On a GPU, or here in Triton's interpreter; where neither is, the report says so."""
    needs_triton()
    flags = (*FLOAT64, "--dtype=float32", "--kernels", "--steps=1", "--dim=64", "--layers=1",
             "--batch=1")  # fmt: skip
    status, _, output = ranks(2)(run_main, SIX, flags, tmp_path)[0]
    assert status == 0 and "--kernels: no GPU" not in output, output


# ------------------------------------------------------------------------------- the formulas


def test_ring_over_zigzag(six):
    """2N/(N+1), or 2 - 1/N; and a zig-zag's ranks all compute as much."""
    for n in (2, 4, 8, 64):
        for diagonal, longer in ((1, 2 * n / (n + 1)), (0.5, 2 - 1 / n)):
            ring, zigzag = ([six.pairs(variant, rank, n, 4 * n, diagonal) for rank in range(n)]
                            for variant in RINGS[::-1])  # fmt: skip
            assert max(ring) / max(zigzag) == pytest.approx(longer)
            assert len(set(zigzag)) == 1 and sum(ring) == sum(zigzag)


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


def test_when_a_hop_hides(six):
    """Where the seconds of its bytes are those of its FLOPs."""
    cfg = common.Config(1, 8192, 64, 8, 2**17, 256)
    for flops, bandwidth in MACHINES.values():
        tokens = six.tokens_to_hide(cfg, 2, flops, bandwidth)
        assert 2 * tokens * 1024 * 2 / bandwidth == pytest.approx(4 * tokens**2 * 8192 / flops)


def test_activations_fall_with_the_ranks(six):
    """All of them, but for a loss and, with gathered keys, those and each layer's masks, which a
    CPU needs: for 128k tokens on 16 ranks 1.1 GB, as the chapter says."""
    cfg = common.Config(4, 64, 8, 8, 64, 256, attention="sdpa")
    keys = 4 * 2 * 2 * 64 * 64 * 4

    def bytes_kept(variant, n):
        return anatomy.activation_bytes(cfg, 2, 4, six.kept(variant, cfg, n)) - 4

    for variant, n in itertools.product(("zigzag", "ring", "ulysses"), (2, 4, 8)):
        assert n * bytes_kept(variant, n) == bytes_kept(variant, 1)
        masks = 4 * 4 * six.pairs("gather", 0, n, 64)  # of 4 layers
        rest = bytes_kept("gather", n) - keys - masks
        assert n * rest == bytes_kept("zigzag", 1) - keys
    assert 2 * six.pairs("gather", 0, 16, 2**17) == pytest.approx(1.1e9, rel=0.01)


@pytest.mark.parametrize(
    ("variant", "right", "wrong"),
    [
        ("zigzag", 'sent["send"] = (2 +', 'sent["send"] = (1 +'),
        ("ulysses", "(1 + forwards) * 2 * max(cfg.kv_heads, n)",
         "(1 + forwards) * 2 * cfg.kv_heads"),
        ("gather", "{\"gather\": 1,", "{\"gather\": 1 / n,"),
        ("zigzag", 'fromkeys(classes, 1 / n)', 'fromkeys(classes[:3], 1 / n)'),
        ("zigzag", '"zigzag": (n - 1) / 2 +', '"zigzag": rank +'),
        ("gather", "(6 if scores_kept else 7)", "7"),
        # what is sent and computed again, and no more
        ("ring --recompute=full", 'forwards = 1 if recompute == "none" else 2', "forwards = 1"),
        ("ulysses --recompute=selective", "outs = 2 if recompute", "outs = 3 if recompute"),
        ("gather --recompute=selective", "matmul * (2 * n - rank) // (2 * n + 1) if", "matmul if"),
        ("gather --recompute=selective", '{"gather": "gathered", ', "{"),  # all keys are kept
    ],
)  # fmt: skip
def test_a_wrong_formula_is_reported(ranks, tmp_path, variant, right, wrong):
    """Of what is sent, kept and computed."""
    flags = (*FAULTY, *f"--variant={variant}".split())
    status, _, output = ranks(2)(run_main, SIX, flags, tmp_path, (right, wrong))[0]
    assert status == 1 and "✗" in output


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
         "--heads 8 and --kv-heads 4 cannot be shared by 3 ranks; --variant zigzag would work"),
        (2, "--kv-heads=1 --heads=1 --variant=ulysses",
         "--heads 1 and --kv-heads 1 cannot be shared by 2 ranks; --variant zigzag would work"),
        (2, "--variant=torch --attention=sdpa --device=cpu", "--variant torch needs --attention "
         "sdpa and a GPU for each rank; --variant zigzag would work"),
        (2, "--variant=gather --kernels",
         "--kernels means nothing to --variant gather; --variant zigzag would work"),
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
        ("--attention=sdpa",
         "--attention sdpa over ranks is flash attention, which on a GPU takes 16 bits in heads of "
         "8, 16, 24, ..., not float32 in heads of 16; --dtype float32 --precision bf16 --dim 512"),
        ("--attention=sdpa --dtype=bfloat16 --heads=32",
         "--attention sdpa over ranks is flash attention, which on a GPU takes 16 bits in heads of "
         "8, 16, 24, ..., not bfloat16 in heads of 4; --dtype float32 --precision bf16 --dim 2048"),
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
