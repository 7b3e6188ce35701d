"""common.py: configuration, text, model, shards, norms, flags, the bare run, and how it leaves."""

import dataclasses
import math
import os
import re
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

import common
from common import PRESETS, Config, gpt, loss_sum
from lab.bench.anatomy import matrices_of_blocks, optimizer_state_bytes, tensors
from lab.bench.verify import named_parameters
from lab.cli import strict
from tests.conftest import (
    arguments,
    no_flags,
)

SHAPE = Config(layers=2, dim=32, heads=4, kv_heads=2, seq=16, vocab=256)  # what SMALL says

# ------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("cfg", [*PRESETS.values(), SHAPE, Config(3, 48, 6, 1, 8, 100, tie=True)])
def test_numbers_of_parameters_and_tensors(cfg):
    with torch.device("meta"):  # the large ones have no place here
        blocks = nn.ModuleList([common.Block(cfg) for _ in range(cfg.layers)])
    matrix, last = cfg.vocab * cfg.dim, [p.numel() for p in blocks[0].norm1.parameters()]
    tables = [matrix] if cfg.tie else [matrix, matrix]
    sizes = [*last, *(p.numel() for p in blocks.parameters())]
    assert cfg.parameters() == sum(sizes) + sum(tables)
    assert tensors(cfg) == len(sizes) + len(tables)
    assert cfg.mlp() == sum(p.numel() for p in blocks[0].mlp.parameters())


@pytest.mark.parametrize("tie", [False, True])
def test_the_model_has_the_parameters_of_its_config(tie):
    cfg = dataclasses.replace(SHAPE, tie=tie)
    sizes = [p.numel() for p in gpt(cfg).parameters()]
    assert sum(sizes) == cfg.parameters() and len(sizes) == tensors(cfg)


def test_presets_have_their_published_sizes():
    published = {"tiny": 0.79e6, "tiny-llama": 0.80e6, "gpt2": 124e6, "1b": 1.01e9, "7b": 6.9e9,
                 "llama-1b": 1.236e9, "llama-8b": 8.03e9}  # fmt: skip
    assert {n: cfg.parameters() for n, cfg in PRESETS.items()} == pytest.approx(published, rel=0.01)
    of_pythia = {"1b": (1011781632, 805736448), "7b": (6857302016, 6444163072)}
    for name, (total, without_embedding) in of_pythia.items():  # and head: the padded vocabulary
        cfg = PRESETS[name]
        assert 2 * cfg.vocab * cfg.dim == total - without_embedding, name


def test_parameters_keep_their_global_names_wherever_they_go():
    model = gpt(SHAPE)
    assert [name for name, _ in model.named_children()] == ["embedding", "block1", "block2", "head"]
    names = [name for name, _ in model.named_parameters()]
    wrapped = nn.Sequential(nn.Sequential(*model), nn.Linear(2, 2))  # new names, and new parameters
    assert [name for name, _ in named_parameters(wrapped)] == [*names, "1.weight", "1.bias"]
    stage = [name for name, _ in named_parameters(model[1:3])]
    assert stage == [name for name in names if name.startswith("block")]


def test_weights_depend_on_seed_and_name_alone():
    a, b, other = gpt(SHAPE, seed=1), gpt(SHAPE, seed=1), gpt(SHAPE, seed=2)
    deeper = dict(gpt(Config(5, 32, 4, 2, 16, 256), seed=1).named_parameters())
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), other.parameters()):
        assert p.equal(q) and p.equal(deeper[name])
        assert p.ndim == 1 or not p.equal(r)
    matrices = [p for p in a.parameters() if p.ndim > 1]
    assert len({p.flatten()[:4].sum().item() for p in matrices}) == len(matrices)
    assert torch.cat([p.flatten() for p in matrices]).std().item() == pytest.approx(0.02, rel=0.02)


