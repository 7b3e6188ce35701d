"""kernels/flash_attention.py against its definition in float64, also of documents and windows."""

import importlib
import itertools
import math

import pytest
import torch

from lab.chapters import room
from tests.conftest import sample
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    IN_16_BITS,
    assert_close,
    assert_rounded_once,
    exact,
    flash,
    interpreter,  # noqa: F401  (a fixture)
    qkv,
    random,
)

FP32, FP16, BF16 = DTYPES

# --------------------------------------------------------------------- compared with the definition


def seen(queries, keys, causal=True, lengths=None, window=None):
    """Which query sees which key: bool (queries, keys)."""
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    mask = key <= (place if causal else keys)
    if window is not None:
        mask &= place - key < window
    if lengths is not None:
        document = torch.repeat_interleave(torch.tensor(lengths).diff())
        mask &= document[:, None] == document[None, :]
    return mask.to(DEVICE)


def since_of(q, k, lengths=None, window=None):
    """The first key that each query sees, as the kernels take it."""
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    return flash.seen_from(q, k, True, lengths, window)


def by_definition(q, k, v, dout, mask):
    """In plain PyTorch and its autograd: (out, lse), (dq, dk, dv)."""
    k_of_head, v_of_head = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k_of_head.mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    out = scores.softmax(-1).masked_fill(~mask, 0) @ v_of_head
    return (out, scores.logsumexp(-1)), torch.autograd.grad(out, (q, k, v), dout)


def compare(q, k, v, causal=True, lengths=None, window=None):
    """The kernels, through autograd, and the references in kernels/flash_attention.py."""
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dout = random(*q.shape, seed=9).to(q.dtype)
    wide = [exact(x) for x in (q, k, v, dout)]
    (out64, lse64), gradients64 = by_definition(
        *wide, seen(q.shape[2], k.shape[2], causal, lengths, window))
    since = None if lengths is window is None else since_of(q, k, lengths, window)
    lengths = None if lengths is None else torch.tensor(lengths, device=DEVICE)
    out = flash.flash_attention(q, k, v, causal, lengths, window)
    lse = out.grad_fn.saved_tensors[-1]
    assert_close(out, out64, q.dtype)
    blind = lse64.isneginf()  # queries that see no key
    assert lse.isneginf().equal(blind)
    assert_close(lse[~blind], lse64[~blind], torch.float32)
    out.backward(dout)
    for x, gradient64 in zip((q, k, v), gradients64):
        assert_close(x.grad, gradient64, q.dtype, smallest=1)

    *wide, dout64 = (x.detach() for x in wide)
    actual = flash.reference_forward(*wide, causal, since)
    torch.testing.assert_close(actual, (out64.detach(), lse64.detach()))
    actual = flash.reference_backward(dout64, *wide, *actual, causal, since)
    torch.testing.assert_close(actual, gradients64)


GROUPED, BLIND, ONE_KEY, WIDE = SHAPES = [  # heads, kv heads, queries, keys, dim
    (2, 1, 20, 70, 40),
    (4, 2, 40, 20, 64),  # causal: the first twenty queries see nothing
    (1, 1, 129, 1, 32),
    (1, 1, 1, 130, 128)]  # fmt: skip
TELLING = [(GROUPED, FP16, True), (BLIND, FP32, True), (ONE_KEY, BF16, True), (WIDE, FP32, False)]
PRODUCT = itertools.product([*SHAPES, (2, 2, 33, 33, 16), (1, 1, 40, 40, 256)], DTYPES,
                            (True, False))  # fmt: skip


@pytest.mark.parametrize(("shape", "dtype", "causal"), sample(
    [*TELLING, *(case for case in PRODUCT if case not in TELLING)], len(TELLING)), ids=str)
