"""Chapter 10: the time of a step, and the search."""

import itertools
import math
import time
from dataclasses import asdict, replace

import pytest

from lab.planner import planning, published
from tests.chapters.test_10_planner import ten  # noqa: F401  (fixtures)
from tests.conftest import chapter

# ---------------------------------------------------------------------------------------- the time


def test_a_ring_leaves_a_node_through_the_cards_of_its_members(ten):
    cluster = ten.Cluster(1e12, 1, 1, 1e12, 1e9, nvlink=8e9 / ten.NVLINK, nic=1e9 / ten.NIC,
                          alpha=0, nic_alpha=0)
    machine = ten.Machine(cluster, ten.Software())
    assert machine.links(8, 1) == pytest.approx(8e9)            # all in a node
    assert machine.links(2, 4) == pytest.approx(8e9)
    assert machine.links(4, 8) == pytest.approx(1e9)            # one in each node
    assert machine.links(8, 2) == pytest.approx(4e9)            # four in each
    assert machine.links(16, 1) == pytest.approx(8e9)           # eight cards, NVLink's at most
    one_card = ten.Machine(cluster, ten.Software(one_card=True))
    assert one_card.links(16, 1) == pytest.approx(1e9)
    assert machine.links(12, 1) == pytest.approx(4e9)           # the last node has four
    assert machine.links(9, 1) == machine.links(5, 2) == pytest.approx(1e9)
    assert machine.ring(12e9, 4, 8) == pytest.approx(9)         # 3/4 of 12 GB at 1 GB/s
    assert machine.ring(12e9, 1, 1) == 0


def test_each_cause_is_there_when_its_axis_is(ten):
    model, h100 = ten.MODELS["8b"], ten.CLUSTERS["h100"]
    software = replace(ten.SOFTWARE["ours"], dp_hidden=0)
    seconds = lambda **layout: ten.step_seconds(model, ten.Layout(**layout), h100, software, 64)
    alone = seconds()
    assert not any(alone.get(cause, 0) for cause in ("tp", "cp", "ep", "pp", "bubble", "dp"))
    assert seconds(tp=2)["tp"] > 0 and seconds(cp=2)["cp"] > 0 and seconds(dp=2)["dp"] > 0
    assert seconds(pp=2)["pp"] > 0 and seconds(pp=2)["bubble"] > 0
    assert seconds(tp=2)["matmul"] > alone["matmul"] / 2        # thinner slices
    assert seconds(zero=3, dp=8)["dp"] > seconds(zero=1, dp=8)["dp"]    # in every micro-batch
    assert seconds(recompute="full")["matmul"] == pytest.approx(
        alone["matmul"] + 64 * model.layers * ten.layer_seconds(
            model, ten.Layout(), ten.Machine(h100, software))[0]["matmul"])


def test_zero_2_and_3_send_in_every_micro_batch(ten):
    """Bytes of a parameter: gradients (4), weights (2), each (n-1)/n times over the link."""
    model, n, m = ten.gpt(4, 64, 4, seq=32, vocab=256), 4, 8
    cluster = ten.Cluster(1e15, 1, 1, 1e15, 1e9, nvlink=1e9 / ten.NVLINK, nic=1e9, alpha=0)
    software, of_numbers = ten.Software(dp_hidden=0), (n - 1) / n * model.parameters() / 1e9
    seconds = lambda zero, **more: ten.step_seconds(
        model, ten.Layout(n, zero=zero), cluster, replace(software, **more), n * m)["dp"]
    for zero, width in enumerate((2 * 4, 4 + 2, m * 4 + 2, m * (2 + 2 + 4))):
        assert seconds(zero) == pytest.approx(width * of_numbers)
    assert seconds(3, dp_hidden=1) < seconds(3, dp_hidden=0.5) < seconds(3)
    assert seconds(1, dp_hidden=1) < seconds(1)


