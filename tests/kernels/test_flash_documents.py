"""kernels/flash_attention.py with documents that share a sequence, and with a sliding window."""

import importlib
import math

import pytest
import torch

from tests.kernels.tensors import (
    DEVICE,
    assert_close,
    exact,
    flash,
    interpreter,  # noqa: F401  (a fixture)
    qkv,
    random,
)

IN_INTERPRETER = pytest.mark.skipif(DEVICE == "cuda", reason="only there can blocks be counted")


def seen(queries, keys, lengths=None, window=None):
    """Which query sees which key, by the definition, with each token's document."""
    place = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)[None, :]
    mask = key <= place
    if window is not None:
        mask &= place - key < window
    if lengths is not None:
        document = torch.repeat_interleave(torch.tensor(lengths).diff())
        mask &= document[:, None] == document[None, :]
    return mask.to(DEVICE)


def packed(lengths):
    return None if lengths is None else torch.tensor(lengths, device=DEVICE)


def since_of(q, k, lengths, window=None):
    return flash.seen_from(q, k, True, lengths, window)


def by_definition(q, k, v, dout, mask):
    """(out, lse), (dq, dk, dv)."""
    group = q.shape[1] // k.shape[1]
    of_heads = [x.repeat_interleave(group, 1) for x in (k, v)]
    scores = (q @ of_heads[0].mT / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    out = scores.softmax(-1).masked_fill(~mask, 0) @ of_heads[1]
    return (out, scores.logsumexp(-1)), torch.autograd.grad(out, (q, k, v), dout)


def compare(q, k, v, lengths, window):
    """The kernels and the references."""
    dout = random(*q.shape, seed=9).detach().to(q.dtype)
    mask = seen(q.shape[2], k.shape[2], lengths, window)
    wide = [exact(x) for x in (q, k, v, dout)]
    (out64, lse64), gradients64 = by_definition(*wide, mask)
    limits = packed(lengths), window
    since = since_of(q, k, *limits)
    out = flash.flash_attention(q, k, v, True, *limits)
    with torch.no_grad():
        _, lse = flash.flash_forward(q, k, v, True, since)
    assert_close(out, out64, q.dtype)
    blind = lse64.isneginf()
    assert lse.isneginf().equal(blind)
    assert_close(lse[~blind], lse64[~blind], torch.float32)
    out.backward(dout)
    for x, gradient64 in zip((q, k, v), gradients64):
        assert_close(x.grad, gradient64, q.dtype, smallest=1)

    *wide, dout64 = [x.detach() for x in wide]
    found = flash.reference_forward(*wide, True, since)
    torch.testing.assert_close(found[0], out64)
    torch.testing.assert_close(found[1], lse64)
    found = flash.reference_backward(dout64, *wide, *found, True, since)
    torch.testing.assert_close(found, gradients64)


UNEVEN, ODD = (0, 40, 40, 41, 75, 75), (0, 0, 1, 17, 33, 48, 70)  # one token, none, whole blocks
CASES = [  # heads, kv heads, queries, keys, dim; lengths, window. float32 is in blocks of 16 by 16
    ((2, 1, 75, 75, 16), UNEVEN, None),
    ((4, 2, 70, 70, 16), ODD, None),  # whose blocks are looked at below, daily
    ((1, 1, 33, 33, 256), None, 16),
    ((2, 2, 75, 75, 40), UNEVEN, 7),
    ((2, 1, 70, 70, 16), ODD, 17),
    ((1, 1, 64, 64, 16), (0, 16, 32, 64), 33),
    ((1, 1, 9, 9, 16), range(10), None),
    ((1, 1, 100, 100, 16), None, 48),
    ((2, 1, 81, 81, 32), None, 17),
    ((1, 1, 70, 70, 128), ODD, 16),
    ((2, 1, 40, 40, 16), None, 1),
    ((1, 1, 40, 40, 16), None, 1000),
    ((2, 2, 20, 70, 16), None, 16),
    ((2, 1, 33, 90, 40), None, 40),
    ((1, 1, 1, 90, 16), None, 20),
    ((2, 1, 50, 37, 16), None, 5),  # the first queries see nothing
    ((1, 1, 40, 7, 16), None, 1),
]


@pytest.mark.parametrize(("shape", "lengths", "window"), [
    pytest.param(*case, marks=[pytest.mark.full] * (i % 2)) for i, case in enumerate(CASES)
], ids=str)  # fmt: skip
def test_documents_and_windows(shape, lengths, window):
    compare(*qkv(*shape), lengths, window)


@pytest.mark.parametrize(("gpu", "shape", "dtype", "lengths", "window"), [
    (80, (2, 1, 300, 300, 40), torch.float16, (0, 120, 121, 290, 300), None),
    (90, (1, 1, 300, 300, 40), torch.bfloat16, (0, 7, 128, 300), 100),
    (90, (2, 1, 140, 420, 80), torch.float16, None, 150),
    (100, (1, 1, 200, 200, 130), torch.bfloat16, (0, 129, 200), None),
], ids=str)  # fmt: skip
def test_documents_as_each_gpu_launches_them(monkeypatch, gpu, shape, dtype, lengths, window):
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "generation", lambda x: gpu)
    compare(*qkv(*shape, dtype), lengths, window)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_documents_over_many_blocks(dim, dtype):
    compare(*qkv(4, 2, 1500, 1500, dim, dtype, batch=2), (0, 700, 701, 1000, 1500), None)
    compare(*qkv(4, 2, 1500, 1500, dim, dtype), (0, 700, 701, 1000, 1500), 400)
    compare(*qkv(4, 2, 500, 1500, dim, dtype), None, 400)