def test_attention(shape, dtype, causal):
    compare(*qkv(*shape, dtype), causal)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_many_blocks(dtype, dim):
    """A real pipeline: loads ahead of use, and from blocks without a mask to blocks with one."""
    for causal in (False, True):
        compare(*qkv(4, 2, 600, 900, dim, dtype, batch=2), causal)
        compare(*qkv(2, 2, 1024, 1024, dim, dtype), causal)
    lengths = 0, 700, 701, 1000, 1500
    compare(*qkv(4, 2, 1500, 1500, dim, dtype, batch=2), True, lengths)
    compare(*qkv(4, 2, 1500, 1500, dim, dtype), True, lengths, 400)
    compare(*qkv(4, 2, 500, 1500, dim, dtype), True, None, 400)


# 80 loads by pointers, 90 and 100 by descriptors for their copy engine, in blocks of other sizes.
LAUNCHES = [
    (80, (1, 1, 200, 200, 40), FP16, True, (0, 120, 121, 190, 200), None),
    (90, (1, 1, 300, 300, 40), BF16, True, (0, 7, 128, 300), 100),
    (90, (2, 1, 140, 420, 80), FP16, True, None, 150),
    (100, (1, 1, 200, 200, 130), BF16, True, (0, 129, 200), None)]  # fmt: skip
LAUNCHES += [(gpu, (2, 1, 150, 270, dim), FP16, causal, None, None) for gpu, dim, causal in
             itertools.product((80, 90, 100), (36, 128, 256), (True, False))]  # fmt: skip


@pytest.mark.parametrize(("gpu", "shape", "dtype", "causal", "lengths", "window"),
                         sample(LAUNCHES), ids=str)
def test_attention_as_each_gpu_launches_it(monkeypatch, gpu, shape, dtype, causal, lengths, window):
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "generation", lambda x: gpu)
    elif gpu != flash.generation(torch.empty(1, dtype=FP16, device=DEVICE)):
        pytest.skip("this GPU launches others")
    compare(*qkv(*shape, dtype), causal, lengths, window)


def test_logits_of_ten_thousand():
    """Nothing overflows. A float32 of 10^4 is off by 5e-4, and the weights by that share."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 1, 40, 40, 64, scale=70))
    q64, k64, v64 = map(exact, (q, k, v))
    assert flash.reference_scores(q64, k64, False).abs().max() > 1e4
    dout = random(*q.shape, seed=9)
    (out64, _), gradients64 = by_definition(q64, k64, v64, dout.double(), seen(40, 40))
    out = flash.flash_attention(q, k, v, True)
    torch.testing.assert_close(out.double(), out64, rtol=0, atol=2e-3 * 70)
    out.backward(dout)
    for x, gradient64 in zip((q, k, v), gradients64):
        torch.testing.assert_close(x.grad.double(), gradient64, rtol=0, atol=2e-3 * 70)


def test_attention_of_any_strides():
    """(batch, seq, heads, dim) turned around, as a model has it, isn't copied. Others are."""
    q, k, v = (random(2, 10, 2, 32, seed=i).transpose(1, 2) for i in range(3))
    assert flash.readable(q) is q and flash.flash_forward(q, k, v)[0].stride() == q.stride()
    compare(*(x.detach() for x in (q, k, v)))
    sliced = [x[..., 1:18] for x in (q, k, v)]  # rows start anywhere
    copied = flash.readable(sliced[0])
    assert copied.equal(sliced[0]) and copied.stride(2) % 4 == 0 and copied.data_ptr() % 16 == 0
    compare(*sliced)
    q = random(1, 2, 17, 32, dtype=FP16)
    k, v = (random(1, 1, 1, 32, dtype=FP16, seed=i).expand(-1, -1, 30, -1) for i in (1, 2))
    assert flash.readable(k).stride(2) > 0  # the copy engine takes no step of 0
    compare(q, k, v, False)