def test_each_parameter_has_a_generator_of_its_own():
    expected = torch.empty(32, 32)
    key = common.zlib.crc32(b"7 block2.attn.o.weight")
    expected.normal_(0, 0.02, generator=torch.Generator().manual_seed(key))
    model = gpt(SHAPE, seed=7)
    assert model.block2.attn.o.weight.equal(expected)
    assert model.head.norm.weight.equal(torch.ones(32)) and not model.head.norm.bias.any()


def test_tied_model_shares_one_matrix():
    model = gpt(Config(1, 32, 4, 4, 16, 256, tie=True), dtype=torch.float64)
    assert model.head.out.weight is model.embedding.weight


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_plain_attention_is_causal_grouped_attention(kv_heads):
    q, (k, v) = torch.randn(2, 4, 9, 8), torch.randn(2, 2, kv_heads, 9, 8)
    repeat = 4 // kv_heads
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(repeat, 1)) / math.sqrt(8)
    scores = scores.masked_fill(~torch.ones(9, 9, dtype=bool).tril(), -math.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(repeat, 1)
    torch.testing.assert_close(common.plain_attention(q, k, v), expected)
    torch.testing.assert_close(common.CORES["sdpa"](q, k, v), expected)


def test_a_cut_block_has_the_heads_that_its_projections_have():
    """Two halves of the heads, each in a block of its own, sum up to the whole."""
    attn, x = gpt(SHAPE)[1].attn, torch.randn(2, 16, 32)
    whole, total = attn(x), 0
    for half in range(2):
        part = gpt(SHAPE)[1].attn
        for name in ("q", "k", "v"):
            weight = getattr(attn, name).weight
            getattr(part, name).weight = nn.Parameter(weight.chunk(2)[half])
        part.o.weight = nn.Parameter(attn.o.weight.chunk(2, dim=1)[half])
        total = total + part(x)
    torch.testing.assert_close(total, whole)


def test_projections_are_a_seam():
    """What replaces `project` computes all that reads the input, as a fused gather would."""
    block, x = gpt(SHAPE)[1], torch.randn(2, 16, 32)
    expected = block(x)
    attn, mlp = block.attn, block.mlp
    attn.project = lambda x: [x @ linear.weight.T for linear in (attn.q, attn.k, attn.v)]
    mlp.project = lambda x: [x @ mlp.up.weight.T]
    for linear in (attn.q, attn.k, attn.v, mlp.up):
        linear.forward = None
    torch.testing.assert_close(block(x), expected)


def tables_made(model, tokens):
    made, cos = [], torch.Tensor.cos
    with mock.patch.object(torch.Tensor, "cos", lambda angle: made.append(1) or cos(angle)):
        model(tokens)
    return len(made)


def test_all_blocks_share_ropes_tables():
    """They are made once, and again only for other positions or another precision."""
    model, tokens = gpt(dataclasses.replace(SHAPE, layers=3)), torch.randint(256, (1, 16))
    rope = model.block1.attn.rope
    assert tables_made(model, tokens) == 1
    assert tables_made(model, tokens) == tables_made(model, tokens[:, :7]) == 0
    rope.positions = rope.positions + 1
    assert tables_made(model, tokens) == 1
    assert tables_made(model.double(), tokens) == 1 and rope.cos.dtype == torch.float64


@pytest.mark.parametrize("preset", common.PRESETS)
def test_the_core_is_the_flags_or_else_the_presets(preset):
    parse = lambda *flags: arguments(f"--preset={preset}", "--vocab=256", *flags)
    default = parse()
    assert default.attention == ("plain" if preset.startswith("tiny") else "sdpa")
    for args in (default, parse("--attention=plain"), parse("--attention=sdpa")):
        [core] = {block.attn.core for block in gpt(args.model)[1:-1]}
        assert core is common.CORES[args.attention]


def turned(x, position):
    """x (1, 1, 1, head_dim) as a token at this position turns it."""
    rope = common.Rope(SHAPE)
    rope.positions = torch.tensor([position])
    return rope(x)


def test_rope_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(i, j):
        return (turned(q, i) * turned(k, j)).sum().item()

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-10)
    assert score(7, 3) != pytest.approx(score(7, 4), rel=1e-3)


