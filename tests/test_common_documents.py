"""common.py's packed documents: which there are, what they see, and one GPU with each alone."""

import itertools

import pytest
import torch

import common
from common import gpt
from tests.conftest import arguments


def packed(seq=48, documents=None, seed=0):
    """A text of chapter 06's flags."""
    args = arguments("--seq", seq, "--seed", seed)
    args.documents = documents
    return common.Text(args)


def test_documents_are_a_function_of_seed_and_step():
    text, again = packed(documents=6), packed(documents=6)
    for step in (1, 0):
        assert text.starts(step).equal(again.starts(step))
        assert all(x.equal(y) for x, y in zip(text.batch(step)[:2], again.batch(step)[:2]))
    assert not text.starts(0).equal(text.starts(1))
    assert not text.starts(0).equal(packed(documents=6, seed=1).starts(0))
    assert not packed().starts(0).any()  # without documents there is one


def test_lengths_have_the_mean_that_is_asked_for():
    """The first document has two tokens or more, so that no batch is without a target."""
    for mean in (1, 6):
        text = packed(documents=mean)
        begins = torch.stack([text.starts(step) == torch.arange(48) for step in range(400)])
        assert begins[:, 0].all() and not begins[:, 1].any()
        assert begins[:, 2:].double().mean() == pytest.approx(1 / mean, rel=0.15)
        assert text.batch(0)[2] >= 1


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


@pytest.mark.parametrize(("attention", "gated"), [("plain", False), ("sdpa", True)])
def test_each_document_alone_gives_the_same_gradients(attention, gated):
    """Every document in a batch of its own, as a sequence of its length, knows nothing of packing.
    Losses are summed over the same number of targets."""
    cfg = common.Config(2, 32, 4, 2, 48, 256, attention=attention, gated=gated)
    for mean, step in ((1, 0), (5, 1)):
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
    """Compared with scores that are masked by the definition."""
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