def test_a_ring_of_keys_hides_behind_attention_and_keeps_its_own_alone(ten):
    model, layout = ten.MODELS["8b"], ten.Layout(cp=4)
    machine = lambda nvlink, **more: ten.Machine(replace(ten.CLUSTERS["h100"], nvlink=nvlink),
                                                 ten.Software(**more))
    cp = lambda *args, **more: [part["cp"] for part in ten.layer_seconds(
        model, layout, machine(*args, **more))]
    gathered, ring = ten.Software(), ten.Software(ring=True)
    assert cp(450e9, ring=True) == [0, 0]
    (forward, backward), (gather, scatter) = cp(1e8, ring=True), cp(1e8)
    attention = [part["attention"] for part in ten.layer_seconds(model, layout, machine(1))]
    assert forward == pytest.approx(gather - attention[0])
    assert backward == pytest.approx(2 * scatter - attention[1])
    keys = lambda software: layout.shares(model, software)["keys and values"]
    assert (keys(gathered), keys(ring)) == (1, 1 / 4)


def test_the_slowest_stage_has_the_head_or_one_layer_more(ten):
    h100, software = ten.CLUSTERS["h100"], ten.SOFTWARE["ours"]
    of_layers = lambda layers, vocab=1: ten.step_seconds(
        ten.gpt(layers, 1024, 16, vocab=vocab), ten.Layout(pp=4), h100, software, 8)["matmul"]
    assert of_layers(13) == pytest.approx(of_layers(16), rel=0.01)      # 4 3 3 3, as 4 4 4 4
    with_head = of_layers(16, vocab=60000)
    assert of_layers(15, vocab=60000) < with_head                       # 4 4 4 3 and the head
    assert of_layers(13, vocab=60000) == of_layers(15, vocab=60000)


def test_the_first_stage_keeps_most_or_the_last_one_with_its_logits(ten):
    software = ten.SOFTWARE["megatron-2024"]
    kept = lambda vocab, **layout: ten.memory(ten.gpt(8, 1024, 16, vocab=vocab), ten.Layout(
        **layout), software, 8)["activations"]
    block = ten.kept_by_layer(ten.gpt(8, 1024, 16), ten.Layout(), software)
    assert kept(1000, pp=4) == 4 * 2 * block                            # of four micro-batches
    assert kept(10**6, pp=4) == 2 * block + 8 * 2048 * 10**6
    assert kept(1000) == 8 * block + 8 * 2048 * 1000


def test_the_bubble_is_that_of_stages_without_the_head(ten):
    """The first micro-batch goes through the other stages, which have none."""
    waits = lambda vocab: ten.step_seconds(
        ten.gpt(16, 1024, 16, vocab=vocab), ten.Layout(pp=4), ten.CLUSTERS["h100"],
        ten.SOFTWARE["megatron-2024"], 8)["bubble"]
    assert waits(1) == waits(128256)


def test_micro_batches_are_enough_for_their_schedule(ten):
    """What is accepted has the bubble of chapter 07's formula, which is None for too few."""
    seven, model = chapter("07_pipeline_parallel"), ten.gpt(16, 64, 4, seq=32, vocab=256)
    names = {"1f1b": "1f1b", "zero-bubble": "zb-h1", "dualpipe-v": "dualpipe-v"}
    for (ours, theirs), p, m in itertools.product(names.items(), (2, 4), range(1, 10)):
        refused = ten.misfit(model, ten.Layout(pp=p, schedule=ours), p, m)
        least = {"zero-bubble": p, "dualpipe-v": 2 * p}.get(ours, 1)
        assert bool(refused) == (m < least)
        assert refused or seven.bubble(theirs, p, m, 1) is not None
    fits = [m for m in range(1, 9) if not ten.misfit(model, ten.Layout(pp=4, v=2), 4, m)]
    assert fits == [4, 8]


def test_messages_hide_behind_no_more_than_there_is(ten):
    software = ten.SOFTWARE["megatron-2024"]
    slow = ten.Machine(replace(ten.CLUSTERS["h100"], nvlink=1e9), software)
    model, layout = ten.MODELS["8b"], ten.Layout(tp=8)
    sent = slow.ring(2 * 4 * 8192 * 4096, 8, 1, 4)
    for part in ten.layer_seconds(model, layout, slow):
        assert part["tp"] == pytest.approx(sent - part["matmul"])
    # ZeRO-3's gathers of forward behind forward, the others behind backward.
    quick = ten.step_seconds(model, ten.Layout(8, zero=3), ten.CLUSTERS["h100"], software, 8)
    assert quick["dp"] == 0
    cluster = replace(ten.CLUSTERS["h100"], nvlink=40e9)
    forward, backward = (sum(part.values()) * 32 for part in ten.layer_seconds(
        model, ten.Layout(8, zero=3), ten.Machine(cluster, software)))
    bytes_of = ten.Machine(cluster, software).ring(model.parameters(), 8, 1, 32)
    head = ten.step_seconds(model, ten.Layout(8, zero=3), cluster, software, 8)["dp"]
    assert head == pytest.approx(max(0, 2 * bytes_of - 0.9 * forward)
                                 + max(0, 6 * bytes_of - 0.9 * backward), rel=0.01)