def test_rope_angles_survive_bfloat16():
    """At position 1001 a bfloat16 angle is off by radians; the rotation may be off by rounding."""
    x = torch.randn(1, 1, 1, 64)
    exact = turned(x.double(), 1001)
    assert gpt(SHAPE).to(torch.bfloat16)[1].attn.rope.positions.dtype == torch.int64
    rounded = turned(x.bfloat16(), 1001).double()
    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0.02)


def test_shorter_and_moved_positions():
    model = gpt(SHAPE, dtype=torch.float64)
    tokens = torch.randint(256, (1, 16))
    whole = model(tokens)
    torch.testing.assert_close(model(tokens[:, :5]), whole[:, :5])
    rope = model.block1.attn.rope  # of all blocks
    rope.positions = rope.positions + 1000
    torch.testing.assert_close(model(tokens), whole)  # RoPE is relative
    rope.positions = rope.positions * 2
    assert not torch.allclose(model(tokens), whole)


@pytest.mark.parametrize(("block", "base"), [("gpt", 10000.0), ("llama", 500000.0)])
def test_the_model_computes_what_its_lesson_says(block, base):
    """The whole forward once more, spelled out for one kv head per two heads, in float64."""
    is_gpt = block == "gpt"
    model = gpt(dataclasses.replace(SHAPE, gated=not is_gpt, ffn=44), seed=5, dtype=torch.float64)
    for p in model.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=p.dtype)  # norms of all ones hide mistakes
    tokens = torch.randint(256, (2, 16))

    def norm(x, layer):
        if not is_gpt:
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
        if is_gpt:
            hidden = up * (1 + torch.erf(up / math.sqrt(2))) / 2
        else:
            gate = y @ block.mlp.gate.weight.T
            hidden = gate / (1 + (-gate).exp()) * up
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


@pytest.mark.parametrize("name", common.OPTIMIZERS)
def test_optimizer_states_are_as_large_as_their_formula_says(name):
    model = gpt(SHAPE, dtype=torch.float64)
    optimizer = common.OPTIMIZERS[name](model.parameters(), None)
    model(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
    optimizer.step()
    states = [x for state in optimizer.state.values() for x in state.values() if x is not None]
    expected = optimizer_state_bytes(name, SHAPE.parameters(), tensors(SHAPE), 8,
                                     matrices_of_blocks(SHAPE))
    assert sum(x.nbytes for x in states) == expected


# -------------------------------------------------------------------------------------------- text


def test_the_default_text_is_the_standard_library_on_every_machine(ranks):
    args = arguments("--batch=3")
    args.data = None
    text = common.Text(args)
    library = text.tokens.tobytes()
    assert len(library) > 5e6 and b"def " in library
    assert ranks(1)(checksum) == [common.zlib.crc32(library)]
    tokens, targets, valid = text.batch(0)
    assert tokens.shape == targets.shape == (3, 16) and tokens.dtype == targets.dtype == torch.int64
    assert tokens[:, 1:].equal(targets[:, :-1])  # a target is the next token
    assert bytes(tokens[0].tolist()) in library
    assert valid == 48 and type(valid) is int


def checksum():
    return common.zlib.crc32(common.standard_library())


def test_standard_library_is_sorted_without_tests_and_installed_packages(tmp_path, monkeypatch):
    root = tmp_path / "test/lib"  # only folders below the library's own count
    kept = [f"{folder}{i}.py" for i in (7, 3, 9, 1, 5, 8, 2) for folder in ("z", "json/", "a")]
    left_out = ["test/x.py", "json/tests/x.py", "idlelib/idle_test/x.py", "__pycache__/x.py"]
    left_out += ["x.txt", "site-packages/x.py", "dist-packages/x.py"]
    for name in kept + left_out:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode() + b"\xff")
    monkeypatch.setattr(os, "__file__", str(root / "os.py"))
    assert common.standard_library() == b"".join(name.encode() + b"\xff" for name in sorted(kept))


