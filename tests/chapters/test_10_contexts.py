"""Chapter 10: context parallelism of long sequences, against chapter 06 and counts by hand."""

import itertools
from dataclasses import replace

import pytest

import common
from lab.planner import contexts
from lab.planner.contexts import Cut
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import chapter


@pytest.fixture
def h100(ten):
    return ten.CLUSTERS["h100"]


# --------------------------------------------------------------------------------------- the bytes


def test_each_operator_sends_what_chapter_06_sends(ten):
    six, layers, batch, micro_batches = chapter("06_context_parallel"), 3, 2, 4
    for heads, kv_heads in [(8, 8), (8, 2), (8, 1), (12, 4)]:
        model = ten.llama(layers, 16 * heads, heads, kv_heads, 96, 64, 96)
        cfg = common.Config(layers, model.dim, heads, kv_heads, model.seq, 64)
        for ranks, e in itertools.product((1, 2, 3, 4, 8), (2, 4)):
            inners = contexts.inners(model, ranks)
            for inner, gathers in itertools.product(inners, (False, True)):
                cut = Cut(ranks, inner, gathers=gathers)
                names = ["gather"] if gathers else ["zigzag", "ring"]
                names += ["ulysses"] * (inner == ranks > 1)
                ours = sum(map(contexts.Counter, contexts.sent(model, model.seq, cut, e)),
                           contexts.Counter())
                ours = {op: size * layers * batch * micro_batches for op, size in ours.items()
                        if size}
                for name in names:
                    theirs = six.traffic(cfg, name, micro_batches, batch, ranks, e, inner=inner)
                    wire = {op: wire for op, (_, _, wire) in theirs.items()
                            if wire and op != "all_reduce"}
                    assert ours == pytest.approx(wire), (ranks, cut, name)
    assert contexts.inners(ten.MODELS["8b"], 64) == [1, 2, 4, 8, 16, 32]
    assert contexts.inners(replace(ten.MODELS["8b"], heads=12, kv_heads=4), 12) == [1, 2, 4, 12]


@pytest.mark.parametrize("gathers", [False, True])
def test_bytes_inside_and_between_are_those_of_each_message(ten, gathers):
    """Each message of each rank goes to a rank in its machine or to another machine."""
    model = replace(ten.MODELS["8b"], heads=48, kv_heads=4, dim=48 * 128)
    for ranks, inner, per_node in [(16, 1, 8), (16, 2, 8), (16, 16, 8), (32, 16, 8), (12, 4, 6)]:
        cut, seq = Cut(ranks, inner, gathers), 96 * ranks
        sizes = sum(map(contexts.Counter, contexts.sent(model, seq, cut)), contexts.Counter())
        exchange, around = sizes.pop("all_to_all", 0), sum(sizes.values())
        inside, between, cards = 0, 0, [0] * ranks
        for rank in range(ranks):
            group = range(rank // inner * inner, (rank // inner + 1) * inner)
            messages = [(peer, exchange / (inner - 1)) for peer in group if peer != rank]
            messages.append(((rank + inner) % ranks, around))
            for peer, size in messages:
                if peer // per_node == rank // per_node:
                    inside += size
                else:
                    between, cards[rank] = between + size, cards[rank] + size
        ours = contexts.inside_and_between(model, seq, cut, per_node)
        assert ours[:2] == pytest.approx((inside / ranks, between / ranks)), cut
        if not gathers:                                 # else NCCL's rings share all cards
            assert ours[2] == pytest.approx(max(cards)), cut


# ------------------------------------------------------------------------------------- the seconds


def test_a_row_by_hand(ten, h100):
    """8b, 131,072 tokens on 64 H100s: on two levels of 8, and around a ring."""
    tokens, width, wide = 2048, 1024, 4096              # kv width, and q's
    nvlink, network, rate = 450e9 * 0.595, 50e9 * 0.78, 989e12 * 0.55
    attention = 2 * 2**17 * tokens * wide / rate        # a causal half of 4·s·(s/N)·h
    model = ten.MODELS["8b"]
    alone, two = (contexts.layer(ten, model, 2**17, h100, Cut(64, inner)) for inner in (1, 8))

    assert alone.computing == two.computing and alone.exchange == 0
    to_each = tokens * (2 * wide + 2 * width) * 2 / 8
    assert two.exchange == pytest.approx(2 * (4 * 3.4e-6 + 7 * to_each / nvlink))
    hop = lambda e: 14e-6 + e * tokens * 2 * width / network
    assert two.around == pytest.approx(hop(4))          # all else hides
    assert (two.hop, two.block) == pytest.approx((hop(2 + 4), 2.5 * attention / 8))
    block = attention / 64
    forward = 63 * (hop(2) - block)                     # of 64 hops in backward, keys and values
    backward = (2 * (hop(2) - 2.5 * block) + 61 * (hop(6) - 2.5 * block)    # leave at the first 63,
                + hop(4) - 2.5 * block + hop(4))        # and gradients at all but the first two
    assert alone.around == pytest.approx(forward + backward)
    assert alone.seconds == pytest.approx(alone.computing + forward + backward)
    assert 1e3 * alone.seconds == pytest.approx(61.9, abs=0.05)
    assert 1e3 * two.seconds == pytest.approx(20.7, abs=0.05)
    hides = contexts.tokens_to_hide(model, rate, network)       # chapter 06's, for a zig-zag
    assert hides == pytest.approx(2 * width / wide * 2 / 2 * rate / network)
    assert hides == pytest.approx(8 * contexts.tokens_to_hide(model, rate, network, inner=8))


def test_gathered_keys_are_the_planners_own(ten, h100):
    model, machine = replace(ten.MODELS["8b"], seq=2**17), ten.Machine(h100, ten.Software())
    passes = ten.layer_seconds(model, ten.Layout(cp=64), machine)
    gathered = contexts.layer(ten, model, model.seq, h100, Cut(64, gathers=True))
    assert gathered.around == pytest.approx(sum(part["cp"] for part in passes))
    assert gathered.seconds == pytest.approx(sum(sum(part.values()) for part in passes))
