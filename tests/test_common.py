"""common.py: configuration, model, loss, text, flags, documents and masters."""

import dataclasses
import functools
import itertools
import math
import os

import numpy as np
import pytest
import torch
from torch import nn

import common
from common import PRESETS, Config, Masters, gpt, loss_sum
from lab import rehearse
from lab.run.anatomy import tensors
from tests.conftest import arguments, no_flags

SHAPE = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # what SMALL says

# ------------------------------------------------------------------------------------------- model


def test_the_model_has_the_parameters_of_its_config():
    for cfg in SHAPE, Config(3, 48, 6, 1, 8, 100, tie=True), Config(1, 32, 4, 2, 8, 50, gated=True):
        model = gpt(cfg)
        sizes = [p.numel() for p in model.parameters()]
        assert sum(sizes) == cfg.parameters() and len(sizes) == tensors(cfg)
        assert cfg.mlp() == sum(p.numel() for p in model.block1.mlp.parameters())


def test_presets_have_their_published_sizes():
    published = {"tiny": 0.79e6, "tiny-llama": 0.80e6, "gpt2": 124e6, "1b": 1.01e9, "7b": 6.9e9,
                 "llama-1b": 1.236e9, "llama-8b": 8.03e9}  # fmt: skip
    sizes = {name: cfg.parameters() for name, cfg in PRESETS.items()
             if name not in rehearse.PRESETS}  # fmt: skip
    assert sizes == pytest.approx(published, rel=0.01)


def test_weights_depend_on_seed_and_name():
    """Each parameter has a generator of its own, whatever else there is."""
    model, deeper = gpt(SHAPE, seed=7), gpt(Config(5, 32, 4, 2, 16, 256), seed=7)
    in_deeper = dict(deeper.named_parameters())
    assert all(p.equal(in_deeper[name]) for name, p in model.named_parameters())
    expected = torch.empty(32, 32)
    key = common.zlib.crc32(b"7 block2.attn.o.weight")
    expected.normal_(0, 0.02, generator=torch.Generator().manual_seed(key))
    assert model.block2.attn.o.weight.equal(expected)
    assert model.head.norm.weight.equal(torch.ones(32)) and not model.head.norm.bias.any()


