"""common.py's packed documents: which there are, what they see, and one GPU with each alone."""

import itertools

import pytest
import torch

import common
from common import gpt
from tests.test_common import arguments


def packed(seq=48, documents=None, seed=0, **more):
    """A text of chapter 06's flags, which are common's own where a run has none."""
    args = arguments("--seq", seq, "--seed", seed, *itertools.chain(*more.items()))
    args.documents = documents
    return common.Text(args)


def test_documents_are_a_function_of_seed_and_step():
    text = packed(documents=6)
    for step in range(3):
        assert text.starts(step).equal(packed(documents=6).starts(step))
        assert all(x.equal(y) for x, y in zip(text.batch(step)[:2],
                                              packed(documents=6).batch(step)[:2]))  # fmt: skip
    assert not text.starts(0).equal(text.starts(1))
    assert not text.starts(0).equal(packed(documents=6, seed=1).starts(0))


def test_without_documents_there_is_one():
    text = packed()
    tokens, targets, valid = text.batch(0)
    assert not text.starts(0).any() and valid == targets.numel()
    assert tokens[:, 1:].equal(targets[:, :-1])


@pytest.mark.parametrize("mean", [1, 2, 6, 48])
def test_lengths_have_the_mean_that_is_asked_for(mean):
    """Of many steps; the first document has two tokens, so that no batch is without a target."""
    found = [packed(documents=mean).starts(step) for step in range(400)]
    begins = torch.stack([starts == torch.arange(48) for starts in found]).double()
    assert begins[:, 0].all() and not begins[:, 1].any()
    assert begins[:, 2:].mean() == pytest.approx(1 / mean, rel=0.15)
    for step in range(20):
        assert packed(documents=mean).batch(step)[2] >= 1


def test_each_document_is_a_text_of_its_own():
    """Its tokens follow each other in the text, and its last one has no target."""
    text = packed(documents=6)
    (tokens, targets, valid), starts = text.batch(0), text.starts(0)
    whole = bytes(text.tokens)
    begins = [*starts.unique().tolist(), 48]
    for row, (begin, end) in itertools.product(range(len(tokens)), itertools.pairwise(begins)):
        document = bytes(tokens[row, begin:end].tolist())
        assert document in whole
        assert targets[row, begin : end - 1].tolist() == [*document[1:]]
        if end < 48:
            assert targets[row, end - 1] == -100
    assert valid == len(tokens) * (48 - (len(begins) - 2))


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("block", [False, True])
def test_each_document_alone_gives_the_same_gradients(attention, block):
    """The oracle: every document in a batch of its own, as a sequence of its length, which knows
    nothing of packing. Losses are summed over the same number of targets."""
    cfg = common.Config(2, 32, 4, 2, 48, 256, attention=attention, gated=block)
    for mean, step in ((1, 0), (5, 1), (20, 2)):
        text = packed(documents=mean)
        (tokens, targets, valid), starts = text.batch(step), text.starts(step)
        together, alone = (gpt(cfg, seed=3, dtype=torch.float64) for _ in range(2))
        together.block1.attn.rope.pack(starts)
        loss = common.loss_sum(together(tokens), targets) / valid
        loss.backward()
        total = 0
        for begin, end in itertools.pairwise([*starts.unique().tolist(), 48]):
            part = common.loss_sum(alone(tokens[:, begin:end]), targets[:, begin:end]) / valid
            part.backward()
            total += part.item()
        assert loss.item() == pytest.approx(total, rel=1e-13)
        largest = max(p.grad.abs().max().item() for p in alone.parameters())
        for p, q in zip(together.parameters(), alone.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14 * largest)


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_a_window_is_what_it_says(attention):
    """Beside scores that are masked by the definition; a window of all is none."""
    cfg = common.Config(1, 32, 4, 2, 12, 256, attention=attention)
    q, k, v = (torch.randn(2, heads, 12, 8, dtype=torch.float64) for heads in (4, 2, 2))
    rope, core = common.Rope(cfg), common.CORES[attention]
    starts = torch.tensor([0] * 5 + [5] * 7)
    for window in (1, 3, 12, None):
        rope.pack(starts, window)
        scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
        for query, key in itertools.product(range(12), repeat=2):
            if key > query or key < starts[query] or query - key >= (window or 12):
                scores[:, :, query, key] = -torch.inf
        expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
        torch.testing.assert_close(core(q, k, v, *rope.seen), expected)
        assert rope.positions.tolist() == [*range(5), *range(7)]  # they begin anew
    rope.pack(torch.zeros(12, dtype=torch.int64))
    torch.testing.assert_close(core(q, k, v, *rope.seen), core(q, k, v))