def results(q, k, v, *limits):
    """out, lse, dq, dk, dv."""
    since = since_of(q, k, *limits) if limits else None
    out, lse = flash.flash_forward(q, k, v, True, since)
    dout = random(*q.shape, seed=9).detach()
    return out, lse, *flash.flash_backward(dout, q, k, v, out, lse, True, since)


@pytest.mark.parametrize("limits", [
    ([0, 0, 75], None), pytest.param((None, 75), marks=pytest.mark.full)], ids=str)
def test_one_document_is_plain_attention(limits):
    """Bit by bit where queries walk, and with the last rows at another time where keys do."""
    q, k, v = (x.detach() for x in qkv(2, 1, 75, 75, 16))
    found, plain = results(q, k, v, packed(limits[0]), limits[1]), results(q, k, v)
    assert all(x.equal(y) for x, y in zip(found[:3], plain))
    torch.testing.assert_close(found[3:], plain[3:])


def test_a_query_that_sees_itself_alone():
    q, k, v = (x.detach() for x in qkv(2, 2, 40, 40, 16))
    for limits in ((packed(range(41)), None), (None, 1)):
        out, _, dq, dk, dv = results(q, k, v, *limits)
        torch.testing.assert_close(out, v)
        torch.testing.assert_close(dv, random(*q.shape, seed=9).detach())
        torch.testing.assert_close(dq.abs() + dk.abs(), torch.zeros_like(dq), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_lengths_of_any_integers_and_strides(kind):
    q, k, v = (x.detach() for x in qkv(1, 1, 40, 40, 16))
    lengths = torch.tensor([0, -1, 20, -1, 40, -1], dtype=kind, device=DEVICE)[::2]
    for place in (lengths, lengths.cpu()):
        out = flash.flash_attention(q, k, v, True, place)
        for half in (slice(20), slice(20, 40)):
            alone = flash.flash_attention(*(x[:, :, half] for x in (q, k, v)))
            torch.testing.assert_close(out[:, :, half], alone)


# ------------------------------------------------------------------------- what is not computed


def blocks_of(mask, size=16):
    """(seen by some row, not seen whole by all), in blocks; keys past the end are seen by none."""
    rows, keys = (math.ceil(n / size) * size for n in mask.shape)
    cut = lambda x: x.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).flatten(2)
    full = torch.zeros(rows, keys, dtype=torch.bool)
    full[: mask.shape[0], : mask.shape[1]] = mask
    some = cut(full).any(-1)
    full[mask.shape[0] :] = full[mask.shape[0] - 1]  # rows past the end: as the last one
    return some, some & ~cut(full).all(-1)


@IN_INTERPRETER
@pytest.mark.parametrize(("shape", "lengths", "window"), [
    CASES[i] for i in (2, 4, 7, 12, 15)], ids=str)
