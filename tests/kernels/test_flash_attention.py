"""kernels/flash_attention.py: forward and backward, beside their definition."""

import importlib
import importlib.metadata
import itertools
import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import some
from tests.kernels.tensors import (
    DEVICE,
    DTYPES,
    TOLERANCE,
    assert_close,
    elu,
    exact,
    flash,
    interpreter,  # noqa: F401  (a fixture)
    layernorm,
    qkv,
    random,
)


def compare_attention(q, k, v, causal):
    q64, k64, v64 = map(exact, (q, k, v))
    out, out64 = (
        flash.flash_attention(q, k, v, causal),
        flash.reference_forward(q64, k64, v64, causal),
    )
    dout = random(*q.shape, seed=9).to(q.dtype)
    out.backward(dout)
    with torch.no_grad():
        gradients = flash.reference_backward(dout.double(), q64, k64, v64, *out64, causal)
        _, lse = flash.flash_forward(q, k, v, causal)
    assert_close(out, out64[0], q.dtype)
    seen = ~out64[1].isinf()
    assert (lse.isneginf() == ~seen).all() and lse.dtype == torch.float32
    assert_close(lse[seen], out64[1][seen].double(), torch.float32)
    for tensor, gradient in zip((q, k, v), gradients):
        assert_close(tensor.grad, gradient, q.dtype, smallest=1)


SHAPES = [  # heads, kv heads, queries, keys, dim
    (2, 2, 33, 33, 16),
    (2, 1, 20, 70, 40),
    (4, 2, 40, 20, 64),  # causal: the first twenty queries see nothing
    (1, 1, 1, 130, 128),
    (1, 1, 129, 1, 32),
    (1, 1, 40, 40, 256),
]


def half(*numbers):
    """Of three settings, any two values together; the other half is for `make test-all`."""
    return [pytest.mark.full] if sum(numbers) % 2 else []


@pytest.mark.parametrize(("shape", "dtype", "causal"), [
    pytest.param(shape, dtype, causal, marks=half(i, j, causal))
    for i, shape in enumerate(SHAPES) for j, dtype in enumerate(DTYPES) for causal in (True, False)
])  # fmt: skip
def test_attention(shape, dtype, causal):
    compare_attention(*qkv(*shape, dtype), causal)


@pytest.mark.parametrize("seed", [
    pytest.param(seed, marks=[pytest.mark.full] * (seed not in (0, 2))) for seed in range(8)])
def test_attention_of_random_shapes(seed):
    draw = lambda low, high: int(torch.randint(low, high, (), generator=generator))
    generator = torch.Generator().manual_seed(seed)
    kv_heads = draw(1, 3)
    heads, dim = kv_heads * draw(1, 4), draw(16, 100)
    queries, keys, causal = draw(1, 70), draw(1, 70), bool(draw(0, 2))
    dtype = DTYPES[draw(0, 3)]
    compare_attention(*qkv(heads, kv_heads, queries, keys, dim, dtype, draw(1, 3)), causal)


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes in the interpreter")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attention_over_many_blocks(dtype, causal, dim):
    """A real pipeline: loads ahead of use, and from blocks without a mask to blocks with one."""
    compare_attention(*qkv(4, 2, 600, 900, dim, dtype, batch=2), causal)
    compare_attention(*qkv(2, 2, 1024, 1024, dim, dtype), causal)


def test_attention_around_the_edges_of_blocks():
    """float32 goes in blocks of 16 by 16."""
    for (i, queries), (j, keys) in itertools.product(enumerate((15, 16, 17, 33)), repeat=2):
        for causal in (True, False):
            if not half(i, j, not causal) or os.environ.get("FULL"):
                compare_attention(*qkv(1, 1, queries, keys, 16), causal)


def test_logits_of_ten_thousand():
    """Nothing overflows. A float32 of 10^4 is off by 5e-4, and the weights by that share."""
    q, k, v = qkv(1, 1, 40, 40, 64, scale=70)
    q64, k64, v64 = map(exact, (q, k, v))
    assert flash.reference_scores(q64, k64, False).abs().max() > 1e4
    out = flash.flash_attention(q, k, v, True)
    out64, lse64 = flash.reference_forward(q64, k64, v64, True)
    torch.testing.assert_close(out.double(), out64, rtol=0, atol=2e-3 * 70)
    dout = random(*q.shape, seed=9)
    out.backward(dout)
    expected = flash.reference_backward(dout.double(), q64, k64, v64, out64, lse64, True)
    for tensor, gradient in zip((q, k, v), expected):
        torch.testing.assert_close(tensor.grad.double(), gradient, rtol=0, atol=2e-3 * 70)