def test_hops_take_time_within_a_node_and_between_nodes(ten):
    cluster = replace(ten.CLUSTERS["h100"], alpha=1.0, nic_alpha=100.0)
    ring = lambda n, stride: ten.Machine(cluster, ten.Software()).ring(0, n, stride)
    assert ring(8, 1) == 7 and ring(16, 1) == 2 * 100 + 13      # two of 15 hops leave a node
    assert ring(4, 8) == 300 and ring(1, 8) == 0
    assert ring(12, 1) == 2 * 100 + 9                           # to the node of four, and back
    at = lambda n: ten.step_seconds(ten.MODELS["8b"], ten.Layout(n, zero=3), ten.CLUSTERS["h100"],
                                    ten.SOFTWARE["torchtitan"], n)["dp"]
    assert at(4096) > at(64)                                    # a ring of more ranks has more hops


@pytest.mark.parametrize("name", ["8b", "gpt3", "mixtral"])
def test_matmuls_are_those_whose_flops_are_counted(ten, name):
    """All matmuls of a step, with a memory that takes no time: as many FLOPs as step_flops has."""
    model = replace(ten.MODELS[name], seq=1024)
    cluster = ten.Cluster(1e15, 1, 1, 1e40, 1e9, nvlink=1e30, nic=1e30)
    software = replace(ten.SOFTWARE["torchtitan"], flash=False)
    for layout in (ten.Layout(micro_batch=2), ten.Layout(recompute="full"), ten.Layout(2, 2, 2)):
        seconds = ten.step_seconds(model, layout, cluster, software, 4)
        ranks = layout.dp * layout.tp * layout.cp
        assert (seconds["matmul"] + seconds["attention"]) * 1e15 * ranks == pytest.approx(
            ten.step_flops(model, 4, recompute=layout.recompute))


def test_flash_attention_computes_half_of_the_scores_and_backward_five_products(ten):
    model, cluster = ten.MODELS["8b"], ten.CLUSTERS["h100"]
    attention = lambda **layout: [part["attention"] for part in ten.layer_seconds(
        model, ten.Layout(**layout), ten.Machine(cluster, ten.Software()))]
    product = model.seq**2 * model.dim / (cluster.peak * cluster.attention)
    assert attention() == pytest.approx([2 * product, 5 * product])
    assert attention(tp=4, cp=2, micro_batch=2) == pytest.approx([product / 2, 5 * product / 4])


def test_a_mixture_keeps_and_sends_for_each_expert_of_a_token(ten):
    model = ten.MODELS["mixtral"]
    inside = lambda top_k: ten.numbers_kept(replace(model, top_k=top_k), 64,
                                            ten.Software())["inside"]
    assert inside(2) - inside(1) == 64 * (3 * model.ffn + model.dim)
    numbers, ranks, _, calls = ten.messages(model, ten.Layout(8, ep=4))["ep"]
    assert (numbers, ranks, calls) == (2 * 2 * model.seq * model.dim, 4, 2)
    backward = ten.layer_seconds(model, ten.Layout(8, ep=4), ten.Machine(
        ten.CLUSTERS["h100"], ten.SOFTWARE["torchtitan"]))[1]
    assert backward["ep"] > 0
    assert backward["weights"] == pytest.approx(
        12 * model.weights(2) / (ten.CLUSTERS["h100"].hbm * ten.HBM))


def test_cp_ranks_share_gradients_and_states_as_dp_ranks_do(ten):
    model, h100 = ten.MODELS["1b"], ten.CLUSTERS["h100"]
    software = replace(ten.SOFTWARE["torchtitan"], dp_hidden=0)
    dp = lambda **layout: ten.step_seconds(model, ten.Layout(**layout), h100, software, 64)["dp"]
    assert dp(dp=2, cp=2) == pytest.approx(dp(dp=4)) and dp(cp=4) == pytest.approx(dp(dp=4))
    assert dp(dp=4, cp=16) == pytest.approx(dp(dp=64))      # over the network
    fit, _ = ten.search(replace(ten.MODELS["8b"], seq=262144), h100,
                        software, 8, 8, {"cp": 8})
    assert fit[0].layout.zero == 3 and not fit[0].why   # with dp 1, over the ranks of cp