def test_blocks_that_nobody_sees_are_not_multiplied(monkeypatch, shape, lengths, window):
    """Two matmuls a block forward, three for dq, and four for dk and dv. And of queries, a mask
    only for blocks that are seen in part."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    dot, visible, dots, masks = builder.create_dot, flash.visible, [], []
    monkeypatch.setattr(builder, "create_dot", lambda *x: dots.append(1) or dot(*x))
    monkeypatch.setattr(flash, "visible", lambda *x: masks.append(1) or visible(*x))
    q, k, v = (x.detach() for x in qkv(*shape))
    some, partly = blocks_of(seen(*shape[2:4], lengths, window))
    limits, heads = (True, since_of(q, k, packed(lengths), window)), shape[0]
    out, lse = flash.flash_forward(q, k, v, *limits)
    assert len(dots) == 2 * heads * some.sum() and len(masks) == heads * partly.sum()
    flash.flash_backward(q, q, k, v, out, lse, *limits)
    assert len(dots) == 9 * heads * some.sum() and len(masks) == 2 * heads * partly.sum()


@pytest.mark.parametrize(("queries", "keys"), [(35, 50), (50, 35), (16, 16)])
def test_keys_from_since_on_without_a_diagonal(queries, keys):
    """As a block of ring attention under a window is: later queries see fewer of its keys."""
    q, k, v = (x.detach() for x in qkv(2, 1, queries, keys, 16))
    since = (torch.arange(queries, device=DEVICE) * keys // queries).int()
    mask = torch.arange(keys, device=DEVICE) >= since[:, None]
    dout = random(*q.shape, seed=9).detach()
    wide = [exact(x) for x in (q, k, v, dout)]
    (out64, lse64), gradients64 = by_definition(*wide, mask)
    out, lse = flash.flash_forward(q, k, v, False, since)
    assert_close(out, out64, q.dtype)
    assert_close(lse, lse64, torch.float32)
    for found, expected in zip(flash.flash_backward(dout, q, k, v, out, lse, False, since),
                               gradients64):  # fmt: skip
        assert_close(found, expected, q.dtype, smallest=1)


@pytest.mark.parametrize("broken", [
    pytest.param(slice(0, 30), marks=pytest.mark.full), slice(66, 100)])
def test_what_is_not_a_number_stays_in_its_document(broken):
    """If it shares no block with another one."""
    tensors = [x.detach() for x in (*qkv(2, 1, 100, 100, 16), random(1, 2, 100, 16, seed=9))]
    lengths, whole = packed([0, 30, 32, 64, 66, 100]), slice(32, 64)
    healthy = results(*tensors[:3], lengths)
    for x in tensors:
        x[:, :, broken] = torch.nan
    q, k, v, dout = tensors
    since = since_of(q, k, lengths)
    out, lse = flash.flash_forward(q, k, v, True, since)
    assert out[:, :, broken].isnan().all()
    gradients = flash.flash_backward(dout, q, k, v, out, lse, True, since)
    for found, expected in zip((out, lse, *gradients), healthy):
        assert found[:, :, whole].isfinite().all()
        assert found[:, :, whole].equal(expected[:, :, whole])


def test_flops_of_documents():
    pairs = seen(75, 75, UNEVEN).sum().item()
    assert pairs == sum(n * (n + 1) / 2 for n in (40, 1, 34))
    assert flash.flops(2, 3, 75, 75, 16, True, pairs=pairs) == 2 * 3 * pairs * 16 * 4
    assert flash.flops(2, 3, 75, 75, 16, True, True, pairs) == 2 * 3 * pairs * 16 * 10


# ------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("lengths", "message"), [
    (torch.tensor([0.0, 4.0]), r"lengths of shape \(2,\) is torch.float32 on cpu; expected \(doc"),
    (torch.tensor([[0, 4]]), r"lengths of shape \(1, 2\) .* expected \(documents \+ 1,\)"),
    (torch.tensor(4), r"lengths of shape \(\) .* expected \(documents \+ 1,\), int32 or int64, on"),
    (torch.tensor([0]), r"lengths of shape \(1,\) .* expected \(documents \+ 1,\)"),
    (torch.tensor([1, 4]), r"lengths of shape \(2,\) .* ascend from 0 to 4, not from 1 to 4"),
    (torch.tensor([0, 3]), "expected to ascend from 0 to 4, not from 0 to 3"),
    (torch.tensor([0, 3, 2, 4]), "expected to ascend from 0 to 4"),
    (torch.tensor([0, 5, 4]), "expected to ascend from 0 to 4"),
    (torch.tensor([0, 4], device="meta"), "on meta; expected .* on cpu or cpu"),
], ids=str)  # fmt: skip
def test_lengths_that_do_not_fit(lengths, message):
    q = torch.ones(1, 1, 4, 16)
    with pytest.raises(ValueError, match=f"flash_attention: .*{message}"):
        flash.flash_attention(q, q, q, lengths=lengths)


def test_what_documents_and_windows_need():
    q, longer, lengths = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 6, 16), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="expected causal and 4 keys, .* not causal False"):
        flash.flash_attention(q, q, q, False, lengths)
    with pytest.raises(ValueError, match="expected causal and 4 keys, .* True and 6 keys"):
        flash.flash_attention(q, longer, longer, True, lengths)
    for causal, window in ((True, 0), (True, -3), (False, 2)):
        with pytest.raises(ValueError, match=f"window is {window} and causal {causal}; expected 1"):
            flash.flash_attention(q, q, q, causal, window=window)
