"""Chapter 10: context parallelism of long sequences, held to chapter 06's traffic and to counts by
hand."""

import itertools
from dataclasses import replace

import pytest

import common
from lab.planner import contexts
from lab.planner.contexts import Cut
from tests.chapters.test_10_command_line import told
from tests.chapters.test_10_planner import ten  # noqa: F401  (a fixture)
from tests.conftest import chapter

SHAPES = [(8, 8), (8, 4), (8, 2), (8, 1), (12, 4)]      # heads, kv heads


@pytest.fixture
def h100(ten):
    return ten.CLUSTERS["h100"]


def cuts(model, ranks):
    for inner in contexts.inners(model, ranks):
        yield from (Cut(ranks, inner), Cut(ranks, inner, gathers=True))


# --------------------------------------------------------------------------------------- the bytes

@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_each_operator_sends_what_chapter_06_sends(ten, heads, kv_heads):
    six, layers, batch, micro_batches = chapter("06_context_parallel"), 3, 2, 4
    model = ten.llama(layers, 16 * heads, heads, kv_heads, 96, 64, 96)
    cfg = common.Config(layers, model.dim, heads, kv_heads, model.seq, 64)
    tried = 0
    for ranks, e in itertools.product((1, 2, 3, 4, 6, 8), (2, 4, 8)):
        for cut in cuts(model, ranks):
            names = ["gather"] if cut.gathers else ["zigzag", "ring"]
            names += ["ulysses"] * (cut.inner == ranks > 1)
            ours = sum(map(contexts.Counter, contexts.sent(model, model.seq, cut, e)),
                       contexts.Counter())
            for name in names:
                theirs = six.traffic(cfg, name, micro_batches, batch, ranks, e, inner=cut.inner)
                wire = {op: wire for op, (_, _, wire) in theirs.items() if op != "all_reduce"}
                assert {op: size * layers * batch * micro_batches
                        for op, size in ours.items() if size} == pytest.approx(
                    {op: size for op, size in wire.items() if size}), (ranks, cut, name)
                tried += 1
    assert tried > 50


def test_it_shares_heads_where_chapter_06_does(ten):
    assert contexts.inners(ten.MODELS["8b"], 64) == [1, 2, 4, 8, 16, 32]
    assert contexts.inners(ten.MODELS["70b"], 64) == [1, 2, 4, 8, 16, 32, 64]
    assert contexts.inners(replace(ten.MODELS["8b"], heads=12, kv_heads=4), 12) == [1, 2, 4, 12]


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(("ranks", "inner", "per_node"), [
    (16, 1, 8), (16, 2, 8), (16, 8, 8), (16, 16, 8), (32, 16, 8), (8, 4, 8), (12, 4, 6), (6, 3, 4)])
def test_bytes_inside_and_between_are_those_of_each_message(ten, ranks, inner, per_node, gathers):
    """Each message of each rank, to a rank that is in its machine or in another one."""
    model = replace(ten.MODELS["8b"], heads=48, kv_heads=4, dim=48 * 128)
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
    assert ours[:2] == pytest.approx((inside / ranks, between / ranks))
    if not gathers:                                     # else NCCL's rings share all cards
        assert ours[2] == pytest.approx(max(cards))


def test_u_rings_have_u_cards(ten):
    """63 hops through one card, or 7 through each of 8: for as many bytes out of a machine, 8/9."""
    model, hop = ten.MODELS["8b"], 2048 * 2048          # tokens of a rank, numbers of a token
    alone, two = (contexts.inside_and_between(model, 2**17, Cut(64, inner), 8) for inner in (1, 8))
    assert alone[2] == 63 * hop * (2 + 2 + 4) and two[1] == two[2] == 7 * hop * (2 + 2 + 4)
    assert 8 * two[1] / alone[2] == pytest.approx(8 / 9)
    gathered = contexts.inside_and_between(model, 2**17, Cut(64, gathers=True), 8)
    assert gathered[2] == 63 * hop * (2 + 2) / 8        # NCCL's rings have all cards
    assert two[0] == pytest.approx(2 * 7 / 8 * 2048 * (2 * 4096 + 2 * 1024) * 2)


def test_latents_are_a_head_that_each_rank_needs(ten):
    model = ten.MODELS["deepseek-v3"]
    assert list(contexts.bytes_of_token(model).values()) == [
        2 * 128 * (128 + 64 + 128), 2 * (128 * (128 + 128) + 64), 2 * (512 + 64)]
    assert contexts.bytes_of_token(ten.MODELS["70b"]) == {"keys and values": 2 * 2 * 8 * 128}
    assert contexts.flops_to_expand(model) == 2 * 512 * 128 * (128 + 128)
    assert model.projections[1] == (512, 128 * (128 + 128))     # as the planner counts at home
    keys = [contexts.keys_of_token(model, Cut(16, inner, latents=True)) for inner in (1, 8)]
    assert keys == [576, 8 * 576]


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


def test_gathered_keys_are_the_planners_own(ten, h100):
    model, machine = replace(ten.MODELS["8b"], seq=2**17), ten.Machine(h100, ten.Software())
    passes = ten.layer_seconds(model, ten.Layout(cp=64), machine)
    gathered = contexts.layer(ten, model, model.seq, h100, Cut(64, gathers=True))
    assert gathered.around == pytest.approx(sum(part["cp"] for part in passes))
    assert gathered.seconds == pytest.approx(sum(sum(part.values()) for part in passes))