def test_what_hides_where(ten):
    """tp's messages in forward and in backward; dp's behind the last backward alone."""
    model, h100, layout = ten.MODELS["8b"], ten.CLUSTERS["h100"], ten.Layout(tp=8)
    tp = lambda **software: [part["tp"] for part in ten.layer_seconds(
        model, layout, ten.Machine(h100, ten.Software(**software)))]
    [shown, _], [half, whole] = tp(), tp(tp_hidden=0.5)
    assert half == pytest.approx(shown / 2) and whole == pytest.approx(shown)
    dp = lambda batch: ten.step_seconds(model, ten.Layout(8), replace(h100, nvlink=2e10),
                                        ten.SOFTWARE["torchtitan"], batch)["dp"]
    assert dp(8) == dp(64) > 0


def test_links_are_slower_the_further_they_go(ten):
    for name, cluster in ten.CLUSTERS.items():
        assert cluster.nic < cluster.nvlink < cluster.hbm, name
    bits = {"a100": (600e9, 200e9), "h100": (900e9, 400e9), "b200": (1800e9, 400e9),
            "h800": (400e9, 400e9), "gb200": (1800e9, 400e9), "gb300": (1800e9, 800e9)}
    for name, (both_ways, bits_per_second) in bits.items():     # as data sheets give them
        assert ten.CLUSTERS[name].nvlink == both_ways / 2
        assert ten.CLUSTERS[name].nic == bits_per_second / 8


def test_an_explanation_agrees_with_the_plans_it_speaks_of(ten):
    model, h100, software = ten.MODELS["70b"], ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"]
    plan = ten.Plan(model, ten.Layout(8, 8, pp=4, v=4, zero=1), h100, software, 256, 256)
    lines = list(planning.explain(ten, model, h100, software, 256, 256, plan))
    told = {line.split(" it would")[0].removeprefix("  with "): line for line in lines[2:]}
    for name, dp, change in (("tp 4", 16, {"tp": 4}), ("pp 8", 4, {"pp": 8, "v": 2}),
                             ("recompute full", 8, {"recompute": "full"})):
        other = ten.Plan(model, replace(plan.layout, dp=dp, **change), h100, software, 256, 256)
        share = other.total / plan.total - 1
        assert f"take {abs(share):.0%} {'more' if share > 0 else 'less'} time" in told[name]
        cause = told[name].partition("mostly ")[2].split()[0]
        sign = told[name].partition("mostly ")[2].split()[1][0]
        assert (sign == "+") == (other.seconds[cause] > plan.seconds[cause])
    alone = ten.Plan(ten.MODELS["8b"], ten.Layout(8, zero=3), h100, software, 8, 64)
    [line] = [line for line in planning.explain(ten, ten.MODELS["8b"], h100, software, 8, 64, alone)
              if "with tp 2" in line]
    beside = ten.Plan(ten.MODELS["8b"], ten.Layout(4, 2, zero=3), h100, software, 8, 64)
    assert f"{beside.total / alone.total - 1:.0%} more" in line  # with sequence parallelism


def test_presets_have_their_sizes(ten):
    sizes = {"1b": 1.24, "7b": 6.74, "8b": 8.03, "70b": 70.6, "405b": 405.9, "gpt3": 174.6,
             "mixtral": 46.7}
    for name, size in sizes.items():
        assert ten.MODELS[name].parameters() / 1e9 == pytest.approx(size, rel=0.01), name


