"""Rooflines: closed forms are where the two lines cross, and the two lines are the planner's."""

import math
from functools import partial

import pytest

from lab.planner import rooflines
from tests.conftest import chapter

PEAK, LINK = 459e12, 180e9              # of a TPU v5p, along one axis of its torus
TORUS = 2 * LINK, LINK                  # two axes for ZeRO-3, one for tp


@pytest.fixture(scope="module")
def ten():
    return chapter("10_planner")


def test_messages_over_compute_are_the_playbooks(ten):
    """A3, with 2 bytes a number: one layer's messages and matmuls, by the planner itself."""
    model, n, tokens = ten.Model(1, 64, 4, 4, 256, True, seq=32, vocab=1), 4, 32
    cluster = ten.Cluster(1e12, 1, 1, 1e30, 1, nvlink=1e9 / ten.NVLINK, nic=1, alpha=0)
    machine, weights = ten.Machine(cluster, ten.Software()), 16 * 64**2
    ratios = rooflines.sending_over_computing(tokens, n, 64, 1, 1e12, 1e9)
    forward = 2 * tokens * weights / 1e12
    assert model.weights(1) == weights
    assert ratios["zero-3"] == pytest.approx(machine.ring(2 * weights, n, 1) / forward)
    assert ratios["dp"] == pytest.approx(2 * machine.ring(2 * weights, n, 1) / (2 * forward))
    assert ratios["tp"] == pytest.approx(machine.ring(2 * tokens * 64, n, 1)
                                         / machine.matmul(tokens, 64, 64 / n))
    assert ratios["pp"] == pytest.approx(2 * tokens * 64 / 1e9 / forward)
    # As A3 has them, where a number of all but dp's is one byte.
    share, rate = (n - 1) / n, 1e12 / 1e9
    theirs = {"zero-3": share / (2 * tokens), "tp": (n - 1) / (2 * 64), "pp": 1 / (32 * 64)}
    for axis, ratio in theirs.items():
        assert ratios[axis] == pytest.approx(2 * ratio * rate), axis


def test_rooflines_are_those_of_chapters_02_and_04():
    flops, bandwidth = 989e12, 450e9
    tokens = chapter("02_data_parallel").tokens_to_hide(2, 10**9, flops, bandwidth)
    assert rooflines.tokens_of_data_parallel(flops, bandwidth) == pytest.approx(tokens)
    ranks = chapter("04_tensor_parallel").ranks_that_pay(4096, 2, flops, bandwidth)
    most = rooflines.largest_tensor_parallel(4 * 4096, flops, bandwidth)
    assert most == pytest.approx(ranks - 1)


def sent_over_computed(strategy, layer, tokens, dp, tp, mesh=TORUS, of_pass=0):
    """Of forward, or of backward."""
    links = {"dp": mesh[0], "zero-3": mesh[0], "tp": mesh[1]}[strategy]
    sent = rooflines.bytes_sent(strategy, layer, tokens, dp, tp)[of_pass] / links
    return sent / (rooflines.flops(layer, tokens, dp, tp)[of_pass] / PEAK)


def test_the_lines_cross_where_the_closed_forms_say():
    layer = rooflines.mlp(8192, 28672)
    least = rooflines.tokens_of_data_parallel(PEAK, 3 * LINK)
    assert least == 850
    for strategy, of_pass in (("zero-3", 0), ("zero-3", 1), ("dp", 1)):
        ratio = sent_over_computed(strategy, layer, 64 * least, 64, 1, (3 * LINK, 0), of_pass)
        assert ratio == pytest.approx(1)
    widest = rooflines.largest_tensor_parallel(28672, PEAK, 2 * LINK)
    for tokens in (1e3, 1e6):                           # whatever the batch
        ratio = sent_over_computed("tp", layer, tokens, 1, widest, (0, 2 * LINK))
        assert ratio == pytest.approx(1)
    assert sent_over_computed("tp", layer, 1e3, 1, widest, TORUS, 1) == pytest.approx(1)
    alone = [rooflines.bytes_sent(strategy, layer, 1e3, 4, 2) for strategy in ("zero-3", "tp")]
    assert rooflines.bytes_sent("both", layer, 1e3, 4, 2) == tuple(map(sum, zip(*alone)))