def test_the_reference_is_pytorchs():
    q, k, v = (x.double() for x in qkv(4, 2, 5, 9, 16))
    from torch.nn.attention.bias import causal_lower_right

    for causal in (False, True):
        bias = causal_lower_right(5, 9) if causal else None
        expected = nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
        out, lse = flash.reference_forward(q, k, v, causal)
        torch.testing.assert_close(out, expected)
        assert lse.shape == (1, 4, 5)


def test_attention_is_causal_unless_told_otherwise():
    """As a model's core is called; PyTorch's own has the other default."""
    q, k, v = qkv(2, 2, 5, 5, 16)
    theirs = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(flash.flash_attention(q, k, v), theirs(q, k, v, is_causal=True))
    torch.testing.assert_close(flash.flash_attention(q, k, v, causal=False), theirs(q, k, v))


def test_gradients_of_the_references():
    q, k, v = (exact(x) for x in qkv(4, 2, 5, 7, 16))
    for causal in (False, True):
        forward = lambda q, k, v, c=causal: flash.reference_forward(q, k, v, c)[0]
        assert torch.autograd.gradcheck(forward, (q, k, v))
        out, lse = flash.reference_forward(q, k, v, causal)
        dout = random(*q.shape, seed=4).double()
        expected = torch.autograd.grad(out, (q, k, v), dout)
        ours = flash.reference_backward(dout, q, k, v, out, lse, causal)
        for gradient, other in zip(ours, expected):
            torch.testing.assert_close(gradient, other)
    x, weight, bias = exact(random(3, 5)), exact(random(5)), exact(random(5, seed=1))
    assert torch.autograd.gradcheck(layernorm.layer_norm_reference, (x, weight, bias))
    assert torch.autograd.gradcheck(elu.elu_reference, (x,))


@pytest.mark.parametrize(("causal", "dtype"), some(
    [(True, torch.float32), (True, torch.float16), (False, torch.float16), (False, torch.float32)]))
def test_pieces_with_the_lse_of_the_whole(causal, dtype):
    """As ring attention calls it: block by block, merged by lse; backward with the whole lse, a
    slice of what all ranks know."""
    q, k, v = (x.detach() for x in qkv(2, 1, 48, 48, 32, dtype))
    whole, whole_lse = flash.flash_forward(q, k, v, causal)
    dout = random(*q.shape, seed=7).detach().to(dtype)
    dq, dk, dv = flash.flash_backward(dout, q, k, v, whole, whole_lse, causal)
    tolerance = {"rtol": 1.3e-6, "atol": TOLERANCE[dtype]}
    for rows in (slice(0, 32), slice(32, 48)):
        outs, lses, gradients = [], [], []
        for keys in (slice(0, 32), slice(32, 48)):
            if causal and keys.start > rows.start:
                continue  # these rows see none of them
            here = q[:, :, rows], k[:, :, keys], v[:, :, keys], causal and rows == keys
            out, lse = flash.flash_forward(*here)
            outs, lses = [*outs, out], [*lses, lse]
            of_whole = whole[:, :, rows], whole_lse[:, :, rows]
            gradients.append(
                flash.flash_backward(dout[:, :, rows], *here[:3], *of_whole, here[3])[0]
            )
        lse = torch.stack(lses).logsumexp(0)
        merged = sum(out * (lse_of - lse).exp()[..., None] for out, lse_of in zip(outs, lses))
        torch.testing.assert_close(lse, whole_lse[:, :, rows], **tolerance)
        torch.testing.assert_close(
            merged, whole[:, :, rows].float(), check_dtype=False, **tolerance
        )
        torch.testing.assert_close(sum(gradients), dq[:, :, rows], **tolerance)
    last = slice(32, 48)  # keys that, if causal, only the last rows see
    rows = last if causal else slice(0, 48)
    of_rows = [x[:, :, rows] for x in (dout, q)], [x[:, :, rows] for x in (whole, whole_lse)]
    _, *piece = flash.flash_backward(*of_rows[0], k[:, :, last], v[:, :, last], *of_rows[1], causal)
    for gradient, expected in zip(piece, (dk, dv)):
        torch.testing.assert_close(gradient, expected[:, :, last], **tolerance)