def test_rope_angles_survive_bfloat16():
    """At position 1001 a bfloat16 angle is off by radians; the rotation may be off by rounding."""
    x, rope = torch.randn(1, 1, 1, 64), common.Rope(SHAPE)
    rope.positions = torch.tensor([1001])
    torch.testing.assert_close(rope(x.bfloat16()).double(), rope(x.double()), atol=0.03, rtol=0.02)
    assert gpt(SHAPE).to(torch.bfloat16)[1].attn.rope.positions.dtype == torch.int64


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize(("gated", "base"), [(False, 10000.0), (True, 500000.0)])
def test_the_model_computes_what_its_lesson_says(gated, base, attention):
    """The whole forward once more, spelled out for one kv head per two heads, in float64."""
    cfg = dataclasses.replace(SHAPE, gated=gated, ffn=44, attention=attention)
    model = gpt(cfg, seed=5, dtype=torch.float64)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)  # norms of all ones hide mistakes
    tokens = torch.randint(256, (2, 16))

    def norm(x, layer):
        if gated:
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + 1e-5).sqrt()
        return x * layer.weight + layer.bias

    def turned(x):  # pairs (i, i + 4) as complex numbers, turned by position * base^(-i/4)
        speed = base ** (-torch.arange(4, dtype=torch.float64) / 4)
        angle = torch.outer(torch.arange(16.0), speed)
        turn = torch.polar(torch.ones(16, 4, dtype=torch.float64), angle)
        z = torch.complex(x[..., :4].contiguous(), x[..., 4:].contiguous()) * turn
        return torch.cat([z.real, z.imag], -1)

    x = model.embedding.weight[tokens]
    for block in model[1:-1]:
        y = norm(x, block.norm1)
        outputs = []
        for head in range(4):
            q = y @ block.attn.q.weight[8 * head : 8 * head + 8].T
            kv = slice(8 * (head // 2), 8 * (head // 2) + 8)
            k, v = y @ block.attn.k.weight[kv].T, y @ block.attn.v.weight[kv].T
            scores = turned(q) @ turned(k).transpose(1, 2) / math.sqrt(8)
            past = torch.ones(16, 16, dtype=bool).tril()
            outputs.append(scores.masked_fill(~past, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(outputs, -1) @ block.attn.o.weight.T
        y = norm(x, block.norm2)
        up = y @ block.mlp.up.weight.T
        if gated:
            gate = y @ block.mlp.gate.weight.T
            hidden = gate / (1 + (-gate).exp()) * up
        else:
            hidden = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        x = x + hidden @ block.mlp.down.weight.T
    logits = norm(x, model.head.norm) @ model.head.out.weight.T
    torch.testing.assert_close(model(tokens), logits)


def test_loss_is_a_sum_over_valid_targets_in_float32_or_better():
    logits, targets = torch.randn(2, 5, 7, dtype=torch.bfloat16), torch.randint(7, (2, 5))
    targets[0, :3] = -100
    log_p = logits.float().log_softmax(-1)
    places = [(i, j) for i in range(2) for j in range(5) if targets[i, j] >= 0]
    expected = -sum(log_p[i, j, targets[i, j]] for i, j in places)
    assert loss_sum(logits, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss_sum(logits, targets).dtype == torch.float32
    assert loss_sum(logits.double(), targets).dtype == torch.float64
    assert loss_sum(logits, torch.full((2, 5), -100)).item() == 0


# -------------------------------------------------------------------------------------------- text


def test_standard_library_is_sorted_without_tests_and_installed_packages(tmp_path, monkeypatch):
    """So it's the same on every machine and every rank."""
    root = tmp_path / "test/lib"  # only folders below the library's own count
    kept = [f"{folder}{i}.py" for i in (7, 3, 9, 1) for folder in ("z", "json/", "a")]
    left_out = ["test/x.py", "json/tests/x.py", "idlelib/idle_test/x.py", "__pycache__/x.py",
                "x.txt", "site-packages/x.py", "dist-packages/x.py"]  # fmt: skip
    for name in kept + left_out:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() + b"\xff")
    monkeypatch.setattr(os, "__file__", str(root / "os.py"))
    assert common.standard_library() == b"".join(name.encode() + b"\xff" for name in sorted(kept))


def test_a_batch_depends_on_seed_and_step():
    a, b = (common.Text(arguments("--ignore", 0.4)) for _ in range(2))
    for step in (5, 0):
        for x, y in zip(a.batch(step), b.batch(step)):
            assert torch.as_tensor(x).equal(torch.as_tensor(y))
    assert not a.batch(0)[0].equal(a.batch(1)[0])
    assert not a.batch(1)[0].equal(common.Text(arguments("--seed", 1)).batch(0)[0])


def test_ignore_marks_that_share_unevenly():
    for share in (0.05, 0.9):
        _, targets, valid = common.Text(arguments("--ignore", share, "--batch", 512)).batch(0)
        per_sequence = (targets != -100).sum(1)
        assert valid == per_sequence.sum()
        assert 1 - valid / targets.numel() == pytest.approx(share, abs=0.05)
        assert len(per_sequence.unique()) > 5
    assert common.Text(arguments("--ignore", 0.999999, "--batch", 1)).batch(0)[2] >= 1


def test_a_bin_file_is_mapped_and_holds_uint16_and_any_other_is_bytes(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "tokens.bin")
    (tmp_path / "text.md").write_bytes(bytes(range(256)))
    for name, size in ("tokens.bin", 300), ("text.md", 256):
        text = common.Text(arguments("--data", tmp_path / name))
        tokens, targets, _ = text.batch(0)
        assert isinstance(text.tokens, np.memmap) and len(text.tokens) == size
        assert (targets - tokens == 1).all()


# ------------------------------------------------------------------------------------------- flags


def test_flags_make_the_model_and_the_default_is_the_first_variant():

    def parse(*flags):
        return common.parse("a/01_x.py", "", {"a": None, "b": None}, no_flags, flags)

    assert parse().model == PRESETS["tiny"] and parse().variant == "a"
    gpt2 = Config(12, 768, 12, 12, 8, 50304, True, "sdpa")
    assert parse("--preset=gpt2", "--seq=8").model == gpt2
    assert parse("--preset=gpt2", "--attention=plain").model.attention == "plain"
    llama = dataclasses.replace(PRESETS["tiny"], gated=True, ffn=96)
    assert parse("--block=llama", "--ffn=96").model == llama
    assert (llama.hidden, PRESETS["tiny"].hidden) == (96, 512)
    with pytest.raises(SystemExit, match="2"):
        parse("--pre=gpt2")  # no abbreviations


# -------------------------------------------------------------------------------------- documents


def packed(seq=48, documents=None, seed=0):
    """A text of chapter 06's flags."""
    args = arguments("--seq", seq, "--seed", seed)
    args.documents = documents
    return common.Text(args)


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


# ---------------------------------------------------------------------------------------- masters


def masters_of(*values):
    """A parameter for each value, of one number, and the optimizer of their masters."""
    parameters = [nn.Parameter(torch.tensor([value])) for value in values]
    return parameters, Masters(
        parameters, functools.partial(torch.optim.SGD, lr=1.0), torch.bfloat16)


def test_small_updates_are_kept_by_masters_and_reach_the_parameters():
    """1 - 1/1024 isn't a bf16 number, and rounds to 1."""
    [p], optimizer = masters_of(1.0)
    for step in range(1, 9):
        p.grad = torch.full((1,), 1 / 1024)
        optimizer.step()
        assert p.master.item() == 1 - step / 1024
        assert p.item() == torch.tensor(1 - step / 1024).bfloat16().item()
    assert p.dtype == torch.bfloat16 and p.item() < 1


def test_gradients_of_micro_batches_add_up_in_float32():
    """In bf16, 256 + 1 is 256."""
    [p], optimizer = masters_of(1.0)
    for slope in (256.0, 1.0, 1.0):
        (slope * p).sum().backward()
    assert p.grad.dtype == torch.float32 and p.grad.item() == 258
    optimizer.zero_grad()
    assert p.grad is None


def test_a_parameter_without_a_gradient_stays_and_no_master_keeps_one():
    (used, unused), optimizer = masters_of(1.0, 2.0)
    used.grad = torch.ones(1)
    optimizer.step()
    assert (used.item(), unused.item()) == (0, 2)
    assert used.grad is not None and used.master.grad is None