@pytest.mark.parametrize("axes", [(2, 1), (1, 2), (1, 1)])
def test_both_are_best_where_they_send_equally_long(axes):
    """Of all splits, whole numbers or not, none sends shorter than the formula's."""
    layer, chips, ffn, links = rooflines.mlp(4096, 16384), 4096, 16384, [n * LINK for n in axes]
    least = rooflines.tokens_of_both(ffn, PEAK, LINK, axes)

    def times(dp, tokens=chips * least):
        return rooflines.seconds(layer, tokens, dp, chips / dp, PEAK, links)

    best = rooflines.best_data_parallel(chips * least, chips, ffn, axes)
    at = times(best)
    assert at["zero-3"] == pytest.approx(at["tp"]) and at["tp"] == pytest.approx(at["compute"])
    for dp in [2**(k / 8) for k in range(97)]:
        assert rooflines.messages(times(dp)) >= (1 - 1e-9) * rooflines.messages(at)
    dp, tp = rooflines.fastest_split(lambda dp, tp: times(dp), chips)
    assert dp * tp == chips and abs(math.log2(dp / best)) <= 0.5


def test_between_pods_a_pod_needs_what_a_chip_needs_within():
    layer, chips, pod = rooflines.mlp(8192, 30000), 4 * 8960, 8960
    tokens = rooflines.tokens_of_data_parallel(PEAK, 6.25e9)        # of a pod
    compute, sent = rooflines.across_pods(layer, chips / pod * tokens, chips, pod, PEAK, 6.25e9)
    assert tokens == pytest.approx(73_440) and compute == pytest.approx(sent)


def test_a_roof_is_the_planner_without_latency_and_memory(ten):
    """On the cluster that its data sheets describe, but for (n-1)/n and attention's scores."""
    model, tokens, dp, tp = ten.MODELS["70b"], 2**20, 64, 8
    for name, axes in (("h100", (1, 1)), ("tpu-v5p", (2, 3))):
        sheet = rooflines.by_data_sheet(ten, ten.CLUSTERS[name])
        machine = ten.Machine(sheet, ten.SOFTWARE["megatron-2024"])
        layout = ten.Layout(dp, tp, micro_batch=tokens / dp / model.seq, zero=3)
        forward, backward = ten.layer_seconds(model, layout, machine)
        above = rooflines.Roof(ten, model, ten.CLUSTERS[name], axes).seconds(tokens, dp, tp)
        below = rooflines.Roof(ten, model, sheet, axes).planned(tokens, dp, tp)
        assert forward["matmul"] == pytest.approx(above["compute"])
        assert backward["matmul"] == pytest.approx(2 * above["compute"])
        assert below["compute"] == pytest.approx(forward["matmul"] + forward["attention"])
        assert below["tp"] == pytest.approx((tp - 1) / tp * above["tp"])
        assert below["zero-3"] == pytest.approx((dp - 1) / dp * above["zero-3"])


@pytest.mark.parametrize(("name", "axes"), [("tpu-v5p", (2, 1)), ("h100", (1, 1)),
                                            ("a100", (1, 1))])
def test_nothing_that_is_planned_is_above_its_roof(ten, name, axes):
    roof = rooflines.Roof(ten, ten.MODELS["70b"], ten.CLUSTERS[name], axes)
    for tokens in (2**18, 2**22):
        for split in rooflines.splits(64):
            planned, at_most = roof.planned(tokens, *split), roof.seconds(tokens, *split)
            assert planned["compute"] > at_most["compute"]
            for axis, n in zip(("zero-3", "tp"), split):
                assert planned[axis] >= (n - 1) / n * at_most[axis]
    assert roof.planned(2**20, 1, 128) is None          # 64 heads