def test_rows_that_saw_nothing_anywhere_get_no_gradient():
    q, k, v = (x.detach() for x in qkv(1, 1, 20, 20, 16))
    out, lse = flash.flash_forward(q, k, v)
    dout, lse[:, :, 3] = torch.ones_like(q), -float("inf")
    kernel = flash.flash_backward(dout, q, k, v, out, lse)
    reference = flash.reference_backward(dout, q, k, v, out, lse)
    assert not kernel[0][:, :, 3].any()
    for ours, other in zip(kernel, reference):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_attention_of_any_strides():
    """(batch, seq, heads, dim) turned around, as a model has it, is not copied. Others are."""
    base = [random(2, 20, 2, 32, seed=i).detach() for i in range(3)]
    q, k, v = (x.transpose(1, 2).requires_grad_() for x in base)
    assert flash.readable(q) is q and flash.flash_forward(q, k, v)[0].stride() == q.stride()
    compare_attention(q, k, v, True)
    compare_attention(*(x.detach().mT.contiguous().mT.requires_grad_() for x in (q, k, v)), False)
    sliced = [x.detach()[..., 1:18].requires_grad_() for x in (q, k, v)]  # rows start anywhere
    copied = flash.readable(sliced[0])
    assert copied.equal(sliced[0]) and copied.stride(2) % 4 == 0 and copied.data_ptr() % 16 == 0
    compare_attention(*sliced, True)
    for dtype in (torch.float32, torch.float16):
        q = random(1, 2, 17, 32, dtype=dtype)
        k, v = (random(1, 1, 1, 32, dtype=dtype, seed=i).expand(-1, -1, 30, -1) for i in (1, 2))
        assert flash.readable(k).stride(2) > 0  # the copy engine takes no step of 0
        compare_attention(q, k.detach().requires_grad_(), v.detach().requires_grad_(), False)


LAUNCHES = [(80, 36), (90, 128)]  # by pointers, and by descriptors
MORE = {*itertools.product((80, 90, 100), (36, 128, 256))} - {*LAUNCHES}


@pytest.mark.parametrize(("gpu", "dim"), [
    *LAUNCHES, *(pytest.param(*launch, marks=pytest.mark.full if DEVICE == "cpu" else ())
                 for launch in sorted(MORE))])
def test_attention_as_each_gpu_launches_it(monkeypatch, gpu, dim):
    """In blocks of every size; by pointers, or by descriptors for the copy engine."""
    if DEVICE == "cpu":
        monkeypatch.setattr(flash, "generation", lambda x: gpu)
    elif gpu != flash.generation(torch.empty(1, dtype=torch.float16, device=DEVICE)):
        pytest.skip("this GPU launches others")
    compare_attention(*qkv(2, 1, 150, 270, dim, torch.float16), True)
    compare_attention(*qkv(1, 1, 129, 64, dim, torch.bfloat16), False)


def test_blocks_fit_what_they_are_made_for():
    assert all(kernel == "forward" for _, kernel in flash.PACKED)  # the others fit each other
    for gpu, kernels in flash.BLOCKS.items():
        for kernel, choices in kernels.items():
            for held, walked, _, _ in choices.values():
                assert held >= 16 and walked >= 16, (gpu, kernel)  # tl.dot takes no less
        for dim in kernels["dq"]:  # dk_dv reads the rows that dq has written, whole blocks of them
            assert kernels["dq"][dim][0] % kernels["dk_dv"][dim][1] == 0, (gpu, dim)