@pytest.mark.skipif(DEVICE == "cuda", reason="there, weights are rounded for the tensor cores")
@IN_16_BITS
def test_attention_rounds_once(dtype):
    """Over several blocks of keys and of queries, for two heads that share them. Backward is given
    the output that forward has rounded."""
    q, k, v = qkv(2, 1, 140, 140, 16, dtype)
    out, lse = flash.flash_forward(q, k, v + 1, True)
    out64, lse64 = flash.reference_forward(*(x.double() for x in (q, k, v + 1)), True)
    assert_rounded_once(out, out64)
    torch.testing.assert_close(lse.double(), lse64, rtol=1e-6, atol=1e-6)
    dout = random(*q.shape, seed=9, dtype=dtype)
    actual = flash.flash_backward(dout, q, k, v + 1, out, lse, True)
    wide = [x.double() for x in (dout, q, k, v + 1, out, lse)]
    for gradient, gradient64 in zip(actual, flash.reference_backward(*wide, True)):
        assert_rounded_once(gradient, gradient64)


def test_backward_takes_the_lse_and_the_output_that_it_is_given():
    """Those of the whole, where a block has some of the keys. A row that saw nothing anywhere has
    no gradient."""
    q, k, v = qkv(2, 1, 20, 20, 16)
    whole, lse = flash.flash_forward(q, *(torch.cat([x, x + 1], 2) for x in (k, v)), False)
    dout, lse[:, :, 3] = random(*q.shape, seed=7), -float("inf")
    for causal in (True, False):
        actual = flash.flash_backward(dout, q, k, v, whole, lse, causal)
        assert not actual[0][:, :, 3].any()
        expected = flash.reference_backward(dout, q, k, v, whole, lse, causal)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------- documents and windows

UNEVEN, ODD = (0, 40, 40, 41, 75, 75), (0, 0, 1, 17, 33, 48, 70)  # one token, none, whole blocks
CASES = [  # heads, kv heads, queries, keys, dim; lengths, window. float32 is in blocks of 16 by 16
    ((2, 1, 70, 70, 16), ODD, 17),
    ((1, 1, 75, 75, 16), UNEVEN, None),
    ((2, 1, 50, 37, 16), None, 5),  # the first queries see nothing
    ((1, 1, 9, 9, 16), range(10), None),  # each query sees only itself
    ((2, 1, 40, 40, 16), None, 1),
    ((2, 2, 20, 70, 40), None, 16),
    ((4, 2, 70, 70, 16), ODD, None),
    ((2, 1, 81, 81, 32), None, 17),
    ((1, 1, 70, 70, 128), ODD, 16),
    ((1, 1, 1, 90, 16), None, 20),
]


@pytest.mark.parametrize(("shape", "lengths", "window"), sample(CASES, 6), ids=str)
def test_documents_and_windows(shape, lengths, window):
    compare(*qkv(*shape), True, lengths, window)


# ----------------------------------------------------------------------------- what is not computed


def blocks_of(mask, size=16):
    """(seen by some row, not seen whole by all), in blocks; keys past the end are seen by none."""
    rows, keys = (math.ceil(n / size) * size for n in mask.shape)

    def cut(x):
        return x.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).flatten(2)

    full = torch.zeros(rows, keys, dtype=torch.bool)
    full[: mask.shape[0], : mask.shape[1]] = mask
    some = cut(full).any(-1)
    full[mask.shape[0] :] = full[mask.shape[0] - 1]  # rows past the end: as the last one
    return some, some & ~cut(full).all(-1)


@pytest.mark.skipif(DEVICE == "cuda", reason="in the interpreter, matmuls can be counted")
@pytest.mark.parametrize(("shape", "lengths", "window"), sample(
    [CASES[i] for i in (0, 2, 5, 6)]), ids=str)