@pytest.mark.parametrize("name", ["8b", "70b", "405b", "deepseek-v3"])
def test_one_is_the_ring_and_all_is_ulysses_and_the_best_is_no_worse(ten, h100, name):
    model = ten.MODELS[name].dense
    for ranks, seq in itertools.product((8, 16, 32, 128), (2**17, 2**20)):
        best = contexts.best(ten, model, seq, h100, ranks)
        every = {inner: contexts.layer(ten, model, seq, h100, Cut(ranks, inner))
                 for inner in contexts.inners(model, ranks)}
        assert best.seconds == min(way.seconds for way in every.values())
        assert every[1].exchange == 0 and every[1].around > 0
        forward, backward = contexts.sent(model, seq, Cut(ranks))
        assert backward["send"] == 3 * forward["send"]  # keys, values, and gradients of 4 bytes
        if ranks in every:
            assert every[ranks].around == 0 < every[ranks].exchange
            assert contexts.sent(model, seq, Cut(ranks, ranks))[0]["send"] == 0
        shown = contexts.ways(ten, model, seq, h100, ranks)
        assert min(way.seconds for way in shown) <= best.seconds


def test_a_hop_hides_from_so_many_tokens_on(ten, h100):
    """kv/h · e/2 · F/B of chapter 06's lesson, twice for a zig-zag; and from there on forward waits
    for no hop."""
    model, network, flops = ten.MODELS["8b"], 50e9 * ten.NIC, h100.peak * h100.attention
    tokens = contexts.tokens_to_hide(model, flops, network)
    assert tokens == pytest.approx(2 * 1024 / 4096 * 2 / 2 * flops / network)
    instant = replace(h100, alpha=0, nic_alpha=0)
    for inner, ranks in itertools.product((1, 2, 8), (16, 64)):
        least = contexts.tokens_to_hide(model, flops, network, inner)
        assert least == pytest.approx(tokens / inner)
        for share in (0.98, 1.02):
            seq, machine = round(share * least) * ranks, ten.Machine(instant, ten.Software())
            cut, sized = Cut(ranks, inner), replace(model, seq=seq)
            forward, _ = ten.layer_seconds(sized, ten.Layout(cp=ranks), machine)
            part = contexts.one_pass(machine, sized, seq, cut, "forward", forward,
                                     contexts.sent(model, seq, cut)[0])
            assert (part.around == 0) == (share > 1) or cut.parts == 1


def test_latents_cost_flops_in_place_of_bytes(ten, h100):
    model, machine = ten.MODELS["deepseek-v3"].dense, ten.Machine(h100, ten.Software())
    of = lambda **more: contexts.layer(ten, model, 2**17, h100, Cut(64, **more))
    expanded, latents, eight = of(), of(latents=True), of(inner=8, latents=True)
    assert latents.around < expanded.around / 1000
    # In forward, in backward, and two gradients: of the tokens of 63 other ranks.
    assert latents.expanding == pytest.approx(4 * 63 * machine.matmul(2048, 512, 32768))
    assert eight.expanding == pytest.approx(4 * 7 * machine.matmul(8 * 2048, 512, 32768 / 8))
    assert min(contexts.ways(ten, model, 2**17, h100, 64), key=lambda way: way.seconds) == eight


# ---------------------------------------------------------------------------------- what is printed

def test_a_verdict_is_of_its_numbers():
    ring = contexts.Layer(Cut(64), 1, hop=0.2, block=0.1, around=1.5)
    two = contexts.Layer(Cut(64, 8), 1, exchange=0.05, hop=0.2, block=0.8, around=0.01)
    gather = contexts.Layer(Cut(64, gathers=True), 1, around=0.3)
    near = contexts.Layer(Cut(64, 4), 1, exchange=0.06, hop=0.2, block=0.4, around=0.01)
    assert contexts.verdict([ring, two, near, gather]) == (
        "Fastest: two levels, U = 8 (exchanges take 50 ms, 7 hops of 200 ms hide behind blocks of "
        "800 ms); two levels, U = 4: as fast; gathered keys: 23% longer (keys and values come in "
        "300 ms); ring: 2.4 times as long (63 hops of 200 ms outlast blocks of 100 ms).")


def test_the_tables(ten):
    status, said, errors = told(ten, ["--contexts"])
    assert (status, errors) == (0, "")
    lines = said.splitlines()
    assert max(map(len, lines)) <= 100
    assert "8b: 131,072 tokens on 64 GPUs, 2,048 on each; computing takes 20.0 ms" in lines
    assert lines.count("  Ulysses                   32 heads are not shared by 64 ranks") == 2
    begin = next(i for i, line in enumerate(lines) if "131,072 tokens on 64" in line)
    assert lines[begin + 2].split() == "ring 1,850 264 2,114 41.9 61.9".split()
    assert lines[begin + 3].split() == "two levels, U = 8 73 235 235 0.7 20.7".split()


def test_they_are_of_the_cluster_that_is_asked_for(ten):
    status, said, errors = told(ten, ["--contexts", "--nic=1e12", "--per-node=3", "--alpha=1"])
    assert (status, errors) == (0, "") and said != told(ten, ["--contexts"])[1]
    status, said, line = told(ten, ["--contexts", "--nic=x"])
    assert status == 2 and not said and line.startswith("error: --nic") and line.count("\n") == 1