def test_fp8_halves_what_is_read_and_casts_it(ten):
    machine = ten.Machine(ten.Cluster(1e12, 1, 1, 1e12 / ten.HBM, 1, 1, 1), ten.Software())
    flops, numbers = 2 * 8 * 16 * 32 / 1e12, (8 * 16 + 16 * 32) / 1e12
    assert machine.matmul(8, 16, 32) == pytest.approx(flops + 2 * numbers + 2 * 8 * 32 / 1e12)
    assert machine.matmul(8, 16, 32, fp8=True) == pytest.approx(
        flops / ten.FP8 + numbers + 2 * 8 * 32 / 1e12)
    model, layout = ten.gpt(1, 64, 4, seq=32), ten.Layout()
    elementwise = [sum(part["elementwise"] for part in ten.layer_seconds(model, layout, ten.Machine(
        machine.cluster, ten.Software(fp8=fp8)))) for fp8 in (False, True)]
    inputs, outputs = 32 * (64 + 64 + 64 + 256), 32 * (3 * 64 + 64 + 256 + 64)
    assert elementwise[1] - elementwise[0] == pytest.approx(4 * (inputs + outputs) / 1e12)


def test_a_message_costs_what_its_hops_do(ten):
    machine = ten.Machine(replace(ten.CLUSTERS["h100"], alpha=1.0), ten.Software())
    assert machine.ring(1, 4, 1, calls=5) == pytest.approx(3 * 5)
    model, layout = ten.MODELS["8b"], ten.Layout(tp=4)
    tp = [part["tp"] for part in ten.layer_seconds(model, layout, machine)]
    assert tp == pytest.approx([4 * 3, 4 * 3], rel=0.1)                 # four gathers and scatters


# --------------------------------------------------------------------------------------- the search


def test_the_search_finds_what_trying_all_finds(ten):
    model, cluster = replace(ten.MODELS["8b"], seq=8192), ten.CLUSTERS["h100"]
    software, fixed = ten.SOFTWARE["torchtitan"], {"v": 1, "ep": 1}
    fit, _ = ten.search(model, cluster, software, 16, 32, fixed, most=2)
    best = math.inf
    for dp, tp, cp, pp, zero, b, again in itertools.product(
            *[(1, 2, 4, 8, 16)] * 4, (0, 1, 3), (1, 2), ("none", "full")):
        layout = ten.Layout(dp, tp, cp, pp, 1, 1, zero, tp > 1, b, again)
        if tp <= 8 and cp <= 2 and ten.misfit(model, layout, 16, 32) is None:
            needed = ten.memory(model, layout, software, 32 // dp // b)
            if sum(needed.values()) <= ten.ROOM * cluster.memory:
                best = min(best, sum(ten.step_seconds(model, layout, cluster, software,
                                                      32).values()))
    assert fit[0].total == best
    assert [plan.total for plan in fit] == sorted(plan.total for plan in fit)


def test_the_layouts_of_llama_3_fit_by_what_its_software_frees(ten):
    """Table 4's: each of the three needs both. A run of pp micro-batches sends one sum, and has the
    gradients of a slice as a whole."""
    llama, h100 = ten.SOFTWARE["llama3"], ten.CLUSTERS["h100"]
    layout, model = ten.Layout(64, 8, 1, 16, 8, zero=2), ten.MODELS["405b"]
    sums, none = (ten.Plan(model, layout, h100, software, 8192, 2048)
                  for software in (llama, replace(llama, sums_runs=False)))
    slice_of_gpu = ten.layer_of_gpu(model, layout, llama)
    assert sums.memory["gradients"] == none.memory["gradients"] + 4 * slice_of_gpu
    assert none.total > 1.3 * sums.total
    kept = ten.Plan(model, layout, h100, replace(llama, swiglu_kept=3), 8192, 2048)
    hidden = 2 * 8192 * model.ffn / 8                   # a product, which backward writes once more
    slower = 32 * 8 * hidden / (h100.hbm * ten.HBM)
    assert sums.seconds["elementwise"] - kept.seconds["elementwise"] == pytest.approx(slower)
    fits = lambda software, zero: [size < 80 * ten.ROOM for *_, size in published.llama_3(
        ten, software, zero)]
    assert fits(llama, 2) == [True] * 3 and fits(llama, 1) == [False] * 3
    assert fits(replace(llama, swiglu_kept=3), 2) == [False, False, False]


def test_the_search_keeps_to_what_is_given_and_is_quick(ten):
    begin = time.perf_counter()
    fixed = {"tp": 8, "micro_batch": 1, "recompute": "full"}
    fit, _ = ten.search(ten.MODELS["405b"], ten.CLUSTERS["h100"], ten.SOFTWARE["llama3"], 16384,
                        2048, fixed)
    assert time.perf_counter() - begin < 10
    assert fit and all(asdict(plan.layout) | fixed == asdict(plan.layout) for plan in fit)