@pytest.mark.parametrize(("name", "chips", "axes"), [
    ("tpu-v5p", 4096, (2, 1)), ("tpu-v5p", 64, (1, 1)), ("h100", 512, (1, 1)), ("h100", 8, (1, 1)),
    ("h100", 4, (1, 1)), ("gb200", 72, (1, 1)), ("a100", 48, (1, 1))])
def test_from_the_least_tokens_on_compute_is_longer(ten, name, chips, axes):
    roof = rooflines.Roof(ten, ten.MODELS["8b"], ten.CLUSTERS[name], axes)

    def times_of(tokens, dp, tp):
        return roof.seconds(tokens * chips, dp, tp)

    for dp, tp in rooflines.splits(chips):
        least = roof.least_tokens(dp, tp)
        found = rooflines.crossing(partial(times_of, dp=dp, tp=tp))
        assert found == pytest.approx(least if least > 1 else 0, rel=1e-5)
        for tokens in (1, 30, 0.999 * least, 1.001 * least, 1e6):
            if 0 < tokens < math.inf:
                times = times_of(tokens, dp, tp)
                is_longer = times["compute"] >= rooflines.messages(times)
                assert is_longer == (tokens > least), (dp, tp, tokens)
    least, split = roof.best("both", chips)
    assert least == min(roof.least_tokens(*one) for one in rooflines.splits(chips))
    for tokens in (0.999 * least * chips, 1.001 * least * chips) if least else ():
        times = roof.seconds(tokens, *roof.split("both", chips, tokens))
        assert (times["compute"] > rooflines.messages(times)) == (tokens > least * chips)


def test_tp_lowers_the_least_batch_on_a_torus_and_not_across_nodes(ten):
    """On a torus ZeRO-3's messages become tp times shorter on links that stay as fast. A node's
    cards are shared by its tp ranks' rings: what is shorter goes through fewer cards."""
    model = ten.MODELS["70b"]
    torus = rooflines.Roof(ten, model, ten.CLUSTERS["tpu-v5p"], (2, 1))
    assert torus.best("zero-3", 4096)[0] == pytest.approx(1275)
    assert torus.best("both", 4096) == (pytest.approx(1275 / 8), (512, 8))
    nodes = rooflines.Roof(ten, model, ten.CLUSTERS["h100"])
    alone, _ = nodes.best("zero-3", 512)
    assert alone == pytest.approx(989e12 / (8 * 50e9))
    assert nodes.best("both", 512)[0] == pytest.approx(alone)


@pytest.mark.parametrize(("name", "axes", "strategy", "chips", "words"), [
    ("tpu-v5p", (2, 1), "both", 4096, "159 tokens of a chip on, 652,800 of a step, with ZeRO-3 "
     "over 512 and tp over 8"),
    ("tpu-v5p", (3, 1), "zero-3", 4096, "from 850 tokens of a chip on, 3,481,600 of a step"),
    ("h100", (1, 1), "both", 512, "1,265,920 of a step, with ZeRO-3 alone: tp would not change "
     "that"),
    ("h100", (1, 1), "both", 8, "longer than messages at every batch, with tp alone"),
    ("h100", (1, 1), "tp", 8, "compute takes longer than messages at every batch: up to 11.9 ranks "
     "hide them"),
    ("h100", (1, 1), "tp", 16, "messages take longer than compute at every batch: up to 10.6 ranks "
     "hide them")])
def test_a_roof_in_words(ten, name, axes, strategy, chips, words):
    roof = rooflines.Roof(ten, ten.MODELS["70b"], ten.CLUSTERS[name], axes)
    assert rooflines.in_words(roof, strategy, chips).endswith(words)