def test_a_batch_depends_on_seed_and_step_alone():
    a, b = (common.Text(arguments("--ignore", 0.4)) for _ in range(2))
    for step in (5, 0):
        for x, y in zip(a.batch(step), b.batch(step)):
            assert torch.as_tensor(x).equal(torch.as_tensor(y))
    assert not a.batch(0)[0].equal(a.batch(1)[0])
    assert not a.batch(1)[0].equal(common.Text(arguments("--seed", 1)).batch(0)[0])


@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9])
def test_ignore_marks_that_share_unevenly(share):
    _, targets, valid = common.Text(arguments("--ignore", share, "--batch", 512)).batch(0)
    per_sequence = (targets != -100).sum(1)
    assert valid == per_sequence.sum() == (targets != -100).sum()
    assert 1 - valid / targets.numel() == pytest.approx(share, abs=0.05)
    assert len(per_sequence.unique()) > 5
    assert common.Text(arguments("--ignore", 0.999999, "--batch", 1)).batch(0)[2] >= 1


def test_bin_file_is_mapped_and_holds_uint16(tmp_path):
    np.arange(300, dtype="<u2").tofile(tmp_path / "tokens.bin")
    text = common.Text(arguments("--data", tmp_path / "tokens.bin"))
    tokens, targets, _ = text.batch(0)
    assert isinstance(text.tokens, np.memmap) and len(text.tokens) == 300
    assert (targets - tokens == 1).all() and tokens.max() > 255


def test_any_file_is_read_as_bytes(tmp_path):
    (tmp_path / "text.md").write_bytes(bytes(range(256)))
    text = common.Text(arguments("--data", tmp_path / "text.md"))
    assert len(text.tokens) == 256 and (text.batch(0)[1] - text.batch(0)[0] == 1).all()


# ------------------------------------------------------------------------------------------- flags


def test_flags_make_the_model_and_the_default_is_the_first_variant():
    args = arguments("--kv-heads=4", "--variant=test")
    assert args.model == Config(2, 32, 4, 4, 16, 256)
    variants = {"a": None, "b": None}
    parse = lambda *flags: common.parse("a/01_x.py", "", variants, no_flags, flags)
    assert parse().model == PRESETS["tiny"] and parse().variant == "a"
    gpt2 = Config(12, 768, 12, 12, 8, 50304, True, "sdpa")
    assert parse("--preset=gpt2", "--seq=8").model == gpt2
    llama = dataclasses.replace(PRESETS["tiny"], gated=True, ffn=96)
    assert parse("--block=llama", "--ffn=96").model == llama
    assert (llama.hidden, PRESETS["tiny"].hidden) == (96, 512)


def test_only_the_tiny_presets_are_verified_by_default():
    for flags, verified in (((), True), (("--no-verify",), False), (("--preset=1b",), False),
                            (("--preset=tiny-llama",), True),
                            (("--preset=1b", "--verify"), True)):
        assert arguments(*flags, parse=strict.parse).verify is verified


def test_a_chapter_adds_flags_of_its_own():
    add = lambda parser: parser.add_argument("--stage", type=int, default=3)
    parse = lambda *flags: common.parse("03.py", "", {"a": None}, add, flags)
    assert parse().stage == 3 and parse("--stage=1").stage == 1
    with pytest.raises(SystemExit, match="2"):
        parse("--sta=1")


def test_a_batch_that_cannot_be_shared_is_refused():
    args = arguments("--batch=12", shares=2)
    assert (args.shares, args.micro_batch) == (2, 6)
    assert arguments("--batch=12", "--micro-batch=3", shares=2).micro_batch == 3
    for flags, line in (
        (("--batch=12", "--micro-batch=5"), "12 is not a multiple of 2 data.* = 10; --batch 20"),
        (("--batch=11",), "11 is not a multiple of 2 data.* = 2; --batch 12"),
    ):
        with pytest.raises(common.Refused) as refused:
            arguments(*flags, shares=2)
        assert re.fullmatch(f"--batch {line}", "; ".join(refused.value.args))