class Allocated(TorchDispatchMode):
    """Bytes of all storages that operators bring up while it is entered."""

    def __init__(self, *known):
        super().__init__()
        self.total, self.storages = 0, {x.untyped_storage().data_ptr(): x for x in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.storages:
                self.storages[storage.data_ptr()] = x  # kept: or its place is used again
                self.total += storage.nbytes()
        return result


@pytest.mark.parametrize("window", [None, 40])
def test_memory_is_linear_in_the_sequence(window):
    totals = {}
    for seq in (128, 256):
        q, k, v = (x.detach() for x in qkv(1, 1, seq, seq, 16, torch.float16))
        lengths = torch.tensor([0, seq // 3, seq], device=DEVICE) if window else None
        with Allocated(q, k, v) as allocated:
            since = flash.seen_from(q, k, True, lengths, window)
            out, lse = flash.flash_forward(q, k, v, True, since)
            flash.flash_backward(out, q, k, v, out, lse, True, since)
        totals[seq] = allocated.total
    results = 4 * 256 * 16 * 2 + 256 * 4  # out, dq, dk, dv; lse
    assert results < totals[256] < 2 * 256 * 256  # the scores in 16 bits would be more
    assert totals[256] <= 2 * totals[128]


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's allocator is asked")
def test_memory_on_a_gpu_is_linear_in_the_sequence():
    q, k, v = (x.detach() for x in qkv(1, 1, 8192, 8192, 64, torch.bfloat16))
    flash.flash_forward(q, k, v, True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = flash.flash_forward(q, k, v, True)
    flash.flash_backward(out, q, k, v, out, lse, True)
    assert torch.cuda.max_memory_allocated() - before < 8192 * 8192


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 3, 16), (1, 1, 3, 16), (1, 1, 3, 16)), r"q of shape \(2, 3, 16\) .*; expected"),
        (((1, 2, 3, 8), (1, 1, 3, 8), (1, 1, 3, 8)), "expected .* and a dim of 16 to 256"),
        (((1, 2, 3, 257), (1, 1, 3, 257), (1, 1, 3, 257)), "expected .* and a dim of 16 to 256"),
        (
            ((1, 4, 3, 16), (1, 3, 3, 16), (1, 3, 3, 16)),
            r"k of shape .*; expected \(1, a divisor of",
        ),
        (((1, 4, 3, 16), (2, 4, 3, 16), (2, 4, 3, 16)), r"k of shape \(2, 4, 3, 16\)"),
        (
            ((1, 4, 3, 16), (1, 4, 3, 16), (1, 4, 5, 16)),
            r"v of shape .*; expected \(1, 4, 3, 16\)",
        ),
    ],
)
def test_attention_refuses_what_does_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        flash.flash_attention(*map(torch.ones, shapes))


def test_attention_refuses_dtypes():
    q = torch.ones(1, 1, 4, 16)
    with pytest.raises(
        ValueError, match="k of shape .* is torch.float16 on cpu; .* torch.float32 on cpu"
    ):
        flash.flash_attention(q, q.half(), q)
    with pytest.raises(ValueError, match="is torch.int32 on .*; expected float32, float16 or bf"):
        flash.flash_attention(q.int(), q.int(), q.int())
    lse = torch.zeros(1, 1, 4)
    for name, others in {
        "dout of shape .* is torch.float16": (q.half(), q, q, q, q, lse),
        r"out of shape \(1, 1, 5, 16\)": (q, q, q, q, torch.ones(1, 1, 5, 16), lse),
        r"lse of shape \(1, 1, 4, 1\) .* expected \(1, 1, 4\), torch.float32": (
            *(q,) * 5,
            lse[..., None],
        ),
    }.items():
        with pytest.raises(ValueError, match=f"flash_attention: {name}"):
            flash.flash_backward(*others)


@pytest.mark.skipif(DEVICE == "cuda", reason="only the interpreter's matmuls can be counted")
def test_flops_are_those_of_the_kernels(monkeypatch):
    """Two matmuls forward; backward the five that are counted, and two once more."""
    builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
    dot, counted = builder.create_dot, []

    def counting(self, a, b, *others):
        (rows, inner), columns = a.data.shape, b.data.shape[1]
        counted.append(2 * rows * inner * columns)
        return dot(self, a, b, *others)

    monkeypatch.setattr(builder, "create_dot", counting)
    q, k, v = (x.detach() for x in qkv(4, 2, 32, 48, 16))
    out, lse = flash.flash_forward(q, k, v)
    assert sum(counted) == flash.flops(1, 4, 32, 48, 16, False)
    counted.clear()
    flash.flash_backward(q, q, k, v, out, lse)
    assert sum(counted) == flash.flops(1, 4, 32, 48, 16, False, backward=True) * 7 / 5


def test_formulas_of_the_lesson():
    assert flash.plain_bytes(1000, 1000, 64, 2) == (4 * 1000 * 64 + 4 * 10**6) * 2
    assert flash.flash_bytes(1000, 1000, 64, 2) == 4 * 1000 * 64 * 2 + 4000
    assert flash.flops(1, 1, 1000, 1000, 64, False) == 4 * 64 * 10**6
    assert flash.flops(1, 1, 1000, 1000, 64, True, backward=True) == 5 * 64 * 10**6
    intensity = lambda seq, causal: (flash.flops(1, 1, seq, seq, 128, causal)
                                     / flash.flash_bytes(seq, seq, 128, 2))  # fmt: skip
    for causal, above in ((False, 600), (True, 1200)):  # the ridge point of the lesson
        assert f"{above:,} " in flash.__doc__ or f"{above:,} on" in flash.__doc__
        assert intensity(above - 20, causal) < 295 < intensity(above, causal)
        assert intensity(10**6, causal) == pytest.approx(10**6 / (4 if causal else 2), rel=0.01)