def test_blocks_that_nobody_sees_are_not_multiplied(monkeypatch, shape, lengths, window):
    """Two matmuls a block forward, three for dq, and four for dk and dv. Where queries walk over
    keys, only a block that is seen in part has a mask."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    dot, visible, dots, masks = builder.create_dot, flash.visible, [], []
    monkeypatch.setattr(builder, "create_dot", lambda *x: dots.append(1) or dot(*x))
    monkeypatch.setattr(flash, "visible", lambda *x: masks.append(1) or visible(*x))
    q, k, v = qkv(*shape)
    some, partly = blocks_of(seen(*shape[2:4], True, lengths, window))
    limits, heads = (True, since_of(q, k, lengths, window)), shape[0]
    out, lse = flash.flash_forward(q, k, v, *limits)
    assert len(dots) == 2 * heads * some.sum() and len(masks) == heads * partly.sum()
    flash.flash_backward(q, q, k, v, out, lse, *limits)
    assert len(dots) == 9 * heads * some.sum() and len(masks) == 2 * heads * partly.sum()


@pytest.mark.parametrize(("queries", "keys"), sample([(35, 50), (50, 35)]))
def test_keys_from_since_on_without_a_diagonal(queries, keys):
    """As a block of ring attention under a window is: later queries see fewer of its keys."""
    q, k, v = qkv(2, 1, queries, keys, 16)
    since = (torch.arange(queries, device=DEVICE) * keys // queries).int()
    mask = torch.arange(keys, device=DEVICE) >= since[:, None]
    dout = random(*q.shape, seed=9)
    (out64, lse64), gradients64 = by_definition(*map(exact, (q, k, v, dout)), mask)
    out, lse = flash.flash_forward(q, k, v, False, since)
    assert_close(out, out64, q.dtype)
    assert_close(lse, lse64, torch.float32)
    actual = flash.flash_backward(dout, q, k, v, out, lse, False, since)
    for gradient, gradient64 in zip(actual, gradients64):
        assert_close(gradient, gradient64, q.dtype, smallest=1)


@pytest.mark.filterwarnings("ignore:All-NaN")  # NumPy's, in the interpreter
def test_a_nan_stays_in_its_document():
    """If it shares no block with another one."""
    found = []
    for value in (1.0, math.nan):
        q, k, v = (x.index_fill_(2, torch.arange(34, 50, device=DEVICE), value).requires_grad_()
                   for x in qkv(1, 1, 50, 50, 16))
        out = flash.flash_attention(q, k, v, True, torch.tensor([0, 16, 32, 34, 50]))
        found.append([out, *torch.autograd.grad(out.sum(), (q, k, v))])
    for healthy, broken in zip(*found):
        assert broken[:, :, 34:].isnan().any() and broken[:, :, :32].equal(healthy[:, :, :32])


def test_flops_of_documents():
    pairs = seen(75, 75, True, UNEVEN).sum().item()
    assert pairs == sum(n * (n + 1) / 2 for n in (40, 1, 34))
    assert flash.flops(2, 3, 75, 75, 16, True, pairs=pairs) == 2 * 3 * pairs * 16 * 4
    assert flash.flops(2, 3, 75, 75, 16, True, True, pairs) == 2 * 3 * pairs * 16 * 10


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.parametrize("window", [None, 40])
def test_memory_is_linear_in_the_sequence(window):
    most = {}
    for seq in (128, 256):
        q, k, v = qkv(1, 1, seq, seq, 16, FP16)
        lengths = torch.tensor([0, seq // 3, seq], device=DEVICE) if window else None
        with room("01", "held").MemoryTimeline(lambda inputs=(q, k, v): (inputs, [], [])) as watch:
            since = flash.seen_from(q, k, True, lengths, window)
            out, lse = flash.flash_forward(q, k, v, True, since)
            gradients = flash.flash_backward(out, q, k, v, out, lse, True, since)
        most[seq] = max(rest for *_, rest in watch.samples)
    assert sum(x.nbytes for x in (out, lse, *gradients)) < most[256]
    assert most[256] < 2 * 256 * 256  # the scores in 16 bits would be more
    assert most[256] <= 2 * most[128]


def test_formulas():
    assert flash.plain_bytes(1000, 1000, 64, 2) == (4 * 1000 * 64 + 4 * 10**6) * 2
    assert flash.flash_bytes(1000, 1000, 64, 2) == 4 * 1000 * 64 * 2 + 4000
    assert flash.flops(1, 1, 1000, 1000, 64, False) == 2 * 2 * 64 * 10**6  # two matmuls
    assert flash.flops(1, 1, 1000, 1000, 64, True, backward=True) == 5 * 64 * 10**6
