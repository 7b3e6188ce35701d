"""kernels/flash_attention.py: forward and backward, against their definition in float64."""

import itertools
import math

import pytest
import torch

from lab.chapters import room
from tests.conftest import FULL, sample
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
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")

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
    found = flash.reference_forward(*wide, causal, since)
    torch.testing.assert_close(found, (out64.detach(), lse64.detach()))
    found = flash.reference_backward(dout64, *wide, *found, causal, since)
    torch.testing.assert_close(found, gradients64)


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


def test_attention_around_the_edges_of_blocks():
    """float32 goes in blocks of 16 by 16."""
    sizes = 15, 16, 17, 33
    pairs = itertools.product(sizes, sizes) if FULL else [(15, 33), (33, 16), (16, 17)]
    for queries, keys in pairs:
        for causal in (True, False):
            compare(*qkv(1, 1, queries, keys, 16), causal)


@ON_GPU
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_many_blocks(dtype, causal, dim):
    """A real pipeline: loads ahead of use, and from blocks without a mask to blocks with one."""
    compare(*qkv(4, 2, 600, 900, dim, dtype, batch=2), causal)
    compare(*qkv(2, 2, 1024, 1024, dim, dtype), causal)


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
    found = flash.flash_backward(dout, q, k, v + 1, out, lse, True)
    wide = [x.double() for x in (dout, q, k, v + 1, out, lse)]
    for gradient, gradient64 in zip(found, flash.reference_backward(*wide, True)):
        assert_rounded_once(gradient, gradient64)


def test_backward_takes_the_lse_and_the_output_that_it_is_given():
    """Those of the whole, where a block has some of the keys. A row that saw nothing anywhere has
    no gradient."""
    q, k, v = qkv(2, 1, 20, 20, 16)
    whole, lse = flash.flash_forward(q, *(torch.cat([x, x + 1], 2) for x in (k, v)), False)
    dout, lse[:, :, 3] = random(*q.shape, seed=7), -float("inf")
    for causal in (True, False):
        found = flash.flash_backward(dout, q, k, v, whole, lse, causal)
        assert not found[0][:, :, 3].any()
        expected = flash.reference_backward(dout, q, k, v, whole, lse, causal)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------ what it costs


def test_blocks_fit_what_they_are_made_for():
    assert all(kernel == "forward" for _, kernel in flash.PACKED)  # the others fit each other
    for gpu, kernels in flash.BLOCKS.items():
        for kernel, choices in kernels.items():
            for held, walked, _, _ in choices.values():
                assert held >= 16 and walked >= 16, (gpu, kernel)  # tl.dot takes no less
        for dim in kernels["dq"]:  # dk_dv reads the rows that dq has written, whole blocks of them
            assert kernels["dq"][dim][0] % kernels["dk_dv"][dim][1] == 0, (gpu, dim)


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


# -------------------------------------------------------------------------------- what does not fit


def test_what_does_not_fit():
    ones, q, lse = torch.ones, torch.ones(1, 4, 5, 16), torch.zeros(1, 4, 5)
    for name, inputs in [
        ("q", [ones(2, 3, 16), q, q]), ("q", [ones(1, 2, 3, 257)] * 3), ("q", [q.int()] * 3),
        ("k", [q, q.half(), q]), ("k", [q, ones(1, 3, 3, 16), ones(1, 3, 3, 16)]),
        ("v", [q, q, ones(1, 4, 3, 16)]),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"flash_attention: {name} of shape"):
            flash.flash_attention(*inputs)
    for name, inputs in [("dout", [q.half(), q, q, q, q, lse]),
                         ("out", [q, q, q, q, ones(1, 4, 6, 16), lse]),
                         ("lse", [q, q, q, q, q, lse[..., None]])]:  # fmt: skip
        with pytest.raises(ValueError, match=f"flash_attention: {name} of shape"):
            flash.flash_backward(*inputs)
