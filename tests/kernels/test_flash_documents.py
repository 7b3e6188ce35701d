"""kernels/flash_attention.py with documents that share a sequence, and with a sliding window."""

import importlib
import math

import pytest
import torch

from tests.conftest import sample
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    assert_close,
    exact,
    flash,
    interpreter,  # noqa: F401  (a fixture)
    qkv,
    random,
)
from tests.kernels.test_flash_attention import (
    ON_GPU,
    by_definition,
    compare,
    seen,
    since_of,
)

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


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_documents_over_many_blocks(dim, dtype):
    compare(*qkv(4, 2, 1500, 1500, dim, dtype, batch=2), True, (0, 700, 701, 1000, 1500))
    compare(*qkv(4, 2, 1500, 1500, dim, dtype), True, (0, 700, 701, 1000, 1500), 400)
    compare(*qkv(4, 2, 500, 1500, dim, dtype), True, None, 400)


def test_lengths_of_any_integers_and_strides():
    q, k, v = qkv(1, 1, 40, 40, 16)
    for kind in (torch.int32, torch.int64):
        lengths = torch.tensor([0, -1, 20, -1, 40, -1], dtype=kind, device=DEVICE)[::2]
        for place in (lengths, lengths.cpu()):
            assert flash.seen_from(q, k, True, place).tolist() == 20 * [0] + 20 * [20]


# ----------------------------------------------------------------------------- what is not computed


def blocks_of(mask, size=16):
    """(seen by some row, not seen whole by all), in blocks; keys past the end are seen by none."""
    rows, keys = (math.ceil(n / size) * size for n in mask.shape)
    cut = lambda x: x.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2).flatten(2)
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
    found = flash.flash_backward(dout, q, k, v, out, lse, False, since)
    for gradient, gradient64 in zip(found, gradients64):
        assert_close(gradient, gradient64, q.dtype, smallest=1)


def results(q, k, v, dout, lengths):
    """out, lse, dq, dk, dv."""
    since = since_of(q, k, lengths)
    out, lse = flash.flash_forward(q, k, v, True, since)
    return out, lse, *flash.flash_backward(dout, q, k, v, out, lse, True, since)


@pytest.mark.filterwarnings("ignore:All-NaN")  # NumPy's, in the interpreter
@pytest.mark.parametrize("broken", sample([slice(34, 50), slice(0, 14)]))
def test_what_is_not_a_number_stays_in_its_document(broken):
    """If it shares no block with another one."""
    tensors = *qkv(1, 1, 50, 50, 16), random(1, 1, 50, 16, seed=9)
    lengths, whole = [0, 14, 16, 32, 34, 50], slice(16, 32)
    healthy = results(*tensors, lengths)
    for x in tensors:
        x[:, :, broken] = torch.nan
    found = results(*tensors, lengths)
    assert found[0][:, :, broken].isnan().all()
    for one, other in zip(found, healthy):
        assert one[:, :, whole].isfinite().all() and one[:, :, whole].equal(other[:, :, whole])


def test_flops_of_documents():
    pairs = seen(75, 75, True, UNEVEN).sum().item()
    assert pairs == sum(n * (n + 1) / 2 for n in (40, 1, 34))
    assert flash.flops(2, 3, 75, 75, 16, True, pairs=pairs) == 2 * 3 * pairs * 16 * 4
    assert flash.flops(2, 3, 75, 75, 16, True, True, pairs) == 2 * 3 * pairs * 16 * 10


# ---------------------------------------------------------------------------------- what is refused


def test_what_does_not_fit():
    q, longer, of_all = torch.ones(1, 1, 4, 16), torch.ones(1, 1, 6, 16), torch.tensor([0, 4])
    for lengths in ([0.0, 4.0], [[0, 4]], [1, 4], [0, 3], [0, 3, 2, 4]):
        with pytest.raises(ValueError, match="flash_attention: lengths of shape"):
            flash.flash_attention(q, q, q, lengths=torch.tensor(lengths))
    for keys, causal in (q, False), (longer, True):
        with pytest.raises(ValueError, match="flash_attention: lengths of shape"):
            flash.flash_attention(q, keys, keys, causal, of_all)
    for causal, window in ((True, 0), (False, 2)):
        with pytest.raises(ValueError, match=f"window is {window}"):
            flash.flash_attention(q, q, q, causal, window=window)
